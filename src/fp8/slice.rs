//! Whole slices: one pass that scales, casts and counts.

use super::{Format, INFINITY, Layout, MAGNITUDE, OnOverflow, encode, encode_within, round, round_within, with_layout};
use crate::error::{Error, Result};
use pulp::NullaryFnOnce;
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::{Add, AddAssign};

/// Values that one conversion saw. `y = x * multiplier` in f32, before the cast.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    /// Largest |x| before scaling; NaN if any x is NaN.
    pub amax: f32,
    /// Finite x with |y| above the format's maximum (448 for E4M3).
    pub overflow: u64,
    /// Finite x with |y| above [`Format::last_rounding`] (464 for E4M3); counted in `overflow` too.
    pub beyond_rounding: u64,
    /// x that are NaN or infinite; in neither of the two above.
    pub non_finite: u64,
    /// Values seen.
    pub count: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        // As magnitudes of bit patterns NaN is the largest and stays.
        self.amax = f32::from_bits(self.amax.to_bits().max(other.amax.to_bits()));
        self.overflow += other.overflow;
        self.beyond_rounding += other.beyond_rounding;
        self.non_finite += other.non_finite;
        self.count += other.count;
    }
}

impl Add for Counts {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl Format {
    /// Codes of `x * multiplier`, and what left the range.
    ///
    /// `multiplier` is a quantization scale, `1 / descale`. `out` has the length of `x`.
    ///
    /// # Errors
    /// If the lengths differ, or if `multiplier` is not finite and greater than zero.
    ///
    /// ```
    /// # use sigmascale::fp8::{Format, OnOverflow};
    /// let mut codes = [0; 3];
    /// let counts = Format::E4m3.encode_slice(&[1.0, 450.0, 500.0], 1.0, OnOverflow::Saturate, &mut codes)?;
    /// assert_eq!(codes, [0x38, 0x7e, 0x7e]);
    /// assert_eq!((counts.overflow, counts.beyond_rounding), (2, 1));
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn encode_slice(self, x: &[f32], multiplier: f32, on_overflow: OnOverflow, out: &mut [u8]) -> Result<Counts> {
        check(x.len(), out.len(), multiplier)?;
        let saturate = on_overflow == OnOverflow::Saturate;
        Ok(
            with_layout!(self, L => convert::<L, _>(x, multiplier, out, move |y| encode::<L>(y, saturate), encode_within::<L>)),
        )
    }

    /// The values that the codes of [`Format::encode_slice`] represent, not multiplied back.
    ///
    /// # Errors
    /// As [`Format::encode_slice`].
    pub fn round_slice(self, x: &[f32], multiplier: f32, on_overflow: OnOverflow, out: &mut [f32]) -> Result<Counts> {
        check(x.len(), out.len(), multiplier)?;
        let saturate = on_overflow == OnOverflow::Saturate;
        Ok(
            with_layout!(self, L => convert::<L, _>(x, multiplier, out, move |y| round::<L>(y, saturate), round_within::<L>)),
        )
    }

    /// The counts of [`Format::encode_slice`] without the cast.
    ///
    /// # Errors
    /// If `multiplier` is not finite and greater than zero.
    pub fn count_slice(self, x: &[f32], multiplier: f32) -> Result<Counts> {
        check(0, 0, multiplier)?;
        Ok(with_layout!(self, L => count::<L>(x, multiplier)))
    }
}

fn check(left: usize, right: usize, multiplier: f32) -> Result<()> {
    if left != right {
        return Err(Error::argument(format_args!("slices of {left} and {right} values must have one length")));
    }
    if !(multiplier.is_finite() && multiplier > 0.0) {
        return Err(Error::argument(format_args!("multiplier {multiplier} must be finite and greater than zero")));
    }
    Ok(())
}

/// Short enough for u32 counters, long enough to forget the loop around it.
const CHUNK: usize = 4096;

/// Values of one task of a long slice.
const SHARE: usize = 1 << 16;

/// Lane-wise tallies of one chunk, kept as integers so that the loop has no branch.
#[derive(Default)]
struct Tally {
    amax: i32,
    overflow: i32,
    beyond: i32,
    non_finite: i32,
}

impl Tally {
    #[inline(always)]
    fn see<L: Layout>(&mut self, x: f32, y: f32) {
        let ax = (x.to_bits() & MAGNITUDE) as i32;
        let ay = (y.to_bits() & MAGNITUDE) as i32;
        self.amax = self.amax.max(ax);
        self.overflow += i32::from(ay > L::MAX.to_bits() as i32);
        self.beyond += i32::from(ay > L::LAST_ROUNDING.to_bits() as i32);
        self.non_finite += i32::from(ax >= INFINITY);
    }

