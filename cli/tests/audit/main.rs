//! The audit never says safe where a decision was not seen: one test for each kind of input that decides, in the library and in
//! the command.

#[path = "../../../tests/common/mod.rs"]
mod common;
mod forged;
mod model;
mod readers;
#[path = "../run/mod.rs"]
mod run;

use common::cases::{Case, cases, draw, grouped, merge};
use model::{Model, NAMES, audit, compressed, copy, entry, scheme};
use run::{failure, sigmascale, text};
use safetensors::Dtype;
use serde_json::{Value, json};
use sigmascale::model::Checkpoint;
use sigmascale::serving::{Engine, KvFormat, Outcome, ScaleVerdict, Serving, SkipLayers, verify};
use tempfile::TempDir;

#[test]
fn what_covers_is_safe() {
    let mut model = Model::llama();
    model.cover(Engine::Vllm, NAMES);
    for engine in [Engine::Vllm, Engine::Sglang] {
        let audit = model.audit(engine);
        assert!(audit.safe && audit.outcome == Outcome::Safe && audit.unjudged.is_empty(), "{audit:?}");
    }
}

/// A layer that reads another layer's cache has to read it with the scale that it was written with.
#[test]
fn a_shared_cache_has_one_scale() {
    let shared = || Model::named("gemma4_unified", json!({"quantization_config": compressed()}));
    let mut model = shared();
    model.cover(Engine::Vllm, NAMES);
    let sources: Vec<(usize, usize)> = {
        let checkpoint = Checkpoint::open(model.folder().path()).unwrap();
        let own = checkpoint.spec().layers.iter().filter_map(|layer| Some((layer.number, layer.kv_source?)));
        own.collect()
    };
    assert!(!sources.is_empty());
    let value = |model: &Model, layer: usize, name: &str| {
        model.tensors.get(&format!("{}layers.{layer}.self_attn.{name}", model.case.prefix))[0]
    };
    // The same in both: safe.
    for (own, source) in &sources {
        for name in ["k_scale", "v_scale"] {
            let both = value(&model, *own, name).max(value(&model, *source, name));
            model.scale(*own, name, both);
            model.scale(*source, name, both);
        }
    }
    assert!(model.audit(Engine::Vllm).safe, "{:?}", model.audit(Engine::Vllm));
    let (own, source) = sources[0];
    // Another one in the reader.
    let mut other = Model { case: copy(&model.case), tensors: model.tensors.clone() };
    let larger = 1.5 * value(&model, own, "k_scale");
    other.scale(own, "k_scale", larger);
    let audit = other.audit(Engine::Vllm);
    assert_eq!(entry(&audit, own, 'k').verdict, ScaleVerdict::Mismatch);
    assert!((entry(&audit, own, 'k').factor.unwrap() - 1.5).abs() < 1e-6 && audit.outcome == Outcome::NotSafe);
    // In the owner alone: the reader takes 1.0.
    let mut other = Model { case: copy(&model.case), tensors: model.tensors.clone() };
    for name in NAMES {
        other.tensors.0.remove(&format!("{}layers.{own}.self_attn.{name}", model.case.prefix));
    }
    let audit = other.audit(Engine::Vllm);
    for operand in ['k', 'v'] {
        assert_eq!(entry(&audit, own, operand).verdict, ScaleVerdict::Mismatch, "{audit:?}");
        assert!(entry(&audit, own, operand).why.contains(&format!("layer {source}")));
    }
    // Of two only one in the model's type.
    let serving = Serving { skip: SkipLayers::parse([own.to_string()]).unwrap(), ..Serving::default() };
    let audit = model.audit_with(Engine::Vllm, &serving);
    assert_eq!(entry(&audit, own, 'k').verdict, ScaleVerdict::Mismatch);
}

/// What no table tells is unknown, and what one engine loads is not what another does.
#[test]
fn scales_that_an_engine_loads_are_judged_whatever_the_family() {
    for (name, rest, method) in [
        ("qwen3_5", "k_scale", compressed()),
        ("qwen3_5", "k_proj.k_scale", compressed()),
        ("gemma4_unified", "k_scale", compressed()),
        ("granitemoehybrid", "attn.k_scale", compressed()),
        ("qwen3_next", "k_proj.k_scale", compressed()),
        ("olmo2", "attn.k_scale", compressed()),
    ] {
        let case = cases().into_iter().find(|case| case.name == name).unwrap();
        let mut model =
            Model::new(Case { config: merge(case.config.clone(), json!({"quantization_config": method})), ..case });
        let layers = model.case.attention.clone();
        layers.iter().for_each(|layer| model.scale(*layer, rest, 0.0005));
        let audit = model.audit(Engine::Sglang);
        let found = entry(&audit, layers[0], 'k');
        assert_eq!((found.verdict, found.stored), (ScaleVerdict::Overflow, Some(0.0005)), "{name} {rest}: {found:?}");
        assert!(found.factor.unwrap() > 2.0 && audit.outcome == Outcome::NotSafe);
    }
    // A family that no row has: unknown where something is stored, and 1.0 where nothing is.
    let mut model = Model::named("nanochat", json!({"quantization_config": compressed()}));
    assert!(model.audit(Engine::Sglang).safe);
    model.scale(0, "k_scale", 0.5);
    let audit = model.audit(Engine::Sglang);
    assert_eq!((entry(&audit, 0, 'k').verdict, audit.outcome), (ScaleVerdict::Unknown, Outcome::Unknown), "{audit:?}");
}

