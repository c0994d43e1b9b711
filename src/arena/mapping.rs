use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags};

use super::alloc::ArenaOptions;

const HUGE_PAGE: usize = 2 << 20;

/// The arena can't be made.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    #[error("an arena of {size} bytes can't be: give [arena] size at least one page (4096 bytes)")]
    TooSmall { size: usize },
    #[error("can't make the arena file {}: {source}. Give [arena] path in a folder on tmpfs that is writable and has {size} bytes free", path.display())]
    File {
        path: PathBuf,
        size: usize,
        source: io::Error,
    },
    #[error("can't get {size} bytes of memory for the arena: {source}. Lower [arena] size")]
    Memory { size: usize, source: io::Error },
}

/// Memory shared with the engines: a named file on tmpfs or hugetlbfs, or an unnamed one.
pub(super) struct Mapping {
    map: MmapRaw,
    /// Removed at the end; engines that mapped it keep their mapping.
    path: Option<PathBuf>,
}

impl Mapping {
    pub fn new(options: &ArenaOptions) -> Result<Self, ArenaError> {
        if options.size < super::SLOT_ALIGN {
            return Err(ArenaError::TooSmall { size: options.size });
        }
        match &options.path {
            Some(path) => Self::named(path, options),
            None if options.huge_pages => Self::huge(options).or_else(|error| {
                tracing::warn!(
                    %error,
                    "no huge pages for the arena, going on with ordinary ones: reserve some with sysctl vm.nr_hugepages"
                );
                Self::unnamed(options, options.size, MemfdFlags::empty())
            }),
            None => Self::unnamed(options, options.size, MemfdFlags::empty()),
        }
    }

    pub fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    pub fn len(&self) -> usize {
        self.map.len()
    }

    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    fn huge(options: &ArenaOptions) -> Result<Self, ArenaError> {
        Self::unnamed(
            options,
            options.size.next_multiple_of(HUGE_PAGE),
            MemfdFlags::HUGETLB,
        )
    }

    fn unnamed(options: &ArenaOptions, size: usize, flags: MemfdFlags) -> Result<Self, ArenaError> {
        let memory = |source: io::Error| ArenaError::Memory { size, source };
        let fd = rustix::fs::memfd_create("kvgate-arena", MemfdFlags::CLOEXEC | flags)
            .map_err(|error| memory(error.into()))?;
        let file = File::from(fd);
        file.set_len(size as u64).map_err(memory)?;
        Self::map(&file, size, None, options).map_err(memory)
    }

    fn named(path: &Path, options: &ArenaOptions) -> Result<Self, ArenaError> {
        let size = options.size.next_multiple_of(if options.huge_pages {
            HUGE_PAGE
        } else {
            super::SLOT_ALIGN
        });
        let file = |source: io::Error| ArenaError::File {
            path: path.into(),
            size,
            source,
        };
        // A new file each start, never the old one cut: an engine may still have that mapped.
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(file(error)),
            _ => {}
        }
        let handle = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(file)?;
        // Reserves the memory: a full tmpfs is an error here, not a SIGBUS at the first write.
        let reserved = rustix::fs::fallocate(&handle, FallocateFlags::empty(), 0, size as u64);
        reserved
            .map_err(io::Error::from)
            .and_then(|()| Self::map(&handle, size, Some(path.into()), options))
            .map_err(|error| {
                let _ = std::fs::remove_file(path);
                file(error)
            })
    }

    fn map(file: &File, len: usize, path: Option<PathBuf>, options: &ArenaOptions) -> io::Result<Self> {
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
        Ok(Self { map, path })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}
