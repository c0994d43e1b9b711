"""The scheduler's side: never waits, and keeps what it knows by request."""

import dataclasses
import itertools
import secrets
from array import array

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvgate import Lookups, Prompt
from kvgate.vllm.adapters import Adapters
from kvgate.vllm.doubts import Doubts
from kvgate.vllm.events import Events
from kvgate.vllm.metadata import Load, StepMetadata, Store, request_of
from kvgate.vllm.rates import LoadOrCompute
from kvgate.vllm.stats import MISSES, KvGateStats

logger = init_logger(__name__)


SOURCES = {b"m": CacheHitSource.HOST, b"d": CacheHitSource.DISK}
"""vLLM has no word for S3."""


@dataclasses.dataclass
class OpenStore:
    """One that not all ranks have ended."""

    request: str
    first: int
    """Of its chunks."""
    there: set[int]
    """Of them, counted from the first, for all ranks that have ended it."""
    events: list[object]
    """For each."""
    copying: int
    """Ranks that may still copy out of the request's blocks."""
    is_held: bool = False
    """The request has finished, and vLLM keeps its blocks for these copies."""
    ranks: int = 0
    """That have ended it."""


@dataclasses.dataclass
class RequestState:
    request: object
    prompt: Prompt
    taken: int = 0
    """Tokens that the prompt has been given."""
    worth_it: bool | None = None
    """Whether loading what the latest question found is quicker than computing; None: not decided yet."""
    local: int = 0
    """Tokens that vLLM had itself when it asked last."""
    scheduled: int = 0
    """Tokens that are computed after the latest step that it was in, with the drafts of that step."""
    found: int = 0
    """Chunks of the leading run that are there, or are in the hands of a store."""
    handed: int = 0
    """Chunks that were ever handed to a store. Those that did not get there are handed again with the next that is full."""
    sources: dict[object, int] = dataclasses.field(default_factory=dict)
    """Tokens of the latest load, by where they were when it was decided on."""
    load: Load | None = None
    """The latest, until all ranks have ended it."""
    load_seconds: float = 0.0
    """Of the slowest rank so far."""
    ranks_ended: int = 0
    lost: int | None = None
    """The chunk that a load did not bring. From there on nothing is loaded, until it was stored again."""
    is_stale: bool = False
    """From before a reset: some of it may have been computed with other weights. It neither loads nor stores."""


