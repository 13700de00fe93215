//! One call from host memory to host memory: for tests and tools, not for speed.

use super::{AttentionEngine, Descales, Element, Sizes, Tensors, Workspace, stats_words};
use crate::cuda::Buffer;
use crate::error::{Error, Result};
use half::bf16;

/// Operands in f32, without gaps, in the layouts of [the module](super), and descales of a whole batch.
#[derive(Clone, Copy, Debug)]
pub struct HostCall<'a> {
    /// Sizes.
    pub sizes: Sizes,
    /// Only keys at or before the query's position.
    pub causal: bool,
    /// Multiplier of q . k.
    pub softmax_scale: f32,
    /// Queries, keys, values.
    pub operands: [&'a [f32]; 3],
    /// Descales of q, k and v, `heads_kv` each.
    pub descales: [&'a [f32]; 3],
    /// Descales of E4M3 logits, `heads_q`; `None`: logits stay in f32.
    pub logit: Option<&'a [f32]>,
    /// Descales of an E4M3 output, `heads_kv`; `None`: the output is BF16.
    pub output: Option<&'a [f32]>,
}

/// What a [`HostCall`] gives.
#[derive(Clone, Debug, PartialEq)]
pub struct HostOutput {
    /// Output as f32 (an E4M3 output still to be multiplied by its descale).
    pub out: Vec<f32>,
    /// Log-sum-exp.
    pub lse: Vec<f32>,
    /// Telemetry, as [`stats_words`] has it.
    pub stats: Vec<u32>,
}

impl AttentionEngine {
    /// Runs a call on memory of its own and waits for it.
    ///
    /// # Errors
    /// As [`AttentionEngine::forward`], or if lengths differ from the sizes or the memory is not there.
    pub fn run(&self, call: &HostCall<'_>) -> Result<HostOutput> {
        let sizes = call.sizes;
        sizes.check()?;
        let shapes = [sizes.q_shape(), sizes.kv_shape(), sizes.kv_shape()];
        for ((name, x), shape) in ["q", "k", "v"].into_iter().zip(call.operands).zip(shapes) {
            expect(name, x, shape.iter().product())?;
        }
        for (name, row) in ["q descales", "k descales", "v descales"].into_iter().zip(call.descales) {
            expect(name, row, sizes.heads_kv)?;
        }
        let device = self.device();
        let stream = device.stream()?;
        let words = stats_words(sizes.heads_q, sizes.heads_kv);
        let operands =
            [device.upload(call.operands[0])?, device.upload(call.operands[1])?, device.upload(call.operands[2])?];
        let rows =
            [device.upload(call.descales[0])?, device.upload(call.descales[1])?, device.upload(call.descales[2])?];
        let output = call.output.map(|row| expect("o descales", row, sizes.heads_kv).and_then(|()| device.upload(row)));
        let logit =
            call.logit.map(|row| expect("logit descales", row, sizes.heads_q).and_then(|()| device.upload(row)));
        let (output, logit) = (output.transpose()?, logit.transpose()?);
        let elements: usize = sizes.q_shape().iter().product();
        let element = if output.is_some() { Element::E4m3 } else { Element::Bf16 };
        let out: Buffer<u8> = device.zeros(elements * element.size())?;
        let lse: Buffer<f32> = device.zeros(sizes.lse_shape().iter().product())?;
        let stats: Buffer<u32> = device.zeros(words)?;
        let bytes = Workspace::of(&sizes, Element::F32).bytes;
        let workspace: Buffer<u8> = device.zeros(bytes)?;
        // SAFETY: all buffers live until the end of this function, which waits for the work.
        let (tensors, workspace) = unsafe {
            // One row serves every sequence of the batch.
            let row =
                |row: &Buffer<f32>| super::View::new(row.ptr(), Element::F32, [sizes.batch, sizes.heads_kv], [0, 1]);
            let tensors = Tensors {
                q: operands[0].view(Element::F32, shapes[0])?,
                k: operands[1].view(Element::F32, shapes[1])?,
                v: operands[2].view(Element::F32, shapes[2])?,
                descales: Descales {
                    q: Some(row(&rows[0])),
                    k: Some(row(&rows[1])),
                    v: Some(row(&rows[2])),
                    o: output.as_ref().map(row),
                    logit: logit.as_ref().map(|x| x.view(Element::F32, [sizes.heads_q])).transpose()?,
                },
                rope: None,
                out: out.view(element, sizes.q_shape())?,
                lse: Some(lse.view(Element::F32, sizes.lse_shape())?),
                stats: Some(stats.view(Element::U32, [words])?),
            };
            (tensors, workspace.view(Element::U8, [bytes])?)
        };
        self.forward(&stream, &tensors, call.causal, call.softmax_scale, &workspace)?;
        stream.synchronize()?;
        let bytes = out.read()?;
        let out = match element {
            Element::E4m3 => bytes.into_iter().map(|code| crate::fp8::Format::E4m3.decode(code)).collect(),
            _ => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        };
        Ok(HostOutput { out, lse: lse.read()?, stats: stats.read()? })
    }
}

fn expect(name: &str, x: &[f32], want: usize) -> Result<()> {
    if x.len() == want {
        Ok(())
    } else {
        Err(Error::argument(format_args!("{name} has {} values where the shape asks for {want}", x.len())))
    }
}
