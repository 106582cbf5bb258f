"""What a response object repeats of its request, and what of the request decides the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from zjournal.api import fields

if TYPE_CHECKING:
    from zjournal.api.turns import Turn

TRIGGER = "compaction_trigger"
TOOLS = "additional_tools"


class TextConfig(msgspec.Struct):
    format: msgspec.Raw = msgspec.Raw()
    verbosity: Literal["low", "medium", "high"] | None = None


class CacheOptions(msgspec.Struct):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    context: str | None = None


class _Conversation(msgspec.Struct):
    id: fields.Name


class Echo(msgspec.Struct):
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | _Conversation | None = None
    max_output_tokens: int | None = None
    max_tool_calls: fields.Tokens | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: _Reasoning | None = None
    metadata: fields.Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    service_tier: str | None = None
    background: bool | None = None
    generate: bool | None = None

    @property
    def warm(self) -> bool:
        """Whether only the prompt is to be read: both spellings of it."""
        options = self.prompt_cache_options
        return self.generate is False or (options is not None and bool(options.prewarm))

    @property
    def compared_with(self) -> str:
        """The response that the prompt is to be compared with; "" if none is."""
        options = self.prompt_cache_options
        return (options.comparison_response_id if options is not None else None) or ""

    @property
    def conversation_id(self) -> str:
        """The conversation that the request belongs to; "" if it names none."""
        named = self.conversation
        return (named.id if isinstance(named, _Conversation) else named) or ""


class _Last(msgspec.Struct):
    input: str | list[msgspec.Raw] = ""


decoder = msgspec.json.Decoder(Echo)
_last_decoder = msgspec.json.Decoder(_Last)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SCHEMA_KEYS: Mapping[str, Any] = MappingProxyType({"description": None, "strict": False})


def compacts(raw: bytes) -> bool:
    """Whether a body asks for its conversation to be compacted: its last item says so."""
    if TRIGGER.encode() not in raw:
        return False
    given = _last_decoder.decode(raw).input
    return isinstance(given, list) and bool(given) and fields.kind_decoder.decode(given[-1]).type == TRIGGER


def inherits(raw: bytes, previous: bytes) -> bytes:
    """A body with the tools that stand in the input of the body which it continues, and so on back; else as it is.

    They stand behind its own items, so that the paths of these stay what they are.
    """
    if TOOLS.encode() not in previous:
        return raw
    kept = _tools_in(_last_decoder.decode(previous).input)
    parts = _object_decoder.decode(raw)
    own = _last_decoder.decode(raw).input
    known = _tools_in(own)
    kept = [item for item in kept if item not in known]
    if not kept:
        return raw
    if isinstance(own, str):
        own = [msgspec.Raw(msgspec.json.encode({"role": "user", "content": own}))]
    end = len(own) - bool(own and fields.kind_decoder.decode(own[-1]).type == TRIGGER)
    return msgspec.json.encode({**parts, "input": [*own[:end], *map(msgspec.Raw, kept), *own[end:]]})


def _tools_in(given: str | list[msgspec.Raw]) -> list[bytes]:
    items = [] if isinstance(given, str) else given
    return [bytes(item) for item in items if fields.kind_decoder.decode(item).type == TOOLS]


def request_half(turn: Turn, echo: Echo) -> dict[str, Any]:
    """The keys of the response object that follow from the request alone: repeated, or the value in effect."""
    text: dict[str, Any] = {"format": {"type": "text"}}
    if echo.text is not None:
        if bytes(echo.text.format) not in (b"", b"null"):
            text["format"] = _format(echo.text.format)
        if echo.text.verbosity is not None:
            text["verbosity"] = echo.text.verbosity
    half = {
        "previous_response_id": echo.previous_response_id,
        "instructions": echo.instructions,
        "tools": [_tool(tool) for tool in echo.tools or ()],
        "tool_choice": "auto" if echo.tool_choice is None else echo.tool_choice,
        "truncation": "disabled",  # a prompt is never cut, and what asks for it is refused
        "parallel_tool_calls": echo.parallel_tool_calls is not False,
        "text": text,
        "temperature": 1.0 if echo.temperature is None else echo.temperature,
        "top_p": 1.0 if echo.top_p is None else echo.top_p,
        "presence_penalty": echo.presence_penalty or 0.0,
        "frequency_penalty": echo.frequency_penalty or 0.0,
        "top_logprobs": echo.top_logprobs or 0,
        "reasoning": _reasoning(echo.reasoning),
        "max_output_tokens": echo.max_output_tokens,
        "max_tool_calls": echo.max_tool_calls,
        "store": turn.stored,
        "background": bool(echo.background),
        "service_tier": "flex" if echo.service_tier == "flex" else "default",
        "metadata": echo.metadata or {},
        "user": echo.user,
        "safety_identifier": echo.safety_identifier,
        "prompt_cache_key": echo.prompt_cache_key,
    }
    if echo.conversation_id:
        half["conversation"] = {"id": echo.conversation_id}
    if echo.compared_with:
        options = echo.prompt_cache_options
        assert options is not None
        half["prompt_cache_options"] = {
            "mode": options.mode or "implicit",
            "ttl": options.ttl or "30m",
            "comparison_response_id": echo.compared_with,
        }
    return half


def _format(raw: msgspec.Raw) -> Any:
    """A form of the text as sent; a schema also has the keys that clients require."""
    parts = _object_decoder.decode(raw)
    if bytes(parts.get("type", b"")) != b'"json_schema"':
        return raw
    return {**parts, **{key: parts.get(key, absent) for key, absent in _SCHEMA_KEYS.items()}}


def _reasoning(given: _Reasoning | None) -> dict[str, Any] | None:
    if given is None:
        return None
    context = {} if given.context is None else {"context": given.context}
    return {"effort": given.effort, "summary": given.summary, **context}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as sent; a function also has the keys that clients require."""
    if tool.get("type") != "function":
        return tool
    return {**tool, **{key: tool.get(key) for key in ("description", "parameters", "strict")}}
