"""The backend with SGLang's own host pools and classes, and a real gateway: layouts, ranks, refusals, trouble.

python tests/engines/test_sglang_storage.py     in an environment with SGLang and the wheel
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cpu_hicache  # noqa: F401
import torch
from gateway import KVGATE, Gateway, Proxy
from kvgate._native import PanicException
from kvgate.sglang import KvGateStorage
from kvgate.sglang.identity import Engine, refuse_long_rope
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer
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
        os.kill(process, signal.SIGSTOP)
        tasks = [path / "stat" for path in Path(f"/proc/{process}/task").iterdir()]
        while not all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in tasks):
            time.sleep(0.01)
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
