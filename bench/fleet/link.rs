//! A gateway's connections to one RGW, as `src/s3/net/pool.rs` keeps them: the one used last is taken first.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::rgw::{Fault, Mood, ROUND_TRIP, Rgw, lock, pass_until};

/// As `[s3] idle_timeout`.
pub const IDLE: Duration = Duration::from_secs(50);

pub struct Link {
    pub rgw: Arc<Rgw>,
    idle: Mutex<Vec<(Connection, Instant)>>,
}

/// An open connection, until this is dropped.
pub struct Connection {
    rgw: Arc<Rgw>,
    deaths: u64,
}

impl Link {
    pub fn new(rgw: Arc<Rgw>) -> Self {
        let idle = Mutex::default();
        Self { rgw, idle }
    }

    /// A kept connection that is still good, or a new one.
    pub async fn connection(&self) -> Result<Connection, Fault> {
        while let Some((kept, since)) = lock(&self.idle).pop() {
            if since.elapsed() < IDLE && kept.deaths == self.rgw.deaths() {
                return Ok(kept);
            }
        }
        pass_until(Instant::now() + ROUND_TRIP).await;
        if self.rgw.mood() == Mood::Dead {
            return Err(Fault::Unreached);
        }
        self.rgw.opened();
        Ok(Connection {
            rgw: Arc::clone(&self.rgw),
            deaths: self.rgw.deaths(),
        })
    }

    pub fn keep(&self, connection: Connection) {
        lock(&self.idle).push((connection, Instant::now()));
    }

    /// Closes connections that were idle for too long.
    pub fn sweep(&self) {
        let mut idle = lock(&self.idle);
        let old = idle.partition_point(|(_, since)| since.elapsed() >= IDLE);
        idle.drain(..old);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.rgw.closed();
    }
}
