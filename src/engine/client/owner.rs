//! The users whose socket a client may trust: the daemon's answers say where KV comes from.

use std::path::Path;

use rustix::process::geteuid;
use tokio::net::UnixStream;

use super::ClientError;

/// Root, this process's own user, and one more if configured.
#[derive(Debug, Clone, Copy, Default)]
pub struct Owner {
    pub told: Option<u32>,
}

impl Owner {
    /// Asks the kernel which user listens; the file's owner may be another one by now.
    pub(super) fn check(self, stream: &UnixStream, path: &Path) -> Result<(), ClientError> {
        let of = |source| ClientError::Connect {
            at: path.display().to_string(),
            source,
        };
        let uid = stream.peer_cred().map_err(of)?.uid();
        match self.trusts(uid, geteuid().as_raw()) {
            true => Ok(()),
            false => Err(ClientError::Stranger {
                at: path.display().to_string(),
                uid,
            }),
        }
    }

    fn trusts(self, uid: u32, own: u32) -> bool {
        uid == 0 || uid == own || self.told == Some(uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_roots_own_and_named_sockets_are_trusted() {
        let by_default = Owner::default();
        assert!(by_default.trusts(0, 1000) && by_default.trusts(1000, 1000));
        assert!(!by_default.trusts(1001, 1000) && !by_default.trusts(1001, 0));
        assert!(Owner { told: Some(1001) }.trusts(1001, 1000));
        assert!(!Owner { told: Some(1001) }.trusts(1002, 1000));
    }
}
