//! The fused attention against the CPU backend, and against itself.

mod accumulators;
mod backward;
mod backward_calls;
mod calls;
mod dims;
mod errors;
mod paged;
mod random;
mod small;
mod split;

use crate::device;
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use sigmascale::Descale;
use sigmascale::attention::{
    Attention, AttentionCall, AttentionShape, Cast, Cpu, Inputs, LogitCast, Mask, Precision, PvAccumulator,
    dequantised, measure, reference,
};
use sigmascale::cuda::{Buffer, Stream};
use sigmascale::device::attention::{
    Cuda, Descales, DeviceCall, Element, Keys, Rope, Tensors, View, Workspace, step_stats,
};
use sigmascale::fp8::{Format, OnOverflow};
use sigmascale::plan::{OperandDescales, ScalePlan};
use sigmascale::stats::StepStats;
use sigmascale::stats::stats_words;

tests![
    agrees_with_the_cpu,
    telemetry_is_the_cpus,
    logits_through_e4m3,
    an_e4m3_output,
    overflow_is_counted_as_on_the_cpu,
    nan_and_infinity_are_never_silent,
    scales_that_are_none_give_nan,
    a_scale_that_underflows_gives_equal_weights,
    counts_stay_at_their_largest,
    strides_and_descales_of_a_batch,
    operands_that_are_e4m3_already,
    rope_is_rotation_then_cast,
    calls_repeat_bit_for_bit_also_from_a_graph,
    a_workspace_of_any_content_gives_the_same_bits,
    needles_and_sinks,
    ;
    accumulators, backward, backward_calls, calls, dims, errors, paged, random, small, split
];

/// (batch, query heads, KV heads, queries, keys)
const SHAPES: [(usize, usize, usize, usize, usize); 10] = [
    (2, 4, 2, 113, 203),
    (1, 6, 2, 799, 3),
    (1, 3, 3, 1023, 1024),
    (1, 4, 4, 1, 8192),
    (2, 8, 1, 65, 129),
    (1, 5, 1, 64, 64),
    (3, 6, 6, 64, 257),
    (1, 2, 2, 300, 77),
    (1, 2, 1, 2, 5000),
    (1, 8, 2, 16, 3000),
];

fn cases() -> impl Iterator<Item = AttentionCall<'static>> {
    SHAPES.into_iter().flat_map(|(batch, n_q_heads, n_kv_heads, len_q, len_k)| {
        [64, 128].into_iter().flat_map(move |d_head| {
            let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v: d_head };
            [true, false]
                .map(|causal| AttentionCall { mask: Mask { causal, ..Mask::NONE }, ..AttentionCall::causal(shape) })
        })
    })
}

