//! The tables and the arithmetic of the kernels, step by step in f32 on the host, against the bounds of the CPU.

use super::super::tables::HAS_MEAN;
use super::*;
use crate::bound::{MlaBounds, OperandBound};
use crate::model::LayerStream;
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

const D: usize = 192;
const HEADS: usize = 3;

/// A tensor in a memory of the tests: its place there, its shape, and its values.
struct Stored {
    ptr: u64,
    shape: Vec<usize>,
    values: Vec<f32>,
    dtype: Dtype,
}

/// Layers of a config with random tensors, which lie one after another in a memory that begins at 4096.
struct Model {
    layout: Layout,
    stream: LayerStream,
    tensors: HashMap<String, Stored>,
}

impl Model {
    fn new(extra: &Value, dtype: Dtype, seed: u64) -> Self {
        let mut config = json!({"model_type": "deepseek_v3", "hidden_size": D, "num_hidden_layers": 2,
            "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 48, "kv_lora_rank": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24, "max_position_embeddings": 4096,
            "rope_theta": 10000.0, "rms_norm_eps": 1e-6});
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let (bytes, file) = (config.to_string().into_bytes(), Path::new("config.json"));
        let layout = Layout::from_config_json(&bytes, file).unwrap();
        let mut stream = LayerStream::new(&bytes, file, &[]).unwrap();
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut tensors, mut ptr) = (HashMap::new(), 4096);
        for layer in 0..layout.spec().layers.len() {
            let (names, mla) = (layout.layer(layer).unwrap(), layout.spec().layers[layer].mla.unwrap());
            let latents = names.mla.unwrap();
            let mut shapes = HashMap::from([
                (format!("{}.weight", names.norm.unwrap()), vec![D]),
                (format!("{}.weight", latents.kv_norm), vec![mla.kv_rank]),
                (format!("{}.weight", latents.k_pe.name), vec![latents.k_pe.channels, D]),
                (format!("{}.bias", latents.k_pe.name), vec![latents.k_pe.channels]),
                (format!("{}.weight", names.q.name), vec![names.q.channels, mla.q_inputs(D)]),
                (format!("{}.weight", names.k.name), vec![names.k.channels, mla.kv_rank]),
            ]);
            shapes.extend(latents.q_norm.map(|name| (format!("{name}.weight"), vec![mla.q_inputs(D)])));
            for wanted in stream.wanted(layer).to_vec() {
                let shape = shapes[&wanted[0]].clone();
                let middle = if wanted[0].contains("norm") { 1.0 } else { 0.0 };
                let draw = |_| {
                    let x = middle + rng.random_range(-1.0..1.0f32) * rng.random_range(0.0..1.0f32);
                    if dtype == Dtype::Bf16 { bf16::from_f32(x).to_f32() } else { x }
                };
                let values: Vec<f32> = (0..shape.iter().product()).map(draw).collect();
                let (kind, bytes): (_, Vec<u8>) = match dtype {
                    Dtype::Bf16 => {
                        let bytes = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes());
                        (safetensors::Dtype::BF16, bytes.collect())
                    }
                    _ => (safetensors::Dtype::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect()),
                };
                let next = ptr + bytes.len().next_multiple_of(256) as u64;
                stream.push(&wanted[0], kind, &shape, bytes).unwrap();
                tensors.insert(wanted[0].clone(), Stored { ptr, shape, values, dtype });
                ptr = next;
            }
        }
        Self { layout, stream, tensors }
    }

    fn find(&self, name: &str) -> Option<DeviceTensor> {
        let stored = self.tensors.get(name)?;
        let strides = match stored.shape[..] {
            [_, columns] => vec![columns as i64, 1],
            _ => vec![1],
        };
        Some(DeviceTensor { ptr: DevicePtr(stored.ptr), dtype: stored.dtype, shape: stored.shape.clone(), strides })
    }

    fn inputs(&self) -> Vec<MlaInput> {
        let layers = 0..self.layout.spec().layers.len();
        layers.map(|layer| MlaInput::new(&self.layout, layer, |name| self.find(name)).unwrap()).collect()
    }

    /// Value `index` of what begins at an address.
    fn at(&self, address: u64, index: i64) -> f64 {
        let inside = |s: &&Stored| (s.ptr..s.ptr + (s.values.len() * s.dtype.size()) as u64).contains(&address);
        let stored = self.tensors.values().find(inside).expect("an address of a tensor");
        let first = (address - stored.ptr) / stored.dtype.size() as u64;
        f64::from(stored.values[(first as i64 + index) as usize])
    }

    /// As `scale_norms`, with the rounding of its results alone.
    fn statistics(&self, tables: &Tables) -> Vec<Option<ChannelStats>> {
        let mut stats = vec![None; tables.rows];
        for launch in &tables.launches {
            for place in &launch.places {
                let p = &launch.projections[place.projection as usize];
                assert_eq!((p.flags & HAS_MEAN, p.at.shift, p.first_head), (0, 0, NO_ROW));
                assert_eq!((p.d_model as usize, p.d_head as usize), (launch.size.inputs, launch.size.d_head));
                assert!(place.first_row + p.d_head <= p.rows);
                let column = |channel: u32| -> Vec<f64> {
                    let weight = |i: i64| {
                        let at = i64::from(channel) * p.row_stride + i * p.col_stride;
                        let gain = match p.at.gain {
                            0 => 1.0,
                            gain => self.at(gain, i) + f64::from(p.gain_offset),
                        };
                        gain * self.at(p.at.weight, at)
                    };
                    (0..i64::from(p.d_model)).map(weight).collect()
                };
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() as f32;
                for c in 0..p.d_head {
                    let half = p.rotary / 2;
                    let partner = if p.interleaved == 1 || c >= p.rotary {
                        c ^ 1
                    } else if c < half {
                        c + half
                    } else {
                        c - half
                    };
                    let channel = place.first_row + c;
                    let (own, other) = (column(channel), column(place.first_row + partner));
                    let bias = if p.at.bias == 0 { 0.0 } else { self.at(p.at.bias, channel.into()) as f32 };
                    let raw2 = round_up(f64::from(dot(&own, &own)));
                    let row = &mut stats[(p.stat_row + channel) as usize];
                    assert_eq!(*row, None, "two heads leave the same statistics");
                    *row = Some(ChannelStats {
                        norm2: raw2,
                        raw2,
                        pair: dot(&own, &other),
                        constant: bias,
                        absolute: bias.abs(),
                        sum: 0.0,
                        rounding: 0.0,
                        pad: 0.0,
                    });
                }
            }
        }
        stats
    }
}

