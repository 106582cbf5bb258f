"""Responses: its request becomes an `Ask`, the steps of an answer become numbered events or one object.

An `Answer` folds steps into the response object. Creating with and without a stream, and reading a stored
response, are the same fold, so they show the same object. docs/api.md lists every field and whether it is
honoured, echoed, accepted without effect, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from zjournal.api import fields, output, tooling
from zjournal.api.sse import DONE, frame
from zjournal.ask import (
    Ask,
    Broke,
    Call,
    CallArguments,
    CallEnded,
    CallStarted,
    Ended,
    Item,
    Message,
    ReasoningDelta,
    Result,
    Role,
    Step,
    Text,
    TextDelta,
    Thought,
    Usage,
)
from zjournal.errors import BadRequest

if TYPE_CHECKING:
    from zjournal.api.submit import Turn

ENCODER_VERSION = 1

ItemId = Callable[["Turn", int, str], str]  # (turn, index, prefix) to "msg_<hex>"; with "call", index counts the calls

_ROLES: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # and where it stands
_LOGPROBS = "message.output_text.logprobs"  # of `include`
_UNREADABLE = ("item_reference", "compaction")  # items that stand for text which only their server has

# What these fields may hold when they ask for nothing; anything else is refused by name.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "generate": (True,),
    "n": (1,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}

# Ends of an answer that is cut, and the reason that a client is told.
_INCOMPLETE: Mapping[str, str] = MappingProxyType({"length": "max_output_tokens", "loop": "loop", "fence": "fence"})

# `response.error.code` is a closed list; of ours, these are in it or are what clients act upon.
_ERROR_CODES = ("server_error", "rate_limit_exceeded", "context_length_exceeded")


class _TextConfig(msgspec.Struct):
    format: msgspec.Raw = msgspec.Raw()
    verbosity: Literal["low", "medium", "high"] | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class _CacheOptions(msgspec.Struct):
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class _Body(fields.SamplingFields, kw_only=True):
    model: fields.Name
    input: str | list[msgspec.Raw]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: fields.Tokens | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: list[msgspec.Raw] | None = None
    text: _TextConfig | None = None
    include: list[str] | None = None
    prompt_cache_options: _CacheOptions | None = None
    cache_salt: fields.CacheSalt | None = None
    tool_choice: msgspec.Raw = msgspec.Raw()
    parallel_tool_calls: bool | None = None
    background: bool | None = None
    generate: bool | None = None
    n: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None


class _Echo(msgspec.Struct):
    """What the response object repeats of its request."""

    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _TextConfig | None = None
    reasoning: _Reasoning | None = None
    metadata: fields.Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _MessageItem(msgspec.Struct):
    role: str
    content: str | list[_Part]


class _CallItem(msgspec.Struct):
    call_id: fields.Name
    name: fields.Name
    arguments: str


class _CustomCallItem(msgspec.Struct):
    call_id: fields.Name
    name: fields.Name
    input: str


class _ReasoningPart(msgspec.Struct):
    type: str
    text: str


class _ReasoningItem(msgspec.Struct):
    """`summary` and `encrypted_content` are not what was thought, and nothing that this server can read."""

    content: list[_ReasoningPart] | None = None


class _ResultItem(msgspec.Struct):
    call_id: fields.Name
    output: str | list[_Part]


_body_decoder = msgspec.json.Decoder(_Body)
_echo_decoder = msgspec.json.Decoder(_Echo)
_message_decoder = msgspec.json.Decoder(_MessageItem)
_call_decoder = msgspec.json.Decoder(_CallItem)
_custom_call_decoder = msgspec.json.Decoder(_CustomCallItem)
_reasoning_decoder = msgspec.json.Decoder(_ReasoningItem)
_result_decoder = msgspec.json.Decoder(_ResultItem)


def decode(raw: bytes, headers: Mapping[str, str]) -> Ask:
    """The Ask of a request body; header names are lower-case. Raises BadRequest, with the JSON path as `param`."""
    body = fields.parse(_body_decoder, raw)
    echo = fields.parse(_echo_decoder, raw)  # what is repeated must be sound as well
    fields.require_neutral(body, _NEUTRAL | fields.FOREIGN)
    _refuse_unable(body)
    items = _items(body)
    tooling.refuse_doubled(items, "call_id")
    tools = tooling.tools(body.tools or (), nested=False)
    return Ask(
        protocol="responses",
        model=body.model,
        items=items,
        instructions=None if body.instructions is None else Text(body.instructions, "instructions"),
        tools=tools,
        choice=tooling.choice(body.tool_choice, tools, nested=False, parallel=body.parallel_tool_calls),
        format=None if body.text is None else tooling.text_format(body.text.format, "text.format", nested=False),
        sampling=fields.sampling(body, _logprobs(body)),
        max_tokens=body.max_output_tokens,
        stop=fields.stop_strings(body.stop),
        store=body.store is not False,
        stream=bool(body.stream),
        previous=body.previous_response_id,
        session_key=fields.session_key(headers, echo.prompt_cache_key),
        cache_salt=body.cache_salt,
        background=fields.background(body),
        client=fields.client(headers),
    )


def _refuse_unable(body: _Body) -> None:
    """Refuses, by name, nested fields that this version cannot honour."""
    options = body.prompt_cache_options
    if options is not None:
        for name in ("prewarm", "comparison_response_id"):
            if getattr(options, name):
                at = f"prompt_cache_options.{name}"
                raise BadRequest(f"`{at}` is not supported by this server.", param=at)


def _logprobs(body: _Body) -> int:
    """Alternatives to tell beside each token; -1: no logprobs at all. Each of the two fields asks for them."""
    top = fields.top_logprobs(body.top_logprobs)
    return top if top or _LOGPROBS in (body.include or ()) else -1


def _items(body: _Body) -> tuple[Item, ...]:
    if isinstance(body.input, str):
        return (Message(role="user", parts=(Text(body.input, "input"),)),)
    items = [item for index, raw in enumerate(body.input) if (item := _item(raw, f"input[{index}]")) is not None]
    if not items and body.previous_response_id is None:
        raise BadRequest("`input` holds nothing to answer.", param="input")
    return tuple(items)


def _item(raw: msgspec.Raw, at: str) -> Item | None:
    """One input item; None for one that carries nothing that this server can render."""
    kind = fields.parse(fields.kind_decoder, raw, at).type
    match kind:
        case None | "message":
            message = fields.parse(_message_decoder, raw, at)
            role = _ROLES.get(message.role)
            if role is None:
                sentence = f"Invalid value for `{at}.role`: {message.role!r} is none of {', '.join(_ROLES)}."
                raise BadRequest(sentence, param=f"{at}.role")
            return Message(role=role, parts=_texts(message.content, f"{at}.content"))
        case "function_call":
            call = fields.parse(_call_decoder, raw, at)
            return Call(call_id=call.call_id, name=call.name, arguments=call.arguments, path=at)
        case "custom_tool_call":
            custom = fields.parse(_custom_call_decoder, raw, at)
            return Call(custom.call_id, custom.name, tooling.arguments_of(custom.input), at)
        case "function_call_output" | "custom_tool_call_output":
            result = fields.parse(_result_decoder, raw, at)
            return Result(call_id=result.call_id, parts=_texts(result.output, f"{at}.output"))
        case "reasoning":
            parts = fields.parse(_reasoning_decoder, raw, at).content or []
            paths = (f"{at}.content[{index}].text" for index in range(len(parts)))
            thoughts = tuple(Text(part.text, path) for part, path in zip(parts, paths, strict=True) if part.text)
            return Thought(thoughts) if thoughts else None
        case _ if kind in _UNREADABLE:
            raise BadRequest(f"`{at}` is of type {kind!r}, which this server cannot read.", param=at)
    return None


def _texts(content: str | list[_Part], at: str) -> tuple[Text, ...]:
    if isinstance(content, str):
        return (Text(content, at),)
    texts = []
    for index, part in enumerate(content):
        path = f"{at}[{index}]"
        name = _TEXT_PARTS.get(part.type)
        if name is None:
            raise BadRequest(f"`{path}` is of type {part.type!r}; this server reads text only.", param=path)
        value = part.refusal if name == "refusal" else part.text
        if value is None:
            raise BadRequest(f"Missing required field `{path}.{name}`.", param=f"{path}.{name}")
        texts.append(Text(value, f"{path}.{name}"))
    return tuple(texts)


class Answer:
    """The fold of an answer's steps into the response object. What each step adds is told as events as well."""

    def __init__(self, turn: Turn, item_id: ItemId) -> None:
        self._turn = turn
        self._item_id = item_id
        self._request = _request_half(turn)
        self._custom = {tool.name for tool in turn.terms.tools if tool.kind == "custom"}
        self._items: list[output.Item] = []
        self._open: output.Item | None = None  # the last of them
        self.end: Ended | Broke | None = None

    def take(self, step: Step) -> list[output.Event]:
        """Folds a step in; what it means for the items, in events."""
        assert self.end is None, step
        events: list[output.Event] = []
        match step:
            case TextDelta():
                events += self._into(output.Message, "msg")
            case ReasoningDelta():
                events += self._into(output.Reasoning, "rs")
            case CallStarted():
                events += self._call(step)
            case CallEnded(truncated=truncated):
                events += self._close(output.CUT if truncated else output.DONE)
            case Ended() | Broke():
                self.end = step
                events += self._finish(step)
        if isinstance(step, TextDelta | ReasoningDelta | CallArguments):
            assert self._open is not None, step
            events += self._open.more(step)
        return events

    def _into(self, kind: type[output.Message] | type[output.Reasoning], prefix: str) -> list[output.Event]:
        """Makes sure that an item of this kind is open."""
        if isinstance(self._open, kind):
            return []
        index = len(self._items)
        return [*self._close(output.DONE), *self._begin(kind(self._item_id(self._turn, index, prefix), index))]

    def _call(self, started: CallStarted) -> list[output.Event]:
        index = len(self._items)
        call_id = self._item_id(self._turn, started.index, "call")
        item: output.Item
        if started.name in self._custom:
            item = output.CustomCall(self._item_id(self._turn, index, "ctc"), index, call_id, started.name)
        else:
            item = output.FunctionCall(self._item_id(self._turn, index, "fc"), index, call_id, started.name)
        return [*self._close(output.DONE), *self._begin(item)]

    def _begin(self, item: output.Item) -> list[output.Event]:
        self._items.append(item)
        self._open = item
        return list(item.begin())

    def _close(self, status: str) -> list[output.Event]:
        item, self._open = self._open, None
        return list(item.close(status)) if item is not None else []

    def _finish(self, end: Ended | Broke) -> list[output.Event]:
        """An empty answer is still the assistant's turn, and the chain holds it; a failure adds nothing."""
        events: list[output.Event] = []
        if not self._items and isinstance(end, Ended) and end.reason != "cancelled":
            events += self._into(output.Message, "msg")
        return events + self._close(output.DONE if self.status == "completed" else output.CUT)

    @property
    def status(self) -> str:
        match self.end:
            case None:
                return "in_progress"
            case Broke():
                return "failed"
            case Ended(reason="cancelled"):
                return "cancelled"
            case Ended(reason=reason) if reason in _INCOMPLETE:
                return "incomplete"
        return "completed"

    def response(self) -> dict[str, Any]:
        """The response object as it stands."""
        end, status = self.end, self.status
        error = details = None
        if isinstance(end, Broke):
            error = {"code": end.code if end.code in _ERROR_CODES else "server_error", "message": end.message}
        elif end is not None and status == "incomplete":
            details = {"reason": _INCOMPLETE[end.reason]}
        return {
            "id": self._turn.response,
            "object": "response",
            "created_at": self._turn.created,
            "completed_at": end.at if end is not None and status == "completed" else None,
            "status": status,
            "incomplete_details": details,
            "model": self._turn.model,
            "output": [] if end is None else [item.value() for item in self._items],
            "error": error,
            "usage": None if end is None else usage(end.usage),
            **self._request,
        }

    def body(self) -> bytes:
        """The response object as JSON."""
        return msgspec.json.encode(self.response())


