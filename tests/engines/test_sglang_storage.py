"""The backend with SGLang's own host pools and classes, and a real gateway: layouts, ranks, refusals, trouble.

python tests/engines/test_sglang_storage.py     in an environment with SGLang and the wheel
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import cpu_hicache  # noqa: F401
import torch
from gateway import KVGATE, Gateway, Proxy, hang
from kvgate._native import PanicException
from kvgate.sglang import KvGateStorage
from kvgate.sglang.identity import Engine, refuse_long_rope
from kvgate.sglang.pools import Ranks, describe
from kvgate.sglang.settings import Settings
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang_pools import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PAGE,
    PAGES,
    bytes_of,
    config,
    dsa,
    fill,
    mamba,
    mha,
    mla,
    storage,
    wipe,
)

SHORT = {"deadline_ms": 900, "patience_ms": 300, "lookup_deadline_ms": 200}
"""Time limits for tests in which the gateway does not answer."""


def keys(seed, pages):
    chain, before = [], str(seed).encode()
    for _ in range(pages):
        before = hashlib.sha256(before).digest()
        chain.append(before.hex())
    return chain


def slots(pages, page=PAGE):
    """Those of whole pages, as `host_indices`."""
    return torch.cat([torch.arange(number * page, (number + 1) * page) for number in pages])


class StorageCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-sglang-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.gateway = Gateway(folder.name)
        self.addCleanup(self.gateway.end)
        self.gateway.start()

    def socket(self):
        return self.gateway.socket


class LayoutTest(StorageCase):
    def round_trip(self, make, layouts, **named):
        """Pages written from one layout are read into every other, byte by byte."""
        chain, from_pages = keys(repr(named), 8), [3, 1, 4, 11, 5, 9, 2, 6]
        to_pages = [8, 20, 0, 15, 30, 7, 22, 1]
        for writer in layouts:
            pool = make(writer)
            fill(pool, 7)
            backend = storage(self.socket(), {PoolName.KV: pool}, revision=writer, **named)
            self.assertEqual(backend.batch_exists(chain), 0)
            self.assertEqual(backend.batch_set_v1(chain, slots(from_pages)), [True] * 8)
            for reader in layouts:
                with self.subTest(f"{writer} to {reader}"):
                    other = make(reader)
                    wipe(other)
                    second = storage(self.socket(), {PoolName.KV: other}, revision=writer, **named)
                    self.assertEqual(second.batch_exists(chain), 8)
                    self.assertEqual(second.batch_get_v1(chain, slots(to_pages)), [True] * 8)
                    self.same(pool, from_pages, other, to_pages)

    def same(self, one, one_pages, other, other_pages):
        for number, other_number in zip(one_pages, other_pages, strict=True):
            a, b = (rows(pool, page) for pool, page in ((one, number), (other, other_number)))
            for x, y in zip(a, b, strict=True):
                self.assertTrue(torch.equal(x, y))
        untouched = sorted(set(range(PAGES)) - set(other_pages))
        for number in untouched:
            self.assertTrue(all(bool((row.view(torch.uint8) == 0xAA).all()) for row in rows(other, number)), number)

    def test_every_layout_of_heads(self):
        self.round_trip(mha, MHA_LAYOUTS)

    def test_keys_and_values_of_different_widths(self):
        self.round_trip(lambda layout: mha(layout, v_head_dim=8), ("page_first", "page_first_direct"))

    def test_every_layout_of_latents(self):
        self.round_trip(mla, MLA_LAYOUTS, is_mla=True)

    def test_eight_bit_floats(self):
        self.round_trip(lambda layout: mha(layout, dtype=torch.float8_e4m3fn), ("page_first", "page_head"))

    def test_sglang_s_own_bytes_of_a_page_are_the_same(self):
        for layout in MHA_LAYOUTS:
            with self.subTest(layout):
                pool, chain = mha(layout), keys(layout, 1)
                fill(pool, 3)
                before = bytes_of(pool, 5 * PAGE).clone()
                backend = storage(self.socket(), {PoolName.KV: pool}, revision=f"own {layout}")
                self.assertEqual(backend.batch_set_v1(chain, slots([5])), [True])
                wipe(pool)
                self.assertEqual(backend.batch_get_v1(chain, slots([9])), [True])
                self.assertTrue(torch.equal(bytes_of(pool, 9 * PAGE), before))


def rows(pool, page):
    """K and V, or latents, of a page as [layer, token, head, element]."""
    first, end = page * PAGE, (page + 1) * PAGE
    halves = [pool.k_buffer, pool.v_buffer] if hasattr(pool, "head_num") else [pool.kv_buffer]
    orders = {
        "layer_first": lambda half: half[:, first:end],
        "page_first": lambda half: half[first:end].transpose(0, 1),
        "page_first_direct": lambda half: half[page],
        "page_head": lambda half: half[page].permute(2, 1, 0, 3),
    }
    return [orders[pool.layout](half).contiguous().view(torch.uint8) for half in halves]


class SidePoolsTest(StorageCase):
    """What goes with the KV of a page: the index of DeepSeek V3.2, and a draft model's KV (EAGLE, MTP)."""

    def backend(self, pools, **named):
        def drafts(settings):
            server = SimpleNamespace(speculative_algorithm="EAGLE", speculative_draft_model_path=None)
            return Engine(settings, server)

        with mock.patch("kvgate.sglang.storage.of_server", drafts):
            return storage(self.socket(), pools, draft_revision="d1", **named)

    def pools(self, layout, is_mla):
        if not is_mla:
            return {PoolName.KV: mha(layout), PoolName.DRAFT: mha(layout, layers=1)}
        (kv, index), (draft, draft_index) = dsa(layout), dsa(layout, layers=1)
        return {
            PoolName.KV: kv,
            PoolName.INDEXER: index,
            PoolName.DRAFT: draft,
            PoolName.DRAFT_INDEXER: draft_index,
        }

    def transfers(self, pools, chain, pages):
        return [
            PoolTransfer(name, slots(pages), keys=chain, hit_policy=PoolHitPolicy.ALL_PAGES)
            for name in pools
            if name is not PoolName.KV
        ]

    def test_they_come_back_with_it(self):
        cases = [*((layout, False) for layout in MHA_LAYOUTS), *((layout, True) for layout in MLA_LAYOUTS)]
        for layout, is_mla in cases:
            with self.subTest(layout, is_mla=is_mla):
                named = {"is_mla": is_mla, "revision": f"{layout} {is_mla}"}
                chain, pools = keys(repr(named), 4), self.pools(layout, is_mla)
                for seed, pool in enumerate(pools.values()):
                    fill(pool, seed)
                before = {
                    name: [bytes_of(pool, page * PAGE).clone() for page in range(4)] for name, pool in pools.items()
                }
                first = self.backend(pools, **named)
                wanted = self.transfers(pools, chain, range(4))
                # SGLang stores the side pools first. Without KV they are no hit.
                self.assertEqual(first.batch_set_v2(wanted), {transfer.name: [True] * 4 for transfer in wanted})
                self.assertEqual(first.batch_exists_v2(chain, wanted).kv_hit_pages, 0)
                self.assertEqual(first.batch_set_v1(chain, slots(range(4))), [True] * 4)
                pools = self.pools(layout, is_mla)
                second = self.backend(pools, **named)
                wanted = self.transfers(pools, chain, range(8, 12))
                self.assertEqual(second.batch_exists_v2(chain, wanted).kv_hit_pages, 4)
                self.assertEqual(second.batch_get_v1(chain, slots(range(8, 12))), [True] * 4)
                self.assertEqual(second.batch_get_v2(wanted), {transfer.name: [True] * 4 for transfer in wanted})
                for name, pool in pools.items():
                    for page, expected in enumerate(before[name]):
                        self.assertTrue(torch.equal(bytes_of(pool, (8 + page) * PAGE), expected), (name, page))

    def test_a_hit_is_as_long_as_the_shortest_of_them(self):
        pools, chain = self.pools("page_first", is_mla=True), keys("short", 4)
        backend = self.backend(pools, is_mla=True)
        backend.batch_set_v1(chain, slots(range(4)))
        whole = self.transfers(pools, chain, range(4))
        for transfer in whole:
            pages = 2 if transfer.name is PoolName.INDEXER else 4
            backend.batch_set_v2([replace(transfer, keys=chain[:pages], host_indices=slots(range(pages)))])
        found = backend.batch_exists_v2(chain, whole)
        self.assertEqual((found.kv_hit_pages, found.restorable_prefix_pages), (2, [1, 2]))


