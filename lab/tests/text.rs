//! Text through a model's own forward, against a plain f64 forward written from the architectures' definitions.

#[path = "../../tests/common/mod.rs"]
mod common;

use common::fixtures::{Draw, Tensors, write_checkpoint};
use nalgebra::{DMatrix, RowDVector};
use safetensors::Dtype;
use serde_json::{Value, json};
use sigmascale::attention::{AttentionCall, AttentionShape, Mask, reference};
use sigmascale::model::Checkpoint;
use sigmascale::policy::PolicyKind;
use sigmascale_lab::forward::{Projected, Stream, project};
use sigmascale_lab::stress::{Mode, Scenario, StressModel, StressOptions, TokenFile, run};
use std::ops::Range;

const TOKENS: usize = 11;
const D: usize = 32;
const HEADS: usize = 2;
const HEAD: usize = 16;
const INNER: usize = 40;
const LAYERS: usize = 3;
const IDS: [u32; TOKENS] = [3, 250, 17, 17, 0, 99, 128, 255, 64, 3, 3];

/// A token per row.
type Rows = DMatrix<f64>;

struct Plain<'t> {
    tensors: &'t Tensors,
}

impl Plain<'_> {
    fn matrix(&self, name: &str) -> Rows {
        let (shape, values) = &self.tensors.0[name];
        DMatrix::from_row_slice(shape[0], shape[1], values)
    }

    fn add_bias(&self, rows: Rows, name: &str) -> Rows {
        let Some(bias) = self.tensors.find(name) else { return rows };
        let bias = RowDVector::from_row_slice(bias);
        DMatrix::from_rows(&rows.row_iter().map(|row| row + &bias).collect::<Vec<_>>())
    }

    /// `x W^T + b` with `W` stored out x in.
    fn linear(&self, x: &Rows, name: &str) -> Rows {
        self.add_bias(x * self.matrix(&format!("{name}.weight")).transpose(), &format!("{name}.bias"))
    }

    /// `x W + b` with `W` stored in x out.
    fn conv1d(&self, x: &Rows, name: &str) -> Rows {
        self.add_bias(x * self.matrix(&format!("{name}.weight")), &format!("{name}.bias"))
    }

    fn norm(&self, x: &Rows, name: &str, centred: bool, epsilon: f64) -> Rows {
        let gain = self.tensors.get(&format!("{name}.weight"));
        let shift = self.tensors.find(&format!("{name}.bias"));
        let mut out = x.clone();
        for mut row in out.row_iter_mut() {
            let n = row.len() as f64;
            let mean = if centred { row.sum() / n } else { 0.0 };
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
            for (i, x) in row.iter_mut().enumerate() {
                *x = (*x - mean) / (variance + epsilon).sqrt() * gain[i] + shift.map_or(0.0, |shift| shift[i]);
            }
        }
        out
    }

    fn embedded(&self, table: &str) -> Rows {
        let table = self.matrix(table);
        DMatrix::from_rows(&IDS.map(|id| table.row(id as usize).into_owned()))
    }
}

/// Softmax attention of a row to the keys that it has seen; `kv` heads, a token's values head after head.
fn attend(q: &Rows, k: &Rows, v: &Rows, kv: usize, seen: impl Fn(usize) -> Range<usize>) -> Rows {
    let mut out = DMatrix::zeros(q.nrows(), q.ncols());
    for head in 0..HEADS {
        let from = head * kv / HEADS * HEAD;
        let (q, k, v) = (q.columns(head * HEAD, HEAD), k.columns(from, HEAD), v.columns(from, HEAD));
        let logits = q * k.transpose() / (HEAD as f64).sqrt();
        for row in 0..q.nrows() {
            let weights: Vec<f64> = seen(row).map(|key| logits[(row, key)].exp()).collect();
            let total: f64 = weights.iter().sum();
            for (key, weight) in seen(row).zip(&weights) {
                for c in 0..HEAD {
                    out[(row, head * HEAD + c)] += weight / total * v[(key, c)];
                }
            }
        }
    }
    out
}

