//! [`Call`] with its lists in device memory: its rules, and what kernels and schedules take of it.

use super::sizes::VALUE_TILE;
use crate::attention::{AttentionCall, AttentionShape, Call, Sequence};
use crate::cuda::{Buffer, Device, Element, Request, View};
use crate::error::{Error, Result};
use std::ops::Range;

/// What one call computes, forward or backward, with its lists in device memory.
///
/// Whatever a launch needs to know beforehand is a number of it. Sinks, f32, `(heads_q)` without gaps, and the places of
/// sequences may change between replays of a graph, and so may centers.
pub type DeviceCall = Call<Sequences, View<1>, Centers>;

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

/// What a call subtracts from keys (after their rotation) and values before their cast, f32 without gaps, 16-byte aligned.
///
/// The kernels add the values' to the output. The log-sum-exp is that of the logits of centered keys: `tau q . c` less than the
/// model's. Operands that are E4M3 already are centered already. Not with sinks; keys' neither with a soft-cap nor with logits in
/// E4M3: these need each row's own shift.
#[derive(Clone, Copy, Debug)]
pub struct Centers {
    /// c, `(heads_kv, d)`; `None`: keys are cast as they are.
    pub k: Option<View<2>>,
    /// m, `(heads_kv, d_v)`.
    pub v: Option<View<2>>,
}

impl Centers {
    fn check(&self, call: &DeviceCall) -> Result<()> {
        let AttentionShape { n_kv_heads, d_head, d_v, .. } = call.shape;
        for (name, x, d) in [("center of k", self.k, d_head), ("center of v", self.v, d_v)] {
            let Some(x) = x else { continue };
            x.expect_dense(name, Element::F32, [n_kv_heads, d])?;
            x.expect_aligned(name, 16, 4)?;
        }
        if call.sinks.is_some() {
            return Err(Error::unsupported(
                "centers with sinks are not offered on the GPU: each row would need a sink of its own",
            ));
        }
        if call.soft_cap.is_some() && self.k.is_some() {
            return Err(Error::unsupported(
                "a center of keys with a soft-cap is not offered on the GPU: the cap needs the logits of the model",
            ));
        }
        Ok(())
    }

    /// Those of some KV heads.
    fn of_heads(&self, kv_heads: Range<usize>) -> Self {
        let of = |x: Option<View<2>>| x.map(|x| x.narrow(0, kv_heads.clone()));
        Self { k: of(self.k), v: of(self.v) }
    }
}

impl AttentionCall<'_> {
    /// The same call with its lists, if it has any, in device memory.
    ///
    /// # Errors
    /// If the call breaks a rule of its own, or has a list or a center that is not given here, or the other way around.
    pub fn on_device(
        &self,
        sequences: Option<Sequences>,
        sinks: Option<View<1>>,
        center: Option<Centers>,
    ) -> Result<DeviceCall> {
        self.check()?;
        for (what, here, there) in [
            ("sequences", self.sequences.is_some(), sequences.is_some()),
            ("sinks", self.sinks.is_some(), sinks.is_some()),
            ("centers", self.center.is_some(), center.is_some()),
        ] {
            if here != there {
                return Err(Error::argument(format_args!(
                    "{what} of a call on the GPU lie in device memory: give the copy of the call's there, and none without"
                )));
            }
        }
        Ok(self.with_lists(sequences, sinks, center))
    }
}

impl DeviceCall {
    /// Checks what can be checked without the device: that the GPU takes the sizes, and every rule of the call's own.
    ///
    /// # Errors
    /// Names the argument and the rule; `is_unsupported` for what the GPU does not offer.
    pub fn check(&self) -> Result<()> {
        self.shape.check_on_gpu()?;
        self.check_scales()?;
        if let Some(sinks) = &self.sinks {
            sinks.expect_dense("sinks", Element::F32, [self.shape.n_q_heads])?;
        }
        if let Some(center) = &self.center {
            center.check(self)?;
        }
        self.sequences.map_or(Ok(()), |sequences| sequences.check(&self.shape))
    }

