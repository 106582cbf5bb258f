"""The journal's one writer: append, commit in groups, then tell.

Everything that waits is committed by one BEGIN IMMEDIATE … COMMIT as soon as the commit before it is done; there is
no timer. So a lone caller waits for one fsync, and many callers share one. Subscribers and callers hear of a fact
only after COMMIT returned. A write that fails fails its callers with JournalUnavailable, and the next one is tried.

Reading is inherited from `Reader`; erasure is built on `run` by journal.retention.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from zjournal.errors import Fault, JournalUnavailable, OutputFault
from zjournal.journal import chain, content, database, datadir, headfile, kept, quick, rows, segments, wal
from zjournal.journal.events import AnyEvent, Fact, Recorded, ResponseFailed
from zjournal.journal.projections import TURN_COLUMNS, Turn, effects, turn_of
from zjournal.journal.reader import Reader, Tenant
from zjournal.journal.transaction import Transaction
from zjournal.journal.written import Written, tell

QUEUE_FACTS_MAX = 65_536  # facts that may wait for a disk that does not answer
COPY_STEP_PAGES = 256  # of a copy, before those who wait for a commit come first
GROUP_FACTS_MAX = 4_096  # facts in one transaction, so that nobody waits for a long one
SEAL_FACTS = 512  # that wait before any are sealed in a moment of silence, and that are sealed at a time
SEAL_WAITING_MAX = 1 << 16  # from here on they are sealed without waiting for silence,
SEAL_REST = 200  # but after a rest so many times as long as it took, for commits wait for it; shorter if more wait
SEAL_CLOSING_FACTS = 64  # fewer are not worth it when the journal is closed
SEAL_CLOSING_MAX = 1 << 16  # and more than these are left to the next life: the end of a server must not wait long
SALTS_MAX = 1_024
IDLE_S = 0.2  # between looks at what is still owed while nothing is written
LOCAL_TENANT = "local"  # owner of everything on a server without keys; its id as well as its name
SERVER_TENANT = "server"  # owner of contents that belong to no client, such as vocabularies; id and name as well
ORPHANED = "The journal could not be written: facts before these are missing."
LOST = "The journal's log was removed under the server; restart it."
CHANGED = "Another program has changed the facts of the journal: stop the server, and run `zj journal verify`."
BROKEN = "The journal's writer has failed; restart the server."
WRITER_THREAD = "journal-writer"
CRASH_MESSAGE = "The server was stopped while this response was running."

T = TypeVar("T")
Subscriber = Callable[[Sequence[Recorded]], None]
_log = logging.getLogger(__name__)


def wall_clock_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1_000


class _Append:
    __slots__ = ("after", "done", "facts", "now")

    def __init__(
        self, facts: Sequence[Fact], now: int, after: Future | Written | None, done: Future[int] | Written
    ) -> None:
        self.facts, self.now, self.after, self.done = facts, now, after, done

    @property
    def orphaned(self) -> bool:
        """Whether the append that this one builds on has failed; known once the writer has taken that one."""
        return self.after is not None and self.after.done() and self.after.exception() is not None


class _Run:
    def __init__(self, work: Callable[[Transaction], Any], now: int, scrub: bool) -> None:
        self.work, self.now, self.scrub, self.done = work, now, scrub, Future[Any]()
        self.done.set_running_or_notify_cancel()  # as with an append, it cannot be cancelled


class _Bare(_Run):
    """Work on the connection itself."""

    def __init__(self, work: Callable[[sqlite3.Connection], Any], now: int) -> None:
        super().__init__(lambda tx: None, now, False)
        self.bare = work


class Journal(Reader):
    """The journal of a locked data directory, open for its only writer. Close it to drain what waits."""

    def __init__(
        self,
        data_dir: Path,
        clock: Callable[[], int],
        entropy: Callable[[int], bytes],
        checkpoint: str,
        log_limit: int,
        strict: bool,
    ) -> None:
        self._db = database.open_writer(data_dir, entropy)
        self._own_checkpoints = checkpoint == wal.OWN
        try:
            super().__init__(data_dir)
            identity = database.Identity(self.id, self.secret)
            self._head = quick.checked_head(self._db, self.path, identity)
            quick.check_witness(self._db, self.path, identity, self._head)
            if strict:
                quick.check_tenants(self._db, self.path, identity)
                quick.check_projections(self)
            self._genesis = chain.genesis(*identity)
            self._sealed = rows.sealed(self._db)
            self._head_file = headfile.HeadFile(data_dir, self.id)
            self._wal = wal.Log(self._db, self.path, self._own_checkpoints, log_limit, self._note_log)
            if self._wal.extent.pages:  # a checkpoint before this start may have carried over a part of it
                self._note_log()
        except BaseException:
            database.let_go(self._db, self.path)
            raise
        self._clock = clock
        self._entropy = entropy
        self._packer = content.Packer()
        self._salts: dict[str, bytes] = {}  # the last one of each response that was written to lately
        self._queue: deque[_Append | _Run] = deque()
        self._queued_facts = 0
        self._wake = threading.Condition()
        self._closing = False
        self._upkept_us = 0
        self._sealed_us = self._seal_rest_us = 0
        self._lost = self._broken = False
        self._data_version = self._strange_version = -1  # of SQLite: ours, and one with facts that are not ours
        self._taken: Sequence[_Append | _Run] = ()  # what the writer is at
        self._subscribers: tuple[Subscriber, ...] = ()
        self._writer = threading.Thread(target=self._write, name=WRITER_THREAD, daemon=True)
        self._writer.start()

    @classmethod
    def open(
        cls,
        data_dir: Path,
        *,
        clock: Callable[[], int] = wall_clock_us,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
        checkpoint: str = wal.OWN,
        log_limit: int = wal.REFUSE_BYTES,
        strict: bool = False,
    ) -> Journal:
        """Opens or makes the journal in a directory that the caller has locked (`datadir.lock`).

        `clock` gives microseconds since 1970, `entropy(n)` gives n random bytes. `checkpoint`: wal.OWN or wal.EXTERNAL.
        `log_limit`: bytes of write-ahead log at which `check_room` refuses. `strict` refuses projections that do
        not follow from the facts as well; only a rebuild or a copy wants such a journal open.

        Raises DataDirFault or JournalFault; nothing is written to a file that is not ours.
        """
        datadir.prepare(data_dir)
        return cls(data_dir, clock, entropy, checkpoint, log_limit, strict)

    def close(self) -> None:
        """Commits what waits, then closes. Appends that come later fail with JournalUnavailable."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._writer.join()
        super().close()
        if not self._wal.lost:
            self._head_file.write(self._head, self._wal.extent, sync=self._own_checkpoints)
        if self._own_checkpoints:
            self._db.close()
        else:
            database.let_go(self._db, self.path)
        self._tell([])  # followers see that no more will come

    def __enter__(self) -> Journal:
        return self

    # --- writing --------------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """The number of the last committed fact; 0 in an empty journal."""
        return self._head.seq

    def append(self, facts: Sequence[Fact], *, after: Future | Written | None = None) -> Future[int]:
        """Appends facts in order, in one transaction. The future gives the last one's number, once it is durable.

        `after` is the future of an earlier append that these facts build on: if that one fails, so does this.
        Never blocks. The future fails with JournalUnavailable when the journal cannot be written (nothing of this
        call was), with ParentErased for a turn that would continue what is gone, with AssertionError or another
        error when the facts are wrong.
        """
        done = Future[int]()
        # From here on it cannot be cancelled: a client that goes away must not unmake a fact.
        done.set_running_or_notify_cancel()
        self._append(facts, after, done)
        return done

    def append_soon(self, facts: Sequence[Fact], *, after: Future | Written | None = None) -> Written:
        """As `append`, for the running event loop: to be awaited, and cheaper for many at a time. Never blocks."""
        done = Written(asyncio.get_running_loop())
        self._append(facts, after, done)
        return done

    def _append(self, facts: Sequence[Fact], after: Future | Written | None, done: Future[int] | Written) -> None:
        assert facts
        assert len(facts) <= QUEUE_FACTS_MAX, len(facts)
        self._enqueue(_Append(facts, self._clock(), after, done), len(facts))

    def run(self, work: Callable[[Transaction], T], *, scrub: bool = False) -> Future[T]:
        """Runs `work` on the writer thread in a transaction of its own; what it raises rolls back and fails the future.

        `scrub` empties the write-ahead log afterwards, for work that erases: at once, or as soon as no reader is in
        the way any more (see `scrubbed`).
        """
        item = _Run(work, self._clock(), scrub)
        self._enqueue(item, 1)
        return item.done

    def run_bare(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Runs `work` on the writer's connection outside of any transaction, then empties the write-ahead log.

        For what SQLite does in no transaction, such as VACUUM; it must change no fact.
        """
        item = _Bare(work, self._clock())
        self._enqueue(item, 1)
        return item.done

    def copy(self, target: sqlite3.Connection) -> Future[None]:
        """Copies the whole database into `target`, in steps between which what waits is committed.

        What is committed meanwhile is in the copy as well. Fails with OutputFault when the copy cannot be written,
        with JournalUnavailable when the journal is closed before the end.
        """

        def between(status: int, remaining: int, total: int) -> None:
            if self._closing:
                raise JournalUnavailable("The journal was closed before it was copied.")
            self._write_waiting()

        def work(db: sqlite3.Connection) -> None:
            try:
                db.backup(target, pages=COPY_STEP_PAGES, progress=between, sleep=0)
            except sqlite3.Error as error:
                raise OutputFault(f"The copy cannot be written ({error}); check the disk and its free space") from None

        return self.run_bare(work)

    @property
    def scrubbed(self) -> bool:
        """Whether nothing that was erased can still stand in the write-ahead log."""
        return self._wal.scrubbed

    @property
    def file_bytes(self) -> int:
        """The size of the journal's file, without the write-ahead log beside it."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def log_bytes(self) -> int:
        """The size of the write-ahead log's file."""
        return self._wal.size

    @property
    def blocker_pid(self) -> int:
        """The process whose read transaction has kept the log from being emptied; 0 if there is none."""
        blocker = self._wal.blocker
        return blocker.pid if blocker is not None else 0

    def check_room(self) -> None:
        """Raises JournalUnavailable when the write-ahead log is so large that nothing new may be begun."""
        refusal = self._wal.refusal
        if refusal is not None:
            raise JournalUnavailable(refusal)

    def seal(self, limit: int | None = None) -> int:
        """Packs the oldest facts that are not packed yet, as the journal does by itself in time; returns how many.

        At most `limit`, or as many as it packs at a time by itself. Raises JournalFault for facts that are damaged.
        """
        most = SEAL_FACTS if limit is None else limit
        try:
            return self.run(lambda tx: rows.seal(tx.db, most, self._genesis)).result()
        except ValueError as error:
            raise database.fault(self.path, f"cannot be packed: {error}", database.SALVAGE_STEP) from None

    def tenant(self, name: str) -> Tenant:
        """The tenant of this name; made on first use, which waits for a commit."""
        return self.run(lambda tx: self._tenant_named(tx, name)).result()

    def recover(self) -> list[Turn]:
        """Ends the turns that a crash left open, as failed; returns them as they were. For the start of the server."""

        def work(tx: Transaction) -> list[Turn]:
            rows = tx.db.execute(f"SELECT {TURN_COLUMNS} FROM turn WHERE finished_us IS NULL ORDER BY accepted_seq")
            left = [turn_of(row) for row in rows]
            if left:
                tx.append(
                    [
                        Fact(
                            ResponseFailed(
                                tenant=turn.tenant, response=turn.response, code="server_error", message=CRASH_MESSAGE
                            )
                        )
                        for turn in left
                    ]
                )
            return left

        return self.run(work).result()

    def rebuild(self) -> int:
        """Drops the projections and folds them again from all facts; returns the number of facts. The writer waits."""

        def work(tx: Transaction) -> int:
            # Made anew, so that whatever was wrong in their trees and indexes goes as well.
            names = ("turn", "session", *kept.TABLES)
            query = f"SELECT sql FROM sqlite_schema WHERE tbl_name IN {names} AND sql != ''"
            made = [sql for (sql,) in tx.db.execute(query).fetchall()]
            tables = [sql for sql in made if sql.startswith("CREATE TABLE")]
            # To find a fact's turn, and the chunks around one.
            needed = [sql for sql in made if sql.startswith("CREATE UNIQUE INDEX") or sql in kept.INDEXES]
            rest = [sql for sql in made if sql not in tables and sql not in needed]
            for sql in (*(f"DROP TABLE {name}" for name in names), *tables, *needed):
                tx.db.execute(sql)
            after = 0
            while page := tx.facts(after, after + GROUP_FACTS_MAX):
                for sql, values in effects(self._recorded(bare) for bare in page):
                    tx.db.execute(sql, values)
                after = page[-1].seq
            for sql in rest:  # at the end, in one pass each
                tx.db.execute(sql)
            return after

        return self.run(work).result()

    # --- telling --------------------------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Calls `subscriber` on the writer thread with the facts of each commit, in order; returns how to end that.

        It must be quick and must not wait for the journal. An empty list tells that the journal is closed.
        """
        with self._wake:
            self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            with self._wake:
                self._subscribers = tuple(other for other in self._subscribers if other is not subscriber)

        return unsubscribe

    async def follow(self, after: int = 0) -> AsyncIterator[Recorded]:
        """Facts after number `after`, first those that are there, then each as it is committed, until `close`."""
        loop = asyncio.get_running_loop()
        news = asyncio.Event()

        def wake(_: Sequence[Recorded]) -> None:
            loop.call_soon_threadsafe(news.set)

        unsubscribe = self.subscribe(wake)
        try:
            while True:
                news.clear()
                while after < self._head.seq and not self._closed:
                    for fact in await asyncio.to_thread(self.read, after):
                        yield fact
                        after = fact.seq
                if self._closed:
                    return
                await news.wait()
        finally:
            unsubscribe()

    def _tell(self, facts: Sequence[Recorded]) -> None:
        for subscriber in self._subscribers:
            try:
                subscriber(facts)
            except Exception:  # a follower's bug or its closed loop is not the writer's end
                _log.exception("a subscriber of the journal failed")

    # --- the writer thread ----------------------------------------------------------------------------

    def _enqueue(self, item: _Append | _Run, facts: int) -> None:
        with self._wake:
            if self._closing:
                reason = "The journal is closed."
            elif self._broken or self._lost:
                reason = BROKEN if self._broken else LOST
            elif self._queued_facts + facts > QUEUE_FACTS_MAX:
                reason = "The journal cannot keep up: its disk does not answer."
            else:
                self._queue.append(item)
                self._queued_facts += facts
                if len(self._queue) == 1:  # else the writer has been woken, and not taken them yet
                    self._wake.notify()
                return
        item.done.set_exception(JournalUnavailable(reason))
        if isinstance(item.done, Written):
            tell([item.done])

    def _write(self) -> None:
        try:
            self._write_all()
        except BaseException:  # a bug: nobody may wait for a writer that is gone
            _log.critical("the journal's writer has failed", exc_info=True)
            with self._wake:
                self._broken = True
                left, self._queue = [*self._taken, *self._queue], deque()
            for item in left:
                if not item.done.done():
                    item.done.set_exception(JournalUnavailable(BROKEN))
            tell([item.done for item in left if isinstance(item.done, Written)])  # settled ones may not be told yet

    def _write_all(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing and self._wake.wait(self._idle_s):
                    pass
                if self._closing and not self._queue:
                    break
                group = self._take() if self._queue else []
            if group:
                self._write_group(group)
            elif (now := self._clock()) != self._upkept_us:  # while the clock stands there is no idle time
                self._upkeep(now, idle=True)
        self._settle()

    @property
    def _unsealed(self) -> int:
        return self._head.seq - self._sealed

    @property
    def _idle_s(self) -> float | None:
        """How long the writer may wait for work before it looks at what is owed."""
        owed = self._wal.owes or self._head_file.pending(self._head) or self._unsealed >= SEAL_FACTS
        return IDLE_S if owed else None

    def _upkeep(self, now: int, idle: bool = False) -> None:
        """What is due after a commit, or while there is none."""
        if not self._lost:
            self._upkept_us = now
            rested = not 0 <= now - self._sealed_us < self._seal_rest_us  # a clock that was set back ends the pause
            pressed = self._unsealed >= SEAL_WAITING_MAX and rested
            if pressed or (idle and self._unsealed >= SEAL_FACTS):
                self._seal(fresh=not idle)
                self._sealed_us = now
            self._wal.upkeep(now, idle)
            self._head_file.note(self._head, now, lambda: self._wal.extent)

    def _note_log(self) -> None:
        """Before a checkpoint: what that carries into the database fits a log of this length only."""
        self._head_file.write(self._head, self._wal.extent, sync=True)

    def _write_waiting(self) -> None:
        """One transaction of what waits, in the middle of work on the bare connection."""
        with self._wake:
            group = [] if not self._queue or isinstance(self._queue[0], _Bare) else self._take()
        if group:
            self._write_group(group)

    def _write_group(self, group: _Run | list[_Append]) -> None:
        if isinstance(group, _Run):
            self._taken = [group]
            now = group.now
            self._commit_run(group)
        else:
            self._taken = group
            now = group[-1].now
            self._commit_appends(group)
        self._upkeep(now)

    def _seal(self, *, limit: int | None = None, fresh: bool = False) -> None:
        """Packs the oldest rows. What cannot be packed now is left for later: it is as durable as it was.

        `fresh`: into a segment of their own, which takes a fifth of the time that filling up the last one may take.
        """
        began, waiting = self._clock(), max(self._unsealed, 1)
        most = limit or SEAL_FACTS
        try:
            self._commit(lambda tx: rows.seal(tx.db, most, self._genesis, fresh=fresh), self._head.time)
            self._sealed = rows.sealed(self._db)
        except Exception as error:  # a bug in this must not end the writer, for nothing depends on it
            expected = isinstance(error, Fault | sqlite3.Error | ValueError)
            _log.error("facts after %d could not be sealed: %s", self._sealed, error, exc_info=not expected)
            self._sealed = self._head.seq  # the next try comes when as many again are waiting
        self._seal_rest_us = max(self._clock() - began, 0) * SEAL_REST * SEAL_WAITING_MAX // waiting

    def _settle(self) -> None:
        """What is done last: it makes the file small for as long as nobody has it open."""
        if not self._own_checkpoints:
            return  # it would only make the log longer
        last = min(self._head.seq, self._sealed + SEAL_CLOSING_MAX)
        while not self._lost and self._unsealed >= SEAL_CLOSING_FACTS and self._sealed < last:
            self._seal(limit=segments.FACTS_MAX)
        try:
            self._db.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page
        except sqlite3.Error as error:  # the room is free for what comes next, and that is all
            _log.warning("room that is free could not be given back: %s", error)

    def _take(self) -> _Run | list[_Append]:
        """What waits, up to the next `run` or the limit of a group; a `run` comes alone."""
        first = self._queue.popleft()
        if isinstance(first, _Run):
            self._queued_facts -= 1
            return first
        group, facts = [first], len(first.facts)
        while self._queue and isinstance(after := self._queue[0], _Append):
            if facts + len(after.facts) > GROUP_FACTS_MAX:
                break
            facts += len(after.facts)
            group.append(after)
            self._queue.popleft()
        self._queued_facts -= facts
        return group

    def _commit_appends(self, group: list[_Append]) -> None:
        self._settle_appends(group)
        tell(item.done for item in group if isinstance(item.done, Written))

    def _settle_appends(self, group: list[_Append]) -> None:
        orphans = False
        for item in group:  # in order, so that what builds on an orphan is one as well
            if item.orphaned:
                item.done.set_exception(JournalUnavailable(ORPHANED))
                orphans = True
        if orphans:
            group = [item for item in group if not item.done.done()]
        if not group:
            return

        def work(tx: Transaction) -> list[int]:
            ends = []
            for item in group:
                tx.add(item.facts, item.now)
                ends.append(tx.head.seq)
            return ends

        try:
            ends = self._commit(work, group[0].now)
        except JournalUnavailable as fault:
            for item in group:
                item.done.set_exception(fault)
        except Exception as error:
            # Wrong facts are their caller's bug: the others of the group are committed one by one.
            if len(group) == 1:
                group[0].done.set_exception(error)
            for item in group if len(group) > 1 else ():
                self._settle_appends([item])
        else:
            for item, end in zip(group, ends, strict=True):
                item.done.set_result(end)

    def _commit_run(self, item: _Run) -> None:
        try:
            result = self._do_bare(item.bare) if isinstance(item, _Bare) else self._commit(item.work, item.now)
        except Exception as error:
            item.done.set_exception(error)
            return
        if item.scrub or isinstance(item, _Bare):
            self._plains.clear()
            self._unpacked.clear()
            self._salts.clear()  # those of what was erased must go with it
            self._wal.empty(item.now)
        item.done.set_result(result)

    def _do_bare(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return work(self._db)
        except sqlite3.Error as error:
            raise JournalUnavailable(f"The journal cannot be written: {error}.") from error

    def _commit(self, work: Callable[[Transaction], T], now: int) -> T:
        """One transaction: BEGIN, work, COMMIT, tell. Raises JournalUnavailable when the disk refuses."""
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
            self._check_alone()
            now = max(now, self._head.time)
            tx = Transaction(db, self._head, self._packer, self._plains, self._secret_of, self._salt_of, now)
            result = work(tx)
            tx.finish()
            db.execute("COMMIT")
        except BaseException as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.IntegrityError):
                _log.error("the journal cannot be written: %s", error)
                raise JournalUnavailable(f"The journal cannot be written: {error}.") from error
            if isinstance(error, rows.DamagedSegment):
                raise self._damaged_segment(error) from error
            raise
        if self._wal.lost:
            self._lost = True
            _log.critical("%s-wal was removed by another program: %s", self.path, LOST)
            raise JournalUnavailable(LOST)
        self._head = tx.head
        if tx.recorded:
            self._tell(tx.recorded)
        return result

    def _check_alone(self) -> None:
        """Raises JournalUnavailable when the last fact is not ours: what we append would not follow from it.

        SQLite tells whether another connection has written; Litestream may, and leaves our facts as they are.
        """
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        if version == self._data_version:
            return
        head = self._head
        link = rows.link_at(self._db, head.seq, self._genesis) if head.seq else head.link
        if rows.head(self._db) != head.seq or link != head.link:
            if version != self._strange_version:
                _log.critical("%s: %s", self.path, CHANGED)
            self._strange_version = version
            raise JournalUnavailable(CHANGED)
        self._data_version = version

    def _secret_of(self, tenant: str) -> bytes | None:
        known = self._tenants.get(tenant)
        if known is None:
            row = self._db.execute("SELECT id, name, secret FROM tenant WHERE id = ?", (tenant,)).fetchone()
            if row is None:
                return None
            known = self._tenants[tenant] = Tenant(*row)
        return known.secret

    def _salt_of(self, event: AnyEvent) -> bytes:
        """A salt for the payload of a fact: random for the first of a response, and from there on one after another."""
        response = getattr(event, "response", "")
        before = self._salts.pop(response, None)
        salt = self._entropy(chain.SALT_BYTES) if before is None else chain.next_salt(before)
        if response:
            self._salts[response] = salt
            if len(self._salts) > SALTS_MAX:
                del self._salts[next(iter(self._salts))]
        return salt

    def _tenant_named(self, tx: Transaction, name: str) -> Tenant:
        row = tx.db.execute("SELECT id, name, secret FROM tenant WHERE name = ?", (name,)).fetchone()
        if row is not None:
            return Tenant(*row)
        tenant_id = name if name in (LOCAL_TENANT, SERVER_TENANT) else "t_" + self._entropy(12).hex()
        tenant = Tenant(tenant_id, name, self._entropy(32))
        seal = chain.tenant_seal(self.secret, tenant.id, tenant.name, tenant.secret)
        values = (tenant.id, tenant.name, tenant.secret, seal)
        tx.db.execute("INSERT INTO tenant (id, name, secret, seal) VALUES (?, ?, ?, ?)", values)
        return tenant
