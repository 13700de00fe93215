//! What a backward call is made of, and the rules it has to keep.

use super::call::Descales;
use crate::attention::AttentionShape;
use crate::cuda::{Element, View};
use crate::error::{Error, Result};

/// Keys of one block.
pub(super) const KEYS: usize = 128;

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
    /// Gradient of the queries before their cast, BF16, shaped as q, likewise. Holds q in BF16 in between.
    pub dq: View<4>,
    /// Gradient of the keys, BF16, shaped as k, likewise.
    pub dk: View<4>,
    /// Gradient of the values, BF16, shaped as v, likewise.
    pub dv: View<4>,
}

impl BackwardTensors {
    /// Sizes of the call, after all rules were checked.
    ///
    /// # Errors
    /// Names the argument and the rule.
    pub fn check(&self) -> Result<AttentionShape> {
        let [batch, len_q, heads_q, d_head] = self.q.extents();
        let [_, len_k, heads_kv, _] = self.k.extents();
        let sizes =
            AttentionShape { batch, n_q_heads: heads_q, n_kv_heads: heads_kv, len_q, len_k, d_head, d_v: d_head };
        sizes.check_on_gpu()?;
        let (of_q, of_kv) = (sizes.q_shape(), sizes.kv_shape());
        for (name, x, shape) in [("q", &self.q, of_q), ("k", &self.k, of_kv), ("v", &self.v, of_kv)] {
            x.expect(name, &[Element::E4m3], shape)?;
            x.expect_aligned(name, 16, 16)?;
        }
        let wide =
            [("d_out", &self.d_out, of_q), ("dq", &self.dq, of_q), ("dk", &self.dk, of_kv), ("dv", &self.dv, of_kv)];
        let check_wide = |name: &str, x: &View<4>, shape| {
            x.expect(name, &[Element::Bf16], shape)?;
            x.expect_aligned(name, 16, 8)
        };
        wide.into_iter().try_for_each(|(name, x, shape)| check_wide(name, x, shape))?;
        self.lse.expect_dense("lse", Element::F32, sizes.lse_shape())?;
        match &self.delta {
            Delta::Output(out) => check_wide("out", out, of_q)?,
            Delta::Given(delta) => delta.expect_dense("delta", Element::F32, sizes.lse_shape())?,
        }
        for (name, x) in
            [("q descale", self.descales.q), ("k descale", self.descales.k), ("v descale", self.descales.v)]
        {
            if let Some(x) = x {
                x.expect(name, &[Element::F32], [batch, heads_kv])?;
                x.expect_aligned(name, 4, 1)?;
            }
        }
        if self.descales.logit.is_some() {
            return Err(Error::unsupported("gradients through logits in E4M3 are not offered on the GPU"));
        }
        Ok(sizes)
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
    /// Size of it all.
    pub bytes: usize,
}

impl BackwardWorkspace {
    /// The workspace of a call.
    pub fn of(sizes: &AttentionShape, deterministic: bool) -> Self {
        let tiles = sizes.batch * sizes.n_q_heads * sizes.query_tiles();
        let rows = sizes.tile_rows();
        let dq_sum = (tiles * 2 * rows * size_of::<f32>()).next_multiple_of(256);
        let turns = dq_sum + tiles * rows * sizes.d_head * size_of::<f32>();
        let turn_bytes = if deterministic { tiles * 8 * size_of::<u32>() } else { 0 };
        Self { terms: 0, dq_sum, turns, bytes: (turns + turn_bytes).next_multiple_of(256) }
    }

    pub(super) fn check(&self, workspace: &View<1>) -> Result<()> {
        let [have] = workspace.extents();
        if have < self.bytes {
            let want = self.bytes;
            return Err(Error::argument(format_args!("the workspace has {have} bytes, the backward needs {want}")));
        }
        workspace.expect_dense("workspace", Element::U8, [have])?;
        workspace.expect_aligned("workspace", 256, 1)
    }
}

impl AttentionShape {
    /// Queries of one tile of the backward.
    pub(super) fn tile_rows(&self) -> usize {
        if self.d_head == 128 { 64 } else { 128 }
    }

