//! The graph against plain candle and against this crate's own projections; skip, recovery and resume.

use super::model::{D_MODEL, LAYERS, Parameters};
use super::*;
use crate::forward::{Tokens, project};
use crate::stress::{Mode, identity};
use candle_core::{D, Device, Tensor};
use op::Attended;
use sigmascale::attention::{
    Attention, AttentionCall, AttentionShape, BackwardPrecision, Cast, Cpu, Delta, Inputs, Precision, PvAccumulator,
    Saved, backward,
};
use sigmascale::fp8::OnOverflow;
use sigmascale::model::Checkpoint;
use sigmascale::policy::{DelayedPaperConfig, PolicyConfig, PolicyKind};
use state::Counters;

/// Heads repeated and batched by head: `(batch, heads, len, d_head)`.
fn spread(x: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let (batch, len, own, d) = x.dims4()?;
    let repeated = x.reshape((batch, len, own, 1, d))?.broadcast_as((batch, len, own, heads / own, d))?;
    repeated.reshape((batch, len, heads, d))?.transpose(1, 2)?.contiguous()
}

/// Causal attention in candle's own operations.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
    let (_, len, heads, d) = q.dims4()?;
    let (q, k, v) = (spread(q, heads)?, spread(k, heads)?, spread(v, heads)?);
    let scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? / (d as f64).sqrt())?;
    let mask: Vec<f32> = (0..len * len).map(|i| if i % len > i / len { f32::NEG_INFINITY } else { 0.0 }).collect();
    let scores = scores.broadcast_add(&Tensor::from_vec(mask, (1, 1, len, len), &Device::Cpu)?)?;
    let p = candle_nn::ops::softmax(&scores, D::Minus1)?;
    p.matmul(&v)?.transpose(1, 2)?.contiguous()
}

/// Causal attention in f32 by this crate.
fn ours(layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, len, n_q_heads, d_head) = q.dims4()?;
    let shape =
        AttentionShape { batch, n_q_heads, n_kv_heads: k.dims4()?.2, len_q: len, len_k: len, d_head, d_v: d_head };
    let call = AttentionCall::causal(shape);
    let all = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
    let (q_values, k_values, v_values) = (all(q)?, all(k)?, all(v)?);
    let inputs = Inputs { q: &q_values, k: &k_values, v: &v_values };
    let plan = identity(layer, &shape);
    let output = Cpu.forward(&call, &inputs, &plan, &Precision::F32).unwrap();
    let (precision, backward) = (Precision::F32, BackwardPrecision::default());
    Attended { call, plan, precision, backward, out: output.out, lse: output.lse }.place(q, k, v)
}

#[test]
fn loss_and_gradients_are_those_of_a_graph_without_our_node() {
    for kind in ModelKind::ALL {
        let mut parameters = Parameters::new(kind, 3);
        parameters.draw_biases(0.5, 1);
        let text = Language::new(1).batch(0, 2, 24);
        let variables = parameters.variables().unwrap();
        let gradients = |attend: &mut model::Attend<'_>| {
            let loss = parameters.loss(&variables, &text, attend).unwrap();
            let store = loss.backward().unwrap();
            let rows: Vec<Vec<f32>> = variables
                .iter()
                .map(|v| store.get(v.as_tensor()).unwrap().flatten_all().unwrap().to_vec1().unwrap())
                .collect();
            (loss.to_scalar::<f32>().unwrap(), rows)
        };
        let (want, want_rows) = gradients(&mut |_, q, k, v| plain(q, k, v));
        let (have, have_rows) = gradients(&mut ours);
        assert!((have - want).abs() < 1e-5, "{have} {want}");
        for ((have, want), parameter) in have_rows.iter().zip(&want_rows).zip(&parameters.all) {
            let scale = want.iter().fold(0f32, |a, b| a.max(b.abs())).max(1e-6);
            let worst = have.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-4 * scale, "{}: {worst} of {scale}", parameter.name);
        }
    }
}

