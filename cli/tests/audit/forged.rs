//! An attack on the audit: a folder that is safe, and then one thing in it forged. Every row has to lose its "safe", by a verdict or
//! by a refusal; the rows of what decides nothing have to keep it.

use super::model::{Model, NAMES, compressed, scheme};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use sigmascale::model::Checkpoint;
use sigmascale::serving::{Engine, ExportOptions, Serving, export, verify};
use std::path::Path;

/// Far below what any operand here needs.
const SMALL: f32 = 1e-4;

/// A safe llama of both engines.
fn sound() -> Model {
    let mut model = Model::llama();
    model.cover(Engine::Vllm, NAMES);
    model
}

/// Whether an engine is told that the folder is safe; a folder that is refused is not.
fn is_safe(folder: &Path, engine: Engine) -> bool {
    let Ok(checkpoint) = Checkpoint::open(folder) else { return false };
    verify(&checkpoint, &[engine], &Serving::default(), &mut || Ok(())).is_ok_and(|audits| audits[0].safe)
}

/// Adds tensors of any type in a file of their own, which engines read since there is no index.
fn beside(folder: &Path, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model-more.safetensors")).unwrap();
}

fn changed(config: &Value, change: impl Fn(&mut Value)) -> Value {
    let mut config = config.clone();
    change(&mut config);
    config
}

const BOTH: &[Engine] = &[Engine::Vllm, Engine::Sglang];
const VLLM: &[Engine] = &[Engine::Vllm];

/// Names under which a scale that is too small is loaded, or may be: nothing says that it is not.
#[test]
fn names() {
    let rows: &[(&[Engine], &str)] = &[
        (BOTH, "model.layers.0.self_attn.kv_scale"),
        (BOTH, "model.layers.0.self_attn.k_proj.k_scale"),
        (BOTH, "model.layers.3.self_attn.v_proj.v_scale"),
        (BOTH, "model.layers.0.self_attn.attn.k_scale"),
        (BOTH, "model.layers.0.self_attn.attn.v_scale"),
        (BOTH, "model.layers.0.self_attn.k_proj.output_scale"),
        (BOTH, "model.layers.0.self_attn.v_proj.k_scale"),
        (BOTH, "model.layers.0.self_attn.qkv_proj.k_scale"),
        (BOTH, "model.layers.0.self_attn.qkqkv_proj.v_scale"),
        (BOTH, "model.layers.0.self_attn.k_cache.scale"),
        (BOTH, "model.layers.0.self_attn.v_cache.scale"),
        (BOTH, "model.layers.0.self_attn.attn._k_scale"),
        (BOTH, "model.layers.0.self_attn._v_scale"),
        (BOTH, "model.layers.0.self_attn.k_scale_inv"),
        (BOTH, "model.layers.0.self_attn.k_descale"),
        (BOTH, "model.layers.0.self_attn.key_scale"),
        (BOTH, "model.layers.0.self_attn.value_scales"),
        (BOTH, "model.layers.0.self_attn.K_SCALE"),
        (BOTH, "model.layers.0.self_attn.cache_k_scale"),
        (BOTH, "model.layers.0.self_attn.kv_cache_scale"),
        (BOTH, "model.layers.0.self_attn.kv_cache_scaling_factor"),
        (BOTH, "model.layers.0.self_attn.cached_k_scale_1"),
        (BOTH, "model.layers.0.self_attn.k_bmm_quantizer._amax"),
        (BOTH, "model.layers.0.self_attn.k_bmm_quantizer.amax"),
        (BOTH, "model.layers.0.self_attn.scale"),
        (BOTH, "model.layers.0.attn.k_scale"),
        (BOTH, "model.layers.0.k_scale"),
        (BOTH, "model.layers.0.mixer.k_scale"),
        (BOTH, "model.layers.00.self_attn.k_scale"),
        (BOTH, "model.layers.4.self_attn.k_scale"),
        (BOTH, "model.layers.-1.self_attn.k_scale"),
        (BOTH, "model.layers.0.self_attn.self_attn.k_scale"),
        (BOTH, "model.model.layers.0.self_attn.k_scale"),
        (BOTH, "layers.0.self_attn.k_scale"),
        (BOTH, "language_model.model.layers.0.self_attn.k_scale"),
        (BOTH, "_orig_mod.model.layers.0.self_attn.k_scale"),
        (BOTH, "module.model.layers.0.self_attn.v_scale"),
        (BOTH, "model.mtp.layers.0.self_attn.k_scale"),
        (BOTH, "k_scale"),
        (BOTH, "v_scale"),
        (BOTH, "self_attn.k_scale"),
        (BOTH, "model.k_scale"),
        (BOTH, "model.layers.0.self_attn.k_scale "),
        (BOTH, "model.layers.0.self_attn.k_scale\u{202e}"),
        (VLLM, "model.layers.0.self_attn.attn.q_scale"),
        (VLLM, "model.layers.0.self_attn.q_proj.output_scale"),
        (VLLM, "model.layers.0.self_attn.q.scale"),
        (VLLM, "model.layers.0.self_attn.q_proj.q_scale"),
        (VLLM, "model.layers.0.self_attn.query_scale"),
        (VLLM, "model.layers.0.self_attn.prob_output_scale"),
        (VLLM, "model.layers.0.self_attn.prob_scale"),
    ];
    for (engines, name) in rows {
        let mut model = sound();
        model.set(*name, f64::from(SMALL));
        let folder = model.folder();
        for engine in *engines {
            assert!(!is_safe(folder.path(), *engine), "{engine}: {name}");
        }
    }
}

