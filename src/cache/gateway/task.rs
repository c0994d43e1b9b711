//! A tokio task that ends when its handle is dropped, and is a part of the load that started it.

use std::future::Future;

use tokio::task::JoinHandle;

use crate::metrics::trace;

/// The handle of a task that ends with it.
pub struct Task<T>(JoinHandle<T>);

impl<T: Send + 'static> Task<T> {
    pub fn spawn(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self(tokio::spawn(trace::carry(future)))
    }

    /// Waits for the result; None if the task panicked or was ended.
    pub async fn join(&mut self) -> Option<T> {
        (&mut self.0).await.ok()
    }
}

impl<T> Task<T> {
    pub fn end(&self) {
        self.0.abort();
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.end();
    }
}
