//! GET and HEAD: one version of an object, streamed in large pieces.
//!
//! Mechanism: the file is opened, and its record read, under the key's read lock; after that the
//! open file *is* the version, also when its name is given to another file. Pieces are read ahead on the blocking
//! pool while hyper sends the one before.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, stream};
use s3s::dto::{
    ChecksumMode, ETag, ETagCondition, GetObjectInput, GetObjectOutput, HeadObjectInput, HeadObjectOutput,
    StreamingBlob, Timestamp,
};
use s3s::{S3Request, S3Response, S3Result, s3_error};
use tokio::task::spawn_blocking;

use super::objects::Object;
use super::store::{FolderStore, blocking};

/// Large enough that the hop to the blocking pool does not matter.
const PIECE: u64 = 1 << 20;
/// Pieces under way: one is sent while the next is read.
const AHEAD: usize = 2;

impl FolderStore {
    async fn open_object(&self, bucket: &str, key: &str) -> S3Result<Object> {
        let place = self.place(bucket, key)?;
        let guard = self.lock(bucket, key).read_owned().await;
        let object = blocking(move || {
            let _guard = guard;
            place.open()
        });
        object.await?.ok_or_else(|| s3_error!(NoSuchKey))
    }

    pub(super) async fn get_object(
        &self,
        req: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let input = req.input;
        let object = self.open_object(&input.bucket, &input.key).await?;
        let etag = object.etag();
        check_read(input.if_match.as_ref(), input.if_none_match.as_ref(), &etag)?;
        let range = match input.range {
            None => 0..object.len,
            Some(range) => range.check(object.len)?,
        };
        if input.range.is_some() && range.is_empty() {
            return Err(s3_error!(InvalidRange));
        }
        let content_range = input
            .range
            .map(|_| format!("bytes {}-{}/{}", range.start, range.end - 1, object.len));
        // S3 gives a checksum only on request, and only of the whole object.
        let record = object.record;
        let whole = range == (0..object.len) && wants_checksums(input.checksum_mode.as_ref());
        let sum = |value: Option<String>| value.filter(|_| whole);
        Ok(S3Response::new(GetObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            content_length: i64::try_from(range.end - range.start).ok(),
            content_range,
            body: Some(body(object.file, range)),
            last_modified: Some(Timestamp::from(object.modified)),
            e_tag: Some(etag),
            checksum_crc32: sum(record.crc32),
            checksum_crc32c: sum(record.crc32c),
            checksum_crc64nvme: sum(record.crc64nvme),
            checksum_sha1: sum(record.sha1),
            checksum_sha256: sum(record.sha256),
            content_type: record.content_type,
            content_encoding: record.content_encoding,
            content_disposition: record.content_disposition,
            content_language: record.content_language,
            cache_control: record.cache_control,
            metadata: record.metadata,
            ..GetObjectOutput::default()
        }))
    }

    pub(super) async fn head_object(
        &self,
        req: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = req.input;
        let object = self.open_object(&input.bucket, &input.key).await?;
        let etag = object.etag();
        check_read(input.if_match.as_ref(), input.if_none_match.as_ref(), &etag)?;
        let record = object.record;
        let whole = wants_checksums(input.checksum_mode.as_ref());
        let sum = |value: Option<String>| value.filter(|_| whole);
        Ok(S3Response::new(HeadObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            content_length: i64::try_from(object.len).ok(),
            last_modified: Some(Timestamp::from(object.modified)),
            e_tag: Some(etag),
            checksum_crc32: sum(record.crc32),
            checksum_crc32c: sum(record.crc32c),
            checksum_crc64nvme: sum(record.crc64nvme),
            checksum_sha1: sum(record.sha1),
            checksum_sha256: sum(record.sha256),
            content_type: record.content_type,
            content_encoding: record.content_encoding,
            content_disposition: record.content_disposition,
            content_language: record.content_language,
            cache_control: record.cache_control,
            metadata: record.metadata,
            ..HeadObjectOutput::default()
        }))
    }
}

fn wants_checksums(mode: Option<&ChecksumMode>) -> bool {
    mode.is_some_and(|mode| mode.as_str() == ChecksumMode::ENABLED)
}

fn check_read(
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
    etag: &ETag,
) -> S3Result<()> {
    let matched = |c: &ETagCondition| c.as_etag().is_none_or(|wanted| wanted.weak_cmp(etag));
    if if_match.is_some_and(|c| !matched(c)) {
        return Err(s3_error!(PreconditionFailed, "the object has another ETag"));
    }
    if if_none_match.is_some_and(matched) {
        return Err(s3_error!(NotModified));
    }
    Ok(())
}

fn body(file: File, range: Range<u64>) -> StreamingBlob {
    let file = Arc::new(file);
    let pieces = (range.end - range.start).div_ceil(PIECE);
    let pieces = (0..pieces).map(move |piece| {
        let file = Arc::clone(&file);
        let start = range.start + piece * PIECE;
        let end = range.end.min(start + PIECE);
        async move {
            let read = spawn_blocking(move || {
                let mut piece = vec![0; usize::try_from(end - start).map_err(io::Error::other)?];
                file.read_exact_at(&mut piece, start)?;
                Ok(Bytes::from(piece))
            });
            read.await.map_err(io::Error::other)?
        }
    });
    // A read error ends the body early: with the length sent before, the client sees the loss.
    StreamingBlob::wrap::<_, io::Error>(stream::iter(pieces).buffered(AHEAD))
}
