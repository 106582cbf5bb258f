"""What all parsers share: characters that are cut, half tags, thoughts, text between calls, and the events of a call.

A parser is a machine of steps over one string, the text that has not been told yet. A step takes what it can from
the string's beginning and says whether another one should go on. What it leaves is exactly what later text may still
give another meaning, so the deltas, joined, are the same however the text was cut.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence

from zjournal import ask
from zjournal.dialects.base import Reasoning
from zjournal.dialects.literals import Literals

NAME_CHARACTERS_MAX = 256  # of a tool or a parameter
SPACE_CHARACTERS_MAX = 256  # of white space that is layout; a longer run is text
HEAD_CHARACTERS_MAX = 1024  # from where a call begins to where its name is known; a longer one is text
MARK = re.compile("[\ud800-\udfff]")  # a tag that is a token
FAULT_CHARACTERS_MAX = 80  # of what is quoted in a fault


class Shape:
    """How a dialect's calls stand in text: patterns over strings with marks, made once for all responses."""

    def __init__(
        self, literals: Literals, reasoning: Reasoning | None, opens: Sequence[str], strays: Sequence[str], layout: str
    ) -> None:
        """`opens`: texts that begin a call or a block of them. `strays`: closing tags. `layout` stands before calls."""
        self.literals = literals
        self.reasoning = reasoning
        self.layout = layout
        inner = literals.inner
        thinks = [] if reasoning is None else [reasoning.opening]
        self.opening = _any(literals, opens)
        self.stray = _any(literals, strays)
        self.thinking = _any(literals, thinks)
        groups = {"call": self.opening, "stray": self.stray, "think": self.thinking}
        self.stop = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in groups.items()))
        self.stop_thinking = re.compile(f"(?P<think>{self.thinking})")
        self.closing = re.compile(_any(literals, [] if reasoning is None else [reasoning.closing]))
        self.spelled = _spelled(map(inner, (*opens, *strays, *thinks)))
        self.spelled_thinking = _spelled(map(inner, thinks))
        self.spelled_closing = _spelled(map(inner, [] if reasoning is None else [reasoning.closing]))


def _any(literals: Literals, texts: Sequence[str]) -> str:
    return "|".join(map(literals.pattern, texts)) or "(?!)"


def _spelled(tags: map[str]) -> tuple[str, ...]:
    """Tags of more than one character, which may be cut; each begins with the only `<` in it."""
    found = tuple(tag.lower() for tag in tags if len(tag) > 1)
    assert all(tag.rfind("<") == 0 for tag in found), found
    return found


def half(text: str, tags: Sequence[str]) -> int:
    """Where a tag begins that the end of `text` may be half of; its length if there is none."""
    at = text.rfind("<")
    if at >= 0:
        tail = text[at:].lower()
        if any(len(tail) < len(tag) and tag.startswith(tail) for tag in tags):
            return at
    return len(text)


def plain(text: str) -> bool:
    """Whether there is neither a tag nor the beginning of one in the text."""
    return "<" not in text and (text.isascii() or MARK.search(text) is None)


