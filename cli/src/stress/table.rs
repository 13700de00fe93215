//! The result as text.

use super::outcome::Results;
use super::sentences;
use crate::html::Tone;
use crate::table::{Table, brief, wrapped};
use crate::terminal::toned;
use sigmascale_lab::stress::{PolicySummary, StressResult};
use std::fmt::Write;

/// Cells of one policy, the same on the terminal and on the page.
pub fn cells(run: &StressResult, policy: &PolicySummary) -> [String; 9] {
    let decibels = |db: Option<f64>| db.map_or("-".to_owned(), |db| format!("{db:.1}"));
    let nats = |kl: Option<f64>| kl.map_or("-".to_owned(), brief);
    let over = policy.overflow_values > 0;
    let (sqnr, kl) = sentences::where_it_overflowed(run, policy);
    let first = policy.first_bad_step.filter(|_| run.steps > 1).map_or(String::new(), |step| format!(", first {step}"));
    let utilization = [policy.utilization.p10, policy.utilization.median, policy.utilization.p90];
    [
        policy.policy.name().to_owned(),
        format!("{} of {}", policy.overflow_layers, policy.layers),
        format!("{} of {}{first}", policy.overflow_steps, run.steps),
        sentences::percent(policy.overflow_values, policy.values),
        match &policy.overshoot {
            Some(q) => format!("{} / {}", brief(q.median), brief(policy.max_scaled / sentences::RANGE)),
            None => "-".to_owned(),
        },
        utilization.map(|share| brief(100.0 * share)).join(" / "),
        decibels(policy.sqnr_db),
        nats(policy.softmax_kl),
        if over && sqnr.is_some() { format!("{} / {}", decibels(sqnr), nats(kl)) } else { "-".to_owned() },
    ]
}

/// Headers of [`cells`].
pub const HEADS: [&str; 9] = [
    "policy",
    "layers overflowed",
    "steps overflowed",
    "values overflowed",
    "overshoot med / max",
    "used % p10 / med / p90",
    "SQNR dB",
    "softmax KL",
    "SQNR / KL on overflow",
];

/// The readable form: verdicts, the table, what to know before reading it, and which policies overflowed. `next` is the
/// command that comes next.
pub fn render(results: &Results, next: &str) -> String {
    let mut out = String::new();
    for (place, whole) in results.runs().iter().enumerate() {
        if place > 0 {
            out.push('\n');
        }
        let run = &whole.stress;
        out.push_str(&wrapped(&sentences::headline(run), ""));
        out.push('\n');
        for (policy, verdict) in sentences::verdicts(run) {
            let tone = if verdict.starts_with("OVERFLOW") { Tone::Bad } else { Tone::Good };
            out.push_str(&toned(tone, &wrapped(&verdict, &format!("  {:<15}  ", policy.name()))));
        }
        let mut table = Table::new(HEADS);
        for policy in &run.policies {
            table.row(cells(run, policy));
        }
        let _ = writeln!(out, "\n{}", table.left().render());
        for paragraph in sentences::framing(run) {
            out.push_str(&wrapped(&paragraph, "- "));
        }
        #[cfg(feature = "train")]
        if let Some(training) = &whole.training {
            out.push_str(&super::training::table(run, training));
        }
    }
    if !results.left_out().is_empty() {
        out.push('\n');
    }
    for left_out in results.left_out() {
        out.push_str(&wrapped(&format!("left out: {}: {}", left_out.scenario, left_out.reason), ""));
    }
    let (tone, verdict) = sentences::verdict_of_all(results.runs().iter().map(|run| &run.stress));
    let _ = write!(out, "\n{}Next: {next}\n", toned(tone, &wrapped(&verdict, "")));
    out
}
