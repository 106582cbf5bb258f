"""The answer in Chat Completions: the steps of one or several choices become chunks, or one body.

Each choice is a response of its own, and a `Choice` folds its steps; the stream and the whole body come from the same
folds. The usage counts the prompt once, as choice 0 met it, and the output of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from zjournal.api import failure, fields
from zjournal.api.custom import Input
from zjournal.api.sse import DONE, frame
from zjournal.ask import (
    Broke,
    CallArguments,
    CallEnded,
    CallStarted,
    Ended,
    Logprob,
    ReasoningDelta,
    Step,
    TextDelta,
    Usage,
    Waiting,
)
from zjournal.errors import Fault, Unavailable

if TYPE_CHECKING:
    from zjournal.api.turns import Turn

ItemId = Callable[["Turn", int, str], str]  # (turn, index, "call") to the id of the answer's call

_CUT = ("length", "loop", "fence")  # ends of an answer that is not whole
_OURS = ("loop", "fence")  # of them, those that Chat has no word for


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Echo(msgspec.Struct):
    """What an answer needs to know of its request."""

    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    functions: list[msgspec.Raw] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


_echo_decoder = msgspec.json.Decoder(_Echo)


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
        return {"tool_calls": [{"index": index, **self._object("")}]}

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
        return {"tool_calls": [{"index": index, kind: {field: text}}]}

    def _object(self, text: str) -> dict[str, Any]:
        kind, field = self._spelling
        return {"id": self._id, "type": kind, kind: {"name": self._name, field: text}}

    @property
    def _spelling(self) -> tuple[str, str]:
        return ("function", "arguments") if self._input is None else ("custom", "input")


class _OlderCall:
    """The call of an answer to a request with `functions`. It has no id, and is the only one."""

    def __init__(self, started: CallStarted) -> None:
        self._name = started.name
        self._texts: list[str] = []
        self.truncated = False

    def begin(self, index: int) -> dict[str, Any]:
        assert index == 0, index
        return {"function_call": {"name": self._name, "arguments": ""}}

    def more(self, index: int, text: str) -> dict[str, Any] | None:
        self._texts.append(text)
        return {"function_call": {"arguments": text}} if text else None

    def end(self, ended: CallEnded) -> dict[str, Any] | None:
        self.truncated = ended.truncated
        return None

    def value(self) -> dict[str, Any]:
        return {"name": self._name, "arguments": "".join(self._texts)}


class Choice:
    """The fold of one choice's steps; what it knows at the end is the whole of it."""

    def __init__(self, turn: Turn, item_id: ItemId, index: int, echo: _Echo) -> None:
        self._turn = turn
        self._item_id = item_id
        self._index = index
        self._custom = {tool.name for tool in turn.terms.tools if tool.kind == "custom"}
        self._older = bool(echo.functions)
        self._logprobs_wanted = bool(echo.logprobs)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[_Said | _OlderCall] = []
        self._logprobs: list[Logprob] = []
        self.end: Ended | None = None
        self.fault: Fault | None = None  # why there is no answer, once that is known

    def take(self, step: Step) -> dict[str, Any] | None:
        """Folds a step in; the `delta` by which a stream tells it, if it tells anything."""
        assert self.end is None, step
        assert self.fault is None, step
        match step:
            case TextDelta(text=text, logprobs=logprobs):
                self._texts.append(text)
                self._logprobs += logprobs
                return {"content": text}
            case ReasoningDelta(text=text):
                self._thoughts.append(text)
                return {"reasoning_content": text}
            case CallStarted(index=index):
                assert index == len(self._calls), step
                self._calls.append(self._call(step))
                return self._calls[index].begin(index)
            case CallArguments(index=index, text=text):
                return self._calls[index].more(index, text)
            case CallEnded(index=index):
                return self._calls[index].end(step)
            case Ended(reason="cancelled"):
                self.fault = Unavailable("The request was cancelled before it was finished.")
            case Ended():
                self.end = step
            case Broke():
                self.fault = failure.fault_of(step)
        return None

    def _call(self, started: CallStarted) -> _Said | _OlderCall:
        if self._older:
            return _OlderCall(started)
        return _Said(self._item_id(self._turn, started.index, "call"), started, started.name in self._custom)

    def finish(self) -> dict[str, Any]:
        """Why the choice stopped, in Chat's words; only after an end without a fault."""
        assert self.end is not None
        reason = self.end.reason
        if reason in _CUT:
            told = "length"
        elif self._calls and not any(call.truncated for call in self._calls):
            told = "function_call" if self._older else "tool_calls"
        else:
            told = "stop"
        return {"finish_reason": told, **({"stop_reason": reason} if reason in _OURS else {})}

    def value(self) -> dict[str, Any]:
        """The whole choice; only after an end without a fault."""
        text = "".join(self._texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["content"] = text or None
            values = [call.value() for call in self._calls]
            message |= {"function_call": values[0]} if self._older else {"tool_calls": values}
        logprobs = logprobs_object(self._logprobs) if self._logprobs_wanted else None
        return {"index": self._index, "message": message, "logprobs": logprobs, **self.finish()}


class Answer:
    """The fold of all choices of a request."""

    def __init__(self, turn: Turn, item_id: ItemId) -> None:
        """`turn` is that of choice 0, with the others."""
        self._turn = turn
        echo = _echo_decoder.decode(turn.raw)
        self.choices = [Choice(one, item_id, index, echo) for index, one in enumerate(turn.choices)]

    def take(self, step: Step, index: int = 0) -> dict[str, Any] | None:
        """Folds a step of one choice in; returns as Choice.take."""
        return self.choices[index].take(step)

    @property
    def fault(self) -> Fault | None:
        """Why there is no answer: that of one choice is that of all."""
        return next((choice.fault for choice in self.choices if choice.fault is not None), None)

    @property
    def whole(self) -> bool:
        """Whether every choice has ended without a fault."""
        return all(choice.end is not None for choice in self.choices)

    def usage(self) -> Usage:
        """The counts of a whole answer."""
        counts = [choice.end.usage for choice in self.choices if choice.end is not None]
        assert len(counts) == len(self.choices)
        output, reasoning = sum(one.output for one in counts), sum(one.reasoning for one in counts)
        return Usage(counts[0].prompt, counts[0].cached, output, reasoning)

    def body(self) -> bytes:
        """The whole answer as JSON; only after an end without a fault."""
        return msgspec.json.encode(
            {
                "id": self._turn.response,
                "object": "chat.completion",
                "created": self._turn.created,
                "model": self._turn.model,
                "choices": [choice.value() for choice in self.choices],
                "usage": usage(self.usage()),
            }
        )


class Encoder:
    """The frames of a streamed answer: a pure function of the turns and of their steps in the order they are fed."""

    def __init__(self, turn: Turn, item_id: ItemId) -> None:
        """`turn` as for Answer."""
        self._turn = turn
        self._include_usage = _echo_decoder.decode(turn.raw).include_usage
        self._answer = Answer(turn, item_id)

    @property
    def over(self) -> bool:
        """Whether the last frame was given."""
        return self._answer.whole or self._answer.fault is not None

    def begin(self) -> list[bytes]:
        """What can be told once the request is accepted: the first chunk of each choice, with the role."""
        return [self._chunk({"role": "assistant", "content": ""}, at) for at in range(len(self._answer.choices))]

    def feed(self, step: Step, index: int = 0) -> list[bytes]:
        """The frames that a step of one choice adds, the last one included when it ends the answer."""
        if isinstance(step, Waiting):
            return [self._chunk({}, index, told=fields.progress(step))]
        delta = self._answer.take(step, index)
        if self._answer.fault is not None:
            return self.broken(self._answer.fault)
        if isinstance(step, Ended):
            frames = [self._chunk({}, index, self._answer.choices[index].finish())]
            return [*frames, *self._last()] if self._answer.whole else frames
        if delta is None:
            return []
        return [self._chunk(delta, index, logprobs=step.logprobs if isinstance(step, TextDelta) else ())]

    def broken(self, fault: Fault) -> list[bytes]:
        """The last frames of an answer that cannot go on."""
        return [frame(failure.body(fault)), DONE]

    def _last(self) -> list[bytes]:
        return [self._frame([], usage(self._answer.usage())), DONE] if self._include_usage else [DONE]

    def _chunk(
        self,
        delta: dict[str, Any],
        index: int,
        end: dict[str, Any] | None = None,
        logprobs: Sequence[Logprob] = (),
        told: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        named = logprobs_object(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": named, **(end or {"finish_reason": None})}
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


def logprobs_object(logprobs: Sequence[Logprob]) -> dict[str, Any]:
    """The `logprobs` of a choice or of a chunk."""
    return {"content": [fields.logprob_object(one) for one in logprobs], "refusal": None}


def usage(counts: Usage) -> dict[str, Any]:
    """The usage object; tokens from the cache are part of the prompt's."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.output,
        "total_tokens": counts.prompt + counts.output,
        "prompt_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }
