//! Planted failures: each kind is raised on one record and not on its calm twin; and what holds for any record.

use super::*;
use crate::history::{FORMAT, LayerInfo, LayerRecord, OperandFormat, Record, RunInfo, StepRecord};
use proptest::prelude::*;

const HEADS: usize = 2;
const LR: f64 = 1e-3;

fn run() -> RunInfo {
    let layer = |layer| LayerInfo { layer, heads: HEADS, kv_heads: 1, head_dim: 16, width: Some(64), operands: None };
    RunInfo { format: FORMAT, source: "lab".into(), layers: vec![layer(1), layer(3)], ..RunInfo::default() }
}

fn alarms() -> Alarms {
    Alarms::new(run(), Options::default()).unwrap()
}

/// A run of `steps` steps with a layer line of layer 3 every tenth; `loss` and `layer` say what goes wrong.
fn record(steps: u64, step_of: impl Fn(u64) -> StepRecord, layer_of: impl Fn(u64) -> LayerRecord) -> Vec<Record> {
    let lines = |step: u64| {
        let mut lines = vec![Record::Step(StepRecord { step, lr: Some(LR), ..step_of(step) })];
        if step.is_multiple_of(10) {
            lines.push(Record::Layer(LayerRecord { step, layer: 3, ..layer_of(step) }));
        }
        lines
    };
    (0..steps).flat_map(lines).collect()
}

fn calm_step(_: u64) -> StepRecord {
    StepRecord { loss: Some(2.0), loss_scale: Some(65536.0), ..StepRecord::default() }
}

/// A value of head 1 beside a calm one of head 0.
fn beside(calm: f64, value: f64) -> Vec<f64> {
    vec![calm, value]
}

/// A change of sign that is no pattern: bits of a Weyl sequence.
fn sign(step: u64) -> f64 {
    if step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 0 { 1.0 } else { -1.0 }
}

/// Records that raise a kind, and calm twins of them.
fn planted(kind: AlarmKind, fails: bool) -> Vec<Record> {
    // Layer records from 400 on are out of order if the run fails.
    let late = move |step: u64| fails && step >= 400;
    let layers = move |of: &dyn Fn(u64) -> LayerRecord| record(1000, calm_step, of);
    let steps = move |of: &dyn Fn(u64) -> StepRecord| record(1000, of, |_| LayerRecord::default());
    match kind {
        AlarmKind::DeltaBias => layers(&|step| LayerRecord {
            delta_bias: beside(3e-4 * sign(step), 3e-4 * if late(step) { 1.0 } else { sign(step + 7) }),
            ..LayerRecord::default()
        }),
        AlarmKind::RepeatedMaxima => layers(&|step| LayerRecord {
            repeated: beside(0.05, if late(step) { 0.3 } else { 0.05 + 0.02 * sign(step) }),
            ..LayerRecord::default()
        }),
        AlarmKind::Saturation => layers(&|step| LayerRecord {
            saturated: beside(0.0, if late(step) { 0.01 } else { 1e-4 }),
            ..LayerRecord::default()
        }),
        // The norm may grow by sqrt(16 * 64) * 1e-3 = 0.032 a step.
        AlarmKind::Growth => layers(&|step| LayerRecord {
            w_q: beside(4.0, 4.0 + 0.002 * step as f64 + if late(step) { 0.018 * (step - 400) as f64 } else { 0.0 }),
            ..LayerRecord::default()
        }),
        AlarmKind::LogitLimit => layers(&|step| LayerRecord {
            logit_max: beside(30.0, if late(step) { 1500.0 } else { 500.0 }),
            ..LayerRecord::default()
        }),
        AlarmKind::BoundExceeded => layers(&|step| LayerRecord {
            logit_max: beside(30.0, 90.0),
            bound: beside(200.0, if late(step) { 80.0 } else { 90.0 }),
            ..LayerRecord::default()
        }),
        AlarmKind::EntropyCollapse => layers(&|step| LayerRecord {
            entropy: beside(2.0, if late(step) { 1e-3 } else { 0.5 }),
            ..LayerRecord::default()
        }),
        AlarmKind::LossScale => steps(&|step| StepRecord {
            loss: Some(2.0),
            loss_scale: Some(65536.0 / if late(step) { f64::exp2((1 + (step - 400) / 40) as f64) } else { 1.0 }),
            ..StepRecord::default()
        }),
        AlarmKind::SkippedSteps => steps(&|step| StepRecord {
            skipped: if late(step) { step % 5 == 0 } else { step % 25 == 0 },
            ..calm_step(step)
        }),
        AlarmKind::LossSpike => steps(&|step| StepRecord {
            loss: Some(if late(step) { 3.0 } else { 2.0 + 0.05 * sign(step) }),
            ..StepRecord::default()
        }),
        AlarmKind::NonFiniteLoss => steps(&|step| StepRecord {
            loss: Some(if late(step) { f64::INFINITY } else { 2.0 }),
            ..StepRecord::default()
        }),
    }
}

