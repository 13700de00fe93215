//! How much the roundings of a forward add to q, k and v before their cast to E4M3.
//!
//! A computed operand is within `share * A` of the exact one, A the sum of the magnitudes that enter it:
//! `share = (1 + 2^-8)^n (1 + d 2^-24) - 1` for n roundings to BF16 in a row and a sum of d products in f32, and never under
//! 1/32. n is counted here, from the family and the storage.

use super::mla::Mla;
use super::spec::{AttentionSpec, GainForm, LayerSpec, NormKind};
use crate::tensor::Dtype;

/// Least share of the rounding term A in operand bounds.
pub const LEAST_ROUNDING_SHARE: f64 = 1.0 / 32.0;

/// The same where the projections multiply in FP8: it leaves 3 % for the short accumulators of FP8 tensor cores.
const LEAST_FP8_SHARE: f64 = 1.0 / 8.0;

/// Relative error of a rounding to E4M3, of a normal number.
pub const E4M3_ROUNDING: f64 = 1.0 / 17.0;

/// Relative error of a rounding to BF16.
const BF16_ROUNDING: f64 = 1.0 / 256.0;

/// Relative error of one addition in f32.
const F32_ROUNDING: f64 = 1.0 / (1 << 24) as f64;

/// Shares of the rounding term A of one layer's operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoundingShare {
    /// Of q, the factor that grows with the position included.
    pub q: f64,
    /// Of k.
    pub k: f64,
    /// Of v.
    pub v: f64,
    /// Relative errors of single weights of q's and k's projections that are not multiplied as they are stored. A bound on
    /// the norm of a head adds them up element by element, where all other roundings pass through its spectral norm.
    pub weights: [f64; 2],
}

impl Default for RoundingShare {
    /// The least: seven roundings to BF16.
    fn default() -> Self {
        Self { q: LEAST_ROUNDING_SHARE, k: LEAST_ROUNDING_SHARE, v: LEAST_ROUNDING_SHARE, weights: [0.0; 2] }
    }
}

impl AttentionSpec {
    /// What the roundings of a BF16 forward add to the operands of a layer whose q, k and v projections are `stored` in these
    /// types.
    ///
    /// ```
    /// use sigmascale::{model, tensor::Dtype};
    /// let spec = model::preset("mistral-7b").unwrap();
    /// let share = |stored| spec.rounding_share(&spec.layers[0], [stored; 3]).q;
    /// assert_eq!(share(Dtype::Bf16), 1.0 / 32.0);
    /// assert!(share(Dtype::F32) > 1.0 / 32.0);
    /// ```
    pub fn rounding_share(&self, layer: &LayerSpec, stored: [Dtype; 3]) -> RoundingShare {
        let (norm, qk_norm) = (self.norm, self.qk_norm_of(layer));
        let forward = Forward {
            // Each factor beside the weights rounds once more. Of a mean of streams the products with the gates round, the sum, and the
            // quotient; a gate of at most 1 stays one when it is rounded.
            norm: norm_roundings(norm.kind, norm.gain)
                + if self.multipliers.is_some() { 2 } else { 0 }
                + if self.streams.is_some() { 3 } else { 0 },
            qk_norm: qk_norm.map(|norm| norm_roundings(norm.kind, norm.gain)),
            // A rotation in front of a norm of q and k is bounded by that norm.
            rotated: layer.rope.is_some() && !qk_norm.is_some_and(|norm| norm.behind_rotation),
            grows: layer.temperature.is_some(),
            d_model: self.d_model,
        };
        let plain = forward.share(stored);
        let projected = |share: f64, stored: Dtype| with_e4m3(share, self.e4m3_factors(stored));
        let q_or_k = |share: f64, stored: Dtype| if qk_norm.is_some() { share } else { projected(share, stored) };
        let v = if self.v_norm {
            share(norm_roundings(NormKind::RmsNorm, GainForm::Unit), 0)
        } else {
            projected(plain.v, stored[2])
        };
        let weights = [stored[0], stored[1]].map(|stored| weight_rounding(stored, self.e4m3_factors(stored)));
        RoundingShare { q: q_or_k(plain.q, stored[0]), k: q_or_k(plain.k, stored[1]), v, weights }
    }
}

