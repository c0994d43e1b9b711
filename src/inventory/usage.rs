//! What a bucket holds, counted from one listing: by space, by age, by day.
//!
//! The counts are all that is kept, so memory grows with the number of spaces alone. They are written to a file now and
//! then with the last key that they count; a later run goes on after it, by key: a server's own tokens may be gone by then.
//!
//! Age is the time since `LastModified`: since a chunk was stored, or was last [refreshed](crate::cache) because it was in
//! use. What was removed meanwhile is in no listing, so growth by day is that of what is still there; two runs with the same
//! file tell the bucket's own growth.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use futures::{TryStreamExt, pin_mut};
use serde::{Deserialize, Serialize};

use super::{Inventory, Page, StoredChunk};
use crate::format::parts;
use crate::s3::object::ObjectError;

/// Classes of age, each with its upper end in seconds.
pub const AGES: [(&str, i64); 7] = [
    ("under 1 hour", HOUR),
    ("1 hour to 1 day", DAY),
    ("1 to 7 days", 7 * DAY),
    ("7 to 30 days", 30 * DAY),
    ("30 to 90 days", 90 * DAY),
    ("90 to 365 days", 365 * DAY),
    ("over 365 days", i64::MAX),
];
/// Days that are counted one by one.
pub const DAYS: usize = 30;
const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;
/// Growth is the mean of so many days.
const GROWTH_DAYS: usize = 7;
/// Spaces for each of which the file is written a page less often: it has a line for each.
const SPACES_A_PAGE: u64 = 200;

/// Chunks, and the bytes of their objects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    pub chunks: u64,
    pub bytes: u64,
}

impl Count {
    pub fn add(&mut self, chunks: u64, bytes: u64) {
        self.chunks += chunks;
        self.bytes += bytes;
    }
}

/// What one space has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceUsage {
    pub count: Count,
    /// Ranged GETs that a load of all of it takes.
    pub gets: u64,
    /// Of the first and the last `LastModified`, seconds since 1970.
    pub oldest: i64,
    pub newest: i64,
}

/// The counts, as far as they have come. Also the text of the file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Usage {
    /// Which bucket and prefix it is of.
    place: String,
    /// The server's clock at the beginning, seconds since 1970.
    pub began: i64,
    /// The last key that was counted.
    after: String,
    pub finished: bool,
    /// By the key of the space.
    pub spaces: BTreeMap<String, SpaceUsage>,
    /// As [`AGES`].
    pub ages: [Count; AGES.len()],
    /// Of the days before the beginning, the latest first.
    pub days: Vec<Count>,
    /// Objects that kvgate did not write.
    pub foreign: Count,
    /// Pages that were listed.
    pub lists: u64,
    /// Of an earlier listing with the same file: when, and what there was.
    pub before: Option<(i64, Count)>,
}

/// Why usage can't be told.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("can't use {}: {cause}", path.display())]
    File { path: PathBuf, cause: io::Error },
    #[error(
        "{} is of {found}, not of {wanted}: give another file with --resume, or remove this one",
        path.display()
    )]
    OtherPlace {
        path: PathBuf,
        found: String,
        wanted: String,
    },
}

impl Usage {
    fn new(place: &str, began: i64, before: Option<(i64, Count)>) -> Self {
        Self {
            place: place.to_owned(),
            began,
            after: String::new(),
            finished: false,
            spaces: BTreeMap::new(),
            ages: Default::default(),
            days: vec![Count::default(); DAYS],
            foreign: Count::default(),
            lists: 0,
            before,
        }
    }

    pub fn total(&self) -> Count {
        let mut total = Count::default();
        for space in self.spaces.values() {
            total.add(space.count.chunks, space.count.bytes);
        }
        total
    }

    /// Bytes that came each day: the mean of the last days of which there is anything.
    pub fn growth(&self) -> u64 {
        let oldest = self.spaces.values().filter(|space| space.count.chunks > 0);
        let Some(oldest) = oldest.map(|space| space.oldest).min() else {
            return 0;
        };
        let since = usize::try_from((self.began - oldest).max(0) / DAY).unwrap_or(usize::MAX);
        let days = since.saturating_add(1).min(GROWTH_DAYS);
        let bytes: u64 = self.days[..days].iter().map(|day| day.bytes).sum();
        bytes / days as u64
    }

    /// Bytes that the bucket has gained (or lost) a day since the earlier listing.
    pub fn net_growth(&self) -> Option<f64> {
        let (at, before) = self.before?;
        let days = (self.began - at) as f64 / DAY as f64;
        (days > 0.0).then(|| (self.total().bytes as f64 - before.bytes as f64) / days)
    }

    fn page(&mut self, page: &Page, part_bytes: u64) {
        self.lists += 1;
        self.foreign.add(page.foreign, page.foreign_bytes);
        for space in &page.spaces {
            self.spaces.entry(space.to_string()).or_default();
        }
        for chunk in &page.chunks {
            self.chunk(chunk, part_bytes);
        }
        page.last.clone_into(&mut self.after);
    }

    fn chunk(&mut self, chunk: &StoredChunk, part_bytes: u64) {
        let space = self.spaces.entry(chunk.space.to_string()).or_default();
        let is_first = space.count.chunks == 0;
        space.count.add(1, chunk.bytes);
        let size = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        space.gets += parts(size(chunk.bytes), size(part_bytes)) as u64;
        space.oldest = if is_first {
            chunk.modified
        } else {
            space.oldest.min(chunk.modified)
        };
        space.newest = space.newest.max(chunk.modified);
        // What is stored during the listing is new.
        let age = (self.began - chunk.modified).max(0);
        if let Some(class) = AGES.iter().position(|(_, end)| age < *end) {
            self.ages[class].add(1, chunk.bytes);
        }
        if let Some(day) = usize::try_from(age / DAY)
            .ok()
            .and_then(|day| self.days.get_mut(day))
        {
            day.add(1, chunk.bytes);
        }
    }

