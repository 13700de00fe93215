//! Tests that need a GPU. Without one, each is reported as ignored, with the reason.
//!
//! A module a part of the crate; its `tests()` lists its cases (see `engine.rs`). Cases share one device and run one after
//! another, since a kernel that faults takes the context with it: the first failure is the one to read.

/// Names each function of a module as a case.
macro_rules! tests {
    ($($case:ident),* $(,)? $(; $($module:ident),*)?) => {
        /// The cases of this module, and of those in it.
        pub fn tests() -> Vec<libtest_mimic::Trial> {
            let own = vec![$(crate::case(concat!(module_path!(), "::", stringify!($case)), $case)),*];
            own.into_iter()$($(.chain($module::tests()))*)?.collect()
        }
    };
}

mod attention;
mod engine;
mod frobenius;
mod lost;
mod mixed;
mod mla;
mod norms;
mod policies;
mod power;
mod products;
mod qk_norm;
mod shapes;
mod small;
mod weights;

use libtest_mimic::{Arguments, Completion, Trial};
use sigmascale::cuda::{self, Device};
use std::process::ExitCode;
use std::sync::OnceLock;

fn main() -> ExitCode {
    if std::env::var_os(lost::LOSE).is_some() {
        lost::lose();
        return ExitCode::SUCCESS;
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    let cases = [
        attention::tests(),
        small::tests(),
        engine::tests(),
        frobenius::tests(),
        mla::tests(),
        norms::tests(),
        mixed::tests(),
        policies::tests(),
        power::tests(),
        products::tests(),
        qk_norm::tests(),
        shapes::tests(),
        lost::tests(),
    ];
    let cases = cases.into_iter().flatten().collect();
    libtest_mimic::run(&arguments, cases).exit_code()
}

/// The device that all cases share.
pub fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| Device::open(0).unwrap())
}

/// A case that panics when it fails, and is ignored where it cannot run.
fn case(path: &str, run: fn()) -> Trial {
    let name = path.split_once("::").map_or(path, |(_, name)| name).to_owned();
    Trial::ignorable_test(name, move || {
        if let Some(reason) = missing() {
            return Ok(Completion::ignored_with(reason));
        }
        run();
        Ok(Completion::Completed)
    })
}

/// Why kernels cannot run here; `None` where they can.
fn missing() -> Option<String> {
    if cuda::is_available() {
        return None;
    }
    let probe = cuda::probe();
    let reasons = [probe.driver.err(), probe.devices.err(), probe.compiler.err()];
    let reason = reasons.into_iter().flatten().next();
    Some(reason.unwrap_or_else(|| "the driver lists no device".into()))
}
