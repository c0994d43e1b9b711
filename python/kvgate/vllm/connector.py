"""vLLM's calls, handed to one of the two sides."""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvgate.vllm.model import describe
from kvgate.vllm.scheduler import SchedulerSide
from kvgate.vllm.settings import Settings
from kvgate.vllm.worker import WorkerSide


class KvGateConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV on S3 through a node's `kvgate serve`, and takes it from there. Whatever goes wrong is recomputed: set
    `kv_load_failure_policy` to `recompute`."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = vllm_config.kv_transfer_config
        settings = Settings.read(config.kv_connector_extra_config)
        model = describe(vllm_config, kv_cache_config, settings)
        self.scheduler = self.worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(model, settings, config.is_kv_consumer, config.is_kv_producer)
        else:
            self.worker = WorkerSide(model, settings, vllm_config.parallel_config, config.engine_id)

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
        received = connector_output.finished_recving or ()
        self.scheduler.loads_ended(received, connector_output.invalid_block_ids or ())

    def request_finished(self, request, block_ids):
        return self.scheduler.finished(request), None

    def request_finished_all_groups(self, request, block_ids):
        return self.scheduler.finished(request), None

    # ---- worker

    def register_kv_caches(self, kv_caches):
        self.worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata):
        self.worker.preempted(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context, **kwargs):
        self.worker.load(self._get_connector_metadata().loads)

    def wait_for_layer_load(self, layer_name):
        """Loads end between steps."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Chunks are stored as a whole, after the step."""

    def wait_for_save(self):
        stores = self._get_connector_metadata().stores
        if stores:
            stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None
            self.worker.store(stores, stream)

    def get_finished(self, finished_req_ids):
        return self.worker.results(finished_req_ids)

    def get_block_ids_with_load_errors(self):
        return self.worker.take_failed_blocks()

    def shutdown(self):
        if self.worker is not None:
            self.worker.close()
