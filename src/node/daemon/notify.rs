//! Messages to systemd, if it is there (`sd_notify(3)`).

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The socket that systemd names in the environment; without one, messages go nowhere.
pub struct Notify(Option<(UnixDatagram, SocketAddr)>);

impl Notify {
    pub fn from_env() -> Self {
        let address = std::env::var_os("NOTIFY_SOCKET").and_then(|name| match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name).ok(),
            _ => SocketAddr::from_pathname(&name).ok(),
        });
        let socket = UnixDatagram::unbound().ok();
        Self(socket.zip(address))
    }

    pub fn tell(&self, state: &str) {
        if let Some((socket, address)) = &self.0 {
            // systemd is gone, or does not listen: there is nothing to do.
            let _ = socket.send_to_addr(state.as_bytes(), address);
        }
    }

    /// How often to tell the watchdog: twice as often as it requires.
    pub fn watchdog() -> Option<Duration> {
        let us = std::env::var("WATCHDOG_USEC").ok()?.parse().ok()?;
        let ours = std::env::var("WATCHDOG_PID").map_or(true, |pid| pid == std::process::id().to_string());
        ours.then(|| Duration::from_micros(us) / 2)
    }
}
