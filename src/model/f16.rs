//! Weights that are rounded to F16 when they are loaded.
//!
//! A normal weight moves by `2^-11` of itself, less than by the rounding to BF16 that bounds count. One below `2^-14` moves by up
//! to `2^-25`, however small it is, and one above 65504 becomes infinite. With the gain g of the norm, all of a head's r x d weights
//! together move it by at most `max|g| sqrt(r d) 2^-25`: up to `2^-9` of its largest channel, the counted roundings cover that too.

use super::spec::{AttentionSpec, GainForm, NormKind};
use super::weights::{LayerWeights, Projection};
use crate::error::{Error, Result};
use crate::tensor::Dtype;

/// Largest number of F16.
const MOST: f64 = 65504.0;
/// Half a step of its numbers under the normal ones.
const FLUSH: f64 = 1.0 / (1u64 << 25) as f64;
/// Share of a head that the roundings of a forward in BF16 leave to one in F16.
const SHARE: f64 = 1.0 / 512.0;
/// Rows that are read at a time.
const ROWS: usize = 16;

/// Refuses a layer whose projections, stored in another type, are none in F16 that the bounds cover.
pub(super) fn check(spec: &AttentionSpec, weights: &LayerWeights<'_>) -> Result<()> {
    let form = |gain: &f64| if spec.norm.gain == GainForm::OnePlus { 1.0 + gain } else { *gain };
    let gain: Option<Vec<f64>> = weights.norm_gain.as_ref().map(|gain| gain.iter().map(form).collect());
    let bounded = spec.norm.kind != NormKind::None;
    for projection in [&weights.q, &weights.k, &weights.v] {
        if projection.dtype() == Dtype::F16 {
            continue;
        }
        // Of latent attention only the query may read the norm's output.
        let gain = gain.as_deref().filter(|gain| projection.heads.iter().all(|head| head.shape().1 == gain.len()));
        check_projection(projection, gain, bounded)?;
    }
    Ok(())
}

fn check_projection(projection: &Projection<'_>, gain: Option<&[f64]>, bounded: bool) -> Result<()> {
    let refuse = |head: usize, what: std::fmt::Arguments<'_>| {
        Err(Error::unsupported(format_args!(
            "{} head {head}: {what} in float16, in which the config runs the model: run it in bfloat16",
            projection.name
        )))
    };
    if projection.bias.iter().flatten().any(|bias| bias.abs() > MOST) {
        return refuse(0, format_args!("a bias above {MOST} is infinite"));
    }
    for (number, head) in projection.heads.iter().enumerate() {
        let (rows, cols) = head.shape();
        let mut values = vec![0.0; ROWS.min(rows.max(1)) * cols];
        let (mut largest, mut most) = (0f64, 0f64);
        for start in (0..rows).step_by(ROWS) {
            let count = ROWS.min(rows - start);
            let values = &mut values[..count * cols];
            head.read_block(start..start + count, 0..cols, values);
            for row in values.chunks_exact_mut(cols) {
                most = row.iter().fold(most, |most, w| most.max(w.abs()));
                if let Some(gain) = gain {
                    row.iter_mut().zip(gain).for_each(|(w, gain)| *w *= gain);
                }
                largest = largest.max(row.iter().map(|w| w * w).sum::<f64>().sqrt());
            }
        }
        if most > MOST {
            return refuse(number, format_args!("a weight of {most:e} is infinite"));
        }
        if bounded && (cols as f64).sqrt() * largest > MOST {
            return refuse(number, format_args!("a value can pass {MOST}, the largest number"));
        }
        let gain = gain.map_or(1.0, |gain| gain.iter().fold(0.0, |most: f64, gain| most.max(gain.abs())));
        let moved = gain * ((rows * cols) as f64).sqrt() * FLUSH;
        if largest > 0.0 && moved > SHARE * largest {
            return refuse(
                number,
                format_args!("weights of at most {most:e} are rounded by more than the bounds count"),
            );
        }
    }
    Ok(())
}
