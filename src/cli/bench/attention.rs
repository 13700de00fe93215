//! `sigmascale bench attention`.

use super::{Csv, CsvArgs, device};
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use sigmascale::cuda::Stream;
use sigmascale::cuda::attention::{AttentionEngine, Element, Resident, RopeTables, Setup, Sizes};
use sigmascale::{Error, Result};

/// The attention kernel and its casts
///
/// Each figure is the median of --reps event-timed launches after --warmup; inputs rotate among --sets buffers. FLOPs =
/// 4 B Hq Sq Sk D, halved when causal. Kernels: `fp8` is the attention alone on E4M3 operands; `+telemetry` adds maximum
/// and minimum of the logits and amax of the output, `+o8` writes E4M3, `+logits8` passes the logits through E4M3. `cast`
/// and `cast+rope` are the cast alone from BF16; `e2e` is cast and attention from BF16, `+rope` with the rotation in the
/// cast, `+serial` without the overlap of the two.
#[derive(clap::Args)]
pub struct Args {
    /// heads_q x heads_kv x head_dim, comma separated
    #[arg(long, default_value = "64x8x128,32x32x64", value_delimiter = ',', value_parser = parse_shape)]
    shapes: Vec<[usize; 3]>,
    /// Lengths of queries and keys
    #[arg(long, default_value = "1024,2048,4096,8192,16384", value_delimiter = ',')]
    seqlens: Vec<usize>,
    /// batch = max(1, tokens / seqlen)
    #[arg(long, default_value_t = 16384)]
    tokens: usize,
    /// Which kernels
    #[arg(
        long,
        default_value = "fp8,fp8+telemetry,fp8+o8,fp8+logits8,cast,cast+rope,e2e,e2e+rope,e2e+telemetry,e2e+serial",
        value_delimiter = ',',
        value_parser = Timed::parse
    )]
    kernels: Vec<Timed>,
    /// Launches before the first that counts
    #[arg(long, default_value_t = 5)]
    warmup: usize,
    /// Launches that count
    #[arg(long, default_value_t = 20)]
    reps: usize,
    /// Sets of inputs
    #[arg(long, default_value_t = 3)]
    sets: usize,
    #[command(flatten)]
    output: CsvArgs,
}

fn parse_shape(text: &str) -> Result<[usize; 3], String> {
    let numbers: Vec<usize> = text.split('x').map(str::parse).collect::<Result<_, _>>().map_err(|e| format!("{e}"))?;
    numbers.try_into().map_err(|_| "a shape is heads_q x heads_kv x head_dim, such as 64x8x128".into())
}

/// What is timed.
#[derive(Clone, Debug, Default)]
struct Timed {
    name: String,
    cast: bool,
    attention: bool,
    rope: bool,
    telemetry: bool,
    out_e4m3: bool,
    logits_e4m3: bool,
    serial: bool,
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
                "rope" => timed.rope = true,
                "telemetry" => timed.telemetry = true,
                "o8" => timed.out_e4m3 = true,
                "logits8" => timed.logits_e4m3 = true,
                "serial" => timed.serial = true,
                _ => return Err(format!("{text}: unknown part {part}: rope, telemetry, o8, logits8 or serial")),
            }
        }
        timed.telemetry |= timed.logits_e4m3;
        Ok(timed)
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    if args.seqlens.contains(&0) || args.tokens == 0 || args.reps == 0 || args.sets == 0 {
        return Err(Error::argument("lengths, tokens, reps and sets must be greater than zero"));
    }
    let device = device()?;
    let engines = [true, false].map(|overlap| AttentionEngine::new(&device).map(|e| e.with_overlap(overlap)));
    let [overlapping, serial] = engines;
    let (overlapping, serial) = (overlapping?, serial?);
    let stream = device.stream()?;
    let mut csv = Csv::new(args.output)?;
    csv.line(&format!("# {}", device.name()?));
    csv.line("kernel,heads_q,heads_kv,head_dim,seqlen,batch,causal,ms,tflops");
    for &[heads_q, heads_kv, d_head] in &args.shapes {
        for &len in &args.seqlens {
            let sizes = Sizes { batch: (args.tokens / len).max(1), heads_q, heads_kv, len_q: len, len_k: len, d_head };
            sizes.check()?;
            let operands = Operands::draw(&sizes);
            for causal in [false, true] {
                for timed in &args.kernels {
                    let engine = if timed.serial { &serial } else { &overlapping };
                    let sets = (0..args.sets)
                        .map(|_| operands.call(engine, timed, &sizes, causal))
                        .collect::<Result<Vec<_>>>()?;
                    let launch = |i: usize| {
                        let call = &sets[i % sets.len()];
                        match (timed.cast, timed.attention) {
                            (true, true) => call.launch(engine, &stream),
                            (true, false) => call.cast(engine, &stream),
                            _ => call.attend(engine, &stream),
                        }
                    };
                    // The attention alone reads what one cast left.
                    sets.iter().try_for_each(|call| call.launch(engine, &stream))?;
                    let ms = median_ms(&stream, launch, args.warmup, args.reps)?;
                    let pairs = (sizes.batch * heads_q * len * len) as f64 / if causal { 2.0 } else { 1.0 };
                    let tflops = if timed.attention {
                        format!("{:.1}", 4.0 * pairs * d_head as f64 / f64::from(ms) / 1e9)
                    } else {
                        String::new()
                    };
                    let (name, batch, causal) = (&timed.name, sizes.batch, u8::from(causal));
                    csv.line(&format!("{name},{heads_q},{heads_kv},{d_head},{len},{batch},{causal},{ms:.4},{tflops}"));
                }
            }
        }
    }
    csv.finish()
}

