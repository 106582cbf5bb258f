"""What ties sessions to each other: turns that are built on turns of another one, and replays of recorded sessions.

It is read to tell people what a deletion takes, what stays hidden behind it, and which copies of the text live on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from zjournal.errors import JournalFault
from zjournal.journal.events import SessionReplayed
from zjournal.journal.projections import DELETED, Session, Turn
from zjournal.journal.reader import Reader


class Replays(msgspec.Struct, frozen=True):
    """The recorded session of each replay, by the replay's id. `fault`: not all was read."""

    sources: dict[str, str]
    fault: str = ""


class Ties(msgspec.Struct, frozen=True, kw_only=True):
    """What is tied to the turns that are to be deleted.

    `kept`: of these, the turns whose content a deletion alone would leave, hidden. `continued`: how many turns beside
    them, of each session, are built on them, whose content is still there. `replays`: sessions that replay theirs, and
    hold turns that the deletion does not take.
    """

    kept: int
    continued: dict[str, int]
    replays: tuple[str, ...]
    fault: str = ""


def source_of(reader: Reader, session: Session) -> str:
    """The session that this one is a replay of; "" if it is none. Its link is the fact behind its opening."""
    found = [fact.event for fact in reader.read(session.opened_seq, 1) if isinstance(fact.event, SessionReplayed)]
    return found[0].source if found and found[0].session == session.session else ""


def replays_among(reader: Reader, sessions: Sequence[Session]) -> Replays:
    """Those of these sessions that are replays, by one fact of each. Damage is passed over; `fault` says so."""
    sources: dict[str, str] = {}
    fault = ""
    for session in sessions:
        try:
            source = source_of(reader, session)
        except JournalFault as error:
            fault = error.message
            continue
        if source:
            sources[session.session] = source
    return Replays(sources, fault)


def replays(reader: Reader) -> Replays:
    """All replays in the journal, deleted ones too, the newest first. What lies before damage is missing.

    Reads through the whole journal.
    """
    sources: dict[str, str] = {}
    try:
        for fact in reader.before(reader.head + 1, SessionReplayed):
            assert isinstance(fact.event, SessionReplayed), fact.event
            sources[fact.event.session] = fact.event.source
    except JournalFault as fault:
        return Replays(sources, fault.message)
    return Replays(sources)


def ties(reader: Reader, turns: Sequence[Turn], cascade: bool) -> Ties:
    """What is tied to these turns, by one query for each of them and of those that continue them."""
    own = {turn.response for turn in turns}
    below = {turn.response: [child for child in reader.children(turn.response) if not child.erased] for turn in turns}
    found: dict[str, Turn] = {}
    todo = [child for children in below.values() for child in children if child.response not in own]
    while todo:
        turn = todo.pop()
        if turn.response not in found and turn.response not in own:
            found[turn.response] = turn
            todo += [child for child in reader.children(turn.response) if not child.erased]
    kept: set[str] = set()
    for turn in sorted(turns, key=lambda turn: -turn.accepted_seq):  # what continues a turn came after it
        if not turn.erased and any(
            child.response not in own or child.response in kept for child in below[turn.response]
        ):
            kept.add(turn.response)
    gone = [*turns, *found.values()] if cascade else turns
    taken = {turn.response for turn in gone}
    known = replays(reader)
    also = _replaying(known.sources, {turn.session for turn in gone})
    own_sessions = {turn.session for turn in turns}
    return Ties(
        kept=0 if cascade else len(kept),
        continued=dict(Counter(turn.session for turn in sorted(found.values(), key=lambda turn: turn.accepted_seq))),
        replays=tuple(one for one in also if one not in own_sessions and _holds(reader, one, taken)),
        fault=known.fault,
    )


def _replaying(sources: dict[str, str], sessions: set[str]) -> list[str]:
    """The replays of these sessions, and the replays of those; the oldest first, which comes before its own."""
    chosen = set(sessions)
    named = []
    for replay, source in reversed(sources.items()):
        if source in chosen:
            chosen.add(replay)
            named.append(replay)
    return named


def _holds(reader: Reader, session: str, taken: set[str]) -> bool:
    """Whether a session shows a turn, with its content, that is not among those taken."""
    turns = reader.turns(session)
    return any(not turn.erased and turn.status != DELETED and turn.response not in taken for turn in turns)
