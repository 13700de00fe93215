//! The backward against the CPU's, and against itself.

use super::backward_calls::{gradient_sizes, norm};
use super::{Data, bf16_bytes, cuda, distance, on_device, scratch, stream, wide};
use crate::device;
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use sigmascale::Descale;
use sigmascale::attention::{
    AttentionCall, AttentionShape, BackwardPrecision, Dequantised, Gradients, Keeps, Mask, Precision, PvAccumulator,
    Saved, backward, dequantised, reference, reference_backward,
};
use sigmascale::cuda::{Buffer, Stream};
use sigmascale::device::attention::{
    BackwardEngine, BackwardOptions, BackwardTensors, Delta, Descales, Element, Keys, RowBounds, Tensors, View,
    Workspace, residual_code,
};
use sigmascale::fp8::{Format, OnOverflow};
use sigmascale::plan::ScalePlan;

tests![
    gradients_are_the_cpus,
    a_training_step_is_as_good_as_with_the_exact_output,
    rows_that_see_nothing_have_zero_gradients,
    nan_stays_in_its_row_and_head,
    deterministic_calls_repeat_bit_for_bit_also_from_a_graph,
    parts_have_the_gradients_of_the_whole_call,
    parts_of_several_threads_are_apart,
    dq_in_fp8_is_the_cpus,
    delta_of_the_unrounded_output_is_the_exact_one,
    random_calls_agree_with_the_cpu,
];

/// (batch, query heads, KV heads, queries, keys): ends of tiles on purpose, rows that see nothing, splits of few blocks.
const SHAPES: [(usize, usize, usize, usize, usize); 9] = [
    (2, 4, 2, 113, 203),
    (1, 6, 2, 799, 3),
    (1, 3, 3, 1023, 1024),
    (1, 8, 1, 1, 500),
    (2, 8, 1, 65, 129),
    (1, 5, 1, 64, 64),
    (3, 2, 2, 64, 257),
    (1, 2, 2, 300, 77),
    (1, 4, 1, 1000, 130),
];

fn cases() -> impl Iterator<Item = AttentionCall<'static>> {
    SHAPES.into_iter().flat_map(|(batch, n_q_heads, n_kv_heads, len_q, len_k)| {
        [64, 128, 192, 256].into_iter().flat_map(move |d_head| {
            let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v: d_head };
            [Mask::CAUSAL, Mask::NONE].map(|mask| AttentionCall { mask, ..AttentionCall::causal(shape) })
        })
    })
}

/// One call in device memory: E4M3 operands, an output and LSE, dO, gradients poisoned.
struct Memory {
    operands: [Buffer<u8>; 3],
    descales: [Buffer<f32>; 3],
    lse: Buffer<f32>,
    out: Buffer<u8>,
    delta: Buffer<f32>,
    d_out: Buffer<u8>,
    gradients: [Buffer<u8>; 3],
    workspace: Buffer<u8>,
}

fn codes(x: &[f32], descales: &[Descale], heads: usize, d: usize) -> Vec<u8> {
    let of = |i: usize| descales[(i / d) % heads * descales.len() / heads].get();
    x.iter().enumerate().map(|(i, x)| Format::E4m3.encode(x / of(i), OnOverflow::Saturate)).collect()
}

