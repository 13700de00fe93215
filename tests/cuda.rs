//! The CUDA module where there may be no GPU: what is missing is said.

use sigmascale::cuda::{self, Device};
use sigmascale::device::DeviceBounds;
use std::process::Command;

/// Set for children alone.
const CHILD: &str = "SIGMASCALE_TEST_CHILD";

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
