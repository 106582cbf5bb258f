"""Bare strings: what a schema lets a string be, as regular expressions over the text itself.

JSON's strings are the grammar engine's own business; values that stand bare in tags are ours.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llguidance import regex_to_lark

from zjournal.dialects.fences.lark import pattern
from zjournal.dialects.fences.schema import Schema

ALTERNATIVES_MAX = 256  # ways in which a string may be right
DIGITS_MAX = 40  # before the point of a number and behind it; models go on for ever if they may

_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "email": r"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?(\.[a-zA-Z0-9-]+)+",
}


class Kept(Exception):
    """A keyword of a string that no regular expression can keep."""


class Text(msgspec.Struct, frozen=True):
    """What holds for a string: one of `words` if there are any, and all of `patterns`, between slashes of Lark."""

    words: tuple[str, ...] | None = None
    patterns: tuple[str, ...] = ()


def texts(schema: Schema, defs: Mapping[str, Schema]) -> list[Text]:
    """The strings that a schema allows, as alternatives; none: it allows no string. Raises Kept."""
    return _texts(schema, defs, ())


def _texts(schema: Schema, defs: Mapping[str, Schema], inside: tuple[str, ...]) -> list[Text]:
    if isinstance(schema, bool):
        return [Text()] if schema else []
    told = schema.get("type", "string")
    if "string" not in ([told] if isinstance(told, str) else told):
        return []
    if schema.get("minLength", 0) > schema.get("maxLength", math.inf):
        return []
    found = [Text(_words(schema), _patterns(schema))]
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in inside:
            return []
        found = _both(found, _texts(defs[name], defs, (*inside, name)))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            found = _both(found, [text for one in schema[key] for text in _texts(one, defs, inside)])
    for one in schema.get("allOf", ()):
        found = _both(found, _texts(one, defs, inside))
    return found


def _words(schema: Mapping[str, Any]) -> tuple[str, ...] | None:
    lists = [schema[key] if key == "enum" else [schema[key]] for key in ("enum", "const") if key in schema]
    if not lists:
        return None
    words = [dict.fromkeys(word for word in one if isinstance(word, str)) for one in lists]
    return tuple(word for word in words[0] if all(word in one for one in words))


def _patterns(schema: Mapping[str, Any]) -> tuple[str, ...]:
    out = []
    if "pattern" in schema:
        out.append(searched(schema["pattern"]))
    if "minLength" in schema or "maxLength" in schema:
        out.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    if schema.get("format") in FORMATS:
        out.append(FORMATS[schema["format"]])
    return tuple(out)


def _both(left: Sequence[Text], right: Sequence[Text]) -> list[Text]:
    """The alternatives that are among both."""
    if len(left) * len(right) > ALTERNATIVES_MAX:
        raise Kept("has too many alternatives")
    out = []
    for one in left:
        for two in right:
            words = [dict.fromkeys(each) for each in (one.words, two.words) if each is not None]
            common = tuple(word for word in words[0] if all(word in each for each in words)) if words else None
            out.append(Text(common, (*one.patterns, *two.patterns)))
    return out


def searched(text: str) -> str:
    """A pattern of JSON Schema, which may be found anywhere in a string, as one of Lark for all of the string.

    Raises Kept for an anchor that stands elsewhere than at the edge of a branch.
    """
    branches = []
    for branch in _branches(text):
        front = "" if branch.startswith("^") else "(?s:.*)"
        back = "" if _anchored(branch) else "(?s:.*)"
        core = branch.removeprefix("^")
        core = core[:-1] if not back else core
        if _ANCHOR.search(_CLASSES.sub("", core)):
            raise Kept("has an anchor inside")
        branches.append(f"{front}({core}){back}")
    try:
        return regex_to_lark("|".join(f"({branch})" for branch in branches), "dw")
    except ValueError as error:
        raise Kept("is no regular expression") from error


def whole(text: str) -> str:
    """A regular expression of a client's, for all of a string, as one of Lark. Raises Kept as `searched`."""
    core = text.removeprefix("^")
    core = core[:-1] if _anchored(core) else core
    if _ANCHOR.search(_CLASSES.sub("", core)):
        raise Kept("has an anchor inside")
    try:
        return regex_to_lark(f"({core})", "")
    except ValueError as error:
        raise Kept("is no regular expression") from error


