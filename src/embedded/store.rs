//! The S3 operations that kvgate needs, around `s3s-fs`; all others answer 501 `NotImplemented`.
//!
//! Mechanism: a striped lock per key. An upload is received and verified *without* the lock (a slow
//! client must not block others), then its conditions are checked and it is published under the
//! write lock, in one blocking step that a broken connection cannot cancel. Reads open the file
//! under the read lock and stream it without.
//!
//! Why not `s3s-fs` alone: it checks conditions and renames in separate steps (several winners of
//! `If-None-Match: *`), publishes before it compares checksums, takes GET's `ETag` and bytes from
//! different versions, ignores `If-Match` on GET, streams in 4 KiB pieces, deletes buckets with
//! their objects and panics on some ranges.

use std::fs::{File, TryLockError};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use s3s::dto::{
    CopyObjectInput, CopyObjectOutput, CreateBucketInput, CreateBucketOutput, DeleteBucketInput,
    DeleteBucketOutput, DeleteObjectInput, DeleteObjectOutput, DeleteObjectsInput, DeleteObjectsOutput,
    GetObjectInput, GetObjectOutput, HeadBucketInput, HeadBucketOutput, HeadObjectInput, HeadObjectOutput,
    ListObjectsV2Input, ListObjectsV2Output, PutObjectInput, PutObjectOutput,
};
use s3s::{S3, S3Error, S3Request, S3Response, S3Result, s3_error};
use s3s_fs::FileSystem;
use tokio::sync::RwLock;
use tokio::task::spawn_blocking;

use super::list::list;
use super::objects::{self, ObjectPath};
use super::server::EmbeddedError;

/// More stripes than threads that can work at a time: chance collisions cost nothing.
const STRIPES: usize = 256;

/// Folder of uploads under way: `s3s-fs` sees only this folder.
pub(super) const STAGING: &str = ".staging";
/// The one bucket in it.
pub(super) const UPLOADS: &str = "uploads";

#[derive(Debug)]
pub(super) struct FolderStore {
    pub(super) root: Arc<Path>,
    pub(super) uploads: FileSystem,
    pub(super) next: AtomicU64,
    locks: Vec<Arc<RwLock<()>>>,
    /// Open and locked while any connection lives: two servers would mix up their uploads.
    _lock: File,
}

impl FolderStore {
    pub fn open(root: &Path) -> Result<Self, EmbeddedError> {
        let fail = |source| EmbeddedError::Root {
            path: root.to_owned(),
            source,
        };
        std::fs::create_dir_all(root).map_err(fail)?;
        let root = root.canonicalize().map_err(fail)?;
        let lock = File::create(root.join(".lock")).map_err(fail)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(EmbeddedError::InUse { path: root }),
            Err(TryLockError::Error(error)) => return Err(fail(error)),
        }
        // Leftovers of a killed server: parts, unpublished uploads, their side files.
        let staging = root.join(STAGING);
        match std::fs::remove_dir_all(&staging) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fail(error)),
            _ => {}
        }
        std::fs::create_dir_all(staging.join(UPLOADS)).map_err(fail)?;
        let uploads = FileSystem::new(&staging).map_err(|e| fail(io::Error::other(format!("{e:?}"))))?;
        Ok(Self {
            root: root.into(),
            uploads,
            next: AtomicU64::new(0),
            locks: (0..STRIPES).map(|_| Arc::default()).collect(),
            _lock: lock,
        })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn lock(&self, bucket: &str, key: &str) -> Arc<RwLock<()>> {
        let mut hasher = DefaultHasher::new();
        (bucket, key).hash(&mut hasher);
        let count = self.locks.len() as u64;
        let index = usize::try_from(hasher.finish() % count).unwrap_or_default();
        Arc::clone(&self.locks[index])
    }

    pub(super) fn require_bucket(&self, bucket: &str) -> S3Result<()> {
        let exists = self.root.join(bucket).is_dir();
        exists.then_some(()).ok_or_else(|| s3_error!(NoSuchBucket))
    }

    pub(super) fn place(&self, bucket: &str, key: &str) -> S3Result<ObjectPath> {
        self.require_bucket(bucket)?;
        ObjectPath::new(&self.root, bucket, key)
    }

    async fn create_bucket(
        &self,
        req: S3Request<CreateBucketInput>,
    ) -> S3Result<S3Response<CreateBucketOutput>> {
        let (root, bucket) = (Arc::clone(&self.root), req.input.bucket);
        blocking(move || objects::create_bucket(&root, &bucket)).await?;
        Ok(S3Response::new(CreateBucketOutput::default()))
    }

    async fn delete_bucket(
        &self,
        req: S3Request<DeleteBucketInput>,
    ) -> S3Result<S3Response<DeleteBucketOutput>> {
        let (root, bucket) = (Arc::clone(&self.root), req.input.bucket);
        blocking(move || objects::delete_bucket(&root, &bucket)).await?;
        Ok(S3Response::new(DeleteBucketOutput::default()))
    }

    #[allow(clippy::unused_async, reason = "`operations!` expects a future")]
    async fn head_bucket(&self, req: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
        self.require_bucket(&req.input.bucket)?;
        Ok(S3Response::new(HeadBucketOutput::default()))
    }

    async fn list_objects_v2(
        &self,
        req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let root = Arc::clone(&self.root);
        let output = blocking(move || list(&root, req.input)).await?;
        Ok(S3Response::new(output))
    }
}

/// Runs file work where it may block; it goes on to its end even when the request is cancelled.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> S3Result<T> + Send + 'static,
) -> S3Result<T> {
    spawn_blocking(work).await.map_err(S3Error::internal_error)?
}

/// Expands to the code of `async_trait`: a boxed future per operation, running the method of that name.
macro_rules! operations {
    ($($name:ident: $input:ty => $output:ty,)*) => {
        impl S3 for FolderStore {
            $(
                fn $name<'a, 'f>(
                    &'a self,
                    req: S3Request<$input>,
                ) -> Pin<Box<dyn Future<Output = S3Result<S3Response<$output>>> + Send + 'f>>
                where
                    'a: 'f,
                    Self: 'f,
                {
                    Box::pin(Self::$name(self, req))
                }
            )*
        }
    };
}

operations! {
    copy_object: CopyObjectInput => CopyObjectOutput,
    create_bucket: CreateBucketInput => CreateBucketOutput,
    delete_bucket: DeleteBucketInput => DeleteBucketOutput,
    head_bucket: HeadBucketInput => HeadBucketOutput,
    get_object: GetObjectInput => GetObjectOutput,
    head_object: HeadObjectInput => HeadObjectOutput,
    put_object: PutObjectInput => PutObjectOutput,
    delete_object: DeleteObjectInput => DeleteObjectOutput,
    delete_objects: DeleteObjectsInput => DeleteObjectsOutput,
    list_objects_v2: ListObjectsV2Input => ListObjectsV2Output,
}
