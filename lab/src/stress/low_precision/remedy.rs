//! What is done against the failure.

use super::arithmetic::Arithmetic;

sigmascale::named! {
    /// What is done against the failure. Each but [`Remedy::None`] changes one thing.
    pub enum Remedy is "remedy" {
        /// The casts of --arithmetic, delta from the output.
        None = "none",
        /// The output in f32 from P V on.
        F32Output = "f32-output",
        /// P V in f32, the output in BF16.
        F32Pv = "f32-pv",
        /// P V in f32, and the output rounded to BF16 stochastically.
        StochasticOutput = "stochastic-output",
        /// P V in f32, the output in BF16, and delta from the output before its rounding.
        ///
        /// As `attention` takes it in Python by default: the output itself stays in BF16, and what its rounding took is kept in BF16 beside
        /// it.
        UnroundedDelta = "unrounded-delta",
        /// delta = rowsum(P dP).
        DeltaFromP = "delta-from-p",
        /// The shifted softmax: rows whose maximum repeats are shifted to beta times it, by at most 40 nats more.
        ///
        /// The row maximum of Algorithm 3, with the limit of [`ShiftLimit::Wrapped`](sigmascale::attention::ShiftLimit::Wrapped).
        ShiftedSoftmax = "shifted-softmax",
        /// The same, with one shift of 40 nats for all larger maxima.
        ///
        /// A fixed offset, which the paper's appendix C warns against.
        ShiftedSoftmaxFixed = "shifted-softmax-fixed",
        /// The same, with one shift of 57 ln 2 nats, so that P is a power of two.
        ShiftedSoftmaxPower = "shifted-softmax-power",
        /// The output of one head in f32.
        F32Head = "f32-head",
        /// W_Q and q of one head in f32.
        F32WQ = "f32-w-q",
        /// Everything in f32.
        F32 = "f32",
    }
}

impl Remedy {
    /// Whether it changes anything in an arithmetic: fused kernels sum P V in f32 as they are, and FP8 has neither shifts beyond an
    /// octave nor one matrix in f32.
    pub fn is_for(self, arithmetic: Arithmetic) -> bool {
        match arithmetic {
            Arithmetic::Bf16 => true,
            Arithmetic::Fused => self != Self::F32Pv,
            Arithmetic::Fp8 => {
                let not = [Self::F32Pv, Self::ShiftedSoftmaxFixed, Self::ShiftedSoftmaxPower, Self::F32WQ];
                !not.contains(&self)
            }
        }
    }
}
