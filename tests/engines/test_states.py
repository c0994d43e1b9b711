"""The snapshot of a state is one object for ranks of any number: cut by vLLM's own shapes and weight loaders, copied by kvgate,
without an engine.

python tests/engines/test_states.py     in an environment with vLLM and the wheel
"""

import dataclasses
import json
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from kvgate import Copier
from kvgate.torch_copies import TorchCopies
from kvgate.vllm.kinds import EngineLayer
from kvgate.vllm.worker import WorkerSide
from test_model import attention, described, grouped, spec, with_ranks
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

BLOCKS = 5
POISON = 77
RANKS = (1, 2, 4, 8)


def setUpModule():
    patch = mock.patch.object(type(current_platform), "is_cpu", lambda self: False)
    patch.start()
    unittest.addModuleCleanup(patch.stop)


class Model:
    """States of a kind: vLLM's shapes of a rank's, and how its loader deals the channels of a convolution."""

    def __init__(self, kind, shapes, loaded, dtypes, **config):
        """`loaded(ranks)`: the parts of the convolution as vLLM's loader takes them: channels of all ranks, those of them that
        are copies, and whether all ranks have the same."""
        self.kind, self.shapes, self.loaded, self.dtypes, self.config = kind, shapes, loaded, dtypes, config

    def spec(self, ranks):
        shapes = tuple(self.shapes(ranks))
        return MambaSpec(
            block_size=16,
            shapes=shapes,
            dtypes=self.dtypes[: len(shapes)],
            mamba_type=self.kind,
            mamba_cache_mode="align",
        )

    def whole(self):
        """The states of one rank that has everything, each byte another number in its neighbourhood."""
        numbers = torch.Generator().manual_seed(1)
        of_state = lambda shape, dtype: torch.randint(256, (*shape, dtype.itemsize), generator=numbers).to(torch.uint8)  # noqa: E731
        return [of_state(*state) for state in zip(self.spec(1).shapes, self.dtypes, strict=False)]

    def of_rank(self, rank, ranks, axis):
        """Its share, by vLLM's loaders. `axis`: of a convolution's channels."""
        shares = []
        for state, shape in zip(self.whole(), self.spec(ranks).shapes, strict=True):
            share = torch.empty((*shape, state.shape[-1]), dtype=torch.uint8)
            if len(shape) == 2 and not shares and self.loaded:
                load = mamba_v2_sharded_weight_loader(self.loaded(ranks), ranks, rank)
                load(share.movedim(axis, 0), state.movedim(axis, 0))
            else:
                with mock.patch(
                    "vllm.model_executor.model_loader.weight_utils.get_tensor_model_parallel_rank", lambda: rank
                ):
                    sharded_weight_loader(0)(share, state)
            shares.append(share.flatten())
        return torch.cat(shares)


def channels(*of_parts):
    return lambda ranks: [(count, 0, False) for count in of_parts]


def mamba2(heads, head_dim, groups, state, num_spec=0):
    def loaded(ranks):
        more = MambaStateShapeCalculator.extra_groups_for_head_shards(groups, ranks)
        part = ((groups + more) * state, more * state, groups == 1)
        return [(heads * head_dim, 0, False), part, part]

    return (
        lambda ranks: MambaStateShapeCalculator.mamba2_state_shape(
            ranks, heads * head_dim, groups, heads, head_dim, state, 4, num_spec
        ),
        loaded,
    )


def delta_net(keys, values, key_dim, value_dim, num_spec=0):
    return (
        lambda ranks: MambaStateShapeCalculator.gated_delta_net_state_shape(
            ranks, keys, values, key_dim, value_dim, 4, num_spec
        ),
        channels(keys * key_dim, keys * key_dim, values * value_dim),
    )


