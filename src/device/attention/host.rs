//! A call with device memory of its own, for tests, tools and timings.

use super::backward::BackwardEngine;
use super::backward_call::{BackwardTensors, Delta, RowBounds};
use super::call::{Descales, Keys, Rope, SavedOperands, SavedRows, Tensors};
use super::engine::Cuda;
use super::sizes::{row_strides, rows_bytes};
use super::terms::{Centers, DeviceCall, Sequences};
use crate::attention::{AttentionCall, Keeps, PvAccumulator};
use crate::cuda::{Buffer, Device, Element, Stream, View};
use crate::error::{Error, Result};
use crate::fp8::Format;
use crate::stats::stats_words;
use bytemuck::Pod;
use half::bf16;

/// What a [`Resident`] call is.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// What it computes.
    pub call: AttentionCall<'a>,
    /// Type of q, k and v.
    pub operands: Element,
    /// Descales of q, k and v, `heads_kv` each.
    pub descales: [&'a [f32]; 3],
    /// Descales of E4M3 logits, `heads_q`; `None`: logits stay in f32.
    pub logit: Option<&'a [f32]>,
    /// Descales of an E4M3 output, `heads_kv`; `None`: the output is BF16.
    pub output: Option<&'a [f32]>,
    /// Rotation of q and k.
    pub rope: Option<RopeTables<'a>>,
    /// Whether the call leaves telemetry.
    pub stats: bool,
    /// How the sums of P V are taken.
    pub accumulator: PvAccumulator,
    /// What it leaves for a [`ResidentBackward`].
    pub keeps: Keeps,
}

/// Tables of a [`Rope`] in host memory, `(len_k, rotary / 2)` each.
#[derive(Clone, Copy, Debug)]
pub struct RopeTables<'a> {
    /// Cosines.
    pub cosine: &'a [f32],
    /// Sines.
    pub sine: &'a [f32],
    /// Pairs are neighbours.
    pub interleaved: bool,
}

/// What a call leaves.
#[derive(Clone, Debug, PartialEq)]
pub struct HostOutput {
    /// Output as f32 (an E4M3 output still to be multiplied by its descale).
    pub out: Vec<f32>,
    /// Log-sum-exp; with a center of keys that of the centered logits.
    pub lse: Vec<f32>,
    /// Telemetry, as [`stats_words`] has it; empty without.
    pub stats: Vec<u32>,
}

/// A call and all its device memory.
#[derive(Debug)]
pub struct Resident {
    call: DeviceCall,
    tensors: Tensors,
    workspace: View<1>,
    memory: Memory,
}

#[derive(Debug)]
struct Memory {
    inputs: [Buffer<u8>; 3],
    out: Buffer<u8>,
    lse: Buffer<f32>,
    stats: Option<Buffer<u32>>,
    saved: Vec<Buffer<u8>>,
    _scratch: Buffer<u8>,
    _rows: Vec<Buffer<f32>>,
    _sequences: Option<[Buffer<i32>; 4]>,
}

/// An array of zeros with memory of its own.
fn array<T: Pod, const R: usize>(device: &Device, element: Element, shape: [usize; R]) -> Result<(Buffer<T>, View<R>)> {
    let bytes = shape.iter().product::<usize>() * element.size();
    let buffer = device.zeros::<T>(bytes / size_of::<T>())?;
    // SAFETY: the view lies in the buffer, which a `Resident` keeps as long as itself.
    let view = unsafe { buffer.view(element, shape) }?;
    Ok((buffer, view))
}

/// A workspace, which may hold anything: not cleared, so that initcheck of compute-sanitizer sees what is read unwritten.
fn scratch(device: &Device, bytes: usize) -> Result<(Buffer<u8>, View<1>)> {
    let buffer = device.allocate::<u8>(bytes)?;
    // SAFETY: as in `array`.
    let view = unsafe { buffer.view(Element::U8, [bytes]) }?;
    Ok((buffer, view))
}

