//! The sentences and rows of a diagnosis, for the terminal and the page.

use crate::table::short;
use sigmascale_lab::diagnose::{Alarm, Diagnosis, HeadReport, RunVerdict, Span};

/// Columns of the table of alarms.
pub const ALARM_HEADS: [&str; 6] = ["raised", "cleared", "layer", "head", "alarm", "what was seen"];
/// Columns of the table of heads.
pub const HEADS: [&str; 12] = [
    "layer",
    "head",
    "W_Q first",
    "last",
    "sigma first",
    "last",
    "growth",
    "bound",
    "largest logit",
    "limit at step",
    "sum of delta bias",
    "entropy",
];

/// The name of the run. The stress lab names a run by its settings, a JSON object.
pub fn name(diagnosis: &Diagnosis) -> String {
    let Some(name) = &diagnosis.name else { return "run".to_owned() };
    let Ok(settings) = serde_json::from_str::<serde_json::Map<_, _>>(name) else { return name.clone() };
    let setting = |(key, value): (&String, &serde_json::Value)| match value.as_str() {
        Some(text) => format!("{key} {text}"),
        None => format!("{key} {value}"),
    };
    settings.iter().map(setting).collect::<Vec<_>>().join(", ")
}

/// What was read.
pub fn headline(diagnosis: &Diagnosis) -> String {
    let layers = diagnosis.heads.iter().map(|head| head.layer).collect::<std::collections::BTreeSet<_>>().len();
    let name = name(diagnosis);
    let steps = match (diagnosis.first_step, diagnosis.last_step) {
        (Some(first), Some(last)) => format!("steps {first} to {last}"),
        _ => "no records".to_owned(),
    };
    let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let (layers, heads) = (counted(layers, "layer"), counted(diagnosis.heads.len(), "query head"));
    format!("{name}: {layers}, {heads}, {steps}")
}

/// The result in a few sentences.
pub fn verdict(diagnosis: &Diagnosis) -> String {
    let shows = match diagnosis.loss_shows {
        Some(step) => format!("The loss shows it at step {step}."),
        None => "The loss does not show it.".to_owned(),
    };
    if diagnosis.first_step.is_none() {
        return "no alarm was raised, since the record has no step yet.".to_owned();
    }
    match (diagnosis.verdict, &diagnosis.first) {
        (RunVerdict::Alarm, Some(first)) => {
            let place = match (first.layer, first.head) {
                (Some(layer), Some(head)) => format!("layer {layer}, head {head} goes wrong first"),
                _ => "the run goes wrong, and no single head does".to_owned(),
            };
            let lead = match diagnosis.lead {
                Some(lead @ 1..) => format!(", {lead} steps after its first alarm."),
                _ => ".".to_owned(),
            };
            let shows =
                shows.trim_end_matches('.').to_owned() + if diagnosis.loss_shows.is_some() { &lead } else { "." };
            format!(
                "ALARM: {place}: {} since step {}, raised at step {}. {shows}",
                first.kind.name(),
                first.since,
                first.raised
            )
        }
        _ => {
            let loss = diagnosis.loss_shows.map_or(String::new(), |step| {
                format!(
                    " But the loss rises: at step {step} the mean of 50 losses is 10 % above the smallest before, and \
                     nothing that was recorded explains it."
                )
            });
            let blind = if diagnosis.source == "checkpoints" && diagnosis.heads.iter().all(|head| head.growth.is_none())
            {
                " Growth was not judged: pass --lr, the learning rate between the checkpoints."
            } else {
                ""
            };
            format!("calm: no alarm was raised.{loss}{blind}")
        }
    }
}

/// Cells of an alarm.
pub fn alarm(alarm: &Alarm) -> [String; 6] {
    let number = |number: Option<usize>| number.map_or("-".to_owned(), |number| number.to_string());
    [
        alarm.raised.to_string(),
        alarm.cleared.map_or("-".to_owned(), |step| step.to_string()),
        number(alarm.layer),
        number(alarm.head),
        alarm.kind.name().to_owned(),
        alarm
            .message
            .split_once(": ")
            .filter(|_| alarm.head.is_some())
            .map_or(&*alarm.message, |(_, rest)| rest)
            .to_owned(),
    ]
}

