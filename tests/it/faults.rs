//! Faults put in front of a store: errors are unknown, never absent; nothing is kept, lost or asked twice.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use kvgate::cache::gateway::{AfterMiss, Kinds, LoadSpec, StoreOutcome};
use kvgate::format::Space;
use kvgate::protocol::Order;
use kvgate::protocol::Strategy;
use kvgate::s3::net::{Landing, Traffic};
use kvgate::s3::object::{
    Condition, ErrorKind, GetFuture, GetRange, ListPage, ObjectError, ObjectMeta, ObjectStore, Operation,
    RequestCounts, StoreFuture,
};
use tokio::time::Instant;

use crate::support::backends::Backend;
use crate::support::fixture::{
    Prompt, Site, arena_empties, load_codes, lookup, soon, store_all, store_chunk,
};

type Hook = Box<dyn Fn() -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// Calls of these operations fail with this.
type Failing = (fn(Operation) -> bool, ErrorKind);

/// A store with something done to its calls.
pub struct Hooked {
    inner: Arc<dyn ObjectStore>,
    /// Run before GET number `.0`, counted from 0.
    before_get: Option<(usize, Hook)>,
    gets: AtomicUsize,
    /// Flip this byte of this key's object on its way.
    flip: Option<(String, usize)>,
    /// How many more bytes are flipped.
    flips: AtomicUsize,
    /// Attempts at a GET that deliver junk, but for the last byte, and break off; others follow.
    breaks: AtomicUsize,
    failing: Mutex<Option<Failing>>,
    fail_next: AtomicUsize,
    delay: Duration,
    entered: Arc<AtomicUsize>,
    /// PUTs until one is made but its answer is lost, so that another attempt follows.
    puts_to_lost: AtomicUsize,
    /// Another writer's object, which comes just before a PUT of its key.
    pub overtakes: Mutex<Option<(String, Bytes)>>,
}

impl Hooked {
    pub fn over(inner: Arc<dyn ObjectStore>) -> Self {
        Self {
            inner,
            before_get: None,
            gets: AtomicUsize::new(0),
            flip: None,
            flips: AtomicUsize::new(usize::MAX),
            breaks: AtomicUsize::new(0),
            failing: Mutex::new(None),
            fail_next: AtomicUsize::new(0),
            delay: Duration::ZERO,
            entered: Arc::default(),
            puts_to_lost: AtomicUsize::new(usize::MAX),
            overtakes: Mutex::default(),
        }
    }

    pub fn before_get(
        inner: Arc<dyn ObjectStore>,
        number: usize,
        hook: impl Fn() -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            before_get: Some((number, Box::new(hook))),
            ..Self::over(inner)
        }
    }

    pub fn flipping(inner: Arc<dyn ObjectStore>, key: String, byte: usize) -> Arc<Self> {
        Arc::new(Self {
            flip: Some((key, byte)),
            ..Self::over(inner)
        })
    }

    pub fn breaking(inner: Arc<dyn ObjectStore>, times: usize) -> Self {
        Self {
            breaks: AtomicUsize::new(times),
            ..Self::over(inner)
        }
    }

    /// From here on so many GETs of the flipped byte are damaged; 0: it is healed.
    pub fn flip_times(&self, times: usize) {
        self.flips.store(times, Ordering::SeqCst);
    }

    fn flips(&self, get: &GetRange<'_>) -> Option<usize> {
        let (key, byte) = self.flip.as_ref()?;
        (key == get.key && get.range.contains(byte) && spend(&self.flips)).then(|| byte - get.range.start)
    }

    pub fn fail(&self, kind: Option<ErrorKind>) {
        let every = |_| true;
        *self.failing.lock().unwrap() = kind.map(|kind| -> Failing { (every, kind) });
    }

    fn fail_questions(&self, kind: ErrorKind) {
        let questions = |of| matches!(of, Operation::Head | Operation::Attributes);
        *self.failing.lock().unwrap() = Some((questions, kind));
    }

    async fn enter(&self, operation: Operation, key: &str) -> Result<(), ObjectError> {
        self.entered.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(self.delay).await;
        let failing = *self.failing.lock().unwrap();
        let failing = failing.filter(|(fails, _)| fails(operation));
        let kind = spend(&self.fail_next)
            .then_some(ErrorKind::Unavailable)
            .or(failing.map(|(_, kind)| kind));
        kind.map_or(Ok(()), |kind| {
            Err(ObjectError::new(operation, key, kind, "injected"))
        })
    }
}

