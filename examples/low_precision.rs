//! Trains the head of `stress::low_precision` under every remedy, prints a table and writes each run's record.
//!
//! ```console
//! $ cargo run --example low_precision -- FOLDER [SEED] [STEPS]
//! ```

use sigmascale::stress::{LowPrecisionOptions, Remedy, low_precision};
use std::path::PathBuf;

fn main() -> sigmascale::Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = PathBuf::from(args.next().unwrap_or_else(|| ".".into()));
    let seed = args.next().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let steps = args.next().and_then(|steps| steps.parse().ok()).unwrap_or(1600);
    println!(
        "remedy, loss at the start and at the end, step at which it doubled, norm of W_Q at the start and at the end, sum of \
         delta's bias"
    );
    std::thread::scope(|scope| {
        let run = |remedy| move || low_precision(&LowPrecisionOptions { remedy, seed, steps, ..Default::default() });
        let runs: Vec<_> = Remedy::ALL.into_iter().map(|remedy| (remedy, scope.spawn(run(remedy)))).collect();
        for (remedy, run) in runs {
            let history = run.join().expect("a run does not panic")?;
            let mean = |steps: &[sigmascale::history::StepRecord]| {
                steps.iter().filter_map(|step| step.loss).sum::<f64>() / steps.len() as f64
            };
            let window = history.steps.len().min(50);
            let (first, last) = (&history.steps[..window], &history.steps[history.steps.len() - window..]);
            let norms: Vec<f64> = history.layers.iter().map(|layer| layer.w_q[0]).collect();
            let bias: f64 = history.layers.iter().map(|layer| layer.delta_bias[0]).sum();
            let start = mean(first);
            let doubled = history.steps.windows(window).position(|steps| mean(steps) > 2.0 * start);
            let doubled = doubled.map_or("-".into(), |at| (at + window - 1).to_string());
            let name = format!("{remedy:?}").to_lowercase();
            println!(
                "{name}, {start:.4}, {:.4}, {doubled}, {:.2}, {:.2}, {bias:.5}",
                mean(last),
                norms[0],
                norms[norms.len() - 1]
            );
            history.write(&folder.join(format!("{name}-seed{seed}.jsonl")))?;
        }
        Ok(())
    })
}
