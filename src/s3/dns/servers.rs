//! The DNS servers to ask, and one question to one of them. This is the only place that sends anything.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::config::{NameServerConfig, ProtocolConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::xfer::{DnsHandle, FirstAnswer};
use hickory_resolver::net::{DnsError as ServerError, NetError, NoRecords};
use hickory_resolver::proto::op::{DnsRequestOptions, Query, ResponseCode};
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::{Hosts, NameServerPool, PoolContext, TlsConfig, system_conf};
use tokio::time::{Instant, timeout};

use super::answer::{Reading, Records, read};
use super::error::{DnsError, written};
use super::watch::DnsOptions;

/// Answers that a chain of CNAMEs may be spread over.
const HOPS_MAX: usize = 8;

/// The DNS servers of one lookup, in the order in which they are asked.
pub(super) struct NameServers {
    servers: Vec<Server>,
    hosts: Hosts,
    /// The suffixes of names, and the number of dots from which on they are only a last resort.
    search: Vec<Name>,
    ndots: usize,
    /// The time limit of one lookup as a whole, for the text of an error.
    limit: Duration,
}

pub(super) struct Server {
    /// As an error names it.
    pub name: String,
    pool: NameServerPool<TokioRuntimeProvider>,
    request: DnsRequestOptions,
}

/// What carries the questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// UDP, and TCP where an answer says that it was cut.
    Both,
    Udp,
    Tcp,
}

impl NameServers {
    /// The servers of the options, which take every name as it is; otherwise the system's, with its search list. Reads files.
    pub fn read(options: &DnsOptions, carrier: Carrier) -> Result<Self, NetError> {
        let mut hickory = ResolverOpts::default();
        let (mut search, mut configs) = (Vec::new(), Vec::new());
        if options.servers.is_empty() {
            let (config, system) = system_conf::read_system_conf()?;
            let (domain, searched, servers) = config.into_parts();
            search = if searched.is_empty() {
                domain.into_iter().collect()
            } else {
                searched
            };
            (hickory, configs) = (system, servers);
        }
        configs.extend(options.servers.iter().map(|&address| at(address)));
        for config in &mut configs {
            config.connections.retain(|connection| match carrier {
                Carrier::Both => true,
                Carrier::Tcp => matches!(connection.protocol, ProtocolConfig::Tcp),
                Carrier::Udp => matches!(connection.protocol, ProtocolConfig::Udp),
            });
        }
        hickory.timeout = options.timeout;
        let server = |config| Server::new(config, &hickory);
        Ok(Self {
            servers: configs.into_iter().map(server).collect::<Result<_, _>>()?,
            // As hickory's own resolver does: a file that can't be read is an empty one.
            hosts: Hosts::from_system().unwrap_or_default(),
            search,
            ndots: hickory.ndots,
            limit: options.timeout,
        })
    }

    /// In the order in which they are asked.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// The names that this one may stand for, in the order of trying. The hosts file comes before the search list.
    pub fn candidates(&self, name: &str) -> Result<Vec<Name>, DnsError> {
        let name = Name::from_str_relaxed(name).map_err(|cause| DnsError::NotAName {
            name: name.to_owned(),
            cause: Box::new(cause),
        })?;
        if name.is_fqdn() {
            return Ok(vec![name]);
        }
        let mut absolute = name.clone();
        absolute.set_fqdn(true);
        if self.in_hosts_file(&absolute, RecordType::A).is_some() {
            return Ok(vec![absolute]);
        }
        let dots = usize::from(name.num_labels()).saturating_sub(1);
        let longer = self.search.iter();
        let longer = longer.filter_map(|domain| name.clone().append_domain(domain).ok());
        let mut names: Vec<_> = longer.collect();
        let place = if dots >= self.ndots { 0 } else { names.len() };
        names.insert(place, absolute);
        Ok(names)
    }

    /// The records of one type, along CNAMEs.
    pub async fn ask(&self, name: &Name, kind: RecordType, deadline: Instant) -> Result<Records, DnsError> {
        if let Some(found) = self.in_hosts_file(name, kind) {
            return found;
        }
        self.ask_of(&self.servers, name, kind, deadline).await
    }

    /// The same of these servers alone, whatever the hosts file has.
    pub async fn ask_of(
        &self,
        servers: &[Server],
        name: &Name,
        kind: RecordType,
        deadline: Instant,
    ) -> Result<Records, DnsError> {
        let (mut at, mut ttl) = (name.clone(), u32::MAX);
        for _ in 0..HOPS_MAX {
            match self.ask_once(servers, &at, kind, deadline).await? {
                Reading::Alias(target, its) => (at, ttl) = (target, ttl.min(its)),
                Reading::Records(mut records) => {
                    records.ttl = records.ttl.min(ttl);
                    return Ok(records);
                }
            }
        }
        Err(DnsError::Aliases { name: written(name) })
    }

    /// A name that the file has in one family has none in the other: DNS is not asked for it.
    pub fn in_hosts_file(&self, name: &Name, kind: RecordType) -> Option<Result<Records, DnsError>> {
        let of = |kind| {
            let lookup = self.hosts.lookup_static_host(&Query::query(name.clone(), kind))?;
            let data = lookup.answers().iter().map(|record| record.data.clone());
            Some(data.collect())
        };
        let other = match kind {
            RecordType::A => RecordType::AAAA,
            RecordType::AAAA => RecordType::A,
            _ => return None,
        };
        let ttl = u32::MAX;
        match of(kind) {
            Some(data) => Some(Ok(Records { data, ttl })),
            None => of(other).map(|_: Vec<_>| Err(no_records(name, kind, "the hosts file".into()))),
        }
    }

