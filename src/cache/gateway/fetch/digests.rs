//! The digests of a section's planes, computed on each stretch right after it has arrived, while the CPU's cache
//! still has it. So a verified load reads its slot from memory no more often than an unverified one.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::format::{Digester, Layout, PlaneDigest, Section};
use crate::s3::net::BodyWatch;

/// One section's digests. Its watch goes with the landing to the code that fills the slot; the state stays here.
pub(super) struct Digests {
    section: Section,
    /// Byte ranges in the section.
    planes: Vec<Range<usize>>,
    seen: Arc<Mutex<Seen>>,
}

/// The bytes that came by.
struct Seen {
    kind: PlaneDigest,
    /// The end of each plane in the section.
    ends: Vec<usize>,
    payload_at: usize,
    /// Bytes so far; None after a gap, until the section starts anew.
    at: Option<usize>,
    /// Digester of the plane under way.
    digester: Digester,
    /// Digests of the complete planes.
    digests: Vec<[u8; 32]>,
}

struct Watching(Arc<Mutex<Seen>>);

impl Digests {
    pub fn new(layout: &Layout, section: Section) -> Self {
        let start = section.bytes.start;
        let in_section = |plane| {
            let bytes = layout.plane(plane);
            bytes.start - start..bytes.end - start
        };
        let planes: Vec<_> = section.planes.clone().map(in_section).collect();
        // A placeholder until there is a watch.
        let kind = PlaneDigest::Crc64Nvme;
        let digester = kind.digester();
        let seen = Seen {
            kind,
            ends: planes.iter().map(|plane| plane.end).collect(),
            // The first section begins with the header, which has a digest of its own.
            payload_at: planes.first().map_or(0, |plane| plane.start),
            at: None,
            digester,
            digests: Vec::new(),
        };
        Self {
            section,
            planes,
            seen: Arc::new(Mutex::new(seen)),
        }
    }

    pub fn section(&self) -> &Section {
        &self.section
    }

    /// A watch for a landing; earlier bytes are forgotten.
    pub fn watch(&self, kind: &PlaneDigest) -> Box<dyn BodyWatch> {
        let mut seen = lock(&self.seen);
        (seen.kind, seen.at) = (kind.clone(), None);
        drop(seen);
        Box::new(Watching(Arc::clone(&self.seen)))
    }

    /// The first plane whose digest differs from the one in `digests`, which has one for each plane of the object.
    /// `landed` are the section's bytes; they are read only if they did not pass the watch as this kind.
    pub fn bad_plane(&self, landed: &[u8], kind: &PlaneDigest, digests: &[[u8; 32]]) -> Option<usize> {
        let seen = lock(&self.seen);
        let complete = seen.kind == *kind && seen.at == Some(landed.len());
        let digest = |i: usize| match complete {
            true => seen.digests[i],
            false => kind.of(&landed[self.planes[i].clone()]),
        };
        let mut planes = self.section.planes.clone().enumerate();
        planes
            .find(|&(i, plane)| digest(i) != digests[plane])
            .map(|(_, plane)| plane)
    }
}

impl BodyWatch for Watching {
    fn arrived(&mut self, at: usize, bytes: &[u8]) {
        lock(&self.0).arrived(at, bytes);
    }
}

impl Seen {
    fn arrived(&mut self, at: usize, bytes: &[u8]) {
        if at == 0 {
            self.digests.clear();
            self.digester = self.kind.digester();
        } else if self.at != Some(at) {
            // This breaks the promise to a watch. The digests say nothing of such bytes.
            self.at = None;
            return;
        }
        let end = at + bytes.len();
        self.at = Some(end);
        let mut from = at.max(self.payload_at);
        while let Some(&plane_end) = self.ends.get(self.digests.len())
            && from < end
        {
            let to = end.min(plane_end);
            self.digester.update(&bytes[from - at..to - at]);
            from = to;
            if to == plane_end {
                self.digests.push(self.digester.finish());
            }
        }
    }
}

