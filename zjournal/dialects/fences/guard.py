"""Schemas whose strings hold no tag: for values and answers in JSON where the dialect's tags are ordinary text.

A parser that looks for a text does not know that it stands in a JSON string. The grammar engine has no complement
inside JSON, so what is left of all strings is spelled out: the tags begin with the only `<` in them, which makes that
short.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zjournal.dialects.fences.lark import pattern
from zjournal.dialects.fences.schema import Schema
from zjournal.dialects.values import TYPES

_HELD = ("anyOf", "oneOf", "allOf", "$ref")


def guarded(schema: Schema, defs: Mapping[str, Schema], tags: Sequence[str]) -> tuple[Schema, dict[str, Schema]]:
    """The schema and its definitions, without the tags in strings, in either letter case."""
    guard = _Guard(tags, f"d{len(defs)}")
    found = {name: guard.of(one) for name, one in defs.items()}
    return guard.of(schema), {**found, guard.free: guard.anything()}


class _Guard:
    def __init__(self, tags: Sequence[str], free: str) -> None:
        self._tags = [tag.lower() for tag in tags]
        self._patterns = [{"pattern": without(tag)} for tag in self._tags]
        self.free = free

    def anything(self) -> dict[str, Any]:
        """The definition of any value."""
        return self._ruled({"type": sorted(TYPES - {"integer"})}, TYPES)

    def of(self, schema: Schema) -> Schema:
        if schema is True:
            return {"$ref": f"#/$defs/{self.free}"}
        if schema is False:
            return False
        out = dict(schema)
        for key in ("properties", "patternProperties"):
            if key in out:
                out[key] = {name: self.of(one) for name, one in out[key].items()}
        for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if key in out:
                out[key] = [self.of(one) for one in out[key]]
        for key in ("items", "additionalProperties"):
            if key in out:
                out[key] = self.of(out[key])
        if "enum" in out:
            out["enum"] = [value for value in out["enum"] if not self._holds(value)]
        if "const" in out and self._holds(out["const"]):
            return False
        told = out.get("type")
        if "enum" in out or "const" in out or (told is None and any(key in out for key in _HELD)):
            return out
        return self._ruled(out, frozenset([told] if isinstance(told, str) else TYPES if told is None else told))

    def _ruled(self, out: dict[str, Any], kinds: frozenset[str]) -> dict[str, Any]:
        """What a schema that names no values lets in is guarded as well."""
        free = {"$ref": f"#/$defs/{self.free}"}
        if "string" in kinds:
            out["allOf"] = [*out.get("allOf", ()), *self._patterns]
        if "array" in kinds:
            out.setdefault("items", free)
        if "object" in kinds and "additionalProperties" not in out:
            if "properties" in out or "patternProperties" in out or "required" in out:
                out["additionalProperties"] = free
            else:
                out |= {"patternProperties": {self._patterns[0]["pattern"]: free}, "additionalProperties": False}
        return out

    def _holds(self, value: Any) -> bool:
        text = json.dumps(value, ensure_ascii=False).lower()
        return any(tag in text for tag in self._tags)


def without(tag: str) -> str:
    """A pattern of all strings that do not hold a tag, in either letter case. The tag begins with its only `<`."""
    assert tag.startswith("<") and "<" not in tag[1:], tag
    letters = [f"{c.lower()}{c.upper()}" if c.isalpha() else pattern(c) for c in tag]
    starts = ["".join(f"[{letter}]" for letter in letters[1:at]) for at in range(1, len(tag))]
    again = "|".join(f"{start}<" for start in starts)
    other = "|".join(f"{start}[^<{letters[at + 1]}]" for at, start in enumerate(starts))
    halves = "|".join(starts[1:])
    return f"^([^<]|<({again})*({other}))*(<({again})*({halves})?)?$"
