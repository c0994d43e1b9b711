//! Which chunks a node stores on S3: the ones most likely to be asked for again, within a budget of bytes a second.
//!
//! - **Chance.** A chunk's class is the number of chunks that its prompt added. For each class the node counts how many
//!   chunks were offered, and how many of these were asked for again: loaded from any tier, or stored once more. Requests
//!   that go to other nodes are not seen, but they thin out all classes alike, and only the order of the classes counts.
//! - **Budget.** A bucket fills with the budget and loses the bytes of each chunk that is admitted. The fuller it is, the
//!   less likely chunks get through: a full one admits all, at half only the better part passes. So the level settles where
//!   the likeliest chunks use up the budget, and no rate of stores need be known.
//! - **Heads first.** The chunks of a prompt are offered in its order, and a chunk whose parent was declined is declined. So
//!   what is stored of a chain is its head.
//! - **Second chance.** A declined chunk that is asked for again counts as the likeliest, and a part of the bucket is kept
//!   for such chunks. Its declined ancestors must be offered before it: [`Admission::declined_chain`].
//!
//! No I/O and no clock: the caller says the time. Not here: what the answer means for tiers, and who has the bytes.

use std::hash::Hash;

use serde::Serialize;

use super::recent::Recent;

/// Limits of the admission.
#[derive(Debug, Clone, Copy)]
pub struct AdmissionOptions {
    /// The budget.
    pub bytes_per_s: u64,
    /// Chunks that are remembered, with the answer that they got.
    pub chunks_max: usize,
}

/// See the [module](self).
pub struct Admission<K> {
    bytes_per_s: f64,
    /// Bytes that may be admitted now; below zero after a chunk larger than what there was.
    level: f64,
    filled_at_ms: u64,
    classes: [Class; CLASSES],
    /// Declined chunks that were offered again.
    again: f64,
    seen: Recent<Seen<K>, K>,
    stats: AdmissionStats,
}

/// A chunk that is to be stored.
#[derive(Debug, Clone, Copy)]
pub struct Offer<K> {
    pub key: K,
    /// The chunk before it, or the root. None where a chunk is of use without others.
    pub parent: Option<K>,
    /// S3 may lack the parent, and the admission does not remember it: it counts as declined.
    pub is_doubtful: bool,
    pub bytes: u64,
    /// Chunks that its prompt added; 0 if that is not known.
    pub added: u32,
}

/// Why a chunk is not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Likelier ones use up the budget.
    Unlikely,
    /// It was asked for again, and the budget is used up.
    Budget,
    /// A chunk before it was declined, and is not admitted now.
    Parent,
}

/// What became of a chunk that was offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is on S3, or on its way there.
    Admitted,
    Declined,
    /// It may have been declined, in an earlier life of the node or long ago: S3 was not asked yet, or does not answer.
    Doubtful,
    /// It was not offered here. S3 has it, or must have it because a chunk after it was admitted.
    Owed,
}

/// Figures of the admission; totals since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct AdmissionStats {
    pub admitted_chunks: u64,
    pub admitted_bytes: u64,
    /// Of the admitted chunks, those that had been declined before.
    pub second_chances: u64,
    pub unlikely: Declined,
    pub budget: Declined,
    pub parent: Declined,
    /// Chunks that are remembered as declined, and were not admitted since.
    pub declined_now: u64,
    /// Chunks that were remembered as declined, and are not remembered any more. One that is declined again counts again.
    pub forgotten: u64,
    /// What the budget allows at this moment.
    pub budget_bytes: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Declined {
    pub chunks: u64,
    pub bytes: u64,
}

/// Prompts by the chunks that they added: not known, 1, 2, 4, ... 64 and more.
const CLASSES: usize = 8;
/// Time in which the budget fills an empty bucket.
const FILL_S: f64 = 60.0;
/// Share of the bucket that is kept for chunks that are asked for again.
const KEPT: f64 = 0.25;
/// Chunks of an average class that each class is taken to have had before the first.
const PRIOR_CHUNKS: f64 = 20.0;
/// Offered chunks after which all counts are halved, so that what was long ago counts less.
const FADE_CHUNKS: f64 = 65_536.0;

#[derive(Clone, Copy, Default)]
struct Class {
    offered: f64,
    /// Of these, asked for again.
    again: f64,
}

#[derive(Clone, Copy)]
struct Seen<K> {
    standing: Standing,
    class: usize,
    was_used: bool,
    parent: Option<K>,
    /// Whether its parent was declined when it was.
    follows_declined: bool,
}

impl<K: Copy + Eq + Hash> Admission<K> {
    pub fn new(options: AdmissionOptions) -> Self {
        let bytes_per_s = options.bytes_per_s as f64;
        Self {
            bytes_per_s,
            level: bytes_per_s * FILL_S,
            filled_at_ms: 0,
            classes: [Class::default(); CLASSES],
            again: 0.0,
            seen: Recent::new(options.chunks_max),
            stats: AdmissionStats::default(),
        }
    }