#[test]
fn the_bounds_see_the_weights_that_the_graph_uses() {
    for kind in ModelKind::ALL {
        let mut parameters = Parameters::new(kind, 3);
        parameters.draw_biases(0.5, 1);
        // Gains and shifts that are not one and zero.
        for parameter in parameters.all.iter_mut().filter(|p| p.name.contains("norm") || p.name.contains("ln_")) {
            parameter.value.iter_mut().enumerate().for_each(|(i, x)| *x += (i % 5) as f32 * 0.1);
        }
        let spec = kind.spec().unwrap();
        let text = Language::new(1).batch(0, 1, 24);
        let variables = parameters.variables().unwrap();
        let mut seen = Vec::new();
        let mut attend = |layer: usize, q: &Tensor, k: &Tensor, v: &Tensor| {
            if layer == 0 {
                seen = [q, k, v].map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap()).to_vec();
            }
            plain(q, k, v)
        };
        parameters.loss(&variables, &text, &mut attend).unwrap();
        let rows = |name: &str, at: &dyn Fn(usize) -> usize| -> Vec<f32> {
            let values = &parameters.all.iter().find(|p| p.name.ends_with(name)).unwrap().value;
            (0..24).flat_map(|i| values[at(i) * D_MODEL..][..D_MODEL].to_vec()).collect()
        };
        let token = |i: usize| text.inputs[i] as usize;
        let residual: Vec<f32> = match kind {
            ModelKind::Llama => rows("embed_tokens.weight", &token),
            ModelKind::Gpt2 => {
                let pairs = rows("wte.weight", &token).into_iter().zip(rows("wpe.weight", &|i| i));
                pairs.map(|(a, b)| a + b).collect()
            }
        };
        let tokens = Tokens::from_rows(&spec, &residual).unwrap();
        let want = project(&spec, &parameters.layer(0).unwrap(), &tokens).unwrap();
        for (have, want) in seen.iter().zip([&want.q, &want.k, &want.v]) {
            assert_eq!(have.len(), want.len());
            for (a, b) in have.iter().zip(want) {
                // The graph's norm has an epsilon, the projection's has none.
                assert!((a - b).abs() < 2e-3 * b.abs().max(1.0), "{a} {b}");
            }
        }
    }
}

fn small(policy: impl Into<Option<PolicyConfig>>) -> TrainOptions {
    TrainOptions { batch: 2, seq_len: 24, compare: false, ..TrainOptions::new(ModelKind::Llama, policy.into()) }
}

fn weights(trainer: &Trainer) -> Vec<u32> {
    trainer.weights().flat_map(|(_, values)| values.iter().map(|x| x.to_bits())).collect()
}

fn advance(trainer: &mut Trainer, steps: usize) -> Vec<StepRecord> {
    (0..steps).map(|_| trainer.step(1.0).unwrap()).collect()
}

#[test]
fn saved_weights_are_a_checkpoint_with_the_same_bits() {
    for model in ModelKind::ALL {
        let options = TrainOptions { model, ..small(None) };
        let mut trainer = Trainer::new(options).unwrap();
        advance(&mut trainer, 2);
        let folder = tempfile::tempdir().unwrap();
        trainer.save_weights(folder.path()).unwrap();
        let mut other = Trainer::new(TrainOptions { seed: 9, ..options }).unwrap();
        assert_ne!(weights(&other), weights(&trainer));
        other.load_weights(folder.path()).unwrap();
        assert_eq!(weights(&other), weights(&trainer));
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        for layer in 0..LAYERS {
            let (stored, own) = (checkpoint.layer(layer).unwrap(), trainer.parameters.layer(layer).unwrap());
            assert_eq!(stored.norm_gain, own.norm_gain);
            assert_eq!(stored.k.bias, own.k.bias);
            assert_eq!(stored.v.heads.len(), own.v.heads.len());
            for (a, b) in stored.v.heads.iter().zip(&own.v.heads) {
                assert_eq!(a.get(3, 5), b.get(3, 5));
            }
        }
        let wrong = ModelKind::ALL.into_iter().find(|kind| *kind != model).unwrap();
        let mut wrong = Trainer::new(TrainOptions { model: wrong, ..options }).unwrap();
        assert!(wrong.load_weights(folder.path()).is_err());
    }
}

