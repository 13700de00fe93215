//! CUDA: what is present, kernels compiled at run time, memory, streams, launches.
//!
//! The only module that calls the driver and NVRTC. Nothing here is needed to build or to start the program: libraries
//! are looked for when first asked for, and every answer to "is it there" is a value, never a panic.
//!
//! - [`is_available`] and [`probe`] say what was found.
//! - [`Device`] opens a GPU, whose kernels are compiled through NVRTC or taken from a cache of files; [`Buffer`] owns
//!   device memory, [`Stream`] orders work, [`Graph`] replays it.
//! - [`View`] is an array in device memory that belongs to somebody else; [`KeepCurrent`] restores the caller's current
//!   device, and [`OutsideCaptures`] keeps what sets up out of another thread's capture.
//!
//! Foreign memory is unsafe once, where a [`View`] or an engine over addresses is made; launches state why their
//! arguments fit. What the kernels compute is [`crate::device`]'s business.
//!
//! What it does not do: allocate or synchronise behind the caller's back once set up; own memory or streams of others.

mod cache;
mod device;
mod driver;
mod kernel;
mod library;
mod nvrtc;
pub(crate) mod per_key;
mod pointer;
mod probe;
mod side;
pub(crate) mod sources;
mod stream;
pub(crate) mod tensor_map;
mod view;

pub use device::{Buffer, Device};
pub use driver::{KeepCurrent, OutsideCaptures};
// Hidden: tests launch a plain kernel beside ours.
#[doc(hidden)]
pub use kernel::{Arg, Kernel, Launch, Module};
pub(crate) use nvrtc::Request;
pub use nvrtc::{Arch, compiler_version};
#[cfg(test)]
pub(crate) use nvrtc::{compile, compiler_build};
pub use pointer::DevicePtr;
pub use probe::{Probe, is_available, probe, require};
pub(crate) use side::SideStreams;
#[doc(hidden)]
pub use sources::Source;
pub use stream::{Event, Graph, Stream};
pub use view::{Element, View};
