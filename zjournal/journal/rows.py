"""Where facts lie: the latest in table `event`, one row each, and those before them in segments.

Everything that reads facts goes through here, so that nobody else has to know. Only the writer changes anything, and
only in two ways: it seals the oldest rows into a segment, and it takes payloads away. Neither changes what a fact says
or what its link is.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from zjournal.journal import chain, segments
from zjournal.journal.chain import Head
from zjournal.journal.segments import Bare

SEQ_MAX = (1 << 63) - 1
UNPACKED_MAX = 8  # segments that are kept as they were unpacked,
UNPACKED_BYTES_MAX = 32 << 20  # and no more than this of them
FACT_BYTES = 500  # of an unpacked fact beside its body and payload, about

_BARE = "seq, time, tag, version, body, payload, payload_sha"


class DamagedSegment(ValueError):
    """A segment does not hold what it must. `first` is the number of its first fact."""

    def __init__(self, first: int, reason: str) -> None:
        super().__init__(f"the segment that begins with it is damaged: {reason}")
        self.first = first


class Unpacked:
    """Segments that were unpacked lately. For any thread. What is erased must be cleared from here as well."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, list[Bare]] = OrderedDict()
        self._sizes: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self.erasures = 0  # how often it was cleared

    def facts(self, first: int, last: int, data: bytes, erasures: int | None = None) -> list[Bare]:
        """The facts of a segment. Raises DamagedSegment. They are not remembered if it was cleared since `erasures`."""
        with self._lock:
            known = self._known.get(data)
        if known is None:
            try:
                known = segments.unpack(data, first, last)
            except ValueError as error:
                raise DamagedSegment(first, str(error)) from None
            size = sum(FACT_BYTES + len(fact.body) + len(fact.payload or b"") for fact in known)
            with self._lock:
                if erasures in (None, self.erasures) and size <= UNPACKED_BYTES_MAX:
                    self._known[data], self._sizes[data] = known, size
                while len(self._known) > UNPACKED_MAX or sum(self._sizes.values()) > UNPACKED_BYTES_MAX:
                    del self._sizes[self._known.popitem(last=False)[0]]
        return known

    @property
    def bytes(self) -> int:
        """What is kept takes about so many."""
        with self._lock:
            return sum(self._sizes.values())

    def clear(self) -> None:
        """Forgets everything, after an erasure."""
        with self._lock:
            self._known.clear()
            self._sizes.clear()
            self.erasures += 1


def head(db: sqlite3.Connection) -> int:
    """The number of the last fact; 0 in an empty journal."""
    (last,) = db.execute("SELECT coalesce(max(seq), 0) FROM event").fetchone()
    return last or sealed(db)


def sealed(db: sqlite3.Connection) -> int:
    """The number of the last fact that lies in a segment; 0 if none does."""
    return db.execute("SELECT coalesce(max(last), 0) FROM segment").fetchone()[0]


class Found(NamedTuple):
    """Facts as they lie: what is read within a transaction, to be unpacked behind it."""

    after: int
    upto: int
    tags: tuple[str, ...]
    segments: list[tuple[int, int, bytes]]  # first, last, data
    rows: list[tuple]
    erasures: int | None = None  # of the memory, before the transaction saw anything: later ones concern what it saw


def find(
    db: sqlite3.Connection,
    after: int,
    upto: int,
    *,
    tags: tuple[str, ...] = (),
    needle: bytes = b"",
    fetch: Callable[[sqlite3.Cursor], list[tuple]] = sqlite3.Cursor.fetchall,
) -> Found:
    """The facts after number `after`, up to number `upto`, in order; with `tags` those of these kinds only.

    `needle`: bytes that the bodies of all wanted facts hold; others may be left out. `fetch` may read a part of the
    rows, which are the last of the facts.
    """
    of_kind = " OR ".join(["instr(tags, ?)"] * len(tags)) or "1"
    query = f"SELECT first, last, data FROM segment WHERE last > ? AND first <= ? AND ({of_kind}) ORDER BY last"
    packed = db.execute(query, (after, upto, *tags)).fetchall()
    where = "seq > ? AND seq <= ?"
    values: list[object] = [after, upto]
    if tags:
        where += f" AND tag IN ({', '.join('?' * len(tags))})"
        values += tags
    if needle:
        where += " AND instr(body, ?)"
        values.append(needle)
    cursor = db.execute(f"SELECT {_BARE} FROM event WHERE {where} ORDER BY seq", values)
    return Found(after, upto, tags, packed, fetch(cursor))


