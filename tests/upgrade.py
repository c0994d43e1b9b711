#!/usr/bin/env python3
"""The previous release's program and this one on one bucket, side by side and one after the other: upgrade, and back out.

    KVGATE_TEST_PREVIOUS=PROGRAM tests/upgrade.py      with the tools of tests/servers/install.sh python

The S3 is the one of the environment: KVGATE_TEST_MINIO_ENDPOINT (tests/servers/minio.sh up), else KVGATE_TEST_RGW_ENDPOINTS
(ceph/up.sh). KVGATE_TEST_BIN names this release's program. The engine here is neither release's: it speaks docs/API.md, and
takes hashes and digests from the reference of the format.
"""

import contextlib
import http.client
import itertools
import json
import mmap
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

import boto3
from blake3 import blake3

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/deploy"), str(ROOT / "tests/engines"), str(ROOT / "tests/reference")]

import kvgate_format as kv  # noqa: E402
from gateway import Proxy  # noqa: E402
from lab import KVGATE, Process, until  # noqa: E402

PREVIOUS = Path(os.environ["KVGATE_TEST_PREVIOUS"]).resolve()
PROGRAMS = {"previous": PREVIOUS, "new": KVGATE}
BUCKET = "kvgate-upgrade"
CHUNKS = 6
OPEN = {
    "model": "test/upgrade",
    "revision": "1",
    "dtype": "float16",
    "chunk_tokens": 16,
    "mha": {"layers": 6, "heads": 4, "head_dim": 64},
}
PROTECTED = [{**OPEN, "tenant": "acme", "protection": protection} for protection in ("signed", "encrypted")]
numbers = itertools.count()


