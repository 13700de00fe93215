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
    /// Write the result to FILE (by rename) instead of stdout; - is stdout
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
        self.file().map_or(Ok(()), check_target)
    }

    /// Refuses another output of the command that is the same file.
    pub fn check_apart(&self, option: &str, other: &Path) -> Result<()> {
        match self.file() {
            Some(file) if place(file) == place(other) => Err(Error::argument(format_args!(
                "-o and {option} name the same file, {}, and one would replace the other",
                file.display()
            ))),
            _ => Ok(()),
        }
    }

    fn file(&self) -> Option<&Path> {
        self.file.as_deref().filter(|file| *file != Path::new("-"))
    }

    /// Writes a result in the form asked for.
    pub fn write<T: Serialize>(&self, value: &T, table: impl FnOnce(&T) -> String) -> Result<()> {
        let mut text = match self.format {
            Format::Table => printable(&table(value)),
            Format::Json => serde_json::to_string_pretty(value)
                .map_err(|e| Error::non_finite(format_args!("the result cannot be written as JSON: {e}")))?,
        };
        if !text.ends_with('\n') {
            text.push('\n');
        }
        match self.file() {
            Some(file) => write_atomically(file, text.as_bytes()),
            None => write_stdout(&text),
        }
    }
}

/// Text without control characters, which could rewrite a terminal: names come from files.
pub fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control() && c != '\n', " ")
}

/// Where a file is or will be, whatever the path to it looks like.
fn place(file: &Path) -> PathBuf {
    if let Ok(place) = file.canonicalize() {
        return place;
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    file.file_name().map_or_else(|| folder.clone(), |name| folder.join(name))
}

/// A reader that stops reading (`| head`) is not a failure.
fn write_stdout(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::io(Path::new("stdout"), "write", error)),
        _ => Ok(()),
    }
}
