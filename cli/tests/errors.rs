//! What goes wrong on the command line: the message names what is there and what to do, and one kind of mistake has one
//! exit code.

mod run;

use run::{TINY_LLAMA, copy_of_tiny_llama, failure, text};
use std::path::{Path, PathBuf};

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
const INDEX: &str = "model.safetensors.index.json";
const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n";

/// A copy of the carried checkpoint without the named files and with these empty ones.
fn folder(without: &[&str], with: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let (keep, folder) = copy_of_tiny_llama();
    without.iter().for_each(|name| std::fs::remove_file(folder.join(name)).unwrap());
    with.iter().for_each(|name| std::fs::write(folder.join(name), b"").unwrap());
    (keep, folder)
}

/// The one line that every command which reads a model gives for this one; exit code 1.
fn refused(model: &str) -> String {
    let lines = [
        &["calibrate", model][..],
        &["inspect", model],
        &["stress", "checkpoint-load", "--model", model],
        &["bench", "spectral", "--model", model],
    ]
    .map(|args| {
        let (code, log) = failure(args);
        assert!(code == 1 && log.lines().count() == 1, "{args:?}: {code} {log}");
        log
    });
    assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    lines[0].clone()
}

fn names(model: &Path, parts: &[&str]) {
    let line = refused(text(model));
    for part in parts {
        assert!(line.contains(part), "{part:?} is missing from {line}");
    }
}

#[test]
fn unknown_names() {
    let line = refused("mistral-8b");
    assert!(line.starts_with("error: mistral-8b: ") && line.contains("nearest: mistral-7b, "), "{line}");
    assert!(["gpt2-xl", "llama-2-13b"].iter().all(|name| line.contains(name)), "{line}");
    let line = refused("nothing-like-it");
    assert!(!line.contains("nearest") && line.contains("gpt2-xl"), "{line}");
    let line = refused("mistralai/Mistral-7B-v0.1");
    assert!(
        line.contains("`hf download mistralai/Mistral-7B-v0.1`") && line.contains("preset of its config: mistral-7b"),
        "{line}"
    );
    let line = refused("Qwen/Qwen2.5-0.5B");
    assert!(line.contains("`hf download Qwen/Qwen2.5-0.5B`") && !line.contains("preset"), "another size: {line}");
    let line = refused("/no/such/folder");
    assert!(!line.contains("hf download") && line.contains("/no/such/folder"), "{line}");
}

#[test]
fn folders_without_the_weights_that_are_read() {
    let weights = [&SHARDS[..], &[INDEX]].concat();
    let (_keep, bin) = folder(&weights, &["pytorch_model.bin"]);
    names(&bin, &["pytorch_model.bin", "save_pretrained(folder, safe_serialization=True)"]);
    let (_keep, config) = folder(&weights, &[]);
    let json = config.join("config.json");
    names(&config, &["model.safetensors", text(&json)]);
    let (_keep, gguf) = folder(&weights, &["model-Q4_K_M.gguf"]);
    names(&gguf, &["model-Q4_K_M.gguf", "safetensors"]);
    names(&gguf.join("model-Q4_K_M.gguf"), &["GGUF", "safetensors"]);
    names(&bin.join("pytorch_model.bin"), &["save_pretrained"]);
    let (_keep, other) = folder(&weights, &["adapter.safetensors"]);
    let named = other.join("adapter.safetensors");
    names(&other, &["model.safetensors.index.json", text(&named)]);
}

#[test]
fn folders_without_all_shards() {
    let (_keep, no_index) = folder(&[INDEX, SHARDS[1]], &[]);
    names(&no_index, &[SHARDS[0], INDEX, "2 shards"]);
    let (_keep, one) = folder(&[SHARDS[1]], &[]);
    names(&one, &[INDEX, "2 shards", SHARDS[1]]);
}

