//! The choices of the accumulator of P V, and the operands that the cast saves for a backward.

use super::{Data, Memory, bf16_bytes, cuda, device, keys, on_device, small_call, stream, wide};
use half::bf16;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use sigmascale::attention::{AttentionCall, AttentionShape, Mask, Precision, PvAccumulator, reference};
use sigmascale::cuda::Buffer;
use sigmascale::device::attention::{Element, SavedOperands, SavedRows, Tensors, View, Workspace, residual_value};
use sigmascale::fp8::{Format, OnOverflow};

tests![
    the_output_is_not_biased,
    operands_are_saved_for_a_backward,
    the_largest_p_of_each_row_is_kept,
    what_rounding_took_from_the_output_is_kept,
];

/// Mean error of O over mean |O| where V has a mean, against f64 on the same E4M3 operands: every kernel that a call can get.
fn the_output_is_not_biased() {
    let stream = stream();
    for (d_head, len_k, mean) in [
        (64, 4096, 1.0),
        (128, 4096, 0.3),
        (128, 4096, 3.0),
        (64, 16_384, 3.0),
        (128, 16_384, 1.0),
        (96, 4096, 0.1),
        (96, 16_384, 3.0),
        (192, 1024, 3.0),
        (192, 16_384, 1.0),
        (256, 1024, 0.1),
        (256, 4096, 3.0),
        (256, 65_536, 1.0),
    ] {
        let shape = AttentionShape { batch: 1, n_q_heads: 2, n_kv_heads: 1, len_q: 16, len_k, d_head, d_v: d_head };
        let call = AttentionCall { mask: Mask::NONE, ..AttentionCall::causal(shape) };
        let mut rng = StdRng::seed_from_u64(30);
        let mut draw = |n: usize, mean: f32| -> Vec<u8> {
            let normal = |rng: &mut StdRng| Distribution::<f32>::sample(&StandardNormal, rng);
            (0..n).map(|_| Format::E4m3.encode(mean + normal(&mut rng), OnOverflow::Saturate)).collect()
        };
        let kv = shape.k_elements();
        let codes = [draw(shape.q_elements(), 0.0), draw(kv, 0.0), draw(kv, mean)];
        let values = [0, 1, 2].map(|i| codes[i].iter().map(|&x| Format::E4m3.decode(x)).collect::<Vec<f32>>());
        let [q, k, v] = &values;
        let want = reference(&call, &wide(q), &wide(k), &wide(v)).unwrap().out;
        let size: f64 = want.iter().map(|x| x.abs()).sum();
        let memory = Memory::new(&call, [&codes[0], &codes[1], &codes[2]], &[1.0; 3]);
        for (precision, limit) in
            [(Precision::TRAINING, 1e-3), (Precision::INFERENCE, 5e-3), (Precision::PROMOTE_2048, 4e-2)]
        {
            for (split, telemetry) in [(false, false), (false, true), (true, false), (true, true)] {
                let (mut tensors, workspace) = memory.tensors(&call, Element::E4m3);
                tensors.accumulator = precision.pv_accumulator;
                tensors.stats = tensors.stats.filter(|_| telemetry);
                cuda().with_split(split).launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
                stream.synchronize().unwrap();
                let out = memory.results().0;
                let out = out.chunks_exact(2).map(|x| f64::from(bf16::from_le_bytes([x[0], x[1]]).to_f32()));
                let bias = out.zip(&want).map(|(x, want)| x - want).sum::<f64>() / size;
                let case = format!(
                    "{len_k} keys, d {d_head}, mean {mean}, {}, split {split}, telemetry {telemetry}: {bias:.2e}",
                    tensors.accumulator
                );
                println!("{case}");
                assert!(bias.abs() <= limit, "{case}");
                // What the others are there for: the test sees it.
                // Heads of 96 and values wider than 128 columns are promoted after every tile all the same.
                let sliced = d_head == 96 || d_head > 128;
                assert!(limit < 1e-2 || split || mean < 1.0 || sliced || bias < -1e-2, "{case}");
            }
        }
    }
}

/// Memory for what the cast saves, filled with a code: a head's row has a multiple of 16 bytes.
fn saved_memory(tensors: &Tensors, code: u8) -> ([Buffer<u8>; 3], SavedOperands) {
    let [k, v] = keys(tensors);
    let [(a, q), (b, k), (c, v)] = [tensors.q, k, v].map(|like| {
        let [batch, length, heads, d] = like.extents();
        let row = d.next_multiple_of(16);
        let buffer = device().upload(&vec![code; batch * length * heads * row]).unwrap();
        let strides = [length * heads * row, heads * row, row, 1].map(|stride| stride as i64);
        // SAFETY: the buffer has the bytes of the view and outlives the work, which reading it waits for.
        let view = unsafe { View::new(buffer.ptr(), Element::E4m3, like.extents(), strides) };
        (buffer, view)
    });
    ([a, b, c], SavedOperands { q, k, v, rows: SavedRows::Nothing })
}

/// The cast leaves E4M3 rows to the caller, and the output has the same bits.
fn operands_are_saved_for_a_backward() {
    for (d_head, accumulator) in
        [64, 128, 72, 96, 256].into_iter().flat_map(|d| [PvAccumulator::F16, PvAccumulator::default()].map(|a| (d, a)))
    {
        saved_operands_of(d_head, accumulator);
    }
}

/// What the cast of one call leaves.
pub(super) fn saved_operands_of(d_head: usize, accumulator: PvAccumulator) {
    let stream = stream();
    let call = small_call(d_head);
    let data = Data::new(&call.shape, 31);
    let descales = [0.02, 0.03, 0.04];
    let inputs = [&data.q, &data.k, &data.v];
    let bytes = inputs.map(|x| bf16_bytes(x));
    let memory = Memory::new(&call, [&bytes[0], &bytes[1], &bytes[2]], &descales);
    let (mut tensors, workspace) = memory.tensors(&call, Element::Bf16);
    tensors.accumulator = accumulator;
    let gpu = cuda();
    gpu.launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
    let want = memory.results();

    let row = d_head.next_multiple_of(16);
    let (saved, views) = saved_memory(&tensors, 0x7f);
    let bytes = Workspace::of(&on_device(&call), Element::Bf16, accumulator, true).bytes;
    assert!(bytes < workspace.extents()[0], "saved operands take no room in the workspace");
    // SAFETY: it is the front of the workspace.
    let workspace = unsafe { View::dense(workspace.ptr(), Element::U8, [bytes]) };
    tensors.saved = Some(views);
    memory.stats.write(&vec![0; memory.stats.len()]).unwrap();
    memory.out.clear(&stream).unwrap();
    gpu.launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
    assert!(memory.results() == want, "d {d_head}, {accumulator}");
    for ((x, saved), descale) in inputs.into_iter().zip(&saved).zip(descales) {
        // The kernel multiplies by the reciprocal.
        let encode = |x: &f32| Format::E4m3.encode(bf16::from_f32(*x).to_f32() * (1.0 / descale), OnOverflow::Saturate);
        let saved = saved.read().unwrap();
        let (have, between): (Vec<_>, Vec<_>) = saved.chunks_exact(row).map(|row| row.split_at(d_head)).unzip();
        assert!(have.concat() == x.iter().map(encode).collect::<Vec<u8>>(), "d {d_head}, {accumulator}");
        assert!(between.concat().iter().all(|&b| b == 0x7f), "d {d_head}, {accumulator}: bytes between rows");
    }
}

/// With the log-sum-exp, a forward for a backward whose dQ is in FP8 keeps each row's largest P. Calls that would be split are not.
fn the_largest_p_of_each_row_is_kept() {
    for (d_head, [batch, n_q_heads, n_kv_heads, len_q, len_k]) in
        [64, 128].into_iter().flat_map(|d| [[2, 4, 2, 300, 411], [1, 8, 1, 5, 700], [1, 3, 3, 130, 64]].map(|s| (d, s)))
    {
        let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v: d_head };
        row_max_of(shape);
    }
}

/// The largest P of each row of one call.
pub(super) fn row_max_of(shape: AttentionShape) {
    let stream = stream();
    let AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, .. } = shape;
    let call = AttentionCall::causal(shape);
    let data = Data::new(&shape, 32);
    let descales = [0.02, 0.03, 0.04];
    let inputs = [&data.q, &data.k, &data.v].map(|x| bf16_bytes(x));
    let memory = Memory::new(&call, [&inputs[0], &inputs[1], &inputs[2]], &descales);
    let (mut tensors, workspace) = memory.tensors(&call, Element::Bf16);
    tensors.accumulator = PvAccumulator::F16;
    let (saved, views) = saved_memory(&tensors, 0);
    let row_max = device().upload(&vec![f32::NAN; shape.lse_elements()]).unwrap();
    // SAFETY: the buffer has the bytes of the view and outlives the work, which reading it waits for.
    let rows = SavedRows::RowMax(unsafe { row_max.view(Element::F32, [batch, n_q_heads, len_q]).unwrap() });
    tensors.saved = Some(SavedOperands { rows, ..views });
    cuda().launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
    stream.synchronize().unwrap();
    let codes = saved.map(|x| x.read().unwrap().iter().map(|&x| f64::from(Format::E4m3.decode(x))).collect::<Vec<_>>());
    let have = row_max.read().unwrap();
    let factor = call.softmax_scale * f64::from(descales[0]) * f64::from(descales[1]);
    for (at, have) in have.into_iter().enumerate() {
        let (row, head, entry) = (at % len_q, at / len_q % n_q_heads, at / len_q / n_q_heads);
        let seen = (row + 1 + len_k).saturating_sub(len_q);
        if seen == 0 {
            continue;
        }
        let q = &codes[0][((entry * len_q + row) * n_q_heads + head) * d_head..][..d_head];
        let kv = head * n_kv_heads / n_q_heads;
        let logits: Vec<f64> = (0..seen)
            .map(|j| {
                let k = &codes[1][((entry * len_k + j) * n_kv_heads + kv) * d_head..][..d_head];
                factor * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()
            })
            .collect();
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let want = -logits.iter().map(|s| (s - top).exp()).sum::<f64>().log2();
        assert!((f64::from(have) - want).abs() <= 0.02, "{shape:?} row {row}: {have}, {want}");
    }
}

/// A forward for a backward with `Delta::Unrounded` keeps what the rounding of its output took, and nothing else changes. Calls that
/// would be split are not.
fn what_rounding_took_from_the_output_is_kept() {
    for (d, d_v, [batch, n_q_heads, n_kv_heads, len_q, len_k]) in [(64, 64), (128, 128), (128, 72), (256, 256)]
        .into_iter()
        .flat_map(|(d, d_v)| [[2, 4, 2, 300, 411], [1, 8, 1, 5, 700], [1, 3, 3, 130, 64]].map(|s| (d, d_v, s)))
    {
        let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head: d, d_v };
        residual_of(shape);
    }
}

/// What rounding took from the output of one call.
pub(super) fn residual_of(shape: AttentionShape) {
    let stream = stream();
    let AttentionShape { len_q, d_head: d, d_v, .. } = shape;
    let call = AttentionCall::causal(shape);
    let mut data = Data::new(&shape, 33);
    // Logits so small that the sums of Q K^T take nothing from the output that is seen beside its rounding.
    data.q.iter_mut().for_each(|q| *q *= 0.01);
    let descales = [2e-4, 0.03, 0.04];
    let inputs = [&data.q, &data.k, &data.v].map(|x| bf16_bytes(x));
    let memory = Memory::new(&call, [&inputs[0], &inputs[1], &inputs[2]], &descales);
    let (mut tensors, workspace) = memory.tensors(&call, Element::Bf16);
    tensors.accumulator = PvAccumulator::F16;
    let (saved, views) = saved_memory(&tensors, 0);
    let residual = device().upload(&vec![0x80u8; shape.out_elements()]).unwrap();
    let mut results = Vec::new();
    // SAFETY: as above.
    let took = SavedRows::Residual(unsafe { residual.view(Element::U8, shape.out_shape()).unwrap() });
    for rows in [SavedRows::Nothing, took] {
        tensors.saved = Some(SavedOperands { rows, ..views });
        memory.stats.write(&vec![0; memory.stats.len()]).unwrap();
        memory.out.clear(&stream).unwrap();
        cuda().launch(&stream, &on_device(&call), &tensors, &workspace).unwrap();
        stream.synchronize().unwrap();
        results.push(memory.results());
    }
    let halves = |bytes: &[u8]| -> Vec<f64> {
        bytes.chunks_exact(2).map(|b| f64::from(bf16::from_le_bytes([b[0], b[1]]).to_f32())).collect()
    };
    let whole = len_q > 64;
    assert!(!whole || results[0] == results[1], "{shape:?}: the output, its log-sum-exp or telemetry changed");
    let out = halves(&results[1].0);
    let codes = residual.read().unwrap().into_iter().zip(&out);
    let residual: Vec<f64> =
        codes.map(|(code, &out)| f64::from(residual_value(code as i8, bf16::from_f64(out)))).collect();
    let operands: Vec<Vec<f64>> = saved
        .iter()
        .zip([d, d, d_v].into_iter().zip(descales))
        .map(|(codes, (d, descale))| {
            let codes = codes.read().unwrap();
            let rows = codes.chunks_exact(d.next_multiple_of(16)).flat_map(|row| &row[..d]);
            rows.map(|&code| f64::from(Format::E4m3.decode(code)) * f64::from(descale)).collect()
        })
        .collect();
    let want = reference(&call, &operands[0], &operands[1], &operands[2]).unwrap().out;
    let (mut rounded, mut unrounded) = (0.0, 0.0);
    for ((out, residual), want) in out.iter().zip(&residual).zip(&want) {
        // At most half a step of BF16.
        let step = 2f64.powi(out.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor() as i32 - 7);
        assert!(residual.abs() <= step / 2.0, "{shape:?}: rounding to {out} cannot have taken {residual}");
        rounded += (out - want).powi(2);
        unrounded += (out + residual - want).powi(2);
    }
    let [rounded, unrounded] = [rounded, unrounded].map(f64::sqrt);
    assert!(
        unrounded < 0.4 * rounded,
        "{shape:?}: off by {unrounded:.2e} before the rounding, {rounded:.2e} behind it"
    );
}
