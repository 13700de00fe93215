//! Multi-head latent attention: every family, read from a small checkpoint in its real tensor names and layouts, against a
//! forward written here from the raw tensors; attacks on its bounds.
//!
//! `cargo test --test mla -- --nocapture` prints how much of each bound was attained.

mod common;

use common::cases::LATENT;
use common::fixtures::{Draw, Tensors, write_checkpoint};
use common::forward::dot;
use float8::F8E4M3;
use half::bf16;
use nalgebra::{DMatrix, DVector};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use safetensors::Dtype;
use serde_json::{Value, json};
use sigmascale::bound::{LayerBounds, MlaBounds, OperandBound, Tail, check_device};
use sigmascale::calibrate::{Calibration, Inspection, Options, Profile};
use sigmascale::geometry::LayerGeometry;
use sigmascale::model::{AttentionSpec, Checkpoint, Layout, SyntheticModel, SyntheticOptions};
use sigmascale::runtime::bounds_of;
use sigmascale::serving::{Engine, ExportOptions, LayerScales, ScaleStream, Serving, export, verify};
use std::collections::BTreeSet;
use std::f64::consts::TAU;

const D: usize = 192;
const HEADS: usize = 2;
const Q_RANK: usize = 48;
const RANK: usize = 32;
const NOPE: usize = 16;
const ROPE: usize = 16;
const VALUE: usize = 24;

/// A family as its reference implementation runs it.
#[derive(Clone)]
struct Family {
    name: &'static str,
    config: Value,
    prefix: &'static str,
    /// Attention module and input norm, with `{i}` and `{a}`.
    names: (&'static str, &'static str),
    /// The model's numbers of its layers with attention.
    numbers: Vec<usize>,
    q_rank: Option<usize>,
    /// Rotated in halves, in neighbors, or not at all.
    halves: Option<bool>,
    tau: f64,
    attention_factor: f64,
    growth: f64,
    factors: (f64, f64),
    bias: bool,
}

fn family(name: &'static str, extra: Value) -> Family {
    let mut config = json!({"model_type": name, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "max_position_embeddings": 4096, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6});
    config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    Family {
        name,
        config,
        prefix: "model.",
        names: ("layers.{i}.self_attn", "layers.{i}.input_layernorm"),
        numbers: vec![0, 1],
        q_rank: Some(Q_RANK),
        halves: Some(false),
        tau: ((NOPE + ROPE) as f64).powf(-0.5),
        attention_factor: 1.0,
        growth: 1.0,
        factors: (1.0, 1.0),
        bias: false,
    }
}

fn families() -> Vec<Family> {
    let usual = ((NOPE + ROPE) as f64).powf(-0.5);
    let yarn = |extra: Value| {
        let mut settings = json!({"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1});
        settings.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!({"rope_scaling": settings, "max_position_embeddings": 163_840})
    };
    let magnitude = |m: f64| 0.1 * m * 40f64.ln() + 1.0;
    let no_query_latent =
        |family: Family| Family { q_rank: None, config: with(&family.config, json!({"q_lora_rank": null})), ..family };
    vec![
        Family {
            tau: usual * magnitude(1.0).powi(2),
            ..family("deepseek_v3", yarn(json!({"mscale": 1.0, "mscale_all_dim": 1.0})))
        },
        // Without these keys cosines and sines carry the factor, and the softmax scale nothing.
        Family { attention_factor: magnitude(1.0), ..family("deepseek_v3", yarn(json!({}))) },
        Family { halves: Some(true), ..family("deepseek_v3", json!({"rope_interleave": false})) },
        Family { bias: true, ..family("deepseek_v3", json!({"attention_bias": true})) },
        no_query_latent(Family {
            tau: usual * magnitude(0.707).powi(2),
            ..family("deepseek_v2", yarn(json!({"mscale": 0.707, "mscale_all_dim": 0.707})))
        }),
        family("kimi_k2", json!({"rope_theta": 50000.0})),
        Family {
            prefix: "language_model.model.",
            config: json!({"model_type": "kimi_k25", "text_config": family("kimi_k2", json!({})).config}),
            ..family("kimi_k25", json!({}))
        },
        family("deepseek_v32", json!({"layer_types": ["indexed_attention", "deepseek_sparse_attention"]})),
        family("glm_moe_dsa", json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})),
        family("glm4_moe_lite", json!({"head_dim": 64})),
        family("youtu", json!({})),
        family("axk1", json!({})),
        Family { halves: Some(true), ..family("hy_v4", json!({})) },
        Family {
            halves: Some(true),
            attention_factor: (1.0 + 8f64.ln() / 512f64.ln()).sqrt(),
            ..family(
                "minicpm3",
                json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0],
                "original_max_position_embeddings": 512}}),
            )
        },
        Family {
            growth: 1.0 + 0.1 * 8f64.ln(),
            ..family(
                "mistral4",
                json!({"rope_parameters": {"type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}}),
            )
        }
        .times(8.0),
        Family {
            names: ("layers.{i}.self_attn.{a}", "layers.{i}.input_layernorm.{a}"),
            numbers: vec![0, 1],
            factors: ((D as f64 / Q_RANK as f64).sqrt(), (D as f64 / RANK as f64).sqrt()),
            ..family("longcat_flash", json!({"num_layers": 1}))
        },
        no_query_latent(Family {
            halves: None,
            numbers: vec![1, 3],
            ..family(
                "kimi_linear",
                json!({"num_hidden_layers": 4, "linear_attn_config": {"full_attn_layers": [2, 4],
                "kda_layers": [1, 3]}}),
            )
        }),
        no_query_latent(Family {
            names: ("layers.{i}.attention", "layers.{i}.input_layernorm"),
            numbers: vec![1, 3],
            ..family("bailing_hybrid", json!({"num_hidden_layers": 4, "layer_group_size": 2}))
        }),
    ]
}

fn with(config: &Value, extra: Value) -> Value {
    let mut config = config.clone();
    config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    config
}

impl Family {
    /// YaRN's factor on the softmax scale, `mscale_all_dim` 1.
    fn times(self, factor: f64) -> Self {
        Self { tau: self.tau * (0.1 * factor.ln() + 1.0).powi(2), ..self }
    }

    fn at(&self, template: &str, layer: usize) -> String {
        let number = self.numbers[layer];
        let (i, a) = if template.contains("{a}") { (number / 2, number % 2) } else { (number, 0) };
        format!("{}{}", self.prefix, template.replace("{i}", &i.to_string()).replace("{a}", &a.to_string()))
    }

    fn draw(&self, seed: u64) -> Tensors {
        let mut t = Draw::new(seed);
        for layer in 0..self.numbers.len() {
            let (attention, norm) = (self.at(self.names.0, layer), self.at(self.names.1, layer));
            let inputs = self.q_rank.unwrap_or(D);
            t.add(format!("{norm}.weight"), &[D], 1.0, 0.4);
            t.add(format!("{attention}.kv_a_layernorm.weight"), &[RANK], 1.0, 0.4);
            if self.q_rank.is_some() {
                t.add(format!("{attention}.q_a_layernorm.weight"), &[inputs], 1.0, 0.4);
                t.linear(&format!("{attention}.q_a_proj"), inputs, D, self.bias.then_some(inputs));
            }
            let q = if self.q_rank.is_some() { "q_b_proj" } else { "q_proj" };
            t.linear(&format!("{attention}.{q}"), HEADS * (NOPE + ROPE), inputs, None);
            t.linear(&format!("{attention}.kv_a_proj_with_mqa"), RANK + ROPE, D, self.bias.then_some(RANK + ROPE));
            t.linear(&format!("{attention}.kv_b_proj"), HEADS * (NOPE + VALUE), RANK, None);
        }
        t.tensors
    }

    fn pairs(&self) -> Vec<(usize, usize)> {
        match self.halves {
            Some(true) => (0..ROPE / 2).map(|b| (b, b + ROPE / 2)).collect(),
            Some(false) => (0..ROPE / 2).map(|b| (2 * b, 2 * b + 1)).collect(),
            None => vec![],
        }
    }
}

/// How a forward rounds.
#[derive(Clone, Copy, Default)]
struct Numerics {
    /// Everything to BF16.
    bf16: bool,
    /// Inputs of products to E4M3, by the scale of their largest element.
    e4m3: bool,
    /// What the cache holds goes through E4M3 by this descale.
    cache: Option<f64>,
}

impl Numerics {
    fn round(&self, x: f64) -> f64 {
        if self.bf16 { bf16::from_f64(x).to_f64() } else { x }
    }

    fn input(&self, x: &[f64]) -> Vec<f64> {
        if self.e4m3 { cast(x, amax(x) / 448.0) } else { x.to_vec() }
    }
}

fn cast(x: &[f64], descale: f64) -> Vec<f64> {
    x.iter().map(|x| F8E4M3::from_f64(x / descale).to_f64() * descale).collect()
}

fn amax(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, x| x.abs().max(most))
}