#[test]
fn names_are_read_by_the_rules_of_the_engine() {
    // Written with another name than it is read by.
    let mut model =
        Model::new(grouped("gpt_oss", "llama", json!({"attention_bias": false, "quantization_config": compressed()})));
    for layer in 0..4 {
        model.scale(layer, "k_scale", 0.0005);
    }
    let audit = model.audit(Engine::Vllm);
    assert_eq!(entry(&audit, 0, 'k').verdict, ScaleVerdict::Overflow);
    // A name that is not read is not taken for one that is.
    let mut model = Model::named("nemotron_h", json!({"quantization_config": compressed()}));
    let layer = model.case.attention[0];
    model.set(format!("{}layers.{layer}.mixer.qkv_proj.k_scale", model.case.prefix), 0.5);
    let audit = model.audit(Engine::Vllm);
    assert_eq!(entry(&audit, layer, 'k').verdict, ScaleVerdict::NotLoaded, "{audit:?}");
}

/// vLLM turns the temperature of Llama 4 on by the longest sequence, whatever the config says.
#[test]
fn what_an_engine_computes_otherwise_than_the_config_is_in_its_bounds() {
    let model = |positions: usize, tuned: bool| {
        Model::new(grouped(
            "llama4_text",
            "llama4 normed",
            json!({"no_rope_layer_interval": 2, "attn_temperature_tuning": tuned, "attn_scale": 0.1, "floor_scale": 8192,
                "max_position_embeddings": positions, "quantization_config": compressed()}),
        ))
    };
    let needed = |model: &Model, engine: Engine, context: Option<usize>| {
        let audit = model.audit_with(engine, &Serving { context, ..Serving::default() });
        audit.layers.iter().map(|layer| layer.q[0].needed.unwrap()).fold(0.0, f32::max)
    };
    let factor = 1.0 + 0.1 * f64::from(1.0 + (262_144f32 / 8192.0)).ln();
    let long = model(262_144, false);
    let ratio = needed(&long, Engine::Vllm, None) / needed(&long, Engine::Sglang, None);
    assert!((f64::from(ratio) - factor).abs() < 1e-4, "{ratio} {factor}");
    // The longest sequence of the server decides, not the config.
    assert_eq!(needed(&long, Engine::Vllm, Some(32768)), needed(&long, Engine::Sglang, None));
    let short = model(8192, false);
    assert_eq!(needed(&short, Engine::Vllm, None), needed(&short, Engine::Sglang, None));
    assert!(needed(&short, Engine::Vllm, Some(262_144)) > 1.3 * needed(&short, Engine::Vllm, None));
    // A config that tunes is not read by vLLM either: up to 32768 it is off.
    assert!(needed(&model(8192, true), Engine::Sglang, None) >= needed(&model(8192, true), Engine::Vllm, None));
    // The generation config has the last word.
    let folder = long.folder();
    std::fs::write(folder.path().join("generation_config.json"), r#"{"attn_temperature_tuning": false}"#).unwrap();
    let audit = audit(folder.path(), Engine::Vllm, &Serving::default());
    let largest = audit.layers.iter().map(|layer| layer.q[0].needed.unwrap()).fold(0.0, f32::max);
    assert_eq!(largest, needed(&long, Engine::Sglang, None));
}

#[test]
fn attention_outside_of_the_bounded_layers_is_not_passed_over() {
    let sound = || {
        let mut model = Model::llama();
        model.cover(Engine::Vllm, NAMES);
        model
    };
    for name in [
        "mtp.layers.0.self_attn.v_proj.weight",
        "model.mtp.layers.0.self_attn.qkv_proj.weight",
        "model.layers.4.self_attn.v_proj.weight",
        "midlayer.self_attn.q_proj.weight",
        "draft_model.layers.0.attention.wq.weight",
        "mtp.0.attn.q.weight",
        "model.layers.5.attention.anything.weight",
        "encoder.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.cross_attn.k_proj.weight",
        "model.layers.1.self_attn.k_norm.weight",
    ] {
        let mut model = sound();
        model.add(name, &[32, 48], 1e4);
        let audit = model.audit(Engine::Vllm);
        assert!(!audit.safe && audit.outcome == Outcome::Unknown, "{name}");
        assert!(audit.unjudged.iter().any(|one| one.what.contains(name)), "{name}: {:?}", audit.unjudged);
    }
    // What is no attention, or has no cache of keys, is no reason.
    for name in [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.indexer.wk.weight",
        "model.layers.0.linear_attn.in_proj_qkv.weight",
        "lm_head.weight",
    ] {
        let mut model = sound();
        model.add(name, &[32, 48], 1e4);
        assert!(model.audit(Engine::Vllm).safe, "{name}");
    }
    // An encoder of images beside a text model keeps no cache.
    let mut model = Model::named("gemma3", json!({"vision_config": {}, "quantization_config": compressed()}));
    model.add("vision_tower.vision_model.encoder.layers.0.self_attn.k_proj.weight", &[32, 32], 1.0);
    let audit = model.audit(Engine::Vllm);
    assert!(audit.unjudged.is_empty(), "{:?}", audit.unjudged);
}

#[test]
fn adapters_are_not_passed_over() {
    for name in [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight",
        "model.layers.1.self_attn.v_proj.lora_magnitude_vector",
    ] {
        let mut model = Model::llama();
        model.cover(Engine::Vllm, NAMES);
        model.add(name, &[8, 48], 1.0);
        let audit = model.audit(Engine::Vllm);
        assert!(!audit.safe && audit.unjudged[0].what.contains(name), "{:?}", audit.unjudged);
    }
    for file in ["adapter_config.json", "adapter_model.bin", "my_lora.safetensors"] {
        let mut model = Model::llama();
        model.cover(Engine::Vllm, NAMES);
        let folder = model.folder();
        let bytes = match file.ends_with("safetensors") {
            true => std::fs::read(folder.path().join("model.safetensors")).unwrap(),
            false => b"{}".to_vec(),
        };
        std::fs::write(folder.path().join(file), bytes).unwrap();
        let audit = audit(folder.path(), Engine::Vllm, &Serving::default());
        assert!(
            !audit.safe && audit.unjudged.iter().any(|one| one.what.contains(file)),
            "{file}: {:?}",
            audit.unjudged
        );
        // The last line is the verdict, and what to do stands in front of it.
        let output = sigmascale(&["verify", text(folder.path()), "--for", "vllm"]);
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(run::ending(&said).starts_with("vLLM: UNKNOWN") && said.contains("merge it"), "{said}");
        let accepted = sigmascale(&["verify", text(folder.path()), "--for", "vllm", "--allow", "unknown"]);
        assert_eq!(accepted.status.code(), Some(0));
    }
}

/// vLLM compares ModelOpt's algorithm in upper case, and gives attention a scale beside all of them.
#[test]
fn algorithms_are_normalized_as_the_engine_does() {
    for algorithm in ["FP8", "fp8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "nvfp4", "MXFP8"] {
        let mut model = Model::new(grouped("llama", "llama", json!({})));
        (0..4).for_each(|layer| {
            model.scale(layer, "k_proj.k_scale", 0.01);
            model.scale(layer, "v_proj.v_scale", 0.01);
        });
        let folder = model.folder();
        let settings = json!({"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {
            "quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*self_attn*"]}});
        std::fs::write(folder.path().join("hf_quant_config.json"), settings.to_string()).unwrap();
        let audit = audit(folder.path(), Engine::Vllm, &Serving::default());
        let found = entry(&audit, 0, 'k');
        assert_eq!((found.verdict, found.stored), (ScaleVerdict::Overflow, Some(0.01)), "{algorithm}: {found:?}");
        // An algorithm that no table has is unknown.
        let settings = merge(settings, json!({"quantization": {"quant_algo": "FP3"}}));
        std::fs::write(folder.path().join("hf_quant_config.json"), settings.to_string()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let audit = verify(&checkpoint, &[Engine::Vllm], &Serving::default(), &mut || Ok(())).unwrap().remove(0);
        assert_eq!(entry(&audit, 0, 'k').verdict, ScaleVerdict::Unknown);
    }
}

