//! `kvgate gpu`: what GPUs are here, whether copies to and from their pages are right, and how fast they are.
//!
//! | file    | what                                                                        |
//! |---------|-----------------------------------------------------------------------------|
//! | `check` | every known layout both ways, against the CPU's copies                      |
//! | `bench` | how fast, against plain copies of the same bytes out of pinned memory       |
//! | `path`  | the whole way: from S3 through the arena into pages                         |

#![allow(clippy::cast_possible_truncation, reason = "counts of blocks and chunks")]

mod bench;
mod check;
mod error;
mod path;

pub use bench::{BenchPlan, BenchRow, Floor, bench};
pub use check::{Case, LayoutsChecked, cases, check};
pub use error::GpuError;
pub use path::{PathPlan, PathReport, path};
