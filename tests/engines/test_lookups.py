"""The scheduler's lookups: their questions, their times, and the use of their answers. The gateway's answers are given by hand.

python tests/engines/test_lookups.py     in an environment with vLLM and the wheel
"""

import contextlib
import queue
import socketserver
import tempfile
import threading
import time
import unittest
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

from kvgate import Lookups
from kvgate.vllm.metadata import WorkerReport
from kvgate.vllm.scheduler import SchedulerSide
from kvgate.vllm.settings import Settings
from made_up import CHUNK, Pool, kind, model, request

SECONDS_MAX = 20
"""Seconds that a test waits for an answer that must come."""
HASH_BYTES = 32


def wait_for(what):
    end = time.monotonic() + SECONDS_MAX
    while not what():
        if time.monotonic() > end:
            raise AssertionError("it does not come")
        time.sleep(0.001)


class Question:
    """A lookup that has come, and waits for its answer."""

    def __init__(self, path, hashes):
        self.query = parse_qs(urlsplit(path).query)
        self.deadline_ms = int(self.query["deadline_ms"][0])
        self.hashes = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        self.told = threading.Event()

    def answer(self, prefix, unknown=(), memory=(), disk=(), boundary=None):
        """`prefix`: leading chunks of the first kind; `boundary`: those after which all kinds have what they need."""
        self.masks = (range(prefix), unknown, (), memory, disk)
        self.headers = {
            "x-kvgate-prefix": prefix,
            "x-kvgate-boundary": prefix if boundary is None else boundary,
            "x-kvgate-full": prefix,
            "x-kvgate-open": int(bool(unknown)),
            "x-kvgate-drafts": "",
        }
        self.told.set()

    def body(self):
        return b"".join(self.mask(bits) for bits in self.masks)

    def mask(self, bits):
        return sum(1 << bit for bit in bits).to_bytes(-(-len(self.hashes) // 8), "little")


class Answers(socketserver.ThreadingUnixStreamServer):
    """Speaks as a gateway does in a lookup."""

    daemon_threads = True

    def __init__(self, path):
        self.questions = queue.Queue()
        super().__init__(path, Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def next(self):
        return self.questions.get(timeout=SECONDS_MAX)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        question = Question(self.path, self.rfile.read(int(self.headers["content-length"])))
        self.server.questions.put(question)
        question.told.wait()
        body = question.body()
        # The other end may be gone by now.
        with contextlib.suppress(OSError):
            self.send_response(200)
            for name, value in question.headers.items():
                self.send_header(name, str(value))
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_):
        pass


class LookupCase(unittest.TestCase):
    """Chunks of 8 tokens, blocks of 4."""

    settings: ClassVar = {}

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = folder.name + "/sock"
        self.gateway = Answers(path)
        self.addCleanup(self.gateway.server_close)
        self.addCleanup(self.gateway.shutdown)
        always = {"load_policy": "always", "socket": path, "lookup_deadline_ms": 5000}
        self.scheduler = SchedulerSide(self.model(), Settings.read({**always, **self.settings}))
        self.scheduler.blocks.bind(Pool())
        self.blocks = SimpleNamespace(get_block_ids=lambda: [list(range(10, 30))])

    def model(self):
        return model()

    def arrive(self, name="r", tokens=36):
        one = request(name, range(tokens))
        self.scheduler.new_request(one)
        return one

    def queued(self, found):
        """A request whose answer is old when the scheduler comes to it."""
        request = self.arrive()
        self.gateway.next().answer(found)
        wait_for(lambda: self.scheduler.lookups.is_old("r"))
        return request

    def matched(self, request, local=0):
        """The answer that vLLM gets at last."""
        told = []

        def is_told():
            told.append(self.scheduler.matched_tokens(request, local)[0])
            return told[-1] is not None

        wait_for(is_told)
        return told[-1]

    def grow(self, request, tokens):
        request.all_token_ids += range(100, 100 + tokens)
        request.num_tokens += tokens

    def admit(self, request, tokens=0):
        self.scheduler.allocated(request, self.blocks, tokens)

    def fail_load(self, request, block):
        """The load under way ends without this block and those that follow."""
        job = self.scheduler.requests[request.request_id].load.job
        self.scheduler.ended(set(range(block, 30)), WorkerReport(loaded={job: (1, 0.1, False, True)}))

    def store(self, request, computed):
        """A step computes `computed` tokens; the chunks that are full then go to a store, and get there."""
        return self.step({request.request_id: computed}).stores

    def step(self, computed=None, offers=None):
        """One in which these new requests get so many tokens."""
        computed, tables = computed or {}, self.blocks.get_block_ids()
        new = [SimpleNamespace(req_id=name, block_ids=tables, num_computed_tokens=0) for name in computed]
        return self.scheduler.step(
            SimpleNamespace(
                total_num_scheduled_tokens=sum(computed.values()),
                num_scheduled_tokens=computed,
                scheduled_new_reqs=new,
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
                preempted_req_ids=None,
                kv_connector_block_state=SimpleNamespace(
                    get_block_ids=lambda _: tables, boundary_state_offloads=offers or {}
                ),
            )
        )

    def get_there(self, stores):
        for store in stores:
            there = {(part.kind, at) for part in store.parts for at in range(len(part.chunks))}
            self.scheduler.ended((), WorkerReport(stored={store.job: (1, there)}))


class QueuedTest(LookupCase):
    """While a request waits for others."""

    settings: ClassVar = {"lookup_deadline_ms": 400}

    def test_its_lookup_goes_on(self):
        request = self.arrive()
        first = self.gateway.next()
        self.assertEqual(first.deadline_ms, 320, "four fifths: the rest is for the way")
        # Longer than any request is waited for.
        time.sleep(0.5)
        first.answer(1, unknown=[1, 2, 3])
        # S3 has not told of the rest in so short a time.
        second = self.gateway.next()
        self.assertEqual(second.deadline_ms, 640)
        second.answer(3)
        self.assertEqual(self.matched(request), 24)

    def test_chunks_known_at_the_deadline_count(self):
        request = self.arrive()
        time.sleep(0.35)
        self.gateway.next().answer(1, unknown=[1, 2, 3])
        late = self.gateway.next()
        self.assertEqual(self.matched(request), 8)
        # vLLM had no blocks for it so far.
        late.answer(3)
        wait_for(lambda: self.matched(request) == 24)

    def test_where_nobody_can_tell_it_is_not_asked_on(self):
        request = self.arrive()
        self.gateway.next().answer(2, unknown=[2, 3])
        self.assertEqual(self.matched(request), 16)
        self.assertTrue(self.gateway.questions.empty())


class SourcesTest(LookupCase):
    def test_tokens_are_counted_by_the_tier_that_had_them(self):
        request = self.arrive()
        self.gateway.next().answer(4, memory=[0, 1], disk=[2])
        self.assertEqual(self.matched(request, local=4), 28)
        self.admit(request, 28)
        told = {source.value: tokens for source, tokens in self.scheduler.hit_sources(request).items()}
        self.assertEqual(told, {"host": 12, "disk": 8, "external_unspecified": 8})


class KindsTest(LookupCase):
    """A model with a window in group 1 and a state in group 2, and drafts in group 3."""

    settings: ClassVar = {"state_every": 32}

    def model(self):
        window, state = kind("window", 6, {1: 4}), kind("state", 0, {2: 8})
        self.kinds = [kind(), window, state, kind(blocks={3: 4}, is_draft=True)]
        return model(*self.kinds, drops_last=True)

    def setUp(self):
        super().setUp()
        null = [0] * 20
        self.tables = [range(10, 30), [*null[:2], *range(32, 50)], [*null[:1], *range(51, 60)], range(70, 90)]
        self.blocks = SimpleNamespace(get_block_ids=lambda: [list(table) for table in self.tables])

    def test_one_question_is_about_all_kinds(self):
        self.arrive()
        query = self.gateway.next().query
        ids = [kind.space.id for kind in self.kinds]
        self.assertEqual((query["space"], query["with"], query["drafts"]), (ids[:1], ids[1:3], ids[3:]))
        # In chunks. vLLM drops the last one of a hit, for its drafts.
        self.assertEqual((query["state_every"], query["lookahead"]), (["4"], ["1"]))

    def test_a_token_is_left_to_compute(self):
        self.arrive(tokens=32)
        self.assertEqual(len(self.gateway.next().hashes), 3)

    def test_the_boundary_counts_and_prompts_are_known_to_part_where_the_prefix_ends(self):
        request = self.arrive()
        self.gateway.next().answer(4, boundary=2)
        self.assertEqual(self.matched(request), 16)
        # vLLM keeps a state there, so that the next one hits: a chunk before, which drafts have dropped from hits.
        self.assertEqual(request.shared_prefix_boundary, 24)

    def test_what_each_kind_needs_is_loaded(self):
        request = self.arrive()
        self.gateway.next().answer(2)
        self.assertEqual(self.matched(request), 16)
        self.admit(request, 16)
        load = self.scheduler.requests["r"].load
        found = {part.kind: (part.first_chunk, part.tables) for part in load.parts}
        self.assertEqual(
            found,
            {
                0: (0, {0: ((0, 16), [10, 11, 12, 13])}),
                # Of the window those blocks that vLLM has given.
                1: (1, {1: ((0, 8), [32, 33])}),
                2: (1, {2: ((0, 1), [51])}),
                3: (0, {3: ((0, 16), [70, 71, 72, 73])}),
            },
        )
        prompt = self.scheduler.requests["r"].prompt
        self.assertEqual([part.hashes for part in load.parts], [prompt.hashes(first, 2) for first, _ in found.values()])

    def test_what_vllm_has_is_not_loaded(self):
        request = self.arrive()
        self.gateway.next().answer(2)
        self.assertEqual(self.matched(request, local=8), 8)
        self.admit(request, 8)
        parts = self.scheduler.requests["r"].load.parts
        self.assertEqual([(part.kind, part.first_chunk) for part in parts], [(0, 1), (1, 1), (2, 1), (3, 1)])

    def test_a_state_that_was_loaded_is_not_stored_although_vllm_offers_it_back(self):
        for is_whole, stored in ((True, []), (False, [2])):
            name = f"whole {is_whole}"
            request = self.arrive(name=name, tokens=20)
            self.gateway.next().answer(2)
            self.assertEqual(self.matched(request), 16)
            self.admit(request, 16)
            job = self.scheduler.requests[name].load.job
            self.scheduler.ended((), WorkerReport(loaded={job: (1, 0.1, is_whole, True)}))
            stores = self.step({name: 16}, {name: [(2, 51, 16)]}).stores
            kinds = [part.kind for store in stores for part in store.parts if part.kind == 2]
            self.assertEqual(kinds, stored, name)

    def test_a_load_that_lacks_anything_is_not_tried_again(self):
        request = self.arrive()
        self.gateway.next().answer(2)
        self.assertEqual(self.matched(request), 16)
        self.admit(request, 16)
        job = self.scheduler.requests["r"].load.job
        self.scheduler.ended((), WorkerReport(loaded={job: (1, 0.1, False, True)}))
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (0, False))


class LongChunkTest(LookupCase):
    """A chunk of 8 tokens is longer than a state's block, so vLLM keeps none at a chunk's end by itself."""

    drops_last = False

    def model(self):
        return model(kind(), kind("state", 0, {1: 4}), drops_last=self.drops_last)

    def parts_at(self, tokens, prefix, boundary=None, at=None):
        """Where vLLM is to keep a state of a prompt that begins with `prefix` chunks that are there; `at`: where it would."""
        name = f"{tokens} {prefix} {boundary}"
        request = self.arrive(name, tokens)
        if at is not None:
            request.shared_prefix_boundary = at
        if tokens > CHUNK:
            self.gateway.next().answer(prefix, boundary=boundary)
        self.matched(request)
        return getattr(request, "shared_prefix_boundary", None)

    def test_a_state_is_kept_at_the_last_chunk_of_a_prompt(self):
        self.assertEqual(self.parts_at(36, 0), 32)
        # A token is left to compute.
        self.assertEqual(self.parts_at(32, 0), 24)
        self.assertEqual(self.parts_at(33, 2), 32)

    def test_not_where_it_is_known_to_be_there(self):
        self.assertIsNone(self.parts_at(36, 4))
        self.assertIsNone(self.parts_at(7, 0))

    def test_where_prompts_are_known_to_part_it_is_kept_there(self):
        self.assertEqual(self.parts_at(36, 3, boundary=1), 24)

    def test_not_before_the_place_that_vllm_has_chosen(self):
        self.assertEqual(self.parts_at(36, 0, at=34), 34)

    def test_where_chunks_are_no_longer_than_blocks_vllm_keeps_it_by_itself(self):
        self.scheduler.model = model(kind(), kind("state", 0, {1: CHUNK}))
        self.assertIsNone(self.parts_at(36, 0))


class LongChunkDraftTest(LongChunkTest):
    """With drafts vLLM drops the last chunk of a hit."""

    drops_last = True

    def test_a_state_is_kept_at_the_last_chunk_of_a_prompt(self):
        self.assertEqual(self.parts_at(36, 0), 24)
        self.assertEqual(self.parts_at(32, 0), 16)

    def test_where_prompts_are_known_to_part_it_is_kept_there(self):
        self.assertEqual(self.parts_at(36, 4, boundary=1), 24)


class HungTest(LookupCase):
    """A gateway that takes questions, and answers none."""

    settings: ClassVar = {"lookup_deadline_ms": 20, "breaker_timeouts": 2}

    def test_each_request_goes_on_and_later_ones_wait_for_nothing(self):
        requests = [self.arrive(name=f"r{number}") for number in range(4)]
        for one in requests[:2]:
            self.gateway.next()
            self.assertEqual(self.matched(one), 0)
        for one in requests[2:]:
            self.assertEqual(self.scheduler.matched_tokens(one, 0), (0, False))
        later = self.arrive(name="later")
        self.assertEqual(self.scheduler.matched_tokens(later, 0), (0, False))

    def test_a_request_that_waits_for_blocks_is_told_the_same_again(self):
        request = self.arrive()
        self.assertEqual(self.matched(request), 0)
        for _ in range(3):
            self.assertEqual(self.scheduler.matched_tokens(request, 0), (0, False))

    def test_one_that_is_not_there_is_not_waited_for(self):
        self.scheduler.lookups = Lookups(
            "/nowhere/sock", self.scheduler.model.spaces, [], deadline_ms=SECONDS_MAX * 1000, again_ms=1
        )
        request = self.arrive()
        self.assertEqual(self.matched(request), 0)


class PatienceTest(LookupCase):
    settings: ClassVar = {"patience_ms": 30, "breaker_timeouts": 1, "lookup_deadline_ms": SECONDS_MAX * 2000}

    def test_a_question_ends(self):
        request = self.arrive()
        self.gateway.next()
        self.assertEqual(self.matched(request), 0)
        self.assertEqual(self.scheduler.matched_tokens(self.arrive(name="later"), 0), (0, False))


class AgainTest(LookupCase):
    """A request has been queued for long."""

    settings: ClassVar = {"lookup_again_ms": 1, "lookup_deadline_ms": SECONDS_MAX * 2000, "lookups_ahead": 1}

    def test_it_is_asked_for_again_and_the_old_answer_counts_until_there_is_one(self):
        request = self.queued(1)
        self.step()
        again = self.gateway.next()
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (8, True))
        # Another engine has stored more.
        again.answer(3)
        wait_for(lambda: self.scheduler.matched_tokens(request, 0) == (24, True))

    def test_a_chunk_that_is_gone_by_then_is_not_loaded(self):
        request = self.queued(3)
        self.step()
        self.gateway.next().answer(0)
        wait_for(lambda: self.scheduler.matched_tokens(request, 0) == (0, False))
        self.assertEqual(self.scheduler.requests["r"].found, [0], "so it is stored again")

    def test_others_got_the_place_in_which_it_could_have_been_admitted(self):
        request = self.arrive()
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (None, False))
        self.gateway.next().answer(1)
        wait_for(lambda: self.scheduler.lookups.is_old("r"))
        self.step()
        self.gateway.next().answer(2)
        wait_for(lambda: self.scheduler.matched_tokens(request, 0) == (16, True))

    def test_only_the_next_in_the_queue_are_asked_for(self):
        request = self.queued(1)
        self.arrive(name="later")
        self.gateway.next().answer(1)
        wait_for(lambda: self.scheduler.lookups.is_old("later"))
        self.step()
        self.assertTrue(self.scheduler.lookups.is_old("later"))
        self.gateway.next()
        self.admit(request)
        self.step()
        self.assertFalse(self.scheduler.lookups.is_old("later"))