#[test]
fn modules_that_quark_excludes_have_no_scale_in_vllm() {
    let tensor = json!({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": false});
    let quark = |exclude: Value| {
        json!({"quant_method": "quark", "exclude": exclude, "global_quant_config": {"weight": tensor, "output_tensors": null},
            "layer_quant_config": {"*k_proj": {"weight": tensor, "output_tensors": tensor}},
            "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"}})
    };
    for (exclude, layer, expected) in [
        (json!(["lm_head"]), 1, ScaleVerdict::Safe),
        (json!(["re:.*self_attn.*"]), 1, ScaleVerdict::NotLoaded),
        (json!(["model.layers.1.self_attn.attn"]), 1, ScaleVerdict::NotLoaded),
        (json!(["model.layers.1.self_attn.attn"]), 0, ScaleVerdict::Safe),
        (json!(["re:model.layers.1.self_attn.k_proj"]), 1, ScaleVerdict::Safe),
        // Python reads it, and what it says cannot be told here.
        (json!(["re:(?!lm_head).*"]), 1, ScaleVerdict::Unknown),
    ] {
        let mut model = Model::new(grouped("llama", "llama", json!({"quantization_config": quark(exclude.clone())})));
        (0..4).for_each(|layer| NAMES.into_iter().for_each(|name| model.scale(layer, name, 5.0)));
        let audit = model.audit(Engine::Vllm);
        assert_eq!(entry(&audit, layer, 'k').verdict, expected, "{exclude} {layer}: {audit:?}");
        assert_eq!(entry(&model.audit(Engine::Sglang), layer, 'k').verdict, ScaleVerdict::Safe, "SGLang keeps it");
    }
}

/// Every tensor that ends in a scale of attention was judged, or it is said that it was not.
#[test]
fn a_scale_that_lands_elsewhere_is_not_passed_over() {
    // vLLM renames both to the scale of the keys.
    for rest in ["v_proj.k_scale", "qkqkv_proj.k_scale", "kv_scale"] {
        let mut model = Model::llama();
        model.cover(Engine::Vllm, NAMES);
        model.scale(2, rest, 0.0005);
        let audit = model.audit(Engine::Vllm);
        assert_eq!(entry(&audit, 2, 'k').verdict, ScaleVerdict::Overflow, "{rest}");
    }
    // What lands nowhere, under other prefixes, in buffers, in other words.
    for name in [
        "layers.0.self_attn.k_scale",
        "language_model.model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.attn._k_scale",
        "model.layers.0.self_attn.k_cache_scale",
        "model.layers.0.self_attn.o_proj.k_scale",
        "model.layers.7.self_attn.k_scale",
        "k_scale",
    ] {
        let mut model = Model::llama();
        model.cover(Engine::Vllm, NAMES);
        model.set(name, 0.0005);
        let audit = model.audit(Engine::Vllm);
        assert!(!audit.safe && audit.unjudged.iter().any(|one| one.what == name), "{name}: {audit:?}");
    }
    // Probabilities are at most 1: a scale from 1/448 on fits.
    for (value, safe) in [(1.0 / 448.0 + 1e-6, true), (0.001, false)] {
        let mut model = Model::llama();
        model.cover(Engine::Vllm, NAMES);
        model.scale(0, "prob_output_scale", value);
        assert_eq!(model.audit(Engine::Vllm).safe, safe);
    }
    // No engine uses zero points.
    let mut model = Model::llama();
    model.cover(Engine::Vllm, NAMES);
    model.scale(0, "k_zero_point", 0.0);
    assert!(model.audit(Engine::Vllm).safe);
}

/// One entry for all heads is copied to each of them; more entries than heads are cut.
#[test]
fn one_scale_may_stand_for_every_head() {
    let config =
        json!({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme("attn_head")});
    let mut model = Model::new(grouped("llama", "llama", json!({"quantization_config": config})));
    (0..4).for_each(|layer| {
        model.scale(layer, "k_scale", 0.0005);
        model.scale(layer, "v_scale", 0.9);
    });
    let audit = model.audit(Engine::Vllm);
    assert_eq!((audit.layers[0].k.len(), entry(&audit, 0, 'k').verdict), (2, ScaleVerdict::Overflow));
    assert_eq!(entry(&audit, 0, 'v').verdict, ScaleVerdict::Safe);
}

/// Fused q, k and v are requantized to the largest of their scales: small weights then move by more than they are.
#[test]
fn weights_that_an_engine_requantizes_have_their_own_bounds() {
    use float8::F8E4M3;
    use safetensors::tensor::TensorView;
    let case =
        grouped("llama", "llama", json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}));
    let write = |k_scale: f32| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), case.config.to_string()).unwrap();
        let mut stored: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
        for (name, (shape, values)) in draw(&case, 3).0 {
            if !name.ends_with("_proj.weight") {
                stored.push((name, Dtype::F32, shape, values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect()));
                continue;
            }
            let scale = if name.contains("k_proj") { k_scale } else { 1.0 / 64.0 };
            let bytes = values.iter().map(|x| F8E4M3::from_f64(*x * 64.0).to_bits()).collect();
            stored.push((name.replace("weight", "weight_scale"), Dtype::F32, vec![], scale.to_le_bytes().to_vec()));
            stored.push((name, Dtype::F8_E4M3, shape, bytes));
        }
        let views = stored.iter().map(|(n, dtype, s, b)| (n.as_str(), TensorView::new(*dtype, s.clone(), b).unwrap()));
        safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
        folder
    };
    let needed = |folder: &TempDir, engine: Engine, operand: char| {
        entry(&audit(folder.path(), engine, &Serving::default()), 0, operand).needed.unwrap()
    };
    let same = write(1.0 / 64.0);
    for operand in ['q', 'k', 'v'] {
        assert_eq!(
            needed(&same, Engine::Vllm, operand),
            needed(&same, Engine::Trtllm, operand),
            "one scale: nothing moves"
        );
    }
    for k_scale in [1.0 / 128.0, 1.0 / 8192.0, 1e-7] {
        let differ = write(k_scale);
        let (engine, file) = (needed(&differ, Engine::Vllm, 'k'), needed(&differ, Engine::Trtllm, 'k'));
        assert!(engine >= file * 1.0624, "{k_scale}: {engine} {file}");
        // What the engine does with every weight of a row, at its worst: half a step of the coarser scale.
        let checkpoint = Checkpoint::open(differ.path()).unwrap();
        let weights = checkpoint.layer(0).unwrap();
        let gain = weights.norm_gain.clone().unwrap();
        let coarser = 1.0 / 64.0;
        let mut largest = 0f64;
        for head in &weights.k.heads {
            for row in 0..16 {
                let mut values = vec![0.0; 48];
                head.read_block(row..row + 1, 0..48, &mut values);
                let moved = values
                    .iter()
                    .zip(&gain)
                    .map(|(w, g)| (F8E4M3::from_f64(w / coarser).to_f64() * coarser * g).powi(2));
                largest = largest.max((48.0 * moved.sum::<f64>()).sqrt());
            }
        }
        assert!(largest / 448.0 <= f64::from(engine), "{k_scale}: {largest}");
    }
}

