//! What may be done in the bucket, and what the server can do: each thing that kvgate uses, or goes without.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::Finding;
use super::own_objects::OwnObjects;
use super::removal;
use crate::config::{Config, Lower};
use crate::format::KeyPrefix;
use crate::protocol::ProbeMode;
use crate::s3::object::{Condition, ErrorKind, ObjectStore, Probed, RangeAnswer, Result, S3, Support};

/// Bytes of the object that ranges are tried on.
const OBJECT_LEN: usize = 64 << 10;
/// Written first, and probed last.
const OBJECT: &str = "object";
const RANGE_LEN: usize = 1 << 10;
const OTHER_ETAG: &str = "00000000000000000000000000000000";

/// What the credentials may do.
pub struct Rights {
    pub may_write: bool,
    /// An object that can be read, with its length and ETag.
    object: Option<Readable>,
}

struct Readable {
    key: String,
    len: u64,
    etag: String,
}

/// Tries to write, and to read: what was written, or else what is there.
pub async fn rights(s3: &S3, config: &Config, own: &OwnObjects, limit: Duration) -> (Vec<Finding>, Rights) {
    let deadline = || Instant::now() + limit;
    let key = own.key(OBJECT);
    let body: Vec<u8> = (0..=u8::MAX).cycle().take(OBJECT_LEN).collect();
    let written = s3
        .put(&key, Bytes::from(body.clone()), Condition::Always, deadline())
        .await;
    let mut found = vec![write_finding(&written, config)];
    let may_write = written.is_ok();
    let object = if may_write {
        let read = s3.read(&key, OBJECT_LEN, deadline()).await;
        found.push(read_finding(&key, read.map(|read| read == body)));
        let meta = s3.head(&key, deadline()).await.ok();
        meta.map(|meta| Readable {
            key,
            len: meta.len,
            etag: meta.version.etag.to_string(),
        })
    } else {
        let keys = KeyPrefix::new(&config.s3.prefix);
        let (finding, object) = any_object(s3, keys.as_str(), limit).await;
        found.push(finding);
        object
    };
    (found, Rights { may_write, object })
}

fn write_finding(written: &Result<std::sync::Arc<str>>, config: &Config) -> Finding {
    const CHECK: &str = "write";
    let Err(error) = written else {
        return Finding::ok(CHECK, "objects can be written under the prefix");
    };
    let words = error.detail();
    match error.kind {
        ErrorKind::Denied => {
            let seen = format!("a read-only user: writes are refused ({words})");
            let by_disk = !config.disk.paths.is_empty() && config.disk.store == Lower::Stop;
            if config.memory.store == Lower::Stop || by_disk {
                return Finding::ok(
                    CHECK,
                    format!("{seen}, and the configuration sends no chunks to S3"),
                );
            }
            let advice = format!(
                "Allow s3:PutObject on {}/{}* to this user; or, for a node that only reads, set [memory] \
                 store = \"stop\"",
                config.s3.bucket.as_deref().unwrap_or_default(),
                KeyPrefix::new(&config.s3.prefix).as_str()
            );
            Finding::failed(CHECK, seen, advice)
        }
        ErrorKind::Quota => Finding::failed(
            CHECK,
            format!("the quota of the bucket or its owner is used up: {words}"),
            "Raise it, or remove chunks (`kvgate gc`, [gc], `kvgate lifecycle apply`)",
        ),
        ErrorKind::NoBucket => Finding::failed(
            "path_style",
            format!("the server takes no bucket from the host name: {words}"),
            "Set [s3] path_style = true (KVGATE__S3__PATH_STYLE=true)",
        ),
        _ => Finding::failed(
            CHECK,
            error.to_string(),
            "Look at the server's log, with the request id",
        ),
    }
}

fn read_finding(key: &str, read: Result<bool>) -> Finding {
    const CHECK: &str = "read";
    match read {
        Ok(true) => Finding::ok(CHECK, "what was written is read back the same, byte for byte"),
        Ok(false) => Finding::failed(
            CHECK,
            format!("{key} was read back with other bytes than were written"),
            "Look at memory and network of this machine, and at proxies that rewrite answers",
        ),
        Err(error) if error.kind == ErrorKind::Denied => {
            let advice = "Allow s3:GetObject under the prefix to this user: nothing can be loaded without";
            Finding::failed(
                CHECK,
                format!("a write-only user: reads are refused ({})", error.detail()),
                advice,
            )
        }
        Err(error) => Finding::failed(
            CHECK,
            error.to_string(),
            "Look at the server's log, with the request id",
        ),
    }
}

