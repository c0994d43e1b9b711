"""The servers, all on loopback. Each is a context manager, so that none outlives the bench."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import tools
from .workload import BUCKET, PREFIX, Workload

LOOPBACK = "127.0.0.1"
START_SECONDS_MAX = 30
# Names of the secrets in Ceph; nginx does not look.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kvgateaccess", "AWS_SECRET_ACCESS_KEY": "kvgatesecret0123456789"}


@dataclass(frozen=True)
class Server:
    """Where clients find the objects."""

    name: str
    # Path style.
    endpoint: str
    # Virtual-host style, without a scheme.
    host_style: str
    tls_endpoint: str | None = None
    ca_file: Path | None = None
    # host:port of the floor's server and of the sink, raw and as S3.
    floor: str | None = None
    floor_pid: int | None = None
    sink: str | None = None
    sink_endpoint: str | None = None
    versions: dict[str, str] = field(default_factory=dict)


class Ports:
    """Gives out ports from a base on."""

    def __init__(self, base: int) -> None:
        self.base = base

    def __getitem__(self, offset: int) -> int:
        return self.base + offset


@contextlib.contextmanager
def process(
    *command: str | Path, log: Path, port: int, address: str = LOOPBACK, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """A server in a session of its own, so that Ctrl-C is ours to handle; ready when its port answers."""
    if answers(port, address):
        raise tools.MissingError(f"something else listens on {address}:{port}; --port-base chooses other ports")
    words = [str(word) for word in command]
    with open(log, "wb") as out:
        child = subprocess.Popen(
            words, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True, env=env
        )
    try:
        end = time.monotonic() + START_SECONDS_MAX
        while not answers(port, address):
            if child.poll() is not None or time.monotonic() > end:
                raise tools.MissingError(f"{words[0]} does not start: {log.read_text().strip()[-500:]}")
            time.sleep(0.02)
        yield child
    finally:
        child.terminate()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def answers(port: int, address: str = LOOPBACK) -> bool:
    """Whether something listens there."""
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory for objects, certificates and logs."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with folder(place) as found:
        yield found


@contextlib.contextmanager
def folder(place: str | None = None) -> Iterator[Path]:
    """A folder that is gone afterwards, where temporary files are unless told."""
    found = Path(tempfile.mkdtemp(prefix="kvgate-bench-", dir=place))
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


# A static server that answers what clients of S3 ask besides: listings (of the peers' objects, or of none), and
# errors with a code. It looks at no signature. Bodies go out by sendfile from memory.
NGINX_CONF = """
{user}
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.err warn;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  default_type application/octet-stream;
  sendfile on;
  sendfile_max_chunk 2m;
  tcp_nodelay on;
  keepalive_requests 10000000;
  keepalive_timeout 300s;
  client_max_body_size 0;
  client_body_buffer_size 1m;
  client_body_temp_path {folder}/tmp;
  proxy_temp_path {folder}/tmp;
  fastcgi_temp_path {folder}/tmp;
  uwsgi_temp_path {folder}/tmp;
  scgi_temp_path {folder}/tmp;
  ssl_protocols TLSv1.3;
  ssl_certificate {folder}/tls.crt;
  ssl_certificate_key {folder}/tls.key;
  add_header x-amz-request-id bench always;
  map $args $listing {{ default none; ~prefix={prefix} objects; }}
  server {{
    listen {address}:{http} backlog=1024;
    listen {address}:{https} ssl backlog=1024;
    root {folder}/www;
    location / {{
      if ($args ~ list-type=2) {{ rewrite ^ /.listing/$listing.xml last; }}
      dav_methods PUT DELETE;
      create_full_put_path on;
      error_page 404 @missing;
    }}
    location /.listing/ {{ root {folder}; types {{ application/xml xml; }} }}
    location @missing {{ default_type application/xml; return 404 '<Error><Code>NoSuchKey</Code></Error>'; }}
  }}
  server {{
    listen {address}:{host_style} backlog=1024;
    root {folder}/hosted;
  }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, ports: Ports, workload: Workload) -> Iterator[Server]:
    """nginx, the floor's server and the sink; objects are files in FOLDER/www/BUCKET.

    FOLDER/hosted has those that are asked for in virtual-host style.
    """
    program = tools.nginx()
    objects = folder / "www" / BUCKET
    write_listings(folder / ".listing", workload)
    make_certificate(folder)
    (folder / "tmp").mkdir()
    conf = NGINX_CONF.format(
        user="user root;" if os.geteuid() == 0 else "",
        folder=folder,
        address=LOOPBACK,
        http=ports[0],
        https=ports[1],
        host_style=ports[2],
        prefix=PREFIX,
    )
    (folder / "nginx.conf").write_text(conf)
    floor = tools.built("floor")
    command = [program, "-p", folder, "-e", folder / "nginx.err", "-c", folder / "nginx.conf"]
    version = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(*command, log=folder / "nginx.log", port=ports[0]))
        serve = [floor, "serve", "--listen", f"{LOOPBACK}:{ports[3]}", "--folder", objects]
        floor_pid = stack.enter_context(process(*serve, log=folder / "serve.log", port=ports[3])).pid
        sink = [floor, "sink", "--raw", f"{LOOPBACK}:{ports[4]}", "--http", f"{LOOPBACK}:{ports[5]}"]
        stack.enter_context(process(*sink, log=folder / "sink.log", port=ports[5]))
        yield Server(
            name="nginx",
            endpoint=f"http://{LOOPBACK}:{ports[0]}",
            host_style=f"{BUCKET}:{ports[2]}",
            tls_endpoint=f"https://{LOOPBACK}:{ports[1]}",
            ca_file=folder / "ca.crt",
            floor=f"{LOOPBACK}:{ports[3]}",
            floor_pid=floor_pid,
            sink=f"{LOOPBACK}:{ports[4]}",
            sink_endpoint=f"http://{LOOPBACK}:{ports[5]}",
            versions={"nginx": version.strip().rsplit("/", 1)[-1]},
        )


