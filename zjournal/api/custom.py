"""The input of a custom tool's call: one text, taken out of the arguments in which the model writes it.

A model is told of a custom tool as a function with the one parameter `input`, so what it writes is `{"input": "…"}`.
Pure.
"""

from __future__ import annotations

import json
import re

from zjournal.api.tooling import INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPE = re.compile(r"\\(?:[^u]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4})", re.DOTALL)
_HALF = re.compile(r"\\u[dD][89abAB]")  # the first of two escapes that are one character
_PAIR_CHARACTERS = 12


class Input:
    """Takes the arguments as they come, and tells of the text what is sure by then."""

    def __init__(self) -> None:
        self._text = ""  # of the arguments, not told yet
        self._open = False  # whether the text has begun
        self._closed = False

    def feed(self, arguments: str) -> str:
        """More of the input."""
        self._text += arguments
        if self._closed:
            return ""
        if not self._open:
            head = _HEAD.match(self._text)
            if head is None:
                return ""
            self._open = True
            self._text = self._text[head.end() :]
        return self._more(last=False)

    def end(self) -> str:
        """The rest. Arguments of another form are told by their `input` if they have one, else as they are."""
        if self._closed:
            return ""
        if self._open:
            return self._more(last=True)
        try:
            value = json.loads(self._text)
        except (ValueError, RecursionError):
            return self._text
        found = value.get(INPUT) if isinstance(value, dict) else None
        return found if isinstance(found, str) else self._text

    def _more(self, last: bool) -> str:
        told: list[str] = []
        text, at = self._text, 0
        while at < len(text):
            plain = _PLAIN.match(text, at)
            assert plain is not None
            told.append(plain.group())
            at = plain.end()
            if at == len(text):
                break
            if text[at] == '"':
                self._closed = True
                break
            escape = _ESCAPE.match(text, at)
            half = _HALF.match(text, at) and len(text) - at < _PAIR_CHARACTERS and not last
            if escape is None or half:
                if not last:
                    break
                told.append(text[at:])  # cut inside an escape
                at = len(text)
                break
            told.append(_spelled(escape.group()))
            at = escape.end()
        self._text = text[at:]
        return "".join(told)


def _spelled(escape: str) -> str:
    """The character that an escape stands for; as it is where JSON has no such escape, U+FFFD for half of a pair."""
    try:
        text = str(json.loads(f'"{escape}"'))
    except ValueError:
        return escape
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
