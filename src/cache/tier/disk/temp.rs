//! The name of a temporary file. The file goes when this is dropped, unless it was renamed.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, renameat, unlinkat};

/// The folder of files that are being written, and how their names end: nothing else in there is removed at start.
pub(super) const TEMP_FOLDER: &str = "tmp";
pub(super) const TEMP_SUFFIX: &str = ".part";

/// The name of a temporary file, which goes when this is dropped, unless it was renamed.
pub(super) struct Temp<'a> {
    root: BorrowedFd<'a>,
    name: String,
    is_kept: bool,
}

impl<'a> Temp<'a> {
    /// Before the file is made, so that it can't outlive a failure.
    pub fn new(root: BorrowedFd<'a>, number: u64) -> Self {
        Self {
            root,
            name: format!("{TEMP_FOLDER}/{number}{TEMP_SUFFIX}"),
            is_kept: false,
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives the file its name. A file that had the name is replaced.
    pub fn rename(&mut self, name: &str) -> io::Result<()> {
        renameat(self.root, &self.name, self.root, name)?;
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for Temp<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            // It need not have been made; what can't be removed now is removed at the next start.
            let _ = unlinkat(self.root, &self.name, AtFlags::empty());
        }
    }
}
