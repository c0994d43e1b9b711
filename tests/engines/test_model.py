"""The space of a model, and the models that are refused; with configurations as vLLM has them, without an engine.

python tests/engines/test_model.py     in an environment with vLLM and the wheel
"""

import json
import os
import pickle
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from huggingface_hub import ResolvedRevision
from kvgate import weights
from kvgate.vllm import KvGateConnector
from kvgate.vllm.model import describe
from kvgate.vllm.settings import Settings
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import resolve_quantization_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model_config(**more):
    fields = {
        "model": "Qwen/Qwen3-8B",
        "revision": COMMIT,
        "hf_config": SimpleNamespace(architectures=["Qwen3ForCausalLM"]),
        "hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        "dtype": torch.bfloat16,
        "quantization": None,
        "hf_overrides": {},
        "hf_config_path": None,
        "quantization_config": None,
        "multimodal_config": None,
        "max_model_len": 4096,
        "original_max_model_len": None,
        "get_total_num_kv_heads": lambda: 8,
        "runner_type": "generate",
        "is_prefix_caching_supported": True,
    }
    return SimpleNamespace(**{**fields, **more})


def hf_config(**more):
    return SimpleNamespace(architectures=["Qwen3ForCausalLM"], **more)


def engine(load_format="auto", **more):
    """vLLM's configuration; `more` is of the model's."""
    return SimpleNamespace(
        model_config=model_config(**more),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=None,
        kv_events_config=None,
        scheduler_config=SimpleNamespace(policy="fcfs"),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"socket": "/nowhere/sock"},
            kv_load_failure_policy="recompute",
            is_kv_consumer=True,
            is_kv_producer=True,
        ),
    )


def caches(kind=FullAttentionSpec, **more):
    """Two layers of full attention in one group."""
    fields = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    spec = kind(**{**fields, **more})
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=names)])


def space(config, kv_caches=None, **settings):
    """The space's JSON."""
    model = describe(config, kv_caches or caches(), Settings.read({"socket": "/nowhere/sock", **settings}))
    return json.loads(model.space.canonical_json)


def scheduler_side(config):
    return KvGateConnector(config, KVConnectorRole.SCHEDULER, caches()).scheduler


def setUpModule():
    """As on a GPU, where nothing depends on the machine that the test runs on."""
    patch = mock.patch.object(type(current_platform), "is_cpu", lambda self: False)
    patch.start()
    unittest.addModuleCleanup(patch.stop)


