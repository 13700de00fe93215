//! The parts of a model around its attention: embeddings, output projections, MLPs.
//!
//! Bounds need none of it. The stress lab does, to run text through a model, for the families of this table; the others
//! are refused by name, since a block that is only nearly right gives wrong tokens without a sign.

use super::checkpoint::Checkpoint;
use super::keys::Keys;
use super::layout::at;
use super::spec::GainForm;
use crate::error::{Error, Result};
use crate::tensor::MatrixView;
use std::path::Path;

/// Where the blocks of some families lie; names are templates without `.weight`.
struct Layout {
    families: &'static [&'static str],
    tokens: &'static str,
    /// Learned positions, added to the tokens.
    positions: Option<&'static str>,
    /// Segments; every token is of the first.
    segments: Option<&'static str>,
    order: NormOrder,
    attention_out: &'static str,
    /// The norm of attention's output, in front of the residual sum.
    attention_norm: Option<&'static str>,
    /// The norm between attention and MLP.
    norm: Option<&'static str>,
    /// The norm of the MLP's output, in front of the residual sum.
    mlp_norm: Option<&'static str>,
    /// Form of the gains of these three.
    gain: GainForm,
    /// Embeddings are multiplied by `sqrt(d_model)`.
    scaled: bool,
    gate: Option<&'static str>,
    up: &'static str,
    down: &'static str,
    /// Matrices are stored `[in, out]`.
    conv1d: bool,
    /// Key and default.
    epsilon: (&'static str, f64),
    activation: (&'static str, &'static str),
    /// In layers whose router is stored, in place of the MLP.
    experts: Option<Experts>,
}

/// Mixture of experts: a router sends each token to the top k of them.
struct Experts {
    router: &'static str,
    /// `{e}` stands for the expert.
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    /// How many a token takes where `num_experts_per_tok` is absent.
    chosen: usize,
    /// A key that says whether the weights of those are brought to a sum of 1; none: they are.
    normalized: Option<&'static str>,
}

const LLAMA: Layout = Layout {
    families: &["llama", "mistral", "qwen2", "qwen3"],
    attention_norm: None,
    mlp_norm: None,
    gain: GainForm::Plain,
    scaled: false,
    tokens: "embed_tokens",
    positions: None,
    segments: None,
    order: NormOrder::Before,
    attention_out: "layers.{i}.self_attn.o_proj",
    norm: Some("layers.{i}.post_attention_layernorm"),
    gate: Some("layers.{i}.mlp.gate_proj"),
    up: "layers.{i}.mlp.up_proj",
    down: "layers.{i}.mlp.down_proj",
    conv1d: false,
    epsilon: ("rms_norm_eps", 1e-6),
    activation: ("hidden_act", "silu"),
    experts: None,
};

