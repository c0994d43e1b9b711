"""The scheduler's side: never waits, and keeps what it knows by request."""

import dataclasses

from kvgate import Lookups, Prompt
from kvgate.vllm.metadata import Load, StepMetadata, Store


@dataclasses.dataclass
class RequestState:
    request: object
    prompt: Prompt
    hashed: int = 0
    """Tokens that the prompt has been given."""
    asked: bool = False
    local: int = 0
    """Tokens that vLLM had itself when it asked last."""
    found: int = 0
    """Chunks of the leading run that are known to be there, or were handed to a store."""
    blocks: list[int] = dataclasses.field(default_factory=list)
    load: Load | None = None
    """The latest, until it has ended."""
    loads: int = 0
    to_load: bool = False
    """Whether no worker has been told of it."""
    gave_up: bool = False
    """A load failed: the rest is computed."""
    stores: bool = False
    """Whether any was begun: then the worker says when the blocks are free."""


class SchedulerSide:
    def __init__(self, model, settings, is_consumer, is_producer):
        self.space, self.block_tokens = model.space, model.block_tokens
        self.chunk_tokens = model.space.chunk_tokens
        self.lookups = Lookups(settings.socket, model.space, settings.lookup_deadline_ms, settings.pin_ms)
        self.is_consumer, self.is_producer = is_consumer, is_producer
        self.requests: dict[str, RequestState] = {}

    def new_request(self, request):
        """Hashes the prompt and asks which of its chunks are there: what they are brought up from is told meanwhile."""
        state = self.state(request)
        if state is not None and self.is_consumer and not state.asked:
            chunks = self.extend(state, request.num_prompt_tokens)
            state.asked = True
            self.lookups.ask(request.request_id, state.prompt.hashes(0, chunks))

    def matched_tokens(self, request, num_computed_tokens):
        """Tokens beyond the local ones that can be loaded, and that it is done meanwhile; None: ask again."""
        self.new_request(request)
        state = self.state(request)
        if state is None or state.gave_up or not self.is_consumer:
            return 0, False
        found = self.lookups.answer(request.request_id)
        if found is None:
            return None, False
        state.found, state.local = max(state.found, found), num_computed_tokens
        # Whole blocks, and something is left to compute.
        most = (request.num_tokens - 1) // self.block_tokens * self.block_tokens
        tokens = min(found * self.chunk_tokens, most) - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def allocated(self, request, blocks, num_external_tokens):
        state = self.requests.get(request.request_id)
        if state is None or num_external_tokens == 0:
            return
        table = blocks.get_block_ids()[0]
        start, end = state.local, state.local + num_external_tokens
        first, last = start // self.chunk_tokens, -(-end // self.chunk_tokens)
        state.loads += 1
        state.to_load = True
        state.load = Load(
            request=request.request_id,
            attempt=state.loads,
            hashes=state.prompt.hashes(first, last),
            first_token=first * self.chunk_tokens,
            tokens=(start, end),
            block_table=list(table),
        )

    def step(self, output):
        meta = StepMetadata(preempted=set(getattr(output, "preempted_req_ids", None) or ()))
        for state in self.requests.values():
            if state.to_load:
                meta.loads.append(state.load)
                state.to_load = False
        if not self.is_producer:
            return meta
        for new in output.scheduled_new_reqs:
            if (state := self.requests.get(new.req_id)) is not None:
                state.blocks = list(new.block_ids[0])
                self.add_store(meta, new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if (state := self.requests.get(request_id)) is not None:
                blocks = cached.new_block_ids[index]
                if request_id in cached.resumed_req_ids:
                    state.blocks = list(blocks[0]) if blocks else []
                elif blocks:
                    state.blocks.extend(blocks[0])
                computed = cached.num_computed_tokens[index] + output.num_scheduled_tokens[request_id]
                self.add_store(meta, request_id, computed)
        return meta

    def add_store(self, meta, request_id, computed_tokens):
        """Of the chunks that are full after this step and that nobody has yet."""
        state = self.requests[request_id]
        full = computed_tokens // self.chunk_tokens
        if full <= state.found:
            return
        # What was generated has hashes, too, once it is a full chunk.
        full = min(full, self.extend(state, min(full * self.chunk_tokens, state.request.num_tokens)))
        if full <= state.found:
            return
        first, state.found, state.stores = state.found, full, True
        meta.stores.append(
            Store(
                request=request_id,
                hashes=state.prompt.hashes(first, full),
                parent=state.prompt.parent(first),
                first_token=first * self.chunk_tokens,
                block_table=list(state.blocks),
            )
        )

    def loads_ended(self, received, failed_blocks):
        """What a load did not bring is computed, and stored again: it may have been damaged."""
        for request_id in received:
            state = self.requests.get(request_id)
            if state is None or state.load is None:
                continue
            load, state.load = state.load, None
            first, end = (token // self.block_tokens for token in (load.tokens[0], load.tokens[1] - 1))
            failed = [at for at in range(first, end + 1) if load.block_table[at] in failed_blocks]
            if failed:
                state.gave_up = True
                state.found = min(state.found, failed[0] * self.block_tokens // self.chunk_tokens)

    def finished(self, request):
        """Whether its blocks must stay until the worker has said that they are free."""
        self.lookups.forget(request.request_id)
        state = self.requests.pop(request.request_id, None)
        return state is not None and state.stores

    def state(self, request):
        """None: a request whose tokens don't say what its KV is."""
        state = self.requests.get(request.request_id)
        if state is None and getattr(request, "prompt_embeds", None) is None:
            salt = (request.cache_salt or "").encode()
            state = RequestState(request, Prompt(self.space, salt, adapter(request)))
            self.requests[request.request_id] = state
        return state

    def extend(self, state, tokens):
        """Full chunks, with at least these first tokens hashed; each is hashed once."""
        request = state.request
        if tokens > state.hashed:
            extras = [
                (feature.mm_position.offset, feature.identifier.encode())
                for feature in getattr(request, "mm_features", None) or ()
                if state.hashed <= feature.mm_position.offset < tokens
            ]
            state.prompt.extend(request.all_token_ids[state.hashed : tokens], extras)
            state.hashed = tokens
        return len(state.prompt)


def adapter(request):
    """What tells one LoRA adapter from another; empty without."""
    lora = getattr(request, "lora_request", None)
    return b"" if lora is None else f"{lora.lora_name}\0{lora.lora_path}".encode()
