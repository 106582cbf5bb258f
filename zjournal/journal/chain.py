"""The hash chain: how a fact becomes a row, and what its link is computed over.

The preimage below is frozen: a journal written today must verify for ever. docs/journal.md shows it byte by byte.
The payload takes part by its digest only, and is stored behind 16 random bytes, so that it can be erased without
breaking the chain and cannot be guessed back from the digest that stays.

Pure: no clock, no entropy, no I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import typing
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from zjournal.journal.events import AnyEvent, Recorded, decode_body

FORMAT = 1  # of the preimage and of the row
SALT_BYTES = 16
NO_PAYLOAD = bytes(32)  # stands in the preimage of a fact that never had a payload
BODY_BYTES_MAX = 16 << 20
PAYLOAD_BYTES_MAX = 16 << 20

_SEQ_TAG = struct.Struct(">QI")
_VERSION_TIME_BODY = struct.Struct(">IQI")


def _split(tag: str) -> tuple[str, int]:
    name, version = tag.rsplit(".", 1)
    return name, int(version)


# Struct -> (tag, version) as they stand in their two columns.
TAGS: Mapping[type, tuple[str, int]] = MappingProxyType(
    {kind: _split(kind.__struct_config__.tag) for kind in typing.get_args(AnyEvent)}
)

# A row of table `event`: seq, time, tag, version, body, payload, payload_sha, link.
Row = tuple[int, int, str, int, bytes, bytes | None, bytes | None, bytes]
COLUMNS = "seq, time, tag, version, body, payload, payload_sha, link"
_COLUMN_TYPES: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("seq", (int,)),
    ("time", (int,)),
    ("tag", (str,)),
    ("version", (int,)),
    ("body", (bytes,)),
    ("payload", (bytes, type(None))),
    ("payload_sha", (bytes, type(None))),
    ("link", (bytes,)),
)


class Head(msgspec.Struct, frozen=True):
    """The end of the chain: the last fact's number, link and time (microseconds). An empty journal has seq 0."""

    seq: int
    link: bytes
    time: int


def genesis(journal_id: bytes, secret: bytes) -> Head:
    """The head before the first fact. It binds the chain to this journal's id and secret (both in table `meta`)."""
    text = b"zjournal journal" + struct.pack(">I", FORMAT)
    return Head(0, hashlib.sha256(text + journal_id + hashlib.sha256(secret).digest()).digest(), 0)


def link(previous: bytes, seq: int, tag: str, version: int, time: int, body: bytes, payload_sha: bytes | None) -> bytes:
    """SHA-256 over the frozen preimage; 32 bytes. `previous` is the link of seq - 1."""
    name = tag.encode()
    preimage = b"".join(
        (
            previous,
            _SEQ_TAG.pack(seq, len(name)),
            name,
            _VERSION_TIME_BODY.pack(version, time, len(body)),
            body,
            payload_sha or NO_PAYLOAD,
        )
    )
    return hashlib.sha256(preimage).digest()


def type_fault_of(row: Row) -> str | None:
    """Which column of a row as read holds the wrong type, as half a sentence; None when none does."""
    for value, (name, kinds) in zip(row, _COLUMN_TYPES, strict=True):
        if type(value) not in kinds:
            return f"column {name} holds a {type(value).__name__}"
    return None


def fault_of(row: Row, before: Head) -> str | None:
    """Why `row` cannot follow `before`, as half a sentence; None when it does. A row may hold anything."""
    if wrong := type_fault_of(row):
        return wrong
    seq, time, tag, version, body, payload, payload_sha, recorded_link = row
    if seq != before.seq + 1:
        return f"facts {before.seq + 1} to {seq - 1} are missing" if seq > before.seq + 1 else "the numbers go back"
    if not 0 <= version < 1 << 32 or not 0 <= time < 1 << 63:
        return "version or time is out of range"
    if payload_sha is not None and len(payload_sha) != 32:
        return f"its payload digest has {len(payload_sha)} bytes"
    if payload is not None and payload_sha is None:
        return "it has a payload but no digest of one"
    if link(before.link, seq, tag, version, time, body, payload_sha) != recorded_link:
        return "its link does not follow from its columns and the link before it"
    if payload is not None and hashlib.sha256(payload).digest() != payload_sha:
        return "its payload does not match its digest"
    if payload is not None and len(payload) <= SALT_BYTES:
        return "its payload is shorter than its salt"
    if time < before.time:
        return "its time lies before that of the fact before it"
    return None


def head_of(row: Row) -> Head:
    """The head after a row that has been checked."""
    return Head(row[0], row[7], row[1])


def recorded(seq: int, time: int, body: bytes, payload: bytes | None, payload_sha: bytes | None) -> Recorded:
    """A row's columns as a fact. Raises msgspec.MsgspecError when the body is of no known event."""
    if payload_sha is None:
        shown: bytes | None = b""
    elif payload is None:
        shown = None
    else:
        shown = payload[SALT_BYTES:]
    return Recorded(seq, time, decode_body(body), shown)


def next_salt(salt: bytes) -> bytes:
    """The salt of a response's next payload. It is as hard to guess as the first, and goes with it."""
    return hashlib.sha256(salt).digest()[:SALT_BYTES]


def content_digest(secret: bytes, data: bytes) -> bytes:
    """The name of a content: HMAC-SHA256(tenant secret, bytes); 32 bytes."""
    return hmac.digest(secret, data, "sha256")


def tenant_seal(journal_secret: bytes, tenant: str, name: str, secret: bytes) -> bytes:
    """Guards a tenant's row against damage, which would otherwise look like damage of all its contents."""
    parts = (tenant.encode(), name.encode(), secret)
    text = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return hmac.digest(journal_secret, b"tenant" + text, "sha256")


def tenant_sealed(journal_secret: bytes, tenant: object, name: object, secret: object, seal: object) -> bool:
    """Whether a tenant's row as read, which may hold anything, is the one that was sealed."""
    if isinstance(tenant, str) and isinstance(name, str) and isinstance(secret, bytes) and isinstance(seal, bytes):
        return hmac.compare_digest(tenant_seal(journal_secret, tenant, name, secret), seal)
    return False