def write_listings(folder: Path, workload: Workload) -> None:
    """The answers of a listing, as files."""
    folder.mkdir()
    entry = (
        "<Contents><Key>{}</Key><Size>{}</Size><ETag>&quot;0&quot;</ETag>"
        "<LastModified>2022-01-01T00:00:00.000Z</LastModified></Contents>"
    )
    entries = "".join(entry.format(name, workload.object_size) for name in workload.names())
    end = "<IsTruncated>false</IsTruncated></ListBucketResult>"
    (folder / "none.xml").write_text(f"<ListBucketResult>{end}")
    (folder / "objects.xml").write_text(f"<ListBucketResult>{entries}{end}")


def make_certificate(folder: Path) -> None:
    """An authority, and a certificate signed by it: strict clients refuse one certificate that is both."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = folder / "names"
    names.write_text(f"subjectAltName=DNS:localhost,IP:{LOOPBACK}")
    own = ["-keyout", "ca.key", "-out", "ca.crt", "-days", "30", "-subj", "/CN=kvgate bench CA"]
    tools.run("openssl", "req", "-x509", *key, *own, cwd=folder)
    tools.run("openssl", "req", *key, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=localhost", cwd=folder)
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out", "tls.crt", "-days", "30"]
    tools.run("openssl", "x509", "-req", "-in", "tls.csr", *signed, "-extfile", names, cwd=folder)


@contextlib.contextmanager
def ceph(folder: Path, ports: Ports) -> Iterator[Server]:
    """A real Ceph with one radosgw, filled with the objects in FOLDER/www/BUCKET."""
    tools.ceph()
    environment = {
        **os.environ,
        "KVGATE_CEPH_DIR": str(folder / "ceph"),
        "KVGATE_CEPH_ADDRS": LOOPBACK,
        "KVGATE_CEPH_ALSO": "",
        "KVGATE_CEPH_PORT": str(ports[6]),
        "KVGATE_CEPH_SSL_PORT": "",
        "KVGATE_CEPH_MON": f"{LOOPBACK}:{ports[7]}",
        "KVGATE_CEPH_ACCESS_KEY": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "KVGATE_CEPH_SECRET_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        # Any name that is not this one is a bucket's.
        "KVGATE_CEPH_RGW_EXTRA": "rgw dns name = s3.kvgate.test",
    }
    endpoint = f"http://{LOOPBACK}:{ports[6]}"
    try:
        tools.run(tools.ROOT / "ceph" / "up.sh", env=environment)
        upload(endpoint, folder / "www" / BUCKET)
        version = tools.run("radosgw", "--version").split()[2]
        yield Server(
            name="ceph",
            endpoint=endpoint,
            host_style=f"{BUCKET}:{ports[6]}",
            versions={"Ceph": version},
        )
    finally:
        tools.run(tools.ROOT / "ceph" / "down.sh", env=environment)


def upload(endpoint: str, folder: Path) -> None:
    """Puts every file of the folder into the bucket."""
    flags = ["--endpoint", endpoint, "--bucket", BUCKET, "--folder", folder]
    tools.run(tools.built("floor"), "seed", *flags, env=client_environment())


def client_environment() -> dict[str, str]:
    """The environment of clients: no configuration but ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "KVGATE_"))}
    ours = {"AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    # A proxy between two processes of one machine would be measured too.
    return {**kept, **CREDENTIALS, **ours, "NO_PROXY": "*", "no_proxy": "*"}
