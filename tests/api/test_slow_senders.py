"""Clients that open a connection and send nothing, or stop in the middle of a request: they do not keep it for ever."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.api.desk import FakeDesk, answer
from tests.api.serving import serving
from zjournal.api.intake import SENDER_TIMEOUT_S, BoundedProtocol
from zjournal.api.websocket_intake import WebSocketProtocol
from zjournal.ask import TextDelta

WAIT_S = 60.0
BODY = json.dumps({"model": "smol", "input": "hi"}).encode()
HEAD = b"POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(BODY)
UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Impatient(BoundedProtocol):
    _sender_timeout_s = 0.2


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n", b"POST /v1/res", HEAD, HEAD + BODY[:5], HEAD + BODY + b"\r\n", HEAD + BODY + HEAD + BODY[:5]],
    ids=[
        "nothing",
        "a line end",
        "half a head",
        "no body",
        "half a body",
        "a request and a line end",
        "one and a half",
    ],
)
def test_a_connection_on_which_no_whole_request_comes_is_closed(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    desk = FakeDesk(answer("a"))

    async def main() -> bytes:
        async with serving(desk, protocol=Impatient) as url:
            reader, writer = await opened(url)
            writer.write(sent)
            told = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            return told

    told = asyncio.run(main())
    assert told.count(b"HTTP/1.1 200 OK") == sent.count(BODY) == len(desk.asks)
    assert not [record for record in caplog.records if record.exc_info], caplog.text


@pytest.mark.parametrize("behind", [b"", b"POST /v1/res", HEAD + BODY, HEAD + BODY[:5]])
def test_who_listens_to_an_answer_may_be_silent(behind: bytes) -> None:
    """Also where it has begun to send what is to come next."""
    gate = asyncio.Event()
    desk = FakeDesk([TextDelta("a"), gate, *answer("b")])
    connections: list[BoundedProtocol] = []
    looked = asyncio.Event()

    class Watching(Impatient):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connections.append(self)

        def _silent(self) -> None:
            super()._silent()
            looked.set()

    async def main() -> bytes:
        async with serving(desk, protocol=Watching) as url:
            reader, writer = await opened(url)
            writer.write(HEAD + BODY + behind)
            await asyncio.wait_for(desk.told.wait(), WAIT_S)
            if behind in (b"", HEAD + BODY):
                assert connections[0]._sending is None
            else:
                await asyncio.wait_for(looked.wait(), WAIT_S)
            gate.set()
            told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
            writer.close()
            return told

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200")


def test_a_socket_may_be_silent() -> None:
    connections: list[BoundedProtocol] = []

    class Watching(Impatient):
        def handle_websocket_upgrade(self) -> None:
            connections.append(self)
            super().handle_websocket_upgrade()

    async def main() -> bytes:
        async with serving(FakeDesk([]), protocol=Watching, ws=WebSocketProtocol) as url:
            reader, writer = await opened(url)
            writer.write(UPGRADE)
            told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
            assert connections[0]._sending is None
            writer.close()
            return told

    assert b" 101 " in asyncio.run(main())


def test_the_default_is_a_minute() -> None:
    assert BoundedProtocol._sender_timeout_s == SENDER_TIMEOUT_S == 60.0