static LAYOUTS: &[Layout] = &[
    LLAMA,
    Layout {
        families: &["qwen3_moe"],
        experts: Some(Experts {
            router: "layers.{i}.mlp.gate",
            gate: "layers.{i}.mlp.experts.{e}.gate_proj",
            up: "layers.{i}.mlp.experts.{e}.up_proj",
            down: "layers.{i}.mlp.experts.{e}.down_proj",
            chosen: 8,
            normalized: Some("norm_topk_prob"),
        }),
        ..LLAMA
    },
    Layout {
        families: &["mixtral"],
        experts: Some(Experts {
            router: "layers.{i}.block_sparse_moe.gate",
            gate: "layers.{i}.block_sparse_moe.experts.{e}.w1",
            up: "layers.{i}.block_sparse_moe.experts.{e}.w3",
            down: "layers.{i}.block_sparse_moe.experts.{e}.w2",
            chosen: 2,
            normalized: None,
        }),
        epsilon: ("rms_norm_eps", 1e-5),
        ..LLAMA
    },
    Layout {
        families: &["gemma2", "gemma3_text"],
        tokens: "embed_tokens",
        positions: None,
        segments: None,
        order: NormOrder::Before,
        attention_out: "layers.{i}.self_attn.o_proj",
        attention_norm: Some("layers.{i}.post_attention_layernorm"),
        norm: Some("layers.{i}.pre_feedforward_layernorm"),
        mlp_norm: Some("layers.{i}.post_feedforward_layernorm"),
        gain: GainForm::OnePlus,
        scaled: true,
        gate: Some("layers.{i}.mlp.gate_proj"),
        up: "layers.{i}.mlp.up_proj",
        down: "layers.{i}.mlp.down_proj",
        conv1d: false,
        epsilon: ("rms_norm_eps", 1e-6),
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        experts: None,
    },
    Layout {
        families: &["olmo2"],
        tokens: "embed_tokens",
        positions: None,
        segments: None,
        order: NormOrder::Before,
        attention_out: "layers.{i}.self_attn.o_proj",
        attention_norm: Some("layers.{i}.post_attention_layernorm"),
        norm: None,
        mlp_norm: Some("layers.{i}.post_feedforward_layernorm"),
        gain: GainForm::Plain,
        scaled: false,
        gate: Some("layers.{i}.mlp.gate_proj"),
        up: "layers.{i}.mlp.up_proj",
        down: "layers.{i}.mlp.down_proj",
        conv1d: false,
        epsilon: ("rms_norm_eps", 1e-5),
        activation: ("hidden_act", "silu"),
        experts: None,
    },
    Layout {
        families: &["gpt2"],
        attention_norm: None,
        mlp_norm: None,
        gain: GainForm::Plain,
        scaled: false,
        tokens: "wte",
        positions: Some("wpe"),
        segments: None,
        order: NormOrder::Before,
        attention_out: "h.{i}.attn.c_proj",
        norm: Some("h.{i}.ln_2"),
        gate: None,
        up: "h.{i}.mlp.c_fc",
        down: "h.{i}.mlp.c_proj",
        conv1d: true,
        epsilon: ("layer_norm_epsilon", 1e-5),
        activation: ("activation_function", "gelu_new"),
        experts: None,
    },
    Layout {
        families: &["bert"],
        attention_norm: None,
        mlp_norm: None,
        gain: GainForm::Plain,
        scaled: false,
        tokens: "embeddings.word_embeddings",
        positions: Some("embeddings.position_embeddings"),
        segments: Some("embeddings.token_type_embeddings"),
        order: NormOrder::After,
        attention_out: "encoder.layer.{i}.attention.output.dense",
        norm: Some("encoder.layer.{i}.attention.output.LayerNorm"),
        gate: None,
        up: "encoder.layer.{i}.intermediate.dense",
        down: "encoder.layer.{i}.output.dense",
        conv1d: false,
        epsilon: ("layer_norm_eps", 1e-12),
        activation: ("hidden_act", "gelu"),
        experts: None,
    },
];

/// Where a block's norms stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOrder {
    /// In front of attention and MLP where there are any, or behind them in front of the residual sum (Gemma 2 and 3, OLMo 2): the
    /// residual stream is never normalized.
    Before,
    /// Behind each residual sum; the norm's output is the residual stream (BERT).
    After,
}

/// The nonlinearity of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x Phi(x)`.
    Gelu,
    /// Its tanh form.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
}

impl Activation {
    fn named(name: &str) -> Option<Self> {
        match name {
            "silu" | "swish" => Some(Self::Silu),
            "gelu" => Some(Self::Gelu),
            "gelu_new" | "gelu_pytorch_tanh" => Some(Self::GeluTanh),
            "relu" => Some(Self::Relu),
            _ => None,
        }
    }
}

/// What a forward needs of a checkpoint beside its attention layers.
pub struct Body<'a> {
    checkpoint: &'a Checkpoint,
    layout: &'static Layout,
    /// Token embeddings, `vocabulary x d_model`.
    pub tokens: MatrixView<'a>,
    /// Learned positions, `positions x d_model`.
    pub positions: Option<MatrixView<'a>>,
    /// Embedding of the first segment, `d_model` values.
    pub segment: Option<Vec<f64>>,
    /// Where the norms stand.
    pub order: NormOrder,
    /// The nonlinearity.
    pub activation: Activation,
    /// What every norm adds to the mean square.
    pub epsilon: f64,
    /// Form of the gains of a block's norms.
    pub gain: GainForm,
    /// What embeddings are multiplied by.
    pub embedding_factor: f64,
    /// Longest sequence, and what limits it.
    pub longest: Option<(usize, &'static str)>,
}

