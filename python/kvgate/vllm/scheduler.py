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
from kvgate.vllm.blocks import NULL, Blocks
from kvgate.vllm.doubts import Doubts
from kvgate.vllm.metadata import Load, LoadPart, StepMetadata, request_of, traceparent_of
from kvgate.vllm.rates import LoadOrCompute
from kvgate.vllm.stats import MISSES, KvGateStats
from kvgate.vllm.stores import Stores

logger = init_logger(__name__)


SOURCES = {b"m": CacheHitSource.HOST, b"d": CacheHitSource.DISK}
"""vLLM has no word for S3."""


@dataclasses.dataclass
class RequestState:
    request: object
    prompt: Prompt
    found: list[int]
    """By kind: leading chunks that are there, as far as they are needed, or are in the hands of a store."""
    handed: list[int]
    """By kind: chunks that were ever handed to a store. Those that did not get there are handed again with the next that is
    full."""
    snapshots: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    """By kind of state: the chunks whose snapshots are in the hands of a store."""
    failed: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    """By kind of window: chunks whose store failed, until they are handed to another."""
    failed_once: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """Kind and chunk of all of them: none is handed a third time."""
    full_blocks: int = -1
    """Of vLLM's smallest, when it was looked at last."""
    taken: int = 0
    """Tokens that the prompt has been given."""
    worth_it: bool | None = None
    """Whether loading what the latest question found is quicker than computing; None: not decided yet."""
    local: int = 0
    """Tokens that vLLM had itself when it asked last."""
    scheduled: int = 0
    """Tokens that are computed after the latest step that it was in, with the drafts of that step."""
    sources: dict[object, int] = dataclasses.field(default_factory=dict)
    """Tokens of the latest load, by where they were when it was decided on."""
    load: Load | None = None
    """The latest, until all ranks have ended it."""
    load_tokens: tuple[int, int] = (0, 0)
    """Of the prompt, half-open."""
    load_seconds: float = 0.0
    """Of the slowest rank so far."""
    ranks_ended: int = 0
    lost: int | None = None
    """The chunk that a load did not bring. From there on nothing is loaded, until it was stored again."""
    has_drafts: bool = True
    """Its drafts' KV came with what was loaded. Otherwise what is computed from it is none that others should load."""
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
        events=None,
        items_have_digests=True,
        has_priorities=False,
    ):
        self.model, self.chunk_tokens = model, model.chunk_tokens
        self.space = model.spaces[0]
        """Any of the model's: the hashes are the same for all."""
        state_every = max(1, settings.state_every // model.chunk_tokens)
        self.lookups = Lookups(
            settings.socket,
            [kind.space for kind in model.kinds if not kind.is_draft],
            [kind.space for kind in model.kinds if kind.is_draft],
            settings.lookup_deadline_ms,
            settings.pin_ms,
            settings.breaker_timeouts,
            settings.breaker_pause_ms,
            settings.lookup_again_ms,
            settings.patience_ms,
            settings.lookups_at_once,
            settings.socket_owner,
            state_every,
            1 if model.drops_last and any(kind.is_draft for kind in model.kinds) else 0,
        )
        self.is_consumer, self.is_producer, self.ranks = is_consumer, is_producer, ranks
        self.items_have_digests = items_have_digests
        self.is_layerwise, self.has_fixed_weights = settings.layerwise, settings.fixed_weights
        self.load_or_compute = LoadOrCompute() if settings.load_policy == "auto" else None
        self.events = events(model, settings) if events is not None else None
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
        self.blocks = Blocks(ranks)
        self.stores = Stores(model, self.blocks, self.events, self.jobs, state_every)
        self.wanted_back: set[str] = set()
        """Stores that hold blocks which vLLM can't go on without."""
        self.local: dict[str, int] = {}
        """Of each request that waits, the tokens that vLLM has itself."""
        self.main = next(iter(model.kinds[0].blocks))
        """The group whose blocks say what is in doubt."""
        self.doubts = Doubts(model.kinds[0].blocks[self.main], ranks)
        self.has_priorities = has_priorities

    def bind_pool(self, pool):
        self.blocks.bind(pool)
        if self.events is not None:
            self.events.bind_pool(pool)

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
        self.lookups.ask(
            state.request.request_id, state.prompt, self.most_chunks(state.request), traceparent_of(state.request)
        )

    def most_chunks(self, request):
        """Of a hit. A token is left to compute, and a window or a state is there only where a chunk ends."""
        return (request.num_tokens - (0 if self.model.is_full else 1)) // self.chunk_tokens

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
        full = self.lookups.full(request.request_id)
        if state.lost is not None:
            found = min(found, state.lost) if self.model.loads_in_part else 0
        for index, kind in enumerate(self.model.kinds):
            there = max(found, full) if kind.word == "full" and not kind.is_draft else found
            if state.lost is not None:
                there = min(there, state.lost)
            # Chunks that were handed to a store since may not be known yet.
            state.found[index] = max(state.found[index], there) if state.handed[index] else there
        if self.model.has_states:
            self.mark_junction(request, found, full)
        state.local = num_computed_tokens
        # Something is left to compute.
        most = (request.num_tokens - 1) // self.model.alignment * self.model.alignment
        tokens = min(found * self.chunk_tokens, most) - num_computed_tokens
        if tokens <= 0 or not self.is_worth_it(state, tokens):
            return 0, False
        return tokens, not self.is_layerwise

    def mark_junction(self, request, found, full):
        """Has vLLM keep a state that later prompts can load: where they are known to part, which vLLM knows of its own cache
        only; else at the last chunk of the prompt, where a chunk is longer than a state's block."""
        dropped = 1 if self.model.drops_last else 0
        chunks = full - dropped if self.model.kinds[0].word == "full" else 0
        if chunks <= found and self.model.chunk_tokens > self.model.state_block_tokens:
            chunks = (request.num_prompt_tokens - 1) // self.chunk_tokens - dropped
        tokens = chunks * self.chunk_tokens
        if chunks > found and tokens > (getattr(request, "shared_prefix_boundary", None) or 0):
            request.shared_prefix_boundary = tokens

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
        state.ranks_ended, state.load_seconds = 0, 0.0
        state.sources = self.sources(tiers, start, end)
        tables, state.load_tokens = blocks.get_block_ids(), (start, end)
        parts = [
            self.load_part(index, kind, state.prompt, tables, start, end) for index, kind in enumerate(self.model.kinds)
        ]
        job = f"{request.request_id}#{next(self.jobs)}"
        state.load = Load(
            job, request.request_id, [part for part in parts if part is not None], traceparent_of(request)
        )
        if self.load_or_compute is not None:
            self.load_or_compute.load_begins(job)
        self.new_loads.append(state.load)

    def load_part(self, index, kind, prompt, tables, start, end):
        """What one kind needs to go on after `end` tokens, of which vLLM has the first `start`: all blocks that it has given
        for them. None: nothing."""
        chunk_tokens = self.chunk_tokens
        if kind.word == "state":
            at = {group: tables[group][(end - 1) // size] for group, size in kind.blocks.items()}
            chunk = end // chunk_tokens - 1
            return LoadPart(
                index, prompt.hashes(chunk, chunk + 1), chunk, {group: ((0, 1), [block]) for group, block in at.items()}
            )
        firsts = {}
        for group, size in kind.blocks.items():
            places = range(start // size, -(-end // size))
            # Before the window there are none.
            firsts[group] = next((at for at in places if tables[group][at] != NULL), places.stop)
        first = min(max(firsts[group] * size, start) for group, size in kind.blocks.items())
        if first >= end:
            return None
        first_chunk, end_chunk = first // chunk_tokens, -(-end // chunk_tokens)
        base = first_chunk * chunk_tokens
        return LoadPart(
            index,
            prompt.hashes(first_chunk, end_chunk),
            first_chunk,
            {
                group: (
                    (min(max(firsts[group] * size, start), end) - base, end - base),
                    tables[group][base // size : -(-end // size)],
                )
                for group, size in kind.blocks.items()
            },
        )

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
        for request_id in preempted:
            self.blocks.drop(request_id)
        if preempted and self.has_priorities:
            self.evict_uncomputed(preempted)
        meta = StepMetadata(loads=self.new_loads, taken_back=self.wanted_back)
        self.new_loads, self.wanted_back = [], set()
        scheduled = in_order(output)
        self.note_doubts(meta, output, scheduled)
        block_state = output.kv_connector_block_state
        for request_id, _, end in scheduled:
            if (state := self.requests.get(request_id)) is not None:
                state.scheduled = end
                if self.is_producer:
                    offered = block_state.boundary_state_offloads.get(request_id, ())
                    self.add_store(meta, state, end, block_state, offered)
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
                uncomputed.update(state.request.block_hashes[computed // self.model.hash_tokens :])
        self.blocks.pool.evict_blocks(
            {
                block.block_id
                for block in self.blocks.pool.blocks
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
                table = output.kv_connector_block_state.get_block_ids(request_id)[self.main]
                self.doubts.loaded(table, local, start, meta.loads_within)
                self.doubts.computed(table, start, end)

    def add_store(self, meta, state, computed_tokens, block_state, offers):
        """Of the chunks that are full after this step, that nobody has yet, and that are known to be right: the others are
        stored once they are."""
        if state.is_stale:
            return
        known = min(computed_tokens, state.request.num_tokens)
        full, full_blocks = known // self.chunk_tokens, known // self.model.hash_tokens
        has_new = any(
            full > max(found, handed)
            for kind, found, handed in zip(self.model.kinds, state.found, state.handed, strict=True)
            if kind.word != "state" and (state.has_drafts or not kind.is_draft)
        )
        if (
            not has_new
            and not offers
            and not any(state.failed.values())
            and (self.model.is_full or full_blocks == state.full_blocks)
        ):
            return
        state.full_blocks = full_blocks
        table = block_state.get_block_ids(state.request.request_id)
        # What was generated has hashes, too, once it is a full chunk.
        full = min(full, self.extend(state, full * self.chunk_tokens))
        full = self.doubts.sure(table[self.main], full * self.chunk_tokens) // self.chunk_tokens
        store = self.stores.of_step(state, table, full, known, offers)
        if store is not None:
            meta.stores.append(store)

    def computed(self):
        """A step has ended."""
        if self.load_or_compute is not None:
            self.load_or_compute.computed()

    def ended(self, failed_blocks, report):
        """What the workers have told after a step."""
        if report is None:
            return
        for job, (ranks, seconds, is_whole, has_drafts) in report.loaded.items():
            state = self.requests.get(request_of(job))
            if state is None or state.load is None or state.load.job != job:
                if self.load_or_compute is not None:
                    self.load_or_compute.dropped(job)
                continue
            state.ranks_ended += ranks
            state.load_seconds = max(state.load_seconds, seconds)
            self.note_failure(state, failed_blocks, is_whole)
            state.has_drafts &= has_drafts
            if state.ranks_ended == self.ranks:
                if self.load_or_compute is not None:
                    self.load_or_compute.loaded(job, self.loaded_tokens(state), state.load_seconds)
                self.bind_loaded(state)
                if state.lost is None:
                    self.note_snapshots(state)
                state.load = None
        for step, ranks in report.steps.items():
            self.doubts.ended(step, ranks, set(failed_blocks))
        for job, (ranks, there) in report.stored.items():
            if (store := self.stores.ended(job, ranks, there)) is not None:
                self.stored(store)

    def note_failure(self, state, failed_blocks, is_whole):
        """What a load did not bring is computed, and stored again: it may have been damaged."""
        first = state.load_tokens[0] // self.chunk_tokens
        if not self.model.loads_in_part:
            lost = None if is_whole else first
        else:
            size = self.model.kinds[0].blocks[self.main]
            part = state.load.parts[0]
            (start, end), blocks = part.tables[self.main]
            failed = [at for at in range(start // size, (end - 1) // size + 1) if blocks[at] in failed_blocks]
            lost = part.first_chunk + failed[0] * size // self.chunk_tokens if failed else None
        if lost is not None:
            state.lost = lost if state.lost is None else min(state.lost, lost)
            state.found = [min(found, state.lost) for found in state.found]
            state.handed = list(state.found)

    def note_snapshots(self, state):
        """Those that were loaded: vLLM offers them as if they were new."""
        for part in state.load.parts:
            if self.model.kinds[part.kind].word == "state":
                state.snapshots.setdefault(part.kind, set()).add(part.first_chunk)

    def bind_loaded(self, state):
        """They are in the node's memory now, perhaps from S3."""
        if self.events is not None and not state.is_stale:
            start, tokens = state.load_tokens[0], self.loaded_tokens(state)
            chunks = range(start // self.chunk_tokens, (start + tokens) // self.chunk_tokens)
            notes = [self.events.note(state.request, state.prompt, chunk) for chunk in chunks]
            self.events.bind(state.request, state.prompt, notes)

    def loaded_tokens(self, state):
        start, end = state.load_tokens
        return max(0, min(end, end if state.lost is None else state.lost * self.chunk_tokens) - start)

    def stored(self, store):
        """What is not there ends the run that lookups can find: it is stored again before what follows it. A window's chunk is
        stored once more, if vLLM still has its blocks in the next step. Else the next request that computes it stores it."""
        if store.notes:
            self.events.bind(*store.of, [note for at, note in enumerate(store.notes) if (0, at) in store.there])
        state = self.requests.get(store.request)
        if state is None:
            return
        for kind, chunks in store.parts:
            there = {chunk for at, chunk in enumerate(chunks) if (kind, at) in store.there}
            missing = [chunk for chunk in chunks if chunk not in there]
            if missing and self.model.kinds[kind].word == "full":
                state.found[kind] = min(state.found[kind], missing[0])
            elif self.model.kinds[kind].word in ("window", "chunked"):
                new = {chunk for chunk in missing if (kind, chunk) not in state.failed_once}
                state.failed.setdefault(kind, set()).update(new)
                state.failed_once.update((kind, chunk) for chunk in new)
            if kind in state.snapshots:
                state.snapshots[kind].difference_update(missing)
            if kind == 0 and state.lost in there:
                state.lost = None
        # It may wait, having been preempted: it finds this, too.
        self.lookups.outdate(state.request.request_id)

    def finished(self, request):
        """Its blocks are vLLM's, but for those that are being copied."""
        self.forget_lookup(request.request_id)
        self.adapters.forget(request.request_id)
        self.blocks.drop(request.request_id)
        self.local.pop(request.request_id, None)
        self.requests.pop(request.request_id, None)
        self.opaque.pop(request.request_id, None)
        if not self.requests and self.load_or_compute is not None:
            self.load_or_compute.idle()

    def has_pending_block_frees(self):
        """vLLM can't go on without more blocks: instead of preempting a request it gets back those that only kvgate holds."""
        gave, alone = self.blocks.give_back()
        self.wanted_back |= alone
        return gave or bool(alone)

    def reset(self):
        """Nothing that was stored so far is found any more by this engine: its weights may have changed."""
        if self.has_fixed_weights:
            return True
        self.epoch = secrets.token_bytes(16)
        self.adapters.reset()
        if self.events is not None:
            self.events.reset(self.epoch)
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
            nothing = [0] * len(self.model.kinds)
            state = RequestState(request, Prompt(self.space, salt, adapter), list(nothing), list(nothing))
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
