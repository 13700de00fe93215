//! `sigmascale inspect`: the spectral profile of a checkpoint, as table, JSON or page.

mod page;

use super::model::{Model, headline};
use super::output::OutputArgs;
use super::progress;
use super::table::{Table, range, short};
use serde::Serialize;
use sigmascale::calibrate::{Calibration, HeadProfile, LayerProfile, ModelSummary, Options};
use sigmascale::file::{check_target, write_atomically};
use sigmascale::{Error, Result};
use std::path::PathBuf;

/// The spectral profile of a checkpoint: sigma per layer and head, stable rank, RoPE ratio
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder, or .safetensors file with its config beside it
    checkpoint: String,
    /// Also write a page with the picture to FILE
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// The profile. Numbers are null where q and k are normalised after the projection.
#[derive(Serialize)]
struct Inspection {
    model: ModelSummary,
    layers: Vec<Layer>,
}

/// One layer: statistics over its heads, then the heads.
#[derive(Serialize)]
struct Layer {
    layer: usize,
    /// Effective norm: gain folded, mean removed, unrotated.
    sigma: Option<Statistics>,
    /// Plain norm.
    sigma_raw: Option<Statistics>,
    stable_rank: Option<Statistics>,
    /// `sigma_rope / sigma`.
    rope_ratio: Option<Statistics>,
    /// The paper's summed matrix.
    sigma_sum: Option<f64>,
    /// Largest certain bound on a logit.
    bound_certain: Option<f64>,
    heads: Vec<Head>,
}

#[derive(Serialize)]
struct Head {
    head: usize,
    kv_head: usize,
    sigma: Option<f64>,
    sigma_raw: Option<f64>,
    sigma_rope: Option<f64>,
    rope_ratio: Option<f64>,
    frobenius: Option<f64>,
    stable_rank: Option<f64>,
    bound_certain: Option<f64>,
}

#[derive(Clone, Copy, Serialize)]
struct Statistics {
    min: f64,
    mean: f64,
    max: f64,
}

impl Statistics {
    /// Of the values there are; `None` without any.
    fn of(values: impl Iterator<Item = Option<f64>>) -> Option<Self> {
        let values: Vec<f64> = values.flatten().collect();
        let min = values.iter().copied().reduce(f64::min)?;
        let max = values.iter().copied().reduce(f64::max)?;
        Some(Self { min, mean: values.iter().sum::<f64>() / values.len() as f64, max })
    }
}

impl Head {
    fn new(head: &HeadProfile) -> Self {
        // A zero head has no ratio.
        let ratio = head.sigma_rope.zip(head.sigma).filter(|(_, sigma)| *sigma > 0.0).map(|(rope, sigma)| rope / sigma);
        Self {
            head: head.head,
            kv_head: head.kv_head,
            sigma: head.sigma,
            sigma_raw: head.sigma_raw,
            sigma_rope: head.sigma_rope,
            rope_ratio: ratio,
            frobenius: head.frobenius,
            stable_rank: head.stable_rank,
            bound_certain: head.bound_certain,
        }
    }
}

impl Layer {
    fn new(profile: &LayerProfile) -> Self {
        let heads: Vec<Head> = profile.heads.iter().flatten().map(Head::new).collect();
        let statistics = |value: fn(&Head) -> Option<f64>| Statistics::of(heads.iter().map(value));
        Self {
            layer: profile.layer,
            sigma: statistics(|head| head.sigma),
            sigma_raw: statistics(|head| head.sigma_raw),
            stable_rank: statistics(|head| head.stable_rank),
            rope_ratio: statistics(|head| head.rope_ratio),
            sigma_sum: profile.sigma_sum,
            bound_certain: statistics(|head| head.bound_certain).map(|bound| bound.max),
            heads,
        }
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    args.output.check()?;
    if let Some(file) = &args.html {
        check_target(file)?;
    }
    let Model::Checkpoint(checkpoint) = Model::open(&args.checkpoint)? else {
        return Err(Error::argument(format_args!(
            "inspect needs weights, and {} is a config alone: name a checkpoint folder or a .safetensors file",
            args.checkpoint
        )));
    };
    let spec = checkpoint.spec();
    let bar = progress::layers(spec.layers);
    let mut calibration = Calibration::new(spec, Options::default())?;
    let mut layers = Vec::with_capacity(spec.layers);
    for layer in 0..spec.layers {
        layers.push(Layer::new(calibration.layer(checkpoint.layer(layer)?)?));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let inspection = Inspection { model: ModelSummary::new(spec), layers };
    if let Some(file) = &args.html {
        write_atomically(file, page::render(&inspection).as_bytes())?;
    }
    args.output.write(&inspection, table)
}

fn table(inspection: &Inspection) -> String {
    let mut out = headline(&inspection.model);
    out.push_str(&page::summary(inspection));
    out.push_str("\n\n");
    let mut table = Table::new([
        "layer",
        "sigma min",
        "mean",
        "max",
        "raw min",
        "mean",
        "max",
        "stable rank",
        "RoPE ratio",
        "sigma_sum",
        "bound",
    ]);
    let span = |s: Option<Statistics>| range(s.iter().flat_map(|s| [s.min, s.max]));
    for layer in &inspection.layers {
        let (sigma, raw) = (layer.sigma, layer.sigma_raw);
        table.row([
            layer.layer.to_string(),
            short(sigma.map(|s| s.min)),
            short(sigma.map(|s| s.mean)),
            short(sigma.map(|s| s.max)),
            short(raw.map(|s| s.min)),
            short(raw.map(|s| s.mean)),
            short(raw.map(|s| s.max)),
            span(layer.stable_rank),
            span(layer.rope_ratio),
            short(layer.sigma_sum),
            short(layer.bound_certain),
        ]);
    }
    out.push_str(&table.render());
    out
}
