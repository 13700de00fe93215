//! The exact engine: norms from Gram matrices.
//!
//! A layer is read three times here: for the channels' means and norms, for the Grams (which need the means), and for
//! the paper's summed norm, which no bound uses.

use super::dense::{Largest, largest_eigenvalue};
use super::gram::{Gram, GramPair, LayerGrams};
use super::head_grams::HeadGrams;
use super::rope::{pair_norm_square, scaled_square};
use super::spectrum::{Constants, ExactSpectrum, HeadSpectrum, LayerSpectrum, SpectralEngine, layer_channels};
use super::summed::summed_norm;
use crate::error::Result;
use crate::geometry::{Channels, LayerGeometry, Rotary};
use nalgebra::DVector;
use rayon::prelude::*;
use std::time::Instant;

/// The exact engine. Holds no state.
#[derive(Clone, Copy, Debug, Default)]
pub struct GramEngine;

impl SpectralEngine for GramEngine {
    fn layer(&mut self, geometry: &LayerGeometry<'_>) -> Result<LayerSpectrum> {
        let start = Instant::now();
        let [q, k, v] = layer_channels(geometry)?;
        let channels_done = Instant::now();
        if geometry.qk_limits.is_some() {
            return Ok(LayerSpectrum { layer: geometry.layer, heads: None, sigma_sum: None, q, k, v });
        }
        let grams = LayerGrams::new(geometry, &q, &k);
        let grams_done = Instant::now();
        let spectra = |rotary: Option<&Rotary>| -> Vec<HeadSpectrum> {
            let side = |(channels, grams)| Side::new(channels, grams, geometry, rotary);
            let qs: Vec<Side<'_>> = q.par_iter().zip(&grams.q).map(side).collect();
            let ks: Vec<Side<'_>> = k.par_iter().zip(&grams.k).map(side).collect();
            let spectrum = |head| {
                let kv_head = geometry.kv_head(head);
                head_spectrum(head, kv_head, &qs[head], &ks[kv_head], rotary, grams.trace[head])
            };
            (0..qs.len()).into_par_iter().map(spectrum).collect()
        };
        let mut heads = spectra(geometry.rotary.as_ref());
        for rotary in &geometry.other_rotaries {
            heads.iter_mut().zip(spectra(Some(rotary))).for_each(|(head, other)| head.cover(&other));
        }
        let norms_done = Instant::now();
        let sigma_sum = Some(summed_norm(geometry));
        tracing::debug!(
            layer = geometry.layer,
            channels_ms = (channels_done - start).as_secs_f64() * 1e3,
            grams_ms = (grams_done - channels_done).as_secs_f64() * 1e3,
            norms_ms = (norms_done - grams_done).as_secs_f64() * 1e3,
            summed_ms = norms_done.elapsed().as_secs_f64() * 1e3,
            "spectrum"
        );
        Ok(LayerSpectrum { layer: geometry.layer, heads: Some(heads), sigma_sum, q, k, v })
    }
}

/// One projection head: its Grams and what follows from them.
struct Side<'g> {
    gram: &'g Gram,
    /// Of the raw weights, where they differ.
    raw: Option<&'g Gram>,
    largest: Largest,
    folded_upper: f64,
    /// Certified norm of each rotation pair's two columns, then of the fixed columns together.
    block_norms: Vec<f64>,
    /// The fixed columns one by one, with their certified norms.
    fixed_norms: Vec<(usize, f64)>,
    constant: DVector<f64>,
    block_constants: Vec<f64>,
    spread: f64,
}

impl<'g> Side<'g> {
    fn new(channels: &Channels, pass: &'g GramPair, geometry: &LayerGeometry<'_>, rotary: Option<&Rotary>) -> Self {
        let (gram, raw) = (&pass.effective, pass.raw.as_ref());
        let mut largest = largest_eigenvalue(&gram.matrix);
        largest.upper += gram.error();
        let folded_upper = if geometry.centred {
            // diag(g) W_raw = J diag(g) W_raw + 1 mean^T, and the two parts are orthogonal.
            let mean = DVector::from_column_slice(&channels.mean);
            let folded = &gram.matrix + &mean * mean.transpose() * geometry.d_model as f64;
            (largest_eigenvalue(&folded).upper + 2.0 * gram.error()).sqrt()
        } else {
            largest.upper.sqrt()
        };
        let constant = DVector::from_column_slice(&channels.constant);
        let (mut block_norms, mut block_constants) = (Vec::new(), Vec::new());
        let mut fixed_norms = Vec::new();
        if let Some(rotary) = rotary {
            for &(a, b) in &rotary.pairs {
                let g = &gram.matrix;
                block_norms.push((pair_norm_square(g[(a, a)], g[(b, b)], g[(a, b)]) + gram.error()).sqrt());
                block_constants.push(constant[a].hypot(constant[b]));
            }
            let fixed = gram.matrix.select_rows(&rotary.fixed).select_columns(&rotary.fixed);
            block_norms.push((largest_eigenvalue(&fixed).upper + gram.error()).sqrt());
            block_constants.push(rotary.fixed.iter().map(|&c| constant[c].powi(2)).sum::<f64>().sqrt());
            let error = gram.error();
            fixed_norms.extend(rotary.fixed.iter().map(|&c| (c, (gram.matrix[(c, c)].max(0.0) + error).sqrt())));
        }
        let spread = channels.spread.iter().map(|s| s * s).sum::<f64>().sqrt();
        Self { gram, raw, largest, folded_upper, block_norms, fixed_norms, constant, block_constants, spread }
    }