class SharedMemoryTest(StorageCase):
    def test_pools_that_sglang_keeps_in_a_file(self):
        """Its `"allocator": "shm"`: KV goes the same way as into any other pool."""
        for make in (mha, mla):
            with self.subTest(make.__name__):
                pool, chain = make("page_first_direct", allocator="shm"), keys(make.__name__, 2)
                self.assertIsNotNone(pool.fd)
                fill(pool, 1)
                before = [bytes_of(pool, page * PAGE).clone() for page in (0, 1)]
                backend = storage(self.socket(), {PoolName.KV: pool}, is_mla=make is mla, allocator="shm")
                self.assertEqual(backend.batch_set_v1(chain, slots([0, 1])), [True] * 2)
                wipe(pool)
                self.assertEqual(backend.batch_get_v1(chain, slots([5, 4])), [True] * 2)
                for page, expected in zip((5, 4), before, strict=True):
                    self.assertTrue(torch.equal(bytes_of(pool, page * PAGE), expected))


class RanksTest(StorageCase):
    def test_two_ranks_write_what_one_reads(self):
        chain = keys("ranks", 4)
        whole = mha("page_first")
        fill(whole, 1)

        def rank(number):
            pool = mha("layer_first", heads=2)
            for mine, all_of in ((pool.k_buffer, whole.k_buffer), (pool.v_buffer, whole.v_buffer)):
                # [layer, slot, head, element] of [slot, layer, head, element]
                mine.copy_(all_of[:, :, 2 * number : 2 * number + 2].transpose(0, 1))
            backend = storage(self.socket(), {PoolName.KV: pool}, rank=number, ranks=2, instance="two")
            done = backend.batch_set_v1(chain, slots([0, 1, 2, 3]))
            # The other rank may still write.
            deadline = time.monotonic() + 20
            while backend.batch_exists(chain) < 4 and time.monotonic() < deadline:
                time.sleep(0.02)
            wipe(pool)
            loaded = backend.batch_get_v1(chain, slots([7, 6, 5, 4]))
            heads = slice(2 * number, 2 * number + 2)
            # As bytes: random ones are no numbers now and then.
            same = all(
                torch.equal(
                    pool.v_buffer[:, to * PAGE + 3].view(torch.uint8),
                    whole.v_buffer[at * PAGE + 3, :, heads].view(torch.uint8),
                )
                for at, to in enumerate((7, 6, 5, 4))
            )
            return done == loaded == [True] * 4 and same

        self.assertEqual(forked(lambda: rank(0), lambda: rank(1)), [0, 0])
        one = mha("page_head")
        wipe(one)
        backend = storage(self.socket(), {PoolName.KV: one})
        self.assertEqual(backend.batch_exists(chain), 4)
        self.assertEqual(backend.batch_get_v1(chain, slots([4, 5, 6, 7])), [True] * 4)
        for at in range(4):
            for x, y in zip(rows(whole, at), rows(one, at + 4), strict=True):
                self.assertTrue(torch.equal(x, y))


