//! How Hopper's tensor cores add: a model of one `wgmma` instruction, exact to the bit as far as is published.
//!
//! An instruction adds `depth` products to an accumulator. Every product and the accumulator are aligned to the largest
//! exponent among them and truncated toward zero to `fraction` bits after the point; the truncated terms are summed
//! exactly, and the sum is truncated to the accumulator's `mantissa` bits:
//!
//! ```text
//! u   = largest of 2^(exponent(p_j) + exponent(v_j)) and 2^exponent(acc)       over terms that are not zero
//! sum = trunc(acc 2^fraction / u) + sum_j trunc(p_j v_j 2^fraction / u)
//! acc = chop(sum u / 2^fraction)
//! ```
//!
//! | instruction | `depth` | `fraction` | `mantissa` |
//! |---|---|---|---|
//! | E4M3 x E4M3 | 32 | 13 | 13 (FP22: sign, 8 exponent bits, 13 bits) |
//! | F16 x F16, BF16 x BF16 | 16 | 25 | 23 (f32) |
//!
//! In FP8 a product loses what lies under `2^-13` of the running sum, so a long sum of one sign comes out too small.
//!
//! Source: MMA-Sim (arXiv 2511.10909). **Departures**: accumulators below `2^-126` count as that; a sum with a term
//! that is not finite is NaN.

use super::lanes::{LANES, TILE};

/// One tensor-core instruction: products of `D` pairs, `F` bits after the point, `M` bits in the accumulator, operands
/// with exponents from `-E` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorCore<const D: usize, const F: i32, const M: u32, const E: i32>;

/// `wgmma` on E4M3 operands.
pub(super) const FP8: TensorCore<32, 13, 13, 6> = TensorCore;
/// `wgmma` on F16 operands, and on E4M3 values held in F16.
pub(super) const F16: TensorCore<16, 25, 23, 14> = TensorCore;

impl<const D: usize, const F: i32, const M: u32, const E: i32> TensorCore<D, F, M, E> {
    /// `acc[lane] += sum_j p[j] v[j stride + lane]`, an instruction for each `D` of the `p`.
    #[inline(always)]
    pub(super) fn add(self, acc: &mut [f32; LANES], p: &[f32], v: &[f32], stride: usize) {
        for (chunk, p) in p.chunks(D).enumerate() {
            self.instruction(acc, p, &v[chunk * D * stride..], stride);
        }
    }

    #[inline(always)]
    fn instruction(self, acc: &mut [f32; LANES], p: &[f32], v: &[f32], stride: usize) {
        let smallest = power(-E);
        // Floating-point numbers that are powers of two stand for the exponents.
        let mut unit = acc.map(|acc| larger(binade(acc), power(-126)));
        for (j, &p) in p.iter().enumerate() {
            let p = exponent(p, smallest);
            for (unit, &v) in unit.iter_mut().zip(&v[j * stride..][..LANES]) {
                *unit = larger(p * exponent(v, smallest), *unit);
            }
        }
        let scale = unit.map(|unit| power(F) / unit);
        let mut sums: [f64; LANES] = std::array::from_fn(|lane| (f64::from(acc[lane]) * scale[lane]).trunc());
        for (j, &p) in p.iter().enumerate() {
            for ((sum, scale), &v) in sums.iter_mut().zip(scale).zip(&v[j * stride..][..LANES]) {
                *sum += (f64::from(p * v) * scale).trunc();
            }
        }
        for ((acc, sum), scale) in acc.iter_mut().zip(sums).zip(scale) {
            // The sum is an integer of at most 32 bits: f64 holds it, and its low bits are what the accumulator drops.
            let chopped = f64::from_bits(sum.to_bits() & (u64::MAX << (52 - M)));
            *acc = (chopped / scale) as f32;
        }
    }

    /// As [`lanes::logits`](super::lanes::logits): a query tile times a transposed key tile.
    #[inline(always)]
    pub(super) fn logits(self, q: &[f32], keys: &[f32], stride: usize, rows: usize, columns: usize, out: &mut [f32]) {
        for (q, out) in q.chunks_exact(stride).zip(out.chunks_exact_mut(TILE)).take(rows) {
            for column in (0..columns).step_by(LANES) {
                let mut acc = [0.0; LANES];
                self.add(&mut acc, q, &keys[column..], TILE);
                out[column..column + LANES].copy_from_slice(&acc);
            }
        }
    }

    /// As [`lanes::values`](super::lanes::values): `out += p v`.
    #[inline(always)]
    pub(super) fn values(
        self,
        p: &[f32],
        v: &[f32],
        stride: usize,
        (first, count): (usize, usize),
        (from, to): (usize, usize),
        out: &mut [f32],
    ) {
        for row in first..first + count {
            for column in (0..stride).step_by(LANES) {
                let out = &mut out[row * stride + column..][..LANES];
                let mut acc = std::array::from_fn(|lane| out[lane]);
                // Instructions begin at multiples of their depth, whatever the first key is.
                for start in (from / D * D..to).step_by(D) {
                    let (from, to) = (start.max(from), (start + D).min(to));
                    self.instruction(&mut acc, &p[row * TILE + from..row * TILE + to], &v[from * stride + column..], stride);
                }
                out.copy_from_slice(&acc);
            }
        }
    }
}

#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

/// `2^exponent` of a normal f64.
#[inline(always)]
fn power(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// The largest power of two not above `|x|`; 0 of 0, infinite where x is not finite.
#[inline(always)]
fn binade(x: f32) -> f64 {
    f64::from(f32::from_bits(x.to_bits() & 0x7f80_0000))
}

/// The power of two that the format's exponent field of `x` stands for: subnormal numbers have that of `smallest`.
#[inline(always)]
fn exponent(x: f32, smallest: f64) -> f64 {
    let binade = binade(x);
    if binade > 0.0 && binade < smallest { smallest } else { binade }
}
