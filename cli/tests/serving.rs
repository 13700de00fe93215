//! Exports that engines load, their audit, scales of streamed weights: names, shapes, configs, planted faults.

#[path = "../../tests/common/mod.rs"]
mod common;
mod run;

use common::cases::{Case, cases, draw, grouped, merge};
use common::fixtures::{Tensors, write_checkpoint};
use run::{TINY_LLAMA, failure, json, sigmascale, text};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use sigmascale::Descale;
use sigmascale::calibrate::{Calibration, Options};
use sigmascale::model::Checkpoint;
use sigmascale::plan::{CenterPolicy, CenteredLayer};
use sigmascale::serving::{Audit, Engine, ExportOptions, LayerScales, ScaleStream, Serving, export, refit};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const SCALES: &str = "model-attention-scales.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn read(file: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn write(file: &Path, value: &Value) {
    // Files of an export may be links to those of the model.
    std::fs::remove_file(file).ok();
    std::fs::write(file, value.to_string()).unwrap();
}

fn scheme(strategy: &str) -> Value {
    json!({"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": true, "dynamic": false})
}

/// Name, shape and values of every tensor of a file.
fn stored(file: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let one = |(name, tensor): (&str, TensorView<'_>)| {
        assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
        let values = tensor.data().chunks(4).map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap())).collect();
        (name.to_owned(), (tensor.shape().to_vec(), values))
    };
    tensors.iter().map(one).collect()
}

/// Writes scales anew.
fn store(file: &Path, scales: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) {
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = scales
        .iter()
        .map(|(name, (shape, values))| {
            (name.clone(), shape.clone(), values.iter().flat_map(|x| x.to_le_bytes()).collect())
        })
        .collect();
    let views = bytes
        .iter()
        .map(|(name, shape, bytes)| (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    std::fs::remove_file(file).ok();
    safetensors::serialize_to_file(views, None, file).unwrap();
}

/// An export of the carried checkpoint.
fn exported(engine: &str, extra: &[&str]) -> (TempDir, PathBuf, Value) {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("out");
    let args = [&["export", TINY_LLAMA, "--to", text(&folder), "--for", engine, "--format", "json"], extra].concat();
    let said = json(&args);
    (parent, folder, said)
}

fn needed() -> Value {
    json(&["calibrate", TINY_LLAMA, "--format", "json"])["layers"].clone()
}

fn largest(layers: &Value, layer: usize, operand: &str) -> f32 {
    let row = layers[layer][format!("{operand}_descale")].as_array().unwrap();
    row.iter().map(|x| x.as_f64().unwrap() as f32).fold(0.0, f32::max)
}

#[test]
fn an_export_for_vllm_has_its_names_shapes_and_config() {
    let (_parent, folder, said) = exported("vllm", &[]);
    assert_eq!(said["safe"], true);
    assert!(said["command"].as_str().unwrap().contains("--kv-cache-dtype fp8"));
    let scales = stored(&folder.join(SCALES));
    assert_eq!(scales.len(), 18);
    let layers = needed();
    for layer in 0..6 {
        for operand in ["q", "k", "v"] {
            let (shape, values) = &scales[&format!("model.layers.{layer}.self_attn.{operand}_scale")];
            let (value, least) = (values[0], largest(&layers, layer, operand));
            assert!(shape.is_empty() && value >= least && value <= least * 1.01, "{operand} {value} {least}");
            // No loader that rounds to BF16 changes it.
            assert_eq!(half::bf16::from_f32(value).to_f32(), value);
        }
    }
    let mut config = read(&Path::new(TINY_LLAMA).join("config.json"));
    config["quantization_config"] =
        json!({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme("tensor")});
    assert_eq!(read(&folder.join("config.json")), config);
    let (before, after) = (read(&Path::new(TINY_LLAMA).join(INDEX)), read(&folder.join(INDEX)));
    let (before_map, after_map) = (before["weight_map"].as_object().unwrap(), after["weight_map"].as_object().unwrap());
    assert_eq!(after_map.len(), before_map.len() + 18);
    assert!(before_map.iter().all(|(name, file)| after_map[name] == *file));
    assert_eq!(after_map["model.layers.5.self_attn.v_scale"], SCALES);
    let size = |index: &Value| index["metadata"]["total_size"].as_u64().unwrap();
    assert_eq!(size(&after), size(&before) + 18 * 4);
    assert_eq!(after["metadata"]["total_parameters"], before["metadata"]["total_parameters"]);
    // Everything else comes along.
    for name in ["generation_config.json", "observed.json", "model-00001-of-00002.safetensors"] {
        let same =
            std::fs::read(folder.join(name)).unwrap() == std::fs::read(Path::new(TINY_LLAMA).join(name)).unwrap();
        assert!(same, "{name}");
    }
}

#[cfg(unix)]
#[test]
fn weights_are_links_unless_copies_are_wanted() {
    use std::os::unix::fs::MetadataExt;
    let inode = |file: PathBuf| std::fs::metadata(file).unwrap().ino();
    let name = "model-00002-of-00002.safetensors";
    // The model and its export are on one file system, wherever the temporary folder is.
    let (_model, model) = run::copy_of_tiny_llama();
    let parent = model.parent().unwrap();
    for (folder, extra, linked) in [("linked", None, true), ("copied", Some("--copy"), false)] {
        let folder = parent.join(folder);
        let mut args = vec!["export", text(&model), "--to", text(&folder), "--for", "vllm"];
        args.extend(extra);
        assert!(sigmascale(&args).status.success());
        assert_eq!(inode(folder.join(name)) == inode(model.join(name)), linked);
        assert_ne!(inode(folder.join("generation_config.json")), inode(model.join("generation_config.json")));
    }
    // Caches hold links; the file behind one is what is linked.
    let cache = parent.join("cache");
    std::fs::create_dir(&cache).unwrap();
    for entry in std::fs::read_dir(&model).unwrap().flatten() {
        std::os::unix::fs::symlink(Path::new("../tiny-llama").join(entry.file_name()), cache.join(entry.file_name()))
            .unwrap();
    }
    let folder = parent.join("from-cache");
    assert!(sigmascale(&["export", text(&cache), "--to", text(&folder), "--for", "vllm"]).status.success());
    assert_eq!(inode(folder.join(name)), inode(model.join(name)));
    assert!(!folder.join(name).is_symlink());
}

#[test]
fn per_head_scales_have_the_entries_that_vllm_takes() {
    let (_parent, folder, said) = exported("vllm", &["--per-head"]);
    let scales = stored(&folder.join(SCALES));
    let layers = needed();
    for (operand, entries) in [("q", 4), ("k", 2), ("v", 2)] {
        let (shape, values) = &scales[&format!("model.layers.2.self_attn.{operand}_scale")];
        assert_eq!(*shape, [entries, 1, 1]);
        for (entry, value) in values.iter().enumerate() {
            let least = layers[2][format!("{operand}_descale")][entry * 2 / entries].as_f64().unwrap() as f32;
            assert!(*value >= least && *value <= least * 1.01);
        }
    }
    assert_eq!(read(&folder.join("config.json"))["quantization_config"]["kv_cache_scheme"], scheme("attn_head"));
    assert!(said["notes"].to_string().contains("cannot update or reload"), "{said}");
    for engine in ["sglang", "mistralrs"] {
        let to = folder.with_file_name(engine);
        let (code, log) = failure(&["export", TINY_LLAMA, "--to", text(&to), "--for", engine, "--per-head"]);
        assert!(code == 2 && log.contains("only vLLM reads"), "{log}");
        assert!(!to.exists());
    }
}

#[test]
fn engines_that_cast_at_one_get_a_certificate() {
    let (_parent, folder, said) = exported("sglang", &[]);
    let scales = stored(&folder.join(SCALES));
    assert!(scales.len() == 12 && scales.keys().all(|name| !name.ends_with("q_scale")));
    let q = &said["layers"][3]["q"];
    assert_eq!((&q["cast_at_one"], &q["scale"], &q["safe"]), (&json!(true), &json!([1.0]), &json!(true)));
    assert_eq!(q["needed"][0].as_f64().unwrap() as f32, largest(&needed(), 3, "q"));
    let (_parent, folder, said) = exported("mistralrs", &[]);
    assert!(!folder.join(SCALES).exists() && said["scales_file"].is_null());
    assert_eq!(read(&folder.join("config.json")), read(&Path::new(TINY_LLAMA).join("config.json")));
    assert!(said["safe"] == true && said["notes"].to_string().contains("v is safe at 1.0"), "{said}");
    assert_eq!(read(&folder.join("sigmascale.json"))["engine"], "mistralrs");
    // Which reads no scales at all, so that there is nothing to write.
    let to = folder.with_file_name("trtllm");
    let (code, log) = failure(&["export", TINY_LLAMA, "--to", text(&to), "--for", "trtllm"]);
    assert!(code == 2 && log.contains("verify --for trtllm") && !to.exists(), "{log}");
    // Keys 100 times as large: 1.0 does not cover them, and it is said by how much.
    let case = grouped("llama", "llama", json!({}));
    let mut tensors = draw(&case, 1);
    for (name, (_, values)) in &mut tensors.0 {
        if name.contains("layers.1.self_attn.k_proj") {
            values.iter_mut().for_each(|x| *x *= 100.0);
        }
    }
    let model = written(&case, &tensors);
    let said = export_of(model.path(), Engine::Mistralrs, false);
    assert!(!said.certificate.safe);
    let k = &said.certificate.layers[1].k;
    assert!(!k.safe && k.load > 1.0 && said.certificate.layers[0].k.safe);
    assert!(said.certificate.notes.iter().any(|note| note.contains("layer 1") && note.contains("not certified")));
}

/// A checkpoint of a case.
fn written(case: &Case, tensors: &Tensors) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &case.config, tensors, case.dtype, case.shards);
    folder
}

