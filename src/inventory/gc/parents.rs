//! Which chunk follows which. A listing does not tell it: it is in each object's header.
//!
//! A chunk's parent never changes, for its hash is made of it. So a header is read once, and what it said may be kept for
//! ever: in memory for the next run of a daemon, in a file for the next run of a command.
//!
//! What is kept is what one object said. The same hash may be in many spaces: an engine's own hashes are the same in all
//! models and tenants, and anybody may store them there with any parent.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::GcError;
use crate::format::{ChunkHash, ChunkId, SpaceKey};

/// Of the file. The first one had chunks without their spaces.
const VERSION: u32 = 2;
/// The parent of a first chunk, and of one whose engine did not tell it.
const UNTOLD: ChunkHash = ChunkHash([0; 32]);

/// The parent of a chunk by its objects in the spaces of one model: one that is told counts more than none. `say`: what an
/// object's header says, if it is a good one. Err: this object must be read before.
pub fn parent_of(
    objects: impl Iterator<Item = ChunkId>,
    say: impl Fn(&ChunkId) -> Option<Option<ChunkHash>>,
) -> Result<Option<ChunkHash>, ChunkId> {
    let mut parent = None;
    for object in objects {
        parent = say(&object).ok_or(object)?.or(parent);
        if parent.is_some_and(|parent| parent != UNTOLD) {
            break;
        }
    }
    Ok(parent)
}

/// See the [module](self). With a file, also the beginning of the removal that is under way.
#[derive(Debug, Default)]
pub struct Parents {
    known: HashMap<ChunkId, ChunkHash, foldhash::fast::RandomState>,
    file: Option<Log>,
}

#[derive(Debug)]
struct Log {
    path: PathBuf,
    head: Head,
    out: BufWriter<File>,
}

/// The file's first line. Each other line is a chunk's space, its hash and its parent's.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Head {
    #[serde(default)]
    version: u32,
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
                let other = |error| {
                    let what =
                        "it was not written by `kvgate gc --resume`: give another file, or remove this one";
                    fail(io::Error::other(format!("{what} ({error})")))
                };
                let head: Head = serde_json::from_str(&first).map_err(other)?;
                if head.version != VERSION {
                    return Err(fail(io::Error::other(
                        "it is of another version of kvgate: give another file with --resume, or remove this one",
                    )));
                }
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
                    if let [space, chunk, parent] = line.split(' ').collect::<Vec<_>>()[..]
                        && let Some(space) = SpaceKey::from_hex(space)
                        && let (Ok(chunk), Ok(parent)) = (chunk.parse(), parent.parse())
                    {
                        known.insert((space, chunk), parent);
                    }
                }
            }
        }
        let mut parents = Self { known, file: None };
        let head = Head {
            version: VERSION,
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

    pub fn get(&self, object: &ChunkId) -> Option<ChunkHash> {
        self.known.get(object).copied()
    }

    pub fn add(&mut self, object: ChunkId, parent: ChunkHash) -> Result<(), GcError> {
        self.known.insert(object, parent);
        let (space, chunk) = object;
        match &mut self.file {
            None => Ok(()),
            Some(log) => writeln!(log.out, "{space} {chunk} {parent}").map_err(|cause| log.fail(cause)),
        }
    }

    pub fn flush(&mut self) -> Result<(), GcError> {
        match &mut self.file {
            None => Ok(()),
            Some(log) => log.out.flush().map_err(|cause| log.fail(cause)),
        }
    }

    /// Forgets objects that are not there any more, and notes when the removal under way began; None: it has ended.
    pub fn settle(&mut self, is_there: impl Fn(&ChunkId) -> bool, began: Option<i64>) -> Result<(), GcError> {
        self.known.retain(|object, _| is_there(object));
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
        for ((space, chunk), parent) in &self.known {
            writeln!(out, "{space} {chunk} {parent}")?;
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

    /// The chunk 9 in this space.
    fn object(space: u8) -> ChunkId {
        let space = SpaceKey::from_hex(&format!("{space:02x}").repeat(16)).unwrap();
        (space, hash(9))
    }

    #[test]
    fn a_killed_run_leaves_what_it_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gc");
        let mut parents = Parents::open(&path, "a").unwrap();
        assert_eq!(parents.began(), None);
        parents.settle(|_| true, Some(7)).unwrap();
        parents.add(object(1), hash(0)).unwrap();
        parents.add(object(2), hash(1)).unwrap();
        parents.flush().unwrap();
        // It dies here, in the middle of a line.
        let mut text = std::fs::read_to_string(&path).unwrap();
        text.push_str("0303");
        std::fs::write(&path, text).unwrap();
        let mut parents = Parents::open(&path, "a").unwrap();
        assert_eq!(
            (parents.began(), parents.get(&object(1)), parents.get(&object(2))),
            (Some(7), Some(hash(0)), Some(hash(1)))
        );
        assert_eq!(parents.known.len(), 2);
        parents.settle(|chunk| *chunk == object(1), None).unwrap();
        let parents = Parents::open(&path, "a").unwrap();
        assert_eq!((parents.began(), parents.known.len()), (None, 1));
        assert!(matches!(
            Parents::open(&path, "b"),
            Err(GcError::OtherPlace { .. })
        ));
    }

    #[test]
    fn a_file_without_spaces_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gc");
        let old = format!("{{\"place\":\"a\",\"began\":7}}\n{} {}\n", hash(1), hash(0));
        std::fs::write(&path, &old).unwrap();
        let error = Parents::open(&path, "a").unwrap_err().to_string();
        assert!(
            error.contains("another version") && error.contains("--resume"),
            "{error}"
        );
        assert_eq!(std::fs::read_to_string(&path).unwrap(), old, "it is left alone");
    }

    #[test]
    fn a_parent_that_is_told_counts_more_than_none() {
        // By space: what its object says.
        let said = [None, Some(UNTOLD), Some(hash(3)), Some(hash(4))];
        let say = |id: &ChunkId| {
            (0..4)
                .find(|space| object(*space) == *id)
                .map(|space| said[usize::from(space)])
        };
        let by = |spaces: &[u8]| parent_of(spaces.iter().map(|&space| object(space)), say).unwrap();
        assert_eq!(by(&[1, 2]), Some(hash(3)));
        assert_eq!(by(&[0, 3, 2]), Some(hash(4)), "the first one is damaged");
        assert_eq!(by(&[1, 0]), Some(UNTOLD));
        assert_eq!(by(&[0]), None);
        // They are read as far as that takes.
        let read = |spaces: &[u8]| {
            let is_read = |id: &ChunkId| spaces.iter().any(|space| object(*space) == *id);
            parent_of([object(1), object(2), object(3)].into_iter(), |id| {
                is_read(id).then(|| say(id)?)
            })
        };
        assert_eq!(read(&[]), Err(object(1)));
        assert_eq!(read(&[1]), Err(object(2)));
        assert_eq!(read(&[1, 2]), Ok(Some(hash(3))));
    }
}
