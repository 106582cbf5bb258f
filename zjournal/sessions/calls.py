"""The tool calls of turns, and whether their results have come: by the journal's facts, without their content.

A call without a result may have run or not: after a crash of the client nobody else can tell (docs/cli.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zjournal.journal.events import RequestAccepted, ToolCalled, ToolResultSeen
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.sessions import identity


class Called(msgspec.Struct, frozen=True):
    """A whole call of an answer. `answered`: an accepted request has brought a result for it."""

    call_id: str
    index: int
    answered: bool


def calls_of(reader: Reader, turns: Sequence[Turn]) -> dict[str, list[Called]]:
    """The calls of each of these turns, by response; nothing for turns that made none."""
    made: dict[str, list[tuple[str, ToolCalled]]] = {}
    waiting: set[bytes] = set()
    since = 0
    for turn in turns:
        item_secret = b""
        for fact in reader.read_response(turn.response):
            event = fact.event
            if isinstance(event, RequestAccepted):
                item_secret = event.item_secret or identity.item_secret(reader.secret, turn.response)
                if not event.tools:
                    break
            elif isinstance(event, ToolCalled):
                call_id = identity.call_id(item_secret, turn.response, event.index)
                made.setdefault(turn.response, []).append((call_id, event))
                waiting.add(event.call)
                since = since or fact.seq
    seen = _seen(reader, waiting, since)
    return {
        response: [Called(call_id, event.index, event.call in seen) for call_id, event in calls]
        for response, calls in made.items()
    }


def _seen(reader: Reader, waiting: set[bytes], since: int) -> set[bytes]:
    """Those of these keys whose results came after fact `since`, in whatever session."""
    left = set(waiting)
    if not left:
        return left
    for fact in reader.before(reader.head + 1, ToolResultSeen):
        if not left or fact.seq < since:
            break
        if isinstance(fact.event, ToolResultSeen):
            left.difference_update(fact.event.calls)
    return waiting - left
