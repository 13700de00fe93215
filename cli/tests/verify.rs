//! `verify` on checkpoints with FP8 caches as the field writes them: names, types and configs of llm-compressor,
//! ModelOpt, Quark and older tools, in one file and in shards, with scales that cover the bounds and scales that do not.

#[path = "../../tests/common/mod.rs"]
mod common;
mod run;

use common::cases::{Case, draw, grouped};
use float8::F8E4M3;
use half::bf16;
use run::{failure, sigmascale, text};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

/// A tensor to store.
type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// One way to write a checkpoint with an FP8 cache.
struct Form {
    name: &'static str,
    model_type: &'static str,
    /// `quantization_config`, where the tool writes one.
    config: Option<Value>,
    /// `hf_quant_config.json`.
    aside: Option<Value>,
    /// Scales of weights in E4M3, by suffix; the weights are BF16 without.
    weights: Option<&'static str>,
    /// A scale's name behind the attention module.
    scale: fn(&str) -> Option<&'static str>,
    dtype: Dtype,
    shape: Vec<usize>,
    shards: usize,
}

fn scheme(strategy: &str) -> Value {
    json!({"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": true, "dynamic": false, "observer": "minmax"})
}

fn compressed(cache: Option<Value>) -> Value {
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": true, "dynamic": false});
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
    json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups,
        "ignore": ["lm_head"], "kv_cache_scheme": cache})
}

fn quark() -> Value {
    let tensor = json!({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": false});
    let plain = json!({"weight": tensor, "input_tensors": tensor, "output_tensors": null});
    let cached = json!({"weight": tensor, "input_tensors": tensor, "output_tensors": tensor});
    json!({"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": plain,
        "layer_quant_config": {"*k_proj": cached, "*v_proj": cached},
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"}})
}

fn k_and_v(operand: &str) -> Option<&'static str> {
    match operand {
        "k" => Some("k_scale"),
        "v" => Some("v_scale"),
        _ => None,
    }
}

fn of_projections(operand: &str) -> Option<&'static str> {
    match operand {
        "k" => Some("k_proj.k_scale"),
        "v" => Some("v_proj.v_scale"),
        _ => None,
    }
}

fn of_outputs(operand: &str) -> Option<&'static str> {
    match operand {
        "k" => Some("k_proj.output_scale"),
        "v" => Some("v_proj.output_scale"),
        _ => None,
    }
}

fn one_for_both(operand: &str) -> Option<&'static str> {
    (operand == "k").then_some("kv_scale")
}

