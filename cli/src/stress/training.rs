//! What the scenarios that train add: their options, a table of runs, sentences and loss curves.

use super::args::{Args, Choice};
use super::curves::line;
use super::outcome::Run;
use super::sentences::{RANGE, mode_name, rows};
use crate::chart::{Frame, Line, legend, lines};
use crate::html::{Figure, Page};
use crate::progress;
use crate::svg::Axis;
use crate::table::{Table, brief, wrapped};
use sigmascale::attention::Cast;
use sigmascale::fp8::{Format, OnOverflow};
use sigmascale::policy::{PolicyKind, ScaledTensor};
use sigmascale::{Error, Result};
use sigmascale_lab::stress::{Scenario, StressModel, StressOptions, StressResult};
use sigmascale_lab::train::{
    Arm, LabOptions, ModelKind, TRAINED_STEPS, TrainOptions, TrainRun, Training, run_with_progress,
};

/// Heads of [`cells`].
const HEADS: [&str; 9] = [
    "run",
    "casts",
    "went on",
    "over in 10 after",
    "largest there / 448",
    "over in all",
    "skipped",
    "went back",
    "held-out loss",
];

/// The scenarios that the arguments ask for.
pub fn run(args: &Args, options: &StressOptions) -> Result<Vec<Run>> {
    let kind = args.model.as_deref().and_then(|name| name.parse::<ModelKind>().ok());
    let kind =
        kind.ok_or_else(|| Error::argument("the models that are trained are tiny-llama-train and tiny-gpt2-train"))?;
    let scenarios: &[Scenario] = match args.scenario() {
        Choice::One(Scenario::Resume) => &[Scenario::Resume],
        Choice::One(Scenario::LrSpike) => &[Scenario::LrSpike],
        _ => &[Scenario::Resume, Scenario::LrSpike],
    };
    let mut runs = Vec::new();
    for &scenario in scenarios {
        let base = LabOptions::of_stress(scenario, kind, options, args.seq_len)?;
        let lab = LabOptions {
            train: TrainOptions {
                operands: match args.fp8.unwrap_or(Format::E4m3) {
                    Format::E4m3 => Cast::E4m3,
                    Format::E5m2 => Cast::E5m2,
                    Format::E4m3Ieee => Cast::E4m3Ieee,
                },
                stochastic: args.stochastic,
                ..base.train
            },
            casts: args.casts.map_or_else(|| OnOverflow::ALL.to_vec(), |casts| vec![casts]),
            ..base
        };
        let bar = progress::bar(0, "{msg}: step {pos}/{len} of all runs", scenario.name());
        let show = |done: usize, total: usize| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        };
        let result = run_with_progress(scenario, &lab, &show);
        bar.finish_and_clear();
        let result = result?;
        runs.push(Run { stress: result.stress, training: Some(result.training) });
    }
    Ok(runs)
}

/// A model of this name, trained on the spot with attention in f32.
pub fn trained(name: &str, seed: u64) -> Result<StressModel> {
    let bar = progress::bar(TRAINED_STEPS, "{msg}: step {pos}/{len}", &format!("training {name}"));
    let model = sigmascale_lab::train::trained(name.parse()?, seed, &|done| bar.set_position(done as u64));
    bar.finish_and_clear();
    model
}

fn name(policy: Option<PolicyKind>) -> String {
    policy.map_or("f32".to_owned(), |policy| policy.to_string())
}

fn cells(training: &Training, run: &TrainRun) -> [String; 9] {
    let counts = |count: usize| if run.policy.is_none() { "-".to_owned() } else { count.to_string() };
    let largest = run.policy.is_some() && run.window_max_scaled > 0.0;
    [
        name(run.policy),
        if run.policy.is_none() { "none".to_owned() } else { run.casts.name().to_owned() },
        run.arm.name().to_owned(),
        counts(run.window_overflow_steps),
        if largest { brief(run.window_max_scaled / RANGE) } else { "-".to_owned() },
        match run.policy {
            None => "-".to_owned(),
            Some(_) => format!("{} of {}", run.overflow_steps, run.losses.len()),
        },
        match run.window_skipped {
            0 => run.skipped.to_string(),
            window => format!("{}, {window} of them in the {}", run.skipped, training.window),
        },
        run.rollbacks.to_string(),
        format!("{:.4}", run.held_out_loss),
    ]
}

/// Runs worth a row: the control once, and no copies of a run without overflow.
fn shown(training: &Training) -> impl Iterator<Item = &TrainRun> {
    training.runs.iter().filter(|run| !run.same_as_saturating)
}

