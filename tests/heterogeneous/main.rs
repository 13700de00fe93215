//! Models whose layers differ in their heads, or of which some have no attention: read from checkpoints against a forward
//! written here from the raw tensors, planned, stressed and saved.

#[path = "../common/mod.rs"]
mod common;
mod policies;

use common::differing::{decilm, draw, openelm, written};
use common::fixtures::{Draw, Tensors, write_checkpoint};
use common::forward::{dot, forward_qkv, to_sphere};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use safetensors::Dtype;
use serde_json::{Value, json};
use sigmascale::bound::Tail;
use sigmascale::calibrate::{Calibration, Options, Profile};
use sigmascale::model::{
    AttentionSpec, Checkpoint, LayerSpec, LayerWeights, Layout, PerLayer, SyntheticModel, SyntheticOptions,
    WeightFiles, preset,
};
use sigmascale::policy::PolicyKind;
use sigmascale::runtime::{Runtime, RuntimeState, STATE_VERSION, Weights, bounds_of};
use sigmascale::serving::ScaleStream;
use std::path::Path;

const R: usize = 16;

fn heads(spec: &AttentionSpec) -> Vec<(usize, usize, usize)> {
    spec.layers.iter().map(|layer| (layer.number, layer.n_q_heads, layer.n_kv_heads)).collect()
}

fn linear(t: &Tensors, name: &str, x: &[f64]) -> Vec<Vec<f64>> {
    let y: Vec<f64> = t.get(&format!("{name}.weight")).chunks(x.len()).map(|row| dot(row, x)).collect();
    y.chunks(R).map(<[f64]>::to_vec).collect()
}

fn rms_norm(x: &[f64], gain: &[f64]) -> Vec<f64> {
    let root = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64).sqrt();
    x.iter().zip(gain).map(|(x, g)| x / root * g).collect()
}

fn rotated(x: &[f64], position: f64) -> Vec<f64> {
    let turn = |c: usize| {
        let angle = position / 10_000f64.powf((2 * (c % (R / 2))) as f64 / R as f64);
        let other = if c < R / 2 { -x[c + R / 2] } else { x[c - R / 2] };
        x[c] * angle.cos() + other * angle.sin()
    };
    (0..R).map(turn).collect()
}

/// q, k and v of the layer with this number, from the raw tensors.
fn reference(config: &Value, t: &Tensors, own: &LayerSpec, hidden: &[f64], position: f64) -> [Vec<Vec<f64>>; 3] {
    let (i, n_q, n_kv) = (own.number, own.n_q_heads, own.n_kv_heads);
    let gain = |name: String| t.get(&format!("{name}.weight")).to_vec();
    let (mut q, mut k, v);
    if config["model_type"] == "openelm" {
        let layer = format!("transformer.layers.{i}");
        let x = rms_norm(hidden, &gain(format!("{layer}.attn_norm")));
        let all = linear(t, &format!("{layer}.attn.qkv_proj"), &x);
        (q, k, v) = (all[..n_q].to_vec(), all[n_q..n_q + n_kv].to_vec(), all[n_q + n_kv..].to_vec());
        for (heads, name) in [(&mut q, "q_norm"), (&mut k, "k_norm")] {
            let gain = gain(format!("{layer}.attn.{name}"));
            heads.iter_mut().for_each(|head| *head = rms_norm(head, &gain));
        }
    } else {
        let layer = format!("model.layers.{i}");
        let x = rms_norm(hidden, &gain(format!("{layer}.input_layernorm")));
        let of = |name: &str| linear(t, &format!("{layer}.self_attn.{name}_proj"), &x);
        (q, k, v) = (of("q"), of("k"), of("v"));
    }
    for head in q.iter_mut().chain(&mut k) {
        *head = rotated(head, position);
    }
    [q, k, v]
}

