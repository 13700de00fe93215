//! `sigmascale bench spectral`: scales from weights, relative to one read of the weights.
//!
//! Every method runs over all layers of the model at once, captured in a CUDA graph; the median replay is divided by the
//! layer count. Weights are random BF16 in memory of their own for each layer, so that the L2 cache does not serve them.

use super::csv::{Csv, CsvArgs};
use super::timing::{copy_bandwidth, device, median_us};
use crate::model::{Model, files};
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sigmascale::bound::Tail;
use sigmascale::cuda::{Buffer, Device, DevicePtr, Stream, compiler_version};
use sigmascale::device::policy::{BoundSource, PolicyEngine};
use sigmascale::device::scale::{
    DeviceMatrix, DeviceWeights, Dtype, LayerInput, PowerEngine, ProjectionInput, ScaleEngine, SummedPowerEngine,
};
use sigmascale::model::{AttentionSpec, GainForm, LayerSpec, NormKind, RopeLayout, preset};
use sigmascale::policy::PolicyKind;
use sigmascale::{Error, Result};
use std::sync::Arc;

/// Time scales from weights in device memory, relative to one read of the weights
#[derive(clap::Args)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// Preset name, config.json or checkpoint, whose shapes are measured, or a shape D,Q_HEADS,KV_HEADS,D_HEAD[,LAYERS];
    /// may be repeated [default: gpt2-xl, mistral-7b, llama-2-13b, llama-2-70b]
    #[arg(long = "model", value_name = "MODEL")]
    models: Vec<String>,
    /// Layers [default: the model's; 12 of a shape]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    layers: Option<u16>,
    /// Weights as one fused [in, out] matrix, as GPT-2 stores them
    #[arg(long)]
    conv1d: bool,
    #[command(flatten)]
    output: CsvArgs,
}

/// What the peers' script measures.
const PEERS: [&str; 4] = ["gpt2-xl", "mistral-7b", "llama-2-13b", "llama-2-70b"];

/// One model to measure.
#[derive(Clone, Debug, PartialEq)]
struct Subject {
    name: String,
    layers: usize,
    form: LayerInput,
    /// Rotated channels, whether pairs are interleaved, and the factor, of one layer after the other, then again.
    rotations: Vec<(usize, bool, f32)>,
    shift: bool,
    /// Biases of q, k and v.
    biases: [bool; 3],
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    let named: Vec<&str> =
        if args.models.is_empty() { PEERS.to_vec() } else { args.models.iter().map(String::as_str).collect() };
    let layers = args.layers.map(usize::from);
    let subjects = named.into_iter().map(|name| subject(name, layers)).collect::<Result<Vec<_>>>()?;
    let read = args.models.iter().filter_map(|name| Some(files(name, &Model::open(name).ok()?))).flatten();
    let mut csv = Csv::new(args.output, read)?;
    let device = device()?;
    let stream = device.stream()?;
    let bandwidth = copy_bandwidth(&device, &stream)?;
    let (major, minor) = compiler_version()?;
    csv.line(&format!("# {} NVRTC {major}.{minor} copy {:.2} TB/s", device.name()?, bandwidth / 1e12));
    csv.line("# floor: one read of W_Q and W_K, for gram_head and power_*; floor_qkv: of W_V too, for the rest");
    csv.line("model,method,us_per_layer,ratio_to_floor");
    for subject in &subjects {
        measure(&device, &stream, bandwidth, subject, args.conv1d, &mut csv)?;
    }
    csv.finish()
}

fn subject(argument: &str, layers: Option<usize>) -> Result<Subject> {
    let shape: Option<Vec<usize>> = argument.split(',').map(|number| number.trim().parse().ok()).collect();
    if let Some(shape) = shape {
        let ([d, n_q, n_kv, r] | [d, n_q, n_kv, r, _]) = shape[..] else {
            return Err(Error::argument(format_args!(
                "a shape is D,Q_HEADS,KV_HEADS,D_HEAD or D,Q_HEADS,KV_HEADS,D_HEAD,LAYERS, not {argument}"
            )));
        };
        let layers = layers.or(shape.get(4).copied()).unwrap_or(12);
        let form = LayerInput { d_model: d, n_q, n_kv, d_head: r, ..LayerInput::without_addresses() };
        let (name, rotations) = (argument.replace(',', "x"), vec![(r, false, 1.0)]);
        return checked(Subject { name, layers, form, rotations, shift: false, biases: [false; 3] });
    }
    let spec = match Model::open(argument)? {
        Model::Config(spec) => *spec,
        Model::Checkpoint(checkpoint) => checkpoint.spec().clone(),
    };
    if spec.qk_norm.is_some() {
        return Err(Error::unsupported(format_args!(
            "{argument}: the gains of its QK-norm bound q and k, so there is no spectrum to measure"
        )));
    }
    if !spec.is_plain() {
        return Err(Error::unsupported(format_args!(
            "{argument}: its layers differ in their heads, and a row of times is of one shape: give that as d,n_q,n_kv,r"
        )));
    }
    let rotation = |layer: &LayerSpec| match &layer.rope {
        Some(rope) => (rope.rotary_dim, rope.layout == RopeLayout::Interleaved, rope.attention_factor as f32),
        None => (0, false, 1.0),
    };
    let rotations = spec.layers.iter().map(rotation).collect();
    let first = spec.layer(0)?;
    let form = LayerInput {
        gain_offset: if spec.norm.gain == GainForm::OnePlus { 1.0 } else { 0.0 },
        mean_removed: spec.norm.kind == NormKind::LayerNorm,
        d_model: spec.d_model,
        n_q: first.n_q_heads,
        n_kv: first.n_kv_heads,
        d_head: first.d_head,
        softmax_scale: first.softmax_scale,
        query_factor: first.query_factor(),
        ..LayerInput::without_addresses()
    };
    let biases = [spec.bias.q, spec.bias.k, spec.bias.v];
    let layers = layers.unwrap_or(spec.layers.len());
    checked(Subject { name: argument.to_owned(), layers, form, rotations, shift: spec.norm.shift, biases })
}

