"""Tools in a request body: what may be called, whether it must be, and what form the answer's text has.

Both OpenAI protocols say the same in two spellings: Chat Completions puts the fields of a kind under its name,
Responses puts them beside `type`. Whatever a client asks for here is honoured, or refused by the path of its field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from zjournal import ask
from zjournal.api.fields import Name, any_decoder, kind_decoder, parse, require_object
from zjournal.errors import BadRequest

JOIN = "__"  # between the name of a namespace and that of its tool, as a model is told them
PLAIN_NAMESPACE = "functions"  # Codex's name for what is in none

# A custom tool takes one text; models are told of it as a function with this one parameter.
INPUT = "input"
_CUSTOM_PARAMETERS = (
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}'
)


class _Function(msgspec.Struct):
    name: Name
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    strict: bool | None = None


class _Grammar(msgspec.Struct):
    syntax: Literal["lark", "regex"]
    definition: str


class _CustomFormat(msgspec.Struct):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None
    grammar: _Grammar | None = None


class _Custom(msgspec.Struct):
    name: Name
    description: str | None = None
    format: _CustomFormat | None = None


class _NestedFunction(msgspec.Struct):
    function: _Function


class _NestedCustom(msgspec.Struct):
    custom: _Custom


class _Named(msgspec.Struct):
    name: Name
    namespace: str | None = None


class _Namespace(msgspec.Struct):
    name: Name
    tools: list[msgspec.Raw]
    description: str | None = None


class _NestedNames(msgspec.Struct):
    function: _Named | None = None
    custom: _Named | None = None


class _Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[msgspec.Raw]


class _NestedAllowed(msgspec.Struct):
    allowed_tools: _Allowed


class _Schema(msgspec.Struct):
    name: Name
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class _NestedSchema(msgspec.Struct):
    json_schema: _Schema


_function = msgspec.json.Decoder(_Function)
_nested_function = msgspec.json.Decoder(_NestedFunction)
_custom = msgspec.json.Decoder(_Custom)
_nested_custom = msgspec.json.Decoder(_NestedCustom)
_named = msgspec.json.Decoder(_Named)
_namespace = msgspec.json.Decoder(_Namespace)
_nested_names = msgspec.json.Decoder(_NestedNames)
_allowed = msgspec.json.Decoder(_Allowed)
_nested_allowed = msgspec.json.Decoder(_NestedAllowed)
_schema = msgspec.json.Decoder(_Schema)
_nested_schema = msgspec.json.Decoder(_NestedSchema)

SHAPES: Mapping[str, type] = MappingProxyType(  # for openapi
    {
        "function": _Function,
        "custom": _Custom,
        "namespace": _Namespace,
        "named": _Named,
        "allowed": _Allowed,
        "schema": _Schema,
    }
)


def tools(raws: Sequence[msgspec.Raw], *, nested: bool, at: str = "tools") -> tuple[ask.ToolSpec, ...]:
    """The functions and custom tools in order; other types are skipped, so that a client may offer what we do not run.

    `nested` says where a tool's fields stand: under its type (Chat) or beside `type` (Responses, which has namespaces
    as well). `at`: the path of the list.
    """
    found: list[ask.ToolSpec] = []
    for index, raw in enumerate(raws):
        path = f"{at}[{index}]"
        kind = _kind(raw, path)
        if kind == "function":
            function = parse(_nested_function, raw, path).function if nested else parse(_function, raw, path)
            found.append(_function_tool(function, f"{path}.function" if nested else path))
        elif kind == "custom":
            custom = parse(_nested_custom, raw, path).custom if nested else parse(_custom, raw, path)
            found.append(_custom_tool(custom, f"{path}.custom" if nested else path, nested))
        elif kind == "namespace" and not nested:
            found += _members(parse(_namespace, raw, path), path)
    return tuple(found)


def functions(raws: Sequence[msgspec.Raw], at: str) -> tuple[ask.ToolSpec, ...]:
    """The functions of Chat's older spelling, which has their fields where tools have a type. `at`: the list's path."""
    paths = [(raw, f"{at}[{index}]") for index, raw in enumerate(raws)]
    return tuple(_function_tool(parse(_function, raw, path), path) for raw, path in paths)


def _members(group: _Namespace, at: str) -> list[ask.ToolSpec]:
    """The tools of a namespace. What it says of itself stands before the description of its first tool."""
    members: list[ask.ToolSpec] = []
    for tool in tools(group.tools, nested=False, at=f"{at}.tools"):
        if tool.namespace:
            raise BadRequest(f"`{tool.path}` is in a namespace in a namespace.", param=tool.path)
        about = tool.description
        if group.description and not members:
            about = f"{group.description}\n\n{about}" if about else group.description
        name, kept = joined(group.name, tool.name), "" if group.name == PLAIN_NAMESPACE else group.name
        members.append(msgspec.structs.replace(tool, name=name, description=about, namespace=kept))
    return members


def joined(namespace: str | None, name: str) -> str:
    """The one name by which a model is told of a tool in a namespace."""
    if not namespace or namespace == PLAIN_NAMESPACE:
        return name
    return f"{namespace.removesuffix(JOIN)}{JOIN}{name}"


def apart(tool: ask.ToolSpec) -> str:
    """The tool's name in its namespace, as the client knows it."""
    return tool.name.removeprefix(joined(tool.namespace, "")) if tool.namespace else tool.name


