//! Names of attention scales as they are found in checkpoints, whoever wrote them; those that engines read:
//! [`super::description`].

use super::census;
use super::engine::Operand;
use crate::error::Result;
use crate::model::{AttentionSpec, LayerSpec, require_attention_module};

/// The attention modules of a model, and the scales in them.
pub(super) struct ScaleNames {
    pub modules: Vec<String>,
}

impl ScaleNames {
    pub fn new(spec: &AttentionSpec) -> Result<Self> {
        let module = |layer: &LayerSpec| require_attention_module(&spec.family, &spec.prefix, layer.number);
        Ok(Self { modules: spec.layers.iter().map(module).collect::<Result<_>>()? })
    }

    /// The layer whose attention module holds a tensor, and the rest of its name.
    fn inside<'n>(&self, name: &'n str) -> Option<(usize, &'n str)> {
        let rest = |module: &String| name.strip_prefix(module.as_str())?.strip_prefix('.');
        self.modules.iter().enumerate().find_map(|(at, module)| Some((at, rest(module)?)))
    }

    /// The layer and operand that a tensor is meant as a scale of, under any name.
    pub fn meant(&self, name: &str) -> Option<(usize, Operand)> {
        let (layer, rest) = self.inside(name)?;
        if !census::is_scale(name) || census::is_zero_point(name) {
            return None;
        }
        let mut parts = rest.rsplit('.');
        let last = parts.next()?.trim_start_matches('_');
        let operand = match last {
            "scale" | "output_scale" => parts.next()?,
            last => last,
        };
        match operand.trim_start_matches(['_']).chars().next()? {
            'q' if !operand.starts_with("qk") => Some((layer, Operand::Q)),
            'k' => Some((layer, Operand::K)),
            'v' => Some((layer, Operand::V)),
            _ => None,
        }
    }

    /// Whether a tensor belongs to the scales of the model's attention: one of them, or a zero point next to it.
    pub fn is_scale(&self, name: &str) -> bool {
        self.inside(name).is_some() && census::is_scale(name)
    }
}
