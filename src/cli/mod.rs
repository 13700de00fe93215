//! The command line: parsed arguments become validated options of the library.
//!
//! Results go to stdout (or to `-o FILE`, by rename); logs and progress go to stderr. Exit codes: 0 done, 1 failed,
//! 2 usage (also when the library refuses an argument). One module a command.

#[cfg(feature = "cuda")]
mod bench;
mod calibrate;
mod doctor;
mod html;
mod inspect;
mod model;
mod output;
mod progress;
mod stress;
mod svg;
mod table;

use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// FP8 attention scales from the weights alone
#[derive(Parser)]
#[command(name = "sigmascale", version, about, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 usage. RUST_LOG=sigmascale=debug logs timings to stderr.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Calibrate(calibrate::Args),
    Inspect(inspect::Args),
    Stress(stress::Args),
    #[cfg(feature = "cuda")]
    Bench(bench::Args),
    Doctor(doctor::Args),
}

/// Parses, runs, reports; never panics on a closed pipe.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too; nobody is left to tell if the terminal is gone.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    // The runtime warns of every overflow; in the stress lab they are the result.
    let level = if matches!(cli.command, Command::Stress(_)) { "error" } else { "warn" };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .init();
    let result = match cli.command {
        Command::Calibrate(args) => calibrate::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Stress(args) => stress::run(args),
        #[cfg(feature = "cuda")]
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {}", output::printable(&error.to_string()));
            ExitCode::from(if error.is_argument() { 2 } else { 1 })
        }
    }
}
