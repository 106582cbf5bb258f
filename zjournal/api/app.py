"""The app: all routes together, with those for machines that watch; errors get their status and shape here.

The routes of the other protocols are in routes_*.py, what they share is in http.py, and what a protocol means is in
chat.py, responses.py and messages/. The status of a stream is decided once the desk has accepted the request; what
fails later is told inside the stream.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Litestar, Request, get
from litestar.exceptions import HTTPException
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.response import Response
from litestar.routes import HTTPRoute
from litestar.types import ASGIApp, Message, Scope

from zjournal.api import (
    failure,
    routes_chat,
    routes_conversations,
    routes_messages,
    routes_models,
    routes_openapi,
    routes_responses,
)
from zjournal.api.guard import REQUEST_ID, Edge, Neighbours, Reply
from zjournal.api.http import enter
from zjournal.api.metrics import CONTENT_TYPE
from zjournal.api.refusals import FAULT
from zjournal.api.sse import ClientGone
from zjournal.api.websocket import Sockets
from zjournal.api.websocket_state import Bounds
from zjournal.errors import BadRequest, BodyTooLarge, Fault, NotFound

if TYPE_CHECKING:
    from zjournal.api.submit import Desk

CLIENT_GONE = 499  # what proxies log for a client that left; nobody receives it

log = logging.getLogger("zjournal.api")


class _App(Litestar):
    """Without the plugins for pydantic and attrs, which no handler here needs: their import is a tenth of a start."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


def create_app(desk: Desk, *, host: str, port: int, body_max: int, websocket: bool = True) -> ASGIApp:
    """The ASGI app of a server bound to `host` and `port`; a body over `body_max` bytes is refused with 413.

    `websocket` false: who asks for an upgrade is told to go on over HTTP.
    """
    app = _App(
        route_handlers=[
            *routes_chat.ROUTES,
            *routes_responses.ROUTES,
            *routes_conversations.ROUTES,
            *routes_messages.ROUTES,
            *routes_models.ROUTES,
            *routes_openapi.ROUTES,
            root,
            livez,
            readyz,
            metrics,
        ],
        exception_handlers={
            Fault: _on_fault,
            HTTPException: _on_http_exception,
            ClientGone: _on_client_gone,
            RecursionError: _on_depth,
            Exception: _on_exception,
        },
        before_send=[_all_methods],
        request_max_body_size=body_max,
        openapi_config=None,
        logging_config=None,
    )
    app.state.desk = desk
    sockets = Sockets(desk, websocket, Bounds(waiting_bytes=body_max))
    return Edge(app, Neighbours(host, port), desk.metrics, sockets, desk.refused)


# --- for machines that watch --------------------------------------------------------------------------


@get("/")
async def root() -> ASGIApp:
    """Clients look here whether anyone is at home."""
    return Reply(b"zjournal\n", content_type=b"text/plain; charset=utf-8")


@get("/livez")
async def livez() -> ASGIApp:
    return Reply(b'{"status":"live"}')


@get(["/readyz", "/health"])
async def readyz(request: Request) -> ASGIApp:
    """200 once a token can be made, and until the server drains."""
    desk: Desk = request.app.state.desk
    status, progress = desk.status()
    told: dict[str, Any] = {"status": status, "progress": round(progress, 3)}
    if reason := desk.failure():
        told["reason"] = reason
    return Reply(msgspec.json.encode(told), 200 if status == "ready" else 503)


@get("/metrics")
async def metrics(request: Request) -> ASGIApp:
    desk, _ = enter(request)
    return Reply(desk.metrics.render(), content_type=CONTENT_TYPE)


# --- errors -------------------------------------------------------------------------------------------


def _on_fault(request: Request, fault: Fault) -> Response:
    headers = {} if fault.retry_after_s is None else {"retry-after": str(fault.retry_after_s)}
    scope: Any = request.scope
    scope[FAULT] = fault
    told = failure.body_for(fault, request.scope)
    return Response(told, status_code=fault.status, media_type="application/json", headers=headers)


def _on_http_exception(request: Request, exc: HTTPException) -> Response:
    """What Litestar itself refuses, in the same shape: no such path, no such method, too large a body."""
    if exc.status_code >= 500:
        return _on_exception(request, exc)
    path = request.scope["path"]
    if exc.status_code == 404:
        fault: Fault = NotFound(f"There is nothing at {path}.")
    elif request.headers.get("upgrade", "").lower() == "websocket":
        # Codex takes this word to go on over HTTP at once; at any other it tries again for seconds.
        exc.status_code = 426
        fault = BadRequest("This server does not speak WebSocket; use HTTP.")
    elif exc.status_code == 413:
        fault = BodyTooLarge("The request body is too large.")
    else:
        fault = BadRequest(f"{request.method} {path}: {exc.detail}.")
    response = _on_fault(request, fault)
    response.status_code = exc.status_code
    if exc.headers:
        response.headers.update({name.lower(): value for name, value in exc.headers.items()})
    return response


async def _all_methods(message: Message, scope: Scope) -> None:
    """Litestar's answer to OPTIONS names the methods of a path's first handler only, and HEAD is the edge's."""
    if message["type"] != "http.response.start":
        return
    headers = [(name.lower(), value) for name, value in message.get("headers", ())]
    methods = {method for name, value in headers if name == b"allow" for method in value.decode().split(", ")}
    if not methods:
        return
    template = scope.get("path_template")  # not there where no route was taken: then the header is whole
    for route in scope["litestar_app"].routes:
        if isinstance(route, HTTPRoute) and route.path_format == template:
            methods |= route.methods
    allowed = sorted(methods | ({"HEAD"} if "GET" in methods else set()))
    told = (b"allow", ", ".join(allowed).encode())
    message["headers"] = [told, *(header for header in headers if header[0] != b"allow")]


def _on_client_gone(request: Request, _: ClientGone) -> Response:
    return Response(b"", status_code=CLIENT_GONE, media_type="text/plain")


def _on_depth(request: Request, _: RecursionError) -> Response:
    """The last resort behind nesting.check: how deep the interpreter goes depends on who else is on its stack."""
    return _on_fault(request, BadRequest("The request body is nested too deeply."))


def _on_exception(request: Request, exc: Exception) -> Response:
    request_id = request.scope.get(REQUEST_ID, "")
    log.error("%s failed: %s", request_id, type(exc).__name__, exc_info=exc)
    return _on_fault(request, Fault(f"The server failed on this request; its id is {request_id}."))
