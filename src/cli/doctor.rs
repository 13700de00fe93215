//! `sigmascale doctor`: what this machine has, what is missing, what to do.

use super::output::OutputArgs;
use serde::Serialize;
use sigmascale::Result;
use sigmascale::cuda;
use sigmascale::model::preset_names;
use std::fmt::Write;
use std::path::PathBuf;

/// GPU, driver, compiler and kernel cache: what was found, what is missing, what to do
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
    /// Kernels kept, and their size.
    entries: usize,
    bytes: u64,
    /// Whether a new one could be kept; null before the folder is made.
    writable: Option<bool>,
}

/// What the CUDA module found. `available`: kernels can be compiled and launched.
#[derive(Serialize)]
struct Gpu {
    available: bool,
    facts: Vec<Fact>,
    /// What to do, a sentence each.
    advice: Vec<String>,
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
    let mut advice: Vec<String> = cuda::require().err().iter().map(ToString::to_string).collect();
    for ordinal in 0..*probe.devices.as_ref().unwrap_or(&0) {
        let found = cuda::Device::open(ordinal);
        if let Ok(device) = &found {
            advice.extend(limits(device.arch()).map(|limit| format!("gpu {ordinal}: {limit}")));
        }
        facts.push(fact(&format!("gpu {ordinal}"), found.and_then(|found| device(&found)).map_err(|e| e.to_string())));
    }
    Gpu { available: cuda::is_available(), facts, advice }
}

/// What an architecture cannot do.
fn limits(arch: cuda::Arch) -> Option<String> {
    match arch.compute {
        90 => None,
        80.. => Some(format!("{arch} runs the scale engine without its tensor-core path; FP8 attention needs sm_90a")),
        _ => Some(format!("{arch} is older than sm_80, the first that the kernels are compiled for")),
    }
}

/// Name, architecture and memory of one device.
fn device(device: &cuda::Device) -> Result<String> {
    let (free, total) = device.memory()?;
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    Ok(format!(
        "{}, {}, {} multiprocessors, {:.1} of {:.1} GiB free",
        device.name()?,
        device.arch(),
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
            (Some(folder), true) => {
                let cache = &report.cache;
                let closed = if cache.writable == Some(false) { "; it cannot be written" } else { "" };
                format!("{}, {} kernels, {} KiB{closed}", folder.display(), cache.entries, cache.bytes.div_ceil(1024))
            }
            (Some(folder), false) if folder.symlink_metadata().is_ok() => {
                format!("{} is no folder: kernels are compiled anew in every process", folder.display())
            }
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
        "not available; only bench and --device cuda need one"
    };
    line("gpu", gpu.to_owned());
    for advice in &report.gpu.advice {
        line("to do", advice.clone());
    }
    out
}
