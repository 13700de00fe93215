//! What every command reads alike, and bounds of what configs and checkpoints do not say.

use super::common::cases::{Case, cases, draw, grouped, merge};
use super::common::fixtures::write_checkpoint;
use super::model::{Model, audit};
use super::run::{failure, json as result, sigmascale, text};
use float8::F8E4M3;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use sigmascale::model::Checkpoint;
use sigmascale::serving::{Engine, ScaleStream, Serving};
use std::path::Path;
use tempfile::TempDir;

/// The descales of an operand by layer.
fn descales(folder: &Path, operand: &str) -> Vec<f64> {
    let profile = result(&["calibrate", text(folder), "--format", "json"]);
    let layers = profile["layers"].as_array().unwrap().iter();
    layers.flat_map(|layer| layer[operand].as_array().unwrap()).map(|x| x.as_f64().unwrap()).collect()
}

/// A layer may have no rotation by what a config does not tell: a factor below 1 on its rotated channels is no bound then.
#[test]
fn a_factor_below_one_counts_where_a_layer_may_be_unrotated() {
    for name in ["cohere2_moe", "olmo_hybrid"] {
        let case = || cases().into_iter().find(|case| case.name == name).unwrap();
        let with = |extra: Value| {
            let case = case();
            let folder = tempfile::tempdir().unwrap();
            let case = Case { config: merge(case.config.clone(), extra), ..case };
            write_checkpoint(folder.path(), &case.config, &draw(&case, 3), Dtype::F32, 1);
            folder
        };
        let yarn = |extra: Value| {
            let settings = json!({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128});
            with(json!({"rope_parameters": merge(settings, extra)}))
        };
        let plain = with(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}));
        for settings in [
            json!({"attention_factor": 0.02}),
            json!({"attention_factor": 0.5}),
            json!({"mscale": 0.5, "mscale_all_dim": 3.0}),
        ] {
            let folder = yarn(settings.clone());
            for operand in ["q_descale", "k_descale"] {
                assert_eq!(descales(folder.path(), operand), descales(plain.path(), operand), "{name} {settings}");
            }
        }
        let larger = yarn(json!({"attention_factor": 3.0}));
        let both = descales(larger.path(), "k_descale").into_iter().zip(descales(plain.path(), "k_descale"));
        both.for_each(|(larger, plain)| assert!(larger > 2.9 * plain, "{name}"));
    }
}

/// Frameworks load every tensor of every file: a folder in which two of them contradict each other is refused by all commands.
#[test]
fn every_command_checks_what_is_loaded() {
    let commands: [&[&str]; 4] = [&["calibrate"], &["inspect"], &["verify"], &["stress", "checkpoint-load", "--model"]];
    let refused = |folder: &Path, part: &str| {
        for command in commands {
            let (code, log) = failure(&[command, &[text(folder)]].concat());
            assert!(code == 1 || code == 3, "{command:?} {code}: {log}");
            assert!(log.contains(part), "{command:?}: {log}");
        }
    };
    let case = grouped("llama", "llama", json!({}));
    let write = || {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &case.config, &draw(&case, 5), Dtype::F32, 2);
        folder
    };
    // A tensor in two shards of an index that names one of them.
    let name = "model.layers.1.self_attn.v_proj.weight";
    let folder = write();
    let file = "model-00001-of-00002.safetensors";
    for (shard, value) in [(file, 7.0), ("model-00002-of-00002.safetensors", 8.0)] {
        add(&folder.path().join(shard), name, &[32, 48], value);
    }
    refused(folder.path(), name);
    // Two models under two prefixes.
    let folder = write();
    add(&folder.path().join(file), "layers.0.self_attn.q_proj.weight", &[64, 48], 7.0);
    refused(folder.path(), "layers.0.self_attn.q_proj.weight");
    // A tensor of attention that the index leaves out.
    let folder = write();
    let index = folder.path().join("model.safetensors.index.json");
    let bias = "model.layers.0.self_attn.k_proj.bias";
    add(&folder.path().join(file), bias, &[32], 7.0);
    refused(folder.path(), bias);
    assert!(!std::fs::read_to_string(index).unwrap().contains(bias));
}

