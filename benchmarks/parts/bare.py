"""The bare transport: Litestar and uvicorn as the server has them, with frames that lie ready. The peer of streams.

    python benchmarks/parts/bare.py PORT FRAMES

Every POST is answered with the frames of the file, one send each, as fast as they go; what a socket sends is answered
with their data, one message each, and it is the client that closes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn
import uvloop
from litestar import Litestar, Request, post
from litestar.types import ASGIApp, Receive, Scope, Send

BREAK = b"\n\n"


def frames(path: Path) -> list[bytes]:
    """The frames of a stream that was recorded."""
    return [frame + BREAK for frame in path.read_bytes().split(BREAK) if frame]


def app(told: list[bytes]) -> ASGIApp:
    """Answers with `told`."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for frame in told:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @post("/{path:path}", status_code=200)
    async def create(request: Request) -> ASGIApp:
        await request.body()
        return answer

    http = Litestar([create], openapi_config=None, logging_config=None)
    messages = [data for frame in told if (data := frame.partition(b"data: ")[2].strip()) and data != b"[DONE]"]

    async def socket(receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept", "subprotocol": None, "headers": []})
        await receive()
        for message in messages:
            await send({"type": "websocket.send", "bytes": None, "text": message.decode()})
        await receive()

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        await (socket(receive, send) if scope["type"] == "websocket" else http(scope, receive, send))

    return both


def main() -> None:
    """Serves until it is killed."""
    port, path = int(sys.argv[1]), Path(sys.argv[2])
    settings = uvicorn.Config(app(frames(path)), port=port, log_config=None, access_log=False, ws="websockets-sansio")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(settings).serve())


if __name__ == "__main__":
    main()
