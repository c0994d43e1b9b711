#!/usr/bin/env python3
"""consul/: the real Consul and the real CoreDNS before a real Ceph, with a kvgate under load all the time.

The processes are started by the commands of docs/DNS.md, with this test's addresses. Beside the checks, the times at which
each layer noticed are printed; nothing depends on them. `KVGATE_TEST_TIMES=FILE` keeps them as a table.
"""

import http.client
import http.server
import json
import os
import re
import shlex
import socket
import subprocess
import tempfile
import threading
import time
import unittest
from datetime import date
from pathlib import Path

from lab import CACHE, KVGATE, PORT, ROOT, Ceph, Process, shown, until

ADDRESSES = ["127.0.0.31", "127.0.0.32", "127.0.0.33", "127.0.0.34"]
SERVER, AGENT, DNS = "127.0.0.60", "127.0.0.61", "127.0.0.62"
DNS_PORT = 5300
NAME = "s3.example.com"
PAGE = "docs/DNS.md"


def get(address, path):
    """JSON of Consul's API; None: nobody answers."""
    connection = http.client.HTTPConnection(address, 8500, timeout=2)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return json.load(answer) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def dig(*arguments, server=DNS, port=DNS_PORT):
    command = ["dig", f"@{server}", "-p", str(port), "+tries=1", "+time=2", *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout


class Gateway:
    """`kvgate serve` behind the name, whose chunks come from S3 each time: they find no room in memory."""

    def __init__(self, case, folder, name, endpoint, environment, **settings):
        self.socket = f"{folder}/{name}.sock"
        arena = f"/dev/shm/kvgate-deploy-{os.getpid()}-{name}"
        environment = {
            **environment,
            "KVGATE__DNS__SERVERS": f"{DNS}:{DNS_PORT}",
            "KVGATE__S3__PREFIX": "kvgate",
            "KVGATE__ARENA__SIZE": "128MiB",
            "KVGATE__LOAD__RESERVE": "64MiB",
            "KVGATE__STORE__WRITE_BEHIND": "32MiB",
            "KVGATE__MEMORY__WATERMARK": "1",
            **settings,
        }
        command = [KVGATE, "serve", "--endpoint", endpoint, "--bucket", "kvgate", "--socket", self.socket]
        process = Process(folder, name, [*command, "--arena-path", arena], self.status, **environment)
        case.addCleanup(lambda: Path(arena).unlink(missing_ok=True))
        case.addCleanup(process.kill)

    def call(self, path, method="GET", body=None):
        """Status and body."""
        connection = http.client.HTTPConnection("kvgate", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(60)
            connection.sock.connect(self.socket)
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def status(self):
        try:
            return json.loads(self.call("/v1/status")[1])
        except OSError:
            return None

    def endpoints(self):
        """Address: breaker."""
        return {one["address"]: one["breaker"] for one in self.status()["s3"]["endpoints"]}

    def addresses(self):
        return {address.rsplit(":", 1)[0] for address in self.endpoints()}


class Load:
    """Loads chunks without a pause until `end`."""

    def __init__(self, gateway, chunks, threads=4):
        self.gateway, self.chunks = gateway, chunks
        self.done, self.failed, self.over = 0, [], threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(number,)) for number in range(threads)]
        for thread in self.threads:
            thread.start()

    def run(self, number):
        while not self.over.is_set():
            number += 1
            try:
                status, body = self.gateway.call(self.chunks[number % len(self.chunks)])
            except (OSError, http.client.HTTPException) as error:
                status, body = 0, str(error)
            if status != 200:
                self.failed.append((status, body[:300]))
                time.sleep(0.1)
            self.done += 1

    def end(self):
        self.over.set()
        for thread in self.threads:
            thread.join()


