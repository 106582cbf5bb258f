"""Sockets over a loopback port, before a desk without an engine: their time, bad luck, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import string
import zlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.api.desk import FakeDesk, answer
from tests.api.serving import serving
from zjournal import errors
from zjournal.api.app import create_app
from zjournal.api.guard import Edge, Neighbours
from zjournal.api.sse import CONNECTION
from zjournal.api.websocket import Sockets
from zjournal.api.websocket_intake import FRAMES_MAX, PING_S, WebSocketProtocol, ping_timeout_s, watched
from zjournal.api.websocket_state import Bounds
from zjournal.ask import TextDelta, Waiting

WAIT_S = 60.0


def run(desk: FakeDesk, script: Any, app: Any = None, ws: Any = WebSocketProtocol, **options: Any) -> Any:
    """Runs `script(socket)` over a socket to the served desk."""

    async def main() -> Any:
        async with serving(desk, ws=ws, app=app) as url:
            uri = url.replace("http", "ws", 1) + "/v1/responses"
            async with connect(uri, proxy=None, open_timeout=WAIT_S, **options) as opened:
                return await asyncio.wait_for(script(opened), WAIT_S)

    return asyncio.run(main())


async def ask(opened: ClientConnection, **body: Any) -> list[dict[str, Any]]:
    """The messages up to the end of an answer."""
    await opened.send(json.dumps({"type": "response.create", "model": "smol", "input": "hi", **body}))
    told: list[dict[str, Any]] = []
    while not told or told[-1]["type"] not in ("response.completed", "response.failed", "error"):
        told.append(json.loads(await opened.recv()))
    return told


async def closed(opened: ClientConnection) -> int | None:
    """The code of the close that comes next."""
    with pytest.raises(ConnectionClosed):
        await opened.recv()
    return opened.close_code


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_after_an_hour_the_next_request_is_told_to_connect_again() -> None:
    clock, desk = Clock(), FakeDesk(answer("a"))

    async def script(opened: ClientConnection) -> tuple[Any, ...]:
        first = await ask(opened)
        clock.now = 3600.0
        (second,) = await ask(opened)
        return first, second, await closed(opened)

    first, second, code = run(desk, script, Sockets(desk, clock=clock))  # type: ignore[arg-type]
    assert first[-1]["type"] == "response.completed"
    assert second["error"]["code"] == "websocket_connection_limit_reached" and second["status"] == 400
    assert code == 1001
    assert len(desk.asks) == 1


def test_an_answer_that_runs_when_the_hour_is_over_is_told_to_its_end() -> None:
    clock, gate = Clock(), asyncio.Event()
    first, *rest = answer("a", "b")
    desk = FakeDesk([first, gate, *rest])

    async def script(opened: ClientConnection) -> tuple[Any, ...]:
        asking = asyncio.ensure_future(ask(opened))
        await desk.told.wait()
        clock.now = 3600.0
        gate.set()
        told = await asking
        return told, json.loads(await opened.recv()), await closed(opened)

    told, last, code = run(desk, script, Sockets(desk, clock=clock))  # type: ignore[arg-type]
    assert told[-1]["type"] == "response.completed"
    assert (last["error"]["code"], code) == ("websocket_connection_limit_reached", 1001)


def test_a_socket_that_asks_for_nothing_is_closed_when_its_time_is_over() -> None:
    desk = FakeDesk(answer("a"))

    async def script(opened: ClientConnection) -> tuple[Any, ...]:
        return json.loads(await opened.recv()), await closed(opened)

    told, code = run(desk, script, Sockets(desk, bounds=Bounds(life_s=0.2)))  # type: ignore[arg-type]
    assert (told["error"]["code"], code) == ("websocket_connection_limit_reached", 1001)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (errors.Unavailable("Loading."), 503),
        (errors.Overloaded("Full."), 429),
        (errors.ContextTooLong("Too long.", param="input"), 400),
        (ZeroDivisionError("secret"), 500),
    ],
)
def test_what_the_desk_refuses_is_told_and_the_socket_stays(fault: Exception, status: int) -> None:
    desk = FakeDesk(answer("a"), fault=fault)

    async def script(opened: ClientConnection) -> tuple[Any, ...]:
        (refused,) = await ask(opened)
        desk.fault = None
        return refused, await ask(opened)

    refused, told = run(desk, script)
    assert refused["status"] == status
    assert "secret" not in json.dumps(refused)
    assert told[-1]["type"] == "response.completed"


@pytest.mark.parametrize("cause", [errors.JournalUnavailable("The disk is full."), ZeroDivisionError("secret")])
def test_what_breaks_in_the_middle_ends_the_answer_and_not_the_socket(cause: Exception) -> None:
    desk = FakeDesk([TextDelta("a"), cause])

    async def script(opened: ClientConnection) -> tuple[Any, ...]:
        broken = await ask(opened)
        desk.steps = answer("b")
        return broken, await ask(opened)

    broken, told = run(desk, script)
    if isinstance(cause, errors.Fault):
        assert broken[-1]["type"] == "response.failed"
        assert [event["sequence_number"] for event in broken] == list(range(len(broken)))
    else:
        assert broken[-1]["status"] == 500 and "secret" not in json.dumps(broken)
    assert len(desk.cancelled) == 1, "nobody works for it any more"
    assert told[-1]["type"] == "response.completed"


def test_a_key_that_is_taken_back_is_refused_from_the_next_request_on() -> None:
    desk = FakeDesk(answer("a"), keys=True)

    async def script(opened: ClientConnection) -> tuple[Any, ...]:
        first = await ask(opened)
        taken = errors.Unauthorized("The API key is not known.")
        desk.tenant_of = Mock(side_effect=taken)  # type: ignore[method-assign]
        (second,) = await ask(opened)
        return first[-1]["type"], second

    told, refused = run(desk, script, additional_headers={"authorization": "Bearer sk-a"})
    assert told == "response.completed"
    assert (refused["status"], refused["error"]["code"]) == (401, "invalid_api_key")


def test_unstored_responses_are_held_as_long_as_they_can_be_continued() -> None:
    desk = FakeDesk(answer("a"))
    held: list[int] = []

    async def script(opened: ClientConnection) -> list[list[dict[str, Any]]]:
        told = [await ask(opened)]
        for _ in range(3):
            previous = told[-1][-1]["response"]["id"]
            told.append(await ask(opened, store=False, previous_response_id=previous if len(told) > 1 else None))
            held.append(len(desk.held))
        return told

    app = Sockets(desk, bounds=Bounds(local=2))  # type: ignore[arg-type]
    told = run(desk, script, app)
    assert [one[-1]["type"] for one in told] == ["response.completed"] * 4
    assert held == [1, 2, 2], "stored ones need not be held, and of the others the oldest goes"
    assert [request.local for request in desk.asks] == [False, False, True, True]
    assert desk.held == []


def test_a_client_that_leaves_gives_up_its_response() -> None:
    gate = asyncio.Event()
    desk = FakeDesk([TextDelta("a"), gate])

    async def script(opened: ClientConnection) -> None:
        await opened.send(json.dumps({"type": "response.create", "model": "smol", "input": "hi", "store": False}))
        await desk.told.wait()
        opened.transport.abort()
        await desk.cancel_seen.wait()

    run(desk, script)
    assert len(desk.cancelled) == 1 and desk.held == []


@pytest.mark.parametrize("compression", ["deflate", None])
def test_who_reads_nothing_is_cut_with_a_reason_and_others_are_not(compression: str | None) -> None:
    """Each event repeats a long text, which is not one that becomes shorter."""
    long = "".join(random.Random(7).choices(string.ascii_letters + string.digits, k=20_000))
    first, *rest = answer("a")
    desk = FakeDesk([first, *[Waiting(0, 1, 12)] * 500, *rest])  # 10 MB: more than the system's buffers take

    async def main() -> int:
        async with serving(desk, ws=watched(3.0)) as url:
            small = socket.socket()
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            small.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            uri = url.replace("http", "ws", 1) + "/v1/responses"
            settings: Any = {"compression": compression, "proxy": None, "max_size": None, "ping_interval": None}
            stuck = await connect(uri, sock=small, max_queue=1, **settings)
            body = {"model": "smol", "input": "hi", "instructions": long}
            await stuck.send(json.dumps({"type": "response.create", **body}))
            async with connect(uri, **settings) as reads:
                told = await asyncio.wait_for(ask(reads, **body), WAIT_S)
            await asyncio.wait_for(desk.cancel_seen.wait(), WAIT_S)
            stuck.transport.abort()
            return len(told)

    assert asyncio.run(main()) > 500
    [(response, cut)] = desk.cuts
    assert desk.cancelled == [response]
    assert 0 < cut.unread <= 128 << 10, "what is made for a client that lags has a bound"
    assert cut.silent_s >= 3.0


def test_a_client_that_answers_no_ping_is_given_up() -> None:
    """Its system is there and takes what is sent, but nobody reads it."""
    gate = asyncio.Event()
    desk = FakeDesk([TextDelta("a"), gate])
    asked = json.dumps({"type": "response.create", "model": "smol", "input": "hi"}).encode()

    class Impatient(WebSocketProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.ping_interval = self.ping_timeout = 0.1

    async def main() -> bytes:
        async with serving(desk, ws=Impatient) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(HANDSHAKE)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(masked(0x81, asked))
            await asyncio.wait_for(desk.cancel_seen.wait(), WAIT_S)
            told = await reader.read()
            writer.close()
            return told

    told = asyncio.run(main())
    assert b"\x88" in told and b"keepalive ping timeout" in told
    assert len(desk.cancelled) == 1


def test_long_messages_are_told_as_they_are_between_compressed_ones() -> None:
    """To compress them would keep everybody else waiting."""
    desk = FakeDesk(answer(*["word "] * 20, "x" * 100_000, "more"))
    asked = json.dumps({"type": "response.create", "model": "smol", "input": "hi"}).encode()

    async def main() -> list[tuple[int, bytes]]:
        async with serving(desk, ws=WebSocketProtocol) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(HANDSHAKE)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(masked(0x81, asked))
            inflate, frames = zlib.decompressobj(-15), []
            while not frames or b'"response.completed"' not in frames[-1][1]:
                first, length = await reader.readexactly(2)
                if length > 125:
                    length = int.from_bytes(await reader.readexactly(2 if length == 126 else 8), "big")
                data = await reader.readexactly(length)
                compressed = bool(first & 0x40)
                frames.append((first, inflate.decompress(data + b"\0\0\xff\xff") if compressed else data))
            writer.close()
            return frames

    frames = asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert [json.loads(data)["sequence_number"] for _, data in frames] == list(range(len(frames)))
    assert {bool(first & 0x40) == (len(data) <= 32 << 10) for first, data in frames} == {True}
    assert len({first for first, _ in frames}) == 2


def test_a_ping_waits_longer_than_a_reader_may() -> None:
    assert WebSocketProtocol._reader_timeout_s == 60.0
    assert ping_timeout_s(60.0) > 60.0 and ping_timeout_s(0.1) >= PING_S


def test_where_it_is_off_every_upgrade_is_refused() -> None:
    desk: Any = FakeDesk([])
    off = create_app(desk, host="127.0.0.1", port=0, body_max=1 << 20, websocket=False)

    async def main() -> int:
        async with serving(desk, ws=WebSocketProtocol, app=off) as url:
            with pytest.raises(InvalidStatus) as refused:
                await connect(url.replace("http", "ws", 1) + "/v1/responses", proxy=None)
            return refused.value.response.status_code

    assert asyncio.run(main()) == 426


# --- what is no WebSocket at all ------------------------------------------------------------------------

HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
)
MASK = b"\0\0\0\0"


def masked(first: int, data: bytes = b"") -> bytes:
    """A small frame as a client sends it, with this first byte."""
    return bytes([first, 0x80 | len(data)]) + MASK + data


@pytest.mark.parametrize(
    "sent",
    [
        b"\x81\x02hi",  # without a mask
        masked(0x83),  # an opcode that there is not
        masked(0x89 & 0x7F),  # a ping in pieces
        bytes([0x89, 0xFE, 0x01, 0x00]) + MASK + b"x" * 256,  # a ping that is too long
        masked(0x80),  # a piece of nothing
        masked(0xA1, b"{}"),  # a bit of an extension that there is not
        masked(0xC1, b"\xff\xff\xff\xff"),  # no deflate
        masked(0x88, b"\x03"),  # half a code
        masked(0x88, b"\x00\x07"),  # a code that nobody may send
        bytes([0x81, 0xFF]) + b"\xff" * 8 + MASK,  # 16 EiB to come
        masked(0x01, b'{"type":') + masked(0x81, b"1}"),  # a message within a message
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_frames_that_are_none_end_their_socket_and_no_other(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    desk = FakeDesk(answer("a"))

    async def main() -> tuple[bytes, list[dict[str, Any]]]:
        async with serving(desk, ws=WebSocketProtocol) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(HANDSHAKE)
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            told = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            async with connect(url.replace("http", "ws", 1) + "/v1/responses", proxy=None) as opened:
                return told, await ask(opened)

    told, after = asyncio.run(main())
    assert b"\x88" in told, "the socket is closed with a word"
    assert after[-1]["type"] == "response.completed"
    assert not [record for record in caplog.records if record.exc_info], caplog.text


def test_a_message_in_frames_without_end_is_told_and_ends_its_socket() -> None:
    """Empty frames are nothing to the limit on bytes, and each takes memory and time."""
    desk = FakeDesk(answer("a"))

    async def main() -> bytes:
        async with serving(desk, ws=WebSocketProtocol) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(HANDSHAKE)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(masked(0x01, b"{") + masked(0x00) * (FRAMES_MAX + 10))
            told = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            return told

    told = asyncio.run(main())
    assert b"request_too_large" in told and b"\x88" in told and b"too many frames" in told


def test_a_message_in_many_frames_is_taken() -> None:
    desk = FakeDesk(answer("a"))
    asked = json.dumps({"type": "response.create", "model": "smol", "input": "hi"})

    async def script(opened: ClientConnection) -> list[dict[str, Any]]:
        await opened.send([*asked[:-1], *[" "] * 2000, "}"])
        return [json.loads(await opened.recv()) for _ in range(2)]

    assert run(desk, script)[0]["type"] == "response.created"


def test_pings_of_a_client_that_reads_nothing_do_not_heap_up() -> None:
    """It is owed an answer to the last ones, as RFC 6455 has it."""
    desk = FakeDesk([])
    ping = masked(0x89, b"x" * 125)
    sent = ping * 200_000  # 26 MB: more than the system's buffers take

    async def main() -> tuple[int, bytes]:
        async with serving(desk, ws=WebSocketProtocol) as url:
            small = socket.socket()
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            small.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            small.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(small, HANDSHAKE)
            assert b" 101 " in await asyncio.wait_for(loop.sock_recv(small, 4096), WAIT_S)
            await asyncio.wait_for(loop.sock_sendall(small, sent), WAIT_S)
            await loop.sock_sendall(small, masked(0x89, b"last") + masked(0x88, b"\x03\xe8"))
            size, end = 0, b""
            while data := await asyncio.wait_for(loop.sock_recv(small, 1 << 20), WAIT_S):
                size, end = size + len(data), (end + data)[-100:]
            small.close()
            return size, end

    size, _ = asyncio.run(main())
    assert 0 < size < len(sent) // 2


def test_the_end_of_the_server_is_no_failure_of_a_socket_whose_client_reads_nothing() -> None:
    """It waits to refuse what the client sent, and hears of nothing else."""
    desk: Any = FakeDesk([])

    async def main() -> None:
        sent = asyncio.Event()
        incoming = asyncio.Queue[dict[str, Any]]()
        for message in ({"type": "websocket.connect"}, *[{"type": "websocket.receive", "text": "{"}] * 20):
            incoming.put_nowait(message)

        async def send(message: Any) -> None:
            if message["type"] == "websocket.send":
                sent.set()
                await asyncio.Event().wait()

        connection = SimpleNamespace(cut=None, stopping=False)
        headers = [(b"host", b"127.0.0.1")]
        scope: Any = {"type": "websocket", "path": "/v1/responses", "headers": headers, CONNECTION: connection}
        edge = Edge(Mock(), Neighbours("127.0.0.1", 0), desk.metrics, Sockets(desk))  # type: ignore[arg-type]
        serving = asyncio.ensure_future(edge(scope, incoming.get, send))  # type: ignore[arg-type]
        await asyncio.wait_for(sent.wait(), WAIT_S)
        connection.stopping = True
        serving.cancel()
        await asyncio.wait_for(serving, WAIT_S)
        assert serving.done() and not serving.cancelled() and serving.exception() is None

    asyncio.run(main())


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_bytes_break_the_server(sent: bytes, whole: bool) -> None:
    """Behind a handshake, or in a frame of their own."""
    desk = FakeDesk(answer("a"))
    frame = bytes([0x81, 0xFE]) + len(sent).to_bytes(2, "big") + MASK + sent

    async def main() -> list[dict[str, Any]]:
        async with serving(desk, ws=WebSocketProtocol) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(HANDSHAKE)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(frame if whole else sent)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            async with connect(url.replace("http", "ws", 1) + "/v1/responses", proxy=None) as opened:
                return await ask(opened)

    assert asyncio.run(main())[-1]["type"] == "response.completed"
