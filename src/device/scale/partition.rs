//! Which layers share their launches.
//!
//! A launch takes one shape, rotation, norm and kind of storage, so a model is cut into groups of layers that are alike in
//! these. Groups are in the order of their first layers, and layers keep their order in a group.

use super::storage::Storage;
use super::tables::{Dtype, LayerInput, Place};
use crate::error::{Error, Result};
use crate::model::HeadOffsets;

/// What one launch takes once for all of its layers.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kind {
    /// d_model, n_q, n_kv, d_head.
    shape: [usize; 4],
    mean_removed: bool,
    vector_dtype: Dtype,
    values: Option<Storage>,
    /// How q and k are read; `None` where their own norms bound them, whatever weights and rotation.
    projected: Option<Projected>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Projected {
    rotary: usize,
    interleaved: bool,
    rope_factor: f32,
    storage: Storage,
}

impl Kind {
    fn of(l: &LayerInput) -> Self {
        Self {
            shape: [l.d_model, l.n_q, l.n_kv, l.d_head],
            mean_removed: l.mean_removed,
            vector_dtype: l.vector_dtype,
            values: l.v.map(|v| Storage::of(&[v.weight])),
            projected: l.qk_norm.is_none().then(|| Projected {
                rotary: l.rotary,
                interleaved: l.interleaved,
                rope_factor: l.rope_factor,
                storage: Storage::of(&[l.q.weight, l.k.weight]),
            }),
        }
    }
}

/// The layers of each group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Partition {
    groups: Vec<Vec<usize>>,
    /// Group of each layer, and its place there.
    places: Vec<(usize, usize)>,
    pub heads: HeadOffsets,
}

impl Partition {
    /// # Errors
    /// `is_argument` if there is no layer, or one breaks a rule; the message names both.
    pub fn new(layers: &[LayerInput]) -> Result<Self> {
        check(layers)?;
        let mut kinds: Vec<Kind> = vec![];
        let mut groups: Vec<Vec<usize>> = vec![];
        let mut places = vec![];
        for (index, layer) in layers.iter().enumerate() {
            let kind = Kind::of(layer);
            let group = kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
                kinds.push(kind);
                groups.push(vec![]);
                groups.len() - 1
            });
            places.push((group, groups[group].len()));
            groups[group].push(index);
        }
        Ok(Self { groups, places, heads: HeadOffsets::new(layers.iter().map(|l| (l.n_q, l.n_kv))) })
    }

    /// The same for a power iteration, which goes over the projections of q and k without rotation.
    ///
    /// # Errors
    /// As [`Partition::new`], and if a layer has no norm of a projection.
    pub fn of_power(layers: &[LayerInput]) -> Result<Self> {
        check(layers)?;
        if let Some(layer) = layers.iter().position(|l| l.qk_norm.is_some()) {
            return Err(Error::argument(format_args!(
                "layer {layer}: q and k are normalized after the projection, so their bounds need no norm of a projection"
            )));
        }
        let plain = |l: &LayerInput| canonical(&LayerInput { rotary: 0, v: None, ..*l });
        Self::new(&layers.iter().map(plain).collect::<Vec<_>>())
    }

    /// Layer numbers of each group.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = &[usize]> {
        self.groups.iter().map(Vec::as_slice)
    }

    /// The layers of a group, and where each leaves its results.
    pub fn pick(&self, layers: &[LayerInput], members: &[usize]) -> (Vec<LayerInput>, Vec<Place>) {
        let place =
            |i: usize| Place { layer: i as u32, q: self.heads.q(i).start as u32, kv: self.heads.kv(i).start as u32 };
        members.iter().map(|&i| (canonical(&layers[i]), place(i))).unzip()
    }

    /// Group of a layer, and its place there.
    pub fn place(&self, layer: usize) -> Option<(usize, usize)> {
        self.places.get(layer).copied()
    }
}

