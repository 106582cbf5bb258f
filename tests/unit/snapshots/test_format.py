"""The header says what was put into it, or is refused with the reason."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from tests.unit.snapshots import chunks
from zjournal.snapshots import format
from zjournal.snapshots.format import Codec, Header, Malformed, Reason, Section

PAGE = Path(__file__).resolve().parents[3] / "docs" / "snapshots.md"


def header(count: int = 256, codec: Codec = Codec.RAW, block_bytes: int = 8192) -> Header:
    made = chunks.make(chunks.tokens(count), block_bytes=block_bytes)
    sections, at = [], format.HEADER_BYTES
    for index in range(made.blocks):
        stored = block_bytes if codec is Codec.RAW else block_bytes // 2 + index
        sections.append(Section(at, stored, block_bytes, bytes([index]) * 16))
        at = sections[-1].end
    return Header(made, codec, 1 if codec is Codec.ZSTD else 0, tuple(sections))


def resealed(data: bytearray) -> bytes:
    """The header with a checksum that is right for whatever is in it."""
    return bytes(data[:-16]) + xxhash.xxh3_128_digest(bytes(data[:-16]))


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 255, 256])
def test_what_was_encoded_is_decoded(count, codec):
    known = header(count, codec, 4100)
    data = format.encode(known)
    assert len(data) == 4096
    assert format.decode(data) == known
    assert format.decode(data + b"what comes behind is not looked at") == known


def test_hashes_chain():
    first, second, tail = chunks.split(chunks.tokens(600))
    assert second.parent == first.hash and tail.parent == second.hash and tail.count == 88
    assert first.hash == hashlib.sha256(bytes(32) + chunks.NAMESPACE + bytes(32) + first.tokens).digest()
    other = [replace(first, namespace=bytes(32)), replace(first, extra=b"i" * 32), replace(first, tokens=tail.tokens)]
    assert len({one.hash for one in (first, *other)}) == 4


def test_digests_depend_on_where_a_part_ends():
    assert len({format.digest(*parts) for parts in ((), ("ab",), ("a", "b"), ("", "ab"), ("ab", ""))}) == 5


def test_every_bit_of_the_header_counts():
    for data in (format.encode(header()), format.encode(header(1, Codec.ZSTD))):
        for bit in range(8 * len(data)):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(Malformed) as refused:
                format.decode(bytes(damaged))
            assert refused.value.reason in (Reason.MAGIC, Reason.VERSION, Reason.HEADER)


FORGED = [
    (12, struct.pack("<I", 2), Reason.FIELDS),  # codec
    (20, struct.pack("<I", 32), Reason.FIELDS),  # tokens of a block
    (24, struct.pack("<I", 15), Reason.FIELDS),  # blocks
    (28, struct.pack("<I", 0), Reason.FIELDS),  # tokens
    (28, struct.pack("<I", 255), Reason.HASH),
    (28, struct.pack("<I", 0xFFFFFFFF), Reason.FIELDS),
    (32, struct.pack("<Q", 256), Reason.FIELDS),  # start without a parent
    (32, struct.pack("<Q", 1 << 63), Reason.FIELDS),
    (40, struct.pack("<Q", 0), Reason.FIELDS),  # bytes of a block
    (40, struct.pack("<Q", 8190), Reason.FIELDS),
    (40, struct.pack("<Q", 1 << 62), Reason.FIELDS),
    (48, struct.pack("<Q", 4096), Reason.FIELDS),  # bytes of the file
    (56, b"\1", Reason.HASH),  # namespace
    (120, b"\1", Reason.FIELDS),  # parent of a first chunk
    (152, b"\1", Reason.HASH),  # own hash
    (184, b"\1", Reason.HASH),  # extra
    (216, b"\1", Reason.FIELDS),  # nobody's
    (256, b"\xff", Reason.HASH),  # a token
    (1280, struct.pack("<Q", 0), Reason.FIELDS),  # offset of block 0
    (1280, struct.pack("<Q", 1 << 63), Reason.FIELDS),
    (1288, struct.pack("<I", 0), Reason.FIELDS),  # its stored bytes
    (1288, struct.pack("<I", 0xFFFFFFFF), Reason.FIELDS),
    (1292, struct.pack("<I", 0xFFFFFFFF), Reason.FIELDS),  # its bytes
    (1792, b"\1", Reason.FIELDS),  # nobody's
    (4079, b"\1", Reason.FIELDS),
]


@pytest.mark.parametrize(("at", "new", "reason"), FORGED)
def test_a_right_checksum_is_not_enough(at, new, reason):
    data = bytearray(format.encode(header()))
    assert data[at : at + len(new)] != new
    data[at : at + len(new)] = new
    with pytest.raises(Malformed) as refused:
        format.decode(resealed(data))
    assert refused.value.reason is reason


def test_tokens_behind_the_last_are_refused():
    data = bytearray(format.encode(header(10)))
    data[256 + 40] = 1
    with pytest.raises(Malformed, match="nobody wrote"):
        format.decode(resealed(data))


def test_another_version_is_told_before_its_checksum():
    data = bytearray(format.encode(header()))
    data[8:12] = struct.pack("<I", 2)
    with pytest.raises(Malformed, match="format version 2, and this zjournal knows 1") as refused:
        format.decode(bytes(data))
    assert refused.value.reason is Reason.VERSION


def test_a_short_header_is_cut():
    for size in (0, 1, 255, 4095):
        with pytest.raises(Malformed) as refused:
            format.decode(format.encode(header())[:size])
        assert refused.value.reason is Reason.CUT


def test_names():
    hash_ = bytes(range(32))
    assert format.folders(chunks.NAMESPACE, hash_) == (chunks.NAMESPACE.hex()[:16], "00")
    assert format.named(format.file_name(hash_)) == hash_
    wrong = ("", "x.zjc", f"{hash_.hex()}.zjc\n", f"{hash_.hex().upper()}.zjc", f"../{hash_.hex()}.zjc", hash_.hex())
    assert [format.named(name) for name in wrong] == [None] * len(wrong)
    assert format.is_part(f"{hash_.hex()}.{'0' * 16}.part") and not format.is_part(format.file_name(hash_))
    assert format.is_folder("0" * 16, 0) and format.is_folder("0a", 1)
    assert not any(format.is_folder(name, depth) for name in ("..", "0A", "quarantine", "") for depth in (0, 1))


def test_marks_are_of_full_blocks_and_of_each_alone():
    one, other = chunks.tokens(40), chunks.tokens(40, 1)
    assert len(format.marks(one)) == 8 and format.marks(one[:63]) == b""
    assert format.marks(other[:64] + one[64:])[4:] == format.marks(one)[4:]
    assert format.marks(other) != format.marks(one)


def test_the_page_shows_a_file_that_is_one():
    """The worked example, byte for byte, made again from what the page says it is."""
    text = PAGE.read_text()
    shown = dict(re.findall(r"^\| `([a-z ]+)` \| `([0-9a-f]+)` \|$", text, re.MULTILINE))
    made = format.Chunk(
        bytes([0x11] * 32), bytes([0x22] * 32), format.ROOT, format.PLAIN, 0, chunks.packed([1, 2, 3]), 8
    )
    block = bytes(range(8))
    checksum = xxhash.xxh3_128_digest(block.ljust(4096, b"\0"))
    data = format.encode(Header(made, Codec.RAW, 0, (Section(4096, 8, 8, checksum),)))
    assert shown == {
        "hash": made.hash.hex(),
        "fields": data[:56].hex(),
        "tokens": data[256:268].hex(),
        "section": data[1280:1312].hex(),
        "checksum": data[4080:].hex(),
        "marks": format.marks(chunks.packed(range(16))).hex(),
    }
