//! The spaces of a bucket, each with its number of chunks and bytes.

use std::collections::BTreeMap;

use futures::{StreamExt, TryStreamExt, pin_mut, stream};

use super::{Inventory, Page, SpaceJson};
use crate::format::SpaceKey;
use crate::s3::object::ObjectError;

/// Reads of `space.json` at a time.
const READS: usize = 16;

/// One space in the bucket.
#[derive(Debug, Clone)]
pub struct SpaceSummary {
    pub key: SpaceKey,
    pub json: SpaceJson,
    pub chunks: u64,
    /// Bytes of its chunks' objects.
    pub bytes: u64,
}

/// Everything under the prefix.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    pub spaces: Vec<SpaceSummary>,
    /// Keys that kvgate did not write, and their bytes.
    pub foreign: u64,
    pub foreign_bytes: u64,
}

impl SpaceSummary {
    /// By model, its own kinds before its drafts'; spaces that can't be read come last.
    fn order(&self) -> impl Ord + use<> {
        let space = match &self.json {
            SpaceJson::Good(space) => Some(space),
            _ => None,
        };
        let order = space.map(|space| {
            let model = (space.model().to_owned(), space.model_id());
            (model, space.draft().to_owned(), space.kind())
        });
        (order.is_none(), order, self.key)
    }
}

impl Inventory {
    /// Lists everything, or only `space`, and reads each space found. Calls `seen` with every page.
    pub async fn summary(
        &self,
        space: Option<SpaceKey>,
        mut seen: impl FnMut(&Page),
    ) -> Result<Summary, ObjectError> {
        let mut counts: BTreeMap<SpaceKey, (u64, u64)> = BTreeMap::new();
        let mut summary = Summary::default();
        let pages = self.pages(space);
        pin_mut!(pages);
        while let Some(page) = pages.try_next().await? {
            seen(&page);
            for chunk in &page.chunks {
                let (chunks, bytes) = counts.entry(chunk.space).or_default();
                *chunks += 1;
                *bytes += chunk.bytes;
            }
            for space in &page.spaces {
                counts.entry(*space).or_default();
            }
            summary.foreign += page.foreign;
            summary.foreign_bytes += page.foreign_bytes;
        }
        let read = |(key, (chunks, bytes))| async move {
            Ok::<_, ObjectError>(SpaceSummary {
                key,
                json: self.read_space(key).await?,
                chunks,
                bytes,
            })
        };
        summary.spaces = stream::iter(counts)
            .map(read)
            .buffered(READS)
            .try_collect()
            .await?;
        // The kinds of KV of one model stand together.
        summary.spaces.sort_by_key(SpaceSummary::order);
        Ok(summary)
    }
}
