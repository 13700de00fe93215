//! The pictures of a run: what each policy's scales did, where values overflowed, and what it cost.

use super::chart::{Frame, WIDTH, curves, legend, place};
use super::outcome::Results;
use super::sentences::{self, RANGE, rows};
use super::table::{HEADS, cells};
use crate::html::{Figure, Made, Page, escape};
use crate::svg::{Axis, label, open_svg};
use crate::table::brief;
use sigmascale::policy::PolicyKind;
use sigmascale_lab::stress::{Mode, StressResult, TraceRow};
use std::fmt::Write;

/// Most dots that a row of a strip shows.
const DOTS: usize = 200;
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
        let text = format!("Left out: {}: {}.", left_out.scenario, left_out.reason);
        page.raw(&format!("<p class=\"dim\">{}</p>\n", escape(&text)));
    }
    page.render(made)
}

/// `mark` is the step of the transition, where there is one.
fn part(page: &mut Page, run: &StressResult, mark: Option<usize>) {
    page.section(&sentences::headline(run));
    let verdict = |(policy, verdict)| format!("{policy}: {verdict}");
    page.lines(&sentences::verdicts(run).into_iter().map(verdict).collect::<Vec<String>>());
    let mut framing = sentences::framing(run);
    let rest = framing.split_off(1.min(framing.len()));
    page.paragraph(&framing.concat());
    let mut table = vec![HEADS.map(str::to_owned).to_vec()];
    table.extend(run.policies.iter().map(|policy| cells(run, policy).to_vec()));
    page.table("words", &table);
    page.list(&rest);
    page.raw(&legend(&run.policies.iter().map(|policy| Some(policy.policy)).collect::<Vec<_>>()));
    let over = if run.steps > 1 { "step" } else { "layer" };
    let same = !sentences::trains(run);
    let mut figures = vec![Figure {
        title: format!("Largest |logit| by {over}"),
        caption: match (run.steps, same) {
            (1, _) => "The same for every policy.".to_owned(),
            (_, true) => "Largest of all layers; the same for every policy.".to_owned(),
            (_, false) => "Largest of all layers, each policy in its own run.".to_owned(),
        },
        content: lines(run, &|row| Some(row.max_logit), same, None, mark),
    }];
    let descale = |title: &str, value: &dyn Fn(&TraceRow) -> Option<f64>| Figure {
        title: format!("{title} descale by {over}"),
        caption: "Largest over the heads and layers. The scale covers |x| up to 448 times this."
            .replace(" and layers", if run.steps > 1 { " and layers" } else { "" }),
        content: lines(run, value, false, None, mark),
    };
    match run.mode {
        Mode::Logit => figures.push(descale("Logit", &|row| row.descales.logit_descale)),
        Mode::Operands => {
            figures.push(descale("q", &|row| row.descales.q_descale));
            figures.push(descale("k", &|row| row.descales.k_descale));
            figures.push(descale("v", &|row| row.descales.v_descale));
        }
    }
    figures.push(Figure {
        title: format!("Largest |x / descale| / 448 by {over}"),
        caption: match mark {
            None => "Above the dotted line values saturate.".to_owned(),
            Some(step) => format!("Above the level dotted line values overflow; the upright one is step {step}."),
        },
        content: lines(run, &|row| Some(row.max_scaled / RANGE), false, Some(1.0), mark),
    });
    figures.push(Figure {
        title: "Overflow by layer and policy".to_owned(),
        caption: match run.steps {
            1 => "Overshoot where a value overflowed, in units of the range. Empty: it fits.".to_owned(),
            _ => "Largest overshoot of all steps where a value overflowed. Empty: it fits.".to_owned(),
        },
        content: heat_map(run),
    });
    figures.push(Figure {
        title: "Share of the range used".to_owned(),
        caption:
            "Largest |x / descale| / 448. Dots: layers and steps. Bar: p10 to p90 over heads; line: median. Right of \
                  the dotted line is overflow."
                .to_owned(),
        content: strip(run, &|row| Some(row.max_scaled / RANGE), Some(1.0), true, ""),
    });
    if run.policies.iter().any(|policy| policy.sqnr_db.is_some()) {
        // One figure, so that the heat map does not stand alone in its row.
        let sqnr = strip(run, &|row| row.sqnr_db, None, false, "SQNR of the output (more is better), dB");
        let kl = strip(run, &|row| row.softmax_kl, None, false, "KL of the softmax (less is better), nats");
        figures.push(Figure {
            title: "What it cost".to_owned(),
            caption: "Dots: layers and steps, open where a value overflowed; line: median.".to_owned(),
            content: sqnr + &kl,
        });
    }
    page.figures(&figures);
    page.end_section();
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
fn lines(
    run: &StressResult,
    value: &dyn Fn(&TraceRow) -> Option<f64>,
    same: bool,
    limit: Option<f64>,
    mark: Option<usize>,
) -> String {
    let count = if same { 1 } else { run.policies.len() };
    let all: Vec<_> = run.policies.iter().take(count).map(|p| (p.policy, series(run, p.policy, value))).collect();
    let all: Vec<_> = all.into_iter().map(|(policy, points)| ((!same).then_some(policy), points)).collect();
    let last = if run.steps > 1 { run.steps } else { run.model_layers }.saturating_sub(1).max(1);
    let over = if run.steps > 1 { "step" } else { "layer" };
    let values = all.iter().flat_map(|(_, points)| points).map(|point| point.1).chain(limit);
    let axis = Axis::new(values, Some(0.0));
    curves(&all, &Frame { axis, first: 0, last, over, limit, mark })
}

/// One cell per layer and policy: the largest overshoot where something overflowed.
fn heat_map(run: &StressResult) -> String {
    let (left, top, width) = (30.0, 34.0, 53.0);
    let height = (480.0 / run.model_layers.max(1) as f64).clamp(9.0, 26.0);
    let bottom = top + height * run.model_layers as f64;
    let worst = run.policies.iter().map(|policy| policy.max_scaled / RANGE).fold(1.0, f64::max);
    let mut svg = open_svg(WIDTH, bottom + 6.0, "Overflow by layer and policy");
    let _ = write!(svg, "<text x=\"0\" y=\"26\">layer</text>");
    for (column, policy) in run.policies.iter().enumerate() {
        let x = left + width * (column as f64 + 0.5);
        let name = policy.policy.name();
        let (first, second) = name.split_once('-').filter(|_| name.len() > 8).unwrap_or((name, ""));
        let _ = write!(
            svg,
            "<text x=\"{x:.1}\" y=\"12\" text-anchor=\"middle\" style=\"font-size:10px\">{first}</text>\
             <text x=\"{x:.1}\" y=\"26\" text-anchor=\"middle\" style=\"font-size:10px\">{second}</text>"
        );
        let mut layers = vec![(0usize, 0.0f64, 0u64); run.model_layers];
        for row in rows(run, policy.policy).filter(|row| row.overflow > 0) {
            if let Some(cell) = layers.get_mut(row.layer) {
                *cell = (cell.0 + 1, cell.1.max(row.max_scaled / RANGE), cell.2 + row.overflow);
            }
        }
        for (layer, (steps, overshoot, values)) in layers.into_iter().enumerate() {
            let (x, y) = (left + width * column as f64, top + height * layer as f64);
            let about = match steps {
                0 => format!("{name}, layer {layer}: fits"),
                _ => format!(
                    "{name}, layer {layer}: overshoot up to {}x\n{values} values in {steps} of {} steps",
                    brief(overshoot),
                    run.steps
                ),
            };
            // Logarithmic: 1.1 and 16 both show.
            let shade = if worst > 1.0 { overshoot.max(1.0).ln() / worst.ln() } else { 0.0 };
            let (class, opacity) = if steps == 0 {
                ("fits", String::new())
            } else {
                ("bad", format!(" fill-opacity=\"{:.3}\"", 0.2 + 0.8 * shade))
            };
            let _ = write!(
                svg,
                "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\"{opacity}><title>{about}</title></rect>",
                width - 1.5,
                height - 1.5
            );
            if steps > 0 && height >= 14.0 {
                let _ = write!(
                    svg,
                    "<text class=\"{}\" pointer-events=\"none\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}x</text>",
                    if shade > 0.55 { "hi" } else { "lo" },
                    x + 0.5 * width,
                    y + 0.5 * height + 3.5,
                    brief(overshoot)
                );
            }
        }
    }
    let every = (14.0 / height).ceil() as usize;
    for layer in (0..run.model_layers).step_by(every) {
        let y = top + height * (layer as f64 + 0.5) + 3.5;
        let _ = write!(svg, "<text x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{layer}</text>", left - 6.0);
    }
    svg + "</svg>"
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
    let mut svg =
        open_svg(WIDTH, bottom + 36.0, if name.is_empty() { "Share of the range used by policy" } else { name });
    for tick in axis.ticks() {
        let x = x(tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 14.0,
            label(tick)
        );
    }
    if let Some(limit) = limit {
        let x = x(limit);
        let _ = write!(svg, "<line class=\"limit\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>");
    }
    for (place_of, policy) in run.policies.iter().enumerate() {
        let y = top + height * (place_of as f64 + 0.5);
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text><g class=\"p{}\">",
            left - 8.0,
            y + 4.0,
            policy.policy,
            place(policy.policy)
        );
        let utilization = &policy.utilization;
        if heads {
            let (from, to) = (x(utilization.p10), x(utilization.p90));
            let _ = write!(svg, "<line class=\"bar\" x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        }
        let points: Vec<(&TraceRow, f64)> =
            rows(run, policy.policy).filter_map(|row| Some((row, value(row).filter(|v| v.is_finite())?))).collect();
        // Points come layer after layer: a stride that shares a factor with their number would leave layers out.
        let mut every = points.len().div_ceil(DOTS).max(1);
        while shares_a_factor(every, run.model_layers) {
            every += 1;
        }
        for (row, value) in points.iter().step_by(every) {
            // Spread by layer, so that equal values stay apart.
            let shift = (row.layer % 5) as f64 * 3.0 - 6.0;
            let class = if row.overflow > 0 && !heads { "first" } else { "dot faint" };
            let style = if class == "first" { " style=\"fill:none;stroke:var(--c)\"" } else { "" };
            let _ = write!(
                svg,
                "<circle class=\"{class}\"{style} cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.4\"><title>{}, layer {}, step {}: {}</title></circle>",
                x(*value),
                y + shift,
                policy.policy,
                row.layer,
                row.step,
                brief(*value)
            );
        }
        let mut sorted: Vec<f64> = points.iter().map(|point| point.1).collect();
        sorted.sort_by(f64::total_cmp);
        let own = sorted.get(sorted.len().saturating_sub(1) / 2).copied();
        if let Some(median) = if heads { Some(utilization.median) } else { own } {
            let (x, low, high) = (x(median), y - 11.0, y + 11.0);
            let _ = write!(svg, "<line class=\"mark\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>");
        }
        svg.push_str("</g>");
    }
    let scale = if axis.log { "log scale" } else { "" };
    let between = if name.is_empty() || scale.is_empty() { "" } else { "; " };
    let (end, y) = (WIDTH - 2.0, bottom + 29.0);
    let _ = write!(svg, "<text x=\"{end}\" y=\"{y:.1}\" text-anchor=\"end\">{name}{between}{scale}</text></svg>");
    svg
}
