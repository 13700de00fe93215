//! The command line: parsed arguments become validated options of the library.
//!
//! Results go to stdout (or to `-o FILE`, by rename); logs and progress go to stderr. One module per command.
//!
//! Exit codes: 0 done; 2 usage: an option that is unknown, breaks its rule or contradicts another one
//! (`Error::is_argument`); 1 everything else: a path that is missing, a file that cannot be read or bounded, no GPU. `verify` has
//! its own: 0 safe, 1 unsafe, 3 where the checkpoint cannot be read or bounded. So has `diagnose`: 0 no alarm, 1 an alarm was
//! raised, 3 where the record or a checkpoint cannot be read.

#![warn(missing_docs)]

mod annotations;
#[cfg(feature = "cuda")]
mod bench;
mod calibrate;
mod centers;
mod chart;
mod diagnose;
mod doctor;
mod export;
mod families;
mod html;
mod inspect;
mod mla;
mod model;
mod named;
mod numbers;
mod output;
pub mod pages;
pub mod progress;
pub mod report;
mod shell;
mod stress;
mod svg;
mod table;
pub mod target;
mod terminal;
mod verify;

pub use doctor::Fact;

use clap::error::{ContextKind, ContextValue, ErrorKind as Usage};
use clap::{ArgAction, CommandFactory, Parser, Subcommand};
use serde::Serialize;
use sigmascale::Error;
use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::time::Instant;
use tracing_subscriber::EnvFilter;

/// Compute, export, audit and compare FP8 attention scales from the weights of a model
#[derive(Parser)]
#[command(name = "sigmascale", version, about, arg_required_else_help = true, max_term_width = 118)]
#[command(after_help = "Examples:
  sigmascale verify FOLDER                        can its FP8 scales overflow?
  sigmascale export FOLDER --to NEW --for vllm    a checkpoint with scales
  sigmascale calibrate FOLDER                     scales that the weights need
  sigmascale stress weight-spike --model FOLDER   six policies side by side
  sigmascale diagnose run.jsonl                   which head went wrong first

Results go to stdout, logs and progress to stderr. With --json, errors are JSON
too. Exit codes: 0 done, 1 failed, 2 wrong usage; verify: 0 safe, 1 not safe or
unknown, 3 unreadable; diagnose: 0 no alarm, 1 alarm, 3 unreadable.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Write nothing to stderr but errors: no progress, no warnings, no names of written files
    #[arg(short, long, global = true, help_heading = "Logs")]
    quiet: bool,
    /// Log what is read and how long it takes; -vv also how (RUST_LOG=sigmascale=debug is the same)
    #[arg(short, long, global = true, action = ArgAction::Count, conflicts_with = "quiet", help_heading = "Logs")]
    verbose: u8,
}

/// What went wrong, for scripts.
#[derive(Serialize)]
struct Failure {
    error: FailureFacts,
}

#[derive(Serialize)]
struct FailureFacts {
    kind: &'static str,
    message: String,
    exit_code: u8,
}

/// Says what went wrong on stderr, as JSON where the result would have been JSON.
fn report(kind: &'static str, message: String, exit_code: u8, json: bool) -> u8 {
    let line = match json
        .then(|| serde_json::to_string(&Failure { error: FailureFacts { kind, message: message.clone(), exit_code } }))
    {
        Some(Ok(line)) => line,
        _ => format!("error: {}", output::printable(&message)),
    };
    let _ = writeln!(std::io::stderr(), "{line}");
    exit_code
}

/// The kind of an error, as its predicates name it.
fn kind(error: &Error) -> &'static str {
    let kinds = [
        (error.is_argument(), "argument"),
        (error.is_io(), "io"),
        (error.is_format(), "format"),
        (error.is_unsupported(), "unsupported"),
        (error.is_non_finite(), "non-finite"),
        (error.is_mismatch(), "mismatch"),
        (error.is_cuda(), "cuda"),
    ];
    kinds.into_iter().find_map(|(is, name)| is.then_some(name)).unwrap_or("other")
}

/// Whether these arguments ask for JSON; read from the words, since an error may be about them.
fn asks_for_json(args: &[OsString]) -> bool {
    let words: Vec<_> = args.iter().map(|word| word.to_string_lossy()).collect();
    let format = |pair: &[std::borrow::Cow<'_, str>]| pair[0] == "--format" && pair[1] == "json";
    words.iter().any(|word| word == "--json" || word == "--format=json") || words.windows(2).any(format)
}

#[derive(Subcommand)]
enum Command {
    Calibrate(calibrate::Args),
    Inspect(inspect::Args),
    Export(export::Args),
    Verify(verify::Args),
    Diagnose(diagnose::Args),
    Stress(Box<stress::Args>),
    #[cfg(feature = "cuda")]
    Bench(bench::Args),
    Doctor(doctor::Args),
    Families(families::Args),
    Completions(shell::CompletionsArgs),
    Man(shell::ManArgs),
}

/// Parses the arguments, the command's name first, runs, reports, and returns the exit code. Never panics on a closed pipe.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    run_with(args, Vec::new())
}

