//! The weights of a scenario: synthetic presets and real checkpoints.

use super::calls::{call_of, token_seed};
use crate::forward::{Tokens, project};
use sigmascale::attention::{Inputs, measure};
use sigmascale::model::{
    AttentionSpec, Body, Checkpoint, GainForm, LayerWeights, NormKind, SyntheticLayer, SyntheticModel,
    SyntheticOptions, paper_sigma_profile,
};
use sigmascale::policy::differences;
use sigmascale::{Error, Result};
use std::path::Path;

/// Largest ordinary |logit| of a synthetic layer.
const ORDINARY_LOGIT: f64 = 20.0;

/// A model to stress.
pub struct StressModel {
    source: Source,
}

enum Source {
    Synthetic(Box<SyntheticModel>),
    /// A path of training: one checkpoint, or one per step.
    Checkpoints(Vec<Checkpoint>),
}

impl From<Checkpoint> for StressModel {
    fn from(checkpoint: Checkpoint) -> Self {
        Self { source: Source::Checkpoints(vec![checkpoint]) }
    }
}

impl StressModel {
    /// Random weights in the shape of `spec`. The raw summed norm of each layer follows the paper's Table 6 where it has
    /// this model; one constant norm gain per layer brings the largest |logit| of its first tokens to 20; biases are zero.
    ///
    /// # Errors
    /// As [`SyntheticModel::new`].
    pub fn synthetic(spec: &AttentionSpec, seed: u64) -> Result<Self> {
        let options = SyntheticOptions { sigma: paper_sigma_profile(&spec.name), ..SyntheticOptions::default() };
        Ok(Self { source: Source::Synthetic(Box::new(SyntheticModel::new(spec, seed, options)?)) })
    }

    /// A checkpoint folder or file.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_path(&[path])
    }

    /// Checkpoints of one training run in their order: the model is the first, and `refit` goes through them all.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]; `is_argument` without a path, `is_mismatch` if a later one is of another model.
    pub fn open_path(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let checkpoints = paths.iter().map(|path| Checkpoint::open(path.as_ref())).collect::<Result<Vec<_>>>()?;
        let nameless = |checkpoint: &Checkpoint| AttentionSpec {
            name: String::new(),
            prefix: String::new(),
            ..checkpoint.spec().clone()
        };
        let Some(first) = checkpoints.first() else {
            return Err(Error::argument("a path of training has at least one checkpoint"));
        };
        let spec = nameless(first);
        for other in &checkpoints[1..] {
            let found = differences(&nameless(other), &spec)?;
            if !found.is_empty() {
                let (a, b, found) = (other.path().display(), first.path().display(), found.join(", "));
                return Err(Error::mismatch(format_args!("{a}: its model differs from that of {b}: {found}")));
            }
        }
        Ok(Self { source: Source::Checkpoints(checkpoints) })
    }

    /// Steps of the recorded path; `None` without one.
    pub fn recorded_steps(&self) -> Option<usize> {
        match &self.source {
            Source::Checkpoints(checkpoints) if checkpoints.len() > 1 => Some(checkpoints.len()),
            _ => None,
        }
    }

    pub(super) fn path_names(&self) -> Vec<String> {
        match &self.source {
            Source::Checkpoints(checkpoints) => checkpoints.iter().map(|c| c.spec().name.clone()).collect(),
            Source::Synthetic(_) => Vec::new(),
        }
    }

    /// What stands around attention in the checkpoint of a step.
    pub(super) fn body(&self, at: usize) -> Result<Body<'_>> {
        match &self.source {
            Source::Checkpoints(checkpoints) => checkpoints[at].body(),
            Source::Synthetic(model) => Err(Error::argument(format_args!(
                "{}: a token file needs a checkpoint: synthetic weights have attention alone",
                model.spec().name
            ))),
        }
    }

    /// What the attention is.
    pub fn spec(&self) -> &AttentionSpec {
        match &self.source {
            Source::Synthetic(model) => model.spec(),
            Source::Checkpoints(checkpoints) => checkpoints[0].spec(),
        }
    }

    /// Whether the weights are random.
    pub fn is_synthetic(&self) -> bool {
        matches!(self.source, Source::Synthetic(_))
    }

    pub(super) fn notes(&self) -> Vec<String> {
        let Source::Synthetic(model) = &self.source else { return Vec::new() };
        let sigma = match paper_sigma_profile(&model.spec().name) {
            Some(_) => "the summed norm of each layer follows the paper's Table 6",
            None => "W_Q and W_K have variance 1 / d_model",
        };
        vec![format!(
            "synthetic weights: Gaussian heads, {sigma}; one norm gain per layer brings the largest ordinary |logit| to \
             {ORDINARY_LOGIT}, where a gain reaches the logits"
        )]
    }

    /// A layer's sinks in the checkpoint of a step: zeros of a synthetic model, where the family has them.
    pub(super) fn sinks(&self, layer: usize, at: usize) -> Result<Option<Vec<f64>>> {
        match &self.source {
            Source::Checkpoints(checkpoints) => checkpoints[at].sinks(layer),
            Source::Synthetic(model) => {
                let own = model.spec().layer(layer)?;
                Ok(own.sinks.then(|| vec![0.0; own.n_q_heads]))
            }
        }
    }

    pub(super) fn layer(&self, layer: usize, seq_len: usize, seed: u64) -> Result<StressLayer<'_>> {
        match &self.source {
            Source::Checkpoints(checkpoints) => Ok(StressLayer::Borrowed(checkpoints, layer)),
            Source::Synthetic(model) => {
                let spec = model.spec();
                let owned = model.layer(layer)?;
                // Logits grow with the square of the gain; where q and k are normalised after it they do not move.
                let movable = spec.norm.kind != NormKind::None
                    && spec.norm.gain != GainForm::Unit
                    && spec.qk_norm_of(spec.layer(layer)?).is_none()
                    && spec.soft_cap.is_none();
                let mut gain = None;
                if movable {
                    let tokens = Tokens::isotropic(spec, seq_len, token_seed(seed, layer, 0));
                    let projected = project(spec, &owned.weights(), &tokens)?;
                    let inputs = Inputs { q: &projected.q, k: &projected.k, v: &projected.v };
                    let stats = measure(&call_of(spec, layer, seq_len, None), &inputs)?;
                    let largest = stats.logits.iter().map(|head| f64::from(head.amax())).fold(0.0, f64::max);
                    gain = (largest > 0.0).then(|| (ORDINARY_LOGIT / largest).sqrt());
                }
                Ok(StressLayer::Owned { layer: Box::new(owned), gain, form: spec.norm.gain })
            }
        }
    }
}

