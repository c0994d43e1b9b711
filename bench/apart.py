#!/usr/bin/env python3
# ruff: noqa: E402
"""Prefill and decode apart: how long after a prefill's store another engine finds the prompt, on the same node and on another.

bench/apart.py --endpoint URL --bucket NAME [--rounds 5] [--peers] [--save]     with the Python of an environment that has the wheel and numpy

Two gateways stand for two nodes; credentials come from the environment. A prompt is stored by the first one's Python API, and
both are asked until they say that all of it is there. A node that asks before S3 has a chunk goes by that for
`[lookup] absent_ttl`, unless it may ask the other node (`--peers`)."""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "engines"))

import kvgate
import numpy as np
from gateway import Gateway

# As Llama 3.1 8B: 32 MiB a chunk of 256 tokens.
SHAPE = {"layers": 32, "heads": 8, "head_dim": 128}
CHUNK_TOKENS = 256
GIVE_UP_SECONDS = 60
PEERS = [f"127.0.0.1:{port}" for port in (9481, 9482)]


def measure(here, there, space, chunks, is_asked_at_once):
    """Seconds after the store until this node has all of the prompt, until S3 has, and until the other node finds it."""
    tokens = np.random.default_rng().integers(0, 100_000, chunks * CHUNK_TOKENS, np.uint32)
    kv = np.ones((SHAPE["layers"], 2, len(tokens), SHAPE["heads"], SHAPE["head_dim"]), np.uint16)
    stored = here.store_from(space, tokens, kv)
    since = time.monotonic()
    if stored.tokens < len(tokens):
        raise SystemExit(f"the gateway has no room for {chunks} chunks")
    times = {"same_node": until(here, space, tokens, since)}
    if is_asked_at_once:
        times["other_node"] = until(there, space, tokens, since)
        here.flush()
    else:
        here.flush()
        times["s3"] = time.monotonic() - since
        times["other_node"] = until(there, space, tokens, since)
    return times


def until(gateway, space, tokens, since):
    while time.monotonic() - since < GIVE_UP_SECONDS:
        if gateway.lookup(space, tokens).tokens == len(tokens):
            return time.monotonic() - since
        time.sleep(0.001)
    raise SystemExit(f"not found after {GIVE_UP_SECONDS} s: is that bucket written to?")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="each node may read from the other's memory")
    parser.add_argument("--save", action="store_true", help="writes bench/results/apart-DATE.md and .json")
    args = parser.parse_args()
    space = kvgate.space(
        model="kvgate/apart", revision=os.urandom(8).hex(), dtype="bfloat16", chunk_tokens=CHUNK_TOKENS, **SHAPE
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvgate-apart-") as folder:
        s3 = ["--endpoint", args.endpoint, "--bucket", args.bucket, "--prefix", f"apart-{os.getpid()}"]
        nodes = [Gateway(folder, name, s3) for name in ("prefill", "decode")]
        try:
            os.environ["KVGATE__ARENA__SIZE"] = "2GiB"
            for node, listen in zip(nodes, PEERS, strict=True):
                if args.peers:
                    token = Path(folder) / "token"
                    token.write_text("apart\n")
                    os.environ |= {
                        "KVGATE__PEERS__MEMBERS": ",".join(PEERS),
                        "KVGATE__PEERS__LISTEN": listen,
                        "KVGATE__PEERS__TOKEN_FILE": str(token),
                    }
                node.start()
            with kvgate.connect(nodes[0].socket) as here, kvgate.connect(nodes[1].socket) as there:
                for chunks in (1, 4, 8):
                    both = {}
                    for name, is_asked_at_once in (("later", False), ("at_once", True)):
                        times = [measure(here, there, space, chunks, is_asked_at_once) for _ in range(args.rounds)]
                        both[name] = {key: statistics.median(one[key] for one in times) for key in times[0]}
                    rows.append({"chunks": chunks, **both})
                    print(rows[-1], flush=True)
        finally:
            for node in nodes:
                node.end()
    name = f"apart{'-peers' if args.peers else ''}-{date.today()}"
    command = f"bench/apart.py --rounds {args.rounds}{' --peers' if args.peers else ''}"
    text = f"# {name}\n\nMedians of {args.rounds} rounds, seconds after the store. `{command}`\n\n"
    text += "| prompt | KV | the same node | S3 has it | another node, asked then | another node, asked at once |\n"
    text += "|---|---:|---:|---:|---:|---:|\n"
    for row in rows:
        chunks, later = row["chunks"], row["later"]
        times = (later["same_node"], later["s3"], later["other_node"], row["at_once"]["other_node"])
        text += (
            f"| {chunks * CHUNK_TOKENS} tokens | {chunks * 32} MiB | {' | '.join(f'{time:.3f}' for time in times)} |\n"
        )
    print(text)
    if args.save:
        results = ROOT / "bench" / "results" / name
        results.with_suffix(".md").write_text(text)
        results.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