class CpuTest(unittest.TestCase):
    def layout(self, block_size, packing):
        with (
            mock.patch.object(type(current_platform), "is_cpu", lambda self: True),
            mock.patch("vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *_: packing),
        ):
            return space(engine(), caches(block_size=block_size))["extra"].get("cpu_layout")

    def test_blocks_that_a_cpu_packs_otherwise_are_another_space(self):
        found = {self.layout(block_size, packing) for block_size in (32, 64, 128) for packing in ("vec", "amx")}
        self.assertEqual(len(found), 6)
        self.assertNotIn("cpu_layout", space(engine())["extra"])


class RankTest(unittest.TestCase):
    def test_ranks_that_no_single_gateway_or_scheduler_serves(self):
        for told, more in (
            ("--nnodes", {"nnodes_within_dp": 2}),
            ("external_launcher", {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}),
        ):
            config = engine()
            vars(config.parallel_config).update(more)
            with self.assertRaisesRegex(ValueError, told):
                space(config)

    def test_slots_of_their_own_for_k_and_v(self):
        with self.assertRaisesRegex(ValueError, "--attention-backend"):
            space(engine(), caches(num_head_slots=2))

    def test_experts_that_vllm_wants_of_loaded_tokens(self):
        config = engine()
        config.aux_output_config = SimpleNamespace(enabled=True)
        with mock.patch("kvgate.vllm.model.AuxOutputSchedulerConnector", object):
            self.assertRaisesRegex(ValueError, "routed-experts", space, config)
        with mock.patch("kvgate.vllm.model.AuxOutputSchedulerConnector", SimpleNamespace(cap_external_hit=None)):
            space(config)

    def test_vllm_finds_the_connector_by_its_name(self):
        """MultiConnector does so for statistics, in the process that serves."""
        named = {"KvGateConnector": {}}
        self.assertIs(KVConnectorFactory.get_connector_class_by_name("KvGateConnector"), KvGateConnector)
        self.assertEqual(list(MultiConnector.build_kv_connector_stats(named).data), list(named))


class RevisionTest(unittest.TestCase):
    def folder(self, path):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        os.environ["XDG_CACHE_HOME"] = folder.name + "/cache"
        model = Path(folder.name) / path
        model.mkdir(parents=True)
        (model / "model.safetensors").write_bytes(bytes(100))
        return model

    def revision(self, **more):
        return space(engine(**more))["revision"]

    def test_a_hub_s_name_is_pinned_by_what_vllm_resolved_it_to(self):
        for asked in (None, "main"):
            # As the engine's process gets it.
            resolved = pickle.loads(pickle.dumps(ResolvedRevision(COMMIT, asked, "Qwen/Qwen3-8B")))
            self.assertEqual(self.revision(revision=resolved), COMMIT)
        self.assertEqual(self.revision(revision=COMMIT), COMMIT)

    def test_a_branch_pins_nothing(self):
        for asked in (None, "main", "v1.0", COMMIT[:12]):
            with self.assertRaisesRegex(ValueError, "nothing pins the weights of Qwen/Qwen3-8B: set revision"):
                self.revision(revision=asked)
            self.assertEqual(space(engine(revision=asked), revision="mine")["revision"], "mine")

    def test_a_folder_goes_by_its_bytes_whatever_was_asked(self):
        model = self.folder("model")
        self.assertEqual(self.revision(model=str(model), revision=COMMIT), weights.digest(model))

    def test_a_folder_without_weights_is_told(self):
        model = self.folder("model")
        (model / "model.safetensors").unlink()
        with self.assertRaisesRegex(ValueError, "has no weights .*: set revision in kv_connector_extra_config"):
            self.revision(model=str(model))

    def test_files_that_kv_depends_on_are_in_the_digest(self):
        model = self.folder("model")
        seen = {self.revision(model=str(model))}
        for name in (
            "config.json",
            "params.json",
            "hf_quant_config.json",
            "quantize_config.json",
            "preprocessor_config.json",
            "modeling_own.py",
            "own/layers.py",
            "model.safetensors.index.json",
            "whisper-large-v3/model.safetensors",
            "consolidated.npz",
        ):
            for content in (b"1", b"2"):
                (model / name).parent.mkdir(exist_ok=True)
                (model / name).write_bytes(content)
                found = self.revision(model=str(model))
                self.assertNotIn(found, seen, name)
                seen.add(found)
        for name in (".cache/huggingface/etag", ".git/HEAD", "README.md", "generation_config.json", "original/a.pth"):
            (model / name).parent.mkdir(parents=True, exist_ok=True)
            (model / name).write_bytes(b"1")
            self.assertIn(self.revision(model=str(model)), seen, name)

    def test_a_link_is_followed_and_a_circle_ends(self):
        model = self.folder("model")
        before = self.revision(model=str(model))
        (model / "self").symlink_to(model)
        self.assertEqual(self.revision(model=str(model)), before)
        other = model.parent / "other"
        other.mkdir()
        (other / "layers.py").write_text("1")
        (model / "own").symlink_to(other)
        self.assertNotEqual(self.revision(model=str(model)), before)

    def test_offline_the_hub_s_cache_tells_the_same_commit(self):
        model = self.folder(f"hub/models--Qwen--Qwen3-8B/snapshots/{COMMIT}")
        self.assertEqual(self.revision(model=str(model), revision=None), COMMIT)


PLAIN = {
    "rope": '{"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}',
    "compute": "torch.bfloat16",
    "quantization": "",
}


class ExtraTest(unittest.TestCase):
    def more(self, **more):
        """The keys of `extra` beside those of a plain engine."""
        extra = space(engine(**more))["extra"]
        self.assertLessEqual(PLAIN.items() - {("rope", PLAIN["rope"])}, extra.items())
        return {key: value for key, value in extra.items() if PLAIN.get(key) != value}

    def test_a_plain_engine_s_never_changes(self):
        # Or nothing that was stored would be found.
        self.assertEqual(space(engine())["extra"], PLAIN)
        self.assertEqual(self.more(multimodal_config=MultiModalConfig()), {})

    def test_flags_that_change_kv_are_in_it(self):
        self.assertEqual(
            self.more(hf_overrides={"sliding_window": None, "rope_parameters": {"rope_theta": 5}}),
            {"hf_overrides": '{"rope_parameters": {"rope_theta": 5}, "sliding_window": null}'},
        )
        images = MultiModalConfig(mm_processor_kwargs={"max_pixels": 100}, media_io_kwargs={"video": {"num_frames": 8}})
        self.assertEqual(
            self.more(multimodal_config=images),
            {"mm_processor_kwargs": '{"max_pixels": 100}', "media_io_kwargs": '{"video": {"num_frames": 8}}'},
        )
        config = engine()
        for modules in (["q_proj", "k_proj"], ["k_proj", "q_proj"]):
            config.lora_config = SimpleNamespace(target_modules=modules)
            self.assertEqual(space(config)["extra"]["target_modules"], '["k_proj", "q_proj"]')
        online = [
            self.more(quantization_config=resolve_quantization_config("online", {"linear": name}))
            for name in ("fp8_per_tensor", "fp8_per_block", "fp8_per_tensor")
        ]
        self.assertNotEqual(online[0], online[1])
        self.assertEqual(online[0], online[2])

    def test_of_long_rope_the_choice_is_in_it(self):
        rope = {
            "rope_type": "longrope",
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 48,
            "long_factor": [2.5] * 200,
        }
        for parameters in (rope, {"full_attention": rope}):
            config = SimpleNamespace(rope_parameters=parameters)
            short, long = (self.more(hf_text_config=config, max_model_len=tokens) for tokens in (4096, 4097))
            self.assertEqual((short.pop("longrope"), long.pop("longrope")), ("short", "long"))
            # By the length that the model was built for, which vLLM lowers to what fits.
            lowered = {"original_max_model_len": -1, "max_model_len": 4096, "get_and_verify_max_len": lambda _: 4097}
            self.assertEqual(self.more(hf_text_config=config, **lowered)["longrope"], "long")
            # The factors are too long for a space, so it has their digest.
            self.assertEqual((short, len(short["rope"])), (long, 64))

    def test_which_of_several_files_and_codes_is_loaded_is_in_it(self):
        self.assertEqual(self.more(load_format="fastsafetensors", config_format="hf", model_impl="vllm"), {})
        for more in ({"config_format": "mistral"}, {"model_impl": "transformers"}, {"load_format": "mistral"}):
            (value,) = more.values()
            self.assertEqual(self.more(**more), {key: json.dumps(value) for key in more})
        code = "f" * 40
        remote = {"AutoModel": "org/code--modeling.Own", "AutoTokenizer": ["Qwen/Qwen3-8B--tokenizer.Own", None]}
        self.assertEqual(
            self.more(hf_config=hf_config(auto_map=remote), trust_remote_code=True, code_revision=code),
            {"code_revision": json.dumps(code)},
        )
        own = {"AutoModel": "Qwen/Qwen3-8B--modeling.Own", "AutoConfig": "config.Own"}
        self.assertEqual(self.more(hf_config=hf_config(auto_map=own), trust_remote_code=True), {})

    def test_weights_that_nothing_pins_need_a_revision(self):
        for more, told in (
            ({"load_format": "dummy"}, "nothing pins random weights"),
            ({"hf_overrides": lambda config: config}, "nothing pins a function in hf_overrides"),
            ({"hf_config_path": "/other"}, "nothing pins a config from elsewhere .hf_config_path /other."),
            ({"load_format": "tensorizer"}, "nothing pins what load_format tensorizer loads"),
            ({"load_format": "ipc_cache"}, "nothing pins what load_format ipc_cache loads"),
            ({"model_weights": "s3://bucket/model"}, "nothing pins weights in an object storage"),
            ({"model_class_overrides": {"A": "b:C"}}, "nothing pins the code of model_class_overrides"),
            ({"model": __file__}, "nothing pins a model of a single file"),
            ({"hf_config": hf_config(text_model_id="org/text")}, "nothing pins weights from another repository"),
            (
                {"code_revision": "main", "trust_remote_code": True},
                "nothing pins code_revision main, which is no commit",
            ),
            (
                {"hf_config": hf_config(auto_map={"AutoModel": "org/code--modeling.Own"}), "trust_remote_code": True},
                "nothing pins code from another repository .auto_map org/code--modeling.Own",
            ),
        ):
            with self.assertRaisesRegex(ValueError, told + ".*: set revision in kv_connector_extra_config"):
                space(engine(**more))
            own = space(engine(**more), revision="mine")
            flags = {key: json.dumps(more[key]) for key in ("code_revision",) if key in more}
            self.assertEqual((own["revision"], own["extra"]), ("mine", {**PLAIN, **flags}))


class DtypeTest(unittest.TestCase):
    def dtype(self, cache_dtype, spec=FullAttentionSpec, **more):
        config = engine()
        config.cache_config.cache_dtype = cache_dtype
        dtype = kv_cache_dtype_str_to_dtype(cache_dtype, config.model_config)
        found = space(config, caches(spec, **{"dtype": dtype, **more}))
        return found["dtype"], found["planes"][0]["row_bytes"]

    def test_a_space_has_its_own_names(self):
        for name, dtype, row_bytes in (
            ("auto", "bfloat16", 512),
            ("float16", "float16", 512),
            ("fp8", "fp8_e4m3", 256),
            ("fp8_e4m3", "fp8_e4m3", 256),
            ("fp8_e5m2", "fp8_e5m2", 256),
        ):
            self.assertEqual(self.dtype(name), (dtype, row_bytes), name)

    def test_a_checkpoint_that_asks_for_fp8_is_known_in_the_scheduler_s_process(self):
        self.assertEqual(self.dtype("auto", dtype=torch.uint8), ("fp8_e4m3", 256))

    def test_other_bytes_are_refused_by_vllm_s_name(self):
        for name in ("nvfp4", "turboquant_4bit_nc", "int4_per_token_head", "fp8_per_token_head"):
            with self.assertRaisesRegex(ValueError, f"kv_cache_dtype {name} .torch.uint8. yet: set it to auto"):
                self.dtype(name)

    def test_a_layer_s_own_name_counts(self):
        # A worker may change it, and the scheduler's process is not told.
        mla = {"spec": MLAAttentionSpec, "num_kv_heads": 1, "head_size": 576}
        self.assertEqual(self.dtype("fp8", **mla, cache_dtype_str="fp8"), ("fp8_e4m3", 576))
        with self.assertRaisesRegex(ValueError, "kv_cache_dtype fp8_ds_mla "):
            self.dtype("fp8", **mla, cache_dtype_str="fp8_ds_mla")


class RefusalTest(unittest.TestCase):
    def test_scales_that_each_engine_makes(self):
        config = engine()
        config.cache_config.calculate_kv_scales = True
        with self.assertRaisesRegex(ValueError, "set calculate_kv_scales to false"):
            space(config)

    def test_models_for_which_vllm_turns_prefix_caching_off(self):
        class Hook:
            @staticmethod
            def verify_and_update_config(vllm_config):
                vllm_config.cache_config.enable_prefix_caching = False

        class Other:
            @staticmethod
            def verify_and_update_config(vllm_config):
                vllm_config.cache_config.block_size = 64

        for hook, is_refused in ((Hook, True), (Other, False)):
            config = engine(architecture="HookedForCausalLM")
            config.cache_config.enable_prefix_caching = False
            with mock.patch.dict(MODELS_CONFIG_MAP, {"HookedForCausalLM": hook}):
                if is_refused:
                    with self.assertRaisesRegex(ValueError, "HookedForCausalLM: vLLM turns prefix caching off"):
                        space(config)
                else:
                    space(config)
            self.assertFalse(hasattr(config.cache_config, "block_size"), "a copy is asked")

    def test_kv_is_reused_where_a_user_turned_prefix_caching_off(self):
        config = engine()
        config.cache_config.enable_prefix_caching = False
        space(config)

    def test_attention_that_looks_ahead(self):
        mla = {"num_kv_heads": 1, "head_size": 576, "non_causal_multi_token_decode": True}
        for kv_caches in (caches(non_causal=True), caches(MLAAttentionSpec, **mla)):
            with self.assertRaisesRegex(ValueError, "causal attention only"):
                space(engine(), kv_caches)

    def test_subclasses_of_full_attention(self):
        for kind, more, told in (
            (RSWASpec, {"rswa_window": 128}, "R-SWA"),
            (SinkFullAttentionSpec, {"sink_len": 16}, "sinks"),
            (SlidingWindowSpec, {"sliding_window": 128}, "all of whose layers attend to a sliding window"),
        ):
            with self.assertRaisesRegex(ValueError, f"can't reuse .*{told}.* yet: run this model without kvgate"):
                space(engine(), caches(kind, **more))
        mla = caches(MLAAttentionSpec, num_kv_heads=1, head_size=576)
        self.assertEqual(space(engine(), mla)["planes"][0]["heads"], 1)

    def test_models_of_which_vllm_reuses_nothing(self):
        for more, told in (
            ({"is_prefix_caching_supported": False}, "prefix caching is not supported for this model"),
            ({"is_diffusion": True}, "a diffusion model"),
        ):
            with self.assertRaisesRegex(ValueError, told + ".*: run it without kvgate"):
                space(engine(**more), revision="mine")


class ImagesTest(unittest.TestCase):
    def test_with_both_caches_off_vllm_counts_images(self):
        for is_caching, gb, have_digests in ((True, 0, True), (False, 4, True), (False, 0, False)):
            config = engine(multimodal_config=MultiModalConfig(mm_processor_cache_gb=gb))
            config.cache_config.enable_prefix_caching = is_caching
            self.assertEqual(scheduler_side(config).items_have_digests, have_digests, (is_caching, gb))
        config = engine()
        config.cache_config.enable_prefix_caching = False
        self.assertTrue(scheduler_side(config).items_have_digests)


class PoolingTest(unittest.TestCase):
    def test_a_model_that_pools_over_all_tokens_loads_nothing(self):
        for runner, is_cached, loads in (
            ("pooling", False, False),
            ("pooling", True, True),
            ("generate", True, True),
        ):
            side = scheduler_side(engine(runner_type=runner, is_prefix_caching_supported=is_cached))
            # Its KV is stored: it is the same as that of others.
            self.assertEqual((side.is_consumer, side.is_producer), (loads, True), (runner, is_cached))


if __name__ == "__main__":
    unittest.main(verbosity=2)
