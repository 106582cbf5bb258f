"""Steps become a message: goldens, the SDK's types, the order of events, and equality of stream and whole message.

After a wanted change: `python -m tests.unit.api.test_messages_answer` writes the goldens again; read the difference.
"""

import json

import jiter
import msgspec
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.api.desk import CREATED, Turn, item_id
from tests.unit.api.steps import GOLDEN, RUNS, frames, pretty, steps_of, taken
from zjournal.api import failure
from zjournal.api.messages import request
from zjournal.api.messages.answer import Answer, Encoder
from zjournal.ask import (
    Broke,
    Ended,
    Progress,
    Step,
    Usage,
    Waiting,
)
from zjournal.sessions.reading import Terms

REQUEST_ID = "req_0123"
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
_event = TypeAdapter(RawMessageStreamEvent)


class Case(msgspec.Struct):
    """One case of messages.json: a request, and the steps of its answer."""

    name: str
    request: msgspec.Raw
    steps: list[Step]

    @property
    def turn(self) -> Turn:
        raw = bytes(self.request)
        terms = Terms.of(request.decode(raw, {}), "")
        return Turn("msg_0123", CREATED, "smol", raw, True, "local", terms=terms)

    def stream(self) -> bytes:
        return b"".join(frames(Encoder(self.turn, item_id, REQUEST_ID), self.steps))

    def body(self) -> bytes:
        answer = taken(Answer(self.turn, item_id), self.steps)
        if answer.fault is not None:
            return msgspec.json.encode(failure.anthropic_error(answer.fault, REQUEST_ID))
        return answer.body()


CASES = {case.name: case for case in msgspec.json.decode((GOLDEN / "messages.json").read_bytes(), type=list[Case])}
FAILING = ("messages_broke", "messages_broke_early", "messages_cancelled")
WHOLE = [name for name in CASES if name not in FAILING]


def events_of(stream: bytes) -> list[dict]:
    """The JSON of each frame; checks the framing. This protocol has no [DONE]."""
    frames = stream.decode().split("\n\n")
    assert frames.pop() == ""
    events = []
    for text in frames:
        head, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        events.append(event)
    return events


def folded(events: list[dict]) -> dict:
    """What a client makes of the events; checks their order on the way."""
    told = [event for event in events if event["type"] != "ping"]
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    assert told[0]["type"] == "message_start"
    message = told[0]["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    pieces: list[str] = []
    open_block = None
    for event in told[1:-2]:
        kind = event["type"]
        assert event["index"] == len(message["content"]) - (kind != "content_block_start")
        if kind == "content_block_start":
            assert open_block is None
            open_block, pieces = event["content_block"], []
            message["content"].append(open_block)
        elif kind == "content_block_stop":
            if open_block["type"] == "tool_use" and pieces:
                open_block["input"] = jiter.from_json("".join(pieces).encode(), partial_mode=True)
            if open_block["type"] == "thinking":
                assert open_block["signature"]
            open_block = None
        elif event["delta"]["type"] == "signature_delta":
            assert not open_block["signature"]
            open_block["signature"] = event["delta"]["signature"]
        else:
            assert event["delta"]["type"] == DELTAS[open_block["type"]]
            assert not open_block.get("signature")
            (name,) = set(event["delta"]) - {"type"}
            if name == "partial_json":
                pieces.append(event["delta"][name])
            else:
                open_block[name] += event["delta"][name]
    assert open_block is None
    message.update(told[-2]["delta"])
    message["usage"].update(told[-2]["usage"])
    if "context_management" in told[-2]:
        message["context_management"] = told[-2]["context_management"]
    return message


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    case = CASES[name]
    assert case.stream() == (GOLDEN / f"{name}.sse").read_bytes()
    assert pretty(case.body()) == (GOLDEN / f"{name}.message.json").read_bytes()


@pytest.mark.parametrize("name", WHOLE)
def test_events_and_message_fit_the_sdks_types(name):
    case = CASES[name]
    Message.model_validate_json(case.body(), strict=True)
    for event in events_of(case.stream()):
        if event["type"] != "ping":
            _event.validate_python(event)


@pytest.mark.parametrize("name", WHOLE)
def test_the_events_make_the_message(name):
    case = CASES[name]
    assert folded(events_of(case.stream())) == json.loads(case.body())


def test_o21_the_parts_of_the_prompt_add_up_from_the_first_event_on():
    for name in WHOLE:
        events = events_of(CASES[name].stream())
        start = next(event for event in events if event["type"] == "message_start")["message"]["usage"]
        for usage in (start, events[-2]["usage"], json.loads(CASES[name].body())["usage"]):
            parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            assert sum(usage[part] for part in parts) == 12


@pytest.mark.parametrize("name", FAILING)
def test_r11_a_failure_is_the_last_event(name):
    events = events_of(CASES[name].stream())
    assert events[-1] == json.loads(CASES[name].body())
    assert set(events[-1]) == {"type", "error", "request_id"}
    assert "message_stop" not in [event["type"] for event in events]


def test_what_is_told_to_a_client_that_waits():
    kinds = [event["type"] for event in events_of(CASES["messages_o06_think_text_tool"].stream())]
    assert kinds[:3] == ["ping", "message_start", "ping"]
    assert kinds.count("ping") == 3


@given(
    runs=RUNS,
    end=st.sampled_from(["stop", "stop_string", "length", "loop", "fence"]),
    thinking=st.sampled_from(["{}", '{"type":"disabled"}', '{"type":"adaptive","display":"omitted"}']),
    progress=st.booleans(),
)
def test_stream_and_message_agree_for_any_steps(runs, end, thinking, progress):
    usage = Usage(prompt=9, cached=3, output=7)
    said_steps, index = steps_of(runs)
    steps: list[Step] = [Waiting(0, 0, 9, True), *([Progress(3, 9)] if progress else []), *said_steps]
    steps.append(Ended(end, usage, stop="x" if end == "stop_string" else ""))
    raw = b'{"model":"m","max_tokens":9000,"messages":[{"role":"user","content":"x"}],"thinking":%b}'
    case = Case("any", msgspec.Raw(raw % thinking.encode().replace(b"{}", b"null")), steps)
    message = json.loads(case.body())
    assert folded(events_of(case.stream())) == message
    said = "".join(text for kind, texts in runs if kind == "text" for text in texts)
    assert "".join(block["text"] for block in message["content"] if block["type"] == "text") == said
    calls = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(calls) == len(set(calls)) == index
    whole = any(kind == "call" for kind, _ in runs)
    known = {"stop": "tool_use" if whole else "end_turn", "stop_string": "tool_use" if whole else "stop_sequence"}
    assert message["stop_reason"] == known.get(end, "max_tokens")


def test_a_failure_before_the_first_event_is_all_there_is():
    case = Case("any", CASES["messages_broke"].request, [Broke("engine_error", "x", Usage(1, 0, 0))])
    assert [event["type"] for event in events_of(case.stream())] == ["error"]


if __name__ == "__main__":
    for case in CASES.values():
        (GOLDEN / f"{case.name}.sse").write_bytes(case.stream())
        (GOLDEN / f"{case.name}.message.json").write_bytes(pretty(case.body()))
