//! The two models: parameters under their Hugging Face names, and their graphs.
//!
//! | name | norm | positions | heads | feed-forward |
//! |---|---|---|---|---|
//! | `tiny-llama-train` | RMSNorm before each block | RoPE, half-split | 4 query, 2 KV | SwiGLU |
//! | `tiny-gpt2-train` | LayerNorm before each block | learned | 4, biases | GELU, biases |
//!
//! Parameters are f32 on the host (the master weights of mixed precision training, arXiv:1710.03740, section 3.1); a step builds a graph over a
//! copy of them.

use super::failed;
use super::language::{Batch, VOCABULARY};
use super::optimizer::Moments;
use crate::file::write_atomically;
use candle_core::{D, Device, Tensor, Var};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use safetensors::tensor::TensorView;

use sigmascale::model::{AttentionSpec, Checkpoint, LayerWeights, Projection};
use sigmascale::tensor::{Dtype, MatrixView};
use sigmascale::{Error, Result};
use std::path::Path;

/// Layers of both models.
pub const LAYERS: usize = 3;
/// Model dimension of both.
pub const D_MODEL: usize = 64;
/// Query heads of both.
const HEADS: usize = 4;
/// KV heads of the Llama.
const KV_HEADS: usize = 2;
/// Channels of a head.
const D_HEAD: usize = D_MODEL / HEADS;
/// Hidden channels of the SwiGLU.
const LLAMA_HIDDEN: usize = 128;
/// Hidden channels of the GELU.
const GPT2_HIDDEN: usize = 2 * D_MODEL;
/// Longest sequence.
pub const POSITIONS: usize = 64;
/// Epsilon of both norms.
const EPSILON: f64 = 1e-6;
/// Base of the rotation.
const THETA: f64 = 10_000.0;
/// Standard deviation of the embeddings at the start.
const EMBEDDING: f32 = 0.1;

sigmascale::named! {
    /// Which model.
    pub enum ModelKind is "training model" {
        /// Llama's architecture: RMSNorm, rotation, grouped queries.
        Llama = "tiny-llama-train",
        /// GPT-2's architecture: LayerNorm, learned positions, biases.
        Gpt2 = "tiny-gpt2-train",
    }
}