/// The same, where `doctor` also reports these plugins of serving engines, which the Python package knows of.
pub fn run_with(args: impl IntoIterator<Item = OsString>, plugins: Vec<Fact>) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    let made = html::Made::by(&args);
    let json = asks_for_json(&args);
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) if json && !matches!(error.kind(), Usage::DisplayHelp | Usage::DisplayVersion) => {
            let text = error.render().to_string();
            return report("usage", text.trim().trim_start_matches("error: ").to_owned(), 2, true);
        }
        Err(error) if stray_model(&error).is_some() => {
            let model = stray_model(&error).unwrap_or_default();
            let message = format!("unexpected argument '{model}': a model is given as --model {model}");
            return report("usage", message, 2, false);
        }
        Err(error) => {
            // Help and version come this way too. A reader that is gone is no failure.
            return match error.print() {
                Err(unwritten) if unwritten.kind() != ErrorKind::BrokenPipe => {
                    let _ = writeln!(std::io::stderr(), "error: cannot write: {unwritten}");
                    1
                }
                _ => u8::try_from(error.exit_code()).unwrap_or(2),
            };
        }
    };
    if cli.quiet {
        progress::be_quiet();
    }
    let filter = filter(&cli);
    // A process that logs already keeps its own subscriber.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Log lines are plain everywhere: colors would need another feature.
        .with_ansi(false)
        .with_writer(|| progress::Log)
        .log_internal_errors(false)
        .try_init();
    let start = Instant::now();
    let failed = if matches!(cli.command, Command::Verify(_) | Command::Diagnose(_)) { 3 } else { 1 };
    let done = |result: sigmascale::Result<()>| result.map(|()| 0);
    let result = match cli.command {
        Command::Calibrate(args) => done(calibrate::run(args)),
        Command::Inspect(args) => done(inspect::run(args, &made)),
        Command::Export(args) => done(export::run(args)),
        Command::Verify(args) => verify::run(args, &made).map(|safe| u8::from(!safe)),
        Command::Diagnose(args) => diagnose::run(args, &made).map(|calm| u8::from(!calm)),
        Command::Stress(args) => done(stress::run(*args, &made)),
        #[cfg(feature = "cuda")]
        Command::Bench(args) => done(bench::run(args)),
        Command::Doctor(args) => done(doctor::run(args, plugins)),
        Command::Families(args) => done(families::run(args)),
        Command::Completions(args) => done(shell::completions(args, Cli::command())),
        Command::Man(args) => done(shell::man(args, Cli::command())),
    };
    tracing::info!(seconds = start.elapsed().as_secs_f64(), "done");
    result.unwrap_or_else(|error| {
        report(kind(&error), error.to_string(), if error.is_argument() { 2 } else { failed }, json)
    })
}

/// The word where `stress SCENARIO` takes options alone, which is mostly the model.
fn stray_model(error: &clap::Error) -> Option<String> {
    let context = match error.kind() {
        Usage::UnknownArgument => ContextKind::InvalidArg,
        // A word behind the scenario could be a study.
        Usage::ArgumentConflict => ContextKind::InvalidSubcommand,
        _ => return None,
    };
    let Some(ContextValue::String(word)) = error.get(context) else { return None };
    let stress = error.get(ContextKind::Usage)?.to_string().contains("sigmascale stress");
    let known = ["low-precision", "ablate", "help"].contains(&word.as_str());
    (stress && !known && !word.starts_with('-')).then(|| word.clone())
}

/// What is logged: by -q and -v, or else by RUST_LOG.
fn filter(cli: &Cli) -> EnvFilter {
    // The runtime warns of every overflow; in the stress lab they are the result.
    let stress = matches!(cli.command, Command::Stress(_));
    let level = match (cli.quiet, cli.verbose) {
        (true, _) => "error",
        (_, 0) if stress => "error",
        (_, 0) => "warn",
        (_, 1) => "info",
        (_, _) => "debug",
    };
    let asked = std::env::var("RUST_LOG").unwrap_or_default();
    if cli.quiet || cli.verbose > 0 || asked.is_empty() {
        return EnvFilter::new(level);
    }
    EnvFilter::try_new(&asked).unwrap_or_else(|error| {
        let rule = format!("RUST_LOG={asked} is ignored: {error}; an example is RUST_LOG=sigmascale=debug");
        let _ = writeln!(std::io::stderr(), "warning: {}", output::printable(&rule));
        EnvFilter::new(level)
    })
}
