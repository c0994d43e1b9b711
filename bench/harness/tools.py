"""Installs what the bench needs and is missing. Everything lands in a cache outside the checkout."""

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
CACHE = Path(os.environ.get("KVGATE_BENCH_CACHE", Path.home() / ".cache" / "kvgate-bench"))
WARP_VERSION = "v1.6.1"
# Characters of a program's last line that are told.
LAST_WORDS = 300


class MissingError(Exception):
    """Something that can't be had here, with the reason."""


class FailedError(Exception):
    """A run that did not do what it should; with the reason."""


def run(*command: str | Path, **options) -> str:
    """The command's output. Fails with the last line that it said."""
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True, **options)
    except FileNotFoundError as error:
        raise MissingError(f"there is no {command[0]}") from error
    except subprocess.CalledProcessError as error:
        said = [line for line in (error.stderr + error.stdout).splitlines() if line.strip()]
        raise MissingError(f"{Path(command[0]).name}: {said[-1].strip()[:LAST_WORDS] if said else error}") from error
    return done.stdout


def reason(error: Exception) -> str:
    """The error's text. With its name if it is none of ours: some errors have nothing else."""
    meant = isinstance(error, (MissingError, FailedError))
    return str(error) if meant else f"{type(error).__name__}: {error}"


def say(*words: object) -> None:
    """For the person who waits. The standard output is the table's."""
    print(*words, file=sys.stderr, flush=True)


@functools.cache
def python(name: str) -> Path:
    """The Python of a virtual environment with bench/requirements/NAME.txt, made again when that has changed.

    The files name every package that is needed and no other: dependencies are not looked up, or what needs PyTorch
    would bring the whole of CUDA.
    """
    wanted = BENCH / "requirements" / f"{name}.txt"
    venv = CACHE / name
    stamp = venv / "requirements.txt"
    interpreter = venv / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted.read_text():
        return interpreter
    say(f"installing {wanted.relative_to(ROOT)} into {venv}")
    shutil.rmtree(venv, ignore_errors=True)
    # The versions are known to go together on this one, Debian 12's.
    run(shutil.which("python3.11") or sys.executable, "-m", "venv", venv)
    pip = [
        interpreter,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--no-compile",
    ]
    run(*pip, "--no-deps", "-r", wanted)
    if name == "lmcache":
        say("making stand-ins for CUDA's libraries")
        run(sys.executable, BENCH / "harness" / "cuda_stubs.py", next(venv.glob("lib/python*/site-packages")))
    shutil.copy(wanted, stamp)
    return interpreter


@functools.cache
def nginx() -> Path:
    """Debian's program, taken out of its package: nothing is installed, no service is started."""
    found = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if found:
        return Path(found)
    program = CACHE / "nginx" / "usr" / "sbin" / "nginx"
    if not program.exists():
        folder = CACHE / "nginx"
        folder.mkdir(parents=True, exist_ok=True)
        say(f"taking nginx out of its Debian package into {folder}")
        try:
            run("apt-get", "download", "nginx", cwd=folder)
        except MissingError:
            as_root = [] if os.geteuid() == 0 else ["sudo"]
            run(*as_root, "apt-get", "update", "-qq")
            run("apt-get", "download", "nginx", cwd=folder)
        package = max(folder.glob("nginx_*.deb"), key=os.path.getmtime)
        run("dpkg-deb", "-x", package, folder)
    return program


@functools.cache
def warp() -> Path:
    """MinIO's warp, built from source."""
    found = shutil.which("warp")
    if found:
        return Path(found)
    folder = CACHE / f"warp-{WARP_VERSION}"
    if not (folder / "warp").exists():
        if not shutil.which("go"):
            raise MissingError("it is built from source and there is no `go` on PATH")
        say(f"building warp {WARP_VERSION}")
        environment = {**os.environ, "GOBIN": str(folder), "CGO_ENABLED": "0"}
        run("go", "install", "-trimpath", f"github.com/minio/warp@{WARP_VERSION}", cwd="/", env=environment)
    return folder / "warp"


@functools.cache
def built(name: str) -> Path:
    """A program of this repository: `kvgate`, or the example `floor`."""
    say(f"building {name}")
    kind = ["--example", name] if name == "floor" else ["--bin", name]
    # Its output is for the person who waits.
    if subprocess.run(["cargo", "build", "--profile", "dist", "--quiet", *kind], cwd=ROOT).returncode != 0:
        raise MissingError(f"cargo can't build {name}")
    metadata = json.loads(run("cargo", "metadata", "--format-version=1", "--no-deps", cwd=ROOT))
    folder = Path(metadata["target_directory"]) / "dist"
    return folder / "examples" / name if name == "floor" else folder / name


def locked(crate: str) -> str:
    """The version of a crate that Cargo.lock has."""
    found = re.search(rf'name = "{crate}"\nversion = "(.+)"', (ROOT / "Cargo.lock").read_text())
    return found[1] if found else "unknown"


def ceph() -> None:
    """The programs that ceph/up.sh needs; by the tests' installer, since they are the tests' too."""
    if not all(map(shutil.which, ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin"))):
        run(ROOT / "tests" / "servers" / "install.sh", "ceph")


def dnsmasq() -> str:
    """It is not for everyone's PATH."""
    return shutil.which("dnsmasq", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "dnsmasq"


def dns() -> None:
    """The programs that tests/servers/dns.sh needs."""
    if not shutil.which(dnsmasq()) or not shutil.which("dig"):
        run(ROOT / "tests" / "servers" / "install.sh", "dns")


def hardware() -> dict[str, object]:
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    # The name of a virtual CPU may fit several generations, and the cost of a digest depends on the L2.
    l2 = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu.split(":")[1].strip(),
        "l2": l2.read_text().strip() if l2.exists() else "?",
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }


def machine() -> str:
    """The same in words."""
    known = hardware()
    return (
        f"{known['cpu']}, L2 {known['l2']}, {known['cores']} cores, {known['memory_gib']} GiB, Linux {known['kernel']};"
        f" load average at the end {known['load']}"
    )


def commit() -> str:
    return run("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*", cwd=ROOT).strip()
