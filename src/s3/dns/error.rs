//! Why a name gave no addresses.

use std::time::Duration;

use hickory_resolver::net::NetError;
use hickory_resolver::proto::ProtoError;
use hickory_resolver::proto::rr::Name;

/// Why a name gave no addresses: a sentence with the name, and what to check.
#[derive(Debug, thiserror::Error)]
pub enum DnsError {
    #[error("{name:?} is no domain name ({cause}); check how it is spelled")]
    NotAName { name: String, cause: Box<ProtoError> },
    #[error(
        "{name} can't be resolved, since the system's DNS configuration can't be used ({cause}); check the nameserver \
         lines of /etc/resolv.conf, or name the DNS servers in kvgate's configuration"
    )]
    System { name: String, cause: Box<NetError> },
    #[error("{name} does not exist, says {server}; check how it is spelled, and its records there")]
    NoName { name: String, server: String },
    #[error("{name} has no {what} records, says {server}; check its records there")]
    NoRecords {
        name: String,
        what: &'static str,
        server: String,
    },
    #[error("no SRV record of {name} names a target; check its records")]
    NoTarget { name: String },
    #[error("{server} did not resolve {name}: {cause}; check that server, and those that it asks")]
    Server {
        name: String,
        server: String,
        cause: Box<NetError>,
    },
    #[error(
        "no answer for {name} from {server} within {limit:?}; check that it runs, and that UDP and TCP get through to it"
    )]
    Timeout {
        name: String,
        server: String,
        limit: Duration,
    },
    #[error(
        "the answer for {name} is too long for UDP, and {server} did not give it over TCP; check that it serves TCP, and \
         that nothing blocks it"
    )]
    Truncated { name: String, server: String },
    #[error("the CNAMEs of {name} go in a circle or on for too long; check its records")]
    Aliases { name: String },
}

impl DnsError {
    /// It is an answer, and a good one: there is nothing.
    pub fn is_none(&self) -> bool {
        matches!(self, Self::NoName { .. } | Self::NoRecords { .. })
    }
}

/// As people write it.
pub(super) fn written(name: &Name) -> String {
    let mut name = name.to_string();
    if name.ends_with('.') {
        name.pop();
    }
    name
}
