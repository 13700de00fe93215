//! Training under every policy over several seeds, as Markdown:
//! `cargo run --release --example training -- seeds|peaks|regimes [MODEL] [SEEDS] [ONLY]`.
//!
//! `seeds` runs `lr-spike` and `resume` (or ONLY one) in both modes and with both kinds of casts; `peaks` tells how close
//! training came to the end of the range under the worst-case bound; `regimes` looks for settings (those with ONLY in their name) in
//! which the policy matters. `data/training` holds the committed results.

use rayon::prelude::*;
use sigmascale::fp8::OnOverflow;
use sigmascale::policy::{PolicyConfig, PolicyKind, ScaledTensor};
use sigmascale::{Error, Result};
use sigmascale_lab::stress::{Mode, Scenario};
use sigmascale_lab::train::{Arm, LabOptions, ModelKind, Spread, TrainOptions, TrainResult, TrainRun, Trainer, run};
use std::time::Instant;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let what = args.first().map_or("seeds", String::as_str);
    let name = args.get(1).map_or("tiny-llama-train", String::as_str);
    let model: ModelKind = name.parse()?;
    let seeds: u64 = args.get(2).map_or(Ok(5), |count| count.parse()).unwrap_or(0);
    if !(1..=1000).contains(&seeds) {
        return Err(Error::argument("SEEDS must lie between 1 and 1000"));
    }
    let start = Instant::now();
    match what {
        "seeds" => seed_tables(model, seeds, args.get(3).map(String::as_str))?,
        "peaks" => peaks(model, seeds)?,
        "regimes" => regimes(model, seeds, args.get(3).map(String::as_str))?,
        other => return Err(Error::argument(format_args!("{other}: the tables are seeds, peaks and regimes"))),
    }
    eprintln!("{:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn mode_name(mode: Mode) -> &'static str {
    if mode == Mode::Logit { "logit" } else { "operands" }
}

fn label(policy: Option<PolicyKind>) -> &'static str {
    policy.map_or("f32 attention", PolicyKind::name)
}

/// `median (min..max)`, or the one value that all seeds have.
fn spread(values: impl IntoIterator<Item = f64>, digits: usize) -> String {
    match Spread::of(values) {
        None => "-".into(),
        Some(Spread { min, max, .. }) if min == max => format!("{min:.digits$}"),
        Some(Spread { min, median, max }) => format!("{median:.digits$} ({min:.digits$}..{max:.digits$})"),
    }
}

/// Differences from the control, seed by seed, and in how many seeds the loss was above it.
fn beside(losses: &[f64], control: &[f64]) -> String {
    let minus: Vec<f64> = losses.iter().zip(control).map(|(loss, control)| loss - control).collect();
    let above = minus.iter().filter(|minus| **minus > 0.0).count();
    format!("{} | {above} of {}", spread(minus.iter().copied(), 4), minus.len())
}

/// Runs of one policy, casts and arm, one a seed.
fn of(results: &[TrainResult], policy: Option<PolicyKind>, casts: OnOverflow, arm: Arm) -> Vec<&TrainRun> {
    let fits = |run: &&TrainRun| run.policy == policy && run.casts == casts && run.arm == arm;
    results.iter().filter_map(|result| result.training.runs.iter().find(fits)).collect()
}

/// Those with `only` in their name.
fn chosen<T>(
    all: impl IntoIterator<Item = T>,
    only: Option<&str>,
    name: impl Fn(&T) -> &'static str,
) -> Result<Vec<T>> {
    let found: Vec<T> = all.into_iter().filter(|one| only.is_none_or(|part| name(one).contains(part))).collect();
    if found.is_empty() {
        return Err(Error::argument(format_args!("nothing here has {:?} in its name", only.unwrap_or_default())));
    }
    Ok(found)
}

fn seed_tables(model: ModelKind, seeds: u64, only: Option<&str>) -> Result<()> {
    println!("# {}, {seeds} seeds\n", model.name());
    println!("Cells are the median over the seeds, with smallest and largest where they differ.\n");
    for scenario in chosen([Scenario::LrSpike, Scenario::Resume], only, |scenario| scenario.name())? {
        for mode in [Mode::Logit, Mode::Operands] {
            let mut results = Vec::new();
            for seed in 0..seeds {
                let base = LabOptions::new(model);
                let train = TrainOptions { seed, compare: false, ..base.train };
                results.push(run(scenario, &LabOptions { train, mode, ..base })?);
                eprintln!("{} {} seed {seed}", scenario.name(), mode_name(mode));
            }
            table(scenario, mode, &results);
        }
    }
    Ok(())
}

