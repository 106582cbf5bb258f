"""The chunk file's header, its names, and the chain of hashes: bytes in, bytes out, no files.

A chunk is the KV of up to 256 tokens of all layers: up to 16 blocks, each the bytes of one page. Its header has one
page of 4,096 bytes and tells everything that must be known before the blocks are read; each block is a section of
its own, with a checksum of its own, so that a match that ends within a chunk reads only what it needs.
docs/snapshots.md shows it byte by byte.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

import xxhash

MAGIC = b"zjchunk\x00"
VERSION = 1
PAGE_BYTES = 4096  # header and sections begin at multiples of it
HEADER_BYTES = PAGE_BYTES
TOKEN_BYTES = 4
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
CHUNK_TOKENS_BYTES = CHUNK_TOKENS * TOKEN_BYTES
DIGEST_BYTES = 32
CHECKSUM_BYTES = 16
MARK_BYTES = 4
BLOCK_BYTES_MAX = 64 << 20
BLOCK_BYTES_STEP = 4  # a block is so many bytes or a multiple: the shuffle works on elements of four
START_MAX = 1 << 30  # tokens
ROOT = bytes(DIGEST_BYTES)  # the parent of a first chunk
PLAIN = bytes(DIGEST_BYTES)  # `extra` of a chunk that is tokens and nothing else

SUFFIX = ".zjc"
PART_SUFFIX = ".part"
NAMESPACE_HEX = 16

_FIELDS = struct.Struct("<8sIIIIIIQQQ32s32s32s32s32s")
_TOKENS_AT = 256
_SECTIONS_AT = _TOKENS_AT + CHUNK_TOKENS_BYTES
_SECTION = struct.Struct("<QII16s")
_USED_END = _SECTIONS_AT + CHUNK_BLOCKS * _SECTION.size
_CHECKED = HEADER_BYTES - CHECKSUM_BYTES
_NAME = re.compile(r"([0-9a-f]{64})\.zjc")
_PART = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.part")
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_FAN = re.compile(r"[0-9a-f]{2}")

assert _FIELDS.size <= _TOKENS_AT and _USED_END <= _CHECKED


class Codec(IntEnum):
    """How a block is stored."""

    RAW = 0  # its bytes
    ZSTD = 1  # the first bytes of all its 4-byte elements, then the second, third and fourth; one zstd frame


class Reason(StrEnum):
    """Why a file is refused; what an event says of it."""

    MISSING = "missing"
    SYMLINK = "symlink"
    KIND = "kind"  # not a regular file
    CUT = "cut"
    TRAILING = "trailing"
    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"  # its checksum
    FIELDS = "fields"  # the checksum is right, and what it says cannot be
    HASH = "hash"  # it is another chunk than its name says
    NAMESPACE = "namespace"
    LAYOUT = "layout"
    PARENT = "parent"
    TOKENS = "tokens"
    SECTION = "section"  # the checksum of a block
    FRAME = "frame"  # a block cannot be unpacked
    UNREADABLE = "unreadable"  # the disk refuses


class Malformed(ValueError):
    """Bytes that are no header of ours; the message is half a sentence."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Section(NamedTuple):
    """Where a block is stored: `offset` and `stored` bytes of the file, `raw` bytes when unpacked.

    `checksum` is xxh3-128, canonical form, of the stored bytes and of the zeros up to the next page.
    """

    offset: int
    stored: int
    raw: int
    checksum: bytes

    @property
    def end(self) -> int:
        """Where the next section begins."""
        return self.offset + paged(self.stored)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a chunk is, apart from how it is stored. Digests have 32 bytes.

    `tokens` are packed uint32, little-endian; `start` is the position of the first; `layout` is of dtype and order
    within a block of `block_bytes`; `extra` is of what the tokens do not say (images), PLAIN if there is none.
    """

    namespace: bytes
    layout: bytes
    parent: bytes
    extra: bytes
    start: int
    tokens: bytes
    block_bytes: int

    @property
    def hash(self) -> bytes:
        return chain(self.parent, self.namespace, self.extra, self.tokens)

    @property
    def count(self) -> int:
        """Its tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def blocks(self) -> int:
        return blocks_for(self.count)


