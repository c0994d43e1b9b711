//! Where `kvgate serve` listens: the socket and the rights on its folder, the port, the token.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use tokio::net::TcpListener;

use super::Finding;
use super::system::{may_write, nearest, user};
use crate::config::Config;
use crate::engine::client::{Client, ClientError, DaemonAddress};

/// The longest path of a socket.
const PATH_MAX: usize = 107;

pub async fn check(config: &Config, limit: Duration) -> Vec<Finding> {
    // Two calls have room in the time of the check.
    let limit = limit / 4;
    let mut found = vec![socket(config, limit).await];
    found.extend(folder(&config.api.socket));
    if config.api.socket_mode & 0o002 != 0 {
        let seen = format!(
            "[api] socket_mode {:04o} lets every user in",
            config.api.socket_mode
        );
        let advice = "Set 0660, and put the engines' user into the socket's group: engines of one gateway trust each other";
        found.push(Finding::warning("socket", seen, advice));
    }
    if let Some(address) = config.api.listen {
        found.push(port(address, limit).await);
    }
    found.extend(config.api.token_file.as_deref().map(token));
    found
}

async fn socket(config: &Config, limit: Duration) -> Finding {
    const CHECK: &str = "socket";
    let path = &config.api.socket;
    let shown = path.display();
    if path.as_os_str().len() > PATH_MAX {
        let seen = format!("{shown} is longer than the {PATH_MAX} bytes that a socket's path can have");
        return Finding::failed(
            CHECK,
            seen,
            "Give [api] socket a shorter path, such as /run/kvgate/kvgate.sock",
        );
    }
    let there = fs::symlink_metadata(path);
    match &there {
        Ok(file) if !file.file_type().is_socket() => {
            let advice = "Remove that file, or give another [api] socket";
            return Finding::failed(CHECK, format!("{shown} is a file and no socket"), advice);
        }
        Ok(_) => {
            let client = Client::new(DaemonAddress::Unix(path.clone()));
            let client = client.trusting(config.api.socket_owner).with_patience(limit);
            match client.status().await {
                Ok(status) => return answers(path, &status),
                Err(ClientError::Connect { source, .. })
                    if source.kind() == io::ErrorKind::PermissionDenied =>
                {
                    let seen = format!("{shown} may not be opened by {}", user());
                    let advice =
                        "Run as the gateway's user or in its group, with [api] socket_mode = \"0660\"";
                    return Finding::failed(CHECK, seen, advice);
                }
                Err(ClientError::Connect { .. }) => {}
                Err(error @ ClientError::Stranger { .. }) => {
                    return Finding::failed_with(
                        CHECK,
                        &error.to_string().replacen(". If it is", "; if it is", 1),
                    );
                }
                Err(error) => {
                    let advice = "Look at the log of that process, or end it";
                    return Finding::failed(CHECK, format!("{shown}: {error}"), advice);
                }
            }
        }
        Err(_) => {}
    }
    let folder = nearest(path.parent().unwrap_or(Path::new("/")));
    if !may_write(&folder) {
        let seen = format!(
            "{shown} can't be made: {} is not writable by {}",
            folder.display(),
            user()
        );
        let advice = "Make the folder for the user that runs kvgate (RuntimeDirectory=kvgate in the unit), or give another [api] socket";
        return Finding::failed(CHECK, seen, advice);
    }
    let state = if there.is_ok() {
        "is left of a kvgate that is gone"
    } else {
        "is free"
    };
    Finding::ok(CHECK, format!("{shown} {state}; nobody serves there"))
}

fn answers(path: &Path, status: &serde_json::Value) -> Finding {
    const CHECK: &str = "socket";
    let word = |name: &str| status[name].as_str();
    let (ours, theirs) = (
        env!("CARGO_PKG_VERSION"),
        word("version").unwrap_or("of no version"),
    );
    let seen = format!("kvgate {theirs} answers at {}", path.display());
    let advice = "`kvgate stat --socket` says what is wrong with it";
    match word("not_ready") {
        Some(why) => Finding::warning(CHECK, format!("{seen} and is not ready: {why}"), advice),
        None if ours != theirs => {
            let advice = "Restart the gateway, so that both are of the same version";
            Finding::warning(CHECK, format!("{seen}, and this program is {ours}"), advice)
        }
        None => Finding::ok(CHECK, format!("{seen} and is ready")),
    }
}

/// Anybody who may write there can put another socket in the gateway's place.
fn folder(socket: &Path) -> Option<Finding> {
    let folder = socket.parent()?;
    let of = fs::metadata(folder).ok()?;
    let is_open = of.mode() & 0o022 != 0 && of.mode() & 0o1000 == 0;
    let seen = format!(
        "other users may write to {}, the socket's folder",
        folder.display()
    );
    let advice = format!(
        "chmod go-w {}: they could put a socket of their own in its place",
        folder.display()
    );
    is_open.then(|| Finding::warning("socket", seen, advice))
}

async fn port(address: SocketAddr, limit: Duration) -> Finding {
    const CHECK: &str = "port";
    let Err(error) = TcpListener::bind(address).await else {
        return Finding::ok(CHECK, format!("{address} is free"));
    };
    let seen = format!("{address}: {error}");
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            let client = Client::new(DaemonAddress::Tcp(address)).with_patience(limit);
            match client.get("/healthz").await {
                Ok(_) => Finding::ok(CHECK, format!("a kvgate answers at {address}")),
                Err(_) => Finding::failed(
                    CHECK,
                    seen,
                    format!(
                        "End what listens there (ss -ltnp 'sport = :{}'), or give another [api] listen",
                        address.port()
                    ),
                ),
            }
        }
        io::ErrorKind::PermissionDenied => {
            Finding::failed(CHECK, seen, "Give [api] listen a port above 1023")
        }
        io::ErrorKind::AddrNotAvailable => Finding::failed(
            CHECK,
            seen,
            "Give [api] listen an address of this machine (ip address), or 0.0.0.0",
        ),
        _ => Finding::failed(CHECK, seen, "Give another [api] listen"),
    }
}

fn token(path: &Path) -> Finding {
    const CHECK: &str = "token";
    let shown = path.display();
    match fs::read_to_string(path) {
        Err(error) => {
            let advice = "Make the file readable for the user that runs kvgate, or unset [api] token_file";
            Finding::failed(CHECK, format!("{shown}: {error}"), advice)
        }
        Ok(text) if text.trim().is_empty() => Finding::failed(
            CHECK,
            format!("{shown} is empty"),
            "Write a token into it: openssl rand -hex 32",
        ),
        Ok(_) if fs::metadata(path).is_ok_and(|file| file.mode() & 0o044 != 0) => Finding::warning(
            CHECK,
            format!("other users may read {shown}"),
            format!("chmod 0600 {shown}"),
        ),
        Ok(_) => Finding::ok(CHECK, format!("{shown} can be read, by its owner alone")),
    }
}