class Scanner:
    """The base of parsers. A dialect adds the steps inside a call, from `_opened` on."""

    def __init__(self, shape: Shape, tools: Sequence[ask.ToolSpec]) -> None:
        self._shape = shape
        self._tools = {tool.name: tool for tool in tools}
        self._marks = shape.literals.marks
        self._spell = shape.literals.spell
        self._stop = shape.stop if tools else shape.stop_thinking
        self._spelled = shape.spelled if tools else shape.spelled_thinking
        self._layout = shape.layout if tools else ""
        self._pending = b""  # of a character that is not complete yet
        self._text = ""  # not told yet
        self._skip = ""  # layout that is dropped if it comes next
        self._refused = False  # whether something that opens a call was told as text
        self._raw = ""  # what was taken for the beginning of a call, until its name is known; else it is text
        self._out: list[ask.Delta] = []
        self._step: Callable[[], bool] = self._said
        self._begun = False  # whether anything but white space was told
        self._final = False
        self._index = -1
        self._open = False
        self._faults: list[str] = []

    def feed(self, data: bytes, control: bool = False) -> list[ask.Delta]:
        """See base.Parser."""
        if control and data in self._marks:
            text = self._pending.decode("utf-8", "replace") + self._marks[data]
            self._pending = b""
        else:
            data = self._pending + data
            text, used = codecs.utf_8_decode(data, "replace", False)
            self._pending = data[used:]
            if not text:
                return []
        self._text += text
        out = self._out = list[ask.Delta]()
        while self._step():
            pass
        return out

    def end(self) -> list[ask.Delta]:
        """See base.Parser."""
        self._text += self._pending.decode("utf-8", "replace")
        self._pending = b""
        self._final = True
        out = self._out = list[ask.Delta]()
        while self._step():
            pass
        if self._open:
            self._finish(truncated=True)
        return out

    # --- text and thoughts --------------------------------------------------------------------------------

    def _said(self) -> bool:
        """Text of the message, up to a call or a thought."""
        text = self._text
        if self._begun and not self._skip and plain(text) and text[-1:] != "\n":  # nearly always
            self._text = ""
            if text:
                self._out.append(ask.TextDelta(text))
            return False
        if self._skip and not self._skipped():
            return False
        text, at = self._text, 0
        while (found := self._stop.search(text, at)) is not None:
            if self._takes(found):
                return True
            at = found.end()
        keep = len(text) if self._final else self._held(text)
        self._text = text[keep:]
        self._tell(text[:keep])
        return False

    def _takes(self, found: re.Match[str]) -> bool:
        """Acts on a tag in text; False if it is text itself."""
        text, kind = self._text, found.lastgroup
        before = text[: found.start()]
        if kind == "think":
            fresh = not self._begun and not before.strip() and len(before) <= SPACE_CHARACTERS_MAX
            if not fresh and len(found.group()) > 1:
                return False  # spelled, and not at the beginning: the model speaks of the tag
            self._tell("" if fresh else before)
            self._think(text[found.end() :])
        elif kind == "call":
            told = self._without_layout(before)
            self._tell(told)
            self._raw, self._text = before[len(told) :], text[found.start() :]
            self._step = self._opened
        elif self._index >= 0 and not self._refused:
            self._tell(before)
            self._text = text[found.end() :]
        else:
            self._refused = False  # it closes what was text already
            return False
        return True

    def _held(self, text: str) -> int:
        """Where the part of `text` begins that must wait."""
        at = half(text, self._spelled)
        if not self._begun and self._shape.reasoning is not None and not text[:at].strip():
            if at <= SPACE_CHARACTERS_MAX:
                return 0
            self._begun = True
        return len(self._without_layout(text[:at]))

    def _without_layout(self, text: str) -> str:
        """The text without the newlines at its end that belong to a call behind it."""
        at = len(text)
        least = max(0, at - len(self._layout))
        while at > least and text[at - 1] == "\n":
            at -= 1
        return text[:at]

    def _skipped(self) -> bool:
        """Drops layout; False if more of it may come."""
        text, skip = self._text, self._skip
        at = 0
        while at < len(text) and at < len(skip) and text[at] == skip[at]:
            at += 1
        self._text, self._skip = text[at:], skip[at:] if at == len(text) else ""
        return not self._skip

    def _tell(self, text: str) -> None:
        if text:
            self._begun = self._begun or not text.isspace()
            self._out.append(ask.TextDelta(self._spell(text)))

    def _think(self, text: str) -> None:
        assert self._shape.reasoning is not None
        self._begun = True
        self._text = text
        self._skip = self._shape.reasoning.inside
        self._step = self._thought

    def _thought(self) -> bool:
        """Thoughts, up to their closing tag. A call in here is a thought as well and is never run."""
        reasoning = self._shape.reasoning
        assert reasoning is not None
        if self._skip and not self._skipped():
            return False
        text = self._text
        if plain(text) and text[-1:] != "\n":  # nearly always
            self._text = ""
            if text:
                self._out.append(ask.ReasoningDelta(text))
            return False
        found = self._shape.closing.search(text)
        if found is not None:
            self._muse(text[: found.start()].removesuffix(reasoning.inside))
            self._text = text[found.end() :]
            self._skip = reasoning.after
            self._step = self._said
            return True
        keep = len(text)
        if not self._final:
            keep = half(text, self._shape.spelled_closing)
            keep -= text[:keep].endswith(reasoning.inside) and len(reasoning.inside)
        self._text = text[keep:]
        self._muse(text[:keep])
        return False

    def _muse(self, text: str) -> None:
        if text:
            self._out.append(ask.ReasoningDelta(self._spell(text)))

    # --- calls ----------------------------------------------------------------------------------------------

    def _opened(self) -> bool:
        """The text begins with what opens a call. The dialect's own."""
        raise NotImplementedError

    def _between(self) -> bool:
        """Behind a call: white space that another call or the end follows is layout, and so are stray closing tags."""
        text = self._text
        at = len(text) - len(text.lstrip())
        if at > SPACE_CHARACTERS_MAX:
            self._step = self._said
            return True
        if at == len(text):
            self._text = "" if self._final else text
            return False
        found = self._stop.match(text, at)
        if found is not None and found.lastgroup == "stray":
            self._text = text[found.end() :]
            return True
        if found is not None and found.lastgroup == "call":
            self._raw, self._text = text[:at], text[at:]
            self._step = self._opened
            return True
        if found is not None and len(found.group()) == 1:
            self._text = text[at:]
        elif not self._final and half(text, self._spelled) == at:
            return False
        self._step = self._said
        return True

    def _start(self, name: str) -> None:
        """A call has a name."""
        assert not self._open
        self._index += 1
        self._open = self._begun = True
        self._faults = []
        self._out.append(ask.CallStarted(self._index, name, name in self._tools))

    def _argue(self, text: str) -> None:
        """More of the open call's arguments."""
        assert self._open
        if text:
            self._out.append(ask.CallArguments(self._index, self._spell(text)))

    def _fault(self, text: str) -> None:
        if text not in self._faults:
            self._faults.append(text)

    def _finish(self, truncated: bool = False) -> None:
        """The open call is over."""
        assert self._open
        self._open = False
        self._out.append(ask.CallEnded(self._index, truncated, "; ".join(self._faults)))


def quote(text: str) -> str:
    """Some of a text, for a fault."""
    return repr(text[:FAULT_CHARACTERS_MAX]) + ("…" if len(text) > FAULT_CHARACTERS_MAX else "")
