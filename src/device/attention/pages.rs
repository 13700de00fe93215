//! Keys in the pages of a cache: their rules, and the workspace of a call on them.

use super::regions::{Regions, check_workspace};
use super::sizes::expect_disjoint;
use super::terms::DeviceCall;
use super::tile::{PARTS_BYTES, PROCESSORS, Split};
use crate::attention::{AttentionShape, Keeps};
use crate::cuda::{Element, View};
use crate::error::{Error, Result};
use std::ops::RangeInclusive;

/// Tokens of a page.
const PAGE_SIZES: RangeInclusive<usize> = 16..=256;

/// Macros of the terms that the kernels over pages have.
const OFFERED: [&str; 3] = ["WINDOW", "SINK", "CENTER"];
/// Waves of parts on the multiprocessors that the plan on the device may choose.
const WAVES: usize = 16;

/// How the values of a cache lie in its pages.
#[derive(Clone, Copy, Debug)]
pub enum ValuePages {
    /// `(pages, heads_kv, page_size / 16, d / 8, 8, 16)`, the last three without gaps: the order in which the tensor cores take
    /// them, which the append writes. Byte `4 t + e` of the last dimension is token `8 (e / 2) + 2 t + e % 2` of 16.
    Tiled(View<6>),
    /// `(pages, page_size, heads_kv, d)`, as keys: the layout of FlashAttention-3 and vLLM.
    Rows(View<4>),
}

/// Keys and values in pages, E4M3.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// Keys, `(pages, page_size, heads_kv, d)`; 16-byte aligned, strides multiples of 16. `page_size` is a power of two from 16 to 256.
    pub k: View<4>,
    /// Values.
    pub v: ValuePages,
    /// Which pages the tokens of each sequence lie in, i32, `(sequences, pages_per_sequence)`: token `t` of sequence `s` is row
    /// `t % page_size` of page `block_table[s][t / page_size]`. Entries past a sequence's last token may hold anything.
    pub block_table: View<2>,
    /// Tokens of each sequence that are in the cache before the call, i32, `(sequences)`.
    pub lengths: View<1>,
    /// Which queries are whose; `None`: those of an entry of the batch.
    pub queries: Option<PackedQueries>,
    /// Into how many parts keys are split, over which sums are taken apart and joined.
    pub splits: Splits,
    /// Tokens that the call appends before it attends. The lengths stay as they are: the caller counts the tokens.
    pub new: Option<NewTokens>,
}

/// Into how many parts the keys of a sequence are split: blocks of the device take them at the same time, and their results are joined.
/// The order of sums, and so the last bits of the output, depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Splits {
    /// As is fastest for the lengths of all sequences of the call.
    #[default]
    Fastest,
    /// Always so many, of equal length, or as many as there are tiles of 128 keys.
    Parts(usize),
}

/// Queries of unequal length, packed: q, the output and the log-sum-exp have a batch of 1, whose rows are those of all sequences. Descales
/// are `(sequences, heads_kv)`. Rows of no sequence are not written. What the call attends to is in its pages already: it appends
/// nothing.
#[derive(Clone, Copy, Debug)]
pub struct PackedQueries {
    /// Where the queries of each sequence begin, and the end of the last, i32, `(sequences + 1)`; not checked: it lies on the device.
    pub cu_seqlens: View<1>,
    /// Queries of the longest sequence, or about: what the plan of the call reckons with. Longer ones are attended to as well.
    pub longest: usize,
}

/// Tokens to append: BF16, F16 or F32, of one type, `(sequences, tokens, heads_kv, d)`; 16-byte aligned, strides multiples of 8.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens {
    /// Keys, before RoPE.
    pub k: View<4>,
    /// Values.
    pub v: View<4>,
}

impl Pages {
    /// Tokens of a page.
    pub(super) fn page_size(&self) -> usize {
        self.k.extents()[1]
    }

    /// Tokens of a sequence that the block table has room for.
    pub(super) fn capacity(&self) -> usize {
        self.block_table.extents()[1].saturating_mul(self.page_size())
    }

