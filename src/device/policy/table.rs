//! The host's side of `kernels/include/policy_types.cuh`.

use bytemuck::{Pod, Zeroable};

/// One layer's heads, and those of the layers in front of it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PolicyLayer {
    pub n_q: u32,
    pub n_kv: u32,
    pub first_q: u32,
    pub first_kv: u32,
    pub keep: [u32; 4],
    pub softmax_scale: f64,
}
const _: () = assert!(size_of::<PolicyLayer>() == 8 * 4 + 8);

/// Certain bound over observed amax: of a layer's heads over the steps of its burn-in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct SlackWords {
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Sum.
    pub sum: f64,
    /// Heads times steps; 0: nothing was seen, and the rest holds nothing.
    pub count: u64,
}
const _: () = assert!(size_of::<SlackWords>() == 4 * 8);

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PolicyTable {
    pub heads: u64,
    pub operands: u64,
    pub stats: u64,
    pub seen_stats: u64,
    pub plan: u64,
    pub tensors: u64,
    pub status: u64,
    pub sizes: u64,
    pub seen: u64,
    pub restarts: u64,
    pub phases: u64,
    pub constants: u64,
    pub counts: u64,
    pub top: u64,
    pub slack: u64,
    pub history: u64,
    pub places: u64,
    pub scales: u64,
    pub kind: u32,
    pub layers: u32,
    pub per_layer: u32,
    pub has_values: u32,
    pub history_length: u32,
    pub most_recent: u32,
    pub logit_target: f64,
    pub operand_target: f64,
    pub soft_cap: f64,
    pub kappa: f64,
    pub pooling: u32,
    pub burn_in: u32,
    pub max_restarts: u32,
    pub scaled_max: f32,
    pub pool_base: [u32; 4],
    pub room: [u32; 4],
    pub top_base: [u64; 4],
    pub sphere: f64,
    pub c_star: f64,
    pub c_halved: f64,
    pub linear_factor: f64,
    pub d_model: f64,
}
const _: () = assert!(size_of::<PolicyTable>() == 18 * 8 + 6 * 4 + 4 * 8 + 4 * 4 + 2 * 16 + 4 * 8 + 5 * 8);