    /// Decides about a chunk, at a time that never goes back.
    pub fn offer(&mut self, offer: &Offer<K>, at_ms: u64) -> Result<(), Reason> {
        self.fill(at_ms);
        let before = self
            .used(&offer.key)
            .filter(|standing| *standing != Standing::Owed);
        let known = self.seen.get(&offer.key).copied();
        let class = match before.and(known) {
            Some(seen) => seen.class,
            None => class_of(offer.added),
        };
        match before {
            Some(Standing::Declined) => self.again += 1.0,
            Some(_) => {}
            None => self.classes[class].offered += 1.0,
        }
        self.fade();
        let parent = offer.parent.and_then(|parent| self.standing(&parent));
        let follows_declined = match parent {
            Some(parent) => matches!(parent, Standing::Declined | Standing::Doubtful),
            None => offer.is_doubtful,
        };
        let is_owed = known.is_some_and(|seen| seen.standing == Standing::Owed);
        let answer = if follows_declined {
            Err(Reason::Parent)
        } else if is_owed {
            Ok(())
        } else if before.is_some() {
            if self.level > 0.0 {
                Ok(())
            } else {
                Err(Reason::Budget)
            }
        } else if self.level > 0.0 && self.level >= self.least(class) {
            Ok(())
        } else {
            Err(Reason::Unlikely)
        };
        let standing = match answer {
            Ok(()) => Standing::Admitted,
            Err(_) => Standing::Declined,
        };
        let seen = Seen {
            standing,
            class,
            was_used: before.is_some(),
            parent: offer.parent,
            follows_declined,
        };
        self.remember(offer.key, seen);
        if let Some(parent) = offer.parent.filter(|_| parent.is_none() && answer.is_ok()) {
            self.owe(parent);
        }
        self.count(offer.bytes, before, answer);
        answer
    }

    /// A chunk was asked for: loaded, or to be stored again. Returns what became of it before.
    pub fn used(&mut self, key: &K) -> Option<Standing> {
        let seen = self.seen.get_mut(key)?;
        if !std::mem::replace(&mut seen.was_used, true) {
            self.classes[seen.class].again += 1.0;
        }
        Some(seen.standing)
    }

    pub fn standing(&self, key: &K) -> Option<Standing> {
        self.seen.get(key).map(|seen| seen.standing)
    }

    /// Whether nothing is admitted now. Then the chunk, of so many bytes, has no second chance, and that is counted.
    pub fn is_used_up(&mut self, key: &K, bytes: u64, at_ms: u64) -> bool {
        self.fill(at_ms);
        let is_used_up = self.level <= 0.0;
        if is_used_up && self.standing(key) == Some(Standing::Declined) {
            self.count(bytes, Some(Standing::Declined), Err(Reason::Budget));
        }
        is_used_up
    }

    /// S3 has it, whichever node stored it.
    pub fn is_there(&mut self, key: &K) {
        match self.seen.get_mut(key) {
            Some(seen) if seen.standing == Standing::Declined => {
                seen.standing = Standing::Admitted;
                self.stats.declined_now -= 1;
            }
            Some(seen) if seen.standing == Standing::Doubtful => seen.standing = Standing::Admitted,
            Some(_) => {}
            None => self.owe(*key),
        }
    }

    /// It is here, and may have been declined: by an earlier life of the node, or so long ago that it is forgotten. False if
    /// it is remembered after all.
    pub fn doubt(&mut self, key: K) -> bool {
        let is_unknown = !self.seen.has(&key);
        if is_unknown {
            self.note(key, Standing::Doubtful);
        }
        is_unknown
    }

    /// S3 lacks it, and it is asked for: it counts as declined before. The chunks before it are told first.
    /// `is_orphan`: its parent is neither on S3 nor here.
    pub fn is_missing(&mut self, key: K, parent: Option<K>, is_orphan: bool) {
        let parent_standing = parent.and_then(|parent| self.standing(&parent));
        let follows_declined = is_orphan || parent_standing == Some(Standing::Declined);
        let seen = Seen {
            standing: Standing::Declined,
            class: class_of(0),
            was_used: true,
            parent,
            follows_declined,
        };
        self.remember(key, seen);
    }

    /// The chunk before a declined one, if that was declined as well.
    pub fn declined_parent(&self, key: &K) -> Option<K> {
        let seen = self.seen.get(key)?;
        seen.parent
            .filter(|_| seen.standing == Standing::Declined && seen.follows_declined)
    }

    /// The declined chunks that must be offered so that this one can be admitted: the first of the chain first, and it as the
    /// last. None if one of them is not remembered.
    pub fn declined_chain(&self, key: &K) -> Option<Vec<K>> {
        let (mut chain, mut at) = (Vec::new(), *key);
        loop {
            let seen = self.seen.get(&at)?;
            match seen.standing {
                Standing::Declined => chain.push(at),
                Standing::Doubtful => return None,
                Standing::Admitted | Standing::Owed => break,
            }
            match seen.parent.filter(|_| seen.follows_declined) {
                Some(parent) => at = parent,
                None => break,
            }
        }
        chain.reverse();
        Some(chain)
    }

