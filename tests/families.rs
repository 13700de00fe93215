//! Every family, read from a small checkpoint in its real tensor names, shapes and layouts, against an independent
//! forward written here straight from the raw tensors: norm, projection, QK-norm, rotation, logit.

mod common;

use common::cases::{Case, LATENT, R, cases, draw, grouped};
use common::fixtures::{Tensors, write_checkpoint};
use common::forward::{dot, forward_qkv, logit, to_sphere};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use safetensors::Dtype;
use serde_json::{Value, json};
use sigmascale::bound::LayerBounds;
use sigmascale::calibrate::{Calibration, Options};
use sigmascale::geometry::LayerGeometry;
use sigmascale::model::{AttentionSpec, Checkpoint, GainForm, Support, known_families};
use sigmascale::plan::{CENTER_POSITIONS, CenterPolicy, CenteredLayer};

// The independent forward: plain vectors, raw tensors, one family after another.

fn linear(t: &Tensors, name: &str, x: &[f64]) -> Vec<f64> {
    let y: Vec<f64> = t.get(&format!("{name}.weight")).chunks(x.len()).map(|row| dot(row, x)).collect();
    match t.find(&format!("{name}.bias")) {
        Some(bias) => y.iter().zip(bias).map(|(y, b)| y + b).collect(),
        None => y,
    }
}

fn conv1d(t: &Tensors, name: &str, x: &[f64]) -> Vec<f64> {
    let mut y = t.get(&format!("{name}.bias")).to_vec();
    let out = y.len();
    for (row, x) in t.get(&format!("{name}.weight")).chunks(out).zip(x) {
        y.iter_mut().zip(row).for_each(|(y, w)| *y += w * x);
    }
    y
}

fn layer_norm(x: &[f64], gain: &[f64], shift: Option<&[f64]>) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / x.len() as f64;
    (0..x.len()).map(|i| (x[i] - mean) / variance.sqrt() * gain[i] + shift.map_or(0.0, |s| s[i])).collect()
}

fn rms_norm(x: &[f64], gain: &[f64], offset: f64) -> Vec<f64> {
    let mean_square = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    x.iter().zip(gain).map(|(x, g)| x / mean_square.sqrt() * (offset + g)).collect()
}

fn heads(y: &[f64]) -> Vec<Vec<f64>> {
    y.chunks(R).map(<[f64]>::to_vec).collect()
}

fn frequencies(theta: f64, dim: usize) -> Vec<f64> {
    (0..dim).step_by(2).map(|j| 1.0 / theta.powf(j as f64 / dim as f64)).collect()
}

/// x cos + rotate_half(x) sin on the first channels.
fn rope_half(x: &mut [f64], freq: &[f64], position: f64, factor: f64) {
    let half = freq.len();
    let old = x.to_vec();
    for c in 0..2 * half {
        let angle = position * freq[c % half];
        let turned = if c < half { -old[c + half] } else { old[c - half] };
        x[c] = old[c] * (angle.cos() * factor) + turned * (angle.sin() * factor);
    }
}

/// The same on neighbors.
fn rope_interleaved(x: &mut [f64], freq: &[f64], position: f64) {
    let old = x.to_vec();
    for c in 0..2 * freq.len() {
        let angle = position * freq[c / 2];
        let turned = if c % 2 == 0 { -old[c + 1] } else { old[c - 1] };
        x[c] = old[c] * angle.cos() + turned * angle.sin();
    }
}

fn yarn(theta: f64, factor: f64, original: f64) -> (Vec<f64>, f64) {
    let dim = R as f64;
    let correction =
        |rotations: f64| dim * (original / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln());
    let (low, high) = (correction(32.0).floor().max(0.0), correction(1.0).ceil().min(dim - 1.0));
    let freq = frequencies(theta, R)
        .iter()
        .enumerate()
        .map(|(j, w)| {
            let keep = 1.0 - ((j as f64 - low) / (high - low)).clamp(0.0, 1.0);
            w / factor * (1.0 - keep) + w * keep
        })
        .collect();
    (freq, 0.1 * factor.ln() + 1.0)
}

fn llama3(theta: f64, factor: f64, low: f64, high: f64, original: f64) -> Vec<f64> {
    let scale = |w: &f64| {
        let wavelength = 2.0 * std::f64::consts::PI / w;
        if wavelength < original / high {
            return *w;
        }
        if wavelength > original / low {
            return w / factor;
        }
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * w / factor + smooth * w
    };
    frequencies(theta, R).iter().map(scale).collect()
}

struct Out {
    q: Vec<Vec<f64>>,
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    scale: f64,
    cap: Option<f64>,
}

