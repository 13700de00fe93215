//! What a backward call is made of, and the rules it has to keep.

use super::call::Descales;
use super::regions::{Regions, check_workspace};
use super::terms::Terms;
use crate::attention::AttentionShape;
use crate::cuda::{Element, View};
use crate::error::{Error, Result};
use std::ops::Range;

/// The largest head dimension that is offered. Kernels of 256 columns compile, and have not run on a GPU yet.
const WIDEST: usize = 128;

/// Where delta, `sum_j P_ij dP_ij` of each query row, comes from.
#[derive(Clone, Copy, Debug)]
pub enum Delta {
    /// The dot product of a row of dO with the forward's output, BF16, shaped as q. An output of FP8 P V is biased, and so is dQ
    /// then: it takes one whose probabilities and sums are of 16 bits or better.
    Output(View<4>),
    /// Given, f32, `(batch, heads_q, len_q)` without gaps.
    Given(View<3>),
}

/// What one backward call reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct BackwardTensors {
    /// Queries as the forward multiplied them: E4M3, `(batch, len_q, heads_q, d)`, 16-byte aligned, strides multiples of 16
    /// elements.
    pub q: View<4>,
    /// Keys, E4M3, `(batch, len_k, heads_kv, d)`, likewise.
    pub k: View<4>,
    /// Values, E4M3, as keys: rows, not the order that the forward's cast writes.
    pub v: View<4>,
    /// Descales of q, k and v; those of an E4M3 output are not read.
    pub descales: Descales,
    /// Log-sum-exp of the forward, in nats: f32, `(batch, heads_q, len_q)` without gaps; `-inf` where a row sees no key.
    pub lse: View<3>,
    /// Where delta comes from.
    pub delta: Delta,
    /// Gradient of the output, BF16, shaped as q. 16-byte aligned, strides multiples of 8 elements.
    pub d_out: View<4>,
    /// Gradient of the queries before their cast, BF16, shaped as q, likewise.
    pub dq: View<4>,
    /// Gradient of the keys, BF16, shaped as k, likewise.
    pub dk: View<4>,
    /// Gradient of the values, BF16, shaped as v, likewise.
    pub dv: View<4>,
    /// Gradient of the sinks, f32, `(heads_q)` without gaps; for calls with sinks, and for no others.
    pub d_sinks: Option<View<1>>,
}

impl BackwardTensors {
    /// Sizes of the call, after all rules were checked.
    ///
    /// # Errors
    /// Names the argument and the rule.
    pub fn check(&self) -> Result<AttentionShape> {
        let [batch, len_q, n_q_heads, d_head] = self.q.extents();
        let [_, len_k, n_kv_heads, _] = self.k.extents();
        let d_v = self.v.extents()[3];
        let sizes = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v };
        check_dims(&sizes)?;
        let (of_q, of_out) = ([batch, len_q, n_q_heads, d_head], [batch, len_q, n_q_heads, d_v]);
        let (of_k, of_v) = ([batch, len_k, n_kv_heads, d_head], [batch, len_k, n_kv_heads, d_v]);
        for (name, x, shape) in [("q", &self.q, of_q), ("k", &self.k, of_k), ("v", &self.v, of_v)] {
            x.expect(name, &[Element::E4m3], shape)?;
            x.expect_aligned(name, 16, 16)?;
        }
        let wide =
            [("d_out", &self.d_out, of_out), ("dq", &self.dq, of_q), ("dk", &self.dk, of_k), ("dv", &self.dv, of_v)];
        let check_wide = |name: &str, x: &View<4>, shape| {
            x.expect(name, &[Element::Bf16], shape)?;
            x.expect_aligned(name, 16, 8)
        };
        wide.into_iter().try_for_each(|(name, x, shape)| check_wide(name, x, shape))?;
        self.lse.expect_dense("lse", Element::F32, sizes.lse_shape())?;
        match &self.delta {
            Delta::Output(out) => check_wide("out", out, of_out)?,
            Delta::Given(delta) => delta.expect_dense("delta", Element::F32, sizes.lse_shape())?,
        }
        for (name, x) in
            [("q descale", self.descales.q), ("k descale", self.descales.k), ("v descale", self.descales.v)]
        {
            if let Some(x) = x {
                x.expect(name, &[Element::F32], [batch, n_kv_heads])?;
                x.expect_aligned(name, 4, 1)?;
            }
        }
        if let Some(d_sinks) = &self.d_sinks {
            d_sinks.expect_dense("d_sinks", Element::F32, [n_q_heads])?;
        }
        if self.descales.logit.is_some() {
            return Err(Error::unsupported("gradients through logits in E4M3 are not offered on the GPU"));
        }
        Ok(sizes)
    }
}

