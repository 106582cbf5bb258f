"""The projections `snapshot`, `chunk` and `backup`: what is on disk of the KV, folded from the facts.

`chunk` has a row for each chunk file that a fact names, `snapshot` one for each response of which something can be
restored, `backup` one for each fact whose payload tells the marks of chunks, so that they can be erased with the turn.
A chunk's number is that of the fact which first named it and its place in there: so the rows come out the same however
often they are folded, and each chunk has a higher number than its parent.

The rules are those of zjournal.snapshots.index: a snapshot needs its last chunk and all before it, and when its last
chunk goes, it ends one earlier, unless it would say nothing new there. The engine's index follows the same facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from zjournal.journal.events import (
    CacheBackedUp,
    CacheMatched,
    CachePurged,
    CacheQuarantined,
    CacheReconciled,
    CacheRestored,
    SnapshotPinned,
    SnapshotUnpinned,
)

Effect = tuple[str, tuple[Any, ...]]

ROOT = bytes(32)  # parent of a chunk that has none
MARK_BYTES, MARK_TOKENS = 4, 16  # of marks: for each full block
NUMBER_BITS = 20  # of a chunk's number, its place among the chunks of its fact
CHUNKS_MAX = 1 << 14  # in one fact
MET = ("whole", "extended", "forked")  # reasons of CacheMatched that tell how far two states agree
EVENTS = (
    CacheBackedUp,
    CacheMatched,
    CachePurged,
    CacheQuarantined,
    CacheReconciled,
    CacheRestored,
    SnapshotPinned,
    SnapshotUnpinned,
)
AnyKept = (
    CacheBackedUp
    | CacheMatched
    | CachePurged
    | CacheQuarantined
    | CacheReconciled
    | CacheRestored
    | SnapshotPinned
    | SnapshotUnpinned
)


class ChunkRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `chunk`: a file with the KV of up to 256 tokens. Hashes have 32 bytes."""

    number: int
    hash: bytes
    space: bytes
    parent: bytes  # ROOT if it has none
    tokens: int
    file_bytes: int
    marks: bytes  # b"" once the turn that told them was erased
    plain: bool
    bad: bool  # its file was refused or is missing, and was not written again since
    used_us: int  # written, or read back, last
    uses: int  # restores that ended with it


class SnapshotRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `snapshot`: what is on disk of the state of a response."""

    made_seq: int
    response: str
    session: str
    tenant: str
    namespace: str
    space: bytes
    end: bytes  # hash of its last chunk
    tokens: int
    made_us: int  # written last
    pinned: bool
    kept: int  # tokens of it that the session's next turn began with; -1: there is none yet


CHUNK_COLUMNS = "number, hash, space, parent, tokens, file_bytes, marks, plain, bad, used_us, uses"
SNAPSHOT_COLUMNS = "made_seq, response, session, tenant, namespace, space, end_hash, tokens, made_us, pinned, kept"
BACKUP_COLUMNS = "seq, response"

# As in projections: the part that the index has, and the whole.
BY_HASH = "substr(hash, 1, 8) = substr(?, 1, 8) AND +hash = ?"
BY_CHUNK_PARENT = "substr(parent, 1, 8) = substr(?, 1, 8) AND +parent = ?"
BY_END = "substr(end_hash, 1, 8) = substr(?, 1, 8) AND +end_hash = ?"
BY_RESPONSE = "substr(response, 1, 25) = substr(?, 1, 25) AND +response = ?"
INDEXES = (
    "CREATE UNIQUE INDEX chunk_hash ON chunk (substr(hash, 1, 8))",
    "CREATE INDEX chunk_parent ON chunk (substr(parent, 1, 8))",
    "CREATE UNIQUE INDEX snapshot_response ON snapshot (substr(response, 1, 25))",
    "CREATE INDEX snapshot_end ON snapshot (substr(end_hash, 1, 8))",
    "CREATE INDEX backup_response ON backup (substr(response, 1, 25))",
)
TABLES = {
    "chunk": CHUNK_COLUMNS,
    "snapshot": SNAPSHOT_COLUMNS,
    "backup": BACKUP_COLUMNS,
}

_PUT_CHUNK = (
    f"INSERT INTO chunk ({CHUNK_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, 0)"
    " ON CONFLICT (substr(hash, 1, 8)) DO UPDATE"
    " SET file_bytes = excluded.file_bytes, bad = 0, used_us = max(used_us, excluded.used_us)"
)
_PUT_BACKUP = "INSERT INTO backup (seq, response) VALUES (?, ?)"
_MOVE_SNAPSHOT = (
    "UPDATE snapshot SET namespace = ?, space = ?, end_hash = ?, tokens = ?, made_us = ?, kept = max(kept, ?)"
    f" WHERE {BY_RESPONSE}"
)
_PUT_SNAPSHOT = (
    f"INSERT INTO snapshot ({SNAPSHOT_COLUMNS})"
    " SELECT ?, response, session, tenant, ?, ?, ?, ?, ?, 0, ? FROM turn"
    f" WHERE {BY_RESPONSE} AND NOT EXISTS (SELECT 1 FROM snapshot WHERE {BY_RESPONSE})"
)
_USE = f"UPDATE chunk SET used_us = max(used_us, ?), uses = uses + ? WHERE {BY_HASH}"
_KEEP = (
    f"UPDATE snapshot SET kept = max(kept, ?) WHERE {BY_RESPONSE}"
    f" AND session = (SELECT session FROM turn WHERE {BY_RESPONSE})"
)
_BAD = f"UPDATE chunk SET bad = 1 WHERE {BY_HASH}"
_PIN = f"UPDATE snapshot SET pinned = ? WHERE {BY_RESPONSE}"
# The chunk before one that goes, and whether something else needs it.
_ITS_PARENT = f"(SELECT parent FROM chunk WHERE {BY_HASH})"
_NEEDED = (
    f"(SELECT count(*) FROM chunk AS other WHERE substr(other.parent, 1, 8) = substr({_ITS_PARENT}, 1, 8)"
    f" AND +other.parent = {_ITS_PARENT} AND other.hash != ?)"
    f" + (SELECT count(*) FROM snapshot AS other WHERE substr(other.end_hash, 1, 8) = substr({_ITS_PARENT}, 1, 8)"
    f" AND +other.end_hash = {_ITS_PARENT}) > 0"
)
_DROP_ENDS = f"DELETE FROM snapshot WHERE {BY_END} AND ({_ITS_PARENT} = zeroblob(32) OR (pinned = 0 AND {_NEEDED}))"
_MOVE_ENDS = (
    f"UPDATE snapshot SET tokens = tokens - (SELECT tokens FROM chunk WHERE {BY_HASH}), end_hash = {_ITS_PARENT}"
    f" WHERE {BY_END}"
)
_DROP_CHUNK = f"DELETE FROM chunk WHERE {BY_HASH}"
_ERASE_MARKS = (
    "UPDATE chunk SET marks = x'' WHERE number IN (SELECT chunk.number FROM backup JOIN chunk"
    f" ON chunk.number >= backup.seq << {NUMBER_BITS} AND chunk.number < backup.seq + 1 << {NUMBER_BITS}"
    f" WHERE {BY_RESPONSE})"
)
_DROP_BACKUPS = f"DELETE FROM backup WHERE {BY_RESPONSE}"
_DROP_SNAPSHOT = f"DELETE FROM snapshot WHERE {BY_RESPONSE}"


def marks_bytes(tokens: int) -> int:
    """How long the marks of a chunk are."""
    return tokens // MARK_TOKENS * MARK_BYTES


def effects(seq: int, time: int, event: AnyKept, payload: bytes | None) -> Iterator[Effect]:
    """The SQL statements that carry one fact into the three tables. Pure. `payload` None: it was erased."""
    match event:
        case CacheBackedUp():
            yield from _backed_up(seq, time, event, payload)
        case CacheMatched():
            if event.nearest and event.reason in MET:
                names = (event.nearest, event.nearest, event.response, event.response)
                yield _KEEP, (event.cached, *names)
        case CacheRestored():
            yield _USE, (time, 1, event.end, event.end)
        case CacheQuarantined():
            yield _BAD, (event.hash, event.hash)
        case CacheReconciled():
            for hash_ in event.missing:
                yield _BAD, (hash_, hash_)
        case CachePurged():
            for hash_ in event.hashes:
                yield from _purged(hash_)
        case SnapshotPinned() | SnapshotUnpinned():
            yield _PIN, (int(isinstance(event, SnapshotPinned)), event.response, event.response)


def _backed_up(seq: int, time: int, event: CacheBackedUp, payload: bytes | None) -> Iterator[Effect]:
    before, at = b"", 0
    for place, chunk in enumerate(event.chunks):
        parent = chunk.parent or before
        size = marks_bytes(chunk.tokens)
        marks = (payload or b"")[at : at + size]
        at += size
        numbers = (chunk.tokens, chunk.file_bytes)
        yield (
            _PUT_CHUNK,
            ((seq << NUMBER_BITS) + place, chunk.hash, event.space, parent, *numbers, marks, int(chunk.plain), time),
        )
        before = chunk.hash
    if event.chunks:
        yield _PUT_BACKUP, (seq, event.response)
    place_of = (event.namespace, event.space, event.end, event.tokens, time, event.kept)
    name = (event.response, event.response)
    yield _MOVE_SNAPSHOT, (*place_of, *name)
    yield _PUT_SNAPSHOT, (seq, *place_of, *name, *name)
    yield _USE, (time, 0, event.end, event.end)


def _purged(hash_: bytes) -> Iterator[Effect]:
    one = (hash_, hash_)
    yield _DROP_ENDS, (*one, *one, *one, *one, hash_, *one, *one)
    yield _MOVE_ENDS, (*one, *one, *one)
    yield _DROP_CHUNK, one


def erased(response: str) -> Iterator[Effect]:
    """What the erasure of a turn does to the tables: its snapshot is gone, and the marks that it told."""
    for sql in (_ERASE_MARKS, _DROP_BACKUPS, _DROP_SNAPSHOT):
        yield sql, (response, response)


def chunk_of(row: tuple[Any, ...]) -> ChunkRow:
    """A row of CHUNK_COLUMNS."""
    number, hash_, space, parent, tokens, file_bytes, marks, plain, bad, used_us, uses = row  # there may be many
    return ChunkRow(
        number=number,
        hash=hash_,
        space=space,
        parent=parent,
        tokens=tokens,
        file_bytes=file_bytes,
        marks=marks,
        plain=plain == 1,
        bad=bad == 1,
        used_us=used_us,
        uses=uses,
    )


def snapshot_of(row: tuple[Any, ...]) -> SnapshotRow:
    """A row of SNAPSHOT_COLUMNS."""
    fields = dict(zip(SnapshotRow.__struct_fields__, row, strict=True))
    return SnapshotRow(**{**fields, "pinned": bool(fields["pinned"])})