    /// Sequences of the call.
    pub(super) fn sequences(&self) -> usize {
        self.lengths.extents()[0]
    }

    /// Sizes of a batch of sequences as long as the longest: what the plan of a call is chosen by.
    pub(super) fn longest(&self, sizes: &AttentionShape) -> AttentionShape {
        let len_q = self.queries.map_or(sizes.len_q, |queries| queries.longest);
        AttentionShape { batch: self.sequences(), len_q, ..*sizes }
    }

    /// New tokens of a sequence.
    pub(super) fn added(&self) -> usize {
        self.new.map_or(0, |new| new.k.extents()[1])
    }

    /// Checks the cache, and that the call, whose queries are of type `q`, has nothing that is not offered over pages.
    pub(super) fn check(
        &self,
        call: &DeviceCall,
        [q, out]: [Element; 2],
        logits_in_e4m3: bool,
        keeps: Keeps,
    ) -> Result<()> {
        let ([pages, page_size, ..], sizes) = (self.k.extents(), &call.shape);
        if !page_size.is_power_of_two() || !PAGE_SIZES.contains(&page_size) {
            return Err(Error::unsupported(format_args!(
                "pages of {page_size} tokens: the GPU takes 16, 32, 64, 128 and 256"
            )));
        }
        sizes.check_64_or_128("attention over pages")?;
        let (_, features) = call.features();
        let terms = features.all().map(|(name, what, there)| (what, there && !OFFERED.contains(&name)));
        let others = [
            ("logits in E4M3", logits_in_e4m3),
            ("operands for a backward", keeps != Keeps::Nothing),
            ("an output in E4M3 of packed queries", out == Element::E4m3 && self.queries.is_some()),
        ];
        if let Some((what, _)) = terms.into_iter().chain(others).find(|(_, given)| *given) {
            return Err(Error::unsupported(format_args!("over pages the GPU does not offer {what}")));
        }
        self.queries.map_or(Ok(()), |queries| queries.check(sizes, self))?;
        if let Splits::Parts(parts) = self.splits {
            let most = PagesWorkspace::of(sizes, &self.longest(sizes), self.queries.is_some(), q, self.splits);
            let rows = most.most_blocks.saturating_mul(most.block_rows).saturating_mul(sizes.n_q_heads);
            if parts == 0 || rows > i32::MAX as usize {
                return Err(Error::argument(format_args!(
                    "{parts} parts of the keys of each sequence: give from 1 to as many as leave at most {} rows to join",
                    i32::MAX
                )));
            }
        }
        self.check_cache(sizes, pages)?;
        self.new.map_or(Ok(()), |new| new.check(sizes, q))
    }

    fn check_cache(&self, sizes: &AttentionShape, pages: usize) -> Result<()> {
        let AttentionShape { n_kv_heads, d_head, .. } = *sizes;
        let (page_size, sequences) =
            (self.page_size(), if self.queries.is_some() { self.sequences() } else { sizes.batch });
        if pages > i32::MAX as usize {
            return Err(Error::unsupported(format_args!("{pages} pages are more than the GPU takes: {}", i32::MAX)));
        }
        self.k.expect("k pages", &[Element::E4m3], [pages, page_size, n_kv_heads, d_head])?;
        self.k.expect_aligned("k pages", 16, 16)?;
        expect_disjoint("k pages", &self.k)?;
        match &self.v {
            ValuePages::Rows(v) => {
                v.expect("v pages", &[Element::E4m3], [pages, page_size, n_kv_heads, d_head])?;
                v.expect_aligned("v pages", 16, 16)?;
                expect_disjoint("v pages", v)?;
            }
            ValuePages::Tiled(v) => {
                v.expect("v pages", &[Element::E4m3], [pages, n_kv_heads, page_size / 16, d_head / 8, 8, 16])?;
                v.expect_aligned("v pages", 16, 16)?;
                expect_disjoint("v pages", v)?;
                let [_, _, groups, eights, dims, _] = v.unit_free_strides();
                if (groups, eights, dims) != (16 * d_head as i64, 128, 16) {
                    return Err(Error::argument("v pages must be contiguous in their last four dimensions"));
                }
            }
        }
        let [_, pages_per_sequence] = self.block_table.extents();
        self.block_table.expect("block table", &[Element::I32], [sequences, pages_per_sequence])?;
        self.block_table.expect_aligned("block table", 4, 1)?;
        if pages_per_sequence > 1 && self.block_table.strides()[1] != 1 {
            return Err(Error::argument("block table must be contiguous in its last dimension"));
        }
        self.lengths.expect_dense("lengths", Element::I32, [sequences])
    }
}

