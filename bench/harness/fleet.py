"""Several radosgw of one Ceph behind one DNS name, and before each some proxies that let through what they are told to."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import servers, tools
from .servers import CREDENTIALS, Ports
from .workload import BUCKET

NAME = "s3.kvgate.test"
DNS_ADDRESS = "127.0.0.53"
RGWS = [f"127.0.0.{11 + number}" for number in range(4)]
# The proxies: three for each radosgw. The first four are one each.
ADDRESSES = [f"127.0.0.{21 + number}" for number in range(12)]
# As good as none.
UNCAPPED = 10_000_000_000


@dataclass(frozen=True)
class Fleet:
    """Where clients find it, and how it is changed while it runs."""

    endpoint: str
    dns_server: str
    folder: Path
    environment: dict[str, str]
    versions: dict[str, str]

    def cap(self, rates: dict[str, int]) -> None:
        """Bytes a second of each address; read by the proxies within a moment."""
        for address, rate in rates.items():
            new = self.folder / f"rate-{address}.new"
            new.write_text(str(rate))
            # They never read half of it.
            new.rename(rate_file(self.folder, address))

    def name(self, addresses: list[str]) -> None:
        """From now on the name stands for these."""
        tools.run(dns_script(), "set", *addresses, env=self.environment)


def rate_file(folder: Path, address: str) -> Path:
    return folder / f"rate-{address}"


def dns_script() -> Path:
    return tools.ROOT / "tests" / "servers" / "dns.sh"


@contextlib.contextmanager
def fleet(folder: Path, ports: Ports) -> Iterator[Fleet]:
    """All of it, uncapped, with an empty bucket."""
    tools.ceph()
    tools.dns()
    floor = tools.built("floor")
    environment = {
        **os.environ,
        "KVGATE_CEPH_DIR": str(folder / "ceph"),
        "KVGATE_CEPH_ADDRS": " ".join(RGWS),
        "KVGATE_CEPH_ALSO": "",
        "KVGATE_CEPH_PORT": str(ports[0]),
        "KVGATE_CEPH_SSL_PORT": "",
        "KVGATE_CEPH_MON": f"{servers.LOOPBACK}:{ports[1]}",
        "KVGATE_CEPH_ACCESS_KEY": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "KVGATE_CEPH_SECRET_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        # Or it would take the name for a bucket's.
        "KVGATE_CEPH_RGW_EXTRA": f"rgw dns name = {NAME}",
        "KVGATE_DNS_DIR": str(folder / "dns"),
        "KVGATE_DNS_ADDR": DNS_ADDRESS,
        "KVGATE_DNS_PORT": str(ports[2]),
        "KVGATE_DNS_NAME": NAME,
    }
    with contextlib.ExitStack() as stack:
        stack.callback(tools.run, tools.ROOT / "ceph" / "down.sh", env=environment)
        tools.run(tools.ROOT / "ceph" / "up.sh", env=environment)
        stack.callback(tools.run, dns_script(), "down", env=environment)
        # It lives on and must not hold our pipe.
        tools.run(dns_script(), "up", *ADDRESSES, env=environment)
        versions = {
            "Ceph": tools.run("radosgw", "--version").split()[2],
            "dnsmasq": tools.run(tools.dnsmasq(), "--version").split()[2],
        }
        running = Fleet(
            endpoint=f"http://{NAME}:{ports[0]}",
            dns_server=f"{DNS_ADDRESS}:{ports[2]}",
            folder=folder,
            environment=environment,
            versions=versions,
        )
        running.cap(dict.fromkeys(ADDRESSES, UNCAPPED))
        for number, address in enumerate(ADDRESSES):
            rgw = RGWS[number % len(RGWS)]
            command = [floor, "cap", "--listen", f"{address}:{ports[0]}", "--to", f"{rgw}:{ports[0]}"]
            command += ["--rate", rate_file(folder, address)]
            log = folder / f"cap-{address}.log"
            stack.enter_context(servers.process(*command, log=log, port=ports[0], address=address))
        (folder / "empty").mkdir()
        servers.upload(f"http://{RGWS[0]}:{ports[0]}", folder / "empty")
        yield running


def environment_of(fleet: Fleet) -> dict[str, str]:
    """The environment of kvgate."""
    return {
        **servers.client_environment(),
        "KVGATE__S3__ENDPOINT": fleet.endpoint,
        "KVGATE__S3__BUCKET": BUCKET,
        "KVGATE__DNS__SERVERS": fleet.dns_server,
    }