fn reference(case: &Case, t: &Tensors, i: usize, hidden: &[f64], position: f64) -> Out {
    let (p, n_q, n_kv) = (case.prefix, case.n_q, case.n_kv);
    let usual = 1.0 / (R as f64).sqrt();
    let own = |name: &str| (t.get(&format!("{name}.weight")).to_vec(), t.find(&format!("{name}.bias")));
    let family = case.kind.split(' ').next().unwrap();
    match family {
        "gpt2" => {
            let (g, b) = own(&format!("{p}h.{i}.ln_1"));
            let y = conv1d(t, &format!("{p}h.{i}.attn.c_attn"), &layer_norm(hidden, &g, b));
            let (q, rest) = y.split_at(case.d);
            let (k, v) = rest.split_at(case.d);
            Out { q: heads(q), k: heads(k), v: heads(v), scale: usual / (i + 1) as f64, cap: None }
        }
        "gptj" | "gpt_bigcode" | "opt" => {
            let layer = if family == "opt" { format!("{p}decoder.layers.{i}") } else { format!("{p}h.{i}") };
            let (g, b) = own(&format!("{layer}.{}", if family == "opt" { "self_attn_layer_norm" } else { "ln_1" }));
            let x = layer_norm(hidden, &g, b);
            if family == "gpt_bigcode" {
                // [model dimension, one key head, one value head].
                let y = linear(t, &format!("{layer}.attn.c_attn"), &x);
                let (q, rest) = y.split_at(case.d);
                let (k, v) = rest.split_at(R);
                return Out { q: heads(q), k: heads(k), v: heads(v), scale: usual, cap: None };
            }
            let attn = format!("{layer}.{}", if family == "opt" { "self_attn" } else { "attn" });
            let [mut q, mut k, v] = ["q", "k", "v"].map(|n| heads(&linear(t, &format!("{attn}.{n}_proj"), &x)));
            if family == "gptj" {
                for head in q.iter_mut().chain(&mut k) {
                    rope_interleaved(head, &frequencies(10_000.0, 8), position);
                }
            }
            Out { q, k, v, scale: usual, cap: None }
        }
        "phi3" => {
            let (g, _) = own(&format!("{p}layers.{i}.input_layernorm"));
            let y = linear(t, &format!("{p}layers.{i}.self_attn.qkv_proj"), &rms_norm(hidden, &g, 0.0));
            let (mut q, mut k) = (heads(&y[..n_q * R]), heads(&y[n_q * R..(n_q + n_kv) * R]));
            let v = heads(&y[(n_q + n_kv) * R..]);
            for head in q.iter_mut().chain(&mut k) {
                rope_half(head, &frequencies(10_000.0, R / 2), position, 1.0);
            }
            Out { q, k, v, scale: usual, cap: None }
        }
        "gpt_neox" | "persimmon" => {
            let (g, b) = own(&format!("{p}layers.{i}.input_layernorm"));
            let attn = format!("{p}layers.{i}.{}", if family == "persimmon" { "self_attn" } else { "attention" });
            let y = linear(t, &format!("{attn}.query_key_value"), &layer_norm(hidden, &g, b));
            // Viewed as [heads, 3 * d_head].
            let part = |which: usize| -> Vec<Vec<f64>> {
                y.chunks(3 * R).map(|head| head[which * R..(which + 1) * R].to_vec()).collect()
            };
            let (mut q, mut k) = (part(0), part(1));
            if family == "persimmon" {
                for (name, all) in [("q", &mut q), ("k", &mut k)] {
                    let (g, b) = own(&format!("{attn}.{name}_layernorm"));
                    all.iter_mut().for_each(|head| *head = layer_norm(head, &g, b));
                }
            }
            for head in q.iter_mut().chain(&mut k) {
                rope_half(head, &frequencies(10_000.0, R / 2), position, 1.0);
            }
            Out { q, k, v: part(2), scale: usual, cap: None }
        }
        "falcon" => {
            let name = if case.kind.ends_with("ln_attn") { "ln_attn" } else { "input_layernorm" };
            let (g, b) = own(&format!("{p}h.{i}.{name}"));
            let y = linear(t, &format!("{p}h.{i}.self_attention.query_key_value"), &layer_norm(hidden, &g, b));
            let y = heads(&y);
            let (mut q, mut k, v);
            if case.config["new_decoder_architecture"] == true {
                // [kv heads, group + 2, d_head]: queries, key, value.
                let groups: Vec<_> = y.chunks(n_q / n_kv + 2).collect();
                q = groups.iter().flat_map(|g| g[..g.len() - 2].to_vec()).collect::<Vec<_>>();
                k = groups.iter().map(|g| g[g.len() - 2].clone()).collect::<Vec<_>>();
                v = groups.iter().map(|g| g[g.len() - 1].clone()).collect();
            } else if case.config["multi_query"] == true {
                // [heads + 2, d_head].
                (q, k, v) = (y[..n_q].to_vec(), vec![y[n_q].clone()], vec![y[n_q + 1].clone()]);
            } else {
                // [heads, 3, d_head].
                let part = |which: usize| y.iter().skip(which).step_by(3).cloned().collect::<Vec<_>>();
                (q, k, v) = (part(0), part(1), part(2));
            }
            for head in q.iter_mut().chain(&mut k) {
                rope_half(head, &frequencies(10_000.0, R), position, 1.0);
            }
            Out { q, k, v, scale: usual, cap: None }
        }
        "modernbert" => {
            let name = if i == 0 { format!("{p}embeddings.norm") } else { format!("{p}layers.{i}.attn_norm") };
            let x = layer_norm(hidden, &own(&name).0, None);
            let [mut q, mut k, v] =
                ["q", "k", "v"].map(|n| heads(&linear(t, &format!("{p}layers.{i}.attn.{n}_proj"), &x)));
            // The first of three is a full one.
            let theta = if i.is_multiple_of(3) { 160_000.0 } else { 10_000.0 };
            for head in q.iter_mut().chain(&mut k) {
                rope_half(head, &frequencies(theta, R), position, 1.0);
            }
            Out { q, k, v, scale: usual, cap: None }
        }
        "bert" => {
            let name = match i {
                _ if case.kind.ends_with("pre") => format!("{p}encoder.layer.{i}.attention.LayerNorm"),
                0 => format!("{p}embeddings.LayerNorm"),
                _ => format!("{p}encoder.layer.{}.output.LayerNorm", i - 1),
            };
            let (gain, shift) = if case.kind.ends_with("gamma") { ("gamma", "beta") } else { ("weight", "bias") };
            let x = layer_norm(hidden, t.get(&format!("{name}.{gain}")), t.find(&format!("{name}.{shift}")));
            let [q, k, v] = ["query", "key", "value"]
                .map(|name| heads(&linear(t, &format!("{p}encoder.layer.{i}.attention.self.{name}"), &x)));
            Out { q, k, v, scale: usual, cap: None }
        }
        _ => {
            let input = || own(&format!("{p}layers.{i}.input_layernorm"));
            let x = match family {
                "olmo2" | "exaone4" => hidden.to_vec(),
                "olmo" => layer_norm(hidden, &vec![1.0; case.d], None),
                "nanochat" => rms_norm(hidden, &vec![1.0; case.d], 0.0),
                "apertus" => rms_norm(hidden, t.get(&format!("{p}layers.{i}.attention_layernorm.weight")), 0.0),
                "nemotron" => {
                    let (g, b) = input();
                    layer_norm(hidden, &g.iter().map(|g| 1.0 + g).collect::<Vec<_>>(), b)
                }
                "phi" | "phimoe" | "starcoder2" | "stablelm" | "cohere" | "cohere2" => {
                    let (g, b) = input();
                    layer_norm(hidden, &g, b)
                }
                // Gates open, and the same token in all streams, whose gains are equal.
                _ if case.name == "qwen4_exp" => {
                    let gains = t.get(&format!("{p}layers.{i}.attn_hyper_connection.hc_norm.weight"));
                    let gains: Vec<f64> = gains[..case.d].iter().map(|g| (1.0 + g).abs()).collect();
                    rms_norm(hidden, &gains, 0.0)
                }
                "gemma" | "gemma2" | "gemma3" | "qwen3_next" | "minimax_m3" => rms_norm(hidden, &input().0, 1.0),
                "lfm2" | "lfm3" => rms_norm(hidden, t.get(&format!("{p}layers.{i}.operator_norm.weight")), 0.0),
                "nemotron_h" => rms_norm(hidden, t.get(&format!("{p}layers.{i}.norm.weight")), 0.0),
                _ => rms_norm(hidden, &input().0, 0.0),
            };
            let attn = format!("{p}layers.{i}.{}", if family == "nemotron_h" { "mixer" } else { "self_attn" });
            // Gemma 3n: its last two layers take the keys and values of the two before. Weights alone are compared here, so these
            // are of the same tokens.
            let shared = case.config.pointer("/text_config/num_kv_shared_layers").is_some() && i >= 2;
            let from = if shared { format!("{p}layers.{}.self_attn", i - 2) } else { attn.clone() };
            let place = |n: &str| if n == "q" { &attn } else { &from };
            let x: Vec<f64> = if family == "falcon_h1" { x.iter().map(|x| 1.5 * x).collect() } else { x };
            let [mut q, mut k, mut v] =
                ["q", "k", "v"].map(|n| heads(&linear(t, &format!("{}.{n}_proj", place(n)), &x)));
            match family {
                "falcon_h1" => k.iter_mut().flatten().for_each(|x| *x *= 0.375),
                "gemma3n" => v.iter_mut().for_each(|head| *head = rms_norm(head, &[1.0; R], 0.0)),
                _ => {}
            }
            if family == "qwen3_next" {
                // Viewed as [heads, query and gate].
                q = q.into_iter().step_by(2).collect();
            }
            for (name, all) in [("q", &mut q), ("k", &mut k)] {
                let gain = || t.get(&format!("{}.{name}_norm.weight", place(name)));
                match case.kind {
                    "olmo2" | "olmoe" | "minimax_m2" => *all = heads(&rms_norm(&all.concat(), gain(), 0.0)),
                    _ => {
                        for (h, head) in all.iter_mut().enumerate() {
                            *head = match case.kind {
                                "qwen3" | "glm4_moe" | "exaone4" | "exaone_moe" | "apertus" | "gemma3n" | "lfm3" => {
                                    rms_norm(head, gain(), 0.0)
                                }
                                "gemma3" | "qwen3_next" | "minimax_m3" => rms_norm(head, gain(), 1.0),
                                "lfm2" => rms_norm(head, t.get(&format!("{attn}.{name}_layernorm.weight")), 0.0),
                                "cohere" => layer_norm(head, &gain()[h * R..(h + 1) * R], None),
                                "stablelm" => {
                                    let (g, _) = own(&format!("{attn}.{name}_layernorm.norms.{h}"));
                                    layer_norm(head, &g, None)
                                }
                                _ => continue,
                            }
                        }
                    }
                }
            }
            for head in q.iter_mut().chain(&mut k) {
                match case.kind {
                    // Layers 0 and 2 are sliding ones, and only those are rotated.
                    "cohere2" | "exaone4" | "exaone_moe" | "granite bases" if i % 2 == 1 => {}
                    "llama4" | "llama4 normed" if i % 2 == 1 => {}
                    "cohere" | "cohere moe" | "cohere2" | "helium" | "llama4" | "llama4 normed" => {
                        rope_interleaved(head, &frequencies(10_000.0, R), position)
                    }
                    "lfm3" if i == 1 => rope_half(head, &frequencies(10_000.0, R), position, 1.0),
                    "gemma3n" | "lfm3" if i % 2 == 1 => rope_half(head, &frequencies(1e6, R), position, 1.0),
                    "glm4" => rope_interleaved(head, &frequencies(10_000.0, R / 2), position),
                    "granite fixed" | "llama fixed" | "nemotron_h" => {}
                    "phi" | "glm4_moe" | "llama half" | "nemotron" | "minimax_m2" | "minimax_m3" | "qwen3_next" => {
                        rope_half(head, &frequencies(10_000.0, R / 2), position, 1.0);
                    }
                    "stablelm" => rope_half(head, &frequencies(10_000.0, R / 4), position, 1.0),
                    "smollm3" if i == 2 => {}
                    "gemma3" if i % 2 == 1 => {
                        let freq: Vec<f64> = frequencies(1e6, R).iter().map(|w| w / 8.0).collect();
                        rope_half(head, &freq, position, 1.0);
                    }
                    "llama yarn" => {
                        let (freq, factor) = yarn(10_000.0, 4.0, 128.0);
                        rope_half(head, &freq, position, factor);
                    }
                    "hunyuan alpha" => {
                        let theta = 10_000.0 * 100f64.powf(R as f64 / (R as f64 - 2.0));
                        rope_half(head, &frequencies(theta, R), position, 1.0);
                    }
                    "llama llama3" => rope_half(head, &llama3(10_000.0, 8.0, 1.0, 4.0, 64.0), position, 1.0),
                    _ => rope_half(head, &frequencies(10_000.0, R), position, 1.0),
                }
            }
            if family == "hunyuan" {
                for (name, all) in [("query", &mut q), ("key", &mut k)] {
                    let gain = t.get(&format!("{attn}.{name}_layernorm.weight"));
                    all.iter_mut().for_each(|head| *head = rms_norm(head, gain, 0.0));
                }
            }
            // Llama 4 counts positions from 1, and only layers without rotation grow.
            let growth = match case.kind {
                "llama grows" => 1.0 + 0.1 * (1.0 + (position / 16.0).floor()).ln(),
                "llama4" | "llama4 normed" if i % 2 == 1 => 1.0 + 0.2 * (1.0 + ((position + 1.0) / 16.0).floor()).ln(),
                _ => 1.0,
            };
            q.iter_mut().flatten().for_each(|x| *x *= growth);
            if family == "nanochat" || case.kind == "llama4 normed" && i.is_multiple_of(2) {
                q.iter_mut().chain(&mut k).for_each(|head| *head = rms_norm(head, &[1.0; R], 0.0));
            }
            let scale = match family {
                "gemma2" | "gemma3" => 1.0 / 24f64.sqrt(),
                "granite" => 0.015625,
                "gemma3n" => 1.0,
                _ => usual,
            };
            Out { q, k, v, scale, cap: (family == "gemma2").then_some(5.0) }
        }
    }
}