    pub(super) fn query_tiles(&self) -> usize {
        self.len_q.div_ceil(self.tile_rows())
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

    pub fn of(sizes: &AttentionShape, causal: bool, deterministic: bool, processors: usize) -> Self {
        let units = sizes.batch * sizes.n_kv_heads;
        let key_tiles = sizes.len_k.div_ceil(KEYS);
        let at_a_time = (processors + key_tiles / 2) / key_tiles;
        let section = units.div_ceil(units.div_ceil(at_a_time.clamp(1, units)));

        let blocks = units * key_tiles;
        let longest = sizes.n_q_heads / sizes.n_kv_heads * sizes.query_tiles();
        let time = |splits: usize| {
            let (parts, share) = (blocks * splits, longest.div_ceil(splits));
            let waves = parts.div_ceil(processors);
            // Causal blocks get shorter and fill the gaps: about half of all tiles are seen.
            let tiles = if causal { share.max(blocks * longest / (2 * processors)) } else { waves * share };
            tiles + waves * Self::BLOCK_COST + if splits > 1 { Self::CLUSTER_COST } else { 0 }
        };
        let choices: &[usize] = if deterministic || sizes.d_head == 64 { &[1] } else { &[1, 2, 4] };
        let splits = choices.iter().copied().min_by_key(|&n| time(n)).unwrap_or(1);
        Self { section, splits, grid: blocks * splits }
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
            ("head dimension 256", |t| t.q = dense(Element::E4m3, [2, 40, 4, 256])),
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

    #[test]
    fn regions_of_the_workspace_do_not_overlap() {
        for d_head in [64, 128] {
            let sizes =
                AttentionShape { batch: 3, n_q_heads: 6, n_kv_heads: 2, len_q: 113, len_k: 203, d_head, d_v: d_head };
            let rows = 113usize.next_multiple_of(sizes.tile_rows());
            let w = BackwardWorkspace::of(&sizes, true);
            assert!([w.terms, w.dq_sum, w.turns].iter().all(|at| at.is_multiple_of(256)));
            assert!(w.dq_sum >= 3 * 6 * rows * 8 && w.turns - w.dq_sum >= 3 * 6 * rows * d_head * 4);
            assert!(w.bytes - w.turns >= 3 * 6 * sizes.query_tiles() * 32);
            assert!(BackwardWorkspace::of(&sizes, false).bytes < w.bytes);
            let short = dense(Element::U8, [w.bytes - 1]);
            assert!(w.check(&short).unwrap_err().to_string().contains("the workspace has"));
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
        let of = |sizes: AttentionShape, causal| BackwardSchedule::of(&sizes, causal, false, 132);
        assert_eq!(of(sizes(1, 32, 8, 2048), true), BackwardSchedule { section: 8, splits: 2, grid: 256 });
        assert_eq!(of(sizes(1, 32, 8, 2048), false).splits, 1, "128 blocks of one length fill 132 multiprocessors");
        assert_eq!(of(sizes(1, 32, 8, 1024), true).splits, 4);
        assert_eq!(of(sizes(2, 32, 8, 2048), true).splits, 1);
        assert_eq!(of(sizes(2, 32, 8, 8192), true), BackwardSchedule { section: 2, splits: 1, grid: 1024 });
        assert_eq!(BackwardSchedule::of(&sizes(1, 32, 8, 1024), true, true, 132).splits, 1);
        assert_eq!(of(AttentionShape { d_head: 64, ..sizes(1, 32, 8, 1024) }, true).splits, 1);
        for len in [1, 100, 5000, 1 << 20] {
            let all = sizes(3, 6, 2, len);
            let schedule = of(all, true);
            assert!((1..=6).contains(&schedule.section) && schedule.grid >= 6 * len.div_ceil(KEYS), "{schedule:?}");
        }
    }
}
