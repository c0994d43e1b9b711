//! One lookup of a name: A, AAAA or SRV records, over the search list.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use futures::stream::{self, StreamExt};
use hickory_resolver::net::NetError;
use hickory_resolver::proto::rr::{Name, RecordType};
use tokio::time::Instant;

use super::answer::{Records, addresses, srv_targets};
use super::error::DnsError;
use super::servers::{Carrier, NameServers};
use super::watch::{AddressLookup, AddressSource, DnsOptions, NameAddresses};

/// Targets of a SRV name that are resolved at a time. Each is two questions, and hickory takes at most 32 at a time
/// for a server.
const TARGETS_AT_A_TIME: usize = 16;

const FAMILIES: [RecordType; 2] = [RecordType::A, RecordType::AAAA];

/// Looks one source up, again and again.
pub(super) struct NameLookup {
    options: Arc<DnsOptions>,
    source: AddressSource,
    /// The addresses that each family of each name had when it was answered last. A family that fails keeps it: the
    /// other one's addresses may be those that can't be reached from here.
    kept: HashMap<(Name, RecordType), Vec<IpAddr>>,
}

/// The outcome of one question.
struct DnsAnswer {
    name: Name,
    kind: RecordType,
    records: Result<Records, DnsError>,
}

impl NameLookup {
    pub fn new(options: Arc<DnsOptions>, source: AddressSource) -> Self {
        let kept = HashMap::new();
        Self {
            options,
            source,
            kept,
        }
    }

    async fn run(&mut self, carrier: Carrier) -> Result<NameAddresses, DnsError> {
        let deadline = Instant::now() + self.options.timeout;
        let options = Arc::clone(&self.options);
        let servers = tokio::task::spawn_blocking(move || NameServers::read(&options, carrier))
            .await
            .unwrap_or_else(|error| Err(NetError::Msg(error.to_string())))
            .map_err(|cause| DnsError::System {
                name: self.source.name().to_owned(),
                cause: Box::new(cause),
            })?;
        match &self.source {
            AddressSource::Host { name, port } => {
                let answers = ask_candidates(&servers, name, &FAMILIES, deadline).await?;
                let port = *port;
                self.gather(answers.into_iter().map(|answer| (answer, port)), u32::MAX)
            }
            AddressSource::Srv { name } => {
                let (targets, ttl) = targets(&servers, name, deadline).await?;
                let ask = |(name, port)| {
                    let servers = &servers;
                    async move {
                        let answers = ask_each(servers, &name, &FAMILIES, deadline).await;
                        answers.into_iter().map(move |answer| (answer, port))
                    }
                };
                // In order, so that of several failures always the same one is told.
                let answers = stream::iter(targets).map(ask).buffered(TARGETS_AT_A_TIME);
                let answers: Vec<_> = answers.collect().await;
                self.gather(answers.into_iter().flatten(), ttl)
            }
        }
    }

    /// Puts addresses and ports together. `ttl`: of the records that led to these names.
    fn gather(
        &mut self,
        answers: impl Iterator<Item = (DnsAnswer, u16)>,
        mut ttl: u32,
    ) -> Result<NameAddresses, DnsError> {
        let (mut found, mut kept) = (Vec::new(), HashMap::new());
        let (mut good, mut failure, mut none) = (false, None, None);
        for (DnsAnswer { name, kind, records }, port) in answers {
            let key = (name, kind);
            let ips = match records {
                Ok(records) => {
                    good = true;
                    ttl = ttl.min(records.ttl);
                    addresses(&records.data)
                }
                Err(error) if error.is_none() => {
                    none.get_or_insert(error);
                    Vec::new()
                }
                Err(error) => {
                    failure.get_or_insert(error);
                    self.kept.get(&key).cloned().unwrap_or_default()
                }
            };
            found.extend(ips.iter().map(|&ip| SocketAddr::new(ip, port)));
            kept.insert(key, ips);
        }
        if !good {
            let name = || self.source.name().to_owned();
            let no_target = || DnsError::NoTarget { name: name() };
            return Err(failure.or(none).unwrap_or_else(no_target));
        }
        self.kept = kept;
        found.sort_unstable();
        found.dedup();
        Ok(NameAddresses {
            addresses: found,
            ttl: Duration::from_secs(ttl.into()),
            failure,
        })
    }
}

impl AddressLookup for NameLookup {
    fn look_up(&mut self, carrier: Carrier) -> BoxFuture<'_, Result<NameAddresses, DnsError>> {
        Box::pin(self.run(carrier))
    }
}

/// The targets of a SRV name and their ports, with the TTL of the records that name them.
async fn targets(
    servers: &NameServers,
    name: &str,
    deadline: Instant,
) -> Result<(Vec<(Name, u16)>, u32), DnsError> {
    let answers = ask_candidates(servers, name, &[RecordType::SRV], deadline).await?;
    let mut found = (Vec::new(), u32::MAX);
    for answer in answers {
        let records = answer.records?;
        found = (srv_targets(&records.data), records.ttl);
    }
    Ok(found)
}

/// Goes on to the next name of the search list only where one has nothing: after a failure, a longer name could be
/// somebody else's.
async fn ask_candidates(
    servers: &NameServers,
    name: &str,
    kinds: &[RecordType],
    deadline: Instant,
) -> Result<Vec<DnsAnswer>, DnsError> {
    let mut first = None;
    for name in servers.candidates(name)? {
        let answers = ask_each(servers, &name, kinds, deadline).await;
        let nothing = |answer: &DnsAnswer| answer.records.as_ref().is_err_and(DnsError::is_none);
        if !answers.iter().all(nothing) {
            return Ok(answers);
        }
        first.get_or_insert(answers);
    }
    Ok(first.unwrap_or_default())
}

/// One question for each type, all at a time. One that fails does not fail the others.
async fn ask_each(
    servers: &NameServers,
    name: &Name,
    kinds: &[RecordType],
    deadline: Instant,
) -> Vec<DnsAnswer> {
    let ask = async |&kind| DnsAnswer {
        name: name.clone(),
        kind,
        records: servers.ask(name, kind, deadline).await,
    };
    join_all(kinds.iter().map(ask)).await
}