impl Memory {
    /// LSE by the GPU's own forward; output and delta exact, the output rounded to BF16.
    fn new(engine: &BackwardEngine, call: &AttentionCall, data: &Data, plan: &ScalePlan, d_out: &[f32]) -> Self {
        let AttentionShape { n_q_heads, n_kv_heads, d_head, .. } = call.shape;
        let device = device();
        let rows = [&plan.operands.q, &plan.operands.k, plan.operands.v.as_ref().unwrap()];
        let heads = [n_q_heads, n_kv_heads, n_kv_heads];
        let values = [&data.q, &data.k, &data.v];
        let operands = [0, 1, 2].map(|i| device.upload(&codes(values[i], rows[i], heads[i], d_head)).unwrap());
        let descales = rows.map(|row| device.upload(&row.iter().map(|d| d.get()).collect::<Vec<f32>>()).unwrap());
        let x = dequantised(call, &data.inputs(), plan, OnOverflow::Saturate).unwrap();
        let out = reference(call, &wide(&x.q), &wide(&x.k), &wide(&x.v)).unwrap().out;
        let delta = Self::delta(call, &out, d_out);
        let rounded: Vec<f32> = out.iter().map(|&x| x as f32).collect();
        let poison = |n: usize| device.upload(&vec![0xffu8; 2 * n]).unwrap();
        let (of_q, of_kv) = (call.shape.q_elements(), call.shape.k_elements());
        let memory = Self {
            operands,
            descales,
            lse: device.zeros(call.shape.lse_elements()).unwrap(),
            out: device.upload(&bf16_bytes(&rounded)).unwrap(),
            delta: device.upload(&delta).unwrap(),
            d_out: device.upload(&bf16_bytes(d_out)).unwrap(),
            gradients: [poison(of_q), poison(of_kv), poison(of_kv)],
            workspace: scratch(engine.workspace_bytes(&on_device(call)).unwrap()),
        };
        memory.forward(call, PvAccumulator::F16, &poison(of_q));
        memory
    }

    fn delta(call: &AttentionCall, out: &[f64], d_out: &[f32]) -> Vec<f32> {
        let AttentionShape { batch, n_q_heads, len_q, d_head, .. } = call.shape;
        let mut delta = vec![0.0; call.shape.lse_elements()];
        for (at, (o, d)) in out.chunks(d_head).zip(d_out.chunks(d_head)).enumerate() {
            let (row, head) = (at / n_q_heads, at % n_q_heads);
            assert!(row < batch * len_q);
            let dot: f64 = o.iter().zip(d).map(|(o, &d)| o * f64::from(d)).sum();
            delta[(row / len_q * n_q_heads + head) * len_q + row % len_q] = dot as f32;
        }
        delta
    }

    fn descales(&self, call: &AttentionCall) -> Descales {
        let shape = [call.shape.batch, call.shape.n_kv_heads];
        // SAFETY of all views here: buffers of these sizes, which outlive the work since reading them waits.
        let row = |x: &Buffer<f32>| Some(unsafe { View::new(x.ptr(), Element::F32, shape, [0, 1]) });
        let [q, k, v] = &self.descales;
        Descales { q: row(q), k: row(k), v: row(v), o: None, logit: None }
    }