#[test]
fn each_planted_failure_raises_its_kind_and_its_calm_twin_nothing() {
    for kind in AlarmKind::ALL {
        let calm = Diagnosis::new(run(), &planted(kind, false), Options::default()).unwrap();
        assert_eq!(
            (calm.verdict, calm.alarms.len(), calm.advice.len()),
            (RunVerdict::Calm, 0, 0),
            "{kind:?}: {:?}",
            calm.alarms
        );
        let failed = Diagnosis::new(run(), &planted(kind, true), Options::default()).unwrap();
        let kinds: Vec<_> = failed.alarms.iter().map(|alarm| alarm.kind).collect();
        assert_eq!(kinds, [kind], "{:?}", failed.alarms);
        let first = failed.first.unwrap();
        let place = if first.kind < AlarmKind::LossScale { (Some(3), Some(1)) } else { (None, None) };
        assert_eq!((first.layer, first.head), place, "{kind:?}");
        // A trend over 24 records and a share of 100 steps turn later than the run.
        // A test of signs may start before it.
        assert!((300..=560).contains(&first.since) && first.raised >= first.since, "{first:?}");
        assert!(first.raised <= 800, "{first:?}");
        assert!(failed.advice[0].kind == kind && failed.verdict == RunVerdict::Alarm);
    }
}

#[test]
fn the_first_head_is_the_one_that_was_out_of_order_first() {
    let layer = |step: u64| LayerRecord {
        logit_max: vec![if step >= 300 { 2000.0 } else { 10.0 }, if step >= 200 { 2000.0 } else { 10.0 }],
        ..LayerRecord::default()
    };
    let step = |step: u64| StepRecord { loss: Some(if step >= 100 { 9.0 } else { 2.0 }), ..StepRecord::default() };
    let diagnosis = Diagnosis::new(run(), &record(500, step, layer), Options::default()).unwrap();
    let first = diagnosis.first.unwrap();
    assert_eq!((first.head, first.since, first.raised), (Some(1), 200, 220));
    // The loss shows it when 10 % of the mean of 50 losses are new: (45 * 2 + 2 * 9) / 50 and more.
    assert_eq!(diagnosis.loss_shows, Some(101));
    assert_eq!(diagnosis.lead, Some(101 - 220));
    assert_eq!(
        diagnosis.heads.iter().map(|head| (head.layer, head.head)).collect::<Vec<_>>(),
        [(1, 0), (1, 1), (3, 0), (3, 1)]
    );
}

#[test]
fn the_lead_counts_from_the_first_alarm_of_the_head() {
    // Delta is biased from the start, which takes many records to see; logits pass the limit before that.
    let layer = |step: u64| LayerRecord {
        logit_max: beside(10.0, if step >= 100 { 2000.0 } else { 10.0 }),
        delta_bias: vec![if step.is_multiple_of(20) { 1e-9 } else { -1e-9 }, 1e-3],
        ..LayerRecord::default()
    };
    let step = |step: u64| StepRecord { loss: Some(if step >= 700 { 9.0 } else { 2.0 }), ..StepRecord::default() };
    let diagnosis = Diagnosis::new(run(), &record(1000, step, layer), Options::default()).unwrap();
    let first = diagnosis.first.unwrap();
    let limit = diagnosis.alarms.iter().find(|alarm| alarm.kind == AlarmKind::LogitLimit).unwrap();
    assert_eq!((first.kind, first.since, limit.raised), (AlarmKind::DeltaBias, 0, 120));
    assert!(first.raised > 300);
    assert_eq!((diagnosis.loss_shows, diagnosis.lead), (Some(701), Some(701 - 120)));
}

#[test]
fn the_limit_of_logits_is_that_of_their_format() {
    for (operands, limit) in [
        (None, 1000.0),
        (Some(OperandFormat::Fp8), 1000.0),
        (Some(OperandFormat::Bf16), 1000.0),
        (Some(OperandFormat::F16), 8000.0),
        (Some(OperandFormat::F32), 65_536_000.0),
    ] {
        let mut run = run();
        run.layers.iter_mut().for_each(|layer| layer.operands = operands);
        let of = |logit: f64| {
            let layer = |_| LayerRecord { logit_max: beside(logit, logit), ..LayerRecord::default() };
            Diagnosis::new(run.clone(), &record(100, calm_step, layer), Options::default()).unwrap()
        };
        assert_eq!(of(0.99 * limit).verdict, RunVerdict::Calm, "{operands:?}");
        assert_eq!(of(limit).first.unwrap().limit, limit, "{operands:?}");
        // The same root of the logit, as a share of the limit, is reached at the same step.
        let grows = |step: u64| limit * (step as f64 / 200.0).powi(2);
        let layer = |step| LayerRecord { logit_max: beside(0.0, grows(step)), ..LayerRecord::default() };
        let diagnosis = Diagnosis::new(run.clone(), &record(100, calm_step, layer), Options::default()).unwrap();
        let head = &diagnosis.heads[3];
        assert_eq!((head.logit_limit, head.reaches_limit), (limit, Some(200)), "{operands:?}");
    }
}

