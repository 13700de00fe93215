//! How a backward call is cut: into parts, tiles and blocks, and what its workspace holds.

use super::backward_call::BackwardOptions;
use super::regions::{Regions, check_workspace};
use super::terms::{DeviceCall, Features};
use crate::attention::{AttentionShape, Keeps};
use crate::cuda::View;
use crate::error::{Error, Result};
use std::ops::Range;

/// What the kernels are compiled for, and how they cut a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BackwardForm {
    /// Columns of a tile: the smallest of 64, 128 and 256 that holds d_head and d_v.
    pub columns: usize,
    /// Columns of it that are multiplied.
    pub used: usize,
    /// Whether one of them is smaller than the tile.
    pub fill: bool,
    /// Without a window: keys after the query's position are not seen.
    pub causal: bool,
    /// With a window also where rows see no key.
    pub features: Features,
    /// What the forward kept for it: where delta comes from, and whether dQ is of E4M3 codes of dS.
    pub keeps: Keeps,
}

impl BackwardForm {
    /// The form of a call that keeps its rules.
    ///
    /// # Errors
    /// If the call is not offered.
    pub fn of(call: &DeviceCall, options: &BackwardOptions) -> Result<Self> {
        call.check()?;
        let sizes = &call.shape;
        let (causal, features) = call.features();
        let widest = sizes.d_head.max(sizes.d_v);
        let columns = [64, 128].into_iter().find(|&columns| widest <= columns).unwrap_or(256);
        // Rows that see no key are for the kernel with windows to keep apart.
        let blind = !features.varlen && causal && sizes.len_q > sizes.len_k;
        let window = features.window || blind;
        let BackwardOptions { deterministic, keeps, .. } = *options;
        let dq_fp8 = keeps == Keeps::Fp8Dq;
        if dq_fp8 && columns == 256 {
            return Err(Error::unsupported(format_args!(
                "dQ in FP8 is not offered on the GPU for heads of {widest}, above 128: leave out dq_fp8"
            )));
        }
        if dq_fp8 && deterministic && columns == 64 {
            return Err(Error::unsupported(
                "a deterministic dQ in FP8 is not offered on the GPU for heads of at most 64: leave out one of the two",
            ));
        }
        Ok(Self {
            columns,
            used: match widest {
                65..=96 => 96,
                129..=192 => 192,
                _ => columns,
            },
            fill: sizes.d_head != columns || sizes.d_v != columns,
            causal: causal && !window,
            features: Features { window, ..features },
            keeps: keeps.of_kernel(),
        })
    }

    /// Queries of a tile.
    pub fn rows(&self) -> usize {
        if self.columns == 64 { 128 } else { 64 }
    }

    /// Keys of a block.
    pub fn keys(&self) -> usize {
        if self.columns == 256 { 64 } else { 128 }
    }

    /// Numbers of each query that the kernels pass on.
    pub fn terms(&self) -> usize {
        2 + usize::from(self.keeps == Keeps::Fp8Dq)
    }

    /// Bytes of the f32 sums of dQ of one tile of queries.
    pub fn sum_bytes(&self) -> usize {
        self.rows() * self.columns * size_of::<f32>()
    }

    /// Sequences that tiles are counted in, and tiles of queries and of keys that each has: those of the batch, or all in one, where
    /// every sequence takes whole tiles.
    pub fn tiles(&self, call: &DeviceCall) -> [usize; 3] {
        let sizes = &call.shape;
        match &call.sequences {
            None => [sizes.batch, sizes.len_q.div_ceil(self.rows()), sizes.len_k.div_ceil(self.keys())],
            Some(sequences) => {
                let slots = |rows: usize, size: usize| sizes.batch * rows / size + sequences.count() + 1;
                [1, slots(sizes.len_q, self.rows()), slots(sizes.len_k, self.keys())]
            }
        }
    }
}

