"""Random histories of an engine without its model: vLLM's real scheduler, the connector's two sides, and a model of what each
block holds. See test_histories.py.

python tests/engines/histories.py SEED      one history again, step by step
"""

import copy
import functools
import os
import random
import sys
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from kvgate import Prompt, Space
from kvgate.vllm import connector as connector_module
from kvgate.vllm import scheduler as scheduler_module
from kvgate.vllm import worker as worker_module
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
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

GARBAGE = -1
MOST_TOKENS = 40
"""Of a request, with what it generates."""
MOST_STEPS = 600
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

    def __init__(self, *settings):
        self.prompts, self.outdated = {}, set()

    def ask(self, request, prompt):
        self.prompts[request] = prompt
        self.outdated.discard(request)

    def is_due(self, request):
        return request not in self.prompts or request in self.outdated or world.numbers.random() < 0.05

    def is_old(self, request):
        return self.is_due(request)

    def outdate(self, request):
        if request in self.prompts:
            self.outdated.add(request)

    def answer(self, request):
        prompt = self.prompts.get(request)
        if prompt is None or world.numbers.random() < 0.2:
            return None
        hashes = prompt.hashes(0, len(prompt))
        for at in range(0, len(hashes), 32):
            if hashes[at : at + 32] not in world.gateway:
                return at // 32
        return len(prompt)

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
    def __init__(self, name, kind, chunks, table, tokens=None, by=None):
        self.job, self.kind, self.chunks, self.table, self.tokens, self.by = name, kind, chunks, table, tokens, by
        self.state = "wanted"
        self.there, self.missing = [], []
        # The real jobs report these, too.
        self.stored = self.refused = self.bytes = 0
        self.seconds, self.error = 0.01, None


