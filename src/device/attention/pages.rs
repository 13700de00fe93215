//! Keys in the pages of a cache: their rules, and the workspace of a call on them.

use super::regions::{Regions, check_workspace};
use super::sizes::expect_disjoint;
use super::terms::{DeviceCall, Features};
use super::tile::{PARTS_BYTES, PROCESSORS, Split};
use crate::attention::{AttentionShape, Keeps};
use crate::cuda::{Element, View};
use crate::error::{Error, Result};
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
    /// Tokens that the call appends before it attends. The lengths stay as they are: the caller counts the tokens.
    pub new: Option<NewTokens>,
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

    /// New tokens of a sequence.
    pub(super) fn added(&self) -> usize {
        self.new.map_or(0, |new| new.k.extents()[1])
    }

    /// Checks the cache, and that the call, whose queries are of type `q`, has nothing that is not offered over pages.
    pub(super) fn check(&self, call: &DeviceCall, q: Element, logits_in_e4m3: bool, keeps: Keeps) -> Result<()> {
        let ([pages, page_size, ..], sizes) = (self.k.extents(), &call.shape);
        if !page_size.is_power_of_two() || !PAGE_SIZES.contains(&page_size) {
            return Err(Error::unsupported(format_args!(
                "pages of {page_size} tokens: the GPU takes 16, 32, 64, 128 and 256"
            )));
        }
        sizes.check_64_or_128("attention over pages")?;
        let (_, features) = call.features();
        let terms = Features { center: false, ..features }.all().map(|(_, what, given)| (what, given));
        let others = [("logits in E4M3", logits_in_e4m3), ("operands for a backward", keeps != Keeps::Nothing)];
        if let Some((what, _)) = terms.into_iter().chain(others).find(|(_, given)| *given) {
            return Err(Error::unsupported(format_args!("over pages the GPU does not offer {what}")));
        }
        self.check_cache(sizes, pages)?;
        self.new.map_or(Ok(()), |new| new.check(sizes, q))
    }

    fn check_cache(&self, sizes: &AttentionShape, pages: usize) -> Result<()> {
        let AttentionShape { batch, n_kv_heads, d_head, .. } = *sizes;
        let page_size = self.page_size();
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

/// Where a call keeps what passes between its kernels, in bytes from the start of the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagesWorkspace {
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

impl PagesWorkspace {
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
    use super::super::call::{Descales, Keys, Rope, Tensors};
    use super::*;
    use crate::attention::{Mask, PvAccumulator};
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
        refused(plain, DeviceCall { mask: Mask::sliding(9), ..call(&plain) }, "does not offer a window");
        refused(plain, DeviceCall { soft_cap: Some(50.0), ..call(&plain) }, "does not offer a soft-cap");
        refused(plain, DeviceCall { softmax_scale: 0.0, ..call(&plain) }, "softmax scale 0");
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
        let one = PagesWorkspace::of(&sizes(1, 1, 65_536), Element::Bf16);
        assert_eq!(one.most_parts, 1 + WAVES * PROCESSORS / 8);
        assert!(one.joins(&sizes(1, 1, 65_536)) && one.bytes < PARTS_BYTES);
        // One tile of keys per sequence is one part.
        assert_eq!(PagesWorkspace::of(&sizes(1, 1, 128), Element::Bf16).most_parts, 2);
        // So many rows fill the device by themselves.
        let many = sizes(64, 512, 8192);
        let w = PagesWorkspace::of(&many, Element::Bf16);
        assert!(!w.joins(&many) && w.bytes < w.q + many.q_elements() + 1024);
        let short = dense(Element::U8, [w.bytes - 1]);
        assert!(w.check(&short).unwrap_err().to_string().contains("the workspace has"));
    }
}