/// Sizes that a typing error would make absurd are refused before memory is asked for.
fn checked(subject: Subject) -> Result<Subject> {
    let f = &subject.form;
    let sizes = [f.d_model, f.n_q, f.n_kv, f.d_head, subject.layers];
    if sizes.iter().any(|size| !(1..=1 << 20).contains(size)) || f.n_q > 4096 || !f.n_q.is_multiple_of(f.n_kv) {
        return Err(Error::argument(format_args!(
            "{}: sizes lie between 1 and 2^20, with up to 4096 query heads, a multiple of the KV heads",
            subject.name
        )));
    }
    Ok(subject)
}

/// Random weights of variance 1 / d and gains around 1; every layer has the same values at its own addresses.
fn weights(device: &Device, stream: &Stream, subject: &Subject, conv1d: bool) -> Result<DeviceWeights> {
    let form = &subject.form;
    let mut rng = StdRng::seed_from_u64(1);
    let mut random = |values: usize, mean: f32, spread: f32| -> Result<Buffer<u8>> {
        let bytes: Vec<u8> = (0..values)
            .flat_map(|_| bf16::from_f32(mean + spread * rng.random_range(-1.0..1.0f32)).to_le_bytes())
            .collect();
        device.upload(&bytes)
    };
    let counts = [form.n_q, form.n_kv, form.n_kv].map(|heads| heads * form.d_head);
    let total: usize = counts.iter().sum();
    let spread = (3.0 / form.d_model as f32).sqrt();
    let pattern = random(total * form.d_model, 0.0, spread)?;
    let gain = random(form.d_model, 1.0, 0.5)?;
    let shift = random(form.d_model, 0.0, 0.1)?;
    let bias = random(total, 0.0, 0.1)?;
    let (mut memory, mut layers) = (Vec::new(), Vec::new());
    for (_, &(rotary, interleaved, rope_factor)) in (0..subject.layers).zip(subject.rotations.iter().cycle()) {
        let mut copy = device.allocate::<u8>(pattern.len())?;
        copy.copy_from(&pattern, stream)?;
        let start = copy.ptr();
        memory.push(copy);
        let mut row = 0u64;
        let mut projections = counts.iter().zip(subject.biases).map(|(&rows, biased)| {
            let offset = if conv1d { 2 * row } else { 2 * row * form.d_model as u64 };
            let (row_stride, col_stride) = if conv1d { (1, total as i64) } else { (form.d_model as i64, 1) };
            let weight = DeviceMatrix { ptr: start.offset(offset), dtype: Dtype::Bf16, row_stride, col_stride };
            let bias = if biased { bias.ptr().offset(2 * row) } else { DevicePtr::NULL };
            row += rows as u64;
            ProjectionInput { weight, bias }
        });
        let mut next = || projections.next().ok_or_else(|| Error::argument("a layer has three projections"));
        layers.push(LayerInput {
            q: next()?,
            k: next()?,
            v: Some(next()?),
            gain: gain.ptr(),
            shift: if subject.shift { shift.ptr() } else { DevicePtr::NULL },
            vector_dtype: Dtype::Bf16,
            rotary,
            interleaved,
            rope_factor,
            ..*form
        });
    }
    memory.extend([gain, shift, bias]);
    stream.synchronize()?;
    DeviceWeights::new(layers, memory)
}

