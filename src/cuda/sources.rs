//! The kernels' sources, embedded.
//!
//! One kernel a file under `kernels/`. Headers are included by their path under `kernels/`; those of `kernels/include/` by
//! their file name. No toolkit header is included, so a compilation needs nothing on disk.

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
        /// Every source.
        pub const ALL: &[Source] = &[$($constant),*];
    };
}
sources! {
    /// Prepared gains.
    GAINS = "scale_gains";
    /// Channel statistics.
    NORMS = "scale_norms";
    /// The same of 16-bit weights by Hopper's copy engine.
    NORMS_HEADS = "scale_norms_heads";
    /// Operand descales from channel statistics.
    DESCALES = "scale_descales";
    /// Grams of any head, without tensor cores.
    GRAMS = "scale_grams";
    /// Grams on Hopper's tensor cores, the weights rounded once.
    GRAMS_WGMMA = "scale_grams_wgmma";
    /// Grams on Hopper's tensor cores, the weights in two pieces.
    GRAMS_PIECES = "scale_grams_pieces";
    /// Grams where heads have more than 128 channels, or weights are f32.
    GRAMS_WIDE = "scale_grams_wide";
    /// Certified eigenvalues of small matrices.
    BOUNDS = "scale_bounds";
    /// Matrices of products without rotation.
    PRODUCTS = "scale_products";
    /// Frobenius norms from Grams.
    FROBENIUS = "scale_frobenius";
    /// Implicit power iteration, each weight read once a step.
    POWER = "scale_power";
    /// The paper's power iteration on a whole layer.
    POWER_SUM = "scale_power_sum";
    /// Bounds of q and k that are normalised after the projection.
    QK_NORM = "scale_qk_norm";
    /// Logit bounds and descales; statistics from Grams.
    PLAN = "scale_plan";
    /// Scales of the next call from bounds, history or measurement.
    POLICY_PLAN = "policy_plan";
    /// What a policy makes of a call's statistics.
    POLICY_OBSERVE = "policy_observe";
    /// Fused E4M3 attention forward (Hopper).
    ATTENTION = "attention/forward";
    /// Combines the splits of an attention call.
    COMBINE = "attention/combine";
    /// Cast of q, k and v to E4M3 in the layouts that the attention reads.
    CAST = "attention/cast_qkv";
}

macro_rules! headers {
    ($($path:literal,)* @include $($name:literal,)*) => {
        /// Headers by the name they are included under.
        pub const HEADERS: &[(&str, &str)] = &[
            $(($path, include_str!(concat!("../../kernels/", $path))),)*
            $(($name, include_str!(concat!("../../kernels/include/", $name))),)*
        ];
    };
}
headers! {
    "attention/config.cuh",
    "attention/consumer.cuh",
    "attention/epilogue.cuh",
    "attention/epilogue_split.cuh",
    "attention/epilogue_whole.cuh",
    "attention/mainloop_double.cuh",
    "attention/mainloop_rolled.cuh",
    "attention/mainloop_single.cuh",
    "attention/params.cuh",
    "attention/pipeline.cuh",
    "attention/scheduler.cuh",
    "attention/scheduler_split.cuh",
    "attention/scheduler_whole.cuh",
    "attention/softmax.cuh",
    "common/descale.cuh",
    "common/step_stats.cuh",
    "common/types.cuh",
    "ptx/cluster.cuh",
    "ptx/convert.cuh",
    "ptx/fence.cuh",
    "ptx/launch.cuh",
    "ptx/math.cuh",
    "ptx/mbarrier.cuh",
    "ptx/memory.cuh",
    "ptx/mma.cuh",
    "ptx/tma.cuh",
    "ptx/wgmma.cuh",
    @include
    "gram_pass.cuh",
    "head_bound.cuh",
    "pair_sums.cuh",
    "policy_types.cuh",
    "ring.cuh",
    "scale_blocks.cuh",
    "scale_chain.cuh",
    "scale_cluster.cuh",
    "scale_jobs.cuh",
    "scale_lift.cuh",
    "scale_mma.cuh",
    "scale_ptx.cuh",
    "scale_segments.cuh",
    "scale_types.cuh",
}
