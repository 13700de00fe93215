//! What quantisation cost: SQNR of the output and KL divergence of the softmax.

use super::options::Mode;
use crate::attention::{AttentionCall, Inputs, dequantised};
use crate::error::Result;
use crate::fp8::{Format, OnOverflow};
use crate::plan::ScalePlan;
use rayon::prelude::*;
use serde::Serialize;

/// Rows of a head whose softmax is compared.
const ROWS: usize = 16;

/// Three quantiles, each the smallest value of at least that rank; zeros of nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// 0.1.
    pub p10: f64,
    /// 0.5.
    pub median: f64,
    /// 0.9.
    pub p90: f64,
}

impl Quantiles {
    /// The quantiles of `values`, which are sorted on the way.
    pub fn of(values: &mut [f64]) -> Self {
        let mut at = |share| quantile(values, share).unwrap_or(0.0);
        Self { p10: at(0.1), median: at(0.5), p90: at(0.9) }
    }
}

/// The smallest value of rank >= share n.
pub(super) fn quantile(values: &mut [f64], share: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let rank = (share * values.len() as f64).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied()
}

/// `10 log10(sum x^2 / sum (x - y)^2)` in dB; `None` for two equal outputs, and where one is not finite.
pub fn sqnr_db(exact: &[f32], quantised: &[f32]) -> Option<f64> {
    let (mut signal, mut noise) = (0.0f64, 0.0f64);
    for (x, y) in exact.iter().zip(quantised) {
        signal += f64::from(*x).powi(2);
        noise += (f64::from(*x) - f64::from(*y)).powi(2);
    }
    let db = 10.0 * (signal / noise).log10();
    db.is_finite().then_some(db)
}

/// Softmax rows of one call in f32, to compare quantised ones with.
///
/// Rows are spread evenly over the sequence, 16 a head.
pub(crate) struct Divergence<'a> {
    call: &'a AttentionCall,
    inputs: &'a Inputs<'a>,
    rows: Vec<(usize, usize)>,
    exact: Vec<Vec<f64>>,
}

impl<'a> Divergence<'a> {
    pub(crate) fn new(call: &'a AttentionCall, inputs: &'a Inputs<'a>) -> Self {
        let shape = &call.shape;
        let step = shape.len_q.div_ceil(ROWS);
        let rows: Vec<_> = (0..shape.n_q_heads)
            .flat_map(|head| (0..shape.len_q).rev().step_by(step).map(move |row| (head, row)))
            .collect();
        let exact = rows.par_iter().map(|&(head, row)| logits(call, inputs.q, inputs.k, head, row)).collect();
        Self { call, inputs, rows, exact }
    }

    /// Mean over the rows of `sum p ln(p / p')`, in nats, p from f32 and p' from what the plan makes of it; `None` if it is
    /// not finite.
    pub(crate) fn of(&self, mode: Mode, plan: &ScalePlan) -> Result<Option<f64>> {
        let each: Vec<f64> = match mode {
            Mode::Logit => self
                .rows
                .par_iter()
                .zip(&self.exact)
                .map(|(&(head, _), exact)| {
                    let descale = plan.logit_descale[head];
                    let cast = |x: &f64| {
                        let scaled = *x as f32 * descale.quant_scale().get();
                        f64::from(Format::E4m3.round(scaled, OnOverflow::Saturate) * descale.get())
                    };
                    divergence(exact, &exact.iter().map(cast).collect::<Vec<_>>())
                })
                .collect(),
            Mode::Operands => {
                let cast = dequantised(self.call, self.inputs, plan, OnOverflow::Saturate)?;
                self.rows
                    .par_iter()
                    .zip(&self.exact)
                    .map(|(&(head, row), exact)| divergence(exact, &logits(self.call, &cast.q, &cast.k, head, row)))
                    .collect()
            }
        };
        // In the order of the rows, whatever the threads do: the same run prints the same digits.
        let mean = each.iter().sum::<f64>() / self.rows.len() as f64;
        Ok(mean.is_finite().then_some(mean))
    }
}

