//! Random shapes against a plain kernel on the GPU (`kernels/attention/reference.cu`), which says for each element how far
//! rounding may take it.
//!
//! `SIGMASCALE_RANDOM_SHAPES` sets how many (200), `SIGMASCALE_RANDOM_SEED` which.

use crate::device;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use sigmascale::attention::{AttentionCall, AttentionShape, Mask, PvAccumulator};
use sigmascale::cuda::sources::Source;
use sigmascale::cuda::{Arg, Buffer, Kernel, Launch, Stream};
use sigmascale::device::attention::{Cuda, Descales, Element, Tensors, View, Workspace};
use sigmascale::fp8::{Format, OnOverflow};
use sigmascale::stats::stats_words;

const REFERENCE: Source =
    Source { name: "attention/reference", text: include_str!("../../../kernels/attention/reference.cu") };
/// Elements of the largest q (and k, v) drawn.
const ELEMENTS: usize = 1 << 20;
const GUARD_WORDS: usize = 64;
/// Room for the parts of any split call.
const PARTS_BYTES: usize = 64 << 20;
/// Multiprocessors that the backends take.
const PROCESSORS: [usize; 4] = [1, 3, 10, usize::MAX];
/// A NaN in every format.
const POISON: u32 = 0x7fff_7fff;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().unwrap())
}

/// A call drawn at random.
#[derive(Clone, Copy, Debug)]
struct Case {
    shape: AttentionShape,
    causal: bool,
    softmax_scale: f32,
    logits_e4m3: bool,
    out_e4m3: bool,
    telemetry: bool,
    accumulator: PvAccumulator,
    /// Whether few rows are split.
    split: bool,
    /// Which of the bench's backends: blocks that take one tile after another go through more of the kernel.
    backend: usize,
    /// Where q, k and v start among the random codes. Keys never overlap queries: q = k is no random case.
    offsets: [usize; 3],
}

impl Case {
    fn draw(rng: &mut StdRng) -> Self {
        let d_head = if rng.random_bool(0.5) { 64 } else { 128 };
        let n_kv_heads = rng.random_range(1..=4);
        let n_q_heads = n_kv_heads * rng.random_range(1..=6);
        let batch = rng.random_range(1..=3);
        let length = |rng: &mut StdRng, heads: usize| {
            let most = (ELEMENTS / (batch * heads * d_head)).min(2500);
            // Short and long alike, and often at the edge of a tile.
            let any = 2f64.powf(rng.random_range(0.0..(most as f64).log2())) as usize;
            let edge = (any / 64 * 64 + rng.random_range(0..3)).saturating_sub(1);
            if rng.random_bool(0.3) { edge.clamp(1, most) } else { any.clamp(1, most) }
        };
        let (len_q, mut len_k) = (length(rng, n_q_heads), length(rng, n_kv_heads));
        let logits_e4m3 = rng.random_bool(0.25);
        // Long keys have a tile of their own there.
        let most = (ELEMENTS / (batch * n_kv_heads * d_head)).min(3500);
        if logits_e4m3 && d_head == 128 && most >= 2048 && rng.random_bool(0.7) {
            len_k = rng.random_range(2048..=most);
        }
        let out_e4m3 = rng.random_bool(0.3);
        let accumulator = match rng.random_range(0..8) {
            0..3 if !logits_e4m3 && !out_e4m3 => PvAccumulator::F16,
            7 => PvAccumulator::Fp8 { promote_every: 2048 },
            6 => PvAccumulator::Fp8 { promote_every: 128 },
            _ => PvAccumulator::default(),
        };
        Self {
            accumulator,
            shape: AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head },
            causal: rng.random_bool(0.5),
            softmax_scale: (d_head as f32).sqrt().recip() * rng.random_range(0.2..2.0),
            logits_e4m3,
            out_e4m3,
            telemetry: logits_e4m3 || rng.random_bool(0.5),
            split: rng.random_bool(0.5),
            backend: rng.random_range(0..PROCESSORS.len()),
            offsets: [(); 3].map(|()| rng.random_range(0..ELEMENTS / 256) * 256),
        }
    }
}

/// Memory that serves every case.
struct Bench {
    /// Whole, then split.
    attention: [[Cuda; PROCESSORS.len()]; 2],
    stream: Stream,
    kernels: [Kernel; 3],
    codes: Buffer<u8>,
    /// Descales of q, k, v and o by (batch, KV head), then of the logits.
    descales: Buffer<f32>,
    out: Buffer<u8>,
    lse: Buffer<f32>,
    stats: Buffer<u32>,
    workspace: Buffer<u8>,
    reference: Buffer<f32>,
    room: Buffer<f32>,
    reference_lse: Buffer<f32>,
    lse_room: Buffer<f32>,
    extremes: Buffer<u32>,
    verdict: Buffer<u32>,
}

