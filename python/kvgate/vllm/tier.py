"""kvgate below the CPU tier of vLLM's own offloading (`OffloadingConnector`), as one of its `secondary_tiers`.

vLLM's scheduler decides which pages go down and come up, for all kinds of models. It calls this tier under a lock, so no call
here waits for the gateway: lookups and copies go on in the extension's threads, and their outcomes are collected in each
step. A page is a chunk of kvgate's under vLLM's own hash; `pages` says what its space pins. What the gateway does not answer,
or not in time, is a miss.
"""

import ctypes
import dataclasses
import json
import uuid
from collections.abc import Iterable

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvgate import PageLookups, Worker
from kvgate._native import PanicException
from kvgate.vllm import gateway, pages
from kvgate.vllm.guard import guarded
from kvgate.vllm.settings import TierSettings

logger = init_logger(__name__)

NO_PARENT = bytes(32)
SMALL_BYTES, GOOD_BYTES = 1 << 20, 4 << 20
"""Of an object: S3 answers many small ones slowly."""


@dataclasses.dataclass
class Asked:
    """What a request wants to know."""

    there: dict[bytes, bool | None] = dataclasses.field(default_factory=dict)
    """By vLLM's key; None: not known yet. After a load that failed it stays false, or vLLM would try for ever."""
    ends: dict[tuple[int, int], bytes] = dataclasses.field(default_factory=dict)
    """Hashes by group and the token at which their pages end, so that a page's parent is known."""


