//! `kvgate._native`: kvgate's functions for Python, with the GIL released during every wait.

#![allow(
    clippy::needless_pass_by_value,
    clippy::too_many_arguments,
    reason = "Python's signatures"
)]

mod copier;
mod error;
mod follower;
mod gateway;
mod lookups;
mod page_lookups;
mod pages;
mod prompt;
mod runtime;
mod space;
mod torch_copies;
mod worker;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::copier::PyCopier;
    #[pymodule_export]
    use super::error::KvGateError;
    #[pymodule_export]
    use super::follower::PyFollower;
    #[pymodule_export]
    use super::gateway::{Call, Session};
    #[pymodule_export]
    use super::lookups::Lookups;
    #[pymodule_export]
    use super::page_lookups::PageLookups;
    #[pymodule_export]
    use super::pages::{Moved, Pages};
    #[pymodule_export]
    use super::prompt::Prompt;
    #[pymodule_export]
    use super::space::PySpace;
    #[pymodule_export]
    use super::worker::{Loaded, PyWorker, Stored};
    #[pymodule_export]
    use super::{main, version};

    /// A bug of the extension. It is no `Exception`, so Python has to name it to catch it.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add(
            "PanicException",
            module.py().get_type::<pyo3::panic::PanicException>(),
        )
    }
}

#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// The command line of the binary. Returns its exit status.
#[pyfunction]
fn main(py: Python<'_>, arguments: Vec<String>) -> u8 {
    py.detach(|| kvgate::tools::cli::main_of(std::iter::once("kvgate".to_owned()).chain(arguments)))
}