impl BackwardTensors {
    /// Of some entries of the batch, or of some KV heads of one entry with the query heads that read them.
    pub(super) fn part(&self, entries: Range<usize>, kv_heads: Range<usize>) -> Self {
        let group = self.q.extents()[2] / self.k.extents()[2];
        let heads = kv_heads.start * group..kv_heads.end * group;
        let of_q = |x: &View<4>| x.narrow(0, entries.clone()).narrow(2, heads.clone());
        let of_k = |x: &View<4>| x.narrow(0, entries.clone()).narrow(2, kv_heads.clone());
        let of_rows = |x: &View<3>| x.narrow(0, entries.clone()).narrow(1, heads.clone());
        let descale =
            |x: Option<View<2>>| x.map(|x| x.narrow(0, entries.clone()).narrow(1, kv_heads.clone()));
        let Descales { q, k, v, .. } = self.descales;
        Self {
            q: of_q(&self.q),
            k: of_k(&self.k),
            v: of_k(&self.v),
            descales: Descales { q: descale(q), k: descale(k), v: descale(v), ..self.descales },
            lse: of_rows(&self.lse),
            delta: match &self.delta {
                Delta::Output(out) => Delta::Output(of_q(out)),
                Delta::Given(delta) => Delta::Given(of_rows(delta)),
            },
            d_out: of_q(&self.d_out),
            dq: of_q(&self.dq),
            dk: of_k(&self.dk),
            dv: of_k(&self.dv),
            d_sinks: self.d_sinks,
        }
    }
}

/// Refuses head dimensions that the backward does not take.
fn check_dims(sizes: &AttentionShape) -> Result<()> {
    let AttentionShape { d_head, d_v, .. } = *sizes;
    for (name, d) in [("d_head", d_head), ("d_v", d_v)] {
        if d % 8 != 0 || !(16..=WIDEST).contains(&d) {
            return Err(Error::unsupported(format_args!(
                "a backward with {name} {d} is not offered on the GPU: it takes multiples of 8 from 16 to {WIDEST}"
            )));
        }
    }
    sizes.check_on_gpu()
}

/// What the kernels are compiled for, and how they cut a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BackwardForm {
    /// Columns of a tile: the smallest of 64, 128 and 256 that holds d_head and d_v.
    pub columns: usize,
    /// Columns of it that are multiplied.
    pub used: usize,
    /// Whether one of them is smaller than the tile.
    pub fill: bool,
    /// Without a window: keys behind the query's position are not seen.
    pub causal: bool,
    /// Either end of what a query sees is bounded, as an end of a window is.
    pub window: bool,
    /// Sequences lie where lists in device memory say.
    pub varlen: bool,
    /// Logits are capped.
    pub soft_cap: bool,
    /// The call has sinks.
    pub sink: bool,
}

impl BackwardForm {
    /// The form of a call, its terms checked.
    ///
    /// # Errors
    /// If the call is not offered.
    pub fn of(sizes: &AttentionShape, terms: &Terms) -> Result<Self> {
        check_dims(sizes)?;
        terms.check(sizes)?;
        Ok(Self::of_checked(sizes, terms))
    }

