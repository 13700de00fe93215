//! FP8 attention scales from the weights alone.
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

pub mod cuda;
mod error;
pub mod model;
pub mod plan;
mod scale;
pub mod stats;
pub mod tensor;

pub use error::{Error, Result};
pub use scale::{Descale, QuantScale};