fn spend(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
        .is_ok()
}

impl ObjectStore for Hooked {
    fn head<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        Box::pin(async move {
            self.enter(Operation::Head, key).await?;
            self.inner.head(key, deadline).await
        })
    }

    fn attributes<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        Box::pin(async move {
            self.enter(Operation::Attributes, key).await?;
            self.inner.attributes(key, deadline).await
        })
    }

    fn get<'a>(&'a self, get: GetRange<'a>, mut landing: Landing, deadline: Instant) -> GetFuture<'a> {
        Box::pin(async move {
            if let Some((number, hook)) = &self.before_get
                && self.gets.fetch_add(1, Ordering::SeqCst) == *number
            {
                hook().await;
            }
            if let Err(error) = self.enter(Operation::Get, get.key).await {
                return (landing, Err(error));
            }
            while spend(&self.breaks) {
                let almost = landing.slot.len() - 1;
                landing.slot[..almost].fill(0xee);
                landing.arrived(0, almost);
            }
            let flipped = self.flips(&get);
            // The watch must see the flipped byte.
            let watch = landing.watch.take_if(|_| flipped.is_some());
            let (mut landing, meta) = self.inner.get(get, landing, deadline).await;
            if let Some(byte) = flipped {
                landing.slot[byte] ^= 1;
                landing.watch = watch;
                landing.arrived(0, landing.slot.len());
            }
            (landing, meta)
        })
    }

    fn read<'a>(&'a self, key: &'a str, limit: usize, deadline: Instant) -> StoreFuture<'a, Bytes> {
        self.inner.read(key, limit, deadline)
    }

    fn read_front<'a>(&'a self, key: &'a str, bytes: usize, deadline: Instant) -> StoreFuture<'a, Bytes> {
        self.inner.read_front(key, bytes, deadline)
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        when: Condition<'a>,
        deadline: Instant,
    ) -> StoreFuture<'a, Arc<str>> {
        Box::pin(async move {
            self.enter(Operation::Put, key).await?;
            let other = self.overtakes.lock().unwrap().take_if(|(at, _)| at == key);
            if let Some((_, other)) = other {
                self.inner.put(key, other, Condition::Always, deadline).await?;
            }
            if self.puts_to_lost.fetch_sub(1, Ordering::SeqCst) == 0 {
                self.inner.put(key, body.clone(), when, deadline).await?;
            }
            self.inner.put(key, body, when, deadline).await
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a str>,
        deadline: Instant,
    ) -> StoreFuture<'a, ListPage> {
        self.inner.list(prefix, from, deadline)
    }

    fn delete<'a>(&'a self, keys: &'a [String], deadline: Instant) -> StoreFuture<'a, ()> {
        self.inner.delete(keys, deadline)
    }

    fn check_bucket(&self, deadline: Instant) -> StoreFuture<'_, ()> {
        self.inner.check_bucket(deadline)
    }

    fn create_bucket(&self, deadline: Instant) -> StoreFuture<'_, ()> {
        self.inner.create_bucket(deadline)
    }

    fn requests(&self) -> RequestCounts {
        self.inner.requests()
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

/// An embedded server with a prompt of `n` chunks on it.
async fn stored(n: usize) -> (Backend, Site, Prompt) {
    let backend = Backend::embedded().await;
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(n);
    store_all(&site.gateway(), &prompt).await;
    (backend, site, prompt)
}

/// The same prompt's snapshots of a state.
fn snapshots_of(prompt: &Prompt) -> Prompt {
    let space = Space::from_json(
        r#"{"model": "test/tiny", "revision": "1", "dtype": "float16", "chunk_tokens": 16, "kind": "state",
            "mha": {"layers": 6, "heads": 4, "head_dim": 64}}"#,
    )
    .unwrap();
    Prompt {
        space,
        ..prompt.clone()
    }
}

