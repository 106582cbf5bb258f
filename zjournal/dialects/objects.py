"""Calls as JSON objects: `{"name": …, "arguments": {…}}`, in tags (Hermes, Qwen) or at the turn's beginning (Llama 3).

The arguments are told as the model writes them, byte for byte, except that control characters in strings, which JSON
forbids and models write, are told as their escapes. Where `name` stands first, they are told as they come; otherwise
once the object is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from zjournal import ask
from zjournal.dialects.scan import HEAD_CHARACTERS_MAX, SPACE_CHARACTERS_MAX, Scanner, Shape, half
from zjournal.dialects.values import NOTHING, is_object, loads, quoted, split

NAMES = ("name",)
ARGUMENTS = ("arguments", "parameters")  # models mix the two up
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:'
)
_CUT = re.compile(  # the same, ended somewhere behind the name
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")\s*'
    r'(?:,\s*(?:"(?P<key>[a-z]*)(?:"\s*)?)?)?'
)
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"(?P<key>[^"\\]*)"\s*:|(?P<other>[^\s"]))')
_CONTROL = re.compile(r"[\x00-\x1f]")
_SCALAR = re.compile(r"[^\s,{}\[\]\"<\ud800-\udfff]+(?=[\s,}\]<\ud800-\udfff])")


class Nesting:
    """Finds the end of a JSON value that comes in parts."""

    def __init__(self, breaks: str, depth: int = 0) -> None:
        """`breaks`: marks of tags, at which a value ends that is not whole. `depth`: objects that are open already."""
        self._inside = re.compile(rf'[^"\\{breaks}]+')
        self._outside = re.compile(rf'[^"{{}}\[\]<{breaks}]+')
        self._depth = depth
        self._string = False
        self._escaped = False

    def feed(self, text: str, at: int = 0) -> tuple[int, str, bool | None]:
        """Goes on from `at`: how far, the text as valid JSON has it, and whether the value is whole; None: broken."""
        out = []
        while at < len(text):
            if self._escaped:
                self._escaped = False
                out.append(text[at])
                at += 1
                continue
            if found := (self._inside if self._string else self._outside).match(text, at):
                part = found.group()
                if self._string and _CONTROL.search(part):
                    part = quoted(part)[1:-1]
                out.append(part)
                at = found.end()
                continue
            character = text[at]
            if character in '"\\{}[]':
                self._turn(character)
                out.append(character)
                at += 1
                if not self._depth and not self._string:
                    return at, "".join(out), True
            else:
                return at, "".join(out), None
        return at, "".join(out), False

    def _turn(self, character: str) -> None:
        if character == '"':
            self._string = not self._string
        elif character == "\\":
            self._escaped = True
        else:
            self._depth += 1 if character in "{[" else -1


class ObjectParser(Scanner):
    """The parser of such a dialect. `opens`, `closes`: patterns of its tags, or nothing where it has none."""

    def __init__(self, shape: Shape, tools: Sequence[ask.ToolSpec], closing: str = "") -> None:
        super().__init__(shape, tools)
        literals = shape.literals
        self._opening = re.compile(shape.opening)
        self._closing = re.compile(literals.pattern(closing) if closing else "(?!)")
        self._closing_text = literals.inner(closing).lower() if closing else ""
        tags = (*(tag for tag in literals.marks.values() if self._opening.match(tag) or self._closing.match(tag)),)
        self._breaks = "".join(tags)
        self._strict = False  # whether only a known name makes a call
        self._nesting = Nesting(self._breaks)
        self._scanned = 0
        self._value: list[str] = []

    def _opened(self) -> bool:
        found = self._opening.match(self._text)
        assert found is not None
        self._raw += found.group()
        self._text = self._text[found.end() :]
        return self._expect()

    def _expect(self) -> bool:
        """An object begins, after white space."""
        self._nesting, self._scanned = Nesting(self._breaks), 0
        self._step = self._named
        return True

    def _named(self) -> bool:
        """In an object whose name is not told yet."""
        text = self._text
        if len(text) - len(text.lstrip()) > SPACE_CHARACTERS_MAX:
            return self._not_a_call()
        found = _HEAD.match(text, 0, HEAD_CHARACTERS_MAX)
        if found is not None:
            name = loads(found["name"])
            if not isinstance(name, str) or (self._strict and name not in self._tools):
                return self._not_a_call()
            self._start(name)
            self._text = text[found.end() :]
            self._value = []
            self._nesting = Nesting(self._breaks)
            self._step = self._argued
            return True
        core = text.lstrip()
        if not core:
            return self._final and self._not_a_call()
        first = _FIRST_KEY.match(text, 0, HEAD_CHARACTERS_MAX)
        if core[0] != "{" or (first is not None and first["key"] not in (*NAMES, *ARGUMENTS, "type")):
            return self._not_a_call()
        return (self._final and self._cut()) or self._whole_object()

    def _cut(self) -> bool:
        """At the end of the output: a call of which the name is whole and nothing else; without a tag that is text."""
        if self._strict or len(self._text) > HEAD_CHARACTERS_MAX:
            return False
        found = _CUT.fullmatch(self._text)
        if found is None or not any(key.startswith(found["key"] or "") for key in ARGUMENTS):
            return False
        name = loads(found["name"])
        if not isinstance(name, str):
            return False
        self._start(name)
        self._text = ""
        self._value = []
        self._step = self._argued
        return True

    def _whole_object(self) -> bool:
        """Waits for the end of an object whose name does not stand first."""
        text = self._text
        at = self._scanned or len(text) - len(text.lstrip())
        end, part, whole = self._nesting.feed(text, at)
        self._scanned = end
        self._value.append(part)
        if whole is False and not self._final:
            return False
        value = loads("".join(self._value)) if whole else NOTHING
        parts = dict(split("".join(self._value))) if isinstance(value, dict) else {}
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or not name or (self._strict and name not in self._tools):
            return self._not_a_call()
        others = parts.keys() - {*NAMES, *ARGUMENTS, "type"}
        if others and self._strict:
            return self._not_a_call()
        self._start(name)
        if others:
            self._fault("the object has other keys than name and arguments")
        self._argue(self._sound(next((parts[key] for key in ARGUMENTS if key in parts), "{}")))
        self._text = text[end:]
        self._step = self._closed
        return True

    def _not_a_call(self) -> bool:
        """No name can be read: all of it is text, as the model wrote it."""
        self._value = []
        self._tell(self._raw + self._text[:1])
        self._raw, self._text = "", self._text[1:]
        self._refused = True
        self._step = self._said
        return True

    # --- arguments ------------------------------------------------------------------------------------------

    def _argued(self) -> bool:
        """In the arguments: an object is told as it comes, anything else once it is whole."""
        if not self._value:
            self._text = self._text.lstrip()
            if not self._text:
                return False
            if self._text[0] not in '{["':
                return self._scalar()
        text = self._text
        first = self._value[0][0] if self._value else text[0]
        end, part, whole = self._nesting.feed(text)
        self._text = text[end:]
        self._value.append(part)
        if first == "{":
            self._argue(part)
        if whole is False:
            if self._final and first != "{":
                self._argue("".join(self._value))
            return False
        value = "".join(self._value)
        if first == "{":
            if not is_object(value):
                self._fault("the arguments are not JSON")
        else:
            self._argue(self._sound(value))
        self._step = self._object_end
        return True

    def _scalar(self) -> bool:
        found = _SCALAR.match(self._text, 0, HEAD_CHARACTERS_MAX)
        if (
            found is None
            and len(self._text) < HEAD_CHARACTERS_MAX
            and self._text[0] not in ",}]<"
            and self._text[0] not in self._breaks
            and not self._final
        ):
            return False
        end = found.end() if found is not None else 0
        if found is None and self._text[0] not in ",}]<" and self._text[0] not in self._breaks:
            end = min(len(self._text), HEAD_CHARACTERS_MAX)  # cut, or no scalar at all
        self._argue(self._sound(self._text[:end]))
        self._text = self._text[end:]
        self._step = self._object_end
        return True

    def _sound(self, raw: str) -> str:
        """Arguments as an object: a string that holds one is the one in it, null is an empty one."""
        value = loads(raw)
        if isinstance(value, str) and is_object(value):
            return value
        if value is None:
            return "{}"
        if not isinstance(value, dict):
            self._fault("the arguments are not a JSON object")
        return raw

    def _object_end(self) -> bool:
        """Behind the arguments, inside the object."""
        text = self._text.lstrip()
        self._text = text
        if not text:
            return False
        if text[0] == ",":
            self._fault("the object has other keys than name and arguments")
            self._nesting = Nesting(self._breaks, depth=1)
            self._step = self._rest
        elif text[0] == "}":
            self._text = text[1:]
            self._step = self._closed
        elif not self._final and half(text, (self._closing_text,)) == 0:
            return False
        else:
            self._fault("the object is not closed")
            self._step = self._closed
        return True

    def _rest(self) -> bool:
        """Other members behind the arguments, which are not told."""
        end, _, whole = self._nesting.feed(self._text)
        self._text = self._text[end:]
        if whole is False:
            return False
        if whole is None:
            self._fault("the object is not closed")
        self._step = self._closed
        return True

    def _closed(self) -> bool:
        """Behind the object: its closing tag, perhaps after braces too many; or what shows that there is none."""
        text = self._text.lstrip()
        far = len(self._text) - len(text) > SPACE_CHARACTERS_MAX  # then what comes belongs to no call
        if text and text[0] in "}]" and not far:
            self._fault("there are more closing braces than opening ones")
            self._text = text[1:]
            return True
        found = None if far else self._closing.match(text)
        if found is not None:
            self._text = text[found.end() :]
        elif not (self._final or far) and (not text or half(text, (self._closing_text,)) == 0):
            return False
        self._value = []
        self._finish()
        self._raw = ""
        if self._closing_text and text.startswith("{") and not far:
            return self._expect()  # a second object between the same tags; no text, whatever it is
        self._step = self._between
        return True


def name_json(name: str) -> str:
    """A tool's name as JSON."""
    return json.dumps(name, ensure_ascii=False)
