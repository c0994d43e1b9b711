#!/usr/bin/env python3
"""What release/build.sh has made, as its users get it: each wheel in a fresh environment of each Python, without Rust, and the
archive unpacked into an empty folder.

tests/release.py --built FOLDER                       with every Python from 3.10 on that this machine has
tests/release.py --built FOLDER --python python3.14   with this one
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION = subprocess.run(
    [ROOT / "release/build.sh", "version"], capture_output=True, text=True, check=True
).stdout.strip()
MACHINE = platform.machine()
OLDEST = (3, 10)
built = Path()
pythons = []


def found_pythons():
    """One for each minor version, those of pyenv too."""
    folders = [*os.environ["PATH"].split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    found = {}
    for program in (path for folder in folders for path in Path(folder).glob("python3*")):
        if not re.fullmatch(r"python3(\.\d+)?", program.name):
            continue
        says = subprocess.run(
            [program, "-c", "import sys, ensurepip, venv; print(*sys.version_info[:2])"], capture_output=True, text=True
        )
        if says.returncode == 0 and (version := tuple(map(int, says.stdout.split()))) >= OLDEST:
            found.setdefault(version, program)
    return [found[version] for version in sorted(found)]


def run(command, **options):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, **options)
    if result.returncode:
        raise AssertionError(f"{command}\nstatus {result.returncode}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.stdout


def one(pattern):
    (path,) = built.glob(pattern)
    return path


class Test(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)


class WheelTest(Test):
    def test_the_demo_passes_in_a_fresh_environment_without_rust(self):
        wheel = one(f"kvgate-{VERSION}-*_{MACHINE}.whl")
        self.assertTrue(pythons, "no Python from 3.10 on has venv")
        for python in pythons:
            with self.subTest(python):
                self.install_and_demo(python, wheel)

    def install_and_demo(self, python, wheel):
        began = time.monotonic()
        home = self.folder / f"with-{Path(python).resolve().name}"
        run([python, "-m", "venv", home])
        # Nothing but the environment: no Rust, no compiler, no settings.
        outside = {"PATH": str(home / "bin"), "HOME": str(home), "TMPDIR": str(self.folder)}
        self.assertIsNone(shutil.which("cargo", path=outside["PATH"]))
        run([home / "bin/pip", "install", "--quiet", "--no-index", wheel], env=outside)
        self.assertEqual(run([home / "bin/kvgate", "--version"], env=outside).strip(), f"kvgate {VERSION}")
        self.assertEqual(
            run([home / "bin/python", "-c", "import kvgate; print(kvgate.__version__)"], env=outside).strip(), VERSION
        )
        said = run([home / "bin/kvgate", "demo"], env=outside, cwd=self.folder)
        version = run([home / "bin/python", "--version"], env=outside).strip()
        print(f"{version}: installed and shown in {time.monotonic() - began:.0f} s; {said.strip().splitlines()[-1]}")


class ArchiveTest(Test):
    def setUp(self):
        super().setUp()
        shutil.unpack_archive(one(f"kvgate-{VERSION}-{MACHINE}-linux.tar.gz"), self.folder, filter="data")
        self.prefix = self.folder / f"kvgate-{VERSION}-{MACHINE}-linux"

    def test_program_library_and_pages_are_there(self):
        self.assertEqual(run([self.prefix / "bin/kvgate", "--version"]).strip(), f"kvgate {VERSION}")
        environment = {**os.environ, "PKG_CONFIG_PATH": str(self.prefix / "lib/pkgconfig")}
        self.assertEqual(run(["pkg-config", "--modversion", "kvgate"], env=environment).strip(), VERSION)
        for name in (
            "lib/libkvgate.so",
            "include/kvgate.h",
            "share/man/man1/kvgate-serve.1",
            "share/doc/kvgate/LICENSE",
        ):
            self.assertTrue((self.prefix / name).exists(), name)

    def test_bash_completes_the_commands(self):
        script = self.prefix / "share/bash-completion/completions/kvgate"
        ask = (
            f"source {script}; COMP_WORDS=(kvgate ser) COMP_CWORD=1; _kvgate kvgate ser kvgate; echo ${{COMPREPLY[@]}}"
        )
        self.assertEqual(run(["bash", "--norc", "-c", ask]).strip(), "serve")
        for name in ("zsh/site-functions/_kvgate", "fish/vendor_completions.d/kvgate.fish"):
            self.assertIn("serve", (self.prefix / "share" / name).read_text())

    def test_its_bill_of_materials_is_in_it(self):
        inside = self.prefix / "share/doc/kvgate/kvgate.cyclonedx.json"
        self.assertEqual(inside.read_text(), one(f"kvgate-{VERSION}-{MACHINE}-linux.cyclonedx.json").read_text())

    def test_the_demo_passes(self):
        run([self.prefix / "bin/kvgate", "demo"], cwd=self.folder, env={"TMPDIR": str(self.folder)})


class BillOfMaterialsTest(unittest.TestCase):
    """Beside wheel and archive; a scanner finds a crate by its purl, and Cargo.lock says which bytes it was."""

    def setUp(self):
        package = r'name = "(.+)"\nversion = "(.+)"\n(?:source = .+\nchecksum = "(.+)"\n)?'
        found = re.findall(package, (ROOT / "Cargo.lock").read_text())
        self.locked = {(name, version): checksum for name, version, checksum in found}

    def bill(self, pattern):
        text = one(pattern).read_text()
        bill = json.loads(text)
        self.assertEqual((bill["bomFormat"], bill["specVersion"]), ("CycloneDX", "1.5"))
        components = bill["components"]
        for component in components:
            name, version = component["name"], component["version"]
            with self.subTest(f"{name} {version}"):
                checksum = self.locked[name, version]
                self.assertTrue(component["purl"].startswith(f"pkg:cargo/{name}@{version}"), component["purl"])
                self.assertTrue(component["licenses"])
                # Our own crates have none.
                self.assertEqual(
                    [entry["content"] for entry in component.get("hashes", [])], [checksum] if checksum else []
                )
        self.assertEqual(len(bill["dependencies"]), len(components) + 1)
        return text, {component["name"] for component in components}

    def test_the_wheel_s_names_the_crates(self):
        _, names = self.bill(f"kvgate-{VERSION}-*_{MACHINE}.cyclonedx.json")
        self.assertLessEqual({"kvgate", "tokio", "rustls", "ring", "pyo3"}, names)

    def test_the_archive_s_names_the_crates_and_no_folder_of_the_machine(self):
        text, names = self.bill(f"kvgate-{VERSION}-{MACHINE}-linux.cyclonedx.json")
        self.assertLessEqual({"kvgate", "tokio", "rustls", "ring", "s3s"}, names)
        self.assertFalse({"pyo3", "proptest", "stateright"} & names)
        self.assertEqual(set(re.findall(r"file:///[^#?\" ]*", text)), {"file:///kvgate", "file:///kvgate/capi"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--built", type=Path, required=True, help="the folder that release/build.sh wrote into")
    parser.add_argument("--python", action="append", help="a Python to install the wheel into")
    options, rest = parser.parse_known_args()
    built, pythons = options.built.resolve(), options.python or found_pythons()
    unittest.main(argv=[sys.argv[0], *rest])
