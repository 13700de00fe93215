//! Names of attention scales as they are found in checkpoints, whoever wrote them; those that are written: [`super::engine`].

use super::engine::Operand;
use crate::error::Result;
use crate::model::{AttentionSpec, LayerSpec, require_attention_module};

/// Every name under which some loader looks for an attention scale of a model.
pub(super) struct ScaleNames {
    modules: Vec<String>,
}

impl ScaleNames {
    pub fn new(spec: &AttentionSpec) -> Result<Self> {
        let module = |layer: &LayerSpec| require_attention_module(&spec.family, &spec.prefix, layer.number);
        Ok(Self { modules: spec.layers.iter().map(module).collect::<Result<_>>()? })
    }

    /// The layer and operand that a tensor is a scale of, under any name.
    pub fn meant(&self, name: &str) -> Option<(usize, Operand)> {
        let inside = |module: &String| name.strip_prefix(module.as_str())?.strip_prefix('.');
        let (layer, rest) = self.modules.iter().enumerate().find_map(|(at, module)| Some((at, inside(module)?)))?;
        let last = rest.rsplit('.').next()?;
        let operand = match last {
            "q_scale" => Operand::Q,
            "k_scale" | "kv_scale" => Operand::K,
            "v_scale" => Operand::V,
            "output_scale" => {
                Operand::ALL.into_iter().find(|o| rest.ends_with(&format!("{}_proj.output_scale", o.letter())))?
            }
            "scale" => match rest {
                "q.scale" => Operand::Q,
                "k_cache.scale" => Operand::K,
                "v_cache.scale" => Operand::V,
                _ => return None,
            },
            _ => return None,
        };
        // A projection's own scale has other names (`weight_scale`, `input_scale`).
        Some((layer, operand))
    }

    /// Whether a tensor belongs to the scales of attention: one of them, or a zero point beside it.
    pub fn is_scale(&self, name: &str) -> bool {
        let beside = ["q_zero_point", "k_zero_point", "v_zero_point", "prob_scale", "prob_output_scale"];
        let last = name.rsplit('.').next().unwrap_or_default();
        self.meant(name).is_some()
            || beside.contains(&last) && self.modules.iter().any(|module| name.starts_with(&format!("{module}.")))
    }
}
