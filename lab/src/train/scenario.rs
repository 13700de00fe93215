//! `resume` and `lr-spike`: one run per policy, and all policies in shadow on the control run.

use super::model::{LAYERS, ModelKind};
use super::options::TrainOptions;
use super::state::TrainState;
use super::trainer::{Observed, StepRecord, Trainer};
use crate::stress::{Mode, PolicySummary, Scenario, StressOptions, StressResult, Tally, TraceRow, auto_c, median};
use serde::Serialize;
use sigmascale::attention::Delta;
use sigmascale::bound::Tail;
use sigmascale::fp8::OnOverflow;
use sigmascale::policy::{PolicyConfig, PolicyEvent, PolicyKind, ScaledTensor};
use sigmascale::{Error, Result};
use std::num::NonZero;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Steps after a transition in which overflows are counted, as in section 5.2 of the spectral-bounds paper.
pub const WINDOW: usize = 10;

/// What a scenario is asked for.
#[derive(Clone, Debug)]
pub struct LabOptions {
    /// Model, sizes, rate and seed of every run; policy, casts and mode in it are not read, and `compare` is for the first
    /// kind of casts.
    pub train: TrainOptions,
    /// What is cast.
    pub mode: Mode,
    /// Policies with their parameters, in the order of the result; one of a kind.
    pub policies: Vec<PolicyConfig>,
    /// What a value out of range becomes; the first is that of [`TrainResult::stress`].
    pub casts: Vec<OnOverflow>,
    /// Steps before the transition; by default 300 for `resume`, 100 for `lr-spike`.
    pub transition: Option<usize>,
    /// Steps after it; by default 30 and 50.
    pub after: Option<usize>,
    /// What the spike multiplies the rate by.
    pub spike: f64,
    /// How long it lasts, in steps.
    pub spike_steps: usize,
}

impl LabOptions {
    /// The defaults, for one model.
    pub fn new(model: ModelKind) -> Self {
        Self {
            train: TrainOptions::new(model, None),
            mode: Mode::default(),
            policies: PolicyKind::ALL.map(PolicyConfig::from).to_vec(),
            casts: OnOverflow::ALL.to_vec(),
            transition: None,
            after: None,
            spike: 8.0,
            spike_steps: 15,
        }
    }

    /// What a scenario that trains takes of the options of the others: policies, mode, seed, estimator and delta; `steps` in all.
    ///
    /// # Errors
    /// `is_argument` if the steps end at the transition or before.
    pub fn of_stress(
        scenario: Scenario,
        model: ModelKind,
        options: &StressOptions,
        seq_len: Option<usize>,
    ) -> Result<Self> {
        let base = Self::new(model);
        let transition = if scenario == Scenario::Resume { 300 } else { 100 };
        let after = match options.steps {
            Some(steps) if steps <= transition => {
                return Err(Error::argument(format_args!(
                    "steps {steps} must be more than {transition}: {} changes at step {transition}",
                    scenario.name()
                )));
            }
            steps => steps.map(|steps| steps - transition),
        };
        Ok(Self {
            train: TrainOptions {
                seed: options.seed,
                estimator: options.estimator,
                iterations: options.iterations,
                tail: Tail { delta: options.delta, ..base.train.tail },
                seq_len: seq_len.unwrap_or(base.train.seq_len),
                ..base.train
            },
            mode: options.mode,
            policies: options.policies.clone(),
            transition: Some(transition),
            after,
            ..base
        })
    }

    fn kinds(&self) -> Vec<PolicyKind> {
        self.policies.iter().map(PolicyConfig::kind).collect()
    }
}

/// How a run went on at the transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// It did not stop.
    NeverStopped,
    /// It stopped and resumed with everything that was saved.
    WithState,
    /// Weights and optimizer were kept, the scaling state was not: what the paper simulates.
    ScalesLost,
    /// The weights alone were kept.
    WeightsOnly,
}

