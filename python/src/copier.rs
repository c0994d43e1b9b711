//! Copies between the bytes of an object and an engine's pages, for checks; and the copiers that a worker has.

use std::ffi::CString;
use std::sync::Arc;

use kvgate::config::{self, Copies};
use kvgate::engine::copy::cuda::{Gpu, Lanes};
use kvgate::engine::copy::{
    Copier, CopyError, CopyJob, CpuCopier, CpuOptions, CudaCopier, CudaOptions, EngineStream, Framework,
    FrameworkCopier, PagedCache, SlotMapping, Tensor,
};
use pyo3::exceptions::PyFutureWarning;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::Deserialize;

use crate::error::failed;
use crate::space::PySpace;
use crate::torch_copies::TorchCopies;

/// The pages to copy from and to.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    tensors: Vec<Tensor>,
    /// CUDA's number of the GPU that the tensors are on; None: host memory.
    device: Option<usize>,
}

/// Copies between objects in Python's memory and pages: for checks. A worker's chunks never come through Python.
#[pyclass(frozen, name = "Copier", module = "kvgate._native")]
pub struct PyCopier(Copier);

#[pymethods]
impl PyCopier {
    #[new]
    #[pyo3(signature = (settings, space, copies=None))]
    fn new(settings: &str, space: &PySpace, copies: Option<Py<PyAny>>) -> PyResult<Self> {
        let settings: Settings = serde_json::from_str(settings).map_err(failed)?;
        let cache = PagedCache::new(&space.0, &settings.tensors).map_err(failed)?;
        let copier = Copiers::new(settings.device, copies)?.make(cache);
        Ok(Self(copier.map_err(failed)?))
    }

    #[pyo3(signature = (payload, slots, stream=None))]
    fn load(&self, py: Python<'_>, payload: Vec<u8>, slots: Vec<i64>, stream: Option<u64>) -> PyResult<()> {
        let job = self.job(&slots)?;
        py.detach(|| {
            let after = self.0.mark(stream.map(EngineStream))?;
            let pending = self.0.load(payload, &job, after.as_ref())?;
            pending.wait().map(drop)
        })
        .map_err(failed)
    }

    #[pyo3(signature = (slots, stream=None))]
    fn store<'py>(
        &self,
        py: Python<'py>,
        slots: Vec<i64>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let job = self.job(&slots)?;
        let payload = vec![0; self.0.cache().space().layout().payload_len()];
        let stored = py.detach(|| {
            let after = self.0.mark(stream.map(EngineStream))?;
            let pending = self.0.store(payload, &job, after.as_ref())?;
            pending.wait()
        });
        Ok(PyBytes::new(py, &stored.map_err(failed)?))
    }
}

impl PyCopier {
    fn job(&self, slots: &[i64]) -> PyResult<CopyJob> {
        let (cache, space) = (self.0.cache(), self.0.cache().space());
        let spans = cache.spans(SlotMapping::Slots(slots), 0..space.chunk_rows());
        Ok(CopyJob {
            planes: 0..space.planes().len(),
            spans: spans.map_err(failed)?,
            at: space.layout().header_len(),
        })
    }
}

/// Makes the copiers of one worker, for its device.
pub struct Copiers {
    options: Copies,
    by: By,
}

/// What copies.
enum By {
    Cpu,
    Gpu(Arc<Lanes>),
    Framework(Arc<dyn Framework>),
}

impl Copiers {
    /// `device`: CUDA's number of the GPU that the tensors are on. `copies`: a framework's, in place of kvgate's own.
    /// Neither: the tensors are in host memory.
    pub fn new(device: Option<usize>, copies: Option<Py<PyAny>>) -> PyResult<Self> {
        let options = copy_options()?;
        let by = match (copies, device) {
            (Some(copies), _) => By::Framework(Arc::new(TorchCopies(copies))),
            (None, None) => By::Cpu,
            (None, Some(device)) => {
                let gpu = Gpu::open(device).map_err(failed)?;
                By::Gpu(Lanes::new(&gpu, CudaOptions::from(&options)))
            }
        };
        Ok(Self { options, by })
    }

    pub fn make(&self, cache: PagedCache) -> Result<Copier, CopyError> {
        // SAFETY: the engine keeps the tensors until it has closed the worker, or its call has ended, and names the tokens to
        // copy.
        unsafe {
            match &self.by {
                By::Cpu => Ok(Copier::Cpu(CpuCopier::new(
                    cache,
                    CpuOptions::from(&self.options),
                ))),
                By::Gpu(lanes) => Ok(Copier::Cuda(Box::new(CudaCopier::on(lanes, cache)?))),
                By::Framework(framework) => Ok(Copier::Framework(FrameworkCopier::new(
                    cache,
                    Arc::clone(framework),
                ))),
            }
        }
    }
}

/// The copy options of `KVGATE__COPY__...`. Old names of keys are told as Python's warnings.
fn copy_options() -> PyResult<Copies> {
    let loaded = config::load(None, config::process_env(), &[]).map_err(failed)?;
    Python::attach(|py| {
        let kind = py.get_type::<PyFutureWarning>();
        loaded.warnings.iter().try_for_each(|warning| {
            let text = CString::new(format!("kvgate: {warning}")).unwrap_or_default();
            PyErr::warn(py, &kind, &text, 1)
        })
    })?;
    Ok(loaded.config.copy)
}