/// Random operands; each head has its own magnitude, so that a wrong head's descale shows.
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Data {
    fn new(shape: &AttentionShape, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut draw = |n: usize, heads: usize, d: usize, spread: f32| -> Vec<f32> {
            let size = |i: usize| 0.75 + spread * ((i / d) % heads) as f32;
            (0..n).map(|i| size(i) * Distribution::<f32>::sample(&StandardNormal, &mut rng)).collect()
        };
        Self {
            q: draw(shape.q_elements(), shape.n_q_heads, shape.d_head, 0.1),
            k: draw(shape.k_elements(), shape.n_kv_heads, shape.d_head, 0.2),
            v: draw(shape.v_elements(), shape.n_kv_heads, shape.d_v, 3.0),
        }
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs { q: &self.q, k: &self.k, v: &self.v }
    }

    /// A plan that covers each head's amax; `reach` of the logits' (less than 1: they overflow).
    fn plan(&self, call: &AttentionCall, reach: f32) -> ScalePlan {
        let stats = measure(call, &self.inputs()).unwrap();
        let group = call.shape.n_q_heads / call.shape.n_kv_heads;
        let cover = |amax: f32| Descale::covering(f64::from(amax) * 1.01, 448.0).unwrap();
        let v: Vec<Descale> = stats.v.iter().map(|s| cover(s.amax)).collect();
        ScalePlan {
            layer: 0,
            logit_bound: None,
            logit_descale: stats.logits.iter().map(|s| cover(s.amax() * reach)).collect(),
            operands: OperandDescales {
                q: stats.q.chunks(group).map(|g| cover(g.iter().fold(0.0, |a, s| a.max(s.amax)))).collect(),
                k: stats.k.iter().map(|s| cover(s.amax)).collect(),
                o: Some(v.iter().map(|v| Descale::new(2.0 * v.get()).unwrap()).collect()),
                v: Some(v),
            },
        }
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Root of the mean square of the difference over that of `want`.
fn distance(have: &[f32], want: &[f64]) -> f64 {
    let error: f64 = have.iter().zip(want).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
    let size: f64 = want.iter().map(|b| b * b).sum();
    if error == 0.0 { 0.0 } else { (error / size).sqrt() }
}

fn exact(call: &AttentionCall, inputs: &Inputs<'_>, plan: &ScalePlan) -> Vec<f64> {
    let x = dequantised(call, inputs, plan, OnOverflow::Saturate).unwrap();
    reference(call, &wide(&x.q), &wide(&x.k), &wide(&x.v)).unwrap().out
}

fn cuda() -> Cuda {
    Cuda::new(device()).unwrap()
}

/// Calls with few rows split, and whole as others are.
fn both() -> [Cuda; 2] {
    [true, false].map(|split| cuda().with_split(split))
}

/// BF16 keeps 8 bits: a relative rounding error of 2^-9 at most, 2^-9 / sqrt(3) in the mean square.
const BF16: f64 = 1.2e-3;

const PRECISIONS: [Precision; 3] = [Precision::INFERENCE, Precision::TRAINING, Precision::PROMOTE_2048];

fn agrees_with_the_cpu() {
    let gpus = both();
    for (seed, call) in cases().enumerate() {
        let data = Data::new(&call.shape, seed as u64);
        let plan = data.plan(&call, 1.0);
        let cpu = Cpu.forward(&call, &data.inputs(), &plan, &Precision::KERNEL).unwrap();
        let want = exact(&call, &data.inputs(), &plan);
        for (gpu, precision) in gpus.iter().flat_map(|gpu| PRECISIONS.map(|precision| (gpu, precision))) {
            let have = gpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
            let (ours, theirs) = (distance(&have.out, &want), distance(&cpu.out, &want));
            // A row of one key has no error from P; what is left is BF16, and with P in F16 that of the logits.
            let allowed =
                if precision == Precision::TRAINING { 0.2 * theirs + 1.5 * BF16 } else { 1.15 * theirs + BF16 };
            assert!(ours <= allowed, "{call:?}, {}: {ours:.3e}, CPU {theirs:.3e}", precision.pv_accumulator);
            for (at, (a, b)) in have.lse.iter().zip(&cpu.lse).enumerate() {
                assert!(a == b || (a - b).abs() <= 4e-3, "{call:?}: lse {at} {a} for {b}");
            }
        }
    }
}

/// Largest |logit| error of the tensor core's FP8 accumulator, as a share of sum |q k|: measured up to 3e-4.
fn logit_error(call: &AttentionCall, data: &Data) -> f32 {
    // sum |q k| is at most its Cauchy-Schwarz bound; Gaussian rows have 2/pi of it.
    let norm = |x: &[f32]| {
        x.chunks(call.shape.d_head).map(|r| r.iter().map(|x| x * x).sum::<f32>()).fold(0.0, f32::max).sqrt()
    };
    3e-4 * call.softmax_scale as f32 * norm(&data.q) * norm(&data.k)
}

fn telemetry_is_the_cpus() {
    for (seed, (call, gpu)) in cases().flat_map(|call| both().map(|gpu| (call, gpu))).enumerate() {
        let data = Data::new(&call.shape, 100 + seed as u64);
        // The casts of q and k move logits by a few percent.
        let plan = data.plan(&call, 1.3);
        let have = gpu.forward(&call, &data.inputs(), &plan, &Precision::INFERENCE).unwrap().stats;
        let want = Cpu.forward(&call, &data.inputs(), &plan, &Precision::KERNEL).unwrap().stats;
        same_casts(&have, &want);
        let error = logit_error(&call, &data);
        for (a, b) in have.logits.iter().zip(&want.logits) {
            assert_eq!((a.count, a.overflow, a.non_finite), (b.count, b.overflow, b.non_finite), "{call:?}");
            for (a, b) in [(a.max, b.max), (a.min, b.min)] {
                assert!(a == b || (a - b).abs() <= error, "{call:?}: {a} for {b}, error at most {error}");
            }
        }
        for (a, b) in have.o.iter().zip(&want.o) {
            assert!((a.amax - b.amax).abs() <= 0.1 * b.amax && a.count == b.count, "{call:?}: {a:?} for {b:?}");
        }
    }
}

/// Casts of q, k and v must have the same counts, and the same maxima bit for bit.
fn same_casts(have: &StepStats, want: &StepStats) {
    for (name, a, b) in [("q", &have.q, &want.q), ("k", &have.k, &want.k), ("v", &have.v, &want.v)] {
        assert_eq!(format!("{a:?}"), format!("{b:?}"), "{name}");
    }
}

fn logits_through_e4m3() {
    let [precision, on_gpu] =
        [Precision::KERNEL, Precision::INFERENCE].map(|precision| Precision { logits: LogitCast::E4m3, ..precision });
    for (seed, (call, gpu)) in cases().flat_map(|call| both().map(|gpu| (call, gpu))).enumerate() {
        let data = Data::new(&call.shape, 200 + seed as u64);
        // A third of the largest logit fits: many overflow.
        let plan = data.plan(&call, 0.33);
        let have = gpu.forward(&call, &data.inputs(), &plan, &on_gpu).unwrap();
        let want = Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
        // Logits at the edge of two E4M3 values fall to either side.
        let apart = distance(&have.out, &wide(&want.out));
        assert!(apart <= 8e-2, "{call:?}: {apart:.3e}");
        let exact = exact(&call, &data.inputs(), &plan);
        let (ours, theirs) = (distance(&have.out, &exact), distance(&want.out, &exact));
        assert!((ours - theirs).abs() <= 0.15 * theirs + BF16, "{call:?}: {ours:.3e} from exact, CPU {theirs:.3e}");
        for (head, (a, b)) in have.stats.logits.iter().zip(&want.stats.logits).enumerate() {
            // Values within the accumulator's error of a threshold may fall to either side.
            let near = |a: u64, b: u64| a.abs_diff(b) <= 2 + b / 50;
            let agree =
                near(a.overflow, b.overflow) && near(a.beyond_rounding, b.beyond_rounding) && a.count == b.count;
            assert!(agree, "{call:?}: head {head}: {a:?} for {b:?}");
        }
    }
}

fn an_e4m3_output() {
    let [precision, on_gpu] =
        [Precision::KERNEL, Precision::INFERENCE].map(|precision| Precision { output: Cast::E4m3, ..precision });
    for (seed, (call, gpu)) in cases().flat_map(|call| both().map(|gpu| (call, gpu))).enumerate() {
        let (mut ours, mut theirs, mut want) = (vec![], vec![], vec![]);
        // A single query has 256 elements, whose mean square varies by some percent: more than one draw of those.
        for draw in 0..4096_usize.div_ceil(call.shape.out_elements()) {
            let data = Data::new(&call.shape, 300 + seed as u64 + 1000 * draw as u64);
            let plan = data.plan(&call, 1.0);
            let have = gpu.forward(&call, &data.inputs(), &plan, &on_gpu).unwrap();
            for (at, x) in have.out.iter().enumerate() {
                let row = &plan.operands.o.as_ref().unwrap();
                let descale = row[call.shape.kv_head(at / call.shape.d_head % call.shape.n_q_heads)].get();
                let units = x / descale;
                assert_eq!(
                    Format::E4m3.round(units, OnOverflow::Saturate) * descale,
                    *x,
                    "{call:?}: not an E4M3 value"
                );
            }
            ours.extend(have.out);
            theirs.extend(Cpu.forward(&call, &data.inputs(), &plan, &precision).unwrap().out);
            want.extend(exact(&call, &data.inputs(), &plan));
        }
        let (ours, theirs) = (distance(&ours, &want), distance(&theirs, &want));
        assert!(ours <= 1.15 * theirs + BF16, "{call:?}: {ours:.3e}, CPU {theirs:.3e}");
    }
}

fn overflow_is_counted_as_on_the_cpu() {
    let shape = AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 90, len_k: 150, d_head: 128, d_v: 128 };
    let call = AttentionCall::causal(shape);
    let data = Data::new(&shape, 7);
    let mut plan = data.plan(&call, 0.5);
    let shrink = |row: &mut Vec<Descale>| row.iter_mut().for_each(|d| *d = Descale::new(d.get() * 0.6).unwrap());
    shrink(&mut plan.operands.q);
    shrink(&mut plan.operands.k);
    plan.operands.v.as_mut().map(shrink).unwrap();
    plan.operands.o =
        Some(plan.operands.v.as_ref().unwrap().iter().map(|d| Descale::new(d.get() * 0.3).unwrap()).collect());
    let have = cuda().forward(&call, &data.inputs(), &plan, &Precision::INFERENCE).unwrap().stats;
    let want = Cpu.forward(&call, &data.inputs(), &plan, &Precision::KERNEL).unwrap().stats;
    assert!(want.q[0].overflow > 0 && want.v[1].beyond_rounding > 0 && want.logits[0].overflow > 0, "{want:?}");
    assert!(want.o.iter().any(|o| o.overflow > 0), "{want:?}");
    same_casts(&have, &want);
    for (a, b) in have.logits.iter().zip(&want.logits) {
        assert!(a.overflow.abs_diff(b.overflow) <= 2 + b.overflow / 50, "{a:?} for {b:?}");
        assert!(a.beyond_rounding.abs_diff(b.beyond_rounding) <= 2 + b.beyond_rounding / 50, "{a:?} for {b:?}");
    }
    for (a, b) in have.o.iter().zip(&want.o) {
        assert!(a.overflow.abs_diff(b.overflow) <= 4 + b.overflow / 20, "{a:?} for {b:?}");
    }
}

fn nan_and_infinity_are_never_silent() {
    let shape = AttentionShape { batch: 1, n_q_heads: 2, n_kv_heads: 1, len_q: 70, len_k: 70, d_head: 64, d_v: 64 };
    let call = AttentionCall::causal(shape);
    let mut data = Data::new(&shape, 8);
    let plan = data.plan(&call, 1.0);
    let row = 20;
    data.q[(row * 2 + 1) * 64 + 5] = f32::NAN;
    data.k[40 * 64 + 3] = f32::INFINITY;
    data.v[60 * 64 + 9] = f32::NAN;
    let have = cuda().forward(&call, &data.inputs(), &plan, &Precision::INFERENCE).unwrap();
    let want = Cpu.forward(&call, &data.inputs(), &plan, &Precision::KERNEL).unwrap();
    same_casts(&have.stats, &want.stats);
    assert!(have.stats.q[1].amax.is_nan() && have.stats.k[0].amax == f32::INFINITY);
    let line = |x: &[f32], row: usize, head: usize| x[(row * 2 + head) * 64..][..64].to_vec();
    for row in 0..70 {
        for head in 0..2 {
            let (a, b) = (line(&have.out, row, head), line(&want.out, row, head));
            // Where the CPU has NaN, so has the GPU; it may have more (a tile's rows share a NaN in v).
            assert!(a.iter().zip(&b).all(|(a, b)| a.is_nan() || !b.is_nan()), "row {row} head {head}");
            assert!(
                row >= 60 || (row == 20 && head == 1) || a[..9].iter().all(|x| x.is_finite()),
                "row {row} head {head}"
            );
        }
    }
    assert!(line(&have.out, row, 1).iter().all(|x| x.is_nan()));
    let nan = |lse: &[f32]| lse.iter().map(|x| x.is_nan()).collect::<Vec<_>>();
    assert!(have.lse[70 + row].is_nan() && nan(&have.lse) == nan(&want.lse), "log-sum-exps of {:?}", have.lse);

    // One query in parts: NaN of one of them is the row's.
    let shape = AttentionShape { batch: 1, n_q_heads: 8, n_kv_heads: 2, len_q: 1, len_k: 3000, d_head: 128, d_v: 128 };
    let call = AttentionCall::causal(shape);
    let mut data = Data::new(&shape, 9);
    let plan = data.plan(&call, 1.0);
    data.k[1700 * 2 * 128 + 128] = f32::NAN;
    let have = cuda().forward(&call, &data.inputs(), &plan, &Precision::INFERENCE).unwrap();
    for head in 0..8 {
        let out = &have.out[head * 128..][..128];
        assert!(out.iter().all(|x| x.is_nan() == (head >= 4)) && have.lse[head].is_nan() == (head >= 4), "head {head}");
    }
}

/// Scales that are none give no values.
fn scales_that_are_none_give_nan() {
    let (gpu, stream) = (cuda(), stream());
    for (len_q, len_k) in [(70, 70), (1, 3000)] {
        let shape = AttentionShape { batch: 1, n_q_heads: 4, n_kv_heads: 1, len_q, len_k, d_head: 64, d_v: 64 };
        let call = AttentionCall::causal(shape);
        let data = Data::new(&shape, 10);
        let bytes = [bf16_bytes(&data.q), bf16_bytes(&data.k), bf16_bytes(&data.v)];
        for scale in [-1.0, f32::NAN, f32::INFINITY, 1e35] {
            for which in 0..2 {
                let mut descales = [0.05; 3];
                descales[which] = scale;
                let memory = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &descales);
                let (tensors, workspace) = memory.tensors(&call, Element::Bf16);
                gpu.launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
                stream.synchronize().unwrap();
                let (out, ..) = memory.results();
                let none = out.chunks_exact(2).all(|x| bf16::from_le_bytes([x[0], x[1]]).is_nan());
                assert!(none, "{len_q} queries, descale {scale} of operand {which}");
            }
        }
    }
}

