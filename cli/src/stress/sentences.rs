//! What the numbers of a run mean, in sentences: the same on the terminal and on the page.
//!
//! Verdicts come first, one line per policy; then what a reader needs to know before comparing numbers.

use crate::html::Tone;
use crate::table::brief;
use crate::terminal::toned;
use sigmascale::policy::PolicyKind;
use sigmascale_lab::stress::{
    Mode, PolicySummary, SPIKE, SPIKE_STEP, Scenario, StressResult, TensorSlack, TraceRow, median,
};
use std::collections::BTreeMap;

/// Largest finite E4M3 value.
pub const RANGE: f64 = 448.0;

/// The run in a line.
pub fn headline(run: &StressResult) -> String {
    let layers = match run.model_layers == run.model_layers_total {
        true if run.model_layers == 1 => "1 layer".to_owned(),
        true => format!("all {} layers", run.model_layers),
        false if run.model_layers == 1 => format!("the first of {} layers", run.model_layers_total),
        false => format!("the first {} of {} layers", run.model_layers, run.model_layers_total),
    };
    let steps = counted(run.steps, "step");
    let tokens = match run.scenario {
        Scenario::Replay => "recorded maxima".to_owned(),
        _ => match &run.tokens {
            Some(text) => format!("{} of {} per step", counted(run.seq_len, "token"), text.file),
            None if trains(run) => {
                let tokens = counted(run.seq_len, "token");
                format!("{tokens} of a generated language per step, seed {}", run.seed)
            }
            None => format!("{} per step, seed {}", counted(run.seq_len, "isotropic token"), run.seed),
        },
    };
    format!("{}, mode {}: {}, {layers}, {steps}, {tokens}", run.scenario.name(), mode_name(run.mode), run.model)
}

/// Which policies overflowed anywhere, in a sentence.
pub fn verdict_of_all<'r>(runs: impl Iterator<Item = &'r StressResult>) -> (Tone, String) {
    let (mut over, mut within) = (Vec::new(), Vec::new());
    for policy in runs.flat_map(|run| &run.policies) {
        let list = if policy.overflow_values > 0 { &mut over } else { &mut within };
        if !list.contains(&policy.policy.name()) {
            list.push(policy.policy.name());
        }
    }
    within.retain(|name| !over.contains(name));
    match (over.is_empty(), within.is_empty()) {
        (true, true) => (Tone::Plain, "No policy was run.".to_owned()),
        (true, false) => (Tone::Good, format!("No overflow: {}.", within.join(", "))),
        (false, true) => (Tone::Bad, format!("Overflow: {}.", over.join(", "))),
        (false, false) => (Tone::Bad, format!("Overflow: {}. No overflow: {}.", over.join(", "), within.join(", "))),
    }
}

/// What became of each policy, in a line.
pub fn verdicts(run: &StressResult) -> Vec<(PolicyKind, String)> {
    let ran = run.policies.iter().map(|policy| (policy.policy, verdict(run, policy)));
    let left_out = run.unavailable.iter().map(|policy| (policy.policy, format!("not run: {}", policy.reason)));
    ran.chain(left_out).collect()
}

fn verdict(run: &StressResult, policy: &PolicySummary) -> String {
    let sqnr = |db: Option<f64>, after: &str| db.map_or(String::new(), |db| format!(", SQNR {db:.1} dB{after}"));
    if policy.overflow_values == 0 {
        let used = percent_of(policy.utilization.median);
        return format!("no overflow; {used} of the range used (median){}", sqnr(policy.sqnr_db, ""));
    }
    let steps = match policy.first_bad_step.filter(|_| run.steps > 1) {
        Some(first) => format!(", in {} of {} steps, first at step {first}", policy.overflow_steps, run.steps),
        None => String::new(),
    };
    let worst = times(policy.max_scaled / RANGE);
    format!(
        "OVERFLOW on {} of {} layers{steps}; up to {worst} the range{}",
        policy.overflow_layers,
        policy.layers,
        sqnr(where_it_overflowed(run, policy).0, " where it overflowed")
    )
}

