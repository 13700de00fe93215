//! The record of a series of checkpoints: what the weights alone say.

use crate::history::{FORMAT, LayerInfo, LayerRecord, Record, RunInfo, StepRecord};
use sigmascale::bound::{LayerBounds, MlaBounds, Tail};
use sigmascale::geometry::LayerGeometry;
use sigmascale::model::{Checkpoint, LayerWeights};
use sigmascale::spectral::{GramEngine, LayerGrams, SpectralEngine};
use sigmascale::{Error, Result};
use std::path::Path;

/// Least number of checkpoints that have a trend.
const LEAST: usize = 2;
/// What the eigenvalues of a Gram matrix may be off by, relative to the largest: far above `r` roundings of f64.
const MARGIN: f64 = 1e-9;

/// Reads a series of checkpoints of one model as the records of a run: certified norms and bounds of every head, with
/// `lr` as the learning rate between them where it is given. `each` is called after every layer.
///
/// The step of a checkpoint is the number at the end of its name, as in `checkpoint-500`. Checkpoints are sorted by it.
/// Where a name has none, or two have the same, all count from 0 in the order given, and `lr` is refused.
///
/// # Errors
/// `is_argument` for fewer than two, and for `lr` without steps; `is_mismatch` where layers or heads differ; otherwise as [`Checkpoint::open`] and
/// where weights cannot be bounded.
pub fn read_checkpoints<P: AsRef<Path>>(
    paths: &[P],
    lr: Option<f64>,
    each: &mut dyn FnMut() -> Result<()>,
) -> Result<(RunInfo, Vec<Record>)> {
    if paths.len() < LEAST {
        return Err(Error::argument(
            "one checkpoint shows no growth: pass two or more checkpoints of one run, or the record of a run",
        ));
    }
    if let Some(lr) = lr.filter(|lr| !(*lr > 0.0 && lr.is_finite())) {
        return Err(Error::argument(format_args!("lr {lr} must be finite and greater than 0")));
    }
    let mut series: Vec<(u64, &Path)> = paths.iter().map(AsRef::as_ref).map(|path| (step_of(path), path)).collect();
    series.sort_by_key(|(step, _)| *step);
    if series.iter().any(|(step, _)| *step == u64::MAX) || series.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        if lr.is_some() {
            return Err(Error::argument(
                "with lr, names of checkpoints end in their steps, all different, as in checkpoint-500: growth is judged \
                 by the steps between them",
            ));
        }
        series = (0..).zip(paths.iter().map(AsRef::as_ref)).collect();
    }
    let mut run = RunInfo { format: FORMAT, source: "checkpoints".into(), ..RunInfo::default() };
    let mut records = Vec::new();
    let earliest = series[0].1;
    for (step, path) in series {
        let checkpoint = Checkpoint::open(path)?;
        let spec = checkpoint.spec();
        let layers: Vec<LayerInfo> = (0..spec.layers.len())
            .map(|layer| {
                let own = spec.layer(layer)?;
                Ok(LayerInfo {
                    layer: own.number,
                    heads: own.n_q_heads,
                    kv_heads: own.n_kv_heads,
                    head_dim: own.d_head,
                    width: Some(spec.d_model),
                    operands: None,
                })
            })
            .collect::<Result<_>>()?;
        if records.is_empty() {
            (run.name, run.layers) = (Some(spec.name.clone()), layers);
        } else if run.layers != layers {
            return Err(Error::mismatch(format_args!(
                "{}: its layers and heads are not those of {}: a series is of one model",
                path.display(),
                earliest.display()
            )));
        }
        records.push(Record::Step(StepRecord { step, lr, ..StepRecord::default() }));
        for layer in 0..spec.layers.len() {
            let number = spec.layer(layer)?.number;
            records.push(Record::Layer(record(&checkpoint, checkpoint.layer(layer)?, (step, number))?));
            each()?;
        }
    }
    Ok((run, records))
}

/// Certified norms and bounds of a layer's heads.
fn record(checkpoint: &Checkpoint, weights: LayerWeights<'_>, (step, layer): (u64, usize)) -> Result<LayerRecord> {
    let mut record = LayerRecord { step, layer, ..LayerRecord::default() };
    let spec = checkpoint.spec();
    let bound = |bounds: &LayerBounds| bounds.heads.iter().map(|head| head.rounded.unwrap_or(f64::NAN)).collect();
    if weights.mla.is_some() {
        record.bound = bound(&MlaBounds::new(spec, weights)?.expanded);
        return Ok(record);
    }
    let geometry = LayerGeometry::new(spec, weights)?;
    let spectrum = GramEngine.layer(&geometry)?;
    record.bound = bound(&LayerBounds::new(spec, &geometry, &spectrum, &Tail::default())?);
    let exact = || spectrum.heads.iter().flatten().filter_map(|head| head.exact);
    record.sigma = exact().map(|exact| exact.sigma_upper).collect();
    record.sigma_rope = exact().map(|exact| exact.sigma_rope_upper).collect();
    if spectrum.heads.is_some() {
        let grams = LayerGrams::new(&geometry, &spectrum.q, &spectrum.k);
        let norm = |pair: &sigmascale::spectral::GramPair| {
            let gram = pair.raw.as_ref().unwrap_or(&pair.effective);
            (gram.matrix.symmetric_eigenvalues().max() * (1.0 + MARGIN) + gram.error()).max(0.0).sqrt()
        };
        record.w_q = grams.q.iter().map(norm).collect();
    }
    Ok(record)
}

/// The number at the end of a checkpoint's name; the largest number where there is none.
pub(super) fn step_of(path: &Path) -> u64 {
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let name = name.strip_suffix(".safetensors").unwrap_or(&name);
    let start = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name[start..].parse().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_stand_at_the_end_of_names() {
        for (name, step) in [("a/checkpoint-500", 500), ("step_12/", 12), ("x7.safetensors", 7), ("70", 70)] {
            assert_eq!(step_of(Path::new(name)), step, "{name}");
        }
        for name in ["model", "7b-chat", "..", "checkpoint-99999999999999999999999"] {
            assert_eq!(step_of(Path::new(name)), u64::MAX, "{name}");
        }
    }
}
