#!/usr/bin/env python3
"""A chunk's object, read from S3 by nothing but its format (docs/FORMAT.md).

examples/read_object.py --endpoint http://127.0.0.1:9000 --bucket kv          needs boto3 and blake3

Takes the bucket's first chunk under --prefix, or the one of --key. Checks its key, its header and the digest of each
plane, and prints what it is. Credentials come from the environment, as everywhere.
"""

import argparse
import json
import struct

import blake3
import boto3

KINDS = {1: "full", 2: "window", 3: "chunked", 4: "state"}
DIGESTS = {1: "crc64nvme", 2: "blake3"}
POLYNOMIAL = 0x9A6C9329AC4BC9B5


def crc_table():
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
        yield byte


CRC_TABLE = list(crc_table())


def crc64nvme(data):
    """Plain Python: a second for a few MB."""
    crc = 0xFFFF_FFFF_FFFF_FFFF
    for byte in data:
        crc = CRC_TABLE[crc & 0xFF ^ byte] ^ crc >> 8
    return crc ^ 0xFFFF_FFFF_FFFF_FFFF


def digest(kind, data):
    """In the 32 bytes that a header has for it."""
    if kind == "blake3":
        return blake3.blake3(data).digest()
    return struct.pack("<Q", crc64nvme(data)).ljust(32, b"\0")


def check(is_so, what):
    if not is_so:
        raise SystemExit(f"not a good object: {what}")


def first_chunk(s3, bucket, prefix):
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for found in page.get("Contents", []):
            if len(found["Key"].rsplit("/", 1)[-1]) == 64:
                return found["Key"]
    raise SystemExit(f"there is no chunk in {bucket}/{prefix}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True, help="URL of the S3 server")
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--prefix", default="", help="what the keys begin with")
    parser.add_argument("--key", help="the object's key, instead of the first one that is found")
    args = parser.parse_args()
    s3 = boto3.client("s3", endpoint_url=args.endpoint, region_name="us-east-1")

    def get(key):
        return s3.get_object(Bucket=args.bucket, Key=key)["Body"].read()

    key = args.key or first_chunk(s3, args.bucket, args.prefix)
    folder, chunk = key.rsplit("/", 1)
    space_json, data = get(f"{folder}/space.json"), get(key)

    # Sections 1 and 2: the space's id is a hash of its JSON, and the key has half of it.
    space = json.loads(space_json)
    space_id = blake3.blake3(space_json, derive_key_context="kvgate space v1").digest()
    check(folder.rsplit("/", 1)[-1] == space_id.hex()[:32], "the folder is not the space's id")

    # Section 4: the header.
    magic, version, header_len = struct.unpack_from("<8sII", data)
    check((magic, version) == (b"KVGATE\r\n", 1), "no kvgate object of version 1")
    check(blake3.blake3(data[: header_len - 32]).digest() == data[header_len - 32 : header_len], "header's digest")
    ids = [data[at : at + 32] for at in (16, 48, 80)]
    tokens, planes, payload_len, kind, _width = struct.unpack_from("<IIQII", data, 112)
    of_kv, of_kv_tokens, is_draft = struct.unpack_from("<III", data, 176)
    check(ids[0] == space_id and ids[1].hex() == chunk, "the header is of another chunk")
    check(len(data) == header_len + payload_len, "its length")
    check((tokens, planes) == (space["chunk_tokens"], len(space["planes"])), "its geometry")
    name = KINDS.get(of_kv)
    check(space["kind"] in (name, {name: of_kv_tokens}), "it is of another kind of KV")
    check(is_draft == (space["draft"] != ""), "it is a draft's, or should be")
    print(f"{key}\n  model {space['model']}, revision {space['revision']}, {space['dtype']}, {space['kind']}")
    print(f"  {tokens} tokens, parent {ids[2].hex()[:16]}..., header {header_len}, payload {payload_len} bytes")

    # Section 5: the payload, plane by plane, each [head][token][row].
    # A state has one row a head: the snapshot after the chunk.
    at, rows = header_len, 1 if name == "state" else tokens
    for number, plane in enumerate(space["planes"]):
        length = plane["heads"] * rows * plane["row_bytes"]
        stored = data[256 + 32 * number : 288 + 32 * number]
        check(digest(DIGESTS[kind], data[at : at + length]) == stored, f"the digest of plane {number}")
        shape = f"[{plane['heads']}][{rows}][{plane['row_bytes']} bytes]"
        print(f"  plane {number}: layer {plane['layer']} {plane['name']} {shape} at {at}, {DIGESTS[kind]} is right")
        at += length
    check(at == len(data), "bytes after the last plane")


if __name__ == "__main__":
    main()
