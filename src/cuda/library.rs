//! Finding NVRTC.
//!
//! The loader is asked for bare names only (`libcuda.so.1`, `libnvrtc.so.13`). Where NVRTC is not on its path, the
//! library is loaded once by its full path, from a toolkit (`CUDA_HOME`, `/usr/local/cuda`) or from the wheels of the
//! active Python environment; the bare name is then answered by what is already loaded.

use cudarc::nvrtc::sys;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Makes NVRTC loadable by its bare name; tells where it came from. Looked for once a process.
pub(super) fn compiler_library() -> Result<&'static str, &'static str> {
    static FOUND: OnceLock<Result<String, String>> = OnceLock::new();
    const ADVICE: &str = "install a CUDA 13 toolkit, set CUDA_HOME, or activate a Python environment with the wheel \
                          nvidia-cuda-nvrtc";
    let found = FOUND.get_or_init(|| {
        let from = find_compiler().ok_or_else(|| format!("NVRTC (libnvrtc.so.13) was not found: {ADVICE}"))?;
        let (major, minor) = loaded_version()?;
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
    if library_loads() {
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
        (super::driver::load_for_ever(&library) && library_loads()).then(|| library.display().to_string())
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

/// The version of the NVRTC that was loaded.
pub(super) fn loaded_version() -> std::result::Result<(i32, i32), String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is present, and both pointers are to live integers.
    super::driver::answered("NVRTC", || unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?
        .result()
        .map_err(|e| format!("NVRTC does not tell its version: {e}"))?;
    Ok((major, minor))
}

/// True if the loader finds NVRTC by its bare name.
fn library_loads() -> bool {
    // SAFETY: loading NVRTC runs its initialisers, which have no precondition; the handle is dropped again.
    unsafe { sys::is_culib_present() }
}
