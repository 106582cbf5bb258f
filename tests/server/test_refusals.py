"""What a real server's log has of requests that were refused: who, what and why, and none of their content."""

from __future__ import annotations

import json
from pathlib import Path

from tests.serving import Server, happened, scripted
from zjournal import keys
from zjournal.journal.events import RequestAccepted
from zjournal.keys import Limits

CANARY = "canary-5e81-of-a-body"


def test_the_log_tells_what_was_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key, few = keys.add(file, "laptop", Limits()), keys.add(file, "few", Limits(requests=1))
    body = {"model": "default", "input": CANARY}
    flags = ("--api-key-file", str(file), "--log-format", "json")
    with Server(tmp_path / "data", *flags, model=scripted(tmp_path, {"text": "Ok."})) as server:

        def ask(named: str, path: str = "/v1/responses", **changes: object) -> tuple[int, str]:
            answer = server.post(path, {**body, **changes}, headers={"x-api-key": named})
            return answer.status_code, answer.headers["x-request-id"]

        assert ask(few)[0] == ask(key)[0] == 200
        asked = [
            (*ask(key, temperature="hot"), "invalid_request param=temperature", "laptop"),
            (*ask(key, model="other"), "model_not_found param=model", "laptop"),
            (*ask(key, path=f"/v1/chat/{key}"), "not_found", "-"),
            (*ask(few), "rate_limit_exceeded", "few"),
            (*ask("zj-wrong-" + CANARY), "invalid_api_key", "-"),
        ]
        flood = [ask("zj-wrong-" + CANARY)[0] for _ in range(30)]
        assert server.terminate() == 0, "what was counted is told at the end"

    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    told = [line["message"] for line in lines if line["message"].startswith("refused: ")]
    for status, request, why, name in asked:
        (found,) = [line for line in told if line.endswith(f" request={request}")]
        assert f" {status} {why} key={name} " in found, found
    wrong = [line for line in told if "invalid_api_key" in line]
    counted = sum(int(line.split()[1]) if " more within " in line else 1 for line in wrong)
    assert counted == 1 + len(flood) == 1 + flood.count(401)
    everything = server.log.read_text()
    assert CANARY not in everything and key not in everything and few not in everything
    assert len(happened(server.data_dir, RequestAccepted)) == 2, "what was refused left no fact"