impl Arm {
    /// All of them; the one that did not stop is the last.
    pub const ALL: [Self; 4] = [Self::WeightsOnly, Self::ScalesLost, Self::WithState, Self::NeverStopped];

    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::NeverStopped => "never stopped",
            Self::WithState => "with state",
            Self::ScalesLost => "scales lost",
            Self::WeightsOnly => "weights only",
        }
    }
}

/// One run, or one way of going on after the same first steps.
#[derive(Clone, Debug, Serialize)]
pub struct TrainRun {
    /// Policy; null for the control.
    pub policy: Option<PolicyKind>,
    /// What a value out of range became.
    pub casts: OnOverflow,
    /// How it went on at the transition.
    pub arm: Arm,
    /// Nothing overflowed with saturating casts, so that this run has the same bits and was not run again.
    pub same_as_saturating: bool,
    /// Whether losses and weights have the bits of the run that never stopped; null for that run.
    pub same_as_never_stopped: Option<bool>,
    /// Steps with an overflow among the first ten after the transition.
    pub window_overflow_steps: usize,
    /// Steps skipped among them.
    pub window_skipped: usize,
    /// Largest |x / descale| in them.
    pub window_max_scaled: f64,
    /// Steps with an overflow in the whole run.
    pub overflow_steps: usize,
    /// Values that overflowed in the whole run.
    pub overflow_values: u64,
    /// Steps skipped in the whole run.
    pub skipped: usize,
    /// Returns to the last good checkpoint.
    pub rollbacks: usize,
    /// Loss on held-out text at the end, attention in f32.
    pub held_out_loss: f64,
    /// Factor of the loss scaling at the end.
    pub loss_scale: f64,
    /// Loss of every step; null where it was not finite.
    pub losses: Vec<f64>,
}

/// How close training came to the end of the range under the worst-case bound.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Peak {
    /// Tensor.
    pub tensor: ScaledTensor,
    /// Largest |x / descale| of all layers and steps; 448 is the end. For logits the bound itself lies at 448 eta.
    pub max_scaled: f64,
    /// Where.
    pub layer: usize,
    /// When.
    pub step: usize,
}

/// What training adds to a result.
#[derive(Clone, Debug, Serialize)]
pub struct Training {
    /// The step at which the run stopped or the rate rose.
    pub transition: usize,
    /// Steps after it in which overflows are counted.
    pub window: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// Parameters of the model.
    pub parameters: usize,
    /// How P V was summed ([`PvAccumulator`](sigmascale::attention::PvAccumulator)).
    pub accumulator: String,
    /// What the backward pass took delta from.
    pub delta: Delta,
    /// Format of q, k and v where they are cast: `e4m3`, `e5m2` or `e4m3-240`.
    pub operands: &'static str,
    /// Whether they were rounded stochastically.
    pub stochastic: bool,
    /// Learning rate.
    pub rate: f64,
    /// What the spike multiplied it by; null without one.
    pub spike: Option<f64>,
    /// Steps of the spike.
    pub spike_steps: Option<usize>,
    /// The control first, then the policies.
    pub runs: Vec<TrainRun>,
    /// All policies in shadow on the control's trajectory, over all steps.
    pub shadow: Vec<PolicySummary>,
    /// Steps of it with an overflow among the first ten after the transition.
    pub shadow_window: Vec<usize>,
    /// The worst-case bound's, over all runs.
    pub peaks: Vec<Peak>,
}

/// Result of a scenario; serializes to the JSON of `sigmascale stress`.
#[derive(Clone, Debug, Serialize)]
pub struct TrainResult {
    /// Every policy in its own run, with the first kind of casts: `weights-only` for `resume`.
    #[serde(flatten)]
    pub stress: StressResult,
    /// Losses, skipped steps and the other ways of going on.
    pub training: Training,
}

/// Smallest, middle and largest of a few seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// Median.
    pub median: f64,
    /// Largest.
    pub max: f64,
}

