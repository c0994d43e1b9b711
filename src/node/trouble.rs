//! What is wrong with a node, and what to do: for the status page, `kvgate stat` and `kvgate top`. `docs/ALERTS.md` has
//! what Prometheus tells.

use serde::Serialize;

use super::status::Status;
use crate::cache::peers::MemberState;
use crate::cache::tier::DiskState;

/// Something that somebody should look at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Trouble {
    /// The node does not do its work. Else it does, and something is not as it should be.
    pub is_bad: bool,
    pub what: String,
    /// What to type or set next.
    pub todo: String,
}

fn bad(what: impl Into<String>, todo: impl Into<String>) -> Trouble {
    Trouble {
        is_bad: true,
        what: what.into(),
        todo: todo.into(),
    }
}

fn odd(what: impl Into<String>, todo: impl Into<String>) -> Trouble {
    Trouble {
        is_bad: false,
        ..bad(what, todo)
    }
}

/// What the status does not have otherwise, each with its latest reason.
pub(super) struct Noted {
    pub keyless: Option<String>,
    pub reload_refused: Option<String>,
}

/// The worst first.
pub(super) fn troubles(status: &Status, write_behind_max: u64, noted: Noted) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    if !status.s3.answered {
        let todo = "`kvgate doctor` with the same settings says which link is broken: name, address, certificate, clock, keys or \
                    bucket. The log has S3's own words.";
        troubles.push(bad("S3 has not answered since the start", todo));
    }
    addresses(status, &mut troubles);
    keys(status, &mut troubles);
    names(status, &mut troubles);
    disks(status, &mut troubles);
    peers(status, &mut troubles);
    behind(status, write_behind_max, &mut troubles);
    if let Some(why) = noted.reload_refused {
        let todo = "Mend what it names, and reload again (`systemctl reload kvgate`): until then a key or token that was taken \
                    away may still be in use.";
        troubles.push(odd(format!("The last reload was refused: {why}"), todo));
    }
    if let Some(latest) = noted.keyless {
        let todo = "Add the key and reload (`systemctl reload kvgate`), unless it was taken away on purpose.";
        troubles.push(odd(format!("A key is not here: {latest}"), todo));
    }
    troubles.sort_by_key(|trouble| !trouble.is_bad);
    troubles
}

fn addresses(status: &Status, troubles: &mut Vec<Trouble>) {
    let endpoints = &status.s3.endpoints;
    let open = endpoints.iter().filter(|one| !one.works());
    let open: Vec<String> = open.map(|one| one.address.to_string()).collect();
    if open.is_empty() {
        return;
    }
    let todo = "Look at S3 and the network between: `kvgate bench lookup` with the same settings tries it. Addresses come back by themselves.";
    if open.len() == endpoints.len() {
        let what = "All addresses of S3 fail: the node serves what its memory and disks have";
        troubles.push(bad(what, todo));
    } else {
        let what = format!(
            "{} of {} addresses of S3 are left alone: {}",
            open.len(),
            endpoints.len(),
            open.join(", ")
        );
        troubles.push(odd(what, todo));
    }
}

/// Peers that a line names.
const NAMED: usize = 4;
/// Answers in a row that are no accident.
const DENIED: u64 = 3;

fn keys(status: &Status, troubles: &mut Vec<Trouble>) {
    if status.s3.over_quota {
        let what = "The quota of the bucket or its owner is used up: loads go on, and nothing new reaches S3";
        let todo = "Raise the quota, or remove chunks: `kvgate gc --size`, `kvgate gc --unused` or `kvgate lifecycle apply` with the \
                    owner's keys. Stores go on by themselves.";
        // It is a 403, too, and no key would help.
        return troubles.push(bad(what, todo));
    }
    let endpoints = &status.s3.endpoints;
    if endpoints.iter().any(|one| one.denied_in_a_row >= DENIED) {
        let what =
            "S3 answers 401 or 403: it does not accept the node's keys, or they may not read this bucket";
        let todo = "`kvgate doctor` with the same settings says which. New keys are read every [s3] credentials_ttl. Until then \
                    lookups don't know what S3 has.";
        troubles.push(bad(what, todo));
    }
}

fn names(status: &Status, troubles: &mut Vec<Trouble>) {
    for name in &status.s3.names {
        if let Some(error) = &name.error {
            let what = format!("{} can't be resolved: {error}", name.name);
            let todo = "Look at DNS: `dig` the name, and [dns] servers. The last good addresses stay in use.";
            troubles.push(match name.addresses {
                0 => bad(what, todo),
                _ => odd(what, todo),
            });
        }
    }
}

fn disks(status: &Status, troubles: &mut Vec<Trouble>) {
    for disk in status.tiers.disk.iter().flat_map(|disk| &disk.disks) {
        if let DiskState::Failed(why) = &disk.state {
            let what = format!("the disk {} was taken out: {why}", disk.path.display());
            let todo = "Repair or replace it: kvgate tries it again every [disk] retry, and reads it anew.";
            troubles.push(bad(what, todo));
        }
    }
}

fn peers(status: &Status, troubles: &mut Vec<Trouble>) {
    let Some(members) = &status.peers else { return };
    if members.is_empty() {
        let todo = "Look at DNS: `dig` the name in [peers] members; the log has the resolver's words. Until then all comes from S3.";
        return troubles.push(odd("No node of [peers] members is known", todo));
    }
    let others = members.iter().filter(|one| !one.is_self);
    let (up, down): (Vec<_>, Vec<_>) = others.partition(|one| one.is_up);
    let named = |of: &[&MemberState]| {
        let shown: Vec<String> = of.iter().take(NAMED).map(|one| one.address.to_string()).collect();
        let more = match of.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        shown.join(", ") + &more
    };
    let refusing: Vec<_> = down
        .iter()
        .copied()
        .filter(|one| one.latest == Some("refused"))
        .collect();
    if !refusing.is_empty() {
        let what = format!("Peers refuse this node: {}", named(&refusing));
        let todo = "Give all nodes the same token in [peers] token_file, and reload (`systemctl reload kvgate`). Until \
                    then their chunks come from S3.";
        troubles.push(odd(what, todo));
    } else if up.is_empty() && !down.is_empty() {
        let what = format!("No peer answers: {}", named(&down));
        let todo = "Look at the network between the nodes: `nc -vz` one of these, as the port of [peers] listen must be open. With \
                    certificates `kvgate doctor` reads them, on both. Until then all comes from S3.";
        troubles.push(odd(what, todo));
    }
}

fn behind(status: &Status, write_behind_max: u64, troubles: &mut Vec<Trouble>) {
    let behind = &status.tiers.write_behind;
    if behind.lost > 0 {
        let what = format!(
            "{} chunks were lost: their only file could not be read",
            behind.lost
        );
        troubles.push(bad(
            what,
            "Look at the disk, and at its folder `lost`. Engines compute them again.",
        ));
    }
    if behind.dropped > behind.lost {
        let what = format!(
            "{} chunks were given up and are not on S3",
            behind.dropped - behind.lost
        );
        let todo =
            "Raise [store] write_behind, or set [store] when_full = \"refuse\". Engines compute them again.";
        troubles.push(odd(what, todo));
    }
    let used = behind.waiting_bytes + behind.reserved_bytes;
    if write_behind_max > 0 && used.saturating_mul(10) >= write_behind_max.saturating_mul(9) {
        let what = "New chunks find no room: those before wait for S3 or a disk";
        let todo = "Look at the latency of S3 below. If it is as usual, raise [store] write_behind and [store] in_flight.";
        troubles.push(odd(what, todo));
    }
}
