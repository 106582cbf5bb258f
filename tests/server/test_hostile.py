"""A hostile client, an unlucky operator: what they do must cost the others nothing and leave the journal whole."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_restart import verify
from tests.serving import Server, scripted, until

WAIT_S = 30.0
HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"


def talk(port: int, *pieces: bytes) -> bytes:
    """Sends pieces as long as the server takes them; returns what it says until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except OSError:
            pass  # it has heard enough; its answer may still be there
        said = b""
        try:
            while data := connection.recv(65536):
                said += data
        except ConnectionResetError:
            pass  # closed with bytes of ours unread
        return said


def memory_kib(server: Server) -> int:
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def metric(server: Server, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with short answers, for tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("hostile")
    with Server(folder / "data", model=scripted(folder, {"text": "one two three"})) as server:
        yield server
        assert "Traceback" not in server.log.read_text()
    verify(folder / "data")


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([HEAD] + [b"X-%d: %s\r\n" % (n, b"a" * 1_000) for n in range(2_000)], id="many headers"),
        pytest.param([HEAD, b"X: "] + [b"a" * 100_000] * 200, id="one header without an end"),
        pytest.param([b"GET /"] + [b"a" * 100_000] * 200, id="a path without an end"),
        pytest.param(
            [b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"]
            + [b"X-%d: %s\r\n" % (n, b"a" * 1_000) for n in range(20_000)],
            id="trailers",
        ),
    ],
)
def test_a_flood_of_headers_is_cut_off(quick: Server, pieces: list[bytes]) -> None:
    before = memory_kib(quick)
    talk(quick.port, *pieces)
    assert memory_kib(quick) - before < 10_000
    assert quick.respond(input="still there?")["status"] == "completed"


def test_what_is_no_http_is_told_in_the_shape_of_every_error(quick: Server) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", HEAD + b"Content-Length: -5\r\n\r\n"):
        head, _, body = talk(quick.port, garbage).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_request"


def test_a_client_that_leaves_before_its_body_is_whole_is_no_failure_of_ours(quick: Server) -> None:
    name = 'zj_requests_total{api="responses",status="499"}'
    before = metric(quick, name) if name in quick.http.get("/metrics").text else 0
    head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection(("127.0.0.1", quick.port)) as connection:
        connection.sendall(head + b'{"model"')
    deadline = time.monotonic() + WAIT_S
    while name not in quick.http.get("/metrics").text or metric(quick, name) == before:
        assert time.monotonic() < deadline, quick.http.get("/metrics").text
        time.sleep(0.01)
    assert 'status="500"' not in quick.http.get("/metrics").text


def test_deleting_what_is_being_continued_and_read(quick: Server) -> None:
    """Whoever is first wins: no 5xx, and a turn that was accepted can be continued."""
    url = "/v1/responses"
    with ThreadPoolExecutor(5) as pool:
        for number in range(30):
            parent = quick.respond(input=f"race {number}")["id"]
            history = [{"role": "user", "content": f"race {number}"}, {"role": "assistant", "content": "one two three"}]
            chained = {"model": "default", "input": "on", "previous_response_id": parent}
            resent = {"model": "default", "input": [*history, {"role": "user", "content": "on"}]}
            jobs = [
                pool.submit(quick.post, url, chained),
                pool.submit(quick.post, url, resent),
                pool.submit(quick.http.delete, f"{url}/{parent}"),
                pool.submit(quick.http.get, f"{url}/{parent}"),
            ]
            answers = [job.result() for job in jobs]
            assert all(answer.status_code < 500 for answer in answers), [answer.text for answer in answers]
            for answer in answers[:2]:
                if answer.status_code == 200:
                    assert quick.respond(input="on", previous_response_id=answer.json()["id"])["status"] == "completed"


def test_clients_that_leave_at_every_moment(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "word " * 400, "delay_ms": 5})
    with Server(tmp_path / "data", "--max-running", "2", model=model) as server:

        def leave(number: int) -> None:
            body = json.dumps({"model": "default", "input": f"{number}", "stream": bool(number % 2)}).encode()
            with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
                if number % 3 == 0:  # a reset instead of a polite end
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
                connection.sendall(head + body)
                time.sleep(number % 8 * 0.004)  # the moment at which it leaves is what is tried

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(leave, range(64)))
        cancelled = 'zj_responses_total{outcome="cancelled"}'
        until(lambda: cancelled in server.http.get("/metrics").text and metric(server, cancelled) == 64)
        until(lambda: not metric(server, "zj_accepted") and not metric(server, "zj_running"))
        first = next(server.events("/v1/responses", {"model": "default", "input": "me", "stream": True}))
        assert first["type"] == "response.created"
    verify(tmp_path / "data")


def test_sigterm_to_both_processes_does_not_cut_an_answer(tmp_path: Path) -> None:
    """A supervisor signals the whole group; the engine waits for its parent."""
    model = scripted(tmp_path, {"text": "word " * 40, "delay_ms": 10})
    with Server(tmp_path / "data", model=model) as server:
        events = server.events("/v1/responses", {"model": "default", "input": "go", "stream": True})
        while next(events)["type"] != "response.output_text.delta":
            pass
        (engine,) = server.children()
        os.kill(engine, signal.SIGTERM)
        assert server.process is not None
        server.process.terminate()
        assert list(events)[-1]["type"] == "response.completed"
        assert server.process.wait(WAIT_S) == 0
    verify(tmp_path / "data")


def test_sigterm_while_the_engine_does_not_answer(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "word " * 400, "delay_ms": 5})
    with Server(tmp_path / "data", "--drain-timeout", "0", model=model) as server:
        events = server.events("/v1/responses", {"model": "default", "input": "go", "stream": True})
        while next(events)["type"] != "response.output_text.delta":
            pass
        (engine,) = server.children()
        os.kill(engine, signal.SIGSTOP)
        ended: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: ended.extend(events))
        reader.start()
        assert server.terminate() == 0
        reader.join(WAIT_S)
        assert ended[-1]["type"] == "response.failed"
        assert "Traceback" not in server.log.read_text()
    verify(tmp_path / "data")
