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
//! | compare scaling policies | [`stress`] |
//! | find the head that makes a training run fail | [`diagnose`], over the record of [`history`] |
//! | compute FP8 attention on the CPU, with Hopper's accumulators | [`attention`], [`fp8`] |
//! | run on a GPU | `device`, `cuda` (cargo feature `cuda`) |
//! | train small models under any policy | `train` (cargo feature `train`) |
//!
//! Errors are one opaque type with predicates, [`Error`]. The cargo features `cli` (the command `sigmascale`), `cuda` and
//! `tokenizers` (text as input of [`stress`]) are on by default; the library builds without any of them.

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
pub mod diagnose;
mod error;
pub mod file;
pub mod forward;
pub mod fp8;
pub mod geometry;
pub mod history;
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
pub mod stress;
pub mod tensor;
#[cfg(feature = "train")]
pub mod train;

pub use error::{Error, Result};
pub use scale::{Descale, QuantScale};

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
