"""Tests of the reference itself: python tests/reference/test_reference.py"""

from __future__ import annotations

import io
import json
import re
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aes_gcm
import check_objects
import kvgate_format as kv
import make_vectors
from awscrt.checksums import crc64nvme

PAGE = Path(__file__).resolve().parents[2] / "docs" / "FORMAT.md"


def tiny() -> tuple[kv.Space, kv.Header, bytes]:
    space = kv.Space.read(make_vectors.space_inputs()["tiny"])
    header = make_vectors.header_for(space, "crc64nvme", {"a": 1, "b": 1, "m": 1 << 32, "n": 8})
    return space, header, make_vectors.pattern(space.payload_len)


def signed() -> tuple[kv.Space, kv.Header]:
    space = kv.Space.read(make_vectors.space_inputs()["signed"])
    return space, make_vectors.header_for(space, "blake3-keyed", {"a": 1, "b": 1, "m": 1 << 32, "n": 8})


def kinds(protection: str) -> list[str]:
    """The digests of such spaces."""
    return [kind for kind in kv.DIGEST_KINDS if kv.PROTECTED.get(kind, "none") == protection]


class Vectors(unittest.TestCase):
    def test_file_is_current(self) -> None:
        made = make_vectors.render()
        same = made == make_vectors.VECTORS.read_text(encoding="ascii")
        self.assertTrue(same, "tests/data/vectors.json is not what make_vectors.py writes")
        self.assertLess(len(made), 500_000)

    def test_invalid_spaces_are_refused(self) -> None:
        for case in make_vectors.invalid_spaces():
            with self.subTest(**case), self.assertRaises(kv.FormatError):
                kv.Space.read(case["input"])

    def test_canonical_json_is_read_back_to_itself(self) -> None:
        for name, value in make_vectors.space_inputs().items():
            with self.subTest(name):
                space = kv.Space.read(value)
                again = kv.Space.read(json.loads(space.canonical))
                self.assertEqual(again, space)
                self.assertEqual(again.canonical, space.canonical)

    def test_needed_chunks_are_those_of_the_tokens_that_are_attended_to(self) -> None:
        def reads(kind: kv.Kind, following: int, token: int) -> bool:
            if kind.name == "window":
                return following - token < kind.tokens
            if kind.name == "chunked":
                return token // kind.tokens == following // kind.tokens
            return kind.name == "full" or token == following - 1

        kinds = [kv.Kind("full"), kv.Kind("state")]
        kinds += [kv.Kind(name, tokens) for name in ("window", "chunked") for tokens in range(1, 30)]
        for kind in kinds:
            for width in (1, 4, 7):
                for boundary in range(12):
                    tokens = range(boundary * width)
                    want = sorted({token // width for token in tokens if reads(kind, boundary * width, token)})
                    self.assertEqual(list(kind.needed(boundary, width)), want, (kind, width, boundary))

    def test_all_kinds_of_a_model_have_the_same_chunk_hashes(self) -> None:
        names = ("tiny", "window", "chunked", "state", "draft")
        spaces = [self.space(name) for name in names]
        self.assertEqual(len({space.id for space in spaces}), len(names))
        self.assertEqual(len({space.model_id for space in spaces}), 1)

    def test_rfc8785_order(self) -> None:
        names = ["\r", "1", "\x80", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
        written = kv.canonical_json(dict.fromkeys(sorted(names), ""))
        self.assertEqual(list(json.loads(written)), names)

    def test_bad_headers_are_refused(self) -> None:
        spaces = {name: kv.Space.read(value) for name, value in make_vectors.space_inputs().items()}
        for case in make_vectors.bad_headers(spaces):
            name, kind = case["base"].split("-", 1)
            header = make_vectors.header_for(spaces[name], kind, {"a": 1, "b": 1, "m": 1 << 32, "n": 8})
            patches = [(patch["offset"], bytes.fromhex(patch["hex"])) for patch in case["patches"]]
            bad = make_vectors.patched(header.build(), patches, case["reseal"])
            with self.subTest(case["reason"]), self.assertRaises(kv.FormatError):
                kv.Header.parse(bad).expect(spaces[name], header.chunk, [make_vectors.KEY])

    @staticmethod
    def space(name: str) -> kv.Space:
        return kv.Space.read(make_vectors.space_inputs()[name])


class Checksums(unittest.TestCase):
    def test_crc_check_value(self) -> None:
        self.assertEqual(kv.crc64nvme(b"123456789"), 0xAE8B14860A799888)

    def test_crc_is_the_one_of_awscrt(self) -> None:
        for length in (0, 1, 7, 8, 9, 255, 256, 4097, 100_003):
            data = make_vectors.pattern(length)
            self.assertEqual(kv.crc64nvme(data), crc64nvme(data))


class Encryption(unittest.TestCase):
    def test_nist_vectors(self) -> None:
        """Test cases 13 to 15 of the GCM specification."""
        text = bytes.fromhex(
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255"
        )
        pair = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
        zeros = bytes(32)
        for key, nonce, plain, tag in (
            (zeros, bytes(12), b"", "530f8afbc74536b9a963b4f1c4cb738b"),
            (zeros, bytes(12), bytes(16), "d0d1c8a799996bf0265b98b5d48ab919"),
            (pair, bytes.fromhex("cafebabefacedbaddecaf888"), text, "b094dac5d93471bdec1a502270e3cc6c"),
        ):
            data, made = aes_gcm.encrypt(key, nonce, plain)
            self.assertEqual(made.hex(), tag)
            self.assertEqual(aes_gcm.decrypt(key, nonce, data, made), plain)
            with self.assertRaises(ValueError):
                aes_gcm.decrypt(key, nonce, data, bytes(16))

    def test_an_object_is_read_with_its_key_only(self) -> None:
        space = Vectors.space("encrypted")
        header = make_vectors.header_for(space, "aes256-gcm", {"a": 1, "b": 1, "m": 1 << 32, "n": 8})
        plain = make_vectors.pattern(space.payload_len)
        payload, _ = kv.encrypted(space, make_vectors.KEY, header.chunk, make_vectors.SALT, plain)
        self.assertEqual(kv.decrypted(space, make_vectors.KEY, header, payload), plain)
        for key, bad in ((bytes(32), payload), (make_vectors.KEY, b"x" + payload[1:]), (make_vectors.KEY, plain)):
            with self.assertRaises(kv.FormatError):
                kv.decrypted(space, key, header, bad)


class Headers(unittest.TestCase):
    def test_round_trip(self) -> None:
        for name in (
            "tiny",
            "k-and-v",
            "200-layers",
            "window",
            "chunked",
            "state",
            "draft-state",
            "signed",
            "encrypted",
        ):
            space = Vectors.space(name)
            for kind in kinds(space.protection):
                tokens = {"a": 1, "b": 1, "m": 9, "n": 2 * space.chunk_tokens}
                header = make_vectors.header_for(space, kind, tokens)
                self.assertEqual(len(header.build()), space.header_len)
                self.assertEqual(kv.Header.parse(header.build()), header)
                header.expect(space, header.chunk, [bytes(32), make_vectors.KEY])

    def test_every_flipped_byte_is_refused(self) -> None:
        for good in (tiny()[1].build(), signed()[1].build()):
            for at in range(len(good)):
                bad = bytearray(good)
                bad[at] ^= 1 << at % 8
                with self.assertRaises(kv.FormatError):
                    kv.Header.parse(bytes(bad))

    def test_flips_with_a_new_header_digest_are_refused(self) -> None:
        space, header, payload = tiny()
        good = header.build()
        for at in range(len(good) - 32):
            bad = make_vectors.patched(good, [(at, bytes([good[at] ^ 1]))], reseal=True)
            if 80 <= at < 112:  # the parent is not among what a reader asks for
                kv.Header.parse(bad).expect(space, header.chunk)
                continue
            with self.assertRaises(kv.FormatError, msg=f"byte {at}"):
                read = kv.Header.parse(bad)
                read.expect(space, header.chunk)
                if read.digests != kv.plane_digests(space, read.digest, payload):
                    raise kv.FormatError("plane digest is wrong")

    def test_no_flip_of_a_signed_header_is_accepted_with_the_key_or_without(self) -> None:
        space, header = signed()
        good = header.build()
        for at in range(len(good) - 32):
            bad = make_vectors.patched(good, [(at, bytes([good[at] ^ 1]))], reseal=True)
            with self.assertRaises(kv.FormatError, msg=f"byte {at}"):
                kv.Header.parse(bad).expect(space, header.chunk, [make_vectors.KEY])
        for keys in ([], [bytes(32)]):
            with self.assertRaises(kv.FormatError):
                kv.Header.parse(good).expect(space, header.chunk, keys)

    def test_cut_off(self) -> None:
        good = tiny()[1].build()
        for length in (0, 1, 255, 256, 4095):
            with self.assertRaises(kv.FormatError):
                kv.Header.parse(good[:length])


class Masks(unittest.TestCase):
    def test_round_trip(self) -> None:
        for case in make_vectors.masks():
            self.assertEqual(kv.mask_bits(bytes.fromhex(case["hex"]), case["n"]), case["bits"])

    def test_padding_and_length(self) -> None:
        for data, n in ((b"\x02", 1), (b"", 1), (b"\0\0", 8), (b"\xff\x02", 9)):
            with self.assertRaises(kv.FormatError):
                kv.mask_bits(data, n)


class Runs(unittest.TestCase):
    def test_the_page_has_this_hint(self) -> None:
        following = [bytes.fromhex("00010203" + 28 * "00"), bytes.fromhex("ff000000" + 28 * "00")]
        page = PAGE.read_text(encoding="utf-8")
        self.assertIn(f"\n    {kv.run_text(following)}\n", page)

    def test_what_is_no_hint_is_refused(self) -> None:
        for bad in ("", "0", "2AAAAAA", "1AAAAAA==", "1AAAAA", "1A", "1AAAAAA ", "1AAAAAAA", "1ä", "1" + 1368 * "A"):
            with self.assertRaises(kv.FormatError, msg=bad):
                kv.run_agrees(bad, [])


class Page(unittest.TestCase):
    def test_worked_example(self) -> None:
        """Every indented line of section 7 is computed, and every computed line is there, in order."""
        section = PAGE.read_text(encoding="utf-8").split("\n## 7. Worked example\n")[1].split("\n## ")[0]
        lines = [line[4:] for line in section.splitlines() if re.match(r" {4}\S", line)]
        blocks = make_vectors.example().values()
        self.assertEqual(lines, [line for block in blocks for line in block])


class FakeS3:
    """As much of boto3's client as check_objects uses."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def get_paginator(self, _name: str) -> FakeS3:
        return self

    def paginate(self, **named: str) -> Iterator[dict[str, Any]]:
        yield {}
        for key in sorted(self.objects):
            if key.startswith(named["Prefix"]):
                yield {"Contents": [{"Key": key, "Size": len(self.objects[key])}]}

    def get_object(self, **named: str) -> dict[str, Any]:
        return {"Body": io.BytesIO(self.objects[named["Key"]])}


class CheckObjects(unittest.TestCase):
    def setUp(self) -> None:
        self.space, _, payload = tiny()
        hasher = kv.Hasher(self.space.model_id, 4)
        self.tokens = list(range(1, 9))
        self.objects = {kv.space_key("p", self.space.id): self.space.canonical}
        parent = hasher.root()
        for kind, chunk in zip(kinds("none"), hasher.chain(self.tokens), strict=True):
            digests = kv.plane_digests(self.space, kind, payload)
            header = kv.Header(self.space.id, chunk, parent, 4, len(payload), self.space.kind, False, kind, digests)
            self.objects[kv.chunk_key("p", self.space.id, chunk)] = header.build() + payload
            parent = chunk
        self.keys = [key for key in self.objects if not key.endswith(".json")]

    def check(self, tokens: list[list[int]] | None = None) -> check_objects.Report:
        report = check_objects.check_all(FakeS3(self.objects), "b", "p")
        if tokens is not None:
            check_objects.check_tokens(report, "p", self.space, tokens)
        return report

    def test_all_is_well(self) -> None:
        self.objects["p/.kvgate/probe"] = b""
        self.objects["elsewhere"] = b""
        report = self.check([self.tokens, self.tokens[:6]])
        self.assertEqual(report.wrong, [])
        self.assertEqual((len(report.chunks), report.tokens_checked, report.probes), (2, 3, 1))

    def test_each_thing_wrong_is_found(self) -> None:
        first, second = self.keys
        space_json = kv.space_key("p", self.space.id)
        resealed = kv.seal(self.objects[first][:100] + b"\xff" + self.objects[first][101:4064])
        changes: dict[str, tuple[Callable[[], object], str]] = {
            "header byte": (lambda: self.flip(first, 300), "header digest"),
            "payload byte": (lambda: self.flip(first, 4096 + 200), "plane 1 (layer 1, kv)"),
            "payload byte, blake3": (lambda: self.flip(second, 4096), "plane 0 (layer 0, kv)"),
            "cut": (lambda: self.objects.update({first: self.objects[first][:-1]}), "4351 bytes"),
            "longer": (lambda: self.objects.update({first: self.objects[first] + b"x"}), "4353 bytes"),
            "swapped": (lambda: self.objects.update({first: self.objects[second]}), "another key"),
            "parent": (lambda: self.objects.update({first: resealed + self.objects[first][4096:]}), "parent"),
            "gone": (lambda: self.objects.pop(second), "not there"),
            "stray": (lambda: self.objects.update({"p/notes.txt": b""}), "not a key"),
            "no space": (lambda: self.objects.pop(space_json), "no valid space.json"),
            "space spaced": (lambda: self.objects.update({space_json: self.space.canonical + b"\n"}), "canonical"),
            "space broken": (lambda: self.objects.update({space_json: b"{"}), "space.json"),
        }
        for name, (change, says) in changes.items():
            with self.subTest(name):
                self.setUp()
                change()
                self.assertIn(says, "\n".join(self.check([self.tokens]).wrong))

    def flip(self, key: str, at: int) -> None:
        data = bytearray(self.objects[key])
        data[at] ^= 1
        self.objects[key] = bytes(data)


if __name__ == "__main__":
    unittest.main()
