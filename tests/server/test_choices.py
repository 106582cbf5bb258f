"""Several choices in Chat, with the official client: each is a response of its own, and they share what they are asked.

The model is SmolLM2 where seeds matter, and scripted where the course does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.test_restart import verify
from tests.serving import Server, hanging, happened, saying, scripted, until, zj
from zjournal.ask import CHOICES_MAX
from zjournal.journal import events
from zjournal.sessions import sampling

LONG = "The tide at the old harbour is low in the morning, and " * 20
TOOLS: Any = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
RED, BLUE = "A red boat.", "A blue boat."
SLOW = "word " * 500


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every answer is the next one of its words; those who come at the same time get them in turn."""
    folder = tmp_path_factory.mktemp("choices")
    turns = [{"text": text, "when": "paint one"} for _ in range(12) for text in (RED, BLUE)]
    turns += saying({"what next": "Go on.", "call it": CALL}, 40)
    turns += [{"text": SLOW, "when": "take your time", "delay_ms": 10} for _ in range(12)]
    with Server(folder / "data", model=scripted(folder, *turns)) as running:
        yield running
        running.kill()
        verify(folder / "data")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0)


def shown(server: Server, response: str) -> dict[str, Any]:
    """A response's session, as `zj sessions show` has it."""
    done = zj("sessions", "show", response, "--json", "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def accepted(server: Server, first: str) -> list[events.RequestAccepted]:
    """The acceptances of all choices of a request, by index."""
    facts = [fact for fact in happened(server.data_dir, events.RequestAccepted) if first in (fact.response, fact.first)]
    return sorted(facts, key=lambda fact: fact.choice)


def user(words: str) -> Any:
    return [{"role": "user", "content": words}]


def test_each_choice_is_a_response_of_its_own_and_the_prompt_is_read_once(
    server: Server, client: openai.OpenAI, ask: Any
) -> None:
    words = LONG + ask("paint one")
    whole = client.chat.completions.create(model="default", messages=user(words), n=4, seed=11)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert sorted(choice.message.content or "" for choice in whole.choices) == sorted([RED, BLUE] * 2)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    facts = accepted(server, whole.id)
    assert [(fact.choice, fact.first) for fact in facts] == [(0, ""), *((at, whole.id) for at in (1, 2, 3))]
    assert [fact.seed for fact in facts] == [sampling.choice_seed(11, at) for at in range(4)]
    assert facts[0].seed == 11 and len({fact.seed for fact in facts}) == 4
    assert len({fact.session for fact in facts}) == len({fact.record for fact in facts}) == 1
    turns = {turn["response"]: turn for turn in shown(server, whole.id)["turns"]}
    first, *others = [turns[fact.response] for fact in facts]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == first["prompt_tokens"]
    assert whole.usage.prompt_tokens_details.cached_tokens == first["cached_tokens"]
    assert whole.usage.completion_tokens == sum(turns[fact.response]["output_tokens"] for fact in facts)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    computed = [turn["prompt_tokens"] - turn["cached_tokens"] for turn in others]
    assert max(computed) <= 16, "all but the block that is being written is there already"
    assert [(turn["choice"], turn["choice_of"]) for turn in (first, *others)] == [
        (0, None),
        *((at, whole.id) for at in (1, 2, 3)),
    ]


def test_the_accumulator_of_the_sdk_takes_all_choices(server: Server, client: openai.OpenAI, ask: Any) -> None:
    options: Any = {"include_usage": True}
    with client.chat.completions.stream(
        model="default", messages=user(ask("paint one")), n=3, stream_options=options
    ) as stream:
        indexes = [choice.index for event in stream if event.type == "chunk" for choice in event.chunk.choices]
        final = stream.get_final_completion()
    assert indexes[:3] == [0, 1, 2], "the roles come first"
    assert [choice.index for choice in final.choices] == [0, 1, 2]
    assert {choice.message.content for choice in final.choices} <= {RED, BLUE}
    assert all(choice.finish_reason == "stop" for choice in final.choices)
    turns = shown(server, final.id)["turns"]
    assert final.usage is not None
    assert final.usage.completion_tokens == sum(turn["output_tokens"] for turn in turns)
    assert final.usage.prompt_tokens == turns[0]["prompt_tokens"]


def test_calls_of_the_choices_have_ids_of_their_own(server: Server, client: openai.OpenAI, ask: Any) -> None:
    words = ask("call it")
    whole = client.chat.completions.create(model="default", messages=user(words), tools=TOOLS, n=2)
    ids = []
    for choice in whole.choices:
        (call,) = choice.message.tool_calls or ()
        assert choice.finish_reason == "tool_calls"
        ids.append(call.id)
    assert len(set(ids)) == 2
    # Going on with either of them is a turn below it, and what it said is replayed as it was sampled.
    for choice, fact in zip(whole.choices, accepted(server, whole.id), strict=True):
        (call,) = choice.message.tool_calls or ()
        history: Any = [
            *user(words),
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "what next"},
        ]
        after = client.chat.completions.create(model="default", messages=history, tools=TOOLS)
        assert after.choices[0].message.content == "Go on."
        turns = {turn["response"]: turn for turn in shown(server, after.id)["turns"]}
        assert turns[after.id]["parent"] == fact.response
        assert [one["result_seen"] for one in turns[fact.response]["tool_calls"]] == [True]
    assert len(turns) == 4


