//! Which policy runs, its parameters, and how much memory it takes.

use super::table::{PolicyLayer, PolicyTable};
use crate::bound::Isotropic;
use crate::error::{Error, Result};
use crate::model::HeadOffsets;
use crate::stats::stats_words;
use std::ops::Range;

/// Tensors of an attention call that have scales, in the order of a plan's rows: logits, q, k, v, o.
pub const TENSORS: usize = 5;

/// Which ratios of `auto-c` share a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Pool {
    /// All heads of all layers.
    Model = 0,
    /// The heads of a layer.
    Layer = 1,
    /// Every head alone.
    Head = 2,
}

/// A policy and its parameters, as numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Rounded certain bounds.
    Geometry,
    /// The paper's calibrated logit bound.
    GeometryCStar(Isotropic),
    /// Burn-in, then a constant times the certain bound.
    AutoC {
        /// Safety factor on the observed ratio.
        kappa: f64,
        /// Steps of the burn-in.
        burn_in: u32,
        /// Restarts after which no constant is used.
        max_restarts: u32,
        /// Which ratios share a constant.
        pool: Pool,
    },
    /// The largest of the last maxima.
    DelayedPaper {
        /// Steps remembered.
        history: usize,
    },
    /// TransformerEngine's recipe.
    DelayedTe {
        /// Steps remembered.
        history: usize,
        /// The last maximum instead of the largest.
        most_recent: bool,
        /// `448 / 2^margin`.
        scaled_max: f32,
    },
    /// This step's maxima, from the statistics.
    Current,
}

/// What a [`PolicyEngine`](super::PolicyEngine) is made from.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicySetup {
    /// The policy.
    pub rule: Rule,
    /// Query and KV heads of each layer.
    pub heads: HeadOffsets,
    /// Model dimension.
    pub d_model: usize,
    /// One scale a tensor and layer instead of one a head.
    pub per_layer: bool,
    /// Whether v has bounds.
    pub has_values: bool,
    /// What a logit's bound is mapped onto.
    pub logit_target: f64,
    /// What an operand's bound is mapped onto.
    pub operand_target: f64,
    /// No logit passes this.
    pub soft_cap: Option<f64>,
    /// Softmax scale of each layer.
    pub softmax_scales: Vec<f64>,
    /// auto-c: ratios kept in each layer's pool of logits, q, k and v; empty for the other rules.
    pub keep: Vec<[usize; 4]>,
}

impl PolicySetup {
    pub(super) fn layers(&self) -> usize {
        self.heads.layers()
    }

    /// Query and KV heads of one layer.
    pub(super) fn layer(&self, layer: usize) -> (usize, usize) {
        (self.heads.q(layer).len(), self.heads.kv(layer).len())
    }

