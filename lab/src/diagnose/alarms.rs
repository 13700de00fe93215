//! The alarms of a run while it goes on: records in, events out.

use super::advice::{Advice, advice};
use super::alarm::{Alarm, AlarmKind};
use super::head::{Context, Finding, Head};
use super::loss::LossWatch;
use super::options::Options;
use super::training::Training;
use super::trend::{Signs, Turn};
use crate::history::{Event, FORMAT, LayerRecord, OperandFormat, Record, RunInfo, StepRecord, later};
use sigmascale::{Error, Result};

/// Fewest points of the growth of W_Q.
const POINTS: usize = 6;
/// Least steps between two of them: over fewer steps, learning itself goes in one direction.
const SPACING: u64 = 10;
/// Most heads that a run may have in all.
const MOST_HEADS: usize = 1 << 20;

/// Watches a run record by record.
///
/// ```
/// use sigmascale_lab::diagnose::{Alarms, Options};
/// use sigmascale_lab::history::{Record, RunInfo, StepRecord};
///
/// let mut alarms = Alarms::new(RunInfo::default(), Options::default())?;
/// let step = StepRecord { step: 7, loss: Some(f64::NAN), ..StepRecord::default() };
/// let events = alarms.observe(&Record::Step(step))?;
/// assert_eq!(events[0].alarm.as_deref(), Some("non-finite-loss"));
/// # Ok::<(), sigmascale::Error>(())
/// ```
#[derive(Debug)]
pub struct Alarms {
    run: RunInfo,
    options: Options,
    /// Fewest points of the growth of W_Q, and least steps between two of them.
    trend: (usize, u64),
    training: Training,
    loss: LossWatch,
    /// By layer as in `run`, then by head.
    heads: Vec<Vec<Head>>,
    raised: Vec<Alarm>,
}

/// What an alarm is about: its kind, and the layer's place with the head.
type Place = (AlarmKind, Option<(usize, usize)>);

impl Alarms {
    /// A run that has shown nothing yet.
    ///
    /// # Errors
    /// As [`Options::check`]; `is_mismatch` for a run of more than 2^20 heads.
    pub fn new(run: RunInfo, options: Options) -> Result<Self> {
        options.check()?;
        // Saved weights are few, and their norms have no noise.
        let exact = run.source == "checkpoints";
        let (trend, hold) = if exact { ((2, 0), 1) } else { ((POINTS, SPACING), options.hold) };
        let options = Options { hold, ..options };
        let count = run.layers.iter().fold(0usize, |sum, layer| sum.saturating_add(layer.heads));
        if count > MOST_HEADS {
            return Err(Error::mismatch(format_args!("the run has {count} heads, expected at most {MOST_HEADS}")));
        }
        let heads = run.layers.iter().map(|layer| vec![Head::default(); layer.heads]).collect();
        let (training, loss) = (Training::default(), LossWatch::default());
        Ok(Self { run, options, trend, training, loss, heads, raised: Vec::new() })
    }

    /// Takes in one record and returns what changed. Records come in the order of the run, the step's own line before
    /// those of its layers. Where steps go back, as after a restored checkpoint, trends start anew.
    ///
    /// # Errors
    /// `is_mismatch` if a record names a layer or a number of heads that the run does not have, or is a second first
    /// line.
    pub fn observe(&mut self, record: &Record) -> Result<Vec<Event>> {
        match record {
            Record::Run(_) => Err(Error::mismatch("a record of a run has one line of kind \"run\", the first")),
            Record::Step(step) => Ok(self.step(step)),
            Record::Layer(layer) => self.layer(layer),
            Record::Event(_) => Ok(vec![]),
        }
    }

    /// The first line of a record, and the run's watch.
    ///
    /// # Errors
    /// `is_format` if the line is no record, `is_mismatch` if it is not of kind `run` or of a later format; as
    /// [`Alarms::new`].
    pub fn from_line(line: &str, options: Options) -> Result<Self> {
        match Record::parse(line)? {
            Record::Run(run) if run.format == FORMAT => Self::new(run, options),
            Record::Run(run) => Err(Error::mismatch(later(run.format))),
            _ => Err(Error::mismatch("expected a first line of kind \"run\"")),
        }
    }

