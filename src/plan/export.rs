//! Scales as files that other software loads.
//!
//! vLLM and mistral.rs read `model.layers.{i}.self_attn.{q,k,v}_scale` (other families by the name of their attention
//! module): one f32 scalar a tensor, in the dequant convention (`value = code * scale`), which is [`Descale`]. The largest of the heads is written, so no head can
//! overflow.

use super::{OperandDescales, ScalePlan};
use crate::error::{Error, Result};
use crate::scale::Descale;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::HashMap;
use std::path::Path;

/// One scale each for q, k and v of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorScales {
    /// Module that holds the layer's attention, as [`attention_module`](crate::model::attention_module) names it.
    pub module: String,
    /// Queries, after rotation.
    pub q: Descale,
    /// Keys, after rotation.
    pub k: Descale,
    /// Values.
    pub v: Descale,
}

impl TensorScales {
    /// The largest descales over the heads of one layer.
    ///
    /// # Errors
    /// `is_unsupported` if the values have no bound.
    ///
    /// ```
    /// use sigmascale::{Descale, plan::OperandDescales, plan::export::TensorScales};
    /// let row = |a, b| -> sigmascale::Result<Vec<Descale>> { Ok(vec![Descale::new(a)?, Descale::new(b)?]) };
    /// let heads = OperandDescales { q: row(0.1, 0.2)?, k: row(0.4, 0.3)?, v: Some(row(0.5, 0.6)?), o: None };
    /// let scales = TensorScales::new("model.layers.0.self_attn".into(), &heads)?;
    /// assert_eq!((scales.q.get(), scales.k.get(), scales.v.get()), (0.2, 0.4, 0.6));
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn new(module: String, operands: &OperandDescales) -> Result<Self> {
        let v = operands.v.as_deref().ok_or_else(|| {
            Error::unsupported(format_args!(
                "{module}: v has no bound (no norm in front of its projection), so there is no v_scale to export"
            ))
        })?;
        Ok(Self {
            q: ScalePlan::per_tensor(&operands.q),
            k: ScalePlan::per_tensor(&operands.k),
            v: ScalePlan::per_tensor(v),
            module,
        })
    }
}

/// The safetensors file of these scales.
///
/// # Errors
/// `is_argument` if a layer stands twice.
pub fn scales_safetensors(layers: &[TensorScales]) -> Result<Vec<u8>> {
    let mut values = Vec::with_capacity(3 * layers.len());
    for scales in layers {
        for (name, scale) in [("q", scales.q), ("k", scales.k), ("v", scales.v)] {
            values.push((format!("{}.{name}_scale", scales.module), scale.get().to_le_bytes()));
        }
    }
    let mut names: Vec<&str> = values.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::argument(format_args!("{} stands twice", twice[0])));
    }
    let broken = |e| Error::format(Path::new("scales"), format_args!("cannot be written as safetensors: {e}"));
    let tensors = values
        .iter()
        .map(|(name, bytes)| Ok((name, TensorView::new(Dtype::F32, Vec::new(), bytes).map_err(broken)?)))
        .collect::<Result<Vec<_>>>()?;
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(tensors, Some(about)).map_err(broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scales(layer: usize) -> TensorScales {
        let descale = |x| Descale::new(x).unwrap();
        TensorScales {
            module: format!("model.layers.{layer}.self_attn"),
            q: descale(0.5),
            k: descale(0.25),
            v: descale(0.125),
        }
    }

    #[test]
    fn scalars_have_an_empty_shape() {
        let bytes = scales_safetensors(&[scales(0), scales(11)]).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), 6);
        let tensor = file.tensor("model.layers.11.self_attn.k_scale").unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[][..]));
        assert_eq!(tensor.data(), 0.25f32.to_le_bytes());
        assert!(scales_safetensors(&[scales(3), scales(3)]).unwrap_err().is_argument());
    }

    #[test]
    fn values_without_a_bound_are_refused() {
        let one = vec![Descale::ONE];
        let operands = OperandDescales { q: one.clone(), k: one, v: None, o: None };
        let error = TensorScales::new("transformer.h.4.attn".into(), &operands).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("transformer.h.4.attn: v has no bound"));
    }
}