    fn raw(&self) -> &Gram {
        self.raw.unwrap_or(self.gram)
    }

    /// Bound on `||W R c||` over every rotation R, for the other side's constant c.
    fn linear(&self, other: &Self, rotary: Option<&Rotary>) -> f64 {
        let norm = other.constant.norm();
        if norm == 0.0 {
            return 0.0;
        }
        if rotary.is_none() {
            let square = other.constant.dot(&(&self.gram.matrix * &other.constant)) + self.gram.error() * norm * norm;
            return square.max(0.0).sqrt();
        }
        let mut blocks: Vec<f64> = self.block_norms.iter().zip(&other.block_constants).map(|(w, c)| w * c).collect();
        // Column by column where large ones meet small constants.
        let columns: f64 = self.fixed_norms.iter().map(|&(c, norm)| norm * other.constant[c].abs()).sum();
        if let Some(fixed) = blocks.last_mut() {
            *fixed = fixed.min(columns);
        }
        blocks.iter().sum::<f64>().min(self.largest.upper.sqrt() * norm)
    }
}

fn head_spectrum(
    head: usize,
    kv_head: usize,
    q: &Side<'_>,
    k: &Side<'_>,
    rotary: Option<&Rotary>,
    trace: f64,
) -> HeadSpectrum {
    let grams = HeadGrams { q: q.gram, k: k.gram };
    let sigma = grams.sigma_square();
    let sigma_raw = if q.raw.is_none() && k.raw.is_none() {
        sigma.value
    } else {
        HeadGrams { q: q.raw(), k: k.raw() }.sigma_square().value
    };
    let frobenius_square = grams.frobenius_square();
    let frobenius_rope_square = grams.frobenius_rope_square(rotary);
    let scaled = rotary.map(|rotary| scaled_square(q.gram, k.gram, rotary));
    let rope = match scaled {
        Some(scaled) => {
            let product =
                Largest { value: q.largest.value * k.largest.value, upper: q.largest.upper * k.largest.upper };
            Largest {
                value: scaled.value.min(product.value).min(frobenius_rope_square).max(sigma.value),
                upper: scaled.upper.min(product.upper).min(frobenius_rope_square),
            }
        }
        None => sigma,
    };
    let c0 = match rotary {
        Some(rotary) => {
            // Channels that do not rotate give the same product at every relative position.
            let fixed: f64 = rotary.fixed.iter().map(|&c| q.constant[c] * k.constant[c]).sum();
            let turned = q.block_constants.iter().zip(&k.block_constants).take(rotary.pairs.len());
            turned.map(|(a, b)| a * b).sum::<f64>() + fixed.abs()
        }
        None => q.constant.dot(&k.constant).abs(),
    };
    HeadSpectrum {
        head,
        kv_head,
        sigma: sigma.value.sqrt(),
        sigma_raw: sigma_raw.sqrt(),
        exact: Some(ExactSpectrum {
            sigma_upper: sigma.upper.sqrt(),
            sigma_rope: rope.value.sqrt(),
            sigma_rope_upper: rope.upper.sqrt(),
            frobenius: frobenius_square.sqrt(),
            frobenius_rope_upper: frobenius_rope_square.sqrt(),
            sigma_q_upper: q.largest.upper.sqrt(),
            sigma_k_upper: k.largest.upper.sqrt(),
            folded_q_upper: q.folded_upper,
            folded_k_upper: k.folded_upper,
            balanced_upper: scaled.map(|scaled| scaled.upper.sqrt()),
            trace,
        }),
        power: None,
        constants: Constants {
            a: q.linear(k, rotary),
            b: k.linear(q, rotary),
            c0,
            norm_q: q.constant.norm(),
            norm_k: k.constant.norm(),
            spread_q: q.spread,
            spread_k: k.spread,
        },
    }
}
