//! The chunks of a node: which ones exist, and how they come and go in memory, on disks and on S3.
//!
//! | folder      | what                                                                           |
//! |-------------|--------------------------------------------------------------------------------|
//! | `gateway`   | lookup, load and store of chunks, over all tiers                               |
//! | `admission` | which chunks a node stores on S3                                                |
//! | `existence` | known existence of chunks on S3, and questions for the rest                    |
//! | `peers`     | other nodes' memories, asked before S3                                         |
//! | `tier`      | chunks in memory and on local disks, and which of them leave first             |

pub mod admission;
pub(crate) mod episode;
pub mod existence;
pub mod gateway;
pub mod peers;
mod recent;
pub mod tier;
