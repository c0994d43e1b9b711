#!/usr/bin/env python3
"""KV from numpy to the gateway and back, by kvgate's Python API (docs/PYTHON.md).

examples/python_api.py --socket /tmp/kvgate.sock          needs the wheel and numpy

What an engine does with a prompt: it looks up how much of its start is there, loads that, computes the rest and stores it. A
second run finds the chunks of the first.
"""

import argparse

import kvgate
import numpy as np

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
PROMPT = list(range(2000, 2100))


def compute(first: int, end: int) -> np.ndarray:
    """The KV of these tokens: [layers, 2, tokens, heads, head_dim]. Random, and the same in each run."""
    whole = np.random.default_rng(1).standard_normal((len(PROMPT), LAYERS, 2, KV_HEADS, HEAD_DIM)).astype(np.float16)
    return whole[first:end].transpose(1, 2, 0, 3, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", help="the daemon's socket; without it the configured one")
    args = parser.parse_args()

    space = kvgate.space(
        model="example/python",
        revision="1",
        dtype="float16",
        layers=LAYERS,
        heads=KV_HEADS,
        head_dim=HEAD_DIM,
        chunk_tokens=16,
    )
    kv = np.zeros((LAYERS, 2, len(PROMPT), KV_HEADS, HEAD_DIM), np.float16)

    with kvgate.connect(args.socket) as gateway:
        hit = gateway.lookup(space, PROMPT)
        loaded = gateway.load_into(hit, kv)
        print(f"{loaded.tokens} of {len(PROMPT)} tokens loaded, from {', '.join(sorted(set(hit.tiers))) or 'nowhere'}")

        kv[:, :, loaded.tokens :] = compute(loaded.tokens, len(PROMPT))
        stored = gateway.store_from(space, PROMPT, kv)
        print(f"{stored.new_chunks} chunks stored; the gateway has {stored.tokens} tokens")

    assert np.array_equal(kv, compute(0, len(PROMPT))), "the KV is not what was computed"
    print("the KV is what was computed")


if __name__ == "__main__":
    main()
