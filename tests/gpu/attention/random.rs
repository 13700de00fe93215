//! Random shapes against a plain kernel on the GPU (`kernels/attention/reference.cu`), which says for each element how far
//! rounding may take it. Windows, sequences of unequal length, sinks and soft-caps are drawn as well, on operands that are NaN wherever
//! nothing may be read.
//!
//! `SIGMASCALE_RANDOM_SHAPES` sets how many (200), `SIGMASCALE_RANDOM_SEED` which.

use crate::device;
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use sigmascale::attention::{AttentionShape, Mask, Padding, PvAccumulator, Sequence};
use sigmascale::cuda::{Arg, Buffer, DevicePtr, Kernel, Launch, Source, Stream};
use sigmascale::device::attention::{
    Cuda, Descales, DeviceCall, Element, Keys, SavedOperands, SavedRows, Sequences, Tensors, View, Workspace,
};
use sigmascale::fp8::{Format, OnOverflow};
use sigmascale::stats::stats_words;

tests![random_shapes,];

const REFERENCE: Source =
    Source { name: "attention/reference", text: include_str!("../../../kernels/attention/reference.cu") };
/// Elements of the largest q (and k, v) drawn.
const ELEMENTS: usize = 1 << 20;
const GUARD_WORDS: usize = 64;
/// No limit, for the plain kernel.
const NO_WINDOW: u32 = 1 << 28;
/// Room for the parts of any split call.
const PARTS_BYTES: usize = 64 << 20;
/// Multiprocessors that the backends take.
const PROCESSORS: [usize; 4] = [1, 3, 10, usize::MAX];
/// A NaN in every format.
const POISON: u32 = 0x7fff_7fff;

pub(super) fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().unwrap())
}

