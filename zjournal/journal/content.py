"""Contents: payloads stored once per tenant under HMAC(tenant secret, bytes), compressed, counted by reference.

Who refers to a content is a pure function of the facts (`references`), so the counts can be recomputed and checked.
The name is keyed with the tenant's own secret: equal bytes of two tenants have two names and two rows, and a name
does not tell what it names.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import zstandard

from zjournal.errors import JournalFault
from zjournal.journal import chain
from zjournal.journal.events import AnyEvent, EngineImported, EngineStarted, Fact, PromptRendered, RequestAccepted

CONTENT_BYTES_MAX = 256 << 20
ZSTD_LEVEL = 3


def references(event: AnyEvent) -> tuple[bytes, ...]:
    """The digests of contents that an event holds on to, in the order of its fields; b"" is no reference."""
    match event:
        case RequestAccepted():
            return tuple(digest for digest in (event.raw, event.items, event.client) if digest)
        case PromptRendered():
            return tuple(digest for digest in (event.tokens, event.spans) if digest)
        case EngineStarted() | EngineImported():
            return tuple(digest for digest in (event.vocabulary, event.template) if digest)
        case _:
            return ()


class Packer:
    """zstd with a kept compressor: a fresh one costs more than a small content. Not for two threads at once."""

    def __init__(self) -> None:
        self._compress = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress

    def pack(self, data: bytes) -> bytes:
        assert len(data) <= CONTENT_BYTES_MAX, len(data)
        return self._compress(data)


def unpack(data: bytes, size: int) -> bytes:
    """The inverse of pack. Raises ValueError when `data` is not one whole frame of `size` bytes."""
    if not 0 <= size <= CONTENT_BYTES_MAX:
        raise ValueError(f"its size is {size}")
    try:
        told = zstandard.frame_content_size(data)
        if told != size:
            raise ValueError(f"its frame holds {told} bytes, not {size}")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"its frame cannot be read ({error})") from None
    if len(plain) != size:
        raise ValueError(f"it has {len(plain)} bytes, not {size}")
    return plain


def hold(db: sqlite3.Connection, packer: Packer, fact: Fact, secret: bytes | None) -> None:
    """Counts one reference for each content that the fact names, storing those that are new.

    Runs inside the writer's transaction. A fact must name what it offers, and offer what is not stored.
    """
    wanted = references(fact.event)
    if not wanted:
        assert not fact.contents, f"{type(fact.event).__name__} refers to no content"
        return
    assert secret is not None, f"unknown tenant {fact.event.tenant!r}"
    offered = {chain.content_digest(secret, data): data for data in fact.contents}
    assert offered.keys() <= set(wanted), "a fact offers a content that it does not name"
    for digest in wanted:
        if db.execute("UPDATE content SET refs = refs + 1 WHERE digest = ?", (digest,)).rowcount:
            continue
        assert digest in offered, "a fact names a content that is neither stored nor offered"
        data = offered[digest]
        db.execute(
            "INSERT INTO content (digest, tenant, size, refs, data) VALUES (?, ?, ?, 1, ?)",
            (digest, fact.event.tenant, len(data), packer.pack(data)),
        )


def drop(db: sqlite3.Connection, digests: Sequence[bytes]) -> int:
    """Takes back one reference for each digest; a content without references goes. Returns the bytes that went."""
    freed = 0
    for digest in digests:
        changed = db.execute("UPDATE content SET refs = refs - 1 WHERE digest = ?", (digest,)).rowcount
        assert changed == 1, "a reference is dropped that was never held"
    for digest in dict.fromkeys(digests):
        gone = "DELETE FROM content WHERE digest = ? AND refs = 0 RETURNING length(data)"
        freed += sum(size for (size,) in db.execute(gone, (digest,)))
    return freed


def stored(db: sqlite3.Connection, tenant: str, digest: bytes) -> tuple[int, bytes]:
    """Size and frame of a content as they stand in the table, unchecked. Raises JournalFault when they are gone."""
    row = db.execute("SELECT size, data FROM content WHERE digest = ? AND tenant = ?", (digest, tenant)).fetchone()
    if row is None:
        raise JournalFault(
            f"content {digest.hex()} is not in the journal: it was erased, or never belonged to {tenant}"
        )
    return row


def opened(secret: bytes, digest: bytes, size: int, data: bytes) -> bytes:
    """The bytes of a content, checked against its name. Raises JournalFault when they are damaged.

    It can take long, and belongs behind the end of the read transaction.
    """
    reason = fault_of(secret, digest, size, data)
    if reason:
        raise JournalFault(f"content {digest.hex()} is damaged: {reason}; run `zj journal verify`")
    return unpack(data, size)


def fault_of(secret: bytes, digest: bytes, size: int, data: bytes) -> str | None:
    """Why a content row is wrong, as half a sentence; None when it is right."""
    try:
        plain = unpack(data, size)
    except ValueError as error:
        return str(error)
    except TypeError:
        return "its columns are of the wrong type"
    return None if chain.content_digest(secret, plain) == digest else "its bytes do not match its digest"