    /// The same of other sizes, in whose place no center is looked at.
    pub(super) fn with_shape(&self, shape: AttentionShape) -> Self {
        Self { shape, ..*self }
    }

    /// Its part of some KV heads and the query heads that read them.
    pub(super) fn part(&self, shape: AttentionShape, kv_heads: Range<usize>) -> Self {
        Self { shape, center: self.center.map(|center| center.of_heads(kv_heads)), ..*self }
    }

    /// c, where there is one.
    pub(super) fn key_center(&self) -> Option<View<2>> {
        self.center?.k
    }

    /// m, likewise.
    pub(super) fn value_center(&self) -> Option<View<2>> {
        self.center?.v
    }
}

/// What a kernel is compiled for besides types and tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Features {
    /// A window that hides keys of some row.
    pub window: bool,
    /// Sequences of unequal length.
    pub varlen: bool,
    pub soft_cap: bool,
    pub sink: bool,
    /// Of the cast, a center of keys or of values; of others one of values.
    pub center: bool,
}

impl Features {
    /// Whether masks are windows on both sides; those of sequences are always.
    pub const fn windowed(self) -> bool {
        self.window || self.varlen
    }

    /// As the forward's kernels are compiled: masks of sequences are windows.
    pub const fn of_forward(self) -> Self {
        Self { window: self.windowed(), ..self }
    }

    /// Every one of them: its macro, what it is called, and whether it is there.
    pub const fn all(self) -> [(&'static str, &'static str, bool); 5] {
        let Self { window, varlen, soft_cap, sink, center } = self;
        [
            ("WINDOW", "a window", window),
            ("VARLEN", "lists of sequences", varlen),
            ("SOFT_CAP", "a soft-cap", soft_cap),
            ("SINK", "sinks", sink),
            ("CENTER", "centers", center),
        ]
    }

    /// Adds the macros of those that are there.
    pub fn define(self, request: Request) -> Request {
        let there = self.all().into_iter().filter(|(.., there)| *there);
        there.fold(request, |request, (name, ..)| request.define(name, 1))
    }
}

/// A window without limit: `kNoWindow` of `kernels/attention/mask.cuh`.
pub(super) const NO_WINDOW: i32 = 1 << 28;

impl DeviceCall {
    /// How many keys before and after its position a row sees.
    pub(super) fn window(&self) -> [i32; 2] {
        let longest = self.sequences.map_or(self.shape.len_k, |sequences| sequences.max_len_k);
        // No position passes the last key, and none that sees a key lies further before the first.
        let limit = |window: Option<usize>, far: usize| window.filter(|w| *w < far).map_or(NO_WINDOW, |w| w as i32);
        let right = if self.mask.causal { Some(0) } else { self.mask.window_right };
        [limit(self.mask.window_left, longest), limit(right, longest + self.queries())]
    }

    /// Where sequences are alike: the first key that a query sees.
    pub(super) fn first_key(&self) -> usize {
        let [left, _] = self.window();
        self.shape.len_k.saturating_sub(self.shape.len_q + left as usize)
    }

    /// Queries of the longest sequence.
    pub(super) fn queries(&self) -> usize {
        self.sequences.map_or(self.shape.len_q, |sequences| sequences.max_len_q)
    }

    /// Sizes of a batch of sequences as long as the longest, of the keys that a query of it can see: what a schedule is chosen by.
    pub(super) fn longest(&self) -> AttentionShape {
        let (batch, len_k) =
            self.sequences.map_or((self.shape.batch, self.shape.len_k), |s| (s.count().max(1), s.max_len_k));
        let len_q = self.queries();
        let [left, right] = self.window().map(|window| window as usize);
        AttentionShape { batch, len_q, len_k: len_k.min(left + right + len_q), ..self.shape }
    }

    /// Whether the mask is causal and nothing else, and what else there is.
    pub(super) fn features(&self) -> (bool, Features) {
        let [left, right] = self.window();
        let window = left != NO_WINDOW || !(right == NO_WINDOW || right == 0);
        let (soft_cap, sink, center) = (self.soft_cap.is_some(), self.sinks.is_some(), self.value_center().is_some());
        (right == 0, Features { window, varlen: self.sequences.is_some(), soft_cap, sink, center })
    }
}

