//! Choices that the daemon, its clients and the configuration name with the same words.

use super::choice::choices;

choices! {
    /// The order in which a load fetches.
    ///
    /// Layer order is for engines that compute the first layer while the last ones are still on their way. It cuts chunks
    /// at layer boundaries into *groups* of `[load] layer_part_size`, about, and works in *windows* of chunks that have room
    /// in half of the arena together; `LoadStream::window` says how many. Within a window:
    ///
    /// - Group 0 of all chunks is asked for before group 1 of any but those whose own group 0 is here, and at most two groups
    ///   are under way: group 2 is asked for when group 0 of every chunk has landed, group 3 after group 1, and so on, however
    ///   much may be in flight. So the first layers of every chunk are here long before the last layer of any.
    /// - Outcomes come group by group, and chunk by chunk within a group.
    ///
    /// It does not say that the whole prompt's first layers come first: a load that needs several windows ends one before the
    /// next is handed out. Nor does it save time on the whole: its ranges are smaller than those of chunk order.
    ///
    /// A load of several chunks whose window would be one chunk is done in chunk order, and `LoadStream::order` says so.
    Order {
        /// Whole chunks, in the order of the prompt.
        Chunk = "chunk",
        /// The first layers of all chunks, then the next ones.
        Layer = "layer",
    }

    /// How a lookup finds which chunks exist.
    Strategy {
        /// Every chunk is asked for.
        Exact = "exact",
        /// The end of the stored prefix is searched for, many positions a round.
        Prefix = "prefix",
    }

    /// Where a chunk was found.
    Tier {
        /// A node's memory.
        Memory = "memory",
        /// A node's disks.
        Disk = "disk",
        /// S3.
        S3 = "s3",
    }

    /// Which chunk leaves a tier first.
    EvictionPolicy {
        /// The one that was not used for longest.
        Lru = "lru",
        /// The one that came first.
        Fifo = "fifo",
        /// SIEVE (NSDI '24): the oldest that was not used since it was last looked at.
        Sieve = "sieve",
        /// S3-FIFO (SOSP '23): what is new goes soon unless it is used, what was used stays long.
        S3Fifo = "s3fifo",
    }

    /// The fate of new chunks while S3 is slower than the engines.
    WhenFull {
        /// They are refused.
        Refuse = "refuse",
        /// They come in, and the deepest descendants that wait are dropped.
        Drop = "drop",
    }

    /// How existence is asked of S3.
    ProbeMode {
        /// Attributes where the server is found to have them, HEAD otherwise.
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
