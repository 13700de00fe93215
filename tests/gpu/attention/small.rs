//! Small calls of every family of attention kernels, for compute-sanitizer (`../small.rs`). A name begins with its family.
//!
//! Calls take few multiprocessors, so that every ring of buffers goes round and blocks take one item after another.

use super::backward_calls::Random;
use super::paged::Case as Paged;
use super::{
    BF16, Data, Memory, backward, backward_calls, distance, exact, logit_error, on_device, paged, random, same_casts,
    stream, wide,
};
use crate::device;
use half::bf16;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use sigmascale::attention::{
    Attention, AttentionCall, AttentionShape, Cast, Cpu, Keeps, LogitCast, Mask, Padding, Precision, PvAccumulator,
    Sequence, reference,
};
use sigmascale::device::attention::{BackwardOptions, Cuda, Element, Split, Tile};
use sigmascale::fp8::{Format, OnOverflow};

tests![
    forward_double,
    forward_double_without_telemetry,
    forward_double_flushed,
    forward_double_f16,
    forward_single,
    forward_single_without_telemetry,
    forward_single_f16,
    forward_single_of_wide_values,
    forward_sliced,
    forward_sliced_of_three_consumers,
    forward_of_filled_dimensions,
    forward_logits_in_e4m3,
    forward_logits_in_e4m3_of_long_keys,
    forward_output_in_e4m3,
    forward_window,
    forward_soft_cap,
    forward_sinks,
    forward_sequences,
    forward_every_term,
    forward_row_max,
    forward_residual,
    parts_double,
    parts_rolled,
    parts_of_two_consumers,
    parts_logits_in_e4m3,
    parts_of_wide_values,
    parts_every_term,
    cast_of_every_type,
    cast_with_rope,
    cast_of_sequences,
    cast_saves_operands,
    backward_64,
    backward_128,
    backward_256,
    backward_split_keys,
    backward_in_parts,
    backward_every_term,
    backward_dq_in_fp8,
    backward_unrounded_delta,
    paged_decode,
    paged_decode_of_rows,
    paged_prefill,
    paged_append_with_rope,
    paged_parts,
    paged_tables_are_checked,
    reference_of_every_term,
];

/// (batch, query heads, KV heads, queries, keys)
fn shape([batch, n_q_heads, n_kv_heads, len_q, len_k]: [usize; 5], d_head: usize, d_v: usize) -> AttentionShape {
    AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v }
}

/// Whether a call is cut into parts, by so many consumers a block.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kernel {
    Whole(Tile),
    Parts { consumers: usize },
}

/// One call against the CPU: output, log-sum-exp and statistics. `kernel`: what the name of the case says that it runs.
#[track_caller]
fn forward(call: &AttentionCall, precision: Precision, kernel: Kernel) {
    let logits_e4m3 = precision.logits == LogitCast::E4m3;
    let parts = Split::of(&call.shape, logits_e4m3).filter(|split| split.parts > 1);
    match kernel {
        Kernel::Whole(tile) => assert_eq!(Tile::of(&call.shape, logits_e4m3, precision.pv_accumulator), tile),
        Kernel::Parts { consumers } => assert_eq!(parts.map(|split| split.consumers), Some(consumers), "{call:?}"),
    }
    let gpu = Cuda::new(device()).unwrap().with_processors(3).with_split(!matches!(kernel, Kernel::Whole(_)));
    let data = Data::new(&call.shape, 11);
    let plan = data.plan(call, if logits_e4m3 { 0.33 } else { 1.3 });
    let have = gpu.forward(call, &data.inputs(), &plan, &precision).unwrap();
    let Precision { logits, output, .. } = precision;
    let of_cpu = Precision { logits, output, ..Precision::KERNEL };
    let cpu = Cpu.forward(call, &data.inputs(), &plan, &of_cpu).unwrap();
    let want = exact(call, &data.inputs(), &plan);
    let (ours, theirs) = (distance(&have.out, &want), distance(&cpu.out, &want));
    // The mean square of a few rows' rounding errors varies.
    let most = if precision.pv_accumulator == PvAccumulator::F16 {
        0.3 * theirs + 2.0 * BF16
    } else {
        1.35 * theirs + 1.5 * BF16
    };
    assert!(ours <= most, "{call:?}: {ours:.3e}, CPU {theirs:.3e}");
    same_casts(&have.stats, &cpu.stats);
    for (a, b) in have.stats.logits.iter().zip(&cpu.stats.logits) {
        let near = a.overflow.abs_diff(b.overflow) <= 2 + b.overflow / 50;
        assert!(near && a.count == b.count, "{call:?}: {a:?} for {b:?}");
    }
    // Logits at the edge of two E4M3 values fall to either side.
    if logits_e4m3 {
        return;
    }
    for (at, (a, b)) in have.lse.iter().zip(&cpu.lse).enumerate() {
        assert!(a == b || (a - b).abs() <= 8e-3, "{call:?}: lse {at} {a} for {b}");
    }
    let error = logit_error(call, &data);
    for (a, b) in have.stats.logits.iter().zip(&cpu.stats.logits) {
        for (a, b) in [(a.max, b.max), (a.min, b.min), (a.raw_max, b.raw_max), (a.raw_min, b.raw_min)] {
            assert!(a == b || (a - b).abs() <= error, "{call:?}: {a} for {b}, error at most {error}");
        }
    }
}

