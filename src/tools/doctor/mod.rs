//! `kvgate doctor`: every part that a node needs, tried one after the other, each with what to do.
//!
//! **Mechanism.** A check returns [`Finding`]s: what was seen, and what to type next. The S3 server is a chain: where a link
//! fails, those behind it are "not checked, because". All else is asked whatever S3 says. Each check has the same time
//! limit, so that nothing hangs. The requests are those of the product: [`S3`], its resolver and its connections.
//!
//! **What it leaves.** Objects are written under `.kvgate/doctor-...` of the prefix and removed at the end, also when the
//! examination is stopped: that ends it between two requests, not within one. What one leaves that is killed, a later one
//! removes after a day. On disks it opens files without a name.
//!
//! **Not for** watching a node that runs: `kvgate stat` and the metrics do that. It knows nothing of printing.
//!
//! | file            | what                                                            |
//! |-----------------|-----------------------------------------------------------------|
//! | `configuration` | the file, the environment, and what must fit together            |
//! | `names`         | DNS: records, TTL, answers by UDP and TCP compared               |
//! | `addresses`     | each address: connection, TLS, latency, clock                    |
//! | `account`       | credentials, region, bucket, where the bucket's name is           |
//! | `abilities`     | what the server can do                                           |
//! | `removal`       | the bucket's rules, `[gc]`, versions                             |
//! | `transfer`      | a short write and read, verified, with its speed                 |
//! | `own_objects`   | the objects that are written, and their removal                  |
//! | `memory`        | the arena's folder, huge pages, limits                           |
//! | `disks`         | each disk: direct I/O, room, file system, rights                 |
//! | `gpus`          | the driver and its devices                                       |
//! | `listeners`     | the socket's folder, the port, the token                         |
//! | `secrets`       | the keys of tenants, the peers' token and certificates           |
//! | `engines`       | each Python: engines, and whether the connector loads there      |
//! | `spaces`        | the spaces of two nodes, and the fields in which they differ     |

mod abilities;
mod account;
mod addresses;
mod configuration;
mod disks;
mod engines;
mod finding;
mod gpus;
mod listeners;
mod memory;
mod names;
mod own_objects;
mod removal;
mod secrets;
mod spaces;
mod system;
mod transfer;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

pub use finding::{Finding, Verdict};

use self::account::Account;
use self::own_objects::OwnObjects;
use crate::cache::gateway::{OpenError, s3_options};
use crate::config::units::show_duration;
use crate::config::{Config, ConfigError, LoadedConfig};
use crate::format::KeyPrefix;
use crate::protocol::choices;
use crate::s3::object::{S3, S3Options};

choices! {
    /// A part of the examination.
    Part {
        /// Names and addresses, the account, the server's abilities.
        S3 = "s3",
        /// The short write and read with its speed.
        Transfer = "transfer",
        /// The arena, and the limits of memory.
        Memory = "memory",
        /// The disks.
        Disks = "disks",
        /// The GPUs.
        Gpu = "gpu",
        /// Socket and port.
        Api = "api",
        /// The Pythons with their engines.
        Engines = "engines",
    }
}

/// What to examine, and how long.
#[derive(Debug, Clone)]
pub struct DoctorOptions {
    /// Longest time of one check.
    pub timeout: Duration,
    pub skip: Vec<Part>,
    /// Bytes that the transfer writes and reads.
    pub transfer_bytes: usize,
    /// Pythons to look for engines in; empty: those on the path.
    pub pythons: Vec<PathBuf>,
    /// Nodes whose spaces are compared: URLs, sockets, or files with a status or a space. With one, the other is this node.
    pub compare: Vec<String>,
}

/// Ends an examination early. Clones are the same.
#[derive(Debug, Clone)]
pub struct Stop(Arc<watch::Sender<bool>>);

impl Default for Stop {
    fn default() -> Self {
        Self(Arc::new(watch::channel(false).0))
    }
}

impl Stop {
    pub fn now(&self) {
        self.0.send_replace(true);
    }

    pub fn is_set(&self) -> bool {
        *self.0.borrow()
    }

    async fn wait(&self) {
        // The sender is here.
        let _ = self.0.subscribe().wait_for(|stop| *stop).await;
    }

    /// None when it came first.
    async fn or<T>(&self, what: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.wait() => None,
            done = what => Some(done),
        }
    }
}

