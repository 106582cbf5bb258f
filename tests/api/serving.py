"""Runs the real app on a loopback port, in the test's own event loop."""

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from tests.api.desk import FakeDesk
from zjournal.api.app import create_app
from zjournal.api.intake import BoundedProtocol

BODY_MAX = 1 << 20


@contextlib.asynccontextmanager
async def serving(
    desk: FakeDesk,
    body_max: int = BODY_MAX,
    protocol: type[BoundedProtocol] = BoundedProtocol,
    ws: Any = "none",
    app: Any = None,
) -> AsyncIterator[str]:
    """Serves `desk`, or another app; gives the base URL without a trailing slash. `ws` is the protocol of WebSockets.

    Without uvicorn's own main loop, which polls for its end: these are the steps around it.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        app = app or create_app(desk, host="127.0.0.1", port=port, body_max=body_max)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, http=protocol, ws=ws, timeout_graceful_shutdown=1
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        assert server.started
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await server.shutdown(sockets=[listener])
