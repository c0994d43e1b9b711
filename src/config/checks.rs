//! What must hold between keys. Runs only when each key is valid by itself.

use super::names::{host_of, is_address};
use super::schema::Config;
use crate::units::show_duration;

/// The key to blame, and the sentence.
pub(super) fn check(config: &Config) -> Vec<(&'static str, String)> {
    let Config { s3, load, .. } = config;
    let mut problems = Vec::new();

    if s3.retry_base > s3.retry_max {
        let (base, max) = (show_duration(s3.retry_base), show_duration(s3.retry_max));
        problems.push((
            "s3.retry_base",
            format!("{base} is longer than s3.retry_max, {max}; raise that or lower this"),
        ));
    }
    // A part that is larger than the limit would be let through all the same, alone.
    if s3.part_size > load.in_flight {
        let message = format!(
            "{} is smaller than one part; write at least s3.part_size, {}",
            load.in_flight, s3.part_size
        );
        problems.push(("load.in_flight", message));
    }
    if let Some(endpoint) = &s3.endpoint {
        if s3.ca_file.is_some() && endpoint.starts_with("http://") {
            let message = "is set, but s3.endpoint is http:// and would not use it; \
                write https:// there or remove this";
            problems.push(("s3.ca_file", message.to_owned()));
        }
        if !s3.path_style && is_address(host_of(endpoint)) {
            let message = "false puts the bucket before the host name, but s3.endpoint is an IP \
                address; write true";
            problems.push(("s3.path_style", message.to_owned()));
        }
    }
    problems
}
