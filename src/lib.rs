//! FP8 attention scales from the weights of a model.
//!
//! Sigmascale bounds q, k, v, the attention output and the attention logits of a transformer for every normalized input,
//! including the rounding errors of the forward pass. The scales that follow need no activation history and no calibration
//! data, and q, k and v of a normalized input cannot overflow in E4M3.
//!
//! Scales of a checkpoint, with one descale per KV head (FlashAttention-3's convention) or one per tensor (cuDNN's):
//!
//! ```
//! use sigmascale::calibrate::{Calibration, Options};
//! use sigmascale::model::Checkpoint;
//! use sigmascale::plan::ScalePlan;
//!
//! let checkpoint = Checkpoint::open("data/tiny-llama".as_ref())?; // a Hugging Face folder
//! let mut calibration = Calibration::new(checkpoint.spec(), Options::default())?;
//! for layer in 0..checkpoint.spec().layers.len() {
//!     let bounds = calibration.layer(checkpoint.layer(layer)?)?;
//!     let operands = bounds.operands().expect("the default options include operand bounds");
//!     assert_eq!(operands.k.len(), 2); // KV heads: divide k by it before the cast
//!     let k_descale = ScalePlan::per_tensor(&operands.k);
//!     assert!(k_descale.get() < 0.06);
//! }
//! let profile = calibration.finish(); // what `sigmascale calibrate --format json` prints
//! assert_eq!(profile.layers.expect("the checkpoint has weights").len(), 6);
//! # Ok::<(), sigmascale::Error>(())
//! ```
//!
//! | to | see |
//! |---|---|
//! | read a model, or describe one | [`model`] |
//! | compute scales and bounds offline | [`calibrate`], and [`bound`], [`spectral`] and [`geometry`] below it |
//! | write and audit checkpoints of serving engines | [`serving`] |
//! | keep scales up to date in a training loop | [`runtime`], [`policy`], [`plan`], [`stats`] |
//! | compute FP8 attention on the CPU, with Hopper's accumulators | [`attention`], [`fp8`] |
//! | run on a GPU | `device`, `cuda` (cargo feature `cuda`) |
//!
//! Errors are one opaque type with predicates, [`Error`]. The cargo feature `cuda` is on by default; the library builds
//! without it.
//!
//! The crate `sigmascale-lab` runs scaling policies into failures, trains small models under them, and finds the head that
//! makes a training run fail. The crate `sigmascale-cli` is the command `sigmascale` over both.

#![warn(missing_docs)]

pub mod attention;
pub mod bound;
pub mod calibrate;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "cuda")]
pub mod device;
mod error;
mod file;
pub mod fp8;
pub mod geometry;
pub mod model;
#[doc(hidden)]
pub mod names;
pub mod plan;
pub mod policy;
pub mod runtime;
mod scale;
pub mod serving;
pub mod spectral;
pub mod stats;
pub mod tensor;

pub use error::{Error, Result};
pub use scale::{Descale, QuantScale};

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
