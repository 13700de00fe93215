//! `sigmascale doctor`: what this machine has, what is missing, what to do.

use super::output::OutputArgs;
use serde::Serialize;
use sigmascale::Result;
use sigmascale::model::preset_names;
use std::fmt::Write;
use std::path::PathBuf;

/// What was found on this machine
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    output: OutputArgs,
}

/// Everything found, section by section.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    presets: usize,
    cpu: Cpu,
    cache: Cache,
    gpu: Gpu,
}

#[derive(Serialize)]
struct Cpu {
    architecture: &'static str,
    /// Threads that this process may use.
    threads: usize,
    features: Vec<&'static str>,
    memory_bytes: Option<u64>,
    available_bytes: Option<u64>,
}

/// Where compiled kernels are kept.
#[derive(Serialize)]
struct Cache {
    folder: Option<PathBuf>,
    exists: bool,
}

/// What the CUDA module adds its facts to.
#[derive(Serialize)]
struct Gpu {
    checked: bool,
    facts: Vec<Fact>,
    advice: Vec<String>,
}

#[derive(Serialize)]
struct Fact {
    name: String,
    value: String,
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    args.output.check()?;
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        presets: preset_names().count(),
        cpu: cpu(),
        cache: cache(),
        gpu: gpu(),
    };
    args.output.write(&report, table)
}

fn cpu() -> Cpu {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |key: &str| -> Option<u64> {
        let line = memory.lines().find(|line| line.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    Cpu {
        architecture: std::env::consts::ARCH,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        features: features(),
        memory_bytes: bytes("MemTotal:"),
        available_bytes: bytes("MemAvailable:"),
    }
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let all = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    all.into_iter().filter(|(_, found)| *found).map(|(name, _)| name).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

fn cache() -> Cache {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    let folder = base.map(|base| base.join("sigmascale"));
    Cache { exists: folder.as_ref().is_some_and(|folder| folder.is_dir()), folder }
}

fn gpu() -> Gpu {
    Gpu { checked: false, facts: Vec::new(), advice: Vec::new() }
}

fn table(report: &Report) -> String {
    let gib = |bytes: Option<u64>| match bytes {
        Some(bytes) => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
        None => "unknown".to_owned(),
    };
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<12} {value}");
    };
    line("sigmascale", format!("{}, {} presets", report.version, report.presets));
    let cpu = &report.cpu;
    let features = if cpu.features.is_empty() { "none known".to_owned() } else { cpu.features.join(" ") };
    line("cpu", format!("{}, {} threads, {features}", cpu.architecture, cpu.threads));
    line("memory", format!("{}, {} available", gib(cpu.memory_bytes), gib(cpu.available_bytes)));
    line(
        "cache",
        match (&report.cache.folder, report.cache.exists) {
            (Some(folder), true) => folder.display().to_string(),
            (Some(folder), false) => format!("{} (not made yet)", folder.display()),
            (None, _) => "no folder: set XDG_CACHE_HOME or HOME".to_owned(),
        },
    );
    if !report.gpu.checked {
        line("gpu", "not checked by this build; calibrate and inspect do not need one".to_owned());
    }
    for fact in &report.gpu.facts {
        line(&fact.name, fact.value.clone());
    }
    for advice in &report.gpu.advice {
        line("advice", advice.clone());
    }
    out
}