/// Of a user that may not write: the first object under the prefix.
async fn any_object(s3: &S3, prefix: &str, limit: Duration) -> (Finding, Option<Readable>) {
    const CHECK: &str = "read";
    let listed = s3.list(prefix, None, Instant::now() + limit).await;
    let object = listed.map(|page| page.objects.into_iter().find(|object| object.len > 0));
    let object = match object {
        Ok(Some(object)) => object,
        Ok(None) => {
            return (
                Finding::not_checked(CHECK, "there is no object under the prefix"),
                None,
            );
        }
        Err(error) => return (read_finding(prefix, Err(error)), None),
    };
    let len = RANGE_LEN.min(usize::try_from(object.len).unwrap_or(RANGE_LEN));
    match s3
        .range_answer(&object.key, len, None, Instant::now() + limit)
        .await
    {
        Ok(_) => {
            let found = Finding::ok(CHECK, format!("{} can be read", object.key));
            let readable = Readable {
                key: object.key,
                len: object.len,
                etag: object.etag,
            };
            (found, Some(readable))
        }
        Err(error) => (read_finding(&object.key, Err(error)), None),
    }
}

pub async fn check(
    s3: &S3,
    config: &Config,
    own: &OwnObjects,
    rights: &Rights,
    limit: Duration,
) -> Vec<Finding> {
    let mut found = Vec::new();
    match &rights.object {
        Some(object) => {
            let deadline = Instant::now() + limit;
            let len = RANGE_LEN.min(usize::try_from(object.len).unwrap_or(RANGE_LEN));
            let ranged = s3.range_answer(&object.key, len, None, deadline).await;
            found.push(range_finding(ranged, len as u64, object.len));
            let other = s3
                .range_answer(&object.key, len, Some(OTHER_ETAG), deadline)
                .await;
            found.push(get_if_match_finding(other, &object.etag));
        }
        None => {
            for check in ["range", "get_if_match"] {
                found.push(Finding::not_checked(check, "there is no object that can be read"));
            }
        }
    }
    if rights.may_write {
        let probed = Probed::of(s3, &own.key(OBJECT), true, Instant::now() + limit).await;
        found.extend(probed_findings(probed, config.s3.probe));
    } else {
        for check in ["if_none_match", "if_match", "attributes", "checksum", "metadata"] {
            found.push(Finding::not_checked(check, "nothing may be written"));
        }
    }
    let deadline = Instant::now() + limit;
    found.push(removal::lifecycle(s3.age_rules(deadline).await, config));
    found.extend(removal::versions(&s3.keeps_versions(deadline).await));
    found
}

fn range_finding(answer: Result<RangeAnswer>, len: u64, whole: u64) -> Finding {
    const CHECK: &str = "range";
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            let advice = "kvgate loads by ranges alone: use a server that has them";
            return Finding::failed(CHECK, error.to_string(), advice);
        }
    };
    match (answer.status, answer.content_length, answer.content_range) {
        (206, Some(got), Some(_)) if got == len => {
            Finding::ok(CHECK, "a ranged GET is answered with 206 and these bytes alone")
        }
        (200, Some(got), Some(_)) if got == len => Finding::warning(
            CHECK,
            "a ranged GET is answered with 200 in place of 206; Content-Range and length are right",
            "Nothing: kvgate takes it. A proxy or cache between may take the part for the whole object",
        ),
        (status, Some(got), None) if got == whole && whole != len => Finding::failed(
            CHECK,
            format!("a ranged GET is answered with {status} and the whole object"),
            "kvgate loads by ranges alone: use a server that has them, and no proxy between that drops Range",
        ),
        (206 | 200, ..) => Finding::failed(
            CHECK,
            format!(
                "{:?} bytes came where {len} were asked for",
                answer.content_length
            ),
            "Look at proxies between: kvgate refuses such answers",
        ),
        (status, ..) => Finding::failed(
            CHECK,
            format!("a ranged GET is answered with {status}"),
            "Look at the server's log",
        ),
    }
}

