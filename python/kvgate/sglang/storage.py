"""SGLang's calls: which pages are there, loaded, stored.

Every call ends within a deadline and answers for each page, whatever becomes of the gateway: SGLang's threads have no other way
on. Bytes are moved by the native `Pages`, with the GIL released."""

import collections
import dataclasses
import functools
import hashlib
import json
import logging
import threading
import time
import uuid

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kvgate._native import Pages
from kvgate.daemon import warn_of_another_version
from kvgate.sglang.guard import Troubles, guarded
from kvgate.sglang.identity import of_server
from kvgate.sglang.pools import Ranks, describe, window_pages
from kvgate.sglang.settings import Settings

logger = logging.getLogger(__name__)

ROOT = bytes(32)
"""In place of the hash of a page that SGLang does not name."""


@dataclasses.dataclass(frozen=True)
class Pool:
    number: int
    """In the native `Pages`."""
    host: object
    """SGLang's."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The latest load of KV. What goes beside the same pages follows at once, and is a part of it: SGLang looks whether it is to
    stop when both have ended."""

    keys: list
    until: float
    """The time at which it has to end."""
    pages: int
    """Leading pages that came."""


NO_BATCH = Batch([], 0.0, 0)


def no_pages(storage, keys, *_, **__):
    return [False] * len(keys)


def no_pool_pages(storage, transfers, *_, **__):
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