@dataclass(frozen=True, slots=True)
class Header:
    """A chunk and how its blocks are stored. `level` is zstd's, 0 for raw."""

    chunk: Chunk
    codec: Codec
    level: int
    sections: tuple[Section, ...]

    @property
    def file_bytes(self) -> int:
        return self.sections[-1].end


def paged(size: int) -> int:
    """The next multiple of a page."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def blocks_for(tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def stored_max(raw: int) -> int:
    """The most bytes that a block of `raw` bytes is stored in: zstd's bound for what cannot be compressed."""
    return raw + (raw >> 8) + 128


def chain(parent: bytes, namespace: bytes, extra: bytes, tokens: bytes) -> bytes:
    """The hash of a chunk, and so of everything up to its end."""
    assert len(parent) == len(namespace) == len(extra) == DIGEST_BYTES
    return hashlib.sha256(parent + namespace + extra + tokens).digest()


def digest(*parts: str) -> bytes:
    """The digest of a namespace or a layout: sha256 over this format's version and the parts with their lengths.

    The version is in it so that what an older format has stored is never looked for.
    """
    told = hashlib.sha256(b"zjournal snapshots %d" % VERSION)
    for part in parts:
        data = part.encode()
        told.update(len(data).to_bytes(8, "little") + data)
    return told.digest()


def marks(tokens: bytes) -> bytes:
    """Four bytes for each full block of packed tokens: how far two runs may agree. They prove nothing."""
    step = BLOCK_TOKENS * TOKEN_BYTES
    ends = range(step, len(tokens) + 1, step)
    return b"".join([xxhash.xxh32_digest(tokens[end - step : end]) for end in ends])


# --- names -----------------------------------------------------------------------------------------------


def file_name(hash_: bytes) -> str:
    """The file's name in its folder."""
    assert len(hash_) == DIGEST_BYTES
    return hash_.hex() + SUFFIX


def folders(namespace: bytes, hash_: bytes) -> tuple[str, str]:
    """The two folders a chunk lies in, the outer one first."""
    assert len(namespace) == len(hash_) == DIGEST_BYTES
    return namespace.hex()[:NAMESPACE_HEX], hash_.hex()[:2]


def named(name: str) -> bytes | None:
    """The hash that a file's name tells, None if it is no chunk's name."""
    found = _NAME.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


def is_part(name: str) -> bool:
    """Whether it is the name of a file that was being written."""
    return _PART.fullmatch(name) is not None


def is_folder(name: str, depth: int) -> bool:
    """Whether it is the name of a folder of ours: of a namespace (depth 0), or within one (depth 1)."""
    return (_FAN if depth else _NAMESPACE).fullmatch(name) is not None


# --- the header ------------------------------------------------------------------------------------------


def fault_of(chunk: Chunk) -> str | None:
    """Why a chunk cannot be, as half a sentence; None if it can."""
    digests = (chunk.namespace, chunk.layout, chunk.parent, chunk.extra)
    if any(len(one) != DIGEST_BYTES for one in digests):
        return "has a digest of another length"
    if len(chunk.tokens) % TOKEN_BYTES or not 0 < chunk.count <= CHUNK_TOKENS:
        return f"has {chunk.count} tokens, not 1 to {CHUNK_TOKENS}"
    if not 0 <= chunk.start <= START_MAX or chunk.start % CHUNK_TOKENS:
        return f"begins at token {chunk.start}, which is no multiple of {CHUNK_TOKENS} up to {START_MAX}"
    if (chunk.start == 0) != (chunk.parent == ROOT):
        return f"begins at token {chunk.start} and has {'no' if chunk.parent == ROOT else 'a'} parent"
    if not 0 < chunk.block_bytes <= BLOCK_BYTES_MAX or chunk.block_bytes % BLOCK_BYTES_STEP:
        return f"has blocks of {chunk.block_bytes} bytes, no multiple of {BLOCK_BYTES_STEP} up to {BLOCK_BYTES_MAX}"
    return None


