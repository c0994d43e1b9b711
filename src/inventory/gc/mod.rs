//! Removal of what is least worth keeping: down to a size, or what was not used for a time, tails of prompts first. And of
//! what a key wrote.
//!
//! 1. List the bucket, and find out by the sizes and times listed whether anything must go.
//! 2. Read the first [`CHAIN_LEN`] bytes of each chunk of the models concerned: its parent. Of a protected space it reads
//!    the whole header, so that a forged one counts for nothing where its tenant's key is here. A listing does not have it,
//!    and no order of a listing makes up for it: the heads of prompts are the oldest objects, so "the oldest first" takes
//!    what all later chunks need. Reading the headers of the oldest only won't do, either: what follows them may be new.
//!    A parent never changes, so [`Parents`] keeps what was read for the next run.
//! 3. Order the [`Tree`], and choose.
//! 4. Remove in batches, at a rate. Just before each batch every object in it is looked at again: one that was stored or
//!    refreshed since it was listed stays, and with it all its ancestors. No batch has a chunk and one that needs it: in
//!    whatever order a server removes them, and wherever it stops, prefixes stay whole.
//!
//! What a key wrote goes with all that follows it in its prompts: nobody finds that any more, and it was computed from KV
//! that may be forged, where the key is in wrong hands. Chunks that are stored meanwhile do not keep it, or the head of a
//! busy prompt would never go.
//!
//! A run begins when the server's clock has passed the second `began`. Nothing with a later `LastModified` goes, by the
//! listing and by the second look. Two runs at once do no harm: they have the same order, and to remove what is gone is no
//! change. A run that ends anywhere leaves whole prefixes, but for one case: a chunk that is stored during the run after an
//! ancestor of it was looked at for the last time. It is no hit until that ancestor is stored again, with the next prompt
//! that has it.

mod parents;
mod removal;
#[cfg(test)]
mod tests;
mod tree;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, pin_mut, stream};
use serde::Serialize;

pub use self::parents::Parents;
use self::parents::parent_of;
pub use self::tree::{Bounds, Object, Tree};
use super::{Count, Inventory, Select, SpaceJson};
use crate::format::{
    CHAIN_LEN, ChunkHash, ChunkId, Header, HeaderError, KeyId, Space, SpaceKey, place_in_chain,
};
use crate::s3::object::{ErrorKind, ObjectError};

/// Requests at a time for headers, and for the second look.
const REQUESTS: usize = 64;
/// Pause between questions for the server's clock.
const TICK: Duration = Duration::from_millis(100);

/// What may stay. Without any limit nothing of the selection does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GcLimits {
    /// Bytes of the selection.
    pub bytes: Option<u64>,
    /// Bytes of each tenant.
    pub tenant_bytes: Option<u64>,
    /// Time since the last use: since a chunk, or one that needs it, was stored or refreshed.
    pub unused: Option<Duration>,
}

#[derive(Debug, Clone)]
pub struct GcSpec {
    pub select: Select,
    pub limits: GcLimits,
    /// In place of limits: what this key wrote goes, with all that follows it.
    pub key: Option<KeyId>,
    /// Objects to remove a second, at most.
    pub rate: u32,
    /// Chunks of the selection that fit in memory: some 250 bytes each.
    pub chunks_max: usize,
}

/// What a removal is doing.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    Listing(Count),
    /// Headers that were read, of those that must be.
    Reading(usize, usize),
    /// Objects that are gone, of those that shall be.
    Removing(Count, u64),
}

/// What shall go.
pub struct Plan {
    pub began: i64,
    /// Objects of the selection, and of what shall go of them.
    pub found: Count,
    pub planned: Count,
    /// Of what shall go, what the key wrote.
    pub of_key: Count,
    /// What shall go, by space.
    pub by_space: Vec<(SpaceKey, Count)>,
    /// Spaces that are left alone: their readable form is missing or of no use, so nothing says whose they are.
    pub unnamed: Vec<(SpaceKey, Count)>,
    tree: Tree,
    spaces: Vec<Listed>,
    /// In their order.
    nodes: Vec<usize>,
    /// Nodes with something that the key wrote; none without a key.
    marked: Vec<bool>,
    /// Nothing stays, so the spaces' readable forms go as well.
    is_whole: bool,
    rate: u32,
}

/// The result of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Collected {
    pub removed: Count,
    /// Objects that stay because they, or others that need them, were stored or used since the listing.
    pub kept: u64,
    /// It was told to end before it was done.
    pub stopped: bool,
}

