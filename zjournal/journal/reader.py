"""Reading the journal, from any thread, beside the writer or without one.

Every method takes a read-only connection from a small pool for one short transaction. Readers never block the
writer in WAL mode, but an open read transaction keeps the log from being reset, so long reads go page by page.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from zjournal.errors import JournalFault
from zjournal.journal import chain, content, database, rows
from zjournal.journal.datadir import JOURNAL_FILE
from zjournal.journal.events import (
    AnyEvent,
    EngineStarted,
    NewerEvent,
    Recorded,
    ServerCrashed,
    ServerStarted,
    ServerStopped,
)
from zjournal.journal.projections import (
    BY_PARENT,
    BY_RESPONSE,
    BY_SESSION,
    DELETED,
    FAILED,
    LINE,
    RUNNING,
    SESSION_COLUMNS,
    TURN_COLUMNS,
    Session,
    Turn,
    session_of,
    turn_of,
)
from zjournal.journal.segments import Bare

PAGE_FACTS = 2_000
READ_S_MAX = 0.25  # no read transaction of ours is open longer, so that the log can be emptied in between
READ_S = READ_S_MAX / 5  # and long ones are cut into pieces of about this
SCAN_FACTS_MIN, SCAN_FACTS, SCAN_FACTS_MAX = 100, 5_000, 20_000  # rows looked at in one: fewest, at first, most
LIFE_SCAN_FACTS = 1_000_000  # facts from the end among which a start looks for the last server's end
CONNECTIONS_KEPT_MAX = 4
SESSIONS_PAGE_MAX = 1_000
TURNS_PAGE = 1_000
DIGESTS_PAGE = 500  # looked for in one transaction
FETCH_ROWS = 100  # between looks at the time


class Tenant(msgspec.Struct, frozen=True):
    """Who owns sessions and contents. `secret` keys the names of its contents."""

    id: str
    name: str
    secret: bytes


class Pace:
    """How many rows a long read looks at in one transaction, by how long the ones before took. For `with`."""

    def __init__(self, rows: int = SCAN_FACTS) -> None:
        self.rows = rows
        self._started = 0.0

    def __enter__(self) -> Pace:
        self._started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._started
        if seconds > READ_S:
            self.rows = max(int(self.rows * READ_S / seconds), SCAN_FACTS_MIN)
        elif seconds < READ_S / 4:
            self.rows = min(self.rows * 2, SCAN_FACTS_MAX)


def some(cursor: sqlite3.Cursor) -> list[tuple]:
    """The rows of a query, as many as come within READ_S, and at least one if there is one."""
    until = time.monotonic() + READ_S
    rows: list[tuple] = []
    while part := cursor.fetchmany(FETCH_ROWS):
        rows += part
        if time.monotonic() > until:
            cursor.close()  # else the statement would go on to hold the transaction
            break
    return rows


class Reader:
    """The read side. `Reader.open` for a process that does not write; the server's `Journal` is one as well."""

    def __init__(self, data_dir: Path) -> None:
        """Raises JournalFault."""
        self.path = data_dir / JOURNAL_FILE
        self._data_dir = data_dir
        self._idle: list[sqlite3.Connection] = []
        self._idle_lock = threading.Lock()
        self._tenants: dict[str, Tenant] = {}  # by id; a tenant never changes
        self._plains = content.Plains()
        self._unpacked = rows.Unpacked()
        self._closed = False
        with self.transaction() as db:
            self.id, self.secret = database.identity(db, self.path)

    @classmethod
    def open(cls, data_dir: Path) -> Reader:
        """Opens read-only. Raises JournalFault: no journal there, foreign, newer, damaged."""
        return cls(data_dir)

    def close(self) -> None:
        """Closes the connections; calls that are under way finish on theirs."""
        with self._idle_lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for db in idle:
            db.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A read transaction: everything in it sees one state. Keep it short. Raises JournalFault for damage."""
        with self._idle_lock:
            db = self._idle.pop() if self._idle else None
        if db is None:
            db = database.open_reader(self._data_dir)
        try:
            db.execute("BEGIN")
            yield db
        except database.DAMAGES as error:
            raise database.damage(self.path, error) from error
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
            with self._idle_lock:
                keep = not self._closed and len(self._idle) < CONNECTIONS_KEPT_MAX
                if keep:
                    self._idle.append(db)
            if not keep:
                db.close()

    # --- facts ----------------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """The number of the last committed fact; 0 in an empty journal."""
        with self.transaction() as db:
            return rows.head(db)

    def read(self, after: int = 0, limit: int = PAGE_FACTS, upto: int | None = None) -> list[Recorded]:
        """Facts after number `after`, none beyond `upto`, in order; [] at the end.

        At most `limit`, and fewer when they are large or the disk is slow.
        """
        limit = min(limit, PAGE_FACTS)
        last = after + limit if upto is None else min(after + limit, upto)
        found = self._find(after, last, fetch=some)
        return [self._recorded(bare) for bare in self._facts(found)]

    def weigh(self, after: int, upto: int) -> list[tuple[Recorded, float]]:
        """As `read`; each fact with the bytes, about, that erasing its payload would give back."""
        found = self._find(after, min(after + PAGE_FACTS, upto), fetch=some)
        try:
            return [(self._recorded(bare), size) for bare, size in rows.weighed(found, self._unpacked)]
        except rows.DamagedSegment as error:
            raise self._damaged_segment(error) from None

    def read_response(self, response: str, after: int = 0) -> list[Recorded]:
        """The facts of a response's generation after number `after`: acceptance to end, in order; [] if unknown.

        Rows are filtered by the bytes of the id before any is decoded; facts of many responses lie between.
        """
        turn = self.turn(response)
        if turn is None:
            return []
        needle = response.encode()
        found: list[Recorded] = []
        at = max(after, turn.accepted_seq - 1)
        pace = Pace()
        while at < turn.last_seq:
            upto = min(at + pace.rows, turn.last_seq)
            with pace:
                lying = self._find(at, upto, needle=needle)
            facts = (self._recorded(bare) for bare in self._facts(lying) if needle in bare.body)
            found += (fact for fact in facts if getattr(fact.event, "response", None) == response)
            at = upto
        return found

    def engine_before(self, seq: int) -> EngineStarted | None:
        """The last EngineStarted before fact `seq`: what the facts of that time were made with; None without one."""
        event = next((fact.event for fact in self.before(seq, EngineStarted)), None)
        assert event is None or isinstance(event, EngineStarted), event
        return event

    def before(self, seq: int, kind: type[AnyEvent], after: int = 0) -> Iterator[Recorded]:
        """The facts of one rare kind before fact `seq`, and behind fact `after`, the newest first.

        Walks back page by page, for facts have no index on their kind.
        """
        pace = Pace()
        while seq > after + 1:
            low = max(seq - pace.rows, after + 1)
            with pace:
                found = self._find(low - 1, seq - 1, tags=(chain.TAGS[kind][0],))
            yield from map(self._recorded, reversed(self._facts(found)))
            seq = low

    def unended_start(self) -> tuple[int, int] | None:
        """The last server's start (seq and pid) if no end follows it; (0, 0) if none of all three is near. Else None.

        Only the last LIFE_SCAN_FACTS facts are looked at: a start must not read all history.
        """
        end = self.head
        floor = max(end - LIFE_SCAN_FACTS, 0)
        tags = tuple(chain.TAGS[kind][0] for kind in (ServerStarted, ServerStopped, ServerCrashed))
        pace = Pace()
        while end > floor:
            low = max(end - pace.rows, floor)
            with pace:
                found = self._find(low, end, tags=tags)
            if facts := self._facts(found):
                last = self._recorded(facts[-1])
                return (last.seq, last.event.pid) if isinstance(last.event, ServerStarted) else None
            end = low
        return (0, 0) if floor else None

    def _find(self, after: int, upto: int, **how: Any) -> rows.Found:
        """`rows.find` in a read transaction of its own."""
        # Looked at first: what is erased behind the transaction's back must not be remembered from what it saw.
        erasures = self._unpacked.erasures
        with self.transaction() as db:
            return rows.find(db, after, upto, **how)._replace(erasures=erasures)

    def _facts(self, found: rows.Found) -> list[Bare]:
        try:
            return list(rows.facts(found, self._unpacked))
        except rows.DamagedSegment as error:
            raise self._damaged_segment(error) from None

    def _damaged_segment(self, error: rows.DamagedSegment) -> JournalFault:
        return database.fault(self.path, f"fact {error.first} cannot be read: {error}", "run `zj journal verify`")

    def _recorded(self, bare: Bare) -> Recorded:
        sha = bare.payload_sha if bare.payload is None else chain.NO_PAYLOAD
        try:
            return chain.recorded(bare.seq, bare.time, bare.body, bare.payload, sha)
        except NewerEvent as error:
            raise database.fault(self.path, f"fact {bare.seq}: {error}", "use a newer zjournal") from None
        except msgspec.MsgspecError as error:
            reason = f"fact {bare.seq} cannot be read ({error})"
            raise database.fault(self.path, reason, "run `zj journal verify`") from None

    # --- contents and tenants -------------------------------------------------------------------------

    def digest(self, tenant: str, data: bytes) -> bytes:
        """The name that `data` has, or will have, as a content of this tenant (by id); 32 bytes."""
        return chain.content_digest(self._tenant(tenant).secret, data)

    def content(self, tenant: str, digest: bytes) -> bytes:
        """The bytes of a content, checked against its digest. Raises JournalFault: erased, foreign or damaged."""
        secret = self._tenant(tenant).secret
        erasures = self._plains.erasures  # before the transaction sees anything, as in `_find`
        with self.transaction() as db:
            stored = content.stored(db, tenant, digest, self._plains, erasures)
        return content.opened(secret, digest, stored, self._plains)

    def tenant_name(self, tenant: str) -> str:
        """The name of the tenant of this id: a key's name. Raises JournalFault."""
        return self._tenant(tenant).name

    def _tenant(self, tenant: str) -> Tenant:
        known = self._tenants.get(tenant)
        if known is None:
            with self.transaction() as db:
                row = db.execute("SELECT id, name, secret FROM tenant WHERE id = ?", (tenant,)).fetchone()
            if row is None:
                raise JournalFault(f"{self.path}: there is no tenant {tenant}")
            known = self._tenants[tenant] = Tenant(*row)
        return known

    # --- turns and sessions ---------------------------------------------------------------------------

    def turn(self, response: str) -> Turn | None:
        """The turn of this response id, whatever its tenant and status."""
        return self._one_turn(BY_RESPONSE, response, response)

    def line(self, response: str, limit: int) -> Iterator[Turn]:
        """The turn of this response id, its parent, and so on, as far as they are there; at most `limit`.

        As `turn` of each, but read ahead: hundreds at a time, in one query.
        """
        wanted, left = response, limit
        while wanted and left > 0:
            most = min(left, TURNS_PAGE)
            with self.transaction() as db:
                page = [turn_of(row) for row in db.execute(LINE, (wanted, wanted, most))]
            left -= len(page)
            yield from page
            wanted = page[-1].parent if len(page) == most else ""

    def turn_beginning(self, beginning: str) -> Turn | None:
        """The turn whose response id begins with these 25 characters, as in the index of responses."""
        return self._one_turn("substr(response, 1, 25) = ?", beginning)

    def children(self, response: str) -> list[Turn]:
        """The turns whose parent this one is, oldest first."""
        return self._turns(f"{BY_PARENT} ORDER BY accepted_seq", response, response)

    def turns(self, session: str) -> list[Turn]:
        """All turns of a session, oldest first."""
        found: list[Turn] = []
        after = 0
        where = f"{BY_SESSION} AND accepted_seq > ? ORDER BY accepted_seq LIMIT ?"
        while page := self._turns(where, session, session, after, TURNS_PAGE):
            found += page
            after = page[-1].accepted_seq
        return found

    def running(self) -> list[Turn]:
        """Turns without an end, oldest first."""
        return self._turns("finished_us IS NULL AND status = ? ORDER BY accepted_seq", RUNNING)

    def find_by_history(self, tenant: str, digests: Sequence[bytes]) -> Turn | None:
        """The newest turn that ended with one of these histories. `digests`: the longest history first; it wins.

        Failed, deleted and erased turns do not count; unstored ones do, and the caller decides.
        """
        return self._latest("history", tenant, digests)

    def find_by_request(self, tenant: str, digests: Sequence[bytes]) -> Turn | None:
        """The newest turn whose request alone had one of these histories, its output left out; else the same."""
        return self._latest("asked", tenant, digests)

    def _latest(self, column: str, tenant: str, digests: Sequence[bytes]) -> Turn | None:
        # One digest at a time, the newest turn first: a request that was sent a thousand times has a thousand turns.
        where = (
            f"{column} != x'' AND substr({column}, 1, 6) = substr(?, 1, 6) AND +{column} = ? AND tenant = ?"
            f" AND erased = 0 AND status NOT IN ('{DELETED}', '{FAILED}') ORDER BY accepted_seq DESC LIMIT 1"
        )
        query = f"SELECT {TURN_COLUMNS} FROM turn WHERE {where}"
        for at in range(0, len(digests), DIGESTS_PAGE):
            with self.transaction() as db:
                for digest in digests[at : at + DIGESTS_PAGE]:
                    row = db.execute(query, (digest, digest, tenant)).fetchone()
                    if row is not None:
                        return turn_of(row)
        return None

    def session(self, session: str) -> Session | None:
        """The session of this id."""
        found = self._sessions("session = ?", session)
        return found[0] if found else None

    def sessions(self, limit: int = 100, before: int | None = None) -> list[Session]:
        """Sessions not deleted, last used first; `before`: the `last_seq` of the last one of the page before."""
        assert 0 < limit <= SESSIONS_PAGE_MAX, limit
        bound = before if before is not None else 1 << 62
        return self._sessions("last_seq < ? AND deleted = 0 ORDER BY last_seq DESC LIMIT ?", bound, limit)

    def sessions_named(self, prefix: str, limit: int = 2) -> list[Session]:
        """Sessions whose id begins with `prefix`: so that a person may type the beginning of one."""
        return self._sessions("session >= ? AND session < ? LIMIT ?", prefix, prefix + "\U0010ffff", limit)

    def turns_named(self, prefix: str, limit: int = 2) -> list[Turn]:
        """Turns whose response id begins with `prefix`."""
        end = prefix + "\U0010ffff"
        near = "substr(response, 1, 25) >= substr(?, 1, 25) AND substr(response, 1, 25) < ?"  # as the index has it
        return self._turns(f"{near} AND response >= ? AND response < ? LIMIT ?", prefix, end, prefix, end, limit)

    def newest(self, session: str) -> Turn | None:
        """The turn of a session that was accepted last."""
        return self._one_turn(f"{BY_SESSION} ORDER BY accepted_seq DESC", session, session)

    def oldest(self, session: str) -> Turn | None:
        """The turn of a session that was accepted first, of those that are neither deleted nor erased."""
        where = f"{BY_SESSION} AND erased = 0 AND status != ? ORDER BY accepted_seq"
        return self._one_turn(where, session, session, DELETED)

    def find_session(self, tenant: str, key: bytes) -> Session | None:
        """The newest session, not deleted, that a client of this tenant calls by this key (a digest)."""
        where = "tenant = ? AND key = ? AND key != x'' AND deleted = 0 ORDER BY opened_seq DESC LIMIT 1"
        found = self._sessions(where, tenant, key)
        return found[0] if found else None

    def _one_turn(self, where: str, *values: object) -> Turn | None:
        found = self._turns(where + " LIMIT 1", *values)
        return found[0] if found else None

    def _turns(self, where: str, *values: object) -> list[Turn]:
        with self.transaction() as db:
            rows = db.execute(f"SELECT {TURN_COLUMNS} FROM turn WHERE {where}", values).fetchall()
        return [turn_of(row) for row in rows]

    def _sessions(self, where: str, *values: object) -> list[Session]:
        with self.transaction() as db:
            rows = db.execute(f"SELECT {SESSION_COLUMNS} FROM session WHERE {where}", values).fetchall()
        return [session_of(row) for row in rows]
