"""A real server for tests: `zj serve` as a process of its own, on a free port, killed with real signals."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from zjournal.journal.events import Recorded
from zjournal.journal.reader import Reader

START_S_MAX = 120.0
STOP_S_MAX = 60.0
WAIT_S_MAX = 30.0


class Server:
    """One `zj serve` process and a client for it. Use as a context manager; it is killed at the end."""

    def __init__(
        self, data_dir: Path, *flags: str, model: str | None = None, env: dict[str, str] | None = None
    ) -> None:
        self.data_dir = data_dir
        self._place = held_port()
        self.port = self._place.getsockname()[1]
        self.flags = [*flags, *(["--model", model] if model else [])]
        self.env = os.environ | (env or {})
        self.log = data_dir.parent / f"{data_dir.name}.log"
        self.process: subprocess.Popen | None = None
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.http.close()
        self._place.close()

    def spawn(self) -> None:
        """Starts the process without waiting for anything."""
        command = [
            sys.executable,
            "-m",
            "zjournal",
            "serve",
            "--port",
            str(self.port),
            "--data-dir",
            str(self.data_dir),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, *self.flags], stdout=log, stderr=log, env=self.env)

    def start(self) -> None:
        """Starts the process and waits until it can make a token."""
        self.spawn()
        self.wait_ready()

    def wait_ready(self) -> None:
        assert self.process is not None
        until = time.monotonic() + START_S_MAX
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.http.get("/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError("not ready: " + self.log.read_text())

    def children(self) -> list[int]:
        """The pids of the server's children: the engine."""
        assert self.process is not None
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
                found += map(int, (task / "children").read_text().split())
        return found

    def kill(self) -> None:
        """SIGKILL to both processes, and waits for their end."""
        assert self.process is not None
        ends = [os.pidfd_open(self.process.pid)]
        for engine in self.children():
            with contextlib.suppress(ProcessLookupError):  # it went by itself
                ends.append(os.pidfd_open(engine))
        for end in ends:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(end, signal.SIGKILL)
        for end in ends:  # the engine is no child of ours, and holds its files until it is gone
            assert select.select([end], [], [], STOP_S_MAX)[0], "a killed process does not end"
            os.close(end)
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(STOP_S_MAX)

    def restart(self) -> None:
        """kill -9, then a new start on the same data directory."""
        self.kill()
        self.start()

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def respond(self, **body: Any) -> dict[str, Any]:
        """POST /v1/responses; must succeed."""
        answer = self.post("/v1/responses", {"model": "default", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The data of each SSE event of a streamed POST, without [DONE]."""
        with self.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])


@contextlib.contextmanager
def hanging(server: Server, path: str, body: Any) -> Iterator[socket.socket]:
    """A POST whose socket is closed at the end of the block, whatever has been answered."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield sock


def held_port() -> socket.socket:
    """A bound socket that never listens: nobody else is given its port, and a server may take it, again and again.

    Linux lets two sockets that both ask for it (SO_REUSEADDR) have one address as long as at most one of them listens.
    """
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    return place


def zj(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Runs a zj command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "zjournal", *arguments], capture_output=True, text=True, timeout=120, **kwargs
    )


def scripted(folder: Path, *turns: dict[str, Any], **settings: Any) -> str:
    """Writes a scripted model and returns its `--model` value."""
    path = folder / "turns.json"
    path.write_text(json.dumps({"context": 100_000, "dialect": "chatml", **settings, "turns": list(turns)}))
    return f"scripted:{path}"


def saying(said: Mapping[str, str], times: int) -> list[dict[str, Any]]:
    """Turns of a scripted model that says each text, `times` times, where a prompt ends with the words before it."""
    return [{"text": text, "when": when} for when, text in said.items() for _ in range(times)]


def until(holds: Callable[[], object], limit_s: float = WAIT_S_MAX) -> None:
    """Returns once it holds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def facts(data_dir: Path) -> list[Recorded]:
    """All facts of a journal, whether a server has it or not."""
    found: list[Recorded] = []
    with Reader.open(data_dir) as reader:
        while page := reader.read(found[-1].seq if found else 0):
            found += page
    return found


def happened(data_dir: Path, kind: type) -> list[Any]:
    """The facts of one kind."""
    return [fact.event for fact in facts(data_dir) if isinstance(fact.event, kind)]
