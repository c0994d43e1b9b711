//! Each address of the server: a connection, TLS, the time of an answer, and the server's clock.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_smithy_types::DateTime;
use aws_smithy_types::date_time::Format;
use futures::future::join_all;
use rustls::CertificateError;
use rustls::pki_types::UnixTime;
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::names::Place;
use super::{Finding, late};
use crate::s3::fanout::Route;
use crate::s3::net::{NetClient, NetError, Outgoing, head_of};
use crate::s3::object::{S3, S3Options};

/// Addresses that are visited, all at a time.
const VISITED_MAX: usize = 256;
/// Addresses that a line shows.
const SHOWN: usize = 8;
/// Requests of which the quickest tells the latency.
const REQUESTS: usize = 3;
/// Servers refuse what was signed so long before or after their own time.
const SKEW_REFUSED: i64 = 900;
const SKEW_ODD: i64 = 60;
/// A certificate that ends sooner is worth a warning.
const ENDS_SOON: Duration = Duration::from_hours(14 * 24);

/// One address that answers.
struct Visit {
    connect: Duration,
    answer: Duration,
    /// Seconds that the server's clock is ahead of ours, if it tells its time.
    skew: Option<i64>,
    /// It says that it wants TLS.
    wants_tls: bool,
}

enum Unvisited {
    Net(NetError),
    Late(Duration),
}

/// Returns whether any address answers.
pub async fn check(s3: &S3, options: &S3Options, places: &[Place], limit: Duration) -> (Vec<Finding>, bool) {
    let visits = places.iter().take(VISITED_MAX).map(async |place| {
        let visit = tokio::time::timeout(limit, visit(s3, options, place)).await;
        (place, visit.unwrap_or(Err(Unvisited::Late(limit))))
    });
    let visits = join_all(visits).await;
    let good: Vec<(&Place, &Visit)> = visits
        .iter()
        .filter_map(|(place, visit)| Some((*place, visit.as_ref().ok()?)))
        .collect();
    let mut found = Vec::new();
    let secure = s3.origin().tls;
    for (place, visit) in &visits {
        if let Err(error) = visit {
            found.push(fault(place, error, !good.is_empty(), options));
        }
    }
    if good.iter().any(|(_, visit)| visit.wants_tls) {
        let seen = "the server answers that this port wants TLS";
        found.push(Finding::failed(
            "tls",
            seen,
            "Write the endpoint as https:// (--endpoint, [s3] endpoint)",
        ));
        return (found, false);
    }
    let Some((first, _)) = good.first() else {
        found.push(Finding::not_checked("clock", "no address of the server answers"));
        return (found, false);
    };
    found.insert(0, Finding::ok("addresses", said(&good, visits.len())));
    if secure {
        found.push(certificate(s3, options, first, limit).await);
    }
    found.extend(clock(&good));
    (found, true)
}

async fn visit(s3: &S3, options: &S3Options, place: &Place) -> Result<Visit, Unvisited> {
    let began = Instant::now();
    let tcp = tokio::time::timeout(options.connect_timeout, TcpStream::connect(place.address)).await;
    let tcp = tcp.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
    let connect = began.elapsed();
    let unreached = |cause| NetError::Connect {
        to: place.address,
        cause,
    };
    drop(tcp.map_err(|cause| Unvisited::Net(unreached(cause)))?);
    let client = s3.client_at(options, place.address, &place.server_name);
    // It was made with the same options before.
    let client =
        client.map_err(|error| Unvisited::Net(unreached(std::io::Error::other(error.to_string()))))?;
    let (mut answer, mut skew, mut wants_tls) = (Duration::MAX, None, false);
    for _ in 0..REQUESTS {
        let began = Instant::now();
        let (date, https) = ask(&client, s3, options).await.map_err(Unvisited::Net)?;
        answer = answer.min(began.elapsed());
        skew = date.map(|date| date - now());
        wants_tls |= https;
    }
    Ok(Visit {
        connect,
        answer,
        skew,
        wants_tls,
    })
}

/// An unsigned request: any answer will do. Returns the server's time, and whether it complains of missing TLS.
async fn ask(client: &NetClient, s3: &S3, options: &S3Options) -> Result<(Option<i64>, bool), NetError> {
    let head = head_of("GET", "/", [("host", s3.host()), ("user-agent", "kvgate-doctor")]);
    let outgoing = Outgoing {
        head: head.as_bytes(),
        body: &[],
        bodyless: false,
    };
    let route = Route::default();
    let sent = client.send(s3.origin(), &outgoing, None, &route, options.connect_timeout);
    let (head, body) = sent.await?;
    let date = head.header("date");
    let date = date.and_then(|date| DateTime::from_str(date, Format::HttpDate).ok());
    let wants_tls = head.status == 400 && String::from_utf8_lossy(&body).contains("HTTPS server");
    Ok((date.map(|date| date.secs()), wants_tls))
}

fn now() -> i64 {
    DateTime::from(SystemTime::now()).secs()
}

fn said(good: &[(&Place, &Visit)], all: usize) -> String {
    let ms = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1000.0);
    let one = |(place, visit): &(&Place, &Visit)| {
        format!(
            "{} connects in {}, answers in {}",
            place.address,
            ms(visit.connect),
            ms(visit.answer)
        )
    };
    let shown: Vec<String> = good.iter().take(SHOWN).map(one).collect();
    let more = if good.len() > SHOWN { "; ..." } else { "" };
    format!("{} of {all} answer: {}{more}", good.len(), shown.join("; "))
}

