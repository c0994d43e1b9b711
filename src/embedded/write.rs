//! PUT and DELETE: verify first, then decide and publish in one step.
//!
//! Mechanism: `s3s-fs` receives the upload into `.staging/` and compares length, MD5 and checksums.
//! Only then the key is locked, the conditions are checked and the file is renamed into place.
//! Because a dropped connection drops the future at any await, the locked part is one blocking
//! closure (never cancelled midway) and the staged files have a guard.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use futures::StreamExt;
use s3s::dto::{
    CopyObjectInput, CopyObjectOutput, CopyObjectResult, CopySource, DeleteObjectInput, DeleteObjectOutput,
    DeleteObjectsInput, DeleteObjectsOutput, DeletedObject, ETagCondition, Error, MetadataDirective,
    PutObjectInput, PutObjectOutput, Timestamp,
};
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use super::objects::{ObjectPath, Record, internal};
use super::store::{FolderStore, STAGING, UPLOADS, blocking};

/// Conditions of a write.
#[derive(Debug, Clone, Default)]
pub(super) struct Conditions {
    pub if_match: Option<ETagCondition>,
    pub if_none_match: Option<ETagCondition>,
}

impl Conditions {
    pub fn is_empty(&self) -> bool {
        self.if_match.is_none() && self.if_none_match.is_none()
    }

    /// Errors of S3: 404 when there is nothing to match, else 412.
    pub fn check(&self, place: &ObjectPath) -> S3Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let current = place.open()?.map(|object| object.etag());
        match (&self.if_match, &current) {
            (Some(_), None) => return Err(s3_error!(NoSuchKey)),
            (Some(ETagCondition::ETag(wanted)), Some(etag)) if !wanted.strong_cmp(etag) => {
                return Err(s3_error!(PreconditionFailed, "the object has another ETag"));
            }
            _ => {}
        }
        match (&self.if_none_match, &current) {
            (Some(unwanted), Some(etag))
                if unwanted.as_etag().is_none_or(|unwanted| unwanted.weak_cmp(etag)) =>
            {
                Err(s3_error!(PreconditionFailed, "the object exists already"))
            }
            _ => Ok(()),
        }
    }
}

impl FolderStore {
    pub(super) async fn put_object(
        &self,
        mut req: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let input = &mut req.input;
        let (bucket, key) = (input.bucket.clone(), input.key.clone());
        let conditions = Conditions {
            if_match: input.if_match.take(),
            if_none_match: input.if_none_match.take(),
        };
        let place = match self.admit(&bucket, &key, &conditions).await {
            Ok(place) => place,
            Err(error) => {
                // Most clients would see an answer amid the upload as a broken pipe.
                if let Some(mut body) = input.body.take() {
                    while let Some(Ok(_)) = body.next().await {}
                }
                return Err(error);
            }
        };
        let mut record = Record {
            content_type: input.content_type.clone(),
            content_encoding: input.content_encoding.clone(),
            content_disposition: input.content_disposition.clone(),
            content_language: input.content_language.clone(),
            cache_control: input.cache_control.clone(),
            metadata: input.metadata.clone(),
            ..Record::default()
        };

        let name = self.next.fetch_add(1, Ordering::Relaxed).to_string();
        let staged = Staged::new(&self.root, &name);
        UPLOADS.clone_into(&mut input.bucket);
        input.key = name;
        let response = self.uploads.put_object(req).await?;

        let output = &response.output;
        record.etag = match &output.e_tag {
            Some(etag) => etag.value().to_owned(),
            None => return Err(s3_error!(InternalError, "the upload has no ETag")),
        };
        record.crc32.clone_from(&output.checksum_crc32);
        record.crc32c.clone_from(&output.checksum_crc32c);
        record.crc64nvme.clone_from(&output.checksum_crc64nvme);
        record.sha1.clone_from(&output.checksum_sha1);
        record.sha256.clone_from(&output.checksum_sha256);
        let guard = self.lock(&bucket, &key).write_owned().await;
        let publish = blocking(move || {
            let _guard = guard;
            conditions.check(&place)?;
            place.publish(&staged.data, record)
        });
        publish.await?;
        Ok(response)
    }

