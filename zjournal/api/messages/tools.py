"""Tools of a Messages request: what may be called, whether it must be, and what form the answer's text has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from zjournal import ask
from zjournal.api.fields import Name, any_decoder, kind_decoder, parse, require_object
from zjournal.errors import BadRequest

_MODES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class _Tool(msgspec.Struct):
    name: Name
    input_schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class _Choice(msgspec.Struct):
    type: str
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class _Format(msgspec.Struct):
    type: str
    schema: msgspec.Raw = msgspec.Raw()


_tool = msgspec.json.Decoder(_Tool)
_choice = msgspec.json.Decoder(_Choice)
_format = msgspec.json.Decoder(_Format)

SHAPES: Mapping[str, type] = MappingProxyType({"tool": _Tool, "choice": _Choice, "format": _Format})  # for openapi


def tools(raws: Sequence[msgspec.Raw], skipped: list[str]) -> tuple[ask.ToolSpec, ...]:
    """The tools that clients run, in order, those to be loaded later as well: so the prompt's head never changes.

    Tools with a type of their own need their maker's model or server; they are left out, and named in `skipped`.
    """
    found = []
    for index, raw in enumerate(raws):
        at = f"tools[{index}]"
        kind = parse(kind_decoder, raw, at).type
        if kind not in (None, "custom"):
            skipped.append(str(kind))
            continue
        tool = parse(_tool, raw, at)
        require_object(parse(any_decoder, tool.input_schema, f"{at}.input_schema"), f"{at}.input_schema")
        found.append(ask.ToolSpec(tool.name, tool.description, bytes(tool.input_schema), at, bool(tool.strict)))
    names: dict[str, str] = {}
    for spec in found:
        if spec.name in names:
            raise BadRequest("Tool names must be unique.", param=f"{spec.path}.name")
        names[spec.name] = spec.path
    return tuple(found)


def choice(raw: msgspec.Raw, offered: Sequence[ask.ToolSpec]) -> ask.ToolChoice:
    """`tool_choice`. Raises BadRequest for a mode that is not known, and for what no tool can answer."""
    at = "tool_choice"
    value: Any = parse(any_decoder, raw, at) if raw else None
    if value is None:
        return ask.ToolChoice()
    said = parse(_choice, raw, at)
    mode = _MODES.get(said.type)
    if mode is None:
        sentence = f"Invalid value for `{at}.type`: {said.type!r} is none of {', '.join(_MODES)}."
        raise BadRequest(sentence, param=f"{at}.type")
    several = said.disable_parallel_tool_use is not True
    if said.type == "tool":
        if said.name is None:
            raise BadRequest(f"Missing required field `{at}.name`.", param=f"{at}.name")
        if not any(tool.name == said.name for tool in offered):
            raise BadRequest(f"Tool '{said.name}' is not one that can be called here.", param=f"{at}.name")
        return ask.ToolChoice(mode, (said.name,), several)
    if mode == "required" and not offered:
        raise BadRequest(f"`{at}` requires a call, and there is no tool to call.", param=at)
    return ask.ToolChoice(mode, parallel=several)


def text_format(raw: msgspec.Raw, at: str) -> ask.Format | None:
    """`output_config.format`: the schema of the answer's text. None: any text."""
    value: Any = parse(any_decoder, raw, at) if raw else None
    if value is None:
        return None
    said = parse(_format, raw, at)
    if said.type != "json_schema":
        raise BadRequest(f"Invalid value for `{at}.type`: {said.type!r} is not json_schema.", param=f"{at}.type")
    if not said.schema:
        raise BadRequest(f"Missing required field `{at}.schema`.", param=f"{at}.schema")
    require_object(parse(any_decoder, said.schema, f"{at}.schema"), f"{at}.schema")
    return ask.Format("json_schema", "output", bytes(said.schema), False, at)
