//! What a call is made of, and the rules it has to keep.

use super::cut;
use super::regions::{Regions, check_workspace};
use super::sizes::{row_strides, rows_bytes};
use super::terms::Terms;
use super::tile::TILE_KEYS;
use crate::attention::{AttentionShape, PvAccumulator};
use crate::cuda::{Element, View};
use crate::error::{Error, Result};
use crate::stats::stats_words;

/// Multipliers that turn E4M3 back into values, as f32 in device memory; `None` stands for 1.
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
    /// Of the logits, `(heads_q)`. If given, logits pass through E4M3 on their way into the softmax; else they stay in f32.
    pub logit: Option<View<1>>,
}

/// Rotary embedding of q and k, applied before the cast: `(a, b) -> (a cos - b sin, b cos + a sin)` for each pair.
///
/// Query `i` stands at the row `i + len_k - len_q` of the tables, or of `positions`.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Cosines, f32, `(positions, rotary / 2)` without gaps; `rotary`, a multiple of 8, is the number of rotated
    /// leading dimensions.
    pub cosine: View<2>,
    /// Sines, likewise.
    pub sine: View<2>,
    /// Rows of the tables, i32, `(batch, len_k)` without gaps, each less than the tables' rows (not checked: they lie on
    /// the device); `None`: the key's index.
    pub positions: Option<View<2>>,
    /// Pairs are `(2i, 2i + 1)` rather than `(i, i + rotary / 2)`.
    pub interleaved: bool,
}

/// What one call reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Tensors {
    /// Queries, `(batch, len_q, heads_q, d)`, d a multiple of 8 from 16 to 256: BF16, F16, F32, or E4M3 that is `x / descale` already. 16-byte aligned,
    /// strides multiples of 8 elements (E4M3: 16). A factor that grows with the position (Llama 4, Ministral 3) is in them
    /// already: the model multiplies its queries, the descale covers the largest. It may stand in front of `rope`, which
    /// turns what is multiplied as it would what is not.
    pub q: View<4>,
    /// Keys, `(batch, len_k, heads_kv, d)`, of q's type.
    pub k: View<4>,
    /// Values, `(batch, len_k, heads_kv, d_v)`, of q's type; d_v as d, or another dimension of that kind.
    pub v: View<4>,
    /// Descales.
    pub descales: Descales,
    /// Rotation of q and k; not for E4M3 operands.
    pub rope: Option<Rope>,
    /// How the sums of P V are taken: F16 for outputs that a backward takes delta from, FP8 otherwise. FP8 sums are promoted at
    /// least as often as asked, mostly after every tile of 128 keys. Not F32; F16 not with logits or an output in
    /// E4M3.
    pub accumulator: PvAccumulator,
    /// Where the cast leaves q, k and v in E4M3; `None`: in the workspace. Not for E4M3 operands.
    pub saved: Option<SavedOperands>,
    /// Output, `(batch, len_q, heads_q, d_v)`: BF16, or E4M3 by `descales.o`. 16-byte aligned, strides multiples of 8
    /// elements.
    pub out: View<4>,
    /// Log-sum-exp in nats, f32, `(batch, heads_q, len_q)` without gaps; `-inf` where a row sees no key.
    pub lse: Option<View<3>>,
    /// Telemetry, [`stats_words`] u32 without gaps, as [`StepWords`](crate::stats::StepWords) has them. Calls add to it:
    /// maxima and sums over all calls since it was zero. Of E4M3 operands only the logits' words are written.
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
    /// The base-2 logarithm of the largest P of each row, f32, `(batch, heads_q, len_q)` without gaps, for
    /// [`BackwardOptions::dq_fp8`](super::BackwardOptions::dq_fp8). Keys of such calls are not split; of a row that sees no
    /// key it says nothing.
    pub row_max: Option<View<3>>,
    /// What the rounding of the output took: O before it minus O, BF16, `(batch, len_q, heads_q, d_v)` without gaps, 16-byte
    /// aligned, for [`Delta::Unrounded`](super::Delta::Unrounded). Keys of such calls are not split; P V is summed in F16. Not beside
    /// `row_max`.
    pub residual: Option<View<4>>,
}

