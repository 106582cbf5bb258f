"""Tool calls end to end, with the official SDK on loopback: what a model says reaches clients and the journal alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.test_restart import verify
from tests.serving import Server, saying, scripted, zj
from zjournal.journal.events import ToolCalled
from zjournal.journal.reader import Reader

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "ls", "parameters": PARAMETERS}}]
TOOLS: Any = [{"type": "function", "name": "ls", "parameters": PARAMETERS, "strict": False}]


def said(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


THREE = "\n".join(["Let me look.", *(said("ls", f'{{"path": "{name}"}}') for name in "abc")])
THOUGHT = "<think>\nFirst I <tool_call> look.\n</think>\n\n" + said("ls", '{"path": "a"}')


CUT_CALL = said("ls", '{"path": "a"}') + "\n" + said("ls", '{"path": "the far side of the old harbour, where "}')

# What the model says, by the words that a prompt ends with; the first that stands in it counts.
SAID = {
    "count them": "Three boats.",
    "say three": THREE,
    "say loose": THREE.replace("</tool_call>\n", "</tool_call> \n\n "),
    "say cut": CUT_CALL,
    "say thought": THOUGHT,
    "say half": said("ls", '{"path": "\\ud800"}'),
    "say patch": said("patch", '{"input": "+ \\"low\\"\\n☃"}'),
}
TIMES = 20  # that each of them can be said


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tools")
    turns = saying(SAID, TIMES)
    turns.append({"text": CUT_CALL, "when": "die now", "die_after": 40})
    with Server(folder / "data", model=scripted(folder, *turns, dialect="chatml+think")) as running:
        yield running
        running.kill()
        verify(folder / "data")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0)


def shown(server: Server, response: str) -> list[dict[str, Any]]:
    """The turns of a response's session, as `zj sessions show` has them."""
    done = zj("sessions", "show", response, "--json", "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["turns"]


def test_a_round_trip_over_chat_streamed_and_not(server: Server, client: openai.OpenAI, ask: Any) -> None:
    words = ask("say three")
    user: Any = {"role": "user", "content": words}
    whole = client.chat.completions.create(model="default", messages=[user], tools=CHAT_TOOLS)
    with client.chat.completions.stream(model="default", messages=[user], tools=CHAT_TOOLS) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    for answer in (whole, final):
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        calls = choice.message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"path": name} for name in "abc"]
        assert len({call.id for call in calls}) == 3
    message = whole.choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "Now count them."} for call in message.tool_calls or ()
    ]
    assert [turn["tool_calls"] for turn in shown(server, whole.id)] == [
        [{"id": call.id, "result_seen": False} for call in message.tool_calls or ()]
    ]
    echoed: Any = message.model_dump(exclude_none=True)
    last = client.chat.completions.create(
        model="default", messages=[user, echoed, *results], tools=CHAT_TOOLS, tool_choice="none"
    )
    assert last.choices[0].message.content == "Three boats."
    assert last.choices[0].finish_reason == "stop"
    first, second = shown(server, last.id)
    assert second["parent"] == first["response"] == whole.id
    assert all(call["result_seen"] for call in first["tool_calls"])


def test_a_round_trip_over_responses_streamed_and_not(server: Server, client: openai.OpenAI, ask: Any) -> None:
    words = ask("say three")
    user: Any = {"role": "user", "content": words}
    whole = client.responses.create(model="default", input=words, tools=TOOLS)
    with client.responses.stream(model="default", input=words, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    for answer in (whole, final):
        assert [item.type for item in answer.output] == ["message", *["function_call"] * 3]
        assert answer.output_text == "Let me look."
        assert [item.arguments for item in answer.output[1:]] == [f'{{"path": "{name}"}}' for name in "abc"]
        assert all(item.status == "completed" for item in answer.output)
        stored = client.responses.retrieve(answer.id)
        assert [(item.type, item.id) for item in stored.output] == [(item.type, item.id) for item in answer.output]
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Now count them."}
        for item in whole.output[1:]
    ]
    chained = client.responses.create(model="default", previous_response_id=whole.id, input=results, tools=TOOLS)
    resent = client.responses.create(
        model="default",
        input=[user, *(item.to_dict() for item in whole.output), *results],  # type: ignore[misc]
        tools=TOOLS,
    )
    assert chained.output_text == resent.output_text == "Three boats."
    assert chained.usage is not None and resent.usage is not None and whole.usage is not None
    assert resent.usage.input_tokens == chained.usage.input_tokens
    # The answer is in the prompt as the tokens that were sampled: only what follows it is computed.
    assert chained.usage.input_tokens_details.cached_tokens == whole.usage.total_tokens - 1
    turns = {turn["response"]: turn for turn in shown(server, whole.id)}
    assert turns[chained.id]["parent"] == whole.id
    assert [call["result_seen"] for call in turns[whole.id]["tool_calls"]] == [True] * 3


