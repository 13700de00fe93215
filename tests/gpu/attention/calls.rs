//! Windows, soft-caps, sinks and sequences of unequal length beside the CPU, and their lengths from a graph.

use super::{BF16, Data, Memory, bf16_bytes, both, cuda, distance, exact, logit_error, same_casts, scratch, stream};
use crate::device;
use sigmascale::attention::{Attention, AttentionCall, AttentionShape, Cpu, Mask, Padding, Precision, Sequence};
use sigmascale::cuda::Buffer;
use sigmascale::device::attention::{Cuda, DeviceCall, Element, Sequences};

tests![
    every_kind_of_call_agrees_with_the_cpu,
    a_graph_follows_the_lengths,
    casts_of_sequences_count_by_the_descale_of_their_entry,
];

/// A call and the lists that it borrows.
struct Owned {
    shape: AttentionShape,
    mask: Mask,
    soft_cap: Option<f64>,
    sinks: Option<Vec<f64>>,
    sequences: Option<Vec<Sequence>>,
}

impl Owned {
    fn call(&self) -> AttentionCall<'_> {
        AttentionCall {
            mask: self.mask,
            soft_cap: self.soft_cap,
            sinks: self.sinks.as_deref(),
            sequences: self.sequences.as_deref(),
            ..AttentionCall::causal(self.shape)
        }
    }
}

fn cases(d_head: usize) -> Vec<Owned> {
    let of = |batch, n_q_heads, n_kv_heads, len_q, len_k, mask| Owned {
        shape: AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v: d_head },
        mask,
        soft_cap: None,
        sinks: None,
        sequences: None,
    };
    let sinks = |heads: usize| Some((0..heads).map(|head| 2.0 * head as f64 - 3.0).collect());
    let band = Mask { causal: false, window_left: Some(50), window_right: Some(30) };
    let packed = || Sequence::packed(&[0, 1, 1, 258, 700], &[0, 300, 340, 340, 800], Some(&[1, 40, 0, 459])).unwrap();
    let padded = |call: Owned, q: &[usize], k: &[usize], side| {
        let sequences = Some(Sequence::padded(&call.shape, q, k, side).unwrap());
        Owned { sequences, ..call }
    };
    vec![
        of(2, 4, 2, 300, 700, Mask::sliding(100)),
        of(1, 6, 2, 500, 640, band),
        Owned { soft_cap: Some(4.0), ..of(1, 4, 2, 200, 333, Mask::CAUSAL) },
        Owned { sinks: sinks(8), ..of(2, 8, 2, 65, 129, Mask::CAUSAL) },
        Owned { sinks: sinks(8), ..of(1, 8, 2, 1, 5000, Mask::sliding(3000)) },
        Owned { sequences: Some(packed()), ..of(1, 4, 2, 700, 800, Mask::CAUSAL) },
        Owned { sequences: Some(packed()), ..of(1, 4, 2, 700, 800, Mask::sliding(70)) },
        padded(of(3, 8, 2, 1, 4000, Mask::CAUSAL), &[1, 1, 1], &[4000, 17, 900], Padding::Left),
        padded(of(3, 6, 2, 260, 260, Mask::CAUSAL), &[260, 0, 77], &[260, 0, 77], Padding::Right),
        padded(
            Owned { soft_cap: Some(6.0), sinks: sinks(8), ..of(3, 8, 2, 4, 3000, Mask::sliding(1500)) },
            &[4, 1, 3],
            &[3000, 2500, 2],
            Padding::Left,
        ),
        Owned { soft_cap: Some(6.0), sinks: sinks(4), sequences: Some(packed()), ..of(1, 4, 2, 700, 800, band) },
    ]
}

fn every_kind_of_call_agrees_with_the_cpu() {
    let gpus = both();
    for (seed, owned) in [64, 128].into_iter().flat_map(cases).enumerate() {
        let call = owned.call();
        let data = Data::new(&call.shape, 700 + seed as u64);
        let plan = data.plan(&call, 1.0);
        let want = exact(&call, &data.inputs(), &plan);
        let cpu = Cpu.forward(&call, &data.inputs(), &plan, &Precision::KERNEL).unwrap();
        let error = logit_error(&call, &data);
        for (gpu, precision) in
            gpus.iter().flat_map(|gpu| [Precision::INFERENCE, Precision::TRAINING].map(|p| (gpu, p)))
        {
            let have = gpu.forward(&call, &data.inputs(), &plan, &precision).unwrap();
            let (ours, theirs) = (distance(&have.out, &want), distance(&cpu.out, &want));
            let allowed =
                if precision == Precision::TRAINING { 0.3 * theirs + 2.0 * BF16 } else { 1.15 * theirs + 1.5 * BF16 };
            assert!(ours <= allowed, "{call:?}, {}: {ours:.3e}, CPU {theirs:.3e}", precision.pv_accumulator);
            for (at, (a, b)) in have.lse.iter().zip(&cpu.lse).enumerate() {
                assert!(a == b || (a - b).abs() <= 8e-3, "{call:?}: lse {at} {a} for {b}");
            }
            same_casts(&have.stats, &cpu.stats);
            for (a, b) in have.stats.logits.iter().zip(&cpu.stats.logits) {
                assert_eq!(a.count, b.count, "{call:?}");
                for (a, b) in [(a.max, b.max), (a.min, b.min), (a.raw_max, b.raw_max), (a.raw_min, b.raw_min)] {
                    assert!(a == b || (a - b).abs() <= error, "{call:?}: {a} for {b}, error at most {error}");
                }
            }
        }
    }
}

