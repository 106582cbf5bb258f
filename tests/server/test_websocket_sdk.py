"""Responses over WebSocket with the official SDK: `client.responses.connect()` against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from openai.types.websocket_reconnection import ReconnectingEvent, ReconnectingOverrides

from tests.server.test_restart import verify
from tests.serving import Server, saying, scripted

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
TOOL: Any = {"type": "function", "name": "ls", "parameters": {"type": "object"}, "strict": False}


def address(server: Server) -> dict[str, Any]:
    return {"base_url": f"http://127.0.0.1:{server.port}/v1", "api_key": "unused", "max_retries": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("websocket_sdk")
    model = scripted(folder, *saying({"look around": CALL}, 20), {"text": "Fine."})
    with Server(folder / "data", model=model) as running:
        yield running
        running.kill()
        verify(folder / "data")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(**address(server))


def events(connection: Any) -> list[Any]:
    """The events up to the end of an answer."""
    found: list[Any] = []
    while not found or found[-1].type not in ENDS:
        found.append(connection.recv())
    return found


def whole(connection: Any, **body: Any) -> Response:
    connection.response.create(model="default", **body)
    last = events(connection)[-1]
    assert last.type == "response.completed", last
    response: Response = last.response
    return response


def test_a_round_with_a_tool(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        first = whole(connection, input="look around", tools=[TOOL], store=False)
        (call,) = [item for item in first.output if item.type == "function_call"]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "README.md"}
        second = whole(connection, input=[result], tools=[TOOL], store=False, previous_response_id=first.id)
        assert second.usage is not None and first.usage is not None
        assert second.usage.input_tokens > first.usage.total_tokens


def test_a_connection_is_an_iterator_of_the_same_events_as_the_stream(client: openai.OpenAI) -> None:
    streamed = [event.type for event in client.responses.create(model="default", input="hello", stream=True)]
    told = []
    with client.responses.connect() as connection:
        connection.response.create(model="default", input="hello")
        for event in connection:
            told.append(event.type)
            if event.type in ENDS:
                break
    assert told == streamed


def test_handlers_hear_of_events_and_errors(client: openai.OpenAI) -> None:
    heard: list[Any] = []
    with client.responses.connect() as connection:
        connection.on("response.completed", lambda event: connection.response.create(model="nobody", input="x"))

        def failed(event: Any) -> None:
            heard.append(event)
            connection.close()

        connection.on("error", failed)
        connection.response.create(model="default", input="hello")
        connection.dispatch_events()
    (error,) = heard
    assert (error.status, error.error.code, error.error.param) == (404, "model_not_found", "model")


def test_steering_is_refused_by_its_own_event(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        told = whole(connection, input="hello")
        connection.response.steer(input="wait", previous_response_id=told.id)
        refused = connection.recv()
        assert refused.type == "response.steer.failed"
        assert refused.error.code == "steering_not_supported" and refused.steer.input == "wait"


def test_after_a_restart_it_connects_again_and_goes_on_with_what_was_stored(tmp_path: Path) -> None:
    codes: list[int] = []
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "Fine."})) as server:
        client = openai.OpenAI(**address(server))

        def again(event: ReconnectingEvent) -> ReconnectingOverrides | None:
            codes.append(event.close_code)
            server.start()
            connection.response.create(model="default", input="and?", previous_response_id=told[0].id)
            return None

        told: list[Response] = []
        with client.responses.connect(on_reconnecting=again) as connection:
            connection.response.create(model="default", input="hello")
            for event in connection:
                if event.type == "response.completed":
                    told.append(event.response)
                    if len(told) == 2:
                        break
                    assert server.terminate() == 0
        first, second = told
        assert second.previous_response_id == first.id and second.output_text == "Fine."
    assert codes == [1012]


def test_the_asynchronous_client(server: Server) -> None:
    async def main() -> str:
        async with openai.AsyncOpenAI(**address(server)) as client, client.responses.connect() as connection:
            await connection.response.create(model="default", input="hello", store=False)
            async for event in connection:
                if event.type == "response.completed":
                    return event.response.output_text
        raise AssertionError("it did not end")

    assert asyncio.run(main()) == "Fine."


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_wrong_key_is_refused_at_the_upgrade(tmp_path: Path, key: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:alice-key-0123456789\n")
    keys.chmod(0o600)
    with Server(tmp_path / "data", "--api-key-file", str(keys), model=scripted(tmp_path, {"text": "Ok."})) as server:
        refused = openai.OpenAI(**(address(server) | {"api_key": key or "none"}))
        with pytest.raises(Exception, match="401"), refused.responses.connect():
            pass
        known = openai.OpenAI(**(address(server) | {"api_key": "alice-key-0123456789"}))
        with known.responses.connect() as connection:
            assert whole(connection, input="hello").output_text == "Ok."
