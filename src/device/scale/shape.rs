//! Scales of layers of one shape, wherever their weights lie.

use super::addresses::AddressWriter;
use super::engine::ScaleEngine;
use super::tables::LayerInput;
use crate::bound::HeadBound;
use crate::cuda::{Buffer, Device, Stream};
use crate::error::{Error, Result};

/// What an engine says of layers that it does not fit.
pub(super) const OTHER_SHAPE: &str = "these layers have other shapes, types, strides or alignments than those that the engine was \
                                      made with: make another engine for them";

/// A [`ScaleEngine`] for weights that move. It is set up for the shapes of layers, and each launch is given where they lie.
///
/// The addresses, and the tensor maps made of them, are a kernel parameter of at most 1152 bytes: `scale_addresses` writes them
/// into the engine's tables, ahead of the kernels of [`ScaleEngine`], which are the same. So a weight that moves is never uploaded,
/// a launch can be captured in a graph, whose replays read the captured addresses, and results are those of a [`ScaleEngine`] over
/// the same layers, bit for bit. It costs one short launch, and one more for every further layer.
///
/// Layers that share an engine share its workspace and its results: they are computed one after another, in the order of one
/// stream (or of events), and results are copied away in between.
#[derive(Debug)]
pub struct ShapeEngine {
    engine: ScaleEngine,
    writer: AddressWriter,
    /// The layers with stand-ins for their addresses.
    shapes: Vec<LayerInput>,
}

impl ShapeEngine {
    /// Sets everything up as [`ScaleEngine::new`] does. Nothing at the layers' addresses is read.
    ///
    /// # Errors
    /// As [`ScaleEngine::new`].
    pub fn new(device: &Device, layers: &[LayerInput], with_grams: bool) -> Result<Self> {
        // SAFETY: 1. and 2. only launches reach the addresses, and those of this type put others in their place before.
        let engine = unsafe { ScaleEngine::new(device, layers, with_grams)? };
        let shapes = layers.iter().map(LayerInput::without_places).collect();
        Ok(Self { engine, writer: AddressWriter::new(device)?, shapes })
    }

    /// As [`ScaleEngine::with_eta`].
    ///
    /// # Errors
    /// As [`ScaleEngine::with_eta`].
    pub fn with_eta(mut self, eta: f64) -> Result<Self> {
        self.engine = self.engine.with_eta(eta)?;
        Ok(self)
    }

    /// Whether the engine can take these layers. They may differ from those that it was made with in their addresses only, and
    /// an address must be NULL, or a multiple of 16 bytes, where theirs was.
    pub fn fits(&self, layers: &[LayerInput]) -> bool {
        self.shapes.iter().copied().eq(layers.iter().map(LayerInput::without_places))
    }

    /// As [`ScaleEngine::descales`], of these layers.
    ///
    /// # Errors
    /// `is_argument` if the engine does not fit the layers ([`ShapeEngine::fits`]); otherwise as [`ScaleEngine::descales`].
    ///
    /// # Safety
    /// As [`ScaleEngine::new`], of these layers, until the launch has run, also at each replay of a graph that captured it.
    pub unsafe fn descales(&self, stream: &Stream, layers: &[LayerInput]) -> Result<()> {
        self.place(stream, layers)?;
        self.engine.descales_early(stream, true)
    }

    /// As [`ScaleEngine::plan`], of these layers.
    ///
    /// # Errors
    /// `is_argument` if the engine does not fit the layers ([`ShapeEngine::fits`]); otherwise as [`ScaleEngine::plan`].
    ///
    /// # Safety
    /// As [`ShapeEngine::descales`].
    pub unsafe fn plan(&self, stream: &Stream, layers: &[LayerInput]) -> Result<()> {
        self.place(stream, layers)?;
        self.engine.plan_early(stream, true)
    }

    fn place(&self, stream: &Stream, layers: &[LayerInput]) -> Result<()> {
        if !self.fits(layers) {
            return Err(Error::argument(OTHER_SHAPE));
        }
        stream.bind()?;
        // SAFETY: 1. the places are rows of the engine's tables; 2. an engine's work is ordered, and the first launch after this
        // one, of any group and route, waits for its end: a plain one starts then, `scale_norms` waits before it reads a table.
        unsafe { self.writer.put(stream, self.engine.places(layers)?) }
    }

    /// As [`ScaleEngine::head_descales`].
    pub fn head_descales(&self) -> &Buffer<f32> {
        self.engine.head_descales()
    }

    /// As [`ScaleEngine::tensor_descales`].
    pub fn tensor_descales(&self) -> &Buffer<f32> {
        self.engine.tensor_descales()
    }

    /// As [`ScaleEngine::operand_bounds`].
    pub fn operand_bounds(&self) -> &Buffer<f32> {
        self.engine.operand_bounds()
    }

    /// As [`ScaleEngine::head_bounds`].
    pub fn head_bounds(&self) -> Option<&Buffer<HeadBound>> {
        self.engine.head_bounds()
    }

    /// As [`ScaleEngine::status`].
    pub fn status(&self) -> &Buffer<u32> {
        self.engine.status()
    }

    /// As [`ScaleEngine::workspace_bytes`].
    pub fn workspace_bytes(&self) -> usize {
        self.engine.workspace_bytes()
    }
}