#[test]
fn each_layer_computes_what_its_own_tensors_say() {
    for config in [openelm(), decilm()] {
        let (_folder, tensors, checkpoint) = written(&config);
        let spec = checkpoint.spec();
        let mut rng = StdRng::seed_from_u64(3);
        for (layer, own) in spec.layers.iter().enumerate() {
            let weights = checkpoint.layer(layer).unwrap();
            let x: Vec<f64> = (0..spec.d_model).map(|_| rng.random_range(-2.0..2.5)).collect();
            let want = reference(&config, &tensors, own, &x, 11.0);
            let got = forward_qkv(spec, &weights, &to_sphere(spec.norm.kind, &x), 11.0);
            for (got, want) in [&got.q, &got.k, &got.v].into_iter().zip(&want) {
                assert_eq!(got.len(), want.len(), "layer {}", own.number);
                for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                    assert!((got - want).abs() <= 1e-10 * (1.0 + want.abs()), "layer {}: {got} {want}", own.number);
                }
            }
        }
    }
    assert_eq!(heads(written(&openelm()).2.spec()), [(0, 4, 2), (1, 6, 3), (2, 3, 1)]);
    let (_folder, _, checkpoint) = written(&decilm());
    assert_eq!(heads(checkpoint.spec()), [(0, 4, 2), (2, 4, 1), (4, 4, 4)]);
    assert!(checkpoint.layer(3).unwrap_err().to_string().contains("layer index 3"));
}

#[test]
fn the_first_release_of_decilm_lists_its_kv_heads() {
    let mut config = decilm();
    let map = config.as_object_mut().unwrap();
    map.remove("block_configs");
    map.insert("model_type".into(), "deci".into());
    map.insert("num_key_value_heads_per_layer".into(), json!([4, 4, 2, 1, 1]));
    let layout = Layout::from_config_json(config.to_string().as_bytes(), Path::new("deci/config.json")).unwrap();
    assert_eq!(heads(layout.spec()), [(0, 4, 4), (1, 4, 4), (2, 4, 2), (3, 4, 1), (4, 4, 1)]);
    assert_eq!(layout.layer(2).unwrap().k.heads, [0, R]);
}

#[test]
fn layers_without_attention_keep_their_numbers_in_names() {
    let layout = Layout::from_config_json(decilm().to_string().as_bytes(), Path::new("nas/config.json")).unwrap();
    let name = |layer| layout.layer(layer).unwrap().q.name;
    assert_eq!([name(0), name(1), name(2)], [0, 2, 4].map(|i| format!("layers.{i}.self_attn.q_proj")));
    assert!(layout.layer(3).is_err());
    let exported = |config: &Value| -> Vec<String> {
        let (_folder, _, checkpoint) = written(config);
        profile(&checkpoint).layer_scales().unwrap().into_iter().map(|scales| scales.module).collect()
    };
    assert_eq!(exported(&decilm()), [0, 2, 4].map(|i| format!("model.layers.{i}.self_attn")));
    assert_eq!(exported(&openelm()), [0, 1, 2].map(|i| format!("transformer.layers.{i}.attn")));
    // The second layer is the first without attention: tensors of the first decide the prefix.
    let mut config = decilm();
    config["block_configs"][0]["attention"]["no_op"] = json!(true);
    let (_folder, _, checkpoint) = written(&config);
    assert_eq!((checkpoint.prefix(), heads(checkpoint.spec())), ("model.", vec![(2, 4, 1), (4, 4, 4)]));
}

fn profile(checkpoint: &Checkpoint) -> Profile {
    let mut calibration = Calibration::new(checkpoint.spec(), Options::default()).unwrap();
    for layer in 0..checkpoint.spec().layers.len() {
        calibration.layer(checkpoint.layer(layer).unwrap()).unwrap();
    }
    calibration.finish()
}

