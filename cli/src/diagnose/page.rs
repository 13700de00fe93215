//! The page of a run's history.

use super::sentences;
use crate::chart::{Frame, Line, legend, lines};
use crate::html::{Figure, Made, Page, Tone};
use crate::svg::Axis;
use sigmascale_lab::diagnose::{Diagnosis, RunVerdict};
use sigmascale_lab::history::{History, LayerRecord};

/// Most points of a curve.
const POINTS: usize = 120;
/// Curves of heads beside the first that went wrong.
const OTHERS: usize = 3;
/// A column of the record, by head.
type Column = fn(&LayerRecord) -> &[f64];

/// The page.
pub fn render(diagnosis: &Diagnosis, history: &History, made: &Made) -> String {
    let mut page = Page::new(
        "Diagnosis of a training run",
        &sentences::headline(diagnosis),
        "Alarms are raised on what each head's attention did, before the loss shows it. A record without alarms proves \
         nothing about what was not recorded.",
    );
    let tone = if diagnosis.verdict == RunVerdict::Calm { Tone::Good } else { Tone::Bad };
    page.verdict(tone, &sentences::verdict(diagnosis));
    if !diagnosis.alarms.is_empty() {
        page.section("Alarms");
        page.table("reasons", &sentences::ALARM_HEADS, diagnosis.alarms.iter().map(sentences::alarm));
        page.end_section();
        page.section("What to do");
        page.lines(&sentences::advice(diagnosis));
        page.end_section();
    }
    let figures = figures(diagnosis, history);
    if !figures.is_empty() {
        page.section("History");
        page.raw(&legend(&curves(diagnosis, |_, _| vec![])));
        if let Some(step) = raised(diagnosis) {
            page.note(&format!("The vertical line is step {step}, at which the first alarm of that head was raised."));
        }
        page.figures(&figures);
        page.end_section();
    }
    if !diagnosis.heads.is_empty() {
        page.section("Heads");
        page.paragraph(&sentences::legend(diagnosis));
        page.table("", &sentences::HEADS, sentences::worst(diagnosis).iter().map(sentences::head));
        page.end_section();
    }
    page.render(made)
}

/// The step at which the first alarm of the head that goes wrong first was raised, from which the lead counts. Its alarm in
/// `first` may be another one, of a condition that began earlier.
fn raised(diagnosis: &Diagnosis) -> Option<u64> {
    let first = diagnosis.first.as_ref()?;
    let same = diagnosis.alarms.iter().filter(|alarm| (alarm.layer, alarm.head) == (first.layer, first.head));
    same.map(|alarm| alarm.raised).min()
}

/// The heads that are drawn, as layer and head.
fn drawn(diagnosis: &Diagnosis) -> Vec<(usize, usize)> {
    sentences::worst(diagnosis).iter().take(1 + OTHERS).map(|head| (head.layer, head.head)).collect()
}

/// A curve of each of these.
fn curves(diagnosis: &Diagnosis, points: impl Fn(usize, usize) -> Vec<(u64, f64)>) -> Vec<Line> {
    let line = |(place, (layer, head))| Line {
        name: format!("layer {layer}, head {head}"),
        place: Some(place),
        points: thinned(points(layer, head)),
    };
    drawn(diagnosis).into_iter().enumerate().map(line).collect()
}

fn figures(diagnosis: &Diagnosis, history: &History) -> Vec<Figure> {
    let shown = sentences::worst(diagnosis);
    let limits = sentences::logit_limits(&shown[..shown.len().min(1 + OTHERS)]);
    // One line cannot show several limits.
    let (limit, limit_caption) = match limits[..] {
        [limit] => (Some(limit), format!("Absolute value. Dotted: the limit of {limit}.")),
        _ => (None, "Absolute value. The layers have different limits, by the format of Q and K.".to_owned()),
    };
    let mut figures = Vec::new();
    let losses = history.steps.iter().filter_map(|step| Some((step.step, step.loss?))).collect();
    figures.extend(figure(
        diagnosis,
        ("Loss", "Means where there are many steps."),
        vec![Line { name: String::new(), place: Some(0), points: thinned(losses) }],
        None,
    ));
    let quantities: [(&str, &str, Column, Option<f64>); 8] = [
        ("Norm of W_Q", "Certified spectral norm.", |layer| &layer.w_q, None),
        ("sigma", "Certified norm of W_Q^T W_K, without the softmax scale.", |layer| &layer.sigma, None),
        ("Largest logit", &limit_caption, |layer| &layer.logit_max, limit),
        ("Certified logit bound", "Worst case, including rounding.", |layer| &layer.bound, None),
        ("Repeated maxima", "Share of rows whose maximum occurs more than once.", |layer| &layer.repeated, None),
        (
            "Sum of delta's bias",
            "Since the first record. An error without a sign stays near 0.",
            |layer| &layer.delta_bias,
            Some(0.0),
        ),
        ("Entropy", "Mean of the attention weights, in nats.", |layer| &layer.entropy, None),
        ("Use of the FP8 range", "Largest part; above 1, values saturate.", |layer| &layer.utilization, Some(1.0)),
    ];
    for (title, caption, column, limit) in quantities {
        let all = curves(diagnosis, |layer, head| {
            let records = history.layers.iter().filter(|record| record.layer == layer);
            let mut points: Vec<(u64, f64)> = records
                .filter_map(|record| Some((record.step, *column(record).get(head)?)))
                .filter(|point| point.1.is_finite())
                .collect();
            if title == "Sum of delta's bias" {
                points.iter_mut().fold(0.0, |sum, point| {
                    point.1 += sum;
                    point.1
                });
            }
            points
        });
        figures.extend(figure(diagnosis, (title, caption), all, limit));
    }
    figures
}

/// A figure of these curves; none where nothing was recorded.
fn figure(
    diagnosis: &Diagnosis,
    (title, caption): (&str, &str),
    mut all: Vec<Line>,
    limit: Option<f64>,
) -> Option<Figure> {
    all.retain(|line| !line.points.is_empty());
    if all.is_empty() {
        return None;
    }
    let values: Vec<f64> = all.iter().flat_map(|line| &line.points).map(|point| point.1).collect();
    let largest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    // A limit far above all values would flatten them.
    let limit = limit.filter(|limit| *limit == 0.0 || largest >= 0.3 * limit);
    // What is compared with 0 has no logarithm.
    let axis = match limit != Some(0.0) && values.iter().all(|value| *value > 0.0) {
        true => Axis::new(values.iter().copied().chain(limit), None),
        false => Axis::linear(values.iter().copied().chain(limit)),
    };
    let places = || all.iter().flat_map(|line| &line.points).map(|point| point.0);
    let (first, last) = (places().min()?, places().max()?);
    let mark = raised(diagnosis).and_then(|step| usize::try_from(step).ok());
    let mark = mark.filter(|step| (first..=last).contains(step));
    let frame = Frame { first, limit, mark, ..Frame::of_steps(axis, last.max(first + 1)) };
    Some(Figure::new(title, caption, lines(&all, &frame)))
}

/// At most [`POINTS`] means of finite values, in the order of their steps.
fn thinned(mut points: Vec<(u64, f64)>) -> Vec<(usize, f64)> {
    points.retain(|point| point.1.is_finite() && point.0 < 1 << 52);
    points.sort_by_key(|point| point.0);
    let every = points.len().div_ceil(POINTS).max(1);
    let mean = |part: &[(u64, f64)]| {
        let sum: f64 = part.iter().map(|point| point.1).sum();
        (part[part.len() / 2].0 as usize, sum / part.len() as f64)
    };
    points.chunks(every).map(mean).collect()
}