/// How a call is cut into parts that take turns in two lanes, each with a workspace of its own, so that the f32 sums of dQ stay within
/// a limit. A part has whole entries of the batch, or some KV heads of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Entries of the batch, of the largest part.
    pub entries: usize,
    /// KV heads.
    pub kv_heads: usize,
}

impl Parts {
    /// As few parts as the limit allows, of about one size; two parts of one KV head may pass it. Calls with sequences, whose rows are
    /// one axis, and with sinks, whose gradient is a sum over the batch, are in one part.
    pub fn of(call: &DeviceCall, form: &BackwardForm, sums_limit: Option<usize>, processors: usize) -> Self {
        let sizes = &call.shape;
        let whole = Self { entries: sizes.batch, kv_heads: sizes.n_kv_heads };
        if call.sequences.is_some() || call.sinks.is_some() {
            return whole;
        }
        let [_, query_tiles, key_tiles] = form.tiles(call);
        let units = sizes.batch * sizes.n_kv_heads;
        let fit = match sums_limit {
            Some(limit) => match limit / (sizes.group() * query_tiles * form.sum_bytes()) {
                all if all >= units => return whole,
                of_both_lanes => of_both_lanes / 2,
            },
            // With r KV heads a query head, a step takes 9 + 6 r + 12 / d bytes an element of q, and BF16's in cuDNN 8 + 4 r + 8 / d,
            // or 4 more where r < 1: ours is more at r = 1 alone, and with a quarter of the sums, 12 + 6 / d, less. A wave of blocks in
            // each lane fills the device.
            None if sizes.group() == 1 => (units / 8).max(processors.div_ceil(key_tiles)),
            None => return whole,
        };
        let fit = fit.max(1);
        let even = |all: usize, most: usize| all.div_ceil(all.div_ceil(most.min(all)));
        let part = match fit / sizes.n_kv_heads {
            0 => Self { entries: 1, kv_heads: even(sizes.n_kv_heads, fit) },
            entries => Self { entries: even(sizes.batch, entries), ..whole },
        };
        // Two lanes of parts above half of the call would take more memory than the call.
        if 2 * part.entries * part.kv_heads > units { whole } else { part }
    }

