"""Sockets from their upgrade to their end, on a real server: refusals, limits, restarts, clients that go or stall."""

from __future__ import annotations

import json
import socket as socket_module
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed

from tests.server.test_keep_alive import again
from tests.server.test_restart import verify
from tests.server.test_websocket import valid
from tests.serving import Server, happened, scripted, until
from tests.sockets import Socket, refusal
from zjournal.journal.events import PayloadErased, ReaderCut, RequestAccepted, ResponseFinished


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sockets")
    with Server(folder / "data", model=scripted(folder, {"text": "Hello there."})) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


# --- the upgrade ----------------------------------------------------------------------------------------


def test_an_upgrade_that_is_refused_is_answered_as_a_request_would_be(server: Server) -> None:
    for path, status in (("/v1/chat/completions", 404), ("/", 404), ("/v1/responses/resp_1", 404)):
        answer = refusal(server.port, path)
        assert answer.status_code == status
        assert json.loads(answer.body)["error"]["code"] == "not_found"
        assert answer.headers["x-request-id"].startswith("req_")
    assert server.http.get("/livez").status_code == 200  # what came before is logged by now
    assert "ERROR" not in server.log.read_text(), "a refusal is no fault of the server"


@pytest.mark.parametrize(
    "head",
    [
        "GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n",
        "POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n",
        "GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nx: "
        + "y" * 20_000
        + "\r\n",
        "GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        + "x: y\r\n" * 300,
    ],
)
def test_no_handshake_is_answered_and_closed(server: Server, head: str) -> None:
    with socket_module.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(head.encode() + b"\r\n")
        answer = b""
        while data := client.recv(65536):
            answer += data
    status = int(answer.split(b" ", 2)[1])
    assert 400 <= status < 500, answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_r28_o25_keys_are_asked_for_before_the_upgrade_and_tell_sockets_apart(tmp_path: Path) -> None:
    """Field reports R28 and O25: both headers work, none is 401; what is another's is as if it had never been."""
    keys = tmp_path / "keys"
    keys.write_text("alice:alice-key-0123456789\nbob:bob-key-0123456789\n")
    keys.chmod(0o600)
    with Server(tmp_path / "data", "--api-key-file", str(keys), model=scripted(tmp_path, {"text": "Ok."})) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x_api_key": "wrong"}):
            answer = refusal(server.port, **headers)
            assert answer.status_code == 401
            assert json.loads(answer.body)["error"]["code"] == "invalid_api_key"
        with Socket(server.port, {"authorization": "Bearer alice-key-0123456789"}) as alice:
            stored = alice.respond(input="mine")["id"]
            unstored = alice.respond(input="mine too", store=False)["id"]
            alice.respond(input="more", previous_response_id=stored)
            with Socket(server.port, {"x-api-key": "bob-key-0123456789"}) as bob:
                told = []
                for name in (stored, unstored, "resp_" + "0" * 32):
                    refused = bob.refused(input="x", previous_response_id=name, store=False)
                    told.append(json.dumps(refused).replace(name, "ID"))
                assert len(set(told)) == 1, "to another key they are as one that never was"
        server.kill()
        assert b"key-0123456789" not in (tmp_path / "data" / "journal.db").read_bytes()
    assert "0123456789" not in server.log.read_text()


def test_o26_a_web_page_cannot_open_a_socket(server: Server) -> None:
    """Field report O26: a foreign Host or Origin is 403 before any work; loopback is not foreign."""
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}, {"origin": "null"}):
        answer = refusal(server.port, **headers)
        assert answer.status_code == 403
        assert json.loads(answer.body)["error"]["code"] == "forbidden"
        assert not any(name.lower().startswith("access-control") for name in answer.headers)
    with Socket(server.port, {"origin": f"http://localhost:{server.port}"}) as socket:
        socket.respond(input="Say hello.")


def test_where_it_is_off_clients_are_told_to_go_on_over_http(tmp_path: Path) -> None:
    with Server(tmp_path / "data", "--websocket", "off", model=scripted(tmp_path, {"text": "Ok."})) as server:
        answer = refusal(server.port)
        assert answer.status_code == 426
        assert "HTTP" in json.loads(answer.body)["error"]["message"]
        assert server.respond(input="x")["status"] == "completed"