class SchedulerSide:
    def __init__(
        self,
        model,
        settings,
        is_consumer=True,
        is_producer=True,
        ranks=1,
        has_events=False,
        items_have_digests=True,
    ):
        self.space, self.block_tokens = model.space, model.block_tokens
        self.chunk_tokens = model.space.chunk_tokens
        self.lookups = Lookups(
            settings.socket,
            model.space,
            settings.lookup_deadline_ms,
            settings.pin_ms,
            settings.breaker_timeouts,
            settings.breaker_pause_ms,
            settings.lookup_again_ms,
            settings.patience_ms,
            settings.lookups_at_once,
            settings.socket_owner,
        )
        self.is_consumer, self.is_producer, self.ranks = is_consumer, is_producer, ranks
        self.items_have_digests = items_have_digests
        self.is_layerwise, self.has_fixed_weights = settings.layerwise, settings.fixed_weights
        self.load_or_compute = LoadOrCompute() if settings.load_policy == "auto" else None
        self.events = Events(self.block_tokens, self.chunk_tokens) if has_events else None
        self.adapters = Adapters(settings.adapter_deadline_ms)
        self.stats = KvGateStats()
        self.epoch = b""
        """Goes into all hashes since the last reset, so that nothing from before is found."""
        self.looks_ahead = settings.lookups_ahead
        self.waiting: dict[str, RequestState] = {}
        """Requests with a lookup that vLLM has not admitted, the first to come first."""
        self.requests: dict[str, RequestState | None] = {}
        """None: a request whose tokens don't say what its KV is."""
        self.opaque: dict[str, object] = {}
        """Those requests."""
        self.new_loads: list[Load] = []
        """Of which no worker has been told."""
        self.jobs = itertools.count()
        self.open_stores: dict[str, OpenStore] = {}
        self.to_free: set[str] = set()
        """Finished requests whose blocks the workers are to tell to be free."""
        self.wanted_back: set[str] = set()
        """Of those that they were told of, the ones that vLLM can't go on without."""
        self.local: dict[str, int] = {}
        """Of each request that waits, the tokens that vLLM has itself."""
        self.doubts = Doubts(self.block_tokens, ranks)
        self.block_pool = None
        """vLLM's, if requests have priorities."""

    # ---- what there is

    def new_request(self, request):
        """Takes the prompt over and asks which of its chunks are there: what they are brought up from is told meanwhile."""
        state = self.state(request)
        if state is not None and self.may_load(state) and self.lookups.is_due(request.request_id):
            self.ask(state)

    def may_load(self, state):
        return self.is_consumer and not state.is_stale

    def ask(self, state):
        """Of what was generated, too: a request that was preempted needs it."""
        self.extend(state, state.request.num_tokens)
        state.worth_it = None
        self.waiting[state.request.request_id] = state
        self.lookups.ask(state.request.request_id, state.prompt)

    def look_ahead(self):
        """What is there for the next in the queue may have changed since they came."""
        for state in list(itertools.islice(self.waiting.values(), self.looks_ahead)):
            if self.may_load(state) and self.lookups.is_old(state.request.request_id):
                self.ask(state)

    def forget_lookup(self, request_id):
        self.waiting.pop(request_id, None)
        self.lookups.forget(request_id)

    def matched_tokens(self, request, num_computed_tokens):
        """Tokens beyond the local ones that can be loaded, and whether that is done between steps; None: ask again. vLLM
        calls it in each step in which it could admit the request, new or preempted, until it does."""
        self.local[request.request_id] = num_computed_tokens
        state = self.requests.get(request.request_id)
        if state is not None and state.lost is not None and state.lost * self.chunk_tokens <= num_computed_tokens:
            return 0, False
        self.new_request(request)
        if request.request_id not in self.requests:
            return None, False
        state = self.requests[request.request_id]
        if state is None or not self.may_load(state):
            return 0, False
        found = self.lookups.answer(request.request_id)
        if found is None:
            return None, False
        if state.lost is not None:
            found = min(found, state.lost)
        # Chunks that were handed to a store since may not be known yet.
        state.found = max(state.found, found) if state.handed else found
        state.local = num_computed_tokens
        # Whole blocks, and something is left to compute.
        most = (request.num_tokens - 1) // self.block_tokens * self.block_tokens
        tokens = min(found * self.chunk_tokens, most) - num_computed_tokens
        if tokens <= 0 or not self.is_worth_it(state, tokens):
            return 0, False
        return tokens, not self.is_layerwise

    def is_worth_it(self, state, tokens):
        if state.worth_it is None:
            state.worth_it = self.load_or_compute is None or self.load_or_compute.should_load(tokens)
        return state.worth_it

    def allocated(self, request, blocks, num_external_tokens):
        """vLLM admits the request. Should it be preempted, what is there then is another question."""
        outcome, tiers = self.lookups.outcome(request.request_id), self.lookups.tiers(request.request_id)
        self.forget_lookup(request.request_id)
        state = self.requests.get(request.request_id)
        if num_external_tokens == 0:
            self.note_miss(state, outcome)
        if state is None or num_external_tokens == 0:
            return
        start, end = state.local, state.local + num_external_tokens
        first, last = start // self.chunk_tokens, -(-end // self.chunk_tokens)
        base = first * self.chunk_tokens
        state.ranks_ended, state.load_seconds = 0, 0.0
        state.sources = self.sources(tiers, start, end)
        state.load = Load(
            job=f"{request.request_id}#{next(self.jobs)}",
            request=request.request_id,
            hashes=state.prompt.hashes(first, last),
            first_chunk=first,
            tokens=(start - base, end - base),
            block_table=blocks.get_block_ids()[0][base // self.block_tokens : -(-end // self.block_tokens)],
        )
        if self.load_or_compute is not None:
            self.load_or_compute.load_begins(state.load.job)
        self.new_loads.append(state.load)

    def sources(self, tiers, start, end):
        """Tokens from `start` to `end` by the tier of their chunk, as vLLM names it."""
        sources = {}
        for chunk in range(start // self.chunk_tokens, -(-end // self.chunk_tokens)):
            source = SOURCES.get(tiers[chunk : chunk + 1], CacheHitSource.EXTERNAL_UNSPECIFIED)
            tokens = min(end, (chunk + 1) * self.chunk_tokens) - max(start, chunk * self.chunk_tokens)
            sources[source] = sources.get(source, 0) + tokens
        return sources

    def hit_sources(self, request):
        state = self.requests.get(request.request_id)
        return dict(state.sources) if state is not None else {}

    def note_miss(self, state, outcome):
        """Why an admitted request loads nothing."""
        if state is None or state.is_stale:
            self.stats.add("opaque_requests")
        elif state.worth_it is False:
            self.stats.add("declined_loads")
            state.worth_it = None
        elif outcome is not None:
            self.stats.add(MISSES[outcome])

    def take_stats(self):
        seconds, is_paused = self.lookups.told()
        self.stats.looked_up(seconds, is_paused)
        return self.stats.take()

    # ---- steps

    def step(self, output):
        self.look_ahead()
        if self.load_or_compute is not None:
            self.load_or_compute.stepped(output.total_num_scheduled_tokens)
        preempted = set(output.preempted_req_ids or ())
        for store in self.open_stores.values():
            if store.request in preempted:
                store.copying = 0
        if preempted and self.block_pool is not None:
            self.evict_uncomputed(preempted)
        meta = StepMetadata(loads=self.new_loads, taken_back=preempted | self.wanted_back, finished=self.to_free)
        self.new_loads, self.to_free, self.wanted_back = [], set(), set()
        scheduled = in_order(output)
        self.note_doubts(meta, output, scheduled)
        for request_id, _, end in scheduled:
            if (state := self.requests.get(request_id)) is not None:
                state.scheduled = end
                if self.is_producer:
                    self.add_store(meta, state, end, output.kv_connector_block_state)
        return meta

    def evict_uncomputed(self, preempted):
        """With priorities vLLM may preempt a request that it has scheduled in the same step. It has cached the blocks of that
        step by then, keeps them, and would take them for computed: for its own answers, and for what is stored."""
        uncomputed = set()
        for request_id in preempted:
            if request_id in self.opaque:
                uncomputed.update(self.opaque[request_id].block_hashes)
            if (state := self.requests.get(request_id)) is not None:
                # The latest token has been sampled, not computed.
                computed = min(state.scheduled, state.request.num_tokens - 1)
                uncomputed.update(state.request.block_hashes[computed // self.block_tokens :])
        self.block_pool.evict_blocks(
            {
                block.block_id
                for block in self.block_pool.blocks
                if block.block_hash is not None and get_block_hash(block.block_hash) in uncomputed
            }
        )

    def note_doubts(self, meta, output, scheduled):
        """What is loaded within the step, by whomever, and what is computed from it."""
        if getattr(output, "has_sync_kv_loads", False):
            meta.loads_within = self.doubts.begin()
        for request_id, start, end in scheduled:
            local = self.local.pop(request_id, start)
            if self.doubts or meta.loads_within is not None:
                table = output.kv_connector_block_state.get_block_ids(request_id)[0]
                self.doubts.loaded(table, local, start, meta.loads_within)
                self.doubts.computed(table, start, end)

    def add_store(self, meta, state, computed_tokens, block_state):
        """Of the chunks that are full after this step, that nobody has yet, and that are known to be right: the others are
        stored once they are."""
        full = computed_tokens // self.chunk_tokens
        if full <= max(state.found, state.handed) or state.is_stale:
            return
        # What was generated has hashes, too, once it is a full chunk.
        full = min(full, self.extend(state, min(full * self.chunk_tokens, state.request.num_tokens)))
        if full <= state.found:
            return
        table = block_state.get_block_ids(state.request.request_id)[0]
        full = self.doubts.sure(table, full * self.chunk_tokens) // self.chunk_tokens
        if full <= state.found:
            return
        first, state.found, state.handed = state.found, full, full
        job = f"{state.request.request_id}#{next(self.jobs)}"
        events = self.events
        told = [events.stored(state.request, chunk) if events else None for chunk in range(first, full)]
        self.open_stores[job] = OpenStore(
            state.request.request_id, first, set(range(full - first)), told, copying=self.ranks
        )
        chunk_blocks = self.chunk_tokens // self.block_tokens
        meta.stores.append(
            Store(
                job=job,
                request=state.request.request_id,
                hashes=state.prompt.hashes(first, full),
                parent=state.prompt.parent(first),
                block_table=table[first * chunk_blocks : full * chunk_blocks],
            )
        )

    def computed(self):
        """A step has ended."""
        if self.load_or_compute is not None:
            self.load_or_compute.computed()

    def ended(self, failed_blocks, report):
        """What the workers have told after a step."""
        if report is None:
            return
        for job, (ranks, seconds) in report.loaded.items():
            state = self.requests.get(request_of(job))
            if state is None or state.load is None or state.load.job != job:
                if self.load_or_compute is not None:
                    self.load_or_compute.dropped(job)
                continue
            state.ranks_ended += ranks
            state.load_seconds = max(state.load_seconds, seconds)
            self.note_failure(state, failed_blocks)
            if state.ranks_ended == self.ranks:
                if self.load_or_compute is not None:
                    self.load_or_compute.loaded(job, self.loaded_tokens(state), state.load_seconds)
                state.load = None
        for step, ranks in report.steps.items():
            self.doubts.ended(step, ranks, set(failed_blocks))
        for job, ranks in report.freed.items():
            if (store := self.open_stores.get(job)) is not None:
                store.copying = max(0, store.copying - ranks)
        for job, (ranks, there) in report.stored.items():
            if (store := self.open_stores.get(job)) is not None:
                store.ranks += ranks
                store.there &= there
                if store.ranks == self.ranks:
                    self.stored(self.open_stores.pop(job))

    def note_failure(self, state, failed_blocks):
        """What a load did not bring is computed, and stored again: it may have been damaged."""
        load = state.load
        failed = [at for at in self.blocks_of(load) if load.block_table[at] in failed_blocks]
        if failed:
            chunk = load.first_chunk + failed[0] * self.block_tokens // self.chunk_tokens
            state.lost = chunk if state.lost is None else min(state.lost, chunk)
            state.found = state.handed = min(state.found, state.lost)

    def loaded_tokens(self, state):
        start, end = state.load.tokens
        if state.lost is None:
            return end - start
        there = (state.lost - state.load.first_chunk) * self.chunk_tokens
        return max(0, min(end, there) - start)

    def stored(self, store):
        """What is not there ends the run that lookups can find: it is stored again before what follows it."""
        if self.events is not None:
            self.events.add(store.events[index] for index in sorted(store.there))
        state = self.requests.get(store.request)
        if state is None:
            return
        missing = [index for index in range(len(store.events)) if index not in store.there]
        if missing:
            state.found = min(state.found, store.first + missing[0])
        if state.lost is not None and state.lost - store.first in store.there:
            state.lost = None
        # It may wait, having been preempted: it finds this, too.
        self.lookups.outdate(state.request.request_id)

    def blocks_of(self, load):
        """Places in its block table that a load writes to."""
        start, end = load.tokens
        return range(start // self.block_tokens, (end - 1) // self.block_tokens + 1)

    def finished(self, request):
        """Whether its blocks must stay until the worker has said that they are free."""
        self.forget_lookup(request.request_id)
        self.adapters.forget(request.request_id)
        self.local.pop(request.request_id, None)
        self.requests.pop(request.request_id, None)
        self.opaque.pop(request.request_id, None)
        if not self.requests and self.load_or_compute is not None:
            self.load_or_compute.idle()
        # A load between steps: vLLM itself keeps the blocks until it has ended.
        copied = [store for store in self.open_stores.values() if store.request == request.request_id and store.copying]
        for store in copied:
            store.is_held = True
        if copied:
            self.to_free.add(request.request_id)
        return bool(copied)

    def has_pending_block_frees(self):
        """vLLM can't go on without more blocks: instead of preempting a request it gets back those of finished ones."""
        held = {store.request for store in self.open_stores.values() if store.is_held and store.copying}
        self.wanted_back |= held
        return bool(held)

    def reset(self):
        """Nothing that was stored so far is found any more by this engine: its weights may have changed."""
        if self.has_fixed_weights:
            return True
        self.epoch = secrets.token_bytes(16)
        self.adapters.reset()
        for state in self.requests.values():
            if state is not None:
                state.is_stale = True
        return True

    # ---- a request

    def state(self, request):
        """None: nothing is reused, or its adapter is not known yet."""
        request_id = request.request_id
        if request_id in self.requests:
            return self.requests[request_id]
        adapter = self.adapter(request)
        if adapter is None:
            return None
        state = None
        if adapter is not False and self.do_tokens_say_all(request):
            salt = (request.cache_salt or "").encode()
            state = RequestState(request, Prompt(self.space, salt, adapter))
        self.requests[request_id] = state
        if state is None:
            self.opaque[request_id] = request
        return state

    def do_tokens_say_all(self, request):
        """Together with the digests of its images."""
        items = getattr(request, "mm_features", None)
        return getattr(request, "prompt_embeds", None) is None and (self.items_have_digests or not items)

    def adapter(self, request):
        """None: ask again; False: nobody knows what it is."""
        try:
            adapter = self.adapters.of(request)
        except Exception as error:
            # Whatever it is, the other requests have nothing to do with it.
            logger.warning_once("kvgate: requests with the adapter reuse nothing: %s", str(error))
            return False
        return adapter if adapter is None else self.epoch + adapter

    def extend(self, state, tokens):
        """Full chunks, with at least these first tokens in the prompt; each is hashed once, when it is asked for."""
        request = state.request
        if tokens > state.taken:
            extras = [
                (feature.mm_position.offset, feature.identifier.encode())
                for feature in getattr(request, "mm_features", None) or ()
                if state.taken <= feature.mm_position.offset < tokens
            ]
            new = array("I", request.all_token_ids[state.taken : tokens])
            state.prompt.extend(new.tobytes(), extras)
            state.taken = tokens
        return len(state.prompt)


def in_order(output):
    """A step's requests in the order in which they got their blocks, each with its tokens before and after it: who shares a
    block with another comes later."""
    cached = output.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [
        (request_id, before[request_id], before[request_id] + tokens)
        for request_id, tokens in output.num_scheduled_tokens.items()
    ]
