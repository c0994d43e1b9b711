//! A name as each DNS server tells it, over UDP alone and over TCP alone: for `kvgate doctor`. Lookups never need it: they
//! take the first answer that is good.

use futures::future::join_all;
use hickory_resolver::proto::rr::{Name, RecordType};
use tokio::time::Instant;

use super::answer::Records;
use super::error::{DnsError, written};
use super::servers::{Carrier, NameServers};
use super::watch::{AddressSource, DnsOptions};

/// What is said of a name.
#[derive(Debug, Clone, Default)]
pub struct NameInspected {
    /// The name of the search list that has records.
    pub name: String,
    /// The hosts file has the name: no server is asked.
    pub in_hosts_file: bool,
    pub servers: Vec<ServerAnswers>,
}

/// The answers of one server to one question.
#[derive(Debug, Clone)]
pub struct ServerAnswers {
    /// `the DNS server 10.0.0.53`.
    pub server: String,
    /// A, AAAA or SRV.
    pub kind: String,
    pub udp: Answered,
    pub tcp: Answered,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answered {
    /// Sorted.
    Records { records: Vec<String>, ttl_seconds: u32 },
    /// There is no such name, or it has no such records: a sentence.
    Nothing(String),
    /// It was cut, and says so.
    Truncated,
    /// A sentence with what to check.
    Failed(String),
}

impl Answered {
    fn of(result: Result<Records, DnsError>) -> Self {
        match result {
            Ok(records) => {
                let mut data: Vec<String> = records.data.iter().map(ToString::to_string).collect();
                data.sort();
                data.dedup();
                Self::Records {
                    records: data,
                    ttl_seconds: records.ttl,
                }
            }
            Err(DnsError::Truncated { .. }) => Self::Truncated,
            Err(error) if error.is_none() => Self::Nothing(error.to_string()),
            Err(error) => Self::Failed(error.to_string()),
        }
    }

    pub fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing(_))
    }

    /// None where there is no answer with records.
    pub fn records(&self) -> Option<&[String]> {
        match self {
            Self::Records { records, .. } => Some(records),
            _ => None,
        }
    }
}

/// Asks every server for the name, at the same time, each at most `[dns] timeout` long. Fails with a sentence where the
/// name or the system's configuration can't be used.
pub async fn inspect(options: &DnsOptions, source: &AddressSource) -> Result<NameInspected, String> {
    let read = options.clone();
    let both = tokio::task::spawn_blocking(move || {
        let of = |carrier| NameServers::read(&read, carrier);
        Ok((of(Carrier::Udp)?, of(Carrier::Tcp)?))
    });
    let both = both.await.map_err(|error| error.to_string())?;
    let (udp, tcp) = both.map_err(|cause: hickory_resolver::net::NetError| {
        let name = source.name().to_owned();
        let cause = Box::new(cause);
        DnsError::System { name, cause }.to_string()
    })?;
    let kinds: &[RecordType] = match source {
        AddressSource::Host { .. } => &[RecordType::A, RecordType::AAAA],
        AddressSource::Srv { .. } => &[RecordType::SRV],
    };
    let candidates = udp.candidates(source.name());
    let mut first = None;
    for name in candidates.map_err(|error| error.to_string())? {
        if kinds.iter().any(|&kind| udp.in_hosts_file(&name, kind).is_some()) {
            return Ok(NameInspected {
                name: written(&name),
                in_hosts_file: true,
                servers: Vec::new(),
            });
        }
        let deadline = Instant::now() + options.timeout;
        let servers = udp.servers().len();
        let questions = (0..servers).flat_map(|at| kinds.iter().map(move |&kind| (at, kind)));
        let ask = |(at, kind)| ask(&udp, &tcp, at, &name, kind, deadline);
        let answers = join_all(questions.map(ask)).await;
        let found = NameInspected {
            name: written(&name),
            in_hosts_file: false,
            servers: answers,
        };
        if !found.servers.iter().all(|one| one.udp.is_nothing()) {
            return Ok(found);
        }
        first.get_or_insert(found);
    }
    Ok(first.unwrap_or_default())
}

async fn ask(
    udp: &NameServers,
    tcp: &NameServers,
    at: usize,
    name: &Name,
    kind: RecordType,
    deadline: Instant,
) -> ServerAnswers {
    let over = |servers| over(servers, at, name, kind, deadline);
    let (by_udp, by_tcp) = futures::join!(over(udp), over(tcp));
    ServerAnswers {
        server: udp.servers()[at].name.clone(),
        kind: kind.to_string(),
        udp: by_udp,
        tcp: by_tcp,
    }
}

async fn over(
    servers: &NameServers,
    at: usize,
    name: &Name,
    kind: RecordType,
    deadline: Instant,
) -> Answered {
    // Should /etc/resolv.conf have changed in between, there may be none at this place.
    let asked = servers.servers().get(at..=at).unwrap_or_default();
    Answered::of(servers.ask_of(asked, name, kind, deadline).await)
}
