//! The graph against plain candle and against this crate's own projections; skip, recovery and resume.

use super::model::{D_MODEL, LAYERS, Parameters};
use super::*;
use crate::attention::{Attention, AttentionCall, AttentionShape, Cpu, Inputs, Precision};
use crate::forward::{Tokens, project};
use crate::model::Checkpoint;
use crate::policy::{DelayedPaperConfig, PolicyConfig, PolicyKind};
use crate::stress::{Mode, identity};
use candle_core::{D, Device, Tensor};
use op::Attended;

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
    let shape = AttentionShape { batch, n_q_heads, n_kv_heads: k.dims4()?.2, len_q: len, len_k: len, d_head };
    let call = AttentionCall::causal(shape);
    let all = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
    let (q_values, k_values, v_values) = (all(q)?, all(k)?, all(v)?);
    let inputs = Inputs { q: &q_values, k: &k_values, v: &v_values };
    let plan = identity(layer, &shape);
    let output = Cpu.forward(&call, &inputs, &plan, &Precision::F32).unwrap();
    Attended { call, plan, precision: Precision::F32, out: output.out, lse: output.lse }.place(q, k, v)
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
    let options = TrainOptions { casts: Casts::Nan, ..small(PolicyConfig::DelayedPaper(tight)) };
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
    let mut clamped = Trainer::new(TrainOptions { casts: Casts::Saturating, ..options }).unwrap();
    let record = clamped.step(1.0).unwrap();
    assert!(!record.skipped && record.observed[0].row.overflow > 0);
}

#[test]
fn after_too_many_bad_steps_the_run_goes_back() {
    let tight = DelayedPaperConfig { initial: 1e-6, margin: 0.5, ..DelayedPaperConfig::default() };
    let watchdog = Watchdog { every: 2, patience: 2, cautious: 3, restore_scales: false };
    let options = TrainOptions { casts: Casts::Nan, watchdog, ..small(PolicyConfig::DelayedPaper(tight)) };
    let mut trainer = Trainer::new(options).unwrap();
    advance(&mut trainer, 2 * LAYERS);
    // A state that overflows at once, put in place of the one that had learned: three bad steps follow.
    let fresh = Trainer::new(options).unwrap().scales().unwrap();
    let (good, at) = (weights(&trainer), trainer.steps());
    assert!(at.is_multiple_of(2));
    trainer.take_scales(fresh).unwrap();
    let first = trainer.step(1.0).unwrap();
    assert!(first.skipped && !first.rolled_back);
    let second = trainer.step(1.0).unwrap();
    assert!(second.rolled_back, "{second:?}");
    assert_eq!(weights(&trainer), good);
    let rates: Vec<f64> = advance(&mut trainer, 6).iter().filter(|r| !r.skipped).map(|r| r.rate).collect();
    assert!(rates[0] < 0.6 * rates.last().unwrap(), "{rates:?}");
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
                assert!(run(Casts::Saturating) == run(Casts::Nan), "{kind} {mode:?}");
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
}
