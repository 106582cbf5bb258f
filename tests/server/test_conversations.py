"""Conversation objects end to end, with the official SDK: items, responses in them, restarts, deletion."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.test_restart import verify
from tests.serving import Server, scripted, zj


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("conversations")
    turns: list[dict[str, Any]] = [{"text": "Slow.", "delay_ms": 1000, "when": "say slowly"} for _ in range(9)]
    with Server(folder / "data", model=scripted(folder, *turns, {"text": "Fine."})) as running:
        yield running
        running.kill()
        verify(folder / "data")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0)


def texts(client: openai.OpenAI, name: str) -> list[str]:
    return [item.content[0].text for item in client.conversations.items.list(name, limit=2, order="asc")]


def test_responses_in_a_conversation_answer_all_that_is_in_it_also_after_a_restart(
    server: Server, client: openai.OpenAI
) -> None:
    made = client.conversations.create(items=[{"role": "user", "content": "I am Ann."}], metadata={"boat": "Osprey"})
    assert made.id.startswith("conv_")
    assert made.metadata == {"boat": "Osprey"}
    first = client.responses.create(model="default", input="Hello.", conversation=made.id)
    assert first.conversation.id == made.id
    assert texts(client, made.id) == ["I am Ann.", "Hello.", "Fine."]
    server.restart()
    assert client.conversations.retrieve(made.id) == made
    assert client.responses.retrieve(first.id).model_dump(warnings=False) == first.model_dump(warnings=False)
    counted = client.responses.input_tokens.count(input="And now?", conversation=made.id)
    with client.responses.stream(model="default", input="And now?", conversation=made.id) as stream:
        second = stream.until_done().get_final_response()
    assert counted.input_tokens == second.usage.input_tokens
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert texts(client, made.id) == ["I am Ann.", "Hello.", "Fine.", "And now?", "Fine."]
    third = client.responses.create(model="default", input="So?", conversation={"id": made.id})
    begun = second.usage.input_tokens + second.usage.output_tokens - 2
    assert third.usage.input_tokens_details.cached_tokens >= begun, "our answers are replayed as they were sampled"


def test_items_are_added_asked_for_and_removed(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    assert made.metadata == {}
    added = client.conversations.items.create(
        made.id, items=[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    )
    assert [item.role for item in added.data] == ["user", "assistant"]
    response = client.responses.create(model="default", input="three", conversation=made.id)
    assert texts(client, made.id) == ["one", "two", "three", "Fine."]
    assert client.conversations.items.retrieve(added.last_id, conversation_id=made.id).id == added.last_id
    client.conversations.items.delete(added.first_id, conversation_id=made.id)
    client.conversations.items.delete(response.output[0].id, conversation_id=made.id)
    assert texts(client, made.id) == ["two", "three"]
    client.responses.delete(response.id)
    assert texts(client, made.id) == ["two"]
    assert client.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(added.first_id, conversation_id=made.id)
    with pytest.raises(openai.BadRequestError) as fault:
        client.conversations.items.create(made.id, items=[{"role": "nobody", "content": "x"}])  # type: ignore[list-item]
    assert fault.value.param == "items[0].role"
    with pytest.raises(openai.BadRequestError) as fault:
        client.conversations.items.create(made.id, items=[{"role": "user", "content": "x"}] * 21)
    assert fault.value.param == "items"


def test_what_was_deleted_is_gone_for_good(server: Server, client: openai.OpenAI) -> None:
    secret = "The password of the harbour is heron-7731."
    made = client.conversations.create(items=[{"role": "user", "content": secret}], metadata={"note": "heron-7731"})
    assert client.conversations.delete(made.id).deleted
    for _ in range(2):
        for request in (
            lambda: client.conversations.retrieve(made.id),
            lambda: client.conversations.delete(made.id),
            lambda: client.responses.create(model="default", input="x", conversation=made.id),
            lambda: client.conversations.items.create(made.id, items=[{"role": "user", "content": "x"}]),
        ):
            with pytest.raises(openai.NotFoundError):
                request()
        server.restart()
    for file in server.data_dir.glob("journal.db*"):
        assert b"heron-7731" not in file.read_bytes(), file


def test_nothing_else_is_added_while_a_response_is_made(client: openai.OpenAI) -> None:
    made = client.conversations.create()

    def respond() -> str:
        try:
            return client.responses.create(model="default", input="say slowly", conversation=made.id).id
        except openai.BadRequestError as fault:
            assert fault.param == "conversation"
            return ""

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        made_in_it = [found for found in pool.map(lambda _: respond(), range(3)) if found]
    assert len(made_in_it) == 1
    assert texts(client, made.id) == ["say slowly", "Slow."]


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"conversation": "conv_0"}, "conversation", 404),
        ({"conversation": "conv_0", "previous_response_id": "resp_0"}, "previous_response_id", 400),
        ({"conversation": "CONV", "store": False}, "store", 400),
        ({"conversation": "CONV", "input": []}, "input", 400),
        ({"conversation": 7}, "conversation", 400),
    ],
)
def test_what_is_wrong_is_named(
    server: Server, client: openai.OpenAI, body: dict[str, Any], param: str, status: int
) -> None:
    name = client.conversations.create().id
    told = {key: name if value == "CONV" else value for key, value in body.items()}
    answer = server.post("/v1/responses", {"model": "default", "input": "x", **told})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_conversation_belongs_to_its_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one: sk-one-0123456789\ntwo: sk-two-0123456789\n")
    keys.chmod(0o600)
    with Server(tmp_path / "data", "--api-key-file", str(keys), model=scripted(tmp_path, {"text": "Fine."})) as server:
        one, two = ({"authorization": f"Bearer sk-{name}-0123456789"} for name in ("one", "two"))
        name = server.post("/v1/conversations", {}, headers=one).json()["id"]
        unknown = server.http.get("/v1/conversations/conv_0", headers=two)
        foreign = server.http.get(f"/v1/conversations/{name}", headers=two)
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.text.replace(name, "") == unknown.text.replace("conv_0", "")
        assert server.http.delete(f"/v1/conversations/{name}", headers=two).status_code == 404
        assert server.http.get(f"/v1/conversations/{name}", headers=one).status_code == 200


def test_an_export_says_that_a_conversation_is_not_in_it(server: Server, client: openai.OpenAI) -> None:
    alone = client.responses.create(model="default", input="No conversation here.")
    made = client.conversations.create()
    inside = client.responses.create(model="default", input="One conversation here.", conversation=made.id)
    where = ("--data-dir", str(server.data_dir))
    done = zj("sessions", "export", inside.id, *where)
    assert done.returncode == 0
    assert "a conversation of /v1/conversations with turns of this session: no list is in the file" in done.stderr
    assert not zj("sessions", "export", alone.id, *where).stderr
    client.conversations.delete(made.id)
    assert not zj("sessions", "export", inside.id, *where).stderr
