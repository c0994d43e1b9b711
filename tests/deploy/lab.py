"""Real servers for the tests of this folder: a Ceph of ceph/up.sh beside that of other tests, and processes that end with
the test."""

import os
import re
import shlex
import subprocess
import time
from pathlib import Path

import boto3

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("KVGATE_TEST_CACHE", Path.home() / ".cache/kvgate-tests"))
KVGATE = Path(os.environ.get("KVGATE_TEST_BIN", ROOT / "target/debug/kvgate")).resolve()
PORT = 7480


def until(what, seconds=60, every=0.05):
    """What `what()` answers first that is not false. An error is told with the last answer."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > deadline:
            raise AssertionError(f"it does not come to pass within {seconds} s: {found!r}")
        time.sleep(every)
    return found


class Ceph:
    """One monitor, one OSD, a radosgw on each address. Its commands run with its environment."""

    def __init__(self, number, addresses, **settings):
        """`number`: no other test's."""
        self.addresses = addresses
        folder = f"{os.environ.get('TMPDIR', '/tmp')}/kvgate-ceph-{number}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("KVGATE_CEPH_", "AWS_"))},
            "KVGATE_CEPH_DIR": folder,
            "KVGATE_CEPH_ADDRS": " ".join(addresses),
            "KVGATE_CEPH_ALSO": "",
            "KVGATE_CEPH_MON": f"127.0.0.1:{16790 + number}",
            "KVGATE_CEPH_PORT": str(PORT),
            "CEPH_CONF": f"{folder}/ceph.conf",
            **settings,
        }
        self.run(ROOT / "ceph/up.sh")
        lines = Path(folder, "env").read_text().splitlines()
        self.environment |= dict(shlex.split(line)[1].split("=", 1) for line in lines)

    def run(self, *command, check=True, **more):
        environment = {**self.environment, **more}
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
        if check and done.returncode:
            raise AssertionError(f"{shlex.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def s3(self, address, keys=None):
        """By a gateway; `keys`: as radosgw-admin tells them, not set: the lab's own user's."""
        return boto3.client(
            "s3",
            endpoint_url=f"http://{address}:{PORT}",
            aws_access_key_id=keys["access_key"] if keys else self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["secret_key"] if keys else self.environment["AWS_SECRET_ACCESS_KEY"],
            region_name="default",
        )

    def rgw(self, action, address):
        self.run(ROOT / "ceph/rgw.sh", action, address)

    def end(self):
        self.run(ROOT / "ceph/down.sh")


class Process:
    """A program that runs until the test ends, and may be killed and started again."""

    def __init__(self, folder, name, command, ready, **environment):
        """`ready`: answers true when it may be used."""
        self.log = Path(folder) / f"{name}.log"
        self.command, self.ready = list(map(str, command)), ready
        self.environment = {**os.environ, **environment}
        self.process = None
        self.start()

    def start(self):
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log)
        try:
            until(lambda: self.process.poll() is not None or self.ready(), 60)
        except AssertionError:
            self.kill()
            raise AssertionError(self.log.read_text()[-4000:]) from None
        if self.process.poll() is not None:
            raise AssertionError(self.log.read_text()[-4000:])

    def kill(self):
        self.process.kill()
        self.process.wait()


def shown(page):
    """The commands of a page's blocks of sh, joined where they go on in the next line."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