/// Descales of q and k whose product is zero in f32: every logit is zero, and a masked one is no key all the same.
fn a_scale_that_underflows_gives_equal_weights() {
    let (gpu, stream) = (cuda(), stream());
    for (d_head, len_q, len_k) in [(64, 70, 70), (128, 200, 333), (128, 1, 3000)] {
        let shape = AttentionShape { batch: 1, n_q_heads: 4, n_kv_heads: 1, len_q, len_k, d_head, d_v: d_head };
        let call = AttentionCall::causal(shape);
        let mut rng = StdRng::seed_from_u64(20);
        let mut codes = |n: usize| -> Vec<u8> {
            let encode = |x: f32| Format::E4m3.encode(x, OnOverflow::Saturate);
            (0..n).map(|_| encode(StandardNormal.sample(&mut rng))).collect()
        };
        let codes = [codes(shape.q_elements()), codes(shape.k_elements()), codes(shape.v_elements())];
        let memory = Memory::new(&call, [&codes[0], &codes[1], &codes[2]], &[1e-30, 1e-30, 0.5]);
        let (tensors, workspace) = memory.tensors(&call, Element::E4m3);
        gpu.launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
        stream.synchronize().unwrap();
        let (out, lse, _) = memory.results();
        let out: Vec<f32> = out.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect();
        let mut sums = vec![0.0f64; d_head];
        let mut keys = 0;
        for row in 0..len_q {
            while keys < row + 1 + len_k - len_q {
                let v = &codes[2][keys * d_head..][..d_head];
                sums.iter_mut().zip(v).for_each(|(sum, &v)| *sum += 0.5 * f64::from(Format::E4m3.decode(v)));
                keys += 1;
            }
            for head in 0..4 {
                let have = &out[(row * 4 + head) * d_head..][..d_head];
                for (x, sum) in have.iter().zip(&sums) {
                    let want = sum / keys as f64;
                    let error = (f64::from(*x) - want).abs();
                    assert!(error <= 0.02 + 0.01 * want.abs(), "{shape:?} row {row}: {x} for {want}");
                }
                let have = f32::from_bits(lse[head * len_q + row]);
                assert!((f64::from(have) - (keys as f64).ln()).abs() < 1e-3, "{shape:?} row {row}: {have}");
            }
        }
    }
}