impl Spread {
    /// Of values that are finite; `None` of nothing.
    ///
    /// ```
    /// use sigmascale_lab::train::Spread;
    /// assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { min: 1.0, median: 2.0, max: 3.0 }));
    /// ```
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|x| x.is_finite()).collect();
        let median = median(&mut values)?;
        Some(Self { min: values[0], median, max: values[values.len() - 1] })
    }
}

/// Counts the steps of all runs.
struct Meter<'a> {
    done: AtomicUsize,
    total: usize,
    progress: &'a (dyn Fn(usize, usize) + Sync),
}

impl Meter<'_> {
    fn add(&self, steps: usize) {
        (self.progress)(self.done.fetch_add(steps, Ordering::Relaxed) + steps, self.total);
    }
}

/// Steps and rates of a scenario.
#[derive(Clone, Copy)]
struct Course {
    scenario: Scenario,
    transition: usize,
    steps: usize,
    spike: f64,
    spike_steps: usize,
}

impl Course {
    fn new(scenario: Scenario, options: &LabOptions) -> Result<Self> {
        let (transition, after) = match scenario {
            Scenario::Resume => (300, 30),
            Scenario::LrSpike => (100, 50),
            _ => return Err(Error::argument(format_args!("{} trains nothing", scenario.name()))),
        };
        let (transition, after) = (options.transition.unwrap_or(transition), options.after.unwrap_or(after));
        for (name, value) in [("steps before the transition", transition), ("steps after the transition", after)] {
            if !(1..=100_000).contains(&value) {
                return Err(Error::argument(format_args!("{name}: {value} must lie between 1 and 100000")));
            }
        }
        if !(options.spike.is_finite() && options.spike > 0.0) {
            return Err(Error::argument(format_args!("spike {} must be finite and greater than zero", options.spike)));
        }
        Ok(Self {
            scenario,
            transition,
            steps: transition + after,
            spike: options.spike,
            spike_steps: options.spike_steps,
        })
    }

    fn factor(&self, step: usize) -> f64 {
        let since = step.checked_sub(self.transition);
        let spikes = self.scenario == Scenario::LrSpike && since.is_some_and(|since| since < self.spike_steps);
        if spikes { self.spike } else { 1.0 }
    }

    /// Steps of a policy, those before a stop left out, which all of its runs share.
    fn own_steps(&self) -> usize {
        match self.scenario {
            Scenario::Resume => Arm::ALL.len() * (self.steps - self.transition),
            _ => self.steps,
        }
    }

    /// Steps of all jobs with so many kinds of casts each.
    fn all_steps(&self, jobs: usize, casts: usize) -> usize {
        let shared = if self.scenario == Scenario::Resume { self.transition } else { 0 };
        jobs * (shared + casts * self.own_steps())
    }

    /// Steps of a trainer up to `end`.
    fn advance(&self, trainer: &mut Trainer, end: usize, meter: &Meter<'_>) -> Result<Vec<StepRecord>> {
        let mut records = Vec::new();
        while (trainer.steps() as usize) < end {
            records.push(trainer.step(self.factor(trainer.steps() as usize))?);
            meter.add(1);
        }
        Ok(records)
    }
}

/// One run with all its records.
struct Done {
    run: TrainRun,
    records: Vec<StepRecord>,
}

/// Runs a scenario.
///
/// # Errors
/// `is_argument` if an option breaks its rule; otherwise as [`Trainer::step`].
pub fn run(scenario: Scenario, options: &LabOptions) -> Result<TrainResult> {
    run_with_progress(scenario, options, &|_, _| ())
}

