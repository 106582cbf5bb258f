"""What is proved of a journal before it is used, in a time that does not grow with its facts.

The end of the chain, the head outside the database, and whether the projections can be those of these facts. A start
reads no history; the whole proof is `verify`.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from zjournal.journal import chain, database, headfile
from zjournal.journal.chain import Head
from zjournal.journal.database import Identity
from zjournal.journal.events import RequestAccepted, ResponseFailed, ResponseFinished
from zjournal.journal.reader import Reader

OPEN_FACTS = 64  # end of the chain that is verified at each open
QUICK_FACTS = 2_000  # and by a quick verification
REBUILD_STEP = "fold them again with `zj journal rebuild`"


def checked_head(db: sqlite3.Connection, path: Path, identity: Identity, facts: int = OPEN_FACTS) -> Head:
    """The head, once the last `facts` facts have been verified. Raises JournalFault at the first that is wrong."""
    query = f"SELECT {chain.COLUMNS} FROM event ORDER BY seq DESC LIMIT ?"
    try:
        rows = db.execute(query, (facts + 1,)).fetchall()[::-1]
    except sqlite3.Error as error:
        raise database.damage(path, error) from None
    head = chain.genesis(identity.id, identity.secret)
    reason = None
    if len(rows) > facts:
        first = rows.pop(0)
        reason = chain.type_fault_of(first)
        head = chain.head_of(first)
    for row in rows:
        reason = reason or chain.fault_of(row, head)
        if reason:
            raise database.fault(path, f"its chain is broken at fact {row[0]}: {reason}", database.SALVAGE_STEP)
        head = chain.head_of(row)
    return head


def check_witness(db: sqlite3.Connection, path: Path, journal: bytes, head: Head) -> None:
    """Raises JournalFault when the head file has seen more than the journal has, or something else.

    A missing or unreadable head file is logged; an empty journal need not have one.
    """
    data_dir = path.parent
    if head.seq == 0 and not (data_dir / headfile.HEAD_FILE).exists():
        return
    seen = headfile.read(data_dir)
    try:
        reason = None if seen is None else witness_fault(db, journal, head, seen)
    except sqlite3.Error as error:
        raise database.damage(path, error) from None
    if reason is not None:
        step = (
            f"copy what can be proved with `zj journal salvage OUT`; if this {path.name} was put here on purpose, as "
            f"from a backup, remove {headfile.HEAD_FILE} beside it and start again"
        )
        raise database.fault(path, reason, step)


def witness_fault(db: sqlite3.Connection, journal: bytes, head: Head, seen: headfile.Witness) -> str | None:
    """How a journal contradicts its head file, as half a sentence; None if it does not."""
    row = db.execute("SELECT link FROM event WHERE seq = ?", (seen.head.seq,)).fetchone()
    return headfile.fault_of(seen, journal, head.seq, row[0] if row else None)


def projections_fault(db: sqlite3.Connection) -> str | None:
    """Why the projections cannot be those of the facts, as half a sentence; None if they may be.

    Counts rows, and looks up what the last facts must have left. Within a transaction.
    """
    (head,) = db.execute("SELECT coalesce(max(seq), 0) FROM event").fetchone()
    turns, last_turn = db.execute("SELECT count(*), coalesce(max(accepted_seq), 0) FROM turn").fetchone()
    counted, last_use = db.execute("SELECT coalesce(sum(turns), 0), coalesce(max(last_seq), 0) FROM session").fetchone()
    if turns != counted:
        return f"table turn has {turns} rows, and the sessions count {counted}"
    if max(last_turn, last_use) > head:
        return f"a projection has gone to fact {max(last_turn, last_use)}, and the facts end at {head}"
    tail = "SELECT seq, time, body, payload, payload_sha FROM event WHERE seq > ? ORDER BY seq"
    for row in db.execute(tail, (head - OPEN_FACTS,)).fetchall():
        reason = _effect_fault(db, row)
        if reason is not None:
            return reason
    return None


def check_projections(reader: Reader) -> None:
    """Raises JournalFault when the projections cannot be those of the facts."""
    with reader.transaction() as db:
        reason = projections_fault(db)
    if reason is not None:
        raise database.fault(reader.path, f"its projections do not follow from its facts: {reason}", REBUILD_STEP)


def prove(data_dir: Path) -> Head:
    """Proves the end of a journal beside whoever uses it; returns the head. Raises JournalFault: what is wrong."""
    with Reader.open(data_dir) as reader:
        with reader.transaction() as db:
            head = checked_head(db, reader.path, Identity(reader.id, reader.secret), QUICK_FACTS)
            check_witness(db, reader.path, reader.id, head)
        check_projections(reader)
    return head


def _effect_fault(db: sqlite3.Connection, row: tuple) -> str | None:
    """What a fact should have left in table `turn` and did not."""
    try:
        event = chain.recorded(*row).event
    except (msgspec.MsgspecError, ValueError):
        return None  # proved elsewhere
    if not isinstance(event, RequestAccepted | ResponseFinished | ResponseFailed):
        return None
    turn = db.execute("SELECT accepted_seq, finished_us FROM turn WHERE response = ?", (event.response,)).fetchone()
    if isinstance(event, RequestAccepted):
        return None if turn and turn[0] == row[0] else f"turn {event.response} of fact {row[0]} is missing"
    if turn is not None and turn[1] is None:
        return f"turn {event.response} has no end, and fact {row[0]} tells it"
    return None