def test_a_client_that_leaves_ends_all_of_them(server: Server, ask: Any) -> None:
    body = {"model": "default", "messages": user(ask("take your time")), "n": 3}
    with server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        seen: dict[int, int] = {}
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                seen[chunk["choices"][0]["index"]] = seen.get(chunk["choices"][0]["index"], 0) + 1
            if len(seen) == 3 and min(seen.values()) > 2:
                break
    until(lambda: [turn["status"] for turn in shown(server, chunk["id"])["turns"]] == ["cancelled"] * 3)
    before = len(happened(server.data_dir, events.RequestAccepted))
    with hanging(server, "/v1/chat/completions", body):
        until(lambda: len(happened(server.data_dir, events.RequestAccepted)) == before + 3)
    left = happened(server.data_dir, events.RequestAccepted)[before:]
    assert len(left) == 3
    until(lambda: [turn["status"] for turn in shown(server, left[0].response)["turns"][-3:]] == ["cancelled"] * 3)


def test_so_many_and_no_more(server: Server, client: openai.OpenAI, ask: Any) -> None:
    for wrong in (0, CHOICES_MAX + 1, -1):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="default", messages=user("paint one"), n=wrong)
        assert caught.value.param == "n"
    most = client.chat.completions.create(model="default", messages=user(ask("what next")), n=CHOICES_MAX)
    assert [choice.message.content for choice in most.choices] == ["Go on."] * CHOICES_MAX
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=user("paint one"), extra_body={"best_of": 2})
    assert caught.value.param == "best_of"


def test_the_commands_know_choices(server: Server, client: openai.OpenAI, ask: Any, tmp_path: Path) -> None:
    whole = client.chat.completions.create(model="default", messages=user(LONG + ask("paint one")), n=2)
    first, second = accepted(server, whole.id)
    where = ("--data-dir", str(server.data_dir))
    shows = zj("sessions", "show", whole.id, *where).stdout
    assert f"choice 1 of {whole.id}" in " ".join(shows.split())
    alike = zj("sessions", "diff", first.response, second.response, "--json", *where)
    assert alike.returncode == 0, alike.stderr
    alone = zj("sessions", "diff", second.response, *where)
    assert "is the first turn of its session" in alone.stderr, "choice 0 is not before choice 1"
    page = zj("sessions", "export", whole.id, "--format", "md", *where).stdout
    assert page.count(ask("paint one")) == 1 and f"choice 1 of {whole.id}" in page
    file = tmp_path / "session.jsonl"
    assert zj("sessions", "export", whole.id, "-o", str(file), *where).returncode == 0
    there = ("--data-dir", str(tmp_path / "other"))
    came = zj("sessions", "import", str(file), *there)
    assert came.returncode == 0, came.stderr
    kept = happened(tmp_path / "other", events.RequestAccepted)
    assert [(fact.response, fact.choice, fact.first, fact.seed) for fact in kept] == [
        (fact.response, fact.choice, fact.first, fact.seed) for fact in (first, second)
    ]
    verify(tmp_path / "other")