/// What every layer has to obey by itself.
fn check(layers: &[LayerInput]) -> Result<()> {
    if layers.is_empty() {
        return Err(Error::argument("a model needs at least one layer"));
    }
    for (i, l) in layers.iter().enumerate() {
        let rule = if !(16..=256).contains(&l.d_head) || l.d_head % 8 != 0 {
            "d_head must be a multiple of 8 from 16 to 256"
        } else if l.n_kv == 0 || l.n_q % l.n_kv != 0 || l.n_q == 0 {
            "the number of KV heads must divide that of query heads"
        } else if l.rotary % 2 != 0 || l.rotary > l.d_head {
            "the rotated channels must be even in number and at most d_head"
        } else if !(l.rope_factor.is_finite() && l.rope_factor > 0.0) {
            "the factor on rotated channels must be finite and greater than zero"
        } else if !(l.query_factor.is_finite() && l.query_factor > 0.0) {
            "the factor on q must be finite and greater than zero"
        } else if l.d_model == 0 || l.d_model > 1 << 20 || l.n_q > 1 << 12 {
            "d_model must be from 1 to 2^20 and there may be at most 4096 heads"
        } else {
            check_qk_norm(l).map_err(|error| error.within(format_args!("layer {i}")))?;
            continue;
        };
        return Err(Error::argument(format_args!("layer {i}: {rule}")));
    }
    Ok(())
}

/// The layer without what a layer without rotation does not have.
fn canonical(layer: &LayerInput) -> LayerInput {
    match layer.rotary {
        0 => LayerInput { interleaved: false, rope_factor: 1.0, ..*layer },
        _ => *layer,
    }
}

