"""Chat Completions: its request becomes an `Ask`, the steps of an answer become chunks or one body.

An `Answer` folds steps; the stream and the whole body come from the same fold. docs/api.md lists every field and
whether it is honoured, accepted without effect, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from zjournal.api import failure, fields, tooling
from zjournal.api.custom import Input
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
    Logprob,
    Message,
    ReasoningDelta,
    Result,
    Role,
    Step,
    Text,
    TextDelta,
    Thought,
    Usage,
    Waiting,
)
from zjournal.errors import BadRequest, Fault, Unavailable

if TYPE_CHECKING:
    from zjournal.api.turns import Turn

ENCODER_VERSION = 1

ItemId = Callable[["Turn", int, str], str]  # (turn, index, "call") to the id of the answer's call

_ROLES: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}

_CUT = ("length", "loop", "fence")  # ends of an answer that is not whole
_OURS = ("loop", "fence")  # of them, those that Chat has no word for

# What these fields may hold when they ask for nothing; anything else is refused by name.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
}


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Called(msgspec.Struct):
    name: fields.Name
    arguments: str


class _CustomCalled(msgspec.Struct):
    name: fields.Name
    input: str


class _ToolCall(msgspec.Struct):
    id: fields.Name
    function: _Called | None = None
    custom: _CustomCalled | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same in the words of other servers


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(fields.SamplingFields, kw_only=True):
    model: fields.Name
    messages: list[_Message]
    max_tokens: fields.Tokens | None = None
    max_completion_tokens: fields.Tokens | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[msgspec.Raw] | None = None
    store: bool | None = None
    metadata: fields.Metadata | None = None
    prompt_cache_key: str | None = None
    cache_salt: fields.CacheSalt | None = None
    n: int | None = None
    logprobs: bool | None = None
    response_format: msgspec.Raw = msgspec.Raw()
    tool_choice: msgspec.Raw = msgspec.Raw()
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None


class _Echo(msgspec.Struct):
    """What an answer needs to know of its request."""

    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None


_body_decoder = msgspec.json.Decoder(_Body)
_echo_decoder = msgspec.json.Decoder(_Echo)


def decode(raw: bytes, headers: Mapping[str, str]) -> Ask:
    """The Ask of a request body; header names are lower-case. Raises BadRequest, with the JSON path as `param`."""
    body = fields.parse(_body_decoder, raw)
    fields.require_neutral(body, _NEUTRAL | fields.FOREIGN)
    if not body.messages:
        raise BadRequest("`messages` is empty.", param="messages")
    items: list[Item] = []
    for index, message in enumerate(body.messages):
        items.extend(_items(message, f"messages[{index}]"))
    tooling.refuse_doubled(items, "id")
    tools = tooling.tools(body.tools or (), nested=True)
    return Ask(
        protocol="chat",
        model=body.model,
        items=tuple(items),
        tools=tools,
        choice=tooling.choice(body.tool_choice, tools, nested=True, parallel=body.parallel_tool_calls),
        format=tooling.text_format(body.response_format, "response_format", nested=True),
        sampling=fields.sampling(body, _logprobs(body)),
        max_tokens=_max_tokens(body),
        stop=fields.stop_strings(body.stop),
        store=body.store is not False,
        stream=bool(body.stream),
        session_key=fields.session_key(headers, body.prompt_cache_key),
        cache_salt=body.cache_salt,
        background=fields.background(body),
        client=fields.client(headers),
    )


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


def _items(message: _Message, at: str) -> list[Item]:
    """The neutral items of one message: a text, calls, or a result."""
    parts = _texts(message.content, f"{at}.content")
    if message.role == "tool":
        if not message.tool_call_id:
            raise BadRequest(f"Missing required field `{at}.tool_call_id`.", param=f"{at}.tool_call_id")
        return [Result(call_id=message.tool_call_id, parts=parts)]
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join([*_ROLES, "tool"])
        raise BadRequest(f"Invalid value for `{at}.role`: {message.role!r} is none of {known}.", param=f"{at}.role")
    if message.content is None and role != "assistant":
        raise BadRequest(f"Missing required field `{at}.content`.", param=f"{at}.content")
    calls = message.tool_calls or []
    if calls and role != "assistant":
        raise BadRequest(f"`{at}.tool_calls` belongs to an assistant message.", param=f"{at}.tool_calls")
    items: list[Item] = _thoughts(message, at)
    if not calls or any(part.text for part in parts):
        items.append(Message(role=role, parts=parts))
    for index, call in enumerate(calls):
        items.append(_sent(call, f"{at}.tool_calls[{index}]"))
    return items


def _thoughts(message: _Message, at: str) -> list[Item]:
    """What an assistant thought, as the client sends it back."""
    sent = {name: text for name in ("reasoning_content", "reasoning") if (text := getattr(message, name))}
    if not sent:
        return []
    name, text = next(iter(sent.items()))
    if message.role != "assistant":
        raise BadRequest(f"`{at}.{name}` belongs to an assistant message.", param=f"{at}.{name}")
    if len(set(sent.values())) > 1:
        raise BadRequest(f"`{at}.reasoning` and `{at}.reasoning_content` differ; send one.", param=f"{at}.reasoning")
    return [Thought((Text(text, f"{at}.{name}"),))]


def _sent(call: _ToolCall, at: str) -> Call:
    if call.custom is not None and call.function is None:
        return Call(call.id, call.custom.name, tooling.arguments_of(call.custom.input), f"{at}.custom")
    if call.function is None:
        raise BadRequest(f"Missing required field `{at}.function`.", param=f"{at}.function")
    return Call(call.id, call.function.name, call.function.arguments, f"{at}.function")


def _texts(content: str | list[_Part] | None, at: str) -> tuple[Text, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content, at),)
    texts = []
    for index, part in enumerate(content):
        path = f"{at}[{index}]"
        if part.type not in ("text", "refusal"):
            raise BadRequest(f"`{path}` is of type {part.type!r}; this server reads text only.", param=path)
        value = part.text if part.type == "text" else part.refusal
        if value is None:
            raise BadRequest(f"Missing required field `{path}.{part.type}`.", param=f"{path}.{part.type}")
        texts.append(Text(value, f"{path}.{part.type}"))
    return tuple(texts)


class _Said:
    """A tool call of the answer. That of a custom tool has a text in place of arguments."""

    def __init__(self, call_id: str, started: CallStarted, custom: bool) -> None:
        self._id = call_id
        self._name = started.name
        self._input = Input() if custom else None
        self._texts: list[str] = []
        self.truncated = False

    def begin(self, index: int) -> dict[str, Any]:
        """What the stream tells once."""
        return {"index": index, **self._object("")}

    def more(self, index: int, text: str) -> dict[str, Any] | None:
        """What the stream tells of more arguments, if there is something to tell."""
        return self._told(index, text if self._input is None else self._input.feed(text))

    def end(self, ended: CallEnded) -> dict[str, Any] | None:
        """What the stream tells at the call's end, if there is something to tell."""
        self.truncated = ended.truncated
        return None if self._input is None else self._told(ended.index, self._input.end())

    def value(self) -> dict[str, Any]:
        """The whole call."""
        return self._object("".join(self._texts))

    def _told(self, index: int, text: str) -> dict[str, Any] | None:
        if not text:
            return None
        self._texts.append(text)
        kind, field = self._spelling
        return {"index": index, kind: {field: text}}

    def _object(self, text: str) -> dict[str, Any]:
        kind, field = self._spelling
        return {"id": self._id, "type": kind, kind: {"name": self._name, field: text}}

    @property
    def _spelling(self) -> tuple[str, str]:
        return ("function", "arguments") if self._input is None else ("custom", "input")


