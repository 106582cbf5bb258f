"""Silence on the wire: clients hear that their response lives, in the queue and while its prompt is read."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from tests.serving import Server, scripted, zj
from zjournal.journal.events import ResponseWaited
from zjournal.journal.reader import Reader

WORDS = "The tide table of the port is on the wall, and nobody reads it. " * 200  # about 3,000 tokens
KEEP_ALIVE = ("--keep-alive", "100ms")


def waits(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["prompt_progress"] for event in events if "prompt_progress" in event]


def again(server: Server, response: str) -> list[dict[str, Any]]:
    """The events of a stored response, told again."""
    lines = server.http.get(f"/v1/responses/{response}?stream=true").text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_a_long_prompt_is_told_as_real_events_and_the_numbers_are_in_the_journal(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "Read.", "prefill_ms_per_1k": 500})
    with Server(tmp_path / "data", *KEEP_ALIVE, model=model) as server:
        events = list(server.events("/v1/responses", {"model": "default", "input": WORDS, "stream": True}))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        told = waits(events)
        assert len(told) >= 2
        processed = [one["processed"] for one in told]
        assert processed == sorted(processed) and 0 < processed[-1] <= told[-1]["total"]
        response = events[0]["response"]["id"]
        assert again(server, response) == events
        chunks = list(
            server.events(
                "/v1/chat/completions",
                {"model": "default", "messages": [{"role": "user", "content": "Now " + WORDS}], "stream": True},
            )
        )
        quiet = [chunk for chunk in chunks if "prompt_progress" in chunk]
        assert quiet and all(chunk["choices"][0]["delta"] == {} for chunk in quiet)
        server.restart()
        assert again(server, response) == events
        server.kill()
        with Reader.open(server.data_dir) as journal:
            written = [fact.event for fact in journal.read_response(response)]
        assert [one.done for one in written if isinstance(one, ResponseWaited)] == processed
    file = tmp_path / "moved.jsonl"
    assert zj("sessions", "export", response, "-o", str(file), "--data-dir", str(server.data_dir)).returncode == 0
    with Server(tmp_path / "other", model=model) as server:
        done = zj("sessions", "import", str(file), "--data-dir", str(server.data_dir))
        assert done.returncode == 0, done.stderr
        assert again(server, response) == events, "on another machine as well"


def test_a_request_that_waits_its_turn_hears_so(tmp_path: Path) -> None:
    first = {"text": " ".join(["on"] * 150), "when": "first", "delay_ms": 20}
    model = scripted(tmp_path, first, {"text": "Then."})
    body = {"model": "default", "stream": True}
    with Server(tmp_path / "data", *KEEP_ALIVE, "--max-running", "1", model=model) as server:
        begun = threading.Event()

        def long() -> None:
            for event in server.events("/v1/responses", {**body, "input": "first"}):
                if event["type"] == "response.output_text.delta":
                    begun.set()

        other = threading.Thread(target=long)
        other.start()
        assert begun.wait(30)
        told = waits(list(server.events("/v1/responses", {**body, "input": "second"})))
        other.join(30)
        assert told and told[0] == {"total": told[0]["total"], "processed": 0, "queued": True}


def test_r10_messages_ping_while_they_wait_and_while_a_prompt_is_read(tmp_path: Path) -> None:
    """Field report R10: real `ping` events, before `message_start` as well; the answer behind them is whole."""
    first = {"text": " ".join(["on"] * 150), "when": "first", "delay_ms": 20}
    slow = {"text": "Read.", "when": "nobody reads it", "prefill_ms_per_1k": 500}
    body = {"model": "default", "stream": True}
    asked = {**body, "max_tokens": 50, "messages": [{"role": "user", "content": WORDS}]}
    model = scripted(tmp_path, first, slow, slow, {"text": "Then."})
    with Server(tmp_path / "data", *KEEP_ALIVE, "--max-running", "1", model=model) as server:
        running = server.events("/v1/responses", {**body, "input": "first"})
        while next(running)["type"] != "response.output_text.delta":
            pass
        told = server.events("/v1/messages", asked)
        assert next(told)["type"] == "ping", "it is in the queue"
        (*_, last) = running
        assert last["type"] == "response.completed"
        kinds = [event["type"] for event in told]
        start = kinds.index("message_start")
        assert "ping" in kinds[:start], "and then its prompt is read"
        assert [kind for kind in kinds[start:] if kind not in ("ping", "content_block_delta")] == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