/// Whether the scenario trains: every policy then has weights and text of a run of its own.
pub fn trains(run: &StressResult) -> bool {
    matches!(run.scenario, Scenario::Resume | Scenario::LrSpike)
}

/// The mode's name on the command line.
pub fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Logit => "logit",
        Mode::Operands => "operands",
    }
}

/// `part` of `whole` in percent.
pub fn percent(part: u64, whole: u64) -> String {
    if part == 0 || whole == 0 {
        return "0".to_owned();
    }
    percent_of(part as f64 / whole as f64)
}

/// Rows of one policy.
pub fn rows(run: &StressResult, policy: PolicyKind) -> impl Iterator<Item = &TraceRow> {
    run.trace.iter().filter(move |row| row.policy == policy)
}

/// Median SQNR and KL of the layers and steps in which the policy overflowed: the medians over all of them hide what a
/// single bad step cost.
pub fn where_it_overflowed(run: &StressResult, policy: &PolicySummary) -> (Option<f64>, Option<f64>) {
    let over = || rows(run, policy.policy).filter(|row| row.overflow > 0);
    (middle(over().filter_map(|row| row.sqnr_db)), middle(over().filter_map(|row| row.softmax_kl)))
}

fn middle(values: impl Iterator<Item = f64>) -> Option<f64> {
    median(&mut values.collect::<Vec<_>>())
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn times(x: f64) -> String {
    format!("{}x", brief(x))
}

fn of(run: &StressResult, policy: PolicyKind) -> Option<&PolicySummary> {
    run.policies.iter().find(|summary| summary.policy == policy)
}

/// Largest |x / descale| of a policy at a step, in units of the range, and the layers in which values overflowed.
fn at_step(run: &StressResult, policy: PolicyKind, step: usize) -> (f64, usize) {
    let rows = || rows(run, policy).filter(move |row| row.step == step);
    let worst = rows().map(|row| row.max_scaled / RANGE).fold(0.0, f64::max);
    (worst, rows().filter(|row| row.overflow > 0).count())
}

/// What a reader has to know before the numbers argue for anything, a paragraph each.
pub fn framing(run: &StressResult) -> Vec<String> {
    let mut out = vec![meaning(run)];
    out.extend(first_forward(run));
    out.extend(after_the_start(run));
    out.extend(moved(run));
    out.extend(range_and_cost(run));
    out.extend(worst_layers(run));
    out.extend(burn_in(run));
    if run.mode == Mode::Operands && of(run, PolicyKind::GeometryCStar).is_some() {
        out.push(
            "geometry-c-star differs from geometry in its logit descale only, which this mode does not use: its operand \
             descales are the same."
                .into(),
        );
    }
    out.extend(run.policies.iter().filter_map(|policy| policy.assumption).map(|text| format!("Assumption: {text}.")));
    if let Some(tail) = run.tail.filter(|_| of(run, PolicyKind::GeometryCStar).is_some()) {
        out.push(format!(
            "Under that assumption logits exceed the bound of geometry-c-star with probability at most {:e}, over all \
             heads and {}, each with {} of {}.",
            tail.delta,
            counted(tail.steps, "step"),
            counted(tail.batch, "sequence"),
            counted(tail.seq_len, "token")
        ));
    }
    out.extend(run.notes.iter().map(|note| format!("Note: {note}.")));
    out
}

/// Layers that are named of each policy.
const NAMED: usize = 3;

/// The layers that a policy serves worst: by what overflowed, then by what the casts cost.
/// Of each layer the largest overflow, in units of the range and 0 for none, and the lowest SQNR of all steps.
fn of_layers(run: &StressResult, policy: PolicyKind) -> Vec<(usize, (f64, f64))> {
    let mut worst: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
    for row in rows(run, policy) {
        let (load, sqnr) = worst.entry(row.layer).or_insert((0.0, f64::INFINITY));
        *load = load.max(if row.overflow > 0 { row.max_scaled / RANGE } else { 0.0 });
        *sqnr = sqnr.min(row.sqnr_db.unwrap_or(f64::INFINITY));
    }
    worst.into_iter().collect()
}

/// Headers of [`ranked`].
pub const RANKED: [&str; 4] = ["layer", "policy", "lowest SQNR, dB", "overshoot"];

/// Layers and policies by what is lost, the most first: the lowest SQNR, or the largest overflow where no output was computed.
pub fn ranked(run: &StressResult) -> Vec<[String; 4]> {
    let all = run.policies.iter().map(|summary| summary.policy);
    let mut all: Vec<_> =
        all.flat_map(|policy| of_layers(run, policy).into_iter().map(move |one| (policy, one))).collect();
    all.sort_by(|(_, (_, a)), (_, (_, b))| a.1.total_cmp(&b.1).then(b.0.total_cmp(&a.0)));
    let row = |(policy, (layer, (load, sqnr))): (PolicyKind, (usize, (f64, f64)))| {
        let sqnr = if sqnr.is_finite() { format!("{sqnr:.1}") } else { "-".to_owned() };
        let over = if load > 0.0 { toned(Tone::Bad, &times(load)) } else { "-".to_owned() };
        [layer.to_string(), policy.name().to_owned(), sqnr, over]
    };
    all.into_iter().map(row).collect()
}

fn worst_layers(run: &StressResult) -> Option<String> {
    if run.model_layers < 2 {
        return None;
    }
    let of_policy = |policy: &PolicySummary| {
        let mut layers = of_layers(run, policy.policy);
        layers.sort_by(|(_, a), (_, b)| b.0.total_cmp(&a.0).then(a.1.total_cmp(&b.1)));
        let one = |(layer, (load, sqnr)): &(usize, (f64, f64))| {
            let over = (*load > 0.0).then(|| format!("{} the range", times(*load)));
            let cost = sqnr.is_finite().then(|| format!("{sqnr:.1} dB"));
            let said: Vec<String> = over.into_iter().chain(cost).collect();
            (!said.is_empty()).then(|| format!("{layer} ({})", said.join(", ")))
        };
        let named: Vec<String> = layers.iter().take(NAMED).filter_map(one).collect();
        (!named.is_empty()).then(|| format!("{} {}", policy.policy.name(), named.join(", ")))
    };
    let named: Vec<String> = run.policies.iter().filter_map(of_policy).collect();
    (!named.is_empty()).then(|| {
        format!("Worst layers (the largest overflow and the lowest SQNR of their steps): {}.", named.join("; "))
    })
}

/// What an overflow is.
fn meaning(run: &StressResult) -> String {
    let mut out = match run.mode {
        Mode::Logit => {
            "Mode logit casts only the logits to E4M3, as in the paper. An overflow is a |logit| above 448 times its \
             descale. It saturates: the largest logits of a row become equal, and the softmax loses its peak. Fused FP8 \
             kernels keep logits in f32 and do not fail in this way."
                .to_owned()
        }
        Mode::Operands => {
            "Mode operands casts q, k, v and P, as fused FP8 kernels do; logits stay in f32. An overflow is a value of \
             q, k or v above 448 times its descale. It saturates: up to 464 (1.036x) a value rounds to 448 in any case, \
             and a small overshoot clips only the largest values."
                .to_owned()
        }
    };
    if trains(run) {
        out.push_str(" Where casts give NaN instead, the step is skipped.");
    }
    if run.scenario == Scenario::Replay {
        out.push_str(
            " A trace has one maximum per tensor, layer and step: shares are of tensors, and there is no SQNR or KL.",
        );
    } else {
        out.push_str(
            " Shares of the two modes cannot be compared. The overshoot is the largest |x / descale| / 448 of a layer \
             and step that overflowed. SQNR of the output and KL of the softmax, both against f32, say what it cost: \
             medians over all layers and steps, and in the last column over those that overflowed.",
        );
    }
    out
}

/// What a step cost a policy, compared with geometry; medians over the layers.
fn cost(run: &StressResult, policy: PolicyKind, step: usize) -> Option<String> {
    let pair = |kind: PolicyKind| {
        let at = || rows(run, kind).filter(|row| row.step == step);
        Some((middle(at().filter_map(|row| row.sqnr_db))?, middle(at().filter_map(|row| row.softmax_kl))?))
    };
    let (bad, good) = (pair(policy)?, pair(PolicyKind::Geometry)?);
    Some(format!(
        " SQNR was {:.1} dB and KL {} there; geometry had {:.1} dB and {}.",
        bad.0,
        brief(bad.1),
        good.0,
        brief(good.1)
    ))
}

/// How the delayed policies start.
fn first_forward(run: &StressResult) -> Vec<String> {
    let mut out = Vec::new();
    let what = if run.mode == Mode::Logit { "logits" } else { "operands" };
    if of(run, PolicyKind::DelayedPaper).is_some() {
        let (worst, layers) = at_step(run, PolicyKind::DelayedPaper, 0);
        let went = match layers {
            0 => "stayed within that".to_owned(),
            _ => format!("exceeded that on {layers} of {} layers, by up to {}", run.model_layers, times(worst)),
        };
        let covered = rows(run, PolicyKind::DelayedPaper).next().map_or(0.0, |row| row.descale * RANGE);
        let mut text = format!(
            "delayed-paper starts with a history of ones, so its initial scale covers |x| <= {}. In the first forward {what} \
             {went}.",
            brief(covered)
        );
        text.push_str(&cost(run, PolicyKind::DelayedPaper, 0).unwrap_or_default());
        out.push(text);
    }
    if of(run, PolicyKind::DelayedTe).is_some() {
        let (worst, layers) = at_step(run, PolicyKind::DelayedTe, 0);
        out.push(match layers {
            0 => format!(
                "delayed-te starts with scale 1, which covers |x| <= 448. The largest value of the first forward was {}, so \
                 there was no overflow.",
                brief(worst * RANGE)
            ),
            _ => format!(
                "delayed-te starts with scale 1, which covers |x| <= 448. The first forward exceeded that on {layers} of {} \
                 layers, by up to {}.",
                run.model_layers,
                times(worst)
            ),
        });
    }
    out
}

/// Overflows of later steps, with their size.
fn after_the_start(run: &StressResult) -> Option<String> {
    let mut parts = Vec::new();
    for policy in &run.policies {
        let mut steps: Vec<usize> =
            rows(run, policy.policy).filter(|row| row.overflow > 0 && row.step > 0).map(|row| row.step).collect();
        steps.dedup();
        let overshoot: Vec<f64> = rows(run, policy.policy)
            .filter(|row| row.overflow > 0 && row.step > 0)
            .map(|row| row.max_scaled / RANGE)
            .collect();
        let (Some(&first), Some(middle)) = (steps.first(), middle(overshoot.iter().copied())) else { continue };
        let worst = overshoot.iter().copied().fold(0.0, f64::max);
        let when = match steps.len() {
            1 => format!("at step {first}"),
            count => format!("in {count} of {} steps from step {first}", run.steps - 1),
        };
        parts.push(format!("{} {when}, median {}, at most {}", policy.policy, times(middle), times(worst)));
    }
    if run.steps == 1 {
        return None;
    }
    if parts.is_empty() {
        return Some("After the first step no policy overflowed.".to_owned());
    }
    Some(format!("Overflows after the first step, with their overshoot: {}.", parts.join("; ")))
}

/// How the scales moved with the weights at the spike.
fn moved(run: &StressResult) -> Option<String> {
    if run.scenario != Scenario::WeightSpike || run.steps <= SPIKE_STEP {
        return None;
    }
    let grew =
        format!("At step {SPIKE_STEP} weights and biases of q, k and v are multiplied by {}.", brief(f64::from(SPIKE)));
    Some(grew + &moved_by(run).unwrap_or_default())
}

fn moved_by(run: &StressResult) -> Option<String> {
    // The step at which geometry's scale changed.
    let mut own = rows(run, PolicyKind::Geometry).filter(|row| row.layer == 0);
    let mut before = own.next()?;
    let (before, after) = loop {
        let next = own.next()?;
        if next.descales != before.descales {
            break (before, next);
        }
        before = next;
    };
    let ratio = |a: Option<f64>, b: Option<f64>| Some(b? / a?);
    let logit = ratio(before.descales.logit_descale, after.descales.logit_descale)?;
    let q = ratio(before.descales.q_descale, after.descales.q_descale)?;
    let mut text = format!(
        " geometry multiplied its logit descale by {} and its q descale by {} in that step, before the forward.",
        brief(logit),
        brief(q)
    );
    for kind in [PolicyKind::DelayedPaper, PolicyKind::DelayedTe] {
        if of(run, kind).is_none() || after.step + 1 >= run.steps {
            continue;
        }
        let (at, next) = (at_step(run, kind, after.step), at_step(run, kind, after.step + 1));
        if at.1 == 0 {
            text.push_str(&format!(" {kind} stays within its range at this step (at most {}).", times(at.0)));
            continue;
        }
        let then = match next.1 {
            0 => "and stays within it one step later".to_owned(),
            _ => format!("and {} one step later, since new tokens can exceed the last maximum", times(next.0)),
        };
        text.push_str(&format!(" {kind} reaches {} its range at this step {then}.", times(at.0)));
        text.push_str(&cost(run, kind, after.step).unwrap_or_default());
    }
    Some(text)
}

/// What unused range costs.
fn range_and_cost(run: &StressResult) -> Option<String> {
    let (geometry, current) = (of(run, PolicyKind::Geometry)?, of(run, PolicyKind::Current)?);
    let mut text = format!(
        "Of the range, geometry used {} (median) and current {}.",
        percent_of(geometry.utilization.median),
        percent_of(current.utilization.median)
    );
    if let (Some(a), Some(b), Some(c), Some(d)) =
        (geometry.sqnr_db, current.sqnr_db, geometry.softmax_kl, current.softmax_kl)
    {
        text.push_str(&format!(
            " Their SQNR is {a:.1} and {b:.1} dB, their KL {} and {}. E4M3 is a floating-point format with the same \
             relative precision from 448 down to 1/64, so the used share of the range says little about accuracy.",
            brief(c),
            brief(d)
        ));
    }
    let pass = match run.mode {
        Mode::Logit => "needs all logits of a step before it can cast the first",
        Mode::Operands => "reads q, k and v an additional time before it casts them",
    };
    text.push_str(&format!(" current never overflows, since it {pass}."));
    Some(text)
}

fn percent_of(share: f64) -> String {
    format!("{} %", brief(100.0 * share))
}

/// What `auto-c` is at this length.
fn burn_in(run: &StressResult) -> Option<String> {
    let auto = of(run, PolicyKind::AutoC)?;
    let burn_in = run.auto_c_burn_in as usize;
    let mut text = match run.steps <= burn_in {
        true => format!("auto-c has a burn-in of {burn_in} steps, in which its plans are those of geometry."),
        false => format!(
            "auto-c plans as geometry for {burn_in} steps and then scales the bound by the ratio that it observed; it {}.",
            match auto.fallbacks {
                0 => "never fell back to geometry".to_owned(),
                1 => "fell back to geometry once".to_owned(),
                times => format!("fell back to geometry {times} times"),
            }
        ),
    };
    let slack = |TensorSlack { tensor, slack }: &TensorSlack| {
        let (min, mean, max) = (brief(slack.min), brief(slack.mean), brief(slack.max));
        format!("{} {min} / {mean} / {max}", tensor.name())
    };
    if !auto.slack.is_empty() {
        let all: Vec<String> = auto.slack.iter().map(slack).collect();
        text.push_str(&format!(
            " Slack in the burn-in (worst-case bound / observed maximum of a head), min / mean / max: {}.",
            all.join(", ")
        ));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_brief() {
        assert_eq!(
            [percent(0, 5), percent(1, 1), percent(1, 1000), percent(5, 100)],
            ["0", "100 %", "0.100 %", "5.00 %"]
        );
        assert_eq!(percent(1, 10_000_000), "1.0e-5 %");
        assert_eq!(middle([3.0, 1.0, 2.0, 4.0].into_iter()), Some(2.5));
        assert_eq!(middle(std::iter::empty()), None);
    }
}