/// The full prefix is known, and of the snapshots nobody tells.
#[tokio::test]
async fn a_boundary_without_answers_is_open_and_not_remembered() {
    let (_server, site, prompt) = stored(5).await;
    let snapshots = snapshots_of(&prompt);
    store_chunk(&site.gateway(), &snapshots, 3).await;
    let flaky = Arc::new(Hooked::over(Arc::clone(&site.store)));
    let gateway = site.gateway_over(Arc::clone(&flaky) as Arc<_>);
    let spaces = [snapshots.space.clone(), prompt.space.clone()];
    let kinds = Kinds {
        spaces: &spaces,
        drafts: &[],
        state_every: 0,
        lookahead: 0,
    };
    let ask = async |strategy, deadline| {
        let found = gateway.boundary(kinds, &prompt.hashes, strategy, deadline).await;
        (found.chunks, found.full, found.is_open, found.error.is_some())
    };
    for strategy in [Strategy::Exact, Strategy::Prefix] {
        flaky.fail(Some(ErrorKind::Throttled));
        assert_eq!(ask(strategy, soon()).await, (0, 0, true, true));
        flaky.fail(None);
        assert_eq!(lookup(&gateway, &prompt, strategy).await.prefix, 5);
        flaky.fail(Some(ErrorKind::Timeout));
        assert_eq!(ask(strategy, soon()).await, (0, 5, true, true));
        flaky.fail(None);
        let late = ask(strategy, Instant::now()).await;
        assert_eq!((late.0, late.1, late.2), (0, 5, true), "out of time");
        let before = flaky.entered.load(Ordering::SeqCst);
        let late = gateway
            .lookup(&spaces[0], &prompt.hashes, strategy, Instant::now())
            .await;
        assert_eq!((late.unknown.count(), late.inferred.count()), (5, 0));
        let of_states = Kinds {
            spaces: &spaces[..1],
            ..kinds
        };
        let late = gateway
            .boundary(of_states, &prompt.hashes, strategy, Instant::now())
            .await;
        assert_eq!(
            (late.first.unknown.count(), late.first.inferred.count()),
            (5, 0),
            "nobody could tell"
        );
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(flaky.entered.load(Ordering::SeqCst), before, "nobody was asked");
        assert_eq!(ask(strategy, soon()).await, (4, 5, false, false));
        gateway.forget_existence();
    }
}

#[tokio::test]
async fn errors_are_unknown_and_not_remembered() {
    let (_server, site, prompt) = stored(5).await;
    let flaky = Arc::new(Hooked::over(Arc::clone(&site.store)));
    let gateway = site.gateway_over(Arc::clone(&flaky) as Arc<_>);
    for kind in [
        ErrorKind::Denied,
        ErrorKind::Credentials,
        ErrorKind::Throttled,
        ErrorKind::Unavailable,
        ErrorKind::Timeout,
        ErrorKind::Connect,
        ErrorKind::Broken,
        ErrorKind::NoBucket,
    ] {
        flaky.fail(Some(kind));
        for strategy in [Strategy::Exact, Strategy::Prefix] {
            let found = lookup(&gateway, &prompt, strategy).await;
            assert_eq!(
                (found.mask.count(), found.unknown.count()),
                (0, 5),
                "{kind:?} {strategy:?}"
            );
            assert_eq!(found.error.unwrap().kind, kind);
        }
        assert_eq!(
            load_codes(&gateway, &prompt, AfterMiss::Continue).await,
            ["unknown"; 5],
            "{kind:?}"
        );
        flaky.fail(None);
        assert_eq!(
            lookup(&gateway, &prompt, Strategy::Exact).await.prefix,
            5,
            "right again at once after {kind:?}"
        );
        assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"; 5]);
        gateway.forget_existence();
    }
    arena_empties(&gateway).await;
}

#[tokio::test]
async fn a_failed_store_is_not_present() {
    let (_server, site, _) = stored(1).await;
    let prompt = Prompt::new(2);
    let flaky = Arc::new(Hooked::over(Arc::clone(&site.store)));
    let gateway = site.gateway_over(Arc::clone(&flaky) as Arc<_>);
    // The space is declared: from here on a store's first request is the chunk's PUT.
    assert!(matches!(
        store_chunk(&gateway, &prompt, 0).await,
        StoreOutcome::Stored
    ));
    flaky.fail(Some(ErrorKind::Unavailable));
    assert!(matches!(
        store_chunk(&gateway, &prompt, 1).await,
        StoreOutcome::Failed(_)
    ));
    flaky.fail(None);
    let found = lookup(&gateway, &prompt, Strategy::Exact).await;
    assert_eq!((found.prefix, found.unknown.count()), (1, 0));
    assert!(matches!(
        store_chunk(&gateway, &prompt, 1).await,
        StoreOutcome::Stored
    ));
    arena_empties(&gateway).await;
}

