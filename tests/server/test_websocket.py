"""Responses over WebSocket, on a real server: the compliance cases of Open Responses, the same as HTTP, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openresponses_types
import pytest
from openai.types.responses import ResponseStreamEvent
from openresponses_types import CompactResource, ResponseResource, WebSocketErrorEvent
from pydantic import TypeAdapter
from websockets.exceptions import ConnectionClosed

from tests.server.test_keep_alive import again
from tests.server.test_restart import verify
from tests.serving import Server, saying, scripted
from tests.sockets import Socket, alike

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
TIMES = 40
ONLY_THEIRS = ("response.reasoning_text.",)
_SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SAID = {"weather in Oslo": CALL, "Write the summary only.": "They spoke of Oslo."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("websocket")
    turns = saying(SAID, TIMES)
    turns += [{"text": "This breaks off.", "when": "break off", "fail_after": 2} for _ in range(TIMES)]
    turns += [{"text": "on and on " * 200, "when": "at length", "delay_ms": 5} for _ in range(TIMES)]
    with Server(folder / "data", model=scripted(folder, *turns, {"text": "Hello there."})) as running:
        yield running
        assert "Traceback" not in running.log.read_text()
        running.kill()
        verify(folder / "data")


@pytest.fixture
def socket(server: Server) -> Iterator[Socket]:
    with Socket(server.port) as opened:
        yield opened


def valid(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events that the models of the specification accept, numbered from 0; those that only OpenAI has, its models."""
    for event in events:
        if event["type"].startswith(ONLY_THEIRS):
            _SDK_EVENT.validate_python(event)
            continue
        camel = "".join(word.capitalize() for word in event["type"].replace(".", "_").split("_"))
        getattr(openresponses_types, f"{camel}StreamingEvent").model_validate(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# --- what the compliance suite of Open Responses asks for, in our own words -------------------------------


def test_a_response_is_told_in_the_events_of_the_specification(socket: Socket) -> None:
    events = valid(socket.answer(input=[{"type": "message", "role": "user", "content": "Say hello."}]))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    response = ResponseResource.model_validate(events[-1]["response"])
    assert response.status == "completed" and response.output


def test_two_responses_one_after_the_other(socket: Socket) -> None:
    first, second = (valid(socket.answer(input=text)) for text in ("Say hello.", "And again."))
    assert first[-1]["response"]["id"] != second[-1]["response"]["id"]


def test_an_unstored_response_is_continued_on_its_socket(server: Server, socket: Socket) -> None:
    first = socket.respond(input="My name is Alice.", store=False)
    second = socket.respond(input="What is my name?", store=False, previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"]
    third = socket.respond(input="Are you sure?", store=False, previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["total_tokens"]
    for response in (first, second, third):
        assert server.http.get(f"/v1/responses/{response['id']}").status_code == 404
        body = {"model": "default", "input": "x", "previous_response_id": response["id"]}
        told = server.post("/v1/responses", body)
        assert (told.status_code, told.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_after_a_reconnect_an_unstored_response_is_not_found_and_a_whole_request_goes_on(server: Server) -> None:
    with Socket(server.port) as socket:
        first = socket.respond(input="My name is Alice.", store=False)
    with Socket(server.port) as socket:
        told = socket.refused(input="What is it?", store=False, previous_response_id=first["id"])
        assert told["error"]["code"] == "previous_response_not_found"
        said = first["output"]
        again = [{"role": "user", "content": "My name is Alice."}, *said, {"role": "user", "content": "What is it?"}]
        whole = socket.respond(input=again, store=False)
        assert whole["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"]


def test_an_unknown_response_is_told_in_the_envelope_that_clients_know(socket: Socket) -> None:
    missing = "resp_" + "0" * 32
    told = socket.refused(input="x", previous_response_id=missing)
    WebSocketErrorEvent.model_validate(told)
    assert told == {
        "type": "error",
        "status": 400,
        "error": {
            "type": "invalid_request_error",
            "code": "previous_response_not_found",
            "message": f"Previous response with id '{missing}' not found.",
            "param": "previous_response_id",
        },
    }
    socket.respond(input="Say hello.")


def test_a_continuation_that_fails_takes_what_it_named_with_it(socket: Socket) -> None:
    first = socket.respond(input="My name is Alice.", store=False)
    result = {"type": "function_call_output", "call_id": "call_unknown", "output": "x"}
    told = socket.refused(input=[result], store=False, previous_response_id=first["id"])
    assert told["status"] == 400 and "call_unknown" in told["error"]["message"]
    told = socket.refused(input="And now?", store=False, previous_response_id=first["id"])
    assert told["error"]["code"] == "previous_response_not_found"


def test_a_compacted_conversation_begins_a_chain(server: Server, socket: Socket) -> None:
    items = [{"type": "message", "role": "user", "content": "I live in Oslo."}]
    answer = server.post("/v1/responses/compact", {"model": "default", "input": items})
    CompactResource.model_validate(answer.json())
    first = socket.respond(input=[*answer.json()["output"], {"role": "user", "content": "Where?"}], store=False)
    socket.respond(input="Sure?", store=False, previous_response_id=first["id"])


# --- the same as over HTTP ------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["deflate", None])
@pytest.mark.parametrize("words", ["Say hello.", "What is the weather in Oslo"])
def test_o05_the_events_are_those_of_the_stream_over_http(server: Server, compression: str | None, words: str) -> None:
    """Field report O05: the same events, fields and numbers over SSE and over WebSocket."""
    body = {"model": "default", "input": words, "tools": [WEATHER], "metadata": {"a": "b"}}
    server.respond(**body)  # from now on all but the last token of the prompt is cached
    over_http = list(server.events("/v1/responses", {**body, "stream": True}))
    with Socket(server.port, compression=compression) as socket:
        assert bool(socket.connection.protocol.extensions) == (compression is not None)
        events = valid(socket.answer(**body))
    usage = events[-1]["response"]["usage"]
    assert usage == over_http[-1]["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1
    assert usage["output_tokens"] > 0
    assert [event["type"] for event in events] == [event["type"] for event in over_http]
    assert alike(events) == alike(over_http), "all fields, numbers and counts"


def test_o05_a_failure_is_numbered_too_and_the_socket_goes_on(server: Server, socket: Socket) -> None:
    events = valid(socket.answer(input="Please break off"))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert events[-1]["response"]["usage"]["output_tokens"] == 2
    socket.respond(input="Say hello.")


def test_a_failed_turn_takes_what_it_continued_with_it(socket: Socket) -> None:
    first = socket.respond(input="My name is Alice.", store=False)
    failed = socket.answer(input="Please break off", store=False, previous_response_id=first["id"])[-1]["response"]
    for gone in (failed["id"], first["id"]):
        told = socket.refused(input="x", store=False, previous_response_id=gone)
        assert told["error"]["code"] == "previous_response_not_found"


def test_a_stored_response_is_everywhere_what_it_is_on_its_socket(server: Server, socket: Socket) -> None:
    events = socket.answer(input="Say hello.", stream=True, background=True, stream_options={"include_usage": True})
    told = events[-1]["response"]
    assert told["background"] is False, "how an answer comes is the socket's affair"
    assert server.http.get(f"/v1/responses/{told['id']}").json() == told
    assert again(server, told["id"]) == events
    continued = server.respond(input="And now?", previous_response_id=told["id"])
    on = socket.respond(input="And then?", previous_response_id=continued["id"], store=False)
    assert on["usage"]["input_tokens"] > continued["usage"]["total_tokens"]


def test_a_round_with_a_tool_and_tools_that_stand_in_the_input(socket: Socket) -> None:
    """As Codex has them in Responses Lite: the tools come once, with the first request of the chain."""
    tools = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    first = socket.respond(input=[tools, {"role": "user", "content": "What is the weather in Oslo"}], store=False)
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
    second = socket.respond(input=[result], store=False, previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    third = socket.respond(input="The weather in Oslo", store=False, previous_response_id=second["id"])
    assert [item["type"] for item in third["output"]] == ["function_call"]


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("extra", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
def test_r08_a_warm_up_reads_the_prompt_and_is_continued(
    server: Server, socket: Socket, store: bool, extra: dict[str, Any]
) -> None:
    """Field report R08: an id that can be chained, no output of the model, and a prompt that is really read."""
    words = f"A long preface for {store} {extra}. " * 20
    before = server.http.get("/metrics").text
    warm = valid(socket.answer(input=words, store=store, **extra))
    assert [event["type"] for event in warm] == ["response.created", "response.in_progress", "response.completed"]
    told = warm[-1]["response"]
    assert told["output"] == [] and told["usage"]["output_tokens"] == 0
    assert told["usage"]["input_tokens"] > 100
    assert before != server.http.get("/metrics").text
    events = socket.respond(input=[], store=store, previous_response_id=told["id"])
    assert events["output"][0]["content"][0]["text"] == "Hello there."
    usage = events["usage"]
    assert usage["input_tokens"] == told["usage"]["input_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1
    in_the_middle = socket.respond(input="More.", store=store, previous_response_id=events["id"], **extra)
    socket.respond(input=[], store=store, previous_response_id=in_the_middle["id"])


def test_a_stored_response_may_not_depend_on_an_unstored_one(socket: Socket) -> None:
    first = socket.respond(input="My name is Alice.", store=False)
    told = socket.refused(input="And?", previous_response_id=first["id"])
    assert (told["status"], told["error"]["param"]) == (400, "store")
    assert first["id"] in told["error"]["message"]


def test_two_sockets_do_not_know_each_others_responses_and_run_at_the_same_time(server: Server) -> None:
    with Socket(server.port) as one, Socket(server.port) as other:
        one.ask(input="Tell me at length", store=False)
        assert one.event()["type"] == "response.created"
        mine = other.respond(input="Say hello.", store=False)
        told = list(one.events())[-1]
        assert told["type"] == "response.completed"
        for socket, foreign in ((one, mine["id"]), (other, told["response"]["id"])):
            refused = socket.refused(input="x", store=False, previous_response_id=foreign)
            assert refused["error"]["code"] == "previous_response_not_found"


def test_what_is_asked_while_another_is_answered_waits_its_turn(socket: Socket) -> None:
    words = ["Tell me at length", "Say hello.", "And again."]
    for text in words:
        socket.ask(input=text)
    socket.connection.send("{")
    answers = [valid(list(socket.events())) for _ in words]
    assert len({answer[0]["response"]["id"] for answer in answers}) == 3
    assert socket.event()["error"]["code"] == "invalid_request", "told when its turn has come"


@pytest.mark.parametrize("store", [True, False])
def test_the_next_request_can_be_sent_before_the_answer_that_it_continues_has_ended(
    socket: Socket, store: bool
) -> None:
    socket.ask(input="Tell me at length", store=store)
    running = socket.event()["response"]["id"]
    socket.ask(input="Say hello.", store=store, previous_response_id=running)
    assert list(socket.events())[-1]["type"] == "response.completed"
    (*_, last) = socket.events()
    assert (last["type"], last["response"]["previous_response_id"]) == ("response.completed", running)


def test_a_response_in_a_conversation_is_kept_there(server: Server, socket: Socket) -> None:
    name = server.post("/v1/conversations", {}).json()["id"]
    for words in ("Say hello.", "And again."):
        assert socket.respond(input=words, conversation=name)["conversation"] == {"id": name}
    items = server.http.get(f"/v1/conversations/{name}/items?order=asc").json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"] * 2


def test_too_many_that_wait_are_refused_at_once(socket: Socket) -> None:
    socket.ask(input="Tell me at length")
    assert socket.event()["type"] == "response.created"
    for _ in range(9):
        socket.ask(input="Say hello.")
    told = list(socket.events())
    assert told[-1]["status"] == 429 and told[-1]["error"]["code"] == "rate_limit_exceeded"
    ends = [list(socket.events())[-1]["type"] for _ in range(9)]
    assert ends == ["response.completed"] * 9


# --- what is wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        ("{", 400, None),
        ("[1]", 400, None),
        (b'{"type":"response.create","model":"default","input":"x"}', 400, None),
        ('{"model":"default","input":"x"}', 400, "type"),
        ('{"type":"response.cancel"}', 400, "type"),
        ('{"type":"response.create"}', 400, "model"),
        ('{"type":"response.create","model":"default"}', 400, "input"),
        ('{"type":"response.create","model":"nobody","input":"x"}', 404, "model"),
        ('{"type":"response.create","model":"default","input":7}', 400, "input"),
        ('{"type":"response.create","model":"default","input":"x","temperature":"hot"}', 400, "temperature"),
        ('{"type":"response.create","model":"default","input":"x","stream_id":"lane"}', 400, "stream_id"),
        ('{"type":"response.create","model":"default","input":"\\ud800"}', 400, "input"),
        ('{"type":"response.create","model":"default","input":"x","logit_bias":{"17":"a"}}', 400, "logit_bias.17"),
        ('{"type":"response.create","model":"default","input":"x","truncation":"auto"}', 400, "truncation"),
        (
            '{"type":"response.create","model":"default","input":"x","previous_response_id":"\\udfff"}',
            400,
            "previous_response_id",
        ),
        ('{"type":"response.create","model":"default","input":"x","conversation":"conv_no"}', 404, "conversation"),
        ('{"type":"response.create","model":"default","input":[' + "[" * 50_000 + "]}", 400, None),
    ],
)
def test_what_is_wrong_is_named_and_the_next_request_works(
    socket: Socket, message: str | bytes, status: int, param: str | None
) -> None:
    socket.connection.send(message)
    told = socket.event()
    WebSocketErrorEvent.model_validate(told)
    assert told["status"] == status, told
    if param is not None:
        assert told["error"]["param"] == param
    socket.respond(input="Say hello.")


def test_nul_is_text(socket: Socket) -> None:
    assert socket.respond(input="a\0b")["status"] == "completed"


def test_a_message_that_is_no_utf8_is_told_and_ends_the_socket(socket: Socket) -> None:
    socket.connection.send(b'{"type":"\xff"}', text=True)
    assert socket.event()["status"] == 400
    with pytest.raises(ConnectionClosed) as closed:
        socket.event()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1007


def test_input_for_a_running_response_is_given_back_at_once(socket: Socket) -> None:
    socket.ask(input="Tell me at length")
    created = socket.event()
    socket.send(type="response.steer", previous_response_id=created["response"]["id"], input="Shorter!")
    events = list(socket.events())
    (told,) = [event for event in events if event["type"] == "response.steer.failed"]
    assert told["error"]["code"] == "steering_not_supported" and told["steer"]["input"] == "Shorter!"
    assert events[-1]["type"] == "response.completed"
    numbers = [event["sequence_number"] for event in events if event is not told]
    assert numbers == list(range(1, len(events)))
