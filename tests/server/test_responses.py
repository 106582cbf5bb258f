"""Responses over HTTP end to end, with the official SDK on loopback: replays, background, lists, counts, compaction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openresponses_types import CompactResource

from tests.server.test_restart import verify
from tests.serving import Server, saying, scripted, zj

FUNCTION: Any = {"type": "function", "name": "ls", "parameters": {"type": "object"}, "strict": False}
TIDE: Any = {"type": "namespace", "name": "tide", "description": "Tides.", "tools": [{**FUNCTION, "name": "height"}]}


def said(name: str, arguments: str = "{}") -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SAID = {
    "look around": said("ls"),
    "how high": said("tide__height"),
    "Write the summary only.": "The boat is called Osprey.",
    "count": "one two three four five six seven eight nine ten",
    "say slowly": "one two three four five six seven eight nine ten " * 20,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("responses")
    turns = saying(SAID, 30)
    for turn in turns:
        if turn["when"] == "say slowly":
            turn["delay_ms"] = 10
    turns += [{"text": "Read.", "when": "long prompt", "prefill_ms_per_1k": 20_000} for _ in range(9)]
    with Server(folder / "data", model=scripted(folder, *turns, {"text": "Fine."})) as running:
        yield running
        running.kill()
        verify(folder / "data")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0)


def replay(server: Server, response: str, query: str = "stream=true") -> list[dict[str, Any]]:
    with server.http.stream("GET", f"/v1/responses/{response}?{query}") as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]


def refused(answer: Any, param: str | None, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    return str(error["message"])


# --- told again ---------------------------------------------------------------------------------------


def test_a_stored_response_is_told_again_as_it_was_from_any_number_on(server: Server) -> None:
    live = list(server.events("/v1/responses", {"model": "default", "input": "count", "stream": True}))
    response = live[0]["response"]["id"]
    assert replay(server, response) == live
    assert replay(server, response, "stream=true&starting_after=4&include_obfuscation=false") == live[5:]
    assert replay(server, response, f"stream=true&starting_after={len(live)}") == []
    refused(server.http.get(f"/v1/responses/{response}?starting_after=4"), "starting_after")
    refused(server.http.get(f"/v1/responses/{response}?stream=true&starting_after=x"), "starting_after")
    refused(server.http.get(f"/v1/responses/{response}?stream=maybe"), "stream")
    refused(server.http.get("/v1/responses/resp_0?stream=true"), "response_id", 404)


def test_the_sdk_goes_on_with_a_stream_that_it_lost(client: openai.OpenAI) -> None:
    first = []
    with client.responses.create(model="default", input="count", stream=True, background=True) as stream:
        for event in stream:
            first.append(event)
            if event.type == "response.output_text.delta":
                break
    response = first[0].response.id
    rest = list(client.responses.retrieve(response, stream=True, starting_after=first[-1].sequence_number))
    numbers = [event.sequence_number for event in (*first, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == SAID["count"]
    with client.responses.stream(response_id=response, starting_after=2) as again:
        kinds = [event.type for event in again]
        assert again.get_final_response().output_text == SAID["count"]
    assert kinds[-1] == "response.completed"


# --- in the background --------------------------------------------------------------------------------


def test_a_response_in_the_background_is_queued_runs_and_can_be_asked_for(client: openai.OpenAI) -> None:
    begun = client.responses.create(model="default", input="count", background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    events = list(client.responses.retrieve(begun.id, stream=True))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    ended = client.responses.retrieve(begun.id)
    assert (ended.status, ended.output_text) == ("completed", SAID["count"])
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(begun.id)


def test_a_background_response_survives_its_client_and_can_be_cancelled(server: Server, client: openai.OpenAI) -> None:
    with client.responses.create(model="default", input="say slowly", stream=True, background=True) as stream:
        response = next(iter(stream)).response.id
    told = 0
    for event in client.responses.retrieve(response, stream=True):  # a second reader; it leaves as well
        told += event.type == "response.output_text.delta"
        if told == 3:
            break
    assert client.responses.retrieve(response).status == "in_progress"
    cancelled = client.responses.cancel(response)
    assert (cancelled.id, cancelled.status) == (response, "cancelled")
    assert cancelled.usage.output_tokens >= 3
    assert client.responses.cancel(response) == cancelled, "once more does nothing"
    last = replay(server, response)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")


def test_o19_a_background_response_is_cancelled_before_its_first_token(server: Server, client: openai.OpenAI) -> None:
    begun = client.responses.create(model="default", input="long prompt " * 500, background=True)
    cancelled = client.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.output, cancelled.usage.output_tokens) == ("cancelled", [], 0)
    assert client.responses.create(model="default", input="hi").status == "completed", "the engine is free again"


def test_only_background_responses_can_be_cancelled(server: Server) -> None:
    whole = server.respond(input="hi")
    refused(server.post(f"/v1/responses/{whole['id']}/cancel", {}), "response_id")
    refused(server.post("/v1/responses/resp_0/cancel", {}), "response_id", 404)
    body = {"model": "default", "input": "hi", "background": True, "store": False}
    refused(server.post("/v1/responses", body), "background")


def test_after_a_crash_a_background_response_is_failed_and_its_stream_goes_on(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "word " * 400, "delay_ms": 10})
    with Server(tmp_path / "data", model=model) as server:
        body = {"model": "default", "input": "go", "stream": True, "background": True}
        told = []
        for event in server.events("/v1/responses", body):
            told.append(event)
            if len(told) > 30:
                break
        response = told[0]["response"]["id"]
        server.restart()
        assert server.http.get(f"/v1/responses/{response}").json()["status"] == "failed"
        again = replay(server, response)
        both = min(len(told), sum(event["sequence_number"] < 4096 for event in again))
        assert both > 3
        assert again[:both] == told[:both]
        rest = replay(server, response, f"stream=true&starting_after={told[-1]['sequence_number']}")
        assert rest[-1]["type"] == "response.failed", "whoever read further than was written hears the end as well"
        assert rest[-1]["response"]["error"]["code"] == "server_error"
    verify(tmp_path / "data")


# --- what it was made of ------------------------------------------------------------------------------


def test_input_items_of_a_chain_come_in_pages(client: openai.OpenAI) -> None:
    first = client.responses.create(model="default", input="one")
    second = client.responses.create(
        model="default",
        previous_response_id=first.id,
        input=[{"role": "user", "content": "two"}, {"role": "user", "content": "three"}],
    )
    found = list(client.responses.input_items.list(second.id, limit=1, order="asc"))
    assert [item.content[0].text for item in found] == ["one", "Fine.", "two", "three"]
    assert found[1].id == first.output[0].id
    assert len({item.id for item in found}) == 4
    newest = client.responses.input_items.list(second.id, limit=3)
    assert [item.id for item in newest.data] == [item.id for item in found[:0:-1]]
    assert newest.has_more
    own = client.responses.input_items.list(first.id)
    assert [item.id for item in own.data] == [found[0].id]
    with pytest.raises(openai.BadRequestError) as fault:
        client.responses.input_items.list(second.id, after="msg_none")
    assert fault.value.param == "after"


def test_tokens_are_counted_as_they_are_in_the_prompt(client: openai.OpenAI) -> None:
    first = client.responses.create(model="default", input="one", instructions="Be brief.", tools=[FUNCTION])
    asked: Any = {"input": "two", "instructions": "Be brief.", "tools": [FUNCTION, TIDE]}
    counted = client.responses.input_tokens.count(previous_response_id=first.id, **asked)
    second = client.responses.create(model="default", previous_response_id=first.id, **asked)
    assert counted.input_tokens == second.usage.input_tokens
    assert counted.object == "response.input_tokens"
    with pytest.raises(openai.BadRequestError) as fault:
        client.responses.input_tokens.count(previous_response_id="resp_0", input="x")
    assert fault.value.code == "previous_response_not_found"


# --- warm-ups -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
def test_a_warm_up_reads_the_prompt_and_is_continued_without_a_word(server: Server, extra: dict[str, Any]) -> None:
    rules = f"Count the boats. {json.dumps(extra)} " + "The harbour has many. " * 60
    warm = server.respond(input=[{"role": "developer", "content": rules}, {"role": "user", "content": "hi"}], **extra)
    assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
    assert server.http.get(f"/v1/responses/{warm['id']}").json() == warm
    again = server.respond(input=[], previous_response_id=warm["id"])
    assert again["output"][0]["content"][0]["text"] == "Fine."
    assert again["usage"]["input_tokens"] == warm["usage"]["input_tokens"], "nothing was said in between"
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == warm["usage"]["input_tokens"] - 1
    more = server.respond(input="and now?", previous_response_id=warm["id"])
    assert more["usage"]["input_tokens_details"]["cached_tokens"] > 300
    streamed = list(server.events("/v1/responses", {"model": "default", "input": "x", "stream": True, **extra}))
    assert [event["type"] for event in streamed] == ["response.created", "response.in_progress", "response.completed"]


# --- tools --------------------------------------------------------------------------------------------


def test_o01_any_tool_may_be_offered_and_those_of_namespaces_come_back_by_their_own_names(server: Server) -> None:
    tools = [
        FUNCTION,
        {"type": "custom", "name": "note"},
        {"type": "web_search"},
        TIDE,
        {"type": "future_2031", "x": 1},
    ]
    body = {"model": "default", "input": "how high", "tools": tools, "stream": True}
    events = list(server.events("/v1/responses", body))
    call = events[-1]["response"]["output"][0]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "height", "tide")
    assert events[-1]["response"]["tools"][3] == TIDE
    answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "2 m"}
    user = {"role": "user", "content": "how high"}
    again = server.respond(input=[user, call, answer], tools=tools)
    cached = again["usage"]["input_tokens_details"]["cached_tokens"]
    first = events[-1]["response"]["usage"]
    assert cached >= first["input_tokens"] + first["output_tokens"] - 2, (
        "what the client sends back is what was sampled"
    )
    assert server.respond(input="how high", tools=tools)["usage"]["input_tokens"] == first["input_tokens"]
    log = server.log.read_text()
    assert "no model is told of web_search, future_2031" in log


def test_o02_a_result_with_an_image_is_told_by_a_few_words_and_never_ends_a_session(server: Server) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "ls", "arguments": "{}"}
    parts = [{"type": "input_text", "text": "1 file"}]
    plain = {"type": "function_call_output", "call_id": "call_1", "output": parts}
    user = {"role": "user", "content": "look at the chart"}
    without = server.respond(input=[user, call, plain])
    for size in (60, 60_000):
        image = {"type": "input_image", "image_url": "data:image/png;base64," + "AAAA" * size}
        told = server.respond(input=[user, call, {**plain, "output": [*parts, image]}])
        assert 0 < told["usage"]["input_tokens"] - without["usage"]["input_tokens"] < 60
    broken = {**plain, "output": [{"type": "input_image", "image_url": "data:image/png;base64,%"}]}
    body = {"model": "default", "input": [user, call, broken]}
    refused(server.post("/v1/responses", body), "input[2].output[0].image_url")


def test_a_result_without_its_call_is_named(server: Server) -> None:
    orphan = {"type": "function_call_output", "call_id": "call_x", "output": "1"}
    body = {"model": "default", "input": [{"role": "user", "content": "hi"}, orphan]}
    assert "call_id call_x" in refused(server.post("/v1/responses", body), "input[1].call_id")
    first = server.respond(input="look around", tools=[FUNCTION])
    refused(server.post("/v1/responses", {**body, "previous_response_id": first["id"]}), "input[1].call_id")
    good = {**orphan, "call_id": first["output"][0]["call_id"]}
    assert server.respond(input=[good], previous_response_id=first["id"], tools=[FUNCTION])["status"] == "completed"


def test_items_that_a_client_repeats_beside_the_id_are_taken_once(server: Server) -> None:
    """Open WebUI sends the calls again that the response already has, with their results."""
    first = server.respond(input="look around", tools=[FUNCTION])
    call = first["output"][0]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a b"}
    continued = {"previous_response_id": first["id"], "tools": [FUNCTION]}
    once = server.respond(input=[result], **continued)
    bare = {key: call[key] for key in ("type", "call_id", "name", "arguments")}
    twice = server.respond(input=[bare, result], **continued)
    assert twice["usage"]["input_tokens"] == once["usage"]["input_tokens"]
    assert twice["usage"]["input_tokens_details"]["cached_tokens"] == once["usage"]["input_tokens"] - 1
    third = server.respond(input="go on", previous_response_id=twice["id"], tools=[FUNCTION])
    fourth = server.respond(input="go on", previous_response_id=once["id"], tools=[FUNCTION])
    assert third["usage"]["input_tokens"] == fourth["usage"]["input_tokens"]


def test_tools_in_the_input_stand_where_tools_stand(server: Server) -> None:
    lite = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{**TIDE, "name": "functions", "description": ""}],
    }
    rules = {"role": "developer", "content": "Rules."}
    user = {"role": "user", "content": "hi"}
    one = server.respond(input=[lite, rules, user], parallel_tool_calls=False)
    two = server.respond(input=[rules, user], tools=TIDE["tools"])
    assert one["usage"]["input_tokens"] == two["usage"]["input_tokens"]
    assert two["usage"]["input_tokens_details"]["cached_tokens"] == one["usage"]["input_tokens"] - 1


def test_tools_in_the_input_hold_for_all_that_continues_it(server: Server, client: openai.OpenAI) -> None:
    lite: Any = {"type": "additional_tools", "role": "developer", "tools": [TIDE]}
    first = server.respond(input=[lite, {"role": "user", "content": "how high"}])
    call = first["output"][0]
    assert (call["name"], call["namespace"]) == ("height", "tide")
    answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "2 m"}
    second = server.respond(previous_response_id=first["id"], input=[answer])
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["input_tokens"] + first["usage"]["output_tokens"] - 2
    third = server.respond(previous_response_id=second["id"], input="how high")
    assert third["output"][0]["namespace"] == "tide"
    server.restart()
    assert server.http.get(f"/v1/responses/{third['id']}").json() == third
    counted = client.responses.input_tokens.count(previous_response_id=second["id"], input="how high")
    assert counted.input_tokens == third["usage"]["input_tokens"]
    again = server.respond(previous_response_id=second["id"], input=[lite, {"role": "user", "content": "how high"}])
    assert again["usage"]["input_tokens"] == third["usage"]["input_tokens"], "they are taken once"
    listed = server.http.get(f"/v1/responses/{third['id']}/input_items?order=asc").json()["data"]
    kinds = ["additional_tools", "message", "function_call", "function_call_output", "function_call", "message"]
    assert [item["type"] for item in listed] == kinds


# --- why the cache missed -----------------------------------------------------------------------------


def compared(server: Server, response: str, **body: Any) -> dict[str, Any]:
    """The diagnostics of a request, which a stored response keeps."""
    told = server.respond(prompt_cache_options={"comparison_response_id": response}, **body)
    assert server.http.get(f"/v1/responses/{told['id']}").json() == told
    assert told["prompt_cache_options"]["comparison_response_id"] == response
    found: dict[str, Any] = told["prompt_cache_diagnostics"]
    if found["type"] == "cache_miss":
        assert found["cache_missed_tokens"] + found["comparison_reusable_tokens"] == told["usage"]["input_tokens"]
    return found


def test_a_prompt_is_compared_with_that_of_another_response(server: Server, client: openai.OpenAI) -> None:
    rules = "Answer in few words. " * 20
    first = server.respond(input="one", instructions=rules, tools=[FUNCTION])
    same: Any = {"instructions": rules, "tools": [FUNCTION]}
    assert compared(server, first["id"], input="one", **same) == {"type": "cache_hit"}
    assert compared(server, first["id"], previous_response_id=first["id"], input="two", **same)["type"] == "cache_hit"
    changed = compared(server, first["id"], input="one", instructions=rules + "!", tools=[FUNCTION])
    assert changed["reason"] == "input_changed"
    assert changed["comparison_reusable_tokens"] > 80
    renamed = compared(server, first["id"], input="one", instructions=rules, tools=[{**FUNCTION, "name": "dir"}])
    assert renamed["reason"] == "tools_changed"
    assert compared(server, "resp_0", input="one") == {"type": "comparison_response_not_found"}
    hidden = server.respond(input="one", store=False)
    assert compared(server, hidden["id"], input="one") == {"type": "comparison_response_not_found"}
    typed = client.responses.create(
        model="default", input="two", prompt_cache_options={"comparison_response_id": first["id"]}
    )
    assert typed.prompt_cache_diagnostics.type == "cache_miss"


# --- compaction ---------------------------------------------------------------------------------------


def test_a_compacted_conversation_goes_on_after_a_restart(server: Server, client: openai.OpenAI) -> None:
    first = client.responses.create(model="default", input="My boat is called Osprey.")
    whole = client.responses.compact(model="default", previous_response_id=first.id, prompt_cache_key="k")
    assert whole.object == "response.compaction"
    assert [item.type for item in whole.output] == ["message", "compaction"]
    assert whole.output[0].content[0].text == "My boat is called Osprey."
    assert whole.usage.output_tokens > 0
    window = [item.model_dump(exclude_none=True, warnings=False) for item in whole.output]
    later = client.responses.create(model="default", input=[*window, {"role": "user", "content": "name?"}])
    assert later.status == "completed"
    assert client.responses.delete(first.id) is None
    server.restart()
    again = client.responses.create(model="default", input=[*window, {"role": "user", "content": "name?"}])
    assert again.usage.input_tokens == later.usage.input_tokens
    shown = zj("sessions", "show", again.id, "--json", "--data-dir", str(server.data_dir))
    assert shown.returncode == 0, shown.stderr
    tampered = [{**window[1], "encrypted_content": window[1]["encrypted_content"][:-3] + "AAA"}]
    with pytest.raises(openai.BadRequestError) as fault:
        client.responses.create(model="default", input=tampered)
    assert fault.value.param == "input[0].encrypted_content"


def test_compact_takes_items_and_names_what_is_missing(server: Server) -> None:
    body = {"model": "default", "input": "My boat is called Osprey.", "stream": True, "tools": [FUNCTION]}
    answer = server.post("/v1/responses/compact", body)
    assert answer.status_code == 200, answer.text
    CompactResource.model_validate(answer.json())
    refused(server.post("/v1/responses/compact", {"input": "x"}), "model")
    refused(server.post("/v1/responses/compact", {"model": "default"}), "input")
    refused(server.post("/v1/responses/compact", {"model": "default", "input": 7}), "input")
    refused(server.http.get(f"/v1/responses/{answer.json()['id']}"), "response_id", 404)


def test_a_trigger_at_the_end_of_an_input_makes_one_item(server: Server) -> None:
    items = [{"role": "user", "content": "My boat is called Osprey."}, {"type": "compaction_trigger"}]
    events = list(server.events("/v1/responses", {"model": "default", "input": items, "stream": True, "store": False}))
    (item,) = events[-1]["response"]["output"]
    assert item["type"] == "compaction"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == [item]
    assert server.respond(input=[item, {"role": "user", "content": "name?"}])["status"] == "completed"


def test_o25_what_belongs_to_another_key_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one: sk-one-0123456789\ntwo: sk-two-0123456789\n")
    keys.chmod(0o600)
    model = scripted(tmp_path, {"text": "Fine."})
    with Server(tmp_path / "data", "--api-key-file", str(keys), model=model) as server:
        one, two = ({"authorization": f"Bearer sk-{name}-0123456789"} for name in ("one", "two"))
        body: dict[str, Any] = {"model": "default", "input": "hi", "background": True}
        own = server.post("/v1/responses", body, headers=one).json()["id"]
        unknown = "resp_" + "0" * 32
        for path in ("", "?stream=true", "/input_items"):
            answers = [server.http.get(f"/v1/responses/{name}{path}", headers=two) for name in (own, unknown)]
            assert [answer.status_code for answer in answers] == [404, 404], path
            assert answers[0].text == answers[1].text.replace(unknown, own)
        answers = [server.post(f"/v1/responses/{name}/cancel", {}, headers=two) for name in (own, unknown)]
        assert answers[0].text == answers[1].text.replace(unknown, own)
        for name in (own, unknown):
            for path in ("", "/compact", "/input_tokens"):
                body = {"model": "default", "input": "x", "previous_response_id": name}
                answer = server.post(f"/v1/responses{path}", body, headers=two)
                assert answer.json()["error"]["code"] == "previous_response_not_found", answer.text
            compares = {"model": "default", "input": "hi", "prompt_cache_options": {"comparison_response_id": name}}
            told = server.post("/v1/responses", compares, headers=two).json()
            assert told["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
        items = server.post("/v1/responses/compact", {"model": "default", "input": "hi"}, headers=one).json()["output"]
        foreign = server.post("/v1/responses", {"model": "default", "input": items}, headers=two)
        refused(foreign, "input[1].encrypted_content")
        assert server.post("/v1/responses", {"model": "default", "input": items}, headers=one).status_code == 200