impl ModelKind {
    /// The Hugging Face config.
    pub fn config(self) -> serde_json::Value {
        match self {
            Self::Llama => serde_json::json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
                "hidden_size": D_MODEL, "intermediate_size": LLAMA_HIDDEN, "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": D_HEAD,
                "attention_bias": false, "mlp_bias": false, "rms_norm_eps": EPSILON, "rope_theta": THETA,
                "max_position_embeddings": POSITIONS, "vocab_size": VOCABULARY, "tie_word_embeddings": false,
                "torch_dtype": "float32",
            }),
            Self::Gpt2 => serde_json::json!({
                "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
                "n_embd": D_MODEL, "n_inner": GPT2_HIDDEN, "n_layer": LAYERS, "n_head": HEADS,
                "n_positions": POSITIONS, "layer_norm_epsilon": EPSILON, "vocab_size": VOCABULARY,
                "tie_word_embeddings": true, "torch_dtype": "float32",
            }),
        }
    }

    /// The attention, as the checkpoint reader would see it.
    ///
    /// # Errors
    /// As [`AttentionSpec::from_config_json`].
    pub fn spec(self) -> Result<AttentionSpec> {
        let mut spec = AttentionSpec::from_config_json(self.config().to_string().as_bytes(), Path::new(self.name()))?;
        self.name().clone_into(&mut spec.name);
        Ok(spec)
    }

    /// Names, shapes and starts of all parameters.
    pub(super) fn layout(self) -> Vec<(String, Vec<usize>, Start)> {
        let mut all = Vec::new();
        let mut add = |name: String, shape: &[usize], start: Start| all.push((name, shape.to_vec(), start));
        // What is added to the residual stream starts smaller, as GPT-2 does.
        let added = |inputs: usize| Start::Normal(1.0 / ((2 * LAYERS * inputs) as f32).sqrt());
        let plain = |inputs: usize| Start::Normal(1.0 / (inputs as f32).sqrt());
        let (d, kv) = (D_MODEL, KV_HEADS * D_HEAD);
        match self {
            Self::Llama => {
                add("model.embed_tokens.weight".into(), &[VOCABULARY, d], Start::Normal(EMBEDDING));
                for layer in 0..LAYERS {
                    let at = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
                    add(at("input_layernorm"), &[d], Start::One);
                    add(at("self_attn.q_proj"), &[d, d], plain(d));
                    add(at("self_attn.k_proj"), &[kv, d], plain(d));
                    add(at("self_attn.v_proj"), &[kv, d], plain(d));
                    add(at("self_attn.o_proj"), &[d, d], added(d));
                    add(at("post_attention_layernorm"), &[d], Start::One);
                    add(at("mlp.gate_proj"), &[LLAMA_HIDDEN, d], plain(d));
                    add(at("mlp.up_proj"), &[LLAMA_HIDDEN, d], plain(d));
                    add(at("mlp.down_proj"), &[d, LLAMA_HIDDEN], added(LLAMA_HIDDEN));
                }
                add("model.norm.weight".into(), &[d], Start::One);
                add("lm_head.weight".into(), &[VOCABULARY, d], plain(d));
            }
            Self::Gpt2 => {
                add("transformer.wte.weight".into(), &[VOCABULARY, d], Start::Normal(EMBEDDING));
                add("transformer.wpe.weight".into(), &[POSITIONS, d], Start::Normal(EMBEDDING));
                for layer in 0..LAYERS {
                    let at = |rest: &str| format!("transformer.h.{layer}.{rest}");
                    for norm in ["ln_1", "ln_2"] {
                        add(at(&format!("{norm}.weight")), &[d], Start::One);
                        add(at(&format!("{norm}.bias")), &[d], Start::Zero);
                    }
                    // Stored `[in, out]`.
                    let maps = [
                        ("attn.c_attn", d, 3 * d, plain(d)),
                        ("attn.c_proj", d, d, added(d)),
                        ("mlp.c_fc", d, GPT2_HIDDEN, plain(d)),
                        ("mlp.c_proj", GPT2_HIDDEN, d, added(GPT2_HIDDEN)),
                    ];
                    for (name, inputs, outputs, start) in maps {
                        add(at(&format!("{name}.weight")), &[inputs, outputs], start);
                        add(at(&format!("{name}.bias")), &[outputs], Start::Zero);
                    }
                }
                add("transformer.ln_f.weight".into(), &[d], Start::One);
                add("transformer.ln_f.bias".into(), &[d], Start::Zero);
            }
        }
        all
    }
}

/// How a parameter starts.
#[derive(Clone, Copy)]
pub(super) enum Start {
    Zero,
    One,
    Normal(f32),
}

/// One parameter and its moments.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Parameter {
    pub name: String,
    pub shape: Vec<usize>,
    pub value: Vec<f32>,
    pub moments: Moments,
}

/// A model's parameters.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Parameters {
    pub kind: ModelKind,
    pub all: Vec<Parameter>,
}

/// `count` heads of a matrix of all, from row `first`.
fn heads<'a>(all: &MatrixView<'a>, first: usize, count: usize) -> Vec<MatrixView<'a>> {
    (0..count).map(|head| all.slice_rows(first + head * D_HEAD, D_HEAD)).collect()
}

/// What attention does with q, k and v (`(batch, len, heads, d_head)`) of a layer.
pub(super) type Attend<'a> = dyn FnMut(usize, &Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor> + 'a;

