//! The tables of one kind of layers: where their weights are, and where their statistics and results go.

use super::tables::{self, Addresses, HAS_MEAN, LayerInput, NO_ROW, Place, ProjectionInput};
use crate::bound::round_up;

/// The tables of a group: its projections (q, k, v of each layer, those that are read) and its layers.
pub(super) struct Tables {
    pub projections: Vec<tables::Projection>,
    pub layers: Vec<tables::Layer>,
    /// Channels of all projections.
    pub rows: usize,
}

/// The projections q, k and v that are read, with their heads.
fn read(layer: &LayerInput) -> [Option<(&ProjectionInput, usize)>; 3] {
    let projected = layer.qk_norm.is_none();
    [
        projected.then_some((&layer.q, layer.n_q)),
        projected.then_some((&layer.k, layer.n_kv)),
        layer.v.as_ref().map(|v| (v, layer.n_kv)),
    ]
}

fn addresses(layer: &LayerInput, projection: &ProjectionInput) -> Addresses {
    Addresses { weight: projection.weight.ptr.0, gain: layer.gain.0, shift: layer.shift.0, bias: projection.bias.0 }
}

/// Where the projections of these layers lie, in the order of their table.
pub(super) fn places(layers: &[LayerInput]) -> impl Iterator<Item = Addresses> {
    layers.iter().flat_map(|layer| read(layer).into_iter().flatten().map(move |(p, _)| addresses(layer, p)))
}

impl Tables {
    pub fn new(layers: &[LayerInput], places: &[Place]) -> Self {
        let mut t = Self { projections: vec![], layers: vec![], rows: 0 };
        let mut head = 0;
        for (l, place) in layers.iter().zip(places) {
            let mut starts = [NO_ROW; 3];
            for (which, input) in read(l).into_iter().enumerate() {
                let Some((p, heads)) = input else { continue };
                starts[which] = t.rows as u32;
                t.projections.push(tables::Projection {
                    at: addresses(l, p),
                    row_stride: p.weight.row_stride,
                    col_stride: p.weight.col_stride,
                    rows: (heads * l.d_head) as u32,
                    d_model: l.d_model as u32,
                    d_head: l.d_head as u32,
                    dtype: p.weight.dtype as u32,
                    vector_dtype: l.vector_dtype as u32,
                    gain_offset: l.gain_offset,
                    flags: if l.mean_removed { HAS_MEAN } else { 0 },
                    rotary: if which == 2 { 0 } else { l.rotary as u32 },
                    interleaved: l.interleaved.into(),
                    stat_row: t.rows as u32,
                    first_head: if which == 2 { NO_ROW } else { head },
                    pad: 0,
                });
                if which < 2 {
                    head += heads as u32;
                }
                t.rows += heads * l.d_head;
            }
            t.layers.push(tables::Layer {
                q_row: starts[0],
                k_row: starts[1],
                v_row: starts[2],
                n_q: l.n_q as u32,
                n_kv: l.n_kv as u32,
                d_head: l.d_head as u32,
                d_model: l.d_model as u32,
                rotary: l.rotary as u32,
                interleaved: l.interleaved.into(),
                layer: place.layer,
                kv: place.kv,
                rope_factor: l.rope_factor,
                normalised: l.qk_norm.is_some().into(),
                query_factor: l.growth(place).query,
                rounding_share: [l.rounding_share.q, l.rounding_share.k, l.rounding_share.v].map(round_up),
            });
        }
        t
    }
}

#[cfg(test)]
mod tests {
    use super::super::tables::{Dtype, QkNormInput, QkNormSide};
    use super::*;
    use crate::cuda::DevicePtr;

    /// A layer whose addresses all differ, from `base` on.
    fn layer(base: u64) -> LayerInput {
        let at = |i: u64| DevicePtr(base + 4096 * i);
        let mut l = LayerInput::without_addresses();
        (l.d_model, l.n_q, l.n_kv, l.d_head, l.rotary) = (256, 4, 2, 64, 64);
        for (p, i) in [(&mut l.q, 0), (&mut l.k, 1)] {
            (p.weight.ptr, p.weight.row_stride, p.weight.col_stride, p.bias) = (at(i), 256, 1, at(8 + i));
        }
        l.v = Some(ProjectionInput { bias: at(10), weight: tables::DeviceMatrix { ptr: at(2), ..l.k.weight } });
        (l.gain, l.shift) = (at(3), at(4));
        l
    }

    fn normalised(base: u64) -> LayerInput {
        let side = |i: u64| QkNormSide {
            gain: DevicePtr(base + 64 * i),
            shift: DevicePtr::NULL,
            per_head: false,
            channels: 64,
        };
        let norm = QkNormInput { q: side(1), k: side(2), dtype: Dtype::F32, gain_offset: 0.0 };
        LayerInput { qk_norm: Some(norm), ..layer(base) }
    }

    /// A table with another's addresses in it is that of the other layers, byte for byte.
    #[test]
    fn tables_differ_in_addresses_alone_where_layers_do() {
        let place = [Place { layer: 0, q: 0, kv: 0 }, Place { layer: 1, q: 4, kv: 2 }];
        for make in [layer, normalised, |base| LayerInput { v: None, ..layer(base) }] {
            let (here, there) = ([make(0x1000_0000), make(0x2000_0000)], [make(0x7000_0000), make(0x5000_0000)]);
            let (mut old, new) = (Tables::new(&here, &place), Tables::new(&there, &place));
            let bytes = |t: &Tables| bytemuck::cast_slice::<_, u8>(&t.projections).to_vec();
            assert_ne!(bytes(&old), bytes(&new));
            assert_eq!(places(&there).count(), old.projections.len());
            for (projection, at) in old.projections.iter_mut().zip(places(&there)) {
                projection.at = at;
            }
            assert_eq!(bytes(&old), bytes(&new));
            let rows = |t: &Tables| bytemuck::cast_slice::<_, u8>(&t.layers).to_vec();
            assert_eq!(rows(&old), rows(&new));
        }
        // The kernels read them from the front of a row.
        assert_eq!(std::mem::offset_of!(tables::Projection, at), 0);
    }

    #[test]
    fn stand_ins_keep_what_decides_which_kernels_run() {
        let one = layer(0x1000_0000);
        assert_eq!(one.without_places(), layer(0x7000_0000).without_places());
        assert_eq!(normalised(0x1000).without_places(), normalised(0x9000).without_places());
        type Change = fn(&mut LayerInput);
        let changes: [Change; 9] = [
            |l| l.gain = DevicePtr::NULL,
            |l| l.shift = DevicePtr::NULL,
            |l| l.k.bias = DevicePtr::NULL,
            |l| l.gain.0 += 2,
            |l| l.q.weight.ptr.0 += 8,
            |l| l.v.as_mut().unwrap().weight.ptr.0 += 2,
            |l| l.v = None,
            |l| l.q.weight.row_stride += 8,
            |l| l.softmax_scale = 0.5,
        ];
        for change in changes {
            let mut other = layer(0x7000_0000);
            change(&mut other);
            assert_ne!(one.without_places(), other.without_places(), "{other:?}");
        }
        assert_ne!(one.without_places(), normalised(0x1000_0000).without_places());
    }
}
