//! Offline profiles: `c_star` for a config, and with weights the norms, bounds and descales of every layer and head.
//!
//! The serialised form of [`Profile`] is the JSON of `sigmascale calibrate`.

mod calibration;
mod inspection;
mod options;
mod profile;

pub use crate::spectral::Estimator;
pub use calibration::{Calibration, calibrate_config};
pub use inspection::{HeadInspection, Inspection, LayerInspection, Statistics};
pub use options::Options;
pub use profile::{
    ChosenC, HeadProfile, INFLATION_FAILURE, LayerProfile, Method, MlaProfile, ModelSummary, PowerProfile, Profile,
    TailSummary,
};
