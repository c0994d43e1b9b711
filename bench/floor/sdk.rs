//! The AWS SDK as it comes: typed operations, its default HTTP client (hyper), its default checksums and retries.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use aws_config::{BehaviorVersion, Region};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::Builder;
use aws_sdk_s3::primitives::ByteStream;
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
use bytes::Bytes;
use clap::Args;
use kvgate::arena::Slot;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::Error;
use crate::measure::{Measured, Meter};
use crate::workload::{Part, Queue, Workload};

/// Credentials come from the environment.
#[derive(Debug, Clone, Args)]
pub struct Bucket {
    #[arg(long)]
    pub endpoint: String,
    #[arg(long)]
    pub bucket: String,
}

impl Bucket {
    async fn client(&self) -> Client {
        let http = aws_smithy_http_client::Builder::new()
            .tls_provider(Provider::Rustls(CryptoMode::Ring))
            .build_https();
        let shared = aws_config::defaults(BehaviorVersion::latest())
            .http_client(http)
            .region(Region::new("us-east-1"))
            .load()
            .await;
        let config = Builder::from(&shared)
            .endpoint_url(&self.endpoint)
            .force_path_style(true);
        Client::from_conf(config.build())
    }
}

pub fn seed(bucket: &Bucket, folder: &Path) -> Result<(), Error> {
    Runtime::new()?.block_on(async {
        let client = bucket.client().await;
        client.create_bucket().bucket(&bucket.bucket).send().await?;
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            if !entry.file_type()?.is_file() {
                continue;
            }
            let key = entry
                .file_name()
                .into_string()
                .map_err(|_| "a file name that is no text")?;
            // From memory: old Ceph refuses what the SDK makes of a stream.
            let body = ByteStream::from(std::fs::read(entry.path())?);
            let request = client.put_object().bucket(&bucket.bucket).key(key).body(body);
            request.customize().disable_payload_signing().send().await?;
        }
        Ok(())
    })
}

pub fn get(bucket: &Bucket, workload: &Workload) -> Result<Measured, Error> {
    let queue = Arc::new(Queue::new(workload)?);
    let measured = measure(
        bucket,
        workload,
        "read",
        workload.bytes(),
        || queue.refill(workload),
        |client| {
            let (bucket, queue, size) = (bucket.bucket.clone(), Arc::clone(&queue), workload.object_size.0);
            async move {
                while let Some(mut part) = queue.take() {
                    get_part(&client, &bucket, size, &mut part).await?;
                    queue.give_back(part);
                }
                Ok(())
            }
        },
    )?;
    queue.check()?;
    Ok(measured)
}

async fn get_part(client: &Client, bucket: &str, object_size: u64, part: &mut Part) -> Result<(), Error> {
    let mut request = client
        .get_object()
        .bucket(bucket)
        .key(Workload::name(part.object));
    let end = part.offset + part.slot.len() as u64;
    if part.slot.len() as u64 != object_size {
        request = request.range(format!("bytes={}-{}", part.offset, end - 1));
    }
    let mut body = request.send().await?.body;
    let mut landed = 0;
    while let Some(frame) = body.try_next().await? {
        let room = part.slot.get_mut(landed..landed + frame.len());
        room.ok_or("more bytes than were asked for")?
            .copy_from_slice(&frame);
        landed += frame.len();
    }
    match landed == part.slot.len() {
        true => Ok(()),
        false => Err("fewer bytes than were asked for".into()),
    }
}

pub fn head(bucket: &Bucket, workload: &Workload) -> Result<Measured, Error> {
    // Only the names are used.
    let workload = Workload {
        object_size: kvgate::config::units::ByteSize(4096),
        ..workload.clone()
    };
    let queue = Arc::new(Queue::new(&workload)?);
    measure(
        bucket,
        &workload,
        "head",
        0,
        || queue.refill(&workload),
        |client| {
            let (bucket, queue) = (bucket.bucket.clone(), Arc::clone(&queue));
            async move {
                while let Some(part) = queue.take() {
                    let request = client
                        .head_object()
                        .bucket(&bucket)
                        .key(Workload::name(part.object));
                    request.send().await?;
                    queue.give_back(part);
                }
                Ok(())
            }
        },
    )
}

pub fn put(bucket: &Bucket, workload: &Workload) -> Result<Measured, Error> {
    let slots: Vec<(u32, Slot)> = Queue::new(workload)?
        .into_parts()
        .into_iter()
        .map(|part| (part.object, part.slot.freeze()))
        .collect();
    let turns = Arc::new(Mutex::new(Vec::new()));
    let refill = || {
        let all = (0..workload.rounds).flat_map(|_| slots.clone());
        turns.lock().unwrap_or_else(PoisonError::into_inner).extend(all);
    };
    measure(bucket, workload, "write", workload.bytes(), refill, |client| {
        let (bucket, turns) = (bucket.bucket.clone(), Arc::clone(&turns));
        async move {
            loop {
                let next = turns.lock().map_err(|_| "a worker panicked")?.pop();
                let Some((object, slot)) = next else { return Ok(()) };
                let body = ByteStream::from(Bytes::from_owner(slot));
                let request = client.put_object().bucket(&bucket).key(Workload::name(object));
                request.body(body).send().await?;
            }
        }
    })
}

/// Runs as many workers as may be in flight on what `refill` gives them to do. All is done once before the meter starts, as
/// `kvgate bench --warm-up` does.
fn measure<W>(
    bucket: &Bucket,
    workload: &Workload,
    phase: &'static str,
    bytes: u64,
    refill: impl Fn(),
    worker: impl Fn(Client) -> W,
) -> Result<Measured, Error>
where
    W: Future<Output = Result<(), Error>> + Send + 'static,
{
    Runtime::new()?.block_on(async {
        let client = bucket.client().await;
        let transfer = async || {
            refill();
            let mut workers = JoinSet::new();
            for _ in 0..workload.in_flight {
                workers.spawn(worker(client.clone()));
            }
            while let Some(result) = workers.join_next().await {
                result??;
            }
            Ok::<_, Error>(())
        };
        transfer().await?;
        let meter = Meter::start()?;
        transfer().await?;
        meter.stop(phase, workload.ops(), bytes)
    })
}
