"""kvgate as a tier of vLLM's own offloading, without an engine: vLLM's tiering manager and its shared memory, as its scheduler
calls them, and a real gateway.

python tests/engines/test_tier.py     in an environment with vLLM and the wheel
"""

import inspect
import json
import os
import signal
import tempfile
import time
import unittest
import uuid
from types import SimpleNamespace
from unittest import mock

import numpy as np
from case import damage
from gateway import Gateway, hang
from kvgate import Space
from kvgate._native import PanicException
from kvgate.vllm import pages
from kvgate.vllm.tier import KvGateTier
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

PAGE = 8192
COUNT = 32
TOKENS = 16
WAITING = (LookupResult.RETRY, LookupResult.HIT_PENDING)
SECONDS_MAX = 60


def group(number, is_chain=True):
    space = {
        "model": "m",
        "revision": "1",
        "dtype": "pages",
        "hash": "vllm-sha256",
        "chunk_tokens": TOKENS,
        "extra": {"group": str(number)},
        "planes": [{"name": "page", "layer": 0, "heads": 1, "row_bytes": PAGE}],
    }
    return pages.PageGroup(number, TOKENS, is_chain, Space(json.dumps(space)))


GROUPS = [group(0), group(2, is_chain=False)]


def key(number, of=0):
    return make_offload_key(bytes([number]) * 32, of)


def content(key):
    """A page's bytes."""
    return bytes((key[0] * 7 + key[-1] * 31 + at * 13 + (at >> 8)) & 0xFF for at in range(PAGE))


class Life:
    """An engine's scheduler, as far as its tiers see it."""

    def __init__(self, socket, events=False, count=COUNT, example=False, **keys):
        """`example`: with vLLM's own example of a tier, and not kvgate's."""
        self.region = SharedOffloadRegion(uuid.uuid4().hex, count, None, PAGE, PAGE)
        self.primary = CPUPrimaryTierOffloadingManager(count, self.region)
        spec = SimpleNamespace(
            blocks_per_chunk=1,
            kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        )
        config = {"type": "KvGateTier", "module_path": "kvgate.vllm.tier", "socket": str(socket)}
        config |= {"lookup_deadline_ms": 5000, "enable_kv_events": events, **keys}
        config = {"type": "example"} if example else config
        with mock.patch.object(pages, "describe", lambda *_: list(GROUPS)):
            self.tier = SecondaryTierFactory.create_secondary_tier(config, self.primary.get_kv_memoryview(), spec)
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.view = self.primary.get_kv_memoryview()
        self.steps, self.is_over = 0, False

    def request(self, keys):
        context = ReqContext(uuid.uuid4().hex)
        for at, one in enumerate(keys):
            context.set_offload_key_position(one, (at + 1) * TOKENS)
        self.manager.on_new_request(context)
        return context

    def step(self):
        self.steps += 1
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def until(self, done):
        deadline = time.monotonic() + SECONDS_MAX
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError("it never ends")
            self.step()
            # The model computes.
            time.sleep(0.001)

    def idle(self):
        self.until(lambda: not self.manager.has_pending_work())
        if self.tier.jobs or self.tier.storing_bytes:
            raise AssertionError(f"the tier has not forgotten {self.tier.jobs}")

    def store(self, keys, context=None):
        """A prompt's pages go to the CPU tier, and from there to the gateway."""
        own = context or self.request(keys)
        output = self.manager.prepare_store(keys, own)
        for one, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.view_of(chunk)[:] = content(one)
        self.manager.complete_store(output.keys_to_store, own)
        if context is None:
            self.manager.on_request_finished(own)

    def found(self, keys, context=None):
        """vLLM's answers, once there are any; what it finds is in its CPU tier then, byte for byte."""
        own = context or self.request(keys)
        answers = []

        def looked():
            answers[:] = [self.manager.lookup(one, own) for one in keys]
            return not any(answer in WAITING for answer in answers)

        self.until(looked)
        there = [one for one, answer in zip(keys, answers, strict=True) if answer is LookupResult.HIT]
        if there:
            spec = self.manager.prepare_load(there, own)
            for one, chunk in zip(there, spec.chunk_ids, strict=True):
                if bytes(self.view_of(chunk)) != content(one):
                    raise AssertionError(f"other bytes than were stored of {one.hex()}")
            self.manager.complete_load(there, own)
        if context is None:
            self.manager.on_request_finished(own)
        return [answer is LookupResult.HIT for answer in answers]

    def view_of(self, chunk):
        return self.view.cast("B")[int(chunk) * PAGE : (int(chunk) + 1) * PAGE]

    def free(self):
        """Whether all of the CPU tier can be had: nothing is held for a job that has ended."""
        keys = [key(number, 2) for number in range(200, 200 + len(self.view))]
        context = self.request(keys)
        output = self.manager.prepare_store(keys, context)
        if output is not None:
            self.manager.complete_store(output.keys_to_store, context, success=False)
        self.manager.on_request_finished(context)
        return output is not None

    def end(self):
        if not self.is_over:
            self.is_over = True
            self.manager.shutdown()


class TierCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-tier-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.gateway = Gateway(folder.name)
        self.addCleanup(self.gateway.end)

    def life(self, **keys):
        life = Life(self.gateway.socket, **keys)
        self.addCleanup(life.end)
        return life

    def stored(self, keys):
        self.gateway.start()
        first = self.life()
        # In other jobs than they are loaded in.
        for some in (keys[:3], keys[3:]):
            if some:
                first.store(some)
                first.idle()
        self.gateway.flush()


class TierTest(TierCase):
    def test_pages_come_back_in_another_engine(self):
        keys = [key(number) for number in range(10)] + [key(number, 2) for number in range(5, 10)]
        self.stored(keys)
        self.assertEqual(len(self.gateway.objects()), 15)
        self.gateway.kill()
        self.gateway.start()
        self.assertEqual(self.life().found([*keys, key(10), key(3, 2)]), [True] * 15 + [False] * 2)

    def test_a_page_says_what_came_before_it(self):
        """So that the gateway never keeps the end of a prompt whose beginning it had to drop."""
        self.stored([key(number) for number in range(3)])
        told = {}
        for path in self.gateway.objects():
            header = path.read_bytes()[:4096]
            told[header[48:80][0]] = header[80:112]
        self.assertEqual(told, {0: bytes(32), 1: bytes([0]) * 32, 2: bytes([1]) * 32})

    def test_one_page_is_one_object_whatever_stores_it(self):
        keys = [key(number) for number in range(4)]
        self.stored(keys)
        second = self.life()
        second.store([*keys, key(9)])
        second.idle()
        self.gateway.flush()
        self.assertEqual(len(self.gateway.objects()), 5)

    def test_damage_is_a_miss_and_heals(self):
        keys = [key(number) for number in range(6)]
        self.stored(keys)
        self.gateway.kill()
        damage([path for path in self.gateway.objects() if path.name.startswith("02")])
        self.gateway.start()
        second = self.life()
        context = second.request(keys)
        # vLLM is told which came, and asks no more in this request.
        with mock.patch.object(second.tier, "submit_load", wraps=second.tier.submit_load) as loads:
            self.assertEqual(second.found(keys, context)[:3], [True, True, False])
        self.assertEqual(loads.call_count, 1)
        self.assertTrue(second.free())
        second.primary.reset_cache()
        second.store(keys, context)
        second.manager.on_request_finished(context)
        second.idle()
        self.gateway.flush()
        self.assertEqual(self.life().found(keys), [True] * 6)

    def test_without_a_gateway_all_is_a_miss(self):
        life = self.life()
        keys = [key(number) for number in range(6)]
        self.assertEqual(life.found(keys), [False] * 6)
        life.store(keys)
        life.idle()
        self.assertTrue(life.free())
        # It may come later.
        self.gateway.start()
        life.store(keys)
        life.idle()
        self.assertEqual(self.life().found(keys), [True] * 6)

    def test_events_for_routers(self):
        self.gateway.start()
        life = self.life(events=True, locality="REMOTE")
        keys = [key(1), key(2)]
        life.store(keys)
        life.idle()
        (event,) = [event for event in life.manager.take_events() if event.medium.name == "STORAGE"]
        self.assertEqual((sorted(event.keys), event.removed, event.locality.name), (keys, False, "REMOTE"))
        self.assertEqual(list(life.manager.take_events()), [])


