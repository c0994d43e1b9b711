//! Listings of a bucket: the chunks under its keys, page by page, and how many keys are not kvgate's.

use std::future::ready;

use futures::TryStreamExt;
use futures::stream::{Stream, try_unfold};
use serde::Serialize;

use super::Inventory;
use crate::format::{ChunkHash, Key, SpaceKey};
use crate::s3::object::{Listed, ObjectError};

/// A chunk's object as a listing shows it; its bytes are not checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StoredChunk {
    #[serde(skip)]
    pub space: SpaceKey,
    pub hash: ChunkHash,
    /// Bytes of the object, header included.
    pub bytes: u64,
    /// Seconds since 1970.
    pub modified: i64,
    /// Without quotes; empty where the server doesn't list it.
    pub etag: String,
}

/// Up to 1000 keys of a listing, sorted by kind.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// In order of space, then hash.
    pub chunks: Vec<StoredChunk>,
    /// Spaces whose `space.json` is there.
    pub spaces: Vec<SpaceKey>,
    /// Keys that kvgate did not write, and their bytes.
    pub foreign: u64,
    pub foreign_bytes: u64,
    /// Its last key; a later listing may go on after it.
    pub last: String,
}

/// Where the next page begins.
enum Place {
    Start,
    Token(String),
    After(String),
}

impl Inventory {
    /// All keys under the prefix, or only those of `space`.
    pub fn pages(&self, space: Option<SpaceKey>) -> impl Stream<Item = Result<Page, ObjectError>> + use<> {
        let prefix = match space {
            Some(space) => self.keys.space(space),
            None => self.keys.as_str().to_owned(),
        };
        self.pages_from(prefix, Place::Start)
    }

    /// All keys under the prefix that come after this one.
    pub fn pages_after(&self, key: String) -> impl Stream<Item = Result<Page, ObjectError>> + use<> {
        self.pages_from(self.keys.as_str().to_owned(), Place::After(key))
    }

    fn pages_from(
        &self,
        prefix: String,
        place: Place,
    ) -> impl Stream<Item = Result<Page, ObjectError>> + use<> {
        let inventory = self.clone();
        try_unfold(Some(place), move |place| {
            let (inventory, prefix) = (inventory.clone(), prefix.clone());
            async move {
                let (store, deadline) = (&inventory.store, inventory.deadline());
                let listed = match place {
                    None => return Ok(None),
                    Some(Place::Start) => store.list(&prefix, None, deadline).await?,
                    Some(Place::Token(token)) => store.list(&prefix, Some(&token), deadline).await?,
                    Some(Place::After(key)) => store.list_after(&prefix, &key, deadline).await?,
                };
                let page = inventory.sort(listed.objects);
                Ok(Some((page, listed.next.map(Place::Token))))
            }
        })
    }

    /// Whether any key of the space is stored.
    pub async fn has_space(&self, space: SpaceKey) -> Result<bool, ObjectError> {
        let found = |page: &Page| !page.chunks.is_empty() || !page.spaces.is_empty();
        self.pages(Some(space)).try_any(|page| ready(found(&page))).await
    }

    fn sort(&self, objects: Vec<Listed>) -> Page {
        let own = self.keys.own("");
        let mut page = Page {
            last: objects
                .last()
                .map(|object| object.key.clone())
                .unwrap_or_default(),
            ..Page::default()
        };
        for object in objects {
            match self.keys.parse(&object.key) {
                Some(Key::SpaceJson(space)) => page.spaces.push(space),
                Some(Key::Chunk(space, hash)) => page.chunks.push(StoredChunk {
                    space,
                    hash,
                    bytes: object.len,
                    modified: object.modified,
                    etag: object.etag,
                }),
                None if object.key.starts_with(&own) => {}
                None => {
                    page.foreign += 1;
                    page.foreign_bytes += object.len;
                }
            }
        }
        page
    }
}
