//! Alarms of a run while it goes on, and the diagnosis of a whole one.

use crate::errors::raise;
use crate::threads::detached;
use pyo3::prelude::*;
use serde::Serialize;
use serde_json::json;
use sigmascale::{Error, Result};
use sigmascale_cli::pages;
use sigmascale_lab::diagnose::{Alarm, Diagnosis, Options, in_output_folder, read_checkpoints};
use sigmascale_lab::history::{History, read_records};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

fn text(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Error::non_finite(format_args!("the result cannot be written as JSON: {error}")))
}

fn options(json: &str) -> Result<Options> {
    serde_json::from_str(json).map_err(|error| Error::argument(format_args!("options of diagnose: {error}")))
}

/// The alarms of a run.
#[pyclass(frozen)]
pub struct Alarms(Mutex<sigmascale_lab::diagnose::Alarms>);

impl Alarms {
    fn held(&self) -> MutexGuard<'_, sigmascale_lab::diagnose::Alarms> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Alarms {
    /// `run` is the first line of the record, `thresholds` a JSON object.
    #[new]
    fn new(py: Python<'_>, run: &str, thresholds: &str) -> PyResult<Self> {
        let made = options(thresholds).and_then(|options| sigmascale_lab::diagnose::Alarms::from_line(run, options));
        made.map(|alarms| Self(Mutex::new(alarms))).map_err(|error| raise(py, &error))
    }

    /// Takes in lines of the record; the event lines of what they raise or clear.
    fn observe(&self, py: Python<'_>, lines: &str) -> PyResult<Vec<String>> {
        let events = self.held().observe_lines(lines).map_err(|error| raise(py, &error))?;
        let record = sigmascale_lab::history::Record::Event;
        events.into_iter().map(|event| text(&record(event)).map_err(|error| raise(py, &error))).collect()
    }

    /// JSON: the alarms that are up, the first that was raised of a head, and what to do.
    fn state(&self, py: Python<'_>) -> PyResult<String> {
        let alarms = self.held();
        let up: Vec<&Alarm> = alarms.up().collect();
        text(&json!({"up": up, "first": alarms.first(), "advice": alarms.advice()})).map_err(|error| raise(py, &error))
    }
}

/// JSON, and the page of the command line. `record` is a file; without one, `checkpoints` are a series.
#[pyfunction]
pub fn diagnose(
    py: Python<'_>,
    record: Option<PathBuf>,
    checkpoints: Vec<PathBuf>,
    lr: Option<f64>,
    thresholds: String,
) -> PyResult<(String, String)> {
    detached(py, "diagnose", move |stop| {
        let options = options(&thresholds)?;
        let found = record.as_deref().and_then(in_output_folder);
        let (record, checkpoints) = match found {
            Some(found) if found.len() == 1 && found[0].is_file() => (found.into_iter().next(), checkpoints),
            Some(found) => (None, found),
            None => (record, checkpoints),
        };
        if lr.is_some() && record.is_some() {
            return Err(Error::argument("lr is for checkpoints: a record has its learning rates"));
        }
        let (run, records) = match record {
            Some(record) => read_records(&record)?,
            None => read_checkpoints(&checkpoints, lr, &mut || stop.check())?,
        };
        let diagnosis = Diagnosis::new(run.clone(), &records, options)?;
        Ok((text(&diagnosis)?, pages::of_diagnosis(&diagnosis, &History::new(run, records))))
    })
}
