//! Small checkpoints with scales, changed before they are written.

use super::common::cases::{Case, cases, draw, grouped, merge};
use super::common::fixtures::{Tensors, write_checkpoint};
use safetensors::Dtype;
use serde_json::{Value, json};
use sigmascale::model::Checkpoint;
use sigmascale::serving::{Audit, AuditEntry, Engine, Serving, verify};
use std::path::Path;
use tempfile::TempDir;

pub fn scheme(strategy: &str) -> Value {
    json!({"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": true, "dynamic": false})
}

pub fn compressed() -> Value {
    json!({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme("tensor")})
}

/// A checkpoint in F32 that may be changed before it is written.
pub struct Model {
    pub case: Case,
    pub tensors: Tensors,
}

impl Model {
    pub fn new(case: Case) -> Self {
        let tensors = draw(&case, 5);
        Self { case: Case { dtype: Dtype::F32, shards: 1, ..case }, tensors }
    }

    pub fn llama() -> Self {
        Self::new(grouped("llama", "llama", json!({"quantization_config": compressed()})))
    }

    pub fn named(name: &str, extra: Value) -> Self {
        let case = cases().into_iter().find(|case| case.name == name).unwrap();
        Self::new(Case { config: merge(case.config.clone(), extra), ..case })
    }

    pub fn set(&mut self, name: impl Into<String>, value: f64) {
        self.tensors.0.insert(name.into(), (vec![], vec![value]));
    }

    pub fn scale(&mut self, layer: usize, rest: &str, value: f64) {
        self.set(format!("{}layers.{layer}.self_attn.{rest}", self.case.prefix), value);
    }

    pub fn add(&mut self, name: impl Into<String>, shape: &[usize], value: f64) {
        self.tensors.0.insert(name.into(), (shape.to_vec(), vec![value; shape.iter().product()]));
    }

    pub fn folder(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &self.case.config, &self.tensors, self.case.dtype, 1);
        folder
    }

    pub fn audit(&self, engine: Engine) -> Audit {
        self.audit_with(engine, &Serving::default())
    }

    pub fn audit_with(&self, engine: Engine, serving: &Serving) -> Audit {
        audit(self.folder().path(), engine, serving)
    }

    /// Scales that cover q, k and v of every layer, under these names.
    pub fn cover(&mut self, engine: Engine, names: [&str; 3]) {
        let bare =
            Self { case: Case { config: self.case.config.clone(), ..copy(&self.case) }, tensors: self.tensors.clone() };
        for layer in bare.audit(engine).layers {
            for (name, row) in names.into_iter().zip([&layer.q, &layer.k, &layer.v]) {
                let least = row[0].needed.unwrap();
                // BF16 values, so that no loader rounds them down.
                let value = f32::from_bits((least.to_bits() + 0xffff) & 0xffff_0000);
                self.scale(layer.layer, name, f64::from(value));
            }
        }
    }
}

pub fn copy(case: &Case) -> Case {
    Case { config: case.config.clone(), attention: case.attention.clone(), ..*case }
}

pub fn audit(folder: &Path, engine: Engine, serving: &Serving) -> Audit {
    let checkpoint = Checkpoint::open(folder).unwrap();
    verify(&checkpoint, &[engine], serving, &mut || Ok(())).unwrap().remove(0)
}

pub fn entry(audit: &Audit, layer: usize, operand: char) -> &AuditEntry {
    let layer = audit.layers.iter().find(|own| own.layer == layer).unwrap();
    match operand {
        'q' => &layer.q[0],
        'k' => &layer.k[0],
        _ => &layer.v[0],
    }
}

pub const NAMES: [&str; 3] = ["q_scale", "k_scale", "v_scale"];
