//! What a forward reads and writes in device memory, and the rules that it has to keep.

use super::cut;
use super::pages::Pages;
use super::regions::{Regions, check_workspace};
use super::sizes::{expect_disjoint, row_strides, rows_bytes};
use super::terms::DeviceCall;
use super::tile::TILE_KEYS;
use crate::attention::{AttentionShape, Keeps, PvAccumulator};
use crate::cuda::{Element, View};
use crate::error::{Error, Result};
use crate::stats::stats_words;
use half::bf16;

/// Multipliers that turn E4M3 back into values, as f32 in device memory; `None` means 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct Descales {
    /// Of q, `(batch, heads_kv)`: query heads of one group share theirs.
    pub q: Option<View<2>>,
    /// Of k, `(batch, heads_kv)`.
    pub k: Option<View<2>>,
    /// Of v, `(batch, heads_kv)`.
    pub v: Option<View<2>>,
    /// Of an E4M3 output, `(batch, heads_kv)`.
    pub o: Option<View<2>>,
    /// Of the logits, `(heads_q)`. If given, logits pass through E4M3 on their way into the softmax; else they stay in f32. Not
    /// over pages.
    pub logit: Option<View<1>>,
}

impl Descales {
    pub(super) fn check(&self, sizes: &AttentionShape) -> Result<()> {
        for (name, x) in [("q descale", self.q), ("k descale", self.k), ("v descale", self.v), ("o descale", self.o)] {
            if let Some(x) = x {
                x.expect(name, &[Element::F32], [sizes.batch, sizes.n_kv_heads])?;
                x.expect_aligned(name, 4, 1)?;
            }
        }
        self.logit.map_or(Ok(()), |x| x.expect_dense("logit descale", Element::F32, [sizes.n_q_heads]))
    }
}

/// Rotary embedding of q and k, applied before the cast: `(a, b) -> (a cos - b sin, b cos + a sin)` for each pair.
///
/// Query `i` takes the row `i + len_k - len_q` of the tables, or of `positions`. Over pages, queries and new keys take the rows of their
/// places in their sequences.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Cosines, f32, `(positions, rotary / 2)` without gaps; `rotary`, a multiple of 8, is the number of rotated
    /// leading dimensions.
    pub cosine: View<2>,
    /// Sines, likewise.
    pub sine: View<2>,
    /// Rows of the tables, i32, `(batch, len_k)` without gaps, each less than the tables' rows (not checked: they lie on
    /// the device); `None`: the key's index. Not over pages.
    pub positions: Option<View<2>>,
    /// Pairs are `(2i, 2i + 1)` rather than `(i, i + rotary / 2)`.
    pub interleaved: bool,
}

/// Keys and values of a call.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "calls are Copy, which a box is not")]
pub enum Keys {
    /// Rows of a tensor.
    Rows {
        /// Keys, `(batch, len_k, heads_kv, d)`, of q's type.
        k: View<4>,
        /// Values, `(batch, len_k, heads_kv, d_v)`, of q's type; d_v as d, or another dimension of that kind.
        v: View<4>,
    },
    /// Pages of a cache in E4M3, with the tokens that the call appends to it first.
    Pages(Pages),
}

