"""Clients that read slowly, or not at all: nobody waits for them, and those that stand still are cut."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tests.api.desk import FakeDesk, answer
from tests.api.serving import serving
from zjournal.api import intake
from zjournal.api.intake import HttpToolsProtocol, bounded
from zjournal.api.sse import Cut

WAIT_S = 60.0
LONG = answer(*["x" * 4096] * 2000)  # 8 MB: more than the system's buffers take


def stuck(url: str) -> socket.socket:
    """A client that asks for a stream and reads nothing of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    body = json.dumps({"model": "smol", "input": "hi", "stream": True}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


async def whole(url: str) -> int:
    """A client that reads all; the number of its events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    body = json.dumps({"model": "smol", "input": "hi", "stream": True}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    told = await reader.read()
    writer.close()
    return told.count(b"event: ")


def test_who_reads_nothing_is_cut_with_a_reason_and_who_reads_has_all_meanwhile() -> None:
    desk = FakeDesk(LONG)

    async def main() -> None:
        async with serving(desk, protocol=bounded(3.0)) as url:
            client = stuck(url)
            assert await asyncio.wait_for(whole(url), WAIT_S) > 2000
            await asyncio.wait_for(desk.cancel_seen.wait(), WAIT_S)
            client.close()

    asyncio.run(main())
    assert len(desk.cancelled) == 1
    [(response, cut)] = desk.cuts
    assert response == desk.cancelled[0]
    assert 0 < cut.unread <= 128 << 10, "what is made for a client that lags has a bound"
    assert cut.silent_s >= 3.0


class Loop:
    """A clock that a test moves; one timer at most."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timer: tuple[float, Any] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Any) -> Any:
        assert self.timer is None
        self.timer = (self.now + delay, call)
        return SimpleNamespace(cancel=lambda: setattr(self, "timer", None))

    def run_to(self, end: float) -> None:
        while self.timer is not None and self.timer[0] <= end:
            (self.now, call), self.timer = self.timer, None
            call()
        self.now = end


class Transport:
    def __init__(self) -> None:
        self.buffered = 0
        self.aborted = self.closing = False

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("pause_writing", "resume_writing", "on_response_complete", "connection_lost"):
        monkeypatch.setattr(HttpToolsProtocol, name, lambda self, *_: None)
    made = object.__new__(bounded(16.0))
    made.loop, made.transport = Loop(), Transport()  # type: ignore[assignment]
    made.flow = SimpleNamespace(write_paused=True)  # type: ignore[assignment]
    return made


def test_a_client_that_takes_a_byte_now_and_then_stays(connection: Any) -> None:
    connection.transport.buffered = 70_000
    connection.pause_writing()
    for step in range(1, 20):
        connection.transport.buffered -= 1
        connection.loop.run_to(step * 15.0)
    assert not connection.transport.aborted
    connection.loop.run_to(19 * 15.0 + 18.0)
    assert connection.transport.aborted
    assert connection.cut == Cut(70_000 - 19, pytest.approx(16.0, abs=1.0))
    assert connection.loop.timer is None


def test_a_client_that_caught_up_and_lags_again_has_all_the_time_again(connection: Any) -> None:
    connection.transport.buffered = 70_000
    connection.pause_writing()
    connection.loop.run_to(10.0)
    connection.resume_writing()
    connection.transport.buffered = 90_000
    connection.pause_writing()
    connection.loop.run_to(25.0)
    assert not connection.transport.aborted
    connection.loop.run_to(27.0)
    assert connection.transport.aborted


def test_nothing_is_looked_at_once_all_is_taken_and_a_closing_connection_does_not_linger(connection: Any) -> None:
    connection.transport.buffered = 70_000
    connection.pause_writing()
    connection.transport.buffered = 0
    connection.loop.run_to(2.0)
    assert connection.loop.timer is None
    connection.flow.write_paused = False
    connection.transport.buffered = 500  # the rest of an answer that nobody fetches
    connection.on_response_complete()
    connection.transport.closing = True
    connection.loop.run_to(40.0)
    assert connection.transport.aborted
    connection.pause_writing()
    connection.connection_lost(None)
    assert connection.loop.timer is None


def test_the_default_is_a_minute() -> None:
    assert intake.BoundedProtocol._reader_timeout_s == 60.0