fn rotated(x: &Rows, heads: usize) -> Rows {
    let mut out = x.clone();
    for (position, mut row) in out.row_iter_mut().enumerate() {
        for (head, pair) in (0..heads).flat_map(|head| (0..HEAD / 2).map(move |pair| (head, pair))) {
            let angle = position as f64 * 100f64.powf(-2.0 * pair as f64 / HEAD as f64);
            let (a, b) = (head * HEAD + pair, head * HEAD + pair + HEAD / 2);
            let (x, y) = (row[a], row[b]);
            row[a] = x * angle.cos() - y * angle.sin();
            row[b] = y * angle.cos() + x * angle.sin();
        }
    }
    out
}

/// q, k and v of every layer.
type Operands = Vec<[Rows; 3]>;

fn llama(plain: &Plain) -> Operands {
    windowed_llama(plain, TOKENS)
}

fn windowed_llama(plain: &Plain, window: usize) -> Operands {
    let mut h = plain.embedded("model.embed_tokens.weight");
    let mut seen = Vec::new();
    for i in 0..LAYERS {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        let x = plain.norm(&h, &at("input_layernorm"), false, 1e-2);
        let [q, k, v] = ["q", "k", "v"].map(|p| plain.linear(&x, &at(&format!("self_attn.{p}_proj"))));
        let (q, k) = (rotated(&q, HEADS), rotated(&k, 1));
        h += plain
            .linear(&attend(&q, &k, &v, 1, |row| (row + 1).saturating_sub(window)..row + 1), &at("self_attn.o_proj"));
        let y = plain.norm(&h, &at("post_attention_layernorm"), false, 1e-2);
        let gate = plain.linear(&y, &at("mlp.gate_proj")).map(|x| x / (1.0 + (-x).exp()));
        h += plain.linear(&gate.component_mul(&plain.linear(&y, &at("mlp.up_proj"))), &at("mlp.down_proj"));
        seen.push([q, k, v]);
    }
    seen
}

fn qwen3_moe(plain: &Plain) -> Operands {
    let mut h = plain.embedded("model.embed_tokens.weight");
    let mut seen = Vec::new();
    for i in 0..LAYERS {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        let x = plain.norm(&h, &at("input_layernorm"), false, 1e-2);
        let [q, k, v] = ["q", "k", "v"].map(|p| plain.linear(&x, &at(&format!("self_attn.{p}_proj"))));
        let normed = |x: &Rows, name: &str| {
            let mut out = x.clone();
            for at in (0..x.ncols()).step_by(HEAD) {
                let head = plain.norm(&x.columns(at, HEAD).into_owned(), name, false, 1e-2);
                out.columns_mut(at, HEAD).copy_from(&head);
            }
            out
        };
        let (q, k) = (normed(&q, &at("self_attn.q_norm")), normed(&k, &at("self_attn.k_norm")));
        let (q, k) = (rotated(&q, HEADS), rotated(&k, 1));
        h += plain.linear(&attend(&q, &k, &v, 1, |row| 0..row + 1), &at("self_attn.o_proj"));
        let y = plain.norm(&h, &at("post_attention_layernorm"), false, 1e-2);
        let mlp = |place: &str| {
            let gate = plain.linear(&y, &at(&format!("{place}gate_proj"))).map(|x| x / (1.0 + (-x).exp()));
            plain.linear(
                &gate.component_mul(&plain.linear(&y, &at(&format!("{place}up_proj")))),
                &at(&format!("{place}down_proj")),
            )
        };
        if i == 1 {
            h += mlp("mlp.");
        } else {
            // The two most probable of four, with weights of sum 1.
            let logits = plain.linear(&y, &at("mlp.gate")).map(f64::exp);
            for expert in 0..4 {
                let out = mlp(&format!("mlp.experts.{expert}."));
                for (row, from) in out.row_iter().enumerate() {
                    let own = logits[(row, expert)];
                    let mut all: Vec<f64> = logits.row(row).iter().copied().collect();
                    all.sort_by(|a, b| b.total_cmp(a));
                    if own >= all[1] {
                        let mut to = h.row_mut(row);
                        to += from * (own / (all[0] + all[1]));
                    }
                }
            }
        }
        seen.push([q, k, v]);
    }
    seen
}