    fn shapes(call: &AttentionCall) -> ([usize; 4], [usize; 4], [usize; 3]) {
        let AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, .. } = call.shape;
        ([batch, len_q, n_q_heads, d_head], [batch, len_k, n_kv_heads, d_head], [batch, n_q_heads, len_q])
    }

    fn operands(&self, call: &AttentionCall) -> [View<4>; 3] {
        let (q, kv, _) = Self::shapes(call);
        let shapes = [q, kv, kv];
        [0, 1, 2].map(|i| unsafe { View::dense(self.operands[i].ptr(), Element::E4m3, shapes[i]) })
    }

    fn forward(&self, call: &AttentionCall, accumulator: PvAccumulator, out: &Buffer<u8>) {
        let (of_q, _, of_lse) = Self::shapes(call);
        let [q, k, v] = self.operands(call);
        let bytes = Workspace::of(&on_device(call), Element::E4m3, accumulator, false).bytes;
        let scratch = scratch(bytes.max(Workspace::HEADER));
        let tensors = Tensors {
            q,
            keys: Keys::Rows { k, v },
            descales: self.descales(call),
            rope: None,
            accumulator,
            saved: None,
            out: unsafe { View::dense(out.ptr(), Element::Bf16, of_q) },
            lse: Some(unsafe { View::dense(self.lse.ptr(), Element::F32, of_lse) }),
            stats: None,
        };
        let workspace = unsafe { View::dense(scratch.ptr(), Element::U8, [bytes]) };
        cuda().launch(&stream(), &on_device(call), &tensors, &workspace).unwrap();
        device().synchronize().unwrap();
    }

    fn tensors(&self, call: &AttentionCall) -> BackwardTensors {
        let (of_q, of_kv, of_lse) = Self::shapes(call);
        let [q, k, v] = self.operands(call);
        let wide = |x: &Buffer<u8>, shape| unsafe { View::dense(x.ptr(), Element::Bf16, shape) };
        let [dq, dk, dv] = &self.gradients;
        BackwardTensors {
            q,
            k,
            v,
            descales: self.descales(call),
            lse: unsafe { View::dense(self.lse.ptr(), Element::F32, of_lse) },
            delta: Delta::Output(wide(&self.out, of_q)),
            d_out: wide(&self.d_out, of_q),
            dq: wide(dq, of_q),
            dk: wide(dk, of_kv),
            dv: wide(dv, of_kv),
            bounds: None,
            d_sinks: None,
        }
    }

    fn launch(&self, engine: &BackwardEngine, stream: &Stream, call: &AttentionCall, tensors: &BackwardTensors) {
        let workspace = unsafe { View::dense(self.workspace.ptr(), Element::U8, [self.workspace.len()]) };
        engine.backward(stream, &on_device(call), tensors, &workspace).unwrap();
    }

    /// The gradients. They are poison again afterwards, so that the next launch has to write all of them.
    fn read(&self) -> [Vec<u16>; 3] {
        device().synchronize().unwrap();
        let words = |x: &Buffer<u8>| {
            let bytes = x.read().unwrap();
            x.write(&vec![0xff; bytes.len()]).unwrap();
            bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect::<Vec<u16>>()
        };
        let [dq, dk, dv] = &self.gradients;
        [words(dq), words(dk), words(dv)]
    }
}

fn floats(words: &[u16]) -> Vec<f32> {
    words.iter().map(|&w| bf16::from_bits(w).to_f32()).collect()
}

fn output_gradient(call: &AttentionCall, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    let draw = |_| bf16::from_f32(Distribution::<f32>::sample(&StandardNormal, &mut rng)).to_f32();
    (0..call.shape.q_elements()).map(draw).collect()
}

pub(super) fn engine() -> BackwardEngine {
    BackwardEngine::new(device()).unwrap()
}

/// Gradients by the CPU, in f32 from the same E4M3 operands and the exact log-sum-exp, and how far those of the GPU may be.
fn expected(call: &AttentionCall, data: &Data, plan: &ScalePlan, d_out: &[f32]) -> (Gradients, [f64; 3]) {
    let x = dequantised(call, &data.inputs(), plan, OnOverflow::Saturate).unwrap();
    let [q, k, v] = [wide(&x.q), wide(&x.k), wide(&x.v)];
    let lse: Vec<f32> = reference(call, &q, &k, &v).unwrap().lse.iter().map(|&x| x as f32).collect();
    let (how, saved) = (BackwardPrecision::default(), Saved { out: &[], lse: &lse });
    let want = backward(call, &data.inputs(), plan, &Precision::KERNEL, &how, &saved, d_out).unwrap();
    let AttentionShape { batch, n_q_heads, len_q, len_k, .. } = call.shape;
    let rows = if call.mask.causal { len_q.min(len_k) } else { len_q };
    let [dq, dk, _, _] = gradient_sizes(call, batch * n_q_heads * rows, [&q, &k, &v]);
    let spread = (len_k as f64).sqrt();
    let of = |want: &[f32], size: f64| ROUNDING * norm(wide(want).into_iter()) + OF_SIZE * size / spread;
    let allowed = [of(&want.dq, dq), of(&want.dk, dk), of(&want.dv, 0.0)];
    (want, allowed)
}

fn check(call: &AttentionCall, have: &[Vec<u16>; 3], (want, allowed): &(Gradients, [f64; 3])) {
    for (i, (name, want)) in [("dq", &want.dq), ("dk", &want.dk), ("dv", &want.dv)].into_iter().enumerate() {
        let error = norm(floats(&have[i]).iter().zip(want).map(|(&a, &b)| f64::from(a) - f64::from(b)));
        assert!(error <= allowed[i], "{call:?} {name} is off by {error:.3e} of {:.3e}", allowed[i]);
    }
}

