//! A real S3 server inside the process: `kvgate demo`, tests, `kvgate serve --embedded`.
//!
//! **Mechanism.** [`s3s`] speaks HTTP, checks `SigV4` and reads/writes the XML; [`s3s_fs`] receives
//! an upload (hashes, checksum trailers) into a file. Between the two sits `store::FolderStore`, which
//! owns everything that has to be *right* under concurrency: an upload lands in `.staging/`, is
//! verified there, and becomes visible by one rename made under a per-key lock together with its
//! conditions (`If-None-Match: *`, `If-Match`). A reader opens the file under the same lock, so
//! `ETag`, length and bytes are always of one version, and an open file outlives its replacement.
//!
//! **Layout of the root**
//!
//! | path                    | what                                                        |
//! |-------------------------|-------------------------------------------------------------|
//! | `<bucket>/<key>`        | the object's bytes, a plain file                            |
//! | `.meta/<bucket>/<key>`  | its `ETag`, checksums and headers (JSON)                    |
//! | `.staging/`             | uploads under way; emptied at start                         |
//! | `.lock`                 | held while a server uses the root                           |
//!
//! **Why.** The code under test talks to a genuine S3 endpoint over genuine HTTP with genuine
//! signatures, with nothing to install. A mock would agree with our own misunderstandings.
//!
//! **Not there:** no TLS, one fixed key pair, no users, no versions, no multipart, no
//! copy. Nothing is fsynced: a power loss can lose acknowledged objects. A key may not be both an
//! object and a "folder" (`a` and `a/b`), as in any file system. Each list page walks the files
//! below the prefix. For data that matter, or for a network, use Ceph RGW, `MinIO` or AWS.

mod list;
mod objects;
mod read;
mod server;
mod store;
#[cfg(test)]
mod tests;
mod write;

pub use server::{ACCESS_KEY, EmbeddedError, EmbeddedS3, SECRET_KEY};
