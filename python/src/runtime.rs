//! The runtime that waits for the gateway, one a process.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::PyResult;
use tokio::runtime::{Builder, Runtime};

use crate::error::failed;

/// Threads that wait for the gateway; copies have threads of their own.
const THREADS: usize = 2;

/// This process's runtime. Made at first use, and anew in a child: engines fork, and threads don't survive that.
pub fn runtime() -> PyResult<Arc<Runtime>> {
    static RUNTIME: Mutex<Option<(u32, Arc<Runtime>)>> = Mutex::new(None);
    let mut slot = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((of, runtime)) = &*slot
        && *of == process
    {
        return Ok(Arc::clone(runtime));
    }
    let runtime = Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("kvgate")
        .enable_all()
        .build();
    let runtime = Arc::new(runtime.map_err(failed)?);
    // The parent's runtime has no threads in this process that could be ended.
    std::mem::forget(slot.replace((process, Arc::clone(&runtime))));
    Ok(runtime)
}
