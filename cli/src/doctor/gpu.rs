//! The GPU half of `doctor`.

use super::report::{Fact, Gpu};
use sigmascale::{Result, cuda};
use std::path::PathBuf;

/// What the driver and the compiler say, and the folder of compiled kernels.
pub(super) fn found() -> (Gpu, Option<PathBuf>) {
    let probe = cuda::probe();
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
    (Gpu { available: cuda::is_available(), facts, advice }, probe.cache)
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
