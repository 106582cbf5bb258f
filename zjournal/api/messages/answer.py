"""The steps of an answer become a message, whole or as events.

The content is a list of blocks, one open at a time; each knows the events by which it is told. What the message is at
the end does not depend on whether anybody listened to its events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from zjournal.api import failure
from zjournal.api.messages.arguments import Input
from zjournal.api.sse import frame
from zjournal.ask import (
    Broke,
    CallArguments,
    CallEnded,
    CallStarted,
    Ended,
    Progress,
    ReasoningDelta,
    Step,
    TextDelta,
    Usage,
    Waiting,
)
from zjournal.errors import Fault, Unavailable

if TYPE_CHECKING:
    from zjournal.api.turns import Turn

ItemId = Callable[["Turn", int, str], str]  # (turn, index, prefix); with "call", index counts the calls
Event = tuple[str, dict[str, Any]]  # its type, and its values

PING = frame(b'{"type":"ping"}', "ping")
_NOTHING = Usage(prompt=0, cached=0, output=0)
_CUT = ("length", "loop", "fence")  # ends of an answer that is not whole; the protocol has one word for them


class _Thinking(msgspec.Struct):
    type: str = ""
    display: str | None = None


class _Echo(msgspec.Struct):
    """What an answer needs to know of its request."""

    max_tokens: int | None = None
    thinking: _Thinking | None = None
    context_management: Any = None


_decode_echo = msgspec.json.Decoder(_Echo).decode


class _Block:
    """A block of the content."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def begin(self) -> dict[str, Any]:
        """The block as it opens."""
        raise NotImplementedError

    def more(self, text: str) -> Iterator[dict[str, Any]]:
        """More of it: the deltas by which that is told."""
        raise NotImplementedError

    def end(self) -> Iterator[dict[str, Any]]:
        """It is over."""
        yield from ()

    def value(self) -> dict[str, Any]:
        """The whole block."""
        raise NotImplementedError


class _TextBlock(_Block):
    """A run of the answer's text."""

    def begin(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def more(self, text: str) -> Iterator[dict[str, Any]]:
        self._texts.append(text)
        yield {"type": "text_delta", "text": text}

    def value(self) -> dict[str, Any]:
        return {"type": "text", "text": "".join(self._texts)}


class _ThinkingBlock(_Block):
    """A run of thoughts. `shown` false: only that there were some is told."""

    def __init__(self, signature: str, shown: bool) -> None:
        super().__init__()
        self._signature = signature
        self._shown = shown

    def begin(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def more(self, text: str) -> Iterator[dict[str, Any]]:
        if self._shown:
            self._texts.append(text)
            yield {"type": "thinking_delta", "thinking": text}

    def end(self) -> Iterator[dict[str, Any]]:
        yield {"type": "signature_delta", "signature": self._signature}

    def value(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "".join(self._texts), "signature": self._signature}


class _CallBlock(_Block):
    """A tool call."""

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._id = call_id
        self._name = name
        self._input = Input()
        self.truncated = True  # until its end says that it was not

    def begin(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": {}}

    def more(self, text: str) -> Iterator[dict[str, Any]]:
        yield from self._told(self._input.feed(text))

    def end(self) -> Iterator[dict[str, Any]]:
        yield from self._told(self._input.end(self.truncated))

    def _told(self, text: str) -> Iterator[dict[str, Any]]:
        if text:
            yield {"type": "input_json_delta", "partial_json": text}

    def value(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": self._input.value()}


class Answer:
    """The fold of an answer's steps into the message. What each step adds is told as events as well."""

    def __init__(self, turn: Turn, item_id: ItemId, diagnostics: dict[str, Any] | None = None) -> None:
        """`diagnostics` as the message has it."""
        self._turn = turn
        self._item_id = item_id
        self._diagnostics = diagnostics
        echo = _decode_echo(turn.raw)
        self._thinking = echo.thinking or _Thinking()
        self._warm = echo.max_tokens == 0  # only the prompt is to be read
        self._managed = echo.context_management is not None
        self._blocks: list[_Block] = []
        self._open: _Block | None = None  # the last of them
        self._begun = False  # whether the message was
        self._usage = _NOTHING
        self._end: Ended | None = None
        self.fault: Fault | None = None  # why there is no answer, once that is known

    def take(self, step: Step) -> list[Event]:
        """Folds a step in; what it means, in events."""
        assert self._end is None, step
        assert self.fault is None, step
        match step:
            case Progress(cached=cached, prompt=prompt):
                self._usage = Usage(prompt, cached, 0)
                return self._start()
            case Waiting():
                return []
            case Ended(reason="cancelled"):
                self.fault = Unavailable("The request was cancelled before it was finished.")
                return []
            case Broke():
                self.fault = failure.fault_of(step)
                return []
            case Ended():
                return self._finish(step)
            case ReasoningDelta() if self._thinking.type == "disabled":
                return self._start()
        return [*self._start(), *self._delta(step)]

    def _start(self) -> list[Event]:
        """The message opens, once it is known what of the prompt was cached."""
        if self._begun:
            return []
        self._begun = True
        return [("message_start", {"message": self._message([], None, None)})]

    def _delta(self, step: Step) -> list[Event]:
        match step:
            case TextDelta(text=text):
                return [*self._into(_TextBlock, _TextBlock), *self._more(text)] if text else []
            case ReasoningDelta(text=text):
                return [*self._into(_ThinkingBlock, self._thoughts), *self._more(text)] if text else []
            case CallStarted(index=index, name=name):
                return [*self._close(), *self._begin(_CallBlock(self._item_id(self._turn, index, "call"), name))]
            case CallArguments(text=text):
                return self._more(text)
            case CallEnded(truncated=truncated):
                assert isinstance(self._open, _CallBlock), step
                self._open.truncated = truncated
                return self._close()
        raise AssertionError(step)

    def _thoughts(self) -> _ThinkingBlock:
        signature = self._item_id(self._turn, len(self._blocks), "sig")
        return _ThinkingBlock(signature, self._thinking.display != "omitted")

    def _into(self, kind: type[_Block], make: Callable[[], _Block]) -> list[Event]:
        """Makes sure that a block of this kind is open."""
        return [] if isinstance(self._open, kind) else [*self._close(), *self._begin(make())]

    def _begin(self, block: _Block) -> list[Event]:
        self._blocks.append(block)
        self._open = block
        return [("content_block_start", {"index": len(self._blocks) - 1, "content_block": block.begin()})]

    def _more(self, text: str) -> list[Event]:
        assert self._open is not None
        return self._deltas(self._open.more(text))

    def _deltas(self, deltas: Iterator[dict[str, Any]]) -> list[Event]:
        index = len(self._blocks) - 1
        return [("content_block_delta", {"index": index, "delta": delta}) for delta in deltas]

    def _close(self) -> list[Event]:
        block, self._open = self._open, None
        if block is None:
            return []
        return [*self._deltas(block.end()), ("content_block_stop", {"index": len(self._blocks) - 1})]

    def _finish(self, end: Ended) -> list[Event]:
        """An empty answer is told as an empty text, for there are clients that look into the first block."""
        self._end = end
        if not self._begun:
            self._usage = Usage(end.usage.prompt, end.usage.cached, 0)
        events = self._start()
        self._usage = end.usage
        if not self._blocks and not self._warm:
            events += self._begin(_TextBlock())
        events += self._close()
        delta = {"stop_reason": self._reason, "stop_sequence": end.stop or None}
        told: dict[str, Any] = {"delta": delta, "usage": self._counts(whole=True)}
        if self._managed:
            told["context_management"] = {"applied_edits": []}
        return [*events, ("message_delta", told), ("message_stop", {})]

    @property
    def _reason(self) -> str:
        """Why the answer stopped, in the protocol's words. A call that is whole waits for its result."""
        assert self._end is not None
        if self._warm or self._end.reason in _CUT:
            return "max_tokens"
        if any(isinstance(block, _CallBlock) and not block.truncated for block in self._blocks):
            return "tool_use"
        return "stop_sequence" if self._end.reason == "stop_string" else "end_turn"

    def _counts(self, whole: bool) -> dict[str, Any]:
        """The usage object. What is read from the cache is no part of `input_tokens`; writing to it costs nothing."""
        usage = self._usage
        counts: dict[str, Any] = {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.output,
        }
        if whole:
            counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
        return counts

    def _message(self, content: list[dict[str, Any]], reason: str | None, stop: str | None) -> dict[str, Any]:
        message: dict[str, Any] = {
            "id": self._turn.response,
            "type": "message",
            "role": "assistant",
            "model": self._turn.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "container": None,
            "diagnostics": self._diagnostics,
            "usage": {**self._counts(whole=self._end is not None), "service_tier": "standard"},
        }
        if self._managed:
            message["context_management"] = {"applied_edits": []} if self._end is not None else None
        return message

    def body(self) -> bytes:
        """The message as JSON; only after an end without a fault."""
        assert self._end is not None
        content = [block.value() for block in self._blocks]
        return msgspec.json.encode(self._message(content, self._reason, self._end.stop or None))


class Encoder:
    """The frames of a streamed answer: a pure function of the turn and its steps."""

    def __init__(
        self, turn: Turn, item_id: ItemId, request_id: str = "", diagnostics: dict[str, Any] | None = None
    ) -> None:
        """`request_id`: of the HTTP request, which an error names."""
        self._answer = Answer(turn, item_id, diagnostics)
        self._request_id = request_id

    def begin(self) -> list[bytes]:
        """Nothing yet: the first event tells what of the prompt was cached."""
        return []

    def feed(self, step: Step) -> list[bytes]:
        """The frames that `step` adds, the last one included when it ends the answer."""
        if isinstance(step, Waiting):
            return [PING]
        frames = [_frame(name, values) for name, values in self._answer.take(step)]
        if self._answer.fault is not None:
            told = failure.anthropic_error(self._answer.fault, self._request_id)
            frames.append(frame(msgspec.json.encode(told), "error"))
        return frames


def _frame(name: str, values: dict[str, Any]) -> bytes:
    return frame(msgspec.json.encode({"type": name, **values}), name)
