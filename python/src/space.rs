use pyo3::prelude::*;

use crate::error::failed;

#[pyclass(frozen, module = "kvgate._native")]
pub struct Space(pub kvgate::format::Space);

#[pymethods]
impl Space {
    #[new]
    fn new(json: &str) -> PyResult<Self> {
        kvgate::format::Space::from_json(json).map(Self).map_err(failed)
    }

    #[getter]
    fn id(&self) -> String {
        self.0.id().to_string()
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
