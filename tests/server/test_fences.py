"""Fences behind the real server: SmolLM2 must call, must answer in JSON, is asked again, and its server restarts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_replay import facts, replayed, session_of, until
from tests.server.test_restart import verify
from tests.serving import Server, scripted
from zjournal.journal import events

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 16},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
HOT = {"model": "default", "temperature": 1.5, "max_tokens": 200}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    data_dir = tmp_path_factory.mktemp("fences") / "data"
    with Server(data_dir) as server:
        yield server, data_dir
        assert server.terminate() == 0
    verify(data_dir)


def chat(server: Server, text: str, **changed: Any) -> dict[str, Any]:
    body = {**HOT, "messages": [{"role": "user", "content": text}], **changed}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def called(answer: dict[str, Any]) -> list[dict[str, Any]]:
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    return [
        {"name": call["function"]["name"], **json.loads(call["function"]["arguments"])}
        for call in choice["message"]["tool_calls"]
    ]


def right(call: dict[str, Any]) -> bool:
    named = call["name"] == "get_weather" and {"name", "city", "unit"} <= call.keys() <= {
        "name",
        "city",
        "unit",
        "days",
    }
    return named and call["unit"] in ("celsius", "fahrenheit") and call.get("days", 1) in range(1, 15)


def test_a_call_that_is_required_comes_whatever_the_temperature(running: tuple[Server, Path]) -> None:
    server, _ = running
    for seed in range(3):
        answer = chat(
            server, "Weather in Rome?", tools=[WEATHER], tool_choice="required", seed=seed, parallel_tool_calls=False
        )
        calls = called(answer)
        assert len(calls) == 1 and right(calls[0]), calls


def test_json_comes_where_json_is_wanted(running: tuple[Server, Path]) -> None:
    server, _ = running
    for seed in range(3):
        answer = chat(server, "Invent a person.", response_format=FORMAT, seed=seed)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        person = json.loads(choice["message"]["content"])
        assert person.keys() == {"name", "age"} and person["age"] in range(121)


def test_fenced_answers_come_out_the_same_when_they_are_asked_again(running: tuple[Server, Path]) -> None:
    """Also by an engine of another process, which has compiled nothing before."""
    server, data_dir = running
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(server, "Weather in Oslo?", tools=[WEATHER], tool_choice=named, seed=5)
    told = replayed(data_dir, session_of(data_dir, answer["id"]))
    assert (told.code, told.statuses, told.parts) == (0, ["equal"], []), told.err
    server.restart()
    again = chat(server, "Weather in Oslo?", tools=[WEATHER], tool_choice=named, seed=5)
    assert called(again) == called(answer)
    assert replayed(data_dir, session_of(data_dir, answer["id"])).statuses == ["equal"]
    kept = {
        fact.event.response: fact.event.fence
        for fact in facts(data_dir)
        if isinstance(fact.event, events.RequestAccepted)
    }
    assert kept[answer["id"]] and kept[again["id"]]
    assert len(set(kept.values())) == len(kept), "two turns with one fence cannot be told by its digest"


def test_a_free_answer_has_no_fence(running: tuple[Server, Path]) -> None:
    server, data_dir = running
    answer = chat(server, "Say something.", max_tokens=4)
    (accepted,) = [
        fact.event
        for fact in facts(data_dir)
        if isinstance(fact.event, events.RequestAccepted) and fact.event.response == answer["id"]
    ]
    assert accepted.fence == b""


def test_metrics_count_fences(running: tuple[Server, Path]) -> None:
    server, _ = running

    def counted(name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    before = counted("zj_fenced_requests_total")
    chat(server, "Weather in Bonn?", tools=[WEATHER], tool_choice="required", seed=1)
    until(lambda: counted("zj_fenced_requests_total") > before)
    assert counted("zj_fence_masks_total") > 0
    assert counted("zj_fence_mask_seconds_total") > 0
    assert counted("zj_fences_compiled_total") >= 1


def test_a_fence_that_is_derived_otherwise_is_told(tmp_path: Path) -> None:
    """The same body read in another dialect: the grammar is not the one that was in force."""
    data_dir = tmp_path / "data"
    said = {
        "text": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "unit": "celsius"}}\n</tool_call>'
    }
    with Server(data_dir, model=scripted(tmp_path, said)) as server:
        answer = chat(server, "Weather?", tools=[WEATHER], tool_choice="required")
        session = session_of(data_dir, answer["id"])
        assert replayed(data_dir, session).parts == []
        assert server.terminate() == 0
    told = replayed(data_dir, session, "--model", scripted(tmp_path, said, dialect="qwen-xml"))
    assert (told.statuses, "fence" in told.parts) == (["equal"], True), told.json
    (turn,) = told.json["turns"]
    assert "fence" in turn["differs"]
