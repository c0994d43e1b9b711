//! Where each plane is in an object, and how an object is cut into sections for ranged GETs.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::header::header_len;

/// A layer's rows: `heads` of them for each token, or for a snapshot of a state, `row_bytes` each.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plane {
    pub name: String,
    /// Index of the layer in the whole model.
    pub layer: u32,
    pub heads: u32,
    /// Bytes of one token of one head: K then V, or the latent. Of a state: all that one head has.
    pub row_bytes: u32,
}

impl Plane {
    /// Bytes of the plane in a chunk with this many rows a head; saturates for geometry that can't be.
    pub fn bytes(&self, rows: u32) -> u64 {
        (u64::from(self.heads) * u64::from(rows)).saturating_mul(self.row_bytes.into())
    }
}

/// Where everything is in the objects of a space: header, then plane after plane, each `[head][token][row]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    header_len: usize,
    /// Start of each plane in the object, and the end of the last.
    bounds: Vec<usize>,
    /// Number of planes up to the end of each layer.
    layer_ends: Vec<usize>,
}

/// A byte range of an object that can be fetched and verified alone: whole planes, the first one with the header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// In the object.
    pub bytes: Range<usize>,
    pub planes: Range<usize>,
}

impl Layout {
    pub(super) fn new(planes: &[Plane], rows: u32) -> Self {
        let header_len = header_len(planes.len());
        let mut end = header_len;
        let mut bounds = vec![end];
        for plane in planes {
            // The space checked that the sum fits.
            end += usize::try_from(plane.bytes(rows)).expect("64-bit addresses");
            bounds.push(end);
        }
        // They are in order of their layers.
        let layer_ends = (1..=planes.len())
            .filter(|&end| {
                planes
                    .get(end)
                    .is_none_or(|next| next.layer != planes[end - 1].layer)
            })
            .collect();
        Self {
            header_len,
            bounds,
            layer_ends,
        }
    }

    /// Bytes of the header, a multiple of 4096.
    pub fn header_len(&self) -> usize {
        self.header_len
    }

    /// Bytes of the payload.
    pub fn payload_len(&self) -> usize {
        self.object_len() - self.header_len
    }

    /// Bytes of an object, header and payload.
    pub fn object_len(&self) -> usize {
        self.bounds[self.bounds.len() - 1]
    }

    /// Number of planes.
    pub fn planes(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layer_ends.len()
    }

    /// The bytes of plane `index` in the object.
    pub fn plane(&self, index: usize) -> Range<usize> {
        self.bounds[index]..self.bounds[index + 1]
    }

    /// Cuts the object at plane boundaries into [`parts`] that are as even as the planes allow.
    pub fn sections(&self, part_bytes: usize) -> Vec<Section> {
        self.cut(1..=self.planes(), part_bytes)
    }

    /// The same at layer boundaries: at least one layer, with all of its planes.
    pub fn layer_groups(&self, part_bytes: usize) -> Vec<Section> {
        self.cut(self.layer_ends.iter().copied(), part_bytes)
    }

    /// `ends`: numbers of planes after which it may be cut; the last is all.
    fn cut(&self, ends: impl Iterator<Item = usize>, part_bytes: usize) -> Vec<Section> {
        let (payload, parts) = (self.payload_len(), parts(self.payload_len(), part_bytes));
        // Where the nth cut would be if any byte could be one.
        let ideal = |nth: usize| self.header_len + payload / parts * nth + payload % parts * nth / parts;
        let (mut cuts, mut nth) = (vec![0], 1);
        let mut ends = ends.peekable();
        while let Some(end) = ends.next() {
            let Some(&next) = ends.peek() else {
                cuts.push(end);
                break;
            };
            let is_nearest = |nth| {
                nth < parts && ideal(nth).abs_diff(self.bounds[end]) <= ideal(nth).abs_diff(self.bounds[next])
            };
            if is_nearest(nth) {
                cuts.push(end);
                while is_nearest(nth) {
                    nth += 1;
                }
            }
        }
        let start = |first| if first == 0 { 0 } else { self.bounds[first] };
        let section = |pair: &[usize]| Section {
            bytes: start(pair[0])..self.bounds[pair[1]],
            planes: pair[0]..pair[1],
        };
        cuts.windows(2).map(section).collect()
    }
}

