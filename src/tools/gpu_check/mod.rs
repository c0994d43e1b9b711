//! `kvgate gpu`: lists GPUs, checks copies to and from their pages, and measures their speed.
//!
//! | file    | what                                                                        |
//! |---------|-----------------------------------------------------------------------------|
//! | `check` | every known layout both ways, against the CPU's copies                      |
//! | `bench` | speed, against plain copies of the same bytes out of pinned memory          |
//! | `path`  | the whole path: from S3 through the arena into pages                        |

#![allow(clippy::cast_possible_truncation, reason = "counts of blocks and chunks")]

mod bench;
mod check;
mod error;
mod path;

pub use bench::{BenchPlan, BenchRow, Floor, bench};
pub use check::{Case, LayoutsChecked, cases, check};
pub use error::GpuError;
pub use path::{PathPlan, PathReport, path};