/// What is wrong with a layer's QK-norm, if anything.
fn check_qk_norm(layer: &LayerInput) -> Result<()> {
    let Some(norm) = &layer.qk_norm else { return Ok(()) };
    if norm.q.channels == 0 || norm.k.channels == 0 {
        return Err(Error::argument("a norm of q and k needs at least one channel"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tables::{QkNormInput, QkNormSide};
    use super::*;
    use crate::cuda::DevicePtr;

    fn layer() -> LayerInput {
        let mut l = LayerInput::without_addresses();
        (l.d_model, l.n_q, l.n_kv, l.d_head, l.rotary) = (256, 4, 2, 64, 64);
        for p in [&mut l.q, &mut l.k] {
            (p.weight.ptr, p.weight.dtype) = (DevicePtr(1 << 20), Dtype::Bf16);
            (p.weight.row_stride, p.weight.col_stride) = (256, 1);
        }
        l.v = Some(l.k);
        l
    }

    fn with(change: impl Fn(&mut LayerInput)) -> LayerInput {
        let mut l = layer();
        change(&mut l);
        l
    }

    fn normalised() -> LayerInput {
        let side = QkNormSide { gain: DevicePtr::NULL, shift: DevicePtr::NULL, per_head: false, channels: 64 };
        with(|l| l.qk_norm = Some(QkNormInput { q: side, k: side, dtype: Dtype::F32, gain_offset: 0.0 }))
    }

    fn groups(layers: &[LayerInput]) -> Vec<Vec<usize>> {
        Partition::new(layers).unwrap().groups
    }

    #[test]
    fn layers_that_are_alike_share_a_group_and_keep_their_order() {
        let nope = with(|l| l.rotary = 0);
        assert_eq!(groups(&[layer(); 3]), [[0, 1, 2]]);
        assert_eq!(groups(&[layer(), nope, layer(), layer(), nope]), [vec![0, 2, 3], vec![1, 4]]);
        // What differs without a kernel's notice.
        let far = with(|l| {
            (l.softmax_scale, l.query_factor, l.gain, l.gain_offset) = (0.5, 1.4, DevicePtr(64), 1.0);
            l.q.bias = DevicePtr(128);
        });
        assert_eq!(groups(&[layer(), far]), [[0, 1]]);
    }

    #[test]
    fn whatever_a_launch_takes_once_makes_a_group_of_its_own() {
        type Change = fn(&mut LayerInput);
        let changes: [Change; 15] = [
            |l| (l.n_q, l.n_kv) = (6, 2),
            |l| (l.n_q, l.n_kv) = (4, 1),
            |l| (l.d_head, l.rotary) = (128, 64),
            |l| l.d_model = 512,
            |l| l.rotary = 32,
            |l| l.interleaved = true,
            |l| l.rope_factor = 1.25,
            |l| l.mean_removed = true,
            |l| l.vector_dtype = Dtype::Bf16,
            |l| (l.q.weight.dtype, l.k.weight.dtype) = (Dtype::F32, Dtype::F32),
            |l| l.k.weight.dtype = Dtype::F32,
            |l| l.k.weight.ptr.0 += 2,
            |l| l.v.as_mut().unwrap().weight.row_stride = 257,
            |l| l.v = None,
            |l| {
                for p in [&mut l.q, &mut l.k] {
                    (p.weight.row_stride, p.weight.col_stride) = (1, 256);
                }
            },
        ];
        let all: Vec<LayerInput> = std::iter::once(layer()).chain(changes.map(|c| with(c))).collect();
        // All but two: a k of another type and one off its 16 bytes are both read value by value.
        let partition = Partition::new(&all).unwrap();
        assert_eq!(partition.groups.len(), all.len() - 1);
        assert_eq!(partition.place(11).unwrap().0, partition.place(12).unwrap().0);
        assert_eq!(partition.place(12), Some((11, 1)));
        assert_eq!(partition.place(16), None);
    }

    #[test]
    fn normalised_layers_are_alike_whatever_their_rotation_and_weights() {
        let mut other = normalised();
        (other.rotary, other.rope_factor, other.q.weight.dtype) = (0, 2.0, Dtype::F16);
        assert_eq!(groups(&[normalised(), layer(), other]), [vec![0, 2], vec![1]]);
    }

    #[test]
    fn a_broken_layer_is_named_with_its_rule() {
        let refused = |bad: LayerInput| Partition::new(&[layer(), bad]).unwrap_err().to_string();
        assert_eq!(refused(with(|l| l.n_kv = 3)), "layer 1: the number of KV heads must divide that of query heads");
        assert!(refused(with(|l| l.rope_factor = f32::NAN)).starts_with("layer 1: the factor on rotated channels"));
        for factor in [0.0, -1.0, f64::INFINITY, f64::NAN] {
            assert!(refused(with(|l| l.query_factor = factor)).starts_with("layer 1: the factor on q must be finite"));
        }
        let mut bare = normalised();
        bare.qk_norm.as_mut().unwrap().k.channels = 0;
        assert!(refused(bare).starts_with("layer 1: a norm of q and k needs"));
        assert!(Partition::new(&[]).unwrap_err().is_argument());
    }

    #[test]
    fn power_iteration_parts_layers_by_shape_norm_and_storage_alone() {
        let kinds = |other: LayerInput| Partition::of_power(&[layer(), other]).unwrap().groups.len();
        assert_eq!(kinds(with(|l| (l.rotary, l.interleaved, l.rope_factor) = (0, true, 1.5))), 1);
        assert_eq!(kinds(with(|l| l.v = None)), 1);
        assert_eq!(kinds(with(|l| l.n_q = 6)), 2);
        assert_eq!(kinds(with(|l| l.mean_removed = true)), 2);
        assert_eq!(kinds(with(|l| l.k.weight.dtype = Dtype::F32)), 2);
        let refused = |bad: LayerInput| Partition::of_power(&[layer(), bad]).unwrap_err().to_string();
        assert!(refused(normalised()).starts_with("layer 1: q and k are normalized after the projection"));
        assert!(refused(with(|l| l.rotary = 3)).starts_with("layer 1: the rotated channels must be even"));
    }
}
