"""One socket of Responses as a state machine: what was asked and waits, and which unstored responses it can continue.

Pure: messages and times come in, what to do next comes out. What is sent, and who answers, is in websocket.py.

A socket answers one request at a time. Responses with `store: false` belong to the socket that made them: they can be
continued there and nowhere else, so what it knows of them is their ids. Both are bounded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import msgspec

from zjournal.api import failure, fields
from zjournal.ask import Ask
from zjournal.errors import BadRequest, ConnectionLimit, Fault, Overloaded

CREATE, STEER = "response.create", "response.steer"
# How an answer comes is the socket's affair. Codex sends the first of them over a socket as it does over HTTP.
TRANSPORT = frozenset({"type", "stream", "stream_options", "background"})


class Bounds(msgspec.Struct, frozen=True):
    """What one socket may hold, and how long."""

    waiting: int = 8  # requests behind the one that is answered
    waiting_bytes: int = 64 << 20  # of their messages
    local: int = 128  # unstored responses that can be continued
    local_bytes: int = 64 << 20  # of their requests and answers
    life_s: float = 3600.0  # then no request is taken any more


class Create(msgspec.Struct, frozen=True):
    """A request: the body that it would have over HTTP, and the response that it continues, or ""."""

    body: bytes
    previous: str = ""


class Steer(msgspec.Struct, frozen=True):
    """Input for a response that is running, which no model here can take."""

    previous: str
    input: msgspec.Raw


class _Envelope(msgspec.Struct):
    type: fields.Name
    stream_id: Any = None


class _Steering(msgspec.Struct):
    previous_response_id: str
    input: msgspec.Raw


_envelope_decoder = msgspec.json.Decoder(_Envelope)
_steering_decoder = msgspec.json.Decoder(_Steering)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read(text: str | None) -> Create | Steer:
    """What a message asks for; None is a binary one. Raises BadRequest."""
    if text is None:
        raise BadRequest("A message must be text; this one was binary.")
    message = text.encode()
    envelope = fields.parse(_envelope_decoder, message)
    if envelope.type == STEER:
        steering = fields.parse(_steering_decoder, message)
        return Steer(steering.previous_response_id, steering.input)
    if envelope.type != CREATE:
        raise BadRequest(f"Invalid value for `type`: expected `{CREATE}`, got `{envelope.type[:64]}`.", param="type")
    if envelope.stream_id is not None:
        raise BadRequest("`stream_id` is not supported: a connection has one lane here.", param="stream_id")
    parts = fields.parse(_object_decoder, message)
    previous = fields.parse(fields.any_decoder, parts.get("previous_response_id", b"null"), "previous_response_id")
    body = b",".join(b"%b:%b" % (msgspec.json.encode(k), v) for k, v in parts.items() if k not in TRANSPORT)
    return Create(b"{%b}" % body, previous if isinstance(previous, str) else "")


def error(fault: Fault) -> bytes:
    """The message that tells a fault. Without `status` Codex would wait on, as if nothing had come."""
    told: dict[str, Any] = {"type": "error", "status": fault.status, "error": failure.error(fault)}
    if fault.retry_after_s is not None:
        told["headers"] = {"retry-after": str(fault.retry_after_s)}
    return msgspec.json.encode(told)


def not_steered(steer: Steer) -> bytes:
    """The message that gives input for a running response back."""
    fault = {
        "type": BadRequest.kind,
        "code": "steering_not_supported",
        "message": "A response that runs takes no input here; send it with the next `response.create`.",
    }
    back = {"previous_response_id": steer.previous, "input": steer.input}
    # It is no event of a response, so it has a number of its own.
    return msgspec.json.encode({"type": "response.steer.failed", "sequence_number": 0, "error": fault, "steer": back})


class Local:
    """The unstored responses that a socket can continue, the one that was used last at the end."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0

    def __contains__(self, response: object) -> bool:
        return response in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def continued(self, request: Ask) -> Ask:
        """The request, marked where it continues one of these. Raises BadRequest for one that is to be stored."""
        if request.previous is None or request.previous not in self._sizes:
            return request
        if request.store:
            raise BadRequest(
                f"A stored response cannot continue '{request.previous}', which was made with `store: false` and is "
                "known to this connection alone.",
                param="store",
            )
        self._sizes.move_to_end(request.previous)
        return msgspec.structs.replace(request, local=True)

    def add(self, response: str, size: int) -> list[str]:
        """One more, of so many bytes; gives those that have to go for it, the oldest first. It may be one of them."""
        self._sizes[response] = size
        self._bytes += size
        gone = []
        while len(self._sizes) > self._most or self._bytes > self._most_bytes:
            oldest, freed = self._sizes.popitem(last=False)
            self._bytes -= freed
            gone.append(oldest)
        return gone

    def drop(self, response: str) -> list[str]:
        """Forgets one; gives it if it was there."""
        if response not in self._sizes:
            return []
        self._bytes -= self._sizes.pop(response)
        return [response]

    def clear(self) -> list[str]:
        """Forgets all, the oldest first."""
        gone = list(self._sizes)
        self._sizes.clear()
        self._bytes = 0
        return gone


class Session:
    """One socket between its opening and its end."""

    def __init__(self, now: float, bounds: Bounds) -> None:
        """`now`: seconds, on the clock that the other methods are told of."""
        self.local = Local(bounds.local, bounds.local_bytes)
        self.busy = False  # a request is being answered
        self._bounds = bounds
        self._ends = now + bounds.life_s
        self._waiting: deque[tuple[Create | Fault, int]] = deque()
        self._waiting_bytes = 0

    def take(self, asked: Create | Fault, size: int) -> Fault | None:
        """Takes a request, or what was wrong with it, of `size` bytes; gives the fault of one that cannot wait."""
        bounds = self._bounds
        full = len(self._waiting) >= bounds.waiting or self._waiting_bytes + size > bounds.waiting_bytes
        if full and (self.busy or self._waiting):
            return Overloaded(
                f"This connection answers one request at a time, and {len(self._waiting)} are waiting already."
            )
        self._waiting.append((asked, size))
        self._waiting_bytes += size
        return None

    def next(self, now: float) -> Create | Fault | None:
        """What is to be answered now, in the order in which it came; None if nothing is. Then it is busy."""
        assert not self.busy
        if self.left_s(now) <= 0:
            return ConnectionLimit(
                f"This connection has been open for {self._bounds.life_s / 60:g} minutes; open another one to go on."
            )
        if not self._waiting:
            return None
        asked, size = self._waiting.popleft()
        self._waiting_bytes -= size
        self.busy = True
        return asked

    def answered(self) -> None:
        """The last message of an answer is about to be sent: from now on the next request may be answered."""
        self.busy = False

    def left_s(self, now: float) -> float:
        """How long it takes requests; 0 when it does not any more."""
        return max(self._ends - now, 0.0)
