//! Who asks for what: credentials, region, bucket, and where the bucket's name is in a request. One listing tells them all.

use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::{Finding, late};
use crate::s3::object::{ErrorKind, ObjectError, ObjectStore, S3, S3Options};

/// Whether requests for objects make sense.
pub enum Account {
    Accepted,
    /// The rest of a sentence that begins with "because".
    Refused(String),
}

pub async fn check(s3: &S3, options: &S3Options, limit: Duration) -> (Vec<Finding>, Account) {
    let key = match timeout(limit, s3.access_key_id()).await {
        Ok(Ok(key)) => key,
        Ok(Err(why)) => return no_credentials(Finding::failed("credentials", why, NO_CREDENTIALS)),
        Err(_) => return no_credentials(late("credentials", limit)),
    };
    let from = match std::env::var("AWS_ACCESS_KEY_ID") {
        Ok(given) if given == key => "of AWS_ACCESS_KEY_ID",
        _ => "of the AWS chain (profile, web identity, container or instance)",
    };
    let key = format!("access key {key}, {from}");
    match s3.check_bucket(Instant::now() + limit).await {
        Ok(()) => (accepted(&key, options), Account::Accepted),
        Err(error) => refused(&key, options, &error),
    }
}

const NO_CREDENTIALS: &str =
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, for the user that runs kvgate";

fn no_credentials(failed: Finding) -> (Vec<Finding>, Account) {
    let because = "there are no credentials";
    let rest = ["region", "bucket"].map(|check| Finding::not_checked(check, because));
    (
        std::iter::once(failed).chain(rest).collect(),
        Account::Refused(because.into()),
    )
}

fn accepted(key: &str, options: &S3Options) -> Vec<Finding> {
    let style = match options.path_style {
        true => "the bucket is in the path of URLs, and the server takes it there",
        false => "the bucket is in the host name, and the server takes it there",
    };
    vec![
        Finding::ok("credentials", format!("{key}: accepted")),
        Finding::ok(
            "region",
            format!("requests signed for {} are accepted", options.region),
        ),
        Finding::ok(
            "bucket",
            format!("{} is there and can be listed {}", options.bucket, under(options)),
        ),
        Finding::ok("path_style", style),
    ]
}

/// The part of the bucket that is kvgate's.
fn under(options: &S3Options) -> String {
    match options.prefix.as_str() {
        "" => "as a whole".to_owned(),
        prefix => format!("under {prefix}"),
    }
}

fn refused(key: &str, options: &S3Options, error: &ObjectError) -> (Vec<Finding>, Account) {
    let words = error.detail();
    let known = Finding::ok("credentials", format!("{key}: accepted"));
    let (found, because) = match error.kind {
        ErrorKind::Skewed => {
            let seen = format!("the server refuses the time of our requests: {words}");
            let not = Finding::not_checked("credentials", "the clocks differ by too much");
            (
                vec![Finding::failed("clock", seen, advice(error)), not],
                "the clocks differ by too much",
            )
        }
        ErrorKind::Credentials => {
            let failed = Finding::failed("credentials", format!("{key}: {words}"), advice_on_keys(words));
            (vec![failed], "the server does not accept the credentials")
        }
        ErrorKind::Region => {
            let seen = format!("requests signed for {} are refused: {words}", options.region);
            let failed = Finding::failed("region", seen, advice_on_region(words));
            (vec![failed], "the region is wrong")
        }
        ErrorKind::NoBucket => {
            let seen = format!("there is no bucket {}: {words}", options.bucket);
            let mut advice = format!(
                "Create it (aws s3 mb s3://{}), or give another with --bucket ([s3] bucket)",
                options.bucket
            );
            if !options.path_style {
                advice +=
                    "; or set [s3] path_style = true, if the server does not know buckets in host names";
            }
            (
                vec![known, Finding::failed("bucket", seen, advice)],
                "there is no such bucket",
            )
        }
        ErrorKind::Denied => {
            let seen = format!(
                "{} may not be listed {} with {key}: {words}",
                options.bucket,
                under(options)
            );
            let advice = format!(
                "Allow s3:ListBucket on {0}, and s3:GetObject and s3:PutObject on {0}/{1}*, to this user; or \
                 set the keys of another",
                options.bucket, options.prefix
            );
            (
                vec![Finding::failed("bucket", seen, advice)],
                "the bucket may not be listed",
            )
        }
        _ => {
            let failed = Finding::failed("bucket", format!("{}: {words}", options.bucket), advice(error));
            (vec![failed], "the bucket does not answer")
        }
    };
    let mut found = found;
    for check in ["credentials", "region", "bucket"] {
        if found.iter().all(|finding| finding.check != check) {
            found.push(Finding::not_checked(check, because));
        }
    }
    (found, Account::Refused(because.into()))
}

fn advice(error: &ObjectError) -> String {
    let advice = error.kind.advice();
    let next = advice.split_once(": ").map_or(advice, |(_, next)| next);
    let mut letters = next.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn advice_on_keys(words: &str) -> &'static str {
    match words {
        _ if words.contains("InvalidAccessKeyId") => {
            "The server has no such access key: set AWS_ACCESS_KEY_ID (or AWS_PROFILE) to one that it has; on Ceph, \
             `radosgw-admin user info --uid=USER` shows them"
        }
        _ if words.contains("SignatureDoesNotMatch") => {
            "The secret key is not that of this access key: set AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) again, without a line \
             break. A proxy that rewrites Host or path does the same"
        }
        _ if words.contains("Token") => "The session token has expired or is wrong: get new credentials",
        _ => NO_CREDENTIALS,
    }
}

/// Servers say which one they expect, in quotes.
fn advice_on_region(words: &str) -> String {
    let expected = words
        .split("expecting ")
        .nth(1)
        .and_then(|rest| rest.split(['\'', '"']).nth(1));
    match expected {
        Some(region) => format!("Give --region {region} ([s3] region, KVGATE__S3__REGION={region})"),
        None => "Give the bucket's region with --region ([s3] region)".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_region_that_the_server_names_is_advised() {
        for words in [
            "HTTP 400 AuthorizationHeaderMalformed The authorization header is malformed; the region is wrong; expecting \
             'eu-central-1'. (request 1)",
            "HTTP 400 AuthorizationHeaderMalformed the region 'x' is wrong; expecting \"eu-central-1\" (request -)",
        ] {
            assert!(
                advice_on_region(words).contains("--region eu-central-1 "),
                "{words}"
            );
        }
        assert!(advice_on_region("HTTP 301").contains("--region"));
    }
}
