"""Field reports about Responses over all its transports, and those that all three protocols answer, on one server."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.test_keep_alive import again
from tests.server.test_restart import verify
from tests.server.test_tools import shown
from tests.server.test_websocket import valid
from tests.serving import Server, saying, scripted, zj
from tests.sockets import Socket, alike
from zjournal.journal.events import RequestAccepted
from zjournal.journal.reader import Reader

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
LS: Any = {"type": "function", "name": "ls", "parameters": PARAMETERS, "strict": False}
CHAT_LS: Any = {"type": "function", "function": {"name": "ls", "parameters": PARAMETERS}}
TIDE: Any = {"type": "namespace", "name": "tide", "description": "Tides.", "tools": [{**LS, "name": "height"}]}
ALIEN: Any = {"type": "web_search"}
FUTURE: Any = {"type": "future_tool_2031", "x": 1}
WORDS = "The tide is low and the boats lie in the mud. " * 60


def said(name: str, arguments: str = "{}") -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def path(name: str) -> str:
    return json.dumps({"path": name})


SAID = {
    "how high": said("tide__height"),
    "think, say, call": f"<think>\nFirst I look.\n</think>\n\nLet me look.\n{said('ls', path('a'))}",
    "say three": " \n\n ".join(said("ls", path(name)) for name in "abc"),
    "say cut": f"{said('ls', path('a'))}\n{said('ls', path('the far side of the old harbour, where '))}",
}
TIMES = 30
CUT_TOKENS = 54  # in the second call

Over = Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("transports")
    model = scripted(folder, *saying(SAID, TIMES), {"text": "Fine."}, dialect="chatml+think")
    with Server(folder / "data", model=model) as running:
        yield running
        assert "Traceback" not in running.log.read_text()
        running.kill()
        verify(folder / "data")


@pytest.fixture(params=["json", "sse", "websocket"])
def over(server: Server, request: pytest.FixtureRequest) -> Iterator[Over]:
    """Asks for a response; gives the whole object and its events, which JSON has none of."""
    if request.param == "websocket":
        with Socket(server.port) as socket:

            def ask(**body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
                events = checked(socket.answer(**body))
                return events[-1]["response"], events

            yield ask
        return

    def fetch(**body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        if request.param == "json":
            return server.respond(**body), []
        events = checked(list(server.events("/v1/responses", {"model": "default", "stream": True, **body})))
        return events[-1]["response"], events

    yield fetch


def checked(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `valid`; but the specification knows of no tools but functions, so what repeats others is only counted."""
    if all(tool["type"] == "function" for tool in events[0]["response"]["tools"]):
        return valid(events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def skipped(server: Server, response: str) -> tuple[str, ...]:
    """What the fact of a request says of the types that no model is told of."""
    with Reader.open(server.data_dir) as reader:
        event = reader.read_response(response)[0].event
    assert isinstance(event, RequestAccepted)
    return event.skipped


def test_o01_tools_that_nobody_knows_are_skipped_with_a_fact(server: Server, over: Over) -> None:
    """Field report O01: namespaces come back by their own names, the others leave no trace but a fact and a line."""
    response, _ = over(input="how high", tools=[LS, ALIEN, TIDE, FUTURE])
    (call,) = response["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "height", "tide")
    assert skipped(server, response["id"]) == ("web_search", "future_tool_2031")
    assert f"{response['id']}: no model is told of web_search, future_tool_2031" in server.log.read_text()
    without, _ = over(input="how high", tools=[LS, TIDE])
    assert without["usage"]["input_tokens"] == response["usage"]["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_o01_the_same_over_chat(server: Server, stream: bool) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    asked = {**body, "tools": [ALIEN, CHAT_LS, FUTURE]}
    if stream:
        (told, *_) = server.events("/v1/chat/completions", asked)
    else:
        told = server.post("/v1/chat/completions", asked).json()
        plain = server.post("/v1/chat/completions", {**body, "tools": [CHAT_LS]}).json()
        assert told["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert skipped(server, told["id"]) == ("web_search", "future_tool_2031")


def test_o02_an_image_in_a_result_is_a_few_tokens_and_one_blob(
    server: Server, over: Over, request: pytest.FixtureRequest
) -> None:
    """Field report O02: the base64 is never tokenised, the session goes on, and the picture is stored once."""
    picture = base64.b64encode(random.Random(request.node.name).randbytes(200_000)).decode()
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"}
    parts = [{"type": "input_text", "text": "1 file"}]
    user = {"role": "user", "content": "look at the chart"}
    call = {"type": "function_call", "call_id": "call_1", "name": "ls", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": [*parts, image]}
    without, _ = over(input=[user, call, {**result, "output": parts}])
    first, _ = over(input=[user, call, result])
    assert 0 < first["usage"]["input_tokens"] - without["usage"]["input_tokens"] < 60
    before = journal_bytes(server)
    for _ in range(3):
        more, _ = over(input=[user, call, result, {"role": "user", "content": "and now?"}])
        assert more["status"] == "completed"
    assert journal_bytes(server) - before < 50_000


def journal_bytes(server: Server) -> int:
    done = zj("journal", "stats", "--json", "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    return sum(kind["bytes"] for kind in json.loads(done.stdout)["contents"].values())


# --- the same everywhere ------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [None, 8, CUT_TOKENS], ids=["whole", "incomplete in thoughts", "incomplete in a call"])
def test_o05_thoughts_text_and_a_call_are_the_same_on_every_transport(server: Server, most: int | None) -> None:
    """Field report O05: the same events with the same fields and numbers, and one object, counts and all."""
    words = "say cut" if most == CUT_TOKENS else "think, say, call"
    body: dict[str, Any] = {"model": "default", "input": words, "tools": [LS], "max_output_tokens": most}
    server.respond(**body)  # from now on all but the last token of the prompt is cached
    whole = server.respond(**body)
    over_http = valid(list(server.events("/v1/responses", {**body, "stream": True})))
    with Socket(server.port) as socket:
        events = valid(socket.answer(**body))
    assert alike(events) == alike(over_http)
    last = events[-1]["response"]
    assert alike(last) == alike(whole)
    assert server.http.get(f"/v1/responses/{last['id']}").json() == last
    assert again(server, last["id"]) == events
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == last["usage"]["input_tokens"] - 1
    kinds = [item["type"] for item in last["output"]]
    if most is None:
        assert kinds == ["reasoning", "message", "function_call"]
        assert events[-1]["type"] == "response.completed"
        assert 0 < last["usage"]["output_tokens_details"]["reasoning_tokens"] < last["usage"]["output_tokens"]
    else:
        assert kinds == (["reasoning"] if most == 8 else ["function_call"] * 2)
        assert (events[-1]["type"], last["status"]) == ("response.incomplete", "incomplete")
        assert last["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["usage"]["output_tokens"] == most


def test_o21_what_was_cached_is_told_alike_by_all_protocols(server: Server) -> None:
    """Field report O21: streamed or not, all but the last token of the prompt, and sums that are right."""
    messages = [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]
    body: dict[str, Any] = {"model": "default", "messages": messages}
    marked = [{"role": "user", "content": [{**messages[0]["content"][0], "cache_control": {"type": "ephemeral"}}]}]
    ask = {"model": "default", "messages": marked, "max_tokens": 50}
    server.post("/v1/chat/completions", body)
    chat = [server.post("/v1/chat/completions", body).json()["usage"]]
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chat.append(list(server.events("/v1/chat/completions", streamed))[-1]["usage"])
    assert chat[0] == chat[1]
    prompt, details = chat[0]["prompt_tokens"], chat[0]["prompt_tokens_details"]
    assert details == {"cached_tokens": prompt - 1, "cache_write_tokens": 0}

    responses = [server.respond(input=WORDS)["usage"]]
    responses.append(list(server.events("/v1/responses", {"model": "default", "input": WORDS, "stream": True}))[-1])
    with Socket(server.port) as socket:
        responses[1:] = [responses[1]["response"]["usage"], socket.respond(input=WORDS)["usage"]]
    assert responses[0] == responses[1] == responses[2]
    assert (responses[0]["input_tokens"], responses[0]["input_tokens_details"]) == (prompt, details)

    whole = server.post("/v1/messages", ask).json()["usage"]
    events = list(server.events("/v1/messages", {**ask, "stream": True}))
    start = events[0]["message"]["usage"]
    (end,) = [event["usage"] for event in events if event["type"] == "message_delta"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    for usage in (whole, start, end):
        assert [usage[name] for name in names] == [1, prompt - 1, 0]
    assert whole["output_tokens"] == end["output_tokens"] == chat[0]["completion_tokens"]


# --- calls --------------------------------------------------------------------------------------------


def test_o23_a_call_that_was_cut_is_incomplete_and_can_be_sent_back(over: Over) -> None:
    """Field report O23: never a call to run, always a terminal event; arguments that are no JSON can be sent back."""
    response, events = over(input="say cut", tools=[LS], max_output_tokens=CUT_TOKENS)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    whole, cut = response["output"]
    assert (whole["status"], cut["status"]) == ("completed", "incomplete")
    with pytest.raises(ValueError):
        json.loads(cut["arguments"])
    if events:
        assert events[-1]["type"] == "response.incomplete"
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == response["output"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "none"} for call in response["output"]
    ]
    user = {"role": "user", "content": "say cut"}
    more, _ = over(input=[user, *response["output"], *results], tools=[LS])
    assert more["status"] == "completed"
    chained, _ = over(input=results, previous_response_id=response["id"], tools=[LS])
    assert chained["status"] == "completed"


def test_o24_parallel_calls_are_apart_and_their_results_come_in_any_order(server: Server, over: Over) -> None:
    """Field report O24: places and ids of their own, the same in the stream, the object and the journal."""
    response, events = over(input="say three", tools=[LS])
    calls = response["output"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"path": name} for name in "abc"]
    ids = [call["call_id"] for call in calls]
    assert len(set(ids)) == len({call["id"] for call in calls}) == 3
    if events:
        for place, call in enumerate(calls):
            own = [event for event in events if event.get("output_index") == place]
            assert own[0]["item"]["call_id"] == ids[place] and own[0]["item"]["name"] == "ls"
            deltas = [one["delta"] for one in own if one["type"] == "response.function_call_arguments.delta"]
            assert len(deltas) > 1 and "".join(deltas) == call["arguments"]
            assert own[-1]["item"] == call
    assert server.http.get(f"/v1/responses/{response['id']}").json() == response
    (turn,) = [turn for turn in shown(server, response["id"]) if turn["response"] == response["id"]]
    assert [call["id"] for call in turn["tool_calls"]] == ids
    results = [{"type": "function_call_output", "call_id": one, "output": one} for one in ids]
    user = {"role": "user", "content": "say three"}
    sampled = response["usage"]["total_tokens"]
    for order in (results, results[::-1], [results[1], results[2], results[0]]):
        more, _ = over(input=[user, *calls, *order], tools=[LS])
        assert more["usage"]["input_tokens_details"]["cached_tokens"] >= sampled - 1, "all that was sampled is reused"
