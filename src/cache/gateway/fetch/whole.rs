//! A whole chunk from S3: all of its sections, verified together.

use std::sync::Arc;

use super::{ChunkFetch, Part};
use crate::arena::SlotMut;
use crate::cache::gateway::bucket::{TurnPosition, Waiting};
use crate::cache::gateway::chunk::LoadedChunk;
use crate::cache::gateway::miss::Miss;
use crate::cache::gateway::task::Task;
use crate::format::{PlaneCheck, Section};
use crate::s3::object::{ErrorKind, ObjectError, Version};

/// A chunk's sections. Those that can be asked for now are queued: all if a lookup told the version, else only the
/// first, which tells it.
pub struct WholeFetch {
    wanted: Arc<ChunkFetch>,
    parts: Vec<Part>,
    etag: Option<Arc<str>>,
    line: Vec<Waiting>,
}

impl WholeFetch {
    pub fn new(
        wanted: Arc<ChunkFetch>,
        slot: SlotMut,
        sections: &[Section],
        place: impl Fn(usize) -> TurnPosition,
    ) -> Self {
        let parts = wanted.cut(slot, sections, place);
        let etag = wanted.known_etag();
        let ready = if etag.is_some() { parts.len() } else { 1 };
        let line = parts[..ready].iter().map(|part| wanted.wait(part)).collect();
        Self {
            wanted,
            parts,
            etag,
            line,
        }
    }

    /// Fetches and verifies the whole chunk, and remembers what the outcome says of its existence.
    pub async fn fetch(self) -> Result<LoadedChunk, Miss> {
        let wanted = Arc::clone(&self.wanted);
        let landed = self.land().await;
        let (mut parts, version) = landed.map_err(|error| wanted.missed(error))?;
        let head = wanted.head(&mut parts[0], version).await?;
        for part in &mut parts {
            wanted.check(part, &head).await?;
        }
        let key = match &head.check {
            PlaneCheck::Open(cipher) => Some(cipher.key_id()),
            PlaneCheck::Digest(_) => None,
        };
        if key.is_some() {
            wanted.write_plain_header(&mut parts, &head.header);
        }
        wanted.present(&head);
        let (chunk, _) = wanted.loaded(parts);
        wanted.keep(&chunk, key);
        Ok(chunk)
    }

    /// Gets all sections of the object, of one version.
    async fn land(self) -> Result<(Vec<Part>, Version), ObjectError> {
        let Self {
            wanted,
            mut parts,
            etag,
            mut line,
        } = self;
        if let Some(etag) = etag {
            let (back, versions) = get_all(&wanted, parts, line, &etag).await;
            match versions {
                Ok(mut versions) => return Ok((back, versions.swap_remove(0))),
                // Stored anew since the lookup.
                Err(error) if error.kind == ErrorKind::Changed => {}
                Err(error) => return Err(error),
            }
            parts = back;
            line = vec![wanted.wait(&parts[0])];
        }
        let rest = parts.split_off(1);
        let got = wanted
            .get(&mut parts[0], None, wanted.guess(), line.remove(0))
            .await;
        let (version, turn) = got?;
        let line = rest.iter().map(|part| wanted.wait(part)).collect();
        // Only once the rest is queued, or a later chunk would slip in between.
        drop(turn);
        let (rest, same) = get_all(&wanted, rest, line, &version.etag).await;
        same?;
        parts.extend(rest);
        Ok((parts, version))
    }
}

/// Gets some ranges at once, each in a task of its own: digests are computed where bytes arrive, on as many cores
/// as there are. Waits for the end of each, since only then are their parts of the slot ours again.
async fn get_all(
    wanted: &Arc<ChunkFetch>,
    parts: Vec<Part>,
    line: Vec<Waiting>,
    etag: &Arc<str>,
) -> (Vec<Part>, Result<Vec<Version>, ObjectError>) {
    let get = |(mut part, waiting): (Part, Waiting)| {
        let (wanted, etag) = (Arc::clone(wanted), Arc::clone(etag));
        Task::spawn(async move {
            let got = wanted.get(&mut part, Some(&etag), wanted.guess(), waiting).await;
            (part, got.map(|(version, _turn)| version))
        })
    };
    let gets: Vec<_> = parts.into_iter().zip(line).map(get).collect();
    let mut parts = Vec::with_capacity(gets.len());
    let mut versions: Result<_, ObjectError> = Ok(Vec::with_capacity(gets.len()));
    for mut get in gets {
        let got = match get.join().await {
            Some((part, got)) => {
                parts.push(part);
                got
            }
            None => Err(wanted.error(ErrorKind::Broken, "its task ended early")),
        };
        match (&mut versions, got) {
            (Ok(versions), Ok(version)) => versions.push(version),
            // An error other than "changed" says more, if there are several.
            (Err(error), Err(other)) if error.kind == ErrorKind::Changed => *error = other,
            (Ok(_), Err(error)) => versions = Err(error),
            (Err(_), _) => {}
        }
    }
    (parts, versions)
}
