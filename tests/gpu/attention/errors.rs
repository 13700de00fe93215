//! The kernel's error beside that of a plain implementation with the same casts, on data that is hard for FP8.
//!
//! "Plain" is the CPU backend, which rounds P to E4M3 at `2^8` by the running maximum and sums in f32, its output rounded to
//! BF16 as the kernel's is. Both are measured against f64 on the same E4M3 operands. Prints the table.

use super::{bf16, cuda, distance, wide};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use sigmascale::Descale;
use sigmascale::attention::{Attention, AttentionCall, AttentionShape, Cpu, Inputs, Mask, Precision, reference};
use sigmascale::fp8::{Format, OnOverflow};
use sigmascale::plan::{OperandDescales, ScalePlan};

tests![errors_are_those_of_a_plain_implementation,];

/// (queries, keys)
const LENGTHS: [(usize, usize); 8] =
    [(128, 1024), (128, 8192), (128, 65_536), (113, 203), (799, 3), (1023, 1024), (1, 8192), (16, 8192)];
const D: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Data {
    Gauss,
    /// N(0, 1), and N(0, 100) on top of one value in a thousand.
    Outlier,
    /// The first key takes most of every row's weight.
    Sink,
    /// One key takes all of the first query's.
    Needle,
}

/// q, k and v as values of E4M3; one KV head.
fn draw(data: Data, shape: &AttentionShape, rng: &mut StdRng) -> [Vec<f32>; 3] {
    let mut normal = |n: usize| -> Vec<f32> {
        let mut one = || {
            let x: f32 = StandardNormal.sample(rng);
            let far: f32 = StandardNormal.sample(rng);
            if data == Data::Outlier && rng.random_bool(1e-3) { x + 10.0 * far } else { x }
        };
        (0..n).map(|_| one()).collect()
    };
    let (mut q, mut k, mut v) = (normal(shape.q_elements()), normal(shape.k_elements()), normal(shape.v_elements()));
    match data {
        Data::Sink => {
            let mean = |c: usize| q.iter().skip(c).step_by(D).sum::<f32>() / (q.len() / D) as f32;
            k[..D].iter_mut().enumerate().for_each(|(c, x)| *x = 4.0 * mean(c));
            let size = k[..D].iter().map(|x| x * x).sum::<f32>().sqrt();
            q.iter_mut().enumerate().for_each(|(i, x)| *x += 2.0 * k[i % D] / size);
        }
        Data::Needle => {
            let at = shape.len_k / 3 * D;
            (0..D).for_each(|c| k[at + c] = 1.2 * q[c]);
            v[at..at + D].iter_mut().for_each(|x| *x *= 3.0);
        }
        Data::Gauss | Data::Outlier => {}
    }
    [q, k, v].map(|x| x.into_iter().map(|x| Format::E4m3.round(x, OnOverflow::Saturate)).collect())
}

/// The reference, a row of queries at a time.
fn exact(call: &AttentionCall, [q, k, v]: [&[f32]; 3]) -> Vec<f64> {
    let one = AttentionCall { shape: AttentionShape { len_q: 1, ..call.shape }, ..*call };
    let (q, k, v) = (wide(q), wide(k), wide(v));
    let rows: Vec<_> =
        q.par_chunks(call.shape.n_q_heads * D).map(|row| reference(&one, row, &k, &v).unwrap().out).collect();
    rows.concat()
}

/// Relative RMS errors of the kernel in whole tiles, of the kernel with its keys split, and of a plain implementation.
fn errors(data: Data, len_q: usize, len_k: usize) -> [f64; 3] {
    // More heads where one has few rows.
    let n_q_heads = if len_q == 1 { 16 } else { 2 };
    let shape = AttentionShape { batch: 1, n_q_heads, n_kv_heads: 1, len_q, len_k, d_head: D, d_v: D };
    let call = AttentionCall { mask: Mask::NONE, ..AttentionCall::causal(shape) };
    let mut rng = StdRng::seed_from_u64(20);
    let [q, k, v] = draw(data, &shape, &mut rng);
    let inputs = Inputs { q: &q, k: &k, v: &v };
    let one = vec![Descale::ONE];
    let operands = OperandDescales { q: one.clone(), k: one.clone(), v: Some(one), o: None };
    let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale: vec![Descale::ONE; n_q_heads], operands };
    let want = exact(&call, [&q, &k, &v]);
    let ours = |split: bool| {
        let out = cuda().with_split(split).forward(&call, &inputs, &plan, &Precision::INFERENCE).unwrap().out;
        distance(&out, &want)
    };
    let plain = Cpu.forward(&call, &inputs, &plan, &Precision::KERNEL).unwrap().out;
    let plain: Vec<f32> = plain.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect();
    [ours(false), ours(true), distance(&plain, &want)]
}

/// At most twice the plain error everywhere, and where every row has many keys of weight no faster growth with their number.
/// Rows of outliers are decided by two or three keys, so their error says little about length.
fn errors_are_those_of_a_plain_implementation() {
    let mut complaints = Vec::new();
    println!("data, queries x keys: relative RMS error in whole tiles, split, plain; ratios");
    for data in [Data::Gauss, Data::Outlier, Data::Sink, Data::Needle] {
        let mut by_keys = Vec::new();
        for (len_q, len_k) in LENGTHS {
            if data == Data::Needle && len_k < 1024 {
                continue;
            }
            let all = errors(data, len_q, len_k);
            let [whole, split, plain] = all;
            let ratios = [whole / plain, split / plain];
            println!("{data:?}, {len_q} x {len_k}: {whole:.3e}, {split:.3e}, {plain:.3e}; {ratios:.3?}");
            if ratios.iter().any(|ratio| ratio.is_nan() || *ratio > 2.0) {
                complaints.push(format!("{data:?}, {len_q} x {len_k}: {whole:.3e} and {split:.3e}, plain {plain:.3e}"));
            }
            if len_q == 128 {
                by_keys.push(all);
            }
        }
        let [whole, split, plain] = [0, 1, 2].map(|which| by_keys[2][which] / by_keys[0][which]);
        println!("{data:?}: 64k over 1k keys {whole:.3}, {split:.3}, plain {plain:.3}");
        let grows = |ours: f64| ours.is_nan() || ours > 1.03 * plain;
        if matches!(data, Data::Gauss | Data::Sink) && (grows(whole) || grows(split)) {
            complaints
                .push(format!("{data:?}: grows {whole:.3} and {split:.3} times from 1k to 64k keys, plain {plain:.3}"));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}