def test_each_choice_can_be_asked_again(server: Server, client: openai.OpenAI, ask: Any) -> None:
    whole = client.chat.completions.create(model="default", messages=user(ask("what next")), n=2)
    done = zj("replay", whole.id, "--json", "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [turn["status"] for turn in told["turns"]] == ["equal", "equal"]
    again = shown(server, told["replay"])["turns"]
    assert [(turn["choice"], turn["choice_of"]) for turn in again] == [(0, None)] * 2


def test_choices_that_ran_at_the_kill_are_failed_after_it(tmp_path: Path) -> None:
    turns = [{"text": SLOW, "delay_ms": 20} for _ in range(4)]
    turns += saying({"what next": "Go on."}, 2)
    with Server(tmp_path / "data", "--max-requests", "3", model=scripted(tmp_path, *turns)) as server:
        body = {"model": "default", "messages": user("go"), "n": 3, "stream": True}
        seen = server.events("/v1/chat/completions", body)
        first = next(chunk for chunk in seen if chunk["choices"][0]["delta"].get("content"))["id"]
        server.kill()
        seen.close()
        server.start()
        found = shown(server, first)["turns"]
        assert [turn["status"] for turn in found] == ["failed"] * 3
        assert [turn["choice"] for turn in found] == [0, 1, 2]
        after = server.post("/v1/chat/completions", {"model": "default", "messages": user("what next"), "n": 2})
        assert [choice["message"]["content"] for choice in after.json()["choices"]] == ["Go on."] * 2
        refused = server.post("/v1/chat/completions", {**body, "n": 4})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n"), "it could never be served"
    verify(tmp_path / "data")


def test_choices_that_are_not_stored_leave_nothing(tmp_path: Path) -> None:
    turns = saying({"what next": "Go on."}, 3)
    with Server(tmp_path / "data", "--unstored-retention", "0", model=scripted(tmp_path, *turns)) as server:
        body = {"model": "default", "messages": user("The osprey, what next"), "n": 3, "store": False}
        answer = server.post("/v1/chat/completions", body).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["Go on."] * 3
        until(lambda: len(happened(tmp_path / "data", events.PayloadErased)) == 3)
        erased = zj("journal", "verify", "--data-dir", str(tmp_path / "data"))
        assert "(3 erased)" in erased.stdout, erased.stdout + erased.stderr
        assert server.terminate() == 0
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file() and "journal.db" in path.name]
    assert files and not any(b"osprey" in path.read_bytes() for path in files)
    verify(tmp_path / "data")


# --- seeds and logprobs, with a model that has some ---------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("seeds")
    with Server(folder / "data") as running:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="unused", max_retries=0)
        running.kill()
        verify(folder / "data")


def test_a_choice_is_what_its_seed_would_say_alone(real: openai.OpenAI) -> None:
    asked: Any = {
        "model": "smollm2",
        "messages": user("Name a boat."),
        "temperature": 1.0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = real.chat.completions.create(**asked, n=3, seed=5)
    assert len({choice.message.content for choice in whole.choices}) > 1
    for choice in whole.choices:
        seed = sampling.choice_seed(5, choice.index)
        (alone,) = real.chat.completions.create(**asked, seed=seed).choices
        assert alone.message.content == choice.message.content
        assert alone.logprobs == choice.logprobs
        assert choice.logprobs is not None and choice.logprobs.content
    again = real.chat.completions.create(**asked, n=3, seed=5, stream=True)
    texts = ["", "", ""]
    for chunk in again:
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
