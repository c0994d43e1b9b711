"""After any error in a call of vLLM's the engine goes on, nothing waits for ever and nothing wrong is used.

python tests/engines/test_guard.py     in an environment with vLLM and the wheel
"""

import unittest
from types import SimpleNamespace
from unittest import mock

from kvgate._native import PanicException
from kvgate.vllm import KvGateConnector
from kvgate.vllm.blocks import Blocks
from kvgate.vllm.guard import Owed
from kvgate.vllm.metadata import Load, LoadPart, StepMetadata, Store, StorePart, WorkerReport
from kvgate.vllm.worker import WorkerSide
from made_up import Pool, kind, model

ALONE = SimpleNamespace(rank=0, tensor_parallel_size=1, pipeline_parallel_size=1)


def connector(**parts):
    """Without an engine: only the parts that a test needs."""
    made = object.__new__(KvGateConnector)
    fields = {
        "scheduler": None,
        "worker": None,
        "is_off": False,
        "owed": Owed(),
        "_connector_metadata": None,
        "pool": None,
    }
    vars(made).update({**fields, "settings": SimpleNamespace(layerwise=False), **parts})
    return made


def blocks(*table):
    return SimpleNamespace(get_block_ids=lambda: (list(table),))


def request(name="r"):
    return SimpleNamespace(request_id=name)


def load(job, tokens, *table):
    """Of one kind, in one group."""
    return Load(job, job.partition("#")[0], [LoadPart(0, b"", 0, {0: (tokens, list(table))})])


class StagesTest(unittest.TestCase):
    """Of several stages the scheduler's side begins with the workers'."""

    def test_before_that_nothing_is_copied(self):
        self.assertFalse(connector().has_pending_push_work())


class SchedulerTest(unittest.TestCase):
    def setUp(self):
        self.side = mock.Mock(model=model(kind(blocks={0: 16})), main=0)
        self.side.matched_tokens.return_value = (32, True)
        self.side.step.side_effect = lambda output: StepMetadata()
        self.connector = connector(scheduler=self.side)

    def promise(self):
        self.assertEqual(self.connector.get_num_new_matched_tokens(request(), 16), (32, True))
        self.connector.update_state_after_alloc(request(), blocks(7, 8, 9), 32)

    def test_each_call_answers_what_ends_reuse(self):
        output = SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids=None)
        for name, call, instead in (
            ("new_request", lambda one: one.on_new_request(request()), None),
            ("matched_tokens", lambda one: one.get_num_new_matched_tokens(request(), 0), (0, False)),
            ("allocated", lambda one: one.update_state_after_alloc(request(), blocks(1), 16), None),
            ("step", lambda one: one.build_connector_meta(None), StepMetadata(is_all_taken_back=True)),
            ("ended", lambda one: one.update_connector_output(output), None),
            ("finished", lambda one: one.request_finished(request(), [1]), (False, None)),
            ("finished", lambda one: one.request_finished_all_groups(request(), ([1], [2])), (False, None)),
            ("has_pending_block_frees", lambda one: one.has_pending_block_frees(), False),
            ("reset", lambda one: one.reset_cache(), True),
        ):
            side = mock.Mock(main=0, **{f"{name}.side_effect": MemoryError("no room")})
            one = connector(scheduler=side)
            with self.assertLogs("kvgate.vllm.connector", "ERROR") as told:
                self.assertEqual(call(one), instead, name)
                self.assertEqual(call(one), instead if name != "allocated" else None, name)
            self.assertEqual(len(told.records), 1)
            self.assertIn("MemoryError: no room", told.output[0])
            # Nothing is asked any more.
            self.assertEqual(getattr(side, name).call_count, 1)
            self.assertEqual(one.get_num_new_matched_tokens(request("other"), 0), (0, False))

    def test_a_load_that_vllm_counts_on_is_told_as_lost(self):
        # A panic of the extension is no `Exception`.
        for broken, error in (("allocated", KeyError), ("step", KeyError), ("step", PanicException)):
            self.setUp()
            getattr(self.side, broken).side_effect = error("anything")
            with self.assertLogs("kvgate.vllm.connector", "ERROR"):
                self.promise()
                meta = self.connector.build_connector_meta(None)
            # Those behind the one that vLLM had itself.
            self.assertEqual(meta, StepMetadata(lost={"r": [8, 9]}, is_all_taken_back=True))
            self.assertEqual(self.connector.build_connector_meta(None), StepMetadata(is_all_taken_back=True))

    def test_no_block_is_held_but_by_what_the_workers_know_of(self):
        pool = Pool()
        pool.take(1, 2, 3)
        self.side.blocks = blocks = Blocks(1)
        self.side.bind_pool = blocks.bind
        self.connector.bind_gpu_block_pool(pool)
        blocks.copy("told", [1], [])
        self.connector.build_connector_meta(None)
        blocks.copy("new", [2], [])
        blocks.keep("r", (0, 0), 0, [3], 1)
        self.side.step.side_effect = KeyError("anything")
        with self.assertLogs("kvgate.vllm.connector", "ERROR"):
            self.connector.build_connector_meta(None)
        self.assertEqual(pool.held(), {1: 2, 2: 1, 3: 1})
        self.assertTrue(self.connector.has_pending_push_work(), "vLLM steps on until they are told")
        report = WorkerReport(freed={"told": 1})
        output = SimpleNamespace(kv_connector_worker_meta=report, invalid_block_ids=None)
        self.connector.update_connector_output(output)
        self.assertEqual(pool.held(), {1: 1, 2: 1, 3: 1})
        self.assertFalse(self.connector.has_pending_push_work())

    def test_a_worker_that_is_off_ends_it_for_all(self):
        report = WorkerReport().aggregate(WorkerReport(is_off=True))
        output = SimpleNamespace(kv_connector_worker_meta=report, invalid_block_ids=None)
        with self.assertLogs("kvgate.vllm.connector", "ERROR"):
            self.connector.update_connector_output(output)
        self.assertEqual(self.connector.get_num_new_matched_tokens(request(), 0), (0, False))