class HangingTest(TierCase):
    """The gateway stops in the middle of its work. vLLM's scheduler goes on: each of its calls returns, and what was under way
    ends while nobody answers."""

    def setUp(self):
        super().setUp()
        self.keys = [key(number) for number in range(6)]
        self.stored(self.keys)

    def stop(self):
        process = self.gateway.pid()
        hang(process)
        self.addCleanup(os.kill, process, signal.SIGCONT)

    def test_lookups_are_misses_after_their_deadline(self):
        life = self.life(lookup_deadline_ms=200)
        self.stop()
        context = life.request(self.keys)
        self.assertEqual({life.manager.lookup(one, context) for one in self.keys}, {LookupResult.RETRY})
        self.assertEqual(life.found(self.keys, context), [False] * 6)
        self.assertGreater(life.steps, 3)

    def test_stores_give_vllm_its_pages_back(self):
        life = self.life(store_deadline_ms=200, patience_ms=500)
        # It has a session.
        life.store([key(50)])
        life.idle()
        self.stop()
        life.store([key(number) for number in range(100, 110)])
        before = life.steps
        life.idle()
        self.assertGreater(life.steps - before, 3, "steps while the store was under way")
        self.assertTrue(life.free())

    def test_loads_fail(self):
        life = self.life(patience_ms=500, load_deadline_ms=500)
        life.store([key(50)])
        life.idle()
        context = life.request(self.keys)
        life.until(lambda: life.manager.lookup(self.keys[0], context) is not LookupResult.RETRY)
        self.stop()
        self.assertEqual(life.found(self.keys, context)[1:], [False] * 5)
        self.assertTrue(life.free())

    def test_the_engine_ends(self):
        life = self.life(patience_ms=500)
        life.store([key(50)])
        life.idle()
        self.stop()
        life.store([key(number) for number in range(100, 110)])
        life.step()
        self.assertTrue(life.tier.jobs)
        life.end()
        self.assertEqual((life.tier.worker, life.tier.jobs), (None, {}))


class LimitTest(TierCase):
    def under_way(self, **keys):
        """A life whose stores end when the gateway goes on."""
        self.gateway.start()
        process = self.gateway.pid()
        life = self.life(store_deadline_ms=60_000, patience_ms=60_000, **keys)
        hang(process)
        self.addCleanup(os.kill, process, signal.SIGCONT)
        return life

    def ended(self, life):
        os.kill(self.gateway.pid(), signal.SIGCONT)
        life.idle()
        self.assertTrue(life.free())
        self.gateway.flush()
        return len(self.gateway.objects())

    def test_more_jobs_than_may_be_are_refused(self):
        life = self.under_way(jobs_at_once=2)
        for number in range(4):
            life.store([key(number)])
        self.assertEqual(len(life.tier.jobs), 2)
        self.assertEqual(self.ended(life), 2)

    def test_stores_may_hold_a_share_of_the_cpu_tier(self):
        # Of 32 pages.
        life = self.under_way(store_share=10)
        for first, count in ((0, 2), (10, 1), (20, 1)):
            life.store([key(first + number) for number in range(count)])
        self.assertEqual(self.ended(life), 3)

    def test_the_first_store_always_may(self):
        life = self.under_way(store_share=10)
        life.store([key(number) for number in range(8)])
        life.store([key(10)])
        self.assertEqual(self.ended(life), 8)

    def test_wrong_settings_are_all_told(self):
        with self.assertRaises(ValueError) as raised:
            Life(self.gateway.socket, tennant="x", pin_ms="1")
        for told in ("unknown key 'tennant'", "pin_ms must be int, not '1'"):
            self.assertIn(told, str(raised.exception))


class ResetTest(TierCase):
    def test_after_a_reset_an_engine_has_what_it_stored_since(self):
        """The weights may be others."""
        keys = [key(number) for number in range(4)]
        self.stored(keys)
        life = self.life()
        life.manager.reset_cache()
        self.flushed(life)
        self.assertEqual(life.found(keys), [False] * 4)
        life.store(keys[:2])
        life.idle()
        life.primary.reset_cache()
        self.assertEqual(life.found(keys), [True, True, False, False])
        self.assertEqual(self.life().found(keys), [True] * 4)

    def test_fixed_weights_forget_nothing(self):
        keys = [key(number) for number in range(4)]
        self.stored(keys)
        life = self.life(fixed_weights=True)
        life.manager.reset_cache()
        self.flushed(life)
        self.assertEqual(life.found(keys), [True] * 4)

    def test_a_reset_ends_what_is_under_way(self):
        self.stored([key(number) for number in range(4)])
        life = self.life()
        context = life.request([key(1)])
        life.manager.lookup(key(1), context)
        life.step()
        life.store([key(number) for number in range(20, 30)])
        life.manager.reset_cache()
        self.flushed(life)
        self.assertFalse(life.manager.has_pending_work())
        self.assertEqual(life.found([key(1)], context), [False])
        life.manager.on_request_finished(context)

    def flushed(self, life):
        """vLLM 0.33 loads nothing before its workers have stopped, too."""
        getattr(life.manager, "on_reset_flushed", lambda: None)()