/// A watch that panicked has not counted its stretch, so the state never claims too much.
fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Space;
    use proptest::prelude::*;

    const KINDS: [PlaneDigest; 2] = [PlaneDigest::Crc64Nvme, PlaneDigest::Blake3];

    /// Planes of 8, 12, 4 and 40 bytes, over and over: smaller and larger than a stretch.
    fn space() -> Space {
        let plane = |layer: usize| {
            let row_bytes = [4, 6, 2, 20][layer % 4];
            format!(r#"{{"name": "kv", "layer": {layer}, "heads": 1, "row_bytes": {row_bytes}}}"#)
        };
        let planes: Vec<_> = (0..12).map(plane).collect();
        Space::from_json(&format!(
            r#"{{"model": "m", "revision": "1", "dtype": "float16", "chunk_tokens": 2, "planes": [{}]}}"#,
            planes.join(",")
        ))
        .unwrap()
    }

    /// The slow, obvious twin.
    fn of_all(layout: &Layout, kind: &PlaneDigest, object: &[u8]) -> Vec<[u8; 32]> {
        (0..layout.planes())
            .map(|plane| kind.of(&object[layout.plane(plane)]))
            .collect()
    }

    fn deliver(watch: &mut dyn BodyWatch, bytes: &[u8], cuts: &[usize], until: usize) {
        let mut at = 0;
        for &len in cuts.iter().cycle() {
            let end = (at + len).min(bytes.len());
            watch.arrived(at, &bytes[at..end]);
            at = end;
            if at >= until.min(bytes.len()) {
                return;
            }
        }
    }

    proptest! {
        #[test]
        fn any_stretches_give_the_same_digests(
            cuts in prop::collection::vec(1_usize..60, 1..40),
            broken_cuts in prop::collection::vec(1_usize..5000, 1..4),
            broken_at in 0_usize..6000,
            part in 1_usize..5000,
            seed in any::<u8>(),
            flip in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let space = space();
            let layout = space.layout();
            let good: Vec<u8> = (0..layout.object_len()).map(|i| (i * 31) as u8 ^ seed).collect();
            let mut object = good.clone();
            let flipped = flip.map(|flip| layout.header_len() + flip.index(layout.payload_len()));
            if let Some(at) = flipped {
                object[at] ^= 1;
            }
            for kind in &KINDS {
                let expected = of_all(layout, kind, &good);
                for section in layout.sections(part) {
                    let digests = Digests::new(layout, section.clone());
                    let bytes = &object[section.bytes.clone()];
                    let mut watch = digests.watch(kind);
                    // An attempt that breaks off, or the other bytes of one that was no good.
                    let before: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
                    deliver(&mut *watch, &before, &broken_cuts, broken_at);
                    deliver(&mut *watch, bytes, &cuts, usize::MAX);
                    let bad = section.planes.clone().find(|&plane| {
                        flipped.is_some_and(|at| layout.plane(plane).contains(&at))
                    });
                    // Other bytes as "landed": the answer comes from the watch.
                    prop_assert_eq!(digests.bad_plane(&before, kind, &expected), bad);
                    // As another kind the answer comes from the slot.
                    let other = &KINDS[usize::from(*kind == KINDS[0])];
                    prop_assert_eq!(digests.bad_plane(bytes, other, &of_all(layout, other, &good)), bad);
                }
            }
        }
    }

    #[test]
    fn a_plane_that_did_not_come_whole_and_in_order_is_read_from_the_slot() {
        let space = space();
        let layout = space.layout();
        let object: Vec<u8> = (0..layout.object_len()).map(|i| (i * 31) as u8).collect();
        let kind = &PlaneDigest::Crc64Nvme;
        let expected = of_all(layout, kind, &object);
        let junk = vec![0xff; object.len()];
        let check = |stretches: &[(usize, usize)]| {
            let digests = Digests::new(layout, layout.sections(usize::MAX).remove(0));
            let mut watch = digests.watch(kind);
            for &(from, to) in stretches {
                watch.arrived(from, &junk[from..to]);
            }
            digests.bad_plane(&object, kind, &expected)
        };
        let end = object.len();
        assert_eq!(check(&[(0, end)]), Some(0), "all of it came by, as junk");
        assert_eq!(check(&[]), None);
        assert_eq!(check(&[(0, end - 1)]), None, "an attempt that broke off");
        assert_eq!(check(&[(0, 4200), (4199, end)]), None, "one stretch twice");
        assert_eq!(check(&[(0, 4000), (4001, end)]), None, "a gap");
        assert_eq!(check(&[(1, end)]), None, "without a start");
    }

    #[test]
    fn a_second_reading_forgets_the_first() {
        let space = space();
        let layout = space.layout();
        let object = vec![7; layout.object_len()];
        let section = layout.sections(usize::MAX).remove(0);
        let digests = Digests::new(layout, section);
        digests
            .watch(&PlaneDigest::Crc64Nvme)
            .arrived(0, &vec![8; object.len()]);
        let kind = &PlaneDigest::Blake3;
        let expected = of_all(layout, kind, &object);
        let mut watch = digests.watch(kind);
        assert_eq!(
            digests.bad_plane(&object, kind, &expected),
            None,
            "nothing came by yet"
        );
        watch.arrived(0, &object);
        assert_eq!(digests.bad_plane(&vec![0; object.len()], kind, &expected), None);
    }
}