class Times:
    """When each layer noticed, in seconds after something was done."""

    def __init__(self):
        self.rows = []

    def watch(self, event, layers):
        """`layers`: name and whether it has noticed."""
        began, left = time.monotonic(), dict(layers)
        deadline, found = began + 60, {}
        while left:
            for name in [name for name, noticed in left.items() if noticed()]:
                del left[name]
                found[name] = time.monotonic() - began
            if time.monotonic() > deadline:
                raise AssertionError(f"{event}: {', '.join(left)} does not notice")
            time.sleep(0.02)
        for name in layers:
            self.rows.append((event, name, found[name]))
            print(f"{event}: {name} after {found[name]:.2f} s", flush=True)

    def keep(self, path, loads):
        machine = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
        lines = [
            "# When each layer notices",
            "",
            f"`KVGATE_TEST_TIMES=FILE tests/deploy/test_consul.py`; {date.today()}; {machine}, {os.cpu_count()} cores.",
            "Four radosgw, Consul (a check each second), CoreDNS and kvgate under load on one machine.",
            f"{loads} loads, of which none failed.",
            "",
            "| what was done | noticed by | after, s |",
            "|---|---|---:|",
            *(f"| {event} | {name} | {seconds:.2f} |" for event, name, seconds in self.rows),
            "",
        ]
        Path(path).write_text("\n".join(lines))


