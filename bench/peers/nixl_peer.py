"""NIXL's OBJ backend (the AWS SDK for C++) between registered memory and S3; without CUDA and PyTorch."""

import os
import time

import numpy
import peer

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

# Must come after the setting above.
from nixl_cu12._api import nixl_agent, nixl_agent_config

POLL_SECONDS = 0.0005


class Nixl:
    def __init__(self, args) -> None:
        self.args = args
        self.agent = nixl_agent("bench", nixl_agent_config(backends=[]))
        options = {
            "access_key": os.environ["AWS_ACCESS_KEY_ID"],
            "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"],
            "bucket": args.bucket,
            "endpoint_override": args.endpoint,
            "scheme": "http",
            "region": os.environ["AWS_REGION"],
            "use_virtual_addressing": "false",
            "req_checksum": "required",
            # By itself it takes half as many as there are cores, and each waits for its GET.
            "num_threads": str(args.in_flight),
        }
        self.agent.create_backend("OBJ", options)
        size = args.object_size
        self.buffer = numpy.ones(args.objects * size, dtype=numpy.uint8)
        self.address = self.buffer.ctypes.data
        self.agent.register_memory([(self.address, len(self.buffer), 0, "")], "DRAM", backends=["OBJ"])
        objects = [(0, size, i, peer.name(i)) for i in range(args.objects)]
        self.agent.register_memory(objects, "OBJ", backends=["OBJ"])

    def read(self, part_size: int) -> dict:
        size = self.args.object_size
        parts = [(i, at) for i in range(self.args.objects) for at in range(0, size, part_size)]
        lengths = [min(part_size, size - at) for _, at in parts]
        zipped = list(zip(parts, lengths, strict=True))
        memory = self.agent.get_xfer_descs([(self.address + i * size + at, n, 0) for (i, at), n in zipped], "DRAM")
        objects = self.agent.get_xfer_descs([(at, n, i) for (i, at), n in zipped], "OBJ")
        peer.spoil(self.buffer.data)
        meter = peer.Meter()
        transfer = self.agent.initialize_xfer("READ", memory, objects, "bench", b"", backends=["OBJ"])
        state = self.agent.transfer(transfer)
        while state not in ("DONE", "ERR"):
            time.sleep(POLL_SECONDS)
            state = self.agent.check_xfer_state(transfer)
        self.agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise OSError(f"the transfer ended as {state}")
        measured = meter.stop("read", len(parts), len(self.buffer))
        for i in range(self.args.objects):
            peer.check(i, memoryview(self.buffer)[i * size : (i + 1) * size])
        return measured


if __name__ == "__main__":
    peer.serve(Nixl, "nixl-cu12")
