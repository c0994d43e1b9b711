//! The daemon's limits, made from the configuration.

use std::sync::Arc;
use std::time::Duration;

use crate::arena::ArenaOptions;
use crate::cache::admission::AdmissionOptions;
use crate::cache::gateway::{BehindOptions, DiskTier, Flow, RefreshOptions, TierOptions, s3_options};
use crate::cache::peers::{PeerOptions, PeerTls, Peers};
use crate::cache::tier::{Disk, DiskOptions, EventOptions, MemoryOptions};
use crate::config::units::ByteSize;
use crate::config::{self, Config, PeerName};
use crate::node::NodeOptions;
use crate::node::api::{ApiOptions, Listening, OtlpOptions};
use crate::s3::dns::AddressSource;

/// The arena's file if the configuration names none.
const ARENA_PATH: &str = "/dev/shm/kvgate.arena";
/// Pause before the first retry of a chunk that could not be stored.
const RETRY_BASE: Duration = Duration::from_millis(250);

pub fn arena(config: &Config) -> ArenaOptions {
    ArenaOptions {
        size: bytes(config.arena.size),
        ticket_bytes: bytes(config.load.reserve),
        path: Some(config.arena.path.clone().unwrap_or_else(|| ARENA_PATH.into())),
        // A user that may open the socket may map the arena.
        mode: config.api.socket_mode,
        huge_pages: config.arena.huge_pages,
        prefault: config.arena.prefault,
        mlock: config.arena.mlock,
    }
}

/// Checks that the arena has room for the parts of it that are promised. Fails with a sentence.
pub fn has_room(config: &Config) -> Result<(), String> {
    let (arena, reserve, behind) = (config.arena.size, config.load.reserve, config.store.write_behind);
    if reserve.bytes() + behind.bytes() > arena.bytes() {
        return Err(format!(
            "[arena] size, {arena}, has no room for [load] reserve, {reserve}, and [store] write_behind, {behind}: raise it, or lower these"
        ));
    }
    Ok(())
}

/// None: no peers are asked.
pub fn peers(config: &Config) -> Option<PeerOptions> {
    let peers = &config.peers;
    if peers.members.is_empty() {
        return None;
    }
    let source = |name: &PeerName| match name.clone() {
        PeerName::Host(name, port) => AddressSource::Host { name, port },
        PeerName::Srv(name) => AddressSource::Srv { name },
    };
    let files = (
        &peers.cert_file,
        &peers.key_file,
        &peers.ca_file,
        &peers.server_name,
    );
    let tls = match files {
        (Some(cert_file), Some(key_file), Some(ca_file), Some(name)) => Some(PeerTls {
            cert_file: cert_file.clone(),
            key_file: key_file.clone(),
            ca_file: ca_file.clone(),
            name: name.clone(),
        }),
        _ => None,
    };
    let s3 = s3_options(config).ok()?;
    Some(PeerOptions {
        members: peers.members.iter().map(source).collect(),
        listen: peers.listen,
        token_file: peers.token_file.clone(),
        tls,
        first_byte: peers.first_byte,
        stall: peers.stall,
        connections_max: peers.connections as usize,
        idle_timeout: config.s3.idle_timeout,
        breaker: s3.endpoints.breaker,
        owners: peers.owners,
        hot: peers.hot,
        hot_chunks: peers.hot_chunks as usize,
        holder_ttl: config.lookup.present_ttl,
        denied_ttl: config.lookup.absent_ttl,
        serve_bytes: bytes(peers.budget),
        dns: s3.dns,
    })
}

