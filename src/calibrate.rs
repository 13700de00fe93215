//! Offline profiles: `c_star` for a config, and with weights the norms, bounds and descales of every layer and head.
//!
//! The serialized form of [`Profile`] is the JSON of `sigmascale calibrate`.
//!
//! ```
//! use sigmascale::calibrate::{Calibration, Inspection, Options};
//! use sigmascale::model::Checkpoint;
//!
//! let checkpoint = Checkpoint::open("data/tiny-llama".as_ref())?;
//! let mut calibration = Calibration::new(checkpoint.spec(), Options::default())?;
//! for layer in 0..checkpoint.spec().layers.len() {
//!     let profile = calibration.layer(checkpoint.layer(layer)?)?;
//!     assert!(profile.logit_bound > 90.0); // no normalized input gives a larger |logit|
//! }
//! let profile = calibration.finish();
//! assert_eq!(format!("{:.4}", profile.c_star.gamma), "2.7983");
//! # Ok::<(), sigmascale::Error>(())
//! ```

mod calibration;
mod inspection;
mod options;
mod profile;

pub use crate::spectral::Estimator;
pub use calibration::{Calibration, calibrate_config};
pub use inspection::{HeadInspection, Inspection, LayerInspection, Statistics};
pub use options::Options;
pub use profile::{
    CenterProfile, ChosenC, HeadProfile, INFLATION_FAILURE, LayerProfile, Method, MlaProfile, ModelSummary,
    PowerProfile, Profile, TailSummary,
};
