//! Where a layer's bounds are computed.

use sigmascale::Result;
use sigmascale::bound::{LayerBounds, Tail};
#[cfg(feature = "cuda")]
use sigmascale::device::DeviceBounds;
use sigmascale::model::{AttentionSpec, LayerWeights};
use sigmascale::runtime::bounds_of;

/// The bounds stage of a run.
pub(super) enum BoundStage {
    /// On the CPU.
    Host,
    /// By the scale engine on the first GPU.
    #[cfg(feature = "cuda")]
    Device(DeviceBounds),
}

impl BoundStage {
    /// # Errors
    /// With `on_gpu`: `is_cuda` if no GPU can be used, `is_unsupported` if the crate was built without the feature `cuda`.
    pub fn open(on_gpu: bool) -> Result<Self> {
        if !on_gpu {
            return Ok(Self::Host);
        }
        #[cfg(feature = "cuda")]
        return DeviceBounds::open().map(Self::Device);
        #[cfg(not(feature = "cuda"))]
        Err(sigmascale::Error::unsupported("bounds on the GPU need a build with the cargo feature `cuda`"))
    }

    /// The bounds of one layer.
    ///
    /// # Errors
    /// As [`bounds_of`], or as the device.
    pub fn layer(&self, spec: &AttentionSpec, weights: LayerWeights<'_>, tail: &Tail) -> Result<LayerBounds> {
        match self {
            Self::Host => bounds_of(spec, weights, tail),
            #[cfg(feature = "cuda")]
            Self::Device(device) => device.layer(spec, weights, tail),
        }
    }
}
