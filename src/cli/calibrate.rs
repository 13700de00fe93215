//! `sigmascale calibrate`: from a config or a checkpoint to constants, bounds and descales.

use super::model::Model;
use super::output::OutputArgs;
use super::progress;
use super::table::{Table, range, short};
use clap::ValueEnum;
use sigmascale::bound::{BoundKind, Tail};
use sigmascale::calibrate::{Calibration, Estimator, Options, Profile, calibrate_config};
use sigmascale::file::write_atomically;
use sigmascale::plan::Granularity;
use sigmascale::plan::export::scales_safetensors;
use sigmascale::{Descale, Error, Result};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// c_star of a model; with weights also norms, bounds and descales of every layer and head
#[derive(clap::Args)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// Preset name, config.json, .safetensors file (config beside it) or checkpoint folder
    model: String,
    /// Failure probability of the isotropic bounds
    #[arg(long, default_value_t = 1e-6)]
    delta: f64,
    /// Sequence length in the union bound
    #[arg(long, default_value_t = 1024)]
    seq_len: usize,
    /// Sequences a step in the union bound
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Steps in the union bound
    #[arg(long, default_value_t = 1)]
    steps: usize,
    /// Share of the E4M3 range that a logit bound is mapped onto
    #[arg(long, default_value_t = 0.8)]
    eta: f64,
    /// Bound behind the logit descales [default: certain]
    #[arg(long, value_enum)]
    bound: Option<Bound>,
    /// One scale a head or a layer [default: head]
    #[arg(long, value_enum)]
    granularity: Option<Grain>,
    /// How norms are computed
    #[arg(long, value_enum, default_value = "gram")]
    estimator: Engine,
    /// Everything as the paper has it: summed raw sigma, no gains, constants or rotation, one logit scale a layer
    #[arg(long)]
    as_paper: bool,
    /// Replaces c_star under --as-paper
    #[arg(long, value_name = "VALUE")]
    c: Option<f64>,
    /// Write q, k and v scales for vLLM and mistral.rs
    #[arg(long, value_name = "FILE.safetensors")]
    export_scales: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Bound {
    /// No token can pass it
    Certain,
    /// The paper's, for isotropic tokens
    RankAware,
    /// Sharper, for isotropic tokens
    Spectrum,
}

#[derive(Clone, Copy, ValueEnum)]
enum Grain {
    /// A scale a head
    Head,
    /// One for all heads of a layer
    Layer,
}

#[derive(Clone, Copy, ValueEnum)]
enum Engine {
    /// Exact and certified
    Gram,
    /// The paper's power iteration, a lower bound
    Power,
}