#[test]
fn other_weights_in_the_run_are_no_growth() {
    let jump =
        |step: u64| LayerRecord { w_q: beside(4.0, if step >= 500 { 9.0 } else { 4.0 }), ..LayerRecord::default() };
    let diagnosis = Diagnosis::new(run(), &record(1000, calm_step, jump), Options::default()).unwrap();
    assert_eq!(diagnosis.verdict, RunVerdict::Calm, "{:?}", diagnosis.alarms);
}

#[test]
fn the_limit_is_reached_where_a_constant_growth_reaches_it() {
    // The square root of the logit grows by 0.02 a step: 1000 is reached at step 1582.
    let logits =
        |step: u64| LayerRecord { logit_max: beside(30.0, (0.02 * step as f64).powi(2)), ..LayerRecord::default() };
    let diagnosis = Diagnosis::new(run(), &record(800, calm_step, logits), Options::default()).unwrap();
    assert_eq!((diagnosis.heads[2].reaches_limit, diagnosis.heads[3].reaches_limit), (None, Some(1582)));
}

#[test]
fn a_restored_run_starts_its_trends_anew() {
    let mut watch = alarms();
    for record in
        planted(AlarmKind::Growth, true).iter().take_while(|record| !matches!(record, Record::Step(s) if s.step == 500))
    {
        watch.observe(record).unwrap();
    }
    for record in planted(AlarmKind::Growth, false) {
        watch.observe(&record).unwrap();
    }
    assert!(watch.up().next().is_none(), "{:?}", watch.raised());
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut watch = alarms();
    let layer = |layer, count| Record::Layer(LayerRecord { layer, sigma: vec![1.0; count], ..LayerRecord::default() });
    for (record, rule) in [
        (layer(2, HEADS), "layer 2 is not one"),
        (layer(3, 3), "expected 2 values of sigma for layer 3, got 3"),
        (Record::Run(run()), "one line of kind"),
    ] {
        let error = watch.observe(&record).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains(rule), "{error}");
    }
    assert!(watch.observe_lines("{}").unwrap_err().is_format());
    let many = RunInfo { layers: vec![LayerInfo { heads: usize::MAX, ..LayerInfo::default() }; 3], ..run() };
    assert!(Alarms::new(many, Options::default()).unwrap_err().is_mismatch());
    assert!(Alarms::from_line(r#"{"kind": "step", "step": 1}"#, Options::default()).unwrap_err().is_mismatch());
    for wrong in [Options { hold: 0, ..Options::default() }, Options { growth: f64::NAN, ..Options::default() }] {
        assert!(Alarms::new(run(), wrong).unwrap_err().is_argument());
    }
}

/// Numbers as a record may hold them.
fn number() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => 0.0..2000.0f64,
        2 => -1.0..1.0f64,
        1 => prop::sample::select(vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, f64::MIN_POSITIVE, f64::MAX]),
    ]
}

fn any_record() -> impl Strategy<Value = Record> {
    let column = || prop_oneof![1 => Just(vec![]), 3 => prop::collection::vec(number(), HEADS)];
    let step = (
        prop_oneof![20 => 0..400u64, 1 => Just(u64::MAX)],
        prop::option::of(number()),
        prop::option::of(number()),
        any::<bool>(),
    )
        .prop_map(|(step, loss, lr, skipped)| {
            Record::Step(StepRecord { step, loss, lr, loss_scale: loss, skipped, ..StepRecord::default() })
        });
    let layer = (0..400u64, prop::sample::select(vec![1usize, 3]), prop::collection::vec(column(), 8)).prop_map(
        |(step, layer, mut columns)| {
            let mut next = || columns.pop().unwrap_or_default();
            Record::Layer(LayerRecord {
                step,
                layer,
                w_q: next(),
                bound: next(),
                logit_max: next(),
                repeated: next(),
                delta_bias: next(),
                entropy: next(),
                utilization: next(),
                saturated: next(),
                ..LayerRecord::default()
            })
        },
    );
    prop_oneof![step, layer]
}

