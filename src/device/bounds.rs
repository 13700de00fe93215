//! The bounds stage on a GPU, from weights in host memory.

use crate::bound::{LayerBounds, Tail, check_device};
use crate::cuda::{Device, Stream};
use crate::device::scale::{DeviceWeights, ScaleEngine};
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, LayerWeights};
use std::sync::Arc;

/// A scale engine over copies of the layers' weights, as far as bounds depend on them. Layers may differ in heads,
/// rotation, softmax scale, the factor on their queries and type. Where queries grow with the position, bounds hold up to
/// [`AttentionSpec::bounded_positions`].
///
/// # Errors
/// As [`check_device`], [`LayerGeometry::new`](crate::geometry::LayerGeometry::new) and [`ScaleEngine::over`].
pub fn scale_engine(device: &Device, spec: &AttentionSpec, layers: &[LayerWeights<'_>]) -> Result<ScaleEngine> {
    spec.check()?;
    check_device(spec)?;
    let weights = DeviceWeights::upload(device, spec, layers).map_err(|error| error.within(&spec.name))?;
    ScaleEngine::over(device, &Arc::new(weights), true).map_err(|error| error.within(&spec.name))
}

/// The bounds stage on a GPU, one layer at a time, from weights in host memory.
#[derive(Debug)]
pub struct DeviceBounds {
    device: Device,
    stream: Stream,
}

impl DeviceBounds {
    /// On the first GPU.
    ///
    /// # Errors
    /// `is_cuda`, saying what is missing.
    pub fn open() -> Result<Self> {
        crate::cuda::require()?;
        let device = Device::open(0)?;
        Ok(Self { stream: device.stream()?, device })
    }

    /// The bounds of one layer, as the scale engine makes them.
    ///
    /// # Errors
    /// `is_non_finite` if a weight is; otherwise as [`scale_engine`] and [`LayerBounds::new`].
    pub fn layer(&self, spec: &AttentionSpec, weights: LayerWeights<'_>, tail: &Tail) -> Result<LayerBounds> {
        let layer = weights.layer;
        let engine = scale_engine(&self.device, spec, std::slice::from_ref(&weights))?;
        engine.plan(&self.stream)?;
        let heads = engine.head_bounds().ok_or_else(|| Error::cuda("the engine was made without logit bounds"))?;
        LayerBounds::from_device(spec, layer, &heads.read()?, &engine.operand_bounds().read()?, tail)
    }
}
