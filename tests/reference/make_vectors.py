"""Writes tests/data/vectors.json, or with --example prints the numbers of docs/FORMAT.md, section 7."""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

from blake3 import blake3
from kvgate_format import (
    DIGEST_KINDS,
    FORMAT,
    PROTECTED,
    Extra,
    Hasher,
    Header,
    Kind,
    Space,
    SpaceKeys,
    chunk_key,
    crc64nvme,
    encrypted,
    mask,
    plane_digests,
    run_agrees,
    run_text,
    seal,
    space_key,
)

VECTORS = Path(__file__).resolve().parent.parent / "data" / "vectors.json"
INLINE_CANONICAL = 16_384
INLINE_OFFSETS = 256
INLINE_HEADERS = (
    "tiny",
    "signed",
    "encrypted",
    "k-and-v",
    "v-wider",
    "fp8-ds-mla",
    "layers-with-gaps",
    "window",
    "draft-state",
)
REVISION = "9216db5781bf21249d130ec9da846c4624c16137"
SECRET = bytes(range(32))
KEY = bytes(range(100, 132))
SALT = bytes(range(200, 224))

SWAP = b"swap"
"""Stands for the other plane's digest."""

Json = dict[str, Any]

ABOUT = {
    "bytes": "byte[i] = (i * 131 + (i >> 8) * 17 + 7) & 0xff, from i = 0",
    "tokens": "token[i] = (a * i + b) mod m for i in 0..n, in integers wide enough; or an explicit list",
    "bad_headers": "the header of that name; bytes at each offset replaced; header digest made anew if reseal",
    "null": "canonical, plane_offsets, header are null where they would be long; their digests never are",
}


