"""What is on disk of the KV, as the journal has it: written down, given up, pinned, read.

Files are no business of this module. It says which are named, and appends the facts that change that, each looked at
in the transaction that appends it: what an engine planned a moment ago may not be true any more. Whoever unlinks files
does so after the commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from zjournal.errors import NotFound
from zjournal.journal.events import CacheBackedUp, CachePurged, Fact, SnapshotPinned, SnapshotUnpinned
from zjournal.journal.kept import (
    BY_CHUNK_PARENT,
    BY_END,
    BY_HASH,
    BY_RESPONSE,
    CHUNK_COLUMNS,
    CHUNKS_MAX,
    ROOT,
    SNAPSHOT_COLUMNS,
    ChunkRow,
    SnapshotRow,
    chunk_of,
    marks_bytes,
    snapshot_of,
)
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.journal.transaction import Transaction

QUOTA, STALE, REPLACED, DELETED, GC = "quota", "stale", "replaced", "deleted", "gc"  # causes of CachePurged
PAGE_ROWS = 4_096
CHUNK_TOKENS = 256
HASH_BYTES = 32

_PINNED = (
    f"SELECT 1 FROM snapshot JOIN session USING (session) WHERE {BY_END.replace('end_hash', 'snapshot.end_hash')}"
    " AND (snapshot.pinned OR session.pinned) LIMIT 1"
)


class Totals(msgspec.Struct, frozen=True):
    """What the journal names. `bad` chunks have no file in their place; `file_bytes` leave them out."""

    snapshots: int
    chunks: int
    bad: int
    file_bytes: int


class Purged(msgspec.Struct, frozen=True):
    """What a purge did: the chunks that went, and those that were there and had to stay."""

    hashes: tuple[bytes, ...]
    left: tuple[bytes, ...]
    file_bytes: int


# --- changing --------------------------------------------------------------------------------------------


def back_up(tx: Transaction, event: CacheBackedUp, marks: bytes) -> bool:
    """Appends that a state was backed up; what its former snapshot alone needed is given up with it.

    False, and nothing is appended, if it can never be: its turn was erased, or a chunk that it stands on has gone.
    """
    turn = _turn_of(tx, event.response)
    if turn is None or not _stands(tx, event):
        return False
    event = msgspec.structs.replace(event, tenant=turn)
    assert len(marks) == sum(marks_bytes(chunk.tokens) for chunk in event.chunks), len(marks)
    before = ends_of(tx, event.response)
    tx.append([Fact(event, payload=marks)])
    release(tx, [one for one in before if one[1] != event.end], REPLACED)
    return True


def purge(tx: Transaction, space: bytes, hashes: Sequence[bytes], cause: str, *, whole: bool) -> Purged:
    """Appends that chunks are given up, each behind those that continue it in `hashes`.

    What is not known is passed over. What is pinned, or continued by what stays, stays; `whole`: and then all stay.
    """
    known = [row for hash_ in dict.fromkeys(hashes) if (row := _chunk(tx, hash_)) is not None and row.space == space]
    gone: dict[bytes, int] = {}
    for row in known:
        if not _children(tx, row.hash) - gone.keys() and not is_pinned(tx, row.hash):
            gone[row.hash] = 0 if row.bad else row.file_bytes
    left = tuple(row.hash for row in known if row.hash not in gone)
    if whole and left:
        return Purged((), left, 0)
    if gone:
        _append_purged(tx, space, gone, cause)
    return Purged(tuple(gone), left, sum(gone.values()))


def release(tx: Transaction, ends: Iterable[tuple[bytes, bytes]], cause: str) -> None:
    """Gives up what nothing needs any more of the chunks up to these (space, hash), where a snapshot has ended."""
    for space, end in ends:
        gone: dict[bytes, int] = {}
        row = _chunk(tx, end)
        while row is not None and not _children(tx, row.hash) - gone.keys() and not _ends_at(tx, row.hash):
            gone[row.hash] = 0 if row.bad else row.file_bytes
            row = None if row.parent == ROOT else _chunk(tx, row.parent)
        if gone:
            _append_purged(tx, space, gone, cause)


def pin(journal: Journal, response: str, pinned: bool) -> None:
    """Pins a snapshot, or takes the pin back; nothing happens if that is so already. Raises NotFound."""

    def work(tx: Transaction) -> None:
        found = _snapshot(tx, response)
        if found is None:
            raise NotFound(f"there is no snapshot of {response}")
        if found.pinned != pinned:
            kind = SnapshotPinned if pinned else SnapshotUnpinned
            tx.append([Fact(kind(tenant=found.tenant, response=response))])

    journal.run(work).result()


def facts_of(tx: Transaction, response: str) -> list[int]:
    """The numbers of the facts with marks of this response's chunks."""
    rows = tx.db.execute(f"SELECT seq FROM backup WHERE {BY_RESPONSE}", (response, response))
    return [seq for (seq,) in rows]


