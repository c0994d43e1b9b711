//! Tests of TLS against a server by rustls, by subject.

mod handshake;
mod hostile;
mod idle;
mod server;
mod streaming;