#[test]
fn folders_without_a_config() {
    let (_keep, no_config) = folder(&["config.json"], &[]);
    names(&no_config, &[SHARDS[0], "config.json"]);
    names(&no_config.join(SHARDS[0]), &["config.json"]);
    let bin = tempfile::tempdir().unwrap();
    std::fs::write(bin.path().join("pytorch_model.bin"), b"").unwrap();
    names(bin.path(), &["pytorch_model.bin", "save_pretrained"]);
    let cache = tempfile::tempdir().unwrap();
    let snapshot = cache.path().join("snapshots").join("0123abcd");
    std::fs::create_dir_all(&snapshot).unwrap();
    names(cache.path(), &[text(&snapshot)]);
    let empty = tempfile::tempdir().unwrap();
    names(empty.path(), &[text(empty.path())]);
    std::fs::write(empty.path().join("model.gguf"), b"").unwrap();
    names(empty.path(), &["model.gguf"]);
    std::fs::rename(empty.path().join("model.gguf"), empty.path().join("notes.txt")).unwrap();
    names(empty.path(), &["notes.txt"]);
    names(&empty.path().join("notes.txt"), &[".safetensors", "config.json"]);
}

#[test]
fn one_shard_of_several() {
    let (_keep, whole) = folder(&[], &[]);
    let shard = whole.join(SHARDS[0]);
    names(&shard, &[text(&shard), text(&whole)]);
}

#[test]
fn other_content_under_the_name_of_weights() {
    for (bytes, part) in [
        (&b"GGUF\x03\0\0\0 and the rest"[..], "GGUF"),
        (b"PK\x03\x04\x14\0\x08\x08 and the rest", "PyTorch"),
        (b"<!DOCTYPE html><html><body>Log in</body></html>", "web page"),
        (b"{\"error\": \"not found\"}", "JSON"),
    ] {
        let (_keep, folder) = folder(&[&SHARDS[..], &[INDEX]].concat(), &[]);
        let file = folder.join("model.safetensors");
        std::fs::write(&file, bytes).unwrap();
        names(&folder, &[text(&file), part]);
    }
}

#[test]
fn numbers_past_a_range_name_the_argument_or_the_operand() {
    for (options, part) in [(&["--as-paper", "--c", "1e308"][..], "c 1e308"), (&["--eta", "1e-320"], "eta 1e-320")] {
        let (code, log) = failure(&[&["calibrate", TINY_LLAMA][..], options].concat());
        assert!(code == 2 && log.contains(part), "{options:?}: {code} {log}");
    }
}

#[test]
fn a_missing_path_names_the_option() {
    let (code, log) = failure(&["stress", "refit", "--model", TINY_LLAMA, "--checkpoints", "a,b"]);
    assert!(code == 1 && log.contains("error: a: ") && log.contains("--checkpoints"), "{code} {log}");
}

#[test]
fn git_lfs_pointers() {
    for name in ["config.json", INDEX, SHARDS[0]] {
        let (_keep, folder) = folder(&[], &[]);
        std::fs::write(folder.join(name), POINTER).unwrap();
        names(&folder, &[name, "`git lfs pull`", text(&folder)]);
    }
}

#[test]
fn an_unknown_family_lists_the_known_ones() {
    let (_keep, folder) = copy_of_tiny_llama();
    let config = folder.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace("\"llama\"", "\"alibi-net\"");
    std::fs::write(&config, text).unwrap();
    names(&folder, &["config.json", "`alibi-net`", "`sigmascale families`"]);
    let text = std::fs::read_to_string(&config).unwrap().replace("\"alibi-net\"", "\"qwen3_mo\"");
    std::fs::write(&config, text).unwrap();
    names(&folder, &["qwen3_moe"]);
}