def test_half_of_a_surrogate_pair_in_arguments_is_the_models_own_affair(
    server: Server, client: openai.OpenAI, ask: Any
) -> None:
    """No UTF-8 has it: it ended the server, where the answer entered its history."""
    user: Any = {"role": "user", "content": ask("say half")}
    message = client.chat.completions.create(model="default", messages=[user], tools=CHAT_TOOLS).choices[0].message
    (call,) = message.tool_calls or ()
    assert call.type == "function" and call.function.arguments == '{"path": "\\ud800"}'
    echoed: Any = message.model_dump(exclude_none=True)
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "Now count them."}]
    last = client.chat.completions.create(model="default", messages=[user, echoed, *results], tools=CHAT_TOOLS)
    assert last.choices[0].message.content == "Three boats."


def test_o24_parallel_calls_have_places_and_ids_of_their_own(server: Server, client: openai.OpenAI, ask: Any) -> None:
    """Clients join by index: three calls, arguments in pieces, must not become one. The ids are equal wherever told."""
    words = ask("say loose")
    user: Any = {"role": "user", "content": words}
    chunks = list(
        server.events(
            "/v1/chat/completions", {"model": "default", "messages": [user], "tools": CHAT_TOOLS, "stream": True}
        )
    )
    pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert sorted({piece["index"] for piece in pieces}) == [0, 1, 2]
    ids = []
    for index in range(3):
        first, *rest = [piece for piece in pieces if piece["index"] == index]
        assert first["function"]["name"] == "ls" and first["type"] == "function"
        ids.append(first["id"])
        assert len(rest) > 1 and all("id" not in piece and "name" not in piece["function"] for piece in rest)
        arguments = "".join(piece["function"]["arguments"] for piece in (first, *rest))
        assert json.loads(arguments) == {"path": "abc"[index]}
    assert len(set(ids)) == 3
    (turn,) = shown(server, chunks[0]["id"])
    assert [call["id"] for call in turn["tool_calls"]] == ids
    events = list(server.events("/v1/responses", {"model": "default", "input": words, "tools": TOOLS, "stream": True}))
    streamed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == streamed
    assert server.http.get(f"/v1/responses/{events[-1]['response']['id']}").json()["output"] == streamed


@pytest.mark.parametrize("stream", [False, True])
def test_o23_a_call_cut_by_the_limit_is_told_as_cut(server: Server, ask: Any, stream: bool) -> None:
    """`finish_reason` is length, `status` incomplete; and what the client got can be sent back as it is."""
    words = ask("say cut")
    user: Any = {"role": "user", "content": words}
    chat = {"model": "default", "messages": [user], "tools": CHAT_TOOLS, "max_tokens": 54, "stream": stream}
    if stream:
        chunks = list(server.events("/v1/chat/completions", chat))
        reason = chunks[-1]["choices"][0]["finish_reason"]
        pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        calls = [
            {
                "id": next(piece["id"] for piece in pieces if piece["index"] == index),
                "type": "function",
                "function": {
                    "name": "ls",
                    "arguments": "".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == index),
                },
            }
            for index in (0, 1)
        ]
        response = chunks[0]["id"]
    else:
        body = server.post("/v1/chat/completions", chat).json()
        reason, calls, response = (
            body["choices"][0]["finish_reason"],
            body["choices"][0]["message"]["tool_calls"],
            body["id"],
        )
    assert reason == "length"
    assert calls[1]["function"]["arguments"].startswith('{"path": "the far')
    with pytest.raises(ValueError):
        json.loads(calls[1]["function"]["arguments"])
    (turn,) = shown(server, response)
    assert [call["id"] for call in turn["tool_calls"]] == [calls[0]["id"]], "a call that was cut is no call to answer"
    back = [user, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "user", "content": "Go on."}]
    again = server.post("/v1/chat/completions", {"model": "default", "messages": back, "tools": CHAT_TOOLS})
    assert again.status_code == 200, again.text

    asked = {"model": "default", "input": words, "tools": TOOLS, "max_output_tokens": 54, "stream": stream}
    if stream:
        *_, last = server.events("/v1/responses", asked)
        assert last["type"] == "response.incomplete"
        answer = last["response"]
    else:
        answer = server.post("/v1/responses", asked).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    assert server.http.get(f"/v1/responses/{answer['id']}").json() == answer
    resent = [user, *answer["output"], {"role": "user", "content": "Go on."}]
    assert server.post("/v1/responses", {"model": "default", "input": resent, "tools": TOOLS}).status_code == 200


