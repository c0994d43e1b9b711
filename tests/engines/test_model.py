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
from kvgate import Prompt, weights
from kvgate.vllm import KvGateConnector
from kvgate.vllm.connector import layers_of_all_stages
from kvgate.vllm.kinds import AllLayers, layers_of
from kvgate.vllm.model import describe
from kvgate.vllm.settings import Settings
from made_up import Pool
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import resolve_quantization_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
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
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=0),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=None,
        kv_events_config=None,
        scheduler_config=SimpleNamespace(policy="fcfs", async_scheduling=False),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"socket": "/nowhere/sock"},
            kv_load_failure_policy="recompute",
            is_kv_consumer=True,
            is_kv_producer=True,
        ),
    )


def spec(kind=FullAttentionSpec, **more):
    fields = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    return kind(**{**fields, **more})


def attention(*layers, part="self_attn.attn"):
    """vLLM's names."""
    return [f"model.layers.{layer}.{part}" for layer in layers]


def grouped(*groups, **more):
    """Of each its spec and the names of its layers."""
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups]
    return SimpleNamespace(kv_cache_groups=groups, **more)


def caches(kind=FullAttentionSpec, **more):
    """Two layers of full attention in one group."""
    return grouped((spec(kind, **more), attention(0, 1)))


def described(config, kv_caches=None, **settings):
    return describe(config, kv_caches or caches(), Settings.read({"socket": "/nowhere/sock", **settings}))


def spaces(config, kv_caches=None, **settings):
    """Their JSON."""
    return [json.loads(one.canonical_json) for one in described(config, kv_caches, **settings).spaces]


def space(config, kv_caches=None, **settings):
    (only,) = spaces(config, kv_caches, **settings)
    return only


