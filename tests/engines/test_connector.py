"""The connector's parts, without an engine and without a gateway.

python tests/engines/test_connector.py     in an environment with vLLM and the wheel
"""

import ast
import concurrent.futures
import inspect
import json
import logging
import os
import re
import socket
import tempfile
import threading
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from kvgate import __version__, weights
from kvgate.settings import tenant_secret
from kvgate.vllm import KvGateConnector, connector, gateway
from kvgate.vllm.metadata import WorkerReport
from kvgate.vllm.model import describe
from kvgate.vllm.rates import STEP_TOKENS, TRY_AGAIN, LoadOrCompute, LoadTimes
from kvgate.vllm.scheduler import SchedulerSide
from kvgate.vllm.settings import Settings
from kvgate.vllm.stats import KvGateStats
from kvgate.vllm.versions import LACKING, REQUIRED, check
from kvgate.vllm.worker import axes_of, kernel_blocks, own_heads
from made_up import Pool, kind, model, request
from vllm.distributed.kv_transfer.kv_connector.v1 import base

API = Path(__file__).with_name("connector_api.json")
"""For each version of vLLM its base classes' methods: name, parameters, and whether it is abstract. See record_api.py."""
BASES = ("SupportsHMA", "KVConnectorBase_V1")


def methods_of(source):
    """Of the classes that the connector is made of."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name in BASES]
    return {
        node.name: {
            "parameters": [argument.arg for argument in node.args.args],
            "abstract": any("abstractmethod" in ast.unparse(mark) for mark in node.decorator_list),
        }
        for connector in classes
        for node in connector.body
        if isinstance(node, ast.FunctionDef)
    }


class VersionTest(unittest.TestCase):
    def test_the_recorded_api_is_the_installed_one(self):
        import vllm

        self.assertEqual(json.loads(API.read_text())[vllm.__version__], methods_of(inspect.getsource(base)))

    def test_every_version_can_call_the_connector(self):
        for version, methods in json.loads(API.read_text()).items():
            for name, method in methods.items():
                own = getattr(KvGateConnector, name, None)
                if own is None:
                    # A hook that is newer than the installed vLLM, and has a default.
                    self.assertFalse(method["abstract"], f"{version}: {name}")
                elif name in vars(KvGateConnector) and not isinstance(own, property):
                    takes = inspect.signature(vars(KvGateConnector)[name].__func__ if is_class_method(name) else own)
                    self.assertLessEqual(set(method["parameters"]), set(takes.parameters), f"{version}: {name}")

    def test_hooks_are_hooks_of_some_version(self):
        known = {name for methods in json.loads(API.read_text()).values() for name in methods}
        own = {
            name
            for name, value in vars(KvGateConnector).items()
            if (callable(value) or isinstance(value, classmethod)) and not re.match("_[a-z]", name)
        }
        self.assertEqual(own - known, set())

    def test_hooks_that_another_version_lacks_are_told(self):
        whole = SimpleNamespace(**dict.fromkeys([*REQUIRED, *LACKING]))
        self.assertEqual(check(whole, "9"), [])
        del whole.reset_cache
        self.assertEqual(check(whole, "9"), ["vLLM 9 has no reset_cache: a reset does not reach kvgate"])
        del whole.get_finished
        with self.assertRaisesRegex(ImportError, "vLLM 0.32 or newer: 9 has no get_finished"):
            check(whole, "9")


def is_class_method(name):
    return isinstance(vars(KvGateConnector)[name], classmethod)


class RatesTest(unittest.TestCase):
    def setUp(self):
        self.now = 0.0
        self.rates = LoadOrCompute(lambda: self.now)

    def step(self, tokens, seconds):
        self.rates.stepped(tokens)
        self.now += seconds
        self.rates.computed()

    def load(self, tokens, seconds):
        self.rates.load_begins("j")
        self.now += seconds
        self.rates.loaded("j", tokens, seconds)

    def test_without_measurements_it_loads(self):
        self.assertTrue(self.rates.should_load(10_000))
        self.load(1000, 5)
        self.assertTrue(self.rates.should_load(10_000))

    def test_the_quicker_of_load_and_compute_is_chosen(self):
        for _ in range(3):
            self.step(1000, 1)
        self.load(1000, 0.5)
        self.assertTrue(self.rates.should_load(10_000))
        for _ in range(50):
            self.load(1000, 2)
        self.assertFalse(self.rates.should_load(10_000))

    def test_steps_that_say_nothing_of_prefills_are_left_out(self):
        self.step(STEP_TOKENS - 1, 100)
        self.step(1000, 1)
        self.now += 1000
        self.step(1000, 1)
        self.step(0, 1)
        self.assertEqual(self.rates.prefill.seconds_of(1000), 1)

    def test_a_step_that_is_given_out_early_begins_when_the_one_before_has_ended(self):
        """As with asynchronous scheduling: a long prefill between short decodes."""
        for _ in range(3):
            self.rates.stepped(8)
            self.rates.stepped(1000)
            self.now += 0.01
            self.rates.computed()
            self.rates.stepped(8)
            self.now += 1
            self.rates.computed()
            self.now += 0.01
            self.rates.computed()
        self.assertAlmostEqual(self.rates.prefill.seconds_of(1000), 1)

    def test_loads_share_the_time_in_which_there_was_any(self):
        times = LoadTimes()
        times.begin("a", 0)
        times.begin("b", 2)
        one = times.end("a", 3, 3)
        times.begin("c", 5)
        other = times.end("b", 4, 6)
        # Nothing is under way until 10.
        last = times.end("c", 3, 8)
        times.begin("d", 10)
        self.assertEqual((one, other, last, times.end("d", 1, 11)), (2.5, 0.5 + 2 + 0.5, 2.5, 1))

    def test_a_load_is_over_before_the_step_in_which_it_ends(self):
        times = LoadTimes()
        times.begin("a", 0)
        self.assertEqual(times.end("a", 0.05, 0.5), 0.05)

    def test_it_tries_again_now_and_then(self):
        self.step(1000, 0.001)
        self.step(1000, 0.001)
        self.load(1000, 1)
        loads = [self.rates.should_load(1000) for _ in range(2 * TRY_AGAIN)]
        self.assertEqual(sum(loads), 2)


class WeightsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name) / "model"
        self.folder.mkdir()
        os.environ["XDG_CACHE_HOME"] = folder.name + "/cache"
        (self.folder / "config.json").write_text("{}")
        self.weights = self.folder / "model.safetensors"
        self.weights.write_bytes(bytes(100_000))

    def test_any_byte_makes_another_model(self):
        digest = weights.digest(self.folder)
        self.assertEqual(weights.digest(self.folder), digest)
        for at in (0, 50_000, 99_999):
            content = bytearray(100_000)
            content[at] = 1
            self.weights.write_bytes(content)
            self.assertNotEqual(weights.digest(self.folder), digest, at)
        self.weights.write_bytes(bytes(100_000))
        self.assertEqual(weights.digest(self.folder), digest)
        (self.folder / "config.json").write_text('{"rope_theta": 1}')
        self.assertNotEqual(weights.digest(self.folder), digest)

    def test_a_tokenizer_makes_none(self):
        digest = weights.digest(self.folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"):
            (self.folder / name).write_text("{}")
        self.assertEqual(weights.digest(self.folder), digest)

    def test_code_and_every_config_of_the_model_make_another(self):
        seen = {weights.digest(self.folder)}
        (self.folder / "parts").mkdir()
        for name in (
            "modeling.py",
            "parts/attention.py",
            "params.json",
            "hf_quant_config.json",
            "preprocessor_config.json",
        ):
            for content in ("1", "2"):
                (self.folder / name).write_text(content)
                seen.add(weights.digest(self.folder))
        self.assertEqual(len(seen), 11)
        # The same file in another place is another model.
        (self.folder / "parts/attention.py").rename(self.folder / "attention.py")
        self.assertNotIn(weights.digest(self.folder), seen)

    def test_a_file_s_digest_is_remembered(self):
        weights.digest(self.folder)
        read, weights.read_digest = weights.read_digest, None
        try:
            weights.digest(self.folder)
        finally:
            weights.read_digest = read

    def test_without_a_place_to_remember_it_is_read_again(self):
        digest = weights.digest(self.folder)
        os.environ["XDG_CACHE_HOME"] = str(self.weights)
        self.assertEqual(weights.digest(self.folder), digest)

    def test_without_a_home_it_is_read(self):
        digest = weights.digest(self.folder)
        del os.environ["XDG_CACHE_HOME"]
        with mock.patch.object(Path, "home", side_effect=RuntimeError("Could not determine home directory.")):
            self.assertEqual(weights.digest(self.folder), digest)

    def test_a_file_whose_remembered_digest_is_broken_is_read_again(self):
        digest = weights.digest(self.folder)
        remembered = [
            path
            for path in (self.folder.parent / "cache" / "kvgate").iterdir()
            if re.fullmatch("[0-9a-f]{64}", path.name)
        ]
        self.assertEqual(len(remembered), 2)
        for wrong in (b"", b"x" * 64, b"\xff" * 64, digest[:10].encode()):
            for path in remembered:
                path.write_bytes(wrong)
            self.assertEqual(weights.digest(self.folder), digest, wrong)

    def test_a_full_disk_remembers_nothing(self):
        with mock.patch.object(Path, "replace", side_effect=OSError("No space left on device")):
            digest = weights.digest(self.folder)
        self.assertEqual({path.suffix for path in (self.folder.parent / "cache" / "kvgate").iterdir()}, {".lock"})
        self.assertEqual(weights.digest(self.folder), digest)

    def test_hundreds_of_gigabytes_are_told(self):
        now = 0.0
        progress = weights.Progress("/model", 400 << 30, lambda: now)
        with self.assertLogs("kvgate.weights", "INFO") as told:
            for _ in range(4):
                progress.read(100 << 30)
                now += 20
        self.assertEqual(
            [record.getMessage() for record in told.records],
            [
                "kvgate: reading 429.5 GB in /model once for their digest, which names the cache's space",
                "kvgate: 75 % of /model are digested",
            ],
        )

    def test_a_folder_without_weights_is_told(self):
        self.weights.unlink()
        with self.assertRaisesRegex(FileNotFoundError, "has no weights"):
            weights.digest(self.folder)


class SettingsTest(unittest.TestCase):
    def test_all_that_is_wrong_is_told(self):
        for wrong, told in (
            ({"no_such": 1}, "unknown key 'no_such'"),
            ({"chunk_tokens": "256"}, "chunk_tokens must be int, not '256'"),
            ({"chunk_tokens": True}, "chunk_tokens must be int, not True"),
            ({"chunk_tokens": 0}, "chunk_tokens must be more than 0"),
            ({"layerwise": 1}, "layerwise must be bool, not 1"),
            ({"pin_ms": 5000}, "pin_ms must be more than lookup_again_ms, which is 5000"),
            ({"load_policy": "never"}, "load_policy must be auto or always, not 'never'"),
            ({"copies": "hip"}, "copies must be auto or torch, not 'hip'"),
        ):
            with self.assertRaisesRegex(ValueError, told):
                Settings.read(wrong)

    def test_a_secret_comes_from_a_file_that_others_can_not_read(self):
        key = "ab" * 32
        file = Path(self.enterContext(tempfile.TemporaryDirectory())) / "secret"
        file.write_text(f"{key}\n")
        file.chmod(0o400)
        self.assertEqual(tenant_secret(str(file)), bytes.fromhex(key))
        self.assertIsNone(tenant_secret(""))
        for mode, text, told in (
            (0o404, key, "has the mode 0404, so others may read it: chmod 0400 it"),
            (0o420, key, "has the mode 0420"),
            (0o400, key[1:], "has no key: a key is 64 hex digits"),
            (0o400, "x" * 64, "has no key"),
        ):
            file.chmod(0o600)
            file.write_text(text)
            file.chmod(mode)
            with self.assertRaisesRegex(ValueError, told) as raised:
                Settings.read({"tenant_secret_file": str(file)})
            self.assertNotIn(text, str(raised.exception))
        another_s = SimpleNamespace(st_mode=0o100400, st_uid=os.geteuid() + 4711)
        with mock.patch("os.fstat", return_value=another_s), self.assertRaisesRegex(ValueError, "chown it"):
            tenant_secret(str(file))
        with self.assertRaisesRegex(ValueError, "No such file"):
            Settings.read({"tenant_secret_file": "/nowhere/at/all"})

    def test_an_old_name_is_taken_for_one_release_with_a_warning(self):
        with mock.patch.dict("kvgate.settings.RENAMED", {"pin_time_ms": "pin_ms", "nothing_of_this": "no_field"}):
            with self.assertLogs("kvgate.settings", "WARNING") as told:
                settings = Settings.read({"pin_time_ms": 60_000})
            self.assertEqual(settings.pin_ms, 60_000)
            self.assertEqual(len(told.records), 1)
            self.assertIn("the key pin_time_ms is called pin_ms now: write that", told.output[0])
            with self.assertRaisesRegex(ValueError, "'pin_time_ms' is the old name of 'pin_ms', which is given too"):
                Settings.read({"pin_time_ms": 60_000, "pin_ms": 60_000})
            with self.assertRaisesRegex(ValueError, "unknown key 'nothing_of_this'"):
                Settings.read({"nothing_of_this": 1})
        with self.assertNoLogs("kvgate.settings"):
            Settings.read({"pin_ms": 60_000})

    def test_the_socket_is_the_gateway_s(self):
        os.environ["KVGATE__API__SOCKET"] = "/tmp/other.sock"
        self.addCleanup(os.environ.pop, "KVGATE__API__SOCKET")
        self.assertEqual(Settings.read({}).socket, "/tmp/other.sock")
        self.assertEqual(Settings.read({"socket": "/tmp/one.sock"}).socket, "/tmp/one.sock")


class GatewayTest(unittest.TestCase):
    def test_a_gateway_that_is_not_there_is_told(self):
        settings = Settings.read({"socket": "/nowhere/sock"})
        with self.assertLogs("kvgate.vllm.gateway", "WARNING") as told:
            gateway.ensure(settings)
        self.assertIn("nobody answers at /nowhere/sock", told.output[0])
        with self.assertNoLogs("kvgate.vllm.gateway"):
            gateway.ensure(settings, is_told=False)


class OtherVersionTest(unittest.TestCase):
    def told(self, head):
        """What an engine's start says of a daemon that answers with that head."""
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/sock")
            listener.listen()

            def answer():
                for _ in range(2):
                    stream = listener.accept()[0]
                    # The first asks only whether somebody listens.
                    if stream.recv(1 << 16):
                        stream.sendall(f"HTTP/1.1 200 OK\r\n{head}content-length: 0\r\n\r\n".encode())
                    stream.close()

            daemon = threading.Thread(target=answer)
            daemon.start()
            with self.assertLogs("kvgate.daemon", "WARNING") as told:
                gateway.ensure(Settings.read({"socket": f"{folder}/sock"}))
                logging.getLogger("kvgate.daemon").warning("the end")
            daemon.join()
        return [record.getMessage() for record in told.records[:-1]]

    def test_a_daemon_of_another_version_is_told_once_at_the_start(self):
        (line,) = self.told("server: kvgate/99.0.0\r\n")
        self.assertIn(f"is kvgate '99.0.0', this engine has kvgate {__version__}", line)
        self.assertIn("install the same version on both", line)
        self.assertEqual(self.told(f"server: kvgate/{__version__}\r\n"), [])
        self.assertEqual(self.told("server: nginx\r\n"), [])
        self.assertEqual(self.told(""), [], "one from before the header")