/// As `scale_mla_descales`, in its order: bounds of q, k and v of each head, and of the latent and the rotated key.
fn finish(model: &Model, l: &MlaLayer, stats: &[Option<ChannelStats>]) -> (Vec<[f32; 3]>, [f32; 2]) {
    let row = |row: u32| stats[row as usize].expect("statistics that a kernel leaves");
    let channel = |s: &ChannelStats, radius: f32| {
        [radius * s.norm2.sqrt() + s.constant.abs(), radius * s.raw2.sqrt() + s.absolute]
    };
    let pair = |first: u32, radius: f32, p: u32| {
        let half = l.rotary / 2;
        let (a, b) = if p < half && l.interleaved == 0 { (p, p + half) } else { (2 * p, 2 * p + 1) };
        let (x, y) = (row(first + a), row(first + b));
        let (of_x, of_y) = (channel(&x, radius), channel(&y, radius));
        if l.rotary == 0 {
            return [of_x[0].max(of_y[0]), of_x[1].max(of_y[1])];
        }
        let (mid, off) = (0.5 * (x.norm2 + y.norm2), 0.5 * (x.norm2 - y.norm2));
        let sigma = (mid + (off * off + x.pair * x.pair).sqrt()).sqrt();
        let bound = radius * sigma + (x.constant * x.constant + y.constant * y.constant).sqrt();
        [l.rope_factor * bound, l.rope_factor * (of_x[1] * of_x[1] + of_y[1] * of_y[1]).sqrt()]
    };
    let largest = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, f32::max);
    let finished = |bound: f32| bound + bound * 2f32.powi(-18);
    let gain = largest(&mut (0..l.kv_rank).map(|i| model.at(l.latent_gain, i.into()).abs() as f32));
    let half = l.d_rope / 2;
    let key = |share: f32| largest(&mut (0..half).map(|p| pair(l.k_pe_row, l.radius, p)).map(|b| b[0] + share * b[1]));
    let (latent, cached) = (l.radius_c * gain * (1.0 + l.latent_share), key(l.k_pe_share));
    // 18 / 17, rounded up.
    let rotated = cached * 1.058_824;
    let step = 2f32.powi(-10) / 448.0 * latent.max(cached);
    let error = (l.kv_rank as f32).sqrt() * step;
    let heads = (0..l.heads).map(|head| {
        let q = l.q_row + head * (l.d_nope + l.d_rope);
        let nope = (0..l.d_nope).map(|i| channel(&row(q + i), l.radius_q));
        let rope = (0..half).map(|p| pair(q + l.d_nope, l.radius_q, p));
        let q = largest(&mut nope.chain(rope).map(|b| b[0] + l.q_share * b[1]));
        let from_latent = |from: u32, count: u32, share: f32| {
            let first = head * (l.d_nope + l.d_value) + from;
            let one = |i: u32| {
                let b = channel(&row(l.kv_row + first + i), l.radius_c);
                b[0] + share * b[1] + row(l.raw_row + first + i).norm2.sqrt() * error
            };
            largest(&mut (0..count).map(one))
        };
        let k = from_latent(0, l.d_nope, l.k_share).max(rotated + step);
        let v = from_latent(l.d_nope, l.d_value, l.v_share);
        [q * l.query_factor, k, v].map(finished)
    });
    (heads.collect(), [latent, cached].map(finished))
}