def ends_of(tx: Transaction, response: str) -> list[tuple[bytes, bytes]]:
    """Space and hash of the chunk where the snapshot of this response ends; none if there is none."""
    found = _snapshot(tx, response)
    return [] if found is None else [(found.space, found.end)]


def _append_purged(tx: Transaction, space: bytes, gone: dict[bytes, int], cause: str) -> None:
    hashes = list(gone)
    for at in range(0, len(hashes), CHUNKS_MAX):
        part = tuple(hashes[at : at + CHUNKS_MAX])
        size = sum(gone[hash_] for hash_ in part)
        tx.append([Fact(CachePurged(space=space, hashes=part, file_bytes=size, cause=cause))])


def _turn_of(tx: Transaction, response: str) -> str | None:
    """The tenant of a turn that has its content; None if there is no such turn any more."""
    query = f"SELECT tenant FROM turn WHERE {BY_RESPONSE} AND erased = 0"
    row = tx.db.execute(query, (response, response)).fetchone()
    return None if row is None else row[0]


def _stands(tx: Transaction, event: CacheBackedUp) -> bool:
    """Whether the new chunks lead from known ones to the end."""
    assert len(event.chunks) <= CHUNKS_MAX, len(event.chunks)
    new: set[bytes] = set()
    before = b""
    for chunk in event.chunks:
        assert len(chunk.hash) == HASH_BYTES and 0 < chunk.tokens <= CHUNK_TOKENS and chunk.file_bytes > 0
        parent = chunk.parent or before
        assert len(parent) == HASH_BYTES
        if parent != ROOT and parent not in new and not _is_full(tx, parent, event.space):
            return False
        new.add(chunk.hash)
        before = chunk.hash
    end = None if event.end in new else _chunk(tx, event.end)
    return event.end in new or (end is not None and end.space == event.space)


def _is_full(tx: Transaction, hash_: bytes, space: bytes) -> bool:
    row = _chunk(tx, hash_)
    return row is not None and row.space == space and row.tokens == CHUNK_TOKENS


def _chunk(tx: Transaction, hash_: bytes) -> ChunkRow | None:
    row = tx.db.execute(f"SELECT {CHUNK_COLUMNS} FROM chunk WHERE {BY_HASH}", (hash_, hash_)).fetchone()
    return None if row is None else chunk_of(row)


def _children(tx: Transaction, hash_: bytes) -> Collection[bytes]:
    rows = tx.db.execute(f"SELECT hash FROM chunk WHERE {BY_CHUNK_PARENT}", (hash_, hash_))
    return {child for (child,) in rows}


def _ends_at(tx: Transaction, hash_: bytes) -> bool:
    query = f"SELECT 1 FROM snapshot WHERE {BY_END} LIMIT 1"
    return tx.db.execute(query, (hash_, hash_)).fetchone() is not None


def is_pinned(tx: Transaction, hash_: bytes) -> bool:
    """Whether a snapshot that is pinned, or whose session is, ends with this chunk."""
    return tx.db.execute(_PINNED, (hash_, hash_)).fetchone() is not None


def _snapshot(tx: Transaction, response: str) -> SnapshotRow | None:
    query = f"SELECT {SNAPSHOT_COLUMNS} FROM snapshot WHERE {BY_RESPONSE}"
    row = tx.db.execute(query, (response, response)).fetchone()
    return None if row is None else snapshot_of(row)


