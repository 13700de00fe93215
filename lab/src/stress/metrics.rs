//! What quantisation cost: SQNR and bias of the output, and KL divergence of the softmax.

use super::options::Mode;
use rayon::prelude::*;
use serde::Serialize;
use sigmascale::Result;
use sigmascale::attention::{AttentionCall, Inputs, dequantised};
use sigmascale::fp8::{Format, OnOverflow};
use sigmascale::plan::ScalePlan;

/// Rows of a head whose softmax is compared.
const ROWS: usize = 16;

/// Two quantiles, each the smallest value of at least that rank, and the median; zeros of nothing.
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
        let median = median(values).unwrap_or(0.0);
        // Sorted now.
        let at = |share: f64| {
            let rank = (share * values.len() as f64).ceil() as usize;
            values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        Self { p10: at(0.1), median, p90: at(0.9) }
    }
}

/// The median, of an even number of values the mean of the middle two; `None` of nothing. Sorts the values.
pub fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let above = *values.get(values.len() / 2)?;
    Some(if values.len() % 2 == 1 { above } else { 0.5 * (values[values.len() / 2 - 1] + above) })
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

/// The mean error in the direction of the exact value, over the mean size: `sum sign(x) (y - x) / sum |x|`.
///
/// -0.02 is an output that is 2 % too small on average. Independent errors cancel in it, whatever their size, so it finds
/// what SQNR hides: sums that come out too small. `None` where the exact output is zero, and where a value is not finite.
pub fn output_bias(exact: &[f32], quantised: &[f32]) -> Option<f64> {
    let (mut error, mut size) = (0.0f64, 0.0f64);
    for (x, y) in exact.iter().map(|&x| f64::from(x)).zip(quantised.iter().map(|&y| f64::from(y))) {
        error += if x < 0.0 { x - y } else { y - x };
        size += x.abs();
    }
    let bias = error / size;
    bias.is_finite().then_some(bias)
}

/// Figures that compare one output with that of f32 attention.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Quality {
    pub(crate) sqnr_db: Option<f64>,
    pub(crate) output_bias: Option<f64>,
    pub(crate) softmax_kl: Option<f64>,
}

impl Quality {
    pub(crate) fn of(exact: &[f32], quantised: &[f32]) -> Self {
        Self { sqnr_db: sqnr_db(exact, quantised), output_bias: output_bias(exact, quantised), softmax_kl: None }
    }
}

/// Softmax rows of one call in f32, to compare quantised ones with.
///
/// Rows are spread evenly over the sequence, 16 a head.
pub(crate) struct Divergence<'a> {
    call: &'a AttentionCall<'a>,
    inputs: &'a Inputs<'a>,
    rows: Vec<(usize, usize)>,
    exact: Vec<Vec<f64>>,
}

impl<'a> Divergence<'a> {
    pub(crate) fn new(call: &'a AttentionCall<'a>, inputs: &'a Inputs<'a>) -> Self {
        let shape = &call.shape;
        let step = shape.len_q.div_ceil(ROWS);
        let rows: Vec<_> = (0..shape.n_q_heads)
            .flat_map(|head| (0..shape.len_q).rev().step_by(step).map(move |row| (head, row)))
            .collect();
        let exact = rows.par_iter().map(|&(head, row)| logits(call, inputs.q, inputs.k, head, row)).collect();
        Self { call, inputs, rows, exact }
    }

    fn sink(&self, head: usize) -> Option<f64> {
        self.call.sinks.map(|sinks| sinks[head])
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
                    divergence(exact, &exact.iter().map(cast).collect::<Vec<_>>(), self.sink(head))
                })
                .collect(),
            Mode::Operands => {
                let cast = dequantised(self.call, self.inputs, plan, OnOverflow::Saturate)?;
                self.rows
                    .par_iter()
                    .zip(&self.exact)
                    .map(|(&(head, row), exact)| {
                        divergence(exact, &logits(self.call, &cast.q, &cast.k, head, row), self.sink(head))
                    })
                    .collect()
            }
        };
        // In the order of the rows, whatever the threads do: the same run prints the same digits.
        let mean = each.iter().sum::<f64>() / self.rows.len() as f64;
        Ok(mean.is_finite().then_some(mean))
    }
}