/// What attention gets of one token, in both forms.
struct Operands {
    latent: Vec<f64>,
    k_pe: Vec<f64>,
    q: Vec<Vec<f64>>,
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    absorbed: Vec<Vec<f64>>,
}

/// The layer, from raw tensors, for a hidden state and the angle of each rotated pair.
fn forward(f: &Family, t: &Tensors, layer: usize, hidden: &[f64], angles: &[f64], by: Numerics) -> Operands {
    let (attention, norm) = (f.at(f.names.0, layer), f.at(f.names.1, layer));
    let weight = |name: &str| t.get(&format!("{attention}.{name}.weight"));
    let normed = |x: &[f64], gain: &[f64]| -> Vec<f64> {
        let root = (dot(x, x) / x.len() as f64).sqrt();
        x.iter().zip(gain).map(|(x, g)| by.round(by.round(x / root) * g)).collect()
    };
    let linear = |name: &str, rows: std::ops::Range<usize>, x: &[f64]| -> Vec<f64> {
        let bias = t.find(&format!("{attention}.{name}.bias"));
        let x = by.input(x);
        rows.map(|row| by.round(dot(&weight(name)[row * x.len()..][..x.len()], &x) + bias.map_or(0.0, |b| b[row])))
            .collect()
    };
    let times = |x: Vec<f64>, factor: f64| -> Vec<f64> {
        if factor == 1.0 { x } else { x.into_iter().map(|x| by.round(x * factor)).collect() }
    };
    let rotated = |x: &[f64]| -> Vec<f64> {
        let mut out = x.to_vec();
        for ((a, b), angle) in f.pairs().into_iter().zip(angles) {
            let (sin, cos) = angle.sin_cos();
            let (sin, cos) = (by.round(f.attention_factor * sin), by.round(f.attention_factor * cos));
            out[a] = by.round(by.round(x[a] * cos) - by.round(x[b] * sin));
            out[b] = by.round(by.round(x[b] * cos) + by.round(x[a] * sin));
        }
        out
    };
    let x = normed(hidden, t.get(&format!("{norm}.weight")));
    let latent = normed(&linear("kv_a_proj_with_mqa", 0..RANK, &x), weight("kv_a_layernorm"));
    let latent = times(latent, f.factors.1);
    let k_pe = rotated(&linear("kv_a_proj_with_mqa", RANK..RANK + ROPE, &x));
    let all = HEADS * (NOPE + ROPE);
    let q = match f.q_rank {
        Some(rank) => {
            let latent = normed(&linear("q_a_proj", 0..rank, &x), weight("q_a_layernorm"));
            times(linear("q_b_proj", 0..all, &latent), f.factors.0)
        }
        None => linear("q_proj", 0..all, &x),
    };
    let (cached, cached_k_pe) = match by.cache {
        Some(descale) => (cast(&latent, descale), cast(&k_pe, descale)),
        None => (latent.clone(), k_pe.clone()),
    };
    let mut out = Operands { latent, k_pe, q: vec![], k: vec![], v: vec![], absorbed: vec![] };
    for h in 0..HEADS {
        let own = &q[h * (NOPE + ROPE)..][..NOPE + ROPE];
        let q = times([&own[..NOPE], &rotated(&own[NOPE..])].concat(), f.growth);
        let first = h * (NOPE + VALUE);
        out.k.push([linear("kv_b_proj", first..first + NOPE, &cached), cached_k_pe.clone()].concat());
        out.v.push(linear("kv_b_proj", first + NOPE..first + NOPE + VALUE, &cached));
        let input = by.input(&q[..NOPE]);
        let column = |j: usize| (0..NOPE).map(|i| weight("kv_b_proj")[(first + i) * RANK + j] * input[i]).sum::<f64>();
        let absorbed: Vec<f64> = (0..RANK).map(|j| by.round(column(j))).collect();
        out.absorbed.push([&absorbed[..], &q[NOPE..]].concat());
        out.q.push(q);
    }
    out
}

/// The layer's maps as dense matrices, gains folded: how the attack finds its tokens. What it finds is judged by `forward`.
struct Maps {
    latent: DMatrix<f64>,
    /// Pseudo-inverses of what makes the latents.
    to_latent: DMatrix<f64>,
    to_query: Option<DMatrix<f64>>,
    k_pe: DMatrix<f64>,
    constant: DVector<f64>,
    heads: Vec<[DMatrix<f64>; 4]>,
    radii: [f64; 3],
}

