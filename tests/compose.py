#!/usr/bin/env python3
"""examples/compose without a container engine: the file is right by the Compose specification, kvgate takes the settings that it
is given there, the Prometheus of it scrapes kvgate's address, and the files that are mounted are there.

tests/compose.py --kvgate target/debug/kvgate
"""

import argparse
import os
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
    # The status page is asked for by the host's own names, or is refused.
    names = service["environment"]["KVGATE__API__HOSTS"].split(",")
    assert {"localhost", "127.0.0.1"} < set(names), names
    assert job["static_configs"] == [{"targets": [f"{names[0]}:{port}"]}], job

    services = yaml.safe_load(compose.read_text())["services"].values()
    mounts = [mount.split(":")[0] for one in services for mount in one.get("volumes", ())]
    files = [FOLDER / mount for mount in mounts if mount.startswith(".")]
    assert files and all(file.is_file() for file in files), files
    print(f"examples/compose is right, with {len(files)} files of its own")


if __name__ == "__main__":
    main()