/// What a forward keeps for its backward beside the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Keeps {
    Nothing,
    /// The largest P of each row.
    RowMax,
    /// What the rounding of the output took.
    Residual,
}

impl Tensors {
    /// Sizes of the call, after all rules were checked.
    ///
    /// # Errors
    /// Names the argument and the rule.
    pub fn check(&self) -> Result<AttentionShape> {
        let [batch, len_q, heads_q, d_head] = self.q.extents();
        let [_, len_k, heads_kv, _] = self.k.extents();
        let d_v = self.v.extents()[3];
        let sizes = AttentionShape { batch, n_q_heads: heads_q, n_kv_heads: heads_kv, len_q, len_k, d_head, d_v };
        sizes.check_on_gpu()?;
        let element = self.q.element();
        self.q.expect("q", &[Element::Bf16, Element::F16, Element::F32, Element::E4m3], sizes.q_shape())?;
        self.k.expect("k", &[element], sizes.k_shape())?;
        self.v.expect("v", &[element], sizes.v_shape())?;
        let multiple = if element == Element::E4m3 { 16 } else { 8 };
        for (name, x) in [("q", &self.q), ("k", &self.k), ("v", &self.v)] {
            x.expect_aligned(name, 16, multiple)?;
        }
        self.out.expect("out", &[Element::Bf16, Element::E4m3], sizes.out_shape())?;
        self.out.expect_aligned("out", 16, 8)?;
        expect_disjoint("out", &self.out)?;
        let d = &self.descales;
        for (name, x) in [("q descale", d.q), ("k descale", d.k), ("v descale", d.v), ("o descale", d.o)] {
            if let Some(x) = x {
                x.expect(name, &[Element::F32], [batch, heads_kv])?;
                x.expect_aligned(name, 4, 1)?;
            }
        }
        if let Some(x) = &d.logit {
            x.expect_dense("logit descale", Element::F32, [heads_q])?;
            if self.stats.is_none() {
                return Err(Error::argument("logits in E4M3 need stats: their overflow must not go unseen"));
            }
        }
        if let Some(x) = &self.lse {
            x.expect_dense("lse", Element::F32, sizes.lse_shape())?;
        }
        if let Some(x) = &self.stats {
            x.expect_dense("stats", Element::U32, [stats_words(heads_q, heads_kv)])?;
            x.expect_aligned("stats", 16, 1)?;
        }
        if let Some(rope) = &self.rope {
            rope.check(&sizes, element)?;
        }
        if let Some(saved) = &self.saved {
            if element == Element::E4m3 {
                return Err(Error::argument("operands that are E4M3 already are not saved again"));
            }
            let rows =
                [("q", &saved.q, sizes.q_shape()), ("k", &saved.k, sizes.k_shape()), ("v", &saved.v, sizes.v_shape())];
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
            if let Some(x) = &saved.residual {
                x.expect_dense("residual", Element::Bf16, sizes.out_shape())?;
                x.expect_aligned("residual", 16, 8)?;
                if saved.row_max.is_some() {
                    return Err(Error::unsupported(
                        "dQ in FP8 takes delta from the rounded output: leave out row_max or the residual",
                    ));
                }
                if self.accumulator != PvAccumulator::F16 {
                    return Err(Error::argument(format_args!(
                        "the residual is of an output whose P V is summed in f16, not in {}",
                        self.accumulator
                    )));
                }
            }
            if let Some(x) = &saved.row_max {
                x.expect_dense("row_max", Element::F32, sizes.lse_shape())?;
                if self.lse.is_none() {
                    return Err(Error::argument("row_max comes with the log-sum-exp: lse is needed, too"));
                }
            }
        }
        self.check_accumulator()?;
        Ok(sizes)
    }

