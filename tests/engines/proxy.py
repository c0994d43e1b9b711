"""Between an engine and its gateway, or a gateway and S3: python proxy.py LISTEN TARGET [--delay SECONDS] [--kill PID] [--relent]

LISTEN and TARGET are paths of unix sockets, or host:port. --delay: each answer comes so late. --kill: the first load is told
of one chunk, then this process is killed and everything is cut. --relent: slots are told with another generation than they
have, as if they had become another chunk's."""

import argparse
import asyncio
import contextlib
import os
import re
import signal

READ = 1 << 16
GENERATION = re.compile(rb'("generation":\d*)(\d)')
"""Its last digit."""


async def main(arguments):
    async def serve(reader, writer):
        try:
            upstream, back = await connect(arguments.target)
        except OSError:
            writer.close()
            return
        loads = asyncio.Event()
        with contextlib.suppress(OSError):
            await asyncio.gather(
                pump(reader, back, lambda block: loads.set() if b"POST /v1/load" in block else None),
                answers(upstream, writer, arguments, loads),
            )

    if "/" in arguments.listen:
        server = await asyncio.start_unix_server(serve, arguments.listen)
    else:
        host, port = arguments.listen.rsplit(":", 1)
        server = await asyncio.start_server(serve, host, int(port))
    await server.serve_forever()


async def connect(target):
    if "/" in target:
        return await asyncio.open_unix_connection(target)
    host, port = target.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def pump(reader, writer, look):
    while block := await reader.read(READ):
        look(block)
        writer.write(block)
        await writer.drain()
    writer.close()


async def answers(reader, writer, arguments, loads):
    while block := await reader.read(READ):
        if arguments.delay:
            await asyncio.sleep(arguments.delay)
        if arguments.kill and loads.is_set() and (told := block.find(b'"slot"')) >= 0:
            writer.write(block[: block.index(b"\n", told) + 1])
            await writer.drain()
            os.kill(arguments.kill, signal.SIGKILL)
            os._exit(0)
        if arguments.relent:
            block = GENERATION.sub(lambda told: told[1] + bytes([told[2][0] ^ 1]), block)
        writer.write(block)
        await writer.drain()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("listen")
    parser.add_argument("target")
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--relent", action="store_true")
    asyncio.run(main(parser.parse_args()))
