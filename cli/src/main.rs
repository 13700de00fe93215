//! The `sigmascale` command. Everything is in [`sigmascale_cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(sigmascale_cli::run(std::env::args_os()))
}
