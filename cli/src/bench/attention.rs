//! `sigmascale bench attention`.

use super::csv::{Csv, CsvArgs};
use super::timing::device;
use crate::numbers::{count, whole};
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use sigmascale::attention::{AttentionCall, AttentionShape, Keeps, Mask, PvAccumulator, Sequence};
use sigmascale::cuda::Stream;
use sigmascale::device::attention::{
    BackwardEngine, BackwardOptions, Cuda, Element, Resident, ResidentBackward, RopeTables, Setup,
};
use sigmascale::fp8::{Format, OnOverflow};
use sigmascale::{Error, Result};

/// Time the attention kernel, its casts and its backward
///
/// Each figure is the median of --reps event-timed replays of a CUDA graph with one launch for each of --sets
/// inputs, after --warmup, so that launching from the host costs nothing (--no-graph times single launches).
/// FLOPs = 2 B Hq (D + Dv) for each pair of a query and a key that it sees.
///
/// Kernels:
///   fp8           only the attention, on E4M3 operands with V in the layout of the kernel
///   cast          only the cast, from BF16
///   e2e           cast and attention, from BF16
///
/// Suffixes of kernels:
///   +reorder      start from row-major E4M3 operands, V's reordering included
///   +rope         with the rotation in the cast
///   +telemetry    with maximum and minimum of the logits and amax of the output
///   +o8           write E4M3
///   +logits8      round the logits to E4M3
///   +serial       without overlapping cast and attention
///   +whole        without splitting calls that have few queries
///   +window-N     a query sees its own key and the N - 1 before it
///   +sink, +cap   with sinks, with a soft-cap of 50
///   +packed       all sequences as one packed batch
///   +tail         sequences of half of all rows, a quarter, and so on
///
/// With --backward: forward, backward and both of a training step, one row each. fp8 starts from operands that
/// were cast before, e2e from BF16. FLOPs of the backward count 2.5 times. peak_mib is memory without q, k, v and
/// dO: output, log-sum-exp, saved operands, gradients, and the larger of the two workspaces.
#[derive(clap::Args)]
#[command(allow_negative_numbers = true, verbatim_doc_comment)]
pub struct Args {
    /// Shapes, comma-separated; 64x64x192x128 has values of 128 channels
    #[arg(long, value_name = "Q_HEADSxKV_HEADSxHEAD_DIM[xV_HEAD_DIM]", default_value = "64x8x128,32x32x64", value_delimiter = ',', value_parser = parse_shape)]
    shapes: Vec<[usize; 4]>,
    /// Lengths of keys, and of queries unless --queries says otherwise
    #[arg(long, default_value = "1024,2048,4096,8192,16384", value_delimiter = ',', value_parser = count)]
    seqlens: Vec<usize>,
    /// Queries of a sequence, at the end of its keys, as in decoding
    #[arg(long, value_delimiter = ',', value_parser = count)]
    queries: Vec<usize>,
    /// batch = max(1, tokens / seqlen)
    #[arg(long, default_value_t = 16384, value_parser = count)]
    tokens: usize,
    /// Only causal calls
    #[arg(long)]
    causal: bool,
    /// Kernels to time, comma-separated
    #[arg(
        long,
        default_value = "fp8,fp8+reorder,fp8+telemetry,fp8+o8,fp8+logits8,cast,cast+rope,e2e,e2e+rope,e2e+telemetry,e2e+serial",
        value_delimiter = ',',
        value_parser = Timed::parse
    )]
    kernels: Vec<Timed>,
    /// How P V is summed: f16, or fp8-N for FP8 promoted to f32 every N keys [default: fp8-256, with --backward f16]
    #[arg(long)]
    accumulator: Option<PvAccumulator>,
    /// Training steps instead of --kernels: forward and backward; P V in f16 unless --accumulator says otherwise
    #[arg(long)]
    backward: bool,
    /// With --backward: dQ in FP8, with a scale per row
    #[arg(long, requires = "backward")]
    dq_fp8: bool,
    /// With --backward: delta from the output before its rounding to BF16
    #[arg(long, requires = "backward", conflicts_with = "dq_fp8")]
    unrounded_delta: bool,
    /// With --backward: run it in parts whose f32 sums of dQ take at most this many MiB [default: parts in which the
    /// step needs no more memory than in BF16]
    #[arg(long, value_name = "MIB", requires = "backward")]
    sums: Option<usize>,
    /// Untimed warm-up launches
    #[arg(long, default_value_t = 5, value_parser = whole)]
    warmup: u64,
    /// Timed launches
    #[arg(long, default_value_t = 20, value_parser = count)]
    reps: usize,
    /// Time single launches instead of replays of a CUDA graph
    #[arg(long)]
    no_graph: bool,
    /// Distinct sets of inputs per graph, so that they do not stay in the L2 cache
    #[arg(long, default_value_t = 3, value_parser = count)]
    sets: usize,
    #[command(flatten)]
    output: CsvArgs,
}

