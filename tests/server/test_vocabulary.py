"""What a real server writes down of its own life, of who asks, of tool results, and of text that has no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tests.serving import Server, scripted, zj
from zjournal.journal import events
from zjournal.journal.events import Recorded
from zjournal.journal.reader import Reader
from zjournal.sessions import identity


def _facts(data_dir: Path) -> list[Recorded]:
    with Reader.open(data_dir) as reader:
        return reader.read()


def _of(data_dir: Path, kind: type) -> list[Any]:
    return [fact.event for fact in _facts(data_dir) if isinstance(fact.event, kind)]


def test_each_life_has_a_beginning_and_an_end(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, {"text": "hi"})) as server:
        (engine,) = server.children()
        assert server.terminate() == 0
        last = [fact.event for fact in _facts(data_dir)][-2:]
        assert last == [events.EngineStopped(pid=engine, status=0), events.ServerStopped()]

        server.start()
        assert server.process is not None
        killed = server.process.pid
        server.restart()
        assert server.terminate() == 0
    facts = _facts(data_dir)
    starts = [fact for fact in facts if isinstance(fact.event, events.ServerStarted)]
    assert len(starts) == 3
    (crash,) = [fact for fact in facts if isinstance(fact.event, events.ServerCrashed)]
    assert crash.event == events.ServerCrashed(pid=killed, started=starts[1].seq)
    assert crash.seq == starts[2].seq - 1
    assert len([fact for fact in facts if isinstance(fact.event, events.ServerStopped)]) == 2


def test_who_asked_is_written_down_without_a_credential(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("someone:sk-canary-0123456789\n")
    keys.chmod(0o600)
    data_dir = tmp_path / "data"
    headers = {
        "authorization": "Bearer sk-canary-0123456789",
        "cookie": "session=canary-cookie",
        "user-agent": "agent/1.0 (linux)",
        "originator": "agent_cli sk-canary-0123456789",
        "x-session-id": "thread-7",
        "x-session-affinity": "canary-second",
        "referer": "https://someone:canary-userinfo@example.org/",
    }
    with Server(data_dir, "--api-key-file", str(keys), model=scripted(tmp_path, {"text": "hi"})) as server:
        body = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
        answer = server.post("/v1/chat/completions?api_key=canary-query", body, headers=headers)
        assert answer.status_code == 200, answer.text
        (accepted,) = _of(data_dir, events.RequestAccepted)
        with Reader.open(data_dir) as reader:
            client = msgspec.msgpack.decode(reader.content(accepted.tenant, accepted.client))
        assert client == [["user-agent", "agent/1.0 (linux)"], ["x-session-id", "thread-7"]]
        stored = b"".join(path.read_bytes() for path in data_dir.iterdir() if path.is_file())
        stored += server.log.read_bytes()
        assert b"canary" not in stored


def test_r23_a_result_is_seen_once_and_a_call_without_one_is_not(tmp_path: Path) -> None:
    """Field report R23: a tool ran, its result was not stored, and the agent ran it again: the journal shows which."""
    data_dir = tmp_path / "data"
    model = scripted(tmp_path, {"text": "one"}, {"text": "two"}, {"text": "three"})

    def call(name: str) -> dict[str, Any]:
        function = {"name": "look", "arguments": "{}"}
        return {"role": "assistant", "tool_calls": [{"id": name, "type": "function", "function": function}]}

    def result(name: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": name, "content": f"result of {name}"}

    with Server(data_dir, model=model) as server:
        said: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for more in ([], [call("c1"), result("c1")], [call("c2"), call("c3"), result("c3")]):
            said += more
            answer = server.post("/v1/chat/completions", {"model": "default", "messages": said})
            assert answer.status_code == 200, answer.text
            said.append(answer.json()["choices"][0]["message"])
        with Reader.open(data_dir) as reader:
            keys = {name: identity.call_key(reader.secret, "local", name) for name in ("c1", "c2", "c3")}
        accepted = _of(data_dir, events.RequestAccepted)
        seen = {event.response: event.calls for event in _of(data_dir, events.ToolResultSeen)}
    assert [bool(event.parent) for event in accepted] == [False, True, True]
    assert seen == {accepted[1].response: (keys["c1"],), accepted[2].response: (keys["c3"],)}


def test_text_that_has_no_token_is_counted_and_logged(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, {"text": "hi"})) as server:
        server.respond(input="plain\n\ttext \u00e9\u4e2d")
        assert "have no token" not in server.log.read_text()
        lost = server.respond(input="a\x04b\x04c\x06\x05")
        assert f"{lost['id']}: 3 bytes of its text have no token" in server.log.read_text()
    assert [event.dropped for event in _of(data_dir, events.PromptRendered)] == [0, 3]


def test_a_match_tells_why_it_is_no_longer(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, {"text": "hi"})) as server:
        first = server.respond(input="The sky was blue over the old harbour, and no boat had come in.")
        second = server.respond(input="And then?", previous_response_id=first["id"])
        server.respond(input="The sky was grey over the old harbour, and no boat had come in.")
        shown = json.loads(zj("sessions", "show", first["id"], "--data-dir", str(data_dir), "--json").stdout)
        assert [turn["cache_reason"] for turn in shown["turns"]] == ["cold", "extended"]
        text = zj("sessions", "show", first["id"], "--data-dir", str(data_dir)).stdout
        assert f"cached {shown['turns'][1]['cached_tokens']} (extended)" in text
    why = [(event.reason, event.nearest) for event in _of(data_dir, events.CacheMatched)]
    assert why == [("cold", ""), ("extended", first["id"]), ("forked", why[2][1])]
    assert why[2][1] in (first["id"], second["id"])
