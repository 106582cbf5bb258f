"""Verification: walks the journal and proves it, or names the first break. Read-only, beside a running server too.

In order: SQLite's own structure, the chain with its payloads, tenants and contents, reference counts, and the
projections, compared with a fold of the facts into an empty database. Facts and contents are read in pages; only the
last comparison holds one read transaction, after the fold has caught up with the writer.
"""

from __future__ import annotations

import hmac
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from zjournal.errors import JournalFault
from zjournal.journal import chain, content, rows
from zjournal.journal.chain import TAGS, Head
from zjournal.journal.events import PayloadErased, Recorded
from zjournal.journal.projections import INDEXES, SESSION_COLUMNS, TURN_COLUMNS, effects
from zjournal.journal.reader import PAGE_FACTS, Reader

CONTENTS_PAGE = 50  # in one read transaction

Progress = Callable[[int, int], None]


class Break(msgspec.Struct, frozen=True):
    """The first thing found wrong. `where`: file, event, content, tenant, turn, session; `seq` for an event."""

    where: str
    reason: str
    seq: int | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was proved. `head` is the last verified fact, `link` its link in hex; `fault` None means clean."""

    path: str
    facts: int
    contents: int
    turns: int
    sessions: int
    erased: int  # responses whose payloads are gone by a fact that says so
    head: int
    link: str
    fault: Break | None

    @property
    def clean(self) -> bool:
        return self.fault is None


class _Broken(Exception):
    def __init__(self, where: str, reason: str, seq: int | None = None) -> None:
        super().__init__(reason)
        self.fault = Break(where, reason, seq)


class _Walk:
    """What is known so far of the chain up to `head`."""

    def __init__(self, reader: Reader) -> None:
        self.head = chain.genesis(reader.id, reader.secret)
        self.fold = _empty_projections()
        self.held: dict[str, Counter[bytes]] = {}  # response ("" for facts of none) -> digests its facts hold
        self.gone: dict[int, str] = {}  # seq of a fact without its payload -> response
        self.erased: set[str] = set()
        self.contents = 0

    def take(self, row: chain.Row) -> Recorded:
        """Proves one row and adds it; returns the fact. Raises _Broken."""
        reason = chain.fault_of(row, self.head)
        if reason:
            raise _Broken("event", reason, row[0] if isinstance(row[0], int) else None)
        seq, time, tag, version, body, payload, payload_sha, _ = row
        try:
            fact = chain.recorded(seq, time, body, payload, payload_sha)
        except msgspec.MsgspecError as error:
            raise _Broken("event", f"its body cannot be read: {error}", seq) from None
        event = fact.event
        if TAGS[type(event)] != (tag, version):
            raise _Broken("event", f"its body is of another kind than {tag}.{version}", seq)
        self.head = chain.head_of(row)
        response = getattr(event, "response", "")
        if isinstance(event, PayloadErased):
            self.erased.add(response)
            self.held.pop(response, None)
        elif fact.payload is None:
            self.gone[seq] = response
        digests = content.references(event)
        if digests:
            self.held.setdefault(response, Counter()).update(digests)
        return fact


def verify(data_dir: Path, progress: Progress | None = None) -> Report:
    """Proves the journal of a data directory. `progress(done, total)` counts facts and contents.

    A break is reported, not raised. Raises JournalFault only when there is no journal of ours to verify.
    """
    with Reader.open(data_dir) as reader:
        walk = _Walk(reader)
        turns = sessions = 0
        fault = None
        try:
            turns, sessions = _prove(reader, walk, progress or (lambda done, total: None))
        except _Broken as broken:
            fault = broken.fault
        except JournalFault as damaged:  # from the read transaction: SQLite could not read a page
            fault = Break("file", damaged.message)
        finally:
            walk.fold.close()
        return Report(
            path=str(reader.path),
            facts=walk.head.seq,
            contents=walk.contents,
            turns=turns,
            sessions=sessions,
            erased=len(walk.erased),
            head=walk.head.seq,
            link=walk.head.link.hex(),
            fault=fault,
        )


def _prove(reader: Reader, walk: _Walk, progress: Progress) -> tuple[int, int]:
    with _lenient(reader) as db:
        (structure,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        facts = rows.head(db)
        total = facts + db.execute("SELECT count(*) FROM content").fetchone()[0]
    if structure != "ok":
        raise _Broken("file", f"SQLite finds: {structure}")
    while True:
        with _lenient(reader) as db:
            page = _page(db, walk.head)
        if not page:
            break
        _fold(walk, page)
        progress(walk.head.seq, max(total, walk.head.seq))
    secrets = _tenants(reader)
    for _ in _contents(reader, secrets):
        walk.contents += 1
        done = walk.head.seq + walk.contents
        progress(done, max(total, done))
    with _lenient(reader) as db:
        # The writer may have gone on. From here on nothing moves.
        while page := _page(db, walk.head):
            _fold(walk, page)
        _compare_payloads(walk)
        _compare_references(db, walk)
        turns = _compare_rows(db, walk.fold, "turn", TURN_COLUMNS)
        sessions = _compare_rows(db, walk.fold, "session", SESSION_COLUMNS)
    return turns, sessions


@contextmanager
def _lenient(reader: Reader) -> Iterator[sqlite3.Connection]:
    """A read transaction in which text that is not UTF-8 is read as a wrong text, and not as an error of the file."""
    with reader.transaction() as db:
        db.text_factory = lambda raw: raw.decode(errors="replace")
        try:
            yield db
        finally:
            db.text_factory = str


def _page(db: sqlite3.Connection, head: Head) -> list[chain.Row]:
    try:
        return rows.page(db, head, PAGE_FACTS)
    except rows.DamagedSegment as error:
        raise _Broken("event", str(error), error.first) from None


def _fold(walk: _Walk, page: list[chain.Row]) -> None:
    facts = [walk.take(row) for row in page]
    try:
        for sql, values in effects(facts):
            walk.fold.execute(sql, values)
    except (sqlite3.Error, KeyError) as error:
        raise _Broken("event", f"facts {facts[0].seq} to {facts[-1].seq} cannot be folded: {error}") from None


def _tenants(reader: Reader) -> dict[str, bytes]:
    secrets = {}
    with _lenient(reader) as db:
        tenants = db.execute("SELECT id, name, secret, seal FROM tenant").fetchall()
    for tenant, name, secret, seal in tenants:
        try:
            right = hmac.compare_digest(chain.tenant_seal(reader.secret, tenant, name, secret), seal)
        except (AttributeError, TypeError):
            right = False
        if not right:
            raise _Broken("tenant", f"the row of tenant {tenant!r} does not match its seal")
        secrets[tenant] = secret
    return secrets


def _contents(reader: Reader, secrets: dict[str, bytes]) -> Iterator[bytes]:
    """Proves every content row; yields its digest."""
    after = 0
    plains = content.Plains()
    while True:
        with _lenient(reader) as db:
            page = db.execute(
                "SELECT id, digest, tenant, size, base, data FROM content WHERE id > ? ORDER BY id LIMIT ?",
                (after, CONTENTS_PAGE),
            ).fetchall()
            for row, digest, tenant, size, base, data in page:
                if not isinstance(digest, bytes):
                    raise _Broken("content", f"content {digest!r} has no digest for a name")
                if tenant not in secrets:
                    raise _Broken("content", f"content {digest.hex()} belongs to no tenant")
                # In the same transaction, for an erasure may store it as a delta to another one.
                reason = content.fault_of(db, (row, digest, size, base, data), secrets[tenant], plains)
                if reason:
                    raise _Broken("content", f"content {digest.hex()}: {reason}")
        if not page:
            return
        after = page[-1][0]
        yield from (row[1] for row in page)


def _compare_payloads(walk: _Walk) -> None:
    for seq, response in walk.gone.items():
        if response not in walk.erased:
            raise _Broken("event", "its payload is gone, and no fact says that it was erased", seq)


def _compare_references(db: sqlite3.Connection, walk: _Walk) -> None:
    wanted: Counter[bytes] = Counter()
    for digests in walk.held.values():
        wanted.update(digests)
    for digest, refs in db.execute("SELECT digest, refs FROM content"):
        if wanted.pop(digest, 0) != refs:
            raise _Broken("content", f"content {digest.hex()}: its reference count {refs} is not that of the facts")
    for digest in wanted:
        raise _Broken("content", f"content {digest.hex()} is missing: facts refer to it")


def _compare_rows(db: sqlite3.Connection, fold: sqlite3.Connection, table: str, columns: str) -> int:
    """Raises _Broken at the first row and column that differs from the fold; returns the number of rows."""
    query = f"SELECT {columns} FROM {table} ORDER BY 1"
    names = columns.split(", ")
    count = 0
    folded = fold.execute(query)
    for row in db.execute(query):
        expected = folded.fetchone()
        if expected is None or expected[0] != row[0]:
            raise _Broken(table, f"row {row[0]} of table {table} does not follow from the facts")
        for name, value, right in zip(names, row, expected, strict=True):
            # The type counts as well: 1 and 1.0 are equal, but not the same bytes.
            if value != right or type(value) is not type(right):
                raise _Broken(table, f"{table} {row[1]}: column {name} is {value!r}, and the facts say {right!r}")
        count += 1
    if (missing := folded.fetchone()) is not None:
        raise _Broken(table, f"{table} {missing[1]} is missing")
    return count


def _empty_projections() -> sqlite3.Connection:
    """A private temporary database with the two tables; SQLite spills it to disk when it grows."""
    fold = sqlite3.connect("", isolation_level=None)
    fold.execute("PRAGMA journal_mode = OFF")
    fold.execute(
        "CREATE TABLE session (opened_seq INTEGER PRIMARY KEY, session TEXT UNIQUE, tenant TEXT, key BLOB,"
        " opened_us INTEGER, turns INTEGER, last_seq INTEGER, last_us INTEGER)"
    )
    fold.execute(f"CREATE TABLE turn ({TURN_COLUMNS.replace('accepted_seq', 'accepted_seq INTEGER PRIMARY KEY', 1)})")
    for index in INDEXES:
        fold.execute(index)
    fold.execute("BEGIN")
    return fold