#[test]
fn a_run_resumed_with_its_state_has_the_bits_of_one_that_never_stopped() {
    for kind in PolicyKind::ALL {
        let options = small(PolicyConfig::from(kind));
        let mut straight = Trainer::new(options).unwrap();
        advance(&mut straight, 3);
        let state = straight.state();
        let mut resumed = Trainer::resume(options, &state).unwrap();
        let (a, b) = (advance(&mut straight, 3), advance(&mut resumed, 3));
        assert_eq!(weights(&straight), weights(&resumed), "{kind}");
        let losses = |records: &[StepRecord]| records.iter().map(|r| r.loss.to_bits()).collect::<Vec<_>>();
        assert_eq!(losses(&a), losses(&b), "{kind}");
        // Without the moments it is another run.
        let mut lost = Trainer::resume(options, &state).unwrap();
        lost.forget_all_but_weights().unwrap();
        advance(&mut lost, 3);
        assert_ne!(weights(&straight), weights(&lost), "{kind}");
    }
    let state = Trainer::new(small(PolicyConfig::from(PolicyKind::AutoC))).unwrap().state();
    assert!(Trainer::resume(small(None), &state).unwrap_err().is_mismatch());
    assert!(Trainer::resume(small(PolicyConfig::from(PolicyKind::DelayedTe)), &state).unwrap_err().is_mismatch());
}

#[test]
fn an_overflow_that_is_nan_skips_the_step_and_halves_the_loss_scale() {
    // The first logits pass a history of ones.
    let tight = DelayedPaperConfig { initial: 0.01, ..DelayedPaperConfig::default() };
    let options = TrainOptions { casts: OnOverflow::NonFinite, ..small(PolicyConfig::DelayedPaper(tight)) };
    let mut trainer = Trainer::new(options).unwrap();
    let before = weights(&trainer);
    let record = trainer.step(1.0).unwrap();
    assert!(record.skipped && record.loss.is_nan());
    assert_eq!(weights(&trainer), before);
    // The history learned layer after layer: behind the first NaN nothing can be observed.
    let records = advance(&mut trainer, LAYERS + 1);
    assert!(!records.last().unwrap().skipped);
    let bad = 1 + records.iter().filter(|r| r.skipped).count();
    assert_eq!(records.last().unwrap().loss_scale, 32768.0 / 2f64.powi(bad as i32));
    assert_ne!(weights(&trainer), before);
    // With saturating casts the same run goes on, from the same overflow.
    let mut clamped = Trainer::new(TrainOptions { casts: OnOverflow::Saturate, ..options }).unwrap();
    let record = clamped.step(1.0).unwrap();
    assert!(!record.skipped && record.observed[0].row.overflow > 0);
}

#[test]
fn after_too_many_bad_steps_the_run_goes_back() {
    let tight = DelayedPaperConfig { initial: 1e-6, margin: 0.5, ..DelayedPaperConfig::default() };
    let watchdog = Watchdog { every: 2, patience: 2, cautious: 3, restore_scales: false };
    let options =
        TrainOptions { casts: OnOverflow::NonFinite, watchdog, warm_up: 1, ..small(PolicyConfig::DelayedPaper(tight)) };
    let mut trainer = Trainer::new(options).unwrap();
    advance(&mut trainer, 2 * LAYERS);
    let (good, at) = (weights(&trainer), trainer.steps());
    assert!(at.is_multiple_of(2));
    // A good step behind the checkpoint, then a scaling state that overflows at once, the checkpoint still there.
    assert!(!trainer.step(1.0).unwrap().skipped);
    assert_ne!(weights(&trainer), good);
    let checkpoint = trainer.good.clone();
    trainer.take_scales(Trainer::new(options).unwrap().scales().unwrap()).unwrap();
    trainer.good = checkpoint;
    let first = trainer.step(1.0).unwrap();
    assert!(first.skipped && !first.rolled_back);
    let second = trainer.step(1.0).unwrap();
    assert!(second.rolled_back, "{second:?}");
    assert_eq!(weights(&trainer), good);
    // Weights, moments and count of updates are those of the checkpoint; text, loss scale and here the scales go on.
    let state = trainer.state();
    let (now, saved) = (state.now, state.good.unwrap());
    assert!(now.parameters == saved.parameters && now.counters.updates == saved.counters.updates);
    assert!(now.scales != saved.scales);
    assert_eq!((saved.counters.step, now.counters.step), (at, at + 3));
    assert_eq!(now.counters.loss_scale.factor, saved.counters.loss_scale.factor / 4.0);
    assert_eq!((now.counters.bad, now.counters.cautious), (0, 3));
    let rates: Vec<f64> = advance(&mut trainer, 8).iter().filter(|r| !r.skipped).map(|r| r.rate).collect();
    assert_eq!(rates[..4], [0.5, 0.5, 0.5, 1.0].map(|half| half * options.rate));
}

