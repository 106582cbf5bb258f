"""Responses: its request becomes an `Ask`, the steps of an answer become numbered events or one object.

An `Answer` folds steps into the response object. Creating with and without a stream, and reading a stored
response, are the same fold, so they show the same object. docs/api.md lists every field and whether it is
honoured, echoed, accepted without effect, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from zjournal.api import compaction, fields, output, responses_echo, tooling
from zjournal.api.responses_echo import Echo, TextConfig
from zjournal.api.responses_items import Input
from zjournal.api.sse import DONE, frame
from zjournal.ask import (
    Ask,
    Broke,
    CallArguments,
    CallEnded,
    CallStarted,
    Ended,
    Message,
    ReasoningDelta,
    Sampling,
    Step,
    Text,
    TextDelta,
    ToolChoice,
    ToolSpec,
    Usage,
    Waiting,
)
from zjournal.errors import BadRequest
from zjournal.journal.log import CRASH_MESSAGE

if TYPE_CHECKING:
    from zjournal.api.turns import Turn

ENCODER_VERSION = 1
# After a crash the numbers of what comes next are larger than any that can have been told: deltas are told at most
# 64 tokens ahead of what is written down.
CRASH_GAP = 4096

CALLS_MAX = 1024  # a `max_tool_calls` over this is none

ItemId = Callable[["Turn", int, str], str]  # (turn, index, prefix) to "msg_<hex>"; with "call", index counts the calls
Seal = Callable[["Turn", str], str]  # a summary to the text that a client keeps

_LOGPROBS = "message.output_text.logprobs"  # of `include`

# What these fields may hold when they ask for nothing; anything else is refused by name.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "truncation": ("disabled",),
}
# The same for what stands in a field that is an object.
NEUTRAL_IN: Mapping[str, Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "image": {"context_compression": ("auto", "disabled")},
        "access_programs": {"cyber": ("standard",)},
        "background_options": {"completion_window": ("soonest",)},
    }
)

# Ends of an answer that is cut, and the reason that a client is told.
_INCOMPLETE: Mapping[str, str] = MappingProxyType({"length": "max_output_tokens", "loop": "loop", "fence": "fence"})

# `response.error.code` is a closed list; of ours, these are in it or are what clients act upon.
_ERROR_CODES = ("server_error", "rate_limit_exceeded", "context_length_exceeded")


class _StreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None


class _Image(msgspec.Struct):
    context_compression: Any = None


class _AccessPrograms(msgspec.Struct):
    cyber: Any = None


class _BackgroundOptions(msgspec.Struct):
    completion_window: Any = None
    continuation_id: str | None = None


class _Body(fields.SamplingFields, kw_only=True):
    model: fields.Name
    input: str | list[msgspec.Raw] = msgspec.field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: fields.Tokens | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    store: bool | None = None
    tools: list[msgspec.Raw] | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    cache_salt: fields.CacheSalt | None = None
    tool_choice: msgspec.Raw = msgspec.Raw()
    parallel_tool_calls: bool | None = None
    n: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    truncation: Any = None
    image: _Image | None = None
    access_programs: _AccessPrograms | None = None
    background_options: _BackgroundOptions | None = None
    prompt_cache_retention: str | None = None
    client_metadata: dict[str, Any] | None = None


_body_decoder = msgspec.json.Decoder(_Body)
SHAPES: Mapping[str, type] = MappingProxyType({"body": _Body, "echo": Echo})  # for openapi


def decode(raw: bytes, headers: Mapping[str, str], merged: bool = False) -> Ask:
    """The Ask of a request body; header names are lower-case. Raises BadRequest, with the JSON path as `param`.

    `merged`: the items of its conversation, if it names one, stand in its input (conversations.merged).
    """
    body = fields.parse(_body_decoder, raw)
    echo = fields.parse(responses_echo.decoder, raw)  # what is repeated must be sound as well
    fields.require_neutral(body, NEUTRAL | fields.FOREIGN | ({} if merged else {"conversation": ()}))
    for name, neutral in NEUTRAL_IN.items():
        if (options := getattr(body, name)) is not None:
            fields.require_neutral(options, neutral, name)
    found = Input()
    found.read(body.input)
    tooling.refuse_doubled(found.items, "call_id")
    _check_together(body, echo, found)
    tools = _tools(body, found)
    choice = tooling.choice(body.tool_choice, tools, nested=False, parallel=body.parallel_tool_calls)
    if echo.max_tool_calls is not None and echo.max_tool_calls <= CALLS_MAX:
        choice = msgspec.structs.replace(choice, most=echo.max_tool_calls)
    form, at = (msgspec.Raw(), "text.format") if body.text is None else (body.text.format, "text.format")
    if not form and found.update is not None:
        form, at = found.update
    if found.compacts:  # it is answered with a summary, whatever else was asked for
        form, choice = msgspec.Raw(), ToolChoice("none")
        found.items.append(Message("user", (Text(compaction.ASKED, f"input[{len(body.input) - 1}]"),)))
    return Ask(
        protocol="responses",
        model=body.model,
        items=tuple(found.items),
        instructions=None if body.instructions is None else Text(body.instructions, "instructions"),
        tools=tools,
        choice=choice,
        format=tooling.text_format(form, at, nested=False),
        sampling=Sampling() if echo.warm else fields.sampling(body, _logprobs(body)),
        max_tokens=None if echo.warm else body.max_output_tokens,
        stop=() if echo.warm else fields.stop_strings(body.stop),
        store=body.store is not False,
        stream=bool(body.stream),
        previous=body.previous_response_id,
        session_key=fields.session_key(headers, echo.prompt_cache_key),
        cache_salt=body.cache_salt,
        background=fields.background(body),
        detached=bool(echo.background),
        warm=echo.warm,
        skipped=_skipped(body, found),
        sealed=tuple(found.sealed),
        client=fields.client(headers),
    )


def _check_together(body: _Body, echo: Echo, found: Input) -> None:
    """Raises BadRequest for fields that do not go together, and for a request that has nothing to answer."""
    if echo.conversation_id and body.store is False:
        raise BadRequest("A response in a `conversation` must be stored, for its items are kept there.", param="store")
    if echo.background and body.store is False:
        raise BadRequest("`background` needs `store`: who asks for it later must find it.", param="background")
    if echo.conversation_id and body.previous_response_id is not None:
        raise BadRequest("`previous_response_id` and `conversation` cannot be combined.", param="previous_response_id")
    if not found.items and body.previous_response_id is None:
        raise BadRequest("`input` holds nothing to answer.", param="input")


def _tools(body: _Body, found: Input) -> tuple[ToolSpec, ...]:
    """All tools that a model is told of: those of the request, then those that stand in its input."""
    lists = [(body.tools or [], "tools"), *found.tools]
    tools = tuple(tool for raws, at in lists for tool in tooling.tools(raws, nested=False, at=at))
    tooling.refuse_ambiguous(tools)
    return tools


def _skipped(body: _Body, found: Input) -> tuple[str, ...]:
    lists = [body.tools or [], *(raws for raws, _ in found.tools)]
    return tuple(dict.fromkeys([*(kind for raws in lists for kind in tooling.left_out(raws)), *found.skipped]))


def _logprobs(body: _Body) -> int:
    """Alternatives to tell beside each token; -1: no logprobs at all. Each of the two fields asks for them."""
    top = fields.top_logprobs(body.top_logprobs)
    return top if top or _LOGPROBS in (body.include or ()) else -1


class Answer:
    """The fold of an answer's steps into the response object. What each step adds is told as events as well."""

    def __init__(
        self,
        turn: Turn,
        item_id: ItemId,
        seal: Seal | None = None,
        diagnostics: dict[str, Any] | None = None,
    ) -> None:
        """`seal` is needed where a conversation is compacted; `diagnostics`: of the prompt, if they were asked for."""
        self._turn = turn
        self._item_id = item_id
        echo = responses_echo.decoder.decode(turn.raw)
        self._request = responses_echo.request_half(turn, echo)
        if diagnostics is not None:
            self._request["prompt_cache_diagnostics"] = diagnostics
        self._tools = {tool.name: tool for tool in turn.terms.tools}
        self._warm = echo.warm
        self._seal = seal if responses_echo.compacts(turn.raw) else None
        self.queued = bool(echo.background)  # until there is a sign of life
        self._items: list[output.Item] = []
        self._open: output.Item | None = None  # the last of them
        self.end: Ended | Broke | None = None

    def take(self, step: Step) -> list[output.Event]:
        """Folds a step in; what it means for the items, in events."""
        assert self.end is None, step
        events: list[output.Event] = []
        self.queued = self.queued and isinstance(step, Waiting)
        if self._seal is not None:
            return self._summary(step, self._seal)
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

    def _summary(self, step: Step, seal: Seal) -> list[output.Event]:
        """Of a summary only its text counts, and all of it is one item."""
        events: list[output.Event] = []
        if isinstance(step, TextDelta):
            if self._open is None:
                index = len(self._items)
                item = output.Compaction(self._item_id(self._turn, index, "cmp"), index, lambda s: seal(self._turn, s))
                events += self._begin(item)
            assert self._open is not None
            events += self._open.more(step)
        elif isinstance(step, Ended | Broke):
            self.end = step
            events += self._close(output.DONE)
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
        tool = self._tools.get(started.name)
        name, namespace = (started.name, "") if tool is None else (tooling.apart(tool), tool.namespace)
        item: output.Item
        if tool is not None and tool.kind == "custom":
            item = output.CustomCall(self._item_id(self._turn, index, "ctc"), index, call_id, name, namespace)
        else:
            item = output.FunctionCall(self._item_id(self._turn, index, "fc"), index, call_id, name, namespace)
        return [*self._close(output.DONE), *self._begin(item)]

    def _begin(self, item: output.Item) -> list[output.Event]:
        self._items.append(item)
        self._open = item
        return list(item.begin())

    def _close(self, status: str) -> list[output.Event]:
        item, self._open = self._open, None
        return list(item.close(status)) if item is not None else []

    def _finish(self, end: Ended | Broke) -> list[output.Event]:
        """An empty answer is still the assistant's turn, and the chain holds it; a failure or warm-up adds nothing."""
        events: list[output.Event] = []
        if not self._items and isinstance(end, Ended) and end.reason != "cancelled" and not self._warm:
            events += self._into(output.Message, "msg")
        return events + self._close(output.DONE if self.status == "completed" else output.CUT)

    @property
    def status(self) -> str:
        match self.end:
            case None:
                return "queued" if self.queued else "in_progress"
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