fn export_of(model: &Path, engine: Engine, per_head: bool) -> sigmascale::serving::Export {
    let checkpoint = Checkpoint::open(model).unwrap();
    let to = model.join("../").join(format!("out-{}-{engine}", model.file_name().unwrap().to_string_lossy()));
    std::fs::remove_dir_all(&to).ok();
    export(&checkpoint, &to, &asked(engine, per_head, true), &mut || Ok(())).unwrap()
}

fn asked(engine: Engine, per_head: bool, copy: bool) -> ExportOptions {
    ExportOptions { engine, per_head, copy, serving: Serving::default() }
}

fn verify(checkpoint: &Checkpoint, engines: &[Engine]) -> Vec<Audit> {
    sigmascale::serving::verify(checkpoint, engines, &Serving::default(), &mut || Ok(())).unwrap()
}

/// A folder that goes with the test.
struct Gone(PathBuf);

impl Drop for Gone {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Every family: names of the checkpoint's own modules, the same scales read again, safe by the audit.
#[test]
fn every_family_is_exported_and_read_again() {
    let unbounded = ["olmo2", "exaone4"];
    let mut exported = 0;
    for case in cases().iter().filter(|case| !unbounded.contains(&case.kind)) {
        let model = written(case, &draw(case, 4));
        for engine in [Engine::Vllm, Engine::Sglang] {
            let place = model.path().with_extension(engine.name());
            let tried =
                export(&Checkpoint::open(model.path()).unwrap(), &place, &asked(engine, false, true), &mut || Ok(()));
            if let Err(error) = &tried {
                // What an engine loads of a family is not known for all of them; nothing is written then.
                let known = ["is not known of", "there is no export for it"];
                assert!(error.is_unsupported() && known.iter().any(|part| error.to_string().contains(part)), "{error}");
                assert!(!place.exists(), "{}", case.name);
                continue;
            }
            exported += 1;
            let made = tried.unwrap();
            let folder = Gone(made.folder.clone());
            let again = Checkpoint::open(&folder.0).unwrap();
            let profile = |checkpoint: &Checkpoint| {
                let mut calibration = Calibration::new(checkpoint.spec(), Options::default()).unwrap();
                calibration.layer(checkpoint.layer(0).unwrap()).unwrap();
                calibration.finish().layer_scales().unwrap()
            };
            assert_eq!(profile(&again), profile(&Checkpoint::open(model.path()).unwrap()), "{}", case.name);
            let audit = &verify(&again, &[engine])[0];
            assert!(audit.safe, "{} {engine}: {audit:?}", case.name);
            let Some(file) = made.certificate.scales_file else { continue };
            for name in stored(&folder.0.join(file)).keys() {
                let module = name.rsplit_once('.').unwrap().0;
                let module = module.strip_suffix(".attn").unwrap_or(module);
                let mut own = draw(case, 4).0.into_keys();
                let beside = |tensor: String| {
                    let inside = tensor.starts_with(&format!("{module}."));
                    inside || tensor.starts_with(&format!("{}.", module.trim_end_matches(".attn")))
                };
                assert!(own.any(beside), "{} {engine}: {name}", case.name);
            }
        }
    }
    assert!(exported > 80, "{exported}");
    let case = cases().into_iter().find(|case| case.kind == "olmo2").unwrap();
    assert!(exported > 80, "{exported}");
    let model = written(&case, &draw(&case, 4));
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let options = asked(Engine::Vllm, false, true);
    let to = model.path().with_extension("out");
    let error = export(&checkpoint, &to, &options, &mut || Ok(())).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("v has no bound") && !to.exists(), "{error}");
}

