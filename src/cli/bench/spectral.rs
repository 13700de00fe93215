//! `sigmascale bench spectral`: scales from weights, against one read of the weights.

use super::CsvArgs;
use sigmascale::{Error, Result};

/// Scales from weights in device memory, against one read of the weights
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    output: CsvArgs,
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    let _ = args.output;
    Err(Error::unsupported("bench spectral is not in this build"))
}
