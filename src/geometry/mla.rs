//! Operators of multi-head latent attention.
//!
//! With g the input norm's gain, g_q and g_c those of the latents' norms (their factors included), a query latent
//! `c_q = diag(g_q) z`, `||z|| <= sqrt(q_rank)`, a cached latent `c = diag(g_c) u`, `||u|| <= sqrt(kv_rank)`, and an input
//! `x = diag(g) y`, `||y|| <= sqrt(d)`: a head's query is `[A; B] c_q`, its key `[K c; D x]`, its value `V c`. Rotations multiply
//! `B c_q` and `D x`. Without a query latent the query reads x. The projections in front of the latents' norms enter no bound: a
//! norm's output lies on its sphere whatever comes in.

use super::{HeadOperator, NormOutput, Rotary, gains, input_floor, operators};
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, GainForm, LayerWeights, Mla, MlaRounding, Projection};
use std::sync::Arc;

/// One layer's operators and everything else that a bound needs.
#[derive(Clone, Debug)]
pub struct MlaGeometry<'a> {
    /// Index among the layers with attention.
    pub layer: usize,
    /// The model and the layer by the model's own number, for messages.
    pub place: String,
    /// Model dimension d.
    pub d_model: usize,
    /// Sizes.
    pub mla: Mla,
    /// Softmax scale tau, times the largest factor on the query where one grows with the position.
    pub softmax_scale: f64,
    /// That factor; the operators of q are without.
    pub query_factor: f64,
    /// Soft-cap of the logits.
    pub soft_cap: Option<f64>,
    /// Query operators, `[A; B]` of each head.
    pub q: Vec<HeadOperator<'a>>,
    /// K of each head.
    pub k: Vec<HeadOperator<'a>>,
    /// V of each head.
    pub v: Vec<HeadOperator<'a>>,
    /// D, and the shared key's constant.
    pub k_pe: HeadOperator<'a>,
    /// Gain of the cached latent, its factor included.
    pub latent_gain: Arc<[f64]>,
    /// Rotation of the last `d_rope` channels of q, and of the shared key.
    pub rotary: Option<Rotary>,
    /// Shares of the rounding terms.
    pub rounding: MlaRounding,
    /// Whether products may read inputs rounded to E4M3.
    pub fp8_inputs: bool,
}

/// A stored gain of `len` values, times a factor.
fn gain(values: Option<&Vec<f64>>, len: usize, factor: f64, what: &str) -> Result<Arc<[f64]>> {
    let Some(values) = values else { return Err(Error::mismatch(format_args!("{what} gain is missing"))) };
    if values.len() != len {
        return Err(Error::mismatch(format_args!("{what} gain has {} values, not {len}", values.len())));
    }
    match values.iter().find(|g| !g.is_finite()) {
        Some(g) => Err(Error::non_finite(format_args!("{what} gain holds {g}"))),
        None => Ok(values.iter().map(|g| g * factor).collect()),
    }
}

impl<'a> MlaGeometry<'a> {
    /// The operators of one layer.
    ///
    /// # Errors
    /// As [`AttentionSpec::check`]; `is_mismatch` if a vector or a projection does not fit the spec, or if the layer has no
    /// latent attention; `is_non_finite` if a gain is not finite.
    pub fn new(spec: &AttentionSpec, weights: LayerWeights<'a>) -> Result<Self> {
        spec.check()?;
        let place = spec.place(weights.layer);
        Self::at(spec, weights, place.clone()).map_err(|error| error.within(place))
    }

    fn at(spec: &AttentionSpec, weights: LayerWeights<'a>, place: String) -> Result<Self> {
        let own = spec.layer(weights.layer)?;
        let [q, k, v] = weights.stored();
        let (Some(mla), Some(latents)) = (own.mla, weights.mla) else {
            return Err(Error::mismatch("spec or weights are not those of latent attention (MLA)"));
        };
        let rounding = spec.mla_rounding(own, &mla, [q, k, v, latents.k_pe.dtype()]);
        let (d, heads) = (spec.d_model, own.n_q_heads);
        let input_gain: Arc<[f64]> = match spec.norm.gain {
            GainForm::Unit => vec![1.0; d].into(),
            form => gains(&gain(weights.norm_gain.as_ref(), d, 1.0, "input norm")?, form).values.into(),
        };
        let q_gain = match mla.q_rank {
            Some(rank) => gain(latents.q_gain.as_ref(), rank, mla.q_factor, "query latent")?,
            None => Arc::clone(&input_gain),
        };
        let latent_gain = gain(Some(&latents.kv_gain), mla.kv_rank, mla.kv_factor, "latent")?;
        // The attention factor is on the rotated channels, the last ones.
        let factor = own.rope.as_ref().map_or(1.0, |rope| rope.attention_factor);
        let scale = |fixed: usize| -> Option<Arc<[f64]>> {
            let channel = |c: usize| if c < fixed { 1.0 } else { factor };
            (factor != 1.0).then(|| (0..fixed + mla.d_rope).map(channel).collect())
        };
        let read = |channels: usize, projection: Projection<'a>, heads: usize, gain: &Arc<[f64]>, scale| {
            let floor = if spec.fp8_inputs { input_floor(gain.len(), Some(gain), None) } else { 0.0 };
            let norm = NormOutput { gain: &Some(Arc::clone(gain)), shift: &None, centred: false, floor };
            operators((channels, gain.len()), projection, heads, norm, &scale)
        };
        let mut k_pe = read(mla.d_rope, latents.k_pe, 1, &input_gain, scale(0))?;
        Ok(Self {
            layer: weights.layer,
            place,
            d_model: d,
            mla,
            softmax_scale: own.logit_scale(),
            query_factor: own.query_factor(),
            soft_cap: spec.soft_cap,
            q: read(own.d_head, weights.q, heads, &q_gain, scale(mla.d_nope))?,
            k: read(mla.d_nope, weights.k, heads, &latent_gain, None)?,
            v: read(mla.d_value, weights.v, heads, &latent_gain, None)?,
            // `operators` gives as many as it was asked for.
            k_pe: k_pe.remove(0),
            rotary: own.rope.as_ref().map(|rope| Rotary::own(rope, mla.d_rope)),
            rounding,
            latent_gain,
            fp8_inputs: spec.fp8_inputs,
        })
    }

    /// Square of the largest length of what the query's projection reads, before its gain.
    pub fn q_radius_square(&self) -> f64 {
        self.mla.q_inputs(self.d_model) as f64
    }

    /// The same of the cached latent.
    pub fn latent_radius_square(&self) -> f64 {
        self.mla.kv_rank as f64
    }

    /// The rotation's pairs among the shared key's channels; none without a rotation.
    pub fn k_pe_pairs(&self) -> &[(usize, usize)] {
        self.rotary.as_ref().map_or(&[], |rotary| &rotary.pairs)
    }

    /// The same among a whole query's.
    pub fn q_pairs(&self) -> Vec<(usize, usize)> {
        let first = self.mla.d_nope;
        self.k_pe_pairs().iter().map(|(a, b)| (a + first, b + first)).collect()
    }
}
