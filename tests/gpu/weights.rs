//! Random layers in every layout, on the host for the CPU engine and in device memory for the GPU's.

use crate::device;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use sigmascale::bound::{LayerBounds, Tail};
use sigmascale::cuda::Buffer;
use sigmascale::device::scale::{DeviceMatrix, Dtype, LayerInput, ProjectionInput};
use sigmascale::model::{
    AttentionSpec, GainForm, LayerWeights, NormKind, Projection, Rope, RopeLayout, Temperature, preset,
};
use sigmascale::runtime::bounds_of;
use sigmascale::tensor::{self, MatrixView};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// Three `[out, in]` matrices.
    Apart,
    /// One `[out, in]` matrix of q, k and v.
    Fused,
    /// One `[in, out]` matrix.
    Conv1d,
    /// `[out, in]` as columns of something wider.
    Strided,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub d: usize,
    pub r: usize,
    pub n_q: usize,
    pub n_kv: usize,
    pub dtype: Dtype,
    /// Of gain, shift and biases.
    pub vectors: Dtype,
    pub layout: Layout,
    /// LayerNorm with a shift; RMSNorm otherwise.
    pub layer_norm: bool,
    /// LayerNorm without.
    pub unshifted: bool,
    pub biases: bool,
    pub one_plus: bool,
    pub rotary: usize,
    pub interleaved: bool,
    pub rope_factor: f64,
    /// What multiplies q as positions grow.
    pub temperature: Option<Temperature>,
    pub kind: Kind,
}

/// Of factor 1.8 at the last position.
pub const GROWING: Temperature = Temperature { strength: 0.4, period: 16, shift: 1, positions: 103 };

/// What the heads are like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Gaussian,
    /// One direction of every head is 30 times the rest.
    Spiked,
    /// Channels over six binades.
    BadlyScaled,
    /// Q and K live on different directions: their product nearly cancels.
    Cancelling,
    /// The last KV head is zero.
    ZeroHead,
    /// Every weight has the same offset, which a LayerNorm takes out.
    Offset,
    /// One channel of every head is near zero: with many input channels, a flat spectrum but for its small end.
    WeakChannel,
    /// One half of the channels is one direction, the other another: rounding falls on all entries alike.
    TwoDirections,
    /// Channels of a rotation pair are real and imaginary part of one: products of two pairs are themselves turns.
    Turning,
    /// The second query head, and the last: six directions, each of a run of channels with one rotation pair at four times the rest.
    /// Its own norms are the sharpest bound by far, since what a scaling takes from that pair it gives to the keys, which are flat.
    Competing,
    /// The first head of q and of k is far above the others, whose smaller elements are subnormals of its scale.
    OneLarge,
    /// The last head of q and of k is so far below the others that nothing of it is left where a projection is rounded by one scale.
    Faded,
    /// One direction whose channels lie over nine binades, others in Q than in K, above a third as much of noise: few directions
    /// carry the head, and the two that balance its rotation pairs are far from them. Where the norm takes a mean out, there is one.
    Uneven,
}

impl Case {
    pub fn new(name: &str, (d, r): (usize, usize), (n_q, n_kv): (usize, usize)) -> Self {
        Self {
            name: name.to_owned(),
            d,
            r,
            n_q,
            n_kv,
            dtype: Dtype::Bf16,
            vectors: Dtype::F32,
            layout: Layout::Apart,
            layer_norm: false,
            unshifted: false,
            biases: false,
            one_plus: false,
            rotary: r,
            interleaved: false,
            rope_factor: 1.0,
            temperature: None,
            kind: Kind::Gaussian,
        }
    }

    pub fn random(rng: &mut StdRng) -> Self {
        let any = |rng: &mut StdRng, list: &[usize]| list[rng.random_range(0..list.len())];
        let r = 8 * rng.random_range(2..=32);
        let n_kv = rng.random_range(1..=3);
        let layouts = [Layout::Apart, Layout::Fused, Layout::Conv1d, Layout::Strided];
        let kinds = [Kind::Gaussian, Kind::Spiked, Kind::BadlyScaled, Kind::Cancelling, Kind::ZeroHead, Kind::Offset];
        let (d, group) = (rng.random_range(r..r + 400), any(rng, &[1, 2, 3, 7]));
        let mut case = Self::new("random", (d, r), (n_kv * group, n_kv));
        case.dtype = [Dtype::Bf16, Dtype::F16, Dtype::F32][rng.random_range(0..3)];
        case.layout = layouts[rng.random_range(0..4)];
        case.kind = kinds[rng.random_range(0..6)];
        case.layer_norm = rng.random_bool(0.4);
        case.biases = rng.random_bool(0.4);
        case.one_plus = rng.random_bool(0.3);
        case.rotary = [0, r, 2 * rng.random_range(1..=r / 2)][rng.random_range(0..3)];
        case.interleaved = rng.random_bool(0.5);
        case.rope_factor = [1.0, 1.25][rng.random_range(0..2)];
        // Drawn by nothing, so that the rest stays what it was.
        case.temperature = (d % 3 == 0).then_some(GROWING);
        case
    }