/// Shares of the rounding terms of a layer with latent attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlaRounding {
    /// Of the cached latent.
    pub latent: f64,
    /// Of q, the factor that grows with the position included.
    pub q: f64,
    /// Of the part of k that comes from the latent, which may be rebuilt from a cache in E4M3.
    pub k: f64,
    /// Of v, likewise.
    pub v: f64,
    /// Of the shared rotated key as it is cached.
    pub k_pe: f64,
    /// Of the absorbed query.
    pub absorbed_q: f64,
    /// Of the weights themselves, as products read them.
    pub weights: WeightRounding,
}

/// Relative errors of single weights that are not multiplied as they are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightRounding {
    /// Of q's projection.
    pub q: f64,
    /// Of k's.
    pub k: f64,
    /// Of the shared rotated key's.
    pub k_pe: f64,
}

impl AttentionSpec {
    /// Roundings to E4M3 of a product with weights `stored` so or not: of the input, and of weights that are not stored so.
    fn e4m3_factors(&self, stored: Dtype) -> i32 {
        match (self.fp8_inputs, stored) {
            (false, _) => 0,
            (true, Dtype::E4m3) => 1,
            (true, _) => 2,
        }
    }

    /// What roundings add to the operands of latent attention, where the projections of q, k, v and the shared rotated key are
    /// `stored` in these types. Everything is counted from the last norm, whose output lies on its sphere whatever was rounded
    /// before.
    pub fn mla_rounding(&self, layer: &LayerSpec, mla: &Mla, stored: [Dtype; 4]) -> MlaRounding {
        let norm = norm_roundings(NormKind::RmsNorm, GainForm::Plain);
        let [q, k, v, k_pe] = stored;
        // Weights that are not BF16 in storage are rounded when they are loaded.
        let projection = |stored: Dtype| 1 + i32::from(stored != Dtype::Bf16);
        let factor = |factor: f64| i32::from(factor != 1.0);
        let (rotation, growth) =
            (if layer.rope.is_some() { 3 } else { 0 }, if layer.temperature.is_some() { 2 } else { 0 });
        let latent = norm + factor(mla.kv_factor);
        let query = norm + projection(q) + factor(mla.q_factor) + growth;
        let q_inputs = mla.q_inputs(self.d_model);
        let from_latent = |stored: Dtype| {
            let share = share(latent + projection(stored), mla.kv_rank);
            match self.e4m3_factors(stored) {
                // The cache alone rounds to E4M3; the product is one in BF16.
                0 => (1.0 + share) * (1.0 + E4M3_ROUNDING) - 1.0,
                factors => with_e4m3(share, 1 + factors),
            }
        };
        let weight = |stored: Dtype| weight_rounding(stored, self.e4m3_factors(stored));
        let weights = WeightRounding { q: weight(q), k: weight(k), k_pe: weight(k_pe) };
        let k_pe = with_e4m3(share(norm + projection(k_pe) + rotation, self.d_model), self.e4m3_factors(k_pe));
        MlaRounding {
            latent: share(latent, 0),
            q: with_e4m3(share(query + rotation, q_inputs), self.e4m3_factors(q)),
            k: from_latent(k),
            v: from_latent(v),
            k_pe,
            // The product with K may round its input too.
            absorbed_q: with_e4m3(
                share(query + projection(k), q_inputs + mla.d_nope),
                self.e4m3_factors(q) + self.e4m3_factors(k),
            ),
            weights,
        }
    }
}

/// Relative error of a weight `stored` so, in a product with that many roundings to E4M3.
fn weight_rounding(stored: Dtype, e4m3_factors: i32) -> f64 {
    (if e4m3_factors == 2 { E4M3_ROUNDING } else { 0.0 }) + if stored == Dtype::Bf16 { 0.0 } else { BF16_ROUNDING }
}

/// A share after so many roundings to E4M3.
fn with_e4m3(plain: f64, factors: i32) -> f64 {
    if factors == 0 { plain } else { ((1.0 + plain) * (1.0 + E4M3_ROUNDING).powi(factors) - 1.0).max(LEAST_FP8_SHARE) }
}

