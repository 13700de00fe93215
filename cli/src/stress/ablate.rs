//! `sigmascale stress ablate`: the paper's parameters, one at a time.

use super::open::open;
use super::sentences;
use crate::model::{Model, files};
use crate::named::named;
use crate::numbers::{count, whole};
use crate::output::OutputArgs;
use crate::progress;
use crate::table::{Table, brief, wrapped};
use serde::Serialize;
use sigmascale::{Error, Result};
use sigmascale_lab::stress::{AblationRow, Mode, Parameter, StressOptions, TokenFile, ablate};
use std::fmt::Write;
use std::path::PathBuf;

/// Vary eta, delta, the sequence length, kappa and the quantile one at a time, and report overflow and accuracy
#[derive(clap::Args)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// Preset name or config.json (synthetic weights), .safetensors file or checkpoint folder
    #[arg(long)]
    model: String,
    /// Parameters to vary, comma-separated [default: all]
    #[arg(long, value_name = "LIST", value_parser = named::<Parameter>(), value_delimiter = ',')]
    parameters: Vec<Parameter>,
    /// What is cast to E4M3; eta, delta and the sequence length are parameters of logit bounds
    #[arg(long, value_parser = named::<Mode>(), default_value = Mode::Logit.name())]
    mode: Mode,
    /// Run this text through the whole model instead of generated tokens
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// Run the first N layers [default: all; 4 with synthetic weights]
    #[arg(long, value_name = "N", value_parser = count)]
    layers: Option<usize>,
    /// Tokens per sequence where the length is not what varies
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = count)]
    seq_len: usize,
    /// Steps with new tokens; a quarter of them is the burn-in of auto-c
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = count)]
    steps: usize,
    /// Seed of synthetic weights and of tokens
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole)]
    seed: u64,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Serialize)]
struct Results {
    scenario: &'static str,
    model: String,
    mode: Mode,
    steps: usize,
    seq_len: usize,
    seed: u64,
    rows: Vec<AblationRow>,
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    args.output.check()?;
    let mut read: Vec<PathBuf> = Model::open(&args.model).map(|model| files(&args.model, &model)).unwrap_or_default();
    read.extend(args.tokens.clone());
    args.output.check_not_read(("-o", None), &read)?;
    let all = if args.parameters.is_empty() { &Parameter::ALL[..] } else { &args.parameters };
    if let Some(at) = (1..all.len()).find(|&at| all[..at].contains(&all[at])) {
        return Err(Error::argument(format_args!("duplicate parameter {}", all[at].name())));
    }
    if args.steps < 4 && all.iter().any(|parameter| matches!(parameter, Parameter::Kappa | Parameter::Quantile)) {
        return Err(Error::argument(format_args!(
            "steps {} must be at least 4 for kappa and quantile: a quarter of the steps is the burn-in",
            args.steps
        )));
    }
    let options = StressOptions {
        mode: args.mode,
        layers: args.layers,
        seq_len: args.seq_len,
        tokens: args.tokens.as_deref().map(TokenFile::read).transpose()?,
        steps: Some(args.steps),
        seed: args.seed,
        ..StressOptions::default()
    };
    let model = open(&args.model, &[], args.seed)?;
    let bar = progress::bar(0, "ablate: run {pos}/{len}", "");
    let rows = ablate(&model, &options, all, |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let results = Results {
        scenario: "ablate",
        model: model.spec().name.clone(),
        mode: options.mode,
        steps: args.steps,
        seq_len: args.seq_len,
        seed: args.seed,
        rows: rows?,
    };
    args.output.write(&results, table)
}

fn table(results: &Results) -> String {
    let headline = format!(
        "ablate, mode {}: {}, {} steps of {} tokens, seed {}",
        sentences::mode_name(results.mode),
        results.model,
        results.steps,
        results.seq_len,
        results.seed
    );
    let mut out = wrapped(&headline, "");
    for parameter in Parameter::ALL {
        let rows: Vec<&AblationRow> = results.rows.iter().filter(|row| row.parameter == parameter).collect();
        if rows.is_empty() {
            continue;
        }
        let mut table = Table::new([
            parameter.name(),
            "policy",
            "constant",
            "values overflowed",
            "largest / 448",
            "used % med",
            "SQNR dB",
            "softmax KL",
        ]);
        for row in rows {
            let paper = if Some(row.value) == parameter.of_the_paper() { " (paper)" } else { "" };
            table.row([
                format!("{}{paper}", row.value),
                row.policy.to_string(),
                format!("{:.4}", row.constant),
                sentences::percent(row.overflow_values, row.values),
                brief(row.largest),
                brief(100.0 * row.utilization.median),
                row.sqnr_db.map_or("-".to_owned(), |db| format!("{db:.1}")),
                row.softmax_kl.map_or("-".to_owned(), brief),
            ]);
        }
        let _ = write!(out, "\n{}", table.left().render());
    }
    out.push('\n');
    for remark in [
        "constant: what the worst-case bound is multiplied by; 1 is the worst case, c_star assumes isotropic tokens, and that \
         of auto-c is the largest of all layers at the end, which is 1 again after an overflow.",
        "Rows of quantile have kappa 1. The weights do not move: a transient is what the other scenarios are for.",
    ] {
        out.push_str(&wrapped(remark, "- "));
    }
    out
}
