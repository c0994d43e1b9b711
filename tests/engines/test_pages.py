"""The spaces of the pages that kvgate keeps below vLLM's own offloading, with configurations as vLLM has them, without an
engine.

python tests/engines/test_pages.py     in an environment with vLLM and the wheel
"""

import dataclasses
import json
import os
import unittest
from types import SimpleNamespace
from unittest import mock

from kvgate.vllm import pages
from kvgate.vllm.settings import TierSettings
from test_model import attention, engine, grouped, spec
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor, SlidingWindowSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

WINDOW = spec(SlidingWindowSpec, sliding_window=128)
PAGE = 65536


def setUpModule():
    """As on a GPU, where nothing depends on the machine that the test runs on."""
    for patch in (
        mock.patch.object(type(current_platform), "is_cpu", lambda self: False),
        mock.patch.dict(os.environ),
    ):
        patch.start()
        unittest.addModuleCleanup(patch.stop)
    os.environ.pop("PYTHONHASHSEED", None)


class Engine:
    """Layers of full attention and of a window, in two groups. A test changes what it is about."""

    def __init__(self, blocks=100, **model):
        self.config = engine(**model)
        self.config.cache_config.prefix_caching_hash_algo = "sha256"
        self.config.attention_config = SimpleNamespace(backend=None)
        self.config.use_v2_model_runner = False
        self.config.lora_config = None
        names = attention(0, 1), attention(2, 3)
        tensors = [KVCacheTensor(blocks * 8 * PAGE, list(of), blocks * PAGE, PAGE) for of in names]
        self.caches = grouped((spec(), names[0]), (WINDOW, names[1]), kv_cache_tensors=tensors, num_blocks=blocks)
        self.cache = OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=4)
        self.parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
        self.more, self.page = {}, PAGE

    def offloading(self):
        groups = tuple(
            OffloadingGroupConfig(
                tokens_per_block=group.kv_cache_spec.block_size, layer_names=tuple(group.layer_names), group_id=number
            )
            for number, group in enumerate(self.caches.kv_cache_groups)
        )
        fields = {
            "groups": groups,
            "worker_kv_bytes_per_block": PAGE // 4,
            "enable_kv_cache_events": False,
            "extra_config": {},
            "engine_id": "e",
            "model": OffloadingModelConfig("/a/path", "bfloat16"),
            "cache": self.cache,
            "parallel": self.parallel,
        }
        return OffloadingConfig(**{**fields, **self.more})

    def groups(self, **settings):
        config = self.offloading()
        tier = SimpleNamespace(config=config, blocks_per_chunk=config.cache.blocks_per_chunk)
        settings = TierSettings.read({"socket": "/nowhere/sock", **settings})
        with mock.patch.object(pages, "configuration", lambda _: (self.config, self.caches)):
            return pages.describe(tier, self.page, settings)

    def ids(self, **settings):
        return [group.space.id for group in self.groups(**settings)]


def replaced(field, **values):
    return lambda engine: setattr(engine, field, dataclasses.replace(getattr(engine, field), **values))


def also(**values):
    return lambda engine: engine.more.update(values)


def group_of(number, spec):
    return lambda engine: setattr(engine.caches.kv_cache_groups[number], "kv_cache_spec", spec)