HALF, SINGLE = (torch.bfloat16, torch.float32), (torch.float32, torch.float32)
KINDS = MambaAttentionBackendEnum
MODELS = {
    "Jamba": Model(
        KINDS.MAMBA1, lambda ranks: MambaStateShapeCalculator.mamba1_state_shape(ranks, 512, 16, 4), channels(512), HALF
    ),
    "Granite 4": Model(KINDS.MAMBA2, *mamba2(16, 8, 1, 32), HALF, mamba_n_groups=1),
    "Nemotron-H": Model(KINDS.MAMBA2, *mamba2(16, 8, 8, 16), SINGLE, n_groups=8),
    "Nemotron-H with drafts": Model(KINDS.MAMBA2, *mamba2(16, 8, 8, 16, 2), SINGLE, n_groups=8),
    "LFM2": Model(
        KINDS.SHORT_CONV,
        lambda ranks: MambaStateShapeCalculator.short_conv_state_shape(ranks, 256, 3),
        channels(256),
        HALF,
    ),
    "Qwen3-Next": Model(KINDS.GDN_ATTN, *delta_net(8, 16, 16, 8), HALF),
    "Qwen3-Next with drafts": Model(KINDS.GDN_ATTN, *delta_net(8, 16, 16, 8, 2), HALF),
    "Kimi": Model(
        KINDS.GDN_ATTN,
        lambda ranks: MambaStateShapeCalculator.kda_state_shape(ranks, 8, 16),
        channels(128, 128, 128),
        HALF,
    ),
    "Bailing": Model(
        KINDS.LINEAR, lambda ranks: MambaStateShapeCalculator.linear_attention_state_shape(8, ranks, 16), None, SINGLE
    ),
}


