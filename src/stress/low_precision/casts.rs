//! What each head rounds under a remedy.

use super::options::LowPrecisionOptions;
use super::remedy::Remedy;
use crate::attention::{
    BackwardPrecision, Cast, Delta, Precision, Probabilities, PvAccumulator, ShiftLimit, Stabilised,
};

/// What one head rounds.
pub struct Casts {
    /// W_Q and q.
    pub query: bool,
    /// W_K, W_V, k and v.
    pub others: bool,
    pub precision: Precision,
    pub backward: BackwardPrecision,
    pub stabilised: Option<Stabilised>,
}

impl Casts {
    /// Those of a head.
    pub fn of(head: usize, options: &LowPrecisionOptions) -> Self {
        let remedy = options.remedy;
        // Projections are rounded before the call: its operands have BF16 values.
        let pv_accumulator = PvAccumulator::Bf16 { tile: options.tile };
        let low = Precision { operands: Cast::F32, pv_accumulator, ..Precision::BF16 };
        let f32_output = Precision { pv_accumulator: PvAccumulator::F32, output: Cast::F32, ..low };
        let chosen = head == options.f32_head;
        let limit = match remedy {
            Remedy::Stabilised => Some(ShiftLimit::Wrapped),
            Remedy::StabilisedFixed => Some(ShiftLimit::Fixed(Stabilised::MAX_SHIFT)),
            Remedy::StabilisedPower => Some(ShiftLimit::Fixed(57.0 * std::f32::consts::LN_2)),
            _ => None,
        };
        Self {
            query: !(remedy == Remedy::F32 || remedy == Remedy::F32WQ && chosen),
            others: remedy != Remedy::F32,
            precision: match remedy {
                Remedy::F32Pv => Precision { pv_accumulator: PvAccumulator::F32, ..low },
                Remedy::F32Output => f32_output,
                Remedy::F32Head if chosen => f32_output,
                Remedy::F32 => Precision { probabilities: Probabilities::F32, ..f32_output },
                _ => low,
            },
            backward: BackwardPrecision {
                delta: if remedy == Remedy::DeltaFromP { Delta::Probabilities } else { Delta::Output },
                ..BackwardPrecision::default()
            },
            stabilised: limit.map(|limit| Stabilised { beta: options.beta, epsilon: options.epsilon, limit }),
        }
    }
}
