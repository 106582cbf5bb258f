"""JSON of a schema as rules of our own, down to the leaves, which are the grammar engine's.

So nested objects take their members in any order as well, numbers end, and equal parts are written once. What has no
rule here (`allOf`, tuples, patterns of keys, lists of values) is left to the engine as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zjournal.dialects.base import to_json
from zjournal.dialects.fences import texts
from zjournal.dialects.fences.closing import BYTES, PARTS
from zjournal.dialects.fences.guard import guarded
from zjournal.dialects.fences.lark import Writer, pattern, standing
from zjournal.dialects.fences.schema import Schema

BITS = 64
KEY_CHARACTERS_MAX = 64  # of a member that the schema does not name
INTEGER_MAX = 2**63 - 1  # where a schema bounds an integer on one side only
# What a letter of a JSON string is, behind `[^` and perhaps letters that it is not, with the escapes that are needed.
_LETTER = r'"\\\x00-\x1F\x7F]|\\(["\\bfnrt]|u00([01][0-9a-fA-F]|7[fF])))'
_KINDS = ("object", "array", "string", "number", "boolean", "null")
_MIXED = ("enum", "const", "allOf", "oneOf", "anyOf", "$ref")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

Member = tuple[str, str, bool]  # key, the rule of its value, whether it is required


class Trees:
    """Writes JSON values into a grammar."""

    def __init__(self, writer: Writer, hidden: Sequence[str] = (), ordered: bool = False) -> None:
        """`hidden`: tags that no string may hold. `ordered`: members come in the order of the schema."""
        self._writer, self._hidden, self._in_order = writer, tuple(hidden), ordered
        self._names: dict[tuple[int, str], str] = {}
        self._alive: list[Mapping[str, Schema]] = []

    def of(self, schema: Schema, defs: Mapping[str, Schema]) -> str:
        """The name of a rule for the values of a schema."""
        text = json.dumps(schema)
        key = id(defs) if '"$ref"' in text else 0, text
        if key not in self._names:
            name = self._names[key] = self._writer.fresh("v")
            self._alive.append(defs)  # so that no other has its id
            self._writer.raw(name, self._body(schema, defs))
        return self._names[key]

    def whole(self, schema: Schema, defs: Mapping[str, Schema]) -> str:
        """A rule that is the engine's alone."""
        if self._hidden:
            schema, defs = guarded(schema, defs, self._hidden)
        return self._writer.json(standing(schema, defs))

    def _body(self, schema: Schema, defs: Mapping[str, Schema]) -> str:
        if isinstance(schema, bool):
            return " | ".join(self.of({"type": kind}, defs) for kind in _KINDS) if schema else self.whole(False, {})
        mixed = [key for key in _MIXED if key in schema]
        if mixed == ["$ref"] and len(schema) == 1:
            return self.of(defs[schema["$ref"].rpartition("/")[2]], defs)
        if mixed == ["anyOf"] and len(schema) == 1:
            ways = [self.of(one, defs) for one in schema["anyOf"] if one is not False]
            return " | ".join(ways) or self.whole(False, {})
        if mixed:
            return self.whole(schema, defs)
        told = schema.get("type", list(_KINDS))
        if not isinstance(told, str):
            return " | ".join(self.of({**schema, "type": kind}, defs) for kind in told)
        if told in ("null", "boolean"):
            return '"null"' if told == "null" else '"true" | "false"'
        if told in ("integer", "number"):
            return self._number(told, {key: schema[key] for key in _NUMBERS if key in schema})
        if told == "string":
            kept = ("pattern", "minLength", "maxLength", "format")
            return self._string({"type": told, **{key: schema[key] for key in kept if key in schema}})
        return self._array(schema, defs) if told == "array" else self._object(schema, defs)

    def _number(self, kind: str, bounds: dict[str, Any]) -> str:
        if not bounds:
            return self._writer.terminal(f"/{texts.PLAIN[kind]}/")
        if kind == "integer" and "multipleOf" not in bounds:
            low, high = ("minimum" in bounds or "exclusiveMinimum" in bounds), "maximum" in bounds
            high = high or "exclusiveMaximum" in bounds
            if low and not high and max(bounds.values()) < INTEGER_MAX:
                bounds["maximum"] = INTEGER_MAX
            if high and not low and min(bounds.values()) > -INTEGER_MAX:
                bounds["minimum"] = -INTEGER_MAX
        return self._writer.json({"type": kind, **bounds})

    def _string(self, schema: dict[str, Any]) -> str:
        """Strings. Where tags are hidden and letters counted, the engine would take milliseconds for each token.

        So what holds no `<` stands apart, and most of what holds one is told once more, as in closing.py.
        """
        most = schema.get("maxLength")
        least = max(schema.get("minLength", 0), 0)
        if not self._hidden or most is None or least > most or "pattern" in schema or "format" in schema:
            return self.whole(schema, {})
        plain, most = f"([^<{_LETTER}", max(most, 0)
        ways = [f'/"{plain}{{{least},{most}}}"/']
        tags = " & ".join(f"~({BYTES} /{texts.folded(tag)}/ {BYTES})" for tag in self._hidden)
        ways.append(rf'/"([^{_LETTER}{{{least},{most}}}"/ & /[^<]*<(?s:.*)/ & {tags}')
        first, rest = most // PARTS, most - most // PARTS - 2
        if all(tag.startswith("</") for tag in self._hidden) and first > least:
            ways.append(rf'/"{plain}{{{least},{first}}}<([^<\x2f{_LETTER}{plain}{{0,{rest}}}"/')
        return " | ".join(map(self._writer.terminal, ways))

    def _array(self, schema: dict[str, Any], defs: Mapping[str, Schema]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        items = schema.get("items", True)
        if "prefixItems" in schema or (most is not None and most < least):
            return self.whole(schema, defs)
        w = self._writer
        empty = w.terminal(rf"/\[{w.white}\]/")
        if most == 0 or items is False:
            return empty if not least else self.whole(False, {})
        one = self.of(items, defs)
        more = f"({w.comma} {one}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        filled = f"{w.bracket} {one} {more} {w.unbracket}"
        return filled if least else f"{empty} | {filled}"

    # --- objects --------------------------------------------------------------------------------------------

    def _object(self, schema: dict[str, Any], defs: Mapping[str, Schema]) -> str:
        if any(key in schema for key in ("patternProperties", "minProperties", "maxProperties")):
            return self.whole(schema, defs)
        other = schema.get("additionalProperties", True)
        properties = {**dict.fromkeys(schema.get("required", ()), other), **schema.get("properties", {})}
        required = list(dict.fromkeys(schema.get("required", ())))
        if any(properties[key] is False for key in required):
            return self.whole(False, {})
        first = [] if self._in_order else required
        keys = dict.fromkeys([*first, *schema.get("properties", ()), *required])
        said = [key for key in keys if properties[key] is not False and not self._holds(key)]
        members = [(key, self.of(properties[key], defs), key in required) for key in said]
        return self.members(members, None if other is False else self.of(other, defs))

    def _holds(self, key: str) -> bool:
        return any(tag in key.lower() for tag in self._hidden)

    def members(self, members: Sequence[Member], other: str | None) -> str:
        """An expression for an object: each of these once; the required ones must come.

        They stand first in the list, unless members come in its order.
        `other`: a rule for the values of members with other keys, which may come as often as they like.
        """
        w = self._writer
        told = [f"{w.text('', to_json(key))} {w.colon} {value}" for key, value, _ in members]
        required = sum(one for *_, one in members)
        extra = [f"{self._key([key for key, *_ in members])} {w.colon} {other}"] if other else []
        if not told and not extra:
            return w.empty
        if told and (len(told) > BITS or self._in_order):
            return self._ordered(told, extra, [one for *_, one in members])
        first, more = w.fresh("f"), w.fresh("m")
        if not told:
            w.raw(more, f"{w.close} | {w.comma} {extra[0]} {more}")
            return f"({w.empty} | {w.open} {extra[0]} {more})"
        end = f"{w.close}{all_of(required)}"
        w.parametric(first, [end, *once(told, "", more), *[f"{one} {more}::_" for one in extra]])
        comma = f"{w.comma} "
        w.parametric(more, [end, *once(told, comma, more), *[f"{comma}{one} {more}::_" for one in extra]])
        return f"{w.open} {first}::0x0"

    def _key(self, taken: Sequence[str]) -> str:
        """A terminal for the key of another member, in the one spelling that has no escape without need."""
        parts = [rf'/"([^"\\\x00-\x1f]|\\["\\bfnrt]){{0,{KEY_CHARACTERS_MAX}}}"/']
        parts += ["~/" + "|".join(pattern(to_json(key)) for key in taken) + "/"] if taken else []
        parts += [f"~/(?s:.*)(?i:{pattern(tag)})(?s:.*)/" for tag in self._hidden]
        return self._writer.terminal(" & ".join(parts))

    def _ordered(self, told: Sequence[str], extra: list[str], required: Sequence[bool]) -> str:
        """An object whose members come in one order.

        Halves of halves, so that rules are nested by the logarithm of their number: the engine walks them by recursion.
        """
        w = self._writer
        some = self._some(told, required)
        if extra:
            others = w.fresh("o")
            w.raw(others, f'"" | {w.comma} {extra[0]} {others}')
            some = f"({some} {others} | {extra[0]} {others})" if not any(required) else f"{some} {others}"
        filled = f"{w.open} {some} {w.close}"
        return filled if any(required) else f"({filled} | {w.empty})"

    def _some(self, told: Sequence[str], required: Sequence[bool]) -> str:
        """A rule for one or more of these members in their order, all required ones among them."""
        if len(told) == 1:
            return told[0]
        w, half = self._writer, len(told) // 2
        left, right = self._some(told[:half], required[:half]), self._some(told[half:], required[half:])
        both = f"{left} {w.comma} {right}" if any(required[half:]) else f"{left} ({w.comma} {right})?"
        name = w.fresh("s")
        w.raw(name, both if any(required[:half]) else f"{both} | {right}")
        return name


def all_of(required: int) -> str:
    """The condition that the required ones, which have the first bits, have come."""
    return f" %if is_ones([0:{required}])" if required else ""


def once(told: Sequence[str], before: str, rest: str) -> list[str]:
    """Alternatives of a rule over bits: each of these, if it has not come."""
    return [f"{before}{one} {rest}::set_bit({bit}) %if bit_clear({bit})" for bit, one in enumerate(told)]
