"""JSON Schemas made from the structs that read a body, so that what is described is what is read.

Only what our structs use is known; a type that is not fails at once. Nothing is named and referred to: a schema
stands where it is used, so each can be changed for its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect

Schema = dict[str, Any]

ANY: Schema = {}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}

# What a type of msgspec's may bound, and how JSON Schema says so.
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
    "pattern": "pattern",
}
_LENGTHS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


def of(kind: Any, **changed: Schema) -> Schema:
    """The schema of a type. `changed`: of a struct, the fields that another schema holds for."""
    made = _schema(inspect.type_info(kind))
    for name, schema in changed.items():
        assert name in made["properties"], (kind, name)
        made["properties"][name] = schema
    return made


def either(*schemas: Schema) -> Schema:
    """What any of these holds for."""
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """Null is the same as leaving the field out."""
    return either(schema, NULL)


def listed(schema: Schema) -> Schema:
    """A list of these."""
    return {"type": "array", "items": schema}


def obj(required: Mapping[str, Schema] | None = None, **optional: Schema) -> Schema:
    """An object that has the `required` fields, perhaps the `optional` ones, and any others."""
    required = required or {}
    made: Schema = {"type": "object", "properties": {**required, **optional}}
    return {**made, "required": list(required)} if required else made


def typed(kind: str, schema: Schema) -> Schema:
    """The schema of an object whose `type` is this."""
    required = ["type", *(name for name in schema.get("required", ()) if name != "type")]
    return {**schema, "properties": {"type": {"const": kind}, **schema["properties"]}, "required": required}


def by_type(kinds: Mapping[str, Schema], *others: Schema) -> Schema:
    """One of several objects, told apart by `type`; an object of another type may hold anything."""
    other = obj({"type": {"type": "string", "not": {"enum": list(kinds)}}})
    return either(*(typed(kind, schema) for kind, schema in kinds.items()), other, *others)


def neutral(values: Sequence[Any]) -> Schema:
    """A field that is refused unless it asks for nothing."""
    return {"enum": [None, *values]}


def _schema(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.Metadata():
            return _schema(kind.type)
        case inspect.AnyType() | inspect.RawType():
            return dict(ANY)
        case inspect.NoneType():
            return dict(NULL)
        case inspect.BoolType():
            return dict(BOOLEAN)
        case inspect.IntType():
            return _bounded("integer", kind)
        case inspect.FloatType():
            return _bounded("number", kind)
        case inspect.StrType():
            return _bounded("string", kind)
        case inspect.ListType():
            return {**_bounded("array", kind), "items": _schema(kind.item_type)}
        case inspect.DictType():
            return _dict(kind)
        case inspect.LiteralType():
            return {"enum": list(kind.values)}
        case inspect.UnionType():
            return either(*(_schema(one) for one in kind.types))
        case inspect.StructType():
            return _struct(kind)
    raise AssertionError(kind)


def _bounded(name: str, kind: Any) -> Schema:
    made: Schema = {"type": name}
    for ours, theirs in _BOUNDS.items():
        if getattr(kind, ours, None) is not None:
            made[theirs] = getattr(kind, ours)
    for ours, theirs in zip(("min_length", "max_length"), _LENGTHS.get(name, ()), strict=False):
        if getattr(kind, ours, None) is not None:
            made[theirs] = getattr(kind, ours)
    return made


def _dict(kind: inspect.DictType) -> Schema:
    made = {**_bounded("object", kind), "additionalProperties": _schema(kind.value_type)}
    keys = _schema(kind.key_type)
    return {**made, "propertyNames": keys} if keys != STRING else made


def _struct(kind: inspect.StructType) -> Schema:
    assert not kind.forbid_unknown_fields, kind
    made: Schema = {"type": "object", "properties": {one.encode_name: _schema(one.type) for one in kind.fields}}
    required = [one.encode_name for one in kind.fields if one.required]
    return {**made, "required": required} if required else made


def encoded(document: Schema) -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(document)