fn compare(name: &str, extra: Value, dtype: Dtype) {
    let model = Model::new(&extra, dtype, 11);
    let tables = Tables::new(&model.inputs());
    let stats = model.statistics(&tables);
    assert_eq!(tables.heads, HEADS * tables.layers.len(), "{name}");
    for (number, layer) in tables.layers.iter().enumerate() {
        let want = MlaBounds::operands(model.stream.spec(), model.stream.layer(number).unwrap()).unwrap();
        let (heads, [latent, k_pe]) = finish(&model, layer, &stats);
        let check = |what: &str, got: f32, want: OperandBound| {
            let ratio = f64::from(got) / want.rounded;
            assert!((1.0..1.0 + 1e-5).contains(&ratio), "{name}, layer {number}: {what} is {ratio:.9} of f64");
        };
        check("latent", latent, want.latent);
        check("rotated key", k_pe, want.k_pe);
        let values = want.expanded.v.as_ref().unwrap();
        for (head, bounds) in heads.iter().enumerate() {
            for (what, got, want) in [("q", bounds[0], want.expanded.q[head]), ("k", bounds[1], want.expanded.k[head])]
            {
                check(&format!("{what} {head}"), got, want);
            }
            check(&format!("v {head}"), bounds[2], values[head]);
        }
        assert_eq!((layer.layer, layer.head), (number as u32, (number * HEADS) as u32), "{name}");
    }
}