/// Why nothing more is removed.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("can't use {}: {cause}", path.display())]
    File { path: PathBuf, cause: io::Error },
    #[error("{} is of {found}, not of {wanted}: give another file with --resume, or remove this one", path.display())]
    OtherPlace {
        path: PathBuf,
        found: String,
        wanted: String,
    },
    #[error(
        "there are more than {0} chunks, which is what may be in memory: select fewer (--tenant, --model, --space), or \
         raise --chunks-max ([gc] chunks); each takes some 250 bytes"
    )]
    TooMany(usize),
    #[error(
        "no space in the bucket has all that was selected; `kvgate usage` shows models, revisions and tenants"
    )]
    NothingSelected,
}

/// A space that was listed.
struct Listed {
    key: SpaceKey,
    /// None: its readable form is missing, or of no use.
    space: Option<Space>,
    group: u32,
    tenant: Option<u32>,
}

/// What is selected of the bucket.
#[derive(Default)]
struct Found {
    spaces: Vec<Listed>,
    unnamed: Vec<(SpaceKey, Count)>,
    objects: Vec<Object>,
    count: Count,
    by_tenant: HashMap<u32, u64>,
    /// By group.
    group_tenants: Vec<Option<u32>>,
}

impl Inventory {
    /// Waits for the server's clock to pass the second in which this was called, and returns that second. What is
    /// stored from now on is later.
    pub async fn begin_gc(&self) -> Result<i64, GcError> {
        let began = self.store.server_time(self.deadline()).await?;
        while self.store.server_time(self.deadline()).await? <= began {
            tokio::time::sleep(TICK).await;
        }
        Ok(began)
    }

    /// What shall go, of what was there at `began`. Changes nothing. Calls `step` now and then.
    pub async fn plan_gc(
        &self,
        spec: &GcSpec,
        began: i64,
        parents: &mut Parents,
        mut step: impl FnMut(Step),
    ) -> Result<Plan, GcError> {
        let found = self.select(spec, &mut step).await?;
        let seconds = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        let bounds = Bounds {
            bytes: spec.limits.bytes,
            tenant_bytes: spec.limits.tenant_bytes,
            unused_since: spec.limits.unused.map(|time| began.saturating_sub(seconds(time))),
        };
        let mut concerned = found.concerned(bounds);
        let tenants = found.group_tenants;
        let mut tree = Tree::new(found.objects);
        let mut marked = Vec::new();
        if let Some(key) = spec.key {
            marked = self.nodes_of_key(&tree, &found.spaces, key, &mut step).await?;
            concerned.fill(false);
            let of_key = (0..tree.nodes.len()).filter(|&node| marked[node]);
            of_key.for_each(|node| concerned[tree.group(node) as usize] = true);
        }
        let reads = |tree: &Tree, node| concerned.get(tree.group(node) as usize).copied().unwrap_or(false);
        self.read_parents(&tree, &found.spaces, parents, &reads, &mut step)
            .await?;
        tree.link(|tree, node| {
            let said = |object: &ChunkId| Some(parents.get(object));
            parent_of(objects_of(tree, &found.spaces, node), said)
                .ok()
                .flatten()
        });
        let nodes = match spec.key {
            Some(_) => tree.choose_marked(&marked, began),
            None => tree.choose(bounds, began, |group| {
                tenants.get(group as usize).copied().flatten()
            }),
        };
        let mut by_space: BTreeMap<SpaceKey, Count> = BTreeMap::new();
        let (mut planned, mut of_key) = (Count::default(), Count::default());
        for &node in &nodes {
            for object in &tree.objects[tree.nodes[node].objects.clone()] {
                planned.add(1, object.bytes);
                if marked.get(node).is_some_and(|is_marked| *is_marked) {
                    of_key.add(1, object.bytes);
                }
                let key = found.spaces[object.space as usize].key;
                by_space.entry(key).or_default().add(1, object.bytes);
            }
        }
        Ok(Plan {
            began,
            found: found.count,
            planned,
            of_key,
            by_space: by_space.into_iter().collect(),
            unnamed: found.unnamed,
            tree,
            spaces: found.spaces,
            nodes,
            marked,
            is_whole: bounds.is_none() && spec.key.is_none(),
            rate: spec.rate.max(1),
        })
    }