class PinsTest(LookupCase):
    """Chunks that a lookup found are pinned for 2 ms."""

    settings: ClassVar = {"lookup_again_ms": 1, "pin_ms": 2, "lookup_deadline_ms": 1000}

    def queued(self, found):
        request = super().queued(found)
        wait_for(lambda: self.scheduler.lookups.is_due("r"))
        return request

    def test_without_pins_an_answer_is_worth_nothing(self):
        request = self.queued(2)
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (None, False))
        self.gateway.next().answer(1)
        self.assertEqual(self.matched(request), 8)

    def test_nor_when_no_other_comes_in_time(self):
        request = self.queued(2)
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (None, False))
        self.gateway.next()
        self.assertEqual(self.matched(request), 0)

    def test_an_answer_that_was_waited_for_counts_after_a_long_step(self):
        request = self.arrive()
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (None, False))
        self.gateway.next().answer(2)
        wait_for(lambda: self.scheduler.lookups.is_old("r"))
        time.sleep(0.01)
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (16, True))
        self.assertTrue(self.gateway.questions.empty())


class LateTest(LookupCase):
    settings: ClassVar = {"lookup_deadline_ms": 50}

    def test_a_late_answer_is_not_taken_for_a_newer_question_s(self):
        first = self.arrive()
        old = self.gateway.next()
        self.scheduler.finished(first)
        again = self.arrive()
        new = self.gateway.next()
        old.answer(3)
        self.assertEqual(self.matched(again), 0)
        new.answer(1)
        wait_for(lambda: self.matched(again) == 8)


