//! Calls with few queries in parts beside the same calls in whole tiles.

use super::{Memory, cuda, distance, on_device, scratch, stream, wide};
use crate::device;
use half::bf16;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use sigmascale::attention::{AttentionCall, AttentionShape, Mask, PvAccumulator};
use sigmascale::cuda::Buffer;
use sigmascale::device::attention::{Cuda, Element, Split};
use sigmascale::fp8::{Format, OnOverflow};

tests![split_calls_are_the_whole_ones, parts_of_wide_keys_follow_each_other,];

/// (batch, query heads, KV heads, queries, keys): many parts and a single one, tiles that heads do not fill, one consumer and
/// two, queries that see no key.
const SHAPES: [(usize, usize, usize, usize, usize); 9] = [
    (1, 8, 1, 16, 6000),
    (2, 6, 2, 5, 4000),
    (1, 64, 8, 1, 8192),
    (3, 5, 1, 7, 2500),
    (2, 9, 3, 40, 3000),
    (1, 4, 2, 200, 5000),
    (17, 32, 4, 4, 500),
    (40, 16, 2, 3, 700),
    (1, 12, 2, 33, 20),
];
/// More queries than a grid has blocks but along its first dimension, of keys enough that parts pay. For `d = 128`.
const MANY_QUERIES: (usize, usize, usize, usize, usize) = (1, 1, 1, 67_600, 40_000);

fn codes(count: usize, seed: u64) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..count).map(|_| Format::E4m3.encode(StandardNormal.sample(&mut rng), OnOverflow::Saturate)).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
}

/// What differs between a call in parts and in whole tiles; how many parts it has.
fn compare(call: &AttentionCall, logits_e4m3: bool) -> (Option<String>, Option<usize>) {
    let AttentionShape { batch, n_q_heads, n_kv_heads, d_head, .. } = call.shape;
    let parts = Split::of(&call.shape, logits_e4m3).map(|split| split.parts);
    let [q, k, v] = [call.shape.q_elements(), call.shape.k_elements(), call.shape.v_elements()];
    let [q, k, v] = [codes(q, 40), codes(k, 41), codes(v, 42)];
    let descales: Vec<f32> = (0..3 * batch * n_kv_heads).map(|i| 0.6 + 0.1 * (i % 7) as f32).collect();
    // Some logits pass 448 of these.
    let logit_descales: Vec<f32> = (0..n_q_heads).map(|head| 0.004 + 0.001 * (head % 3) as f32).collect();
    let logit_descales: Buffer<f32> = device().upload(&logit_descales).unwrap();
    let run = |split: bool| {
        let memory = Memory::new(call, [&q, &k, &v], &descales);
        let (mut tensors, workspace) = memory.tensors(call, Element::E4m3);
        if logits_e4m3 {
            // SAFETY: the buffer outlives the work, which `results` waits for.
            tensors.descales.logit = Some(unsafe { logit_descales.view(Element::F32, [n_q_heads]).unwrap() });
        }
        cuda().with_split(split).launch(&stream(), &on_device(call), &tensors, &workspace).unwrap();
        memory.results()
    };
    let (have, want) = (run(true), run(false));

    let (out, expected) = (floats(&have.0), floats(&want.0));
    for (row, (a, b)) in out.chunks_exact(d_head).zip(expected.chunks_exact(d_head)).enumerate() {
        let (apart, length) = a.iter().zip(b).fold((0.0, 0.0), |(x, y), (a, b)| (x + (a - b) * (a - b), y + b * b));
        if apart.is_nan() || apart.sqrt() > 0.2 * length.sqrt() + 1e-3 {
            return (Some(format!("row {row} is off by {} of {}", apart.sqrt(), length.sqrt())), parts);
        }
    }
    let error = distance(&out, &wide(&expected));
    // Each has its own rounding of P, 2.5e-2 of the output.
    if error.is_nan() || error > 4.5e-2 {
        return (Some(format!("output off by {error:.2e}")), parts);
    }
    for (at, (a, b)) in have.1.iter().zip(&want.1).enumerate() {
        let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
        if !(a == b || (a - b).abs() <= 1e-4 + 1e-5 * b.abs()) {
            return (Some(format!("lse {at}: {a} for {b}")), parts);
        }
    }
    let heads = have.2.chunks_exact(4).zip(want.2.chunks_exact(4)).take(n_q_heads).enumerate();
    for (head, (a, b)) in heads {
        // Logits are the same products in the same order, so that extremes and counts are the same bits.
        let (amax, of) = (f32::from_bits(a[2]), f32::from_bits(b[2]));
        let near = (amax - of).abs() <= 0.1 * of;
        if (a[0], a[1], a[3]) != (b[0], b[1], b[3]) || !near {
            return (Some(format!("telemetry of head {head}: {a:x?} for {b:x?}, amax {amax} for {of}")), parts);
        }
    }
    (None, parts)
}

fn split_calls_are_the_whole_ones() {
    let (mut joined, mut single) = (0, 0);
    let plain = SHAPES.into_iter().flat_map(|shape| {
        [(64, false), (64, true), (128, false), (128, true)].map(|(d_head, logits)| (shape, d_head, logits))
    });
    for ((batch, n_q_heads, n_kv_heads, len_q, len_k), d_head, logits) in plain.chain([(MANY_QUERIES, 128, false)]) {
        for causal in [true, false] {
            let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v: d_head };
            let call = AttentionCall { mask: Mask { causal, ..Mask::NONE }, ..AttentionCall::causal(shape) };
            let (complaint, parts) = compare(&call, logits);
            assert!(complaint.is_none(), "{call:?}, E4M3 logits {logits}, {parts:?} parts: {}", complaint.unwrap());
            joined += usize::from(parts.is_some_and(|parts| parts > 1));
            single += usize::from(parts == Some(1));
        }
    }
    assert!(joined >= 30 && single >= 10, "{joined} calls joined, {single} in a single part");
}

/// Blocks that take one part after another, with room for two tiles of keys and values: a block that waited for the third would hang.
fn parts_of_wide_keys_follow_each_other() {
    for (d_head, d_v) in [(256, 128), (208, 72)] {
        let shape = AttentionShape { batch: 3, n_q_heads: 4, n_kv_heads: 2, len_q: 1, len_k: 4000, d_head, d_v };
        let call = AttentionCall::causal(shape);
        let [q, k, v] = [shape.q_elements(), shape.k_elements(), shape.v_elements()];
        let wide = |x: Vec<u8>| -> Vec<u8> {
            x.iter().flat_map(|&x| bf16::from_f32(Format::E4m3.decode(x)).to_le_bytes()).collect()
        };
        let [q, k, v] = [wide(codes(q, 50)), wide(codes(k, 51)), wide(codes(v, 52))];
        let run = |processors: usize| {
            let memory = Memory::new(&call, [&q, &k, &v], &[1.0; 3]);
            let (mut tensors, _) = memory.tensors(&call, Element::Bf16);
            tensors.accumulator = PvAccumulator::F16;
            let call = on_device(&call);
            let bytes = Cuda::workspace_bytes(&call, &tensors).unwrap();
            let scratch = scratch(bytes);
            // SAFETY: the memory outlives the work, which `results` waits for.
            let workspace = unsafe { scratch.view(Element::U8, [bytes]).unwrap() };
            cuda().with_processors(processors).launch(&stream(), &call, &tensors, &workspace).unwrap();
            memory.results()
        };
        assert!(Split::of(&shape, false).is_some_and(|split| split.parts > 1), "d_head {d_head}");
        assert!(run(1) == run(usize::MAX), "d_head {d_head}, d_v {d_v}");
    }
}