    /// It was admitted, and could not be queued: it is declined, and costs nothing.
    pub fn take_back(&mut self, key: &K, bytes: u64) {
        if let Some(seen) = self.seen.get(key).copied() {
            let standing = Standing::Declined;
            self.remember(*key, Seen { standing, ..seen });
            self.level += bytes as f64;
            self.stats.admitted_chunks -= 1;
            self.stats.admitted_bytes -= bytes;
            self.stats.second_chances = self.stats.second_chances.saturating_sub(1);
        }
    }

    /// It is deleted everywhere.
    pub fn forget(&mut self, key: &K) {
        let seen = self.seen.remove(key);
        if seen.is_some_and(|seen| seen.standing == Standing::Declined) {
            self.stats.declined_now -= 1;
        }
    }

    pub fn stats(&self) -> AdmissionStats {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is not below 0"
        )]
        let budget_bytes = self.level.max(0.0) as u64;
        AdmissionStats {
            budget_bytes,
            ..self.stats
        }
    }

    fn fill(&mut self, at_ms: u64) {
        let passed_s = at_ms.saturating_sub(self.filled_at_ms) as f64 / 1000.0;
        self.filled_at_ms = self.filled_at_ms.max(at_ms);
        self.level = (self.level + passed_s * self.bytes_per_s).min(self.bytes_per_s * FILL_S);
    }

    /// The level from which on a new chunk of a class is admitted: the larger the share of likelier chunks, the higher.
    fn least(&self, class: usize) -> f64 {
        let chances = self.chances();
        let likelier = |of: &usize| chances[*of] > chances[class];
        let offered = |classes: &mut dyn Iterator<Item = usize>| -> f64 {
            classes.map(|of| self.classes[of].offered).sum()
        };
        let better = self.again + offered(&mut (0..CLASSES).filter(likelier));
        let all = self.again + offered(&mut (0..CLASSES));
        self.bytes_per_s * FILL_S * (KEPT + (1.0 - KEPT) * better / all.max(1.0))
    }

    /// Of each class the chance that a chunk is asked for again.
    fn chances(&self) -> [f64; CLASSES] {
        let (offered, again) = self.classes.iter().fold((0.0, 0.0), |sum, class| {
            (sum.0 + class.offered, sum.1 + class.again)
        });
        let of_all = (again + 1.0) / (offered + 2.0);
        self.classes
            .map(|class| (class.again + PRIOR_CHUNKS * of_all) / (class.offered + PRIOR_CHUNKS))
    }

    fn fade(&mut self) {
        if self.classes.iter().map(|class| class.offered).sum::<f64>() > FADE_CHUNKS {
            for class in &mut self.classes {
                (class.offered, class.again) = (class.offered / 2.0, class.again / 2.0);
            }
            self.again /= 2.0;
        }
    }

    /// A chunk that was never offered here must be admitted if it is.
    fn owe(&mut self, key: K) {
        self.note(key, Standing::Owed);
    }

    /// Notes a chunk of no class.
    fn note(&mut self, key: K, standing: Standing) {
        let seen = Seen {
            standing,
            class: 0,
            was_used: true,
            parent: None,
            follows_declined: false,
        };
        self.remember(key, seen);
    }

    /// As the latest: for it the oldest may be forgotten.
    fn remember(&mut self, key: K, seen: Seen<K>) {
        let is_declined = |seen: &Seen<K>| seen.standing == Standing::Declined;
        let was_declined = self.seen.get(&key).is_some_and(is_declined);
        let forgets = self
            .seen
            .add(key, seen)
            .is_some_and(|oldest| is_declined(&oldest));
        self.stats.declined_now += u64::from(is_declined(&seen));
        self.stats.declined_now -= u64::from(was_declined) + u64::from(forgets);
        self.stats.forgotten += u64::from(forgets);
    }

    fn count(&mut self, bytes: u64, before: Option<Standing>, answer: Result<(), Reason>) {
        let was_declined = before == Some(Standing::Declined);
        let stats = &mut self.stats;
        match answer {
            Ok(()) => {
                self.level -= bytes as f64;
                stats.admitted_chunks += 1;
                stats.admitted_bytes += bytes;
                stats.second_chances += u64::from(was_declined);
            }
            Err(reason) => {
                let declined = match reason {
                    Reason::Unlikely => &mut stats.unlikely,
                    Reason::Budget => &mut stats.budget,
                    Reason::Parent => &mut stats.parent,
                };
                declined.chunks += 1;
                declined.bytes += bytes;
            }
        }
    }
}

fn class_of(added: u32) -> usize {
    match added {
        0 => 0,
        added => (added.ilog2() as usize + 1).min(CLASSES - 1),
    }
}

#[cfg(test)]
mod tests;