class LatentRanksTest(StorageCase):
    """Latents are the same on all ranks: SGLang has the first one store them, and the others never store."""

    def rank(self, number):
        pool = mla("page_first")
        fill(pool, 1)
        limits = {"deadline_ms": 3000, "patience_ms": 800, "lookup_deadline_ms": 400}
        named = {"rank": number, "ranks": 2, "instance": "two", "is_mla": True, **limits}
        return storage(self.socket(), {PoolName.KV: pool}, **named)

    def stores(self, first, seed):
        """Within a few calls: the other rank attaches in the background."""
        chain, done, deadline = keys(seed, 2), [False], time.monotonic() + 20
        while not all(done) and time.monotonic() < deadline:
            done = first.batch_set_v1(chain, slots([0, 1]))
        self.assertEqual(done, [True] * 2)
        self.assertEqual(first.batch_exists(chain), 2)

    def test_they_are_stored_again_when_the_gateway_comes_back(self):
        first, second = self.rank(0), self.rank(1)
        self.stores(first, "before")
        self.gateway.kill()
        self.gateway.start()
        self.stores(first, "after")
        self.assertEqual(second.batch_exists(keys("after", 2)), 2)

    def test_they_are_stored_by_an_engine_that_was_there_first(self):
        self.gateway.kill()
        first, _second = self.rank(0), self.rank(1)
        self.gateway.start()
        self.stores(first, "later")

    def test_a_rank_that_is_missing_is_named(self):
        first = self.rank(0)
        with self.assertLogs("kvgate.sglang.guard", "WARNING") as told:
            self.assertEqual(first.batch_set_v1(keys("alone", 2), slots([0, 1])), [False] * 2)
        self.assertIn("not all ranks of this engine are attached", told.output[0])


class BoundariesTest(StorageCase):
    def test_ranks_of_which_one_knows_less_load_what_both_have(self):
        """Of windows, at which not every prefix ends."""
        chain, limits = keys("boundaries", 6), {"window_tokens": 128}
        pools = {PoolName.KV: mha("page_first"), PoolName.SWA: mha("page_first")}
        whole = storage(self.socket(), pools, **limits)

        def window(pages):
            named = [chain[page] for page in pages]
            return PoolTransfer(PoolName.SWA, slots(pages), keys=named, hit_policy=PoolHitPolicy.TRAILING_PAGES)

        def rank(number):
            pools = {PoolName.KV: mha("page_first", heads=2), PoolName.SWA: mha("page_first", heads=2)}
            backend = storage(self.socket(), pools, rank=number, ranks=2, instance="two", **limits)
            found = backend.batch_exists_v2(chain, [window([4, 5])])
            return found.kv_hit_pages, found.restorable_prefix_pages

        self.assertEqual(whole.batch_set_v1(chain[:5], slots(range(5))), [True] * 5)
        self.assertEqual(whole.batch_set_v2([window([0, 1, 3, 4])]), {"swa": [True] * 4})
        first = rank(0)
        # Its last pages have come when the other rank asks.
        self.assertEqual(whole.batch_set_v1(chain[5:], slots([5])), [True])
        self.assertEqual(whole.batch_set_v2([window([5])]), {"swa": [True]})
        second = rank(1)
        self.assertEqual((first, second), ((5, [1, 2, 5]), (6, [2, 5, 6])))
        alone = whole.batch_exists_v2(chain, [window([4, 5])])
        self.assertEqual((alone.kv_hit_pages, alone.restorable_prefix_pages), (6, [6]))


def forked(*works):
    """The exit status of each, in a process of its own: 0 where it answers True."""
    processes = []
    for work in works:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                status = 0 if work() else 2
            finally:
                os._exit(status)
        processes.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


class SpaceTest(StorageCase):
    """What must be equal for two engines to share pages."""

    def test_other_weights_types_and_pages_share_nothing(self):
        chain = keys("spaces", 2)
        pool = mha("page_first")
        fill(pool, 1)
        backend = storage(self.socket(), {PoolName.KV: pool})
        self.assertEqual(backend.batch_set_v1(chain, slots([0, 1])), [True, True])
        same = storage(self.socket(), {PoolName.KV: mha("layer_first")})
        self.assertEqual(same.batch_exists(chain), 2)
        for what, pool, extra in (
            ("revision", mha("page_first"), {"revision": "2"}),
            ("model", mha("page_first"), {"model": "other"}),
            ("tenant", mha("page_first"), {"tenant": "other"}),
            ("type", mha("page_first", dtype=torch.float16), {}),
            ("page", mha("page_first", page=128), {}),
            ("layers", mha("page_first", layers=2), {}),
            ("heads", mha("page_first", heads=2), {}),
        ):
            with self.subTest(what):
                other = storage(self.socket(), {PoolName.KV: pool}, **extra)
                self.assertEqual(other.batch_exists(chain), 0)

    def test_layers_of_another_draft_in_the_same_pages_share_nothing(self):
        """MTP: SGLang keeps them behind the model's own."""

        def space(name, pool, draft):
            server = SimpleNamespace(speculative_algorithm="EAGLE", speculative_draft_model_path="/draft")
            settings = Settings(model="m", revision="r", draft_revision=draft)
            return describe(name, pool, PAGE, Engine(settings, server), Ranks(0, 1))[0].id

        (kv, index), (kv_alone, index_alone) = dsa("page_first", drafts=2), dsa("page_first")
        for name, pool, alone in (
            (PoolName.KV, mha("page_first", drafts=2), mha("page_first")),
            (PoolName.KV, mla("page_first", drafts=2), mla("page_first")),
            (PoolName.KV, kv, kv_alone),
            (PoolName.INDEXER, index, index_alone),
            (PoolName.MAMBA, mamba(drafts=2), mamba()),
        ):
            with self.subTest(type(pool).__name__):
                self.assertNotEqual(space(name, pool, "1"), space(name, pool, "2"))
                self.assertEqual(space(name, pool, "1"), space(name, pool, "1"))
                # Without them the draft is nothing to the model's own KV.
                self.assertEqual(space(name, alone, "1"), space(name, alone, "2"))

    def test_what_can_not_be_reused_is_refused_at_start(self):
        small = mha("page_first", page=16)
        with self.assertRaisesRegex(ValueError, "--page-size 64"):
            storage(self.socket(), {PoolName.KV: small})
        with self.assertRaisesRegex(ValueError, "pool draft_swa"):
            storage(self.socket(), {PoolName.KV: mha("page_first"), PoolName.DRAFT_SWA: mha("page_first")})
        with self.assertRaisesRegex(ValueError, "pool kv"):
            storage(self.socket(), {PoolName.KV: mamba()})
        with self.assertRaisesRegex(ValueError, "window_tokens"):
            storage(self.socket(), {PoolName.KV: mha("page_first"), PoolName.SWA: mha("page_first")})
        with self.assertRaisesRegex(ValueError, "set model and revision"):
            storage(self.socket(), {PoolName.KV: mha("page_first")}, revision="")
        with self.assertRaisesRegex(ValueError, "attn_cp_size 2"):
            KvGateStorage(replace(config(self.socket()), attn_cp_size=2))
        with self.assertRaisesRegex(ValueError, "(?s)unknown key 'sokcet'.*pin_ms must be int"):
            KvGateStorage(config(self.socket(), sokcet="", pin_ms="1"))
        with self.assertRaisesRegex(ValueError, "interface_v1"):
            KvGateStorage(config(self.socket(), interface_v1=0))
        with self.assertRaisesRegex(ValueError, "less than 10000"):
            KvGateStorage(config(self.socket(), deadline_ms=20000))

    def test_longrope_depends_on_what_else_is_computed_and_is_refused(self):
        short, long = 16, 64
        rope = get_rope(
            8,
            rotary_dim=8,
            max_position=long,
            base=10000,
            rope_scaling={
                "rope_type": "longrope",
                "original_max_position_embeddings": short,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
            },
        )
        key = torch.ones(3, 8)
        alone, beside = (
            rope.forward(torch.tensor([1, 2, other]), key.clone(), key.clone())[1][:2] for other in (3, short + 1)
        )
        # The reason to refuse it. Where SGLang mends this, kvgate need not.
        self.assertFalse(torch.equal(alone, beside))

        def model(tokens, **named):
            text = SimpleNamespace(**{"max_position_embeddings": long, "rope_scaling": None, **named})
            return SimpleNamespace(context_len=tokens, hf_text_config=text)

        scaling = {"rope_type": "longrope", "original_max_position_embeddings": short}
        for named in (
            {"rope_scaling": scaling},
            {"rope_parameters": {"full_attention": scaling}},
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": short},
        ):
            with self.assertRaisesRegex(ValueError, f"--context-length {short}"):
                refuse_long_rope(model(long, **named))
            refuse_long_rope(model(short, **named))
        refuse_long_rope(model(long, rope_scaling={"rope_type": "yarn", "factor": 2.0}))