fn close(got: &[Vec<f64>], want: &[Vec<f64>], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: heads");
    for (h, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{what}: head {h}");
        for (c, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((got - want).abs() <= 1e-10 * (1.0 + want.abs()), "{what}: head {h} channel {c}: {got} for {want}");
        }
    }
}

#[test]
fn every_family_computes_what_the_raw_tensors_say() {
    for (number, case) in cases().iter().enumerate() {
        let tensors = draw(case, 100 + number as u64);
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &case.config, &tensors, case.dtype, case.shards);
        let label = format!("{} ({}, prefix `{}`)", case.name, case.kind, case.prefix);
        let checkpoint = Checkpoint::open(folder.path()).unwrap_or_else(|e| panic!("{label}: {e}"));
        let spec = checkpoint.spec();
        assert_eq!(checkpoint.prefix(), case.prefix, "{label}");
        for own in &spec.layers {
            assert_eq!((own.n_q_heads, own.n_kv_heads, own.d_head), (case.n_q, case.n_kv, R), "{label}");
        }
        assert_eq!(spec.bias.any(), case.bias, "{label}");
        let mut rng = StdRng::seed_from_u64(number as u64);
        let numbers: Vec<usize> = spec.layers.iter().map(|layer| layer.number).collect();
        assert_eq!(numbers, case.attention, "{label}");
        for (layer, &own) in numbers.iter().enumerate() {
            let weights = checkpoint.layer(layer).unwrap_or_else(|e| panic!("{label}: {e}"));
            assert_eq!(weights.norm_gain.is_some(), spec.norm.gain != GainForm::Unit, "{label}");
            let tokens: Vec<Vec<f64>> = (0..2)
                .map(|_| {
                    (0..case.d)
                        .map(|_| {
                            let normal: f64 = StandardNormal.sample(&mut rng);
                            0.4 + 2.0 * normal
                        })
                        .collect()
                })
                .collect();
            let positions = [47.0, 15.0];
            let want: Vec<Out> =
                tokens.iter().zip(positions).map(|(x, m)| reference(case, &tensors, own, x, m)).collect();
            let got: Vec<_> = tokens
                .iter()
                .zip(positions)
                .map(|(x, m)| forward_qkv(spec, &weights, &to_sphere(spec.norm.kind, x), m))
                .collect();
            for (got, want) in got.iter().zip(&want) {
                close(&got.q, &want.q, &format!("{label} layer {layer} q"));
                close(&got.k, &want.k, &format!("{label} layer {layer} k"));
                close(&got.v, &want.v, &format!("{label} layer {layer} v"));
            }
            for head in 0..case.n_q {
                let raw = dot(&want[0].q[head], &want[1].k[head / (case.n_q / case.n_kv)]) * want[0].scale;
                let want = want[0].cap.map_or(raw, |cap| (raw / cap).tanh() * cap);
                let got = logit(spec, layer, head, &got[0], &got[1]);
                assert!((got - want).abs() <= 1e-10 * (1.0 + want.abs()), "{label} layer {layer}: {got} for {want}");
            }
        }
    }
}

