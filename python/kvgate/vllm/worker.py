"""A rank's side: its tensors, and the jobs that move chunks in and out of them."""

import json
import time

from vllm.logger import init_logger

from kvgate import Worker
from kvgate.tensors import describe
from kvgate.vllm.metadata import WorkerReport, request_of
from kvgate.vllm.stats import KvGateStats

logger = init_logger(__name__)


class WorkerSide:
    def __init__(self, model, settings, parallel, instance):
        self.model, self.settings = model, settings
        self.attach = {
            "instance": instance,
            "rank": parallel.rank % parallel.tensor_parallel_size,
            "world_size": parallel.tensor_parallel_size,
        }
        if parallel.tensor_parallel_size > 1:
            self.attach["heads"] = list(model.heads)
        self.kv_caches = None
        self.worker = None
        """None while the engine sleeps, too."""
        self.loads: dict[str, object] = {}
        self.stores: set[str] = set()
        """Jobs that need their request's blocks."""
        self.over: set[str] = set()
        """Finished requests whose blocks are not known to be free."""
        self.received: set[str] = set()
        """Requests whose loads have ended."""
        self.failed_blocks: set[int] = set()
        self.report = WorkerReport()
        self.stats = KvGateStats()
        self.is_attached = None
        """Whether there was a session when it was looked at last; None: there was none yet."""

    # ---- the engine's memory

    def register(self, kv_caches):
        self.kv_caches = kv_caches
        device = next(iter(kv_caches.values())).device
        tensors = [self.tensor(plane, name, kv_caches[name]) for plane, name in enumerate(self.model.layers)]
        settings = {
            "socket": self.settings.socket,
            "socket_owner": self.settings.socket_owner,
            "attach": self.attach,
            "tensors": tensors,
            "device": None if device.type == "cpu" else device.index or 0,
        }
        for name in ("load_deadline_ms", "store_deadline_ms", "patience_ms", "breaker_timeouts", "breaker_pause_ms"):
            settings[name] = getattr(self.settings, name)
        self.worker = Worker(json.dumps(settings), self.model.space)

    def tensor(self, plane, name, tensor):
        """As `kvgate` describes tensors: by the meaning of their axes."""
        axes = axes_of(tensor.shape, self.model.block_tokens)
        if axes is None:
            raise ValueError(
                f"kvgate does not know KV tensors of shape {tuple(tensor.shape)} with blocks of "
                f"{self.model.block_tokens} tokens ({name}): run without kvgate, and report it"
            )
        return describe(tensor, axes, plane, self.model.heads if "H" in axes else None)

    def unregister(self):
        """Before the memory goes; what is under way ends first."""
        if self.worker is not None:
            self.worker.close()
            self.collect()
            self.worker = None

    def restore(self):
        if self.worker is None and self.kv_caches is not None:
            self.register(self.kv_caches)

    # ---- steps

    def load(self, loads, stream, by_layer=False):
        for load in loads:
            began = time.monotonic()
            try:
                self.need_worker().load(load.job, load.hashes, 0, load.tokens, load.block_table, stream, by_layer)
            except Exception as error:
                # It is computed.
                logger.warning("kvgate: a load of %s could not be begun: %s", load.request, error)
                self.fail(load, 0)
                self.end(load, time.monotonic() - began)
            else:
                self.loads[load.job] = load

    def wait_layer(self, name):
        """Until this layer of all loads is in its pages."""
        if self.worker is not None and self.loads and name in self.model.layers:
            self.worker.wait_layer(self.model.layers.index(name))

    def wait_layers(self):
        if self.worker is not None and self.loads:
            self.worker.wait_layers()
            self.collect()

    def store(self, stores, stream):
        for store in stores:
            try:
                self.need_worker().store(store.job, store.hashes, store.parent, 0, store.block_table, stream)
            except Exception as error:
                logger.warning("kvgate: a store of %s could not be begun: %s", store.request, error)
                self.report.stored[store.job] = (1, set())
                self.report.freed[store.job] = 1
            else:
                self.stores.add(store.job)

    def need_worker(self):
        if self.worker is None:
            raise RuntimeError("the engine's memory is not registered: it sleeps")
        return self.worker

    def take_back(self, requests):
        """Their blocks are vLLM's after this: what is being copied out of them ends, the rest never begins."""
        if jobs := [job for job in self.stores if request_of(job) in requests]:
            self.worker.take_back(jobs)

    def take_all_back(self):
        if self.stores and self.worker is not None:
            self.worker.take_back(list(self.stores))

    def lose(self, lost):
        """Loads that never begin, and that vLLM waits for."""
        for request, blocks in lost.items():
            self.received.add(request)
            self.failed_blocks.update(blocks)

    def give_up(self, loads=(), stores=()):
        """Nothing more is copied. What is under way ends first, and counts as failed, as do these that were not begun: nobody
        waits for any of it."""
        worker, self.worker, self.kv_caches = self.worker, None, None
        if worker is not None:
            worker.close()
        for load in [*self.loads.values(), *loads]:
            self.fail(load, 0)
            self.end(load, 0.0)
        for job in (*self.stores, *(store.job for store in stores)):
            self.report.stored[job] = (1, set())
            self.report.freed[job] = 1
        self.stores = set()

    def results(self, finished_requests):
        """Finished requests whose blocks are free, and requests whose loads have ended, since the last call."""
        self.collect()
        self.over |= finished_requests
        sent = self.over - {request_of(job) for job in self.stores}
        self.over -= sent
        received, self.received = self.received, set()
        return sent, received

    def collect(self):
        if self.worker is None:
            return
        self.watch_session()
        for ended in self.worker.loaded():
            load = self.loads[ended.job]
            self.stats.loaded(ended)
            if ended.missing:
                logger.info("kvgate: %s computes what was not loaded: %s", load.request, ended.error)
                self.fail(load, min(ended.missing))
            self.end(load, ended.seconds)
        for job in self.worker.freed():
            self.stores.discard(job)
            self.report.freed[job] = 1
        for ended in self.worker.stored():
            self.stats.stored(ended)
            self.report.stored[ended.job] = (1, set(ended.there))
            if ended.error:
                logger.debug("kvgate: %s was not stored: %s", ended.job, ended.error)

    def watch_session(self):
        """One line when it is lost and one when it is back, by one rank."""
        is_attached = self.worker.is_attached()
        was_attached = self.is_attached
        if is_attached is None or is_attached == was_attached or (was_attached is None and not is_attached):
            return
        self.is_attached = is_attached
        if self.attach["rank"] != 0 or was_attached is None:
            return
        if is_attached:
            logger.info("kvgate: the gateway at %s is back", self.settings.socket)
        else:
            logger.warning(
                "kvgate: the session with the gateway at %s is lost, everything is computed until it is back: is kvgate "
                "serve running?",
                self.settings.socket,
            )

    def end(self, load, seconds):
        self.loads.pop(load.job, None)
        self.received.add(load.request)
        self.report.loaded[load.job] = (1, seconds)

    def fail(self, load, chunk):
        """All blocks from this chunk of the load on are not there."""
        first = max(load.tokens[0], chunk * self.model.space.chunk_tokens)
        block_tokens = self.model.block_tokens
        self.failed_blocks.update(load.block_table[first // block_tokens : -(-load.tokens[1] // block_tokens)])

    def take_failed_blocks(self):
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def take_report(self, loads_within=None):
        """After a step; None: there is nothing to tell."""
        report, self.report = self.report, WorkerReport()
        if loads_within is not None:
            report.steps[loads_within] = 1
        return report or None

    def close(self):
        self.unregister()


def axes_of(shape, block_tokens):
    """vLLM's layouts; None: one that is not known."""
    known = {
        3: ["BNC"],
        4: ["BHNC"],
        5: ["KBNHD", "BKNHD"],
    }
    for axes in known.get(len(shape), ()):
        is_kv = "K" not in axes or shape[axes.index("K")] == 2
        if is_kv and shape[axes.index("N")] == block_tokens:
            return axes
    return None
