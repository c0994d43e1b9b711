//! A short write and read of objects through the product's own path: into slots of an arena, every byte compared.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, StreamExt};
use tokio::time::Instant;

use super::own_objects::OwnObjects;
use super::{Finding, Stop};
use crate::arena::{Arena, ArenaOptions};
use crate::format::Crc64;
use crate::s3::net::Landing;
use crate::s3::object::{Condition, GetRange, ObjectError, ObjectStore, S3};

const CHECK: &str = "transfer";
const OBJECTS: usize = 8;
/// Objects on their way at a time.
const AT_A_TIME: usize = 4;
/// Less than this in a second is most likely slower than computing KV.
const SLOW: f64 = 50.0 * 1024.0 * 1024.0;

/// `bytes` are written and read. It ends between two objects when it is stopped.
pub async fn check(
    s3: &Arc<S3>,
    own: &OwnObjects,
    bytes: usize,
    limit: Duration,
    stop: &Stop,
) -> Vec<Finding> {
    let len = (bytes / OBJECTS).max(1);
    let mut body = vec![0; len];
    fastrand::fill(&mut body);
    let (body, crc) = (Bytes::from(body.clone()), Crc64::of(&body));
    let arena = Arena::new(&ArenaOptions {
        size: (AT_A_TIME + 1) * len.next_multiple_of(crate::arena::SLOT_ALIGN),
        ..ArenaOptions::default()
    });
    let arena = match arena {
        Ok(arena) => arena,
        Err(error) => {
            let advice = "Free some memory; --transfer-size takes a smaller size";
            return vec![Finding::failed(CHECK, error.to_string(), advice)];
        }
    };
    let names: Vec<String> = (0..OBJECTS).map(|i| format!("transfer-{i}")).collect();
    let (mut written, mut failure) = (Vec::new(), None);
    let deadline = Instant::now() + limit;
    let began = Instant::now();
    let mut writes = stream::iter(names)
        .take_while(|_| std::future::ready(!stop.is_set()))
        .map(|name| {
            let (key, body) = (own.key(&name), body.clone());
            async move {
                let put = s3.put(&key, body, Condition::Always, deadline).await;
                put.map(|_| key)
            }
        })
        .buffer_unordered(AT_A_TIME);
    while let Some(write) = writes.next().await {
        match write {
            Ok(key) => written.push(key),
            Err(error) => failure = Some(error),
        }
    }
    drop(writes);
    let mut found = vec![said(
        "written",
        written.len(),
        len,
        began.elapsed(),
        failure.take(),
    )];
    if written.is_empty() || stop.is_set() {
        return found;
    }
    let deadline = Instant::now() + limit;
    let began = Instant::now();
    let (mut read, mut wrong) = (0, 0);
    let mut reads = stream::iter(written.clone())
        .take_while(|_| std::future::ready(!stop.is_set()))
        .map(|key| {
            let arena = &arena;
            async move {
                let slot = match arena.try_reserve(len) {
                    Some(slot) => slot,
                    None => arena.ticket().await.reserve(len).await,
                };
                let get = GetRange {
                    key: &key,
                    range: 0..len,
                    object_len: len,
                    if_match: None,
                };
                let (Landing { slot, .. }, got) = s3.get(get, Landing::new(slot), deadline).await;
                got.map(|_| Crc64::of(&slot) == crc)
            }
        })
        .buffer_unordered(AT_A_TIME);
    while let Some(answer) = reads.next().await {
        match answer {
            Ok(true) => read += 1,
            Ok(false) => wrong += 1,
            Err(error) => failure = Some(error),
        }
    }
    found.push(match wrong {
        0 => said("read", read, len, began.elapsed(), failure),
        _ => Finding::failed(
            CHECK,
            format!(
                "{wrong} of {} objects came back with other bytes than were written",
                written.len()
            ),
            "Look at memory and network of this machine, and at proxies that rewrite answers",
        ),
    });
    found
}

fn said(what: &str, objects: usize, len: usize, time: Duration, failure: Option<ObjectError>) -> Finding {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let bytes = (objects * len) as f64;
    let seconds = time.as_secs_f64().max(f64::MIN_POSITIVE);
    let seen = format!(
        "{:.0} MiB {what} in {seconds:.2} s, {:.0} MiB/s",
        mib(bytes),
        mib(bytes / seconds)
    );
    match failure {
        Some(error) => Finding::failed(
            CHECK,
            format!("{seen}; then {error}"),
            "Look at the server and the network between; `kvgate bench` shows each address",
        ),
        None if bytes / seconds < SLOW => Finding::warning(
            CHECK,
            format!("{seen}: most likely slower than computing the KV"),
            "Measure it with `kvgate bench`, which shows each address; look at the network between",
        ),
        None => Finding::ok(CHECK, seen),
    }
}
