"""A session as Markdown, for people: who said what, turn by turn. Needs the journal alone.

Only what a turn added is printed: a client that resends its whole history does not repeat it here. Texts stand as they
are, but for control characters, which could steer a terminal; what tools were given and gave is fenced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from zjournal import ask
from zjournal.dialects.chatml import ChatML
from zjournal.errors import JournalFault
from zjournal.journal import events
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.sessions import follow, identity
from zjournal.sessions.chain import Decoders, stop_strings
from zjournal.sessions.makers import Makers
from zjournal.sessions.records import Records
from zjournal.sessions.transfer import Selection

_FENCE = re.compile(r"`{3,}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Request(msgspec.Struct):
    """What of a body is neither an item nor a number."""

    instructions: str | None = None


_decode_request = msgspec.json.Decoder(_Request).decode


def markdown(reader: Reader, selection: Selection, decoders: Decoders) -> Iterator[str]:
    """The page, piece by piece. Raises JournalFault."""
    makers = Makers(reader)
    told_by = Records(reader, makers)
    yield f"# Session {selection.session.session}\n"
    instructions = None
    for number, turn in enumerate(selection.turns, 1):
        yield f"\n## {number}. {turn.response}\n\n{_about(turn)}\n"
        if turn.erased:
            yield "\n*The content of this turn was erased.*\n"
            continue
        records = reader.read_response(turn.response)
        accepted = records[0].event
        assert isinstance(accepted, events.RequestAccepted), accepted
        raw = told_by.body(turn)
        told = _instructions(raw)
        if told != instructions:
            yield _said("instructions", told or "*none any more*")
            instructions = told
        for item in _added(reader, turn, accepted, decoders[turn.protocol](raw)):
            yield _item(item)
        yield _said("assistant", _answer(makers, turn, records, raw))


def _about(turn: Turn) -> str:
    """The line below a turn's heading."""
    end = f"{turn.status}: {turn.message}" if turn.code else turn.reason or turn.status
    after = f"continues {turn.parent}" if turn.parent else "begins"
    counts = f"prompt {turn.prompt}, cached {turn.cached}, output {turn.output}"
    return f"{after} · {turn.model} · {counts} · {_shown(end)}"


def _added(
    reader: Reader, turn: Turn, accepted: events.RequestAccepted, items: Sequence[ask.Item]
) -> Sequence[ask.Item]:
    """The items that this turn brought: all, or those behind its parent's answer where the history was resent."""
    parent = reader.turn(turn.parent) if turn.parent and not accepted.previous else None
    if parent is None:
        return items
    digest = identity.history_start(reader.secret)
    asked = 0  # how many items end with its request, where the client changed the answer
    for index, item in enumerate(items, 1):
        digest = identity.history_step(digest, item)
        if digest == parent.history:
            return items[index:]
        asked = index if digest == parent.asked else asked
    return items[asked:]


def _answer(makers: Makers, turn: Turn, records: list[events.Recorded], raw: bytes) -> str:
    vocabulary = makers.vocabulary(makers.of(turn))
    if vocabulary is None:
        return f"*{turn.output} tokens, and no vocabulary in the journal to read them with*"
    tail = follow.without_end(follow.recorded_tail(records))
    return follow.read_text(tail.ids, follow.foreign_reader(vocabulary, ChatML(), stop_strings(raw)))


def _instructions(raw: bytes) -> str | None:
    try:
        return _decode_request(raw).instructions
    except (msgspec.MsgspecError, RecursionError):
        return None


def _item(item: ask.Item) -> str:
    match item:
        case ask.Message():
            return _said(item.role, item.text)
        case ask.Call():
            return _said(f"tool call {item.call_id}: {item.name}", _fenced(item.arguments))
        case ask.Result():
            return _said(f"tool result {item.call_id}", _fenced(item.text))
        case ask.Output():
            raise JournalFault(f"{item.response} stands among what a client sent")


def _said(who: str, text: str) -> str:
    return f"\n### {_shown(who)}\n\n{_shown(text)}\n"


def _fenced(text: str) -> str:
    """The text in a fence that is longer than any in it."""
    fence = "`" * max((len(run) + 1 for run in _FENCE.findall(text)), default=3)
    return f"{fence}\n{text}\n{fence}"


def _shown(text: str) -> str:
    """Control characters, but for line ends and tabs, as escapes."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
