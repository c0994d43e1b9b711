//! One kind of KV of a rank: its space, and a copier for each group of layers that has block tables of its own.

use std::sync::{Arc, Mutex, PoisonError};

use crate::engine::copy::{Copier, CopyError, PagedCache};
use crate::format::Space;
use crate::protocol::Share;

/// One kind of KV of a rank, and where it lies in the engine's memory.
pub struct KindPages {
    pub space: Space,
    /// A draft model's, which the engine can go on without.
    pub is_draft: bool,
    /// Engines deal the layers of a kind into groups, each with block tables, and maybe block sizes, of its own. None
    /// where the rank has no layer of this kind.
    pub groups: Vec<PagedCache>,
}

/// Makes a copier of (some of) a group's memory.
pub(super) type MakeCopier = Box<dyn Fn(PagedCache) -> Result<Copier, CopyError> + Send + Sync>;

pub(super) struct RankKind {
    pub space: Space,
    pub is_draft: bool,
    /// Copiers of all that the rank has, one for each group.
    pub groups: Vec<Arc<Copier>>,
    /// Copiers of the latest share that this rank owned; made when the node has said which.
    own: Mutex<(Vec<Share>, OwnCopiers)>,
}

/// Copiers of a rank's own share, each with its group; groups of which it owns nothing are left out.
pub(super) type OwnCopiers = Vec<(usize, Arc<Copier>)>;

impl RankKind {
    pub fn new(pages: KindPages, make: &MakeCopier) -> Result<Self, CopyError> {
        let groups = pages.groups.into_iter().map(|cache| make(cache).map(Arc::new));
        Ok(Self {
            space: pages.space,
            is_draft: pages.is_draft,
            groups: groups.collect::<Result<_, _>>()?,
            own: Mutex::default(),
        })
    }

    /// Copiers of this rank's own share, kept: the node names the same share for as long as the ranks are the same.
    pub fn own_copiers(&self, own: &[Share], make: &MakeCopier) -> Result<OwnCopiers, CopyError> {
        let mut kept = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.0 == own {
            return Ok(kept.1.clone());
        }
        let mut copiers = OwnCopiers::new();
        for (group, copier) in self.groups.iter().enumerate() {
            let cache = copier.cache().only(own);
            if !cache.parts().is_empty() {
                copiers.push((group, Arc::new(make(cache)?)));
            }
        }
        *kept = (own.to_vec(), copiers.clone());
        Ok(copiers)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::engine::copy::{CpuCopier, CpuOptions, Tensor};
    use crate::protocol::TokenShare;

    #[test]
    fn copiers_are_made_once_for_each_share_that_the_node_names() {
        let space = Space::from_json(
            r#"{"model": "m", "revision": "1", "dtype": "int8", "chunk_tokens": 16,
                "planes": [{"name": "kv", "layer": 0, "heads": 2, "row_bytes": 4}]}"#,
        )
        .unwrap();
        let memory = vec![0_u8; 4 * 2 * 16 * 4];
        let tensor = Tensor {
            address: memory.as_ptr() as u64,
            bytes: memory.len() as u64,
            axes: "BHNC".into(),
            shape: vec![4, 2, 16, 4],
            strides: vec![2 * 16 * 4, 16 * 4, 4, 1],
            element_bytes: 1,
            planes: vec![0],
            heads: Some((0, 2)),
            row_offset: 0,
        };
        let groups = vec![PagedCache::new(&space, &[tensor]).unwrap()];
        let made = Arc::<AtomicUsize>::default();
        let counts = Arc::clone(&made);
        let make: MakeCopier = Box::new(move |cache| {
            counts.fetch_add(1, Ordering::Relaxed);
            let options = CpuOptions {
                threads: 1,
                bytes_per_thread: 1 << 20,
            };
            // SAFETY: nothing is copied.
            Ok(Copier::Cpu(unsafe { CpuCopier::new(cache, options) }))
        });
        let pages = KindPages {
            space,
            is_draft: false,
            groups,
        };
        let kind = RankKind::new(pages, &make).unwrap();
        let heads = |heads| Share {
            planes: (0, 1),
            heads,
            tokens: TokenShare::ALL,
        };
        // One rank is gone, and the other ones have its heads from then on.
        for (share, so_far) in [(heads((0, 1)), 2), (heads((0, 2)), 3)] {
            for _ in 0..3 {
                assert_eq!(
                    kind.own_copiers(std::slice::from_ref(&share), &make)
                        .unwrap()
                        .len(),
                    1
                );
                assert_eq!(made.load(Ordering::Relaxed), so_far);
            }
        }
        assert!(kind.own_copiers(&[], &make).unwrap().is_empty());
    }
}
