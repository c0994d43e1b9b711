//! The programs that kvgate is measured against: the *floor*, which is a socket and nothing else, and the AWS SDK as it comes.
//!
//! `bench/landing.py` and `bench/fanout.py` start it and `bench/README.md` says what for. Servers run until they are ended; each client
//! runs once and prints one line of JSON, with the same names as `kvgate bench --json`. Both sides of the floor are
//! as cheap as sockets can be: the server sends with `sendfile` or throws away what it gets; the client receives into
//! kvgate's own arena, a thread for each core, wakes up when as much is there as kvgate waits for, and takes all of it.
//!
//! Not for: anything that a client of S3 must do besides (heads, signatures, retries, time limits).

mod cap;
mod measure;
mod raw;
mod ring;
mod sdk;
mod server;
mod sink;
mod tls;
mod workload;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, Subcommand};

use workload::Workload;

pub type Error = Box<dyn std::error::Error + Send + Sync>;

#[derive(Parser)]
#[command(about = "Floors and the stock AWS SDK, for bench/landing.py")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Server: sends spans of the objects in a folder.
    Serve {
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        folder: PathBuf,
    },
    /// Server: throws away what it is sent, raw and as S3 PUTs.
    Sink {
        #[arg(long)]
        raw: SocketAddr,
        #[arg(long)]
        http: SocketAddr,
    },
    /// Proxy: lets only so many bytes a second of the answers through.
    Cap {
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        to: SocketAddr,
        /// Bytes a second, or a file that has the number and may change.
        #[arg(long)]
        rate: String,
    },
    /// Receives from `serve` into the arena.
    Receive {
        #[arg(long)]
        server: SocketAddr,
        /// Drop the bytes in the kernel: what is left of the cost is not the copy's.
        #[arg(long)]
        drop: bool,
        #[command(flatten)]
        workload: Workload,
    },
    /// The same by io_uring.
    ReceiveRing {
        #[arg(long)]
        server: SocketAddr,
        #[arg(long, value_delimiter = ',')]
        with: Vec<ring::With>,
        #[command(flatten)]
        workload: Workload,
    },
    /// Sends from the arena to `sink`.
    Send {
        #[arg(long)]
        server: SocketAddr,
        #[command(flatten)]
        workload: Workload,
    },
    /// Puts every file of a folder into a new bucket.
    Seed {
        #[command(flatten)]
        bucket: sdk::Bucket,
        #[arg(long)]
        folder: PathBuf,
    },
    /// GET by the SDK's typed operation, its body copied into the arena.
    SdkGet {
        #[command(flatten)]
        bucket: sdk::Bucket,
        #[command(flatten)]
        workload: Workload,
    },
    /// GET over TLS by tokio-rustls with a large read buffer, into the arena.
    TlsGet {
        /// Name and port.
        #[arg(long)]
        host: String,
        #[arg(long)]
        bucket: String,
        #[arg(long)]
        ca_file: PathBuf,
        #[command(flatten)]
        workload: Workload,
    },
    /// HEAD by the SDK's typed operation.
    SdkHead {
        #[command(flatten)]
        bucket: sdk::Bucket,
        #[command(flatten)]
        workload: Workload,
    },
    /// PUT by the SDK's typed operation, from the arena.
    SdkPut {
        #[command(flatten)]
        bucket: sdk::Bucket,
        #[command(flatten)]
        workload: Workload,
    },
}

fn main() -> Result<(), Error> {
    let measured = match Cli::parse().command {
        Command::Serve { listen, folder } => return server::run(listen, &folder),
        Command::Sink { raw, http } => return sink::run(raw, http),
        Command::Cap { listen, to, rate } => return cap::run(listen, to, &rate),
        Command::Seed { bucket, folder } => return sdk::seed(&bucket, &folder),
        Command::Receive {
            server,
            drop,
            workload,
        } => raw::receive(server, &workload, drop),
        Command::ReceiveRing {
            server,
            with,
            workload,
        } => ring::receive(server, &workload, &with),
        Command::Send { server, workload } => raw::send(server, &workload),
        Command::TlsGet {
            host,
            bucket,
            ca_file,
            workload,
        } => tls::get(&host, &bucket, &ca_file, &workload),
        Command::SdkGet { bucket, workload } => sdk::get(&bucket, &workload),
        Command::SdkHead { bucket, workload } => sdk::head(&bucket, &workload),
        Command::SdkPut { bucket, workload } => sdk::put(&bucket, &workload),
    }?;
    println!("{}", serde_json::to_string(&measured)?);
    Ok(())
}
