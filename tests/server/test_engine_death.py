"""The engine process dies, the API does not: running requests fail in their protocol, the next ones work."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.server.test_restart import verify
from tests.serving import Server, scripted, until


def test_a_dying_engine_fails_its_request_and_is_started_again(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "one two three four five six", "when": "die", "die_after": 3}, {"text": "fine"})
    with Server(tmp_path / "data", model=model) as server:
        seen = list(server.events("/v1/responses", {"model": "default", "input": "please die", "stream": True}))
        assert seen[-1]["type"] == "response.failed"
        assert seen[-1]["response"]["error"]["code"] == "server_error"
        assert server.http.get("/livez").status_code == 200
        server.wait_ready()
        assert server.respond(input="and now")["status"] == "completed"
    verify(tmp_path / "data")


def test_a_dying_engine_is_a_500_for_one_who_waits_for_the_whole_answer(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "one two three", "when": "die", "die_after": 1}, {"text": "fine"})
    with Server(tmp_path / "data", model=model) as server:
        body = {"model": "default", "messages": [{"role": "user", "content": "please die"}]}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        server.wait_ready()
        body["messages"] = [{"role": "user", "content": "again"}]
        assert server.post("/v1/chat/completions", body).status_code == 200


def test_a_failing_request_does_not_touch_its_neighbour(tmp_path: Path) -> None:
    model = scripted(
        tmp_path,
        {"text": "one two three four", "when": "break", "fail_after": 2},
        {"text": "all of it is here", "delay_ms": 5},
    )
    with Server(tmp_path / "data", model=model) as server:
        neighbour = server.events("/v1/responses", {"model": "default", "input": "hello", "stream": True})
        assert next(neighbour)["type"] == "response.created"
        broken = server.post("/v1/responses", {"model": "default", "input": "please break"})
        assert broken.status_code == 500
        last = list(neighbour)[-1]
        assert last["type"] == "response.completed"
        assert last["response"]["output"][0]["content"][0]["text"] == "all of it is here"


def test_sigkill_of_the_engine_alone(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "word " * 300, "delay_ms": 10})
    with Server(tmp_path / "data", model=model) as server:
        (engine,) = server.children()
        seen = server.events("/v1/responses", {"model": "default", "input": "go", "stream": True})
        while next(seen)["type"] != "response.output_text.delta":
            pass
        os.kill(engine, signal.SIGKILL)
        assert list(seen)[-1]["type"] == "response.failed"
        until(lambda: server.children() not in ([], [engine]))
        server.wait_ready()
        metrics = server.http.get("/metrics").text
        assert "zj_engine_crashes_total 1.0" in metrics
