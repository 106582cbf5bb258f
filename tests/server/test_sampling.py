"""Sampling through the whole of it, with the official client and SmolLM2: settings, logprobs, speculation, restarts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.test_restart import verify
from tests.serving import Server

ASK = "Say what a tide is, in one line."
MESSAGES = [{"role": "user", "content": ASK}]
ECHO = [
    {"role": "user", "content": "Repeat: " + "one red fish, two blue fish, " * 6},
    {"role": "assistant", "content": "one red fish, two blue fish, one red fish,"},
    {"role": "user", "content": "Go on, repeat it ten times."},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sampling")
    with Server(folder / "data", "--speculation", "5") as running:
        yield running
        running.kill()
        verify(folder / "data")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0)


def chat(client: openai.OpenAI, **settings: Any) -> Any:
    asked = {"messages": MESSAGES, "temperature": 0, "max_tokens": 16, **settings}
    return client.chat.completions.create(model="smollm2", **asked)


def text(answer: Any) -> str:
    return answer.choices[0].message.content


def tokens(answer: Any) -> list[str]:
    return [one.token for one in answer.choices[0].logprobs.content]


# --- logprobs -----------------------------------------------------------------------------------------


def test_logprobs_of_chat_are_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {"logprobs": True, "top_logprobs": 4, "temperature": 0.9, "seed": 5}
    whole = chat(client, **asked).choices[0]
    found = whole.logprobs.content
    assert "".join(bytes(one.bytes).decode() for one in found) == whole.message.content
    assert len(found) in (15, 16)  # an end token has none
    for one in found:
        assert len(one.top_logprobs) == 4
        values = [other.logprob for other in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert one.logprob <= values[0] <= 0
        assert sum(map(math.exp, values)) <= 1 + 1e-6
    chunks = list(chat(client, stream=True, **asked))
    streamed = [
        one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content
    ]
    assert streamed == found


def test_logprobs_of_responses_are_the_same_streamed_whole_and_after_a_restart(
    server: Server, client: openai.OpenAI
) -> None:
    asked = {
        "model": "smollm2",
        "input": "Say hello.",
        "temperature": 0,  # it ends by itself, which the client's accumulator waits for
        "max_output_tokens": 400,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    with client.responses.stream(**asked) as stream:
        deltas = [one for event in stream if event.type == "response.output_text.delta" for one in event.logprobs]
        final = stream.get_final_response()
    whole = client.responses.create(**asked)
    part = final.output[0].content[0]
    assert part.logprobs == whole.output[0].content[0].logprobs
    assert [(one.token, one.logprob) for one in deltas] == [(one.token, one.logprob) for one in part.logprobs]
    assert "".join(one.token for one in part.logprobs) == final.output_text
    assert final.top_logprobs == 2
    server.restart()
    assert client.responses.retrieve(whole.id).output == whole.output
    assert client.responses.retrieve(final.id).output[0].content[0].logprobs == part.logprobs


def test_without_asking_there_are_none(client: openai.OpenAI) -> None:
    assert chat(client).choices[0].logprobs is None
    answer = client.responses.create(model="smollm2", input=ASK, temperature=0, max_output_tokens=4)
    assert answer.output[0].content[0].logprobs == []


def test_greedy_takes_the_likeliest(client: openai.OpenAI) -> None:
    for one in chat(client, logprobs=True, top_logprobs=1).choices[0].logprobs.content:
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, one.top_logprobs[0].logprob)


# --- settings -----------------------------------------------------------------------------------------


def ids_of(server: Server, answer: Any) -> list[int]:
    """The ids of an answer's tokens, by their bytes: the vocabulary is the embedded model's."""
    from zjournal.checkpoint.gguf import read_header
    from zjournal.checkpoint.locate import locate
    from zjournal.checkpoint.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_header(read_header(locate(None, server.data_dir).path))
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    return [by_bytes[bytes(one.bytes)] for one in answer.choices[0].logprobs.content]


def test_a_bias_bans_and_forces(server: Server, client: openai.OpenAI) -> None:
    plain = chat(client, logprobs=True)
    first = ids_of(server, plain)[0]
    banned = chat(client, logprobs=True, logit_bias={str(first): -100})
    assert first not in ids_of(server, banned)
    forced = chat(client, logprobs=True, logit_bias={str(first): 100}, max_tokens=5)
    assert ids_of(server, forced) == [first] * 5
    # What is told is the model's own distribution: the bias does not show in it.
    assert forced.choices[0].logprobs.content[0].logprob == plain.choices[0].logprobs.content[0].logprob


def test_penalties_end_a_repetition(client: openai.OpenAI) -> None:
    asked = {"messages": ECHO, "max_tokens": 40, "logprobs": True}

    def most_often(**settings: Any) -> int:
        return max(Counter(tokens(chat(client, **asked, **settings))).values())

    plain = most_often()
    assert most_often(frequency_penalty=2, presence_penalty=2) < plain / 2
    assert most_often(extra_body={"repetition_penalty": 3.0}) < plain / 2


def test_min_tokens_holds_the_end_back(client: openai.OpenAI) -> None:
    asked = {"messages": [{"role": "user", "content": "Say only: hello"}], "max_tokens": 60}
    short = chat(client, **asked)
    assert short.choices[0].finish_reason == "stop"
    wanted = short.usage.completion_tokens + 7
    longer = chat(client, **asked, extra_body={"min_tokens": wanted})
    assert longer.usage.completion_tokens >= wanted
    assert text(longer).startswith(text(short))


def test_a_seed_decides(client: openai.OpenAI) -> None:
    asked = {"temperature": 1.2, "extra_body": {"top_k": 50, "min_p": 0.01}}
    texts = [text(chat(client, seed=seed, **asked)) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_a_stop_string_over_token_boundaries_cuts_text_and_logprobs(client: openai.OpenAI) -> None:
    plain = chat(client, logprobs=True)
    said = tokens(plain)
    stop = (said[2] + said[3])[1:-1]  # begins within one token and ends within the next
    cut = chat(client, logprobs=True, stop=["never said", stop])
    assert cut.choices[0].finish_reason == "stop"
    assert text(cut) == text(plain)[: text(plain).index(stop)]
    assert "".join(tokens(cut))[: len(text(cut))] == text(cut)
    assert tokens(cut) == said[: len(tokens(cut))]
    assert len(tokens(cut)) <= 3


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"logit_bias": {"49152": 1}}, "logit_bias.49152"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"extra_body": {"min_tokens": 17}}, "min_tokens"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"n": 17}, "n"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(client: openai.OpenAI, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **settings)
    assert caught.value.param == param


# --- speculation --------------------------------------------------------------------------------------


def test_speculation_changes_no_token_and_no_logprob(server: Server, client: openai.OpenAI) -> None:
    asked: list[dict[str, Any]] = [
        {"messages": ECHO, "max_tokens": 48},
        {"messages": ECHO, "max_tokens": 48, "temperature": 0.7, "seed": 3},
        {"messages": ECHO, "max_tokens": 48, "temperature": 0.7, "seed": 4, "frequency_penalty": 0.2},
        {"messages": ECHO, "max_tokens": 48, "stop": ["blue fish, one"]},
    ]

    def told() -> list[Any]:
        answers = [chat(client, logprobs=True, top_logprobs=2, **one) for one in asked]
        return [(answer.choices[0], answer.usage.completion_tokens) for answer in answers]

    with_guesses = told()
    flags = server.flags
    server.flags = [*flags[: flags.index("--speculation")], "--speculation", "0"]
    server.restart()
    assert told() == with_guesses
    server.flags = flags
    server.restart()
