//! The backward of random calls with windows, sequences, sinks, soft-caps and head dimensions by zero fill, against f64.
//!
//! Whatever no product may read is NaN: rows outside the sequences, queries that see no key, keys that no query sees, and the bytes
//! between rows. `SIGMASCALE_RANDOM_BACKWARD` sets how many calls (60), `SIGMASCALE_RANDOM_SEED` which.

use super::random::setting;
use super::{Data, bf16_bytes, scratch, stream, wide};
use crate::device;
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use sigmascale::Descale;
use sigmascale::attention::{
    AttentionCall, AttentionShape, Keeps, Mask, Sequence, dequantised, reference, reference_backward,
};
use sigmascale::cuda::{Buffer, DevicePtr, Stream};
use sigmascale::device::attention::{
    BackwardEngine, BackwardOptions, BackwardTensors, Delta, Descales, DeviceCall, Element, Sequences, View,
    residual_code,
};
use sigmascale::fp8::{Format, OnOverflow};

tests![random_backward_calls, sequences_may_change_between_replays, sequences_out_of_order_end,];

/// A call that owns its lists.
#[derive(Clone, Debug)]
pub(super) struct Random {
    pub call: AttentionCall<'static>,
    pub sequences: Option<Vec<Sequence>>,
    pub sinks: Option<Vec<f64>>,
    pub seed: u64,
}

impl Random {
    fn draw(seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let n_kv_heads = rng.random_range(1..=2);
        let n_q_heads = n_kv_heads * rng.random_range(1..=3);
        let most = [20, 150, 300][rng.random_range(0..3)];
        let length = |rng: &mut StdRng| match rng.random_range(0..6) {
            0 => 0,
            1 => 1,
            2 => [64, 128][rng.random_range(0..2)],
            _ => rng.random_range(0..=most),
        };
        let dim = |rng: &mut StdRng, most: usize| 8 * rng.random_range(2..=most / 8);
        let (d_head, d_v) = match rng.random_range(0..8) {
            0 => (dim(rng, 128), dim(rng, 128)),
            1 => (dim(rng, 256), dim(rng, 256)),
            2 => [(192, 128), (192, 192), (256, 256)][rng.random_range(0..3)],
            3 | 4 => (64, 64),
            _ => (128, 128),
        };
        let some = |rng: &mut StdRng, share: f64, most: usize| {
            rng.random_bool(share).then(|| [0, 1, rng.random_range(0..=most), 127][rng.random_range(0..4)])
        };
        let mask = Mask {
            causal: rng.random_bool(0.5),
            window_left: some(rng, 0.5, most),
            window_right: some(rng, 0.3, most),
        };
        let (mut batch, mut len_q, mut len_k) = (rng.random_range(1..=3), length(rng).max(1), length(rng).max(1));
        let sequences = match rng.random_range(0..3) {
            0 => None,
            1 => {
                let mut part = |rows: usize, at: usize| {
                    let (length, left) = (rng.random_range(0..=rows), rng.random_bool(0.5));
                    let start = at * rows + if left { rows - length } else { 0 };
                    start..start + length
                };
                Some((0..batch).map(|b| Sequence { q: part(len_q, b), k: part(len_k, b) }).collect())
            }
            _ => {
                let (mut q, mut k) = (0, 0);
                let gap = |rng: &mut StdRng| if rng.random_bool(0.3) { rng.random_range(0..150) } else { 0 };
                let next = |rng: &mut StdRng, end: &mut usize| {
                    let start = *end + gap(rng);
                    *end = start + length(rng);
                    start..*end
                };
                let count = rng.random_range(1..6);
                let list = (0..count).map(|_| Sequence { q: next(rng, &mut q), k: next(rng, &mut k) }).collect();
                (batch, len_q, len_k) = (1, (q + gap(rng)).max(1), (k + gap(rng)).max(1));
                Some(list)
            }
        };
        let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v };
        let soft_cap = rng.random_bool(0.3).then(|| [2.0, 30.0][rng.random_range(0..2)]);
        let sinks = rng.random_bool(0.4).then(|| (0..n_q_heads).map(|_| rng.random_range(-3.0..3.0)).collect());
        let call = AttentionCall { mask, soft_cap, ..AttentionCall::causal(shape) };
        Self { call, sequences, sinks, seed }
    }

    fn call(&self) -> AttentionCall<'_> {
        AttentionCall { sequences: self.sequences.as_deref(), sinks: self.sinks.as_deref(), ..self.call }
    }

    fn all_sequences(&self) -> Vec<Sequence> {
        let AttentionShape { batch, len_q, len_k, .. } = self.call.shape;
        let whole = |b: usize| Sequence { q: b * len_q..(b + 1) * len_q, k: b * len_k..(b + 1) * len_k };
        self.sequences.clone().unwrap_or_else(|| (0..batch).map(whole).collect())
    }

    /// Rows of the queries that see a key, and of the keys that are seen.
    fn live(&self) -> [Vec<bool>; 2] {
        let AttentionShape { batch, len_q, len_k, .. } = self.call.shape;
        let (mut queries, mut keys) = (vec![false; batch * len_q], vec![false; batch * len_k]);
        for Sequence { q, k } in self.all_sequences() {
            for (row, at) in q.clone().enumerate() {
                let seen = self.call.mask.visible(row, q.len(), k.len());
                queries[at] = !seen.is_empty();
                seen.for_each(|key| keys[k.start + key] = true);
            }
        }
        [queries, keys]
    }

    fn sees_two_keys(&self) -> bool {
        let visible = |s: &Sequence, row: usize| self.call.mask.visible(row, s.q.len(), s.k.len()).len();
        self.all_sequences().iter().any(|s| (0..s.q.len()).any(|row| visible(s, row) > 1))
    }
}

/// E4M3 codes of `(rows, heads, d)` in rows of a multiple of 16 bytes; NaN in rows that are not live and between rows.
fn codes(x: &[f32], descales: &[Descale], heads: usize, d: usize, live: &[bool]) -> Vec<u8> {
    let row_bytes = d.next_multiple_of(16);
    let mut codes = vec![0x7f; x.len() / d * row_bytes];
    for (at, (from, to)) in x.chunks(d).zip(codes.chunks_mut(row_bytes)).enumerate() {
        let descale = descales[at % heads * descales.len() / heads].get();
        if live[at / heads] {
            let code = |x: &f32| Format::E4m3.encode(x / descale, OnOverflow::Saturate);
            to.iter_mut().zip(from).for_each(|(to, x)| *to = code(x));
        }
    }
    codes
}

/// The call's tensors in device memory.
struct Memory {
    tensors: BackwardTensors,
    call: DeviceCall,
    workspace: View<1>,
    bytes: Vec<Buffer<u8>>,
    floats: Vec<Buffer<f32>>,
    lists: Vec<Buffer<i32>>,
}

/// Gradients and what they are compared with.
struct Result {
    have: [Vec<f32>; 4],
    want: [Vec<f64>; 4],
    /// What a gradient's size would be if nothing averaged out; its roundings are of that size.
    size: [f64; 4],
}

pub(super) fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

/// What the gradients of so many rows would be if nothing averaged out: products of typical operands over as many elements; a row of P
/// sums to one at most.
pub(super) fn gradient_sizes(call: &AttentionCall, rows: usize, [q, k, v]: [&[f64]; 3]) -> [f64; 4] {
    let rms = |x: &[f64]| norm(x.iter().copied()) / (x.len() as f64).sqrt();
    let AttentionShape { d_head, d_v, .. } = call.shape;
    let (rows, of_dp) = (rows as f64, rms(v) * (d_v as f64).sqrt());
    let of_ds = call.softmax_scale * of_dp * (rows * d_head as f64).sqrt();
    [of_ds * rms(k), of_ds * rms(q), 0.0, rows.sqrt() * of_dp]
}

impl Memory {
    fn new(engine: &BackwardEngine, random: &Random, unrounded: bool) -> (Self, Result) {
        let call = random.call();
        let AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v } = call.shape;
        let [live_q, live_k] = random.live();
        let data = Data::new(&call.shape, random.seed);
        let plan = data.plan(&AttentionCall { sequences: None, sinks: None, ..call }, 1.0);
        let x = dequantised(&call, &data.inputs(), &plan, OnOverflow::Saturate).unwrap();
        let [q, k, v] = [wide(&x.q), wide(&x.k), wide(&x.v)];
        let forward = reference(&call, &q, &k, &v).unwrap();
        let mut rng = StdRng::seed_from_u64(random.seed + 1);
        let mut draw = || bf16::from_f32(Distribution::<f32>::sample(&StandardNormal, &mut rng)).to_f32();
        let d_out: Vec<f32> = (0..call.shape.out_elements()).map(|_| draw()).collect();
        let want = reference_backward(&call, &q, &k, &v, &wide(&d_out)).unwrap();

        let alive = |at: usize| live_q[at / (n_q_heads * d_v)];
        let planted = |x: &dyn Fn(usize) -> f32| -> Vec<f32> {
            (0..d_out.len()).map(|at| if alive(at) { x(at) } else { f32::NAN }).collect()
        };
        let (out, planted_d_out) = (planted(&|at| forward.out[at] as f32), planted(&|at| d_out[at]));
        let of_lse = |at: usize| at / len_q / n_q_heads * len_q + at % len_q;
        let lse = forward.lse.iter().enumerate().map(|(at, &x)| if live_q[of_lse(at)] { x as f32 } else { f32::NAN });

        let device = device();
        let (mut bytes, mut floats) = (Vec::new(), Vec::new());
        let mut upload = |x: &[u8]| -> DevicePtr {
            bytes.push(device.upload(x).unwrap());
            bytes.last().unwrap().ptr()
        };
        // SAFETY of all views here: buffers of these sizes, which outlive the work since reading them waits.
        let mut operand = |x: &[f32], descales: &[Descale], heads: usize, length: usize, d: usize, live: &[bool]| {
            let row = d.next_multiple_of(16) as i64;
            let strides = [length as i64 * heads as i64 * row, heads as i64 * row, row, 1];
            unsafe {
                View::new(
                    upload(&codes(x, descales, heads, d, live)),
                    Element::E4m3,
                    [batch, length, heads, d],
                    strides,
                )
            }
        };
        let operands = &plan.operands;
        let q8 = operand(&data.q, &operands.q, n_q_heads, len_q, d_head, &live_q);
        let k8 = operand(&data.k, &operands.k, n_kv_heads, len_k, d_head, &live_k);
        let v8 = operand(&data.v, operands.v.as_ref().unwrap(), n_kv_heads, len_k, d_v, &live_k);
        let mut half = |x: &[u8], heads: usize, length: usize, d: usize| unsafe {
            View::dense(upload(x), Element::Bf16, [batch, length, heads, d])
        };
        let (out, d_out_view) =
            (half(&bf16_bytes(&out), n_q_heads, len_q, d_v), half(&bf16_bytes(&planted_d_out), n_q_heads, len_q, d_v));
        let mut poison =
            |heads: usize, length: usize, d: usize| half(&vec![0xff; 2 * batch * length * heads * d], heads, length, d);
        let (dq, dk, dv) =
            (poison(n_q_heads, len_q, d_head), poison(n_kv_heads, len_k, d_head), poison(n_kv_heads, len_k, d_v));

