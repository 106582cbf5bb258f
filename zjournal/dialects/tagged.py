"""Calls whose parameters stand in tags of their own: DSML, GLM and Qwen3-Coder, which differ in the tags alone.

    block opening?  ( head  ( parameter value closing )*  call closing )*  block closing?

White space between tags is layout. The arguments are told as the text of a JSON object that grows with the output:
strings letter by letter, arrays and objects as the model writes them, other values once they are whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from zjournal import ask
from zjournal.dialects.base import parse_json
from zjournal.dialects.literals import Literals
from zjournal.dialects.scan import HEAD_CHARACTERS_MAX, MARK, SPACE_CHARACTERS_MAX, Scanner, Shape, half, plain, quote
from zjournal.dialects.values import NOTHING, TYPES, allowed, loads, meant, quoted
from zjournal.errors import BadRequest

_TAG = re.compile(f"<|{MARK.pattern}")  # where a tag may begin


class Tags(msgspec.Struct, frozen=True):
    """A dialect's tags as data. Texts are as the model writes them; patterns (`head`, `parameter`) over marks.

    `head` has a group `name`, `parameter` a group `key` and perhaps `string`, which says the type of the value.
    """

    head: str
    parameter: str
    head_begins: str
    parameter_begins: str
    value_closing: str
    call_closing: str
    block: str | None = None
    block_closing: str | None = None
    layout: str = ""  # before the first tag
    inside: str = ""  # on each side of a value
    followed: tuple[str, ...] = ()  # a closing tag of a value counts only before one of these


class Grammar:
    """The tags of one dialect under one tokenizer, as patterns; made once for all responses."""

    def __init__(self, tags: Tags, literals: Literals, shape: Shape) -> None:
        pattern, inner = literals.pattern, literals.inner
        self.shape = shape
        self.inside = tags.inside
        self.has_block = tags.block is not None
        self.head = re.compile(tags.head, re.IGNORECASE)
        self.parameter = re.compile(tags.parameter, re.IGNORECASE)
        self.call_closing = re.compile(pattern(tags.call_closing))
        self.block = re.compile(pattern(tags.block) if tags.block else "(?!)")
        self.block_closing = re.compile(pattern(tags.block_closing) if tags.block_closing else "(?!)")
        starts = [tags.head_begins, *(tag for tag in (tags.block, tags.block_closing) if tag)]
        self.breaks = re.compile("|".join(map(pattern, starts)))  # what ends a call that was not closed
        followed = "|".join(map(pattern, tags.followed))
        behind = rf"(?=\s*(?:{followed}))" if followed else ""
        self.value = re.compile(f"(?:{re.escape(tags.inside)})?{pattern(tags.value_closing)}{behind}")
        self.value_closing = inner(tags.value_closing).lower()
        self.value_half = (self.value_closing,) if len(self.value_closing) > 1 else ()
        self.followed = tuple(inner(tag).lower() for tag in tags.followed)
        # A token that can only be a tag of a call ends a value that was not closed.
        firm = [tag for tag in (tags.call_closing, tags.block_closing, tags.head_begins) if tag]
        marks = [inner(tag) for tag in (*firm, tags.parameter_begins) if len(inner(tag)) == 1]
        composed = [inner(tag) for tag in firm[:-1] if len(inner(tag)) > 1 and inner(tag) != tag]
        self.value_break = re.compile("|".join(map(re.escape, (*marks, *composed))) or "(?!)")
        self.starts = tuple(inner(tag).lower() for tag in (*starts, tags.parameter_begins, tags.call_closing))
        self.open_ended = tuple(inner(tag).lower() for tag in (tags.head_begins, tags.parameter_begins))
        self.value_break_half = tuple(tag.lower() for tag in composed)

    def waits(self, text: str) -> bool:
        """Whether `text` may still become a tag."""
        low = text[:HEAD_CHARACTERS_MAX].lower()
        if any(start.startswith(low) for start in self.starts):
            return True
        return len(text) <= HEAD_CHARACTERS_MAX and low.startswith(self.open_ended)


class TaggedParser(Scanner):
    """The parser of such a dialect."""

    def __init__(self, grammar: Grammar, tools: Sequence[ask.ToolSpec]) -> None:
        super().__init__(grammar.shape, tools)
        self._grammar = grammar
        self._blocks = False  # whether a block's opening was read
        self._called_here = False  # and a call in it
        self._keys: list[str] = []
        self._types = TYPES
        self._mode = ""  # of the open value: "", "text", "json" (told as it comes) or "whole"
        self._value: list[str] = []
        self._schemas: tuple[object, object] = ({}, {})  # the properties of the open call's tool, and all of its schema

    def _opened(self) -> bool:
        self._blocks, self._called_here = False, False
        self._step = self._blocked
        return True

    def _blocked(self) -> bool:
        """In a block, between calls."""
        text, grammar = self._text, self._grammar
        at = len(text) - len(text.lstrip())
        if at > SPACE_CHARACTERS_MAX:
            return self._not_a_call(SPACE_CHARACTERS_MAX)
        found = grammar.head.match(text, at, at + HEAD_CHARACTERS_MAX)
        if found is not None:
            name = self._spell(found["name"])
            if grammar.has_block and not (self._blocks or self._called_here or name in self._tools):
                return self._not_a_call(at)  # without its block only a known name makes a call
            self._text = text[found.end() :]
            self._begin(name)
            return True
        if found := grammar.block.match(text, at):
            self._blocks = True
            self._raw += text[: found.end()]
            self._text = text[found.end() :]
            return True
        if found := grammar.block_closing.match(text, at):
            self._tell("" if self._called_here else self._raw + text[: found.end()])
            self._text = text[found.end() :]
            self._step = self._between if self._called_here else self._said
            return True
        if not self._final and (at == len(text) or grammar.waits(text[at:])):
            return False
        return self._not_a_call(at)

    def _not_a_call(self, at: int) -> bool:
        """What stands at `at` in a block is no call: it is text, and so is a block's opening with no call behind it."""
        text = self._text
        if self._final and self._called_here and (not text.strip() or self._grammar.waits(text[at:])):
            self._text = ""  # behind a call, the block's closing tag was cut off
            return False
        self._tell(self._raw + text[: at + 1])
        self._text = text[at + 1 :]
        self._refused = not self._called_here
        self._step = self._said
        return True

    def _begin(self, name: str) -> None:
        self._keys = []
        self._raw, self._called_here = "", True
        self._start(name)
        tool = self._tools.get(name)
        try:
            root = parse_json(tool.parameters, "") if tool is not None else {}
        except BadRequest:
            root = {}
        properties = root.get("properties") if isinstance(root, dict) else None
        self._schemas = (properties if isinstance(properties, dict) else {}, root)
        self._step = self._called

    def _called(self) -> bool:
        """In a call, between parameters."""
        text, grammar = self._text, self._grammar
        at = len(text) - len(text.lstrip())
        found = grammar.parameter.match(text, at, at + HEAD_CHARACTERS_MAX)
        if found is not None:
            self._text = text[found.end() :]
            self._begin_value(self._spell(found["key"]), found.groupdict().get("string"))
            return True
        if found := grammar.call_closing.match(text, at):
            self._text = text[found.end() :]
            return self._close()
        if grammar.breaks.match(text, at):
            self._fault("the call is not closed")
            self._text = text[at:]
            return self._close()
        if at == len(text) or grammar.waits(text[at:]):
            self._text = text[at:]
            return False
        self._fault("there is text between the parameters")
        tag = _TAG.search(text, at + 1)
        self._text = text[tag.start() :] if tag is not None else ""
        return True

    def _close(self) -> bool:
        self._argue("" if self._keys else "{}")
        self._argue("}" if self._keys else "")
        self._finish()
        self._step = self._blocked if self._grammar.has_block else self._between
        return True

    # --- values ---------------------------------------------------------------------------------------------

    def _begin_value(self, key: str, string: str | None) -> None:
        properties, root = self._schemas
        assert isinstance(properties, dict)
        if key in self._keys:
            self._fault(f"{quote(key)} is given twice")
        self._argue((", " if self._keys else "{") + quoted(key) + ": ")
        self._keys.append(key)
        if string is None:
            self._types = allowed(properties.get(key), root)
        else:
            self._types = frozenset(("string",)) if string.lower() == "true" else TYPES - {"string"}
        self._value = []
        self._mode = "whole" if "string" in self._types else ""
        if self._types == {"string"}:
            self._mode = "text"
            self._argue('"')
        self._skip = self._grammar.inside
        self._step = self._valued

    def _valued(self) -> bool:
        """In a value, up to its closing tag."""
        if self._skip and not self._skipped():
            return False
        text, grammar = self._text, self._grammar
        if text[-1:] != "\n" and plain(text) and not self._final:  # nearly always
            self._text = ""
            self._add(text)
            return False
        found = grammar.value.search(text)
        broken = grammar.value_break.search(text)
        if broken is not None and (found is None or broken.start() < found.start()):
            self._fault(f"{quote(self._keys[-1])} is not closed")
            found, end = broken, broken.start()
        elif found is not None:
            end = found.end()
        if found is not None:
            self._add(text[: found.start()])
            self._text = text[end:]
            self._end_value()
            return True
        keep = self._unsure(text)
        if self._final and keep < len(text) and text[keep:].strip().lower().startswith(grammar.value_closing):
            self._add(text[:keep])
            self._text = ""
            self._end_value()
            return False
        keep = len(text) if self._final else keep
        self._text = text[keep:]
        self._add(text[:keep])
        if self._final and self._mode in ("whole", ""):
            self._argue("".join(self._value))  # cut: as far as it came
        return False

    def _unsure(self, text: str) -> int:
        """Where the part of a value begins that may be its closing tag."""
        grammar = self._grammar
        at = -1
        if grammar.followed and "<" in text:
            at = text.lower().rfind(grammar.value_closing)
            rest = text[at + len(grammar.value_closing) :].lstrip().lower() if at >= 0 else "?"
            if not any(one.startswith(rest) for one in grammar.followed):
                at = -1
        if at < 0:
            at = min(half(text, grammar.value_half), half(text, grammar.value_break_half))
        return at - len(grammar.inside) if grammar.inside and text[:at].endswith(grammar.inside) else at

    def _add(self, text: str) -> None:
        if not text:
            return
        text = self._spell(text)
        if self._mode == "text":
            self._out.append(ask.CallArguments(self._index, quoted(text)[1:-1]))
            return
        self._value.append(text)
        if self._mode == "json":
            self._argue(text)
        elif not self._mode and text.strip():
            whole = "".join(self._value)
            self._mode = "json" if whole.lstrip()[0] in "[{" else "whole"
            if self._mode == "json":
                self._argue(whole)

    def _end_value(self) -> None:
        whole = "".join(self._value)
        if self._mode == "text":
            self._argue('"')
        elif self._mode == "json":
            if loads(whole) is NOTHING:
                self._fault(f"{quote(self._keys[-1])} is not JSON")
        else:
            self._argue(meant(whole, self._types))
        self._step = self._called
