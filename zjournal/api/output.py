"""The output items of the Responses protocol: each folds its part of an answer, and tells it as events on the way.

An item is opened, added to, and closed; one is open at a time. What it is at the end does not depend on whether anybody
listened to its events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from zjournal import ask
from zjournal.api import fields
from zjournal.api.custom import Input

Event = tuple[str, dict[str, Any]]  # its type, and its values but for the number

OPEN, DONE, CUT = "in_progress", "completed", "incomplete"  # the status of an item


class Item(Protocol):
    """One output item. `index`: its place in the output."""

    id: str

    def begin(self) -> Iterator[Event]:
        """It opens."""

    def more(self, delta: Any) -> Iterator[Event]:
        """More of it, by a delta of its kind."""

    def close(self, status: str) -> Iterator[Event]:
        """It is over, and is not added to any more."""

    def value(self) -> dict[str, Any]:
        """The item as an object: without content while it is open, whole at the end."""


class _Parted:
    """An item with one content part."""

    def __init__(self, item_id: str, index: int) -> None:
        self.id = item_id
        self._index = index
        self._status = OPEN
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._index, "item": self.value()}
        yield self._in_part("response.content_part.added", part=self._part())

    def _closed(self, status: str) -> Iterator[Event]:
        self._status = status
        yield self._in_part("response.content_part.done", part=self._part())
        yield "response.output_item.done", {"output_index": self._index, "item": self.value()}

    def _in_part(self, name: str, **values: Any) -> Event:
        return name, {"item_id": self.id, "output_index": self._index, "content_index": 0, **values}

    def _content(self) -> list[dict[str, Any]]:
        return [] if self._status == OPEN else [self._part()]

    def _part(self) -> dict[str, Any]:
        raise NotImplementedError

    def value(self) -> dict[str, Any]:
        raise NotImplementedError


class Message(_Parted):
    """A run of the answer's text."""

    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self._logprobs: list[dict[str, Any]] = []

    def more(self, delta: ask.TextDelta) -> Iterator[Event]:
        told = [fields.logprob_object(one) for one in delta.logprobs]
        self._texts.append(delta.text)
        self._logprobs += told
        yield self._in_part("response.output_text.delta", delta=delta.text, logprobs=told)

    def close(self, status: str) -> Iterator[Event]:
        text = "".join(self._texts)
        yield self._in_part("response.output_text.done", text=text, logprobs=self._logprobs)
        yield from self._closed(status)

    def _part(self) -> dict[str, Any]:
        return text_part("".join(self._texts), self._logprobs)

    def value(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": self._status,
            "role": "assistant",
            "content": self._content(),
        }


class Reasoning(_Parted):
    """A run of thoughts. They are told as they are, so there is no summary."""

    def more(self, delta: ask.ReasoningDelta) -> Iterator[Event]:
        self._texts.append(delta.text)
        yield self._in_part("response.reasoning_text.delta", delta=delta.text)

    def close(self, status: str) -> Iterator[Event]:
        yield self._in_part("response.reasoning_text.done", text="".join(self._texts))
        yield from self._closed(status)

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._texts)}

    def value(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self._status,
            "summary": [],
            "content": self._content(),
            "encrypted_content": None,
        }


class _Called:
    """A call. What it is called with stands in `field`, whose events begin with `told`."""

    type = field = told = ""

    def __init__(self, item_id: str, index: int, call_id: str, name: str, namespace: str = "") -> None:
        """`name`: in its `namespace`, if it has one."""
        self.id = item_id
        self._index = index
        self._call_id = call_id
        self._name = name
        self._namespace = namespace
        self._status = OPEN
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._index, "item": self.value()}

    def value(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": self.type,
            "status": self._status,
            "call_id": self._call_id,
            "name": self._name,
            **({"namespace": self._namespace} if self._namespace else {}),
            self.field: "" if self._status == OPEN else "".join(self._texts),
        }

    def _more(self, text: str) -> Iterator[Event]:
        if text:
            self._texts.append(text)
            yield f"{self.told}.delta", {"item_id": self.id, "output_index": self._index, "delta": text}

    def _closed(self, status: str, **values: Any) -> Iterator[Event]:
        self._status = status
        values[self.field] = "".join(self._texts)
        yield f"{self.told}.done", {"item_id": self.id, "output_index": self._index, **values}
        yield "response.output_item.done", {"output_index": self._index, "item": self.value()}


class FunctionCall(_Called):
    """A call of a function; `arguments` is what the model wrote, JSON or not."""

    type, field, told = "function_call", "arguments", "response.function_call_arguments"

    def more(self, delta: ask.CallArguments) -> Iterator[Event]:
        yield from self._more(delta.text)

    def close(self, status: str) -> Iterator[Event]:
        yield from self._closed(status, name=self._name)


class CustomCall(_Called):
    """A call of a custom tool; `input` is its text."""

    type, field, told = "custom_tool_call", "input", "response.custom_tool_call_input"

    def __init__(self, item_id: str, index: int, call_id: str, name: str, namespace: str = "") -> None:
        super().__init__(item_id, index, call_id, name, namespace)
        self._input = Input()

    def more(self, delta: ask.CallArguments) -> Iterator[Event]:
        yield from self._more(self._input.feed(delta.text))

    def close(self, status: str) -> Iterator[Event]:
        yield from self._more(self._input.end())
        yield from self._closed(status)


class Compaction:
    """A summary that stands for all that was said, in the form that a client keeps. Only its end has the text."""

    def __init__(self, item_id: str, index: int, seal: Callable[[str], str]) -> None:
        self.id = item_id
        self._index = index
        self._seal = seal
        self._texts: list[str] = []
        self._status = OPEN

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._index, "item": self.value()}

    def more(self, delta: ask.TextDelta) -> Iterator[Event]:
        self._texts.append(delta.text)
        yield "response.compaction.compacting", {"item_id": self.id, "output_index": self._index}

    def close(self, status: str) -> Iterator[Event]:
        self._status = status
        yield "response.output_item.done", {"output_index": self._index, "item": self.value()}

    def value(self) -> dict[str, Any]:
        content = "" if self._status == OPEN else self._seal("".join(self._texts).strip())
        return {"id": self.id, "type": "compaction", "encrypted_content": content}


def text_part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """An output_text content part."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