#[test]
fn geometry_never_overflows_whatever_the_rate() {
    for model in ModelKind::ALL {
        for mode in [Mode::Logit, Mode::Operands] {
            for kind in [PolicyKind::Geometry, PolicyKind::Current] {
                let wild = TrainOptions { model, mode, bias: 4.0, rate: 0.05, ..small(PolicyConfig::from(kind)) };
                let run = |casts| {
                    let mut trainer = Trainer::new(TrainOptions { casts, ..wild }).unwrap();
                    let records = advance(&mut trainer, 8);
                    let over: u64 = records.iter().flat_map(|r| &r.observed).map(|o| o.row.overflow).sum();
                    let beyond: usize = records
                        .iter()
                        .flat_map(|r| &r.observed)
                        .flat_map(|o| &o.report.tensors)
                        .map(|t| t.beyond_bound)
                        .sum();
                    assert_eq!((over, beyond), (0, 0), "{kind} {mode:?} {casts:?}");
                    (weights(&trainer), records.iter().map(|r| r.loss.to_bits()).collect::<Vec<_>>())
                };
                // What never overflows does not know how casts overflow.
                assert!(run(OnOverflow::Saturate) == run(OnOverflow::NonFinite), "{kind} {mode:?}");
            }
        }
    }
}

#[test]
fn shadows_change_nothing() {
    let mut alone = Trainer::new(small(None)).unwrap();
    let mut watched = Trainer::new(small(None)).unwrap();
    watched.shadow(&PolicyKind::ALL.map(PolicyConfig::from)).unwrap();
    advance(&mut alone, 3);
    let records = advance(&mut watched, 3);
    assert_eq!(weights(&alone), weights(&watched));
    assert!(records.iter().all(|record| record.observed.len() == 6 * LAYERS));
    assert!(records.iter().flat_map(|record| &record.observed).all(|o| !o.own));
    // What they see is the run's: in a layer of a step the same logits for all.
    for record in &records {
        for layer in 0..LAYERS {
            let seen = || record.observed.iter().filter(|o| o.row.layer == layer).map(|o| o.row.max_logit);
            assert_eq!(seen().count(), 6);
            assert!(seen().all(|x| Some(x) == seen().next()), "step {} layer {layer}", record.step);
        }
    }
}

#[test]
fn the_backward_pass_has_the_casts_of_the_forward() {
    let shape = AttentionShape { batch: 1, n_q_heads: 2, n_kv_heads: 1, len_q: 6, len_k: 6, d_head: 16, d_v: 16 };
    let call = AttentionCall::causal(shape);
    let draw = |n: usize, at: f32| (0..n).map(|i| (i as f32 * 0.37 + at).sin() * 3.0).collect::<Vec<f32>>();
    let (q, k, v, d_out) = (draw(192, 0.1), draw(96, 0.2), draw(96, 0.3), draw(192, 0.4));
    let inputs = Inputs { q: &q, k: &k, v: &v };
    let (plan, precision) = (identity(0, &shape), Mode::Operands.precision());
    let output = Cpu.forward(&call, &inputs, &plan, &precision).unwrap();
    let how = BackwardPrecision::default();
    let saved = Saved { out: &output.out, lse: &output.lse };
    let want = backward(&call, &inputs, &plan, &precision, &how, &saved, &d_out).unwrap();
    let var = |x: &[f32], heads: usize| candle_core::Var::from_slice(x, (1, 6, heads, 16), &Device::Cpu).unwrap();
    let [q, k, v] = [var(&q, 2), var(&k, 1), var(&v, 1)];
    let attended = Attended { call, plan, precision, backward: how, out: output.out, lse: output.lse };
    let out = attended.place(&q, &k, &v).unwrap();
    let weights = Tensor::from_slice(&d_out, out.shape(), &Device::Cpu).unwrap();
    let store = (out * weights).unwrap().sum_all().unwrap().backward().unwrap();
    for (var, want) in [(&q, want.dq), (&k, want.dk), (&v, want.dv)] {
        assert_eq!(store.get(var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), want);
    }
}

