//! Attention of a folder that neither an audit nor an export judges.

use super::audit::Unjudged;
use super::built::other_class;
use super::census::{self, Unread};
use super::description::Otherwise;
use super::engine::Engine;
use super::names::ScaleNames;
use super::settings::Settings;
use crate::model::{Checkpoint, WeightFiles};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Attention in the folder that is not judged, whoever serves it.
pub(super) fn unjudged(
    folder: &Path,
    checkpoint: &Checkpoint,
    config: &Settings,
    names: &ScaleNames,
    files: &WeightFiles,
) -> Vec<Unjudged> {
    let wrapped = config.value.get("text_config").is_some_and(Value::is_object)
        || ["vision_config", "audio_config"].iter().any(|key| config.value.get(*key).is_some_and(Value::is_object));
    let spec = checkpoint.spec();
    let unread = Unread::new(spec, checkpoint.layer_count(), checkpoint.attention_stems(), &names.modules, wrapped);
    let mut reasons = BTreeMap::<String, BTreeSet<String>>::new();
    for tensor in files.tensors() {
        let reason = if census::is_adapter(tensor.name) {
            Some("tensors of an adapter, which change attention where they are applied: merge them".to_owned())
        } else {
            unread.reason(tensor.name)
        };
        if let Some(reason) = reason {
            reasons.entry(reason).or_default().insert(tensor.name.to_owned());
        }
    }
    if let Some(class) = other_class(config, &spec.family) {
        let why = format!(
            "`architectures` names {class}, which engines build, and the bounds are those of `{}`",
            spec.family
        );
        reasons.entry(why).or_default().insert("config.json".to_owned());
    }
    let below: BTreeSet<String> = files.files().filter(|file| file.contains('/')).map(str::to_owned).collect();
    if !below.is_empty() {
        let why = "lies in a folder below, where engines do not look for weights: move it up and mend the index";
        reasons.entry(why.to_owned()).or_default().extend(below);
    }
    let adapters: BTreeSet<String> = census::adapter_files(folder).into_iter().collect();
    if !adapters.is_empty() {
        let why =
            "an adapter next to the model, which changes attention where it is applied: merge it, or move it away";
        reasons.entry(why.to_owned()).or_default().extend(adapters);
    }
    reasons.into_iter().map(|(why, names)| Unjudged { what: census::first_of(&names), why }).collect()
}

/// Settings by which an engine computes attention otherwise than the bounds do.
pub(super) fn otherwise(engine: Engine, config: &Settings) -> Vec<Unjudged> {
    let places = config.places();
    let acts = |row: &&Otherwise| {
        places.iter().filter_map(|map| map.get(row.key)).any(|value| match value {
            Value::Null | Value::Bool(false) => false,
            value => row.neutral.is_none() || value.as_f64() != row.neutral,
        })
    };
    let said = |row: &Otherwise| Unjudged {
        what: "config.json".to_owned(),
        why: format!("`{}`, by which {engine} {}, is not judged", row.key, row.why),
    };
    engine.description().otherwise.iter().filter(acts).map(said).collect()
}
