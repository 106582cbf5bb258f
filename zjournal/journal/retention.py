"""Erasure: what may go, and how it goes without breaking the chain.

A turn's payloads and contents can go once no surviving turn's prompt is built on them. So a turn with descendants is
only hidden when it is deleted, and goes with the last of them. What stays of an erased turn are numbers and digests.

Everything runs on the writer thread, in one transaction with the facts that tell it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from concurrent.futures import Future

from zjournal.journal import content, snapshots
from zjournal.journal.events import Fact, PayloadErased, ResponseDeleted, decode_body
from zjournal.journal.log import Journal
from zjournal.journal.projections import BY_PARENT, BY_RESPONSE, DELETED, TURN_COLUMNS, Turn, turn_of
from zjournal.journal.transaction import Transaction

CAUSE_DELETED, CAUSE_UNSTORED = "deleted", "unstored"
SWEEP_TURNS_MAX = 64  # in one transaction, so that requests do not wait for a long one


def delete(journal: Journal, tenant: str, response: str) -> Future[bool]:
    """Hides a stored turn for good, and erases it and the ancestors it was keeping, as far as descendants allow.

    False when this tenant has no such turn to delete: unknown, foreign, unstored or deleted already.
    A turn that still runs is hidden now and erased by a later `sweep`.
    """

    def work(tx: Transaction) -> bool:
        turn = _turn(tx, response)
        if turn is None or turn.tenant != tenant or turn.status == DELETED or not turn.stored:
            return False
        tx.append([Fact(ResponseDeleted(tenant=tenant, response=response))])
        _erase_upwards(tx, response, CAUSE_DELETED)
        return True

    return journal.run(work, scrub=True)


def erase(journal: Journal, response: str, cause: str) -> Future[tuple[str, ...]]:
    """Erases a turn that has ended, if no turn continues it, then each ancestor that was only waiting for that.

    `cause` is CAUSE_DELETED or CAUSE_UNSTORED. Gives the response ids that were erased, () when nothing could be.
    """
    return journal.run(lambda tx: _erase_upwards(tx, response, cause), scrub=True)


def erase_unstored(journal: Journal, response: str, held: Collection[str]) -> Future[str]:
    """Erases an unstored turn as `erase` does, and above it also unstored ones that only waited for that.

    Those in `held` stay. Gives the id of the turn to go on with, for a long chain is not erased in one transaction; ""
    when nothing is left to do.
    """
    return journal.run(lambda tx: _erase_chain(tx, response, held), scrub=True)


def sweep(journal: Journal, now_us: int, unstored_retention_s: int, held: Collection[str] = ()) -> int:
    """Erases what is due: deleted turns, and unstored ones that ended `unstored_retention_s` seconds ago or earlier.

    Unstored ones that ended further in the future than that are due as well: the clock was wrong then, and the time of
    the journal, which never goes back, may stay ahead for years. Unstored ones that are `held` are not due. Returns how
    many were erased. Waits for the commits: for a thread that may.
    """
    retention_us = unstored_retention_s * 1_000_000
    due = now_us - retention_us, now_us + retention_us
    total = 0
    while True:
        # The work is looked for by a reader, so that an idle sweep costs the writer nothing.
        candidates = _due(journal, due, held)
        if not candidates:
            return total
        erased = journal.run(functools.partial(_erase_all, batch=candidates), scrub=True).result()
        if not erased:
            return total
        total += erased


def _due(journal: Journal, due_us: tuple[int, int], held: Collection[str]) -> list[tuple[str, str]]:
    """Turns to erase, each with the cause: unstored ones that ended before the first time or after the second.

    Of the latter, those that are `held` stay.
    """
    # parent != '' is what the partial index asks for.
    child = (
        "SELECT 1 FROM turn AS child WHERE child.parent != '' AND substr(child.parent, -8) = substr(turn.response, -8)"
        " AND child.parent = turn.response AND child.erased = 0"
    )
    childless = f"NOT EXISTS ({child})"
    with journal.transaction() as db:
        deleted = db.execute(
            f"SELECT response FROM turn WHERE status = '{DELETED}' AND erased = 0 AND finished_us IS NOT NULL"
            f" AND {childless} LIMIT ?",
            (SWEEP_TURNS_MAX,),
        ).fetchall()
        unstored = [
            row
            for bound, time in zip(("<=", ">"), due_us, strict=True)  # one by one, each by the index
            for row in db.execute(
                f"SELECT response FROM turn WHERE stored = 0 AND erased = 0 AND finished_us {bound} ? AND {childless}"
                " LIMIT ?",
                (time, SWEEP_TURNS_MAX + len(held)),
            )
            if row[0] not in held
        ]
    return [(name, CAUSE_DELETED) for (name,) in deleted] + [(name, CAUSE_UNSTORED) for (name,) in unstored]


def _erase_all(tx: Transaction, batch: Sequence[tuple[str, str]]) -> int:
    return sum(len(_erase_upwards(tx, response, cause)) for response, cause in batch)


def _erase_upwards(tx: Transaction, response: str, cause: str) -> tuple[str, ...]:
    """Erases one turn and then its deleted ancestors, as long as each has no surviving child."""
    erased: list[str] = []
    turn = _turn(tx, response)
    while turn is not None and _may_go(tx, turn):
        _erase_one(tx, turn, cause)
        erased.append(turn.response)
        turn = _turn(tx, turn.parent)
        cause = CAUSE_DELETED
        if turn is not None and turn.status != DELETED:
            break
    return tuple(erased)


def _erase_chain(tx: Transaction, response: str, held: Collection[str]) -> str:
    """See `erase_unstored`."""
    turn = _turn(tx, response)
    for _ in range(SWEEP_TURNS_MAX):
        if turn is None or not _may_go(tx, turn):
            return ""
        hidden = turn.status == DELETED
        if not hidden and (turn.stored or turn.response in held):
            return ""
        _erase_one(tx, turn, CAUSE_DELETED if hidden else CAUSE_UNSTORED)
        turn = _turn(tx, turn.parent)
    return turn.response if turn is not None else ""


def _may_go(tx: Transaction, turn: Turn) -> bool:
    if turn.erased or turn.finished_us is None:
        return False
    query = f"SELECT 1 FROM turn WHERE {BY_PARENT} AND erased = 0 LIMIT 1"
    return tx.db.execute(query, (turn.response, turn.response)).fetchone() is None


def erase_one(tx: Transaction, response: str, cause: str) -> int | None:
    """Erases this turn alone. Returns the bytes of contents that went (payloads: see Transaction.flush_erased).

    None if it must stay: unknown, erased, running, needed.
    """
    turn = _turn(tx, response)
    return None if turn is None or not _may_go(tx, turn) else _erase_one(tx, turn, cause)


def _erase_one(tx: Transaction, turn: Turn, cause: str) -> int:
    freed = 0
    needle = turn.response.encode()
    for bare in tx.facts(turn.accepted_seq - 1, turn.last_seq):
        # The id may stand in another turn's fact as its parent.
        if needle not in bare.body or getattr(decode_body(bare.body), "response", None) != turn.response:
            continue
        if bare.payload is not None:
            tx.erase_payloads([bare.seq])
        freed += content.drop(tx.db, content.references(decode_body(bare.body)))
    tx.erase_payloads(snapshots.facts_of(tx, turn.response))  # they may come long after its end
    ends = snapshots.ends_of(tx, turn.response)
    tx.append([Fact(PayloadErased(tenant=turn.tenant, response=turn.response, cause=cause))])
    snapshots.release(tx, ends, snapshots.DELETED)
    return freed


def _turn(tx: Transaction, response: str) -> Turn | None:
    row = tx.db.execute(f"SELECT {TURN_COLUMNS} FROM turn WHERE {BY_RESPONSE}", (response, response)).fetchone()
    return None if row is None else turn_of(row)