impl Bench {
    fn new(rng: &mut StdRng) -> Self {
        let device = device();
        let module = device.module(REFERENCE, &[]).unwrap();
        let kernels = ["attention_reference", "compare", "fill"].map(|name| module.kernel(name).unwrap());
        let codes: Vec<u8> =
            (0..4 * ELEMENTS).map(|_| Format::E4m3.encode(StandardNormal.sample(rng), OnOverflow::Saturate)).collect();
        let rows = ELEMENTS / 64;
        let stream = device.stream().unwrap();
        Self {
            attention: [false, true]
                .map(|split| PROCESSORS.map(|n| Cuda::new(device).unwrap().with_processors(n).with_split(split))),
            kernels,
            codes: device.upload(&codes).unwrap(),
            descales: device.zeros(4 * 12 + 24).unwrap(),
            out: device.zeros(2 * ELEMENTS + 4 * GUARD_WORDS).unwrap(),
            lse: device.zeros(rows + GUARD_WORDS).unwrap(),
            stats: device.zeros(stats_words(24, 4)).unwrap(),
            workspace: device.zeros(Workspace::HEADER + 2 * ELEMENTS + 16 * 128 * 12 + PARTS_BYTES).unwrap(),
            reference: device.zeros(ELEMENTS).unwrap(),
            room: device.zeros(ELEMENTS).unwrap(),
            reference_lse: device.zeros(rows).unwrap(),
            lse_room: device.zeros(rows).unwrap(),
            extremes: device.zeros(8 * 24).unwrap(),
            verdict: device.zeros(6).unwrap(),
            stream,
        }
    }

    fn fill(&self, buffer: &Buffer<impl bytemuck::Pod>, words: usize) {
        let args = [Arg::Ptr(buffer.ptr()), Arg::U32(POISON), Arg::U32(words as u32)];
        // SAFETY: the arguments are the kernel's, and the buffer has the words.
        unsafe { self.kernels[2].launch(&self.stream, Launch::linear(words.div_ceil(128), 128, 0), &args).unwrap() };
    }

    /// What is wrong with a case; nothing if all is well.
    fn check(&mut self, case: &Case, rng: &mut StdRng) -> Vec<String> {
        let shape = case.shape;
        let AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head } = shape;
        let element = if case.out_e4m3 { Element::E4m3 } else { Element::Bf16 };
        let out_words = shape.q_elements() * element.size() / 4;
        let mut descales: Vec<f32> = (0..self.descales.len()).map(|_| rng.random_range(0.5..1.5)).collect();
        descales[36..48].iter_mut().for_each(|x| *x *= 0.02);
        // Some heads' logits pass 448 of these.
        descales[48..].iter_mut().for_each(|x| *x *= 0.01);
        self.descales.write(&descales).unwrap();
        self.stats.write(&vec![0; self.stats.len()]).unwrap();
        self.extremes.write(&vec![0; self.extremes.len()]).unwrap();
        self.verdict.write(&[0; 6]).unwrap();
        self.device_idle();
        self.fill(&self.out, out_words + GUARD_WORDS);
        self.fill(&self.lse, shape.lse_elements() + GUARD_WORDS);

        let [q, k, v] = case.offsets;
        let at = [q, 2 * ELEMENTS + k, 2 * ELEMENTS + v].map(|offset| self.codes.at(offset));
        let words = stats_words(n_q_heads, n_kv_heads);
        // SAFETY: all buffers outlive the work, which `read` waits for, and hold what the extents say.
        let (tensors, workspace) = unsafe {
            let row = |i: usize| {
                let strides = [n_kv_heads as i64, 1];
                Some(View::new(self.descales.at(12 * i), Element::F32, [batch, n_kv_heads], strides))
            };
            let tensors = Tensors {
                q: View::dense(at[0], Element::E4m3, [batch, len_q, n_q_heads, d_head]),
                k: View::dense(at[1], Element::E4m3, [batch, len_k, n_kv_heads, d_head]),
                v: View::dense(at[2], Element::E4m3, [batch, len_k, n_kv_heads, d_head]),
                descales: Descales {
                    q: row(0),
                    k: row(1),
                    v: row(2),
                    o: row(3),
                    logit: case.logits_e4m3.then(|| View::dense(self.descales.at(48), Element::F32, [n_q_heads])),
                },
                rope: None,
                accumulator: case.accumulator,
                saved: None,
                out: self.out.view(element, [batch, len_q, n_q_heads, d_head]).unwrap(),
                lse: Some(self.lse.view(Element::F32, [batch, n_q_heads, len_q]).unwrap()),
                stats: case.telemetry.then(|| self.stats.view(Element::U32, [words]).unwrap()),
            };
            (tensors, self.workspace.view(Element::U8, [self.workspace.len()]).unwrap())
        };
        let mask = Mask { causal: case.causal, window: None };
        let call = AttentionCall { shape, mask, softmax_scale: f64::from(case.softmax_scale), soft_cap: None };
        self.attention[usize::from(case.split)][case.backend]
            .launch(&self.stream, &call, &tensors, &workspace)
            .unwrap();

