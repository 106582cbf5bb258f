"""Verification: walks the journal and proves it, or names the first break. Read-only, beside a running server too.

In order: SQLite's own structure and that nothing foreign is in it, the chain with its payloads, the head outside the
database, tenants and contents, reference counts, and the projections, compared with a fold of the facts into an empty
database. Everything is read in short pages. A writer may go on meanwhile: with each page comes the head it was read
at, and the fold follows to there.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import msgspec

from zjournal.errors import JournalFault
from zjournal.journal import chain, content, datadir, headfile, kept, rows, structure, wal
from zjournal.journal.chain import Head
from zjournal.journal.events import NewerEvent, PayloadErased, Recorded, tag_of
from zjournal.journal.projections import INDEXES, SESSION_COLUMNS, TURN_COLUMNS, effects
from zjournal.journal.reader import PAGE_FACTS, Reader, some

CONTENTS_PAGE = 50  # proved in one read transaction
ROWS_PAGE = 1_000
_PROJECTIONS = {"turn": TURN_COLUMNS, "session": SESSION_COLUMNS, **kept.TABLES}

Progress = Callable[[int, int], None]


class Break(msgspec.Struct, frozen=True):
    """The first thing found wrong. `where`: file, event, head, content, tenant, turn, session; `seq` for an event."""

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
    snapshots: int
    chunks: int
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
        self.witness: headfile.Witness | None = None
        self._journal = reader.id
        self.head = chain.genesis(reader.id, reader.secret)
        self.fold = _empty_projections()
        self.held: dict[str, Counter[bytes]] = {}  # response ("" for facts of none) -> digests its facts hold
        self.wanted: Counter[bytes] = Counter()  # the sum of those
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
        except NewerEvent as error:
            raise _Broken("event", f"{error}; use a newer zjournal", seq) from None
        except msgspec.MsgspecError as error:
            raise _Broken("event", f"its body cannot be read: {error}", seq) from None
        event = fact.event
        if tag_of(body) != f"{tag}.{version}":
            raise _Broken("event", f"its body is of another kind than {tag}.{version}", seq)
        self.head = chain.head_of(row)
        if self.witness is not None and self.witness.head.seq == seq:
            self._check_witness(self.witness)
        response = getattr(event, "response", "")
        if isinstance(event, PayloadErased):
            self.erased.add(response)
            self.wanted.subtract(self.held.pop(response, ()))
        elif fact.payload is None:
            self.gone[seq] = response
        digests = content.references(event)
        if digests:
            self.held.setdefault(response, Counter()).update(digests)
            self.wanted.update(digests)
        return fact

    def finish(self) -> None:
        """Compares with the head file at the end of the chain. Raises _Broken."""
        if self.witness is not None and self.witness.head.seq > self.head.seq:
            self._check_witness(self.witness)

    def _check_witness(self, witness: headfile.Witness) -> None:
        reason = headfile.fault_of(witness, self._journal, self.head.seq, self.head.link)
        if reason is not None:
            raise _Broken("head", reason)


def verify(data_dir: Path, progress: Progress | None = None) -> Report:
    """Proves the journal of a data directory. `progress(done, total)` counts facts and contents.

    A break is reported, not raised. Raises JournalFault only when there is no journal of ours to verify.
    """
    with Reader.open(data_dir) as reader:
        walk = _Walk(reader)
        counts = dict.fromkeys(_PROJECTIONS, 0)
        fault = None
        try:
            counts = _prove(reader, walk, progress or (lambda done, total: None))
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
            turns=counts["turn"],
            sessions=counts["session"],
            snapshots=counts["snapshot"],
            chunks=counts["chunk"],
            erased=len(walk.erased),
            head=walk.head.seq,
            link=walk.head.link.hex(),
            fault=fault,
        )


def _prove(reader: Reader, walk: _Walk, progress: Progress) -> dict[str, int]:
    # Read before the facts: the journal may go on meanwhile, and is never behind it.
    walk.witness = headfile.read(reader.path.parent) if reader.head else None
    served = datadir.owner(reader.path.parent) is not None
    structure_fault = None if served else structure.whole_fault(reader)
    structure_fault = structure_fault or structure.schema_fault(reader)
    if structure_fault:
        raise _Broken("file", structure_fault)
    with _lenient(reader) as db:
        log = wal.extent(reader.path.with_name(reader.path.name + "-shm"))
        total = rows.head(db) + db.execute("SELECT coalesce(max(id), 0) FROM content").fetchone()[0]
    reason = walk.witness and headfile.log_fault_of(walk.witness, log)
    if reason:
        raise _Broken("head", reason)
    while page := _page(reader, walk.head):
        _fold(walk, page)
        progress(walk.head.seq, max(total, walk.head.seq))
    walk.finish()
    secrets = _tenants(reader)
    for _ in _contents(reader, secrets):
        walk.contents += 1
        done = walk.head.seq + walk.contents
        progress(done, max(total, done))
    _compare_references(reader, walk)
    counts = {table: _compare_rows(reader, walk, table, columns) for table, columns in _PROJECTIONS.items()}
    _compare_payloads(walk)
    structure_fault = structure.paged_fault(reader) if served else None
    if structure_fault:
        raise _Broken("file", structure_fault)
    return counts


@contextmanager
def _lenient(reader: Reader) -> Iterator[sqlite3.Connection]:
    """A read transaction in which text that is not UTF-8 is read as a wrong text, and not as an error of the file."""
    with reader.transaction() as db:
        db.text_factory = lambda raw: raw.decode(errors="replace")
        try:
            yield db
        finally:
            db.text_factory = str


def _page(reader: Reader, head: Head, upto: int | None = None) -> list[chain.Row]:
    with _lenient(reader) as db:
        try:
            return rows.page(db, head, PAGE_FACTS, rows.SEQ_MAX if upto is None else upto, fetch=some)
        except rows.DamagedSegment as error:
            raise _Broken("event", str(error), error.first) from None


def _catch_up(reader: Reader, walk: _Walk, upto: int) -> None:
    """Folds the facts up to the head at which a page was read, and none beyond it."""
    while walk.head.seq < upto:
        page = _page(reader, walk.head, upto)
        if not page:
            raise _Broken("event", f"facts {walk.head.seq + 1} to {upto} are missing")
        _fold(walk, page)


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
        if not chain.tenant_sealed(reader.secret, tenant, name, secret, seal):
            raise _Broken("tenant", f"the row of tenant {tenant!r} does not match its seal")
        secrets[tenant] = secret
    return secrets


def _contents(reader: Reader, secrets: dict[str, bytes]) -> Iterator[bytes]:
    """Proves every content row; yields its digest."""
    after = 0
    plains = content.Plains()
    while True:
        with _lenient(reader) as db:
            query = "SELECT id, digest, tenant, size, base, data FROM content WHERE id > ? ORDER BY id LIMIT ?"
            page = some(db.execute(query, (after, CONTENTS_PAGE)))
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


def _compare_references(reader: Reader, walk: _Walk) -> None:
    seen: set[bytes] = set()
    after = 0
    while True:
        with _lenient(reader) as db:
            head = rows.head(db)
            query = "SELECT id, digest, refs FROM content WHERE id > ? ORDER BY id LIMIT ?"
            page = db.execute(query, (after, ROWS_PAGE)).fetchall()
        _catch_up(reader, walk, head)
        for after, digest, refs in page:  # noqa: B007
            seen.add(digest)
            if walk.wanted[digest] != refs:
                raise _Broken("content", f"content {digest.hex()}: its reference count {refs} is not that of the facts")
        if not page:
            break
    for digest in [digest for digest, refs in walk.wanted.items() if refs and digest not in seen]:
        with _lenient(reader) as db:  # it may be newer than the page it would stand in
            head = rows.head(db)
            there = content.there(db, digest)
        _catch_up(reader, walk, head)
        if not there and walk.wanted[digest]:
            raise _Broken("content", f"content {digest.hex()} is missing: facts refer to it")


def _compare_rows(reader: Reader, walk: _Walk, table: str, columns: str) -> int:
    """Raises _Broken at the first row and column that differs from the fold; returns the number of rows."""
    names = columns.split(", ")
    query = f"SELECT {columns} FROM {table} WHERE {names[0]} > ? ORDER BY 1 LIMIT {ROWS_PAGE}"
    count = after = 0
    while True:
        with _lenient(reader) as db:
            head = rows.head(db)
            page = db.execute(query, (after,)).fetchall()
        _catch_up(reader, walk, head)
        for row, right in zip_longest(page, walk.fold.execute(query, (after,)).fetchall()):
            if row is None:
                raise _Broken(table, f"{table} {_name(right)} is missing")
            _compare_row(table, names, row, right)
        count += len(page)
        if len(page) < ROWS_PAGE:
            return count
        after = page[-1][0]


def _name(row: tuple) -> str:
    """What a row is called: the id or hash in its second column."""
    return row[1].hex() if isinstance(row[1], bytes) else str(row[1])


def _compare_row(table: str, names: list[str], row: tuple, right: tuple | None) -> None:
    if right is None or right[0] != row[0]:
        raise _Broken(table, f"row {row[0]} of table {table} does not follow from the facts")
    for name, value, expected in zip(names, row, right, strict=True):
        # The type counts as well: 1 and 1.0 are equal, but not the same bytes.
        if value != expected or type(value) is not type(expected):
            raise _Broken(table, f"{table} {_name(row)}: column {name} is {value!r}, and the facts say {expected!r}")


def _empty_projections() -> sqlite3.Connection:
    """A private temporary database with the tables of the projections; SQLite spills it to disk when it grows."""
    fold = sqlite3.connect("", isolation_level=None)
    fold.execute("PRAGMA journal_mode = OFF")
    fold.execute(
        "CREATE TABLE session (opened_seq INTEGER PRIMARY KEY, session TEXT UNIQUE, tenant TEXT, key BLOB,"
        " opened_us INTEGER, turns INTEGER, last_seq INTEGER, last_us INTEGER, pinned INTEGER, deleted INTEGER)"
    )
    for table, columns in {"turn": TURN_COLUMNS, **kept.TABLES}.items():
        first, rest = columns.split(", ", 1)
        fold.execute(f"CREATE TABLE {table} ({first} INTEGER PRIMARY KEY, {rest})")
    for index in (*INDEXES, *kept.INDEXES):
        fold.execute(index)
    fold.execute("BEGIN")
    return fold
