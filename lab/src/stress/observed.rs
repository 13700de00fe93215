//! The largest q, k and v that a text reaches in a model's own forward, beside which bounds show their slack.

use super::calls::call_of;
use super::lab::identity;
use super::model::StressModel;
use super::options::StressOptions;
use super::tokens::{Source, TokenFile, TokenSummary};
use crate::forward::project;
use serde::Serialize;
use sigmascale::attention::{Attention, Cpu, Inputs, Precision};
use sigmascale::{Error, Result};

/// Sequences that are run at most.
const SEQUENCES: usize = 16;

/// What one layer reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerMaxima {
    /// The model's own number.
    pub layer: usize,
    /// Largest |q|, with the factor that grows with the position.
    pub q: f32,
    /// Largest |k|.
    pub k: f32,
    /// Largest |v|.
    pub v: f32,
}

/// What a text reached.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Observed {
    /// The text.
    pub tokens: TokenSummary,
    /// Sequences that were run, and their length.
    pub sequences: usize,
    /// Tokens of each.
    pub seq_len: usize,
    /// The layers with attention.
    pub layers: Vec<LayerMaxima>,
}

/// How many sequences of a text are run, and their length.
pub(super) fn sequences_of(model: &StressModel, file: &TokenFile, seq_len: Option<usize>) -> Result<(usize, usize)> {
    let body = model.body(0)?;
    let available = file.count(model.spec(), &body)?;
    let longest = body.longest.map_or(usize::MAX, |(longest, _)| longest);
    let seq_len = seq_len.unwrap_or(StressOptions::default().seq_len.min(available).min(longest));
    if seq_len == 0 {
        return Err(Error::argument("seq_len must be at least 1"));
    }
    Ok(((available / seq_len).clamp(1, SEQUENCES), seq_len))
}

/// Runs a text through a checkpoint in f32, in sequences of at most `seq_len` tokens. `each` is called after each layer, and
/// stops the work by an error.
///
/// # Errors
/// `is_unsupported` if the family has no forward here; as [`TokenFile::read`].
pub fn observe(
    model: &StressModel,
    file: &TokenFile,
    seq_len: Option<usize>,
    each: &mut dyn FnMut() -> Result<()>,
) -> Result<Observed> {
    let spec = model.spec();
    let (sequences, seq_len) = sequences_of(model, file, seq_len)?;
    let mut source = Source::text(model, file, sequences, seq_len, false)?;
    let mut layers = Vec::with_capacity(spec.layers.len());
    for (layer, own) in spec.layers.iter().enumerate() {
        let stored = model.layer(layer, seq_len, 0)?;
        let weights = stored.weights(0, 1.0)?;
        let sinks = model.sinks(layer, 0)?;
        let call = call_of(spec, layer, seq_len, sinks.as_deref());
        let mut most = LayerMaxima { layer: own.number, q: 0.0, k: 0.0, v: 0.0 };
        for sequence in 0..sequences {
            let projected = project(spec, &weights, &source.tokens(spec, layer, sequence))?;
            let largest = |values: &[f32]| values.iter().fold(0f32, |most, x| most.max(x.abs()));
            most.q = most.q.max(largest(&projected.q));
            most.k = most.k.max(largest(&projected.k));
            most.v = most.v.max(largest(&projected.v));
            if layer + 1 < spec.layers.len() {
                let inputs = Inputs { q: &projected.q, k: &projected.k, v: &projected.v };
                let exact = Cpu.forward(&call, &inputs, &identity(layer, &call.shape), &Precision::F32)?;
                source.advance(spec, &weights, sequence, &exact.out)?;
            }
        }
        layers.push(most);
        each()?;
    }
    let tokens = source.summary().ok_or_else(|| Error::argument("there is no text"))?;
    Ok(Observed { tokens, sequences, seq_len, layers })
}