/// Writes a file anew with one tensor more, or with other values in it.
fn add(file: &Path, name: &str, shape: &[usize], value: f32) {
    let bytes = std::fs::read(file).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let new = value.to_le_bytes().repeat(shape.iter().product());
    let old = read.iter().filter(|(own, _)| *own != name);
    let mut views: Vec<(String, TensorView<'_>)> = old.map(|(own, view)| (own.to_owned(), view)).collect();
    views.push((name.to_owned(), TensorView::new(Dtype::F32, shape.to_vec(), &new).unwrap()));
    let whole = safetensors::serialize(views, None).unwrap();
    std::fs::write(file, whole).unwrap();
}

/// transformers' default attention leaves the soft-cap out.
#[test]
fn a_soft_cap_counts_where_it_is_asked_for() {
    for family in ["gemma2", "vaultgemma"] {
        let model = Model::named(family, json!({}));
        let folder = model.folder();
        let bounds = |extra: &[&str]| -> Vec<f64> {
            let args = [&["calibrate", text(folder.path()), "--format", "json"], extra].concat();
            let profile = result(&args);
            profile["layers"].as_array().unwrap().iter().map(|layer| layer["logit_bound"].as_f64().unwrap()).collect()
        };
        let (without, with) = (bounds(&[]), bounds(&["--soft-cap"]));
        assert!(with.iter().all(|bound| *bound == 5.0), "{with:?}");
        assert!(without.iter().all(|bound| *bound > 6.0), "{without:?}");
    }
}

/// Constants of the config need no weights, and no way of storing them keeps them away.
#[test]
fn constants_do_not_depend_on_how_weights_are_stored() {
    let case = grouped("llama", "llama", json!({}));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    let constants = |quantization: Value| {
        let config = merge(case.config.clone(), json!({"quantization_config": quantization}));
        std::fs::write(&file, config.to_string()).unwrap();
        let profile = result(&["calibrate", text(&file), "--format", "json"]);
        (profile["c_star"]["c_star"].clone(), profile["c_star"]["gamma"].clone())
    };
    let plain = constants(Value::Null);
    for quantization in [
        json!({"quant_method": "awq", "bits": 4}),
        json!({"quant_method": "gptq", "bits": 4}),
        json!({"quant_method": "bitsandbytes", "load_in_4bit": true}),
        json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}),
        json!({"quant_method": "mxfp4"}),
        json!({"quant_method": "mxfp8"}),
        json!({"quant_method": "unheard-of"}),
        json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
        json!({"quant_method": "compressed-tensors", "transform_config": {"R1": {"type": "hadamard"}}}),
    ] {
        assert_eq!(constants(quantization.clone()), plain, "{quantization}");
    }
}

/// A llama of which q, k and v are stored by `stored`: name, values and shape in, tensors out.
fn stored(quantization: Value, mut stored: impl FnMut(&str, &[f64], &[usize]) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)>) -> TempDir {
    let case = grouped("llama", "llama", json!({"quantization_config": quantization}));
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), case.config.to_string()).unwrap();
    let mut all = Vec::new();
    for (name, (shape, values)) in draw(&case, 5).0 {
        if name.contains("_proj.weight") {
            all.extend(stored(&name, &values, &shape));
        } else {
            let bytes = values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
            all.push((name, Dtype::F32, shape, bytes));
        }
    }
    let views = all.iter().map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

fn bf16(name: &str, values: &[f64], shape: &[usize]) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = values.iter().flat_map(|x| half::bf16::from_f64(*x).to_le_bytes()).collect();
    vec![(name.to_owned(), Dtype::BF16, shape.to_vec(), bytes)]
}

/// The types of attention's own tensors decide: whatever the experts are stored in, plain q, k and v have the bounds of a plain model.
#[test]
fn plain_attention_is_read_beside_packed_weights() {
    let plain = stored(Value::Null, bf16);
    let expected = descales(plain.path(), "k_descale");
    let skip = json!(["self_attn", "lm_head"]);
    for quantization in [
        json!({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}),
        json!({"quant_method": "gptq", "bits": 4}),
        json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "llm_int8_skip_modules": skip}),
        json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*"]}),
        json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}),
        json!({"quant_method": "mxfp4"}),
        json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 4}}}}),
        json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 4}}}}),
        json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {"g": {"weights": {"num_bits": 4}}}}),
    ] {
        let folder = stored(quantization.clone(), bf16);
        let found = descales(folder.path(), "k_descale");
        assert_eq!(found, expected, "{quantization}");
    }
    // What rounds weights when it loads them has no bound.
    for quantization in [json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), json!({"quant_method": "hqq"})] {
        let (_, log) = failure(&["calibrate", text(stored(quantization.clone(), bf16).path())]);
        assert!(log.contains("have no bound") && log.contains(quantization["quant_method"].as_str().unwrap()), "{log}");
    }
}

