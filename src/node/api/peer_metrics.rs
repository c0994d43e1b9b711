//! The metrics of other nodes' memories. All series are there without peers, too.

use std::sync::atomic::{AtomicU64, Ordering};

use super::exposition::Families;
use crate::cache::peers::{ANSWERS, Asked, Peers};
use crate::metrics::Counts;

pub fn peers(text: &mut Families, peers: Option<&Peers>) {
    let members = peers.map(Peers::members).unwrap_or_default();
    text.gauge(
        "kvgate_peer_members",
        "Nodes of the fleet that this one knows, itself among them.",
        members.len() as u64,
    );
    text.gauge(
        "kvgate_peer_members_up",
        "Of these, those that are asked; the others did not answer lately, or wrongly.",
        members.iter().filter(|member| member.is_up()).count() as u64,
    );
    let figures = peers.map(|peers| &peers.figures);
    let count = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed);
    counts(
        text,
        "kvgate_peer_asked_total",
        "Chunks asked of other nodes: landed, use_s3 (it said so), own (this node itself), slow (no answer in time), failed (gone, \
         or broke off), refused (another token), wrong (its bytes are not the chunk).",
        (Asked::WORDS, figures.map(|figures| &figures.asked)),
    );
    text.counter(
        "kvgate_peer_asked_bytes_total",
        "Bytes of chunks that came from other nodes.",
        figures.map_or(0, |figures| count(&figures.asked_bytes)),
    );
    counts(
        text,
        "kvgate_peer_questions_total",
        "Small requests to other nodes, of lookups that ask who has a chunk and of stores that tell who has some; outcomes as \
         above, landed for yes.",
        (Asked::WORDS, figures.map(|figures| &figures.questions)),
    );
    counts(
        text,
        "kvgate_peer_answered_total",
        "Answers to other nodes: memory, arriving (it was on its way here), fetched (this node fetches it for all), use_s3 (it is \
         not here), full ([peers] budget was used up).",
        (ANSWERS, figures.map(|figures| &figures.answered)),
    );
    text.counter(
        "kvgate_peer_answered_bytes_total",
        "Bytes of chunks that other nodes were promised.",
        figures.map_or(0, |figures| count(&figures.answered_bytes)),
    );
    text.gauge(
        "kvgate_peer_budget_used_bytes",
        "Bytes of slots that answers to other nodes hold now.",
        peers.map_or(0, |peers| peers.budget.used_bytes() as u64),
    );
}

fn counts(
    text: &mut Families,
    name: &str,
    help: &str,
    (words, of): (&'static [&'static str], Option<&Counts>),
) {
    match of {
        Some(counts) => text.counts(name, help, "outcome", counts),
        None => text.counts(name, help, "outcome", &Counts::new(words)),
    }
}
