//! The pages that commands write with `--html`, for programs that hold a result: one self-contained document each.

use super::html::Made;
use super::report::Report;
use super::stress::Results;
use super::{diagnose, inspect, stress, verify};
use sigmascale::calibrate::Inspection;
use sigmascale_lab::diagnose::Diagnosis;
use sigmascale_lab::history::History;
use sigmascale_lab::stress::StressResult;

/// The page of `sigmascale inspect`.
pub fn of_inspection(inspection: &Inspection) -> String {
    inspect::page::render(inspection, &Made::by_library())
}

/// The page of `sigmascale stress`.
pub fn of_stress(result: StressResult) -> String {
    stress::page::render(&Results::One(Box::new(result.into())), &Made::by_library())
}

/// The page of a scenario that trains, and its JSON.
///
/// # Errors
/// If a value cannot be written as JSON.
#[cfg(feature = "train")]
pub fn of_training(result: sigmascale_lab::train::TrainResult) -> serde_json::Result<(String, String)> {
    let run = stress::Run { stress: result.stress, training: Some(result.training) };
    let json = serde_json::to_string(&run)?;
    Ok((json, stress::page::render(&Results::One(Box::new(run)), &Made::by_library())))
}

/// The page of `sigmascale verify` of a folder.
pub fn of_audit(report: &Report) -> String {
    verify::page(report, &Made::by_library())
}

/// The page of `sigmascale diagnose`.
pub fn of_diagnosis(diagnosis: &Diagnosis, history: &History) -> String {
    diagnose::page::render(diagnosis, history, &Made::by_library())
}
