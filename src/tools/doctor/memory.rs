//! The arena: the room in its folder, huge pages, and the limits of memory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::FlockOperation;
use rustix::process::{Resource, getrlimit};

use super::Finding;
use super::system::{FileSystem, may_write, size, user};
use crate::arena::ArenaOptions;
use crate::config::Config;
use crate::node::daemon::arena_options;

const CHECK: &str = "arena";
const CONTAINER_SHM: u64 = 64 << 20;

pub fn check(config: &Config) -> Vec<Finding> {
    let options = arena_options(config);
    let need = needed(&options);
    let mut found = vec![folder(&options, need, &config.api.socket)];
    found.extend(huge_pages(&options, need));
    found.push(lock_limit(&options, need));
    found.extend(available(need));
    found
}

/// The slots, and a number for each page of them.
fn needed(options: &ArenaOptions) -> u64 {
    let slots = options.size as u64;
    slots + slots / 512 + 8192
}

fn folder(options: &ArenaOptions, need: u64, socket: &Path) -> Finding {
    let Some(path) = &options.path else {
        return Finding::ok(CHECK, "private memory");
    };
    let folder = path.parent().unwrap_or(Path::new("/"));
    let system = match FileSystem::of(folder) {
        Ok(system) => system,
        Err(error) => {
            let advice = "Make that folder on tmpfs, or give [arena] path in /dev/shm";
            return Finding::failed(CHECK, format!("{}: {error}", folder.display()), advice);
        }
    };
    let place = format!("{} ({})", folder.display(), system.name);
    if !may_write(folder) {
        let advice = format!(
            "Let {} write there (chown, chmod), or give another [arena] path",
            user()
        );
        return Finding::failed(CHECK, format!("{place} is not writable by {}", user()), advice);
    }
    let wanted = size(options.size as u64);
    // What an earlier start left is removed before the new one is made.
    let old = match fs::symlink_metadata(path) {
        Ok(file) if is_in_use(path) => {
            let seen = format!(
                "{} belongs to a kvgate that runs, with {}",
                path.display(),
                size(file.len())
            );
            if !nobody_listens(socket) {
                return Finding::ok(CHECK, seen);
            }
            return Finding::failed(
                CHECK,
                format!("{seen}, and nobody answers at [api] socket, {}", socket.display()),
                "Give another [arena] path, or the [api] socket of that kvgate: `kvgate serve` does not start beside it",
            );
        }
        Ok(file) => file.blocks() * 512,
        Err(_) => 0,
    };
    let room = system.free_bytes + old;
    if system.total_bytes < need {
        let seen = format!(
            "{place} has {} in all, and [arena] size is {wanted}",
            size(system.total_bytes)
        );
        let larger = size(need.next_multiple_of(1 << 30));
        let container = match system.total_bytes == CONTAINER_SHM {
            true => "That is what containers have by default. ",
            false => "",
        };
        let advice = format!(
            "{container}Docker: --shm-size={larger}; Kubernetes: mount an emptyDir with medium: Memory and sizeLimit at {0}; \
             on a host: mount -o remount,size={larger} {0}. Or lower [arena] size",
            folder.display()
        );
        return Finding::failed(CHECK, seen, advice.replace(" GiB", "g").replace(" TiB", "t"));
    }
    if room < need {
        let seen = format!("{place} has {} free, and [arena] size is {wanted}", size(room));
        let advice = format!(
            "Remove what takes the room (ls -l {}), or lower [arena] size",
            folder.display()
        );
        return Finding::failed(CHECK, seen, advice);
    }
    if !system.is_in_memory() {
        let seen =
            format!("{place} is not in memory: the kernel writes the arena to a disk while engines use it");
        return Finding::warning(
            CHECK,
            seen,
            "Give [arena] path in /dev/shm, or mount a tmpfs for it",
        );
    }
    Finding::ok(CHECK, format!("{wanted} fit in {place}, {} are free", size(room)))
}

/// Somebody who may not be asked counts as there.
fn nobody_listens(socket: &Path) -> bool {
    use std::io::ErrorKind;
    let kind = UnixStream::connect(socket).err().map(|error| error.kind());
    matches!(kind, Some(ErrorKind::NotFound | ErrorKind::ConnectionRefused))
}

