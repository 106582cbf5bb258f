"""The guard through the whole of it: a loop of the demo model ends as told, is journaled, counted and replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import Server, facts, zj
from zjournal.journal import events

GUARD = "run=12,period=64,repeats=3,tokens=24,exclusions=1"
LIMITS = (12, 64, 3, 24, 4, 1, 8)
TEXT = "Say na as often as you can: na na na na na na na na na na na na na na na na na na na na na na na na na na na na"
ASKED: dict[str, Any] = {"model": "smollm2", "temperature": 0, "seed": 1, "min_tokens": 400}  # it may not end itself


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("guard") / "data", "--guard", GUARD) as running:
        yield running


def test_a_loop_ends_with_its_reason_in_both_protocols_and_is_replayed(server: Server) -> None:
    body = ASKED | {"max_output_tokens": 400, "input": TEXT}
    response = server.respond(**body)
    assert response["status"] == "incomplete"
    message = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 400}
    chat = server.post("/v1/chat/completions", ASKED | message).json()
    (choice,) = chat["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == response["output"][-1]["content"][0]["text"]

    journaled = [fact.event for fact in facts(server.data_dir)]
    accepted = [one for one in journaled if isinstance(one, events.RequestAccepted)]
    assert [one.guard for one in accepted] == [LIMITS, LIMITS]
    met = [one for one in journaled if isinstance(one, events.LoopMet) and one.response == response["id"]]
    (finished,) = [
        one for one in journaled if isinstance(one, events.ResponseFinished) and one.response == response["id"]
    ]
    assert [one.action for one in met] == ["excluded", "ended"]
    assert (finished.reason, finished.output) == ("loop", met[-1].at)
    assert finished.output < 400
    metrics = server.http.get("/metrics").text
    assert 'zj_loops_total{action="ended",kind=' in metrics
    assert 'zj_responses_total{outcome="loop"} 2.0' in metrics

    server.flags = [flag for flag in server.flags if flag not in ("--guard", GUARD)]
    server.restart()  # without these limits: a replay has those that were recorded
    (session,) = {one.session for one in accepted if one.response == response["id"]}
    done = zj("replay", session, "--json", "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    assert {turn["status"] for turn in json.loads(done.stdout)["turns"]} == {"equal"}