    /// Takes in lines as they stand in the file, as [`Alarms::observe`].
    ///
    /// # Errors
    /// `is_format` for a line that is no record, otherwise as there. Lines before the wrong one have been taken in.
    pub fn observe_lines(&mut self, lines: &str) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        for line in lines.lines().filter(|line| !line.trim().is_empty()) {
            events.extend(self.observe(&Record::parse(line)?)?);
        }
        Ok(events)
    }

    /// The run.
    pub fn run(&self) -> &RunInfo {
        &self.run
    }

    /// The thresholds.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Largest |logit| that is still normal in a layer, by its place in the run.
    pub(super) fn logit_limit(&self, layer: usize) -> f64 {
        self.options.logit_limit * self.run.layers[layer].operands.map_or(1.0, OperandFormat::resolution)
    }

    /// The watch of a head, by the layer's place in the run.
    pub(super) fn head(&self, layer: usize, head: usize) -> &Head {
        &self.heads[layer][head]
    }

    /// The head that went wrong first: the alarm of a head that was out of order first; an alarm of the whole run where
    /// no head has one. Of several since the same step, the cause comes before its consequence.
    pub fn first(&self) -> Option<&Alarm> {
        self.raised.iter().min_by_key(|alarm| (alarm.head.is_none(), alarm.since, alarm.kind))
    }

    /// What to do about the alarms so far, about the first one's kind first.
    pub fn advice(&self) -> Vec<Advice> {
        advice(self.first(), &self.raised)
    }

    /// The alarms that are up.
    pub fn up(&self) -> impl Iterator<Item = &Alarm> {
        self.raised.iter().filter(|alarm| alarm.cleared.is_none())
    }

    /// Every alarm so far, in the order in which they were raised.
    pub fn raised(&self) -> &[Alarm] {
        &self.raised
    }

    /// Takes in what the optimizer saw in one step.
    fn step(&mut self, record: &StepRecord) -> Vec<Event> {
        self.note(record.step, record.lr);
        let found = self.loss.observe(record, &self.options);
        let turned = found.into_iter().map(|(kind, turn, finding)| self.turn((kind, None), record.step, turn, finding));
        turned.collect()
    }

    /// Takes in what one layer showed.
    fn layer(&mut self, record: &LayerRecord) -> Result<Vec<Event>> {
        self.run.check(record).map_err(Error::mismatch)?;
        self.note(record.step, None);
        let at = self.run.layers.iter().position(|layer| layer.layer == record.layer).unwrap_or(0);
        let info = &self.run.layers[at];
        let reach = info.width.map(|width| (info.head_dim as f64 * width as f64).sqrt()).filter(|reach| *reach > 0.0);
        let evidence = Signs::limit(self.heads.iter().map(Vec::len).sum(), self.options.false_alarms);
        let context = Context {
            training: self.training.done(),
            reach,
            evidence,
            points: self.trend.0,
            spacing: self.trend.1,
            logit_limit: self.logit_limit(at),
        };
        let mut events = Vec::new();
        for head in 0..self.heads[at].len() {
            for (kind, turn, finding) in self.heads[at][head].observe(record, head, context, &self.options) {
                events.push(self.turn((kind, Some((at, head))), record.step, turn, finding));
            }
        }
        Ok(events)
    }

    /// Counts training; a step before the last one is a restart from a checkpoint.
    fn note(&mut self, step: u64, lr: Option<f64>) {
        if self.training.note(step, lr) {
            self.heads.iter_mut().flatten().for_each(Head::restart);
            self.loss.restart();
        }
    }

    /// Notes a turn of a gate, and says it.
    fn turn(&mut self, (kind, place): Place, step: u64, turn: Turn, finding: Finding) -> Event {
        let (layer, head) = (place.map(|(at, _)| self.run.layers[at].layer), place.map(|(_, head)| head));
        let front = match (layer, head) {
            (Some(layer), Some(head)) => format!("layer {layer}, head {head}: "),
            _ => String::new(),
        };
        let same = |alarm: &&mut Alarm| {
            alarm.cleared.is_none() && (alarm.kind, alarm.layer, alarm.head) == (kind, layer, head)
        };
        let (name, message) = match turn {
            Turn::Raised(since) => {
                let since = match (kind, place) {
                    // The test tells when the sign settled.
                    (AlarmKind::DeltaBias, Some((at, head))) => self.heads[at][head].biased_since(),
                    _ => since,
                };
                let Finding { value, limit, message } = finding;
                let message = front + &message;
                let alarm = Alarm {
                    kind,
                    layer,
                    head,
                    since,
                    raised: step,
                    cleared: None,
                    value,
                    limit,
                    message,
                    source: kind.source(),
                };
                self.raised.push(alarm);
                ("alarm", self.raised[self.raised.len() - 1].message.clone())
            }
            Turn::Cleared => {
                if let Some(alarm) = self.raised.iter_mut().find(same) {
                    alarm.cleared = Some(step);
                }
                ("clear", format!("{front}{} is normal again", kind.name()))
            }
        };
        Event { step, name: name.into(), layer, head, alarm: Some(kind.name().into()), message }
    }
}
