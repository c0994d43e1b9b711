"""Random histories of a model with full attention, windows and states, by SGLang's own v2 classes, against a model that is a set
of pages. Bytes are compared.

python tests/engines/test_sglang_histories.py [NUMBER]     all, or one history again; KVGATE_TEST_HISTORIES sets how many"""

import hashlib
import os
import random
import sys
import tempfile
import unittest
from unittest import mock

import cpu_hicache  # noqa: F401
import torch
from gateway import Gateway
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer
from sglang_pools import PAGE, mamba, mha, storage

HISTORIES = int(os.environ.get("KVGATE_TEST_HISTORIES", "10000"))
THROUGH_S3 = 200
"""Histories whose pages are on S3 only when they are looked up."""
WINDOW_PAGES = 3
SLOTS = 24
TRAILING = {PoolName.MAMBA: 1, PoolName.SWA: WINDOW_PAGES}


class Engine:
    """The pools of an engine, and its backend."""

    def __init__(self, socket, strategy):
        small = {"layers": 1, "heads": 1, "head_dim": 2, "pages": SLOTS}
        self.pools = {
            PoolName.KV: mha("page_first", **small),
            PoolName.SWA: mha("layer_first", **small),
            PoolName.MAMBA: mamba(SLOTS, layers=1, temporal=(2,), conv=(2,)),
        }
        self.backend = storage(socket, self.pools, window_tokens=WINDOW_PAGES * PAGE, lookup_strategy=strategy)
        self.has_holes = strategy == "exact"

    def slots(self, name, pages):
        rows = self.pools[name].page_size
        return torch.cat([torch.arange(page * rows, (page + 1) * rows) for page in pages]) if pages else torch.arange(0)

    def view(self, name, page):
        """A page's buffers."""
        pool = self.pools[name]
        if name is PoolName.MAMBA:
            return [buffer[page] for buffer in pool.kv_buffer]
        first, end = page * PAGE, (page + 1) * PAGE
        halves = [pool.k_buffer, pool.v_buffer]
        return [half[first:end] if pool.layout == "page_first" else half[:, first:end] for half in halves]

    def write(self, name, page, key):
        for at, view in enumerate(self.view(name, page)):
            view.fill_(content(name, key, at))

    def holds(self, name, page, key):
        return all(bool((view == content(name, key, at)).all()) for at, view in enumerate(self.view(name, page)))


def content(name, key, at):
    """A small number, which every type has exactly."""
    return hashlib.sha256(f"{name} {key} {at}".encode()).digest()[0] + 1