/// Products in BF16, sums in f32, gradients rounded to BF16; and what the tensor core's FP8 sums do to logits.
const ROUNDING: f64 = 8e-3;
/// The rounding of the output that delta comes from, of what dQ and dK would be without cancellation: all that they are
/// where a row sees one key. It shrinks as P spreads over more.
const OF_SIZE: f64 = 3e-3;

fn gradients_are_the_cpus() {
    let engines = [false, true].map(|deterministic| engine().with_deterministic(deterministic));
    cases().enumerate().for_each(|(seed, call)| gradients_of(&call, seed as u64, &engines));
}

/// Gradients of one call, with delta computed and given.
pub(super) fn gradients_of(call: &AttentionCall, seed: u64, engines: &[BackwardEngine]) {
    let data = Data::new(&call.shape, seed);
    let (plan, d_out) = (data.plan(call, 1.0), output_gradient(call, 1000 + seed));
    let want = expected(call, &data, &plan, &d_out);
    for engine in engines {
        let memory = Memory::new(engine, call, &data, &plan, &d_out);
        let given = BackwardTensors {
            delta: Delta::Given(unsafe { View::dense(memory.delta.ptr(), Element::F32, Memory::shapes(call).2) }),
            ..memory.tensors(call)
        };
        for tensors in [memory.tensors(call), given] {
            memory.launch(engine, &stream(), call, &tensors);
            check(call, &memory.read(), &want);
        }
    }
}

/// dQ where keys, values and dO share directions: with delta from the output of the F16 accumulator it is as good as with the exact
/// output in BF16. With that of `fp8-2048` it is not.
fn a_training_step_is_as_good_as_with_the_exact_output() {
    let engine = engine();
    for d_head in [64, 128] {
        let shape =
            AttentionShape { batch: 1, n_q_heads: 2, n_kv_heads: 1, len_q: 2048, len_k: 2048, d_head, d_v: d_head };
        let call = AttentionCall::causal(shape);
        let mut data = Data::new(&shape, 40);
        let mut d_out = output_gradient(&call, 41);
        // The first channel of keys and queries; an eighth of the values' channels.
        data.k.chunks_mut(d_head).for_each(|k| k[0] += 4.0);
        data.q.chunks_mut(d_head).for_each(|q| q[0] += q[1]);
        data.v.chunks_mut(d_head).for_each(|v| v[..d_head / 8].iter_mut().for_each(|v| *v -= 2.0));
        let shifted = |x: &mut f32| *x = bf16::from_f32(*x - 1.0).to_f32();
        d_out.chunks_mut(d_head).for_each(|d| d[..d_head / 8].iter_mut().for_each(shifted));
        let plan = data.plan(&call, 1.0);
        let x = dequantised(&call, &data.inputs(), &plan, OnOverflow::Saturate).unwrap();
        let want = reference_backward(&call, &wide(&x.q), &wide(&x.k), &wide(&x.v), &wide(&d_out)).unwrap().dq;
        let memory = Memory::new(&engine, &call, &data, &plan, &d_out);
        let error = || {
            memory.launch(&engine, &stream(), &call, &memory.tensors(&call));
            distance(&floats(&memory.read()[0]), &want)
        };
        let exact = error();
        let [f16, fp8] = [PvAccumulator::F16, PvAccumulator::Fp8 { promote_every: 2048 }].map(|accumulator| {
            memory.forward(&call, accumulator, &memory.out);
            error()
        });
        println!("d {d_head}: dq is off by {exact:.2e} with the exact output, {f16:.2e} f16, {fp8:.2e} fp8-2048");
        assert!(f16 <= 1.3 * exact + 5e-4 && fp8 >= 2.0 * exact, "d {d_head}: {exact:.2e} {f16:.2e} {fp8:.2e}");
    }
}

