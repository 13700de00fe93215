//! The alarms of a run while it goes on: records in, events out.

use super::alarm::{Alarm, AlarmKind};
use super::head::{Finding, Head};
use super::loss::LossWatch;
use super::options::Options;
use super::training::Training;
use super::trend::{Turn, location};
use crate::error::{Error, Result};
use crate::history::{Event, LayerRecord, Record, RunInfo, StepRecord};

/// Fewest heads whose growth is compared with that of the others.
const POPULATION: usize = 4;

/// Watches a run record by record.
///
/// ```
/// use sigmascale::diagnose::{Alarms, Options};
/// use sigmascale::history::{Record, RunInfo, StepRecord};
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
    /// As [`Options::check`].
    pub fn new(run: RunInfo, options: Options) -> Result<Self> {
        options.check()?;
        let heads = run.layers.iter().map(|layer| vec![Head::default(); layer.heads]).collect();
        let (training, loss) = (Training::default(), LossWatch::default());
        Ok(Self { run, options, training, loss, heads, raised: Vec::new() })
    }

    /// Takes in one record and returns what changed. Records come in the order of the run; within a step in any order. Where steps
    /// go back, as after a restored checkpoint, windows start anew.
    ///
    /// # Errors
    /// `is_mismatch` if a record names a layer or a number of heads that the run does not have, or is a second first line.
    pub fn observe(&mut self, record: &Record) -> Result<Vec<Event>> {
        match record {
            Record::Run(_) => Err(Error::mismatch("a record of a run has one line of kind \"run\", the first")),
            Record::Step(step) => Ok(self.step(step)),
            Record::Layer(layer) => self.layer(layer),
            Record::Event(_) => Ok(vec![]),
        }
    }

    /// The alarms that are up.
    pub fn up(&self) -> impl Iterator<Item = &Alarm> {
        self.raised.iter().filter(|alarm| alarm.cleared.is_none())
    }

    /// Every alarm so far, in the order in which they were raised.
    pub fn raised(&self) -> &[Alarm] {
        &self.raised
    }

    /// First step at which the loss was out of order.
    pub fn loss_shows(&self) -> Option<u64> {
        self.raised.iter().filter(|alarm| alarm.kind.is_loss()).map(|alarm| alarm.since).min()
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
        let training = self.training.at(record.step);
        let evidence = super::trend::Signs::limit(self.heads.iter().map(Vec::len).sum(), self.options.false_alarms);
        for (head, watch) in self.heads[at].iter_mut().enumerate() {
            watch.push(record, head, training, evidence, &self.options);
        }
        let exponents = self.heads.iter().flatten().filter_map(Head::exponent);
        let others = location(exponents.clone()).filter(|_| exponents.count() >= POPULATION);
        let mut events = Vec::new();
        for head in 0..self.heads[at].len() {
            for (kind, turn, finding) in self.heads[at][head].judge(record, head, others, evidence, &self.options) {
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