impl Resident {
    /// Allocates everything; operands are zero.
    ///
    /// # Errors
    /// If lengths differ from the sizes, or the memory is not there.
    pub fn new(engine: &Cuda, setup: &Setup<'_>) -> Result<Self> {
        let (call, device) = (&setup.call, engine.device());
        call.check()?;
        let sizes = call.shape;
        let mut kept = Vec::new();
        let mut keep = |name: &str, values: &[f32], want: usize| {
            if values.len() != want {
                let have = values.len();
                return Err(Error::argument(format_args!("{name}: {have} values where the shape asks for {want}")));
            }
            let buffer = device.upload(values)?;
            let at = buffer.ptr();
            kept.push(buffer);
            Ok(at)
        };
        // SAFETY of all views: they lie in buffers that the result keeps as long as itself; a buffer waits for the device
        // before it is freed.
        let row = |at| unsafe { View::new(at, Element::F32, [sizes.batch, sizes.n_kv_heads], [0, 1]) };
        let mut kv_row = |name: &str, values: &[f32]| keep(name, values, sizes.n_kv_heads).map(row);
        let [q, k, v] = setup.descales;
        let mut descales = Descales {
            q: Some(kv_row("q descales", q)?),
            k: Some(kv_row("k descales", k)?),
            v: Some(kv_row("v descales", v)?),
            o: setup.output.map(|o| kv_row("o descales", o)).transpose()?,
            logit: None,
        };
        if let Some(values) = setup.logit {
            let at = keep("logit descales", values, sizes.n_q_heads)?;
            descales.logit = Some(unsafe { View::dense(at, Element::F32, [sizes.n_q_heads]) });
        }
        let rope = match &setup.rope {
            Some(tables) => {
                let shape = [sizes.len_k, tables.cosine.len() / sizes.len_k];
                let cosine = keep("RoPE cosines", tables.cosine, shape[0] * shape[1])?;
                let sine = keep("RoPE sines", tables.sine, shape[0] * shape[1])?;
                let [cosine, sine] = [cosine, sine].map(|at| unsafe { View::dense(at, Element::F32, shape) });
                Some(Rope { cosine, sine, positions: None, interleaved: tables.interleaved })
            }
            None => None,
        };
        let [q_shape, k_shape, v_shape] = [sizes.q_shape(), sizes.k_shape(), sizes.v_shape()];
        let (q, q_view) = array::<u8, 4>(device, setup.operands, q_shape)?;
        let (k, k_view) = array::<u8, 4>(device, setup.operands, k_shape)?;
        let (v, v_view) = array::<u8, 4>(device, setup.operands, v_shape)?;
        let element = if setup.output.is_some() { Element::E4m3 } else { Element::Bf16 };
        let (out, out_view) = array::<u8, 4>(device, element, sizes.out_shape())?;
        let (lse, lse_view) = array::<f32, 3>(device, Element::F32, sizes.lse_shape())?;
        let words = [stats_words(sizes.n_q_heads, sizes.n_kv_heads)];
        let stats = setup.stats.then(|| array::<u32, 1>(device, Element::U32, words)).transpose()?;
        let (stats, stats_view) = stats.unzip();
        let mut saved = Vec::new();
        let mut save = |shape| {
            let buffer = device.zeros::<u8>(rows_bytes(shape))?;
            let view = unsafe { View::new(buffer.ptr(), Element::E4m3, shape, row_strides(shape)) };
            saved.push(buffer);
            Ok::<_, Error>(view)
        };
        let saved_views = match setup.keeps {
            Keeps::Nothing => None,
            _ => Some([save(q_shape)?, save(k_shape)?, save(v_shape)?]),
        };
        let rows = match setup.keeps {
            Keeps::Nothing | Keeps::Operands => SavedRows::Nothing,
            Keeps::UnroundedDelta => {
                let (buffer, view) = array::<u8, 4>(device, Element::U8, sizes.out_shape())?;
                saved.push(buffer);
                SavedRows::Residual(view)
            }
            Keeps::Fp8Dq => {
                let (buffer, view) = array::<u8, 3>(device, Element::F32, sizes.lse_shape())?;
                saved.push(buffer);
                SavedRows::RowMax(view)
            }
        };
        let saved_views = saved_views.map(|[q, k, v]| SavedOperands { q, k, v, rows });
        let sinks = match call.sinks {
            Some(sinks) => {
                let sinks: Vec<f32> = sinks.iter().map(|sink| *sink as f32).collect();
                let at = keep("sinks", &sinks, sizes.n_q_heads)?;
                Some(unsafe { View::dense(at, Element::F32, [sizes.n_q_heads]) })
            }
            None => None,
        };
        let (lists, sequences) = call.sequences.map(|list| Sequences::upload(device, list)).transpose()?.unzip();
        let mut of_center = |name: &str, rows: Option<&Vec<Vec<f32>>>, d: usize| {
            let Some(rows) = rows else { return Ok(None) };
            let at = keep(name, &rows.concat(), sizes.n_kv_heads * d)?;
            Ok::<_, Error>(Some(unsafe { View::dense(at, Element::F32, [sizes.n_kv_heads, d]) }))
        };
        let center = match call.center {
            Some(center) => Some(Centers {
                k: of_center("center of k", center.k.as_ref(), sizes.d_head)?,
                v: of_center("center of v", center.v.as_ref(), sizes.d_v)?,
            }),
            None => None,
        };
        let call = call.on_device(sequences, sinks, center)?;
        let tensors = Tensors {
            q: q_view,
            keys: Keys::Rows { k: k_view, v: v_view },
            descales,
            rope,
            accumulator: setup.accumulator,
            saved: saved_views,
            out: out_view,
            lse: Some(lse_view),
            stats: stats_view,
        };
        let (scratch, workspace) = scratch(device, Cuda::workspace_bytes(&call, &tensors)?)?;
        let memory =
            Memory { inputs: [q, k, v], out, lse, stats, saved, _scratch: scratch, _rows: kept, _sequences: lists };
        Ok(Self { call, tensors, workspace, memory })
    }

    /// Sets q, k and v from bytes of the operands' type. Synchronous.
    ///
    /// # Errors
    /// If lengths differ, or the driver fails.
    pub fn write(&mut self, operands: [&[u8]; 3]) -> Result<()> {
        self.memory.inputs.iter_mut().zip(operands).try_for_each(|(buffer, bytes)| buffer.write(bytes))
    }

