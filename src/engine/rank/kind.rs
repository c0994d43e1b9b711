//! One kind of KV of a rank: its space, and a copier for each group of layers that has block tables of its own.

use std::sync::{Arc, OnceLock};

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

pub(super) struct Kind {
    pub space: Space,
    pub is_draft: bool,
    /// Copiers of all that the rank has, one for each group.
    pub groups: Vec<Arc<Copier>>,
    /// Copiers of the share that this rank owns; made when the node has said which.
    own: OnceLock<(Vec<Share>, OwnCopiers)>,
}

/// Copiers of a rank's own share, each with its group; groups of which it owns nothing are left out.
pub(super) type OwnCopiers = Vec<(usize, Arc<Copier>)>;

impl Kind {
    pub fn new(pages: KindPages, make: &MakeCopier) -> Result<Self, CopyError> {
        let groups = pages.groups.into_iter().map(|cache| make(cache).map(Arc::new));
        Ok(Self {
            space: pages.space,
            is_draft: pages.is_draft,
            groups: groups.collect::<Result<_, _>>()?,
            own: OnceLock::new(),
        })
    }

    /// Copiers of this rank's own share, kept: the node names the same share for as long as the ranks are the same.
    pub fn own_copiers(&self, own: &[Share], make: &MakeCopier) -> Result<OwnCopiers, CopyError> {
        if let Some((known, copiers)) = self.own.get()
            && known == own
        {
            return Ok(copiers.clone());
        }
        let mut copiers = OwnCopiers::new();
        for (group, copier) in self.groups.iter().enumerate() {
            let ranges = own
                .iter()
                .map(|share| (share.planes.0..share.planes.1, share.heads.0..share.heads.1));
            let cache = copier.cache().only(ranges);
            if !cache.parts().is_empty() {
                copiers.push((group, Arc::new(make(cache)?)));
            }
        }
        let kept = self.own.get_or_init(|| (own.to_vec(), copiers.clone()));
        Ok(if kept.0 == own { kept.1.clone() } else { copiers })
    }
}
