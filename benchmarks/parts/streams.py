"""Parts a and b: 64 streams of a scripted model through an API process that has one processor for itself.

a, as fast as they go: token events per second, and per second of the API's processor time, which on a busy machine is
the figure to look at. The peer is the bare transport: the same bytes, ready made, from Litestar and uvicorn.
b, paced at half the rate that must be reached: how much later than the engine sent it a token is with its client. The
peer is the same server with one stream at that pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from parts import stamped
from parts.sockets import socket_stream
from parts.table import Line, quantiles
from parts.wires import (
    API_CORE,
    CHAT,
    OTHER_CORE,
    PROTOCOLS,
    RESPONSES,
    Spoken,
    Stream,
    asked,
    events,
    pin,
    pinned,
    processor_s,
    stream,
)
from tests.serving import Server, held_port, scripted, until

STREAMS = 64
RATE_MUST = 10_000  # token events per second
DEFLATED_MUST = 5_000
LATENCY_MUST_MS = 5.0
TOKENS, QUICK_TOKENS = 1_500, 50  # of each stream
PACED_TOKENS, QUICK_PACED_TOKENS = 700, 50
WARM_TOKENS = 20  # that are not counted in latencies: all streams begin at once
FIRST_ID = 1_000  # of the script's tokens
STARTS_S_MAX = 30.0


Asking = Callable[[int, str, bytes, bytes], Awaitable[Stream]]  # port, path, body, mark of a token
over_http: Asking = functools.partial(stream, keep=False)


class Run(NamedTuple):
    """All streams of one run: token events per second, and per second of the API's processor."""

    rate: float
    per_processor_s: float
    streams: Sequence[Stream]


def rates(folder: Path, quick: bool) -> list[Line]:
    """Part a."""
    tokens = QUICK_TOKENS if quick else TOKENS
    found: list[Line] = []
    with _served(folder, tokens, 0.0) as server:
        for spoken in PROTOCOLS:
            run = _run(server.port, _api(server), [asked(spoken, f"stream {n}") for n in range(STREAMS)], spoken)
            told = folder / f"{spoken.name}.frames"
            told.write_bytes(events(_alone(server, spoken).told))
            with _bare(told) as (port, pid):
                peer = _run(port, pid, [b"{}"] * STREAMS, spoken)
            found += _rate_lines(f"{spoken.name} over SSE", run, peer, RATE_MUST)
        told = folder / f"{RESPONSES.name}.frames"
        bodies = [asked(RESPONSES, f"socket {n}", type="response.create") for n in range(STREAMS)]
        for deflate in (False, True):
            ask = functools.partial(socket_stream, deflate=deflate)
            run = _run(server.port, _api(server), bodies, RESPONSES, ask)
            with _bare(told) as (port, pid):
                peer = _run(port, pid, [b"{}"] * STREAMS, RESPONSES, ask)
            what = "WebSocket, deflated" if deflate else "WebSocket"
            found += _rate_lines(what, run, peer, DEFLATED_MUST if deflate else RATE_MUST)
    return found


def _rate_lines(name: str, run: Run, peer: Run, rate: int) -> list[Line]:
    what = f"{name}, {STREAMS} streams, token events/s"
    must = f"at least {rate:,}"
    return [
        Line(
            what,
            f"{run.rate:,.0f}",
            f"bare transport: {peer.rate:,.0f}",
            run.rate / peer.rate,
            must,
            run.rate >= rate,
        ),
        Line(
            "the same, a second of the API's processor",
            f"{run.per_processor_s:,.0f}",
            f"bare transport: {peer.per_processor_s:,.0f}",
            run.per_processor_s / peer.per_processor_s,
        ),
    ]


def latencies(folder: Path, quick: bool) -> list[Line]:
    """Part b."""
    found: list[Line] = []
    tokens = QUICK_PACED_TOKENS if quick else PACED_TOKENS
    pace_ms = 1_000 * STREAMS / (RATE_MUST / 2)
    for spoken in (CHAT, RESPONSES):
        alone = _latency(folder / f"{spoken.name}1", spoken, 1, tokens, pace_ms)
        many = _latency(folder / f"{spoken.name}{STREAMS}", spoken, STREAMS, tokens, pace_ms)
        rate, (median, late) = many
        what = f"{spoken.name}, ms from the engine to the client at {rate:,.0f}/s, p99"
        peer = f"one stream: {alone[1][1]:.2f}"
        must = f"under {LATENCY_MUST_MS:g} ms"
        found.append(Line(what, f"{late:.2f}", peer, late / alone[1][1], must, late < LATENCY_MUST_MS))
        found.append(Line("the same, median", f"{median:.2f}", f"one stream: {alone[1][0]:.2f}", median / alone[1][0]))
    return found


