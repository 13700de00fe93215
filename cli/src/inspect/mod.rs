//! `sigmascale inspect`: the spectral profile of a checkpoint, as table, JSON or page.

pub mod page;

use super::centers;
use super::html::{Made, quoted};
use super::mla;
use super::model::{Model, headline};
use super::output::{OutputArgs, write_file};
use super::progress;
use super::table::{Table, largest, range, short, wrapped};
use super::terminal::toned;
use sigmascale::calibrate::{Calibration, Inspection, Options, Statistics};
use sigmascale::{Error, Result};
use std::path::PathBuf;

/// Show which layers and heads have large logits: sigma, stable rank, RoPE ratio and logit bound
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder, or .safetensors file with its config.json in the same folder
    checkpoint: String,
    /// Also write the result as an HTML page with figures to FILE
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
pub fn run(args: Args, made: &Made) -> Result<()> {
    args.output.check()?;
    if let Some(file) = &args.html {
        args.output.check_other("--html", file)?;
    }
    let model = Model::open(&args.checkpoint)?;
    args.output.check_not_read(("--html", args.html.as_deref()), &super::model::files(&args.checkpoint, &model))?;
    let Model::Checkpoint(checkpoint) = model else {
        return Err(Error::argument(format_args!(
            "inspect needs weights, but {} has none: pass a checkpoint folder or a .safetensors file",
            args.checkpoint
        )));
    };
    let layers = checkpoint.spec().layers.len();
    let bar = progress::bar(layers, "{msg}: layer {pos}/{len}", "inspect");
    let mut calibration = Calibration::new(checkpoint.spec(), Options::default())?;
    for layer in 0..layers {
        calibration.layer(checkpoint.layer(layer)?)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let inspection = Inspection::new(calibration.finish());
    if let Some(file) = &args.html {
        write_file(file, page::render(&inspection, made).as_bytes())?;
    }
    args.output.write(&inspection, |inspection| table(inspection, args.output.most_rows(), &args.checkpoint))
}

fn table(inspection: &Inspection, most: usize, folder: &str) -> String {
    let mut out = wrapped(&headline(&inspection.model), "");
    out.push_str(&wrapped(&page::summary(inspection), ""));
    out.push('\n');
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
        "exact bound",
        "worst-case bound",
    ]);
    let span = |s: Option<Statistics>| range(s.iter().flat_map(|s| [s.min, s.max]));
    let (shown, others) = largest(&inspection.layers, most, "worst-case bounds", |layer| layer.bound_rounded);
    for layer in shown {
        let (sigma, raw) = (layer.sigma, layer.sigma_raw);
        table.row([
            layer.number.to_string(),
            short(sigma.map(|s| s.min)),
            short(sigma.map(|s| s.mean)),
            short(sigma.map(|s| s.max)),
            short(raw.map(|s| s.min)),
            short(raw.map(|s| s.mean)),
            short(raw.map(|s| s.max)),
            span(layer.stable_rank),
            span(layer.rope_ratio),
            short(layer.sigma_sum),
            short(layer.bound_exact),
            short(layer.bound_rounded),
        ]);
    }
    out.push_str(&table.render());
    out.push_str(&others);
    if inspection.model.mla.is_some() {
        let rows = inspection.layers.iter().filter_map(|layer| Some((layer.number, layer.mla.as_ref()?)));
        out = out + "\n" + &mla::table(rows);
    }
    let rows = inspection.layers.iter().filter_map(|layer| Some((layer.number, layer.center.as_ref()?)));
    out.push_str(&centers::table(Options::default().centers.k, rows));
    out.push('\n');
    out.push_str(&wrapped(page::BOUNDS, ""));
    let ranked = page::ranked(inspection);
    if !ranked.is_empty() {
        out.push_str("\nheads with the largest worst-case bounds:\n");
        out.push_str(&ranked.into_iter().fold(Table::new(page::RANKED), Table::with).render());
    }
    if let Some((tone, verdict)) = page::verdict(inspection) {
        out.push_str(&format!("\n{}", toned(tone, &wrapped(&verdict, ""))));
    }
    out + &format!("Next: sigmascale stress checkpoint-load --model {} --tokens FILE\n", quoted(folder))
}
