"""A mixed load over HTTP with cancels and scarce memory: it ends idle and clean, and all counters agree.

`pytest -m soak` runs the long one.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.test_restart import verify
from tests.serving import Server, scripted
from zjournal.journal.events import CacheMatched, Recorded, RequestAccepted, ResponseFinished
from zjournal.journal.reader import Reader

CLIENTS = 12
IDLE_S_MAX = 60.0


class Client:
    """One agent: a conversation that grows, with a branch now and then, over both protocols."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.dice = random.Random(seed)
        self.messages: list[dict] = []
        self.statuses: list[str] = []
        self.usage: list[tuple[int, int, int]] = []  # prompt, cached, output of answers that were read to their end

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()

    def turn(self) -> None:
        if self.dice.random() < 0.2:
            self.messages = self.messages[: self.dice.randint(0, len(self.messages))]
        self.messages.append({"role": "user", "content": "word " * self.dice.choice([1, 5, 60, 200])})
        body = {"model": "default", "messages": self.messages[-12:], "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        if self.dice.random() < 0.5:
            body["max_tokens"] = self.dice.choice([1, 20, 60])
        leave_after = self.dice.randint(0, 15) if self.dice.random() < 0.2 else None
        text, done = "", False
        address = self.server.http.base_url
        with (
            httpx.Client(base_url=address, timeout=120) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                self.statuses.append(str(answer.status_code))
                return
            for number, line in enumerate(answer.iter_lines()):
                if leave_after is not None and number > leave_after:
                    break
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if usage := chunk.get("usage"):
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    self.usage.append((usage["prompt_tokens"], cached, usage["completion_tokens"]))
                    done = True
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content", "")
        self.statuses.append("done" if done else "left")
        self.messages.append({"role": "assistant", "content": text})


def samples(server: Server) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def idle(server: Server) -> dict[tuple[str, ...], float]:
    """The metrics once nothing runs any more."""
    until = time.monotonic() + IDLE_S_MAX
    while True:
        found = samples(server)
        if found[("zj_accepted",)] == found[("zj_running",)] == found[("zj_waiting",)] == 0:
            return found
        assert time.monotonic() < until, "it does not become idle"
        threading.Event().wait(0.05)


def load(tmp_path: Path, requests: int) -> None:
    answer = "an answer that is long enough to need blocks of its own, said again and again " * 8
    model = scripted(tmp_path, {"text": answer, "delay_ms": 1, "prefill_ms_per_1k": 2})
    with Server(tmp_path / "data", "--kv-memory", "2MiB", "--max-running", "12", model=model) as server:
        clients = [Client(server, seed) for seed in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            for work in [pool.submit(client.run, requests // CLIENTS) for client in clients]:
                work.result()
        found = idle(server)
        statuses = [status for client in clients for status in client.statuses]
        assert {"done", "left"} == set(statuses), set(statuses)
        assert server.terminate() == 0
    log = (tmp_path / "data.log").read_text()
    assert "stopped: 0 running, 0 waiting" in log, "the engine checked all its invariants before it said so"
    assert "Traceback" not in log
    agree(tmp_path / "data", found, [usage for client in clients for usage in client.usage])
    verify(tmp_path / "data")


def facts(journal: Reader) -> Iterator[Recorded]:
    after = 0
    while page := journal.read(after=after):
        yield from page
        after = page[-1].seq


def agree(data_dir: Path, found: dict[tuple[str, ...], float], told: list[tuple[int, int, int]]) -> None:
    """The facts, what `/metrics` counted, and what the clients were told."""
    accepted: set[str] = set()
    matched: dict[str, CacheMatched] = {}
    finished: dict[str, ResponseFinished] = {}
    with Reader.open(data_dir) as journal:
        for fact in facts(journal):
            match fact.event:
                case RequestAccepted():
                    accepted.add(fact.event.response)
                case CacheMatched():
                    assert fact.event.response not in matched, "told once, however often it was preempted"
                    matched[fact.event.response] = fact.event
                case ResponseFinished():
                    finished[fact.event.response] = fact.event
    assert accepted == finished.keys()
    assert found[("zj_preemptions_total",)] > 0, "memory was not scarce"
    tiers = {
        "vram": sum(event.cached - event.restored for event in matched.values()),
        "host": sum(event.restored_host for event in matched.values()),
        "ssd": sum(event.restored - event.restored_host for event in matched.values()),
    }
    for tier, tokens in tiers.items():
        assert found["zj_prompt_tokens_total", tier] == tokens
    assert found["zj_prompt_tokens_total", "computed"] == sum(event.prompt - event.cached for event in matched.values())
    assert found[("zj_output_tokens_total",)] == sum(event.output for event in finished.values())
    whole = [
        (matched[name].prompt, matched[name].cached, event.output)
        for name, event in finished.items()
        if event.reason != "cancelled"
    ]
    for usage in told:
        whole.remove(usage)


def test_a_mixed_load_ends_clean_and_the_counters_agree(tmp_path: Path) -> None:
    load(tmp_path, 8 * CLIENTS)


@pytest.mark.soak
def test_a_mixed_load_of_a_thousand_requests(tmp_path: Path) -> None:
    load(tmp_path, 84 * CLIENTS)
