"""Steps become bytes: goldens of both protocols, the published schema, and equality of stream and whole body.

After a wanted change: `python -m tests.unit.api.test_encode` writes the goldens again; read the difference.
"""

import json

import msgspec
import openresponses_types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.desk import CREATED, Turn, item_id
from tests.unit.api.steps import GOLDEN, RUNS, frames, pretty, steps_of, taken
from zjournal.api import chat, chat_answer, failure, responses
from zjournal.ask import (
    Broke,
    CallArguments,
    CallEnded,
    CallStarted,
    Ended,
    Progress,
    Step,
    TextDelta,
    Usage,
)
from zjournal.journal.log import CRASH_MESSAGE
from zjournal.sessions.reading import Terms


def seal(turn: Turn, summary: str) -> str:
    return f"sealed({summary})"


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
        raw = bytes(self.request)
        asked = (chat if self.is_chat else responses).decode(raw, {})
        return Turn(response, CREATED, "smol", raw, stored, "local", terms=Terms.of(asked, ""))

    def stream(self) -> bytes:
        encoder = (
            chat_answer.Encoder(self.turn, item_id) if self.is_chat else responses.Encoder(self.turn, item_id, seal)
        )
        return b"".join(frames(encoder, self.steps))

    def body(self) -> bytes:
        answer = chat_answer.Answer(self.turn, item_id) if self.is_chat else responses.Answer(self.turn, item_id, seal)
        taken(answer, self.steps)
        if self.is_chat and answer.fault is not None:
            return failure.body(answer.fault)
        return answer.body()