/// Names as the engines' own loaders take them; each was resolved by the real ones.
#[test]
fn golden_names() {
    let case = |name: &str| cases().into_iter().find(|case| case.name == name).unwrap();
    for (family, engine, expected) in [
        ("llama", Engine::Vllm, "model.layers.1.self_attn.k_scale"),
        ("qwen2", Engine::Vllm, "model.layers.1.self_attn.k_scale"),
        ("gemma3", Engine::Vllm, "language_model.model.layers.1.self_attn.k_scale"),
        ("gpt2", Engine::Vllm, "transformer.h.1.attn.attn.k_scale"),
        ("gpt2", Engine::Sglang, "transformer.h.1.attn.attn.k_scale"),
        ("gpt_oss", Engine::Vllm, "model.layers.1.self_attn.attn.k_scale"),
        ("nemotron_h", Engine::Vllm, "backbone.layers.1.mixer.k_scale"),
        ("qwen3_5", Engine::Mistralrs, "model.language_model.layers.1.self_attn.k_scale"),
        ("llama", Engine::Sglang, "model.layers.1.self_attn.k_scale"),
        ("mixtral", Engine::Sglang, "model.layers.1.self_attn.attn.k_scale"),
    ] {
        // Without its MXFP4 experts, beside which no engine has scales.
        let case = if family == "gpt_oss" {
            grouped("gpt_oss", "llama", json!({"attention_bias": false}))
        } else {
            case(family)
        };
        let model = written(&case, &draw(&case, 4));
        let made = export_of(model.path(), engine, false);
        let folder = Gone(made.folder);
        let names: Vec<String> = stored(&folder.0.join(SCALES)).into_keys().collect();
        assert!(names.iter().any(|name| name == expected), "{family} {engine}: {names:?}");
    }
}

/// Every name, shape and setting of the exports that the engines' own loaders resolve in `python/tests/lanes`.
#[test]
fn golden_files() {
    let config = |extra: Value| json!({"quantization_config": extra});
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}});
    let compressed =
        json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups});
    let block = json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"});
    let named = |name: &str| cases().into_iter().find(|case| case.name == name).unwrap();
    let asked = |strategy: &str| json!({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme(strategy)});
    // Module of layer 1 in vLLM and SGLang (none: a certificate in place of scales); whether vLLM takes one scale per
    // head.
    let llama = "model.layers.1.self_attn";
    let inner = "model.layers.1.self_attn.attn";
    for (case, vllm, sglang, per_head) in [
        (named("llama"), llama, Some(llama), true),
        (named("gpt2"), "transformer.h.1.attn.attn", Some("transformer.h.1.attn.attn"), true),
        (named("qwen2"), llama, Some(inner), true),
        (named("qwen3"), llama, None, true),
        (named("gemma3_text"), llama, Some(llama), true),
        (named("mixtral"), llama, Some(inner), true),
        (grouped("gpt_oss", "llama", json!({"attention_bias": false})), inner, None, true),
        (grouped("llama", "llama", config(block)), llama, Some(llama), false),
        (grouped("llama", "llama", config(compressed)), llama, Some(llama), true),
    ] {
        let model = written(&case, &draw(&case, 4));
        let own = case.config.get("quantization_config").cloned();
        for (engine, module, per_head) in [
            (Engine::Vllm, Some(vllm), false),
            (Engine::Vllm, Some(vllm).filter(|_| per_head), true),
            (Engine::Sglang, sglang, false),
        ] {
            if per_head && module.is_none() {
                continue;
            }
            let made = export_of(model.path(), engine, per_head);
            let folder = Gone(made.folder);
            let place = format!("{} {engine} {per_head}", case.name);
            let found = read(&folder.0.join("config.json")).get("quantization_config").cloned();
            let Some(module) = module else {
                assert!(made.certificate.scales_file.is_none() && !folder.0.join(SCALES).exists(), "{place}");
                assert_eq!(found, own, "{place}");
                let layers = &made.certificate.layers;
                assert!(layers.iter().all(|layer| layer.k.cast_at_one && layer.k.safe && layer.q.safe), "{place}");
                continue;
            };
            let heads = [("q", case.n_q), ("k", case.n_kv), ("v", case.n_kv)];
            let read_by = heads.into_iter().filter(|(operand, _)| engine == Engine::Vllm || *operand != "q");
            let shape = |heads: usize| if per_head { vec![heads, 1, 1] } else { vec![] };
            let of_layer = |layer: usize, operand: &str| {
                format!("{}.{operand}_scale", module.replacen(".1.", &format!(".{layer}."), 1))
            };
            let expected: BTreeMap<String, Vec<usize>> = read_by
                .flat_map(|(operand, n)| (0..4).map(move |layer| (of_layer(layer, operand), shape(n))))
                .collect();
            let scales: BTreeMap<String, Vec<usize>> =
                stored(&folder.0.join(SCALES)).into_iter().map(|(name, (shape, _))| (name, shape)).collect();
            assert_eq!(scales, expected, "{place}");
            let asked = asked(if per_head { "attn_head" } else { "tensor" });
            let expected = match own.as_ref().map(|own| own["quant_method"] == "fp8") {
                None => asked,
                Some(true) => own.clone().unwrap(),
                Some(false) => {
                    merge(own.clone().unwrap(), json!({"kv_cache_scheme": asked["kv_cache_scheme"].clone()}))
                }
            };
            assert_eq!(found, Some(expected), "{place}");
        }
    }
}

/// vLLM builds the attention of these without scales, and refuses a name of one.
#[test]
fn families_without_scales_in_vllm_get_a_certificate() {
    let drawn = |name| {
        let case = cases().into_iter().find(|case| case.name == name).unwrap();
        written(&case, &draw(&case, 4))
    };
    let model = drawn("jamba");
    let made = export_of(model.path(), Engine::Vllm, false);
    let folder = Gone(made.folder);
    assert!(made.certificate.scales_file.is_none() && !folder.0.join(SCALES).exists());
    assert!(made.certificate.notes[0].contains("without scales"), "{:?}", made.certificate.notes);
    assert!(read(&folder.0.join("config.json")).get("quantization_config").is_none());

    // Versions of vLLM differ: a certificate for one would be wrong in the other.
    let model = drawn("lfm2");
    let out = model.path().with_file_name("lfm2-exported");
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let error = export(&checkpoint, &out, &asked(Engine::Vllm, false, false), &mut || Ok(())).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("LFM2"), "{error}");
    assert!(!out.exists());
}

/// Configs are merged: what was there stays, whatever the weights are stored in.
#[test]
fn configs_are_merged() {
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}});
    let compressed = json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups,
        "ignore": ["lm_head"]});
    let with = |base: &Value, key: &str, value: Value| merge(base.clone(), json!({ key: value }));
    let block = json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"});
    let modelopt = json!({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]});
    for (quantization, expected) in [
        (compressed.clone(), with(&compressed, "kv_cache_scheme", scheme("tensor"))),
        (block.clone(), block.clone()),
        (
            modelopt.clone(),
            with(&modelopt, "kv_cache_scheme", json!({"dynamic": false, "num_bits": 8, "type": "float"})),
        ),
    ] {
        let case = grouped("llama", "llama", json!({"quantization_config": quantization}));
        let model = written(&case, &draw(&case, 2));
        let hf = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}});
        let has_hf = quantization["quant_method"] == "modelopt";
        if has_hf {
            write(&model.path().join("hf_quant_config.json"), &hf);
        }
        let made = export_of(model.path(), Engine::Vllm, false);
        let folder = Gone(made.folder);
        let config = read(&folder.0.join("config.json"));
        assert_eq!(config, merge(case.config.clone(), json!({"quantization_config": expected})));
        if has_hf {
            let quantization = merge(hf["quantization"].clone(), json!({"kv_cache_quant_algo": "FP8"}));
            assert_eq!(read(&folder.0.join("hf_quant_config.json")), merge(hf, json!({"quantization": quantization})));
        }
        let checkpoint = Checkpoint::open(&folder.0).unwrap();
        assert!(verify(&checkpoint, &[Engine::Vllm])[0].safe);
    }
    // Neither vLLM nor SGLang has scales beside MXFP4 experts: nothing is written that they would not read.
    let case =
        grouped("gpt_oss", "llama", json!({"attention_bias": false, "quantization_config": {"quant_method": "mxfp4"}}));
    let model = written(&case, &draw(&case, 2));
    let made = export_of(model.path(), Engine::Vllm, false);
    let folder = Gone(made.folder);
    assert!(made.certificate.scales_file.is_none());
    assert_eq!(read(&folder.0.join("config.json")), case.config);
}

