"""Server-sent events: the bytes of a frame, and the ASGI answer that sends them until the client leaves.

One event is one send: there are clients whose reader forgets half an event between two network chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from litestar.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects the stream would undo it
]

T = TypeVar("T")


CONNECTION = "zj_connection"  # key of the ASGI scope: what may have a `cut`
# Likewise: the server's own `send`. What the layers between do to an answer is done at its start; a frame needs none of
# it, and there are ten thousand a second of them.
DIRECT = "zj_direct"


class Cut(NamedTuple):
    """A client was cut because it did not read."""

    unread: int  # bytes that were made and not taken
    silent_s: float  # since the last byte that it took


class ClientGone(Exception):
    """The client closed the connection before the answer was whole. Nobody reads what is sent now."""


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event; `data` is JSON and so holds no line break."""
    if event is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end and returns its value; cancels it and raises ClientGone if the client leaves first.

    The request body must have been read: what `receive` gives from then on is the disconnect. On any way out,
    `work` has ended.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI answer of `frames`. Calls `abandon` once if it ends before the frames do, whatever the cause.

    A client that lags behind gets its frames later; nobody but this stream waits for it. `cut` hears before `abandon`
    of one that did not read at all.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        abandon: Callable[[], None],
        cut: Callable[[Cut], None] | None = None,
    ) -> None:
        self._frames = frames
        self._abandon = abandon
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            direct: Any = scope.get(DIRECT, send)
            await until_gone(receive, self._pump(direct))
            whole = True
        except ClientGone:
            pass
        finally:
            cut = getattr(scope.get(CONNECTION), "cut", None)
            if cut is not None and self._cut is not None:
                self._cut(cut)
            if not whole or cut is not None:  # what is sent to nobody is sent at once
                self._abandon()

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self._frames) as frames:
            async for data in frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