fn rows_that_see_nothing_have_zero_gradients() {
    for d_head in [64, 128] {
        let shape =
            AttentionShape { batch: 1, n_q_heads: 4, n_kv_heads: 2, len_q: 300, len_k: 77, d_head, d_v: d_head };
        let call = AttentionCall::causal(shape);
        let (data, engine) = (Data::new(&shape, 5), engine());
        let (plan, d_out) = (data.plan(&call, 1.0), output_gradient(&call, 6));
        let memory = Memory::new(&engine, &call, &data, &plan, &d_out);
        memory.launch(&engine, &stream(), &call, &memory.tensors(&call));
        let dq = floats(&memory.read()[0]);
        let (blind, seeing) = dq.split_at((300 - 77) * 4 * d_head);
        assert!(blind.iter().all(|&x| x == 0.0) && seeing.iter().filter(|&&x| x == 0.0).count() < seeing.len() / 8);
    }
}

fn nan_stays_in_its_row_and_head() {
    let shape = AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 512, len_k: 512, d_head: 128, d_v: 128 };
    let call = AttentionCall::causal(shape);
    let (data, engine) = (Data::new(&shape, 7), engine());
    let plan = data.plan(&call, 1.0);
    let mut d_out = output_gradient(&call, 8);
    d_out[(300 * 4 + 1) * 128 + 5] = f32::NAN;
    let memory = Memory::new(&engine, &call, &data, &plan, &d_out);
    memory.launch(&engine, &stream(), &call, &memory.tensors(&call));
    let rows = |words: &[u16]| -> Vec<usize> {
        let bad = |(_, row): &(usize, &[f32])| row.iter().any(|x| x.is_nan());
        floats(words).chunks(128).enumerate().filter(bad).map(|(at, _)| at).collect()
    };
    let [dq, dk, dv] = memory.read();
    assert_eq!(rows(&dq), [300 * 4 + 1]);
    assert_eq!(rows(&dk), (0..=300).map(|key| 2 * key).collect::<Vec<_>>(), "keys that the row sees, of its KV head");
    // 0 NaN of keys that share a block with these is NaN, too.
    assert_eq!(rows(&dv), (0..384).map(|key| 2 * key).collect::<Vec<_>>());
}

fn deterministic_calls_repeat_bit_for_bit_also_from_a_graph() {
    for d_head in [64, 128] {
        let shape =
            AttentionShape { batch: 2, n_q_heads: 8, n_kv_heads: 2, len_q: 1000, len_k: 1100, d_head, d_v: d_head };
        for mask in [Mask::CAUSAL, Mask::NONE] {
            let call = AttentionCall { mask, ..AttentionCall::causal(shape) };
            let (data, engine) = (Data::new(&shape, 9), engine().with_deterministic(true));
            let (plan, d_out) = (data.plan(&call, 1.0), output_gradient(&call, 10));
            let memory = Memory::new(&engine, &call, &data, &plan, &d_out);
            let tensors = memory.tensors(&call);
            let stream = stream();
            memory.launch(&engine, &stream, &call, &tensors);
            let first = memory.read();
            let graph = stream
                .capture(|stream| {
                    memory.launch(&engine, stream, &call, &tensors);
                    Ok(())
                })
                .unwrap();
            for _ in 0..3 {
                graph.launch().unwrap();
                stream.synchronize().unwrap();
                assert!(memory.read() == first, "d {d_head}, {mask:?}");
            }
        }
    }
}

/// A call in parts is so many calls: the same gradients, but for the order of sums.
fn parts_have_the_gradients_of_the_whole_call() {
    // The last is cut without being told.
    let limits = [(5, 4, 2, Some(1 << 20)), (1, 12, 6, Some(1 << 19)), (2, 6, 3, Some(1)), (40, 4, 4, None)];
    for (batch, n_q_heads, n_kv_heads, limit) in limits {
        for (d_head, deterministic) in [(64, false), (128, false), (128, true)] {
            let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q: 300, len_k: 411, d_head, d_v: d_head };
            parts_of(shape, limit, deterministic);
        }
    }
}

