//! Head dimensions: those that kernels are compiled for, those that are filled up, and values of another dimension than keys.

use super::{
    BF16, Data, Memory, bf16_bytes, both, cuda, distance, exact, logit_error, on_device, same_casts, stream, wide,
};
use rayon::prelude::*;
use sigmascale::attention::{Attention, AttentionCall, AttentionShape, Cast, Cpu, LogitCast, Mask, Precision};
use sigmascale::device::attention::Element;
use sigmascale::fp8::{Format, OnOverflow};

tests![
    head_dimensions_agree_with_the_cpu,
    head_dimensions_take_e4m3_logits_and_outputs,
    head_dimensions_of_e4m3_operands,
];

/// (d_head, d_v)
pub const DIMS: [(usize, usize); 14] = [
    (16, 16),
    (40, 40),
    (72, 72),
    (80, 80),
    (96, 96),
    (112, 112),
    (160, 160),
    (192, 128),
    (192, 192),
    (224, 224),
    (256, 256),
    (128, 64),
    (64, 256),
    (88, 200),
];
/// (batch, query heads, KV heads, queries, keys): whole tiles, packed and not; parts; rows that see no key; a few keys.
const SHAPES: [(usize, usize, usize, usize, usize); 5] =
    [(2, 4, 2, 113, 403), (1, 3, 3, 300, 77), (1, 8, 2, 5, 3000), (1, 4, 4, 1, 8192), (1, 6, 2, 199, 3)];

fn shapes() -> Vec<(usize, AttentionShape)> {
    let all = DIMS.into_iter().flat_map(|(d_head, d_v)| {
        SHAPES.map(|(batch, n_q_heads, n_kv_heads, len_q, len_k)| AttentionShape {
            batch,
            n_q_heads,
            n_kv_heads,
            len_q,
            len_k,
            d_head,
            d_v,
        })
    });
    all.enumerate().collect()
}

/// Output, log-sum-exp and telemetry, with sums of P V in FP8 and F16.
fn head_dimensions_agree_with_the_cpu() {
    let gpus = both();
    shapes().into_par_iter().for_each(|(seed, shape)| {
        for causal in [true, false] {
            let call = AttentionCall { mask: Mask { causal, ..Mask::NONE }, ..AttentionCall::causal(shape) };
            let data = Data::new(&shape, 400 + seed as u64);
            let plan = data.plan(&call, 1.3);
            let cpu = Cpu.forward(&call, &data.inputs(), &plan, &Precision::KERNEL).unwrap();
            let want = exact(&call, &data.inputs(), &plan);
            let error = logit_error(&call, &data);
            for gpu in &gpus {
                for precision in [Precision::INFERENCE, Precision::TRAINING, Precision::PROMOTE_2048] {
                    let have = gpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
                    let case = format!("{call:?}, {}", precision.pv_accumulator);
                    let (ours, theirs) = (distance(&have.out, &want), distance(&cpu.out, &want));
                    let training = precision == Precision::TRAINING;
                    // A row of few keys has 16 elements at least: the mean square of its rounding errors varies.
                    let varies = if shape.out_elements() < 4096 { 1.35 } else { 1.15 };
                    let allowed = if training { 0.2 * theirs + 1.5 * BF16 } else { varies * theirs + BF16 };
                    assert!(ours <= allowed, "{case}: {ours:.3e}, CPU {theirs:.3e}");
                    for (at, (a, b)) in have.lse.iter().zip(&cpu.lse).enumerate() {
                        assert!(a == b || (a - b).abs() <= 4e-3, "{case}: lse {at} {a} for {b}");
                    }
                    same_casts(&have.stats, &cpu.stats);
                    for (a, b) in have.stats.logits.iter().zip(&cpu.stats.logits) {
                        assert_eq!((a.count, a.overflow), (b.count, b.overflow), "{case}");
                        for (a, b) in [(a.max, b.max), (a.min, b.min)] {
                            assert!(a == b || (a - b).abs() <= error, "{case}: {a} for {b}, error at most {error}");
                        }
                    }
                    for (a, b) in have.stats.o.iter().zip(&cpu.stats.o) {
                        let near = (a.amax - b.amax).abs() <= 0.1 * b.amax && a.count == b.count;
                        assert!(near, "{case}: {a:?} for {b:?}");
                    }
                }
            }
        }
    });
}

