//! What was planned is removed in batches, at a rate. Each object is looked at again just before.

use std::collections::VecDeque;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, pin_mut, stream};
use tokio::time::Instant;

use super::{Collected, Count, GcError, Inventory, Object, Plan, REQUESTS, Step};
use crate::s3::object::ErrorKind;

/// Objects of a batch at most; S3's own limit is 1000.
const BATCH_MAX: u32 = 500;
/// Batches a second, where the rate allows it.
const BATCHES: u32 = 4;

impl Inventory {
    /// Removes what was planned, at the plan's rate. Before each batch it asks `may_go_on`. Calls `step` after each.
    pub async fn remove_planned(
        &self,
        plan: &Plan,
        mut may_go_on: impl FnMut() -> bool,
        mut step: impl FnMut(Step),
    ) -> Result<Collected, GcError> {
        let mut collected = Collected::default();
        let mut stays = vec![false; plan.tree.nodes.len()];
        let batch_max = (plan.rate / BATCHES).clamp(1, BATCH_MAX) as usize;
        let mut nodes: VecDeque<usize> = plan.nodes.iter().copied().collect();
        let (started, mut done) = (Instant::now(), 0);
        while !nodes.is_empty() {
            // After what was done so far the rate allows the next batch.
            let due = Duration::from_secs_f64(done as f64 / f64::from(plan.rate));
            tokio::time::sleep_until(started + due).await;
            if !may_go_on() {
                collected.stopped = true;
                break;
            }
            let batch = plan.tree.batch(&mut nodes, batch_max);
            done += batch
                .iter()
                .map(|&node| plan.tree.nodes[node].objects.len())
                .sum::<usize>();
            self.remove_batch(plan, &batch, &mut stays, &mut collected)
                .await?;
            step(Step::Removing(collected.removed, plan.planned.chunks));
        }
        if plan.is_whole && !collected.stopped {
            self.remove_empty_spaces(plan).await?;
        }
        Ok(collected)
    }

    /// Looks at each object again, and removes those that are still what was listed.
    async fn remove_batch(
        &self,
        plan: &Plan,
        batch: &[usize],
        stays: &mut [bool],
        collected: &mut Collected,
    ) -> Result<(), GcError> {
        let tree = &plan.tree;
        let key_of = |object: &Object| {
            self.keys
                .chunk(plan.spaces[object.space as usize].key, &object.hash)
        };
        let look = |(node, index): (usize, usize)| {
            let object = &tree.objects[index];
            let key = key_of(object);
            async move {
                match self.store.head(&key, self.deadline()).await {
                    Ok(meta) => {
                        let same = meta.version.modified == object.modified && meta.len == object.bytes;
                        let etag = meta.version.etag.to_string();
                        Ok((node, index, Some((key, etag)).filter(|_| same), !same))
                    }
                    Err(error) if error.kind == ErrorKind::NotFound => Ok((node, index, None, false)),
                    Err(error) => Err(error),
                }
            }
        };
        let objects = batch
            .iter()
            .flat_map(|&node| tree.nodes[node].objects.clone().map(move |index| (node, index)));
        let objects: Vec<_> = objects.filter(|(node, _)| !stays[*node]).collect();
        let looked: Vec<_> = stream::iter(objects)
            .map(look)
            .buffered(REQUESTS)
            .try_collect()
            .await?;
        for &(node, _, _, has_changed) in &looked {
            if has_changed {
                let is_marked = |node: usize| plan.marked.get(node).is_some_and(|is_marked| *is_marked);
                let kept = tree
                    .with_ancestors(node)
                    .filter(|&of| of == node || !is_marked(of));
                kept.for_each(|node| stays[node] = true);
            }
        }
        let kept = batch.iter().filter(|&&node| stays[node]);
        collected.kept += kept
            .map(|&node| tree.nodes[node].objects.len() as u64)
            .sum::<u64>();
        let mut gone = Vec::new();
        let mut sum = Count::default();
        for (node, index, object, _) in looked {
            if let Some(object) = object.filter(|_| !stays[node]) {
                sum.add(1, tree.objects[index].bytes);
                gone.push(object);
            }
        }
        if gone.is_empty() {
            return Ok(());
        }
        let refused = self.store.delete_matching(&gone, self.deadline()).await? as u64;
        collected.kept += refused;
        collected
            .removed
            .add(sum.chunks - refused.min(sum.chunks), sum.bytes);
        Ok(())
    }

    /// Of spaces without a chunk the readable form goes, too.
    async fn remove_empty_spaces(&self, plan: &Plan) -> Result<(), GcError> {
        for space in &plan.spaces {
            let pages = self.pages(Some(space.key));
            pin_mut!(pages);
            let first = pages.try_next().await?.unwrap_or_default();
            if first.chunks.is_empty() && !first.spaces.is_empty() {
                self.remove_space_json(space.key).await?;
            }
        }
        Ok(())
    }
}
