"""A client's JSON Schema as a fence can keep it: keywords that cannot be kept are left out and told, with their path.

What is left is weaker than the client's schema or equal to it, with one exception: objects that list their properties
have no others, unless the schema says so itself. References are resolved, so the result stands alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from zjournal.dialects.fences.costs import Costs
from zjournal.dialects.values import TYPES
from zjournal.errors import BadRequest

DEPTH_MAX = 64  # schemas in each other
NODES_MAX = 20_000  # schemas of one request
MEMBERS_MAX = 512  # of one object, alternatives, or places of a tuple: the engine looks at all for each token
PATTERNS_MAX = 4  # that hold for one string: the engine's work doubles with each, and no limit of its own ends it
SAME_MAX = 512  # schemas that hold for one value, each counted as often as it is referred to
MULTIPLE_MAX = 1_000  # the engine counts remainders
WORD_CHARACTERS_MAX = 16_384  # of one value of an enumeration: the engine makes some objects for each

Schema = dict[str, Any] | bool

# Those that the grammar engine knows; to the standard, others say nothing.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_REFUSED = (
    *("not", "if", "contains", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
)  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_OPEN = (*_LISTS[:3], "$ref", "patternProperties", "additionalProperties", "unevaluatedProperties")
_SAME = ("allOf", "anyOf", "oneOf", "$ref")  # what holds for the same value
_LEFT_OUT = "cannot be kept by a grammar"


class Problem(msgspec.Struct, frozen=True):
    """A keyword that is left out: its JSON path, and why as half a sentence."""

    path: str
    why: str

    @property
    def text(self) -> str:
        """A sentence for a person."""
        return f"`{self.path}` {self.why}."


class Reader:
    """Reads schemas of one document. `defs` are what the schemas it returns refer to."""

    def __init__(self, root: Any, path: str, costs: Costs | None = None) -> None:
        """`costs`: what is known of the patterns of the same request."""
        self.defs: dict[str, Schema] = {}
        self.problems: list[Problem] = []
        self._root, self._path = root, path
        self._costs = costs or Costs()
        self._names: dict[tuple[str, bool], str] = {}
        self._left = NODES_MAX
        self._weights: dict[str, tuple[int, int]] = {}  # of `defs`, see _weight

    def read(self, schema: Any, path: str, shared: bool = False, depth: int = 0) -> Schema:
        """The schema as it can be kept. `shared`: others hold for the same value. Raises BadRequest past the limits."""
        self._left -= 1
        if depth > DEPTH_MAX or self._left < 0:
            raise BadRequest(f"`{path}`: the schema is nested too deep or too long.", param=path)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self._problem(path, "is not a schema")
            return True
        out: dict[str, Any] = {}
        self._scalars(schema, path, out)
        shared_here = shared or sum(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref", "properties")) > 1
        self._nested(schema, path, out, shared_here, depth + 1)
        if isinstance(schema.get("$ref"), str):
            self._reference(schema["$ref"], f"{path}.$ref", out, shared_here, depth + 1)
        if "properties" in out and not shared and not any(key in schema for key in _OPEN):
            out["additionalProperties"] = False
        self._limit(out, path)
        return out or True

    def _limit(self, out: dict[str, Any], path: str) -> None:
        """Leaves out what no limit of the engine's would end."""
        for key in (*_LISTS, *_MAPS, "required"):
            if len(out.get(key, ())) > MEMBERS_MAX:
                self._problem(f"{path}.{key}", f"has more than {MEMBERS_MAX} members")
                del out[key]
                out.pop("additionalProperties", None)
        self._tried(out, path)
        multiple = out.get("multipleOf", 1)
        if isinstance(multiple, int) and not 0 < multiple <= MULTIPLE_MAX:
            self._problem(f"{path}.multipleOf", f"is not from 1 to {MULTIPLE_MAX}")
            del out["multipleOf"]
        for key in _SAME:
            patterns, schemas = self._weight(out)
            if key in out and (patterns > PATTERNS_MAX or schemas > SAME_MAX):
                why = f"{PATTERNS_MAX} patterns" if patterns > PATTERNS_MAX else f"{SAME_MAX} schemas"
                self._problem(f"{path}.{key}", f"lays more than {why} on one value")
                del out[key]

    def _tried(self, out: dict[str, Any], path: str) -> None:
        """Leaves out patterns and values that would cost the engine too much."""
        for key in ("pattern", "patternProperties"):
            patterns = [out[key]] if isinstance(out.get(key), str) else out.get(key, ())
            why = next(filter(None, (self._costs.fault(one) for one in patterns)), "")
            if why:
                self._problem(f"{path}.{key}", why)
                del out[key]
                if key == "patternProperties":
                    out.pop("additionalProperties", None)
        for key in ("enum", "const"):
            if key in out and _long(out[key] if key == "enum" else [out[key]]):
                self._problem(f"{path}.{key}", f"has a value of more than {WORD_CHARACTERS_MAX} characters")
                del out[key]

    def _weight(self, schema: Schema) -> tuple[int, int]:
        """How many patterns hold for one string at most, and how many schemas for one value in all."""
        if isinstance(schema, bool):
            return 0, 1
        patterns, schemas = self._weights.get(schema.get("$ref", "").rpartition("/")[2], (0, 0))
        patterns, schemas = patterns + ("pattern" in schema), schemas + 1
        for key in _SAME[:3]:
            inner = [self._weight(one) for one in schema.get(key, ())]
            patterns += (sum if key == "allOf" else max)([0, *(one for one, _ in inner)])
            schemas += sum(one for _, one in inner)
        return patterns, schemas

    def _problem(self, path: str, why: str = _LEFT_OUT) -> None:
        self.problems.append(Problem(path, why))

    def _scalars(self, schema: Mapping[str, Any], path: str, out: dict[str, Any]) -> None:
        """The keywords that hold no schema."""
        told = schema.get("type")
        if told is not None:
            named = [told] if isinstance(told, str) else told
            if isinstance(named, list) and named and all(isinstance(one, str) and one in TYPES for one in named):
                out["type"] = told
            else:
                self._problem(f"{path}.type", f"is {json.dumps(told)[:80]}, which is no type of JSON Schema")
        if "const" in schema:
            out["const"] = schema["const"]
        self._typed(schema, path, out, ("enum", "required"), list)
        self._typed(schema, path, out, ("pattern",), str)
        self._typed(schema, path, out, _COUNTS, int)
        for key in _NUMBERS:  # the first drafts had booleans here
            self._typed(schema, path, out, (key,), (int, float))
        if not all(isinstance(one, str) for one in out.get("required", ())):
            self._problem(f"{path}.required", "is not a list of names")
            del out["required"]
        if schema.get("format") in FORMATS:
            out["format"] = schema["format"]
        for key in _REFUSED:
            if key in schema:
                self._problem(f"{path}.{key}")
        if schema.get("uniqueItems"):
            self._problem(f"{path}.uniqueItems")

    def _typed(
        self, schema: Mapping[str, Any], path: str, out: dict[str, Any], keys: tuple[str, ...], kind: Any
    ) -> None:
        for key in keys:
            value = schema.get(key)
            if isinstance(value, kind) and not isinstance(value, bool):
                out[key] = value
            elif value is not None:
                self._problem(f"{path}.{key}", "is of the wrong type")

    def _nested(self, schema: Mapping[str, Any], path: str, out: dict[str, Any], shared: bool, depth: int) -> None:
        """The keywords that hold schemas."""
        tuple_items = isinstance(schema.get("items"), list)  # as the drafts before 2020 have it
        for key in _LISTS:
            value = schema.get("items") if key == "prefixItems" and tuple_items else schema.get(key)
            if value is None:
                continue
            at = f"{path}.items" if key == "prefixItems" and tuple_items else f"{path}.{key}"
            if not isinstance(value, list) or not value:
                self._problem(at, "is not a list of schemas")
                continue
            beside = key != "prefixItems" and (shared or (key == "allOf" and len(value) > 1))
            out[key] = [self.read(one, f"{at}[{n}]", beside, depth) for n, one in enumerate(value)]
        for key in _MAPS:
            value = schema.get(key)
            if isinstance(value, Mapping):
                out[key] = {name: self.read(one, f"{path}.{key}.{name}", False, depth) for name, one in value.items()}
            elif value is not None:
                self._problem(f"{path}.{key}", "is not an object of schemas")
        if "additionalProperties" in schema:
            out["additionalProperties"] = self.read(
                schema["additionalProperties"], f"{path}.additionalProperties", False, depth
            )
        rest = "additionalItems" if tuple_items else "items"
        if rest in schema:
            out["items"] = self.read(schema[rest], f"{path}.{rest}", False, depth)

    def _reference(self, reference: str, path: str, out: dict[str, Any], shared: bool, depth: int) -> None:
        name = self._names.get((reference, shared))
        if name is None:
            found = referred(reference, self._root)
            if found is None:
                self._problem(path, f"refers to {reference[:80]!r}, which is not in the same schema")
                return
            name = self._names[reference, shared] = f"d{len(self._names)}"
            at = self._path + "".join(f".{step}" for step in _steps(reference))
            self.defs[name] = self.read(found, at, shared, depth)
            self._weights[name] = self._weight(self.defs[name])
        out["$ref"] = f"#/$defs/{name}"


