//! `auto-c`, Algorithm 4 of the spectral-bounds paper.
//!
//! ```text
//! burn-in, T steps:  descales as geometry;  r = amax / bound of every head and step of a pool, n in all
//! then:              c = min(1, kappa q)    q = smallest order statistic of rank >= quantile n
//! frozen:            descale = c bound / (eta 448) for logits, c (B + share A) / 448 for q, k and v, o twice v
//! ```
//!
//! The bound is the worst-case bound throughout, so burn-in cannot overflow, and `c` stops at 1. Logits, q, k and v
//! have constants of their own. The promise of the bound ends with burn-in: what follows rests on the burn-in's data.
//!
//! - **Ends**: when every layer of the pool has `burn_in` finite steps. Later steps of a layer that waits for others are
//!   not counted, so that n is known.
//! - **Restarts**: only by [`Policy::restart`], when the caller replaces weights or data. It does not happen by itself:
//!   ordinary training moves weights and bounds together.
//! - **Falls back**: a value that overflows under a frozen `c` returns its pool to the worst-case bound, at once and
//!   until a restart; the step's report carries the safe plan.
//! - **Forbidden**: after more than `max_restarts` restarts, and for a pool that saw only zeros.

use super::contract::Policy;
use super::report::{PolicyEvent, Report, Restart};
use super::shape::PolicyShape;
use super::table::{
    AutoCConfig, AutoCState, Forbidden, Memory, Phase, PolicyConfig, PolicyKind, PolicyState, Pooling, RatioPool,
};
use super::tensor::{ScaledTensor, largest, overflows};
use crate::bound::{E4M3_MAX, LayerBounds};
use crate::error::{Error, Result};
use crate::plan::{Granularity, OperandDescales, ScalePlan, check_eta};
use crate::scale::Descale;
use crate::stats::StepStats;
use std::ops::Range;

/// Tensors that have constants, in this order everywhere.
const TENSORS: [ScaledTensor; 4] = [ScaledTensor::Logit, ScaledTensor::Q, ScaledTensor::K, ScaledTensor::V];

/// The policy.
#[derive(Clone, Debug)]
pub struct AutoC {
    config: AutoCConfig,
    shape: PolicyShape,
    state: AutoCState,
}

impl AutoC {
    /// A policy at the start of its burn-in.
    ///
    /// # Errors
    /// `is_argument` if a parameter breaks its rule.
    pub fn new(config: AutoCConfig, shape: PolicyShape) -> Result<Self> {
        check(&config)?;
        let pools = TENSORS.map(|tensor| vec![RatioPool::START; pool_count(&config, &shape, tensor)]);
        let state = AutoCState { seen: vec![0; shape.layers()], restarts: 0, pools };
        Ok(Self { config, shape, state })
    }

    /// A policy that continues from a state.
    ///
    /// # Errors
    /// `is_mismatch` if the state does not fit the shape and parameters.
    pub fn resume(config: AutoCConfig, shape: PolicyShape, state: AutoCState) -> Result<Self> {
        check(&config)?;
        let unit = |c: f64| c > 0.0 && c <= 1.0;
        let fits = state.seen.len() == shape.layers()
            && state.seen.iter().all(|&seen| seen <= config.burn_in)
            && state.pools.iter().zip(TENSORS).all(|(pools, tensor)| {
                pools.len() == pool_count(&config, &shape, tensor)
                    && pools.iter().enumerate().all(|(at, pool)| {
                        // A pool per layer, or pools that all keep as much.
                        let layer = if config.pooling == Pooling::Layer { at } else { 0 };
                        let phase = match pool.phase {
                            Phase::Frozen { c } | Phase::FellBack { c } => unit(c),
                            Phase::BurnIn | Phase::Forbidden { .. } => true,
                        };
                        phase
                            && pool.top.len() <= config.kept_ratios(&shape, layer, tensor)
                            && pool.top.iter().all(|ratio| ratio.is_finite() && *ratio >= 0.0)
                            && pool.top.is_sorted_by(|a, b| a >= b)
                    })
            });
        if !fits {
            return Err(Error::mismatch("the pools of the saved auto-c state do not fit its own shape and parameters"));
        }
        Ok(Self { config, shape, state })
    }