fn parse_shape(text: &str) -> Result<[usize; 4], String> {
    let numbers: Option<Vec<usize>> = text.split('x').map(|number| number.parse().ok()).collect();
    let shape = match numbers.as_deref() {
        Some(&[heads_q, heads_kv, d]) => Some([heads_q, heads_kv, d, d]),
        Some(&[heads_q, heads_kv, d_head, d_v]) => Some([heads_q, heads_kv, d_head, d_v]),
        _ => None,
    };
    shape.ok_or_else(|| "a shape is heads_q x heads_kv x head_dim, such as 64x8x128".into())
}

/// What is timed.
#[derive(Clone, Debug, Default)]
struct Timed {
    name: String,
    cast: bool,
    attention: bool,
    reorder: bool,
    rope: bool,
    telemetry: bool,
    out_e4m3: bool,
    logits_e4m3: bool,
    serial: bool,
    whole: bool,
    window: Option<usize>,
    sink: bool,
    cap: bool,
    packed: bool,
    tail: bool,
}

impl Timed {
    fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split('+');
        let mut timed = Self { name: text.into(), ..Self::default() };
        match parts.next() {
            Some("fp8") => timed.attention = true,
            Some("cast") => timed.cast = true,
            Some("e2e") => (timed.cast, timed.attention) = (true, true),
            _ => return Err(format!("{text}: a kernel starts with fp8, cast or e2e")),
        }
        for part in parts {
            match part {
                "reorder" if !timed.cast => timed.reorder = true,
                "reorder" => {
                    return Err(format!(
                        "{text}: the cast writes V in the kernel's layout; fp8+reorder starts without"
                    ));
                }
                "rope" => timed.rope = true,
                "telemetry" => timed.telemetry = true,
                "o8" => timed.out_e4m3 = true,
                "logits8" => timed.logits_e4m3 = true,
                "serial" => timed.serial = true,
                "whole" => timed.whole = true,
                "sink" => timed.sink = true,
                "cap" => timed.cap = true,
                "packed" => timed.packed = true,
                "tail" => timed.tail = true,
                _ if part.starts_with("window-") => {
                    timed.window =
                        Some(part["window-".len()..].parse().map_err(|_| format!("{text}: {part} has no number"))?);
                }
                _ => {
                    return Err(format!(
                        "{text}: unknown part {part}: reorder, rope, telemetry, o8, logits8, serial, whole, window-N, sink, cap, packed or tail"
                    ));
                }
            }
        }
        if timed.reorder && timed.rope {
            return Err(format!("{text}: E4M3 operands are not rotated, RoPE comes before the cast"));
        }
        timed.telemetry |= timed.logits_e4m3;
        Ok(timed)
    }

    /// Which keys a query sees.
    fn mask(&self, causal: bool) -> Mask {
        match self.window {
            Some(window) => Mask { causal, ..Mask::sliding(window) },
            None => Mask { causal, ..Mask::NONE },
        }
    }

    /// The rows of a packed batch, if it is one.
    fn sequences(&self, sizes: &AttentionShape) -> Option<Vec<Sequence>> {
        let AttentionShape { batch, len_q, len_k, .. } = *sizes;
        let shares = |total: usize| -> Vec<usize> {
            let mut ends = vec![0];
            while self.tail && ends[ends.len() - 1] < total {
                let left = total - ends[ends.len() - 1];
                ends.push(total - if left > 128 { left / 2 } else { 0 });
            }
            if self.tail { ends } else { (0..=batch).map(|b| b * (total / batch)).collect() }
        };
        (self.packed || self.tail).then(|| {
            let (q, k) = (shares(batch * len_q), shares(batch * len_k));
            let both = q.windows(2).zip(k.windows(2));
            both.map(|(q, k)| Sequence { q: q[0]..q[1], k: k[0]..k[1] }).collect()
        })
    }

    /// Pairs of a query and a key that it sees, of one head; those of whole sequences as others count them.
    fn pairs(&self, sizes: &AttentionShape, causal: bool) -> f64 {
        let AttentionShape { batch, len_q, len_k, .. } = *sizes;
        if self.window.is_none() && !self.tail {
            return batch as f64 * pairs(len_q, len_k, causal);
        }
        let mask = self.mask(causal);
        let of = |q: usize, k: usize| (0..q).map(|row| mask.visible(row, q, k).len() as f64).sum::<f64>();
        self.sequences(sizes).map_or_else(
            || batch as f64 * of(len_q, len_k),
            |sequences| sequences.iter().map(|s| of(s.q.len(), s.k.len())).sum(),
        )
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    let device = device()?;
    let stream = device.stream()?;
    let Args { shapes, seqlens, queries, tokens, kernels, backward, sets, .. } = args;
    let accumulator = args.accumulator.unwrap_or(if backward { PvAccumulator::F16 } else { PvAccumulator::default() });
    let options = BackwardOptions {
        sums_limit: args.sums.map(|mib| mib.saturating_mul(1 << 20)),
        keeps: match (args.dq_fp8, args.unrounded_delta) {
            (true, _) => Keeps::Fp8Dq,
            (_, true) => Keeps::UnroundedDelta,
            _ => Keeps::Operands,
        },
        ..BackwardOptions::default()
    };
    let timing = Timing { stream, warmup: args.warmup, reps: args.reps, sets, graph: !args.no_graph };
    let mut csv = Csv::new(args.output, [])?;
    csv.line(&format!("# {}, P V in {accumulator}", device.name()?));
    csv.line(if backward {
        "kernel,pass,heads_q,heads_kv,head_dim,seqlen,batch,causal,ms,tflops,peak_mib"
    } else {
        "kernel,heads_q,heads_kv,head_dim,seqlen,batch,causal,ms,tflops"
    });
    for [heads_q, heads_kv, d_head, d_v] in shapes {
        let dims = if d_v == d_head { d_head.to_string() } else { format!("{d_head}/{d_v}") };
        let lengths = seqlens.iter().flat_map(|&len| {
            let queries = if queries.is_empty() { vec![len] } else { queries.clone() };
            queries.into_iter().map(move |len_q| (len_q, len))
        });
        for (len_q, len) in lengths {
            let batch = (tokens / len).max(1);
            let sizes =
                AttentionShape { batch, n_q_heads: heads_q, n_kv_heads: heads_kv, len_q, len_k: len, d_head, d_v };
            sizes.check_on_gpu()?;
            if !queries.is_empty() {
                csv.line(&format!("# {len_q} queries a sequence"));
            }
            let operands = Operands::draw(&sizes);
            for causal in [false, true].into_iter().filter(|causal| *causal || !args.causal) {
                let shape = format!("{heads_q},{heads_kv},{dims},{len},{batch},{}", u8::from(causal));
                let rate = |timed: &Timed, ms: f32, times: f64| {
                    let flops = 2.0 * (heads_q * (d_head + d_v)) as f64 * timed.pairs(&sizes, causal);
                    format!("{:.1}", times * flops / f64::from(ms) / 1e9)
                };
                if backward {
                    let engine = Cuda::new(&device)?;
                    for row in training_step(&timing, &engine, &operands, &sizes, causal, (accumulator, options))? {
                        let (name, ms) = (row.name, row.ms);
                        csv.line(&format!(
                            "{name},{shape},{ms:.4},{},{:.1}",
                            rate(&Timed::default(), ms, row.flops),
                            row.mib
                        ));
                    }
                    continue;
                }
                for timed in &kernels {
                    let engine = &Cuda::new(&device)?.with_overlap(!timed.serial).with_split(!timed.whole);
                    let sets = (0..sets)
                        .map(|_| operands.call(engine, timed, &sizes, causal, accumulator, Keeps::Nothing))
                        .collect::<Result<Vec<_>>>()?;
                    // The attention alone reads what one cast left.
                    sets.iter().try_for_each(|call| call.launch(engine, &timing.stream))?;
                    let ms = timing.median_ms(|i, stream| match (timed.cast || timed.reorder, timed.attention) {
                        (true, true) => sets[i].launch(engine, stream),
                        (true, false) => sets[i].cast(engine, stream),
                        _ => sets[i].attend(engine, stream),
                    })?;
                    let tflops = if timed.attention { rate(timed, ms, 1.0) } else { String::new() };
                    csv.line(&format!("{},{shape},{ms:.4},{tflops}", timed.name));
                }
            }
        }
    }
    csv.finish()
}

