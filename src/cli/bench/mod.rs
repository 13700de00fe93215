//! `sigmascale bench`: times on this machine's GPU, as CSV in the columns of the usual Python scripts.

mod attention;
mod spectral;

use clap::{Subcommand, ValueEnum};
use sigmascale::cuda::{Device, Event, Stream};
use sigmascale::file::{check_not_read, check_target, write_atomically};
use sigmascale::{Error, Result};
use std::io::Write;
use std::path::PathBuf;

/// GPU timings, as CSV
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Attention(attention::Args),
    Spectral(spectral::Args),
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    match args.what {
        What::Attention(args) => attention::run(args),
        What::Spectral(args) => spectral::run(args),
    }
}

/// Where the lines go.
#[derive(clap::Args)]
struct CsvArgs {
    /// Form of the result
    #[arg(long, value_enum, default_value = "csv")]
    format: Format,
    /// Write the result to FILE (by rename) instead of stdout
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// A comment on the machine, a head line, a line a measurement
    Csv,
}

/// Lines of a result: shown as they come, or kept for the file.
struct Csv {
    file: Option<PathBuf>,
    text: String,
}

impl Csv {
    /// Finds out before the work starts that the file cannot be written, or is one of those that are read.
    fn new(args: CsvArgs, read: impl IntoIterator<Item = PathBuf>) -> Result<Self> {
        let Format::Csv = args.format;
        if let Some(file) = &args.file {
            check_target(file)?;
            check_not_read("-o", file, read)?;
        }
        Ok(Self { file: args.file, text: String::new() })
    }

    fn line(&mut self, line: &str) {
        if self.file.is_none() {
            // A reader that stops reading is not a failure.
            let _ = writeln!(std::io::stdout(), "{line}").and_then(|()| std::io::stdout().flush());
        } else {
            self.text.push_str(line);
            self.text.push('\n');
        }
    }

    fn finish(self) -> Result<()> {
        self.file.map_or(Ok(()), |file| write_atomically(&file, self.text.as_bytes()))
    }
}

/// The GPU to measure on.
///
/// # Errors
/// If there is none, with what is missing.
fn device() -> Result<Device> {
    Device::open(0).map_err(|error| error.within("bench needs a GPU"))
}

/// Median time of one replay of `work`, captured as a CUDA graph, in microseconds.
fn median_us(stream: &Stream, work: impl FnMut(&Stream) -> Result<()>) -> Result<f64> {
    const REPLAYS: usize = 20;
    let graph = stream.capture(work)?;
    for _ in 0..3 {
        graph.launch()?;
    }
    let marks: Vec<(Event, Event)> = (0..REPLAYS)
        .map(|_| {
            let start = stream.record()?;
            graph.launch()?;
            Ok((start, stream.record()?))
        })
        .collect::<Result<_>>()?;
    stream.synchronize()?;
    let mut times = marks
        .iter()
        .map(|(start, end)| Ok(f64::from(start.milliseconds_to(end)?) * 1e3))
        .collect::<Result<Vec<f64>>>()?;
    times.sort_by(f64::total_cmp);
    times.get(REPLAYS / 2).copied().ok_or_else(|| Error::cuda("nothing was timed"))
}

/// Bytes a second of a copy of 2 GiB on the device, read and written bytes both counted.
fn copy_bandwidth(device: &Device, stream: &Stream) -> Result<f64> {
    const BYTES: usize = 2 << 30;
    const COPIES: usize = 10;
    let from = device.zeros::<u8>(BYTES)?;
    let mut to = device.allocate::<u8>(BYTES)?;
    for _ in 0..3 {
        to.copy_from(&from, stream)?;
    }
    let start = stream.record()?;
    for _ in 0..COPIES {
        to.copy_from(&from, stream)?;
    }
    let end = stream.record()?;
    Ok((2 * BYTES * COPIES) as f64 / (f64::from(start.milliseconds_to(&end)?) * 1e-3))
}