/// What one forward reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Tensors {
    /// Queries, `(batch, len_q, heads_q, d)`, d a multiple of 8 from 16 to 256: BF16, F16, F32, or E4M3 that is `x / descale` already. 16-byte aligned,
    /// strides multiples of 8 elements (E4M3: 16). A factor that grows with the position (Llama 4, Ministral 3) is in them
    /// already: the model multiplies its queries, the descale covers the largest. It may stand in front of `rope`, which
    /// turns what is multiplied as it would what is not. Over pages the last query of a sequence is at its last key.
    pub q: View<4>,
    /// Keys and values; 16-byte aligned as q.
    pub keys: Keys,
    /// Descales.
    pub descales: Descales,
    /// Rotation of q and k; not for E4M3 operands.
    pub rope: Option<Rope>,
    /// How the sums of P V are taken: F16 for outputs that a backward takes delta from, FP8 otherwise. FP8 sums are promoted at
    /// least as often as asked, mostly after every tile of 128 keys. Not F32; F16 neither with logits or an output in
    /// E4M3, nor over pages.
    pub accumulator: PvAccumulator,
    /// Where the call leaves what a backward needs; `None`: nowhere. Not for E4M3 operands.
    pub saved: Option<SavedOperands>,
    /// Output, `(batch, len_q, heads_q, d_v)`: BF16, or E4M3 by `descales.o`. 16-byte aligned, strides multiples of 8
    /// elements.
    pub out: View<4>,
    /// Log-sum-exp in nats, f32, `(batch, heads_q, len_q)` without gaps; `-inf` where a row sees no key.
    pub lse: Option<View<3>>,
    /// Telemetry, [`stats_words`] u32 without gaps, as [`StepWords`](crate::stats::StepWords) has them. Calls add to it:
    /// maxima and sums over all calls since it was zero. Only what a call casts is counted: of E4M3 operands nothing, of
    /// pages the tokens that it appends.
    pub stats: Option<View<1>>,
}

/// q, k and v as the products take them, for a backward: E4M3, `(batch, length, heads, d)` without gaps, 16-byte aligned. Where d is no
/// multiple of 16, the row of a head is followed by 8 bytes that are neither written nor read, so that strides are.
#[derive(Clone, Copy, Debug)]
pub struct SavedOperands {
    /// Queries.
    pub q: View<4>,
    /// Keys.
    pub k: View<4>,
    /// Values: rows, as the keys'.
    pub v: View<4>,
    /// What the attention keeps besides them. Keys of calls that keep any of it are not split.
    pub rows: SavedRows,
}

/// What the attention itself keeps for a backward.
#[derive(Clone, Copy, Debug, Default)]
pub enum SavedRows {
    /// Nothing besides the output and the log-sum-exp.
    #[default]
    Nothing,
    /// For [`Keeps::UnroundedDelta`], what the rounding of the output took: O before it minus O, a signed byte each ([`residual_code`]),
    /// `(batch, len_q, heads_q, d_v)` without gaps, 16-byte aligned. P V is summed in F16.
    Residual(View<4>),
    /// For [`Keeps::Fp8Dq`], the base-2 logarithm of the largest P of each row, f32, `(batch, heads_q, len_q)` without gaps; of a row
    /// that sees no key it says nothing.
    RowMax(View<3>),
}

/// What the rounding of a value to BF16 took, as kernels keep it: in steps of 2^-15 of the power of two below the rounded value
/// `out`, at most 127 of them; half a step of BF16 is 128. Below 2^-111 a step is that of 2^-111.
pub fn residual_code(value: f32, out: bf16) -> i8 {
    ((value - out.to_f32()) / residual_step(out)).round_ties_even() as i8
}

/// What a code of [`residual_code`] stands for.
pub fn residual_value(code: i8, out: bf16) -> f32 {
    f32::from(code) * residual_step(out)
}

fn residual_step(out: bf16) -> f32 {
    let exponent = (out.to_f32().to_bits() & 0x7f80_0000).max(16 << 23);
    f32::from_bits(exponent - (15 << 23))
}

impl SavedRows {
    /// Where it lies, if there is any.
    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Residual(x) => x.ptr().0,
            Self::RowMax(x) => x.ptr().0,
        }
    }
}

