//! The file behind the arena and its mapping: tmpfs, hugetlbfs or a memfd. A lock on the file keeps two processes from
//! using it.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, OFlags};

use super::alloc::ArenaOptions;

const HUGE_PAGE: usize = 2 << 20;
/// File systems in memory, by linux/magic.h.
const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;

/// The arena can't be made.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    #[error("an arena of {size} bytes is impossible: give [arena] size at least one page (4096 bytes)")]
    TooSmall { size: usize },
    #[error("can't make the arena file {}: {source}. Give [arena] path in a folder on tmpfs that is writable and has {size} bytes free", path.display())]
    File {
        path: PathBuf,
        size: usize,
        source: io::Error,
    },
    #[error("the arena file {} belongs to a kvgate that runs: give another [arena] path, or stop that one", path.display())]
    InUse { path: PathBuf },
    #[error("can't get {size} bytes of memory for the arena: {source}. Lower [arena] size")]
    Memory { size: usize, source: io::Error },
}

/// Memory shared with the engines: a named file on tmpfs or hugetlbfs, or an unnamed one.
pub(super) struct Mapping {
    map: MmapRaw,
    named: Option<Named>,
}

/// The arena's file, locked for as long as this process uses it; engines that mapped it keep their mapping after it.
struct Named {
    path: PathBuf,
    file: File,
}

impl Mapping {
    /// At least `size` bytes.
    pub fn new(options: &ArenaOptions, size: usize) -> Result<Self, ArenaError> {
        match &options.path {
            Some(path) => Self::named(path, options, size),
            None if options.huge_pages => Self::huge(options, size).or_else(|error| {
                tracing::warn!(
                    %error,
                    "no huge pages for the arena, going on with ordinary ones: reserve some with sysctl vm.nr_hugepages"
                );
                Self::unnamed(options, size, MemfdFlags::empty())
            }),
            None => Self::unnamed(options, size, MemfdFlags::empty()),
        }
    }

    pub fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    pub fn len(&self) -> usize {
        self.map.len()
    }

    pub fn path(&self) -> Option<&Path> {
        self.named.as_ref().map(|named| named.path.as_path())
    }

    /// Removes the file; who has it mapped keeps it.
    pub fn unlink(&self) {
        if let Some(named) = &self.named {
            named.unlink();
        }
    }

    fn huge(options: &ArenaOptions, size: usize) -> Result<Self, ArenaError> {
        Self::unnamed(options, size.next_multiple_of(HUGE_PAGE), MemfdFlags::HUGETLB)
    }

    fn unnamed(options: &ArenaOptions, size: usize, flags: MemfdFlags) -> Result<Self, ArenaError> {
        let memory = |source: io::Error| ArenaError::Memory { size, source };
        let fd = rustix::fs::memfd_create("kvgate-arena", MemfdFlags::CLOEXEC | flags)
            .map_err(|error| memory(error.into()))?;
        let file = File::from(fd);
        file.set_len(size as u64).map_err(memory)?;
        let map = Self::map(&file, size, options).map_err(memory)?;
        Ok(Self { map, named: None })
    }

    fn named(path: &Path, options: &ArenaOptions, size: usize) -> Result<Self, ArenaError> {
        let size = match options.huge_pages {
            true => size.next_multiple_of(HUGE_PAGE),
            false => size,
        };
        let file = |source: io::Error| ArenaError::File {
            path: path.into(),
            size,
            source,
        };
        // A new file each start, never the old one cut: an engine may still have that mapped. One that is locked
        // belongs to a gateway that runs.
        match open_old(path) {
            Ok(old) => {
                lock(&old).map_err(|_| ArenaError::InUse { path: path.into() })?;
                std::fs::remove_file(path).map_err(file)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(file(error)),
        }
        let handle = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(file)?;
        lock(&handle).map_err(file)?;
        if !is_in_memory(&handle) {
            tracing::warn!(
                path = %path.display(),
                "the arena is not on tmpfs, so the kernel writes it to a disk: give [arena] path in /dev/shm"
            );
        }
        if options.mode != 0 {
            // Not by `open`, which the umask would cut.
            let mode = Permissions::from_mode(options.mode);
            handle.set_permissions(mode).map_err(file)?;
        }
        // Reserves the memory: a full tmpfs is an error here, not a SIGBUS at the first write.
        let reserved = rustix::fs::fallocate(&handle, FallocateFlags::empty(), 0, size as u64);
        let map = reserved
            .map_err(io::Error::from)
            .and_then(|()| Self::map(&handle, size, options));
        let named = Named {
            path: path.into(),
            file: handle,
        };
        // From here on the file is removed whatever happens.
        Ok(Self {
            map: map.map_err(file)?,
            named: Some(named),
        })
    }

    fn map(file: &File, len: usize, options: &ArenaOptions) -> io::Result<MmapRaw> {
        let mut map_options = MmapOptions::new();
        map_options.len(len);
        if options.prefault {
            map_options.populate();
        }
        let map = map_options.map_raw(file)?;
        if options.huge_pages {
            // On tmpfs this needs /sys/kernel/mm/transparent_hugepage/shmem_enabled; elsewhere it does nothing.
            let _ = map.advise(Advice::HugePage);
        }
        if options.mlock
            && let Err(error) = map.lock()
        {
            tracing::warn!(%error, "can't lock the arena in memory, going on unlocked: raise ulimit -l (LimitMEMLOCK)");
        }
        Ok(map)
    }
}

/// True where the file system can't be asked.
pub(super) fn is_in_memory(file: &File) -> bool {
    match rustix::fs::fstatfs(file) {
        Ok(system) => [TMPFS, HUGETLBFS].contains(&system.f_type),
        Err(_) => true,
    }
}

fn lock(file: &File) -> io::Result<()> {
    Ok(rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

impl Named {
    fn unlink(&self) {
        // Only the file that is ours, should another have taken its place.
        let ours = self.file.metadata().map(|ours| (ours.dev(), ours.ino())).ok();
        let there = std::fs::metadata(&self.path)
            .map(|there| (there.dev(), there.ino()))
            .ok();
        if ours.is_some() && ours == there {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// The file of an earlier start. A FIFO would never be open, and a link may lead to a file that is not ours.
fn open_old(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let old = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    match old.metadata()?.is_file() {
        true => Ok(old),
        false => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "there is something that is no file",
        )),
    }
}