class BugTest(TierCase):
    def test_an_error_of_ours_turns_the_tier_off_and_vllm_goes_on(self):
        errors = dict.fromkeys(("by_group", "note", "take_answers"), RuntimeError)
        # A panic of the extension is no `Exception`.
        for place, error in {**errors, "collect": PanicException}.items():
            with self.subTest(place):
                keys = [key(number) for number in range(4)]
                self.gateway.start()
                life = self.life()
                # It may be under way by then.
                life.store([key(50)])
                with (
                    mock.patch.object(KvGateTier, place, side_effect=error("a bug")),
                    self.assertLogs("kvgate.vllm.tier", "ERROR"),
                ):
                    life.found(keys)
                    life.store(keys)
                    life.idle()
                self.assertTrue(life.tier.is_off)
                life.primary.reset_cache()
                self.assertEqual(life.found(keys), [False] * 4)
                life.store(keys)
                life.idle()
                self.assertTrue(life.free())
                life.manager.reset_cache()
                self.gateway.end()


class ContractTest(TierCase):
    """What vLLM's interface (`SecondaryTierManager`) says of every tier: so of its own example too. The wheel has no tests of
    vLLM's for tiers."""

    def each(self):
        self.gateway.start()
        for example in (True, False):
            with self.subTest(example=example):
                life = self.life(example=example)
                yield life.tier, life.request([key(number) for number in range(8)])

    def ended(self, tier, jobs):
        """The results of so many jobs, by their numbers. There are no others."""
        results, deadline = [], time.monotonic() + SECONDS_MAX
        while len(results) < jobs and time.monotonic() < deadline:
            results += tier.get_finished_jobs()
            tier.on_schedule_end(ScheduleEndContext((), ()))
        for _ in range(20):
            results += tier.get_finished_jobs()
            time.sleep(0.005)
        self.assertEqual(len(results), jobs)
        return {result.job_id: result for result in results}

    def looked_up(self, tier, one, context):
        deadline = time.monotonic() + SECONDS_MAX
        while (answer := tier.lookup(one, context)) in WAITING and time.monotonic() < deadline:
            tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.005)
        return answer

    def job(self, number, numbers, context, is_promotion=False):
        keys = [key(at) for at in numbers]
        return TransferJob(number, keys, np.array(list(numbers)), is_promotion, context)

    def test_each_job_ends_once_and_its_pages_are_there(self):
        for tier, context in self.each():
            tier.submit_store(self.job(1, range(4), context))
            tier.submit_store(self.job(2, range(2, 6), context))
            results = self.ended(tier, 2)
            self.assertEqual({number: result.success for number, result in results.items()}, {1: True, 2: True})
            answers = [self.looked_up(tier, key(number), context) for number in (0, 5, 7)]
            self.assertEqual(answers, [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS])
            tier.submit_load(self.job(3, range(6), context, is_promotion=True))
            tier.submit_load(self.job(4, (5, 7), context, is_promotion=True))
            results = self.ended(tier, 2)
            self.assertTrue(results[3].success)
            self.assertFalse(results[4].success)
            self.assertLessEqual(set(results[4].successful_keys or ()), {key(5)})
            tier.on_request_finished(context)

    def test_when_drained_all_results_are_there(self):
        for tier, context in self.each():
            for number in range(5):
                tier.submit_store(self.job(number, (number,), context))
            tier.drain_jobs()
            self.assertEqual(sorted(result.job_id for result in tier.get_finished_jobs()), list(range(5)))
            self.assertEqual(list(tier.get_finished_jobs()), [])


class InterfaceTest(unittest.TestCase):
    def test_calls_are_vllms(self):
        for name, ours in inspect.getmembers(KvGateTier, inspect.isfunction):
            theirs = getattr(SecondaryTierManager, name, None)
            if theirs is None or name.startswith("_"):
                continue
            with self.subTest(name):
                wanted = list(inspect.signature(theirs).parameters)[1:]
                self.assertEqual(len(list(inspect.signature(ours).parameters)) - 1, len(wanted))
        self.assertEqual(KvGateTier.__abstractmethods__, frozenset())
        self.assertIn("successful_keys", JobResult.__dataclass_fields__)


if __name__ == "__main__":
    unittest.main(verbosity=2)