/// After an outage an engine stores prompts that S3 has. The bodies were sent, all together, to be refused.
#[tokio::test]
async fn what_a_lookup_got_no_answer_for_is_asked_for_before_it_is_stored() {
    let (_server, site, prompt) = stored(5).await;
    let snapshots = snapshots_of(&prompt);
    store_chunk(&site.gateway(), &snapshots, 4).await;
    let mut longer = Prompt::new(3);
    longer.hashes.splice(..0, prompt.hashes.iter().copied());
    let flaky = Arc::new(Hooked::over(Arc::clone(&site.store)));
    let spaces = [prompt.space.clone(), snapshots.space.clone()];
    let kinds = Kinds {
        spaces: &spaces,
        drafts: &[],
        state_every: 0,
        lookahead: 0,
    };
    for of_kinds in [false, true] {
        let gateway = site.gateway_over(Arc::clone(&flaky) as Arc<_>);
        flaky.fail(Some(ErrorKind::Connect));
        if of_kinds {
            let found = gateway
                .boundary(kinds, &longer.hashes, Strategy::Prefix, soon())
                .await;
            assert!(found.is_open);
        } else {
            lookup(&gateway, &longer, Strategy::Prefix).await;
        }
        flaky.fail(None);
        let puts = gateway.requests().put;
        let stores = (0..5).map(|i| store_chunk(&gateway, &longer, i));
        let stored = futures::future::join_all(stores).await;
        assert!(
            stored
                .iter()
                .all(|stored| matches!(stored, StoreOutcome::Present)),
            "{stored:?}"
        );
        if of_kinds {
            let snapshot = store_chunk(&gateway, &snapshots, 4).await;
            assert!(matches!(snapshot, StoreOutcome::Present));
        }
        assert_eq!(gateway.requests().put, puts, "no body was sent");
        // What S3 lacks is stored all the same.
        let new = store_chunk(&gateway, &longer, if of_kinds { 6 } else { 5 }).await;
        assert!(matches!(new, StoreOutcome::Stored), "{new:?}");
        arena_empties(&gateway).await;
    }
}

/// Some may store and not look: AWS denies HEAD of what is not there to those who may not list.
#[tokio::test]
async fn where_questions_fail_chunks_are_stored_all_the_same() {
    let (_server, site, _) = stored(1).await;
    let flaky = Arc::new(Hooked::over(Arc::clone(&site.store)));
    let gateway = site.gateway_over(Arc::clone(&flaky) as Arc<_>);
    for kind in [ErrorKind::Denied, ErrorKind::Unavailable, ErrorKind::Deadline] {
        let prompt = Prompt::new(1);
        flaky.fail_questions(kind);
        let found = lookup(&gateway, &prompt, Strategy::Prefix).await;
        assert_eq!(found.unknown.count(), 1);
        let asked = flaky.entered.load(Ordering::SeqCst);
        let stored = store_chunk(&gateway, &prompt, 0).await;
        assert!(matches!(stored, StoreOutcome::Stored), "{kind:?}: {stored:?}");
        flaky.fail(None);
        if kind == ErrorKind::Denied {
            // space.json and the chunk: who may not ask is not made to.
            assert_eq!(flaky.entered.load(Ordering::SeqCst), asked + 2);
        }
    }
}

#[tokio::test]
async fn a_store_whose_answer_was_lost_is_found_to_be_there() {
    let (_server, site, _) = stored(1).await;
    let prompt = Prompt::new(2);
    // The third: after space.json and the first chunk.
    let flaky = Hooked {
        puts_to_lost: AtomicUsize::new(2),
        ..Hooked::over(Arc::clone(&site.store))
    };
    let gateway = site.gateway_over(Arc::new(flaky));
    assert!(matches!(
        store_chunk(&gateway, &prompt, 0).await,
        StoreOutcome::Stored
    ));
    assert!(matches!(
        store_chunk(&gateway, &prompt, 1).await,
        StoreOutcome::Present
    ));
    assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"; 2]);
}

#[tokio::test]
async fn an_outage_costs_one_round_of_questions() {
    let backend = Backend::embedded().await;
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(4096);
    let flaky = Arc::new(Hooked::over(Arc::clone(&site.store)));
    let gateway = site.gateway_over(Arc::clone(&flaky) as Arc<_>);
    flaky.fail(Some(ErrorKind::Denied));
    let found = lookup(&gateway, &prompt, Strategy::Prefix).await;
    assert_eq!((found.mask.count(), found.unknown.count()), (0, 4096));
    let asked = flaky.entered.load(Ordering::SeqCst);
    assert!(asked <= 16, "{asked} questions");
}

