//! Bounds of q and k that are normalised after the projection, against the CPU's f64.

use crate::device;
use crate::weights::{Case, GROWING, Layer};
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sigmascale::Descale;
use sigmascale::bound::{E4M3_MAX, LayerBounds, Tail};
use sigmascale::cuda::{Buffer, DevicePtr};
use sigmascale::device::policy::{BoundSource, PolicyEngine};
use sigmascale::device::scale::{DeviceWeights, Dtype, LayerInput, QkNormInput, QkNormSide, ScaleEngine};
use sigmascale::device::{DeviceBounds, scale_engine};
use sigmascale::model::{AttentionSpec, GainForm, LayerSpec, LayerWeights, NormKind, NormVectors, QkNorm, QkNormScope};
use sigmascale::plan::DEFAULT_ETA;
use sigmascale::policy::{PolicyConfig, PolicyKind};
use sigmascale::runtime::bounds_of;
use std::sync::Arc;

tests![
    bounds_are_the_cpus,
    layers_may_rotate_differently,
    gains_are_read_anew_also_by_a_graph,
    vectors_are_read_in_their_own_type,
    gains_that_are_not_finite_are_flagged,
    policies_plan_from_gains,
    broken_norms_are_refused,
];

/// How far a bound may lie above f64, relative: it is rounded to f32 once or twice. Nowhere below.
const ABOVE: f64 = 3e-7;

#[derive(Clone, Copy)]
pub struct Form {
    scope: QkNormScope,
    gain: GainForm,
    shift: bool,
    /// Values of every head's own.
    per_head: bool,
    input_norm: bool,
    /// Behind the rotation.
    behind: bool,
}

pub const PLAIN: Form = Form {
    scope: QkNormScope::PerHead,
    gain: GainForm::Plain,
    shift: false,
    per_head: false,
    input_norm: true,
    behind: false,
};

fn forms() -> Vec<Form> {
    vec![
        PLAIN,
        Form { gain: GainForm::OnePlus, ..PLAIN },
        Form { gain: GainForm::Unit, ..PLAIN },
        Form { per_head: true, shift: true, ..PLAIN },
        Form { shift: true, ..PLAIN },
        Form { behind: true, ..PLAIN },
        Form { scope: QkNormScope::Joint, per_head: true, input_norm: false, ..PLAIN },
        Form { scope: QkNormScope::Joint, ..PLAIN },
    ]
}

fn shapes() -> Vec<Case> {
    let case = Case::new;
    vec![
        case("qwen3", (256, 128), (8, 2)),
        Case { interleaved: true, biases: true, ..case("interleaved", (200, 64), (6, 3)) },
        Case { rotary: 16, rope_factor: 1.3, ..case("partial", (96, 80), (3, 1)) },
        Case { rotary: 0, ..case("fixed", (64, 24), (5, 5)) },
        Case { rope_factor: 1.25, ..case("wide", (300, 256), (4, 4)) },
        Case { temperature: Some(GROWING), ..case("grows", (128, 64), (6, 2)) },
        Case { temperature: Some(GROWING), rotary: 0, ..case("grows, fixed", (96, 32), (3, 3)) },
        case("many heads", (64, 16), (70, 35)),
    ]
}

/// A layer with norms of q and k.
pub struct Normalised {
    layer: Layer,
    spec: AttentionSpec,
    vectors: [NormVectors; 2],
}

impl Normalised {
    pub fn new(case: &Case, form: Form, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut spec = case.spec();
        spec.qk_norm = Some(QkNorm {
            scope: form.scope,
            kind: NormKind::RmsNorm,
            gain: form.gain,
            shift: form.shift,
            behind_rotation: form.behind,
            rotated_only: false,
        });
        if !form.input_norm {
            spec.norm.kind = NormKind::None;
            spec.norm.gain = GainForm::Unit;
        }
        let vectors = [case.n_q, case.n_kv].map(|heads| {
            let n = if form.per_head { heads * case.r } else { case.r };
            let mut values = |spread: f32| -> Vec<f64> {
                (0..n).map(|_| f64::from(rng.random_range(-1.0..1.0f32) * spread * 4.0)).collect()
            };
            NormVectors { gain: values(1.0), shift: form.shift.then(|| values(0.3)) }
        });
        Self { layer: Layer::new(case, seed), spec, vectors }
    }

