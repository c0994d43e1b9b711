#!/usr/bin/env python3
"""The calls of `kvgate serve`, with Python's standard library alone.

examples/daemon.py --socket /tmp/kvgate.sock

Declares a space, looks up which chunks of a prompt are stored, and shows the daemon's state.
"""

import argparse
import http.client
import json
import socket

SPACE = {
    "model": "example/numpy",
    "revision": "1",
    "dtype": "float16",
    "chunk_tokens": 16,
    "mha": {"layers": 2, "heads": 2, "head_dim": 8},
}
PROMPT = list(range(1000, 1100))


class ProblemError(Exception):
    """The daemon refused a call. It says what was wrong and what to do."""


class Daemon(http.client.HTTPConnection):
    """HTTP over the daemon's unix socket."""

    def __init__(self, path, timeout=60):
        super().__init__("kvgate", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)

    def send_call(self, method, path, body=None):
        """The answer, its body not yet read."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        self.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self.getresponse()
        if answer.status >= 400:
            problem = json.load(answer)
            raise ProblemError(f"{problem['detail']} ({problem['code']})")
        return answer

    def call(self, method, path, body=None):
        return json.loads(self.send_call(method, path, body).read())


def chunks_of(mask):
    """The positions of a mask's bits."""
    data = bytes.fromhex(mask)
    return [i for i in range(len(data) * 8) if data[i // 8] >> (i % 8) & 1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True, help="the daemon's socket")
    args = parser.parse_args()
    daemon = Daemon(args.socket)

    space = daemon.call("PUT", "/v1/spaces", SPACE)
    print(f"space {space['space_id']}: {space['chunk_bytes']} bytes a chunk, {len(space['planes'])} planes")

    found = daemon.call("POST", "/v1/lookup", {"space": space["space_id"], "tokens": PROMPT})
    print(f"of {found['chunks']} chunks, {chunks_of(found['mask'])} are stored, {found['prefix']} from the start")
    print(f"not known: {chunks_of(found['unknown'])}")

    status = daemon.call("GET", "/v1/status")
    print(f"kvgate {status['version']}: {status['not_ready'] or 'ready'}, {len(status['sessions'])} engines attached")


if __name__ == "__main__":
    main()
