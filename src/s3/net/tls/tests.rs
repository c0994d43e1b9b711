//! Tests of TLS against rustls's buffered API, by subject.

mod handshake;
mod hostile;
mod idle;
mod server;
mod streaming;