impl Maps {
    fn new(f: &Family, t: &Tensors, layer: usize) -> Self {
        let (attention, norm) = (f.at(f.names.0, layer), f.at(f.names.1, layer));
        let matrix = |name: &str, cols: usize, gain: &[f64], factor: f64| {
            let values = t.get(&format!("{attention}.{name}.weight"));
            DMatrix::from_fn(values.len() / cols, cols, |i, j| values[i * cols + j] * gain[j] * factor)
        };
        let g = t.get(&format!("{norm}.weight"));
        let gain_c = t.get(&format!("{attention}.kv_a_layernorm.weight"));
        let down = matrix("kv_a_proj_with_mqa", D, g, 1.0);
        let inverse = |map: DMatrix<f64>| map.pseudo_inverse(1e-12).unwrap();
        let (to_query, q) = match f.q_rank {
            Some(rank) => {
                let gain_q = t.get(&format!("{attention}.q_a_layernorm.weight"));
                (Some(inverse(matrix("q_a_proj", D, g, 1.0))), matrix("q_b_proj", rank, gain_q, f.factors.0))
            }
            None => (None, matrix("q_proj", D, g, 1.0)),
        };
        let up = matrix("kv_b_proj", RANK, gain_c, f.factors.1);
        let raw = matrix("kv_b_proj", RANK, &[1.0; RANK], 1.0);
        let (width, pair) = (NOPE + ROPE, NOPE + VALUE);
        let head = |h: usize| {
            let mut q = q.rows(h * width, width).into_owned();
            q.rows_mut(NOPE, ROPE).scale_mut(f.attention_factor);
            let k = up.rows(h * pair, NOPE).into_owned();
            [q, k, up.rows(h * pair + NOPE, VALUE).into_owned(), raw.rows(h * pair, NOPE).into_owned()]
        };
        let bias = t.find(&format!("{attention}.kv_a_proj_with_mqa.bias"));
        let constant = |c: usize| f.attention_factor * bias.map_or(0.0, |b| b[RANK + c]);
        Self {
            latent: down.rows(0, RANK).into_owned(),
            to_latent: inverse(down.rows(0, RANK).into_owned()),
            to_query,
            k_pe: down.rows(RANK, ROPE) * f.attention_factor,
            constant: DVector::from_fn(ROPE, |c, _| constant(c)),
            heads: (0..HEADS).map(head).collect(),
            radii: [f.q_rank.unwrap_or(D), RANK, D].map(|n| (n as f64).sqrt()),
        }
    }

    /// A token whose latent points to `u`.
    fn with_latent(&self, u: &DVector<f64>) -> Vec<f64> {
        (&self.to_latent * u).as_slice().to_vec()
    }

    /// A token whose query's input points to `z`.
    fn with_query(&self, z: &DVector<f64>) -> Vec<f64> {
        match &self.to_query {
            Some(inverse) => (inverse * z).as_slice().to_vec(),
            None => z.as_slice().to_vec(),
        }
    }

    /// Tokens that push single channels the furthest, with the angles that bring a pair to one of its channels.
    fn channel_tokens(&self, f: &Family) -> Vec<(Vec<f64>, Vec<f64>)> {
        let still = vec![0.0; ROPE / 2];
        let mut tokens = vec![];
        for j in 0..RANK {
            tokens.push((self.with_latent(&DVector::from_fn(RANK, |i, _| f64::from(u8::from(i == j)))), still.clone()));
        }
        // Rows that rotate together: their largest direction.
        let mut rows_of = |map: &DMatrix<f64>, first: usize, token: &dyn Fn(&DVector<f64>) -> Vec<f64>| {
            let mut push = |rows: Vec<usize>, pair: Option<usize>| {
                let block = map.select_rows(&rows);
                let svd = block.clone().svd(true, true);
                let top = svd.v_t.unwrap().row(svd.singular_values.imax()).transpose();
                for sign in [1.0, -1.0] {
                    let mut angles = still.clone();
                    let y = &block * &top * sign;
                    if let Some(pair) = pair {
                        angles[pair] = -y[1].atan2(y[0]);
                    }
                    tokens.push((token(&(&top * sign)), angles));
                }
            };
            (0..first).for_each(|c| push(vec![c], None));
            for (pair, (a, b)) in f.pairs().into_iter().enumerate().filter(|_| first < map.nrows()) {
                push(vec![first + a, first + b], Some(pair));
            }
            if f.halves.is_none() {
                (first..map.nrows()).for_each(|c| push(vec![c], None));
            }
        };
        rows_of(&self.k_pe, 0, &|y| y.as_slice().to_vec());
        for [q, k, v, raw] in &self.heads {
            rows_of(q, NOPE, &|z| self.with_query(z));
            rows_of(k, NOPE, &|u| self.with_latent(u));
            rows_of(v, VALUE, &|u| self.with_latent(u));
            let product = raw.tr_mul(&q.rows(0, NOPE));
            rows_of(&product, RANK, &|z| self.with_query(z));
        }
        tokens
    }

    /// The logit of a head driven up by ascent over the key's token, the query in closed form and the rotation by
    /// alignment: query's token, key's token, angles.
    fn ascend(&self, f: &Family, head: usize, steps: usize, rng: &mut StdRng) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let [q, k, ..] = &self.heads[head];
        let [rho_q, rho_c, rho] = self.radii;
        let pairs = f.pairs();
        let turn = |x: &DVector<f64>, angles: &[f64], sign: f64| {
            let mut out = x.clone();
            for (&(a, b), angle) in pairs.iter().zip(angles) {
                let (sin, cos) = (sign * angle).sin_cos();
                (out[a], out[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
            }
            out
        };
        let key = |y: &DVector<f64>, angles: &[f64]| {
            let u = (&self.latent * y).normalize() * rho_c;
            let mut key = DVector::zeros(NOPE + ROPE);
            key.rows_mut(0, NOPE).copy_from(&(k * u));
            key.rows_mut(NOPE, ROPE).copy_from(&turn(&(&self.k_pe * y + &self.constant), angles, 1.0));
            key
        };
        let mut y = DVector::from_fn(D, |_, _| StandardNormal.sample(rng)).normalize() * rho;
        let mut angles: Vec<f64> = pairs.iter().map(|_| rng.random_range(0.0..TAU)).collect();
        let mut z = q.tr_mul(&key(&y, &angles)).normalize() * rho_q;
        let mut step = 0.5;
        for _ in 0..steps {
            // The rotation that brings each pair of the key onto the query's.
            let (turned, own) = (&self.k_pe * &y + &self.constant, q.rows(NOPE, ROPE) * &z);
            for (angle, &(a, b)) in angles.iter_mut().zip(&pairs) {
                *angle = own[b].atan2(own[a]) - turned[b].atan2(turned[a]);
            }
            z = q.tr_mul(&key(&y, &angles)).normalize() * rho_q;
            let latent = &self.latent * &y;
            let (length, u) = (latent.norm(), latent.normalize());
            let pull = k.tr_mul(&(q.rows(0, NOPE) * &z));
            let across = (&pull - &u * u.dot(&pull)) * (rho_c / length);
            let back = turn(&(q.rows(NOPE, ROPE) * &z), &angles, -1.0);
            let gradient = self.latent.tr_mul(&across) + self.k_pe.tr_mul(&back);
            let value = z.dot(&q.tr_mul(&key(&y, &angles)));
            let next = (&y + gradient.normalize() * (step * rho)).normalize() * rho;
            if z.dot(&q.tr_mul(&key(&next, &angles))) > value {
                (y, step) = (next, step * 1.3);
            } else {
                step *= 0.5;
            }
        }
        z = q.tr_mul(&key(&y, &angles));
        (self.with_query(&z), y.as_slice().to_vec(), angles)
    }
}

fn open(f: &Family, t: &Tensors, dtype: Dtype) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &f.config, t, dtype, 1);
    let checkpoint = Checkpoint::open(folder.path()).unwrap_or_else(|e| panic!("{}: {e}", f.name));
    (folder, checkpoint)
}

