//! The disk tier: objects as files on one or more local disks, straight between file and slot.
//!
//! A disk is a folder: `{space}/{chunk hash}` for each object, `{space}/space.json` beside them, `tmp/` for what is being
//! written, `kvgate.lock` against a second kvgate. The files are the index: at start it is read from their names, lengths
//! and times (`scan.rs`), and there is no journal that could disagree with them.
//!
//! - **A file under its name is whole.** An object is written to a temporary file and renamed. A kill leaves a
//!   whole file, or a temporary one that the next start removes.
//! - **Objects are synced only where this is the last tier.** Else, after a power loss, a file may have its length and not its
//!   bytes. Its reader verifies header and digests before a byte is used, and has it removed. `space.json` is synced, once
//!   for each space.
//! - **A chunk that the tier below does not have is dirty.** The mode of its file says so, from the moment the file has its
//!   name. It is never evicted, and a start tells the dirty ones (`take_backlog`), so that they are sent. The index
//!   remembers it while its disk is out. It waits for its space where `space.json` is missing. A dirty file that can't be
//!   read is moved to `lost/`.
//! - **A declined chunk is one that the tier below lacks and need not get.** The mode of its file says so as well, for a start
//!   that is to send these after all. It is evicted like any other.
//! - **The index is right.** Its entry comes after the file's rename, and goes before the file's unlink. All that an
//!   operation holds (the room, the name, the file that must go) is given back by dropping it, so a dropped future or a
//!   panic leaves nothing behind.
//! - **A disk fails alone.** After some failures in a row, or one operation that does not end, it is taken out: nothing of
//!   it is there any more, and the other disks go on. It is tried again after a pause, and used when all that is there was
//!   read. A full file system is no failure: some objects are evicted, and this one is not stored.
//!
//! Where things are: `handle.rs` is what callers see, `shared.rs` what of it may block; `index/` knows what is where and
//! who goes next, without I/O; `folder.rs` does everything to files, `direct.rs` the transfer itself.
//!
//! Not for: verifying (the reader does), deciding what is worth keeping, and more than one process at a folder.

mod direct;
mod error;
mod fault;
mod folder;
mod handle;
mod index;
mod open;
mod options;
mod passed_over;
mod scan;
mod shared;
mod space_folder;
mod stats;
mod temp;

pub use error::DiskError;
pub use handle::{Below, Disk, Wrote};
pub use options::DiskOptions;
pub use stats::{Backlog, DiskState, DiskStats, PathStats, Unsent};

#[cfg(test)]
mod tests;