    /// One server after the other until one answers, as is expected of /etc/resolv.conf; "no such name" is an answer.
    /// Each gets its share of the time that is left.
    async fn ask_once(
        &self,
        servers: &[Server],
        name: &Name,
        kind: RecordType,
        deadline: Instant,
    ) -> Result<Reading, DnsError> {
        let mut result = Err(DnsError::Timeout {
            name: written(name),
            server: "any DNS server".into(),
            limit: self.limit,
        });
        for (i, server) in (0..).zip(servers) {
            let left = deadline.saturating_duration_since(Instant::now());
            let share = left / u32::try_from(servers.len() - i).unwrap_or(u32::MAX);
            result = timeout(share, server.ask(name, kind))
                .await
                .unwrap_or(Err(NetError::Timeout))
                .map_err(|error| self.error(error, name, kind, server));
            if result.as_ref().map_or_else(DnsError::is_none, |_| true) {
                break;
            }
        }
        result
    }

    fn error(&self, error: NetError, name: &Name, kind: RecordType, server: &Server) -> DnsError {
        let server = server.name.clone();
        if let NetError::Dns(ServerError::NoRecordsFound(none)) = &error
            && none.response_code != ResponseCode::NXDomain
        {
            return no_records(name, kind, server);
        }
        let name = written(name);
        match error {
            NetError::Timeout => DnsError::Timeout {
                name,
                server,
                limit: self.limit,
            },
            NetError::Dns(ServerError::NoRecordsFound(_)) => DnsError::NoName { name, server },
            NetError::Truncated => DnsError::Truncated { name, server },
            cause => DnsError::Server {
                name,
                server,
                cause: Box::new(cause),
            },
        }
    }
}

/// It is told only if no family has any.
fn no_records(name: &Name, kind: RecordType, server: String) -> DnsError {
    let what = match kind {
        RecordType::A | RecordType::AAAA => "A or AAAA",
        other => other.into(),
    };
    DnsError::NoRecords {
        name: written(name),
        what,
        server,
    }
}

/// A server at an address and port.
fn at(address: SocketAddr) -> NameServerConfig {
    let mut config = NameServerConfig::udp_and_tcp(address.ip());
    for connection in &mut config.connections {
        connection.port = address.port();
    }
    config
}

impl Server {
    fn new(config: NameServerConfig, options: &ResolverOpts) -> Result<Self, NetError> {
        let port = config
            .connections
            .first()
            .map_or(53, |connection| connection.port);
        let name = match (config.ip, port) {
            (ip, 53) => format!("the DNS server {ip}"),
            (ip, port) => format!("the DNS server {}", SocketAddr::new(ip, port)),
        };
        let mut request = DnsRequestOptions::default();
        request.use_edns = options.edns0;
        let context = PoolContext::new(options.clone(), TlsConfig::new()?);
        // A pool of its own for each server: what one says is then known to be its answer.
        let pool = NameServerPool::from_config([config], Arc::new(context), TokioRuntimeProvider::default());
        Ok(Self { name, pool, request })
    }

    async fn ask(&self, name: &Name, kind: RecordType) -> Result<Reading, NetError> {
        let query = Query::query(name.clone(), kind);
        let answer = self.pool.lookup(query.clone(), self.request).first_answer().await;
        // Over UDP hickory has looked at the question, over TCP not.
        let answered = match &answer {
            Ok(answer) => answer.queries.first(),
            Err(NetError::Dns(ServerError::NoRecordsFound(none))) => Some(&*none.query),
            Err(_) => Some(&query),
        };
        if answered != Some(&query) {
            return Err("it answered another question".into());
        }
        let answer = answer?;
        match (read(name, kind, &answer.answers), answer.response_code) {
            (Some(found @ Reading::Records(_)), _) => Ok(found),
            (Some(on), ResponseCode::NoError) => Ok(on),
            (_, code @ (ResponseCode::NoError | ResponseCode::NXDomain)) => {
                Err(NoRecords::new(query, code).into())
            }
            (_, code) => Err(ServerError::ResponseCode(code).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers() -> NameServers {
        let mut hosts = Hosts::default();
        let file = "10.0.0.1 vm vm.test\n10.0.0.2 vm # twice\n";
        hosts.read_hosts_conf(file.as_bytes()).unwrap();
        NameServers {
            servers: Vec::new(),
            hosts,
            search: vec!["a.test".parse().unwrap(), "b.test".parse().unwrap()],
            ndots: 2,
            limit: Duration::from_secs(1),
        }
    }

    #[test]
    fn the_search_list_comes_first_for_names_with_few_dots() {
        let names = |name: &str| -> Vec<String> {
            let names = servers().candidates(name).unwrap();
            names.iter().map(ToString::to_string).collect()
        };
        assert_eq!(names("s3.x"), ["s3.x.a.test.", "s3.x.b.test.", "s3.x."]);
        assert_eq!(names("s3.x.y"), ["s3.x.y.", "s3.x.y.a.test.", "s3.x.y.b.test."]);
        assert_eq!(names("s3."), ["s3."]);
        assert_eq!(names("VM"), ["vm."], "it is in the hosts file");
        assert!(servers().candidates("a..b").is_err());
    }

    #[tokio::test]
    async fn the_hosts_file_is_all_there_is_for_a_name() {
        let servers = servers();
        let ask = async |kind| servers.ask(&"vm.".parse().unwrap(), kind, Instant::now()).await;
        assert_eq!(ask(RecordType::A).await.unwrap().data.len(), 2);
        assert!(ask(RecordType::AAAA).await.unwrap_err().is_none());
        assert!(matches!(
            ask(RecordType::SRV).await,
            Err(DnsError::Timeout { .. })
        ));
    }
}