/// A call in parts of so many bytes of sums.
pub(super) fn parts_of(shape: AttentionShape, limit: Option<usize>, deterministic: bool) {
    let call = AttentionCall::causal(shape);
    let options = BackwardOptions { deterministic, ..BackwardOptions::default() };
    let [whole, cut] =
        [Some(usize::MAX), limit].map(|sums_limit| engine().with_options(BackwardOptions { sums_limit, ..options }));
    let bytes = [&whole, &cut].map(|engine| engine.workspace_bytes(&on_device(&call)).unwrap());
    assert!(bytes[1] < bytes[0], "{shape:?} is cut");
    let data = Data::new(&shape, 14);
    let (plan, d_out) = (data.plan(&call, 1.0), output_gradient(&call, 15));
    let memory = Memory::new(&whole, &call, &data, &plan, &d_out);
    let tensors = memory.tensors(&call);
    memory.launch(&whole, &stream(), &call, &tensors);
    let want = memory.read();
    for _ in 0..5 {
        memory.launch(&cut, &stream(), &call, &tensors);
        for (have, want) in memory.read().iter().zip(&want) {
            let error = distance(&floats(have), &wide(&floats(want)));
            assert!(error <= 1e-3, "{shape:?} {options:?}: {error:.2e}");
        }
    }
}

/// Threads share an engine, and every other one captures its calls: a capture must not take the parts of another thread's call.
fn parts_of_several_threads_are_apart() {
    let shape = AttentionShape { batch: 6, n_q_heads: 2, n_kv_heads: 2, len_q: 200, len_k: 200, d_head: 64, d_v: 64 };
    let (call, data) = (AttentionCall::causal(shape), Data::new(&shape, 16));
    let options = BackwardOptions { deterministic: true, sums_limit: Some(1), ..BackwardOptions::default() };
    let (engine, plan, d_out) = (engine().with_options(options), data.plan(&call, 1.0), output_gradient(&call, 17));
    let memories = [0; 4].map(|_| Memory::new(&engine, &call, &data, &plan, &d_out));
    memories[0].launch(&engine, &stream(), &call, &memories[0].tensors(&call));
    let want = memories[0].read();
    std::thread::scope(|scope| {
        for (index, memory) in memories.iter().enumerate() {
            let (call, engine) = (&call, &engine);
            scope.spawn(move || {
                let (stream, tensors) = (stream(), memory.tensors(call));
                let launch = |stream: &Stream| {
                    memory.launch(engine, stream, call, &tensors);
                    Ok(())
                };
                for _ in 0..200 {
                    if index % 2 == 0 {
                        launch(&stream).unwrap();
                        stream.synchronize().unwrap();
                    } else {
                        let graph = stream.capture(launch).unwrap();
                        graph.launch().unwrap();
                        stream.synchronize().unwrap();
                    }
                }
            });
        }
    });
    for memory in &memories {
        assert!(memory.read() == want);
    }
}

/// dQ of E4M3 codes of dS is the CPU's, whose specification it is, and dK and dV are what they are without.
fn dq_in_fp8_is_the_cpus() {
    let all = cases().filter(|call| call.shape.d_head <= 128);
    all.enumerate().for_each(|(seed, call)| dq_in_fp8_of(&call, seed as u64));
}

