"""Fences as the engine gets them: made from a request, remembered for the next one with the same tools."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from zjournal import ask
from zjournal.dialects.base import Dialect
from zjournal.dialects.fences import validate
from zjournal.dialects.fences.build import Bounds, build, thinking
from zjournal.link import wire
from zjournal.sessions.follow import text_of

DIGEST_BYTES = 16
KEPT_MAX = 128  # fences
KEPT_BYTES_MAX = 16 << 20  # of their grammars


class Fenced(msgspec.Struct, frozen=True):
    """A request's fence, and what it leaves out of the client's schemas.

    `warnings` are sentences for a person, one for each keyword, and `loose` the paths that they speak of; results of
    the tools or the format that have any are checked afterwards.
    """

    fence: wire.Fence | None = None
    warnings: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()


class Fences:
    """Makes the fences of one dialect under one tokenizer."""

    def __init__(self, dialect: Dialect, control: Mapping[str, int]) -> None:
        """`control`: the tokenizer's control tokens by their literal."""
        self._dialect, self._control = dialect, control
        self._kept: OrderedDict[bytes, Fenced] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()  # asked by several threads

    def of(self, request: ask.Ask, begun: str = "") -> Fenced:
        """The fence of a request; without tools and format a model that does not think has none, at no cost.

        `begun` is what the prompt has already said of the answer. Raises BadRequest as `build` does.
        """
        if not request.tools and request.format is None and self._dialect.reasoning is None:
            return Fenced()
        return self.begun(self._found(request), begun)

    def begun(self, found: Fenced, begun: str) -> Fenced:
        """The fence of a request that was asked for before its prompt was there, and `begun` known."""
        if found.fence is not None and thinking(self._dialect, begun):
            return msgspec.structs.replace(found, fence=msgspec.structs.replace(found.fence, begun=True))
        return found

    def _found(self, request: ask.Ask) -> Fenced:
        """What is the same wherever the answer begins."""
        told = msgspec.msgpack.encode((request.tools, request.choice, request.format))
        key = hashlib.blake2b(told, digest_size=16).digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        built = build(request.tools, request.choice, request.format, self._dialect, self._control)
        found = Fenced(None if built.bounds is None else _sent(built.bounds), built.warnings, built.loose)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = found
                self._bytes += _size(found)
            while len(self._kept) > KEPT_MAX or (self._bytes > KEPT_BYTES_MAX and len(self._kept) > 1):
                self._bytes -= _size(self._kept.popitem(last=False)[1])
        return found


def digest(fence: wire.Fence | None, item_secret: bytes) -> bytes:
    """What a turn's acceptance keeps of its fence, to tell whether it is derived as it was; empty: there is none.

    Keyed by the turn's own secret (identity.item_secret), which goes with it to other journals.
    """
    if fence is None:
        return b""
    return hmac.digest(item_secret, b"fence\0" + msgspec.msgpack.encode(fence), "sha256")[:DIGEST_BYTES]


def _size(fenced: Fenced) -> int:
    return len(fenced.fence.grammar) if fenced.fence is not None else 0


def _sent(bounds: Bounds) -> wire.Fence:
    """As it crosses to the engine."""
    thoughts = None
    if bounds.thoughts is not None:
        opening, closing = (wire.Tag(text.encode(), token) for text, token in bounds.thoughts)
        thoughts = opening, closing
    return wire.Fence(
        grammar=bounds.grammar,
        whole=bounds.whole,
        triggers=tuple(wire.Tag(text.encode(), token) for text, token in bounds.triggers),
        thoughts=thoughts,
        begun=bounds.begun,
        banned=bounds.banned,
    )


class Check(msgspec.Struct, frozen=True):
    """Looks at the results of a request whose fence leaves something out."""

    tools: tuple[ask.ToolSpec, ...]
    format: ask.Format | None

    @classmethod
    def of(cls, request: ask.Ask, fenced: Fenced) -> Check | None:
        """None where the fence keeps all. What it keeps all of is not looked at either."""
        tools = tuple(tool for tool in request.tools if _within(tool.path, fenced.loose) or _own(tool, fenced.loose))
        form = request.format if request.format is not None and _within(request.format.path, fenced.loose) else None
        return cls(tools, form) if tools or form is not None else None

    def concerns(self, deltas: Sequence[ask.Delta], index: int) -> bool:
        """Whether a call is one that `call` looks at, which belongs into a thread."""
        return self._tool(deltas, index) is not None

    def call(self, deltas: Sequence[ask.Delta], index: int) -> str:
        """What is wrong with a whole call of an answer; "" if nothing is found."""
        tool = self._tool(deltas, index)
        if tool is None:
            return ""
        text = "".join(one.text for one in deltas if isinstance(one, ask.CallArguments) and one.index == index)
        return validate.arguments(tool, text)

    def _tool(self, deltas: Sequence[ask.Delta], index: int) -> ask.ToolSpec | None:
        name = next(one.name for one in deltas if isinstance(one, ask.CallStarted) and one.index == index)
        return next((tool for tool in self.tools if tool.name == name), None)

    def answer(self, deltas: Sequence[ask.Delta]) -> str:
        """What is wrong with the text of an answer that makes no call."""
        if self.format is None or any(isinstance(one, ask.CallStarted) for one in deltas):
            return ""
        return validate.fault(self.format.schema, text_of(deltas))


def _within(path: str, loose: Sequence[str]) -> bool:
    """Whether one of these paths is within another one."""
    return any(one == path or one.startswith((f"{path}.", f"{path}[")) or not path for one in loose)


def _own(tool: ask.ToolSpec, loose: Sequence[str]) -> bool:
    """Whether it is a tool's own grammar that is left out."""
    return tool.grammar is not None and tool.grammar.path in loose