def facts(found: Found, unpacked: Unpacked) -> Iterator[Bare]:
    """What was found, in order, without links. Raises DamagedSegment."""
    for first, last, data in found.segments:
        known = unpacked.facts(first, last, data, found.erasures)
        inside = known[max(found.after + 1 - first, 0) : found.upto + 1 - first]
        yield from (fact for fact in inside if not found.tags or fact.tag in found.tags)
    yield from (Bare(*row) for row in found.rows)


def weighed(found: Found, unpacked: Unpacked) -> Iterator[tuple[Bare, float]]:
    """As `facts`, each with the bytes that erasing its payload gives back, about. Raises DamagedSegment."""
    for first, last, data in found.segments:
        whole = unpacked.facts(first, last, data, found.erasures)
        sizes = {fact.seq: size for fact, size in zip(whole, segments.weights(whole), strict=True)}
        part = found._replace(segments=[(first, last, data)], rows=[])
        yield from ((fact, sizes[fact.seq]) for fact in facts(part, unpacked))
    yield from ((fact, len(fact.payload or b"")) for fact in (Bare(*row) for row in found.rows))


def page(
    db: sqlite3.Connection,
    before: Head,
    limit: int,
    upto: int = SEQ_MAX,
    fetch: Callable[[sqlite3.Cursor], list[tuple]] = sqlite3.Cursor.fetchall,
) -> list[chain.Row]:
    """The rows that follow `before`, about `limit` and none beyond `upto`, with links as they must be: to be proved.

    Raises DamagedSegment, also when the link after a segment does not follow from its facts.
    """
    query = "SELECT first, last, link, data FROM segment WHERE last > ? ORDER BY last LIMIT 1"
    segment = db.execute(query, (before.seq,)).fetchone()
    if segment is None:
        query = f"SELECT {chain.COLUMNS} FROM event WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
        return fetch(db.execute(query, (before.seq, upto, limit)))
    first, last, link, data = segment
    if first > before.seq + 1:
        raise DamagedSegment(first, f"facts {before.seq + 1} to {first - 1} are missing before it")
    try:
        rows = segments.linked(segments.unpack(data, first, last)[before.seq + 1 - first :], before.link)
    except (ValueError, TypeError) as error:
        raise DamagedSegment(first, str(error)) from None
    if rows[-1][-1] != link:
        raise DamagedSegment(first, "the link after it does not follow from its facts")
    return [row for row in rows if row[0] <= upto]


def tail(db: sqlite3.Connection, count: int, genesis: Head) -> tuple[Head, list[chain.Row]]:
    """The last rows, `count` or some more, and the head before them. Raises DamagedSegment."""
    rows = db.execute(f"SELECT {chain.COLUMNS} FROM event ORDER BY seq DESC LIMIT ?", (count + 1,)).fetchall()[::-1]
    if len(rows) > count and chain.type_fault_of(rows[0]) is None:
        return chain.head_of(rows[0]), rows[1:]
    start = genesis
    last = sealed(db)
    while last and len(rows) < count:
        start = _head_before(db, last, genesis)
        rows = page(db, start, count, last) + rows
        last = start.seq
    return start, rows


def link_at(db: sqlite3.Connection, seq: int, genesis: Head) -> bytes | None:
    """The link of a fact; None if there is no such fact. Raises DamagedSegment."""
    row = db.execute("SELECT link FROM event WHERE seq = ?", (seq,)).fetchone()
    if row is not None:
        return row[0]
    segment = db.execute("SELECT last FROM segment WHERE last >= ? ORDER BY last LIMIT 1", (seq,)).fetchone()
    if segment is None:
        return None
    rows = page(db, _head_before(db, segment[0], genesis), 0, seq)
    return rows[-1][-1] if rows and rows[-1][0] == seq else None


def _head_before(db: sqlite3.Connection, last: int, genesis: Head) -> Head:
    """The head before the segment that ends with fact `last`; its time is not known, and 0."""
    row = db.execute("SELECT first FROM segment WHERE last = ?", (last,)).fetchone()
    if row is None or row[0] == 1:
        return genesis
    before = db.execute("SELECT link FROM segment WHERE last = ?", (row[0] - 1,)).fetchone()
    if before is None:
        raise DamagedSegment(row[0], "the one before it is missing")
    return Head(row[0] - 1, before[0], 0)


# --- for the writer -----------------------------------------------------------------------------------


