//! The pictures of a run: what each policy's scales did, where values overflowed, and what it cost.

use super::curves::{line, place};
use super::outcome::Results;
use super::sentences::{self, RANGE, rows};
use super::table::{HEADS, cells};
use crate::chart::{Frame, Line, WIDTH, legend, lines};
use crate::html::{Figure, Made, Page, table};
use crate::svg::{Anchor, Axis, Cell, Map, Svg};
use crate::table::brief;
use sigmascale::policy::PolicyKind;
use sigmascale_lab::stress::{Mode, StressResult, TraceRow};

/// Most dots that a row of a strip shows.
const DOTS: usize = 200;
/// Rows of the layers where most is lost.
const RANKED: usize = 8;

/// The page.
pub fn render(results: &Results, made: &Made) -> String {
    let runs = results.runs();
    let model = runs.iter().map(|run| run.stress.model.as_str()).next().unwrap_or("a model");
    let mode = runs.first().map_or("", |run| sentences::mode_name(run.stress.mode));
    let names: Vec<&str> = runs.iter().map(|run| run.stress.scenario.name()).collect();
    let same = match runs.iter().any(|run| sentences::trains(&run.stress)) {
        true => "Every policy trains a run of its own from the same weights and text.",
        false => "Every policy sees the same weights and the same tokens.",
    };
    let summary = "Counts say where a scale was too small; the overshoot says by how much, SQNR and KL what it cost.";
    let mut page = Page::new(
        &format!("Scaling policies under stress: {model}"),
        &format!("mode {mode}; {}", names.join(", ")),
        &format!("{same} {summary}"),
    );
    let (tone, verdict) = sentences::verdict_of_all(runs.iter().map(|run| &run.stress));
    page.verdict(tone, &verdict);
    for run in runs {
        part(&mut page, &run.stress, run.transition());
        #[cfg(feature = "train")]
        if let Some(training) = &run.training {
            super::training::part(&mut page, &run.stress, training);
        }
    }
    for left_out in results.left_out() {
        page.note(&format!("Left out: {}: {}.", left_out.scenario, left_out.reason));
    }
    page.render(made)
}

/// `mark` is the step of the transition, where there is one.
fn part(page: &mut Page, run: &StressResult, mark: Option<usize>) {
    page.section(&sentences::headline(run));
    page.raw(&legend(&run.policies.iter().map(|policy| line(Some(policy.policy), vec![])).collect::<Vec<_>>()));
    let over = if run.steps > 1 { "step" } else { "layer" };
    page.figures(&deciding(run, over, mark));
    let verdict = |(policy, verdict)| format!("{policy}: {verdict}");
    page.lines(&sentences::verdicts(run).into_iter().map(verdict).collect::<Vec<String>>());
    let mut framing = sentences::framing(run);
    let rest = framing.split_off(1.min(framing.len()));
    page.paragraph(&framing.concat());
    page.table("words", &HEADS, run.policies.iter().map(|policy| cells(run, policy)));
    page.list(&rest);
    let same = !sentences::trains(run);
    let mut figures = vec![Figure::new(
        format!("Largest |logit| by {over}"),
        match (run.steps, same) {
            (1, _) => "The same for every policy.",
            (_, true) => "Largest of all layers; the same for every policy.",
            (_, false) => "Largest of all layers, each policy in its own run.",
        },
        chart(run, &|row| Some(row.max_logit), same, None, mark),
    )];
    let of_all = if run.steps > 1 { "heads and layers" } else { "heads" };
    let descale = |title: &str, value: &dyn Fn(&TraceRow) -> Option<f64>| {
        let caption = format!("Largest over the {of_all}. The scale covers |x| up to 448 times this.");
        Figure::new(format!("{title} descale by {over}"), caption, chart(run, value, false, None, mark))
    };
    match run.mode {
        Mode::Logit => figures.push(descale("Logit", &|row| row.descales.logit_descale)),
        Mode::Operands => {
            figures.push(descale("q", &|row| row.descales.q_descale));
            figures.push(descale("k", &|row| row.descales.k_descale));
            figures.push(descale("v", &|row| row.descales.v_descale));
        }
    }
    figures.push(Figure::new(
        "Share of the range used",
        "Largest |x / descale| / 448. Dots: layers and steps. Bar: p10 to p90 over heads; line: median. Right of the \
         dotted line is overflow.",
        strip(run, &|row| Some(row.max_scaled / RANGE), Some(1.0), true, ""),
    ));
    if run.policies.iter().any(|policy| policy.sqnr_db.is_some()) {
        // One figure, so that the heat map does not stand alone in its row.
        let sqnr = strip(run, &|row| row.sqnr_db, None, false, "SQNR of the output (more is better), dB");
        let kl = strip(run, &|row| row.softmax_kl, None, false, "KL of the softmax (less is better), nats");
        let caption = "Dots: layers and steps, open where a value overflowed; line: median.";
        figures.push(Figure::new("What it cost", caption, sqnr + &kl));
    }
    page.figures(&figures);
    page.end_section();
}