fn measure(
    device: &Device,
    stream: &Stream,
    bandwidth: f64,
    subject: &Subject,
    conv1d: bool,
    csv: &mut Csv,
) -> Result<()> {
    let weights = Arc::new(weights(device, stream, subject, conv1d)?);
    let form = &subject.form;
    let read = |heads: usize| 2.0 * (heads * form.d_head * form.d_model) as f64 / bandwidth * 1e6;
    let (qk, qkv) = (read(form.n_q + form.n_kv), read(form.n_q + 2 * form.n_kv));
    let mut row = |method: &str, us: f64, floor: f64| {
        csv.line(&format!("{},{method},{us:.2},{:.3}", subject.name, us / floor));
    };
    row("floor", qk, qk);
    row("floor_qkv", qkv, qkv);
    let per_layer = |us: Result<f64>| us.map(|us| us / subject.layers as f64);
    let engine = ScaleEngine::over(device, &weights, true)?;
    row("operand_descales", per_layer(median_us(stream, |s| engine.descales(s)))?, qkv);
    // As the peers: Grams of Q and K, which is all that this engine reads.
    let grams = ScaleEngine::over(device, &Arc::new(weights.without_values()), true)?;
    row("gram_head", per_layer(median_us(stream, |s| grams.grams(s)))?, qk);
    drop(grams);
    // Its replays before the timed ones warm the vectors.
    row("plan", per_layer(median_us(stream, |s| engine.plan(s)))?, qkv);
    let status = engine.status().read()?.first().copied().unwrap_or(0);
    // A step's whole job: weights to bounds to descales in memory, and the call's statistics taken in.
    let geometry = policy(device, subject, PolicyKind::Geometry, BoundSource::Weights(Box::new(engine)))?;
    row("geometry_step", per_layer(median_us(stream, |s| whole_step(&geometry, s)))?, qkv);
    drop(geometry);
    let delayed = policy(device, subject, PolicyKind::DelayedTe, BoundSource::None)?;
    row("delayed_te_step", per_layer(median_us(stream, |s| whole_step(&delayed, s)))?, qkv);
    // A shape that an iteration does not take leaves its rows empty, as a peer that fails does.
    let mut refused = Vec::new();
    match PowerEngine::over(device, &weights, false, 1) {
        Ok(power) => {
            row("power_head", per_layer(median_us(stream, |s| power.step(s)))?, qk);
            row("power_head_five", per_layer(median_us(stream, |s| power.steps(s, 5)))?, qk);
        }
        Err(error) if error.is_unsupported() => refused.push(("power_head", error)),
        Err(error) => return Err(error),
    }
    match SummedPowerEngine::over(device, &weights, 1) {
        Ok(power) => row("power_sum", per_layer(median_us(stream, |s| power.steps(s, 1)))?, qk),
        Err(error) if error.is_unsupported() => refused.push(("power_sum", error)),
        Err(error) => return Err(error),
    }
    for (method, error) in refused {
        csv.line(&format!("{},{method},,  # {error}", subject.name));
    }
    if status != 0 {
        csv.line(&format!("# {}: status {status} of the plan", subject.name));
    }
    Ok(())
}

/// A policy with its default parameters in device memory for the subject's sizes.
fn policy(device: &Device, subject: &Subject, kind: PolicyKind, source: BoundSource) -> Result<PolicyEngine> {
    PolicyEngine::new(device, &spec(subject)?, kind.into(), &Tail::default(), source)
}

/// The subject's layers, as far as a policy depends on them.
fn spec(subject: &Subject) -> Result<AttentionSpec> {
    let form = &subject.form;
    let mut spec = preset(PEERS[1]).ok_or_else(|| Error::argument(format_args!("{} is no preset", PEERS[1])))?;
    let layer = LayerSpec { rope: None, softmax_scale: form.softmax_scale, ..spec.layer(0)?.clone() };
    spec.layers = (0..subject.layers).map(|number| LayerSpec { number, ..layer.clone() }).collect();
    spec.set_heads(form.n_q, form.n_kv, form.d_head);
    (spec.name, spec.d_model) = (subject.name.clone(), form.d_model);
    Ok(spec)
}

fn whole_step(policy: &PolicyEngine, stream: &Stream) -> Result<()> {
    policy.update_bounds(stream)?;
    policy.plan(stream)?;
    policy.observe(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_a_preset_or_a_shape() {
        let shape = subject("512, 8,2,64", None).unwrap();
        assert_eq!((shape.layers, shape.form.n_q, shape.form.n_kv), (12, 8, 2));
        assert_eq!(shape.rotations, [(64, false, 1.0)]);
        assert_eq!(subject("512,8,2,64,7", None).unwrap().layers, 7);
        assert_eq!(subject("512,8,2,64,7", Some(3)).unwrap().layers, 3);
        let gpt2 = subject("gpt2-xl", None).unwrap();
        assert!(
            gpt2.shift && gpt2.biases == [true; 3] && gpt2.form.mean_removed && gpt2.rotations.iter().all(|r| r.0 == 0)
        );
        let smollm = subject("smollm3-3b", Some(4)).unwrap();
        assert_eq!([0, 1, 2, 3].map(|layer| smollm.rotations[layer].0), [128, 128, 128, 0]);
        assert_eq!((gpt2.layers, gpt2.form.d_model), (48, 1600));
        let policies = spec(&subject("512,8,2,16,40", None).unwrap()).unwrap();
        policies.check().unwrap();
        assert_eq!((policies.layers.len(), policies.all_q_heads(), policies.layers[39].n_kv_heads), (40, 320, 2));
        for bad in ["1,2,3", "0,1,1,64", "512,3,2,64", "512,8,2,64,7,1", "9999999,1,1,64"] {
            assert!(subject(bad, None).unwrap_err().is_argument(), "{bad}");
        }
        assert!(subject("no-such-model", None).unwrap_err().is_io());
        assert!(subject("qwen3-8b", None).unwrap_err().is_unsupported());
    }
}
