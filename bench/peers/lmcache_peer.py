"""LMCache's own S3 connector, on a CPU, as its storage backend calls it. Its keys and its buffers are its own."""

import asyncio
import hashlib
import os
import threading

import peer

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

# Must come after the settings above.
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.s3_connector import S3Connector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

# LMCache's default.
IO_THREADS = 64
CHUNK_TOKENS, HEADS, HEAD_DIM = 256, 4, 128
LAYER_BYTES = 2 * CHUNK_TOKENS * HEADS * HEAD_DIM * torch.bfloat16.itemsize


def key(label: str, i: int) -> CacheEngineKey:
    digest = hashlib.sha256(f"{label} {i}".encode()).digest()
    return CacheEngineKey("bench", 1, 0, int.from_bytes(digest[:8], "big") >> 1, torch.bfloat16)


class LMCache:
    def __init__(self, args) -> None:
        self.args = args
        layers, odd = divmod(args.object_size, LAYER_BYTES)
        if odd:
            raise ValueError(f"the object size must be a multiple of {LAYER_BYTES}, the bytes of a layer")
        self.keys = [key("object", i) for i in range(args.objects)]
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=False,
            # Room for all objects and some more.
            max_local_cpu_size=(args.objects + 8) * args.object_size / peer.GIB,
            extra_config={"save_chunk_meta": False, "s3_region": os.environ["AWS_REGION"], "disable_tls": True},
        )
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(layers, 2, CHUNK_TOKENS, HEADS, HEAD_DIM),
            chunk_size=CHUNK_TOKENS,
        )
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.connector = S3Connector(
            "s3://" + args.endpoint,
            self.loop,
            LocalCPUBackend(config, metadata, dst_device="cpu"),
            IO_THREADS,
            False,
            os.environ["AWS_REGION"],
            False,
            True,
            os.environ["AWS_ACCESS_KEY_ID"],
            os.environ["AWS_SECRET_ACCESS_KEY"],
        )

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def names(self) -> dict:
        """The names that it gives the objects in the bucket."""
        return {"names": [key.to_string().replace("/", "_") for key in self.keys]}

    def read(self, part_size: int) -> dict:
        size = self.args.object_size
        if part_size < size:
            raise ValueError("it reads whole objects only")
        meter = peer.Meter()
        chunks = self.run(self.connector.batched_get(self.keys))
        measured = meter.stop("read", len(chunks), len(chunks) * size)
        for i, chunk in enumerate(chunks):
            if chunk is None:
                raise OSError(f"object {i} did not come")
            peer.check(i, memoryview(chunk.byte_array).cast("B"))
            chunk.ref_count_down()
        return measured

    def lookup(self, count: int) -> dict:
        """Asks for chunks that it knows nothing of and that are not there. One by one: its lookup of many stops at the
        first that is missing, and costs more for each."""
        keys = [key("missing", i) for i in range(count)]
        self.connector.object_size_cache.clear()
        meter = peer.Meter()
        found = sum(map(self.connector.exists_sync, keys))
        measured = meter.stop("lookup", count, 0)
        if found:
            raise ValueError(f"{found} chunks were found that don't exist")
        return measured


if __name__ == "__main__":
    peer.serve(LMCache, "lmcache")
