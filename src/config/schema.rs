//! Every configuration key. To add one, add its line here.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::declare::sections;
use super::kinds::{Between, Flag, OneOf, Optional, Time};
pub use super::names::PeerName;
use super::names::{
    ABSOLUTE_PATH, Address, BUCKET, COLLECTOR, DNS_NAME, ENDPOINTS, FILE_PATH, Folders, Hosts, Members, Mode,
    PREFIX, REGION, Servers,
};
use crate::config::units::{ByteSize, GIB, KIB, MIB, TIB};
use crate::format::DigestKind;
use crate::protocol::{EvictionPolicy, ProbeMode, Strategy, WhenFull, choices};

choices! {
    /// Which new chunks S3 is given.
    Admit {
        /// All of them.
        All = "all",
        /// Those most likely to be asked for again, within a budget.
        Auto = "auto",
    }

    /// How a tier handles chunks that it lacks, or is given.
    Lower {
        /// It ends here.
        Stop = "stop",
        /// It goes on to the tier below.
        Lower = "lower",
    }

    /// The least severe messages that are logged.
    LogLevel {
        /// Failures.
        Error = "error",
        /// Problems that may need an operator.
        Warn = "warn",
        /// Events that happen once.
        Info = "info",
        /// Events of each request.
        Debug = "debug",
        /// Steps inside a request.
        Trace = "trace",
    }

    /// The form of a log line.
    LogFormat {
        /// For people.
        Text = "text",
        /// One JSON object a line.
        Json = "json",
    }
}