class WorkerTest(unittest.TestCase):
    model = model(kind(blocks={0: 16}, chunk_tokens=16), chunk_tokens=16)

    def setUp(self):
        self.side = WorkerSide(self.model, SimpleNamespace(), ALONE, "engine")
        self.side.tables = [[(group, 1) for group in one.blocks] for one in self.model.kinds]
        self.native = self.side.worker = mock.Mock()
        for name in ("loaded", "freed", "stored"):
            getattr(self.native, name).return_value = []
        self.connector = connector(worker=self.side)
        self.load = load("r#1", (16, 48), 7, 8, 9)
        self.store = Store("s#s1", "s", [StorePart(0, [0], b"", b"", {0: [3]})])

    def step(self, **meta):
        """One, as vLLM calls it; what it is told after."""
        one = self.connector
        one._connector_metadata = meta = StepMetadata(**meta)
        one.handle_preemptions(meta)
        one.start_load_kv(None)
        one.wait_for_layer_load("a")
        one.wait_for_save()
        sent, received = one.get_finished(set())
        return sent, received, one.get_block_ids_with_load_errors(), one.build_connector_worker_meta()

    def test_jobs_under_way_end_after_any_error(self):
        for broken in ("loaded", "freed", "stored", "take_back", "load_stream", "save_stream"):
            self.setUp()
            self.step(loads=[self.load], stores=[self.store])
            again = load("n#1", (0, 16), 5)
            if broken.endswith("stream"):
                thrower = mock.patch(
                    "kvgate.vllm.connector.current_stream",
                    side_effect=[RuntimeError("CUDA")] if broken == "load_stream" else [None, RuntimeError("CUDA")],
                )
            else:
                thrower = mock.patch.object(self.native, broken, side_effect=RuntimeError("broken"))
            with thrower, self.assertLogs("kvgate.vllm.connector", "ERROR") as told:
                sent, received, failed, report = self.step(
                    loads=[again], stores=[self.store], is_all_taken_back=broken == "take_back"
                )
            self.assertEqual((sent, received, failed), (set(), {"r", "n"}, {8, 9, 5}), broken)
            self.assertEqual((set(report.loaded), set(report.stored), report.is_off), ({"r#1", "n#1"}, {"s#s1"}, True))
            # All copies had ended before anybody was told.
            self.native.close.assert_called_once_with()
            self.assertEqual(len(told.records), 1)
            # A load that was told before the scheduler knew.
            sent, received, failed, report = self.step(loads=[load("l#1", (0, 16), 4)])
            self.assertEqual((sent, received, failed, report.is_off), (set(), {"l"}, {4}, True))

    def test_a_lost_load_is_computed(self):
        _, received, failed, _ = self.step(lost={"r": [8, 9]})
        self.assertEqual((received, failed), ({"r"}, {8, 9}))

    def test_all_is_taken_back(self):
        self.step(stores=[self.store])
        self.step(is_all_taken_back=True)
        self.native.take_back.assert_called_once_with(["s#s1"])