    pub fn spec(&self) -> AttentionSpec {
        let mut spec = preset("mistral-7b").unwrap();
        spec.name = format!("{self:?}");
        spec.d_model = self.d;
        spec.layers.truncate(1);
        spec.set_heads(self.n_q, self.n_kv, self.r);
        spec.norm.kind = if self.layer_norm { NormKind::LayerNorm } else { NormKind::RmsNorm };
        spec.norm.shift = self.layer_norm && !self.unshifted;
        spec.norm.gain = if self.one_plus { GainForm::OnePlus } else { GainForm::Plain };
        (spec.bias.q, spec.bias.k, spec.bias.v) = (self.biases, self.biases, self.biases);
        spec.layers[0].softmax_scale = 1.0 / (self.r as f64).sqrt();
        let layout = if self.interleaved { RopeLayout::Interleaved } else { RopeLayout::HalfSplit };
        let rope = Rope {
            rotary_dim: self.rotary,
            other_dims: vec![],
            layout,
            attention_factor: self.rope_factor,
            inv_freq: None,
            range: None,
        };
        spec.layers[0].rope = (self.rotary > 0).then_some(rope);
        spec.layers[0].temperature = self.temperature;
        spec
    }
}

/// One layer on both sides.
pub struct Layer {
    pub case: Case,
    /// One or three stored matrices, row-major, with their shapes.
    storage: Vec<(Vec<u8>, usize, usize)>,
    gain: Vec<f64>,
    shift: Option<Vec<f64>>,
    bias: Option<[Vec<f64>; 3]>,
    pub memory: Vec<Buffer<u8>>,
    pub input: LayerInput,
}

pub fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

pub fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let halves = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        Dtype::Bf16 => halves.map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F16 => halves.map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

fn heads(case: &Case, which: usize, rng: &mut StdRng) -> Vec<f32> {
    let count = if which == 0 { case.n_q } else { case.n_kv };
    let (d, r) = (case.d, case.r);
    let scale = 1.0 / (d as f32).sqrt();
    let mut values: Vec<f32> = (0..count * r * d)
        .map(|_| {
            let x: f32 = StandardNormal.sample(rng);
            scale * x
        })
        .collect();
    for (head, rows) in values.chunks_exact_mut(r * d).enumerate() {
        match case.kind {
            Kind::Gaussian => {}
            Kind::Spiked => {
                let row = rng.random_range(0..r);
                rows[row * d..(row + 1) * d].iter_mut().for_each(|x| *x *= 30.0);
            }
            Kind::BadlyScaled => {
                for row in rows.chunks_exact_mut(d) {
                    let factor = rng.random_range(-3.0..3.0f32).exp2();
                    row.iter_mut().for_each(|x| *x *= factor);
                }
            }
            Kind::Cancelling => {
                for (c, row) in rows.chunks_exact_mut(d).enumerate() {
                    let large = (c % 2 == 0) == (which == 0);
                    row.iter_mut().for_each(|x| *x *= if large { 1.0 } else { 1e-3 });
                }
            }
            Kind::TwoDirections => {
                for c in 0..r {
                    let first = if c < r / 2 { 0 } else { r / 2 };
                    rows.copy_within(first * d..(first + 1) * d, c * d);
                }
            }
            Kind::Turning => {
                for p in 0..r / 2 {
                    let (a, b) = if case.interleaved { (2 * p, 2 * p + 1) } else { (p, p + r / 2) };
                    for j in (0..d - 1).step_by(2) {
                        (rows[b * d + j], rows[b * d + j + 1]) = (-rows[a * d + j + 1], rows[a * d + j]);
                    }
                }
            }
            Kind::Uneven => {
                let direction = rows[..d].to_vec();
                for row in rows.chunks_exact_mut(d) {
                    let sign = if rng.random_bool(0.5) { 1.0 } else { -1.0 };
                    let size = sign * rng.random_range(-9.0..0.0f32).exp2();
                    let mean = if case.layer_norm { 0.1 * scale } else { 0.0 };
                    row.iter_mut().zip(&direction).for_each(|(x, u)| *x = 0.3 * *x + size * u + mean);
                }
            }
            Kind::Competing => {
                if which == 0 && (head == 1 || head + 1 == count) {
                    let pairs = r / 2;
                    let place = |p: usize| if case.interleaved { (2 * p, 2 * p + 1) } else { (p, p + pairs) };
                    for p in 0..pairs {
                        let first = p * 6 / pairs;
                        let lead = place((0..pairs).find(|x| x * 6 / pairs == first).unwrap_or(0)).0;
                        let size = if place(p).0 == lead { 1.0 } else { 0.25 };
                        let direction = rows[lead * d..(lead + 1) * d].to_vec();
                        for c in [place(p).0, place(p).1] {
                            rows[c * d..(c + 1) * d].iter_mut().zip(&direction).for_each(|(x, u)| *x = size * u);
                        }
                    }
                    // So that neither side's part of what a scaling gains is the other's.
                    rows.iter_mut().for_each(|x| *x *= if head == 1 { 4.0 } else { 1.0 });
                }
            }
            Kind::OneLarge => {
                if which < 2 && head == 0 {
                    rows.iter_mut().for_each(|x| *x *= 256.0);
                }
            }
            Kind::Faded => {
                if which < 2 && head + 1 == count {
                    rows.iter_mut().for_each(|x| *x *= 1e-9);
                }
            }
            Kind::WeakChannel => rows[5 * d..6 * d].iter_mut().for_each(|x| *x *= 0.02),
            Kind::Offset => rows.iter_mut().for_each(|x| *x += 1.5 * scale),
            Kind::ZeroHead => {
                if which > 0 && head + 1 == count {
                    rows.fill(0.0);
                }
            }
        }
    }
    values
}