class FlushTest(StorageCase):
    """SGLang clears its host pools when it flushes its cache, as it does after new weights."""

    def flushed(self, pool):
        HostPoolGroup([PoolEntry(PoolName.KV, pool, None, None, is_primary_index_anchor=True)]).clear()

    def test_an_engine_has_what_it_stored_since_the_flush(self):
        chain, pool = keys("flush", 3), mha("page_first")
        fill(pool, 1)
        backend = storage(self.socket(), {PoolName.KV: pool})
        other = storage(self.socket(), {PoolName.KV: mha("page_first")}, instance="other")
        self.assertEqual(backend.batch_set_v1(chain, slots([0, 1, 2])), [True] * 3)
        self.flushed(pool)
        self.assertEqual(backend.batch_exists(chain), 0)
        self.assertEqual(backend.batch_get_v1(chain, slots([4, 5, 6])), [False] * 3)
        fill(pool, 2)
        before = bytes_of(pool, 0).clone()
        self.assertEqual(backend.batch_set_v1(chain[:1], slots([0])), [True])
        self.assertEqual((backend.batch_exists(chain), other.batch_exists(chain)), (1, 3))
        wipe(pool)
        self.assertEqual(backend.batch_get_v1(chain[:1], slots([7])), [True])
        self.assertTrue(torch.equal(bytes_of(pool, 7 * PAGE), before))
        self.flushed(pool)
        self.assertEqual(backend.batch_exists(chain), 0)

    def test_fixed_weights_forget_nothing(self):
        chain, pool = keys("fixed", 2), mha("page_first")
        backend = storage(self.socket(), {PoolName.KV: pool}, fixed_weights=True)
        self.assertEqual(backend.batch_set_v1(chain, slots([0, 1])), [True] * 2)
        self.flushed(pool)
        self.assertEqual(backend.batch_exists(chain), 2)

    def test_a_name_of_before_finds_nothing_of_before(self):
        """An engine with the same `instance` may have had other weights after its flush."""

        def stored():
            pool = mha("page_first")
            backend = storage(self.socket(), {PoolName.KV: pool}, instance="mine")
            self.flushed(pool)
            return backend._hashes(keys("instance", 2))

        self.assertNotEqual(stored(), stored())

    def test_a_backend_that_comes_later_knows_of_the_flushes(self):
        chain, pool = keys("later", 2), mha("page_first")
        first = storage(self.socket(), {PoolName.KV: pool})
        self.assertEqual(first.batch_set_v1(chain, slots([0, 1])), [True] * 2)
        first.close()
        self.assertEqual(storage(self.socket(), {PoolName.KV: pool}).batch_exists(chain), 2)
        self.flushed(pool)
        self.assertEqual(storage(self.socket(), {PoolName.KV: pool}).batch_exists(chain), 0)

    def test_nobody_knows_what_was_before_an_attach_at_run_time(self):
        chain = keys("attach", 2)
        backend = storage(self.socket(), {PoolName.KV: mha("page_first")})
        self.assertEqual(backend.batch_set_v1(chain, slots([0, 1])), [True] * 2)
        for named, found in (({}, 0), ({"revision": "1"}, 2), ({"fixed_weights": True}, 2)):
            with self.subTest(named), mock.patch("kvgate.sglang.storage.of_server", running(**named)):
                backend = storage(self.socket(), {PoolName.KV: mha("page_first")}, **named)
                self.assertEqual(backend.batch_exists(chain), found)