    pub(super) fn keeps(&self) -> Keeps {
        match self.saved {
            Some(SavedOperands { row_max: Some(_), .. }) => Keeps::RowMax,
            Some(SavedOperands { residual: Some(_), .. }) => Keeps::Residual,
            _ => Keeps::Nothing,
        }
    }

    fn check_accumulator(&self) -> Result<()> {
        self.accumulator.check()?;
        let with = match self.accumulator {
            PvAccumulator::F32 | PvAccumulator::Bf16 { .. } => "P V is not",
            PvAccumulator::F16 if self.descales.logit.is_some() => "with logits in E4M3 P V is not",
            PvAccumulator::F16 if self.out.element() == Element::E4m3 => "with an output in E4M3 P V is not",
            PvAccumulator::Fp8 { promote_every } if promote_every < TILE_KEYS => "for a tile of 128 keys P V is not",
            _ => return Ok(()),
        };
        Err(Error::unsupported(format_args!("{with} summed in {} on the GPU", self.accumulator)))
    }
}

/// Refuses an array that is written where two of its elements share memory. Strides of an array without such elements nest:
/// sorted by size, each passes over all that the smaller ones reach.
pub(super) fn expect_disjoint<const R: usize>(name: &str, x: &View<R>) -> Result<()> {
    let mut dimensions: Vec<(i64, i64)> = x.strides().into_iter().zip(x.extents().map(|n| n as i64)).collect();
    dimensions.retain(|&(_, extent)| extent > 1);
    dimensions.sort_unstable();
    let mut reach = 0;
    for (stride, extent) in dimensions {
        if stride <= reach {
            return Err(Error::argument(format_args!(
                "{name} has strides {:?}, by which elements of {:?} overlap: an output needs memory for each",
                x.strides(),
                x.extents()
            )));
        }
        reach = stride.checked_mul(extent - 1).and_then(|span| span.checked_add(reach)).unwrap_or(i64::MAX);
    }
    Ok(())
}

impl Rope {
    /// Rotated dimensions of a head.
    pub fn rotary(&self) -> usize {
        2 * self.cosine.extents()[1]
    }

    fn check(&self, sizes: &AttentionShape, element: Element) -> Result<()> {
        if element == Element::E4m3 {
            return Err(Error::argument("E4M3 operands cannot be rotated: RoPE comes before the cast"));
        }
        let (rotary, rows) = (self.rotary(), self.cosine.extents()[0]);
        if rotary == 0 || rotary % 8 != 0 || rotary > sizes.d_head {
            return Err(Error::argument(format_args!(
                "rotary dimension {rotary} must be a multiple of 8 up to the head dimension {}",
                sizes.d_head
            )));
        }
        for (name, table) in [("RoPE cosines", &self.cosine), ("RoPE sines", &self.sine)] {
            table.expect_dense(name, Element::F32, [rows, rotary / 2])?;
            table.expect_aligned(name, 16, 1)?;
        }
        match &self.positions {
            Some(positions) => positions.expect_dense("positions", Element::I32, [sizes.batch, sizes.len_k]),
            None => Ok(()),
        }
    }