/// Largest |x / descale| under the worst-case bound, a rate spike included.
fn peaks(model: ModelKind, seeds: u64) -> Result<()> {
    println!("# {}: largest |x / descale| under the worst-case bound, {seeds} seeds\n", model.name());
    println!(
        "`lr-spike`, 150 steps: geometry's own run and in shadow on f32. 448 is the end; the bound on logits is mapped"
    );
    println!("onto 358.4, that on o onto 224.\n");
    println!("| mode | tensor | peak | step of it | layer |\n|---|---|---|---|---|");
    for mode in [Mode::Logit, Mode::Operands] {
        let mut results = Vec::new();
        for seed in 0..seeds {
            let base = LabOptions::new(model);
            let train = TrainOptions { seed, compare: false, ..base.train };
            let policies = vec![PolicyKind::Geometry.into()];
            results.push(run(Scenario::LrSpike, &LabOptions { train, mode, policies, ..base })?);
        }
        for tensor in ScaledTensor::ALL {
            let of = |result: &TrainResult| result.training.peaks.iter().find(|peak| peak.tensor == tensor).copied();
            let all: Vec<_> = results.iter().filter_map(of).collect();
            println!(
                "| {} | {} | {} | {} | {} |",
                mode_name(mode),
                tensor.name(),
                spread(all.iter().map(|peak| peak.max_scaled), 1),
                spread(all.iter().map(|peak| peak.step as f64), 0),
                spread(all.iter().map(|peak| peak.layer as f64), 0),
            );
        }
    }
    Ok(())
}

fn table(scenario: Scenario, mode: Mode, results: &[TrainResult]) {
    let Some(first) = results.first() else { return };
    let arms: &[Arm] = match scenario {
        Scenario::Resume => &[Arm::WeightsOnly, Arm::ScalesLost, Arm::WithState],
        _ => &[Arm::NeverStopped],
    };
    println!("## {}, mode {}\n", scenario.name(), mode_name(mode));
    for &arm in arms {
        let how = if scenario == Scenario::Resume { format!(", resumed {}", arm.name()) } else { String::new() };
        println!("Steps {}, the transition at {}{how}.\n", first.stress.steps, first.training.transition);
        println!(
            "| run | casts | steps with overflow in the 10 after | largest \\|x / descale\\| / 448 there | skipped in the 10 | skipped in all | went back | held-out loss | minus f32 | above it |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|");
        let losses = |runs: &[&TrainRun]| runs.iter().map(|run| run.held_out_loss).collect::<Vec<_>>();
        let control = losses(&of(results, None, OnOverflow::Saturate, arm));
        for policy in std::iter::once(None).chain(PolicyKind::ALL.map(Some)) {
            for casts in OnOverflow::ALL {
                let runs = of(results, policy, casts, arm);
                if policy.is_none() && casts == OnOverflow::NonFinite || runs.is_empty() {
                    continue;
                }
                let all = |value: &dyn Fn(&TrainRun) -> f64, digits| spread(runs.iter().map(|run| value(run)), digits);
                let dash = |text: String| if policy.is_none() { "-".to_owned() } else { text };
                println!(
                    "| {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                    label(policy),
                    if policy.is_none() { "-" } else { casts.name() },
                    dash(all(&|run| run.window_overflow_steps as f64, 0)),
                    dash(all(&|run| run.window_max_scaled / 448.0, 3)),
                    all(&|run| run.window_skipped as f64, 0),
                    all(&|run| run.skipped as f64, 0),
                    all(&|run| run.rollbacks as f64, 0),
                    all(&|run| run.held_out_loss, 4),
                    if policy.is_none() { "- | -".to_owned() } else { beside(&losses(&runs), &control) },
                );
            }
        }
        println!();
        if arm == Arm::WithState {
            let same = results.iter().flat_map(|result| &result.training.runs).filter(|run| run.arm == arm);
            let (same, all) = same.fold((0, 0), |(same, all), run| {
                (same + usize::from(run.same_as_never_stopped == Some(true)), all + 1)
            });
            println!("{same} of {all} runs resumed with state have the bits of the run that never stopped.\n");
        }
    }
    println!("In shadow on the f32 run, steps with overflow in the 10 after the transition: ");
    let shadows: Vec<String> = (0..first.training.shadow.len())
        .map(|at| {
            let counts = results.iter().map(|result| result.training.shadow_window[at] as f64);
            format!("{} {}", first.training.shadow[at].policy, spread(counts, 0))
        })
        .collect();
    println!("{}.\n", shadows.join("; "));
}

/// A setting in which a policy may matter.
struct Regime {
    name: &'static str,
    /// What the spike multiplies the rate by, and for how long.
    spike: (f64, u64),
    /// Deviation of the biases of q and k at the start.
    bias: f32,
    /// What becomes of the scaling state at the transition.
    scales: Scales,
}

/// The scaling state at the transition.
#[derive(Clone, Copy, PartialEq)]
enum Scales {
    Kept,
    Lost,
    /// That of a run whose weights blew up stands in its place.
    Foreign,
}

const PLAIN: Regime = Regime { name: "plain", spike: (1.0, 0), bias: 0.0, scales: Scales::Kept };

const REGIMES: [Regime; 6] = [
    PLAIN,
    Regime { name: "rate x64 for 15 steps", spike: (64.0, 15), ..PLAIN },
    Regime { name: "rate x512 for 3 steps", spike: (512.0, 3), ..PLAIN },
    Regime { name: "biases of q and k, deviation 8", bias: 8.0, ..PLAIN },
    Regime { name: "scaling state lost", scales: Scales::Lost, ..PLAIN },
    Regime { name: "state of a run that blew up", scales: Scales::Foreign, ..PLAIN },
];

