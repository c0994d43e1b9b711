//! Checks between keys. They run only when each key is valid by itself.

use super::names::{host_of, is_address};
use super::schema::Config;
use crate::config::units::show_duration;

/// The problems found: the key to blame, and the sentence.
pub(super) fn check(config: &Config) -> Vec<(&'static str, String)> {
    let Config {
        s3,
        dns,
        endpoints,
        load,
        api,
        gc,
        refresh,
        peers,
        ..
    } = config;
    let mut problems = Vec::new();

    for (key, least, greatest, most) in [
        ("s3.retry_base", s3.retry_base, "s3.retry_max", s3.retry_max),
        ("dns.min_ttl", dns.min_ttl, "dns.max_ttl", dns.max_ttl),
        (
            "endpoints.breaker_open",
            endpoints.breaker_open,
            "endpoints.breaker_open_max",
            endpoints.breaker_open_max,
        ),
    ] {
        if least > most {
            let (least, most) = (show_duration(least), show_duration(most));
            let message = format!("{least} is longer than {greatest}, {most}; raise that or lower this");
            problems.push((key, message));
        }
    }
    if !(endpoints.window_min..=endpoints.window_max).contains(&endpoints.window) {
        let message = format!(
            "{} is not between endpoints.window_min, {}, and endpoints.window_max, {}",
            endpoints.window, endpoints.window_min, endpoints.window_max
        );
        problems.push(("endpoints.window", message));
    }
    if dns.srv.is_some() && s3.endpoint.as_ref().is_none_or(|urls| urls.contains(',')) {
        let message = "is set, so s3.endpoint must be one URL: its scheme, and the name that requests \
            are signed for and certificates have";
        problems.push(("dns.srv", message.to_owned()));
    }
    // A part above the limit would be let through all the same, alone.
    if s3.part_size > load.in_flight {
        let message = format!(
            "{} is smaller than one part; write at least s3.part_size, {}",
            load.in_flight, s3.part_size
        );
        problems.push(("load.in_flight", message));
    }
    if let Some(unused) = gc.unused
        && refresh.after.is_none_or(|after| after >= unused)
    {
        let message = format!(
            "{} is the time without a use, and S3 learns of a use by refresh.after: set that to less, such as half of it",
            show_duration(unused)
        );
        problems.push(("gc.unused", message));
    }
    if let Some(listen) = api.listen
        && !listen.ip().is_loopback()
        && api.token_file.is_none()
    {
        let message = format!("{listen} can be reached from elsewhere, so api.token_file must be set");
        problems.push(("api.listen", message));
    }
    let tls = [&peers.cert_file, &peers.key_file, &peers.ca_file];
    let has_tls = tls.iter().all(|file| file.is_some()) && peers.server_name.is_some();
    if !has_tls && (tls.iter().any(|file| file.is_some()) || peers.server_name.is_some()) {
        let message =
            "TLS between nodes needs cert_file, key_file, ca_file and server_name: set all of them or none";
        problems.push(("peers.cert_file", message.to_owned()));
    }
    if !peers.members.is_empty() && !has_tls && peers.token_file.is_none() {
        let message = "is set, so peers.token_file must be set too, or the keys for TLS: anybody could read chunks otherwise";
        problems.push(("peers.members", message.to_owned()));
    }
    if let Some(endpoint) = &s3.endpoint {
        if s3.ca_file.is_some() && endpoint.starts_with("http://") {
            let message = "is set, but s3.endpoint is http:// and would not use it; \
                write https:// there or remove this";
            problems.push(("s3.ca_file", message.to_owned()));
        }
        if s3.path_style == Some(false) && is_address(host_of(endpoint)) {
            let message = "false puts the bucket before the host name, but s3.endpoint is an IP \
                address; write true";
            problems.push(("s3.path_style", message.to_owned()));
        }
    }
    problems
}
