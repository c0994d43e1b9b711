//! The rules for names: endpoint, bucket, prefix, region and paths.
//!
//! They are checked here and not at the first request, so that a typing error is reported at the start and by its
//! key. A message never repeats an endpoint: one with a password in it would end up in a log.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use super::kinds::{Kind, Text};

pub(super) const ENDPOINTS: Text<String> = Text {
    accepts: "http://host[:port] or https://host[:port], such as \"http://rgw.example:7480\", or several with commas",
    check: endpoints,
    show: String::clone,
};

pub(super) const COLLECTOR: Text<String> = Text {
    accepts: "http://host[:port] or https://host[:port], such as \"http://127.0.0.1:4318\"",
    check: collector,
    show: String::clone,
};

pub(super) const DNS_NAME: Text<String> = Text {
    accepts: "a DNS name, such as \"_s3._tcp.rgw.service.consul\"",
    check: dns_name,
    show: String::clone,
};

pub(super) const BUCKET: Text<String> = Text {
    accepts: "3 to 63 of a-z, 0-9, '.' and '-', a letter or digit at both ends, such as \"kv-cache\"",
    check: bucket,
    show: String::clone,
};

pub(super) const PREFIX: Text<String> = Text {
    accepts: "up to 256 printable ASCII characters without spaces, such as \"team/kvgate\"",
    check: prefix,
    show: String::clone,
};

pub(super) const REGION: Text<String> = Text {
    accepts: "1 to 64 of a-z, A-Z, 0-9, '-' and '_', such as \"us-east-1\"",
    check: region,
    show: String::clone,
};

pub(super) const FILE_PATH: Text<PathBuf> = Text {
    accepts: "the path of a file, such as \"/etc/ssl/ceph.pem\"",
    check: file_path,
    show: show_path,
};

pub(super) const ABSOLUTE_PATH: Text<PathBuf> = Text {
    accepts: "an absolute path, such as \"/dev/shm/kvgate\"",
    check: absolute_path,
    show: show_path,
};

/// Addresses of DNS servers.
pub(super) struct Servers;

impl Kind for Servers {
    type Value = Vec<SocketAddr>;

    fn parse(&self, text: &str) -> Result<Vec<SocketAddr>, String> {
        let server = |text: &str| {
            let text = text.trim();
            let address = text.parse().ok();
            let ip = || text.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, 53));
            address.or_else(ip).ok_or_else(|| {
                format!(
                    "{text:?} is not the address of a DNS server; allowed is {}",
                    self.accepts()
                )
            })
        };
        if text.trim().is_empty() {
            return Ok(Vec::new());
        }
        text.split(',').map(server).collect()
    }

    fn show(&self, value: &Vec<SocketAddr>) -> String {
        value
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(",")
    }

    fn accepts(&self) -> String {
        "IP addresses with or without port, with commas, such as \"10.0.0.2,10.0.0.3:8600\"".to_owned()
    }
}

/// Folders, one on each disk.
pub(super) struct Folders;

impl Kind for Folders {
    type Value = Vec<PathBuf>;

    fn parse(&self, text: &str) -> Result<Vec<PathBuf>, String> {
        if text.trim().is_empty() {
            return Ok(Vec::new());
        }
        let folders: Vec<PathBuf> = text
            .split(',')
            .map(|path| absolute_path(path.trim()))
            .collect::<Result<_, _>>()?;
        let mut seen = BTreeSet::new();
        match folders.iter().find(|path| !seen.insert(path.as_path())) {
            Some(twice) => Err(format!("{} is there twice", twice.display())),
            None => Ok(folders),
        }
    }

    fn show(&self, value: &Vec<PathBuf>) -> String {
        value.iter().map(show_path).collect::<Vec<_>>().join(",")
    }

    fn accepts(&self) -> String {
        "absolute paths of folders, with commas, such as \"/mnt/nvme0/kvgate,/mnt/nvme1/kvgate\"".to_owned()
    }
}

/// The nodes of a fleet.
pub(super) struct Members;

impl Kind for Members {
    type Value = Vec<PeerName>;

    fn parse(&self, text: &str) -> Result<Vec<PeerName>, String> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let parsed = names.map(|name| {
            let name = match name.strip_prefix("srv:") {
                Some(name) => dns_name(name).ok().map(PeerName::Srv),
                None => match split_port(name) {
                    (host, Some(port)) if is_host(host) && is_port(port) => port
                        .parse()
                        .ok()
                        .map(|port| PeerName::Host(host.to_owned(), port)),
                    _ => None,
                },
            };
            name.ok_or_else(|| self.accepts())
        });
        parsed
            .collect::<Result<_, _>>()
            .map_err(|accepts| format!("{text:?} names no members; write {accepts}"))
    }

    fn show(&self, value: &Vec<PeerName>) -> String {
        let names = value.iter().map(|name| match name {
            PeerName::Host(host, port) => format!("{host}:{port}"),
            PeerName::Srv(name) => format!("srv:{name}"),
        });
        names.collect::<Vec<_>>().join(",")
    }

    fn accepts(&self) -> String {
        "HOST:PORT, each of whose addresses is a member, or srv:NAME of SRV records, with commas, such as \
         \"kvgate-peers.kvgate:9181\""
            .to_owned()
    }
}

