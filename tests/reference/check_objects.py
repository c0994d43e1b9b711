"""Reads what kvgate has written to a bucket and verifies every byte of it with the reference module.

Credentials come from the environment, as boto3 reads them. Exit status 1 when anything is wrong.
With --tokens, a file with a JSON list of lists of tokens: all of their full chunks must be there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgate_format import (
    FormatError,
    Hasher,
    Header,
    Space,
    chunk_key,
    crc64nvme_fast,
    plane_digest,
    space_key,
)

CHUNK = re.compile(r"([0-9a-f]{32})/([0-9a-f]{64})")
SPACE = re.compile(r"([0-9a-f]{32})/space\.json")


@dataclass
class Report:
    spaces: dict[str, Space] = field(default_factory=dict)
    chunks: dict[str, Header] = field(default_factory=dict)
    bytes: int = 0
    probes: int = 0
    tokens_checked: int = 0
    wrong: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return {
            "spaces": len(self.spaces),
            "chunks": len(self.chunks),
            "bytes": self.bytes,
            "probes": self.probes,
            "tokens_checked": self.tokens_checked,
            "wrong": self.wrong,
        }


def listing(client: Any, bucket: str, start: str) -> Iterator[tuple[str, int]]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=start):
        for item in page.get("Contents", []):
            yield item["Key"], item["Size"]


def read_exactly(body: Any, length: int) -> bytes:
    parts, left = [], length
    while left and (part := body.read(left)):
        parts.append(part)
        left -= len(part)
    if left:
        raise FormatError("object ends early")
    return b"".join(parts)


def check_space(client: Any, bucket: str, prefix: str, key: str) -> Space:
    data = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    space = Space.read(json.loads(data))
    if space.canonical != data:
        raise FormatError("is not the canonical JSON with all members")
    if space_key(prefix, space.id) != key:
        raise FormatError(f"is of space {space.id.hex()}, another than its key says")
    return space


def check_chunk(client: Any, bucket: str, prefix: str, key: str, size: int, space: Space) -> Header:
    if size != space.object_len:
        raise FormatError(f"has {size} bytes, not {space.object_len}")
    body = client.get_object(Bucket=bucket, Key=key)["Body"]
    data = read_exactly(body, space.header_len)
    header = Header.parse(data)
    if chunk_key(prefix, header.space_id, header.chunk) != key:
        raise FormatError("header is of another key")
    header.expect(space, header.chunk)
    for number, want in enumerate(header.digests):
        got = plane_digest(header.digest, read_exactly(body, space.plane_len(number)), crc64nvme_fast)
        if got != want:
            plane = space.planes[number]
            raise FormatError(f"plane {number} (layer {plane.layer}, {plane.name}) has another digest")
    if body.read(1):
        raise FormatError("object goes on after the payload")
    return header


def check_all(client: Any, bucket: str, prefix: str) -> Report:
    report = Report()
    start = f"{prefix}/" if prefix else ""
    chunks: list[tuple[str, str, int]] = []
    for key, size in listing(client, bucket, start):
        name = key[len(start) :]
        if match := SPACE.fullmatch(name):
            try:
                report.spaces[match[1]] = check_space(client, bucket, prefix, key)
                report.bytes += size
            except (FormatError, ValueError) as error:
                report.wrong.append(f"{key}: {error}")
        elif match := CHUNK.fullmatch(name):
            chunks.append((match[1], key, size))
        elif name.startswith(".kvgate/"):
            report.probes += 1
        else:
            report.wrong.append(f"{key}: not a key of kvgate's")
    for space_hex, key, size in chunks:
        if space_hex not in report.spaces:
            report.wrong.append(f"{key}: no valid space.json beside it")
            continue
        try:
            report.chunks[key] = check_chunk(client, bucket, prefix, key, size, report.spaces[space_hex])
            report.bytes += size
        except FormatError as error:
            report.wrong.append(f"{key}: {error}")
    return report


def check_tokens(
    report: Report,
    prefix: str,
    space: Space,
    lists: list[list[int]],
    salt: bytes = b"",
    adapter: bytes = b"",
    secret: bytes | None = None,
) -> None:
    if space.hash != "kvgate-v1":
        report.wrong.append(f"--tokens: the hashes of {space.hash} are not kvgate's")
        return
    hasher = Hasher(space.model_id, space.chunk_tokens, secret)
    for number, tokens in enumerate(lists):
        parent = hasher.root(salt, adapter)
        for chunk in hasher.chain(tokens, salt, adapter):
            key = chunk_key(prefix, space.id, chunk)
            report.tokens_checked += 1
            if key not in report.chunks:
                report.wrong.append(f"{key}: of token list {number}, not there or not valid")
            elif report.chunks[key].parent != parent:
                report.wrong.append(f"{key}: of token list {number}, its header has another parent")
            parent = chunk


def chosen_space(report: Report, wanted: str | None) -> Space | None:
    fit = [s for s in report.spaces.values() if wanted is None or s.id.hex().startswith(wanted)]
    if len(fit) == 1:
        return fit[0]
    report.wrong.append(f"--tokens: {len(fit)} spaces fit, name one with --space")
    return None


def s3_client(endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        config=Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--min-chunks", type=int, default=0, help="fewer valid chunks than this are wrong, too")
    parser.add_argument("--tokens", type=Path, help="JSON list of lists of tokens that must be there")
    parser.add_argument("--space", help="the space of --tokens, first hex digits; needed if there are several")
    parser.add_argument("--salt", type=bytes.fromhex, default=b"", help="of --tokens, hex")
    parser.add_argument("--adapter", default="", help="of --tokens, text")
    parser.add_argument("--tenant-secret-env", help="environment variable with the secret of --tokens, hex")
    args = parser.parse_args(argv)
    prefix = args.prefix.strip("/")

    report = check_all(s3_client(args.endpoint), args.bucket, prefix)
    if len(report.chunks) < args.min_chunks:
        report.wrong.append(f"{len(report.chunks)} valid chunks, fewer than {args.min_chunks}")
    if args.tokens and (space := chosen_space(report, args.space)):
        secret = bytes.fromhex(os.environ[args.tenant_secret_env]) if args.tenant_secret_env else None
        lists = json.loads(args.tokens.read_text())
        check_tokens(report, prefix, space, lists, args.salt, args.adapter.encode(), secret)

    if args.json:
        print(json.dumps(report.json(), indent=1))
    else:
        for line in report.wrong:
            print(f"WRONG {line}")
        summary = {name: value for name, value in report.json().items() if name != "wrong"}
        print(", ".join(f"{value:,} {name}" for name, value in summary.items()), f"- {len(report.wrong)} wrong")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
