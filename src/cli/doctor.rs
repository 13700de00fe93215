//! `sigmascale doctor`: what this machine has, what is missing, what to do.

use super::output::OutputArgs;
use serde::Serialize;
use sigmascale::Result;
use sigmascale::cuda;
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

/// What the CUDA module found. `available`: kernels can be compiled and launched.
#[derive(Serialize)]
struct Gpu {
    available: bool,
    facts: Vec<Fact>,
}

#[derive(Serialize)]
struct Fact {
    name: String,
    found: bool,
    /// What was found, or what is missing and what to do.
    value: String,
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    args.output.check()?;
    let probe = cuda::probe();
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        presets: preset_names().count(),
        cpu: cpu(),
        gpu: gpu(&probe),
        cache: cache(probe.cache),
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

fn cache(folder: Option<PathBuf>) -> Cache {
    Cache { exists: folder.as_ref().is_some_and(|folder| folder.is_dir()), folder }
}

fn gpu(probe: &cuda::Probe) -> Gpu {
    let version = |(major, minor): &(i32, i32)| format!("CUDA {major}.{minor}");
    let fact = |name: &str, result: Result<String, String>| Fact {
        name: name.to_owned(),
        found: result.is_ok(),
        value: result.unwrap_or_else(|missing| missing),
    };
    let from = probe.compiler_from.as_deref().unwrap_or("unknown");
    let mut facts = vec![
        fact("driver", probe.driver.as_ref().map(version).map_err(Clone::clone)),
        fact(
            "gpus",
            match &probe.devices {
                Ok(0) => Err("the driver answers and has no device".to_owned()),
                Ok(count) => Ok(count.to_string()),
                Err(missing) => Err(missing.clone()),
            },
        ),
        fact("nvrtc", probe.compiler.as_ref().map(|v| format!("{}, from {from}", version(v))).map_err(Clone::clone)),
    ];
    for ordinal in 0..*probe.devices.as_ref().unwrap_or(&0) {
        facts.push(fact(&format!("gpu {ordinal}"), device(ordinal).map_err(|error| error.to_string())));
    }
    Gpu { available: cuda::is_available(), facts }
}

/// Name and memory of one device.
fn device(ordinal: usize) -> Result<String> {
    let device = cuda::Device::open(ordinal)?;
    let (free, total) = device.memory()?;
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    Ok(format!(
        "{}, {} multiprocessors, {:.1} of {:.1} GiB free",
        device.name()?,
        device.processors(),
        gib(free),
        gib(total)
    ))
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
            (None, _) => "no folder: set SIGMASCALE_CACHE, XDG_CACHE_HOME or HOME".to_owned(),
        },
    );
    for fact in &report.gpu.facts {
        let mark = if fact.found { "" } else { "missing: " };
        line(&fact.name, format!("{mark}{}", fact.value));
    }
    let gpu = if report.gpu.available {
        "kernels can be compiled and launched"
    } else {
        "not available; calibrate and inspect do not need one"
    };
    line("gpu", gpu.to_owned());
    out
}