/// A run's choice of accumulator and delta reaches its casts and its gradients; the control has neither.
#[test]
fn accumulator_and_delta_are_those_of_the_run() {
    let options = TrainOptions { mode: Mode::Operands, ..small(PolicyConfig::from(PolicyKind::Geometry)) };
    let run = |options: TrainOptions| {
        let mut trainer = Trainer::new(options).unwrap();
        let loss = trainer.step(1.0).unwrap().loss;
        (loss.to_bits(), weights(&trainer))
    };
    let plain = run(options);
    let fp8 = TrainOptions { accumulator: PvAccumulator::Fp8 { promote_every: 64 }, ..options };
    assert_ne!(run(fp8).0, plain.0);
    let delta = run(TrainOptions { delta: Delta::Output, ..options });
    assert!(delta.0 == plain.0 && delta.1 != plain.1, "the same forward, other gradients");
    let control = TrainOptions { policy: None, ..options };
    assert_eq!(run(TrainOptions { policy: None, delta: Delta::Output, ..fp8 }), run(control));
    let logit = Trainer::new(TrainOptions { mode: Mode::Logit, ..fp8 }).err().unwrap().to_string();
    assert_eq!(logit, "accumulator fp8-64 needs the mode operands: in the mode logit P and V are not cast");
}

/// A run's format and rounding reach its casts; steps have random bits of their own, and a run repeats.
#[test]
fn format_and_rounding_are_those_of_the_run() {
    let options = TrainOptions { mode: Mode::Operands, ..small(PolicyConfig::from(PolicyKind::Geometry)) };
    let run = |options: TrainOptions| {
        let mut trainer = Trainer::new(options).unwrap();
        let losses: Vec<u64> = (0..3).map(|_| trainer.step(1.0).unwrap().loss.to_bits()).collect();
        (losses, weights(&trainer))
    };
    let plain = run(options);
    let e5m2 = TrainOptions { operands: Cast::E5m2, ..options };
    let e4m3_240 = TrainOptions { operands: Cast::E4m3Ieee, ..options };
    let stochastic = TrainOptions { stochastic: true, ..options };
    for other in [e5m2, stochastic] {
        assert_ne!(run(other).0[0], plain.0[0], "{other:?}");
    }
    // E4M3 up to 240 holds half the value under half the scale: the same codes, but for the subnormal ones.
    assert_ne!(run(e4m3_240), plain);
    assert_eq!(run(stochastic), run(stochastic));
    assert_ne!(run(TrainOptions { rate: 1e-12, ..stochastic }).0[1], run(TrainOptions { rate: 1e-12, ..options }).0[1]);
    for step in 0..3 {
        assert!(stochastic.precision(step, 0) != stochastic.precision(step, 1));
        assert!(stochastic.precision(step, 0) != stochastic.precision(step + 1, 0));
    }
    for refused in [
        TrainOptions { mode: Mode::Logit, ..e5m2 },
        TrainOptions { mode: Mode::Logit, ..stochastic },
        TrainOptions { accumulator: PvAccumulator::Fp8 { promote_every: 64 }, ..e4m3_240 },
        TrainOptions { operands: Cast::Bf16, ..options },
    ] {
        assert!(Trainer::new(refused).err().unwrap().is_argument(), "{refused:?}");
    }
}

