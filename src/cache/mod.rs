//! Which chunks there are, and how they come and go: in memory, on disks and on S3.
//!
//! | folder      | what                                                                           |
//! |-------------|--------------------------------------------------------------------------------|
//! | `gateway`   | lookup, load and store of chunks, over all tiers                               |
//! | `existence` | what is known of the chunks on S3, and questions about the rest                |
//! | `tier`      | chunks in memory and on local disks, and who goes first                        |

pub(crate) mod episode;
pub mod existence;
pub mod gateway;
mod recent;
pub mod tier;
