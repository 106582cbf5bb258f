"""A client that hangs up: the engine stops working for it, the journal says how far it came, others go on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_restart import verify
from tests.serving import WAIT_S_MAX, Server, hanging, happened, scripted, until, zj
from tests.sockets import Socket
from zjournal.journal.events import RequestAccepted, ResponseFinished


def wait_turns(server: Server, wanted: int, status: str) -> list[dict]:
    """The turns of all sessions once `wanted` of them have the status."""
    until = time.monotonic() + WAIT_S_MAX
    while True:
        listed = zj("sessions", "list", "--json", "--data-dir", str(server.data_dir))
        assert listed.returncode == 0, listed.stderr
        turns = []
        for session in json.loads(listed.stdout):
            shown = zj("sessions", "show", session["session"], "--json", "--data-dir", str(server.data_dir))
            assert shown.returncode == 0, shown.stderr
            turns += json.loads(shown.stdout)["turns"]
        found = [turn for turn in turns if turn["status"] == status]
        if len(found) >= wanted or time.monotonic() > until:
            assert len(found) == wanted, turns
            return found
        time.sleep(0.05)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_o22_a_cut_stream_keeps_its_counts(tmp_path: Path, path: str) -> None:
    """Field report O22: after the cut the journal has prompt and output tokens, and status cancelled."""
    model = scripted(tmp_path, {"text": "word " * 500, "delay_ms": 10})
    with Server(tmp_path / "data", model=model) as server:
        ask = {"input": "go"} if "responses" in path else {"messages": [{"role": "user", "content": "go"}]}
        seen = 0
        with server.http.stream("POST", path, json={"model": "default", "stream": True, **ask}) as answer:
            for line in answer.iter_lines():
                seen += "word" in line
                if seen >= 12:
                    break
        (turn,) = wait_turns(server, 1, "cancelled")
        assert 12 <= turn["output_tokens"] < 400
        assert turn["prompt_tokens"] > 0
        assert turn["cached_tokens"] == 0
        metrics = server.http.get("/metrics").text
        assert f"zj_output_tokens_total {float(turn['output_tokens'])}" in metrics
    verify(tmp_path / "data")


def test_a_client_that_waits_for_the_whole_answer_can_hang_up_too(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "word " * 500, "delay_ms": 10})
    with Server(tmp_path / "data", model=model) as server:
        with hanging(server, "/v1/responses", {"model": "default", "input": "go"}):
            until(lambda: happened(server.data_dir, RequestAccepted))
        (turn,) = wait_turns(server, 1, "cancelled")
        assert turn["output_tokens"] < 400


def test_o20_a_queued_disconnect_leaves_the_running_one_alone(tmp_path: Path) -> None:
    """Field report O20: one slot; A decodes, B waits and hangs up; A is whole, B has no output."""
    model = scripted(
        tmp_path, {"text": "word " * 200, "when": "first", "delay_ms": 10}, {"text": "other", "when": "second"}
    )
    with Server(tmp_path / "data", "--max-running", "1", model=model) as server:
        running = server.events("/v1/responses", {"model": "default", "input": "first", "stream": True})
        while next(running)["type"] != "response.output_text.delta":
            pass
        with hanging(server, "/v1/responses", {"model": "default", "input": "second"}):
            until(lambda: len(happened(server.data_dir, RequestAccepted)) == 2)
        last = list(running)[-1]
        assert last["type"] == "response.completed"
        assert last["response"]["output"][0]["content"][0]["text"] == "word " * 200
        (cancelled,) = wait_turns(server, 1, "cancelled")
        assert cancelled["output_tokens"] == 0


@pytest.mark.parametrize("over", ["sse", "websocket"])
def test_o20_one_that_leaves_as_another_ends_takes_nothing_with_it(tmp_path: Path, over: str) -> None:
    """Field report O20: B waits and leaves, C waits and leaves at the moment A ends; A is whole, D is answered.

    C may have begun by then, but never ends as anything but cancelled, and says no word of A.
    """
    turns = [{"text": "word " * 60, "when": "first", "delay_ms": 5}]
    turns += [{"text": "other " * 400, "when": "waits", "delay_ms": 10} for _ in range(2)]
    model = scripted(tmp_path, *turns, {"text": "Ok."})
    with Server(tmp_path / "data", "--max-running", "1", model=model) as server, contextlib.ExitStack() as stack:
        a = _Asked(server, over, stack, "first")
        a.until("response.output_text.delta")
        b, c = (_Asked(server, over, stack, f"{name} waits") for name in "bc")
        b.leave()
        last = a.until("response.completed")
        c.leave()
        assert last["response"]["output"][0]["content"][0]["text"] == "word " * 60
        assert server.respond(input="and now?")["output"][0]["content"][0]["text"] == "Ok."

        def ends() -> dict[str, ResponseFinished]:
            return {one.response: one for one in happened(server.data_dir, ResponseFinished)}

        until(lambda: {b.id, c.id} <= set(ends()))
        told = ends()
        assert [told[one.id].reason for one in (a, b, c)] == ["stop", "cancelled", "cancelled"]
        assert told[b.id].output == 0, "it never had its turn"
        assert told[c.id].output < 400
        assert server.http.get(f"/v1/responses/{a.id}").json() == last["response"]
    verify(tmp_path / "data")


class _Asked:
    """A response that is told as it comes, up to where its client leaves."""

    def __init__(self, server: Server, over: str, stack: contextlib.ExitStack, words: str) -> None:
        self._leave: Callable[[], None]
        if over == "websocket":
            socket = Socket(server.port)
            socket.ask(input=words)
            self._events, self._leave = socket.events(), socket.leave
        else:
            events = server.events("/v1/responses", {"model": "default", "input": words, "stream": True})
            self._events, self._leave = events, events.close
            stack.callback(events.close)
        self.id = next(self._events)["response"]["id"]

    def until(self, kind: str) -> dict[str, Any]:
        return next(event for event in self._events if event["type"] == kind)

    def leave(self) -> None:
        self._leave()