    fn of_checked(sizes: &AttentionShape, terms: &Terms) -> Self {
        let (causal, features) = terms.features(sizes);
        let widest = sizes.d_head.max(sizes.d_v);
        let columns = [64, 128].into_iter().find(|&columns| widest <= columns).unwrap_or(256);
        // Rows that see no key are for the kernel with windows to keep apart.
        let blind = !features.varlen && causal && sizes.len_q > sizes.len_k;
        let window = features.window || blind;
        Self {
            columns,
            used: match widest {
                65..=96 => 96,
                129..=192 => 192,
                _ => columns,
            },
            fill: sizes.d_head != columns || sizes.d_v != columns,
            causal: causal && !window,
            window,
            varlen: features.varlen,
            soft_cap: features.soft_cap,
            sink: features.sink,
        }
    }

    /// Queries of a tile.
    pub fn rows(&self) -> usize {
        if self.columns == 64 { 128 } else { 64 }
    }

    /// Keys of a block.
    pub fn keys(&self) -> usize {
        if self.columns == 256 { 64 } else { 128 }
    }

    /// Bytes of the f32 sums of dQ of one tile of queries.
    pub fn sum_bytes(&self) -> usize {
        self.rows() * self.columns * size_of::<f32>()
    }

    /// Sequences that tiles are counted in, and tiles of queries and of keys that each has: those of the batch, or all in one, where
    /// every sequence takes whole tiles.
    pub fn tiles(&self, sizes: &AttentionShape, terms: &Terms) -> [usize; 3] {
        match &terms.sequences {
            None => [sizes.batch, sizes.len_q.div_ceil(self.rows()), sizes.len_k.div_ceil(self.keys())],
            Some(sequences) => {
                let slots = |rows: usize, size: usize| sizes.batch * rows / size + sequences.count() + 1;
                [1, slots(sizes.len_q, self.rows()), slots(sizes.len_k, self.keys())]
            }
        }
    }
}

/// How a call is cut into parts that run one after the other in one workspace, so that the f32 sums of dQ of a part stay within a
/// limit. A part has whole entries of the batch, or some KV heads of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Entries of the batch, of the largest part.
    pub entries: usize,
    /// KV heads.
    pub kv_heads: usize,
}

impl Parts {
    /// As few parts as the limit allows, of about one size; a part of one KV head may pass it. Calls with sequences, whose rows are
    /// one axis, and with sinks, whose gradient is a sum over the batch, are in one part.
    pub fn of(sizes: &AttentionShape, terms: &Terms, form: &BackwardForm, sums_limit: Option<usize>) -> Self {
        let whole = Self { entries: sizes.batch, kv_heads: sizes.n_kv_heads };
        let Some(limit) = sums_limit.filter(|_| terms.sequences.is_none() && terms.sinks.is_none()) else {
            return whole;
        };
        let [_, query_tiles, _] = form.tiles(sizes, terms);
        let of_a_head = sizes.group() * query_tiles * form.sum_bytes();
        let fit = (limit / of_a_head).max(1);
        let even = |all: usize, most: usize| all.div_ceil(all.div_ceil(most.min(all)));
        match fit / sizes.n_kv_heads {
            0 => Self { entries: 1, kv_heads: even(sizes.n_kv_heads, fit) },
            entries => Self { entries: even(sizes.batch, entries), ..whole },
        }
    }

    /// Sizes of the largest part.
    pub fn largest(&self, sizes: &AttentionShape) -> AttentionShape {
        let n_q_heads = self.kv_heads * sizes.group();
        AttentionShape { batch: self.entries, n_q_heads, n_kv_heads: self.kv_heads, ..*sizes }
    }