/// Counts near the end of their words, as after many calls: they reach it and stay.
fn counts_stay_at_their_largest() {
    let (gpu, stream) = (cuda(), stream());
    for (d_head, len_q, len_k) in [(64, 130, 201), (128, 130, 201), (128, 1, 3000)] {
        let shape = AttentionShape { batch: 1, n_q_heads: 4, n_kv_heads: 2, len_q, len_k, d_head, d_v: d_head };
        let call = AttentionCall::causal(shape);
        let mut data = Data::new(&shape, 21);
        data.v[5] = f32::INFINITY;
        let bytes = [bf16_bytes(&data.q), bf16_bytes(&data.k), bf16_bytes(&data.v)];
        // Most values of q, k and v pass 464 of these, most logits 448 of the other.
        let memory = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &[1e-4; 3]);
        let logit = device().upload(&[1e-7f32; 4]).unwrap();
        let (mut tensors, workspace) = memory.tensors(&call, Element::Bf16);
        // SAFETY: the descales outlive the work.
        tensors.descales.logit = Some(unsafe { logit.view(Element::F32, [4]).unwrap() });
        gpu.launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
        let counted = memory.results().2;
        // Words of counts that the call raises: the fourth of logits; the second and third of casts, the fourth where not finite.
        let counts: Vec<usize> = (0..counted.len())
            .filter(|&i| if i < 16 { i % 4 == 3 } else { i % 4 != 0 })
            .filter(|&i| counted[i] > 1 || (i >= 16 && i % 4 == 3 && counted[i] == 1))
            .collect();
        assert!(counts.len() > 4 + 2 * 8, "{counted:?}");
        let mut near = counted.clone();
        counts.iter().for_each(|&i| near[i] = u32::MAX - counted[i] + 1);
        for _ in 0..3 {
            memory.stats.write(&near).unwrap();
            gpu.launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
            near = memory.results().2;
            assert!(counts.iter().all(|&i| near[i] == u32::MAX), "{shape:?}: {near:?}");
        }
    }
}

