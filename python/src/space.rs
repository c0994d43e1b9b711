//! A space, as Python gives it: JSON.

use kvgate::format::{Kind, Space};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::failed;

#[pyclass(frozen, name = "Space", module = "kvgate._native")]
pub struct PySpace(pub Space);

#[pymethods]
impl PySpace {
    #[new]
    fn new(json: &str) -> PyResult<Self> {
        Space::from_json(json).map(Self).map_err(failed)
    }

    #[getter]
    fn id(&self) -> String {
        self.0.id().to_string()
    }

    #[getter]
    fn model_id(&self) -> String {
        self.0.model_id().to_string()
    }

    /// As in its JSON.
    #[getter]
    fn kind<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let with_tokens = |name: &str, tokens: u32| {
            let kind = PyDict::new(py);
            kind.set_item(name, tokens)?;
            Ok(kind.into_any())
        };
        match self.0.kind() {
            Kind::Full => "full".into_bound_py_any(py),
            Kind::State => "state".into_bound_py_any(py),
            Kind::Window(tokens) => with_tokens("window", tokens),
            Kind::Chunked(tokens) => with_tokens("chunked", tokens),
        }
    }

    /// The draft model's identity; empty: the model's own layers.
    #[getter]
    fn draft(&self) -> &str {
        self.0.draft()
    }

    #[getter]
    fn chunk_tokens(&self) -> u32 {
        self.0.chunk_tokens()
    }

    #[getter]
    fn canonical_json(&self) -> &str {
        self.0.canonical_json()
    }
}