    /// Entries of the batch and KV heads of every part.
    pub fn all(self, sizes: &AttentionShape) -> impl Iterator<Item = [Range<usize>; 2]> + use<> {
        let (batch, heads) = (sizes.batch, sizes.n_kv_heads);
        let entries = (0..batch).step_by(self.entries).map(move |at| at..batch.min(at + self.entries));
        entries.flat_map(move |entries| {
            let heads = (0..heads).step_by(self.kv_heads).map(move |at| at..heads.min(at + self.kv_heads));
            heads.map(move |heads| [entries.clone(), heads])
        })
    }
}

/// Where a backward call keeps what passes between its kernels, in bytes from the start of the workspace. Nothing in it needs to be
/// set beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardWorkspace {
    /// Log-sum-exp and delta, by tiles of queries.
    pub terms: usize,
    /// Sums of dQ in f32, by tiles.
    pub dq_sum: usize,
    /// Whose turn it is to add to a tile; for deterministic calls.
    pub turns: usize,
    /// Parts of the sinks' gradients, by tiles; for calls with sinks.
    pub sinks: usize,
    /// Size of it all.
    pub bytes: usize,
}

impl BackwardWorkspace {
    /// The workspace of a call whose sums of dQ stay within `sums_limit` bytes where it can be cut for that.
    ///
    /// # Errors
    /// If the call is not offered.
    pub fn of(
        sizes: &AttentionShape,
        terms: &Terms,
        deterministic: bool,
        sums_limit: Option<usize>,
    ) -> Result<Self> {
        let form = BackwardForm::of(sizes, terms)?;
        let sizes = &Parts::of(sizes, terms, &form, sums_limit).largest(sizes);
        let [units, query_tiles, key_tiles] = form.tiles(sizes, terms);
        // Kernels count both in 31 bits.
        const TILES: usize = 1 << 30;
        if units * sizes.n_q_heads * query_tiles.max(key_tiles) > TILES {
            return Err(Error::unsupported(
                "more tiles than the GPU takes: fewer sequences, heads or rows in one call",
            ));
        }
        let (tiles, rows) = (units * sizes.n_q_heads * query_tiles, form.rows());
        let mut regions = Regions::default();
        let mut words = |count: usize| regions.add(count * size_of::<f32>());
        let of_terms = words(tiles * 2 * rows);
        let dq_sum = words(tiles * form.sum_bytes() / size_of::<f32>());
        let turns = words(if deterministic { tiles * 8 } else { 0 });
        let sinks = words(if form.sink { tiles } else { 0 });
        Ok(Self { terms: of_terms, dq_sum, turns, sinks, bytes: regions.bytes() })
    }

    pub(super) fn check(&self, workspace: &View<1>) -> Result<()> {
        check_workspace(workspace, self.bytes)
    }
}

/// How the blocks of one backward call are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BackwardSchedule {
    /// KV heads whose blocks run at a time: all blocks of one walk the same queries together, and share them in the L2 cache.
    pub section: usize,
    /// Blocks that share the query tiles of one block of keys.
    pub splits: usize,
    /// Blocks.
    pub grid: usize,
}

impl BackwardSchedule {
    /// Query tiles that beginning and ending a block costs as much as, and adding up over a cluster.
    const BLOCK_COST: usize = 4;
    const CLUSTER_COST: usize = 6;