/// A call without lists.
fn on_device(call: &AttentionCall) -> DeviceCall {
    call.on_device(None, None, None).unwrap()
}

/// Keys and values of a call on rows.
fn keys(tensors: &Tensors) -> [View<4>; 2] {
    let Keys::Rows { k, v } = tensors.keys else { unreachable!("as it is made") };
    [k, v]
}

/// Device memory of one call.
struct Memory {
    inputs: [Buffer<u8>; 3],
    out: Buffer<u8>,
    lse: Buffer<f32>,
    stats: Buffer<u32>,
    workspace: Buffer<u8>,
    descales: Buffer<f32>,
}

impl Memory {
    fn new(call: &AttentionCall, inputs: [&[u8]; 3], descales: &[f32]) -> Self {
        let (shape, device) = (&call.shape, device());
        Self {
            inputs: inputs.map(|x| device.upload(x).unwrap()),
            out: device.upload(&vec![0xffu8; 2 * shape.out_elements()]).unwrap(),
            lse: device.upload(&vec![f32::NAN; shape.lse_elements()]).unwrap(),
            stats: device.zeros(stats_words(shape.n_q_heads, shape.n_kv_heads)).unwrap(),
            // F16 needs the most.
            workspace: scratch(Workspace::of(&on_device(call), Element::Bf16, PvAccumulator::F16, false).bytes),
            descales: device.upload(descales).unwrap(),
        }
    }

    /// Dense tensors over it; one descale for each of (q, k, v), shared by all heads where the buffer has only three.
    fn tensors(&self, call: &AttentionCall, element: Element) -> (Tensors, View<1>) {
        let AttentionShape { batch, n_q_heads, n_kv_heads, len_q, .. } = call.shape;
        let per_head = self.descales.len() > 3;
        // SAFETY: the caller keeps the memory until the work has run.
        unsafe {
            let row = |i: usize| {
                let (at, strides) =
                    if per_head { (i * batch * n_kv_heads, [n_kv_heads as i64, 1]) } else { (i, [0, 0]) };
                Some(View::new(self.descales.at(at), Element::F32, [batch, n_kv_heads], strides))
            };
            let tensors = Tensors {
                q: self.inputs[0].view(element, call.shape.q_shape()).unwrap(),
                keys: Keys::Rows {
                    k: self.inputs[1].view(element, call.shape.k_shape()).unwrap(),
                    v: self.inputs[2].view(element, call.shape.v_shape()).unwrap(),
                },
                descales: Descales { q: row(0), k: row(1), v: row(2), o: None, logit: None },
                rope: None,
                accumulator: PvAccumulator::default(),
                saved: None,
                out: self.out.view(Element::Bf16, call.shape.out_shape()).unwrap(),
                lse: Some(self.lse.view(Element::F32, [batch, n_q_heads, len_q]).unwrap()),
                stats: Some(self.stats.view(Element::U32, [self.stats.len()]).unwrap()),
            };
            (tensors, self.workspace.view(Element::U8, [self.workspace.len()]).unwrap())
        }
    }

    /// Output bytes, LSE bits, telemetry.
    fn results(&self) -> (Vec<u8>, Vec<u32>, Vec<u32>) {
        let lse = self.lse.read().unwrap().into_iter().map(f32::to_bits).collect();
        (self.out.read().unwrap(), lse, self.stats.read().unwrap())
    }
}

fn bf16_bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
}

/// Scratch of a call. Poisoned, so that what is read before it is written shows as NaN; `SIGMASCALE_TEST_UNWRITTEN` leaves that
/// to initcheck of compute-sanitizer, for which memory that was copied to or cleared is written.
fn scratch(bytes: usize) -> Buffer<u8> {
    match std::env::var_os("SIGMASCALE_TEST_UNWRITTEN") {
        Some(_) => device().allocate(bytes).unwrap(),
        None => device().upload(&vec![0xffu8; bytes]).unwrap(),
    }
}

