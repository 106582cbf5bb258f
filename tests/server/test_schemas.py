"""Schemas that a grammar cannot keep, end to end: refused at their keyword, or left out, journaled and checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Server, scripted
from zjournal.journal import events
from zjournal.journal.reader import Reader

UNIQUE = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, 1]}}\n</tool_call>'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("schemas")
    turns = ({"text": CALL, "when": "call it"}, {"text": '{"x": [2, 2]}', "when": "say it"}, {"text": "plain"})
    with Server(folder / "data", model=scripted(folder, *turns)) as server:
        yield server, folder / "data"


def chat(words: str, strict: bool, **more: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": UNIQUE, "strict": strict}}
    return {"model": "default", "messages": [{"role": "user", "content": words}], "tools": [tool], **more}


def of(data_dir: Path, response: str) -> dict[type, events.Recorded]:
    with Reader.open(data_dir) as reader:
        return {type(fact.event): fact for fact in reader.read_response(response)}


def test_a_strict_schema_is_refused_at_its_keyword(running: tuple[Server, Path]) -> None:
    server, _ = running
    answer = server.post("/v1/chat/completions", chat("call it", strict=True))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[0].function.parameters.properties.x.uniqueItems"
    tool = {"type": "function", "name": "f", "parameters": UNIQUE, "strict": True}
    answer = server.post("/v1/responses", {"model": "default", "input": "x", "tools": [tool]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[0].parameters.properties.x.uniqueItems"
    shape = {"type": "json_schema", "name": "n", "schema": UNIQUE, "strict": True}
    answer = server.post("/v1/responses", {"model": "default", "input": "x", "text": {"format": shape}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "text.format.schema.properties.x.uniqueItems"


def test_what_is_left_out_is_journaled_and_checked(running: tuple[Server, Path]) -> None:
    server, data_dir = running
    answer = server.post("/v1/chat/completions", chat("call it", strict=False))
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"x": [1, 1]}'  # told as it is
    facts = of(data_dir, answer.json()["id"])
    accepted = facts[events.RequestAccepted]
    assert isinstance(accepted.event, events.RequestAccepted) and accepted.event.loosened == 1
    assert b"tools[0].function.parameters.properties.x.uniqueItems" in (accepted.payload or b"")
    assert b"non-unique" in (facts[events.ToolCalled].payload or b"")
    assert "its fence leaves out 1 keywords" in server.log.read_text()


def test_so_is_an_answer_in_a_format(running: tuple[Server, Path]) -> None:
    server, data_dir = running
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": UNIQUE}}
    body = {"model": "default", "messages": [{"role": "user", "content": "say it"}], "response_format": shape}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert b"non-unique" in (of(data_dir, answer.json()["id"])[events.ResponseFinished].payload or b"")


def test_a_plain_answer_has_nothing_to_check(running: tuple[Server, Path]) -> None:
    server, data_dir = running
    answer = server.post("/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": "hi"}]})
    facts = of(data_dir, answer.json()["id"])
    accepted = facts[events.RequestAccepted].event
    assert isinstance(accepted, events.RequestAccepted) and not accepted.loosened and not accepted.fence
    assert facts[events.ResponseFinished].payload == b""