    pub fn spec(&self) -> &AttentionSpec {
        &self.spec
    }

    pub fn weights(&self) -> LayerWeights<'_> {
        let [q, k] = self.vectors.clone();
        let mut weights = self.layer.weights();
        (weights.q_norm, weights.k_norm) = (Some(q), Some(k));
        if self.spec.norm.kind == NormKind::None {
            (weights.norm_gain, weights.norm_shift) = (None, None);
        }
        weights
    }

    pub fn truth(&self) -> LayerBounds {
        bounds_of(&self.spec, self.weights(), &Tail::default()).unwrap()
    }

    fn engine(&self) -> ScaleEngine {
        scale_engine(device(), &self.spec, &[self.weights()]).unwrap()
    }
}

fn read(spec: &AttentionSpec, engine: &ScaleEngine, layer: usize) -> LayerBounds {
    let heads = engine.head_bounds().unwrap().read().unwrap();
    let operands = engine.operand_bounds().read().unwrap();
    let (n_q, n_kv) = (spec.layers[layer].n_q_heads, spec.layers[layer].n_kv_heads);
    let heads = &heads[layer * n_q..][..n_q];
    LayerBounds::from_device(spec, layer, heads, &operands[layer * 3 * n_kv..][..3 * n_kv], &Tail::default()).unwrap()
}

#[track_caller]
fn compare(name: &str, got: &LayerBounds, want: &LayerBounds) {
    let check = |what: &str, got: f64, want: f64, above: f64| {
        let ratio = got / want;
        assert!((1.0..=1.0 + above).contains(&ratio), "{name}: {what} is {ratio:.9} of f64");
    };
    let group = want.q.len() / want.k.len();
    for (h, (got, want)) in got.heads.iter().zip(&want.heads).enumerate() {
        check(&format!("exact {h}"), got.exact.unwrap(), want.exact.unwrap(), ABOVE);
        // The steps of E4M3 are those of rounded descales.
        check(&format!("rounded {h}"), got.rounded.unwrap(), want.rounded.unwrap(), 2.0 * ABOVE);
        assert!(got.rank_aware.is_none() && want.rank_aware.is_none());
    }
    for (h, got) in got.q.iter().enumerate() {
        let heads = &want.q[h / group * group..][..group];
        check(&format!("q {h}"), got.rounded, heads.iter().map(|b| b.rounded).fold(0.0, f64::max), ABOVE);
    }
    for (h, (got, want)) in got.k.iter().zip(&want.k).enumerate() {
        check(&format!("k {h}"), got.rounded, want.rounded, ABOVE);
    }
    assert_eq!(got.v.is_some(), want.v.is_some());
    for (h, (got, want)) in got.v.iter().flatten().zip(want.v.iter().flatten()).enumerate() {
        check(&format!("v {h}"), got.rounded, want.rounded, 1e-5);
    }
}

fn bounds_are_the_cpus() {
    let (stream, lone) = (device().stream().unwrap(), DeviceBounds::open().unwrap());
    for (i, case) in shapes().iter().enumerate() {
        for (j, form) in forms().into_iter().enumerate() {
            let name = format!("{} {j}", case.name);
            let layer = Normalised::new(case, form, (10 * i + j) as u64);
            let (engine, truth) = (layer.engine(), layer.truth());
            engine.plan(&stream).unwrap();
            compare(&name, &read(&layer.spec, &engine, 0), &truth);
            assert_eq!(engine.status().read().unwrap()[0], 0);
            compare(&name, &lone.layer(&layer.spec, layer.weights(), &Tail::default()).unwrap(), &truth);
            // The descales are those of the bounds, and the largest of each tensor stands apart.
            let (descales, bounds) = (engine.head_descales().read().unwrap(), engine.operand_bounds().read().unwrap());
            let cover = |bound: f64, target: f64| Descale::covering(bound, target).unwrap().get();
            for (descale, bound) in descales.iter().zip(&bounds).take(2 * case.n_kv) {
                assert_eq!(*descale, cover(f64::from(*bound), E4M3_MAX));
            }
            for (which, row) in descales.chunks(case.n_kv).enumerate() {
                assert_eq!(engine.tensor_descales().read().unwrap()[which], row.iter().copied().fold(0.0, f32::max));
            }
            for head in engine.head_bounds().unwrap().read().unwrap() {
                assert_eq!(head.descale, cover(f64::from(head.rounded), DEFAULT_ETA * E4M3_MAX));
            }
            // Operand descales alone are the same.
            engine.descales(&stream).unwrap();
            assert_eq!(engine.head_descales().read().unwrap(), descales);
        }
    }
}

