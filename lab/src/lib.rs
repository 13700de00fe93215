//! The failure lab of [`sigmascale`].
//!
//! | to | see |
//! |---|---|
//! | compare scaling policies | [`stress`] |
//! | train small models under any policy | `train` (cargo feature `train`) |
//! | find the head that makes a training run fail | [`diagnose`], over the record of [`history`] |
//! | run tokens through a model around its attention | [`forward`] |
//!
//! Cargo features, all on by default: `cuda` (bounds on a GPU), `tokenizers` (text as input of [`stress`]) and `train`.

#![warn(missing_docs)]

pub mod diagnose;
pub mod file;
pub mod forward;
pub mod history;
pub mod stress;
#[cfg(feature = "train")]
pub mod train;