    pub(super) async fn copy_object(
        &self,
        req: S3Request<CopyObjectInput>,
    ) -> S3Result<S3Response<CopyObjectOutput>> {
        let input = req.input;
        let CopySource::Bucket { bucket, key, .. } = &input.copy_source else {
            return Err(s3_error!(NotImplemented, "copies are from a bucket"));
        };
        let (source, place) = (self.place(bucket, key)?, self.place(&input.bucket, &input.key)?);
        let replaces = input.metadata_directive.as_ref().map(MetadataDirective::as_str)
            == Some(MetadataDirective::REPLACE);
        if !replaces && (**bucket == *input.bucket) && (**key == *input.key) {
            return Err(s3_error!(
                InvalidRequest,
                "a copy onto itself must change something"
            ));
        }
        let conditions = Conditions {
            if_match: input.copy_source_if_match,
            if_none_match: None,
        };
        let metadata = input.metadata;
        let staged = Staged::new(&self.root, &self.next.fetch_add(1, Ordering::Relaxed).to_string());
        let guard = self.lock(&input.bucket, &input.key).write_owned().await;
        let copy = blocking(move || {
            let _guard = guard;
            conditions.check(&source)?;
            let mut object = source.open()?.ok_or_else(|| s3_error!(NoSuchKey))?;
            let mut copy = std::fs::File::create(&staged.data).map_err(internal)?;
            std::io::copy(&mut object.file, &mut copy).map_err(internal)?;
            let etag = object.etag();
            let record = match replaces {
                true => Record {
                    metadata,
                    ..object.record
                },
                false => object.record,
            };
            place.publish(&staged.data, record)?;
            Ok(etag)
        });
        let etag = copy.await?;
        let result = CopyObjectResult {
            e_tag: Some(etag),
            last_modified: Some(Timestamp::from(std::time::SystemTime::now())),
            ..CopyObjectResult::default()
        };
        Ok(S3Response::new(CopyObjectOutput {
            copy_object_result: Some(result),
            ..CopyObjectOutput::default()
        }))
    }

    /// All checks that can refuse an upload before its body is read.
    async fn admit(&self, bucket: &str, key: &str, conditions: &Conditions) -> S3Result<ObjectPath> {
        let place = self.place(bucket, key)?;
        if !conditions.is_empty() {
            let guard = self.lock(bucket, key).read_owned().await;
            let (place, conditions) = (place.clone(), conditions.clone());
            let check = blocking(move || {
                let _guard = guard;
                conditions.check(&place)
            });
            check.await?;
        }
        Ok(place)
    }

    async fn delete(&self, bucket: &str, key: &str, conditions: Conditions) -> S3Result<()> {
        let place = self.place(bucket, key)?;
        let guard = self.lock(bucket, key).write_owned().await;
        let delete = blocking(move || {
            let _guard = guard;
            conditions.check(&place)?;
            place.delete()
        });
        delete.await
    }

    pub(super) async fn delete_object(
        &self,
        req: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = req.input;
        let conditions = Conditions {
            if_match: input.if_match,
            if_none_match: None,
        };
        self.delete(&input.bucket, &input.key, conditions).await?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    pub(super) async fn delete_objects(
        &self,
        req: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let input = req.input;
        self.require_bucket(&input.bucket)?;
        let quiet = input.delete.quiet.unwrap_or(false);
        let (mut deleted, mut errors) = (Vec::new(), Vec::new());
        for object in input.delete.objects {
            let conditions = Conditions {
                if_match: object.e_tag.map(ETagCondition::ETag),
                if_none_match: None,
            };
            let key = Some(object.key.clone());
            match self.delete(&input.bucket, &object.key, conditions).await {
                Ok(()) if quiet => {}
                Ok(()) => deleted.push(DeletedObject {
                    key,
                    ..DeletedObject::default()
                }),
                Err(error) => errors.push(Error {
                    code: Some(error.code().as_str().to_owned()),
                    message: error.message().map(str::to_owned),
                    key,
                    ..Error::default()
                }),
            }
        }
        let output = DeleteObjectsOutput {
            deleted: Some(deleted),
            errors: Some(errors),
            ..DeleteObjectsOutput::default()
        };
        Ok(S3Response::new(output))
    }
}

/// Files of an upload under way; removed with it, published or not.
struct Staged {
    data: PathBuf,
    side: PathBuf,
}

impl Staged {
    fn new(root: &Path, name: &str) -> Self {
        let staging = root.join(STAGING);
        let (bucket, key) = (encode(UPLOADS), encode(name));
        Self {
            data: staging.join(UPLOADS).join(name),
            // `s3s-fs`'s naming. Were it to change, side files would stay until the next start.
            side: staging.join(format!(".bucket-{bucket}.object-{key}")),
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let side = self.side.as_os_str();
        for end in [".metadata.json", ".internal.json"] {
            let mut path = side.to_owned();
            path.push(end);
            let _ = std::fs::remove_file(path);
        }
        for path in [&self.data, &self.data.with_extension("record")] {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn encode(name: &str) -> String {
    aws_smithy_types::base64::encode(name)
        .trim_end_matches('=')
        .to_owned()
}