/// Layers that stay in the model's type need no scale.
#[test]
fn layers_can_be_kept_out_of_the_cache() {
    let mut model = Model::llama();
    model.cover(Engine::Vllm, NAMES);
    for (name, (_, values)) in &mut model.tensors.0 {
        if name.contains("layers.1.self_attn.k_proj.weight") {
            values.iter_mut().for_each(|x| *x *= 1e4);
        }
    }
    for name in NAMES {
        model.tensors.0.remove(&format!("model.layers.1.self_attn.{name}"));
    }
    assert!(!model.audit(Engine::Vllm).safe);
    let skip = |words: &[&str]| Serving { skip: SkipLayers::parse(words).unwrap(), ..Serving::default() };
    let audit = model.audit_with(Engine::Vllm, &skip(&["1"]));
    assert!(audit.safe && entry(&audit, 1, 'k').scale.is_nan(), "{audit:?}");
    assert!(!model.audit_with(Engine::Vllm, &skip(&["2"])).safe);
    let folder = model.folder();
    let run = |extra: &[&str]| sigmascale(&[&["verify", text(folder.path()), "--for", "vllm"], extra].concat());
    assert_eq!(run(&["--skip-layers", "1"]).status.code(), Some(0));
    let said = String::from_utf8(run(&[]).stdout).unwrap();
    assert!(said.contains("sigmascale export") && said.contains("--for vllm"), "{said}");
    // A kind of layers.
    let mut model = Model::named("gemma3_text", json!({"quantization_config": compressed(), "sliding_window": 64}));
    let checkpoint = Checkpoint::open(model.folder().path()).unwrap();
    let slides: Vec<usize> =
        checkpoint.spec().layers.iter().filter(|layer| layer.window.is_some()).map(|layer| layer.number).collect();
    assert!(!slides.is_empty() && slides.len() < checkpoint.spec().layers.len());
    model.cover(Engine::Vllm, NAMES);
    slides.iter().for_each(|layer| model.scale(*layer, "k_scale", 1e-6));
    assert!(!model.audit(Engine::Vllm).safe);
    assert!(model.audit_with(Engine::Vllm, &skip(&["sliding_window"])).safe);
    // A class without windows by layer casts those layers too.
    let settings = json!({"use_sliding_window": true, "max_window_layers": 2, "sliding_window": 64});
    let mut model = Model::new(Case { bias: true, ..grouped("qwen2", "llama", settings) });
    model.case.config["quantization_config"] = compressed();
    let folder = model.folder();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert!(checkpoint.spec().layers.iter().any(|own| own.window.is_some()));
    let error = verify(&checkpoint, &[Engine::Vllm], &skip(&["sliding_window"]), &mut || Ok(())).unwrap_err();
    assert!(error.is_argument() && error.to_string().contains("`qwen2`"), "{error}");
    let folder = Model::llama().folder();
    // What is not there, or not to be had.
    for (args, part) in [
        (["--for", "vllm", "--skip-layers", "9"], "no layer"),
        (["--for", "vllm", "--skip-layers", "full"], "sliding_window"),
        (["--for", "sglang", "--skip-layers", "1"], "only vLLM"),
        (["--for", "vllm", "--context", "0"], "at least 1"),
    ] {
        let (code, log) = failure(&[&["verify", text(folder.path())], args.as_slice()].concat());
        assert!(code == 2 && log.contains(part), "{log}");
    }
}