/// A `select!` around it must neither lose a chunk nor hand it out under another's index.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_next_loses_nothing() {
    let (_server, site, prompt) = stored(8).await;
    let slow = Hooked {
        delay: Duration::from_millis(20),
        ..Hooked::over(Arc::clone(&site.store))
    };
    let object = prompt.space.layout().object_len().next_multiple_of(4096);
    let gateway = kvgate::cache::gateway::Gateway::new(
        Arc::new(slow),
        crate::support::fixture::arena(2 * object),
        site.capabilities,
        site.options(),
    );
    let request = LoadSpec {
        space: prompt.space.clone(),
        chunks: prompt.hashes.clone(),
        order: Order::Chunk,
        after_miss: AfterMiss::Stop,
        deadline: soon(),
    };
    let mut load = gateway.load(request);
    let (mut expected, mut cancelled) = (0, 0);
    while expected < 8 {
        match tokio::time::timeout(Duration::from_millis(1), load.next()).await {
            Err(_) => cancelled += 1,
            Ok(next) => {
                let (index, outcome) = next.unwrap();
                assert_eq!(index, expected);
                assert!(
                    outcome.unwrap().payload()[..] == prompt.payload(index)[..],
                    "chunk {index}"
                );
                expected += 1;
            }
        }
    }
    assert!(cancelled > 8, "{cancelled}");
    assert!(load.next().await.is_none());
}

/// An object that another version of kvgate may have written is not damage: it stays.
#[tokio::test]
async fn an_encrypted_object_is_unreadable_and_stays() {
    let (_server, site, prompt) = stored(3).await;
    let mut bytes = site.read(&site.key(&prompt, 1)).await;
    bytes[140] = 1;
    let digest = blake3::hash(&bytes[..4096 - 32]);
    bytes[4096 - 32..4096].copy_from_slice(digest.as_bytes());
    site.overwrite(&site.key(&prompt, 1), bytes.clone()).await;
    let gateway = site.gateway();
    assert_eq!(
        load_codes(&gateway, &prompt, AfterMiss::Continue).await,
        ["ok", "unreadable", "ok"]
    );
    assert!(matches!(
        store_chunk(&gateway, &prompt, 1).await,
        StoreOutcome::Present
    ));
    assert_eq!(site.read(&site.key(&prompt, 1)).await, bytes);
}

#[tokio::test]
async fn one_chunk_s_error_does_not_fail_its_neighbours() {
    let (_server, site, prompt) = stored(6).await;
    let flaky = Arc::new(Hooked {
        fail_next: AtomicUsize::new(1),
        ..Hooked::over(Arc::clone(&site.store))
    });
    let gateway = site.gateway_over(Arc::clone(&flaky) as Arc<_>);
    let found = lookup(&gateway, &prompt, Strategy::Exact).await;
    assert_eq!((found.mask.count(), found.unknown.count()), (5, 1));
    flaky.fail_next.store(1, Ordering::SeqCst);
    let codes = load_codes(&gateway, &prompt, AfterMiss::Continue).await;
    assert_eq!(codes.iter().filter(|&&code| code == "ok").count(), 5, "{codes:?}");
    assert_eq!(
        codes.iter().filter(|&&code| code == "unknown").count(),
        1,
        "{codes:?}"
    );
}

#[tokio::test]
async fn the_same_question_at_once_is_one_request() {
    let (_server, site, prompt) = stored(10).await;
    let slow = Arc::new(Hooked {
        delay: Duration::from_millis(50),
        ..Hooked::over(Arc::clone(&site.store))
    });
    let gateway = site.gateway_over(Arc::clone(&slow) as Arc<_>);
    let before = gateway.requests();
    let lookups = (0..20).map(|_| lookup(&gateway, &prompt, Strategy::Exact));
    for found in futures::future::join_all(lookups).await {
        assert_eq!(found.prefix, 10);
    }
    assert_eq!(gateway.requests().since(&before).head, 10);
}