class Events:
    """The events of a streamed answer, each by its type and its JSON: a pure function of the turn and its steps.

    Numbers count from 0. How they cross to a client is the transport's affair.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.number = 0  # of the next event

    def begin(self) -> list[tuple[str, bytes]]:
        """What can be told once the request is accepted."""
        second = "response.queued" if self._answer.queued else "response.in_progress"
        return [self._lifecycle("response.created"), self._lifecycle(second)]

    def feed(self, step: Step) -> list[tuple[str, bytes]]:
        """The events that `step` adds, the last one included when it ends the answer."""
        if isinstance(step, Waiting):
            name = "response.queued" if self._answer.queued else "response.in_progress"
            return [self._lifecycle(name, **fields.progress(step))]
        if isinstance(step, Broke) and step.message == CRASH_MESSAGE:
            self.number += CRASH_GAP
        waited = self._answer.queued
        added = self._answer.take(step)
        admitted = waited and not isinstance(step, Ended | Broke)
        events = [self._lifecycle("response.in_progress")] if admitted else []
        events += [self._event(name, **values) for name, values in added]
        if isinstance(step, Ended | Broke):
            # No event says cancelled; the object in it does.
            last = "incomplete" if self._answer.status == "cancelled" else self._answer.status
            events.append(self._lifecycle(f"response.{last}"))
        return events

    def _lifecycle(self, name: str, **values: Any) -> tuple[str, bytes]:
        return self._event(name, response=self._answer.response(), **values)

    def _event(self, name: str, /, **values: Any) -> tuple[str, bytes]:
        data = msgspec.json.encode({"type": name, "sequence_number": self.number, **values})
        self.number += 1
        return name, data


class Encoder:
    """The frames of a streamed answer as server-sent events."""

    def __init__(
        self,
        turn: Turn,
        item_id: ItemId,
        seal: Seal | None = None,
        diagnostics: dict[str, Any] | None = None,
        after: int = -1,
    ) -> None:
        """Events up to number `after` are left out: the client has them."""
        self._events = Events(Answer(turn, item_id, seal, diagnostics))
        self._after = after

    def begin(self) -> list[bytes]:
        return self._frames(self._events.begin())

    def feed(self, step: Step) -> list[bytes]:
        frames = self._frames(self._events.feed(step))
        return [*frames, DONE] if isinstance(step, Ended | Broke) else frames

    def _frames(self, events: list[tuple[str, bytes]]) -> list[bytes]:
        left = max(len(events) - (self._events.number - self._after - 1), 0)
        return [frame(data, name) for name, data in events[left:]]


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