class KvGateStorage(HiCacheStorage):
    """One rank's backend."""

    def __init__(self, storage_config, kwargs=None):
        self.settings = Settings.read(storage_config.extra_config)
        self.config = storage_config
        for name in ("attn_cp_size", "dcp_size"):
            if getattr(storage_config, name, 1) > 1:
                raise ValueError(f"kvgate can't be used with {name} {getattr(storage_config, name)} yet: set it to 1")
        self.engine = of_server(self.settings)
        self.ranks = Ranks(
            storage_config.tp_rank, storage_config.tp_size, storage_config.pp_rank, storage_config.pp_size
        )
        self.pools: dict[PoolName, Pool] = {}
        self.troubles = Troubles()
        self.figures = Figures()
        settings = self.settings
        self.parents = Parents(settings.parents_max)
        self.batch = NO_BATCH
        self.name = shared_name(self.ranks, settings.instance)
        self.flushes = Flushes()
        if self.ranks.rank == 0:
            warn_of_another_version(settings.socket)
        self.pages = Pages(
            json.dumps(
                {
                    "socket": settings.socket,
                    "socket_owner": settings.socket_owner or None,
                    "attach": {
                        "instance": settings.instance or self.name,
                        "rank": self.ranks.rank,
                        "world_size": self.ranks.size,
                        "tp": [self.ranks.rank, self.ranks.size],
                    },
                    "deadline_ms": settings.deadline_ms,
                    "store_deadline_ms": settings.store_deadline_ms,
                    "patience_ms": settings.patience_ms,
                    "lookup_deadline_ms": settings.lookup_deadline_ms,
                    "local_lookup_deadline_ms": settings.local_lookup_deadline_ms,
                    "lookup_strategy": settings.lookup_strategy,
                    "pin_ms": settings.pin_ms,
                    "store_bytes": settings.store_bytes,
                    "release_pages": settings.release_pages,
                    "retry_ms": settings.retry_ms,
                    "breaker_timeouts": settings.breaker_timeouts,
                    "breaker_pause_ms": settings.breaker_pause_ms,
                }
            )
        )

    # ---- pools

    def register_mem_pool_host(self, mem_pool_host):
        super().register_mem_pool_host(mem_pool_host)
        self._add(PoolName.KV, mem_pool_host)
        self.flushes = Flushes.of(mem_pool_host, self.engine)

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(PoolName(host_pool_name), host_pool)

    def _add(self, name, host):
        known = self.pools.get(name)
        if known is not None and known.host is host:
            return
        if (
            name is PoolName.DRAFT
            and self.config.is_mla_model
            and self.ranks.size > 1
            and isinstance(host, MHATokenToKVPoolHost)
        ):
            raise ValueError(
                "kvgate can't reuse KV of a draft with heads for a model with MLA: SGLang stores that of one rank only. Run it "
                "without kvgate, or with a draft of MLA layers"
            )
        page_tokens = self.mem_pool_host.page_size
        space, tensors = describe(name, host, page_tokens, self.engine, self.ranks)
        self.pools[name] = Pool(self.pages.add(space, tensors), host)
        self.pages.attach()
        logger.info("kvgate: pool %s is space %s", name, space.id)

    # ---- lookups

    @guarded(lambda storage, *_, **__: 0)
    def batch_exists(self, keys, extra_info=None):
        self.parents.learn(keys, extra_info)
        boundary, _ = self.pages.lookup([self.pools[PoolName.KV].number], self._hashes(keys)) if keys else (0, 0)
        return boundary

    @guarded(lambda storage, *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        self.parents.learn(keys, extra_info)
        transfers = pool_transfers or []
        if not keys or not all(self._can_look_up(transfer) for transfer in transfers):
            return PoolTransferResult(0, {}, [])
        names = dict.fromkeys([PoolName.KV, *(PoolName(transfer.name) for transfer in transfers)])
        numbers, hashes = [self.pools[name].number for name in names], self._hashes(keys)
        boundary, full = self.pages.lookup(numbers, hashes)
        restorable = range(1, boundary + 1)
        if boundary and any(transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES for transfer in transfers):
            # Below the boundary all pages of full kinds are there, and windows or states at some of them.
            restorable = self._boundaries(numbers, hashes, boundary)
        restorable = list(restorable)
        return PoolTransferResult(boundary, {PoolName.KV: full} if full else {}, restorable)

    def _boundaries(self, numbers, hashes, boundary):
        """The last prefixes that can be loaded, up to this one. SGLang takes the longest that all ranks have, and a page that has
        just come is known to some of them only."""
        found = [boundary]
        if self.ranks.size * self.ranks.stages > 1:
            while found[0] > 1 and len(found) < self.settings.boundaries:
                before, _ = self.pages.lookup(numbers, hashes[: 32 * (found[0] - 1)])
                if not before:
                    break
                found.insert(0, before)
        return found

    def _can_look_up(self, transfer):
        """Whether the space's kind wants the same pages as SGLang."""
        name = PoolName(transfer.name)
        trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
        pages = max(1, len(transfer.keys or []))
        if name not in self.pools:
            reason = "the pool was not registered"
        elif transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
            reason = "its policy is block_groups"
        elif trailing != (name in (PoolName.MAMBA, PoolName.SWA)):
            reason = f"its policy is {transfer.hit_policy}"
        elif name is PoolName.MAMBA and pages > 1:
            reason = f"it wants {pages} states"
        elif name is PoolName.SWA and pages > window_pages(self.mem_pool_host.page_size, self.engine):
            reason = f"it wants {pages} pages: set window_tokens in the extra config to the widest window, in tokens"
        else:
            return True
        self.troubles.tell(f"the pool {name} can't be looked up", reason)
        return False

    # ---- loads and stores

    @guarded(no_pages)
    def batch_get_v1(self, keys, host_indices, extra_info=None):
        until = self._until()
        done = self._load(PoolName.KV, keys, host_indices, until)
        self.batch = Batch(list(keys), until, done.index(False) if False in done else len(done))
        return done

    @guarded(no_pages)
    def batch_set_v1(self, keys, host_indices, extra_info=None):
        self.parents.learn(keys, extra_info)
        return self._store(PoolName.KV, keys, host_indices, self._until())

    @guarded(no_pool_pages)
    def batch_get_v2(self, transfers, extra_info=None):
        until, done = self._until(), {}
        batch, self.batch = self.batch, NO_BATCH
        for transfer in transfers:
            keys = transfer.keys or []
            # SGLang makes use of no more pages than KV has.
            limits = (batch.until, batch.pages) if keys == batch.keys else (until, None)
            done[transfer.name] = self._load(transfer.name, keys, transfer.host_indices, *limits)
        return done

    @guarded(no_pool_pages)
    def batch_set_v2(self, transfers, extra_info=None):
        until, done = self._until(), {}
        for transfer in transfers:
            keys = transfer.keys or []
            self.parents.learn(keys, extra_info)
            done[transfer.name] = self._store(transfer.name, keys, transfer.host_indices, until)
        return done

    @guarded(lambda storage, name, keys, *_: [False] * len(keys))
    def _load(self, name, keys, host_indices, until, pages=None):
        """The first `pages` of them, all if None, until this time."""
        pool = self.pools[PoolName(name)]
        if not keys:
            return []
        numbers = page_numbers(pool.host, keys, host_indices)[:pages]
        if not numbers:
            return [False] * len(keys)
        moved = self.pages.load(pool.number, self._hashes(keys[:pages]), numbers, left_ms(until))
        self.figures.loaded(moved)
        if moved.error:
            self.troubles.tell("pages were not loaded", moved.error)
        return moved.done + [False] * (len(keys) - len(numbers))

    @guarded(lambda storage, name, keys, *_: [False] * len(keys))
    def _store(self, name, keys, host_indices, until):
        pool = self.pools[PoolName(name)]
        if not keys:
            return []
        hashes, parents = self._hashes(keys), self._hashes(map(self.parents.of, keys))
        numbers = page_numbers(pool.host, keys, host_indices)
        moved = self.pages.store(pool.number, hashes, parents, numbers, left_ms(until))
        self.figures.stored(moved)
        if moved.error:
            self.troubles.tell("pages were not stored", moved.error)
        return moved.done

    def _until(self):
        """The end of a call that begins now: SGLang may have to stop the thread that waits for it."""
        return time.monotonic() + self.settings.deadline_ms / 1000

    # ---- the rest of SGLang's interface

    def exists(self, key):
        return self.batch_exists([key]) == 1

    def get(self, key, target_location=None, target_sizes=None):
        """SGLang calls it without `interface_v1` only, which is refused."""
        return None

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        return [None] * len(keys)

    def set(self, key, value=None, target_location=None, target_sizes=None):
        return False

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        return False

    @guarded(lambda storage: None)
    def get_stats(self):
        return self.figures.take() if self.config.enable_storage_metrics else None

    def clear(self):
        """Other engines use the same pages: nothing is removed."""
        logger.warning("kvgate: clear removes nothing, as other engines use the same pages: see kvgate rm")

    def close(self):
        """Ends the sessions with the gateway. A call that comes later is answered as without one."""
        self.pages = None

    def _hashes(self, keys):
        """By which the gateway knows the pages of these keys. None: SGLang has not told which page it is."""
        hashes = [ROOT if key is None else bytes.fromhex(key) for key in keys]
        if self.flushes.count and not self.settings.fixed_weights:
            own = f"{self.name} {self.flushes.count} ".encode()
            hashes = [key if key == ROOT else hashlib.sha256(own + key).digest() for key in hashes]
        return b"".join(hashes)


@dataclasses.dataclass
class Flushes:
    """How often SGLang has flushed its cache, as it does after new weights. After a flush an engine finds only what it has stored
    since.

    SGLang tells no backend of a flush. But it clears every host pool, on each rank once, when no call is under way: so ranks
    count the same without talking."""

    count: int = 0

    @classmethod
    def of(cls, host, engine):
        """Those of this pool; also while no backend is attached."""
        if known := getattr(host, "kvgate_flushes", None):
            return known
        # Nobody has counted those before.
        flushes = host.kvgate_flushes = cls(int(engine.is_running and not engine.settings.revision))
        clear = host.clear

        @functools.wraps(clear)
        def counted():
            clear()
            flushes.count += 1

        host.clear = counted
        return flushes


class Parents:
    """The page before each of the latest pages, as far as SGLang has told: a store may begin anywhere in a prompt."""

    def __init__(self, pages_max):
        self.pages_max = pages_max
        self.before = collections.OrderedDict()
        self.lock = threading.Lock()

    def learn(self, keys, extra_info):
        prefix = getattr(extra_info, "prefix_keys", None)
        with self.lock:
            parent = prefix[-1] if prefix else None
            for key in keys:
                if parent is not None:
                    self.before[key] = parent
                parent = key
            while len(self.before) > self.pages_max:
                self.before.popitem(last=False)

    def of(self, key):
        with self.lock:
            return self.before.get(key)


class Figures:
    """What SGLang's metrics are made of, since they were last taken."""

    def __init__(self):
        self.lock = threading.Lock()
        self.loads, self.stores = [], []

    def loaded(self, moved):
        self._add(self.loads, moved)

    def stored(self, moved):
        self._add(self.stores, moved)

    def _add(self, to, moved):
        if moved.bytes and moved.seconds > 0:
            with self.lock:
                to.append((sum(moved.done), moved.bytes / moved.seconds / 1e9))
                # Nobody takes them where metrics are off.
                del to[:-1024]

    def take(self):
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self.lock:
            (loads, self.loads), (stores, self.stores) = (self.loads, []), (self.stores, [])
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in stores],
            prefetch_bandwidth=[speed for _, speed in loads],
            backup_bandwidth=[speed for _, speed in stores],
        )


def left_ms(until):
    return max(0, round((until - time.monotonic()) * 1000))


def page_numbers(host, keys, host_indices):
    """The numbers of these pages in their pool."""
    rows = getattr(host, "page_size", 1) or 1
    if host_indices is None or host_indices.numel() != len(keys) * rows:
        have = 0 if host_indices is None else host_indices.numel()
        raise ValueError(f"{len(keys)} pages of {rows} slots, and SGLang names {have} slots")
    slots = host_indices[::rows].tolist()
    if any(slot % rows for slot in slots):
        raise ValueError("a page does not begin where a page of the host pool does")
    return [slot // rows for slot in slots]


def shared_name(ranks, instance):
    """A name for this engine that all ranks of the stage know, and no other engine has, not even an earlier one."""
    name = f"sglang {uuid.uuid4()}"
    if ranks.size == 1:
        return name
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    try:
        parallel = get_parallel()
        group = parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group
    except Exception:
        if not instance:
            raise
        # Outside of an engine no rank knows it: after a flush they share nothing.
        return name
    return group.broadcast_object(name)