/// One figure of a training step.
struct Pass {
    /// Kernel and pass.
    name: &'static str,
    /// Of the forward's.
    flops: f64,
    ms: f32,
    mib: f64,
}

/// Times of forward, backward and both.
fn training_step(
    timing: &Timing,
    engine: &Cuda,
    operands: &Operands,
    sizes: &AttentionShape,
    causal: bool,
    (accumulator, options): (PvAccumulator, BackwardOptions),
) -> Result<Vec<Pass>> {
    let backward = &BackwardEngine::new(engine.device())?.with_options(options);
    let sets = (0..timing.sets)
        .map(|_| {
            let forward = operands.call(engine, &Timed::default(), sizes, causal, accumulator, options.keeps)?;
            forward.launch(engine, &timing.stream)?;
            let gradients = ResidentBackward::new(backward, &forward, &operands.d_out)?;
            gradients.launch(backward, &timing.stream)?;
            Ok((forward, gradients))
        })
        .collect::<Result<Vec<_>>>()?;
    let mib = sets.first().map_or(0.0, |(forward, gradients)| {
        let ([kept, before], [after, scratch]) = (forward.bytes(), gradients.bytes());
        (kept + before.max(after + scratch)) as f64 / f64::from(1 << 20)
    });
    let attend = |i: usize, stream: &Stream| sets[i].0.attend(engine, stream);
    let forward = |i: usize, stream: &Stream| sets[i].0.launch(engine, stream);
    let gradients = |i: usize, stream: &Stream| sets[i].1.launch(backward, stream);
    let pass = |name, flops, ms: Result<f32>| ms.map(|ms| Pass { name, flops, ms, mib });
    Ok(vec![
        pass("fp8,fwd_bwd", 3.5, timing.median_ms(|i, s| attend(i, s).and_then(|()| gradients(i, s))))?,
        pass("e2e,fwd_bwd", 3.5, timing.median_ms(|i, s| forward(i, s).and_then(|()| gradients(i, s))))?,
        pass("fp8,bwd", 2.5, timing.median_ms(gradients))?,
        pass("fp8,fwd", 1.0, timing.median_ms(attend))?,
        pass("e2e,fwd", 1.0, timing.median_ms(forward))?,
    ])
}