impl Parameters {
    /// Random parameters.
    pub(super) fn new(kind: ModelKind, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut draw = |std: f32| -> f32 {
            let x: f32 = StandardNormal.sample(&mut rng);
            std * x
        };
        let all = kind
            .layout()
            .into_iter()
            .map(|(name, shape, start)| {
                let len = shape.iter().product();
                let value = match start {
                    Start::Zero => vec![0.0; len],
                    Start::One => vec![1.0; len],
                    Start::Normal(std) => (0..len).map(|_| draw(std)).collect(),
                };
                Parameter { name, shape, value, moments: Moments::zeros(len) }
            })
            .collect();
        Self { kind, all }
    }

    /// Biases of q and k drawn with the deviation `std`: nothing for a model without.
    pub(super) fn draw_biases(&mut self, std: f32, seed: u64) {
        let mut rng = StdRng::seed_from_u64(seed);
        for parameter in self.all.iter_mut().filter(|parameter| parameter.name.ends_with("attn.c_attn.bias")) {
            for bias in &mut parameter.value[..2 * D_MODEL] {
                let x: f32 = StandardNormal.sample(&mut rng);
                *bias = std * x;
            }
        }
    }

    /// Number of values.
    pub(super) fn count(&self) -> usize {
        self.all.iter().map(|parameter| parameter.value.len()).sum()
    }

    fn get(&self, name: &str) -> Result<&Parameter> {
        let found = self.all.iter().find(|parameter| parameter.name == name);
        found.ok_or_else(|| Error::mismatch(format_args!("{} has no parameter {name}", self.kind.name())))
    }

    /// The attention weights of a layer.
    pub(super) fn layer(&self, layer: usize) -> Result<LayerWeights<'_>> {
        let wide = |parameter: &Parameter| parameter.value.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        match self.kind {
            ModelKind::Llama => {
                let at = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
                let projection = |rest: &str, count: usize| -> Result<Projection<'_>> {
                    let name = at(rest);
                    let weight = &self.get(&name)?.value;
                    let all = MatrixView::from_f32(weight, count * D_HEAD, D_MODEL)?;
                    Ok(Projection { heads: heads(&all, 0, count), bias: None, name })
                };
                Ok(LayerWeights {
                    layer,
                    q: projection("self_attn.q_proj", HEADS)?,
                    k: projection("self_attn.k_proj", KV_HEADS)?,
                    v: projection("self_attn.v_proj", KV_HEADS)?,
                    norm_gain: Some(wide(self.get(&at("input_layernorm"))?)),
                    norm_shift: None,
                    q_norm: None,
                    k_norm: None,
                    mla: None,
                })
            }
            ModelKind::Gpt2 => {
                let at = |rest: &str| format!("transformer.h.{layer}.{rest}");
                let name = at("attn.c_attn.weight");
                let all = MatrixView::from_f32(&self.get(&name)?.value, D_MODEL, 3 * D_MODEL)?.transpose();
                let bias = wide(self.get(&at("attn.c_attn.bias"))?);
                let projection = |which: usize| Projection {
                    heads: heads(&all, which * D_MODEL, HEADS),
                    bias: Some(bias[which * D_MODEL..][..D_MODEL].to_vec()),
                    name: name.clone(),
                };
                Ok(LayerWeights {
                    layer,
                    q: projection(0),
                    k: projection(1),
                    v: projection(2),
                    norm_gain: Some(wide(self.get(&at("ln_1.weight"))?)),
                    norm_shift: Some(wide(self.get(&at("ln_1.bias"))?)),
                    q_norm: None,
                    k_norm: None,
                    mla: None,
                })
            }
        }
    }

    /// Every parameter as a variable of a new graph, in order.
    pub(super) fn variables(&self) -> Result<Vec<Var>> {
        let var = |one: &Parameter| Var::from_slice(&one.value, one.shape.as_slice(), &Device::Cpu);
        self.all.iter().map(var).collect::<candle_core::Result<_>>().map_err(failed)
    }

    /// Mean cross entropy of the next token, in nats.
    pub(super) fn loss(&self, variables: &[Var], text: &Batch, attend: &mut Attend<'_>) -> candle_core::Result<Tensor> {
        let graph = Graph { parameters: self, variables, batch: text.batch, len: text.len };
        let logits = match self.kind {
            ModelKind::Llama => graph.llama(text, attend)?,
            ModelKind::Gpt2 => graph.gpt2(text, attend)?,
        };
        let targets = Tensor::from_slice(&text.targets, text.targets.len(), &Device::Cpu)?;
        candle_nn::loss::cross_entropy(&logits, &targets)
    }

    /// Writes the weights, and nothing else, as a checkpoint folder that every reader of this crate opens.
    pub(super) fn save(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(|error| Error::io(folder, "create the folder", error))?;
        let (config, weights) = self.encode()?;
        write_atomically(&folder.join("config.json"), config.as_bytes())?;
        write_atomically(&folder.join("model.safetensors"), &weights)
    }

    /// The config and the bytes of a safetensors file.
    pub(super) fn encode(&self) -> Result<(String, Vec<u8>)> {
        let config = format!("{:#}\n", self.kind.config());
        let broken = |error: safetensors::SafeTensorError| Error::format(Path::new(self.kind.name()), error);
        let mut views = Vec::new();
        for parameter in &self.all {
            let bytes = bytemuck::cast_slice(&parameter.value);
            let view = TensorView::new(safetensors::Dtype::F32, parameter.shape.clone(), bytes).map_err(broken)?;
            views.push((parameter.name.as_str(), view));
        }
        Ok((config, safetensors::serialize(views, None).map_err(broken)?))
    }

    /// Weights from a folder that [`Parameters::save`] wrote; the moments are zero.
    pub(super) fn load(kind: ModelKind, folder: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::open(folder)?;
        let mut all = Vec::new();
        for (name, shape, _) in kind.layout() {
            let stored = checkpoint.tensor(&name)?;
            if stored.shape != shape || stored.view.dtype() != Dtype::F32 {
                return Err(Error::mismatch(format_args!("{}: `{name}` is not {shape:?} in F32", folder.display())));
            }
            let (rows, cols) = stored.view.shape();
            let len = rows * cols;
            let mut wide = vec![0.0; len];
            stored.view.read_block(0..rows, 0..cols, &mut wide);
            let value = wide.into_iter().map(|x| x as f32).collect();
            all.push(Parameter { name, shape, value, moments: Moments::zeros(len) });
        }
        Ok(Self { kind, all })
    }
}

