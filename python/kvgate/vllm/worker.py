"""A rank's side: its tensors, and the jobs that move chunks in and out of them."""

import json

from vllm.logger import init_logger

from kvgate import Worker
from kvgate.tensors import describe

logger = init_logger(__name__)


class WorkerSide:
    def __init__(self, model, settings, parallel, instance):
        self.model, self.settings = model, settings
        self.attach = {
            "instance": instance,
            "rank": parallel.rank % parallel.tensor_parallel_size,
            "world_size": parallel.tensor_parallel_size,
        }
        if model.heads[1] - model.heads[0] > 0 and parallel.tensor_parallel_size > 1:
            self.attach["heads"] = list(model.heads)
        self.worker = None
        self.loads: dict[str, object] = {}
        self.stores: dict[str, int] = {}
        """Jobs under way, by request."""
        self.over: set[str] = set()
        """Finished requests whose stores are under way."""
        self.failed_blocks: set[int] = set()
        self.not_begun: set[str] = set()
        """Requests whose loads could not be begun."""
        self.jobs = 0

    def register(self, kv_caches):
        device = next(iter(kv_caches.values())).device
        tensors = [self.tensor(plane, name, kv_caches[name]) for plane, name in enumerate(self.model.layers)]
        settings = {
            "socket": self.settings.socket,
            "attach": self.attach,
            "tensors": tensors,
            "device": None if device.type == "cpu" else device.index or 0,
        }
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

    def load(self, loads):
        for load in loads:
            job = f"{load.request}#{load.attempt}"
            try:
                self.worker.load(
                    job, load.hashes, load.first_token, load.tokens, load.block_table, self.settings.load_deadline_ms
                )
            except Exception as error:
                # It is computed.
                logger.warning("kvgate: %s", error)
                self.fail(load, 0)
                self.not_begun.add(load.request)
            else:
                self.loads[job] = load

    def store(self, stores, stream):
        for store in stores:
            self.jobs += 1
            self.stores.setdefault(store.request, 0)
            try:
                self.worker.store(
                    f"{store.request}#s{self.jobs}",
                    store.hashes,
                    store.parent,
                    store.first_token,
                    store.block_table,
                    stream,
                )
            except Exception as error:
                logger.warning("kvgate: %s", error)
            else:
                self.stores[store.request] += 1

    def preempted(self, requests):
        """Their blocks are free after this: what is copied out of them must have been."""
        if any(self.stores.get(request) for request in requests):
            self.worker.wait()

    def results(self, finished_requests):
        """Finished requests whose stores have ended, and requests whose loads have, since the last call."""
        received, self.not_begun = self.not_begun, set()
        for job, missing in self.worker.finished():
            request = job.rpartition("#")[0]
            if missing is None:
                self.stores[request] -= 1
            else:
                load = self.loads.pop(job)
                if missing:
                    self.fail(load, min(missing))
                received.add(request)
        self.over.update(request for request in finished_requests if request in self.stores)
        sent = {request for request in self.over if not self.stores.get(request)}
        self.over -= sent
        for request in sent:
            self.stores.pop(request, None)
        return sent, received

    def fail(self, load, chunk):
        """All blocks from this chunk of the load on are not there."""
        first = max(load.tokens[0], load.first_token + chunk * self.model.space.chunk_tokens)
        block_tokens = self.model.block_tokens
        self.failed_blocks.update(load.block_table[first // block_tokens : -(-load.tokens[1] // block_tokens)])

    def take_failed_blocks(self):
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def close(self):
        if self.worker is not None:
            self.worker.close()


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