/// The visible logits of one row of the first sequence, after the soft-cap.
fn logits(call: &AttentionCall, q: &[f32], k: &[f32], head: usize, row: usize) -> Vec<f64> {
    let shape = &call.shape;
    let (d, kv) = (shape.d_head, shape.kv_head(head));
    let q = &q[(row * shape.n_q_heads + head) * d..][..d];
    call.mask
        .visible(row, shape.len_q, shape.len_k)
        .map(|key| {
            let k = &k[(key * shape.n_kv_heads + kv) * d..][..d];
            let dot = q.iter().zip(k).map(|(a, b)| a * b).sum::<f32>();
            let logit = f64::from(dot) * call.softmax_scale;
            call.soft_cap.map_or(logit, |cap| cap * (logit / cap).tanh())
        })
        .collect()
}

/// KL divergence of two rows of logits.
fn divergence(exact: &[f64], quantised: &[f64]) -> f64 {
    let log_sum = |row: &[f64]| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
    };
    let (a, b) = (log_sum(exact), log_sum(quantised));
    exact.iter().zip(quantised).map(|(x, y)| (x - a).exp() * ((x - a) - (y - b))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_order_statistics() {
        let mut values: Vec<f64> = (1..=10).rev().map(f64::from).collect();
        assert_eq!(Quantiles::of(&mut values), Quantiles { p10: 1.0, median: 5.0, p90: 9.0 });
        assert_eq!(Quantiles::of(&mut []), Quantiles::default());
        assert_eq!(quantile(&mut [3.0], 0.5), Some(3.0));
    }

    #[test]
    fn sqnr_of_a_known_error() {
        assert!((sqnr_db(&[3.0, 4.0], &[3.0, 4.5]).unwrap() - 20.0).abs() < 1e-9);
        assert_eq!(sqnr_db(&[1.0], &[1.0]), None);
        assert_eq!(sqnr_db(&[1.0], &[f32::NAN]), None);
    }

    #[test]
    fn divergence_is_zero_for_shifts_and_known_for_two_keys() {
        assert!(divergence(&[1.0, 2.0, 3.0], &[11.0, 12.0, 13.0]).abs() < 1e-12);
        // p = (1/2, 1/2) against (1/4, 3/4).
        let want = 0.5 * (2f64.ln() + (2.0 / 3.0f64).ln());
        assert!((divergence(&[0.0, 0.0], &[0.0, 3f64.ln()]) - want).abs() < 1e-12);
    }

    #[test]
    fn each_head_is_compared_under_its_own_descale() {
        use crate::Descale;
        use crate::attention::AttentionShape;
        let shape = AttentionShape { batch: 1, n_q_heads: 4, n_kv_heads: 2, len_q: 6, len_k: 6, d_head: 16 };
        let call = AttentionCall::causal(shape);
        // Only query head 3 and KV head 1 have anything to lose.
        let q: Vec<f32> = (0..shape.q_elements()).map(|i| if i / 16 % 4 == 3 { (i % 7) as f32 } else { 0.0 }).collect();
        let k: Vec<f32> =
            (0..shape.kv_elements()).map(|i| if i / 16 % 2 == 1 { (i % 5) as f32 } else { 0.0 }).collect();
        let inputs = Inputs { q: &q, k: &k, v: &k };
        let compared = Divergence::new(&call, &inputs);
        let kl = |mode, change: &dyn Fn(&mut ScalePlan, Descale)| {
            let mut plan = super::super::lab::identity(0, &shape);
            change(&mut plan, Descale::new(1e-4).unwrap());
            compared.of(mode, &plan).unwrap().unwrap()
        };
        for head in 0..4 {
            let wrong = kl(Mode::Logit, &|plan, tiny| plan.logit_descale[head] = tiny) > 0.1;
            assert_eq!(wrong, head == 3, "logits, head {head}");
        }
        for head in 0..2 {
            for operand in 0..2 {
                let wrong = kl(Mode::Operands, &|plan, tiny| {
                    let rows = [&mut plan.operands.q, &mut plan.operands.k];
                    rows.into_iter().nth(operand).unwrap()[head] = tiny;
                }) > 0.1;
                assert_eq!(wrong, head == 1, "operand {operand}, head {head}");
            }
        }
    }
}