class PolicyTest(unittest.TestCase):
    def refuses(self, outer, own, **settings):
        config, whole = (
            SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy))
            for policy in (own, outer)
        )
        with mock.patch.object(connector, "get_current_vllm_config_or_none", lambda: whole if outer else None):
            try:
                connector.refuse_failing_requests(config, Settings.read(settings))
            except ValueError as error:
                self.assertIn('set "kv_load_failure_policy": "recompute"', str(error))
                return True
        return False

    def test_requests_that_fail_must_be_asked_for(self):
        # Within MultiConnector the own one is vLLM's default.
        for outer, own, refuses in (
            (None, "fail", True),
            (None, "recompute", False),
            ("recompute", "fail", False),
            ("fail", "recompute", True),
        ):
            self.assertEqual(self.refuses(outer, own), refuses, (outer, own))
            self.assertFalse(self.refuses(outer, own, allow_failed_requests=True))


class StatsTest(unittest.TestCase):
    def test_ranks_are_added_up(self):
        one, other = KvGateStats(), KvGateStats()
        one.loaded(SimpleNamespace(seconds=0.5, missing=[], bytes=10))
        other.loaded(SimpleNamespace(seconds=1.5, missing=[3], bytes=10))
        other.stored(SimpleNamespace(seconds=1, stored=2, bytes=20, refused=1, error=None))
        both = one.take().aggregate(other.take())
        self.assertEqual(one.take(), None)
        self.assertEqual(both.data["load_seconds"], [0.5, 1.5])
        self.assertEqual(
            both.reduce(),
            {
                "loads": 2,
                "loaded_bytes": 10,
                "failed_loads": 1,
                "stores": 1,
                "stored_chunks": 2,
                "stored_bytes": 20,
                "refused_chunks": 1,
                "median_load_seconds": 1.5,
                "median_store_seconds": 1,
            },
        )


