//! What a backward call is made of, and the rules it has to keep.

use super::call::Descales;
use super::regions::{Regions, check_workspace};
use super::terms::Terms;
use crate::attention::AttentionShape;
use crate::cuda::{Element, View};
use crate::error::{Error, Result};

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
    /// The sums of dQ are a ring of KV heads.
    pub ring: bool,
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
            ring: false,
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

/// Where a backward call keeps what passes between its kernels, in bytes from the start of the workspace. Nothing in it needs to be
/// set beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardWorkspace {
    /// Log-sum-exp and delta, by tiles of queries.
    pub terms: usize,
    /// Sums of dQ in f32, by tiles.
    pub dq_sum: usize,
    /// Whose turn it is to add to a tile, for deterministic calls; which KV heads have ended, for sums in a ring.
    pub turns: usize,
    /// Parts of the sinks' gradients, by tiles; for calls with sinks.
    pub sinks: usize,
    /// Size of it all.
    pub bytes: usize,
}

impl BackwardWorkspace {
    /// The workspace of a call. `ring`: of how many KV heads the sums of dQ are kept, or of all.
    ///
    /// # Errors
    /// If the call is not offered.
    pub fn of(sizes: &AttentionShape, terms: &Terms, deterministic: bool, ring: Option<usize>) -> Result<Self> {
        let form = BackwardForm::of(sizes, terms)?;
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
        let summed = ring.map_or(tiles, |kv_heads| kv_heads * sizes.group() * query_tiles);
        let dq_sum = words(summed * rows * form.columns);
        let turns = words(match ring {
            Some(_) => units * sizes.n_kv_heads,
            None if deterministic => tiles * 8,
            None => 0,
        });
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

    /// KV heads in a ring of the sums of dQ: those that run at a time and as many that end, so that blocks seldom wait. None where the
    /// last block of a KV head would take too long for its dQ, and for calls whose tiles are not those of KV heads.
    pub fn ring(&self, sizes: &AttentionShape, form: &BackwardForm, deterministic: bool) -> Option<usize> {
        /// Bytes of the sums of one KV head.
        const LARGEST: usize = 16 << 20;
        let tiles = sizes.group() * sizes.len_q.div_ceil(form.rows());
        let fits = tiles * form.rows() * form.columns * size_of::<f32>() <= LARGEST;
        let (ring, units) = ((2 * self.section).max(3), sizes.batch * sizes.n_kv_heads);
        (fits && !form.varlen && !deterministic && ring < units).then_some(ring)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Mask;
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
        let ring = |sizes: AttentionShape, deterministic| {
            let form = BackwardForm::of(&sizes, &causal()).unwrap();
            schedule(&sizes, &causal(), deterministic).ring(&sizes, &form, deterministic)
        };
        assert_eq!(ring(sizes(8, 32, 32, 2048), false), Some(16), "of 256 KV heads");
        assert_eq!(ring(sizes(1, 32, 32, 16384), false), Some(3), "8 MiB each");
        assert_eq!(ring(sizes(1, 64, 8, 16384), false), None, "64 MiB each");
        assert_eq!((ring(sizes(1, 8, 8, 2048), false), ring(sizes(8, 32, 32, 2048), true)), (None, None));
        let bytes = |ring| BackwardWorkspace::of(&sizes(8, 32, 32, 2048), &causal(), false, ring).unwrap().bytes;
        assert!(bytes(Some(16)) < bytes(None) / 8);
        for len in [1, 100, 5000, 1 << 20] {
            let all = sizes(3, 6, 2, len);
            let schedule = of(all, true);
            assert!((1..=6).contains(&schedule.section) && schedule.grid >= 6 * len.div_ceil(128), "{schedule:?}");
        }
    }
}