/// Exit code 2 is for options, whatever the files hold; 1 for what they name.
#[test]
fn one_kind_of_mistake_has_one_exit_code() {
    let stress = |options: &[&'static str]| [&["stress", "weight-spike", "--model", TINY_LLAMA][..], options].concat();
    let model = |options: &[&'static str]| [&["calibrate", "mistral-7b"][..], options].concat();
    let bench = |options: &[&'static str]| [&["bench", "attention"][..], options].concat();
    let usage: Vec<(Vec<&str>, &str)> = vec![
        // Values that are no numbers, or of the wrong sign.
        (stress(&["--steps", "-3"]), "--steps"),
        (stress(&["--steps", "0"]), "--steps"),
        (stress(&["--layers", "-1"]), "--layers"),
        (stress(&["--seq-len", "-8"]), "--seq-len"),
        (stress(&["--seed", "-1"]), "--seed"),
        (stress(&["--delta", "-1"]), "delta -1"),
        (stress(&["--delayed-te-margin", "-40"]), "delayed-te: margin -40"),
        (model(&["--seq-len", "-1"]), "--seq-len"),
        (model(&["--batch", "1.5"]), "--batch"),
        (model(&["--eta", "-0.5"]), "eta -0.5"),
        (model(&["--delta", "inf"]), "--delta"),
        (model(&["--as-paper", "--c", "-0.1"]), "c -0.1"),
        (bench(&["--seqlens", "-5"]), "--seqlens"),
        (bench(&["--tokens", "0"]), "--tokens"),
        (bench(&["--shapes", "64x8"]), "--shapes"),
        (vec!["bench", "spectral", "--layers", "-2"], "--layers"),
        // Options that contradict each other, or the scenario.
        (model(&["--bound", "worst-case", "--estimator", "power"]), "worst-case"),
        (vec!["inspect", "mistral-7b"], "mistral-7b"),
        (stress(&["--trace", "x.json"]), "--trace"),
        // Empty values.
        (vec!["calibrate", ""], "the model is empty"),
        (vec!["calibrate", " "], "the model is empty"),
        (bench(&["--shapes", ""]), "--shapes"),
        (model(&["--seq-len", "99999999999999999999"]), "--seq-len"),
        (model(&["--estimator", "power"]), "rank-aware"),
        (stress(&["--policies", "geometry,geometry"]), "geometry"),
        (stress(&["--policies", ""]), "policy"),
        // Values past what the model has.
        (stress(&["--layers", "7"]), "layers 7"),
        (stress(&["--steps", "100001"]), "steps 100001"),
    ];
    for (args, part) in &usage {
        let (code, log) = failure(args);
        assert!(code == 2 && log.contains(part), "{args:?}: {code} {log}");
    }
    let (_keep, broken) = folder(&[], &[]);
    std::fs::write(broken.join("config.json"), "{").unwrap();
    let broken = text(&broken).to_owned();
    for (args, part) in [
        (&["calibrate", "/no/such/model"][..], "/no/such/model"),
        (&["calibrate", &broken], "config.json"),
        (&["inspect", &broken], "config.json"),
        (&["stress", "refit", "--model", TINY_LLAMA, "--checkpoints", "/no/such/model"], "/no/such/model"),
        (&["stress", "refit", "--model", TINY_LLAMA, "--checkpoints", &broken], "config.json"),
        (&["stress", "replay", "--trace", "/no/such/trace"], "/no/such/trace"),
        (&["stress", "checkpoint-load", "--model", TINY_LLAMA, "--tokens", "/no/such/text"], "/no/such/text"),
        (&["families", "-o", "/no/such/folder/x"], "/no/such/folder/x"),
        (&["doctor", "-o", "/no/such/folder/x"], "/no/such/folder/x"),
    ] {
        let (code, log) = failure(args);
        assert!(code == 1 && log.contains(part) && log.lines().count() == 1, "{args:?}: {code} {log}");
    }
}

/// Under `--json` what went wrong is an object too, on stderr; usage errors are among them.
#[test]
fn errors_are_json_where_results_are() {
    for (args, kind, code) in [
        (&["calibrate", "no-such-model", "--json"][..], "io", 1),
        (&["calibrate", "mistral-7b", "--format", "json", "--delta", "2"], "argument", 2),
        (&["verify", "/no/such/folder", "--format=json"], "io", 3),
        (&["inspect", "--json", "--no-such-option"], "usage", 2),
    ] {
        let (exit, log) = failure(args);
        let found: serde_json::Value =
            serde_json::from_str(&log).unwrap_or_else(|error| panic!("{args:?}: {error}: {log}"));
        let error = &found["error"];
        assert_eq!((&error["kind"], &error["exit_code"], exit), (&kind.into(), &code.into(), code), "{log}");
        assert!(error["message"].as_str().is_some_and(|message| message.len() > 10), "{log}");
    }
}

#[test]
fn a_model_where_stress_takes_none_is_named_with_its_option() {
    let (code, log) = failure(&["stress", "weight-spike", "some-folder"]);
    assert!(code == 2 && log.contains("--model some-folder"), "{log}");
}

/// A model id is found in the Hugging Face cache, whose files are links; the result has its name, not that of the snapshot.
#[cfg(unix)]
#[test]
fn a_model_id_is_looked_up_in_the_cache_of_the_hub() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("hub/models--owner--tiny-llama");
    let (blobs, snapshot) = (model.join("blobs"), model.join("snapshots/0123abcd"));
    for folder in [&blobs, &snapshot, &model.join("refs")] {
        std::fs::create_dir_all(folder).unwrap();
    }
    std::fs::write(model.join("refs/main"), "0123abcd").unwrap();
    for entry in std::fs::read_dir(TINY_LLAMA).unwrap() {
        let from = entry.unwrap().path();
        let name = from.file_name().unwrap();
        std::fs::copy(&from, blobs.join(name)).unwrap();
        std::os::unix::fs::symlink(Path::new("../../blobs").join(name), snapshot.join(name)).unwrap();
    }
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_sigmascale"));
        let output =
            command.args(args).current_dir(home.path()).env("HF_HOME", home.path()).env_remove("HF_HUB_CACHE").output();
        let output = output.unwrap();
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {log}");
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let profile = run(&["calibrate", "owner/tiny-llama", "--json"]);
    assert_eq!(profile["model"]["name"], "owner/tiny-llama");
    let direct = run(&["calibrate", TINY_LLAMA, "--json"]);
    assert_eq!(profile["layers"], direct["layers"]);
    run(&["export", "owner/tiny-llama", "--to", "served", "--for", "vllm", "--json"]);
    // Weights of the export are files of their own, not links into a cache that may be emptied.
    let shard = home.path().join("served").join(SHARDS[0]);
    assert!(std::fs::symlink_metadata(&shard).unwrap().is_file());
    assert_eq!(run(&["verify", "served", "--json"])["safe"], true);
    let args =
        ["stress", "checkpoint-load", "--model", "owner/tiny-llama", "--layers", "1", "--seq-len", "16", "--json"];
    assert_eq!(run(&args)["model_layers"], 1);
}

/// `-v` says what was opened and how long it took, for every command; `-q` leaves errors alone.
#[test]
fn logs_are_asked_for_and_forbidden() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.txt");
    let served = folder.path().join("served");
    let log = |args: &[&str]| {
        let output = run::sigmascale(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    for args in [
        &["families"][..],
        &["doctor"],
        &["calibrate", TINY_LLAMA],
        &["export", TINY_LLAMA, "--to", text(&served), "--for", "vllm"],
        &["verify", TINY_LLAMA],
    ] {
        let said = log(&[args, &["-v"]].concat());
        assert!(
            said.contains("done seconds=") && said.contains("opened") == args.contains(&TINY_LLAMA),
            "{args:?}: {said}"
        );
    }
    assert!(log(&["families", "-o", text(&file)]).starts_with("wrote "));
    assert_eq!(log(&["families", "-q", "-o", text(&file)]), "");
    let (_, error) = failure(&["calibrate", "no-such-model", "-q"]);
    assert!(error.starts_with("error: no-such-model"), "{error}");
}