fn bounds(checkpoint: &Checkpoint, layer: usize) -> MlaBounds {
    MlaBounds::new(checkpoint.spec(), checkpoint.layer(layer).unwrap()).unwrap()
}

/// The largest value of each operand: latent, shared key, then q, k, v and absorbed query of each head.
fn reached(all: &mut Vec<f64>, out: &Operands) {
    let rows = [&out.latent, &out.k_pe].into_iter().chain(&out.q).chain(&out.k).chain(&out.v).chain(&out.absorbed);
    let rows: Vec<f64> = rows.map(|row| amax(row)).collect();
    all.resize(rows.len(), 0.0);
    all.iter_mut().zip(rows).for_each(|(most, x)| *most = x.max(*most));
}

fn operand_bounds(b: &MlaBounds) -> Vec<OperandBound> {
    let heads = [&b.expanded.q, &b.expanded.k, b.expanded.v.as_ref().unwrap(), &b.absorbed_q];
    [b.latent, b.k_pe].into_iter().chain(heads.into_iter().flatten().copied()).collect()
}

fn logit(f: &Family, q: &[f64], k: &[f64]) -> f64 {
    (dot(q, k) * f.tau).abs()
}

/// Names, layouts, factors and scales of every family: operands of the raw tensors' forward come up to their bounds and no
/// further, so nothing was read from a wrong place.
#[test]
fn every_family_attains_its_bounds_and_passes_none() {
    for (number, f) in families().iter().enumerate() {
        let t = f.draw(40 + number as u64);
        let (_folder, checkpoint) = open(f, &t, Dtype::BF16);
        let spec = checkpoint.spec();
        assert_eq!(checkpoint.prefix(), f.prefix, "{}", f.name);
        let numbers: Vec<usize> = spec.layers.iter().map(|layer| layer.number).collect();
        assert_eq!(numbers, f.numbers, "{}", f.name);
        for (layer, own) in spec.layers.iter().enumerate() {
            assert!((own.softmax_scale / f.tau - 1.0).abs() < 1e-12, "{}: {} {}", f.name, own.softmax_scale, f.tau);
            assert!((own.query_factor() / f.growth - 1.0).abs() < 1e-12, "{}", f.name);
            let (maps, b) = (Maps::new(f, &t, layer), bounds(&checkpoint, layer));
            let mut most = vec![];
            for (x, angles) in maps.channel_tokens(f) {
                reached(&mut most, &forward(f, &t, layer, &x, &angles, Numerics::default()));
            }
            for (at, (most, bound)) in most.iter().zip(operand_bounds(&b)).enumerate() {
                let ratio = most / bound.exact;
                // A constant need not point where the weights do.
                let least = if f.bias { 0.9 } else { 0.999 };
                assert!((least..=1.0 + 1e-9).contains(&ratio), "{} operand {at}: {ratio}", f.name);
            }
            let mut rng = StdRng::seed_from_u64(9);
            for head in 0..HEADS {
                let (x, y, angles) = maps.ascend(f, head, 120, &mut rng);
                let query = forward(f, &t, layer, &x, &vec![0.0; angles.len()], Numerics::default());
                let key = forward(f, &t, layer, &y, &angles, Numerics::default());
                let (expanded, absorbed) = (
                    logit(f, &query.q[head], &key.k[head]),
                    logit(f, &query.absorbed[head], &[&key.latent[..], &key.k_pe].concat()),
                );
                assert!((expanded / absorbed - 1.0).abs() < 1e-9, "{}: {expanded} {absorbed}", f.name);
                let ratio = expanded / b.expanded.heads[head].exact.unwrap();
                assert!((0.4..=1.0 + 1e-9).contains(&ratio), "{} head {head}: {ratio}", f.name);
            }
            assert_eq!(bounds_of(spec, checkpoint.layer(layer).unwrap(), &Tail::default()).unwrap(), b.expanded);
        }
    }
}

/// What roundings add to a bound: the cache's in E4M3 is relative to what leaves it, and counts once.
#[test]
fn bounds_with_rounding_stay_close_to_the_exact_ones() {
    let own = families();
    for (number, f) in own.iter().filter(|f| ["deepseek_v3", "deepseek_v2"].contains(&f.name)).enumerate() {
        for seed in 0..4 {
            let t = f.draw(70 + 10 * seed + number as u64);
            for dtype in [Dtype::F64, Dtype::BF16] {
                let (_folder, checkpoint) = open(f, &t, dtype);
                for layer in 0..2 {
                    for (at, bound) in operand_bounds(&bounds(&checkpoint, layer)).iter().enumerate() {
                        let ratio = bound.rounded / bound.exact;
                        assert!(ratio > 1.0 && ratio < 1.12, "{} {dtype:?} operand {at}: {ratio}", f.name);
                    }
                }
            }
        }
    }
}

#[test]
fn every_latent_family_has_a_case() {
    let family = |f: &Family| {
        let spec = AttentionSpec::from_config_json(f.config.to_string().as_bytes(), "config.json".as_ref()).unwrap();
        assert!(spec.has_mla(), "{}", f.name);
        spec.family
    };
    let tried: BTreeSet<String> = families().iter().map(family).collect();
    assert_eq!(tried, LATENT.map(str::to_owned).into());
    // Names of deepseek_v3 with a config or a prefix of their own.
    for name in ["kimi_k2", "kimi_k25"] {
        assert!(families().iter().any(|f| f.name == name), "{name}");
    }
}

