"""The HTTP connection's edge: what a client may send before the app hears of it, and how long it may read nothing.

The app bounds the body. The request line, the headers and the trailers are gathered by the server below it, which has
no limit of its own: a client that goes on sending headers would fill the memory. Nor does that server give up a client
that reads nothing, or that never ends what it sends: its connection, and what was made for it, would stay for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from zjournal.api import failure, refusals
from zjournal.api.readers import Watched
from zjournal.api.sse import CONNECTION
from zjournal.errors import BadRequest

HEAD_BYTES_MAX = 64 << 10  # proxies usually allow 8 to 32 KiB
SENDER_TIMEOUT_S = 60.0  # for a whole head, from the opening or its first byte on; for the next piece of a body


def bounded(reader_timeout_s: float, refused: refusals.Refusals | None = None) -> type[BoundedProtocol]:
    """The protocol with another limit for readers. `refused` hears of what is no request."""

    class Bounded(BoundedProtocol):
        _reader_timeout_s = reader_timeout_s
        _refused = refused

    return Bounded


class BoundedProtocol(Watched, HttpToolsProtocol):
    """One connection. What is no HTTP, or has over HEAD_BYTES_MAX that are no body, is answered with 400 and closed.

    A client that lags behind has 64 KiB made for it, and whoever makes more waits. One that takes not a single byte of
    them for `_reader_timeout_s` is cut; `cut` then says so. Its last bytes may be in the system's buffers. One that
    opens a connection and does not send a request, or stops in the middle of one, has it closed.
    """

    stopping = False  # the server ends
    _sender_timeout_s = SENDER_TIMEOUT_S
    _refused: refusals.Refusals | None = None
    _sending: asyncio.TimerHandle | None = None  # while a request is to come, or the rest of one
    _unread_bytes = 0  # received since the head was whole, or since the last piece of a body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_more()

    def _await_more(self) -> None:
        self._await_no_more()
        self._sending = self.loop.call_later(self._sender_timeout_s, self._silent)

    def _silent(self) -> None:
        """Nothing came, or nothing was to be read, or it is a client that listens to an answer meanwhile."""
        self._sending = None
        answered = self.cycle is None or self.cycle.response_complete
        if self.flow.read_paused or self.pipeline or not (answered or self.cycle.more_body):
            self._await_more()
        else:
            self.transport.close()

    def _await_no_more(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def on_message_begin(self) -> None:
        if self._sending is None:  # the head of a further request
            self._await_more()
        super().on_message_begin()
        scope: Any = self.scope
        scope[CONNECTION] = self

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._took()

    def shutdown(self) -> None:
        self.stopping = True
        super().shutdown()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch_no_more()
        self._await_no_more()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._watch_no_more()  # another protocol has the connection from now on
        self._await_no_more()
        super().handle_websocket_upgrade()

    def _blocked(self) -> bool:
        return self.flow.write_paused or self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response("The request line and headers are too long.")
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._sending is None and self.transport.get_protocol() is self:
            self._await_more()  # it was line ends between two requests, or such

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        self._await_more()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        self._await_more()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        self._await_no_more()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Tells `msg` in the shape of every other error, unless an answer is being sent, and closes."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            if self._refused is not None:
                self._refused.tell(refusals.unread(BadRequest.status, BadRequest.code))
            body = failure.body(BadRequest(msg))
            head = (
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            )
            self.transport.write(head + body)
        self.transport.close()
