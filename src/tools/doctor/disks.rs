//! A folder of `[disk] paths`: whose it is, its file system, its room, and whether direct I/O works there.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use super::Finding;
use super::system::{FileSystem, may_write, nearest, size, user};
use crate::config::Disk;

const CHECK: &str = "disk";
/// A file system with less has no room for a chunk.
const FULL: u64 = 64 << 20;
const BLOCK: usize = 4096;

#[repr(C, align(4096))]
struct Block([u8; BLOCK]);

pub fn check(path: &Path, disk: &Disk) -> Vec<Finding> {
    let shown = path.display();
    let folder = nearest(path);
    let is_there = folder == path;
    if is_there && !path.is_dir() {
        let advice = "Give a folder in [disk] paths";
        return vec![Finding::failed(CHECK, format!("{shown} is no folder"), advice)];
    }
    if !may_write(&folder) {
        let seen = format!("{} is not writable by {}", folder.display(), user());
        let advice = format!("Make {shown} and give it to the user that runs kvgate (mkdir, chown)");
        return vec![Finding::failed(CHECK, seen, advice)];
    }
    let mut found = Vec::new();
    found.extend(owner(path));
    match FileSystem::of(&folder) {
        Err(error) => {
            let advice = "Look at the disk (dmesg, smartctl), and whether it is mounted";
            found.push(Finding::failed(CHECK, format!("{shown}: {error}"), advice));
        }
        Ok(system) => {
            let place = match is_there {
                true => format!("{shown} ({})", system.name),
                false => format!("{shown}, not made yet, in {} ({})", folder.display(), system.name),
            };
            found.push(room(&place, &system, disk, path.join("kvgate.lock").exists()));
            found.extend(kind(&place, &system));
            found.push(direct(&place, &folder));
        }
    }
    found
}

/// Another user could put any KV there.
fn owner(path: &Path) -> Option<Finding> {
    let of = fs::metadata(path).ok()?;
    let others_write = of.mode() & 0o022 != 0;
    let is_ours = of.uid() == rustix::process::geteuid().as_raw() || of.uid() == 0;
    let seen = format!("other users may write to {}", path.display());
    let advice = format!(
        "chown it to the user that runs kvgate, and chmod go-w {}",
        path.display()
    );
    (others_write || !is_ours).then(|| Finding::warning(CHECK, seen, advice))
}

fn room(place: &str, system: &FileSystem, disk: &Disk, used_before: bool) -> Finding {
    let (free, wanted) = (system.free_bytes, disk.size.bytes());
    if free < FULL.min(wanted) {
        let seen = format!(
            "{place} is full: {} of {} are free",
            size(free),
            size(system.total_bytes)
        );
        let advice = "Remove what takes the room (du -xh --max-depth=1), give another folder, or lower [disk] size below what is left";
        return Finding::failed(CHECK, seen, advice);
    }
    if system.total_bytes < wanted || (free < wanted && !used_before) {
        let seen = format!(
            "{place} has {} free, and [disk] size is {}",
            size(free),
            disk.size
        );
        let advice = "Lower [disk] size: a full file system fails writes that the tier counts on";
        return Finding::warning(CHECK, seen, advice);
    }
    Finding::ok(
        CHECK,
        format!("{place}: {} are free, [disk] size is {}", size(free), disk.size),
    )
}

fn kind(place: &str, system: &FileSystem) -> Option<Finding> {
    if system.is_in_memory() {
        let advice = "Give a folder on a local disk: this one takes memory, and is empty after a restart";
        return Some(Finding::warning(CHECK, format!("{place} is in memory"), advice));
    }
    let advice = "Give a folder on a local disk with ext4 or xfs: S3 is the tier that nodes share";
    system
        .is_remote()
        .then(|| Finding::warning(CHECK, format!("{place} is on the network"), advice))
}

/// By a file without a name, so that nothing stays.
fn direct(place: &str, folder: &Path) -> Finding {
    const CHECK: &str = "direct_io";
    let block = Box::new(Block([0x5a; BLOCK]));
    let write = |flags: OFlags| -> io::Result<()> {
        let flags = flags | OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(open(folder, flags, Mode::RUSR | Mode::WUSR)?);
        let mut back = Box::new(Block([0; BLOCK]));
        file.write_all_at(&block.0, 0)?;
        file.read_exact_at(&mut back.0, 0)?;
        match back.0 == block.0 {
            true => Ok(()),
            false => Err(io::Error::other("other bytes were read than were written")),
        }
    };
    let error = match write(OFlags::DIRECT) {
        Ok(()) => return Finding::ok(CHECK, format!("{place}: direct I/O works")),
        Err(error) => error,
    };
    match Errno::from_io_error(&error) {
        Some(Errno::NOSPC | Errno::DQUOT) => {
            let advice = "Make room there: nothing can be written";
            Finding::failed(CHECK, format!("{place}: {error}"), advice)
        }
        Some(Errno::INVAL | Errno::OPNOTSUPP) if write(OFlags::empty()).is_ok() => Finding::warning(
            CHECK,
            format!("{place}: no direct I/O, so chunks go through the page cache"),
            "Use ext4 or xfs on a local disk",
        ),
        Some(Errno::OPNOTSUPP | Errno::ISDIR) => {
            Finding::not_checked(CHECK, &format!("{place} has no files without a name"))
        }
        _ => Finding::failed(
            CHECK,
            format!("{place}: {error}"),
            "Look at the disk (dmesg, smartctl)",
        ),
    }
}