/// A call of E4M3 operands that reports nothing, against f64.
fn without_telemetry(call: &AttentionCall) {
    let mut rng = StdRng::seed_from_u64(12);
    let mut codes = |n: usize| -> Vec<u8> {
        (0..n).map(|_| Format::E4m3.encode(StandardNormal.sample(&mut rng), OnOverflow::Saturate)).collect()
    };
    let codes = [call.shape.q_elements(), call.shape.k_elements(), call.shape.v_elements()].map(&mut codes);
    let memory = Memory::new(call, [&codes[0], &codes[1], &codes[2]], &[1.0; 3]);
    let (mut tensors, workspace) = memory.tensors(call, Element::E4m3);
    tensors.stats = None;
    let gpu = Cuda::new(device()).unwrap().with_processors(3).with_split(false);
    gpu.launch(&stream(), &on_device(call), &tensors, &workspace).unwrap();
    let (out, ..) = memory.results();
    let out: Vec<f32> = out.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect();
    let [q, k, v] = codes.map(|x| wide(&x.iter().map(|&x| Format::E4m3.decode(x)).collect::<Vec<f32>>()));
    let error = distance(&out, &reference(call, &q, &k, &v).unwrap().out);
    assert!(error <= 4.5e-2, "{call:?}: {error:.3e}");
}

const CAUSAL: [usize; 5] = [1, 4, 2, 200, 700];

fn forward_double() {
    forward(&AttentionCall::causal(shape(CAUSAL, 128, 128)), Precision::INFERENCE, Kernel::Whole(Tile::TWO));
    let call = AttentionCall::causal(shape([2, 3, 3, 70, 300], 128, 128));
    forward(&AttentionCall { mask: Mask::NONE, ..call }, Precision::INFERENCE, Kernel::Whole(Tile::TWO));
}

fn forward_double_without_telemetry() {
    without_telemetry(&AttentionCall::causal(shape(CAUSAL, 128, 128)));
}

fn forward_double_flushed() {
    // More keys than are summed before a flush.
    let call = AttentionCall::causal(shape([1, 2, 1, 70, 2400], 128, 128));
    forward(&call, Precision::PROMOTE_2048, Kernel::Whole(Tile::TWO));
}

fn forward_double_f16() {
    forward(&AttentionCall::causal(shape(CAUSAL, 128, 128)), Precision::TRAINING, Kernel::Whole(Tile::TWO));
}

fn forward_single() {
    forward(
        &AttentionCall::causal(shape([1, 6, 2, 200, 700], 64, 64)),
        Precision::INFERENCE,
        Kernel::Whole(Tile::THREE),
    );
}

fn forward_single_without_telemetry() {
    without_telemetry(&AttentionCall::causal(shape([1, 6, 2, 200, 700], 64, 64)));
}

fn forward_single_f16() {
    forward(
        &AttentionCall::causal(shape([1, 4, 4, 200, 700], 64, 64)),
        Precision::TRAINING,
        Kernel::Whole(Tile::THREE),
    );
}