/// Families with a key bias under rotation have a center: the mean over positions of what the raw tensors give both a token and
/// its negative. Others have none. What is left is within the new bound. The sum is over few positions, since the independent
/// forward runs at each.
#[test]
fn families_with_a_key_bias_have_a_center() {
    let mut found = std::collections::BTreeSet::new();
    let mut lowered = 0;
    for (number, case) in cases().iter().enumerate() {
        let mut tensors = draw(case, 300 + number as u64);
        // As large beside the weights as in trained models, and still what the checkpoint can hold.
        let biases = tensors.0.iter_mut().filter(|(name, _)| name.ends_with(".bias"));
        biases.flat_map(|(_, (_, values))| values).for_each(|b| *b *= 32.0);
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &case.config, &tensors, case.dtype, case.shards);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let spec = checkpoint.spec();
        let mut rng = StdRng::seed_from_u64(number as u64);
        for (layer, own) in spec.layers.iter().enumerate() {
            let label = format!("{} ({}) layer {layer}", case.name, case.kind);
            let weights = checkpoint.layer(layer).unwrap();
            let geometry = LayerGeometry::new(spec, weights.clone()).unwrap();
            let (bounds, ranges) = LayerBounds::operands_and_ranges(spec, &geometry).unwrap();
            let token: Vec<f64> = (0..case.d).map(|_| StandardNormal.sample(&mut rng)).collect();
            let at = |position: usize, sign: f64| {
                let token: Vec<f64> = token.iter().map(|x| sign * x).collect();
                reference(case, &tensors, own.number, &token, position as f64)
            };
            // A norm of q and k is not odd in the token: its shift is what it leaves of zero.
            let shift = (case.kind == "persimmon").then(|| {
                let name = format!("{}layers.{}.self_attn.k_layernorm.bias", case.prefix, own.number);
                tensors.find(&name).unwrap().to_vec()
            });
            let constants = |position: usize| -> Vec<Vec<f64>> {
                if let Some(shift) = &shift {
                    let mut shift = shift.clone();
                    rope_half(&mut shift, &frequencies(10_000.0, R / 2), position as f64, 1.0);
                    return vec![shift; case.n_kv];
                }
                let (plus, minus) = (at(position, 1.0), at(position, -1.0));
                let half = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(a, b)| 0.5 * (a + b)).collect();
                plus.k.iter().zip(&minus.k).map(half).collect()
            };
            let normalised = spec.qk_norm_of(own).is_some() && shift.is_none();
            let mut want = vec![vec![0.0; R]; case.n_kv];
            for position in (0..7).filter(|_| !normalised) {
                for (sum, x) in want.iter_mut().flatten().zip(constants(position).iter().flatten()) {
                    *sum += x / 7.0;
                }
            }
            let mean = |positions: usize| -> Vec<Vec<f64>> {
                let rotary = ranges.rotary.as_ref();
                let of = |x: &Vec<f64>| rotary.map_or(x.clone(), |rotary| rotary.mean(x, positions));
                ranges.k.iter().map(|head| of(&head.constant)).collect()
            };
            close(&mean(7), &want, &label);
            let have = mean(ranges.positions.unwrap_or(CENTER_POSITIONS).min(CENTER_POSITIONS));
            let has = want.iter().flatten().any(|x| x.abs() > 1e-9);
            let rotates = own.rope.is_some() && spec.soft_cap.is_none() && !own.sinks;
            let CenteredLayer { center, k, .. } =
                CenteredLayer::new(spec, &bounds, &ranges, &CenterPolicy::CACHE).unwrap();
            assert!(has && rotates || center.k.is_none(), "{label}");
            let constant = shift.is_some() || (spec.bias.k || spec.norm.shift) && !normalised;
            assert_eq!(has && rotates, constant && rotates, "{label}");
            for (head, c) in center.k.iter().flatten().enumerate() {
                if c.iter().all(|c| *c == 0.0) {
                    assert!(k[head].rounded <= bounds.k[head].rounded, "{label}");
                    continue;
                }
                lowered += 1;
                found.insert(case.name);
                assert!(k[head].exact < ranges.k[head].plain().exact, "{label}");
                for (c, want) in c.iter().zip(&have[head]) {
                    assert!((f64::from(*c) - want).abs() <= want.abs() / 256.0, "{label}: {c} for {want}");
                }
            }
            for position in [0, 1, 60, ranges.positions.unwrap_or(512) - 1] {
                let out = at(position, 1.0);
                for (head, key) in out.k.iter().enumerate() {
                    let c = |i: usize| center.c(head).map_or(0.0, |c| f64::from(c[i]));
                    let most = key.iter().enumerate().map(|(i, k)| (k - c(i)).abs()).fold(0.0, f64::max);
                    assert!(most <= k[head].exact * (1.0 + 1e-9), "{label}: {most} over {:?}", k[head]);
                }
            }
        }
    }
    for name in [
        "falcon",
        "glm",
        "gpt_neox",
        "llama",
        "persimmon",
        "phi",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_moe",
        "seed_oss",
        "starcoder2",
    ] {
        assert!(found.contains(name), "{name}: {found:?}");
    }
    for name in ["qwen3", "gemma3_text", "mistral", "bert", "gpt2", "opt", "gemma2", "gpt_oss"] {
        assert!(!found.contains(name), "{name}");
    }
    assert!(lowered > 50, "{lowered}");
}