def test_r24_orphans_of_a_crash_are_not_refused_for_ever(server: Server, client: openai.OpenAI, ask: Any) -> None:
    """A call without a result, and a result without a call, are rendered as they are."""
    words = ask("count them")
    user: Any = {"role": "user", "content": words}
    call = {"id": "call_lost", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    for messages in (
        [user, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "Well?"}],
        [user, {"role": "tool", "tool_call_id": "call_lost", "content": "boats"}, {"role": "user", "content": "Well?"}],
    ):
        answer = server.post("/v1/chat/completions", {"model": "default", "messages": messages, "tools": CHAT_TOOLS})
        assert answer.status_code == 200, answer.text
    item = {"type": "function_call", "call_id": "call_lost", "name": "ls", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_lost", "output": "boats"}
    for orphan in (item, output):
        answer = server.post("/v1/responses", {"model": "default", "input": [orphan, user], "tools": TOOLS})
        assert answer.status_code == 200, answer.text


def test_r26_no_markup_leaks_as_text_behind_thoughts(server: Server, client: openai.OpenAI, ask: Any) -> None:
    """With thoughts and tools the text is empty; a call among thoughts is thought of and never run."""
    words = ask("say thought")
    user: Any = {"role": "user", "content": words}
    chunks = list(
        client.chat.completions.create(
            model="default",
            messages=[user],
            tools=CHAT_TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "First I <tool_call> look."
    assert {call.index for delta in deltas for call in delta.tool_calls or ()} == {0}
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens_details is not None
    thought = chunks[-1].usage.completion_tokens_details.reasoning_tokens
    assert thought is not None and 6 < thought < chunks[-1].usage.completion_tokens
    whole = client.chat.completions.create(model="default", messages=[user], tools=CHAT_TOOLS)
    assert whole.choices[0].message.content is None
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == thought
    answer = client.responses.create(model="default", input=words, tools=TOOLS)
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    assert answer.output[0].content[0].text == "First I <tool_call> look."  # type: ignore[index, union-attr]
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == thought


def test_where_nothing_may_be_called_markup_is_text(server: Server, client: openai.OpenAI, ask: Any) -> None:
    words = ask("say three")
    user: Any = {"role": "user", "content": words}
    for extra in ({"tools": CHAT_TOOLS, "tool_choice": "none"}, {}):
        answer = client.chat.completions.create(model="default", messages=[user], **extra)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == THREE
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.tool_calls is None
    assert client.responses.create(model="default", input=words).output_text == THREE


def test_a_custom_tool_gets_its_text_and_nothing_else(server: Server, client: openai.OpenAI, ask: Any) -> None:
    words = ask("say patch")
    user: Any = {"role": "user", "content": words}
    tools: Any = [{"type": "custom", "name": "patch", "description": "Applies a patch."}]
    with client.responses.stream(model="default", input=words, tools=tools) as stream:
        pieces = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        final = stream.get_final_response()
    (item,) = final.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", '+ "low"\n☃')
    assert "".join(pieces) == item.input and len(pieces) > 1
    whole = client.responses.create(model="default", input=words, tools=tools)
    (item,) = whole.output
    assert item.type == "custom_tool_call"
    result: Any = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "Now count them."}
    resent: Any = [user, item.to_dict(), result]
    done = client.responses.create(model="default", input=resent, tools=tools)
    assert done.output_text == "Three boats."
    assert done.usage is not None and whole.usage is not None
    assert done.usage.input_tokens_details.cached_tokens == whole.usage.total_tokens - 1


def test_calls_outlive_a_crash_and_say_that_no_result_was_seen(server: Server, client: openai.OpenAI, ask: Any) -> None:
    """R23: the tool ran, and the client died before it said so; the journal tells which calls are open."""
    words = ask("say three")
    first = server.respond(input=words, tools=TOOLS)
    server.restart()
    assert server.http.get(f"/v1/responses/{first['id']}").json() == first
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "Now count them."}
    server.respond(input=[output], previous_response_id=first["id"], tools=TOOLS)
    seen = [call["result_seen"] for call in shown(server, first["id"])[0]["tool_calls"]]
    assert seen == [False, True, False]
    page = zj("sessions", "show", first["id"], "--data-dir", str(server.data_dir)).stdout
    flat = "".join(page.split())
    assert "3toolcalls(noresultseen:" in flat
    assert first["output"][1]["call_id"] in flat and first["output"][2]["call_id"] not in flat


def test_a_call_that_was_written_down_and_told_to_nobody_is_there_after_a_kill(tmp_path: Path) -> None:
    """kill -9 behind the fact of a call and before a word of it: who asks later finds the call, and no result."""
    turn = {"text": said("ls", '{"path": "a"}') + "\n" + said("ls", '{"path": "b"}'), "delay_ms": 100}
    with Server(tmp_path / "data", model=scripted(tmp_path, turn)) as server:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.respond, input="go", tools=TOOLS)
            with Reader.open(server.data_dir) as reader:
                called = first(reader, ToolCalled, asked)
            server.kill()
            with pytest.raises(httpx.TransportError):
                asked.result()
        server.start()
        got = server.http.get(f"/v1/responses/{called.response}").json()
        assert (got["status"], got["error"]["code"]) == ("failed", "server_error")
        assert [(item["name"], item["status"]) for item in got["output"] if item["type"] == "function_call"][:1] == [
            ("ls", "completed")
        ]
        (turn_shown,) = shown(server, called.response)
        (call,) = turn_shown["tool_calls"]
        assert (call["id"], call["result_seen"]) == (got["output"][0]["call_id"], False)
        # Its result can be sent, in the history that the client now has.
        result = {"type": "function_call_output", "call_id": call["id"], "output": "it ran"}
        again = [{"role": "user", "content": "go"}, got["output"][0], result]
        assert server.respond(input=again, tools=TOOLS)["status"] == "completed"
        assert [one["result_seen"] for one in shown(server, called.response)[0]["tool_calls"]] == [True]
    verify(tmp_path / "data")


