"""An engine without its model: vLLM's real scheduler, the connector's two sides, and what each block holds. See
histories.py."""

import copy
import dataclasses
import functools
import sys
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import test_model
import torch
from kvgate import Prompt
from kvgate.vllm.model import Model, describe
from kvgate.vllm.settings import Settings
from made_up import deepseek_v32, kind
from stand_ins import GARBAGE, BrokenError, Sibling, Worker, check, kv_of
from vllm.config import KVTransferConfig, ObservabilityConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

MOST_TOKENS = 40
"""Of a request, with what it generates."""
WORDS = 3
"""So few that prompts often begin alike."""


class Structured:
    """No request has structured output."""

    def accept_tokens(self, request, tokens):
        return True

    def validate_tokens(self, request, tokens):
        return tokens

    def should_advance(self, request):
        return False


class Speculative(SimpleNamespace):
    """As n-grams are: without a model of its own."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: False


init_none_hash(sha256)


class PlantedError(Exception):
    """Thrown by a call of vLLM's, on purpose."""


CALLS = {
    "scheduler": ("new_request", "matched_tokens", "allocated", "step", "ended", "finished", "computed"),
    "worker": ("take_back", "load", "store", "results"),
}


class Group(NamedTuple):
    """One of vLLM's KV cache groups."""

    word: str
    span: int
    block_tokens: int
    """Of a rank."""
    is_draft: bool = False
    dealt_to: int = 1
    """Ranks that have some of a block's tokens each."""
    parts: int = 1
    """Kinds of KV in its blocks: a latent, and what sparse attention chooses tokens by."""

    @property
    def tokens(self):
        """Of a block on all ranks together."""
        return self.block_tokens * self.dealt_to

    def layers(self, number):
        """vLLM's specs by its names of layers."""
        if self.parts == 1:
            return {f"model.layers.{number}.attn": self.spec()}
        return deepseek_v32(self.block_tokens)

    def spec(self):
        attention = {"block_size": self.block_tokens, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        match self.word:
            case "full":
                return FullAttentionSpec(**attention, dcp_sharded=not self.is_draft or self.dealt_to > 1)
            case "window":
                return SlidingWindowSpec(**attention, sliding_window=self.span)
            case "chunked":
                return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=self.span)
        return MambaSpec(
            block_size=self.block_tokens,
            shapes=((1, 16 * self.block_tokens),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )


TEMPLATE = {
    "model_config": SimpleNamespace(
        uses_mrope=False,
        is_encoder_decoder=False,
        is_diffusion=False,
        runner_type="generate",
        max_model_len=MOST_TOKENS + 8,
        supports_multimodal_inputs=False,
        multimodal_config=None,
        enable_return_routed_experts=False,
        enable_return_sampling_mask=False,
        is_prefix_caching_supported=True,
        return_sampling_mask=False,
    ),
    "observability_config": ObservabilityConfig(),
    "aux_output_config": SimpleNamespace(enabled=False),
    "ec_manager_config": SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
    "structured_outputs_config": None,
    "watermark_config": None,
    "instance_id": "histories",
    **dict.fromkeys(("lora_config", "kv_events_config", "ec_transfer_config", "diffusion_config", "additional_config")),
}


MODELS = {}


def spec_of(layers):
    """Of a group: as vLLM makes it of its layers'."""
    (first, *others) = layers.values()
    return UniformTypeKVCacheSpecs.from_specs(layers) if any(spec != first for spec in others) else first


def described(config, cache, chunk_tokens):
    """kvgate's own description of what vLLM has made."""
    parallel = config.parallel_config
    full = test_model.engine()
    full.parallel_config = parallel
    settings = Settings.read({"socket": "/nowhere/sock", "chunk_tokens": chunk_tokens})
    # No CPU deals tokens.
    with mock.patch.object(type(current_platform), "is_cpu", lambda self: False):
        return describe(full, cache, settings)


def first_token(word, span, start):
    """Of those that token `start` attends to, in other words than kvgate's."""
    match word:
        case "window":
            return max(0, start - (span - 1))
        case "chunked":
            return start - start % span
    return 0


def model_of(groups, chunk_tokens, eagle):
    key = (tuple(groups), chunk_tokens, eagle)
    if key not in MODELS:
        of_kinds = {}
        for number, group in enumerate(groups):
            of_kinds.setdefault((group.is_draft, group.word != "full", group.word, group.span), []).append(number)
        kinds = tuple(
            kind(word, span, {number: groups[number].tokens for number in numbers}, is_draft, chunk_tokens)
            for (is_draft, _, word, span), numbers in sorted(of_kinds.items())
        )
        MODELS[key] = Model(kinds, chunk_tokens, 0, 0, eagle, len(groups))
    return MODELS[key]


class Engine:
    """Its settings are the history's to choose."""

    def build(self):
        numbers, fixed = self.numbers, {"fixed_weights": True} if self.numbers.random() < 0.5 else {}
        ours = {
            "kv_connector": "KvGateConnector",
            "kv_role": self.role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "socket": "/nowhere/sock",
                "load_policy": "always",
                "layerwise": self.layerwise,
                **fixed,
            },
        }
        if self.sibling:
            sibling = {"kv_connector": "Sibling", "kv_connector_module_path": "stand_ins", "kv_role": "kv_both"}
            both = [ours, sibling] if numbers.random() < 0.5 else [sibling, ours]
            transfer = KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role=self.role,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"connectors": both},
            )
        else:
            transfer = KVTransferConfig(**ours)
        self.config = config = object.__new__(VllmConfig)
        config.__dict__.update(
            TEMPLATE,
            kv_transfer_config=transfer,
            speculative_config=Speculative(
                num_speculative_tokens=self.drafts,
                max_num_new_slots_for_drafting=0,
                num_speculative_tokens_per_batch_size=None,
                method="eagle" if self.eagle else "ngram",
                use_eagle=lambda: self.eagle,
                use_eagle_block_drop=lambda: self.eagle,
            )
            if self.drafts
            else None,
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.seats,
                max_num_active_seqs=None,
                max_num_scheduled_tokens=None,
                max_num_batched_tokens=self.budget,
                long_prefill_token_threshold=self.long_prefill,
                long_prefill_token_threshold_adaptive=False,
                policy=self.policy,
                async_scheduling=self.is_async,
                enable_chunked_prefill=True,
                disable_chunked_mm_input=False,
                scheduler_reserve_full_isl=numbers.random() < 0.5,
                watermark=0.0,
                disable_hybrid_kv_cache_manager=False,
                prefill_schedule_interval=1,
            ),
            cache_config=SimpleNamespace(
                block_size=self.block_tokens,
                num_gpu_blocks=self.blocks,
                enable_prefix_caching=True,
                mamba_cache_mode="align" if any(group.word == "state" for group in self.groups) else "none",
                prefix_cache_retention_interval=numbers.choice((0, None, self.chunk_tokens * 2)),
                enable_mamba_shared_prefix_checkpoint=False,
                cache_dtype="auto",
                prefix_match_unit=None,
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.ranks,
                pipeline_parallel_size=1,
                decode_context_parallel_size=self.dealt_to,
                prefill_context_parallel_size=1,
                cp_kv_cache_interleave_size=self.interleave,
                data_parallel_index=0,
                data_parallel_size=1,
                rank=0,
                world_size=self.ranks,
            ),
        )
        groups = [
            KVCacheGroupSpec(list(layers), spec_of(layers), is_eagle_group=self.eagle and group.is_draft)
            for number, group in enumerate(self.groups)
            if (layers := group.layers(number))
        ]
        cache = KVCacheConfig(self.blocks, [], groups)
        if self.model is None:
            key = (tuple(self.groups), self.chunk_tokens, self.dealt_to, self.interleave)
            if key not in MODELS:
                MODELS[key] = described(config, cache, self.chunk_tokens)
            self.model = MODELS[key]
            self.space = self.model.spaces[0]
        # The scheduler's copy has one spec for each group.
        cache = generate_scheduler_kv_cache_config([cache])
        block_size, hash_tokens = resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = hash_tokens
        cache.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(cache, config, block_size, hash_tokens)
        self.model = dataclasses.replace(
            self.model, alignment=cache.cache_hit_alignment_tokens, hash_tokens=cache.hash_block_size
        )
        scheduler = AsyncScheduler if self.is_async else Scheduler
        self.scheduler = scheduler(
            config, cache, Structured(), block_size=block_size, hash_block_size=hash_tokens, log_stats=False
        )
        self.workers = []
        for rank in range(self.ranks):
            config.parallel_config = copy.copy(config.parallel_config)
            config.parallel_config.rank = rank
            own = type(self.scheduler.connector)(config, KVConnectorRole.WORKER, cache)
            self.workers.append(own)
            native = self.ours(own).worker
            native.worker = Worker(rank)
            native.tables = [[(group, 1) for group in kind.blocks] for kind in self.model.kinds]
        for rank, sibling in enumerate(self.siblings):
            sibling.content = self.content[rank][0]
        self.aggregator = KVOutputAggregator(self.ranks)
        self.hasher = get_request_block_hasher(hash_tokens, sha256)
        self.side = self.ours(self.scheduler.connector).scheduler
        self.is_off = False
        connectors = [self.ours(one) for one in (self.scheduler.connector, *self.workers)]
        for connector in connectors:
            connector._turn_off = functools.partial(self.turn_off, connector._turn_off)
        if self.throws:
            self.plant_error(numbers.choice(connectors))

    def turn_off(self, turn_off, why):
        """An error that nobody planted is kvgate's own, or what this history has found: no guard hides it."""
        if not self.is_off or isinstance(sys.exception(), BrokenError):
            raise
        turn_off(why)

    def plant_error(self, connector):
        """One of the calls throws once, before it has done anything or after all of it."""
        where = "scheduler" if connector.scheduler else "worker"
        side, name = getattr(connector, where), self.numbers.choice(CALLS[where])
        left, is_after, call = self.numbers.randrange(40), self.numbers.random() < 0.5, getattr(side, name)
        # Its answer is not told again. Nothing in it throws once the answer is taken out.
        is_after &= name != "results"

        def planted(*arguments):
            nonlocal left
            left -= 1
            if left != 0:
                return call(*arguments)
            if is_after:
                call(*arguments)
            self.is_off = True
            self.says("throws", where, name, "after" if is_after else "before")
            raise PlantedError(name)

        setattr(side, name, planted)

    def ours(self, connector):
        return next(one for one in getattr(connector, "sub_connectors", [connector]) if not isinstance(one, Sibling))

    def natives(self):
        """None: that rank's is off, and has let go of it."""
        return [self.ours(connector).worker.worker for connector in self.workers]

    def know(self, tokens):
        """The chunks of these tokens, by all hashes that they may have."""
        full = len(tokens) // self.chunk_tokens
        tokens = tuple(tokens[: full * self.chunk_tokens])
        for epoch in self.epochs:
            if not full or (epoch, tokens) in self.known:
                continue
            self.known.add((epoch, tokens))
            kv = kv_of(tokens)
            prompt = Prompt(self.space, b"", epoch)
            prompt.extend(tokens)
            hashes = prompt.hashes(0, full)
            for chunk in range(full):
                held = kv[chunk * self.chunk_tokens : (chunk + 1) * self.chunk_tokens]
                self.of_chunk[hashes[chunk * 32 : (chunk + 1) * 32]] = held

    def kv_of_chunk(self, chunk):
        if chunk not in self.of_chunk:
            for request in self.scheduler.requests.values():
                self.know(list(request.all_token_ids))
        check(chunk in self.of_chunk, "a chunk's hash is of no request's tokens")
        return self.of_chunk[chunk]

    def published(self, rank, chunks):
        """Of a kind each."""
        for chunk in chunks:
            by = self.published_by.setdefault(chunk, set())
            by.add(rank)
            if len(by) == self.ranks:
                self.gateway.add(chunk)

    # ---- a step

    def execute(self, output, step, in_flight):
        work, sampled = self.sample(output, step, in_flight)
        self.says("step", dict(output.num_scheduled_tokens), "preempted", output.preempted_req_ids)
        results = []
        for rank, connector in enumerate(self.workers):
            meta = output.kv_connector_metadata
            connector.handle_preemptions(meta)
            self.check_busy(rank)
            connector.bind_connector_metadata(meta)
            for copied in output.kv_cache_block_copies or ():
                for part in self.content[rank]:
                    part[copied.dst_block_id][:] = part[copied.src_block_id]
            if output.has_sync_kv_loads:
                connector.start_load_kv(None)
            for tables, tokens, start, end in work:
                self.compute(rank, tables, tokens, start, end)
            if not output.has_sync_kv_loads:
                connector.start_load_kv(None)
            connector.wait_for_save()
            finished = connector.get_transfer_results(output.finished_req_ids)
            told = KVConnectorOutput(
                finished_sending=finished.finished_sending,
                finished_recving=finished.finished_recving,
                failed_recving=finished.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
            if not output.total_num_scheduled_tokens and told.is_empty():
                told = None
            names = list(output.num_scheduled_tokens)
            results.append(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: at for at, name in enumerate(names)},
                    sampled_token_ids=[list(sampled[name]) for name in names],
                    kv_connector_output=told,
                )
            )
        return self.aggregator.aggregate(results) if self.ranks > 1 else results[0]

    def sample(self, output, step, in_flight):
        """The tokens that a step computes of each request, and those that it generates."""
        cached = output.scheduled_cached_reqs
        before = {new.req_id: (new.num_computed_tokens, True) for new in output.scheduled_new_reqs}
        for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            before[name] = (start, name in cached.resumed_req_ids)
        work, sampled = [], {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            start, is_fresh = before[name]
            if is_fresh or not self.is_async:
                # Of steps whose loads failed the scheduler has dropped what was generated.
                self.truth[name] = list(request.all_token_ids)
            else:
                # The scheduler counts on all drafts of steps under way.
                start -= sum(rejected.get(name, 0) for rejected in in_flight)
            truth = self.truth[name]
            drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
            known = count - len(drafts)
            sampled[name] = []
            tokens = truth[: start + known]
            if start + known >= len(truth):
                good = self.numbers.randint(0, len(drafts))
                new = [
                    drafts[at] if at < good and drafts[at] >= 0 else self.numbers.randrange(WORDS)
                    for at in range(good + 1)
                ]
                step.rejected[name] = len(drafts) - good
                tokens = [*truth, *new[:good], *[None] * (len(drafts) - good)]
                truth.extend(new)
                sampled[name] = new
            tables = [list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(name)]
            work.append((tables, tokens, start, start + count))
        return work, sampled

    def place(self, rank, group, at):
        """Of a token: its block's place in the table and its slot in it; None: another rank has it."""
        if group.dealt_to == 1:
            return at // group.block_tokens, at % group.block_tokens
        block, in_block = divmod(at, group.tokens)
        runs, in_run = divmod(in_block, self.interleave)
        turn, owner = divmod(runs, group.dealt_to)
        return (block, turn * self.interleave + in_run) if owner == rank % group.dealt_to else None

    def compute(self, rank, tables, tokens, start, end):
        tokens = tokens[:end]
        right = kv_of(tokens)
        is_right = True
        for number, group in enumerate(self.groups):
            if group.is_draft or not start:
                continue
            held, wanted = self.attended(rank, tables[number], number, group, start, right)
            is_right &= held == wanted
            check(
                held == wanted or self.failures or self.sibling_failures or self.is_off or None in tokens[:start],
                f"nothing failed, and what tokens {start} to {end} are computed from is wrong in {group}, {tables[number]}:",
                held,
                wanted,
            )
        # Of what is computed from a wrong token nothing is right.
        good = (
            next((at for at in range(start, end) if at >= len(tokens) or tokens[at] is None), end)
            if is_right
            else start
        )
        for number, group in enumerate(self.groups):
            size, table = group.block_tokens, tables[number]
            if group.word == "state":
                row = (number, 0, right[end - 1]) if good == end else GARBAGE
                self.content[rank][0][table[(end - 1) // size]][:] = [row]
                continue
            for part in range(group.parts):
                for at in range(start, end):
                    if (place := self.place(rank, group, at)) is not None:
                        row = (number, part, right[at]) if at < good else GARBAGE
                        self.write(rank, part, table[place[0]], size, place[1], row)

    def write(self, rank, part, block, size, slot, row):
        slots = self.content[rank][part][block]
        if len(slots) != size:
            slots[:] = [GARBAGE] * size
        slots[slot] = row

    def attended(self, rank, table, number, group, start, right):
        """What a group's layers read on this rank before they compute token `start`, and what it should be."""
        size = group.block_tokens
        if group.word == "state":
            return self.content[rank][0][table[(start - 1) // size]], [(number, 0, right[start - 1])]
        held, wanted = [], []
        for at in range(first_token(group.word, group.span, start), start):
            if (place := self.place(rank, group, at)) is None:
                continue
            for part in range(group.parts):
                slots = self.content[rank][part][table[place[0]]]
                held.append(slots[place[1]] if table[place[0]] and len(slots) == size else GARBAGE)
                wanted.append((number, part, right[at]))
        return held, wanted

    def check_busy(self, rank):
        """Blocks that any copy uses are nobody else's."""
        pool = self.scheduler.kv_cache_manager.block_pool.blocks
        native = self.natives()[rank]
        for job in native.busy() if native else ():
            for block in job.table:
                check(pool[block].ref_cnt > 0, f"{job.job} copies, and its block {block} is free")
        if self.siblings:
            for request, start, end, table, _ in self.siblings[rank].under_way:
                for block in table[start // self.block_tokens : -(-end // self.block_tokens)]:
                    check(
                        pool[block].ref_cnt > 0, f"the other connector loads {request}, and its block {block} is free"
                    )