# --- reading ---------------------------------------------------------------------------------------------


def chunks(reader: Reader) -> Iterator[list[ChunkRow]]:
    """Yields all chunks page by page, each behind its parent."""
    after = -1
    while True:
        query = f"SELECT {CHUNK_COLUMNS} FROM chunk WHERE number > ? ORDER BY number LIMIT ?"
        with reader.transaction() as db:
            page = [chunk_of(row) for row in db.execute(query, (after, PAGE_ROWS))]
        if not page:
            return
        after = page[-1].number
        yield page


def snapshots(reader: Reader) -> Iterator[list[tuple[SnapshotRow, bool]]]:
    """Yields all snapshots page by page in the order of their making, each with whether its session is pinned."""
    columns = ", ".join(f"snapshot.{name}" for name in SNAPSHOT_COLUMNS.split(", "))
    query = (
        f"SELECT {columns}, coalesce(session.pinned, 0) FROM snapshot LEFT JOIN session USING (session)"
        " WHERE made_seq > ? ORDER BY made_seq LIMIT ?"
    )
    after = -1
    while True:
        with reader.transaction() as db:
            rows = db.execute(query, (after, PAGE_ROWS)).fetchall()
        if not rows:
            return
        page = [(snapshot_of(row[:-1]), bool(row[-1])) for row in rows]
        after = page[-1][0].made_seq
        yield page


def snapshot(reader: Reader, response: str) -> SnapshotRow | None:
    """The snapshot of a response."""
    query = f"SELECT {SNAPSHOT_COLUMNS} FROM snapshot WHERE {BY_RESPONSE}"
    with reader.transaction() as db:
        row = db.execute(query, (response, response)).fetchone()
    return None if row is None else snapshot_of(row)


def snapshots_named(reader: Reader, prefix: str, limit: int = 2) -> list[SnapshotRow]:
    """Snapshots of responses whose id begins with `prefix`."""
    query = (
        f"SELECT {SNAPSHOT_COLUMNS} FROM snapshot WHERE substr(response, 1, 25) >= substr(?, 1, 25)"
        " AND substr(response, 1, 25) < ? AND response >= ? AND response < ? LIMIT ?"
    )
    end = prefix + "\U0010ffff"
    with reader.transaction() as db:
        rows = db.execute(query, (prefix, end, prefix, end, limit)).fetchall()
    return [snapshot_of(row) for row in rows]


def of_session(reader: Reader, session: str) -> list[SnapshotRow]:
    """The snapshots of a session, in the order of their making."""
    return [row for page in snapshots(reader) for row, _ in page if row.session == session]


def path(reader: Reader, end: bytes) -> list[ChunkRow]:
    """The chunks that lead to this one, the first one first, in short pages; none if it is not known."""
    found: list[ChunkRow] = []
    at = end
    while at != ROOT:
        before = len(found)
        with reader.transaction() as db:
            for _ in range(PAGE_ROWS):
                row = db.execute(f"SELECT {CHUNK_COLUMNS} FROM chunk WHERE {BY_HASH}", (at, at)).fetchone()
                if row is None:
                    break
                found.append(chunk_of(row))
                at = found[-1].parent
                if at == ROOT:
                    break
        if len(found) == before:
            break
    return found[::-1]


def has(reader: Reader, hash_: bytes) -> ChunkRow | None:
    """The chunk of this hash, if the journal names it."""
    with reader.transaction() as db:
        row = db.execute(f"SELECT {CHUNK_COLUMNS} FROM chunk WHERE {BY_HASH}", (hash_, hash_)).fetchone()
    return None if row is None else chunk_of(row)


def totals(reader: Reader) -> Totals:
    """Counts what the journal names."""
    with reader.transaction() as db:
        (count,) = db.execute("SELECT count(*) FROM snapshot").fetchone()
        query = "SELECT count(*), coalesce(sum(bad), 0), coalesce(sum(file_bytes * (1 - bad)), 0) FROM chunk"
        return Totals(count, *db.execute(query).fetchone())
