"""A client that reads nothing, on a real server: neither the model nor others wait, and the cut is a fact."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from tests.server.test_restart import verify
from tests.serving import Server, happened, scripted, until
from zjournal.journal.events import AnyEvent, ReaderCut, ResponseFinished
from zjournal.journal.reader import Reader

WAIT_S = 60.0
WORDS = 4000
BODY = {"model": "default", "stream": True, "top_logprobs": 20}  # which makes an event of 3 KB


def stuck(server: Server) -> socket.socket:
    """A client that asks for a stream and reads nothing of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    body = json.dumps({**BODY, "input": "stuck"}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def test_who_reads_nothing_is_cut_and_nobody_waits_for_it(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "on and off " * (WORDS // 3), "when": "stuck"}, {"text": "Well then."})
    with Server(tmp_path / "data", "--reader-timeout", "3s", model=model) as server:
        client = stuck(server)
        deadline = time.monotonic() + WAIT_S
        others = 0
        while "zj_readers_cut_total 1.0" not in server.http.get("/metrics").text:
            assert time.monotonic() < deadline, server.log.read_text()
            told = list(server.events("/v1/responses", {**BODY, "input": "hi"}))
            assert told[-1]["type"] == "response.completed"
            others += 1
        assert others > 0
        client.close()
        assert server.terminate() == 0
    with Reader.open(tmp_path / "data") as journal:
        facts: list[AnyEvent] = []
        after = 0
        while page := journal.read(after):
            facts += [fact.event for fact in page]
            after = page[-1].seq
        [cut] = [event for event in facts if isinstance(event, ReaderCut)]
        assert cut.silent_us >= 3_000_000
        assert 0 < cut.unread < 1 << 20
        # The model had all the time: it was done before its client was given up.
        [end] = [event for event in facts if isinstance(event, ResponseFinished) and event.response == cut.response]
        assert end.reason == "stop" and end.output > WORDS / 2
        assert facts.index(end) < facts.index(cut)
    verify(tmp_path / "data")


def test_sigterm_does_not_wait_for_who_reads_nothing_and_it_is_no_failure(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "on and off " * (WORDS // 3), "when": "stuck"}, {"text": "Well then."})
    with Server(tmp_path / "data", model=model) as server:
        client = stuck(server)
        until(lambda: happened(server.data_dir, ResponseFinished))
        assert server.terminate() == 0
        client.close()
    assert "Traceback" not in server.log.read_text()
    verify(tmp_path / "data")