#[test]
fn every_family_has_a_case() {
    // Those of `heterogeneous`.
    let differ = ["openelm", "deci"];
    let family = |case: &Case| {
        let config = case.config.to_string();
        AttentionSpec::from_config_json(config.as_bytes(), "config.json".as_ref()).unwrap().family
    };
    let tried: std::collections::BTreeSet<String> = cases().iter().map(family).collect();
    for known in known_families() {
        let Support::Family(name) = known.support else { continue };
        let found = tried.contains(name) || LATENT.contains(&name) || differ.contains(&name);
        assert!(found, "{} ({name})", known.model_type);
    }
}

/// The lists of `docs/models.md` are those of the table.
#[test]
fn the_guide_lists_every_model_type() {
    let mut list = String::new();
    let mut reasons = std::collections::BTreeMap::<&str, Vec<String>>::new();
    let mut width = 0;
    for known in known_families() {
        let name = format!("`{}`", known.model_type);
        match known.support {
            Support::Refused(why) => reasons.entry(why).or_default().push(name),
            Support::Family(_) => {
                let before = if width == 0 {
                    ""
                } else if width + name.len() > 115 {
                    ",\n"
                } else {
                    ", "
                };
                width = if before == ", " { width + name.len() + 2 } else { name.len() };
                list += before;
                list += &name;
            }
        }
    }
    list += "\n";
    let rows = reasons.iter().map(|(why, names)| format!("| {} | {why} |\n", names.join(", ")));
    let table = format!("| model type | reason |\n|---|---|\n{}", rows.collect::<String>());
    let guide = include_str!("../docs/models.md");
    for expected in [list, table] {
        assert!(guide.contains(&expected), "docs/models.md must have\n\n{expected}");
    }
}