#[test]
fn gradients_do_not_know_the_loss_scale_and_are_clipped() {
    let options = small(PolicyConfig::from(PolicyKind::Geometry));
    let first = |factor: f64, clip: f64| {
        let mut state = Trainer::new(options).unwrap().state();
        state.now.counters.loss_scale.factor = factor;
        let mut trainer = Trainer::resume(TrainOptions { clip, ..options }, &state).unwrap();
        let record = trainer.step(1.0).unwrap();
        assert_eq!(record.loss_scale, factor);
        let moments = trainer.parameters.all.iter().flat_map(|p| &p.moments.first).map(|m| f64::from(*m).powi(2));
        (record.gradient_norm, moments.sum::<f64>().sqrt())
    };
    let (norm, free) = first(1.0, 1e3);
    // The first moment is a tenth of the gradient.
    assert!((free / (0.1 * norm) - 1.0).abs() < 1e-4, "{norm} {free}");
    let (scaled, clipped) = first(65536.0, 0.01);
    assert!((scaled / norm - 1.0).abs() < 1e-5, "{scaled} {norm}");
    assert!((clipped / (0.1 * 0.01) - 1.0).abs() < 1e-3, "{clipped}");
}

#[test]
fn the_rate_warms_up_and_follows_the_factor() {
    let options = TrainOptions { warm_up: 4, rate: 1e-3, ..small(None) };
    let mut trainer = Trainer::new(options).unwrap();
    let rates: Vec<f64> = [1.0, 1.0, 1.0, 1.0, 1.0, 8.0].map(|factor| trainer.step(factor).unwrap().rate).into();
    for (rate, want) in rates.iter().zip([0.25, 0.5, 0.75, 1.0, 1.0, 8.0]) {
        assert!((rate / (want * 1e-3) - 1.0).abs() < 1e-12, "{rates:?}");
    }
    for factor in [f64::NAN, f64::INFINITY, -1.0] {
        assert!(trainer.step(factor).unwrap_err().is_argument());
    }
    assert_eq!(trainer.steps(), 6);
}

#[test]
fn the_text_is_that_of_the_seed_and_the_held_out_loss_that_of_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    let mut control = Trainer::new(small(None)).unwrap();
    advance(&mut control, 2);
    control.save_weights(folder.path()).unwrap();
    let policy = PolicyConfig::from(PolicyKind::DelayedPaper);
    let load = |options: TrainOptions| {
        let mut trainer = Trainer::new(options).unwrap();
        trainer.load_weights(folder.path()).unwrap();
        trainer
    };
    let mut same = load(small(policy));
    let held_out = control.held_out_loss().unwrap();
    assert_eq!(same.held_out_loss().unwrap(), held_out);
    let (text, variables) = (Language::new(0).held_out(8, 24), control.parameters.variables().unwrap());
    let loss = control.parameters.loss(&variables, &text, &mut ours).unwrap();
    assert_eq!(f64::from(loss.to_scalar::<f32>().unwrap()), held_out);
    let mut other = load(TrainOptions { seed: 1, ..small(policy) });
    let start = |seed: u64| weights(&Trainer::new(TrainOptions { seed, ..small(None) }).unwrap());
    assert!(start(1) != start(2) && start(1) == start(1));
    assert_ne!(same.step(1.0).unwrap().loss, other.step(1.0).unwrap().loss);
}

#[test]
fn scales_are_those_of_the_weights_that_the_step_uses() {
    let options = small(PolicyConfig::from(PolicyKind::Geometry));
    let mut trainer = Trainer::new(options).unwrap();
    for _ in 0..3 {
        trainer.step(20.0).unwrap();
        let mut fresh = Trainer::resume(options, &trainer.state()).unwrap();
        fresh.forget_scales().unwrap();
        let straight = Trainer::resume(options, &trainer.state()).unwrap().step(20.0).unwrap();
        let (a, b) = (straight, fresh.step(20.0).unwrap());
        for (a, b) in a.observed.iter().zip(&b.observed) {
            assert_eq!(a.row.descales, b.row.descales);
        }
    }
}

#[test]
fn auto_c_that_overflows_does_the_step_again_under_the_worst_case_bound() {
    let config =
        sigmascale::policy::AutoCConfig { burn_in: 2, kappa: 1.0, ..sigmascale::policy::AutoCConfig::default() };
    let options = TrainOptions { casts: OnOverflow::NonFinite, ..small(PolicyConfig::AutoC(config)) };
    let mut trainer = Trainer::new(options).unwrap();
    let records: Vec<_> = (0..20).map(|_| trainer.step(20.0).unwrap()).collect();
    let over = records.iter().filter(|r| r.observed.iter().any(|o| o.row.overflow > 0)).count();
    assert!(over > 0);
    assert!(records.iter().all(|r| !r.skipped && r.loss.is_finite()));
}