/// Packed weights of attention are refused by tensor and format.
#[test]
fn packed_attention_is_refused_by_its_tensor() {
    let name = "model.layers.0.self_attn.q_proj.";
    let rows: [(&str, Dtype, usize); 5] = [
        ("qweight", Dtype::I32, 4),
        ("weight_packed", Dtype::I32, 4),
        ("weight", Dtype::U8, 1),
        ("weight", Dtype::I8, 1),
        ("weight", Dtype::F8_E5M2, 1),
    ];
    for (last, dtype, bytes) in rows {
        let folder = stored(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), |own, values, shape| {
            if own != format!("{name}weight") {
                return bf16(own, values, shape);
            }
            vec![(format!("{name}{last}"), dtype, vec![64, 6], vec![1; 64 * 6 * bytes])]
        });
        let (_, log) = failure(&["calibrate", text(folder.path())]);
        assert!(log.contains(&format!("{name}{last}")) && log.contains(&format!("{dtype:?}")), "{log}");
    }
    // A factor on the input of a projection is none of its weights.
    let folder = stored(json!({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}), |own, values, shape| {
        let mut all = bf16(own, values, shape);
        if own == format!("{name}weight") {
            let factors = 3f32.to_le_bytes().repeat(48);
            all.push((format!("{name}pre_quant_scale"), Dtype::F32, vec![48], factors));
        }
        all
    });
    let (_, log) = failure(&["calibrate", text(folder.path())]);
    assert!(log.contains("pre_quant_scale"), "{log}");
}

/// Scales that are powers of two, as numbers or as exponents, one a tile or one for 32 weights of a row.
#[test]
fn exponents_of_two_are_scales() {
    let exponent = |values: &[f64]| {
        let most = values.iter().map(|x| x.abs()).fold(0.0, f64::max);
        (most / 448.0).log2().ceil() as i32
    };
    // Tiles of rows and columns; the scale's type and name, the config.
    let rows: Vec<(Value, (usize, usize), Dtype, &str)> = vec![
        (json!({"quant_method": "fp8", "weight_block_size": [16, 16]}), (16, 16), Dtype::F8_E8M0, "weight_scale_inv"),
        (json!({"quant_method": "fp8", "weight_block_size": [16, 16]}), (16, 16), Dtype::F32, "weight_scale_inv"),
        (json!({"quant_method": "modelopt", "quant_algo": "MXFP8"}), (1, 32), Dtype::U8, "weight_scale"),
        (json!({"quant_method": "mxfp8"}), (1, 32), Dtype::F8_E8M0, "weight_scale"),
    ];
    let mut found = Vec::new();
    for (quantization, (height, width), dtype, last) in rows {
        let folder = stored(quantization.clone(), |name, values, shape| {
            let (n, d) = (shape[0], shape[1]);
            let (tall, wide) = (n.div_ceil(height), d.div_ceil(width));
            let mut bytes = vec![0u8; n * d];
            let mut scales = Vec::new();
            for tile in 0..tall * wide {
                let (top, left) = (tile / wide * height, tile % wide * width);
                let places: Vec<usize> = (top..(top + height).min(n))
                    .flat_map(|row| (left..(left + width).min(d)).map(move |column| row * d + column))
                    .collect();
                let own: Vec<f64> = places.iter().map(|place| values[*place]).collect();
                let power = exponent(&own);
                for (place, x) in places.into_iter().zip(own) {
                    bytes[place] = F8E4M3::from_f64(x / 2f64.powi(power)).to_bits();
                }
                match dtype {
                    Dtype::F32 => scales.extend((2f64.powi(power) as f32).to_le_bytes()),
                    _ => scales.push((power + 127) as u8),
                }
            }
            let scale = name.replace("weight", last);
            vec![(name.to_owned(), Dtype::F8_E4M3, shape.to_vec(), bytes), (scale, dtype, vec![tall, wide], scales)]
        });
        let plain = stored(json!({"quant_method": "fp8"}), bf16);
        let (own, near) = (descales(folder.path(), "k_descale"), descales(plain.path(), "k_descale"));
        // The weights are those of BF16 up to a sixteenth.
        assert!(own.iter().zip(&near).all(|(a, b)| (a / b - 1.0).abs() < 0.15), "{quantization} {own:?} {near:?}");
        found.push(own);
    }
    assert_eq!(found[0], found[1], "a power of two is the same in both types");
    assert_eq!(found[2], found[3]);
    // No number.
    let folder = stored(json!({"quant_method": "mxfp8"}), |name, _, shape| {
        let (n, d) = (shape[0], shape[1]);
        let scale = name.replace("weight", "weight_scale");
        let scales = vec![255u8; n * d.div_ceil(32)];
        vec![
            (name.to_owned(), Dtype::F8_E4M3, shape.to_vec(), vec![8; n * d]),
            (scale, Dtype::F8_E8M0, vec![n, d.div_ceil(32)], scales),
        ]
    });
    let (_, log) = failure(&["calibrate", text(folder.path())]);
    assert!(log.contains("NaN"), "{log}");
}