        let mut of_floats = |x: &[f32]| {
            floats.push(device.upload(x).unwrap());
            floats.last().unwrap().ptr()
        };
        let mut descale = |row: &[Descale]| {
            let at = of_floats(&row.iter().map(|d| d.get()).collect::<Vec<_>>());
            Some(unsafe { View::new(at, Element::F32, [batch, n_kv_heads], [0, 1]) })
        };
        let descales = Descales {
            q: descale(&operands.q),
            k: descale(&operands.k),
            v: descale(operands.v.as_ref().unwrap()),
            ..Descales::default()
        };
        let lse = unsafe { View::dense(of_floats(&lse.collect::<Vec<_>>()), Element::F32, [batch, n_q_heads, len_q]) };
        let mut of_heads = |x: Vec<f32>| unsafe { View::dense(of_floats(&x), Element::F32, [n_q_heads]) };
        let sinks = call.sinks.map(|sinks| of_heads(sinks.iter().map(|&x| x as f32).collect()));
        // The last buffer of floats.
        let d_sinks = call.sinks.map(|_| of_heads(vec![f32::NAN; n_q_heads]));
        let (lists, sequences) = call.sequences.map(|list| Sequences::upload(device, list).unwrap()).unzip();
        let lists = lists.into_iter().flatten().collect();
        let on_device = call.on_device(sequences, sinks, None).unwrap();
        // For engines that take it.
        let took =
            planted(&|at| f32::from(residual_code(forward.out[at] as f32, bf16::from_f32(forward.out[at] as f32))));
        let took: Vec<u8> = took.iter().map(|&code| code as i8 as u8).collect();
        let residual = unsafe { View::dense(upload(&took), Element::U8, [batch, len_q, n_q_heads, d_v]) };
        let scratch = scratch(engine.workspace_bytes(&on_device).unwrap());
        let workspace = unsafe { View::dense(scratch.ptr(), Element::U8, [scratch.len()]) };
        bytes.push(scratch);
        let tensors = BackwardTensors {
            q: q8,
            k: k8,
            v: v8,
            descales,
            lse,
            delta: if unrounded { Delta::Unrounded { out, residual } } else { Delta::Output(out) },
            d_out: d_out_view,
            dq,
            dk,
            dv,
            bounds: None,
            d_sinks,
        };

        let size = gradient_sizes(&call, live_q.iter().filter(|x| **x).count() * n_q_heads, [&q, &k, &v]);
        let want = [want.dq, want.dk, want.dv, want.d_sinks];
        let result = Result { have: [const { Vec::new() }; 4], want, size };
        (Self { tensors, call: on_device, workspace, bytes, floats, lists }, result)
    }

    fn launch(&self, engine: &BackwardEngine, stream: &Stream) {
        engine.backward(stream, &self.call, &self.tensors, &self.workspace).unwrap();
    }

    fn read(&self) -> [Vec<f32>; 4] {
        device().synchronize().unwrap();
        let half = |i: usize| -> Vec<f32> {
            let bytes = self.bytes[i].read().unwrap();
            bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        };
        let d_sinks = self.tensors.d_sinks.map(|_| self.floats.last().unwrap().read().unwrap());
        [half(5), half(6), half(7), d_sinks.unwrap_or_default()]
    }
}

impl Result {
    /// Products in BF16, sums in f32, gradients rounded to BF16, delta from an output in BF16.
    const ROUNDING: f64 = 8e-3;
    const OF_SIZE: f64 = 3e-3;
    /// Where no query sees two keys, dq and dk are nothing but the rounding of delta.
    const OF_SIZE_ONE_KEY: f64 = 8e-3;

    fn check(&self, random: &Random) {
        let AttentionShape { n_q_heads, n_kv_heads, d_head, d_v, .. } = random.call.shape;
        let [live_q, live_k] = random.live();
        let rows = [(&live_q, n_q_heads * d_head), (&live_k, n_kv_heads * d_head), (&live_k, n_kv_heads * d_v)];
        for (i, name) in ["dq", "dk", "dv", "d_sinks"].into_iter().enumerate() {
            let (have, want) = (&self.have[i], &self.want[i]);
            assert_eq!(have.len(), want.len());
            if let Some((live, width)) = rows.get(i) {
                let strays = have.iter().enumerate().filter(|(at, x)| !live[at / width] && **x != 0.0).count();
                assert_eq!(strays, 0, "{name} of rows that are read by nobody: {random:?}");
            }
            let error = norm(have.iter().zip(want).map(|(&a, b)| f64::from(a) - b));
            let of_size = if random.sees_two_keys() { Self::OF_SIZE } else { Self::OF_SIZE_ONE_KEY };
            let allowed = Self::ROUNDING * norm(want.iter().copied()) + of_size * self.size[i];
            assert!(error <= allowed, "{name} is off by {error:.3e} of {allowed:.3e}: {random:?}");
        }
    }
}