/// Weights on which a bound could be loose or wrong.
const CLASSES: [&str; 6] = ["random", "spike", "power law", "uneven pairs", "copied key", "orthogonal key"];

fn planted(f: &Family, class: &str, seed: u64) -> Tensors {
    let mut t = f.draw(seed);
    let mut rng = StdRng::seed_from_u64(seed ^ 0x55);
    let attention = f.at(f.names.0, 0);
    let projections = ["q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj"];
    for name in projections.map(|name| format!("{attention}.{name}.weight")) {
        let Some((shape, values)) = t.0.get_mut(&name) else { continue };
        let mut w = DMatrix::from_row_slice(shape[0], shape[1], values);
        let mut vector = |n: usize| DVector::from_fn(n, |_, _| StandardNormal.sample(&mut rng)).normalize();
        match class {
            "spike" => {
                let (a, b): (DVector<f64>, DVector<f64>) = (vector(shape[0]), vector(shape[1]));
                w += a * b.transpose() * (2.0 * w.norm() / (shape[1] as f64).sqrt());
            }
            "power law" => {
                let svd = w.svd(true, true);
                let falling = DVector::from_fn(svd.singular_values.len(), |i, _| 3.0 / (i as f64 + 1.0));
                w = svd.u.unwrap() * DMatrix::from_diagonal(&falling) * svd.v_t.unwrap();
            }
            "uneven pairs" => {
                let scale = |pair: usize| 1e3f64.powf(pair as f64 / (ROPE / 2 - 1) as f64 - 0.5);
                for (number, (a, b)) in f.pairs().into_iter().enumerate() {
                    if name.contains("kv_a") {
                        [a, b].iter().for_each(|c| w.row_mut(RANK + c).scale_mut(scale(number)));
                    } else if name.contains("q_b") || name.contains("q_proj") {
                        for row in (0..HEADS).flat_map(|h| [a, b].map(|c| h * (NOPE + ROPE) + NOPE + c)) {
                            w.row_mut(row).scale_mut(1.0 / scale(number));
                        }
                    }
                }
            }
            "copied key" if name.contains("kv_a") => (0..ROPE).for_each(|c| {
                let row = w.row(c).into_owned();
                w.row_mut(RANK + c).copy_from(&row);
            }),
            "copied key" if name.contains("q_b") || name.contains("q_proj") => {
                for (from, to) in (0..HEADS).flat_map(|h| (0..ROPE).map(move |c| (h, c))).map(|(h, c)| {
                    let first = h * (NOPE + ROPE);
                    (first + c, first + NOPE + c)
                }) {
                    let row = w.row(from).into_owned();
                    w.row_mut(to).copy_from(&row);
                }
            }
            "orthogonal key" if name.contains("kv_a") => {
                // In the norm's sphere: rows times the gain.
                let gain = DVector::from_column_slice(&f.gains(&f.draw(seed)));
                let folded = DMatrix::from_fn(w.nrows(), D, |i, j| w[(i, j)] * gain[j]);
                let basis = folded.rows(0, RANK).transpose().qr().q();
                for c in RANK..RANK + ROPE {
                    let row = folded.row(c).transpose();
                    let rest = &row - &basis * basis.tr_mul(&row);
                    w.row_mut(c).copy_from(&rest.component_div(&gain).transpose());
                }
            }
            _ => {}
        }
        *values = w.transpose().as_slice().to_vec();
    }
    t
}

impl Family {
    fn gains(&self, t: &Tensors) -> Vec<f64> {
        t.get(&format!("{}.weight", self.at(self.names.1, 0))).to_vec()
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Key tokens by ascent with restarts, query latents in closed form, rotations aligned; then the whole forward.
#[test]
fn no_token_passes_a_logit_bound() {
    println!("| weights | query latent: attained / bound, median (max) | without |\n|---|---|---|");
    let base = family("deepseek_v3", json!({}));
    let without = Family { q_rank: None, config: with(&base.config, json!({"q_lora_rank": null})), ..base.clone() };
    for class in CLASSES {
        let mut cells = vec![];
        for f in [&base, &without] {
            let mut ratios = vec![];
            for seed in 0..3 {
                let t = planted(f, class, 300 + seed);
                let (_folder, checkpoint) = open(f, &t, Dtype::F64);
                let (maps, b) = (Maps::new(f, &t, 0), bounds(&checkpoint, 0));
                let mut rng = StdRng::seed_from_u64(seed);
                for head in 0..HEADS {
                    let bound = b.expanded.heads[head];
                    let (exact, naive) = (bound.exact.unwrap(), bound.naive.unwrap());
                    assert!(exact <= naive * (1.0 + 1e-9), "{class}: {exact} {naive}");
                    let mut most: f64 = 0.0;
                    for _ in 0..6 {
                        let (x, y, angles) = maps.ascend(f, head, 250, &mut rng);
                        let query = forward(f, &t, 0, &x, &[0.0; ROPE / 2], Numerics::default());
                        let key = forward(f, &t, 0, &y, &angles, Numerics::default());
                        most = most.max(logit(f, &query.q[head], &key.k[head]));
                    }
                    assert!(most <= exact * (1.0 + 1e-9), "{class} head {head}: {most} past {exact}");
                    ratios.push(most / exact);
                }
            }
            let (largest, middle) = (ratios.iter().copied().fold(0.0, f64::max), median(&mut ratios));
            let least = if class == "orthogonal key" { 0.9 } else { 0.35 };
            assert!(middle > least, "{class}: the attack attains {middle}");
            cells.push(format!("{middle:.2} ({largest:.2})"));
        }
        println!("| {class} | {} |", cells.join(" | "));
    }
}

/// The whole forward in BF16, with inputs in E4M3 where the checkpoint is FP8, through an FP8 cache: no operand overflows under
/// its descale, and no logit of E4M3 operands passes its bound, in either form.
#[test]
fn no_rounded_token_overflows() {
    let mut closest = [0f64; 6];
    for (number, f) in families().into_iter().enumerate() {
        for fp8 in [false, true] {
            let mut f = f.clone();
            if fp8 {
                let settings = json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}});
                f.config = with(&f.config, settings);
            }
            let t = f.draw(700 + number as u64);
            let (_folder, checkpoint) = open(&f, &t, Dtype::BF16);
            assert_eq!(checkpoint.spec().fp8_inputs, fp8, "{}", f.name);
            let (maps, b) = (Maps::new(&f, &t, 0), bounds(&checkpoint, 0));
            let descale = |bound: OperandBound| f64::from(bound.descale().unwrap().get());
            let cache = descale(b.cache());
            let absorbed = b.absorbed_q.iter().map(|bound| descale(*bound)).fold(0.0, f64::max);
            let v = b.expanded.v.as_ref().unwrap();
            let mut rng = StdRng::seed_from_u64(3);
            let by = Numerics { bf16: true, e4m3: fp8, cache: None };
            let mut fits = |what: usize, values: &[f64], descale: f64| {
                let scaled = amax(values) / descale;
                assert!(scaled <= 448.0, "{} operand {what}: {scaled}", f.name);
                closest[what] = closest[what].max(scaled);
            };
            let mut tokens = maps.channel_tokens(&f);
            let mut pairs = vec![];
            for head in 0..HEADS {
                let (x, y, angles) = maps.ascend(&f, head, 60, &mut rng);
                pairs.push((head, x.clone(), y.clone(), angles.clone()));
                tokens.extend([(x, vec![0.0; angles.len()]), (y, angles)]);
            }
            for (x, angles) in &tokens {
                for cached in [None, Some(cache)] {
                    // Lengths do not matter to a norm, but to what is rounded.
                    let length: f64 = rng.random_range(1.0..2.0);
                    let x: Vec<f64> = x.iter().map(|x| bf16::from_f64(x * length).to_f64()).collect();
                    let out = forward(&f, &t, 0, &x, angles, Numerics { cache: cached, ..by });
                    // Each by itself: a cached row has the larger descale of the two.
                    fits(0, &out.latent, descale(b.latent));
                    fits(1, &out.k_pe, descale(b.k_pe));
                    for (h, v) in v.iter().enumerate() {
                        fits(2, &out.q[h], descale(b.expanded.q[h]));
                        fits(3, &out.k[h], descale(b.expanded.k[h]));
                        fits(4, &out.v[h], descale(*v));
                        fits(5, &out.absorbed[h], absorbed);
                    }
                }
            }
            for (head, x, y, angles) in pairs {
                let bound = b.expanded.heads[head].rounded.unwrap();
                let query = forward(&f, &t, 0, &x, &vec![0.0; angles.len()], by);
                let key = forward(&f, &t, 0, &y, &angles, Numerics { cache: Some(cache), ..by });
                let row = cast(&[&key.latent[..], &key.k_pe].concat(), cache);
                let (q, k) = (descale(b.expanded.q[head]), descale(b.expanded.k[head]));
                for logit in [
                    logit(&f, &cast(&query.q[head], q), &cast(&key.k[head], k)),
                    logit(&f, &cast(&query.absorbed[head], absorbed), &row),
                ] {
                    assert!(logit <= bound, "{} head {head}: {logit} past {bound}", f.name);
                }
            }
        }
    }
    println!("largest |x / descale|: latent, k_pe, q, k, v, absorbed q = {closest:.1?}");
    assert!(closest.iter().all(|scaled| *scaled > 350.0), "{closest:?}");
}

