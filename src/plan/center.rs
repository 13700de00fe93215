//! The constants that a call subtracts from keys and values before their cast.

use crate::error::{Error, Result};
use crate::file::fnv1a;
use half::bf16;
use serde::{Deserialize, Serialize};

/// One vector c per KV head that is subtracted from keys, and one vector m that is subtracted from values.
///
/// Softmax does not see c, since it shifts all logits of a row by `tau q . c`, and m comes back as `O = O' + m`: both are exact
/// for any c and m. They apply after everything that a model does to k and v (bias, norm, rotation), in f32, in front of the
/// scale: `e4m3((k - c) / s)`. The parts of a sequence that are merged, and everybody who reads a cache, need one center.
///
/// Elements are BF16 values, so that an engine that subtracts in 16 bits takes the same.
///
/// ```
/// use sigmascale::plan::Center;
/// let center = Center::new(0, Some(vec![vec![1.0 / 3.0, -2.0]]), None)?;
/// assert_eq!(center.c(0), Some(&[0.333984375, -2.0][..]));
/// assert_eq!(center.m(0), None);
/// # Ok::<(), sigmascale::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Center {
    /// Index among the layers with attention.
    pub layer: usize,
    /// c of each KV head, `d_head` values; `None`: keys are cast as they are.
    pub k: Option<Vec<Vec<f32>>>,
    /// m of each KV head, `d_v` values; `None`: values are cast as they are.
    pub v: Option<Vec<Vec<f32>>>,
}

impl Center {
    /// A center that subtracts nothing.
    pub fn none(layer: usize) -> Self {
        Self { layer, k: None, v: None }
    }

    /// A center of these vectors, each value rounded once. Rows that are all zeros subtract nothing.
    ///
    /// # Errors
    /// `is_non_finite` if a value is not finite in BF16.
    pub fn new(layer: usize, k: Option<Vec<Vec<f64>>>, v: Option<Vec<Vec<f64>>>) -> Result<Self> {
        let round = |rows: Option<Vec<Vec<f64>>>, name: &str| -> Result<Option<Vec<Vec<f32>>>> {
            let Some(rows) = rows else { return Ok(None) };
            let rows: Vec<Vec<f32>> = rows.iter().map(|row| row.iter().map(|x| to_bf16(*x)).collect()).collect();
            if let Some(x) = rows.iter().flatten().find(|x| !x.is_finite()) {
                return Err(Error::non_finite(format_args!("the center of {name} holds {x}, past the range of BF16")));
            }
            Ok(rows.iter().flatten().any(|x| *x != 0.0).then_some(rows))
        };
        Ok(Self { layer, k: round(k, "k")?, v: round(v, "v")? })
    }

    /// Whether it subtracts nothing.
    pub fn is_none(&self) -> bool {
        self.k.is_none() && self.v.is_none()
    }

    /// c of a KV head.
    pub fn c(&self, kv_head: usize) -> Option<&[f32]> {
        Some(&self.k.as_ref()?[kv_head])
    }

    /// m of a KV head.
    pub fn m(&self, kv_head: usize) -> Option<&[f32]> {
        Some(&self.v.as_ref()?[kv_head])
    }

    /// Whether it fits `n_kv` heads of `d_head` channels of keys and `d_v` of values.
    ///
    /// # Errors
    /// `is_mismatch` if it does not; `is_non_finite` if a value is not finite.
    pub fn check(&self, n_kv: usize, d_head: usize, d_v: usize) -> Result<()> {
        for (name, rows, d) in [("k", &self.k, d_head), ("v", &self.v, d_v)] {
            let Some(rows) = rows else { continue };
            if rows.len() != n_kv || rows.iter().any(|row| row.len() != d) {
                let heads = rows.len();
                return Err(Error::mismatch(format_args!(
                    "the center of {name} has {heads} heads, expected {n_kv} of {d} channels each"
                )));
            }
            if let Some(x) = rows.iter().flatten().find(|x| !x.is_finite()) {
                return Err(Error::non_finite(format_args!("the center of {name} holds {x}: it must be finite")));
            }
        }
        Ok(())
    }

    /// Largest magnitude in each row.
    pub(crate) fn amax(rows: Option<&Vec<Vec<f32>>>) -> Option<Vec<f64>> {
        let amax = |row: &Vec<f32>| row.iter().fold(0.0, |most: f64, x| most.max(f64::from(x.abs())));
        Some(rows?.iter().map(amax).collect())
    }
}

