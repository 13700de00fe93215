//! Files from strangers: each broken rule gives one clear error that names the file and the rule, and nothing panics.

mod common;

use common::fixtures::{Draw, Tensors, write_checkpoint, write_safetensors};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use safetensors::Dtype;
use serde_json::{Value, json};
use sigmascale::model::{AttentionSpec, Checkpoint};
use sigmascale::{Error, Result};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn config() -> Value {
    json!({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "rope_theta": 10000.0})
}

fn tensors() -> Tensors {
    let mut draw = Draw::new(1);
    for i in 0..2 {
        draw.add(format!("model.layers.{i}.input_layernorm.weight"), &[32], 1.0, 0.1);
        for (name, rows) in [("q", 32), ("k", 16), ("v", 16)] {
            draw.linear(&format!("model.layers.{i}.self_attn.{name}_proj"), rows, 32, None);
        }
    }
    draw.tensors
}

/// A sound checkpoint to break.
fn sound(shards: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(), &tensors(), Dtype::F32, shards);
    folder
}

fn weights(folder: &TempDir) -> PathBuf {
    folder.path().join("model.safetensors")
}

/// Opens and reads every layer.
fn read(path: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(path)?;
    (0..checkpoint.spec().layers.len()).try_for_each(|i| checkpoint.layer(i).map(drop))
}

fn refused(path: &Path) -> Error {
    read(path).expect_err("must be refused")
}

/// One sentence that names these: files, tensors, fields and values.
#[track_caller]
fn names(error: &Error, named: &[&str]) {
    let message = error.to_string();
    assert!(!message.contains('\n') && message.len() < 600, "one sentence: {message}");
    for name in named {
        assert!(message.contains(name), "`{name}` in: {message}");
    }
}

