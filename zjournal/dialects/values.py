"""Arguments between JSON and a dialect's own form: which values are written bare, and what a bare value means.

The same table decides while streaming and at the end, so a value never changes its type on the way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from json.encoder import encode_basestring as quoted  # a JSON string, non-ASCII as it is
from typing import Any

from zjournal.dialects.base import refuse_constant

REFERENCES_MAX = 32  # `$ref`, `anyOf` and `allOf` that are followed into each other
TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
WRAPPED = "arguments"  # the one parameter that holds arguments which are no JSON object, as DeepSeek's encoder has it
NOTHING = object()  # no JSON value at all

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONSTANTS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_decoder = json.JSONDecoder(parse_constant=refuse_constant)


def loads(text: str) -> Any:
    """The JSON value, or NOTHING if the text is none."""
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError):
        return NOTHING


def is_object(text: str) -> bool:
    """Whether the text is a JSON object."""
    return isinstance(loads(text), dict)


def members(arguments: str) -> list[tuple[str, str]]:
    """The keys of a call's arguments and their values as JSON, numbers letter by letter, in the client's order.

    A string that holds a JSON object is that object (R25: else models copy the quotes). What is neither is one value,
    a string called `arguments`, so that a broken call stays sayable (O23). A key that comes twice counts once, with its
    last value, as for every JSON reader.
    """
    text = arguments if arguments.strip() else "{}"
    value = loads(text)
    if isinstance(value, str) and is_object(value):
        text, value = value, loads(value)
    if not isinstance(value, dict):
        return [(WRAPPED, quoted(arguments))]
    return list({key: printed(raw) for key, raw in split(text)}.items())


def split(text: str) -> list[tuple[str, str]]:
    """The members of a valid JSON object: keys, and values as they are written."""
    found = []
    at = _after_space(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = _decoder.raw_decode(text, at)
        start = _after_space(text, _after_space(text, at) + 1)
        _, at = _decoder.raw_decode(text, start)
        found.append((key, text[start:at]))
        at = _after_space(text, at)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def printed(raw: str) -> str:
    """A JSON value in the one spelling that models are trained on: `, ` and `: `, no escape that is not needed.

    Numbers stay as they are; so does a string with half a surrogate pair, which no other spelling can hold.
    """
    out = []
    for match in _TOKEN.finditer(raw):
        token = match.group()
        if token[0] == '"':
            value = json.loads(token)
            out.append(token if _SURROGATE.search(value) else quoted(value))
        else:
            out.append({",": ", ", ":": ": "}.get(token, token))
    return "".join(out)


def text_of(raw: str) -> str | None:
    """The text of a JSON string that can be written bare; None for other values and for half a surrogate pair."""
    value = json.loads(raw) if raw.startswith('"') else None
    return value if isinstance(value, str) and not _SURROGATE.search(value) else None


def allowed(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types that a schema lets a value have; all of them where it does not say, or says it too deep.

    Each part of the schema is looked at once, so that a client's schema costs no more than its length.
    """
    return _allowed(schema, root, {}, 0)


def _allowed(schema: Any, root: Any, known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > REFERENCES_MAX:
        return TYPES
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = TYPES  # while it is looked at, for it may refer to itself
    told = schema.get("type")
    named = [told] if isinstance(told, str) else told if isinstance(told, list) else []
    found = frozenset(name for name in named if isinstance(name, str) and name in TYPES) or TYPES
    if "number" in found:
        found |= {"integer"}
    if isinstance(schema.get("enum"), list):
        found &= frozenset().union(*map(_types, schema["enum"]))
    if "const" in schema:
        found &= _types(schema["const"])
    if isinstance(schema.get("$ref"), str):
        found &= _allowed(_referred(schema["$ref"], root), root, known, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            found &= frozenset().union(*(_allowed(one, root, known, depth + 1) for one in schema[word]))
    for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= _allowed(one, root, known, depth + 1)
    known[id(schema)] = found or TYPES
    return known[id(schema)]


def _referred(reference: str, root: Any) -> Any:
    """The schema that a `$ref` within the same document means; None if there is none."""
    if not reference.startswith("#"):
        return None
    found = root
    for step in reference[1:].split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _types(value: Any) -> frozenset[str]:
    """The JSON types of a value. Whether a number is whole is for validation to say, for `1.0` is."""
    names: dict[type, str] = {bool: "boolean", str: "string", dict: "object", list: "array", type(None): "null"}
    name = names.get(type(value))
    return frozenset((name,)) if name is not None else frozenset(("number", "integer"))


def fits(value: Any, types: frozenset[str]) -> bool:
    """Whether a JSON value is of one of the types."""
    return bool(_types(value) & types)


def meant(text: str, types: frozenset[str]) -> str:
    """A bare value as JSON.

    What may be a string is one, unless it is the JSON of another allowed type. What may not be a string is JSON;
    Python's True, False and None are taken for it, and what is no JSON at all is told as the text it is.
    """
    core = text.strip()
    value = loads(core)
    if value is not NOTHING and not isinstance(value, str) and ("string" not in types or fits(value, types)):
        return core
    if "string" in types:
        return quoted(text)
    if value is not NOTHING:
        return core
    return _CONSTANTS.get(core.lower(), quoted(text))
