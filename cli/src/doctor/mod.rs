//! `sigmascale doctor`: what this machine has, what is missing, what to do.

#[cfg_attr(not(feature = "cuda"), path = "no_gpu.rs")]
mod gpu;
mod report;

use super::output::OutputArgs;
use super::table::wrapped;
pub use report::Fact;
use report::{Cache, Cpu, Report};
use sigmascale::Result;
use sigmascale::model::preset_names;
use std::path::PathBuf;

/// Check the GPU, its driver and NVRTC, and say what is missing and what to do
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
pub fn run(args: Args, plugins: Vec<Fact>) -> Result<()> {
    args.output.check()?;
    let (gpu, cache_folder) = gpu::found();
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        presets: preset_names().count(),
        cpu: cpu(),
        gpu,
        cache: cache(cache_folder),
        plugins,
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
    let exists = folder.as_ref().is_some_and(|folder| folder.is_dir());
    let kept: Vec<u64> = folder
        .iter()
        .filter_map(|folder| std::fs::read_dir(folder).ok())
        .flatten()
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "cubin"))
        .filter_map(|entry| Some(entry.metadata().ok()?.len()))
        .collect();
    // Asking the folder's permissions would not tell of a full or read-only disk.
    let writable = folder.as_deref().filter(|_| exists).map(|folder| {
        let probe = folder.join(format!(".doctor-{}", std::process::id()));
        std::fs::write(&probe, b"probe").and_then(|()| std::fs::remove_file(&probe)).is_ok()
    });
    Cache { exists, entries: kept.len(), bytes: kept.iter().sum(), writable, folder }
}

fn table(report: &Report) -> String {
    let gib = |bytes: Option<u64>| match bytes {
        Some(bytes) => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
        None => "unknown".to_owned(),
    };
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        out.push_str(&wrapped(&value, &format!("{name:<12} ")));
    };
    line("sigmascale", format!("{}, {} presets", report.version, report.presets));
    let cpu = &report.cpu;
    let features = if cpu.features.is_empty() { "none known".to_owned() } else { cpu.features.join(" ") };
    line("cpu", format!("{}, {} threads, {features}", cpu.architecture, cpu.threads));
    line("memory", format!("{}, {} available", gib(cpu.memory_bytes), gib(cpu.available_bytes)));
    line(
        "cache",
        match (&report.cache.folder, report.cache.exists) {
            (Some(folder), true) => {
                let cache = &report.cache;
                let closed = if cache.writable == Some(false) { "; it cannot be written" } else { "" };
                format!("{}, {} kernels, {} KiB{closed}", folder.display(), cache.entries, cache.bytes.div_ceil(1024))
            }
            (Some(folder), false) if folder.symlink_metadata().is_ok() => {
                format!("{} is not a folder: kernels are compiled again in every process", folder.display())
            }
            (Some(folder), false) => format!("{} (not created yet)", folder.display()),
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
        "not available; only bench and --device cuda need one"
    };
    line("gpu", gpu.to_owned());
    if report.plugins.is_empty() {
        line("plugins", "those of vLLM and SGLang come with the Python package, whose command reports them".to_owned());
    }
    for plugin in &report.plugins {
        let mark = if plugin.found { "" } else { "not used: " };
        line(&plugin.name, format!("{mark}{}", plugin.value));
    }
    for advice in &report.gpu.advice {
        line("to do", advice.clone());
    }
    out
}