/// A linear map with its bias.
pub struct Linear<'a> {
    /// `out x in`.
    pub weight: MatrixView<'a>,
    /// `out` values.
    pub bias: Option<Vec<f64>>,
    /// Tensor name, for messages.
    pub name: String,
}

/// One block, without q, k and v and their norm.
pub struct Block<'a> {
    /// From the heads' outputs, `d_model x (n_q_heads d_head)`.
    pub attention_out: Linear<'a>,
    /// Gain of the norm of attention's output, as stored.
    pub attention_gain: Option<Vec<f64>>,
    /// Gain of the norm between attention and MLP, as stored.
    pub gain: Option<Vec<f64>>,
    /// Gain of the norm of the MLP's output, as stored.
    pub mlp_gain: Option<Vec<f64>>,
    /// Its shift.
    pub shift: Option<Vec<f64>>,
    /// Which MLPs a token takes; none: all tokens take the first, the only one.
    pub router: Option<Router<'a>>,
    /// The MLPs.
    pub mlps: Vec<Mlp<'a>>,
}

/// What chooses the MLPs of a token: those with the largest probabilities, which weigh their outputs.
pub struct Router<'a> {
    /// Logits, a row an MLP.
    pub logits: Linear<'a>,
    /// How many a token takes.
    pub chosen: usize,
    /// Whether their weights are brought to a sum of 1.
    pub normalized: bool,
}

/// One MLP.
pub struct Mlp<'a> {
    /// Multiplies `up` behind the nonlinearity; without it the nonlinearity is `up`'s.
    pub gate: Option<Linear<'a>>,
    /// `inner x d_model`.
    pub up: Linear<'a>,
    /// `d_model x inner`.
    pub down: Linear<'a>,
}

impl Checkpoint {
    /// What stands around attention in this checkpoint.
    ///
    /// # Errors
    /// `is_unsupported` if the family's blocks or the activation are not known; `is_format` if a tensor is missing or of
    /// another shape.
    pub fn body(&self) -> Result<Body<'_>> {
        let spec = self.spec();
        let Some(layout) = LAYOUTS.iter().find(|layout| layout.families.contains(&spec.family.as_str())) else {
            let known: Vec<&str> = LAYOUTS.iter().flat_map(|layout| layout.families).copied().collect();
            return Err(Error::unsupported(format_args!(
                "{}: there is no forward pass for family `{}`, only for {}",
                self.path().display(),
                spec.family,
                known.join(", ")
            )));
        };
        let file = self.path().join("config.json");
        let keys = Keys { map: self.settings(), file: if self.path().is_dir() { &file } else { self.path() } };
        let activation = keys.text(layout.activation.0)?.unwrap_or(layout.activation.1);
        let activation = Activation::named(activation).ok_or_else(|| {
            Error::unsupported(format_args!("{}: activation `{activation}` is not supported", keys.file.display()))
        })?;
        let table = |name: &str| -> Result<MatrixView<'_>> {
            let name = self.named(name, &["weight"]);
            let stored = self.tensor(&name)?;
            match stored.shape[..] {
                [rows, d] if rows > 0 && d == spec.d_model => Ok(stored.view),
                _ => Err(Error::format(
                    self.path(),
                    format_args!("tensor `{name}` has shape {:?}, expected rows of {}", stored.shape, spec.d_model),
                )),
            }
        };
        let positions = layout.positions.map(table).transpose()?;
        let segment = layout.segments.map(table).transpose()?.map(|view| {
            let mut first = vec![0.0; spec.d_model];
            view.read_block(0..1, 0..spec.d_model, &mut first);
            first
        });
        let epsilon = keys.number(layout.epsilon.0)?.unwrap_or(layout.epsilon.1);
        let longest = [
            (positions.as_ref().map(|view| view.shape().0), "learned positions"),
            (spec.max_positions, "positions of its config"),
        ];
        Ok(Body {
            checkpoint: self,
            layout,
            tokens: table(layout.tokens)?,
            positions,
            segment,
            order: layout.order,
            activation,
            epsilon,
            gain: layout.gain,
            embedding_factor: if layout.scaled { (spec.d_model as f64).sqrt() } else { 1.0 },
            longest: longest.into_iter().filter_map(|(n, what)| Some((n?, what))).min_by_key(|(n, _)| *n),
        })
    }
}

