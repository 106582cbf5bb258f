"""Caps on size and age: the least recently used sessions go, a few at a time, each with a fact and a log line.

Never a running or pinned session, and for its size never one that was used within GRACE_S: an agent that works on
must not lose its place because others filled the disk. Where nothing may go the journal stays over its cap, and says
so.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from zjournal.config import show_duration, show_size
from zjournal.errors import BadRequest, NotFound
from zjournal.journal.compact import bytes_in_use
from zjournal.journal.log import Journal
from zjournal.journal.projections import SESSION_COLUMNS, Session, session_of
from zjournal.journal.removal import AGE_CAP, SIZE_CAP, remove_session

ROUND_SESSIONS_MAX = 16  # removed at once, so that requests do not wait behind them
GRACE_S = 3600.0

_log = logging.getLogger(__name__)


class Limits(NamedTuple):
    """0 is no limit."""

    max_bytes: int
    max_age_s: float

    @property
    def any(self) -> bool:
        return bool(self.max_bytes or self.max_age_s)


def enforce(journal: Journal, limits: Limits, now_us: int) -> bool:
    """One round; True when another one may find more to do. Waits for the commits. Raises JournalUnavailable."""
    left = ROUND_SESSIONS_MAX
    if limits.max_age_s:
        cutoff = now_us - round(limits.max_age_s * 1e6)
        for session in _unused(journal, cutoff, left):
            left -= _remove(journal, session, AGE_CAP, f"unused for {show_duration(limits.max_age_s)}")
    if limits.max_bytes:
        cutoff = now_us - round(GRACE_S * 1e6)
        for session in _unused(journal, cutoff, left):
            if (held := _held(journal)) <= limits.max_bytes:
                break
            why = f"the journal holds {held:,} bytes, and may hold {show_size(limits.max_bytes)}"
            left -= _remove(journal, session, SIZE_CAP, why)
        if left and (held := _held(journal)) > limits.max_bytes:
            _log.warning(
                "the journal holds %s bytes, over its cap of %s, and no session may go: all are running, pinned or "
                "used within the last %s",
                f"{held:,}",
                show_size(limits.max_bytes),
                show_duration(GRACE_S),
            )
    return left == 0


def _unused(journal: Journal, before_us: int, limit: int) -> list[Session]:
    """Sessions that may go, unused since `before_us`, the least recently used first."""
    running = (
        "SELECT 1 FROM turn WHERE substr(turn.session, 1, 10) = substr(session.session, 1, 10)"
        " AND turn.session = session.session AND finished_us IS NULL"
    )
    with journal.transaction() as db:
        rows = db.execute(
            f"SELECT {SESSION_COLUMNS} FROM session WHERE deleted = 0 AND pinned = 0 AND last_us < ?"
            f" AND NOT EXISTS ({running}) ORDER BY last_seq LIMIT ?",
            (before_us, limit),
        ).fetchall()
    return [session_of(row) for row in rows]


def _remove(journal: Journal, session: Session, cause: str, why: str) -> int:
    """Removes one session unless it came to life meanwhile; returns how many went."""
    try:
        removed = remove_session(journal, session.session, cause, last_seq=session.last_seq)
    except (BadRequest, NotFound):
        return 0
    _log.info("%s deleted, %d turns, %d bytes: %s", session.session, removed.turns, removed.bytes, why)
    return 1


def _held(journal: Journal) -> int:
    with journal.transaction() as db:
        return bytes_in_use(db)