/// Pairs of a query and a key that it sees, half a square where causal queries are as many as keys.
fn pairs(len_q: usize, len_k: usize, causal: bool) -> f64 {
    let (q, k) = (len_q as f64, len_k as f64);
    match causal {
        false => q * k,
        true if q <= k => q * (k - q / 2.0),
        true => k * k / 2.0,
    }
}

/// Normal numbers in BF16, and unit tables of rotations.
struct Operands {
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
    d_out: Vec<u8>,
    cosine: Vec<f32>,
    sine: Vec<f32>,
}

impl Operands {
    fn draw(sizes: &AttentionShape) -> Self {
        let normal = |shape: [usize; 4], seed: u64| -> Vec<u8> {
            const CHUNK: usize = 1 << 16;
            // Long caches repeat their numbers.
            const DISTINCT: usize = 1 << 7;
            let mut bytes = vec![0u8; 2 * shape.iter().product::<usize>()];
            let drawn = bytes.len().min(2 * CHUNK * DISTINCT);
            let (drawn, rest) = bytes.split_at_mut(drawn);
            drawn.par_chunks_mut(2 * CHUNK).enumerate().for_each(|(i, chunk)| {
                let mut rng = StdRng::seed_from_u64(seed << 32 | i as u64);
                for to in chunk.chunks_exact_mut(2) {
                    let x: f32 = StandardNormal.sample(&mut rng);
                    to.copy_from_slice(&bf16::from_f32(x).to_le_bytes());
                }
            });
            rest.par_chunks_mut(drawn.len()).for_each(|chunk| chunk.copy_from_slice(&drawn[..chunk.len()]));
            bytes
        };
        let mut rng = StdRng::seed_from_u64(0);
        let angles: Vec<f32> =
            (0..sizes.len_k * sizes.d_head / 2).map(|_| rng.random_range(0.0..std::f32::consts::TAU)).collect();
        Self {
            q: normal(sizes.q_shape(), 1),
            k: normal(sizes.k_shape(), 2),
            v: normal(sizes.v_shape(), 3),
            d_out: normal(sizes.out_shape(), 4),
            cosine: angles.iter().map(|a| a.cos()).collect(),
            sine: angles.iter().map(|a| a.sin()).collect(),
        }
    }

