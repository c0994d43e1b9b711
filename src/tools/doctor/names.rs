//! The server's name: its records, their TTL, and the answers of each DNS server by UDP and TCP compared.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use super::Finding;
use crate::config::units::show_duration;
use crate::s3::dns::{AddressSource, Answered, DnsOptions, NameInspected, Resolver, ServerAnswers, inspect};
use crate::s3::object::{S3, S3Options};

const CHECK: &str = "dns";
/// Addresses that a line shows.
const SHOWN: usize = 8;

/// An address of the server, and the name that its certificate must have.
pub struct Place {
    pub address: SocketAddr,
    pub server_name: String,
}

pub async fn check(s3: &S3, options: &S3Options) -> (Vec<Finding>, Vec<Place>) {
    let (mut found, mut places) = (Vec::new(), Vec::<Place>::new());
    for place in s3.places() {
        let (mut findings, addresses) = one(&place.source, &options.dns).await;
        let in_host = !options.path_style && options.endpoint.is_some();
        if addresses.is_empty() && in_host {
            for advice in findings.iter_mut().filter_map(|finding| finding.advice.as_mut()) {
                *advice += ". The bucket is in the host name: a server without a wildcard name for buckets wants [s3] path_style = true";
            }
        }
        found.extend(findings);
        for address in addresses {
            if places.iter().all(|known| known.address != address) {
                let server_name = place.server_name.clone();
                places.push(Place { address, server_name });
            }
        }
    }
    (found, places)
}

async fn one(source: &AddressSource, options: &DnsOptions) -> (Vec<Finding>, Vec<SocketAddr>) {
    if let Some(address) = source.literal() {
        let seen = format!("{address} is an address: no DNS is needed");
        return (vec![Finding::ok(CHECK, seen)], vec![address]);
    }
    let resolver = Resolver::new(options.clone());
    let mut told = resolver.watch(source);
    let resolve = async {
        let ended = told.wait_for(|resolved| resolved.error.is_some() || !resolved.addresses.is_empty());
        ended.await.ok().map(|resolved| resolved.clone())
    };
    let (resolved, inspected) = futures::join!(resolve, inspect(options, source));
    let resolved = resolved.unwrap_or_default();
    let addresses = resolved.addresses.to_vec();
    let mut found = Vec::new();
    match (&resolved.error, &inspected) {
        (Some(error), _) => found.push(Finding::failed_with(CHECK, error)),
        (None, Ok(inspected)) => found.push(Finding::ok(CHECK, said(source, &addresses, inspected, options))),
        (None, Err(error)) => found.push(Finding::failed_with(CHECK, error)),
    }
    if let Ok(inspected) = &inspected {
        found.extend(inspected.servers.iter().filter_map(|answers| {
            let others = inspected.servers.iter().any(|other| {
                other.server != answers.server && other.kind == answers.kind && !is_failed(other, options.tcp)
            });
            judge(answers, options.tcp, others)
        }));
        found.extend(disagreement(inspected));
    }
    (found, addresses)
}

fn said(
    source: &AddressSource,
    addresses: &[SocketAddr],
    inspected: &NameInspected,
    options: &DnsOptions,
) -> String {
    let shown: Vec<String> = addresses.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = if addresses.len() > SHOWN { ", ..." } else { "" };
    let count = match addresses.len() {
        1 => "1 address".to_owned(),
        count => format!("{count} addresses"),
    };
    let ttls = inspected.servers.iter().flat_map(|one| [&one.udp, &one.tcp]);
    let ttl = ttls.filter_map(|answer| match answer {
        Answered::Records { ttl_seconds, .. } => Some(*ttl_seconds),
        _ => None,
    });
    let ttl = match (ttl.min(), inspected.in_hosts_file) {
        (_, true) => "from the hosts file, no DNS server is asked".to_owned(),
        (Some(ttl), false) => {
            let asked = std::time::Duration::from_secs(ttl.into())
                .min(options.max_ttl)
                .max(options.min_ttl);
            format!("TTL {ttl} s, asked again every {}", show_duration(asked))
        }
        (None, false) => "no TTL".to_owned(),
    };
    let name = match inspected.name.is_empty() {
        true => source.to_string(),
        false => inspected.name.clone(),
    };
    format!("{name}: {count} ({}{more}), {ttl}", shown.join(", "))
}

fn is_failed(answers: &ServerAnswers, by_tcp: bool) -> bool {
    let asked = if by_tcp { &answers.tcp } else { &answers.udp };
    matches!(asked, Answered::Failed(_))
}