class History:
    """Prompts that part somewhere, pages that were stored of each pool, lookups and loads.

    With the strategy `prefix`, nodes are stored as SGLang does while nothing fails: after those before them, with their windows."""

    def __init__(self, engine, number):
        self.engine, self.random = engine, random.Random(number)
        self.stored = {name: set() for name in TRAILING} | {PoolName.KV: set()}
        self.chains = self.prompts(number)

    def prompts(self, number):
        chains = [self.chain([], f"{number} 0", self.random.randint(1, 10))]
        for at in range(self.random.randint(0, 2)):
            head = self.random.choice(chains)
            kept = head[: self.random.randint(0, len(head))]
            chains.append(self.chain(kept, f"{number} {at + 1}", self.random.randint(1, 6)))
        return chains

    def chain(self, kept, salt, pages):
        chain, before = list(kept), salt
        for _ in range(pages):
            before = hashlib.sha256(f"{before} {salt}".encode()).hexdigest()
            chain.append(before)
        return chain

    def store(self):
        """A node of the tree, as SGLang backs it up: its window's tail and its state first, then its KV."""
        chain, (holes, tail) = self.random.choice(self.chains), (self.engine.has_holes, 1)
        there = next((at for at, key in enumerate(chain) if key not in self.stored[PoolName.KV]), len(chain) - 1)
        first = self.random.randrange(len(chain)) if holes else there
        node = chain[first : self.random.randint(first + 1, len(chain))]
        if not holes:
            tail = min(len(node), WINDOW_PAGES)
        extra = HiCacheStorageExtraInfo(prefix_keys=chain[:first] or None)
        transfers = []
        if self.random.random() < 0.8 or not holes:
            transfers.append(self.transfer(PoolName.SWA, node[-self.random.randint(tail, len(node)) :]))
        if self.random.random() < 0.7:
            transfers.append(self.transfer(PoolName.MAMBA, node[-1:]))
        if transfers:
            done = self.engine.backend.batch_set_v2(transfers, extra)
            self.is_done(done, transfers)
        if self.random.random() < 0.9 or not holes:
            pages = self.pages(len(node))
            for page, key in zip(pages, node, strict=True):
                self.engine.write(PoolName.KV, page, key)
            done = self.engine.backend.batch_set_v1(node, self.engine.slots(PoolName.KV, pages), extra)
            assert done == [True] * len(node), done
            self.stored[PoolName.KV] |= set(node)

    def transfer(self, name, keys):
        pages = self.pages(len(keys))
        for page, key in zip(pages, keys, strict=True):
            self.engine.write(name, page, key)
        self.stored[name] |= set(keys)
        return PoolTransfer(name, self.engine.slots(name, pages), keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)

    def pages(self, count):
        return self.random.sample(range(SLOTS), count)

    def is_done(self, done, transfers):
        for transfer in transfers:
            assert done[transfer.name] == [True] * len(transfer.keys), done

    def look_up(self):
        """A lookup from any page on, for any of the pools, and the load of what it found."""
        chain = self.random.choice(self.chains)
        first = self.random.randrange(len(chain))
        keys = chain[first:]
        wanted = [name for name in TRAILING if self.random.random() < 0.7]
        transfers = [
            PoolTransfer(
                name, keys=["__placeholder__"] * min(TRAILING[name], len(keys)), hit_policy=PoolHitPolicy.TRAILING_PAGES
            )
            for name in wanted
        ]
        backend = self.engine.backend
        extra = HiCacheStorageExtraInfo(prefix_keys=chain[:first] or None)
        run, restorable = self.expected(keys, wanted)
        if transfers:
            found = backend.batch_exists_v2(keys, transfers, extra)
            pages = found.kv_hit_pages
            assert found.extra_pool_hit_pages.get(PoolName.KV, 0) == run, (found, run)
            assert set(found.restorable_prefix_pages) <= restorable, (found, restorable)
            assert max(found.restorable_prefix_pages, default=0) == pages, found
        else:
            pages = backend.batch_exists(keys, extra)
        assert pages == max(restorable, default=0), (pages, restorable, wanted)
        if pages:
            self.load(keys[:pages], wanted, extra)

    def expected(self, keys, wanted):
        """The run of KV's pages, and every number of pages after which an engine could go on."""
        run = next((at for at, key in enumerate(keys) if key not in self.stored[PoolName.KV]), len(keys))
        ends = set(range(1, run + 1))
        for name in wanted:
            has = [key in self.stored[name] for key in keys]
            ends = {end for end in ends if all(has[max(0, end - TRAILING[name]) : end])}
        return run, ends

    def load(self, keys, wanted, extra):
        engine = self.engine
        pages = self.pages(len(keys))
        assert engine.backend.batch_get_v1(keys, engine.slots(PoolName.KV, pages), extra) == [True] * len(keys)
        transfers, places = [], {}
        for name in wanted:
            tail = keys[-TRAILING[name] :]
            places[name] = list(zip(self.pages(len(tail)), tail, strict=True))
            indices = engine.slots(name, [page for page, _ in places[name]])
            transfers.append(PoolTransfer(name, indices, keys=tail, hit_policy=PoolHitPolicy.TRAILING_PAGES))
        if transfers:
            self.is_done(engine.backend.batch_get_v2(transfers, extra), transfers)
        for page, key in zip(pages, keys, strict=True):
            assert engine.holds(PoolName.KV, page, key)
        for name, of_pool in places.items():
            for page, key in of_pool:
                assert engine.holds(name, page, key), name


class HistoriesTest(unittest.TestCase):
    def gateway(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-sglang-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        gateway = Gateway(folder.name)
        self.addCleanup(gateway.end)
        gateway.start()
        return gateway

    def play(self, number, history, steps):
        try:
            for step in steps:
                step(history)
        except AssertionError as error:
            raise AssertionError(f"history {number}: {error}") from error

    def test_lookups_and_loads_are_right_in_every_history(self):
        # S3 would only take time.
        with mock.patch.dict(os.environ, {"KVGATE__MEMORY__STORE": "stop", "KVGATE__MEMORY__LOOKUP": "stop"}):
            socket = self.gateway().socket
        engines = [Engine(socket, strategy) for strategy in ("exact", "prefix")]
        for number in numbers():
            chooser = random.Random(f"steps {number}")
            steps = [History.store, *chooser.choices((History.store, History.look_up), k=chooser.randint(1, 4))]
            self.play(number, History(engines[number % 2], number), [*steps, History.look_up])

    def test_they_are_right_from_s3_too(self):
        gateway = self.gateway()
        engines = [Engine(gateway.socket, strategy) for strategy in ("exact", "prefix")]
        histories = {number: History(engines[number % 2], number) for number in range(THROUGH_S3)}
        for number, history in histories.items():
            self.play(number, history, [History.store] * 3)
        gateway.flush()
        gateway.kill()
        gateway.start()
        for number, history in histories.items():
            self.play(number, history, [History.look_up] * 2)


def numbers():
    return NUMBERS or range(HISTORIES)


NUMBERS = [int(number) for number in sys.argv[1:]] if __name__ == "__main__" else []

if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