    /// Phase of the pool of one head of one layer.
    ///
    /// # Panics
    /// If there is no such layer, or if o is asked for, which has no constant of its own.
    pub fn phase(&self, tensor: ScaledTensor, layer: usize, head: usize) -> Phase {
        assert!(tensor != ScaledTensor::O && layer < self.shape.layers());
        self.state.pools[tensor as usize][self.pool(tensor, layer, head)].phase
    }

    fn pool(&self, tensor: ScaledTensor, layer: usize, head: usize) -> usize {
        match self.config.pooling {
            Pooling::Model => 0,
            Pooling::Layer => layer,
            Pooling::Head => heads_of(&self.shape, layer, tensor).start + head,
        }
    }

    /// The worst-case bounds of a tensor, one for each of its descales.
    fn bounds(&self, tensor: ScaledTensor, bounds: &LayerBounds) -> Option<Vec<f64>> {
        let mut row = tensor.bound_row(bounds, self.shape.of(bounds.layer))?;
        share(&mut row, self.config.granularity);
        Some(row)
    }

    /// `c bound / target` for each head. With one scale per layer and a constant per head, the largest.
    fn descales(&self, tensor: ScaledTensor, bounds: &LayerBounds, target: f64) -> Result<Option<Vec<Descale>>> {
        let Some(mut row) = self.bounds(tensor, bounds) else { return Ok(None) };
        for (head, bound) in row.iter_mut().enumerate() {
            *bound *= self.phase(tensor, bounds.layer, head).c();
        }
        share(&mut row, self.config.granularity);
        row.into_iter().map(|bound| Descale::covering(bound, target)).collect::<Result<_>>().map(Some)
    }

    /// Takes a burn-in step in; nothing where a value is not finite.
    fn burn_in(&mut self, bounds: &LayerBounds, stats: &StepStats, report: &mut Report) {
        let layer = bounds.layer;
        let mut rows = Vec::with_capacity(TENSORS.len());
        for tensor in TENSORS {
            let amax = tensor.amax_row(stats, self.shape.of(layer));
            if !largest(&amax).is_finite() {
                report.events.push(PolicyEvent::Skipped { tensor });
                return;
            }
            rows.push(self.bounds(tensor, bounds).map(|bounds| {
                // A zero bound is an all-zero head: nothing of it can be observed.
                let ratio = |(&amax, bound): (&f32, f64)| if bound > 0.0 { f64::from(amax) / bound } else { 0.0 };
                amax.iter().zip(bounds).map(ratio).collect::<Vec<_>>()
            }));
        }
        for (row, tensor) in rows.into_iter().zip(TENSORS) {
            let keep = self.config.kept_ratios(&self.shape, layer, tensor);
            for (head, ratio) in row.into_iter().flatten().enumerate() {
                let pool = self.pool(tensor, layer, head);
                self.state.pools[tensor as usize][pool].push(ratio, keep);
            }
        }
        self.state.seen[layer] += 1;
    }

    /// Fixes the constants of the pools that this layer's step completed.
    fn freeze(&mut self, layer: usize, report: &mut Report) {
        let done = |seen: u32| seen == self.config.burn_in;
        let complete = match self.config.pooling {
            Pooling::Model => self.state.seen.iter().all(|&seen| done(seen)),
            Pooling::Layer | Pooling::Head => done(self.state.seen[layer]),
        };
        if !complete {
            return;
        }
        for tensor in TENSORS {
            let heads = if self.config.pooling == Pooling::Head { tensor.row(self.shape.of(layer)) } else { 1 };
            for head in 0..heads {
                let at = self.pool(tensor, layer, head);
                let pool = &mut self.state.pools[tensor as usize][at];
                if pool.phase != Phase::BurnIn {
                    continue;
                }
                // Empty where the tensor has no bound (v of a model without an input norm).
                let Some(&ratio) = pool.top.last() else { continue };
                if ratio == 0.0 {
                    let reason = Forbidden::NothingObserved;
                    pool.phase = Phase::Forbidden { reason };
                    report.events.push(PolicyEvent::Forbidden { reason });
                    continue;
                }
                let c = (self.config.kappa * ratio).min(1.0);
                *pool = RatioPool { phase: Phase::Frozen { c }, top: Vec::new() };
                let head = (self.config.pooling == Pooling::Head).then_some(head);
                report.events.push(PolicyEvent::Frozen { tensor, layer, head, c, ratio });
            }
        }
    }