/// Types, shapes and values of the scale of layer 1's keys.
#[test]
fn types_shapes_and_values() {
    let f32s = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let rows: Vec<(Dtype, Vec<usize>, Vec<u8>)> = vec![
        (Dtype::F32, vec![], f32s(&[0.0])),
        (Dtype::F32, vec![], f32s(&[-0.0])),
        (Dtype::F32, vec![], f32s(&[-5.0])),
        (Dtype::F32, vec![], f32s(&[f32::NAN])),
        (Dtype::F32, vec![], f32s(&[f32::INFINITY])),
        (Dtype::F32, vec![], f32s(&[f32::NEG_INFINITY])),
        (Dtype::F32, vec![], f32s(&[1e-40])),
        (Dtype::F32, vec![], f32s(&[SMALL])),
        (Dtype::F32, vec![1], f32s(&[SMALL])),
        (Dtype::F32, vec![1, 1, 1, 1], f32s(&[SMALL])),
        (Dtype::F32, vec![0], vec![]),
        (Dtype::F32, vec![2], f32s(&[9.0, 9.0])),
        (Dtype::F32, vec![2], f32s(&[9.0, SMALL])),
        (Dtype::F32, vec![2, 1, 1], f32s(&[9.0, 9.0])),
        (Dtype::F32, vec![48], f32s(&[9.0; 48])),
        (Dtype::F64, vec![], 1e-50f64.to_le_bytes().to_vec()),
        (Dtype::F64, vec![], 1e300f64.to_le_bytes().to_vec()),
        (Dtype::F64, vec![], f64::from(SMALL).to_le_bytes().to_vec()),
        (Dtype::F16, vec![], half::f16::from_f32(SMALL).to_le_bytes().to_vec()),
        (Dtype::F16, vec![], half::f16::INFINITY.to_le_bytes().to_vec()),
        (Dtype::BF16, vec![], half::bf16::from_f32(SMALL).to_le_bytes().to_vec()),
        (Dtype::BF16, vec![], half::bf16::NAN.to_le_bytes().to_vec()),
        (Dtype::I8, vec![], vec![1]),
        (Dtype::U8, vec![], vec![0]),
        (Dtype::I32, vec![], 1i32.to_le_bytes().to_vec()),
        (Dtype::I64, vec![], 9i64.to_le_bytes().to_vec()),
        (Dtype::BOOL, vec![], vec![1]),
        (Dtype::F8_E4M3, vec![], vec![0x7e]),
        (Dtype::F8_E5M2, vec![], vec![0x3c]),
        (Dtype::F8_E8M0, vec![], vec![100]),
    ];
    const NAME: &str = "model.layers.1.self_attn.k_scale";
    for (dtype, shape, bytes) in rows {
        let mut model = sound();
        model.tensors.0.remove(NAME);
        let folder = model.folder();
        beside(folder.path(), &[(NAME, dtype, shape.clone(), bytes.clone())]);
        for engine in BOTH {
            assert!(!is_safe(folder.path(), *engine), "{engine}: {dtype:?} {shape:?} {bytes:?}");
        }
    }
}

