//! Sequences of unequal length in one call: padded batches and packed ones.
//!
//! A call's tensors have one axis of rows, `batch * len` long. A sequence is a range of it for its queries and one for its
//! keys. Rows outside every sequence are never read: their output and gradients are zero, their log-sum-exp is `-inf`.

use super::shape::AttentionShape;
use crate::error::{Error, Result};
use std::ops::Range;

/// The rows of one sequence, counted over the whole batch. Either range may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Queries: rows of q and of the output.
    pub q: Range<usize>,
    /// Keys: rows of k and v.
    pub k: Range<usize>,
}

/// On which side of a sequence the padding lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// In front, as for generation.
    Left,
    /// Behind, as for training.
    Right,
}

impl Sequence {
    /// The sequences of a padded batch: of the `len_q` and `len_k` rows that each has, `lengths_q` and `lengths_k` count.
    ///
    /// ```
    /// use sigmascale::attention::{AttentionShape, Padding, Sequence};
    /// let shape = AttentionShape { batch: 2, n_q_heads: 2, n_kv_heads: 1, len_q: 1, len_k: 5, d_head: 64, d_v: 64 };
    /// let sequences = Sequence::padded(&shape, &[1, 1], &[3, 5], Padding::Left)?;
    /// assert_eq!((sequences[0].k.clone(), sequences[1].k.clone()), (2..5, 5..10));
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    ///
    /// # Errors
    /// `is_argument` if there is not one length a sequence, or one is longer than its rows.
    pub fn padded(
        shape: &AttentionShape,
        lengths_q: &[usize],
        lengths_k: &[usize],
        side: Padding,
    ) -> Result<Vec<Self>> {
        for (name, lengths, rows) in [("lengths_q", lengths_q, shape.len_q), ("lengths_k", lengths_k, shape.len_k)] {
            if lengths.len() != shape.batch {
                let (have, want) = (lengths.len(), shape.batch);
                return Err(Error::argument(format_args!("{name} has {have} entries for {want} sequences")));
            }
            if let Some(i) = lengths.iter().position(|length| *length > rows) {
                return Err(Error::argument(format_args!("{name}[{i}] = {} is more than {rows} rows", lengths[i])));
            }
        }
        let used = |b: usize, length: usize, rows: usize| match side {
            Padding::Left => (b + 1) * rows - length..(b + 1) * rows,
            Padding::Right => b * rows..b * rows + length,
        };
        let lengths = lengths_q.iter().zip(lengths_k).enumerate();
        Ok(lengths.map(|(b, (q, k))| Self { q: used(b, *q, shape.len_q), k: used(b, *k, shape.len_k) }).collect())
    }

    /// The sequences of a packed batch: sequence `i` has the rows from `cu_seqlens[i]` to `cu_seqlens[i + 1]`, of whose keys
    /// the first `seqused_k[i]` count where that is given.
    ///
    /// ```
    /// use sigmascale::attention::Sequence;
    /// let sequences = Sequence::packed(&[0, 2, 5], &[0, 4, 8], Some(&[3, 4]))?;
    /// assert_eq!((sequences[0].k.clone(), sequences[1].q.clone()), (0..3, 2..5));
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    ///
    /// # Errors
    /// `is_argument` if the lists do not fit each other, `cu_seqlens` does not start at 0 or falls, or a sequence is said to
    /// use more keys than it has.
    pub fn packed(cu_seqlens_q: &[usize], cu_seqlens_k: &[usize], seqused_k: Option<&[usize]>) -> Result<Vec<Self>> {
        for (name, ends) in [("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)] {
            if ends.first() != Some(&0) {
                return Err(Error::argument(format_args!("{name} must start with 0")));
            }
            if let Some(i) = ends.windows(2).position(|pair| pair[0] > pair[1]) {
                return Err(Error::argument(format_args!("{name} falls from {} to {}", ends[i], ends[i + 1])));
            }
        }
        let count = cu_seqlens_q.len() - 1;
        for (name, have) in
            [("cu_seqlens_k", cu_seqlens_k.len() - 1), ("seqused_k", seqused_k.map_or(count, <[usize]>::len))]
        {
            if have != count {
                return Err(Error::argument(format_args!("{name} is for {have} sequences, cu_seqlens_q for {count}")));
            }
        }
        let sequence = |i: usize| {
            let (q, mut k) = (cu_seqlens_q[i]..cu_seqlens_q[i + 1], cu_seqlens_k[i]..cu_seqlens_k[i + 1]);
            if let Some(used) = seqused_k.map(|used| used[i]) {
                if used > k.len() {
                    let have = k.len();
                    return Err(Error::argument(format_args!("seqused_k[{i}] = {used} is more than its {have} keys")));
                }
                k.end = k.start + used;
            }
            Ok(Self { q, k })
        };
        (0..count).map(sequence).collect()
    }
}

/// Sequences lie within the rows, in order, and share none.
pub(super) fn check_sequences(shape: &AttentionShape, sequences: &[Sequence]) -> Result<()> {
    let mut ends = [0, 0];
    let rows = [shape.batch * shape.len_q, shape.batch * shape.len_k];
    for (i, sequence) in sequences.iter().enumerate() {
        for (side, (name, range)) in [("queries", &sequence.q), ("keys", &sequence.k)].into_iter().enumerate() {
            let (end, rows) = (ends[side], rows[side]);
            if range.start < end || range.end < range.start || range.end > rows {
                return Err(Error::argument(format_args!(
                    "sequence {i} has the {name} {range:?}: expected a range between {end}, the end of the one before it, \
                     and {rows} rows"
                )));
            }
            ends[side] = range.end;
        }
    }
    Ok(())
}
