//! `sigmascale diagnose`: which head of a run goes wrong first, and what to do.

mod conditions;
pub mod page;
mod sentences;

use super::html::{Made, Tone};
use super::numbers::{count, real};
use super::output::{OutputArgs, write_file};
use super::progress;
use super::table::{Table, wrapped};
use super::terminal::toned;
use sigmascale::{Error, Result};
use sigmascale_lab::diagnose::{Diagnosis, Options, RunVerdict, in_output_folder, read_checkpoints};
use sigmascale_lab::history::{History, read_records};
use std::path::{Path, PathBuf};

/// Find the head that goes wrong first in a training run, and what to do
///
/// Reads the record that sigmascale.torch.Monitor writes, or two or more checkpoints of one run. docs/diagnose.md
/// describes the alarms and their thresholds. With --model and --tokens it runs a text through one checkpoint instead, and
/// shows which heads have what the failure of BF16 attention needs.
///
/// Exit codes: 0 no alarm, 1 an alarm was raised, 2 wrong usage, 3 the record or a checkpoint cannot be read.
#[derive(clap::Args)]
pub struct Args {
    /// Record of a run (JSON Lines); or checkpoints of one run: folders or .safetensors files, sorted by the number at
    /// the end of their names; or the output folder of a trainer, which has one of both
    #[arg(required_unless_present = "model", value_name = "RUN|CHECKPOINTS")]
    paths: Vec<PathBuf>,
    /// |logit| at which the alarm logit-limit is raised where Q and K are in BF16 or FP8; in F16 8 times, in f32 65536
    /// times as large [default: 1000]
    #[arg(long, value_name = "LOGIT", value_parser = real, allow_negative_numbers = true)]
    logit_limit: Option<f64>,
    /// Growth of the norm of a head's W_Q that raises an alarm, as a fraction of the largest growth that the learning
    /// rate allows [default: 0.3]
    #[arg(long, value_name = "FRACTION", value_parser = real, allow_negative_numbers = true)]
    growth: Option<f64>,
    /// Number of records over which growth is estimated [default: 24]
    #[arg(long, value_name = "RECORDS", value_parser = count)]
    window: Option<usize>,
    /// Learning rate between the checkpoints, whose names must end in their steps; without it, their growth raises no
    /// alarm
    #[arg(long, value_name = "RATE", value_parser = real, allow_negative_numbers = true)]
    lr: Option<f64>,
    /// One checkpoint, through which a text is run in BF16's arithmetic
    #[arg(
        long,
        value_name = "FOLDER",
        requires = "tokens",
        conflicts_with_all = ["paths", "logit_limit", "growth", "window", "lr", "html"]
    )]
    model: Option<PathBuf>,
    /// The text, read by the tokenizer.json of the checkpoint; FILE.json is a JSON list of token ids
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// Length of each sequence in tokens; at most 16 sequences run [default: 256]
    #[arg(long, value_name = "N", value_parser = count)]
    seq_len: Option<usize>,
    /// Also write the result as an HTML page with the run's history to FILE
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command; whether no alarm was raised.
pub fn run(args: Args, made: &Made) -> Result<bool> {
    args.output.check()?;
    if let (Some(model), Some(tokens)) = (&args.model, &args.tokens) {
        return conditions::run(model, tokens, args.seq_len, &args.output).map(|()| true);
    }
    if args.tokens.is_some() || args.seq_len.is_some() {
        return Err(Error::argument(
            "--tokens and --seq-len need --model FOLDER, the checkpoint that a text is run through",
        ));
    }
    if let Some(file) = &args.html {
        args.output.check_other("--html", file)?;
    }
    args.output.check_not_read(("--html", args.html.as_deref()), &args.paths)?;
    let default = Options::default();
    let options = Options {
        logit_limit: args.logit_limit.unwrap_or(default.logit_limit),
        growth: args.growth.unwrap_or(default.growth),
        window: args.window.unwrap_or(default.window),
        ..default
    };
    options.check()?;
    let (diagnosis, history) = diagnose(&args.paths, args.lr, options)?;
    if let Some(file) = &args.html {
        write_file(file, page::render(&diagnosis, &history, made).as_bytes())?;
    }
    args.output.write(&diagnosis, |diagnosis| table(diagnosis, args.output.most_rows()))?;
    Ok(diagnosis.verdict == RunVerdict::Calm)
}

/// Of a record or a series of checkpoints, with the history that a page shows.
///
/// # Errors
/// As `read_records`, `read_checkpoints` and `Diagnosis::new`; `is_argument` where records and checkpoints are mixed.
fn diagnose(paths: &[PathBuf], lr: Option<f64>, options: Options) -> Result<(Diagnosis, History)> {
    let found = match paths {
        [folder] => in_output_folder(folder),
        _ => None,
    };
    let paths = found.as_deref().unwrap_or(paths);
    let (run, records) = match paths {
        [record] if is_record(record) => {
            if lr.is_some() {
                return Err(Error::argument("--lr is for checkpoints: a record has its learning rates"));
            }
            read_records(record)?
        }
        _ => {
            for path in paths {
                std::fs::metadata(path).map_err(|e| Error::io(path, "read", e))?;
            }
            if let Some(record) = paths.iter().find(|path| is_record(path)) {
                return Err(Error::argument(format_args!(
                    "{} is not a checkpoint folder or .safetensors file: pass one record of a run, or only checkpoints",
                    record.display()
                )));
            }
            let bar = progress::bar(0, "{msg}: {pos} layers", "diagnose");
            let read = read_checkpoints(paths, lr, &mut || {
                bar.inc(1);
                Ok(())
            })?;
            bar.finish_and_clear();
            read
        }
    };
    let diagnosis = Diagnosis::new(run.clone(), &records, options)?;
    Ok((diagnosis, History::new(run, records)))
}

/// Whether a path is a record rather than a checkpoint.
fn is_record(path: &Path) -> bool {
    !path.is_dir() && path.extension().is_none_or(|extension| extension != "safetensors")
}

fn table(diagnosis: &Diagnosis, most: usize) -> String {
    let mut out = wrapped(&sentences::headline(diagnosis), "");
    if !diagnosis.alarms.is_empty() {
        out.push('\n');
        let mut table = Table::new(sentences::ALARM_HEADS);
        diagnosis.alarms.iter().for_each(|alarm| table.row(sentences::alarm(alarm)));
        out.push_str(&table.left_last().render());
    }
    if !diagnosis.heads.is_empty() {
        out.push('\n');
        let mut table = Table::new(sentences::HEADS);
        let heads = sentences::worst(diagnosis);
        heads.iter().take(most).for_each(|head| table.row(sentences::head(head)));
        out.push_str(&table.render());
        if heads.len() > most {
            out.push_str(&format!("{} more heads (--all prints them)\n", heads.len() - most));
        }
        out.push_str(&wrapped(&sentences::legend(diagnosis), ""));
    }
    let tone = if diagnosis.verdict == RunVerdict::Calm { Tone::Good } else { Tone::Bad };
    out.push_str(&format!("\n{}", toned(tone, &wrapped(&sentences::verdict(diagnosis), ""))));
    if !diagnosis.alarms.is_empty() {
        out.push_str("What to do:\n");
        sentences::advice(diagnosis).iter().for_each(|advice| out.push_str(&wrapped(advice, "  - ")));
    }
    out
}
