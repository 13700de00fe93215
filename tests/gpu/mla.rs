//! Descales of latent attention on the device, against the CPU's f64.

use crate::device;
use crate::weights::encode;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use sigmascale::Descale;
use sigmascale::bound::{MlaBounds, OperandBound};
use sigmascale::cuda::Buffer;
use sigmascale::device::scale::{DeviceTensor, Dtype, MlaEngine, MlaInput};
use sigmascale::model::{LayerStream, Layout};
use std::collections::HashMap;
use std::path::Path;

tests![
    descales_are_those_of_the_cpu,
    weights_written_in_place_are_seen,
    what_is_not_finite_is_flagged,
    the_time_of_a_layer_of_deepseek_v3,
];

/// How far a bound may lie above f64, relative; nowhere below.
const ABOVE: f64 = 2e-5;

/// Random layers of a config, on both sides.
struct Model {
    layout: Layout,
    stream: LayerStream,
    tensors: HashMap<String, (Buffer<u8>, DeviceTensor)>,
    vectors: Vec<String>,
}

pub fn config(sizes: [usize; 8], extra: &Value) -> Value {
    let [d, heads, q_rank, rank, nope, rope, value, layers] = sizes;
    let mut config = json!({"model_type": "deepseek_v3", "hidden_size": d, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": q_rank, "kv_lora_rank": rank,
        "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value, "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-6});
    config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    config
}

impl Model {
    fn new(config: &Value, dtype: Dtype, seed: u64) -> Self {
        let (bytes, file) = (config.to_string().into_bytes(), Path::new("config.json"));
        let layout = Layout::from_config_json(&bytes, file).unwrap();
        let mut stream = LayerStream::new(&bytes, file, &[]).unwrap();
        let (d, mut rng) = (layout.spec().d_model, StdRng::seed_from_u64(seed));
        let (mut tensors, mut vectors) = (HashMap::new(), vec![]);
        for layer in 0..layout.spec().layers.len() {
            let (names, mla) = (layout.layer(layer).unwrap(), layout.spec().layers[layer].mla.unwrap());
            let latents = names.mla.unwrap();
            let mut shapes = HashMap::from([
                (format!("{}.weight", names.norm.unwrap()), vec![d]),
                (format!("{}.weight", latents.kv_norm), vec![mla.kv_rank]),
                (format!("{}.weight", latents.k_pe.name), vec![latents.k_pe.channels, d]),
                (format!("{}.bias", latents.k_pe.name), vec![latents.k_pe.channels]),
                (format!("{}.weight", names.q.name), vec![names.q.channels, mla.q_inputs(d)]),
                (format!("{}.weight", names.k.name), vec![names.k.channels, mla.kv_rank]),
            ]);
            shapes.extend(latents.q_norm.map(|name| (format!("{name}.weight"), vec![mla.q_inputs(d)])));
            for wanted in stream.wanted(layer).to_vec() {
                let (name, shape) = (&wanted[0], shapes[&wanted[0]].clone());
                let middle = if name.contains("norm") { 1.0 } else { 0.0 };
                let mut draw = || middle + rng.random_range(-1.0..1.0f32) * rng.random_range(0.0..1.0f32);
                let values: Vec<f32> = (0..shape.iter().product()).map(|_| draw()).collect();
                let bytes = encode(&values, dtype);
                let memory = device().upload(&bytes).unwrap();
                let kind = match dtype {
                    Dtype::Bf16 => safetensors::Dtype::BF16,
                    Dtype::F16 => safetensors::Dtype::F16,
                    Dtype::F32 => safetensors::Dtype::F32,
                };
                stream.push(name, kind, &shape, bytes).unwrap();
                let strides = if let [_, columns] = shape[..] { vec![columns as i64, 1] } else { vec![1] };
                if shape.len() == 1 {
                    vectors.push(name.clone());
                }
                let tensor = DeviceTensor { ptr: memory.ptr(), dtype, shape, strides };
                tensors.insert(name.clone(), (memory, tensor));
            }
        }
        Self { layout, stream, tensors, vectors }
    }

