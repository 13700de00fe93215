//! The command line: parsed arguments become validated options of the library.
//!
//! Results go to stdout (or to `-o FILE`, by rename); logs and progress go to stderr. One module per command.
//!
//! Exit codes: 0 done; 2 usage: an option that is unknown, breaks its rule or contradicts another one
//! (`Error::is_argument`); 1 everything else: a path that is missing, a file that cannot be read or bounded, no GPU. `verify` has
//! its own: 0 safe, 1 unsafe, 3 where the checkpoint cannot be read or bounded. So has `diagnose`: 0 no alarm, 1 an alarm was
//! raised, 3 where the record or a checkpoint cannot be read.

#![warn(missing_docs)]

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
mod progress;
mod shell;
mod stress;
mod svg;
mod table;
pub mod target;
mod verify;

pub use doctor::Fact;

use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use tracing_subscriber::EnvFilter;

/// Compute, export, audit and compare FP8 attention scales from the weights of a model
#[derive(Parser)]
#[command(name = "sigmascale", version, about, arg_required_else_help = true)]
#[command(after_help = "Examples:
  sigmascale calibrate FOLDER                          scales that the weights need
  sigmascale verify FOLDER                             can the stored FP8 scales overflow?
  sigmascale export FOLDER --to NEW --for vllm         a checkpoint with scales for vLLM
  sigmascale stress checkpoint-load --model FOLDER
                                                       six scaling policies on fresh weights
  sigmascale diagnose run.jsonl                        which head went wrong first, and what to do

Results go to stdout, logs and progress to stderr; RUST_LOG=sigmascale=debug logs timings.
Exit codes: 0 done, 1 failed, 2 wrong usage; verify: 0 safe, 1 not safe or unknown, 3 unreadable;
diagnose: 0 no alarm, 1 alarm, 3 unreadable.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
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
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
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
    // The runtime warns of every overflow; in the stress lab they are the result.
    let level = if matches!(cli.command, Command::Stress(_)) { "error" } else { "warn" };
    let filter = match std::env::var("RUST_LOG").unwrap_or_default() {
        none if none.is_empty() => EnvFilter::new(level),
        asked => EnvFilter::try_new(&asked).unwrap_or_else(|error| {
            let rule = format!("RUST_LOG={asked} is ignored: {error}; an example is RUST_LOG=sigmascale=debug");
            let _ = writeln!(std::io::stderr(), "warning: {}", output::printable(&rule));
            EnvFilter::new(level)
        }),
    };
    // A process that logs already keeps its own subscriber.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Log lines are plain everywhere: colors would need another feature.
        .with_ansi(false)
        .with_writer(|| progress::Log)
        .log_internal_errors(false)
        .try_init();
    let failed = if matches!(cli.command, Command::Verify(_) | Command::Diagnose(_)) { 3 } else { 1 };
    let result = match cli.command {
        Command::Calibrate(args) => calibrate::run(args),
        Command::Inspect(args) => inspect::run(args, &made),
        Command::Export(args) => export::run(args),
        Command::Verify(args) => match verify::run(args, &made) {
            Ok(false) => return 1,
            safe => safe.map(|_| ()),
        },
        Command::Diagnose(args) => match diagnose::run(args, &made) {
            Ok(false) => return 1,
            calm => calm.map(|_| ()),
        },
        Command::Stress(args) => stress::run(*args, &made),
        #[cfg(feature = "cuda")]
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args, plugins),
        Command::Families(args) => families::run(args),
        Command::Completions(args) => shell::completions(args, Cli::command()),
        Command::Man(args) => shell::man(args, Cli::command()),
    };
    match result {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {}", output::printable(&error.to_string()));
            if error.is_argument() { 2 } else { failed }
        }
    }
}
