//! Removal from S3 as a task of the daemons: each of them that has a limit in `[gc]` tries to lead, and the one that does
//! lists the bucket now and then, and removes what is beyond the limits. So a fleet needs no cron.
//!
//! It needs conditional writes, so that there is a leader. On a server that ignores them the task says so once, and ends.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::cache::gateway::GatewayOptions;
use crate::config::Config;
use crate::config::units::ByteSize;
use crate::inventory::{
    Collected, Count, GcError, GcLimits, GcSpec, Inventory, Lease, Parents, Select, Step,
};
use crate::node::{Node, host_name};
use crate::s3::object::ObjectStore;

/// Pause between looks at what S3 can do.
const LOOK: Duration = Duration::from_millis(500);

/// None: no limit is set.
fn spec(config: &Config) -> Option<GcSpec> {
    let limits = GcLimits {
        bytes: config.gc.size.map(ByteSize::bytes),
        tenant_bytes: config.gc.tenant_size.map(ByteSize::bytes),
        unused: config.gc.unused,
    };
    (limits != GcLimits::default()).then(|| GcSpec {
        select: Select::default(),
        limits,
        key: None,
        rate: config.gc.rate,
        chunks_max: config.gc.chunks as usize,
    })
}

/// Leads and removes for as long as it is polled.
pub async fn collect(config: Config, node: Node, store: Arc<dyn ObjectStore>) {
    let Some(spec) = spec(&config) else { return };
    let capabilities = loop {
        match node.gateway().known_capabilities() {
            Some(capabilities) => break capabilities,
            None => tokio::time::sleep(LOOK).await,
        }
    };
    if !(capabilities.if_none_match && capabilities.if_match) {
        tracing::error!(
            "[gc] does nothing: this S3 server ignores conditional PUTs, so nodes can't agree which of them removes. Take \
             the limits out of [gc], and run `kvgate gc` from one place, by cron for example"
        );
        return;
    }
    let keys = GatewayOptions::from(&config).keys;
    let holder = format!(
        "{}-{}-{:016x}",
        host_name(),
        std::process::id(),
        fastrand::u64(..)
    );
    let lease = Lease::new(Arc::clone(&store), keys.own("gc-lease"), holder, config.gc.lease);
    let (tell, until) = watch::channel(None);
    let keyring = node.gateway().keyring().clone();
    let inventory = Inventory::new(store, keys, keyring, config.s3.request_timeout);
    tokio::join!(
        keep(&node, lease, config.gc.lease, tell),
        work(&node, inventory, spec, config.gc.every, until)
    );
}

/// Holds the lease whenever that is possible, and tells until when.
async fn keep(node: &Node, mut lease: Lease, term: Duration, tell: watch::Sender<Option<Instant>>) {
    loop {
        if let Err(error) = lease.hold().await {
            tracing::debug!(%error, "the lease for [gc]");
        }
        let until = lease.until();
        if until.is_some() != tell.borrow().is_some() {
            let said = match until {
                Some(_) => "this node removes from S3 what is beyond [gc]",
                None => "another node may remove from S3 now",
            };
            tracing::info!("{said}");
        }
        node.gc().set_leads(until.is_some());
        tell.send_replace(until);
        // Three times a term, and not all nodes at once.
        tokio::time::sleep(term.mul_f64(fastrand::f64().mul_add(0.05, 0.25))).await;
    }
}

async fn work(
    node: &Node,
    inventory: Inventory,
    spec: GcSpec,
    every: Duration,
    mut until: watch::Receiver<Option<Instant>>,
) {
    // What a leader has read, it need not read the next time.
    let mut parents = Parents::default();
    loop {
        let leads = || until.borrow().is_some_and(|until| Instant::now() < until);
        if !leads() {
            parents = Parents::default();
            // The other side lives as long as this.
            let _ = until.changed().await;
            continue;
        }
        match once(&inventory, &spec, &mut parents, leads, node).await {
            Ok(done) if done.removed.chunks + done.kept > 0 => tracing::info!(
                objects = done.removed.chunks,
                bytes = done.removed.bytes,
                kept = done.kept,
                "removed from S3 what was beyond [gc]"
            ),
            Ok(_) => {}
            Err(error) => {
                node.gc().add_failed();
                tracing::warn!(%error, "[gc] removed nothing more; it tries again after [gc] every");
            }
        }
        tokio::time::sleep(every).await;
    }
}

async fn once(
    inventory: &Inventory,
    spec: &GcSpec,
    parents: &mut Parents,
    leads: impl Fn() -> bool,
    node: &Node,
) -> Result<Collected, GcError> {
    let began = inventory.begin_gc().await?;
    let plan = inventory.plan_gc(spec, began, parents, |_| ()).await?;
    parents.settle(|chunk| plan.has(chunk), None)?;
    if !plan.unnamed.is_empty() {
        let (spaces, bytes) = (
            plan.unnamed.len(),
            plan.unnamed.iter().map(|of| of.1.bytes).sum::<u64>(),
        );
        tracing::warn!(
            spaces,
            bytes,
            "[gc] leaves spaces alone that have no space.json that can be read, and counts them for no limit: `kvgate ls` shows \
             them, and `kvgate gc --space` removes one"
        );
    }
    let mut before = Count::default();
    let step = |step| {
        if let Step::Removing(removed, _) = step {
            let (objects, bytes) = (removed.chunks - before.chunks, removed.bytes - before.bytes);
            node.gc().add_removed(objects, bytes);
            before = removed;
        }
    };
    inventory.remove_planned(&plan, leads, step).await
}
