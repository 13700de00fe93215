//! Whose casts a run has.

sigmascale::named! {
    /// Whose casts a run has.
    pub enum Arithmetic is "arithmetic" default Bf16 {
        /// BF16, and the unnormalized output rounded after every tile: the paper's.
        Bf16 = "bf16",
        /// P in BF16, its sums in f32, the output in BF16: a fused BF16 kernel's.
        Fused = "fused",
        /// q, k and v in E4M3, P in F16, the output in BF16: this package's kernel's in training.
        ///
        /// Descales are those of current maxima.
        Fp8 = "fp8",
    }
}