/// What rounds in the forward of one layer, up to its attention call.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// Roundings up to the output of the input's norm: [`norm_roundings`].
    pub norm: i32,
    /// The same of a norm of q and k after the projection, which bounds them whatever was rounded before it.
    pub qk_norm: Option<i32>,
    /// q and k are rotated after that.
    pub rotated: bool,
    /// q is multiplied by a factor that grows with the position.
    pub grows: bool,
    /// Products of a projection's sums.
    pub d_model: usize,
}

impl Forward {
    /// Shares for q, k and v projections `stored` in these types, with inputs in BF16.
    pub fn share(&self, stored: [Dtype; 3]) -> RoundingShare {
        // Weights that are not BF16 in storage are rounded (or multiplied by their scale) when they are loaded.
        let projected =
            |stored: Dtype, later: i32| share(self.norm + 1 + i32::from(stored != Dtype::Bf16) + later, self.d_model);
        // cos and sin, the products, their sum. The factor and its product.
        let (rotation, growth) = (if self.rotated { 3 } else { 0 }, if self.grows { 2 } else { 0 });
        let q_or_k = |stored: Dtype, later: i32| match self.qk_norm {
            Some(norm) => share(norm + later, 0),
            None => projected(stored, later),
        };
        RoundingShare {
            q: q_or_k(stored[0], rotation + growth),
            k: q_or_k(stored[1], rotation),
            v: projected(stored[2], 0),
            weights: [stored[0], stored[1]].map(|stored| weight_rounding(stored, 0)),
        }
    }
}

/// Roundings up to a norm's output. A stored gain may be wider than BF16, and is rounded when it is loaded.
pub fn norm_roundings(kind: NormKind, gain: GainForm) -> i32 {
    match (kind, gain) {
        (NormKind::None, _) => 0,
        (_, GainForm::Unit) => 1,
        // Rounded once, behind gain and shift.
        (NormKind::LayerNorm, _) => 2,
        // Rounded in front of the gain too, in most implementations.
        (NormKind::RmsNorm, _) => 3,
    }
}

fn share(roundings: i32, sum: usize) -> f64 {
    let factor = (1.0 + BF16_ROUNDING).powi(roundings) * (1.0 + sum as f64 * F32_ROUNDING);
    (factor - 1.0).max(LEAST_ROUNDING_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Temperature, preset};

    #[test]
    fn roundings_are_counted_by_family_and_storage() {
        let counted = |n: i32, d: usize| share(n, d);
        let llama = preset("llama-3.1-8b").unwrap();
        let of = |spec: &AttentionSpec, stored| spec.rounding_share(&spec.layers[0], [stored; 3]);
        // Norm 2 and its gain 1, projection 1, rotation 3.
        let bf16 = of(&llama, Dtype::Bf16);
        assert_eq!((bf16.q, bf16.k, bf16.v), (1.0 / 32.0, 1.0 / 32.0, 1.0 / 32.0));
        // Weights stored in more than they run in: one more, which passes 1/32.
        let f32 = of(&llama, Dtype::F32);
        assert_eq!((f32.q, f32.k, f32.v), (counted(8, 4096), counted(8, 4096), 1.0 / 32.0));
        assert!((f32.q - 0.0317).abs() < 1e-3 && f32.q > 1.0 / 32.0, "{f32:?}");
        let mut grown = llama.clone();
        grown.layers[0].temperature = Some(Temperature { strength: 0.1, period: 8, shift: 0, positions: 64 });
        let grown = of(&grown, Dtype::F32);
        assert_eq!((grown.q, grown.k), (counted(10, 4096), f32.k));
        assert!(grown.q > 0.0398, "{grown:?}");
        // A norm behind the projection takes the place of all before it.
        let qwen = preset("qwen3-8b").unwrap();
        assert_eq!(of(&qwen, Dtype::F32).q, 1.0 / 32.0);
        // Inputs in E4M3, and weights that are not stored so but run so.
        let fp8 = AttentionSpec { fp8_inputs: true, ..llama };
        assert!((of(&fp8, Dtype::E4m3).q - (18.0 / 17.0 * (1.0 + f32.q) - 1.0).max(0.125)).abs() < 1e-15);
        assert!(of(&fp8, Dtype::Bf16).v > (18f64 / 17.0).powi(2) - 1.0 + 1.0 / 32.0);
    }
}