impl Layer {
    pub fn new(case: &Case, seed: u64) -> Self {
        Self::broken(case, seed, None)
    }

    /// With one stored value of k replaced.
    pub fn broken(case: &Case, seed: u64, planted: Option<f32>) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let (d, r) = (case.d, case.r);
        let counts = [case.n_q, case.n_kv, case.n_kv];
        let mut parts: Vec<Vec<f32>> = (0..3).map(|which| heads(case, which, &mut rng)).collect();
        if let Some(value) = planted {
            parts[1][3] = value;
        }
        let total = counts.iter().sum::<usize>() * r;
        let stored: Vec<(Vec<f32>, usize, usize)> = match case.layout {
            Layout::Apart => parts.into_iter().zip(counts).map(|(p, n)| (p, n * r, d)).collect(),
            Layout::Fused => vec![(parts.concat(), total, d)],
            Layout::Conv1d => {
                let all = parts.concat();
                let mut turned = vec![0.0; all.len()];
                for (row, values) in all.chunks_exact(d).enumerate() {
                    for (column, x) in values.iter().enumerate() {
                        turned[column * total + row] = *x;
                    }
                }
                vec![(turned, d, total)]
            }
            Layout::Strided => parts
                .into_iter()
                .zip(counts)
                .map(|(p, n)| {
                    let mut wide = vec![7.0; n * r * (d + 24)];
                    for (row, values) in p.chunks_exact(d).enumerate() {
                        wide[row * (d + 24) + 8..][..d].copy_from_slice(values);
                    }
                    (wide, n * r, d + 24)
                })
                .collect(),
        };
        let storage: Vec<_> = stored.into_iter().map(|(v, rows, cols)| (encode(&v, case.dtype), rows, cols)).collect();
        // Vectors of values that are stored as they are.
        let stored_as = |x: f32| match case.vectors {
            Dtype::Bf16 => bf16::from_f32(x).to_f64(),
            Dtype::F16 => f16::from_f32(x).to_f64(),
            Dtype::F32 => f64::from(x),
        };
        let mut vector = |n: usize, mean: f32, spread: f32| -> Vec<f64> {
            (0..n).map(|_| stored_as(mean + spread * rng.random_range(-1.0..1.0f32))).collect()
        };
        let mut gain = vector(d, if case.one_plus { 0.1 } else { 1.1 }, 0.6);
        // Of a file's gains to which 1 is added, the host counts the reading of a load in 16 bits too; these have one.
        if case.one_plus {
            gain.iter_mut().for_each(|g| *g = bf16::from_f64(*g).to_f64());
        }
        let shift = (case.layer_norm && !case.unshifted).then(|| vector(d, 0.02, 0.2));
        let bias = case.biases.then(|| counts.map(|n| vector(n * r, 0.1, 1.0)));
        let mut layer = Self {
            case: case.clone(),
            storage,
            gain,
            shift,
            bias,
            memory: vec![],
            input: LayerInput::without_addresses(),
        };
        layer.upload();
        layer
    }

    fn upload(&mut self) {
        let case = &self.case;
        let spec = case.spec();
        let rounding_share = spec.rounding_share(&spec.layers[0], self.weights().stored());
        let (d, r, size) = (case.d, case.r, case.dtype.size() as u64);
        let mut memory = vec![];
        let mut keep = |bytes: &[u8]| {
            let buffer = device().upload(bytes).unwrap();
            let ptr = buffer.ptr();
            memory.push(buffer);
            ptr
        };
        let stored: Vec<_> = self.storage.iter().map(|(bytes, _, _)| keep(bytes)).collect();
        let counts = [case.n_q, case.n_kv, case.n_kv];
        let total = (counts.iter().sum::<usize>() * r) as i64;
        let narrow = |values: &[f64]| encode(&values.iter().map(|x| *x as f32).collect::<Vec<_>>(), case.vectors);
        let mut input = LayerInput {
            gain: keep(&narrow(&self.gain)),
            vector_dtype: case.vectors,
            gain_offset: if case.one_plus { 1.0 } else { 0.0 },
            mean_removed: case.layer_norm,
            d_model: d,
            n_q: case.n_q,
            n_kv: case.n_kv,
            d_head: r,
            rotary: case.rotary,
            interleaved: case.interleaved,
            rope_factor: if case.rotary > 0 { case.rope_factor as f32 } else { 1.0 },
            softmax_scale: 1.0 / (r as f64).sqrt(),
            query_factor: case.temperature.map_or(1.0, |temperature| temperature.largest()),
            rounding_share,
            ..LayerInput::without_addresses()
        };
        if let Some(shift) = &self.shift {
            input.shift = keep(&narrow(shift));
        }
        let mut first = 0;
        let mut projections = vec![];
        for (which, heads) in counts.into_iter().enumerate() {
            let before = (first * r) as u64;
            let (ptr, row_stride, col_stride) = match case.layout {
                Layout::Apart => (stored[which], d as i64, 1),
                Layout::Fused => (stored[0].offset(before * d as u64 * size), d as i64, 1),
                Layout::Conv1d => (stored[0].offset(before * size), 1, total),
                Layout::Strided => (stored[which].offset(8 * size), (d + 24) as i64, 1),
            };
            first += heads;
            let weight = DeviceMatrix { ptr, dtype: case.dtype, row_stride, col_stride };
            let bias = self.bias.as_ref().map(|bias| keep(&narrow(&bias[which])));
            projections.push(ProjectionInput { weight, bias: bias.unwrap_or_default() });
        }
        (input.q, input.k, input.v) = (projections[0], projections[1], Some(projections[2]));
        (self.memory, self.input) = (memory, input);
    }

    /// The same layer, its three matrices in memory of their own.
    pub fn copied(&self) -> (LayerInput, Vec<Buffer<u8>>) {
        assert_eq!(self.case.layout, Layout::Apart);
        let copy = |which: usize| device().upload(&self.memory[which].read().unwrap()).unwrap();
        let (memory, mut input) = ((0..3).map(copy).collect::<Vec<_>>(), self.input);
        let weights = [Some(&mut input.q), Some(&mut input.k), input.v.as_mut()];
        for (projection, buffer) in weights.into_iter().flatten().zip(&memory) {
            projection.weight.ptr = buffer.ptr();
        }
        (input, memory)
    }

    /// The same weights as the CPU engine takes them.
    pub fn weights(&self) -> LayerWeights<'_> {
        let case = &self.case;
        let dtype = match case.dtype {
            Dtype::Bf16 => tensor::Dtype::Bf16,
            Dtype::F16 => tensor::Dtype::F16,
            Dtype::F32 => tensor::Dtype::F32,
        };
        let r = case.r;
        let stored: Vec<MatrixView<'_>> = self
            .storage
            .iter()
            .map(|(bytes, rows, cols)| MatrixView::dense(bytes, dtype, *rows, *cols).unwrap())
            .map(|view| if case.layout == Layout::Conv1d { view.transpose() } else { view })
            .map(|view| if case.layout == Layout::Strided { view.slice_cols(8, case.d) } else { view })
            .collect();
        let mut first = 0;
        let mut projection = |which: usize, heads: usize| {
            let view = &stored[if stored.len() == 1 { 0 } else { which }];
            let start = if stored.len() == 1 { first * r } else { 0 };
            first += heads;
            Projection {
                heads: (0..heads).map(|h| view.slice_rows(start + h * r, r)).collect(),
                bias: self.bias.as_ref().map(|bias| bias[which].clone()),
                name: ["q", "k", "v"][which].into(),
            }
        };
        LayerWeights {
            layer: 0,
            q: projection(0, case.n_q),
            k: projection(1, case.n_kv),
            v: projection(2, case.n_kv),
            norm_gain: Some(self.gain.clone()),
            norm_shift: self.shift.clone(),
            q_norm: None,
            k_norm: None,
            mla: None,
        }
    }

    /// What the CPU engine, in f64, says.
    pub fn truth(&self) -> LayerBounds {
        bounds_of(&self.case.spec(), self.weights(), &Tail::default()).unwrap()
    }
}
