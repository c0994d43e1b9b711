//! The process's own cost: CPU time and page faults; and the memory that is available.

use rustix::time::{ClockId, clock_gettime};

/// The resources that this process has used since its start, all threads together.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Usage {
    /// User and system time.
    pub cpu_seconds: f64,
    /// Pages that were mapped without reading a disk; 0 where the system does not tell.
    pub minor_faults: u64,
}

impl Usage {
    pub fn now() -> Self {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        Self {
            cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
            minor_faults: minor_faults().unwrap_or(0),
        }
    }

    pub fn since(self, earlier: Self) -> Self {
        Self {
            cpu_seconds: self.cpu_seconds - earlier.cpu_seconds,
            minor_faults: self.minor_faults.saturating_sub(earlier.minor_faults),
        }
    }
}

/// `PID (NAME) STATE PPID PGRP SESSION TTY TPGID FLAGS MINFLT ...`, where the name may have anything in it.
fn minor_faults() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let after_name = stat.rsplit_once(')')?.1;
    after_name.split_ascii_whitespace().nth(7)?.parse().ok()
}

/// Memory that is available without swapping.
pub(super) fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_shows() {
        let before = Usage::now();
        let pages = vec![1_u8; 64 << 20];
        assert!(pages.iter().map(|&byte| u64::from(byte)).sum::<u64>() > 0);
        let used = Usage::now().since(before);
        assert!(used.cpu_seconds > 0.0 && used.minor_faults > 0, "{used:?}");
        assert!(memory_available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
