"""The size of the write-ahead log: our own checkpoints, who stands in their way, and when to take no more requests.

SQLite can start the log again only when no reader needs it. Our own readers let go within READ_S_MAX, so a writer that
waits a little longer than that gets its turn, and the log stays below LOG_BYTES_MAX. Another program's reader may hold
it for ever. Then nobody waits for it, the log grows, and the reader is named.

With `checkpoint = external` another program, such as Litestream, copies the log before it is emptied: we never do it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path

from zjournal.config import show_size
from zjournal.journal import database, holders
from zjournal.journal.headfile import NO_LOG, Extent
from zjournal.journal.holders import Holder
from zjournal.journal.reader import READ_S_MAX

OWN, EXTERNAL = "own", "external"  # who empties the log
# From here on the log is emptied when nobody is in the way. The commit behind that waits as long as for several others,
# so it comes after some hundred full groups, not after every hundredth: the p99 of a wait must not have it in it.
CHECKPOINT_BYTES = 12 << 20
PATIENT_BYTES = 24 << 20  # from here on the writer waits for readers
LOG_BYTES_MAX = 64 << 20  # the log stays below this, but for foreign readers and single commits that are larger
REFUSE_BYTES = 1 << 30  # from here on new requests are refused
STEP_BYTES = 1 << 20  # growth after which a checkpoint is tried again
PATIENT_STEP_BYTES = 8 << 20  # growth after which it waits again, unless it knows for whom
# For readers of what is in the log, then for those that came while it waited for these.
PATIENCE_MS = int(READ_S_MAX * 2_000) + 100
PATIENT_EVERY_US = 10_000_000  # so that a reader that never ends costs the writer a sixteenth of its time
OWED_EVERY_US = 200_000

_INDEX = struct.Struct("=I8xBx2xI12x8s8x")  # version, whether it is ready, pages, salts
_INDEX_VERSION = 3_007_000

_log = logging.getLogger(__name__)


class Log:
    """The log of an open journal. `size`, `blocker` and `refusal` from any thread; the rest is the writer's."""

    def __init__(
        self, db: sqlite3.Connection, path: Path, own: bool, refuse_bytes: int, before: Callable[[], None]
    ) -> None:
        """`db` is the writer's connection to the database at `path`; it does no checkpoints by itself from here on.

        `before` is called before each of ours.
        """
        self._db = db
        self._before = before
        self._log_path = path.with_name(path.name + "-wal")
        self._index_path = path.with_name(path.name + "-shm")
        self._own = own
        self._refuse_bytes = refuse_bytes
        self._least = min(CHECKPOINT_BYTES, refuse_bytes // 4)
        self._patient_least = min(PATIENT_BYTES, refuse_bytes // 2)
        self._next, self._patient_next = self._least, self._patient_least
        self._owed = True  # what was erased may stand in the log: a killed server may have left it there
        self._tried_us = self._patient_us = 0
        self._full = False
        self.blocker: Holder | None = None  # whose read transaction has kept the log from being emptied
        db.execute("PRAGMA wal_autocheckpoint = 0").fetchone()
        self._inode = self._stat().st_ino

    @property
    def size(self) -> int:
        """Bytes of the log's file."""
        try:
            return self._stat().st_size
        except OSError:
            return 0

    @property
    def extent(self) -> Extent:
        """How much of it is committed."""
        return extent(self._index_path)

    @property
    def refusal(self) -> str | None:
        """Why new requests cannot be taken, as a sentence; None while they can."""
        size = self.size
        if size < self._refuse_bytes:
            return None
        who = self.blocker
        reason = f": {who} holds a read transaction on it" if who else "" if self._own else ": nobody checkpoints it"
        return f"The journal's write-ahead log has reached {show_size(size >> 20 << 20)}{reason}."

    @property
    def lost(self) -> bool:
        """Whether the log was removed or replaced under the writer: what goes into it now is not in the journal."""
        try:
            return self._stat().st_ino != self._inode
        except FileNotFoundError:
            return True
        except OSError:
            return False

    @property
    def scrubbed(self) -> bool:
        """Whether nothing that was erased can still stand in the log. Never known where others empty it."""
        return not self._owed

    @property
    def owes(self) -> bool:
        """Whether `upkeep` has something to do even when nothing is written any more."""
        return self._own and (self._owed or self.blocker is not None)

    def empty(self, now_us: int) -> None:
        """Empties the log now or, when a reader is in the way, as soon as it is not: for content that was erased."""
        self._owed = True
        if self._own:
            self._try(self.size, now_us, patient=False)

    def upkeep(self, now_us: int, idle: bool) -> None:
        """Does what is due: after each commit, and now and then while there is none. `now_us` may jump."""
        size = self.size
        self._warn(size)
        if not self._own:
            return
        patient = size >= self._patient_next and (
            self.blocker is None or _due(now_us, self._patient_us, PATIENT_EVERY_US)
        )
        owed = self.owes and (idle or _due(now_us, self._tried_us, OWED_EVERY_US))
        if patient or owed or size >= self._next:
            self._try(size, now_us, patient)

    def _try(self, size: int, now_us: int, patient: bool) -> None:
        self._tried_us = now_us
        self._before()
        before = holders.holding(self._index_path) if patient else {}
        if self._truncate(PATIENCE_MS if patient else 0):
            if self.blocker is not None:
                _log.info("the journal's log is empty again: %s has let go", self.blocker)
            self.blocker, self._owed = None, False
            self._next, self._patient_next = self._least, self._patient_least
            return
        self._next = max(size, self._least) + STEP_BYTES
        if patient:
            self._patient_us, self._patient_next = now_us, size + PATIENT_STEP_BYTES
            self._blame(before)
            if self.blocker is not None:
                self._patient_next = self._patient_least

    def _truncate(self, patience_ms: int) -> bool:
        """Copies the log into the database and cuts it to nothing; False when a reader stayed in the way."""
        try:
            self._db.execute(f"PRAGMA busy_timeout = {patience_ms}").fetchone()
            busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return busy == 0
        except sqlite3.Error as error:  # the facts are durable in the log; it is tried again
            _log.warning("the journal's log could not be emptied: %s", error)
            return False
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {database.BUSY_MS}").fetchone()

    def _blame(self, before: dict[int, frozenset[int]]) -> None:
        """Names another process that held a read mark before and after an attempt that outlasts readers of ours."""
        after = holders.holding(self._index_path)
        ours = os.getpid()
        stuck = [pid for pid, marks in after.items() if pid != ours and marks & before.get(pid, frozenset())]
        if not stuck or (self.blocker is not None and self.blocker.pid in stuck):
            return
        self.blocker = holders.describe(min(stuck))
        size = show_size(self.size >> 20 << 20)
        _log.warning(
            "the journal's log has %s and cannot be emptied: %s holds a read transaction on it", size, self.blocker
        )

    def _warn(self, size: int) -> None:
        full = size >= self._refuse_bytes
        if full and not self._full:
            _log.error("%s New requests are refused.", self.refusal)
        elif self._full and not full:
            _log.info("the journal's log has room again: requests are taken")
        self._full = full

    def _stat(self) -> os.stat_result:
        return self._log_path.stat()


def extent(index_path: Path) -> Extent:
    """What the log's index (`-shm`) says of a log that this process has open; NO_LOG where nothing is known.

    The index is SQLite's own, in the byte order of the machine, and stands there twice.
    """
    try:
        data = database.held_bytes(index_path.stat(), 2 * _INDEX.size)
    except OSError:
        return NO_LOG
    if data is None or len(data) < 2 * _INDEX.size or data[: _INDEX.size] != data[_INDEX.size :]:
        return NO_LOG
    version, ready, pages, salts = _INDEX.unpack_from(data)
    return Extent(salts, pages) if version == _INDEX_VERSION and ready else NO_LOG


def _due(now_us: int, last_us: int, every_us: int) -> bool:
    """Whether a pause is over; a clock that was set back ends it."""
    return not 0 <= now_us - last_us < every_us
