"""What the compliance suite of Open Responses asks for over HTTP, in our own words, against a live server.

Its cases over WebSocket are tested with that transport. Every body and every event is validated with the models that
are generated from the published specification.
"""

from __future__ import annotations

import base64
import concurrent.futures
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import openresponses_types
import pytest
from openresponses_types import CompactResource, ResponseResource

from tests.server.test_restart import verify
from tests.serving import Server, scripted

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
TIMES = 20
KEYS = 31


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("open_responses")
    turns: list[dict[str, Any]] = [{"text": CALL, "when": "weather in Oslo"} for _ in range(TIMES)]
    turns += [{"text": "They spoke of Oslo.", "when": "Write the summary only."} for _ in range(TIMES)]
    with Server(folder / "data", model=scripted(folder, *turns, {"text": "Hello there."})) as running:
        yield running
        running.kill()
        verify(folder / "data")


def whole(server: Server, **body: Any) -> ResponseResource:
    """A completed response with all its keys, valid and not empty."""
    told = server.respond(**body)
    assert set(told) >= set(ResponseResource.model_fields)
    assert len(ResponseResource.model_fields) == KEYS
    response = ResponseResource.model_validate(told)
    assert response.status == "completed"
    assert response.output
    assert "verbosity" not in told["text"] or told["text"]["verbosity"] is not None
    return response


def read(response: ResponseResource) -> int:
    """The tokens of its prompt."""
    tokens: int = response.model_dump()["usage"]["input_tokens"]
    return tokens


def picture() -> str:
    """A red square as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\xff\0\0" * 32 for _ in range(32))
    head = struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def test_basic_response(server: Server) -> None:
    response = whole(server, input=[{"type": "message", "role": "user", "content": "Say hello."}])
    assert response.output[0].model_dump()["role"] == "assistant"


def test_system_prompt(server: Server) -> None:
    hello = {"type": "message", "role": "user", "content": "Say hello."}
    sizes = [
        read(
            whole(server, input=[{"type": "message", "role": "system", "content": "You are a pirate." * times}, hello])
        )
        for times in (1, 9)
    ]
    assert sizes[0] < sizes[1], "it is told to the model, in place of the template's own"


def test_multi_turn(server: Server) -> None:
    roles = [("user", "My name is Alice."), ("assistant", "Hello Alice!"), ("user", "What is my name?")]
    items = [{"type": "message", "role": role, "content": text} for role, text in roles]
    sizes = [read(whole(server, input=items[:length])) for length in (1, 2, 3)]
    assert sizes[0] < sizes[1] < sizes[2], "every turn is told to the model"


@pytest.mark.parametrize("phase", ["commentary", "final_answer", None])
def test_assistant_phase(server: Server, phase: str | None) -> None:
    said = {"type": "message", "role": "assistant", "phase": phase, "content": "I am looking."}
    asked = [{"role": "user", "content": "Look."}, said, {"role": "user", "content": "And?"}]
    assert read(whole(server, input=asked)) > read(whole(server, input=[asked[0], asked[2]])), "it is told to the model"


def test_response_output_phase_schema(server: Server) -> None:
    """What a phase may be in an answer. Ours has none: no model here says which of its messages is the last."""
    response = whole(server, input=[{"role": "user", "content": "Look."}])
    (item,) = response.model_dump()["output"]
    assert item.get("phase") in ("commentary", "final_answer", None)
    for phase in ("commentary", "final_answer"):
        ResponseResource.model_validate({**response.model_dump(by_alias=True), "output": [{**item, "phase": phase}]})


def test_image_input(server: Server) -> None:
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": picture()}]
    response = whole(server, input=[{"type": "message", "role": "user", "content": parts}])
    assert response.usage is not None
    assert response.usage.input_tokens < 200, "a picture is no text: it is told by a few words"


def test_streaming_response(server: Server) -> None:
    body = {"model": "default", "input": [{"role": "user", "content": "Count to five."}], "stream": True}
    events = list(server.events("/v1/responses", body))
    for event in events:
        camel = "".join(word.capitalize() for word in event["type"].replace(".", "_").split("_"))
        getattr(openresponses_types, f"{camel}StreamingEvent").model_validate(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    ResponseResource.model_validate(events[-1]["response"])


def test_each_event_is_one_chunk_of_the_stream(server: Server) -> None:
    """The suite's reader forgets half an event between two chunks."""
    body = {"model": "default", "input": "Count to five.", "stream": True}
    with server.http.stream("POST", "/v1/responses", json=body) as answer:
        for chunk in answer.iter_raw():
            assert chunk.endswith(b"\n\n")
            assert chunk.startswith((b"event: response.", b"data: [DONE]"))


def test_tool_calling(server: Server) -> None:
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    response = whole(server, input=[question], tools=[WEATHER])
    (call,) = [item for item in response.model_dump()["output"] if item["type"] == "function_call"]
    assert (call["name"], call["arguments"]) == ("get_weather", '{"place": "Oslo"}')


def test_allowed_tools_are_a_hard_limit_that_leaves_the_prompt_as_it_is(server: Server) -> None:
    other = {**WEATHER, "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    free = whole(server, input="Say hello.", tools=[WEATHER, other])
    bound = whole(server, input="Say hello.", tools=[WEATHER, other], tool_choice=allowed)
    assert bound.usage is not None
    assert free.usage is not None
    assert bound.usage.input_tokens == free.usage.input_tokens
    assert bound.usage.input_tokens_details.cached_tokens == free.usage.input_tokens - 1


def test_compact_response(server: Server) -> None:
    items = [
        {"type": "message", "role": "user", "content": "I live in Oslo."},
        {"type": "message", "role": "assistant", "content": "A fine town."},
        {"type": "message", "role": "user", "content": "It rains."},
    ]
    answer = server.post("/v1/responses/compact", {"model": "default", "input": items, "prompt_cache_key": "k"})
    assert answer.status_code == 200, answer.text
    compacted = CompactResource.model_validate(answer.json())
    (item,) = [item for item in answer.json()["output"] if item["type"] == "compaction"]
    assert item["encrypted_content"]
    assert [one["content"][0]["text"] for one in answer.json()["output"][:-1]] == ["I live in Oslo.", "It rains."]
    assert compacted.usage is not None
    whole(server, input=[*answer.json()["output"], {"role": "user", "content": "Where do I live?"}])


def test_compact_missing_model(server: Server) -> None:
    answer = server.post("/v1/responses/compact", {"input": "hello"})
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["param"] == "model"


def test_all_at_once(server: Server) -> None:
    """The suite starts all its cases at the same time."""
    cases = [test_basic_response, test_system_prompt, test_multi_turn, test_streaming_response, test_tool_calling]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        for done in [pool.submit(case, server) for case in cases * 2]:
            done.result(60)
