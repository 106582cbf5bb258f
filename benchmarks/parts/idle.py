"""Part d: the API process's memory while it holds 2,000 streams that have nothing to tell, over HTTP and over sockets.

A scripted model pauses, a few requests run, and the others wait in the queue. Each is a stream of its own connection
and has been told its first event; then all wait for their keep-alive, which must come on time.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import uvloop

from parts.sockets import Socket
from parts.table import Line
from parts.wires import CHAT, RESPONSES, Spoken, asked, head, resident_mib
from tests.serving import Server, scripted

STREAMS, QUICK_STREAMS = 2_000, 50
MUST_MIB = 200
KEEP_ALIVE_S, QUICK_KEEP_ALIVE_S = 10.0, 1.0
LATE_S = 2.0  # after that time a keep-alive is late: it is looked once a second who is silent
AT_ONCE = 50  # connections that are being opened
WAIT_S_MAX = 120.0
PAUSE_MS = 3_600_000  # before each token
DESCRIPTORS = 2 * STREAMS + 500
_ALIVE = {CHAT.name: b'"delta":{},', RESPONSES.name: b"event: response.in_progress"}
_ALIVE_SOCKET = b'"type":"response.in_progress"'


class Waiting(Protocol):
    """One stream that waits."""

    async def open(self, gate: asyncio.Semaphore) -> None:
        """Asks, and returns once there was a first event."""

    async def alive(self) -> float:
        """Seconds until the next keep-alive."""

    def close(self) -> None: ...


def lines(folder: Path, quick: bool) -> list[Line]:
    """Measures over HTTP, half of the streams by each of two protocols, then over sockets that compress."""
    count = QUICK_STREAMS if quick else STREAMS
    keep_alive = QUICK_KEEP_ALIVE_S if quick else KEEP_ALIVE_S

    def http(port: int, number: int) -> Waiting:
        return _Idle(port, (CHAT, RESPONSES)[number % 2], number)

    streams = _measure(folder / "streams", f"{count:,} idle streams", http, count, keep_alive)
    sockets = _measure(folder / "sockets", f"{count:,} idle sockets, deflated", _IdleSocket, count, keep_alive)
    return [*streams, *sockets]


def _measure(folder: Path, what: str, make: Callable[[int, int], Waiting], count: int, keep_alive: float) -> list[Line]:
    folder.mkdir()
    flags = ("--max-requests", str(2 * STREAMS), "--keep-alive", f"{keep_alive:g}s", "--log-level", "warning")
    model = scripted(folder, {"text": "Yes", "when": "first"}, {"text": "Later", "delay_ms": PAUSE_MS})
    with _descriptors(), Server(folder / "data", *flags, model=model) as server:
        assert server.process is not None
        server.respond(input="first", max_output_tokens=1)
        before = resident_mib(server.process.pid)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            gaps, resident = runner.run(_hold(server.process.pid, [make(server.port, n) for n in range(count)]))
    held, slowest = resident - before, max(gaps)
    alive = keep_alive + LATE_S
    target = f"at most {MUST_MIB} MiB"
    return [
        Line(f"{what}, MiB of the API", f"{resident:.0f}", f"none: {before:.0f}", None, target, resident <= MUST_MIB),
        Line("the same, KiB of each", f"{held * 1024 / count:.1f}"),
        Line(
            f"the same, s to a keep-alive of {keep_alive:g} s, slowest",
            f"{slowest:.1f}",
            target=f"at most {alive:g} s",
            reached=slowest <= alive,
        ),
    ]


async def _hold(pid: int, streams: Sequence[Waiting]) -> tuple[list[float], float]:
    """Opens all streams, waits for a keep-alive of each, twice; seconds to each, and MiB resident at the end."""
    gate = asyncio.Semaphore(AT_ONCE)
    await asyncio.gather(*(stream.open(gate) for stream in streams))
    gaps: list[float] = []
    for _ in range(2):
        async with asyncio.timeout(WAIT_S_MAX):
            gaps += await asyncio.gather(*(stream.alive() for stream in streams))
    resident = resident_mib(pid)
    for stream in streams:
        stream.close()
    return gaps, resident


class _Idle:
    """One stream over HTTP that waits."""

    def __init__(self, port: int, spoken: Spoken, number: int) -> None:
        self._port = port
        self._spoken = spoken
        self._number = number
        self._heard = 0.0

    async def open(self, gate: asyncio.Semaphore) -> None:
        async with gate:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            body = asked(self._spoken, f"wait {self._number}")
            self._writer.write(head(self._spoken.path, self._port, len(body)) + body)
            told = await self._reader.readuntil(b"data: {")
            assert told.startswith(b"HTTP/1.1 200"), told
            if self._spoken is RESPONSES:
                await self._reader.readuntil(_ALIVE[RESPONSES.name])
            self._heard = time.monotonic()

    async def alive(self) -> float:
        await self._reader.readuntil(_ALIVE[self._spoken.name])
        before, self._heard = self._heard, time.monotonic()
        return self._heard - before

    def close(self) -> None:
        self._writer.close()


class _IdleSocket:
    """One response over a socket of its own that waits."""

    def __init__(self, port: int, number: int) -> None:
        self._port = port
        self._number = number
        self._socket = Socket(deflate=True)
        self._heard = 0.0

    async def open(self, gate: asyncio.Semaphore) -> None:
        async with gate:
            await self._socket.open(self._port, RESPONSES.path)
            self._socket.send(asked(RESPONSES, f"wait {self._number}", type="response.create"))
            await self.alive()

    async def alive(self) -> float:
        while not any(_ALIVE_SOCKET in message for message in await self._socket.messages()):
            pass
        before, self._heard = self._heard, time.monotonic()
        return self._heard - before

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def _descriptors() -> Iterator[None]:
    """Lets this process and the server have enough connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(DESCRIPTORS, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