fn random_backward_calls() {
    let engines = [(false, false), (true, false), (false, true), (true, true)].map(|(deterministic, unrounded)| {
        let options = BackwardOptions {
            deterministic,
            keeps: if unrounded { Keeps::UnroundedDelta } else { Keeps::Operands },
            ..BackwardOptions::default()
        };
        BackwardEngine::new(device()).unwrap().with_options(options)
    });
    let (first, count) = (setting("SIGMASCALE_RANDOM_SEED", 1), setting("SIGMASCALE_RANDOM_BACKWARD", 60));
    for i in 0..count {
        let random = Random::draw(first + i);
        let unrounded = i % 4 == 1;
        let engine = &engines[usize::from(i % 3 == 0) + 2 * usize::from(unrounded)];
        gradients_of(&random, engine, unrounded);
    }
}

/// Gradients of one call; `unrounded`: with what rounding took from the output.
pub(super) fn gradients_of(random: &Random, engine: &BackwardEngine, unrounded: bool) {
    let (memory, mut result) = Memory::new(engine, random, unrounded);
    memory.launch(engine, &stream());
    result.have = memory.read();
    result.check(random);
}

/// A packed batch of 600 rows.
fn packed(cu_seqlens: &[usize]) -> Random {
    let shape = AttentionShape { batch: 1, n_q_heads: 4, n_kv_heads: 2, len_q: 600, len_k: 600, d_head: 128, d_v: 128 };
    Random {
        call: AttentionCall::causal(shape),
        sequences: Some(Sequence::packed(cu_seqlens, cu_seqlens, None).unwrap()),
        sinks: None,
        seed: 3,
    }
}

/// A graph finds the lists of sequences as they are when it runs.
fn sequences_may_change_between_replays() {
    let engine = BackwardEngine::new(device()).unwrap().with_deterministic(true);
    let [first, second] = [packed(&[0, 200, 500, 600]), packed(&[0, 400, 401, 590])];
    let (memory, _) = Memory::new(&engine, &first, false);
    let (other, _) = Memory::new(&engine, &second, false);
    other.launch(&engine, &stream());
    let want = other.read();
    engine.prepare(&memory.call).unwrap();
    let stream = stream();
    let graph = stream
        .capture(|stream| {
            memory.launch(&engine, stream);
            Ok(())
        })
        .unwrap();
    graph.launch().unwrap();
    stream.synchronize().unwrap();
    assert!(memory.read() != want);
    // The second call's lists, and what it reads: rows that are live there.
    memory.lists.iter().zip(&other.lists).for_each(|(to, from)| to.write(&from.read().unwrap()).unwrap());
    memory.bytes.iter().zip(&other.bytes).take(5).for_each(|(to, from)| to.write(&from.read().unwrap()).unwrap());
    memory.floats.iter().zip(&other.floats).for_each(|(to, from)| to.write(&from.read().unwrap()).unwrap());
    graph.launch().unwrap();
    stream.synchronize().unwrap();
    assert!(memory.read() == want);
}

/// Sequences that break their rule have no gradients that mean anything, but no block waits for keys that none has.
fn sequences_out_of_order_end() {
    let engine = BackwardEngine::new(device()).unwrap().with_deterministic(true);
    let random = packed(&[0, 200, 500, 600]);
    let (memory, _) = Memory::new(&engine, &random, false);
    memory.launch(&engine, &stream());
    let want = memory.read();
    let lists: Vec<Vec<i32>> = memory.lists.iter().map(|list| list.read().unwrap()).collect();
    let changes: [fn(&mut Vec<i32>); 4] = [
        |list| list.reverse(),
        |list| list.swap(0, 1),
        |list| list.fill(500),
        |list| list.iter_mut().for_each(|at| *at = -*at - 7),
    ];
    for change in changes {
        for lists_changed in [0..4, 0..2, 2..4, 0..1, 3..4] {
            for (i, (to, from)) in memory.lists.iter().zip(&lists).enumerate() {
                let mut list = from.clone();
                if lists_changed.contains(&i) {
                    change(&mut list);
                }
                to.write(&list).unwrap();
            }
            memory.launch(&engine, &stream());
            device().synchronize().unwrap();
        }
    }
    // And in order again, they have theirs.
    memory.lists.iter().zip(&lists).for_each(|(to, from)| to.write(from).unwrap());
    memory.launch(&engine, &stream());
    assert!(memory.read() == want);
}
