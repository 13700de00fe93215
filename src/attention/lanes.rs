//! The inner loops of the CPU backend.
//!
//! Every loop has a fixed order of operations and no fused multiply-add, so that results have the same bits on every
//! CPU, with whatever vector width the compiler finds.

use half::bf16;

/// Rows of a query tile, and keys of a key tile.
pub(super) const TILE: usize = 64;
/// Rows of one register block.
const ROWS: usize = 4;
/// Width of one register block; rows are padded to a multiple of it.
pub(super) const LANES: usize = 16;

/// `exp(x)` in f32 to 2 units in the last place: `2^n` times a polynomial of degree 7 on `|r| <= ln 2 / 2`.
///
/// `exp(0) = 1` exactly; 0 below -87.3 where f32 has no normal numbers; NaN stays NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.33;
    const HIGHEST: f32 = 88.37;
    // ln 2 in two parts; the first has so few bits that its product with n is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 leaves an f32 no fraction: it rounds to an integer, found in the low bits.
    const INTEGER: f32 = 12_582_912.0;
    // Written as comparisons, which let NaN pass.
    let bounded = if x < LOWEST { LOWEST } else { x };
    let bounded = if bounded > HIGHEST { HIGHEST } else { bounded };
    let shifted = bounded * std::f32::consts::LOG2_E + INTEGER;
    let n = shifted - INTEGER;
    let r = (bounded - n * LN2_HIGH) - n * LN2_LOW;
    let mut poly = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        poly = poly * r + coefficient;
    }
    let value = poly * (r * r) + r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(INTEGER.to_bits()).wrapping_add(127) << 23;
    let value = value * f32::from_bits(exponent);
    let value = if x > HIGHEST { f32::INFINITY } else { value };
    let value = if x < LOWEST { 0.0 } else { value };
    if x.is_nan() { x } else { value }
}

/// Rounds every value to bfloat16.
#[inline(always)]
pub(super) fn round_bf16(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
}

/// Folds a slice into [`LANES`] accumulators: element `i` goes to lane `i % LANES`.
#[inline(always)]
fn fold<T: Copy>(x: &[f32], start: T, step: impl Fn(T, f32) -> T) -> [T; LANES] {
    let mut lanes = [start; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane = step(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = step(*lane, x);
    }
    lanes
}

/// Sum, in a fixed order.
#[inline(always)]
pub(super) fn sum(x: &[f32]) -> f32 {
    fold(x, 0f32, |a, x| a + x).into_iter().sum()
}

/// Largest value; NaN is passed over, `-inf` for nothing.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let step = |a: f32, x: f32| if x > a { x } else { a };
    fold(x, f32::NEG_INFINITY, step).into_iter().fold(f32::NEG_INFINITY, step)
}

/// Smallest value; NaN is passed over, `+inf` for nothing.
#[inline(always)]
pub(super) fn min(x: &[f32]) -> f32 {
    let step = |a: f32, x: f32| if x < a { x } else { a };
    fold(x, f32::INFINITY, step).into_iter().fold(f32::INFINITY, step)
}

/// How many values have a property.
#[inline(always)]
pub(super) fn count(x: &[f32], has: impl Fn(f32) -> bool) -> u64 {
    fold(x, 0i32, |a, x| a + i32::from(has(x))).into_iter().map(|n| n as u64).sum()
}

/// How many values are NaN or infinite.
#[inline(always)]
pub(super) fn non_finite(x: &[f32]) -> u64 {
    count(x, |x| x.to_bits() & 0x7fff_ffff >= 0x7f80_0000)
}

/// Dot product of two rows of one length.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += a * b;
    }
    lanes.into_iter().sum()
}

/// A query tile `(rows, stride)` times a transposed key tile `(stride, TILE)`: the first `columns` of every row of
/// `out`, `(rows, TILE)`, rounded up to whole register blocks.
#[inline(always)]
pub(super) fn logits(q: &[f32], keys: &[f32], stride: usize, rows: usize, columns: usize, out: &mut [f32]) {
    let mut row = 0;
    while row < rows {
        let count = if row + ROWS <= rows { ROWS } else { 1 };
        for column in (0..columns).step_by(LANES) {
            let q = &q[row * stride..(row + count) * stride];
            let out = &mut out[row * TILE..(row + count) * TILE];
            if count == ROWS {
                logits_block::<ROWS>(q, keys, stride, column, out);
            } else {
                logits_block::<1>(q, keys, stride, column, out);
            }
        }
        row += count;
    }
}