impl<'a> Body<'a> {
    /// Path of the checkpoint, for messages.
    pub fn path(&self) -> &Path {
        self.checkpoint.path()
    }

    fn keys(&self) -> Keys<'_> {
        Keys { map: self.checkpoint.settings(), file: self.path() }
    }

    /// The parts of one block.
    ///
    /// # Errors
    /// `is_format` if a tensor is missing or of another shape, `is_non_finite` if a vector is not finite.
    pub fn block(&self, layer: usize) -> Result<Block<'a>> {
        let (checkpoint, layout) = (self.checkpoint, self.layout);
        let spec = checkpoint.spec();
        let own = spec.layer(layer)?;
        let (layer, d, inner_out) = (own.number, spec.d_model, own.n_q_heads * own.d_head);
        let linear = |name: &str, rows: usize, cols: usize| -> Result<Linear<'a>> {
            let weight = checkpoint.named(name, &["weight"]);
            let bias = checkpoint.named(name, &["bias"]);
            Ok(Linear {
                weight: checkpoint.matrix(&weight, rows, cols, layout.conv1d)?,
                bias: checkpoint.has_tensor(&bias).then(|| checkpoint.vector(&bias, rows)).transpose()?,
                name: weight,
            })
        };
        let mlp = |gate: Option<&str>, up: &str, down: &str| -> Result<Mlp<'a>> {
            let shape = checkpoint.tensor(&checkpoint.named(up, &["weight"]))?.shape;
            let inner = shape.get(usize::from(layout.conv1d)).copied().unwrap_or(0);
            Ok(Mlp {
                gate: gate.map(|gate| linear(gate, inner, d)).transpose()?,
                up: linear(up, inner, d)?,
                down: linear(down, d, inner)?,
            })
        };
        let name = |template: &str| at(template, layer);
        let router =
            layout.experts.as_ref().map(|experts| (experts, checkpoint.named(&name(experts.router), &["weight"])));
        let (router, mlps) = match router.filter(|(_, router)| checkpoint.has_tensor(router)) {
            Some((experts, router)) => {
                let count = checkpoint.tensor(&router)?.shape.first().copied().unwrap_or(0);
                let keys = self.keys();
                let chosen = keys.count("num_experts_per_tok", count)?.unwrap_or(experts.chosen.min(count));
                let normalized = experts.normalized.map_or(Ok(true), |key| Ok(keys.flag(key)?.unwrap_or(false)))?;
                let logits = linear(&name(experts.router), count, d)?;
                let of = |template: &str, expert: usize| name(template).replace("{e}", &expert.to_string());
                let one = |e: usize| mlp(Some(&of(experts.gate, e)), &of(experts.up, e), &of(experts.down, e));
                (Some(Router { logits, chosen, normalized }), (0..count).map(one).collect::<Result<_>>()?)
            }
            None => {
                let gate = layout.gate.map(name);
                (None, vec![mlp(gate.as_deref(), &name(layout.up), &name(layout.down))?])
            }
        };
        let gain = |template: Option<&str>| {
            let name = template.map(|template| checkpoint.named(&at(template, layer), &["weight", "gamma"]));
            name.map(|name| checkpoint.vector(&name, d)).transpose()
        };
        let shift = layout.norm.filter(|_| spec.norm.shift);
        let shift = shift.map(|template| checkpoint.named(&at(template, layer), &["bias", "beta"]));
        Ok(Block {
            attention_out: linear(&name(layout.attention_out), d, inner_out)?,
            attention_gain: gain(layout.attention_norm)?,
            gain: gain(layout.norm)?,
            mlp_gain: gain(layout.mlp_norm)?,
            shift: shift.map(|name| checkpoint.vector(&name, d)).transpose()?,
            router,
            mlps,
        })
    }
}
