"""kvgate's format, a second time: written from docs/FORMAT.md alone, for the tests to compare.

Needs PyPI `blake3`. The CRC is this file's own; `crc64nvme_fast` uses `awscrt` where there is one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from aes_gcm import decrypt, encrypt
from blake3 import blake3

FORMAT: Final = 2
"""The newest version; 1 has no protection."""
MAGIC: Final = b"KVGATE\r\n"
SPACE_CONTEXT: Final = "kvgate space v1"
MODEL_CONTEXT: Final = "kvgate model v1"
KEY_ID_CONTEXT: Final = "kvgate key id v1"
HEADER_KEY_CONTEXT: Final = "kvgate header key v1"
PLANE_KEY_CONTEXT: Final = "kvgate plane key v1"
HEADER_FIXED: Final = 256
DIGEST_SLOT: Final = 32
HEADER_ALIGN: Final = 4096
MAX_PAYLOAD: Final = 4 << 30
U32_MAX: Final = 0xFFFF_FFFF

ELEMENT_SIZE: Final[Mapping[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "bytes": 1,
    "pages": 1,
    "fp8_ds_mla": 1,
}
HASHES: Final = ("kvgate-v1", "sglang-sha256", "vllm-sha256")
MODEL_MEMBERS: Final = ("format", "model", "revision", "chunk_tokens", "tenant", "hash")
SPAN_MAX: Final = 1 << 30
KIND_CODES: Final[Mapping[str, int]] = {"full": 1, "window": 2, "chunked": 3, "state": 4}
MAX_ROW: Final = 1 << 20
MAX_STATE_ROW: Final = 1 << 28
DIGEST_KINDS: Final[Mapping[str, tuple[int, int]]] = {
    "crc64nvme": (1, 8),
    "blake3": (2, 32),
    "blake3-keyed": (3, 32),
    "aes256-gcm": (4, 16),
}
PROTECTED: Final[Mapping[str, str]] = {"blake3-keyed": "signed", "aes256-gcm": "encrypted"}
"""The protection of the spaces whose objects have these digests."""
PROTECTIONS: Final = ("none", "signed", "encrypted")
ENCRYPTION_CONTEXT: Final = b"kvgate encryption key v1"
TAG_AT: Final = 192
RUN_VERSION: Final = "1"
RUN_CHUNKS: Final = 256
RUN_LETTERS: Final = re.compile(r"[A-Za-z0-9+/]*")

DEFAULTS: Final[Mapping[str, Any]] = {
    "dtype": "bfloat16",
    "chunk_tokens": 256,
    "tenant": "",
    "hash": "kvgate-v1",
    "kind": "full",
    "draft": "",
    "shard": "whole",
    "extra": {},
    "protection": "none",
}
MEMBERS: Final = frozenset(DEFAULTS) | {"format", "model", "revision", "planes"}
UNPINNED: Final = ("unknown", "none", "null", "main", "master", "head", "latest", "default")
DS_MLA_ROW: Final = 656
PLANE_NAME: Final = re.compile(r"[a-z0-9_.-]{1,64}")
FILE_PATH: Final = re.compile(r"[/.~\\]")


class FormatError(ValueError):
    """Something is not as docs/FORMAT.md says."""


# ---------------------------------------------------------------- canonical JSON (RFC 8785)

_SHORT_ESCAPES: Final = {
    '"': '\\"',
    "\\": "\\\\",
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
}


def _json_string(text: str) -> str:
    out = ['"']
    for char in text:
        code = ord(char)
        if char in _SHORT_ESCAPES:
            out.append(_SHORT_ESCAPES[char])
        elif code < 0x20:
            out.append(f"\\u{code:04x}")
        elif 0xD800 <= code <= 0xDFFF:
            raise FormatError("a lone surrogate is not a character")
        else:
            out.append(char)
    out.append('"')
    return "".join(out)


def _json_value(value: object) -> str:
    if isinstance(value, str):
        return _json_string(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= 1 << 53:
            raise FormatError("a number beyond what an IEEE double holds exactly")
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(_json_value(item) for item in value) + "]"
    if isinstance(value, dict):
        # Order by UTF-16 code units: big-endian bytes compare as the units do.
        names = sorted(value, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
        return "{" + ",".join(f"{_json_string(n)}:{_json_value(value[n])}" for n in names) + "}"
    raise FormatError(f"{type(value).__name__} does not occur in a space")


def canonical_json(value: object) -> bytes:
    """RFC 8785 for what a space is made of: objects, arrays, strings, integers."""
    return _json_value(value).encode("utf-8")


# ---------------------------------------------------------------- space


def _integer(value: object, what: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"{what} is not an integer")
    if not low <= value <= high:
        raise FormatError(f"{what} is not between {low} and {high}")
    return value


def _string(value: object, what: str, low: int = 0, high: int | None = None) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{what} is not a string")
    try:
        length = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise FormatError(f"{what} has a lone surrogate") from None
    if length < low or (high is not None and length > high):
        raise FormatError(f"{what} is not {low} to {high} bytes")
    return value


def _members(value: object, what: str, need: Iterable[str], may: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not an object")
    need = set(need)
    if missing := need - set(value):
        raise FormatError(f"{what} lacks {', '.join(sorted(missing))}")
    if surplus := set(value) - need - set(may):
        raise FormatError(f"{what} has unknown {', '.join(sorted(surplus))}")
    return value


@dataclass(frozen=True)
class Kind:
    """What the layers keep; `tokens` of a window or of an attention chunk, else 0."""

    name: str = "full"
    tokens: int = 0

    @classmethod
    def read(cls, value: object) -> Kind:
        if value in ("full", "state"):
            return cls(str(value))
        if not isinstance(value, dict) or set(value) not in ({"window"}, {"chunked"}):
            raise FormatError("kind is not full, state, a window or chunked")
        ((name, tokens),) = value.items()
        return cls(name, _integer(tokens, f"kind's {name}", 1, SPAN_MAX))

    @classmethod
    def of_codes(cls, code: int, tokens: int) -> Kind:
        """As a header has it."""
        for name, known in KIND_CODES.items():
            if code == known and (tokens == 0 or name in ("window", "chunked")):
                return cls(name, tokens)
        raise FormatError("kind of KV is unknown")

    def json(self) -> str | dict[str, int]:
        return {self.name: self.tokens} if self.tokens else self.name

    def needed(self, boundary: int, chunk_tokens: int) -> range:
        """The chunks without which nothing goes on after so many leading chunks."""
        tokens = boundary * chunk_tokens
        if self.name == "full":
            first = 0
        elif self.name == "window":
            first = max(0, tokens - (self.tokens - 1))
        elif self.name == "chunked":
            first = tokens // self.tokens * self.tokens
        else:
            first = max(0, tokens - 1)
        return range(first // chunk_tokens, boundary)


@dataclass(frozen=True)
class Plane:
    layer: int
    name: str
    heads: int
    row_bytes: int

    @classmethod
    def read(cls, value: object, element: int, max_row: int) -> Plane:
        plane = _members(value, "plane", ("heads", "layer", "name", "row_bytes"))
        name = _string(plane["name"], "plane name")
        if not PLANE_NAME.fullmatch(name):
            raise FormatError("plane name is not 1 to 64 of a-z 0-9 _ . -")
        row_bytes = _integer(plane["row_bytes"], "row_bytes", 1, max_row)
        if row_bytes % element:
            raise FormatError("row_bytes is not a multiple of the element size")
        return cls(
            layer=_integer(plane["layer"], "layer", 0, 0xFFFF),
            name=name,
            heads=_integer(plane["heads"], "heads", 1, 1 << 16),
            row_bytes=row_bytes,
        )

    def json(self) -> dict[str, Any]:
        return {"heads": self.heads, "layer": self.layer, "name": self.name, "row_bytes": self.row_bytes}


def _expand(value: Mapping[str, Any], element: int) -> object:
    """The `planes` member, or what `mha` or `mla` stands for."""
    given = [name for name in ("planes", "mha", "mla") if name in value]
    if len(given) != 1:
        raise FormatError("exactly one of planes, mha and mla is needed")
    if given[0] == "planes":
        return value["planes"]
    if given[0] == "mha":
        mha = _members(value["mha"], "mha", ("layers", "heads", "head_dim"), ("v_head_dim",))
        k_dim = _integer(mha["head_dim"], "head_dim", 1, 1 << 20)
        v_dim = _integer(mha.get("v_head_dim", k_dim), "v_head_dim", 1, 1 << 20)
        name, heads, width = "kv", mha["heads"], k_dim + v_dim
    else:
        mla = _members(value["mla"], "mla", ("layers", "latent_dim"))
        name, heads, width = "latent", 1, _integer(mla["latent_dim"], "latent_dim", 1, 1 << 20)
        if value["dtype"] == "fp8_ds_mla":
            width = DS_MLA_ROW
    layers = _integer(value[given[0]]["layers"], "layers", 1, 4096)
    return [{"heads": heads, "layer": layer, "name": name, "row_bytes": width * element} for layer in range(layers)]


def _planes(value: object, element: int, max_row: int) -> tuple[Plane, ...]:
    if not isinstance(value, list):
        raise FormatError("planes is not an array")
    _integer(len(value), "number of planes", 1, 4096)
    planes = tuple(Plane.read(item, element, max_row) for item in value)
    layers = [plane.layer for plane in planes]
    if layers != sorted(layers):
        raise FormatError("planes are not sorted by layer")
    if len({(plane.layer, plane.name) for plane in planes}) != len(planes):
        raise FormatError("a plane occurs twice")
    return planes


def _range(value: object, what: str) -> list[int]:
    if not isinstance(value, list) or len(value) != 2:
        raise FormatError(f"shard's {what} is not [first, end]")
    first = _integer(value[0], f"shard's first of {what}", 0, 1 << 16)
    end = _integer(value[1], f"shard's end of {what}", 0, 1 << 16)
    if first >= end:
        raise FormatError(f"shard's {what} is empty")
    return [first, end]


def _shard(value: object) -> str | dict[str, list[int]]:
    if isinstance(value, str):
        if value != "whole":
            raise FormatError("shard is a string other than whole")
        return value
    shard = _members(value, "shard", ("heads", "layers"))
    return {name: _range(shard[name], name) for name in ("heads", "layers")}


@dataclass(frozen=True)
class Space:
    model: str
    revision: str
    dtype: str
    chunk_tokens: int
    tenant: str
    hash: str
    kind: Kind
    draft: str
    planes: tuple[Plane, ...]
    shard: str | dict[str, list[int]]
    extra: dict[str, str]
    protection: str

    @classmethod
    def read(cls, value: object) -> Space:
        """From an object as given: defaults are filled in, shorthands expanded, all of it checked."""
        given = _members(value, "space", ("model", "revision"), MEMBERS | {"mha", "mla"})
        if empty := [name for name, member in given.items() if member is None]:
            raise FormatError(f"{', '.join(empty)} is null")
        full = {**DEFAULTS, **given}
        if _string(full["protection"], "protection") not in PROTECTIONS:
            raise FormatError("protection is unknown")
        version = format_version(full["protection"])
        _integer(full.get("format", version), "format", version, version)
        revision = _string(full["revision"], "revision", 1, 512)
        if revision.lower() in UNPINNED or FILE_PATH.match(revision):
            raise FormatError("revision does not pin the weights")
        dtype = _string(full["dtype"], "dtype")
        if dtype not in ELEMENT_SIZE:
            raise FormatError("dtype is unknown")
        if _string(full["hash"], "hash") not in HASHES:
            raise FormatError("hash is unknown")
        if not isinstance(full["extra"], dict):
            raise FormatError("extra is not an object")
        element, kind = ELEMENT_SIZE[dtype], Kind.read(full["kind"])
        max_row = MAX_STATE_ROW if kind.name == "state" or dtype == "pages" else MAX_ROW
        space = cls(
            model=_string(full["model"], "model", 1, 512),
            revision=revision,
            dtype=dtype,
            chunk_tokens=_integer(full["chunk_tokens"], "chunk_tokens", 1, 1 << 16),
            tenant=_string(full["tenant"], "tenant", 0, 512),
            hash=full["hash"],
            kind=kind,
            draft=_string(full["draft"], "draft", 0, 512),
            planes=_planes(_expand(full, element), element, max_row),
            shard=_shard(full["shard"]),
            extra={
                _string(k, "extra's name", 0, 512): _string(v, "extra's value", 0, 512)
                for k, v in full["extra"].items()
            },
            protection=full["protection"],
        )
        if len(space.extra) > 64:
            raise FormatError("extra has more than 64 entries")
        if dtype == "fp8_ds_mla" and any(plane.row_bytes != DS_MLA_ROW for plane in space.planes):
            raise FormatError("rows of fp8_ds_mla have 656 bytes")
        if isinstance(space.shard, dict):
            first, end = space.shard["layers"]
            if any(not first <= plane.layer < end for plane in space.planes):
                raise FormatError("a plane's layer is not in the shard")
        if space.payload_len > MAX_PAYLOAD:
            raise FormatError("payload is more than 4 GiB")
        return space

    def json(self) -> dict[str, Any]:
        """The twelve members, and the protection where there is one."""
        protection = {} if self.protection == "none" else {"protection": self.protection}
        return {
            **protection,
            "format": format_version(self.protection),
            "model": self.model,
            "revision": self.revision,
            "dtype": self.dtype,
            "chunk_tokens": self.chunk_tokens,
            "tenant": self.tenant,
            "hash": self.hash,
            "kind": self.kind.json(),
            "draft": self.draft,
            "planes": [plane.json() for plane in self.planes],
            "shard": self.shard,
            "extra": self.extra,
        }

    @property
    def canonical(self) -> bytes:
        return canonical_json(self.json())

    @property
    def id(self) -> bytes:
        return space_id(self.canonical)

    @property
    def canonical_model(self) -> bytes:
        """The members that all spaces of a model share."""
        members = self.json()
        return canonical_json({name: members[name] for name in MODEL_MEMBERS})

    @property
    def model_id(self) -> bytes:
        return model_id(self.canonical_model)

    @property
    def chunk_rows(self) -> int:
        return 1 if self.kind.name == "state" or self.dtype == "pages" else self.chunk_tokens

    def needed(self, boundary: int) -> range:
        return self.kind.needed(boundary, self.chunk_tokens)

    def plane_len(self, plane: int) -> int:
        return self.planes[plane].heads * self.chunk_rows * self.planes[plane].row_bytes

    @property
    def plane_offsets(self) -> list[int]:
        """Of each plane in the payload."""
        offsets, at = [], 0
        for plane in range(len(self.planes)):
            offsets.append(at)
            at += self.plane_len(plane)
        return offsets

    def row_offset(self, plane: int, head: int, row: int) -> int:
        rows = head * self.chunk_rows + row
        return self.plane_offsets[plane] + rows * self.planes[plane].row_bytes

    @property
    def payload_len(self) -> int:
        return sum(self.plane_len(plane) for plane in range(len(self.planes)))

    @property
    def header_len(self) -> int:
        return header_len(len(self.planes))

    @property
    def object_len(self) -> int:
        return self.header_len + self.payload_len


def format_version(protection: str) -> int:
    return 1 if protection == "none" else 2


def space_id(space_json: bytes) -> bytes:
    return blake3(space_json, derive_key_context=SPACE_CONTEXT).digest()


def model_id(model_json: bytes) -> bytes:
    return blake3(model_json, derive_key_context=MODEL_CONTEXT).digest()


# ---------------------------------------------------------------- object keys


def _under(prefix: str, rest: str) -> str:
    return f"{prefix}/{rest}" if prefix else rest


def chunk_key(prefix: str, space: bytes, chunk: bytes) -> str:
    return _under(prefix, f"{space.hex()[:32]}/{chunk.hex()}")


def space_key(prefix: str, space: bytes) -> str:
    return _under(prefix, f"{space.hex()[:32]}/space.json")


# ---------------------------------------------------------------- chunk hash


def _u32(value: int) -> bytes:
    if not 0 <= value <= U32_MAX:
        raise FormatError("a number does not fit 32 bits")
    return struct.pack("<I", value)


@dataclass(frozen=True, order=True)
class Extra:
    """What else decides the KV of a position; ordered by offset, then by bytes."""

    offset: int
    data: bytes


class Hasher:
    """`kvgate-v1`; `model` is the model's id."""

    def __init__(self, model: bytes, chunk_tokens: int, tenant_secret: bytes | None = None) -> None:
        if tenant_secret is not None and len(tenant_secret) != 32:
            raise FormatError("a tenant secret is 32 bytes")
        self.chunk_tokens = chunk_tokens
        self.key = model if tenant_secret is None else blake3(model, key=tenant_secret).digest()

    def _hash(self, data: bytes) -> bytes:
        return blake3(data, key=self.key).digest()

    def root(self, salt: bytes = b"", adapter: bytes = b"") -> bytes:
        return self._hash(b"\x00" + _u32(len(salt)) + salt + _u32(len(adapter)) + adapter)

    def chunk(self, parent: bytes, tokens: Sequence[int], extras: Iterable[Extra] = ()) -> bytes:
        if len(tokens) != self.chunk_tokens:
            raise FormatError("only a full chunk has a hash")
        parts = [b"\x01", parent, *(_u32(token) for token in tokens)]
        ordered = sorted(extras)
        parts.append(_u32(len(ordered)))
        for extra in ordered:
            if not 0 <= extra.offset < self.chunk_tokens:
                raise FormatError("an extra's offset is outside the chunk")
            parts += [_u32(extra.offset), _u32(len(extra.data)), extra.data]
        return self._hash(b"".join(parts))

    def chain(
        self,
        tokens: Sequence[int],
        salt: bytes = b"",
        adapter: bytes = b"",
        extras: Mapping[int, Iterable[Extra]] | None = None,
    ) -> list[bytes]:
        """The hashes of all full chunks; `extras` by the chunk's number."""
        parent, out, width = self.root(salt, adapter), [], self.chunk_tokens
        for number in range(len(tokens) // width):
            part = tokens[number * width : (number + 1) * width]
            parent = self.chunk(parent, part, (extras or {}).get(number, ()))
            out.append(parent)
        return out


# ---------------------------------------------------------------- digests


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC_TABLE: Final = _crc_table()


def crc64nvme(data: bytes) -> int:
    crc = 0xFFFF_FFFF_FFFF_FFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFF_FFFF_FFFF_FFFF


try:
    from awscrt.checksums import crc64nvme as crc64nvme_fast
except ImportError:  # slow, and right
    crc64nvme_fast = crc64nvme


@dataclass(frozen=True)
class SpaceKeys:
    """What a tenant's key makes for one space."""

    id: bytes
    header: bytes
    planes: bytes

    @classmethod
    def derive(cls, key: bytes, space: bytes) -> SpaceKeys:
        if len(key) != 32:
            raise FormatError("a tenant's key is 32 bytes")
        return cls(
            id=blake3(key, derive_key_context=KEY_ID_CONTEXT).digest()[:16],
            header=blake3(key + space, derive_key_context=HEADER_KEY_CONTEXT).digest(),
            planes=blake3(key + space, derive_key_context=PLANE_KEY_CONTEXT).digest(),
        )


def object_key(key: bytes, space: bytes, chunk: bytes, salt: bytes) -> bytes:
    """HKDF (RFC 5869) with SHA-256; 32 bytes are one block."""
    extracted = hmac.digest(salt, key, hashlib.sha256)
    return hmac.digest(extracted, ENCRYPTION_CONTEXT + space + chunk + b"\x01", hashlib.sha256)


def plane_nonce(plane: int) -> bytes:
    return struct.pack("<Q4x", plane)


def encrypted(space: Space, key: bytes, chunk: bytes, salt: bytes, payload: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    """The encrypted payload, and the tag of each plane."""
    of_object, planes, tags = object_key(key, space.id, chunk, salt), [], []
    for plane, at in enumerate(space.plane_offsets):
        data, tag = encrypt(of_object, plane_nonce(plane), payload[at : at + space.plane_len(plane)])
        planes.append(data)
        tags.append(tag)
    return b"".join(planes), tuple(tags)


def decrypted(space: Space, key: bytes, header: Header, payload: bytes) -> bytes:
    """The payload. Raises FormatError where a plane is not what was encrypted."""
    of_object, planes = object_key(key, space.id, header.chunk, header.salt), []
    for plane, at in enumerate(space.plane_offsets):
        data = payload[at : at + space.plane_len(plane)]
        try:
            planes.append(decrypt(of_object, plane_nonce(plane), data, header.digests[plane]))
        except ValueError:
            raise FormatError(f"plane {plane} is not what was encrypted") from None
    return b"".join(planes)


def plane_digest(
    kind: str, data: bytes, crc: Callable[[bytes], int] = crc64nvme, keys: SpaceKeys | None = None
) -> bytes:
    """As it is stored, without the zeros that fill its 32 bytes."""
    if kind == "crc64nvme":
        return struct.pack("<Q", crc(data))
    if kind == "blake3":
        return blake3(data).digest()
    if kind == "blake3-keyed" and keys:
        return blake3(data, key=keys.planes).digest()
    raise FormatError("digest kind is unknown")


def plane_digests(
    space: Space,
    kind: str,
    payload: bytes,
    crc: Callable[[bytes], int] = crc64nvme,
    keys: SpaceKeys | None = None,
) -> tuple[bytes, ...]:
    if len(payload) != space.payload_len:
        raise FormatError("payload has the wrong length")
    return tuple(
        plane_digest(kind, payload[at : at + space.plane_len(plane)], crc, keys)
        for plane, at in enumerate(space.plane_offsets)
    )


# ---------------------------------------------------------------- header

_FIELDS: Final = struct.Struct("<8sII32s32s32sIIQII16s24sIII4s32s32s")
assert _FIELDS.size == HEADER_FIXED


def header_len(planes: int) -> int:
    least = HEADER_FIXED + DIGEST_SLOT * planes + 32
    return -(-least // HEADER_ALIGN) * HEADER_ALIGN


@dataclass(frozen=True)
class Header:
    space_id: bytes
    chunk: bytes
    parent: bytes
    tokens: int
    payload_len: int
    kind: Kind
    is_draft: bool
    digest: str
    digests: tuple[bytes, ...]
    key_id: bytes = b""
    """Of the key that it is written with, and the tag that the key makes; empty in version 1."""
    tag: bytes = b""
    salt: bytes = b""
    """Random, of an encrypted object."""

    @property
    def protection(self) -> str:
        return PROTECTED.get(self.digest, "none")

    def sealed(self, keys: SpaceKeys, salt: bytes = b"") -> Header:
        """The same with the proof that it was written with the key."""
        keyed = replace(self, key_id=keys.id, tag=b"", salt=salt)
        return replace(keyed, tag=blake3(keyed.build()[:-32], key=keys.header).digest())

    def build(self) -> bytes:
        kind, width = DIGEST_KINDS[self.digest]
        length = header_len(len(self.digests))
        fixed = _FIELDS.pack(
            MAGIC,
            format_version(self.protection),
            length,
            self.space_id,
            self.chunk,
            self.parent,
            self.tokens,
            len(self.digests),
            self.payload_len,
            kind,
            width,
            self.key_id,
            self.salt,
            KIND_CODES[self.kind.name],
            self.kind.tokens,
            int(self.is_draft),
            b"",
            self.tag,
            b"",
        )
        slots = b"".join(digest.ljust(DIGEST_SLOT, b"\0") for digest in self.digests)
        return seal((fixed + slots).ljust(length - 32, b"\0"))

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """Every field as the page has it; what it should be for a space is `expect`'s."""
        if len(data) < HEADER_FIXED:
            raise FormatError("header is cut off")
        (
            magic,
            version,
            length,
            space,
            chunk,
            parent,
            tokens,
            planes,
            payload_len,
            digest,
            width,
            key_id,
            nonce,
            kind,
            kind_tokens,
            draft,
            unused,
            tag,
            reserved,
        ) = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise FormatError("magic is wrong")
        if not 1 <= version <= FORMAT:
            raise FormatError("format version is unknown")
        if not 1 <= planes <= 4096:
            raise FormatError("number of planes is not 1 to 4096")
        if length != header_len(planes):
            raise FormatError("header_len does not fit the number of planes")
        if len(data) < length:
            raise FormatError("header is cut off")
        data = data[:length]
        if blake3(data[:-32]).digest() != data[-32:]:
            raise FormatError("header digest is wrong")
        names = [name for name, pair in DIGEST_KINDS.items() if pair == (digest, width)]
        if not names or format_version(PROTECTED.get(names[0], "none")) != version:
            raise FormatError("digest kind and width are unknown")
        if (any(nonce) and names[0] != "aes256-gcm") or (version == 1 and (any(key_id) or any(tag))):
            raise FormatError("a key where there is none")
        if draft not in (0, 1):
            raise FormatError("the mark of a draft is neither 0 nor 1")
        end = HEADER_FIXED + DIGEST_SLOT * planes
        if any(unused) or any(reserved) or any(data[end:-32]):
            raise FormatError("reserved bytes are not zero")
        digests = []
        for at in range(HEADER_FIXED, end, DIGEST_SLOT):
            if any(data[at + width : at + DIGEST_SLOT]):
                raise FormatError("bytes after a plane digest are not zero")
            digests.append(data[at : at + width])
        of_kind = Kind.of_codes(kind, kind_tokens)
        if version == 1:
            key_id = tag = b""
        salt = nonce if names[0] == "aes256-gcm" else b""
        return cls(
            space, chunk, parent, tokens, payload_len, of_kind, draft == 1, names[0], tuple(digests), key_id, tag, salt
        )

    def expect(self, space: Space, chunk: bytes, keys: Iterable[bytes] = ()) -> SpaceKeys | None:
        """Refuses a header that is not the one asked for, or not written with one of the tenant's keys where the space
        demands it. Returns what the key makes."""
        for what, got, want in (
            ("space id", self.space_id, space.id),
            ("chunk hash", self.chunk, chunk),
            ("token count", self.tokens, space.chunk_tokens),
            ("number of planes", len(self.digests), len(space.planes)),
            ("payload length", self.payload_len, space.payload_len),
            ("kind of KV", self.kind, space.kind),
            ("mark of a draft", self.is_draft, space.draft != ""),
            ("protection", self.protection, space.protection),
        ):
            if got != want:
                raise FormatError(f"{what} is another's")
        if space.protection == "none":
            return None
        for key in keys:
            made = SpaceKeys.derive(key, space.id)
            if made.id == self.key_id:
                if self.sealed(made, self.salt).tag != self.tag:
                    raise FormatError("header was not written with the key")
                return made
        raise FormatError("header's key is not here")


def seal(head: bytes) -> bytes:
    """`head` is all of a header but its digest."""
    return head + blake3(head).digest()


# ---------------------------------------------------------------- mask


def mask(bits: Iterable[int], n: int) -> bytes:
    out = bytearray(-(-n // 8))
    for bit in bits:
        if not 0 <= bit < n:
            raise FormatError("a bit is outside the mask")
        out[bit // 8] |= 1 << (bit % 8)
    return bytes(out)


def mask_bits(data: bytes, n: int) -> list[int]:
    if len(data) != -(-n // 8):
        raise FormatError("mask has the wrong length")
    bits = [i for i in range(len(data) * 8) if data[i // 8] >> (i % 8) & 1]
    if bits and bits[-1] >= n:
        raise FormatError("padding of the mask is not zero")
    return bits


# ---------------------------------------------------------------- run hints


def run_text(following: Sequence[bytes]) -> str:
    """The hint of a chunk that these follow."""
    first = b"".join(chunk[:4] for chunk in following[:RUN_CHUNKS])
    return RUN_VERSION + base64.b64encode(first).decode().rstrip("=")


def run_agrees(text: str, following: Sequence[bytes]) -> int:
    """How many of these chunks follow as the hint says."""
    letters = text[1:]
    if text[:1] != RUN_VERSION or not RUN_LETTERS.fullmatch(letters) or len(letters) % 4 == 1:
        raise FormatError("it is no hint of this version")
    said = base64.b64decode(letters + "=" * (-len(letters) % 4))
    if len(said) % 4 or len(said) > 4 * RUN_CHUNKS:
        raise FormatError("it is no whole number of chunks, or too many")
    agree = 0
    for at, chunk in enumerate(following):
        if said[4 * at : 4 * at + 4] != chunk[:4]:
            break
        agree += 1
    return agree
