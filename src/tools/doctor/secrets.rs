//! The keys of tenants, and what peers prove themselves with: read as `kvgate serve` reads them.

use super::Finding;
use crate::cache::peers::{Identity, Peers};
use crate::config::{Config, Keys, read_keys};
use crate::node::daemon::peer_options;

/// None without keys. Waits for the commands that give them.
pub fn keys(keys: &Keys) -> Option<Finding> {
    const CHECK: &str = "keys";
    let file = keys.file.as_ref()?.display();
    Some(match read_keys(keys) {
        Ok(_) => Finding::ok(CHECK, format!("{file}: the keys of all its tenants can be read")),
        Err(error) => Finding::failed(
            CHECK,
            error.to_string(),
            "Correct it (docs/KEYS.md), and ask as the user that runs kvgate: `kvgate serve` does not start like this",
        ),
    })
}

/// None without peers. Asks no peer.
pub fn peers(config: &Config) -> Option<Finding> {
    const CHECK: &str = "peers";
    let options = peer_options(config)?;
    let files = [
        options.token_file.as_ref().map(|_| "the fleet's token"),
        options.tls.as_ref().map(|_| "certificate, key and authority"),
    ];
    let files: Vec<&str> = files.into_iter().flatten().collect();
    let read = || {
        let peers = Peers::new(options).map_err(|error| error.to_string())?;
        let tls = peers.identity().map(Identity::server).transpose();
        tls.map_err(|error| error.to_string())
    };
    Some(match read() {
        Ok(_) => Finding::ok(CHECK, format!("{} can be used", files.join(", "))),
        Err(error) => Finding::failed(
            CHECK,
            error,
            "Correct that file (docs/PEERS.md), readable for the user that runs kvgate: `kvgate serve` does not start like this",
        ),
    })
}
