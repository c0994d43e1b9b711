#!/usr/bin/env python3
"""The version is in Cargo.toml alone ([workspace.package]). What says it once more must say the same.

tests/versions.py
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Where a version stands, and the words around it. A file that is not there says nothing.
COPIES = {
    "Cargo.lock": r'name = "kvgate(?:-capi|-python)?"\nversion = "([^"]+)"',
    "capi/include/kvgate.h": r'Of the library, such as "([^"]+)"',
    "docs/API.md": r'"version": "([^"]+)"',
    "helm/kvgate/Chart.yaml": r'(?m)^(?:appVersion|version): "?([^"\n]+)"?$',
}


def problems():
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
    version = cargo["workspace"]["package"]["version"]
    for path in ("Cargo.toml", "capi/Cargo.toml", "python/Cargo.toml"):
        if tomllib.loads((ROOT / path).read_text())["package"]["version"] != {"workspace": True}:
            yield f"{path}: write version.workspace = true"
    if "version" not in tomllib.loads((ROOT / "python/pyproject.toml").read_text())["project"].get("dynamic", []):
        yield 'python/pyproject.toml: write dynamic = ["version"], so that maturin takes it from Cargo.toml'
    for path, pattern in COPIES.items():
        if not (ROOT / path).exists():
            continue
        said = re.findall(pattern, (ROOT / path).read_text())
        if not said:
            yield f"{path}: no version is found by {pattern}"
        yield from (f"{path}: says {other}, and Cargo.toml {version}" for other in said if other != version)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"(?m)^## (Unreleased|{re.escape(version)}\b)", changelog):
        yield f"CHANGELOG.md: no heading is Unreleased or {version}"


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found) or "every version is Cargo.toml's")
    sys.exit(bool(found))