/// A head whose weights are zero keeps its bound, and one that reaches its bound, too.
#[test]
fn a_logit_at_its_bound_does_not_exceed_it() {
    for (bound, logit, raised) in [(0.0, 0.0, false), (0.0, 1e-9, true), (30.0, 30.0, false), (30.0, 30.1, true)] {
        let layer =
            |_| LayerRecord { bound: vec![bound; HEADS], logit_max: vec![logit; HEADS], ..LayerRecord::default() };
        let mut watch = Alarms::new(run(), Options { hold: 1, ..Options::default() }).unwrap();
        let records = record(50, calm_step, layer);
        let events: Vec<_> = records.iter().flat_map(|record| watch.observe(record).unwrap()).collect();
        assert_eq!(events.len(), if raised { HEADS } else { 0 }, "{bound} {logit}: {events:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any record: no panic, and the same events whether lines come at once or one at a time.
    #[test]
    fn lines_at_once_are_lines_one_by_one(
        mut records in prop::collection::vec(any_record(), 0..120), sorted in any::<bool>()
    ) {
        let key = |record: &Record| match record {
            Record::Step(step) => (step.step, 0),
            Record::Layer(layer) => (layer.step, 1),
            _ => (0, 2),
        };
        if sorted {
            records.sort_by_key(key);
        }
        let options = Options { hold: 1, window: 3, ..Options::default() };
        let lines: Vec<String> = records.iter().map(|record| serde_json::to_string(record).unwrap()).collect();
        let mut at_once = Alarms::new(run(), options).unwrap();
        let all = at_once.observe_lines(&lines.join("\n")).unwrap();
        let mut single = Alarms::new(run(), options).unwrap();
        let mut each = Vec::new();
        for line in &lines {
            each.extend(single.observe_lines(line).unwrap());
        }
        prop_assert_eq!(&all, &each);
        // A place is raised and cleared in turns.
        let mut up = std::collections::BTreeSet::new();
        for event in &all {
            let place = (event.alarm.clone(), event.layer, event.head);
            let turned = if event.name == "alarm" { up.insert(place) } else { up.remove(&place) };
            prop_assert!(turned);
        }
        prop_assert_eq!(up.len(), at_once.up().count());
        Diagnosis::new(run(), &records, options).unwrap();
    }

    /// Hysteresis: on a constant signal, whatever it is, nothing is raised twice and nothing that was raised is
    /// cleared.
    #[test]
    fn nothing_flaps_on_a_constant_signal(
        values in prop::collection::vec(number(), 8), loss in number(), hold in 1usize..5
    ) {
        let pair = |n: usize| vec![values[n]; HEADS];
        let layer = |_| LayerRecord {
            w_q: pair(0), bound: pair(1), logit_max: pair(2), repeated: pair(3), delta_bias: pair(4), entropy: pair(5),
            utilization: pair(6), saturated: pair(7), ..LayerRecord::default()
        };
        let step = |_| StepRecord { loss: Some(loss), loss_scale: Some(1024.0), ..StepRecord::default() };
        let mut watch = Alarms::new(run(), Options { hold, window: 6, ..Options::default() }).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for record in record(600, step, layer) {
            for event in watch.observe(&record).unwrap() {
                prop_assert_eq!(&event.name, "alarm");
                prop_assert!(seen.insert((event.alarm, event.layer, event.head)));
            }
        }
    }

    /// Any text as a line: an error or events, no panic.
    #[test]
    fn any_line_is_read_or_refused(
        line in ".{0,80}", kind in prop::sample::select(vec!["run", "step", "layer", "event"]), value in ".{0,20}"
    ) {
        let mut watch = alarms();
        let _ = watch.observe_lines(&line);
        let _ = watch.observe_lines(&format!(r#"{{"kind": "{kind}", "step": 1, "layer": 3, "w_q": {value}}}"#));
        let _ = Alarms::from_line(&line, Options::default());
    }
}

#[test]
fn a_run_that_goes_on_from_an_earlier_step_does_not_show_a_failure_by_its_higher_loss() {
    let falling = |step: u64| StepRecord { loss: Some(4.0 - 2e-3 * step as f64), ..StepRecord::default() };
    let layers = |_| LayerRecord::default();
    let mut records = record(600, falling, layers);
    let again = record(700, falling, layers);
    records.extend(again.into_iter().filter(|record| match record {
        Record::Step(step) => step.step >= 100,
        Record::Layer(layer) => layer.step >= 100,
        _ => false,
    }));
    let diagnosis = Diagnosis::new(run(), &records, Options::default()).unwrap();
    assert_eq!((diagnosis.verdict, diagnosis.loss_shows), (RunVerdict::Calm, None));
}
