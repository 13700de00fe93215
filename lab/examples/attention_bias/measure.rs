//! Bias of attention's output and gradients on made data, against f64 on the same E4M3 operands.

use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, LogNormal, StandardNormal, StudentT};
use sigmascale::attention::{
    Attention, AttentionCall, AttentionShape, BackwardPrecision, Cpu, Delta, Dequantised, Fp8Products,
    GradientProducts, Inputs, Mask, Precision, PvAccumulator, QkAccumulator, ReferenceGradients, Saved, backward,
    dequantised, measure, reference, reference_backward,
};
use sigmascale::fp8::OnOverflow;
use sigmascale::plan::{OperandDescales, ScalePlan};
use sigmascale::{Descale, Result};
use sigmascale_lab::stress::output_bias;

/// What the operands look like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Independent normal numbers.
    Gauss,
    /// Keys share a direction in which queries vary; an eighth of V's channels have the mean -2, and dO half of it.
    Aligned,
    /// Tokens of a vocabulary of 32.
    Repeat,
    /// The first key takes most of the weight, and its value is small.
    Sink,
    /// Student's t with three degrees of freedom; norms of dO's rows are log-normal.
    Heavy,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Gauss, Self::Aligned, Self::Repeat, Self::Sink, Self::Heavy];
}

/// One head, as many queries as keys or fewer.
pub struct Case {
    call: AttentionCall<'static>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// BF16 numbers.
    d_out: Vec<f32>,
    plan: ScalePlan,
}

fn normal(n: usize, rng: &mut StdRng) -> Vec<f32> {
    (0..n).map(|_| StandardNormal.sample(rng)).collect()
}

/// The nearest BF16 numbers.
fn in_bf16(x: &[f32]) -> Vec<f32> {
    x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect()
}