def test_limits_of_a_key_are_told_at_the_upgrade_and_hold_for_each_request(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:alice-key-0123456789 requests=2\n")
    keys.chmod(0o600)
    model, key = scripted(tmp_path, {"text": "Ok."}), {"authorization": "Bearer alice-key-0123456789"}
    flags = ("--api-key-file", str(keys))
    with Server(tmp_path / "data", *flags, model=model) as server, Socket(server.port, key) as socket:
        assert socket.connection.response is not None
        assert socket.connection.response.headers["x-ratelimit-limit-requests"] == "2"
        for _ in range(2):
            socket.respond(input="x")
        told = socket.refused(input="x")
        assert (told["status"], told["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(told["headers"]["retry-after"]) > 0


def test_a_message_over_the_limit_on_bodies_is_told_and_ends_the_socket(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "Ok."})
    with Server(tmp_path / "data", "--body-max", "4KiB", model=model) as server:
        for compression in ("deflate", None):
            with Socket(server.port, compression=compression) as socket:
                socket.respond(input="x" * 3000)
                told = socket.refused(input="x" * 5000)
                assert (told["status"], told["error"]["code"]) == (413, "request_too_large")
                with pytest.raises(ConnectionClosed) as closed:
                    socket.event()
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


# --- across restarts --------------------------------------------------------------------------------------


def test_r09_after_a_kill_what_was_stored_goes_on_and_what_was_not_is_cleanly_not_found(tmp_path: Path) -> None:
    """Field report R09: `previous_response_not_found` before any output, so that the client can send everything."""
    model = scripted(tmp_path, {"text": "Hello there."})
    with Server(tmp_path / "data", "--snapshot-restore", "always", model=model) as server:
        with Socket(server.port) as socket:
            stored = socket.respond(input="My name is Alice. " * 40)
            unstored = socket.respond(input="Mine is Bob.", store=False)
            server.kill()
            with pytest.raises(ConnectionClosed):
                socket.event()
        server.start()
        with Socket(server.port) as socket:
            told = socket.refused(input="x", store=False, previous_response_id=unstored["id"])
            assert told["error"]["code"] == "previous_response_not_found"
            goes_on = socket.respond(input="What is it?", previous_response_id=stored["id"])
            assert goes_on["usage"]["input_tokens"] > stored["usage"]["total_tokens"]
    verify(tmp_path / "data")


def test_a_response_that_ran_when_the_server_was_killed_is_failed_and_not_continued(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "on and on " * 300, "delay_ms": 10})
    with Server(tmp_path / "data", model=model) as server:
        with Socket(server.port) as socket:
            socket.ask(input="x")
            created = socket.event()["response"]["id"]
            server.kill()
        server.start()
        assert server.http.get(f"/v1/responses/{created}").json()["status"] == "failed"
        with Socket(server.port) as socket:
            told = socket.refused(input="x", previous_response_id=created)
            assert told["error"]["param"] == "previous_response_id"


def test_unstored_responses_can_be_continued_where_nothing_of_them_is_retained(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "Hello there."})
    with Server(tmp_path / "data", "--unstored-retention", "0", model=model) as server:
        secrets = [f"The secret number {index} is mauve." for index in range(3)]
        with Socket(server.port) as socket:
            first = socket.respond(input=secrets[0], store=False)
            second = socket.respond(input=secrets[1], store=False, previous_response_id=first["id"])
            third = socket.respond(input=secrets[2], store=False, previous_response_id=second["id"])
            assert third["usage"]["input_tokens"] > second["usage"]["total_tokens"]
        until(lambda: "zj_websockets 0.0" in server.http.get("/metrics").text)
        assert server.terminate() == 0
    stored = b"".join(path.read_bytes() for path in (tmp_path / "data").glob("journal.db*"))
    accepted = happened(tmp_path / "data", RequestAccepted)
    assert len(accepted) == 3
    assert b"mauve" not in stored
    verify(tmp_path / "data")


def test_where_nothing_is_retained_a_client_that_leaves_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    """Not until the next sweep, which is in an hour: the answer that is cut short was built on all of the chain."""
    model = scripted(tmp_path, {"text": "on and on " * 300, "when": "at length", "delay_ms": 20}, {"text": "Hello."})

    def left() -> set[str]:
        accepted = {one.response for one in happened(tmp_path / "data", RequestAccepted)}
        return accepted - {one.response for one in happened(tmp_path / "data", PayloadErased)}

    with Server(tmp_path / "data", "--unstored-retention", "0", model=model) as server:
        socket = Socket(server.port)
        previous: dict[str, str] = {}
        for index in range(4):
            previous = {"previous_response_id": socket.respond(input=f"{index}", store=False, **previous)["id"]}
        assert len(left()) == 4
        socket.ask(input="at length", store=False, **previous)
        socket.event()
        socket.leave()
        until(lambda: not left())
        for _ in range(20):  # some leave while what they ask is being written down
            leaves = Socket(server.port)
            leaves.ask(input="hi", store=False)
            leaves.leave()
        until(lambda: "zj_websockets 0.0" in server.http.get("/metrics").text)
        until(lambda: not left())
        assert "Traceback" not in server.log.read_text()
    verify(tmp_path / "data")


def test_r13_sigterm_lets_an_answer_end_refuses_the_next_and_closes_with_1012(tmp_path: Path) -> None:
    """Field report R13: a stop does not cut an answer; a client is told to come back."""
    model = scripted(tmp_path, {"text": "on and on " * 120, "when": "at length", "delay_ms": 10}, {"text": "Ok."})
    with Server(tmp_path / "data", model=model) as server, Socket(server.port) as busy, Socket(server.port) as idle:
        idle.respond(input="x")
        busy.ask(input="Tell me at length")
        while busy.event()["type"] != "response.output_text.delta":
            pass
        stopped: list[int] = []
        stopping = threading.Thread(target=lambda: stopped.append(server.terminate()))
        stopping.start()
        until(lambda: server.http.get("/readyz").json()["status"] == "draining")
        told = idle.refused(input="x")
        assert (told["status"], told["error"]["code"]) == (503, "server_unavailable")
        assert list(busy.events())[-1]["type"] == "response.completed"
        for socket in (busy, idle):
            with pytest.raises(ConnectionClosed) as closed:
                socket.event()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        stopping.join(60)
        assert stopped == [0]
    assert "Traceback" not in server.log.read_text()


