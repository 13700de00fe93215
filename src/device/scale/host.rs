//! Weights in device memory that belong to this crate: checked, or copied from the host.

use super::tables::{DeviceMatrix, Dtype, LayerInput, ProjectionInput, QkNormInput, QkNormSide};
use crate::cuda::{Buffer, Device, DevicePtr};
use crate::error::{Error, Result};
use crate::tensor::{self, MatrixView};
use half::{bf16, f16};
use std::sync::Arc;

/// One projection in host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostProjection<'a> {
    /// One `d_head x d_model` view a head.
    pub heads: &'a [MatrixView<'a>],
    /// One value a channel.
    pub bias: Option<&'a [f64]>,
}

/// One layer's attention weights in host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostLayer<'a> {
    /// Sizes, norm and rotation. Its addresses and vector type are filled in here.
    pub form: LayerInput,
    /// Query projection.
    pub q: HostProjection<'a>,
    /// Key projection.
    pub k: HostProjection<'a>,
    /// Value projection; `None` where the values have no bound.
    pub v: Option<HostProjection<'a>>,
    /// Stored gain of the input norm.
    pub gain: Option<&'a [f64]>,
    /// Stored shift of the input norm.
    pub shift: Option<&'a [f64]>,
    /// Norms of q and k between projection and rotation. W_Q and W_K stay on the host then.
    pub qk_norm: Option<HostQkNorm<'a>>,
}

