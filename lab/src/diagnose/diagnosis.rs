//! What a whole record says.

use super::advice::Advice;
use super::alarm::Alarm;
use super::alarms::Alarms;
use super::options::Options;
use super::trend::Window;
use crate::history::{LayerRecord, Record, RunInfo, StepRecord};
use serde::Serialize;
use sigmascale::Result;

/// Losses whose mean tells whether the loss shows the failure.
pub const LOSS_WINDOW: usize = 50;
/// Rise of that mean over the smallest one before, as a part of it.
pub const LOSS_RISE: f64 = 0.1;

/// What a record says: the head that goes wrong first, what to do, and the state of every head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Diagnosis {
    /// Name of the run or the model.
    pub name: Option<String>,
    /// What wrote the record: `monitor`, `lab` or `checkpoints`.
    pub source: String,
    /// Whether any alarm was raised.
    pub verdict: RunVerdict,
    /// First step of the record.
    pub first_step: Option<u64>,
    /// Last step of the record.
    pub last_step: Option<u64>,
    /// The alarm of the head that went wrong first, or that of the run where no head has one.
    pub first: Option<Alarm>,
    /// What to do, about the first alarm's kind first.
    pub advice: Vec<Advice>,
    /// Every alarm, in the order in which they were raised.
    pub alarms: Vec<Alarm>,
    /// First step at which the loss shows a failure: it is not finite, or the mean of the last 50 losses is at least 10
    /// % above the smallest such mean before.
    pub loss_shows: Option<u64>,
    /// Steps to that from the first alarm that was raised for the head named in `first`.
    pub lead: Option<i64>,
    /// The thresholds.
    pub options: Options,
    /// Every query head, layer by layer.
    pub heads: Vec<HeadReport>,
}

/// Whether any alarm was raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunVerdict {
    /// None.
    Calm,
    /// At least one, even if it was cleared.
    Alarm,
}

/// First and last value of a quantity, and its growth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Span {
    /// First value recorded.
    pub first: f64,
    /// Last value recorded.
    pub last: f64,
    /// Growth per step over the last window (Theil-Sen); null with fewer than two records.
    pub per_step: Option<f64>,
}

/// One query head. What was not recorded is null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct HeadReport {
    /// The model's own number of the layer.
    pub layer: usize,
    /// Query head.
    pub head: usize,
    /// Certified spectral norm of W_Q.
    pub w_q: Option<Span>,
    /// Certified norm of W_Q^T W_K, without the softmax scale.
    pub sigma: Option<Span>,
    /// Growth of the norm of W_Q at the end, relative to the largest growth that the learning rate allows.
    pub growth: Option<f64>,
    /// Last certified bound on |logit|.
    pub bound: Option<f64>,
    /// Largest |logit| seen.
    pub logit_max: Option<f64>,
    /// Largest |logit| that is still normal in the format of the layer's Q and K.
    pub logit_limit: f64,
    /// Step at which the largest logit reaches that limit at the present rate, or its bound where no logits are
    /// recorded; null where it does not grow or has passed the limit.
    pub reaches_limit: Option<u64>,
    /// Last share of rows whose maximum repeats.
    pub repeated: Option<f64>,
    /// Sum of delta's bias over the records.
    pub delta_bias: Option<f64>,
    /// Last entropy of the attention weights, in nats.
    pub entropy: Option<f64>,
    /// Largest part of the FP8 range in use.
    pub utilization: Option<f64>,
    /// Largest share of values out of that range.
    pub saturated: Option<f64>,
}

/// What is gathered of a head while the record is read.
#[derive(Clone, Debug, Default)]
struct Gathered {
    report: HeadReport,
    w_q: Window,
    sigma: Window,
}

