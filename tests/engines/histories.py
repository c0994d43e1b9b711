"""Random histories of an engine without its model: vLLM's real scheduler, the connector's two sides, and a model of what each
block holds. Models with windows, states and drafts are among them. See test_histories.py.

python tests/engines/histories.py SEED      one history again, step by step
"""

import copy
import dataclasses
import functools
import json
import math
import os
import random
import sys
from types import SimpleNamespace
from typing import NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from kvgate import Prompt, Space
from kvgate.vllm import connector as connector_module
from kvgate.vllm import scheduler as scheduler_module
from kvgate.vllm import worker as worker_module
from kvgate.vllm.kinds import Kind
from kvgate.vllm.model import Model
from vllm import __version__ as vllm_version  # noqa: F401
from vllm.config import KVTransferConfig, ObservabilityConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

GARBAGE = -1
MOST_TOKENS = 40
"""Of a request, with what it generates."""
MOST_STEPS = 600
PROMPT_TOKENS = ()
"""Lengths of prompts; without them any."""
WORDS = 3
"""So few that prompts often begin alike."""

world = None
"""The history that runs."""


class BrokenError(AssertionError):
    """A history has broken an invariant."""


def check(holds, *says):
    if not holds:
        raise BrokenError(" ".join(map(str, says)))


def kv_of(tokens):
    """The KV of each token. It depends on all tokens up to it."""
    kv, at = [], 0
    for token in tokens:
        at = hash((at, token)) | 1 << 62
        kv.append(at)
    return kv


# ---- stand-ins for what kvgate has in Rust


