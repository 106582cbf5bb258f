"""Limits of keys on a real server: what is refused, what is told, and that nobody pays for another's."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from tests.serving import Server, scripted, until
from zjournal import keys
from zjournal.keys import Limits

TURN = {"text": "Well then."}
SLOW = {"text": " ".join(["on"] * 2000), "when": "slow", "delay_ms": 20}


class Owner:
    """One who has a key."""

    def __init__(self, server: Server, key: str) -> None:
        self.http = server.http
        self.headers = {"x-api-key": key}

    def respond(self, text: str = "hi") -> httpx.Response:
        body = {"model": "default", "input": text, "max_output_tokens": 4}
        return self.http.post("/v1/responses", json=body, headers=self.headers)

    def message(self) -> httpx.Response:
        body = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        return self.http.post("/v1/messages", json=body, headers=self.headers)


@pytest.fixture
def drawn(tmp_path: Path) -> dict[str, str]:
    limits = {"few": Limits(requests=2), "small": Limits(tokens=50), "one": Limits(streams=1), "free": Limits()}
    return {name: keys.add(tmp_path / "keys", name, limit) for name, limit in limits.items()}


def test_each_limit_is_refused_with_what_to_wait_for_and_only_for_its_own(
    tmp_path: Path, drawn: dict[str, str]
) -> None:
    model = scripted(tmp_path, SLOW, TURN)
    with Server(tmp_path / "data", "--api-key-file", str(tmp_path / "keys"), model=model) as server:
        few, small, one, free = (Owner(server, drawn[name]) for name in ("few", "small", "one", "free"))
        first = few.respond()
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert few.message().headers["anthropic-ratelimit-requests-remaining"] == "0"
        refused = few.respond()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert few.message().json()["error"]["type"] == "rate_limit_error"
        assert server.http.get("/v1/models", headers=few.headers).status_code == 200, "only work is counted"

        assert small.respond("a long question " * 20).status_code == 200, "what it takes is known later"
        owed = small.respond()
        assert owed.status_code == 429 and "tokens" in owed.json()["error"]["message"]

        begun, leave = threading.Event(), threading.Event()

        def slow() -> None:
            body = {"model": "default", "input": "slow", "stream": True}
            with server.http.stream("POST", "/v1/responses", json=body, headers=one.headers) as answer:
                for line in answer.iter_lines():
                    if "output_text.delta" in line:
                        begun.set()
                        leave.wait(30)
                        return

        other = threading.Thread(target=slow)
        other.start()
        assert begun.wait(30)
        busy = one.respond()
        assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
        leave.set()
        other.join(30)
        until(lambda: one.respond().status_code != 429)  # the server has heard that the client left
        assert [free.respond().status_code for _ in range(5)] == [200] * 5
        assert "x-ratelimit-limit-requests" not in free.respond().headers
        told = server.http.get("/metrics", headers=free.headers).text
        for limit, least in (("requests", 2.0), ("tokens", 1.0), ("streams", 1.0)):
            [line] = [line for line in told.splitlines() if line.startswith(f'zj_limited_total{{limit="{limit}"}}')]
            assert float(line.split()[1]) >= least
        for key in drawn.values():
            assert key not in server.log.read_text()


def test_either_header_may_carry_the_key(tmp_path: Path, drawn: dict[str, str]) -> None:
    model = scripted(tmp_path, TURN)
    with Server(tmp_path / "data", "--api-key-file", str(tmp_path / "keys"), model=model) as server:
        right, wrong = drawn["free"], "x" * 40
        cases = [
            ({"authorization": f"Bearer {right}"}, 200),
            ({"authorization": f"bearer {right}"}, 200),
            ({"x-api-key": right}, 200),
            ({"authorization": f"Bearer {wrong}", "x-api-key": right}, 200),
            ({"authorization": f"Bearer {right}", "x-api-key": wrong}, 200),
            ({"authorization": f"Bearer {wrong}", "x-api-key": wrong}, 401),
            ({"authorization": f"Basic {right}"}, 401),
            ({"authorization": right}, 401),
            ({"x-api-key": ""}, 401),
            ({}, 401),
        ]
        for headers, status in cases:
            for path in ("/v1/models", "/metrics", "/v1/responses/resp_none"):
                got = server.http.get(path, headers=headers).status_code
                assert got == (404 if status == 200 and path.endswith("none") else status), (headers, path)


def test_one_request_more_than_the_server_takes_is_told_to_come_again(tmp_path: Path) -> None:
    with Server(tmp_path / "data", "--max-requests", "2", model=scripted(tmp_path, SLOW, SLOW, TURN)) as server:
        held: list[threading.Thread] = []
        begun = threading.Semaphore(0)
        enough = threading.Event()

        def hold() -> None:
            for event in server.events("/v1/responses", {"model": "default", "input": "slow", "stream": True}):
                if event["type"] == "response.created":
                    begun.release()
                if enough.is_set():
                    return

        for _ in range(2):
            held.append(threading.Thread(target=hold))
            held[-1].start()
            assert begun.acquire(timeout=30)
        refused = server.post("/v1/responses", {"model": "default", "input": "hi"})
        assert refused.status_code == 429
        assert "2 requests" in refused.json()["error"]["message"]
        enough.set()
        for thread in held:
            thread.join(30)
        until(lambda: server.post("/v1/responses", {"model": "default", "input": "hi"}).status_code == 200)