def pattern(n: int) -> bytes:
    """The byte generator, which repeats after 65,536."""
    once = bytes((i * 131 + (i >> 8) * 17 + 7) & 0xFF for i in range(min(n, 1 << 16)))
    return (once * (n // (1 << 16) + 1))[:n]


def generated(tokens: Json | list[int]) -> list[int]:
    if isinstance(tokens, list):
        return tokens
    return [(tokens["a"] * i + tokens["b"]) % tokens["m"] for i in range(tokens["n"])]


# ---------------------------------------------------------------- spaces


def given(**members: Any) -> Json:
    return {"model": "test/model", "revision": REVISION, **members}


def plane(layer: int, name: str, heads: int, row_bytes: int) -> Json:
    return {"layer": layer, "name": name, "heads": heads, "row_bytes": row_bytes}


def mha(layers: int, heads: int, head_dim: int, **more: int) -> Json:
    return {"layers": layers, "heads": heads, "head_dim": head_dim, **more}


STATE_PLANES = [plane(0, "state", 2, 12), plane(2, "state", 2, 12), plane(3, "replicated", 1, 4)]


def space_inputs() -> dict[str, Json]:
    small = mha(2, 2, 4)
    inputs = {
        "tiny": given(dtype="float16", chunk_tokens=4, mha=small),
        "tiny-one-token": given(chunk_tokens=1, mha=mha(1, 1, 1)),
        "tiny-16": given(chunk_tokens=16, mha=small),
        "all-defaults": given(mha=mha(1, 8, 128)),
        "all-given": given(
            format=1,
            dtype="bfloat16",
            chunk_tokens=256,
            tenant="",
            hash="kvgate-v1",
            planes=[plane(0, "kv", 8, 512)],
            shard="whole",
            extra={},
        ),
        "v-wider": given(chunk_tokens=8, mha=mha(2, 3, 4, v_head_dim=10)),
        "v-narrower": given(dtype="fp8_e4m3", chunk_tokens=8, mha=mha(2, 2, 192, v_head_dim=128)),
        "mla": given(model="deepseek-ai/DeepSeek-V3", mla={"layers": 2, "latent_dim": 576}),
        "mla-61": given(model="deepseek-ai/DeepSeek-V3", chunk_tokens=64, mla={"layers": 61, "latent_dim": 576}),
        "fp8-ds-mla-short": given(dtype="fp8_ds_mla", chunk_tokens=4, mla={"layers": 2, "latent_dim": 576}),
        "fp8-ds-mla": given(dtype="fp8_ds_mla", chunk_tokens=16, planes=[plane(i, "latent", 1, 656) for i in range(3)]),
        "one-layer": given(dtype="float32", chunk_tokens=16, mha=mha(1, 1, 2)),
        "80-layers": given(model="meta-llama/Llama-3.1-70B", mha=mha(80, 8, 128)),
        "200-layers": given(dtype="int8", chunk_tokens=2, mha=mha(200, 1, 1)),
        "119-planes": given(dtype="int8", chunk_tokens=1, mha=mha(119, 1, 1)),
        "118-planes": given(dtype="int8", chunk_tokens=1, mha=mha(118, 1, 1)),
        "4096-planes": given(dtype="int8", chunk_tokens=1, mha=mha(4096, 1, 1)),
        "k-and-v": given(
            dtype="float16",
            chunk_tokens=4,
            planes=[plane(i, n, 2, w) for i in range(2) for n, w in (("k", 8), ("v", 16))],
        ),
        "v-before-k": given(
            dtype="float16", chunk_tokens=4, planes=[plane(i, n, 2, 8) for i in range(2) for n in ("v", "k")]
        ),
        "layers-with-gaps": given(
            chunk_tokens=4, planes=[plane(3, "kv", 2, 8), plane(7, "kv", 1, 8), plane(65_535, "kv", 2, 4)]
        ),
        "names": given(
            chunk_tokens=4,
            planes=[plane(0, "a" * 64, 1, 2), plane(0, "k_0.x-y", 1, 2), plane(0, ".", 1, 2), plane(1, "9", 1, 2)],
        ),
        "largest-numbers": given(dtype="int8", chunk_tokens=65_536, planes=[plane(65_535, "kv", 65_536, 1)]),
        "largest-row": given(dtype="int8", chunk_tokens=4096, planes=[plane(0, "kv", 1, 1_048_576)]),
        "tenant": given(chunk_tokens=4, tenant="acme", mha=small),
        "signed": given(dtype="float16", chunk_tokens=4, tenant="acme", protection="signed", mha=small),
        "signed-state": given(
            kind="state",
            dtype="bytes",
            chunk_tokens=4,
            format=2,
            protection="signed",
            planes=STATE_PLANES,
        ),
        "encrypted": given(dtype="float16", chunk_tokens=4, tenant="acme", protection="encrypted", mha=small),
        "none-given": given(dtype="float16", chunk_tokens=4, protection="none", mha=small),
        "tenant-unicode": given(chunk_tokens=4, tenant="Ümläut/租户 ", mha=small),
        "shard-tensor": given(chunk_tokens=4, shard={"heads": [2, 4], "layers": [0, 2]}, mha=small),
        "shard-pipeline": given(
            chunk_tokens=4,
            shard={"heads": [0, 2], "layers": [2, 4]},
            planes=[plane(2, "kv", 2, 16), plane(3, "kv", 2, 16)],
        ),
        "sglang": given(hash="sglang-sha256", chunk_tokens=64, mha=small),
        "vllm-pages": given(dtype="pages", hash="vllm-sha256", planes=[plane(0, "page", 1, 2_097_152)]),
        "model-unicode": given(model="modèle/名前-\U0001f600", chunk_tokens=4, mha=small),
        "model-combining": given(model="mode\u0300le", chunk_tokens=4, mha=small),
        "model-composed": given(model="mod\u00e8le", chunk_tokens=4, mha=small),
        "model-quoted": given(model='a"b\\c/d', revision='sha256:0123"\\', chunk_tokens=4, mha=small),
        "model-control": given(model="tab\there\x7f", chunk_tokens=4, mha=small),
        "model-512-bytes": given(model="é" * 256, revision="r" * 512, chunk_tokens=4, mha=small),
        "extra": given(
            chunk_tokens=4, extra={"rope": "yarn:4", "Rope": "x", "": "empty name", "kv_scales": ""}, mha=small
        ),
        "extra-all-controls": given(
            chunk_tokens=4,
            extra={"controls": "".join(map(chr, range(0x20))), "\x00\x1f": "\x7f\x80\u2028\u2029\ufeff"},
            mha=small,
        ),
        "extra-utf16-order": given(
            chunk_tokens=4,
            extra={
                "\ue000": "private use: after the surrogates",
                "\U0001f600": "beyond the BMP: D83D DE00",
                "\uffee": "last",
                "\U00010000": "beyond the BMP: D800 DC00",
                "\U0010ffff": "beyond the BMP: DBFF DFFF",
                "\ud7ff": "before the surrogates",
                "a\U0001f600": "2",
                "a\uff5e": "3",
                "a": "0",
                "aa": "1",
            },
            mha=small,
        ),
        "extra-rfc8785": given(
            chunk_tokens=4,
            extra={
                "\u20ac": "Euro Sign",
                "\r": "Carriage Return",
                "\ufb33": "Hebrew Letter Dalet With Dagesh",
                "1": "One",
                "\U0001f600": "Emoji: Grinning Face",
                "\x80": "Control",
                "\u00f6": "Latin Small Letter O With Diaeresis",
            },
            mha=small,
        ),
        "kind-full": given(kind="full", draft="", chunk_tokens=4, mha=small),
        "window": given(kind={"window": 1}, dtype="float16", chunk_tokens=4, mha=small),
        "window-largest": given(kind={"window": 1 << 30}, dtype="float16", chunk_tokens=4, mha=small),
        "chunked": given(kind={"chunked": 8192}, dtype="float16", chunk_tokens=4, mha=small),
        "state": given(kind="state", dtype="bytes", chunk_tokens=4, planes=STATE_PLANES, extra={"state": "conv ssm"}),
        "state-largest": given(kind="state", dtype="int8", planes=[plane(0, "state", 16, 1 << 28)]),
        "draft": given(draft="test/eagle@1", dtype="float16", chunk_tokens=4, mha=mha(1, 2, 4)),
        "draft-window": given(draft="d" * 512, kind={"window": 4096}, dtype="float16", chunk_tokens=4, mha=small),
        "draft-state": given(draft="mtp", kind="state", dtype="float32", chunk_tokens=4, planes=STATE_PLANES),
        "revision-main-within": given(revision="main-2024", chunk_tokens=4, mha=small),
    }
    for dtype in ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "bytes"):
        inputs[f"dtype-{dtype}"] = given(dtype=dtype, chunk_tokens=4, mha=small)
        inputs[f"dtype-{dtype}-mla"] = given(dtype=dtype, chunk_tokens=4, mla={"layers": 2, "latent_dim": 12})
    return inputs


def corners(space: Space) -> list[list[int]]:
    """[plane, head, row, offset] of a few rows."""
    out = []
    for p in sorted({0, len(space.planes) // 2, len(space.planes) - 1}):
        heads, rows = space.planes[p].heads, space.chunk_rows
        for head, row in sorted({(0, 0), (heads // 2, rows // 2), (heads - 1, rows - 1)}):
            out.append([p, head, row, space.row_offset(p, head, row)])
    return out


def space_vector(name: str, value: Json) -> Json:
    space = Space.read(value)
    canonical, offsets = space.canonical, space.plane_offsets
    packed = struct.pack(f"<{len(offsets)}Q", *offsets)
    return {
        "name": name,
        "input": value,
        "canonical": canonical.decode() if len(canonical) <= INLINE_CANONICAL else None,
        "canonical_len": len(canonical),
        "canonical_blake3": blake3(canonical).hexdigest(),
        "space_id": space.id.hex(),
        "model_id": space.model_id.hex(),
        "chunk_rows": space.chunk_rows,
        "planes": len(space.planes),
        "chunk_bytes": space.payload_len,
        "header_len": space.header_len,
        "object_len": space.object_len,
        "plane_offsets": offsets if len(offsets) <= INLINE_OFFSETS else None,
        "plane_offsets_blake3": blake3(packed).hexdigest(),
        "row_offsets": corners(space),
    }


def needed() -> list[Json]:
    """The chunks that are needed at a boundary, half-open."""
    kinds = [
        "full",
        "state",
        *({"window": tokens} for tokens in (1, 2, 17, 18, 33, 128, 1 << 30)),
        *({"chunked": tokens} for tokens in (1, 15, 16, 24, 48, 8192, 1 << 30)),
    ]
    out = []
    for value in kinds:
        for chunk_tokens in (16, 100):
            for boundary in (0, 1, 3, 6, 65_536):
                found = Kind.read(value).needed(boundary, chunk_tokens)
                first = min(found.start, found.stop)
                case = {"kind": value, "chunk_tokens": chunk_tokens, "boundary": boundary}
                out.append({**case, "chunks": [first, found.stop]})
    return out


def invalid_spaces() -> list[Json]:
    good = given(mha=mha(1, 1, 4))

    def but(**members: Any) -> Json:
        return {**good, **members}

    def planes(*items: Any, **members: Any) -> Json:
        return given(planes=list(items), **members)

    def less(name: str) -> Json:
        return {k: v for k, v in good.items() if k != name}

    fine = plane(0, "kv", 1, 16)
    full = plane(0, "kv", 65_536, 1)
    cases: list[tuple[str, Any]] = [
        ("not an object", []),
        ("no model", less("model")),
        ("no revision", less("revision")),
        ("no planes", less("mha")),
        ("extra member", but(engine="vllm")),
        ("null member", but(tenant=None)),
        ("null member", but(planes=None)),
        ("null member", but(model=None)),
        ("format 0", but(format=0)),
        ("format 2 without protection", but(format=2)),
        ("format 1 with protection", but(format=1, protection="signed")),
        ("format 3", but(format=3, protection="signed")),
        ("protection unknown", but(protection="sealed")),
        ("protection null", but(protection=None)),
        ("format a string", but(format="1")),
        ("model empty", but(model="")),
        ("model too long", but(model="m" * 513)),
        ("model too long in bytes", but(model="é" * 257)),
        ("model a number", but(model=7)),
        ("revision empty", but(revision="")),
        ("revision too long", but(revision="r" * 513)),
        ("revision unknown", but(revision="unknown")),
        ("revision main", but(revision="main")),
        ("revision latest", but(revision="latest")),
        ("revision a path", but(revision="/models/qwen")),
        ("revision a path", but(revision="./weights")),
        ("revision a path", but(revision="../weights")),
        ("unknown dtype", but(dtype="float64")),
        ("unknown dtype", but(dtype="")),
        ("unknown dtype", but(dtype="Float16")),
        ("unknown dtype", but(dtype="auto")),
        ("dtype a number", but(dtype=16)),
        ("chunk_tokens 0", but(chunk_tokens=0)),
        ("chunk_tokens negative", but(chunk_tokens=-1)),
        ("chunk_tokens too large", but(chunk_tokens=65_537)),
        ("chunk_tokens fraction", but(chunk_tokens=1.5)),
        ("chunk_tokens a boolean", but(chunk_tokens=True)),
        ("chunk_tokens a string", but(chunk_tokens="256")),
        ("tenant a number", but(tenant=1)),
        ("unknown hash", but(hash="sha256")),
        ("unknown hash", but(hash="")),
        ("unknown kind", but(kind="sliding")),
        ("unknown kind", but(kind="")),
        ("kind in other case", but(kind="Full")),
        ("kind without tokens", but(kind="window")),
        ("kind without tokens", but(kind="chunked")),
        ("kind with tokens", but(kind={"state": 1})),
        ("kind with tokens", but(kind={"full": 1})),
        ("kind with null", but(kind={"state": None})),
        ("kind with null", but(kind={"full": None})),
        ("kind a number", but(kind=1)),
        ("kind null", but(kind=None)),
        ("kind a list", but(kind=["full"])),
        ("kind empty", but(kind={})),
        ("kind of two", but(kind={"window": 128, "chunked": 128})),
        ("window of 0", but(kind={"window": 0})),
        ("window negative", but(kind={"window": -1})),
        ("window too large", but(kind={"window": (1 << 30) + 1})),
        ("window fraction", but(kind={"window": 1.5})),
        ("window a string", but(kind={"window": "128"})),
        ("window null", but(kind={"window": None})),
        ("chunked 0", but(kind={"chunked": 0})),
        ("chunked too large", but(kind={"chunked": (1 << 30) + 1})),
        ("draft a number", but(draft=1)),
        ("draft null", but(draft=None)),
        ("draft too long", but(draft="d" * 513)),
        ("state's row too large", planes(plane(0, "state", 1, (1 << 28) + 4), kind="state", dtype="float32")),
        ("row of a window as large as a state's", planes(plane(0, "kv", 1, 1 << 21), kind={"window": 1})),
        ("planes empty", planes()),
        ("planes an object", given(planes={})),
        ("planes and mha", {**good, "planes": [fine]}),
        ("planes and mla", planes(fine, mla={"layers": 1, "latent_dim": 8})),
        ("mha and mla", but(mla={"layers": 1, "latent_dim": 8})),
        ("mha without layers", but(mha={"heads": 1, "head_dim": 4})),
        ("mha without heads", but(mha={"layers": 1, "head_dim": 4})),
        ("mha without head_dim", but(mha={"layers": 1, "heads": 1})),
        ("mha extra member", but(mha=mha(1, 1, 4, k_head_dim=4))),
        ("mha no layers", but(mha=mha(0, 1, 4))),
        ("mha too many layers", but(mha=mha(4097, 1, 4))),
        ("mha no heads", but(mha=mha(1, 0, 4))),
        ("mha no head_dim", but(mha=mha(1, 1, 0))),
        ("mla extra member", given(mla={"layers": 1, "latent_dim": 8, "heads": 1})),
        ("mla no latent_dim", given(mla={"layers": 1, "latent_dim": 0})),
        ("plane not an object", planes("kv")),
        ("plane lacks name", planes({"layer": 0, "heads": 1, "row_bytes": 16})),
        ("plane lacks layer", planes({"name": "kv", "heads": 1, "row_bytes": 16})),
        ("plane extra member", planes({**fine, "dtype": "int8"})),
        ("plane null member", planes({**fine, "name": None})),
        ("plane name empty", planes(plane(0, "", 1, 16))),
        ("plane name too long", planes(plane(0, "a" * 65, 1, 16))),
        ("plane name upper case", planes(plane(0, "KV", 1, 16))),
        ("plane name character", planes(plane(0, "k/v", 1, 16))),
        ("plane name character", planes(plane(0, "kv\n", 1, 16))),
        ("plane name character", planes(plane(0, "ké", 1, 16))),
        ("row_bytes not multiple", planes(plane(0, "kv", 1, 15))),
        ("row_bytes not multiple", planes(plane(0, "kv", 1, 18), dtype="float32")),
        ("row_bytes 0", planes(plane(0, "kv", 1, 0))),
        ("row_bytes too large", planes(plane(0, "kv", 1, 1_048_578), chunk_tokens=1)),
        ("heads 0", planes(plane(0, "kv", 0, 16))),
        ("heads too large", planes(plane(0, "kv", 65_537, 2), chunk_tokens=1)),
        ("layer too large", planes(plane(65_536, "kv", 1, 16))),
        ("layer negative", planes(plane(-1, "kv", 1, 16))),
        ("planes unsorted", planes(plane(1, "kv", 1, 16), plane(0, "kv", 1, 16))),
        ("planes unsorted", planes(plane(0, "k", 1, 16), plane(1, "k", 1, 16), plane(0, "v", 1, 16))),
        ("duplicate plane", planes(fine, fine)),
        ("duplicate plane", planes(plane(0, "k", 1, 16), plane(0, "v", 1, 16), plane(0, "k", 1, 32))),
        ("payload over 4 GiB", planes(full, plane(1, "kv", 1, 1), dtype="int8", chunk_tokens=65_536)),
        ("payload over 4 GiB", planes(plane(0, "kv", 65_536, 1_048_576), chunk_tokens=65_536)),
        ("shard a string", but(shard="half")),
        ("shard lacks layers", but(shard={"heads": [0, 1]})),
        ("shard extra member", but(shard={"heads": [0, 1], "layers": [0, 1], "ranks": [0, 1]})),
        ("shard range of three", but(shard={"heads": [0, 1, 2], "layers": [0, 1]})),
        ("layer outside of the shard", but(shard={"heads": [0, 2], "layers": [1, 3]})),
        ("rows of fp8_ds_mla", but(dtype="fp8_ds_mla")),
        ("revision in other case", but(revision="HEAD")),
        ("tenant too long", but(tenant="t" * 513)),
        ("too many extras", but(extra={str(i): "" for i in range(65)})),
        ("extra too long", but(extra={"a": "v" * 513})),
        ("shard range backwards", but(shard={"heads": [1, 0], "layers": [0, 1]})),
        ("extra an array", but(extra=[])),
        ("extra value a number", but(extra={"rope": 1})),
        ("extra value null", but(extra={"rope": None})),
        ("extra value an object", but(extra={"rope": {}})),
    ]  # fmt: skip
    return [{"reason": reason, "input": value} for reason, value in cases]


# ---------------------------------------------------------------- chains


def chains(spaces: dict[str, Space]) -> list[Json]:
    count = {"a": 1, "b": 1, "m": 1 << 32}
    vocabulary = {"a": 48_271, "b": 11, "m": 151_936}
    wide = {"a": 2_654_435_761, "b": 4_294_967_295, "m": 1 << 32}

    def extra(chunk: int, offset: int, data: bytes) -> Json:
        return {"chunk": chunk, "offset": offset, "hex": data.hex()}

    image = blake3(b"an image").digest()
    some = [extra(0, 3, image), extra(0, 0, b"first"), extra(2, 1, b"z")]
    tied = [extra(1, 2, b"\xff"), extra(1, 2, b""), extra(1, 2, b"a\0"), extra(1, 2, b"a"), extra(1, 0, b"\xff")]
    every = {"tenant_secret": SECRET, "salt": b"s", "adapter": b"a"}
    cases: list[tuple[str, str, Json | list[int], Json]] = [
        ("plain", "tiny", [1, 2, 3, 4, 5, 6, 7, 8], {}),
        ("token-bounds", "tiny", [0, 4_294_967_295, 65_536, 256], {}),
        ("no-token", "tiny", [], {}),
        ("not-one-chunk", "tiny", [1, 2, 3], {}),
        ("a-tail", "tiny", {**count, "n": 11}, {}),
        ("five-chunks", "tiny", {**count, "n": 20}, {}),
        ("salt", "tiny", {**count, "n": 8}, {"salt": b"pepper"}),
        ("salt-empty", "tiny", {**count, "n": 8}, {"salt": b""}),
        ("salt-binary", "tiny", {**count, "n": 4}, {"salt": bytes(range(256))}),
        ("adapter", "tiny", {**count, "n": 8}, {"adapter": b"pepper"}),
        ("adapter-empty", "tiny", {**count, "n": 8}, {"adapter": b""}),
        ("adapter-unicode", "tiny", {**count, "n": 4}, {"adapter": "lora/ü-\U0001f600".encode()}),
        ("salt-and-adapter", "tiny", {**count, "n": 8}, {"salt": b"s", "adapter": b"lora-1"}),
        ("secret", "tiny", {**count, "n": 8}, {"tenant_secret": SECRET}),
        ("secret-zeros", "tiny", {**count, "n": 8}, {"tenant_secret": bytes(32)}),
        ("secret-salt-adapter", "tenant", {**count, "n": 12}, every),
        ("extras", "tiny", {**count, "n": 16}, {"extras": some}),
        ("extras-unsorted-same-offset", "tiny", {**count, "n": 12}, {"extras": tied}),
        ("extra-empty", "tiny", {**count, "n": 4}, {"extras": [extra(0, 0, b"")]}),
        ("extra-twice", "tiny", {**count, "n": 4}, {"extras": [extra(0, 1, b"x"), extra(0, 1, b"x")]}),
        ("extras-and-all", "tiny", {**count, "n": 12}, {"extras": some, **every}),
        ("one-token-chunks", "tiny-one-token", {**vocabulary, "n": 5}, {"extras": [extra(4, 0, b"e")]}),
        ("sixteen", "tiny-16", {**vocabulary, "n": 64}, {}),
        ("sixteen-extras", "tiny-16", {**vocabulary, "n": 50}, {"extras": [extra(1, 15, image), extra(1, 9, image)]}),
        ("256-one", "all-defaults", {**vocabulary, "n": 256}, {}),
        ("256-five", "all-defaults", {**vocabulary, "n": 1280}, {}),
        ("256-tail", "all-defaults", {**vocabulary, "n": 1023}, {"extras": [extra(2, 255, b"e"), extra(2, 10, b"")]}),
        ("256-wide-tokens", "all-defaults", {**wide, "n": 768}, {"salt": b"s"}),
        ("256-secret", "80-layers", {**vocabulary, "n": 512}, {"tenant_secret": SECRET}),
        ("8-mha-v-wider", "v-wider", {**wide, "n": 24}, {}),
        ("1024-bytes-of-tokens", "mla", {**vocabulary, "n": 256}, {"adapter": b"a" * 1024}),
        ("unicode-space", "extra-utf16-order", {**count, "n": 4}, {}),
        ("plain-of-a-window", "window", [1, 2, 3, 4, 5, 6, 7, 8], {}),
        ("plain-of-a-state", "state", [1, 2, 3, 4, 5, 6, 7, 8], {}),
        ("plain-of-a-draft", "draft", [1, 2, 3, 4, 5, 6, 7, 8], {}),
        ("secret-of-a-state", "state", {**count, "n": 8}, {"tenant_secret": SECRET}),
    ]  # fmt: skip
    return [chain_vector(spaces, *case) for case in cases]


def chain_vector(spaces: dict[str, Space], name: str, space_name: str, tokens: Json | list[int], more: Json) -> Json:
    space = spaces[space_name]
    salt, adapter, secret = more.get("salt"), more.get("adapter"), more.get("tenant_secret")
    extras: dict[int, list[Extra]] = {}
    for item in more.get("extras", []):
        extras.setdefault(item["chunk"], []).append(Extra(item["offset"], bytes.fromhex(item["hex"])))
    hasher = Hasher(space.model_id, space.chunk_tokens, secret)
    chunks = hasher.chain(generated(tokens), salt or b"", adapter or b"", extras)
    return {
        "name": name,
        "space": space_name,
        "salt": None if salt is None else salt.hex(),
        "adapter": None if adapter is None else adapter.hex(),
        "tenant_secret": None if secret is None else secret.hex(),
        "tokens": tokens,
        "extras": more.get("extras", []),
        "root": hasher.root(salt or b"", adapter or b"").hex(),
        "chunks": [chunk.hex() for chunk in chunks],
    }


# ---------------------------------------------------------------- keys, digests, headers, masks


def keys(spaces: dict[str, Space]) -> list[Json]:
    out = []
    for name in ("tiny", "80-layers", "model-unicode"):
        space = spaces[name].id
        chunk = blake3(name.encode()).digest()
        for prefix in ("", "kv", "a/b.c/d", "préfixe"):
            out.append(
                {
                    "prefix": prefix,
                    "space_id": space.hex(),
                    "chunk": chunk.hex(),
                    "chunk_key": chunk_key(prefix, space, chunk),
                    "space_key": space_key(prefix, space),
                }
            )
    return out


def digests() -> list[Json]:
    """Of the byte generator's first n bytes; the CRC as a number, 16 hex digits."""
    lengths = (
        0,
        1,
        7,
        8,
        9,
        15,
        16,
        17,
        31,
        63,
        64,
        65,
        127,
        255,
        256,
        257,
        1023,
        1024,
        1025,
        4096,
        65_535,
        65_537,
        100_003,
    )
    out = []
    for n in lengths:
        data = pattern(n)
        out.append({"n": n, "crc64nvme": f"{crc64nvme(data):016x}", "blake3": blake3(data).hexdigest()})
    return out  # fmt: skip


def header_for(space: Space, kind: str, tokens: Json, key: bytes = KEY) -> Header:
    """The second chunk's header, over a payload from the byte generator."""
    hasher = Hasher(space.model_id, space.chunk_tokens)
    parent, chunk = hasher.chain(generated(tokens))[:2]
    payload = pattern(space.payload_len)
    keys = None if space.protection == "none" else SpaceKeys.derive(key, space.id)
    if kind == "aes256-gcm":
        _, digests = encrypted(space, key, chunk, SALT, payload)
    else:
        digests = plane_digests(space, kind, payload, keys=keys)
    is_draft = space.draft != ""
    header = Header(space.id, chunk, parent, space.chunk_tokens, len(payload), space.kind, is_draft, kind, digests)
    return header.sealed(keys, SALT if kind == "aes256-gcm" else b"") if keys else header


def payload_digest(space: Space, header: Header) -> str:
    """BLAKE3 of the object's payload as it is stored."""
    payload = pattern(space.payload_len)
    if header.digest == "aes256-gcm":
        payload, _ = encrypted(space, KEY, header.chunk, SALT, payload)
    return blake3(payload).hexdigest()


def headers(spaces: dict[str, Space]) -> list[Json]:
    names = (
        "tiny",
        "k-and-v",
        "v-wider",
        "fp8-ds-mla",
        "layers-with-gaps",
        "118-planes",
        "119-planes",
        "200-layers",
        "window",
        "window-largest",
        "chunked",
        "state",
        "draft",
        "draft-window",
        "draft-state",
        "signed",
        "signed-state",
        "encrypted",
    )
    out = []
    for name in names:
        space = spaces[name]
        for kind in DIGEST_KINDS:
            if PROTECTED.get(kind, "none") != space.protection:
                continue
            tokens = {"a": 1, "b": 1, "m": 1 << 32, "n": 2 * space.chunk_tokens}
            header = header_for(space, kind, tokens)
            built = header.build()
            out.append(
                {
                    "name": f"{name}-{kind}",
                    "space": name,
                    "digest": kind,
                    "tenant_key": None if space.protection == "none" else KEY.hex(),
                    "salt": header.salt.hex() or None,
                    "payload_blake3": payload_digest(space, header),
                    "tokens": tokens,
                    "chunk": header.chunk.hex(),
                    "parent": header.parent.hex(),
                    "plane_digests": [d.hex() for d in header.digests] if len(header.digests) <= 8 else None,
                    "plane_digests_blake3": blake3(b"".join(header.digests)).hexdigest(),
                    "header_len": len(built),
                    "header": built.hex() if name in INLINE_HEADERS else None,
                    "header_blake3": blake3(built).hexdigest(),
                }
            )
    return out


def bad_headers(spaces: dict[str, Space]) -> list[Json]:
    """All of the `tiny` headers, and the `signed` and `encrypted` ones; a reader that asks for that space and chunk refuses each."""

    def u32(n: int) -> bytes:
        return struct.pack("<I", n)

    other = spaces["tiny-16"].id
    cases: list[tuple[str, str, list[tuple[int, bytes]], bool]] = [
        ("magic", "crc64nvme", [(0, b"k")], True),
        ("magic line end", "crc64nvme", [(6, b"\n\n")], True),
        ("version 0", "crc64nvme", [(8, u32(0))], True),
        ("version 2", "crc64nvme", [(8, u32(2))], True),
        ("version 3", "crc64nvme", [(8, u32(3))], True),
        ("header_len 0", "crc64nvme", [(12, u32(0))], True),
        ("header_len 8192", "crc64nvme", [(12, u32(8192))], True),
        ("header_len 4095", "crc64nvme", [(12, u32(4095))], True),
        ("header_len largest", "crc64nvme", [(12, u32(0xFFFF_FFFF))], True),
        ("space id", "crc64nvme", [(16, other)], True),
        ("space id last byte", "crc64nvme", [(47, bytes([spaces["tiny"].id[31] ^ 1]))], True),
        ("chunk hash", "crc64nvme", [(48, other)], True),
        ("tokens fewer", "crc64nvme", [(112, u32(3))], True),
        ("tokens 0", "crc64nvme", [(112, u32(0))], True),
        ("planes 0", "crc64nvme", [(116, u32(0))], True),
        ("planes 1", "crc64nvme", [(116, u32(1)), (288, bytes(32))], True),
        ("planes 3", "crc64nvme", [(116, u32(3))], True),
        ("planes largest", "crc64nvme", [(116, u32(0xFFFF_FFFF))], True),
        ("payload length", "crc64nvme", [(120, u32(255))], True),
        ("payload length high half", "crc64nvme", [(124, u32(1))], True),
        ("digest kind 0", "crc64nvme", [(128, u32(0))], True),
        ("digest kind 3", "crc64nvme", [(128, u32(3))], True),
        ("digest kind 3 of version 1", "blake3", [(128, u32(3))], True),
        ("signed, in a space that is not", "blake3", [(8, u32(2)), (128, u32(3)), (136, bytes(16)), (192, other)], True),
        ("kind blake3 width 8", "crc64nvme", [(128, u32(2))], True),
        ("kind crc64nvme width 32", "crc64nvme", [(132, u32(32))], True),
        ("kind crc64nvme width 16", "crc64nvme", [(132, u32(16))], True),
        ("kind blake3 width 31", "blake3", [(132, u32(31))], True),
        ("encryption key id", "crc64nvme", [(136, b"\1")], True),
        ("encryption key id last byte", "blake3", [(151, b"\1")], True),
        ("encryption nonce", "crc64nvme", [(152, b"\1")], True),
        ("encryption nonce last byte", "blake3", [(175, b"\1")], True),
        ("kind 0", "crc64nvme", [(176, u32(0))], True),
        ("kind 5", "crc64nvme", [(176, u32(5))], True),
        ("kind largest", "blake3", [(176, u32(0xFFFF_FFFF))], True),
        ("another kind: window", "crc64nvme", [(176, u32(2) + u32(128))], True),
        ("another kind: chunked", "crc64nvme", [(176, u32(3) + u32(128))], True),
        ("another kind: state", "blake3", [(176, u32(4))], True),
        ("full with tokens", "crc64nvme", [(180, u32(1))], True),
        ("a draft's", "crc64nvme", [(184, u32(1))], True),
        ("draft 2", "crc64nvme", [(184, u32(2))], True),
        ("draft's last byte", "blake3", [(187, b"\1")], True),
        ("reserved", "crc64nvme", [(188, b"\1")], True),
        ("reserved last byte", "blake3", [(255, b"\1")], True),
        ("after a plane digest", "crc64nvme", [(264, b"\1")], True),
        ("after the last plane digest", "crc64nvme", [(319, b"\1")], True),
        ("zeros", "crc64nvme", [(320, b"\1")], True),
        ("zeros last byte", "blake3", [(4063, b"\1")], True),
        ("digest not made anew: parent", "crc64nvme", [(80, other)], False),
        ("digest not made anew: plane digest", "blake3", [(256, bytes(32))], False),
        ("digest not made anew: zeros", "crc64nvme", [(4000, b"\1")], False),
        ("header digest", "crc64nvme", [(4064, bytes(32))], False),
        ("header digest last byte", "blake3", [(4095, b"")], False),
        ("signed: version 1", "blake3-keyed", [(8, u32(1))], True),
        ("signed: as if it were not", "blake3-keyed", [(8, u32(1)), (128, u32(2)), (136, bytes(16)), (192, bytes(32))], True),
        ("signed: blake3", "blake3-keyed", [(128, u32(2))], True),
        ("signed: parent", "blake3-keyed", [(80, other)], True),
        ("signed: chunk hash", "blake3-keyed", [(48, other)], True),
        ("signed: another key id", "blake3-keyed", [(136, b"")], True),
        ("signed: no key id", "blake3-keyed", [(136, bytes(16))], True),
        ("signed: nonce", "blake3-keyed", [(152, b"\1")], True),
        ("signed: before the tag", "blake3-keyed", [(188, b"\1")], True),
        ("signed: tag", "blake3-keyed", [(192, b"")], True),
        ("signed: tag last byte", "blake3-keyed", [(223, b"")], True),
        ("signed: after the tag", "blake3-keyed", [(224, b"\1")], True),
        ("signed: plane digest", "blake3-keyed", [(256, b"")], True),
        ("signed: plane digests change places", "blake3-keyed", [(256, SWAP), (288, SWAP)], True),
        ("encrypted: as if it were signed", "aes256-gcm", [(128, u32(3) + u32(32))], True),
        ("encrypted: another salt", "aes256-gcm", [(152, b"")], True),
        ("encrypted: salt's last byte", "aes256-gcm", [(175, b"")], True),
        ("encrypted: tag of a plane", "aes256-gcm", [(256, b"")], True),
        ("encrypted: after the tag of a plane", "aes256-gcm", [(272, b"\1")], True),
    ]  # fmt: skip
    out = []
    for reason, kind, patches, reseal in cases:
        base = {"blake3-keyed": "signed", "aes256-gcm": "encrypted"}.get(kind, "tiny")
        good = header_for(spaces[base], kind, {"a": 1, "b": 1, "m": 1 << 32, "n": 8}).build()
        if patches[0][1] == SWAP:
            patches = [(256, good[288:320]), (288, good[256:288])]
        patches = [(at, data or bytes([good[at] ^ 0x80])) for at, data in patches]
        bad = patched(good, patches, reseal)
        assert bad != good
        out.append(
            {
                "reason": reason,
                "base": f"{base}-{kind}",
                "patches": [{"offset": at, "hex": data.hex()} for at, data in patches],
                "reseal": reseal,
                "header_blake3": blake3(bad).hexdigest(),
            }
        )
    return out


def patched(header: bytes, patches: list[tuple[int, bytes]], reseal: bool) -> bytes:
    bad = bytearray(header)
    for at, data in patches:
        bad[at : at + len(data)] = data
    return seal(bytes(bad[:-32])) if reseal else bytes(bad)


def runs() -> list[Json]:
    def chunks(n: int) -> list[bytes]:
        return [blake3(str(i).encode()).digest() for i in range(n)]

    two = [bytes.fromhex("00010203" + 28 * "11"), bytes.fromhex("ff000000" + 28 * "22")]
    cases = [([], []), (two, two), (two, two[:1]), (two, two[::-1]), (chunks(5), [*chunks(3), *two])]
    cases += [(chunks(n), chunks(4)) for n in (1, 2, 3, 257)]
    return [
        {
            "following": [chunk.hex() for chunk in following],
            "text": run_text(following),
            "reader": [chunk.hex() for chunk in reader],
            "agrees": run_agrees(run_text(following), reader),
        }
        for following, reader in cases
    ]


def masks() -> list[Json]:
    cases = [
        (0, []),
        (1, []),
        (1, [0]),
        (7, [6]),
        (8, [0, 7]),
        (9, [8]),
        (9, list(range(9))),
        (16, [0, 3, 8, 15]),
        (17, [1, 2, 4, 16]),
        (64, list(range(64))),
        (100, list(range(0, 100, 3))),
        (1000, [0, 511, 512, 999]),
    ]
    return [{"n": n, "bits": bits, "hex": mask(bits, n).hex()} for n, bits in cases]


# ---------------------------------------------------------------- all of it


def vectors() -> Json:
    inputs = space_inputs()
    spaces = {name: Space.read(value) for name, value in inputs.items()}
    return {
        "about": ABOUT,
        "format": FORMAT,
        "spaces": [space_vector(name, value) for name, value in sorted(inputs.items())],
        "invalid_spaces": invalid_spaces(),
        "needed": needed(),
        "chains": chains(spaces),
        "keys": keys(spaces),
        "digests": digests(),
        "headers": headers(spaces),
        "bad_headers": bad_headers(spaces),
        "masks": masks(),
        "runs": runs(),
    }


def render() -> str:
    return json.dumps(vectors(), indent=1, sort_keys=True) + "\n"


def example() -> dict[str, list[str]]:
    """The lines of code in docs/FORMAT.md, section 7, block by block."""
    given_space = space_inputs()["tiny"]
    space = Space.read(given_space)
    hasher = Hasher(space.model_id, space.chunk_tokens)
    tokens = list(range(1, 9))
    chunks = hasher.chain(tokens)
    built = header_for(space, "crc64nvme", {"a": 1, "b": 1, "m": 1 << 32, "n": 8}).build()
    state = Space.read(space_inputs()["state"])
    of_state = header_for(state, "crc64nvme", {"a": 1, "b": 1, "m": 1 << 32, "n": 8}).build()

    def dump(header: bytes, *rows: int) -> list[str]:
        return [f"{at:04x}  {header[at : at + 16].hex(' ')}" for at in rows]

    return {
        "given": [json.dumps(given_space)],
        "space_json": [space.canonical.decode()],
        "model_json": [space.canonical_model.decode()],
        "space": [
            f"space_id     {space.id.hex()}",
            f"model_id     {space.model_id.hex()}",
            f"planes at    {', '.join(map(str, space.plane_offsets))}",
            f"payload      {space.payload_len} bytes",
            f"header_len   {space.header_len}",
            f"object       {space.object_len} bytes",
            f"(p 1, h 1, row 2) at {space.row_offset(1, 1, 2)}",
        ],
        "hashes": [
            f"root         {hasher.root().hex()}",
            f"1, 2, 3, 4   {chunks[0].hex()}",
            f"5, 6, 7, 8   {chunks[1].hex()}",
        ],
        "keys": [space_key("kv", space.id), *(chunk_key("kv", space.id, chunk) for chunk in chunks)],
        "header": dump(built, *range(0, 192, 16), *range(256, 336, 16), 4064, 4080),
        "state": [json.dumps(space_inputs()["state"])],
        "of state": [
            f"space_id     {state.id.hex()}",
            f"model_id     {state.model_id.hex()}",
            f"planes at    {', '.join(map(str, state.plane_offsets))}",
            f"payload      {state.payload_len} bytes",
            f"key          {chunk_key('kv', state.id, chunks[1])}",
        ],
        "header of state": dump(of_state, 0x70, 0xB0),
        "mask": [f"{{0, 3, 8}} of 10   {mask([0, 3, 8], 10).hex()}"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--example", action="store_true")
    if parser.parse_args().example:
        for block in example().values():
            print("".join(f"    {line}\n" for line in block))
        return
    VECTORS.parent.mkdir(parents=True, exist_ok=True)
    VECTORS.write_text(render(), encoding="ascii")
    print(f"{VECTORS}: {VECTORS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
