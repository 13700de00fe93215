//! `sigmascale calibrate`: from a config or a checkpoint to constants, bounds and descales.

use super::centers::{self, CenterArgs};
use super::mla;
use super::model::Model;
use super::named::named;
use super::numbers::{count, real};
use super::output::OutputArgs;
use super::progress;
use super::table::{Table, range, short};
use sigmascale::bound::{BoundKind, Tail};
use sigmascale::calibrate::{Calibration, ChosenC, Estimator, Options, Profile, calibrate_config};
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
    args.output.write(&profile, table)
}

/// A probability, with what its ends mean.
fn amount(delta: f64) -> String {
    match delta {
        0.0 => "0 (below what f64 can hold)".to_owned(),
        1.0 => "1 (no guarantee: c is too small)".to_owned(),
        delta => format!("{delta:.3e}"),
    }
}

/// The readable form.
fn table(profile: &Profile) -> String {
    let mut out = super::model::headline(&profile.model);
    let (tail, c) = (&profile.tail.tail, &profile.c_star);
    let _ = writeln!(
        out,
        "the paper's constants, which assume isotropic tokens, at delta {:e}, seq-len {}, batch {}, steps {}:",
        tail.delta, tail.seq_len, tail.batch, tail.steps
    );
    let _ = writeln!(
        out,
        "  c_star {:.6} = probabilistic bound / worst case, gamma {:.6}, d / (gamma r) {:.6}; without the rank, c {:.6}",
        c.c_star, c.gamma, c.improvement, c.c_rank_agnostic
    );
    let _ = writeln!(out, "  from the exact Beta distribution: c_star {:.6}, gamma {:.6}", c.c_star_beta, c.gamma_beta);
    if profile.model.mla.is_some() {
        out.push_str("  not a bound for latent attention (MLA), whose queries and keys are not linear in a token\n");
    }
    if let Some(ChosenC { c, delta }) = profile.chosen_c {
        let _ = writeln!(out, "c {} in place of c_star: failure probability delta {}", short(c), amount(delta));
    }
    let (Some(method), Some(layers)) = (&profile.method, &profile.layers) else { return out };
    let eta = profile.tail.eta;
    let assumes = "WARNING: assumes isotropic tokens, so real text may exceed this bound, but never the worst-case bound. In docs/bounds.md \
                   it exceeded the theorem's bound without rotation, and neither the rank-aware bound nor the paper's form.";
    if let Some(c) = method.c {
        let _ = writeln!(out, "logit bound: the paper's form, {} tau d sigma_sum; eta {eta}", short(c));
        let _ = writeln!(
            out,
            "  {assumes}\n  sigma_sum does not bound single heads, and gains, biases and rotation are ignored."
        );
        out.push('\n');
        let mut table = Table::new(["layer", "sigma_sum", "logit bound", "logit descale"]);
        for layer in layers {
            let descale = f64::from(layer.logit_descale.get());
            table.row([layer.number.to_string(), short(layer.sigma_sum), short(layer.logit_bound), short(descale)]);
        }
        return out + &table.render();
    }
    let grain = match method.granularity {
        Granularity::Head => "head",
        Granularity::Layer => "layer",
    };
    let (bound, remark) = match method.bound {
        Some(BoundKind::WorstCase) => (
            "worst-case bound, rounding included",
            "no normalized input exceeds it; `inspect` also prints the bound in exact arithmetic",
        ),
        Some(BoundKind::RankAware) | None => ("rank-aware", assumes),
        Some(BoundKind::Spectrum) => ("spectrum", assumes),
    };
    let _ = writeln!(out, "logit bound: {bound}; one scale per {grain}, eta {eta}\n  {remark}");
    if let Some(positions) = profile.model.bounded_positions {
        let _ = writeln!(
            out,
            "  for sequences of at most {positions} tokens, the config's limit: queries grow with the position"
        );
    }
    if let Some(cap) = method.soft_cap {
        let _ = writeln!(out, "  for an attention that caps its logits at {cap}");
    }
    if let Some(limit) = method.layer_norm_mean_limit {
        let _ = writeln!(
            out,
            "  LayerNorm: holds for tokens with |mean| <= {limit} sqrt(variance + epsilon); beyond it, f32 loses the mean"
        );
    }
    if profile.model.fp8_inputs {
        out.push_str("  FP8 weights: the rounding of E4M3 inputs to the projections is included\n");
    }
    if method.estimator != Estimator::Gram {
        out.push_str("  sigma is estimated from below by power iteration; --estimator gram is exact\n");
        if !method.rotation {
            out.push_str(
                "  rotation is ignored: RoPE can raise logits above this bound; --estimator gram includes it\n",
            );
        }
    }
    let _ = writeln!(out, "operand descales: from worst-case bounds; min..max over the heads\n");
    let mut table = Table::new([
        "layer",
        "sigma",
        "sigma_sum",
        "logit bound",
        "logit descale",
        "q descale",
        "k descale",
        "v descale",
        "o descale",
    ]);
    let cells = |row: &Option<Vec<Descale>>| range(row.iter().flatten().map(|descale| f64::from(descale.get())));
    for layer in layers {
        table.row([
            layer.number.to_string(),
            short(layer.sigma),
            short(layer.sigma_sum),
            short(layer.logit_bound),
            range(layer.logit_descales.iter().map(|descale| f64::from(descale.get()))),
            cells(&layer.q_descale),
            cells(&layer.k_descale),
            cells(&layer.v_descale),
            cells(&layer.o_descale),
        ]);
    }
    out.push_str(&table.render());
    if profile.model.mla.is_some() {
        out.push_str("These rows are those of the expanded form (prefill).\n\n");
        return out + &mla::table(layers.iter().filter_map(|layer| Some((layer.number, layer.mla.as_ref()?))));
    }
    let source = method.centers.map_or(CenterSource::None, |centers| centers.k);
    out.push_str(&centers::table(
        source,
        layers.iter().filter_map(|layer| Some((layer.number, layer.center.as_ref()?))),
    ));
    if layers.iter().any(|layer| layer.sigma.is_none()) {
        out.push_str("sigma is -: q and k are normalized after the projection, so the bounds come from the gains.\n");
    }
    if layers.iter().any(|layer| layer.v_descale.is_none()) {
        out.push_str("v and o descales are -: the projections' input is not normalized, so v has no bound.\n");
    }
    out
}