/// Examines everything, and tells each finding as soon as it is known. Returns when nothing of it is left.
pub async fn examine(
    loaded: &Result<LoadedConfig, ConfigError>,
    options: &DoctorOptions,
    stop: &Stop,
    mut tell: impl FnMut(Finding),
) {
    let wanted = |part: Part| !options.skip.contains(&part) && !stop.is_set();
    let limit = options.timeout;
    // They take longest, and use another core.
    let engines = wanted(Part::Engines).then(|| {
        let (pythons, stop) = (options.pythons.clone(), stop.clone());
        tokio::spawn(async move { stop.or(engines::check(&pythons, limit)).await })
    });
    configuration::check(loaded).into_iter().for_each(&mut tell);
    match loaded {
        Ok(LoadedConfig { config, .. }) => {
            if wanted(Part::S3) {
                s3(config, options, stop, &mut tell).await;
            }
            local(config, options, stop, &mut tell).await;
        }
        Err(_) => {
            for check in ["dns", "addresses", "bucket", "arena", "disks", "socket"] {
                tell(Finding::not_checked(check, "the configuration can't be read"));
            }
        }
    }
    if let Some(engines) = engines {
        let found = engines.await.ok().flatten().unwrap_or_default();
        found.into_iter().for_each(&mut tell);
    }
}

/// The chain to the bucket, and back.
async fn s3(config: &Config, options: &DoctorOptions, stop: &Stop, tell: &mut impl FnMut(Finding)) {
    let limit = options.timeout;
    let connected = async {
        let s3_options = bounded(s3_options(config)?, limit);
        let s3 = S3::connect(&s3_options).await?;
        Ok::<_, OpenError>((Arc::new(s3), s3_options))
    };
    let (s3, s3_options) = match connected.await {
        Ok(connected) => connected,
        Err(error) => {
            let advice = match &error {
                OpenError::NoBucket => "Give --bucket NAME, [s3] bucket or KVGATE__S3__BUCKET",
                _ => "Correct that key of [s3]: `kvgate config show` says where its value comes from",
            };
            tell(Finding::failed("configuration", error.to_string(), advice));
            return unreached(&["dns", "addresses", "clock"], "[s3] is not complete", tell);
        }
    };
    let no_time = |check| vec![late(check, limit)];
    let Some(found) = stop
        .or(tokio::time::timeout(limit, names::check(&s3, &s3_options)))
        .await
    else {
        return;
    };
    let (findings, places) = found.unwrap_or_else(|_| (no_time("dns"), Vec::new()));
    findings.into_iter().for_each(&mut *tell);
    if places.is_empty() {
        return unreached(
            &["addresses", "clock"],
            "the server's name gives no address",
            tell,
        );
    }
    let visits = addresses::check(&s3, &s3_options, &places, limit);
    let Some((findings, reached)) = stop.or(visits).await else {
        return;
    };
    findings.into_iter().for_each(&mut *tell);
    if !reached {
        return unreached(&[], "no address of the server answers", tell);
    }
    let Some((findings, account)) = stop.or(account::check(&s3, &s3_options, limit)).await else {
        return;
    };
    findings.into_iter().for_each(&mut *tell);
    match account {
        Account::Refused(because) => not_tried(&because, tell),
        // It is not dropped within a request: what it writes, it removes.
        Account::Accepted => objects(config, &s3, options, stop, tell).await,
    }
}

async fn objects(
    config: &Config,
    s3: &Arc<S3>,
    options: &DoctorOptions,
    stop: &Stop,
    tell: &mut impl FnMut(Finding),
) {
    let limit = options.timeout;
    let keys = KeyPrefix::new(&config.s3.prefix);
    let own = OwnObjects::new(Arc::clone(s3), &keys);
    let (findings, rights) = abilities::rights(s3, config, &own, limit).await;
    findings.into_iter().for_each(&mut *tell);
    if !stop.is_set() {
        let found = abilities::check(s3, config, &own, &rights, limit).await;
        found.into_iter().for_each(&mut *tell);
    }
    let skips = options.skip.contains(&Part::Transfer);
    if rights.may_write && !stop.is_set() && !skips {
        let found = transfer::check(s3, &own, options.transfer_bytes, limit, stop).await;
        found.into_iter().for_each(&mut *tell);
    } else if !skips && !stop.is_set() {
        tell(Finding::not_checked("transfer", "nothing may be written"));
    }
    own.remove(limit).await.into_iter().for_each(&mut *tell);
    if rights.may_write && !stop.is_set() {
        let left = OwnObjects::remove_left(s3, &keys, limit).await;
        left.into_iter().for_each(tell);
    }
}