fn forward_single_of_wide_values() {
    forward(
        &AttentionCall::causal(shape([1, 4, 2, 140, 500], 256, 256)),
        Precision::TRAINING,
        Kernel::Whole(Tile::HALF),
    );
}

fn forward_sliced() {
    for (d_head, d_v) in [(256, 256), (192, 192)] {
        let call = AttentionCall::causal(shape([1, 4, 2, 140, 500], d_head, d_v));
        forward(&call, Precision::INFERENCE, Kernel::Whole(Tile::TWO));
    }
}

fn forward_sliced_of_three_consumers() {
    for (d_head, d_v) in [(96, 96), (192, 128)] {
        let call = AttentionCall::causal(shape([1, 3, 1, 200, 600], d_head, d_v));
        forward(&call, Precision::INFERENCE, Kernel::Whole(Tile::THREE));
    }
}

fn forward_of_filled_dimensions() {
    let call = AttentionCall::causal(shape([1, 3, 1, 130, 400], 72, 72));
    forward(&call, Precision::INFERENCE, Kernel::Whole(Tile::THREE));
    let call = AttentionCall::causal(shape([1, 4, 2, 130, 400], 120, 104));
    forward(&call, Precision::TRAINING, Kernel::Whole(Tile::TWO));
}

fn in_e4m3(logits: LogitCast, output: Cast) -> Precision {
    Precision { logits, output, ..Precision::INFERENCE }
}

fn forward_logits_in_e4m3() {
    let precision = in_e4m3(LogitCast::E4m3, Cast::F32);
    forward(&AttentionCall::causal(shape(CAUSAL, 128, 128)), precision, Kernel::Whole(Tile::TWO));
    forward(&AttentionCall::causal(shape([1, 4, 2, 140, 500], 256, 256)), precision, Kernel::Whole(Tile::TWO));
}

fn forward_logits_in_e4m3_of_long_keys() {
    let call = AttentionCall::causal(shape([1, 3, 1, 70, 2100], 128, 128));
    forward(&call, in_e4m3(LogitCast::E4m3, Cast::F32), Kernel::Whole(Tile::NARROW));
}

fn forward_output_in_e4m3() {
    let precision = in_e4m3(LogitCast::Counted, Cast::E4m3);
    forward(&AttentionCall::causal(shape(CAUSAL, 128, 128)), precision, Kernel::Whole(Tile::TWO));
}

fn forward_window() {
    for (d, tile) in [(128, Tile::TWO), (64, Tile::THREE)] {
        let call = AttentionCall::causal(shape([1, 4, 2, 300, 500], d, d));
        for mask in [Mask::sliding(100), Mask { causal: false, window_left: Some(50), window_right: Some(30) }] {
            forward(&AttentionCall { mask, ..call }, Precision::INFERENCE, Kernel::Whole(tile));
        }
    }
}

fn forward_soft_cap() {
    let call = AttentionCall { soft_cap: Some(4.0), ..AttentionCall::causal(shape([1, 4, 2, 200, 333], 128, 128)) };
    forward(&call, Precision::INFERENCE, Kernel::Whole(Tile::TWO));
}

static SINKS: [f64; 8] = [-3.0, -1.0, 1.0, 3.0, 5.0, 7.0, 9.0, 11.0];

fn forward_sinks() {
    let call = AttentionCall::causal(shape([2, 4, 2, 65, 129], 128, 128));
    let call = AttentionCall { sinks: Some(&SINKS[..4]), ..call };
    forward(&call, Precision::INFERENCE, Kernel::Whole(Tile::TWO));
}

fn packed() -> Vec<Sequence> {
    Sequence::packed(&[0, 1, 1, 130, 300], &[0, 200, 240, 240, 420], Some(&[1, 40, 0, 170])).unwrap()
}

fn forward_sequences() {
    for (d, tile) in [(128, Tile::TWO), (64, Tile::THREE)] {
        let sequences = packed();
        let call = AttentionCall::causal(shape([1, 4, 2, 300, 420], d, d));
        forward(&AttentionCall { sequences: Some(&sequences), ..call }, Precision::INFERENCE, Kernel::Whole(tile));
    }
}