/// The readable form.
pub fn table(run: &StressResult, training: &Training) -> String {
    let mut table = Table::new(HEADS);
    shown(training).for_each(|run| table.row(cells(training, run)));
    let mut out = format!("\n{}\n", table.left().render());
    for paragraph in sentences(run, training) {
        out.push_str(&wrapped(&paragraph, "- "));
    }
    out
}

/// The section of the page.
pub fn part(page: &mut Page, run: &StressResult, training: &Training) {
    let mut text = sentences(run, training);
    let rest = text.split_off(1.min(text.len()));
    page.section(&format!("{}, mode {}: the runs", run.scenario.name(), mode_name(run.mode)));
    page.paragraph(&text.concat());
    page.table("words", &HEADS, shown(training).map(|run| cells(training, run)));
    page.list(&rest);
    let known = std::iter::once(None).chain(run.policies.iter().map(|policy| Some(policy.policy)));
    page.raw(&legend(&known.map(|policy| line(policy, vec![])).collect::<Vec<_>>()));
    let mut figures: Vec<Figure> =
        OnOverflow::ALL.into_iter().flat_map(|casts| loss_figures(run, training, casts)).collect();
    figures.push(overflow_figure(run, training));
    page.figures(&figures);
    page.end_section();
}

/// Loss curves of the runs with one kind of casts: as they are, and beside the control's, since runs differ by far less
/// than steps do.
fn loss_figures(run: &StressResult, training: &Training, casts: OnOverflow) -> Vec<Figure> {
    let drawn: Vec<&TrainRun> =
        training.runs.iter().filter(|run| run.casts == casts && primary(training, run)).collect();
    let Some(control) = drawn.iter().find(|run| run.policy.is_none()).filter(|_| drawn.len() > 1) else {
        return Vec::new();
    };
    let beside = |run: &TrainRun| -> Vec<f64> { run.losses.iter().zip(&control.losses).map(|(a, b)| a - b).collect() };
    let losses: Vec<Line> = drawn.iter().map(|run| line(run.policy, points(&run.losses))).collect();
    let differences: Vec<Line> =
        drawn.iter().filter(|run| run.policy.is_some()).map(|run| line(run.policy, points(&beside(run)))).collect();
    let figure = |title: String, caption: &str, all: &[Line], limit: Option<f64>| {
        let values = all.iter().flat_map(|line| &line.points).map(|point| point.1).chain(limit);
        let frame = Frame::of_steps(Axis::linear(values), run.steps.saturating_sub(1));
        Figure::new(title, caption, lines(all, &Frame { limit, mark: Some(training.transition), ..frame }))
    };
    vec![
        figure(
            format!("Training loss, casts {}", casts.name()),
            "Nats, means of five steps or more; steps that were skipped are left out. Dotted: the transition.",
            &losses,
            None,
        ),
        figure(
            format!("The same minus f32's, casts {}", casts.name()),
            "Nats. Every run has the same text, so what is left is the policy and chance.",
            &differences,
            Some(0.0),
        ),
    ]
}

/// Steps with an overflow up to each step, of the runs of the table.
fn overflow_figure(run: &StressResult, training: &Training) -> Figure {
    let counts = |policy: PolicyKind| -> Vec<(usize, f64)> {
        let mut over = vec![false; run.steps];
        for row in rows(run, policy).filter(|row| row.overflow > 0) {
            if let Some(step) = over.get_mut(row.step) {
                *step = true;
            }
        }
        let sum = |so_far: &mut f64, (step, over): (usize, bool)| {
            *so_far += f64::from(u8::from(over));
            Some((step, *so_far))
        };
        over.into_iter().enumerate().scan(0.0, sum).collect()
    };
    let all: Vec<Line> = run.policies.iter().map(|p| line(Some(p.policy), counts(p.policy))).collect();
    let most = all.iter().filter_map(|line| line.points.last()).map(|point| point.1).fold(1.0, f64::max);
    let frame = Frame::of_steps(Axis::linear([0.0, most].into_iter()), run.steps.saturating_sub(1));
    Figure::new(
        "Steps with an overflow so far",
        "Counted in each policy's own run; a level line overflows no more. Dotted: the transition.",
        lines(&all, &Frame { mark: Some(training.transition), ..frame }),
    )
}

/// Whether a run went on in the way that its scenario is about.
fn primary(training: &Training, run: &TrainRun) -> bool {
    training.spike.is_some() || run.arm == Arm::WeightsOnly
}

