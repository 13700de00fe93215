//! Finding the driver and NVRTC.
//!
//! The loader is asked for bare names only (`libcuda.so.1`, `libnvrtc.so.13`). Where NVRTC is not on its path, the
//! library is loaded once by its full path, from a toolkit (`CUDA_HOME`, `/usr/local/cuda`) or from the wheels of the
//! active Python environment; the bare name is then answered by what is already loaded.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

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
    matches!(super::driver::device_count(), Ok(n) if n > 0) && compiler_library().is_ok()
}

/// Nothing where [`is_available`], otherwise what is missing and what to do, in one sentence.
///
/// # Errors
/// `is_cuda`.
pub fn require() -> crate::error::Result<()> {
    if is_available() {
        return Ok(());
    }
    let missing = match super::driver::device_count() {
        Err(missing) => format!("{missing}; a GPU needs NVIDIA's driver, which brings it"),
        Ok(0) => "the driver lists no device; check CUDA_VISIBLE_DEVICES and nvidia-smi".into(),
        Ok(_) => compiler_library().err().unwrap_or("NVRTC does not answer").to_owned(),
    };
    Err(crate::error::Error::cuda(format_args!("no GPU can be used: {missing}")))
}

/// What was found and what is missing. Never panics.
pub fn probe() -> Probe {
    Probe {
        driver: super::driver::version(),
        devices: super::driver::device_count(),
        compiler: super::nvrtc::compiler_version().map_err(|e| e.to_string()),
        compiler_from: compiler_library().ok().map(str::to_owned),
        cache: super::cache::default_folder(),
    }
}

/// Makes NVRTC loadable by its bare name; tells where it came from. Looked for once a process.
pub(super) fn compiler_library() -> Result<&'static str, &'static str> {
    static FOUND: OnceLock<Result<String, String>> = OnceLock::new();
    const ADVICE: &str = "install a CUDA 13 toolkit, set CUDA_HOME, or activate a Python environment with the wheel \
                          nvidia-cuda-nvrtc";
    let found = FOUND.get_or_init(|| {
        let from = find_compiler().ok_or_else(|| format!("NVRTC (libnvrtc.so.13) was not found: {ADVICE}"))?;
        let (major, minor) = super::nvrtc::loaded_version()?;
        if major < OLDEST_COMPILER {
            return Err(format!(
                "NVRTC of CUDA {major}.{minor} is too old (from {from}): take it off the loader's path, and {ADVICE}"
            ));
        }
        match super::driver::version() {
            Ok((driver, _)) if driver < major => Err(format!(
                "NVRTC of CUDA {major}.{minor} (from {from}) compiles what a driver for CUDA {driver} cannot load: update the driver"
            )),
            _ => Ok(from),
        }
    });
    found.as_ref().map(String::as_str).map_err(String::as_str)
}

/// Hopper's kernels need what came with CUDA 12.
const OLDEST_COMPILER: i32 = 12;

fn find_compiler() -> Option<String> {
    if super::nvrtc::library_loads() {
        return Some("loader".into());
    }
    candidate_folders().into_iter().find_map(|folder| {
        let library = folder.join("libnvrtc.so.13");
        if !library.exists() {
            return None;
        }
        // NVRTC opens its builtins by bare name and carries no search path: load them first.
        let mut builtins: Vec<PathBuf> = entries(&folder)
            .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libnvrtc-builtins.so.13.")))
            .collect();
        builtins.sort();
        for path in builtins {
            super::driver::load_for_ever(&path);
        }
        (super::driver::load_for_ever(&library) && super::nvrtc::library_loads()).then(|| library.display().to_string())
    })
}

/// Folders that may hold CUDA libraries, best first.
fn candidate_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let toolkits = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    for root in toolkits.chain([PathBuf::from("/usr/local/cuda")]) {
        folders.extend(["lib64", "targets/x86_64-linux/lib", "lib"].map(|s| root.join(s)));
    }
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let pythons = std::env::split_paths(&path)
        .filter(|bin| bin.join("python3").exists())
        .filter_map(|bin| bin.parent().map(Path::to_path_buf))
        .collect::<Vec<_>>();
    for root in environments.chain(pythons) {
        for python in entries(&root.join("lib")) {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = python.join(packages).join("nvidia");
                folders.push(nvidia.join("cu13/lib"));
                folders.push(nvidia.join("cuda_nvrtc/lib"));
            }
        }
    }
    folders.retain(|f| f.is_dir());
    folders.dedup();
    folders
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path())
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
            let error = super::super::Device::open(0).err();
            let named = found.compiler.is_err() || found.devices.is_err() || found.devices == Ok(0);
            assert!(named && error.is_none_or(|e| e.is_cuda()), "{found:?}");
        }
    }
}