class SchedulerTest(unittest.TestCase):
    """Without a gateway: nothing is there."""

    def setUp(self):
        self.model = model()
        self.scheduler = SchedulerSide(self.model, Settings.read({"socket": "/nowhere/sock"}))

    def hashes(self, **more):
        self.scheduler.new_request(request(**more))
        prompt = self.scheduler.requests["r"].prompt
        self.scheduler.finished(request())
        return prompt.hashes(0, len(prompt))

    def test_adapter_salt_and_items_go_into_the_hashes(self):
        def image(name, offset):
            return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset))

        different = [
            {},
            {"cache_salt": "one"},
            {"cache_salt": "other"},
            {"mm_features": [image("a", 3)]},
            {"mm_features": [image("b", 3)]},
            {"mm_features": [image("a", 4)]},
        ]
        hashes = [self.hashes(**more) for more in different]
        self.assertEqual(len(set(hashes)), len(hashes))
        self.assertEqual(self.hashes(), hashes[0])
        # An image in the last, unfinished chunk changes nothing before it.
        self.assertEqual(self.hashes(mm_features=[image("a", 17)]), hashes[0])
        self.scheduler.reset()
        self.assertNotEqual(self.hashes(), hashes[0])

    def test_weights_that_never_change_keep_their_hashes_through_a_reset(self):
        before = self.hashes()
        self.scheduler = SchedulerSide(self.model, Settings.read({"socket": "/nowhere/sock", "fixed_weights": True}))
        self.assertTrue(self.scheduler.reset())
        self.assertEqual(self.hashes(), before)

    def test_after_a_reset_events_are_of_what_is_stored_since(self):
        events = mock.Mock()
        settings = Settings.read({"socket": "/nowhere/sock"})
        self.scheduler = SchedulerSide(self.model, settings, events=lambda *_: events)
        self.scheduler.new_request(request())
        self.scheduler.reset()
        events.reset.assert_called_once_with(self.scheduler.epoch)
        state = self.scheduler.requests["r"]
        state.load_tokens = (0, 16)
        self.scheduler.bind_loaded(state)
        events.bind.assert_not_called()

    def test_prompts_by_embeddings_reuse_nothing(self):
        one = request(prompt_embeds=object())
        self.scheduler.new_request(one)
        self.assertEqual(self.scheduler.matched_tokens(one, 0), (0, False))
        self.scheduler.finished(one)
        self.assertEqual((self.scheduler.requests, self.scheduler.opaque), ({}, {}))

    def test_images_without_a_digest_reuse_nothing(self):
        self.scheduler.items_have_digests = False
        image = SimpleNamespace(identifier="renderer0-mm-1-image-0", mm_position=SimpleNamespace(offset=3))
        one = request(mm_features=[image])
        self.assertEqual(self.scheduler.matched_tokens(one, 0), (0, False))
        self.assertIsNone(self.scheduler.requests["r"])
        self.scheduler.finished(one)
        self.assertTrue(self.hashes())

    def test_an_adapter_that_nobody_knows_reuses_nothing(self):
        one = request(lora_request=SimpleNamespace(lora_path="/no/such/adapter", lora_name="a"))
        while (matched := self.scheduler.matched_tokens(one, 0)) == (None, False):
            concurrent.futures.wait([self.scheduler.adapters.asked["r"].digest])
        self.assertEqual(matched, (0, False))
        self.assertIsNone(self.scheduler.requests["r"])

    def test_requests_that_run_through_a_reset_store_nothing(self):
        self.scheduler.new_request(request())
        self.scheduler.reset()
        meta = SimpleNamespace(stores=[])
        self.scheduler.add_store(meta, self.scheduler.requests["r"], 20, None, ())
        self.assertEqual(meta.stores, [])


