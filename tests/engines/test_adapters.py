"""LoRA adapters by what they are, without an engine.

python tests/engines/test_adapters.py     in an environment with vLLM and the wheel
"""

import concurrent.futures
import os
import tempfile
import threading
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from kvgate import weights
from kvgate.vllm.adapters import THREADS, Adapters
from kvgate.vllm.scheduler import SchedulerSide
from vllm.lora.request import LoRARequest


class AdaptersCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        os.environ["XDG_CACHE_HOME"] = folder.name + "/cache"
        self.now = 0.0
        self.adapters = Adapters(1000, lambda: self.now)
        self.addCleanup(self.adapters.pool.shutdown)
        self.write("one", 1)

    def write(self, name, content):
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "adapter_model.safetensors").write_bytes(bytes([content]) * 100)

    def request(self, request="r", folder="one", name="a", number=1, load_inplace=False):
        lora = LoRARequest(name, number, str(self.folder / folder), load_inplace=load_inplace)
        return SimpleNamespace(request_id=request, lora_request=lora)

    def digest(self, request="r", **more):
        """Asked until it is answered."""
        request = self.request(request, **more)
        while (digest := self.adapters.of(request)) is None:
            concurrent.futures.wait([self.adapters.asked[request.request_id].digest])
        return digest.decode()

    def hang(self):
        """From now on nothing can be read, until this is set."""
        answers, stamp = threading.Event(), weights.stamp
        hung = mock.patch.object(weights, "stamp", lambda *folder, **how: (answers.wait(), stamp(*folder, **how))[1])
        hung.start()
        self.addCleanup(hung.stop)
        # Before the pool is waited for.
        self.addCleanup(answers.set)
        return answers


class BackgroundTest(AdaptersCase):
    def test_each_request_looks_at_the_files_anew(self):
        first = self.digest("r1")
        self.assertEqual(first, weights.digest(self.folder / "one", is_deep=False))
        self.write("two", 2)
        self.assertNotEqual(self.digest("r2", folder="two", name="b", number=2), first)
        self.assertEqual(self.digest("r3"), first)
        self.assertEqual(self.adapters.asked, {})

    def test_no_file_is_touched_where_it_is_asked(self):
        asking, touched = threading.get_ident(), []
        stamp = weights.stamp
        with mock.patch.object(
            weights, "stamp", lambda *folder, **how: (touched.append(threading.get_ident()), stamp(*folder, **how))[1]
        ):
            self.digest("r1")
            self.digest("r2")
        self.assertEqual((len(touched), asking in touched), (2, False))

    def test_an_adapter_that_is_not_read_in_time_is_unknown(self):
        answers = self.hang()
        self.assertIsNone(self.adapters.of(self.request("r1")))
        self.now = 0.999
        self.assertIsNone(self.adapters.of(self.request("r1")))
        self.now = 1.0
        with self.assertRaisesRegex(TimeoutError, "one was not read within adapter_deadline_ms 1000"):
            self.adapters.of(self.request("r1"))
        # Nor does the next one wait for it.
        with self.assertRaises(TimeoutError):
            self.adapters.of(self.request("r2"))
        answers.set()
        concurrent.futures.wait([job.digest for job in self.adapters.jobs.values()])
        self.assertEqual(self.digest("r3"), weights.digest(self.folder / "one", is_deep=False))

    def test_a_folder_that_hangs_holds_up_no_other(self):
        answers = self.hang()
        for number in range(100):
            self.adapters.of(self.request(f"r{number}"))
        self.assertEqual(len(self.adapters.jobs), 1)
        mock.patch.stopall()
        self.write("two", 2)
        self.assertGreater(THREADS, 1)
        self.assertTrue(self.digest("other", folder="two", name="b", number=2))
        self.assertFalse(answers.is_set())

    def test_an_error_while_reading_means_that_nothing_is_reused(self):
        for error in (RuntimeError("Could not determine home directory."), UnicodeDecodeError("utf-8", b"", 0, 1, "x")):
            side = object.__new__(SchedulerSide)
            side.adapters, side.epoch = mock.Mock(), b""
            side.adapters.of.side_effect = error
            self.assertIs(side.adapter(self.request()), False)

    def test_a_request_that_ends_leaves_nothing(self):
        self.hang()
        self.adapters.of(self.request())
        self.adapters.forget("r")
        self.assertEqual(self.adapters.asked, {})


class ServedTest(AdaptersCase):
    """vLLM keeps what it has loaded by number, and what it has computed by name and folder."""

    def is_unknown(self, **request):
        try:
            self.digest(**request)
        except OSError as error:
            self.assertIn("load these under a new name, from a folder of their own", str(error))
            return True
        return False

    def test_files_that_were_rewritten_while_they_are_served_are_unknown(self):
        first = self.digest()
        self.write("one", 2)
        self.assertTrue(self.is_unknown())
        # In between vLLM may have loaded them, or not.
        self.write("one", 1)
        self.assertTrue(self.is_unknown())
        # The remedy that the message names.
        self.write("two", 2)
        self.assertNotEqual(self.digest(folder="two", name="b", number=2), first)

    def test_files_that_were_written_as_they_are_stay_known(self):
        first = self.digest()
        self.write("one", 1)
        self.assertEqual(self.digest(), first)

    def test_other_weights_by_a_number_in_use_need_load_inplace(self):
        first = self.digest()
        self.write("two", 2)
        self.assertTrue(self.is_unknown(folder="two"))
        second = self.digest(folder="two", name="b", load_inplace=True)
        self.assertNotEqual(second, first)
        self.assertEqual(self.digest(folder="two", name="b"), second)
        # By this name vLLM has computed with the first ones.
        self.assertTrue(self.is_unknown(folder="two", load_inplace=True))

    def test_an_adapter_loaded_in_place_is_unknown_while_vllm_has_a_cache_of_the_old_one(self):
        self.digest()
        self.write("one", 2)
        self.assertTrue(self.is_unknown(load_inplace=True))
        self.adapters.reset()
        self.assertEqual(self.digest(load_inplace=True), weights.digest(self.folder / "one", is_deep=False))


if __name__ == "__main__":
    unittest.main(verbosity=2)
