//! A store in memory whose GETs wait until a test lets them go, one by one; and whose PUTs, once it has received them, do so
//! whether or not their caller still waits.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use kvgate::s3::net::{Landing, Traffic};
use kvgate::s3::object::{
    Condition, ErrorKind, GetFuture, GetRange, ListPage, ObjectError, ObjectMeta, ObjectStore, Operation,
    RequestCounts, StoreFuture, Version,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

pub struct Held {
    objects: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    holding: AtomicBool,
    holding_puts: AtomicBool,
    asked: mpsc::UnboundedSender<Asked>,
    gets: AtomicU64,
}

/// A GET that waits. Dropping it fails the GET.
pub struct Asked {
    pub key: String,
    pub range: Range<usize>,
    go: oneshot::Sender<()>,
}

/// The GETs that were asked for.
pub struct Line(mpsc::UnboundedReceiver<Asked>);

impl Held {
    pub fn new() -> (Arc<Self>, Line) {
        let (asked, receiver) = mpsc::unbounded_channel();
        let held = Self {
            objects: Arc::default(),
            holding: AtomicBool::new(false),
            holding_puts: AtomicBool::new(false),
            asked,
            gets: AtomicU64::new(0),
        };
        (Arc::new(held), Line(receiver))
    }

    /// From here on GETs wait.
    pub fn hold(&self) {
        self.holding.store(true, Ordering::SeqCst);
    }

    /// From here on they don't.
    pub fn let_go(&self) {
        self.holding.store(false, Ordering::SeqCst);
    }

    /// From here on PUTs wait: they are received, and will be carried out.
    pub fn hold_puts(&self) {
        self.holding_puts.store(true, Ordering::SeqCst);
    }

    pub fn has(&self, key: &str) -> bool {
        self.objects.lock().unwrap().contains_key(key)
    }

    pub fn damage(&self, key: &str, byte: usize) {
        self.objects.lock().unwrap().get_mut(key).unwrap()[byte] ^= 1;
    }

    fn meta(&self, operation: Operation, key: &str) -> Result<(Vec<u8>, ObjectMeta), ObjectError> {
        let object = self.objects.lock().unwrap().get(key).cloned();
        let object =
            object.ok_or_else(|| ObjectError::new(operation, key, ErrorKind::NotFound, "not in memory"))?;
        let version = Version {
            etag: blake3::hash(&object).to_hex().as_str().into(),
            modified: 0,
        };
        let len = object.len() as u64;
        Ok((
            object,
            ObjectMeta {
                len,
                version,
                run: None,
            },
        ))
    }

    async fn fill(&self, get: &GetRange<'_>, landing: &mut Landing) -> Result<ObjectMeta, ObjectError> {
        let failed = |kind| ObjectError::new(Operation::Get, get.key, kind, "held");
        self.gets.fetch_add(1, Ordering::SeqCst);
        // As it was when it was asked for, whatever happens to it meanwhile.
        let found = self.meta(Operation::Get, get.key);
        if self.holding.load(Ordering::SeqCst) {
            let (go, gone) = oneshot::channel();
            let asked = Asked {
                key: get.key.to_owned(),
                range: get.range.clone(),
                go,
            };
            self.asked.send(asked).map_err(|_| failed(ErrorKind::Broken))?;
            gone.await.map_err(|_| failed(ErrorKind::Broken))?;
        }
        let (object, meta) = found?;
        assert_eq!(object.len(), get.object_len);
        if get.if_match.is_some_and(|etag| etag != &*meta.version.etag) {
            return Err(failed(ErrorKind::Changed));
        }
        let bytes = &object[get.range.clone()];
        landing.slot.copy_from_slice(bytes);
        let half = bytes.len() / 2;
        landing.arrived(0, half);
        landing.arrived(half, bytes.len() - half);
        Ok(meta)
    }
}

impl Asked {
    /// Whether nobody waits for it any more.
    pub fn is_given_up(&self) -> bool {
        self.go.is_closed()
    }

    pub fn go(self) {
        // Nobody may wait for it any more.
        let _ = self.go.send(());
    }
}

impl Line {
    pub async fn next(&mut self) -> Asked {
        self.0.recv().await.expect("the store is there")
    }

    /// The requests that are waiting when no task can go on. With a paused clock only: it moves when all tasks wait.
    pub async fn still(&mut self) -> Vec<Asked> {
        let mut asked = Vec::new();
        while let Ok(Some(next)) = tokio::time::timeout(Duration::from_millis(1), self.0.recv()).await {
            asked.push(next);
        }
        asked.retain(|asked| !asked.is_given_up());
        asked
    }
}

impl ObjectStore for Held {
    fn head<'a>(&'a self, key: &'a str, _deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        Box::pin(async move { self.meta(Operation::Head, key).map(|(_, meta)| meta) })
    }

    fn attributes<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        self.head(key, deadline)
    }

    fn get<'a>(&'a self, get: GetRange<'a>, mut landing: Landing, _deadline: Instant) -> GetFuture<'a> {
        Box::pin(async move {
            let meta = self.fill(&get, &mut landing).await;
            (landing, meta)
        })
    }

    fn read<'a>(&'a self, key: &'a str, _limit: usize, _deadline: Instant) -> StoreFuture<'a, Bytes> {
        Box::pin(async move { self.meta(Operation::Get, key).map(|(object, _)| object.into()) })
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        _when: Condition<'a>,
        _deadline: Instant,
    ) -> StoreFuture<'a, Arc<str>> {
        Box::pin(async move {
            if self.holding_puts.load(Ordering::SeqCst) {
                let (go, gone) = oneshot::channel();
                let (key, range) = (key.to_owned(), 0..body.len());
                let received = (Arc::clone(&self.objects), key.clone(), body.to_vec());
                let carried_out = tokio::spawn(async move {
                    let (objects, key, object) = received;
                    if gone.await.is_ok() {
                        objects.lock().unwrap().insert(key, object);
                    }
                });
                self.asked.send(Asked { key, range, go }).unwrap();
                carried_out.await.unwrap();
            } else {
                self.objects.lock().unwrap().insert(key.into(), body.to_vec());
            }
            self.meta(Operation::Put, key).map(|(_, meta)| meta.version.etag)
        })
    }

    fn list<'a>(&'a self, _: &'a str, _: Option<&'a str>, _: Instant) -> StoreFuture<'a, ListPage> {
        unreachable!("nothing is listed")
    }

    fn delete<'a>(&'a self, keys: &'a [String], _deadline: Instant) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let mut objects = self.objects.lock().unwrap();
            keys.iter().for_each(|key| drop(objects.remove(key)));
            Ok(())
        })
    }

    fn check_bucket(&self, _deadline: Instant) -> StoreFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn create_bucket(&self, _deadline: Instant) -> StoreFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn requests(&self) -> RequestCounts {
        RequestCounts {
            get: self.gets.load(Ordering::SeqCst),
            ..RequestCounts::default()
        }
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}
