"""Segments: facts that have been written for a while, packed by the hundred.

A fact in table `event` costs some two hundred bytes beside what it says: its link, its digest, the names that each
fact of a response repeats. Packed column by column and compressed, hundreds of facts share all that. Links and payload
digests are not stored, for they follow from the rest; the link after the last fact is, and proves all before it.

What is a fact, and what its link is computed over, does not change: unpacking gives the rows as they were. journal.rows
decides what is packed, and when. Pure: no SQL. docs/journal.md has the format.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec
import zstandard

from zjournal.journal import chain

VERSION = 1
LEVEL = 15
FACTS_MAX = 2_048  # in one segment
BYTES_MAX = 8 << 20  # of bodies and payloads in one segment, so that an erasure does not rewrite more
PLAIN_BYTES_MAX = 64 << 20  # of one segment unpacked: a fact may have a body and a payload of 16 MiB each
SHA_BYTES = 32
HEX = 32  # digits in the name of a response
_NAME = re.compile(rb"[a-z]+[-_][0-9a-f]{%d}" % HEX)


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


class _Cuts(msgspec.Struct, array_like=True):
    """Where names were cut out of bodies: column by column, one entry for each time one stands there."""

    steps: list[int] = []  # bodies from the one with the cut before
    before: list[int] = []  # bytes of the body since the cut before
    names: list[int] = []  # which name, counted from the one before


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """The columns. Bodies and payloads stand grouped by kind, for facts of one kind resemble each other."""

    version: int
    kinds: tuple[str, ...]  # such as "tokens_sampled.1"
    kind: bytes  # of each fact, as its index in `kinds`
    times: tuple[int, ...]  # of the first fact, then from fact to fact
    body_sizes: tuple[int, ...]
    payload_sizes: tuple[int, ...]  # salt included; 0: none, -1: gone
    names: tuple[bytes, ...]  # in the bodies, each once: the bytes of its hex digits, and what stands before these
    cuts: _Cuts
    bodies: bytes  # without those names
    low: bytes  # payloads without their salts: the first and second byte of each four,
    high: bytes  # and the third and fourth; empty where all are 0. All of it is in `low` if there is an odd byte
    chained: bytes  # for each payload: 1 if its salt follows from the one before it of the same response
    salts: bytes  # of the others
    gone: bytes  # the digests of payloads that are gone


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode


def pack(facts: Sequence[Bare]) -> bytes:
    """Facts in order, as one zstd frame. How many is for the caller to say: one that loses payloads is packed again."""
    assert facts
    kinds = list(dict.fromkeys(f"{fact.tag}.{fact.version}" for fact in facts))
    index = {kind: place for place, kind in enumerate(kinds)}
    kind = bytes(index[f"{fact.tag}.{fact.version}"] for fact in facts)
    times = [facts[0].time, *(b.time - a.time for a, b in pairwise(facts))]
    grouped = [facts[place] for place in _grouped(kind)]
    names, cuts, bodies = _cut_names([fact.body for fact in grouped])
    payloads = [fact.payload for fact in grouped if fact.payload is not None]
    low, high = _split_payloads(b"".join(payload[chain.SALT_BYTES :] for payload in payloads))
    sizes = [len(fact.payload) if fact.payload is not None else -1 if fact.had_payload else 0 for fact in grouped]
    chained, salts = _salts(grouped)
    packed = _Packed(
        version=VERSION,
        kinds=tuple(kinds),
        kind=kind,
        times=tuple(times),
        body_sizes=tuple(len(fact.body) for fact in grouped),
        payload_sizes=tuple(sizes),
        names=tuple(_packed_name(name) for name in names),
        cuts=cuts,
        bodies=b"".join(bodies),
        low=low,
        high=high,
        chained=chained,
        salts=salts,
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


def weights(facts: Sequence[Bare]) -> list[float]:
    """By how many bytes their segment becomes shorter, about, when the payload of each of its facts is erased.

    Its digest takes its place, so it may be fewer than none.
    """
    payloads = b"".join(fact.payload[chain.SALT_BYTES :] for fact in facts if fact.payload is not None)
    low, high = _split_payloads(payloads)
    share = len(zstandard.ZstdCompressor().compress(low + high)) / max(len(payloads), 1)
    last: dict[bytes, bytes] = {}
    found: list[float] = []
    for fact in facts:
        if fact.payload is None:
            found.append(0.0)
            continue
        whose, salt = _whose(fact.body), fact.payload[: chain.SALT_BYTES]
        stored = 0 if whose in last and chain.next_salt(last[whose]) == salt else chain.SALT_BYTES
        last[whose] = salt
        found.append(share * (len(fact.payload) - chain.SALT_BYTES) + stored - SHA_BYTES)
    return found


def _facts(packed: _Packed, first: int) -> list[Bare]:
    order = _grouped(packed.kind)
    bodies = _with_names(packed)
    bare = [max(size - chain.SALT_BYTES, 0) for size in packed.payload_sizes]
    payloads = _cut(_joined_payloads(packed.low, packed.high, sum(bare)), bare)
    salts = _with_salts(packed, bodies)
    gone = _cut(packed.gone, [SHA_BYTES if size < 0 else 0 for size in packed.payload_sizes])
    sizes_fit = all(size in (-1, 0) or size > chain.SALT_BYTES for size in packed.payload_sizes)
    if not sizes_fit or any(place >= len(packed.kinds) for place in packed.kind):
        raise ValueError("its columns do not fit together")
    times = list(accumulate(packed.times))
    names = [_split(kind) for kind in packed.kinds]
    if not all(0 <= time < 1 << 63 for time in times) or not all(version < 1 << 32 for _, version in names):
        raise ValueError("a version or a time in it is out of range")
    facts: list[Bare | None] = [None] * len(order)
    for at, place in enumerate(order):
        size = packed.payload_sizes[at]
        payload = salts[at] + payloads[at] if size > 0 else None
        sha = gone[at] if size < 0 else None
        tag, version = names[packed.kind[place]]
        facts[place] = Bare(first + place, times[place], tag, version, bodies[at], payload, sha)
    return [fact for fact in facts if fact is not None]


def _cut_names(bodies: Sequence[bytes]) -> tuple[list[bytes], _Cuts, list[bytes]]:
    """Takes the names out of bodies, for the same few stand in most of them: names, cuts, and what is left."""
    index: dict[bytes, int] = {}
    cuts = _Cuts()
    left: list[bytes] = []
    last = name = 0
    for number, body in enumerate(bodies):
        at = 0
        for found in _NAME.finditer(body):
            place = index.setdefault(found.group(), len(index))
            cuts.steps.append(number - last)
            cuts.before.append(found.start() - at)
            cuts.names.append(place - name)
            last, name = number, place
            left.append(body[at : found.start()])
            at = found.end()
        left.append(body[at:])
    return list(index), cuts, left


def _packed_name(name: bytes) -> bytes:
    return bytes.fromhex(name[-HEX:].decode()) + name[:-HEX]


def _plain_name(packed: bytes) -> bytes:
    return packed[HEX // 2 :] + packed[: HEX // 2].hex().encode()


def _with_names(packed: _Packed) -> list[bytes]:
    """The bodies, names put back in. `body_sizes` are those of whole bodies."""
    names = [_plain_name(name) for name in packed.names]
    inside: list[list[tuple[int, bytes]]] = [[] for _ in packed.body_sizes]
    number = place = 0
    cuts = packed.cuts
    if not len(cuts.steps) == len(cuts.before) == len(cuts.names):
        raise ValueError("its names do not fit together")
    for step, before, change in zip(cuts.steps, cuts.before, cuts.names, strict=True):
        number, place = number + step, place + change
        if not (0 <= number < len(inside) and 0 <= place < len(names) and before >= 0):
            raise ValueError("its names do not fit together")
        inside[number].append((before, names[place]))
    bodies: list[bytes] = []
    at = 0
    for size, cut in zip(packed.body_sizes, inside, strict=True):
        parts: list[bytes] = []
        left = size
        for before, name in cut:
            parts += (packed.bodies[at : at + before], name)
            at += before
            left -= before + len(name)
            if left < 0:
                raise ValueError("its bodies do not fit together")
        parts.append(packed.bodies[at : at + max(left, 0)])
        at += left
        bodies.append(b"".join(parts))
    if at != len(packed.bodies) or any(len(b) != size for b, size in zip(bodies, packed.body_sizes, strict=True)):
        raise ValueError("its bodies do not fit together")
    return bodies


def _whose(body: bytes) -> bytes:
    """The response that a body names first."""
    found = _NAME.search(body)
    return b"" if found is None else found.group()


def _salts(facts: Sequence[Bare]) -> tuple[bytes, bytes]:
    """For each payload whether its salt follows from the one before it, and the salts that do not."""
    chained = bytearray()
    salts: list[bytes] = []
    last: dict[bytes, bytes] = {}
    for fact in facts:
        if fact.payload is None:
            continue
        whose, salt = _whose(fact.body), fact.payload[: chain.SALT_BYTES]
        before = last.get(whose)
        follows = before is not None and chain.next_salt(before) == salt
        chained.append(follows)
        salts += [] if follows else [salt]
        last[whose] = salt
    return bytes(chained), b"".join(salts)


def _with_salts(packed: _Packed, bodies: Sequence[bytes]) -> list[bytes]:
    """The salt of each fact; empty where it has no payload."""
    count = sum(1 for size in packed.payload_sizes if size > 0)
    if len(packed.chained) != count or len(packed.salts) != chain.SALT_BYTES * packed.chained.count(0):
        raise ValueError("its salts do not fit together")
    salts: list[bytes] = []
    last: dict[bytes, bytes] = {}
    chained = iter(packed.chained)
    at = 0
    for body, size in zip(bodies, packed.payload_sizes, strict=True):
        if size <= 0:
            salts.append(b"")
            continue
        whose = _whose(body)
        if next(chained):
            if whose not in last:
                raise ValueError("its salts do not fit together")
            salt = chain.next_salt(last[whose])
        else:
            salt, at = packed.salts[at : at + chain.SALT_BYTES], at + chain.SALT_BYTES
        last[whose] = salt
        salts.append(salt)
    return salts


def _split_payloads(payloads: bytes) -> tuple[bytes, bytes]:
    """Token ids are nearly all the payload there is, and nearly all of them are below 65,536."""
    if len(payloads) % 4:
        return payloads, b""
    low, high = bytearray(len(payloads) // 2), bytearray(len(payloads) // 2)
    low[0::2], low[1::2] = payloads[0::4], payloads[1::4]
    high[0::2], high[1::2] = payloads[2::4], payloads[3::4]
    return bytes(low), bytes(high) if any(high) else b""


def _joined_payloads(low: bytes, high: bytes, size: int) -> bytes:
    if size % 4:
        return low
    if len(low) != size // 2 or len(high) not in (0, len(low)):
        raise ValueError("its payloads do not fit together")
    payloads = bytearray(size)
    payloads[0::4], payloads[1::4] = low[0::2], low[1::2]
    if high:
        payloads[2::4], payloads[3::4] = high[0::2], high[1::2]
    return bytes(payloads)


def _grouped(kind: bytes) -> list[int]:
    """The places of the facts, kind by kind, in order within each."""
    return sorted(range(len(kind)), key=kind.__getitem__)


def _cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends = list(accumulate(sizes, initial=0))
    if any(size < 0 for size in sizes) or ends[-1] != len(data):
        raise ValueError("its columns do not fit together")
    return [data[start:end] for start, end in pairwise(ends)]


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