fn forward_every_term() {
    let sequences = packed();
    let call = AttentionCall {
        mask: Mask::sliding(70),
        soft_cap: Some(6.0),
        sinks: Some(&SINKS[..4]),
        sequences: Some(&sequences),
        ..AttentionCall::causal(shape([1, 4, 2, 300, 420], 128, 128))
    };
    forward(&call, Precision::INFERENCE, Kernel::Whole(Tile::TWO));
    forward(&call, Precision::TRAINING, Kernel::Whole(Tile::TWO));
}

fn forward_row_max() {
    super::accumulators::row_max_of(shape([2, 4, 2, 130, 201], 128, 128));
}

fn forward_residual() {
    super::accumulators::residual_of(shape([2, 4, 2, 130, 201], 128, 72));
}

fn parts_double() {
    let call = AttentionCall::causal(shape([1, 8, 2, 1, 1000], 128, 128));
    forward(&call, Precision::INFERENCE, Kernel::Parts { consumers: 1 });
}

fn parts_rolled() {
    // Two tiles of keys a part.
    let call = AttentionCall::causal(shape([1, 8, 8, 1, 4096], 64, 64));
    assert_eq!(Split::of(&call.shape, false).unwrap().parts, 16);
    forward(&call, Precision::INFERENCE, Kernel::Parts { consumers: 1 });
}

fn parts_of_two_consumers() {
    let call = AttentionCall::causal(shape([1, 8, 1, 16, 2000], 128, 128));
    forward(&call, Precision::INFERENCE, Kernel::Parts { consumers: 2 });
    forward(&call, Precision::TRAINING, Kernel::Parts { consumers: 2 });
}

fn parts_logits_in_e4m3() {
    let call = AttentionCall::causal(shape([1, 4, 2, 3, 1500], 128, 128));
    forward(&call, in_e4m3(LogitCast::E4m3, Cast::F32), Kernel::Parts { consumers: 1 });
}

fn parts_of_wide_values() {
    let call = AttentionCall::causal(shape([1, 4, 2, 1, 1500], 256, 256));
    forward(&call, Precision::INFERENCE, Kernel::Parts { consumers: 1 });
}

fn parts_every_term() {
    let shape = shape([3, 8, 2, 4, 1500], 128, 128);
    let sequences = Sequence::padded(&shape, &[4, 1, 3], &[1500, 900, 2], Padding::Left).unwrap();
    let call = AttentionCall {
        mask: Mask::sliding(1100),
        soft_cap: Some(6.0),
        sinks: Some(&SINKS),
        sequences: Some(&sequences),
        ..AttentionCall::causal(shape)
    };
    forward(&call, Precision::INFERENCE, Kernel::Parts { consumers: 1 });
}

fn cast_of_every_type() {
    super::operands_that_are_e4m3_already();
    // F16 and F32, whose values BF16 holds, leave the bits of BF16.
    let call = super::small_call(72);
    let data = Data::new(&call.shape, 14);
    let rounded =
        [&data.q, &data.k, &data.v].map(|x| -> Vec<f32> { x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect() });
    let results = [Element::Bf16, Element::F16, Element::F32].map(|element| {
        let bytes = rounded.each_ref().map(|x| -> Vec<u8> {
            match element {
                Element::Bf16 => super::bf16_bytes(x),
                Element::F16 => x.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
                _ => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
            }
        });
        let memory = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &[0.02, 0.03, 0.04]);
        let (tensors, workspace) = memory.tensors(&call, element);
        super::cuda().launch(&stream(), &on_device(&call), &tensors, &workspace).unwrap();
        memory.results()
    });
    assert!(results[0] == results[1] && results[0] == results[2]);
}

fn cast_with_rope() {
    for (d, rotary, interleaved, indexed) in [(128, 64, true, true), (64, 64, false, false), (72, 72, false, true)] {
        super::rope_of(d, rotary, interleaved, indexed);
    }
}

fn cast_of_sequences() {
    super::calls::casts_of_sequences_count_by_the_descale_of_their_entry();
}

fn cast_saves_operands() {
    for d in [128, 72] {
        super::accumulators::saved_operands_of(d, PvAccumulator::F16);
    }
}