class KvGateTier(SecondaryTierManager):
    medium = Medium.STORAGE
    # The gateway's memory, its disks or S3: vLLM asks for a class, not for a page.
    cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec,
        primary_kv_view,
        tier_type,
        backpressure_detector=None,
        locality=None,
        enable_kv_events=False,
        **given,
    ):
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.settings = TierSettings.read(given)
        self.locality = Locality(locality) if locality is not None else None
        self.has_events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self.count, self.page_bytes = primary_kv_view.shape[0], primary_kv_view.strides[0]
        if not self.count:
            raise ValueError(f"cpu_bytes_to_use is less than a page, which has {self.page_bytes} bytes: give it more")
        self.is_off = False
        self.groups = pages.describe(offloading_spec, self.page_bytes, self.settings)
        self.tell_sizes(offloading_spec.blocks_per_chunk)
        gateway.ensure(self.settings)
        self.requests: dict[str, Asked] = {}
        self.new: dict[tuple[str, int], list[bytes]] = {}
        """Keys to be asked for at the end of the step, by request and group."""
        self.questions: dict[int, tuple[str, list[bytes]]] = {}
        self.asked = 0
        self.is_answered = False
        """Answers were looked for in this step."""
        self.jobs: dict[str, object] = {}
        self.storing_bytes = 0
        self.finished: list[JobResult] = []
        self.events: list[OffloadingEvent] = []
        self.begin()

    def tell_sizes(self, blocks):
        if self.page_bytes >= SMALL_BYTES:
            return
        logger.info(
            "kvgate: each of vLLM's chunks is an object of %d KiB: set blocks_per_chunk to %d in kv_connector_extra_config for "
            "objects of some MiB",
            self.page_bytes >> 10,
            blocks * -(-GOOD_BYTES // self.page_bytes),
        )

    def begin(self):
        """The native side, for the groups of now."""
        settings = self.settings
        self.of_group = {group.number: index for index, group in enumerate(self.groups)}
        spaces = [group.space for group in self.groups]
        memory = {
            "address": ctypes.addressof(ctypes.c_char.from_buffer(self._primary_kv_view)),
            "bytes": self.count * self.page_bytes,
            # A page is one row.
            "axes": "BNC",
            "shape": [self.count, 1, self.page_bytes],
            "strides": [self.page_bytes, self.page_bytes, 1],
            "element_bytes": 1,
            "planes": [0],
        }
        instance = uuid.uuid4().hex
        names = ("load_deadline_ms", "store_deadline_ms", "patience_ms", "breaker_timeouts", "breaker_pause_ms")
        worker = {
            "socket": settings.socket,
            "socket_owner": settings.socket_owner,
            "attach": {"instance": instance},
            "kinds": [{"groups": [[memory]]} for _ in spaces],
            "device": None,
            **{name: getattr(settings, name) for name in names},
        }
        self.worker = Worker(json.dumps(worker), spaces)
        self.lookups = PageLookups(
            settings.socket,
            spaces,
            settings.lookup_deadline_ms,
            settings.pin_ms,
            settings.breaker_timeouts,
            settings.breaker_pause_ms,
            settings.lookups_at_once,
            settings.socket_owner,
        )

    # ---- lookups

    @guarded(lambda tier, *_: LookupResult.MISS)
    def lookup(self, key, req_context):
        asked = self.requests.setdefault(req_context.req_id, Asked())
        if key not in asked.there:
            asked.there[key] = None
            self.note(key, req_context, asked)
            self.new.setdefault((req_context.req_id, get_offload_group_idx(key)), []).append(key)
            return LookupResult.RETRY
        if not self.is_answered:
            self.is_answered = True
            self.take_answers()
        match asked.there[key]:
            case None:
                return LookupResult.RETRY
            case there:
                return LookupResult.HIT if there else LookupResult.MISS

    def take_answers(self):
        for number, there in self.lookups.answers():
            request, keys = self.questions.pop(number, ("", ()))
            if (asked := self.requests.get(request)) is not None:
                asked.there.update(zip(keys, map(bool, there), strict=True))

    def note(self, key, req_context, asked):
        """Where in the prompt it is, if vLLM says so. Returns the hash before it."""
        group = self.groups[self.of_group[get_offload_group_idx(key)]]
        end = req_context.get_offload_key_position(key)
        if end is None or not group.is_chain:
            return NO_PARENT
        asked.ends[group.number, end] = get_offload_block_hash(key)
        return asked.ends.get((group.number, end - group.chunk_tokens), NO_PARENT)

    @guarded()
    def on_schedule_end(self, context):
        self.is_answered = False
        for (request, number), keys in self.new.items():
            index = self.of_group[number]
            self.asked += 1
            self.questions[self.asked] = (request, keys)
            hashes = b"".join(get_offload_block_hash(key) for key in keys)
            self.lookups.ask(self.asked, index, hashes, self.groups[index].is_chain)
        self.new = {}

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def on_request_finished(self, req_context):
        self.requests.pop(req_context.req_id, None)

    # ---- jobs

    @guarded(lambda tier, job: tier.end(job, False))
    def submit_store(self, job):
        asked = self.requests.setdefault(job.req_context.req_id, Asked())
        wanted = len(job.keys) * self.page_bytes
        most = self.count * self.page_bytes * self.settings.store_share // 100
        # The first one always may.
        if len(self.jobs) >= self.settings.jobs_at_once or (self.storing_bytes and self.storing_bytes + wanted > most):
            return self.end(job, False)
        kinds = []
        for index, (keys, chunks) in self.by_group(job).items():
            hashes = b"".join(get_offload_block_hash(key) for key in keys)
            parents = b"".join(self.note(key, job.req_context, asked) for key in keys)
            kinds.append((index, hashes, parents, [chunks]))
        name = str(job.job_id)
        self.worker.store(name, kinds)
        self.jobs[name] = job
        self.storing_bytes += wanted

    @guarded(lambda tier, job: tier.end(job, False))
    def submit_load(self, job):
        if len(self.jobs) >= self.settings.jobs_at_once:
            return self.end(job, False)
        kinds = []
        for index, (keys, chunks) in self.by_group(job).items():
            hashes = b"".join(get_offload_block_hash(key) for key in keys)
            kinds.append((index, hashes, [((0, len(keys)), chunks)]))
        name = str(job.job_id)
        self.worker.load(name, kinds)
        self.jobs[name] = job

    def by_group(self, job):
        """Keys of each group, and where vLLM's CPU tier has their pages."""
        found = {}
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            keys, chunks = found.setdefault(self.of_group[get_offload_group_idx(key)], ([], []))
            keys.append(key)
            chunks.append(int(chunk))
        return found

    @guarded(lambda tier: tier.take_finished())
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self.collect()
        return self.take_finished()

    def collect(self):
        for loaded in self.worker.loaded():
            job = self.jobs[loaded.job]
            missing = self.keys_of(job, loaded.missing)
            if missing:
                logger.info("kvgate: %d of %d pages were not loaded: %s", len(missing), len(job.keys), loaded.error)
            self.end(job, not missing, loaded.seconds, missing)
        for stored in self.worker.stored():
            job = self.jobs[stored.job]
            self.storing_bytes -= len(job.keys) * self.page_bytes
            there = self.keys_of(job, stored.there)
            if stored.error:
                logger.debug("kvgate: pages were not stored: %s", stored.error)
            if there and self.has_events:
                self.events.append(OffloadingEvent(list(there), self.medium, removed=False, locality=self.locality))
            self.end(job, len(there) == len(job.keys), stored.seconds)

    def keys_of(self, job, places):
        """Places are (kind, index in the kind's keys)."""
        of_group = self.by_group(job)
        return {of_group[kind][0][index] for kind, index in places}

    def end(self, job, is_whole, seconds=None, missing=None):
        """Tells vLLM, once. `missing`: of a load; without it none of its pages came."""
        self.jobs.pop(str(job.job_id), None)
        came = None
        if job.is_promotion and not is_whole:
            missing = set(job.keys) if missing is None else missing
            came = [key for key in job.keys if key not in missing]
            if (asked := self.requests.get(job.req_context.req_id)) is not None:
                asked.there.update(dict.fromkeys(missing, False))
        self.finished.append(JobResult(job.job_id, is_whole, came, transfer_time=seconds))

    def take_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def take_events(self):
        events, self.events = self.events, []
        return events

    # ---- ends

    @guarded()
    def drain_jobs(self):
        """vLLM resets its cache, maybe for new weights: then pages of before are not this engine's any more. The jobs' results
        come with the next `get_finished_jobs`."""
        self.give_up()
        # All that is known is asked for again.
        self.requests, self.new, self.questions = {}, {}, {}
        if not self.settings.fixed_weights:
            epoch = uuid.uuid4().hex
            self.groups = [group.of_epoch(epoch) for group in self.groups]
        self.begin()

    def shutdown(self):
        self.give_up()

    def give_up(self):
        """When this returns nothing touches vLLM's memory. What was under way has failed, unless it was just done."""
        if self.worker is None:
            return
        try:
            self.worker.close()
            self.collect()
        except (Exception, PanicException) as error:
            logger.error("kvgate: the outcome of some jobs is lost: %s", error)
        for job in list(self.jobs.values()):
            self.end(job, False)
        self.storing_bytes, self.worker = 0, None

    def _turn_off(self, why):
        """A bug: vLLM goes on as if there were no kvgate."""
        logger.error("kvgate is off until the engine is started again, nothing is loaded or stored: %s", why)
        logger.debug("kvgate: where it was", exc_info=True)
        self.is_off = True
        self.give_up()