#[test]
fn what_is_forgotten_is_at_its_start() {
    for kind in [PolicyKind::AutoC, PolicyKind::DelayedPaper, PolicyKind::DelayedTe] {
        let options = small(PolicyConfig::from(kind));
        let start = Trainer::new(options).unwrap();
        let mut trainer = Trainer::new(options).unwrap();
        advance(&mut trainer, 3);
        let (kept, moments) = (weights(&trainer), trainer.parameters.clone());
        assert_ne!(trainer.scales(), start.scales(), "{kind}");
        trainer.forget_scales().unwrap();
        assert_eq!(trainer.scales(), start.scales(), "{kind}");
        assert!(trainer.parameters == moments && trainer.counters.updates == 3);
        trainer.forget_all_but_weights().unwrap();
        assert_eq!(weights(&trainer), kept);
        assert!(trainer.parameters.all.iter().all(|p| p.moments == optimizer::Moments::zeros(p.value.len())));
        assert_eq!(trainer.counters, Counters { step: 3, ..Counters::default() });
    }
}

#[test]
fn a_run_resumed_from_its_file_goes_back_where_the_straight_one_does() {
    let tight = DelayedPaperConfig { initial: 1e-6, margin: 0.5, ..DelayedPaperConfig::default() };
    let watchdog = Watchdog { every: 4, patience: 1, restore_scales: false, ..Watchdog::default() };
    let learning = TrainOptions { casts: OnOverflow::NonFinite, watchdog, ..small(PolicyConfig::DelayedPaper(tight)) };
    let options = TrainOptions { watchdog: Watchdog { restore_scales: true, ..watchdog }, ..learning };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.safetensors");
    let mut trainer = Trainer::new(learning).unwrap();
    advance(&mut trainer, 3 * LAYERS + 2);
    assert!(trainer.good.as_ref().unwrap().counters.updates > 0);
    trainer.state().write(&file).unwrap();
    let mut straight = Trainer::resume(options, &trainer.state()).unwrap();
    let mut resumed = Trainer::resume(options, &TrainState::read(&file).unwrap()).unwrap();
    assert!(resumed.parameters == trainer.parameters && resumed.counters == trainer.counters);
    let fresh = Trainer::new(options).unwrap().scales().unwrap();
    for trainer in [&mut straight, &mut resumed] {
        // As if the scaling state alone had gone bad, the last good checkpoint still there.
        let good = trainer.good.clone();
        assert!(good.is_some());
        trainer.take_scales(fresh.clone()).unwrap();
        trainer.good = good.clone();
        assert!(trainer.step(1.0).unwrap().rolled_back);
        assert_eq!(trainer.scales(), good.unwrap().scales);
        advance(trainer, 3);
    }
    assert_eq!(weights(&straight), weights(&resumed));
    assert_eq!(straight.scales(), resumed.scales());
    assert_eq!(straight.counters, resumed.counters);
}

