//! What to do about an alarm, with the source of each advice.

use super::alarm::{Alarm, AlarmKind, LOSS_SCALING};
use serde::Serialize;
use std::collections::BTreeSet;

/// What to do about one kind of alarm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// The kind.
    pub kind: AlarmKind,
    /// Layers that it concerns, by the model's own numbers; none where it concerns the run.
    pub layers: Vec<usize>,
    /// What to do.
    pub action: &'static str,
    /// Where that comes from.
    pub source: &'static str,
}

/// "Why Low-Precision Transformer Training Fails".
const OUTPUT: &str = "\"Why Low-Precision Transformer Training Fails\", section 3.2; docs/low-precision-failure.md";

/// Actions against a kind, each with its source; the most specific first.
fn actions(kind: AlarmKind) -> &'static [(&'static str, &'static str)] {
    match kind {
        AlarmKind::DeltaBias => &[
            (
                "keep P V and the output in f32 until delta is computed, or take delta from rowsum(P o dP); in this package \
                 leave attention(.., gradients='rounded-delta') out",
                OUTPUT,
            ),
            (
                "in BF16 where P V is rounded to BF16 and row maxima repeat: the shifted softmax (attention::ShiftedSoftmax), with \
                 its default limit, which moves with the maximum",
                "\"Why Low-Precision Transformer Training Fails\", section 4; docs/low-precision-failure.md",
            ),
        ],
        AlarmKind::RepeatedMaxima => &[
            (
                "take delta from the output before its rounding: in this package leave attention(.., gradients='rounded-delta') out",
                OUTPUT,
            ),
            (
                "in BF16 where P V is rounded to BF16: the shifted softmax (attention::ShiftedSoftmax), with its default limit, \
                 which moves with the maximum",
                "\"Why Low-Precision Transformer Training Fails\", section 4; docs/low-precision-failure.md",
            ),
        ],
        AlarmKind::Saturation => &[(
            "take the descales from the current weights (policy geometry, refresh() after every step), or run the \
             layer in BF16",
            "docs/bounds.md",
        )],
        AlarmKind::Growth => &[
            ("run the layer in BF16; where it is in BF16, keep P V and the output in f32", OUTPUT),
            ("lower the learning rate", "Wortsman et al., 2023, arXiv:2309.14322"),
        ],
        AlarmKind::LogitLimit => &[
            (
                "QK-clip: scale W_Q and W_K of the head by sqrt(tau / largest logit)",
                "Kimi K2, arXiv:2507.20534, section 2.1",
            ),
            ("normalize q and k (QK-norm)", "Dehghani et al., 2023, arXiv:2302.05442"),
        ],
        AlarmKind::BoundExceeded => &[(
            "call refresh() after every change of the weights, and check that the projections read the output of the \
             norm",
            "docs/bounds.md",
        )],
        AlarmKind::EntropyCollapse => &[(
            "lower the learning rate, or bound the logits (QK-clip, QK-norm)",
            "Zhai et al., 2023, arXiv:2303.06296",
        )],
        AlarmKind::LossScale => &[(
            "lower the learning rate, or train in BF16, which has the exponents of f32 and needs no loss scale",
            "A Study of BFLOAT16 for Deep Learning Training, arXiv:1905.12322",
        )],
        AlarmKind::SkippedSteps => {
            &[("lower the learning rate; restore an earlier state if steps go on being skipped (Guard)", LOSS_SCALING)]
        }
        AlarmKind::LossSpike => &[(
            "restore a state from before the spike and leave out its batches (Guard)",
            "PaLM, arXiv:2204.02311, section 5.1",
        )],
        AlarmKind::NonFiniteLoss => &[(
            "restore a state from before it and halve the learning rate (Guard)",
            "docs/monitoring.md, what the guard does",
        )],
    }
}

/// What to do about these alarms: about the first one's kind first.
pub fn advice(first: Option<&Alarm>, alarms: &[Alarm]) -> Vec<Advice> {
    let rest: BTreeSet<AlarmKind> = alarms.iter().map(|alarm| alarm.kind).collect();
    let first = first.map(|alarm| alarm.kind);
    let kinds = first.into_iter().chain(rest.into_iter().filter(|kind| Some(*kind) != first));
    let one = |kind: AlarmKind| {
        let layers: BTreeSet<usize> = alarms.iter().filter(|a| a.kind == kind).filter_map(|a| a.layer).collect();
        let layers: Vec<usize> = layers.into_iter().collect();
        actions(kind).iter().map(move |&(action, source)| Advice { kind, layers: layers.clone(), action, source })
    };
    kinds.flat_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_an_action_with_a_source() {
        for kind in AlarmKind::ALL {
            assert!(!actions(kind).is_empty(), "{kind:?}");
            for (action, source) in actions(kind) {
                assert!(action.len() > 20 && source.len() > 10, "{kind:?}");
            }
        }
    }
}
