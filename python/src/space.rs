//! A space, as Python gives it: JSON.

use kvgate::format::{Kind, PageNames, Space, TenantSecret};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::failed;

#[pyclass(frozen, name = "Space", module = "kvgate._native")]
pub struct PySpace(pub Space, Option<TenantSecret>);

#[pymethods]
impl PySpace {
    #[new]
    #[pyo3(signature = (json, secret=None))]
    fn new(json: &str, secret: Option<&[u8]>) -> PyResult<Self> {
        let space = Space::from_json(json).map_err(failed)?;
        Ok(Self(space, secret_of(secret)?))
    }

    /// Another space of the same tenant.
    fn another(&self, json: &str) -> PyResult<Self> {
        let space = Space::from_json(json).map_err(failed)?;
        Ok(Self(space, self.1.clone()))
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

impl PySpace {
    /// The secret of its tenant, where it was given one.
    pub fn secret(&self) -> Option<&TenantSecret> {
        self.1.as_ref()
    }

    /// How it names the hashes of an engine's pages.
    pub fn names(&self) -> PageNames {
        PageNames::new(&self.0, self.secret())
    }
}

pub fn secret_of(bytes: Option<&[u8]>) -> PyResult<Option<TenantSecret>> {
    let secret = bytes.map(<[u8; 32]>::try_from).transpose();
    let secret = secret.map_err(|_| failed("a tenant's secret has 32 bytes"))?;
    Ok(secret.map(TenantSecret::new))
}