fn backward_of(d_head: usize) {
    let engines = [false, true].map(|deterministic| backward::engine().with_deterministic(deterministic));
    // Rows that see nothing, and a head without a group.
    for (sizes, mask) in [([1, 4, 2, 150, 130], Mask::CAUSAL), ([2, 2, 2, 70, 200], Mask::NONE)] {
        let call = AttentionCall { mask, ..AttentionCall::causal(shape(sizes, d_head, d_head)) };
        backward::gradients_of(&call, 3, &engines);
    }
}

fn backward_64() {
    backward_of(64);
}

fn backward_128() {
    backward_of(128);
}

fn backward_256() {
    backward_of(256);
    backward_of(192);
}

fn backward_split_keys() {
    // Too few blocks for the device: clusters of them share the queries of a tile of keys.
    let call = AttentionCall::causal(shape([1, 8, 1, 200, 140], 128, 128));
    backward::gradients_of(&call, 4, &[backward::engine()]);
}

fn backward_in_parts() {
    backward::parts_of(shape([2, 6, 3, 130, 150], 128, 128), Some(1), false);
    backward::parts_of(shape([2, 6, 3, 130, 150], 64, 64), Some(1), true);
}

fn backward_every_term() {
    for (d_head, d_v) in [(128, 128), (64, 64), (72, 40), (256, 256)] {
        let mask = Mask { causal: true, window_left: Some(60), window_right: None };
        let call = AttentionCall {
            mask,
            soft_cap: Some(30.0),
            ..AttentionCall::causal(shape([1, 4, 2, 300, 420], d_head, d_v))
        };
        let random = Random { call, sequences: Some(packed()), sinks: Some(SINKS[..4].to_vec()), seed: 5 };
        for deterministic in [false, true] {
            backward_calls::gradients_of(&random, &backward::engine().with_deterministic(deterministic), false);
        }
        let options = BackwardOptions { keeps: Keeps::UnroundedDelta, ..BackwardOptions::default() };
        backward_calls::gradients_of(&random, &backward::engine().with_options(options), true);
    }
}

fn backward_dq_in_fp8() {
    for d in [128, 64] {
        backward::dq_in_fp8_of(&AttentionCall::causal(shape([1, 4, 2, 150, 200], d, d)), 6);
    }
}

fn backward_unrounded_delta() {
    for d in [128, 64] {
        backward::delta_unrounded_of(&AttentionCall::causal(shape([1, 4, 2, 150, 200], d, d)), 7);
    }
}

/// Tails of pages and groups, sequences without keys.
const LENGTHS: [usize; 5] = [0, 15, 127, 128, 300];

fn paged_decode() {
    let decode = Paged { processors: 3, ..Paged::decode(&LENGTHS, 64) };
    paged::check([decode.clone(), Paged { d: 64, q8: true, page_size: 16, ..decode }]);
}

fn paged_decode_of_rows() {
    let decode = Paged { processors: 3, rows: true, ..Paged::decode(&LENGTHS, 64) };
    paged::check([decode.clone(), Paged { d: 64, page_size: 256, ..decode }]);
}

fn paged_prefill() {
    // Two consumers, of which both clear the values of keys that do not exist.
    let chunk = Paged { len_q: 70, new: 70, processors: 3, ..Paged::decode(&[0, 60, 300], 64) };
    paged::check([
        chunk.clone(),
        Paged { rows: true, page_size: 128, ..chunk.clone() },
        Paged { mask: Mask::NONE, new: 0, ..chunk },
    ]);
}

fn paged_append_with_rope() {
    let decode = Paged { rope: Some(false), ..Paged::decode(&LENGTHS, 64) };
    paged::check([decode.clone(), Paged { rope: Some(true), rows: true, d: 64, page_size: 16, ..decode }]);
}

fn paged_parts() {
    paged::check([false, true].map(|rows| Paged { rows, ..Paged::decode(&[2500, 5, 0], 64) }));
}

fn paged_tables_are_checked() {
    paged::wrong_tables_are_named_and_harm_nothing();
}

fn reference_of_every_term() {
    random::a_small_call();
}