    /// Puts the whole call on `stream`.
    ///
    /// # Errors
    /// As [`Cuda::launch`].
    pub fn launch(&self, engine: &Cuda, stream: &Stream) -> Result<()> {
        engine.launch(stream, &self.call, &self.tensors, &self.workspace)
    }

    /// Puts its cast alone on `stream`.
    ///
    /// # Errors
    /// As [`Cuda::launch`].
    pub fn cast(&self, engine: &Cuda, stream: &Stream) -> Result<()> {
        engine.cast(stream, &self.call, &self.tensors, &self.workspace)
    }

    /// Puts its attention alone on `stream`, on what an earlier cast left.
    ///
    /// # Errors
    /// As [`Cuda::launch`].
    pub fn attend(&self, engine: &Cuda, stream: &Stream) -> Result<()> {
        engine.attend(stream, &self.call, &self.tensors, &self.workspace)
    }

    /// The results. Waits for the device.
    ///
    /// # Errors
    /// If the work before failed.
    pub fn read(&self) -> Result<HostOutput> {
        let bytes = self.memory.out.read()?;
        let out = match self.tensors.out.element() {
            Element::E4m3 => bytes.into_iter().map(|code| Format::E4m3.decode(code)).collect(),
            _ => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        };
        let stats = self.memory.stats.as_ref().map(Buffer::read).transpose()?.unwrap_or_default();
        Ok(HostOutput { out, lse: self.memory.lse.read()?, stats })
    }
}

impl Resident {
    /// Bytes that stay between the forward and the backward besides q, k and v, and bytes of the workspace.
    pub fn bytes(&self) -> [usize; 2] {
        let saved: usize = self.memory.saved.iter().map(Buffer::len).sum();
        [self.memory.out.len() + 4 * self.memory.lse.len() + saved, self.workspace.extents()[0]]
    }
}

/// The backward of a [`Resident`] call with saved operands, and its device memory.
#[derive(Debug)]
pub struct ResidentBackward {
    call: DeviceCall,
    tensors: BackwardTensors,
    workspace: View<1>,
    /// dO, dQ, dK, dV, workspace.
    memory: [Buffer<u8>; 5],
    _d_sinks: Option<Buffer<f32>>,
}

impl ResidentBackward {
    /// Allocates everything; `d_out` is BF16. delta is taken from the forward's output, before its rounding if the
    /// forward kept what that took.
    ///
    /// # Errors
    /// If the call has no saved operands or an E4M3 output, the lengths differ, or the memory is not there.
    pub fn new(engine: &BackwardEngine, forward: &Resident, d_out: &[u8]) -> Result<Self> {
        let t = &forward.tensors;
        let (Some(saved), Some(lse)) = (t.saved, t.lse) else {
            return Err(Error::argument("a backward needs a call with saved operands"));
        };
        let (call, sizes) = (forward.call, forward.call.shape);
        let device = engine.device();
        let (from, d_out_view) = array::<u8, 4>(device, Element::Bf16, sizes.out_shape())?;
        from.write(d_out)?;
        let (dq, dq_view) = array::<u8, 4>(device, Element::Bf16, sizes.q_shape())?;
        let (dk, dk_view) = array::<u8, 4>(device, Element::Bf16, sizes.k_shape())?;
        let (dv, dv_view) = array::<u8, 4>(device, Element::Bf16, sizes.v_shape())?;
        let (scratch, workspace) = scratch(device, engine.workspace_bytes(&call)?)?;
        let of_sinks = |_| array::<f32, 1>(device, Element::F32, [sizes.n_q_heads]);
        let (d_sinks, d_sinks_view) = call.sinks.map(of_sinks).transpose()?.unzip();
        let tensors = BackwardTensors {
            q: saved.q,
            k: saved.k,
            v: saved.v,
            descales: t.descales,
            lse,
            delta: match saved.rows {
                SavedRows::Residual(residual) => Delta::Unrounded { out: t.out, residual },
                _ => Delta::Output(t.out),
            },
            d_out: d_out_view,
            dq: dq_view,
            dk: dk_view,
            dv: dv_view,
            bounds: match saved.rows {
                SavedRows::RowMax(row_max) => Some(RowBounds { row_max, value_norm: None }),
                _ => None,
            },
            d_sinks: d_sinks_view,
        };
        tensors.check(&call)?;
        Ok(Self { call, tensors, workspace, memory: [from, dq, dk, dv, scratch], _d_sinks: d_sinks })
    }

    /// Puts it on `stream`.
    ///
    /// # Errors
    /// As [`BackwardEngine::backward`].
    pub fn launch(&self, engine: &BackwardEngine, stream: &Stream) -> Result<()> {
        engine.backward(stream, &self.call, &self.tensors, &self.workspace)
    }

    /// Bytes of the gradients, and bytes of the workspace.
    pub fn bytes(&self) -> [usize; 2] {
        let [_, dq, dk, dv, scratch] = &self.memory;
        [dq.len() + dk.len() + dv.len(), scratch.len()]
    }
}
