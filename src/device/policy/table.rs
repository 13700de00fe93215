//! The host's side of `kernels/policy/types.cuh`: what the policy kernels read, from the policy's own parameters.

use crate::bound::{BoundKind, E4M3_MAX, Isotropic, Tail, isotropic};
use crate::error::Result;
use crate::model::{AttentionSpec, LayerSpec, NormKind};
use crate::plan::Granularity;
use crate::policy::{AmaxAlgorithm, Memory, PolicyConfig, PolicyState, ScaledTensor};
use bytemuck::{Pod, Zeroable};

/// Tensors with pools of their own under auto-c; o follows v.
pub(super) const POOLED: [ScaledTensor; 4] = [ScaledTensor::Logit, ScaledTensor::Q, ScaledTensor::K, ScaledTensor::V];

/// Heads of a layer, and of all layers before it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PolicyLayer {
    n_q: u32,
    n_kv: u32,
    first_q: u32,
    first_kv: u32,
    keep: [u32; 4],
    softmax_scale: f64,
}
const _: () = assert!(size_of::<PolicyLayer>() == 8 * 4 + 8);

impl PolicyLayer {
    /// The layers of a model. Under auto-c, [`row_length`](super::memory::row_length) has accepted the ratios that they keep.
    pub fn all(spec: &AttentionSpec, PolicyState { config, shape, .. }: &PolicyState) -> Vec<Self> {
        let one = |(layer, own): (usize, &LayerSpec)| {
            let (q, kv) = (shape.heads().q(layer), shape.heads().kv(layer));
            let keep = |tensor| match config {
                PolicyConfig::AutoC(config) => config.kept_ratios(shape, layer, tensor) as u32,
                _ => 0,
            };
            Self {
                n_q: q.len() as u32,
                n_kv: kv.len() as u32,
                first_q: q.start as u32,
                first_kv: kv.start as u32,
                keep: POOLED.map(keep),
                softmax_scale: own.logit_scale(),
            }
        };
        spec.layers.iter().enumerate().map(one).collect()
    }
}

/// Addresses and parameters, see the header.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PolicyTable {
    pub heads: u64,
    pub operands: u64,
    pub stats: u64,
    pub observed: u64,
    pub descales: u64,
    pub tensor_descales: u64,
    pub status: u64,
    pub layers: u64,
    pub seen: u64,
    pub restarts: u64,
    pub pools: u64,
    pub top: u64,
    pub slack: u64,
    pub slots: u64,
    pub history: u64,
    kind: u32,
    n_layers: u32,
    per_layer: u32,
    has_values: u32,
    logit_target: f64,
    operand_target: f64,
    soft_cap: f64,
    d_model: f64,
    isotropic: Isotropic,
    kappa: f64,
    pooling: u32,
    burn_in: u32,
    max_restarts: u32,
    room: u32,
    pool_base: [u32; 4],
    history_length: u32,
    most_recent: u32,
    scaled_max: f32,
    unused: u32,
}
const _: () = assert!(
    size_of::<PolicyTable>() == 15 * 8 + 4 * 4 + 4 * 8 + size_of::<Isotropic>() + 8 + 4 * 4 + 4 * 4 + 4 * 4
        && size_of::<Isotropic>() == 4 * 8
);

/// Whether values have bounds: their projection's input has a norm.
pub(super) fn has_values(spec: &AttentionSpec) -> bool {
    spec.norm.kind != NormKind::None
}

impl PolicyTable {
    /// The parameters, with addresses of zero. `row` is [`row_length`](super::memory::row_length).
    ///
    /// # Errors
    /// geometry-c-star: as [`Tail::check`].
    pub fn new(spec: &AttentionSpec, state: &PolicyState, tail: &Tail, row: usize) -> Result<Self> {
        let mut table = Self {
            kind: state.config.kind() as u32,
            n_layers: spec.layers.len() as u32,
            has_values: has_values(spec).into(),
            logit_target: E4M3_MAX,
            operand_target: E4M3_MAX,
            soft_cap: spec.soft_cap.unwrap_or(f64::INFINITY),
            d_model: spec.d_model as f64,
            ..Self::zeroed()
        };
        let granularity = match &state.config {
            PolicyConfig::Geometry(config) | PolicyConfig::GeometryCStar(config) => {
                table.logit_target *= config.eta;
                config.granularity
            }
            PolicyConfig::AutoC(config) => {
                table.logit_target *= config.eta;
                (table.kappa, table.burn_in, table.max_restarts) = (config.kappa, config.burn_in, config.max_restarts);
                (table.pooling, table.room) = (config.pooling as u32, row as u32);
                if let Memory::AutoC(memory) = &state.memory {
                    let before = |tensor: usize| memory.pools[..tensor].iter().map(Vec::len).sum::<usize>();
                    table.pool_base = std::array::from_fn(|tensor| before(tensor) as u32);
                }
                config.granularity
            }
            PolicyConfig::DelayedPaper(config) => {
                table.logit_target *= config.margin;
                table.operand_target *= config.margin;
                table.history_length = row as u32;
                config.granularity
            }
            PolicyConfig::DelayedTe(config) => {
                (table.history_length, table.scaled_max) = (row as u32, config.scaled_max());
                table.most_recent = (config.algorithm == AmaxAlgorithm::MostRecent).into();
                config.granularity
            }
            PolicyConfig::Current(config) => config.granularity,
        };
        table.per_layer = (granularity == Granularity::Layer).into();
        if state.config.kind().bound() == Some(BoundKind::RankAware) {
            table.isotropic = isotropic(spec, tail)?;
        }
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::sources;
    use crate::names::Named;
    use crate::policy::{PolicyKind, Pooling, ScaledTensor};

    /// The values of the enum in `kernels/policy/types.cuh` whose names begin with `prefix`, in the order of the text.
    fn constants(first: &str) -> Vec<(&'static str, u32)> {
        let (_, text) = sources::HEADERS.iter().find(|(path, _)| *path == "policy/types.cuh").unwrap();
        let line = text.lines().find(|line| line.starts_with(&format!("enum : u32 {{ {first} = 0,"))).unwrap();
        let list = line.split_once('{').unwrap().1.split_once('}').unwrap().0;
        let one = |entry: &'static str| {
            let (name, value) = entry.split_once(" = ").unwrap();
            (name.trim(), value.trim().parse().unwrap())
        };
        list.split(',').map(one).collect()
    }

    fn agrees<T: Named>(prefix: &str, constants: &[(&str, u32)]) {
        let name = |value: &T| format!("{prefix}{}", value.name().replace('-', "_").to_uppercase());
        let own: Vec<(String, u32)> = T::VALUES.iter().zip(0..).map(|(value, at)| (name(value), at)).collect();
        let kernels: Vec<(String, u32)> = constants.iter().map(|(name, value)| (name.to_string(), *value)).collect();
        assert_eq!(own, kernels, "{}", T::WHAT);
    }

    /// The kernels count policies, tensors and poolings as the host does.
    #[test]
    fn constants_of_the_kernels_are_the_hosts() {
        agrees::<PolicyKind>("", &constants("GEOMETRY"));
        agrees::<Pooling>("POOL_", &constants("POOL_MODEL"));
        let tensors = constants("LOGIT");
        assert_eq!(tensors[ScaledTensor::ALL.len()], ("TENSORS", ScaledTensor::ALL.len() as u32));
        assert_eq!(
            tensors[..5].iter().map(|(_, value)| *value).collect::<Vec<_>>(),
            ScaledTensor::ALL.map(|t| t as u32)
        );
    }
}