    /// Whether every query and key of a call has a row of the tables. What sequences on the device have is not known: queries in front of
    /// the first key stand at it.
    pub(super) fn check_positions(&self, sizes: &AttentionShape, terms: &Terms) -> Result<()> {
        if terms.sequences.is_none() && sizes.len_q > sizes.len_k {
            return Err(Error::argument(format_args!(
                "RoPE needs a position for each of {} queries, and there are {} keys",
                sizes.len_q, sizes.len_k
            )));
        }
        let (rows, keys) = (self.cosine.extents()[0], terms.sequences.map_or(sizes.len_k, |s| s.max_len_k));
        if self.positions.is_none() && rows < keys {
            return Err(Error::argument(format_args!("RoPE tables of {rows} positions do not reach {keys} keys")));
        }
        Ok(())
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

    /// The workspace of a call whose operands are of type `element`; `saved`: the caller gives memory for them in E4M3.
    pub fn of(
        sizes: &AttentionShape,
        terms: &Terms,
        element: Element,
        accumulator: PvAccumulator,
        saved: bool,
    ) -> Self {
        let mut regions = Regions::default();
        regions.add(Self::HEADER);
        let mut cast = |shape: [usize; 4]| {
            let bytes = if saved || element == Element::E4m3 { 0 } else { rows_bytes(shape) };
            regions.add(bytes)
        };
        let (q, k) = (cast(sizes.q_shape()), cast(sizes.k_shape()));
        let values = cut::values(terms, sizes);
        let v = regions.add(match accumulator {
            PvAccumulator::F16 => 2 * values.v_shape().iter().product::<usize>(),
            _ => values.batch * values.n_kv_heads * values.key_groups() * 16 * values.d_v,
        });
        let [partial, schedule, sequence_splits] = cut::regions(terms, sizes, &mut regions);
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
    use crate::attention::Mask;
    use crate::cuda::DevicePtr;

    // SAFETY of every view below: nothing is launched in these tests.
    fn dense<const R: usize>(element: Element, extents: [usize; R]) -> View<R> {
        unsafe { View::dense(DevicePtr(1 << 20), element, extents) }
    }

    fn tensors(element: Element) -> Tensors {
        Tensors {
            q: dense(element, [2, 40, 4, 128]),
            k: dense(element, [2, 50, 2, 128]),
            v: dense(element, [2, 50, 2, 128]),
            descales: Descales::default(),
            rope: None,
            accumulator: PvAccumulator::default(),
            saved: None,
            out: dense(Element::Bf16, [2, 40, 4, 128]),
            lse: None,
            stats: None,
        }
    }

    fn saved(v: [usize; 4]) -> SavedOperands {
        let [q, k, v] = [[2, 40, 4, 128], [2, 50, 2, 128], v].map(|shape| dense(Element::E4m3, shape));
        SavedOperands { q, k, v, row_max: None, residual: None }
    }

    #[test]
    fn a_plain_call_passes_and_gives_its_sizes() {
        let sizes = tensors(Element::Bf16).check().unwrap();
        assert_eq!(
            sizes,
            AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 40, len_k: 50, d_head: 128, d_v: 128 }
        );
        assert!(tensors(Element::E4m3).check().is_ok());
    }

    #[test]
    fn what_breaks_a_rule_is_named() {
        type Change = fn(&mut Tensors);
        let cases: [(&str, Change); 23] = [
            ("d_head 264 is not offered on the GPU, which takes at most 256", |t| {
                t.q = dense(Element::Bf16, [2, 40, 4, 264]);
            }),
            ("d_v 100 is not offered on the GPU, which takes multiples of 8", |t| {
                t.v = dense(Element::Bf16, [2, 50, 2, 100]);
            }),
            ("k has shape", |t| t.k = dense(Element::Bf16, [1, 50, 2, 128])),
            ("v is F16", |t| t.v = dense(Element::F16, [2, 50, 2, 128])),
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
                let residual = Some(dense(Element::Bf16, [2, 40, 4, 128]));
                t.saved = Some(SavedOperands { residual, ..saved([2, 50, 2, 128]) });
            }),
            ("leave out row_max or the residual", |t| {
                let (row_max, residual) = (dense(Element::F32, [2, 4, 40]), dense(Element::Bf16, [2, 40, 4, 128]));
                t.saved =
                    Some(SavedOperands { row_max: Some(row_max), residual: Some(residual), ..saved([2, 50, 2, 128]) });
            }),
            ("multiple of 8", |t| {
                let table = dense(Element::F32, [50, 34]);
                t.rope = Some(Rope { cosine: table, sine: table, positions: None, interleaved: false });
            }),
        ];
        for (message, change) in cases {
            let mut call = tensors(Element::Bf16);
            change(&mut call);
            let error = call.check().unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
        assert!(
            AttentionShape { d_head: 264, ..tensors(Element::Bf16).check().unwrap() }
                .check_on_gpu()
                .unwrap_err()
                .is_unsupported()
        );
    }

