"""What histories have in place of kvgate's Rust and of another connector: each goes on whenever the history says so. See
histories.py."""

import os
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from kvgate.vllm import connector as connector_module
from kvgate.vllm import scheduler as scheduler_module
from kvgate.vllm import worker as worker_module
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

GARBAGE = -1

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

    def ask(self, request, prompt, most, _traceparent=None):
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

    @property
    def part(self):
        """Which of the kinds of KV that are in the same blocks."""
        others = world.model.kinds[: self.number]
        return sum(not self.kind.blocks.keys().isdisjoint(other.blocks) for other in others)

    def rows(self, chunk, group):
        """What is to be in a group's blocks of one of its chunks, on all ranks."""
        kv = world.kv_of_chunk(chunk)
        if self.kind.word == "state":
            return [(group, self.part, kv[-1])]
        return [(group, self.part, slot) for slot in kv]


class Worker:
    """A rank's jobs, which go on whenever the history says so, in any order."""

    def __init__(self, rank):
        self.rank, self.content = rank, world.content[rank]
        self.jobs = {}
        self.ended, self.free = {"load": [], "store": []}, []

    def load(self, job, parts, stream=None, by_layer=False, _traceparent=None):
        self.jobs[job] = Job(job, "load", [Part(*part) for part in parts])
        for part in self.jobs[job].parts:
            for group, ((start, end), table) in part.tables.items():
                size = 1 if part.kind.word == "state" else part.kind.blocks[group]
                check(0 not in table[start // size : -(-end // size)], job, "writes to the null block", table)
        if by_layer:
            self.end(self.jobs[job])

    def store(self, job, parts, stream=None, _traceparent=None):
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
                    held = [slot for block in own for slot in self.content[part.part][block]]
                    right = [row for at, row in enumerate(part.rows(chunk, group)) if self.place(part, group, at)]
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
            rows_of_chunk = 1 if part.kind.word == "state" else world.chunk_tokens
            first = min(start for (start, _), _ in part.tables.values())
            last = max(end for (_, end), _ in part.tables.values())
            some = world.numbers.randrange(first, last) if part is broken else last
            for group, ((start, end), table) in part.tables.items():
                rows = [row for chunk in part.chunks for row in part.rows(chunk, group)]
                for token in range(start, end):
                    if (place := self.place(part, group, token)) is not None:
                        size = 1 if part.kind.word == "state" else world.groups[group].block_tokens
                        row = rows[token] if token < some else GARBAGE
                        world.write(self.rank, part.part, table[place[0]], size, place[1], row)
            missing = [at for at in range(len(part.chunks)) if (at + 1) * rows_of_chunk > some < last]
            # Tokens of the first missing chunk before `some` have come, which nobody knows.
            if part.kind.is_draft:
                job.missing_drafts += len(missing)
            else:
                job.missing.extend((part.number, at) for at in missing)

    def fails(self):
        return world.numbers.random() < world.failures

    def place(self, part, group, at):
        """Of a row, in blocks as long as the kind's."""
        return (at, 0) if part.kind.word == "state" else world.place(self.rank, world.groups[group], at)

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
            row = (0, 0, kv[token]) if token < some else GARBAGE
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


# ---- their places


def describe(vllm_config, kv_cache_config, settings, layers=None):
    return world.model


def stand_in():
    """For what is in Rust, and what asks the model."""
    scheduler_module.Lookups = Lookups
    connector_module.describe = describe
    connector_module.items_have_digests = lambda *_: True
    connector_module.needs_whole_prompts = lambda *_: False
    worker_module.Worker = Worker
    worker_module.get_dcp_group = lambda: SimpleNamespace(
        rank_in_group=world.config.parallel_config.rank % world.dealt_to
    )
    VllmConfig.use_v2_model_runner = property(lambda self: False)


stand_in()