#[inline(always)]
fn logits_block<const R: usize>(q: &[f32], keys: &[f32], stride: usize, column: usize, out: &mut [f32]) {
    let rows: [&[f32]; R] = std::array::from_fn(|r| &q[r * stride..(r + 1) * stride]);
    let mut sums = [[0f32; LANES]; R];
    let (keys, _) = keys.as_chunks::<TILE>();
    for (c, keys) in keys[..stride].iter().enumerate() {
        let keys: &[f32; LANES] = block(keys, column);
        for (sums, row) in sums.iter_mut().zip(rows) {
            let q = row[c];
            for (sum, key) in sums.iter_mut().zip(keys) {
                *sum += q * key;
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        out[r * TILE + column..][..LANES].copy_from_slice(sums);
    }
}

/// [`LANES`] values from `at` on.
#[inline(always)]
fn block(x: &[f32], at: usize) -> &[f32; LANES] {
    &x[at..].as_chunks::<LANES>().0[0]
}

/// `out += p v` for rows `first .. first + count` of p, `(_, TILE)`, and the keys `from..to` of v, `(TILE, stride)`.
/// p is zero where a row does not see a key of that range.
#[inline(always)]
pub(super) fn values(
    p: &[f32],
    v: &[f32],
    stride: usize,
    (first, count): (usize, usize),
    (from, to): (usize, usize),
    out: &mut [f32],
) {
    let mut row = first;
    while row < first + count {
        let rows = if row + ROWS <= first + count { ROWS } else { 1 };
        let p = &p[row * TILE..(row + rows) * TILE];
        let out = &mut out[row * stride..(row + rows) * stride];
        for column in (0..stride).step_by(LANES) {
            if rows == ROWS {
                values_block::<ROWS>(p, v, stride, column, from, to, out);
            } else {
                values_block::<1>(p, v, stride, column, from, to, out);
            }
        }
        row += rows;
    }
}

#[inline(always)]
fn values_block<const R: usize>(
    p: &[f32],
    v: &[f32],
    stride: usize,
    column: usize,
    from: usize,
    to: usize,
    out: &mut [f32],
) {
    let rows: [&[f32]; R] = std::array::from_fn(|r| &p[r * TILE..(r + 1) * TILE]);
    let mut sums: [[f32; LANES]; R] = std::array::from_fn(|r| *block(out, r * stride + column));
    for j in from..to {
        let v = block(v, j * stride + column);
        for (sums, row) in sums.iter_mut().zip(rows) {
            let p = row[j];
            for (sum, v) in sums.iter_mut().zip(v) {
                *sum += p * v;
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        out[r * stride + column..][..LANES].copy_from_slice(sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!((exp(f32::NEG_INFINITY), exp(-1e9), exp(f32::INFINITY)), (0.0, 0.0, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
        for i in 0..1_000_000 {
            let x = -87.3 + i as f32 * 1.75e-4;
            let (have, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((have - want).abs() <= 2.0 * want * 2f64.powi(-23), "{x}: {have} {want}");
        }
    }

    #[test]
    fn reductions_take_every_element_once() {
        for n in [0, 1, 15, 16, 17, 63, 64] {
            let x: Vec<f32> = (0..n).map(|i| i as f32 - 20.0).collect();
            assert_eq!(sum(&x), x.iter().sum::<f32>());
            assert_eq!(dot(&x, &x), x.iter().map(|x| x * x).sum::<f32>());
            assert_eq!(max(&x), x.last().copied().unwrap_or(f32::NEG_INFINITY));
            assert_eq!(min(&x), x.first().copied().unwrap_or(f32::INFINITY));
        }
        assert_eq!(non_finite(&[1.0, f32::NAN, f32::MAX, f32::NEG_INFINITY]), 2);
        assert_eq!((max(&[f32::NAN, 1.0]), min(&[f32::NAN, 1.0])), (1.0, 1.0));
    }
}