/// What answers the question: who overflowed, when, in which layers, and what was lost there.
fn deciding(run: &StressResult, over: &str, mark: Option<usize>) -> Vec<Figure> {
    let mut figures = vec![
        Figure::new(
            format!("Largest |x / descale| / 448 by {over}"),
            match mark {
                None => "Above the dotted line values saturate.".to_owned(),
                Some(step) => format!("Above the level dotted line values overflow; the upright one is step {step}."),
            },
            chart(run, &|row| Some(row.max_scaled / RANGE), false, Some(1.0), mark),
        ),
        Figure::new(
            "Overflow by layer and policy",
            match run.steps {
                1 => "Overshoot where a value overflowed, in units of the range. Empty: it fits.",
                _ => "Largest overshoot of all steps where a value overflowed. Empty: it fits.",
            },
            heat_map(run),
        ),
    ];
    let ranked = sentences::ranked(run);
    if run.model_layers > 1 && !ranked.is_empty() {
        let caption = "Layers and policies with the lowest SQNR of the output in any step.";
        let rows = ranked.into_iter().take(RANKED);
        figures.push(Figure::new("Where most is lost", caption, table("", &sentences::RANKED, rows)));
    }
    figures
}

/// A value over steps (the largest of the layers), or over layers where there is one step.
fn series(run: &StressResult, policy: PolicyKind, value: &dyn Fn(&TraceRow) -> Option<f64>) -> Vec<(usize, f64)> {
    let mut out: Vec<(usize, f64)> = Vec::new();
    for row in rows(run, policy) {
        let Some(y) = value(row).filter(|y| y.is_finite()) else { continue };
        let x = if run.steps > 1 { row.step } else { row.layer };
        match out.last_mut() {
            Some((last, largest)) if *last == x => *largest = largest.max(y),
            _ => out.push((x, y)),
        }
    }
    out
}

/// A line chart of all policies, or of the first where the value is the same for all.
fn chart(
    run: &StressResult,
    value: &dyn Fn(&TraceRow) -> Option<f64>,
    same: bool,
    limit: Option<f64>,
    mark: Option<usize>,
) -> String {
    let of = |policy: PolicyKind| line(Some(policy), series(run, policy, value));
    let all: Vec<Line> = match run.policies.first().filter(|_| same) {
        Some(first) => vec![Line { name: String::new(), place: None, ..of(first.policy) }],
        None => run.policies.iter().map(|policy| of(policy.policy)).collect(),
    };
    let last = if run.steps > 1 { run.steps } else { run.model_layers }.saturating_sub(1);
    let over = if run.steps > 1 { "step" } else { "layer" };
    let values = all.iter().flat_map(|line| &line.points).map(|point| point.1).chain(limit);
    let axis = Axis::new(values, Some(0.0));
    lines(&all, &Frame { over, limit, mark, ..Frame::of_steps(axis, last) })
}