/// Where nodes of the fleet are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerName {
    Host(String, u16),
    Srv(String),
}

/// Names and addresses of this host, any number of them.
pub(super) struct Hosts;

impl Kind for Hosts {
    type Value = Vec<String>;

    fn parse(&self, text: &str) -> Result<Vec<String>, String> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let checked = names.map(|name| match name.parse::<IpAddr>() {
            Ok(address) => Ok(address.to_string()),
            Err(_) => dns_name(name).map_err(|fault| format!("{fault}; write {}", self.accepts())),
        });
        checked.collect()
    }

    fn show(&self, value: &Vec<String>) -> String {
        value.join(",")
    }

    fn accepts(&self) -> String {
        "names or IP addresses without ports, with commas, such as \"kvgate.example,10.0.0.7\"".to_owned()
    }
}

/// An address and port to listen on.
pub(super) struct Address;

impl Kind for Address {
    type Value = SocketAddr;

    fn parse(&self, text: &str) -> Result<SocketAddr, String> {
        let address = text.trim().parse();
        address.map_err(|_| {
            format!(
                "{text:?} is not an address with a port; allowed is {}",
                self.accepts()
            )
        })
    }

    fn show(&self, value: &SocketAddr) -> String {
        value.to_string()
    }

    fn accepts(&self) -> String {
        "an IP address with a port, such as \"127.0.0.1:9180\" or \"[::]:9180\"".to_owned()
    }
}

/// Access rights of a file.
pub(super) struct Mode;

impl Kind for Mode {
    type Value = u32;

    fn parse(&self, text: &str) -> Result<u32, String> {
        let mode = u32::from_str_radix(text.trim(), 8).ok();
        let mode = mode.filter(|mode| mode & !0o777 == 0 && mode & 0o600 == 0o600);
        mode.ok_or_else(|| format!("{text:?} can't be; allowed is {}", self.accepts()))
    }

    fn show(&self, value: &u32) -> String {
        format!("{value:04o}")
    }

    fn accepts(&self) -> String {
        "access rights in octal that let the owner read and write, such as \"0660\"".to_owned()
    }

    fn needs_quotes(&self) -> bool {
        true
    }
}

fn dns_name(text: &str) -> Result<String, String> {
    let name = text.strip_suffix('.').unwrap_or(text);
    match name.len() <= 253 && name.split('.').all(is_label) {
        true => Ok(name.to_owned()),
        false => Err(format!("{text:?} is not a DNS name")),
    }
}

fn endpoints(text: &str) -> Result<String, String> {
    let all: Vec<String> = text
        .split(',')
        .map(|text| endpoint(text.trim()))
        .collect::<Result<_, _>>()?;
    let schemes: BTreeSet<_> = all.iter().filter_map(|one| one.split("://").next()).collect();
    match schemes.len() {
        1 => Ok(all.join(",")),
        _ => Err("some endpoints are http:// and some https://; write all alike".to_owned()),
    }
}

fn endpoint(text: &str) -> Result<String, String> {
    let fault = |what: &str| Err(format!("the endpoint {what}"));
    if text.contains('@') {
        return fault("has a user or password in it; credentials come from the AWS chain");
    }
    let Some((scheme @ ("http" | "https"), rest)) = text.split_once("://") else {
        return fault("does not begin with http:// or https://");
    };
    // People copy a trailing slash from browsers; it means the same.
    let authority = rest.strip_suffix('/').unwrap_or(rest);
    if authority.contains(['/', '?', '#']) {
        return fault("has a path or query; bucket and prefix are keys of their own");
    }
    let (host, port) = split_port(authority);
    if port.is_some_and(|port| !is_port(port)) {
        return fault("has a port that is not a number from 1 to 65535");
    }
    if !is_host(host) {
        return fault("has no valid host name or address");
    }
    Ok(format!("{scheme}://{authority}"))
}

fn collector(text: &str) -> Result<String, String> {
    endpoint(text).map_err(|fault| match text.split_once("://") {
        Some((_, rest)) if rest.contains('/') => {
            "the collector has a path; /v1/traces is added to it".to_owned()
        }
        _ => fault.replace("the endpoint", "the collector"),
    })
}