class RunningRequest(unittest.TestCase):
    """A request of 20 tokens in blocks of 4 and chunks of 8, of which the first chunk is there, on two ranks."""

    layerwise = False
    kinds = ()

    def setUp(self):
        settings = Settings.read({"socket": "/nowhere/sock", "layerwise": self.layerwise})
        self.scheduler = SchedulerSide(model(*self.kinds), settings, ranks=2)
        self.pool = Pool()
        self.scheduler.blocks.bind(self.pool)
        self.blocks = {}
        self.request, self.state = self.add("r", [10, 11, 12, 13, 14, 15], found=1)

    def add(self, name, blocks, found=0, tokens=20):
        one = request(name, range(tokens))
        self.scheduler.new_request(one)
        state = self.scheduler.requests[name]
        state.found, self.blocks[name] = [found], blocks
        self.pool.take(*blocks)
        return one, state

    def load(self):
        self.scheduler.allocated(self.request, SimpleNamespace(get_block_ids=lambda: [self.blocks["r"]]), 8)
        return self.step()

    def step(self, computed=None, has_sync_kv_loads=False, preempted=()):
        """`computed`: of each request, its tokens before and after the step."""
        computed = computed or {}
        before = {name: start for name, (start, _) in computed.items()}
        output = SimpleNamespace(
            total_num_scheduled_tokens=0,
            num_scheduled_tokens={name: end - start for name, (start, end) in computed.items()},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=list(before), num_computed_tokens=list(before.values())),
            preempted_req_ids=set(preempted),
            has_sync_kv_loads=has_sync_kv_loads,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: (self.blocks[name],), boundary_state_offloads={}
            ),
        )
        return self.scheduler.step(output)

    def new(self, *names, tokens=20, **more):
        """The step that computes these."""
        return self.step(dict.fromkeys(names, (0, tokens)), **more)

    def stored(self, *names, **more):
        """First tokens of what is stored after the step that computes these."""
        return self.first_tokens(self.new(*(names or "r"), **more))

    def first_tokens(self, meta):
        return {store.request: store.parts[0].chunks[0] * 8 for store in meta.stores}

    def tables(self, meta):
        """The blocks of what is stored."""
        return {store.request: store.parts[0].tables[0] for store in meta.stores}

    def free(self, *requests):
        """vLLM takes their blocks back."""
        for name in requests:
            self.pool.leave(*self.blocks[name])

    def report_store(self, meta, there):
        (store,) = meta.stores
        self.scheduler.ended((), WorkerReport(stored={store.job: (2, {(0, at) for at in there})}))

    def report_step(self, meta, failed_blocks=(), ranks=2):
        self.scheduler.ended(failed_blocks, WorkerReport(steps={meta.loads_within: ranks}))