def seal(db: sqlite3.Connection, limit: int, genesis: Head, *, fresh: bool = False) -> int:
    """Moves the oldest rows, at most `limit`, into the last segment, and into new ones once that is full.

    With `fresh` one that is not full stays as it is as well, which takes less time and more room. Returns how many.
    Raises ValueError, and must be rolled back, when a row is not what its link says: what is damaged stays where it is.
    """
    rows = db.execute(f"SELECT {chain.COLUMNS} FROM event ORDER BY seq LIMIT ?", (limit,)).fetchall()
    if not rows:
        return 0
    last = db.execute("SELECT first, last, link, data FROM segment ORDER BY last DESC LIMIT 1").fetchone()
    facts: list[Bare] = []
    before = genesis
    if last is not None:
        before = Head(last[1], last[2], 0)
        fresh = fresh or last[1] - last[0] + 1 >= segments.FACTS_MAX
        facts = [] if fresh else _unpacked(last[0], last[1], last[3])
    links = {before.seq: before.link}
    for row in rows:
        if reason := chain.fault_of(row, before):
            raise ValueError(f"fact {row[0]}: {reason}")
        before = chain.head_of(row)
        links[before.seq] = before.link
    old, facts = facts, [*facts, *(Bare(*row[:7]) for row in rows)]
    groups = list(_groups(facts))
    if old and groups[0][-1].seq < old[-1].seq:  # it was filled when the limits were other ones
        links |= {row[0]: row[-1] for row in segments.linked(old, _head_before(db, old[-1].seq, genesis).link)}
    if old:
        db.execute("DELETE FROM segment WHERE last = ?", (old[-1].seq,))
    for group in groups:
        _insert(db, group, links[group[-1].seq])
    db.execute("DELETE FROM event WHERE seq <= ?", (rows[-1][0],))
    return len(rows)


def _groups(facts: Iterable[Bare]) -> Iterator[list[Bare]]:
    group: list[Bare] = []
    size = 0
    for fact in facts:
        size += len(fact.body) + len(fact.payload or b"")
        if group and (len(group) == segments.FACTS_MAX or size > segments.BYTES_MAX):
            yield group
            group, size = [], len(fact.body) + len(fact.payload or b"")
        group.append(fact)
    yield group


def _insert(db: sqlite3.Connection, facts: list[Bare], link: bytes) -> None:
    tags = " ".join(sorted({fact.tag for fact in facts}))
    values = (facts[-1].seq, facts[0].seq, link, tags, segments.pack(facts))
    db.execute("INSERT INTO segment (last, first, link, tags, data) VALUES (?, ?, ?, ?, ?)", values)


def erase_payloads(db: sqlite3.Connection, numbers: Collection[int]) -> int:
    """Takes the payloads of these facts away, and leaves their digests.

    Returns the bytes that went: of a segment those by which it became shorter, which may be fewer than none, for a
    digest takes more room there than a few tokens.
    """
    limit = sealed(db)
    freed = 0
    for seq in (seq for seq in numbers if seq > limit):
        query = "SELECT coalesce(length(payload), 0) FROM event WHERE seq = ?"
        freed += db.execute(query, (seq,)).fetchone()[0]
        db.execute("UPDATE event SET payload = NULL WHERE seq = ?", (seq,))

    def segment_of(seq: int) -> int:
        return db.execute("SELECT min(last) FROM segment WHERE last >= ?", (seq,)).fetchone()[0]

    for last, group in groupby(sorted(seq for seq in numbers if seq <= limit), key=segment_of):
        gone = set(group)
        first, data = db.execute("SELECT first, data FROM segment WHERE last = ?", (last,)).fetchone()
        facts = [_without(fact) if fact.seq in gone else fact for fact in _unpacked(first, last, data)]
        packed = segments.pack(facts)
        db.execute("UPDATE segment SET data = ? WHERE last = ?", (packed, last))
        freed += len(data) - len(packed)
    return freed


def _unpacked(first: int, last: int, data: bytes) -> list[Bare]:
    """The facts of a segment's row. Raises DamagedSegment."""
    try:
        return segments.unpack(data, first, last)
    except ValueError as error:
        raise DamagedSegment(first, str(error)) from None


def _without(fact: Bare) -> Bare:
    if fact.payload is None:
        return fact
    sha = hashlib.sha256(fact.payload).digest()
    return Bare(fact.seq, fact.time, fact.tag, fact.version, fact.body, None, sha)