/// One cell per layer and policy: the largest overshoot where something overflowed.
fn heat_map(run: &StressResult) -> String {
    let worst = run.policies.iter().map(|policy| policy.max_scaled / RANGE).fold(1.0, f64::max);
    // Steps with an overflow, the largest overshoot and the values that overflowed, by policy and layer.
    let cells = |policy: PolicyKind| {
        let mut layers = vec![(0usize, 0.0f64, 0u64); run.model_layers];
        for row in rows(run, policy).filter(|row| row.overflow > 0) {
            if let Some(cell) = layers.get_mut(row.layer) {
                *cell = (cell.0 + 1, cell.1.max(row.max_scaled / RANGE), cell.2 + row.overflow);
            }
        }
        layers
    };
    let columns: Vec<_> = run.policies.iter().map(|policy| cells(policy.policy)).collect();
    let two_lines = |name: &str| {
        let (first, second) = name.split_once('-').filter(|_| name.len() > 8).unwrap_or((name, ""));
        [first.to_owned(), second.to_owned()]
    };
    let map = Map {
        name: "Overflow by layer and policy",
        note: (0.0, "layer"),
        rows: (0..run.model_layers).map(|layer| layer.to_string()).collect(),
        columns: run.policies.iter().map(|policy| two_lines(policy.policy.name())).collect(),
        cell: (53.0, (480.0 / run.model_layers.max(1) as f64).clamp(9.0, 26.0)),
        scale: vec![],
    };
    map.draw(|layer, column| {
        let name = run.policies[column].policy.name();
        let (steps, overshoot, values) = columns[column][layer];
        if steps == 0 {
            let about = format!("{name}, layer {layer}: fits");
            return Some(Cell { class: "fits", shade: 0.45, label: String::new(), about });
        }
        let label = format!("{}x", brief(overshoot));
        let about = format!(
            "{name}, layer {layer}: overshoot up to {label}\n{values} values in {steps} of {} steps",
            run.steps
        );
        // Logarithmic: 1.1 and 16 both show.
        let share = if worst > 1.0 { overshoot.max(1.0).ln() / worst.ln() } else { 0.0 };
        Some(Cell { class: "bad", shade: 0.2 + 0.8 * share, label, about })
    })
}

fn shares_a_factor(mut a: usize, mut b: usize) -> bool {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a > 1
}

/// One row per policy: a dot for each layer and step, and the median; with `heads` the quantiles over heads.
fn strip(
    run: &StressResult,
    value: &dyn Fn(&TraceRow) -> Option<f64>,
    limit: Option<f64>,
    heads: bool,
    name: &str,
) -> String {
    let values = run.trace.iter().filter_map(value).chain(limit);
    let values = values.chain(run.policies.iter().filter(|_| heads).map(|policy| policy.utilization.p10));
    // Decibels are a logarithm already, and may be negative.
    let axis = if name.ends_with("dB") { Axis::linear(values) } else { Axis::new(values, None) };
    let (left, top, height) = (108.0, 6.0, 30.0);
    let right = WIDTH - 14.0;
    let bottom = top + height * run.policies.len() as f64;
    let x = |value: f64| left + (right - left) * axis.place(value);
    let known = if name.is_empty() { "Share of the range used by policy" } else { name };
    let mut svg = Svg::new(WIDTH, bottom + 36.0, known);
    svg.columns(&axis, (top, bottom), x);
    if let Some(limit) = limit {
        svg.line("limit", (x(limit), top), (x(limit), bottom));
    }
    for (row_of, policy) in run.policies.iter().enumerate() {
        let y = top + height * (row_of as f64 + 0.5);
        svg.text((left - 8.0, y + 4.0), Anchor::End, policy.policy.name());
        let utilization = &policy.utilization;
        let points: Vec<(&TraceRow, f64)> =
            rows(run, policy.policy).filter_map(|row| Some((row, value(row).filter(|v| v.is_finite())?))).collect();
        // Points come layer after layer: a stride that shares a factor with their number would leave layers out.
        let mut every = points.len().div_ceil(DOTS).max(1);
        while shares_a_factor(every, run.model_layers) {
            every += 1;
        }
        let mut sorted: Vec<f64> = points.iter().map(|point| point.1).collect();
        sorted.sort_by(f64::total_cmp);
        let own = sorted.get(sorted.len().saturating_sub(1) / 2).copied();
        svg.group(&format!("p{}", place(policy.policy)), |svg| {
            if heads {
                svg.line("bar", (x(utilization.p10), y), (x(utilization.p90), y));
            }
            for (row, value) in points.iter().step_by(every) {
                // Spread by layer, so that equal values stay apart.
                let shift = (row.layer % 5) as f64 * 3.0 - 6.0;
                let class = if row.overflow > 0 && !heads { "open" } else { "dot faint" };
                let about = format!("{}, layer {}, step {}: {}", policy.policy, row.layer, row.step, brief(*value));
                svg.dot(class, (x(*value), y + shift), 2.4, &about);
            }
            if let Some(median) = if heads { Some(utilization.median) } else { own } {
                svg.line("mark", (x(median), y - 11.0), (x(median), y + 11.0));
            }
        });
    }
    let scale = if axis.log { "log scale" } else { "" };
    let between = if name.is_empty() || scale.is_empty() { "" } else { "; " };
    svg.text((WIDTH - 2.0, bottom + 29.0), Anchor::End, &format!("{name}{between}{scale}"));
    svg.finish()
}
