//! A server's real behaviour, found out by trying it on a tiny object: some accept a condition and overwrite all the
//! same, some answer `GetObjectAttributes` with the object itself.

use bytes::Bytes;
use tokio::time::Instant;

use super::error::ErrorKind;
use super::store::{Condition, ObjectStore, Result};
use crate::format::Crc64;
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
        let found = Self::try_out(store, key, mode, deadline).await;
        if let Err(error) = store.delete(&[key.to_owned()], deadline).await {
            tracing::debug!(%error, "the start-up probe's object stays");
        }
        found
    }

    async fn try_out(store: &dyn ObjectStore, key: &str, mode: ProbeMode, deadline: Instant) -> Result<Self> {
        let kept = async |when| match store.put(key, Bytes::from_static(BODY), when, deadline).await {
            Err(error) if error.kind == ErrorKind::Changed => Ok(true),
            Err(error) if error.kind.retryable() || error.kind == ErrorKind::Deadline => Err(error),
            // It overwrites, or does not know conditions.
            Ok(_) | Err(_) => Ok(false),
        };
        let if_none_match = kept(Condition::IfAbsent).await?;
        let meta = store.head(key, deadline).await?;
        let wrong = "00000000000000000000000000000000";
        let right = Condition::IfMatch(&meta.version.etag);
        let if_match = kept(Condition::IfMatch(wrong)).await? && !kept(right).await?;
        let attributes = match mode {
            ProbeMode::Head => false,
            ProbeMode::Attributes => true,
            ProbeMode::Auto => {
                let answer = store.attributes(key, deadline).await;
                answer
                    .is_ok_and(|seen| seen.len == BODY.len() as u64 && seen.version.etag == meta.version.etag)
            }
        };
        Ok(Self {
            if_none_match,
            if_match,
            attributes,
            checksum: Self::checks(store, key, deadline).await?,
        })
    }

    /// The right one is taken, and a wrong one refused: some servers know the header no more than any other.
    async fn checks(store: &dyn ObjectStore, key: &str, deadline: Instant) -> Result<bool> {
        let right = Crc64::of(BODY);
        for (crc64, is_taken) in [(right ^ 1, false), (right, true)] {
            let body = Bytes::from_static(BODY);
            match store
                .put_checked(key, body, crc64, Condition::Always, deadline)
                .await
            {
                Err(error) if error.kind.retryable() || error.kind == ErrorKind::Deadline => {
                    return Err(error);
                }
                result if result.is_ok() == is_taken => {}
                _ => return Ok(false),
            }
        }
        Ok(true)
    }
}