class PreemptedTest(LookupCase):
    settings: ClassVar = {"lookup_again_ms": 10_000}

    def running(self, found=0, tokens=0):
        request = self.arrive()
        self.gateway.next().answer(found)
        self.assertEqual(self.matched(request), tokens)
        self.admit(request, tokens)
        return request

    def test_its_stored_chunks_are_loaded_with_generated_tokens(self):
        request = self.running()
        self.grow(request, 8)
        self.get_there(self.store(request, 43))
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (None, False))
        question = self.gateway.next()
        self.assertEqual(len(question.hashes), 5)
        question.answer(5)
        self.assertEqual(self.matched(request), 40)
        self.admit(request, 40)
        self.assertEqual(self.scheduler.requests["r"].load_tokens, (0, 40))

    def test_chunks_that_come_while_it_waits_are_found(self):
        request = self.running()
        stores = self.store(request, 36)
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (None, False))
        self.gateway.next().answer(0)
        self.assertEqual(self.matched(request), 0)
        self.get_there(stores)
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (None, False))
        self.gateway.next().answer(4)
        self.assertEqual(self.matched(request), 32)

    def test_a_chunk_that_a_load_did_not_bring_is_not_loaded_until_it_was_stored_again(self):
        request = self.running(found=4, tokens=32)
        # Of the second chunk.
        self.fail_load(request, 12)
        self.assertEqual(self.scheduler.matched_tokens(request, 8), (0, False))
        # The gateway does not know that it is too slow.
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (None, False))
        self.gateway.next().answer(4)
        self.assertEqual(self.matched(request), 8)
        self.admit(request, 8)
        stores = self.store(request, 36)
        prompt = self.scheduler.requests["r"].prompt
        self.assertEqual([part.hashes for store in stores for part in store.parts], [prompt.hashes(1, 4)])
        self.get_there(stores)
        self.assertEqual(self.scheduler.matched_tokens(request, 0), (None, False))
        self.gateway.next().answer(4)
        self.assertEqual(self.matched(request), 32)

    def test_a_load_that_brought_nothing_is_not_tried_again(self):
        request = self.running(found=4, tokens=32)
        self.fail_load(request, 10)
        for _ in range(3):
            self.assertEqual(self.scheduler.matched_tokens(request, 0), (0, False))
        self.assertTrue(self.gateway.questions.empty())

    def test_nothing_is_asked_for_a_request_that_is_gone(self):
        request = self.running()
        self.scheduler.finished(request)
        self.assertTrue(self.scheduler.lookups.is_due("r"))
        self.assertIsNone(self.scheduler.lookups.answer("r"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
