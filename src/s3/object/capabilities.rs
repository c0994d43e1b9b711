//! A server's real behaviour, found out by trying it on a tiny object: some accept a condition and overwrite all the
//! same, some answer `GetObjectAttributes` with the object itself.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;

use super::error::{ErrorKind, ObjectError};
use super::store::{Condition, ObjectStore, PutExtras, Result};
use crate::format::{ChunkHash, Crc64, RUN_CHUNKS_MAX, Run};
use crate::protocol::ProbeMode;

/// The server's behaviour, as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is something of its own that a server does or does not"
)]
pub struct Capabilities {
    /// A PUT with `If-None-Match: *` does not overwrite.
    pub if_none_match: bool,
    /// A PUT with `If-Match` overwrites that version and no other.
    pub if_match: bool,
    /// Existence is asked by `GetObjectAttributes`.
    pub attributes: bool,
    /// A PUT whose body has not the CRC-64/NVME that was sent with it is refused.
    pub checksum: bool,
    /// An object keeps the user metadata that its PUT said, of the length of a run hint.
    pub metadata: bool,
}

/// How a server treats something that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Support {
    Honoured,
    /// It answers as if nothing had been asked for.
    Ignored,
    /// It refuses the request; in its words.
    Refused(String),
}

/// How a server treats the requests that kvgate would like to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probed {
    /// A PUT with `If-None-Match: *` over an object that exists.
    pub if_none_match: Support,
    /// A PUT with `If-Match` of another version, then of the right one.
    pub if_match: Support,
    pub attributes: Support,
    /// A PUT with a wrong CRC-64/NVME, then with the right one.
    pub checksum: Support,
    /// A PUT with the longest run hint, which a HEAD then shows.
    pub metadata: Support,
}

const BODY: &[u8] = b"kvgate start-up probe, may be deleted";

impl Capabilities {
    /// Tries them on `key`, which it writes and removes. Where it may not write, nothing is taken for granted.
    pub async fn probe(
        store: &dyn ObjectStore,
        key: &str,
        mode: ProbeMode,
        deadline: Instant,
    ) -> Result<Self> {
        let put = |when| store.put(key, Bytes::from_static(BODY), when, deadline);
        let nothing = Self {
            attributes: mode == ProbeMode::Attributes,
            ..Self::default()
        };
        let first = match put(Condition::IfAbsent).await {
            Err(error) if matches!(error.kind, ErrorKind::Unsupported | ErrorKind::Refused) => {
                put(Condition::Always).await
            }
            result => result,
        };
        match first {
            Err(error) if error.kind == ErrorKind::Denied => return Ok(nothing),
            // Our own first attempt, whose answer was lost.
            Err(error) if error.kind == ErrorKind::Changed => {}
            result => drop(result?),
        }
        let found = Probed::of(store, key, mode == ProbeMode::Auto, deadline).await;
        if let Err(error) = store.delete(&[key.to_owned()], deadline).await {
            tracing::debug!(%error, "the start-up probe's object stays");
        }
        let found = found?;
        Ok(Self {
            if_none_match: found.if_none_match == Support::Honoured,
            if_match: found.if_match == Support::Honoured,
            attributes: match mode {
                ProbeMode::Head => false,
                ProbeMode::Attributes => true,
                ProbeMode::Auto => found.attributes == Support::Honoured,
            },
            checksum: found.checksum == Support::Honoured,
            metadata: found.metadata == Support::Honoured,
        })
    }
}

impl Probed {
    /// Tries them on `key`, where there is an object that may be overwritten; leaves one there. `attributes`: asks for them,
    /// too.
    pub async fn of(store: &dyn ObjectStore, key: &str, attributes: bool, deadline: Instant) -> Result<Self> {
        let put = |when| store.put(key, Bytes::from_static(BODY), when, deadline);
        let if_none_match = kept(put(Condition::IfAbsent).await)?;
        let meta = store.head(key, deadline).await?;
        let attributes = match attributes {
            false => Support::Ignored,
            true => match store.attributes(key, deadline).await {
                Ok(seen) if seen.len == meta.len && seen.version.etag == meta.version.etag => {
                    Support::Honoured
                }
                Ok(_) => Support::Ignored,
                Err(error) if error.kind == ErrorKind::Protocol => Support::Ignored,
                Err(error) => Support::Refused(error.detail().to_owned()),
            },
        };
        let wrong = "00000000000000000000000000000000";
        let mut if_match = kept(put(Condition::IfMatch(wrong)).await)?;
        if if_match == Support::Honoured {
            if_match = match kept(put(Condition::IfMatch(&meta.version.etag)).await)? {
                Support::Ignored => Support::Honoured,
                Support::Honoured => Support::Refused("the right ETag counts as a wrong one".into()),
                refused @ Support::Refused(_) => refused,
            };
        }
        Ok(Self {
            if_none_match,
            if_match,
            attributes,
            checksum: Self::checksum(store, key, deadline).await?,
            metadata: Self::metadata(store, key, deadline).await?,
        })
    }

    /// The right one is taken, and a wrong one refused: some servers know the header no more than any other.
    async fn checksum(store: &dyn ObjectStore, key: &str, deadline: Instant) -> Result<Support> {
        let right = Crc64::of(BODY);
        let put = |crc64| {
            let body = Bytes::from_static(BODY);
            let extras = PutExtras {
                crc64: Some(crc64),
                run: None,
            };
            store.put_with(key, body, extras, Condition::Always, deadline)
        };
        match put(right ^ 1).await.map_err(passing) {
            Ok(_) => return Ok(Support::Ignored),
            Err(error) => drop(error?),
        }
        match put(right).await.map_err(passing) {
            Ok(_) => Ok(Support::Honoured),
            Err(error) => Ok(Support::Refused(error?.detail().to_owned())),
        }
    }
}

impl Probed {
    /// Swift refuses metadata of more than 256 bytes, and others may lose it.
    async fn metadata(store: &dyn ObjectStore, key: &str, deadline: Instant) -> Result<Support> {
        let run = Run::of(&[ChunkHash([0xA5; 32]); RUN_CHUNKS_MAX]).text();
        let extras = PutExtras {
            crc64: None,
            run: Some(&run),
        };
        let put = store.put_with(key, Bytes::from_static(BODY), extras, Condition::Always, deadline);
        match put.await.map_err(passing) {
            Ok(_) => {
                let meta = store.head(key, deadline).await?;
                Ok(match meta.run.as_deref() == Some(&run) {
                    true => Support::Honoured,
                    false => Support::Ignored,
                })
            }
            Err(error) => Ok(Support::Refused(error?.detail().to_owned())),
        }
    }
}

/// The answer to a PUT whose condition does not hold.
fn kept(answer: Result<Arc<str>>) -> Result<Support> {
    match answer.map_err(passing) {
        Ok(_) => Ok(Support::Ignored),
        Err(Ok(error)) if error.kind == ErrorKind::Changed => Ok(Support::Honoured),
        Err(Ok(error)) => Ok(Support::Refused(error.detail().to_owned())),
        Err(Err(error)) => Err(error),
    }
}

/// An error that says something of the server; or else one that says something of this moment alone.
fn passing(error: ObjectError) -> Result<ObjectError> {
    match error.kind.retryable() || matches!(error.kind, ErrorKind::Deadline | ErrorKind::Quota) {
        true => Err(error),
        false => Ok(error),
    }
}