    pub fn of(
        sizes: &AttentionShape,
        terms: &Terms,
        form: &BackwardForm,
        deterministic: bool,
        processors: usize,
    ) -> Self {
        let [entries, _, key_tiles] = form.tiles(sizes, terms);
        let units = entries * sizes.n_kv_heads;
        let len_q = terms.sequences.map_or(sizes.len_q, |sequences| sequences.max_len_q);
        let width = terms.window(sizes).map(|keys| keys as usize).iter().sum::<usize>() + form.keys() + form.rows();
        let at_a_time = (processors + key_tiles / 2) / key_tiles;
        let section = units.div_ceil(units.div_ceil(at_a_time.clamp(1, units)));

        let blocks = units * key_tiles;
        let longest = sizes.n_q_heads / sizes.n_kv_heads * len_q.min(width).div_ceil(form.rows());
        let time = |splits: usize| {
            let (parts, share) = (blocks * splits, longest.div_ceil(splits));
            let waves = parts.div_ceil(processors);
            // Causal blocks get shorter and fill the gaps: about half of all tiles are seen.
            let tiles = if form.causal { share.max(blocks * longest / (2 * processors)) } else { waves * share };
            tiles + waves * Self::BLOCK_COST + if splits > 1 { Self::CLUSTER_COST } else { 0 }
        };
        let choices: &[usize] = if deterministic || form.columns != 128 { &[1] } else { &[1, 2, 4] };
        let splits = choices.iter().copied().min_by_key(|&n| time(n)).unwrap_or(1);
        Self { section, splits, grid: blocks * splits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Mask, PvAccumulator};
    use crate::cuda::DevicePtr;
    use crate::device::attention::Sequences;

    // SAFETY of every view below: nothing is launched in these tests.
    fn dense<const R: usize>(element: Element, extents: [usize; R]) -> View<R> {
        unsafe { View::dense(DevicePtr(1 << 20), element, extents) }
    }

    fn tensors() -> BackwardTensors {
        let (q, kv) = ([2, 40, 4, 128], [2, 50, 2, 128]);
        BackwardTensors {
            q: dense(Element::E4m3, q),
            k: dense(Element::E4m3, kv),
            v: dense(Element::E4m3, kv),
            descales: Descales::default(),
            lse: dense(Element::F32, [2, 4, 40]),
            delta: Delta::Output(dense(Element::Bf16, q)),
            d_out: dense(Element::Bf16, q),
            dq: dense(Element::Bf16, q),
            dk: dense(Element::Bf16, kv),
            dv: dense(Element::Bf16, kv),
            d_sinks: None,
        }
    }

    fn descales() -> Descales {
        let one = Some(dense(Element::F32, [2, 2]));
        Descales { q: one, k: one, v: one, ..Descales::default() }
    }

    #[test]
    fn what_breaks_a_rule_is_named() {
        let sizes = tensors().check().unwrap();
        assert_eq!(
            sizes,
            AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 40, len_k: 50, d_head: 128, d_v: 128 }
        );
        type Change = fn(&mut BackwardTensors);
        let cases: [(&str, Change); 11] = [
            ("d_head 256 is not offered", |t| t.q = dense(Element::E4m3, [2, 40, 4, 256])),
            ("q is Bf16", |t| t.q = dense(Element::Bf16, [2, 40, 4, 128])),
            ("v has shape", |t| t.v = dense(Element::E4m3, [2, 51, 2, 128])),
            ("d_out is F32", |t| t.d_out = dense(Element::F32, [2, 40, 4, 128])),
            ("d_out must be contiguous in its last dimension", |t| {
                // The gradient of a sum.
                t.d_out = unsafe { View::new(DevicePtr(256), Element::Bf16, [2, 40, 4, 128], [0; 4]) };
            }),
            ("dq has shape", |t| t.dq = dense(Element::Bf16, [2, 40, 2, 128])),
            ("dv is E4m3", |t| t.dv = dense(Element::E4m3, [2, 50, 2, 128])),
            ("lse has shape", |t| t.lse = dense(Element::F32, [2, 40, 4])),
            ("out is E4m3", |t| t.delta = Delta::Output(dense(Element::E4m3, [2, 40, 4, 128]))),
            ("delta has shape", |t| t.delta = Delta::Given(dense(Element::F32, [2, 4, 41]))),
            ("logits in E4M3", |t| t.descales.logit = Some(dense(Element::F32, [4]))),
        ];
        for (message, change) in cases {
            let mut call = tensors();
            change(&mut call);
            let error = call.check().unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    fn causal() -> Terms {
        Terms::plain(Mask::CAUSAL, 0.1)
    }

    fn lists(count: usize, max_len_q: usize, max_len_k: usize) -> Option<Sequences> {
        let [q_starts, q_ends, k_starts, k_ends] = [dense(Element::I32, [count]); 4];
        Some(Sequences { q_starts, q_ends, k_starts, k_ends, max_len_q, max_len_k })
    }

    #[test]
    fn regions_of_the_workspace_do_not_overlap() {
        for d_head in [64, 128] {
            let sizes =
                AttentionShape { batch: 3, n_q_heads: 6, n_kv_heads: 2, len_q: 113, len_k: 203, d_head, d_v: d_head };
            let sinks = Terms { sinks: Some(dense(Element::F32, [6])), ..causal() };
            let form = BackwardForm::of(&sizes, &sinks).unwrap();
            let rows = 113usize.next_multiple_of(form.rows());
            let w = BackwardWorkspace::of(&sizes, &sinks, true, None).unwrap();
            assert!([w.terms, w.dq_sum, w.turns, w.sinks].iter().all(|at| at.is_multiple_of(256)));
            assert!(w.dq_sum >= 3 * 6 * rows * 8 && w.turns - w.dq_sum >= 3 * 6 * rows * d_head * 4);
            let tiles = 3 * 6 * rows / form.rows();
            assert!(w.sinks - w.turns >= tiles * 32 && w.bytes - w.sinks >= tiles * 4);
            assert!(BackwardWorkspace::of(&sizes, &causal(), false, None).unwrap().bytes < w.bytes);
            let short = dense(Element::U8, [w.bytes - 1]);
            assert!(w.check(&short).unwrap_err().to_string().contains("the workspace has"));
        }
    }

    #[test]
    fn a_limit_of_the_sums_cuts_a_call_into_parts() {
        let sizes = |batch, n_q_heads, n_kv_heads, len| AttentionShape {
            batch,
            n_q_heads,
            n_kv_heads,
            len_q: len,
            len_k: len,
            d_head: 128,
            d_v: 128,
        };
        let parts = |sizes: &AttentionShape, terms: &Terms, limit| {
            Parts::of(sizes, terms, &BackwardForm::of(sizes, terms).unwrap(), limit)
        };
        const MIB: usize = 1 << 20;
        for (shape, limit, want) in [
            // 32 MiB of sums an entry, then 8 or 64 a KV head.
            (sizes(8, 32, 32, 2048), None, (8, 32)),
            (sizes(8, 32, 32, 2048), Some(256 * MIB), (8, 32)),
            (sizes(8, 32, 32, 2048), Some(255 * MIB), (4, 32)),
            (sizes(8, 32, 32, 2048), Some(100 * MIB), (3, 32)),
            (sizes(8, 32, 32, 2048), Some(32 * MIB), (1, 32)),
            (sizes(8, 32, 32, 2048), Some(31 * MIB), (1, 16)),
            (sizes(1, 32, 32, 16384), Some(32 * MIB), (1, 4)),
            (sizes(1, 64, 8, 16384), Some(32 * MIB), (1, 1)),
            (sizes(3, 4, 1, 100), Some(1), (1, 1)),
        ] {
            let found = parts(&shape, &causal(), limit);
            assert_eq!((found.entries, found.kv_heads), want, "{shape:?} {limit:?}");
            let bytes = |limit| BackwardWorkspace::of(&shape, &causal(), false, limit).unwrap().bytes;
            let of_a_head = bytes(Some(1));
            assert!(limit.is_none_or(|limit| bytes(Some(limit)) <= (limit + limit / 50).max(of_a_head)));
            assert!(bytes(limit) <= bytes(None));
            // Every entry's every head is in one part.
            let mut seen = vec![0; shape.batch * shape.n_kv_heads];
            for [entries, heads] in found.all(&shape) {
                assert!(entries.len() <= found.entries && heads.len() <= found.kv_heads);
                entries.flat_map(|b| heads.clone().map(move |h| (b, h))).for_each(|(b, h)| {
                    seen[b * shape.n_kv_heads + h] += 1;
                });
            }
            assert!(seen.iter().all(|&count| count == 1));
        }
        let shape = sizes(8, 32, 32, 2048);
        let sinks = Terms { sinks: Some(dense(Element::F32, [32])), ..causal() };
        let packed = Terms { sequences: lists(5, 100, 100), ..causal() };
        assert!([sinks, packed].iter().all(|terms| parts(&shape, terms, Some(1)).entries == 8));
    }

    /// A part is a call of its own: its tensors begin at its first entry and head, and keep every rule.
    #[test]
    fn a_part_has_the_tensors_of_its_entries_and_heads() {
        let all = BackwardTensors { descales: descales(), ..tensors() };
        let part = all.part(1..2, 1..2);
        let sizes = part.check().unwrap();
        assert_eq!((sizes.batch, sizes.n_q_heads, sizes.n_kv_heads), (1, 2, 1));
        let at = |x: DevicePtr| x.0 - (1 << 20);
        assert_eq!(at(part.q.ptr()), (40 * 4 + 2) * 128);
        assert_eq!(at(part.dk.ptr()), 2 * (50 * 2 + 1) * 128);
        assert_eq!(at(part.lse.ptr()), 4 * (4 + 2) * 40);
        assert_eq!(at(part.descales.k.unwrap().ptr()), 4 * 3);
        let whole = all.part(0..2, 0..2);
        assert_eq!((whole.q, whole.dv, whole.lse), (all.q, all.dv, all.lse));
        assert!(all.part(0..2, 1..2).check().is_err(), "the log-sum-exp of some heads of two entries has gaps");
    }

    /// The table of memory in docs/attention-backward.md: MiB of a forward and backward of 16384 tokens beside q, k, v and dO, in
    /// one part and with sums of at most 32 MiB.
    #[test]
    fn the_memory_of_a_step_is_that_of_the_documentation() {
        let page = include_str!("../../../docs/attention-backward.md");
        for (n_q_heads, n_kv_heads, d, cudnn) in
            [(64, 8, 128, 1608), (32, 8, 128, 836), (32, 32, 128, 772), (32, 32, 64, 388)]
        {
            for (batch, len) in [(8, 2048), (4, 4096), (2, 8192), (1, 16384)] {
                let s =
                    AttentionShape { batch, n_q_heads, n_kv_heads, len_q: len, len_k: len, d_head: d, d_v: d };
                let mib = |limit: Option<usize>| {
                    let saved = 2 * s.out_elements()
                        + 4 * s.lse_elements()
                        + s.q_elements()
                        + s.k_elements()
                        + s.v_elements();
                    let grads = 2 * (s.q_elements() + s.k_elements() + s.v_elements());
                    let backward = BackwardWorkspace::of(&s, &causal(), false, limit).unwrap().bytes;
                    let forward =
                        crate::device::attention::Workspace::of(&s, &causal(), Element::Bf16, PvAccumulator::F16, true);
                    (saved + forward.bytes.max(grads + backward)) as f64 / f64::from(1 << 20)
                };
                let [one, cut] = [None, Some(32 << 20)].map(mib);
                let row = format!(
                    "| {n_q_heads} query, {n_kv_heads} KV, of {d} | {batch} x {len} | {one:.0} | {cut:.0} | {cudnn} | {:.2} |",
                    cut / f64::from(cudnn)
                );
                assert!(page.contains(&row), "docs/attention-backward.md lacks the row\n{row}");
            }
        }
    }

    #[test]
    fn a_call_gets_the_kernel_of_its_terms() {
        let sizes =
            AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 300, len_k: 300, d_head: 128, d_v: 128 };
        let form = |sizes: &AttentionShape, terms: &Terms| BackwardForm::of(sizes, terms).unwrap();
        let dense = form(&sizes, &causal());
        assert!(dense.causal && !(dense.window || dense.fill || dense.varlen || dense.soft_cap || dense.sink));
        let sliding = |left| Terms { mask: Mask { window_left: Some(left), ..Mask::CAUSAL }, ..causal() };
        let windowed = form(&sizes, &sliding(299));
        assert!(windowed.window && !windowed.causal);
        assert_eq!(form(&sizes, &sliding(300)), dense, "a window of all keys is none");
        assert!(form(&AttentionShape { len_k: 299, ..sizes }, &causal()).window, "a row that sees no key");
        let fill = form(&AttentionShape { d_v: 72, ..sizes }, &causal());
        assert!(fill.fill && (fill.columns, fill.used) == (128, 128));
        let phi = form(&AttentionShape { d_head: 96, d_v: 80, ..sizes }, &causal());
        assert_eq!((phi.columns, phi.used), (128, 96));
        assert_eq!(form(&AttentionShape { d_head: 40, d_v: 64, ..sizes }, &causal()).columns, 64);

        let wide = |d_head, d_v| BackwardForm::of_checked(&AttentionShape { d_head, d_v, ..sizes }, &causal());
        assert_eq!((wide(256, 256).columns, wide(256, 256).used, wide(256, 256).fill), (256, 256, false));
        assert_eq!((wide(192, 128).columns, wide(192, 128).used, wide(192, 128).fill), (256, 192, true));
        assert_eq!((wide(136, 64).rows(), wide(136, 64).keys()), (64, 64));

        let packed = Terms { sequences: lists(5, 100, 100), ..causal() };
        let of = form(&sizes, &packed);
        assert!(of.varlen && of.causal);
        // Whole tiles of every sequence and of the gaps: rows / size + sequences + 1.
        assert_eq!(of.tiles(&sizes, &packed), [1, 600 / 64 + 6, 600 / 128 + 6]);
        assert_eq!(dense.tiles(&sizes, &causal()), [2, 5, 3]);
        let error = BackwardForm::of(&AttentionShape { d_v: 192, ..sizes }, &causal()).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("d_v 192"), "{error}");
    }