#[test]
fn bounds_are_those_of_the_cpu() {
    let yarn = json!({"rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
        "max_position_embeddings": 163_840});
    let equal = json!({"qk_nope_head_dim": 24, "qk_rope_head_dim": 24});
    for dtype in [Dtype::Bf16, Dtype::F32] {
        compare("plain", json!({}), dtype);
        compare("halves", json!({"rope_interleave": false}), dtype);
        compare("no query latent", json!({"model_type": "deepseek_v2", "q_lora_rank": null}), dtype);
        compare("biases", json!({"attention_bias": true}), dtype);
        compare("a factor on rotated channels", yarn.clone(), dtype);
        compare("sizes that are equal", equal.clone(), dtype);
        compare("latents with factors", json!({"model_type": "longcat_flash", "num_layers": 1}), dtype);
        let sparse = json!({"full_attn_layers": [2], "kda_layers": [1]});
        let linear = json!({"model_type": "kimi_linear", "q_lora_rank": null, "linear_attn_config": sparse});
        compare("no rotation", linear, dtype);
    }
}

/// Parts of one size share a launch.
#[test]
fn a_model_takes_few_launches() {
    let launches = |extra: Value| Tables::new(&Model::new(&extra, Dtype::Bf16, 1).inputs()).launches.len();
    // [A], [B], [K, K without the gain], [V, V without the gain], [D].
    assert_eq!(launches(json!({})), 5);
    // As in DeepSeek, where K and V are of one size.
    assert_eq!(launches(json!({"v_head_dim": 16})), 4);
}

#[test]
fn what_the_kernels_do_not_count_is_refused() {
    let refused = |extra: Value, change: fn(&mut DeviceTensor)| {
        let model = Model::new(&extra, Dtype::Bf16, 1);
        let find = |name: &str| {
            let mut found = model.find(name);
            found.iter_mut().filter(|_| name.contains("kv_b_proj")).for_each(change);
            found
        };
        MlaInput::new(&model.layout, 1, find).unwrap_err()
    };
    let error = refused(json!({}), |tensor| tensor.shape[0] -= 1);
    assert!(error.is_mismatch() && error.to_string().contains("kv_b_proj.weight has shape"), "{error}");
    let model = Model::new(&json!({}), Dtype::Bf16, 1);
    let error = MlaInput::new(&model.layout, 0, |_| None).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("is missing"), "{error}");
    assert!(MlaInput::new(&model.layout, 2, |name| model.find(name)).unwrap_err().is_argument());
}

/// Tables of the same layers elsewhere differ in what a launch brings alone.
#[test]
fn layers_that_move_change_addresses_alone() {
    let model = Model::new(&json!({"attention_bias": true}), Dtype::Bf16, 1);
    let moved = |by: u64| -> Vec<MlaInput> {
        let find = |name: &str| {
            let mut found = model.find(name)?;
            found.ptr.0 += by;
            Some(found)
        };
        (0..2).map(|layer| MlaInput::new(&model.layout, layer, find).unwrap()).collect()
    };
    let (here, there) = (moved(0), moved(1 << 20));
    assert!(here.iter().zip(&there).all(|(a, b)| a != b && a.without_places() == b.without_places()));
    assert_ne!(here[0].without_places(), moved(2)[0].without_places());
    let (mut old, new) = (Tables::new(&here), Tables::new(&there));
    for (a, b) in old.launches.iter_mut().zip(&new.launches) {
        assert_eq!(a.size, b.size);
        a.projections.iter_mut().zip(&b.projections).for_each(|(a, b)| a.at = b.at);
        let bytes = |heads: &Heads| bytemuck::cast_slice::<_, u8>(&heads.projections).to_vec();
        assert_eq!(bytes(a), bytes(b));
    }
    old.layers.iter_mut().zip(&new.layers).for_each(|(a, b)| a.latent_gain = b.latent_gain);
    assert_eq!(bytemuck::cast_slice::<_, u8>(&old.layers), bytemuck::cast_slice::<_, u8>(&new.layers));
    assert_eq!(std::mem::offset_of!(MlaLayer, latent_gain), 0);
}
