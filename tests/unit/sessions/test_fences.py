"""Fences on their way to the engine: made once for equal requests; results are checked where one leaves much out."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.unit.dialects.fencing import control, tool
from tests.unit.dialects.outputs import dialect
from zjournal import ask
from zjournal.link import wire
from zjournal.sessions.fences import KEPT_MAX, Check, Fences

LOOSE = tool("f", {"properties": {"x": {"type": "array", "uniqueItems": True}}})
CLOSE = tool("g", {"properties": {"x": {"type": "integer"}}}, path="tools[1]")


def request(*tools: ask.ToolSpec, **more: object) -> ask.Ask:
    return ask.Ask(protocol="chat", model="m", items=(), tools=tools, **more)  # type: ignore[arg-type]


def fences(name: str) -> Fences:
    return Fences(dialect(name), control(name))


def test_a_plain_chat_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zjournal.sessions.fences.build", None)
    assert fences("llama3").of(request()).fence is None


def test_equal_requests_share_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = fences("glm-4.7")
    first = kept.of(request(CLOSE))
    monkeypatch.setattr("zjournal.sessions.fences.build", None)
    assert kept.of(msgspec.structs.replace(request(CLOSE), max_tokens=3)) is first
    with pytest.raises(TypeError):
        kept.of(request(CLOSE, choice=ask.ToolChoice("required")))


def test_it_crosses_as_it_is() -> None:
    fence = fences("dsml-v4").of(request(CLOSE), "<think>").fence
    assert fence is not None
    marker = control("dsml-v4")["｜DSML｜"]
    assert fence.triggers == (wire.Tag("<｜DSML｜".encode(), -1),)
    assert fence.banned == (marker,)
    assert fence.begun and not fence.whole
    assert fence.thoughts is not None and fence.thoughts[0].text == b"<think>"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fence), type=wire.Fence) == fence
    again = fences("dsml-v4").of(request(CLOSE)).fence
    assert again is not None and again == msgspec.structs.replace(fence, begun=False)
    asked = fences("dsml-v4")  # before the prompt is there, as the desk does
    assert asked.begun(asked.of(request(CLOSE)), "<think>").fence == fence


def test_old_fences_are_forgotten() -> None:
    kept = fences("chatml")
    first = kept.of(request(CLOSE))
    for n in range(KEPT_MAX):
        kept.of(request(tool(f"t{n}", {})))
    assert kept.of(request(CLOSE)) is not first


def test_results_are_checked_where_the_fence_leaves_something_out() -> None:
    one = request(LOOSE, CLOSE)
    fenced = fences("chatml").of(one)
    assert len(fenced.warnings) == 1 and "uniqueItems" in fenced.warnings[0]
    check = Check.of(one, fenced)
    assert check is not None
    assert Check.of(request(CLOSE), fences("chatml").of(request(CLOSE))) is None
    deltas = [
        ask.CallStarted(0, "f"),
        *(ask.CallArguments(0, '{"x": [1,'), ask.CallArguments(0, " 1]}"), ask.CallEnded(0)),
        *(ask.CallStarted(1, "g"), ask.CallArguments(1, '{"x": 1}'), ask.CallEnded(1)),
        *(ask.CallStarted(2, "h", False), ask.CallArguments(2, "{}"), ask.CallEnded(2)),
    ]
    assert [tool.name for tool in check.tools] == ["f"] and check.format is None
    assert [check.concerns(deltas, n) for n in range(3)] == [True, False, False]
    assert "non-unique" in check.call(deltas, 0)
    assert check.call(deltas, 1) == check.call(deltas, 2) == ""


def test_so_is_an_answer_in_a_format() -> None:
    schema = json.dumps({"type": "array", "uniqueItems": True}).encode()
    one = request(format=ask.Format("json_schema", "x", schema, False, "text.format"))
    check = Check.of(one, fences("chatml").of(one))
    assert check is not None
    assert check.answer([ask.TextDelta("[1, 2]")]) == ""
    assert "non-unique" in check.answer([ask.TextDelta("[1,"), ask.TextDelta(" 1]")])
    assert check.answer([ask.CallStarted(0, "f")]) == ""