/// What to do, a line each.
pub fn advice(diagnosis: &Diagnosis) -> Vec<String> {
    let line = |advice: &sigmascale_lab::diagnose::Advice| {
        let layers = match advice.layers.len() {
            0 => String::new(),
            1 => format!(", layer {}", advice.layers[0]),
            2..=8 => {
                let list: Vec<String> = advice.layers.iter().map(usize::to_string).collect();
                format!(", layers {}", list.join(", "))
            }
            count => format!(", {count} layers"),
        };
        format!("{}{layers}: {} [{}]", advice.kind.name(), advice.action, advice.source)
    };
    diagnosis.advice.iter().map(line).collect()
}

/// The heads: those with an alarm first, as they were raised, then by the growth of W_Q and by the largest logit.
pub fn worst(diagnosis: &Diagnosis) -> Vec<HeadReport> {
    let mut heads = diagnosis.heads.clone();
    let place = |head: &HeadReport| {
        let own = |alarm: &Alarm| (alarm.layer, alarm.head) == (Some(head.layer), Some(head.head));
        diagnosis.alarms.iter().filter(|alarm| own(alarm)).map(|alarm| alarm.since).min().unwrap_or(u64::MAX)
    };
    let grown = |span: Option<Span>| span.map_or(0.0, |span| span.last / span.first.max(f64::MIN_POSITIVE));
    let size = |head: &HeadReport| {
        let growth = head.growth.unwrap_or_else(|| grown(head.w_q.or(head.sigma)));
        (growth, head.logit_max.or(head.bound).unwrap_or(0.0))
    };
    heads.sort_by(|a, b| {
        let (one, two) = (size(a), size(b));
        place(a).cmp(&place(b)).then(two.0.total_cmp(&one.0)).then(two.1.total_cmp(&one.1))
    });
    heads
}

/// Cells of a head.
pub fn head(head: &HeadReport) -> [String; 12] {
    let ends = |span: Option<Span>| (short(span.map(|span| span.first)), short(span.map(|span| span.last)));
    let ((w_first, w_last), (s_first, s_last)) = (ends(head.w_q), ends(head.sigma));
    [
        head.layer.to_string(),
        head.head.to_string(),
        w_first,
        w_last,
        s_first,
        s_last,
        head.growth.map_or("-".to_owned(), |part| format!("{:.0} %", 100.0 * part)),
        short(head.bound),
        short(head.logit_max),
        limit(head),
        short(head.delta_bias),
        short(head.entropy),
    ]
}

/// When the limit is reached.
fn limit(head: &HeadReport) -> String {
    match head.reaches_limit {
        Some(step) => step.to_string(),
        None if head.logit_max.or(head.bound).is_some_and(|logit| logit >= head.logit_limit) => "passed".to_owned(),
        None => "-".to_owned(),
    }
}

/// Limits of logits, ascending: layers have different ones where Q and K differ in format.
pub fn logit_limits(heads: &[HeadReport]) -> Vec<f64> {
    let mut limits: Vec<f64> = heads.iter().map(|head| head.logit_limit).collect();
    limits.sort_by(f64::total_cmp);
    limits.dedup();
    limits
}

/// What the columns are.
pub fn legend(diagnosis: &Diagnosis) -> String {
    let limits: Vec<String> = logit_limits(&diagnosis.heads).iter().map(f64::to_string).collect();
    let by_format = if limits.len() > 1 { " (by the format of Q and K)" } else { "" };
    format!(
        "growth: growth of the norm of W_Q relative to the largest that the learning rate allows; bound: worst-case \
         bound on |logit|, including rounding; limit at step: step at which the largest logit (without logits: its \
         bound) reaches {}{by_format} if it keeps growing at this rate; -: not recorded, or no growth",
        limits.join(" or ")
    )
}
