//! `sigmascale bench`: times on this machine's GPU, as CSV in the columns of the usual Python scripts.

mod attention;
mod csv;
mod spectral;
mod timing;

use clap::Subcommand;
use sigmascale::Result;

/// Time the kernels on this GPU, as CSV
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Attention(attention::Args),
    #[command(visible_alias = "scales")]
    Spectral(spectral::Args),
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    match args.what {
        What::Attention(args) => attention::run(args),
        What::Spectral(args) => spectral::run(args),
    }
}