class Rank:
    """With pages of two layers; a chunk's snapshot is in block 3."""

    def __init__(self, model, rank, ranks, by_torch=False):
        config = with_ranks(ranks, heads=8)
        vars(config.model_config.hf_text_config).update(model.config)
        state = model.spec(ranks)
        names = attention(0, 2, part="mixer")
        attend = spec(block_size=16, num_kv_heads=max(1, 8 // ranks))
        self.kind = described(config, grouped((state, names), (attend, attention(1)))).kinds[1]
        # As vLLM's, whose pages are padded to those of attention.
        size = state.state_content_size_bytes
        self.pages = [torch.full((BLOCKS, size + 96), POISON, dtype=torch.int8) for _ in names]
        views = [pages[:, :size].view(BLOCKS, 1, 1, size) for pages in self.pages]
        side = WorkerSide.__new__(WorkerSide)
        side.attach = {"tp": (rank, ranks)}
        tensors = []
        for name, planes, view in zip(names, self.kind.planes, views, strict=True):
            tensors += side.tensors(self.kind, EngineLayer(name, 0, state), planes, view)[1]
        copies = TorchCopies(self.pages) if by_torch else None
        self.copier = Copier(json.dumps({"tensors": tensors, "device": None}), self.kind.space, copies)

    def compute(self, states):
        for layer, pages in enumerate(self.pages):
            pages[3, : len(states)] = (states + layer).view(torch.int8)

    def must_have(self, states):
        for layer, pages in enumerate(self.pages):
            must = torch.full_like(pages, POISON)
            must[3, : len(states)] = (states + layer).view(torch.int8)
            if not torch.equal(pages, must):
                raise AssertionError(f"layer {layer} has {(pages != must).sum()} wrong bytes")

    @property
    def space(self):
        return json.loads(self.kind.space.canonical_json)


class StatesTest(unittest.TestCase):
    layout = "SD"
    by_torch = False

    def setUp(self):
        for module in (
            "kvgate.vllm.model.conv_layout",
            "vllm.model_executor.layers.mamba.mamba_utils.get_conv_state_layout",
        ):
            patch = mock.patch(module, lambda: self.layout)
            patch.start()
            self.addCleanup(patch.stop)

    def test_ranks_of_any_number_write_and_read_the_same_bytes(self):
        for name, model in MODELS.items():
            axis = 0 if self.layout == "DS" else 1
            alone = Rank(model, 0, 1)
            alone.compute(model.of_rank(0, 1, axis))
            payload = alone.copier.store([3])
            self.assertEqual(len(payload), 2 * model.spec(1).state_content_size_bytes)
            for ranks in RANKS:
                with self.subTest(name, ranks=ranks):
                    written = torch.zeros(len(payload), dtype=torch.uint8)
                    for number in range(ranks):
                        rank = Rank(model, number, ranks, self.by_torch)
                        states = model.of_rank(number, ranks, axis)
                        self.assertEqual(rank.kind.space.id, alone.kind.space.id)
                        rank.copier.load(payload, [3])
                        rank.must_have(states)
                        rank.compute(states)
                        # What several ranks have is the same.
                        written |= torch.frombuffer(bytearray(rank.copier.store([3])), dtype=torch.uint8)
                    self.assertEqual(bytes(written.numpy()), payload)

    def test_a_convolution_and_a_state_have_heads(self):
        found = {
            name: [(plane["name"], plane["heads"]) for plane in Rank(model, 0, 2).space["planes"] if not plane["layer"]]
            for name, model in MODELS.items()
        }
        self.assertEqual(found["Jamba"], [("conv", 64), ("state", 64)])
        self.assertEqual(found["LFM2"], [("conv", 64)])
        self.assertEqual(found["Bailing"], [("state", 8)])
        self.assertEqual(found["Granite 4"], [("conv.x", 16), ("conv.b", 1), ("conv.c", 1), ("state", 16)])
        self.assertEqual(found["Nemotron-H"], [("conv.x", 16), ("conv.b", 8), ("conv.c", 8), ("state", 16)])
        self.assertEqual(found["Qwen3-Next"], [("conv.q", 8), ("conv.k", 8), ("conv.v", 16), ("state", 16)])
        self.assertEqual(found["Kimi"], [("conv.q", 8), ("conv.k", 8), ("conv.v", 8), ("state", 8)])

    def test_what_all_ranks_have_is_one_head(self):
        """Of Qwen4's short convolutions."""
        ids = set()
        for ranks in RANKS:
            state = dataclasses.replace(MODELS["LFM2"].spec(1), tp_replicated=True)
            model = Model(state.mamba_type, lambda _, of=state: of.shapes, None, HALF)
            with mock.patch.object(Model, "spec", lambda self, ranks, of=state: of):
                rank = Rank(model, ranks - 1, ranks)
            self.assertEqual([(plane["name"], plane["heads"]) for plane in rank.space["planes"]], [("kv", 1)] * 2)
            ids.add(rank.kind.space.id)
        self.assertEqual(len(ids), 1)

    def test_what_is_not_known_to_be_cut_is_for_ranks_of_the_same_number(self):
        granite = MODELS["Granite 4"]
        unknown = {
            # Whether a rank's group is every rank's nothing says.
            "no groups": Model(granite.kind, granite.shapes, granite.loaded, HALF),
            "other groups": Model(granite.kind, granite.shapes, granite.loaded, HALF, n_groups=3),
            "a kind of its own": Model(SimpleNamespace(name="CUSTOM"), granite.shapes, granite.loaded, HALF),
            "rings behind it": Model(
                granite.kind, lambda ranks: (*granite.shapes(ranks), (8, 16, 4)), None, (*HALF, torch.float32)
            ),
            "channels that have no heads for three": Model(
                KINDS.SHORT_CONV, lambda ranks: ((2, 96 // ranks),), channels(96), HALF
            ),
        }
        for name, model in unknown.items():
            ranks = 3 if "three" in name else 2
            with self.subTest(name):
                size = model.spec(ranks).state_content_size_bytes
                planes = Rank(model, 0, ranks).space["planes"]
                self.assertEqual(
                    [(plane["name"], plane["heads"], plane["row_bytes"]) for plane in planes], [("kv", ranks, size)] * 2
                )


class DimensionsFirstTest(StatesTest):
    """With VLLM_SSM_CONV_STATE_LAYOUT=DS."""

    layout = "DS"


class TorchTest(StatesTest):
    """By torch's own calls."""

    by_torch = True


if __name__ == "__main__":
    unittest.main(verbosity=2)
