//! The report of `kvgate verify`: totals, and a line for each object that is not right.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde_json::json;

use crate::config::units::GIB;
use crate::format::SpaceKey;
use crate::s3::object::ObjectError;
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::{Out, bytes, count};

#[derive(Debug, Default, Serialize)]
pub struct Totals {
    pub chunks: u64,
    pub bytes: u64,
    pub ok: u64,
    pub damaged: u64,
    pub unknown: u64,
    /// Chunks that were removed by others after they were listed.
    pub gone: u64,
    /// Damaged chunks that were removed.
    pub deleted: u64,
}

#[derive(Serialize)]
pub struct ObjectProblem {
    pub key: String,
    pub state: &'static str,
    pub code: &'static str,
    pub reason: String,
    pub deleted: bool,
}

impl ObjectProblem {
    /// Adds the outcome of its removal.
    pub fn removed(mut self, removal: Result<bool, ObjectError>) -> Self {
        match removal {
            Ok(deleted) => self.deleted = deleted,
            Err(error) => self.reason = format!("{}; it can't be removed: {error}", self.reason),
        }
        self
    }
}

impl fmt::Display for ObjectProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let removed = if self.deleted { " (removed)" } else { "" };
        let Self {
            key,
            state,
            code,
            reason,
            ..
        } = self;
        write!(f, "{state:<8} {code:<14} {key}: {reason}{removed}")
    }
}

/// The results of a run.
pub struct VerifyReport {
    pub totals: Totals,
    pub problems: Vec<ObjectProblem>,
    pub foreign: u64,
    pub spaces: Vec<SpaceKey>,
    pub elapsed: Duration,
}

impl VerifyReport {
    /// Writes the report; fails if any chunk is damaged or unknown.
    pub fn write(self, as_json: bool, out: &mut Out) -> Result<(), CliError> {
        let totals = &self.totals;
        let seconds = self.elapsed.as_secs_f64();
        let rate = totals.bytes as f64 / GIB as f64 / seconds.max(1e-9);
        if as_json {
            out.json(&json!({
                "spaces": self.spaces.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "totals": totals,
                "problems": self.problems,
                "foreign": self.foreign,
                "elapsed_ms": seconds * 1e3,
                "gib_per_s": rate,
            }))?;
        } else {
            out.line(format_args!(
                "{} in {}, {} in {seconds:.1} s, {rate:.2} GiB/s",
                count(totals.chunks, "chunk"),
                count(self.spaces.len() as u64, "space"),
                bytes(totals.bytes),
            ))?;
            out.line(format_args!(
                "ok {}, damaged {} (removed {}), unknown {}, gone meanwhile {}",
                totals.ok, totals.damaged, totals.deleted, totals.unknown, totals.gone
            ))?;
        }
        match totals.damaged + totals.unknown {
            0 => Ok(()),
            _ => Err(CliError::Reported),
        }
    }
}
