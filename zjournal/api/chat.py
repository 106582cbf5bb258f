"""Chat Completions: a request becomes an `Ask`. chat_messages.py reads messages, chat_answer.py tells answers.

docs/api.md lists every field and whether it is honoured, accepted without effect, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from zjournal.api import chat_messages, fields, tooling
from zjournal.ask import CHOICES_MAX, Ask, Item, Message, ToolChoice, ToolSpec
from zjournal.errors import BadRequest

ENCODER_VERSION = 1

# What these fields may hold when they ask for nothing; anything else is refused by name.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "generate": (True,),
}
_CACHE_NEUTRAL: dict[str, tuple[Any, ...]] = {"prewarm": (False,), "comparison_response_id": ()}


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _CacheOptions(msgspec.Struct):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None
    prewarm: Any = None
    comparison_response_id: Any = None


class _Part(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class _Prediction(msgspec.Struct):
    type: Literal["content"]
    content: str | list[_Part]


class _NamedFunction(msgspec.Struct):
    name: fields.Name


class _Body(fields.SamplingFields, kw_only=True):
    model: fields.Name
    messages: list[chat_messages.ChatMessage]
    max_tokens: fields.Tokens | None = None
    max_completion_tokens: fields.Tokens | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[msgspec.Raw] | None = None
    store: bool | None = None
    metadata: fields.Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: _CacheOptions | None = None
    cache_salt: fields.CacheSalt | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)] | None = None
    logprobs: bool | None = None
    response_format: msgspec.Raw = msgspec.Raw()
    tool_choice: msgspec.Raw = msgspec.Raw()
    parallel_tool_calls: bool | None = None
    functions: list[msgspec.Raw] | None = None
    function_call: Literal["none", "auto"] | _NamedFunction | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: _Prediction | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    generate: Any = None


_body_decoder = msgspec.json.Decoder(_Body)
SHAPES: Mapping[str, type] = MappingProxyType({"body": _Body})  # for openapi


def decode(raw: bytes, headers: Mapping[str, str]) -> Ask:
    """The Ask of a request body; header names are lower-case. Raises BadRequest, with the JSON path as `param`."""
    body = fields.parse(_body_decoder, raw)
    fields.require_neutral(body, NEUTRAL | fields.FOREIGN)
    if body.prompt_cache_options is not None:
        fields.require_neutral(body.prompt_cache_options, _CACHE_NEUTRAL, "prompt_cache_options")
    if not body.messages:
        raise BadRequest("`messages` is empty.", param="messages")
    items: list[Item] = []
    for index, message in enumerate(body.messages):
        items.extend(chat_messages.items_of(message, f"messages[{index}]"))
    tooling.refuse_doubled([item for item in items if not chat_messages.nameless(item)], "id")
    tools, choice = _tools(body)
    return Ask(
        protocol="chat",
        model=body.model,
        items=tuple(items),
        tools=tools,
        choice=choice,
        format=tooling.text_format(body.response_format, "response_format", nested=True),
        sampling=fields.sampling(body, _logprobs(body)),
        max_tokens=_max_tokens(body),
        choices=body.n or 1,
        stop=fields.stop_strings(body.stop),
        store=body.store is not False,
        stream=bool(body.stream),
        session_key=fields.session_key(headers, body.prompt_cache_key),
        cache_salt=body.cache_salt,
        background=fields.background(body),
        nameless=bool(body.functions),
        goes_on=_goes_on(body, items),
        skipped=tuple(dict.fromkeys(tooling.left_out(body.tools or ()))),
        client=fields.client(headers),
    )


def _tools(body: _Body) -> tuple[tuple[ToolSpec, ...], ToolChoice]:
    """What may be called and whether it must be, in either spelling."""
    if body.functions:
        return _functions(body, body.functions)
    if isinstance(body.function_call, _NamedFunction) or (body.function_call == "none" and body.tools):
        raise BadRequest("`function_call` needs `functions`.", param="function_call")
    tools = tooling.tools(body.tools or (), nested=True)
    return tools, tooling.choice(body.tool_choice, tools, nested=True, parallel=body.parallel_tool_calls)


def _functions(body: _Body, raws: Sequence[msgspec.Raw]) -> tuple[tuple[ToolSpec, ...], ToolChoice]:
    """The older spelling, in which there is one call at most, without an id."""
    if body.tools or (body.tool_choice and bytes(body.tool_choice) != b"null"):
        raise BadRequest("`functions` goes with neither `tools` nor `tool_choice`; use these alone.", param="functions")
    tools = tooling.functions(raws, "functions")
    asked = body.function_call
    if not isinstance(asked, _NamedFunction):
        return tools, ToolChoice(asked or "auto", parallel=False, path="function_call")
    if not any(tool.name == asked.name for tool in tools):
        message = f"`function_call.name` is {asked.name!r}, and `functions` has none of this name."
        raise BadRequest(message, param="function_call.name")
    return tools, ToolChoice("required", (asked.name,), parallel=False, path="function_call")


def _logprobs(body: _Body) -> int:
    """Alternatives to tell beside each token; -1: no logprobs at all."""
    top = fields.top_logprobs(body.top_logprobs)
    if top and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    return top if body.logprobs else -1


def _max_tokens(body: _Body) -> int | None:
    """The newer name counts; two different limits would leave one ignored."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest("`max_tokens` and `max_completion_tokens` differ; send one of them.", param="max_tokens")
    return old if new is None else new


def _goes_on(body: _Body, items: Sequence[Item]) -> bool:
    """Whether the answer is more of the last message. Both fields are vLLM's."""
    on, own = bool(body.continue_final_message), body.add_generation_prompt
    if own is not None and own == on:
        message = "`add_generation_prompt` is false where `continue_final_message` is true, and only there."
        raise BadRequest(message, param="add_generation_prompt")
    last = items[-1]
    if on and not (isinstance(last, Message) and last.role == "assistant"):
        message = "`continue_final_message` needs an assistant's text as the last message."
        raise BadRequest(message, param="continue_final_message")
    return on
