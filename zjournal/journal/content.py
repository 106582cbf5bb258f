"""Contents: payloads stored once per tenant under HMAC(tenant secret, bytes), compressed, counted by reference.

A content that repeats most of another one of its tenant is stored as a delta to it. That is a matter of storage
alone: its name is that of its bytes, and when its base goes it is stored anew in other terms.

Who refers to a content is a pure function of the facts (`references`), so the counts can be recomputed and checked.
The name is keyed with the tenant's own secret: equal bytes of two tenants have two names and two rows, and a name
does not tell what it names.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import zstandard

from zjournal.errors import JournalFault
from zjournal.journal import chain, delta
from zjournal.journal.events import AnyEvent, EngineImported, EngineStarted, Fact, RequestAccepted, TokensSampled

CONTENT_BYTES_MAX = 256 << 20
ZSTD_LEVEL = 3
DELTA_BYTES_MIN = 256  # a smaller content stands by itself
DEPTH_MAX = 1_000  # deltas in a row, so that reading one content has an end
PLAIN_BYTES_MAX = 16 << 20  # of contents that are remembered,
PLAINS_MAX = 1_024  # which are at most so many

_BY_DIGEST = "substr(digest, 1, 8) = substr(?, 1, 8) AND +digest = ?"  # the index has the first part only


def references(event: AnyEvent) -> tuple[bytes, ...]:
    """The digests of contents that an event holds on to, in the order of its fields; b"" is no reference."""
    match event:
        case TokensSampled():  # by far the most frequent
            return ()
        case RequestAccepted():
            return tuple(digest for digest in (event.record, event.client) if digest)
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


class Plains:
    """Contents as they are, the latest ones, so that a delta need not be resolved from the first one on.

    For any thread. What is erased must be cleared from here as well.
    """

    def __init__(self, bytes_max: int = PLAIN_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.erasures = 0  # how often it was cleared

    def get(self, digest: bytes) -> bytes | None:
        """The bytes of a content, if they are remembered."""
        with self._lock:
            found = self._known.get(digest)
            if found is not None:
                self._known.move_to_end(digest)
            return found

    def put(self, digest: bytes, data: bytes, erasures: int | None = None) -> None:
        """Remembers a content, whose digest must have been checked; not if there was an erasure since `erasures`."""
        with self._lock:
            late = erasures is not None and erasures != self.erasures
            if late or digest in self._known or len(data) > self._bytes_max:
                return
            self._known[digest] = data
            self._bytes += len(data)
            while self._bytes > self._bytes_max or len(self._known) > PLAINS_MAX:
                self._bytes -= len(self._known.popitem(last=False)[1])

    def clear(self) -> None:
        """Forgets everything, after an erasure."""
        with self._lock:
            self._known.clear()
            self._bytes = 0
            self.erasures += 1


def hold(db: sqlite3.Connection, packer: Packer, fact: Fact, secret: bytes | None, plains: Plains) -> None:
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
        if db.execute(f"UPDATE content SET refs = refs + 1 WHERE {_BY_DIGEST}", (digest, digest)).rowcount:
            continue
        assert digest in offered, "a fact names a content that is neither stored nor offered"
        _store(db, packer, fact, digest, offered[digest], plains)


def _store(db: sqlite3.Connection, packer: Packer, fact: Fact, digest: bytes, data: bytes, plains: Plains) -> None:
    """Stores a new content: as a delta to the fact's base where there is one, else whole."""
    tenant = fact.event.tenant
    base, depth, packed = None, 0, None
    if fact.base and len(data) >= DELTA_BYTES_MIN:
        query = f"SELECT id, depth FROM content WHERE {_BY_DIGEST} AND tenant = ? AND depth < ?"
        row = db.execute(query, (fact.base, fact.base, tenant, DEPTH_MAX)).fetchone()
        # It may have been erased meanwhile, or be another tenant's: then the content stands by itself.
        if row is not None:
            base, depth = row[0], row[1] + 1
            packed = delta.encode(data, _unfolded(_gathered(db, base, plains)))
    assert len(data) <= CONTENT_BYTES_MAX, len(data)
    db.execute(
        "INSERT INTO content (digest, tenant, size, refs, base, depth, data) VALUES (?, ?, ?, 1, ?, ?, ?)",
        (digest, tenant, len(data), base, depth, packer.pack(data) if packed is None else packed),
    )
    if base is not None or len(data) >= DELTA_BYTES_MIN:
        plains.put(digest, data)


def drop(db: sqlite3.Connection, digests: Sequence[bytes]) -> int:
    """Takes back one reference for each digest; a content without references goes. Returns the bytes that went.

    What was stored as a delta to it is stored anew first, as a delta to what it was a delta to itself.
    """
    freed = 0
    for digest in digests:
        changed = db.execute(f"UPDATE content SET refs = refs - 1 WHERE {_BY_DIGEST}", (digest, digest)).rowcount
        assert changed == 1, "a reference is dropped that was never held"
    for digest in dict.fromkeys(digests):
        query = f"SELECT id, base, length(data) FROM content WHERE {_BY_DIGEST} AND refs = 0"
        row = db.execute(query, (digest, digest)).fetchone()
        if row is not None:
            freed += row[2] - _rebase(db, row[0], row[1])
            db.execute("DELETE FROM content WHERE id = ?", (row[0],))
    return freed