    /// Lanes that the parts take turns in.
    pub fn lanes(&self, sizes: &AttentionShape) -> usize {
        if (self.entries, self.kv_heads) == (sizes.batch, sizes.n_kv_heads) { 1 } else { 2 }
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
pub(super) struct BackwardWorkspace {
    /// Workspaces of parts, consecutive in memory.
    pub lanes: usize,
    /// Size of one.
    pub lane: usize,
    /// Log-sum-exp and delta, by tiles of queries.
    pub terms: usize,
    /// Sums of dQ in f32, by tiles.
    pub dq_sum: usize,
    /// Whose turn it is to add to a tile, for deterministic calls.
    pub turns: usize,
    /// Parts of the sinks' gradients, by tiles; for calls with sinks.
    pub sinks: usize,
    /// Size of it all.
    pub bytes: usize,
}

impl BackwardWorkspace {
    /// The workspace of a call on a device of so many multiprocessors.
    ///
    /// # Errors
    /// If the call is not offered.
    pub fn of(call: &DeviceCall, options: &BackwardOptions, processors: usize) -> Result<Self> {
        let form = BackwardForm::of(call, options)?;
        let parts = Parts::of(call, &form, options.sums_limit, processors);
        let (lanes, sizes) = (parts.lanes(&call.shape), &parts.largest(&call.shape));
        let [units, query_tiles, key_tiles] = form.tiles(&call.with_shape(*sizes));
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
        let of_terms = words(tiles * form.terms() * rows);
        let dq_sum = words(tiles * form.sum_bytes() / size_of::<f32>());
        let turns = words(if options.deterministic { tiles * 8 } else { 0 });
        let sinks = words(if form.features.sink { tiles } else { 0 });
        let lane = regions.bytes().next_multiple_of(256);
        Ok(Self { lanes, lane, terms: of_terms, dq_sum, turns, sinks, bytes: lanes * lane })
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

    pub fn of(call: &DeviceCall, form: &BackwardForm, deterministic: bool, processors: usize) -> Self {
        let sizes = &call.shape;
        let [entries, _, key_tiles] = form.tiles(call);
        let units = entries * sizes.n_kv_heads;
        let len_q = call.queries();
        let width = call.window().map(|keys| keys as usize).iter().sum::<usize>() + form.keys() + form.rows();
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
    use super::super::call::Workspace;
    use super::super::tile::PROCESSORS;
    use super::*;
    use crate::attention::{Mask, PvAccumulator};
    use crate::cuda::Element;
    use crate::device::attention::Sequences;
    use crate::device::attention::backward_call::tests::dense;

    const PLAIN: BackwardOptions = BackwardOptions { deterministic: false, sums_limit: None, keeps: Keeps::Operands };
    const DETERMINISTIC: BackwardOptions = BackwardOptions { deterministic: true, ..PLAIN };

    fn cut(sums_limit: Option<usize>) -> BackwardOptions {
        BackwardOptions { sums_limit, ..PLAIN }
    }

    fn causal(shape: &AttentionShape) -> DeviceCall {
        DeviceCall::causal(*shape)
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
            let sinks = DeviceCall { sinks: Some(dense(Element::F32, [6])), ..causal(&sizes) };
            let form = BackwardForm::of(&sinks, &PLAIN).unwrap();
            let rows = 113usize.next_multiple_of(form.rows());
            let w = BackwardWorkspace::of(&sinks, &DETERMINISTIC, PROCESSORS).unwrap();
            assert!([w.terms, w.dq_sum, w.turns, w.sinks].iter().all(|at| at.is_multiple_of(256)));
            assert!(w.dq_sum >= 3 * 6 * rows * 8 && w.turns - w.dq_sum >= 3 * 6 * rows * d_head * 4);
            let tiles = 3 * 6 * rows / form.rows();
            assert!(w.sinks - w.turns >= tiles * 32 && w.bytes - w.sinks >= tiles * 4);
            assert!(BackwardWorkspace::of(&causal(&sizes), &PLAIN, PROCESSORS).unwrap().bytes < w.bytes);
            let short = dense(Element::U8, [w.bytes - 1]);
            let error = w.check(&short).unwrap_err();
            assert!(error.is_argument() && error.to_string().contains(&w.bytes.to_string()), "{error}");
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
        let parts =
            |call: &DeviceCall, limit| Parts::of(call, &BackwardForm::of(call, &PLAIN).unwrap(), limit, PROCESSORS);
        const MIB: usize = 1 << 20;
        for (shape, limit, want) in [
            // 32 MiB of sums per entry, then 8 or 64 per KV head. Without a limit an eighth of the call where no query heads share keys.
            (sizes(8, 32, 32, 2048), None, (1, 32)),
            (sizes(1, 32, 32, 16384), None, (1, 4)),
            (sizes(1, 32, 32, 16384), Some(usize::MAX), (1, 32)),
            (sizes(3, 5, 5, 2048), None, (1, 5)),
            (sizes(3, 10, 10, 2048), None, (1, 5)),
            (sizes(1, 17, 17, 2048), None, (1, 17)),
            (sizes(1, 18, 18, 2048), None, (1, 9)),
            (sizes(100, 16, 16, 100), None, (12, 16)),
            (sizes(8, 32, 8, 2048), None, (8, 8)),
            (sizes(8, 32, 32, 2048), Some(256 * MIB), (8, 32)),
            (sizes(8, 32, 32, 2048), Some(255 * MIB), (3, 32)),
            (sizes(8, 32, 32, 2048), Some(100 * MIB), (1, 32)),
            (sizes(8, 32, 32, 2048), Some(32 * MIB), (1, 16)),
            (sizes(8, 32, 32, 2048), Some(31 * MIB), (1, 11)),
            (sizes(1, 32, 32, 16384), Some(32 * MIB), (1, 2)),
            (sizes(1, 64, 8, 16384), Some(32 * MIB), (1, 1)),
            (sizes(3, 4, 1, 100), Some(1), (1, 1)),
        ] {
            let found = parts(&causal(&shape), limit);
            assert_eq!((found.entries, found.kv_heads), want, "{shape:?} {limit:?}");
            let bytes = |limit| BackwardWorkspace::of(&causal(&shape), &cut(limit), PROCESSORS).unwrap().bytes;
            let of_a_head = bytes(Some(1));
            assert!(limit.is_none_or(|limit| bytes(Some(limit)) <= limit.saturating_add(limit / 50).max(of_a_head)));
            assert!(bytes(limit) <= bytes(Some(usize::MAX)));
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
        let sinks = DeviceCall { sinks: Some(dense(Element::F32, [32])), ..causal(&shape) };
        let packed = DeviceCall { sequences: lists(5, 100, 100), ..causal(&shape) };
        assert!([sinks, packed].iter().all(|call| parts(call, Some(1)).entries == 8));
    }

    /// MiB of a forward and backward of 16384 tokens, besides q, k, v and dO, as they are cut by default; cuDNN's were measured.
    #[test]
    fn a_step_needs_no_more_memory_than_cudnn() {
        for (n_q_heads, n_kv_heads, d, cudnn) in
            [(64, 8, 128, 1608), (32, 8, 128, 836), (32, 32, 128, 772), (32, 32, 64, 388)]
        {
            for (batch, len) in [(8, 2048), (4, 4096), (2, 8192), (1, 16384)] {
                let s = AttentionShape { batch, n_q_heads, n_kv_heads, len_q: len, len_k: len, d_head: d, d_v: d };
                let operands = s.q_elements() + s.k_elements() + s.v_elements();
                let saved = 2 * s.out_elements() + 4 * s.lse_elements() + operands;
                let forward = Workspace::of(&causal(&s), Element::Bf16, PvAccumulator::F16, true).bytes;
                let backward = BackwardWorkspace::of(&causal(&s), &cut(None), PROCESSORS).unwrap().bytes;
                let ours = (saved + forward.max(2 * operands + backward)) as f64 / f64::from(1 << 20);
                assert!(ours < f64::from(cudnn), "{ours} MiB");
            }
        }
    }

    #[test]
    fn a_call_gets_the_kernel_of_its_terms() {
        let sizes =
            AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 300, len_k: 300, d_head: 128, d_v: 128 };
        let of_call = |call: &DeviceCall| BackwardForm::of(call, &PLAIN).unwrap();
        let form = |sizes: AttentionShape| of_call(&causal(&sizes));
        let dense = form(sizes);
        assert!(dense.causal && !dense.fill && dense.features == Features::default());
        let sliding = |left| DeviceCall { mask: Mask { window_left: Some(left), ..Mask::CAUSAL }, ..causal(&sizes) };
        let windowed = of_call(&sliding(299));
        assert!(windowed.features.window && !windowed.causal);
        assert_eq!(of_call(&sliding(300)), dense, "a window of all keys masks nothing");
        assert!(form(AttentionShape { len_k: 299, ..sizes }).features.window, "a row that sees no key");
        let fill = form(AttentionShape { d_v: 72, ..sizes });
        assert!(fill.fill && (fill.columns, fill.used) == (128, 128));
        let phi = form(AttentionShape { d_head: 96, d_v: 80, ..sizes });
        assert_eq!((phi.columns, phi.used), (128, 96));
        assert_eq!(form(AttentionShape { d_head: 40, d_v: 64, ..sizes }).columns, 64);

        let wide = |d_head, d_v| form(AttentionShape { d_head, d_v, ..sizes });
        assert_eq!((wide(256, 256).columns, wide(256, 256).used, wide(256, 256).fill), (256, 256, false));
        assert_eq!((wide(192, 128).columns, wide(192, 128).used, wide(192, 128).fill), (256, 192, true));
        assert_eq!((wide(136, 64).rows(), wide(136, 64).keys()), (64, 64));

        let packed = DeviceCall { sequences: lists(5, 100, 100), ..causal(&sizes) };
        let of = of_call(&packed);
        assert!(of.features.varlen && of.causal);
        // Whole tiles of every sequence and of the gaps: rows / size + sequences + 1.
        assert_eq!(of.tiles(&packed), [1, 600 / 64 + 6, 600 / 128 + 6]);
        assert_eq!(dense.tiles(&causal(&sizes)), [2, 5, 3]);
    }

    #[test]
    fn what_is_not_offered_is_named() {
        let fp8 = BackwardOptions { keeps: Keeps::Fp8Dq, ..PLAIN };
        let both = BackwardOptions { deterministic: true, ..fp8 };
        for (d_head, d_v, options, message) in [
            (128, 264, PLAIN, Some("d_v 264 is not offered")),
            (192, 128, PLAIN, None),
            (192, 128, fp8, Some("dQ in FP8 is not offered on the GPU for heads of 192")),
            (64, 136, both, Some("dQ in FP8 is not offered on the GPU for heads of 136")),
            (128, 64, both, None),
            (64, 40, both, Some("a deterministic dQ in FP8")),
            (64, 40, fp8, None),
            (64, 64, BackwardOptions { keeps: Keeps::UnroundedDelta, ..both }, None),
        ] {
            let sizes = AttentionShape { batch: 1, n_q_heads: 1, n_kv_heads: 1, len_q: 9, len_k: 9, d_head, d_v };
            match (BackwardForm::of(&causal(&sizes), &options), message) {
                (Ok(form), None) => assert_eq!(form.keeps, options.keeps.of_kernel()),
                (Err(error), Some(message)) => {
                    assert!(error.is_unsupported() && error.to_string().contains(message), "{error}");
                }
                (found, _) => panic!("{d_head} {d_v} {options:?}: {found:?}"),
            }
        }
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
        let schedule = |call: &DeviceCall, deterministic| {
            BackwardSchedule::of(call, &BackwardForm::of(call, &PLAIN).unwrap(), deterministic, PROCESSORS)
        };
        let of = |sizes: AttentionShape, is_causal: bool| {
            let mask = if is_causal { Mask::CAUSAL } else { Mask::NONE };
            schedule(&DeviceCall { mask, ..causal(&sizes) }, false)
        };
        assert_eq!(of(sizes(1, 32, 8, 2048), true), BackwardSchedule { section: 8, splits: 2, grid: 256 });
        assert_eq!(of(sizes(1, 32, 8, 2048), false).splits, 1, "128 blocks of one length fill 132 multiprocessors");
        assert_eq!(of(sizes(1, 32, 8, 1024), true).splits, 4);
        assert_eq!(of(sizes(2, 32, 8, 2048), true).splits, 1);
        assert_eq!(of(sizes(2, 32, 8, 8192), true), BackwardSchedule { section: 2, splits: 1, grid: 1024 });
        assert_eq!(schedule(&causal(&sizes(1, 32, 8, 1024)), true).splits, 1);
        assert_eq!(of(AttentionShape { d_head: 64, d_v: 64, ..sizes(1, 32, 8, 1024) }, true).splits, 1);
        for len in [1, 100, 5000, 1 << 20] {
            let all = sizes(3, 6, 2, len);
            let schedule = of(all, true);
            assert!((1..=6).contains(&schedule.section) && schedule.grid >= 6 * len.div_ceil(128), "{schedule:?}");
        }
    }
}