class Encoder:
    """The frames of a streamed answer: a pure function of the turn and its steps. Numbers count from 0."""

    def __init__(self, turn: Turn, item_id: ItemId) -> None:
        self._answer = Answer(turn, item_id)
        self._number = 0

    def begin(self) -> list[bytes]:
        """What can be told once the request is accepted."""
        return [self._lifecycle("response.created"), self._lifecycle("response.in_progress")]

    def feed(self, step: Step) -> list[bytes]:
        """The frames that `step` adds, the last one included when it ends the answer."""
        frames = [self._event(name, **values) for name, values in self._answer.take(step)]
        if isinstance(step, Ended | Broke):
            # No event says cancelled; the object in it does.
            last = "incomplete" if self._answer.status == "cancelled" else self._answer.status
            frames += [self._lifecycle(f"response.{last}"), DONE]
        return frames

    def _lifecycle(self, name: str) -> bytes:
        return self._event(name, response=self._answer.response())

    def _event(self, name: str, /, **values: Any) -> bytes:
        data = msgspec.json.encode({"type": name, "sequence_number": self._number, **values})
        self._number += 1
        return frame(data, name)


def deleted(response: str) -> bytes:
    """The body that confirms a deletion."""
    return msgspec.json.encode({"id": response, "object": "response", "deleted": True})


