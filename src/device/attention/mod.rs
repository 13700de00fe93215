//! Fused E4M3 attention on Hopper: cast, attention forward, telemetry.
//!
//! [`Cuda::launch`] puts two kernels on the caller's stream, three where keys are split:
//!
//! 1. **Cast.** q, k and v in BF16, F16 or F32 become E4M3 by descales known beforehand, in one pass; RoPE on q and k
//!    can be part of it; v leaves in the order that the tensor cores want. Operands that are E4M3 already are taken as
//!    they are: only v is reordered, or written in F16. For a backward the cast leaves its operands to the caller
//!    ([`Tensors::saved`]).
//! 2. **Attention**, with the numbers of `crate::attention`: logits in f32 (or through E4M3), P in E4M3 or F16 at `2^8` as
//!    [`Tensors::accumulator`] asks, output in BF16 or E4M3, log-sum-exp in nats.
//!
//! 3. **Combine.** Calls with few query rows, such as decoding, are split ([`Split`]): the heads of a group share a tile, and the keys
//!    are cut into parts, whose outputs, in F16 by v's descale, are joined by their log-sum-exps. A single part needs no joining.
//!
//! It neither allocates nor waits once the kernels that a call needs are loaded ([`Cuda::prepare`]
//! does that beforehand), so it can be captured in a graph.
//!
//! **Layouts.** q `(batch, len_q, heads_q, d)`, k `(batch, len_k, heads_kv, d)`, v `(batch, len_k, heads_kv, d_v)`, out
//! `(batch, len_q, heads_q, d_v)`, any strides with the last dimension contiguous; lse `(batch, heads_q, len_q)` without gaps; descales `(batch, heads_kv)` with any strides, 0 included.
//! This is FlashAttention-3's convention.
//!
//! **Head dimensions** d and d_v are multiples of 8 from 16 to 256. Kernels are compiled for 64, 96, 128, 192 and 256; of others the copy
//! engine fills up rows with zeros, so that nothing but the time of the products grows.
//!
//! **Masks, sequences, sinks and soft-caps** ([`DeviceCall`]) combine with each other and with everything above. A kernel is compiled
//! for those that a call has. Tiles of keys that a window hides from all rows of a tile are not loaded. The lengths of padded and
//! packed batches lie in device memory: the cast makes a list of tiles from them, with the longest first, and decides how many
//! parts each sequence has where keys are split.
//!
//! **Not offered**, and refused by name: other head dimensions, GPUs without `wgmma` (other than compute
//! capability 9.0).

mod backend;
mod backward;
mod backward_call;
mod backward_cut;
mod call;
mod cut;
mod engine;
mod host;
mod kernels;
mod launch;
mod paged;
mod pages;
mod params;
mod regions;
mod sizes;
mod terms;
mod tile;
mod variant;

pub use crate::cuda::{Element, View};
pub use backend::step_stats;
pub use backward::BackwardEngine;
#[cfg(test)]
pub(super) use backward::backward_variants;
pub use backward_call::{BackwardOptions, BackwardTensors, Delta, RowBounds};
pub use call::{Descales, Keys, Rope, SavedOperands, SavedRows, Tensors, Workspace, residual_code, residual_value};
pub use engine::Cuda;
// Hidden: a call with device memory of its own, which the command times and `Cuda` makes of a host call.
#[doc(hidden)]
pub use host::{HostOutput, Resident, ResidentBackward, RopeTables, Setup};
pub use pages::{NewTokens, PackedQueries, Pages, Splits, ValuePages};
pub use sizes::HeadDims;
pub use terms::{Centers, DeviceCall, Sequences};
pub use tile::{Schedule, Split, Tile};
#[cfg(test)]
pub(super) use variant::tests::{attention_variants, cast_variants, paged_variants, spilling_variants};
