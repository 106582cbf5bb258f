"""What is proved of a journal before it is used, in a time that does not grow with its facts.

The end of the chain, the head outside the database, and whether the projections can be those of these facts. A start
reads no history; the whole proof is `verify`.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from zjournal.journal import chain, database, headfile, rows, wal
from zjournal.journal.chain import Head
from zjournal.journal.database import Identity
from zjournal.journal.events import (
    AnyEvent,
    PayloadErased,
    RequestAccepted,
    ResponseFailed,
    ResponseFinished,
    decode_body,
)
from zjournal.journal.projections import BY_RESPONSE, DELETED
from zjournal.journal.reader import Reader
from zjournal.journal.segments import Bare

OPEN_FACTS = 64  # end of the chain that is verified at each open
QUICK_FACTS = 2_000  # and by a quick verification
REBUILD_STEP = "fold them again with `zj journal rebuild`"


def checked_head(db: sqlite3.Connection, path: Path, identity: Identity, facts: int = OPEN_FACTS) -> Head:
    """The head, once the last `facts` facts have been verified. Raises JournalFault at the first that is wrong."""
    try:
        head, last = rows.tail(db, facts, chain.genesis(identity.id, identity.secret))
    except sqlite3.Error as error:
        raise database.damage(path, error) from None
    except rows.DamagedSegment as error:
        reason = f"its chain is broken at fact {error.first}: {error}"
        raise database.fault(path, reason, database.SALVAGE_STEP) from None
    for row in last:
        wrong = chain.fault_of(row, head)
        if wrong is not None:
            raise database.fault(path, f"its chain is broken at fact {row[0]}: {wrong}", database.SALVAGE_STEP)
        head = chain.head_of(row)
    return head


def check_witness(db: sqlite3.Connection, path: Path, identity: Identity, head: Head) -> None:
    """Raises JournalFault when the head file has seen more than the journal has, or something else.

    A missing or unreadable head file is logged; an empty journal need not have one.
    """
    data_dir = path.parent
    if head.seq == 0 and not (data_dir / headfile.HEAD_FILE).exists():
        return
    seen = headfile.read(data_dir)
    try:
        log = wal.extent(path.with_name(path.name + "-shm"))
        reason = None if seen is None else headfile.log_fault_of(seen, log) or witness_fault(db, identity, head, seen)
    except sqlite3.Error as error:
        raise database.damage(path, error) from None
    if reason is not None:
        step = (
            f"copy what can be proved with `zj journal salvage OUT`; if this {path.name} was put here on purpose, as "
            f"from a backup, remove {headfile.HEAD_FILE} beside it and start again"
        )
        raise database.fault(path, reason, step)


def witness_fault(db: sqlite3.Connection, identity: Identity, head: Head, seen: headfile.Witness) -> str | None:
    """How a journal contradicts its head file, as half a sentence; None if it does not."""
    try:
        link = rows.link_at(db, seen.head.seq, chain.genesis(identity.id, identity.secret))
    except rows.DamagedSegment as error:
        return f"fact {error.first} cannot be read: {error}"
    return headfile.fault_of(seen, identity.id, head.seq, link)


def projections_fault(db: sqlite3.Connection) -> str | None:
    """Why the projections cannot be those of the facts, as half a sentence; None if they may be.

    Counts rows, and looks up what the last facts must have left. Within a transaction.
    """
    head = rows.head(db)
    turns, last_turn = db.execute("SELECT count(*), coalesce(max(accepted_seq), 0) FROM turn").fetchone()
    counted, last_use = db.execute("SELECT coalesce(sum(turns), 0), coalesce(max(last_seq), 0) FROM session").fetchone()
    if turns != counted:
        return f"table turn has {turns} rows, and the sessions count {counted}"
    if max(last_turn, last_use) > head:
        return f"a projection has gone to fact {max(last_turn, last_use)}, and the facts end at {head}"
    try:
        last = list(rows.facts(rows.find(db, head - OPEN_FACTS, head), rows.Unpacked()))
    except rows.DamagedSegment:
        return None  # proved elsewhere
    events = [(fact.seq, event) for fact in last if (event := _event(fact)) is not None]
    erased = {event.response for _, event in events if isinstance(event, PayloadErased)}
    for seq, event in events:
        reason = _effect_fault(db, seq, event, erased)
        if reason is not None:
            return reason
    return None


def check_tenants(db: sqlite3.Connection, path: Path, identity: Identity) -> None:
    """Raises JournalFault when the row of a tenant is not what was written.

    A server that took another name or secret for right would give that tenant an empty journal without a word.
    """
    try:
        tenants = db.execute("SELECT id, name, secret, seal FROM tenant").fetchall()
    except sqlite3.Error as error:
        raise database.damage(path, error) from None
    for tenant, name, secret, seal in tenants:
        if not chain.tenant_sealed(identity.secret, tenant, name, secret, seal):
            raise database.fault(path, f"the row of tenant {tenant!r} does not match its seal", database.SALVAGE_STEP)


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
            check_witness(db, reader.path, Identity(reader.id, reader.secret), head)
            check_tenants(db, reader.path, Identity(reader.id, reader.secret))
        check_projections(reader)
    return head


def _event(fact: Bare) -> AnyEvent | None:
    try:
        return decode_body(fact.body)
    except (msgspec.MsgspecError, ValueError):
        return None  # proved elsewhere


def _effect_fault(db: sqlite3.Connection, seq: int, event: AnyEvent, erased: set[str]) -> str | None:
    """What a fact should have left in table `turn` and did not. `erased`: turns that may have no row any more."""
    if not isinstance(event, RequestAccepted | ResponseFinished | ResponseFailed | PayloadErased):
        return None
    query = f"SELECT accepted_seq, finished_us, erased, status FROM turn WHERE {BY_RESPONSE}"
    turn = db.execute(query, (event.response, event.response)).fetchone()
    if turn is None:
        missing = isinstance(event, RequestAccepted) and event.response not in erased
        return f"turn {event.response} of fact {seq} is missing" if missing else None
    if isinstance(event, RequestAccepted):
        return None if turn[0] == seq else f"turn {event.response} of fact {seq} is missing"
    if isinstance(event, PayloadErased):
        gone = turn[2] == 1 and turn[3] != DELETED
        return None if gone else f"turn {event.response} is as if fact {seq} had not erased it"
    return f"turn {event.response} has no end, and fact {seq} tells it" if turn[1] is None else None