    /// Of the bucket, what is selected: objects and spaces, and how many bytes each tenant has.
    async fn select(&self, spec: &GcSpec, step: &mut impl FnMut(Step)) -> Result<Found, GcError> {
        let mut found = Found::default();
        let wanted_model = self.model_of(&spec.select).await?;
        let (mut groups, mut tenants) = (HashMap::new(), HashMap::new());
        let mut last = None::<(SpaceKey, Option<u32>)>;
        let pages = self.pages(None);
        pin_mut!(pages);
        while let Some(page) = pages.try_next().await? {
            for chunk in page.chunks {
                // Keys come space by space.
                let index = match last {
                    Some((space, index)) if space == chunk.space => index,
                    _ => {
                        let json = self.read_space(chunk.space).await?;
                        let space = match json {
                            SpaceJson::Good(space) => Some(space),
                            _ => None,
                        };
                        let takes = spec.select.takes(chunk.space, space.as_ref(), wanted_model);
                        if space.is_none() && !takes {
                            found.unnamed.push((chunk.space, Count::default()));
                        }
                        let index = takes.then(|| {
                            // None: the one that was given by its id.
                            let model = space.as_ref().map(Space::model_id);
                            let next = groups.len();
                            let group = *groups.entry(model).or_insert(next);
                            let next = tenants.len();
                            let tenant = space.as_ref().map(Space::tenant);
                            let tenant = tenant.map(|name| *tenants.entry(name.to_owned()).or_insert(next));
                            found.add_space(chunk.space, space, group, tenant)
                        });
                        last = Some((chunk.space, index));
                        index
                    }
                };
                let Some(index) = index else {
                    if let Some((_, count)) = found.unnamed.last_mut().filter(|of| of.0 == chunk.space) {
                        count.add(1, chunk.bytes);
                    }
                    continue;
                };
                if found.objects.len() >= spec.chunks_max {
                    return Err(GcError::TooMany(spec.chunks_max));
                }
                found.add(index, chunk.hash, chunk.bytes, chunk.modified);
            }
            step(Step::Listing(found.count));
        }
        match found.spaces.is_empty() && !spec.select.is_all() {
            true => Err(GcError::NothingSelected),
            false => Ok(found),
        }
    }

    /// By node, whether any of its objects names the key. Of a chunk nothing else is read.
    async fn nodes_of_key(
        &self,
        tree: &Tree,
        spaces: &[Listed],
        key: KeyId,
        step: &mut impl FnMut(Step),
    ) -> Result<Vec<bool>, GcError> {
        let is_plain = |space: &Listed| space.space.as_ref().is_some_and(|of| of.protection().is_none());
        let objects =
            (0..tree.nodes.len()).flat_map(|node| objects_of(tree, spaces, node).map(move |id| (node, id)));
        let objects: Vec<(usize, ChunkId)> = objects
            .filter(|(node, _)| {
                let first = tree.nodes[*node].objects.start;
                // A model's spaces are all protected or all plain.
                !is_plain(&spaces[tree.objects[first].space as usize])
            })
            .collect();
        let total = objects.len();
        let read = |(node, (space, chunk)): (usize, ChunkId)| async move {
            let named = self.named_key(space, &chunk).await?;
            Ok::<_, ObjectError>((node, named == Some(key)))
        };
        let answers = stream::iter(objects).map(read).buffer_unordered(REQUESTS);
        pin_mut!(answers);
        let (mut marked, mut done) = (vec![false; tree.nodes.len()], 0);
        while let Some((node, is_of_key)) = answers.try_next().await? {
            marked[node] |= is_of_key;
            done += 1;
            if done % 1000 == 0 {
                step(Step::Reading(done, total));
            }
        }
        Ok(marked)
    }

    /// Reads the parents that are not known yet.
    async fn read_parents(
        &self,
        tree: &Tree,
        spaces: &[Listed],
        parents: &mut Parents,
        reads: &impl Fn(&Tree, usize) -> bool,
        step: &mut impl FnMut(Step),
    ) -> Result<(), GcError> {
        let is_unknown = |node: &usize| {
            let said = |object: &ChunkId| parents.get(object).map(Some);
            reads(tree, *node) && parent_of(objects_of(tree, spaces, *node), said).is_err()
        };
        let unknown: Vec<usize> = (0..tree.nodes.len()).filter(is_unknown).collect();
        let total = unknown.len();
        let read = |node: usize| async move {
            let mut said = HashMap::new();
            while let Err(object) =
                parent_of(objects_of(tree, spaces, node), |object| said.get(object).copied())
            {
                let listed = spaces.iter().find(|listed| listed.key == object.0);
                let space = listed.and_then(|listed| listed.space.as_ref());
                said.insert(object, self.read_parent(object, space).await?);
            }
            Ok::<_, ObjectError>(said)
        };
        let answers = stream::iter(unknown).map(read).buffer_unordered(REQUESTS);
        pin_mut!(answers);
        let mut done = 0;
        while let Some(answer) = answers.try_next().await? {
            for (object, parent) in answer {
                if let Some(parent) = parent {
                    parents.add(object, parent)?;
                }
            }
            done += 1;
            if done % 1000 == 0 {
                parents.flush()?;
                step(Step::Reading(done, total));
            }
        }
        parents.flush()
    }

