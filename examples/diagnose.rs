//! How early `diagnose` sees the failure of BF16 attention, and whether it is silent on runs that do not fail.
//!
//! Trains the head of `stress::low_precision` with and without remedies and prints a line of CSV for each run; then one
//! for each record that is named, as `train_gpt.py --monitor` writes them. Thresholds were chosen on the runs marked
//! `tuning`, which an earlier construction of the head made (`docs/diagnose.md`).
//!
//! ```console
//! $ cargo run --example diagnose -- [RECORD..] > lead.csv
//! ```
//!
//! `loss_shows`: first step at which the mean of the last 50 losses is 10 % above the smallest such mean before;
//! `loss_doubles`: at which it is twice the mean of the first 50; `lead`: steps from the first alarm to `loss_shows`.

use sigmascale::diagnose::{Diagnosis, LOSS_WINDOW, Options};
use sigmascale::history::{History, Record, read_records};
use sigmascale::stress::{LowPrecisionOptions, Remedy, low_precision};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Remedy, whether values have one sign, seeds, rate, steps, part.
type Runs = (Remedy, bool, std::ops::Range<u64>, f32, u64, &'static str);

const RUNS: [Runs; 13] = [
    (Remedy::None, true, 0..3, 1e-3, 1600, "tuning"),
    (Remedy::F32, true, 0..1, 1e-3, 1600, "tuning"),
    (Remedy::F32Output, true, 0..1, 1e-3, 1600, "tuning"),
    (Remedy::None, true, 3..6, 1e-3, 1600, "held-out"),
    (Remedy::None, true, 6..7, 2e-3, 1000, "held-out"),
    (Remedy::StabilisedFixed, true, 3..6, 1e-3, 1600, "held-out"),
    (Remedy::F32Pv, true, 3..4, 1e-3, 1600, "held-out"),
    (Remedy::F32, true, 3..6, 1e-3, 1600, "held-out"),
    (Remedy::F32, true, 6..8, 2e-3, 1600, "held-out"),
    (Remedy::F32Output, true, 3..6, 1e-3, 1600, "held-out"),
    (Remedy::Stabilised, true, 3..6, 1e-3, 1600, "held-out"),
    (Remedy::DeltaFromP, true, 3..6, 1e-3, 1600, "held-out"),
    (Remedy::F32, false, 3..5, 5e-4, 1600, "held-out"),
];

fn main() -> sigmascale::Result<()> {
    println!(
        "part,run,seed,rate,steps,verdict,first_alarm,layer,head,since,raised,loss_shows,loss_doubles,lead,kinds_raised"
    );
    let all: Vec<(LowPrecisionOptions, &str)> = RUNS
        .into_iter()
        .flat_map(|(remedy, one_sign, seeds, rate, steps, part)| {
            seeds.map(move |seed| {
                // One head, whose values have one sign or not.
                let (heads, head, f32_head) = (1, one_sign.then_some(0), 0);
                let default = LowPrecisionOptions::default();
                (LowPrecisionOptions { remedy, heads, head, f32_head, seed, rate, steps, ..default }, part)
            })
        })
        .collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some((options, part)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let name = options.remedy.name();
                    let sign = if options.head.is_some() { "" } else { "-two-signs" };
                    let line = low_precision(options, |_| ()).and_then(|run| {
                        let history = run.history;
                        // The order in which a run writes: a step, then its layers.
                        let steps = history.steps.iter().cloned().map(|step| (step.step, 0, Record::Step(step)));
                        let layers = history.layers.iter().cloned().map(|layer| (layer.step, 1, Record::Layer(layer)));
                        let mut records: Vec<_> = steps.chain(layers).collect();
                        records.sort_by_key(|(step, kind, _)| (*step, *kind));
                        let records: Vec<Record> = records.into_iter().map(|(.., record)| record).collect();
                        verdict(&history, &records)
                    });
                    match line {
                        Ok(line) => println!(
                            "{part},lab-{name}{sign},{},{},{},{line}",
                            options.seed, options.rate, options.steps
                        ),
                        Err(error) => eprintln!("{options:?}: {error}"),
                    }
                }
            });
        }
    });
    for file in std::env::args().skip(1) {
        let (run, records) = read_records(Path::new(&file))?;
        let history = History::new(run, records.clone());
        let name = Path::new(&file).file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let part = if name.contains("tuning") { "tuning" } else { "held-out" };
        println!("{part},{name},,,{},{}", history.steps.len(), verdict(&history, &records)?);
    }
    Ok(())
}

/// The columns from `verdict` on.
fn verdict(history: &History, records: &[Record]) -> sigmascale::Result<String> {
    let diagnosis = Diagnosis::new(history.run.clone(), records, Options::default())?;
    let shown = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let first = diagnosis.first.as_ref();
    let verdict = if first.is_some() { "alarm" } else { "calm" };
    let mut kinds: Vec<&str> = diagnosis.alarms.iter().map(|alarm| alarm.kind.name()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    Ok([
        verdict.to_owned(),
        shown(first.map(|alarm| alarm.kind.name().to_owned())),
        shown(first.and_then(|alarm| alarm.layer).map(|layer| layer.to_string())),
        shown(first.and_then(|alarm| alarm.head).map(|head| head.to_string())),
        shown(first.map(|alarm| alarm.since.to_string())),
        shown(first.map(|alarm| alarm.raised.to_string())),
        shown(diagnosis.loss_shows.map(|step| step.to_string())),
        shown(doubles(history).map(|step| step.to_string())),
        shown(diagnosis.lead.map(|lead| lead.to_string())),
        kinds.join(" "),
    ]
    .join(","))
}

/// First step at which the mean of the last losses is twice that of the first.
fn doubles(history: &History) -> Option<u64> {
    let losses: Vec<f64> = history.steps.iter().filter_map(|step| step.loss).collect();
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let start = mean(losses.get(..LOSS_WINDOW)?);
    let at = losses.windows(LOSS_WINDOW).position(|window| mean(window) > 2.0 * start)?;
    history.steps.get(at + LOSS_WINDOW - 1).map(|step| step.step)
}
