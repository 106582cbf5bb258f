"""Salvage: copies everything of a damaged journal that can be proved into a new one, and says what was lost.

What can be proved is the longest beginning of the chain, under the same identity, and contents whose bytes match
their names. A turn that lost a payload or a content is erased in the copy, by a fact that says so: the copy is a whole
journal, and its loss is no silence. Facts behind the first break cannot be proved to belong there, and are listed.

The damaged journal is read and not changed. Nothing that cannot be read stops this but the loss of the identity.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from zjournal.errors import OutputFault
from zjournal.journal import chain, content, database, datadir, headfile, segments, snapshots, wal
from zjournal.journal.database import Identity
from zjournal.journal.events import Fact, PayloadErased, RequestAccepted, decode_body
from zjournal.journal.log import Journal
from zjournal.journal.projections import BY_RESPONSE, TURN_COLUMNS, turn_of
from zjournal.journal.transaction import Transaction
from zjournal.journal.verify import verify

CAUSE_LOST = "lost"  # of PayloadErased
PAGE = 500
UNREADABLE_MAX = 20_000  # facts in a row, where nobody knows how many there were
LISTED_MAX = 100

Row = tuple


class Range(msgspec.Struct, frozen=True):
    """Facts behind the break. `intact`: each follows from the one before it, but not from what is proved."""

    first: int
    last: int
    intact: bool


class Salvaged(msgspec.Struct, frozen=True, kw_only=True):
    """What was copied and what was not."""

    source: str
    path: str  # of the new data directory
    facts: int  # copied, those that tell of losses not counted
    contents: int
    turns: int
    reason: str  # why the chain ends where it does, as half a sentence; empty if nothing shows that it is not whole
    lost_facts: tuple[Range, ...]  # behind the end of the copy, at most LISTED_MAX
    lost_turns: tuple[str, ...]  # responses that began among these, as far as they can be read; at most LISTED_MAX
    erased: tuple[str, ...]  # responses that lost content and are erased in the copy
    lost_contents: int

    @property
    def whole(self) -> bool:
        """Whether nothing is known to be lost."""
        return not (self.reason or self.lost_facts or self.erased or self.lost_contents)


def salvage(data_dir: Path, out: Path) -> Salvaged:
    """Copies what can be proved into the new data directory `out`, which must be absent or empty.

    Raises JournalFault when nothing can be proved, OutputFault when `out` cannot be made; then there is no `out`.
    """
    path = data_dir / datadir.JOURNAL_FILE
    if not path.exists():
        raise database.fault(path, "there is no journal here", "name its directory with --data-dir")
    database.identify(path, writing=False)
    part = out.with_name(out.name + ".part")
    if (out.exists() and (not out.is_dir() or any(out.iterdir()))) or part.exists():
        taken = part if part.exists() else out
        raise OutputFault(f"{taken}: exists already and is not empty; name another directory")
    source = None
    cut = out.with_name(out.name + ".source")
    try:
        source = _Source(path, _uncut(path, cut))
        datadir.prepare(part)
        done = _copy(source, part)
        report = verify(part)
        if report.fault is not None:
            raise database.fault(part, f"the copy does not verify ({report.fault.reason})", "report this as a bug")
        part.rename(out)
    except OSError as error:
        raise OutputFault(f"{out}: cannot be made ({error.strerror}); check the disk and its free space") from None
    finally:
        if source is not None:
            source.close()
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(cut, ignore_errors=True)
    return msgspec.structs.replace(done, path=str(out))


def _uncut(path: Path, folder: Path) -> Path:
    """The file itself, or where its end was cut off a copy in the new `folder` in which empty pages take its place.

    SQLite reads nothing at all of a file that has fewer pages than its header says.
    """
    header = database.header(path, path.stat())
    page = int.from_bytes(header[16:18])
    wanted = int.from_bytes(header[28:32]) * (page if page > 1 else 1 << 16)
    if path.stat().st_size >= wanted:
        return path
    if folder.exists():
        raise OutputFault(f"{folder}: exists already; name another directory")
    datadir.prepare(folder)
    for suffix in ("", "-wal"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            shutil.copyfile(beside, folder / beside.name)
    copy = folder / path.name
    os.truncate(copy, wanted)
    copy.chmod(datadir.FILE_MODE)
    return copy


class _Content(NamedTuple):
    """A content that is right: its row, and its bytes where it is no delta that can be copied as it is."""

    id: int
    digest: bytes
    size: int
    base: int | None
    data: bytes
    plain: bytes


class _Source:
    """A damaged journal, read as far as that goes."""

    def __init__(self, path: Path, readable: Path) -> None:
        """`readable` is the file that is read for `path`.

        Raises JournalFault when the identity is lost, without which no link can be proved.
        """
        self.path = path
        self._db = database.connect_reader(readable)
        try:
            self.identity = database.identity(self._db, path)
        except database.DAMAGES as error:
            self.close()
            raise database.fault(path, f"cannot be read at all ({error})", "restore it from a backup") from None
        except BaseException:
            self.close()
            raise
        self._db.text_factory = lambda raw: raw.decode(errors="replace")
        self.witness = headfile.read(path.parent)
        self.log = wal.extent(readable.with_name(readable.name + "-shm"))
        known = [self._all(query) for query in ("SELECT max(seq) FROM event", "SELECT max(last) FROM segment")]
        self.sealed = known[1][0][0] or 0 if known[1] else 0
        last = known[0][0][0] or 0 if known[0] else 0
        self.last = max(last, self.sealed, self.witness.head.seq if self.witness else 0)

    def close(self) -> None:
        self._db.close()

    def facts(self, after: int = 0) -> Iterator[Row]:
        """Every fact behind number `after` that can be read, in order."""
        yield from (row for row in self._sealed_facts(after) if row[0] > after)
        after = max(after, self.sealed)
        while True:
            page = self._all(
                f"SELECT {chain.COLUMNS} FROM event WHERE seq > ? AND seq <= ? ORDER BY seq", after, after + PAGE
            )
            if page is None:  # one of them cannot be read
                page = [row for seq in range(after + 1, after + PAGE + 1) for row in self._fact(seq)]
            yield from page
            after += PAGE
            unknown = page == [] and after >= self.last + UNREADABLE_MAX
            if unknown or (after >= self.last > 0 and not page):
                return

    def _sealed_facts(self, after: int) -> Iterator[Row]:
        """The rows of segments that are what the link after them says; a segment that is not has none."""
        query = "SELECT first, last, link, data FROM segment WHERE last > ? ORDER BY last LIMIT 1"
        while found := self._all(query, after):
            first, last, link, data = found[0]
            after = last
            before = self._all("SELECT link FROM segment WHERE last = ?", first - 1)
            start = before[0][0] if before else chain.genesis(self.identity.id, self.identity.secret).link
            try:
                rows = segments.linked(segments.unpack(data, first, last), start)
            except (ValueError, TypeError):
                continue
            if rows[-1][-1] == link:
                yield from rows

    def _fact(self, seq: int) -> list[Row]:
        return self._all(f"SELECT {chain.COLUMNS} FROM event WHERE seq = ?", seq) or []

    def tenants(self) -> dict[str, Row]:
        """Tenants whose seals are right: id -> id, name, secret, seal."""
        found = {}
        for row in self._all("SELECT id, name, secret, seal FROM tenant") or []:
            if chain.tenant_sealed(self.identity.secret, *row):
                found[row[0]] = row
        return found

    def contents(self, wanted: dict[bytes, bytes]) -> Iterator[_Content]:
        """The contents of `wanted` (digest -> secret of the tenant) whose bytes are right, each behind its base.

        Those that the index does not lead to are looked for in the table itself.
        """
        by_index = "SELECT id FROM content WHERE substr(digest, 1, 8) = substr(?, 1, 8) AND +digest = ?"
        numbers = {row[0] for digest in wanted for row in self._all(by_index, digest, digest) or []}
        if len(numbers) < len(wanted):
            ends = self._all("SELECT max(id) FROM content")
            numbers.update(range(1, (ends[0][0] or 0) + 1 if ends else 1))
        plains = content.Plains(content.CONTENT_BYTES_MAX)
        missing = dict(wanted)
        for number in sorted(numbers):
            for row in self._all("SELECT id, digest, size, base, data FROM content WHERE id = ?", number) or []:
                secret = missing.get(row[1]) if isinstance(row[1], bytes) else None
                if secret is not None and self._right(row, secret, plains):
                    del missing[row[1]]
                    number, digest, size, base, data = row
                    yield _Content(number, digest, size, base, data, plains.get(digest) or b"")

    def _right(self, row: Row, secret: bytes, plains: content.Plains) -> bool:
        try:
            return content.fault_of(self._db, row, secret, plains) is None  # type: ignore[arg-type]
        except (sqlite3.Error, OverflowError):
            return False

    def _all(self, query: str, *values: object) -> list[Row] | None:
        """The rows; None if they cannot be read."""
        try:
            return self._db.execute(query, values).fetchall()
        except (sqlite3.Error, OverflowError):
            return None


class _Walk:
    """What the proved beginning of the chain holds."""

    def __init__(self, identity: Identity) -> None:
        self.head = chain.genesis(identity.id, identity.secret)
        self.held: dict[str, Counter[bytes]] = {}  # response -> digests its facts hold
        self.owner: dict[bytes, str] = {}  # digest -> tenant
        self.gone: dict[str, str] = {}  # response without a payload that it had -> tenant
        self.erased: set[str] = set()

    def take(self, row: Row) -> tuple[Row | None, str]:
        """The row as it can be proved, which may be without its payload; or None and why it cannot be."""
        reason = chain.fault_of(row, self.head)
        if reason is not None and chain.type_fault_of(row) is None:
            bare = (*row[:5], None, *row[6:])
            if chain.fault_of(bare, self.head) is None:
                row, reason = bare, None
        if reason is not None:
            return None, reason
        try:
            fact = chain.recorded(row[0], row[1], row[4], row[5], row[6])
        except msgspec.MsgspecError as error:
            return None, f"its body cannot be read: {error}"
        event = fact.event
        response = getattr(event, "response", "")
        if isinstance(event, PayloadErased):
            self.erased.add(response)
            self.held.pop(response, None)
        elif fact.payload is None:
            self.gone[response] = event.tenant
        for digest in content.references(event):
            self.held.setdefault(response, Counter())[digest] += 1
            self.owner[digest] = event.tenant
        self.head = chain.head_of(row)
        return row, ""


def _copy(source: _Source, part: Path) -> Salvaged:
    given = iter(source.identity)
    db = database.open_writer(part, lambda size: next(given))
    try:
        walk, reason = _copy_facts(source, db)
        tenants = source.tenants()
        db.executemany("INSERT INTO tenant (id, name, secret, seal) VALUES (?, ?, ?, ?)", tenants.values())
        lost_digests, copied = _copy_contents(source, db, walk, tenants)
    except sqlite3.Error as error:
        raise OutputFault(f"{part}: cannot be written ({error}); check the disk and its free space") from None
    finally:
        db.close()
    lost = {response for response in walk.gone if response not in walk.erased}
    lost |= {response for response, digests in walk.held.items() if lost_digests.intersection(digests)}
    headfile.HeadFile(part, source.identity.id).write(walk.head)
    with Journal.open(part) as journal:
        facts = journal.rebuild()
        for response in sorted(lost):
            journal.run(lambda tx, response=response: _erase(tx, response)).result()  # type: ignore[misc]
        with journal.transaction() as reading:
            (turns,) = reading.execute("SELECT count(*) FROM turn").fetchone()
            (kept,) = reading.execute("SELECT count(*) FROM content").fetchone()
    ranges, begun = _behind(source, walk.head.seq)
    if not reason and source.last > walk.head.seq:
        reason = f"facts {walk.head.seq + 1} to {source.last} cannot be read"
    if not reason and source.witness is not None:
        reason = headfile.log_fault_of(source.witness, source.log) or ""
        reason = reason or (
            headfile.fault_of(source.witness, source.identity.id, walk.head.seq, _link(source, walk)) or ""
        )
    return Salvaged(
        source=str(source.path),
        path=str(part),
        facts=facts,
        contents=min(kept, copied),
        turns=turns,
        reason=reason,
        lost_facts=ranges,
        lost_turns=begun,
        erased=tuple(sorted(lost)),
        lost_contents=len(lost_digests),
    )


def _copy_facts(source: _Source, db: sqlite3.Connection) -> tuple[_Walk, str]:
    walk = _Walk(source.identity)
    insert = f"INSERT INTO event ({chain.COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    reason = ""
    db.execute("BEGIN IMMEDIATE")
    for number, row in enumerate(source.facts()):
        proved, reason = walk.take(row)
        if proved is None:
            reason = f"fact {walk.head.seq + 1}: {reason}"
            break
        db.execute(insert, proved)
        if number % PAGE == PAGE - 1:
            db.execute("COMMIT")
            db.execute("BEGIN IMMEDIATE")
    db.execute("COMMIT")
    return walk, reason


def _copy_contents(
    source: _Source, db: sqlite3.Connection, walk: _Walk, tenants: dict[str, Row]
) -> tuple[set[bytes], int]:
    """Copies what the facts hold on to; returns the digests that could not be, and the number that could."""
    refs: Counter[bytes] = Counter()
    for digests in walk.held.values():
        refs.update(digests)
    wanted = {digest: tenants[walk.owner[digest]][2] for digest in refs if walk.owner[digest] in tenants}
    insert = "INSERT INTO content (id, digest, tenant, size, refs, base, depth, data) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    depths: dict[int, int] = {}  # of what was copied, by its number, which it keeps
    found: set[bytes] = set()
    for right in source.contents(wanted):
        base, data = right.base, right.data
        if base is not None and base not in depths:  # its base was not wanted: it stands by itself from now on
            base, data = None, content.Packer().pack(right.plain)
        depths[right.id] = 0 if base is None else depths[base] + 1
        owner = walk.owner[right.digest]
        db.execute(
            insert, (right.id, right.digest, owner, right.size, refs[right.digest], base, depths[right.id], data)
        )
        found.add(right.digest)
    return set(refs) - found, len(found)


def _erase(tx: Transaction, response: str) -> None:
    """Erases what is left of a turn that lost content; `response` "": the contents of facts that belong to no turn."""
    row = tx.db.execute(f"SELECT {TURN_COLUMNS} FROM turn WHERE {BY_RESPONSE}", (response, response)).fetchone()
    turn = turn_of(row) if row else None
    span = (turn.accepted_seq - 1, turn.last_seq) if turn else (0, tx.head.seq)
    tenant = turn.tenant if turn else ""
    for found in tx.facts(*span):
        event = decode_body(found.body)
        if getattr(event, "response", "") != response:
            continue
        tenant = tenant or event.tenant
        tx.erase_payloads([found.seq])
        content.drop(tx.db, [digest for digest in content.references(event) if content.there(tx.db, digest)])
    tx.erase_payloads(snapshots.facts_of(tx, response))
    ends = snapshots.ends_of(tx, response)
    tx.append([Fact(PayloadErased(tenant=tenant, response=response, cause=CAUSE_LOST))])
    snapshots.release(tx, ends, snapshots.DELETED)


def _behind(source: _Source, proved: int) -> tuple[tuple[Range, ...], tuple[str, ...]]:
    """The facts behind the proved ones, as ranges, and the responses that began there."""
    ranges: list[Range] = []
    begun: list[str] = []
    before: chain.Head | None = None
    known = proved
    for row in source.facts(proved):
        if chain.type_fault_of(row) is not None:
            continue
        follows = before is not None and chain.fault_of(row, before) is None
        end = ranges[-1] if ranges else None
        if end is not None and row[0] == end.last + 1 and (follows == end.intact or end.first == end.last):
            ranges[-1] = Range(end.first, row[0], follows)
        else:
            ranges.append(Range(row[0], row[0], follows))
        before = chain.head_of(row)
        known = row[0]
        begun += _response_begun(row)
    if source.last > known:
        ranges.append(Range(known + 1, source.last, False))
    del ranges[LISTED_MAX:]
    return tuple(ranges), tuple(begun[:LISTED_MAX])


def _response_begun(row: Row) -> list[str]:
    try:
        event = chain.recorded(row[0], row[1], row[4], row[5], row[6]).event
    except (msgspec.MsgspecError, TypeError):
        return []
    return [event.response] if isinstance(event, RequestAccepted) else []


def _link(source: _Source, walk: _Walk) -> bytes | None:
    """The proved link of the fact that the head file names."""
    assert source.witness is not None
    if source.witness.head.seq == walk.head.seq:
        return walk.head.link
    if source.witness.head.seq > walk.head.seq:
        return None
    row = next(source.facts(source.witness.head.seq - 1), None)
    return row[7] if row is not None and row[0] == source.witness.head.seq else None
