"""The HTTP connection's edge: what a client may send before the app hears of it, and how long it may read nothing.

The app bounds the body. The request line, the headers and the trailers are gathered by the server below it, which has
no limit of its own: a client that goes on sending headers would fill the memory. Nor does that server give up a client
that reads nothing: its connection, and what was made for it, would stay for ever.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from zjournal.api import failure
from zjournal.api.readers import Watched
from zjournal.api.sse import CONNECTION
from zjournal.errors import BadRequest

HEAD_BYTES_MAX = 64 << 10  # proxies usually allow 8 to 32 KiB


def bounded(reader_timeout_s: float) -> type[BoundedProtocol]:
    """The protocol with another limit for readers."""

    class Bounded(BoundedProtocol):
        _reader_timeout_s = reader_timeout_s

    return Bounded


class BoundedProtocol(Watched, HttpToolsProtocol):
    """One connection. What is no HTTP, or has over HEAD_BYTES_MAX that are no body, is answered with 400 and closed.

    A client that lags behind has 64 KiB made for it, and whoever makes more waits. One that takes not a single byte of
    them for `_reader_timeout_s` is cut; `cut` then says so. Its last bytes may be in the system's buffers.
    """

    _unread_bytes = 0  # received since the head was whole, or since the last piece of a body

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope[CONNECTION] = self

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._took()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch_no_more()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._watch_no_more()  # another protocol has the connection from now on
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

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Tells `msg` in the shape of every other error, unless an answer is being sent, and closes."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = failure.body(BadRequest(msg))
            head = (
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            )
            self.transport.write(head + body)
        self.transport.close()
