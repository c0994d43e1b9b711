"""Thousands of random histories of vLLM's scheduler with the connector. See histories.py.

python tests/engines/test_histories.py      in an environment with vLLM and the wheel
"""

import logging
import os
import sys
import traceback
import unittest
from types import SimpleNamespace
from unittest import mock

import histories
from histories import BrokenError, History, Overtaken
from kvgate.vllm.connector import KvGateConnector
from kvgate.vllm.scheduler import SchedulerSide
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

HISTORIES = 500_000 if os.environ.get("KVGATE_TEST_FULL") else 20_000
if share := os.environ.get("KVGATE_TEST_HISTORIES_SHARE"):
    HISTORIES //= int(share)
PLANTED = 1_000
"""Among so many a mistake must be found."""
AGAIN = f"PYTHONHASHSEED=0 {sys.executable} tests/engines/histories.py"


def first_broken(seeds):
    """The first of these histories that breaks, and how."""
    logging.disable(logging.CRITICAL)
    for seed in seeds:
        try:
            History(seed).run()
        except Exception:
            return f"{traceback.format_exc()}\nagain: {AGAIN} {seed}"
    return ""


def run(count):
    """Runs histories on all cores, each in a fork of this process. Returns those that broke."""
    cores = len(os.sched_getaffinity(0))
    children = []
    for core in range(cores):
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(read)
            with os.fdopen(write, "w") as file:
                file.write(first_broken(range(core, count, cores)) + "done")
            os._exit(0)
        os.close(write)
        children.append((process, read))
    said = []
    for process, read in children:
        with os.fdopen(read) as file:
            text = file.read()
        os.waitpid(process, 0)
        said.append(text.removesuffix("done") if text.endswith("done") else f"{text} a process died")
    return [text for text in said if text]


class HistoryTest(unittest.TestCase):
    def test_nothing_breaks(self):
        broken = run(HISTORIES)
        self.assertFalse(broken, "\n\n".join(broken))


class PlantedTest(unittest.TestCase):
    """The histories find mistakes that were once made."""

    def finds(self, pattern):
        broken = run(PLANTED)
        self.assertTrue(broken, "nothing broke")
        # Which of them comes first goes by the number of cores.
        self.assertRegex("\n".join(broken), pattern)

    def test_a_block_table_of_its_own(self):
        """It was not kept in steps with loads within them."""
        step = SchedulerSide.step

        def planted(self, output):
            tables = self.__dict__.setdefault("tables", {})
            cached = output.scheduled_cached_reqs
            if not output.has_sync_kv_loads:
                for new in output.scheduled_new_reqs:
                    tables[new.req_id] = list(new.block_ids[0])
                for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
                    own = [] if name in cached.resumed_req_ids else tables.get(name, [])
                    tables[name] = own + list(blocks[0] if blocks else [])
            output.kv_connector_block_state = SimpleNamespace(get_block_ids=lambda name: (tables.get(name, []),))
            is_producer = self.is_producer
            self.is_producer = is_producer and not output.has_sync_kv_loads
            meta = step(self, output)
            self.is_producer = is_producer
            return meta

        with (
            mock.patch.object(SchedulerSide, "step", planted),
            mock.patch.object(SchedulerSide, "note_doubts", lambda *_: None),
        ):
            self.finds("blocks")

    def test_loads_within_a_step_that_are_taken_to_be_right(self):
        with mock.patch.object(SchedulerSide, "note_doubts", lambda *_: None):
            self.finds("wrong KV|is not empty")

    def test_blocks_that_are_kept_after_a_preemption(self):
        step, finished = SchedulerSide.step, SchedulerSide.finished

        def counts(self, output):
            meta = step(self, output)
            self.__dict__.setdefault("stored_ever", set()).update(store.request for store in meta.stores)
            return meta

        def planted(self, request):
            finished(self, request)
            if request.request_id in self.__dict__.get("stored_ever", ()):
                self.to_free.add(request.request_id)
                return True
            return False

        with (
            mock.patch.object(SchedulerSide, "step", counts),
            mock.patch.object(SchedulerSide, "finished", planted),
            mock.patch.object(History, "finished", lambda self, request: self.finish(request)),
            # The other connector loads between steps.
            mock.patch.object(History, "SIBLINGS", ("async",)),
        ):
            self.finds("assert req_id in self.requests|is free")

    def test_blocks_that_are_kept_although_all_copies_have_ended(self):
        ended = SchedulerSide.ended

        def planted(self, failed_blocks, report):
            if report is not None:
                report.freed = {}
            ended(self, failed_blocks, report)

        with mock.patch.object(SchedulerSide, "ended", planted):
            self.finds("nothing copies them")

    def test_tokens_that_are_dropped_for_a_best_effort_cache(self):
        with mock.patch.object(KvGateConnector, "requires_kv_delivery", KVConnectorBase_V1.requires_kv_delivery):
            self.finds("tokens are dropped")

    def test_blocks_that_vllm_has_cached_and_never_computed(self):
        """It does so itself, for requests with priorities."""
        Overtaken(0).run()
        with (
            mock.patch.object(SchedulerSide, "evict_uncomputed", lambda *_: None),
            self.assertRaisesRegex(BrokenError, "computed from is wrong"),
        ):
            Overtaken(0).run()

    def test_preemption_beside_blocks_that_come_free(self):
        with mock.patch.object(KvGateConnector, "has_pending_block_frees", lambda self: False):
            self.finds("come free")


if __name__ == "__main__":
    # Histories tell KV apart by Python's own hashes.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    print(f"vLLM {histories.vllm_version}")
    unittest.main(verbosity=2)