    /// Descales of one tensor in a layer.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn row(&self, layer: usize, tensor: usize) -> usize {
        if tensor == 0 { self.heads.q(layer).len() } else { self.heads.kv(layer).len() }
    }

    /// Where a layer's descales of one tensor begin among all, and how many there are.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn descales(&self, layer: usize, tensor: usize) -> Range<usize> {
        let (n_q, n_kv) = self.layer(layer);
        let within = if tensor == 0 { 0 } else { n_q + (tensor - 1) * n_kv };
        let start = self.heads.q(layer).start + 4 * self.heads.kv(layer).start + within;
        start..start + self.row(layer, tensor)
    }

    /// Where the statistics of a layer lie among those of all layers.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn stats(&self, layer: usize) -> Range<usize> {
        let (q, kv) = (self.heads.q(layer), self.heads.kv(layer));
        stats_words(q.start, kv.start)..stats_words(q.end, kv.end)
    }

    /// auto-c: places for ratios in a pool of logits, q, k and v, the most that a layer keeps.
    pub fn room(&self) -> [usize; 4] {
        std::array::from_fn(|tensor| self.keep.iter().map(|keep| keep[tensor]).max().unwrap_or(0))
    }

    /// auto-c: pools of logits, q, k and v.
    pub fn pools(&self) -> [usize; 4] {
        let Rule::AutoC { pool, .. } = self.rule else { return [0; 4] };
        std::array::from_fn(|tensor| match pool {
            Pool::Model => 1,
            Pool::Layer => self.layers(),
            Pool::Head if tensor == 0 => self.heads.all_q(),
            Pool::Head => self.heads.all_kv(),
        })
    }

    /// The table of layers that the kernels read.
    pub(super) fn table(&self) -> Vec<PolicyLayer> {
        let one = |layer: usize| {
            let (q, kv) = (self.heads.q(layer), self.heads.kv(layer));
            PolicyLayer {
                n_q: q.len() as u32,
                n_kv: kv.len() as u32,
                first_q: q.start as u32,
                first_kv: kv.start as u32,
                keep: self.keep.get(layer).copied().unwrap_or_default().map(|keep| keep as u32),
                softmax_scale: self.softmax_scales[layer],
            }
        };
        (0..self.layers()).map(one).collect()
    }

    pub(super) fn slots(&self) -> usize {
        if self.per_layer { self.layers() * TENSORS } else { self.heads.all_q() + 4 * self.heads.all_kv() }
    }

    /// Lengths of the memory's vectors, in the order of [`PolicyMemory`](super::PolicyMemory).
    pub(super) fn lengths(&self) -> [usize; 9] {
        let pools = self.pools();
        match self.rule {
            Rule::AutoC { .. } => {
                let count = pools.iter().sum();
                let top = pools.iter().zip(self.room()).map(|(pools, room)| pools * room).sum();
                [self.layers(), 1, count, count, count, top, 0, 0, 0]
            }
            Rule::DelayedPaper { history } => [0, 0, 0, 0, 0, 0, self.slots() * history, self.slots(), 0],
            Rule::DelayedTe { history, .. } => [0, 0, 0, 0, 0, 0, self.slots() * history, self.slots(), self.slots()],
            Rule::Geometry | Rule::GeometryCStar(_) | Rule::Current => [0; 9],
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let layers = self.layers();
        if layers == 0 || self.softmax_scales.len() != layers {
            return Err(Error::argument(format_args!(
                "policies on the device take at least one layer and a softmax scale for each, not {layers} and {}",
                self.softmax_scales.len()
            )));
        }
        for layer in 0..layers {
            let (n_q, n_kv) = self.layer(layer);
            if n_kv == 0 || n_q == 0 || n_q > 4096 || !n_q.is_multiple_of(n_kv) {
                return Err(Error::argument(format_args!(
                    "layer {layer}: policies on the device take up to 4096 query heads, a multiple of the KV heads, not \
                     {n_q} and {n_kv}"
                )));
            }
        }
        if matches!(self.rule, Rule::AutoC { .. }) && self.keep.len() != layers {
            return Err(Error::argument(format_args!(
                "auto-c needs the number of ratios that each of {layers} layers keeps, not {}",
                self.keep.len()
            )));
        }
        if self.room().iter().any(|room| *room > 1 << 24) {
            return Err(Error::argument("a burn-in this long keeps more ratios than the device takes: 2^24 a pool"));
        }
        Ok(())
    }
}

impl Rule {
    pub(super) fn write(&self, setup: &PolicySetup, table: &mut PolicyTable) {
        match *self {
            Self::Geometry => table.kind = 0,
            Self::GeometryCStar(constants) => {
                table.kind = 1;
                (table.sphere, table.c_star) = (constants.sphere, constants.c_star);
                (table.c_halved, table.linear_factor) = (constants.c_halved, constants.linear);
            }
            Self::AutoC { kappa, burn_in, max_restarts, pool } => {
                table.kind = 2;
                (table.kappa, table.burn_in, table.max_restarts) = (kappa, burn_in, max_restarts);
                table.pooling = pool as u32;
                let (mut base, mut top) = (0, 0);
                for (tensor, (pools, room)) in setup.pools().into_iter().zip(setup.room()).enumerate() {
                    table.pool_base[tensor] = base as u32;
                    table.top_base[tensor] = top as u64;
                    table.room[tensor] = room as u32;
                    base += pools;
                    top += pools * room;
                }
            }
            Self::DelayedPaper { history } => {
                table.kind = 3;
                table.history_length = history as u32;
            }
            Self::DelayedTe { history, most_recent, scaled_max } => {
                table.kind = 4;
                table.history_length = history as u32;
                (table.most_recent, table.scaled_max) = (most_recent.into(), scaled_max);
            }
            Self::Current => table.kind = 5,
        }
    }
}
