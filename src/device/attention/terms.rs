//! What one call computes, beside its tensors: [`AttentionCall`] with its lists in device memory.

use super::sizes::VALUE_TILE;
use crate::attention::{AttentionCall, AttentionShape, Mask};
use crate::cuda::{Element, View};
use crate::error::{Error, Result};

/// What one call computes, forward or backward. Sizes are those of the tensors.
///
/// Whatever a launch needs to know beforehand is here; sinks and the places of sequences lie in device memory and may change between
/// replays of a graph.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Which keys a query sees.
    pub mask: Mask,
    /// Multiplier of q . k.
    pub softmax_scale: f32,
    /// Logits become `cap tanh(S / cap)`.
    pub soft_cap: Option<f32>,
    /// A logit a query head, in nats, that joins the row sum: f32, `(heads_q)` without gaps.
    pub sinks: Option<View<1>>,
    /// Where sequences lie in a padded or packed batch; `None`: each has `len_q` queries and `len_k` keys.
    pub sequences: Option<Sequences>,
}

/// Where sequences lie, as [`Sequence`](crate::attention::Sequence)s in device memory: i32 without gaps, one a sequence.
///
/// Rows count over the axis `batch * len`: row `r` is `(r / len, r % len)`. Sequences come in order, share no rows, and none
/// has rows of two entries of the batch. What lies on the device is not checked: lists that break these rules give wrong
/// rows, but no access outside of the tensors, nor outside of the tables of a rotation. A deterministic backward looks at
/// them on the device, and keeps no order of its sums where they are out of order.
///
/// | batch | starts, ends |
/// |---|---|
/// | packed, `batch` 1 | `cu_seqlens[..n]`, `cu_seqlens[1..]` |
/// | packed with `seqused_k` | `k_ends = cu_seqlens_k[..n] + seqused_k` |
/// | padded | `b * len + padding in front`, and that plus the length |
#[derive(Clone, Copy, Debug)]
pub struct Sequences {
    /// First query of each sequence.
    pub q_starts: View<1>,
    /// One past its last query.
    pub q_ends: View<1>,
    /// First key of each sequence.
    pub k_starts: View<1>,
    /// One past its last key.
    pub k_ends: View<1>,
    /// Queries of the longest sequence, or more.
    pub max_len_q: usize,
    /// Keys of the longest sequence, or more.
    pub max_len_k: usize,
}

impl Terms {
    /// Terms of a softmax scale and a mask alone.
    pub const fn plain(mask: Mask, softmax_scale: f32) -> Self {
        Self { mask, softmax_scale, soft_cap: None, sinks: None, sequences: None }
    }

    /// The terms of a call whose sinks and sequences, if it has any, lie on the device.
    ///
    /// # Errors
    /// If the call has sinks or sequences, which are lists in host memory, or breaks a rule of its own.
    pub fn of(call: &AttentionCall) -> Result<Self> {
        call.check()?;
        for (what, given) in [("sinks", call.sinks.is_some()), ("sequences", call.sequences.is_some())] {
            if given {
                return Err(Error::unsupported(format_args!(
                    "{what} of a call on the GPU lie in device memory: give them in Terms"
                )));
            }
        }
        let soft_cap = call.soft_cap.map(|cap| cap as f32);
        Ok(Self { soft_cap, ..Self::plain(call.mask, call.softmax_scale as f32) })
    }

    /// Checks what can be checked without the device.
    pub(super) fn check(&self, sizes: &AttentionShape) -> Result<()> {
        for (name, value) in [("softmax scale", Some(self.softmax_scale)), ("soft-cap", self.soft_cap)] {
            if let Some(value) = value
                && !(value > 0.0 && value <= LARGEST_SCALE)
            {
                return Err(Error::argument(format_args!(
                    "{name} {value} must be greater than zero and at most {LARGEST_SCALE:e}"
                )));
            }
        }
        if let Some(sinks) = &self.sinks {
            sinks.expect_dense("sinks", Element::F32, [sizes.n_q_heads])?;
        }
        if let Some(sequences) = &self.sequences {
            sequences.check(sizes)?;
        }
        Ok(())
    }
}

/// What a kernel is compiled for beside types and tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Features {
    /// A window that hides keys of some row.
    pub window: bool,
    /// Sequences of unequal length.
    pub varlen: bool,
    pub soft_cap: bool,
    pub sink: bool,
}

impl Features {
    /// Whether masks are windows on both sides; those of sequences are always.
    pub const fn windowed(self) -> bool {
        self.window || self.varlen
    }
}