/// What a cache of keys and values that centers were subtracted from depends on: 16 hexadecimal digits that two engines must
/// share to share a cache. 64-bit FNV-1a over layers, shapes and values; a model without centers has one as well.
///
/// ```
/// use sigmascale::plan::{Center, center_hash};
/// let center = |x| Center::new(0, Some(vec![vec![x, 2.0]]), None).unwrap();
/// assert_ne!(center_hash(&[center(1.0)]), center_hash(&[center(3.0)]));
/// assert_eq!(center_hash(&[center(1.0)]), center_hash(&[center(1.0 + 1e-6)]));
/// ```
pub fn center_hash(centers: &[Center]) -> String {
    let mut bytes = Vec::new();
    for center in centers.iter().filter(|center| !center.is_none()) {
        bytes.extend((center.layer as u64).to_le_bytes());
        for rows in [&center.k, &center.v] {
            bytes.extend((rows.as_ref().map_or(0, Vec::len) as u64).to_le_bytes());
            for row in rows.iter().flatten() {
                bytes.extend((row.len() as u64).to_le_bytes());
                // Both zeros subtract the same.
                bytes.extend(row.iter().flat_map(|x| (x + 0.0).to_le_bytes()));
            }
        }
    }
    format!("{:016x}", fnv1a(&bytes))
}

/// The nearest BF16 value, rounded once: to odd in f32, which keeps ties of BF16 apart, and then to nearest.
fn to_bf16(x: f64) -> f32 {
    let near = x as f32;
    let below = if f64::from(near).abs() > x.abs() { f32::from_bits(near.to_bits() - 1) } else { near };
    let odd = if f64::from(below) == x { below } else { f32::from_bits(below.to_bits() | 1) };
    bf16::from_f32(odd).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_once() {
        // Just above a tie of BF16 by less than f32 can hold: two roundings would go down to even.
        let tie = 1.0 + 1.0 / 256.0;
        assert_eq!(to_bf16(tie), 1.0);
        assert_eq!(to_bf16(tie + 1e-12), 1.0078125);
        assert_eq!(bf16::from_f32((tie + 1e-12) as f32).to_f32(), 1.0);
        assert_eq!((to_bf16(-tie - 1e-12), to_bf16(0.0), to_bf16(-3.0)), (-1.0078125, 0.0, -3.0));
        assert!(Center::new(0, Some(vec![vec![1e39]]), None).unwrap_err().is_non_finite());
        assert!(Center::new(0, None, Some(vec![vec![f64::NAN]])).unwrap_err().is_non_finite());
        assert!(Center::new(0, Some(vec![vec![0.0; 4]; 2]), None).unwrap().is_none());
    }

    #[test]
    fn a_hash_knows_layer_tensor_head_and_value() {
        let row = || vec![vec![1.0, 2.0], vec![3.0, 4.0]];
        let of = |layer, k, v| center_hash(&[Center::none(9), Center::new(layer, k, v).unwrap()]);
        let all = [
            of(0, Some(row()), None),
            of(1, Some(row()), None),
            of(0, None, Some(row())),
            of(0, Some(vec![vec![1.0, 2.0, 3.0, 4.0]]), None),
            of(0, Some(vec![vec![3.0, 4.0], vec![1.0, 2.0]]), None),
            center_hash(&[]),
        ];
        for (i, one) in all.iter().enumerate() {
            assert!(one.len() == 16 && !all[..i].contains(one), "{all:?}");
        }
        assert_eq!(of(0, Some(vec![vec![0.0, 1.0]]), None), of(0, Some(vec![vec![-0.0, 1.0]]), None));
        assert_eq!(center_hash(&[Center::none(3)]), center_hash(&[]));
    }

    #[test]
    fn a_center_of_another_shape_is_refused() {
        let center = Center::new(0, Some(vec![vec![1.0; 16]; 2]), Some(vec![vec![1.0; 8]; 2])).unwrap();
        center.check(2, 16, 8).unwrap();
        for (n_kv, d, d_v) in [(1, 16, 8), (2, 8, 8), (2, 16, 16)] {
            assert!(center.check(n_kv, d, d_v).unwrap_err().is_mismatch());
        }
        let broken = Center { k: Some(vec![vec![f32::INFINITY; 16]; 2]), ..center };
        assert!(broken.check(2, 16, 8).unwrap_err().is_non_finite());
    }
}