    fn call(
        &self,
        engine: &Cuda,
        timed: &Timed,
        sizes: &AttentionShape,
        causal: bool,
        accumulator: PvAccumulator,
        keeps: Keeps,
    ) -> Result<Resident> {
        // As the scripts of the peers: descales of 1, logits within a tenth of the range.
        let (ones, logit) = (vec![1.0; sizes.n_kv_heads], vec![0.1; sizes.n_q_heads]);
        let sequences = timed.sequences(sizes);
        let packed =
            AttentionShape { batch: 1, len_q: sizes.batch * sizes.len_q, len_k: sizes.batch * sizes.len_k, ..*sizes };
        let sinks = timed.sink.then(|| vec![0.0; sizes.n_q_heads]);
        let setup = Setup {
            call: AttentionCall {
                mask: timed.mask(causal),
                soft_cap: timed.cap.then_some(50.0),
                sinks: sinks.as_deref(),
                sequences: sequences.as_deref(),
                ..AttentionCall::causal(if sequences.is_some() { packed } else { *sizes })
            },
            operands: if timed.reorder { Element::E4m3 } else { Element::Bf16 },
            descales: [&ones, &ones, &ones],
            logit: timed.logits_e4m3.then_some(&logit[..]),
            output: timed.out_e4m3.then_some(&ones[..]),
            rope: timed.rope.then_some(RopeTables { cosine: &self.cosine, sine: &self.sine, interleaved: false }),
            stats: timed.telemetry,
            accumulator,
            keeps,
        };
        let mut call = Resident::new(engine, &setup)?;
        if timed.reorder {
            let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| e4m3(x));
            call.write([&q, &k, &v])?;
        } else {
            call.write([&self.q, &self.k, &self.v])?;
        }
        Ok(call)
    }
}