/// ModelOpt's own config is not replaced where it cannot be merged: the export ends and leaves no folder.
#[test]
fn a_quantization_that_is_no_object_is_named() {
    let case = grouped("llama", "llama", json!({}));
    let model = written(&case, &draw(&case, 2));
    let file = model.path().join("hf_quant_config.json");
    for value in [json!("FP8"), json!(["FP8"])] {
        write(&file, &json!({ "quantization": value }));
        let to = model.path().with_extension("out");
        let checkpoint = Checkpoint::open(model.path()).unwrap();
        let error = export(&checkpoint, &to, &asked(Engine::Sglang, false, false), &mut || Ok(())).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{}: `quantization` is not a JSON object: mend or remove it", file.display())
        );
        assert!(!to.exists());
    }
    // Null is how none is written.
    write(&file, &json!({ "quantization": null }));
    let made = Gone(export_of(model.path(), Engine::Sglang, false).folder);
    assert_eq!(read(&made.0.join("hf_quant_config.json")), json!({"quantization": {"kv_cache_quant_algo": "FP8"}}));
}

/// What Python writes bare stays as it is.
#[test]
fn numbers_that_are_none_stay_in_the_config() {
    let case = grouped("llama", "llama", json!({}));
    let model = written(&case, &draw(&case, 2));
    let file = model.path().join("config.json");
    let config = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, config.replacen('{', "{\"time_step_limit\": [0.0, Infinity, -Infinity], \"x\": NaN,", 1))
        .unwrap();
    let made = export_of(model.path(), Engine::Vllm, false);
    let folder = Gone(made.folder);
    let config = std::fs::read_to_string(folder.0.join("config.json")).unwrap().split_whitespace().collect::<String>();
    assert!(
        config.contains("\"time_step_limit\":[0.0,Infinity,-Infinity]") && config.contains("\"x\":NaN"),
        "{config}"
    );
}

/// One file without an index gets one; scales that are there already go, in files of their own and among weights.
#[test]
fn scales_of_before_are_replaced() {
    let case = grouped("llama", "llama", json!({}));
    let mut tensors = draw(&case, 2);
    let name = "model.layers.2.self_attn.k_proj.k_scale";
    tensors.0.insert(name.to_owned(), (vec![], vec![7.0]));
    let model = written(&case, &tensors);
    let first = export_of(model.path(), Engine::Vllm, false);
    let first = Gone(first.folder);
    let index = read(&first.0.join(INDEX));
    let map = index["weight_map"].as_object().unwrap();
    assert!(!map.contains_key(name) && map.contains_key("model.layers.2.self_attn.k_scale"));
    assert_eq!(map["model.layers.2.self_attn.k_proj.weight"], "model.safetensors");
    let weights = std::fs::read(first.0.join("model.safetensors")).unwrap();
    let weights = SafeTensors::deserialize(&weights).unwrap();
    assert!(weights.tensor(name).is_err() && weights.len() == tensors.0.len() - 1);
    let bytes: usize = tensors.0.iter().filter(|(n, _)| *n != name).map(|(_, (_, values))| values.len() * 2).sum();
    assert_eq!(index["metadata"]["total_size"], bytes + 12 * 4);
    // From one engine to the other.
    let second = export_of(&first.0, Engine::Sglang, false);
    let second = Gone(second.folder);
    assert_eq!(stored(&second.0.join(SCALES)).len(), 8);
    let map = read(&second.0.join(INDEX))["weight_map"].as_object().unwrap().clone();
    assert!(!map.contains_key("model.layers.2.self_attn.q_scale") && map.len() == tensors.0.len() - 1 + 8);
}

/// Both scales of keys are judged: the stored one, and that of centered keys in the certificate.
#[test]
fn centers_of_a_certificate_are_judged() {
    let case = Case { bias: true, ..grouped("qwen2", "llama", json!({"rope_theta": 1e6})) };
    let mut tensors = draw(&case, 5);
    // A bias that is most of a key, in pairs that are far from a turn within the positions.
    for (name, (_, values)) in &mut tensors.0 {
        if name.ends_with("k_proj.bias") {
            let slow = |channel: usize| channel % 16 % 8 >= 4;
            values.iter_mut().enumerate().filter(|(channel, _)| slow(*channel)).for_each(|(_, x)| *x = 40.0);
        }
    }
    let model = written(&case, &tensors);
    let folder = Gone(export_of(model.path(), Engine::Vllm, false).folder);
    let file = folder.0.join("sigmascale.json");
    let whole = read(&file);
    let centers = &whole["centers"];
    assert!(centers["layers"].as_array().is_some_and(|layers| !layers.is_empty()), "{centers}");
    let audit = |change: &dyn Fn(&mut Value)| {
        let mut changed = whole.clone();
        change(&mut changed);
        write(&file, &changed);
        verify(&Checkpoint::open(&folder.0).unwrap(), &[Engine::Vllm]).remove(0)
    };
    let said = |audit: &Audit, text: &str| audit.notes.iter().any(|note| note.contains(text));
    let right = audit(&|_| {});
    assert!(right.safe && said(&right, centers["hash"].as_str().unwrap()), "{:?}", right.notes);
    let small = audit(&|all| {
        let scale = &mut all["centers"]["layers"][0]["k_scale"][0];
        *scale = json!(scale.as_f64().unwrap() / 1.5);
    });
    assert!(
        !small.safe && said(&small, "under its centered scale k - c can overflow by a factor of 1.4"),
        "{:?}",
        small.notes
    );
    let other = audit(&|all| all["centers"]["layers"][0]["k"][0][0] = json!(1e4));
    assert!(
        !other.safe && said(&other, "can overflow") && said(&other, "The hash of the centers is"),
        "{:?}",
        other.notes
    );
    let unreadable = audit(&|all| all["centers"]["layers"] = json!(7));
    assert!(!unreadable.safe && said(&unreadable, "cannot be read"), "{:?}", unreadable.notes);
    let without = audit(&|all| drop(all.as_object_mut().unwrap().remove("centers")));
    assert!(without.safe && !said(&without, "enters"), "{:?}", without.notes);
}