pub(super) fn dq_in_fp8_of(call: &AttentionCall, seed: u64) {
    let fp8 = engine().with_options(BackwardOptions { keeps: Keeps::Fp8Dq, ..BackwardOptions::default() });
    let data = Data::new(&call.shape, 100 + seed);
    let (plan, d_out) = (data.plan(call, 1.0), output_gradient(call, 2000 + seed));
    let x = dequantised(call, &data.inputs(), &plan, OnOverflow::Saturate).unwrap();
    let exact = reference(call, &wide(&x.q), &wide(&x.k), &wide(&x.v)).unwrap();
    let slopes = reference_backward(call, &wide(&x.q), &wide(&x.k), &wide(&x.v), &wide(&d_out)).unwrap();
    let lse: Vec<f32> = exact.lse.iter().map(|&x| x as f32).collect();
    let out: Vec<f32> = exact.out.iter().map(|&x| bf16::from_f64(x).to_f32()).collect();
    let how = BackwardPrecision::after(Keeps::Fp8Dq);
    let saved = Saved { out: &out, lse: &lse };
    let want = backward(call, &data.inputs(), &plan, &Precision::KERNEL, &how, &saved, &d_out).unwrap();

    let memory = Memory::new(&fp8, call, &data, &plan, &d_out);
    let plain = memory.tensors(call);
    memory.launch(&engine(), &stream(), call, &plain);
    let [_, dk, dv] = memory.read();
    let (rows, norms) = (largest_p(call, &x, &exact.lse), value_norms(call, &x));
    let [rows, norms] = [rows, norms].map(|x| device().upload(&x).unwrap());
    let AttentionShape { batch, n_kv_heads, .. } = call.shape;
    // SAFETY: as in `descales`.
    let bounds = unsafe {
        RowBounds {
            row_max: View::dense(rows.ptr(), Element::F32, Memory::shapes(call).2),
            value_norm: Some(View::dense(norms.ptr(), Element::F32, [batch, n_kv_heads])),
        }
    };
    memory.launch(&fp8, &stream(), call, &BackwardTensors { bounds: Some(bounds), ..plain });
    let have = memory.read();
    assert!(have[1] == dk && have[2] == dv, "{call:?}");
    let (have, own) = (floats(&have[0]), distance(&want.dq, &slopes.dq));
    let (error, apart) = (distance(&have, &slopes.dq), distance(&have, &wide(&want.dq)));
    // Rows of few keys have dS of the rounding alone.
    let few = call.shape.len_k <= 3;
    assert!(few || (0.7 * own..1.4 * own).contains(&error), "{call:?}: {error:.2e}, the CPU {own:.2e}");
    assert!(few || apart <= 0.6 * own + ROUNDING, "{call:?}: {apart:.2e} from the CPU, whose error is {own:.2e}");
    // Without a bound on v the codes use less of their range.
    memory.launch(
        &fp8,
        &stream(),
        call,
        &BackwardTensors { bounds: Some(RowBounds { value_norm: None, ..bounds }), ..plain },
    );
    let loose = distance(&floats(&memory.read()[0]), &slopes.dq);
    assert!(few || loose <= 3.0 * own + ROUNDING, "{call:?}: {loose:.2e} without a bound on v");
}

/// With what rounding took from the output, gradients are those of the exact delta, nearly bit for bit; without, dQ and dK are not.
fn delta_of_the_unrounded_output_is_the_exact_one() {
    cases().enumerate().for_each(|(seed, call)| delta_unrounded_of(&call, seed as u64));
}

pub(super) fn delta_unrounded_of(call: &AttentionCall, seed: u64) {
    let plain = engine().with_deterministic(true);
    let options = BackwardOptions { deterministic: true, keeps: Keeps::UnroundedDelta, ..BackwardOptions::default() };
    let unrounded = engine().with_options(options);
    let data = Data::new(&call.shape, 300 + seed);
    let (plan, d_out) = (data.plan(call, 1.0), output_gradient(call, 3000 + seed));
    let memory = Memory::new(&plain, call, &data, &plan, &d_out);
    let x = dequantised(call, &data.inputs(), &plan, OnOverflow::Saturate).unwrap();
    let out = reference(call, &wide(&x.q), &wide(&x.k), &wide(&x.v)).unwrap().out;
    let took = out.iter().map(|&x| residual_code(x as f32, bf16::from_f32(x as f32)) as u8);
    let residual = device().upload(&took.collect::<Vec<_>>()).unwrap();
    let (of_q, _, of_lse) = Memory::shapes(call);
    let tensors = memory.tensors(call);
    let Delta::Output(rounded) = tensors.delta else { unreachable!("as it is made") };
    // SAFETY: as in `descales`.
    let [given, kept] = unsafe {
        let residual = View::dense(residual.ptr(), Element::U8, of_q);
        [
            Delta::Given(View::dense(memory.delta.ptr(), Element::F32, of_lse)),
            Delta::Unrounded { out: rounded, residual },
        ]
    };
    let run = |engine: &BackwardEngine, delta: Delta| {
        memory.launch(engine, &stream(), call, &BackwardTensors { delta, ..tensors });
        memory.read()
    };
    let (exact, without, with) = (run(&plain, given), run(&plain, tensors.delta), run(&unrounded, kept));
    assert!(with[2] == exact[2], "{call:?}: dV does not depend on delta");
    for (i, name) in ["dq", "dk"].into_iter().enumerate() {
        let far = |from: &[Vec<u16>; 3]| {
            norm(floats(&from[i]).iter().zip(floats(&exact[i])).map(|(&a, b)| f64::from(a) - f64::from(b)))
        };
        let (with, without) = (far(&with), far(&without));
        assert!(with <= 0.3 * without, "{call:?} {name}: {with:.2e} from the exact delta's, {without:.2e} without");
    }
}