fn layers_may_rotate_differently() {
    let case = Case::new("mixed", (128, 64), (4, 2));
    let layer = Normalised::new(&case, PLAIN, 5);
    let mut spec = layer.spec.clone();
    let first = spec.layers[0].clone();
    let mut turned = first.rope.clone().unwrap();
    turned.attention_factor = 1.5;
    let ropes = [first.rope.clone(), None, Some(turned)].into_iter().enumerate();
    spec.layers = ropes
        .map(|(number, rope)| LayerSpec { number, rope, softmax_scale: 0.1 * (number + 1) as f64, ..first.clone() })
        .collect();
    let weights: Vec<_> = (0..3).map(|i| LayerWeights { layer: i, ..layer.weights() }).collect();
    let engine = scale_engine(device(), &spec, &weights).unwrap();
    engine.plan(&device().stream().unwrap()).unwrap();
    for (i, weights) in weights.into_iter().enumerate() {
        compare(&format!("layer {i}"), &read(&spec, &engine, i), &bounds_of(&spec, weights, &Tail::default()).unwrap());
    }
}

fn upload(values: &[f64], dtype: Dtype, memory: &mut Vec<Buffer<u8>>) -> DevicePtr {
    let bytes: Vec<u8> = match dtype {
        Dtype::Bf16 => values.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
    };
    memory.push(device().upload(&bytes).unwrap());
    memory.last().unwrap().ptr()
}

/// The layer over its own device memory, and the buffer of q's gains.
pub fn borrowed(layer: &Normalised, dtype: Dtype) -> (LayerInput, Vec<Buffer<u8>>) {
    let (case, mut memory) = (&layer.layer.case, vec![]);
    let mut side = |vectors: &NormVectors| QkNormSide {
        gain: upload(&vectors.gain, dtype, &mut memory),
        shift: vectors.shift.as_ref().map_or(DevicePtr::NULL, |shift| upload(shift, dtype, &mut memory)),
        per_head: vectors.gain.len() != case.r,
        channels: case.r as u32,
    };
    let (q, k) = (side(&layer.vectors[0]), side(&layer.vectors[1]));
    let spec = layer.spec();
    let rounding_share = spec.rounding_share(&spec.layers[0], layer.layer.weights().stored());
    let qk_norm = Some(QkNormInput { q, k, dtype, gain_offset: 0.0 });
    (LayerInput { qk_norm, rounding_share, ..layer.layer.input }, memory)
}

fn gains_are_read_anew_also_by_a_graph() {
    let mut layer = Normalised::new(&Case::new("update", (128, 64), (4, 2)), PLAIN, 9);
    let (input, memory) = borrowed(&layer, Dtype::F32);
    // SAFETY: `layer` and `memory` hold what the input names.
    let engine = unsafe { ScaleEngine::new(device(), &[input], true) }.unwrap();
    let stream = device().stream().unwrap();
    let graph = stream.capture(|s| engine.plan(s)).unwrap();
    graph.launch().unwrap();
    stream.synchronize().unwrap();
    compare("before", &read(&layer.spec, &engine, 0), &layer.truth());
    layer.vectors[0].gain.iter_mut().for_each(|gain| *gain *= -3.0);
    let bytes: Vec<u8> = layer.vectors[0].gain.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
    memory[0].write(&bytes).unwrap();
    graph.launch().unwrap();
    stream.synchronize().unwrap();
    compare("after", &read(&layer.spec, &engine, 0), &layer.truth());
}

