//! Removal of objects: by key, or only the version that a listing showed.

use aws_sdk_s3::types::{Delete, ObjectIdentifier};
use tokio::time::Instant;

use super::error::{ErrorKind, ObjectError, Operation};
use super::s3::{S3, by, quoted};
use super::store::Result;

impl S3 {
    pub(super) async fn delete_keys(&self, keys: &[String], deadline: Instant) -> Result<()> {
        match keys {
            [] => Ok(()),
            [key] => self.delete_one(key, deadline).await,
            keys => {
                let any_version: Vec<_> = keys.iter().map(|key| (key.clone(), String::new())).collect();
                match self.delete_versions(&any_version, deadline).await? {
                    0 => Ok(()),
                    kept => {
                        let told = format!("{kept} of {} keys stay, without a condition", keys.len());
                        Err(ObjectError::new(
                            Operation::Delete,
                            &self.bucket,
                            ErrorKind::Changed,
                            told,
                        ))
                    }
                }
            }
        }
    }

    /// Keys with ETags, empty for any version. Returns how many were kept, since they have changed.
    pub(super) async fn delete_versions(
        &self,
        objects: &[(String, String)],
        deadline: Instant,
    ) -> Result<usize> {
        match self.delete_versions_at_once(objects, deadline).await {
            // Some servers want a Content-MD5 that the SDK no longer sends, or don't know the call.
            Err(error) if matches!(error.kind, ErrorKind::Refused | ErrorKind::Unsupported) => {
                let mut kept = 0;
                for (key, etag) in objects {
                    kept += usize::from(!self.delete_version(key, etag, deadline).await?);
                }
                Ok(kept)
            }
            result => result,
        }
    }

    /// Returns whether it is gone.
    async fn delete_version(&self, key: &str, etag: &str, deadline: Instant) -> Result<bool> {
        let operation = Operation::Delete;
        let deleted = self.call(operation, key, deadline, |route| async move {
            let request = self.client.delete_object().bucket(&self.bucket).key(key);
            let request = request.set_if_match((!etag.is_empty()).then(|| quoted(etag)));
            let request = by(route, request.customize()).send();
            self.answer(operation, key, request).await.map(drop)
        });
        match deleted.await {
            Ok(()) => Ok(true),
            Err(error) if error.kind == ErrorKind::NotFound => Ok(true),
            Err(error) if error.kind == ErrorKind::Changed => Ok(false),
            // It does not know the condition.
            Err(error) if error.kind == ErrorKind::Unsupported => {
                self.delete_one(key, deadline).await.map(|()| true)
            }
            Err(error) => Err(error),
        }
    }

    async fn delete_versions_at_once(
        &self,
        objects: &[(String, String)],
        deadline: Instant,
    ) -> Result<usize> {
        let operation = Operation::Delete;
        let refused = |detail: String| ObjectError::new(operation, &self.bucket, ErrorKind::Refused, detail);
        let object = |(key, etag): &(String, String)| {
            let etag = (!etag.is_empty()).then(|| quoted(etag));
            ObjectIdentifier::builder().key(key).set_e_tag(etag).build()
        };
        let identifiers: Result<Vec<_>, _> = objects.iter().map(object).collect();
        let identifiers = identifiers.map_err(|error| refused(error.to_string()))?;
        let batch = Delete::builder()
            .set_objects(Some(identifiers))
            .quiet(true)
            .build();
        let batch = batch.map_err(|error| refused(error.to_string()))?;
        let batch = &batch;
        self.call(operation, &self.bucket, deadline, |route| async move {
            let request = self.client.delete_objects().bucket(&self.bucket);
            let request = by(route, request.delete(batch.clone()).customize()).send();
            let answer = self.answer(operation, &self.bucket, request).await?;
            let mut kept = 0;
            for error in answer.errors() {
                match error.code() {
                    Some("NoSuchKey") => {}
                    Some("PreconditionFailed") => kept += 1,
                    code => {
                        let kind = match code {
                            Some("AccessDenied") => ErrorKind::Denied,
                            _ => ErrorKind::Unavailable,
                        };
                        let detail =
                            format!("{} of {} keys: {error:?}", answer.errors().len(), objects.len());
                        return Err(ObjectError::new(operation, &self.bucket, kind, detail));
                    }
                }
            }
            Ok(kept)
        })
        .await
    }

    async fn delete_one(&self, key: &str, deadline: Instant) -> Result<()> {
        let operation = Operation::Delete;
        self.call(operation, key, deadline, |route| async {
            let request = self.client.delete_object().bucket(&self.bucket).key(key);
            let request = by(route, request.customize()).send();
            match self.answer(operation, key, request).await.map(drop) {
                Err(error) if error.kind == ErrorKind::NotFound => Ok(()),
                result => result,
            }
        })
        .await
    }
}
