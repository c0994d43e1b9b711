"""The scheduler's side: never waits, and keeps what it knows by request."""

import dataclasses
import secrets
from array import array

from vllm.logger import init_logger

from kvgate import Lookups, Prompt
from kvgate.vllm.adapters import Adapters
from kvgate.vllm.events import Events
from kvgate.vllm.metadata import Load, StepMetadata, Store, request_of
from kvgate.vllm.rates import LoadOrCompute
from kvgate.vllm.stats import KvGateStats

logger = init_logger(__name__)


@dataclasses.dataclass
class OpenStore:
    """One that not all ranks have ended."""

    first: int
    """Of its chunks."""
    there: set[int]
    """Of them, counted from the first, for all ranks that have ended it."""
    events: list[object]
    """For each."""
    ranks: int = 0


@dataclasses.dataclass
class RequestState:
    request: object
    prompt: Prompt
    taken: int = 0
    """Tokens that the prompt has been given."""
    asked: bool = False
    worth_it: bool | None = None
    """Whether loading is quicker than computing; None: not asked yet."""
    local: int = 0
    """Tokens that vLLM had itself when it asked last."""
    found: int = 0
    """Chunks of the leading run that are there, or are in the hands of a store."""
    handed: int = 0
    """Chunks that were ever handed to a store. Those that did not get there are handed again with the next that is full."""
    blocks: list[int] = dataclasses.field(default_factory=list)
    load: Load | None = None
    """The latest, until all ranks have ended it."""
    load_seconds: float = 0.0
    """Of the slowest rank so far."""
    ranks_ended: int = 0
    loads: int = 0
    gave_up: bool = False
    """A load failed: the rest is computed."""
    is_stale: bool = False
    """From before a reset: some of it may have been computed with other weights. It neither loads nor stores."""
    stores: int = 0
    """If there was any, the worker says when the blocks are free."""


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
        self.requests: dict[str, RequestState | None] = {}
        """None: a request whose tokens don't say what its KV is."""
        self.new_loads: list[Load] = []
        """Of which no worker has been told."""
        self.open_stores: dict[str, OpenStore] = {}
        self.to_free: set[str] = set()
        """Finished requests whose blocks the workers are to tell to be free."""

    # ---- what there is

    def new_request(self, request):
        """Takes the prompt over and asks which of its chunks are there: what they are brought up from is told meanwhile."""
        state = self.state(request)
        if state is not None and self.is_consumer and not state.asked:
            self.extend(state, request.num_prompt_tokens)
            state.asked = True
            self.lookups.ask(request.request_id, state.prompt)

    def matched_tokens(self, request, num_computed_tokens):
        """Tokens beyond the local ones that can be loaded, and whether that is done between steps; None: ask again."""
        self.new_request(request)
        if request.request_id not in self.requests:
            return None, False
        state = self.requests[request.request_id]
        if state is None or state.gave_up or state.is_stale or not self.is_consumer:
            return 0, False
        found = self.lookups.answer(request.request_id)
        if found is None:
            return None, False
        state.found, state.local = max(state.found, found), num_computed_tokens
        # Whole blocks, and something is left to compute.
        most = (request.num_tokens - 1) // self.block_tokens * self.block_tokens
        tokens = min(found * self.chunk_tokens, most) - num_computed_tokens
        if tokens <= 0 or not self.is_worth_it(state, tokens):
            return 0, False
        return tokens, not self.is_layerwise

    def is_worth_it(self, state, tokens):
        if state.worth_it is None:
            state.worth_it = self.load_or_compute is None or self.load_or_compute.should_load(tokens)
            if not state.worth_it:
                self.stats.add("declined_loads")
        return state.worth_it

    def allocated(self, request, blocks, num_external_tokens):
        state = self.requests.get(request.request_id)
        if state is None or num_external_tokens == 0:
            return
        start, end = state.local, state.local + num_external_tokens
        first, last = start // self.chunk_tokens, -(-end // self.chunk_tokens)
        state.loads += 1
        state.ranks_ended, state.load_seconds = 0, 0.0
        state.load = Load(
            job=f"{request.request_id}#{state.loads}",
            request=request.request_id,
            hashes=state.prompt.hashes(first, last),
            first_token=first * self.chunk_tokens,
            tokens=(start, end),
            block_table=list(blocks.get_block_ids()[0]),
        )
        self.new_loads.append(state.load)

    # ---- steps

    def step(self, output):
        if self.load_or_compute is not None:
            self.load_or_compute.stepped(output.total_num_scheduled_tokens)
        preempted = set(getattr(output, "preempted_req_ids", None) or ())
        meta = StepMetadata(loads=self.new_loads, preempted=preempted, finished=self.to_free)
        self.new_loads, self.to_free = [], set()
        # What another connector loads within the step is not known by its blocks.
        if self.is_producer and (self.is_layerwise or not getattr(output, "has_sync_kv_loads", False)):
            self.add_stores(meta, output)
        return meta

    def add_stores(self, meta, output):
        unsure = self.unsure_blocks()
        for new in output.scheduled_new_reqs:
            if (state := self.requests.get(new.req_id)) is not None:
                state.blocks = list(new.block_ids[0])
                computed = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
                self.add_store(meta, state, computed, unsure)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if (state := self.requests.get(request_id)) is not None:
                blocks = cached.new_block_ids[index]
                if request_id in cached.resumed_req_ids:
                    state.blocks = list(blocks[0]) if blocks else []
                elif blocks:
                    state.blocks.extend(blocks[0])
                computed = cached.num_computed_tokens[index] + output.num_scheduled_tokens[request_id]
                self.add_store(meta, state, computed, unsure)

    def add_store(self, meta, state, computed_tokens, unsure_blocks):
        """Of the chunks that are full after this step and that nobody has yet. While it is not known that a load within the
        step has come, on all ranks, what is computed from its blocks may be nothing, also for who shares them: it is stored
        after that."""
        full = computed_tokens // self.chunk_tokens
        if full <= max(state.found, state.handed) or state.is_stale:
            return
        if unsure_blocks and not unsure_blocks.isdisjoint(state.blocks):
            return
        # What was generated has hashes, too, once it is a full chunk.
        full = min(full, self.extend(state, min(full * self.chunk_tokens, state.request.num_tokens)))
        if full <= state.found:
            return
        first, state.found, state.handed = state.found, full, full
        state.stores += 1
        job = f"{state.request.request_id}#s{state.stores}"
        events = self.events
        told = [events.stored(state.request, chunk) if events else None for chunk in range(first, full)]
        self.open_stores[job] = OpenStore(first, set(range(full - first)), told)
        meta.stores.append(
            Store(
                job=job,
                request=state.request.request_id,
                hashes=state.prompt.hashes(first, full),
                parent=state.prompt.parent(first),
                first_token=first * self.chunk_tokens,
                block_table=list(state.blocks),
            )
        )

    def ended(self, failed_blocks, report):
        """What the workers have told after a step."""
        if report is None:
            return
        for job, (ranks, seconds) in report.loaded.items():
            state = self.requests.get(request_of(job))
            if state is None or state.load is None or state.load.job != job:
                continue
            state.ranks_ended += ranks
            state.load_seconds = max(state.load_seconds, seconds)
            self.note_failure(state, failed_blocks)
            if state.ranks_ended == self.ranks:
                if self.load_or_compute is not None:
                    self.load_or_compute.loaded(self.loaded_tokens(state), state.load_seconds)
                state.load = None
        for job, (ranks, there) in report.stored.items():
            if (store := self.open_stores.get(job)) is not None:
                store.ranks += ranks
                store.there &= there
                if store.ranks == self.ranks:
                    self.stored(job, self.open_stores.pop(job))

    def note_failure(self, state, failed_blocks):
        """What a load did not bring is computed, and stored again: it may have been damaged."""
        load = state.load
        failed = [at for at in self.blocks_of(load) if load.block_table[at] in failed_blocks]
        if failed:
            state.gave_up = True
            state.found = state.handed = min(state.found, failed[0] * self.block_tokens // self.chunk_tokens)

    def loaded_tokens(self, state):
        start, end = state.load.tokens
        return max(0, min(end, state.found * self.chunk_tokens) - start) if state.gave_up else end - start

    def stored(self, job, store):
        """What is not there ends the run that lookups can find: it is stored again before what follows it."""
        if self.events is not None:
            self.events.add(store.events[index] for index in sorted(store.there))
        state = self.requests.get(request_of(job))
        missing = [index for index in range(len(store.events)) if index not in store.there]
        if state is not None and missing:
            state.found = min(state.found, store.first + missing[0])

    def blocks_of(self, load):
        """Places in the block table that a load writes to."""
        start, end = load.tokens
        return range(start // self.block_tokens, (end - 1) // self.block_tokens + 1)

    def unsure_blocks(self):
        """Of loads within steps that are not known to have come."""
        if not self.is_layerwise:
            return set()
        loads = [state.load for state in self.requests.values() if state is not None and state.load is not None]
        return {load.block_table[at] for load in loads for at in self.blocks_of(load)}

    def finished(self, request):
        """Whether its blocks must stay until the worker has said that they are free."""
        self.lookups.forget(request.request_id)
        self.adapters.forget(request.request_id)
        state = self.requests.pop(request.request_id, None)
        if not self.requests and self.load_or_compute is not None:
            self.load_or_compute.idle()
        # A load between steps: vLLM itself keeps the blocks until it has ended, and no store needs them: they were taken
        # back when it was preempted.
        if state is None or state.stores == 0 or (state.load is not None and not self.is_layerwise):
            return False
        self.to_free.add(request.request_id)
        return True

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