class Always200(http.server.BaseHTTPRequestHandler):
    """As haproxy's /health, which answers with every radosgw behind it dead."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


class Discovery(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvgate-deploy-")
        cls.addClassCleanup(cls.folder.cleanup)
        cls.ceph = Ceph(2, ADDRESSES)
        cls.addClassCleanup(cls.ceph.end)
        monitor = http.server.ThreadingHTTPServer((ADDRESSES[3], 1967), Always200)
        threading.Thread(target=monitor.serve_forever, daemon=True).start()
        cls.addClassCleanup(monitor.server_close)
        cls.addClassCleanup(monitor.shutdown)
        cls.commands = shown(PAGE)
        cls.services = Path(cls.folder.name, "services")
        cls.services.mkdir()
        for address in ADDRESSES:
            # The last one has a monitor port, too.
            ports = "80 1967" if address == ADDRESSES[3] else "80"
            line = f"consul/service.sh 10.67.67.11 {ports} >/etc/consul.d/ingress-rgw-s3-80.hcl"
            assert line in cls.commands, line
            line = line.replace("10.67.67.11", address).replace(" 80", f" {PORT}")
            line = line.replace("/etc/consul.d/ingress-rgw-s3-80.hcl", f"{cls.services}/{address}.hcl")
            cls.ceph.run("bash", "-c", f"cd {ROOT} && {line}", KVGATE_CHECK_INTERVAL="1s")
        cls.server = cls.agent("consul agent -server", "server", SERVER, lambda: get(SERVER, "/v1/status/leader"))
        cls.client = cls.agent("consul agent -config", "client", AGENT, lambda: len(cls.healthy()) == 4)
        cls.coredns = cls.site("coredns")
        cls.ceph.run(
            *(
                KVGATE,
                "demo",
                "--endpoint",
                f"http://{ADDRESSES[0]}:{PORT}",
                "--bucket",
                "kvgate",
                "--prefix",
                "kvgate",
            ),
            *["--model", "deepseek-v3", "--tokens", "2048", "--conversations", "1", "--keep"],
        )

    @classmethod
    def line(cls, start):
        found = [line for line in cls.commands if line.startswith(start)]
        assert len(found) == 1, f"{PAGE} has {found} for {start!r}"
        return found[0]

    @classmethod
    def agent(cls, start, name, address, ready, flags=""):
        """A command of the page, at this test's addresses."""
        line = cls.line(start)
        for theirs, ours in (
            (r"=10\.67\.67\.1\b", f"={SERVER}"),
            (r"=10\.67\.67\.11\b", f"={address}"),
            ("consul agent", f"{CACHE}/bin/consul agent -node={name}"),
            ("bootstrap-expect=3", "bootstrap-expect=1"),
            ("/var/lib/consul", f"{cls.folder.name}/{name}"),
            ("/etc/consul.d", str(cls.services)),
        ):
            line = re.sub(theirs, ours, line)
        process = Process(cls.folder.name, name, ["bash", "-c", f"cd {ROOT} && exec {line} {flags}"], ready)
        cls.addClassCleanup(process.kill)
        return process

    @classmethod
    def site(cls, name, port=DNS_PORT, consul=AGENT, service=None):
        """CoreDNS with this test's values in the place of site.env's."""
        values = dict(line.split("=") for line in (ROOT / "consul/site.env").read_text().splitlines() if "=" in line)
        assert values["KVGATE_S3_NAME"] == NAME
        values |= {"KVGATE_CONSUL_DNS": f"{consul}:8600", "KVGATE_DNS_ADDRESS": DNS, "KVGATE_DNS_PORT": str(port)}
        values |= {"KVGATE_S3_SERVICE": service} if service else {}
        env = Path(cls.folder.name, f"{name}.env")
        env.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        line = cls.line("env $(grep").replace("consul/site.env", str(env)).replace(" coredns", f" {CACHE}/bin/coredns")
        ready = lambda: "NOERROR" in dig(NAME, port=port)  # noqa: E731
        process = Process(cls.folder.name, name, ["bash", "-c", f"cd {ROOT} && exec {line}"], ready)
        cls.addClassCleanup(process.kill)
        return process

    @staticmethod
    def healthy():
        found = get(AGENT, "/v1/health/service/ingress-rgw-s3?passing=true")
        return {one["Service"]["Address"] for one in found or []}

    @staticmethod
    def named(*arguments):
        return set(dig("+short", *arguments, NAME).split())

    def chunks(self, gateway):
        """Paths of the demo's chunks, whose space `gateway` knows then."""
        command = [KVGATE, "ls", "--json", "--endpoint", f"http://{ADDRESSES[0]}:{PORT}", "--bucket", "kvgate"]
        command += ["--prefix", "kvgate"]
        spaces = json.loads(self.ceph.run(*command).stdout)["spaces"]
        space = spaces[0]["space"]
        key = f"kvgate/{space[:32]}/space.json"
        written = self.ceph.s3(ADDRESSES[0]).get_object(Bucket="kvgate", Key=key)["Body"].read()
        self.assertEqual(gateway.call("/v1/spaces", "PUT", written)[0], 200)
        chunks = json.loads(self.ceph.run(*command, "--space", space).stdout)["chunks"]
        return [f"/v1/chunks/{space}/{chunk['hash']}" for chunk in chunks]

    def test_a_gateway_dies_and_comes_back_and_consul_dies(self):
        every, dead = set(ADDRESSES), ADDRESSES[3]
        rest, at = every - {dead}, f"{dead}:{PORT}"
        kvgate = Gateway(self, self.folder.name, "kvgate", f"http://{NAME}:{PORT}", self.ceph.environment)
        until(lambda: kvgate.addresses() == every and not kvgate.status()["not_ready"])
        load = Load(kvgate, self.chunks(kvgate))
        self.addCleanup(load.end)
        times = Times()

        def more(number=50):
            """The load goes on."""
            wanted = load.done + number
            until(lambda: load.done >= wanted)

        more()
        self.ceph.rgw("stop", dead)
        layers = {
            "kvgate's breaker": lambda: kvgate.endpoints().get(at) != "closed",
            "Consul's health": lambda: self.healthy() == rest,
            "DNS": lambda: self.named() == rest,
            "kvgate's set": lambda: kvgate.addresses() == rest,
        }
        times.watch("one of four radosgw is killed", layers)
        more()
        self.ceph.rgw("start", dead)
        layers = {
            "Consul's health": lambda: self.healthy() == every,
            "DNS": lambda: self.named() == every,
            "kvgate's set": lambda: kvgate.addresses() == every,
            "kvgate's breaker": lambda: kvgate.endpoints().get(at) == "closed",
        }
        times.watch("it is started again", layers)
        more()
        # One that hangs: connections are taken, nothing is answered.
        self.ceph.rgw("pause", dead)
        layers = {"Consul's health": lambda: self.healthy() == rest, "kvgate's set": lambda: kvgate.addresses() == rest}
        times.watch("it hangs", layers)
        self.ceph.rgw("resume", dead)
        layers = {
            "Consul's health": lambda: self.healthy() == every,
            "kvgate's set": lambda: kvgate.addresses() == every,
        }
        times.watch("it goes on", layers)

        # Consul dies, agent and server: what was known stays, through its whole return.
        fewer, over = [], threading.Event()

        def never_fewer():
            while not over.is_set():
                if (found := kvgate.addresses()) != every:
                    fewer.append(found)
                time.sleep(0.05)

        self.addCleanup(over.set)
        watcher = threading.Thread(target=never_fewer)
        watcher.start()
        self.client.kill()
        self.server.kill()
        # Well beyond the records' TTL.
        gone = time.monotonic() + 6
        while time.monotonic() < gone:
            self.assertEqual(self.named(), every, "the last answer goes on")
            time.sleep(0.2)
        more()
        self.server.start()
        self.client.start()
        more()
        self.coredns.kill()
        more()
        self.coredns.start()
        more()
        over.set()
        watcher.join()
        load.end()
        self.assertEqual(fewer, [], "kvgate keeps its addresses while Consul and CoreDNS are away")
        self.assertEqual(load.failed, [])
        print(f"{load.done} loads, none failed")
        if path := os.environ.get("KVGATE_TEST_TIMES"):
            times.keep(path, load.done)

    def test_the_commands_of_the_page(self):
        """Those that are not how this test starts its processes."""
        begun = ("consul/service.sh", "consul agent", "env $(grep", "tests/servers/install.sh")
        left = [line for line in self.commands if not line.startswith(begun)]
        self.assertGreaterEqual(len(left), 5)
        for line in left:
            line = re.sub(r"@10\.67\.67\.2\b", f"@{DNS} -p {DNS_PORT}", line)
            line = line.replace("10.67.67.11", AGENT).replace("10.67.67.2:53", f"{DNS}:{DNS_PORT}")
            # A gateway of the lab is at its own port; with SRV records the name tells it.
            line = re.sub(r"(--endpoint http://[a-z0-9.-]+)", rf"\1:{PORT}", line)
            line += " --objects 2 --object-size 1MiB" if "kvgate bench" in line else ""
            folders = f"{KVGATE.parent}:{CACHE}/bin:{os.environ['PATH']}"
            done = self.ceph.run("bash", "-c", line, PATH=folders, KVGATE__S3__PREFIX="page")
            for address in ADDRESSES if "+short" in line or "health" in line else []:
                self.assertIn(address, done.stdout, line)

    def test_names_below_and_srv_records(self):
        self.assertEqual(set(dig("+short", f"bucket.{NAME}").split()), set(ADDRESSES))
        ttl = re.search(rf"^{NAME}\.\s+(\d+)\s+IN\s+A\s", dig("+noall", "+answer", NAME), re.MULTILINE)
        self.assertIn(int(ttl[1]), (0, 1, 2), "what Consul's agent is configured to say, or stale")
        srv = {"KVGATE__DNS__SRV": "ingress-rgw-s3.service.dc1.consul"}
        kvgate = Gateway(self, self.folder.name, "srv", f"http://{NAME}", self.ceph.environment, **srv)
        until(lambda: set(kvgate.endpoints()) == {f"{address}:{PORT}" for address in ADDRESSES})
        until(lambda: not kvgate.status()["not_ready"])
        for path in self.chunks(kvgate):
            self.assertEqual(kvgate.call(path)[0], 200)

    def test_two_hundred_addresses(self):
        many = [f"127.1.0.{number}" for number in range(1, 201)]
        services = [{"name": "many", "id": f"many-{one}", "address": one, "port": PORT} for one in many]
        (self.services / "many.json").write_text(json.dumps({"services": services}))
        self.client.process.send_signal(1)
        # As Consul is without agent.hcl.
        plain = "127.0.0.63"
        flags = f"-config-dir={self.services} -bind={plain} -client={plain} -datacenter=plain"
        command = f"{CACHE}/bin/consul agent -server -bootstrap-expect=1 -data-dir={self.folder.name}/plain {flags}"
        everything = lambda: len(get(plain, "/v1/catalog/service/many") or []) == 200  # noqa: E731
        process = Process(self.folder.name, "plain", shlex.split(command), everything)
        self.addCleanup(process.kill)
        until(lambda: len(get(AGENT, "/v1/catalog/service/many") or []) == 200)
        self.site("many", DNS_PORT + 1, service="many.service.dc1.consul")
        consul = "many.service.consul"

        def cut(*arguments, **more):
            """Addresses over UDP, and whether the answer says that it was cut."""
            answer = dig("+notcp", "+ignore", *arguments, **more)
            flags = re.search(r";; flags: ([a-z ]+);", answer)[1].split()
            return len(re.findall(r"\sA\s+127\.1\.", answer)), "tc" in flags

        for edns in ("+noedns", "+bufsize=1232", "+bufsize=4096"):
            found, said = cut(NAME, edns, port=DNS_PORT + 1)
            self.assertTrue(
                said or found == 200, f"CoreDNS: {found} over UDP with {edns}, and no word that there are more"
            )
            found, said = cut(consul, edns, server=AGENT, port=8600)
            self.assertTrue(
                said or found == 200, f"Consul: {found} over UDP with {edns}, and no word that there are more"
            )
        for server, port, name in ((DNS, DNS_PORT + 1, NAME), (AGENT, 8600, consul), (plain, 8600, consul)):
            self.assertEqual(set(dig("+tcp", "+short", name, server=server, port=port).split()), set(many))
        found, said = cut(consul, "+bufsize=1232", server=plain, port=8600)
        print(f"Consul without agent.hcl: {found} of 200 addresses over UDP, {'cut' if said else 'not a word of it'}")
        self.assertTrue(found < 200 and not said, "why agent.hcl has enable_truncate, and kvgate asks by TCP too")

        def kvgate(name, host, server, **settings):
            settings["KVGATE__DNS__SERVERS"] = server
            return Gateway(self, self.folder.name, name, f"http://{host}:{PORT}", self.ceph.environment, **settings)

        whole = {f"{address}:{PORT}" for address in many}
        for gateway in (
            kvgate("by-coredns", NAME, f"{DNS}:{DNS_PORT + 1}"),
            kvgate("by-consul", consul, f"{AGENT}:8600"),
            kvgate("by-tcp", consul, f"{plain}:8600", KVGATE__DNS__TCP="true"),
            kvgate("in-silence", consul, f"{plain}:8600"),
        ):
            until(lambda gateway=gateway: set(gateway.endpoints()) == whole)

    def test_definitions(self):
        def define(*arguments, status=0, **environment):
            done = self.ceph.run(ROOT / "consul/service.sh", *arguments, check=False, **environment)
            self.assertEqual(done.returncode, status, done.stderr)
            return done.stdout + done.stderr

        ids = [re.search(r'\n  id +"?= "(.*)"', define("10.0.0.1", port))[1] for port in ("8080", "8081")]
        self.assertEqual(len(set(ids)), 2)
        one = define("10.0.0.1", "80", "1967")
        self.assertIn('"http://10.0.0.1:80/"', one)
        self.assertIn('"http://10.0.0.1:1967/health"', one)
        self.assertIn('"http://[2001:db8::1]:80/"', define("2001:db8::1", "80"))
        self.assertIn("usage", define("10.0.0.1", status=2))
        self.assertIn("no port", define("10.0.0.1", "http", status=2))
        folder = Path(self.folder.name, "definitions")
        folder.mkdir()
        (folder / "one.hcl").write_text(one)
        (folder / "agent.hcl").write_text((ROOT / "consul/agent.hcl").read_text() + f'data_dir = "{folder}"\n')
        said = self.ceph.run(f"{CACHE}/bin/consul", "validate", folder).stdout
        self.assertIn("Configuration is valid", said)


if __name__ == "__main__":
    unittest.main()