/// A window without limit: `kNoWindow` of `kernels/attention/mask.cuh`.
const NO_WINDOW: i32 = 1 << 28;
/// Largest multiplier of logits: times log2(e) and the 1e30 that stands for the maximum of no logit (`kLowest` of
/// `kernels/attention/config.cuh`), it stays in f32.
const LARGEST_SCALE: f32 = 2e8;

impl Terms {
    /// How many keys before and after its position a row sees.
    pub(super) fn window(&self, sizes: &AttentionShape) -> [i32; 2] {
        let longest = self.sequences.map_or(sizes.len_k, |sequences| sequences.max_len_k);
        // No position passes the last key, and none that sees a key lies further before the first.
        let limit = |window: Option<usize>, far: usize| window.filter(|w| *w < far).map_or(NO_WINDOW, |w| w as i32);
        let right = if self.mask.causal { Some(0) } else { self.mask.window_right };
        [limit(self.mask.window_left, longest), limit(right, longest + self.queries(sizes))]
    }

    /// Where sequences are alike: the first key that a query sees.
    pub(super) fn first_key(&self, sizes: &AttentionShape) -> usize {
        let [left, _] = self.window(sizes);
        sizes.len_k.saturating_sub(sizes.len_q + left as usize)
    }

    /// Queries of the longest sequence.
    fn queries(&self, sizes: &AttentionShape) -> usize {
        self.sequences.map_or(sizes.len_q, |sequences| sequences.max_len_q)
    }

    /// Sizes of a batch of sequences as long as the longest, of the keys that a query of it can see: what a schedule is chosen by.
    pub(super) fn longest(&self, sizes: &AttentionShape) -> AttentionShape {
        let (batch, len_k) = self.sequences.map_or((sizes.batch, sizes.len_k), |s| (s.count().max(1), s.max_len_k));
        let len_q = self.queries(sizes);
        let [left, right] = self.window(sizes).map(|window| window as usize);
        AttentionShape { batch, len_q, len_k: len_k.min(left + right + len_q), ..*sizes }
    }

    /// Whether the mask is causal and nothing else, and what else there is.
    pub(super) fn features(&self, sizes: &AttentionShape) -> (bool, Features) {
        let [left, right] = self.window(sizes);
        let window = left != NO_WINDOW || !(right == NO_WINDOW || right == 0);
        let (soft_cap, sink) = (self.soft_cap.is_some(), self.sinks.is_some());
        (right == 0, Features { window, varlen: self.sequences.is_some(), soft_cap, sink })
    }
}

impl Sequences {
    /// Number of sequences.
    pub fn count(&self) -> usize {
        self.q_starts.extents()[0]
    }