fn stream() -> Stream {
    device().stream().unwrap()
}

fn small_call(d_head: usize) -> AttentionCall<'static> {
    AttentionCall::causal(AttentionShape {
        batch: 2,
        n_q_heads: 6,
        n_kv_heads: 2,
        len_q: 130,
        len_k: 201,
        d_head,
        d_v: d_head,
    })
}

fn strides_and_descales_of_a_batch() {
    let gpu = cuda();
    for d in [64, 128, 72, 192, 256] {
        let call = small_call(d);
        let AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, .. } = call.shape;
        let data = Data::new(&call.shape, 9);
        let bytes = [bf16_bytes(&data.q), bf16_bytes(&data.k), bf16_bytes(&data.v)];
        // Another descale for every sequence and head.
        let descales: Vec<f32> = (0..3 * batch * n_kv_heads).map(|i| 0.02 + 0.003 * i as f32).collect();
        let plain = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &descales);
        let (tensors, workspace) = plain.tensors(&call, Element::Bf16);
        gpu.launch(&stream(), &on_device(&call), &tensors, &workspace).unwrap();
        let want = plain.results();
        assert!(
            want.0.chunks_exact(2).all(|b| b != [0xff, 0xff]) && want.1.iter().all(|&b| !f32::from_bits(b).is_nan())
        );

        // The same in memory with heads before positions, and k and v between each other.
        let row = d * 2;
        let mut q = vec![0u8; bytes[0].len()];
        let mut kv = vec![0u8; 2 * bytes[1].len()];
        for b in 0..batch {
            for (len, heads, which) in [(len_q, n_q_heads, 0), (len_k, n_kv_heads, 1), (len_k, n_kv_heads, 2)] {
                for (i, h) in (0..len).flat_map(|i| (0..heads).map(move |h| (i, h))) {
                    let from = &bytes[which][((b * len + i) * heads + h) * row..][..row];
                    match which {
                        0 => q[((b * heads + h) * len + i) * row..][..row].copy_from_slice(from),
                        _ => kv[((((b * heads + h) * len) + i) * 2 + which - 1) * row..][..row].copy_from_slice(from),
                    }
                }
            }
        }
        let other = Memory::new(&call, [&q, &kv, &bytes[2]], &descales);
        let (mut t, workspace) = other.tensors(&call, Element::Bf16);
        let (d64, len_q64, len_k64) = (d as i64, len_q as i64, len_k as i64);
        let (hq, hkv) = (n_q_heads as i64, n_kv_heads as i64);
        // SAFETY: the elements lie in the buffers filled above.
        unsafe {
            let q = [hq * len_q64 * d64, d64, len_q64 * d64, 1];
            t.q = View::new(t.q.ptr(), Element::Bf16, t.q.extents(), q);
            let kv = [2 * hkv * len_k64 * d64, 2 * d64, 2 * len_k64 * d64, 1];
            let (base, extents) = (other.inputs[1].ptr(), call.shape.k_shape());
            let k = View::new(base, Element::Bf16, extents, kv);
            t.keys = Keys::Rows { k, v: View::new(base.offset(row as u64), Element::Bf16, extents, kv) };
        }
        gpu.launch(&stream(), &on_device(&call), &t, &workspace).unwrap();
        assert!(other.results() == want, "d {d}: strided operands differ from dense ones");

        // One descale for all by strides of 0.
        let one = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &[0.02, 0.03, 0.04]);
        let row: Vec<f32> = [0.02, 0.03, 0.04].iter().flat_map(|&x| vec![x; batch * n_kv_heads]).collect();
        let all = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &row);
        for memory in [&one, &all] {
            let (tensors, workspace) = memory.tensors(&call, Element::Bf16);
            gpu.launch(&stream(), &on_device(&call), &tensors, &workspace).unwrap();
        }
        assert!(one.results() == all.results(), "d {d}: broadcast descales");
    }
}

fn operands_that_are_e4m3_already() {
    let gpu = cuda();
    for d in [64, 128] {
        let call = small_call(d);
        let data = Data::new(&call.shape, 10);
        // BF16 values, so that both paths cast the same numbers.
        let rounded = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect::<Vec<_>>();
        let descales = [0.015625, 0.03125, 0.0625];
        let values = [rounded(&data.q), rounded(&data.k), rounded(&data.v)];
        let codes: Vec<Vec<u8>> = values
            .iter()
            .zip(descales)
            .map(|(x, d)| x.iter().map(|x| Format::E4m3.encode(x / d, OnOverflow::Saturate)).collect())
            .collect();
        let bytes: Vec<Vec<u8>> = values.iter().map(|x| bf16_bytes(x)).collect();
        let cast = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &descales);
        let given = Memory::new(&call, [&codes[0], &codes[1], &codes[2]], &descales);
        for (memory, element) in [(&cast, Element::Bf16), (&given, Element::E4m3)] {
            let (tensors, workspace) = memory.tensors(&call, element);
            gpu.launch(&stream(), &on_device(&call), &tensors, &workspace).unwrap();
        }
        let (cast, given) = (cast.results(), given.results());
        assert!(cast.0 == given.0 && cast.1 == given.1, "d {d}");
        let logits = 4 * call.shape.n_q_heads;
        assert_eq!(cast.2[..logits], given.2[..logits], "d {d}");
        assert!(given.2[logits..].iter().all(|&w| w == 0), "nothing was cast");
    }
}