/// One forward pass.
struct Graph<'a> {
    parameters: &'a Parameters,
    variables: &'a [Var],
    batch: usize,
    len: usize,
}

impl Graph<'_> {
    fn get(&self, name: &str) -> candle_core::Result<&Tensor> {
        let at = self.parameters.all.iter().position(|parameter| parameter.name == name);
        let found = at.and_then(|at| self.variables.get(at)).map(Var::as_tensor);
        found.ok_or_else(|| candle_core::Error::msg(format!("there is no parameter {name}")))
    }

    /// Rows of an embedding for tokens, `(tokens, d)`.
    fn embed(&self, name: &str, tokens: &[u32]) -> candle_core::Result<Tensor> {
        let tokens = Tensor::from_slice(tokens, tokens.len(), &Device::Cpu)?;
        self.get(name)?.index_select(&tokens, 0)
    }

    /// `x W^T` with `W` stored `[out, in]`.
    fn linear(&self, name: &str, x: &Tensor) -> candle_core::Result<Tensor> {
        x.matmul(&self.get(name)?.t()?)
    }

    /// `x W + b` with `W` stored `[in, out]`.
    fn conv1d(&self, name: &str, x: &Tensor) -> candle_core::Result<Tensor> {
        let product = x.matmul(self.get(&format!("{name}.weight"))?)?;
        product.broadcast_add(self.get(&format!("{name}.bias"))?)
    }

    fn rms_norm(&self, name: &str, x: &Tensor) -> candle_core::Result<Tensor> {
        let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + EPSILON)?.sqrt()?;
        x.broadcast_div(&scale)?.broadcast_mul(self.get(name)?)
    }

    fn layer_norm(&self, name: &str, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + EPSILON)?.sqrt()?;
        let scaled = x.broadcast_div(&scale)?.broadcast_mul(self.get(&format!("{name}.weight"))?)?;
        scaled.broadcast_add(self.get(&format!("{name}.bias"))?)
    }

    /// `(tokens, heads d_head)` as `(batch, len, heads, d_head)`.
    fn heads(&self, x: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
        x.reshape((self.batch, self.len, heads, D_HEAD))
    }

    fn joined(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x.reshape((self.batch * self.len, D_MODEL))
    }

    /// Rotates channel b with channel b + d_head / 2 by the token's position.
    fn rotate(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let half = D_HEAD / 2;
        let angle = |i: usize| (i / half) as f64 * THETA.powf(-((i % half) as f64) / half as f64);
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = (0..self.len * half).map(|i| f(angle(i)) as f32).collect();
            Tensor::from_vec(values, (1, self.len, 1, half), &Device::Cpu)
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        let (a, b) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
        Tensor::cat(&[first, second], 3)
    }

    fn llama(&self, text: &Batch, attend: &mut Attend<'_>) -> candle_core::Result<Tensor> {
        let mut x = self.embed("model.embed_tokens.weight", &text.inputs)?;
        for layer in 0..LAYERS {
            let at = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
            let y = self.rms_norm(&at("input_layernorm"), &x)?;
            let q = self.rotate(&self.heads(&self.linear(&at("self_attn.q_proj"), &y)?, HEADS)?)?;
            let k = self.rotate(&self.heads(&self.linear(&at("self_attn.k_proj"), &y)?, KV_HEADS)?)?;
            let v = self.heads(&self.linear(&at("self_attn.v_proj"), &y)?, KV_HEADS)?;
            let out = self.joined(&attend(layer, &q, &k, &v)?)?;
            x = (x + self.linear(&at("self_attn.o_proj"), &out)?)?;
            let y = self.rms_norm(&at("post_attention_layernorm"), &x)?;
            let gate = self.linear(&at("mlp.gate_proj"), &y)?.silu()?;
            let hidden = (gate * self.linear(&at("mlp.up_proj"), &y)?)?;
            x = (x + self.linear(&at("mlp.down_proj"), &hidden)?)?;
        }
        self.linear("lm_head.weight", &self.rms_norm("model.norm.weight", &x)?)
    }

    fn gpt2(&self, text: &Batch, attend: &mut Attend<'_>) -> candle_core::Result<Tensor> {
        let positions: Vec<u32> = (0..text.inputs.len()).map(|i| (i % text.len) as u32).collect();
        let tokens = self.embed("transformer.wte.weight", &text.inputs)?;
        let mut x = (tokens + self.embed("transformer.wpe.weight", &positions)?)?;
        for layer in 0..LAYERS {
            let at = |rest: &str| format!("transformer.h.{layer}.{rest}");
            let y = self.layer_norm(&at("ln_1"), &x)?;
            let all = self.conv1d(&at("attn.c_attn"), &y)?;
            let part = |which: usize| self.heads(&all.narrow(1, which * D_MODEL, D_MODEL)?.contiguous()?, HEADS);
            let out = self.joined(&attend(layer, &part(0)?, &part(1)?, &part(2)?)?)?;
            x = (x + self.conv1d(&at("attn.c_proj"), &out)?)?;
            let y = self.layer_norm(&at("ln_2"), &x)?;
            let hidden = self.conv1d(&at("mlp.c_fc"), &y)?.gelu()?;
            x = (x + self.conv1d(&at("mlp.c_proj"), &hidden)?)?;
        }
        self.linear("transformer.wte.weight", &self.layer_norm("transformer.ln_f", &x)?)
    }
}
