"""Choices: of the answers to one request, which one a turn is. By the journal's facts, without their content."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from zjournal.journal.events import RequestAccepted
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader


class Choice(msgspec.Struct, frozen=True):
    """A later choice: its index, and the response that is choice 0, by whose id the client knows all of them."""

    index: int
    first: str


def choices_of(reader: Reader, turns: Iterable[Turn]) -> dict[str, Choice]:
    """Those of these turns that are later choices of a request, by response."""
    found: dict[str, Choice] = {}
    for turn in turns:
        event = next((fact.event for fact in reader.read(turn.accepted_seq - 1, 1)), None)
        if isinstance(event, RequestAccepted) and event.response == turn.response and event.choice:
            found[turn.response] = Choice(event.choice, event.first)
    return found