fn gpt2(plain: &Plain) -> Operands {
    let mut h = plain.embedded("transformer.wte.weight") + plain.matrix("transformer.wpe.weight").rows(0, TOKENS);
    let mut seen = Vec::new();
    for i in 0..LAYERS {
        let at = |name: &str| format!("transformer.h.{i}.{name}");
        let qkv = plain.conv1d(&plain.norm(&h, &at("ln_1"), true, 1e-2), &at("attn.c_attn"));
        let [q, k, v] = [0, D, 2 * D].map(|from| qkv.columns(from, D).into_owned());
        h += plain.conv1d(&attend(&q, &k, &v, HEADS, |row| 0..row + 1), &at("attn.c_proj"));
        let inner = plain.conv1d(&plain.norm(&h, &at("ln_2"), true, 1e-2), &at("mlp.c_fc"));
        let root = (2.0 / std::f64::consts::PI).sqrt();
        h += plain
            .conv1d(&inner.map(|x| 0.5 * x * (1.0 + (root * (x + 0.044715 * x.powi(3))).tanh())), &at("mlp.c_proj"));
        seen.push([q, k, v]);
    }
    seen
}

fn bert(plain: &Plain) -> Operands {
    let at = |name: &str| format!("bert.embeddings.{name}");
    let mut h = plain.embedded(&at("word_embeddings.weight"))
        + plain.matrix(&at("position_embeddings.weight")).rows(0, TOKENS)
        + DMatrix::from_rows(&vec![plain.matrix(&at("token_type_embeddings.weight")).row(0).into_owned(); TOKENS]);
    h = plain.norm(&h, &at("LayerNorm"), true, 1e-2);
    let mut seen = Vec::new();
    for i in 0..LAYERS {
        let at = |name: &str| format!("bert.encoder.layer.{i}.{name}");
        let [q, k, v] = ["query", "key", "value"].map(|p| plain.linear(&h, &at(&format!("attention.self.{p}"))));
        let out = plain.linear(&attend(&q, &k, &v, HEADS, |_| 0..TOKENS), &at("attention.output.dense"));
        h = plain.norm(&(&h + out), &at("attention.output.LayerNorm"), true, 1e-2);
        let inner = plain.linear(&h, &at("intermediate.dense"));
        // The error function by its series, which converges well for |x| below 6.
        let erf = |x: f64| {
            let (mut term, mut sum) = (x, x);
            for n in 1..200 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            sum * 2.0 / std::f64::consts::PI.sqrt()
        };
        let gelu = inner.map(|x| 0.5 * x * (1.0 + erf(x / 2f64.sqrt())));
        h = plain.norm(&(&h + plain.linear(&gelu, &at("output.dense"))), &at("output.LayerNorm"), true, 1e-2);
        seen.push([q, k, v]);
    }
    seen
}