class Worker:
    """A rank's jobs, which go on whenever the history says so, in any order."""

    def __init__(self, rank):
        self.rank, self.content = rank, world.content[rank]
        self.jobs = {}
        self.ended, self.free = {"load": [], "store": []}, []

    def load(self, job, hashes, first_token, tokens, table, stream=None, by_layer=False):
        check(first_token == 0, "a load's table begins with its first chunk")
        chunks = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        self.jobs[job] = Job(job, "load", chunks, list(table), tokens)
        if by_layer:
            self.end(self.jobs[job])

    def store(self, job, hashes, parent, first_token, table, stream=None):
        check(first_token == 0 and job not in self.jobs, "a store of its own")
        if world.numbers.random() < 0.03:
            world.freed.add((self.rank, job))
            raise RuntimeError("this store could not be begun")
        chunks = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        check(len(table) == len(chunks) * world.chunk_blocks, "a store has its chunks' blocks alone", table)
        self.jobs[job] = Job(job, "store", chunks, list(table))

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
                job.refused = len(job.chunks)
                self.free.append(job.job)
                self.end(job)
            else:
                job.state = "copying"
        else:
            self.copy(job)

    def copy(self, job):
        for index, chunk in enumerate(job.chunks):
            at = index * world.chunk_blocks
            blocks = job.table[at : at + world.chunk_blocks]
            held = [slot for block in blocks for slot in self.content[block]]
            right = world.kv_of_chunk(chunk)
            check(held == right, f"{job.job} stores wrong KV of chunk {index} out of blocks {blocks}")
            if world.numbers.random() < 0.9:
                job.there.append(index)
        job.state = "copied"
        self.free.append(job.job)

    def end(self, job):
        del self.jobs[job.job]
        if job.kind == "store":
            world.published(self.rank, [job.chunks[index] for index in job.there], job)
        else:
            start, end = job.tokens
            some = end if world.numbers.random() > world.failures else world.numbers.randrange(start, end)
            size = world.block_tokens
            kv = [slot for chunk in job.chunks for slot in world.kv_of_chunk(chunk)]
            for token in range(start, end):
                self.content[job.table[token // size]][token % size] = kv[token] if token < some else GARBAGE
            job.missing = [index for index in range(len(job.chunks)) if (index + 1) * world.chunk_tokens > some < end]
            # Tokens of the first missing chunk before `some` have come, which nobody knows.
        self.ended[job.kind].append(job)

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

    def wait_layer(self, plane):
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
            self.content[table[token // size]][token % size] = kv[token] if token < some else GARBAGE

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


class History:
    SIBLINGS = (None, "sync", "sync", "async")

    def __init__(self, seed, says=lambda *_: None, module_path=None):
        global world
        world = self
        self.says = says
        self.numbers = random.Random(seed)
        self.choose()
        self.content = [[[GARBAGE] * self.block_tokens for _ in range(self.blocks)] for _ in range(self.ranks)]
        self.gateway, self.of_chunk, self.published_by = set(), {}, {}
        self.epochs, self.siblings, self.known = [b""], [], set()
        self.truth, self.rejected = {}, {}
        self.names = 0
        self.space = space_of(self.chunk_tokens)
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
        self.chunk_blocks = numbers.choice((1, 2, 3))
        self.chunk_tokens = self.block_tokens * self.chunk_blocks
        self.layerwise = not self.is_async and numbers.random() < 0.25
        self.sibling = numbers.choice(self.SIBLINGS)
        self.sibling_delivers, self.sends = numbers.random() < 0.3, numbers.random() < 0.3
        self.failures = numbers.choice((0, 0.2, 0.5))
        self.sibling_failures = numbers.choice((0, 0.2))
        if self.is_async and self.sibling == "sync":
            # vLLM itself goes on from a load within the step that failed.
            self.sibling_failures = 0
        self.drafts = numbers.choice((0, 0, 1, 3))
        self.role = numbers.choice(("kv_both", "kv_both", "kv_both", "kv_producer", "kv_consumer"))
        needed = -(-MOST_TOKENS // self.block_tokens)
        self.blocks = needed + numbers.choice((0, 2, 4, needed // 2)) + 4
        self.policy = numbers.choice(("fcfs", "fcfs", "priority"))
        self.seats = numbers.choice((2, 4))
        self.budget = max(numbers.choice((4, 8, 16, 64)), self.drafts + 1)
        # vLLM itself asserts that what it pads with drafts is below it.
        self.long_prefill = numbers.choice((0, 0, max(3, self.drafts + 1), 6))
        self.throws = numbers.random() < 0.1

    # ---- what there is

    def build(self):
        numbers, fixed = self.numbers, {"fixed_weights": True} if self.numbers.random() < 0.5 else {}
        ours = {
            "kv_connector": "KvGateConnector",
            "kv_connector_module_path": "kvgate.vllm",
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
                method="ngram",
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
                # As vLLM sets it: kvgate's connector does not claim `SupportsHMA`.
                disable_hybrid_kv_cache_manager=True,
                prefill_schedule_interval=1,
            ),
            cache_config=SimpleNamespace(
                block_size=self.block_tokens,
                num_gpu_blocks=self.blocks,
                enable_prefix_caching=True,
                mamba_cache_mode="none",
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
        spec = FullAttentionSpec(block_size=self.block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(self.blocks, [], [KVCacheGroupSpec(["layers.0"], spec)])
        scheduler = AsyncScheduler if self.is_async else Scheduler
        self.scheduler = scheduler(config, cache, Structured(), block_size=self.block_tokens, log_stats=False)
        self.workers = []
        for rank in range(self.ranks):
            config.parallel_config = copy.copy(config.parallel_config)
            config.parallel_config.rank = rank
            own = type(self.scheduler.connector)(config, KVConnectorRole.WORKER, cache)
            self.workers.append(own)
            native = self.ours(own).worker
            native.worker = Worker(rank)
        for rank, sibling in enumerate(self.siblings):
            sibling.content = self.content[rank]
        self.aggregator = KVOutputAggregator(self.ranks)
        self.hasher = get_request_block_hasher(self.block_tokens, sha256)
        self.side = self.ours(self.scheduler.connector).scheduler
        self.finish, self.side.finished = self.side.finished, self.finished
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

    def finished(self, request):
        """The connector's, which may keep blocks only for a copy that is not known to have ended."""
        name = request.request_id
        is_held = self.finish(request)
        if is_held:
            open_jobs = [job for job, store in self.side.open_stores.items() if store.request == name]
            all_told = all((rank, job) in self.told for job in open_jobs for rank in range(self.ranks))
            check(open_jobs and not all_told, f"{name}'s blocks are kept, and nothing copies them")
        return is_held

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

    def published(self, rank, chunks, job):
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
            self.gateway.update(prompt.hashes(chunk, chunk + 1) for chunk in range(numbers.randint(0, full)))
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
        self.scheduler.reset_prefix_cache(preempts, reset_connector=self.numbers.random() < 0.5)
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
        held = [store for store in self.side.open_stores.values() if store.is_held and store.copying]
        before = set(self.scheduler.reset_preempted_req_ids)
        output = self.scheduler.schedule()
        for name in output.preempted_req_ids - before:
            check(self.is_off or not held, f"{name} is preempted, and blocks of finished requests come free")
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
            table = self.scheduler.kv_cache_manager.get_block_ids(store.request)[0]
            first = self.side.open_stores[store.job].first * self.chunk_blocks
            right = table[first : first + len(store.block_table)]
            check(store.block_table == right, store.job, "names blocks", store.block_table, "of", right)

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
            for table, tokens, start, end in work:
                self.compute(self.content[rank], table, tokens, start, end)
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
            table = list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])
            work.append((table, tokens, start, start + count))
        return work, sampled

    def compute(self, content, table, tokens, start, end):
        size = self.block_tokens
        tokens = tokens[:end]
        right = kv_of(tokens)
        held = [slot for block in table[: -(-start // size)] for slot in content[block]][:start]
        is_right = held == right[:start]
        check(
            is_right or self.failures or self.sibling_failures or self.is_off or None in tokens[:start],
            f"nothing failed, and what tokens {start} to {end} are computed from is wrong in blocks {table}",
        )
        for at in range(start, end):
            good = is_right and at < len(tokens) and tokens[at] is not None
            is_right = good
            content[table[at // size]][at % size] = right[at] if good else GARBAGE

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
            held = len(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])
            is_loaded = request.status == RequestStatus.WAITING and request.num_computed_tokens > 0
            if is_loaded and -(-request.num_tokens // self.block_tokens) - held > free:
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
        for name in ("opaque", "open_stores", "to_free", "wanted_back", "local", "new_loads"):
            check(not getattr(side, name), name, "is not empty:", getattr(side, name))
        check(not side.doubts.steps, "a step's loads were never told of")
        for connector in self.workers:
            worker = self.ours(connector).worker
            check(not (worker.loads or worker.stores or worker.over or worker.received), "a worker has something left")


class Overtaken(History):
    """A request is preempted in a step for which it was scheduled, and comes back as soon as the other one has ended."""

    def choose(self):
        super().choose()
        self.is_async = self.layerwise = self.throws = False
        self.sibling, self.failures, self.sibling_failures = None, 0, 0
        self.drafts, self.ranks, self.role = 0, 1, "kv_both"
        self.block_tokens, self.chunk_blocks, self.chunk_tokens, self.blocks = 2, 2, 4, 12
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


SPACES = {}


def space_of(chunk_tokens):
    if chunk_tokens not in SPACES:
        mha = '{"layers": 1, "heads": 1, "head_dim": 8}'
        SPACES[chunk_tokens] = Space(f'{{"model": "m", "revision": "1", "chunk_tokens": {chunk_tokens}, "mha": {mha}}}')
    return SPACES[chunk_tokens]


def describe(vllm_config, kv_cache_config, settings):
    return SimpleNamespace(
        space=world.space, layers=["layers.0"], heads=(0, 1), block_tokens=vllm_config.cache_config.block_size
    )


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
