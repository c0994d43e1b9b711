//! The objects that an examination writes, and their removal: at its end, or, when it was killed, by a later one.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::Finding;
use crate::format::KeyPrefix;
use crate::s3::object::{ErrorKind, ObjectStore, Result, S3};

const CHECK: &str = "cleanup";
/// The start of the names of all examinations' objects; a number follows.
const NAME: &str = "doctor-";
/// No examination takes so long, so objects that are older are of one that was killed.
const OVER: Duration = Duration::from_secs(24 * 3600);

pub struct OwnObjects {
    store: Arc<S3>,
    /// Of kvgate's own objects.
    prefix: String,
    /// The start of all their keys, unlike that of any other examination.
    start: String,
    /// Those that may be there.
    keys: Mutex<Vec<String>>,
}

impl OwnObjects {
    pub fn new(store: Arc<S3>, keys: &KeyPrefix) -> Self {
        Self {
            store,
            prefix: keys.own(""),
            start: keys.own(&format!("{NAME}{:016x}/", fastrand::u64(..))),
            keys: Mutex::default(),
        }
    }

    /// The key of an object that is about to be written.
    pub fn key(&self, name: &str) -> String {
        let key = format!("{}{name}", self.start);
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if !keys.contains(&key) {
            keys.push(key.clone());
        }
        key
    }

    /// Removes what earlier examinations left that were killed: up to 1000 objects.
    pub async fn remove_left(store: &S3, keys: &KeyPrefix, limit: Duration) -> Option<Finding> {
        let place = keys.own(NAME);
        let deadline = Instant::now() + limit;
        let removed = async {
            let until = store.server_time(deadline).await? - OVER.as_secs().cast_signed();
            let mut left = store.list(&place, None, deadline).await?.objects;
            left.retain(|object| object.modified < until);
            let keys: Vec<String> = left.into_iter().map(|object| object.key).collect();
            each(store, &keys, deadline).await.map(|()| keys.len())
        };
        match removed.await {
            Ok(0) => None,
            Ok(removed) => Some(Finding::ok(
                CHECK,
                format!(
                    "{removed} objects under {place}... of an earlier examination, which was killed, are removed"
                ),
            )),
            Err(error) => Some(Finding::warning(
                CHECK,
                format!("what earlier examinations may have left can't be removed: {error}"),
                format!("Remove objects under {place}... that are older than a day"),
            )),
        }
    }

    /// Removes all that may be there, and looks whether anything is left.
    pub async fn remove(self, limit: Duration) -> Option<Finding> {
        let keys = self.keys.into_inner().unwrap_or_else(PoisonError::into_inner);
        if keys.is_empty() {
            return None;
        }
        let deadline = Instant::now() + limit;
        let removed = each(&self.store, &keys, deadline).await;
        let left = self.store.list(&self.start, None, deadline).await;
        let place = &self.start;
        Some(match (removed, left) {
            (_, Ok(left)) if left.objects.is_empty() => {
                Finding::ok(CHECK, format!("nothing is left under {place}"))
            }
            (Err(error), _) if error.kind == ErrorKind::Denied => {
                let advice = format!(
                    "Allow s3:DeleteObject on BUCKET/{prefix}doctor-* and BUCKET/{prefix}probe-* to this user, as ceph/apply.py \
                     does; chunks need no such right here. Then remove what is left",
                    prefix = self.prefix
                );
                Finding::warning(
                    CHECK,
                    format!("objects may not be removed, and stay under {place}"),
                    advice,
                )
            }
            (Err(error), _) | (_, Err(error)) => {
                let advice = format!("Remove what is left under {place} when the server answers again");
                Finding::warning(CHECK, error.to_string(), advice)
            }
            (Ok(()), Ok(left)) => {
                let seen = format!("{} objects are still listed under {place}", left.objects.len());
                Finding::warning(
                    CHECK,
                    seen,
                    "The server lists what was removed: is it eventually consistent?",
                )
            }
        })
    }
}

/// One by one, which needs the right to remove these keys and no others. They are few.
async fn each(store: &S3, keys: &[String], deadline: Instant) -> Result<()> {
    for key in keys {
        store.delete(std::slice::from_ref(key), deadline).await?;
    }
    Ok(())
}
