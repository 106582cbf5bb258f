"""Chat Completions on a real server: the older spelling of functions, parts that are no text, answers that go on."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.test_restart import verify
from tests.serving import Server, happened, saying, scripted, zj
from zjournal.api import blobs
from zjournal.journal import events

FUNCTIONS: Any = [
    {
        "name": "ls",
        "description": "Lists a folder.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
]
CALL = 'Let me look.\n<tool_call>\n{"name": "ls", "arguments": {"path": "harbour"}}\n</tool_call>'
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
SHOWN = blobs.placeholder("image", "image/png", PNG)
# The first whose words stand at the end of the prompt counts.
SAID = {"what is there": "Three boats.", "look around": CALL, "once more": CALL, "say it": "Ahoy."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("chat")
    with Server(folder / "data", model=scripted(folder, *saying(SAID, 20))) as running:
        yield running
        running.kill()
        verify(folder / "data")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0)


def chat(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="default", messages=messages, **more)


def shown(server: Server, response: str) -> dict[str, Any]:
    """A response's turn, as `zj sessions show` has it."""
    done = zj("sessions", "show", response, "--json", "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    return next(turn for turn in json.loads(done.stdout)["turns"] if turn["response"] == response)


def prompt_of(server: Server, response: str) -> str:
    """What the model was told, as Markdown of the turn that asked it."""
    done = zj("sessions", "export", response, "--format", "md", "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- functions ----------------------------------------------------------------------------------------


def test_a_round_trip_in_the_older_spelling_is_replayed_as_it_was_sampled(
    server: Server, client: openai.OpenAI, ask: Any
) -> None:
    user: Any = {"role": "user", "content": ask("look around")}
    first = chat(client, [user], functions=FUNCTIONS)
    choice = first.choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None and choice.message.content == "Let me look."
    assert choice.message.function_call.name == "ls"
    assert json.loads(choice.message.function_call.arguments) == {"path": "harbour"}
    assert [call["result_seen"] for call in shown(server, first.id)["tool_calls"]] == [False]

    said = choice.message.model_dump(exclude_none=True)
    history = [user, said, {"role": "function", "name": "ls", "content": "boats. once more"}]
    second = chat(client, history, functions=FUNCTIONS)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert shown(server, second.id)["parent"] == first.id
    assert shown(server, first.id)["tool_calls"][0]["result_seen"]

    # After a restart, and two calls of the same function later, all of it is known still.
    server.restart()
    again = second.choices[0].message.model_dump(exclude_none=True)
    history += [again, {"role": "function", "name": "ls", "content": "boats. what is there"}]
    third = chat(client, history, functions=FUNCTIONS, function_call="none")
    assert third.choices[0].message.content == "Three boats."
    assert third.choices[0].finish_reason == "stop"
    assert shown(server, third.id)["parent"] == second.id
    forks = [fact.forks for fact in happened(server.data_dir, events.RequestAccepted) if fact.response == third.id]
    assert forks == [()], "what the client sent back is what it was told"


def test_a_stream_in_the_older_spelling_accumulates(server: Server, client: openai.OpenAI, ask: Any) -> None:
    user: Any = {"role": "user", "content": ask("look around")}
    name, arguments, reasons = "", "", []
    for chunk in chat(client, [user], functions=FUNCTIONS, stream=True):
        (part,) = chunk.choices
        reasons.append(part.finish_reason)
        if part.delta.function_call is not None:
            name += part.delta.function_call.name or ""
            arguments += part.delta.function_call.arguments or ""
    assert (name, json.loads(arguments)) == ("ls", {"path": "harbour"})
    assert reasons[-1] == "function_call"


def test_a_named_function_is_called_and_none_is_none(server: Server, client: openai.OpenAI, ask: Any) -> None:
    user: Any = {"role": "user", "content": ask("look around")}
    never = chat(client, [user], functions=FUNCTIONS, function_call="none").choices[0]
    assert never.message.function_call is None and "<tool_call>" in never.message.content
    called = chat(client, [user], functions=FUNCTIONS, function_call={"name": "ls"}).choices[0]
    assert called.message.function_call.name == "ls" and called.finish_reason == "function_call"


def test_a_session_in_the_older_spelling_goes_to_another_journal(
    server: Server, client: openai.OpenAI, ask: Any, tmp_path: Path
) -> None:
    user: Any = {"role": "user", "content": ask("look around")}
    first = chat(client, [user], functions=FUNCTIONS)
    said = first.choices[0].message.model_dump(exclude_none=True)
    history = [user, said, {"role": "function", "name": "ls", "content": "boats. once more"}]
    file = tmp_path / "session.jsonl"
    where = ("--data-dir", str(server.data_dir))
    assert zj("sessions", "export", first.id, "-o", str(file), *where).returncode == 0
    came = zj("sessions", "import", str(file), "--data-dir", str(tmp_path / "data"))
    assert came.returncode == 0, came.stderr
    with Server(tmp_path / "data", model=scripted(tmp_path, *saying(SAID, 2))) as other:
        body = {"model": "default", "messages": history, "functions": FUNCTIONS}
        after = other.post("/v1/chat/completions", body).json()["id"]
        assert shown(other, after)["parent"] == first.id
        assert shown(other, first.id)["tool_calls"][0]["result_seen"]
    verify(tmp_path / "data")


# --- what is no text ----------------------------------------------------------------------------------


def test_images_files_and_sounds_are_a_few_words_to_a_text_model(
    server: Server, client: openai.OpenAI, ask: Any
) -> None:
    parts: Any = [
        {"type": "text", "text": "See: "},
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/boat.png"}},
        {"type": "file", "file": {"file_data": base64.b64encode(b"log").decode(), "filename": "a.txt"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"sea").decode(), "format": "wav"}},
        {"type": "text", "text": ask("say it")},
    ]
    answer = chat(client, [{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "Ahoy."
    told = prompt_of(server, answer.id)
    assert f"See: {SHOWN}[image: not fetched, sha256 of its address " in told
    assert blobs.placeholder("file", "", b"log") in told and blobs.placeholder("audio", "audio/wav", b"sea") in told
    assert base64.b64encode(PNG).decode() not in told
    assert answer.usage.prompt_tokens < 400


def test_a_tool_may_answer_with_an_image(server: Server, client: openai.OpenAI, ask: Any) -> None:
    tools: Any = [{"type": "function", "function": FUNCTIONS[0]}]
    user: Any = {"role": "user", "content": ask("look around")}
    first = chat(client, [user], tools=tools)
    message = first.choices[0].message
    result: Any = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": [
            {"type": "image_url", "image_url": {"url": DATA_URL}},
            {"type": "text", "text": "what is there"},
        ],
    }
    second = chat(client, [user, message.model_dump(exclude_none=True), result], tools=tools, tool_choice="none")
    assert second.choices[0].message.content == "Three boats."
    assert f"{SHOWN}what is there" in prompt_of(server, second.id)


def test_an_image_that_is_sent_again_and_again_is_stored_once(server: Server, client: openai.OpenAI, ask: Any) -> None:
    """The bytes of a journal follow what is new, also where a client resends a picture with each request."""
    picture = base64.b64encode(random.Random(7).randbytes(200_000)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    messages: list[Any] = [{"role": "user", "content": [image, {"type": "text", "text": ask("say it")}]}]

    def journal_bytes() -> int:
        done = zj("journal", "stats", "--json", "--data-dir", str(server.data_dir))
        assert done.returncode == 0, done.stderr
        return sum(kind["bytes"] for kind in json.loads(done.stdout)["contents"].values())

    for turn in range(4):
        answer = chat(client, messages).choices[0].message
        if turn == 0:
            before = journal_bytes()
        messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": "say it"}]
    assert journal_bytes() - before < 20_000


# --- answers that go on -------------------------------------------------------------------------------


def test_an_answer_goes_on_with_the_last_message_if_it_is_asked_to(
    server: Server, client: openai.OpenAI, ask: Any
) -> None:
    messages: Any = [{"role": "user", "content": ask("say it")}, {"role": "assistant", "content": "Well, say it"}]
    own = chat(client, messages)
    more = chat(client, messages, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert own.choices[0].message.content == more.choices[0].message.content == "Ahoy."
    assert more.usage.prompt_tokens < own.usage.prompt_tokens, "no turn was closed and none was opened"
