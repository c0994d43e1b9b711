//! Copies by PyTorch: calls `kvgate.torch_copies.TorchCopies` with addresses and strides.

use std::sync::Arc;

use kvgate::engine::copy::{Framework, FrameworkMark, FrameworkPart, FrameworkRows, Span};
use pyo3::prelude::*;

/// Python's object. Copies wait for the GIL, and torch lets it go while it copies.
pub struct TorchCopies(pub Py<PyAny>);

impl Framework for TorchCopies {
    fn mark(&self) -> Result<FrameworkMark, String> {
        attached(|py| {
            let mark = self.0.call_method0(py, "mark")?;
            Ok(Arc::new(mark) as FrameworkMark)
        })
    }

    fn load(
        &self,
        object: *const [u8],
        rows: &FrameworkRows,
        after: Option<&FrameworkMark>,
    ) -> Result<(), String> {
        self.copy("load", object, rows, after)
    }

    fn store(
        &self,
        object: *mut [u8],
        rows: &FrameworkRows,
        after: Option<&FrameworkMark>,
    ) -> Result<(), String> {
        self.copy("store", object, rows, after)
    }
}

impl TorchCopies {
    fn copy(
        &self,
        way: &str,
        object: *const [u8],
        rows: &FrameworkRows,
        after: Option<&FrameworkMark>,
    ) -> Result<(), String> {
        let address = object.cast::<u8>().expose_provenance();
        let part = |part: &FrameworkPart| {
            let in_object = (part.object, part.row, part.of_head, part.heads, part.run);
            let in_pages = (
                part.address,
                part.block_stride,
                part.token_stride,
                part.head_stride,
            );
            (in_object, in_pages)
        };
        let parts: Vec<_> = rows.parts.iter().map(part).collect();
        let span = |span: &Span| (span.token, span.tokens, span.block, span.offset);
        let spans: Vec<_> = rows.spans.iter().map(span).collect();
        let sizes = (rows.chunk_rows, rows.blocks, rows.block_tokens);
        let after = after.and_then(|mark| mark.downcast_ref::<Py<PyAny>>());
        attached(|py| {
            let arguments = (address, object.len(), parts, spans, sizes, after);
            self.0.call_method1(py, way, arguments).map(drop)
        })
    }
}

fn attached<T>(work: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, String> {
    let done = Python::try_attach(|py| work(py).map_err(|error| error.to_string()));
    done.unwrap_or_else(|| Err("Python ends".to_owned()))
}