class StoreTest(RunningRequest):
    def test_a_chunk_that_was_not_stored_is_stored_again_before_the_next_one(self):
        self.request, self.state = self.add("long", [10, 11, 12, 13, 14, 15, 16, 17, 18], tokens=36)
        self.report_store(self.new("long", tokens=20), {1})
        self.assertEqual(self.stored("long", tokens=21), {}, "not before another chunk is full")
        meta = self.new("long", tokens=24)
        self.assertEqual(self.first_tokens(meta), {"long": 0})
        self.report_store(meta, {0, 1, 2})
        self.assertEqual(self.stored("long", tokens=35), {"long": 24})

    def test_a_store_has_the_blocks_that_vllm_says(self):
        self.blocks["r"][2:] = [22, 23, 24]
        self.assertEqual(self.tables(self.new("r")), {"r": [22, 23]})

    def test_a_load_has_its_chunks_blocks_alone(self):
        self.state.local = 8
        ((part,),) = (load.parts for load in self.load().loads)
        self.assertEqual((part.first_chunk, part.tables), (1, {0: ((0, 8), [12, 13])}))

    def test_a_store_has_each_chunk_s_parent(self):
        self.request, self.state = self.add("long", list(range(20, 30)), tokens=36)
        ((part,),) = (store.parts for store in self.new("long", tokens=36).stores)
        prompt = self.state.prompt
        self.assertEqual(part.hashes, prompt.hashes(0, 4))
        self.assertEqual(part.parents, prompt.parent(0) + prompt.hashes(0, 3))

    def test_chunks_that_all_ranks_have_copied_keep_no_blocks(self):
        (store,) = self.new("r").stores
        self.scheduler.finished(self.request)
        self.free("r")
        self.assertEqual(self.pool.held(), {12: 1, 13: 1})
        for ranks in (1, 2):
            self.scheduler.blocks.freed({store.job: 1})
            self.assertEqual(self.pool.held(), {12: 1, 13: 1} if ranks < 2 else {})

    def test_a_request_that_stores_nothing_holds_nothing(self):
        self.scheduler.finished(self.request)
        self.free("r")
        self.assertEqual(self.pool.held(), {})

    def test_a_preempted_request_s_store_goes_on(self):
        (store,) = self.new("r").stores
        self.free("r")
        self.assertEqual(self.step(preempted={"r"}).taken_back, set())
        self.assertEqual(self.pool.held(), {12: 1, 13: 1})
        self.scheduler.blocks.freed({store.job: 2})
        self.assertEqual(self.pool.held(), {})

    def test_blocks_that_vllm_needs_are_taken_back_from_stores_that_alone_hold_them(self):
        (store,) = self.new("r").stores
        self.assertFalse(self.scheduler.has_pending_block_frees(), "it runs")
        self.scheduler.finished(self.request)
        self.free("r")
        self.assertTrue(self.scheduler.has_pending_block_frees())
        self.assertEqual(self.step().taken_back, {store.job})
        self.assertEqual(self.step().taken_back, set())
        self.scheduler.blocks.freed({store.job: 2})
        self.assertFalse(self.scheduler.has_pending_block_frees())

    def test_no_token_is_dropped_for_a_store(self):
        self.assertFalse(KvGateConnector.requires_kv_delivery.fget(None))