/// The number of ranged GETs for so many bytes: each as near to `part_bytes` as can be, and at most one and a half times
/// that. A small rest would cost a request as a whole part does.
pub fn parts(bytes: usize, part_bytes: usize) -> usize {
    let part_bytes = part_bytes.max(1);
    (bytes - (part_bytes / 2).min(bytes)).div_ceil(part_bytes).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn planes(row_bytes: &[u32]) -> Vec<Plane> {
        let plane = |(layer, &row_bytes): (usize, &u32)| Plane {
            name: "kv".into(),
            layer: u32::try_from(layer).unwrap(),
            heads: 2,
            row_bytes,
        };
        row_bytes.iter().enumerate().map(plane).collect()
    }

    proptest! {
        #[test]
        fn sections_tile_the_object(
            rows in prop::collection::vec((1_u32..5000, any::<bool>()), 1..200),
            part in 1_usize..2_000_000,
        ) {
            // Some planes are of the same layer as the one before.
            let mut planes = planes(&rows.iter().map(|row| row.0).collect::<Vec<_>>());
            for plane in 1..planes.len() {
                planes[plane].layer = planes[plane - 1].layer + u32::from(rows[plane].1);
            }
            let layout = Layout::new(&planes, 16);
            let layer = |plane: usize| planes[plane].layer;
            for (sections, by_layer) in [(layout.sections(part), false), (layout.layer_groups(part), true)] {
                let mut at = 0;
                let mut plane = 0;
                for section in &sections {
                    prop_assert_eq!(section.bytes.start, at);
                    prop_assert_eq!(section.planes.start, plane);
                    prop_assert!(!section.planes.is_empty());
                    let last = section.planes.end - 1;
                    prop_assert_eq!(section.bytes.end, layout.plane(last).end);
                    prop_assert!(!by_layer || plane == 0 || layer(plane - 1) < layer(plane));
                    (at, plane) = (section.bytes.end, section.planes.end);
                }
                prop_assert_eq!(at, layout.object_len());
                prop_assert_eq!(plane, layout.planes());
                // As even as what can't be cut allows.
                let most = parts(layout.payload_len(), part);
                let ends: Vec<usize> = (0..layout.planes())
                    .filter(|&at| !by_layer || at + 1 == layout.planes() || layer(at) < layer(at + 1))
                    .map(|at| layout.plane(at).end)
                    .collect();
                let starts = std::iter::once(layout.header_len()).chain(ends.iter().copied());
                let largest = ends.iter().zip(starts).map(|(end, start)| end - start).max().unwrap();
                prop_assert!(sections.len() <= most);
                prop_assert!(sections.len() == most || largest > layout.payload_len() / most / 2);
                for section in &sections {
                    let payload = section.bytes.end - section.bytes.start.max(layout.header_len());
                    prop_assert!(payload <= layout.payload_len() / most + largest + 1);
                }
            }
        }

        #[test]
        fn parts_are_near_the_size_that_was_asked_for(bytes in 1_usize..1 << 40, part in 1_usize..1 << 30) {
            let parts = parts(bytes, part);
            prop_assert!(bytes <= parts * part + part.div_ceil(2));
            prop_assert!(parts == 1 || bytes > (parts - 1) * part);
        }
    }

    #[test]
    fn planes_follow_the_header_without_gaps() {
        let layout = Layout::new(&planes(&[100, 7]), 16);
        assert_eq!(layout.plane(0), 4096..4096 + 3200);
        assert_eq!(layout.plane(1), 7296..7296 + 224);
        assert_eq!(
            (layout.header_len(), layout.payload_len(), layout.object_len()),
            (4096, 3424, 7520)
        );
    }
}