/// One family's checkpoint and its plain forward.
fn family(name: &str) -> (Value, Tensors, fn(&Plain) -> Operands) {
    let mut draw = Draw::new(5);
    let norm = |draw: &mut Draw, name: String, shift: bool| {
        draw.add(format!("{name}.weight"), &[D], 1.0, 0.3);
        if shift {
            draw.add(format!("{name}.bias"), &[D], 0.0, 0.3);
        }
    };
    match name {
        "llama" => {
            draw.add("model.embed_tokens.weight", &[256, D], 0.0, 0.2);
            for i in 0..LAYERS {
                let at = |name: &str| format!("model.layers.{i}.{name}");
                for (part, out) in [("q", D), ("k", HEAD), ("v", HEAD), ("o", D)] {
                    draw.linear(&at(&format!("self_attn.{part}_proj")), out, D, None);
                }
                for (part, out, width) in [("gate", INNER, D), ("up", INNER, D), ("down", D, INNER)] {
                    draw.linear(&at(&format!("mlp.{part}_proj")), out, width, (part == "up").then_some(out));
                }
                norm(&mut draw, at("input_layernorm"), false);
                norm(&mut draw, at("post_attention_layernorm"), false);
            }
            let config = json!({"model_type": "llama", "hidden_size": D, "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS, "num_key_value_heads": 1, "rope_theta": 100.0, "rms_norm_eps": 1e-2,
                "hidden_act": "silu", "max_position_embeddings": TOKENS});
            (config, draw.tensors, llama)
        }
        // The layer in the middle has one MLP.
        "qwen3_moe" => {
            draw.add("model.embed_tokens.weight", &[256, D], 0.0, 0.2);
            for i in 0..LAYERS {
                let at = |name: &str| format!("model.layers.{i}.{name}");
                for (part, out) in [("q", D), ("k", HEAD), ("v", HEAD), ("o", D)] {
                    draw.linear(&at(&format!("self_attn.{part}_proj")), out, D, None);
                }
                for part in ["q", "k"] {
                    draw.add(at(&format!("self_attn.{part}_norm.weight")), &[HEAD], 1.0, 0.3);
                }
                let places: Vec<String> = match i {
                    1 => vec!["mlp".to_owned()],
                    _ => (0..4).map(|expert| format!("mlp.experts.{expert}")).collect(),
                };
                for place in places {
                    for (part, out, width) in [("gate", INNER, D), ("up", INNER, D), ("down", D, INNER)] {
                        draw.linear(&at(&format!("{place}.{part}_proj")), out, width, None);
                    }
                }
                if i != 1 {
                    draw.linear(&at("mlp.gate"), 4, D, None);
                }
                norm(&mut draw, at("input_layernorm"), false);
                norm(&mut draw, at("post_attention_layernorm"), false);
            }
            let config = json!({"model_type": "qwen3_moe", "hidden_size": D, "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD, "rope_theta": 100.0,
                "rms_norm_eps": 1e-2, "hidden_act": "silu", "max_position_embeddings": TOKENS, "num_experts_per_tok": 2,
                "norm_topk_prob": true});
            (config, draw.tensors, qwen3_moe)
        }
        "gpt2" => {
            draw.add("transformer.wte.weight", &[256, D], 0.0, 0.2);
            draw.add("transformer.wpe.weight", &[TOKENS, D], 0.0, 0.2);
            for i in 0..LAYERS {
                let at = |name: &str| format!("transformer.h.{i}.{name}");
                for (part, width, out) in
                    [("attn.c_attn", D, 3 * D), ("attn.c_proj", D, D), ("mlp.c_fc", D, INNER), ("mlp.c_proj", INNER, D)]
                {
                    draw.linear(&at(part), width, out, Some(out));
                }
                norm(&mut draw, at("ln_1"), true);
                norm(&mut draw, at("ln_2"), true);
            }
            let config = json!({"model_type": "gpt2", "n_embd": D, "n_layer": LAYERS, "n_head": HEADS,
                "n_positions": 1024, "layer_norm_epsilon": 1e-2, "activation_function": "gelu_new"});
            (config, draw.tensors, gpt2)
        }
        _ => {
            let at = |name: &str| format!("bert.embeddings.{name}");
            draw.add(at("word_embeddings.weight"), &[256, D], 0.0, 0.2);
            draw.add(at("position_embeddings.weight"), &[TOKENS + 2, D], 0.0, 0.2);
            draw.add(at("token_type_embeddings.weight"), &[2, D], 0.0, 0.2);
            norm(&mut draw, at("LayerNorm"), true);
            for i in 0..LAYERS {
                let at = |name: &str| format!("bert.encoder.layer.{i}.{name}");
                for (part, out, width) in [
                    ("attention.self.query", D, D),
                    ("attention.self.key", D, D),
                    ("attention.self.value", D, D),
                    ("attention.output.dense", D, D),
                    ("intermediate.dense", INNER, D),
                    ("output.dense", D, INNER),
                ] {
                    draw.linear(&at(part), out, width, Some(out));
                }
                norm(&mut draw, at("attention.output.LayerNorm"), true);
                norm(&mut draw, at("output.LayerNorm"), true);
            }
            let config = json!({"model_type": "bert", "hidden_size": D, "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS, "layer_norm_eps": 1e-2, "hidden_act": "gelu"});
            (config, draw.tensors, bert)
        }
    }
}

fn far(a: &[f32], b: &Rows) -> f64 {
    // Columns of the transpose are tokens.
    let b = b.transpose();
    assert_eq!(a.len(), b.len());
    let size = b.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    a.iter().zip(b.iter()).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max) / size
}

#[test]
fn every_layer_reads_what_the_layers_below_it_made() {
    for name in ["llama", "qwen3_moe", "gpt2", "bert"] {
        let folder = tempfile::tempdir().unwrap();
        let (config, tensors, plain) = family(name);
        write_checkpoint(folder.path(), &config, &tensors, Dtype::BF16, 2);
        let want = plain(&Plain { tensors: &tensors });
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let (spec, body) = (checkpoint.spec(), checkpoint.body().unwrap());
        let mut stream = Stream::embed(spec, &body, &IDS).unwrap();
        for (layer, want) in want.iter().enumerate() {
            let weights = checkpoint.layer(layer).unwrap();
            let have = project(spec, &weights, &stream.input(spec, &body)).unwrap();
            let Projected { q, k, v } = &have;
            for ((values, want), operand) in [q, k, v].into_iter().zip(want).zip(["q", "k", "v"]) {
                let error = far(values, want);
                assert!(error < 2e-5, "{name} layer {layer} {operand}: {error}");
            }
            let shape = AttentionShape {
                batch: 1,
                n_q_heads: spec.layers[layer].n_q_heads,
                n_kv_heads: spec.layers[layer].n_kv_heads,
                len_q: TOKENS,
                len_k: TOKENS,
                d_head: HEAD,
                d_v: HEAD,
            };
            let mask = if name == "bert" { Mask::NONE } else { Mask::CAUSAL };
            let call = AttentionCall { mask, ..AttentionCall::causal(shape) };
            let [q, k, v] = [q, k, v].map(|x| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
            let out = reference(&call, &q, &k, &v).unwrap().out;
            let out: Vec<f32> = out.iter().map(|x| *x as f32).collect();
            stream.advance(spec, &body, &weights, &body.block(layer).unwrap(), &out).unwrap();
        }
    }
}

/// The lab's own forward applies a model's window: the largest logit of each layer is that of a plain forward with it.
#[test]
fn text_goes_through_the_models_window() {
    let folder = tempfile::tempdir().unwrap();
    let (mut config, tensors, _) = family("llama");
    config["model_type"] = json!("mistral");
    let tokens = folder.path().join("ids.json");
    std::fs::write(&tokens, serde_json::to_vec(&IDS).unwrap()).unwrap();
    let mut largest = Vec::new();
    for window in [3, TOKENS] {
        config["sliding_window"] = json!(window);
        write_checkpoint(folder.path(), &config, &tensors, Dtype::BF16, 1);
        let options = StressOptions {
            // The other mode's logits are those of operands in E4M3.
            mode: Mode::Logit,
            policies: vec![PolicyKind::Current.into()],
            seq_len: TOKENS,
            tokens: Some(TokenFile::read(&tokens).unwrap()),
            ..StressOptions::default()
        };
        let model = StressModel::open(folder.path()).unwrap();
        let result = run(Scenario::CheckpointLoad, &model, &options).unwrap();
        for (row, [q, k, _]) in result.trace.iter().zip(windowed_llama(&Plain { tensors: &tensors }, window)) {
            let logit = |head: usize, row: usize, key: usize| {
                let q = q.row(row).columns(head * HEAD, HEAD).into_owned();
                q.dot(&k.row(key).into_owned()).abs() / (HEAD as f64).sqrt()
            };
            let seen = (0..TOKENS).flat_map(|row| ((row + 1).saturating_sub(window)..=row).map(move |key| (row, key)));
            let want = seen.flat_map(|(row, key)| [logit(0, row, key), logit(1, row, key)]).fold(0.0, f64::max);
            assert!((row.max_logit - want).abs() < 1e-4 * want, "layer {}: {} {want}", row.layer, row.max_logit);
        }
        largest.push(result.trace[LAYERS - 1].max_logit);
    }
    assert!((largest[0] - largest[1]).abs() > 1e-2, "the window changes what the last layer reads: {largest:?}");
}

/// Sinks are read from the checkpoint and take their share of the weight.
#[test]
fn a_checkpoints_sinks_are_in_its_attention() {
    let run = |sink: f64| {
        let folder = tempfile::tempdir().unwrap();
        let (mut config, mut tensors, _) = family("llama");
        (config["model_type"], config["head_dim"]) = (json!("gpt_oss"), json!(HEAD));
        // gpt_oss scales its rotation where the config says nothing.
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10_000.0});
        for layer in 0..LAYERS {
            let name = format!("model.layers.{layer}.self_attn.sinks");
            tensors.0.insert(name, (vec![HEADS], vec![sink; HEADS]));
            for (part, out) in [("q", D), ("k", HEAD), ("v", HEAD)] {
                tensors
                    .0
                    .insert(format!("model.layers.{layer}.self_attn.{part}_proj.bias"), (vec![out], vec![0.0; out]));
            }
        }
        write_checkpoint(folder.path(), &config, &tensors, Dtype::BF16, 1);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(checkpoint.sinks(1).unwrap().unwrap(), [sink; HEADS]);
        let model = StressModel::open(folder.path()).unwrap();
        let options =
            StressOptions { seq_len: 20, policies: vec![PolicyKind::DelayedPaper.into()], ..StressOptions::default() };
        let result = sigmascale_lab::stress::run(Scenario::CheckpointLoad, &model, &options).unwrap();
        result.policies[0].softmax_kl.unwrap()
    };
    // Logits that saturate hurt less where the sink has most of the weight.
    let (without, with) = (run(-100.0), run(20.0));
    assert!(with < 1e-3 * without, "{with} {without}");
}

