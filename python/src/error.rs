//! The one exception that Python sees.

use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::PyException;

create_exception!(
    kvgate,
    KvGateError,
    PyException,
    "The gateway can't be reached or refuses, or what was given can't be."
);

pub fn failed(error: impl std::fmt::Display) -> PyErr {
    KvGateError::new_err(error.to_string())
}