impl Tensors {
    /// Sizes of the call on these tensors; over pages `len_k` is what the block table has room for.
    pub fn shape(&self) -> AttentionShape {
        let [batch, len_q, n_q_heads, d_head] = self.q.extents();
        let [len_k, n_kv_heads, d_v] = match &self.keys {
            Keys::Rows { k, v } => [k.extents()[1], k.extents()[2], v.extents()[3]],
            Keys::Pages(pages) => [pages.capacity(), pages.k.extents()[2], d_head],
        };
        AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v }
    }

    /// The cache, where keys lie in pages.
    pub(super) fn pages(&self) -> Option<&Pages> {
        match &self.keys {
            Keys::Pages(pages) => Some(pages),
            Keys::Rows { .. } => None,
        }
    }

    /// What the call leaves for a backward.
    pub fn keeps(&self) -> Keeps {
        self.saved.map_or(Keeps::Nothing, |saved| match saved.rows {
            SavedRows::Nothing => Keeps::Operands,
            SavedRows::Residual(_) => Keeps::UnroundedDelta,
            SavedRows::RowMax(_) => Keeps::Fp8Dq,
        })
    }

    /// Checks every rule of a call and of its tensors.
    ///
    /// # Errors
    /// Names the argument and the rule.
    pub fn check(&self, call: &DeviceCall) -> Result<()> {
        call.check()?;
        let (sizes, element) = (&call.shape, self.q.element());
        self.q.expect("q", &[Element::Bf16, Element::F16, Element::F32, Element::E4m3], sizes.q_shape())?;
        let multiple = if element == Element::E4m3 { 16 } else { 8 };
        self.q.expect_aligned("q", 16, multiple)?;
        match &self.keys {
            Keys::Rows { k, v } => {
                for (name, x, shape) in [("k", k, sizes.k_shape()), ("v", v, sizes.v_shape())] {
                    x.expect(name, &[element], shape)?;
                    x.expect_aligned(name, 16, multiple)?;
                }
            }
            Keys::Pages(pages) => {
                let (types, logits) = ([element, self.out.element()], self.descales.logit.is_some());
                pages.check(call, types, logits, self.keeps())?;
            }
        }
        self.out.expect("out", &[Element::Bf16, Element::E4m3], sizes.out_shape())?;
        self.out.expect_aligned("out", 16, 8)?;
        expect_disjoint("out", &self.out)?;
        let sequences = self.pages().map_or(sizes.batch, Pages::sequences);
        self.descales.check(&AttentionShape { batch: sequences, ..*sizes })?;
        if self.descales.logit.is_some() && call.key_center().is_some() {
            return Err(Error::unsupported(
                "a center of keys with logits in E4M3 is not offered on the GPU: their descales are for the logits of the model",
            ));
        }
        if self.descales.logit.is_some() && self.stats.is_none() {
            return Err(Error::argument("logits in E4M3 need stats: their overflow must not go unseen"));
        }
        if let Some(x) = &self.lse {
            x.expect_dense("lse", Element::F32, sizes.lse_shape())?;
        }
        if let Some(x) = &self.stats {
            x.expect_dense("stats", Element::U32, [stats_words(sizes.n_q_heads, sizes.n_kv_heads)])?;
            x.expect_aligned("stats", 16, 1)?;
        }
        if let Some(rope) = &self.rope {
            rope.check(call, self)?;
        }
        if let Some(saved) = &self.saved {
            saved.check(sizes, self)?;
        }
        self.check_accumulator()
    }

    fn check_accumulator(&self) -> Result<()> {
        self.accumulator.check()?;
        let with = match self.accumulator {
            PvAccumulator::F32 | PvAccumulator::Bf16 { .. } => "P V is not",
            PvAccumulator::F16 if self.descales.logit.is_some() => "with logits in E4M3 P V is not",
            PvAccumulator::F16 if self.out.element() == Element::E4m3 => "with an output in E4M3 P V is not",
            PvAccumulator::F16 if matches!(self.keys, Keys::Pages(_)) => "over pages P V is not",
            PvAccumulator::Fp8 { promote_every } if promote_every < TILE_KEYS => "for a tile of 128 keys P V is not",
            _ => return Ok(()),
        };
        Err(Error::unsupported(format_args!("{with} summed in {} on the GPU", self.accumulator)))
    }
}

