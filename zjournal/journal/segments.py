"""Segments: facts that have been written for a while, packed by the hundred.

A fact in table `event` costs some two hundred bytes beside what it says: its link, its digest, the names that each
fact of a response repeats. Packed column by column and compressed, hundreds of facts share all that. Links and payload
digests are not stored, for they follow from the rest; the link after the last fact is, and proves all before it.

What is a fact, and what its link is computed over, does not change: unpacking gives the rows as they were. journal.rows
decides what is packed, and when. Pure: no SQL. docs/journal.md has the format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import zstandard

from zjournal.journal import chain

VERSION = 1
LEVEL = 12
FACTS_MAX = 1_024  # in one segment
BYTES_MAX = 8 << 20  # of bodies and payloads in one segment, so that an erasure does not rewrite more
PLAIN_BYTES_MAX = 64 << 20  # of one segment unpacked: a fact may have a body and a payload of 16 MiB each


class Bare(msgspec.Struct, frozen=True, array_like=True):
    """A fact's columns without its link. `payload_sha` need not be there while the payload is."""

    seq: int
    time: int
    tag: str
    version: int
    body: bytes
    payload: bytes | None
    payload_sha: bytes | None

    @property
    def had_payload(self) -> bool:
        return self.payload is not None or self.payload_sha is not None


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """The columns. Bodies and payloads stand grouped by kind, for facts of one kind resemble each other."""

    version: int
    kinds: tuple[str, ...]  # such as "tokens_sampled.1"
    kind: bytes  # of each fact, as its index in `kinds`
    times: tuple[int, ...]  # of the first fact, then from fact to fact
    body_sizes: tuple[int, ...]
    payload_sizes: tuple[int, ...]  # salt included; 0: none, -1: gone
    bodies: bytes
    payloads: bytes  # without their salts
    salts: bytes
    gone: bytes  # the digests of payloads that are gone


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode


def pack(facts: Sequence[Bare]) -> bytes:
    """Facts in order, at most FACTS_MAX, as one zstd frame."""
    assert 0 < len(facts) <= FACTS_MAX, len(facts)
    kinds = list(dict.fromkeys(f"{fact.tag}.{fact.version}" for fact in facts))
    index = {kind: place for place, kind in enumerate(kinds)}
    kind = bytes(index[f"{fact.tag}.{fact.version}"] for fact in facts)
    times = [facts[0].time, *(b.time - a.time for a, b in zip(facts, facts[1:], strict=False))]
    grouped = [facts[place] for place in _grouped(kind)]
    sizes = [len(fact.payload) if fact.payload is not None else -1 if fact.had_payload else 0 for fact in grouped]
    payloads = [fact.payload for fact in grouped if fact.payload is not None]
    packed = _Packed(
        version=VERSION,
        kinds=tuple(kinds),
        kind=kind,
        times=tuple(times),
        body_sizes=tuple(len(fact.body) for fact in grouped),
        payload_sizes=tuple(sizes),
        bodies=b"".join(fact.body for fact in grouped),
        payloads=b"".join(payload[chain.SALT_BYTES :] for payload in payloads),
        salts=b"".join(payload[: chain.SALT_BYTES] for payload in payloads),
        gone=b"".join(fact.payload_sha for fact in grouped if fact.payload is None and fact.payload_sha is not None),
    )
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(_encode(packed))


def unpack(data: bytes, first: int, last: int) -> list[Bare]:
    """The inverse of pack: facts `first` to `last`. Raises ValueError when `data` does not hold them."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= PLAIN_BYTES_MAX:
            raise ValueError(f"its frame holds {size} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        packed = _decode(plain)
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise ValueError(f"it cannot be read ({error})") from None
    count = last - first + 1
    columns = (packed.kind, packed.times, packed.body_sizes, packed.payload_sizes)
    if packed.version != VERSION or any(len(column) != count for column in columns):
        raise ValueError(f"it does not hold facts {first} to {last}")
    return _facts(packed, first)


def _facts(packed: _Packed, first: int) -> list[Bare]:
    order = _grouped(packed.kind)
    bodies = _cut(packed.bodies, packed.body_sizes)
    bare = [max(size - chain.SALT_BYTES, 0) for size in packed.payload_sizes]
    payloads = _cut(packed.payloads, bare)
    salts = _cut(packed.salts, [chain.SALT_BYTES if size > 0 else 0 for size in packed.payload_sizes])
    gone = _cut(packed.gone, [32 if size < 0 else 0 for size in packed.payload_sizes])
    if any(-1 > size or 0 < size <= chain.SALT_BYTES for size in packed.payload_sizes) or any(
        place >= len(packed.kinds) for place in packed.kind
    ):
        raise ValueError("its columns do not fit together")
    times = list(accumulate(packed.times))
    names = [_split(kind) for kind in packed.kinds]
    facts: list[Bare | None] = [None] * len(order)
    for at, place in enumerate(order):
        size = packed.payload_sizes[at]
        payload = salts[at] + payloads[at] if size > 0 else None
        sha = gone[at] if size < 0 else None
        tag, version = names[packed.kind[place]]
        facts[place] = Bare(first + place, times[place], tag, version, bodies[at], payload, sha)
    return [fact for fact in facts if fact is not None]


def _grouped(kind: bytes) -> list[int]:
    """The places of the facts, kind by kind, in order within each."""
    return sorted(range(len(kind)), key=kind.__getitem__)


def _cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends = list(accumulate(sizes, initial=0))
    if any(size < 0 for size in sizes) or ends[-1] != len(data):
        raise ValueError("its columns do not fit together")
    return [data[start:end] for start, end in zip(ends, ends[1:], strict=False)]


def _split(kind: str) -> tuple[str, int]:
    tag, _, version = kind.rpartition(".")
    if not version.isdecimal():
        raise ValueError(f"it holds a fact of kind {kind!r}")
    return tag, int(version)


def linked(facts: Sequence[Bare], before: bytes) -> list[chain.Row]:
    """The rows of facts that follow the link `before`, links and payload digests computed."""
    rows: list[chain.Row] = []
    for fact in facts:
        sha = fact.payload_sha if fact.payload is None else hashlib.sha256(fact.payload).digest()
        before = chain.link(before, fact.seq, fact.tag, fact.version, fact.time, fact.body, sha)
        rows.append((fact.seq, fact.time, fact.tag, fact.version, fact.body, fact.payload, sha, before))
    return rows