#[test]
fn a_profile_has_rows_of_each_layers_own_length() {
    for config in [openelm(), decilm()] {
        let (_folder, _, checkpoint) = written(&config);
        let json = serde_json::to_value(profile(&checkpoint)).unwrap();
        for (layer, own) in checkpoint.spec().layers.iter().enumerate() {
            let row = &json["layers"][layer];
            assert_eq!((&row["layer"], &row["number"]), (&json!(layer), &json!(own.number)));
            let length = |key: &str| row[key].as_array().unwrap().len();
            assert_eq!((length("heads"), length("logit_descales")), (own.n_q_heads, own.n_q_heads));
            for key in ["q_descale", "k_descale", "v_descale", "o_descale"] {
                assert_eq!(length(key), own.n_kv_heads, "{key}");
            }
        }
        let lists = [("n_q_heads", json!([4, 6, 3])), ("n_kv_heads", json!([2, 3, 1])), ("d_head", json!(R))];
        for (key, openelm) in lists {
            let decilm =
                if key == "n_kv_heads" { json!([2, 1, 4]) } else { json!(if key == "d_head" { R } else { 4 }) };
            let want = if config["model_type"] == "openelm" { openelm } else { decilm };
            assert_eq!(json["model"][key], want, "{key}");
        }
    }
}

/// A few layers of random heads, of a model with or without rotation.
fn random(seed: u64) -> AttentionSpec {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut spec = preset(["mistral-7b", "gpt2-xl", "gemma-2-9b", "qwen3-8b"][seed as usize % 4]).unwrap();
    (spec.d_model, spec.name) = (96, format!("random {seed}"));
    spec.layers.truncate(rng.random_range(2..=5));
    let mut number = 0;
    for layer in &mut spec.layers {
        layer.n_kv_heads = rng.random_range(1..=3);
        layer.n_q_heads = layer.n_kv_heads * rng.random_range(1..=4);
        layer.d_head = 8 * rng.random_range(2..=5);
        layer.softmax_scale = (layer.d_head as f64).sqrt().recip();
        if let Some(rope) = &mut layer.rope {
            rope.rotary_dim = 2 * rng.random_range(1..=layer.d_head / 2);
            rope.inv_freq = Some((0..rope.rotary_dim / 2).map(|b| 0.7f64.powi(b as i32)).collect());
        }
        layer.number = number;
        number += rng.random_range(1..=3);
    }
    spec
}

/// The same layer as the only one of a model.
fn alone(spec: &AttentionSpec, layer: usize) -> AttentionSpec {
    AttentionSpec { layers: vec![LayerSpec { number: 0, ..spec.layers[layer].clone() }], ..spec.clone() }
}

#[test]
fn worst_case_plans_of_a_layer_are_those_of_the_layer_alone() {
    for seed in 0..40 {
        let spec = random(seed);
        let model = SyntheticModel::new(&spec, seed, SyntheticOptions::default()).unwrap();
        let mut runtime = Runtime::new(&spec, PolicyKind::Geometry.into()).unwrap();
        for (layer, own) in spec.layers.iter().enumerate() {
            let drawn = model.layer(layer).unwrap();
            runtime.update_weights(layer, Weights::Changed(drawn.weights())).unwrap();
            let plan = runtime.plan(layer, None).unwrap();
            assert_eq!((plan.logit_descale.len(), plan.operands.k.len()), (own.n_q_heads, own.n_kv_heads));
            let single = alone(&spec, layer);
            let weights = LayerWeights { layer: 0, ..drawn.weights() };
            let bounds = bounds_of(&single, weights.clone(), &Tail::default()).unwrap();
            let kept = runtime.bounds(layer).unwrap();
            let worst_case =
                |heads: &[sigmascale::bound::HeadBounds]| heads.iter().map(|h| h.rounded).collect::<Vec<_>>();
            assert_eq!(worst_case(&kept.heads), worst_case(&bounds.heads), "{} layer {layer}", spec.name);
            let mut lonely = Runtime::new(&single, PolicyKind::Geometry.into()).unwrap();
            lonely.update_weights(0, Weights::Changed(weights)).unwrap();
            let want = lonely.plan(0, None).unwrap();
            assert_eq!((plan.logit_descale, plan.operands), (want.logit_descale, want.operands));
        }
    }
}