def _latency(
    folder: Path, spoken: Spoken, count: int, tokens: int, pace_ms: float
) -> tuple[float, tuple[float, float]]:
    """Token events per second, and median and 99th percentile of milliseconds from the engine's send on."""
    folder.mkdir()
    stamps = folder / "stamps"
    with _served(folder, tokens, pace_ms, stamps) as server:
        run = _run(server.port, _api(server), [asked(spoken, f"stream {n}") for n in range(count)], spoken)
        server.terminate()
    sent = stamped.read(stamps)
    late: list[float] = []
    for one in run.streams:
        (times,) = [at for request, at in sent.items() if request.encode() in one.told]
        pairs = list(zip(times, one.tokens, strict=False))  # the end token has no event
        late += [(came - went) / 1e6 for went, came in pairs[WARM_TOKENS:]]
    return run.rate, quantiles(late)


def _alone(server: Server, spoken: Spoken) -> Stream:
    """One stream of the server."""
    with _loop() as runner:
        return runner.run(stream(server.port, spoken.path, asked(spoken, "alone"), spoken.token))


def _run(port: int, pid: int, bodies: Sequence[bytes], spoken: Spoken, ask: Asking = over_http) -> Run:
    """All streams at once, by a client on the other processor."""
    with pinned(), _loop() as runner:
        before = processor_s(pid)
        streams = runner.run(_all(port, bodies, spoken, ask))
        used = processor_s(pid) - before
    counted = sum(len(one.tokens) for one in streams)
    began, ended = min(one.tokens[0] for one in streams), max(one.tokens[-1] for one in streams)
    return Run(counted * 1e9 / (ended - began), counted / used if used else 0.0, streams)


async def _all(port: int, bodies: Sequence[bytes], spoken: Spoken, ask: Asking) -> list[Stream]:
    return await asyncio.gather(*(ask(port, spoken.path, body, spoken.token) for body in bodies))


def _loop() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _api(server: Server) -> int:
    assert server.process is not None
    return server.process.pid


@contextlib.contextmanager
def _served(folder: Path, tokens: int, pace_ms: float, stamps: Path | None = None) -> Iterator[Server]:
    """A server whose API and engine have a processor each, and have answered once."""
    model = scripted(folder, {"tokens": [FIRST_ID + at for at in range(tokens)]}, delay_ms=pace_ms)
    kind = Server if stamps is None else _Stamped
    env = {} if stamps is None else {stamped.STAMPS: str(stamps)}
    flags = ("--max-running", str(STREAMS), "--speculation", "0", "--guard", "off", "--log-level", "warning")
    with kind(folder / "data", *flags, model=model, env=env) as server:
        server.respond(input="first", max_output_tokens=1)  # what is loaded at the first request is loaded now
        pin(_api(server), API_CORE)
        for child in server.children():
            pin(child, OTHER_CORE)
        yield server


class _Stamped(Server):
    """A server whose engine notes when it sends."""

    def spawn(self) -> None:
        script = Path(stamped.__file__)
        flags = ["serve", "--port", str(self.port), "--data-dir", str(self.data_dir), *self.flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), self.env[stamped.STAMPS], *flags], stdout=log, stderr=log, env=self.env
            )


@contextlib.contextmanager
def _bare(told: Path) -> Iterator[tuple[int, int]]:
    """The bare transport on the API's processor: its port and its pid."""
    place = held_port()
    port = place.getsockname()[1]
    script = Path(__file__).with_name("bare.py")
    process = subprocess.Popen([sys.executable, str(script), str(port), str(told)])
    try:
        until(lambda: _answers(port), STARTS_S_MAX)
        pin(process.pid, API_CORE)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()
        place.close()


def _answers(port: int) -> bool:
    try:
        with _loop() as runner:
            runner.run(stream(port, "/any", b"{}", b"none"))
    except OSError:
        return False
    return True