pub fn tiers(config: &Config, disk: Option<Disk>, peers: Option<Arc<Peers>>) -> TierOptions {
    TierOptions {
        memory: MemoryOptions {
            policy: config.memory.policy,
            ttl: config.memory.ttl,
            watermark_percent: config.memory.watermark,
            tenant_bytes: config.memory.tenant_max.map(bytes),
            min_accesses: config.memory.min_accesses,
        },
        memory_flow: flow(config.memory.lookup, config.memory.store),
        disk: disk.map(|disk| DiskTier {
            disk,
            flow: flow(config.disk.lookup, config.disk.store),
            promotes: config.disk.promote,
        }),
        peers,
        behind: BehindOptions {
            bytes_max: bytes(config.store.write_behind),
            when_full: config.store.when_full,
            deadline: config.store.deadline,
            retry_base: RETRY_BASE.min(config.store.retry_max),
            retry_max: config.store.retry_max,
        },
        admission: (config.store.admit == config::Admit::Auto).then(|| AdmissionOptions {
            bytes_per_s: config.store.admit_rate.bytes(),
            chunks_max: config.store.admit_chunks as usize,
        }),
        promote_bytes_max: bytes(config.store.in_flight),
        load_deadline: config.load.deadline,
        shares_loads: true,
        events: EventOptions {
            chunks_max: config.events.chunks as usize,
            removals_max: config.events.removals as usize,
        },
    }
}

/// None: nothing is refreshed.
pub fn refresh(config: &Config) -> Option<RefreshOptions> {
    Some(RefreshOptions {
        after: config.refresh.after?,
        rate: config.refresh.rate,
        queue: config.refresh.queue as usize,
        known: config.refresh.known as usize,
    })
}

/// None: there are no disks.
pub fn disk(config: &Config) -> Option<DiskOptions> {
    let disk = &config.disk;
    if disk.paths.is_empty() {
        return None;
    }
    Some(DiskOptions {
        paths: disk.paths.clone(),
        size_bytes: disk.size.bytes(),
        watermark_percent: disk.watermark,
        policy: disk.policy,
        ttl: disk.ttl,
        failures: disk.failures,
        timeout: disk.timeout,
        retry: disk.retry,
        depth: disk.depth as usize,
        lost_bytes: disk.lost_max.bytes(),
        tenant_bytes: disk.tenant_max.map(ByteSize::bytes),
        sends_declined: config.store.admit == config::Admit::All,
    })
}

pub fn node(config: &Config) -> NodeOptions {
    NodeOptions {
        sessions_max: config.api.sessions as usize,
        spaces_max: config.api.spaces as usize,
        load_window_bytes: bytes(config.load.window),
        engine_bytes: percent_of(
            bytes(config.arena.size).saturating_sub(bytes(config.load.reserve)),
            config.load.engine_share,
        ),
        join_grace: config.load.join_grace,
        stalled: config.api.stalled,
        commit_timeout: config.store.commit_timeout,
        grace: config.api.grace,
        pin_max: config.memory.pin_max,
        prefetches: config.load.prefetches as usize,
        may_start_without_s3: config.api.degraded,
        log_repeat: config.log.repeat,
    }
}

pub fn api(config: &Config) -> ApiOptions {
    ApiOptions {
        connections_max: config.api.connections as usize,
        body_max: bytes(config.api.body_max),
        hashes_max: config.api.hashes_max as usize,
        timeout: config.api.timeout,
        strategy: config.lookup.strategy,
        lookup_deadline: config.lookup.deadline,
        load_deadline: config.load.deadline,
        chunk_bytes: bytes(config.load.window),
        token_file: config.api.token_file.clone(),
        hosts: config.api.hosts.clone(),
        note_bytes: bytes(config.events.note_size),
        event_wait: config.events.wait,
        history: config.api.history,
        traces_max: config.api.traces as usize,
        spans_max: config.api.trace_spans as usize,
        otlp: config.otlp.endpoint.clone().map(|endpoint| OtlpOptions {
            endpoint,
            sample_percent: config.otlp.sample,
            queue: u64::from(config.otlp.queue),
            timeout: config.otlp.timeout,
            ca_file: config.otlp.ca_file.clone(),
            log_repeat: config.log.repeat,
        }),
    }
}

pub fn listening(config: &Config) -> Listening {
    Listening {
        socket: config.api.socket.clone(),
        socket_mode: config.api.socket_mode,
        listen: config.api.listen,
        log_repeat: config.log.repeat,
    }
}

fn flow(lookup: config::Lower, store: config::Lower) -> Flow {
    Flow {
        asks_lower: lookup == config::Lower::Lower,
        stores_lower: store == config::Lower::Lower,
    }
}

fn percent_of(bytes: usize, percent: u32) -> usize {
    bytes / 100 * percent as usize
}

fn bytes(size: ByteSize) -> usize {
    usize::try_from(size.bytes()).unwrap_or(usize::MAX)
}