class S3:
    """The server, by a bucket of ours."""

    def __init__(self):
        names = os.environ
        if endpoint := names.get("KVGATE_TEST_MINIO_ENDPOINT"):
            keys, region = (names["KVGATE_TEST_MINIO_ACCESS_KEY"], names["KVGATE_TEST_MINIO_SECRET_KEY"]), "us-east-1"
        elif endpoints := names.get("KVGATE_TEST_RGW_ENDPOINTS"):
            endpoint, region = endpoints.split()[0], "default"
            keys = names["AWS_ACCESS_KEY_ID"], names["AWS_SECRET_ACCESS_KEY"]
        else:
            raise SystemExit("no S3: `tests/servers/minio.sh up` brings one up, and prints the file to source")
        self.endpoint, self.address = endpoint, endpoint.removeprefix("http://")
        self.environment = {"AWS_ACCESS_KEY_ID": keys[0], "AWS_SECRET_ACCESS_KEY": keys[1]}
        self.client = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id=keys[0], aws_secret_access_key=keys[1], region_name=region
        )
        with contextlib.suppress(self.client.exceptions.BucketAlreadyOwnedByYou):
            self.client.create_bucket(Bucket=BUCKET)

    def objects(self, prefix):
        """The ETag and time of each object, by its key."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        objects = itertools.chain.from_iterable(page.get("Contents", []) for page in pages)
        # A daemon that starts asks by an object of its own what the server can do.
        objects = (found for found in objects if "/.kvgate/" not in found["Key"])
        return {found["Key"]: (found["ETag"], found["LastModified"]) for found in objects}

    def empty(self):
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for found in page.get("Contents", []):
                self.client.delete_object(Bucket=BUCKET, Key=found["Key"])
        self.client.delete_bucket(Bucket=BUCKET)


def setUpModule():
    global s3
    s3 = S3()
    unittest.addModuleCleanup(s3.empty)


class Unix(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("kvgate", timeout=60)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class RefusedError(Exception):
    """A problem, as the daemon tells it."""


def call(path, method, target, body=None, **headers):
    """The answer, whole. Raises RefusedError."""
    connection = Unix(path)
    with contextlib.closing(connection):
        connection.request(
            method,
            target,
            json.dumps(body) if body is not None else None,
            {"Content-Type": "application/json", **headers},
        )
        answer = connection.getresponse()
        text = answer.read()
    if answer.status != 200:
        raise RefusedError(f"{answer.status} {text.decode()}")
    return text


class Daemon:
    """`serve` of one of the two releases. Another release may take over its place: socket, arena and disk."""

    def __init__(self, test, release, *, disk=None, endpoint=None, at=None, **settings):
        """`at`: a daemon that has ended, whose place is taken. `disk`: a folder."""
        self.folder, self.number = test.folder, at.number if at else next(numbers)
        self.release, self.disk = release, disk or (at and at.disk)
        self.endpoint = endpoint or (at.endpoint if at else s3.endpoint)
        self.where = ["--endpoint", self.endpoint, "--bucket", BUCKET, "--prefix", test.prefix]
        self.socket = self.folder / f"{self.number}.sock"
        self.arena = Path(f"/dev/shm/kvgate-upgrade-{os.getpid()}-{self.number}")
        environment = {
            **s3.environment,
            "KVGATE__ARENA__SIZE": "32MiB",
            "KVGATE__LOAD__RESERVE": "8MiB",
            "KVGATE__STORE__WRITE_BEHIND": "16MiB",
            **({"KVGATE__DISK__PATHS": str(self.disk)} if self.disk else {}),
            **settings,
        }
        command = [PROGRAMS[release], "serve", *self.where, "--socket", self.socket, "--arena-path", self.arena]
        self.process = Process(self.folder, f"{self.number}-{release}", command, self.answers, **environment)
        test.addCleanup(self.end)

    def answers(self):
        with contextlib.suppress(OSError, RefusedError):
            call(self.socket, "GET", "/healthz")
            return True
        return False

    def status(self):
        return json.loads(call(self.socket, "GET", "/v1/status"))

    def flush(self, seconds=30):
        return json.loads(call(self.socket, "POST", "/v1/flush", {"deadline_ms": seconds * 1000}))

    def kill(self):
        self.process.kill()

    def term(self):
        self.process.process.send_signal(signal.SIGTERM)
        return self.process.process.wait(60)

    def end(self):
        self.kill()
        self.arena.unlink(missing_ok=True)

    def log(self):
        return self.process.log.read_text()


class Engine:
    """A process that stores and loads KV by docs/API.md."""

    def __init__(self, test, daemon, space=OPEN, **headers):
        self.daemon, self.space = daemon, kv.Space.read(space)
        self.hasher = kv.Hasher(self.space.model_id, self.space.chunk_tokens)
        self.id = self.space.id.hex()
        call(daemon.socket, "PUT", "/v1/spaces", space)
        # Held for as long as the session lasts.
        self.stream = Unix(daemon.socket)
        test.addCleanup(self.stream.close)
        body = json.dumps({"instance": f"engine-{next(numbers)}"})
        self.stream.request("POST", "/v1/attach", body, {"Content-Type": "application/json", **headers})
        answer = self.stream.getresponse()
        attached = json.loads(answer.readline())
        self.events, self.session = answer, attached["session"]
        with open(attached["arena"]["path"], "r+b") as file:
            self.arena = mmap.mmap(file.fileno(), 0)
        assert self.arena[:8] == b"KVGARENA"
        assert self.arena[16:32].hex() == attached["arena"]["boot_id"]
        test.addCleanup(self.arena.close)

    def post(self, target, **body):
        return call(self.daemon.socket, "POST", target, body)

    def chain(self, seed, chunks=CHUNKS):
        """The hashes of a prompt's chunks, parents first."""
        return [hash.hex() for hash in self.hasher.chain(range(chunks * 16), salt=seed.encode())]

    def payload(self, hash):
        return blake3(bytes.fromhex(hash)).digest(length=self.space.payload_len)

    def store(self, seed, chunks=CHUNKS):
        """Those that were not there."""
        root = self.hasher.root(salt=seed.encode()).hex()
        chain = self.chain(seed, chunks)
        wanted = [{"hash": hash, "parent": parent} for hash, parent in zip(chain, [root, *chain], strict=False)]
        reserved = json.loads(self.post("/v1/store/reserve", session=self.session, space=self.id, chunks=wanted))[
            "chunks"
        ]
        stored = [(hash, slot) for hash, slot in zip(chain, reserved, strict=True) if "slot" in slot]
        for hash, slot in stored:
            self.arena[slot["offset"] : slot["offset"] + self.space.payload_len] = self.payload(hash)
        slots = [{name: slot[name] for name in ("slot", "generation")} for _, slot in stored]
        outcomes = json.loads(self.post("/v1/store/commit", session=self.session, slots=slots))["slots"]
        assert all(outcome.get("published") for outcome in outcomes), outcomes
        return [hash for hash, _ in stored]

    def found(self, seed, chunks=CHUNKS):
        """The length of the prefix, and the tiers of its parts."""
        answer = self.post("/v1/lookup", space=self.id, hashes=self.chain(seed, chunks), strategy="exact")
        answer = json.loads(answer)
        assert int(answer["unknown"], 16) == 0, answer
        return answer["prefix"], {run["tier"] for run in answer["tiers"]}

    def load(self, seed, chunks=CHUNKS):
        """For each chunk its tier, or why it is missing. Every byte that comes is compared."""
        chain, name = self.chain(seed, chunks), f"load-{next(numbers)}"
        body = dict(session=self.session, load_id=name, space=self.id, hashes=chain, continue_after_miss=True)
        connection = Unix(self.daemon.socket)
        outcomes = {}
        with contextlib.closing(connection):
            connection.request("POST", "/v1/load", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RefusedError(f"{answer.status} {answer.read().decode()}")
            while not (line := json.loads(answer.readline())).get("end"):
                if miss := line.get("miss"):
                    outcomes[line["i"]] = f"{miss}: {line['detail']}"
                    continue
                got = self.arena[line["offset"] : line["offset"] + self.space.payload_len]
                assert got == self.payload(chain[line["i"]]), f"chunk {line['i']} has other bytes"
                outcomes[line["i"]] = line["tier"]
                slots = [{name: line[name] for name in ("slot", "generation")}]
                self.post("/v1/release", session=self.session, load_id=name, slots=slots)
        return [outcomes[at] for at in range(len(chain))]


class Upgrade(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="kvgate-upgrade-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.prefix = f"{os.getpid()}-{next(numbers)}"

    def disk(self):
        disk = self.folder / f"disk-{next(numbers)}"
        disk.mkdir()
        return disk

    def line(self):
        """To S3; it may be cut."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        proxy = Proxy(address, s3.address)
        self.addCleanup(proxy.end)
        return proxy

    def say(self, release, *arguments, status=0, stdin="", **settings):
        """What the program of that release answers to a command."""
        environment = {**os.environ, **s3.environment, **settings}
        command = list(map(str, [PROGRAMS[release], *arguments]))
        done = subprocess.run(command, env=environment, input=stdin, capture_output=True, text=True, timeout=120)
        if status is not None:
            self.assertEqual(done.returncode, status, f"{release}: {shlex.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def refused(self, code, call, *arguments):
        with self.assertRaises(RefusedError) as refused:
            call(*arguments)
        self.assertIn(code, str(refused.exception))
        return str(refused.exception)

    def keys(self, daemon=None):
        """Settings with a key of tenant acme."""
        (self.folder / "acme.key").write_text("7" * 64)
        (self.folder / "acme.key").chmod(0o400)
        file = self.folder / "keys.toml"
        file.write_text(f'[[tenant]]\nname = "acme"\nkeys = ["file:{self.folder}/acme.key"]\n')
        return {"KVGATE__KEYS__FILE": str(file)}

    def files(self, disk, space):
        folder = Path(disk, space.id.hex()[:32])
        return {path.name: path.read_bytes() for path in folder.glob("*")} if folder.is_dir() else {}


WAYS = [("previous", "new"), ("new", "previous")]


class OneBucket(Upgrade):
    """A fleet that is upgraded node by node."""

    def test_each_release_finds_and_loads_what_the_other_stored(self):
        daemons = {release: Daemon(self, release) for release in PROGRAMS}
        engines = {release: Engine(self, daemon) for release, daemon in daemons.items()}
        for release, engine in engines.items():
            self.assertEqual(len(engine.store(release)), CHUNKS)
            daemons[release].flush()
        for writer, reader in WAYS:
            with self.subTest(writer=writer, reader=reader):
                self.assertEqual(engines[reader].found(writer), (CHUNKS, {"s3"}))
                self.assertEqual(engines[reader].load(writer), ["s3"] * CHUNKS)
                self.assertEqual(engines[reader].store(writer), [], "nothing is stored twice")
        for release in PROGRAMS:
            self.say(release, "verify", *daemons["new"].where)

    def test_both_write_the_same_and_other_chunks_at_once(self):
        daemons = {release: Daemon(self, release) for release in PROGRAMS}
        engines = {release: Engine(self, daemon) for release, daemon in daemons.items()}
        failed = []

        def work(release):
            try:
                for round in range(8):
                    engines[release].store(f"both-{round}")
                    engines[release].store(f"{release}-{round}")
                    assert daemons[release].flush()["pending"] == 0
            except Exception as error:
                failed.append((release, error))

        workers = [threading.Thread(target=work, args=[release]) for release in PROGRAMS]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.assertEqual(failed, [])
        objects = s3.objects(self.prefix)
        self.assertEqual(len(objects), 3 * 8 * CHUNKS + 1, "each chunk once, and space.json")
        for release, other in WAYS:
            self.say(release, "verify", *daemons[release].where)
            reader = Engine(self, Daemon(self, release))
            for seed in [f"{name}-{round}" for name in ("both", other) for round in range(8)]:
                self.assertEqual(reader.load(seed), ["s3"] * CHUNKS)
        self.assertEqual(s3.objects(self.prefix), objects, "nobody has written anything anew")


class OneNode(Upgrade):
    """A node whose program is replaced, and put back."""

    def test_disks_are_taken_over_both_ways(self):
        for first, second in WAYS:
            with self.subTest(upgrade=second == "new"):
                line = self.line()
                daemon = Daemon(self, first, disk=self.disk(), endpoint=f"http://{line.listen}")
                engine = Engine(self, daemon)
                seed = f"disk-{first}"
                engine.store(seed)
                daemon.flush()
                self.assertEqual(daemon.term(), 0)
                # What the disk has comes without S3.
                line.end()
                daemon = Daemon(self, second, at=daemon, KVGATE__API__DEGRADED="true")
                engine = Engine(self, daemon)
                self.assertEqual(engine.found(seed), (CHUNKS, {"disk"}))
                self.assertEqual(engine.load(seed), ["disk"] * CHUNKS)
                self.assertEqual(daemon.flush()["unread_disks"], 0)
                # And back.
                daemon.term()
                daemon = Daemon(self, first, at=daemon, KVGATE__API__DEGRADED="true")
                self.assertEqual(Engine(self, daemon).load(seed), ["disk"] * CHUNKS)
                daemon.end()

    def test_what_a_killed_release_had_not_sent_the_other_one_sends(self):
        for first, second in WAYS:
            with self.subTest(upgrade=second == "new"):
                line, seed = self.line(), f"unsent-{first}"
                daemon = Daemon(self, first, disk=self.disk(), endpoint=f"http://{line.listen}")
                engine = Engine(self, daemon)
                engine.store(f"sent-{first}")
                daemon.flush()
                line.end()
                engine.store(seed)
                files = CHUNKS * 2 + 1
                until(
                    lambda daemon=daemon, space=engine.space, files=files: len(self.files(daemon.disk, space)) == files
                )
                self.refused("not_flushed", daemon.flush, 1)
                daemon.kill()
                daemon = Daemon(self, second, at=daemon, KVGATE__API__DEGRADED="true")
                self.refused("not_flushed", daemon.flush, 1)
                # Back, still without S3: nothing is forgotten.
                daemon.kill()
                daemon = Daemon(self, first, at=daemon, KVGATE__API__DEGRADED="true")
                self.refused("not_flushed", daemon.flush, 1)
                daemon.kill()
                daemon = Daemon(self, second, at=daemon, endpoint=s3.endpoint)
                self.assertEqual(daemon.flush()["pending"], 0)
                daemon.end()
                # Another node, without that disk.
                reader = Daemon(self, first)
                self.assertEqual(Engine(self, reader).load(seed), ["s3"] * CHUNKS)
                reader.end()

    def test_an_engine_goes_on_when_the_other_release_takes_over(self):
        daemon = Daemon(self, "previous")
        engine = Engine(self, daemon)
        engine.store("engine")
        daemon.flush()
        # A killed one leaves its socket and its arena behind, which the engine still has mapped.
        for release in ("new", "previous"):
            daemon.kill()
            with self.assertRaises(http.client.IncompleteRead):
                engine.events.read(1)
            daemon = Daemon(self, release, at=daemon)
            self.refused("no_session", engine.load, "engine")
            engine = Engine(self, daemon)
            self.assertEqual(engine.load("engine"), ["s3"] * CHUNKS)


class NewThings(Upgrade):
    """What the release of tests/previous does not know: spaces with a protection, whose objects have format version 2. When that
    moves on, what is new then takes their place here."""

    def test_the_previous_release_refuses_protected_spaces_and_leaves_their_chunks_alone(self):
        new, previous = Daemon(self, "new", **self.keys()), Daemon(self, "previous")
        for space in PROTECTED:
            with self.subTest(space["protection"]):
                engine = Engine(self, new, space)
                engine.store("secret")
                new.flush()
                objects = s3.objects(self.prefix)
                said = self.refused("bad_request", Engine, self, previous, space)
                self.assertIn("protection", said)
                # Nor by its id.
                self.refused(
                    "unknown_space", call, previous.socket, "POST", "/v1/lookup", dict(space=engine.id, hashes=[])
                )
                where, id = previous.where, engine.id
                for arguments in (["--space", id], []):
                    said = self.say("previous", "verify", *where, *arguments, "--delete", status=1)
                    self.assertIn("space_json_unreadable", said)
                    self.assertIn("damaged 0 (removed 0)", said)
                self.assertIn("protection", self.say("previous", "lookup", *where, "--space", id, status=2, stdin="1"))
                self.assertIn("protection", self.say("previous", "ls", *where))
                self.assertEqual(s3.objects(self.prefix), objects)
                self.assertEqual(
                    Engine(self, Daemon(self, "new", **self.keys()), space).load("secret"), ["s3"] * CHUNKS
                )

    def test_an_object_of_a_newer_format_is_a_miss_that_says_so_and_stays(self):
        """By a name of a space that both know: no release makes such objects."""
        new, previous = Daemon(self, "new", **self.keys()), Daemon(self, "previous")
        signed = Engine(self, new, PROTECTED[0])
        signed.store("other")
        new.flush()
        reader = Engine(self, previous)
        source = kv.chunk_key(self.prefix, signed.space.id, bytes.fromhex(signed.chain("other")[0]))
        target = kv.chunk_key(self.prefix, reader.space.id, bytes.fromhex(reader.chain("plain")[0]))
        s3.client.copy_object(Bucket=BUCKET, Key=target, CopySource={"Bucket": BUCKET, "Key": source})
        version = s3.objects(target)
        outcomes = reader.load("plain")
        self.assertIn("unreadable: this kvgate can't read the object: format version 2", outcomes[0])
        self.assertIn("it is left as it is", outcomes[0])
        # Its neighbours are stored, and it is not written over.
        reader.store("plain")
        previous.flush()
        self.assertEqual(s3.objects(target), version)
        self.assertEqual(Engine(self, Daemon(self, "previous")).load("plain")[1:], ["s3"] * (CHUNKS - 1))

    def test_a_disk_with_new_things_is_taken_back_and_nothing_unsent_is_lost(self):
        line = self.line()
        keys = self.keys()
        daemon = Daemon(self, "new", disk=self.disk(), endpoint=f"http://{line.listen}", **keys)
        engines = [Engine(self, daemon, space) for space in PROTECTED]
        # S3 has chunks of one of these spaces, and has never heard of the other.
        engines[0].store("sent")
        daemon.flush()
        line.end()
        unsent = []
        for engine, files in zip(engines, (2 * CHUNKS, CHUNKS), strict=True):
            engine.store("unsent")
            until(lambda engine=engine, files=files: len(self.files(daemon.disk, engine.space)) == files + 1)
            files = self.files(daemon.disk, engine.space)
            unsent.append({hash: files[hash] for hash in engine.chain("unsent")})
        daemon.kill()
        # Back out: the previous release knows that it can't promise them, and serves all else.
        daemon = Daemon(self, "previous", at=daemon, endpoint=s3.endpoint)
        self.refused("not_flushed", daemon.flush, 1)
        plain = Engine(self, daemon)
        plain.store("plain")
        until(lambda: len(s3.objects(kv.chunk_key(self.prefix, plain.space.id, b""))) == CHUNKS + 1)
        self.assertEqual(plain.load("plain"), ["memory"] * CHUNKS)
        daemon.kill()
        for engine, files in zip(engines, unsent, strict=True):
            left = self.files(daemon.disk, engine.space)
            self.assertEqual({name: left.get(name) for name in files}, files)
        # And forward again: once engines are back, everything is sent.
        daemon = Daemon(self, "new", at=daemon, endpoint=s3.endpoint, **keys)
        engines = [Engine(self, daemon, space) for space in PROTECTED]
        self.assertEqual(daemon.flush()["pending"], 0)
        reader = Daemon(self, "new", **keys)
        for space in PROTECTED:
            self.assertEqual(Engine(self, reader, space).load("unsent"), ["s3"] * CHUNKS)
        self.assertEqual(Engine(self, reader, PROTECTED[0]).load("sent"), ["s3"] * CHUNKS)
        self.assertLessEqual(set(engines[0].load("sent")), {"disk", "s3"})
        self.assertEqual(Engine(self, daemon).load("plain"), ["disk"] * CHUNKS)


class Clients(Upgrade):
    """One release's commands, the other's daemon."""

    def test_commands_work_with_the_other_release_s_daemon_and_bucket(self):
        for release, other in WAYS:
            with self.subTest(client=release, daemon=other):
                daemon = Daemon(self, other)
                engine = Engine(self, daemon)
                seed = f"client-{release}"
                engine.store(seed)
                at = ["--socket", daemon.socket]
                (self.folder / "space.json").write_text(json.dumps(OPEN))
                prompt = ["--space", self.folder / "space.json", "--salt", seed]
                tokens = " ".join(map(str, range(CHUNKS * 16)))
                self.say(release, "flush", *at)
                self.say(release, "health", *at)
                self.say(release, "health", "--ready", *at)
                for where in (at, daemon.where):
                    found = json.loads(self.say(release, "lookup", *where, *prompt, "--json", stdin=tokens))
                    self.assertEqual((found["chunks"], found["prefix"]), (CHUNKS, CHUNKS))
                self.say(release, "prefetch", *at, *prompt, stdin=tokens)
                status = json.loads(self.say(release, "stat", *at, "--json"))
                self.assertEqual((status["not_ready"], len(status["spaces"])), (None, 1))
                self.assertIn("engines      1;", self.say(release, "stat", *at))
                self.say(release, "top", *at, "--once")
                engine.load(seed)
                self.say(release, "trace", *at)
                self.say(release, "stat", *daemon.where, "--space", engine.id, engine.chain(seed)[0])
                self.assertIn(engine.id[:32], self.say(release, "ls", *daemon.where))
                self.say(release, "verify", *daemon.where)
                daemon.end()

    def test_every_setting_of_the_previous_release_is_still_taken(self):
        """By its name, with its value: what is renamed is told, and taken."""
        settings = {key["path"]: key["value"] for key in json.loads(self.say("previous", "config", "show", "--json"))}
        self.assertGreater(len(settings), 100)
        self.say(
            "new",
            "config",
            "check",
            **{f"KVGATE__{path.replace('.', '__')}".upper(): settings[path] for path in settings},
        )
        file = self.folder / "kvgate.toml"
        lines = [f"{path} = {json.dumps(value)}" for path, value in settings.items()]
        file.write_text("\n".join(lines))
        self.say("new", "config", "check", "--config", file)
        taken = {
            key["path"]: key["value"]
            for key in json.loads(self.say("new", "config", "show", "--json", "--config", file))
        }
        for path in settings.keys() & taken.keys():
            self.assertEqual(taken[path], settings[path])
        # A file of its own making, too.
        file.write_text(self.say("previous", "config", "show", "--toml", KVGATE__S3__BUCKET="kv-cache"))
        self.say("new", "config", "check", "--config", file)

    def test_the_daemon_tells_of_an_engine_of_another_version_and_serves_it(self):
        daemon = Daemon(self, "new")
        engine = Engine(self, daemon, **{"User-Agent": "kvgate/99.0.0"})
        engine.store("other")
        self.assertEqual(engine.load("other"), ["memory"] * CHUNKS)
        until(lambda: "has kvgate 99.0.0, this daemon is kvgate" in daemon.log())
        version = daemon.status()["version"]
        connection = Unix(daemon.socket)
        with contextlib.closing(connection):
            connection.request("GET", "/healthz")
            self.assertEqual(connection.getresponse().headers["server"], f"kvgate/{version}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
