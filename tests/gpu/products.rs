//! Products without rotation, of every head size and of any number of query heads on a key head.

use crate::device;
use crate::engine::{compare, engine, stream};
use crate::weights::{Case, Kind, Layer, Layout};
use sigmascale::device::scale::{Dtype, LayerInput, ScaleEngine};

tests![
    every_size_is_bounded,
    uneven_heads_are_bounded,
    groups_of_any_size_are_bounded,
    many_products_are_the_same_as_one,
    values_that_are_not_finite_stay_in_their_group,
    zeros_are_no_fallback,
];

fn fixed(name: &str, d: usize, r: usize, heads: (usize, usize)) -> Case {
    Case { rotary: 0, ..Case::new(name, (d, r), heads) }
}

fn hold(cases: impl IntoIterator<Item = Case>) {
    let bad: Vec<String> = cases.into_iter().zip(900..).flat_map(|(case, seed)| compare(&case, seed)).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

fn every_size_is_bounded() {
    let types = [Dtype::Bf16, Dtype::F16, Dtype::F32];
    hold((16..=256).step_by(8).enumerate().map(|(i, r)| {
        let case = fixed("size", 640 - 8 * (i % 3), r, (2, 1));
        Case { dtype: types[i % 3], layer_norm: i % 2 > 0, biases: i % 4 > 1, ..case }
    }));
}

fn uneven_heads_are_bounded() {
    let kinds = [Kind::Spiked, Kind::BadlyScaled, Kind::Cancelling, Kind::ZeroHead, Kind::TwoDirections];
    let sizes = [48, 72, 96, 128, 136, 192, 256];
    hold(kinds.into_iter().flat_map(|kind| sizes.map(|r| Case { kind, ..fixed("uneven", 512, r, (4, 2)) })));
    // Fewer inputs than channels: both Grams are singular.
    hold([64, 72, 96, 136, 200, 256].map(|r| fixed("singular", 56, r, (2, 1))));
    hold([96, 192].map(|r| Case { layout: Layout::Conv1d, biases: true, ..fixed("along channels", 512, r, (4, 2)) }));
}

fn groups_of_any_size_are_bounded() {
    let groups = [(3, 3), (8, 1), (64, 1), (21, 3)];
    hold(
        groups
            .into_iter()
            .flat_map(|heads| [96, 136].map(|r| Case { biases: heads.1 > 1, ..fixed("groups", 208, r, heads) })),
    );
}

fn many_products_are_the_same_as_one() {
    let case = fixed("many", 144, 136, (120, 40));
    let layers: Vec<Layer> = (0..6).map(|i| Layer::new(&case, 950 + i)).collect();
    let inputs: Vec<LayerInput> = layers.iter().map(|layer| layer.input).collect();
    // SAFETY: `layers` holds the memory.
    let all = unsafe { ScaleEngine::new(device(), &inputs, true) }.unwrap();
    let foretold = ScaleEngine::workspace_bytes_for(device(), &inputs, true).unwrap();
    assert_eq!(all.workspace_bytes(), foretold);
    let stream = stream();
    all.plan(&stream).unwrap();
    let heads = all.head_bounds().unwrap().read().unwrap();
    for (i, layer) in layers.iter().enumerate() {
        let alone = engine(layer);
        alone.plan(&stream).unwrap();
        for (h, want) in alone.head_bounds().unwrap().read().unwrap().iter().enumerate() {
            // Grams may be cut in other parts.
            let ratio = heads[case.n_q * i + h].sigma / want.sigma;
            assert!((ratio - 1.0).abs() < 2e-3, "layer {i}, head {h}: {ratio}");
        }
    }
}

fn values_that_are_not_finite_stay_in_their_group() {
    for r in [72, 128, 192, 256] {
        let case = fixed("not finite", 320, r, (6, 2));
        let layer = Layer::broken(&case, 1, Some(f32::NAN));
        let (engine, stream) = (engine(&layer), stream());
        engine.plan(&stream).unwrap();
        for (h, head) in engine.head_bounds().unwrap().read().unwrap().iter().enumerate() {
            assert_eq!(head.rounded.is_nan() && head.descale.is_nan(), h < 3, "{r}: head {h} {head:?}");
        }
        assert_eq!(engine.status().read().unwrap()[0] & 3, 3, "{r}");
    }
}

fn zeros_are_no_fallback() {
    for r in [96, 192] {
        let case = Case { kind: Kind::ZeroHead, ..fixed("zeros", 320, r, (6, 2)) };
        let layer = Layer::new(&case, 1);
        let engine = engine(&layer);
        engine.plan(&stream()).unwrap();
        for (h, head) in engine.head_bounds().unwrap().read().unwrap().iter().enumerate() {
            assert_eq!(head.sigma == 0.0, h >= 3, "{r}: head {h} {head:?}");
        }
        assert_eq!(engine.status().read().unwrap()[0], 0, "{r}");
    }
}