/// An export of the same options has no scales for them, a command that says so, and passes the audit.
#[test]
fn an_export_keeps_layers_out() {
    let mut model = Model::new(grouped("llama", "llama", json!({})));
    for (name, (_, values)) in &mut model.tensors.0 {
        if name.contains("layers.1.self_attn.v_proj.weight") {
            values.iter_mut().for_each(|x| *x *= 1e4);
        }
    }
    let folder = model.folder();
    let to = folder.path().with_extension("my export");
    let args =
        ["export", text(folder.path()), "--to", text(&to), "--for", "vllm", "--skip-layers", "1", "--format", "json"];
    let said = run::json(&args);
    let command = said["command"].as_str().unwrap();
    assert!(command.ends_with("--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 1"), "{command}");
    assert!(command.contains(&format!("'{}'", to.display())), "{command}");
    let index = std::fs::read_to_string(to.join("model.safetensors.index.json")).unwrap();
    assert!(index.contains("layers.0.self_attn.k_scale") && !index.contains("layers.1.self_attn.k_scale"));
    let audited = sigmascale(&["verify", text(&to), "--skip-layers", "1"]);
    let without = sigmascale(&["verify", text(&to)]);
    std::fs::remove_dir_all(&to).unwrap();
    assert_eq!((audited.status.code(), without.status.code()), (Some(0), Some(1)));
}

