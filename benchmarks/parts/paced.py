"""Part c: what the journal costs a server with 32 paced streams.

A real server process with a scripted model that gives each stream 50 tokens a second. Once its data directory lies on
the disk, once in memory (tmpfs, where a sync does nothing): the same code, journal and chain, without the disk.
So the difference is what durability costs; what the journal's own work costs is in both.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import uvloop

from parts.table import Line, quantiles
from tests.serving import Server, scripted

STREAMS = 32
DELAY_MS = 20
COST_MUST = 0.03
MEMORY = Path("/dev/shm")
TOKENS, QUICK_TOKENS = 400, 40
PAIRS, QUICK_PAIRS = 3, 1
FIRST_ID = 1_000  # of the script's tokens
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Run(NamedTuple):
    """One run: seconds in all, processor seconds of API and engine, and milliseconds between two tokens."""

    total_s: float
    api_s: float
    engine_s: float
    gaps_ms: list[float]
    tokens: int


def lines(folder: Path, quick: bool) -> list[Line]:
    """Measures by turns: memory, disk, disk, memory, …"""
    if not MEMORY.is_dir():
        return [Line("32 paced streams", "", f"there is no {MEMORY} here")]
    tokens = QUICK_TOKENS if quick else TOKENS
    disk: list[Run] = []
    memory: list[Run] = []
    with tempfile.TemporaryDirectory(dir=MEMORY) as there:
        for pair in range(QUICK_PAIRS if quick else PAIRS):
            both = [(memory, Path(there) / f"m{pair}"), (disk, folder / f"d{pair}")]
            for runs, place in both if pair % 2 == 0 else both[::-1]:
                place.mkdir()
                runs.append(_run(place, tokens))
    return _lines(disk, memory)


def _lines(disk: list[Run], memory: list[Run]) -> list[Line]:
    def middle(runs: list[Run], value: str) -> float:
        return statistics.median(getattr(run, value) for run in runs)

    total, in_memory = middle(disk, "total_s"), middle(memory, "total_s")
    rate, peer_rate = disk[0].tokens / total, memory[0].tokens / in_memory
    api, peer_api = middle(disk, "api_s"), middle(memory, "api_s")
    gap, peer_gap = (quantiles(gap for run in runs for gap in run.gaps_ms)[1] for runs in (disk, memory))
    target = f"at most {1 + COST_MUST:.2f}"
    return [
        Line(
            f"{STREAMS} streams at {1000 // DELAY_MS} tok/s, s in all",
            f"{total:.2f}",
            f"journal in memory: {in_memory:.2f}",
            total / in_memory,
            target,
            total / in_memory <= 1 + COST_MUST,
        ),
        Line("the same, tokens/s", f"{rate:,.0f}", f"journal in memory: {peer_rate:,.0f}", rate / peer_rate),
        Line("the same, processor s of the API", f"{api:.2f}", f"journal in memory: {peer_api:.2f}", api / peer_api),
        Line("the same, p99 between tokens, ms", f"{gap:.1f}", f"journal in memory: {peer_gap:.1f}", gap / peer_gap),
    ]


def _run(place: Path, tokens: int) -> Run:
    model = scripted(place, {"tokens": [FIRST_ID + at for at in range(tokens)]}, delay_ms=DELAY_MS)
    with Server(place / "data", "--max-running", str(STREAMS), model=model) as server:
        assert server.process is not None
        server.respond(input="first", max_output_tokens=1)  # what is loaded at the first request is loaded now
        (engine,) = server.children()
        api = server.process.pid
        before = _processor_s(api), _processor_s(engine)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            started = time.perf_counter()
            arrivals = runner.run(_streams(server.port))
            total = time.perf_counter() - started
        used = _processor_s(api) - before[0], _processor_s(engine) - before[1]
        server.terminate()
    gaps = [(b - a) * 1_000 for times in arrivals for a, b in pairwise(times)]
    return Run(total, *used, gaps, sum(map(len, arrivals)))


async def _streams(port: int) -> list[list[float]]:
    return await asyncio.gather(*(_stream(port, number) for number in range(STREAMS)))


async def _stream(port: int, number: int) -> list[float]:
    """When each token of one stream arrived. As bare a client as can be, for it takes part in the measurement."""
    body = json.dumps(
        {
            "model": "default",
            "messages": [{"role": "user", "content": f"stream {number}"}],
            "stream": True,
            "max_completion_tokens": 10_000,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    times: list[float] = []
    last = b""
    while data := await reader.read(1 << 16):
        now = time.perf_counter()
        times += [now] * data.count(b'"delta":{"content":')
        last = (last + data)[-64:]
    assert b"[DONE]" in last, last
    writer.close()
    return times


def _processor_s(pid: int) -> float:
    """User and system seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
