//! Fused E4M3 attention on Hopper: cast, attention forward, telemetry.
//!
//! [`AttentionEngine::forward`] puts two kernels on the caller's stream, three where keys are split:
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
//! It allocates nothing and waits for nothing once the kernels that a call needs are loaded ([`AttentionEngine::prepare`]
//! does that beforehand), so it can be captured in a graph.
//!
//! **Layouts.** q and out `(batch, len_q, heads_q, d)`, k and v `(batch, len_k, heads_kv, d)`, any strides with `d`
//! contiguous; lse `(batch, heads_q, len_q)` without gaps; descales `(batch, heads_kv)` with any strides, 0 included.
//! This is FlashAttention-3's convention.
//!
//! **Not offered**, and refused by name: head dimensions other than 64 and 128, GPUs without `wgmma` (other than compute
//! capability 9.0). There is no argument for windows, soft-caps or packed sequences of several lengths.

mod backend;
mod backward;
mod backward_call;
mod call;
mod engine;
mod host;
mod kernels;
mod params;
mod regions;
mod sizes;
mod tile;
mod variant;

pub use crate::cuda::{Element, View};
pub use backend::{Cuda, step_stats};
pub use backward::{BackwardEngine, backward_variants};
pub use backward_call::{BackwardTensors, BackwardWorkspace, Delta};
pub use call::{Descales, Rope, SavedOperands, Tensors, Workspace};
pub use engine::AttentionEngine;
pub use host::{HostOutput, Resident, ResidentBackward, RopeTables, Setup};
pub use tile::{Schedule, Split, Tile};
pub use variant::{attention_variants, cast_variants};
