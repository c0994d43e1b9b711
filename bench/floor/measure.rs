//! Time and CPU of one phase of the floor.

use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::Error;

const GIB: f64 = (1_u64 << 30) as f64;
const MIB: f64 = (1_u64 << 20) as f64;

/// The work of one phase and its cost for this process, user and system. Figures of bytes are null where it moved none.
#[derive(Serialize)]
pub struct Measured {
    phase: &'static str,
    ops: u64,
    bytes: u64,
    seconds: f64,
    cpu_seconds: f64,
    cpu_seconds_per_gib: Option<f64>,
    cpu_us_per_op: f64,
    mib_per_s: f64,
    minor_faults: u64,
}

pub struct Meter {
    began: Instant,
    cpu_seconds: f64,
    faults: u64,
}

impl Meter {
    pub fn start() -> Result<Self, Error> {
        Ok(Self {
            faults: minor_faults()?,
            cpu_seconds: cpu_seconds(),
            began: Instant::now(),
        })
    }

    pub fn stop(self, phase: &'static str, ops: u64, bytes: u64) -> Result<Measured, Error> {
        let seconds = self.began.elapsed().as_secs_f64();
        let cpu_seconds = cpu_seconds() - self.cpu_seconds;
        Ok(Measured {
            phase,
            ops,
            bytes,
            seconds,
            cpu_seconds,
            cpu_seconds_per_gib: (bytes > 0).then(|| cpu_seconds / (bytes as f64 / GIB)),
            cpu_us_per_op: cpu_seconds * 1e6 / ops.max(1) as f64,
            mib_per_s: bytes as f64 / MIB / seconds,
            minor_faults: minor_faults()? - self.faults,
        })
    }
}

/// Of all threads, those that have ended too.
fn cpu_seconds() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// Field 10 of `stat`, counted after the program's name (which may hold spaces).
fn minor_faults() -> Result<u64, Error> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let field = after_name.split_whitespace().nth(7);
    Ok(field.ok_or("no minor faults in /proc/self/stat")?.parse()?)
}
