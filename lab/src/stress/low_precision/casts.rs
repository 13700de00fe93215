//! What each head rounds under a remedy.

use super::arithmetic::Arithmetic;
use super::options::LowPrecisionOptions;
use super::remedy::Remedy;
use sigmascale::attention::{
    BackwardPrecision, Cast, Delta, Precision, Probabilities, PvAccumulator, ShiftLimit, ShiftedSoftmax,
};

/// What one head rounds.
pub struct Casts {
    /// W_Q and q.
    pub query: bool,
    /// W_K, W_V, k and v.
    pub others: bool,
    pub precision: Precision,
    pub backward: BackwardPrecision,
    pub shifted: Option<ShiftedSoftmax>,
}

impl Casts {
    /// Those of a head.
    pub fn of(head: usize, options: &LowPrecisionOptions) -> Self {
        let remedy = options.remedy;
        // Projections are rounded before the call: its operands have BF16 values.
        let pv_accumulator = PvAccumulator::Bf16 { tile: options.tile };
        let bf16 = Precision { operands: Cast::F32, pv_accumulator, ..Precision::BF16 };
        // With the sums of P V in f32.
        let fused = match options.arithmetic {
            Arithmetic::Fp8 => Precision { output: Cast::Bf16, ..Precision::TRAINING },
            _ => Precision { pv_accumulator: PvAccumulator::F32, ..bf16 },
        };
        let low = if options.arithmetic == Arithmetic::Bf16 { bf16 } else { fused };
        let f32_output = Precision { output: Cast::F32, ..fused };
        let chosen = head == options.f32_head;
        let limit = match remedy {
            Remedy::ShiftedSoftmax if options.arithmetic == Arithmetic::Fp8 => Some(ShiftLimit::Octave),
            Remedy::ShiftedSoftmax => Some(ShiftLimit::Wrapped),
            Remedy::ShiftedSoftmaxFixed => Some(ShiftLimit::Fixed(ShiftedSoftmax::MAX_SHIFT)),
            Remedy::ShiftedSoftmaxPower => Some(ShiftLimit::Fixed(57.0 * std::f32::consts::LN_2)),
            _ => None,
        };
        Self {
            query: !(remedy == Remedy::F32 || remedy == Remedy::F32WQ && chosen),
            others: remedy != Remedy::F32,
            precision: match remedy {
                Remedy::F32Pv => fused,
                Remedy::StochasticOutput => Precision { output: Cast::Bf16Stochastic, ..fused },
                // The output is rounded behind the call.
                Remedy::F32Output | Remedy::UnroundedDelta => f32_output,
                Remedy::F32Head if chosen => f32_output,
                Remedy::F32 => Precision {
                    operands: Cast::F32,
                    probabilities: Probabilities::F32,
                    output: Cast::F32,
                    ..Precision::F32
                },
                _ => low,
            },
            backward: BackwardPrecision {
                delta: if remedy == Remedy::DeltaFromP { Delta::Probabilities } else { Delta::Output },
                ..BackwardPrecision::default()
            },
            shifted: limit.map(|limit| ShiftedSoftmax { beta: options.beta, epsilon: options.epsilon, limit }),
        }
    }
}
