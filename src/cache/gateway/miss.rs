//! The reasons why a chunk was not loaded.

use std::sync::Arc;

use crate::format::HeaderError;
use crate::s3::object::ObjectError;

/// The reason why a chunk was not loaded. None of its bytes reach the caller.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Miss {
    #[error("there is no such chunk")]
    Absent,
    #[error("the object is damaged: its length is wrong ({0})")]
    WrongLength(Arc<ObjectError>),
    #[error("the object is damaged: {0}")]
    BadHeader(HeaderError),
    #[error("the object is not this chunk: {0}")]
    Foreign(HeaderError),
    #[error("this kvgate can't read the object: {0}. Another version wrote it; it is left as it is")]
    Unreadable(HeaderError),
    #[error("the object is not the tenant's: {0}")]
    Forged(HeaderError),
    #[error("this kvgate lacks the object's key: {0}. It is left as it is")]
    NoKey(HeaderError),
    #[error("the object is damaged: the digest of plane {plane} does not match")]
    BadDigest { plane: usize },
    #[error("the object is known to be damaged")]
    Quarantined,
    #[error("the object was replaced while it was read")]
    Replaced,
    #[error("it is unknown whether the chunk is there: {0}")]
    Unknown(Arc<ObjectError>),
    #[error("an object has {object_bytes} bytes, the arena {arena_bytes}: raise [arena] size")]
    ArenaTooSmall { object_bytes: usize, arena_bytes: usize },
    #[error(
        "no slot became free before the deadline, or engines that hang hold them all: release chunks earlier, end what hangs, or raise [arena] size"
    )]
    ArenaFull,
    #[error(
        "the load or its engine holds as much as it may, and nothing of it was released before the deadline: release chunks as they are copied, or raise [load] window or engine_share"
    )]
    NotReleased,
    #[error(
        "the other ranks went on without this one, which did not join their load in time: raise [load] join_grace if it comes so late again and again"
    )]
    JoinedLate,
    #[error("not tried, because chunk {at} of the prompt is missing")]
    RunEnded { at: usize },
}

impl Miss {
    /// All that [`code`](Self::code) may say.
    pub const CODES: &'static [&'static str] = &[
        "absent",
        "wrong_length",
        "bad_header",
        "foreign_space",
        "foreign_chunk",
        "unreadable",
        "forged",
        "no_key",
        "bad_digest",
        "quarantined",
        "replaced",
        "arena_too_small",
        "arena_full",
        "not_released",
        "joined_late",
        "run_ended",
        "unknown",
    ];

    /// A stable word for the reason.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::WrongLength(_) => "wrong_length",
            Self::BadHeader(_) => "bad_header",
            Self::Foreign(HeaderError::OtherSpace(_)) => "foreign_space",
            Self::Foreign(_) => "foreign_chunk",
            Self::Unreadable(_) => "unreadable",
            Self::Forged(_) => "forged",
            Self::NoKey(_) => "no_key",
            Self::BadDigest { .. } => "bad_digest",
            Self::Quarantined => "quarantined",
            Self::Replaced => "replaced",
            Self::Unknown(_) => "unknown",
            Self::ArenaTooSmall { .. } => "arena_too_small",
            Self::ArenaFull => "arena_full",
            Self::NotReleased => "not_released",
            Self::JoinedLate => "joined_late",
            Self::RunEnded { .. } => "run_ended",
        }
    }
}