CASES = {case.name: case for case in msgspec.json.decode((GOLDEN / "cases.json").read_bytes(), type=list[Case])}
CHAT = [name for name in CASES if name.startswith("chat")]
# What the published schema does not have as a server tells it.
NOT_PUBLISHED = ("responses_custom", "responses_format", "responses_namespace")
OURS = ("responses_fence",)  # the SDK lists the reasons of an incomplete answer, and does not check them
ONLY_THEIRS = ("response.reasoning_text.", "response.custom_tool_call_input.", "response.compaction.")  # of OpenAI
_sdk_event = TypeAdapter(ResponseStreamEvent)
RESPONSES = [name for name in CASES if name.startswith("responses")]


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
        kind = getattr(openresponses_types, f"{camel}StreamingEvent", None)
        if kind is None:  # thoughts and custom tools have other names there, or none
            assert event["type"].startswith(ONLY_THEIRS)
        elif name not in NOT_PUBLISHED:
            kind.model_validate(event)
        if name not in OURS:
            _sdk_event.validate_python(event)
        if "response" in event:
            assert set(event["response"]) >= set(openresponses_types.ResponseResource.model_fields)
            if name not in OURS:
                Response.model_validate(event["response"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("name", RESPONSES)
def test_the_last_event_holds_the_whole_body(name):
    case = CASES[name]
    assert events_of(case.stream())[-1]["response"] == json.loads(case.body())


PARTS = {
    "message": ("content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
    "reasoning": ("content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
    "function_call": (None, "function_call_arguments.delta", "function_call_arguments.done", None),
    "compaction": (None, None, None, None),
    "custom_tool_call": (None, "custom_tool_call_input.delta", "custom_tool_call_input.done", None),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_items_come_one_after_another_each_opened_and_closed(name):
    """In the documented order; with equal ids and places all the way, and the pieces joined are the whole."""
    case = CASES[name]
    events = [event for event in events_of(case.stream()) if "prompt_progress" not in event]
    kinds = [event["type"].removeprefix("response.") for event in events]
    queued = json.loads(bytes(case.request)).get("background", False)
    assert kinds[:2] == ["created", "queued" if queued else "in_progress"]
    if queued and len(kinds) > 3:
        assert kinds.pop(2) == "in_progress"
        del events[2]
    assert kinds[-1] in ("completed", "incomplete", "failed")
    at = 2
    final = events[-1]["response"]["output"]
    for index, item in enumerate(final):
        first, more, last, after = PARTS[item["type"]]
        end = kinds.index("output_item.done", at) + 1
        told = events[at:end]
        pieces = [event["delta"] for event in told if "delta" in event]
        head = ["output_item.added", *([first] if first else [])]
        tail = [last, *([after] if after else []), "output_item.done"]
        if item["type"] == "compaction":
            assert set(kinds[at + 1 : end - 1]) == {"compaction.compacting"}
        else:
            assert kinds[at:end] == [*head, *[more] * len(pieces), *tail]
        assert {event["output_index"] for event in told} == {index}
        assert {event.get("item_id") or event["item"]["id"] for event in told} == {item["id"]}
        assert told[-1]["item"] == item
        content = item.get("content") or [{"text": item.get("arguments", item.get("input", ""))}]
        assert "".join(pieces) == content[0]["text"]
        at = end
    assert at == len(events) - 1
    assert len({item["id"] for item in final}) == len(final)


# The SDK has custom tools in whole bodies and not in streams.
@pytest.mark.parametrize("name", [name for name in CHAT if name not in ("chat_broke", "chat_custom")])
def test_chat_fits_the_published_types(name):
    case = CASES[name]
    whole = ChatCompletion.model_validate_json(case.body())
    chunks = [ChatCompletionChunk.model_validate(event) for event in events_of(case.stream())]
    told = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    message = whole.choices[0].message
    assert told == (message.content or "")
    assert (message.content is None) == (not told and message.tool_calls is not None)
    thoughts = "".join(getattr(choice.delta, "reasoning_content", "") for chunk in chunks for choice in chunk.choices)
    assert thoughts == getattr(message, "reasoning_content", "")
    deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    for index, call in enumerate(message.tool_calls or ()):
        own = [delta for delta in deltas if delta.index == index]
        assert (own[0].id, own[0].type) == (call.id, call.type)
        assert all(delta.id is None and delta.type is None for delta in own[1:])
        if call.type == "function":
            assert "".join(delta.function.arguments for delta in own) == call.function.arguments
            assert [delta.function.name for delta in own] == [call.function.name] + [None] * (len(own) - 1)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]


def test_vllm_31438_36410_and_37385_a_call_is_whole_wherever_it_ends():
    """There id and name were lost where a call came with the end, or its last piece held all arguments again."""
    end = Ended("stop", Usage(prompt=9, cached=3, output=7))
    for arguments in (["{}"], ['{"a": ', '"b"}'], []):
        steps: list[Step] = [CallStarted(0, "f"), *(CallArguments(0, text) for text in arguments), CallEnded(0), end]
        case = Case("chat_any", msgspec.Raw(b'{"model":"m","messages":[{"role":"user","content":"x"}]}'), steps)
        chunks = [chunk["choices"][0] for chunk in events_of(case.stream())]
        first, *more = [call for choice in chunks for call in choice["delta"].get("tool_calls", [])]
        (call,) = json.loads(case.body())["choices"][0]["message"]["tool_calls"]
        assert (first["index"], first["id"], first["type"], first["function"]["name"]) == (
            0,
            call["id"],
            "function",
            "f",
        )
        assert all(
            piece.keys() == {"index", "function"} and piece["function"].keys() == {"arguments"} for piece in more
        )
        told = "".join(piece["function"]["arguments"] for piece in (first, *more))
        assert told == call["function"]["arguments"] == "".join(arguments)
        assert [choice["finish_reason"] for choice in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
        assert not chunks[-1]["delta"].get("tool_calls")


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
    runs=RUNS,
    end=st.sampled_from(["stop", "stop_string", "length", "cancelled", "loop", "fence", "broke"]),
    progress=st.booleans(),
)
def test_stream_and_body_agree_for_any_steps(runs, end, progress):
    usage = Usage(prompt=9, cached=3, output=7)
    said_steps, _ = steps_of(runs)
    steps: list[Step] = [*([Progress(3, 9)] if progress else []), *said_steps]
    steps.append(Broke("engine_error", "x", usage) if end == "broke" else Ended(end, usage))
    case = Case("responses_any", msgspec.Raw(b'{"model":"m","input":"x"}'), steps)
    events = events_of(case.stream())
    assert events[-1]["response"] == json.loads(case.body())
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    said = "".join(text for _, texts in runs for text in texts)
    assert "".join(event["delta"] for event in events if "delta" in event) == said
    cut = [item["status"] for item in done if item["type"] == "function_call"]
    assert cut == ["incomplete" if kind == "cut" else "completed" for kind, _ in runs if kind in ("call", "cut")]


@pytest.mark.parametrize("name", RESPONSES)
def test_a_stream_told_again_from_any_number_on_is_the_rest_of_it(name):
    case = CASES[name]
    whole = case.stream()
    told = [frame + b"\n\n" for frame in whole.split(b"\n\n")[:-1]]
    for after in range(-1, len(told) + 1):
        again = frames(responses.Encoder(case.turn, item_id, seal, after=after), case.steps)
        assert again == [*told[after + 1 : -1], told[-1]]


def test_after_a_crash_numbers_go_on_behind_all_that_can_have_been_told():
    case = CASES["responses_stop"]
    broke = Broke("server_error", CRASH_MESSAGE, Usage(1, 0, 1))
    encoder = responses.Encoder(case.turn, item_id, after=20)
    told = events_of(b"".join(frames(encoder, [TextDelta("a"), broke])))
    assert [event["type"] for event in told][-1] == "response.failed"
    assert [event["sequence_number"] for event in told] == [5 + responses.CRASH_GAP + index for index in range(4)]


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