    fn counts(&self, count: usize) -> Counts {
        Counts {
            amax: f32::from_bits(self.amax as u32),
            // Scaling leaves NaN and infinity what they are, so these counts hold them too.
            overflow: (self.overflow - self.non_finite) as u64,
            beyond_rounding: (self.beyond - self.non_finite) as u64,
            non_finite: self.non_finite as u64,
            count: count as u64,
        }
    }
}

/// The loop of a conversion, compiled once for each vector width.
struct Convert<'a, L, T, F, W> {
    x: &'a [f32],
    multiplier: f32,
    out: &'a mut [T],
    cast: F,
    within: W,
    layout: PhantomData<L>,
}

impl<L: Layout, T, F: Fn(f32) -> T, W: Fn(f32) -> T> NullaryFnOnce for Convert<'_, L, T, F, W> {
    type Output = Counts;

    #[inline(always)]
    fn call(self) -> Counts {
        let mut total = Counts::default();
        for (x, out) in self.x.chunks(CHUNK).zip(self.out.chunks_mut(CHUNK)) {
            // The second look at a chunk finds it in the nearest cache.
            let amax = x.iter().fold(0, |amax: i32, x| amax.max((x.to_bits() & MAGNITUDE) as i32));
            let amax = f32::from_bits(amax as u32);
            // A product with a number above zero grows with the other factor, rounded or not.
            if amax * self.multiplier <= L::MAX {
                for (out, x) in out.iter_mut().zip(x) {
                    *out = (self.within)(x * self.multiplier);
                }
                total += Counts { amax, count: x.len() as u64, ..Counts::default() };
                continue;
            }
            let mut tally = Tally::default();
            for (out, &x) in out.iter_mut().zip(x) {
                let y = x * self.multiplier;
                tally.see::<L>(x, y);
                *out = (self.cast)(y);
            }
            total += tally.counts(x.len());
        }
        total
    }
}

/// [`Convert`], over rayon's threads when the slice is long.
fn convert<L: Layout, T: Send>(
    x: &[f32],
    multiplier: f32,
    out: &mut [T],
    cast: impl Fn(f32) -> T + Copy + Send + Sync,
    within: impl Fn(f32) -> T + Copy + Send + Sync,
) -> Counts {
    let run =
        |(x, out)| pulp::Arch::new().dispatch(Convert { x, multiplier, out, cast, within, layout: PhantomData::<L> });
    if x.len() < 4 * SHARE {
        return run((x, out));
    }
    let parts = x.par_chunks(SHARE).zip(out.par_chunks_mut(SHARE)).map(run);
    parts.reduce(Counts::default, |a, b| a + b)
}

/// The loop of [`Format::count_slice`].
struct Count<'a, L> {
    x: &'a [f32],
    multiplier: f32,
    layout: PhantomData<L>,
}

impl<L: Layout> NullaryFnOnce for Count<'_, L> {
    type Output = Counts;

    #[inline(always)]
    fn call(self) -> Counts {
        let mut total = Counts::default();
        for x in self.x.chunks(CHUNK) {
            let amax = x.iter().fold(0, |amax: i32, x| amax.max((x.to_bits() & MAGNITUDE) as i32));
            let amax = f32::from_bits(amax as u32);
            if amax * self.multiplier <= L::MAX {
                total += Counts { amax, count: x.len() as u64, ..Counts::default() };
                continue;
            }
            let mut tally = Tally::default();
            for &x in x {
                tally.see::<L>(x, x * self.multiplier);
            }
            total += tally.counts(x.len());
        }
        total
    }
}

fn count<L: Layout>(x: &[f32], multiplier: f32) -> Counts {
    pulp::Arch::new().dispatch(Count { x, multiplier, layout: PhantomData::<L> })
}
