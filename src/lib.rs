#![doc = include_str!("../README.md")]
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

pub mod attention;
pub mod bound;
pub mod calibrate;
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "cuda")]
pub mod device;
mod error;
pub mod file;
pub mod forward;
pub mod fp8;
pub mod geometry;
pub mod history;
pub mod model;
pub mod plan;
pub mod policy;
pub mod runtime;
mod scale;
pub mod serving;
pub mod spectral;
pub mod stats;
pub mod stress;
pub mod tensor;
#[cfg(feature = "train")]
pub mod train;

pub use error::{Error, Result};
pub use scale::{Descale, QuantScale};