    fn check(&self, sizes: &AttentionShape) -> Result<()> {
        let count = [self.count()];
        if count == [0] {
            return Err(Error::argument("q_starts has no entry: give at least one sequence, which may be empty"));
        }
        let lists = [
            ("q_starts", &self.q_starts),
            ("q_ends", &self.q_ends),
            ("k_starts", &self.k_starts),
            ("k_ends", &self.k_ends),
        ];
        for (name, list) in lists {
            list.expect_dense(name, Element::I32, count)?;
        }
        for (name, longest, rows) in
            [("max_len_q", self.max_len_q, sizes.len_q), ("max_len_k", self.max_len_k, sizes.len_k)]
        {
            if longest == 0 || longest > rows {
                return Err(Error::argument(format_args!(
                    "{name} {longest} must be from 1 to the {rows} rows that an entry of the batch has"
                )));
            }
        }
        // Kernels count rows over the whole axis in 31 bits, each sequence of values from a tile of its own, and so the
        // blocks of a cast.
        let rows = |len: usize| (sizes.batch as u128) * len as u128 + (VALUE_TILE * self.count()) as u128;
        let heads = (sizes.n_q_heads + 2 * sizes.n_kv_heads) as u128;
        for (name, len) in [("queries", sizes.len_q), ("keys", sizes.len_k)] {
            let (rows, most) = (rows(len), (1u128 << 31).min((1 << 34) / heads) - 1);
            if rows > most {
                return Err(Error::unsupported(format_args!(
                    "{rows} {name} of all sequences, each begun at a tile of {VALUE_TILE}, are more than the GPU takes: {most}"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::DevicePtr;

    const SIZES: AttentionShape =
        AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 40, len_k: 50, d_head: 64, d_v: 64 };

    // SAFETY of every view below: nothing is launched in these tests.
    fn list(element: Element, len: usize) -> View<1> {
        unsafe { View::dense(DevicePtr(1 << 20), element, [len]) }
    }

    fn sequences(max_len_q: usize, max_len_k: usize) -> Sequences {
        let list = list(Element::I32, 3);
        Sequences { q_starts: list, q_ends: list, k_starts: list, k_ends: list, max_len_q, max_len_k }
    }

    #[test]
    fn a_window_that_hides_nothing_is_none() {
        let of = |causal, window_left, window_right| {
            let terms = Terms::plain(Mask { causal, window_left, window_right }, 0.1);
            let (causal, features) = terms.features(&SIZES);
            (causal, features.window)
        };
        assert_eq!(of(true, None, None), (true, false));
        assert_eq!(of(true, None, Some(7)), (true, false), "causal is narrower");
        assert_eq!(of(false, None, Some(0)), (true, false), "this is causal");
        assert_eq!(of(true, Some(50), None), (true, false), "the last query sees key 0");
        assert_eq!(of(true, Some(48), None), (true, true), "the last query does not");
        assert_eq!(of(false, None, Some(38)), (false, true));
        assert_eq!(of(false, None, None), (false, false));
        let packed = Terms { sequences: Some(sequences(40, 20)), ..Terms::plain(Mask::sliding(21), 0.1) };
        assert!(!packed.features(&SIZES).1.window, "no sequence is longer");
    }

    #[test]
    fn windows_bound_the_keys_that_a_schedule_reckons_with() {
        let decode = AttentionShape { len_q: 1, len_k: 8192, ..SIZES };
        let terms = Terms::plain(Mask::sliding(1024), 0.1);
        assert_eq!((terms.longest(&decode).len_k, terms.first_key(&decode)), (1024, 8192 - 1024));
        assert_eq!(Terms::plain(Mask::CAUSAL, 0.1).first_key(&decode), 0);
        let terms = Terms { sequences: Some(sequences(3, 17)), ..Terms::plain(Mask::CAUSAL, 0.1) };
        assert_eq!(terms.longest(&SIZES), AttentionShape { batch: 3, len_q: 3, len_k: 17, ..SIZES });
    }

    #[test]
    fn what_breaks_a_rule_is_named() {
        let plain = Terms::plain(Mask::CAUSAL, 0.1);
        let message = |terms: Terms| terms.check(&SIZES).unwrap_err().to_string();
        assert!(plain.check(&SIZES).is_ok());
        assert!(message(Terms { softmax_scale: f32::NAN, ..plain }).contains("softmax scale NaN"));
        assert!(message(Terms { soft_cap: Some(0.0), ..plain }).contains("soft-cap 0"));
        assert!(message(Terms { soft_cap: Some(3e8), ..plain }).contains("soft-cap 300000000 must"));
        assert!(message(Terms { softmax_scale: f32::INFINITY, ..plain }).contains("at most 2e8"));
        assert!(Terms { soft_cap: Some(2e8), softmax_scale: 2e8, ..plain }.check(&SIZES).is_ok());
        assert!(message(Terms { sinks: Some(list(Element::F32, 3)), ..plain }).contains("sinks has shape"));
        assert!(message(Terms { sequences: Some(sequences(41, 1)), ..plain }).contains("max_len_q 41"));
        assert!(message(Terms { sequences: Some(sequences(1, 0)), ..plain }).contains("max_len_k 0"));
        let short = Sequences { k_ends: list(Element::I32, 2), ..sequences(1, 1) };
        assert!(message(Terms { sequences: Some(short), ..plain }).contains("k_ends has shape"));
        let wide = Sequences { q_ends: list(Element::F32, 3), ..sequences(1, 1) };
        assert!(message(Terms { sequences: Some(wide), ..plain }).contains("q_ends is"));
        let none = list(Element::I32, 0);
        let empty = Sequences { q_starts: none, q_ends: none, k_starts: none, k_ends: none, ..sequences(1, 1) };
        assert!(message(Terms { sequences: Some(empty), ..plain }).contains("q_starts has no entry"));
        let call = AttentionCall { sinks: Some(&[0.0; 4]), ..AttentionCall::causal(SIZES) };
        assert!(Terms::of(&call).unwrap_err().is_unsupported());
    }

    #[test]
    fn rows_of_all_sequences_stay_below_two_to_the_31() {
        let one = Sequences { max_len_q: 1, max_len_k: 1, ..sequences(1, 1) };
        let plain = Terms { sequences: Some(one), ..Terms::plain(Mask::CAUSAL, 0.1) };
        let of = |batch: usize, len_k: usize, n_kv_heads: usize| {
            let sizes = AttentionShape { batch, n_q_heads: n_kv_heads, n_kv_heads, len_q: 1, len_k, ..SIZES };
            plain.check(&sizes)
        };
        assert!(of(127, 1 << 24, 1).is_ok());
        let error = of(128, 1 << 24, 1).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("keys of all sequences"), "{error}");
        assert!(of(16, 1 << 24, 64).unwrap_err().is_unsupported(), "blocks of the cast");
    }
}