    #[test]
    fn few_blocks_are_split_and_many_are_not() {
        let sizes = |batch, heads_q, heads_kv, len| AttentionShape {
            batch,
            n_q_heads: heads_q,
            n_kv_heads: heads_kv,
            len_q: len,
            len_k: len,
            d_head: 128,
            d_v: 128,
        };
        let schedule = |sizes: &AttentionShape, terms: &Terms, deterministic| {
            BackwardSchedule::of(sizes, terms, &BackwardForm::of(sizes, terms).unwrap(), deterministic, 132)
        };
        let of = |sizes: AttentionShape, is_causal: bool| {
            let mask = if is_causal { Mask::CAUSAL } else { Mask::NONE };
            schedule(&sizes, &Terms::plain(mask, 0.1), false)
        };
        assert_eq!(of(sizes(1, 32, 8, 2048), true), BackwardSchedule { section: 8, splits: 2, grid: 256 });
        assert_eq!(of(sizes(1, 32, 8, 2048), false).splits, 1, "128 blocks of one length fill 132 multiprocessors");
        assert_eq!(of(sizes(1, 32, 8, 1024), true).splits, 4);
        assert_eq!(of(sizes(2, 32, 8, 2048), true).splits, 1);
        assert_eq!(of(sizes(2, 32, 8, 8192), true), BackwardSchedule { section: 2, splits: 1, grid: 1024 });
        assert_eq!(schedule(&sizes(1, 32, 8, 1024), &causal(), true).splits, 1);
        assert_eq!(of(AttentionShape { d_head: 64, d_v: 64, ..sizes(1, 32, 8, 1024) }, true).splits, 1);
        for len in [1, 100, 5000, 1 << 20] {
            let all = sizes(3, 6, 2, len);
            let schedule = of(all, true);
            assert!((1..=6).contains(&schedule.section) && schedule.grid >= 6 * len.div_ceil(128), "{schedule:?}");
        }
    }
}