impl PackedQueries {
    fn check(&self, sizes: &AttentionShape, pages: &Pages) -> Result<()> {
        let AttentionShape { batch, len_q, .. } = *sizes;
        if batch != 1 {
            return Err(Error::argument(format_args!("packed queries are a batch of 1, not of {batch}")));
        }
        if pages.new.is_some() {
            return Err(Error::unsupported(
                "packed queries append nothing: write the new tokens into their pages first",
            ));
        }
        if pages.sequences() == 0 {
            return Err(Error::argument("lengths has no entry: give at least one sequence, which may be empty"));
        }
        self.cu_seqlens.expect_dense("cu_seqlens of the queries", Element::I32, [pages.sequences() + 1])?;
        if self.longest == 0 || self.longest > len_q {
            return Err(Error::argument(format_args!(
                "the longest sequence has {} queries and must have from 1 to the {len_q} rows of q",
                self.longest
            )));
        }
        Ok(())
    }
}

impl NewTokens {
    fn check(&self, sizes: &AttentionShape, q: Element) -> Result<()> {
        let AttentionShape { batch, n_kv_heads, d_head, len_k, .. } = *sizes;
        let [_, tokens, ..] = self.k.extents();
        if tokens == 0 || tokens > len_k {
            return Err(Error::argument(format_args!(
                "{tokens} new tokens of a sequence must be from 1 to the {len_k} that the block table has room for"
            )));
        }
        let shape = [batch, tokens, n_kv_heads, d_head];
        let element = self.k.element();
        self.k.expect("new k", &[Element::Bf16, Element::F16, Element::F32], shape)?;
        self.v.expect("new v", &[element], shape)?;
        if q != Element::E4m3 && q != element {
            return Err(Error::argument(format_args!("new k is {element:?} and must be of q's type {q:?}")));
        }
        self.k.expect_aligned("new k", 16, 8)?;
        self.v.expect_aligned("new v", 16, 8)
    }
}

/// Where a call keeps what passes between its kernels, in bytes from the start of the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagesWorkspace {
    /// The parts of all sequences.
    pub(super) parts: usize,
    /// Entries of their list that there is room for: one for a part and a block of query rows.
    pub(super) most_entries: usize,
    /// What is joined, by blocks of query rows.
    pub(super) joins: usize,
    /// Blocks of joined parts that there is room for; none where parts cannot help.
    pub(super) most_blocks: usize,
    /// Blocks of query rows that can be joined.
    pub(super) most_joins: usize,
    /// Query rows of such a block.
    pub(super) block_rows: usize,
    /// Queries in E4M3, where the call casts them.
    pub(super) q: usize,
    /// Partial results of parts: O in F16, log-sum-exps, extremes.
    pub(super) partial: [usize; 3],
    /// Size of it all.
    pub bytes: usize,
}

impl PagesWorkspace {
    /// Bytes for the counter of work items, and [`Self::COUNTS`].
    const HEADER: usize = 256;
    /// Where the lengths of the two lists lie.
    pub(super) const COUNTS: usize = 8;