def usage(counts: Usage) -> dict[str, Any]:
    """The usage object; tokens from the cache are part of the input's. Nothing is charged for writing to the cache."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.output,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.output,
    }


def _request_half(turn: Turn) -> dict[str, Any]:
    """The keys of the response object that follow from the request alone: repeated, or the value in effect."""
    echo = _echo_decoder.decode(turn.raw)
    text: dict[str, Any] = {"format": {"type": "text"}}
    if echo.text is not None:
        if bytes(echo.text.format) not in (b"", b"null"):
            text["format"] = echo.text.format
        if echo.text.verbosity is not None:
            text["verbosity"] = echo.text.verbosity
    reasoning = echo.reasoning
    return {
        "previous_response_id": echo.previous_response_id,
        "instructions": echo.instructions,
        "tools": [_tool(tool) for tool in echo.tools or ()],
        "tool_choice": "auto" if echo.tool_choice is None else echo.tool_choice,
        "truncation": "disabled",  # whatever was asked: a prompt is never cut
        "parallel_tool_calls": echo.parallel_tool_calls is not False,
        "text": text,
        "temperature": 1.0 if echo.temperature is None else echo.temperature,
        "top_p": 1.0 if echo.top_p is None else echo.top_p,
        "presence_penalty": echo.presence_penalty or 0.0,
        "frequency_penalty": echo.frequency_penalty or 0.0,
        "top_logprobs": echo.top_logprobs or 0,
        "reasoning": None if reasoning is None else {"effort": reasoning.effort, "summary": reasoning.summary},
        "max_output_tokens": echo.max_output_tokens,
        "max_tool_calls": echo.max_tool_calls,
        "store": turn.stored,
        "background": False,
        "service_tier": "flex" if echo.service_tier == "flex" else "default",
        "metadata": echo.metadata or {},
        "user": echo.user,
        "safety_identifier": echo.safety_identifier,
        "prompt_cache_key": echo.prompt_cache_key,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as sent; a function also has the keys that clients require."""
    if tool.get("type") != "function":
        return tool
    return {**tool, **{key: tool.get(key) for key in ("description", "parameters", "strict")}}