/// The host of a valid endpoint, or of the first of several; IPv6 in its brackets.
pub(super) fn host_of(endpoint: &str) -> &str {
    let authority = endpoint
        .split_once("://")
        .map_or(endpoint, |(_, authority)| authority);
    let first = authority.split(',').next().unwrap_or(authority);
    split_port(first).0
}

pub(super) fn is_address(host: &str) -> bool {
    host.starts_with('[') || host.parse::<Ipv4Addr>().is_ok()
}

fn split_port(authority: &str) -> (&str, Option<&str>) {
    match authority.rsplit_once(':') {
        // The last colon of an unadorned IPv6 address lies inside its brackets.
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    }
}

fn is_port(text: &str) -> bool {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    digits && text.parse::<u16>().is_ok_and(|port| port > 0)
}

fn is_host(host: &str) -> bool {
    if let Some(address) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return address.parse::<Ipv6Addr>().is_ok();
    }
    // With a number as its last label it can only be an address: this catches a mistyped 10.0.0.300.
    let last = host.rsplit('.').next().unwrap_or(host);
    if last.bytes().all(|byte| byte.is_ascii_digit()) {
        return host.parse::<Ipv4Addr>().is_ok();
    }
    host.len() <= 253 && host.split('.').all(is_label)
}

fn is_label(label: &str) -> bool {
    // '_' is not allowed in a host name by the RFC, but container networks use such names.
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=63).contains(&label.len())
        && label.bytes().all(allowed)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// <https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html>
fn bucket(text: &str) -> Result<String, String> {
    const RESERVED_STARTS: [&str; 3] = ["xn--", "sthree-", "amzn-s3-demo-"];
    const RESERVED_ENDS: [&str; 5] = ["-s3alias", "--ol-s3", "--op-s3", ".mrap", "--table-s3"];

    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let edge = |byte: Option<&u8>| byte.is_some_and(|byte| alphanumeric(*byte));
    let bytes = text.as_bytes();
    let fault = if !(3..=63).contains(&bytes.len()) {
        format!("is {} characters long", text.chars().count())
    } else if let Some(odd) = text
        .chars()
        .find(|c| !matches!(c, 'a'..='z' | '0'..='9' | '.' | '-'))
    {
        format!("has {odd:?} in it")
    } else if !edge(bytes.first()) || !edge(bytes.last()) {
        "begins or ends with '.' or '-'".to_owned()
    } else if text.contains("..") {
        "has two dots in a row".to_owned()
    } else if text.parse::<Ipv4Addr>().is_ok() {
        "looks like an IP address".to_owned()
    } else if let Some(start) = RESERVED_STARTS.iter().find(|start| text.starts_with(**start)) {
        format!("begins with {start:?}, which S3 reserves")
    } else if text.ends_with("--x-s3") {
        "is a directory bucket (S3 Express One Zone), whose sessions kvgate does not have; name a general purpose \
         bucket"
            .to_owned()
    } else if let Some(end) = RESERVED_ENDS.iter().find(|end| text.ends_with(**end)) {
        format!("ends with {end:?}, which S3 reserves")
    } else {
        return Ok(text.to_owned());
    };
    Err(format!("the bucket name {text:?} {fault}"))
}

fn prefix(text: &str) -> Result<String, String> {
    const PREFIX_BYTES_MAX: usize = 256;

    let fault = if text.len() > PREFIX_BYTES_MAX {
        format!("is {} bytes long", text.len())
    } else if let Some(odd) = text.chars().find(|c| !c.is_ascii_graphic()) {
        format!("has {odd:?} in it")
    } else if text.starts_with('/') || text.ends_with('/') {
        "begins or ends with '/'; kvgate puts the slash behind it".to_owned()
    } else if text.contains("//") {
        "has \"//\" in it".to_owned()
    } else if text.split('/').any(|part| part == "." || part == "..") {
        // HTTP clients and proxies resolve these, and the signature no longer matches.
        "has a part that is \".\" or \"..\"".to_owned()
    } else {
        return Ok(text.to_owned());
    };
    Err(format!("the prefix {text:?} {fault}"))
}

fn region(text: &str) -> Result<String, String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if (1..=64).contains(&text.len()) && text.bytes().all(allowed) {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is not a region name"))
    }
}

fn file_path(text: &str) -> Result<PathBuf, String> {
    if text.chars().any(char::is_control) {
        return Err(format!("the path {text:?} has a control character in it"));
    }
    Ok(PathBuf::from(text))
}

fn absolute_path(text: &str) -> Result<PathBuf, String> {
    let path = file_path(text)?;
    if path.is_absolute() {
        Ok(path)
    } else {
        Err(format!("the path {text:?} does not begin with '/'"))
    }
}

/// Exact: a configured path is Unicode, since its text was.
fn show_path(path: &PathBuf) -> String {
    Path::new(path).display().to_string()
}

#[cfg(test)]
mod tests;
