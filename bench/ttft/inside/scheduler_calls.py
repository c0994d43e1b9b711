"""The time of each call on the scheduler's thread, for a long prompt whose chunks are all known.

    python scheduler_calls.py SOCKET TOKENS ROUNDS      prints JSON: microseconds of each call, by name

vLLM's own requests and the connector's scheduler side; the chunks are really there, in the gateway at SOCKET. Each
round is a request of its own: new, asked for, allocated, loaded, computed, two steps of decoding, finished.
"""

import json
import random
import sys
import time

import torch
from kvgate import Prompt, Space, Worker
from kvgate.tensors import describe
from kvgate.vllm import KvGateConnector
from kvgate.vllm.metadata import WorkerReport
from kvgate.vllm.model import Model
from kvgate.vllm.scheduler import SchedulerSide
from kvgate.vllm.settings import Settings
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

# vLLM's on a GPU, the smallest: what is by block is most.
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
WAIT_SECONDS_MAX = 60


class Blocks:
    """As the scheduler hands them over."""

    def __init__(self, table):
        self.table = table

    def get_block_ids(self):
        return (self.table,)


class Calls:
    def __init__(self, connector, table):
        self.connector, self.table = connector, table
        self.us = {}

    def timed(self, name, *arguments, what=""):
        method = getattr(self.connector, name)
        began = time.perf_counter_ns()
        answer = method(*arguments)
        took = (time.perf_counter_ns() - began) / 1000
        self.us.setdefault(name + what, []).append(took)
        return answer

    def request(self, number, tokens):
        """A request's life."""
        sampling = SamplingParams(max_tokens=16)
        sampling.update_from_generation_config({}, None)
        request = Request(f"request-{number}", list(tokens), sampling, None)
        known = (len(tokens) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        self.timed("on_new_request", request)
        end = time.monotonic() + WAIT_SECONDS_MAX
        while (found := self.timed("get_num_new_matched_tokens", request, 0)[0]) is None:
            if time.monotonic() > end:
                raise SystemExit("nobody answers the lookup")
            time.sleep(0.0005)
        if found < known:
            raise SystemExit(f"{found} tokens are known, not {known}")
        self.timed("update_state_after_alloc", request, Blocks(self.table), found)
        self.timed("build_connector_meta", SchedulerOutput.make_empty(), what=" with a load")
        request.num_computed_tokens = found
        report = WorkerReport(loaded={f"{request.request_id}#1": (1, 0.1)})
        loaded = KVConnectorOutput(finished_recving={request.request_id}, kv_connector_worker_meta=report)
        self.timed("update_connector_output", loaded)
        self.timed("update_state_after_alloc", request, Blocks(self.table), 0)
        self.timed("build_connector_meta", self.first_step(request, found), what=" with a new request")
        for step in range(2):
            request.append_output_token_ids(7)
            self.timed("update_connector_output", KVConnectorOutput())
            self.timed("build_connector_meta", self.next_step(request, step), what=" while it decodes")
        self.timed("request_finished_all_groups", request, (self.table,))

    def first_step(self, request, computed):
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [NewRequestData.from_request(request, (self.table,))]
        output.scheduled_new_reqs[0].num_computed_tokens = computed
        output.num_scheduled_tokens = {request.request_id: request.num_tokens - computed}
        return output

    def next_step(self, request, step):
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=[request.request_id],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None],
            num_computed_tokens=[request.num_tokens - 1],
            num_output_tokens=[step + 1],
        )
        output.num_scheduled_tokens = {request.request_id: 1}
        return output


def store(socket, space, tokens):
    """Chunks with nothing in them."""
    prompt = Prompt(space)
    chunks = prompt.extend(tokens)
    pages = torch.zeros((CHUNK_TOKENS // BLOCK_TOKENS, 1, BLOCK_TOKENS, 16))
    tensors = [describe(pages, "BHNC", 0, (0, 1))]
    attach = {"instance": "scheduler-calls", "rank": 0, "world_size": 1}
    limits = {"load_deadline_ms": 30_000, "store_deadline_ms": 30_000, "patience_ms": 30_000}
    breaker = {"breaker_timeouts": 3, "breaker_pause_ms": 1}
    settings = {"socket": socket, "attach": attach, "tensors": tensors, "device": None, **limits, **breaker}
    worker = Worker(json.dumps(settings), space)
    for chunk in range(chunks):
        table = list(range(CHUNK_TOKENS // BLOCK_TOKENS))
        worker.store(f"chunk {chunk}", prompt.hashes(chunk, chunk + 1), prompt.parent(chunk), 0, table)
    stored = []
    while len(stored) < chunks:
        time.sleep(0.01)
        stored += worker.stored()
    worker.close()
    if errors := [one.error for one in stored if one.error]:
        raise SystemExit(errors[0])


def main():
    socket, length, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    numbers = random.Random(1)
    tokens = [numbers.randrange(4, 150_000) for _ in range(length)]
    plane = {"name": "kv", "layer": 0, "heads": 1, "row_bytes": 64}
    description = {"model": "scheduler-calls", "revision": "1", "dtype": "float32", "chunk_tokens": CHUNK_TOKENS}
    space = Space(json.dumps({**description, "planes": [plane]}))
    store(socket, space, tokens)
    settings = Settings.read({"socket": socket, "lookup_deadline_ms": 5000})
    # The engine's configuration is not needed for what the scheduler calls.
    connector = KvGateConnector.__new__(KvGateConnector)
    connector.scheduler = SchedulerSide(Model(space, ["layer"], (0, 1), BLOCK_TOKENS), settings, True, True)
    connector.worker = None
    calls = Calls(connector, list(range(-(-length // BLOCK_TOKENS) + 1)))
    for number in range(rounds + 1):
        calls.request(number, tokens)
        if number == 0:
            # Threads and connections begin with the first.
            calls.us.clear()
    print(json.dumps(calls.us))


if __name__ == "__main__":
    main()