def _rebase(db: sqlite3.Connection, gone: int, base: int | None) -> int:
    """Stores what is a delta to `gone` as a delta to `base`, or whole. Returns the bytes that this takes more."""
    rows = db.execute("SELECT id, size, data FROM content WHERE base = ?", (gone,)).fetchall()
    if not rows:
        return 0
    before = _unfolded(_gathered(db, gone))
    after = None if base is None else _unfolded(_gathered(db, base))
    more = 0
    for row, size, data in rows:
        plain = _decoded(data, size, before)
        packed = Packer().pack(plain) if after is None else delta.encode(plain, after)
        db.execute("UPDATE content SET base = ?, data = ? WHERE id = ?", (base, packed, row))
        more += len(packed) - len(data)
    return more


class Stored(msgspec.Struct, frozen=True):
    """A content as it stands in the table, unchecked, with all that it is a delta to."""

    frames: tuple[tuple[bytes, int, bytes], ...]  # digest, size and data; each a delta to the one behind it
    base: bytes | None = None  # what the last of them is a delta to
    erasures: int = 0  # of the memory, when it was read


def stored(db: sqlite3.Connection, tenant: str, digest: bytes, plains: Plains, erasures: int) -> Stored:
    """A content as it stands in the table, unchecked. Raises JournalFault when it is gone.

    `erasures`: those of `plains`, looked at before the transaction saw anything: later ones concern what it saw.
    """
    query = f"SELECT id FROM content WHERE {_BY_DIGEST} AND tenant = ?"
    row = db.execute(query, (digest, digest, tenant)).fetchone()
    if row is None:
        raise JournalFault(
            f"content {digest.hex()} is not in the journal: it was erased, or never belonged to {tenant}"
        )
    return msgspec.structs.replace(_gathered(db, row[0], plains), erasures=erasures)


def opened(secret: bytes, digest: bytes, stored: Stored, plains: Plains | None = None) -> bytes:
    """The bytes of a content, checked against its name. Raises JournalFault when they are damaged.

    It can take long, and belongs behind the end of the read transaction.
    """
    plain = _unfolded(stored)
    if stored.frames and chain.content_digest(secret, plain) != digest:
        raise damaged(digest, "its bytes do not match its digest")
    if plains is not None and len(plain) >= DELTA_BYTES_MIN:
        plains.put(digest, plain, stored.erasures)
    return plain


def there(db: sqlite3.Connection, digest: bytes) -> bool:
    """Whether there is a content of this name."""
    return db.execute(f"SELECT 1 FROM content WHERE {_BY_DIGEST}", (digest, digest)).fetchone() is not None


def damaged(digest: bytes, reason: str) -> JournalFault:
    """What is said of a content that cannot be believed."""
    return JournalFault(f"content {digest.hex()} is damaged: {reason}; run `zj journal verify`")


def _gathered(db: sqlite3.Connection, row: int, plains: Plains | None = None) -> Stored:
    """The content in this row with all that it is a delta to, as far as that is not known. Raises JournalFault."""
    frames: list[tuple[bytes, int, bytes]] = []
    at: int | None = row
    while at is not None:
        found = db.execute("SELECT digest, size, data, base FROM content WHERE id = ?", (at,)).fetchone()
        if found is None or (found[3] is not None and found[3] >= at):
            raise JournalFault(f"content {at} is missing, and others are deltas to it; run `zj journal verify`")
        known = plains.get(found[0]) if plains is not None else None
        if known is not None:
            return Stored(tuple(frames), known)
        frames.append(found[:3])
        at = found[3]
    return Stored(tuple(frames))


def _unfolded(stored: Stored) -> bytes:
    """The bytes of a content. Raises JournalFault when they do not come out.

    Digests are not checked on the way: a wrong base gives wrong bytes, which the caller's check of the last one finds.
    """
    plain = stored.base
    for digest, size, data in reversed(stored.frames):
        try:
            plain = _decoded(data, size, plain)
        except ValueError as error:
            raise damaged(digest, str(error)) from None
    assert plain is not None
    return plain


def _decoded(data: bytes, size: int, base: bytes | None) -> bytes:
    """A row's bytes. Raises ValueError."""
    return unpack(data, size) if base is None else delta.decode(data, base, size)


def fault_of(
    db: sqlite3.Connection, row: tuple[int, bytes, int, int | None, bytes], secret: bytes, plains: Plains
) -> str | None:
    """Why a content row (id, digest, size, base, data) is wrong, as half a sentence; None when it is right.

    What is right is remembered in `plains`, for those that are deltas to it.
    """
    at, digest, size, base, data = row
    try:
        if base is not None and base >= at:
            return "it is a delta to a later one"
        plain = _decoded(data, size, None if base is None else _unfolded(_gathered(db, base, plains)))
    except ValueError as error:
        return str(error)
    except TypeError:
        return "its columns are of the wrong type"
    except JournalFault as fault:
        return fault.message
    if chain.content_digest(secret, plain) != digest:
        return "its bytes do not match its digest"
    plains.put(digest, plain)
    return None
