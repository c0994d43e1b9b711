//! Rendezvous hashing: every node finds the same owner of a chunk among the same members, and a member that comes or goes
//! moves only its own chunks.
//!
//! score(member, chunk) = mix(seed(member) ^ the chunk hash's first 8 bytes); the highest owns the chunk. It is part of what
//! nodes must agree on, across versions.

use std::net::SocketAddr;

use crate::format::ChunkHash;

/// A member's part of its scores: of its address as `IP:PORT`, so that all nodes have the same one.
pub fn seed(address: SocketAddr) -> u64 {
    first_word(blake3::hash(address.to_string().as_bytes()).as_bytes())
}

pub fn score(seed: u64, chunk: &ChunkHash) -> u64 {
    mix(seed ^ first_word(chunk.as_bytes()))
}

fn first_word(bytes: &[u8; 32]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(word)
}

/// The finalizer of splitmix64: each bit of the sum depends on each bit of the argument.
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
