"""A session as Markdown, for people: who said what, turn by turn. Needs the journal alone.

Only what a turn added is printed: a client that resends its whole history does not repeat it here. Texts stand as they
are, but for control characters, which could steer a terminal; what tools were given and gave is fenced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from zjournal import ask
from zjournal.errors import JournalFault
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader
from zjournal.sessions import identity
from zjournal.sessions.choices import choices_of
from zjournal.sessions.items import call_ids, digests, units
from zjournal.sessions.makers import Makers
from zjournal.sessions.reading import Answer, Answers, Decoders, Models
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
    answers = Answers(reader, told_by, Models(makers), decoders)
    yield f"# Session {selection.session.session}\n"
    instructions = None
    whole = {turn.response for turn in selection.turns if not turn.erased}
    for number, turn in enumerate(selection.turns, 1):
        choice = choices_of(reader, [turn]).get(turn.response)
        told = f" · choice {choice.index} of {choice.first}" if choice is not None else ""
        again = choice is not None and choice.first in whole  # what was asked stands there
        yield f"\n## {number}. {turn.response}\n\n{_about(turn)}{told}\n"
        if turn.erased:
            yield "\n*The content of this turn was erased.*\n"
            continue
        raw = told_by.body(turn)
        given = _instructions(raw)
        if given != instructions:
            yield _said("instructions", given or "*none any more*")
            instructions = given
        for item in () if again else _added(reader, turn, decoders[turn.protocol](raw)):
            yield _item(item)
        answer = answers.of(turn)
        if answer is None:
            unread = f"*{turn.output} tokens, and no vocabulary in the journal to read them with*"
            yield _said("assistant", unread)
        else:
            yield from _answer(reader, turn, answer)


def _about(turn: Turn) -> str:
    """The line below a turn's heading."""
    end = f"{turn.status}: {turn.message}" if turn.code else turn.reason or turn.status
    after = f"continues {turn.parent}" if turn.parent else "begins"
    counts = f"prompt {turn.prompt}, cached {turn.cached}, output {turn.output}"
    return f"{after} · {turn.model} · {counts} · {_shown(end)}"


def _added(reader: Reader, turn: Turn, request: ask.Ask) -> Sequence[ask.Item]:
    """The items that this turn brought: all, or those behind its parent's answer where the history was resent."""
    items = request.items
    parent = reader.turn(turn.parent) if turn.parent and not request.previous else None
    if parent is None:
        return items
    found = units(items)
    asked = 0  # how many items end with its request, where the client changed the answer
    for unit, digest in zip(found, digests(found, identity.history_start(reader.secret)), strict=False):
        if digest == parent.history:
            return items[unit.end :]
        asked = unit.end if digest == parent.asked else asked
    return items[asked:]


def _answer(reader: Reader, turn: Turn, answer: Answer) -> Iterator[str]:
    """Thoughts, texts and calls in the order in which the model said them; an empty answer is told as well."""
    secret = answer.accepted.item_secret or identity.item_secret(reader.secret, turn.response)
    ids = call_ids(secret, turn.response, answer.deltas, answer.accepted.nameless)
    runs = [(kind, list(deltas)) for kind, deltas in groupby(answer.deltas, _kind)]
    for kind, deltas in runs or [("assistant", [])]:
        text = "".join(getattr(delta, "text", "") for delta in deltas)
        if kind in ("assistant", "assistant thinks"):
            yield _said(kind, text)
            continue
        started = next(delta for delta in deltas if isinstance(delta, ask.CallStarted))
        ended = next((delta for delta in deltas if isinstance(delta, ask.CallEnded)), None)
        notes = ["unknown"] * (not started.known) + ["cut off"] * (ended is None or ended.truncated)
        notes += [ended.fault] if ended is not None and ended.fault else []
        title = f"tool call {ids(started.index)}: {started.name}"
        yield _said(title + (f" ({', '.join(notes)})" if notes else ""), _fenced(text))


def _kind(delta: ask.Delta) -> str:
    """What runs of deltas are told together."""
    match delta:
        case ask.TextDelta():
            return "assistant"
        case ask.ReasoningDelta():
            return "assistant thinks"
    return f"call {delta.index}"


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
        case ask.Thought():
            return _said("assistant thinks", item.text)
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
