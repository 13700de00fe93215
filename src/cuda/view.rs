//! Arrays in device memory that the caller owns.

use super::pointer::DevicePtr;
use crate::error::{Error, Result};
use std::ops::Range;

/// Type of the elements of a [`View`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// OCP FP8 E4M3 (maximum 448).
    E4m3,
    /// Signed 32-bit integers.
    I32,
    /// Unsigned 32-bit integers.
    U32,
    /// Bytes.
    U8,
}

impl Element {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 | Self::U8 => 1,
        }
    }
}

/// A strided array of rank `R` in device memory: element `i` lies `sum_d i[d] * strides[d]` elements past the first.
///
/// It owns nothing. Making one is the promise that its memory is there; using it is then safe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View<const R: usize> {
    ptr: DevicePtr,
    element: Element,
    extents: [usize; R],
    strides: [i64; R],
}

impl<const R: usize> View<R> {
    /// An array of others. A stride of 0 repeats what lies along that dimension.
    ///
    /// # Safety
    /// 1. Every element lies in memory of the device that the view is used on, and the first is aligned to its size.
    /// 2. That holds until all work that was given this view has run, at each replay of a graph that captured it too.
    /// 3. While such work runs nothing else writes these elements, or touches them where the work writes, unless ordered
    ///    by streams; and views that one call writes overlap no other view of that call.
    pub unsafe fn new(ptr: DevicePtr, element: Element, extents: [usize; R], strides: [i64; R]) -> Self {
        Self { ptr, element, extents, strides }
    }

    /// An array without gaps, the last dimension innermost.
    ///
    /// # Safety
    /// As [`View::new`].
    pub unsafe fn dense(ptr: DevicePtr, element: Element, extents: [usize; R]) -> Self {
        Self { ptr, element, extents, strides: dense_strides(extents) }
    }

    /// Address of the first element.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Type of the elements.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Number of elements along each dimension.
    pub fn extents(&self) -> [usize; R] {
        self.extents
    }

    /// Elements from one index to the next, along each dimension.
    pub fn strides(&self) -> [i64; R] {
        self.strides
    }

    /// True if there are no gaps and the last dimension is innermost. Dimensions of one element may have any stride.
    pub fn is_dense(&self) -> bool {
        self.unit_free_strides() == dense_strides(self.extents)
    }

    /// Strides with those of dimensions of one element, which nothing depends on, set as in a dense array.
    pub(crate) fn unit_free_strides(&self) -> [i64; R] {
        let dense = dense_strides(self.extents);
        std::array::from_fn(|d| if self.extents[d] == 1 { dense[d] } else { self.strides[d] })
    }

    /// The elements of `range` along dimension `d`.
    pub(crate) fn narrow(&self, d: usize, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.extents[d], "{range:?} lies in {:?}", self.extents);
        let first = range.start as i64 * self.strides[d] * self.element.size() as i64;
        let mut part = Self { ptr: DevicePtr(self.ptr.0.wrapping_add_signed(first)), ..*self };
        part.extents[d] = range.len();
        part
    }

    /// Checks type and extents; `name` is the argument's, for the message.
    pub(crate) fn expect(&self, name: &str, elements: &[Element], extents: [usize; R]) -> Result<()> {
        if !elements.contains(&self.element) {
            return Err(Error::argument(format_args!("{name} is {:?} and must be one of {elements:?}", self.element)));
        }
        if self.extents != extents {
            return Err(Error::mismatch(format_args!("{name} has shape {:?} and must have {extents:?}", self.extents)));
        }
        if self.ptr == DevicePtr::NULL {
            return Err(Error::argument(format_args!("{name} is a null pointer")));
        }
        Ok(())
    }

    /// As [`View::expect`], for arrays without gaps.
    pub(crate) fn expect_dense(&self, name: &str, element: Element, extents: [usize; R]) -> Result<()> {
        self.expect(name, &[element], extents)?;
        if !self.is_dense() {
            return Err(Error::argument(format_args!(
                "{name} has strides {:?} and must be contiguous: {:?}",
                self.strides,
                dense_strides(extents)
            )));
        }
        self.expect_aligned(name, element.size() as u64, 1)
    }

    /// Checks the address (in bytes) and the strides but the last (in elements); the last must be 1 then.
    pub(crate) fn expect_aligned(&self, name: &str, bytes: u64, elements: i64) -> Result<()> {
        if !self.ptr.0.is_multiple_of(bytes) {
            return Err(Error::argument(format_args!("{name} must start at a multiple of {bytes} bytes")));
        }
        let strides = self.unit_free_strides();
        let misplaced = |d: usize| self.extents[d] > 1 && (strides[d] % elements != 0 || strides[d] < 0);
        if elements > 1 && (0..R - 1).any(misplaced) {
            return Err(Error::argument(format_args!(
                "{name} has strides {strides:?}, which must be multiples of {elements} elements and not negative"
            )));
        }
        if elements > 1 && strides[R - 1] != 1 {
            return Err(Error::argument(format_args!("{name} must be contiguous in its last dimension")));
        }
        Ok(())
    }
}

fn dense_strides<const R: usize>(extents: [usize; R]) -> [i64; R] {
    let mut strides = [1; R];
    for d in (0..R.saturating_sub(1)).rev() {
        strides[d] = strides[d + 1] * extents[d + 1] as i64;
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(extents: [usize; 3], strides: [i64; 3]) -> View<3> {
        // SAFETY: nothing is launched in this test.
        unsafe { View::new(DevicePtr(256), Element::Bf16, extents, strides) }
    }

    #[test]
    fn strides_of_single_elements_do_not_matter() {
        assert!(view([1, 5, 8], [7, 8, 1]).is_dense());
        assert!(view([2, 5, 8], [40, 8, 1]).is_dense());
        assert!(!view([2, 5, 8], [48, 8, 1]).is_dense());
        assert!(view([1, 5, 8], [7, 16, 1]).expect_aligned("x", 16, 8).is_ok());
        assert!(view([1, 5, 6], [7, 16, 1]).expect_aligned("x", 16, 8).is_ok());
        assert!(view([2, 5, 8], [7, 16, 1]).expect_aligned("x", 16, 8).is_err());
        assert!(view([2, 5, 8], [8, 16, 2]).expect_aligned("x", 16, 8).is_err());
        assert!(view([2, 5, 8], [-8, 16, 1]).expect_aligned("x", 16, 8).is_err());
    }

    #[test]
    fn a_part_begins_where_its_first_element_lies() {
        let part = view([2, 5, 8], [40, 8, 1]).narrow(0, 1..2).narrow(1, 2..5);
        assert_eq!((part.ptr(), part.extents(), part.strides()), (DevicePtr(256 + 2 * 56), [1, 3, 8], [40, 8, 1]));
        assert!(part.is_dense() && !view([2, 5, 8], [40, 8, 1]).narrow(1, 2..5).is_dense());
    }

    #[test]
    fn refusals_name_the_argument() {
        let x = view([2, 5, 8], [40, 8, 1]);
        let error = x.expect("out", &[Element::E4m3], [2, 5, 8]).unwrap_err();
        assert!(error.is_argument() && error.to_string().starts_with("out is Bf16"), "{error}");
        assert!(x.expect("out", &[Element::Bf16], [2, 5, 9]).unwrap_err().is_mismatch());
        assert!(x.expect("out", &[Element::Bf16], [2, 5, 8]).is_ok());
    }
}
