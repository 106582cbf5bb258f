"""Steps become bytes: goldens of both protocols, the published schema, and equality of stream and whole body.

After a wanted change: `python -m tests.unit.api.test_encode` writes the goldens again; read the difference.
"""

import json
from pathlib import Path

import msgspec
import openresponses_types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from tests.api.desk import CREATED, Turn, item_id
from zjournal.api import chat, failure, responses
from zjournal.ask import Broke, Ended, Progress, Step, TextDelta, Usage

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "api"


class Case(msgspec.Struct):
    """One line of cases.json: a request, and the steps of its answer."""

    name: str
    request: msgspec.Raw
    steps: list[Step]

    @property
    def is_chat(self) -> bool:
        return self.name.startswith("chat")

    @property
    def turn(self) -> Turn:
        stored = json.loads(bytes(self.request)).get("store", True)
        response = "chatcmpl-0123" if self.is_chat else "resp_0123"
        return Turn(response, CREATED, "smol", bytes(self.request), stored, "local")

    def stream(self) -> bytes:
        encoder = chat.Encoder(self.turn) if self.is_chat else responses.Encoder(self.turn, item_id)
        frames = encoder.begin()
        for step in self.steps:
            frames += encoder.feed(step)
        return b"".join(frames)

    def body(self) -> bytes:
        answer = chat.Answer(self.turn) if self.is_chat else responses.Answer(self.turn, item_id)
        for step in self.steps:
            answer.take(step)
        if self.is_chat and answer.fault is not None:
            return failure.body(answer.fault)
        return answer.body()


CASES = {case.name: case for case in msgspec.json.decode((GOLDEN / "cases.json").read_bytes(), type=list[Case])}
CHAT = [name for name in CASES if name.startswith("chat")]
RESPONSES = [name for name in CASES if name.startswith("responses")]


def pretty(body: bytes) -> bytes:
    return msgspec.json.format(body, indent=2) + b"\n"


def events_of(stream: bytes) -> list[dict]:
    """The JSON of each frame; checks the framing."""
    frames = stream.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    events = []
    for text in frames[:-2]:
        *head, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head in ([], [f"event: {event.get('type')}"])
        events.append(event)
    return events


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    case = CASES[name]
    assert case.stream() == (GOLDEN / f"{name}.sse").read_bytes()
    assert pretty(case.body()) == (GOLDEN / f"{name}.json").read_bytes()


@pytest.mark.parametrize("name", RESPONSES)
def test_events_fit_the_published_schema(name):
    events = events_of(CASES[name].stream())
    for event in events:
        camel = "".join(word.capitalize() for word in event["type"].replace(".", "_").split("_"))
        getattr(openresponses_types, f"{camel}StreamingEvent").model_validate(event)
        if "response" in event:
            assert set(event["response"]) >= set(openresponses_types.ResponseResource.model_fields)
            Response.model_validate(event["response"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("name", RESPONSES)
def test_the_last_event_holds_the_whole_body(name):
    case = CASES[name]
    assert events_of(case.stream())[-1]["response"] == json.loads(case.body())


@pytest.mark.parametrize("name", RESPONSES)
def test_every_item_is_opened_and_closed_before_the_end(name):
    case = CASES[name]
    kinds = [event["type"].removeprefix("response.") for event in events_of(case.stream())]
    texts = sum(isinstance(step, TextDelta) for step in case.steps)
    middle = []
    if texts or name == "responses_empty":
        middle = ["output_item.added", "content_part.added", *["output_text.delta"] * texts]
        middle += ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[:-1] == ["created", "in_progress", *middle]
    assert kinds[-1] in ("completed", "incomplete", "failed")


@pytest.mark.parametrize("name", [name for name in CHAT if name != "chat_broke"])
def test_chat_fits_the_published_types(name):
    case = CASES[name]
    whole = ChatCompletion.model_validate_json(case.body())
    chunks = [ChatCompletionChunk.model_validate(event) for event in events_of(case.stream())]
    told = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert told == whole.choices[0].message.content
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]


def test_usage_chunk_comes_only_when_asked():
    asked = events_of(CASES["chat_usage_length"].stream())
    assert [event["usage"] for event in asked[:-1]] == [None] * (len(asked) - 1)
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"]["total_tokens"] == 13
    assert all("usage" not in event for event in events_of(CASES["chat_stop"].stream()))


def test_only_errors_have_an_error_key():
    for name in RESPONSES:
        assert all("error" not in event for event in events_of(CASES[name].stream()))
    assert [event for event in events_of(CASES["chat_broke"].stream()) if "error" in event] != []


@given(
    texts=st.lists(st.text(), max_size=8),
    end=st.sampled_from(["stop", "stop_string", "length", "cancelled", "broke"]),
    progress=st.booleans(),
)
def test_stream_and_body_agree_for_any_steps(texts, end, progress):
    usage = Usage(prompt=9, cached=3, output=len(texts))
    steps: list[Step] = [Progress(3, 9)] if progress else []
    steps += [TextDelta(text) for text in texts]
    steps.append(Broke("engine_error", "x", usage) if end == "broke" else Ended(end, usage))
    case = Case("responses_any", msgspec.Raw(b'{"model":"m","input":"x"}'), steps)
    events = events_of(case.stream())
    assert events[-1]["response"] == json.loads(case.body())
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert "".join(event["delta"] for event in events if "delta" in event) == "".join(texts)


def test_feeding_after_the_end_is_our_bug():
    case = CASES["responses_stop"]
    encoder = responses.Encoder(case.turn, item_id)
    encoder.feed(case.steps[-1])
    with pytest.raises(AssertionError):
        encoder.feed(case.steps[1])


if __name__ == "__main__":
    for golden in CASES.values():
        (GOLDEN / f"{golden.name}.sse").write_bytes(golden.stream())
        (GOLDEN / f"{golden.name}.json").write_bytes(pretty(golden.body()))
