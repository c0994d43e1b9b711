"""A rank's side: its tensors, and the jobs that move chunks in and out of them."""

import json
import time

from vllm.distributed.parallel_state import get_dcp_group
from vllm.logger import init_logger

from kvgate import Worker
from kvgate.tensors import describe
from kvgate.torch_copies import TorchCopies, are_needed
from kvgate.vllm.kinds import context_ranks
from kvgate.vllm.metadata import WorkerReport
from kvgate.vllm.model import layer_number
from kvgate.vllm.stats import KvGateStats

logger = init_logger(__name__)


class WorkerSide:
    def __init__(self, model, settings, parallel, instance):
        self.model, self.settings = model, settings
        ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        splitting, dealt_to = context_ranks(parallel)
        all_ranks = ranks * splitting * stages
        self.attach = {"instance": instance, "rank": parallel.rank % all_ranks, "world_size": all_ranks}
        if all_ranks > stages:
            # Ranks that split a prefill have all of its KV.
            self.attach["tp"] = [parallel.rank % ranks, ranks]
        if dealt_to > 1:
            self.attach["tokens"] = {
                "rank": get_dcp_group().rank_in_group,
                "size": dealt_to,
                "interleave": parallel.cp_kv_cache_interleave_size,
            }
        if stages > 1:
            own = [layer_number(layer.name) for kind in model.kinds for layer in kind.layers]
            self.attach["layers"] = [min(own), max(own) + 1]
        self.kv_caches = None
        self.worker = None
        """None while the engine sleeps, too."""
        self.tables: list[list[tuple[int, int]]] = []
        """Of each kind the block tables that copies take: the group, and into how many blocks the engine's kernels split one of
        vLLM's."""
        self.loads: dict[str, object] = {}
        self.stores: set[str] = set()
        """Jobs that need their blocks."""
        self.received: set[str] = set()
        """Requests whose loads have ended."""
        self.failed: set[str] = set()
        """Of them those that are computed."""
        self.failed_blocks: set[int] = set()
        self.report = WorkerReport()
        self.stats = KvGateStats()
        self.is_attached = None
        """Whether there was a session when it was looked at last; None: there was none yet."""

    # ---- the engine's memory

    def register(self, kv_caches):
        self.kv_caches = kv_caches
        device = next(iter(kv_caches.values())).device
        kinds = []
        self.tables = []
        for kind in self.model.kinds:
            of_tables, dealt = {}, {}
            for layer, planes in zip(kind.layers, kind.planes, strict=True):
                split, tensors = self.tensors(kind, layer, planes, kv_caches[layer.name])
                of_tables.setdefault((layer.group, split), []).extend(tensors)
                dealt[layer.group, split] = layer.spec.dcp_sharded
            self.tables.append(list(of_tables))
            tokens = self.attach.get("tokens")
            kinds.append(
                {
                    "groups": list(of_tables.values()),
                    "tokens": [tokens if dealt[table] else None for table in of_tables],
                    "is_draft": kind.is_draft,
                }
            )
        copies = None
        if self.settings.copies == "torch" or are_needed(device):
            copies = TorchCopies(list(kv_caches.values()))
            logger.info(
                "kvgate: torch's own calls copy KV on %s: kvgate's own copies are for CPUs and for CUDA", device
            )
        settings = {
            "socket": self.settings.socket,
            "socket_owner": self.settings.socket_owner,
            "attach": self.attach,
            "kinds": kinds,
            "device": device.index or 0 if device.type == "cuda" and copies is None else None,
        }
        for name in ("load_deadline_ms", "store_deadline_ms", "patience_ms", "breaker_timeouts", "breaker_pause_ms"):
            settings[name] = getattr(self.settings, name)
        self.worker = Worker(json.dumps(settings), self.model.spaces, copies)

    def tensors(self, kind, layer, planes, tensor):
        """As `kvgate` describes tensors: by the meaning of their axes; and into how many blocks one of vLLM's is split."""
        is_state = kind.word == "state"
        block_tokens = 1 if is_state else layer.spec.block_size
        axes, split = axes_of(tensor.shape, block_tokens)
        if axes is None or (is_state and tensor.shape[1:] != (1, 1, layer.spec.state_content_size_bytes)):
            raise ValueError(
                f"kvgate does not know KV tensors of shape {tuple(tensor.shape)} with blocks of {block_tokens} tokens "
                f"({layer.name}): run without kvgate, and report it"
            )
        tensors = []
        for index, plane in planes.items():
            heads = own_heads(plane.heads, *self.attach.get("tp", (0, 1)))
            if is_state:
                tensors.extend(state_tensors(tensor, index, plane, heads))
            elif kind.row_parts:
                for offset, part in parts_of(tensor.select(1, 0) if "H" in axes else tensor, kind.row_parts):
                    tensors.append(describe(part, "BNC", index, row_offset=offset))
            else:
                tensors.append(describe(tensor, axes, index, heads if "H" in axes else None))
        return split, tensors

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
            if not load.parts:
                # The next token attends to none before it.
                self.end(load, 0.0, is_whole=True)
                continue
            try:
                self.need_worker().load(load.job, self.load_parts(load), stream, by_layer, load.traceparent)
            except Exception as error:
                # It is computed.
                logger.warning("kvgate: a load of %s could not be begun: %s", load.request, error)
                self.fail(load, 0)
                self.end(load, time.monotonic() - began, is_whole=False)
            else:
                self.loads[load.job] = load

    def load_parts(self, load):
        """As the native side takes them: with a block table for each of a kind's tables."""
        return [
            (
                part.kind,
                part.hashes,
                [
                    (part.tables[group][0], kernel_blocks(part.tables[group][1], split))
                    for group, split in self.tables[part.kind]
                ],
            )
            for part in load.parts
        ]

    def store_parts(self, store):
        return [
            (
                part.kind,
                part.hashes,
                part.parents,
                [kernel_blocks(part.tables[group], split) for group, split in self.tables[part.kind]],
            )
            for part in store.parts
        ]

    def wait_layer(self, name):
        """Until this layer of all loads is in its pages."""
        if self.worker is None or not self.loads:
            return
        for number, kind in enumerate(self.model.kinds):
            for layer, planes in zip(kind.layers, kind.planes, strict=True):
                if layer.name == name:
                    self.worker.wait_layer(number, max(planes))

    def wait_layers(self):
        if self.worker is not None and self.loads:
            self.worker.wait_layers()
            self.collect()

    def store(self, stores, stream):
        for store in stores:
            try:
                self.need_worker().store(store.job, self.store_parts(store), stream, store.traceparent)
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

    def take_back(self, jobs):
        """Their blocks are vLLM's after this: what is being copied out of them ends, the rest never begins."""
        if self.worker is not None and (jobs := self.stores.intersection(jobs)):
            self.worker.take_back(list(jobs))

    def take_all_back(self):
        self.take_back(self.stores)

    def lose(self, lost):
        """Loads that never begin, and that vLLM waits for."""
        for request, blocks in lost.items():
            self.received.add(request)
            if self.model.loads_in_part:
                self.failed_blocks.update(blocks)
            else:
                self.failed.add(request)

    def give_up(self, loads=(), stores=()):
        """Nothing more is copied. What is under way ends first, and counts as failed, as do these that were not begun: nobody
        waits for any of it."""
        worker, self.worker, self.kv_caches = self.worker, None, None
        if worker is not None:
            worker.close()
        for load in [*self.loads.values(), *loads]:
            self.fail(load, 0)
            self.end(load, 0.0, is_whole=False)
        for job in (*self.stores, *(store.job for store in stores)):
            self.report.stored[job] = (1, set())
            self.report.freed[job] = 1
        self.stores = set()

    def results(self):
        """Requests whose loads have ended since the last call, and those of them that are computed as a whole."""
        self.collect()
        received, self.received = self.received, set()
        failed, self.failed = self.failed, set()
        return received, failed

    def collect(self):
        if self.worker is None:
            return
        self.watch_session()
        for ended in self.worker.loaded():
            load = self.loads[ended.job]
            self.stats.loaded(ended)
            if ended.missing:
                logger.info("kvgate: %s computes what was not loaded: %s", load.request, ended.error)
                self.fail(load, min(index for _, index in ended.missing))
            self.end(load, ended.seconds, is_whole=not ended.missing, has_drafts=not ended.missing_drafts)
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

    def end(self, load, seconds, is_whole, has_drafts=True):
        self.loads.pop(load.job, None)
        self.received.add(load.request)
        self.report.loaded[load.job] = (1, seconds, is_whole, has_drafts)

    def fail(self, load, chunk):
        """All blocks from this chunk of the load on are not there; of other models than those of full attention nothing is."""
        if not self.model.loads_in_part:
            self.failed.add(load.request)
            return
        ((group, ((start, end), blocks)),) = load.parts[0].tables.items()
        block_tokens = self.model.kinds[0].blocks[group]
        first = max(start, chunk * self.model.chunk_tokens)
        self.failed_blocks.update(blocks[first // block_tokens : -(-end // block_tokens)])

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


def kernel_blocks(blocks, split):
    """The kernels' blocks of vLLM's."""
    return blocks if split == 1 else [block * split + at for block in blocks for at in range(split)]


def parts_of(blocks, widths):
    """Of `blocks`, which are [block, token, byte], the parts of rows, with the bytes before each in a row: a block has one part
    of all its tokens after the other."""
    count, tokens, _ = blocks.shape
    of_row = 0
    for width in widths:
        first = blocks.storage_offset() + of_row * tokens
        yield of_row, blocks.as_strided((count, tokens, width), (blocks.stride(0), width, 1), first)
        of_row += width


def state_tensors(tensor, index, plane, heads):
    """Of a state's plane: the rank's heads in all pages, for each run."""
    count = heads[1] - heads[0]
    for run in plane.runs:
        part = tensor[:, :, 0, run.offset : run.offset + count * run.bytes].unflatten(-1, (count, run.bytes))
        yield describe(part, "BNHC", index, heads, run.row_offset)


def own_heads(total, rank, ranks):
    """Half-open. With more ranks than heads several have the same one."""
    first = rank * total // ranks
    return first, first + max(1, total // ranks)


def axes_of(shape, block_tokens):
    """vLLM's layouts, and into how many blocks one of vLLM's is split; None: one that is not known."""
    known = {
        3: ["BNC"],
        4: ["BHNC"],
        5: ["KBNHD", "BKNHD"],
    }
    for axes in known.get(len(shape), ()):
        is_kv = "K" not in axes or shape[axes.index("K")] == 2
        tokens = shape[axes.index("N")]
        if is_kv and tokens and block_tokens % tokens == 0:
            return axes, block_tokens // tokens
    return None, 1
