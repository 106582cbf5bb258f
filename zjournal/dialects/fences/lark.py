"""Lark as llguidance reads it, rule by rule. Equal rules are written once, which is most of what makes compiling fast.

Tags that are tokens stand as `<[id]>`: the engine matches no control token by its letters, so that neither a text nor a
value can hold one. Everything else is text, whatever tokens the model says it in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

WHITE = r" |\n[ \t]{0,16}"  # between two tokens of JSON; bounded, for models say white space for ever if they may
_WHITE = f"({WHITE})?"


class Writer:
    """A grammar in the making."""

    def __init__(self, control: Mapping[str, int]) -> None:
        """`control`: the dialect's tags that are tokens, with their ids."""
        self._control = control
        self._tags = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
        self._names: dict[str, str] = {}
        self._lines: list[str] = []
        self._fresh = 0

    def split(self, text: str) -> tuple[str, str]:
        """The text before the first token in it, and the rest."""
        found = self._tags.search(text)
        return (text, "") if found is None else (text[: found.start()], text[found.start() :])

    def text(self, text: str, client: str = "", behind: str = "", any_case: bool = False) -> str:
        """An expression for a text with tags, and perhaps a client's text, in which no tag is one, and more behind it.

        Letters that stand together are one string, for the engine's lexer takes the longest match: of `"a" "b"` and
        `"abc"` it would never end the first. `any_case`: letters that are no token may be in either case.
        """
        parts = [*self._parts(text), client, *self._parts(behind)]
        out, letters = [], ""
        for part in parts:
            if isinstance(part, int):
                out += [_literal(letters, any_case), f"<[{part}]>"]
                letters = ""
            else:
                letters += part
        out.append(_literal(letters, any_case))
        return " ".join(filter(None, out))

    def _parts(self, text: str) -> list[str | int]:
        """A text of ours as letters and tokens."""
        out: list[str | int] = []
        at = 0
        for found in self._tags.finditer(text):
            out += [text[at : found.start()], self._control[found.group()]]
            at = found.end()
        return [*out, text[at:]]

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """The name of a rule."""
        return self._named("r", f"{body}", "[lazy]" if lazy else "")

    def terminal(self, body: str) -> str:
        """The name of a terminal, made of regular expressions and strings."""
        return self._named("T", body, "")

    def json(self, schema: Mapping[str, Any]) -> str:
        """The name of a rule for the JSON of a schema, which stands alone."""
        told = {"x-guidance": {"whitespace_pattern": WHITE}, **schema}
        return self._named("j", f"%json {json.dumps(told)}", "")

    def lark(self, definition: str) -> str:
        """The name of a rule for a client's own grammar, whose names stay its own."""
        return self._named("g", f"%lark {{\n{definition}\n}}", "")

    def fresh(self, letter: str) -> str:
        """A name for a rule that is written later."""
        self._fresh += 1
        return f"{letter}_{self._fresh}"

    def raw(self, name: str, body: str) -> None:
        """A rule with a fresh name, or `start`."""
        self._lines.append(f"{name}: {body}\n")

    def parametric(self, name: str, alternatives: list[str]) -> None:
        """A rule over a set of bits."""
        self._lines.append(f"{name}::_ : " + "\n  | ".join(alternatives) + "\n")

    def _named(self, letter: str, body: str, flags: str) -> str:
        key = f"{letter}{flags}{body}"
        if key not in self._names:
            name = self._names[key] = f"{letter}{len(self._names)}"
            self._lines.append(f"{name}{flags}: {body}\n")
        return self._names[key]

    # --- JSON's own marks, with white space --------------------------------------------------------------

    @property
    def white(self) -> str:
        """A pattern."""
        return _WHITE

    @property
    def bracket(self) -> str:
        return self.terminal(rf"/\[{_WHITE}/")

    @property
    def unbracket(self) -> str:
        return self.terminal(rf"/{_WHITE}\]/")

    @property
    def open(self) -> str:
        return self.terminal(rf"/\{{{_WHITE}/")

    @property
    def close(self) -> str:
        return self.terminal(rf"/{_WHITE}\}}/")

    @property
    def empty(self) -> str:
        return self.terminal(rf"/\{{{_WHITE}\}}/")

    @property
    def comma(self) -> str:
        return self.terminal(f"/{_WHITE},{_WHITE}/")

    @property
    def colon(self) -> str:
        return self.terminal(f"/{_WHITE}:{_WHITE}/")

    def finished(self) -> str:
        """All of the grammar."""
        return "%llguidance {}\n" + "".join(self._lines)


def standing(schema: Any, defs: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with the definitions that it needs, so that it stands alone; of no value, one that is refused."""
    told: dict[str, Any] = {} if schema is True else {"enum": []} if schema is False else dict(schema)
    needed: dict[str, Any] = {}
    queue = [told]
    while queue:
        for name in set(re.findall(r'"#/\$defs/(d\d+)"', json.dumps(queue.pop()))) & defs.keys() - needed.keys():
            needed[name] = defs[name]
            queue.append(defs[name])
    return {**told, "$defs": {name: needed[name] for name in defs if name in needed}} if needed else told


def pattern(text: str) -> str:
    """A regular expression that matches this text alone."""
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)


def _literal(text: str, any_case: bool) -> str:
    return json.dumps(text) + ("i" if any_case and text.lower() != text.upper() else "") if text else ""