def test_sigterm_parks_an_answer_that_does_not_end(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "on and on " * 3000, "delay_ms": 10})
    flags = ("--drain-timeout", "200ms")
    with Server(tmp_path / "data", *flags, model=model) as server, Socket(server.port) as socket:
        socket.ask(input="Tell me at length")
        while socket.event()["type"] != "response.output_text.delta":
            pass
        stopping = threading.Thread(target=server.terminate)
        stopping.start()
        last = list(socket.events())[-1]
        assert last["type"] == "response.failed"
        with pytest.raises(ConnectionClosed) as closed:
            socket.event()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        stopping.join(60)
    assert "Traceback" not in server.log.read_text()


# --- clients that leave, wait, or do not read ---------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode", "queue"])
def test_o19_a_client_that_leaves_ends_its_response(tmp_path: Path, phase: str) -> None:
    """Field report O19: in prefill, in decode and in the queue; one end, `cancelled`; others go on."""
    slow = {"text": "on and on " * 300, "delay_ms": 10, "when": "slow"}
    reads = {"text": "Read.", "prefill_ms_per_1k": 3000, "when": "reads"}
    model = scripted(tmp_path, slow, reads, {"text": "Ok."})
    with Server(tmp_path / "data", "--max-running", "1", model=model) as server, Socket(server.port) as first:
        if phase == "queue":
            first.ask(input="slow")
            while first.event()["type"] != "response.output_text.delta":
                pass
        second = Socket(server.port)
        second.ask(input={"prefill": "word " * 3000 + "reads", "decode": "slow", "queue": "other"}[phase])
        left = second.event()["response"]["id"]
        if phase == "decode":
            while second.event()["type"] != "response.output_text.delta":
                pass
        second.leave()

        def ends() -> list[ResponseFinished]:
            return [one for one in happened(server.data_dir, ResponseFinished) if one.response == left]

        until(ends)
        (end,) = ends()
        assert end.reason == "cancelled"
        assert (end.output > 0) == (phase == "decode")
        if phase == "queue":
            assert first.event()["type"] == "response.output_text.delta", "who runs is left alone"
        else:
            first.respond(input="Say hello.")
    verify(tmp_path / "data")


def test_r10_silence_is_broken_by_events(tmp_path: Path) -> None:
    """Field report R10: real messages, for clients count only those; they are told again as they were."""
    model = scripted(tmp_path, {"text": "Read.", "prefill_ms_per_1k": 500})
    with Server(tmp_path / "data", "--keep-alive", "100ms", model=model) as server, Socket(server.port) as socket:
        events = valid(socket.answer(input="The tide table of the port is on the wall. " * 250))
        told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert len(told) >= 2 and told[-1]["processed"] > 0
        assert again(server, events[-1]["response"]["id"]) == events


def reading_nothing(server: Server) -> Socket:
    """A socket whose client's system takes no more than a few KB for it."""
    small = socket_module.socket()
    small.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_RCVBUF, 4096)
    small.connect(("127.0.0.1", server.port))
    return Socket(server.port, compression=None, sock=small, max_queue=1, ping_interval=None)


def test_sigterm_does_not_wait_for_who_reads_nothing(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "on and off " * 1300, "when": "stuck"}, {"text": "Well then."})
    with Server(tmp_path / "data", model=model) as server:
        stuck = reading_nothing(server)
        stuck.ask(input="stuck", top_logprobs=20)
        until(lambda: happened(server.data_dir, ResponseFinished))
        assert server.terminate() == 0
        stuck.leave()
    assert "Traceback" not in server.log.read_text()


def test_who_reads_nothing_is_cut_and_nobody_waits_for_it(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "on and off " * 1300, "when": "stuck"}, {"text": "Well then."})
    with Server(tmp_path / "data", "--reader-timeout", "3s", model=model) as server:
        stuck = reading_nothing(server)
        stuck.ask(input="stuck", top_logprobs=20)
        with Socket(server.port) as other:
            until(lambda: other.respond(input="hi") and "cut_total 1.0" in server.http.get("/metrics").text, 60.0)
        stuck.leave()
        assert server.terminate() == 0
    (cut,) = happened(tmp_path / "data", ReaderCut)
    assert cut.silent_us >= 3_000_000 and 0 < cut.unread < 1 << 20
    (end,) = [one for one in happened(tmp_path / "data", ResponseFinished) if one.response == cut.response]
    assert end.reason == "stop", "the model had all the time"
    verify(tmp_path / "data")