#[test]
fn the_union_runs_over_all_heads_of_all_layers() {
    for seed in 0..20 {
        let spec = random(seed);
        let widest = spec.layers.iter().map(|layer| layer.d_head).max().unwrap();
        let all = spec.layers.iter().map(|layer| layer.n_q_heads).sum();
        // As many heads of the widest kind in one layer.
        let mut one = alone(&spec, 0);
        one.layers[0].rope = None;
        one.set_heads(all, 1, widest);
        assert_eq!(Tail::default().c_star(&spec).unwrap(), Tail::default().c_star(&one).unwrap());
        let channels = |spec: &AttentionSpec| {
            let of = |l: &LayerSpec| l.d_head * (l.n_q_heads + 2 * l.n_kv_heads);
            spec.layers.iter().map(of).sum::<usize>()
        };
        let mut flat = alone(&spec, 0);
        flat.layers[0].rope = None;
        flat.set_heads(channels(&spec) - 2, 1, 1);
        assert_eq!(Tail::default().operand(&spec).unwrap(), Tail::default().operand(&flat).unwrap());
        // A narrower head has smaller constants, so the widest covers it.
        let narrow = |r: usize| {
            let mut spec = one.clone();
            spec.set_heads(all, 1, r);
            Tail::default().c_star(&spec).unwrap()
        };
        for r in (16..widest).step_by(8) {
            assert!(narrow(r).c_star < narrow(widest).c_star && narrow(r).c_star_beta < narrow(widest).c_star_beta);
        }
    }
}

#[test]
fn specs_survive_json_and_plain_ones_look_as_before() {
    let plain = preset("smollm3-3b").unwrap();
    let json = serde_json::to_value(&plain).unwrap();
    let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    let mut before = vec![
        "name",
        "family",
        "causal",
        "layers",
        "d_model",
        "n_q_heads",
        "n_kv_heads",
        "d_head",
        "norm",
        "bias",
        "rope",
        "qk_norm",
        "softmax_scale",
        "soft_cap",
        "max_positions",
    ];
    before.sort_unstable();
    assert_eq!(keys, before);
    assert_eq!((&json["layers"], &json["n_q_heads"], &json["d_head"]), (&json!(36), &json!(16), &json!(128)));
    assert_eq!((json["rope"].as_array().unwrap().len(), &json["rope"][3]), (36, &Value::Null));
    assert_eq!(serde_json::from_value::<AttentionSpec>(json.clone()).unwrap(), plain);
    for seed in 0..40 {
        let spec = random(seed);
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<AttentionSpec>(&text).unwrap(), spec, "{text}");
    }
    let refused = |key: &str, value: Value, part: &str| {
        let mut broken = json.clone();
        broken[key] = value;
        let error = serde_json::from_value::<AttentionSpec>(broken).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    refused("n_kv_heads", json!([4, 4]), "`n_kv_heads`");
    refused("numbers", json!([0, 1]), "`numbers`");
    refused("layers", json!(u64::MAX), "`rope`");
    refused("softmax_scale", json!([1.0]), "`softmax_scale`");
    assert_eq!(PerLayer::new([]), PerLayer::Each(vec![]));
}

