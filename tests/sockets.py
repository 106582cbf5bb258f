"""A socket of Responses for tests: asks, and gathers the events of an answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from websockets.exceptions import InvalidStatus
from websockets.http11 import Response
from websockets.sync.client import ClientConnection, connect

WAIT_S = 60.0
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class Socket:
    """One open socket. Use as a context manager."""

    def __init__(
        self,
        port: int,
        headers: Mapping[str, str] | None = None,
        compression: str | None = "deflate",
        path: str = "/v1/responses",
        **settings: Any,
    ) -> None:
        self._open = connect(
            f"ws://127.0.0.1:{port}{path}",
            additional_headers=dict(headers or {}),
            compression=compression,
            open_timeout=WAIT_S,
            max_size=None,
            proxy=None,
            **settings,
        )
        self.connection: ClientConnection = self._open.__enter__()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.__exit__(None, None, None)

    def leave(self) -> None:
        """Is gone at once, without a word."""
        self.connection.socket.shutdown(socket.SHUT_RDWR)
        self.connection.socket.close()

    def send(self, **message: Any) -> None:
        self.connection.send(json.dumps(message))

    def ask(self, **body: Any) -> None:
        """Sends a `response.create`."""
        self.send(type="response.create", **{"model": "default", **body})

    def event(self) -> dict[str, Any]:
        """The next message."""
        told = self.connection.recv(WAIT_S)
        assert isinstance(told, str), "everything is told as text"
        return json.loads(told)

    def events(self) -> Iterator[dict[str, Any]]:
        """Messages up to the end of an answer."""
        while True:
            event = self.event()
            yield event
            if event["type"] in ENDS:
                return

    def answer(self, **body: Any) -> list[dict[str, Any]]:
        """Asks, and gives the events of the answer."""
        self.ask(**body)
        return list(self.events())

    def respond(self, **body: Any) -> dict[str, Any]:
        """Asks, and gives the whole response; it must be completed."""
        last = self.answer(**body)[-1]
        assert last["type"] == "response.completed", last
        return last["response"]

    def refused(self, **body: Any) -> dict[str, Any]:
        """Asks for what is refused, and gives the only message about it."""
        (told,) = self.answer(**body)
        assert told["type"] == "error", told
        return told


def refusal(port: int, path: str = "/v1/responses", **headers: str) -> Response:
    """The answer to an upgrade that is refused."""
    try:
        Socket(port, {name.replace("_", "-"): value for name, value in headers.items()}, path=path).connection.close()
    except InvalidStatus as refused:
        return refused.response
    raise AssertionError("it was not refused")


def alike(value: Any, names: dict[str, str] | None = None) -> Any:
    """Events or a response with what differs from one asking to the next made equal: ids by their first place, times.

    So two answers to one request compare whole, with all their fields and counts.
    """
    known = {} if names is None else names
    if isinstance(value, list):
        return [alike(one, known) for one in value]
    if not isinstance(value, dict):
        return value
    told = {}
    for key, one in value.items():
        if key in ("id", "item_id", "call_id", "response_id") and isinstance(one, str):
            told[key] = known.setdefault(one, f"{one.split('_')[0]} {len(known)}")
        elif key in ("created_at", "completed_at"):
            told[key] = one is not None
        else:
            told[key] = alike(one, known)
    return told
