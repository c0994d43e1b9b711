//! Which chunk follows which. A listing does not tell it: it is in each object's header.
//!
//! A chunk's parent never changes, for its hash is made of it. So a header is read once, and what it said may be kept for
//! ever: in memory for the next run of a daemon, in a file for the next run of a command.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::GcError;
use crate::format::ChunkHash;

/// See the [module](self). With a file, also the beginning of the removal that is under way.
#[derive(Debug, Default)]
pub struct Parents {
    known: HashMap<ChunkHash, ChunkHash, foldhash::fast::RandomState>,
    file: Option<Log>,
}

#[derive(Debug)]
struct Log {
    path: PathBuf,
    head: Head,
    out: BufWriter<File>,
}

/// The file's first line. Each other line is a chunk's hash and its parent's.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Head {
    /// Which bucket and prefix it is of.
    place: String,
    /// The server's clock when the removal under way began.
    began: Option<i64>,
}

impl Parents {
    /// With what an earlier run wrote into the file, which is made if it is missing.
    pub fn open(path: &Path, place: &str) -> Result<Self, GcError> {
        let fail = |cause| GcError::File {
            path: path.to_owned(),
            cause,
        };
        let (mut known, mut began) = (HashMap::default(), None);
        match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            file => {
                let mut lines = BufReader::new(file.map_err(fail)?).lines();
                let first = lines.next().transpose().map_err(fail)?.unwrap_or_default();
                let head: Head = serde_json::from_str(&first).map_err(|error| fail(error.into()))?;
                if head.place != place {
                    return Err(GcError::OtherPlace {
                        path: path.to_owned(),
                        found: head.place,
                        wanted: place.to_owned(),
                    });
                }
                began = head.began;
                // The last line of a run that was killed may be cut.
                for line in lines {
                    let line = line.map_err(fail)?;
                    if let Some((chunk, parent)) = line.split_once(' ')
                        && let (Ok(chunk), Ok(parent)) = (chunk.parse(), parent.parse())
                    {
                        known.insert(chunk, parent);
                    }
                }
            }
        }
        let mut parents = Self { known, file: None };
        let head = Head {
            place: place.to_owned(),
            began,
        };
        parents.file = Some(parents.rewrite(path, head).map_err(fail)?);
        Ok(parents)
    }

    /// When the removal that an earlier run did not end began.
    pub fn began(&self) -> Option<i64> {
        self.file.as_ref()?.head.began
    }

    pub fn get(&self, chunk: &ChunkHash) -> Option<ChunkHash> {
        self.known.get(chunk).copied()
    }

    pub fn add(&mut self, chunk: ChunkHash, parent: ChunkHash) -> Result<(), GcError> {
        self.known.insert(chunk, parent);
        match &mut self.file {
            None => Ok(()),
            Some(log) => writeln!(log.out, "{chunk} {parent}").map_err(|cause| log.fail(cause)),
        }
    }

    pub fn flush(&mut self) -> Result<(), GcError> {
        match &mut self.file {
            None => Ok(()),
            Some(log) => log.out.flush().map_err(|cause| log.fail(cause)),
        }
    }

    /// Forgets chunks that are not there any more, and notes when the removal under way began; None: it has ended.
    pub fn settle(
        &mut self,
        is_there: impl Fn(&ChunkHash) -> bool,
        began: Option<i64>,
    ) -> Result<(), GcError> {
        self.known.retain(|chunk, _| is_there(chunk));
        let Some(Log { path, head, .. }) = self.file.take() else {
            return Ok(());
        };
        let log = self.rewrite(&path, Head { began, ..head });
        self.file = Some(log.map_err(|cause| GcError::File { path, cause })?);
        Ok(())
    }

    fn rewrite(&self, path: &Path, head: Head) -> io::Result<Log> {
        let part = path.with_extension("part");
        let mut out = BufWriter::new(File::create(&part)?);
        writeln!(out, "{}", serde_json::to_string(&head)?)?;
        for (chunk, parent) in &self.known {
            writeln!(out, "{chunk} {parent}")?;
        }
        out.flush()?;
        std::fs::rename(&part, path)?;
        Ok(Log {
            path: path.to_owned(),
            head,
            out,
        })
    }
}

impl Log {
    fn fail(&self, cause: io::Error) -> GcError {
        GcError::File {
            path: self.path.clone(),
            cause,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u8) -> ChunkHash {
        ChunkHash([number; 32])
    }

    #[test]
    fn a_killed_run_leaves_what_it_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gc");
        let mut parents = Parents::open(&path, "a").unwrap();
        assert_eq!(parents.began(), None);
        parents.settle(|_| true, Some(7)).unwrap();
        parents.add(hash(1), hash(0)).unwrap();
        parents.add(hash(2), hash(1)).unwrap();
        parents.flush().unwrap();
        // It dies here, in the middle of a line.
        let mut text = std::fs::read_to_string(&path).unwrap();
        text.push_str("0303");
        std::fs::write(&path, text).unwrap();
        let mut parents = Parents::open(&path, "a").unwrap();
        assert_eq!((parents.began(), parents.get(&hash(2))), (Some(7), Some(hash(1))));
        assert_eq!(parents.known.len(), 2);
        parents.settle(|chunk| *chunk == hash(1), None).unwrap();
        let parents = Parents::open(&path, "a").unwrap();
        assert_eq!((parents.began(), parents.known.len()), (None, 1));
        assert!(matches!(
            Parents::open(&path, "b"),
            Err(GcError::OtherPlace { .. })
        ));
    }
}