fn vectors_are_read_in_their_own_type() {
    let case = Case::new("bf16", (128, 64), (4, 2));
    let mut layer = Normalised::new(&case, Form { per_head: true, shift: true, ..PLAIN }, 11);
    for vectors in &mut layer.vectors {
        let round = |values: &mut Vec<f64>| values.iter_mut().for_each(|x| *x = bf16::from_f64(*x).to_f64());
        round(&mut vectors.gain);
        vectors.shift.iter_mut().for_each(round);
    }
    let (input, _memory) = borrowed(&layer, Dtype::Bf16);
    // SAFETY: `layer` and `_memory` hold what the input names.
    let engine = unsafe { ScaleEngine::new(device(), &[input], false) }.unwrap();
    engine.plan(&device().stream().unwrap()).unwrap();
    compare("bf16", &read(&layer.spec, &engine, 0), &layer.truth());
}

fn gains_that_are_not_finite_are_flagged() {
    let case = Case::new("nan", (128, 64), (4, 2));
    let layer = Normalised::new(&case, Form { per_head: true, ..PLAIN }, 3);
    let (input, memory) = borrowed(&layer, Dtype::F32);
    let mut gains = layer.vectors[1].gain.iter().map(|x| *x as f32).collect::<Vec<_>>();
    gains[70] = f32::NAN;
    memory[1].write(bytemuck::cast_slice(&gains)).unwrap();
    // SAFETY: as above.
    let engine = unsafe { ScaleEngine::new(device(), &[input], true) }.unwrap();
    let stream = device().stream().unwrap();
    engine.plan(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(engine.status().read().unwrap()[0], 3);
    // Key head 1 holds it, which query heads 2 and 3 read.
    for (h, head) in engine.head_bounds().unwrap().read().unwrap().iter().enumerate() {
        assert_eq!(head.rounded.is_nan() && head.descale.is_nan() && head.exact.is_nan(), h >= 2, "{h} {head:?}");
    }
    for (i, descale) in engine.head_descales().read().unwrap().iter().enumerate() {
        assert_eq!(descale.is_nan(), i == 3, "descale {i} is {descale}");
    }
}

fn policies_plan_from_gains() {
    let layer = Normalised::new(&Case::new("plan", (128, 64), (4, 2)), PLAIN, 21);
    let plan = |kind: PolicyKind| {
        let bounds = BoundSource::Weights(Box::new(layer.engine()));
        PolicyEngine::new(device(), &layer.spec, PolicyConfig::from(kind), &Tail::default(), bounds)
    };
    let stream = device().stream().unwrap();
    let geometry = plan(PolicyKind::Geometry).unwrap();
    geometry.refresh(&stream).unwrap();
    stream.synchronize().unwrap();
    compare("plan", &geometry.read_bounds().unwrap()[0], &layer.truth());
    assert!(plan(PolicyKind::GeometryCStar).unwrap_err().is_unsupported());
}

fn broken_norms_are_refused() {
    let layer = Normalised::new(&Case::new("good", (128, 64), (4, 2)), PLAIN, 1);
    let (input, memory) = borrowed(&layer, Dtype::F32);
    let refused = |change: fn(&mut LayerInput)| {
        let mut second = input;
        change(&mut second);
        // SAFETY: refused before anything is read.
        unsafe { ScaleEngine::new(device(), &[input, second], true) }.unwrap_err().to_string()
    };
    assert!(refused(|l| l.qk_norm.as_mut().unwrap().k.channels = 0).contains("layer 1: a norm of q and k needs"));
    // Vectors that do not lie in the memory given with them.
    let mut memory: Vec<Buffer<u8>> = memory.into_iter().chain(Layer::new(&layer.layer.case, 1).memory).collect();
    let mut long = LayerInput { v: None, gain: DevicePtr::NULL, ..input };
    long.qk_norm.as_mut().unwrap().q.per_head = true;
    assert!(DeviceWeights::new(vec![long], std::mem::take(&mut memory)).unwrap_err().is_argument());
    let (input, memory) = borrowed(&layer, Dtype::F32);
    let sound = LayerInput { v: None, gain: DevicePtr::NULL, ..input };
    let weights = DeviceWeights::new(vec![sound], memory).unwrap();
    let engine = ScaleEngine::over(device(), &Arc::new(weights), true).unwrap();
    engine.plan(&device().stream().unwrap()).unwrap();
    assert_eq!(engine.status().read().unwrap()[0], 0);
}