/// As [`run`], and calls `progress` with the steps that are done, of all runs together, and how many there are at most.
///
/// # Errors
/// As [`run`].
pub fn run_with_progress(
    scenario: Scenario,
    options: &LabOptions,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<TrainResult> {
    let course = Course::new(scenario, options)?;
    let Tail { delta, .. } = options.train.tail;
    let TrainOptions { seq_len, batch, .. } = options.train;
    // Delta is that of a whole run.
    let tail = Tail { delta, seq_len, batch, steps: course.steps };
    let options = &LabOptions { train: TrainOptions { tail, ..options.train }, ..options.clone() };
    distinct("policy", &options.kinds(), PolicyKind::name)?;
    distinct("kind of casts", &options.casts, OnOverflow::name)?;
    // The control is the longest, since it carries the shadows: it starts first.
    let jobs: Vec<Option<PolicyConfig>> =
        std::iter::once(None).chain(options.policies.iter().copied().map(Some)).collect();
    let total = course.all_steps(jobs.len(), options.casts.len());
    // Options that are refused are so before anything is trained.
    let parameters = Trainer::new(TrainOptions { mode: options.mode, ..options.train })?.parameters();
    let meter = Meter { done: AtomicUsize::new(0), total, progress };
    let done = in_parallel(jobs.len(), |at| follow(&course, options, jobs[at], &meter))?;
    Ok(gather(&course, options, parameters, done))
}

/// Refuses an empty list and one that names a thing twice.
fn distinct<T: Copy + PartialEq>(what: &str, all: &[T], name: impl Fn(T) -> &'static str) -> Result<()> {
    if all.is_empty() {
        return Err(Error::argument(format_args!("a training scenario needs at least one {what}")));
    }
    match all.iter().enumerate().find(|(at, one)| all[..*at].contains(one)) {
        Some((_, twice)) => Err(Error::argument(format_args!("{what} {} is named twice", name(*twice)))),
        None => Ok(()),
    }
}

/// Independent jobs, one thread each, on as many threads as there are cores; results in their order. The work inside a
/// job is too small to be shared.
fn in_parallel<T: Send>(jobs: usize, work: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(jobs);
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<Result<T>>>> = (0..jobs).map(|_| Mutex::new(None)).collect();
    let alone = |at: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let pool = pool.map_err(|error| Error::argument(format_args!("no thread for a run: {error}")))?;
        pool.install(|| work(at))
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(slot) = results.get(at) else { break };
                    let result = alone(at);
                    *slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(result);
                }
            });
        }
    });
    results
        .into_iter()
        .map(|slot| {
            let result = slot.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
            result.unwrap_or_else(|| Err(Error::argument("a training run ended without a result")))
        })
        .collect()
}

/// A policy (or the control) with every kind of casts and every way of going on.
fn follow(course: &Course, options: &LabOptions, policy: Option<PolicyConfig>, meter: &Meter<'_>) -> Result<Vec<Done>> {
    let mut all: Vec<Done> = Vec::new();
    // What `resume` trains once: its steps before the stop are those of the first kind of casts.
    let mut trunk: Option<(Vec<StepRecord>, TrainState)> = None;
    for (place, &casts) in options.casts.iter().enumerate() {
        let clean = |done: &Done| done.run.overflow_values == 0;
        if place > 0 && all.iter().all(clean) {
            let again = |done: &Done| Done {
                run: TrainRun { casts, same_as_saturating: true, ..done.run.clone() },
                records: Vec::new(),
            };
            let copies: Vec<Done> = all.iter().map(again).collect();
            all.extend(copies);
            meter.add(course.own_steps());
            continue;
        }
        let train = TrainOptions {
            policy,
            mode: options.mode,
            casts,
            compare: options.train.compare && place == 0,
            ..options.train
        };
        let shadows: &[PolicyConfig] = if policy.is_none() && place == 0 { &options.policies } else { &[] };
        let mut trainer = match &trunk {
            Some((_, state)) => Trainer::resume(train, state)?,
            None => Trainer::new(train)?,
        };
        trainer.shadow(shadows)?;
        if course.scenario == Scenario::LrSpike {
            let records = course.advance(&mut trainer, course.steps, meter)?;
            all.push(finish(course, policy, casts, Arm::NeverStopped, &trainer, records)?);
            continue;
        }
        let before = course.advance(&mut trainer, course.transition, meter)?;
        if trunk.is_none() {
            // Through the bytes of the file: a stop is real.
            let name = Path::new("saved state");
            let state = TrainState::decode(name, &trainer.state().encode(name)?)?;
            trunk = Some((before, state));
        }
        let Some((first, state)) = &trunk else { continue };
        let records = |after: Vec<StepRecord>| first.iter().cloned().chain(after).collect();
        let straight = course.advance(&mut trainer, course.steps, meter)?;
        let straight = finish(course, policy, casts, Arm::NeverStopped, &trainer, records(straight))?;
        for arm in Arm::ALL.into_iter().filter(|arm| *arm != Arm::NeverStopped) {
            let mut resumed = go_on(train, state, arm)?;
            if arm == Arm::WeightsOnly {
                resumed.shadow(shadows)?;
            }
            let after = course.advance(&mut resumed, course.steps, meter)?;
            let mut done = finish(course, policy, casts, arm, &resumed, records(after))?;
            done.run.same_as_never_stopped = Some(same(&done.run, &straight.run));
            all.push(done);
        }
        all.push(straight);
    }
    Ok(all)
}

