//! Which policy runs, its parameters, and how much memory it takes.

use super::table::PolicyTable;
use crate::error::{Error, Result};

/// Tensors of an attention call that have scales, in the order of a plan's rows: logits, q, k, v, o.
pub const TENSORS: usize = 5;

/// Constants of the paper's calibrated bound, for one model:
/// `tau sphere c_star d sigma`, and `tau [sphere (c_halved d sigma + linear (||a|| + ||b||)) + |c0|]` with constant parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Isotropic {
    /// d / (d - 1) behind a LayerNorm, else 1.
    pub sphere: f64,
    /// The paper's alpha*.
    pub c_star: f64,
    /// The same for half the failure probability.
    pub c_halved: f64,
    /// Factor of the linear terms, `sqrt(2 t)`.
    pub linear: f64,
}

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
        /// Ratios kept in a pool of logits, q, k and v.
        keep: [usize; 4],
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
    /// Query heads.
    pub n_q: usize,
    /// KV heads; divides `n_q`.
    pub n_kv: usize,
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
}

impl PolicySetup {
    pub(super) fn layers(&self) -> usize {
        self.softmax_scales.len()
    }

    /// Descales of one tensor in a layer.
    pub fn row(&self, tensor: usize) -> usize {
        if tensor == 0 { self.n_q } else { self.n_kv }
    }

    /// auto-c: pools of logits, q, k and v.
    pub fn pools(&self) -> [usize; 4] {
        let Rule::AutoC { pool, .. } = self.rule else { return [0; 4] };
        std::array::from_fn(|tensor| match pool {
            Pool::Model => 1,
            Pool::Layer => self.layers(),
            Pool::Head => self.layers() * self.row(tensor),
        })
    }

    pub(super) fn slots(&self) -> usize {
        self.layers() * if self.per_layer { TENSORS } else { self.n_q + 4 * self.n_kv }
    }

    /// Lengths of the memory's vectors, in the order of [`PolicyMemory`](super::PolicyMemory).
    pub(super) fn lengths(&self) -> [usize; 9] {
        let pools = self.pools();
        match self.rule {
            Rule::AutoC { keep, .. } => {
                let count = pools.iter().sum();
                let top = pools.iter().zip(keep).map(|(pools, keep)| pools * keep).sum();
                [self.layers(), 1, count, count, count, top, 0, 0, 0]
            }
            Rule::DelayedPaper { history } => [0, 0, 0, 0, 0, 0, self.slots() * history, self.slots(), 0],
            Rule::DelayedTe { history, .. } => [0, 0, 0, 0, 0, 0, self.slots() * history, self.slots(), self.slots()],
            Rule::Geometry | Rule::GeometryCStar(_) | Rule::Current => [0; 9],
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.layers() == 0
            || self.n_kv == 0
            || self.n_q == 0
            || self.n_q > 4096
            || !self.n_q.is_multiple_of(self.n_kv)
        {
            return Err(Error::argument(format_args!(
                "policies on the device take at least one layer and up to 4096 query heads, a multiple of the KV heads, \
                 not {} layers with {} and {}",
                self.layers(),
                self.n_q,
                self.n_kv
            )));
        }
        if let Rule::AutoC { keep, .. } = self.rule
            && keep.iter().any(|keep| *keep > 1 << 24)
        {
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
            Self::AutoC { kappa, burn_in, max_restarts, pool, keep } => {
                table.kind = 2;
                (table.kappa, table.burn_in, table.max_restarts) = (kappa, burn_in, max_restarts);
                table.pooling = pool as u32;
                let (mut base, mut top) = (0, 0);
                for (tensor, (pools, keep)) in setup.pools().into_iter().zip(keep).enumerate() {
                    table.pool_base[tensor] = base as u32;
                    table.top_base[tensor] = top as u64;
                    table.keep[tensor] = keep as u32;
                    base += pools;
                    top += pools * keep;
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