/// One layer's weights, ready to be scaled.
pub(super) enum StressLayer<'a> {
    Borrowed(&'a [Checkpoint], usize),
    Owned { layer: Box<SyntheticLayer>, gain: Option<f64>, form: GainForm },
}

impl StressLayer<'_> {
    /// The weights with those of q, k and v, and their biases, times `factor`; `at` is the place on a recorded path.
    pub(super) fn weights(&self, at: usize, factor: f32) -> Result<LayerWeights<'_>> {
        let mut weights = match self {
            Self::Borrowed(checkpoints, layer) => checkpoints[at].layer(*layer)?,
            Self::Owned { layer, .. } => layer.weights(),
        };
        if let (Self::Owned { gain: Some(gain), form, .. }, Some(stored)) = (self, &mut weights.norm_gain) {
            stored.fill(if *form == GainForm::OnePlus { gain - 1.0 } else { *gain });
        }
        if factor != 1.0 {
            multiply(&mut weights, factor);
        }
        Ok(weights)
    }
}

/// Weights and biases of q, k and v times `factor`, without touching the storage. The scales of FP8 weights take it.
fn multiply(weights: &mut LayerWeights<'_>, factor: f32) {
    for projection in [&mut weights.q, &mut weights.k, &mut weights.v] {
        projection.heads.iter_mut().for_each(|head| *head = head.scaled(factor));
        projection.bias.iter_mut().flatten().for_each(|b| *b *= f64::from(factor));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sigmascale::model::preset;

    #[test]
    fn weights_and_biases_are_multiplied_and_nothing_else() {
        let mut spec = preset("gpt2-xl").unwrap();
        spec.d_model = 128;
        spec.layers.truncate(1);
        spec.set_heads(2, 2, spec.layers[0].d_head);
        let owned = SyntheticModel::new(&spec, 3, SyntheticOptions::default()).unwrap().layer(0).unwrap();
        let mut plain = owned.weights();
        plain.q.bias = Some((0..128).map(f64::from).collect());
        let mut weights = plain.clone();
        multiply(&mut weights, 4.0);
        for (a, b) in [(&plain.q, &weights.q), (&plain.k, &weights.k), (&plain.v, &weights.v)] {
            assert_eq!(4.0 * a.heads[1].get(63, 127), b.heads[1].get(63, 127));
            for (a, b) in a.bias.iter().flatten().zip(b.bias.iter().flatten()) {
                assert_eq!(4.0 * a, *b);
            }
        }
        assert_eq!(plain.norm_gain, weights.norm_gain);
    }

    #[test]
    fn the_gain_brings_the_largest_logit_to_twenty() {
        let mut spec = preset("gpt2-xl").unwrap();
        spec.d_model = 128;
        spec.layers.truncate(1);
        spec.set_heads(2, 2, spec.layers[0].d_head);
        let model = StressModel::synthetic(&AttentionSpec { name: "small".into(), ..spec.clone() }, 3).unwrap();
        let layer = model.layer(0, 50, 7).unwrap();
        let tokens = Tokens::isotropic(&spec, 50, token_seed(7, 0, 0));
        let projected = project(&spec, &layer.weights(0, 1.0).unwrap(), &tokens).unwrap();
        let inputs = Inputs { q: &projected.q, k: &projected.k, v: &projected.v };
        let stats = measure(&call_of(&spec, 0, 50, None), &inputs).unwrap();
        let largest = stats.logits.iter().map(|head| head.amax()).fold(0.0, f32::max);
        assert!((largest - 20.0).abs() < 1e-3, "{largest}");
    }
}
