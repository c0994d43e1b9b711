//! Choices that the daemon, its clients and the configuration name with the same words.

use super::choice::choices;

choices! {
    /// The order in which a load fetches.
    ///
    /// Layer order is for engines that compute the first layer while the last ones are still under way. It cuts
    /// chunks at layer boundaries into *groups* of about `[load] layer_part_size`, and works in *windows* of chunks
    /// that together fit half of the arena; `LoadStream::window` says how many. Within a window:
    ///
    /// - Group 0 of all chunks is asked for before group 1 of any but those whose own group 0 is here, and at most
    ///   two groups are under way: group 2 is asked for when group 0 of every chunk has landed, group 3 after group
    ///   1, and so on, however much may be in flight. So the first layers of every chunk are here long before the
    ///   last layer of any.
    /// - Outcomes come group by group, and chunk by chunk within a group.
    ///
    /// It does not promise that the whole prompt's first layers come first: a load that needs several windows ends
    /// one before the next is handed out. Nor does it save time in total: its ranges are smaller than those of
    /// chunk order.
    ///
    /// A load of several chunks whose window would be one chunk uses chunk order, and `LoadStream::order` says so.
    Order {
        /// Whole chunks, in the order of the prompt.
        Chunk = "chunk",
        /// The first layers of all chunks, then the next ones.
        Layer = "layer",
    }

    /// How a lookup finds which chunks exist.
    Strategy {
        /// Asks for every chunk.
        Exact = "exact",
        /// Searches for the end of the stored prefix, many positions a round.
        Prefix = "prefix",
    }

    /// Where a chunk was found.
    Tier {
        /// A node's memory.
        Memory = "memory",
        /// A node's disks.
        Disk = "disk",
        /// Another node's memory.
        Peer = "peer",
        /// S3.
        S3 = "s3",
    }

    /// Which chunk leaves a tier first.
    EvictionPolicy {
        /// The chunk that is least likely to be asked for again soon, by what this node has seen; the least recently
        /// used one where that is better.
        Reuse = "reuse",
        /// The least recently used chunk.
        Lru = "lru",
        /// The oldest chunk.
        Fifo = "fifo",
        /// SIEVE (NSDI '24): the oldest chunk that was not used since its last check.
        Sieve = "sieve",
        /// S3-FIFO (SOSP '23): new chunks leave soon unless they are used, used ones stay long.
        S3Fifo = "s3fifo",
    }

    /// The fate of new chunks while S3 is slower than the engines.
    WhenFull {
        /// Refuses them.
        Refuse = "refuse",
        /// Takes them, and drops the deepest waiting descendants.
        Drop = "drop",
    }

    /// How kvgate asks S3 whether a chunk exists.
    ProbeMode {
        /// Attributes where the server supports them, HEAD otherwise.
        Auto = "auto",
        /// HEAD.
        Head = "head",
        /// `GetObjectAttributes`.
        Attributes = "attributes",
    }
}

#[expect(clippy::derivable_impls, reason = "the macro declares the enumeration")]
impl Default for Order {
    fn default() -> Self {
        Self::Chunk
    }
}
