"""What the parts of benchmarks/api.py share: a client as bare as can be, and processes that keep to one processor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

READ_BYTES = 1 << 16
BEGINNING_BYTES = 1 << 12
API_CORE, OTHER_CORE = 0, 1  # of the processors that this process may use
_ALLOWED = frozenset(os.sched_getaffinity(0))
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Spoken(NamedTuple):
    """One protocol: where it is asked, how a body begins, and what stands once in the event of each token."""

    name: str
    path: str
    body: dict[str, Any]
    field: str  # that holds the prompt
    token: bytes


CHAT = Spoken(
    "Chat",
    "/v1/chat/completions",
    {"max_completion_tokens": 10_000, "stream_options": {"include_usage": True}},
    "messages",
    b'"delta":{"content":',
)
RESPONSES = Spoken(
    "Responses", "/v1/responses", {"max_output_tokens": 10_000}, "input", b'"type":"response.output_text.delta"'
)
MESSAGES = Spoken("Messages", "/v1/messages", {"max_tokens": 10_000}, "messages", b'"type":"text_delta"')
PROTOCOLS = (CHAT, RESPONSES, MESSAGES)


def asked(spoken: Spoken, prompt: Any, **more: Any) -> bytes:
    """The body of a streamed request. `prompt`: a text, or the whole history."""
    told = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return json.dumps({"model": "default", "stream": True, **spoken.body, spoken.field: told, **more}).encode()


def head(path: str, port: int, length: int, close: bool = True) -> bytes:
    """The head of a request."""
    ending = "connection: close\r\n\r\n" if close else "\r\n"
    told = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return (told + f"content-length: {length}\r\n{ending}").encode()


class Stream(NamedTuple):
    """What came of one stream: its bytes with their heads, and when its first byte and each token came (ns)."""

    told: bytes
    sent: int
    first: int
    tokens: list[int]


async def stream(port: int, path: str, body: bytes, token: bytes, keep: bool = True) -> Stream:
    """Asks, and reads to the end. Without `keep` only the beginning of what came is given back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = time.monotonic_ns()
    writer.write(head(path, port, len(body)) + body)
    parts: list[bytes] = []
    times: list[int] = []
    first = kept = 0
    cut = b""  # of the last piece: a mark may stand across two
    while data := await reader.read(READ_BYTES):
        now = time.monotonic_ns()
        first = first or now
        times += [now] * (cut + data).count(token)
        cut = data[-len(token) + 1 :]
        if keep or kept < BEGINNING_BYTES:
            parts.append(data)
            kept += len(data)
    writer.close()
    told = b"".join(parts)
    assert told.startswith(b"HTTP/1.1 200"), told[:2000]
    return Stream(told, sent, first, times)


def events(told: bytes) -> bytes:
    """The body of an answer that came in chunks."""
    _, _, rest = told.partition(b"\r\n\r\n")
    parts: list[bytes] = []
    at = 0
    while at < len(rest):
        end = rest.index(b"\r\n", at)
        size = int(rest[at:end], 16)
        parts.append(rest[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(parts)


def whole(answer: bytes) -> Any:
    """The JSON of an answer that came at once."""
    top, _, rest = answer.partition(b"\r\n\r\n")
    length = _LENGTH.search(top)
    assert length is not None, answer
    return json.loads(rest[: int(length[1])])


# --- processes ----------------------------------------------------------------------------------------


def pin(pid: int, core: int) -> None:
    """Keeps all threads of a process, and those that they start, on one of the processors that this one may use."""
    able = sorted(_ALLOWED)
    _allow(pid, {able[core % len(able)]})


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """This process on the processor that the API does not have."""
    pin(os.getpid(), OTHER_CORE)
    try:
        yield
    finally:
        _allow(os.getpid(), _ALLOWED)


def _allow(pid: int, processors: frozenset[int] | set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), processors)


def processor_s(pid: int) -> float:
    """User and system seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_mib(pid: int) -> float:
    """What of a process is in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return kib / 1024