#[test]
fn a_state_of_heterogeneous_layers_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state");
    for (seed, kind) in (0..).zip(PolicyKind::ALL) {
        // Seeds of models that have every bound.
        let spec = random(4 * seed);
        let config = kind.into();
        let state = Runtime::new(&spec, config).unwrap().state();
        assert!(state.version == STATE_VERSION && !spec.is_plain(), "{kind}");
        state.write(&file).unwrap();
        assert!(std::fs::read(&file).unwrap().starts_with(b"sigmascale-state 1 "));
        let read = RuntimeState::read(&file).unwrap();
        assert_eq!(read, state);
        assert_eq!(Runtime::resume(&spec, config, read.clone()).unwrap().state(), state);
        let mut other = spec.clone();
        other.layers[1].n_q_heads += other.layers[1].n_kv_heads;
        let error = Runtime::resume(&other, config, read.clone()).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("n_q_heads"), "{error}");
        let newer = RuntimeState { version: 2, ..read };
        assert!(Runtime::resume(&spec, config, newer).unwrap_err().to_string().contains("version 2"));
    }
    let plain = Runtime::new(&preset("mistral-7b").unwrap(), PolicyKind::DelayedTe.into()).unwrap().state();
    assert_eq!((plain.version, plain.policy.version), (STATE_VERSION, 1));
    let json = serde_json::to_value(&plain.policy.shape).unwrap();
    assert_eq!(json, json!({"layers": 32, "n_q_heads": 32, "n_kv_heads": 8}));
}

#[test]
fn what_does_not_fit_is_named() {
    let says = |config: Value, part: &str| {
        let bytes = config.to_string();
        let error = AttentionSpec::from_config_json(bytes.as_bytes(), Path::new("m/config.json")).unwrap_err();
        assert!((error.is_format() || error.is_unsupported()) && error.to_string().contains(part), "{error}");
    };
    let with = |mut config: Value, key: &str, value: Value| {
        config[key] = value;
        config
    };
    says(with(openelm(), "num_kv_heads", json!([2, 3])), "`num_kv_heads`");
    says(with(openelm(), "num_kv_heads", json!([2, 4, 1])), "layer 1");
    says(with(openelm(), "num_query_heads", json!([4, 0, 3])), "`num_query_heads`");
    says(with(openelm(), "num_query_heads", Value::Null), "`num_query_heads`");
    says(with(openelm(), "normalization_layer_name", json!("layer_norm")), "RMSNorm");
    let block = |edit: &dyn Fn(&mut Value)| {
        let mut config = decilm();
        edit(&mut config["block_configs"]);
        config
    };
    says(block(&|b| drop(b.as_array_mut().unwrap().pop())), "`block_configs`");
    says(block(&|b| b[2] = json!({})), "block 2: `attention`");
    says(block(&|b| b[2]["attention"]["n_heads_in_group"] = json!(3)), "block 2");
    says(block(&|b| b[2]["attention"]["n_heads_in_group"] = json!("x")), "config.json, block 2: `n_heads_in_group`");
    says(block(&|b| b[2]["attention"]["n_heads_in_group"] = Value::Null), "block 2: `n_heads_in_group`");
    says(block(&|b| b[2]["attention"]["no_op"] = json!("yes")), "block 2");
    says(block(&|b| b[4]["attention"]["sparsify"] = json!(["q"])), "block 4");
    says(block(&|b| b[4]["attention"]["mamba"] = json!({"state_dim": 8})), "state-space");
    says(block(&|b| b[3]["parallel_blocks"] = json!([{}])), "block 3: `parallel_blocks`");
    says(with(decilm(), "position_embedding_type", json!("rope_llama4")), "`position_embedding_type`");
    let none = |b: &mut Value| b.as_array_mut().unwrap().iter_mut().for_each(|b| b["attention"]["no_op"] = json!(true));
    says(block(&none), "no layer has attention");
    says(with(decilm(), "block_configs", Value::Null), "`num_key_value_heads_per_layer`");
    // Known, and beyond what can be bounded here.
    let gemma = |extra: Value| {
        let mut config = json!({"model_type": "gemma3n_text", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": R});
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    says(gemma(json!({})), "`num_kv_shared_layers`");
    let kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"];
    says(gemma(json!({"num_kv_shared_layers": 1, "layer_types": kinds})), "layer");
    says(gemma(json!({"head_dim": 512})), "head dimension 512");
    says(json!({"model_type": "mimo_v2_flash"}), "narrower than its keys");
    // A missing tensor is named by the model's own number.
    let (folder, mut tensors) = (tempfile::tempdir().unwrap(), draw(&decilm()));
    tensors.0.remove("model.layers.2.self_attn.v_proj.weight");
    write_checkpoint(folder.path(), &decilm(), &tensors, Dtype::BF16, 1);
    let error = Checkpoint::open(folder.path()).unwrap().layer(1).unwrap_err().to_string();
    assert!(error.contains("`model.layers.2.self_attn.v_proj.weight`"), "{error}");
    // A call with another layer's heads is refused.
    let spec = random(0);
    let mut runtime = Runtime::new(&spec, PolicyKind::Geometry.into()).unwrap();
    let model = SyntheticModel::new(&spec, 1, SyntheticOptions::default()).unwrap();
    let other = (1..spec.layers.len()).find(|&i| spec.layers[i].n_q_heads != spec.layers[0].n_q_heads).unwrap();
    let foreign = model.layer(other).unwrap();
    let weights = LayerWeights { layer: 0, ..foreign.weights() };
    assert!(runtime.update_weights(0, Weights::Changed(weights)).unwrap_err().is_mismatch());
}

/// Gemma 4: full layers have wider heads, their own number of key heads and values made of the keys' projection, and the
/// later pairs of a full layer's head turn by nothing; the last layers take the keys and values of the last of their kind.
fn gemma_4() -> (Value, Tensors) {
    let config = json!({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "hidden_size": 64,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": R, "global_head_dim": 2 * R,
        "attention_k_eq_v": true, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2, "max_position_embeddings": 256,
        "use_bidirectional_attention": "vision",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
            "full_attention"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}}}});
    let prefix = "model.language_model.layers";
    let mut t = Draw::new(4);
    for i in 0..6 {
        let (full, shared) = (i % 2 == 1, i >= 4);
        let (r, n_kv) = if full { (2 * R, 1) } else { (R, 2) };
        let attn = format!("{prefix}.{i}.self_attn");
        t.add(format!("{prefix}.{i}.input_layernorm.weight"), &[64], 1.0, 0.3);
        t.linear(&format!("{attn}.q_proj"), 4 * r, 64, None);
        t.add(format!("{attn}.q_norm.weight"), &[r], 1.0, 0.3);
        if !shared {
            t.linear(&format!("{attn}.k_proj"), n_kv * r, 64, None);
            t.add(format!("{attn}.k_norm.weight"), &[r], 1.0, 0.3);
            if !full {
                t.linear(&format!("{attn}.v_proj"), n_kv * r, 64, None);
            }
        }
    }
    (config, t.tensors)
}