def ids(config, kv_caches, **settings):
    return [one.id for one in described(config, kv_caches, **settings).spaces]


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

    def test_states_of_a_cpu_are_another_space(self):
        """Some lie transposed in the same shape: a GPU would go on from wrong numbers that every digest agrees with."""
        on_a_gpu = ids(engine(), qwen3_next())[1]
        with (
            mock.patch.object(type(current_platform), "is_cpu", lambda self: True),
            mock.patch("vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *_: "vec"),
        ):
            self.assertNotEqual(ids(engine(), qwen3_next())[1], on_a_gpu)


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

    def test_tokens_that_are_dealt_to_ranks_are_of_the_same_spaces(self):
        """A block is that of all ranks together, but where each rank has all of it."""
        for ranks in (2, 4):
            config = dealt(ranks)
            model = described(config, caches(num_kv_heads=1))
            self.assertEqual([one.id for one in model.spaces], ids(engine(), caches(num_kv_heads=1)))
            self.assertEqual((model.kinds[0].blocks, model.alignment), ({0: 16 * ranks}, 16 * ranks))
            self.assertEqual(
                [one.id for one in described(config, deepseek_v32()).spaces], ids(engine(), deepseek_v32())
            )
        model = described(dealt(3), caches())
        self.assertEqual((model.chunk_tokens, model.chunk_tokens % 48), (288, 0))
        self.assertRaisesRegex(ValueError, "chunk_tokens to 288", described, dealt(3), caches(), chunk_tokens=256)
        # A state is on each rank as a whole, and a draft that runs without.
        full, state = described(dealt(2), qwen3_next(tp=2)).kinds
        self.assertEqual((set(full.blocks.values()), set(state.blocks.values())), ({1088}, {544}))
        with_draft = grouped((spec(), attention(0, 1)), (spec(dcp_sharded=False), attention(4)))
        model = described(with_drafts(dealt(2)), with_draft)
        self.assertEqual([kind.blocks for kind in model.kinds], [{0: 32}, {1: 16}])

    def test_tokens_that_can_not_be_dealt(self):
        name = "decode_context_parallel_size 2"
        for kv_caches, told in (
            (gemma3(), f"windows.*{name}"),
            (caches(ChunkedLocalAttentionSpec, attention_chunk_size=512), f"chunked.*{name}"),
            (deepseek_v32(head_size=68), f"packed together.*{name}"),
        ):
            self.assertRaisesRegex(ValueError, told, described, dealt(2), kv_caches)
        described(dealt(2, 8))
        self.assertRaisesRegex(ValueError, "cp_kv_cache_interleave_size 32", described, dealt(2, 32))
        with (
            mock.patch.object(type(current_platform), "is_cpu", lambda self: True),
            mock.patch("vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *_: "vec"),
        ):
            self.assertRaisesRegex(ValueError, name, described, dealt(2))
        # Ranks that split a prefill have all of its KV.
        config = engine()
        config.parallel_config.prefill_context_parallel_size = 2
        self.assertEqual([one.id for one in described(config, gemma3()).spaces], ids(engine(), gemma3()))

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
        # Latents with scales among them.
        latent = {**mla, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}
        self.assertEqual(self.dtype("fp8", **latent), ("fp8_ds_mla", 656))
        with self.assertRaisesRegex(ValueError, "kv_cache_dtype nvfp4_ds_mla "):
            self.dtype("fp8", **mla, cache_dtype_str="nvfp4_ds_mla")


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

    def test_attention_that_is_no_function_of_the_prefix_or_not_known(self):
        for kind, more, told in (
            (RSWASpec, {"rswa_window": 128}, "R-SWA"),
            (SinkFullAttentionSpec, {"sink_len": 16}, "sinks"),
            (SlidingWindowMLASpec, {"sliding_window": 128, "num_kv_heads": 1}, "MLA with a sliding window"),
            (CrossAttentionSpec, {}, "an encoder's KV"),
            (EncoderOnlyAttentionSpec, {}, "an encoder's KV"),
        ):
            with self.assertRaisesRegex(ValueError, f"can't reuse .*{told}.* yet: run this model without kvgate"):
                space(engine(), caches(kind, **more))
            # Beside what is known, too.
            with self.assertRaisesRegex(ValueError, told):
                space(engine(), grouped((spec(), attention(0)), (spec(kind, **more), attention(1))))
        mla = caches(MLAAttentionSpec, num_kv_heads=1, head_size=576)
        self.assertEqual(space(engine(), mla)["planes"][0]["heads"], 1)

    def test_states_that_are_not_kept_at_block_boundaries(self):
        for mode in ("none", "all"):
            with self.assertRaisesRegex(ValueError, "states .Mamba, linear attention. .*--enable-prefix-caching"):
                space(engine(), qwen3_next(mamba_cache_mode=mode))

    def test_layers_that_can_t_be_waited_for(self):
        window = spec(SlidingWindowSpec, sliding_window=128)
        for kv_caches in (
            grouped((window, attention(0))),
            grouped((spec(), attention(0)), (spec(), attention(1))),
            qwen3_next(),
        ):
            with self.assertRaisesRegex(ValueError, "windows, states or several KV cache groups: leave layerwise out"):
                described(engine(), kv_caches, layerwise=True)
        described(engine(), caches(), layerwise=True)

    def test_a_layer_of_no_number(self):
        config = with_drafts(engine())
        with self.assertRaisesRegex(ValueError, "does not know the layer model.attn: run this model without kvgate"):
            described(config, grouped((spec(), ["model.attn"])))

    def test_models_of_which_vllm_reuses_nothing(self):
        for more, told in (
            ({"is_prefix_caching_supported": False}, "prefix caching is not supported for this model"),
            ({"is_diffusion": True}, "a diffusion model"),
        ):
            with self.assertRaisesRegex(ValueError, told + ".*: run it without kvgate"):
                space(engine(**more), revision="mine")


def gemma3(groups=5, layers=12):
    """Five layers with a window, then one without."""
    window = [layer for layer in range(layers) if layer % 6 < 5]
    dealt = [(spec(SlidingWindowSpec, sliding_window=1024), attention(*window[at::groups])) for at in range(groups)]
    return grouped(*dealt, (spec(), attention(*(layer for layer in range(layers) if layer % 6 == 5))))


def gpt_oss(*drafts):
    """`drafts`: layers of an EAGLE model; vLLM deals the others into other groups beside it."""
    window = spec(SlidingWindowSpec, sliding_window=128)
    if not drafts:
        return grouped((window, attention(0, 2)), (spec(), attention(1, 3)))
    return grouped((spec(), attention(1, *drafts)), (window, attention(0, 2)), (spec(), attention(3)))


def qwen3_next(tp=1, num_spec=0, dealt=3, **more):
    """A share of the states of three layers of four."""
    fields = {
        "block_size": 544,
        "shapes": ((3 + num_spec, 8192 // tp), (32 // tp, 128, 128)),
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_type": MambaAttentionBackendEnum.GDN_ATTN,
        "mamba_cache_mode": "align",
    }
    state = MambaSpec(**{**fields, **more})
    names = attention(0, 1, 2, 4, 5, 6, part="linear_attn")
    groups = [(state, names[at::dealt]) for at in range(dealt)]
    full = spec(block_size=544, num_kv_heads=max(1, 2 // tp), head_size=256)
    return grouped(*groups, (full, attention(3, 7)), cache_hit_alignment_tokens=544, hash_block_size=544)


def uniform(of_layer, block_size):
    """One group, each of whose layers has a spec of its own."""
    return grouped((UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=of_layer), list(of_layer)))


def deepseek_v32(head_size=132, block_size=64):
    """A latent, and the cache that sparse attention chooses tokens by."""
    mla = {"block_size": block_size, "num_kv_heads": 1}
    latent = spec(MLAAttentionSpec, **mla, head_size=576)
    indexer = spec(MLAAttentionSpec, **mla, head_size=head_size, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER)
    keys = attention(0, 1, part="self_attn.indexer.k_cache")
    return uniform({**dict.fromkeys(attention(0, 1), latent), **dict.fromkeys(keys, indexer)}, block_size)


def with_drafts(config, method="eagle3", layers=4, **draft):
    """`layers`: the model's own."""
    fields = {"model": "org/eagle", "revision": "e" * 40, "hf_config": hf_config()}
    config.model_config.hf_text_config.num_hidden_layers = layers
    config.speculative_config = SimpleNamespace(
        method=method,
        draft_model_config=model_config(**{**fields, **draft}),
        use_eagle_block_drop=lambda: method in ("eagle", "eagle3", "mtp"),
    )
    return config


def dealt(ranks, interleave=1):
    """Decode context parallel."""
    config = with_ranks(ranks, heads=1)
    config.parallel_config.decode_context_parallel_size = ranks
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    return config


def with_ranks(ranks, heads=8):
    config = engine(get_total_num_kv_heads=lambda: heads)
    config.parallel_config.tensor_parallel_size = ranks
    return config


def told(one):
    """What a space says of its kind: and of each plane the layer, the heads and the bytes of a row."""
    planes = [(plane["layer"], plane["heads"], plane["row_bytes"]) for plane in one["planes"]]
    return one["kind"], one["draft"], one["dtype"], planes


def planes_of(kind):
    """Of this rank: their indices in the space, and their heads."""
    return [(index, plane.heads) for planes in kind.planes for index, plane in planes.items()]


class KindsTest(unittest.TestCase):
    def test_windows_are_one_space_whatever_groups_they_are_dealt_into(self):
        full, window = spaces(engine(), gemma3())
        self.assertEqual(told(full), ("full", "", "bfloat16", [(5, 8, 512), (11, 8, 512)]))
        layers = [layer for layer in range(12) if layer % 6 < 5]
        self.assertEqual(told(window), ({"window": 1024}, "", "bfloat16", [(layer, 8, 512) for layer in layers]))
        expected = ids(engine(), gemma3())
        for groups in (1, 2, 3, 10):
            self.assertEqual(ids(engine(), gemma3(groups)), expected)
        turned = gemma3()
        turned.kv_cache_groups.reverse()
        self.assertEqual(ids(engine(), turned), expected)

    def test_a_kind_knows_its_groups_and_its_layers(self):
        full, window = described(engine(), gemma3()).kinds
        self.assertEqual((full.blocks, window.blocks), ({5: 16}, dict.fromkeys(range(5), 16)))
        # Of the planes in the space's order.
        self.assertEqual([layer.group for layer in window.layers], [0, 1, 2, 3, 4] * 2)
        self.assertEqual(planes_of(window), [(plane, 8) for plane in range(10)])

    def test_windows_of_another_length_are_another_space(self):
        two = grouped(
            (spec(SlidingWindowSpec, sliding_window=128), attention(0)),
            (spec(SlidingWindowSpec, sliding_window=512), attention(1)),
        )
        self.assertEqual([one["kind"] for one in spaces(engine(), two)], [{"window": 128}, {"window": 512}])
        # What vLLM keeps for drafts of several modules is needed, too.
        more = caches(SlidingWindowSpec, sliding_window=128, extra_retained_tokens=2)
        self.assertEqual(space(engine(), more)["kind"], {"window": 130})

    def test_with_the_hybrid_manager_off_windows_are_full(self):
        one = grouped((spec(sliding_window=128), attention(0, 1, 2, 3)))
        self.assertEqual(told(space(engine(), one))[0], "full")
        self.assertTrue(described(engine(), one).loads_in_part)

    def test_chunked_attention(self):
        chunked = spec(ChunkedLocalAttentionSpec, attention_chunk_size=8192)
        llama4 = grouped((chunked, attention(0, 1, 2)), (spec(), attention(3)))
        self.assertEqual([told(one)[0] for one in spaces(engine(), llama4)], ["full", {"chunked": 8192}])

    def test_states_of_several_groups_are_one_space(self):
        for dealt in (1, 2, 3):
            full, state = spaces(engine(), qwen3_next(dealt=dealt))
            # Queries, keys and values of the convolution, and the state.
            of_layer = [(16, 3 * 128 * 2), (16, 3 * 128 * 2), (32, 3 * 128 * 2), (32, 128 * 128 * 4)]
            planes = [(layer, *plane) for layer in (0, 1, 2, 4, 5, 6) for plane in of_layer]
            self.assertEqual(told(state), ("state", "", "bytes", planes))
            self.assertEqual(told(full)[0], "full")
            self.assertEqual(
                state["extra"]["states"], "GDN_ATTN [3, 8192] torch.bfloat16, [32, 128, 128] torch.float32"
            )

    def test_ranks_of_any_number_share_states(self):
        alone, *more = (spaces(with_ranks(ranks, heads=2), qwen3_next(ranks)) for ranks in (1, 2, 4))
        self.assertEqual(more, [alone] * 2)

    def test_a_state_that_is_not_known_to_be_cut_has_a_share_for_each_rank(self):
        kind = SimpleNamespace(name="SOME_OTHER")
        state, state2 = (spaces(with_ranks(ranks, heads=2), qwen3_next(ranks, mamba_type=kind))[1] for ranks in (1, 2))
        self.assertEqual(
            [(plane["heads"], 2 * plane["row_bytes"]) for plane in state2["planes"]],
            [(2, plane["row_bytes"]) for plane in state["planes"]],
        )
        replicated = spaces(with_ranks(2), qwen3_next(2, tp_replicated=True))[1]
        self.assertEqual({plane["heads"] for plane in replicated["planes"]}, {1})

    def test_states_of_another_shape_or_order_are_another_space(self):
        found = {
            ids(engine(), qwen3_next())[1],
            ids(engine(), qwen3_next(num_spec=1))[1],
            ids(engine(), qwen3_next(dtypes=(torch.float32, torch.float32)))[1],
            # The same bytes, told otherwise.
            ids(engine(), qwen3_next(shapes=((8192, 3), (32, 128, 128))))[1],
        }
        with mock.patch("kvgate.vllm.model.conv_layout", lambda: "DS"):
            found.add(ids(engine(), qwen3_next())[1])
        self.assertEqual(len(found), 5)

    def test_attention_and_a_state_in_one_layer(self):
        state = MambaSpec(
            block_size=256, shapes=((3, 768), (8, 64, 64)), dtypes=(torch.float32,) * 2, mamba_cache_mode="align"
        )
        falcon = grouped((spec(block_size=256), attention(0, 1)), (state, attention(0, 1, part="mamba")))
        full, state = spaces(engine(), falcon)
        self.assertEqual(
            [sorted({plane["layer"] for plane in one["planes"]}) for one in (full, state)], [[0, 1], [0, 1]]
        )
        self.assertEqual((full["kind"], state["kind"]), ("full", "state"))

    def test_a_latent_and_what_chooses_tokens_by_are_two_spaces(self):
        model = described(engine(), deepseek_v32())
        found = [json.loads(one.canonical_json) for one in model.spaces]
        self.assertEqual(told(found[0]), ("full", "", "bfloat16", [(0, 1, 1152), (1, 1, 1152)]))
        self.assertEqual(told(found[1]), ("full", "", "bytes", [(0, 1, 132), (1, 1, 132)]))
        self.assertEqual(found[1]["extra"]["cache_role"], "indexer")
        # One block table for both.
        self.assertEqual([kind.blocks for kind in model.kinds], [{0: 64}] * 2)
        self.assertTrue(model.loads_in_part)

    def test_an_indexer_s_blocks_of_another_layout_are_another_space(self):
        """Where its keys and scales can't be told apart, whole blocks are kept as they are."""
        plain = ids(engine(), deepseek_v32())
        self.assertEqual(ids(engine(), deepseek_v32(block_size=128)), plain)
        self.assertEqual(described(engine(), deepseek_v32()).kinds[1].row_parts, (128, 4))
        self.assertEqual(described(engine(), deepseek_v32()).kinds[0].row_parts, ())
        fp4 = engine()
        fp4.attention_config = SimpleNamespace(indexer_kv_dtype="mxfp4")
        found = {plain[1], ids(fp4, deepseek_v32())[1], ids(fp4, deepseek_v32(block_size=128))[1]}
        self.assertEqual(described(fp4, deepseek_v32()).kinds[1].row_parts, ())
        with mock.patch.object(type(current_platform), "is_rocm", lambda self: True):
            found |= {ids(engine(), deepseek_v32(block_size=size))[1] for size in (64, 128)}
        self.assertEqual(len(found), 5)

    def test_what_is_kept_once_for_several_tokens(self):
        self.assertRaisesRegex(ValueError, "several tokens", described, engine(), caches(tokens_per_state=4))

    def test_rows_of_different_width_are_one_space(self):
        of_layer = {name: spec(head_size=size) for name, size in zip(attention(0, 1), (128, 256), strict=True)}
        found = space(engine(), uniform(of_layer, 16))
        self.assertEqual(told(found)[3], [(0, 8, 512), (1, 8, 1024)])

    def test_what_no_prefix_has_is_left_out(self):
        ring = CircularBufferSpec(block_size=7, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        with_ring = grouped((ring, attention(0, 1, part="ring")), (spec(), attention(0, 1)))
        self.assertEqual(ids(engine(), with_ring), ids(engine(), caches()))
        model = described(engine(), with_ring)
        # Its blocks are no block table's.
        self.assertEqual((model.chunk_tokens, model.kinds[0].blocks), (256, {1: 16}))

    def test_all_kinds_of_a_model_have_the_same_hashes(self):
        for kv_caches in (gemma3(), gpt_oss(4), qwen3_next()):
            found = described(with_drafts(engine()), kv_caches).spaces
            self.assertGreater(len(found), 1)
            self.assertEqual(len({one.model_id for one in found}), 1)
            self.assertEqual(len({one.id for one in found}), len(found))
            prompts = [Prompt(one) for one in found]
            for prompt in prompts:
                prompt.extend(list(range(1200)))
            self.assertEqual(len({prompt.hashes(0, len(prompt)) for prompt in prompts}), 1)

    def test_what_is_needed_after_so_many_tokens(self):
        full, window = described(engine(), gemma3()).kinds
        # The next one attends to itself and 1023 before it.
        self.assertEqual([window.first_token(tokens) for tokens in (0, 1000, 1023, 1024, 2048)], [0, 0, 0, 1, 1025])
        self.assertEqual(full.first_token(2048), 0)
        chunked = described(engine(), caches(ChunkedLocalAttentionSpec, attention_chunk_size=512)).kinds[0]
        self.assertEqual([chunked.first_token(tokens) for tokens in (511, 512, 1000)], [0, 512, 512])
        state = described(engine(), qwen3_next()).kinds[1]
        self.assertEqual([state.first_token(tokens) for tokens in (0, 544)], [0, 543])


class ToldTest(unittest.TestCase):
    """The scheduler's copy of the configuration has one spec for a group, and the layers of the first stage."""

    def scheduler(self, config, kv_caches, told=None):
        copy = generate_scheduler_kv_cache_config([kv_caches])
        made = KvGateConnector(config, KVConnectorRole.SCHEDULER, copy)
        made.bind_gpu_block_pool(Pool())
        if told is not None:
            made.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        return made.scheduler

    def told(self, kv_caches):
        layers = layers_of_all_stages(1, kv_caches)
        return AllLayers(layers) if layers is not None else None

    def ids(self, scheduler):
        return [one.id for one in scheduler.model.spaces]

    def test_it_knows_the_spaces_of_the_workers(self):
        wide = {name: spec(head_size=size) for name, size in zip(attention(0, 1), (128, 256), strict=True)}
        for kv_caches in (caches(), gemma3(), qwen3_next(), deepseek_v32(), uniform(wide, 16)):
            kv_caches.num_blocks, kv_caches.hisparse_host_num_blocks = 100, None
            told = self.told(kv_caches)
            found = self.scheduler(engine(), kv_caches, told)
            self.assertEqual(self.ids(found), ids(engine(), kv_caches))
            self.assertIsNotNone(found.blocks.pool)
            is_needed = self.ids(self.scheduler(engine(), kv_caches)) != self.ids(found)
            self.assertEqual(is_needed, told is not None)

    def test_stages_have_the_same_spaces_and_planes_of_their_own(self):
        config = engine()
        config.parallel_config.pipeline_parallel_size = 2
        stages = [grouped((spec(), attention(*layers))) for layers in ((0, 1), (2, 3))]
        layers = [layer for stage in stages for layer in layers_of(stage)]
        settings = Settings.read({"socket": "/nowhere/sock"})
        ((first,), (second,)) = (describe(config, stage, settings, layers).kinds for stage in stages)
        self.assertEqual(first.space.id, second.space.id)
        self.assertEqual((planes_of(first), planes_of(second)), ([(0, 8), (1, 8)], [(2, 8), (3, 8)]))
        self.assertEqual([first.space.id], ids(engine(), grouped((spec(), attention(0, 1, 2, 3)))))


class DraftsTest(unittest.TestCase):
    def drafts(self, config, kv_caches, **settings):
        """What tells them from others', of each kind that has any."""
        return [one["draft"] for one in spaces(config, kv_caches, **settings) if one["draft"]]

    def test_the_model_s_own_spaces_are_the_same_with_drafts_and_without(self):
        plain = ids(engine(), gpt_oss())
        with_eagle = ids(with_drafts(engine()), gpt_oss(4))
        self.assertEqual(with_eagle[:2], plain)
        self.assertEqual(len(with_eagle), 3)

    def test_drafts_are_a_kind_of_their_own_behind_the_model_s(self):
        model = described(with_drafts(engine()), gpt_oss(4))
        self.assertEqual([kind.is_draft for kind in model.kinds], [False, False, True])
        found = json.loads(model.spaces[2].canonical_json)
        self.assertEqual(told(found), ("full", f"eagle3 Qwen3ForCausalLM {'e' * 40}", "bfloat16", [(4, 8, 512)]))
        # vLLM drops a hit's last chunk.
        self.assertTrue(model.drops_last)
        self.assertFalse(described(engine(), gpt_oss()).drops_last)

    def test_a_state_that_is_numbered_behind_the_attention_is_the_model_s(self):
        """vLLM numbers Falcon-H1's states so. A draft's would not be waited for."""
        state = MambaSpec(
            block_size=256, shapes=((3, 768), (8, 64, 64)), dtypes=(torch.float32,) * 2, mamba_cache_mode="align"
        )
        falcon = grouped((spec(block_size=256), attention(0, 1)), (state, attention(4, 5, part="mamba")))
        self.assertEqual([kind.is_draft for kind in described(with_drafts(engine()), falcon).kinds], [False, False])

    def test_mtp_layers_that_are_numbered_from_0_are_drafts(self):
        """Of Qwen3-Next, by vLLM 0.32, which does not say so of their specs."""
        both = grouped((spec(), [*attention(0, 1), "mtp.layers.0.self_attn.attn"]))
        model = described(with_drafts(engine(), method="mtp"), both)
        self.assertEqual([(kind.is_draft, len(kind.layers)) for kind in model.kinds], [(False, 2), (True, 1)])

    def test_drafts_go_by_their_own_weights(self):
        found = [
            self.drafts(with_drafts(engine(), **more), gpt_oss(4), **settings)
            for more, settings in (
                ({}, {}),
                ({"revision": "f" * 40}, {}),
                ({"revision": "main"}, {"draft_revision": "mine"}),
                ({"method": "eagle"}, {}),
                # The model's own revision pins the model.
                ({}, {"revision": "other"}),
            )
        ]
        self.assertEqual(found[0], found[4])
        self.assertEqual(len({str(one) for one in found}), 4)
        self.assertEqual(found[2], ["eagle3 Qwen3ForCausalLM mine"])

    def test_drafts_that_nothing_pins_are_left_out_and_the_model_is_not(self):
        with self.assertLogs("kvgate.vllm.model", "WARNING") as told:
            found = ids(with_drafts(engine(), revision="main"), gpt_oss(4))
        self.assertEqual(found, ids(engine(), gpt_oss()))
        self.assertIn("draft model's KV is not kept: nothing pins the weights of org/eagle", told.output[0])

    def test_layers_of_multi_token_prediction_are_the_checkpoint_s(self):
        mla = {"kind": MLAAttentionSpec, "num_kv_heads": 1, "head_size": 576}
        config = with_drafts(engine(), "mtp", layers=3, model=engine().model_config.model)
        own, draft = spaces(config, grouped((spec(**mla), attention(0, 1, 2, 3))))
        self.assertEqual(told(own)[3], [(layer, 1, 1152) for layer in range(3)])
        self.assertEqual(told(draft), ("full", "mtp", "bfloat16", [(3, 1, 1152)]))
        plain = grouped((spec(**mla), attention(0, 1, 2)))
        self.assertEqual(ids(config, plain), ids(engine(), plain))

    def test_a_draft_model_s_layers_go_by_their_name(self):
        config = with_drafts(engine(), "draft_model", layers=4)
        found = spaces(config, grouped((spec(), [*attention(0, 1), "draft_model.model.layers.0.self_attn.attn"])))
        self.assertEqual([[plane["layer"] for plane in one["planes"]] for one in found], [[0, 1], [0]])
        self.assertEqual([bool(one["draft"]) for one in found], [False, True])

    def test_methods_without_kv_of_their_own_have_no_drafts(self):
        for method in ("ngram", "ngram_gpu", "suffix"):
            # Its draft model's configuration is the model's.
            config = with_drafts(engine(), method, layers=1)
            self.assertEqual(ids(config, caches()), ids(engine(), caches()))


class ChunkTest(unittest.TestCase):
    def chunk(self, *sizes, **settings):
        """Of groups with blocks of these sizes."""
        groups = [(spec(block_size=size), attention(at)) for at, size in enumerate(sizes)]
        return described(engine(), grouped(*groups), **settings).chunk_tokens

    def test_whole_blocks_of_all_groups(self):
        for sizes, tokens in (
            ((16,), 256),
            ((128,), 256),
            ((256,), 256),
            ((512,), 512),
            ((48,), 288),
            ((16, 24), 288),
            ((32, 80), 320),
            ((544,), 544),
        ):
            self.assertEqual(self.chunk(*sizes), tokens, sizes)

    def test_with_states_they_are_no_longer_than_they_must_be(self):
        def chunk(size):
            state = MambaSpec(block_size=size, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
            both = grouped((spec(), attention(0)), (state, attention(1)))
            return described(engine(), both).chunk_tokens

        self.assertEqual([chunk(size) for size in (16, 32, 48, 64, 128, 272, 544)], [64, 64, 96, 64, 128, 272, 544])

    def test_what_the_user_sets_must_fit(self):
        self.assertEqual(self.chunk(16, chunk_tokens=64), 64)
        self.assertEqual(self.chunk(16, 24, chunk_tokens=96), 96)
        for sizes, asked, least in (((544,), 256, 544), ((16, 24), 256, 288), ((48,), 1024, 1056)):
            with self.assertRaisesRegex(ValueError, f"{asked} is no multiple .*: set chunk_tokens to {least} in"):
                self.chunk(*sizes, chunk_tokens=asked)

    def test_engines_with_other_blocks_share_kv_if_they_are_told_the_same(self):
        self.assertNotEqual(ids(engine(), caches()), ids(engine(), caches(block_size=48)))
        both = [ids(engine(), caches(block_size=size), chunk_tokens=288) for size in (16, 48)]
        self.assertEqual(*both)


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