impl Sequences {
    /// Copies of a host's lists, in buffers that have to outlive every call that reads them.
    ///
    /// # Errors
    /// If the device has no memory for them.
    pub fn upload(device: &Device, sequences: &[Sequence]) -> Result<([Buffer<i32>; 4], Self)> {
        let ends: [fn(&Sequence) -> usize; 4] = [|s| s.q.start, |s| s.q.end, |s| s.k.start, |s| s.k.end];
        let [a, b, c, d] = ends.map(|end| device.upload(&sequences.iter().map(|s| end(s) as i32).collect::<Vec<_>>()));
        let buffers = [a?, b?, c?, d?];
        // SAFETY: the lists have that many entries; the caller keeps them.
        let list = |i: usize| unsafe { View::dense(buffers[i].ptr(), Element::I32, [sequences.len()]) };
        let [q_starts, q_ends, k_starts, k_ends] = [0, 1, 2, 3].map(list);
        let longest = |of: fn(&Sequence) -> usize| sequences.iter().map(of).max().unwrap_or(0).max(1);
        let (max_len_q, max_len_k) = (longest(|s| s.q.len()), longest(|s| s.k.len()));
        Ok((buffers, Self { q_starts, q_ends, k_starts, k_ends, max_len_q, max_len_k }))
    }

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
    use crate::attention::Mask;
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

    fn plain() -> DeviceCall {
        DeviceCall::causal(SIZES)
    }

    #[test]
    fn a_window_that_hides_nothing_is_none() {
        let of = |causal, window_left, window_right| {
            let call = DeviceCall { mask: Mask { causal, window_left, window_right }, ..plain() };
            let (causal, features) = call.features();
            (causal, features.window)
        };
        assert_eq!(of(true, None, None), (true, false));
        assert_eq!(of(true, None, Some(7)), (true, false), "causal is narrower");
        assert_eq!(of(false, None, Some(0)), (true, false), "this is causal");
        assert_eq!(of(true, Some(50), None), (true, false), "the last query sees key 0");
        assert_eq!(of(true, Some(48), None), (true, true), "the last query does not");
        assert_eq!(of(false, None, Some(38)), (false, true));
        assert_eq!(of(false, None, None), (false, false));
        let packed = DeviceCall { sequences: Some(sequences(40, 20)), mask: Mask::sliding(21), ..plain() };
        assert!(!packed.features().1.window, "no sequence is longer");
    }

    #[test]
    fn windows_bound_the_keys_that_a_schedule_reckons_with() {
        let decode = AttentionShape { len_q: 1, len_k: 8192, ..SIZES };
        let sliding = DeviceCall { mask: Mask::sliding(1024), ..DeviceCall::causal(decode) };
        assert_eq!((sliding.longest().len_k, sliding.first_key()), (1024, 8192 - 1024));
        assert_eq!(DeviceCall::causal(decode).first_key(), 0);
        let packed = DeviceCall { sequences: Some(sequences(3, 17)), ..plain() };
        assert_eq!(packed.longest(), AttentionShape { batch: 3, len_q: 3, len_k: 17, ..SIZES });
    }