def _long(values: list[Any]) -> bool:
    """Whether one is too long; of lists and objects the JSON counts, which is one text to the engine too."""
    return any(
        len(one if isinstance(one, str) else json.dumps(one)) > WORD_CHARACTERS_MAX
        for one in values
        if isinstance(one, (str, list, dict))
    )


def referred(reference: str, root: Any) -> Any:
    """The schema that a reference within the same document means; None if there is none."""
    if not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    found = root
    for step in _steps(reference):
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found if isinstance(found, (Mapping, bool)) else None


def _steps(reference: str) -> list[str]:
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference[1:].split("/")[1:]]


def endings(defs: Mapping[str, Schema]) -> dict[str, bool]:
    """Which definitions have a value that ends; `{"$ref": "#"}` has none."""
    found = dict.fromkeys(defs, False)
    while True:
        more = {name: found[name] or ends(schema, found) for name, schema in defs.items()}
        if more == found:
            return found
        found = more


def ends(schema: Schema, defs: Mapping[str, bool]) -> bool:
    """Whether some value of the schema ends, as far as nesting tells. `defs`: what is known of the definitions."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and not defs[schema["$ref"].rpartition("/")[2]]:
        return False
    if not all(ends(one, defs) for one in schema.get("allOf", ())):
        return False
    if any(key in schema and not any(ends(one, defs) for one in schema[key]) for key in ("anyOf", "oneOf")):
        return False
    told = schema.get("type", list(TYPES))
    kinds = {told} if isinstance(told, str) else set(told)
    if kinds - {"object", "array"}:
        return True
    properties = schema.get("properties", {})
    whole = all(ends(properties.get(name, True), defs) for name in schema.get("required", ()))
    if "object" in kinds and whole:
        return True
    least = max(0, schema.get("minItems", 0))
    items = [*schema.get("prefixItems", ()), schema.get("items", True)][:least]  # what comes behind is as the last
    return "array" in kinds and all(ends(one, defs) for one in items)


def parts(schema: Any, path: str, depth: int = 0) -> Iterator[tuple[Any, str]]:
    """A client's schema and all schemas in it with their paths, inner ones first."""
    if not isinstance(schema, Mapping) or depth > DEPTH_MAX:
        return
    for key, value in schema.items():
        if isinstance(value, Mapping) and key in (*_MAPS, "$defs", "definitions"):
            for name, one in value.items():
                yield from parts(one, f"{path}.{key}.{name}", depth + 1)
        elif isinstance(value, list) and key in (*_LISTS, "items"):
            for n, one in enumerate(value):
                yield from parts(one, f"{path}.{key}[{n}]", depth + 1)
        elif key in ("items", "additionalItems", "additionalProperties"):
            yield from parts(value, f"{path}.{key}", depth + 1)
    yield schema, path