/// Means of at least five steps, at their middle, and no more than 60 points: single steps are noise.
fn points(losses: &[f64]) -> Vec<(usize, f64)> {
    let every = losses.len().div_ceil(60).max(5);
    let mean = |(at, part): (usize, &[f64])| {
        let finite: Vec<f64> = part.iter().copied().filter(|x| x.is_finite()).collect();
        (!finite.is_empty()).then(|| (at * every + part.len() / 2, finite.iter().sum::<f64>() / finite.len() as f64))
    };
    losses.chunks(every).enumerate().filter_map(mean).collect()
}

fn sentences(run: &StressResult, training: &Training) -> Vec<String> {
    let mut out = vec![match training.spike {
        Some(factor) => format!(
            "Own runs, {} parameters, {} sequences a step, rate {}. At step {} the rate is multiplied by {} for {} steps.",
            training.parameters,
            training.batch,
            brief(training.rate),
            training.transition,
            brief(factor),
            training.spike_steps.unwrap_or(0)
        ),
        None => format!(
            "Own runs, {} parameters, {} sequences per step, rate {}. Each stops at step {} and continues in four ways; \
             the table above counts the one with only the weights.",
            training.parameters,
            training.batch,
            brief(training.rate),
            training.transition
        ),
    }];
    out.extend(resumed(training));
    out.extend(losses(training));
    out.extend(clean(training));
    out.push(shadow(run, training));
    out.extend(peaks(training));
    out
}

fn resumed(training: &Training) -> Option<String> {
    let mut with = training.runs.iter().filter(|run| run.arm == Arm::WithState).peekable();
    with.peek()?;
    let broken: Vec<String> =
        with.filter(|run| run.same_as_never_stopped != Some(true)).map(|run| name(run.policy)).collect();
    Some(match broken.is_empty() {
        true => "With its state saved, every run went on with the bits of the one that never stopped.".to_owned(),
        false => format!("NOT the bits of a run that never stopped, though resumed with state: {}.", broken.join(", ")),
    })
}

/// Who ended where, beside the control.
fn losses(training: &Training) -> Option<String> {
    let control = training.runs.iter().find(|run| run.policy.is_none() && primary(training, run))?;
    let others = || training.runs.iter().filter(|run| run.policy.is_some() && primary(training, run));
    let difference = |run: &&TrainRun| run.held_out_loss - control.held_out_loss;
    let worst = others().max_by(|a, b| difference(a).total_cmp(&difference(b)))?;
    let best = others().min_by(|a, b| difference(a).total_cmp(&difference(b)))?;
    Some(format!(
        "Held-out loss at the end, attention in f32 for all: the control's {:.4}; the others from {:+.4} ({}, {}) to {:+.4} \
         ({}, {}). One seed cannot tell such differences from chance: data/training has five.",
        control.held_out_loss,
        difference(&best),
        name(best.policy),
        best.casts.name(),
        difference(&worst),
        name(worst.policy),
        worst.casts.name()
    ))
}

/// Policies without an overflow: their runs do not depend on the casts.
fn clean(training: &Training) -> Option<String> {
    let mut names: Vec<String> =
        training.runs.iter().filter(|run| run.same_as_saturating).map(|run| name(run.policy)).collect();
    names.dedup();
    names.retain(|name| name != "f32");
    (!names.is_empty()).then(|| {
        format!(
            "Nothing overflowed in the runs of {}: with casts that make NaN they have the same bits, and were not run again.",
            names.join(", ")
        )
    })
}

fn shadow(run: &StressResult, training: &Training) -> String {
    let parts: Vec<String> = training
        .shadow
        .iter()
        .zip(&training.shadow_window)
        .map(|(summary, window)| format!("{} {window} and {}", summary.policy, summary.overflow_steps))
        .collect();
    format!(
        "In shadow on the control's run, steps with an overflow in the {} after step {} and in all {}: {}.",
        training.window,
        training.transition,
        run.steps,
        parts.join("; ")
    )
}

fn peaks(training: &Training) -> Option<String> {
    if training.peaks.is_empty() {
        return None;
    }
    let one = |tensor: ScaledTensor| {
        let peak = training.peaks.iter().find(|peak| peak.tensor == tensor)?;
        Some(format!("{} {} (layer {}, step {})", tensor.name(), brief(peak.max_scaled), peak.layer, peak.step))
    };
    let all: Vec<String> = ScaledTensor::ALL.into_iter().filter_map(one).collect();
    Some(format!(
        "Largest |x / descale| under the worst-case bound in all runs, of 448 (logits: of 358, where the bound lies): {}.",
        all.join(", ")
    ))
}
