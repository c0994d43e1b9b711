//! Objects on S3: the few calls that kvgate needs, with errors that say what they mean.
//!
//! [`ObjectStore`] is the seam; tests wrap stores to inject faults. [`S3`] makes its calls over the AWS SDK with its retries
//! and checksums off (HEAD and ranged GET, made by the thousand, go round its typed layer: `reads`, `sign`), over our
//! connections ([`net`](crate::s3::net)), as often and where [`Attempts`](crate::s3::fanout::Attempts) says. Bytes of a ranged GET go
//! into the caller's slot, bytes of a PUT come from it.
//!
//! It knows keys and bytes, not chunks: whether an object is a good chunk is the gateway's question.

mod capabilities;
mod client;
mod credentials;
mod deletes;
mod error;
mod inspect;
mod reads;
mod s3;
mod sign;
mod store;
mod upkeep;

pub use capabilities::{Capabilities, Probed, Support};
pub use client::{S3ClientError, S3Options};
pub use error::{ErrorKind, ObjectError, Operation};
pub use inspect::{AgeRule, RangeAnswer};
pub use s3::S3;
pub use store::{
    Condition, GetFuture, GetRange, LifecycleRules, ListPage, Listed, ObjectMeta, ObjectStore, PutExtras,
    RequestCounts, RequestTimes, Result, StoreFuture, Version,
};