/// A call drawn at random.
#[derive(Clone, Debug)]
struct Case {
    shape: AttentionShape,
    mask: Mask,
    softmax_scale: f32,
    soft_cap: Option<f32>,
    sinks: bool,
    sequences: Option<Vec<Sequence>>,
    /// Operands in BF16, and whether the cast leaves its own; else E4M3.
    cast: Option<bool>,
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
        const DIMS: [usize; 14] = [16, 32, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256];
        let any = |rng: &mut StdRng| DIMS[rng.random_range(0..DIMS.len())];
        let (d_head, d_v) = match rng.random_range(0..8) {
            0..2 => (64, 64),
            2..4 => (128, 128),
            4 => (192, 128),
            5 => (any(rng), any(rng)),
            _ => [any(rng); 2].into(),
        };
        let widest = d_head.max(d_v);
        let n_kv_heads = rng.random_range(1..=4);
        let n_q_heads = n_kv_heads * rng.random_range(1..=6);
        let batch = rng.random_range(1..=3);
        let length = |rng: &mut StdRng, heads: usize| {
            let most = (ELEMENTS / (batch * heads * widest)).min(2500);
            // Short and long alike, and often at the edge of a tile.
            let any = 2f64.powf(rng.random_range(0.0..(most as f64).log2())) as usize;
            let edge = (any / 64 * 64 + rng.random_range(0..3)).saturating_sub(1);
            if rng.random_bool(0.3) { edge.clamp(1, most) } else { any.clamp(1, most) }
        };
        let (len_q, mut len_k) = (length(rng, n_q_heads), length(rng, n_kv_heads));
        let logits_e4m3 = rng.random_bool(0.25);
        // Long keys have a tile of their own there.
        let most = (ELEMENTS / (batch * n_kv_heads * widest)).min(3500);
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
        let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v };
        Self {
            accumulator,
            mask: draw_mask(rng, len_k),
            soft_cap: rng.random_bool(0.25).then(|| rng.random_range(2.0..30.0)),
            sinks: rng.random_bool(0.3),
            sequences: rng.random_bool(0.5).then(|| draw_sequences(rng, &shape)),
            cast: rng.random_bool(0.3).then(|| rng.random_bool(0.5)),
            shape,
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

fn draw_mask(rng: &mut StdRng, len_k: usize) -> Mask {
    let mut window = |chance: f64| {
        let any = 2f64.powf(rng.random_range(0.0..(len_k as f64).log2() + 1.0)) as usize - 1;
        rng.random_bool(chance).then_some(any)
    };
    let (window_left, window_right) = (window(0.4), window(0.2));
    Mask { causal: rng.random_bool(0.5), window_left, window_right }
}

/// Padded on either side, or somewhere in the entries of the batch: packed where there is one. Lengths of 0 and 1 are frequent.
fn draw_sequences(rng: &mut StdRng, shape: &AttentionShape) -> Vec<Sequence> {
    let mut length = |most: usize| match rng.random_range(0..10) {
        0 => 0,
        1 => 1.min(most),
        2 => most,
        _ => rng.random_range(0..=most),
    };
    let style = length(3);
    if style < 2 {
        let side = if style == 0 { Padding::Left } else { Padding::Right };
        let mut lengths = |most| (0..shape.batch).map(|_| length(most)).collect::<Vec<_>>();
        let (q, k) = (lengths(shape.len_q), lengths(shape.len_k));
        return Sequence::padded(shape, &q, &k, side).unwrap();
    }
    let mut all = Vec::new();
    for b in 0..shape.batch {
        let count = 1 + length(if shape.len_q > 200 { 12 } else { 4 });
        // Sorted ends: two of a sequence, gaps between sequences; where packed, none.
        let mut ends = |len: usize| {
            let mut ends: Vec<usize> = (0..2 * count).map(|_| b * len + length(len)).collect();
            ends.sort_unstable();
            if style == 3 {
                (0..count).for_each(|i| ends[2 * i] = if i == 0 { b * len } else { ends[2 * i - 1] });
            }
            ends
        };
        let (q, k) = (ends(shape.len_q), ends(shape.len_k));
        all.extend(q.chunks(2).zip(k.chunks(2)).map(|(q, k)| Sequence { q: q[0]..q[1], k: k[0]..k[1] }));
    }
    all
}

/// Memory that serves every case.
struct Bench {
    /// Whole, then split.
    attention: [[Cuda; PROCESSORS.len()]; 2],
    stream: Stream,
    kernels: [Kernel; 3],
    codes: Vec<u8>,
    sinks: Buffer<f32>,
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
        let rows = ELEMENTS / 16;
        let stream = device.stream().unwrap();
        Self {
            attention: [false, true]
                .map(|split| PROCESSORS.map(|n| Cuda::new(device).unwrap().with_processors(n).with_split(split))),
            kernels,
            codes,
            sinks: device.zeros(24).unwrap(),
            descales: device.zeros(4 * 12 + 24).unwrap(),
            out: device.zeros(2 * ELEMENTS + 4 * GUARD_WORDS).unwrap(),
            lse: device.zeros(rows + GUARD_WORDS).unwrap(),
            stats: device.zeros(stats_words(24, 4)).unwrap(),
            workspace: device.zeros(Workspace::HEADER + 20 * ELEMENTS + PARTS_BYTES).unwrap(),
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
        let AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v } = shape;
        let element = if case.out_e4m3 { Element::E4m3 } else { Element::Bf16 };
        let out_words = shape.out_elements() * element.size() / 4;
        let mut descales: Vec<f32> = (0..self.descales.len()).map(|_| rng.random_range(0.5..1.5)).collect();
        descales[36..48].iter_mut().for_each(|x| *x *= 0.02);
        // Some heads' logits pass 448 of these.
        descales[48..].iter_mut().for_each(|x| *x *= 0.01);
        if case.cast.is_some() {
            // Powers of two: a code times its descale is exact in BF16, and what the cast makes of it is the code.
            descales[..36].fill_with(|| 2f32.powi(rng.random_range(-3..=1)));
        }
        let sinks: Vec<f32> = (0..24).map(|_| rng.random_range(-6.0..12.0)).collect();
        self.sinks.write(&sinks).unwrap();
        let visible = Visible::of(case);
        let operands = visible.operands(case, &self.codes);
        let plain = operands.each_ref().map(|codes| device().upload(codes).unwrap());
        // Operand `i` in BF16, by the descales of its batch entries and KV heads.
        let wide = |i: usize| -> Buffer<u8> {
            let (len, heads, d) =
                [(len_q, n_q_heads, d_head), (len_k, n_kv_heads, d_head), (len_k, n_kv_heads, d_v)][i];
            let per_kv = heads / n_kv_heads;
            let value = |(at, &x): (usize, &u8)| {
                let (b, kv) = (at / (len * heads * d), at / d % heads / per_kv);
                bf16::from_f32(Format::E4m3.decode(x) * descales[12 * i + b * n_kv_heads + kv]).to_le_bytes()
            };
            device().upload(&operands[i].iter().enumerate().flat_map(value).collect::<Vec<u8>>()).unwrap()
        };
        let cast = case.cast.map(|_| [0, 1, 2].map(wide));
        let saved = operands.each_ref().map(|codes| device().upload(&vec![0x55u8; codes.len()]).unwrap());
        self.descales.write(&descales).unwrap();
        self.stats.write(&vec![0; self.stats.len()]).unwrap();
        self.extremes.write(&vec![0; self.extremes.len()]).unwrap();
        self.verdict.write(&[0; 6]).unwrap();
        self.device_idle();
        self.fill(&self.out, out_words + GUARD_WORDS);
        self.fill(&self.lse, shape.lse_elements() + GUARD_WORDS);

        let at = [0, 1, 2].map(|i| cast.as_ref().unwrap_or(&plain)[i].ptr());
        let operand = if case.cast.is_some() { Element::Bf16 } else { Element::E4m3 };
        let (lists, sequences) = case.sequences.as_ref().map(|list| Sequences::upload(device(), list).unwrap()).unzip();
        let words = stats_words(n_q_heads, n_kv_heads);
        // SAFETY: all buffers outlive the work, which `read` waits for, and hold what the extents say.
        let (tensors, workspace) = unsafe {
            let row = |i: usize| {
                let strides = [n_kv_heads as i64, 1];
                Some(View::new(self.descales.at(12 * i), Element::F32, [batch, n_kv_heads], strides))
            };
            let tensors = Tensors {
                q: View::dense(at[0], operand, [batch, len_q, n_q_heads, d_head]),
                keys: Keys::Rows {
                    k: View::dense(at[1], operand, [batch, len_k, n_kv_heads, d_head]),
                    v: View::dense(at[2], operand, [batch, len_k, n_kv_heads, d_v]),
                },
                descales: Descales {
                    q: row(0),
                    k: row(1),
                    v: row(2),
                    o: row(3),
                    logit: case.logits_e4m3.then(|| View::dense(self.descales.at(48), Element::F32, [n_q_heads])),
                },
                rope: None,
                accumulator: case.accumulator,
                saved: (case.cast == Some(true)).then(|| SavedOperands {
                    q: View::dense(saved[0].ptr(), Element::E4m3, [batch, len_q, n_q_heads, d_head]),
                    k: View::dense(saved[1].ptr(), Element::E4m3, [batch, len_k, n_kv_heads, d_head]),
                    v: View::dense(saved[2].ptr(), Element::E4m3, [batch, len_k, n_kv_heads, d_v]),
                    rows: SavedRows::Nothing,
                }),
                out: self.out.view(element, [batch, len_q, n_q_heads, d_v]).unwrap(),
                lse: Some(self.lse.view(Element::F32, [batch, n_q_heads, len_q]).unwrap()),
                stats: case.telemetry.then(|| self.stats.view(Element::U32, [words]).unwrap()),
            };
            (tensors, self.workspace.view(Element::U8, [self.workspace.len()]).unwrap())
        };
        // SAFETY: as above.
        let sinks = case
            .sinks
            .then(|| unsafe { self.sinks.view(Element::F32, [24]).unwrap() })
            .map(|all| unsafe { View::dense(all.ptr(), Element::F32, [n_q_heads]) });
        let call = DeviceCall {
            shape: tensors.shape(),
            mask: case.mask,
            softmax_scale: case.softmax_scale.into(),
            soft_cap: case.soft_cap.map(f64::from),
            sequences,
            sinks,
            center: None,
        };
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
            d_v as u32,
            case.mask.window_left.map_or(NO_WINDOW, |w| w as u32),
            if case.mask.causal { 0 } else { case.mask.window_right.map_or(NO_WINDOW, |w| w as u32) },
            case.softmax_scale.to_bits(),
            case.soft_cap.unwrap_or(0.0).to_bits(),
            u32::from(case.logits_e4m3) | u32::from(case.accumulator == PvAccumulator::F16) << 1,
        ]);
        let ptr = |buffer: &Buffer<f32>| Arg::Ptr(buffer.ptr());
        let descale = |i: usize| Arg::Ptr(self.descales.at(i));
        let args = [
            Arg::Ptr(plain[0].ptr()),
            Arg::Ptr(plain[1].ptr()),
            Arg::Ptr(plain[2].ptr()),
            descale(0),
            descale(12),
            descale(24),
            descale(48),
            ptr(&self.reference),
            ptr(&self.reference_lse),
            ptr(&self.room),
            ptr(&self.lse_room),
            Arg::Ptr(self.extremes.ptr()),
            Arg::Ptr(if case.sinks { self.sinks.ptr() } else { DevicePtr(0) }),
            Arg::Words(lists_words(lists.as_ref(), case.sequences.as_ref().map_or(0, Vec::len))),
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
        if case.cast == Some(true) {
            for (i, (name, codes)) in ["q", "k", "v"].into_iter().zip(visible.saved(case, &operands)).enumerate() {
                let have = saved[i].read().unwrap();
                // Zero of either sign.
                let same = have.iter().zip(&codes).all(|(a, b)| a == b || (a & 0x7f == 0 && b & 0x7f == 0));
                if !same {
                    complaints.push(format!("saved {name}"));
                }
            }
        }
        for (what, count) in ["output elements", "LSE rows", "words past the end"].into_iter().zip(&verdict) {
            if *count > 0 {
                complaints.push(format!("{count} {what} (worst {:.2} of its room)", f32::from_bits(verdict[3])));
            }
        }
        let (error2, reference2) = (f32::from_bits(verdict[4]), f32::from_bits(verdict[5]));
        // Rounding errors of P average out over many rows; what is left of a systematic error does not. The rows of a small call may
        // all have the largest, of P and of an output in E4M3.
        let rows = case.shape.batch * n_q_heads * case.shape.len_q;
        let most = if rows >= 64 { 4.5e-2 } else { 2f32.powi(-4) * if case.out_e4m3 { 2.0 } else { 1.0 } };
        if !case.logits_e4m3 && error2.sqrt() > most * reference2.sqrt() + 1e-20 {
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

/// Which rows of a call are read: everything else is NaN.
struct Visible {
    q: Vec<bool>,
    /// Rows of sequences, and those of them that a query sees.
    k: Vec<bool>,
    seen: Vec<bool>,
}

impl Visible {
    fn of(case: &Case) -> Self {
        let shape = &case.shape;
        let (rows_q, rows_k) = (shape.batch * shape.len_q, shape.batch * shape.len_k);
        let mut all = Self { q: vec![false; rows_q], k: vec![false; rows_k], seen: vec![false; rows_k] };
        let whole = |b: usize| Sequence {
            q: b * shape.len_q..(b + 1) * shape.len_q,
            k: b * shape.len_k..(b + 1) * shape.len_k,
        };
        let list = case.sequences.clone().unwrap_or_else(|| (0..shape.batch).map(whole).collect());
        for s in list {
            all.q[s.q.clone()].fill(true);
            all.k[s.k.clone()].fill(true);
            let (len_q, len_k) = (s.q.len(), s.k.len());
            for row in 0..len_q {
                let keys = case.mask.visible(row, len_q, len_k);
                all.seen[s.k.start + keys.start..s.k.start + keys.end].fill(true);
            }
        }
        all
    }

    /// Rows of q, k and v that are read, and elements of a row.
    fn rows(&self, case: &Case) -> [(&[bool], usize); 3] {
        let AttentionShape { n_q_heads, n_kv_heads, d_head, d_v, .. } = case.shape;
        [(&self.q, n_q_heads * d_head), (&self.seen, n_kv_heads * d_head), (&self.seen, n_kv_heads * d_v)]
    }

    /// Random codes, NaN where nothing may be read.
    fn operands(&self, case: &Case, codes: &[u8]) -> [Vec<u8>; 3] {
        let [q, k, v] = case.offsets;
        let rows = self.rows(case);
        [0, 1, 2].map(|i| {
            let (rows, row) = rows[i];
            let mut x = codes[[q, 2 * ELEMENTS + k, 2 * ELEMENTS + v][i]..][..rows.len() * row].to_vec();
            x.chunks_mut(row).zip(rows).filter(|(_, live)| !**live).for_each(|(x, _)| x.fill(0x7f));
            x
        })
    }

    /// What the cast leaves: zero codes where a row is not read. Keys that no query sees are cast all the same.
    fn saved(&self, case: &Case, operands: &[Vec<u8>; 3]) -> [Vec<u8>; 3] {
        let mut rows = self.rows(case);
        rows[1].0 = &self.k;
        let mut saved = operands.clone();
        for (x, (rows, row)) in saved.iter_mut().zip(rows) {
            x.chunks_mut(row).zip(rows).filter(|(_, live)| !**live).for_each(|(x, _)| x.fill(0));
        }
        saved
    }
}

/// `Sequences` of the kernels.
fn lists_words(lists: Option<&[Buffer<i32>; 4]>, count: usize) -> [u32; 12] {
    let mut words = [0; 12];
    for (i, list) in lists.into_iter().flatten().enumerate() {
        let at = list.ptr().0;
        (words[2 * i], words[2 * i + 1]) = (at as u32, (at >> 32) as u32);
    }
    words[8] = count as u32;
    words
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

/// The plain kernel beside a small call of every term.
pub(super) fn a_small_call() {
    let mut rng = StdRng::seed_from_u64(2);
    let shape = AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 70, len_k: 150, d_head: 64, d_v: 64 };
    let case = Case {
        shape,
        mask: Mask::sliding(60),
        softmax_scale: 0.2,
        soft_cap: Some(20.0),
        sinks: true,
        sequences: Some(Sequence::padded(&shape, &[70, 33], &[150, 40], Padding::Right).unwrap()),
        cast: Some(true),
        logits_e4m3: false,
        out_e4m3: false,
        telemetry: true,
        accumulator: PvAccumulator::default(),
        split: false,
        backend: 1,
        offsets: [0, 512, 1024],
    };
    let complaints = Bench::new(&mut rng).check(&case, &mut rng);
    assert!(complaints.is_empty(), "{case:?}: {}", complaints.join("; "));
}

/// Output, LSE and telemetry of random calls; outputs are poisoned before, and guarded behind.
fn random_shapes() {
    let seed = setting("SIGMASCALE_RANDOM_SEED", 1);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut bench = Bench::new(&mut rng);
    let mut failures = Vec::new();
    let count = setting("SIGMASCALE_RANDOM_SHAPES", 200);
    for index in 0..count {
        let case = Case::draw(&mut rng);
        let complaints = bench.check(&case, &mut rng);
        if !complaints.is_empty() {
            let failure = format!("{index}: {case:?}: {}", complaints.join("; "));
            println!("{failure}");
            failures.push(failure);
        }
    }
    println!("{count} random shapes, seed {seed}: {} failures", failures.len());
    assert!(failures.is_empty(), "{} of {count} calls failed", failures.len());
}