class FailedWindowTest(RunningRequest):
    """The store of a window's chunk failed."""

    kinds = (kind("window", 6),)

    def failed(self):
        self.report_store(self.new("r", tokens=20), set())

    def test_the_next_step_stores_it_once_more(self):
        self.failed()
        meta = self.new("r", tokens=20)
        self.assertEqual(self.tables(meta), {"r": [12, 13]})
        self.assertEqual(self.new("r", tokens=20).stores, [], "it is under way")
        self.report_store(meta, set())
        self.assertEqual(self.new("r", tokens=20).stores, [], "two failures are enough")

    def test_not_where_vllm_has_given_its_blocks_to_others(self):
        self.failed()
        self.blocks["r"][2] = 0
        self.assertEqual(self.new("r", tokens=20).stores, [])

    def test_not_before_it_is_computed_again(self):
        self.failed()
        self.assertEqual(self.new("r", tokens=12).stores, [])
        self.assertEqual(self.tables(self.new("r", tokens=16)), {"r": [12, 13]})


class SiblingTest(RunningRequest):
    """Another connector loads 8 tokens of one request within the step."""

    def setUp(self):
        super().setUp()
        self.add("other", [20, 21, 22, 23, 24, 25])
        self.scheduler.local["other"] = 4
        self.meta = self.step({"r": (0, 20), "other": (12, 20)}, has_sync_kv_loads=True)

    def test_the_others_store_what_they_compute(self):
        self.assertEqual(self.first_tokens(self.meta), {"r": 8})

    def test_it_is_stored_once_all_ranks_have_it(self):
        self.assertEqual(self.first_tokens(self.step({"other": (20, 21)})), {})
        self.report_step(self.meta, ranks=1)
        self.assertEqual(self.first_tokens(self.step({"other": (21, 22)})), {})
        self.report_step(self.meta, ranks=1)
        self.assertEqual(self.first_tokens(self.step({"other": (22, 23)})), {"other": 0})

    def test_a_chunk_whose_load_failed_is_stored_once_it_is_computed(self):
        self.report_step(self.meta, failed_blocks={22})
        self.assertEqual(self.first_tokens(self.step({"other": (8, 12)})), {"other": 0})
        self.assertEqual(self.first_tokens(self.step({"other": (12, 16)})), {"other": 8})

    def test_kv_computed_from_a_failed_load_is_never_stored(self):
        self.add("shares", [20, 21, 22, 33, 34, 35])
        self.assertEqual(self.first_tokens(self.step({"shares": (12, 20)})), {})
        self.report_step(self.meta, failed_blocks={22})
        self.step({"other": (8, 16)})
        # vLLM's own cache has these blocks.
        self.add("later", [20, 21, 22, 33, 44, 45])
        meta = self.step({"shares": (20, 21), "later": (16, 20)})
        self.assertEqual(self.tables(meta), {"shares": [20, 21], "later": [20, 21]})