fn rope_is_rotation_then_cast() {
    for (d, rotary, interleaved, indexed) in [
        (128, 128, false, false),
        (128, 64, true, true),
        (64, 64, true, false),
        (64, 32, false, true),
        (72, 72, false, true),
        (40, 24, true, false),
        (96, 96, false, false),
        (192, 64, true, true),
        (256, 256, false, false),
    ] {
        rope_of(d, rotary, interleaved, indexed);
    }
}

/// Rotation in the cast beside rotation before it.
fn rope_of(d: usize, rotary: usize, interleaved: bool, indexed: bool) {
    let gpu = cuda();
    let call = small_call(d);
    let AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, .. } = call.shape;
    let data = Data::new(&call.shape, 11);
    let mut rng = StdRng::seed_from_u64(12);
    let rows = 400;
    let positions: Vec<i32> = (0..batch * len_k)
        .map(|i| if indexed { rng.random_range(0..rows as i32) } else { (i % len_k) as i32 })
        .collect();
    let angle = |row: usize, pair: usize| row as f64 * 10_000f64.powf(-2.0 * pair as f64 / rotary as f64);
    let table = |f: fn(f64) -> f64| -> Vec<f32> {
        (0..rows * rotary / 2).map(|i| f(angle(i / (rotary / 2), i % (rotary / 2))) as f32).collect()
    };
    let (cosine, sine) = (table(f64::cos), table(f64::sin));
    // Rotated here, in f32, from BF16 values.
    let rotated = |x: &[f32], len: usize, heads: usize| {
        let mut x: Vec<f32> = x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        for (at, row) in x.chunks_exact_mut(d).enumerate() {
            let (b, i) = (at / heads / len, at / heads % len);
            let place = positions[b * len_k + i + len_k - len] as usize * rotary / 2;
            for pair in 0..rotary / 2 {
                let (a, b) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + rotary / 2) };
                let (c, s, x, y) = (cosine[place + pair], sine[place + pair], row[a], row[b]);
                (row[a], row[b]) = (x * c - y * s, y * c + x * s);
            }
        }
        x
    };
    let f32_bytes = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let v: Vec<f32> = data.v.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    let turned = [rotated(&data.q, len_q, n_q_heads), rotated(&data.k, len_k, n_kv_heads), v];
    let descales = [0.02, 0.03, 0.04];
    let plain = [bf16_bytes(&data.q), bf16_bytes(&data.k), bf16_bytes(&data.v)];
    let want = turned.map(|x| f32_bytes(&x));
    let fused = Memory::new(&call, [&plain[0], &plain[1], &plain[2]], &descales);
    let apart = Memory::new(&call, [&want[0], &want[1], &want[2]], &descales);
    let device = device();
    let tables = [device.upload(&cosine).unwrap(), device.upload(&sine).unwrap()];
    let places = device.upload(&positions).unwrap();
    let (mut tensors, workspace) = fused.tensors(&call, Element::Bf16);
    // SAFETY: all lives until `results` has waited.
    unsafe {
        tensors.rope = Some(Rope {
            cosine: tables[0].view(Element::F32, [rows, rotary / 2]).unwrap(),
            sine: tables[1].view(Element::F32, [rows, rotary / 2]).unwrap(),
            positions: indexed.then(|| places.view(Element::I32, [batch, len_k]).unwrap()),
            interleaved,
        });
    }
    gpu.launch(&stream(), &on_device(&call), &tensors, &workspace).unwrap();
    let (tensors, workspace) = apart.tensors(&call, Element::F32);
    gpu.launch(&stream(), &on_device(&call), &tensors, &workspace).unwrap();
    let values =
        |bytes: &[u8]| bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect::<Vec<f32>>();
    let (a, b) = (fused.results(), apart.results());
    // The fused multiply-add may move a value at the edge of two E4M3 values.
    let error = distance(&values(&a.0), &wide(&values(&b.0)));
    assert!(error <= 5e-3, "d {d} rotary {rotary} interleaved {interleaved}: {error:.3e}");
    for (x, y) in a.2.chunks_exact(4).zip(b.2.chunks_exact(4)).skip(n_q_heads) {
        let (x, y) = (f32::from_bits(x[0]), f32::from_bits(y[0]));
        assert!((x - y).abs() <= 1e-6 * y, "amax {x} for {y}");
    }
}

