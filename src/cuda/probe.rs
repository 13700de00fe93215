//! What this machine has for a GPU: driver, devices, NVRTC.

use super::cache::default_folder;
use super::driver;
use super::library::compiler_library;
use super::nvrtc::compiler_version;
use crate::error::Error;
use std::path::PathBuf;

/// What was found, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// CUDA version that the driver supports (major, minor), or why there is none.
    pub driver: Result<(i32, i32), String>,
    /// Number of devices, or why there is none.
    pub devices: Result<usize, String>,
    /// NVRTC's version, or why there is none.
    pub compiler: Result<(i32, i32), String>,
    /// Where NVRTC came from: "loader", or the path it was loaded from.
    pub compiler_from: Option<String>,
    /// Folder of compiled kernels, if one could be named.
    pub cache: Option<PathBuf>,
}

/// True if kernels can be compiled and launched here: a driver, at least one device, and NVRTC.
///
/// Never panics, whatever is missing. False also when a library is present and does not answer; [`probe`] says which.
///
/// ```
/// if !sigmascale::cuda::is_available() {
///     println!("{:?}", sigmascale::cuda::probe());
/// }
/// ```
pub fn is_available() -> bool {
    matches!(driver::device_count(), Ok(n) if n > 0) && compiler_library().is_ok()
}

/// Nothing where [`is_available`], otherwise what is missing and what to do, in one sentence.
///
/// # Errors
/// `is_cuda`.
pub fn require() -> crate::error::Result<()> {
    if is_available() {
        return Ok(());
    }
    let missing = match driver::device_count() {
        Err(missing) => format!("{missing}: install NVIDIA's driver"),
        Ok(0) => "the driver lists no device; check CUDA_VISIBLE_DEVICES and nvidia-smi".into(),
        Ok(_) => compiler_library().err().unwrap_or("NVRTC does not answer").to_owned(),
    };
    Err(Error::cuda(format_args!("no GPU can be used: {missing}")))
}

/// What was found and what is missing. Never panics.
pub fn probe() -> Probe {
    Probe {
        driver: driver::version(),
        devices: driver::device_count(),
        compiler: compiler_version().map_err(|e| e.to_string()),
        compiler_from: compiler_library().ok().map(str::to_owned),
        cache: default_folder(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asking_is_safe_whatever_is_missing() {
        let found = probe();
        let available = is_available();
        assert_eq!(available, found.compiler_from.is_some() && matches!(found.devices, Ok(n) if n > 0), "{found:?}");
        if available {
            assert!(found.driver.is_ok() && found.compiler.is_ok());
        } else {
            let error = crate::cuda::Device::open(0).err();
            let named = found.compiler.is_err() || found.devices.is_err() || found.devices == Ok(0);
            assert!(named && error.is_none_or(|e| e.is_cuda()), "{found:?}");
        }
    }
}