fn forms() -> Vec<Form> {
    let llm_compressor = || Form {
        name: "llm-compressor",
        model_type: "llama",
        config: Some(compressed(Some(scheme("tensor")))),
        aside: None,
        weights: Some("weight_scale"),
        scale: k_and_v,
        dtype: Dtype::BF16,
        shape: vec![1],
        shards: 3,
    };
    let modelopt = json!({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
        "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"}});
    let older = json!({"producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}});
    let cache_alone =
        json!({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme("tensor")});
    vec![
        llm_compressor(),
        Form {
            name: "llm-compressor, the cache alone",
            config: Some(cache_alone),
            weights: None,
            shards: 1,
            ..llm_compressor()
        },
        Form {
            name: "ModelOpt",
            config: Some(modelopt),
            scale: of_projections,
            dtype: Dtype::F32,
            shape: vec![],
            shards: 1,
            ..llm_compressor()
        },
        Form {
            name: "ModelOpt, config aside",
            config: None,
            aside: Some(older),
            scale: of_projections,
            dtype: Dtype::F32,
            shape: vec![],
            shards: 2,
            ..llm_compressor()
        },
        Form {
            name: "one scale for keys and values",
            config: Some(json!({"quant_method": "fp8", "activation_scheme": "static"})),
            scale: one_for_both,
            dtype: Dtype::F32,
            ..llm_compressor()
        },
        Form {
            name: "Quark, as fp8",
            config: Some(json!({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"})),
            scale: of_outputs,
            dtype: Dtype::F16,
            shape: vec![],
            ..llm_compressor()
        },
        Form {
            name: "Quark",
            config: Some(quark()),
            scale: of_outputs,
            dtype: Dtype::F32,
            shape: vec![],
            shards: 1,
            ..llm_compressor()
        },
        Form {
            name: "of the cache",
            model_type: "hy_v3",
            config: Some(json!({"quant_method": "fp8", "activation_scheme": "dynamic"})),
            scale: |operand| match operand {
                "q" => Some("q.scale"),
                "k" => Some("k_cache.scale"),
                "v" => Some("v_cache.scale"),
                _ => None,
            },
            dtype: Dtype::F32,
            ..llm_compressor()
        },
    ]
}

fn encode(value: f32, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

/// `value` at least, as this type holds it.
fn up(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => {
            let near = half::f16::from_f32(value);
            if near.to_f32() < value { half::f16::from_bits(near.to_bits() + 1).to_f32() } else { near.to_f32() }
        }
        // vLLM rounds f32 scales of most tools to BF16.
        _ => f32::from_bits((value.to_bits() + 0xffff) & 0xffff_0000),
    }
}

impl Form {
    fn case(&self) -> Case {
        let mut extra = json!({"torch_dtype": if self.dtype == Dtype::F16 { "float16" } else { "bfloat16" }});
        if let Some(config) = &self.config {
            extra["quantization_config"] = config.clone();
        }
        let kind = if self.model_type == "hy_v3" { "qwen3" } else { "llama" };
        grouped(self.model_type, kind, extra)
    }

    /// The tensors of the model, without scales of the cache.
    fn weights(&self) -> Vec<Stored> {
        let mut stored = Vec::new();
        for (name, (shape, values)) in draw(&self.case(), 3).0 {
            let Some(suffix) = self.weights.filter(|_| name.ends_with("_proj.weight")) else {
                let bytes = values.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect();
                stored.push((name, Dtype::BF16, shape, bytes));
                continue;
            };
            let bytes = values.iter().map(|x| F8E4M3::from_f64(*x * 64.0).to_bits()).collect();
            stored.push((name.replace("weight", suffix), Dtype::F32, vec![], (1f32 / 64.0).to_le_bytes().to_vec()));
            stored.push((name, Dtype::F8_E4M3, shape, bytes));
        }
        stored
    }

    /// Writes the checkpoint with the scales that `choose` gives for `(layer, operand)`, one value for each head.
    fn write(&self, choose: &mut dyn FnMut(usize, &'static str) -> Option<Vec<f32>>) -> TempDir {
        let mut tensors = self.weights();
        for layer in 0..4 {
            for operand in ["q", "k", "v"] {
                let Some(name) = (self.scale)(operand) else { continue };
                let Some(values) = choose(layer, operand) else { continue };
                let shape = if values.len() == 1 { self.shape.clone() } else { vec![values.len(), 1, 1] };
                let bytes = values.iter().flat_map(|value| encode(*value, self.dtype)).collect();
                tensors.push((format!("model.layers.{layer}.self_attn.{name}"), self.dtype, shape, bytes));
            }
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), self.case().config.to_string()).unwrap();
        if let Some(aside) = &self.aside {
            std::fs::write(folder.path().join("hf_quant_config.json"), aside.to_string()).unwrap();
        }
        let mut map = serde_json::Map::new();
        for shard in 0..self.shards {
            let file = match self.shards {
                1 => "model.safetensors".to_owned(),
                shards => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
            };
            let own = tensors.iter().skip(shard).step_by(self.shards);
            map.extend(own.clone().map(|tensor| (tensor.0.clone(), json!(file))));
            let views = own.map(|(n, dtype, s, b)| (n.as_str(), TensorView::new(*dtype, s.clone(), b).unwrap()));
            safetensors::serialize_to_file(views, None, &folder.path().join(file)).unwrap();
        }
        if self.shards > 1 {
            let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
            std::fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        }
        folder
    }

    /// What each layer's operand needs.
    fn needed(&self) -> Vec<[f32; 3]> {
        let folder = self.write(&mut |_, _| None);
        let (_, said) = audited(folder.path(), "vllm");
        let layers = said["layers"].as_array().unwrap();
        layers.iter().map(|layer| ["q", "k", "v"].map(|o| layer[o][0]["needed"].as_f64().unwrap() as f32)).collect()
    }

    /// A scale that covers what it is used for.
    fn covering(&self, needed: &[[f32; 3]], layer: usize, operand: &str) -> f32 {
        let own = needed[layer];
        let least = match (operand, (self.scale)("v")) {
            ("k", None) => own[1].max(own[2]),
            _ => own[["q", "k", "v"].iter().position(|o| *o == operand).unwrap()],
        };
        up(least, self.dtype)
    }

    fn has_q(&self) -> bool {
        (self.scale)("q").is_some()
    }
}

/// Exit code and JSON.
fn audited(folder: &Path, engine: &str) -> (i32, Value) {
    let output = sigmascale(&["verify", text(folder), "--for", engine, "--json"]);
    let said = serde_json::from_slice(&output.stdout);
    let said = said.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code().unwrap(), said)
}

/// The verdicts of one operand, layer by layer.
fn verdicts(said: &Value, operand: &str) -> Vec<String> {
    let layers = said["layers"].as_array().unwrap();
    layers.iter().map(|layer| layer[operand][0]["verdict"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn scales_that_cover_the_bounds_are_safe_in_every_form() {
    for form in forms() {
        let needed = form.needed();
        assert!(needed.iter().flatten().all(|x| *x > 0.0 && *x < 1.0), "{}: {needed:?}", form.name);
        let folder = form.write(&mut |layer, operand| Some(vec![form.covering(&needed, layer, operand)]));
        for engine in ["vllm", "sglang"] {
            if engine == "sglang" && form.model_type == "hy_v3" {
                continue;
            }
            let (code, said) = audited(folder.path(), engine);
            let fine = |v: &String| v == "safe";
            for operand in ["k", "v"] {
                assert!(verdicts(&said, operand).iter().all(fine), "{} {engine}: {said:#}", form.name);
                // It is the stored scale that is judged, not the default.
                assert!(said["layers"][3][operand][0]["stored"].is_f64(), "{} {engine} {operand}", form.name);
                assert_ne!(said["layers"][3][operand][0]["scale"], 1.0, "{} {engine}", form.name);
            }
            assert_eq!(code, 0, "{} {engine}: {said:#}", form.name);
            if engine == "vllm" && form.has_q() {
                assert!(said["layers"][3]["q"][0]["stored"].is_f64(), "{}", form.name);
            }
        }
    }
}

#[test]
fn faults_are_found_in_every_form() {
    for form in forms() {
        let needed = form.needed();
        // In a layer each: halved, none, and no scale at all by four kinds of number.
        for (plant, verdict) in [
            (Some(0.5), "overflow"),
            (None, "missing"),
            (Some(f32::NAN), "invalid"),
            (Some(0.0), "invalid"),
            (Some(-1.0), "invalid"),
            (Some(f32::INFINITY), "invalid"),
        ] {
            let folder = form.write(&mut |layer, operand| {
                let covering = form.covering(&needed, layer, operand);
                let value = match plant {
                    _ if layer != 2 || operand != "k" => covering,
                    Some(0.5) => needed[layer][1] * 0.5,
                    Some(value) => value,
                    None => return None,
                };
                Some(vec![value])
            });
            let (code, said) = audited(folder.path(), "vllm");
            assert_eq!((code, said["safe"].as_bool()), (1, Some(false)), "{} {plant:?}", form.name);
            let found = verdicts(&said, "k");
            assert_eq!(found[2], verdict, "{} {plant:?}: {said:#}", form.name);
            assert!(found.iter().enumerate().all(|(layer, v)| layer == 2 || v == "safe"), "{found:?}");
        }
    }
}

#[test]
fn every_type_is_read_and_its_rounding_counts() {
    for form in forms().into_iter().filter(|form| form.dtype != Dtype::F16) {
        let needed = form.needed();
        // To nearest in BF16: half of them are below.
        let folder = form.write(&mut |layer, operand| {
            Some(vec![bf16::from_f32(form.covering(&needed, layer, operand) * 0.997).to_f32()])
        });
        let (code, said) = audited(folder.path(), "vllm");
        assert_eq!(code, 1, "{}", form.name);
        let below = ["k", "v"].iter().flat_map(|o| verdicts(&said, o)).filter(|v| v == "overflow").count();
        assert!(below > 0, "{}: {said:#}", form.name);
    }
}

#[test]
fn one_scale_a_head_is_judged_head_by_head() {
    let form = Form {
        config: Some(compressed(Some(scheme("attn_head")))),
        scale: |o| match o {
            "q" => Some("q_scale"),
            "k" => Some("k_scale"),
            _ => Some("v_scale"),
        },
        ..forms().swap_remove(0)
    };
    let plain = Form { config: Some(compressed(Some(scheme("tensor")))), ..forms().swap_remove(0) };
    let needed = plain.needed();
    let entries = |operand: &str| if operand == "q" { 4 } else { 2 };
    let folder = form.write(&mut |layer, o| Some(vec![form.covering(&needed, layer, o); entries(o)]));
    let (code, said) = audited(folder.path(), "vllm");
    assert_eq!(code, 0, "{said:#}");
    assert_eq!(said["layers"][1]["k"].as_array().unwrap().len(), 2);
    // The scales of one head are halved.
    let folder = form.write(&mut |layer, o| {
        let mut values = vec![form.covering(&needed, layer, o); entries(o)];
        if (layer, o) == (1, "k") {
            let least = needed[1][1];
            values = vec![least * 0.3, least * 1.01];
        }
        Some(values)
    });
    let (code, said) = audited(folder.path(), "vllm");
    assert_eq!(code, 1);
    assert_eq!(said["layers"][1]["k"][0]["verdict"], "overflow");
    // SGLang does not read them.
    let (code, said) = audited(folder.path(), "sglang");
    assert_eq!((code, verdicts(&said, "k")[0].as_str()), (1, "not-loaded"));
    // A scale of each head where the config says one for all.
    let folder = Form { config: plain.config.clone(), ..form }.write(&mut |_, o| Some(vec![1.5; entries(o)]));
    assert_eq!(verdicts(&audited(folder.path(), "vllm").1, "k"), vec!["not-loaded"; 4]);
}

#[test]
fn missing_config_keys_keep_scales_out() {
    let form = |index: usize| forms().swap_remove(index);
    let audits = |form: &Form, engine: &str| {
        let needed = form.needed();
        let folder = form.write(&mut |layer, operand| Some(vec![form.covering(&needed, layer, operand)]));
        let (code, said) = audited(folder.path(), engine);
        (code, verdicts(&said, "k")[0].clone(), said["notes"].to_string())
    };
    // vLLM makes room for scales without a scheme, SGLang does not.
    let bare = Form { config: Some(compressed(None)), ..form(0) };
    assert_eq!(audits(&bare, "vllm").0, 0);
    let (code, verdict, notes) = audits(&bare, "sglang");
    assert!(code == 1 && verdict == "not-loaded" && notes.contains("kv_cache_scheme"), "{verdict} {notes}");
    let modelopt = |settings: Value| Form { config: Some(settings), ..form(2) };
    let without = modelopt(json!({"quant_method": "modelopt", "quant_algo": "FP8"}));
    assert_eq!(audits(&without, "vllm").0, 0);
    let (code, verdict, notes) = audits(&without, "sglang");
    assert!(code == 1 && verdict == "not-loaded" && notes.contains("kv_cache_quant_algo"), "{verdict} {notes}");
    let named = modelopt(json!({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}));
    assert_eq!(audits(&named, "sglang").0, 0);
    // Nothing says that the weights are quantized.
    let nothing = Form { config: None, weights: None, ..form(0) };
    for engine in ["vllm", "sglang"] {
        let (code, verdict, notes) = audits(&nothing, engine);
        assert!(code == 1 && verdict == "not-loaded" && notes.contains("quantization_config"), "{verdict} {notes}");
    }
}

/// Of two names for one parameter either may win: the smaller scale is judged.
#[test]
fn a_second_scale_for_one_parameter_cannot_hide_the_first() {
    let form = forms().swap_remove(2);
    let needed = form.needed();
    let write = |factor: f32| {
        let folder = form.write(&mut |layer, operand| Some(vec![form.covering(&needed, layer, operand)]));
        let mut tensors = form.weights();
        for (layer, needed) in needed.iter().enumerate() {
            for (name, least) in
                [("k_proj.k_scale", needed[1]), ("v_proj.v_scale", needed[2]), ("k_scale", needed[1] * factor)]
            {
                let bytes = up(least, Dtype::F32).to_le_bytes().to_vec();
                tensors.push((format!("model.layers.{layer}.self_attn.{name}"), Dtype::F32, vec![], bytes));
            }
        }
        let views = tensors.iter().map(|(n, dtype, s, b)| (n.as_str(), TensorView::new(*dtype, s.clone(), b).unwrap()));
        safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
        folder
    };
    assert_eq!(audited(write(1.0).path(), "vllm").0, 0);
    let (code, said) = audited(write(0.5).path(), "vllm");
    assert_eq!((code, verdicts(&said, "k")), (1, vec!["overflow".to_owned(); 4]));
}

/// Adds tensors to a file of a checkpoint, and to the index where `listed`.
fn add(folder: &Path, file: &str, tensors: &[Stored], listed: bool) {
    let path = folder.join(file);
    let bytes = std::fs::read(&path).unwrap();
    let before = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut views: Vec<_> = before.iter().filter(|(name, _)| tensors.iter().all(|t| t.0 != *name)).collect();
    views.extend(tensors.iter().map(|(n, dtype, s, b)| (n.as_str(), TensorView::new(*dtype, s.clone(), b).unwrap())));
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    if listed {
        let path = folder.join("model.safetensors.index.json");
        let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        tensors.iter().for_each(|tensor| index["weight_map"][&tensor.0] = json!(file));
        std::fs::write(&path, index.to_string()).unwrap();
    }
}

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// Engines load every tensor of every file that the index names, so which of two counts depends on the order of files.
#[test]
fn a_scale_in_a_second_file_cannot_hide_the_first() {
    let form = Form { shards: 2, ..forms().swap_remove(0) };
    let needed = form.needed();
    for file in SHARDS {
        for (factor, code, verdict) in [(1.0, 0, "safe"), (0.25, 1, "overflow")] {
            let folder = form.write(&mut |layer, operand| Some(vec![form.covering(&needed, layer, operand)]));
            let small = up(needed[2][1], form.dtype) * factor;
            let name = "model.layers.2.self_attn.k_scale".to_owned();
            add(folder.path(), file, &[(name, form.dtype, form.shape.clone(), encode(small, form.dtype))], false);
            let (found, said) = audited(folder.path(), "vllm");
            assert_eq!((found, verdicts(&said, "k")[2].as_str()), (code, verdict), "{file}");
        }
    }
}

/// Bounds are those of the weights that engines load, or there are none.
#[test]
fn weights_that_an_engine_may_load_otherwise_are_refused() {
    let form = Form { shards: 2, weights: None, config: None, ..forms().swap_remove(0) };
    let weights = form.weights();
    let (name, dtype, shape, bytes) =
        weights.iter().find(|tensor| tensor.0 == "model.layers.2.self_attn.k_proj.weight").unwrap().clone();
    let stale = (name.clone(), dtype, shape.clone(), vec![0; bytes.len()]);
    let refused = |folder: &Path, said: &[&str]| {
        let to = tempfile::tempdir().unwrap();
        let new = to.path().join("new");
        let export = failure(&["export", text(folder), "--to", text(&new), "--for", "vllm"]);
        for ((code, error), expected) in [(export, 1), (failure(&["verify", text(folder)]), 3)] {
            assert!(code == expected && said.iter().all(|part| error.contains(part)), "{code} {error}");
        }
    };
    for file in SHARDS {
        let folder = form.write(&mut |_, _| None);
        add(folder.path(), file, &[(name.clone(), dtype, shape.clone(), bytes.clone())], false);
        assert_ne!(sigmascale(&["verify", text(folder.path())]).status.code(), Some(3), "equal copies");
    }
    // In the file that the index does not name for it.
    let folder = form.write(&mut |_, _| None);
    let index = std::fs::read_to_string(folder.path().join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    let other = SHARDS.into_iter().find(|file| index["weight_map"][&name] != *file).unwrap();
    add(folder.path(), other, std::slice::from_ref(&stale), false);
    refused(folder.path(), &[&name, other, "has other values in", "remove one"]);
    // `model.safetensors` beside an index of other files: transformers reads the one, engines read the others.
    let folder = form.write(&mut |_, _| None);
    let mut single = weights.clone();
    single.iter_mut().filter(|tensor| tensor.0 == name).for_each(|tensor| tensor.3 = stale.3.clone());
    let views = single.iter().map(|(n, dtype, s, b)| (n.as_str(), TensorView::new(*dtype, s.clone(), b).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    refused(folder.path(), &[&name, "model.safetensors", "has other values in"]);
    // A bias that the index does not tell of.
    let folder = form.write(&mut |_, _| None);
    let bias = (name.replace("weight", "bias"), dtype, vec![shape[0]], vec![0; 2 * shape[0]]);
    add(folder.path(), SHARDS[0], &[bias], false);
    refused(folder.path(), &["k_proj.bias", "is not in the index"]);
    // Another model's tensors beside the own ones.
    let folder = form.write(&mut |_, _| None);
    let copy = |tensor: &Stored| (tensor.0.replacen("model.", "", 1), tensor.1, tensor.2.clone(), tensor.3.clone());
    let beside: Vec<Stored> = weights.iter().filter(|tensor| tensor.0.contains("layers")).map(copy).collect();
    add(folder.path(), SHARDS[0], &beside, true);
    refused(folder.path(), &["`layers.0.self_attn.q_proj.weight`", "`model.layers.0.self_attn.q_proj.weight`"]);
    // Weights in E4M3 of which the config says nothing: engines would read them without their scales.
    let plain = Form { config: None, aside: None, shards: 1, ..forms().swap_remove(0) };
    assert!(plain.weights.is_some(), "stored in FP8");
    refused(plain.write(&mut |_, _| None).path(), &["E4M3", "no `quantization_config`"]);
}

/// vLLM takes the head counts from there.
#[test]
fn per_head_scales_need_config_groups() {
    let mut config = compressed(Some(scheme("attn_head")));
    let form = |config: &Value| Form { config: Some(config.clone()), ..forms().swap_remove(0) };
    let needed = form(&config).needed();
    let most = |operand: &str| needed.iter().map(|row| row["qkv".find(operand).unwrap()]).fold(0.0, f32::max);
    let entries = |operand: &str| if operand == "q" { 4 } else { 2 };
    let audit = |config: &Value| {
        let form = form(config);
        let folder = form.write(&mut |_, o| Some(vec![up(1.5 * most(o), form.dtype); entries(o)]));
        let (_, said) = audited(folder.path(), "vllm");
        (verdicts(&said, "k"), said["notes"].to_string())
    };
    assert!(audit(&config).0.iter().all(|verdict| verdict != "not-loaded"));
    for without in [None, Some(Value::Null)] {
        match without {
            Some(null) => config["config_groups"] = null,
            None => drop(config.as_object_mut().unwrap().remove("config_groups")),
        }
        let (found, notes) = audit(&config);
        assert!(found == ["not-loaded"; 4] && notes.contains("config_groups"), "{found:?} {notes}");
    }
}

/// The file that vLLM and SGLang took by `--quantization-param-path`.
#[test]
fn cache_factors_in_a_file_of_their_own_are_named_and_not_counted() {
    let form = forms().swap_remove(1);
    let folder = form.write(&mut |_, _| None);
    let factors = json!({"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn",
        "scaling_factor": {"0": {"0": 0.5, "1": 0.5, "2": 0.5, "3": 0.5}}}});
    std::fs::write(folder.path().join("kv_cache_scales.json"), factors.to_string()).unwrap();
    let (_, said) = audited(folder.path(), "sglang");
    assert!(said["notes"].to_string().contains("kv_cache_scales.json"), "{said:#}");
    assert_eq!(said["layers"][0]["k"][0]["scale"], 1.0);
}

/// The keys of the JSON, and what they hold.
#[test]
fn the_json_has_its_keys_and_types() {
    let form = forms().swap_remove(0);
    let folder =
        form.write(&mut |layer, operand| (layer != 1).then(|| vec![if operand == "k" { f32::NAN } else { 0.9 }]));
    let keys = |value: &Value| {
        let mut keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort_unstable();
        keys.join(" ")
    };
    let output = sigmascale(&["verify", text(folder.path()), "--json"]);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (output.status.code(), keys(&said).as_str()),
        (Some(1), "engine layers model notes others outcome safe serving unjudged version")
    );
    let engines: Vec<&Value> = said["others"].as_array().unwrap().iter().map(|audit| &audit["engine"]).collect();
    assert_eq!(engines, ["sglang", "trtllm", "mistralrs"]);
    let words = ["safe", "overflow", "mismatch", "invalid", "missing", "not-loaded", "unknown"];
    for audit in [&said].into_iter().chain(said["others"].as_array().unwrap()) {
        assert!(audit["safe"].is_boolean() && audit["model"].is_string());
        assert!(audit["notes"].as_array().unwrap().iter().all(Value::is_string));
        for layer in audit["layers"].as_array().unwrap() {
            assert_eq!(keys(layer), "k layer q v");
            assert!(layer["layer"].is_u64());
            for entry in ["q", "k", "v"].iter().flat_map(|operand| layer[operand].as_array().unwrap()) {
                assert_eq!(keys(entry), "factor needed scale stored verdict why");
                assert!(words.contains(&entry["verdict"].as_str().unwrap()));
                assert!(entry["needed"].is_f64() && entry["why"].is_string());
                // What is not finite is null.
                assert_eq!(entry["scale"].is_null(), entry["why"].as_str().unwrap().starts_with("NaN"), "{entry}");
            }
        }
    }
}

#[test]
fn what_cannot_be_read_has_exit_code_3() {
    let form = forms().swap_remove(0);
    let unheard = Form { config: Some(json!({"quant_method": "hqq", "bits": 4})), ..form };
    let folder = unheard.write(&mut |_, _| None);
    let (code, log) = failure(&["verify", text(folder.path())]);
    assert!(code == 3 && log.contains("hqq"), "{log}");
}
