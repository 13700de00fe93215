//! Bounds on logits and operands.
//!
//! | bound | promise |
//! |---|---|
//! | `exact` | the bound in exact arithmetic: no normalized input exceeds it before rounding |
//! | `rounded` | the worst-case bound: the same with the roundings of q and k to BF16 and E4M3; logit descales come from it |
//! | `rank_aware` | the paper's `c_star`, on sound per-head norms; holds with probability 1 - delta **for isotropic tokens** |
//! | `spectrum` | sharper, same assumption |
//! | `naive` | `||W_Q|| ||W_K||` (Proposition 3.1), for comparison |
//!
//! All include norm gains, mean removal, shifts, biases, rotation, the family's softmax scale and soft-cap; all are on
//! the logit before the mask. Without constants the bound in exact arithmetic is the paper's worst case `tau d sigma` (Eq. 7) on
//! the effective, rotation-proof norm.
//!
//! # Limits
//!
//! The promise is about the norm's output, so it ends where the norm's own arithmetic in f32 does. An RMSNorm keeps it for
//! every finite token. A LayerNorm subtracts a mean whose rounding error is relative to the token and not to what is left of
//! it: bounds hold for tokens of `|mean| <= 512 sqrt(variance + epsilon)` ([`LAYER_NORM_MEAN_LIMIT`]). Beyond it the
//! output can keep a mean that the bounds take to be removed: a constant token of 1e6 has exceeded a bound by a factor of 3.8.

mod centered;
mod device;
mod layer;
mod mla;
mod tail;
mod values;

pub use centered::{HeadRange, LayerRanges};
pub use device::{
    HeadBound, HeadFrobenius, Isotropic, check_device, check_plain, from_device, isotropic, operand_row, round_up,
    to_device,
};
pub use mla::MlaBounds;
pub use tail::{CStar, Split, Tail, sphere_factor};
pub use values::{BoundKind, E4M3_MAX, HeadBounds, LAYER_NORM_MEAN_LIMIT, LayerBounds, OperandBound};
