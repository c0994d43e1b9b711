mod handshake;
mod hostile;
mod idle;
mod server;
mod streaming;