fn profile(checkpoint: &Checkpoint, options: Options) -> Profile {
    let mut calibration = Calibration::new(checkpoint.spec(), options).unwrap();
    for layer in 0..checkpoint.spec().layers.len() {
        calibration.layer(checkpoint.layer(layer).unwrap()).unwrap();
    }
    calibration.finish()
}

/// Scales of tensors that arrive in any order, of a whole model and of one rank, are those of the bounds; without the logits, too.
#[test]
fn a_stream_has_the_cache_and_its_query() {
    let mut random = StdRng::seed_from_u64(5);
    for (number, f) in families().into_iter().enumerate() {
        let t = f.draw(900 + number as u64);
        let (folder, checkpoint) = open(&f, &t, Dtype::BF16);
        let files = sigmascale::model::WeightFiles::open(folder.path()).unwrap();
        let mut tensors: Vec<_> = files.tensors().map(|t| (t.name, t.dtype, t.shape, t.bytes)).collect();
        let config = std::fs::read(folder.path().join("config.json")).unwrap();
        let mut stream = ScaleStream::new(&config, "config.json".as_ref(), &[]).unwrap();
        for _ in 0..2 {
            tensors.shuffle(&mut random);
            let mut found = vec![];
            for (name, dtype, shape, bytes) in &tensors {
                found.extend(stream.push(name, *dtype, shape, bytes.to_vec()).unwrap());
            }
            stream.finish(false).unwrap();
            found.sort_by_key(|layer| layer.layer);
            assert_eq!(found.len(), f.numbers.len(), "{}", f.name);
            for (layer, scales) in found.iter().enumerate() {
                let b = bounds(&checkpoint, layer);
                let descale = |bound: OperandBound| bound.descale().unwrap();
                let absorbed: Vec<_> = b.absorbed_q.iter().map(|bound| descale(*bound)).collect();
                let row = vec![descale(b.cache())];
                assert_eq!((&scales.q, &scales.k, &scales.v), (&absorbed, &row, &Some(row.clone())), "{}", f.name);
                let expanded = scales.expanded.as_ref().unwrap();
                assert_eq!(expanded.k, b.expanded.k.iter().map(|bound| descale(*bound)).collect::<Vec<_>>());
                let alone = MlaBounds::operands(checkpoint.spec(), checkpoint.layer(layer).unwrap()).unwrap();
                assert!(alone.expanded.heads.is_empty());
                let with_logits = MlaBounds { expanded: LayerBounds { heads: vec![], ..b.expanded.clone() }, ..b };
                assert_eq!(alone, with_logits, "{}", f.name);
            }
        }
    }
}

/// A rank has the entries of its own heads, from tensors with its rows alone.
#[test]
fn a_rank_has_the_scales_of_its_heads() {
    let f = &families()[0];
    let t = f.draw(11);
    let (folder, checkpoint) = open(f, &t, Dtype::BF16);
    let files = sigmascale::model::WeightFiles::open(folder.path()).unwrap();
    let config = std::fs::read(folder.path().join("config.json")).unwrap();
    let whole = |layer: usize| LayerScales::new(checkpoint.spec(), checkpoint.layer(layer).unwrap()).unwrap();
    for rank in 0..2 {
        let stream = ScaleStream::new(&config, "config.json".as_ref(), &[]).unwrap();
        let mut stream = stream.of_rank(2).unwrap();
        let mut found = vec![];
        for tensor in files.tensors() {
            let shared = !tensor.name.contains("q_b_proj") && !tensor.name.contains("kv_b_proj");
            let (rows, bytes) = (tensor.shape[0], tensor.bytes.len());
            let (shape, part) = match shared {
                true => (tensor.shape.to_vec(), tensor.bytes),
                false => (
                    [&[rows / 2], &tensor.shape[1..]].concat(),
                    &tensor.bytes[rank * bytes / 2..(rank + 1) * bytes / 2],
                ),
            };
            found.extend(stream.push(tensor.name, tensor.dtype, &shape, part.to_vec()).unwrap());
        }
        stream.finish(false).unwrap();
        found.sort_by_key(|layer| layer.layer);
        for (layer, scales) in found.iter().enumerate() {
            let whole = whole(layer);
            assert_eq!(scales.q, whole.q[rank * HEADS / 2..(rank + 1) * HEADS / 2]);
            assert_eq!((&scales.k, &scales.v), (&whole.k, &whole.v));
        }
    }
    let uneven = ScaleStream::new(&config, "config.json".as_ref(), &[]).unwrap().of_rank(HEADS + 1);
    assert!(uneven.is_err_and(|error| error.is_argument()));
}

