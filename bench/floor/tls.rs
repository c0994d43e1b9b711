//! GET over TLS by tokio-rustls, with a large read buffer below it, as kvgate reads TLS. It parses as little of HTTP as
//! there is to parse, and signs nothing.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufStream};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::Error;
use crate::measure::{Measured, Meter};
use crate::workload::{Part, Queue, Workload};

const READ_BUFFER: usize = 256 << 10;

type Stream = TlsStream<BufStream<TcpStream>>;

/// `host`: name and port; the objects are below `/bucket`.
pub fn get(host: &str, bucket: &str, ca_file: &Path, workload: &Workload) -> Result<Measured, Error> {
    let queue = Arc::new(Queue::new(workload)?);
    let measured = Runtime::new()?.block_on(async {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(ca_file)? {
            roots.add(certificate?)?;
        }
        let config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = TlsConnector::from(Arc::new(config));
        let mut streams = Vec::new();
        for _ in 0..workload.in_flight {
            let tcp = TcpStream::connect(host).await?;
            tcp.set_nodelay(true)?;
            let name = host.rsplit_once(':').map_or(host, |(name, _)| name).to_owned();
            let buffered = BufStream::with_capacity(READ_BUFFER, 4 << 10, tcp);
            streams.push(connector.connect(ServerName::try_from(name)?, buffered).await?);
        }
        // All is done once before the meter starts.
        let streams = transfer(streams, &queue, workload, bucket).await?;
        let meter = Meter::start()?;
        transfer(streams, &queue, workload, bucket).await?;
        meter.stop("read", workload.ops(), workload.bytes())
    })?;
    queue.check()?;
    Ok(measured)
}

async fn transfer(
    streams: Vec<Stream>,
    queue: &Arc<Queue>,
    workload: &Workload,
    bucket: &str,
) -> Result<Vec<Stream>, Error> {
    queue.refill(workload);
    let mut tasks = JoinSet::new();
    for mut stream in streams {
        let (queue, bucket) = (Arc::clone(queue), bucket.to_owned());
        tasks.spawn(async move {
            while let Some(mut part) = queue.take() {
                get_part(&mut stream, &bucket, &mut part).await?;
                queue.give_back(part);
            }
            Ok::<_, Error>(stream)
        });
    }
    tasks.join_all().await.into_iter().collect()
}

async fn get_part(stream: &mut Stream, bucket: &str, part: &mut Part) -> Result<(), Error> {
    let (first, last) = (part.offset, part.offset + part.slot.len() as u64 - 1);
    let name = Workload::name(part.object);
    let request =
        format!("GET /{bucket}/{name} HTTP/1.1\r\nHost: bench\r\nRange: bytes={first}-{last}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    let mut head = Vec::with_capacity(1024);
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8(head)?.to_ascii_lowercase();
    let length = format!("content-length: {}\r\n", part.slot.len());
    if !head.starts_with("http/1.1 206") || !head.contains(&length) {
        return Err(format!("an answer that was not expected: {head}").into());
    }
    stream.read_exact(&mut part.slot).await?;
    Ok(())
}