#[tokio::test]
async fn a_deadline_ends_a_lookup_and_its_answer_still_counts() {
    let (_server, site, prompt) = stored(3).await;
    let slow = Arc::new(Hooked {
        delay: Duration::from_millis(300),
        ..Hooked::over(Arc::clone(&site.store))
    });
    let gateway = site.gateway_over(Arc::clone(&slow) as Arc<_>);
    for strategy in [Strategy::Exact, Strategy::Prefix] {
        let deadline = Instant::now() + Duration::from_millis(20);
        let found = gateway
            .lookup(&prompt.space, &prompt.hashes, strategy, deadline)
            .await;
        assert_eq!(
            (found.mask.count(), found.unknown.count()),
            (0, 3),
            "{strategy:?}"
        );
        assert_eq!(found.error.unwrap().kind, ErrorKind::Deadline);
    }
    let asked = || slow.entered.load(Ordering::SeqCst);
    let before = asked();
    for when in ["waiting for the same answers", "afterwards"] {
        assert_eq!(
            lookup(&gateway, &prompt, Strategy::Exact).await.prefix,
            3,
            "{when}"
        );
        assert_eq!(asked(), before, "{when}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_loads_give_everything_back() {
    let (_server, site, prompt) = stored(12).await;
    let gateway = site.gateway();
    for after in 0..12 {
        let request = LoadSpec {
            space: prompt.space.clone(),
            chunks: prompt.hashes.clone(),
            order: Order::Chunk,
            after_miss: AfterMiss::Stop,
            deadline: soon(),
        };
        let mut load = gateway.load(request);
        for _ in 0..after {
            load.next().await.unwrap().1.unwrap();
        }
        drop(load);
    }
    arena_empties(&gateway).await;
    assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"; 12]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_stores_give_everything_back_and_can_be_repeated() {
    let backend = Backend::embedded().await;
    let site = Site::new(backend.store().await).await;
    let gateway = site.gateway();
    let prompt = Prompt::new(12);
    for i in 0..12 {
        let limit = Duration::from_micros(300 * i as u64);
        let _ = tokio::time::timeout(limit, store_chunk(&gateway, &prompt, i)).await;
    }
    arena_empties(&gateway).await;
    for i in 0..12 {
        let outcome = store_chunk(&gateway, &prompt, i).await;
        assert!(
            matches!(outcome, StoreOutcome::Stored | StoreOutcome::Present),
            "{outcome:?}"
        );
    }
    assert_eq!(
        load_codes(&site.gateway(), &prompt, AfterMiss::Stop).await,
        ["ok"; 12]
    );
}

/// Each holds chunks while it waits for more; together they want four times the arena.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_never_wait_for_each_other_s_slots() {
    let (_server, site, prompt) = stored(20).await;
    let object = prompt.space.layout().object_len().next_multiple_of(4096);
    let gateway = kvgate::cache::gateway::Gateway::new(
        Arc::clone(&site.store),
        crate::support::fixture::arena(20 * object),
        site.capabilities,
        site.options(),
    );
    let loads = (0..4).map(|_| load_codes(&gateway, &prompt, AfterMiss::Stop));
    for codes in futures::future::join_all(loads).await {
        assert_eq!(codes, ["ok"; 20]);
    }
    let stats = gateway.arena().stats();
    assert!(stats.used_bytes_peak <= 20 * object);
    arena_empties(&gateway).await;
}

#[tokio::test]
async fn a_load_larger_than_the_arena_streams_and_one_that_keeps_everything_says_so() {
    let (_server, site, prompt) = stored(8).await;
    let object = prompt.space.layout().object_len().next_multiple_of(4096);
    let over = |size| {
        let arena = crate::support::fixture::arena(size);
        kvgate::cache::gateway::Gateway::new(
            Arc::clone(&site.store),
            arena,
            site.capabilities,
            site.options(),
        )
    };
    let request = |deadline| LoadSpec {
        space: prompt.space.clone(),
        chunks: prompt.hashes.clone(),
        order: Order::Chunk,
        after_miss: AfterMiss::Stop,
        deadline,
    };
    let gateway = over(3 * object);
    let mut load = gateway.load(request(soon()));
    while let Some((i, outcome)) = load.next().await {
        assert!(
            outcome.unwrap().payload()[..] == prompt.payload(i)[..],
            "chunk {i}"
        );
    }
    let kept = gateway
        .load(request(Instant::now() + Duration::from_millis(300)))
        .collect()
        .await;
    assert_eq!(kept.iter().filter(|outcome| outcome.is_ok()).count(), 3);
    assert_eq!(kept[3].as_ref().unwrap_err().code(), "arena_full");
    drop(kept);
    arena_empties(&gateway).await;

    let small = over(object - 4096);
    let outcomes = small.load(request(soon())).collect().await;
    assert_eq!(outcomes[0].as_ref().unwrap_err().code(), "arena_too_small");
    assert!(
        outcomes[0]
            .as_ref()
            .unwrap_err()
            .to_string()
            .contains("[arena] size")
    );
    assert!(small.reserve(&prompt.space).is_err());
}