impl SavedOperands {
    fn check(&self, sizes: &AttentionShape, tensors: &Tensors) -> Result<()> {
        if tensors.q.element() == Element::E4m3 {
            return Err(Error::argument("operands that are E4M3 already are not saved again"));
        }
        let rows = [("q", &self.q, sizes.q_shape()), ("k", &self.k, sizes.k_shape()), ("v", &self.v, sizes.v_shape())];
        for (name, x, shape) in rows {
            x.expect(&format!("saved {name}"), &[Element::E4m3], shape)?;
            // SAFETY: nothing reads it; strides of single elements do not matter.
            let want = unsafe { View::new(x.ptr(), Element::E4m3, shape, row_strides(shape)) }.unit_free_strides();
            if x.unit_free_strides() != want {
                return Err(Error::argument(format_args!(
                    "saved {name} has strides {:?} and must have {want:?}: no gaps, but rows of a multiple of 16 bytes",
                    x.strides()
                )));
            }
            x.expect_aligned(&format!("saved {name}"), 16, 16)?;
        }
        match &self.rows {
            SavedRows::Nothing => Ok(()),
            SavedRows::Residual(x) => {
                x.expect_dense("residual", Element::U8, sizes.out_shape())?;
                x.expect_aligned("residual", 16, 8)?;
                if tensors.accumulator != PvAccumulator::F16 {
                    return Err(Error::argument(format_args!(
                        "the residual is of an output whose P V is summed in f16, not in {}",
                        tensors.accumulator
                    )));
                }
                Ok(())
            }
            SavedRows::RowMax(x) => {
                x.expect_dense("row_max", Element::F32, sizes.lse_shape())?;
                if tensors.lse.is_none() {
                    return Err(Error::argument("row_max comes with the log-sum-exp: lse is needed, too"));
                }
                Ok(())
            }
        }
    }
}

impl Rope {
    /// Rotated dimensions of a head.
    pub fn rotary(&self) -> usize {
        2 * self.cosine.extents()[1]
    }

    /// Also checks that every query and key of the call has a row of the tables. What sequences on the device have is not known:
    /// queries in front of the first key stand at it.
    fn check(&self, call: &DeviceCall, tensors: &Tensors) -> Result<()> {
        if tensors.q.element() == Element::E4m3 {
            return Err(Error::argument("E4M3 operands cannot be rotated: RoPE comes before the cast"));
        }
        let AttentionShape { batch, len_q, len_k, d_head, .. } = call.shape;
        let (rotary, rows) = (self.rotary(), self.cosine.extents()[0]);
        if rotary == 0 || rotary % 8 != 0 || rotary > d_head {
            return Err(Error::argument(format_args!(
                "rotary dimension {rotary} must be a multiple of 8 up to the head dimension {d_head}"
            )));
        }
        for (name, table) in [("RoPE cosines", &self.cosine), ("RoPE sines", &self.sine)] {
            table.expect_dense(name, Element::F32, [rows, rotary / 2])?;
            table.expect_aligned(name, 16, 1)?;
        }
        let in_rows = matches!(tensors.keys, Keys::Rows { .. });
        if in_rows && call.sequences.is_none() && len_q > len_k {
            return Err(Error::argument(format_args!(
                "RoPE needs a position for each of {len_q} queries, and there are {len_k} keys"
            )));
        }
        let keys = call.sequences.map_or(len_k, |s| s.max_len_k);
        match &self.positions {
            Some(_) if !in_rows => Err(Error::unsupported(
                "positions are not offered over pages: tokens stand at their places in their sequences",
            )),
            Some(positions) => positions.expect_dense("positions", Element::I32, [batch, len_k]),
            None if rows < keys => {
                Err(Error::argument(format_args!("RoPE tables of {rows} positions do not reach {keys} keys")))
            }
            None => Ok(()),
        }
    }
}

/// Where a call keeps what passes between its kernels, in bytes from the start of the workspace.
///
/// The first [`Workspace::HEADER`] bytes hold the tile counter, which every cast sets to zero and every attention leaves there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workspace {
    /// Queries in E4M3, `(batch, len_q, heads_q, d)` in rows of a multiple of 16 bytes, where the call casts them.
    pub q: usize,
    /// Keys in E4M3, likewise.
    pub k: usize,
    /// Values in E4M3, `(batch, heads_kv, ceil(len_k / 16), d_v / 8, 8, 16)`; or in F16, `(batch, len_k, heads_kv, d_v)`. With
    /// sequences of unequal length batch is 1, and each begins a tile of 128 keys.
    pub v: usize,
    /// Partial results of a call whose keys are split.
    pub partial: usize,
    /// With sequences of unequal length: the list of tiles.
    pub schedule: usize,
    /// And how many parts each has.
    pub sequence_splits: usize,
    /// Size of it all.
    pub bytes: usize,
}