/// Policies of the search. `current` never overflows and uses the whole range: how far it ends from f32 is what E4M3 and
/// chance do without a transient.
const SEARCHED: [PolicyKind; 5] =
    [PolicyKind::Current, PolicyKind::Geometry, PolicyKind::AutoC, PolicyKind::DelayedPaper, PolicyKind::DelayedTe];

/// Steps of a regime, the transition among them.
const STEPS: u64 = 140;
const TRANSITION: u64 = 100;

fn regimes(model: ModelKind, seeds: u64, only: Option<&str>) -> Result<()> {
    let regimes = chosen(REGIMES, only, |regime| regime.name)?;
    println!("# {}: regimes in which the policy may matter, {seeds} seeds, {STEPS} steps\n", model.name());
    println!(
        "| regime | mode | casts | run | overflow steps from {TRANSITION} | skipped | went back | held-out loss | minus f32 | above it |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for regime in regimes {
        if regime.bias > 0.0 && model == ModelKind::Llama {
            continue;
        }
        for mode in [Mode::Logit, Mode::Operands] {
            let control = one_regime(model, &regime, mode, OnOverflow::Saturate, None, seeds)?;
            row(&regime, mode, "-", None, &control, &control);
            for policy in SEARCHED {
                let ends = one_regime(model, &regime, mode, OnOverflow::Saturate, Some(policy), seeds)?;
                row(&regime, mode, OnOverflow::Saturate.name(), Some(policy), &ends, &control);
                // Without an overflow the bits are the same.
                if ends.iter().any(|end| end.over > 0.0) {
                    let ends = one_regime(model, &regime, mode, OnOverflow::NonFinite, Some(policy), seeds)?;
                    row(&regime, mode, OnOverflow::NonFinite.name(), Some(policy), &ends, &control);
                }
            }
            eprintln!("{} {}", regime.name, mode_name(mode));
        }
    }
    Ok(())
}

fn row(regime: &Regime, mode: Mode, casts: &str, policy: Option<PolicyKind>, ends: &[End], control: &[End]) {
    let losses = |ends: &[End]| ends.iter().map(|end| end.loss).collect::<Vec<_>>();
    let dash = |text: String| if policy.is_none() { "-".to_owned() } else { text };
    println!(
        "| {} | {} | {casts} | {} | {} | {} | {} | {} | {} |",
        regime.name,
        mode_name(mode),
        label(policy),
        dash(spread(ends.iter().map(|end| end.late), 0)),
        spread(ends.iter().map(|end| end.skipped), 0),
        spread(ends.iter().map(|end| end.back), 0),
        spread(ends.iter().map(|end| end.loss), 4),
        if policy.is_none() { "- | -".to_owned() } else { beside(&losses(ends), &losses(control)) },
    );
}

struct End {
    /// Steps with an overflow.
    over: f64,
    /// Those from the transition on.
    late: f64,
    skipped: f64,
    back: f64,
    loss: f64,
}

fn one_regime(
    model: ModelKind,
    regime: &Regime,
    mode: Mode,
    casts: OnOverflow,
    policy: Option<PolicyKind>,
    seeds: u64,
) -> Result<Vec<End>> {
    let one = |seed: u64| -> Result<End> {
        let policy = policy.map(PolicyConfig::from);
        let base = TrainOptions::new(model, policy);
        let options = TrainOptions { mode, casts, seed, bias: regime.bias, compare: false, ..base };
        let mut trainer = Trainer::new(options)?;
        let mut end = End { over: 0.0, late: 0.0, skipped: 0.0, back: 0.0, loss: 0.0 };
        for step in 0..STEPS {
            if step == TRANSITION {
                match regime.scales {
                    Scales::Kept => {}
                    Scales::Lost => trainer.forget_scales()?,
                    Scales::Foreign => {
                        if let Some(state) = wild(&options)? {
                            trainer.take_scales(state)?;
                        }
                    }
                }
            }
            let spikes = (TRANSITION..TRANSITION + regime.spike.1).contains(&step);
            let record = trainer.step(if spikes { regime.spike.0 } else { 1.0 })?;
            if record.observed.iter().any(|o| o.own && o.row.overflow > 0) {
                end.over += 1.0;
                end.late += f64::from(u8::from(step >= TRANSITION));
            }
            end.skipped += f64::from(u8::from(record.skipped));
            end.back += f64::from(u8::from(record.rolled_back));
        }
        end.loss = trainer.held_out_loss()?;
        Ok(end)
    };
    (0..seeds).into_par_iter().map(one).collect()
}

/// The scaling state of a run whose weights were blown up by a rate of 512 times the usual.
fn wild(options: &TrainOptions) -> Result<Option<sigmascale::runtime::RuntimeState>> {
    let mut trainer = Trainer::new(TrainOptions { casts: OnOverflow::Saturate, ..*options })?;
    for _ in 0..20 {
        trainer.step(512.0)?;
    }
    Ok(trainer.scales())
}
