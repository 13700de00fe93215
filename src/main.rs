//! The `sigmascale` command. Everything is in [`sigmascale::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(sigmascale::cli::run(std::env::args_os()))
}