sections! {
    /// The S3 server and how it is spoken to.
    s3: S3 {
        /// URL of the S3 server, or several with commas; not set: AWS, by region.
        endpoint: Option<String> = "", Optional(ENDPOINTS);
        /// Bucket that holds the chunks.
        bucket: Option<String> = "", Optional(BUCKET);
        /// The start of all object keys; empty: none.
        prefix: String = "", PREFIX;
        /// Region that requests are signed for.
        region: String = "us-east-1", REGION;
        /// Bucket in the path of the URL (true) or in the host name (false); not set: in the path with an endpoint, else not.
        path_style: Option<bool> = "", Optional(Flag);
        /// PEM file with the certificate authorities to trust.
        ca_file: Option<PathBuf> = "", Optional(FILE_PATH);
        /// How existence is asked of S3; a search for the end of a prefix always asks by HEAD, which has run hints.
        probe: ProbeMode = "auto", OneOf(ProbeMode::WORDS);
        /// Digest that new chunks are stored with.
        digest: DigestKind = "crc64nvme", OneOf(DigestKind::WORDS);
        /// Bytes that one ranged GET asks for, about; twice as many in loads of more than twice `[load] in_flight`.
        part_size: ByteSize = "16MiB", Between(ByteSize(MIB), ByteSize(5 * GIB));
        /// Time to connect, TLS included.
        connect_timeout: Duration = "2s", Time { min_ms: 10, max_ms: 60_000 };
        /// Time without a byte sent or received after which an attempt is given up; a head must come whole within it.
        read_timeout: Duration = "10s", Time { min_ms: 10, max_ms: 600_000 };
        /// Time for one attempt as a whole.
        request_timeout: Duration = "1m", Time { min_ms: 10, max_ms: 3_600_000 };
        /// How long a connection is kept without a request; RGW closes one after 65 s.
        idle_timeout: Duration = "50s", Time { min_ms: 0, max_ms: 3_600_000 };
        /// Connections in use at a time, to all endpoints together.
        connections: u32 = "256", Between(1, 65_536);
        /// Bytes of an answer that is no chunk, such as a page of a listing.
        answer_max: ByteSize = "16MiB", Between(ByteSize(MIB), ByteSize(GIB));
        /// Time after which keys without expiry (environment, files, a process) are read again: they may be new.
        credentials_ttl: Duration = "1m", Time { min_ms: 1000, max_ms: 86_400_000 };
        /// Attempts after the first.
        retries: u32 = "4", Between(0, 20);
        /// Wait before the first retry, where there is no other endpoint to go to; it doubles with each.
        retry_base: Duration = "50ms", Time { min_ms: 1, max_ms: 60_000 };
        /// Longest wait before a retry.
        retry_max: Duration = "2s", Time { min_ms: 1, max_ms: 300_000 };
        /// Retries that may be made in a burst, over all requests; ten successes earn one. Twice the ranges in flight.
        retry_budget: u32 = "128", Between(0, 100_000);
    }

    /// How the server's name becomes addresses. Each is an endpoint.
    dns: Dns {
        /// DNS servers to ask, with commas; not set: the system's.
        servers: Vec<SocketAddr> = "", Servers;
        /// Name of SRV records that say where the server is, instead of A and AAAA records of its host.
        srv: Option<String> = "", Optional(DNS_NAME);
        /// Ask by TCP alone. Otherwise UDP comes first, and TCP where an answer says that it was cut or differs from the last.
        tcp: bool = "false", Flag;
        /// Shortest time that addresses are kept; also the time from a failure to the next question.
        min_ttl: Duration = "1s", Time { min_ms: 100, max_ms: 3_600_000 };
        /// Longest time that addresses are kept. Where TCP does not answer, an address stays until this time has passed and nine answers by UDP in a row lacked it.
        max_ttl: Duration = "1m", Time { min_ms: 100, max_ms: 86_400_000 };
        /// Time for one lookup as a whole.
        timeout: Duration = "2s", Time { min_ms: 10, max_ms: 60_000 };
    }

    /// How requests are spread over the server's addresses.
    endpoints: Endpoints {
        /// Bytes that one endpoint may have in flight at first. The window grows while throughput does.
        window: ByteSize = "64MiB", Between(ByteSize(MIB), ByteSize(TIB));
        /// The window never shrinks below this.
        window_min: ByteSize = "8MiB", Between(ByteSize(MIB), ByteSize(TIB));
        /// The window never grows above this.
        window_max: ByteSize = "1GiB", Between(ByteSize(MIB), ByteSize(TIB));
        /// Failures in a row after which an endpoint is left alone.
        breaker_failures: u32 = "5", Between(1, 1000);
        /// Longest time that such an endpoint is left alone at first, and half of it at least; doubles with each failed probe.
        breaker_open: Duration = "1s", Time { min_ms: 10, max_ms: 3_600_000 };
        /// Longest time that an endpoint is left alone.
        breaker_open_max: Duration = "30s", Time { min_ms: 10, max_ms: 3_600_000 };
        /// Slow reads that are sent to another endpoint as well, in a hundred; 0: none.
        hedges: u32 = "10", Between(0, 100);
        /// Of more than twice as many addresses a node uses this many that work, and more while each of these has a request of that size.
        subset: u32 = "16", Between(1, 65_536);
        /// No read is slow sooner than this.
        hedge_min: Duration = "20ms", Time { min_ms: 1, max_ms: 60_000 };
    }

    /// Which chunks exist.
    lookup: Lookup {
        /// Ask for every chunk, or search for the end of the stored prefix.
        strategy: Strategy = "prefix", OneOf(Strategy::WORDS);
        /// Time for one lookup as a whole.
        deadline: Duration = "2s", Time { min_ms: 1, max_ms: 60_000 };
        /// How long a chunk that was seen counts as present; 0: ask each time.
        present_ttl: Duration = "10m", Time { min_ms: 0, max_ms: 7 * 86_400_000 };
        /// How long a chunk that was missing counts as absent; 0: ask each time.
        absent_ttl: Duration = "2s", Time { min_ms: 0, max_ms: 3_600_000 };
        /// Memory for what is known to exist or not.
        cache_size: ByteSize = "64MiB", Between(ByteSize(64 * KIB), ByteSize(64 * GIB));
        /// Existence requests in flight.
        concurrency: u32 = "64", Between(1, 4096);
        /// Positions that strategy `prefix` asks for in one round, at most.
        probes: u32 = "15", Between(1, 1024);
        /// Chunks of lookups that are remembered: so many that were not found, for run hints, and so many without an answer, or behind one that is gone, which S3 is asked for before they are stored. Some 200 bytes each.
        run_chunks: u32 = "32768", Between(64, 100_000_000);
    }

    /// The slots that chunks are loaded into and stored from.
    arena: Arena {
        /// Memory for slots.
        size: ByteSize = "1GiB", Between(ByteSize(MIB), ByteSize(64 * TIB));
        /// File that backs the arena, so that engines can map it; not set: private memory.
        path: Option<PathBuf> = "", Optional(ABSOLUTE_PATH);
        /// Back the arena with huge pages.
        huge_pages: bool = "false", Flag;
        /// Touch every page at the start instead of at first use.
        prefault: bool = "false", Flag;
        /// Keep the arena from being swapped out.
        mlock: bool = "false", Flag;
    }

    /// Chunks that stay in memory, in their slots.
    memory: Memory {
        /// Which chunk leaves first.
        policy: EvictionPolicy = "reuse", OneOf(EvictionPolicy::WORDS);
        /// How long a chunk stays at most; not set: as long as there is room.
        ttl: Option<Duration> = "", Optional(Time { min_ms: 1_000, max_ms: 365 * 86_400_000 });
        /// Percent of the arena that chunks nobody uses may take.
        watermark: u32 = "95", Between(1, 100);
        /// Whether what is not in memory is looked for in the tiers below.
        lookup: Lower = "lower", OneOf(Lower::WORDS);
        /// Whether new chunks go to the tiers below.
        store: Lower = "lower", OneOf(Lower::WORDS);
        /// Loads of a new chunk after which it goes to the tiers below; 0: at once.
        min_accesses: u32 = "0", Between(0, 1_000_000);
        /// Bytes that one tenant may have; not set: no limit of its own.
        tenant_max: Option<ByteSize> = "", Optional(Between(ByteSize(MIB), ByteSize(64 * TIB)));
        /// Longest time that a lookup or a pin keeps chunks in memory.
        pin_max: Duration = "10m", Time { min_ms: 0, max_ms: 86_400_000 };
    }

    /// Chunks on local disks, between memory and S3.
    disk: Disk {
        /// Folders, one on each disk, with commas; not set: no disks.
        paths: Vec<PathBuf> = "", Folders;
        /// Bytes that each of them may take.
        size: ByteSize = "100GiB", Between(ByteSize(MIB), ByteSize(1024 * TIB));
        /// Which chunk leaves first.
        policy: EvictionPolicy = "reuse", OneOf(EvictionPolicy::WORDS);
        /// How long a chunk stays at most; not set: as long as there is room.
        ttl: Option<Duration> = "", Optional(Time { min_ms: 1_000, max_ms: 365 * 86_400_000 });
        /// Percent of the size that is used.
        watermark: u32 = "95", Between(1, 100);
        /// Whether what is not on the disks is looked for on S3.
        lookup: Lower = "lower", OneOf(Lower::WORDS);
        /// Whether new chunks go to S3 as well.
        store: Lower = "lower", OneOf(Lower::WORDS);
        /// Whether chunks that come from S3 are written to the disks.
        promote: bool = "true", Flag;
        /// Errors in a row after which a disk is taken out.
        failures: u32 = "3", Between(1, 1000);
        /// Time for one read or write, after which a disk hangs, and is taken out.
        timeout: Duration = "30s", Time { min_ms: 10, max_ms: 3_600_000 };
        /// Pause after which a disk that was taken out is tried again, and read anew.
        retry: Duration = "1m", Time { min_ms: 10, max_ms: 86_400_000 };
        /// Reads and writes of each disk at a time.
        depth: u32 = "16", Between(1, 1024);
        /// Bytes of damaged files that S3 never got, kept for you in the folder lost of each disk; the oldest go first.
        lost_max: ByteSize = "1GiB", Between(ByteSize(MIB), ByteSize(1024 * TIB));
        /// Bytes that one tenant may have, on all disks together; not set: no limit of its own.
        tenant_max: Option<ByteSize> = "", Optional(Between(ByteSize(MIB), ByteSize(1024 * TIB)));
    }

    /// From S3 into slots.
    load: Load {
        /// Time for one load as a whole, retries included.
        deadline: Duration = "30s", Time { min_ms: 10, max_ms: 3_600_000 };
        /// Bytes that loads may have in flight.
        in_flight: ByteSize = "256MiB", Between(ByteSize(MIB), ByteSize(TIB));
        /// Bytes that one ranged GET asks for in layer order; it has whole layers, at least one.
        layer_part_size: ByteSize = "4MiB", Between(ByteSize(64 * KIB), ByteSize(5 * GIB));
        /// Bytes of slots that one load may hold: on their way, or handed out and not released.
        window: ByteSize = "256MiB", Between(ByteSize(MIB), ByteSize(TIB));
        /// Part of the arena that stores never take, so that the oldest load always goes on.
        reserve: ByteSize = "256MiB", Between(ByteSize(MIB), ByteSize(TIB));
        /// Percent of the arena without the reserve that one engine may hold, all its ranks, loads and stores together.
        engine_share: u32 = "40", Between(1, 95);
        /// Time for a rank to join a load that another rank began; then the others go on without it.
        join_grace: Duration = "2s", Time { min_ms: 10, max_ms: 3_600_000 };
        /// Prefetches at a time.
        prefetches: u32 = "2", Between(1, 1024);
    }

    /// From slots into S3.
    store: Store {
        /// Time for one store as a whole, retries included.
        deadline: Duration = "1m", Time { min_ms: 10, max_ms: 3_600_000 };
        /// Bytes that stores may have in flight.
        in_flight: ByteSize = "256MiB", Between(ByteSize(MIB), ByteSize(TIB));
        /// Bytes that engines may have reserved or committed and that are not stored yet.
        write_behind: ByteSize = "512MiB", Between(ByteSize(MIB), ByteSize(64 * TIB));
        /// How new chunks are treated when that is used up.
        when_full: WhenFull = "refuse", OneOf(WhenFull::WORDS);
        /// Which new chunks S3 is given: all, or those most likely to be asked for again (docs/EVICTION.md).
        admit: Admit = "all", OneOf(Admit::WORDS);
        /// Bytes a second that `auto` gives to S3, on average over a minute.
        admit_rate: ByteSize = "100MiB", Between(ByteSize(KIB), ByteSize(TIB));
        /// Chunks that `auto` remembers, with what it decided: some 200 bytes each.
        admit_chunks: u32 = "131072", Between(1024, 100_000_000);
        /// Longest wait before a chunk that could not be stored is tried again, and before S3 is asked for one whose lookup could not reach it.
        retry_max: Duration = "30s", Time { min_ms: 10, max_ms: 3_600_000 };
        /// Time for all ranks of an engine to commit a chunk, after which it is not stored.
        commit_timeout: Duration = "30s", Time { min_ms: 10, max_ms: 3_600_000 };
        /// Time to store what is left when `kvgate serve` is told to end.
        drain: Duration = "30s", Time { min_ms: 0, max_ms: 3_600_000 };
    }

    /// Chunks in use, written anew in place before a lifecycle rule takes them.
    refresh: Refresh {
        /// Age of a chunk on S3 from which its use refreshes it and all before it; less than the rule's days. Not set: never.
        after: Option<Duration> = "", Optional(Time { min_ms: 1_000, max_ms: 3650 * 86_400_000 });
        /// Objects that one node asks S3 about a second for this, at most; as many copies at most.
        rate: u32 = "50", Between(1, 10_000);
        /// Chunks that wait to be refreshed, at most; beyond that a use counts the next time.
        queue: u32 = "65536", Between(1, 10_000_000);
        /// Chunks whose age on S3 is remembered, so that they are not asked for again; some 100 bytes each.
        known: u32 = "262144", Between(1024, 100_000_000);
    }

    /// Removal from S3, by one node of those that have these settings. Without a limit none removes anything.
    gc: Gc {
        /// Bytes that may stay under the prefix; not set: no limit.
        size: Option<ByteSize> = "", Optional(Between(ByteSize(MIB), ByteSize(1024 * 1024 * TIB)));
        /// Bytes that each tenant may have there; not set: no limit.
        tenant_size: Option<ByteSize> = "", Optional(Between(ByteSize(MIB), ByteSize(1024 * 1024 * TIB)));
        /// Time without a use after which chunks go; not set: no limit.
        unused: Option<Duration> = "", Optional(Time { min_ms: 1_000, max_ms: 3650 * 86_400_000 });
        /// Pause between two listings of the bucket.
        every: Duration = "1h", Time { min_ms: 1_000, max_ms: 365 * 86_400_000 };
        /// Objects to remove a second, at most.
        rate: u32 = "200", Between(1, 100_000);
        /// Time without a sign of life after which another node removes in the place of this one.
        lease: Duration = "1m", Time { min_ms: 1_000, max_ms: 86_400_000 };
        /// Chunks that fit in the memory of the node that removes; each takes some 250 bytes.
        chunks: u32 = "4000000", Between(1000, 1_000_000_000);
    }

    /// Between slots and the pages of engines: their connectors read this, and `kvgate gpu`.
    copy: Copies {
        /// Threads of one copy by the CPU.
        threads: u32 = "4", Between(1, 256);
        /// Bytes for each thread: a copy of less than twice that has one thread.
        thread_size: ByteSize = "4MiB", Between(ByteSize(64 * KIB), ByteSize(GIB));
        /// Bytes of a transfer to or from a GPU, and of a staging buffer there.
        piece_size: ByteSize = "16MiB", Between(ByteSize(64 * KIB), ByteSize(GIB));
        /// Staging buffers on the GPU for each direction; loads have as many again for those that wait for the engine.
        staging_buffers: u32 = "3", Between(1, 64);
        /// Blocks of 256 threads of a copy kernel; it keeps about that many multiprocessors busy.
        thread_blocks: u32 = "16", Between(1, 4096);
        /// Bytes of a run from which on transfers go straight to the pages.
        direct_size: ByteSize = "1MiB", Between(ByteSize(KIB), ByteSize(GIB));
        /// Bytes of a piece in which the arena is pinned.
        pin_size: ByteSize = "1GiB", Between(ByteSize(MIB), ByteSize(TIB));
    }

    /// What routers are told of memory and disks, by the engines' own KV events.
    events: Events {
        /// Chunks that have events, of all engines; beyond that the oldest have none any more. 0: there are no events.
        chunks: u32 = "65536", Between(0, 10_000_000);
        /// Removals that an engine can be behind; then it reads what is there anew.
        removals: u32 = "65536", Between(1, 10_000_000);
        /// Bytes that an engine may say of a chunk beside its tokens.
        note_size: ByteSize = "16KiB", Between(ByteSize(KIB), ByteSize(MIB));
        /// Longest time that a call waits for an event.
        wait: Duration = "10s", Time { min_ms: 10, max_ms: 600_000 };
    }

    /// Other nodes, whose memory is asked before S3: docs/PEERS.md.
    peers: Peers {
        /// Where the nodes of the fleet are, this one among them, all with the same names here; not set: no node is asked.
        members: Vec<PeerName> = "", Members;
        /// Address to listen on for them.
        listen: SocketAddr = "0.0.0.0:9181", Address;
        /// File with the fleet's token, the same on all nodes.
        token_file: Option<PathBuf> = "", Optional(FILE_PATH);
        /// PEM file with this node's certificate, which it shows as a server and as a client; not set: no TLS between nodes.
        cert_file: Option<PathBuf> = "", Optional(FILE_PATH);
        /// PEM file with the certificate's key.
        key_file: Option<PathBuf> = "", Optional(FILE_PATH);
        /// PEM file with the authority of all nodes' certificates. It must sign nobody else's.
        ca_file: Option<PathBuf> = "", Optional(FILE_PATH);
        /// Name that all nodes' certificates have.
        server_name: Option<String> = "", Optional(DNS_NAME);
        /// Time until a peer's answer begins, connecting included; then the chunk comes from S3.
        first_byte: Duration = "100ms", Time { min_ms: 1, max_ms: 60_000 };
        /// Time without a byte of an answer that has begun; then the chunk comes from S3.
        stall: Duration = "5s", Time { min_ms: 10, max_ms: 600_000 };
        /// Nodes that are asked for a chunk, one after the other while none answers.
        owners: u32 = "2", Between(1, 16);
        /// A chunk that two nodes ask for within this time is fetched by its owner for all; 0: none is.
        hot: Duration = "10s", Time { min_ms: 0, max_ms: 3_600_000 };
        /// Chunks whose last asker is remembered, and as many whose holder is; some 150 bytes each.
        hot_chunks: u32 = "65536", Between(64, 100_000_000);
        /// Bytes of slots that answers to other nodes may hold; beyond that they are told to use S3.
        budget: ByteSize = "256MiB", Between(ByteSize(MIB), ByteSize(TIB));
        /// Connections of other nodes at a time, and to each of them.
        connections: u32 = "4096", Between(8, 1_000_000);
    }

    /// The keys of tenants, which protect their chunks on S3: docs/KEYS.md.
    keys: Keys {
        /// File that says where each tenant's keys are; not set: no tenant has keys.
        file: Option<PathBuf> = "", Optional(FILE_PATH);
        /// Time for a command that gives a key.
        timeout: Duration = "10s", Time { min_ms: 10, max_ms: 600_000 };
    }

    /// How engines and people reach `kvgate serve`.
    api: Api {
        /// Unix socket to listen on.
        socket: PathBuf = "/run/kvgate/kvgate.sock", ABSOLUTE_PATH;
        /// Rights on the socket and the arena, in octal: 0600 for the owner, 0660 for the group as well.
        socket_mode: u32 = "0600", Mode;
        /// Address to listen on as well, such as 127.0.0.1:9180; not set: none.
        listen: Option<SocketAddr> = "", Optional(Address);
        /// File with the bearer token that calls by TCP need, but for status, metrics, health and the page.
        token_file: Option<PathBuf> = "", Optional(FILE_PATH);
        /// Names that calls by TCP may be made to, besides the address itself: of a proxy, a service, in DNS.
        hosts: Vec<String> = "", Hosts;
        /// User id whose socket the command line and the engines trust, besides root's and their own.
        socket_owner: Option<u32> = "", Optional(Between(0, u32::MAX));
        /// Connections at a time; beyond that, those that do nothing are closed, the oldest first.
        connections: u32 = "4096", Between(8, 1_000_000);
        /// Engine processes at a time.
        sessions: u32 = "1024", Between(1, 100_000);
        /// Spaces that may be declared.
        spaces: u32 = "4096", Between(1, 1_000_000);
        /// Bytes of a request's body.
        body_max: ByteSize = "16MiB", Between(ByteSize(64 * KIB), ByteSize(GIB));
        /// Chunks that one call may name.
        hashes_max: u32 = "65536", Between(1, 10_000_000);
        /// Time to send a request, and to take an answer's next part.
        timeout: Duration = "30s", Time { min_ms: 100, max_ms: 3_600_000 };
        /// How long an engine's leases outlive its attach stream while its process is there.
        grace: Duration = "5s", Time { min_ms: 0, max_ms: 3_600_000 };
        /// Time without a call after which an engine counts as hanging: no load waits for the slots that it holds.
        stalled: Duration = "5s", Time { min_ms: 100, max_ms: 3_600_000 };
        /// Time that the status page and `kvgate top` look back.
        history: Duration = "1h", Time { min_ms: 60_000, max_ms: 86_400_000 };
        /// Loads that `kvgate trace` can show, the latest ones; 0: none.
        traces: u32 = "200", Between(0, 100_000);
        /// Spans that are kept of one call, the first ones; some 200 bytes each.
        trace_spans: u32 = "500", Between(1, 100_000);
        /// Whether the node counts as ready before S3 has answered.
        degraded: bool = "false", Flag;
    }

    /// Traces for OpenTelemetry.
    otlp: Otlp {
        /// URL of the collector that spans are sent to, by OTLP over HTTP, such as http://127.0.0.1:4318; not set: none are.
        endpoint: Option<String> = "", Optional(COLLECTOR);
        /// Percent of the calls that are traced, of those whose caller has no trace of its own.
        sample: u32 = "1", Between(0, 100);
        /// PEM file with the certificate authorities to trust, besides the system's.
        ca_file: Option<PathBuf> = "", Optional(FILE_PATH);
        /// Spans that wait to be sent, some 650 bytes each; those of further calls are dropped and counted.
        queue: u32 = "16384", Between(1, 10_000_000);
        /// Time for one request to the collector.
        timeout: Duration = "5s", Time { min_ms: 10, max_ms: 60_000 };
    }

    /// The log.
    log: Log {
        /// Least severe messages to write.
        level: LogLevel = "info", OneOf(LogLevel::WORDS);
        /// How often a warning that comes again and again is told; between, it is counted.
        repeat: Duration = "1m", Time { min_ms: 100, max_ms: 86_400_000 };
        /// For people or for machines.
        format: LogFormat = "text", OneOf(LogFormat::WORDS);
    }
}