/// A bound above 1.0 without a scale is no proof of a fault.
#[test]
fn what_nobody_stored_is_not_called_unsafe() {
    let mut model = Model::new(grouped("llama", "llama", json!({})));
    for (name, (_, values)) in &mut model.tensors.0 {
        if name.contains("layers.2.self_attn.v_proj.weight") {
            values.iter_mut().for_each(|x| *x *= 1e3);
        }
    }
    let folder = model.folder();
    let output = sigmascale(&["verify", text(folder.path())]);
    let said = String::from_utf8(output.stdout).unwrap();
    let (_, last) = said.rsplit_once("\n\n").unwrap();
    assert!(output.status.code() == Some(1) && last.starts_with("vLLM: not proven safe at 1.0"), "{said}");
    // The worst row is the first.
    let first = said.lines().find(|line| line.contains("missing")).unwrap();
    assert!(first.trim_start().starts_with("2 "), "{first}");
    let audit = audit(folder.path(), Engine::Trtllm, &Serving::default());
    assert_eq!(audit.outcome, Outcome::NotProven);
}

/// Keys that are mostly their bias are named, and how to keep them.
#[test]
fn layers_that_a_bias_dominates_are_named() {
    let mut model = Model::new(Case { bias: true, ..grouped("qwen2", "llama", json!({})) });
    let name = |layer: usize| format!("model.layers.{layer}.self_attn.k_proj.bias");
    for layer in 0..4 {
        let (_, values) = model.tensors.0.get_mut(&name(layer)).unwrap();
        values.iter_mut().for_each(|x| *x = if layer == 1 { 300.0 } else { 1e-3 });
    }
    let audit = model.audit(Engine::Vllm);
    let note = audit.notes.iter().find(|note| note.contains("bias")).unwrap();
    assert!(
        note.contains("layers 1 (0.9") && note.ends_with("--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 1"),
        "{note}"
    );
}

/// A scale that would be exactly 1.0 is stored above it: loaders take 1.0 for none.
#[test]
fn no_scale_is_exactly_one() {
    use sigmascale::Descale;
    use sigmascale::serving::{LayerScales, Operand};
    for value in [1.0, 0.9999, 0.997] {
        let row = vec![Descale::new(value).unwrap()];
        let layer = LayerScales {
            layer: 0,
            module: String::new(),
            q: row.clone(),
            k: row.clone(),
            v: Some(row),
            expanded: None,
            centered: None,
            n_q_heads: 1,
        };
        let stored = layer.stored(Operand::K, false).unwrap()[0].get();
        assert!(stored >= value && stored != 1.0 && half::bf16::from_f32(stored).to_f32() == stored, "{stored}");
    }
}