def refuse_ambiguous(offered: Sequence[ask.ToolSpec]) -> None:
    """Raises BadRequest where a tool of a namespace has, to the model, the name of another tool."""
    seen: dict[str, ask.ToolSpec] = {}
    for tool in offered:
        other = seen.setdefault(tool.name, tool)
        if other.namespace != tool.namespace:
            at = f"{tool.path}.name"
            raise BadRequest(f"`{at}` makes the name {tool.name!r}, which `{other.path}` has as well.", param=at)


def left_out(raws: Sequence[msgspec.Raw]) -> list[str]:
    """The types of those tools that no model is told of, each once."""
    kinds: dict[str, None] = {}
    for raw in raws:
        kind = kind_decoder.decode(raw).type or ""
        if kind == "namespace":
            kinds |= dict.fromkeys(left_out(_namespace.decode(raw).tools))
        elif kind not in ("function", "custom"):
            kinds[kind] = None
    return list(kinds)


def _function_tool(function: _Function, at: str) -> ask.ToolSpec:
    """`strict` left out is false here: a schema is kept to as far as it can be, and no keyword in it is refused."""
    return ask.ToolSpec(
        name=function.name,
        description=function.description,
        parameters=_parameters(function.parameters, f"{at}.parameters"),
        path=at,
        strict=bool(function.strict),
    )


def _parameters(raw: msgspec.Raw, at: str) -> bytes:
    """The client's bytes, once they are known to be a JSON object; a function without parameters has `{}`."""
    value = parse(any_decoder, raw, at)
    if value is None:
        return b"{}"
    require_object(value, at)
    return bytes(raw)


def _custom_tool(custom: _Custom, at: str, nested: bool) -> ask.ToolSpec:
    grammar = None
    form = custom.format
    if form is not None and form.type == "grammar":
        where = f"{at}.format.grammar" if nested else f"{at}.format"
        said = form.grammar if nested else form
        if said is None or said.syntax is None or said.definition is None:
            missing = where if said is None else f"{where}.{'definition' if said.syntax else 'syntax'}"
            raise BadRequest(f"Missing required field `{missing}`.", param=missing)
        grammar = ask.Grammar(said.syntax, said.definition, where)
    return ask.ToolSpec(
        name=custom.name,
        description=custom.description,
        parameters=_CUSTOM_PARAMETERS,
        path=at,
        kind="custom",
        grammar=grammar,
    )


