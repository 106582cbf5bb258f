"""The answer of a stream: its head goes through every layer, its frames go straight to the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from zjournal.api.guard import Edge, Neighbours
from zjournal.api.metrics import Metrics
from zjournal.api.sse import EventStream

FRAMES = [b"data: 1\n\n", b"data: 2\n\n"]


async def frames() -> AsyncGenerator[bytes, None]:
    for frame in FRAMES:
        yield frame


def answered(method: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What the connection is sent, and what a layer between the guard and the stream has seen of it."""
    sent: list[dict[str, Any]] = []
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def between(message: Any) -> None:
            seen.append(message["type"])
            await send(message)

        await EventStream(frames(), lambda: None)(scope, receive, between)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    edge = Edge(app, Neighbours("127.0.0.1", 80), Metrics(), nothing)
    scope: Any = {"type": "http", "method": method, "path": "/v1/responses/r", "headers": [(b"host", b"localhost")]}
    asyncio.run(edge(scope, receive, send))
    return sent, seen


def test_frames_pass_no_layer_and_the_head_passes_all() -> None:
    sent, seen = answered("GET")
    assert seen == ["http.response.start"]
    assert b"x-request-id" in dict(sent[0]["headers"])
    assert [message["body"] for message in sent[1:]] == [*FRAMES, b""]


def test_head_has_no_body() -> None:
    sent, _ = answered("HEAD")
    assert b"x-request-id" in dict(sent[0]["headers"])
    assert {message["body"] for message in sent[1:]} == {b""}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_last_part_ends_the_answer(method: str) -> None:
    sent, _ = answered(method)
    assert [message["more_body"] for message in sent[1:]] == [True, True, False]
