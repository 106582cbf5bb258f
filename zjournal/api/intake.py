"""The HTTP parser's edge: what a client may send before the app hears of it, and the answer to what is no HTTP.

The app bounds the body. The request line, the headers and the trailers are gathered by the server below it, which has
no limit of its own: a client that goes on sending headers would fill the memory.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from zjournal.api import failure
from zjournal.errors import BadRequest

HEAD_BYTES_MAX = 64 << 10  # proxies usually allow 8 to 32 KiB


class BoundedProtocol(HttpToolsProtocol):
    """One connection. What is no HTTP, or has over HEAD_BYTES_MAX that are no body, is answered with 400 and closed."""

    _unread_bytes = 0  # received since the head was whole, or since the last piece of a body

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
