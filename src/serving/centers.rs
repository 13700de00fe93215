//! The centers that an export left in a folder's certificate, judged by the weights.

use super::folder::CERTIFICATE_FILE;
use super::settings::Settings;
use crate::error::Result;
use crate::model::{AttentionSpec, Checkpoint};
use crate::plan::{Center, CenteredLayer, center_hash};
use crate::scale::Descale;
use serde::Deserialize;
use std::path::Path;

/// As a [`CenterCertificate`](super::CenterCertificate) has them.
#[derive(Deserialize)]
struct Stored {
    hash: String,
    layers: Vec<StoredLayer>,
}

#[derive(Deserialize)]
struct StoredLayer {
    layer: usize,
    k: Option<Vec<Vec<f32>>>,
    v: Option<Vec<Vec<f32>>>,
    k_scale: Vec<Descale>,
    v_scale: Option<Vec<Descale>>,
}

/// What is to be said of the centers of a folder.
#[derive(Clone, Debug, Default)]
pub(super) struct Judged {
    /// For people: the faults, or what the centers are.
    pub notes: Vec<String>,
    /// Whether one of them is wrong.
    pub wrong: bool,
}

/// The centers of a folder; nothing where its certificate has none. `spec`: the model as the server runs it.
pub(super) fn judged(checkpoint: &Checkpoint, spec: &AttentionSpec, folder: &Path) -> Result<Judged> {
    let certificate = Settings::read_if_present(&folder.join(CERTIFICATE_FILE))?;
    let Some(value) = certificate.and_then(|file| file.value.get("centers").cloned()) else {
        return Ok(Judged::default());
    };
    let wrong = |notes| Ok(Judged { notes, wrong: true });
    let Ok(stored) = serde_json::from_value::<Stored>(value) else {
        return wrong(vec![format!("The centers of {CERTIFICATE_FILE} cannot be read: export the model again.")]);
    };
    let (mut faults, mut centers) = (Vec::new(), Vec::new());
    for StoredLayer { layer: number, k, v, k_scale, v_scale } in stored.layers {
        let Some(index) = spec.layers.iter().position(|own| own.number == number) else {
            faults.push(format!("Centers of layer {number}: the model has no attention there."));
            continue;
        };
        let center = Center { layer: index, k, v };
        centers.push(center.clone());
        let own = match CenteredLayer::of_stored(spec, checkpoint.layer(index)?, center) {
            Ok(Some((_, own))) => own,
            Ok(None) => continue,
            Err(error) => {
                faults.push(format!("Centers of layer {number}: {error}."));
                continue;
            }
        };
        let rows = [("k - c", Some(&k_scale), Some(&own.k_descale)), ("v - m", v_scale.as_ref(), own.v_descale.as_ref())];
        for (what, scale, needed) in rows {
            let Some((scale, needed)) = scale.zip(needed) else { continue };
            if scale.len() != needed.len() {
                faults.push(format!("Layer {number}: {} scales of {what} for {} KV heads.", scale.len(), needed.len()));
            }
            let over = scale.iter().zip(needed).map(|(scale, needed)| needed.get() / scale.get()).fold(0.0, f32::max);
            if over > 1.0 {
                faults.push(format!("Layer {number}: under its centered scale {what} can overflow by a factor of {over:.3}."));
            }
        }
    }
    let hash = center_hash(&centers);
    if hash != stored.hash {
        faults.push(format!("The hash of the centers is {hash}, and {CERTIFICATE_FILE} has {}.", stored.hash));
    }
    if !faults.is_empty() {
        return wrong(faults);
    }
    let notes = vec![format!("Centers {hash} of {} layers: the centered scales cover what is left.", centers.len())];
    Ok(Judged { notes, wrong: false })
}
