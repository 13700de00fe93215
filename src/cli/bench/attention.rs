//! `sigmascale bench attention`.

use super::CsvArgs;
use sigmascale::{Error, Result};

/// The attention kernel and its casts
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    output: CsvArgs,
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    let _ = args.output;
    Err(Error::unsupported("bench attention is not in this build"))
}
