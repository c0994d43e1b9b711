#!/usr/bin/env python3
"""examples/compose without a container engine: the file is right by the Compose specification, kvgate takes the settings that it
is given there, the Prometheus of it scrapes kvgate's address, and the dashboard asks for metrics that there are.

tests/compose.py --kvgate target/debug/kvgate
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples/compose"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvgate", type=Path, required=True, help="the program")
    kvgate = parser.parse_args().kvgate
    compose = FOLDER / "compose.yaml"
    schema = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", compose]
    subprocess.run(schema, check=True)

    service = yaml.safe_load(compose.read_text())["services"]["kvgate"]
    command = service["command"]
    # `serve` takes these as flags; they are settings, too.
    flags = {"--listen": "KVGATE__API__LISTEN", "--endpoint": "KVGATE__S3__ENDPOINT", "--bucket": "KVGATE__S3__BUCKET"}
    given = {flags[flag]: command[command.index(flag) + 1] for flag in command if flag.startswith("--")}
    others = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE__")}
    subprocess.run([kvgate, "config", "check"], env={**others, **service["environment"], **given}, check=True)

    (job,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    port = given["KVGATE__API__LISTEN"].rpartition(":")[2]
    assert job["static_configs"] == [{"targets": [f"{service['environment']['KVGATE__API__HOSTS']}:{port}"]}], job

    panels = json.loads((FOLDER / "grafana/kvgate.json").read_text())["panels"]
    asked = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"kvgate_\w+", target["expr"])
    }
    known = set(re.findall(r"`(kvgate_\w+)`", (ROOT / "docs/METRICS.md").read_text()))
    assert asked and asked <= known, f"there are no metrics {sorted(asked - known)}"
    print(f"examples/compose is right: {len(panels)} panels over {len(asked)} metrics")


if __name__ == "__main__":
    main()
