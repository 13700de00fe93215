//! Lines of CSV: printed as they come, or kept for a file.

use crate::output::write_file;
use crate::target::{check_not_of_model, check_not_read};
use clap::ValueEnum;
use sigmascale::Result;
use sigmascale_lab::file::check_target;
use std::io::Write;
use std::path::PathBuf;

/// Where the lines go.
#[derive(clap::Args)]
pub struct CsvArgs {
    /// Format of the result
    #[arg(long, value_enum, default_value = "csv")]
    format: Format,
    /// Write the result to FILE instead of stdout
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// A comment with the machine, a header, one line per measurement
    Csv,
}

/// Lines of a result.
pub struct Csv {
    file: Option<PathBuf>,
    text: String,
}

impl Csv {
    /// Finds out before the work starts that the file cannot be written, or is one of those that are read.
    pub fn new(args: CsvArgs, read: impl IntoIterator<Item = PathBuf>) -> Result<Self> {
        let Format::Csv = args.format;
        if let Some(file) = &args.file {
            check_target(file)?;
            check_not_of_model("-o", file)?;
            check_not_read("-o", file, read)?;
        }
        Ok(Self { file: args.file, text: String::new() })
    }

    /// Adds a line.
    pub fn line(&mut self, line: &str) {
        if self.file.is_none() {
            // A reader that stops reading is not a failure.
            let _ = writeln!(std::io::stdout(), "{line}").and_then(|()| std::io::stdout().flush());
        } else {
            self.text.push_str(line);
            self.text.push('\n');
        }
    }

    /// Writes the file.
    pub fn finish(self) -> Result<()> {
        self.file.map_or(Ok(()), |file| write_file(&file, self.text.as_bytes()))
    }
}
