"""The WebSocket connection's edge: its handshake, what a client may send, and how long it may read nothing.

It stands on uvicorn's `websockets-sansio`. Of its three implementations `wsproto` inflates what comes before it looks
at its size, and `websockets` stands on the legacy half of that library, which is to go. This one answers an upgrade
with any status (`websocket.http.response`), stops inflating at the limit, and compresses with small windows: 2,000 idle
sockets take little memory.
"""

from __future__ import annotations

import logging
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import PayloadTooBig
from websockets.extensions.permessage_deflate import PerMessageDeflate, ServerPerMessageDeflateFactory
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from zjournal.api import failure, refusals, websocket_state
from zjournal.api.readers import Watched
from zjournal.api.sse import CONNECTION
from zjournal.errors import BadRequest, BodyTooLarge

STOPPING = "zj.stopping"  # type of the ASGI message that says that the server ends
PING_S = 20.0  # between two pings of ours
CLOSE_S = 2.0  # for a client to answer a close
# What is longer is told as it is: to compress a megabyte takes 0.1 s, in which no other client would hear anything.
COMPRESSED_CHARS_MAX = 32 << 10
BAD_TEXT, TOO_LARGE = 1007, 1009  # close codes: text that is no UTF-8, more than is taken
FRAMES_MAX = 1 << 16  # that one message may come in: of empty ones the limit on bytes knows nothing

# An event is much like the one before it, so a window of 1 KiB is enough: 12 KiB of memory for each socket, not 32.
_DEFLATE = ServerPerMessageDeflateFactory(
    server_max_window_bits=10, client_max_window_bits=12, compress_settings={"memLevel": 4}
)
# The library tells each frame, with what is in it, at DEBUG, and each upgrade, with its query, at INFO.
_quiet = logging.getLogger("uvicorn.error")


def watched(reader_timeout_s: float, refused: refusals.Refusals | None = None) -> type[WebSocketProtocol]:
    """The protocol with another limit for readers. `refused` hears of what never comes to the app."""

    class Bounded(WebSocketProtocol):
        _reader_timeout_s = reader_timeout_s
        _refused = refused

    return Bounded


def ping_timeout_s(reader_timeout_s: float) -> float:
    """How long a ping may go unanswered. A client that reads nothing answers none: its own limit comes first."""
    return max(2 * reader_timeout_s, PING_S)


class _Handshake(ServerProtocol):
    """The library's protocol; what it refuses is told in the shape of every other error."""

    def reject(self, status: Any, text: str) -> Response:
        response = super().reject(status, failure.body(BadRequest(text.strip())).decode())
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response


class WebSocketProtocol(Watched, WebSocketsSansIOProtocol):
    """One connection. A message over the limit on bodies, or one that is no UTF-8, is told as an error and closes it.

    As over HTTP, a client that lags behind has 64 KiB made for it, and one that takes nothing is cut.
    """

    stopping = False  # the server ends
    _refused: refusals.Refusals | None = None
    _pong = b""  # owed to a client that lags behind

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = CLOSE_S
        self.conn = _Handshake(extensions=[_DEFLATE], max_size=self.config.ws_max_size, logger=_quiet)

    # --- slow readers -----------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._took()
        if self._pong and not self.close_sent and not self.transport.is_closing():
            self.transport.write(self._pong)
        self._pong = b""

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch_no_more()
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self._watch_close()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._watch_close()

    def _watch_close(self) -> None:
        """A close that nobody fetches must not keep the connection."""
        if self.transport.get_write_buffer_size():
            self._watch()

    def _blocked(self) -> bool:
        return not self.writable.is_set() or self.close_sent or self.transport.is_closing()

    # --- the handshake ----------------------------------------------------------------------------------

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        scope: Any = getattr(self, "scope", None)
        if scope is not None:
            scope[CONNECTION] = self

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # Of the head the library has made nothing, or an answer that is still to be sent.
            answer = b"".join(self.conn.data_to_send())
            self.transport.write(answer or _no_handshake())
            self._refuse(BadRequest("This is no WebSocket handshake."))
            self.handshake_complete = self.close_sent = True
            self.transport.close()

    # --- messages ---------------------------------------------------------------------------------------

    def handle_ping(self) -> None:
        """A client that pings and reads nothing is owed one answer, to the last pings; they must not heap up here."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pong = b"".join(self.conn.data_to_send())

    def handle_cont(self, event: Frame) -> None:
        if self.close_sent:
            return
        if len(self.frames) >= FRAMES_MAX and not event.fin:
            self.frames = []
            self._tell(BodyTooLarge(f"A message may come in {FRAMES_MAX} frames."))
            self.conn.fail(TOO_LARGE, "too many frames")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            whole = b"".join(self.frames)
            try:
                whole.decode()
            except UnicodeDecodeError:
                self.frames = []
                self._tell(BadRequest("A message must be UTF-8."))
                self.conn.fail(BAD_TEXT, "not UTF-8")
                self.handle_parser_exception()
                return
            self.frames = [whole]
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        if isinstance(self.conn.parser_exc, PayloadTooBig):
            self._tell(BodyTooLarge(f"A message may have {self.config.ws_max_size} bytes."))
        super().handle_parser_exception()

    async def send(self, message: Any) -> None:
        text = message.get("text") or ""
        if len(text) > COMPRESSED_CHARS_MAX and self.conn.extensions:
            await self.writable.wait()
            if self.conn.state is State.OPEN and not self.disconnected:
                self._write(text.encode())
                return
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # it was refused, and answered: the library would log that it was forgotten

    def _tell(self, fault: BadRequest | BodyTooLarge) -> None:
        """Tells a fault before the close that the library has ready, or is about to."""
        if self.handshake_complete and not self.close_sent and not self.transport.is_closing():
            self._write(websocket_state.error(fault))
            self._refuse(fault)

    def _refuse(self, fault: BadRequest | BodyTooLarge) -> None:
        if self._refused is not None:
            self._refused.tell(refusals.unread(fault.status, fault.code))

    def _write(self, text: bytes) -> None:
        """Sends a message as it is. What is compressed beside it depends only on what was compressed before."""
        plain = [one for one in self.conn.extensions if not isinstance(one, PerMessageDeflate)]
        self.transport.write(Frame(Opcode.TEXT, text).serialize(mask=False, extensions=plain))

    # --- the end of the server --------------------------------------------------------------------------

    def shutdown(self) -> None:
        self.stopping = True
        if self.handshake_complete and not self.close_sent and not self.transport.is_closing():
            stopping: Any = {"type": STOPPING}
            self.queue.put_nowait(stopping)
        else:
            super().shutdown()


def _no_handshake() -> bytes:
    body = failure.body(BadRequest("This is no WebSocket handshake."))
    return (
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
    )