/// Scales are exported under the names that the checkpoint itself has.
#[test]
fn exported_scales_have_the_checkpoints_own_names() {
    for case in cases().iter().filter(|case| !matches!(case.kind, "olmo2" | "exaone4")) {
        let folder = tempfile::tempdir().unwrap();
        let tensors = draw(case, 3);
        write_checkpoint(folder.path(), &case.config, &tensors, case.dtype, 1);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut calibration = Calibration::new(checkpoint.spec(), Options::default()).unwrap();
        calibration.layer(checkpoint.layer(0).unwrap()).unwrap();
        let module = &calibration.finish().layer_scales().unwrap()[0].module;
        let inside =
            |name: &&String| name.strip_prefix(&format!("{module}.")).is_some_and(|rest| rest.ends_with(".weight"));
        assert!(tensors.0.keys().any(|name| inside(&name)), "{} {}: {module}", case.name, case.prefix);
    }
}

/// What a config alone says of the names: those of the models published with it.
#[test]
fn wrapped_models_have_prefixes_of_their_own() {
    let prefix = |name: &str| {
        let text = json!({"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "max_position_embeddings": 64, "layer_types": ["full_attention"]});
        let mut config = text.clone();
        (config["model_type"], config["text_config"]) = (json!(name), text);
        AttentionSpec::from_config_json(config.to_string().as_bytes(), "m/config.json".as_ref()).unwrap().prefix
    };
    for (name, expected) in [
        ("llama", "model."),
        ("mistral3", "language_model.model."),
        ("gemma3", "language_model.model."),
        ("llama4", "language_model.model."),
        ("qwen2_vl", "model."),
        ("qwen2_5_vl", "model."),
        ("qwen3_vl", "model.language_model."),
        ("qwen3_5", "model.language_model."),
    ] {
        assert_eq!(prefix(name), expected, "{name}");
    }
}

mod fp8 {
    //! E4M3 weights and the three forms of scale beside them.

    use super::*;
    use float8::F8E4M3;
    use safetensors::tensor::TensorView;
    use sigmascale::bound::Tail;
    use sigmascale::runtime::bounds_of;

    /// The one-layer llama of this module with q_proj in E4M3 and this scale beside it.
    fn write(folder: &std::path::Path, scale: Option<(&str, &[usize], &[f32])>, config: Value) -> Vec<u8> {
        let case = grouped("llama", "llama", config);
        let tensors = draw(&case, 5);
        let name = "model.layers.0.self_attn.q_proj.weight";
        write_e4m3(folder, &case, &tensors, (name, &[64, 48]), scale)
    }

    /// Writes a checkpoint with one tensor in E4M3, and this scale beside it.
    fn write_e4m3(
        folder: &std::path::Path,
        case: &Case,
        tensors: &Tensors,
        (name, shape): (&str, &[usize]),
        scale: Option<(&str, &[usize], &[f32])>,
    ) -> Vec<u8> {
        write_checkpoint(folder, &case.config, tensors, Dtype::F32, 1);
        let bits: Vec<u8> = tensors.get(name).iter().map(|x| F8E4M3::from_f64(*x * 64.0).to_bits()).collect();
        let mut stored: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = tensors
            .0
            .iter()
            .filter(|(n, _)| *n != name)
            .map(|(n, (s, v))| {
                (n.clone(), Dtype::F32, s.clone(), v.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect())
            })
            .collect();
        stored.push((name.to_owned(), Dtype::F8_E4M3, shape.to_vec(), bits.clone()));
        if let Some((suffix, shape, values)) = scale {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            stored.push((format!("{name}_{suffix}"), Dtype::F32, shape.to_vec(), bytes));
        }
        let views = stored.iter().map(|(n, dtype, s, b)| (n.as_str(), TensorView::new(*dtype, s.clone(), b).unwrap()));
        safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
        bits
    }

    fn check(suffix: &str, shape: &[usize], values: &[f32], config: Value, at: impl Fn(usize, usize) -> usize) {
        let folder = tempfile::tempdir().unwrap();
        let bits = write(folder.path(), Some((suffix, shape, values)), config);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let weights = checkpoint.layer(0).unwrap();
        for (row, bits) in bits.chunks(48).enumerate() {
            for (col, bits) in bits.iter().enumerate() {
                let want = f64::from(F8E4M3::from_bits(*bits).to_f32()) * f64::from(values[at(row, col)]);
                assert_eq!(weights.q.heads[row / R].get(row % R, col), want, "{row} {col}");
            }
        }
    }

    #[test]
    fn scalar_row_and_tile_scales() {
        check("scale", &[], &[0.25], json!({}), |_, _| 0);
        check("scale", &[1], &[0.25], json!({}), |_, _| 0);
        let rows: Vec<f32> = (0..64).map(|i| 0.5 + i as f32).collect();
        check("scale", &[64, 1], &rows, json!({}), |row, _| row);
        check("scale", &[64], &rows, json!({}), |row, _| row);
        let tiles: Vec<f32> = (0..6).map(|i| 1.0 + i as f32).collect();
        // 64 x 48 in tiles of 32 x 20: 2 x 3, the last column of tiles is narrow.
        let tiled = |settings: Value| {
            let config = json!({"quantization_config": settings});
            check("scale_inv", &[2, 3], &tiles, config, |row, col| row / 32 * 3 + col / 20);
        };
        tiled(json!({"quant_method": "fp8", "weight_block_size": [32, 20]}));
        for sides in [json!([32, 20]), json!("32x20")] {
            tiled(json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {
                "group_0": {"weights": {"strategy": "block", "block_structure": sides}},
                "group_1": {"weights": {"strategy": "channel", "block_structure": null}}}}));
        }
    }

    /// 192 rows are a tile of 128 and one of 64, and not two of 96.
    #[test]
    fn tiles_without_a_size_in_the_config_are_128_x_128() {
        let settings = json!({"quantization_config": {"quant_method": "fp8"}, "num_attention_heads": 12});
        let case = Case { n_q: 12, ..grouped("llama", "llama", settings) };
        let folder = tempfile::tempdir().unwrap();
        let tensors = draw(&case, 5);
        let name = "model.layers.0.self_attn.q_proj.weight";
        let values: &[f32] = &[1.0, 1e3];
        let bits = write_e4m3(folder.path(), &case, &tensors, (name, &[192, 48]), Some(("scale_inv", &[2, 1], values)));
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let weights = checkpoint.layer(0).unwrap();
        for (row, bits) in bits.chunks(48).enumerate() {
            let want = f64::from(F8E4M3::from_bits(bits[7]).to_f32()) * f64::from(values[row / 128]);
            assert_eq!(weights.q.heads[row / R].get(row % R, 7), want, "{row}");
        }
    }

    /// No shape of scales says which tile it is of, since the last one may be short.
    #[test]
    fn tiles_that_nothing_states_are_refused() {
        let compressed = |groups: Value| {
            json!({"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized",
                "config_groups": groups}})
        };
        for config in [
            json!({}),
            json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": null}}),
            json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}),
            compressed(json!({"group_0": {"weights": {"strategy": "block"}}})),
        ] {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), Some(("scale_inv", &[2, 3], &[1.0; 6])), config.clone());
            let error = Checkpoint::open(folder.path()).unwrap().layer(0).unwrap_err();
            assert!(error.is_unsupported() || error.is_format(), "{config}: {error}");
        }
        let two = |rows: usize| json!({"weights": {"block_structure": [rows, 128]}});
        let case = grouped("llama", "llama", compressed(json!({"a": two(128), "b": two(64)})));
        let file = "m/config.json".as_ref();
        let error = AttentionSpec::from_config_json(case.config.to_string().as_bytes(), file).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("`block_structure`"), "{error}");
    }

    /// A token whose elements are rounded up to E4M3 almost all, on weights that add them up.
    #[test]
    fn bounds_hold_for_inputs_rounded_to_e4m3() {
        let mut found = vec![];
        for fp8 in [false, true] {
            let quantised = json!({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}});
            let case = grouped("llama", "llama", if fp8 { quantised } else { json!({}) });
            let mut tensors = draw(&case, 5);
            for (name, value) in [("input_layernorm.weight", 1.0), ("self_attn.v_proj.weight", 0.25)] {
                tensors.0.get_mut(&format!("model.layers.0.{name}")).unwrap().1.fill(value);
            }
            let folder = tempfile::tempdir().unwrap();
            write_checkpoint(folder.path(), &case.config, &tensors, Dtype::F32, 1);
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            assert_eq!(checkpoint.spec().fp8_inputs, fp8);
            let weights = checkpoint.layer(0).unwrap();
            found.push(bounds_of(checkpoint.spec(), weights, &Tail::default()).unwrap());
        }
        let d = 48;
        let token: Vec<f64> = (0..d).map(|i| if i == 0 { 448.0 } else { 272.1 }).collect();
        let length = dot(&token, &token).sqrt();
        let rounded: f64 = token.iter().map(|x| f64::from(F8E4M3::from_f64(*x).to_f32())).sum();
        let value = 0.25 * rounded * (d as f64).sqrt() / length;
        let [plain, counted] = [0, 1].map(|i| found[i].v.as_ref().unwrap()[0].rounded);
        assert!(plain < value && value < counted, "{plain} {value} {counted}");
        for (one, other) in found[0].heads.iter().zip(&found[1].heads) {
            assert!(one.exact == other.exact && one.rounded < other.rounded);
        }
    }

    #[test]
    fn weights_in_e4m3_tell_without_the_config() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), Some(("scale", &[], &[0.25])), json!({}));
        assert!(Checkpoint::open(folder.path()).unwrap().spec().fp8_inputs);
    }

    /// Writes further scalars in F32 beside the projection in E4M3.
    fn with_scalars(folder: &std::path::Path, family: &'static str, scalars: &[(&str, f32)]) {
        let case = grouped(family, family, json!({}));
        let mut tensors = draw(&case, 5);
        tensors.0.get_mut("model.layers.0.input_layernorm.weight").unwrap().1.fill(1.0);
        for (suffix, value) in scalars {
            tensors.0.insert(format!("model.layers.0.self_attn.q_proj.{suffix}"), (vec![], vec![f64::from(*value)]));
        }
        let name = "model.layers.0.self_attn.q_proj.weight";
        write_e4m3(folder, &case, &tensors, (name, &[64, 48]), Some(("scale", &[], &[0.25])));
    }

    fn layer_with(scalars: &[(&str, f32)]) -> sigmascale::Result<()> {
        let folder = tempfile::tempdir().unwrap();
        with_scalars(folder.path(), "llama", scalars);
        Checkpoint::open(folder.path()).unwrap().layer(0).map(drop)
    }

    /// No element of 48 with gain 1 is above sqrt(48), so no scale above sqrt(48) / 448 is needed.
    #[test]
    fn a_static_input_scale_above_what_the_norm_can_need_is_refused() {
        let most = 48f32.sqrt() / 448.0;
        for scale in [most * 0.999, most / 8.0] {
            layer_with(&[("input_scale", scale)]).unwrap();
        }
        for scale in [most * 1.001, 1000.0, 0.0, f32::NAN] {
            let error = layer_with(&[("input_scale", scale)]).unwrap_err();
            assert!(error.is_unsupported() && error.to_string().contains("q_proj.input_scale"), "{error}");
        }
    }

    #[test]
    fn two_scales_that_differ_are_refused() {
        layer_with(&[("weight_scale_inv", 0.25)]).unwrap();
        let error = layer_with(&[("weight_scale_inv", 100.0)]).unwrap_err().to_string();
        assert!(error.contains("q_proj.weight_scale`") && error.contains("q_proj.weight_scale_inv`"), "{error}");
    }

    #[test]
    fn a_missing_or_unclear_scale_is_refused() {
        let says = |scale: Option<(&str, &[usize], &[f32])>, part: &str| {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), scale, json!({}));
            let error = Checkpoint::open(folder.path()).unwrap().layer(0).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("model.safetensors"), "{error}");
        };
        says(None, "`weight_scale`");
        says(Some(("scale", &[3], &[1.0; 3])), "[3]");
        says(Some(("scale_inv", &[5, 1], &[1.0; 5])), "`weight_block_size`");
        says(Some(("scale", &[1], &[f32::NAN])), "weight_scale");
        says(Some(("scale", &[1], &[-0.5])), "weight_scale");
    }
}
