"""A WebSocket client as bare as can be."""

from __future__ import annotations

import asyncio
import struct
import time
import zlib

from parts.wires import READ_BYTES, Stream

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="  # of the handshake; what is answered to it is not checked
DEFLATE = b"sec-websocket-extensions: permessage-deflate\r\n"
ENDS = (b'"type":"response.completed"', b'"type":"response.incomplete"', b'"type":"response.failed"', b'"type":"error"')
NORMAL = 1000  # code of a close
_TEXT, _CLOSE, _PING, _PONG = 0x1, 0x8, 0x9, 0xA
_TAIL = b"\x00\x00\xff\xff"  # that permessage-deflate leaves out


class Socket:
    """One connection."""

    def __init__(self, deflate: bool) -> None:
        self._deflate = deflate
        self._frames = _Frames(deflate)

    async def open(self, port: int, path: str) -> None:
        """Connects and upgrades."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"GET %b HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nupgrade: websocket\r\n" % (path.encode(), port)
        head += b"connection: Upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: %b\r\n" % KEY
        self._writer.write(head + (DEFLATE if self._deflate else b"") + b"\r\n")
        answer = await self._reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 101"), answer
        assert self._deflate == (b"permessage-deflate" in answer.lower()), answer

    def send(self, body: bytes) -> None:
        """Sends one message."""
        self._writer.write(_frame(_TEXT, body))

    async def messages(self) -> list[bytes]:
        """Those that came together, once some came; pings are answered."""
        found: list[bytes] = []
        while not found:
            data = await self._reader.read(READ_BYTES)
            assert data, "the socket was closed before the answer's end"
            for opcode, message in self._frames.feed(data):
                assert opcode in (_TEXT, _PING), (opcode, message)
                if opcode == _PING:
                    self._writer.write(_frame(_PONG, message))
                else:
                    found.append(message)
        return found

    def close(self) -> None:
        self._writer.write(_frame(_CLOSE, struct.pack(">H", NORMAL)))
        self._writer.close()


async def socket_stream(port: int, path: str, body: bytes, token: bytes, deflate: bool) -> Stream:
    """Opens a socket, sends `body` as one message, and reads until the answer has ended. Keeps the first messages."""
    socket = Socket(deflate)
    await socket.open(port, path)
    sent = time.monotonic_ns()
    socket.send(body)
    kept: list[bytes] = []
    times: list[int] = []
    first = 0
    over = False
    while not over:
        messages = await socket.messages()
        now = time.monotonic_ns()
        first = first or now
        for message in messages:
            times += [now] * (token in message)
            over = over or any(end in message for end in ENDS)
            if len(kept) < 2 or over:
                kept.append(message)
    socket.close()
    assert times, kept
    return Stream(b"\n".join(kept), sent, first, times)


def _frame(opcode: int, payload: bytes) -> bytes:
    """A frame of a client; its mask is zero, which changes nothing."""
    size = len(payload)
    if size < 126:
        length = struct.pack(">BB", 0x80 | opcode, 0x80 | size)
    elif size < 1 << 16:
        length = struct.pack(">BBH", 0x80 | opcode, 0x80 | 126, size)
    else:
        length = struct.pack(">BBQ", 0x80 | opcode, 0x80 | 127, size)
    return length + bytes(4) + payload


class _Frames:
    """Cuts what comes into messages. A message is one frame here, as the server sends them."""

    def __init__(self, deflate: bool) -> None:
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS).decompress if deflate else None
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The messages that `data` completes: opcode and payload."""
        self._buffer += data
        found: list[tuple[int, bytes]] = []
        at = 0
        while len(self._buffer) - at >= 2:
            size, start = self._buffer[at + 1], at + 2
            if size in (126, 127):
                width = 2 if size == 126 else 8
                if len(self._buffer) < start + width:
                    break
                size, start = int.from_bytes(self._buffer[start : start + width], "big"), start + width
            if len(self._buffer) < start + size:
                break
            payload = bytes(self._buffer[start : start + size])
            packed = self._buffer[at] & 0x40
            found.append(
                (self._buffer[at] & 0x0F, self._inflate(payload + _TAIL) if packed and self._inflate else payload)
            )
            at = start + size
        del self._buffer[:at]
        return found
