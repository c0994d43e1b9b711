"""Random histories of an engine without its model: vLLM's real scheduler, the connector's two sides, and a model of what each
block holds. Models with windows, states and drafts are among them. See test_histories.py.

`stand_ins.py` has what is in place of kvgate's Rust, `engine.py` the engine; here is what happens.

python tests/engines/histories.py SEED      one history again, step by step
"""

import math
import random
import sys
from types import SimpleNamespace

import stand_ins
from kvgate import Prompt
from stand_ins import GARBAGE, check
from vllm import __version__ as vllm_version  # noqa: F401
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from engine import MOST_TOKENS, WORDS, Engine, Group, model_of

MOST_STEPS = 600
PROMPT_TOKENS = ()
"""Lengths of prompts; without them any."""


class History(Engine):
    DEALT = 0.3
    """Share of the histories with ranks that have some of the tokens each, where vLLM can deal them."""
    SIBLINGS = (None, "sync", "sync", "async")
    MODELS = (
        *("plain",) * 6,
        *("windows", "windows", "two windows", "chunked", "states", "states", "states and windows"),
        *("windows alone", "states alone", "drafts", "windows and drafts", "latents", "latents"),
    )

    def __init__(self, seed, says=lambda *_: None, module_path=None):
        stand_ins.world = self
        self.says = says
        self.numbers = random.Random(seed)
        self.choose()
        parts = max(group.parts for group in self.groups)
        self.content = [
            [[[GARBAGE] * self.block_tokens for _ in range(self.blocks)] for _ in range(parts)]
            for _ in range(self.ranks)
        ]
        self.gateway, self.of_chunk, self.published_by = set(), {}, {}
        # Of these kvgate's own description of what vLLM makes is taken.
        is_described = (self.dealt_to > 1 or parts > 1) and not any(group.is_draft for group in self.groups)
        self.model = None if is_described else model_of(self.groups, self.chunk_tokens, self.eagle)
        self.epochs, self.siblings, self.known = [b""], [], set()
        self.truth, self.rejected = {}, {}
        self.names = 0
        self.space = self.model.spaces[0] if self.model else None
        self.in_flight = []
        self.freed, self.told = set(), set()
        self.has_reset = False
        self.build()

    def choose(self):
        """Chooses the engine's settings at random."""
        numbers = self.numbers
        self.is_async = numbers.random() < 0.6
        self.ranks = numbers.choice((1, 1, 2))
        self.block_tokens = numbers.choice((1, 2, 4))
        self.choose_model()
        self.deal_tokens()
        is_plain = len(self.groups) == 1 and self.groups[0].word == "full"
        self.chunk_tokens = math.lcm(*(group.tokens for group in self.groups)) * numbers.choice((1, 2, 3))
        self.layerwise = is_plain and not self.is_async and numbers.random() < 0.25
        self.sibling = numbers.choice(self.SIBLINGS) if self.groups == [Group("full", 0, self.block_tokens)] else None
        self.sibling_delivers, self.sends = numbers.random() < 0.3, numbers.random() < 0.3
        self.failures = numbers.choice((0, 0.2, 0.5))
        self.sibling_failures = numbers.choice((0, 0.2))
        if self.is_async and self.sibling == "sync":
            # vLLM itself goes on from a load within the step that failed.
            self.sibling_failures = 0
        # Of states with drafts vLLM keeps more blocks, and moves them: too much for this model of an engine.
        self.drafts = 0 if any(group.word == "state" for group in self.groups) else numbers.choice((0, 0, 1, 3))
        self.eagle = self.drafts > 0 and any(group.is_draft for group in self.groups)
        self.role = numbers.choice(("kv_both", "kv_both", "kv_both", "kv_producer", "kv_consumer"))
        needed = sum(-(-MOST_TOKENS // group.tokens) for group in self.groups)
        self.blocks = needed + numbers.choice((0, 2, 4, needed // 2)) + 4 * len(self.groups)
        self.policy = numbers.choice(("fcfs", "fcfs", "priority"))
        self.seats = numbers.choice((2, 4))
        self.budget = max(numbers.choice((4, 8, 16, 64)), self.drafts + 1)
        # vLLM itself asserts that what it pads with drafts is below it.
        self.long_prefill = numbers.choice((0, 0, max(3, self.drafts + 1), 6))
        self.throws = numbers.random() < 0.1

    def deal_tokens(self):
        """Decode context parallel: each rank has some tokens of each block. vLLM deals no windows."""
        numbers, self.dealt_to, self.interleave = self.numbers, 1, 1
        if any(group.word in ("window", "chunked") for group in self.groups) or numbers.random() > self.DEALT:
            return
        self.dealt_to = numbers.choice((2, 2, 3))
        self.interleave = numbers.choice([run for run in (1, 2, 4) if self.block_tokens % run == 0])
        self.ranks = self.dealt_to * numbers.choice((1, 1, 2))
        self.groups = [
            # A draft may run without, and a state is on each rank.
            group._replace(dealt_to=self.dealt_to)
            if group.word == "full" and not (group.is_draft and numbers.random() < 0.5)
            else group
            for group in self.groups
        ]

    def choose_model(self):
        """Its KV cache groups, as vLLM would deal them."""
        numbers, size = self.numbers, self.block_tokens
        full, others = Group("full", 0, size), []
        window, span = numbers.choice((1, 3, 5, 9)), numbers.choice((4, 8))
        match numbers.choice(self.MODELS):
            case "plain":
                pass
            case "latents":
                full = full._replace(parts=2)
            case "windows":
                other = numbers.choice((1, 2)) * size
                others = [Group("window", window, other)] * numbers.choice((1, 2))
            case "two windows":
                others = [Group("window", window, size), Group("window", window + 4, size)]
            case "chunked":
                others = [Group("chunked", span, size)] * numbers.choice((1, 2))
            case "states":
                others = [Group("state", 0, size)] * numbers.choice((1, 2))
            case "states and windows":
                others = [Group("state", 0, size), Group("window", window, size)]
            case "windows alone":
                full, others = None, [Group("window", window, size)]
            case "states alone":
                full, others = None, [Group("state", 0, size)]
            case "drafts":
                others = [Group("full", 0, size, is_draft=True)]
            case "windows and drafts":
                others = [Group("window", window, size), Group("full", 0, size, is_draft=True)]
        self.groups = [*([full] if full else []), *others]
        if numbers.random() < 0.5:
            self.groups.reverse()

    # ---- what happens

    def add_request(self):
        numbers = self.numbers
        tokens = [numbers.randrange(WORDS) for _ in range(numbers.randint(1, MOST_TOKENS - 10))]
        if self.truth and numbers.random() < 0.7:
            other = numbers.choice(list(self.truth.values()))
            same = numbers.randint(0, len(other))
            tokens = [*other[:same], *tokens][: MOST_TOKENS - 10]
        if numbers.random() < 0.4:
            # Another engine has stored some of it.
            self.know(tokens)
            prompt = Prompt(self.space, b"", self.side.epoch)
            full = prompt.extend(tokens)
            for number, kind in enumerate(self.model.kinds):
                has = numbers.randint(0, full)
                # Of a state it has some snapshots.
                share = 0.4 if kind.word == "state" else 1
                self.gateway.update(
                    (number, prompt.hashes(chunk, chunk + 1)) for chunk in range(has) if numbers.random() < share
                )
        if PROMPT_TOKENS:
            tokens = (tokens * 30)[: numbers.choice(PROMPT_TOKENS)]
        self.add(tokens, numbers.randint(1, 9), numbers.randrange(3))

    def add(self, tokens, to_generate, priority):
        self.names += 1
        name = f"r{self.names}"
        self.truth[name] = list(tokens)
        sampling = SamplingParams(max_tokens=to_generate, ignore_eos=True)
        self.says("add", name, tokens, to_generate)
        self.scheduler.add_request(Request(name, tokens, sampling, None, priority=priority, block_hasher=self.hasher))

    def abort(self):
        live = [name for name, request in self.scheduler.requests.items() if not request.is_finished()]
        if live:
            # Of those that a load is brought for, more than chance would take.
            loading = [
                name for name in live if self.scheduler.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS
            ]
            name = self.numbers.choice(loading if loading and self.numbers.random() < 0.5 else live)
            self.says("abort", name, self.scheduler.requests[name].status.name)
            self.keep_truth()
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self):
        requests = self.scheduler.requests.values()
        idle = (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED)
        can_preempt = (
            not self.in_flight
            and not self.scheduler.deferred_frees
            and all(request.status in idle for request in requests)
            and not any(request.num_computed_tokens for request in requests if request.status != RequestStatus.RUNNING)
        )
        preempts = can_preempt and self.numbers.random() < 0.7
        self.says("reset", preempts)
        self.has_reset |= preempts
        self.keep_truth()
        try:
            self.scheduler.reset_prefix_cache(preempts, reset_connector=self.numbers.random() < 0.5)
        except RuntimeError:
            # As vLLM does with a load between steps.
            check(self.sibling or self.in_flight, "nothing is under way, and the cache can't be reset")
        if self.side.epoch not in self.epochs:
            self.epochs.append(self.side.epoch)

    def keep_truth(self):
        for request in self.scheduler.requests.values():
            self.know(list(request.all_token_ids))

    def go_on(self):
        """Copies do, on each rank as it likes."""
        for native in self.natives():
            for job in list(native.jobs.values()) if native else ():
                if self.numbers.random() < self.pace and job.job in native.jobs:
                    native.go_on(job)
        for sibling in self.siblings:
            sibling.go_on()

    def step(self):
        pool = self.scheduler.kv_cache_manager.block_pool.blocks
        held = [
            copied
            for copied in self.side.blocks.copied.values()
            if any(pool[block].ref_cnt == 1 for block in copied.blocks)
        ]
        before = set(self.scheduler.reset_preempted_req_ids)
        output = self.scheduler.schedule()
        for name in output.preempted_req_ids - before:
            check(self.is_off or not held, f"{name} is preempted, and blocks that only copies hold come free")
            drops = self.scheduler.requests[name].drop_stale_output
            check(
                self.has_reset or not drops or (self.sibling and self.sibling_delivers), f"{name}'s tokens are dropped"
            )
        in_flight = [step.rejected for step in self.in_flight]
        step = SimpleNamespace(output=output, rejected={}, result=None)
        self.check_stores(output)
        step.result = self.execute(output, step, in_flight)
        step.freed = set(self.freed)
        self.in_flight.append(step)

    def check_stores(self, output):
        meta = output.kv_connector_metadata
        if self.sibling:
            at = self.scheduler.connector.sub_connectors.index(self.ours(self.scheduler.connector))
            meta = meta.metadata[at]
        for store in meta.stores:
            tables = self.scheduler.kv_cache_manager.get_block_ids(store.request)
            for part in store.parts:
                kind = self.model.kinds[part.kind]
                for group, blocks in part.tables.items() if kind.word != "state" else ():
                    size = self.chunk_tokens // kind.blocks[group]
                    right = [
                        block for chunk in part.chunks for block in tables[group][chunk * size : (chunk + 1) * size]
                    ]
                    # What a window has left behind is in no table any more.
                    same = [block if right[at] else 0 for at, block in enumerate(blocks)]
                    check(same == right, store.job, "names blocks", blocks, "of", right)

    def process(self):
        step = self.in_flight.pop(0)
        self.keep_truth()
        told = step.result.kv_connector_output
        self.says("  sampled", dict(zip(step.result.req_ids, step.result.sampled_token_ids, strict=True)))
        if told and told.invalid_block_ids:
            self.says("  failed", told.invalid_block_ids)
        self.scheduler.update_from_output(step.output, step.result)
        # vLLM 0.32 keeps what a request had reserved whose load failed as a whole. It counts against the request itself: its
        # next load between steps may never fit.
        for request in list(self.scheduler._inflight_prefills):
            if request.status == RequestStatus.WAITING and not request.num_computed_tokens:
                self.scheduler._inflight_prefills.discard(request)
        self.told |= step.freed
        if self.drafts and not self.is_async:
            names = [name for name in step.output.num_scheduled_tokens if name in self.scheduler.requests]
            drafts = [
                [self.numbers.randrange(WORDS) for _ in range(self.numbers.randint(0, self.drafts))] for _ in names
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def run(self):
        numbers = self.numbers
        self.pace = numbers.choice((0.1, 0.4, 0.9))
        to_come, steps = numbers.randint(2, 7), 0
        trouble = numbers.choice((0, 0.05, 0.15))
        while to_come or self.in_flight or self.scheduler.has_requests():
            steps += 1
            check(
                steps < MOST_STEPS, "it does not end:", {n: r.status.name for n, r in self.scheduler.requests.items()}
            )
            if steps % 100 == 0:
                self.end_vllm_s_deadlock()
            if to_come and (numbers.random() < 0.5 or not self.scheduler.has_requests()):
                to_come -= 1
                self.add_request()
            if numbers.random() < trouble:
                self.abort()
            if numbers.random() < trouble / 4:
                self.reset()
            self.go_on()
            if len(self.in_flight) < (2 if self.is_async else 1) and self.scheduler.has_requests():
                self.step()
                if self.is_async and len(self.in_flight) < 2:
                    continue
            self.go_on()
            if numbers.random() < trouble:
                self.abort()
            if self.in_flight:
                self.process()
            self.check_busy_after()
        self.end()

    def end_vllm_s_deadlock(self):
        """Requests that hold the blocks of loads between steps wait for more of them, and nobody runs who could give some."""
        waiting = [] if self.scheduler.running else self.scheduler.requests.values()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        for request in waiting:
            held = sum(map(len, self.scheduler.kv_cache_manager.get_block_ids(request.request_id)))
            is_loaded = request.status == RequestStatus.WAITING and request.num_computed_tokens > 0
            needed = sum(-(-request.num_tokens // group.tokens) for group in self.groups)
            if is_loaded and needed - held > free:
                self.says("vLLM is stuck, abort", request.request_id)
                self.keep_truth()
                return self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def check_busy_after(self):
        """Between steps only what was just preempted may be copied, until the next tells the workers; and anything, once
        kvgate is off."""
        if not self.scheduler.reset_preempted_req_ids and not self.is_off:
            for rank in range(self.ranks):
                self.check_busy(rank)

    def end(self):
        self.pace = 1
        for _ in range(5):
            self.go_on()
        # Reports come with a step.
        for _ in range(2):
            self.step()
            self.process()
        pool = self.scheduler.kv_cache_manager.block_pool
        check(pool.get_num_free_blocks() == self.blocks - 1, "blocks are lost")
        check(not self.scheduler.requests, "requests are left", self.scheduler.requests)
        if self.is_off:
            return
        side = self.side
        check(not side.requests, "requests are left", side.requests)
        for name in ("opaque", "wanted_back", "local", "new_loads"):
            check(not getattr(side, name), name, "is not empty:", getattr(side, name))
        check(not side.stores.open, "stores are left", side.stores.open)
        check(not side.blocks.kept and not side.blocks.copied, "blocks are left", side.blocks.kept, side.blocks.copied)
        check(not side.doubts.steps, "a step's loads were never told of")
        for connector in self.workers:
            worker = self.ours(connector).worker
            check(
                not (worker.loads or worker.stores or worker.received or worker.failed), "a worker has something left"
            )


class Overtaken(History):
    """A request is preempted in a step for which it was scheduled, and comes back as soon as the other one has ended."""

    def choose(self):
        super().choose()
        self.is_async = self.layerwise = self.throws = False
        self.sibling, self.failures, self.sibling_failures = None, 0, 0
        self.drafts, self.ranks, self.role = 0, 1, "kv_both"
        self.dealt_to = self.interleave = 1
        self.block_tokens, self.chunk_tokens, self.blocks, self.groups, self.eagle = (
            2,
            4,
            12,
            [Group("full", 0, 2)],
            False,
        )
        self.policy, self.seats, self.budget, self.long_prefill = "priority", 2, 8, 6

    def run(self):
        self.pace = 1
        self.add([at % WORDS for at in range(20)], 2, priority=1)
        self.step()
        self.process()
        self.add([2, 2, 2], 1, priority=0)
        was_overtaken = False
        while self.scheduler.has_requests():
            self.go_on()
            self.step()
            was_overtaken |= bool(self.in_flight[0].output.preempted_req_ids)
            self.process()
        check(was_overtaken, "nobody was preempted")
        self.end()


if __name__ == "__main__":
    History(int(sys.argv[1]), print).run()
