"""vLLM's calls, handed to one of the two sides."""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvgate.vllm import gateway
from kvgate.vllm.identity import items_have_digests
from kvgate.vllm.model import describe, needs_whole_prompts
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
        model = describe(vllm_config, kv_cache_config, settings)
        gateway.ensure(settings)
        self.scheduler = self.worker = None
        if role == KVConnectorRole.SCHEDULER:
            if config.kv_load_failure_policy != "recompute":
                logger.warning(
                    'kvgate: a load that fails will fail its request: set "kv_load_failure_policy": "recompute"'
                )
            self.scheduler = SchedulerSide(
                model,
                settings,
                config.is_kv_consumer and not needs_whole_prompts(vllm_config.model_config),
                config.is_kv_producer,
                parallel.tensor_parallel_size,
                events is not None and events.enable_kv_cache_events,
                items_have_digests(vllm_config),
            )
        else:
            self.worker = WorkerSide(model, settings, parallel, config.engine_id)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        """Layers are waited for from Python, which a graph of the whole step would leave out."""
        return bool(extra_config.get("layerwise"))

    # ---- scheduler

    def on_new_request(self, request):
        self.scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self.scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output):
        self.scheduler.ended(connector_output.invalid_block_ids or (), connector_output.kv_connector_worker_meta)

    def request_finished(self, request, block_ids):
        return self.scheduler.finished(request), None

    def request_finished_all_groups(self, request, block_ids):
        return self.scheduler.finished(request), None

    @property
    def requires_kv_delivery(self):
        """What a preempted request did not store is computed by the engine that misses it: no token is dropped for it."""
        return False

    def has_pending_block_frees(self):
        return self.scheduler.has_pending_block_frees()

    def take_events(self):
        # vLLM's last call after each step, whatever the step was.
        self.scheduler.computed()
        return self.scheduler.events.take() if self.scheduler.events is not None else ()

    def reset_cache(self):
        return self.scheduler.reset()

    # ---- worker

    def register_kv_caches(self, kv_caches):
        self.worker.register(kv_caches)

    def unregister_kv_caches(self):
        self.worker.unregister()

    def restore_kv_caches(self):
        self.worker.restore()

    def handle_preemptions(self, kv_connector_metadata):
        self.worker.take_back(kv_connector_metadata.taken_back)

    def start_load_kv(self, forward_context, **kwargs):
        if loads := self._get_connector_metadata().loads:
            self.worker.load(loads, current_stream(), self.settings.layerwise)

    def wait_for_layer_load(self, layer_name):
        if self.settings.layerwise:
            self.worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Chunks are stored as a whole, after the step."""

    def wait_for_save(self):
        if stores := self._get_connector_metadata().stores:
            self.worker.store(stores, current_stream())

    def get_finished(self, finished_req_ids):
        if self.settings.layerwise:
            # With a drafter `wait_for_save` comes later, and what failed would be told a step late.
            self.worker.wait_layers()
        sent, received = self.worker.results(self._get_connector_metadata().finished)
        # vLLM did not wait for what was loaded within the step.
        return sent, set() if self.settings.layerwise else received

    def get_block_ids_with_load_errors(self):
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self):
        return self.worker.take_report(self._get_connector_metadata().loads_within)

    # ---- both

    def get_kv_connector_stats(self):
        return (self.scheduler or self.worker).stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return KvGateStats(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return KvGateMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self):
        if self.worker is not None:
            self.worker.close()


def current_stream():
    """The engine's, as CUDA's handle; None: a CPU."""
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None