def running(revision=None, **_):
    """The engine of a server that was started without kvgate. Its weights are digested, unless it is told which they are."""

    def of_server(settings):
        engine = Engine(replace(settings, revision=revision or ""), is_running=True)
        engine.__dict__["revision"] = "1"
        return engine

    return of_server


class SilentTest(StorageCase):
    """An S3 that takes connections and never answers."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-sglang-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        silent = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.addCleanup(silent.close)
        room = {"KVGATE__STORE__WRITE_BEHIND": "2MiB", "KVGATE__LOAD__RESERVE": "2MiB"}
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        changed = mock.patch.dict(os.environ, {**room, **keys})
        changed.start()
        self.addCleanup(changed.stop)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        s3 = ["--endpoint", endpoint, "--bucket", "bucket", "--arena-size", "32MiB"]
        self.gateway = Gateway(folder.name, s3=s3)
        self.addCleanup(self.gateway.kill)
        self.gateway.start()

    def took(self, call):
        began = time.monotonic()
        return call(), time.monotonic() - began

    def test_a_gateway_without_room_is_waited_for_once(self):
        """SGLang has one thread for the stores of all pools, and flushes nothing while one is under way."""
        pool = mha("page_first", heads=16, head_dim=64)
        backend = storage(self.socket(), {PoolName.KV: pool}, store_deadline_ms=1500)
        number = 0
        while all(backend.batch_set_v1(keys(f"room {number}", 2), slots([0, 1]))):
            number += 1

        def stores():
            return [backend.batch_set_v1(keys(f"more {at}", 2), slots([0, 1])) for at in range(5)]

        done, seconds = self.took(stores)
        self.assertEqual(done, [[False] * 2] * 5)
        # One that waits takes all that by itself.
        self.assertLess(seconds, 1.5)
        self.gateway.kill()
        self.gateway.s3 = ["--embedded", self.gateway.folder / "objects"]
        self.gateway.start()
        self.assertEqual(backend.batch_set_v1(keys("again", 2), slots([0, 1])), [True] * 2)

    def test_lookups_do_not_wait_one_after_the_other(self):
        chain = keys("silent", 4)
        backend = storage(self.socket(), {PoolName.KV: mha("page_first")}, lookup_deadline_ms=500)
        self.assertEqual(backend.batch_set_v1(chain[:2], slots([0, 1])), [True] * 2)
        # After three of them it is known. What is in the gateway's memory is found all the time.
        for number in range(3):
            self.assertEqual(backend.batch_exists(chain[:2] + keys(f"first {number}", 2)), 2)
        found, seconds = self.took(lambda: [backend.batch_exists(chain[:2] + keys(at, 2)) for at in range(10)])
        self.assertEqual(found, [2] * 10)
        self.assertLess(seconds, 5 * 0.5)

    def test_what_goes_beside_kv_has_no_deadline_of_its_own(self):
        """SGLang stops its threads in 10 s, and looks for that between two loads of all pools."""
        limits = {"deadline_ms": 1500, "patience_ms": 250, "lookup_deadline_ms": 100}
        pools = {PoolName.KV: mha("page_first"), PoolName.SWA: mha("page_first"), PoolName.MAMBA: mamba()}
        backend = storage(self.socket(), pools, window_tokens=128, **limits)
        chain = keys("beside", 2)
        sides = [
            PoolTransfer(PoolName.SWA, slots([0, 1]), keys=chain, hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.MAMBA, torch.tensor([1]), keys=chain[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ]
        nothing = {"swa": [False] * 2, "mamba": [False]}
        with self.subTest("of their own"):
            done, seconds = self.took(lambda: backend.batch_get_v2(sides))
            self.assertEqual(done, nothing)
            self.assertLess(seconds, 1.5)
        with self.subTest("beside KV"):
            load = lambda: (backend.batch_get_v1(chain, slots([0, 1])), backend.batch_get_v2(sides[:1]))  # noqa: E731
            done, seconds = self.took(load)
            self.assertEqual(done, ([False] * 2, {"swa": [False] * 2}))
            self.assertLess(seconds, 1.5)


class BesideTest(StorageCase):
    def test_no_more_is_loaded_beside_kv_than_kv_has(self):
        """Beyond that SGLang makes no use of it."""
        pools = {PoolName.KV: mha("page_first"), PoolName.SWA: mha("page_first")}
        backend = storage(self.socket(), pools, window_tokens=128)
        chain = keys("less", 4)

        def beside(pages):
            return [PoolTransfer(PoolName.SWA, slots(pages), keys=chain, hit_policy=PoolHitPolicy.TRAILING_PAGES)]

        self.assertEqual(backend.batch_set_v2(beside(range(4))), {"swa": [True] * 4})
        self.assertEqual(backend.batch_set_v1(chain[:2], slots([0, 1])), [True] * 2)
        self.assertEqual(backend.batch_get_v1(chain, slots(range(8, 12))), [True] * 2 + [False] * 2)
        self.assertEqual(backend.batch_get_v2(beside(range(8, 12))), {"swa": [True] * 2 + [False] * 2})
        self.assertEqual(backend.batch_get_v1(chain[2:], slots([8, 9])), [False] * 2)
        with mock.patch.object(backend, "pages", wraps=backend.pages) as pages:
            backend.batch_get_v2([replace(beside([8, 9])[0], keys=chain[2:])])
        pages.load.assert_not_called()


class TroubleTest(StorageCase):
    def pools(self):
        return {PoolName.KV: mha("page_first"), PoolName.MAMBA: mamba(), PoolName.SWA: mha("page_first")}

    def every_call(self, backend):
        """Each answers as SGLang needs it, and in time."""
        chain, indices = keys("trouble", 3), slots([0, 1, 2])
        transfers = [
            PoolTransfer(PoolName.MAMBA, torch.tensor([1]), keys=chain[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.SWA, slots([0, 1]), keys=chain[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ]
        answers = {}
        for name, call in (
            ("exists", lambda: backend.batch_exists(chain, HiCacheStorageExtraInfo())),
            ("exists_v2", lambda: backend.batch_exists_v2(chain, transfers)),
            ("set_v2", lambda: backend.batch_set_v2(transfers)),
            ("set_v1", lambda: backend.batch_set_v1(chain, indices)),
            ("get_v1", lambda: backend.batch_get_v1(chain, indices)),
            ("get_v2", lambda: backend.batch_get_v2(transfers)),
            ("stats", backend.get_stats),
        ):
            began = time.monotonic()
            answers[name] = call()
            self.assertLess(time.monotonic() - began, 10, name)
        self.assertIsInstance(answers.pop("stats"), StorageMetrics)
        self.assertEqual([len(answers[name]) for name in ("set_v1", "get_v1")], [3, 3])
        for name in ("set_v2", "get_v2"):
            self.assertEqual({pool: len(done) for pool, done in answers[name].items()}, {"mamba": 1, "swa": 2})
        return answers

    def nothing(self, answers):
        self.assertEqual((answers["exists"], answers["exists_v2"].kv_hit_pages), (0, 0))
        self.assertEqual(answers["exists_v2"].restorable_prefix_pages, [])
        for name in ("set_v1", "get_v1"):
            self.assertEqual(answers[name], [False] * 3)
        for name in ("set_v2", "get_v2"):
            self.assertEqual(answers[name], {"mamba": [False], "swa": [False] * 2})

    def test_a_gateway_that_is_gone_or_hangs_costs_time_only(self):
        backend = storage(self.socket(), self.pools(), window_tokens=128, breaker_pause_ms=1, **SHORT)
        answers = self.every_call(backend)
        self.assertEqual(answers["get_v1"], [True] * 3)
        process = self.gateway.pid()
        hang(process)
        try:
            self.nothing(self.every_call(backend))
        finally:
            os.kill(process, signal.SIGCONT)
        self.gateway.kill()
        self.nothing(self.every_call(backend))
        self.gateway.start()
        answers = self.every_call(backend)
        self.assertEqual((answers["get_v1"], answers["get_v2"]["swa"]), ([True] * 3, [True] * 2))
        backend.close()
        self.nothing(self.every_call(backend))

    def test_a_page_whose_slot_became_another_chunk_s_is_none(self):
        """What was copied then may be of both."""
        pool, chain = mha("page_first"), keys("relent", 3)
        fill(pool, 5)
        backend = storage(self.socket(), {PoolName.KV: pool})
        self.assertEqual(backend.batch_set_v1(chain, slots([0, 1, 2])), [True] * 3)
        between = self.socket().with_name("between.sock")
        proxy = Proxy(between, self.socket(), "--relent")
        self.addCleanup(proxy.end)
        second = storage(between, {PoolName.KV: pool})
        self.assertEqual(second.batch_exists(chain), 3)
        with self.assertLogs("kvgate.sglang.guard", "WARNING") as told:
            self.assertEqual(second.batch_get_v1(chain, slots([10, 11, 12])), [False] * 3)
        self.assertIn("another chunk's", told.output[0])
        # The slots were given back all the same: they can be lent again.
        self.assertEqual(backend.batch_get_v1(chain, slots([10, 11, 12])), [True] * 3)

    def test_a_bug_of_the_extension_ends_no_thread_of_sglang(self):
        backend = storage(self.socket(), self.pools(), window_tokens=128)
        with mock.patch.object(backend, "pages") as pages:
            for call in (pages.lookup, pages.load, pages.store):
                call.side_effect = PanicException("index out of bounds")
            with self.assertLogs("kvgate.sglang.guard", "WARNING") as told:
                self.nothing(self.every_call(backend))
        self.assertIn("PanicException: index out of bounds", told.output[0])

    def test_wrong_arguments_are_answered_for_each_page(self):
        backend = storage(self.socket(), self.pools(), window_tokens=128)
        chain = keys("wrong", 3)
        for indices in (None, slots([0, 1]), slots([0, 1, PAGES + 5]), slots([0, 1, 2]) + 1, slots([-1, 0, 1])):
            self.assertEqual(backend.batch_set_v1(chain, indices), [False] * 3)
            self.assertEqual(backend.batch_get_v1(chain, indices), [False] * 3)
        self.assertEqual(backend.batch_get_v1(["no hash"] * 3, slots([0, 1, 2])), [False] * 3)
        transfer = PoolTransfer(PoolName.INDEXER, slots([0]), keys=chain[:1])
        self.assertEqual(backend.batch_set_v2([transfer]), {"indexer": [False]})
        self.assertEqual(backend.batch_exists_v2(chain, [transfer]).kv_hit_pages, 0)
        self.assertEqual((backend.batch_exists([]), backend.batch_get_v1([], slots([0])[:0])), (0, []))

    def test_a_missing_page_ends_the_prefix_and_no_later_one_is_claimed(self):
        pool = mha("page_first")
        fill(pool, 2)
        backend = storage(self.socket(), {PoolName.KV: pool}, lookup_strategy="exact")
        chain = keys("gap", 6)
        kept = [0, 1, 3, 4]
        self.assertEqual(backend.batch_set_v1([chain[at] for at in kept], slots(kept)), [True] * 4)
        self.assertEqual(backend.batch_exists(chain), 2)
        self.assertEqual(backend.batch_get_v1(chain, slots([10, 11, 12, 13, 14, 15])), [True, True] + [False] * 4)

    def test_parents_are_told(self):
        pool = mha("page_first")
        backend = storage(self.socket(), {PoolName.KV: pool})
        chain = keys("parents", 4)
        backend.batch_set_v1(chain[2:], slots([0, 1]), HiCacheStorageExtraInfo(prefix_keys=chain[:2]))
        self.gateway.flush()
        parents = {path.name: path.read_bytes()[80:112].hex() for path in self.gateway.objects()}
        self.assertEqual(parents, {chain[2]: chain[1], chain[3]: chain[2]})


class DoctorTest(unittest.TestCase):
    def test_the_doctor_finds_this_engine_and_loads_the_backend(self):
        parts = ("s3", "transfer", "memory", "disks", "gpu", "api")
        skipped = [word for part in parts for word in ("--skip", part)]
        command = [KVGATE, "doctor", "--json", *skipped, "--timeout", "5m", "--python", sys.executable]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        # Another engine's remains in this environment are no failure.
        findings = json.loads(said.stdout)["findings"]
        (found,) = (one for one in findings if (one["check"], one["verdict"]) == ("engines", "ok"))
        for words in (f"SGLang {metadata.version('sglang')}", "kvgate.sglang load"):
            self.assertIn(words, found["seen"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
