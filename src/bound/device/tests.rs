//! Bounds of the host keep their values in the layout of device memory.

use super::*;

use crate::model::{NormKind, preset};

/// Two layers of unequal heads, with bounds that f32 holds.
fn case() -> (AttentionSpec, Vec<LayerBounds>) {
    let mut spec = preset("mistral-7b").unwrap();
    spec.layers.truncate(2);
    (spec.layers[0].n_q_heads, spec.layers[0].n_kv_heads) = (4, 2);
    (spec.layers[1].n_q_heads, spec.layers[1].n_kv_heads) = (3, 1);
    let operand = |bound: f64| OperandBound { exact: bound, rounded: bound };
    let layer = |(layer, own): (usize, &LayerSpec)| LayerBounds {
        layer,
        heads: (0..own.n_q_heads)
            .map(|head| {
                let bound = f64::from(0.1f32 + head as f32);
                let rank_aware = Some(f64::from((bound / 7.0) as f32));
                HeadBounds { exact: Some(bound), rounded: Some(3.0 * bound), rank_aware, ..HeadBounds::default() }
            })
            .map(|head| HeadBounds { rounded: head.rounded.map(|bound| f64::from(bound as f32)), ..head })
            .collect(),
        q: (0..own.n_q_heads).map(|head| operand(1.0 + (head / own.group()) as f64)).collect(),
        k: (0..own.n_kv_heads).map(|head| operand(2.5 + head as f64)).collect(),
        v: Some((0..own.n_kv_heads).map(|head| operand(0.5 * head as f64)).collect()),
        m: None,
    };
    let bounds = spec.layers.iter().enumerate().map(layer).collect();
    (spec, bounds)
}

#[test]
fn bounds_of_the_host_come_back_unchanged() {
    let (mut spec, mut bounds) = case();
    // A head of zeros, and values without bounds.
    bounds[1].heads[2] =
        HeadBounds { exact: Some(0.0), rounded: Some(0.0), rank_aware: Some(0.0), ..HeadBounds::default() };
    for tail in [Tail::default(), Tail { seq_len: 7, delta: 0.3, ..Tail::default() }] {
        let (heads, operands) = to_device(&spec, &bounds, BoundKind::RankAware).unwrap();
        assert_eq!(from_device(&spec, &heads, &operands, &tail).unwrap(), bounds);
    }
    spec.norm.kind = NormKind::None;
    bounds.iter_mut().for_each(|layer| layer.v = None);
    let (heads, operands) = to_device(&spec, &bounds, BoundKind::WorstCase).unwrap();
    assert_eq!(operands, [1.0, 2.0, 2.5, 3.5, 0.0, 0.0, 1.0, 2.5, 0.0]);
    assert_eq!(from_device(&spec, &heads, &operands, &Tail::default()).unwrap(), bounds);
}

#[test]
fn bounds_are_rounded_up() {
    let (spec, mut bounds) = case();
    bounds[0].heads[1].rank_aware = Some(0.1);
    bounds[0].q[2].rounded = 2.0 + 1e-12;
    let (heads, operands) = to_device(&spec, &bounds, BoundKind::RankAware).unwrap();
    assert!(f64::from(heads[1].isotropic) > 0.1 && f64::from(heads[1].isotropic.next_down()) < 0.1);
    assert_eq!(operands[1], 2f32.next_up());
}

#[test]
fn incomplete_bounds_are_refused() {
    let (spec, bounds) = case();
    let refused = |change: fn(&mut Vec<LayerBounds>), kind| {
        let mut broken = bounds.clone();
        change(&mut broken);
        to_device(&spec, &broken, kind).unwrap_err()
    };
    let without = refused(|b| b[1].heads[0].rank_aware = None, BoundKind::RankAware);
    assert!(without.is_unsupported() && without.to_string().contains("layer 1: there is no rank-aware"), "{without}");
    assert!(refused(|b| b[0].heads[3].rounded = None, BoundKind::WorstCase).is_unsupported());
    assert!(refused(|b| b.truncate(1), BoundKind::WorstCase).is_mismatch());
    assert!(refused(|b| b.swap(0, 1), BoundKind::WorstCase).is_mismatch());
    assert!(refused(|b| b[0].v = Some(vec![]), BoundKind::WorstCase).is_mismatch());
}