/// Engines load no scales for it: a certificate of the absorbed query and the cached row, and of what FP8 prefill casts.
#[test]
fn an_export_has_a_certificate() {
    let f = &families()[0];
    let (folder, checkpoint) = open(f, &f.draw(12), Dtype::BF16);
    let scales = LayerScales::new(checkpoint.spec(), checkpoint.layer(0).unwrap()).unwrap();
    for engine in Engine::ALL.into_iter().filter(|engine| *engine != Engine::Trtllm) {
        let to = folder.path().with_extension(engine.name());
        let options = ExportOptions { engine, per_head: false, copy: true, serving: Serving::default() };
        let made = export(&checkpoint, &to, &options, &mut || Ok(())).unwrap();
        let audit =
            verify(&Checkpoint::open(&to).unwrap(), &[engine], &Serving::default(), &mut || Ok(())).unwrap().remove(0);
        std::fs::remove_dir_all(&to).unwrap();
        let certificate = made.certificate;
        assert!(certificate.scales_file.is_none() && certificate.safe && audit.safe, "{engine}");
        let layer = &certificate.layers[0];
        assert!(layer.k.cast_at_one && layer.k.needed == [scales.k[0].get()]);
        assert_eq!(layer.q.needed[0], scales.q.iter().map(|scale| scale.get()).fold(0.0, f32::max));
        let notes = certificate.notes.join(" ");
        assert!(
            notes.contains("absorbed query")
                && notes.contains("FP8 prefill casts q, k and v of each head at 1.0: safe")
        );
        assert_eq!(audit.layers[0].k[0].needed, Some(scales.k[0].get()));
    }
    // Gains of 100: the latent itself is past 448.
    let mut t = f.draw(12);
    let name = format!("{}.kv_a_layernorm.weight", f.at(f.names.0, 0));
    t.0.get_mut(&name).unwrap().1.iter_mut().for_each(|gain| *gain *= 100.0);
    let (folder, checkpoint) = open(f, &t, Dtype::BF16);
    let to = folder.path().with_extension("out");
    let options = ExportOptions { engine: Engine::Sglang, per_head: false, copy: true, serving: Serving::default() };
    let made = export(&checkpoint, &to, &options, &mut || Ok(())).unwrap();
    std::fs::remove_dir_all(&to).unwrap();
    let layers = &made.certificate.layers;
    assert!(!made.certificate.safe && !layers[0].k.safe && layers[0].k.load > 1.0 && layers[1].k.safe);
}

#[test]
fn a_profile_has_the_cache_beside_the_expanded_form() {
    let f = &families()[0];
    let t = f.draw(1);
    let (_folder, checkpoint) = open(f, &t, Dtype::BF16);
    let b = bounds(&checkpoint, 1);
    let profile = profile(&checkpoint, Options::default());
    let json = serde_json::to_value(&profile).unwrap();
    let row = &json["layers"][1];
    assert_eq!(row["mla"]["latent_bound"], json!(b.latent.rounded));
    assert_eq!(row["mla"]["k_pe_bound"], json!(b.k_pe.rounded));
    let descale = |bound: OperandBound| f64::from(bound.descale().unwrap().get());
    assert_eq!(row["mla"]["cache_descale"].as_f64().unwrap(), descale(b.cache()));
    let absorbed = row["mla"]["absorbed_q_descale"].as_array().unwrap();
    assert_eq!(
        absorbed.iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>(),
        b.absorbed_q.iter().map(|x| descale(*x)).collect::<Vec<_>>()
    );
    for key in ["q_descale", "k_descale", "v_descale", "o_descale"] {
        assert_eq!(row[key].as_array().unwrap().len(), HEADS, "{key}");
    }
    assert_eq!(row["heads"][1]["bound_exact"], json!(b.expanded.heads[1].exact.unwrap()));
    assert!(row["sigma"].is_null() && json["model"]["mla"]["kv_rank"] == RANK);
    let inspection = serde_json::to_value(Inspection::new(profile.clone())).unwrap();
    assert_eq!(inspection["layers"][1]["mla"], row["mla"]);
    let error = profile.layer_scales().unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("latent attention"), "{error}");
}