class Lookups:
    """Answers that come when they come, and may be old by then: what is pinned is there, the rest may be gone."""

    def __init__(self, socket, spaces, drafts, *settings):
        self.prompts, self.most, self.outdated, self.fulls = {}, {}, set(), {}
        self.lookahead = settings[-1]

    def ask(self, request, prompt, most):
        self.prompts[request], self.most[request] = prompt, min(most, len(prompt))
        self.outdated.discard(request)

    def is_due(self, request):
        return request not in self.prompts or request in self.outdated or world.numbers.random() < 0.05

    def is_old(self, request):
        return self.is_due(request)

    def outdate(self, request):
        if request in self.prompts:
            self.outdated.add(request)

    def answer(self, request):
        """By brute force: after so many chunks each kind has all that the next token needs."""
        prompt = self.prompts.get(request)
        if prompt is None or world.numbers.random() < 0.2:
            return None
        hashes, most = prompt.hashes(0, len(prompt)), self.most[request]
        has = lambda kind, chunk: (kind, hashes[chunk * 32 : chunk * 32 + 32]) in world.gateway  # noqa: E731
        kinds = [(number, kind) for number, kind in enumerate(world.model.kinds) if not kind.is_draft]
        full = [number for number, kind in kinds if kind.word == "full"]
        leading = next((chunk for chunk in range(most) if not all(has(kind, chunk) for kind in full)), most)
        self.fulls[request] = leading if full else 0
        for boundary in range(max(0, min(most, leading - self.lookahead)), 0, -1):
            end = boundary * world.chunk_tokens
            if all(
                has(number, chunk)
                for number, kind in kinds
                for chunk in range(kind.first_token(end) // world.chunk_tokens, boundary)
                if kind.first_token(end) < end
            ):
                return boundary
        return 0

    def full(self, request):
        return self.fulls.get(request, 0)

    def tiers(self, request):
        return bytes(world.numbers.choice(b"mds") for _ in range(len(self.prompts.get(request, ()))))

    def outcome(self, request):
        return "answered" if request in self.prompts else None

    def told(self):
        return [], False

    def forget(self, request):
        self.prompts.pop(request, None)
        self.outdated.discard(request)


class Job:
    def __init__(self, name, kind, parts):
        self.job, self.kind, self.parts = name, kind, parts
        self.state = "wanted"
        self.there, self.missing, self.missing_drafts = [], [], 0
        # What the real ones say, too.
        self.stored = self.refused = self.bytes = 0
        self.seconds, self.error = 0.01, None

    @property
    def table(self):
        """All blocks that it reads or writes."""
        return [block for part in self.parts for blocks in part.blocks() for block in blocks]


class Part:
    """Chunks of a kind, and a table for each of its groups."""

    def __init__(self, kind, hashes, tables):
        self.number, self.kind = kind, world.model.kinds[kind]
        self.chunks = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        self.tables = dict(zip(self.kind.blocks, tables, strict=True))

    def blocks(self):
        for group, table in self.tables.items():
            if isinstance(table, tuple):
                (start, end), table = table
                size = 1 if self.kind.word == "state" else self.kind.blocks[group]
                table = table[start // size : -(-end // size)] if start < end else []
            yield table

    def rows(self, chunk, group):
        """What is to be in a group's blocks of one of its chunks."""
        kv = world.kv_of_chunk(chunk)
        if self.kind.word == "state":
            return [(group, kv[-1])]
        return [(group, slot) for slot in kv]


class Worker:
    """A rank's jobs, which go on whenever the history says so, in any order."""

    def __init__(self, rank):
        self.rank, self.content = rank, world.content[rank]
        self.jobs = {}
        self.ended, self.free = {"load": [], "store": []}, []

    def load(self, job, parts, stream=None, by_layer=False):
        self.jobs[job] = Job(job, "load", [Part(*part) for part in parts])
        for part in self.jobs[job].parts:
            for group, ((start, end), table) in part.tables.items():
                size = 1 if part.kind.word == "state" else part.kind.blocks[group]
                check(0 not in table[start // size : -(-end // size)], job, "writes to the null block", table)
        if by_layer:
            self.end(self.jobs[job])

    def store(self, job, parts, stream=None):
        check(job not in self.jobs, "a store of its own")
        if world.numbers.random() < 0.03:
            world.freed.add((self.rank, job))
            raise RuntimeError("this store could not be begun")
        for _, hashes, parents, _ in parts:
            check(len(hashes) == len(parents), "each chunk has a parent")
        self.jobs[job] = Job(job, "store", [Part(kind, hashes, tables) for kind, hashes, _, tables in parts])
        for part in self.jobs[job].parts:
            for group, table in part.tables.items():
                blocks = 1 if part.kind.word == "state" else world.chunk_tokens // part.kind.blocks[group]
                check(len(table) == len(part.chunks) * blocks, "a store has its chunks' blocks alone", table)
                check(0 not in table, job, "reads the null block", table)

    def is_attached(self):
        return True

    def busy(self):
        """Blocks that are read or written."""
        return [job for job in self.jobs.values() if job.state in ("wanted", "copying")]

    def go_on(self, job):
        if job.kind == "load" or job.state == "copied":
            self.end(job)
        elif job.state == "wanted":
            if world.numbers.random() < 0.1:
                job.error = "refused"
                job.refused = sum(len(part.chunks) for part in job.parts)
                self.free.append(job.job)
                self.end(job)
            else:
                job.state = "copying"
        else:
            self.copy(job)

    def copy(self, job):
        for part in job.parts:
            for index, chunk in enumerate(part.chunks):
                for group, table in part.tables.items():
                    blocks = len(table) // len(part.chunks)
                    own = table[index * blocks : (index + 1) * blocks]
                    held = [slot for block in own for slot in self.content[block]]
                    right = part.rows(chunk, group)
                    # Drafts may be computed from drafts' KV that was not there.
                    check(
                        held == right or part.kind.is_draft,
                        f"{job.job} stores wrong KV of chunk {index} out of blocks {own}: {held} {right}",
                    )
                if world.numbers.random() < 0.9:
                    job.there.append((part.number, index))
        job.state = "copied"
        self.free.append(job.job)

    def end(self, job):
        del self.jobs[job.job]
        if job.kind == "store":
            there = {
                (part.number, part.chunks[index])
                for part in job.parts
                for number, index in job.there
                if number == part.number
            }
            world.published(self.rank, there)
        else:
            self.bring(job)
        self.ended[job.kind].append(job)

    def bring(self, job):
        broken = world.numbers.choice(job.parts) if self.fails() else None
        for part in job.parts:
            size = lambda group, part=part: 1 if part.kind.word == "state" else part.kind.blocks[group]  # noqa: E731
            rows_of_chunk = 1 if part.kind.word == "state" else world.chunk_tokens
            first = min(start for (start, _), _ in part.tables.values())
            last = max(end for (_, end), _ in part.tables.values())
            some = world.numbers.randrange(first, last) if part is broken else last
            for group, ((start, end), table) in part.tables.items():
                rows = [row for chunk in part.chunks for row in part.rows(chunk, group)]
                for token in range(start, end):
                    self.write(
                        table[token // size(group)], size(group), token, rows[token] if token < some else GARBAGE
                    )
            missing = [at for at in range(len(part.chunks)) if (at + 1) * rows_of_chunk > some < last]
            # Tokens of the first missing chunk before `some` have come, which nobody knows.
            if part.kind.is_draft:
                job.missing_drafts += len(missing)
            else:
                job.missing.extend((part.number, at) for at in missing)

    def fails(self):
        return world.numbers.random() < world.failures

    def write(self, block, size, token, row):
        slots = self.content[block]
        if len(slots) != size:
            slots[:] = [GARBAGE] * size
        slots[token % size] = row

    def take_back(self, jobs):
        for name in jobs:
            if (job := self.jobs.get(name)) is None:
                continue
            if job.state == "copying":
                self.copy(job)
            elif job.state == "wanted":
                self.free.append(name)
                job.error = "taken back"
                job.state = "copied"

    def taken(self, kind):
        ended, self.ended[kind] = self.ended[kind], []
        return ended

    def loaded(self):
        return self.taken("load")

    def stored(self):
        return self.taken("store")

    def freed(self):
        free, self.free = self.free, []
        world.freed.update((self.rank, job) for job in free)
        return free

    def wait_layer(self, kind, plane):
        pass

    def wait_layers(self):
        pass

    def close(self):
        pass


# ---- another connector


class SiblingMetadata(KVConnectorMetadata):
    def __init__(self, loads, sends):
        self.loads, self.sends = loads, sends


class Sibling(KVConnectorBase_V1, SupportsHMA):
    """Loads within the step or between steps, fails now and then, and sends some requests' blocks after their end."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.asked, self.loads, self.sends = {}, [], set()
        self.under_way, self.sending, self.received, self.failed = [], set(), set(), set()
        self.content = None
        if role == KVConnectorRole.WORKER:
            world.siblings.append(self)

    @property
    def requires_kv_delivery(self):
        return world.sibling_delivers

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if world.numbers.random() < 0.1:
            return None, False
        most = (request.num_tokens - 1) // world.block_tokens
        has = world.numbers.randint(0, most) * world.block_tokens if world.numbers.random() < 0.5 else 0
        self.asked[request.request_id] = num_computed_tokens
        return max(0, has - num_computed_tokens), world.sibling == "async" and has > num_computed_tokens

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            start = self.asked[request.request_id]
            kv = kv_of(request.all_token_ids)
            load = (request.request_id, start, start + num_external_tokens, list(blocks.get_block_ids()[0]), kv)
            self.loads.append(load)

    def build_connector_meta(self, scheduler_output):
        meta = SiblingMetadata(self.loads, self.sends)
        self.loads, self.sends = [], set()
        return meta

    def request_finished_all_groups(self, request, block_ids):
        is_whole = bool(block_ids[0]) and request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        if not is_whole or not world.sends or world.numbers.random() > 0.3:
            return False, None
        self.sends.add(request.request_id)
        return True, None

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))

    def start_load_kv(self, forward_context, **kwargs):
        meta = self._get_connector_metadata()
        self.sending |= meta.sends
        for load in meta.loads:
            if world.sibling == "sync":
                self.end(load)
            else:
                self.under_way.append(load)

    def end(self, load):
        _, start, end, table, kv = load
        size = world.block_tokens
        some = end
        if world.numbers.random() < world.sibling_failures:
            some = world.numbers.randrange(start // size, end // size) * size
            self.failed.update(table[some // size : -(-end // size)])
        for token in range(start, end):
            row = (0, kv[token]) if token < some else GARBAGE
            self.content[table[token // size]][token % size] = row

    def go_on(self):
        for load in list(self.under_way):
            if world.numbers.random() < 0.4:
                self.under_way.remove(load)
                self.end(load)
                self.received.add(load[0])

    def get_finished(self, finished_req_ids):
        sent = {request for request in sorted(self.sending) if world.numbers.random() < 0.4}
        self.sending -= sent
        received, self.received = self.received, set()
        return sent, received

    def get_block_ids_with_load_errors(self):
        failed, self.failed = self.failed, set()
        return failed

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass


# ---- the history


class Structured:
    """No request has structured output."""

    def accept_tokens(self, request, tokens):
        return True

    def validate_tokens(self, request, tokens):
        return tokens

    def should_advance(self, request):
        return False


class Speculative(SimpleNamespace):
    """As n-grams are: without a model of its own."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: False


init_none_hash(sha256)


class PlantedError(Exception):
    """Thrown by a call of vLLM's, on purpose."""


CALLS = {
    "scheduler": ("new_request", "matched_tokens", "allocated", "step", "ended", "finished", "computed"),
    "worker": ("take_back", "load", "store", "results"),
}


class Group(NamedTuple):
    """One of vLLM's KV cache groups."""

    word: str
    span: int
    block_tokens: int
    is_draft: bool = False

    def spec(self):
        attention = {"block_size": self.block_tokens, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        match self.word:
            case "full":
                return FullAttentionSpec(**attention)
            case "window":
                return SlidingWindowSpec(**attention, sliding_window=self.span)
            case "chunked":
                return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=self.span)
        return MambaSpec(
            block_size=self.block_tokens,
            shapes=((1, 16 * self.block_tokens),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )


class History:
    SIBLINGS = (None, "sync", "sync", "async")
    MODELS = (
        *("plain",) * 6,
        *("windows", "windows", "two windows", "chunked", "states", "states", "states and windows"),
        *("windows alone", "states alone", "drafts", "windows and drafts"),
    )

    def __init__(self, seed, says=lambda *_: None, module_path=None):
        global world
        world = self
        self.says = says
        self.numbers = random.Random(seed)
        self.choose()
        self.content = [[[GARBAGE] * self.block_tokens for _ in range(self.blocks)] for _ in range(self.ranks)]
        self.gateway, self.of_chunk, self.published_by = set(), {}, {}
        self.model = model_of(self.groups, self.chunk_tokens, self.eagle)
        self.epochs, self.siblings, self.known = [b""], [], set()
        self.truth, self.rejected = {}, {}
        self.names = 0
        self.space = self.model.spaces[0]
        self.in_flight = []
        self.freed, self.told = set(), set()
        self.has_reset = False
        self.build()

    def choose(self):
        """Chooses the engine's settings at random."""
        numbers = self.numbers
        self.is_async = numbers.random() < 0.6
        self.ranks = numbers.choice((1, 1, 2))
        self.block_tokens = numbers.choice((1, 2, 4))
        self.choose_model()
        is_plain = self.groups == [Group("full", 0, self.block_tokens)]
        self.chunk_tokens = math.lcm(*(group.block_tokens for group in self.groups)) * numbers.choice((1, 2, 3))
        self.layerwise = is_plain and not self.is_async and numbers.random() < 0.25
        self.sibling = numbers.choice(self.SIBLINGS) if is_plain else None
        self.sibling_delivers, self.sends = numbers.random() < 0.3, numbers.random() < 0.3
        self.failures = numbers.choice((0, 0.2, 0.5))
        self.sibling_failures = numbers.choice((0, 0.2))
        if self.is_async and self.sibling == "sync":
            # vLLM itself goes on from a load within the step that failed.
            self.sibling_failures = 0
        # Of states with drafts vLLM keeps more blocks, and moves them: too much for this model of an engine.
        self.drafts = 0 if any(group.word == "state" for group in self.groups) else numbers.choice((0, 0, 1, 3))
        self.eagle = self.drafts > 0 and any(group.is_draft for group in self.groups)
        self.role = numbers.choice(("kv_both", "kv_both", "kv_both", "kv_producer", "kv_consumer"))
        needed = sum(-(-MOST_TOKENS // group.block_tokens) for group in self.groups)
        self.blocks = needed + numbers.choice((0, 2, 4, needed // 2)) + 4 * len(self.groups)
        self.policy = numbers.choice(("fcfs", "fcfs", "priority"))
        self.seats = numbers.choice((2, 4))
        self.budget = max(numbers.choice((4, 8, 16, 64)), self.drafts + 1)
        # vLLM itself asserts that what it pads with drafts is below it.
        self.long_prefill = numbers.choice((0, 0, max(3, self.drafts + 1), 6))
        self.throws = numbers.random() < 0.1

    def choose_model(self):
        """Its KV cache groups, as vLLM would deal them."""
        numbers, size = self.numbers, self.block_tokens
        full, others = Group("full", 0, size), []
        window, span = numbers.choice((1, 3, 5, 9)), numbers.choice((4, 8))
        match numbers.choice(self.MODELS):
            case "plain":
                pass
            case "windows":
                other = numbers.choice((1, 2)) * size
                others = [Group("window", window, other)] * numbers.choice((1, 2))
            case "two windows":
                others = [Group("window", window, size), Group("window", window + 4, size)]
            case "chunked":
                others = [Group("chunked", span, size)] * numbers.choice((1, 2))
            case "states":
                others = [Group("state", 0, size)] * numbers.choice((1, 2))
            case "states and windows":
                others = [Group("state", 0, size), Group("window", window, size)]
            case "windows alone":
                full, others = None, [Group("window", window, size)]
            case "states alone":
                full, others = None, [Group("state", 0, size)]
            case "drafts":
                others = [Group("full", 0, size, is_draft=True)]
            case "windows and drafts":
                others = [Group("window", window, size), Group("full", 0, size, is_draft=True)]
        self.groups = [*([full] if full else []), *others]
        if numbers.random() < 0.5:
            self.groups.reverse()

    # ---- what there is

    def build(self):
        numbers, fixed = self.numbers, {"fixed_weights": True} if self.numbers.random() < 0.5 else {}
        ours = {
            "kv_connector": "KvGateConnector",
            "kv_role": self.role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "socket": "/nowhere/sock",
                "load_policy": "always",
                "layerwise": self.layerwise,
                **fixed,
            },
        }
        if self.sibling:
            sibling = {"kv_connector": "Sibling", "kv_connector_module_path": "histories", "kv_role": "kv_both"}
            both = [ours, sibling] if numbers.random() < 0.5 else [sibling, ours]
            transfer = KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role=self.role,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"connectors": both},
            )
        else:
            transfer = KVTransferConfig(**ours)
        self.config = config = object.__new__(VllmConfig)
        config.__dict__.update(
            TEMPLATE,
            kv_transfer_config=transfer,
            speculative_config=Speculative(
                num_speculative_tokens=self.drafts,
                max_num_new_slots_for_drafting=0,
                num_speculative_tokens_per_batch_size=None,
                method="eagle" if self.eagle else "ngram",
                use_eagle=lambda: self.eagle,
                use_eagle_block_drop=lambda: self.eagle,
            )
            if self.drafts
            else None,
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.seats,
                max_num_active_seqs=None,
                max_num_scheduled_tokens=None,
                max_num_batched_tokens=self.budget,
                long_prefill_token_threshold=self.long_prefill,
                long_prefill_token_threshold_adaptive=False,
                policy=self.policy,
                async_scheduling=self.is_async,
                enable_chunked_prefill=True,
                disable_chunked_mm_input=False,
                scheduler_reserve_full_isl=numbers.random() < 0.5,
                watermark=0.0,
                disable_hybrid_kv_cache_manager=False,
                prefill_schedule_interval=1,
            ),
            cache_config=SimpleNamespace(
                block_size=self.block_tokens,
                num_gpu_blocks=self.blocks,
                enable_prefix_caching=True,
                mamba_cache_mode="align" if any(group.word == "state" for group in self.groups) else "none",
                prefix_cache_retention_interval=numbers.choice((0, None, self.chunk_tokens * 2)),
                enable_mamba_shared_prefix_checkpoint=False,
                cache_dtype="auto",
                prefix_match_unit=None,
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.ranks,
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                rank=0,
                world_size=self.ranks,
            ),
        )
        groups = [
            KVCacheGroupSpec([f"layers.{number}"], group.spec(), is_eagle_group=self.eagle and group.is_draft)
            for number, group in enumerate(self.groups)
        ]
        cache = KVCacheConfig(self.blocks, [], groups)
        block_size, hash_tokens = resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = hash_tokens
        cache.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(cache, config, block_size, hash_tokens)
        self.model = dataclasses.replace(
            self.model, alignment=cache.cache_hit_alignment_tokens, hash_tokens=cache.hash_block_size
        )
        scheduler = AsyncScheduler if self.is_async else Scheduler
        self.scheduler = scheduler(
            config, cache, Structured(), block_size=block_size, hash_block_size=hash_tokens, log_stats=False
        )
        self.workers = []
        for rank in range(self.ranks):
            config.parallel_config = copy.copy(config.parallel_config)
            config.parallel_config.rank = rank
            own = type(self.scheduler.connector)(config, KVConnectorRole.WORKER, cache)
            self.workers.append(own)
            native = self.ours(own).worker
            native.worker = Worker(rank)
            native.tables = [[(group, 1) for group in kind.blocks] for kind in self.model.kinds]
        for rank, sibling in enumerate(self.siblings):
            sibling.content = self.content[rank]
        self.aggregator = KVOutputAggregator(self.ranks)
        self.hasher = get_request_block_hasher(hash_tokens, sha256)
        self.side = self.ours(self.scheduler.connector).scheduler
        self.is_off = False
        connectors = [self.ours(one) for one in (self.scheduler.connector, *self.workers)]
        for connector in connectors:
            connector._turn_off = functools.partial(self.turn_off, connector._turn_off)
        if self.throws:
            self.plant_error(numbers.choice(connectors))

    def turn_off(self, turn_off, why):
        """An error that nobody planted is kvgate's own, or what this history has found: no guard hides it."""
        if not self.is_off or isinstance(sys.exception(), BrokenError):
            raise
        turn_off(why)

    def plant_error(self, connector):
        """One of the calls throws once, before it has done anything or after all of it."""
        where = "scheduler" if connector.scheduler else "worker"
        side, name = getattr(connector, where), self.numbers.choice(CALLS[where])
        left, is_after, call = self.numbers.randrange(40), self.numbers.random() < 0.5, getattr(side, name)
        # Its answer is not told again. Nothing in it throws once the answer is taken out.
        is_after &= name != "results"

        def planted(*arguments):
            nonlocal left
            left -= 1
            if left != 0:
                return call(*arguments)
            if is_after:
                call(*arguments)
            self.is_off = True
            self.says("throws", where, name, "after" if is_after else "before")
            raise PlantedError(name)

        setattr(side, name, planted)

    def ours(self, connector):
        return next(one for one in getattr(connector, "sub_connectors", [connector]) if not isinstance(one, Sibling))

    def natives(self):
        """None: that rank's is off, and has let go of it."""
        return [self.ours(connector).worker.worker for connector in self.workers]

    def know(self, tokens):
        """The chunks of these tokens, by all hashes that they may have."""
        full = len(tokens) // self.chunk_tokens
        tokens = tuple(tokens[: full * self.chunk_tokens])
        for epoch in self.epochs:
            if not full or (epoch, tokens) in self.known:
                continue
            self.known.add((epoch, tokens))
            kv = kv_of(tokens)
            prompt = Prompt(self.space, b"", epoch)
            prompt.extend(tokens)
            hashes = prompt.hashes(0, full)
            for chunk in range(full):
                held = kv[chunk * self.chunk_tokens : (chunk + 1) * self.chunk_tokens]
                self.of_chunk[hashes[chunk * 32 : (chunk + 1) * 32]] = held

    def kv_of_chunk(self, chunk):
        if chunk not in self.of_chunk:
            for request in self.scheduler.requests.values():
                self.know(list(request.all_token_ids))
        check(chunk in self.of_chunk, "a chunk's hash is of no request's tokens")
        return self.of_chunk[chunk]

    def published(self, rank, chunks):
        """Of a kind each."""
        for chunk in chunks:
            by = self.published_by.setdefault(chunk, set())
            by.add(rank)
            if len(by) == self.ranks:
                self.gateway.add(chunk)

    # ---- what happens

    def add_request(self):
        numbers = self.numbers
        tokens = [numbers.randrange(WORDS) for _ in range(numbers.randint(1, MOST_TOKENS - 10))]
        if self.truth and numbers.random() < 0.7:
            other = numbers.choice(list(self.truth.values()))
            same = numbers.randint(0, len(other))
            tokens = [*other[:same], *tokens][: MOST_TOKENS - 10]
        if numbers.random() < 0.4:
            # Another engine has stored some of it.
            self.know(tokens)
            prompt = Prompt(self.space, b"", self.side.epoch)
            full = prompt.extend(tokens)
            for number, kind in enumerate(self.model.kinds):
                has = numbers.randint(0, full)
                # Of a state it has some snapshots.
                share = 0.4 if kind.word == "state" else 1
                self.gateway.update(
                    (number, prompt.hashes(chunk, chunk + 1)) for chunk in range(has) if numbers.random() < share
                )
        if PROMPT_TOKENS:
            tokens = (tokens * 30)[: numbers.choice(PROMPT_TOKENS)]
        self.add(tokens, numbers.randint(1, 9), numbers.randrange(3))

    def add(self, tokens, to_generate, priority):
        self.names += 1
        name = f"r{self.names}"
        self.truth[name] = list(tokens)
        sampling = SamplingParams(max_tokens=to_generate, ignore_eos=True)
        self.says("add", name, tokens, to_generate)
        self.scheduler.add_request(Request(name, tokens, sampling, None, priority=priority, block_hasher=self.hasher))

    def abort(self):
        live = [name for name, request in self.scheduler.requests.items() if not request.is_finished()]
        if live:
            # Of those that a load is brought for, more than chance would take.
            loading = [
                name for name in live if self.scheduler.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS
            ]
            name = self.numbers.choice(loading if loading and self.numbers.random() < 0.5 else live)
            self.says("abort", name, self.scheduler.requests[name].status.name)
            self.keep_truth()
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self):
        requests = self.scheduler.requests.values()
        idle = (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED)
        can_preempt = (
            not self.in_flight
            and not self.scheduler.deferred_frees
            and all(request.status in idle for request in requests)
            and not any(request.num_computed_tokens for request in requests if request.status != RequestStatus.RUNNING)
        )
        preempts = can_preempt and self.numbers.random() < 0.7
        self.says("reset", preempts)
        self.has_reset |= preempts
        self.keep_truth()
        try:
            self.scheduler.reset_prefix_cache(preempts, reset_connector=self.numbers.random() < 0.5)
        except RuntimeError:
            # As vLLM does with a load between steps.
            check(self.sibling or self.in_flight, "nothing is under way, and the cache can't be reset")
        if self.side.epoch not in self.epochs:
            self.epochs.append(self.side.epoch)

    def keep_truth(self):
        for request in self.scheduler.requests.values():
            self.know(list(request.all_token_ids))

    def go_on(self):
        """Copies do, on each rank as it likes."""
        for native in self.natives():
            for job in list(native.jobs.values()) if native else ():
                if self.numbers.random() < self.pace and job.job in native.jobs:
                    native.go_on(job)
        for sibling in self.siblings:
            sibling.go_on()

    def step(self):
        pool = self.scheduler.kv_cache_manager.block_pool.blocks
        held = [
            copied
            for copied in self.side.blocks.copied.values()
            if any(pool[block].ref_cnt == 1 for block in copied.blocks)
        ]
        before = set(self.scheduler.reset_preempted_req_ids)
        output = self.scheduler.schedule()
        for name in output.preempted_req_ids - before:
            check(self.is_off or not held, f"{name} is preempted, and blocks that only copies hold come free")
            drops = self.scheduler.requests[name].drop_stale_output
            check(
                self.has_reset or not drops or (self.sibling and self.sibling_delivers), f"{name}'s tokens are dropped"
            )
        in_flight = [step.rejected for step in self.in_flight]
        step = SimpleNamespace(output=output, rejected={}, result=None)
        self.check_stores(output)
        step.result = self.execute(output, step, in_flight)
        step.freed = set(self.freed)
        self.in_flight.append(step)

    def check_stores(self, output):
        meta = output.kv_connector_metadata
        if self.sibling:
            at = self.scheduler.connector.sub_connectors.index(self.ours(self.scheduler.connector))
            meta = meta.metadata[at]
        for store in meta.stores:
            tables = self.scheduler.kv_cache_manager.get_block_ids(store.request)
            for part in store.parts:
                kind = self.model.kinds[part.kind]
                for group, blocks in part.tables.items() if kind.word != "state" else ():
                    size = self.chunk_tokens // kind.blocks[group]
                    right = [
                        block for chunk in part.chunks for block in tables[group][chunk * size : (chunk + 1) * size]
                    ]
                    # What a window has left behind is in no table any more.
                    same = [block if right[at] else 0 for at, block in enumerate(blocks)]
                    check(same == right, store.job, "names blocks", blocks, "of", right)

    def execute(self, output, step, in_flight):
        work, sampled = self.sample(output, step, in_flight)
        self.says("step", dict(output.num_scheduled_tokens), "preempted", output.preempted_req_ids)
        results = []
        for rank, connector in enumerate(self.workers):
            meta = output.kv_connector_metadata
            connector.handle_preemptions(meta)
            self.check_busy(rank)
            connector.bind_connector_metadata(meta)
            if output.has_sync_kv_loads:
                connector.start_load_kv(None)
            for tables, tokens, start, end in work:
                self.compute(self.content[rank], tables, tokens, start, end)
            if not output.has_sync_kv_loads:
                connector.start_load_kv(None)
            connector.wait_for_save()
            finished = connector.get_transfer_results(output.finished_req_ids)
            told = KVConnectorOutput(
                finished_sending=finished.finished_sending,
                finished_recving=finished.finished_recving,
                failed_recving=finished.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
            if not output.total_num_scheduled_tokens and told.is_empty():
                told = None
            names = list(output.num_scheduled_tokens)
            results.append(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: at for at, name in enumerate(names)},
                    sampled_token_ids=[list(sampled[name]) for name in names],
                    kv_connector_output=told,
                )
            )
        return self.aggregator.aggregate(results) if self.ranks > 1 else results[0]

    def sample(self, output, step, in_flight):
        """The tokens that a step computes of each request, and those that it generates."""
        cached = output.scheduled_cached_reqs
        before = {new.req_id: (new.num_computed_tokens, True) for new in output.scheduled_new_reqs}
        for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            before[name] = (start, name in cached.resumed_req_ids)
        work, sampled = [], {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            start, is_fresh = before[name]
            if is_fresh or not self.is_async:
                # Of steps whose loads failed the scheduler has dropped what was generated.
                self.truth[name] = list(request.all_token_ids)
            else:
                # The scheduler counts on all drafts of steps under way.
                start -= sum(rejected.get(name, 0) for rejected in in_flight)
            truth = self.truth[name]
            drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
            known = count - len(drafts)
            sampled[name] = []
            tokens = truth[: start + known]
            if start + known >= len(truth):
                good = self.numbers.randint(0, len(drafts))
                new = [
                    drafts[at] if at < good and drafts[at] >= 0 else self.numbers.randrange(WORDS)
                    for at in range(good + 1)
                ]
                step.rejected[name] = len(drafts) - good
                tokens = [*truth, *new[:good], *[None] * (len(drafts) - good)]
                truth.extend(new)
                sampled[name] = new
            tables = [list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(name)]
            work.append((tables, tokens, start, start + count))
        return work, sampled

    def compute(self, content, tables, tokens, start, end):
        tokens = tokens[:end]
        right = kv_of(tokens)
        is_right = True
        for number, group in enumerate(self.groups):
            if group.is_draft or not start:
                continue
            held, wanted = self.attended(content, tables[number], number, group, start, right)
            is_right &= held == wanted
            check(
                held == wanted or self.failures or self.sibling_failures or self.is_off or None in tokens[:start],
                f"nothing failed, and what tokens {start} to {end} are computed from is wrong in {group}, {tables[number]}:",
                held,
                wanted,
            )
        # Of what is computed from a wrong token nothing is right.
        good = (
            next((at for at in range(start, end) if at >= len(tokens) or tokens[at] is None), end)
            if is_right
            else start
        )
        for number, group in enumerate(self.groups):
            size, table = group.block_tokens, tables[number]
            if group.word == "state":
                row = (number, right[end - 1]) if good == end else GARBAGE
                content[table[(end - 1) // size]][:] = [row]
                continue
            for at in range(start, end):
                slots = content[table[at // size]]
                if len(slots) != size:
                    slots[:] = [GARBAGE] * size
                slots[at % size] = (number, right[at]) if at < good else GARBAGE

    def attended(self, content, table, number, group, start, right):
        """What a group's layers read before they compute token `start`, and what it should be."""
        size = group.block_tokens
        if group.word == "state":
            return content[table[(start - 1) // size]], [(number, right[start - 1])]
        first = first_token(group.word, group.span, start)
        held = []
        for at in range(first, start):
            slots = content[table[at // size]]
            held.append(slots[at % size] if table[at // size] and len(slots) == size else GARBAGE)
        return held, [(number, row) for row in right[first:start]]

    def check_busy(self, rank):
        """Blocks that any copy uses are nobody else's."""
        pool = self.scheduler.kv_cache_manager.block_pool.blocks
        native = self.natives()[rank]
        for job in native.busy() if native else ():
            for block in job.table:
                check(pool[block].ref_cnt > 0, f"{job.job} copies, and its block {block} is free")
        if self.siblings:
            for request, start, end, table, _ in self.siblings[rank].under_way:
                for block in table[start // self.block_tokens : -(-end // self.block_tokens)]:
                    check(
                        pool[block].ref_cnt > 0, f"the other connector loads {request}, and its block {block} is free"
                    )

    def process(self):
        step = self.in_flight.pop(0)
        self.keep_truth()
        told = step.result.kv_connector_output
        self.says("  sampled", dict(zip(step.result.req_ids, step.result.sampled_token_ids, strict=True)))
        if told and told.invalid_block_ids:
            self.says("  failed", told.invalid_block_ids)
        self.scheduler.update_from_output(step.output, step.result)
        # vLLM 0.32 keeps what a request had reserved whose load failed as a whole. It counts against the request itself: its
        # next load between steps may never fit.
        for request in list(self.scheduler._inflight_prefills):
            if request.status == RequestStatus.WAITING and not request.num_computed_tokens:
                self.scheduler._inflight_prefills.discard(request)
        self.told |= step.freed
        if self.drafts and not self.is_async:
            names = [name for name in step.output.num_scheduled_tokens if name in self.scheduler.requests]
            drafts = [
                [self.numbers.randrange(WORDS) for _ in range(self.numbers.randint(0, self.drafts))] for _ in names
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def run(self):
        numbers = self.numbers
        self.pace = numbers.choice((0.1, 0.4, 0.9))
        to_come, steps = numbers.randint(2, 7), 0
        trouble = numbers.choice((0, 0.05, 0.15))
        while to_come or self.in_flight or self.scheduler.has_requests():
            steps += 1
            check(
                steps < MOST_STEPS, "it does not end:", {n: r.status.name for n, r in self.scheduler.requests.items()}
            )
            if steps % 100 == 0:
                self.end_vllm_s_deadlock()
            if to_come and (numbers.random() < 0.5 or not self.scheduler.has_requests()):
                to_come -= 1
                self.add_request()
            if numbers.random() < trouble:
                self.abort()
            if numbers.random() < trouble / 4:
                self.reset()
            self.go_on()
            if len(self.in_flight) < (2 if self.is_async else 1) and self.scheduler.has_requests():
                self.step()
                if self.is_async and len(self.in_flight) < 2:
                    continue
            self.go_on()
            if numbers.random() < trouble:
                self.abort()
            if self.in_flight:
                self.process()
            self.check_busy_after()
        self.end()

    def end_vllm_s_deadlock(self):
        """Requests that hold the blocks of loads between steps wait for more of them, and nobody runs who could give some."""
        waiting = [] if self.scheduler.running else self.scheduler.requests.values()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        for request in waiting:
            held = sum(map(len, self.scheduler.kv_cache_manager.get_block_ids(request.request_id)))
            is_loaded = request.status == RequestStatus.WAITING and request.num_computed_tokens > 0
            needed = sum(-(-request.num_tokens // group.block_tokens) for group in self.groups)
            if is_loaded and needed - held > free:
                self.says("vLLM is stuck, abort", request.request_id)
                self.keep_truth()
                return self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def check_busy_after(self):
        """Between steps only what was just preempted may be copied, until the next tells the workers; and anything, once
        kvgate is off."""
        if not self.scheduler.reset_preempted_req_ids and not self.is_off:
            for rank in range(self.ranks):
                self.check_busy(rank)

    def end(self):
        self.pace = 1
        for _ in range(5):
            self.go_on()
        # Reports come with a step.
        for _ in range(2):
            self.step()
            self.process()
        pool = self.scheduler.kv_cache_manager.block_pool
        check(pool.get_num_free_blocks() == self.blocks - 1, "blocks are lost")
        check(not self.scheduler.requests, "requests are left", self.scheduler.requests)
        if self.is_off:
            return
        side = self.side
        check(not side.requests, "requests are left", side.requests)
        for name in ("opaque", "wanted_back", "local", "new_loads"):
            check(not getattr(side, name), name, "is not empty:", getattr(side, name))
        check(not side.stores.open, "stores are left", side.stores.open)
        check(not side.blocks.kept and not side.blocks.copied, "blocks are left", side.blocks.kept, side.blocks.copied)
        check(not side.doubts.steps, "a step's loads were never told of")
        for connector in self.workers:
            worker = self.ours(connector).worker
            check(
                not (worker.loads or worker.stores or worker.received or worker.failed), "a worker has something left"
            )


class Overtaken(History):
    """A request is preempted in a step for which it was scheduled, and comes back as soon as the other one has ended."""

    def choose(self):
        super().choose()
        self.is_async = self.layerwise = self.throws = False
        self.sibling, self.failures, self.sibling_failures = None, 0, 0
        self.drafts, self.ranks, self.role = 0, 1, "kv_both"
        self.block_tokens, self.chunk_tokens, self.blocks, self.groups, self.eagle = (
            2,
            4,
            12,
            [Group("full", 0, 2)],
            False,
        )
        self.policy, self.seats, self.budget, self.long_prefill = "priority", 2, 8, 6

    def run(self):
        self.pace = 1
        self.add([at % WORDS for at in range(20)], 2, priority=1)
        self.step()
        self.process()
        self.add([2, 2, 2], 1, priority=0)
        was_overtaken = False
        while self.scheduler.has_requests():
            self.go_on()
            self.step()
            was_overtaken |= bool(self.in_flight[0].output.preempted_req_ids)
            self.process()
        check(was_overtaken, "nobody was preempted")
        self.end()


MODELS = {}


def first_token(word, span, start):
    """Of those that token `start` attends to, in other words than kvgate's."""
    match word:
        case "window":
            return max(0, start - (span - 1))
        case "chunked":
            return start - start % span
    return 0


def model_of(groups, chunk_tokens, eagle):
    key = (tuple(groups), chunk_tokens, eagle)
    if key not in MODELS:
        of_kinds = {}
        for number, group in enumerate(groups):
            of_kinds.setdefault((group.is_draft, group.word != "full", group.word, group.span), []).append(number)
        kinds = tuple(
            kind(word, span, is_draft, {number: groups[number].block_tokens for number in numbers}, chunk_tokens)
            for (is_draft, _, word, span), numbers in sorted(of_kinds.items())
        )
        MODELS[key] = Model(kinds, chunk_tokens, 0, 0, eagle, len(groups))
    return MODELS[key]


def kind(word, span, is_draft, blocks, chunk_tokens):
    space = {
        "model": "m",
        "revision": "1",
        "chunk_tokens": chunk_tokens,
        "kind": {word: span} if span else word,
        "draft": "eagle" if is_draft else "",
        "planes": [{"name": "kv", "layer": 0, "heads": 1, "row_bytes": 64}],
    }
    return Kind(Space(json.dumps(space)), word, span, is_draft, blocks, (), (), ())


def describe(vllm_config, kv_cache_config, settings, layers=None):
    return world.model


TEMPLATE = {
    "model_config": SimpleNamespace(
        uses_mrope=False,
        is_encoder_decoder=False,
        is_diffusion=False,
        runner_type="generate",
        max_model_len=MOST_TOKENS + 8,
        supports_multimodal_inputs=False,
        multimodal_config=None,
        enable_return_routed_experts=False,
        enable_return_sampling_mask=False,
        is_prefix_caching_supported=True,
        return_sampling_mask=False,
    ),
    "observability_config": ObservabilityConfig(),
    "aux_output_config": SimpleNamespace(enabled=False),
    "ec_manager_config": SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
    "structured_outputs_config": None,
    "watermark_config": None,
    "instance_id": "histories",
    **dict.fromkeys(("lora_config", "kv_events_config", "ec_transfer_config", "diffusion_config", "additional_config")),
}


def stand_in():
    """For what is in Rust, and what asks the model."""
    scheduler_module.Lookups = Lookups
    connector_module.describe = describe
    connector_module.items_have_digests = lambda *_: True
    connector_module.needs_whole_prompts = lambda *_: False
    worker_module.Worker = Worker
    VllmConfig.use_v2_model_runner = property(lambda self: False)
    # Its first line is of no use, thousands of times.
    sys.modules.setdefault("histories", sys.modules[__name__])


stand_in()

if __name__ == "__main__":
    History(int(sys.argv[1]), print).run()