/// Tensors of adapters are refused in a stream, and what came is named where something is missing.
#[test]
fn streams_say_what_came() {
    let case = grouped("llama", "llama", json!({}));
    let config = case.config.to_string();
    let stream = || ScaleStream::new(config.as_bytes(), Path::new("config.json"), &[]).unwrap();
    let bytes = || 1f32.to_le_bytes().repeat(4 * 48);
    for name in [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.1.self_attn.k_proj.lora_B.default.weight",
        "model.layers.1.self_attn.v_proj.base_layer.weight",
        "model.layers.0.input_layernorm.modules_to_save.default.weight",
        "prompt_encoder.default.embedding.weight",
    ] {
        let mut stream = stream();
        assert!(stream.wants(name), "{name}");
        let error = stream.push(name, Dtype::F32, &[4, 48], bytes()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("merge"), "{error}");
        assert!(stream.note(name, Dtype::F32, &[4, 48]).unwrap_err().to_string().contains("merge"));
    }
    // An adapter of the MLP does not change attention.
    assert!(!stream().wants("model.layers.0.mlp.up_proj.lora_A.weight"));
    for prefix in ["_orig_mod.", "module."] {
        let mut stream = stream();
        let name = format!("{prefix}model.layers.0.self_attn.q_proj.weight");
        assert!(stream.push(&name, Dtype::F32, &[64, 48], 1f32.to_le_bytes().repeat(64 * 48)).unwrap().is_empty());
        let error = stream.finish(false).unwrap_err().to_string();
        assert!(error.contains("missing") && error.contains(&name), "{error}");
    }
}

/// An audit of the same folder agrees with its calibration on what every operand needs.
#[test]
fn an_audit_needs_what_a_calibration_states() {
    let folder = Model::llama().folder();
    let audit = audit(folder.path(), Engine::Trtllm, &Serving::default());
    let needed: Vec<f64> = audit.layers.iter().map(|layer| f64::from(layer.k[0].needed.unwrap())).collect();
    let stated = descales(folder.path(), "k_descale");
    let largest: Vec<f64> = stated.chunks(2).map(|heads| heads[0].max(heads[1])).collect();
    assert_eq!(needed, largest.iter().map(|x| f64::from(*x as f32)).collect::<Vec<_>>());
    assert!(Checkpoint::open(folder.path()).is_ok());
    let output = sigmascale(&["inspect", text(folder.path())]);
    assert_eq!(output.status.code(), Some(0));
}

/// Weights that are rounded to F16 when they are loaded: what its range does to them is counted or refused.
#[test]
fn the_range_of_f16_is_in_the_bounds() {
    let with = |dtype: Dtype, config: &'static str, factor: f64| {
        let mut model = Model::new(grouped("llama", "llama", json!({"torch_dtype": config})));
        model.case.dtype = dtype;
        for (name, (_, values)) in &mut model.tensors.0 {
            if name.contains("layers.1.self_attn.v_proj.weight") {
                values.iter_mut().for_each(|x| *x *= factor);
            }
        }
        model.folder()
    };
    for dtype in [Dtype::F32, Dtype::BF16] {
        for (factor, part) in [(1e-8, "rounded by more"), (1e9, "is infinite"), (3e4, "can pass 65504")] {
            for command in ["calibrate", "verify"] {
                let (code, log) = failure(&[command, text(with(dtype, "float16", factor).path())]);
                assert!(code == 1 || code == 3, "{code}");
                assert!(log.contains("layers.1.self_attn.v_proj.weight head 0") && log.contains(part), "{dtype:?} {factor}: {log}");
            }
            assert!(!descales(with(dtype, "bfloat16", factor).path(), "v_descale").is_empty());
        }
        assert!(!descales(with(dtype, "float16", 1.0).path(), "v_descale").is_empty());
        // Nothing is lost of zeros.
        assert!(!descales(with(dtype, "float16", 0.0).path(), "v_descale").is_empty());
    }
    // What is stored in F16 is what runs.
    assert!(!descales(with(Dtype::F16, "float16", 1e-3).path(), "v_descale").is_empty());
}
