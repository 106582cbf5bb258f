"""The official clients on a live server: their agents' loops, accumulators, parsers, error classes and retries.

Of the anthropic client the runner of tools, threads and streams; of the openai client, which has no runner, the same
loop by hand over both of its protocols. What is asked over the WebSocket is in test_websocket_sdk.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_async_tool, beta_tool
from pydantic import BaseModel

from tests.server.test_restart import verify
from tests.serving import Server, happened, saying, scripted, zj
from zjournal.journal.events import CacheMatched, RequestAccepted

CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>'
OTHER = CALL.replace('"a"', '"b"')
SAID = {
    "listed: boats": "Three boats.",
    "Error: no such folder": "There is none.",
    "look twice": f"First one.\n{CALL}\n{OTHER}",
    "look": f"<think>\nI look.\n</think>\n\nLet me look.\n{CALL}",
    "a boat": '{"name": "Osprey", "length": 9}',
}
TIMES = 30
CONTEXT = 3000


class Boat(BaseModel):
    name: str
    length: int


class Ls(BaseModel):
    """Lists a folder."""

    path: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sdks")
    turns = [*saying(SAID, TIMES), {"text": "The tide is low."}]
    model = scripted(folder, *turns, dialect="chatml+think", context=CONTEXT)
    with Server(folder / "data", model=model) as running:
        yield running
        assert "Traceback" not in running.log.read_text()
        running.kill()
        verify(folder / "data")


@pytest.fixture
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=str(server.http.base_url), api_key="unused", max_retries=0)


@pytest.fixture
def gpt(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key="unused", max_retries=0)


def user(words: str) -> Any:
    return {"role": "user", "content": words}


# --- anthropic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thread", [True, False], ids=["thread", "resent"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_tool_runner(server: Server, claude: anthropic.Anthropic, ask: Any, stream: bool, thread: bool) -> None:
    """Two calls at once, one of which fails; with a thread only what is new is sent, without it all of it again."""
    ran: list[str] = []

    @beta_tool
    def ls(path: str) -> str:
        """Lists a folder."""
        ran.append(path)
        if path == "b":
            raise ValueError("no such folder")
        return "listed: boats"

    options: Any = {} if thread else {"thread": False}
    runner: Any = claude.beta.messages.tool_runner(
        model="default", max_tokens=200, messages=[user(ask("look twice"))], tools=[ls], stream=stream, **options
    )
    said = [one.get_final_message() for one in runner] if stream else list(runner)
    first, last = said
    assert sorted(ran) == ["a", "b"]
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert last.stop_reason == "end_turn"
    assert last.content[0].text in ("Three boats.", "There is none.")
    accepted = {event.response: event for event in happened(server.data_dir, RequestAccepted)}
    assert (accepted[last.id].previous == first.id) or not thread
    matched = {event.response: event for event in happened(server.data_dir, CacheMatched)}
    assert matched[last.id].cached >= matched[first.id].prompt + first.usage.output_tokens - 1


def test_the_asynchronous_tool_runner(server: Server, ask: Any) -> None:
    @beta_async_tool
    async def ls(path: str) -> str:
        """Lists a folder."""
        return "listed: boats"

    async def main() -> Any:
        url = str(server.http.base_url)
        async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
            runner = client.beta.messages.tool_runner(
                model="default", max_tokens=200, messages=[user(ask("look"))], tools=[ls], max_iterations=4
            )
            return await runner.until_done()

    assert asyncio.run(main()).content[0].text == "Three boats."


def test_a_stream_of_messages_adds_up(claude: anthropic.Anthropic, ask: Any) -> None:
    """Every kind of block, by the helper's own events and by its snapshot; equal to the whole answer."""
    asked: Any = {"model": "default", "max_tokens": 200, "messages": [user(ask("look"))]}
    asked["tools"] = [{"name": "ls", "input_schema": Ls.model_json_schema()}]
    with claude.messages.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_message()
    whole = claude.messages.create(**asked)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    for a, b in zip(final.content, whole.content, strict=True):
        names = {"id", "signature"}
        assert a.model_dump(exclude=names) == b.model_dump(exclude=names)
    assert final.stop_reason == whole.stop_reason == "tool_use"
    kinds = {event.type for event in events}
    assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= kinds
    snapshots = [event.snapshot for event in events if event.type == "input_json"]
    assert snapshots[-1] == {"path": "a"}
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert claude.messages.count_tokens(**{k: v for k, v in asked.items() if k != "max_tokens"}).input_tokens == (
        final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    )


def test_a_thread_streams_and_parses(claude: anthropic.Anthropic, ask: Any) -> None:
    thread = claude.beta.messages.thread(model="default", max_tokens=60, messages=[], output_format=Boat)
    assert thread.parse(user(ask("a boat"))).parsed_output == Boat(name="Osprey", length=9)
    with claude.beta.messages.stream(
        model="default", max_tokens=60, messages=[user(ask("a boat"))], output_format=Boat
    ) as stream:
        assert stream.get_final_message().parsed_output == Boat(name="Osprey", length=9)


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({"model": "nothing"}, anthropic.NotFoundError, "model"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"messages": [user("word " * 4000)]}, anthropic.BadRequestError, "prompt is too long: "),
        ({"max_tokens": 9_000}, anthropic.BadRequestError, "exceed context limit: "),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_error_classes_of_anthropic(
    claude: anthropic.Anthropic, asked: dict[str, Any], kind: Any, words: str, stream: bool
) -> None:
    body = {"model": "default", "max_tokens": 9, "messages": [user("hi")], **asked}
    with pytest.raises(kind, match=words) as caught:
        if stream:
            with claude.messages.stream(**body) as told:
                told.until_done()
        else:
            claude.messages.create(**body)
    assert caught.value.request_id.startswith("req_")
    assert caught.value.body["request_id"] == caught.value.request_id


