//! Forms of the forward kernel that are measured before one of them becomes the default.

use super::variant::Pv;
use crate::cuda::Request;
use crate::error::{Error, Result};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Names and the macros that they stand for.
const NAMES: [(&str, &[(&str, u32)]); 6] = [
    ("sums", &[("ROW_SUMS", 1)]),
    ("narrow", &[("ROW_SUMS", 1), ("NARROW", 1)]),
    ("inplace", &[("ROW_SUMS", 1), ("IN_PLACE", 1)]),
    ("bulk", &[("BULK_STORE", 1)]),
    ("narrow-bulk", &[("ROW_SUMS", 1), ("NARROW", 1), ("BULK_STORE", 1)]),
    ("turns", &[("ROW_SUMS", 1), ("IN_PLACE", 2)]),
];
/// The options of kernels to come, one more than their number.
static CHOSEN: AtomicU32 = AtomicU32::new(0);

/// What the forward kernel is compiled with beside what a call asks for: nothing by default. Kept for the kernels that are loaded
/// after [`choose`](Self::choose); the first is that of `SIGMASCALE_KERNEL_OPTION`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct KernelOption(u32);

impl KernelOption {
    /// One of `NAMES`, `probe-1` to `probe-7` (parts of the mainloop, which compute nothing), or nothing.
    pub fn parse(name: &str) -> Result<Self> {
        if name.is_empty() {
            return Ok(Self(0));
        }
        let probe = name.strip_prefix("probe-").and_then(|n| n.parse().ok()).filter(|n| (1..=7).contains(n));
        let known = NAMES.iter().position(|(known, _)| *known == name);
        let number = known.map(|i| 1 + i as u32).or(probe.map(|n: u32| 100 + n));
        number.map(Self).ok_or_else(|| Error::argument(format_args!("{name} is no option of the attention kernel")))
    }

    /// For the kernels loaded from now on.
    pub fn choose(self) {
        CHOSEN.store(1 + self.0, Ordering::Relaxed);
    }

    /// Of a call: options are for heads of 128 without telemetry whose P V is promoted after every tile.
    pub(super) fn of(plain: bool, pv: Pv) -> Self {
        static FIRST: OnceLock<KernelOption> = OnceLock::new();
        if !(plain && pv == Pv::Promote) {
            return Self(0);
        }
        match CHOSEN.load(Ordering::Relaxed) {
            0 => *FIRST.get_or_init(|| {
                let name = std::env::var("SIGMASCALE_KERNEL_OPTION").unwrap_or_default();
                Self::parse(&name).expect("SIGMASCALE_KERNEL_OPTION")
            }),
            chosen => Self(chosen - 1),
        }
    }

    pub(super) fn define(self, request: Request) -> Request {
        match self.0 {
            0 => request,
            probe @ 100.. => request.define("PROBE", probe - 100),
            i => NAMES[i as usize - 1].1.iter().fold(request, |request, (name, value)| request.define(name, value)),
        }
    }
}

/// The kernels of every option.
pub fn option_variants(of: impl Fn(KernelOption) -> Vec<Request>) -> Vec<Request> {
    (1..=NAMES.len() as u32).chain(101..=107).flat_map(|i| of(KernelOption(i))).collect()
}