def first(reader: Reader, kind: type[ToolCalled], asked: Future[Any]) -> ToolCalled:
    """The first fact of a kind, as soon as it is there."""
    while True:
        assert not asked.done(), asked.result()
        for fact in reader.before(reader.head + 1, kind):
            assert isinstance(fact.event, kind)
            return fact.event


def test_a_call_in_which_the_engine_dies_is_not_told_to_be_whole(
    server: Server, client: openai.OpenAI, ask: Any
) -> None:
    words = ask("die now")
    asked = {"model": "default", "input": words, "tools": TOOLS, "stream": True}
    last = list(server.events("/v1/responses", asked))[-1]
    assert last["type"] == "response.failed"
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]
    assert server.http.get(f"/v1/responses/{last['response']['id']}").json() == last["response"]
    server.wait_ready()  # the next test is not to meet an engine that loads


def test_calls_move_with_their_session_to_another_machine(server: Server, ask: Any, tmp_path: Path) -> None:
    words = ask("say three")
    user: Any = {"role": "user", "content": words}
    first = server.respond(input=words, tools=TOOLS)
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Now count them."}
        for item in first["output"][1:]
    ]
    file, there = tmp_path / "s.jsonl", ("--data-dir", str(tmp_path / "b"))
    done = zj("sessions", "export", first["id"], "-o", str(file), "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    done = zj("sessions", "import", str(file), *there)
    assert done.returncode == 0, done.stderr
    with Server(tmp_path / "b", model=server.flags[-1]) as other:
        assert other.http.get(f"/v1/responses/{first['id']}").json() == first
        resent = [user, *first["output"], *outputs]
        second = other.respond(input=resent, tools=TOOLS)
        turns = shown(other, first["id"])
        assert [turn["response"] for turn in turns] == [first["id"], second["id"]]
        assert turns[1]["parent"] == first["id"]
        assert [call["result_seen"] for call in turns[0]["tool_calls"]] == [True] * 3
    verify(tmp_path / "b")
    page = zj("sessions", "export", second["id"], "--format", "md", *there).stdout
    call = first["output"][1]
    assert f'### tool call {call["call_id"]}: ls\n\n```\n{{"path": "a"}}\n```\n' in page
    assert "<tool_call>" not in page