/// Norms of q and k in host memory: each `d_head` values that all heads share, or `heads * d_head`.
#[derive(Clone, Copy, Debug)]
pub struct HostQkNorm<'a> {
    /// Stored gains of q and of k; `None` for ones.
    pub gains: [Option<&'a [f64]>; 2],
    /// Stored shifts of q and of k.
    pub shifts: [Option<&'a [f64]>; 2],
    /// Added to every stored gain.
    pub gain_offset: f32,
    /// All heads of a projection are normalised together, rather than each alone.
    pub joint: bool,
}

/// Weights in device memory that is owned here. Every address has been checked against it.
#[derive(Debug)]
pub struct DeviceWeights {
    layers: Vec<LayerInput>,
    memory: Arc<Vec<Buffer<u8>>>,
}

impl DeviceWeights {
    /// Layers whose addresses all lie in `memory`.
    ///
    /// # Errors
    /// `is_argument` if a matrix or vector does not lie inside one buffer whole.
    pub fn new(layers: Vec<LayerInput>, memory: Vec<Buffer<u8>>) -> Result<Self> {
        let inside = |ptr: DevicePtr, bytes: Option<u64>| {
            bytes.and_then(|bytes| ptr.0.checked_add(bytes)).is_some_and(|end| {
                memory.iter().any(|buffer| ptr.0 >= buffer.ptr().0 && end <= buffer.ptr().0 + buffer.len() as u64)
            })
        };
        for (i, l) in layers.iter().enumerate() {
            let size = l.vector_dtype.size() as u64;
            let vector = |ptr: DevicePtr, n: usize| ptr == DevicePtr::NULL || inside(ptr, (n as u64).checked_mul(size));
            let norm = [l.gain, l.shift].into_iter().all(|ptr| vector(ptr, l.d_model));
            let projection = |p: &ProjectionInput, heads: usize| {
                let rows = heads.saturating_mul(l.d_head);
                inside(p.weight.ptr, extent(&p.weight, rows, l.d_model)) && vector(p.bias, rows)
            };
            let v = l.v.as_ref().is_none_or(|v| projection(v, l.n_kv));
            let q_and_k = match &l.qk_norm {
                None => projection(&l.q, l.n_q) && projection(&l.k, l.n_kv),
                Some(norm) => [(&norm.q, l.n_q), (&norm.k, l.n_kv)].into_iter().all(|(side, heads)| {
                    let values = if side.per_head { heads.saturating_mul(l.d_head) } else { l.d_head };
                    let bytes = (values as u64).checked_mul(norm.dtype.size() as u64);
                    [side.gain, side.shift].into_iter().all(|ptr| ptr == DevicePtr::NULL || inside(ptr, bytes))
                }),
            };
            if !(norm && q_and_k && v) {
                return Err(Error::argument(format_args!(
                    "layer {i}: a weight does not lie in the memory given with it"
                )));
            }
        }
        Ok(Self { layers, memory: Arc::new(memory) })
    }

    /// Copies of weights in host memory. BF16 and F16 stay what they are; everything else becomes f32, rounded where it
    /// was finer (2^-24, inside the margins of the bounds).
    ///
    /// # Errors
    /// If a view or vector has another size than its form says, or memory runs out.
    pub fn upload(device: &Device, layers: &[HostLayer<'_>]) -> Result<Self> {
        let mut memory = Vec::new();
        let inputs = layers
            .iter()
            .enumerate()
            .map(|(i, layer)| {
                upload(device, layer, &mut memory).map_err(|error| error.within(format_args!("layer {i}")))
            })
            .collect::<Result<Vec<_>>>()?;
        Self::new(inputs, memory)
    }

    /// W_Q and W_K of the same memory, without W_V: for an engine that is asked for logit bounds alone.
    pub fn without_values(&self) -> Self {
        let layers = self.layers.iter().map(|layer| LayerInput { v: None, ..*layer }).collect();
        Self { layers, memory: self.memory.clone() }
    }

    /// One entry a layer.
    pub fn layers(&self) -> &[LayerInput] {
        &self.layers
    }
}

/// Bytes from a matrix's first value to the end of its last; `None` for a stride that runs backwards.
fn extent(m: &DeviceMatrix, rows: usize, columns: usize) -> Option<u64> {
    let steps = |count: usize, stride: i64| (count as u64).checked_sub(1)?.checked_mul(u64::try_from(stride).ok()?);
    let last = steps(rows, m.row_stride)?.checked_add(steps(columns, m.col_stride)?)?;
    last.checked_add(1)?.checked_mul(m.dtype.size() as u64)
}

fn upload(device: &Device, layer: &HostLayer<'_>, memory: &mut Vec<Buffer<u8>>) -> Result<LayerInput> {
    let form = layer.form;
    let mut vector = |values: Option<&[f64]>, name: &str, want: usize| -> Result<DevicePtr> {
        let Some(values) = values else { return Ok(DevicePtr::NULL) };
        if values.len() != want {
            return Err(Error::argument(format_args!("{name} has {} values, not {want}", values.len())));
        }
        let narrow: Vec<f32> = values.iter().map(|x| *x as f32).collect();
        keep(device, bytemuck::cast_slice(&narrow), memory)
    };
    let gain = vector(layer.gain, "the norm's gain", form.d_model)?;
    let shift = vector(layer.shift, "the norm's shift", form.d_model)?;
    let bias = [Some(layer.q), Some(layer.k), layer.v]
        .into_iter()
        .zip([form.n_q, form.n_kv, form.n_kv])
        .map(|(p, heads)| vector(p.and_then(|p| p.bias), "a bias", heads * form.d_head))
        .collect::<Result<Vec<_>>>()?;
    let qk_norm = match &layer.qk_norm {
        None => None,
        Some(norm) => {
            let mut side = |which: usize, name: [&str; 2], heads: usize| -> Result<QkNormSide> {
                let stored = [norm.gains[which], norm.shifts[which]];
                let per_head = stored.into_iter().flatten().any(|values| values.len() != form.d_head);
                let want = if per_head { heads * form.d_head } else { form.d_head };
                let mut keep = |values: Option<&[f64]>, name: &str| match values {
                    // Shared by all heads, beside a vector that is not.
                    Some(shared) if shared.len() == form.d_head => {
                        vector(Some(&shared.repeat(want / form.d_head)), name, want)
                    }
                    other => vector(other, name, want),
                };
                let (gain, shift) = (keep(stored[0], name[0])?, keep(stored[1], name[1])?);
                let channels = if norm.joint { heads * form.d_head } else { form.d_head };
                Ok(QkNormSide { gain, shift, per_head, channels: channels as u32 })
            };
            let q = side(0, ["the q norm's gain", "the q norm's shift"], form.n_q)?;
            let k = side(1, ["the k norm's gain", "the k norm's shift"], form.n_kv)?;
            Some(QkNormInput { q, k, dtype: Dtype::F32, gain_offset: norm.gain_offset })
        }
    };
    let mut projection = |input: HostProjection<'_>, heads: usize, bias: DevicePtr| -> Result<ProjectionInput> {
        let shape = (form.d_head, form.d_model);
        if input.heads.len() != heads || input.heads.iter().any(|view| view.shape() != shape) {
            return Err(Error::argument(format_args!(
                "a projection has not {heads} heads of {} x {}",
                shape.0, shape.1
            )));
        }
        let (bytes, dtype) = pack(input.heads, form.d_model);
        let ptr = keep(device, &bytes, memory)?;
        Ok(ProjectionInput {
            weight: DeviceMatrix { ptr, dtype, row_stride: form.d_model as i64, col_stride: 1 },
            bias,
        })
    };
    // Where their norms bound q and k, nothing reads W_Q and W_K.
    let read = qk_norm.is_none();
    Ok(LayerInput {
        q: if read { projection(layer.q, form.n_q, bias[0])? } else { form.q },
        k: if read { projection(layer.k, form.n_kv, bias[1])? } else { form.k },
        v: layer.v.map(|v| projection(v, form.n_kv, bias[2])).transpose()?,
        gain,
        shift,
        vector_dtype: Dtype::F32,
        qk_norm,
        ..form
    })
}

fn keep(device: &Device, bytes: &[u8], memory: &mut Vec<Buffer<u8>>) -> Result<DevicePtr> {
    let buffer = device.upload(bytes)?;
    let ptr = buffer.ptr();
    memory.push(buffer);
    Ok(ptr)
}

/// The heads' rows one after another, in their own type where it holds their values.
fn pack(heads: &[MatrixView<'_>], d_model: usize) -> (Vec<u8>, Dtype) {
    let kept = match heads.first().map(MatrixView::dtype) {
        Some(tensor::Dtype::Bf16) => {
            let convert = |x| exact(x, bf16::from_f64(x), bf16::to_f64).map(bf16::to_le_bytes);
            rows(heads, d_model, convert).map(|bytes| (bytes, Dtype::Bf16))
        }
        Some(tensor::Dtype::F16) => {
            let convert = |x| exact(x, f16::from_f64(x), f16::to_f64).map(f16::to_le_bytes);
            rows(heads, d_model, convert).map(|bytes| (bytes, Dtype::F16))
        }
        _ => None,
    };
    if let Some(kept) = kept {
        return kept;
    }
    (rows(heads, d_model, |x| Some((x as f32).to_le_bytes())).unwrap_or_default(), Dtype::F32)
}

/// A dequantisation multiplier can make values that their storage type does not hold.
fn exact<T: Copy>(x: f64, narrow: T, back: fn(T) -> f64) -> Option<T> {
    (back(narrow) == x).then_some(narrow)
}

fn rows<const N: usize>(
    heads: &[MatrixView<'_>],
    d_model: usize,
    convert: impl Fn(f64) -> Option<[u8; N]>,
) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(heads.iter().map(|h| h.shape().0).sum::<usize>() * d_model * N);
    let mut row = vec![0.0; d_model];
    for head in heads {
        for channel in 0..head.shape().0 {
            head.read_block(channel..channel + 1, 0..d_model, &mut row);
            for x in &row {
                bytes.extend_from_slice(&convert(*x)?);
            }
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::BlockScale;

    #[test]
    fn values_keep_their_type_only_where_it_holds_them() {
        let bits: Vec<u8> = [1.0, -0.25, 3.5, 1e-30].iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect();
        let view = MatrixView::dense(&bits, tensor::Dtype::Bf16, 2, 2).unwrap();
        assert_eq!(pack(std::slice::from_ref(&view), 2), (bits.clone(), Dtype::Bf16));
        let third = BlockScale { values: vec![1.0 / 3.0].into(), block: (2, 2), grid_cols: 1 };
        let scaled = view.with_scale(third).unwrap();
        let (bytes, dtype) = pack(std::slice::from_ref(&scaled), 2);
        assert_eq!(dtype, Dtype::F32);
        assert_eq!(bytes[..4], (1f32 / 3.0).to_le_bytes());
        let nan = [0xff, 0x7f, 0, 0];
        let view = MatrixView::dense(&nan, tensor::Dtype::Bf16, 1, 2).unwrap();
        let (bytes, dtype) = pack(std::slice::from_ref(&view), 2);
        assert!(dtype == Dtype::F32 && f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).is_nan());
    }
}