#[test]
fn a_state_that_is_damaged_or_of_another_run_is_refused() {
    let options = small(PolicyConfig::from(PolicyKind::DelayedTe));
    let mut trainer = Trainer::new(options).unwrap();
    advance(&mut trainer, 2);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state");
    trainer.state().write(&file).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let refused = |bytes: &[u8], part: &str| {
        std::fs::write(&file, bytes).unwrap();
        let error = TrainState::read(&file).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(part) && text.starts_with(file.to_str().unwrap()), "{text}");
        error
    };
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = std::str::from_utf8(&bytes[8..header]).unwrap();
    let replaced = |from: &str, to: &str| {
        let at = 8 + text.find(from).unwrap_or_else(|| panic!("{from}"));
        [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat()
    };
    assert!(refused(&[], "no training state").is_format());
    assert!(refused(b"hello, this is no state at all", "no training state").is_format());
    assert!(refused(&bytes[..bytes.len() - 1], "damaged").is_format());
    let mut flipped = bytes.clone();
    *flipped.last_mut().unwrap() ^= 1;
    assert!(refused(&flipped, "hash").is_format());
    assert!(refused(&replaced("version\\\":1", "version\\\":2"), "version 2").is_mismatch());
    assert!(refused(&replaced("factor\\\":32768.0", "factor\\\":-2768.0"), "loss scale -2768").is_argument());
    assert!(
        refused(&replaced("model.norm.weight:second", "model.norm.weight:secund"), "second` is missing").is_format()
    );
    trainer.save_weights(folder.path()).unwrap();
    let plain = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    assert!(refused(&plain, "sigmascale-training").is_format());
    assert!(TrainState::read(folder.path()).unwrap_err().is_format());
    assert!(TrainState::read(&folder.path().join("none")).unwrap_err().is_io());

    std::fs::write(&file, &bytes).unwrap();
    let state = TrainState::read(&file).unwrap();
    let foreign = |options: TrainOptions, part: &str| {
        let error = Trainer::resume(options, &state).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains(part), "{error}");
    };
    foreign(TrainOptions { seed: 7, ..options }, "seed");
    foreign(TrainOptions { batch: 3, ..options }, "batch");
    foreign(TrainOptions { seq_len: 25, ..options }, "seq_len");
    foreign(TrainOptions { model: ModelKind::Gpt2, ..options }, "tiny-gpt2-train");
    foreign(TrainOptions { policy: None, ..options }, "delayed-te, not by the control");
    foreign(TrainOptions { policy: Some(PolicyKind::DelayedPaper.into()), ..options }, "delayed-paper");
    let control = Trainer::new(small(None)).unwrap().state();
    let error = Trainer::resume(options, &control).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("saved by the control"), "{error}");
    let error = Trainer::new(small(None)).unwrap().take_scales(trainer.scales().unwrap()).unwrap_err();
    assert!(error.is_mismatch(), "{error}");
}

#[test]
fn options_out_of_their_range_are_refused_by_name() {
    let base = small(PolicyConfig::from(PolicyKind::Geometry));
    let adam = |change: &dyn Fn(&mut AdamW)| {
        let mut optimizer = AdamW::default();
        change(&mut optimizer);
        TrainOptions { optimizer, ..base }
    };
    for (name, options) in [
        ("batch 0", TrainOptions { batch: 0, ..base }),
        ("seq_len 65", TrainOptions { seq_len: 65, ..base }),
        ("rate 0", TrainOptions { rate: 0.0, ..base }),
        ("rate inf", TrainOptions { rate: f64::INFINITY, ..base }),
        ("clip -1", TrainOptions { clip: -1.0, ..base }),
        ("clip NaN", TrainOptions { clip: f64::NAN, ..base }),
        ("bias NaN", TrainOptions { bias: f32::NAN, ..base }),
        ("beta1 1", adam(&|a| a.beta1 = 1.0)),
        ("beta2 -0.5", adam(&|a| a.beta2 = -0.5)),
        ("eps 0", adam(&|a| a.eps = 0.0)),
        ("weight_decay NaN", adam(&|a| a.weight_decay = f64::NAN)),
        ("delta 0", TrainOptions { tail: sigmascale::bound::Tail { delta: 0.0, ..base.tail }, ..base }),
    ] {
        let error = Trainer::new(options).unwrap_err();
        assert!(error.is_argument() && error.to_string().contains(name), "{name}: {error}");
    }
}

#[test]
fn rates_without_reason_end_in_one_sentence_or_in_skipped_steps() {
    for kind in [None, Some(PolicyKind::Geometry), Some(PolicyKind::DelayedTe)] {
        for factor in [1e6, 1e12, 1e25, 1e200] {
            let mut trainer = Trainer::new(small(kind.map(PolicyConfig::from))).unwrap();
            let ended = (0..6).map(|_| trainer.step(factor)).find_map(Result::err);
            if let Some(error) = ended {
                let text = error.to_string();
                assert!(error.is_non_finite() && text.contains("a rate of") == (factor == 1e200), "{factor:e} {text}");
            }
        }
    }
}
