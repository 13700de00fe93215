//! The GPU and its clock.

use sigmascale::cuda::{Device, Event, Stream};
use sigmascale::{Error, Result};

/// The GPU to measure on.
///
/// # Errors
/// If there is none, with what is missing.
pub fn device() -> Result<Device> {
    Device::open(0).map_err(|error| error.within("bench needs a GPU"))
}

/// Median time of one replay of `work`, captured as a CUDA graph, in microseconds.
pub fn median_us(stream: &Stream, work: impl FnMut(&Stream) -> Result<()>) -> Result<f64> {
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
pub fn copy_bandwidth(device: &Device, stream: &Stream) -> Result<f64> {
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
