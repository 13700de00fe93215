//! CUDA: what is present, kernels compiled at run time, memory, streams, launches.
//!
//! The only module that touches the driver and NVRTC, and the only one with `unsafe` code. Nothing here is needed to
//! build or to start the program: libraries are looked for when first asked for, and every answer to "is it there" is a
//! value, never a panic.
//!
//! - [`is_available`] and [`probe`] say what was found.
//! - [`Device`] opens a GPU, [`Device::module`] compiles one of [`sources`] through NVRTC (or takes it from the
//!   [`cache`]), [`Kernel`] launches it, [`Buffer`] owns device memory, [`Stream`] orders work, [`Graph`] replays it.
//! - [`View`] is an array in device memory that belongs to somebody else; [`KeepCurrent`] leaves somebody else's device current.
//! - [`attention`] holds the fused FP8 attention of Hopper.
//! - [`scale`] holds the kernels that turn weights into scales, [`policy`] those that turn bounds and statistics into
//!   plans.
//!
//! What it does not do: allocate or synchronise behind the caller's back once set up; own memory or streams of others.

pub mod attention;
pub mod cache;
mod cubin;
mod device;
mod driver;
mod heads;
mod kernel;
mod library;
mod nvrtc;
mod per_key;
pub mod policy;
pub mod scale;
pub mod sources;
mod step_stats;
mod view;

pub use device::{Buffer, Device, Event, Graph, Stream};
pub use driver::KeepCurrent;
pub use heads::HeadOffsets;
pub use kernel::{Arg, DevicePtr, Kernel, Launch, Module, Word};
pub use library::{Probe, is_available, probe, require};
pub use nvrtc::{
    Arch, Compiled, Request, ResourceUse, compile, compiler_build, compiler_version, is_compiler_available,
};
pub use step_stats::{CastWords, LogitWords, StepWords, ordered, stats_words, unordered};
pub use view::{Element, View};
