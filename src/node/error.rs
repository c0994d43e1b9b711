//! The reasons why a node refuses a call, with what to do.

use std::io;
use std::sync::Arc;

use super::ledger::{AttachError, SlotError};
use super::owners::Uncovered;
use crate::format::KeyError;

/// The reason why a call can't be served, with what to do.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NodeError {
    #[error("there is no session {0:?}: attach first, and attach again after the stream of an attach ended")]
    NoSession(String),
    #[error("space {0} was not declared here: PUT /v1/spaces first")]
    UnknownSpace(String),
    #[error("there are {most} {what} already, which is the limit ([api] {key})")]
    TooMany {
        what: &'static str,
        key: &'static str,
        most: usize,
    },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error("{0}")]
    Rank(String),
    #[error(transparent)]
    Uncovered(#[from] Uncovered),
    #[error(transparent)]
    Slot(#[from] SlotError),
    #[error(
        "load {0:?} is under way already, of other chunks or of this rank: give each load an id of its own"
    )]
    LoadTaken(String),
    #[error(
        "this process can't be attached now: {0}. Raise the daemon's ulimit -n (LimitNOFILE), or attach fewer"
    )]
    System(Arc<io::Error>),
    #[error("this kvgate is going down and takes no new work")]
    Draining,
}

impl NodeError {
    /// A stable word for the reason.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoSession(_) | Self::Slot(SlotError::NoSession) => "no_session",
            Self::UnknownSpace(_) => "unknown_space",
            Self::TooMany { .. } => "too_many",
            Self::Key(KeyError::NoKey { .. }) => "no_key",
            Self::Key(KeyError::Protection { .. }) => "wrong_protection",
            Self::Attach(AttachError::RankTaken { .. }) => "rank_taken",
            Self::Attach(AttachError::OtherWorld { .. }) => "other_world_size",
            Self::Rank(_) => "bad_rank",
            Self::Uncovered(_) => "uncovered",
            Self::Slot(SlotError::NotYours) => "not_yours",
            Self::Slot(SlotError::Spoilt) => "spoilt",
            Self::Slot(SlotError::Unwritten) => "unwritten",
            Self::LoadTaken(_) => "load_taken",
            Self::System(_) | Self::Key(KeyError::Random) => "no_resources",
            Self::Draining => "draining",
        }
    }
}