/// Scales of streamed weights are those of a calibration where layers differ, share keys or have no attention.
#[test]
fn a_stream_is_a_calibration() {
    let mut rng = StdRng::seed_from_u64(9);
    let drawn = |config: Value| (config.clone(), draw(&config));
    for (config, t) in [drawn(openelm()), drawn(decilm()), gemma_4()] {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &config, &t, Dtype::BF16, 1);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut calibration = Calibration::new(checkpoint.spec(), Options::default()).unwrap();
        for layer in 0..checkpoint.spec().layers.len() {
            calibration.layer(checkpoint.layer(layer).unwrap()).unwrap();
        }
        let expected = calibration.finish().layer_scales().unwrap();
        let files = WeightFiles::open(folder.path()).unwrap();
        let mut tensors: Vec<_> = files.tensors().collect();
        let names: Vec<String> = tensors.iter().map(|tensor| tensor.name.to_owned()).collect();
        let mut stream = ScaleStream::new(config.to_string().as_bytes(), Path::new("config.json"), &names).unwrap();
        for _ in 0..8 {
            tensors.shuffle(&mut rng);
            let mut found = vec![];
            for tensor in &tensors {
                let bytes = tensor.bytes.to_vec();
                found.extend(stream.push(tensor.name, tensor.dtype, tensor.shape, bytes).unwrap());
            }
            stream.finish(false).unwrap();
            found.sort_by_key(|layer| layer.layer);
            assert_eq!(found, expected, "{}", config["model_type"]);
            assert_eq!(stream.held_bytes(), 0);
        }
    }
}

