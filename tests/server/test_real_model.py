"""SmolLM2 behind the real server: reuse, chains, SDK streams. One server for the module; loading costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.test_restart import verify
from tests.server.test_snapshots_real import wait_written
from tests.serving import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("real")
    # What a busy machine measures of its disk must not decide what is tested.
    with Server(folder / "data", "--snapshot-restore", "always") as running:
        yield running
        running.kill()
        verify(folder / "data")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0)


def test_the_second_turn_prefills_only_what_is_new(server: Server) -> None:
    first = server.respond(input="Name three harbours. " * 20, temperature=0, max_output_tokens=16)
    second = server.respond(input="Why?", temperature=0, max_output_tokens=8, previous_response_id=first["id"])
    usage = second["usage"]
    resident = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    # All but the last sampled token have their KV computed; what follows it is new.
    assert usage["input_tokens_details"]["cached_tokens"] >= resident - 2
    assert usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"] < 24


def test_a_resent_chat_history_is_recognised(server: Server) -> None:
    """Chat has no ids: the reply's text finds the sampled tokens, however they would be encoded anew."""
    messages = [{"role": "user", "content": "Write one line about the sea."}]
    body = {"model": "default", "messages": messages, "max_tokens": 24, "temperature": 0.8, "seed": 11}
    first = server.post("/v1/chat/completions", body).json()
    reply = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Another."}]
    second = server.post("/v1/chat/completions", body).json()
    resident = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= resident - 2


def test_greedy_is_the_same_cold_warm_and_after_a_restart(server: Server) -> None:
    ask = {"input": "The capital of France is", "temperature": 0, "max_output_tokens": 24}
    cold = server.respond(**ask)
    warm = server.respond(**ask)
    assert warm["usage"]["input_tokens_details"]["cached_tokens"] > 0
    wait_written(server, warm["id"], warm["usage"]["total_tokens"] - 1)
    server.restart()
    again = server.respond(**ask)
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0, "read back from disk"
    texts = {body["output"][0]["content"][0]["text"] for body in (cold, warm, again)}
    assert len(texts) == 1


def test_a_seed_decides_the_sample(server: Server) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "Invent a name."}], "max_tokens": 12}
    texts = [
        server.post("/v1/chat/completions", body | {"seed": seed}).json()["choices"][0]["message"]["content"]
        for seed in (1, 1, 2, 3)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_the_sdk_streams_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Say hello."}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens <= 12
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")


def test_the_sdk_accumulates_a_responses_stream(client: openai.OpenAI) -> None:
    # Greedy, for a sampled answer may run into the limit, and then `incomplete` is the right end.
    with client.responses.stream(model="smollm2", input="Say hello.", temperature=0, max_output_tokens=400) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_stop_strings_end_at_the_string(server: Server) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "Count from one to ten in digits."}]}
    whole = server.post("/v1/chat/completions", body | {"max_tokens": 40, "temperature": 0}).json()
    text = whole["choices"][0]["message"]["content"]
    stop = text[4:9]
    cut = server.post("/v1/chat/completions", body | {"max_tokens": 40, "temperature": 0, "stop": [stop]}).json()
    assert cut["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]


def test_r06_a_prompt_over_the_context_is_refused_not_cut(server: Server) -> None:
    """Field report R06."""
    answer = server.post("/v1/responses", {"model": "default", "input": "harbour " * 9000})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "input"
    chat = {"model": "default", "messages": [{"role": "user", "content": "harbour " * 9000}]}
    error = server.post("/v1/chat/completions", chat).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
