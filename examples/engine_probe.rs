//! Checks the GPU scale engine against f64 and times it on whole models.
//!
//! `engine_probe check [PART OF A NAME..]` compares; `engine_probe bench [MODEL..]` prints CSV `model,method,us_per_layer,ratio_to_floor`, the
//! floor being the bytes of the weights over the copy bandwidth of the same run. Needs a GPU; says so without one.

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sigmascale::Result;
use sigmascale::cuda::scale::{
    DeviceMatrix, Dtype, LayerInput, PowerEngine, ProjectionInput, ScaleEngine, SummedPowerEngine,
};
use sigmascale::cuda::sources::Source;
use sigmascale::cuda::{self, Arg, Buffer, Device, DevicePtr, Launch, Stream};

fn main() {
    if !cuda::is_available() {
        println!("no GPU: {:?}", cuda::probe());
        std::process::exit(2);
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.first().map(String::as_str) {
        Some("check") => check(&args[1..]),
        Some("bench") => bench(&args[1..]),
        _ => check(&[]).and_then(|()| bench(&[])),
    };
    if let Err(e) = done {
        println!("FAIL {e}");
        std::process::exit(1);
    }
}

// ---------------------------------------------------------------------------------------------------- correctness

#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    d: usize,
    r: usize,
    n_q: usize,
    n_kv: usize,
    dtype: Dtype,
    vector: Dtype,
    conv1d: bool,
    layer_norm: bool,
    affine: bool,
    gain: bool,
    rotary: usize,
    interleaved: bool,
}

const CASES: &[Case] = &[
    Case {
        name: "gpt2-like fused Conv1D",
        d: 1600,
        r: 64,
        n_q: 5,
        n_kv: 5,
        dtype: Dtype::Bf16,
        vector: Dtype::F32,
        conv1d: true,
        layer_norm: true,
        affine: true,
        gain: true,
        rotary: 0,
        interleaved: false,
    },
    Case {
        name: "conv1d r128 rope",
        d: 640,
        r: 128,
        n_q: 3,
        n_kv: 1,
        dtype: Dtype::Bf16,
        vector: Dtype::Bf16,
        conv1d: true,
        layer_norm: false,
        affine: false,
        gain: true,
        rotary: 128,
        interleaved: false,
    },
    Case {
        name: "llama-like",
        d: 4096,
        r: 128,
        n_q: 4,
        n_kv: 2,
        dtype: Dtype::Bf16,
        vector: Dtype::Bf16,
        conv1d: false,
        layer_norm: false,
        affine: false,
        gain: true,
        rotary: 128,
        interleaved: false,
    },
    Case {
        name: "no gain",
        d: 5120,
        r: 128,
        n_q: 2,
        n_kv: 1,
        dtype: Dtype::Bf16,
        vector: Dtype::Bf16,
        conv1d: false,
        layer_norm: false,
        affine: false,
        gain: false,
        rotary: 128,
        interleaved: false,
    },
    Case {
        name: "qwen2-like r64",
        d: 896,
        r: 64,
        n_q: 14,
        n_kv: 2,
        dtype: Dtype::Bf16,
        vector: Dtype::Bf16,
        conv1d: false,
        layer_norm: false,
        affine: true,
        gain: true,
        rotary: 64,
        interleaved: false,
    },
    Case {
        name: "r64 odd d",
        d: 1000,
        r: 64,
        n_q: 7,
        n_kv: 1,
        dtype: Dtype::Bf16,
        vector: Dtype::F32,
        conv1d: false,
        layer_norm: true,
        affine: true,
        gain: true,
        rotary: 32,
        interleaved: true,
    },
    Case {
        name: "bert-like f32",
        d: 384,
        r: 32,
        n_q: 12,
        n_kv: 12,
        dtype: Dtype::F32,
        vector: Dtype::F32,
        conv1d: false,
        layer_norm: true,
        affine: true,
        gain: true,
        rotary: 0,
        interleaved: false,
    },
    Case {
        name: "f16 r80 interleaved",
        d: 328,
        r: 80,
        n_q: 3,
        n_kv: 1,
        dtype: Dtype::F16,
        vector: Dtype::F16,
        conv1d: false,
        layer_norm: false,
        affine: false,
        gain: true,
        rotary: 32,
        interleaved: true,
    },
    Case {
        name: "unaligned d",
        d: 101,
        r: 16,
        n_q: 3,
        n_kv: 3,
        dtype: Dtype::Bf16,
        vector: Dtype::Bf16,
        conv1d: false,
        layer_norm: true,
        affine: true,
        gain: true,
        rotary: 16,
        interleaved: false,
    },
    Case {
        name: "r256",
        d: 1024,
        r: 256,
        n_q: 2,
        n_kv: 1,
        dtype: Dtype::Bf16,
        vector: Dtype::F32,
        conv1d: false,
        layer_norm: false,
        affine: false,
        gain: true,
        rotary: 256,
        interleaved: false,
    },
    Case {
        name: "f32 conv1d",
        d: 200,
        r: 24,
        n_q: 4,
        n_kv: 2,
        dtype: Dtype::F32,
        vector: Dtype::F32,
        conv1d: true,
        layer_norm: true,
        affine: true,
        gain: true,
        rotary: 8,
        interleaved: false,
    },
];

