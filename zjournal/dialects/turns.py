"""The conversation as the messages of a chat template: who says what, which thoughts stay, who writes the calls.

Where the template renders tools itself it gets calls and results as they are; else the dialect spells them out. An
earlier output stays whole, to be replayed, unless the dialect keeps its thoughts no longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from zjournal import ask
from zjournal.checkpoint.template import Template
from zjournal.dialects.base import Dialect, Piece, pieces, tool_value


class Turn(msgspec.Struct, frozen=True):
    """One message for the template. Calls, results and thoughts are filled only where it renders them itself."""

    role: str
    content: tuple[Piece, ...] = ()
    output: ask.Output | None = None
    thoughts: tuple[Piece, ...] = ()
    calls: tuple[ask.Call, ...] = ()
    call_id: str = ""


class Kept:
    """Which thoughts of a conversation stay in the prompt."""

    def __init__(self, request: ask.Ask, dialect: Dialect, everything: bool) -> None:
        self._items = request.items
        users = [i for i, item in enumerate(self._items) if isinstance(item, ask.Message) and item.role == "user"]
        self._last_user = users[-1] if users else -1
        self._reasoning = dialect.reasoning
        self._everything = everything
        self._tools = bool(request.tools)

    def at(self, index: int) -> bool:
        """Whether those of the item at `index` stay."""
        if self._reasoning is None:
            return False
        return self._everything or self._reasoning.keeps(index > self._last_user, self._tools)

    def replays(self, index: int, output: ask.Output) -> bool:
        """Whether an output goes in as it was sampled."""
        return not output.thoughts or self.at(index)

    def rewritten(self) -> tuple[str, ...]:
        """The responses that do not."""
        outputs = ((i, item) for i, item in enumerate(self._items) if isinstance(item, ask.Output))
        return tuple(output.response for i, output in outputs if not self.replays(i, output))


def turns_of(request: ask.Ask, template: Template, dialect: Dialect, kept: Kept) -> list[Turn]:
    """The messages, in order; tools go into the system message unless the template has a place for them."""
    turns: list[Turn] = []
    if request.instructions is not None:
        turns.append(Turn("system", tuple(pieces((request.instructions,)))))
    for index, items in _grouped(request.items, kept):
        if template.uses_tools:
            turns += _native(items, template, dialect, kept.at(index))
        else:
            turns.append(_written(items, template, dialect, kept.at(index)))
    if not request.tools or template.uses_tools:
        return turns
    instructions = dialect.instruct(request.tools)
    if turns and turns[0].role == "system":
        before = turns.pop(0).content
    else:
        before = (Piece(template.default_system, trusted=True),)
    gap = [Piece("\n\n", trusted=True)] if any(piece.text for piece in before) else []
    return [Turn("system", (*before, *gap, *instructions)), *turns]


def _grouped(items: Sequence[ask.Item], kept: Kept) -> Iterator[tuple[int, list[ask.Item]]]:
    """The items of each turn, and the place of the first.

    An assistant's message joins the thoughts before it, calls join both; results join each other.
    """
    group: list[ask.Item] = []
    start = 0
    for index, item in enumerate(items):
        if group and not _joins(group[-1], item):
            yield start, group
            group = []
        start = start if group else index
        if isinstance(item, ask.Output) and not kept.replays(index, item):
            yield start, list(item.items)
        else:
            group.append(item)
    if group:
        yield start, group


def _joins(before: ask.Item, item: ask.Item) -> bool:
    match item:
        case ask.Result():
            return isinstance(before, ask.Result)
        case ask.Call():
            said = isinstance(before, ask.Message) and before.role == "assistant"
            return said or isinstance(before, ask.Call | ask.Thought)
        case ask.Message(role="assistant"):
            return isinstance(before, ask.Thought)
        case ask.Thought():
            return isinstance(before, ask.Thought)
    return False


def _written(items: Sequence[ask.Item], template: Template, dialect: Dialect, kept: bool) -> Turn:
    """One turn, with calls and results spelled out by the dialect."""
    first = items[0]
    match first:
        case ask.Output():
            return Turn("assistant", output=first)
        case ask.Result():
            return Turn("user", tuple(dialect.results([item for item in items if isinstance(item, ask.Result)])))
    thoughts, content = _thoughts(items, template, dialect, kept), _content(items)
    calls = [item for item in items if isinstance(item, ask.Call)]
    if calls:
        content = dialect.calls(content, calls)
    if template.uses_reasoning:
        return Turn(_role(items), tuple(content), thoughts=tuple(thoughts))
    return Turn(_role(items), (*thoughts, *content))


def _native(items: Sequence[ask.Item], template: Template, dialect: Dialect, kept: bool) -> list[Turn]:
    """One turn, or one for each result, for a template that knows calls and results."""
    first = items[0]
    match first:
        case ask.Output():
            return [Turn("assistant", output=first)]
        case ask.Result():
            results = [item for item in items if isinstance(item, ask.Result)]
            return [Turn("tool", tuple(pieces(result.parts)), call_id=result.call_id) for result in results]
    thoughts, content = tuple(_thoughts(items, template, dialect, kept)), tuple(_content(items))
    calls = tuple(item for item in items if isinstance(item, ask.Call))
    if template.uses_reasoning:
        return [Turn(_role(items), content, thoughts=thoughts, calls=calls)]
    return [Turn(_role(items), (*thoughts, *content), calls=calls)]


def _content(items: Sequence[ask.Item]) -> list[Piece]:
    return [piece for item in items if isinstance(item, ask.Message) for piece in pieces(item.parts)]


def _thoughts(items: Sequence[ask.Item], template: Template, dialect: Dialect, kept: bool) -> list[Piece]:
    """The thoughts of a turn: bare for a template that knows them and which of them to keep, else in their tags."""
    said = [piece for item in items if isinstance(item, ask.Thought) for piece in pieces(item.parts)]
    if not any(piece.text for piece in said):
        return []
    if template.uses_reasoning:
        return said
    if not kept or dialect.reasoning is None:
        return []
    opening, _, closing = dialect.reasoning.written("")
    return [opening, *said, closing]


def _role(items: Sequence[ask.Item]) -> str:
    message = next((item for item in items if isinstance(item, ask.Message)), None)
    if message is None:
        return "assistant"
    return "system" if message.role == "developer" else message.role


def client_texts(turns: Sequence[Turn], tools: Sequence[ask.ToolSpec]) -> Iterator[tuple[str, str]]:
    """Every text that a client wrote, with its path, in the order of the messages."""
    for tool in tools:
        yield from ((text, tool.path) for text in _strings(tool_value(tool)))
    for turn in turns:
        said = (*turn.thoughts, *turn.content)
        yield from ((piece.text, piece.path) for piece in said if not piece.trusted)
        yield turn.call_id, ""
        for call in turn.calls:
            yield from ((text, call.path) for text in (call.call_id, call.name, call.arguments))


def _strings(value: Any) -> Iterator[str]:
    """All strings and keys in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