/// Logits and outputs in E4M3.
fn head_dimensions_take_e4m3_logits_and_outputs() {
    let gpus = both();
    shapes().into_par_iter().for_each(|(seed, shape)| {
        let causal = seed % 2 == 0;
        let call = AttentionCall { mask: Mask { causal, ..Mask::NONE }, ..AttentionCall::causal(shape) };
        let data = Data::new(&shape, 500 + seed as u64);
        let plan = data.plan(&call, 0.33);
        let want = exact(&call, &data.inputs(), &plan);
        for gpu in &gpus {
            for (logits, output) in
                [(LogitCast::E4m3, Cast::F32), (LogitCast::Counted, Cast::E4m3), (LogitCast::E4m3, Cast::E4m3)]
            {
                let [cpu, ours] = [Precision::KERNEL, Precision::INFERENCE].map(|p| Precision { logits, output, ..p });
                let have = gpu.forward(&call, &data.inputs(), &plan, &ours).unwrap();
                let cpu = Cpu.forward(&call, &data.inputs(), &plan, &cpu).unwrap();
                let case = format!("{call:?}, {logits:?}, {output:?}");
                let (ours, theirs) = (distance(&have.out, &want), distance(&cpu.out, &want));
                let varies = if shape.out_elements() < 4096 { 0.35 } else { 0.15 };
                assert!((ours - theirs).abs() <= varies * theirs + BF16, "{case}: {ours:.3e}, CPU {theirs:.3e}");
                for (a, b) in have.stats.logits.iter().zip(&cpu.stats.logits) {
                    let near = a.overflow.abs_diff(b.overflow) <= 2 + b.overflow / 50 && a.count == b.count;
                    assert!(near, "{case}: {a:?} for {b:?}");
                }
            }
        }
    });
}

/// Operands in E4M3 give the bits of the cast; what lies between rows and behind them is not read.
fn head_dimensions_of_e4m3_operands() {
    let stream = stream();
    for (d_head, d_v) in DIMS.into_iter().filter(|(d, d_v)| d % 16 == 0 && d_v % 16 == 0) {
        let shape = AttentionShape { batch: 2, n_q_heads: 6, n_kv_heads: 2, len_q: 130, len_k: 201, d_head, d_v };
        let call = AttentionCall::causal(shape);
        let data = Data::new(&shape, 600);
        let descales = [0.015625, 0.03125, 0.0625];
        let inputs = [&data.q, &data.k, &data.v];
        let bytes = inputs.map(|x| bf16_bytes(x));
        let codes: Vec<Vec<u8>> = bytes
            .iter()
            .zip(descales)
            .map(|(x, descale)| {
                let value = |x: &[u8]| half::bf16::from_le_bytes([x[0], x[1]]).to_f32() / descale;
                x.chunks_exact(2).map(|x| Format::E4m3.encode(value(x), OnOverflow::Saturate)).collect()
            })
            .collect();
        let cast = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &descales);
        let given = Memory::new(&call, [&codes[0], &codes[1], &codes[2]], &descales);
        for (memory, element) in [(&cast, Element::Bf16), (&given, Element::E4m3)] {
            // NaN in every byte that the call does not write itself.
            memory.workspace.write(&vec![0x7f; memory.workspace.len()]).unwrap();
            let (tensors, workspace) = memory.tensors(&call, element);
            cuda().launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
        }
        let (cast, given) = (cast.results(), given.results());
        assert!(cast.0 == given.0 && cast.1 == given.1, "d {d_head}, d_v {d_v}");
        let out: Vec<f32> = cast.0.chunks_exact(2).map(|x| half::bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect();
        let value = |x: &[u8], descale: f32| -> Vec<f64> {
            let values: Vec<f32> = x.iter().map(|&x| Format::E4m3.decode(x) * descale).collect();
            wide(&values)
        };
        let [q, k, v] = [0, 1, 2].map(|i| value(&codes[i], descales[i]));
        let want = sigmascale::attention::reference(&call, &q, &k, &v).unwrap().out;
        let error = distance(&out, &want);
        assert!(error <= 4.5e-2, "d {d_head}, d_v {d_v}: {error:.3e}");
    }
}
