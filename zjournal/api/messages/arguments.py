"""The input of a tool call as it is told: pieces that together are one JSON object, whatever the model wrote. Pure.

The protocol has no other place for arguments, and its clients parse them as they come: a piece that is no beginning of
JSON breaks their whole stream. So pieces are told for as long as they are such a beginning. Arguments that turn out to
be none are told as far as they were, closed, with all that the model wrote as the text of one more member. The input of
a call that was cut stays open, so that nobody takes it for one to run.
"""

from __future__ import annotations

import json
import re
from typing import Any

UNPARSED = "unparsed_arguments"  # the member that holds arguments which are no JSON object
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = " \t\r\n"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")
_LITERALS = ("true", "false", "null")
_HEX = "0123456789abcdefABCDEF"


class Input:
    """Takes a call's arguments as they come, and tells of them what may be told."""

    def __init__(self) -> None:
        self._all: list[str] = []  # what the model wrote
        self._told: list[str] = []
        self._stack: list[str] = []  # what is open: { or [
        self._mode = "begin"
        self._word = ""  # of an open number, literal or escape
        self._key = False  # whether the open string is a key
        self._broken = False
        self._safe = (0, "")  # characters told after which the brackets behind them make it whole
        self._length = 0

    def feed(self, text: str) -> str:
        """What may be told of the next piece."""
        self._all.append(text)
        if self._broken:
            return ""
        at = 0
        while at < len(text) and not self._broken and self._mode != "done":
            at = self._step(text, at)
        if self._mode == "done" and text[at:].strip(_SPACE):
            self._broken = True
        told = text[:at]
        if self._mode == "done":
            told = told[:-1] if told.endswith("}") else told  # told at the end, for more may follow
        return self._tell(told)

    def end(self, truncated: bool) -> str:
        """What is left to tell: nothing of a call that was cut, unless it was none from the start."""
        if truncated and not self._broken:
            return ""
        if self._mode == "done" and not self._broken:
            return self._tell("}")
        if not self._broken and not "".join(self._all).strip():
            return self._tell("{}")
        return self._tell(self._closed())

    def value(self) -> dict[str, Any]:
        """The input as an object; of a call that was cut, the members that are whole."""
        text = "".join(self._told)
        try:
            found = json.loads(text)
        except ValueError:
            length, brackets = self._safe
            found = json.loads(text[:length] + brackets) if length else {}
        assert isinstance(found, dict), text
        return found

    def _tell(self, text: str) -> str:
        self._told.append(text)
        return text

    # --- the grammar of JSON --------------------------------------------------------------------------

    def _step(self, text: str, at: int) -> int:
        """Goes on at `at`; gives where it stands then, or says that it is broken."""
        if self._mode == "string":
            plain = _PLAIN.match(text, at)
            if plain is not None:
                return self._go(plain.end() - at, at)
        character = text[at]
        if self._mode in ("number", "literal") and not self._continued(character):
            return at
        if self._mode in ("string", "escape", "number", "literal"):
            getattr(self, f"_{self._mode}")(character)
        elif character not in _SPACE:
            self._outside(character)
        return at if self._broken else self._go(1, at)

    def _go(self, count: int, at: int) -> int:
        self._length += count
        self._mark()
        return at + count

    def _mark(self) -> None:
        if self._mode in ("next", "key_or_end", "value_or_end"):
            self._safe = (self._length, "".join("}" if one == "{" else "]" for one in reversed(self._stack)))

    def _outside(self, character: str) -> None:
        """Brackets, commas, colons, and what begins a value."""
        mode = self._mode
        if mode == "begin":
            self._broken = character != "{"
            self._open("{")
        elif mode in ("key", "key_or_end") and character == '"':
            self._mode, self._key = "string", True
        elif mode == "colon" and character == ":":
            self._mode = "value"
        elif (mode == "next" and character == ",") and self._stack:
            self._mode = "key" if self._stack[-1] == "{" else "value"
        elif mode in ("next", "key_or_end", "value_or_end") and character in "}]":
            self._close(character)
        elif mode in ("value", "value_or_end"):
            self._begin_value(character)
        else:
            self._broken = True

    def _begin_value(self, character: str) -> None:
        if character == '"':
            self._mode, self._key = "string", False
        elif character in "{[":
            self._open(character)
        elif character in "tfn":
            self._mode, self._word = "literal", character
        elif character == "-" or character.isdigit():
            self._mode, self._word = "number", character
            self._broken = not character.isascii()
        else:
            self._broken = True

    def _open(self, bracket: str) -> None:
        self._stack.append(bracket)
        self._mode = "key_or_end" if bracket == "{" else "value_or_end"

    def _close(self, character: str) -> None:
        if self._stack[-1] != ("{" if character == "}" else "["):
            self._broken = True
            return
        self._stack.pop()
        self._mode = "next" if self._stack else "done"

    def _string(self, character: str) -> None:
        if character == '"':
            self._mode = "colon" if self._key else "next"
        elif character == "\\":
            self._mode, self._word = "escape", ""
        else:
            self._broken = True  # a control character

    def _escape(self, character: str) -> None:
        if not self._word:
            self._broken = character not in '"\\/bfnrtu'
        else:
            self._broken = character not in _HEX
        self._word += character
        if self._word[0] != "u" or len(self._word) == 5:
            self._mode = "string"

    def _continued(self, character: str) -> bool:
        """Whether a number or literal goes on; where it does not, it is over."""
        goes_on = character.isalnum() or (self._mode == "number" and character in "+-.")
        if not goes_on:
            self._broken = self._mode == "number" and _NUMBER.fullmatch(self._word) is None
            self._broken = self._broken or (self._mode == "literal" and self._word not in _LITERALS)
            self._mode = "next"
            self._mark()
        return goes_on

    def _number(self, character: str) -> None:
        self._word += character
        self._broken = _NUMBER_BEGUN.fullmatch(self._word) is None

    def _literal(self, character: str) -> None:
        self._word += character
        self._broken = not any(word.startswith(self._word) for word in _LITERALS)

    # --- what is no JSON ------------------------------------------------------------------------------

    def _closed(self) -> str:
        """What closes the object behind what was told of it, with the whole text as one more member."""
        member = f"{json.dumps(UNPARSED)}: {json.dumps(''.join(self._all), ensure_ascii=False)}}}"
        text = "".join(self._told)
        if not text.strip(_SPACE):
            return "{" + member
        mode, stack, word = _replayed(text)
        closing = _ending(mode, word)
        for bracket in reversed(stack[1:]):
            closing += "}" if bracket == "{" else "]"
        if len(stack) == 1 and mode in ("key", "key_or_end"):
            return member
        return f"{closing}, {member}"


def _replayed(text: str) -> tuple[str, list[str], str]:
    """Where a text that was told stands: the mode, what is open, the open word. `key` in a key's string."""
    state = Input()
    at = 0
    while at < len(text) and state._mode != "done":
        at = state._step(text, at)
    if state._mode == "done":  # its last bracket is not told
        return "next", ["{"], ""
    inside = "key " if state._key and state._mode in ("string", "escape") else ""
    return inside + state._mode, state._stack, state._word


def _ending(mode: str, word: str) -> str:
    """What makes the value whole that is open in a mode."""
    if "escape" in mode:
        rest = "0" * (5 - len(word)) if word.startswith("u") else "\\"
        return rest + _ending(mode.replace("escape", "string"), "")
    match mode:
        case "key string":
            return '": null'
        case "string":
            return '"'
        case "colon":
            return ": null"
        case "value":
            return "null"
        case "key":
            return '"": null'
        case "literal":
            return next(known for known in _LITERALS if known.startswith(word))[len(word) :]
        case "number":
            return "" if _NUMBER.fullmatch(word) else "0"
    return ""
