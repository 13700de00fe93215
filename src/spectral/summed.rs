//! Norm of the sum of all heads' operators, from the weights.

use super::dense::lanczos_within;
use crate::geometry::{HeadOperator, LayerGeometry, PANEL};
use half::bf16;
use nalgebra::DVector;
use rayon::prelude::*;

/// Entries of the summed operator from which it is kept in BF16 and iterated less.
const LARGE: usize = 2_000_000;

/// `||sum_h W_Q^h W_K^hT||` on raw weights, by Lanczos on `M^T M`. It bounds nothing; it is for comparison with the paper.
///
/// A group's queries share their keys, so their W_Q are added up once and the matrix is `d x (n_kv r)` times its
/// partner. Up to a size both are held in f32 and iterated up to 60 times: good to 1e-4. Beyond it the time goes into
/// reading them, so they are held in BF16 and iterated 14 times: still good to about 1e-3 where the spectrum decays as in
/// trained weights, a percent too low where it is flat.
pub fn summed_norm(geometry: &LayerGeometry<'_>) -> f64 {
    if 2 * geometry.k.len() * geometry.d_head * geometry.d_model < LARGE {
        summed_norm_in::<f32>(geometry, 60)
    } else {
        summed_norm_in::<bf16>(geometry, 14)
    }
}

/// How an entry of the summed operator is held.
trait Stored: Copy + Send + Sync {
    fn store(x: f32) -> Self;
    fn load(self) -> f32;
}

impl Stored for f32 {
    fn store(x: f32) -> Self {
        x
    }
    fn load(self) -> f32 {
        self
    }
}

impl Stored for bf16 {
    fn store(x: f32) -> Self {
        Self::from_f32(x)
    }
    #[inline(always)]
    fn load(self) -> f32 {
        // The crate's own conversion quiets NaNs, which costs the vectorization.
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

fn summed_norm_in<T: Stored>(geometry: &LayerGeometry<'_>, steps: usize) -> f64 {
    let d = geometry.d_model;
    let (q, size_q) = summed_operator::<T>(geometry, &geometry.q);
    let (k, size_k) = summed_operator::<T>(geometry, &geometry.k);
    let scale = size_q * size_k;
    if scale == 0.0 || !scale.is_finite() {
        return scale;
    }
    let half = |from: &[T], to: &[T], x: &[f32]| -> Vec<f32> {
        let y: Vec<f32> = from.par_chunks_exact(d).map(|line| dot32(line, x)).collect();
        let mut out = vec![0.0f32; d];
        out.par_chunks_mut(1024).enumerate().for_each(|(block, out)| {
            for (line, y) in to.chunks_exact(d).zip(&y) {
                out.iter_mut().zip(&line[block * 1024..]).for_each(|(o, w)| *o += w.load() * y);
            }
        });
        out
    };
    let square = lanczos_within(d, 0, steps, 1e-7, |x| {
        let x: Vec<f32> = x.iter().map(|&x| x as f32).collect();
        let out = half(&q, &k, &half(&k, &q, &x));
        DVector::from_iterator(d, out.into_iter().map(f64::from))
    });
    square.sqrt() * scale
}

/// One side of the summed operator, `n_kv r` lines of `d` entries, scaled to a largest entry of one (squared weights must
/// not leave f32), and the scale.
fn summed_operator<T: Stored>(geometry: &LayerGeometry<'_>, heads: &[HeadOperator<'_>]) -> (Vec<T>, f64) {
    let (d, r, n_kv) = (geometry.d_model, geometry.d_head, geometry.k.len());
    let group = heads.len() / n_kv;
    let blocks: Vec<(Vec<f32>, f32)> = heads
        .par_chunks_exact(group)
        .map(|group| {
            let (mut block, mut panel) = (vec![0.0f32; r * d], vec![0.0; r * PANEL]);
            for (head, start) in group.iter().flat_map(|head| (0..d).step_by(PANEL).map(move |start| (head, start))) {
                let n = PANEL.min(d - start);
                head.read_raw(start, n, &mut panel[..r * n]);
                for (line, out) in panel[..r * n].chunks_exact(n).zip(block.chunks_exact_mut(d)) {
                    out[start..start + n].iter_mut().zip(line).for_each(|(o, w)| *o += *w as f32);
                }
            }
            let largest = block.iter().map(|w| w.abs()).fold(0.0, f32::max);
            (block, largest)
        })
        .collect();
    let largest = blocks.iter().map(|(_, largest)| *largest).fold(0.0, f32::max);
    // Divided in f64: the reciprocal of a subnormal is infinite in f32.
    let unit = if largest > 0.0 { 1.0 / f64::from(largest) } else { 0.0 };
    let scaled = blocks
        .into_par_iter()
        .flat_map_iter(|(block, _)| block.into_iter().map(|w| T::store((f64::from(w) * unit) as f32)))
        .collect();
    (scaled, f64::from(largest))
}

fn dot32<T: Stored>(a: &[T], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a16, b16) = (a.chunks_exact(16), b.chunks_exact(16));
    let rest: f32 = a16.remainder().iter().zip(b16.remainder()).map(|(x, y)| x.load() * y).sum();
    for (x, y) in a16.zip(b16) {
        for i in 0..16 {
            sums[i] += x[i].load() * y[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}
