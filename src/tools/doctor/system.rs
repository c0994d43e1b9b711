//! Facts of this machine that several checks need.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, StatFs};

/// By linux/magic.h; only those that people give to kvgate.
const FILE_SYSTEMS: [(i64, &str); 14] = [
    (0x0102_1994, "tmpfs"),
    (0x9584_58f6, "hugetlbfs"),
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "zfs"),
    (0xf2f5_2010, "f2fs"),
    (0x794c_7630, "overlay"),
    (0x6969, "nfs"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "smb"),
    (0x6573_5546, "fuse"),
    (0x00c3_6400, "ceph"),
    (0x0102_1997, "9p"),
];

/// A file system as a check sees it.
pub struct FileSystem {
    pub name: String,
    pub total_bytes: u64,
    /// For this user.
    pub free_bytes: u64,
}

impl FileSystem {
    pub fn of(path: &Path) -> std::io::Result<Self> {
        let found: StatFs = rustix::fs::statfs(path)?;
        #[expect(clippy::useless_conversion, reason = "its type differs between architectures")]
        let kind = i64::from(found.f_type);
        let name = FILE_SYSTEMS.iter().find(|(magic, _)| *magic == kind);
        let block = u64::try_from(found.f_bsize).unwrap_or(0);
        Ok(Self {
            name: name.map_or_else(
                || format!("file system {kind:#x}"),
                |(_, name)| (*name).to_owned(),
            ),
            total_bytes: found.f_blocks.saturating_mul(block),
            free_bytes: found.f_bavail.saturating_mul(block),
        })
    }

    pub fn is_in_memory(&self) -> bool {
        matches!(self.name.as_str(), "tmpfs" | "hugetlbfs")
    }

    pub fn is_remote(&self) -> bool {
        matches!(self.name.as_str(), "nfs" | "cifs" | "smb" | "ceph" | "9p")
    }
}

/// The folder itself, or the nearest one above it that is there.
pub fn nearest(path: &Path) -> PathBuf {
    let there = path.ancestors().find(|path| path.exists());
    there.unwrap_or(Path::new("/")).to_owned()
}

/// Whether this user may make files there.
pub fn may_write(folder: &Path) -> bool {
    rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

/// For advice: how this user is called.
pub fn user() -> String {
    format!("user {}", rustix::process::geteuid().as_raw())
}

/// For people: about three digits.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match value.fract() < 0.05 || unit == 0 {
        true => format!("{value:.0} {}", UNITS[unit]),
        false => format!("{value:.1} {}", UNITS[unit]),
    }
}
