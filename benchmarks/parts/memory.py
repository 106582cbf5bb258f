"""Part f: the API process's memory from 1,000 to 100,000 stored responses.

All of them go over HTTP to a real server with a scripted model of one token: 16 connections, conversations of four
turns that continue each other by `previous_response_id`, no two requests alike. Resident memory is read at each
mark while the server works. Beside it, the bytes that the clients were told: what keeping the answers would take.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import uvloop

from parts.table import Line
from tests.serving import Server, scripted

CONNECTIONS = 16
TURNS = 4  # of a conversation
MARKS, QUICK_MARKS = (1_000, 10_000, 50_000, 100_000), (200, 400, 800)
GROWN_MUST_MIB = 10.0
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def lines(folder: Path, quick: bool) -> list[Line]:
    """Runs a server in `folder`."""
    marks = QUICK_MARKS if quick else MARKS
    with Server(folder / "data", model=scripted(folder, {"text": "Yes"})) as server:
        assert server.process is not None
        clients = _Clients(server.port, server.process.pid)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = [runner.run(clients.reach(mark)) for mark in marks]
        server.terminate()
    first, last = found[0], found[-1]
    grown, kept = last[1] - first[1], last[2] - first[2]
    steps = ", ".join(f"{mib:.1f}" for _, mib, _ in found)
    what = f"MiB that the API grows, {marks[0]:,} to {marks[-1]:,} responses"
    return [
        Line(
            what,
            f"{grown:.1f}",
            f"keeping the answers: {kept:.1f}",
            grown / kept,
            f"at most {GROWN_MUST_MIB:g} MiB",
            grown <= GROWN_MUST_MIB,
        ),
        Line(f"MiB at {', '.join(f'{mark:,}' for mark in marks)}", steps),
        Line("responses/s meanwhile, first and last part", f"{found[1][0]:,.0f}, {last[0]:,.0f}"),
    ]


class _Clients:
    """What the connections share: how many answers there were, and how many bytes."""

    def __init__(self, port: int, pid: int) -> None:
        self._port = port
        self._pid = pid
        self._begun = 0
        self._told = 0

    async def reach(self, mark: int) -> tuple[float, float, float]:
        """Goes on until `mark` responses were told: their rate, MiB resident then, and MiB told so far."""
        begun, started = self._begun, time.perf_counter()
        await asyncio.gather(*(self._connection(mark) for _ in range(CONNECTIONS)))
        rate = (self._begun - begun) / (time.perf_counter() - started)
        return rate, _resident_mib(self._pid), self._told / 2**20

    async def _connection(self, mark: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        previous, turn = None, 0
        while self._begun < mark:
            self._begun += 1
            ask = {"model": "default", "input": f"question {self._begun}", "max_output_tokens": 1}
            if previous is not None:
                ask["previous_response_id"] = previous
            answer = await self._post(reader, writer, json.dumps(ask).encode())
            self._told += len(answer)
            turn = (turn + 1) % TURNS
            previous = json.loads(answer)["id"] if turn else None
        writer.close()

    async def _post(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> bytes:
        head = f"POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        got = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(got)
        assert got.startswith(b"HTTP/1.1 200"), got
        assert length is not None, got
        return await reader.readexactly(int(length[1]))


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return kib / 1024