def arguments_of(text: str) -> str:
    """What a model writes to call a custom tool with this text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def refuse_doubled(items: Sequence[ask.Item], field: str) -> None:
    """Raises BadRequest where two calls of one assistant's turn have the same id: results could belong to either.

    `field`: where a call's id stands, relative to the object at its path.
    """
    seen: set[str] = set()
    for item in items:
        if isinstance(item, ask.Call):
            if item.call_id in seen:
                at = _at(item.path, field)
                raise BadRequest(f"`{at}` is {item.call_id!r}, as the id of a call before it.", param=at)
            seen.add(item.call_id)
        elif not isinstance(item, ask.Thought) and not (isinstance(item, ask.Message) and item.role == "assistant"):
            seen.clear()


def _at(path: str, field: str) -> str:
    """The path of `field` for a call at `path`, which Chat has one level deeper."""
    return f"{path.rpartition('.')[0] if field == 'id' else path}.{field}"


def choice(raw: msgspec.Raw, offered: Sequence[ask.ToolSpec], *, nested: bool, parallel: bool | None) -> ask.ToolChoice:
    """`tool_choice` and `parallel_tool_calls`. Raises BadRequest for what names no tool of the request."""
    at, several = "tool_choice", parallel is not False
    value = parse(any_decoder, raw, at) if raw else None
    if value is None or isinstance(value, str):
        return _simple(value or "auto", offered, several)
    kind = _kind(raw, at)
    if kind == "allowed_tools":
        return _of_allowed(raw, offered, nested, several)
    if kind not in ("function", "custom"):
        path = f"{at}.type"
        raise BadRequest(f"Invalid value for `{path}`: this server runs no tools of type {kind!r}.", param=path)
    name = _offered(raw, at, kind, offered, nested)
    return ask.ToolChoice("required", (name,), parallel=False)  # the protocols: exactly one call of this tool


def _simple(mode: str, offered: Sequence[ask.ToolSpec], several: bool) -> ask.ToolChoice:
    if mode not in ("auto", "none", "required"):
        raise BadRequest(
            f"Invalid value for `tool_choice`: {mode!r} is none of auto, none, required.", param="tool_choice"
        )
    if mode == "required" and not offered:
        raise BadRequest("`tool_choice` requires a call, and there is no tool to call.", param="tool_choice")
    return ask.ToolChoice(mode, parallel=several)  # type: ignore[arg-type]


def _of_allowed(raw: msgspec.Raw, offered: Sequence[ask.ToolSpec], nested: bool, several: bool) -> ask.ToolChoice:
    """Tools of a type that this server does not run are left out: they are not offered to the model either."""
    at = "tool_choice.allowed_tools" if nested else "tool_choice"
    allowed = parse(_nested_allowed, raw, "tool_choice").allowed_tools if nested else parse(_allowed, raw, at)
    names = []
    for index, tool in enumerate(allowed.tools):
        where = f"{at}.tools[{index}]"
        kind = _kind(tool, where)
        if kind in ("function", "custom"):
            names.append(_offered(tool, where, kind, offered, nested))
        elif kind == "namespace" and not nested:
            group = parse(_named, tool, where).name
            names += [one.name for one in offered if one.namespace == group]
    if names:
        return ask.ToolChoice(allowed.mode, tuple(dict.fromkeys(names)), several)
    if allowed.mode == "required":
        path = f"{at}.tools"
        raise BadRequest("`tool_choice` requires a call, and allows no tool that could be called.", param=path)
    return ask.ToolChoice("none", parallel=several)


def _kind(raw: msgspec.Raw, at: str) -> str:
    kind = parse(kind_decoder, raw, at).type
    if kind is None:
        raise BadRequest(f"Missing required field `{at}.type`.", param=f"{at}.type")
    return kind


def _offered(raw: msgspec.Raw, at: str, kind: str, offered: Sequence[ask.ToolSpec], nested: bool) -> str:
    """The name of the tool that an object names. Raises BadRequest if there is no such tool."""
    if nested:
        named = getattr(parse(_nested_names, raw, at), kind)
        path = f"{at}.{kind}.name"
        if named is None:
            raise BadRequest(f"Missing required field `{at}.{kind}`.", param=f"{at}.{kind}")
    else:
        named, path = parse(_named, raw, at), f"{at}.name"
    name = joined(named.namespace, named.name)
    if not any(tool.name == name and tool.kind == kind for tool in offered):
        raise BadRequest(f"`{path}` is {named.name!r}, and `tools` has no {kind} of this name.", param=path)
    return name


def text_format(raw: msgspec.Raw, at: str, *, nested: bool) -> ask.Format | None:
    """What the text must be: `response_format` of Chat, `text.format` of Responses; None: any text."""
    value = parse(any_decoder, raw, at) if raw else None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequest(f"Invalid value for `{at}`: expected an object.", param=at)
    kind = _kind(raw, at)
    if kind == "text":
        return None
    if kind == "json_object":
        return ask.Format("json_object", path=at)
    if kind != "json_schema":
        path = f"{at}.type"
        raise BadRequest(f"Invalid value for `{path}`: {kind!r} is none of text, json_object, json_schema.", param=path)
    if nested:
        said, at = parse(_nested_schema, raw, at).json_schema, f"{at}.json_schema"
    else:
        said = parse(_schema, raw, at)
    require_object(parse(any_decoder, said.schema, f"{at}.schema"), f"{at}.schema")
    return ask.Format("json_schema", said.name, bytes(said.schema), bool(said.strict), at)
