"""Reading the journal, from any thread, beside the writer or without one.

Every method takes a read-only connection from a small pool for one short transaction. Readers never block the
writer in WAL mode, but an open read transaction keeps the log from being reset, so long reads go page by page.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from zjournal.errors import JournalFault
from zjournal.journal import chain, content, database, rows
from zjournal.journal.datadir import JOURNAL_FILE
from zjournal.journal.events import EngineStarted, Recorded
from zjournal.journal.projections import (
    BY_RESPONSE,
    BY_SESSION,
    DELETED,
    FAILED,
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
SCAN_FACTS = 20_000  # most rows looked at in one read transaction
CONNECTIONS_KEPT_MAX = 4
SESSIONS_PAGE_MAX = 1_000
DIGESTS_PAGE = 500  # looked for in one statement


class Tenant(msgspec.Struct, frozen=True):
    """Who owns sessions and contents. `secret` keys the names of its contents."""

    id: str
    name: str
    secret: bytes


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
        except sqlite3.Error as error:
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
        """Facts after number `after`, at most `limit` and none beyond `upto`, in order; [] at the end."""
        limit = min(limit, PAGE_FACTS)
        last = after + limit if upto is None else min(after + limit, upto)
        return [self._recorded(bare) for bare in self._bare(after, last)]

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
        while at < turn.last_seq:
            upto = min(at + SCAN_FACTS, turn.last_seq)
            facts = (self._recorded(bare) for bare in self._bare(at, upto) if needle in bare.body)
            found += (fact for fact in facts if getattr(fact.event, "response", None) == response)
            at = upto
        return found

    def engine_before(self, seq: int) -> EngineStarted | None:
        """The last EngineStarted before fact `seq`: what the facts of that time were made with. None if there is none.

        Walks back page by page, for facts have no index on their kind.
        """
        while seq > 1:
            low = max(seq - SCAN_FACTS, 1)
            with self.transaction() as db:
                found = rows.last_of_kind(db, low, seq - 1, chain.TAGS[EngineStarted][0], self._unpacked)
            if found is not None:
                event = self._recorded(found).event
                assert isinstance(event, EngineStarted), event
                return event
            seq = low
        return None

    def _bare(self, after: int, upto: int) -> list[Bare]:
        with self.transaction() as db:
            try:
                return list(rows.bare(db, after, upto, self._unpacked))
            except rows.DamagedSegment as error:
                step = "run `zj journal verify`"
                raise database.fault(self.path, f"fact {error.first} cannot be read: {error}", step) from None

    def _recorded(self, bare: Bare) -> Recorded:
        sha = bare.payload_sha if bare.payload is None else chain.NO_PAYLOAD
        try:
            return chain.recorded(bare.seq, bare.time, bare.body, bare.payload, sha)
        except msgspec.MsgspecError as error:
            reason = f"fact {bare.seq} cannot be read ({error})"
            raise database.fault(self.path, reason, "run `zj journal verify`, or use a newer zjournal") from None

    # --- contents and tenants -------------------------------------------------------------------------

    def digest(self, tenant: str, data: bytes) -> bytes:
        """The name that `data` has, or will have, as a content of this tenant (by id); 32 bytes."""
        return chain.content_digest(self._tenant(tenant).secret, data)

    def content(self, tenant: str, digest: bytes) -> bytes:
        """The bytes of a content, checked against its digest. Raises JournalFault: erased, foreign or damaged."""
        secret = self._tenant(tenant).secret
        with self.transaction() as db:
            return content.fetch(db, tenant, secret, digest, self._plains)

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

    def turns(self, session: str) -> list[Turn]:
        """All turns of a session, oldest first."""
        return self._turns(f"{BY_SESSION} ORDER BY accepted_seq", session, session)

    def running(self) -> list[Turn]:
        """Turns without an end, oldest first."""
        return self._turns("finished_us IS NULL AND status = ? ORDER BY accepted_seq", RUNNING)

    def find_by_history(self, tenant: str, digests: Sequence[bytes]) -> Turn | None:
        """The newest turn that ended with one of these histories. `digests`: the longest history first; it wins.

        Failed, deleted and erased turns do not count; unstored ones do, and the caller decides.
        """
        return self._find("history", tenant, digests)

    def find_by_request(self, tenant: str, digests: Sequence[bytes]) -> Turn | None:
        """The newest turn whose request alone had one of these histories, its output left out; else the same."""
        return self._find("asked", tenant, digests)

    def _find(self, column: str, tenant: str, digests: Sequence[bytes]) -> Turn | None:
        usable = f"erased = 0 AND status NOT IN ('{DELETED}', '{FAILED}')"
        for at in range(0, len(digests), DIGESTS_PAGE):
            page = digests[at : at + DIGESTS_PAGE]
            marks = ", ".join("?" * len(page))
            near = f"{column} != x'' AND substr({column}, 1, 6) IN ({marks})"  # as the index has it
            where = f"{near} AND tenant = ? AND {usable} ORDER BY accepted_seq"
            turns = self._turns(where, *(digest[:6] for digest in page), tenant)
            newest = {getattr(turn, column): turn for turn in turns}
            for digest in page:
                if digest in newest:
                    return newest[digest]
        return None

    def session(self, session: str) -> Session | None:
        """The session of this id."""
        found = self._sessions("session = ?", session)
        return found[0] if found else None

    def sessions(self, limit: int = 100, before: int | None = None) -> list[Session]:
        """Sessions by last activity, newest first; `before`: the `last_seq` of the last one of the page before."""
        assert 0 < limit <= SESSIONS_PAGE_MAX, limit
        bound = before if before is not None else 1 << 62
        return self._sessions("last_seq < ? ORDER BY last_seq DESC LIMIT ?", bound, limit)

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

    def find_session(self, tenant: str, key: bytes) -> Session | None:
        """The newest session that a client of this tenant calls by this key (a digest)."""
        found = self._sessions("tenant = ? AND key = ? AND key != x'' ORDER BY opened_seq DESC LIMIT 1", tenant, key)
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