_CLASSES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # what may hold characters that mean nothing there
_ANCHOR = re.compile(r"[\^$]")


def _anchored(branch: str) -> bool:
    """Whether a branch ends with `$` that is not escaped and in no class."""
    return _CLASSES.sub(lambda found: "x" * len(found.group()), branch).endswith("$")


def _branches(text: str) -> list[str]:
    """The pattern, cut where `|` stands outside of all brackets."""
    plain = _CLASSES.sub(lambda found: "x" * len(found.group()), text)
    out, depth, start = [], 0, 0
    for at, character in enumerate(plain):
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            out.append(text[start:at])
            start = at + 1
    return [*out, text[start:]]


# --- what a bare string may not be ----------------------------------------------------------------------

SPACE = r"[\s\x1c-\x1f]*"  # what Python strips
_NUMBER = r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?"
_LOOKS = {
    "null": f"null{SPACE}",
    "boolean": f"(true|false){SPACE}",
    "integer": f"{_NUMBER}{SPACE}",
    "number": f"{_NUMBER}{SPACE}",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}
_WHOLE = f"-?(0|[1-9][0-9]{{0,{DIGITS_MAX - 1}}})"
PLAIN = {
    "null": "null",
    "boolean": "(true|false)",
    "integer": _WHOLE,
    "number": rf"{_WHOLE}(\.[0-9]{{1,{DIGITS_MAX}}})?([eE][-+]?[0-9]{{1,2}})?",
}
_KINDS: dict[type, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("number", "integer"),
    float: ("number",),
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def unlike(types: frozenset[str]) -> list[str]:
    """Patterns that a bare string must not match, for it would be read as JSON of one of these types.

    Arrays and objects are of more than one terminal, so nothing may even begin like them.
    """
    return sorted({f"{SPACE}{_LOOKS[name]}" for name in types if name in _LOOKS})


def scalars(schema: Schema, defs: Mapping[str, Schema], types: frozenset[str]) -> list[str]:
    """The numbers, booleans and nulls that a schema allows, as patterns of their JSON. Raises Kept."""
    found = [_scalars(schema, defs, kind, ()) for kind in ("null", "boolean", "number") if kind in types]
    found += [_scalars(schema, defs, "integer", ())] if "integer" in types and "number" not in types else []
    return list(dict.fromkeys(one for each in found for one in each))


def _scalars(schema: Schema, defs: Mapping[str, Schema], kind: str, inside: tuple[str, ...]) -> list[str]:
    """Those of one type."""
    if isinstance(schema, bool):
        return [PLAIN[kind]] if schema else []
    told = schema.get("type", kind)
    kinds = {told} if isinstance(told, str) else set(told)
    if kind == "number" and "integer" in kinds and "number" not in kinds:
        kind = "integer"
    if kind not in kinds:
        return []
    if any(key in schema for key in _BOUNDS) and kind in ("number", "integer"):
        raise Kept("bounds a number where strings are allowed as well")
    found = [PLAIN[kind]]
    if "enum" in schema or "const" in schema:
        words = [word for word in schema.get("enum", [schema.get("const")]) if kind in _KINDS.get(type(word), ())]
        found = [pattern(json.dumps(word)) for word in words if word == schema.get("const", word)]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            found = _common(found, [each for one in schema[key] for each in _scalars(one, defs, kind, inside)])
    for one in schema.get("allOf", ()):
        found = _common(found, _scalars(one, defs, kind, inside))
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in inside:
            return []
        found = _common(found, _scalars(defs[name], defs, kind, (*inside, name)))
    return found


def _common(left: list[str], right: list[str]) -> list[str]:
    """What two lists of patterns have in common; those of a whole type hold all of its values."""
    general = set(PLAIN.values())
    if PLAIN["number"] in left or (general & set(left) and not general & set(right)):
        return right
    if PLAIN["number"] in right or (general & set(right) and not general & set(left)):
        return left
    return [one for one in left if one in right]


def folded(tag: str) -> str:
    """A tag in either letter case, as Python's `re` has it, to which some more letters are an i, a k or an s."""
    more = {"i": "ıİ", "k": "\u212a", "s": "ſ"}
    return "".join(f"[{c}{c.upper()}{more.get(c, '')}]" if c.isalpha() else pattern(c) for c in tag.lower())