impl Case {
    /// `len_q` queries that see all of `len_k` keys; q and k are normal, v is normal around `mean`.
    pub fn with_mean(mean: f32, len_q: usize, len_k: usize, d_head: usize, seed: u64) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        let shape = AttentionShape { batch: 1, n_q_heads: 1, n_kv_heads: 1, len_q, len_k, d_head, d_v: d_head };
        let call = AttentionCall { mask: Mask::NONE, ..AttentionCall::causal(shape) };
        let [q, k, mut v] = [len_q, len_k, len_k].map(|len| normal(len * d_head, &mut rng));
        v.iter_mut().for_each(|v| *v += mean);
        let d_out = vec![0.0; q.len()];
        Ok(Self { call, plan: plan(&call, &q, &k, &v)?, q, k, v, d_out })
    }

    /// A causal call of `len` tokens.
    pub fn of(kind: Kind, len: usize, d_head: usize, seed: u64) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        let shape =
            AttentionShape { batch: 1, n_q_heads: 1, n_kv_heads: 1, len_q: len, len_k: len, d_head, d_v: d_head };
        let call = AttentionCall::causal(shape);
        let n = len * d_head;
        let [mut q, mut k, mut v, mut d_out] = [n; 4].map(|n| normal(n, &mut rng));
        let mut direction = normal(d_head, &mut rng);
        let norm = direction.iter().map(|x| x * x).sum::<f32>().sqrt();
        direction.iter_mut().for_each(|x| *x /= norm);
        match kind {
            Kind::Gauss => {}
            Kind::Aligned => {
                for row in 0..len {
                    let along: f32 = StandardNormal.sample(&mut rng);
                    for c in 0..d_head {
                        let mean = if c < d_head / 8 { -2.0 } else { 0.0 };
                        q[row * d_head + c] += along * direction[c];
                        k[row * d_head + c] += 4.0 * direction[c];
                        v[row * d_head + c] += mean;
                        d_out[row * d_head + c] += 0.5 * mean;
                    }
                }
            }
            Kind::Repeat => {
                let tokens: Vec<usize> = (0..len).map(|_| rng.random_range(0..32.min(len))).collect();
                for x in [&mut q, &mut k, &mut v, &mut d_out] {
                    let vocabulary = x.clone();
                    for (row, token) in x.chunks_exact_mut(d_head).zip(&tokens) {
                        row.copy_from_slice(&vocabulary[token * d_head..][..d_head]);
                    }
                }
            }
            Kind::Sink => {
                for (c, direction) in direction.iter().enumerate() {
                    q.iter_mut().skip(c).step_by(d_head).for_each(|q| *q += 4.0 * direction);
                    k[c] = 3.0 * (d_head as f32).sqrt() * direction;
                    v[c] *= 0.05;
                }
            }
            Kind::Heavy => {
                let heavy = StudentT::new(3.0f32).expect("degrees of freedom above zero");
                for x in [&mut q, &mut k, &mut v] {
                    x.iter_mut().for_each(|x| *x = heavy.sample(&mut rng));
                }
                let norms = LogNormal::new(0.0f32, 1.5).expect("a deviation above zero");
                for row in d_out.chunks_exact_mut(d_head) {
                    let norm = norms.sample(&mut rng);
                    row.iter_mut().for_each(|x| *x *= norm);
                }
            }
        }
        Ok(Self { call, plan: plan(&call, &q, &k, &v)?, q, k, v, d_out: in_bf16(&d_out) })
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs { q: &self.q, k: &self.k, v: &self.v }
    }

    /// q, k and v as the products see them.
    fn operands(&self) -> Result<Dequantised> {
        dequantised(&self.call, &self.inputs(), &self.plan, OnOverflow::Saturate)
    }

    /// The output's bias: the mean of `out - exact` and of the error in the direction of `exact`, both over the mean of
    /// `|exact|`.
    pub fn output_bias(&self, precision: &Precision) -> Result<[f64; 2]> {
        let x = self.operands()?;
        let exact = narrow(&reference(&self.call, &wide(&x.q), &wide(&x.k), &wide(&x.v))?.out);
        let out = Cpu.forward(&self.call, &self.inputs(), &self.plan, precision)?.out;
        let error: f64 = out.iter().zip(&exact).map(|(out, exact)| f64::from(out - exact)).sum();
        let size: f64 = exact.iter().map(|exact| f64::from(exact.abs())).sum();
        let along = output_bias(&exact, &out).unwrap_or(f64::NAN);
        Ok([error / size, along])
    }

    /// Gradients in f64.
    pub fn exact_gradients(&self) -> Result<ReferenceGradients> {
        let x = self.operands()?;
        reference_backward(&self.call, &wide(&x.q), &wide(&x.k), &wide(&x.v), &wide(&self.d_out))
    }

    /// Errors of dQ, dK and dV by one way to compute them.
    pub fn gradients(&self, way: &Way, exact: &ReferenceGradients) -> Result<[GradientError; 3]> {
        let exact_output = || -> Result<_> {
            let x = self.operands()?;
            let exact = reference(&self.call, &wide(&x.q), &wide(&x.k), &wide(&x.v))?;
            Ok((narrow(&exact.out), narrow(&exact.lse)))
        };
        let computed = || -> Result<_> {
            let output = Cpu.forward(&self.call, &self.inputs(), &self.plan, &way.forward)?;
            Ok((output.out, output.lse))
        };
        let (mut out, lse) = if way.exact_output { exact_output()? } else { computed()? };
        if !way.f32_output {
            out = in_bf16(&out);
        }
        let saved = Saved { out: &out, lse: &lse };
        let have = backward(&self.call, &self.inputs(), &self.plan, &way.forward, &way.backward, &saved, &self.d_out)?;
        let d = self.call.shape.d_head;
        Ok([
            GradientError::of(&have.dq, &exact.dq, d),
            GradientError::of(&have.dk, &exact.dk, d),
            GradientError::of(&have.dv, &exact.dv, d),
        ])
    }
}

/// One way to compute gradients.
#[derive(Clone, Copy)]
pub struct Way {
    pub name: &'static str,
    forward: Precision,
    backward: BackwardPrecision,
    /// Output and log-sum-exp of the f64 reference in place of the forward's.
    exact_output: bool,
    /// The output reaches the backward pass in f32, not in BF16.
    f32_output: bool,
}

impl Way {
    const fn new(name: &'static str, forward: Precision, delta: Delta) -> Self {
        let backward = BackwardPrecision { delta, products: GradientProducts::F32 };
        Self { name, forward, backward, exact_output: false, f32_output: false }
    }

    /// delta from the output of a forward that promotes P V every 2048 keys.
    pub const PROMOTE_2048: Self = Self::new("O of fp8-2048", Precision::PROMOTE_2048, Delta::Output);
    /// The same output without the rounding to BF16.
    pub const PROMOTE_2048_IN_F32: Self = Self { name: "the same O in f32", f32_output: true, ..Self::PROMOTE_2048 };
    /// delta from the output of the inference default.
    pub const INFERENCE: Self = Self::new("O of the inference default", Precision::INFERENCE, Delta::Output);
    /// delta from the output of the training default.
    pub const TRAINING: Self = Self::new("O of the training default (f16)", Precision::TRAINING, Delta::Output);
    /// delta from P dP.
    pub const PROBABILITIES: Self = Self::new("sum of P dP", Precision::TRAINING, Delta::Probabilities);
    /// What a BF16 backward pass has at best.
    pub const EXACT_OUTPUT: Self = Self {
        exact_output: true,
        ..Self::new(
            "exact O and lse",
            Precision { qk_accumulator: QkAccumulator::F32, ..Precision::TRAINING },
            Delta::Output,
        )
    };

