//! Where a result goes.

use clap::{Args, ValueEnum};
use serde::Serialize;
use sigmascale::file::{check_target, write_atomically};
use sigmascale::{Error, Result};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Options that every command has.
#[derive(Args)]
pub struct OutputArgs {
    /// Form of the result
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
    /// Write the result to FILE (by rename) instead of stdout
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    file: Option<PathBuf>,
}

/// Forms of a result.
#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// For people
    Table,
    /// For scripts
    Json,
}

impl OutputArgs {
    /// Finds out before the work starts that the file cannot be written.
    pub fn check(&self) -> Result<()> {
        self.file.as_deref().map_or(Ok(()), check_target)
    }

    /// Writes a result in the form asked for.
    pub fn write<T: Serialize>(&self, value: &T, table: impl FnOnce(&T) -> String) -> Result<()> {
        let mut text = match self.format {
            Format::Table => table(value),
            Format::Json => serde_json::to_string_pretty(value)
                .map_err(|e| Error::non_finite(format_args!("the result cannot be written as JSON: {e}")))?,
        };
        if !text.ends_with('\n') {
            text.push('\n');
        }
        match &self.file {
            Some(file) => write_atomically(file, text.as_bytes()),
            None => write_stdout(&text),
        }
    }
}

/// A reader that stops reading (`| head`) is not a failure.
fn write_stdout(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::io(Path::new("stdout"), "write", error)),
        _ => Ok(()),
    }
}