def encode(header: Header) -> bytes:
    """The header's 4,096 bytes."""
    chunk = header.chunk
    assert fault_of(chunk) is None, fault_of(chunk)
    assert _sections_fault(chunk, header.codec, header.sections) is None
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.codec,
        header.level,
        BLOCK_TOKENS,
        chunk.blocks,
        chunk.count,
        chunk.start,
        chunk.block_bytes,
        header.file_bytes,
        chunk.namespace,
        chunk.layout,
        chunk.parent,
        chunk.hash,
        chunk.extra,
    )
    sections = b"".join(_SECTION.pack(*section) for section in header.sections)
    checked = fields.ljust(_TOKENS_AT, b"\0") + chunk.tokens.ljust(CHUNK_TOKENS_BYTES, b"\0") + sections
    checked = checked.ljust(_CHECKED, b"\0")
    return checked + xxhash.xxh3_128_digest(checked)


def decode(data: bytes) -> Header:
    """The inverse of encode. Raises Malformed for any other bytes; allocates nothing by a number that they tell."""
    if len(data) < HEADER_BYTES:
        raise Malformed(Reason.CUT, f"has {len(data)} bytes, less than a header")
    data = data[:HEADER_BYTES]
    magic, version, codec, level, block_tokens, blocks, count, start, block_bytes, file_bytes, *digests = (
        _FIELDS.unpack_from(data)
    )
    if magic != MAGIC:
        raise Malformed(Reason.MAGIC, "does not begin as a chunk does")
    if version != VERSION:
        raise Malformed(Reason.VERSION, f"has format version {version}, and this zjournal knows {VERSION}")
    if xxhash.xxh3_128_digest(data[:_CHECKED]) != data[_CHECKED:]:
        raise Malformed(Reason.HEADER, "has a header that does not match its checksum")
    if codec not in tuple(Codec):
        raise Malformed(Reason.FIELDS, f"has codec {codec}")
    if not 0 < count <= CHUNK_TOKENS or block_tokens != BLOCK_TOKENS or blocks != blocks_for(count):
        raise Malformed(Reason.FIELDS, f"has {blocks} blocks of {block_tokens} tokens for {count}")
    namespace, layout, parent, own, extra = digests
    tokens = data[_TOKENS_AT : _TOKENS_AT + count * TOKEN_BYTES]
    chunk = Chunk(namespace, layout, parent, extra, start, tokens, block_bytes)
    wrong = fault_of(chunk)
    sections = tuple(
        Section(*_SECTION.unpack_from(data, _SECTIONS_AT + index * _SECTION.size)) for index in range(blocks)
    )
    wrong = wrong or _sections_fault(chunk, Codec(codec), sections)
    if wrong is not None:
        raise Malformed(Reason.FIELDS, wrong)
    if own != chunk.hash:
        raise Malformed(Reason.HASH, "does not have the hash of its own tokens")
    header = Header(chunk, Codec(codec), level, sections)
    if file_bytes != header.file_bytes or encode(header) != data:
        raise Malformed(Reason.FIELDS, "has a header with something in it that nobody wrote there")
    return header


def _sections_fault(chunk: Chunk, codec: Codec, sections: tuple[Section, ...]) -> str | None:
    """Why the sections cannot be, as half a sentence: they follow each other, one per block, without a gap."""
    if len(sections) != chunk.blocks:
        return f"has {len(sections)} sections for {chunk.blocks} blocks"
    at = HEADER_BYTES
    for index, section in enumerate(sections):
        if section.offset != at or section.raw != chunk.block_bytes:
            return f"has block {index} at the wrong place, or of another size"
        most = section.raw if codec is Codec.RAW else stored_max(section.raw)
        if not 0 < section.stored <= most or (codec is Codec.RAW and section.stored != section.raw):
            return f"stores block {index} in {section.stored} bytes"
        at = section.end
    return None
