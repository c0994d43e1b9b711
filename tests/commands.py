#!/usr/bin/env python3
"""Every command of the README files and of docs/ runs here, in the order of its page, or is listed below with the reason
why not.

tests/commands.py --kvgate target/debug/kvgate                                     what needs no S3 server
tests/commands.py --kvgate target/debug/kvgate --endpoint http://127.0.0.1:7480    all of them; keys from the environment

Names, ports and folders are replaced by this run's own, and sizes by small ones.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    *("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "bench/README.md", "ceph/README.md", "examples/README.md"),
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
]
BLOCK = re.compile(r"^( *)```sh\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
# Where a page has none of its own.
GATEWAY = "kvgate serve --embedded /tmp/kvgate-data --socket /tmp/kvgate.sock --listen 127.0.0.1:9180"
NOT_RUN = {
    "cargo run --release -- demo": "tests/run.sh builds it with the same profile for the archive, and runs that",
    "tests/run.sh": "this runs in it",
    "cargo build": "the program is built before",
    "maturin build": "tests/run.sh builds the wheel",
    "vllm serve": "tests/engines/test_serve.py runs the README's lines for vLLM",
    "python -m sglang.launch_server": "tests/engines/test_sglang.py runs an engine with the README's flags",
    "python3 -c 'import json; print(json.dumps": "tests/engines/test_serve.py",
    "curl -s http://127.0.0.1:8000": "tests/engines/test_serve.py",
    "cargo test": "tests/run.sh runs all tests",
    "cargo install": "tests/servers/install.sh installs it",
    "tests/servers/install.sh": "tests/run.sh runs it",
    "python tests/engines": "tests/run.sh runs it in its environment",
    "ceph/": "tests/run.sh starts and ends the same cluster, its tests call rgw.sh, and tests/deploy/test_ceph.py the rest",
    "ceph orch": "needs cephadm",
    "KVGATE__DNS__SERVERS": "needs Consul; tests/deploy/test_consul.py runs it",
    "consul": "tests/deploy/test_consul.py runs it",
    "curl -sf http://10.67.67.11": "needs Consul; tests/deploy/test_consul.py runs it",
    "dig": "needs Consul; tests/deploy/test_consul.py runs it",
    "env $(grep": "tests/deploy/test_consul.py runs it",
    "KVGATE_CEPH_": "another cluster beside the first; the tests set the same variables",
    "bench/": "a measurement, minutes to an hour; bench/results has its tables",
    "cargo bench": "a measurement, minutes to an hour; bench/results has its tables",
    "examples/": "tests/docs.sh runs it, and tests/engines/test_client.py",
    "capi/install.sh": "tests/capi.sh runs it",
    "gcc": "tests/capi.sh runs it",
    "python -m kvgate.torch_check": "tests/run.sh runs it with the wheel",
    "target/dist/kvgate gpu": "needs a GPU; tests/gpu stands in for the driver",
    "helm ": "tests/helm/test_chart.py renders and lints the chart; no cluster is here",
    "kubectl": "no cluster is here",
    "kvgate config check --config kvgate.yaml": "the file is of a cluster; tests/helm/test_chart.py does it with the chart's",
    "promtool": "tests/helm/test_chart.py runs it",
    "source /tmp/kvgate-ceph/env": "belongs to ceph/up.sh",
    "KVGATE__DNS__SRV": "needs Consul; tests/it/dns.rs asks a DNS server of its own",
    "kvgate demo --bucket BUCKET --region": "needs AWS; tests/aws.sh gives a server of our own AWS's names",
    "kvgate demo --endpoint https://": "needs an account there, and docs/S3.md says that nobody has tried it",
    "pip install": "tests/release.py installs the wheel",
    "sha256sum": "belongs to a release",
    "tar -C /usr/local": "tests/release.py unpacks the archive",
    "docker": "needs an engine and a registry; tests/image.sh builds and runs the image without",
    "release/build.sh": "tests/run.sh calls it",
    "tests/release.py": "tests/run.sh runs it",
    "tests/image.sh": "tests/run.sh full runs it",
    "install -m 0400": "writes to /etc/kvgate; tests/it/keys.rs makes such files",
    "openssl rand": "writes to /etc/kvgate; tests/it/keys.rs makes such files",
    "kvgate gpu": "needs a GPU; tests/gpu stands in for the driver",
}


def commands(page):
    """Of a page, joined where they go on in the next line, without comments."""
    for _, block in BLOCK.findall((ROOT / page).read_text()):
        text = re.sub(r"(\\|\|)\n\s*", lambda end: " " if end[1] == "\\" else "| ", block)
        # A quoted argument may have several lines.
        text = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), text)
        for line in text.splitlines():
            command = re.sub(r"\s+# .*", "", line).strip()
            if command and not command.startswith("#"):
                yield command


class Walk:
    """A page's commands, one after the other, in a folder of their own."""

    def __init__(self, kvgate, endpoint, folder):
        self.endpoint, self.folder = endpoint, Path(folder)
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "kvgate").symlink_to(kvgate.resolve())
        self.environment = {
            **os.environ,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "KVGATE__S3__PREFIX": f"commands-{os.getpid()}-{self.folder.name}",
            "KVGATE__ARENA__PATH": f"/dev/shm/kvgate-commands-{os.getpid()}",
            "KVGATE__ARENA__SIZE": "256MiB",
            "KVGATE__LOAD__RESERVE": "64MiB",
            "KVGATE__STORE__WRITE_BEHIND": "64MiB",
        }
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.listen = f"127.0.0.1:{free.getsockname()[1]}"
        self.daemon = None

    def own(self, command):
        """With this run's names and small sizes."""
        for pattern, text in (
            (r"http://10\.0\.0\.1:7480,http://10\.0\.0\.2:7480", self.endpoint),
            (r"http://(127\.0\.0\.1|s3\.example):7480", self.endpoint),
            (r"127\.0\.0\.1:9180", self.listen),
            (r"(/tmp|/run/kvgate)/kvgate\.sock", f"{self.folder}/kvgate.sock"),
            (r"/tmp/kvgate-data", f"{self.folder}/data"),
            (r"/mnt/nvme(\d)", rf"{self.folder}/nvme\1"),
            (r"64GiB|512GiB", "256MiB"),
            (r"--objects 256 --object-size 64MiB -t 32", "--objects 4 --object-size 1MiB"),
            (r"--objects 256 --object-size 64MiB", "--objects 4 --object-size 1MiB"),
            (r"--time-limit 30s", "--time-limit 1s"),
            (r"--tokens 32768 --rounds 3", "--tokens 256 --rounds 1"),
        ):
            command = re.sub(pattern, lambda _, text=text: _.expand(text), command or "")
        if "kvgate bench" in command:
            if "--endpoint" not in command:
                command += f" --endpoint {self.endpoint}"
            if "--model" in command and "--tokens" not in command:
                command += " --tokens 256"
            elif "--model" not in command and "--objects" not in command:
                command += " --objects 4 --object-size 1MiB"
        if "SPACE_ID" in command:
            # A chunk of the first space.
            spaces = self.listed()["spaces"]
            command = command.replace("SPACE_ID", spaces[0]["space"])
            if "CHUNK_HASH" in command:
                chunks = self.listed("--space", spaces[0]["space"])["chunks"]
                command = command.replace("CHUNK_HASH", chunks[0]["hash"])
        return command

    def listed(self, *more):
        command = ["kvgate", "ls", "--endpoint", self.endpoint, "--bucket", "kvgate-demo", "--json", *more]
        return json.loads(self.run(command).stdout)

    def run(self, command, shell=False):
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command] if shell else command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if result.returncode:
            raise RuntimeError(f"{command}\nstatus {result.returncode}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
        return result

    def step(self, command):
        if "kvgate serve" not in command:
            if ".sock" in command and self.daemon is None:
                self.step(GATEWAY)
            elif "kvgate doctor" in command:
                # It looks at a node before the start: one of before has its arena.
                self.end()
            self.run(self.own(command), shell=True)
            return
        self.end()
        log = self.folder / "serve.log"
        with log.open("w") as file:
            self.daemon = subprocess.Popen(
                ["bash", "-c", f"exec env {self.own(command)}"],
                cwd=self.folder,
                env=self.environment,
                stdout=file,
                stderr=file,
            )
        deadline = time.monotonic() + 60
        while "serves" not in log.read_text():
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command}\n{log.read_text()[-2000:]}")
            time.sleep(0.05)

    def end(self):
        daemon, self.daemon = self.daemon, None
        if daemon is not None:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvgate", type=Path, required=True)
    parser.add_argument("--endpoint", help="an S3 server with a bucket kvgate-demo")
    options = parser.parse_args()
    ran, left, used = 0, {}, set()
    for page in PAGES:
        folder = tempfile.mkdtemp(prefix="kvgate-commands-")
        walk = Walk(options.kvgate, options.endpoint, folder)
        try:
            for command in commands(page):
                prefix = next((prefix for prefix in NOT_RUN if command.startswith(prefix)), None)
                needs_s3 = re.search(r"--endpoint|--bucket", command)
                if prefix is not None:
                    used.add(prefix)
                    left[command] = NOT_RUN[prefix]
                elif needs_s3 and options.endpoint is None:
                    left[command] = "needs an S3 server: --endpoint"
                else:
                    walk.step(command)
                    ran += 1
        except Exception as error:
            sys.exit(f"{page}: {error}")
        finally:
            walk.end()
            shutil.rmtree(folder, ignore_errors=True)
            Path(walk.environment["KVGATE__ARENA__PATH"]).unlink(missing_ok=True)
    if unused := set(NOT_RUN) - used:
        sys.exit(f"no page has these any more, so they need no reason: {', '.join(sorted(unused))}")
    for command, why in left.items():
        print(f"not run: {command[:90]} ({why})")
    print(f"{ran} commands of the docs ran, {len(left)} are listed with a reason")


if __name__ == "__main__":
    main()