/// This machine, S3 aside.
async fn local(config: &Config, options: &DoctorOptions, stop: &Stop, tell: &mut impl FnMut(Finding)) {
    let wanted = |part: Part| !options.skip.contains(&part) && !stop.is_set();
    let limit = options.timeout;
    if config.keys.file.is_some() && !stop.is_set() {
        let keys = config.keys.clone();
        let read = move || secrets::keys(&keys).into_iter().collect();
        let found = stop.or(blocking("keys", limit, read)).await;
        found.into_iter().flatten().for_each(&mut *tell);
    }
    if !stop.is_set() {
        secrets::peers(config).into_iter().for_each(&mut *tell);
    }
    if wanted(Part::Memory) {
        let config = config.clone();
        let found = stop
            .or(blocking("arena", limit, move || memory::check(&config)))
            .await;
        found.into_iter().flatten().for_each(&mut *tell);
    }
    if wanted(Part::Disks) {
        for path in config.disk.paths.clone() {
            let disk = config.disk.clone();
            let found = stop
                .or(blocking("disk", limit, move || disks::check(&path, &disk)))
                .await;
            found.into_iter().flatten().for_each(&mut *tell);
        }
        if config.disk.paths.is_empty() {
            tell(Finding::ok(
                "disk",
                "no [disk] paths: chunks are in memory and on S3 alone",
            ));
        }
    }
    if wanted(Part::Gpu) {
        let found = stop.or(blocking("gpu", limit, gpus::check)).await;
        found.into_iter().flatten().for_each(&mut *tell);
    }
    if wanted(Part::Api) {
        let found = stop
            .or(tokio::time::timeout(limit, listeners::check(config, limit)))
            .await;
        let found = found.map(|found| found.unwrap_or_else(|_| vec![late("socket", limit)]));
        found.into_iter().flatten().for_each(&mut *tell);
    }
    if !options.compare.is_empty() && !stop.is_set() {
        let compared = spaces::check(config, &options.compare, limit);
        let found = stop.or(tokio::time::timeout(2 * limit, compared)).await;
        let found = found.map(|found| found.unwrap_or_else(|_| vec![late("spaces", 2 * limit)]));
        found.into_iter().flatten().for_each(&mut *tell);
    }
}

/// A check that waits for the system. One that hangs is left behind.
async fn blocking(
    check: &'static str,
    limit: Duration,
    what: impl FnOnce() -> Vec<Finding> + Send + 'static,
) -> Vec<Finding> {
    match tokio::time::timeout(limit, tokio::task::spawn_blocking(what)).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => vec![Finding::failed(
            check,
            error.to_string(),
            "Report this: it is a bug of kvgate",
        )],
        Err(_) => vec![late(check, limit)],
    }
}

fn late(check: &'static str, limit: Duration) -> Finding {
    let seen = format!("no result within {}", show_duration(limit));
    let advice = "Look why it hangs (`dmesg`, the network); --timeout gives a check more time";
    Finding::failed(check, seen, advice)
}

/// No request waits longer than a check may take.
fn bounded(mut s3: S3Options, limit: Duration) -> S3Options {
    for timeout in [
        &mut s3.connect_timeout,
        &mut s3.read_timeout,
        &mut s3.request_timeout,
        &mut s3.dns.timeout,
    ] {
        *timeout = (*timeout).min(limit);
    }
    s3
}

fn unreached(checks: &[&'static str], because: &str, tell: &mut impl FnMut(Finding)) {
    for &check in checks {
        tell(Finding::not_checked(check, because));
    }
    for check in ["credentials", "region", "bucket"] {
        tell(Finding::not_checked(check, because));
    }
    not_tried(because, tell);
}

fn not_tried(because: &str, tell: &mut impl FnMut(Finding)) {
    for check in ["read", "write", "abilities", "transfer"] {
        tell(Finding::not_checked(check, because));
    }
}