    /// Gives up every constant under which something overflowed. Says whether there was one.
    fn fall_back(&mut self, plan: &ScalePlan, stats: &StepStats, report: &mut Report) -> bool {
        let mut any = false;
        for tensor in TENSORS {
            let Some(descales) = tensor.descales(plan) else { continue };
            let amax = tensor.amax_row(stats, self.shape.of(plan.layer));
            for (head, (amax, descale)) in amax.iter().zip(descales).enumerate() {
                let fits = !overflows(*amax, *descale);
                let at = self.pool(tensor, plan.layer, head);
                let pool = &mut self.state.pools[tensor as usize][at];
                if let (false, Phase::Frozen { c }) = (fits, pool.phase) {
                    pool.phase = Phase::FellBack { c };
                    let head = (self.config.pooling == Pooling::Head).then_some(head);
                    report.events.push(PolicyEvent::FellBack { tensor, layer: plan.layer, head, c });
                    any = true;
                }
            }
        }
        any
    }
}

impl RatioPool {
    const START: Self = Self { phase: Phase::BurnIn, top: Vec::new() };

    fn push(&mut self, ratio: f64, keep: usize) {
        let at = self.top.partition_point(|&other| other >= ratio);
        self.top.insert(at, ratio);
        if self.top.len() > keep {
            self.top.pop();
        }
    }
}

fn check(config: &AutoCConfig) -> Result<()> {
    check_eta(config.eta)?;
    if config.burn_in == 0 {
        return Err(Error::argument("burn_in must be at least 1 step"));
    }
    if !(config.quantile > 0.0 && config.quantile <= 1.0) {
        return Err(Error::argument(format_args!("quantile {} must be greater than 0 and at most 1", config.quantile)));
    }
    if !(config.kappa.is_finite() && config.kappa >= 1.0) {
        return Err(Error::argument(format_args!("kappa {} must be finite and at least 1", config.kappa)));
    }
    Ok(())
}

fn pool_count(config: &AutoCConfig, shape: &PolicyShape, tensor: ScaledTensor) -> usize {
    match config.pooling {
        Pooling::Model => 1,
        Pooling::Layer => shape.layers(),
        Pooling::Head => all_heads(shape, tensor),
    }
}

/// Heads of one tensor in one layer, counted over the model.
fn heads_of(shape: &PolicyShape, layer: usize, tensor: ScaledTensor) -> Range<usize> {
    if tensor == ScaledTensor::Logit { shape.heads().q(layer) } else { shape.heads().kv(layer) }
}

fn all_heads(shape: &PolicyShape, tensor: ScaledTensor) -> usize {
    if tensor == ScaledTensor::Logit { shape.heads().all_q() } else { shape.heads().all_kv() }
}

/// n: ratios that the pool of a layer has seen at the end of burn-in.
fn ratio_count(config: &AutoCConfig, shape: &PolicyShape, layer: usize, tensor: ScaledTensor) -> u64 {
    let heads = match config.pooling {
        Pooling::Model => all_heads(shape, tensor),
        Pooling::Layer => tensor.row(shape.of(layer)),
        Pooling::Head => 1,
    };
    heads as u64 * u64::from(config.burn_in)
}

impl AutoCConfig {
    /// How many of the largest ratios decide the constant of a layer's pool: those that are kept during burn-in.
    ///
    /// # Panics
    /// If there is no such layer, or if `tensor` is o, which has no pool.
    pub fn kept_ratios(&self, shape: &PolicyShape, layer: usize, tensor: ScaledTensor) -> usize {
        assert!(tensor != ScaledTensor::O && layer < shape.layers());
        usize::try_from(kept(ratio_count(self, shape, layer, tensor), self.quantile)).unwrap_or(usize::MAX)
    }
}

