//! Stochastic rounding of an output to bfloat16, on the CPU alone: for comparison in the lab of low precision.
//!
//! A value is rounded up with a probability equal to its share of the gap, so that the mean error is zero whatever the values.
//! Rounding to the nearest has a sign of its own where many rows hold nearly the same value, as those do whose largest logits
//! belong to equal keys. The bits follow from the place of the element alone: a call repeats bit for bit.

/// A permutation of 32 bits in which each bit depends on all (Wellons, "lowbias32").
fn mix(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

/// Rounds the channels of row `row` of `(batch, len_q, heads)`.
pub(super) fn round_row(x: &mut [f32], row: usize) {
    let base = (row as u32).wrapping_mul(0x9e37_79b1);
    for (pair, x) in x.chunks_mut(2).enumerate() {
        let bits = mix(base.wrapping_add(pair as u32));
        for (x, bits) in x.iter_mut().zip([bits & 0xffff, bits >> 16]) {
            *x = round(*x, bits);
        }
    }
}

/// `x` rounded by 16 uniform bits. NaN and infinity stay.
fn round(x: f32, bits: u32) -> f32 {
    if x.is_finite() { f32::from_bits(x.to_bits().wrapping_add(bits) & 0xffff_0000) } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn the_mean_error_is_zero_and_no_error_passes_a_unit() {
        for x in [1.0 + 1.0 / 1024.0, -3.217f32, 1.3e-5, 1.0 / 3.0] {
            let (mut sum, n) = (0.0, 1 << 16);
            for row in 0..n / 64 {
                let mut values = [x; 64];
                round_row(&mut values, row);
                for y in values {
                    assert_eq!(y, bf16::from_f32(y).to_f32());
                    assert!((y - x).abs() < x.abs() / 128.0, "{x} to {y}");
                    sum += f64::from(y - x);
                }
            }
            let nearest = f64::from(bf16::from_f32(x).to_f32() - x).abs();
            let mean = (sum / f64::from(n as u32)).abs();
            // Four deviations of a mean of so many.
            assert!(mean < f64::from(x.abs()) / 256.0 * 4.0 / 256.0, "{x}: {mean}");
            assert!(nearest > 4.0 * mean, "{x}: {mean} against {nearest}");
        }
    }

    #[test]
    fn values_of_bf16_infinity_and_nan_stay() {
        let mut values =
            [1.5, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::from_bits(0x7fff_ffff), 0.0, -2.0];
        let before = values;
        round_row(&mut values, 77);
        for (have, want) in values.iter().zip(before) {
            assert!(have.to_bits() == want.to_bits() || have.is_nan() && want.is_nan(), "{want} to {have}");
        }
    }
}