/// A run that stopped, in one of the ways of going on.
fn go_on(options: TrainOptions, state: &TrainState, arm: Arm) -> Result<Trainer> {
    let mut trainer = Trainer::resume(options, state)?;
    match arm {
        Arm::NeverStopped | Arm::WithState => {}
        Arm::ScalesLost => trainer.forget_scales()?,
        Arm::WeightsOnly => trainer.forget_all_but_weights()?,
    }
    Ok(trainer)
}

/// The same bits: every loss, and the weights through their held-out loss.
fn same(a: &TrainRun, b: &TrainRun) -> bool {
    let bits = |run: &TrainRun| {
        run.losses.iter().chain([&run.held_out_loss, &run.loss_scale]).map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    bits(a) == bits(b)
}

fn finish(
    course: &Course,
    policy: Option<PolicyConfig>,
    casts: OnOverflow,
    arm: Arm,
    trainer: &Trainer,
    records: Vec<StepRecord>,
) -> Result<Done> {
    let own = |record: &StepRecord| record.observed.iter().filter(|o| o.own).map(|o| o.row.overflow).sum::<u64>();
    let window = &records[course.transition..records.len().min(course.transition + WINDOW)];
    let largest = window.iter().flat_map(|record| &record.observed).filter(|o| o.own).map(|o| o.row.max_scaled);
    let largest = largest.filter(|scaled| scaled.is_finite());
    let run = TrainRun {
        policy: policy.map(|policy| policy.kind()),
        casts,
        arm,
        same_as_saturating: false,
        same_as_never_stopped: None,
        window_overflow_steps: window.iter().filter(|record| own(record) > 0).count(),
        window_skipped: window.iter().filter(|record| record.skipped).count(),
        window_max_scaled: largest.fold(0.0, f64::max),
        overflow_steps: records.iter().filter(|record| own(record) > 0).count(),
        overflow_values: records.iter().map(own).sum(),
        skipped: records.iter().filter(|record| record.skipped).count(),
        rollbacks: records.iter().filter(|record| record.rolled_back).count(),
        held_out_loss: trainer.held_out_loss()?,
        loss_scale: trainer.loss_scale(),
        losses: records.iter().map(|record| record.loss).collect(),
    };
    Ok(Done { run, records })
}

fn gather(course: &Course, options: &LabOptions, parameters: usize, done: Vec<Vec<Done>>) -> TrainResult {
    let primary = |done: &Done| {
        done.run.casts == options.casts[0]
            && done.run.arm == if course.scenario == Scenario::Resume { Arm::WeightsOnly } else { Arm::NeverStopped }
    };
    let mut peaks: Vec<Peak> = Vec::new();
    let (mut policies, mut shadow, mut shadow_window, mut trace) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for done in done.iter().flatten() {
        for record in &done.records {
            let worst_case = |o: &&Observed| o.row.policy == PolicyKind::Geometry;
            record.observed.iter().filter(worst_case).for_each(|o| raise(&mut peaks, o, record.step as usize));
        }
    }
    for done in done.iter().flatten().filter(|done| primary(done)) {
        match done.run.policy {
            Some(kind) => {
                policies.push(summary(options, kind, &done.records, true));
                trace.extend(rows(&done.records));
            }
            None => {
                for kind in options.kinds() {
                    shadow.push(summary(options, kind, &done.records, false));
                    let over = |record: &&StepRecord| {
                        record.observed.iter().any(|o| o.row.policy == kind && o.row.overflow > 0)
                    };
                    shadow_window.push(done.records.iter().skip(course.transition).take(WINDOW).filter(over).count());
                }
            }
        }
    }
    let place = |kind| options.policies.iter().position(|policy| policy.kind() == kind);
    trace.sort_by_key(|row: &TraceRow| (row.step, place(row.policy), row.layer));
    let train = &options.train;
    let mut notes = vec![format!(
        "a model of {parameters} parameters on a generated language, {} sequences a step; every policy trains a run of its own \
         from the same parameters and text",
        train.batch
    )];
    notes.extend(train.estimator.caveat().map(|caveat| format!("estimator {}: {caveat}", train.estimator.name())));
    let stress = StressResult {
        scenario: course.scenario,
        mode: options.mode,
        model: train.model.name().to_owned(),
        model_layers: LAYERS,
        model_layers_total: LAYERS,
        seed: train.seed,
        steps: course.steps,
        estimator: train.estimator,
        seq_len: train.seq_len,
        tokens: None,
        tail: Some(train.tail),
        auto_c_burn_in: auto_c(&options.policies).burn_in,
        parameters: options.policies.clone(),
        notes,
        policies,
        unavailable: Vec::new(),
        trace,
    };
    let training = Training {
        transition: course.transition,
        window: WINDOW,
        batch: train.batch,
        parameters,
        accumulator: train.accumulator.to_string(),
        operands: train.operands.name(),
        stochastic: train.stochastic,
        delta: train.delta,
        rate: train.rate,
        spike: (course.scenario == Scenario::LrSpike).then_some(course.spike),
        spike_steps: (course.scenario == Scenario::LrSpike).then_some(course.spike_steps),
        runs: done.into_iter().flatten().map(|done| done.run).collect(),
        shadow,
        shadow_window,
        peaks,
    };
    TrainResult { stress, training }
}

fn rows(records: &[StepRecord]) -> impl Iterator<Item = TraceRow> + '_ {
    records.iter().flat_map(|record| &record.observed).filter(|o| o.own).map(|o| o.row.clone())
}