/// The visible logits of one row of the first sequence, after the soft-cap.
fn logits(call: &AttentionCall<'_>, q: &[f32], k: &[f32], head: usize, row: usize) -> Vec<f64> {
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

/// KL divergence of two rows of logits, each with the same sink as one more column.
fn divergence(exact: &[f64], quantised: &[f64], sink: Option<f64>) -> f64 {
    let log_sum = |row: &[f64]| {
        let columns = || row.iter().copied().chain(sink);
        let max = columns().fold(f64::NEG_INFINITY, f64::max);
        max + columns().map(|x| (x - max).exp()).sum::<f64>().ln()
    };
    let (a, b) = (log_sum(exact), log_sum(quantised));
    let pairs = exact.iter().copied().zip(quantised.iter().copied()).chain(sink.map(|sink| (sink, sink)));
    pairs.map(|(x, y)| (x - a).exp() * ((x - a) - (y - b))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_order_statistics() {
        let mut values: Vec<f64> = (1..=10).rev().map(f64::from).collect();
        assert_eq!(Quantiles::of(&mut values), Quantiles { p10: 1.0, median: 5.5, p90: 9.0 });
        assert_eq!(Quantiles::of(&mut []), Quantiles::default());
        assert_eq!((median(&mut [3.0]), median(&mut [4.0, 1.0, 2.0]), median(&mut [])), (Some(3.0), Some(2.0), None));
    }

    #[test]
    fn sqnr_of_a_known_error() {
        assert!((sqnr_db(&[3.0, 4.0], &[3.0, 4.5]).unwrap() - 20.0).abs() < 1e-9);
        assert_eq!(sqnr_db(&[1.0], &[1.0]), None);
        assert_eq!(sqnr_db(&[1.0], &[f32::NAN]), None);
    }

    #[test]
    fn bias_is_the_share_that_is_missing_whatever_the_sign() {
        let exact = [1.0, -2.0, 3.0, 0.0];
        let shrunk = exact.map(|x| 0.75 * x);
        assert_eq!(output_bias(&exact, &shrunk), Some(-0.25));
        assert_eq!(output_bias(&exact, &exact), Some(0.0));
        // Errors that cancel are no bias, however large.
        assert_eq!(output_bias(&exact, &[1.5, -1.5, 3.0, 0.0]), Some(0.0));
        assert_eq!((output_bias(&[0.0], &[1.0]), output_bias(&[1.0], &[f32::NAN])), (None, None));
    }

    #[test]
    fn divergence_is_zero_for_shifts_and_known_for_two_keys() {
        assert!(divergence(&[1.0, 2.0, 3.0], &[11.0, 12.0, 13.0], None).abs() < 1e-12);
        // p = (1/2, 1/2) against (1/4, 3/4).
        let want = 0.5 * (2f64.ln() + (2.0 / 3.0f64).ln());
        assert!((divergence(&[0.0, 0.0], &[0.0, 3f64.ln()], None) - want).abs() < 1e-12);
    }

    #[test]
    fn each_head_is_compared_under_its_own_descale() {
        use sigmascale::Descale;
        use sigmascale::attention::AttentionShape;
        let shape = AttentionShape { batch: 1, n_q_heads: 4, n_kv_heads: 2, len_q: 6, len_k: 6, d_head: 16, d_v: 16 };
        let call = AttentionCall::causal(shape);
        // Only query head 3 and KV head 1 have anything to lose.
        let q: Vec<f32> = (0..shape.q_elements()).map(|i| if i / 16 % 4 == 3 { (i % 7) as f32 } else { 0.0 }).collect();
        let k: Vec<f32> = (0..shape.k_elements()).map(|i| if i / 16 % 2 == 1 { (i % 5) as f32 } else { 0.0 }).collect();
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