/// Normal numbers in BF16, and unit tables of rotations.
struct Operands {
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
    cosine: Vec<f32>,
    sine: Vec<f32>,
}

impl Operands {
    fn draw(sizes: &Sizes) -> Self {
        let normal = |shape: [usize; 4], seed: u64| -> Vec<u8> {
            const CHUNK: usize = 1 << 16;
            let mut bytes = vec![0u8; 2 * shape.iter().product::<usize>()];
            bytes.par_chunks_mut(2 * CHUNK).enumerate().for_each(|(i, chunk)| {
                let mut rng = StdRng::seed_from_u64(seed << 32 | i as u64);
                for to in chunk.chunks_exact_mut(2) {
                    let x: f32 = StandardNormal.sample(&mut rng);
                    to.copy_from_slice(&bf16::from_f32(x).to_le_bytes());
                }
            });
            bytes
        };
        let mut rng = StdRng::seed_from_u64(0);
        let angles: Vec<f32> =
            (0..sizes.len_k * sizes.d_head / 2).map(|_| rng.random_range(0.0..std::f32::consts::TAU)).collect();
        Self {
            q: normal(sizes.q_shape(), 1),
            k: normal(sizes.kv_shape(), 2),
            v: normal(sizes.kv_shape(), 3),
            cosine: angles.iter().map(|a| a.cos()).collect(),
            sine: angles.iter().map(|a| a.sin()).collect(),
        }
    }

    fn call(&self, engine: &AttentionEngine, timed: &Timed, sizes: &Sizes, causal: bool) -> Result<Resident> {
        // As the scripts of the peers: descales of 1, logits within a tenth of the range.
        let (ones, logit) = (vec![1.0; sizes.heads_kv], vec![0.1; sizes.heads_q]);
        let setup = Setup {
            sizes: *sizes,
            causal,
            softmax_scale: (sizes.d_head as f32).sqrt().recip(),
            operands: Element::Bf16,
            descales: [&ones, &ones, &ones],
            logit: timed.logits_e4m3.then_some(&logit[..]),
            output: timed.out_e4m3.then_some(&ones[..]),
            rope: timed.rope.then_some(RopeTables { cosine: &self.cosine, sine: &self.sine, interleaved: false }),
            stats: timed.telemetry,
        };
        let mut call = Resident::new(engine, &setup)?;
        call.write([&self.q, &self.k, &self.v])?;
        Ok(call)
    }
}

/// Median time of one launch, in milliseconds.
fn median_ms(stream: &Stream, launch: impl Fn(usize) -> Result<()>, warmup: usize, reps: usize) -> Result<f32> {
    (0..warmup).try_for_each(&launch)?;
    stream.synchronize()?;
    let mut times = (0..reps)
        .map(|i| {
            let start = stream.record()?;
            launch(i)?;
            start.milliseconds_to(&stream.record()?)
        })
        .collect::<Result<Vec<f32>>>()?;
    times.sort_by(f32::total_cmp);
    times.get(reps / 2).copied().ok_or_else(|| Error::cuda("nothing was timed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_kernels_and_shapes() {
        let timed = Timed::parse("e2e+rope+logits8").unwrap();
        assert!(timed.cast && timed.attention && timed.rope && timed.logits_e4m3 && timed.telemetry && !timed.serial);
        assert!(Timed::parse("bf16").is_err() && Timed::parse("fp8+fast").is_err());
        assert_eq!(parse_shape("64x8x128").unwrap(), [64, 8, 128]);
        assert!(parse_shape("64x8").is_err() && parse_shape("axbxc").is_err());
    }
}
