"""The connector's figures: a line in vLLM's log, and its Prometheus metrics `vllm:kvgate_*`."""

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS = {
    "loads": "Loads of a request's chunks.",
    "loaded_bytes": "Bytes that loads brought into this engine's pages.",
    "failed_loads": "Loads that did not bring all of their chunks; the rest was computed.",
    "declined_loads": "Loads that were left because computing was quicker (load_policy auto).",
    "stores": "Stores of a request's chunks.",
    "stored_chunks": "Chunks handed over to the gateway.",
    "stored_bytes": "Bytes of the chunks handed over.",
    "refused_chunks": "Chunks that the gateway did not take: it had no room, or not all ranks were attached yet.",
    "failed_stores": "Stores that the gateway did not take in time, or not at all.",
}
MISSES = {
    "answered": "absent_requests",
    "late": "late_requests",
    "failed": "failed_requests",
    "paused": "paused_requests",
}
"""Counters of requests that loaded nothing, by the outcome of their lookup."""
COUNTERS |= {
    "absent_requests": "Admitted requests for whose prompt the gateway had no further chunk.",
    "late_requests": "Admitted requests whose lookup was not answered within lookup_deadline_ms.",
    "failed_requests": "Admitted requests whose lookup failed: no gateway, or it refused.",
    "paused_requests": "Admitted requests that were not looked up, since the gateway did not answer others in time.",
    "opaque_requests": "Admitted requests whose KV does not follow from their tokens (prompt embeddings), or from before a reset.",
}
GAUGES = {
    "lookups_paused": "1 while the gateway is left alone after lookups that it did not answer in time.",
}
SECONDS = {
    "lookup_seconds": "From a lookup's beginning until the gateway has answered it.",
    "load_seconds": "From the beginning of a load until all of it is in the pages.",
    "store_seconds": "From the end of a step until its chunks are the gateway's.",
}
BUCKETS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60]


@dataclasses.dataclass
class KvGateStats(KVConnectorStats):
    """The figures of one interval and all ranks. COUNTERS are sums, SECONDS are lists, GAUGES are the latest value."""

    was_paused: bool = dataclasses.field(default=False, kw_only=True)

    def add(self, name, amount=1):
        self.data[name] = self.data.get(name, 0) + amount

    def took(self, name, seconds):
        self.data.setdefault(name, []).append(seconds)

    def loaded(self, ended):
        self.add("loads")
        self.took("load_seconds", ended.seconds)
        if ended.missing:
            self.add("failed_loads")
        else:
            self.add("loaded_bytes", ended.bytes)

    def stored(self, ended):
        self.add("stores")
        self.took("store_seconds", ended.seconds)
        self.add("stored_chunks", ended.stored)
        self.add("stored_bytes", ended.bytes)
        self.add("refused_chunks", ended.refused)
        if ended.error:
            self.add("failed_stores")

    def looked_up(self, seconds, is_paused):
        for took in seconds:
            self.took("lookup_seconds", took)
        if is_paused != self.was_paused:
            self.was_paused = is_paused
            self.data["lookups_paused"] = int(is_paused)

    def take(self):
        """The figures since the last call; None if there are none."""
        if self.is_empty():
            return None
        taken = KvGateStats(self.data)
        self.reset()
        return taken

    def reset(self):
        self.data = {}

    def is_empty(self):
        return not self.data

    def aggregate(self, other):
        for name, value in other.data.items():
            is_sum = name in self.data and name not in GAUGES
            self.data[name] = self.data[name] + value if is_sum else value
        return self

    def reduce(self):
        counts = {name: self.data[name] for name in COUNTERS if self.data.get(name)}
        for name in SECONDS:
            if seconds := sorted(self.data.get(name, ())):
                counts[f"median_{name}"] = round(seconds[len(seconds) // 2], 4)
        return counts


class KvGateMetrics(KVConnectorPromMetrics):
    """`vllm:kvgate_<counter>_total` and `vllm:kvgate_<seconds>`, by engine."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def by_engine(metric):
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self.counters = {
            name: by_engine(self._counter_cls(name=f"vllm:kvgate_{name}", documentation=says, labelnames=labelnames))
            for name, says in COUNTERS.items()
        }
        self.seconds = {
            name: by_engine(
                self._histogram_cls(
                    name=f"vllm:kvgate_{name}", documentation=says, buckets=BUCKETS, labelnames=labelnames
                )
            )
            for name, says in SECONDS.items()
        }

        self.gauges = {
            name: by_engine(
                self._gauge_cls(
                    name=f"vllm:kvgate_{name}",
                    documentation=says,
                    labelnames=labelnames,
                    multiprocess_mode="mostrecent",
                )
            )
            for name, says in GAUGES.items()
        }

    def observe(self, transfer_stats_data, engine_idx=0):
        for name, gauge in self.gauges.items():
            if name in transfer_stats_data:
                gauge[engine_idx].set(transfer_stats_data[name])
        for name, counter in self.counters.items():
            counter[engine_idx].inc(transfer_stats_data.get(name, 0))
        for name, histogram in self.seconds.items():
            for seconds in transfer_stats_data.get(name, ()):
                histogram[engine_idx].observe(seconds)
