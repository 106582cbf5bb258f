"""What each route takes: the schemas of the bodies.

A body's struct holds some fields as raw JSON, to be read by their `type` later. Those are put together here, from the
structs that read them then.
"""

from __future__ import annotations

from collections.abc import Mapping

from zjournal import ask
from zjournal.api import chat, fields, responses, responses_items, routes_conversations, tooling
from zjournal.api.messages import blocks, request
from zjournal.api.messages import tools as messages_tools
from zjournal.api.openapi.shapes import (
    NULL,
    OBJECT,
    STRING,
    Schema,
    by_type,
    either,
    listed,
    neutral,
    nullable,
    obj,
    of,
    typed,
)

_MODES: Schema = {"enum": ["auto", "none", "required"]}
_STOPS = either({"type": "string", "maxLength": fields.STOP_CHARS_MAX, "minLength": 1}, NULL)
_STOP_LIST: Schema = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": fields.STOP_CHARS_MAX},
    "maxItems": fields.STOP_STRINGS_MAX,
}


def chat_body() -> Schema:
    """Of POST /v1/chat/completions."""
    body = of(
        chat.SHAPES["body"],
        **_sampled(chat.NEUTRAL),
        tools=nullable(listed(by_type(_nested_tools()))),
        functions=nullable(listed(_function())),
        tool_choice=_choice(nested=True),
        response_format=_format(nested=True),
    )
    body["properties"]["messages"] |= {"minItems": 1}
    return body


def responses_body(required: tuple[str, ...] = ("model",)) -> Schema:
    """Of POST /v1/responses, and of those that take a part of it."""
    echo = of(responses.SHAPES["echo"])
    body = of(
        responses.SHAPES["body"],
        **_sampled(responses.NEUTRAL),
        input=either(STRING, listed(_item())),
        tools=nullable(listed(by_type(_tools()))),
        tool_choice=_choice(nested=False),
    )
    for name, values in responses.NEUTRAL_IN.items():
        own = obj({}, **{key: neutral(one) for key, one in values.items()})
        if name == "background_options":
            own["properties"]["continuation_id"] = nullable(STRING)
        body["properties"][name] = nullable(own)
    properties = {**echo["properties"], **body["properties"], "conversation": echo["properties"]["conversation"]}
    text = obj({}, format=_format(nested=False), verbosity=nullable({"enum": ["low", "medium", "high"]}))
    return {"type": "object", "properties": {**properties, "text": nullable(text)}, "required": list(required)}


def messages_body(counted: bool = False) -> Schema:
    """Of POST /v1/messages; `counted`: of POST /v1/messages/count_tokens."""
    body = of(
        request.SHAPES["body"],
        **_sampled(request.NEUTRAL),
        messages=listed(of(blocks.MESSAGE, role={"enum": list(blocks.ROLES)}, content=_content(_blocks()))),
        system=nullable(_content(_read_blocks())),
        tools=nullable(listed(_messages_tool())),
        tool_choice=_messages_choice(),
        output_config=nullable(obj({}, effort=nullable(STRING), format=_messages_format())),
        output_format=_messages_format(),
    )
    body["properties"] |= of(request.SHAPES["wanted"])["properties"]
    body["properties"]["messages"] |= {"minItems": 1}
    most: Schema = {"type": "integer", "minimum": 0, "maximum": fields.TOKENS_MAX}
    body["properties"]["max_tokens"] = nullable(most) if counted else most
    return body if counted else {**body, "required": [*body["required"], "max_tokens"]}


def conversation_body(which: str) -> Schema:
    """Of the routes of conversations: `create`, `update` or `add`."""
    kind = routes_conversations.SHAPES[which]
    if which == "update":
        return of(kind)
    items = listed(_item())
    return of(kind, items=nullable(items) if which == "create" else items)


# --- what several have ----------------------------------------------------------------------------------