    /// The same with the products in BF16.
    const fn in_bf16(self, name: &'static str) -> Self {
        Self { name, backward: BackwardPrecision { products: GradientProducts::Bf16, ..self.backward }, ..self }
    }

    /// The same with some products in FP8.
    const fn in_fp8(self, name: &'static str, dq: bool, dp: bool, value_slack: u32) -> Self {
        let products = GradientProducts::Fp8(Fp8Products { dq, dp, value_slack });
        Self { name, backward: BackwardPrecision { products, ..self.backward }, ..self }
    }

    /// [`Way::TRAINING`] as a fused kernel computes it.
    pub const KERNEL: Self = Self::TRAINING.in_bf16("training default, BF16 products");
    /// [`Way::EXACT_OUTPUT`] with BF16 products: FlashAttention-2's backward, given the exact output.
    pub const BASELINE: Self = Self::EXACT_OUTPUT.in_bf16("exact O and lse, BF16 products");
    /// [`Way::KERNEL`] with dQ in FP8: R_V as it is, eight times that, and as loose as the range of E4M3 makes it.
    pub const FP8_DQ: Self = Self::TRAINING.in_fp8("dQ in FP8", true, false, 1);
    pub const FP8_DQ_8: Self = Self::TRAINING.in_fp8("dQ in FP8, R_V x 8", true, false, 8);
    pub const FP8_DQ_64: Self = Self::TRAINING.in_fp8("dQ in FP8, R_V x 64", true, false, 64);
    /// With dP in FP8.
    pub const FP8_DP: Self = Self::TRAINING.in_fp8("dP in FP8", false, true, 1);
    /// With both.
    pub const FP8_DQ_DP: Self = Self::TRAINING.in_fp8("dQ and dP in FP8", true, true, 1);
    pub const FP8_DQ_DP_8: Self = Self::TRAINING.in_fp8("dQ and dP in FP8, R_V x 8", true, true, 8);
}

/// How far a gradient is off.
#[derive(Clone, Copy, Debug)]
pub struct GradientError {
    /// Norm of the error over the norm of the gradient.
    pub relative: f64,
    /// Norm of the mean row error over what independent row errors of that size would leave: 1 is unbiased, the root of the
    /// number of rows is all bias.
    pub bias: f64,
}

impl GradientError {
    fn of(have: &[f32], exact: &[f64], d: usize) -> Self {
        let error: Vec<f64> = have.iter().zip(exact).map(|(have, exact)| f64::from(*have) - exact).collect();
        let square = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
        let rows = (error.len() / d) as f64;
        let mean: Vec<f64> = (0..d).map(|c| error.iter().skip(c).step_by(d).sum::<f64>() / rows).collect();
        Self {
            relative: (square(&error) / square(exact)).sqrt(),
            bias: square(&mean).sqrt() / (square(&error).sqrt() / rows),
        }
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|x| *x as f32).collect()
}

/// A plan that covers these operands' largest values.
fn plan(call: &AttentionCall, q: &[f32], k: &[f32], v: &[f32]) -> Result<ScalePlan> {
    let stats = measure(call, &Inputs { q, k, v })?;
    let cover = |amax: f32| Descale::covering(f64::from(amax) * 1.01, 448.0);
    let row = |amax: f32| -> Result<_> { Ok(vec![cover(amax)?]) };
    let operands =
        OperandDescales { q: row(stats.q[0].amax)?, k: row(stats.k[0].amax)?, v: Some(row(stats.v[0].amax)?), o: None };
    Ok(ScalePlan { layer: 0, logit_bound: None, logit_descale: row(stats.logits[0].amax())?, operands })
}

/// The settings of P V's sums that the documentation lists.
pub const SETTINGS: [PvAccumulator; 6] = [
    PvAccumulator::F32,
    PvAccumulator::F16,
    PvAccumulator::Fp8 { promote_every: 128 },
    PvAccumulator::Fp8 { promote_every: 256 },
    PvAccumulator::Fp8 { promote_every: 512 },
    PvAccumulator::Fp8 { promote_every: 2048 },
];

/// Means of V that the documentation lists.
pub const MEANS: [f32; 4] = [0.1, 0.3, 1.0, 3.0];