class RateTest(RunningRequest):
    def setUp(self):
        super().setUp()
        self.now = 0.0
        self.scheduler.load_or_compute = self.rates = LoadOrCompute(lambda: self.now)

    def test_the_slowest_rank_s_time_counts_and_the_tokens_that_came(self):
        self.state.found = [2]
        self.scheduler.allocated(self.request, SimpleNamespace(get_block_ids=lambda: [self.blocks["r"]]), 16)
        self.now = 2.0
        report = WorkerReport({"r#0": (1, 0.5, True, True)}).aggregate(WorkerReport({"r#0": (1, 2.0, False, True)}))
        self.scheduler.ended({12}, report)
        self.assertEqual((self.rates.load.tokens, self.rates.load.seconds), (8, 2.0))

    def test_loads_that_bring_nothing_are_slow(self):
        self.rates.prefill.add(1000, 1)
        self.load()
        self.now = 30.0
        self.scheduler.ended({10}, WorkerReport({"r#0": (2, 30.0, False, True)}))
        self.assertFalse(self.rates.should_load(8))

    def test_a_load_whose_request_is_gone_says_nothing_and_is_no_longer_under_way(self):
        self.add("other", [20, 21, 22, 23, 24])
        self.load()
        self.scheduler.finished(self.request)
        self.assertEqual(set(self.rates.loads.under_way), {"r#0"})
        self.scheduler.ended((), WorkerReport({"r#0": (2, 1.0, True, True)}))
        self.assertEqual((self.rates.loads.under_way, self.rates.load.tokens), ({}, 0))

    def loads(self, waves, seconds):
        """Of requests that come eight at a time: how many are loaded, each of which takes so long."""
        taken, blocks = 0, list(range(5))
        for _ in range(waves):
            jobs = []
            for _ in range(8):
                one, state = self.add(f"r{len(self.scheduler.requests)}", blocks)
                if self.scheduler.is_worth_it(state, 16):
                    self.scheduler.allocated(one, SimpleNamespace(get_block_ids=lambda: [blocks]), 16)
                    jobs.append(state.load.job)
            self.step()
            self.now += seconds
            # Each is told after a step of its own.
            for job in jobs:
                self.scheduler.ended((), WorkerReport(loaded={job: (2, seconds, True, True)}))
            taken += len(jobs)
        return taken

    def test_loads_of_many_requests_are_taken_together(self):
        """Eight are loaded in half the time in which they would be computed, though one load takes longer than one
        computation."""
        self.rates.prefill.add(8 * 16, 3.28)
        self.loads(1, 1.64)
        self.assertEqual(self.loads(4, 1.64), 32)

    def test_where_even_all_of_them_take_longer_they_are_computed(self):
        self.rates.prefill.add(8 * 16, 3.28)
        self.loads(1, 2 * 3.28)
        self.assertEqual(self.loads(4, 2 * 3.28), 32 // TRY_AGAIN)


class LayerwiseTest(RunningRequest):
    layerwise = True

    def setUp(self):
        super().setUp()
        self.scheduler.local["r"] = 0
        self.load()
        self.meta = self.step({"r": (8, 20)}, has_sync_kv_loads=True)

    def test_nothing_is_stored_before_all_ranks_have_what_it_was_computed_from(self):
        self.assertEqual(self.meta.stores, [])
        self.report_step(self.meta, ranks=1)
        self.assertEqual(self.first_tokens(self.step({"r": (20, 21)})), {})
        self.report_step(self.meta, ranks=1)
        self.assertEqual(self.first_tokens(self.step({"r": (21, 22)})), {"r": 8})

    def test_nor_by_who_shares_its_blocks(self):
        self.add("shares", [10, 11, 22, 23, 24])
        self.add("alone", [30, 31, 32, 33, 34])
        self.assertEqual(self.first_tokens(self.step({"shares": (8, 20), "alone": (0, 20)})), {"alone": 0})

    def test_a_chunk_that_a_rank_did_not_hand_over_is_stored_anew(self):
        report = WorkerReport(loaded={self.state.load.job: (2, 0.1, False, True)}, steps={self.meta.loads_within: 2})
        self.scheduler.ended({11}, report)
        self.assertEqual(self.first_tokens(self.step({"r": (4, 20)})), {"r": 0})
        self.assertEqual(self.scheduler.matched_tokens(self.request, 0), (0, False))

    def test_reports_of_ranks_are_added_up(self):
        one = WorkerReport({"l": (1, 0.5, True, True)}, {"s": (1, {(0, 0), (0, 1)})}, {"s": 1}, {7: 1})
        other = WorkerReport(
            {"l": (1, 0.2, False, True), "m": (1, 0.3, True, False)},
            {"s": (1, {(0, 1), (1, 1)}), "t": (1, {(0, 0)})},
            {"s": 1, "t": 1},
            {7: 1},
        )
        both = one.aggregate(other)
        self.assertEqual(both.loaded, {"l": (2, 0.5, False, True), "m": (1, 0.3, True, False)})
        self.assertEqual(both.stored, {"s": (2, {(0, 1)}), "t": (1, {(0, 0)})})
        self.assertEqual((both.freed, both.steps), ({"s": 2, "t": 1}, {7: 2}))

    def test_the_end_of_an_earlier_load_says_nothing(self):
        self.scheduler.ended((), WorkerReport(loaded={"r#9": (2, 0.1, True, True), "gone#1": (2, 0.1, True, True)}))
        self.assertIsNotNone(self.state.load)


class RefusalTest(unittest.TestCase):
    def test_layers_are_not_waited_for_where_the_next_step_is_already_ordered(self):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
        with self.assertRaisesRegex(ValueError, "--no-async-scheduling"):
            describe(config, None, Settings.read({"layerwise": True}))


class LayoutTest(unittest.TestCase):
    def test_axes(self):
        for shape, axes in (
            ((100, 16, 576), "BNC"),
            ((100, 8, 16, 256), "BHNC"),
            ((2, 100, 16, 8, 128), "KBNHD"),
            ((100, 2, 16, 8, 128), "BKNHD"),
            ((100, 16, 8, 16, 128), None),
            ((100, 8, 17, 256), None),
            ((100,), None),
        ):
            self.assertEqual(axes_of(shape, 16), (axes, 1), shape)
        self.assertEqual(axes_of((100, 1, 1, 68608), 1), ("BHNC", 1), "a state")

    def test_kernels_may_have_smaller_blocks_than_vllm(self):
        self.assertEqual(axes_of((200, 8, 16, 256), 32), ("BHNC", 2))
        self.assertEqual(axes_of((100, 8, 32, 256), 16), (None, 1), "not larger ones")
        self.assertEqual(kernel_blocks([3, 0, 5], 2), [6, 7, 0, 1, 10, 11])
        self.assertEqual(kernel_blocks([3, 5], 1), [3, 5])

    def test_heads_of_a_rank(self):
        for total, ranks, own in (
            (8, 1, [(0, 8)]),
            (8, 2, [(0, 4), (4, 8)]),
            # Several ranks have the same head.
            (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
            (1, 2, [(0, 1), (0, 1)]),
        ):
            self.assertEqual([own_heads(total, rank, ranks) for rank in range(ranks)], own)


if __name__ == "__main__":
    unittest.main(verbosity=2)
