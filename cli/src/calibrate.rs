//! `sigmascale calibrate`: from a config or a checkpoint to constants, bounds and descales.

use super::centers::{self, CenterArgs};
use super::html::quoted;
use super::mla;
use super::model::Model;
use super::named::named;
use super::numbers::{count, real};
use super::output::OutputArgs;
use super::progress;
use super::table::{Table, largest, range, short, wrapped};
use sigmascale::bound::{BoundKind, Tail};
use sigmascale::calibrate::{
    Calibration, ChosenC, Estimator, LayerProfile, Method, Options, Profile, calibrate_config,
};
use sigmascale::plan::{CenterSource, Granularity};
use sigmascale::{Descale, Error, Result};
use std::fmt::Write;
use std::time::Instant;

/// Compute the scales of a model: norms, logit bounds and descales per layer and head
#[derive(clap::Args)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// Preset name, config.json, .safetensors file (config.json in the same folder) or checkpoint folder
    model: String,
    /// Failure probability of the probabilistic bounds, over --seq-len tokens, --batch sequences and --steps steps
    #[arg(long, default_value = "1e-6", value_parser = real)]
    delta: f64,
    /// Tokens per sequence in the union bound
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = count)]
    seq_len: usize,
    /// Sequences per step in the union bound
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count)]
    batch: usize,
    /// Steps in the union bound
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count)]
    steps: usize,
    /// Share of the E4M3 range that the logit bound is mapped onto
    #[arg(long, default_value_t = 0.8, value_parser = real)]
    eta: f64,
    /// Logit bound from which logit descales are computed [default: worst-case]
    #[arg(long, value_parser = named::<BoundKind>())]
    bound: Option<BoundKind>,
    /// One scale per head or per layer [default: head]
    #[arg(long, value_parser = named::<Granularity>())]
    granularity: Option<Granularity>,
    /// How norms are computed
    #[arg(long, value_parser = named::<Estimator>(), default_value = Estimator::Gram.name())]
    estimator: Estimator,
    /// Iterations of power and power-summed
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = count)]
    iterations: usize,
    /// Compute everything as the paper does: sigma of the sum over heads, no gains, biases or rotation
    #[arg(long)]
    as_paper: bool,
    /// Count the model's soft-cap, for an attention that applies it (transformers' default, SDPA, does not)
    #[arg(long)]
    soft_cap: bool,
    /// Replace c_star by this constant and report its failure probability; needs --as-paper
    #[arg(long, value_name = "VALUE", value_parser = real)]
    c: Option<f64>,
    #[command(flatten)]
    centers: CenterArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Args {
    fn options(&self) -> Result<Options> {
        if self.c.is_some() && !self.as_paper {
            return Err(Error::argument("--c needs --as-paper: it replaces c_star in the paper's bound"));
        }
        if self.as_paper && matches!(self.bound, Some(BoundKind::WorstCase | BoundKind::Spectrum)) {
            return Err(Error::argument("--as-paper uses the paper's bound: remove --bound"));
        }
        if self.as_paper && matches!(self.granularity, Some(Granularity::Head)) {
            return Err(Error::argument("--as-paper has one scale per layer: remove --granularity"));
        }
        let options = Options {
            tail: Tail { delta: self.delta, seq_len: self.seq_len, batch: self.batch, steps: self.steps },
            eta: self.eta,
            bound: self.bound.unwrap_or_default(),
            granularity: self.granularity.unwrap_or_default(),
            estimator: self.estimator,
            iterations: self.iterations,
            as_paper: self.as_paper,
            soft_cap: self.soft_cap,
            c: self.c,
            centers: self.centers.policy(),
            ..Options::default()
        };
        options.check()?;
        Ok(options)
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    let options = args.options()?;
    args.output.check()?;
    let model = Model::open(&args.model)?;
    let read = super::model::files(&args.model, &model);
    args.output.check_not_read(("-o", None), &read)?;
    let profile = match model {
        Model::Config(spec) => calibrate_config(&spec, &options)?,
        Model::Checkpoint(checkpoint) => {
            let start = Instant::now();
            let layers = checkpoint.spec().layers.len();
            let bar = progress::bar(layers, "{msg}: layer {pos}/{len}", "calibrate");
            let mut calibration = Calibration::new(checkpoint.spec(), options)?;
            for layer in 0..layers {
                calibration.layer(checkpoint.layer(layer)?)?;
                bar.inc(1);
            }
            bar.finish_and_clear();
            tracing::info!(seconds = start.elapsed().as_secs_f64(), "calibrated");
            calibration.finish()
        }
    };
    args.output.write(&profile, |profile| table(profile, &args.model, args.output.most_rows()))
}

/// A probability, with what its ends mean.
fn amount(delta: f64) -> String {
    match delta {
        0.0 => "0 (below what f64 can hold)".to_owned(),
        1.0 => "1 (no guarantee: c is too small)".to_owned(),
        delta => format!("{delta:.3e}"),
    }
}

const ISOTROPIC: &str = "WARNING: assumes isotropic tokens, so real text may exceed this bound, but never the worst-case bound. In docs/bounds.md \
     it exceeded the theorem's bound without rotation, and neither the rank-aware bound nor the paper's form.";

/// The readable form: what to do with the scales, the scales, what they rest on, and the paper's constants. `model` is the argument.
fn table(profile: &Profile, model: &str, most: usize) -> String {
    let mut out = wrapped(&super::model::headline(&profile.model), "");
    out.push('\n');
    match (&profile.method, &profile.layers) {
        (Some(method), Some(layers)) if method.c.is_some() => out.push_str(&as_paper(profile, method, layers)),
        (Some(method), Some(layers)) => {
            out.push_str(&scales(profile, layers, most));
            out.push_str(&basis(profile, method, layers));
        }
        _ => out.push_str(&wrapped(
            "These are the paper's constants alone. Scales need weights: pass a checkpoint folder.",
            "",
        )),
    }
    out.push('\n');
    out.push_str(&constants(profile));
    if profile.layers.is_some() && profile.method.as_ref().is_some_and(|method| method.c.is_none()) {
        let _ = writeln!(out, "\nNext: sigmascale export {} --to NEW --for vllm", quoted(model));
    }
    out
}

/// The paper's constants, which need no weights.
fn constants(profile: &Profile) -> String {
    let (tail, c) = (&profile.tail.tail, &profile.c_star);
    let mut out = wrapped(
        &format!(
            "the paper's constants, which assume isotropic tokens, at delta {:e}, seq-len {}, batch {}, steps {}:",
            tail.delta, tail.seq_len, tail.batch, tail.steps
        ),
        "",
    );
    out.push_str(&wrapped(
        &format!(
            "c_star {:.6} = probabilistic bound / worst case, gamma {:.6}, d / (gamma r) {:.6}; without the rank, c {:.6}",
            c.c_star, c.gamma, c.improvement, c.c_rank_agnostic
        ),
        "  ",
    ));
    out.push_str(&wrapped(
        &format!("from the exact Beta distribution: c_star {:.6}, gamma {:.6}", c.c_star_beta, c.gamma_beta),
        "  ",
    ));
    if profile.model.mla.is_some() {
        let rule = "not a bound for latent attention (MLA), whose queries and keys are not linear in a token";
        out.push_str(&wrapped(rule, "  "));
    }
    if let Some(ChosenC { c, delta }) = profile.chosen_c {
        let chosen = format!("c {} in place of c_star: failure probability delta {}", short(c), amount(delta));
        out.push_str(&wrapped(&chosen, ""));
    }
    out
}

/// The logit scales of the paper's own form.
fn as_paper(profile: &Profile, method: &Method, layers: &[LayerProfile]) -> String {
    let bound = format!("logit bound: the paper's form, {} tau d sigma_sum; eta {}", short(method.c), profile.tail.eta);
    let mut out = wrapped(&bound, "") + &wrapped(ISOTROPIC, "  ");
    let rule = "sigma_sum does not bound single heads, and gains, biases and rotation are ignored.";
    out.push_str(&wrapped(rule, "  "));
    out.push('\n');
    let mut table = Table::new(["layer", "sigma_sum", "logit bound", "logit descale"]);
    for layer in layers {
        let descale = f64::from(layer.logit_descale.get());
        table.row([layer.number.to_string(), short(layer.sigma_sum), short(layer.logit_bound), short(descale)]);
    }
    out + &table.render()
}

/// Descales and bounds of every layer, behind what to do with them.
fn scales(profile: &Profile, layers: &[LayerProfile], most: usize) -> String {
    let mut out = wrapped(
        "Divide q, k and v by their descales before the cast to E4M3, and multiply by them afterwards (vLLM and SGLang call \
         k's descale k_scale). Then no normalized input can overflow. min..max over the heads; --json has every head.",
        "",
    );
    out.push('\n');
    let mut table = Table::new([
        "layer",
        "q descale",
        "k descale",
        "v descale",
        "o descale",
        "logit bound",
        "logit descale",
        "sigma",
        "sigma_sum",
    ]);
    let cells = |row: &Option<Vec<Descale>>| range(row.iter().flatten().map(|descale| f64::from(descale.get())));
    let (shown, others) = largest(layers, most, "logit bounds", |layer| Some(layer.logit_bound));
    for layer in shown {
        table.row([
            layer.number.to_string(),
            cells(&layer.q_descale),
            cells(&layer.k_descale),
            cells(&layer.v_descale),
            cells(&layer.o_descale),
            short(layer.logit_bound),
            range(layer.logit_descales.iter().map(|descale| f64::from(descale.get()))),
            short(layer.sigma),
            short(layer.sigma_sum),
        ]);
    }
    out.push_str(&table.render());
    out.push_str(&others);
    if profile.model.mla.is_some() {
        out.push_str("These rows are those of the expanded form (prefill).\n\n");
        out.push_str(&mla::table(layers.iter().filter_map(|layer| Some((layer.number, layer.mla.as_ref()?)))));
    }
    out
}

/// What the scales rest on.
fn basis(profile: &Profile, method: &Method, layers: &[LayerProfile]) -> String {
    let mut out = String::from("\n");
    let grain = match method.granularity {
        Granularity::Head => "head",
        Granularity::Layer => "layer",
    };
    let (bound, remark) = match method.bound {
        Some(BoundKind::WorstCase) => (
            "worst-case bound, rounding included",
            "no normalized input exceeds it; `inspect` also prints the bound in exact arithmetic",
        ),
        Some(BoundKind::RankAware) | None => ("rank-aware", ISOTROPIC),
        Some(BoundKind::Spectrum) => ("spectrum", ISOTROPIC),
    };
    out.push_str("operand descales: from worst-case bounds\n");
    let eta = profile.tail.eta;
    out.push_str(&wrapped(&format!("logit bound: {bound}; one scale per {grain}, eta {eta}"), ""));
    out.push_str(&wrapped(remark, "  "));
    let mut say = |text: &str| out.push_str(&wrapped(text, "  "));
    if let Some(positions) = profile.model.bounded_positions {
        say(&format!(
            "for sequences of at most {positions} tokens, the config's limit: queries grow with the position"
        ));
    }
    if let Some(cap) = method.soft_cap {
        say(&format!("for an attention that caps its logits at {cap}"));
    }
    if let Some(limit) = method.layer_norm_mean_limit {
        say(&format!(
            "LayerNorm: holds for tokens with |mean| <= {limit} sqrt(variance + epsilon); beyond it, f32 loses the mean"
        ));
    }
    if profile.model.fp8_inputs {
        say("FP8 weights: the rounding of E4M3 inputs to the projections is included");
    }
    if method.estimator != Estimator::Gram {
        say("sigma is estimated from below by power iteration; --estimator gram is exact");
        if !method.rotation {
            say("rotation is ignored: RoPE can raise logits above this bound; --estimator gram includes it");
        }
    }
    if profile.model.mla.is_some() {
        return out;
    }
    let source = method.centers.map_or(CenterSource::None, |centers| centers.k);
    out.push_str(&centers::table(
        source,
        layers.iter().filter_map(|layer| Some((layer.number, layer.center.as_ref()?))),
    ));
    let mut say = |text: &str| out.push_str(&wrapped(text, ""));
    if layers.iter().any(|layer| layer.sigma.is_none()) {
        say("sigma is -: q and k are normalized after the projection, so the bounds come from the gains.");
    }
    if layers.iter().any(|layer| layer.v_descale.is_none()) {
        say("v and o descales are -: the projections' input is not normalized, so v has no bound.");
    }
    out
}