/// A lock that is let go at once.
fn is_in_use(path: &Path) -> bool {
    let Ok(file) = fs::File::open(path) else {
        return false;
    };
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err()
}

fn huge_pages(options: &ArenaOptions, need: u64) -> Option<Finding> {
    const CHECK: &str = "huge_pages";
    if !options.huge_pages {
        return None;
    }
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let of = |name: &str| {
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
    };
    let folder = options.path.as_deref().and_then(Path::parent);
    let system = folder.and_then(|folder| FileSystem::of(folder).ok());
    if system.is_some_and(|system| system.name == "hugetlbfs") {
        let page = of("Hugepagesize").unwrap_or(2048) * 1024;
        let free = of("HugePages_Free").unwrap_or(0) * page;
        return Some(match free >= need {
            true => Finding::ok(CHECK, format!("{} of huge pages are free", size(free))),
            false => Finding::failed(
                CHECK,
                format!(
                    "{} of huge pages are free, and the arena needs {}",
                    size(free),
                    size(need)
                ),
                format!(
                    "sysctl vm.nr_hugepages={}, or unset [arena] huge_pages",
                    need.div_ceil(page)
                ),
            ),
        });
    }
    let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let mode = fs::read_to_string(path).unwrap_or_default();
    let in_force = mode.split(['[', ']']).nth(1).unwrap_or("not known");
    Some(match in_force {
        "advise" | "always" | "within_size" | "force" => Finding::ok(
            CHECK,
            format!("the kernel gives huge pages to tmpfs ({in_force})"),
        ),
        _ => Finding::warning(
            CHECK,
            format!("[arena] huge_pages is set, and the kernel gives tmpfs none ({in_force})"),
            format!("echo advise > {path}, or unset [arena] huge_pages"),
        ),
    })
}

fn lock_limit(options: &ArenaOptions, need: u64) -> Finding {
    const CHECK: &str = "memlock";
    let limit = getrlimit(Resource::Memlock).current;
    let pins = Path::new("/dev/nvidiactl").exists();
    let shown = limit.map_or_else(|| "unlimited".to_owned(), size);
    let is_enough = limit.is_none_or(|limit| limit >= need) || rustix::process::geteuid().is_root();
    let wants = match (options.mlock, pins) {
        (true, _) => "[arena] mlock is set",
        (false, true) => "engines pin the arena for the GPU",
        (false, false) => return Finding::ok(CHECK, format!("{shown}; nothing is locked or pinned here")),
    };
    match is_enough {
        true => Finding::ok(CHECK, format!("{shown}, and {wants}")),
        false => Finding::warning(
            CHECK,
            format!("{shown}, and {wants}: {}", size(need)),
            "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 for a container, or ulimit -l unlimited",
        ),
    }
}

/// None where all is well.
fn available(need: u64) -> Vec<Finding> {
    const CHECK: &str = "memory";
    let mut found = Vec::new();
    if let Some(limit) = cgroup_limit().filter(|&limit| limit < need) {
        let seen = format!(
            "this control group may use {}, and the arena needs {}",
            size(limit),
            size(need)
        );
        let advice =
            "Raise the memory limit of the container or unit (the arena counts there), or lower [arena] size";
        found.push(Finding::failed(CHECK, seen, advice));
    }
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let available = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    if let Some(available) = available
        .map(|kib| kib * 1024)
        .filter(|&available| available < need)
    {
        let seen = format!(
            "{} of memory are available, and the arena needs {}",
            size(available),
            size(need)
        );
        let advice = "Lower [arena] size, or end what takes the memory: else the kernel ends processes";
        found.push(Finding::warning(CHECK, seen, advice));
    }
    found
}

/// Of the innermost group that has one (version 2).
fn cgroup_limit() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let folder = Path::new("/sys/fs/cgroup").join(path.trim_start_matches('/'));
    let limits = folder
        .ancestors()
        .take_while(|folder| folder.starts_with("/sys/fs/cgroup"));
    let limits = limits.filter_map(|folder| {
        fs::read_to_string(folder.join("memory.max"))
            .ok()?
            .trim()
            .parse()
            .ok()
    });
    limits.min()
}