impl Args {
    fn options(&self) -> Result<Options> {
        if self.as_paper && matches!(self.bound, Some(Bound::Certain | Bound::Spectrum)) {
            return Err(Error::argument("--as-paper has the paper's bound: leave --bound out"));
        }
        if self.as_paper && matches!(self.granularity, Some(Grain::Head)) {
            return Err(Error::argument("--as-paper has one scale a layer: leave --granularity out"));
        }
        let options = Options {
            tail: Tail { delta: self.delta, seq_len: self.seq_len, batch: self.batch, steps: self.steps },
            eta: self.eta,
            bound: match self.bound.unwrap_or(Bound::Certain) {
                Bound::Certain => BoundKind::Certain,
                Bound::RankAware => BoundKind::RankAware,
                Bound::Spectrum => BoundKind::Spectrum,
            },
            granularity: match self.granularity.unwrap_or(Grain::Head) {
                Grain::Head => Granularity::Head,
                Grain::Layer => Granularity::Layer,
            },
            estimator: match self.estimator {
                Engine::Gram => Estimator::Gram,
                Engine::Power => Estimator::Power,
            },
            as_paper: self.as_paper,
            c: self.c,
            ..Options::default()
        };
        options.check()?;
        if self.as_paper && self.export_scales.is_some() {
            return Err(Error::argument("--export-scales needs operand descales, and --as-paper computes none"));
        }
        Ok(options)
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    let options = args.options()?;
    args.output.check()?;
    if let Some(file) = &args.export_scales {
        args.output.check_other("--export-scales", file)?;
    }
    let model = Model::open(&args.model)?;
    let read = super::model::files(&args.model, &model);
    args.output.check_not_read(("--export-scales", args.export_scales.as_deref()), &read)?;
    let profile = match model {
        Model::Config(_) if args.export_scales.is_some() => {
            return Err(Error::argument("--export-scales needs weights, and this model is a config alone"));
        }
        Model::Config(spec) => calibrate_config(&spec, &options)?,
        Model::Checkpoint(checkpoint) => {
            let start = Instant::now();
            let layers = checkpoint.spec().layers.len();
            let bar = progress::layers(layers);
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
    if let Some(file) = &args.export_scales {
        export(&profile, file)?;
    }
    args.output.write(&profile, table)
}

fn export(profile: &Profile, file: &Path) -> Result<()> {
    write_atomically(file, &scales_safetensors(&profile.tensor_scales()?)?)
}

/// The readable form.
fn table(profile: &Profile) -> String {
    let mut out = super::model::headline(&profile.model);
    let (tail, c) = (&profile.tail.tail, &profile.c_star);
    let _ = writeln!(
        out,
        "c_star {:.6}  gamma {:.6}  rank-agnostic {:.6}  improvement {:.6}",
        c.c_star, c.gamma, c.c_rank_agnostic, c.improvement
    );
    let _ = writeln!(
        out,
        "  at delta {:e}, seq-len {}, batch {}, steps {}; assumes isotropic tokens (exact Beta tail: gamma {:.6}, c_star {:.6})",
        tail.delta, tail.seq_len, tail.batch, tail.steps, c.gamma_beta, c.c_star_beta
    );
    let (Some(method), Some(layers)) = (&profile.method, &profile.layers) else { return out };
    let eta = profile.tail.eta;
    let assumes = "WARNING: assumes isotropic tokens. Real text passes this bound on trained models; --bound certain cannot be passed.";
    if let Some(c) = method.c {
        let _ = writeln!(out, "logit bound: as the paper, {} tau d sigma_sum, eta {eta}", short(c));
        let _ =
            writeln!(out, "  {assumes}\n  sigma_sum bounds no single head; gains, biases and rotation are left out.");
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
        Some(BoundKind::Certain) => ("certain, with rounding", "no token can pass it"),
        Some(BoundKind::RankAware) | None => ("rank-aware", assumes),
        Some(BoundKind::Spectrum) => ("spectrum", assumes),
    };
    let _ = writeln!(out, "logit bound: {bound}; one scale a {grain}, eta {eta}\n  {remark}");
    if let Some(positions) = profile.model.bounded_positions {
        let _ = writeln!(
            out,
            "  for sequences of up to {positions} tokens, the most of the config: queries grow with the position"
        );
    }
    if profile.model.fp8_inputs {
        out.push_str("  weights are stored in FP8: bounds with rounding also hold where the projections read their input in E4M3\n");
    }
    if method.estimator == Estimator::Power {
        out.push_str("  sigma is a power iteration's estimate from below; ");
        out.push_str(if method.rotation { "--estimator gram is exact.\n" } else {
            "rotation is left out, and RoPE can raise logits above this bound; --estimator gram is exact and includes it.\n"
        });
    }
    let _ = writeln!(out, "operand descales: certain, with rounding; min..max over the heads\n");
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
    if layers.iter().any(|layer| layer.sigma.is_none()) {
        out.push_str("sigma is -: q and k are normalised after the projection, and the bounds come from the gains.\n");
    }
    if layers.iter().any(|layer| layer.v_descale.is_none()) {
        out.push_str("v and o descales are -: no norm stands in front of the projections, so v has no bound.\n");
    }
    out
}