    #[test]
    fn what_breaks_a_rule_is_named() {
        let plain = plain();
        let message = |call: DeviceCall| call.check().unwrap_err().to_string();
        assert!(plain.check().is_ok());
        assert!(message(DeviceCall { softmax_scale: f64::NAN, ..plain }).contains("NaN"));
        assert!(message(DeviceCall { soft_cap: Some(0.0), ..plain }).contains("soft-cap 0"));
        assert!(message(DeviceCall { soft_cap: Some(3e8), ..plain }).contains("soft-cap 300000000"));
        assert!(message(DeviceCall { softmax_scale: f64::INFINITY, ..plain }).contains("inf"));
        assert!(DeviceCall { soft_cap: Some(2e8), softmax_scale: 2e8, ..plain }.check().is_ok());
        assert!(message(DeviceCall { sinks: Some(list(Element::F32, 3)), ..plain }).contains("sinks"));
        assert!(message(DeviceCall { sequences: Some(sequences(41, 1)), ..plain }).contains("max_len_q 41"));
        assert!(message(DeviceCall { sequences: Some(sequences(1, 0)), ..plain }).contains("max_len_k 0"));
        let short = Sequences { k_ends: list(Element::I32, 2), ..sequences(1, 1) };
        assert!(message(DeviceCall { sequences: Some(short), ..plain }).contains("k_ends"));
        let wide = Sequences { q_ends: list(Element::F32, 3), ..sequences(1, 1) };
        assert!(message(DeviceCall { sequences: Some(wide), ..plain }).contains("q_ends"));
        let none = list(Element::I32, 0);
        let empty = Sequences { q_starts: none, q_ends: none, k_starts: none, k_ends: none, ..sequences(1, 1) };
        assert!(message(DeviceCall { sequences: Some(empty), ..plain }).contains("q_starts"));
    }

    #[test]
    fn lists_of_the_host_need_their_copies_on_the_device() {
        let sinks = AttentionCall { sinks: Some(&[0.0; 4]), ..AttentionCall::causal(SIZES) };
        assert!(sinks.on_device(None, None, None).unwrap_err().is_argument());
        let there = sinks.on_device(None, Some(list(Element::F32, 4)), None).unwrap();
        assert!(there.check().is_ok() && there.sinks.is_some());
        assert!(AttentionCall::causal(SIZES).on_device(Some(sequences(1, 1)), None, None).unwrap_err().is_argument());
    }

    #[test]
    fn centers_have_rules() {
        // SAFETY: nothing is launched.
        let rows = |heads, d| Some(unsafe { View::dense(DevicePtr(1 << 20), Element::F32, [heads, d]) });
        let message = |call: DeviceCall| call.check().unwrap_err().to_string();
        let keys = Some(Centers { k: rows(2, 64), v: None });
        let values = Some(Centers { k: None, v: rows(2, 64) });
        let call = |center| DeviceCall { center, ..plain() };
        assert!(call(keys).check().is_ok() && call(values).check().is_ok());
        assert!(!call(keys).features().1.center && call(values).features().1.center);
        assert!(message(call(Some(Centers { k: rows(4, 64), v: None }))).contains("center of k has shape"));
        assert!(message(call(Some(Centers { k: None, v: rows(2, 32) }))).contains("center of v has shape"));
        let sinks = Some(list(Element::F32, 4));
        assert!(message(DeviceCall { sinks, ..call(values) }).contains("centers with sinks"));
        assert!(message(DeviceCall { soft_cap: Some(5.0), ..call(keys) }).contains("soft-cap"));
        assert!(DeviceCall { soft_cap: Some(5.0), ..call(values) }.check().is_ok(), "m is exact under a soft-cap");
        let part = call(values).part(AttentionShape { n_q_heads: 2, n_kv_heads: 1, ..SIZES }, 1..2);
        assert!(part.check().is_ok());
        assert_eq!(part.value_center().unwrap().ptr().0, (1 << 20) + 4 * 64);
    }

    #[test]
    fn rows_of_all_sequences_stay_below_two_to_the_31() {
        let one = Sequences { max_len_q: 1, max_len_k: 1, ..sequences(1, 1) };
        let of = |batch: usize, len_k: usize, n_kv_heads: usize| {
            let sizes = AttentionShape { batch, n_q_heads: n_kv_heads, n_kv_heads, len_q: 1, len_k, ..SIZES };
            DeviceCall { sequences: Some(one), ..DeviceCall::causal(sizes) }.check()
        };
        assert!(of(127, 1 << 24, 1).is_ok());
        let error = of(128, 1 << 24, 1).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("keys of all sequences"), "{error}");
        assert!(of(16, 1 << 24, 64).unwrap_err().is_unsupported(), "blocks of the cast");
    }
}