/// Heads of more than 128 channels, and f32 weights.
const WIDE: &[Case] = &[
    Case { name: "r136 part turned", d: 712, r: 136, n_q: 3, n_kv: 1, rotary: 64, interleaved: true, ..CASES[2] },
    Case { name: "r160 f16", d: 1000, r: 160, n_q: 2, n_kv: 2, rotary: 160, dtype: Dtype::F16, ..CASES[2] },
    Case { name: "r192 layer norm", d: 1096, r: 192, rotary: 192, layer_norm: true, affine: true, ..CASES[2] },
    Case { name: "r256 gemma", d: 3584, r: 256, n_q: 2, n_kv: 1, rotary: 256, ..CASES[2] },
    Case { name: "r248 interleaved", d: 520, r: 248, n_q: 5, n_kv: 5, rotary: 248, interleaved: true, ..CASES[2] },
    Case { name: "f32 r128", d: 4096, r: 128, dtype: Dtype::F32, ..CASES[2] },
    Case { name: "f32 r64 odd heads", d: 1004, r: 64, n_q: 7, n_kv: 1, dtype: Dtype::F32, rotary: 32, ..CASES[7] },
    Case { name: "f32 r16", d: 36, r: 16, n_q: 3, n_kv: 3, dtype: Dtype::F32, rotary: 16, ..CASES[2] },
    Case { name: "f32 r96", d: 772, r: 96, n_q: 3, n_kv: 3, dtype: Dtype::F32, rotary: 0, ..CASES[0] },
    Case { name: "f32 r256", d: 1100, r: 256, n_q: 2, n_kv: 1, dtype: Dtype::F32, rotary: 256, ..CASES[2] },
    Case { name: "f32 r184 part turned", d: 900, r: 184, n_q: 2, n_kv: 2, dtype: Dtype::F32, rotary: 90, ..CASES[2] },
];

/// Heads of independent values of one size: the flattest spectrum that weights have, the hardest for a certificate.
const FLAT: &[Case] = &[
    Case { name: "flat r128", d: 8192, r: 128, n_q: 2, n_kv: 1, rotary: 128, ..CASES[2] },
    Case { name: "flat r64", d: 1600, r: 64, n_q: 3, n_kv: 3, ..CASES[0] },
    Case { name: "flat r128 fixed", d: 4096, r: 128, n_q: 2, n_kv: 2, ..CASES[0] },
    Case { name: "flat r128 without rotation", d: 8192, r: 128, n_q: 2, n_kv: 1, rotary: 0, ..CASES[2] },
    Case {
        name: "flat f32 without rotation",
        d: 4096,
        r: 128,
        n_q: 2,
        n_kv: 1,
        rotary: 0,
        dtype: Dtype::F32,
        ..CASES[2]
    },
    Case { name: "flat r96 f16", d: 3072, r: 96, n_q: 2, n_kv: 2, rotary: 96, dtype: Dtype::F16, ..CASES[2] },
    Case { name: "flat r256", d: 2048, r: 256, n_q: 1, n_kv: 1, rotary: 256, ..CASES[2] },
    Case { name: "flat r192", d: 8192, r: 192, n_q: 1, n_kv: 1, rotary: 192, ..CASES[2] },
    Case { name: "flat f32 r128", d: 8192, r: 128, n_q: 2, n_kv: 1, dtype: Dtype::F32, rotary: 128, ..CASES[2] },
    Case { name: "flat f32 r256", d: 3584, r: 256, n_q: 1, n_kv: 1, dtype: Dtype::F32, rotary: 256, ..CASES[2] },
];

/// Heads that few directions carry over uneven channels, where the Frobenius norm is the sharpest bound.
const UNEVEN: &[Case] = &[
    Case { name: "uneven r128", d: 4096, r: 128, n_q: 4, n_kv: 2, rotary: 128, ..CASES[2] },
    Case { name: "uneven r64 layer norm", d: 1000, r: 64, n_q: 6, n_kv: 2, rotary: 64, ..CASES[5] },
    Case {
        name: "uneven r256 interleaved",
        d: 2304,
        r: 256,
        n_q: 2,
        n_kv: 1,
        rotary: 256,
        interleaved: true,
        ..CASES[2]
    },
    Case { name: "uneven f32 r96", d: 772, r: 96, n_q: 3, n_kv: 3, dtype: Dtype::F32, rotary: 96, ..CASES[2] },
];

fn round(v: f64, dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bf16 => bf16::from_f64(v).to_f64(),
        Dtype::F16 => f16::from_f64(v).to_f64(),
        Dtype::F32 => f64::from(v as f32),
    }
}

fn bytes(values: &[f64], dtype: Dtype) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&v| match dtype {
            Dtype::Bf16 => bf16::from_f64(v).to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f64(v).to_le_bytes().to_vec(),
            Dtype::F32 => (v as f32).to_le_bytes().to_vec(),
        })
        .collect()
}