/// Projections stored in E4M3 with a scale per tile, as DeepSeek V3's are: the bounds are those of what they stand for, also where a
/// head's rows begin within a tile.
#[test]
fn fp8_blocks_are_read_as_what_they_stand_for() {
    let (rows, cols) = (24, 20);
    let settings = json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [rows, cols]}});
    let mut f = families()[0].clone();
    f.config = with(&f.config, settings);
    let mut plain = f.draw(5);
    let mut stored: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = vec![];
    for (name, (shape, values)) in &mut plain.0 {
        let [height, width] = shape[..] else {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            stored.push((name.clone(), Dtype::F64, shape.clone(), bytes));
            continue;
        };
        let grid = (height.div_ceil(rows), width.div_ceil(cols));
        let mut scales = vec![0f32; grid.0 * grid.1];
        let tile = |at: usize| at / width / rows * grid.1 + at % width / cols;
        for (at, x) in values.iter().enumerate() {
            scales[tile(at)] = scales[tile(at)].max((x.abs() / 448.0) as f32);
        }
        let codes: Vec<F8E4M3> =
            values.iter().enumerate().map(|(at, x)| F8E4M3::from_f64(x / f64::from(scales[tile(at)]))).collect();
        for (at, (x, code)) in values.iter_mut().zip(&codes).enumerate() {
            *x = code.to_f64() * f64::from(scales[tile(at)]);
        }
        let bits = codes.iter().map(|code| code.to_bits()).collect();
        stored.push((name.clone(), Dtype::F8_E4M3, shape.clone(), bits));
        let bytes = scales.iter().flat_map(|x| x.to_le_bytes()).collect();
        stored.push((format!("{name}_scale_inv"), Dtype::F32, vec![grid.0, grid.1], bytes));
    }
    let (_plain_folder, plain) = open(&f, &plain, Dtype::F64);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), f.config.to_string()).unwrap();
    let views = stored.iter().map(|(name, dtype, shape, bytes)| {
        (name.as_str(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    let fp8 = Checkpoint::open(folder.path()).unwrap();
    assert!(fp8.spec().fp8_inputs);
    for layer in 0..2 {
        let (one, other) = (bounds(&fp8, layer), bounds(&plain, layer));
        for (one, other) in operand_bounds(&one).iter().zip(operand_bounds(&other)) {
            assert_eq!(one.exact, other.exact);
        }
        for (one, other) in one.expanded.heads.iter().zip(&other.expanded.heads) {
            assert_eq!(one.exact, other.exact);
        }
    }
}

/// Sizes of heads are those that the config states, of any number of channels: the rules for other heads do not hold, neither for
/// `qk_nope_head_dim + qk_rope_head_dim` nor for the hidden size over the heads.
#[test]
fn heads_have_the_sizes_that_the_config_states() {
    for [hidden, nope, rope, value] in [[56, 16, 16, 24], [200, 18, 10, 26], [192, 244, 16, 8], [192, 2, 2, 3]] {
        let (mut f, mut draw) = (families().swap_remove(0), Draw::new(3));
        let sizes = json!({"hidden_size": hidden, "num_hidden_layers": 1, "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope, "v_head_dim": value});
        f.config = with(&f.config, sizes);
        let name = |part: &str| f.at("layers.{i}.self_attn", 0) + "." + part;
        draw.add("model.layers.0.input_layernorm.weight", &[hidden], 1.0, 0.4);
        draw.add(name("kv_a_layernorm.weight"), &[RANK], 1.0, 0.4);
        draw.add(name("q_a_layernorm.weight"), &[Q_RANK], 1.0, 0.4);
        draw.linear(&name("q_b_proj"), HEADS * (nope + rope), Q_RANK, None);
        draw.linear(&name("kv_a_proj_with_mqa"), RANK + rope, hidden, None);
        draw.linear(&name("kv_b_proj"), HEADS * (nope + value), RANK, None);
        let (_folder, checkpoint) = open(&f, &draw.tensors, Dtype::BF16);
        let (b, t) = (bounds(&checkpoint, 0), &draw.tensors);
        // Rows of V of the second head, which come after its rows of K.
        let (gain, weight) = (t.get(&name("kv_a_layernorm.weight")), t.get(&name("kv_b_proj.weight")));
        let row = |row: usize| weight[row * RANK..][..RANK].iter().zip(gain).map(|(w, g)| (w * g).powi(2)).sum::<f64>();
        let want = (0..value).map(|c| row(2 * nope + value + c)).fold(0.0, f64::max);
        let got = b.expanded.v.as_ref().unwrap()[1].exact / (RANK as f64 * want).sqrt();
        assert!((1.0 - 1e-12..1.0 + 1e-9).contains(&got), "hidden size {hidden}, {nope} + {rope}: {got}");
        let profile = profile(&checkpoint, Options::default());
        let json = serde_json::to_value(&profile).unwrap();
        assert_eq!(json["model"]["d_head"], json!(nope + rope));
        assert_eq!(json["layers"][0]["mla"]["cache_descale"], json!(b.cache().descale().unwrap().get()));
        assert_eq!(
            serde_json::to_value(Inspection::new(profile)).unwrap()["layers"][0]["mla"],
            json["layers"][0]["mla"]
        );
    }
}

/// Where only heads of other layers are known, latent attention is refused by name.
#[test]
fn what_does_not_know_latent_attention_refuses_it() {
    let f = &families()[0];
    let t = f.draw(1);
    let (_folder, checkpoint) = open(f, &t, Dtype::BF16);
    let spec = checkpoint.spec();
    let layer = || checkpoint.layer(0).unwrap();
    let errors = [
        check_device(spec).unwrap_err(),
        LayerGeometry::new(spec, layer()).unwrap_err(),
        SyntheticModel::new(spec, 0, SyntheticOptions::default()).unwrap_err(),
        Calibration::new(spec, Options { as_paper: true, ..Options::default() }).unwrap().layer(layer()).unwrap_err(),
    ];
    for error in errors {
        assert!(error.is_unsupported() && error.to_string().contains("MLA"), "{error}");
    }
    let saved: AttentionSpec = serde_json::from_value(serde_json::to_value(spec).unwrap()).unwrap();
    assert_eq!(saved, *spec);
    let names =
        Layout::from_config_json(f.config.to_string().as_bytes(), "m/config.json".as_ref()).unwrap().layer(1).unwrap();
    let mla = names.mla.unwrap();
    assert_eq!((names.q.name.as_str(), names.v.heads[1]), ("layers.1.self_attn.q_b_proj", 2 * NOPE + VALUE));
    assert_eq!((mla.k_pe.heads, mla.k_pe.channels), (vec![RANK], RANK + ROPE));
    assert_eq!(mla.q_norm.as_deref(), Some("layers.1.self_attn.q_a_layernorm"));
}

#[test]
fn checkpoints_that_contradict_their_config_are_refused() {
    let f = &families()[0];
    let says = |t: &Tensors, part: &str| {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &f.config, t, Dtype::BF16, 1);
        let error = Checkpoint::open(folder.path()).and_then(|c| c.layer(0).map(|_| ())).unwrap_err();
        assert!((error.is_format() || error.is_unsupported()) && error.to_string().contains(part), "{error}");
    };
    let bias = "model.layers.0.self_attn.kv_b_proj.bias";
    let mut t = f.draw(1);
    t.0.insert(bias.into(), (vec![HEADS * (NOPE + VALUE)], vec![1.0; HEADS * (NOPE + VALUE)]));
    says(&t, bias);
    let mut t = f.draw(1);
    t.0.remove("model.layers.0.self_attn.kv_a_layernorm.weight");
    says(&t, "kv_a_layernorm.weight");
    let mut t = f.draw(1);
    t.0.insert("model.layers.0.self_attn.kv_a_proj_with_mqa.weight".into(), (vec![RANK, D], vec![1.0; RANK * D]));
    says(&t, "[32, 192]");
    let config = |extra: Value| {
        let bytes = with(&f.config, extra).to_string();
        AttentionSpec::from_config_json(bytes.as_bytes(), "m/config.json".as_ref()).unwrap_err().to_string()
    };
    assert!(config(json!({"qk_rope_head_dim": 15})).contains("qk_rope_head_dim"));
    assert!(config(json!({"qk_head_dim": 64})).contains("`qk_head_dim`"));
    assert!(config(json!({"model_type": "deepseek_v32", "rope_interleave": false})).contains("rope_interleave"));
    assert!(config(json!({"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}})).contains("`factor`"));
}
