//! What a call on a paged KV cache is made of, and the rules it has to keep.

use super::call::{Descales, expect_disjoint};
use super::regions::{Regions, check_workspace};
use super::tile::{PARTS_BYTES, PROCESSORS, Split};
use crate::attention::AttentionShape;
use crate::cuda::{Element, View};
use crate::error::{Error, Result};
use crate::stats::stats_words;
use std::ops::RangeInclusive;

/// Tokens of a page.
const PAGE_SIZES: RangeInclusive<usize> = 16..=256;
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
pub struct PagedCache {
    /// Keys, `(pages, page_size, heads_kv, d)`; 16-byte aligned, strides multiples of 16. `page_size` is a power of two from 16 to 256.
    pub k: View<4>,
    /// Values.
    pub v: ValuePages,
    /// Which pages the tokens of each sequence lie in, i32, `(sequences, pages_per_sequence)`: token `t` of sequence `s` is row
    /// `t % page_size` of page `block_table[s][t / page_size]`. Entries past a sequence's last token may hold anything.
    pub block_table: View<2>,
    /// Tokens of each sequence that are in the cache before the call, i32, `(sequences)`.
    pub lengths: View<1>,
}

/// Tokens to append: BF16, F16 or F32, of one type, `(sequences, tokens, heads_kv, d)`; 16-byte aligned, strides multiples of 8.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens {
    /// Keys, before RoPE.
    pub k: View<4>,
    /// Values.
    pub v: View<4>,
}

/// Rotary embedding of queries and new keys by their places in their sequences; tables as in [`super::Rope`].
#[derive(Clone, Copy, Debug)]
pub struct PagedRope {
    /// Cosines, f32, `(positions, rotary / 2)` without gaps.
    pub cosine: View<2>,
    /// Sines, likewise.
    pub sine: View<2>,
    /// Pairs are `(2i, 2i + 1)` rather than `(i, i + rotary / 2)`.
    pub interleaved: bool,
}

/// What one call on a paged cache reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct PagedTensors {
    /// Queries, `(sequences, len_q, heads_q, d)`: as [`super::Tensors::q`]. The last query of a sequence stands at its last key.
    pub q: View<4>,
    /// The cache. New tokens are written to it.
    pub cache: PagedCache,
    /// Tokens that the call appends before it attends. The lengths stay as they are: the caller counts the tokens.
    pub new: Option<NewTokens>,
    /// Descales by `(sequences, heads_kv)`; none of the logits.
    pub descales: Descales,
    /// Rotation of q and of new keys; not for queries in E4M3.
    pub rope: Option<PagedRope>,
    /// Output, as [`super::Tensors::out`].
    pub out: View<4>,
    /// Log-sum-exp in nats, f32, `(sequences, heads_q, len_q)` without gaps; `-inf` where a row sees no key.
    pub lse: Option<View<3>>,
    /// Telemetry, as [`super::Tensors::stats`]. Casts are those of queries and new tokens.
    pub stats: Option<View<1>>,
}