/// BF16 values rounded to E4M3 by a descale of 1.
fn e4m3(bytes: &[u8]) -> Vec<u8> {
    let codes: Vec<u8> =
        (0..=u16::MAX).map(|x| Format::E4m3.encode(bf16::from_bits(x).to_f32(), OnOverflow::Saturate)).collect();
    bytes.par_chunks_exact(2).map(|x| codes[usize::from(u16::from_le_bytes([x[0], x[1]]))]).collect()
}

/// How launches are timed.
struct Timing {
    stream: Stream,
    warmup: u64,
    reps: usize,
    sets: usize,
    graph: bool,
}

impl Timing {
    /// Median time of one launch, in milliseconds; `launch(i, ..)` takes set `i` of inputs.
    fn median_ms(&self, launch: impl Fn(usize, &Stream) -> Result<()>) -> Result<f32> {
        if !self.graph {
            return self.median(|i| launch(i % self.sets, &self.stream));
        }
        let graph = self.stream.capture(|stream| (0..self.sets).try_for_each(|i| launch(i, stream)))?;
        Ok(self.median(|_| graph.launch())? / self.sets as f32)
    }

    fn median(&self, launch: impl Fn(usize) -> Result<()>) -> Result<f32> {
        (0..self.warmup).try_for_each(|i| launch(i as usize))?;
        self.stream.synchronize()?;
        let mut times = (0..self.reps)
            .map(|i| {
                let start = self.stream.record()?;
                launch(i)?;
                start.milliseconds_to(&self.stream.record()?)
            })
            .collect::<Result<Vec<f32>>>()?;
        times.sort_by(f32::total_cmp);
        times.get(self.reps / 2).copied().ok_or_else(|| Error::cuda("nothing was timed"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_that_a_mask_shows() {
        let counted = |q: usize, k: usize| (0..q).map(|i| (i + 1 + k).saturating_sub(q)).sum::<usize>() as f64;
        for (q, k) in [(1, 9000), (16, 9000), (4096, 4096), (4096, 100)] {
            let have = pairs(q, k, true);
            // Half of the diagonal is left out.
            assert!((have - counted(q, k)).abs() <= 0.5 * q as f64, "{q} x {k}: {have}");
            assert_eq!(pairs(q, k, false), (q * k) as f64);
        }
    }

    #[test]
    fn operands_are_rounded_once() {
        let values = [0.0, 1.0, -2.5, 17.0, 500.0, 1e-3f32];
        let bytes: Vec<u8> = values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
        let codes: Vec<f32> = e4m3(&bytes).into_iter().map(|code| Format::E4m3.decode(code)).collect();
        assert_eq!(codes, [0.0, 1.0, -2.5, 16.0, 448.0, 0.001953125]);
    }

    #[test]
    fn names_of_kernels_and_shapes() {
        let timed = Timed::parse("e2e+rope+logits8").unwrap();
        assert!(timed.cast && timed.attention && timed.rope && timed.logits_e4m3 && timed.telemetry && !timed.serial);
        assert!(Timed::parse("fp8+whole").is_ok_and(|timed| timed.whole && !timed.telemetry));
        assert!(Timed::parse("fp8+reorder").is_ok_and(|timed| timed.reorder && timed.attention && !timed.cast));
        for wrong in ["bf16", "fp8+fast", "e2e+reorder", "cast+reorder", "fp8+reorder+rope"] {
            assert!(Timed::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_shape("64x8x128").unwrap(), [64, 8, 128, 128]);
        assert_eq!(parse_shape("64x64x192x128").unwrap(), [64, 64, 192, 128]);
        assert!(parse_shape("64x8").is_err() && parse_shape("axbxc").is_err());
    }
}