#[test]
fn files_that_vllm_would_load_instead_are_left_out() {
    let (_model, model) = run::copy_of_tiny_llama();
    std::fs::copy(model.join("model-00001-of-00002.safetensors"), model.join("consolidated.safetensors")).unwrap();
    std::fs::write(model.join("params.json"), "{}").unwrap();
    let checkpoint = Checkpoint::open(&model).unwrap();
    let audit = &verify(&checkpoint, &[Engine::Vllm])[0];
    assert!(audit.safe, "no scales, and 1.0 covers the bounds: {audit:?}");
    let made = export_of(&model, Engine::Vllm, true);
    assert_eq!(made.left_out, ["consolidated.safetensors"]);
    assert!(!made.folder.join("params.json").exists());
    std::fs::copy(model.join("consolidated.safetensors"), made.folder.join("consolidated.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(&made.folder).unwrap();
    let audits = verify(&checkpoint, &[Engine::Vllm]);
    assert!(!audits[0].safe && audits[0].notes[0].contains("consolidated"), "{audits:?}");
}

/// A folder without an index: the new one names the weights alone, and files that are rewritten are not those of the model.
#[test]
fn an_index_is_made_of_the_weights_alone() {
    let case = grouped("llama", "llama", json!({}));
    let tensors = draw(&case, 2);
    let model = written(&case, &tensors);
    for name in ["adapter_model.safetensors", "consolidated.safetensors"] {
        std::fs::copy(model.path().join("model.safetensors"), model.path().join(name)).unwrap();
    }
    let made = export_of(model.path(), Engine::Vllm, false);
    let folder = Gone(made.folder);
    let map = read(&folder.0.join(INDEX))["weight_map"].as_object().unwrap().clone();
    assert!(map.values().all(|file| file == "model.safetensors" || file == SCALES), "{map:?}");
    assert_eq!((map.len(), made.left_out), (tensors.0.len() + 12, vec!["consolidated.safetensors".to_owned()]));
    assert!(folder.0.join("adapter_model.safetensors").exists() && !folder.0.join("consolidated.safetensors").exists());
}

/// Whole or nothing.
#[test]
fn an_export_that_fails_leaves_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let full = parent.path().join("full");
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("file"), "").unwrap();
    let (code, log) = failure(&["export", TINY_LLAMA, "--to", text(&full), "--for", "vllm"]);
    assert!(code == 2 && log.contains("already exists"), "{log}");
    let (code, log) = failure(&["export", TINY_LLAMA, "--to", text(&parent.path().join("no/such")), "--for", "vllm"]);
    assert!(code == 1 && log.contains("parent folder"), "{log}");
    let (code, log) = failure(&["export", "mistral-7b", "--to", text(&parent.path().join("new")), "--for", "vllm"]);
    assert!(code == 2 && log.contains("needs weights"), "{log}");
    let (_model, model) = run::copy_of_tiny_llama();
    let (code, log) = failure(&["export", text(&model), "--to", text(&model.join("inside")), "--for", "vllm"]);
    assert!(code == 2 && log.contains("is in the folder of the model"), "{log}");
    // A weight that is not finite is found after half of the layers.
    let file = model.join("model-00002-of-00002.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let length = bytes.len();
    bytes[length - 3_000_000..length - 1_000_000].fill(0xff);
    std::fs::write(&file, bytes).unwrap();
    let to = model.with_file_name("broken");
    let (code, log) = failure(&["export", text(&model), "--to", text(&to), "--for", "vllm"]);
    assert!(code == 1 && !to.exists(), "{log}");
    let left: Vec<_> = std::fs::read_dir(model.parent().unwrap()).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(left, ["tiny-llama"]);
}

/// What a folder may be like, and what may happen on the way.
#[cfg(unix)]
mod mishaps {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::process::{Command, Stdio};

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort_unstable();
        names
    }

    fn start(model: &Path, to: &Path) -> std::process::Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sigmascale"));
        command.args(["export", text(model), "--to", text(to), "--for", "vllm", "--copy"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn links_that_lead_back_are_refused() {
        let (_model, model) = run::copy_of_tiny_llama();
        std::fs::create_dir(model.join("extra")).unwrap();
        let to = model.with_file_name("out");
        for (link, leads) in [("extra/back", ".."), ("extra/self", "."), ("self", ".")] {
            symlink(leads, model.join(link)).unwrap();
            let (code, log) = failure(&["export", text(&model), "--to", text(&to), "--for", "vllm"]);
            assert!(code == 2 && log.contains(link) && log.contains("remove the link"), "{log}");
            assert_eq!(names(model.parent().unwrap()), ["tiny-llama"]);
            std::fs::remove_file(model.join(link)).unwrap();
        }
        // A link to another folder is followed.
        let other = model.with_file_name("other");
        std::fs::create_dir(&other).unwrap();
        std::fs::write(other.join("template.jinja"), "x").unwrap();
        // Twice, which is no cycle.
        for link in ["extra/again", "extra/templates"] {
            symlink(&other, model.join(link)).unwrap();
        }
        let done = sigmascale(&["export", text(&model), "--to", text(&to), "--for", "vllm"]);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        for link in ["extra/again", "extra/templates"] {
            assert!(to.join(link).join("template.jinja").is_file(), "{link}");
        }
    }

    #[test]
    fn of_two_exports_to_one_folder_one_is_whole() {
        let (_model, model) = run::copy_of_tiny_llama();
        let to = model.with_file_name("out");
        let both = [start(&model, &to), start(&model, &to)].map(|child| child.wait_with_output().unwrap());
        assert!(both.iter().any(|done| done.status.success()), "{both:?}");
        for failed in both.iter().filter(|done| !done.status.success()) {
            let log = String::from_utf8_lossy(&failed.stderr);
            assert!(log.contains("out"), "{log}");
        }
        assert!(sigmascale(&["verify", text(&to)]).status.success());
        assert_eq!(names(model.parent().unwrap()), ["out", "tiny-llama"]);
    }

    #[test]
    fn an_export_that_is_killed_leaves_no_folder() {
        let (_model, model) = run::copy_of_tiny_llama();
        let to = model.with_file_name("out");
        let mut killed = 0;
        for _ in 0..5 {
            let mut child = start(&model, &to);
            // While its files are written.
            while child.try_wait().unwrap().is_none() {
                if names(model.parent().unwrap()).iter().any(|name| name.starts_with(".sigmascale-")) {
                    child.kill().unwrap();
                    child.wait().unwrap();
                    killed += 1;
                    break;
                }
            }
            if to.exists() {
                // It was done before.
                assert!(sigmascale(&["verify", text(&to)]).status.success());
                std::fs::remove_dir_all(&to).unwrap();
            }
        }
        assert!(killed > 0);
        // What is left of those is no obstacle.
        assert!(sigmascale(&["export", text(&model), "--to", text(&to), "--for", "vllm"]).status.success());
    }

    #[test]
    fn another_file_system_gets_copies() {
        let (_model, model) = run::copy_of_tiny_llama();
        let shared = Path::new("/dev/shm");
        let device = |path: &Path| std::fs::metadata(path).map(|found| found.dev()).ok();
        let elsewhere = tempfile::tempdir_in(shared).ok().filter(|_| device(shared) != device(&model));
        let Some(elsewhere) = elsewhere else {
            eprintln!("skipped another_file_system_gets_copies: {} is no other file system", shared.display());
            return;
        };
        let to = elsewhere.path().join("out");
        let said = json(&["export", text(&model), "--to", text(&to), "--for", "vllm", "--format", "json"]);
        assert!(said["linked"] == 0 && said["copied"].as_u64() >= Some(2), "{said}");
        assert!(sigmascale(&["verify", text(&to)]).status.success());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let (code, log) = failure(&["export", TINY_LLAMA, "--to", "/proc/out", "--for", "vllm"]);
        assert!(code == 1 && log.contains("/proc/out"), "{log}");
    }

    #[test]
    fn a_checkpoint_in_part_is_refused_by_the_file_that_is_missing() {
        let (_model, model) = run::copy_of_tiny_llama();
        std::fs::remove_file(model.join("model-00002-of-00002.safetensors")).unwrap();
        let to = model.with_file_name("out");
        let (code, log) = failure(&["export", text(&model), "--to", text(&to), "--for", "vllm"]);
        assert!(code == 1 && log.contains("model-00002-of-00002.safetensors"), "{log}");
        let (code, log) = failure(&["verify", text(&model)]);
        assert!(code == 3 && log.contains("model-00002-of-00002.safetensors"), "{log}");
        assert_eq!(names(model.parent().unwrap()), ["tiny-llama"]);
    }
}

mod audits {
    //! Planted faults, one a test.

    use super::*;

    /// What `verify` says of an export of the carried checkpoint after `plant`: its exit code and its JSON.
    fn audited(engine: &str, plant: impl FnOnce(&Path)) -> (i32, Value) {
        let (_parent, folder, _) = exported(engine, &["--copy"]);
        plant(&folder);
        let output = sigmascale(&["verify", text(&folder), "--for", engine, "--json"]);
        let value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (output.status.code().unwrap(), value)
    }

    fn change(folder: &Path, edit: impl FnOnce(&mut BTreeMap<String, (Vec<usize>, Vec<f32>)>)) {
        let mut scales = stored(&folder.join(SCALES));
        edit(&mut scales);
        store(&folder.join(SCALES), &scales);
    }

    /// Layer, operand and verdict of everything that is not safe.
    fn faults(said: &Value) -> Vec<(u64, &str, String)> {
        let mut all = Vec::new();
        for layer in said["layers"].as_array().unwrap() {
            for operand in ["q", "k", "v"] {
                for entry in layer[operand].as_array().unwrap() {
                    if entry["verdict"] != "safe" {
                        all.push((
                            layer["layer"].as_u64().unwrap(),
                            operand,
                            entry["verdict"].as_str().unwrap().to_owned(),
                        ));
                    }
                }
            }
        }
        assert_eq!(said["safe"], all.is_empty());
        all
    }

    fn name(layer: usize, operand: &str) -> String {
        format!("model.layers.{layer}.self_attn.{operand}_scale")
    }

    #[test]
    fn an_export_is_safe() {
        for engine in ["vllm", "sglang", "mistralrs"] {
            let (code, said) = audited(engine, |_| {});
            assert_eq!((code, faults(&said)), (0, vec![]), "{engine}");
            assert_eq!((&said["engine"], said["layers"].as_array().unwrap().len()), (&json!(engine), 6));
            assert!(said["model"].is_string());
            let k = &said["layers"][0]["k"][0];
            assert!(k["needed"].as_f64() <= k["scale"].as_f64());
        }
    }

    #[test]
    fn a_missing_layer_is_found() {
        let (code, said) = audited("vllm", |folder| {
            change(folder, |scales| ["q", "k", "v"].into_iter().for_each(|o| drop(scales.remove(&name(3, o)))));
            let mut index = read(&folder.join(INDEX));
            let map = index["weight_map"].as_object_mut().unwrap();
            ["q", "k", "v"].into_iter().for_each(|o| drop(map.remove(&name(3, o))));
            write(&folder.join(INDEX), &index);
        });
        let missing = |operand| (3, operand, "missing".to_owned());
        assert_eq!((code, faults(&said)), (1, ["q", "k", "v"].map(missing).to_vec()));
        assert_eq!(said["layers"][3]["k"][0]["scale"], 1.0);
    }

    #[test]
    fn a_scale_of_one_is_found() {
        let (code, said) = audited("vllm", |folder| change(folder, |s| s.get_mut(&name(2, "k")).unwrap().1[0] = 1.0));
        // 1.0 covers the bound, and it is said that it is the default.
        assert_eq!((code, faults(&said)), (0, vec![]));
        assert!(said["layers"][2]["k"][0]["why"].as_str().unwrap().contains("the loaders' default"));
    }

    #[test]
    fn a_halved_scale_is_found() {
        let (code, said) =
            audited("sglang", |folder| change(folder, |s| s.get_mut(&name(4, "v")).unwrap().1[0] *= 0.5));
        assert_eq!((code, faults(&said)), (1, vec![(4, "v", "overflow".to_owned())]));
        assert!(said["layers"][4]["v"][0]["why"].as_str().unwrap().contains("can overflow by a factor of 1.99"));
    }

    #[test]
    fn swapped_k_and_v_are_found() {
        let (code, said) = audited("vllm", |folder| {
            change(folder, |scales| {
                let k = scales[&name(0, "k")].clone();
                let v = scales.insert(name(0, "v"), k).unwrap();
                scales.insert(name(0, "k"), v);
            });
        });
        assert_eq!(code, 1);
        assert_eq!(faults(&said), [(0, "k", "overflow".to_owned())]);
    }

    #[test]
    fn a_wrong_order_of_layers_is_found() {
        let (code, said) = audited("vllm", |folder| {
            change(folder, |scales| {
                let before = scales.clone();
                for layer in 0..6 {
                    ["q", "k", "v"]
                        .into_iter()
                        .for_each(|o| drop(scales.insert(name(layer, o), before[&name(5 - layer, o)].clone())));
                }
            });
        });
        let faults = faults(&said);
        assert_eq!(code, 1);
        assert!(faults.contains(&(4, "v", "overflow".to_owned())), "{faults:?}");
    }

    #[test]
    fn a_scale_that_was_rounded_down_is_found() {
        let (code, said) = audited("vllm", |folder| {
            change(folder, |scales| {
                let value = &mut scales.get_mut(&name(1, "q")).unwrap().1[0];
                *value = f32::from_bits(value.to_bits() - 0x1_0000);
            });
        });
        assert_eq!((code, faults(&said)), (1, vec![(1, "q", "overflow".to_owned())]));
    }

    #[test]
    fn an_index_and_a_file_that_do_not_know_each_other_are_found() {
        // The file is there, and the index does not name it: silently 1.0.
        let (code, said) = audited("vllm", |folder| {
            std::fs::copy(Path::new(TINY_LLAMA).join(INDEX), folder.join(INDEX)).unwrap();
        });
        let faults = faults(&said);
        assert!(code == 1 && faults.len() == 18 && faults.iter().all(|fault| fault.2 == "not-loaded"), "{faults:?}");
        assert!(said["layers"][0]["k"][0]["why"].as_str().unwrap().contains("the index does not name"));
        // The index names it, and it is not there: no engine starts.
        let (_parent, folder, _) = exported("vllm", &[]);
        std::fs::remove_file(folder.join(SCALES)).unwrap();
        let (code, log) = failure(&["verify", text(&folder), "--for", "vllm"]);
        assert!(code == 3 && log.contains(SCALES) && log.contains("missing"), "{log}");
    }

    #[test]
    fn scales_of_another_model_are_found() {
        let (code, said) = audited("vllm", |folder| {
            // The same model with larger keys and smaller values.
            change(folder, |scales| {
                for (name, (_, values)) in scales {
                    values[0] *= if name.ends_with("v_scale") { 0.4 } else { 4.0 };
                }
            });
        });
        let faults = faults(&said);
        assert_eq!((code, faults.len()), (1, 6));
        assert!(faults.iter().all(|(_, operand, verdict)| verdict == "overflow" && *operand == "v"), "{faults:?}");
        // What is too large cannot overflow, and is named.
        assert!(said["layers"][0]["k"][0]["why"].as_str().unwrap().contains("another model"), "{said}");
    }

    #[test]
    fn scales_that_the_config_keeps_out_are_found() {
        let break_config = |edit: fn(&mut Value)| {
            audited("vllm", |folder| {
                let mut config = read(&folder.join("config.json"));
                edit(&mut config);
                write(&folder.join("config.json"), &config);
            })
        };
        for edit in [
            (|config| drop(config.as_object_mut().unwrap().remove("quantization_config"))) as fn(&mut Value),
            |config| config["quantization_config"]["kv_cache_scheme"]["symmetric"] = json!(null),
            |config| config["quantization_config"]["kv_cache_scheme"]["num_bits"] = json!(4),
        ] {
            let (code, said) = break_config(edit);
            assert!(code == 1 && faults(&said).iter().all(|fault| fault.2 == "not-loaded"));
            assert!(said["notes"].to_string().contains("No scale is loaded"), "{said}");
        }
        // One entry where there should be one a head: copied to the heads of k and v, and refused for q.
        let (code, said) =
            break_config(|config| config["quantization_config"]["kv_cache_scheme"]["strategy"] = json!("attn_head"));
        let found = faults(&said);
        assert!(
            code == 1 && found.len() == 6 && found.iter().all(|(_, o, verdict)| *o == "q" && verdict == "not-loaded")
        );
        // A name that the engine does not map.
        let (code, said) = audited("sglang", |folder| {
            change(folder, |scales| {
                let value = scales.remove(&name(0, "k")).unwrap();
                scales.insert("model.layers.0.self_attn.attn.k_scale".to_owned(), value);
            });
            let mut index = read(&folder.join(INDEX));
            let map = index["weight_map"].as_object_mut().unwrap();
            let file = map.remove(&name(0, "k")).unwrap();
            map.insert("model.layers.0.self_attn.attn.k_scale".to_owned(), file);
            write(&folder.join(INDEX), &index);
        });
        assert_eq!((code, faults(&said)), (1, vec![(0, "k", "not-loaded".to_owned())]));
    }

    /// vLLM holds the scales of FP8 and ModelOpt checkpoints in the model's type.
    #[test]
    fn what_a_loader_rounds_below_the_bound_is_found() {
        let config = json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}});
        let case = grouped("llama", "llama", config);
        let model = written(&case, &draw(&case, 2));
        let made = export_of(model.path(), Engine::Vllm, false);
        let folder = Gone(made.folder);
        let checkpoint = || Checkpoint::open(&folder.0).unwrap();
        assert!(verify(&checkpoint(), &[Engine::Vllm])[0].safe);
        // The bound itself, in f32: exact in SGLang, rounded to nearest in vLLM.
        let exact: Vec<f32> = made.certificate.layers.iter().map(|layer| layer.k.needed[0]).collect();
        change(&folder.0, |scales| {
            exact
                .iter()
                .enumerate()
                .for_each(|(layer, value)| scales.get_mut(&name(layer, "k")).unwrap().1[0] = *value);
        });
        let audits = verify(&checkpoint(), &[Engine::Vllm, Engine::Sglang]);
        let below = exact.iter().filter(|x| half::bf16::from_f32(**x).to_f32() < **x).count();
        let found =
            audits[0].layers.iter().filter(|layer| layer.k[0].why.contains("the loader rounds it below")).count();
        assert!(below > 0 && found == below, "{below} {found}");
        assert!(audits[1].safe);
    }

    #[test]
    fn what_cannot_be_read_is_no_verdict() {
        let folder = tempfile::tempdir().unwrap();
        let (code, _) = failure(&["verify", text(folder.path())]);
        assert_eq!(code, 3);
        assert_eq!(failure(&["verify", "no-such-folder"]).0, 3);
        assert_eq!(failure(&["verify", TINY_LLAMA, "--for", "llama.cpp"]).0, 2);
        assert_eq!(failure(&["verify", "mistral-7b"]).0, 2);
    }

    #[test]
    fn the_page_and_the_table_say_the_same() {
        let (_parent, folder, _) = exported("vllm", &[]);
        let page = folder.with_file_name("page.html");
        let output = sigmascale(&["verify", text(&folder), "--html", text(&page)]);
        let (said, page) = (String::from_utf8(output.stdout).unwrap(), std::fs::read_to_string(page).unwrap());
        assert!(
            output.status.success() && run::ending(&said).starts_with("vLLM: safe.") && said.contains("Other engines")
        );
        for part in ["vLLM: safe.", "TensorRT-LLM", "model.layers.5.self_attn.k_scale"] {
            assert!(page.contains(part), "{part}");
        }
    }
}