# --- openai -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_agents_loop_over_chat(gpt: openai.OpenAI, ask: Any, stream: bool) -> None:
    """With the client's own description and parsing of a tool."""
    asked: Any = {"model": "default", "tools": [openai.pydantic_function_tool(Ls, name="ls")]}
    messages: list[Any] = [user(ask("look"))]
    for _ in range(4):
        if stream:
            with gpt.chat.completions.stream(messages=messages, **asked) as told:
                for _event in told:
                    pass
                choice = told.get_final_completion().choices[0]
        else:
            choice = gpt.chat.completions.parse(messages=messages, **asked).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        if choice.finish_reason == "stop":
            break
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls or ():
            assert call.function.parsed_arguments == Ls(path="a")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "listed: boats"})
    assert choice.message.content == "Three boats."


@pytest.mark.parametrize("chained", [False, True], ids=["resent", "chained"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_agents_loop_over_responses(gpt: openai.OpenAI, ask: Any, stream: bool, chained: bool) -> None:
    asked: Any = {"model": "default", "tools": [openai.pydantic_function_tool(Ls, name="ls")["function"]]}
    asked["tools"] = [{"type": "function", **asked["tools"][0]}]
    items: list[Any] = [user(ask("look"))]
    for _ in range(4):
        if stream:
            with gpt.responses.stream(input=items, **asked) as told:
                response = told.get_final_response()
        else:
            response = gpt.responses.parse(input=items, **asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        assert [json.loads(call.arguments) for call in calls] == [{"path": "a"}]
        came = [{"type": "function_call_output", "call_id": call.call_id, "output": "listed: boats"} for call in calls]
        if chained:
            asked["previous_response_id"] = response.id
            items = came
        else:
            echoed = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            items = [*items, *echoed, *came]
    assert response.output_text == "Three boats."
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens > 0


def test_what_is_parsed(gpt: openai.OpenAI, ask: Any) -> None:
    """Structured outputs by the client's own schemas, over both protocols, streamed and not."""
    osprey, words = Boat(name="Osprey", length=9), ask("a boat")
    chat = gpt.chat.completions.parse(model="default", messages=[user(words)], response_format=Boat)
    assert chat.choices[0].message.parsed == osprey
    with gpt.chat.completions.stream(model="default", messages=[user(words)], response_format=Boat) as chunks:
        chunks.until_done()
        assert chunks.get_final_completion().choices[0].message.parsed == osprey
    assert gpt.responses.parse(model="default", input=words, text_format=Boat).output_parsed == osprey
    with gpt.responses.stream(model="default", input=words, text_format=Boat) as events:
        events.until_done()
        assert events.get_final_response().output_parsed == osprey


def test_a_stored_response_is_streamed_again(gpt: openai.OpenAI, ask: Any) -> None:
    with gpt.responses.stream(model="default", input=ask("hello")) as first:
        told = list(first)
        final = first.get_final_response()
    with gpt.responses.stream(response_id=final.id, starting_after=3) as again:
        assert [event.sequence_number for event in again] == [event.sequence_number for event in told[4:]]
    listed = gpt.responses.input_items.list(final.id)
    assert [item.type for item in listed] == ["message"]
    assert (
        gpt.responses.input_tokens.count(model="default", input=ask("hello")).input_tokens == final.usage.input_tokens
    )
    gpt.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(final.id)


@pytest.mark.parametrize(
    ("asked", "kind", "code", "param"),
    [
        ({"model": "nothing"}, openai.NotFoundError, "model_not_found", "model"),
        ({"input": [{"role": "nobody", "content": "x"}]}, openai.BadRequestError, "invalid_request", "input[0].role"),
        ({"input": "word " * 4000}, openai.BadRequestError, "context_length_exceeded", "input"),
        ({"previous_response_id": "resp_x"}, openai.BadRequestError, "previous_response_not_found", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_error_classes_of_openai(
    gpt: openai.OpenAI, asked: dict[str, Any], kind: Any, code: str, param: str | None, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        gpt.responses.create(**{"model": "default", "input": "hi", **asked}, stream=stream)
    assert (caught.value.code, caught.value.param) == (code, param or "previous_response_id")
    assert caught.value.request_id.startswith("req_")


# --- keys and limits --------------------------------------------------------------------------------------


def test_limits_of_a_key_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """429 with `Retry-After`: both clients wait so long, ask again and are answered. A wrong key is no use."""
    file = tmp_path / "keys"
    made = zj("keys", "add", "agent", "--api-key-file", str(file), "--requests", "60")
    assert made.returncode == 0, made.stderr
    key = made.stdout.split()[-1]
    slept: list[float] = []
    with Server(tmp_path / "data", "--api-key-file", str(file), model=scripted(tmp_path, {"text": "Low."})) as server:
        url = str(server.http.base_url)
        claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=60)
        gpt = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=60)
        really = time.sleep

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            really(seconds)

        monkeypatch.setattr(time, "sleep", sleep)
        for number in range(70):  # a minute's worth and more
            claude.messages.create(model="default", max_tokens=5, messages=[user(f"{number}")])
            gpt.responses.create(model="default", input=f"{number}")
            if slept:
                break
        assert slept
        assert set(slept) == {1.0}  # 60 a minute come back one a second
        for wrong in (
            anthropic.Anthropic(base_url=url, api_key="sk-x"),
            anthropic.Anthropic(base_url=url, auth_token="x"),
        ):
            with pytest.raises(anthropic.AuthenticationError):
                wrong.messages.create(model="default", max_tokens=5, messages=[user("x")])
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="sk-x").models.list()
