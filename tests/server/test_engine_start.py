"""An engine that cannot start: `/readyz` says `failed` and why, from then on until the server ends, which it does."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests import smollm2
from tests.serving import STOP_S_MAX, Server, scripted, until
from zjournal.errors import EngineStartFault
from zjournal.link.client import UNREADY_LIVES_MAX

AHEAD = 1_000  # requests that wait for the server, a second's work: whatever we wait for, one is answered next
REQUEST = b"GET /readyz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def answers(server: Server) -> Iterator[tuple[int, dict[str, Any]]]:
    """Status and body of `/readyz`, asked without a pause until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=STOP_S_MAX) as sock:
        sock.sendall(REQUEST * AHEAD)
        with sock.makefile("rb") as told:
            while head := told.readline():
                length = 0
                while (line := told.readline().strip().lower()) != b"":
                    length = int(line.partition(b":")[2]) if line.startswith(b"content-length:") else length
                yield int(head.split()[1]), json.loads(told.read(length))
                try:
                    sock.sendall(REQUEST)
                except ConnectionError:  # it is closed; what was answered before is still to be read
                    continue


def alive(server: Server) -> bool:
    try:
        return server.http.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


def failed(server: Server, last_straw: Callable[[], None] = lambda: None) -> str:
    """The reason that `/readyz` tells from the first `failed` on to the end; before it, it tells `loading` alone.

    `last_straw` is called at the first `loading`.
    """
    seen: list[str] = []
    reasons = set()
    try:
        for status, told in answers(server):
            assert status == 503
            if not seen:
                last_straw()
            if not seen or seen[-1] != told["status"]:
                seen.append(told["status"])
            if told["status"] == "failed":
                assert told["progress"] == 0.0
                reasons.add(told["reason"])
            else:
                assert "reason" not in told
    except ConnectionResetError:
        pass  # more was asked than it read
    assert seen == ["loading", "failed"]
    assert server.process is not None
    assert server.process.wait(STOP_S_MAX) == EngineStartFault.exit_code
    (reason,) = reasons
    assert reason in server.log.read_text()
    return reason


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    """`device = cuda` insists on a card."""
    server = Server(tmp_path / "data", "--device", "cuda", model=str(smollm2.path()), env={"CUDA_VISIBLE_DEVICES": ""})
    try:
        server.spawn()
        until(lambda: alive(server))
        assert "cuda" in failed(server).lower()
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


def test_an_engine_that_dies_again_and_again_while_it_loads(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "Ok."}, load_when="never")
    server = Server(tmp_path / "data", model=model)
    try:
        server.spawn()
        until(lambda: alive(server))
        killed: set[int] = set()
        for _ in range(UNREADY_LIVES_MAX - 1):
            until(lambda: set(server.children()) - killed)
            (engine,) = set(server.children()) - killed
            os.kill(engine, signal.SIGKILL)
            killed.add(engine)
        until(lambda: set(server.children()) - killed)
        (last,) = set(server.children()) - killed
        assert failed(server, lambda: os.kill(last, signal.SIGKILL)) == (
            f"the engine process died {UNREADY_LIVES_MAX} times while loading, the last time with status -9"
        )
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()