impl Workspace {
    /// Bytes in front of the operands.
    pub const HEADER: usize = 256;

    /// The workspace of a call on rows whose operands are of type `element`; `saved`: the caller gives memory for them in E4M3.
    pub fn of(call: &DeviceCall, element: Element, accumulator: PvAccumulator, saved: bool) -> Self {
        let sizes = &call.shape;
        let mut regions = Regions::default();
        regions.add(Self::HEADER);
        let mut cast = |shape: [usize; 4]| {
            let bytes = if saved || element == Element::E4m3 { 0 } else { rows_bytes(shape) };
            regions.add(bytes)
        };
        let (q, k) = (cast(sizes.q_shape()), cast(sizes.k_shape()));
        let values = cut::values(call);
        let v = regions.add(match accumulator {
            PvAccumulator::F16 => 2 * values.v_shape().iter().product::<usize>(),
            _ => values.batch * values.n_kv_heads * values.key_groups() * 16 * values.d_v,
        });
        let [partial, schedule, sequence_splits] = cut::regions(call, &mut regions);
        Self { q, k, v, partial, schedule, sequence_splits, bytes: regions.bytes() }
    }

    pub(super) fn check(&self, workspace: &View<1>) -> Result<()> {
        check_workspace(workspace, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::terms::Sequences;
    use super::super::tile::Split;
    use super::*;
    use crate::cuda::DevicePtr;

    // SAFETY of every view below: nothing is launched in these tests.
    fn dense<const R: usize>(element: Element, extents: [usize; R]) -> View<R> {
        unsafe { View::dense(DevicePtr(1 << 20), element, extents) }
    }

    fn tensors(element: Element) -> Tensors {
        Tensors {
            q: dense(element, [2, 40, 4, 128]),
            keys: Keys::Rows { k: dense(element, [2, 50, 2, 128]), v: dense(element, [2, 50, 2, 128]) },
            descales: Descales::default(),
            rope: None,
            accumulator: PvAccumulator::default(),
            saved: None,
            out: dense(Element::Bf16, [2, 40, 4, 128]),
            lse: None,
            stats: None,
        }
    }

    /// Its check, as a causal call of its own sizes, or of those of a plain one.
    fn check(tensors: &Tensors) -> Result<AttentionShape> {
        let shape = tensors.shape();
        tensors.check(&DeviceCall::causal(shape)).map(|()| shape)
    }

    fn set_k(t: &mut Tensors, k: View<4>) {
        let Keys::Rows { v, .. } = t.keys else { panic!("rows") };
        t.keys = Keys::Rows { k, v };
    }

    fn set_v(t: &mut Tensors, v: View<4>) {
        let Keys::Rows { k, .. } = t.keys else { panic!("rows") };
        t.keys = Keys::Rows { k, v };
    }

    fn saved(v: [usize; 4]) -> SavedOperands {
        let [q, k, v] = [[2, 40, 4, 128], [2, 50, 2, 128], v].map(|shape| dense(Element::E4m3, shape));
        SavedOperands { q, k, v, rows: SavedRows::Nothing }
    }

    #[test]
    fn a_plain_call_passes_and_gives_its_sizes() {
        let sizes = check(&tensors(Element::Bf16)).unwrap();
        assert_eq!(
            sizes,
            AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 40, len_k: 50, d_head: 128, d_v: 128 }
        );
        assert!(check(&tensors(Element::E4m3)).is_ok());
    }

    #[test]
    fn what_breaks_a_rule_is_named() {
        type Change = fn(&mut Tensors);
        let cases: [(&str, Change); 22] = [
            ("d_head 264 is not offered on the GPU, which takes at most 256", |t| {
                t.q = dense(Element::Bf16, [2, 40, 4, 264]);
            }),
            ("d_v 100 is not offered on the GPU, which takes multiples of 8", |t| {
                set_v(t, dense(Element::Bf16, [2, 50, 2, 100]));
            }),
            ("k has shape", |t| set_k(t, dense(Element::Bf16, [1, 50, 2, 128]))),
            ("v is F16", |t| set_v(t, dense(Element::F16, [2, 50, 2, 128]))),
            ("out is F32", |t| t.out = dense(Element::F32, [2, 40, 4, 128])),
            ("multiple of 2 KV heads", |t| t.q = dense(Element::Bf16, [2, 40, 3, 128])),
            ("q descale has shape", |t| t.descales.q = Some(dense(Element::F32, [2, 4]))),
            ("need stats", |t| t.descales.logit = Some(dense(Element::F32, [4]))),
            ("lse has shape", |t| t.lse = Some(dense(Element::F32, [2, 40, 4]))),
            ("stats has shape", |t| t.stats = Some(dense(Element::U32, [4]))),
            ("no zero", |t| t.q = dense(Element::Bf16, [2, 0, 4, 128])),
            ("q must be contiguous in its last dimension", |t| {
                t.q = unsafe { View::new(DevicePtr(256), Element::Bf16, [2, 40, 4, 128], [65536, 1024, 256, 2]) };
            }),
            ("q must start at a multiple of 16", |t| {
                t.q = unsafe { View::dense(DevicePtr(8), Element::Bf16, [2, 40, 4, 128]) };
            }),
            ("summed in f32", |t| t.accumulator = PvAccumulator::F32),
            ("every 100 keys", |t| t.accumulator = PvAccumulator::Fp8 { promote_every: 100 }),
            ("tile of 128 keys", |t| t.accumulator = PvAccumulator::Fp8 { promote_every: 64 }),
            ("logits in E4M3 P V is not summed in f16", |t| {
                t.accumulator = PvAccumulator::F16;
                t.descales.logit = Some(dense(Element::F32, [4]));
                t.stats = Some(dense(Element::U32, [stats_words(4, 2)]));
            }),
            ("output in E4M3 P V is not summed in f16", |t| {
                (t.accumulator, t.out) = (PvAccumulator::F16, dense(Element::E4m3, [2, 40, 4, 128]));
            }),
            ("saved v has shape", |t| t.saved = Some(saved([2, 50, 4, 128]))),
            ("saved again", |t| {
                *t = tensors(Element::E4m3);
                t.saved = Some(saved([2, 50, 2, 128]));
            }),
            ("summed in f16, not in fp8-256", |t| {
                let rows = SavedRows::Residual(dense(Element::U8, [2, 40, 4, 128]));
                t.saved = Some(SavedOperands { rows, ..saved([2, 50, 2, 128]) });
            }),
            ("multiple of 8", |t| {
                let table = dense(Element::F32, [50, 34]);
                t.rope = Some(Rope { cosine: table, sine: table, positions: None, interleaved: false });
            }),
        ];
        for (message, change) in cases {
            let mut call = tensors(Element::Bf16);
            change(&mut call);
            let error = check(&call).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    #[test]
    fn tables_of_a_rotation_reach_every_key() {
        let table = dense(Element::F32, [49, 64]);
        let rope = Rope { cosine: table, sine: table, positions: None, interleaved: false };
        let plain = tensors(Element::Bf16);
        let message = |rope: Rope, sequences: Option<Sequences>| {
            let call = DeviceCall { sequences, ..DeviceCall::causal(plain.shape()) };
            Tensors { rope: Some(rope), ..plain }.check(&call).map_err(|error| error.to_string())
        };
        assert!(message(rope, None).unwrap_err().contains("do not reach 50 keys"));
        let list = dense(Element::I32, [2]);
        let of = |max_len_k| {
            let [q_starts, q_ends, k_starts, k_ends] = [list; 4];
            Some(Sequences { q_starts, q_ends, k_starts, k_ends, max_len_q: 40, max_len_k })
        };
        assert!(message(rope, of(49)).is_ok(), "the longest sequence decides");
        assert!(message(rope, of(50)).unwrap_err().contains("50 keys"));
        let indexed = Rope { positions: Some(dense(Element::I32, [2, 50])), ..rope };
        assert!(message(indexed, None).is_ok());
    }

    #[test]
    fn an_output_needs_memory_for_each_element() {
        let with = |extents: [usize; 4], strides: [i64; 4]| {
            let mut call = tensors(Element::Bf16);
            call.q = dense(Element::Bf16, extents);
            call.out = unsafe { View::new(DevicePtr(1 << 20), Element::Bf16, extents, strides) };
            check(&call)
        };
        let shape = [2, 40, 4, 128];
        // Dense, padded, heads before positions, sequences innermost but for d.
        for strides in [[20480, 512, 128, 1], [30720, 768, 192, 1], [20480, 128, 5120, 1], [128, 1024, 256, 1]] {
            assert!(with(shape, strides).is_ok(), "{strides:?}");
        }
        for strides in
            [[0, 512, 128, 1], [20480, 0, 128, 1], [20480, 512, 0, 1], [20480, 512, 64, 1], [512, 512, 128, 1]]
        {
            let error = with(shape, strides).unwrap_err();
            assert!(error.is_argument() && error.to_string().contains("overlap"), "{strides:?}: {error}");
        }
        // A dimension of one element has no stride.
        let one = [1, 40, 4, 128];
        let mut call = tensors(Element::Bf16);
        call.q = dense(Element::Bf16, one);
        let row = dense(Element::Bf16, [1, 50, 2, 128]);
        call.keys = Keys::Rows { k: row, v: row };
        call.out = unsafe { View::new(DevicePtr(1 << 20), Element::Bf16, one, [0, 512, 128, 1]) };
        assert!(check(&call).is_ok());
    }

    #[test]
    fn regions_of_the_workspace_do_not_overlap() {
        let sizes =
            AttentionShape { batch: 3, n_q_heads: 6, n_kv_heads: 2, len_q: 113, len_k: 203, d_head: 64, d_v: 64 };
        let call = DeviceCall::causal(sizes);
        let of = |element| Workspace::of(&call, element, PvAccumulator::default(), false);
        let w = of(Element::Bf16);
        assert!(w.q >= Workspace::HEADER && [w.q, w.k, w.v].iter().all(|at| at.is_multiple_of(256)));
        assert!(w.k - w.q >= 3 * 113 * 6 * 64 && w.v - w.k >= 3 * 203 * 2 * 64);
        assert!(w.partial.is_multiple_of(256) && w.partial - w.v >= 3 * 2 * 208 * 64);
        assert!(of(Element::E4m3).bytes < w.bytes);
        let saved = |accumulator| Workspace::of(&call, Element::Bf16, accumulator, true);
        assert_eq!(saved(PvAccumulator::default()).bytes, of(Element::E4m3).bytes);
        let f16 = saved(PvAccumulator::F16);
        assert!(f16.partial - f16.v >= 2 * 3 * 203 * 2 * 64);
        let decode = AttentionShape { len_q: 1, len_k: 8192, ..sizes };
        let w = Workspace::of(&DeviceCall::causal(decode), Element::Bf16, PvAccumulator::default(), false);
        let room = [false, true].map(|logits| Split::of(&decode, logits).unwrap().partial(&decode).bytes);
        assert_eq!(w.bytes - w.partial, room.into_iter().max().unwrap());
        let w = of(Element::Bf16);
        let short = dense(Element::U8, [w.bytes - 1]);
        let error = w.check(&short).unwrap_err();
        assert!(error.is_argument() && error.to_string().contains(&w.bytes.to_string()), "{error}");
        assert!(w.check(&dense(Element::U8, [w.bytes + 5])).is_ok());
    }
}
