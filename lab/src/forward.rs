//! q, k and v of one layer, from normalized tokens.
//!
//! ```text
//! y = gain * x_hat + shift        q, k, v = W y + b        q, k: QK-norm, then rotation by the token's position
//! ```
//!
//! f32 products with no other rounding. Where a layer has no norm in front (OLMo 2), the token itself is projected.
//! Tokens are drawn at random, given, or those of a model's own residual stream on text ([`Stream`]).

mod qkv;
mod stream;

pub(crate) use qkv::normed;
pub use qkv::{Projected, Tokens, project};
pub use stream::Stream;
