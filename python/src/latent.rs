//! Scales of layers with multi-head latent attention (MLA), from tensors in host memory under the names that they have in the
//! model.
//!
//! Attention runs on the expanded form: q and k of `d_nope + d_rope` and v of `d_value` channels for each head.

use crate::host::{Scales, above};
use crate::work::beside;
use pyo3::prelude::*;
use serde_json::json;
use sigmascale::bound::{BoundKind, MlaBounds};
use sigmascale::model::LayerStream;
use sigmascale::plan::{Granularity, ScalePlan};
use sigmascale::{Error, Result};
use std::path::Path;

/// A tensor: its name, its type as safetensors files have it, its shape, and address and bytes of its contiguous values.
type Tensor = (String, String, Vec<usize>, u64, usize);

/// Which tensors each layer's scales depend on, as JSON: of each entry one of the names, without prefix.
pub fn needs(config: &str, name: &str) -> Result<Vec<serde_json::Value>> {
    let stream = LayerStream::new(config.as_bytes(), Path::new(name), &[])?;
    Ok((0..stream.spec().layers.len()).map(|layer| json!(stream.wanted(layer))).collect())
}

/// Scales of one layer of the model of this config, as [`host_scales`](crate::host::host_scales) has them. `names` are those of
/// all of the model's tensors; the caller keeps those given alive and unchanged until this returns.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn latent_scales(
    py: Python<'_>,
    config: &str,
    name: &str,
    names: Vec<String>,
    layer: usize,
    tensors: Vec<Tensor>,
    logits: bool,
    eta: f64,
) -> PyResult<Scales> {
    beside(py, || {
        let mut stream = LayerStream::new(config.as_bytes(), Path::new(name), &names)?;
        for (tensor, kind, shape, address, size) in tensors {
            let dtype = serde_json::from_value(json!(kind))
                .map_err(|_| Error::argument(format_args!("{tensor} has type {kind}, which is not read")))?;
            // SAFETY: 1. the package passes address and size of a contiguous tensor of the host; 2. it holds the tensor, and
            // nobody writes it, until the call returns.
            let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, size) };
            stream.push(&tensor, dtype, &shape, bytes.to_vec())?;
        }
        if !stream.is_due(layer) {
            let missing = stream.wanted(layer).iter().map(|names| names[0].as_str()).collect::<Vec<_>>().join(", ");
            return Err(Error::argument(format_args!("layer {layer} needs all of {missing}")));
        }
        let bounds = if logits {
            MlaBounds::new(stream.spec(), stream.layer(layer)?)?
        } else {
            MlaBounds::operands(stream.spec(), stream.layer(layer)?)?
        };
        scales(&bounds, stream.spec().layers[layer].n_q_heads, eta)
    })
}

fn scales(bounds: &MlaBounds, heads: usize, eta: f64) -> Result<Scales> {
    let expanded = &bounds.expanded;
    let plan = ScalePlan::from_bounds(expanded, BoundKind::Certain, eta, Granularity::Head)?;
    let missing = || Error::unsupported("values of latent attention have no bound");
    let own = &plan.operands;
    let (v, o) = own.v.as_ref().zip(own.o.as_ref()).ok_or_else(missing)?;
    let descales = [&own.q, &own.k, v, o].into_iter().flatten().map(|descale| descale.get()).collect();
    let v = expanded.v.as_ref().ok_or_else(missing)?;
    let operands = [&expanded.q, &expanded.k, v].into_iter().flatten().map(|bound| above(bound.rounded)).collect();
    let logits = expanded.heads.iter().zip(&plan.logit_descale).flat_map(|(head, descale)| {
        let (certain, rounded) = (head.certain.unwrap_or(0.0), head.rounded.unwrap_or(0.0));
        // Its logits have no single operator, and so no norm of one.
        [0.0, above(certain), above(rounded), descale.get(), 0.0, 0.0, 0.0, 0.0]
    });
    let logits: Vec<f32> = logits.collect();
    debug_assert!(logits.is_empty() || logits.len() == 8 * heads, "a row for each head");
    Ok((descales, operands, (!logits.is_empty()).then_some(logits)))
}