/// None where there is nothing to tell: there are no such records.
fn judge(answers: &ServerAnswers, by_tcp: bool, others: bool) -> Option<Finding> {
    let ServerAnswers {
        server,
        kind,
        udp,
        tcp,
    } = answers;
    let open_tcp = format!(
        "Let TCP, too, through to {server}, and have it answer there: answers too long for UDP come by TCP"
    );
    Some(match (udp, tcp) {
        (Answered::Nothing(_), Answered::Nothing(_)) => return None,
        (Answered::Truncated, Answered::Records { records, .. }) => {
            let seen = format!(
                "{server}: its {kind} answer is too long for UDP and says that it was cut (TC); TCP has all {}",
                records.len()
            );
            Finding::ok(CHECK, seen)
        }
        (Answered::Truncated, _) => {
            let seen = format!("{server}: its {kind} answer is too long for UDP, and TCP has no answer");
            Finding::failed(CHECK, seen, open_tcp)
        }
        (Answered::Records { records: cut, .. }, Answered::Records { records: all, .. }) => {
            compared(server, kind, cut, all, by_tcp)
        }
        (Answered::Records { .. }, Answered::Failed(_)) if by_tcp => {
            let seen =
                format!("{server} answers {kind} by UDP but not by TCP, and [dns] tcp asks for TCP alone");
            Finding::failed(CHECK, seen, "Unset [dns] tcp, or let TCP through to that server")
        }
        (Answered::Records { .. }, _) => {
            let seen = format!("{server} answers {kind} by UDP but not by TCP");
            Finding::warning(CHECK, seen, open_tcp)
        }
        (_, Answered::Records { .. }) if by_tcp => Finding::ok(
            CHECK,
            format!("{server} answers {kind} by TCP alone, as [dns] tcp asks"),
        ),
        (_, Answered::Records { .. }) => {
            let seen = format!("{server} answers {kind} by TCP but not by UDP");
            let advice = "Set [dns] tcp = true (KVGATE__DNS__TCP=true), or let UDP through to that server";
            Finding::warning(CHECK, seen, advice)
        }
        (Answered::Failed(why), _) | (_, Answered::Failed(why)) if others => {
            let advice = "Repair it, or leave it out of [dns] servers or /etc/resolv.conf: each lookup waits for it first";
            Finding::warning(CHECK, why.clone(), advice)
        }
        (Answered::Failed(why), _) | (_, Answered::Failed(why)) => Finding::failed_with(CHECK, why),
        (_, Answered::Truncated) => {
            let seen = format!("{server}: its {kind} answer was cut even over TCP");
            Finding::failed(
                CHECK,
                seen,
                "Look at that server: an answer over TCP is never cut",
            )
        }
    })
}

/// Both have records.
fn compared(server: &str, kind: &str, udp: &[String], tcp: &[String], by_tcp: bool) -> Finding {
    let is_part = udp.len() < tcp.len() && udp.iter().all(|record| tcp.contains(record));
    let (few, all) = (udp.len(), tcp.len());
    if is_part && by_tcp {
        let seen = format!("{server} has {few} {kind} records by UDP and {all} by TCP; [dns] tcp takes all");
        return Finding::ok(CHECK, seen);
    }
    if is_part {
        let seen = format!(
            "{server} gives {few} {kind} records by UDP and {all} by TCP, and does not say that the first answer was cut \
             (no TC bit; Consul does that)"
        );
        let advice = "kvgate asks by TCP as well, so TCP must get through. Set [dns] tcp = true (KVGATE__DNS__TCP=true) to ask by TCP alone";
        return Finding::warning(CHECK, seen, advice);
    }
    let seen = if udp == tcp {
        format!("{server} gives the same {all} {kind} records by UDP and by TCP")
    } else {
        format!("{server} deals out other {kind} records each time ({few} by UDP, {all} by TCP)")
    };
    Finding::ok(CHECK, seen)
}

/// Between servers that should know the same.
fn disagreement(inspected: &NameInspected) -> Option<Finding> {
    let sets = inspected.servers.iter().filter_map(|one| {
        let records = one.tcp.records().or(one.udp.records())?;
        let set: BTreeSet<&String> = records.iter().collect();
        Some((one, set))
    });
    let sets: Vec<_> = sets.collect();
    let (one, other) = sets.iter().find_map(|(one, set)| {
        let differs = |(two, of_two): &&(&ServerAnswers, BTreeSet<&String>)| {
            two.kind == one.kind && set.is_disjoint(of_two)
        };
        sets.iter().find(differs).map(|(two, _)| (one, two))
    })?;
    let seen = format!(
        "{} and {} know other {} records of {}",
        one.server, other.server, one.kind, inspected.name
    );
    let advice = "Set [dns] servers to those that know the S3 server";
    Some(Finding::warning(CHECK, seen, advice))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn records(count: usize) -> Answered {
        Answered::Records {
            records: (0..count).map(|i| format!("10.0.0.{i}")).collect(),
            ttl_seconds: 1,
        }
    }

    #[test]
    fn answers_by_udp_and_tcp_are_compared() {
        let failed = || Answered::Failed("no answer; check that it runs".into());
        let nothing = || Answered::Nothing("no such name".into());
        let cases = [
            (records(4), records(4), false, Verdict::Ok, "same 4"),
            (records(3), records(8), false, Verdict::Warning, "no TC bit"),
            (records(3), records(8), true, Verdict::Ok, "takes all"),
            (Answered::Truncated, records(100), false, Verdict::Ok, "all 100"),
            (
                Answered::Truncated,
                failed(),
                false,
                Verdict::Failed,
                "too long for UDP",
            ),
            (records(2), failed(), false, Verdict::Warning, "not by TCP"),
            (records(2), failed(), true, Verdict::Failed, "asks for TCP alone"),
            (failed(), records(2), false, Verdict::Warning, "not by UDP"),
            (failed(), records(2), true, Verdict::Ok, "by TCP alone"),
            (failed(), failed(), false, Verdict::Failed, "no answer"),
        ];
        for (udp, tcp, by_tcp, verdict, words) in cases {
            let answers = ServerAnswers {
                server: "the DNS server 10.0.0.53".into(),
                kind: "A".into(),
                udp,
                tcp,
            };
            let finding = judge(&answers, by_tcp, false).unwrap();
            assert_eq!(finding.verdict, verdict, "{finding:?}");
            assert!(finding.seen.contains(words), "{finding:?}");
        }
        let none = ServerAnswers {
            server: String::new(),
            kind: "AAAA".into(),
            udp: nothing(),
            tcp: nothing(),
        };
        assert!(judge(&none, false, false).is_none());
    }

    #[test]
    fn an_answer_of_others_each_time_was_not_cut() {
        let (a, b) = (["1".to_owned()], ["2".to_owned(), "3".to_owned()]);
        assert_eq!(compared("x", "A", &a, &b, false).verdict, Verdict::Ok);
    }
}