/// A cache in NVFP4 holds 6 times as much under the same scale, or 4 times; q stays in E4M3. Producers divide by 448, 2688 or 6.
#[test]
fn caches_in_nvfp4_hold_more() {
    let mut model = Model::llama();
    model.cover(Engine::Vllm, NAMES);
    let with = |kv: KvFormat| Serving { kv, ..Serving::default() };
    let plain = model.audit_with(Engine::Vllm, &with(KvFormat::Fp8));
    for (kv, times) in [(KvFormat::Nvfp4, 6.0), (KvFormat::Nvfp4FourOverSix, 4.0)] {
        let audit = model.audit_with(Engine::Vllm, &with(kv));
        assert!(audit.safe, "what covers E4M3 covers {kv:?}: {audit:?}");
        for operand in ['k', 'v'] {
            let ratio = entry(&plain, 1, operand).needed.unwrap() / entry(&audit, 1, operand).needed.unwrap();
            assert!((ratio / times - 1.0).abs() < 1e-6, "{ratio}");
        }
        assert_eq!(entry(&plain, 1, 'q').needed, entry(&audit, 1, 'q').needed);
        assert!(audit.next("m").unwrap().contains(&format!("--kv-cache-dtype {}", kv.name())));
    }
    // The largest value over 448, 2688, and over 6 as a factor of the blocks' scales of their own.
    for (over, safe) in
        [(448.0, true), (2688.0 * 0.999, true), (2688.0 * 1.01, false), (6.0, true), (2688.0 * 448.0, false)]
    {
        let mut model = Model::llama();
        model.cover(Engine::Vllm, NAMES);
        let largest = f64::from(entry(&plain, 2, 'k').needed.unwrap()) * 448.0;
        model.scale(2, "k_scale", largest / over);
        assert_eq!(model.audit_with(Engine::Vllm, &with(KvFormat::Nvfp4)).safe, safe, "{over}");
    }
    let folder = model.folder();
    let (code, log) = failure(&["verify", text(folder.path()), "--for", "sglang", "--kv", "nvfp4"]);
    assert!(code == 2 && log.contains("NVFP4"), "{log}");
}

/// A text beside the bounds, where the model has a forward here.
#[test]
fn a_text_stands_beside_the_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("ids.json");
    std::fs::write(&tokens, json!((0..200).map(|n| n * 7 % 250).collect::<Vec<u32>>()).to_string()).unwrap();
    let args = ["verify", run::TINY_LLAMA, "--for", "vllm", "--tokens", text(&tokens), "--seq-len", "32"];
    let output = sigmascale(&args);
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("text: largest value") && said.contains("ids.json (192 tokens) fits"), "{said}");
    let result = run::json(&[&args[..], &["--format", "json"]].concat());
    let observed = &result["observed"];
    assert_eq!((&observed["sequences"], &observed["seq_len"]), (&json!(6), &json!(32)));
    for (layer, audited) in observed["layers"].as_array().unwrap().iter().zip(result["layers"].as_array().unwrap()) {
        assert_eq!(layer["layer"], audited["layer"]);
        for operand in ["q", "k", "v"] {
            let (reached, needed) = (layer[operand].as_f64().unwrap(), audited[operand][0]["needed"].as_f64().unwrap());
            assert!(reached > 0.0 && reached <= 448.0 * needed, "{operand}: {reached} of {needed}");
        }
    }
    // Without a forward of the family it is an error, not a silence.
    let model = Model::named("nanochat", json!({}));
    let (code, log) = failure(&["verify", text(model.folder().path()), "--tokens", text(&tokens)]);
    assert!(code == 3 && log.contains("no forward"), "{log}");
}