/// What `config.json` or ModelOpt's file says.
#[test]
fn settings() {
    let quark = |exclude: Value| {
        let tensor = json!({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": false});
        json!({"quant_method": "quark", "exclude": exclude, "global_quant_config": {"weight": tensor},
            "layer_quant_config": {"*k_proj": {"weight": tensor, "output_tensors": tensor}},
            "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}})
    };
    let scheme_of = |change: fn(&mut Value)| changed(&compressed(), |config| change(&mut config["kv_cache_scheme"]));
    let rows: Vec<(&[Engine], Value)> = vec![
        (BOTH, scheme_of(|scheme| scheme["num_bits"] = json!(4))),
        (BOTH, scheme_of(|scheme| scheme["type"] = json!("int"))),
        (BOTH, scheme_of(|scheme| scheme["strategy"] = json!("channel"))),
        (BOTH, scheme_of(|scheme| scheme["strategy"] = json!("group"))),
        (BOTH, scheme_of(|scheme| scheme["strategy"] = json!(null))),
        (BOTH, scheme_of(|scheme| scheme["strategy"] = json!(["tensor"]))),
        (BOTH, scheme_of(|scheme| scheme["symmetric"] = json!(false))),
        (BOTH, scheme_of(|scheme| scheme["num_bits"] = json!("8"))),
        (BOTH, json!({"quant_method": "modelopt", "quant_algo": "FP3"})),
        (BOTH, json!({"quant_method": "modelopt"})),
        (BOTH, json!({"quant_method": "unheard-of"})),
        (BOTH, json!({"quant_method": "awq", "bits": 4})),
        (BOTH, json!({"quant_method": "gptq", "bits": 4})),
        (BOTH, json!({"quant_method": "mxfp4"})),
        (BOTH, json!({"quant_method": "bitsandbytes", "load_in_4bit": true})),
        (BOTH, json!({"quant_method": "hqq"})),
        (BOTH, json!({"quant_method": "torchao"})),
        (BOTH, json!({"quant_method": 3})),
        (BOTH, json!({})),
        (BOTH, json!([])),
        (BOTH, json!("compressed-tensors")),
        (
            &[Engine::Sglang],
            json!({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": null}),
        ),
        (&[Engine::Sglang], json!({"quant_method": "modelopt", "quant_algo": "FP8"})),
        (VLLM, quark(json!(["re:.*"]))),
        (VLLM, quark(json!(["re:.*self_attn.*"]))),
        (VLLM, quark(json!(["model.layers.1.self_attn.attn"]))),
        (VLLM, quark(json!(["re:(?!lm_head).*attn"]))),
        (VLLM, quark(json!(["re:(?i:MODEL).*attn"]))),
        (VLLM, quark(json!(["re:["]))),
        (VLLM, changed(&compressed(), |config| config["transform_config"] = json!({"R1": {"type": "hadamard"}}))),
    ];
    for (engines, quantization) in rows {
        let mut model = sound();
        // Where no scale is read, 1.0 has to be too small.
        for (name, (_, values)) in &mut model.tensors.0 {
            if name.contains("k_proj.weight")
                || name.contains("v_proj.weight")
                || name.contains("k_scale")
                || name.contains("v_scale")
            {
                values.iter_mut().for_each(|x| *x *= 1e4);
            }
        }
        model.case.config["quantization_config"] = quantization.clone();
        let folder = model.folder();
        for engine in engines {
            assert!(!is_safe(folder.path(), *engine), "{engine}: {quantization}");
        }
    }
    // Beside the config of the weights.
    for aside in [
        json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP3", "kv_cache_quant_algo": "FP8"}}),
        json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null}}),
        json!({"quantization": []}),
        json!([]),
    ] {
        let mut model = sound();
        for (name, (_, values)) in &mut model.tensors.0 {
            if name.contains("k_proj.weight") {
                values.iter_mut().for_each(|x| *x *= 1e4);
            }
        }
        model.case.config.as_object_mut().unwrap().remove("quantization_config");
        let folder = model.folder();
        std::fs::write(folder.path().join("hf_quant_config.json"), aside.to_string()).unwrap();
        for engine in BOTH {
            assert!(!is_safe(folder.path(), *engine), "{engine}: {aside}");
        }
    }
}

/// Keys of the config by which an engine computes attention otherwise than the bounds do.
#[test]
fn what_engines_compute() {
    let rotation = |more: Value| {
        let mut rotation = json!({"rope_type": "default", "rope_theta": 10000.0});
        rotation.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"rope_parameters": rotation})
    };
    let rows: Vec<(&[Engine], Value)> = vec![
        // The class, by which engines choose what they build.
        (BOTH, json!({"architectures": ["GemmaForCausalLM"]})),
        (BOTH, json!({"architectures": ["LlamaForCausalLM", "Gemma2ForCausalLM"]})),
        (BOTH, json!({"architectures": ["Llama4ForCausalLM"]})),
        (BOTH, json!({"architectures": ["EagleLlamaForCausalLM"]})),
        (BOTH, json!({"text_config": {"architectures": ["GemmaForCausalLM"]}})),
        (BOTH, json!({"dual_chunk_attention_config": {"chunk_size": 64, "local_size": 16}})),
        (VLLM, json!({"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 3.0}})),
        (BOTH, rotation(json!({"use_fope": true, "num_key_value_heads": 2}))),
        (BOTH, rotation(json!({"rope_dim": 8}))),
        (&[Engine::Sglang], rotation(json!({"rope_type": "yarn", "factor": 4.0, "attn_factor": 3.0}))),
        (&[Engine::Sglang], rotation(json!({"video_rope": true, "mrope_section": [2, 3, 3], "factor": 40.0}))),
        (&[Engine::Sglang], json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 3.0}})),
    ];
    for (engines, change) in rows {
        let mut model = sound();
        model.case.config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        // What the config itself changes is covered.
        for layer in 0..4 {
            NAMES.iter().for_each(|name| model.scale(layer, name, 9.0));
        }
        let folder = model.folder();
        engines.iter().for_each(|engine| assert!(!is_safe(folder.path(), *engine), "{engine}: {change}"));
    }
    for change in [
        json!({"architectures": ["LlamaForCausalLM"]}),
        json!({"architectures": ["MistralForCausalLM"]}),
        json!({"dual_chunk_attention_config": null, "llama_4_scaling": null}),
        rotation(json!({"use_fope": false, "attn_factor": 1.0, "video_rope": false})),
    ] {
        let mut model = sound();
        model.case.config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let folder = model.folder();
        BOTH.iter().for_each(|engine| assert!(is_safe(folder.path(), *engine), "{engine}: {change}"));
    }
    // A factor of the rotation that a class does not read: with that of the lengths, keys are up to 1.09 times larger.
    for rotation in [
        json!({"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0], "long_factor": [1.0],
            "original_max_position_embeddings": 16, "attention_factor": 0.05}),
        json!({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "attention_factor": 0.05}),
    ] {
        let needed = |stated: bool| {
            let mut model = Model::llama();
            model.case.config["max_position_embeddings"] = json!(128);
            model.case.config["rope_parameters"] = rotation.clone();
            if !stated {
                model.case.config["rope_parameters"].as_object_mut().unwrap().remove("attention_factor");
            }
            BOTH.iter().map(|engine| model.audit(*engine).layers[1].k[0].needed).collect::<Vec<_>>()
        };
        assert_eq!(needed(true), needed(false), "{rotation}");
    }
}

/// The older name of `quantization_config` asks for the same.
#[test]
fn the_older_name_of_the_quantization() {
    let mut model = sound();
    let config = model.case.config.as_object_mut().unwrap();
    let said = config.remove("quantization_config").unwrap();
    config.insert("compression_config".to_owned(), said);
    let folder = model.folder();
    BOTH.iter().for_each(|engine| assert!(is_safe(folder.path(), *engine), "{engine}"));
    for layer in 0..4 {
        model.scale(layer, "k_scale", f64::from(SMALL));
    }
    let folder = model.folder();
    for engine in BOTH {
        let audit = super::model::audit(folder.path(), *engine, &Serving::default());
        let entry = &audit.layers[0].k[0];
        assert!(entry.scale == SMALL && entry.factor.unwrap() > 10.0, "{engine}: {entry:?}");
    }
    // An export keeps the name.
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let options = ExportOptions { engine: Engine::Vllm, per_head: false, copy: true, serving: Serving::default() };
    export(&checkpoint, &out, &options, &mut || Ok(())).unwrap();
    assert!(is_safe(&out, Engine::Vllm));
}

/// Weights of attention that are not those which were bounded.
#[test]
fn weights() {
    let rows: &[(&str, &[usize])] = &[
        ("mtp.layers.0.self_attn.k_proj.weight", &[32, 48]),
        ("mtp.0.self_attn.qkv_proj.weight", &[128, 48]),
        ("model.mtp_layers.0.attn.wk.weight", &[32, 48]),
        ("model.layers.4.self_attn.q_proj.weight", &[64, 48]),
        ("model.layers.61.self_attn.kv_b_proj.weight", &[64, 48]),
        ("eagle.layers.0.self_attn.k_proj.weight", &[32, 48]),
        ("draft.layers.0.self_attn.k_proj.weight", &[32, 48]),
        ("midlayer.self_attn.v_proj.weight", &[32, 48]),
        ("medusa_heads.0.self_attn.v_proj.weight", &[32, 48]),
        ("model.layers.0.self_attn.k_norm.weight", &[16]),
        ("model.layers.0.self_attn.q_norm.weight", &[16]),
        ("model.layers.0.self_attn.W_pack.weight", &[128, 48]),
        ("model.layers.0.self_attn.k_proj.qweight", &[6, 32]),
        ("model.layers.0.self_attn.k_proj.weight_packed", &[32, 6]),
        ("model.layers.0.self_attn.k_proj.pre_quant_scale", &[48]),
        // vLLM adds them by keys of other families: `bias`, `qkv_bias`.
        ("model.layers.0.self_attn.k_proj.bias", &[32]),
        ("model.layers.0.input_layernorm.bias", &[48]),
        ("model.layers.0.encoder_attn.k_proj.weight", &[32, 48]),
        ("model.layers.0.crossattention.key.weight", &[32, 48]),
        ("decoder.layers.0.self_attn.k_proj.weight", &[32, 48]),
        ("transformer.h.0.attn.c_attn.weight", &[48, 144]),
        ("layers.0.self_attn.q_proj.weight", &[64, 48]),
        ("language_model.model.layers.0.self_attn.q_proj.weight", &[64, 48]),
        ("model.layers.0.self_attn.k_proj.lora_A.weight", &[4, 48]),
        ("model.layers.0.self_attn.k_proj.lora_B.default.weight", &[32, 4]),
        ("base_model.model.model.layers.2.self_attn.v_proj.lora_A.weight", &[4, 48]),
        ("model.layers.0.self_attn.k_proj.base_layer.weight", &[32, 48]),
        ("model.layers.0.self_attn.k_proj.lora_magnitude_vector.weight", &[32]),
        ("model.layers.0.self_attn.k_proj.ia3_l.weight", &[32, 1]),
        ("model.layers.0.self_attn.v_proj.oft_R.default.weight", &[4, 8, 8]),
        ("model.layers.0.self_attn.v_proj.hada_w1_a", &[32, 4]),
        ("model.layers.0.self_attn.v_proj.lokr_w1", &[4, 4]),
        ("model.layers.0.self_attn.v_proj.vera_lambda_b", &[32]),
        ("prompt_encoder.default.embedding.weight", &[8, 48]),
        ("model.layers.0.input_layernorm.modules_to_save.default.weight", &[48]),
        ("model.layers.0.input_layernorm.original_module.weight", &[48]),
    ];
    for (name, shape) in rows {
        let mut model = sound();
        model.add(*name, shape, 1e4);
        let folder = model.folder();
        for engine in BOTH {
            assert!(!is_safe(folder.path(), *engine), "{engine}: {name}");
        }
    }
    // The same tensor again, with other values, in a file that engines read too.
    for name in ["k_proj.weight", "v_proj.weight", "q_proj.weight"] {
        let folder = sound().folder();
        let name = format!("model.layers.2.self_attn.{name}");
        let rows = if name.contains("q_proj") { 64 } else { 32 };
        let bytes = 1e4f32.to_le_bytes().repeat(rows * 48);
        beside(folder.path(), &[(&name, Dtype::F32, vec![rows, 48], bytes)]);
        BOTH.iter().for_each(|engine| assert!(!is_safe(folder.path(), *engine), "{engine}: {name}"));
    }
}

/// Files beside the weights.
#[test]
fn files() {
    for (name, bytes) in [
        ("adapter_config.json", b"{}".as_slice()),
        ("adapter_model.bin", b"x"),
        ("adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
        ("ADAPTER_MODEL.BIN", b"x"),
        ("pytorch_lora_weights.bin", b"x"),
        ("adapters.npz", b"x"),
    ] {
        let folder = sound().folder();
        std::fs::write(folder.path().join(name), bytes).unwrap();
        BOTH.iter().for_each(|engine| assert!(!is_safe(folder.path(), *engine), "{engine}: {name}"));
    }
    // Engines take the files of the folder itself.
    let folder = sound().folder();
    std::fs::create_dir(folder.path().join("below")).unwrap();
    std::fs::rename(folder.path().join("model.safetensors"), folder.path().join("below/model.safetensors")).unwrap();
    let map: serde_json::Map<String, Value> =
        sound().tensors.0.keys().map(|name| (name.clone(), json!("below/model.safetensors"))).collect();
    let index = json!({"metadata": {}, "weight_map": map});
    std::fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    BOTH.iter().for_each(|engine| assert!(!is_safe(folder.path(), *engine), "{engine}: a folder below"));
    // vLLM prefers these to the others.
    let folder = sound().folder();
    let copy = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    std::fs::write(folder.path().join("consolidated.safetensors"), copy).unwrap();
    assert!(!is_safe(folder.path(), Engine::Vllm));
}

/// Caches that layers share, written and read with two numbers.
#[test]
fn shared_caches() {
    let shared = || {
        let mut model = Model::named("gemma4_unified", json!({"quantization_config": compressed()}));
        model.cover(Engine::Vllm, NAMES);
        let folder = model.folder();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let layers = checkpoint.spec().layers.iter();
        let pairs: Vec<(usize, usize)> = layers.filter_map(|layer| Some((layer.number, layer.kv_source?))).collect();
        for (reader, writer) in &pairs {
            for name in ["k_scale", "v_scale"] {
                model.scale(*reader, name, 9.0);
                model.scale(*writer, name, 9.0);
            }
        }
        (model, pairs)
    };
    let (model, pairs) = shared();
    assert!(is_safe(model.folder().path(), Engine::Vllm));
    for name in ["k_scale", "v_scale"] {
        for at in [0, 1] {
            for value in [Some(9.25), Some(18.0), Some(1.0), None] {
                let (mut model, _) = shared();
                let layer = if at == 0 { pairs[0].0 } else { pairs[0].1 };
                match value {
                    Some(value) => model.scale(layer, name, value),
                    None => {
                        let whole = format!("{}layers.{layer}.self_attn.{name}", model.case.prefix);
                        assert!(model.tensors.0.remove(&whole).is_some());
                    }
                }
                assert!(!is_safe(model.folder().path(), Engine::Vllm), "{name} of layer {layer}: {value:?}");
            }
        }
    }
}

/// Per-head scales.
#[test]
fn heads() {
    let rows: &[(&str, &[f32])] = &[
        ("k_scale", &[9.0, SMALL]),
        ("k_scale", &[SMALL, 9.0]),
        ("v_scale", &[9.0, f32::NAN]),
        // Of the query heads that share a KV head the largest counts.
        ("q_scale", &[9.0, 9.0, SMALL, SMALL]),
        ("q_scale", &[9.0, 9.0, 9.0]),
        ("q_scale", &[9.0, f32::INFINITY, 9.0, 9.0]),
        ("k_scale", &[9.0, -9.0]),
        ("v_scale", &[]),
    ];
    let config =
        json!({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme("attn_head")});
    let sound = || {
        let mut model = Model::llama();
        model.case.config["quantization_config"] = config.clone();
        for layer in 0..4 {
            for (name, heads) in NAMES.into_iter().zip([4, 2, 2]) {
                model.add(format!("model.layers.{layer}.self_attn.{name}"), &[heads, 1, 1], 9.0);
            }
        }
        model
    };
    assert!(is_safe(sound().folder().path(), Engine::Vllm));
    for (name, values) in rows {
        let mut model = sound();
        let whole = format!("model.layers.1.self_attn.{name}");
        model.tensors.0.remove(&whole);
        let folder = model.folder();
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        beside(folder.path(), &[(&whole, Dtype::F32, vec![values.len(), 1, 1], bytes)]);
        assert!(!is_safe(folder.path(), Engine::Vllm), "{name} {values:?}");
    }
}

/// Nothing is waited for, and nothing is read without end.
#[cfg(unix)]
#[test]
fn pipes_and_links() {
    use std::os::unix::fs::symlink;
    let pipe = |path: &Path| {
        let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
        assert!(made.success());
    };
    // What engines read as settings or weights has to be a file.
    for name in [
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
        "model.safetensors",
        "model-more.safetensors",
    ] {
        for kind in ["pipe", "device", "loop", "nowhere", "folder"] {
            let folder = sound().folder();
            let path = folder.path().join(name);
            let _ = std::fs::remove_file(&path);
            match kind {
                "pipe" => pipe(&path),
                "device" => symlink("/dev/zero", &path).unwrap(),
                "loop" => symlink(&path, &path).unwrap(),
                "nowhere" => symlink("/nowhere/at/all", &path).unwrap(),
                _ => std::fs::create_dir(&path).unwrap(),
            }
            BOTH.iter().for_each(|engine| assert!(!is_safe(folder.path(), *engine), "{engine}: {name} is a {kind}"));
        }
    }
    // Others decide nothing.
    for name in ["tokenizer.json", "tokenizer_config.json", "kv_cache_scales.json", "notes.json"] {
        let folder = sound().folder();
        pipe(&folder.path().join(name));
        BOTH.iter().for_each(|engine| assert!(is_safe(folder.path(), *engine), "{engine}: {name}"));
    }
    // Links of a cache of downloads are files.
    let folder = sound().folder();
    let (path, kept) = (folder.path().join("model.safetensors"), folder.path().join("blob"));
    std::fs::rename(&path, &kept).unwrap();
    symlink(&kept, &path).unwrap();
    BOTH.iter().for_each(|engine| assert!(is_safe(folder.path(), *engine), "{engine}"));
}

/// What is not attention's does not cost the "safe".
#[test]
fn what_decides_nothing() {
    for name in [
        "model.layers.0.mlp.down_proj.output_scale",
        "model.layers.0.mlp.down_proj.weight_scale",
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.self_attn.o_proj.weight_scale",
        "model.layers.0.self_attn.o_proj.input_scale",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.norm.bias",
        "lm_head.weight_scale",
        "model.layers.0.layer_scalar",
    ] {
        let mut model = sound();
        model.set(name, f64::from(SMALL));
        let folder = model.folder();
        BOTH.iter().for_each(|engine| assert!(is_safe(folder.path(), *engine), "{engine}: {name}"));
    }
}
