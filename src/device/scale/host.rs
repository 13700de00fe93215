//! Weights in device memory that belong to this crate: checked, or copied from the host.

use super::tables::{DeviceMatrix, Dtype, LayerInput, ProjectionInput, QkNormInput, QkNormSide};
use crate::bound::round_up;
use crate::cuda::{Buffer, Device, DevicePtr};
use crate::error::{Error, Result};
use crate::geometry::{LayerGeometry, gains};
use crate::model::{
    AttentionSpec, GainForm, LayerWeights, NormKind, NormVectors, Projection, QkNorm, QkNormScope, RopeLayout,
};
use crate::tensor::{self, MatrixView};
use half::{bf16, f16};
use std::sync::Arc;

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

    /// Copies of weights in host memory, as far as bounds depend on them. BF16 and F16 stay what they are; everything else becomes
    /// f32, rounded where it was finer (2^-24, inside the margins of the bounds). Where q and k are normalized after the projection,
    /// W_Q and W_K stay on the host.
    ///
    /// # Errors
    /// As [`LayerGeometry::new`], or if memory runs out.
    pub fn upload(device: &Device, spec: &AttentionSpec, layers: &[LayerWeights<'_>]) -> Result<Self> {
        let mut upload = Upload { device, memory: vec![] };
        let inputs = layers.iter().map(|weights| upload.layer(spec, weights)).collect::<Result<Vec<_>>>()?;
        Self::new(inputs, upload.memory)
    }

    /// W_Q and W_K of the same memory, without W_V: for an engine that is asked for logit bounds alone.
    pub fn without_values(&self) -> Self {
        let layers = self.layers.iter().map(|layer| LayerInput { v: None, ..*layer }).collect();
        Self { layers, memory: self.memory.clone() }
    }

    /// One entry per layer.
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

/// Copies in the making.
struct Upload<'a> {
    device: &'a Device,
    memory: Vec<Buffer<u8>>,
}

impl Upload<'_> {
    fn layer(&mut self, spec: &AttentionSpec, weights: &LayerWeights<'_>) -> Result<LayerInput> {
        // The host's own checks of sizes and vectors, and its reading of the gains.
        let centred = LayerGeometry::new(spec, weights.clone())?.centred;
        let own = spec.layer(weights.layer)?;
        let norm = spec.qk_norm_of(own);
        // A rotation in front of a norm of q and k changes none of their bounds.
        let rope = own.rope.as_ref().filter(|_| !norm.is_some_and(|norm| norm.behind_rotation));
        let (d_model, unread) = (spec.d_model, LayerInput::without_addresses());
        let with_values = spec.norm.kind != NormKind::None;
        Ok(LayerInput {
            // Where their norms bound q and k, nothing reads W_Q and W_K.
            q: if norm.is_none() { self.projection(&weights.q, d_model)? } else { unread.q },
            k: if norm.is_none() { self.projection(&weights.k, d_model)? } else { unread.k },
            v: with_values.then(|| self.projection(&weights.v, d_model)).transpose()?,
            gain: self.gains(weights.norm_gain.as_deref(), spec.norm.gain)?,
            shift: self.vector(weights.norm_shift.as_deref())?,
            mean_removed: centred,
            d_model,
            n_q: own.n_q_heads,
            n_kv: own.n_kv_heads,
            d_head: own.d_head,
            rotary: rope.map_or(0, |rope| rope.rotary_dim),
            interleaved: rope.is_some_and(|rope| rope.layout == RopeLayout::Interleaved),
            rope_factor: rope.map_or(1.0, |rope| round_up(rope.attention_factor)),
            softmax_scale: own.softmax_scale,
            query_factor: own.query_factor(),
            rounding_share: spec.rounding_share(own, weights.stored()),
            qk_norm: match norm {
                None => None,
                Some(norm) => Some(QkNormInput {
                    q: self.norm_side(&norm, weights.q_norm.as_ref(), own.n_q_heads, own.d_head)?,
                    k: self.norm_side(&norm, weights.k_norm.as_ref(), own.n_kv_heads, own.d_head)?,
                    dtype: Dtype::F32,
                    gain_offset: 0.0,
                }),
            },
            ..unread
        })
    }

    fn projection(&mut self, input: &Projection<'_>, d_model: usize) -> Result<ProjectionInput> {
        let (bytes, dtype) = pack(&input.heads, d_model);
        let weight = DeviceMatrix { ptr: self.bytes(&bytes)?, dtype, row_stride: d_model as i64, col_stride: 1 };
        Ok(ProjectionInput { weight, bias: self.vector(input.bias.as_deref())? })
    }

    fn norm_side(
        &mut self,
        norm: &QkNorm,
        stored: Option<&NormVectors>,
        heads: usize,
        d_head: usize,
    ) -> Result<QkNormSide> {
        let gain = stored.filter(|_| norm.gain != GainForm::Unit).map(|vectors| gains(&vectors.gain, norm.gain).values);
        let both = [gain.as_deref(), stored.and_then(|vectors| vectors.shift.as_deref())];
        let per_head = both.into_iter().flatten().any(|values| values.len() != d_head);
        let [gain, shift] = both.map(|values| match values {
            // Shared by all heads, beside a vector that is not.
            Some(shared) if per_head && shared.len() == d_head => self.vector(Some(&shared.repeat(heads))),
            other => self.vector(other),
        });
        let channels = if norm.scope == QkNormScope::Joint { heads * d_head } else { d_head };
        Ok(QkNormSide { gain: gain?, shift: shift?, per_head, channels: channels as u32 })
    }

    /// As they multiply, so that nothing is added to them on the device; NULL for none.
    fn gains(&mut self, stored: Option<&[f64]>, form: GainForm) -> Result<DevicePtr> {
        let read = stored.filter(|_| form != GainForm::Unit).map(|stored| gains(stored, form).values);
        self.vector(read.as_deref())
    }

    /// As f32; NULL for none.
    fn vector(&mut self, values: Option<&[f64]>) -> Result<DevicePtr> {
        let Some(values) = values else { return Ok(DevicePtr::NULL) };
        let narrow: Vec<f32> = values.iter().map(|x| *x as f32).collect();
        self.bytes(bytemuck::cast_slice(&narrow))
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<DevicePtr> {
        let buffer = self.device.upload(bytes)?;
        let ptr = buffer.ptr();
        self.memory.push(buffer);
        Ok(ptr)
    }
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