/// Long tables are shortened, the worst rows first, and the last line holds the verdict and the next command.
#[test]
fn a_long_table_is_short_and_the_last_line_tells_what_comes_next() {
    let deep = |layers: usize| {
        let config = json!({"num_hidden_layers": layers, "quantization_config": compressed()});
        let mut model = Model::new(grouped("llama", "llama", json!({})));
        let own = model.tensors.0.clone();
        for (name, tensor) in own.iter().filter(|(name, _)| name.starts_with("model.layers.0.")) {
            for layer in 4..layers {
                model.tensors.0.insert(name.replace("layers.0.", &format!("layers.{layer}.")), tensor.clone());
            }
        }
        model.case.config = merge(model.case.config.clone(), config);
        model.cover(Engine::Vllm, NAMES);
        model
    };
    let mut model = deep(12);
    let rows = |args: &[&str]| {
        let folder = model.folder();
        let output = sigmascale(&[&["verify", text(folder.path()), "--for", "vllm"], args].concat());
        String::from_utf8(output.stdout).unwrap()
    };
    let short = rows(&[]);
    assert!(short.contains("12 more rows, all safe (--all prints them)") && short.lines().count() < 40, "{short}");
    assert!(!rows(&["--all"]).contains("more rows"));
    let (_, last) = short.rsplit_once("\n\n").unwrap();
    assert!(last.starts_with("vLLM: safe.") && last.contains("\nNext: vllm serve "), "{last}");
    model.scale(11, "v_scale", 1e-4);
    let folder = model.folder();
    let output = sigmascale(&["verify", text(folder.path()), "--for", "vllm"]);
    let said = String::from_utf8(output.stdout).unwrap();
    let first = said.lines().nth(3).unwrap();
    assert!(first.trim_start().starts_with("11 ") && first.contains("overflow"), "{said}");
    let (_, last) = said.rsplit_once("\n\n").unwrap();
    assert!(last.starts_with("vLLM: NOT SAFE.") && last.contains("\nNext: sigmascale export "), "{last}");

    // The one problem, for code review and for scripts.
    let as_format = |args: &[&str]| {
        let output = sigmascale(&[&["verify", text(folder.path()), "--for", "vllm"], args].concat());
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let lines = as_format(&["--format", "github"]);
    let place = format!("::error file={}/config.json,title=vLLM%2C layer 11%2C v%3A overflow::", text(folder.path()));
    assert!(lines.lines().count() == 1 && lines.starts_with(&place), "{lines}");
    let log: Value = serde_json::from_str(&as_format(&["--format", "sarif"])).unwrap();
    let (run, results) = (&log["runs"][0], log["runs"][0]["results"].as_array().unwrap());
    assert_eq!((&log["version"], results.len()), (&"2.1.0".into(), 1));
    assert_eq!((&results[0]["ruleId"], &results[0]["level"]), (&"overflow".into(), &"error".into()));
    assert_eq!(run["tool"]["driver"]["rules"], json!([{"id": "overflow"}]));
    let places = &results[0]["locations"][0];
    assert_eq!(places["logicalLocations"][0]["fullyQualifiedName"], "layer 11, v");
    let short: Value = serde_json::from_str(&as_format(&["--problems-only", "--json"])).unwrap();
    let layers: Vec<_> = short["layers"].as_array().unwrap().iter().map(|layer| &layer["layer"]).collect();
    assert_eq!(layers, [11]);
    let table = as_format(&["--problems-only"]);
    assert!(
        table.contains("overflow") && !table.contains("covers the bound") && !table.contains("more rows"),
        "{table}"
    );
}

/// Loaders that stop at what they do not know serve nothing, and that is no safety.
#[test]
fn what_a_loader_stops_at_is_not_safe() {
    let mut tolerant = Model::llama();
    tolerant.cover(Engine::Sglang, NAMES);
    assert!(tolerant.audit(Engine::Sglang).safe, "the loader of Llama passes over a scale of q");
    let mut strict = Model::named("gemma3_text", json!({"quantization_config": compressed()}));
    strict.cover(Engine::Sglang, NAMES);
    let audit = strict.audit(Engine::Sglang);
    assert!(!audit.safe && audit.unjudged.iter().any(|one| one.what.contains("q_scale")), "{audit:?}");
    // A family that loads no scale is built with its method all the same.
    let with = |algorithm: &str| {
        let quantization = json!({"quant_method": "modelopt", "quant_algo": algorithm});
        Model::named("qwen3", json!({"quantization_config": quantization})).audit(Engine::Sglang)
    };
    assert!(with("FP8").safe, "{:?}", with("FP8"));
    assert_eq!(with("FP8_PB_WO").outcome, Outcome::Unknown, "{:?}", with("FP8_PB_WO"));
    // vLLM has no parameter for a scale here, and stops at one.
    let mut model = Model::named("jamba", json!({"quantization_config": compressed()}));
    assert!(model.audit(Engine::Vllm).safe, "{:?}", model.audit(Engine::Vllm));
    let layer = model.case.attention[0];
    model.scale(layer, "k_scale", 5.0);
    assert!(!model.audit(Engine::Vllm).safe);
}

/// Of several tensors for one scale the worst is judged, and it is said that there are several.
#[test]
fn of_several_tensors_for_one_scale_the_worst_counts() {
    let mut model = Model::llama();
    model.cover(Engine::Vllm, NAMES);
    model.scale(1, "kv_scale", 0.0005);
    let audit = model.audit(Engine::Vllm);
    let found = entry(&audit, 1, 'k');
    assert!(found.scale == 0.0005 && found.why.contains("2 tensors are loaded as it"), "{found:?}");
}