class SpaceTest(unittest.TestCase):
    def test_each_group_is_a_space(self):
        full, window = Engine().groups()
        self.assertEqual([full.number, window.number], [0, 1])
        self.assertEqual([full.is_chain, window.is_chain], [True, False])
        space = json.loads(full.space.canonical_json)
        wanted = {"dtype": "pages", "hash": "vllm-sha256", "kind": "full", "chunk_tokens": 64}
        self.assertEqual({name: space[name] for name in wanted}, wanted)
        self.assertEqual([plane["row_bytes"] for plane in space["planes"]], [PAGE])
        self.assertNotEqual(full.space.id, window.space.id)

    def test_other_engines_have_the_same(self):
        self.assertEqual(Engine().ids(), Engine().ids())
        # Nothing in it is of one process, such as an address.
        made = Engine()
        for group in made.offloading().groups:
            self.assertNotIn(" at 0x", str(list(pages.specs(made.config, made.caches, group))))
        # With more or less memory.
        self.assertEqual(Engine(blocks=7).ids(), Engine(blocks=100).ids())
        self.assertEqual(Engine().ids(pin_ms=7), Engine().ids())

    def test_what_the_bytes_depend_on_makes_another_space(self):
        changes = {
            "block size": group_of(0, spec(block_size=32)),
            "the other group": group_of(1, spec(SlidingWindowSpec, sliding_window=256)),
            "blocks of a page": replaced("cache", blocks_per_chunk=8),
            "tokens of a hash": replaced("cache", tokens_per_hash=8),
            "bytes": lambda engine: setattr(engine, "page", 2 * PAGE),
            "ranks": replaced("parallel", tp_size=2, world_size=2),
            "stages": replaced("parallel", pp_size=2, world_size=2),
            "canonical": also(canonical_layout=True),
            "replicated": also(replicated_layout=True),
            "layout": also(kv_cache_layout="LBHNC"),
            "dtype": also(model=OffloadingModelConfig("/a/path", "fp8")),
            "backend": lambda engine: setattr(engine.config.attention_config, "backend", "FLASH_ATTN"),
            "runner": lambda engine: setattr(engine.config, "use_v2_model_runner", True),
            "hash": lambda engine: setattr(engine.config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
            "layers that share memory": lambda engine: setattr(engine.caches.kv_cache_tensors[1], "offset", 5),
            "layers": lambda engine: engine.caches.kv_cache_tensors[1].layers.reverse(),
            "quantization": lambda engine: setattr(engine.config.model_config, "quantization", "fp8"),
            "weights": lambda engine: setattr(engine.config.model_config, "revision", "f" * 40),
        }
        known = {"as it is": Engine().ids()}
        for name, change in changes.items():
            other = Engine()
            change(other)
            known[name] = other.ids()
        known["tenant"] = Engine().ids(tenant="t")
        with mock.patch.dict(os.environ, PYTHONHASHSEED="5"):
            known["seed"] = Engine().ids()
        with mock.patch.object(pages, "vllm_version", "0.99"):
            known["vLLM"] = Engine().ids()
        with mock.patch.object(type(current_platform), "get_device_capability", lambda self=None: (9, 0)):
            known["GPU"] = Engine().ids()
        for group in range(2):
            self.assertEqual(len({ids[group] for ids in known.values()}), len(known), known)

    def test_an_epoch_is_another_space(self):
        (group, _) = Engine().groups()
        self.assertEqual(len({group.space.id, group.of_epoch("a").space.id, group.of_epoch("b").space.id}), 3)
        self.assertEqual(group.of_epoch("a").of_epoch("b").space.id, group.of_epoch("b").space.id)


class RefusedTest(unittest.TestCase):
    def refuses(self, told, change, **settings):
        other = Engine()
        change(other.config)
        with self.assertRaisesRegex(ValueError, told):
            other.ids(**settings)

    def test_hashes_that_may_collide(self):
        for name in ("xxhash", "xxhash_cbor"):
            self.refuses(
                "take sha256 or sha256_cbor", lambda c, n=name: setattr(c.cache_config, "prefix_caching_hash_algo", n)
            )

    def test_adapters_by_their_path(self):
        def with_adapters(config):
            config.lora_config = SimpleNamespace(target_modules=None)

        self.refuses("adapters_by_path", with_adapters)
        other = Engine()
        with_adapters(other.config)
        other.ids(adapters_by_path=True)

    def test_images_without_digests(self):
        def without(config):
            config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=0)
            config.cache_config.enable_prefix_caching = False

        self.refuses("mm_processor_cache_gb", without)

    def test_weights_that_nothing_pins(self):
        self.refuses("set revision", lambda config: setattr(config.model_config, "revision", "main"))
        other = Engine(revision="main")
        other.ids(revision="mine-1")


class ConfigurationTest(unittest.TestCase):
    """vLLM gives a tier its own configuration only; the engine's is found where the tier is made."""

    def made(self, vllm_config, kv_cache_config, of):
        self.assertTrue(vllm_config and kv_cache_config)
        return self.beside(object(), of)

    def beside(self, vllm_config, of):
        """Another one of the same name is none."""
        self.assertTrue(vllm_config)
        return pages.configuration(of)

    def test_it_is_the_one_that_the_tiers_was_made_from(self):
        ours, other = (object.__new__(VllmConfig) for _ in range(2))
        cache = object.__new__(KVCacheConfig)
        with mock.patch.object(
            pages, "build_offloading_config", lambda engine, _: "ours" if engine is ours else "other"
        ):
            self.assertIs(self.made(ours, cache, "ours")[0], ours)
            with self.assertRaisesRegex(ValueError, "take vLLM 0.32 or 0.33"):
                self.made(other, cache, "ours")

    def test_without_one_the_engine_does_not_start(self):
        with self.assertRaisesRegex(ValueError, "take vLLM 0.32 or 0.33"):
            pages.configuration(Engine().offloading())


if __name__ == "__main__":
    unittest.main(verbosity=2)
