//! The CUDA module where there may be no GPU: what is missing is said, and compiled kernels survive two processes and
//! damage.

use sigmascale::cuda::cache::Cache;
use sigmascale::cuda::{self, Arch, Compiled, Device, Request, sources};
use sigmascale::device::DeviceBounds;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Folder that a child fills; set for children alone.
const CHILD: &str = "SIGMASCALE_TEST_CACHE_CHILD";

fn request() -> Request {
    Request::new(sources::GAINS, Arch::SM90A).define("TEST", 1)
}

fn cubin() -> Compiled {
    Compiled { cubin: (0..20_000u32).map(|i| ((i * 31) >> 3) as u8).collect(), log: "Used 40 registers".into() }
}

fn child(test: &str, folder: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn processes_fill_one_cache_at_once() {
    if let Some(folder) = std::env::var_os(CHILD) {
        for _ in 0..200 {
            let cache = Cache::new(Some(folder.clone().into()));
            assert_eq!(cache.get_or_build(&request(), "13.0", || Ok(cubin())).unwrap(), cubin());
            // Somebody clears the cache now and then.
            let entry = std::fs::read_dir(&folder).unwrap().flatten().find(|e| e.path().extension().is_some());
            if let Some(entry) = entry {
                let _ = std::fs::remove_file(entry.path());
            }
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let children: Vec<Child> = (0..3).map(|_| child("processes_fill_one_cache_at_once", folder.path())).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    // What is left is whole.
    let built = std::cell::Cell::new(false);
    let cache = Cache::new(Some(folder.path().into()));
    cache.get_or_build(&request(), "13.0", || Ok(cubin())).unwrap();
    cache
        .get_or_build(&request(), "13.0", || {
            built.set(true);
            Ok(cubin())
        })
        .unwrap();
    assert!(!built.get());
}

#[test]
fn without_a_gpu_everything_is_an_error_that_says_what_is_missing() {
    match cuda::require() {
        Ok(()) => {
            assert!(cuda::is_available());
            println!("ignored: without_a_gpu_everything_is_an_error_that_says_what_is_missing: there is one");
        }
        Err(missing) => {
            assert!(!cuda::is_available() && missing.is_cuda());
            let text = missing.to_string();
            let named = ["libcuda", "no device", "NVRTC", "driver"].iter().any(|part| text.contains(part));
            assert!(named && text.lines().count() == 1, "{text}");
            assert_eq!(DeviceBounds::open().unwrap_err().to_string(), text);
            if cuda::probe().devices.is_err() {
                assert!(Device::open(0).unwrap_err().is_cuda());
            }
        }
    }
}

#[test]
fn without_a_compiler_the_way_to_one_is_named() {
    // NVRTC is looked for once a process, and the environment of this one may have it.
    if std::env::var_os(CHILD).is_some() {
        println!("compiler: {:?}", cuda::compiler_version().map_err(|e| e.to_string()));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["without_a_compiler_the_way_to_one_is_named", "--exact", "--nocapture"])
        .env_clear()
        .env(CHILD, folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    let toolkit = said.contains("compiler: Ok(");
    assert!(toolkit || (said.contains("libnvrtc.so.13") && said.contains("CUDA_HOME")), "{said}");
}

#[test]
fn a_failed_compilation_gives_the_whole_log_and_keeps_nothing() {
    if !cuda::is_compiler_available() {
        println!("ignored: a_failed_compilation_gives_the_whole_log_and_keeps_nothing: no NVRTC");
        return;
    }
    let text = "__device__ void first() { missing_one; }\n__device__ void second() { missing_two; }\n";
    let broken = Request::new(sources::Source { name: "broken", text }, Arch::SM90A);
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(Some(folder.path().into()));
    let error = cache.get_or_build(&broken, "13.0", || cuda::compile(&broken)).unwrap_err().to_string();
    for part in ["broken does not compile for sm_90a", "broken(1)", "missing_one", "broken(2)", "missing_two"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    // A damaged entry of a real kernel is compiled again, to the same bytes.
    let good = Request::new(sources::GAINS, Arch::SM90A);
    let first = cache.get_or_build(&good, "13.0", || cuda::compile(&good)).unwrap();
    let path = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    // The log holds a time.
    let again = cache.get_or_build(&good, "13.0", || cuda::compile(&good)).unwrap();
    assert!(again.cubin == first.cubin, "other bytes");
}
