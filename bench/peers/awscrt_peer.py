"""awscrt, the AWS client in C, as engines use it: what arrives is copied from its buffers to its place."""

import ctypes
import mmap
import os
import threading

import peer
from awscrt import auth, io, s3
from awscrt.http import HttpHeaders, HttpRequest


class Awscrt:
    def __init__(self, args) -> None:
        self.args = args
        self.host = args.endpoint.removeprefix("http://")
        self.loops = io.EventLoopGroup()
        self.credentials = auth.AwsCredentialsProvider.new_static(
            os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        )
        # It splits objects into parts itself, by a size that belongs to the client.
        self.clients: dict[int, s3.S3Client] = {}
        size = args.objects * args.object_size
        self.buffer = mmap.mmap(-1, size)
        self.buffer.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        # So that its pages are there.
        ctypes.memset(self.address, 1, size)

    def client(self, part_size: int) -> s3.S3Client:
        if part_size not in self.clients:
            region = os.environ["AWS_REGION"]
            self.clients[part_size] = s3.S3Client(
                bootstrap=io.ClientBootstrap(self.loops, io.DefaultHostResolver(self.loops)),
                region=region,
                signing_config=s3.create_default_s3_signing_config(region=region, credential_provider=self.credentials),
                tls_mode=s3.S3RequestTlsMode.DISABLED,
                part_size=part_size,
            )
        return self.clients[part_size]

    def read(self, part_size: int) -> dict:
        args, size = self.args, self.args.object_size
        parts = -(-size // part_size)
        client = self.client(part_size)
        turns = threading.Semaphore(max(1, args.in_flight // parts))
        peer.spoil(memoryview(self.buffer))
        meter = peer.Meter()
        requests = []
        for i in range(args.objects):
            turns.acquire()
            request = self.get(client, i)
            request.finished_future.add_done_callback(lambda _: turns.release())
            requests.append(request)
        for request in requests:
            request.finished_future.result()
        measured = meter.stop("read", args.objects * parts, args.objects * size)
        for i in range(args.objects):
            peer.check(i, memoryview(self.buffer)[i * size : (i + 1) * size])
        return measured

    def get(self, client: s3.S3Client, i: int) -> s3.S3Request:
        start = self.address + i * self.args.object_size
        headers = HttpHeaders([("Host", self.host)])
        return client.make_request(
            type=s3.S3RequestType.GET_OBJECT,
            request=HttpRequest("GET", f"/{self.args.bucket}/{peer.name(i)}", headers),
            on_body=lambda chunk, offset, **_: ctypes.memmove(start + offset, chunk, len(chunk)),
        )


if __name__ == "__main__":
    peer.serve(Awscrt, "awscrt")