impl PagedTensors {
    /// Sizes of the call, after all rules were checked; `len_k` is what the block table has room for.
    ///
    /// # Errors
    /// Names the argument and the rule.
    pub fn check(&self) -> Result<AttentionShape> {
        let [batch, len_q, heads_q, d_head] = self.q.extents();
        let [pages, page_size, heads_kv, _] = self.cache.k.extents();
        if !page_size.is_power_of_two() || !PAGE_SIZES.contains(&page_size) {
            return Err(Error::unsupported(format_args!(
                "pages of {page_size} tokens: the GPU takes 16, 32, 64, 128 and 256"
            )));
        }
        let [_, pages_per_sequence] = self.cache.block_table.extents();
        let len_k = pages_per_sequence.saturating_mul(page_size);
        let sizes =
            AttentionShape { batch, n_q_heads: heads_q, n_kv_heads: heads_kv, len_q, len_k, d_head, d_v: d_head };
        sizes.check_on_gpu()?;
        sizes.check_64_or_128("attention over pages")?;
        self.cache.check(&sizes, pages)?;
        let element = self.q.element();
        self.q.expect("q", &[Element::Bf16, Element::F16, Element::F32, Element::E4m3], sizes.q_shape())?;
        self.q.expect_aligned("q", 16, if element == Element::E4m3 { 16 } else { 8 })?;
        if let Some(new) = &self.new {
            new.check(&sizes, element)?;
        }
        self.out.expect("out", &[Element::Bf16, Element::E4m3], sizes.q_shape())?;
        self.out.expect_aligned("out", 16, 8)?;
        expect_disjoint("out", &self.out)?;
        let d = &self.descales;
        for (name, x) in [("q descale", d.q), ("k descale", d.k), ("v descale", d.v), ("o descale", d.o)] {
            if let Some(x) = x {
                x.expect(name, &[Element::F32], [batch, heads_kv])?;
                x.expect_aligned(name, 4, 1)?;
            }
        }
        if d.logit.is_some() {
            return Err(Error::unsupported("logits in E4M3 are not offered with a paged cache"));
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
        Ok(sizes)
    }

    /// New tokens of a sequence.
    pub(super) fn added(&self) -> usize {
        self.new.map_or(0, |new| new.k.extents()[1])
    }
}

impl PagedCache {
    fn check(&self, sizes: &AttentionShape, pages: usize) -> Result<()> {
        let AttentionShape { batch, n_kv_heads, d_head, .. } = *sizes;
        let [_, page_size, ..] = self.k.extents();
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
        self.block_table.expect("block table", &[Element::I32], [batch, pages_per_sequence])?;
        self.block_table.expect_aligned("block table", 4, 1)?;
        if pages_per_sequence > 1 && self.block_table.strides()[1] != 1 {
            return Err(Error::argument("block table must be contiguous in its last dimension"));
        }
        self.lengths.expect_dense("lengths", Element::I32, [batch])
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

impl PagedRope {
    /// Rotated dimensions of a head.
    pub fn rotary(&self) -> usize {
        2 * self.cosine.extents()[1]
    }

    fn check(&self, sizes: &AttentionShape, q: Element) -> Result<()> {
        if q == Element::E4m3 {
            return Err(Error::argument("E4M3 operands cannot be rotated: RoPE comes before the cast"));
        }
        let (rotary, rows) = (self.rotary(), self.cosine.extents()[0]);
        if rotary == 0 || !rotary.is_multiple_of(8) || rotary > sizes.d_head {
            return Err(Error::argument(format_args!(
                "rotary dimension {rotary} must be a multiple of 8 up to the head dimension {}",
                sizes.d_head
            )));
        }
        for (name, table) in [("RoPE cosines", &self.cosine), ("RoPE sines", &self.sine)] {
            table.expect_dense(name, Element::F32, [rows, rotary / 2])?;
            table.expect_aligned(name, 16, 1)?;
        }
        if rows < sizes.len_k {
            return Err(Error::argument(format_args!(
                "RoPE tables of {rows} positions do not reach the {} tokens that the block table has room for",
                sizes.len_k
            )));
        }
        Ok(())
    }
}

/// Where a call keeps what passes between its kernels, in bytes from the start of the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedWorkspace {
    /// Number of each sequence's first part.
    pub(super) starts: usize,
    /// The parts.
    pub(super) parts: usize,
    /// Parts that there is room for.
    pub(super) most_parts: usize,
    /// Queries in E4M3, where the call casts them.
    pub(super) q: usize,
    /// Partial results of parts: O in F16, log-sum-exps, extremes.
    pub(super) partial: [usize; 3],
    /// Size of it all.
    pub bytes: usize,
}

impl PagedWorkspace {
    /// Bytes for the counter of work items.
    const HEADER: usize = 256;

    /// The workspace of a call, a function of its sizes and of the type of its queries.
    pub fn of(sizes: &AttentionShape, q: Element) -> Self {
        let rows = sizes.len_q * sizes.n_q_heads;
        let bytes = [2 * sizes.d_head, 4, 8];
        // A part a sequence needs no room. As many parts more as make so many waves, if there is room for them
        let split = Split::single(sizes, usize::MAX);
        let items = split.tiles(sizes) / sizes.batch;
        let more = (WAVES * PROCESSORS / items).min(sizes.len_k.div_ceil(Split::TILE.keys).saturating_mul(sizes.batch));
        let room = PARTS_BYTES / (rows * bytes.iter().sum::<usize>());
        let most_parts = (sizes.batch + more).min(room).max(sizes.batch);
        let parts = if most_parts > sizes.batch { most_parts } else { 0 };
        let mut regions = Regions::default();
        regions.add(Self::HEADER);
        let starts = regions.add(4 * (sizes.batch + 1));
        let list = regions.add(16 * most_parts);
        let q = regions.add(if q == Element::E4m3 { 0 } else { sizes.q_shape().iter().product() });
        let partial = bytes.map(|bytes| regions.add(bytes * rows * parts));
        Self { starts, parts: list, most_parts, q, partial, bytes: regions.bytes() }
    }

    /// Whether a sequence can have several parts.
    pub(super) fn joins(&self, sizes: &AttentionShape) -> bool {
        self.most_parts > sizes.batch
    }