fn calls_repeat_bit_for_bit_also_from_a_graph() {
    let gpu = cuda();
    // More tiles than multiprocessors, so that every block takes several; and few rows of many keys, which are split.
    for (d, n_q_heads, len_q, len_k) in [
        (64, 8, 1100, 1300),
        (128, 8, 1100, 1300),
        (64, 20, 3, 5000),
        (128, 20, 20, 5000),
        (72, 8, 1100, 1300),
        (256, 8, 1100, 1300),
        (256, 20, 20, 5000),
    ] {
        let shape = AttentionShape { batch: 3, n_q_heads, n_kv_heads: 4, len_q, len_k, d_head: d, d_v: d };
        let call = AttentionCall::causal(shape);
        let data = Data::new(&shape, 13);
        let bytes = [bf16_bytes(&data.q), bf16_bytes(&data.k), bf16_bytes(&data.v)];
        let memory = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &[0.02, 0.03, 0.04]);
        let (tensors, workspace) = memory.tensors(&call, Element::Bf16);
        let stream = stream();
        gpu.prepare(&on_device(&call), &tensors).unwrap();
        gpu.launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
        let first = memory.results();
        let poison = |stream: &Stream| {
            memory.stats.clear(stream).unwrap();
            memory.out.clear(stream).unwrap();
            memory.lse.clear(stream).unwrap();
        };
        for _ in 0..10 {
            poison(&stream);
            gpu.launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
            assert!(memory.results() == first, "d {d}");
            assert!(memory.workspace.read().unwrap()[..Workspace::HEADER].iter().all(|&b| b == 0), "d {d}: the header");
        }
        // Which block takes which tiles, and after which others, changes nothing.
        for processors in [1, 7] {
            poison(&stream);
            cuda().with_processors(processors).launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
            assert!(memory.results() == first, "d {d}: {processors} multiprocessors");
        }
        let graph = stream.capture(|stream| gpu.launch(stream, &on_device(&call), &tensors, &workspace)).unwrap();
        poison(&stream);
        graph.launch().unwrap();
        assert!(memory.results() == first, "d {d}: from a graph");
        // Telemetry adds up over calls: maxima stay, sums double.
        graph.launch().unwrap();
        let twice = step_stats(&call, &memory.results().2, 2).unwrap();
        let once = step_stats(&call, &first.2, 1).unwrap();
        assert_eq!((twice.logits[0].max, twice.q[3].amax), (once.logits[0].max, once.q[3].amax));
        assert_eq!((twice.logits[0].count, twice.k[1].overflow), (2 * once.logits[0].count, 2 * once.k[1].overflow));
    }
}

/// What a launch that was cut off left in the tile counter would skip tiles; what lies elsewhere would show as NaN.
fn a_workspace_of_any_content_gives_the_same_bits() {
    let gpu = cuda();
    for (d, n_q_heads, len_q, len_k) in
        [(64, 8, 1100, 1300), (128, 8, 1100, 1301), (128, 20, 20, 5000), (80, 8, 1100, 1301), (208, 20, 20, 5000)]
    {
        let shape = AttentionShape { batch: 3, n_q_heads, n_kv_heads: 4, len_q, len_k, d_head: d, d_v: d };
        let call = AttentionCall::causal(shape);
        let data = Data::new(&shape, 15);
        let e4m3 = |x: &[f32]| x.iter().map(|x| Format::E4m3.encode(*x, OnOverflow::Saturate)).collect::<Vec<u8>>();
        for element in [Element::Bf16, Element::E4m3] {
            let bytes =
                [&data.q, &data.k, &data.v].map(|x| if element == Element::Bf16 { bf16_bytes(x) } else { e4m3(x) });
            let memory = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &[0.02, 0.03, 0.04]);
            let (tensors, workspace) = memory.tensors(&call, element);
            let stream = stream();
            gpu.launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
            let first = memory.results();
            memory.out.clear(&stream).unwrap();
            memory.stats.clear(&stream).unwrap();
            memory.workspace.write(&vec![0x7f; memory.workspace.len()]).unwrap();
            gpu.launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
            assert!(memory.results() == first, "d {d}, {element:?}");
        }
    }
}

/// One key among 64k that takes all the weight, and one that takes most of it everywhere.
fn needles_and_sinks() {
    let gpu = cuda();
    let shape =
        AttentionShape { batch: 1, n_q_heads: 2, n_kv_heads: 1, len_q: 32, len_k: 65_536, d_head: 128, d_v: 128 };
    let call = AttentionCall { mask: Mask::NONE, ..AttentionCall::causal(shape) };
    let mut rng = StdRng::seed_from_u64(14);
    let mut draw = |n: usize| -> Vec<f32> { (0..n).map(|_| StandardNormal.sample(&mut rng)).collect() };
    let (q, v) = (draw(shape.q_elements()), draw(shape.v_elements()));
    let mut k = draw(shape.k_elements());
    // Query i of head 0 meets its needle at key 2000 i + 17.
    for i in 0..32 {
        for c in 0..128 {
            k[(2000 * i + 17) * 128 + c] = 1.5 * q[i * 256 + c];
        }
    }
    let data = Data { q, k, v };
    let plan = data.plan(&call, 1.0);
    let have = gpu.forward(&call, &data.inputs(), &plan, &Precision::INFERENCE).unwrap();
    let v8 = dequantised(&call, &data.inputs(), &plan, OnOverflow::Saturate).unwrap().v;
    let want = exact(&call, &data.inputs(), &plan);
    let error = distance(&have.out, &want);
    assert!(error <= 2.8e-2, "{error:.3e}");
    for i in 0..32 {
        let (row, needle) = (&have.out[i * 256..][..128], &v8[(2000 * i + 17) * 128..][..128]);
        let dot: f32 = row.iter().zip(needle).map(|(a, b)| a * b).sum();
        let size: f32 = needle.iter().map(|x| x * x).sum();
        assert!(dot / size > 0.5, "query {i} found {:.2} of its needle", dot / size);
    }
}
