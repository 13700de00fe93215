//! Where a result goes.

use super::progress;
use super::table::ROWS;
use super::target::{check_not_of_model, check_not_read, place_of};
use super::terminal;
use clap::{Args, ValueEnum};
use serde::Serialize;
use sigmascale::{Error, Result};
use sigmascale_lab::file::{check_target, write_atomically};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Options that every command has. `F`: the formats of its result.
#[derive(Args)]
pub struct OutputArgs<F: ValueEnum + Copy + Send + Sync + 'static = Format> {
    /// Format of the result
    #[arg(long, value_enum, default_value = "table")]
    format: F,
    /// Same as --format json
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// Print every row of long tables
    #[arg(long)]
    all: bool,
    /// Write the result to FILE instead of stdout; - is stdout
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    file: Option<PathBuf>,
}

/// Formats of a result.
#[derive(Clone, Copy, ValueEnum)]
pub enum Format {
    /// Text for people
    Table,
    /// JSON for scripts
    Json,
}

impl<F: ValueEnum + Copy + Into<Format> + Send + Sync + 'static> OutputArgs<F> {
    /// Finds out before the work starts that the file cannot be written, or would become part of a model.
    pub fn check(&self) -> Result<()> {
        let Some(file) = self.file() else { return Ok(()) };
        terminal::write_to_file();
        check_target(file)?;
        check_not_of_model("-o", file)
    }

    /// The same of another output of the command, which must be another file.
    pub fn check_other(&self, option: &str, other: &Path) -> Result<()> {
        if other == Path::new("-") {
            return Err(Error::argument(format_args!(
                "{option} needs a file, since stdout is for the result; {option} ./- is a file of this name"
            )));
        }
        check_target(other)?;
        check_not_of_model(option, other)?;
        match self.file() {
            Some(file) if place_of(file) == place_of(other) => Err(Error::argument(format_args!(
                "-o and {option} name the same file, {}: one would replace the other",
                file.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses to write over what the command reads, by this option or another.
    pub fn check_not_read(&self, other: (&str, Option<&Path>), read: &[PathBuf]) -> Result<()> {
        for (option, file) in [("-o", self.file()), other] {
            file.map_or(Ok(()), |file| check_not_read(option, file, read.iter().cloned()))?;
        }
        Ok(())
    }

    /// Rows of a table.
    pub fn most_rows(&self) -> usize {
        if self.all { usize::MAX } else { ROWS }
    }

    fn file(&self) -> Option<&Path> {
        self.file.as_deref().filter(|file| *file != Path::new("-"))
    }

    /// The format that was asked for; none where it is `--json`.
    pub fn format(&self) -> Option<F> {
        (!self.json).then_some(self.format)
    }

    /// Writes a result in the format asked for.
    pub fn write<T: Serialize>(&self, value: &T, table: impl FnOnce(&T) -> String) -> Result<()> {
        match self.format().map(Into::into) {
            Some(Format::Table) => self.write_text(&terminal::painted(&printable(&table(value)))),
            _ => self.write_json(value),
        }
    }

    /// Writes a result as JSON.
    pub fn write_json(&self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(value)
            .map_err(|e| Error::non_finite(format_args!("the result cannot be written as JSON: {e}")))?;
        self.write_text(&text)
    }

    /// Writes text as it is, with an end of line.
    pub fn write_text(&self, text: &str) -> Result<()> {
        let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
        let text = format!("{text}{end}");
        match self.file() {
            Some(file) => write_file(file, text.as_bytes()),
            None => write_stdout(&text),
        }
    }
}

/// Writes a file and confirms it on stderr.
pub fn write_file(file: &Path, bytes: &[u8]) -> Result<()> {
    write_atomically(file, bytes)?;
    if !progress::quiet() {
        // Nobody is left to tell if the terminal is gone.
        let _ = writeln!(std::io::stderr(), "wrote {}", printable(&file.display().to_string()));
    }
    Ok(())
}

/// Text without control characters, which could rewrite a terminal: names come from files.
pub fn printable(text: &str) -> String {
    text.replace(|c: char| is_unprintable(c) && c != '\n', " ")
}

/// Control characters, and those that have no width or turn the direction of what follows.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// A reader that stops reading (`| head`) is not a failure.
pub fn write_stdout(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::io(Path::new("stdout"), "write", error)),
        _ => Ok(()),
    }
}