    pub(super) fn check(&self, workspace: &View<1>) -> Result<()> {
        check_workspace(workspace, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::DevicePtr;

    // SAFETY of every view below: nothing is launched in these tests.
    fn dense<const R: usize>(element: Element, extents: [usize; R]) -> View<R> {
        unsafe { View::dense(DevicePtr(1 << 20), element, extents) }
    }

    fn tensors() -> PagedTensors {
        let new = dense(Element::Bf16, [3, 2, 2, 128]);
        PagedTensors {
            q: dense(Element::Bf16, [3, 2, 8, 128]),
            cache: PagedCache {
                k: dense(Element::E4m3, [50, 64, 2, 128]),
                v: ValuePages::Tiled(dense(Element::E4m3, [50, 2, 4, 16, 8, 16])),
                block_table: dense(Element::I32, [3, 10]),
                lengths: dense(Element::I32, [3]),
            },
            new: Some(NewTokens { k: new, v: new }),
            descales: Descales::default(),
            rope: None,
            out: dense(Element::Bf16, [3, 2, 8, 128]),
            lse: None,
            stats: None,
        }
    }

    #[test]
    fn a_call_has_the_room_of_its_block_table() {
        let sizes = tensors().check().unwrap();
        let want =
            AttentionShape { batch: 3, n_q_heads: 8, n_kv_heads: 2, len_q: 2, len_k: 640, d_head: 128, d_v: 128 };
        assert_eq!(sizes, want);
        let mut rows = tensors();
        rows.cache.v = ValuePages::Rows(dense(Element::E4m3, [50, 64, 2, 128]));
        assert!(rows.check().is_ok());
    }

    #[test]
    fn what_breaks_a_rule_is_named() {
        type Change = fn(&mut PagedTensors);
        let cases: [(&str, Change); 14] = [
            ("pages of 48 tokens", |t| t.cache.k = dense(Element::E4m3, [50, 48, 2, 128])),
            ("pages of 512 tokens", |t| t.cache.k = dense(Element::E4m3, [50, 512, 2, 128])),
            ("k pages is Bf16", |t| t.cache.k = dense(Element::Bf16, [50, 64, 2, 128])),
            ("v pages has shape", |t| t.cache.v = ValuePages::Rows(dense(Element::E4m3, [49, 64, 2, 128]))),
            ("v pages must be contiguous in their last four", |t| {
                let (extents, strides) = ([50, 2, 4, 16, 8, 16], [16384, 8192, 2048, 16, 256, 1]);
                let v = unsafe { View::new(DevicePtr(1 << 20), Element::E4m3, extents, strides) };
                t.cache.v = ValuePages::Tiled(v);
            }),
            ("block table is F32", |t| t.cache.block_table = dense(Element::F32, [3, 10])),
            ("block table has shape", |t| t.cache.block_table = dense(Element::I32, [4, 10])),
            ("lengths has shape", |t| t.cache.lengths = dense(Element::I32, [4])),
            ("700 new tokens", |t| {
                let x = dense(Element::Bf16, [3, 700, 2, 128]);
                t.new = Some(NewTokens { k: x, v: x });
            }),
            ("new k is E4m3", |t| {
                let x = dense(Element::E4m3, [3, 2, 2, 128]);
                t.new = Some(NewTokens { k: x, v: x });
            }),
            ("must be of q's type", |t| t.q = dense(Element::F16, [3, 2, 8, 128])),
            ("logits in E4M3", |t| t.descales.logit = Some(dense(Element::F32, [8]))),
            ("do not reach the 640 tokens", |t| {
                let table = dense(Element::F32, [639, 64]);
                t.rope = Some(PagedRope { cosine: table, sine: table, interleaved: false });
            }),
            ("cannot be rotated", |t| {
                let table = dense(Element::F32, [640, 64]);
                t.rope = Some(PagedRope { cosine: table, sine: table, interleaved: false });
                t.q = dense(Element::E4m3, [3, 2, 8, 128]);
            }),
        ];
        for (message, change) in cases {
            let mut call = tensors();
            change(&mut call);
            let error = call.check().unwrap_err();
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
        let one = PagedWorkspace::of(&sizes(1, 1, 65_536), Element::Bf16);
        assert_eq!(one.most_parts, 1 + WAVES * PROCESSORS / 8);
        assert!(one.joins(&sizes(1, 1, 65_536)) && one.bytes < PARTS_BYTES);
        // One tile of keys a sequence is one part.
        assert_eq!(PagedWorkspace::of(&sizes(1, 1, 128), Element::Bf16).most_parts, 2);
        // So many rows fill the device by themselves.
        let many = sizes(64, 512, 8192);
        let w = PagedWorkspace::of(&many, Element::Bf16);
        assert!(!w.joins(&many) && w.bytes < w.q + many.q_elements() + 1024);
        let short = dense(Element::U8, [w.bytes - 1]);
        assert!(w.check(&short).unwrap_err().to_string().contains("the workspace has"));
    }
}
