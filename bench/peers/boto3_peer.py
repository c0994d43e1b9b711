"""boto3: a pool of threads, each body read into its place in one buffer."""

from concurrent.futures import ThreadPoolExecutor

import boto3
import peer
from botocore.config import Config


class Boto3:
    def __init__(self, args) -> None:
        self.args = args
        config = Config(max_pool_connections=args.in_flight, s3={"addressing_style": "path"})
        self.s3 = boto3.client("s3", endpoint_url=args.endpoint, config=config)
        self.threads = ThreadPoolExecutor(args.in_flight)
        # Zeroed by hand, so that its pages are there.
        self.buffer = memoryview(bytearray(b"\1") * (args.objects * args.object_size))

    def read(self, part_size: int) -> dict:
        size = self.args.object_size
        parts = [(i, at) for i in range(self.args.objects) for at in range(0, size, part_size)]
        peer.spoil(self.buffer)
        meter = peer.Meter()
        for _ in self.threads.map(lambda part: self.read_part(*part, part_size), parts):
            pass
        measured = meter.stop("read", len(parts), len(self.buffer))
        for i in range(self.args.objects):
            peer.check(i, self.buffer[i * size : (i + 1) * size])
        return measured

    def read_part(self, i: int, at: int, part_size: int) -> None:
        size = self.args.object_size
        end = min(at + part_size, size)
        wanted = {"Range": f"bytes={at}-{end - 1}"} if end - at < size else {}
        body = self.s3.get_object(Bucket=self.args.bucket, Key=peer.name(i), **wanted)["Body"]
        place = self.buffer[i * size + at : i * size + end]
        landed = 0
        while landed < len(place):
            got = body.readinto(place[landed:])
            if not got:
                raise OSError("the body ended early")
            landed += got
        # The end must be read for the connection to be used again.
        body.read()

    def head(self, count: int) -> dict:
        names = [peer.name(i % self.args.objects) for i in range(count)]
        meter = peer.Meter()
        for _ in self.threads.map(lambda name: self.s3.head_object(Bucket=self.args.bucket, Key=name), names):
            pass
        return meter.stop("head", count, 0)


if __name__ == "__main__":
    peer.serve(Boto3, "boto3")