fn summary(options: &LabOptions, kind: PolicyKind, records: &[StepRecord], own: bool) -> PolicySummary {
    let burn_in = if kind == PolicyKind::AutoC { auto_c(&options.policies).burn_in as usize } else { 0 };
    let mut tally = Tally::default();
    let mut assumption = None;
    for record in records {
        for o in record.observed.iter().filter(|o| o.own == own && o.row.policy == kind) {
            tally.add(o.row.layer, record.step as usize, &o.seen);
            if (record.step as usize) < burn_in {
                tally.burn_in(options.mode, &o.report);
            }
            tally.compare(&o.row);
            let fell = |event: &&PolicyEvent| matches!(event, PolicyEvent::FellBack { .. });
            tally.fallbacks += o.report.events.iter().filter(fell).count();
        }
    }
    if kind == PolicyKind::GeometryCStar {
        assumption = Some(sigmascale::policy::ISOTROPY);
    }
    tally.summary(kind, LAYERS, assumption)
}

fn raise(peaks: &mut Vec<Peak>, observed: &Observed, step: usize) {
    for report in &observed.report.tensors {
        let (tensor, max_scaled) = (report.tensor, f64::from(report.max_scaled));
        let peak = Peak { tensor, max_scaled, layer: observed.row.layer, step };
        match peaks.iter_mut().find(|peak| peak.tensor == tensor) {
            // Not by `max`: NaN must not hide.
            Some(old) if max_scaled > old.max_scaled => *old = peak,
            Some(_) => {}
            None => peaks.push(peak),
        }
    }
}