/// One projection as the oracle sees it: `rows` channels of `d` values.
struct Host {
    w: Vec<Vec<f64>>,
    bias: Option<Vec<f64>>,
}

struct Made {
    hosts: Vec<Host>,
    gain: Vec<f64>,
    shift: Option<Vec<f64>>,
    input: LayerInput,
    _memory: Vec<Buffer<u8>>,
}

fn make(device: &Device, c: &Case, seed: u64, poison: bool) -> Result<Made> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut gauss = || (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
    let mut hosts = vec![];
    for (which, heads) in [c.n_q, c.n_kv, c.n_kv].into_iter().enumerate() {
        let uneven = c.name.starts_with("uneven") && which < 2;
        let directions: Vec<Vec<f64>> =
            (0..if uneven { heads } else { 0 }).map(|_| (0..c.d).map(|_| gauss()).collect()).collect();
        let mut w: Vec<Vec<f64>> = (0..heads * c.r)
            .map(|row| {
                if uneven {
                    let size = gauss().signum() * (2.6 * gauss() - 4.5).min(0.0).exp2();
                    let along = &directions[row / c.r];
                    return along.iter().map(|u| round(0.02 * (0.3 * gauss() + size * u), c.dtype)).collect();
                }
                let flat = c.name.starts_with("flat");
                let (scale, mean) = if flat { (0.02, 0.0) } else { (0.02 * (1.0 + (row % 7) as f64), 0.3) };
                (0..c.d).map(|_| round(scale * (gauss() + mean), c.dtype)).collect()
            })
            .collect();
        if which == 2 {
            w[..c.r].fill(vec![0.0; c.d]);
        }
        if poison && which == 1 {
            w[c.r / 2][c.d / 3] = f64::NAN;
        }
        let bias = c.affine.then(|| (0..heads * c.r).map(|_| round(0.1 * gauss(), c.vector)).collect());
        hosts.push(Host { w, bias });
    }
    let gain: Vec<f64> = (0..c.d).map(|_| if c.gain { round(1.0 + 0.5 * gauss(), c.vector) } else { 1.0 }).collect();
    let shift = c.affine.then(|| (0..c.d).map(|_| round(0.2 * gauss(), c.vector)).collect::<Vec<f64>>());
    if c.affine {
        hosts[2].bias.as_mut().unwrap()[..c.r].fill(0.0);
    }
    let mut memory = vec![];
    let mut up = |values: &[f64], dtype| -> Result<DevicePtr> {
        let buffer = device.upload(&bytes(values, dtype))?;
        let ptr = buffer.ptr();
        memory.push(buffer);
        Ok(ptr)
    };
    let rows: Vec<usize> = hosts.iter().map(|h| h.w.len()).collect();
    let total: usize = rows.iter().sum();
    let mut matrices = vec![];
    if c.conv1d {
        let mut fused = vec![0.0; c.d * total];
        let mut start = 0;
        for h in &hosts {
            for (row, w) in h.w.iter().enumerate() {
                for (k, &v) in w.iter().enumerate() {
                    fused[k * total + start + row] = v;
                }
            }
            start += h.w.len();
        }
        let ptr = up(&fused, c.dtype)?;
        let mut start = 0;
        for r in rows {
            let ptr = ptr.offset((start * c.dtype.size()) as u64);
            matrices.push(DeviceMatrix { ptr, dtype: c.dtype, row_stride: 1, col_stride: total as i64 });
            start += r;
        }
    } else {
        for h in &hosts {
            let ptr = up(&h.w.concat(), c.dtype)?;
            matrices.push(DeviceMatrix { ptr, dtype: c.dtype, row_stride: c.d as i64, col_stride: 1 });
        }
    }
    let mut projections = vec![];
    for (h, weight) in hosts.iter().zip(matrices) {
        let bias = h.bias.as_ref().map_or(Ok(DevicePtr::NULL), |b| up(b, c.vector))?;
        projections.push(ProjectionInput { weight, bias });
    }
    let input = LayerInput {
        q: projections[0],
        k: projections[1],
        v: Some(projections[2]),
        gain: if c.gain { up(&gain, c.vector)? } else { DevicePtr::NULL },
        shift: shift.as_ref().map_or(Ok(DevicePtr::NULL), |s| up(s, c.vector))?,
        vector_dtype: c.vector,
        gain_offset: 0.0,
        mean_removed: c.layer_norm,
        d_model: c.d,
        n_q: c.n_q,
        n_kv: c.n_kv,
        d_head: c.r,
        rotary: c.rotary,
        interleaved: c.interleaved,
        rope_factor: 1.0,
        softmax_scale: 1.0 / (c.r as f64).sqrt(),
        query_factor: 1.0,
        rounding_share: 1.0 / 32.0,
        qk_norm: None,
    };
    Ok(Made { hosts, gain, shift, input, _memory: memory })
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// diag(g) w, and the same without its mean.
fn effective(w: &[f64], gain: &[f64], mean_removed: bool) -> Vec<f64> {
    let y: Vec<f64> = w.iter().zip(gain).map(|(w, g)| w * g).collect();
    let mean = if mean_removed { y.iter().sum::<f64>() / y.len() as f64 } else { 0.0 };
    y.iter().map(|v| v - mean).collect()
}

/// (B + A/32) / 448 of one head, the definition of math section 5.
fn descale(c: &Case, m: &Made, which: usize, head: usize) -> f64 {
    let root = (c.d as f64).sqrt();
    let rotary = if which == 2 { 0 } else { c.rotary };
    let column = |i: usize| {
        let row = head * c.r + i;
        let w = &m.hosts[which].w[row];
        let bias = m.hosts[which].bias.as_ref().map_or(0.0, |b| b[row]);
        let zero = vec![0.0; c.d];
        let shift = m.shift.as_ref().unwrap_or(&zero);
        let constant = dot(shift, w) + bias;
        let raw = effective(w, &m.gain, false);
        let a =
            root * dot(&raw, &raw).sqrt() + shift.iter().zip(w).map(|(s, w)| (s * w).abs()).sum::<f64>() + bias.abs();
        (effective(w, &m.gain, c.layer_norm), constant, a)
    };
    let mut most = 0f64;
    for p in 0..c.r / 2 {
        let (i, j) = if p < rotary / 2 && !c.interleaved { (p, p + rotary / 2) } else { (2 * p, 2 * p + 1) };
        let ((x, cx, ax), (y, cy, ay)) = (column(i), column(j));
        if p < rotary / 2 {
            let (p, s, m) = (dot(&x, &x), dot(&y, &y), dot(&x, &y));
            let sigma = ((p + s) / 2.0 + (((p - s) / 2.0).powi(2) + m * m).sqrt()).sqrt();
            most = most.max(root * sigma + cx.hypot(cy) + ax.hypot(ay) / 32.0);
        } else {
            most = most.max(root * dot(&x, &x).sqrt() + cx.abs() + ax / 32.0);
            most = most.max(root * dot(&y, &y).sqrt() + cy.abs() + ay / 32.0);
        }
    }
    if most == 0.0 { 1.0 } else { most / 448.0 }
}

/// sigma; under rotation the smallest of the scaled product, sigma_Q sigma_K and the Frobenius norm over every relative
/// position. In f64.
fn sigma(c: &Case, m: &Made, h: usize) -> f64 {
    let columns = |which: usize, head: usize, removed: bool| -> Vec<Vec<f64>> {
        (0..c.r).map(|i| effective(&m.hosts[which].w[head * c.r + i], &m.gain, removed)).collect()
    };
    let gram = |x: &[Vec<f64>]| -> Vec<Vec<f64>> { x.iter().map(|a| x.iter().map(|b| dot(a, b)).collect()).collect() };
    let kv = h / (c.n_q / c.n_kv);
    let top = |apply: &dyn Fn(&[f64]) -> Vec<f64>| -> f64 {
        let mut v: Vec<f64> = (0..c.r).map(|i| ((i * 7919 + 13) % 101) as f64 - 50.3).collect();
        let mut lambda = 0.0;
        for _ in 0..1500 {
            let n = dot(&v, &v).sqrt();
            v.iter_mut().for_each(|x| *x /= n);
            let w = apply(&v);
            lambda = dot(&w, &w).sqrt();
            v = w;
        }
        lambda
    };
    let times = |g: &[Vec<f64>], v: &[f64]| -> Vec<f64> { g.iter().map(|row| dot(row, v)).collect() };
    let (q, k) = (gram(&columns(0, h, c.layer_norm)), gram(&columns(1, kv, c.layer_norm)));
    if c.rotary == 0 {
        return top(&|v| times(&q, &times(&k, v))).sqrt();
    }
    let mut t = vec![1.0; c.r];
    for p in 0..c.r / 2 {
        let (i, j) = if p < c.rotary / 2 && !c.interleaved { (p, p + c.rotary / 2) } else { (2 * p, 2 * p + 1) };
        if p < c.rotary / 2 {
            t[i] = ((k[i][i] + k[j][j]) / (q[i][i] + q[j][j])).sqrt();
            t[j] = t[i];
        } else {
            t[i] = (k[i][i] / q[i][i]).sqrt();
            t[j] = (k[j][j] / q[j][j]).sqrt();
        }
    }
    let scaled = |g: &[Vec<f64>], sign: f64| -> f64 {
        let s: Vec<f64> = t.iter().map(|t| t.powf(sign / 2.0)).collect();
        top(&|v| {
            let x: Vec<f64> = v.iter().zip(&s).map(|(v, s)| v * s).collect();
            times(g, &x).iter().zip(&s).map(|(y, s)| y * s).collect()
        })
    };
    let (rq, rk) = (gram(&columns(0, h, false)), gram(&columns(1, kv, false)));
    let raw = top(&|v| times(&rq, v)) * top(&|v| times(&rk, v));
    let pairs: Vec<(usize, usize)> = (0..c.r / 2)
        .map(|p| if p < c.rotary / 2 && !c.interleaved { (p, p + c.rotary / 2) } else { (2 * p, 2 * p + 1) })
        .collect();
    let mut frobenius = 0.0;
    for &(a0, a1) in &pairs {
        for &(b0, b1) in &pairs {
            let lengths = |g: &[Vec<f64>]| {
                let (x00, x01, x10, x11) = (g[a0][b0], g[a0][b1], g[a1][b0], g[a1][b1]);
                ((x00 + x11).hypot(x01 - x10), (x00 - x11).hypot(x01 + x10))
            };
            let ((same_q, mirror_q), (same_k, mirror_k)) = (lengths(&q), lengths(&k));
            frobenius += 0.5 * (same_q * same_k + mirror_q * mirror_k);
        }
    }
    (scaled(&q, 1.0) * scaled(&k, -1.0)).min(raw).min(frobenius).sqrt()
}

fn check(names: &[String]) -> Result<()> {
    let device = Device::open(0)?;
    println!("# {} {} cache {:?}", device.name()?, device.arch(), cuda::probe().cache);
    let stream = device.stream()?;
    let mut bad = 0;
    let wanted = |c: &&Case| names.is_empty() || names.iter().any(|n| c.name.contains(n));
    let cases = || CASES.iter().chain(WIDE).chain(FLAT).chain(UNEVEN).filter(wanted);
    for (index, c) in cases().enumerate() {
        let made = make(&device, c, 7 + index as u64, false)?;
        // SAFETY: the memory is held by `made`, and written no more.
        let engine = unsafe { ScaleEngine::new(&device, &[made.input], true)? };
        let foretold = ScaleEngine::workspace_bytes_for(&device, &[made.input], true)?;
        if foretold != engine.workspace_bytes() {
            bad += 1;
            println!("BAD  {:<24} workspace {foretold} foretold, {} taken", c.name, engine.workspace_bytes());
        }
        engine.descales(&stream)?;
        engine.grams(&stream)?;
        let got = engine.head_descales().read()?;
        let (mut worst, mut below) = (0f64, 0f64);
        for which in 0..3 {
            for kv in 0..c.n_kv {
                let group = if which == 0 { c.n_q / c.n_kv } else { 1 };
                let want = (0..group).map(|g| descale(c, &made, which, kv * group + g)).fold(0.0, f64::max);
                let error = f64::from(got[which * c.n_kv + kv]) / want - 1.0;
                worst = worst.max(error.abs());
                below = below.min(error);
            }
        }
        // Grams against f64, in units of the trace; mean not removed.
        let mut gram_error = 0f64;
        for head in 0..c.n_q + c.n_kv {
            let (which, h) = if head < c.n_q { (0, head) } else { (1, head - c.n_q) };
            let columns: Vec<Vec<f64>> =
                (0..c.r).map(|i| effective(&made.hosts[which].w[h * c.r + i], &made.gain, false)).collect();
            let gram = engine.read_gram(0, head)?;
            let trace: f64 = columns.iter().map(|x| dot(x, x)).sum();
            for i in 0..c.r {
                for j in i..c.r {
                    let error = (gram[i * c.r + j] - dot(&columns[i], &columns[j])).abs() / trace;
                    gram_error = if error.is_nan() { f64::INFINITY } else { gram_error.max(error) };
                }
            }
        }
        // Logit bounds: certified, and close to an f64 power iteration.
        engine.plan(&stream)?;
        let cold = engine.head_bounds().unwrap().read()?;
        for _ in 0..8 {
            engine.plan(&stream)?;
        }
        let bounds = engine.head_bounds().unwrap().read()?;
        let plan_descales = engine.head_descales().read()?;
        let (mut lowest, mut highest, mut highest_cold) = (f64::INFINITY, 0f64, 0f64);
        for h in 0..c.n_q {
            let want = sigma(c, &made, h);
            let ratio = f64::from(bounds[h].sigma) / want;
            lowest = lowest.min(ratio);
            highest = highest.max(ratio);
            highest_cold = highest_cold.max(f64::from(cold[h].sigma) / want);
        }
        let agree = got.iter().zip(&plan_descales).all(|(a, b)| (a / b - 1.0).abs() < 1e-5);
        let status = engine.status().read()?[0];
        let bounds_ok = lowest >= 1.0 && highest < 1.01 && agree && status == 0;
        bad += i32::from(!bounds_ok);
        println!(
            "{} {:<24} sigma / f64 from {:.5} to {highest:.5} (cold {highest_cold:.4}) descales agree {agree} status {status} {:?}",
            if bounds_ok { "ok  " } else { "BAD " },
            c.name,
            lowest,
            bounds[0],
        );
        engine.descales(&stream)?;
        if c.dtype == Dtype::Bf16 && c.d.is_multiple_of(8) {
            // The power iteration against the same quantity in f64, without rotation.
            // SAFETY: as above.
            let power = unsafe { PowerEngine::new(&device, &[made.input], false, 1)? };
            // A flat spectrum converges slowly.
            for _ in 0..if c.name.starts_with("flat") { 3000 } else { 300 } {
                power.step(&stream)?;
            }
            let plain = Case { rotary: 0, ..*c };
            let worst = power
                .sigma()
                .read()?
                .iter()
                .enumerate()
                .fold(0f64, |worst, (h, &got)| worst.max((f64::from(got) / sigma(&plain, &made, h) - 1.0).abs()));
            bad += i32::from(worst.is_nan() || worst > 1e-4);
            println!("{} {:<24} power sigma error {worst:.1e}", if worst < 1e-4 { "ok  " } else { "BAD " }, c.name);
        }
        // The same bits again, also from a graph.
        let bits = |b: &Buffer<f32>| b.read().map(|v| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        let (first, gram) = (bits(engine.head_descales())?, engine.read_gram(0, 0)?);
        let graph = stream.capture(|s| engine.descales(s).and_then(|()| engine.grams(s)))?;
        graph.launch()?;
        let same = first == bits(engine.head_descales())? && gram == engine.read_gram(0, 0)?;
        let status = engine.status().read()?[0];
        // Roundings of few values do not average out.
        let gram_ok = gram_error < 2e-5 * (100.0 / c.d as f64).max(1.0);
        let ok = worst < 1e-5 && gram_ok && same && status == 0;
        bad += i32::from(!ok);
        println!(
            "{} {:<24} {:?} descale error {worst:.1e} (lowest {below:.1e}) gram error / trace {gram_error:.1e} \
             same bits {same} status {status}",
            if ok { "ok  " } else { "BAD " },
            c.name,
            engine.route(0).unwrap(),
        );
        // A NaN weight is flagged.
        let made = make(&device, c, 7, true)?;
        // SAFETY: as above.
        let engine = unsafe { ScaleEngine::new(&device, &[made.input], true)? };
        engine.descales(&stream)?;
        let got = engine.head_descales().read()?;
        let flagged = engine.status().read()?[0] & 1 == 1 && got[c.n_kv].is_nan() && !got[0].is_nan();
        // And reaches the bounds of the heads that use it, no others.
        engine.plan(&stream)?;
        let bounds = engine.head_bounds().unwrap().read()?;
        let group = c.n_q / c.n_kv;
        let of_head = |h: usize| [bounds[h].certain, bounds[h].rounded, bounds[h].descale];
        let flagged = flagged
            && engine.status().read()?[0] & 2 == 2
            && (0..c.n_q).all(|h| of_head(h).iter().all(|v| v.is_nan() == (h < group)));
        bad += i32::from(!flagged);
        if !flagged {
            println!("BAD  {:<24} a NaN weight is not flagged: {:?}", c.name, &got[..2 * c.n_kv]);
        }
    }
    println!("{} cases, {bad} bad", cases().count());
    if bad > 0 { std::process::exit(1) } else { Ok(()) }
}

// ---------------------------------------------------------------------------------------------------------- speed

const FILL: Source = Source {
    name: "fill",
    text: "__device__ unsigned mixed(unsigned h) {\n\
           h ^= h >> 16; h *= 0x7feb352du; h ^= h >> 15; h *= 0x846ca68bu; return h ^ h >> 16; }\n\
           __device__ float gauss(unsigned h) { float s = 0;\n\
           for (int k = 0; k < 4; k++) { h = mixed(h); s += (float)(h >> 8) * (1.f / 16777216.f) - 0.5f; }\n\
           return 1.732f * s; }\n\
           extern \"C\" __global__ void fill(unsigned short* x, unsigned long long n, unsigned seed, unsigned f32,\n\
           unsigned d, unsigned r) {\n\
           unsigned long long i = blockIdx.x * 256ull + threadIdx.x;\n\
           for (; i < n; i += gridDim.x * 256ull) {\n\
           unsigned h = (unsigned)i * 2654435761u + (unsigned)(i >> 32) * 97u + seed * 40503u;\n\
           float v = 0.02f * gauss(h) + (seed == 0 ? 1.f : 0.f);\n\
           if (r) {\n\
           unsigned row = (unsigned)(i / d), one = mixed(row * 2246822519u + seed * 3266489917u);\n\
           float size = exp2f((float)(one >> 8) * (-9.f / 16777216.f)) * (one & 1 ? 1.f : -1.f);\n\
           v = 0.3f * v + 0.02f * size * gauss((row / r * d + (unsigned)(i % d)) * 2654435761u + seed * 668265263u); }\n\
           if (f32) ((float*)x)[i] = v; else x[i] = (unsigned short)(__float_as_uint(v) >> 16); } }",
};

#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    layers: usize,
    d: usize,
    n_q: usize,
    n_kv: usize,
    r: usize,
    gpt: bool,
    conv1d: bool,
    f32: bool,
    /// Every head of q and k is carried by few directions over uneven channels.
    uneven: bool,
    /// Every so many layers one has no rotation; 0: none.
    fixed_every: usize,
}

const LLAMA_13B: Shape = Shape {
    name: "llama-2-13b",
    layers: 40,
    d: 5120,
    n_q: 40,
    n_kv: 40,
    r: 128,
    gpt: false,
    conv1d: false,
    f32: false,
    uneven: false,
    fixed_every: 0,
};
const GPT2_XL: Shape = Shape { name: "gpt2-xl", layers: 48, d: 1600, n_q: 25, n_kv: 25, r: 64, gpt: true, ..LLAMA_13B };
const MISTRAL: Shape = Shape { name: "mistral-7b", layers: 32, d: 4096, n_q: 32, n_kv: 8, ..LLAMA_13B };
const LLAMA_70B: Shape = Shape { name: "llama-2-70b", layers: 80, d: 8192, n_q: 64, n_kv: 8, ..LLAMA_13B };
const GEMMA_9B: Shape = Shape { name: "gemma-2-9b", layers: 42, d: 3584, n_q: 16, n_kv: 8, r: 256, ..LLAMA_13B };

const SHAPES: &[Shape] = &[
    Shape { name: "gpt2-xl-conv1d", conv1d: true, ..GPT2_XL },
    GPT2_XL,
    MISTRAL,
    LLAMA_13B,
    LLAMA_70B,
    Shape { name: "gpt2", layers: 12, d: 768, n_q: 12, n_kv: 12, ..GPT2_XL },
    Shape { name: "opt-6.7b", layers: 32, d: 4096, n_q: 32, n_kv: 32, r: 128, ..GPT2_XL },
    Shape { name: "qwen-2.5-0.5b", layers: 24, d: 896, n_q: 14, n_kv: 2, r: 64, ..MISTRAL },
    Shape { name: "smollm3-3b", layers: 36, d: 2048, n_q: 16, n_kv: 4, fixed_every: 4, ..LLAMA_13B },
    Shape { name: "phi-3-mini", layers: 32, d: 3072, n_q: 32, n_kv: 32, r: 96, ..LLAMA_13B },
    GEMMA_9B,
    Shape { name: "gemma-2-2b", layers: 26, d: 2304, n_q: 8, n_kv: 4, ..GEMMA_9B },
    Shape { name: "heads-of-192", d: 4096, n_q: 32, n_kv: 8, r: 192, ..GEMMA_9B },
    Shape { name: "heads-of-192-fixed", d: 4096, n_q: 32, n_kv: 8, r: 192, gpt: true, ..GEMMA_9B },
    Shape { name: "heads-of-160", d: 5120, n_q: 32, n_kv: 8, r: 160, ..GEMMA_9B },
    Shape { name: "mistral-7b-uneven", uneven: true, ..MISTRAL },
    Shape { name: "llama-2-13b-uneven", uneven: true, ..LLAMA_13B },
    Shape { name: "gpt2-xl-f32", f32: true, ..GPT2_XL },
    Shape { name: "mistral-7b-f32", f32: true, ..MISTRAL },
    Shape { name: "llama-2-13b-f32", f32: true, ..LLAMA_13B },
    Shape { name: "llama-2-70b-f32", f32: true, layers: 40, ..LLAMA_70B },
    Shape { name: "gemma-2-9b-f32", f32: true, ..GEMMA_9B },
];

fn median_us(stream: &Stream, mut work: impl FnMut(&Stream) -> Result<()>) -> Result<f64> {
    let graph = stream.capture(&mut work)?;
    for _ in 0..3 {
        graph.launch()?;
    }
    let mut times = vec![];
    for _ in 0..20 {
        let start = stream.record()?;
        graph.launch()?;
        let end = stream.record()?;
        stream.synchronize()?;
        times.push(f64::from(start.milliseconds_to(&end)?) * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[10])
}

fn bench(names: &[String]) -> Result<()> {
    let device = Device::open(0)?;
    let stream = device.stream()?;
    let bandwidth = {
        let from = device.zeros::<u8>(2 << 30)?;
        let mut to = device.allocate::<u8>(2 << 30)?;
        for _ in 0..3 {
            to.copy_from(&from, &stream)?;
        }
        let start = stream.record()?;
        for _ in 0..10 {
            to.copy_from(&from, &stream)?;
        }
        let end = stream.record()?;
        stream.synchronize()?;
        2.0 * (2u64 << 30) as f64 * 10.0 / (f64::from(start.milliseconds_to(&end)?) * 1e-3)
    };
    println!("# {} copy {:.2} TB/s, NVRTC {:?}", device.name()?, bandwidth / 1e12, cuda::compiler_version()?);
    println!("model,method,us_per_layer,ratio_to_floor");
    let fill = device.module(FILL, &[])?.kernel("fill")?;
    for s in SHAPES.iter().filter(|s| names.is_empty() || names.iter().any(|n| n == s.name)) {
        let mut memory = vec![];
        let mut inputs = vec![];
        let mut seed = 1u32;
        let (dtype, size) = if s.f32 { (Dtype::F32, 4) } else { (Dtype::Bf16, 2) };
        let mut random = |values: usize, gain: bool, uneven: bool| -> Result<DevicePtr> {
            let buffer = device.allocate::<u8>(values * size)?;
            let first = if gain { 0 } else { seed };
            let mut args =
                vec![Arg::Ptr(buffer.ptr()), Arg::U64(values as u64), Arg::U32(first), Arg::U32(s.f32.into())];
            args.extend([Arg::U32(s.d as u32), Arg::U32(if uneven { s.r as u32 } else { 0 })]);
            seed += 1;
            // SAFETY: the arguments are the kernel's and the buffer has that many values.
            unsafe { fill.launch(&stream, Launch::linear(1024, 256, 0), &args)? };
            let ptr = buffer.ptr();
            memory.push(buffer);
            Ok(ptr)
        };
        for layer in 0..s.layers {
            let fixed = s.gpt || s.fixed_every > 0 && layer % s.fixed_every == s.fixed_every - 1;
            let columns = (s.n_q + 2 * s.n_kv) * s.r;
            let fused = if s.conv1d { random(columns * s.d, false, false)? } else { DevicePtr::NULL };
            let mut start = 0;
            let mut projection = |heads: usize, uneven: bool| -> Result<ProjectionInput> {
                let weight = if s.conv1d {
                    let ptr = fused.offset(start);
                    start += (size * heads * s.r) as u64;
                    DeviceMatrix { ptr, dtype, row_stride: 1, col_stride: columns as i64 }
                } else {
                    let ptr = random(heads * s.r * s.d, false, uneven)?;
                    DeviceMatrix { ptr, dtype, row_stride: s.d as i64, col_stride: 1 }
                };
                let bias = if s.gpt { random(heads * s.r, false, false)? } else { DevicePtr::NULL };
                Ok(ProjectionInput { weight, bias })
            };
            let (q, k, v) = (projection(s.n_q, s.uneven)?, projection(s.n_kv, s.uneven)?, projection(s.n_kv, false)?);
            inputs.push(LayerInput {
                q,
                k,
                v: Some(v),
                gain: random(s.d, true, false)?,
                shift: if s.gpt { random(s.d, false, false)? } else { DevicePtr::NULL },
                vector_dtype: dtype,
                gain_offset: 0.0,
                mean_removed: s.gpt,
                d_model: s.d,
                n_q: s.n_q,
                n_kv: s.n_kv,
                d_head: s.r,
                rotary: if fixed { 0 } else { s.r },
                interleaved: false,
                rope_factor: 1.0,
                softmax_scale: 1.0 / (s.r as f64).sqrt(),
                query_factor: 1.0,
                rounding_share: 1.0 / 32.0,
                qk_norm: None,
            });
        }
        stream.synchronize()?;
        // SAFETY: `memory` outlives the engine and is written no more.
        let engine = unsafe { ScaleEngine::new(&device, &inputs, true)? };
        if std::env::var_os("ENGINE_PROBE_ONCE").is_some() {
            // For a profiler: the chain twice, nothing else.
            engine.plan(&stream)?;
            engine.plan(&stream)?;
            stream.synchronize()?;
            continue;
        }
        let layer = |heads: usize| (size * heads * s.r * s.d) as f64 / bandwidth * 1e6;
        let (qk, qkv) = (layer(s.n_q + s.n_kv), layer(s.n_q + 2 * s.n_kv));
        println!("{},floor_qk,{qk:.2},1.00\n{},floor_qkv,{qkv:.2},1.00", s.name, s.name);
        let report = |method: &str, us: f64, floor: f64| {
            let us = us / s.layers as f64;
            println!("{},{method},{us:.2},{:.3}", s.name, us / floor);
        };
        if std::env::var_os("ENGINE_PROBE_PLAN").is_some() {
            report("operand_descales", median_us(&stream, |s| engine.descales(s))?, qkv);
            report("plan", median_us(&stream, |s| engine.plan(s))?, qkv);
            println!("# matrices squared, at most: {:?}", engine.squared()?);
            continue;
        }
        report("operand_descales", median_us(&stream, |s| engine.descales(s))?, qkv);
        let (name, floor) = if engine.grams_read_values() { ("grams_norms_qkv", qkv) } else { ("grams_qk", qk) };
        report(name, median_us(&stream, |s| engine.grams(s))?, floor);
        if !s.f32 && s.r <= 128 {
            // SAFETY: as above.
            let power = unsafe { PowerEngine::new(&device, &inputs, false, 1)? };
            report("power_step", median_us(&stream, |s| power.step(s))?, qk);
            report("power_five_steps", median_us(&stream, |s| power.steps(s, 5))?, qk);
            // SAFETY: as above.
            let summed = unsafe { SummedPowerEngine::new(&device, &inputs, 1)? };
            report("power_sum_step", median_us(&stream, |s| summed.steps(s, 1))?, qk);
            // SAFETY: as above.
            let twice = unsafe { SummedPowerEngine::reading_twice(&device, &inputs, 1)? };
            report("power_sum_step_two_reads", median_us(&stream, |s| twice.steps(s, 1))?, qk);
        }
        report("plan", median_us(&stream, |s| engine.plan(s))?, qkv);
        if engine.status().read()?[0] != 0 {
            println!("# status {:?}", engine.status().read()?);
        }
        drop(engine);
        if !s.gpt {
            // Two kinds of layers, as Cohere 2 and SmolLM3 have them, and the second kind alone.
            for (method, step) in [("plan_fourth_unrotated", 4), ("plan_unrotated", 1)] {
                inputs.iter_mut().skip(step - 1).step_by(step).for_each(|l| l.rotary = 0);
                // SAFETY: as above.
                let engine = unsafe { ScaleEngine::new(&device, &inputs, true)? };
                report(method, median_us(&stream, |s| engine.plan(s))?, qkv);
            }
        }
    }
    Ok(())
}