    /// What an object says of its chunk's parent. None: it is gone, damaged, or forged.
    async fn read_parent(
        &self,
        (key, chunk): ChunkId,
        space: Option<&Space>,
    ) -> Result<Option<ChunkHash>, ObjectError> {
        let protected = space.filter(|space| !space.protection().is_none());
        let bytes = protected.map_or(CHAIN_LEN, |space| space.layout().header_len());
        let name = self.keys.chunk(key, &chunk);
        let front = match self.store.read_front(&name, bytes, self.deadline()).await {
            Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::Length { .. }) => {
                return Ok(None);
            }
            front => front?,
        };
        let unchecked = || {
            place_in_chain(&front)
                .filter(|place| place.0 == chunk)
                .map(|place| place.1)
        };
        let Some(space) = protected else {
            return Ok(unchecked());
        };
        let header = Header::parse(&front);
        let parent =
            header.and_then(|header| header.expect(space, &chunk, &self.keyring).map(|_| header.parent));
        Ok(match parent {
            Ok(parent) => Some(parent),
            Err(HeaderError::NoKey { .. }) => unchecked(),
            Err(_) => None,
        })
    }
}

/// A node's objects.
fn objects_of(tree: &Tree, spaces: &[Listed], node: usize) -> impl Iterator<Item = ChunkId> {
    let objects = tree.objects[tree.nodes[node].objects.clone()].iter();
    objects.map(|object| (spaces[object.space as usize].key, object.hash))
}

impl Plan {
    /// Whether the object was listed, so that what it said of its parent is worth keeping for the next run.
    pub fn has(&self, (space, chunk): &ChunkId) -> bool {
        let Ok(space) = self.spaces.binary_search_by_key(space, |listed| listed.key) else {
            return false;
        };
        let node = self.tree.find(self.spaces[space].group, chunk);
        node.is_some_and(|node| {
            let objects = &self.tree.objects[self.tree.nodes[node].objects.clone()];
            objects.iter().any(|object| object.space as usize == space)
        })
    }
}

impl Found {
    fn add_space(&mut self, key: SpaceKey, space: Option<Space>, group: usize, tenant: Option<usize>) -> u32 {
        let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
        let tenant = tenant.map(number);
        if group == self.group_tenants.len() {
            self.group_tenants.push(tenant);
        }
        self.spaces.push(Listed {
            key,
            space,
            group: number(group),
            tenant,
        });
        number(self.spaces.len() - 1)
    }

    fn add(&mut self, space: u32, hash: ChunkHash, bytes: u64, modified: i64) {
        let of = &self.spaces[space as usize];
        self.count.add(1, bytes);
        if let Some(tenant) = of.tenant {
            *self.by_tenant.entry(tenant).or_default() += bytes;
        }
        let is_extra = of.space.as_ref();
        let is_extra = is_extra.is_some_and(|space| !space.kind().is_full() || !space.draft().is_empty());
        self.objects.push(Object {
            group: of.group,
            hash,
            space,
            is_extra,
            bytes,
            modified,
        });
    }

    /// By group, whether anything of it may have to go. Of the others no header is read.
    fn concerned(&self, bounds: Bounds) -> Vec<bool> {
        let is_over = bounds.is_none() || bounds.bytes.is_some_and(|most| self.count.bytes > most);
        let mut concerned = vec![is_over; self.group_tenants.len()];
        for (group, tenant) in self.group_tenants.iter().enumerate() {
            let bytes = tenant.and_then(|tenant| self.by_tenant.get(&tenant));
            concerned[group] |=
                bytes.is_some_and(|bytes| bounds.tenant_bytes.is_some_and(|most| *bytes > most));
        }
        if let Some(since) = bounds.unused_since {
            for object in self.objects.iter().filter(|object| object.modified < since) {
                concerned[object.group as usize] = true;
            }
        }
        concerned
    }
}