    /// The file's counts. None where there is no file.
    fn read(path: &Path, place: &str) -> Result<Option<Self>, UsageError> {
        let fail = |cause| UsageError::File {
            path: path.to_owned(),
            cause,
        };
        let text = match std::fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(fail)?,
        };
        let other = |error| {
            let what = "it was not written by `kvgate usage --resume`: give another file, or remove this one";
            fail(io::Error::other(format!("{what} ({error})")))
        };
        let usage: Self = serde_json::from_slice(&text).map_err(other)?;
        if usage.days.len() != DAYS {
            return Err(fail(io::Error::other("it is of another version of kvgate")));
        }
        match usage.place == place {
            true => Ok(Some(usage)),
            false => Err(UsageError::OtherPlace {
                path: path.to_owned(),
                found: usage.place,
                wanted: place.to_owned(),
            }),
        }
    }

    /// Whole or not at all.
    fn write(&self, path: &Path) -> Result<(), UsageError> {
        let part = path.with_extension("part");
        let text = serde_json::to_vec(self).map_err(io::Error::from);
        let written = text.and_then(|text| std::fs::write(&part, text));
        let written = written.and_then(|()| std::fs::rename(&part, path));
        written.map_err(|cause| UsageError::File {
            path: path.to_owned(),
            cause,
        })
    }
}

impl Inventory {
    /// Counts everything under the prefix. With a file it goes on where that ends, and keeps it up to date; one that is
    /// finished is what the new counts are compared with. `place` names bucket and prefix. `part_bytes`: of one ranged
    /// GET. Calls `seen` after every page.
    pub async fn usage(
        &self,
        place: &str,
        part_bytes: u64,
        file: Option<&Path>,
        mut seen: impl FnMut(&Usage),
    ) -> Result<Usage, UsageError> {
        let earlier = match file {
            Some(path) => Usage::read(path, place)?,
            None => None,
        };
        let mut usage = match earlier {
            Some(earlier) if !earlier.finished => earlier,
            earlier => {
                let began = self.store.server_time(self.deadline()).await?;
                let before = earlier.map(|earlier| (earlier.began, earlier.total()));
                Usage::new(place, began, before)
            }
        };
        let save = |usage: &Usage| file.map_or(Ok(()), |path| usage.write(path));
        // A file that can't be written is told of at once.
        save(&usage)?;
        let pages = match usage.after.is_empty() {
            true => futures::future::Either::Left(self.pages(None)),
            false => futures::future::Either::Right(self.pages_after(usage.after.clone())),
        };
        pin_mut!(pages);
        while let Some(page) = pages.try_next().await? {
            if page.last.is_empty() {
                continue;
            }
            usage.page(&page, part_bytes);
            seen(&usage);
            if usage
                .lists
                .is_multiple_of(1 + usage.spaces.len() as u64 / SPACES_A_PAGE)
            {
                save(&usage)?;
            }
        }
        usage.finished = true;
        save(&usage)?;
        Ok(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ChunkHash, SpaceKey};

    fn page(chunks: &[(i64, u64)]) -> Page {
        let space = SpaceKey::from_hex(&"ab".repeat(16)).unwrap();
        let chunk = |(number, &(modified, bytes)): (usize, &(i64, u64))| StoredChunk {
            space,
            hash: ChunkHash([number as u8; 32]),
            bytes,
            modified,
            etag: String::new(),
        };
        Page {
            chunks: chunks.iter().enumerate().map(chunk).collect(),
            last: "x".into(),
            ..Page::default()
        }
    }

    #[test]
    fn chunks_count_by_age_and_day() {
        let now = 1_000 * DAY;
        let mut usage = Usage::new(
            "b",
            now,
            Some((
                now - 2 * DAY,
                Count {
                    chunks: 1,
                    bytes: 100,
                },
            )),
        );
        usage.page(
            &page(&[
                (now + 5, 10),
                (now - HOUR, 20),
                (now - DAY, 70),
                (now - 400 * DAY, 200),
            ]),
            100,
        );
        assert_eq!(
            usage.total(),
            Count {
                chunks: 4,
                bytes: 300
            }
        );
        assert_eq!(usage.ages.map(|age| age.bytes), [10, 20, 70, 0, 0, 0, 200]);
        assert_eq!(
            usage.days[..3].iter().map(|day| day.bytes).collect::<Vec<_>>(),
            [30, 70, 0]
        );
        assert_eq!(usage.growth(), 100 / GROWTH_DAYS as u64);
        assert_eq!(usage.net_growth(), Some(100.0));
        let space = usage.spaces.values().next().unwrap();
        assert_eq!(
            (space.gets, space.oldest, space.newest),
            (5, now - 400 * DAY, now + 5)
        );
    }

    #[test]
    fn growth_of_a_young_bucket_is_of_its_own_days() {
        let mut usage = Usage::new("b", 1_000 * DAY, None);
        assert_eq!(usage.growth(), 0);
        usage.page(&page(&[(1_000 * DAY - 10, 60), (999 * DAY - 10, 40)]), 100);
        assert_eq!(usage.growth(), 50);
    }

    #[test]
    fn a_file_of_another_bucket_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage.json");
        assert!(Usage::read(&path, "a").unwrap().is_none());
        Usage::new("a", 1, None).write(&path).unwrap();
        assert!(Usage::read(&path, "a").unwrap().is_some());
        let error = Usage::read(&path, "b").unwrap_err().to_string();
        assert!(error.contains("--resume"), "{error}");
        std::fs::write(&path, "{").unwrap();
        assert!(Usage::read(&path, "a").is_err());
    }
}
