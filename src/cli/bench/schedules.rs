//! `sigmascale bench spectral --schedules`: the scale engine's launches arranged in other ways, in turn with those that it has.

use super::csv::Csv;
use crate::cuda::{Buffer, Device, Graph, Stream};
use crate::device::scale::{DeviceWeights, ScaleEngine, Schedule};
use crate::{Error, Result};
use std::sync::Arc;

const OFF: Schedule = Schedule { overlap: false, split: false, even: false, far: false };
const SCHEDULES: [(&str, Schedule); 6] = [
    ("default", OFF),
    ("overlap", Schedule { overlap: true, ..OFF }),
    ("split", Schedule { split: true, ..OFF }),
    ("even", Schedule { even: true, ..OFF }),
    ("far", Schedule { far: true, ..OFF }),
    ("all", Schedule::ALL),
];

/// Rounds of every contender.
const ROUNDS: usize = 31;

/// Columns of [`measure`].
pub const HEADER: &str = "model,layers,method,schedule,us,smallest,largest,ratio_to_read";

/// Results of an engine, as words: what is compared bit for bit.
fn results(engine: &ScaleEngine) -> Result<Vec<u32>> {
    let bits = |values: &Buffer<f32>| Ok::<_, Error>(values.read()?.into_iter().map(f32::to_bits).collect::<Vec<_>>());
    let mut all =
        [bits(engine.head_descales())?, bits(engine.tensor_descales())?, bits(engine.operand_bounds())?].concat();
    all.extend(engine.status().read()?);
    if let Some(bounds) = engine.head_bounds() {
        all.extend_from_slice(bytemuck::cast_slice(&bounds.read()?));
    }
    Ok(all)
}

/// Times descales and plans by each schedule in turn, every one behind a read of `others`, which fills the L2 cache, and after a
/// check that all give the same bits. `read`: microseconds of one read of all weights.
pub fn measure(
    device: &Device,
    stream: &Stream,
    (name, layers): (&str, usize),
    weights: &Arc<DeviceWeights>,
    others: &Arc<DeviceWeights>,
    read: f64,
    csv: &mut Csv,
) -> Result<()> {
    type Method = (&'static str, fn(&ScaleEngine, &Stream) -> Result<()>);
    let methods: [Method; 2] = [("operand_descales", ScaleEngine::descales), ("plan", ScaleEngine::plan)];
    let make = |(_, schedule)| ScaleEngine::scheduled_over(device, weights, true, schedule);
    let engines = SCHEDULES.into_iter().map(make).collect::<Result<Vec<_>>>()?;
    for (method, work) in methods {
        let mut expected = None;
        for ((schedule, _), engine) in SCHEDULES.iter().zip(&engines) {
            work(engine, stream)?;
            stream.synchronize()?;
            let bits = results(engine)?;
            if expected.get_or_insert_with(|| bits.clone()) != &bits {
                return Err(Error::cuda(format_args!("{name}: {method} with the schedule {schedule} has other bits")));
            }
        }
    }
    let cold = ScaleEngine::over(device, others, false)?;
    let empty = device.zeros::<u32>(1)?;
    let mut contenders: Vec<(&str, &str, Graph<'_>)> = vec![("nothing", "", stream.capture(|s| empty.clear(s))?)];
    for (method, work) in methods {
        for ((schedule, _), engine) in SCHEDULES.iter().zip(&engines) {
            contenders.push((method, *schedule, stream.capture(move |s| work(engine, s))?));
        }
    }
    let mut times = vec![Vec::new(); contenders.len()];
    for round in 0..ROUNDS + 2 {
        for ((_, _, graph), times) in contenders.iter().zip(&mut times) {
            cold.descales(stream)?;
            let start = stream.record()?;
            graph.launch()?;
            let us = 1e3 * f64::from(start.milliseconds_to(&stream.record()?)?);
            if round >= 2 {
                times.push(us);
            }
        }
    }
    for ((method, schedule, _), mut times) in contenders.iter().zip(times) {
        times.sort_by(f64::total_cmp);
        let [Some(least), Some(middle), Some(most)] = [0, ROUNDS / 2, ROUNDS - 1].map(|i| times.get(i)) else {
            continue;
        };
        csv.line(&format!("{name},{layers},{method},{schedule},{middle:.2},{least:.2},{most:.2},{:.3}", middle / read));
    }
    Ok(())
}