#[test]
fn gemma_4_has_global_heads_and_shares_keys() {
    let prefix = "model.language_model.layers";
    let (config, t) = gemma_4();
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config, &t, Dtype::BF16, 1);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let spec = checkpoint.spec();
    let shape = |layer: &LayerSpec| (layer.n_kv_heads, layer.d_head, layer.kv_source);
    let shapes: Vec<_> = spec.layers.iter().map(shape).collect();
    let (narrow, wide) = ((2, R, None), (1, 2 * R, None));
    assert_eq!(shapes, [narrow, wide, narrow, wide, (2, R, Some(2)), (1, 2 * R, Some(3))]);
    assert!(spec.causal && spec.layers.iter().all(|layer| layer.softmax_scale == 1.0));
    let mut rng = StdRng::seed_from_u64(3);
    let position = 7.0;
    for (i, own) in spec.layers.iter().enumerate() {
        let (r, source) = (own.d_head, own.kv_source.unwrap_or(i));
        let hidden: Vec<f64> = (0..64).map(|_| rng.random_range(-2.0..2.5)).collect();
        let x = rms_norm(&hidden, t.get(&format!("{prefix}.{i}.input_layernorm.weight")));
        let project = |layer: usize, name: &str| -> Vec<Vec<f64>> {
            let weight = t.get(&format!("{prefix}.{layer}.self_attn.{name}_proj.weight"));
            let y: Vec<f64> = weight.chunks(64).map(|row| dot(row, &x)).collect();
            y.chunks(r).map(<[f64]>::to_vec).collect()
        };
        let gain = |layer: usize, name: &str| t.get(&format!("{prefix}.{layer}.self_attn.{name}_norm.weight"));
        let turned = |x: Vec<f64>| -> Vec<f64> {
            let (base, rotating) = if i % 2 == 1 { (1e6f64, r / 8) } else { (1e4, r / 2) };
            let channel = |c: usize| {
                let b = c % (r / 2);
                let angle = if b < rotating { position * base.powf(-2.0 * b as f64 / r as f64) } else { 0.0 };
                let other = if c < r / 2 { -x[c + r / 2] } else { x[c - r / 2] };
                x[c] * angle.cos() + other * angle.sin()
            };
            (0..r).map(channel).collect()
        };
        let normed =
            |heads: Vec<Vec<f64>>, gain: &[f64]| heads.iter().map(|head| rms_norm(head, gain)).collect::<Vec<_>>();
        let q: Vec<_> = normed(project(i, "q"), gain(i, "q")).into_iter().map(turned).collect();
        let k: Vec<_> = normed(project(source, "k"), gain(source, "k")).into_iter().map(turned).collect();
        let v = normed(project(source, if i % 2 == 1 { "k" } else { "v" }), &vec![1.0; r]);
        let weights = checkpoint.layer(i).unwrap();
        let got = forward_qkv(spec, &weights, &to_sphere(spec.norm.kind, &hidden), position);
        for (got, want) in [(&got.q, &q), (&got.k, &k), (&got.v, &v)] {
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                assert!((got - want).abs() <= 1e-10 * (1.0 + want.abs()), "layer {i}: {got} {want}");
            }
        }
        let bounds = bounds_of(spec, weights, &Tail::default()).unwrap();
        assert_eq!(bounds.v.unwrap()[0].exact, (r as f64).sqrt());
        // Keys that are read are those that were cached.
        let theirs = bounds_of(spec, checkpoint.layer(source).unwrap(), &Tail::default()).unwrap();
        assert_eq!(bounds.k, theirs.k);
    }
    assert!(sigmascale::bound::check_device(spec).unwrap_err().is_unsupported());
    let saved: AttentionSpec = serde_json::from_value(serde_json::to_value(spec).unwrap()).unwrap();
    assert_eq!(saved.layers, spec.layers);
}