    /// The workspace of a call, a function of its sizes and of the type of its queries. `longest`: [`Pages::longest`]; `packed`: queries are.
    pub(super) fn of(
        sizes: &AttentionShape,
        longest: &AttentionShape,
        packed: bool,
        q: Element,
        splits: Splits,
    ) -> Self {
        let split = Split::single(longest, usize::MAX);
        let (rows, block, row_blocks) =
            (sizes.batch * sizes.len_q, split.positions * split.consumers, split.row_blocks(longest));
        let units = sizes.n_q_heads / split.heads;
        // Of packed queries every sequence has at most one block that is not full, and may be longer than the longest was said to be.
        let whole = rows / block;
        let blocks = if packed { whole + longest.batch } else { longest.batch * row_blocks };
        let block_rows = if packed { block } else { block.min(longest.len_q) };
        let bytes = [2 * sizes.d_head, 4, 8];
        // A part a sequence needs no room. Several help where items do not fill the device; as many make so many waves.
        let busy = if packed { whole } else { blocks } * units;
        let key_tiles = sizes.len_k.div_ceil(Split::TILE.keys);
        let most_blocks = match splits {
            _ if key_tiles < 2 => 0,
            Splits::Parts(1) => 0,
            Splits::Parts(parts) => blocks.saturating_mul(parts.min(key_tiles)),
            Splits::Fastest if busy >= WAVES * PROCESSORS => 0,
            Splits::Fastest => {
                let more = (WAVES * PROCESSORS / (units * row_blocks)).min(key_tiles.saturating_mul(longest.batch));
                let room = PARTS_BYTES / (block_rows * sizes.n_q_heads * bytes.iter().sum::<usize>());
                ((longest.batch + more) * row_blocks).min(room)
            }
        };
        let mut regions = Regions::default();
        regions.add(Self::HEADER);
        let (most_entries, most_joins) = (blocks + most_blocks, blocks.min(most_blocks / 2));
        let parts = regions.add(Self::PART * most_entries);
        let joins = regions.add(Self::JOIN * most_joins);
        let q = regions.add(if q == Element::E4m3 { 0 } else { sizes.q_shape().iter().product() });
        let partial = bytes.map(|bytes| regions.add(bytes * most_blocks * block_rows * sizes.n_q_heads));
        Self { parts, most_entries, joins, most_blocks, most_joins, block_rows, q, partial, bytes: regions.bytes() }
    }

    /// Bytes of `Part` and `Join` of `kernels/attention/pages.cuh`.
    pub(super) const PART: usize = 48;
    pub(super) const JOIN: usize = 32;

    /// Whether a sequence can have several parts.
    pub(super) fn joins(&self) -> bool {
        self.most_blocks > 1
    }

    /// Rows of the blocks that can be joined: more than there are queries where blocks are not full.
    pub(super) fn joined_rows(&self) -> usize {
        self.most_joins * self.block_rows
    }

