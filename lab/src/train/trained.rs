//! A small model that is trained on the spot, for the scenarios that load weights.

use super::model::ModelKind;
use super::options::TrainOptions;
use super::trainer::Trainer;
use crate::stress::StressModel;
use sigmascale::Result;

/// Steps after which the loss of the small models has levelled off.
pub const TRAINED_STEPS: usize = 300;

/// A model after [`TRAINED_STEPS`] steps with attention in f32; `progress` is called with the steps that are done.
///
/// # Errors
/// As [`Trainer::step`].
pub fn trained(model: ModelKind, seed: u64, progress: &dyn Fn(usize)) -> Result<StressModel> {
    let mut trainer = Trainer::new(TrainOptions { seed, compare: false, ..TrainOptions::new(model, None) })?;
    for step in 1..=TRAINED_STEPS {
        trainer.step(1.0)?;
        progress(step);
    }
    Ok(trainer.checkpoint()?.into())
}