/// Other lengths in the same lists, for the same graph.
fn a_graph_follows_the_lengths() {
    for (d_head, len_q, first, then) in [
        (128, 300, [[300, 300], [20, 100]], [[1, 280], [300, 1]]),
        (64, 300, [[5, 300], [0, 0]], [[300, 300], [300, 300]]),
        (128, 1, [[1, 4000], [1, 10]], [[1, 3], [1, 3999]]),
    ] {
        let len_k = first[0][1].max(then[1][1]).max(300);
        let shape = AttentionShape { batch: 2, n_q_heads: 8, n_kv_heads: 2, len_q, len_k, d_head, d_v: d_head };
        let call = AttentionCall::causal(shape);
        let data = Data::new(&shape, 13);
        let bytes = [bf16_bytes(&data.q), bf16_bytes(&data.k), bf16_bytes(&data.v)];
        let memory = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &[0.02, 0.03, 0.04]);
        let lists: [Buffer<i32>; 4] = [(); 4].map(|()| device().zeros(2).unwrap());
        let set = |lengths: [[usize; 2]; 2]| {
            let [q, k] = [0, 1].map(|side| lengths.map(|pair| pair[side]));
            let sequences = Sequence::padded(&shape, &q, &k, Padding::Right).unwrap();
            let ends: [fn(&Sequence) -> usize; 4] = [|s| s.q.start, |s| s.q.end, |s| s.k.start, |s| s.k.end];
            for (list, end) in lists.iter().zip(ends) {
                list.write(&sequences.iter().map(|s| end(s) as i32).collect::<Vec<_>>()).unwrap();
            }
        };
        // SAFETY: the lists outlive the work.
        let [q_starts, q_ends, k_starts, k_ends] =
            [0, 1, 2, 3].map(|i| unsafe { lists[i].view(Element::I32, [2]).unwrap() });
        let sequences = Sequences { q_starts, q_ends, k_starts, k_ends, max_len_q: len_q, max_len_k: len_k };
        let (mut tensors, _) = memory.tensors(&call, Element::Bf16);
        let call = DeviceCall { sequences: Some(sequences), ..DeviceCall::causal(shape) };
        tensors.stats = None;
        let scratch = scratch(Cuda::workspace_bytes(&call, &tensors).unwrap());
        // SAFETY: as above.
        let workspace = unsafe { scratch.view(Element::U8, [scratch.len()]).unwrap() };
        let (gpu, stream) = (cuda(), stream());
        set(first);
        gpu.launch(&stream, &call, &tensors, &workspace).unwrap();
        let of_first = memory.results();
        let graph = stream.capture(|stream| gpu.launch(stream, &call, &tensors, &workspace)).unwrap();
        set(then);
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        let replayed = memory.results();
        assert!(replayed != of_first, "d {d_head}");
        gpu.launch(&stream, &call, &tensors, &workspace).unwrap();
        assert!(memory.results() == replayed, "d {d_head}, {len_q} queries");
        set(first);
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        assert!(memory.results() == of_first, "d {d_head}, {len_q} queries");
    }
}

/// Rows of a warp that lie in two entries of the batch, of which one overflows its descale.
pub(super) fn casts_of_sequences_count_by_the_descale_of_their_entry() {
    for (d_head, len) in [(128, 33), (64, 34)] {
        let shape =
            AttentionShape { batch: 2, n_q_heads: 2, n_kv_heads: 1, len_q: len, len_k: len, d_head, d_v: d_head };
        let call = AttentionCall::causal(shape);
        let data = Data::new(&shape, 17);
        let bytes = [bf16_bytes(&data.q), bf16_bytes(&data.k), bf16_bytes(&data.v)];
        // By (batch, KV head): q, k, v.
        let memory = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &[1e-3, 10.0, 10.0, 1e-3, 10.0, 10.0]);
        let list = |x: [usize; 2]| -> Buffer<i32> { device().upload(&x.map(|x| x as i32)).unwrap() };
        let (starts, ends) = (list([0, len]), list([len, 2 * len]));
        // SAFETY: the lists and the workspace outlive the work, which `results` waits for.
        let [starts, ends] = [&starts, &ends].map(|x| unsafe { x.view(Element::I32, [2]).unwrap() });
        let sequences = Sequences {
            q_starts: starts,
            q_ends: ends,
            k_starts: starts,
            k_ends: ends,
            max_len_q: len,
            max_len_k: len,
        };
        let (tensors, _) = memory.tensors(&call, Element::Bf16);
        let call = DeviceCall { sequences: Some(sequences), ..DeviceCall::causal(shape) };
        let bytes = Cuda::workspace_bytes(&call, &tensors).unwrap();
        let scratch = scratch(bytes);
        let workspace = unsafe { scratch.view(Element::U8, [bytes]).unwrap() };
        cuda().launch(&stream(), &call, &tensors, &workspace).unwrap();
        let (_, _, words) = memory.results();
        for head in 0..2 {
            let entry = data.q[..len * 2 * d_head].chunks_exact(d_head).skip(head).step_by(2);
            let past = entry.flatten().filter(|x| half::bf16::from_f32(**x).to_f32().abs() * (1.0 / 1e-3f32) > 448.0);
            assert_eq!(words[4 * (2 + head) + 1] as usize, past.count(), "d {d_head}, head {head} of q");
        }
    }
}
