#!/usr/bin/env python3
"""KV from numpy into the daemon's shared memory, and back.

examples/put_numpy.py --socket /tmp/kvgate.sock          needs numpy and blake3

It does the work of a connector: it attaches, reserves a slot for each chunk of a prompt, writes the KV into the mapped arena,
commits, loads the chunks again and compares them. A second run finds the chunks of the first.
"""

import argparse
import itertools
import json
import mmap
import os
import struct
import uuid

import blake3
import numpy as np
from daemon import PROMPT, SPACE, Daemon

PAGE = 4096


# ---------------------------------------------------------------- names of chunks (docs/FORMAT.md, section 3)


def u32(number):
    return struct.pack("<I", number)


def chain(model_id, tokens, chunk_tokens):
    """The root, and the hash of each full chunk."""

    def keyed(data):
        return blake3.blake3(data, key=bytes.fromhex(model_id)).digest()

    hashes = [keyed(b"\0" + u32(0) + u32(0))]
    for start in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        numbers = b"".join(map(u32, tokens[start : start + chunk_tokens]))
        hashes.append(keyed(b"\1" + hashes[-1] + numbers + u32(0)))
    return [hash.hex() for hash in hashes]


# ---------------------------------------------------------------- the arena (src/arena/front.rs)


class Arena:
    """The daemon's shared memory."""

    def __init__(self, path, boot_id):
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        magic, _version, page, boot = struct.unpack_from("<8sII16s", self.map)
        assert (magic, page, boot.hex()) == (b"KVGARENA", PAGE, boot_id), "this is not the daemon's arena"
        self.table_at, self.slots_at, _end = struct.unpack_from("<QQQ", self.map, 32)

    def bytes(self, offset, length):
        return np.frombuffer(self.map, np.uint8, length, offset)

    def generation(self, slot):
        """It changes when the slot is given to another chunk."""
        return struct.unpack_from("<Q", self.map, self.table_at + (slot - self.slots_at) // PAGE * 8)[0]


# ---------------------------------------------------------------- what an engine does


def computed(number, space):
    """The KV of a chunk, as its payload: plane by plane, each [head][token][row]. Random, and the same in each run."""
    random = np.random.default_rng(number)
    planes = []
    for plane in space["planes"]:
        shape = (plane["heads"], space["chunk_tokens"], plane["row_bytes"] // 2)
        planes.append(random.standard_normal(shape).astype(np.float16).view(np.uint8).reshape(-1))
    return np.concatenate(planes)


def put(daemon, session, arena, space, hashes):
    """Writes the chunks that are not there. Returns how many."""
    chunks = [{"hash": hash, "parent": parent} for parent, hash in itertools.pairwise(hashes)]
    body = {"session": session, "space": space["space_id"], "chunks": chunks}
    reserved = daemon.call("POST", "/v1/store/reserve", body)
    slots = []
    for number, chunk in enumerate(reserved["chunks"]):
        if "skip" in chunk:
            print(f"chunk {number}: {chunk['skip']}")
            continue
        arena.bytes(chunk["offset"], space["chunk_bytes"])[:] = computed(number, space)
        slots.append({"slot": chunk["slot"], "generation": chunk["generation"]})
    committed = daemon.call("POST", "/v1/store/commit", {"session": session, "slots": slots})
    assert all(outcome.get("published") for outcome in committed["slots"]), committed
    return len(slots)


def load(daemon, session, arena, space, hashes):
    """Loads the chunks and compares them. Returns the tiers that they came from."""
    load_id = f"load-{uuid.uuid4()}"
    body = {"session": session, "load_id": load_id, "space": space["space_id"], "hashes": hashes[1:]}
    tiers = []
    with daemon.send_call("POST", "/v1/load", body) as answer:
        for line in map(json.loads, answer):
            if "miss" in line:
                raise SystemExit(f"chunk {line['i']} is a miss: {line['miss']}, {line['detail']}")
            if "end" in line:
                break
            copy = arena.bytes(line["offset"], space["chunk_bytes"]).copy()
            assert arena.generation(line["slot"]) == line["generation"], "the slot was another chunk's"
            assert np.array_equal(copy, computed(line["i"], space)), f"chunk {line['i']} has other bytes"
            tiers.append(line["tier"])
    daemon.call("POST", "/v1/release", {"session": session, "load_id": load_id})
    return tiers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True, help="the daemon's socket")
    args = parser.parse_args()
    daemon, held = Daemon(args.socket), Daemon(args.socket)

    space = daemon.call("PUT", "/v1/spaces", SPACE)
    hashes = chain(space["model_id"], PROMPT, space["chunk_tokens"])

    # The session lasts as long as this answer is read: it is a stream of events.
    events = held.send_call("POST", "/v1/attach", {"instance": f"numpy-{os.getpid()}"})
    attached = json.loads(events.readline())
    session = attached["session"]
    arena = Arena(attached["arena"]["path"], attached["arena"]["boot_id"])

    stored = put(daemon, session, arena, space, hashes)
    tiers = load(daemon, session, arena, space, hashes)
    print(f"{stored} chunks stored, {len(tiers)} loaded from {', '.join(sorted(set(tiers)))}, all equal")

    # Without this the chunks go to S3 all the same, a little later.
    daemon.call("POST", "/v1/flush", {})
    print("S3 has them")


if __name__ == "__main__":
    main()