mod streams {
    //! Weights that arrive tensor by tensor.

    use super::*;
    use rand::rngs::StdRng;
    use rand::{SeedableRng, seq::SliceRandom};
    use sigmascale::serving::SCALES_FILE;

    /// Every tensor of a folder: name, type, shape, bytes.
    fn tensors_of(folder: &Path) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
        let files = sigmascale::model::WeightFiles::open(folder).unwrap();
        assert!(files.files().all(|name| name != SCALES_FILE));
        files.tensors().map(|t| (t.name.to_owned(), t.dtype, t.shape.to_vec(), t.bytes.to_vec())).collect()
    }

    fn calibrated(folder: &Path) -> Vec<LayerScales> {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let mut calibration = Calibration::new(checkpoint.spec(), Options::default()).unwrap();
        for layer in 0..checkpoint.spec().layers.len() {
            calibration.layer(checkpoint.layer(layer).unwrap()).unwrap();
        }
        let profile = calibration.finish();
        let mut layers = profile.layer_scales().unwrap();
        for ((index, scales), center) in layers.iter_mut().enumerate().zip(profile.centers()) {
            let weights = checkpoint.layer(index).unwrap();
            let own = CenteredLayer::of_weights(checkpoint.spec(), weights, &CenterPolicy::CACHE).unwrap().unwrap().1;
            assert_eq!((&own.center.k, &own.center.v), (&center.k, &center.v), "{}", scales.module);
            scales.centered = Some(own).filter(|own| !own.center.is_none());
        }
        layers
    }

    fn streamed(stream: &mut ScaleStream, tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)]) -> Vec<LayerScales> {
        let mut found = Vec::new();
        for (name, dtype, shape, bytes) in tensors {
            found.extend(stream.push(name, *dtype, shape, bytes.clone()).unwrap());
        }
        stream.finish(false).unwrap();
        found.sort_by_key(|layer| layer.layer);
        // A profile holds centers beside its scales.
        found.into_iter().map(|layer| LayerScales { centered: None, ..layer }).collect()
    }

    /// The same bits as a calibration, in every family and order.
    #[test]
    fn a_stream_is_a_calibration() {
        let mut random = StdRng::seed_from_u64(7);
        for case in cases() {
            let model = written(&case, &draw(&case, 6));
            let mut tensors = tensors_of(model.path());
            let names: Vec<String> = tensors.iter().map(|tensor| tensor.0.clone()).collect();
            let config = std::fs::read(model.path().join("config.json")).unwrap();
            let mut stream = ScaleStream::new(&config, Path::new("config.json"), &names).unwrap();
            let expected = calibrated(model.path());
            let expected: Vec<_> = expected.into_iter().map(|layer| LayerScales { centered: None, ..layer }).collect();
            for _ in 0..3 {
                tensors.shuffle(&mut random);
                assert_eq!(streamed(&mut stream, &tensors), expected, "{} {}", case.name, case.kind);
                assert_eq!(stream.held_bytes(), 0);
            }
        }
    }

    #[test]
    fn one_layer_is_held_where_tensors_come_layer_by_layer() {
        let case = grouped("llama", "llama", json!({}));
        let model = written(&case, &draw(&case, 6));
        let mut tensors = tensors_of(model.path());
        tensors.sort();
        let config = std::fs::read(model.path().join("config.json")).unwrap();
        let mut stream = ScaleStream::new(&config, Path::new("config.json"), &[]).unwrap();
        let all: usize = tensors.iter().map(|tensor| tensor.3.len()).sum();
        for (name, dtype, shape, bytes) in &tensors {
            let done = stream.push(name, *dtype, shape, bytes.clone()).unwrap();
            assert!(stream.held_bytes() <= all / case.attention.len());
            assert!(done.is_empty() || stream.held_bytes() == 0);
        }
        // What attention does not read is not held.
        assert!(
            stream.wants("model.layers.0.input_layernorm.weight") && !stream.wants("model.layers.0.mlp.up_proj.weight")
        );
        stream.finish(false).unwrap();
        assert!(stream.push("model.layers.0.mlp.up_proj.weight", Dtype::F32, &[1], vec![0; 4]).unwrap().is_empty());
        assert_eq!(stream.held_bytes(), 0);
    }

    /// Layers whose values stay on a device are complete at once, and their descales may come late and in any order.
    #[test]
    fn descales_from_a_device_may_come_late() {
        let case = grouped("llama", "llama", json!({}));
        let model = written(&case, &draw(&case, 6));
        let tensors = tensors_of(model.path());
        let config = std::fs::read(model.path().join("config.json")).unwrap();
        let mut stream = ScaleStream::new(&config, Path::new("config.json"), &[]).unwrap();
        let expected = calibrated(model.path());
        for _ in 0..2 {
            let mut due = Vec::new();
            for (name, dtype, shape, _) in &tensors {
                due.extend(stream.note(name, *dtype, shape).unwrap());
            }
            assert_eq!(due.len(), expected.len());
            let (name, dtype, shape, _) = &tensors.iter().find(|t| t.0.ends_with("q_proj.weight")).unwrap();
            let error = stream.note(name, *dtype, shape).unwrap_err();
            assert!(error.to_string().contains(name.as_str()), "{error}");
            for index in due.into_iter().rev() {
                let error = stream.finish(false).unwrap_err();
                assert!(error.is_argument(), "{error}");
                let LayerScales { q, k, v, .. } = expected[index].clone();
                let found = stream.computed(index, q.clone(), k.clone(), v.clone()).unwrap();
                assert_eq!(found, expected[index]);
                let error = stream.computed(index, q, k, v).unwrap_err();
                assert!(error.is_argument(), "{error}");
            }
            stream.finish(false).unwrap();
        }
        // A pass that is given up leaves nothing behind.
        for (name, dtype, shape, _) in &tensors {
            stream.note(name, *dtype, shape).unwrap();
        }
        stream.restart();
        assert_eq!(streamed(&mut stream, &tensors), expected);
    }

    #[test]
    fn what_a_stream_cannot_use_is_an_error() {
        let case = grouped("llama", "llama", json!({}));
        let model = written(&case, &draw(&case, 6));
        let tensors = tensors_of(model.path());
        let config = std::fs::read(model.path().join("config.json")).unwrap();
        let mut stream = ScaleStream::new(&config, Path::new("config.json"), &[]).unwrap();
        let (name, dtype, shape, bytes) = tensors.iter().find(|t| t.0.ends_with("q_proj.weight")).unwrap();
        let error = stream.push(name, *dtype, shape, bytes[1..].to_vec()).unwrap_err();
        assert!(error.is_format() && error.to_string().contains("bytes"), "{error}");
        stream.push(name, *dtype, shape, bytes.clone()).unwrap();
        let error = stream.push(name, *dtype, shape, bytes.clone()).unwrap_err();
        assert!(error.to_string().contains(name.as_str()), "{error}");
        let error = stream.finish(false).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("are missing"), "{error}");
        // A bias that nobody told of: with its layer's scales out already it would be too late.
        let error = stream.push("model.layers.0.self_attn.k_proj.bias", Dtype::F32, &[32], vec![0; 128]).unwrap_err();
        assert!(error.to_string().contains("model.layers.0.self_attn.k_proj.bias"), "{error}");
        let error = stream
            .push("model.layers.1.self_attn.k_proj.weight", Dtype::F8_E4M3, &[32, 48], vec![0; 1536])
            .unwrap_err();
        assert!(error.to_string().contains("E4M3"), "{error}");
    }

    #[test]
    fn a_cache_stays_while_no_bound_grows() {
        let descale = |x: f32| Descale::new(x).unwrap();
        let layer = |number: usize, q: f32, k: f32, v: f32| LayerScales {
            layer: number,
            module: format!("model.layers.{number}.self_attn"),
            q: vec![descale(q)],
            k: vec![descale(k)],
            v: Some(vec![descale(v)]),
            expanded: None,
            centered: None,
            n_q_heads: 1,
        };
        let old = [layer(0, 1.0, 2.0, 3.0), layer(1, 1.0, 2.0, 3.0)];
        // Smaller bounds: the scales of the cache stay, those of q are new.
        let kept = refit(&old, &[layer(0, 0.5, 1.5, 3.0), layer(1, 9.0, 2.0, 1.0)]).unwrap();
        assert!(!kept.flush());
        assert_eq!(kept.scales, [layer(0, 0.5, 2.0, 3.0), layer(1, 9.0, 2.0, 3.0)]);
        // One that grows: every scale is new, and the cache has to go.
        let new = [layer(0, 0.5, 1.5, 3.0), layer(1, 1.0, 2.0, 3.001)];
        let flushed = refit(&old, &new).unwrap();
        assert_eq!((flushed.grown.as_slice(), flushed.scales.as_slice()), (&[1][..], &new[..]));
        assert!(refit(&old[..1], &new).unwrap_err().is_mismatch());
    }
}
