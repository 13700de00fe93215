//! Models of the Hugging Face hub that are on this machine: ids such as `owner/name`, looked up in its cache. Nothing is
//! downloaded.

use std::env;
use std::path::{Path, PathBuf};

/// The model's part of `owner/name`, if the argument can be that.
pub(super) fn name(argument: &str) -> Option<&str> {
    let (owner, name) = argument.split_once('/')?;
    let plain = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let file = [".json", ".safetensors", ".gguf", ".bin"].iter().any(|ending| name.ends_with(ending));
    (plain(owner) && plain(name) && !file).then_some(name)
}

/// Where the cache is: by the variables that `huggingface_hub` reads, in its order.
pub(super) fn cache() -> Option<PathBuf> {
    let set = |variable: &str| env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || Some(set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?.join("huggingface"));
    set("HF_HUB_CACHE")
        .or_else(|| set("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(set("HF_HOME").or_else(home)?.join("hub")))
}

/// The folder of a model of this id in the cache: the snapshot that `main` stands for, or the only one.
pub(super) fn snapshot(cache: &Path, id: &str) -> Option<PathBuf> {
    let model = cache.join(format!("models--{}", id.replace('/', "--")));
    let snapshots = model.join("snapshots");
    let main =
        std::fs::read_to_string(model.join("refs").join("main")).ok().map(|commit| snapshots.join(commit.trim()));
    let only = || {
        let mut found = std::fs::read_dir(&snapshots).ok()?.flatten().map(|entry| entry.path());
        found.next().filter(|_| found.next().is_none())
    };
    main.filter(|folder| folder.is_dir()).or_else(only)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hub_id_is_an_owner_and_a_name() {
        assert_eq!(name("mistralai/Mistral-7B-v0.1"), Some("Mistral-7B-v0.1"));
        for path in ["mistral-7b", "./models/x", "/models/x", "models/x/y", "models/config.json", "models/", "../x"] {
            assert_eq!(name(path), None, "{path}");
        }
    }

    #[test]
    fn the_snapshot_is_that_of_main_or_the_only_one() {
        let cache = tempfile::tempdir().unwrap();
        let model = cache.path().join("models--owner--name");
        let snapshots = model.join("snapshots");
        std::fs::create_dir_all(snapshots.join("aaa")).unwrap();
        let found = || snapshot(cache.path(), "owner/name");
        assert_eq!(found(), Some(snapshots.join("aaa")));
        std::fs::create_dir(snapshots.join("bbb")).unwrap();
        assert_eq!(found(), None, "which of two is meant is not known");
        std::fs::create_dir(model.join("refs")).unwrap();
        std::fs::write(model.join("refs").join("main"), "bbb\n").unwrap();
        assert_eq!(found(), Some(snapshots.join("bbb")));
        assert_eq!(snapshot(cache.path(), "owner/other"), None);
    }
}
