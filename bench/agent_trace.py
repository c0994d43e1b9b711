#!/usr/bin/env python3
"""A made-up trace of agents with long prompts, in Mooncake's format: for `kvgate replay`, where recorded ones are short.

bench/agent_trace.py | kvgate replay - --block-tokens 256 --nodes 16

Each agent begins with a text that all share and one of its own, and goes on for 60 turns: a prompt is the one before with 1 to 8
blocks of 256 tokens more. Between two turns is a minute on average. The same every time.
"""

import json
import random
from itertools import count, islice

AGENTS, TURNS, BLOCK_TOKENS = 120, 60, 256
SHARED, OWN_MAX = 24, 150
GROWTH = (1, 1, 2, 2, 3, 4, 8)
TURN_MS = 60_000


def main():
    numbers, ids, trace = random.Random(11), count(), []
    shared = list(islice(ids, SHARED))
    for _ in range(AGENTS):
        at, blocks = numbers.randrange(3_600_000), shared + list(islice(ids, numbers.randrange(4, OWN_MAX)))
        for _ in range(TURNS):
            trace.append((int(at), blocks))
            blocks = blocks + list(islice(ids, numbers.choice(GROWTH)))
            at += 2000 + numbers.expovariate(1 / TURN_MS)
    for at, blocks in sorted(trace):
        tokens = len(blocks) * BLOCK_TOKENS
        print(json.dumps({"timestamp": at, "input_length": tokens, "output_length": 0, "hash_ids": blocks}))


if __name__ == "__main__":
    main()
