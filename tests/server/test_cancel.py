"""A client that hangs up: the engine stops working for it, the journal says how far it came, others go on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from tests.server.test_restart import verify
from tests.serving import Server, scripted, zj

IDLE_S_MAX = 5.0


def wait_turns(server: Server, wanted: int, status: str) -> list[dict]:
    """The turns of all sessions once `wanted` of them have the status."""
    until = time.monotonic() + IDLE_S_MAX
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
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/responses", {"model": "default", "input": "go"}, timeout=0.5)
        (turn,) = wait_turns(server, 1, "cancelled")
        assert turn["output_tokens"] < 400


def test_o20_a_queued_disconnect_leaves_the_running_one_alone(tmp_path: Path) -> None:
    """Field report O20: one slot; A decodes, B waits and hangs up; A is whole, B has no output."""
    model = scripted(
        tmp_path, {"text": "word " * 80, "when": "first", "delay_ms": 10}, {"text": "other", "when": "second"}
    )
    with Server(tmp_path / "data", "--max-running", "1", model=model) as server:
        running = server.events("/v1/responses", {"model": "default", "input": "first", "stream": True})
        while next(running)["type"] != "response.output_text.delta":
            pass
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"http://127.0.0.1:{server.port}/v1/responses",
                json={"model": "default", "input": "second"},
                timeout=0.2,
            )
        last = list(running)[-1]
        assert last["type"] == "response.completed"
        assert last["response"]["output"][0]["content"][0]["text"] == "word " * 80
        (cancelled,) = wait_turns(server, 1, "cancelled")
        assert cancelled["output_tokens"] == 0
