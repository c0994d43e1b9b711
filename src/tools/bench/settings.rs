//! The settings of a bench: phases, objects, requests in flight, pace. Each problem names the flag that must
//! change.

use std::time::Duration;

use serde::{Serialize, Serializer};

use super::error::BenchError;
use crate::config::units::ByteSize;
use crate::protocol::Order;

/// A phase, named by its kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BenchPhase {
    /// PUT whole objects.
    Write,
    /// GET objects in parts.
    Read,
    /// HEAD objects.
    Head,
    /// Look up chunks through a gateway.
    Lookup,
    /// DELETE objects.
    Delete,
}

impl BenchPhase {
    /// In a sensible order.
    pub const ALL: [Self; 5] = [Self::Write, Self::Read, Self::Head, Self::Lookup, Self::Delete];

    pub fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Head => "head",
            Self::Lookup => "lookup",
            Self::Delete => "delete",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.name() == name)
    }
}

/// The settings of a bench. Part of the report.
#[derive(Debug, Clone, Serialize)]
pub struct BenchSettings {
    /// None: AWS.
    pub endpoint: Option<String>,
    pub bucket: String,
    pub prefix: String,
    /// Start of the objects' keys, after the prefix. A prompt's chunks have their own keys, with this name in the
    /// salt.
    pub name: String,
    /// The server is in this process, and its work in the CPU figures.
    pub embedded: bool,
    pub objects: u64,
    pub object_bytes: u64,
    /// Bytes of one GET; of a prompt's GETs, the largest.
    pub part_bytes: u64,
    /// Requests in flight.
    pub concurrency: usize,
    /// Times that a phase goes over the objects; None: until the time limit.
    pub rounds: Option<u64>,
    #[serde(rename = "time_limit_seconds", serialize_with = "seconds")]
    pub time_limit: Option<Duration>,
    /// Limit for writes and reads.
    pub bytes_per_second: Option<u64>,
    /// Limit for every phase.
    pub requests_per_second: Option<u64>,
    /// Digest every part that is read.
    pub verify: bool,
    /// Do everything once before each phase is measured, where possible.
    pub warm_up: bool,
    /// The objects are the chunks of a prompt.
    pub prompt: Option<PromptSettings>,
}

/// A synthetic prompt.
#[derive(Debug, Clone, Serialize)]
pub struct PromptSettings {
    pub model: String,
    pub space: String,
    pub tokens: u32,
    pub order: Order,
    pub chunk_tokens: u32,
}

/// S3's own limit for one PUT.
const OBJECT_BYTES_MAX: u64 = 5 << 30;
/// Each expected digest takes 8 bytes: 512 MiB.
const PARTS_MAX: u64 = 64 << 20;

impl BenchSettings {
    /// Fails with the flag that must change.
    pub fn check(&self) -> Result<(), BenchError> {
        let (object, part) = (ByteSize(self.object_bytes), ByteSize(self.part_bytes));
        if self.objects == 0 || self.concurrency == 0 || self.object_bytes == 0 || self.part_bytes == 0 {
            return Err(BenchError::Settings(
                "--objects, --object-size, --part-size and --concurrency must be at least 1".into(),
            ));
        }
        if self.object_bytes > OBJECT_BYTES_MAX {
            return Err(BenchError::Settings(format!(
                "--object-size {object} is more than S3 takes in one PUT: give at most {}",
                ByteSize(OBJECT_BYTES_MAX)
            )));
        }
        if self.part_bytes > self.object_bytes {
            return Err(BenchError::Settings(format!(
                "--part-size {part} is more than --object-size {object}: no GET can ask for that much"
            )));
        }
        if self
            .parts()
            .checked_mul(self.objects)
            .is_none_or(|parts| parts > PARTS_MAX)
        {
            return Err(BenchError::Settings(format!(
                "--objects {} of --object-size {object} in parts of --part-size {part} are more than {PARTS_MAX} parts: \
                 raise --part-size or lower --objects",
                self.objects
            )));
        }
        Ok(())
    }

    /// Parts of an object; the last may be shorter.
    pub fn parts(&self) -> u64 {
        self.object_bytes.div_ceil(self.part_bytes)
    }
}

#[expect(clippy::ref_option, reason = "serde calls it so")]
fn seconds<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64()).serialize(to)
}

/// Bytes and numbers of objects in memory.
pub(super) fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