#[test]
fn sequences_that_a_model_cannot_read_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (config, tensors, _) = family("llama");
    write_checkpoint(folder.path(), &config, &tensors, Dtype::BF16, 1);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let (spec, body) = (checkpoint.spec(), checkpoint.body().unwrap());
    let refused = |ids: &[u32]| {
        let error = Stream::embed(spec, &body, ids).unwrap_err();
        assert!(error.is_argument());
        error.to_string()
    };
    assert!(refused(&[]).contains("token"));
    assert!(refused(&[0, 256]).contains("256"));
    assert!(refused(&[0; TOKENS + 1]).contains("12 tokens"));
    let mut stream = Stream::embed(spec, &body, &IDS).unwrap();
    let weights = checkpoint.layer(0).unwrap();
    let block = body.block(0).unwrap();
    assert!(stream.advance(spec, &body, &weights, &block, &[0.0; D]).unwrap_err().is_mismatch());
    assert!(stream.advance(spec, &body, &weights, &block, &[f32::NAN; D * TOKENS]).unwrap_err().is_non_finite());

    let mut broken = tensors.clone();
    broken.0.get_mut("model.layers.0.mlp.down_proj.weight").unwrap().1[7] = f64::NAN;
    write_checkpoint(folder.path(), &config, &broken, Dtype::BF16, 1);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let (spec, body) = (checkpoint.spec(), checkpoint.body().unwrap());
    let mut stream = Stream::embed(spec, &body, &IDS).unwrap();
    let (weights, block) = (checkpoint.layer(0).unwrap(), body.block(0).unwrap());
    let error = stream.advance(spec, &body, &weights, &block, &[0.5; D * TOKENS]).unwrap_err();
    assert!(error.is_non_finite() && error.to_string().contains("layers.0.mlp.down_proj"), "{error}");

    let mut other = config.clone();
    other["rms_norm_eps"] = json!(-1e-6);
    write_checkpoint(folder.path(), &other, &tensors, Dtype::BF16, 1);
    let error = Checkpoint::open(folder.path()).err().unwrap();
    assert!(error.is_unsupported() && error.to_string().contains("`rms_norm_eps`"), "{error}");
    other["rms_norm_eps"] = json!(1e-6);
    other["hidden_act"] = json!("softplus");
    write_checkpoint(folder.path(), &other, &tensors, Dtype::BF16, 1);
    let error = Checkpoint::open(folder.path()).unwrap().body().err().unwrap();
    assert!(error.is_unsupported() && error.to_string().contains("`softplus`"), "{error}");
    other["hidden_act"] = json!("silu");
    other["model_type"] = json!("granite");
    write_checkpoint(folder.path(), &other, &tensors, Dtype::BF16, 1);
    let error = Checkpoint::open(folder.path()).unwrap().body().err().unwrap();
    assert!(error.is_unsupported() && error.to_string().contains("family `granite`"), "{error}");
}