def _sampled(refused: Mapping[str, tuple]) -> dict[str, Schema]:
    """The fields of sampling with their ranges, and those that must ask for nothing."""
    changed: dict[str, Schema] = {}
    for name in fields.NUMBERS:
        least, most = ask.RANGES[name]
        kind = "integer" if isinstance(most, int) else "number"
        number: Schema = {"type": kind, "minimum": least, "maximum": most}
        changed[name] = nullable(either(number, {"const": -1}) if name == "top_k" else number)
    bias: Schema = {"type": "number", "minimum": -ask.BIAS_MAX, "maximum": ask.BIAS_MAX}
    ids: Schema = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,8})$"}
    changed["logit_bias"] = nullable(
        {
            "type": "object",
            "propertyNames": ids,
            "additionalProperties": bias,
            "maxProperties": ask.LOGIT_BIAS_MAX,
        }
    )
    changed["top_logprobs"] = nullable({"type": "integer", "minimum": 0, "maximum": ask.TOP_LOGPROBS_MAX})
    changed["stop"] = either(_STOP_LIST, _STOPS)
    return changed | {name: neutral(values) for name, values in (fields.FOREIGN | dict(refused)).items()}


def _function() -> Schema:
    return of(tooling.SHAPES["function"], parameters=nullable(OBJECT))


def _custom() -> Schema:
    return of(tooling.SHAPES["custom"])


def _tools() -> dict[str, Schema]:
    plain = {"function": _function(), "custom": _custom()}
    group = of(tooling.SHAPES["namespace"], tools=listed(by_type(plain)))
    return {**plain, "namespace": group}


def _nested_tools() -> dict[str, Schema]:
    return {"function": obj({"function": _function()}), "custom": obj({"custom": _custom()})}


def _choice(nested: bool) -> Schema:
    named = of(tooling.SHAPES["named"])
    names = {kind: obj({kind: named}) if nested else named for kind in ("function", "custom")}
    allowed = of(tooling.SHAPES["allowed"], tools=listed(by_type(names)))
    kinds = {**names, "allowed_tools": obj({"allowed_tools": allowed}) if nested else allowed}
    return either(NULL, _MODES, *(typed(kind, schema) for kind, schema in kinds.items()))


def _format(nested: bool) -> Schema:
    schema = of(tooling.SHAPES["schema"], schema=OBJECT)
    kinds = {"text": obj(), "json_object": obj(), "json_schema": obj({"json_schema": schema}) if nested else schema}
    return either(NULL, *(typed(kind, one) for kind, one in kinds.items()))


def _item() -> Schema:
    """An item of `input`. One without a type is a message."""
    parts = either(STRING, listed(of(responses_items.PART)))
    message = of(responses_items.SHAPES["message"], role={"enum": list(responses_items.ROLES)}, content=parts)
    kinds = {kind: of(shape) for kind, shape in responses_items.SHAPES.items()} | {"message": message}
    kinds["additional_tools"]["properties"]["tools"] = listed(by_type(_tools()))
    kinds["configuration_update"] = obj({}, text=nullable(obj({}, format=_format(nested=False))))
    untyped = {**message, "properties": {**message["properties"], "type": NULL}}
    return by_type(kinds, untyped)


def _content(kinds: Mapping[str, Schema]) -> Schema:
    """A string, or a list of blocks."""
    return either(STRING, listed(by_type(kinds)))


def _read_blocks() -> dict[str, Schema]:
    """The blocks that stand for a text."""
    own = ("thinking", "tool_use", "tool_result")
    kinds = {kind: of(shape) for kind, shape in blocks.SHAPES.items() if kind not in own}
    for kind in ("image", "document"):
        kinds[kind]["properties"]["source"] = of(blocks.SOURCE)
    return kinds


def _blocks() -> dict[str, Schema]:
    result = of(blocks.SHAPES["tool_result"], content=_content(_read_blocks()))
    use = of(blocks.SHAPES["tool_use"], input=OBJECT)
    return {**_read_blocks(), "thinking": of(blocks.SHAPES["thinking"]), "tool_use": use, "tool_result": result}


def _messages_tool() -> Schema:
    """A tool that the client runs has no type, or this one; others may hold anything."""
    tool = of(messages_tools.SHAPES["tool"], input_schema=OBJECT)
    untyped = {**tool, "properties": {**tool["properties"], "type": NULL}}
    return by_type({"custom": tool}, untyped)


def _messages_choice() -> Schema:
    return nullable(of(messages_tools.SHAPES["choice"], type={"enum": ["auto", "any", "tool", "none"]}))


def _messages_format() -> Schema:
    schema = of(messages_tools.SHAPES["format"], type={"const": "json_schema"}, schema=OBJECT)
    return nullable({**schema, "required": ["type", "schema"]})