/// Writes a safetensors file from a header given as text.
fn write_raw(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_sound_checkpoint_is_read_as_a_folder_and_as_a_file() {
    for shards in [1, 3] {
        let folder = sound(shards);
        read(folder.path()).unwrap();
    }
    let folder = sound(1);
    read(&weights(&folder)).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let stored = checkpoint.tensor("model.layers.0.input_layernorm.weight").unwrap();
    assert_eq!((stored.shape.as_slice(), stored.view.shape()), (&[32][..], (1, 32)));
    names(&checkpoint.tensor("nothing").unwrap_err(), &["`nothing`"]);
    assert!(checkpoint.layer(2).unwrap_err().is_argument());
}

#[test]
fn truncated_at_any_length() {
    let folder = sound(1);
    let whole = std::fs::read(weights(&folder)).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for length in [0, 1, 7, 8, 9, header, header + 7, header + 8, whole.len() / 2, whole.len() - 1] {
        std::fs::write(weights(&folder), &whole[..length]).unwrap();
        let error = refused(folder.path());
        assert!(error.is_format(), "{error}");
        names(&error, &["model.safetensors"]);
    }
    let sizes = [whole.len() - 1, whole.len()].map(|size| size.to_string());
    names(&refused(folder.path()), &[&sizes[0], &sizes[1]]);
    let mut longer = whole.clone();
    longer.push(0);
    std::fs::write(weights(&folder), longer).unwrap();
    let sizes = [whole.len(), whole.len() + 1].map(|size| size.to_string());
    names(&refused(folder.path()), &[&sizes[0], &sizes[1]]);
}

#[test]
fn header_length_is_checked_before_anything_else() {
    let folder = sound(1);
    let mut bytes = std::fs::read(weights(&folder)).unwrap();
    for (length, other) in
        [(1u64 << 60, 100_000_000), (u64::MAX, 100_000_000), (100_000_001, 100_000_000), (99_000_000, bytes.len())]
    {
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        std::fs::write(weights(&folder), &bytes).unwrap();
        names(&refused(folder.path()), &["model.safetensors", &length.to_string(), &other.to_string()]);
    }
}

#[test]
fn offsets_that_overlap_leave_gaps_run_backwards_or_lie() {
    let folder = sound(1);
    let entry = |name: &str, shape: &str, from: u64, to: u64| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let cases = [
        (entry("a", "[4]", 0, 16) + "," + &entry("b", "[4]", 8, 24), "`b`"),
        (entry("a", "[4]", 0, 16) + "," + &entry("b", "[2]", 24, 32), "`b`"),
        (entry("a", "[4]", 16, 0), "`a`"),
        (
            entry("b", "[4]", 0, 16) + "," + &entry("a", "[4]", 16, 40),
            "`a` has shape [4] of type F32, which is 16 bytes",
        ),
        (entry("a", "[4]", 0, 16), "trailing"),
        (entry("a", "[4294967296,4294967296,4]", 0, 32), "`a` has shape [4294967296, 4294967296, 4]"),
        (entry("a", "[12]", 0, 48), "truncated"),
        (entry("a", "[-1]", 0, 16), "`a` has `shape` [-1]"),
        (r#""a":{"dtype":"F32","shape":[4],"data_offsets":[-4,12]}"#.to_owned(), "`a` has `data_offsets` [-4,12]"),
        (r#""a":{"dtype":"F32","data_offsets":[0,16]}"#.to_owned(), "`a` has no `shape`"),
        (r#""a":{"dtype":"F31","shape":[4],"data_offsets":[0,16]}"#.to_owned(), "\"F31\""),
        ("\"a\":7".to_owned(), "tensor `a`"),
    ];
    for (header, named) in cases {
        write_raw(&weights(&folder), &format!("{{{header}}}"), &[0; 32]);
        let error = refused(folder.path());
        assert!(error.is_format(), "{error}");
        names(&error, &["model.safetensors", named]);
    }
    write_raw(&weights(&folder), "{not json", &[]);
    names(&refused(folder.path()), &["JSON"]);
    write_raw(&weights(&folder), "{}", &[]);
    names(&refused(folder.path()), &["`layers.0.self_attn.q_proj.weight`", "llama"]);
}

#[test]
fn wrong_type_shape_or_absence_names_the_tensor() {
    let name = "model.layers.1.self_attn.k_proj.weight";
    let folder = sound(1);
    let mut broken = tensors();
    broken.0.insert(name.to_owned(), (vec![17, 32], vec![0.0; 17 * 32]));
    write_safetensors(&weights(&folder), &broken.0, Dtype::F32);
    names(&refused(folder.path()), &["model.safetensors", name, "[17, 32]", "[16, 32]"]);
    broken.0.remove(name);
    write_safetensors(&weights(&folder), &broken.0, Dtype::F32);
    names(&refused(folder.path()), &[name]);
    // The same bytes under a type that is no weight.
    write_safetensors(&weights(&folder), &tensors().0, Dtype::F32);
    let bytes = std::fs::read(weights(&folder)).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap().replace("\"F32\"", "\"I32\"");
    write_raw(&weights(&folder), &header, &bytes[8 + length..]);
    let error = refused(folder.path());
    assert!(error.is_unsupported());
    names(&error, &["q_proj.weight", "I32"]);
}

#[test]
fn vectors_must_be_finite_and_complete() {
    for (value, name) in
        [(f64::NAN, "model.layers.1.input_layernorm.weight"), (f64::INFINITY, "layers.0.self_attn.q_proj.bias")]
    {
        let folder = sound(1);
        let mut broken = tensors();
        for i in 0..2 {
            broken.0.insert(format!("model.layers.{i}.self_attn.q_proj.bias"), (vec![32], vec![0.0; 32]));
        }
        let (_, (_, values)) = broken.0.iter_mut().find(|(n, _)| n.ends_with(name)).unwrap();
        values[7] = value;
        write_safetensors(&weights(&folder), &broken.0, Dtype::F32);
        let error = refused(folder.path());
        assert!(error.is_non_finite(), "{error}");
        names(&error, &["model.safetensors", name]);
    }
    // A bias in one layer and not in the other, or promised and absent.
    let folder = sound(1);
    let mut half = tensors();
    half.0.insert("model.layers.0.self_attn.q_proj.bias".to_owned(), (vec![32], vec![0.0; 32]));
    write_safetensors(&weights(&folder), &half.0, Dtype::F32);
    names(&refused(folder.path()), &["model.layers.1.self_attn.q_proj.bias"]);
    // Beside a norm with a shift, a bias that the config denies is a contradiction.
    let folder = sound(1);
    let mut denied = config();
    (denied["model_type"], denied["use_bias"]) = (json!("starcoder2"), json!(false));
    write_checkpoint(folder.path(), &denied, &half, Dtype::F32, 1);
    names(&refused(folder.path()), &["model.layers.0.self_attn.q_proj.bias", "config"]);
    let folder = sound(1);
    let mut promised = config();
    promised["attention_bias"] = json!(true);
    write_checkpoint(folder.path(), &promised, &tensors(), Dtype::F32, 1);
    names(&refused(folder.path()), &["model.layers.0.self_attn.q_proj.bias"]);
}

#[test]
fn an_index_may_only_name_files_of_its_folder_that_are_there() {
    let folder = sound(2);
    let index = folder.path().join("model.safetensors.index.json");
    let shard = "model-00002-of-00002.safetensors";
    std::fs::remove_file(folder.path().join(shard)).unwrap();
    names(&refused(folder.path()), &["index.json", shard]);
    for outside in ["../model.safetensors", "/etc/hostname", "a/../../b", ".", ""] {
        std::fs::write(&index, json!({"weight_map": {"t": outside}}).to_string()).unwrap();
        let error = refused(folder.path());
        names(&error, &["index.json", "`t`"]);
    }
    std::fs::write(&index, json!({"weight_map": {"t": "model-00001-of-00002.safetensors"}}).to_string()).unwrap();
    names(&refused(folder.path()), &["00001-of-00002", "`t`"]);
    for broken in ["", "[]", "{\"weight_map\": 3}", "{\"weight_map\": {\"t\": 3}}"] {
        std::fs::write(&index, broken).unwrap();
        names(&refused(folder.path()), &["index.json", "weight_map"]);
    }
    std::fs::remove_file(&index).unwrap();
    names(&refused(folder.path()), &["model.safetensors.index.json", "2 shards"]);
}

#[test]
fn configs_that_make_no_sense() {
    let with = |changes: Value| {
        let mut config = config();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        AttentionSpec::from_config_json(config.to_string().as_bytes(), "some/config.json".as_ref()).unwrap_err()
    };
    let cases = [
        (json!({"num_attention_heads": 3}), "`num_attention_heads`"),
        (json!({"num_attention_heads": 2, "num_key_value_heads": 3}), "`num_attention_heads`, `num_key_value_heads`"),
        (json!({"head_dim": 12}), "`head_dim`"),
        (json!({"rope_theta": -1e300}), "-1e300"),
        (json!({"rope_scaling": {"rope_type": "spiral"}}), "`spiral`"),
        (json!({"num_hidden_layers": 0}), "`num_hidden_layers`"),
        (json!({"num_hidden_layers": 10_001}), "`num_hidden_layers`"),
        (json!({"num_hidden_layers": -1}), "`num_hidden_layers`"),
        (json!({"num_hidden_layers": 2.5}), "`num_hidden_layers`"),
        (json!({"num_hidden_layers": "2"}), "`num_hidden_layers`"),
        (json!({"num_hidden_layers": null}), "`num_hidden_layers`"),
        (json!({"hidden_size": 1u64 << 40}), "`hidden_size`"),
        (json!({"num_attention_heads": 0}), "`num_attention_heads`"),
        (json!({"head_dim": 512}), "512"),
        (json!({"rope_theta": 0}), "`rope_theta`"),
        (json!({"rope_theta": "big"}), "`rope_theta`"),
        (json!({"rope_scaling": {"rope_type": "linear"}}), "`factor`"),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": -2}}), "`factor`"),
        (json!({"rope_scaling": {"rope_type": "spiral", "factor": 2}}), "`spiral`"),
        (json!({"rope_scaling": 3}), "`rope_scaling`"),
        (json!({"partial_rotary_factor": 0.5}), "share"),
        (json!({"layer_types": ["full_attention"]}), "`layer_types`"),
        (json!({"layer_types": ["full_attention", "linear_attention"]}), "linear_attention"),
        (json!({"torch_dtype": "int8"}), "`int8`"),
        (json!({"use_qk_norm": true}), "`use_qk_norm`"),
        (json!({"model_type": "hunyuan_v1_dense", "use_qk_norm": false}), "`use_qk_norm`"),
        (json!({"model_type": "hunyuan_v1_moe", "use_cla": true}), "`use_cla`"),
        (json!({"model_type": "phi", "hidden_size": 64, "qk_layernorm": true}), "`qk_layernorm`"),
        (json!({"model_type": "phi", "hidden_size": 64, "rotary_dim": 8}), "`rotary_dim`"),
        (json!({"model_type": 3}), "`model_type`"),
        (json!({"model_type": null}), "`model_type`"),
        (json!({"model_type": "gemma3"}), "`text_config`"),
        (json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}), "weight_block_size"),
    ];
    for (changes, named) in cases {
        let error = with(changes);
        assert!(error.is_format() || error.is_unsupported(), "{error}");
        names(&error, &["some/config.json", named]);
    }
    for text in ["", "[]", "3", "{", "\u{0}", &"[".repeat(100_000)] {
        let error = AttentionSpec::from_config_json(text.as_bytes(), "some/config.json".as_ref()).unwrap_err();
        names(&error, &["some/config.json", "JSON"]);
    }
}

#[test]
fn a_config_of_100_mb_is_refused_by_its_size() {
    let folder = sound(1);
    let path = folder.path().join("config.json");
    // Sparse: the size alone must be enough.
    std::fs::File::create(&path).unwrap().set_len(100 << 20).unwrap();
    let rule = ["config.json", "16777216", "104857600"];
    names(&AttentionSpec::from_config_file(&path).unwrap_err(), &rule);
    names(&refused(folder.path()), &rule);
}

#[test]
fn paths_that_lead_nowhere() {
    let folder = sound(1);
    let error = refused(&folder.path().join("absent"));
    assert!(error.is_io());
    names(&error, &["absent"]);
    let error = refused(&folder.path().join("config.json"));
    assert!(error.is_format());
    names(&error, &["config.json"]);
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    let error = refused(folder.path());
    assert!(error.is_format());
    names(&error, &["config.json"]);
    let folder = sound(1);
    std::fs::remove_file(weights(&folder)).unwrap();
    std::fs::create_dir(weights(&folder)).unwrap();
    names(&refused(folder.path()), &["model.safetensors"]);
}

#[cfg(unix)]
#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    for name in ["model.safetensors", "config.json"] {
        let folder = sound(1);
        let path = folder.path().join(name);
        std::fs::remove_file(&path).unwrap();
        if !std::process::Command::new("mkfifo").arg(&path).status().is_ok_and(|status| status.success()) {
            eprintln!("skipped a_pipe_is_refused_and_not_waited_for: no mkfifo");
            return;
        }
        names(&refused(folder.path()), &[name]);
    }
}

#[cfg(unix)]
#[test]
fn a_path_without_permission() {
    use std::os::unix::fs::PermissionsExt;
    let folder = sound(1);
    for name in ["model.safetensors", "config.json"] {
        let path = folder.path().join(name);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
        if std::fs::File::open(&path).is_ok() {
            eprintln!("skipped a_path_without_permission: this user may read any file");
            return;
        }
        let error = refused(folder.path());
        assert!(error.is_io(), "{error}");
        names(&error, &[name]);
    }
}

#[test]
fn random_damage_never_panics() {
    let mut rng = StdRng::seed_from_u64(9);
    let folder = sound(1);
    let whole = std::fs::read(weights(&folder)).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let config = config().to_string().into_bytes();
    for _ in 0..300 {
        let mut bytes = whole.clone();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..header);
            bytes[at] = rng.random();
        }
        std::fs::write(weights(&folder), &bytes).unwrap();
        if let Err(error) = read(folder.path()) {
            names(&error, &[]);
        }
        let mut bytes = config.clone();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..bytes.len());
            bytes[at] = rng.random_range(b' '..b'~');
        }
        if let Err(error) = AttentionSpec::from_config_json(&bytes, "config.json".as_ref()) {
            names(&error, &["config.json"]);
        }
    }
}
