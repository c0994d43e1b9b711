"""AES-256-GCM (NIST SP 800-38D) with 96-bit nonces and no associated data: slow, and from the standard alone.

For the reference, so that it takes no library which kvgate may use too. A test has NIST's vectors.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator


def _sbox() -> bytes:
    """FIPS 197, section 5.1.1: the inverse in GF(2^8), then an affine map."""
    box, p, q = bytearray(256), 1, 1
    while True:
        p = (p ^ (p << 1) ^ (0x11B if p & 0x80 else 0)) & 0xFF
        q ^= q << 1
        q ^= q << 2
        q ^= q << 4
        q &= 0xFF
        if q & 0x80:
            q ^= 0x09
        turned = [((q << shift) | (q >> (8 - shift))) & 0xFF for shift in range(5)]
        box[p] = turned[0] ^ turned[1] ^ turned[2] ^ turned[3] ^ turned[4] ^ 0x63
        if p == 1:
            break
    box[0] = 0x63
    return bytes(box)


SBOX = _sbox()
SHIFT_ROWS = [4 * ((column + row) % 4) + row for column in range(4) for row in range(4)]


def _double(byte: int) -> int:
    return ((byte << 1) ^ (0x1B if byte & 0x80 else 0)) & 0xFF


def _round_keys(key: bytes) -> list[bytes]:
    words = [key[at : at + 4] for at in range(0, 32, 4)]
    rcon = 1
    while len(words) < 60:
        word = words[-1]
        if len(words) % 8 == 0:
            word = bytes(SBOX[byte] for byte in word[1:] + word[:1])
            word = bytes([word[0] ^ rcon]) + word[1:]
            rcon = _double(rcon)
        elif len(words) % 8 == 4:
            word = bytes(SBOX[byte] for byte in word)
        words.append(bytes(a ^ b for a, b in zip(words[-8], word, strict=True)))
    return [b"".join(words[at : at + 4]) for at in range(0, 60, 4)]


def _mix(column: bytes) -> bytes:
    a, b, c, d = column
    every = a ^ b ^ c ^ d
    return bytes(
        [
            a ^ every ^ _double(a ^ b),
            b ^ every ^ _double(b ^ c),
            c ^ every ^ _double(c ^ d),
            d ^ every ^ _double(d ^ a),
        ]
    )


def _block(keys: list[bytes], block: bytes) -> bytes:
    state = bytes(a ^ b for a, b in zip(block, keys[0], strict=True))
    for number, key in enumerate(keys[1:], 1):
        state = bytes(SBOX[state[at]] for at in SHIFT_ROWS)
        if number < len(keys) - 1:
            state = b"".join(_mix(state[at : at + 4]) for at in range(0, 16, 4))
        state = bytes(a ^ b for a, b in zip(state, key, strict=True))
    return state


def _multiply(x: int, y: int) -> int:
    """In GF(2^128), with GCM's order of bits."""
    product = 0
    for bit in range(127, -1, -1):
        if x >> bit & 1:
            product ^= y
        y = (y >> 1) ^ (0xE1 << 120 if y & 1 else 0)
    return product


def _stream(keys: list[bytes], nonce: bytes) -> Iterator[bytes]:
    """The first block is for the tag."""
    for counter in range(1, 1 << 32):
        yield _block(keys, nonce + counter.to_bytes(4, "big"))


def _crypt(blocks: Iterator[bytes], data: bytes) -> bytes:
    out = bytearray()
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        out += bytes(a ^ b for a, b in zip(part, next(blocks), strict=False))
    return bytes(out)


def _tag(keys: list[bytes], first: bytes, data: bytes) -> bytes:
    h, hashed = int.from_bytes(_block(keys, bytes(16)), "big"), 0
    lengths = (8 * len(data)).to_bytes(16, "big")
    padded = data.ljust(-(-len(data) // 16) * 16, b"\0") + lengths
    for at in range(0, len(padded), 16):
        hashed = _multiply(hashed ^ int.from_bytes(padded[at : at + 16], "big"), h)
    return bytes(a ^ b for a, b in zip(hashed.to_bytes(16, "big"), first, strict=True))


def encrypt(key: bytes, nonce: bytes, plain: bytes) -> tuple[bytes, bytes]:
    """What is encrypted, and its tag."""
    keys = _round_keys(key)
    blocks = _stream(keys, nonce)
    first = next(blocks)
    data = _crypt(blocks, plain)
    return data, _tag(keys, first, data)


def decrypt(key: bytes, nonce: bytes, data: bytes, tag: bytes) -> bytes:
    """Raises ValueError where the tag is another."""
    keys = _round_keys(key)
    blocks = _stream(keys, nonce)
    if not hmac.compare_digest(_tag(keys, next(blocks), data), tag):
        raise ValueError("tag is wrong")
    return _crypt(blocks, data)
