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
                    self.instruction(
                        &mut acc,
                        &p[row * TILE + from..row * TILE + to],
                        &v[from * stride + column..],
                        stride,
                    );
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

/// The power of two that the format's exponent field of `x` means: subnormal numbers have that of `smallest`.
#[inline(always)]
fn exponent(x: f32, smallest: f64) -> f64 {
    let binade = binade(x);
    if binade > 0.0 && binade < smallest { smallest } else { binade }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fp8::{Format, OnOverflow};
    use rand::{SeedableRng, rngs::StdRng};
    use rand_distr::{Distribution, StandardNormal};

    /// One lane of `acc + sum p v`.
    fn fp8(acc: f32, p: &[f32], v: &[f32]) -> f32 {
        let mut lanes = [0.0; LANES];
        lanes[3] = acc;
        let spread: Vec<f32> =
            v.iter().flat_map(|&v| (0..LANES).map(move |lane| if lane == 3 { v } else { 0.0 })).collect();
        FP8.add(&mut lanes, p, &spread, LANES);
        lanes[3]
    }

    fn f16(acc: f32, p: &[f32], v: &[f32]) -> f32 {
        let mut lanes = [acc; LANES];
        let spread: Vec<f32> = v.iter().flat_map(|&v| [v; LANES]).collect();
        F16.add(&mut lanes, p, &spread, LANES);
        lanes[0]
    }

    #[test]
    fn terms_are_truncated_at_the_largest_ones_exponent() {
        let bit = |n: i32| power(n) as f32;
        assert_eq!(fp8(0.0, &[1.5, -2.0], &[2.0, 0.25]), 2.5);
        // 2^-13 of the largest exponent is kept, half of it is not, and truncation is toward zero.
        assert_eq!(fp8(1.0, &[bit(-6)], &[bit(-7)]), 1.0 + bit(-13));
        assert_eq!(fp8(1.0, &[bit(-7)], &[bit(-7)]), 1.0);
        assert_eq!(fp8(1.0, &[-bit(-7)], &[bit(-7)]), 1.0);
        assert_eq!(fp8(-1.0, &[bit(-7)], &[1.5 * bit(-6)]), -1.0 + bit(-13));
        // Each term is truncated before the sum: two halves are lost, too.
        assert_eq!(fp8(1.0, &[bit(-7); 2], &[bit(-7); 2]), 1.0);
        // The largest exponent is that of a product's factors, 1.5 * 1.5 = 2.25 counts as 2^0.
        assert_eq!(fp8(bit(-13), &[1.5], &[1.5]), 2.25 + bit(-13) - bit(-13));
        assert_eq!(fp8(3.0 * bit(-13), &[1.5], &[1.5]), 2.25 + bit(-12), "the sum of 2 has a last bit of 2^-12");
        // Subnormal factors have the exponent of the smallest normal one: 2^-9 * 2^-9 counts as 2^-12.
        assert_eq!(fp8(bit(-27), &[bit(-9)], &[bit(-9)]), bit(-18));
        assert_eq!(fp8(bit(-25), &[bit(-9)], &[bit(-9)]), bit(-18) + bit(-25));
        // Zeros have no exponent.
        assert_eq!(fp8(bit(-27), &[0.0, 448.0], &[448.0, 0.0]), bit(-27));
        assert_eq!(fp8(0.0, &[0.0], &[-1.0]), 0.0);
        assert!(fp8(0.0, &[f32::NAN, 1.0], &[1.0, 1.0]).is_nan() && fp8(0.0, &[1.0], &[f32::INFINITY]).is_nan());
    }

    #[test]
    fn an_instruction_takes_thirty_two_products() {
        // 33 equal products of 2^-14 under 1: all are lost, whichever instruction they are in.
        let small = [1.0 / 128.0; 33];
        assert_eq!(fp8(1.0, &small, &small), 1.0);
        // In front of 1, which is the first of the second instruction, they have been summed.
        let mut p = [1.0 / 128.0; 33];
        let mut v = p;
        (p[32], v[32]) = (1.0, 1.0);
        assert_eq!(fp8(0.0, &p, &v), 1.0 + 32.0 / 16384.0);
        (p, v) = ([1.0 / 128.0; 33], [1.0 / 128.0; 33]);
        (p[31], v[31]) = (1.0, 1.0);
        assert_eq!(fp8(0.0, &p, &v), 1.0);
    }

    #[test]
    fn the_16_bit_accumulator_keeps_25_bits_and_gives_f32() {
        let bit = |n: i32| power(n) as f32;
        // 2^-25 of the largest exponent takes part in the sum; the sum is truncated to f32's 23 bits.
        assert_eq!(f16(1.0, &[bit(-12); 4], &[bit(-13); 4]), 1.0 + bit(-23));
        assert_eq!(f16(1.0, &[bit(-12); 3], &[bit(-13); 3]), 1.0);
        assert_eq!(f16(1.0, &[bit(-13); 8], &[bit(-13); 8]), 1.0);
        assert_eq!(f16(0.0, &[256.0; 1024], &[448.0; 1024]), 256.0 * 448.0 * 1024.0);
    }

    fn e4m3(n: usize, rng: &mut StdRng, change: impl Fn(f32) -> f32) -> Vec<f32> {
        let draw = |_| Format::E4m3.round(change(StandardNormal.sample(rng)), OnOverflow::Saturate);
        (0..n).map(draw).collect()
    }

    /// The figures of MMA-Sim, and those measured on an H200: 6.9e-5 at K = 32, 2.9e-4 at K = 1024.
    #[test]
    fn errors_of_gaussian_sums_are_the_published_ones() {
        let mut rng = StdRng::seed_from_u64(1);
        for (k, samples, range) in [(32, 5000, 5.5e-5..1.05e-4), (1024, 1000, 1.5e-4..3.2e-4)] {
            let mut worst = 0f64;
            for _ in 0..samples {
                let (a, b) = (e4m3(k, &mut rng, |x| x), e4m3(k, &mut rng, |x| x));
                let products = || a.iter().zip(&b).map(|(a, b)| f64::from(a * b));
                let error = (f64::from(fp8(0.0, &a, &b)) - products().sum::<f64>()).abs();
                worst = worst.max(error / products().map(f64::abs).sum::<f64>());
            }
            assert!(range.contains(&worst), "K = {k}: {worst:e}");
        }
    }

    #[test]
    fn sums_of_one_sign_lose_the_published_share() {
        let mut rng = StdRng::seed_from_u64(2);
        for (k, percent) in [(128, 0.06), (256, 0.2), (512, 0.6), (1024, 1.5), (2048, 3.4)] {
            let (mut have, mut want, mut have_16) = (0f64, 0f64, 0f64);
            for _ in 0..100 {
                let (a, b) = (e4m3(k, &mut rng, f32::abs), e4m3(k, &mut rng, f32::abs));
                want += a.iter().zip(&b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
                have += f64::from(fp8(0.0, &a, &b));
                have_16 += f64::from(f16(0.0, &a, &b));
            }
            let lost = 100.0 * (1.0 - have / want);
            assert!((lost / percent - 1.0).abs() < 0.08, "K = {k}: {lost} %");
            assert!((have_16 / want - 1.0).abs() < 1e-5, "K = {k}");
        }
    }
}