impl Diagnosis {
    /// Of a run and its records in the order in which they were written.
    ///
    /// # Errors
    /// As [`Alarms::new`] and [`Alarms::observe`].
    pub fn new(run: RunInfo, records: &[Record], options: Options) -> Result<Self> {
        let mut alarms = Alarms::new(run, options)?;
        let mut heads: Vec<Vec<Gathered>> =
            alarms.run().layers.iter().map(|layer| vec![Gathered::default(); layer.heads]).collect();
        let (mut first_step, mut last_step) = (None, None);
        for record in records {
            alarms.observe(record)?;
            let step = match record {
                Record::Step(step) => step.step,
                Record::Layer(layer) => layer.step,
                Record::Run(_) | Record::Event(_) => continue,
            };
            first_step = first_step.or(Some(step));
            last_step = Some(step);
            if let Record::Layer(layer) = record
                && let Some(at) = alarms.run().layers.iter().position(|info| info.layer == layer.layer)
            {
                heads[at].iter_mut().enumerate().for_each(|(head, gathered)| gathered.add(layer, head, options.window));
            }
        }
        let losses = records.iter().filter_map(|record| match record {
            Record::Step(step) => Some(step),
            _ => None,
        });
        let loss_shows = loss_shows(losses);
        let first = alarms.first().cloned();
        let lead = first.as_ref().zip(loss_shows).map(|(first, shows)| {
            let same = alarms.raised().iter().filter(|alarm| (alarm.layer, alarm.head) == (first.layer, first.head));
            let raised = same.map(|alarm| alarm.raised).min().unwrap_or(first.raised);
            (shows as i64).saturating_sub(raised as i64)
        });
        let run = alarms.run();
        let reports = heads.into_iter().enumerate().flat_map(|(at, heads)| {
            let (alarms, layer) = (&alarms, run.layers[at].layer);
            heads.into_iter().enumerate().map(move |(head, gathered)| {
                let watch = alarms.head(at, head);
                let (growth, logit_limit) = (watch.growth(), alarms.logit_limit(at));
                let reaches_limit = watch.reaches(logit_limit);
                HeadReport { layer, head, growth, logit_limit, reaches_limit, ..gathered.report() }
            })
        });
        Ok(Self {
            name: run.name.clone(),
            source: run.source.clone(),
            verdict: if alarms.raised().is_empty() { RunVerdict::Calm } else { RunVerdict::Alarm },
            first_step,
            last_step,
            advice: alarms.advice(),
            first,
            alarms: alarms.raised().to_vec(),
            loss_shows,
            lead,
            options,
            heads: reports.collect(),
        })
    }
}

impl Gathered {
    fn add(&mut self, record: &LayerRecord, head: usize, window: usize) {
        let of = |values: &[f64]| values.get(head).copied().filter(|value| value.is_finite());
        let report = &mut self.report;
        for (span, trend, value) in
            [(&mut report.w_q, &mut self.w_q, of(&record.w_q)), (&mut report.sigma, &mut self.sigma, of(&record.sigma))]
        {
            let Some(value) = value else { continue };
            trend.push(record.step as f64, value, window);
            let first = span.map_or(value, |span| span.first);
            *span = Some(Span { first, last: value, per_step: None });
        }
        let most = |seen: Option<f64>, value: Option<f64>| match (seen, value) {
            (Some(seen), Some(value)) => Some(seen.max(value)),
            (seen, value) => seen.or(value),
        };
        report.bound = of(&record.bound).or(report.bound);
        report.logit_max = most(report.logit_max, of(&record.logit_max));
        report.repeated = of(&record.repeated).or(report.repeated);
        report.entropy = of(&record.entropy).or(report.entropy);
        report.utilization = most(report.utilization, of(&record.utilization));
        report.saturated = most(report.saturated, of(&record.saturated));
        if let Some(bias) = of(&record.delta_bias) {
            report.delta_bias = Some(report.delta_bias.unwrap_or(0.0) + bias);
        }
    }

    fn report(self) -> HeadReport {
        let slope = |span: Option<Span>, trend: &Window| span.map(|span| Span { per_step: trend.slope(2), ..span });
        HeadReport {
            w_q: slope(self.report.w_q, &self.w_q),
            sigma: slope(self.report.sigma, &self.sigma),
            ..self.report
        }
    }
}

/// First step at which a loss is not finite or the mean of the last [`LOSS_WINDOW`] losses is at least [`LOSS_RISE`]
/// above the smallest such mean before. Steps that go back, as after a restored checkpoint, start anew: its loss is that
/// of earlier weights.
pub fn loss_shows<'r>(steps: impl Iterator<Item = &'r StepRecord>) -> Option<u64> {
    let mut losses: Vec<f64> = Vec::new();
    let (mut least, mut latest) = (f64::INFINITY, 0);
    for record in steps {
        if record.step < latest {
            losses.clear();
            least = f64::INFINITY;
        }
        latest = record.step;
        let Some(loss) = record.loss else { continue };
        if !loss.is_finite() {
            return Some(record.step);
        }
        losses.push(loss);
        if let Some(last) = losses.len().checked_sub(LOSS_WINDOW).map(|start| &losses[start..]) {
            let mean = last.iter().sum::<f64>() / LOSS_WINDOW as f64;
            if mean - least >= LOSS_RISE * least.abs() {
                return Some(record.step);
            }
            least = least.min(mean);
        }
    }
    None
}
