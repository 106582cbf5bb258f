"""Llama 3's JSON calls: a turn that begins with `{` is a call, or one behind `<|python_tag|>`.

The brace alone is a weak sign, for answers may be JSON as well. So without the tag an object is a call only if it
has a name, which a tool of the request has, and nothing but arguments beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from zjournal import ask
from zjournal.dialects import objects, scan
from zjournal.dialects.base import Parser, Piece, Reasoning, TextParser, to_json, tool_value
from zjournal.dialects.form import Form, Objects
from zjournal.dialects.literals import Literals, Tokens

TAG = "<|python_tag|>"

_BEFORE = (
    "You have access to the following functions. To call a function, please respond with JSON for a function call. "
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
    "Do not use variables.\n\n"
)


class Llama3:
    """The dialect."""

    name = "llama3"
    form: Form = Objects(triggers=(TAG,), opening=TAG, closing="", gap="; ", arguments="parameters", bare=True)
    reasoning: Reasoning | None = None

    def __init__(self, tokenizer: Tokens) -> None:
        """Raises ModelFault if the tokenizer has no token for the tag."""
        literals = Literals(self.name, tokenizer, (), (TAG,))
        self.literals: Mapping[str, tuple[int, ...]] = literals.ids
        self._shape = scan.Shape(literals, None, (TAG,), (), "")

    def instruct(self, tools: Sequence[ask.ToolSpec]) -> list[Piece]:
        """Each tool as indented JSON, an empty line behind it."""
        parts = [Piece(_BEFORE, trusted=True)]
        for tool in tools:
            text = json.dumps(tool_value(tool), ensure_ascii=False, indent=4)
            parts += [Piece(text, tool.path), Piece("\n\n", trusted=True)]
        return parts

    def calls(self, content: Sequence[Piece], calls: Sequence[ask.Call]) -> list[Piece]:
        """The object alone; behind content, with the tag. Models never saw several calls; they are joined by `; `."""
        parts = list(content)
        if any(piece.text for piece in content):
            parts.append(Piece(TAG, trusted=True))
        for index, call in enumerate(calls):
            arguments = call.arguments if call.arguments.strip() else "{}"
            body = f'{{"name": {to_json(call.name)}, "parameters": {arguments}}}'
            parts += [Piece("; " if index else "", trusted=True), Piece(body, call.path)]
        return parts

    def results(self, results: Sequence[ask.Result]) -> list[Piece]:
        """Each result as `{"output": …}`, one a line."""
        parts: list[Piece] = []
        for index, result in enumerate(results):
            path = result.parts[0].path if result.parts else ""
            parts += [Piece("\n" if index else "", trusted=True), Piece(to_json({"output": result.text}), path)]
        return parts

    def parser(self, tools: Sequence[ask.ToolSpec] | None = None, *, in_tags: bool = False) -> Parser:
        """See base.Dialect."""
        return TextParser() if tools is None else _Llama3Parser(self._shape, tools, in_tags)


class _Llama3Parser(objects.ObjectParser):
    """Looks at the turn's first character; objects are parted by semicolons."""

    def __init__(self, shape: scan.Shape, tools: Sequence[ask.ToolSpec], in_tags: bool) -> None:
        super().__init__(shape, tools)
        if tools and not in_tags:
            self._step = self._first

    def _first(self) -> bool:
        """The first character that is not white space: a brace may begin a call."""
        core = self._text.lstrip()
        if not core and not self._final:
            return False
        self._strict = core.startswith("{")
        return self._expect() if self._strict else self._plain()

    def _plain(self) -> bool:
        self._step = self._said
        return True

    def _opened(self) -> bool:
        self._strict = False
        return super()._opened()

    def _between(self) -> bool:
        """Behind an object: another one after a semicolon, or text."""
        core = self._text.lstrip()
        if not core:
            self._text = "" if self._final else self._text
            return False
        if core[0] != ";":
            return super()._between()
        after = core[1:].lstrip()
        if not after and not self._final:
            return False
        if not after.startswith("{"):
            return self._plain()
        self._raw = self._text[: len(self._text) - len(after)]
        self._text = after
        return self._expect()