/// How many of the largest of n values decide the order statistic of rank `ceil(quantile n)`. A product that is whole but for
/// rounding is whole.
fn kept(n: u64, quantile: f64) -> u64 {
    let rank = (quantile * n as f64 * (1.0 - 4.0 * f64::EPSILON)).ceil() as u64;
    n - rank.clamp(1, n) + 1
}

impl Policy for AutoC {
    fn config(&self) -> PolicyConfig {
        PolicyConfig::AutoC(self.config)
    }

    fn shape(&self) -> &PolicyShape {
        &self.shape
    }

    fn plan(&self, bounds: &LayerBounds, _: Option<&StepStats>) -> Result<ScalePlan> {
        self.shape.check_bounds(bounds)?;
        let missing = || Error::unsupported("auto-c needs the worst-case bound, which is not available for this layer");
        let logit_bound = self.bounds(ScaledTensor::Logit, bounds).ok_or_else(missing)?;
        let row = |tensor, target| self.descales(tensor, bounds, target);
        let v = row(ScaledTensor::V, E4M3_MAX)?;
        let o = v.as_ref().map(|v| v.iter().map(|v| Descale::new(2.0 * v.get())).collect()).transpose()?;
        Ok(ScalePlan {
            layer: bounds.layer,
            logit_bound: Some(logit_bound),
            logit_descale: row(ScaledTensor::Logit, self.config.eta * E4M3_MAX)?.ok_or_else(missing)?,
            operands: OperandDescales {
                q: row(ScaledTensor::Q, E4M3_MAX)?.ok_or_else(missing)?,
                k: row(ScaledTensor::K, E4M3_MAX)?.ok_or_else(missing)?,
                v,
                o,
            },
        })
    }

    fn observe(&mut self, plan: &ScalePlan, bounds: &LayerBounds, stats: &StepStats) -> Result<Report> {
        let shape = self.shape.check_step(plan, bounds, stats)?;
        let mut report = Report::new(PolicyKind::AutoC, shape, plan, bounds, stats);
        if self.fall_back(plan, stats, &mut report) {
            report.fallback = Some(self.plan(bounds, None)?);
        }
        let forbidden = self.state.restarts > self.config.max_restarts;
        if !forbidden && self.state.seen[bounds.layer] < self.config.burn_in {
            self.burn_in(bounds, stats, &mut report);
            self.freeze(bounds.layer, &mut report);
        }
        Ok(report)
    }

    fn restart(&mut self, reason: Restart) -> Vec<PolicyEvent> {
        self.state.restarts = self.state.restarts.saturating_add(1);
        let forbidden = self.state.restarts > self.config.max_restarts;
        let why = Forbidden::TooManyRestarts;
        let phase = if forbidden { Phase::Forbidden { reason: why } } else { Phase::BurnIn };
        self.state.seen.fill(0);
        self.state.pools.iter_mut().for_each(|pools| pools.fill(RatioPool { phase, top: Vec::new() }));
        let mut events = vec![PolicyEvent::Restarted { reason, restarts: self.state.restarts }];
        if forbidden {
            events.push(PolicyEvent::Forbidden { reason: why });
        }
        events
    }

    fn save(&self) -> PolicyState {
        PolicyState::new(self.config(), &self.shape, Memory::AutoC(self.state.clone()))
    }
}

/// Fills a row with its largest value where one scale per layer is asked for.
fn share(row: &mut [f64], granularity: Granularity) {
    if granularity == Granularity::Layer {
        let largest = row.iter().copied().fold(0.0, f64::max);
        row.fill(largest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_statistic_has_the_smallest_rank_that_reaches_the_share() {
        let some = [1u64, 2, 100, 9_999, 10_000, 10_001, 19_999, 20_000, 160_000, 160_001];
        for n in some.into_iter().chain((1..2_000).map(|i| i * 10_000)).chain((1..2_000).map(|i| i * 6_173)) {
            for (quantile, share) in [(0.9999, 9_999), (0.99, 9_900), (0.5, 5_000), (0.7, 7_000), (1.0, 10_000)] {
                let rank = (n * share).div_ceil(10_000);
                assert_eq!(kept(n, quantile), n - rank + 1, "{quantile} of {n}");
            }
        }
        assert_eq!(kept(3, 1e-9), 3);
    }
}
