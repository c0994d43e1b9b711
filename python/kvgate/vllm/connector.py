"""vLLM's calls, handed to one of the two sides."""

import functools
import itertools

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger

from kvgate.vllm import gateway
from kvgate.vllm.events import Events
from kvgate.vllm.guard import Owed, guarded
from kvgate.vllm.identity import items_have_digests
from kvgate.vllm.kinds import AllLayers, context_ranks, layers_of
from kvgate.vllm.metadata import WorkerReport
from kvgate.vllm.model import describe, layer_number, needs_whole_prompts
from kvgate.vllm.scheduler import SchedulerSide
from kvgate.vllm.settings import Settings
from kvgate.vllm.stats import KvGateMetrics, KvGateStats
from kvgate.vllm.worker import WorkerSide

logger = init_logger(__name__)


class KvGateConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV on S3 through a node's `kvgate serve`, and takes it from there. Whatever goes wrong is recomputed: set
    `kv_load_failure_policy` to `recompute`."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = vllm_config.kv_transfer_config
        self.settings = settings = Settings.read(config.kv_connector_extra_config)
        parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
        stages = parallel.pipeline_parallel_size
        # Once, not by each rank.
        gateway.ensure(settings, is_told=role == KVConnectorRole.SCHEDULER)
        self.scheduler = self.worker = None
        self.is_off = False
        """One of the calls below threw: vLLM goes on as if there were no kvgate."""
        self.owed = Owed()
        self.pool = self.layers = None
        if role == KVConnectorRole.SCHEDULER:
            self.begin_scheduler = functools.partial(
                SchedulerSide,
                settings=settings,
                is_consumer=config.is_kv_consumer and not needs_whole_prompts(vllm_config.model_config),
                is_producer=config.is_kv_producer,
                ranks=parallel.tensor_parallel_size * context_ranks(parallel)[0] * stages,
                events=functools.partial(
                    Events,
                    algorithm=vllm_config.cache_config.prefix_caching_hash_algo,
                    groups=kv_cache_config.kv_cache_groups,
                )
                if events is not None and events.enable_kv_cache_events
                else None,
                items_have_digests=items_have_digests(vllm_config),
                has_priorities=vllm_config.scheduler_config.policy == "priority",
            )
            self.describe = functools.partial(describe, vllm_config, kv_cache_config, settings)
            # Of several stages it is told when the workers have begun, before the first request.
            if stages == 1:
                self.scheduler = self.begin_scheduler(self.describe())
        else:
            refuse_failing_requests(vllm_config, settings)
            self.layers = layers_of_all_stages(stages, kv_cache_config)
            model = describe(vllm_config, kv_cache_config, settings, self.layers)
            self.worker = WorkerSide(model, settings, parallel, config.engine_id)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        """Layers are waited for from Python, which a graph of the whole step would leave out."""
        return bool(extra_config.get("layerwise"))

    def _turn_off(self, why):
        """Once, whatever else goes wrong."""
        logger.error("kvgate is off until the engine is started again, everything is computed: %s", why)
        logger.debug("kvgate: where it was", exc_info=True)
        self.is_off = True
        if self.scheduler is not None:
            self.scheduler.blocks.give_up()
        if self.worker is not None:
            meta = self._get_connector_metadata() if self.has_connector_metadata() else None
            under_way = self.worker.loads.keys() | self.worker.stores | self.worker.report.loaded.keys()
            self.worker.give_up(
                [load for load in getattr(meta, "loads", ()) if load.job not in under_way],
                [store for store in getattr(meta, "stores", ()) if store.job not in under_way],
            )

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool):
        self.pool = gpu_block_pool
        if self.scheduler is not None:
            self.scheduler.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        """vLLM calls it before the first request. Beside a connector with metadata of its own it is that one's."""
        told = next((told for told in metadata.values() if isinstance(told, AllLayers)), None)
        if told is not None:
            self.scheduler = self.begin_scheduler(self.describe(told.layers))
            self.scheduler.bind_pool(self.pool)
        elif self.scheduler is None:
            raise ValueError(
                "within MultiConnector kvgate comes first where pipeline_parallel_size is more than 1: the scheduler has to be "
                "told of all stages' layers"
            )

    @guarded()
    def on_new_request(self, request):
        self.scheduler.new_request(request)

    @guarded(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        tokens, is_async = self.scheduler.matched_tokens(request, num_computed_tokens)
        if tokens:
            size = self.scheduler.model.kinds[0].blocks[self.scheduler.main]
            self.owed.local[request.request_id] = num_computed_tokens // size
        return tokens, is_async

    @guarded(lambda connector, *told: KVConnectorBase_V1.get_external_cache_hit_sources(connector, *told))
    def get_external_cache_hit_sources(self, request, num_external_tokens):
        return self.scheduler.hit_sources(request) if num_external_tokens else {}

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            # vLLM counts on it from here on.
            self.owed.allocated(request.request_id, blocks.get_block_ids()[self.scheduler.main])
        self._allocated(request, blocks, num_external_tokens)

    @guarded()
    def _allocated(self, request, blocks, num_external_tokens):
        self.scheduler.allocated(request, blocks, num_external_tokens)

    @guarded(lambda connector, _: connector.owed.step())
    def build_connector_meta(self, scheduler_output):
        meta = self.scheduler.step(scheduler_output)
        self.owed.told()
        self.scheduler.blocks.told()
        return meta

    def update_connector_output(self, connector_output):
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            self.scheduler.blocks.freed(report.freed)
        self._ended(connector_output.invalid_block_ids or (), report)

    @guarded()
    def _ended(self, invalid_block_ids, report):
        if report is not None and report.is_off:
            raise RuntimeError("a worker is off, see its line above")
        self.scheduler.ended(invalid_block_ids, report)

    def request_finished(self, request, block_ids):
        self.owed.local.pop(request.request_id, None)
        self._finished(request)
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids)

    @guarded()
    def _finished(self, request):
        self.scheduler.finished(request)

    @property
    def requires_kv_delivery(self):
        """What a preempted request did not store is computed by the engine that misses it: no token is dropped for it."""
        return False

    @guarded(lambda *_: False)
    def has_pending_block_frees(self):
        return self.scheduler.has_pending_block_frees()

    def has_pending_push_work(self):
        """Steps go on until the workers have said that no block is copied any more. vLLM may ask before the workers of several
        stages have begun."""
        return self.scheduler is not None and bool(self.scheduler.blocks.copied)

    @guarded(lambda *_: ())
    def take_events(self):
        # vLLM's last call after each step, whatever the step was.
        self.scheduler.computed()
        return self.scheduler.events.take() if self.scheduler.events is not None else ()

    @guarded(lambda *_: True)
    def reset_cache(self):
        return self.scheduler.reset()

    # ---- worker

    def get_handshake_metadata(self):
        """The scheduler knows of one stage's layers, and of one spec for those of a group."""
        return AllLayers(self.layers) if self.layers is not None else None

    def register_kv_caches(self, kv_caches):
        self.worker.register(kv_caches)

    def unregister_kv_caches(self):
        self.worker.unregister()

    @guarded()
    def restore_kv_caches(self):
        self.worker.restore()

    @guarded()
    def handle_preemptions(self, kv_connector_metadata):
        if kv_connector_metadata.is_all_taken_back:
            self.worker.take_all_back()
        self.worker.take_back(kv_connector_metadata.taken_back)

    def start_load_kv(self, forward_context, **kwargs):
        meta = self._get_connector_metadata()
        self.worker.lose(meta.lost)
        if self.is_off:
            self.worker.give_up(meta.loads, meta.stores)
        elif meta.loads:
            self._load(meta.loads)

    @guarded()
    def _load(self, loads):
        self.worker.load(loads, current_stream(), self.settings.layerwise)

    @guarded()
    def wait_for_layer_load(self, layer_name):
        if self.settings.layerwise:
            self.worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Chunks are stored as a whole, after the step."""

    @guarded()
    def wait_for_save(self):
        if stores := self._get_connector_metadata().stores:
            self.worker.store(stores, current_stream())

    def get_transfer_results(self, finished_req_ids):
        # Off, all copies have ended: this is only what was noted.
        received, failed = self._results() or self.worker.results()
        # vLLM did not wait for what was loaded within the step.
        return KVConnectorTransferResults(
            finished_recving=set() if self.settings.layerwise else received, failed_recving=failed
        )

    def get_finished(self, finished_req_ids):
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    @guarded()
    def _results(self):
        if self.settings.layerwise:
            # With a drafter `wait_for_save` comes later, and what failed would be told a step late.
            self.worker.wait_layers()
        return self.worker.results()

    def get_block_ids_with_load_errors(self):
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self):
        report = self.worker.take_report(self._get_connector_metadata().loads_within)
        if self.is_off:
            report = report or WorkerReport()
            report.is_off = True
        return report

    # ---- both

    @guarded()
    def get_kv_connector_stats(self):
        return self.scheduler.take_stats() if self.scheduler is not None else self.worker.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return KvGateStats(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return KvGateMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self):
        if self.worker is not None:
            self.worker.close()


def layers_of_all_stages(stages, kv_cache_config):
    """None: the scheduler knows them all."""
    own = list(layers_of(kv_cache_config))
    if stages > 1:
        of_stages = [None] * stages
        torch.distributed.all_gather_object(of_stages, own, group=get_pp_group().cpu_group)
        refuse_stages_that_overlap(of_stages)
        return [layer for of_stage in of_stages for layer in of_stage]
    has_many_specs = any(hasattr(group.kv_cache_spec, "kv_cache_specs") for group in kv_cache_config.kv_cache_groups)
    return own if has_many_specs else None


def refuse_stages_that_overlap(of_stages):
    """A rank tells the node the range of its layers."""
    numbers = [[layer_number(layer.name) for layer in of_stage] for of_stage in of_stages]
    if any(max(own) >= min(following) for own, following in itertools.pairwise(numbers)):
        raise ValueError(
            f"kvgate can't be used with pipeline_parallel_size {len(of_stages)} for this model yet, whose states vLLM numbers "
            "apart from its attention: set it to 1"
        )


def refuse_failing_requests(vllm_config, settings):
    """Within MultiConnector its own policy counts, which a worker finds in the whole configuration."""
    policy = (get_current_vllm_config_or_none() or vllm_config).kv_transfer_config.kv_load_failure_policy
    if policy != "recompute" and not settings.allow_failed_requests:
        raise ValueError(
            f"with kv_load_failure_policy {policy} a load that fails would fail its request: set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config, or "allow_failed_requests": true in '
            "kv_connector_extra_config"
        )


def current_stream():
    """The engine's, as CUDA's handle; None: a CPU."""
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None