/// An address that does not answer. `others`: another one does.
fn fault(place: &Place, error: &Unvisited, others: bool, options: &S3Options) -> Finding {
    let address = place.address;
    let error = match error {
        Unvisited::Net(error) => error,
        Unvisited::Late(limit) => {
            return Finding {
                seen: format!("{address}: no result within {limit:?}"),
                ..late("addresses", *limit)
            };
        }
    };
    if let Some(tls) = error.tls() {
        return untrusted(place, tls, options);
    }
    let cause = match error {
        NetError::Connect { cause, .. } => Some(cause.kind()),
        _ => None,
    };
    let advice = match cause {
        Some(std::io::ErrorKind::ConnectionRefused) => {
            "Start the S3 server there, or correct the port of --endpoint ([s3] endpoint)"
        }
        Some(
            std::io::ErrorKind::TimedOut
            | std::io::ErrorKind::HostUnreachable
            | std::io::ErrorKind::NetworkUnreachable,
        ) => "Look at routes and firewalls between: `curl -v` of that address from this machine",
        _ if s3_speaks_tls_there(error) => {
            "Write the endpoint as https:// if the port wants TLS; else look at the server's log"
        }
        _ => "Look at what listens there: `curl -v` of that address from this machine",
    };
    match others {
        true => Finding::warning(
            "addresses",
            error.to_string(),
            format!(
                "{advice}. kvgate uses the other addresses meanwhile; take this one out of the name's records"
            ),
        ),
        false => Finding::failed("addresses", error.to_string(), advice),
    }
}

fn s3_speaks_tls_there(error: &NetError) -> bool {
    matches!(error, NetError::Closed | NetError::Head(_) | NetError::Io(_))
}

fn untrusted(place: &Place, tls: &rustls::Error, options: &S3Options) -> Finding {
    let Place { address, server_name } = place;
    let shows =
        format!("`openssl s_client -connect {address} -servername {server_name} -showcerts` shows it");
    let advice = match tls {
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => match &options.ca_file {
            None => format!(
                "Give the authority that signed it as [s3] ca_file, a PEM file (KVGATE__S3__CA_FILE=FILE); {shows}"
            ),
            Some(file) => format!(
                "{} has not the authority that signed it: give the right one; {shows}",
                file.display()
            ),
        },
        rustls::Error::InvalidCertificate(
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. },
        ) => {
            format!("Renew the server's certificate; or the clock here is wrong: compare `date -u`; {shows}")
        }
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => format!("Use a name that the certificate has as --endpoint ([s3] endpoint); {shows}"),
        rustls::Error::InvalidMessage(_) => {
            "The port speaks no TLS: write the endpoint as http://, or give the port that does".to_owned()
        }
        _ => format!("Look at the server's TLS settings; {shows}"),
    };
    Finding::failed("tls", format!("{address}: {tls}"), advice)
}

/// The certificate is good now; whether it will be soon.
async fn certificate(s3: &S3, options: &S3Options, place: &Place, limit: Duration) -> Finding {
    let name = &place.server_name;
    let trusted = match &options.ca_file {
        Some(file) => format!("the system's authorities and {}", file.display()),
        None => "the system's authorities".to_owned(),
    };
    let days = ENDS_SOON.as_secs() / 86_400;
    let ok = Finding::ok(
        "tls",
        format!("the certificate for {name} is trusted, by {trusted}, and lasts {days} days at least"),
    );
    let Ok(client) = s3.client_at(options, place.address, name) else {
        return ok;
    };
    let client = client.at_time(Arc::new(Later));
    match tokio::time::timeout(limit, ask(&client, s3, options)).await {
        Ok(Err(error)) if error.tls().is_some() => {
            let seen = format!("the certificate for {name} ends within {days} days");
            Finding::warning("tls", seen, "Renew it before it does: then no request succeeds")
        }
        _ => ok,
    }
}

/// Some days from now.
#[derive(Debug)]
struct Later;

impl TimeProvider for Later {
    fn current_time(&self) -> Option<UnixTime> {
        let now = DefaultTimeProvider.current_time()?;
        Some(UnixTime::since_unix_epoch(
            Duration::from_secs(now.as_secs()) + ENDS_SOON,
        ))
    }
}

fn clock(good: &[(&Place, &Visit)]) -> Option<Finding> {
    const ADVICE: &str =
        "Compare `date -u` here and on the server, and set the wrong one by NTP (timedatectl set-ntp true)";
    let skews: Vec<i64> = good.iter().filter_map(|(_, visit)| visit.skew).collect();
    let Some(&worst) = skews.iter().max_by_key(|skew| skew.abs()) else {
        return Some(Finding::not_checked(
            "clock",
            "the server does not tell its time (no Date header)",
        ));
    };
    let spread = skews.iter().max()? - skews.iter().min()?;
    let side = if worst > 0 { "ahead of" } else { "behind" };
    let seen = format!("the server's clock is {} s {side} this machine's", worst.abs());
    Some(match worst.abs() {
        SKEW_REFUSED.. => {
            let seen = format!("{seen}: it refuses requests that differ by more than {SKEW_REFUSED} s");
            Finding::failed("clock", seen, ADVICE)
        }
        SKEW_ODD.. => Finding::warning("clock", seen, ADVICE),
        _ if spread > SKEW_ODD => Finding::warning(
            "clock",
            format!("the clocks of the addresses differ by {spread} s"),
            ADVICE,
        ),
        0..=1 => Finding::ok(
            "clock",
            "the server's clock and this machine's are the same within 1 s",
        ),
        _ => Finding::ok("clock", seen),
    })
}