class SeveralGroupsTest(unittest.TestCase):
    """A model with windows: vLLM is told of requests, since it ends when it is told of blocks of several groups."""

    def setUp(self):
        of_groups = model(
            kind(blocks={0: 16}, chunk_tokens=16), kind("window", 20, {1: 16}, chunk_tokens=16), chunk_tokens=16
        )
        self.side = WorkerSide(of_groups, SimpleNamespace(), ALONE, "engine")
        self.side.tables = [[(0, 1)], [(1, 1)]]
        self.native = self.side.worker = mock.Mock()
        for name in ("loaded", "freed", "stored"):
            getattr(self.native, name).return_value = []
        self.connector = connector(worker=self.side)
        parts = [LoadPart(0, b"", 0, {0: ((0, 32), [7, 8])}), LoadPart(1, b"", 0, {1: ((0, 32), [9, 10])})]
        self.load = Load("r#1", "r", parts)

    def step(self, **meta):
        self.connector._connector_metadata = StepMetadata(**meta)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(set())
        self.assertEqual(self.connector.get_block_ids_with_load_errors(), set())
        return results.finished_recving, results.failed_recving

    def test_a_load_that_lacks_a_chunk_of_any_kind_is_computed(self):
        self.assertEqual(self.step(loads=[self.load]), (set(), set()))
        self.assertEqual(
            self.native.load.call_args.args[1], [(0, b"", [((0, 32), [7, 8])]), (1, b"", [((0, 32), [9, 10])])]
        )
        ended = SimpleNamespace(job="r#1", missing=[(1, 1)], missing_drafts=0, bytes=0, seconds=0.1, error="gone")
        self.native.loaded.return_value = [ended]
        self.assertEqual(self.step(), ({"r"}, {"r"}))
        self.assertEqual(self.connector.build_connector_worker_meta().loaded, {"r#1": (1, 0.1, False, True)})

    def test_drafts_that_did_not_come_are_no_failure(self):
        self.step(loads=[self.load])
        ended = SimpleNamespace(job="r#1", missing=[], missing_drafts=2, bytes=0, seconds=0.1, error=None)
        self.native.loaded.return_value = [ended]
        self.assertEqual(self.step(), ({"r"}, set()))
        self.assertEqual(self.connector.build_connector_worker_meta().loaded, {"r#1": (1, 0.1, True, False)})

    def test_a_lost_load_is_computed(self):
        self.assertEqual(self.step(lost={"r": [8, 9]}), ({"r"}, {"r"}))

    def test_one_that_can_t_be_begun_is_computed(self):
        self.native.load.side_effect = RuntimeError("no session")
        self.assertEqual(self.step(loads=[self.load]), ({"r"}, {"r"}))

    def test_one_that_is_under_way_when_kvgate_is_turned_off_is_computed(self):
        self.step(loads=[self.load])
        self.native.freed.side_effect = KeyError("anything")
        with self.assertLogs("kvgate.vllm.connector", "ERROR"):
            self.assertEqual(self.step(), ({"r"}, {"r"}))


if __name__ == "__main__":
    unittest.main(verbosity=2)