/// The base-2 logarithm of each row's largest P, `(batch, heads_q, len_q)`.
fn largest_p(call: &AttentionCall, x: &Dequantised, lse: &[f64]) -> Vec<f32> {
    let AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, .. } = call.shape;
    let dot = |q: &[f32], k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
    let mut all = Vec::new();
    for (b, head) in (0..batch).flat_map(|b| (0..n_q_heads).map(move |head| (b, head))) {
        for row in 0..len_q {
            let q = &x.q[((b * len_q + row) * n_q_heads + head) * d_head..][..d_head];
            let seen = if call.mask.causal { (row + 1 + len_k).saturating_sub(len_q).min(len_k) } else { len_k };
            let kv = head * n_kv_heads / n_q_heads;
            let key = |j: usize| &x.k[((b * len_k + j) * n_kv_heads + kv) * d_head..][..d_head];
            let top = (0..seen).map(|j| call.softmax_scale * dot(q, key(j))).fold(f64::NEG_INFINITY, f64::max);
            all.push(((top - lse[all.len()]) * std::f64::consts::LOG2_E) as f32);
        }
    }
    all
}

/// The largest |v_j| of each KV head, `(batch, heads_kv)`.
fn value_norms(call: &AttentionCall, x: &Dequantised) -> Vec<f32> {
    let AttentionShape { batch, n_kv_heads, len_k, d_v, .. } = call.shape;
    let norm = |v: &[f32]| v.iter().map(|v| v * v).sum::<f32>().sqrt();
    let of = |b: usize, head: usize| {
        (0..len_k).map(|j| norm(&x.v[((b * len_k + j) * n_kv_heads + head) * d_v..][..d_v])).fold(0.0, f32::max)
    };
    (0..batch).flat_map(|b| (0..n_kv_heads).map(move |head| (b, head))).map(|(b, head)| of(b, head)).collect()
}

fn random_calls_agree_with_the_cpu() {
    let mut rng = StdRng::seed_from_u64(11);
    let engine = engine();
    for seed in 0..40 {
        let n_kv_heads = rng.random_range(1..=3);
        let (batch, n_q_heads) = (rng.random_range(1..=2), n_kv_heads * rng.random_range(1..=4));
        let (len_q, len_k) = (rng.random_range(1..=400), rng.random_range(16..=400));
        let d_head = if rng.random_bool(0.5) { 64 } else { 128 };
        let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v: d_head };
        let mask = if rng.random_bool(0.7) { Mask::CAUSAL } else { Mask::NONE };
        let call = AttentionCall { mask, ..AttentionCall::causal(shape) };
        let data = Data::new(&shape, seed);
        let (plan, d_out) = (data.plan(&call, 1.0), output_gradient(&call, seed));
        let want = expected(&call, &data, &plan, &d_out);
        let memory = Memory::new(&engine, &call, &data, &plan, &d_out);
        memory.launch(&engine, &stream(), &call, &memory.tensors(&call));
        check(&call, &memory.read(), &want);
    }
}
