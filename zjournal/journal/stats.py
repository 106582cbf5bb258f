"""What the journal holds and what takes its room: rows, bytes by kind, largest sessions, the log, free pages.

Reads every fact once, page by page, so that no read transaction is long. A content that several facts share counts
once: for the field and the session that named it first.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from zjournal.journal import content, database, rows
from zjournal.journal.events import AnyEvent, RequestAccepted, SessionOpened, decode_body
from zjournal.journal.reader import Reader

PAGE_ROWS = 2_000
DIGESTS_AT_ONCE = 500
LARGEST_SESSIONS = 10
FIXED_BYTES = 8  # of the time column

_PAGE = (
    "SELECT seq, tag || '.' || version, body, length(tag) + length(body) + coalesce(length(payload), 0)"
    f" + coalesce(length(payload_sha), 0) + coalesce(length(link), 0) + {FIXED_BYTES}"
    " FROM event WHERE seq > ? AND seq <= ? ORDER BY seq"
)


class Kind(msgspec.Struct):
    """Rows of one kind. `bytes` as stored; `plain` before compression, where there is any."""

    rows: int = 0
    bytes: int = 0
    plain: int = 0

    def add(self, stored: int, plain: int = 0) -> None:
        self.rows += 1
        self.bytes += stored
        self.plain += plain


class SessionSize(msgspec.Struct, frozen=True):
    """A session, its turns, and the bytes of its facts and of the contents that it named first."""

    session: str
    turns: int
    bytes: int


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `rest` is what indexes, projections and the unused ends of pages take of the file."""

    path: str
    file_bytes: int
    wal_bytes: int
    free_bytes: int
    rest_bytes: int
    snapshot_bytes: int  # of files that it names, which are not in it
    rows: dict[str, int]  # by table; facts in a segment are one row
    facts: dict[str, Kind]  # by tag and version, the most bytes first
    contents: dict[str, Kind]  # by the field that named it first, the most bytes first
    largest: tuple[SessionSize, ...]


class _Count:
    def __init__(self) -> None:
        self.facts: defaultdict[str, Kind] = defaultdict(Kind)
        self.contents: defaultdict[str, Kind] = defaultdict(Kind)
        self.sessions: defaultdict[str, Kind] = defaultdict(Kind)  # rows are turns
        self.session_of: dict[str, str] = {}
        self.seen: set[bytes] = set()

    def session(self, event: AnyEvent) -> str:
        """The session that a fact belongs to; "" for none."""
        if isinstance(event, RequestAccepted):
            self.session_of[event.response] = event.session
            self.sessions[event.session].rows += 1
        if isinstance(event, RequestAccepted | SessionOpened):
            return event.session
        return self.session_of.get(getattr(event, "response", ""), "")


def stats(reader: Reader) -> Stats:
    """Counts the whole journal as it is now. Raises JournalFault."""
    with reader.transaction() as db:
        counts = {
            name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in ("segment", "content", "turn", "session", "snapshot", "chunk", "tenant")
        }
        (snapshot_bytes,) = db.execute("SELECT coalesce(sum(file_bytes * (1 - bad)), 0) FROM chunk").fetchone()
        # Facts are numbered without gaps; counting a million of them would hold the log for a quarter of a second.
        counts["event"] = rows.head(db) - rows.sealed(db)
        page_bytes, pages, free = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
        )
    count = _Count()
    for _ in _pages(reader, count):
        pass
    used = sum(kind.bytes for kind in (*count.facts.values(), *count.contents.values()))
    return Stats(
        path=str(reader.path),
        file_bytes=page_bytes * pages,
        wal_bytes=_size(reader.path.with_name(reader.path.name + "-wal")),
        free_bytes=page_bytes * free,
        snapshot_bytes=snapshot_bytes,
        rest_bytes=max(page_bytes * (pages - free) - used, 0),
        rows=counts,
        facts=_largest_first(count.facts),
        contents=_largest_first(count.contents),
        largest=tuple(
            SessionSize(name, kind.rows, kind.bytes)
            for name, kind in heapq.nlargest(LARGEST_SESSIONS, count.sessions.items(), key=lambda item: item[1].bytes)
        ),
    )


def _pages(reader: Reader, count: _Count) -> Iterator[int]:
    """Counts page by page; yields the last number of each."""
    head, at = reader.head, 0
    unpacked = rows.Unpacked()
    while at < head:
        upto = min(at + PAGE_ROWS, head)
        with reader.transaction() as db:
            try:
                page = [*_sealed(db, at, upto, unpacked), *db.execute(_PAGE, (at, upto))]
            except rows.DamagedSegment as error:
                step = "run `zj journal verify`"
                raise database.fault(reader.path, f"fact {error.first} cannot be read: {error}", step) from None
            named = _count_facts(reader, page, count)
            _count_contents(db, named, count)
        at = upto
        yield at


def _sealed(db: sqlite3.Connection, after: int, upto: int, unpacked: rows.Unpacked) -> Iterator[tuple]:
    """Facts in segments as those of `_PAGE`. Each has its share of its segment's bytes, by its bytes before packing."""
    query = "SELECT first, last, data FROM segment WHERE last > ? AND first <= ? ORDER BY last"
    for first, last, data in db.execute(query, (after, upto)).fetchall():
        facts = unpacked.facts(first, last, data)
        ends = [0, *accumulate(len(fact.body) + len(fact.payload or b"") for fact in facts)]
        for fact, start, end in zip(facts, ends, ends[1:], strict=False):
            if after < fact.seq <= upto:
                share = len(data) * end // ends[-1] - len(data) * start // ends[-1]
                yield fact.seq, f"{fact.tag}.{fact.version}", fact.body, share


def _count_facts(reader: Reader, page: Sequence[tuple], count: _Count) -> dict[bytes, tuple[str, str]]:
    """Counts facts; gives the contents that they name for the first time: digest -> field, session."""
    named: dict[bytes, tuple[str, str]] = {}
    for seq, tag, body, size in page:
        try:
            event = decode_body(body)
        except msgspec.MsgspecError as error:
            reason = f"fact {seq} cannot be read ({error})"
            raise database.fault(reader.path, reason, "run `zj journal verify`, or use a newer zjournal") from None
        count.facts[tag].add(size)
        session = count.session(event)
        if session:
            count.sessions[session].bytes += size
        digests = content.references(event)
        for field in event.__struct_fields__ if digests else ():
            digest = getattr(event, field)
            if digest in digests and digest not in count.seen:
                count.seen.add(digest)
                named[digest] = (field, session)
    return named


def _count_contents(db: sqlite3.Connection, named: dict[bytes, tuple[str, str]], count: _Count) -> None:
    digests = list(named)
    for first in range(0, len(digests), DIGESTS_AT_ONCE):
        some = digests[first : first + DIGESTS_AT_ONCE]
        marks = ", ".join("?" * len(some))
        query = f"SELECT digest, length(data), size FROM content WHERE substr(digest, 1, 8) IN ({marks})"
        for digest, stored, plain in db.execute(query, [digest[:8] for digest in some]):
            field, session = named[digest]
            count.contents[field].add(stored, plain)
            if session:
                count.sessions[session].bytes += stored


def _largest_first(kinds: dict[str, Kind]) -> dict[str, Kind]:
    return dict(sorted(kinds.items(), key=lambda item: (-item[1].bytes, item[0])))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
