"""A `zj serve` of our own as a child process, and the little HTTP that the demo speaks to it.

Only the standard library: the demo must run where nothing but the server is installed, and it should see what any
client sees, the bytes on the socket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zjournal.errors import EngineStartFault, Fault, PortInUse

READY_S_MAX = 120.0
STOP_S_MAX = 40.0
REPLY_S_MAX = 120.0
PROBE_S_MAX = 2.0  # then it is asked again: it may be another program that has the port
PORTS_MAX = 3
POLL_S = 0.02
LOG_TAIL_BYTES = 4096
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Answer:
    """One response as a client saw it. `status` is the protocol's, or `cut` if the stream broke off."""

    response: str
    text: str
    status: str
    ttft_ms: float | None
    prompt: int | None = None
    cached: int | None = None
    output: int | None = None
    previous: str | None = None


class Serving:
    """A running `zj serve` on a loopback port and a data directory of its own."""

    def __init__(self, folder: Path, model: str, cache_dir: Path) -> None:
        """Starts it. `folder` takes the data directory, the settings file and the log."""
        self.data_dir = folder / "data"
        self.started_at = time.monotonic()
        self._log = folder / "server.log"
        self._settings = folder / "zj.toml"
        self._values = {"host": LOOPBACK, "data_dir": str(self.data_dir), "cache_dir": str(cache_dir), "model": model}
        self._ports = 0  # tried
        self._start()

    def _start(self) -> None:
        """Starts it on a port that was free a moment ago."""
        self.port = _free_port()
        self._ports += 1
        values = {**self._values, "port": self.port}
        # A JSON string is a TOML basic string, but for DEL, which no sane path holds.
        self._settings.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ZJ_")}
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "zjournal", "serve", "--config", str(self._settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
            )

    def wait_ready(self) -> float:
        """Seconds from the start until /readyz said yes. Raises EngineStartFault with the log's last line."""
        while time.monotonic() - self.started_at < READY_S_MAX:
            if self.process.poll() == PortInUse.exit_code and self._ports < PORTS_MAX:  # another was faster
                self._start()
            if self.process.poll() is not None:
                raise EngineStartFault(f"zj serve ended with {self.process.returncode}: {self._last_log_line()}")
            try:
                status, body = self._get("/readyz", PROBE_S_MAX)
            except OSError:
                status, body = 0, {}
            if status == 200:
                return time.monotonic() - self.started_at
            if body.get("status") == "failed":
                raise EngineStartFault(f"zj serve cannot load the model: {self._last_log_line()}")
            time.sleep(POLL_S)
        raise EngineStartFault(f"zj serve was not ready after {READY_S_MAX:.0f} s: {self._last_log_line()}")

    def ask(self, body: dict[str, Any], on_text: Callable[[str], None]) -> Answer:
        """Streams one Responses request; `on_text` gets each piece of text. A stream that breaks off is no error here.

        Raises Fault if the server refuses the request.
        """
        asked_at = time.monotonic()
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=REPLY_S_MAX)
        answer = Answer(response="", text="", status="cut", ttft_ms=None)
        try:
            connection.request("POST", "/v1/responses", json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise Fault(
                    f"the server answered {reply.status}: {reply.read(LOG_TAIL_BYTES).decode(errors='replace')}"
                )
            for event in _events(reply):
                kind = event.get("type")
                if kind == "response.output_text.delta":
                    ttft_ms = answer.ttft_ms or (time.monotonic() - asked_at) * 1000
                    answer = dataclasses.replace(answer, text=answer.text + event["delta"], ttft_ms=ttft_ms)
                    on_text(event["delta"])
                elif kind == "response.created":
                    answer = dataclasses.replace(answer, response=event["response"]["id"])
                elif kind in ("response.completed", "response.incomplete", "response.failed"):
                    answer = _ended(answer, event["response"])
        except (OSError, http.client.HTTPException):
            pass  # the server is gone: what was seen is the answer
        finally:
            connection.close()
        return answer

    def recall(self, response: str) -> str | None:
        """The text of a stored response by GET, or None if the server does not have it."""
        status, body = self._get(f"/v1/responses/{response}")
        return _text_of(body) if status == 200 else None

    def kill(self, engine: int) -> tuple[int, int]:
        """SIGKILL to the API process and the engine process; returns both pids once both are gone."""
        self.process.kill()
        with contextlib.suppress(ProcessLookupError):  # it may have noticed the end of its parent first
            os.kill(engine, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + STOP_S_MAX
        while _alive(engine) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.process.pid, engine

    def stop(self) -> int:
        """SIGTERM, and SIGKILL if that is not heard. Returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def _get(self, path: str, timeout_s: float = REPLY_S_MAX) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            raw = reply.read()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from None
        finally:
            connection.close()
        try:
            body = json.loads(raw)
        except ValueError:
            body = {}
        return reply.status, body if isinstance(body, dict) else {}

    def _last_log_line(self) -> str:
        with open(self._log, "rb") as file:
            file.seek(max(0, self._log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each SSE `data:` line; ours are single lines."""
    for line in reply:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def _ended(answer: Answer, response: dict[str, Any]) -> Answer:
    usage = response.get("usage") or {}
    return dataclasses.replace(
        answer,
        status=response["status"],
        prompt=usage.get("input_tokens"),
        cached=(usage.get("input_tokens_details") or {}).get("cached_tokens"),
        output=usage.get("output_tokens"),
        previous=response.get("previous_response_id"),
    )


def _text_of(response: dict[str, Any]) -> str:
    messages = (item for item in response.get("output", ()) if item.get("type") == "message")
    return "".join(part.get("text", "") for message in messages for part in message.get("content", ()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def _alive(pid: int) -> bool:
    """True while the process runs; an orphan that nobody has reaped yet counts as gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")  # no /proc on this system: kill(pid, 0) has the word
