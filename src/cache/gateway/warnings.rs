//! Warnings that may come for one chunk after the other, and are told as one.

use std::time::Duration;

use crate::cache::episode::Episode;

pub struct BucketWarnings {
    /// Chunks that S3 did not accept.
    pub waits: Episode,
    /// Chunks that were committed and can't be sent.
    pub given_up: Episode,
    /// PUTs whose bytes changed on the way.
    pub sent_again: Episode,
    /// Chunks that can't be stored, sent or loaded, for want of a key.
    pub keyless: Episode,
    /// Objects on S3 that are no chunks.
    pub damaged: Episode,
    /// Lookups that S3 refuses to answer.
    pub denied: Episode,
    /// Chunks in use that may be taken by a lifecycle rule.
    pub not_refreshed: Episode,
    /// Bytes from S3 that differed the first time.
    pub read_again: Episode,
    /// Bytes from a peer that are not the chunk.
    pub peer: Episode,
}

impl BucketWarnings {
    pub fn new(repeat: Duration) -> Self {
        let of = |what| Episode::new(what, repeat);
        Self {
            waits: of("chunks wait to be stored, and are tried again"),
            given_up: of("chunks can't leave this node, and are given up"),
            sent_again: of("bytes changed on their way to S3, and are sent again"),
            keyless: of("keys of [keys] file are not here: chunks are not stored, sent or loaded"),
            damaged: of("damaged chunks on S3"),
            denied: of(
                "S3 does not let this node look chunks up (`kvgate doctor` says why); they count as unknown",
            ),
            not_refreshed: of("chunks in use can't be refreshed on S3"),
            peer: of(
                "bytes from another node are not the chunk, which comes from S3; the node is left alone for a while",
            ),
            read_again: of("bytes from S3 don't match their digest, and are read again"),
        }
    }
}

pub struct DiskWarnings {
    /// Files that can't be read.
    pub unreadable: Episode,
    /// Lost chunks: unreadable files that S3 never got.
    pub lost: Episode,
}

impl DiskWarnings {
    pub fn new(repeat: Duration) -> Self {
        let of = |what| Episode::new(what, repeat);
        Self {
            unreadable: of("chunks can't be read from the disk"),
            lost: of(
                "chunks that S3 never got can't be read from the disk, and are lost; their files are in its folder lost: \
                 check the disk (dmesg, smartctl)",
            ),
        }
    }
}
