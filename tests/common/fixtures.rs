//! Small checkpoints written by the tests in the real tensor names, shapes and layouts.

use half::bf16;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors by their stored name.
#[derive(Clone, Default)]
pub struct Tensors(pub BTreeMap<String, (Vec<usize>, Vec<f64>)>);

impl Tensors {
    /// The values of a tensor.
    pub fn get(&self, name: &str) -> &[f64] {
        &self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}")).1
    }

    /// The values of a tensor that may be absent.
    pub fn find(&self, name: &str) -> Option<&[f64]> {
        self.0.get(name).map(|(_, values)| values.as_slice())
    }
}

/// Draws tensors whose values survive storage in bf16.
pub struct Draw {
    pub tensors: Tensors,
    rng: StdRng,
}

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self { tensors: Tensors::default(), rng: StdRng::seed_from_u64(seed) }
    }

    /// Gaussian values around `mean`.
    pub fn add(&mut self, name: impl Into<String>, shape: &[usize], mean: f64, deviation: f64) {
        let values = (0..shape.iter().product())
            .map(|_| {
                let normal: f64 = StandardNormal.sample(&mut self.rng);
                f64::from(bf16::from_f64(mean + deviation * normal).to_f32())
            })
            .collect();
        self.tensors.0.insert(name.into(), (shape.to_vec(), values));
    }

    /// A linear layer, `[rows, cols]` as stored.
    pub fn linear(&mut self, name: &str, rows: usize, cols: usize, bias: Option<usize>) {
        self.add(format!("{name}.weight"), &[rows, cols], 0.0, 0.3);
        if let Some(len) = bias {
            self.add(format!("{name}.bias"), &[len], 0.0, 0.5);
        }
    }
}

fn encode(values: &[f64], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F64 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::F32 => values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|x| half::f16::from_f64(*x).to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect(),
        other => panic!("{other:?} is not written here"),
    }
}

/// Writes one safetensors file.
pub fn write_safetensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a String, &'a (Vec<usize>, Vec<f64>))>,
    dtype: Dtype,
) {
    let encoded: Vec<_> =
        tensors.into_iter().map(|(name, (shape, values))| (name, shape.clone(), encode(values, dtype))).collect();
    let views = encoded
        .iter()
        .map(|(name, shape, bytes)| (name.as_str(), TensorView::new(dtype, shape.clone(), bytes).expect("shape fits")));
    safetensors::serialize_to_file(views, None, path).expect("written");
}

/// Writes `config.json` and the weights, in one file or in shards with an index.
pub fn write_checkpoint(folder: &Path, config: &Value, tensors: &Tensors, dtype: Dtype, shards: usize) {
    std::fs::write(folder.join("config.json"), serde_json::to_vec_pretty(config).expect("json")).expect("written");
    if shards == 1 {
        return write_safetensors(&folder.join("model.safetensors"), &tensors.0, dtype);
    }
    let mut map = serde_json::Map::new();
    for shard in 0..shards {
        let file = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
        let part: Vec<_> = tensors.0.iter().skip(shard).step_by(shards).collect();
        map.extend(part.iter().map(|(name, _)| ((*name).clone(), json!(file))));
        write_safetensors(&folder.join(file), part, dtype);
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("written");
}