    #[test]
    fn tables_of_a_rotation_reach_every_key() {
        let table = dense(Element::F32, [49, 64]);
        let rope = Rope { cosine: table, sine: table, positions: None, interleaved: false };
        let sizes = tensors(Element::Bf16).check().unwrap();
        let terms = Terms::plain(Mask::CAUSAL, 0.1);
        let message = |rope: Rope, terms| rope.check_positions(&sizes, &terms).map_err(|error| error.to_string());
        assert!(message(rope, terms).unwrap_err().contains("do not reach 50 keys"));
        let list = dense(Element::I32, [2]);
        let of = |max_len_k| Sequences {
            q_starts: list,
            q_ends: list,
            k_starts: list,
            k_ends: list,
            max_len_q: 40,
            max_len_k,
        };
        assert!(message(rope, Terms { sequences: Some(of(49)), ..terms }).is_ok(), "the longest sequence decides");
        assert!(message(rope, Terms { sequences: Some(of(50)), ..terms }).unwrap_err().contains("50 keys"));
        let indexed = Rope { positions: Some(dense(Element::I32, [2, 50])), ..rope };
        assert!(message(indexed, terms).is_ok());
    }

    #[test]
    fn an_output_needs_memory_for_each_element() {
        let with = |extents: [usize; 4], strides: [i64; 4]| {
            let mut call = tensors(Element::Bf16);
            call.q = dense(Element::Bf16, extents);
            (call.k, call.v) = (dense(Element::Bf16, [2, 50, 2, 128]), dense(Element::Bf16, [2, 50, 2, 128]));
            call.out = unsafe { View::new(DevicePtr(1 << 20), Element::Bf16, extents, strides) };
            call.check()
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
        (call.k, call.v) = (dense(Element::Bf16, [1, 50, 2, 128]), dense(Element::Bf16, [1, 50, 2, 128]));
        call.out = unsafe { View::new(DevicePtr(1 << 20), Element::Bf16, one, [0, 512, 128, 1]) };
        assert!(call.check().is_ok());
    }

    #[test]
    fn regions_of_the_workspace_do_not_overlap() {
        let sizes =
            AttentionShape { batch: 3, n_q_heads: 6, n_kv_heads: 2, len_q: 113, len_k: 203, d_head: 64, d_v: 64 };
        let terms = Terms::plain(Mask::CAUSAL, 0.1);
        let of = |element| Workspace::of(&sizes, &terms, element, PvAccumulator::default(), false);
        let w = of(Element::Bf16);
        assert!(w.q >= Workspace::HEADER && [w.q, w.k, w.v].iter().all(|at| at.is_multiple_of(256)));
        assert!(w.k - w.q >= 3 * 113 * 6 * 64 && w.v - w.k >= 3 * 203 * 2 * 64);
        assert!(w.partial.is_multiple_of(256) && w.partial - w.v >= 3 * 2 * 208 * 64);
        assert!(of(Element::E4m3).bytes < w.bytes);
        let saved = |accumulator| Workspace::of(&sizes, &terms, Element::Bf16, accumulator, true);
        assert_eq!(saved(PvAccumulator::default()).bytes, of(Element::E4m3).bytes);
        let f16 = saved(PvAccumulator::F16);
        assert!(f16.partial - f16.v >= 2 * 3 * 203 * 2 * 64);
        let decode = AttentionShape { len_q: 1, len_k: 8192, ..sizes };
        let w = Workspace::of(&decode, &terms, Element::Bf16, PvAccumulator::default(), false);
        let room = [false, true].map(|logits| Split::of(&decode, logits).unwrap().partial(&decode).bytes);
        assert_eq!(w.bytes - w.partial, room.into_iter().max().unwrap());
        let w = of(Element::Bf16);
        let short = dense(Element::U8, [w.bytes - 1]);
        assert!(w.check(&short).unwrap_err().to_string().contains("the workspace has"));
        assert!(w.check(&dense(Element::U8, [w.bytes + 5])).is_ok());
    }
}
