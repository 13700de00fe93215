//! From the crate's errors to Python exceptions, by their predicates.

use pyo3::exceptions::{PyFileNotFoundError, PyIsADirectoryError, PyOSError, PyPermissionError};
use pyo3::prelude::*;
use sigmascale::Error;
use std::error::Error as _;
use std::io::ErrorKind;

/// The exception of an error: of the operating system's classes for files, else one of `sigmascale._errors`.
pub fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let message = error.to_string();
    if error.is_io() {
        let kind = error.source().and_then(|source| source.downcast_ref::<std::io::Error>()).map(std::io::Error::kind);
        return match kind {
            Some(ErrorKind::NotFound) => PyFileNotFoundError::new_err(message),
            Some(ErrorKind::PermissionDenied) => PyPermissionError::new_err(message),
            Some(ErrorKind::IsADirectory) => PyIsADirectoryError::new_err(message),
            _ => PyOSError::new_err(message),
        };
    }
    let name = if error.is_argument() {
        "ArgumentError"
    } else if error.is_unsupported() {
        "UnsupportedError"
    } else if error.is_format() {
        "FormatError"
    } else if error.is_non_finite() {
        "NonFiniteError"
    } else if error.is_mismatch() {
        "MismatchError"
    } else if error.is_cuda() {
        "CudaError"
    } else {
        "SigmascaleError"
    };
    let made = py.import("sigmascale._errors").and_then(|module| module.getattr(name)?.call1((message,)));
    made.map_or_else(|error| error, PyErr::from_value)
}
