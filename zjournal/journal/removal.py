"""Removing sessions and turns for their owner: hidden at once, then erased in small transactions.

What was true of a session when somebody looked may not be true when it is removed. So the transaction that hides it
looks again: whether it is there, is not pinned, has no turn that runs. From then on nothing can be added to it. The
erasing behind that may stop anywhere; `retention.sweep` goes on with it.

A turn that a surviving turn is built on keeps its content, hidden, until the last of those goes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from zjournal.errors import BadRequest, NotFound
from zjournal.journal import retention
from zjournal.journal.events import Fact, ResponseDeleted, SessionDeleted, SessionPinned, SessionUnpinned
from zjournal.journal.log import Journal
from zjournal.journal.projections import (
    BY_PARENT,
    BY_RESPONSE,
    BY_SESSION,
    DELETED,
    SESSION_COLUMNS,
    TURN_COLUMNS,
    Session,
    Turn,
    session_of,
    turn_of,
)
from zjournal.journal.retention import CAUSE_DELETED, SWEEP_TURNS_MAX
from zjournal.journal.transaction import Transaction

ASKED, PRUNED, AGE_CAP, SIZE_CAP = "deleted", "pruned", "age_cap", "size_cap"  # causes of SessionDeleted


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """What a removal did. `bytes`: of payloads and contents that went, as they were stored.

    Of packed facts that is little: a digest takes the place of each payload. They include what turns held that were
    removed before and were only kept for these.
    """

    turns: int = 0  # hidden by it
    erased: int = 0  # turns whose content went
    kept: tuple[str, ...] = ()  # hidden turns whose content stays, because turns that were not removed are built on it
    bytes: int = 0


def remove_session(
    journal: Journal, session: str, cause: str, *, last_seq: int | None = None, cascade: bool = False
) -> Removed:
    """Removes a session with all its turns; `cascade` takes the turns of other sessions that continue them as well.

    With `cascade` it may be one that was removed before, of which turns are still kept, hidden, for those.
    `last_seq`: refuse if the session was used since it looked like that. Waits for the commits. Raises NotFound
    (unknown or removed before) and BadRequest (pinned, in use), and then has removed nothing.
    """

    def hide(tx: Transaction) -> list[str]:
        row = _session(tx, session)
        if row is None or (row.deleted and not cascade):
            raise NotFound(f"there is no session {session}")
        if last_seq is not None and row.last_seq != last_seq:
            raise BadRequest(f"session {session} was used meanwhile")
        own = _turns(tx, BY_SESSION, session)
        turns = _with_descendants(tx, own) if cascade else own
        facts = _hiding(tx, turns)
        if not row.deleted:
            facts.append(Fact(SessionDeleted(tenant=row.tenant, session=session, cause=cause)))
        if facts:
            tx.append(facts)
        return [turn.response for turn in turns if not turn.erased]

    return _remove(journal, hide)


def remove_turn(journal: Journal, response: str, *, cascade: bool = False) -> Removed:
    """Removes one turn, stored or not; `cascade` takes all turns that continue it. As `remove_session`."""

    def hide(tx: Transaction) -> list[str]:
        turns = _turns(tx, BY_RESPONSE, response)
        if not turns or (turns[0].status == DELETED and not cascade):
            raise NotFound(f"there is no response {response}")
        turns = _with_descendants(tx, turns) if cascade else turns
        facts = _hiding(tx, turns)
        if facts:
            tx.append(facts)
        return [turn.response for turn in turns if not turn.erased]

    return _remove(journal, hide)


def pin(journal: Journal, session: str, pinned: bool) -> None:
    """Pins a session, or takes the pin back; nothing happens if that is so already. Raises NotFound."""

    def work(tx: Transaction) -> None:
        row = _session(tx, session)
        if row is None or row.deleted:
            raise NotFound(f"there is no session {session}")
        if row.pinned != pinned:
            kind = SessionPinned if pinned else SessionUnpinned
            tx.append([Fact(kind(tenant=row.tenant, session=session))])

    journal.run(work).result()


def _remove(journal: Journal, hide: Callable[[Transaction], list[str]]) -> Removed:
    hidden = journal.run(hide).result()
    todo = journal.run(functools.partial(_in_order, responses=hidden)).result()
    erased: set[str] = set()
    freed = 0
    for at in range(0, len(todo), SWEEP_TURNS_MAX):
        batch = todo[at : at + SWEEP_TURNS_MAX]
        gone, size = journal.run(functools.partial(_erase, batch=batch), scrub=True).result()
        erased.update(gone)
        freed += size
    # A sweep may have been faster: what it erased has no row any more.
    kept = tuple(response for response in hidden if response not in erased and journal.turn(response) is not None)
    return Removed(turns=len(hidden), erased=len(hidden) - len(kept), kept=kept, bytes=max(freed, 0))


def _erase(tx: Transaction, batch: Sequence[str]) -> tuple[list[str], int]:
    """Erases those that may go; returns them, and the bytes that went."""
    sizes = {response: retention.erase_one(tx, response, CAUSE_DELETED) for response in batch}
    gone = {response: size for response, size in sizes.items() if size is not None}
    return list(gone), sum(gone.values()) + tx.flush_erased()


def _in_order(tx: Transaction, responses: Sequence[str]) -> list[str]:
    """These turns and the deleted ones above them that still have their content, the newest first.

    A turn can go once those that continue it are gone.
    """
    found: dict[str, int] = {}
    turns = [turn for response in responses for turn in _turns(tx, BY_RESPONSE, response)]
    for turn in turns:
        found[turn.response] = turn.accepted_seq
    for turn in turns:
        while turn.parent and turn.parent not in found and (above := _turns(tx, BY_RESPONSE, turn.parent)):
            (turn,) = above
            if turn.erased or turn.status != DELETED:
                break
            found[turn.response] = turn.accepted_seq
    return sorted(found, key=lambda response: -found[response])


def _hiding(tx: Transaction, turns: Sequence[Turn]) -> list[Fact]:
    """The facts that hide these turns. Raises BadRequest when one runs or belongs to a pinned session."""
    for turn in turns:
        if turn.finished_us is None:
            raise BadRequest(f"session {turn.session} is in use: {turn.response} is running")
    for session in dict.fromkeys(turn.session for turn in turns):
        row = _session(tx, session)
        if row is not None and row.pinned:
            raise BadRequest(f"session {session} is pinned; `zj sessions unpin {session}` takes that back")
    shown = [turn for turn in turns if turn.status != DELETED]
    return [Fact(ResponseDeleted(tenant=turn.tenant, response=turn.response)) for turn in shown]


def _with_descendants(tx: Transaction, turns: Sequence[Turn]) -> list[Turn]:
    """These turns and all that continue them, in order of acceptance."""
    found = {turn.response: turn for turn in turns}
    todo = list(found)
    while todo:
        for child in _turns(tx, BY_PARENT, todo.pop()):
            if child.response not in found:
                found[child.response] = child
                todo.append(child.response)
    return sorted(found.values(), key=lambda turn: turn.accepted_seq)


def _session(tx: Transaction, session: str) -> Session | None:
    row = tx.db.execute(f"SELECT {SESSION_COLUMNS} FROM session WHERE session = ?", (session,)).fetchone()
    return None if row is None else session_of(row)


def _turns(tx: Transaction, where: str, value: str) -> list[Turn]:
    rows: Iterable[tuple] = tx.db.execute(
        f"SELECT {TURN_COLUMNS} FROM turn WHERE {where} ORDER BY accepted_seq", (value, value)
    )
    return [turn_of(row) for row in rows]