    fn engine(&self) -> MlaEngine {
        let find = |name: &str| self.tensors.get(name).map(|(_, tensor)| tensor.clone());
        let layers = 0..self.layout.spec().layers.len();
        let inputs: Vec<_> = layers.map(|layer| MlaInput::new(&self.layout, layer, find).unwrap()).collect();
        // SAFETY: the model holds the memory.
        unsafe { MlaEngine::new(device(), &inputs) }.unwrap()
    }

    fn truth(&self, layer: usize) -> MlaBounds {
        MlaBounds::operands(self.stream.spec(), self.stream.layer(layer).unwrap()).unwrap()
    }
}

pub fn compare(name: &str, config: &Value, dtype: Dtype) {
    let (model, stream) = (Model::new(config, dtype, 5), device().stream().unwrap());
    let engine = model.engine();
    for _ in 0..2 {
        engine.descales(&stream).unwrap();
    }
    stream.synchronize().unwrap();
    let (bounds, descales) = (engine.operand_bounds().read().unwrap(), engine.head_descales().read().unwrap());
    let (cache, mut first) = (engine.cache().read().unwrap(), 0);
    assert_eq!(engine.status().read().unwrap()[0], 0, "{name}");
    let check = |what: String, got: f32, want: OperandBound| {
        let ratio = f64::from(got) / want.rounded;
        assert!((1.0..1.0 + ABOVE).contains(&ratio), "{name}: {what} is {ratio:.9} of f64");
    };
    for (layer, own) in model.layout.spec().layers.iter().enumerate() {
        let (truth, heads) = (model.truth(layer), own.n_q_heads);
        let rows = [&truth.expanded.q, &truth.expanded.k, truth.expanded.v.as_ref().unwrap()];
        for (which, row) in rows.into_iter().enumerate() {
            for (head, want) in row.iter().enumerate() {
                let at = which * heads + head;
                check(format!("layer {layer}, tensor {which}, head {head}"), bounds[3 * first + at], *want);
                let descale = Descale::covering(f64::from(bounds[3 * first + at]), 448.0).unwrap().get();
                assert_eq!(descales[4 * first + at], descale, "{name}");
                if which == 2 {
                    assert_eq!(descales[4 * first + at + heads], 2.0 * descale, "{name}");
                }
            }
        }
        check(format!("layer {layer}, latent"), cache[3 * layer], truth.latent);
        check(format!("layer {layer}, rotated key"), cache[3 * layer + 1], truth.k_pe);
        let row = f64::from(cache[3 * layer].max(cache[3 * layer + 1]));
        assert_eq!(cache[3 * layer + 2], Descale::covering(row, 448.0).unwrap().get(), "{name}");
        first += heads;
    }
}

fn descales_are_those_of_the_cpu() {
    // DeepSeek's sizes with fewer heads, others that the copy engine takes, and sizes that it does not.
    let deepseek = [1024, 6, 384, 256, 128, 64, 128, 2];
    let sizes = [
        deepseek,
        [768, 5, 320, 192, 64, 32, 64, 3],
        [200, 3, 44, 36, 18, 10, 26, 2],
        [512, 2, 96, 64, 192, 64, 256, 2],
    ];
    let yarn = json!({"rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
        "max_position_embeddings": 163_840});
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        for (i, sizes) in sizes.into_iter().enumerate() {
            let variants = [
                ("plain", json!({})),
                ("halves", json!({"rope_interleave": false})),
                ("no query latent", json!({"model_type": "deepseek_v2", "q_lora_rank": null})),
                ("biases", json!({"attention_bias": true})),
                ("YaRN", yarn.clone()),
            ];
            for (name, extra) in variants {
                compare(&format!("{name}, sizes {i}, {dtype:?}"), &config(sizes, &extra), dtype);
            }
        }
        let longcat = json!({"model_type": "longcat_flash", "num_layers": 1});
        compare("longcat", &config(deepseek, &longcat), dtype);
        let sparse = json!({"full_attn_layers": [2], "kda_layers": [1]});
        let linear = json!({"model_type": "kimi_linear", "q_lora_rank": null, "linear_attn_config": sparse});
        compare("kimi linear", &config(deepseek, &linear), dtype);
    }
}

