//! The families, as data: one entry per family says which config keys and which tensors hold what.
//!
//! A family is a row of this table and nothing else; the code that reads it lives in `config` and `checkpoint`. Facts
//! are those of the reference implementation (Hugging Face transformers). A model type outside the table is refused by
//! name: an architecture that is not understood has no bound.
//!
//! `schema` says what a row holds; the rows are in `rms_norm`, `layer_norm`, `mla`, `hybrids`, `refused` and `wrappers`.

mod hybrids;
mod layer_norm;
mod lookup;
mod mla;
mod parts;
mod refused;
mod rms_norm;
mod schema;
mod wrappers;

pub(crate) use lookup::{BIDIRECTIONAL, family, family_named};
pub use lookup::{KnownFamily, Support, known_families};
pub(crate) use refused::{BLOCK_REFUSALS, COMMON_REFUSALS, REFUSED};
pub(crate) use schema::*;
pub(crate) use wrappers::WRAPPERS;