class Answer:
    """The fold of an answer's steps; what it knows at the end is the whole body."""

    def __init__(self, turn: Turn, item_id: ItemId) -> None:
        self._turn = turn
        self._item_id = item_id
        self._custom = {tool.name for tool in turn.terms.tools if tool.kind == "custom"}
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[_Said] = []
        self._logprobs: list[Logprob] = []
        self._echo = _echo_decoder.decode(turn.raw)
        self._end: Ended | None = None
        self.fault: Fault | None = None  # why there is no answer, once that is known

    def take(self, step: Step) -> dict[str, Any] | None:
        """Folds a step in; the `delta` by which a stream tells it, if it tells anything."""
        assert self._end is None, step
        assert self.fault is None, step
        match step:
            case TextDelta(text=text, logprobs=logprobs):
                self._texts.append(text)
                self._logprobs += logprobs
                return {"content": text}
            case ReasoningDelta(text=text):
                self._thoughts.append(text)
                return {"reasoning_content": text}
            case CallStarted() | CallArguments() | CallEnded():
                told = self._call(step)
                return None if told is None else {"tool_calls": [told]}
            case Ended(reason="cancelled"):
                self.fault = Unavailable("The request was cancelled before it was finished.")
            case Ended():
                self._end = step
            case Broke():
                self.fault = failure.fault_of(step)
        return None

    def _call(self, step: CallStarted | CallArguments | CallEnded) -> dict[str, Any] | None:
        match step:
            case CallStarted(index=index, name=name):
                assert index == len(self._calls), step
                self._calls.append(_Said(self._item_id(self._turn, index, "call"), step, name in self._custom))
                return self._calls[index].begin(index)
            case CallArguments(index=index, text=text):
                return self._calls[index].more(index, text)
            case CallEnded(index=index):
                return self._calls[index].end(step)

    def choice(self) -> dict[str, Any]:
        """Why the answer stopped, in Chat's words; only after an end without a fault."""
        assert self._end is not None
        reason = self._end.reason
        if reason in _CUT:
            told = "length"
        elif self._calls and not any(call.truncated for call in self._calls):
            told = "tool_calls"
        else:
            told = "stop"
        return {"finish_reason": told, **({"stop_reason": reason} if reason in _OURS else {})}

    def body(self) -> bytes:
        """The whole answer as JSON; only after an end without a fault."""
        assert self._end is not None
        text = "".join(self._texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["content"] = text or None
            message["tool_calls"] = [call.value() for call in self._calls]
        logprobs = _logprobs_object(self._logprobs) if self._echo.logprobs else None
        choice = {"index": 0, "message": message, "logprobs": logprobs, **self.choice()}
        return msgspec.json.encode(
            {
                "id": self._turn.response,
                "object": "chat.completion",
                "created": self._turn.created,
                "model": self._turn.model,
                "choices": [choice],
                "usage": usage(self._end.usage),
            }
        )


class Encoder:
    """The frames of a streamed answer: a pure function of the turn and its steps."""

    def __init__(self, turn: Turn, item_id: ItemId) -> None:
        self._turn = turn
        options = _echo_decoder.decode(turn.raw).stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._answer = Answer(turn, item_id)

    def begin(self) -> list[bytes]:
        """What can be told once the request is accepted: the first chunk, with the role."""
        return [self._chunk({"role": "assistant", "content": ""})]

    def feed(self, step: Step) -> list[bytes]:
        """The frames that `step` adds, the last one included when it ends the answer."""
        if isinstance(step, Waiting):
            return [self._chunk({}, told=fields.progress(step))]
        delta = self._answer.take(step)
        if self._answer.fault is not None:
            return [frame(failure.body(self._answer.fault)), DONE]
        if isinstance(step, Ended):
            frames = [self._chunk({}, self._answer.choice())]
            if self._include_usage:
                frames.append(self._frame([], usage(step.usage)))
            return [*frames, DONE]
        if delta is None:
            return []
        return [self._chunk(delta, logprobs=step.logprobs if isinstance(step, TextDelta) else ())]

    def _chunk(
        self,
        delta: dict[str, Any],
        end: dict[str, Any] | None = None,
        logprobs: Sequence[Logprob] = (),
        told: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        named = _logprobs_object(logprobs) if logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": named, **(end or {"finish_reason": None})}
        return self._frame([choice], None, told)

    def _frame(
        self,
        choices: list[dict[str, Any]],
        counts: dict[str, Any] | None,
        told: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        chunk: dict[str, Any] = {
            "id": self._turn.response,
            "object": "chat.completion.chunk",
            "created": self._turn.created,
            "model": self._turn.model,
            "choices": choices,
            **told,
        }
        if self._include_usage:
            chunk["usage"] = counts
        return frame(msgspec.json.encode(chunk))


def _logprobs_object(logprobs: Sequence[Logprob]) -> dict[str, Any]:
    return {"content": [fields.logprob_object(one) for one in logprobs], "refusal": None}


def usage(counts: Usage) -> dict[str, Any]:
    """The usage object; tokens from the cache are part of the prompt's."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.output,
        "total_tokens": counts.prompt + counts.output,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }
