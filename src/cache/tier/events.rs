//! KV events: what comes into memory and onto disks and leaves them, for engines that tell routers.
//!
//! A router knows a chunk by its tokens and by the engine's hashes of its blocks. So an engine *binds* the chunks that it
//! stores and loads: it says what its own events tell of them. A chunk that is bound and here is *announced*, in each tier
//! that has it; others have no events. Engines that hash blocks alike share a *stream*.
//!
//! A stream's log is compacted: of what is announced it keeps the latest record alone, beside a bounded number of removals.
//! A reader goes on where its *cursor* is. Without one it reads what is there now, and so does one that lost removals, or
//! whose cursor is of another *incarnation*: a daemon's start. Where too many chunks are announced, the ends of prompts go
//! first: without its beginning the rest of a prompt is of no use.
//!
//! Tiers call [`KvEvents::stored`] and [`KvEvents::removed`] under their own locks, so the log has each tier's order.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::fast::RandomState;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::format::{ChunkHash, ChunkId, SpaceKey};
use crate::protocol::{BoundChunk, EventsAnswer, KvEvent, Tier};

/// Limits of the events.
#[derive(Debug, Clone, Copy)]
pub struct EventOptions {
    /// Chunks that are announced, in all streams; 0: there are no events.
    pub chunks_max: usize,
    /// Removals that each log keeps.
    pub removals_max: usize,
}

/// See the [module](self).
pub struct KvEvents {
    incarnation: u64,
    options: EventOptions,
    /// Most nodes have no reader, and no lock to take.
    is_used: AtomicBool,
    state: Mutex<EventState>,
    changed: Notify,
}

#[derive(Default)]
struct EventState {
    /// Of the latest record of any stream.
    number: u64,
    streams: HashMap<SpaceKey, HashMap<String, EventStream>, RandomState>,
    /// In all streams.
    chunks: usize,
    /// The latest record when a stream was forgotten. One of the same name begins after it.
    floor: u64,
}

#[derive(Default)]
struct EventStream {
    chunks: HashMap<ChunkHash, Announced, RandomState>,
    /// Chunks that were bound so far.
    bound: u64,
    /// Of each chunk, how many that are bound follow it.
    followers: HashMap<ChunkHash, usize, RandomState>,
    /// Chunks that none follows, by when they were bound.
    ends: BTreeMap<u64, ChunkHash>,
    /// By number: of each chunk and tier the latest.
    stored: BTreeMap<u64, (Tier, Arc<BoundChunk>)>,
    /// By number.
    removals: BTreeMap<u64, (Tier, ChunkHash)>,
    /// The latest removal that was forgotten.
    floor: u64,
}

/// A reader's place.
struct Cursor {
    incarnation: u64,
    /// The latest record when it began: what was removed before is of no interest to it.
    began: u64,
    after: u64,
}

impl fmt::Display for Cursor {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{:016x}-{}-{}", self.incarnation, self.began, self.after)
    }
}

impl FromStr for Cursor {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split('-');
        let mut next = |radix| u64::from_str_radix(parts.next().unwrap_or_default(), radix).map_err(drop);
        let (incarnation, began, after) = (next(16)?, next(10)?, next(10)?);
        Ok(Self {
            incarnation,
            began,
            after,
        })
    }
}

struct Announced {
    bound: Arc<BoundChunk>,
    /// Of the stream's chunks that were bound, this one.
    number: u64,
    /// For each tier the number of its record.
    stored: [Option<u64>; 2],
}

/// The place of a tier's record. Peers and S3 have no events: they are the same for all engines.
fn place(tier: Tier) -> Option<usize> {
    match tier {
        Tier::Memory => Some(0),
        Tier::Disk => Some(1),
        Tier::Peer | Tier::S3 => None,
    }
}

impl KvEvents {
    pub fn new(options: EventOptions) -> Arc<Self> {
        Arc::new(Self {
            incarnation: fastrand::u64(..),
            options,
            is_used: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Chunks of a space, parents first. The caller then says of each which tiers have it, and calls
    /// [`settle`](Self::settle).
    pub fn bind(&self, space: SpaceKey, scheme: &str, chunks: Vec<BoundChunk>) {
        if self.options.chunks_max == 0 {
            return;
        }
        self.is_used.store(true, Ordering::SeqCst);
        let mut state = self.lock();
        let EventState {
            streams,
            chunks: count,
            floor,
            ..
        } = &mut *state;
        let schemes = streams.entry(space).or_default();
        let stream = schemes.entry(scheme.to_owned()).or_insert_with(|| EventStream {
            floor: *floor,
            ..EventStream::default()
        });
        for chunk in chunks {
            *count += usize::from(stream.insert(chunk));
        }
    }

    /// Forgets those of them that no tier has, and the oldest ends of prompts where there are too many.
    pub fn settle(&self, space: SpaceKey, scheme: &str, hashes: &[ChunkHash]) {
        let mut state = self.lock();
        let EventState {
            number,
            streams,
            chunks: count,
            floor,
        } = &mut *state;
        let named = streams
            .get_mut(&space)
            .and_then(|schemes| schemes.get_mut(scheme));
        if let Some(stream) = named {
            *count -= hashes.iter().filter(|hash| stream.forget_absent(hash)).count();
        }
        while *count > self.options.chunks_max {
            let all = streams.values_mut().flat_map(HashMap::values_mut);
            let Some(largest) = all.max_by_key(|stream| stream.chunks.len()) else {
                break;
            };
            let Some(hash) = largest.oldest_end() else { break };
            largest.remove_all(&hash, number);
            largest.trim(self.options.removals_max);
            *count -= 1;
        }
        // Engines whose hashes are random have a stream of their own after each start.
        streams.retain(|_, schemes| {
            schemes.retain(|_, stream| {
                let is_empty = stream.chunks.is_empty();
                *floor = if is_empty { *number } else { *floor };
                !is_empty
            });
            !schemes.is_empty()
        });
        drop(state);
        self.changed.notify_waiters();
    }

    /// A tier has the chunk from now on, or is known to have it.
    pub fn stored(&self, key: &ChunkId, tier: Tier) {
        let (true, Some(place)) = (self.is_used.load(Ordering::SeqCst), place(tier)) else {
            return;
        };
        let mut state = self.lock();
        let EventState { number, streams, .. } = &mut *state;
        for stream in streams.get_mut(&key.0).into_iter().flat_map(HashMap::values_mut) {
            let Some(announced) = stream.chunks.get_mut(&key.1) else {
                continue;
            };
            if announced.stored[place].is_some() {
                continue;
            }
            *number += 1;
            announced.stored[place] = Some(*number);
            stream
                .stored
                .insert(*number, (tier, Arc::clone(&announced.bound)));
            self.changed.notify_waiters();
        }
    }

    /// A tier has it no longer.
    pub fn removed(&self, key: &ChunkId, tier: Tier) {
        let (true, Some(place)) = (self.is_used.load(Ordering::SeqCst), place(tier)) else {
            return;
        };
        let mut state = self.lock();
        let EventState {
            number,
            streams,
            chunks: count,
            ..
        } = &mut *state;
        for stream in streams.get_mut(&key.0).into_iter().flat_map(HashMap::values_mut) {
            if stream.remove(&key.1, place, tier, number) {
                *count -= usize::from(stream.forget_absent(&key.1));
                stream.trim(self.options.removals_max);
                self.changed.notify_waiters();
            }
        }
    }

    /// At most `most` records from there on.
    pub fn read(&self, space: SpaceKey, scheme: &str, cursor: Option<&str>, most: usize) -> EventsAnswer {
        let state = self.lock();
        let stream = state.streams.get(&space).and_then(|schemes| schemes.get(scheme));
        let floor = stream.map_or(state.floor, |stream| stream.floor);
        let known = cursor.map(Cursor::from_str);
        let is_lost = known.as_ref().is_some_and(|known| match known {
            Ok(known) => {
                let latest = known.began.max(known.after);
                known.incarnation != self.incarnation || latest < floor || latest > state.number
            }
            Err(()) => true,
        });
        let mut cursor = match known {
            Some(Ok(known)) if !is_lost => known,
            _ => Cursor {
                incarnation: self.incarnation,
                began: state.number,
                after: 0,
            },
        };
        let mut records: Vec<(u64, KvEvent)> = Vec::new();
        if let Some(stream) = stream {
            let stored = stream.stored.range(cursor.after + 1..).take(most + 1);
            records.extend(stored.map(|(number, (tier, bound))| (*number, KvEvent::stored(*tier, bound))));
            // What was removed before it began was never told to it.
            let removals = stream
                .removals
                .range(cursor.after.max(cursor.began) + 1..)
                .take(most + 1);
            records.extend(removals.map(|(number, (tier, hash))| (*number, KvEvent::removed(*tier, *hash))));
            records.sort_unstable_by_key(|(number, _)| *number);
        }
        let is_end = records.len() <= most;
        records.truncate(most);
        cursor.after = match (records.last(), is_end) {
            (Some((number, _)), false) => *number,
            _ => state.number.max(cursor.after),
        };
        EventsAnswer {
            cursor: cursor.to_string(),
            is_lost,
            is_end,
            events: records.into_iter().map(|(_, event)| event).collect(),
        }
    }

    /// Wakes when there is a new record, from the moment it is made.
    pub fn changes(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Wakes all who wait, without a record.
    pub fn wake(&self) {
        self.changed.notify_waiters();
    }

    /// Chunks that are announced, and removals that the logs keep.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        let streams = state.streams.values().flat_map(HashMap::values);
        (state.chunks, streams.map(|stream| stream.removals.len()).sum())
    }

    /// No panic can leave the state half-changed, so a poisoned lock is as good.
    fn lock(&self) -> MutexGuard<'_, EventState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventStream {
    /// True if it was not known.
    fn insert(&mut self, chunk: BoundChunk) -> bool {
        let hash = chunk.hash;
        if self.chunks.contains_key(&hash) {
            return false;
        }
        self.bound += 1;
        if !self.followers.contains_key(&hash) {
            self.ends.insert(self.bound, hash);
        }
        if let Some(parent) = chunk.parent {
            *self.followers.entry(parent).or_default() += 1;
            if let Some(parent) = self.chunks.get(&parent) {
                self.ends.remove(&parent.number);
            }
        }
        let announced = Announced {
            bound: Arc::new(chunk),
            number: self.bound,
            stored: [None; 2],
        };
        self.chunks.insert(hash, announced);
        true
    }

    /// The chunk that was bound first, of those that none follows.
    fn oldest_end(&self) -> Option<ChunkHash> {
        let end = self.ends.first_key_value().map(|(_, hash)| *hash);
        // Chunks in a circle, which no engine binds, have no end.
        end.or_else(|| self.chunks.keys().next().copied())
    }

    fn remove_all(&mut self, hash: &ChunkHash, number: &mut u64) {
        for (place, tier) in [Tier::Memory, Tier::Disk].into_iter().enumerate() {
            self.remove(hash, place, tier, number);
        }
        self.forget_absent(hash);
    }

    fn remove(&mut self, hash: &ChunkHash, place: usize, tier: Tier, number: &mut u64) -> bool {
        let announced = self.chunks.get_mut(hash);
        let Some(stored) = announced.and_then(|announced| announced.stored[place].take()) else {
            return false;
        };
        self.stored.remove(&stored);
        *number += 1;
        self.removals.insert(*number, (tier, *hash));
        true
    }

    /// True if it was known, and no tier has it.
    fn forget_absent(&mut self, hash: &ChunkHash) -> bool {
        let is_absent = |announced: &Announced| announced.stored == [None; 2];
        if !self.chunks.get(hash).is_some_and(is_absent) {
            return false;
        }
        let Some(forgotten) = self.chunks.remove(hash) else {
            return false;
        };
        self.ends.remove(&forgotten.number);
        if let Some(parent) = forgotten.bound.parent {
            self.unfollow(parent);
        }
        true
    }

    fn unfollow(&mut self, parent: ChunkHash) {
        let Entry::Occupied(mut followers) = self.followers.entry(parent) else {
            return;
        };
        *followers.get_mut() -= 1;
        if *followers.get() == 0 {
            followers.remove();
            if let Some(known) = self.chunks.get(&parent) {
                self.ends.insert(known.number, parent);
            }
        }
    }

    fn trim(&mut self, removals_max: usize) {
        while self.removals.len() > removals_max {
            if let Some((number, _)) = self.removals.pop_first() {
                self.floor = number;
            }
        }
    }
}

#[cfg(test)]
mod tests;
