//! What a run came to.

use super::{LowPrecisionOptions, LowPrecisionRun, Remedy};
use crate::history::{LayerRecord, StepRecord};
use serde::Serialize;

/// Steps over which a loss is averaged.
const WINDOW: usize = 50;

/// One run in numbers. Vectors have one entry per head.
#[derive(Clone, Debug, Serialize)]
pub struct LowPrecisionSummary {
    /// Options of the run.
    #[serde(flatten)]
    pub options: LowPrecisionOptions,
    /// Mean loss of the first 50 steps.
    pub loss_start: f64,
    /// Mean loss of the last 50 steps.
    pub loss_end: f64,
    /// First step at which the mean loss of 50 steps is twice that of the first 50, or not finite.
    pub failed_at: Option<u64>,
    /// Norm of W_Q in the first record.
    pub w_q_start: Vec<f64>,
    /// Norm of W_Q in the last record.
    pub w_q_end: Vec<f64>,
    /// Sum of delta's bias over the records, in units of |delta|.
    pub delta_bias: Vec<f64>,
    /// Mean share of rows whose maximum repeats.
    pub repeated: Vec<f64>,
    /// See [`LowPrecisionRun::rank_one`].
    pub rank_one: Vec<f64>,
}

impl LowPrecisionSummary {
    /// Of a run.
    pub fn of(options: &LowPrecisionOptions, run: &LowPrecisionRun) -> Self {
        let history = &run.history;
        let mean =
            |steps: &[StepRecord]| steps.iter().filter_map(|step| step.loss).sum::<f64>() / steps.len().max(1) as f64;
        let window = history.steps.len().min(WINDOW);
        let loss_start = mean(&history.steps[..window]);
        let failed = history.steps.windows(window.max(1)).find(|steps| {
            let loss = mean(steps);
            loss.is_nan() || loss >= 2.0 * loss_start
        });
        let sum = |column: fn(&LayerRecord) -> &[f64]| {
            let of = |head: usize| history.layers.iter().map(|record| column(record)[head]).sum::<f64>();
            (0..options.heads).map(of).collect::<Vec<f64>>()
        };
        let norms = |record: Option<&LayerRecord>| record.map_or(Vec::new(), |record| record.w_q.clone());
        let records = history.layers.len().max(1) as f64;
        Self {
            options: *options,
            loss_start,
            loss_end: mean(&history.steps[history.steps.len() - window..]),
            failed_at: failed.and_then(|steps| steps.last()).map(|step| step.step),
            w_q_start: norms(history.layers.first()),
            w_q_end: norms(history.layers.last()),
            delta_bias: sum(|record| &record.delta_bias),
            repeated: sum(|record| &record.repeated).into_iter().map(|sum| sum / records).collect(),
            rank_one: run.rank_one.clone(),
        }
    }

    /// The head whose W_Q grew by the largest factor, and that factor.
    pub fn fastest_head(&self) -> (usize, f64) {
        let growth = self.w_q_start.iter().zip(&self.w_q_end).map(|(start, end)| end / start).enumerate();
        growth.fold((0, f64::NEG_INFINITY), |best, (head, growth)| if growth > best.1 { (head, growth) } else { best })
    }
}

/// What the runs with one remedy came to.
#[derive(Clone, Debug, Serialize)]
pub struct RemedyVerdict {
    /// Remedy.
    pub remedy: Remedy,
    /// Runs.
    pub runs: usize,
    /// Runs whose loss doubled.
    pub failed: usize,
    /// Runs whose loss did not double, but in which the norm of a head's W_Q did.
    pub grown: usize,
}

/// One verdict per remedy, in the order in which they occur.
pub fn verdicts(runs: &[LowPrecisionSummary]) -> Vec<RemedyVerdict> {
    let mut verdicts: Vec<RemedyVerdict> = Vec::new();
    for run in runs {
        let at = verdicts.iter().position(|verdict| verdict.remedy == run.options.remedy).unwrap_or_else(|| {
            verdicts.push(RemedyVerdict { remedy: run.options.remedy, runs: 0, failed: 0, grown: 0 });
            verdicts.len() - 1
        });
        let verdict = &mut verdicts[at];
        verdict.runs += 1;
        verdict.failed += usize::from(run.failed_at.is_some());
        verdict.grown += usize::from(run.failed_at.is_none() && run.fastest_head().1 > 2.0);
    }
    verdicts
}