/// `etag`: of the object, which the request did not name.
fn get_if_match_finding(answer: Result<RangeAnswer>, etag: &str) -> Finding {
    const CHECK: &str = "get_if_match";
    match answer {
        Err(error) if error.kind == ErrorKind::Changed => Finding::ok(
            CHECK,
            "a GET with If-Match of another version is refused with 412",
        ),
        Err(error) => Finding::warning(
            CHECK,
            format!(
                "a GET with If-Match of another version than {etag}: {}",
                error.detail()
            ),
            "Nothing: kvgate compares the ETag of each answer itself",
        ),
        Ok(answer) => Finding::warning(
            CHECK,
            format!(
                "a GET with If-Match of another version is answered with {}",
                answer.status
            ),
            "Nothing: kvgate compares the ETag of each answer itself",
        ),
    }
}

fn probed_findings(probed: Result<Probed>, mode: ProbeMode) -> Vec<Finding> {
    let probed = match probed {
        Ok(probed) => probed,
        Err(error) => {
            let advice = "Try again: the server failed in between";
            return vec![Finding::failed("if_none_match", error.to_string(), advice)];
        }
    };
    let once = "Nothing must be done: kvgate asks before it stores. Nodes that store the same chunk at once all send it; a \
                server with conditional PUT (Ceph RGW, MinIO, AWS) saves that";
    let repair = "Nothing must be done: damaged objects are replaced by a plain PUT";
    vec![
        match &probed.if_none_match {
            Support::Honoured => Finding::ok(
                "if_none_match",
                "a PUT with If-None-Match: * over an object is refused with 412",
            ),
            Support::Ignored => Finding::warning(
                "if_none_match",
                "a PUT with If-None-Match: * silently overwrites the object",
                once,
            ),
            Support::Refused(words) => Finding::warning(
                "if_none_match",
                format!("a PUT with If-None-Match: * is not implemented: {words}"),
                once,
            ),
        },
        match &probed.if_match {
            Support::Honoured => Finding::ok(
                "if_match",
                "a PUT with If-Match overwrites that version and no other",
            ),
            Support::Ignored => Finding::warning(
                "if_match",
                "a PUT with If-Match of another version silently overwrites the object",
                repair,
            ),
            Support::Refused(words) => Finding::warning(
                "if_match",
                format!("a PUT with If-Match is refused: {words}"),
                repair,
            ),
        },
        attributes_finding(&probed.attributes, mode),
        match &probed.checksum {
            Support::Honoured => Finding::ok(
                "checksum",
                "a PUT whose bytes do not match their CRC-64/NVME is refused",
            ),
            Support::Ignored | Support::Refused(_) => Finding::ok(
                "checksum",
                "the server does not compare CRC-64/NVME: kvgate's own digests find damage when a chunk is read",
            ),
        },
        match &probed.metadata {
            Support::Honoured => Finding::ok(
                "metadata",
                "an object keeps user metadata: run hints save lookups some of their questions",
            ),
            Support::Ignored | Support::Refused(_) => Finding::ok(
                "metadata",
                "an object keeps no user metadata of 1.4 KB: chunks are stored without run hints, and lookups ask some more \
                 questions",
            ),
        },
    ]
}

fn attributes_finding(support: &Support, mode: ProbeMode) -> Finding {
    const CHECK: &str = "attributes";
    let instead = match support {
        Support::Honoured if mode == ProbeMode::Head => {
            return Finding::ok(
                CHECK,
                "GetObjectAttributes works; [s3] probe = \"head\" asks by HEAD",
            );
        }
        Support::Honoured => {
            return Finding::ok(
                CHECK,
                "GetObjectAttributes works: existence is asked by it, but for the end of a prefix by HEAD",
            );
        }
        Support::Ignored => "GetObjectAttributes is ignored: the object itself is the answer",
        Support::Refused(_) => "the server does not know GetObjectAttributes",
    };
    match mode {
        ProbeMode::Attributes => Finding::failed(
            CHECK,
            format!("{instead}, and [s3] probe = \"attributes\" asks by it"),
            "Unset [s3] probe, or set it to \"head\"",
        ),
        _ => Finding::ok(CHECK, format!("{instead}; existence is asked by HEAD")),
    }
}
