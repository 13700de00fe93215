//! The rotation of stored heads.

use super::spec::Rope;
use crate::error::{Error, Result};

/// Rotates the pairs of every head by `position * inv_freq`, times the attention factor; tokens have the positions from `first`
/// on.
pub fn rotate(model: &str, rope: &Rope, first: usize, (heads, r): (usize, usize), values: &mut [f32]) -> Result<()> {
    let Some(inv_freq) = &rope.inv_freq else {
        return Err(Error::unsupported(format_args!(
            "{model}: the config does not determine the rotation's angles, so tokens cannot be run through it"
        )));
    };
    if inv_freq.len() * 2 != rope.rotary_dim || rope.rotary_dim > r {
        return Err(Error::mismatch(format_args!("{model}: {} angles do not fit the rotation", inv_freq.len())));
    }
    let pairs: Vec<_> = rope.pairs().collect();
    for (position, token) in (first..).zip(values.chunks_exact_mut(heads * r)) {
        let turns: Vec<(f32, f32)> = inv_freq
            .iter()
            .map(|f| {
                let (sin, cos) = (position as f64 * f).sin_cos();
                ((sin * rope.attention_factor) as f32, (cos * rope.attention_factor) as f32)
            })
            .collect();
        for head in token.chunks_exact_mut(r) {
            for (&(a, b), &(sin, cos)) in pairs.iter().zip(&turns) {
                let (x, y) = (head[a], head[b]);
                head[a] = x * cos - y * sin;
                head[b] = x * sin + y * cos;
            }
        }
    }
    Ok(())
}
