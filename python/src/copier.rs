//! Copies between the bytes of an object and an engine's pages, for checks; and the copiers that a worker has.

use std::sync::Arc;

use kvgate::config::{self, Copies};
use kvgate::engine::copy::cuda::{CudaError, Gpu, Lanes, StreamMark};
use kvgate::engine::copy::{
    Copier as AnyCopier, CopyError, CopyJob, CpuCopier, CpuOptions, CudaCopier, CudaOptions, EngineStream,
    PagedCache, SlotMapping, Tensor,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::Deserialize;

use crate::error::failed;
use crate::space::Space;

/// The pages to copy from and to.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    tensors: Vec<Tensor>,
    /// CUDA's number of the GPU that the tensors are on; None: host memory.
    device: Option<usize>,
}

/// Copies between objects in Python's memory and pages: for checks. A worker's chunks never come through Python.
#[pyclass(frozen, module = "kvgate._native")]
pub struct Copier(AnyCopier);

#[pymethods]
impl Copier {
    #[new]
    fn new(settings: &str, space: &Space) -> PyResult<Self> {
        let settings: Settings = serde_json::from_str(settings).map_err(failed)?;
        let cache = PagedCache::new(&space.0, &settings.tensors).map_err(failed)?;
        let options = copy_options()?;
        let lanes = lanes(settings.device, &options).map_err(failed)?;
        let copier = copier(lanes.as_deref(), cache, &options);
        Ok(Self(copier.map_err(failed)?))
    }

    #[pyo3(signature = (payload, slots, stream=None))]
    fn load(&self, py: Python<'_>, payload: Vec<u8>, slots: Vec<i64>, stream: Option<u64>) -> PyResult<()> {
        let job = self.job(&slots)?;
        py.detach(|| {
            let after = self.mark(stream)?;
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
            let after = self.mark(stream)?;
            let pending = self.0.store(payload, &job, after.as_ref())?;
            pending.wait()
        });
        Ok(PyBytes::new(py, &stored.map_err(failed)?))
    }
}

impl Copier {
    fn mark(&self, stream: Option<u64>) -> Result<Option<StreamMark>, CopyError> {
        let marked = stream.map(|stream| self.0.mark(EngineStream(stream)));
        Ok(marked.transpose()?.flatten())
    }

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

/// The copy options of `KVGATE__COPY__...`.
pub fn copy_options() -> PyResult<Copies> {
    let loaded = config::load(None, config::process_env(), &[]);
    Ok(loaded.map_err(failed)?.config.copy)
}

/// The GPU's lanes for the copiers of one worker; None: the tensors are in host memory.
pub fn lanes(device: Option<usize>, options: &Copies) -> Result<Option<Arc<Lanes>>, CudaError> {
    let gpu = device.map(Gpu::open).transpose()?;
    Ok(gpu.map(|gpu| Lanes::new(&gpu, CudaOptions::from(options))))
}

pub fn copier(lanes: Option<&Lanes>, cache: PagedCache, options: &Copies) -> Result<AnyCopier, CopyError> {
    // SAFETY: the engine keeps the tensors until it has closed the worker, and names the tokens to copy.
    unsafe {
        match lanes {
            None => Ok(AnyCopier::Cpu(CpuCopier::new(cache, CpuOptions::from(options)))),
            Some(lanes) => {
                let copier = CudaCopier::on(lanes, cache)?;
                Ok(AnyCopier::Cuda(Box::new(copier)))
            }
        }
    }
}
