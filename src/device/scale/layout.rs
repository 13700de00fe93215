//! The tables of one kind of layers: where their weights are, and where their statistics and results go.

use super::tables::{self, HAS_MEAN, LayerInput, NO_ROW, Place, above};

/// The tables of a group: its projections (q, k, v of each layer, those that are read) and its layers.
pub(super) struct Tables {
    pub projections: Vec<tables::Projection>,
    pub layers: Vec<tables::Layer>,
    /// Channels of all projections.
    pub rows: usize,
}

impl Tables {
    pub fn new(layers: &[LayerInput], places: &[Place]) -> Self {
        let mut t = Self { projections: vec![], layers: vec![], rows: 0 };
        let mut head = 0;
        for (l, place) in layers.iter().zip(places) {
            let mut starts = [NO_ROW; 3];
            let projected = l.qk_norm.is_none();
            let inputs = [
                projected.then_some((&l.q, l.n_q)),
                projected.then_some((&l.k, l.n_kv)),
                l.v.as_ref().map(|v| (v, l.n_kv)),
            ];
            for (which, input) in inputs.into_iter().enumerate() {
                let Some((p, heads)) = input else { continue };
                starts[which] = t.rows as u32;
                t.projections.push(tables::Projection {
                    weight: p.weight.ptr.0,
                    gain: l.gain.0,
                    shift: l.shift.0,
                    bias: p.bias.0,
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
                rounding_share: [l.rounding_share.q, l.rounding_share.k, l.rounding_share.v].map(above),
            });
        }
        t
    }
}