    pub(super) fn check(&self, workspace: &View<1>) -> Result<()> {
        check_workspace(workspace, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::call::{Descales, Keys, Rope, Tensors};
    use super::*;
    use crate::attention::PvAccumulator;
    use crate::cuda::DevicePtr;

    // SAFETY of every view below: nothing is launched in these tests.
    fn dense<const R: usize>(element: Element, extents: [usize; R]) -> View<R> {
        unsafe { View::dense(DevicePtr(1 << 20), element, extents) }
    }

    fn pages() -> Pages {
        let new = dense(Element::Bf16, [3, 2, 2, 128]);
        Pages {
            k: dense(Element::E4m3, [50, 64, 2, 128]),
            v: ValuePages::Tiled(dense(Element::E4m3, [50, 2, 4, 16, 8, 16])),
            block_table: dense(Element::I32, [3, 10]),
            lengths: dense(Element::I32, [3]),
            queries: None,
            splits: Splits::Fastest,
            new: Some(NewTokens { k: new, v: new }),
        }
    }

    fn tensors(pages: Pages) -> Tensors {
        Tensors {
            q: dense(Element::Bf16, [3, 2, 8, 128]),
            keys: Keys::Pages(pages),
            descales: Descales::default(),
            rope: None,
            accumulator: PvAccumulator::default(),
            saved: None,
            out: dense(Element::Bf16, [3, 2, 8, 128]),
            lse: None,
            stats: None,
        }
    }

    fn call(tensors: &Tensors) -> DeviceCall {
        DeviceCall::causal(tensors.shape())
    }

    #[test]
    fn a_call_has_the_room_of_its_block_table() {
        let tiled = tensors(pages());
        let want =
            AttentionShape { batch: 3, n_q_heads: 8, n_kv_heads: 2, len_q: 2, len_k: 640, d_head: 128, d_v: 128 };
        assert_eq!(tiled.shape(), want);
        let rows = tensors(Pages { v: ValuePages::Rows(dense(Element::E4m3, [50, 64, 2, 128])), ..pages() });
        assert!([tiled, rows].iter().all(|tensors| tensors.check(&call(tensors)).is_ok()));
    }

    #[test]
    fn what_breaks_a_rule_is_named() {
        type Change = fn(&mut Pages);
        let cases: [(&str, Change); 10] = [
            ("pages of 48 tokens", |p| p.k = dense(Element::E4m3, [50, 48, 2, 128])),
            ("pages of 512 tokens", |p| p.k = dense(Element::E4m3, [50, 512, 2, 128])),
            ("k pages is Bf16", |p| p.k = dense(Element::Bf16, [50, 64, 2, 128])),
            ("v pages has shape", |p| p.v = ValuePages::Rows(dense(Element::E4m3, [49, 64, 2, 128]))),
            ("v pages must be contiguous in their last four", |p| {
                let (extents, strides) = ([50, 2, 4, 16, 8, 16], [16384, 8192, 2048, 16, 256, 1]);
                let v = unsafe { View::new(DevicePtr(1 << 20), Element::E4m3, extents, strides) };
                p.v = ValuePages::Tiled(v);
            }),
            ("block table is F32", |p| p.block_table = dense(Element::F32, [3, 10])),
            ("block table has shape", |p| p.block_table = dense(Element::I32, [4, 10])),
            ("lengths has shape", |p| p.lengths = dense(Element::I32, [4])),
            ("700 new tokens", |p| {
                let x = dense(Element::Bf16, [3, 700, 2, 128]);
                p.new = Some(NewTokens { k: x, v: x });
            }),
            ("new k is E4m3", |p| {
                let x = dense(Element::E4m3, [3, 2, 2, 128]);
                p.new = Some(NewTokens { k: x, v: x });
            }),
        ];
        let refused = |tensors: Tensors, call: DeviceCall, message: &str| {
            let error = tensors.check(&call).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        };
        for (message, change) in cases {
            let mut changed = pages();
            change(&mut changed);
            let tensors = tensors(changed);
            refused(tensors, call(&tensors), message);
        }
        let plain = tensors(pages());
        let table = |rows| {
            let table = dense(Element::F32, [rows, 64]);
            Some(Rope { cosine: table, sine: table, positions: None, interleaved: false })
        };
        let cases: [(&str, Tensors); 6] = [
            ("must be of q's type", Tensors { q: dense(Element::F16, [3, 2, 8, 128]), ..plain }),
            ("logits in E4M3", {
                let logit = Some(dense(Element::F32, [8]));
                Tensors { descales: Descales { logit, ..Descales::default() }, ..plain }
            }),
            ("over pages P V is not", Tensors { accumulator: PvAccumulator::F16, ..plain }),
            ("do not reach 640 keys", Tensors { rope: table(639), ..plain }),
            ("cannot be rotated", Tensors { rope: table(640), q: dense(Element::E4m3, [3, 2, 8, 128]), ..plain }),
            ("positions are not offered", {
                let positions = Some(dense(Element::I32, [3, 640]));
                Tensors { rope: table(640).map(|rope| Rope { positions, ..rope }), ..plain }
            }),
        ];
        for (message, tensors) in cases {
            refused(tensors, call(&tensors), message);
        }
        refused(plain, DeviceCall { soft_cap: Some(50.0), ..call(&plain) }, "does not offer a soft-cap");
        refused(plain, DeviceCall { softmax_scale: 0.0, ..call(&plain) }, "softmax scale 0");
    }

    #[test]
    fn packed_queries_keep_their_rules() {
        let packed = |longest, sequences: usize| {
            let queries = PackedQueries { cu_seqlens: dense(Element::I32, [sequences + 1]), longest };
            let mut tensors = tensors(Pages { queries: Some(queries), new: None, ..pages() });
            (tensors.q, tensors.out) = (dense(Element::Bf16, [1, 40, 8, 128]), dense(Element::Bf16, [1, 40, 8, 128]));
            tensors.descales.k = Some(dense(Element::F32, [3, 2]));
            tensors
        };
        assert!(packed(40, 3).check(&call(&packed(40, 3))).is_ok());
        let with_new = {
            let mut tensors = packed(40, 3);
            tensors.keys = Keys::Pages(Pages { new: pages().new, ..tensors.pages().copied().unwrap() });
            tensors
        };
        let two = Tensors {
            q: dense(Element::Bf16, [2, 40, 8, 128]),
            out: dense(Element::Bf16, [2, 40, 8, 128]),
            ..packed(40, 3)
        };
        let e4m3 = Tensors { out: dense(Element::E4m3, [1, 40, 8, 128]), ..packed(40, 3) };
        for (message, tensors) in [
            ("must have from 1 to the 40 rows", packed(41, 3)),
            ("must have from 1 to the 40 rows", packed(0, 3)),
            ("cu_seqlens of the queries has", packed(40, 4)),
            ("append nothing", with_new),
            ("a batch of 1, not of 2", two),
            ("an output in E4M3 of packed queries", e4m3),
        ] {
            let error = tensors.check(&call(&tensors)).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    #[test]
    fn the_workspace_has_room_for_parts_where_they_can_help() {
        let sizes = |batch, len_q, len_k| AttentionShape {
            batch,
            n_q_heads: 64,
            n_kv_heads: 8,
            len_q,
            len_k,
            d_head: 128,
            d_v: 128,
        };
        let of = |sizes: AttentionShape| PagesWorkspace::of(&sizes, &sizes, false, Element::Bf16, Splits::Fastest);
        let one = of(sizes(1, 1, 65_536));
        assert_eq!(one.most_blocks, 1 + WAVES * PROCESSORS / 8);
        assert!(one.joins() && one.bytes < PARTS_BYTES);
        // One tile of keys per sequence is one part.
        assert_eq!(of(sizes(1, 1, 128)).most_blocks, 0);
        // So many parts were asked for.
        let asked = |parts| {
            PagesWorkspace::of(&sizes(1, 1, 65_536), &sizes(1, 1, 65_536), false, Element::Bf16, Splits::Parts(parts))
        };
        assert_eq!([1, 7, 1000].map(|parts| asked(parts).most_blocks), [0, 7, 512]);
        // So many rows fill the device by themselves.
        let many = sizes(64, 512, 8192);
        let w = of(many);
        assert!(!w.joins() && w.bytes < w.q + many.q_elements() + 1024);
        let short = dense(Element::U8, [w.bytes - 1]);
        let error = w.check(&short).unwrap_err();
        assert!(error.is_argument() && error.to_string().contains(&w.bytes.to_string()), "{error}");
    }

    #[test]
    fn packed_queries_have_an_entry_for_every_block_of_rows() {
        // A prefill of 500 among 11 decodes, as heads of 8 share blocks of 16 rows.
        let shape =
            AttentionShape { batch: 1, n_q_heads: 64, n_kv_heads: 8, len_q: 511, len_k: 65_536, d_head: 128, d_v: 128 };
        let longest = AttentionShape { batch: 12, len_q: 500, ..shape };
        let w = PagesWorkspace::of(&shape, &longest, true, Element::Bf16, Splits::Fastest);
        assert_eq!(w.block_rows, 16);
        let blocks = 500usize.div_ceil(16) + 11;
        assert!(w.most_entries - w.most_blocks >= blocks, "{w:?}");
        assert!(w.joins() && w.joined_rows() >= 16 * blocks && w.partial[2] < 2 * PARTS_BYTES, "{w:?}");
    }
}
