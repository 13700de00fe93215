//! The kernels' sources, embedded.
//!
//! One kernel per file under `kernels/`. Headers are included by their path under `kernels/`. No toolkit header is included, so
//! a compilation needs nothing on disk.

/// One source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Path under `kernels/`, without the extension.
    pub name: &'static str,
    /// Text.
    pub text: &'static str,
}

macro_rules! sources {
    ($($(#[$doc:meta])* $constant:ident = $file:literal;)*) => {
        $($(#[$doc])* pub const $constant: Source =
            Source { name: $file, text: include_str!(concat!("../../kernels/", $file, ".cu")) };)*
        #[cfg(test)]
        pub const ALL: &[Source] = &[$($constant),*];
    };
}
sources! {
    /// Addresses of weights that move, into tables.
    ADDRESSES = "scale/addresses";
    /// Prepared gains.
    GAINS = "scale/gains";
    /// Channel statistics of 16-bit weights, by Hopper's copy engine.
    NORMS = "scale/norms";
    /// The same of any weights.
    NORMS_GENERIC = "scale/norms_generic";
    /// Operand descales from channel statistics.
    DESCALES = "scale/operand_descales";
    /// The same of latent attention.
    MLA_DESCALES = "scale/mla_descales";
    /// Grams of any head, without tensor cores.
    GRAMS_GENERIC = "scale/grams_generic";
    /// Grams on Hopper's tensor cores, the weights rounded once.
    GRAMS_ROUNDED = "scale/grams_rounded";
    /// Grams on Hopper's tensor cores, the weights as they are.
    GRAMS_SPLIT = "scale/grams_split";
    /// Grams where heads have more than 128 channels, or weights are f32.
    GRAMS_WIDE = "scale/grams_wide";
    /// Certified eigenvalues of small matrices.
    EIGENVALUES = "scale/eigenvalues";
    /// Matrices of products without rotation.
    PRODUCTS = "scale/products";
    /// Frobenius norms from Grams.
    FROBENIUS = "scale/frobenius";
    /// Implicit power iterations, of each head and of a layer's sum.
    POWER = "scale/power";
    /// Bounds of q and k that are normalized after the projection.
    QK_NORM = "scale/qk_norm_bounds";
    /// Channel statistics from the parts that Gram kernels leave.
    PART_STATS = "scale/part_stats";
    /// Logit bounds and descales.
    LOGIT_BOUNDS = "scale/logit_bounds";
    /// The same from estimates of a power iteration.
    ESTIMATED_BOUNDS = "scale/estimated_bounds";
    /// Scales of the next call from bounds, history or measurement.
    POLICY_PLAN = "policy/plan";
    /// What a policy makes of a call's statistics.
    POLICY_OBSERVE = "policy/observe";
    /// Fused E4M3 attention forward (Hopper).
    ATTENTION = "attention/forward";
    /// Combines the splits of an attention call.
    COMBINE = "attention/combine";
    /// Fused attention backward on E4M3 operands (Hopper).
    BACKWARD = "attention/backward";
    /// What the backward needs of each query row.
    BACKWARD_PREPARE = "attention/backward_prepare";
    /// dQ of the backward to BF16.
    BACKWARD_FINISH = "attention/backward_finish";
    /// Fused E4M3 attention over a paged KV cache (Hopper).
    PAGED = "attention/paged";
    /// New keys and values into pages, and the plan of a call on them.
    APPEND = "attention/append";
    /// Cast of q, k and v to E4M3 in the layouts that the attention reads.
    CAST = "attention/cast_qkv";
}

macro_rules! headers {
    ($($path:literal,)*) => {
        /// Headers by the name they are included under.
        pub const HEADERS: &[(&str, &str)] = &[$(($path, include_str!(concat!("../../kernels/", $path)))),*];
    };
}
headers! {
    "attention/backward.cuh",
    "attention/backward_convert.cuh",
    "attention/backward_tiles.cuh",
    "attention/backward_walk.cuh",
    "attention/cast.cuh",
    "attention/cast_rows.cuh",
    "attention/config.cuh",
    "attention/consumer.cuh",
    "attention/epilogue.cuh",
    "attention/epilogue_split.cuh",
    "attention/epilogue_whole.cuh",
    "attention/logits_e4m3.cuh",
    "attention/mainloop_double.cuh",
    "attention/mainloop_rolled.cuh",
    "attention/mainloop_single.cuh",
    "attention/mainloop_sliced.cuh",
    "attention/mask.cuh",
    "attention/mask_logits.cuh",
    "attention/pages.cuh",
    "attention/params.cuh",
    "attention/pipeline.cuh",
    "attention/quad.cuh",
    "attention/ring.cuh",
    "attention/schedule.cuh",
    "attention/scheduler.cuh",
    "attention/scheduler_paged.cuh",
    "attention/scheduler_split.cuh",
    "attention/scheduler_whole.cuh",
    "attention/sequences.cuh",
    "attention/softmax.cuh",
    "attention/values.cuh",
    "common/descale.cuh",
    "common/head_bound.cuh",
    "common/step_stats.cuh",
    "common/types.cuh",
    "common/warp.cuh",
    "policy/types.cuh",
    "ptx/cluster.cuh",
    "ptx/convert.cuh",
    "ptx/fence.cuh",
    "ptx/launch.cuh",
    "ptx/math.cuh",
    "ptx/mbarrier.cuh",
    "ptx/memory.cuh",
    "ptx/mma.cuh",
    "ptx/reduce.cuh",
    "ptx/tma.cuh",
    "ptx/wgmma.cuh",
    "scale/gram_pass.cuh",
    "scale/lift.cuh",
    "scale/matrices.cuh",
    "scale/pair_sums.cuh",
    "scale/ring.cuh",
    "scale/segments.cuh",
    "scale/squarings.cuh",
    "scale/symmetric.cuh",
    "scale/types.cuh",
}
