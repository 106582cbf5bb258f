"""The arguments of a tool: its parameters one by one, each with the schema that a fence can keep of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from zjournal import ask
from zjournal.dialects.base import parse_json
from zjournal.dialects.fences.costs import Costs
from zjournal.dialects.fences.schema import MEMBERS_MAX, Problem, Reader, Schema, endings, ends
from zjournal.dialects.values import TYPES, allowed
from zjournal.errors import BadRequest

# Of the schema of all arguments. Others that matter are left out and told.
_KEPT = frozenset(("type", "properties", "required", "additionalProperties"))
_WHOLE = ("anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties", "enum", "const", "$ref")
INPUT = "input"  # the parameter of a custom tool


class Parameter(msgspec.Struct, frozen=True):
    """One parameter. `types` as the dialect's parser has them, which goes by the client's own schema."""

    key: str
    schema: Schema
    required: bool
    types: frozenset[str]
    path: str
    origin: Any = True  # the client's schema


class Arguments(msgspec.Struct, frozen=True):
    """`parameters`: the required ones first, else in the client's order. `extra`: what a key of another name may hold.

    None: there are no others.
    """

    tool: ask.ToolSpec
    parameters: tuple[Parameter, ...]
    extra: Parameter | None
    defs: dict[str, Schema]
    root: Any
    problems: tuple[Problem, ...]

    @property
    def required(self) -> int:
        return sum(one.required for one in self.parameters)


def read(tool: ask.ToolSpec, loose: frozenset[str] = frozenset(), costs: Costs | None = None) -> Arguments:
    """The arguments of a tool. `loose`: paths of parameters whose schema the grammar engine refuses: they are free.

    `costs`: what is known of the request's patterns.

    Raises BadRequest if they are no JSON object, beyond the limits, or such that no call can be right.
    """
    path = f"{tool.path}.parameters" if tool.path else "parameters"
    root = parse_json(tool.parameters, path)
    if not isinstance(root, Mapping):
        raise BadRequest("the parameters of a function are a JSON object", param=path)
    reader = Reader(root, path, costs)
    reader.read({key: value for key, value in root.items() if key not in _KEPT and key not in _WHOLE}, path)
    reader.problems += [Problem(f"{path}.{key}", "cannot be kept for all arguments") for key in _WHOLE if key in root]
    names = _names(root, path, reader)
    properties = root.get("properties", {})
    if not isinstance(properties, Mapping):
        reader.problems.append(Problem(f"{path}.properties", "is not an object of schemas"))
        properties = {}
    keys = dict.fromkeys((*names, *properties))
    if len(keys) > MEMBERS_MAX:
        raise BadRequest(f"`{path}`: {len(keys)} parameters, and there may be {MEMBERS_MAX}.", param=path)
    found = []
    for key in keys:
        at = f"{path}.properties.{key}"
        origin = properties.get(key, root.get("additionalProperties", True))
        types = allowed(properties.get(key), root)
        schema = True if at in loose else reader.read(origin, at)
        found.append(Parameter(key, schema, key in names, types, at, origin))
    extra = _extra(root, f"{path}.additionalProperties", reader)
    known = endings(reader.defs)
    for one in found:
        if one.required and not ends(one.schema, known):
            raise impossible(tool, one.path)
    kept = tuple(one for one in found if ends(one.schema, known))
    return Arguments(tool, kept, extra, reader.defs, root, tuple(reader.problems))


def _names(root: Mapping[str, Any], path: str, reader: Reader) -> list[str]:
    """The required parameters."""
    told = root.get("type")
    if told not in (None, "object") and not (isinstance(told, list) and "object" in told):
        reader.problems.append(Problem(f"{path}.type", "is not `object`, and arguments are one"))
    names = root.get("required", [])
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    reader.problems.append(Problem(f"{path}.required", "is not a list of names"))
    return []


def _extra(root: Mapping[str, Any], path: str, reader: Reader) -> Parameter | None:
    """Other keys come only where the schema says so: one that is silent means the parameters it lists."""
    told = root.get("additionalProperties", False)
    schema = reader.read(told, path)
    if schema is False or not ends(schema, endings(reader.defs)):
        return None
    return Parameter("", schema, False, TYPES, path, told)


def impossible(tool: ask.ToolSpec, path: str) -> BadRequest:
    """The fault of a tool that cannot be called."""
    return BadRequest(f"The tool {tool.name!r} can never be called: `{path}` allows no value.", param=path)