        let sizes = Arg::Words([
            batch as u32,
            n_q_heads as u32,
            n_kv_heads as u32,
            len_q as u32,
            len_k as u32,
            d_head as u32,
            case.causal.into(),
            case.softmax_scale.to_bits(),
            case.logits_e4m3.into(),
            (case.accumulator == PvAccumulator::F16).into(),
            0,
            0,
        ]);
        let ptr = |buffer: &Buffer<f32>| Arg::Ptr(buffer.ptr());
        let descale = |i: usize| Arg::Ptr(self.descales.at(i));
        let args = [
            Arg::Ptr(at[0]),
            Arg::Ptr(at[1]),
            Arg::Ptr(at[2]),
            descale(0),
            descale(12),
            descale(24),
            descale(48),
            ptr(&self.reference),
            ptr(&self.reference_lse),
            ptr(&self.room),
            ptr(&self.lse_room),
            Arg::Ptr(self.extremes.ptr()),
            sizes,
        ];
        let grid = (len_q as u32, n_q_heads as u32, batch as u32);
        // The compiler reads four keys at a time, past the last too.
        let launch = Launch { grid, block: 128, shared: 8 * len_k as u32 + 16 };
        // SAFETY: the arguments are the kernel's, and the buffers hold what the sizes say.
        unsafe { self.kernels[0].launch(&self.stream, launch, &args).unwrap() };
        let args = [
            Arg::Ptr(self.out.ptr()),
            Arg::U32(case.out_e4m3.into()),
            descale(36),
            ptr(&self.reference),
            ptr(&self.room),
            ptr(&self.lse),
            ptr(&self.reference_lse),
            ptr(&self.lse_room),
            Arg::U32(POISON),
            Arg::Ptr(self.verdict.ptr()),
            sizes,
        ];
        // SAFETY: as above.
        unsafe { self.kernels[1].launch(&self.stream, Launch::linear(64, 128, 0), &args).unwrap() };

        let verdict = self.verdict.read().unwrap();
        let mut complaints = Vec::new();
        for (what, count) in ["output elements", "LSE rows", "words past the end"].into_iter().zip(&verdict) {
            if *count > 0 {
                complaints.push(format!("{count} {what} (worst {:.2} of its room)", f32::from_bits(verdict[3])));
            }
        }
        let (error2, reference2) = (f32::from_bits(verdict[4]), f32::from_bits(verdict[5]));
        // Rounding errors of single keys average out; what is left of a systematic error does not.
        if !case.logits_e4m3 && error2.sqrt() > 4.5e-2 * reference2.sqrt() + 1e-20 {
            complaints.push(format!("relative RMS error {:.3e}", (error2 / reference2).sqrt()));
        }
        if case.telemetry {
            let (stats, extremes) = (self.stats.read().unwrap(), self.extremes.read().unwrap());
            let rows = stats.chunks_exact(4).zip(extremes.chunks_exact(8)).take(n_q_heads).enumerate();
            complaints.extend(
                rows.filter_map(|(head, (s, e))| telemetry_differs(s, e, case).map(|m| format!("head {head}: {m}"))),
            );
        }
        complaints
    }

    fn device_idle(&self) {
        device().synchronize().unwrap();
    }
}

/// Telemetry words of a head against the plain kernel's.
fn telemetry_differs(stats: &[u32], plain: &[u32], case: &Case) -> Option<String> {
    let value = |bits: u32| f32::from_bits(if bits & 0x8000_0000 != 0 { bits & 0x7fff_ffff } else { !bits });
    let error = f32::from_bits(plain[4]) + 1e-5;
    for (name, have, want, some) in [
        ("max", value(stats[0]), value(plain[0]), [stats[0], plain[0]]),
        ("min", value(!stats[1]), value(!plain[1]), [stats[1], plain[1]]),
    ] {
        let agree =
            some == [0, 0] || (some.iter().all(|&w| w != 0) && (have - want).abs() <= error + 1e-5 * want.abs());
        if !agree {
            return Some(format!("{name} logit {have} for {want}, error at most {error:.1e}"));
        }
    }
    let (amax, want) = (f32::from_bits(stats[2]), f32::from_bits(plain[5]));
    if (amax - want).abs() > f32::from_bits(plain[6]) + 1e-5 * want {
        return Some(format!("amax of o {amax} for {want}"));
    }
    let (past, close) = (plain[2], plain[3]);
    if case.logits_e4m3 && !(past..=past + close).contains(&stats[3]) {
        return Some(format!("{} logits past 448, for {past} to {}", stats[3], past + close));
    }
    None
}

/// Output, LSE and telemetry of random calls; outputs are poisoned before, and guarded behind.
pub fn random_shapes() {
    let seed = setting("SIGMASCALE_RANDOM_SEED", 1);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut bench = Bench::new(&mut rng);
    let mut failures = Vec::new();
    let count = setting("SIGMASCALE_RANDOM_SHAPES", 200);
    for index in 0..count {
        let case = Case::draw(&mut rng);
        let complaints = bench.check(&case, &mut rng);
        if !complaints.is_empty() {
            failures.push(format!("{index}: {case:?}: {}", complaints.join("; ")));
        }
    }
    println!("{count} random shapes, seed {seed}: {} failures", failures.len());
    assert!(failures.is_empty(), "{}", failures[..failures.len().min(20)].join("\n"));
}