/// By a replay of a graph.
fn weights_written_in_place_are_seen() {
    let model = Model::new(&config([512, 4, 128, 64, 64, 32, 64, 2], &json!({})), Dtype::Bf16, 9);
    let (engine, stream) = (model.engine(), device().stream().unwrap());
    let graph = stream.capture(|s| engine.descales(s)).unwrap();
    let read = || {
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        engine.operand_bounds().read().unwrap()
    };
    let before = read();
    for (name, (memory, tensor)) in &model.tensors {
        if tensor.shape.len() == 2 && !name.contains("q_a") {
            let doubled = crate::weights::decode(&memory.read().unwrap(), tensor.dtype);
            let doubled: Vec<f32> = doubled.iter().map(|x| 2.0 * x).collect();
            memory.write(&encode(&doubled, tensor.dtype)).unwrap();
        }
    }
    // What a cache in E4M3 takes from k and v has the latent in it, whose gain stays.
    for (new, old) in read().into_iter().zip(before) {
        assert!((new / old / 2.0 - 1.0).abs() < 1e-3, "{new} for {old}");
    }
}

fn what_is_not_finite_is_flagged() {
    let model = Model::new(&config([256, 2, 64, 64, 32, 32, 32, 1], &json!({})), Dtype::Bf16, 3);
    let (engine, stream) = (model.engine(), device().stream().unwrap());
    let matrices = model.tensors.keys().filter(|name| !model.vectors.contains(name));
    for name in matrices.chain(&model.vectors) {
        let (memory, tensor) = &model.tensors[name];
        let good = memory.read().unwrap();
        let mut bad = good.clone();
        let nan = encode(&[f32::NAN], tensor.dtype);
        // Of the shared key's tensor the last row counts.
        let at = bad.len() - nan.len();
        bad[at..].copy_from_slice(&nan);
        memory.write(&bad).unwrap();
        engine.descales(&stream).unwrap();
        let descales = engine.head_descales().read().unwrap();
        assert!(descales.iter().any(|x| x.is_nan()), "{name}");
        assert_eq!(engine.status().read().unwrap()[0], 1, "{name}");
        memory.write(&good).unwrap();
        engine.descales(&stream).unwrap();
        assert_eq!(engine.status().read().unwrap()[0], 0, "{name}");
    }
}

/// Prints the time, and the ratio to one read of the weights at the rate of a copy.
fn the_time_of_a_layer_of_deepseek_v3() {
    let model = Model::new(&config([7168, 128, 1536, 512, 128, 64, 128, 1], &json!({})), Dtype::Bf16, 1);
    let (engine, stream) = (model.engine(), device().stream().unwrap());
    let graph = stream.capture(|s| engine.descales(s)).unwrap();
    let bytes = 2 * (128 * 192 * 1536 + 128 * 256 * 512 + 64 * 7168);
    let (source, mut target) = (device().zeros::<u8>(bytes).unwrap(), device().zeros::<u8>(bytes).unwrap());
    let mut times = [vec![], vec![]];
    for _ in 0..21 {
        // The cache is full of something else.
        target.copy_from(&source, &stream).unwrap();
        let start = stream.record().unwrap();
        graph.launch().unwrap();
        times[0].push(1e3 * start.milliseconds_to(&stream.record().unwrap()).unwrap());
        let start = stream.record().unwrap();
        target.copy_from(&source, &stream).unwrap();
        // A copy reads and writes.
        times[1].push(0.5e3 * start.milliseconds_to(&stream.record().unwrap()).unwrap());
    }
    times.iter_mut().for_each(|times| times.sort_by(f32::total_cmp));
    let [descales, read] = times.map(|times| times[10]);
    println!("{descales:.1} us per layer, {:.2} of one read in {read:.1} us", descales / read);
}
