"""The edge of the app: who may speak to a local server, and what every answer carries.

A web page in a browser can send requests to a loopback port. It cannot choose the Host of its own address (DNS
rebinding shows a foreign name there), and it cannot leave out Origin. So both are checked before any work. Nothing
is ever answered to a foreign origin, and no origin is reflected.

Below that, every answer gets a request id, HEAD is GET without a body, and requests are counted by status.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any, cast

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from zjournal.api import failure, limits, refusals
from zjournal.api.failure import REQUEST_ID
from zjournal.api.limits import ALLOWED
from zjournal.api.metrics import Metrics
from zjournal.api.refusals import FAULT, Refusals
from zjournal.api.sse import CONNECTION, DIRECT
from zjournal.errors import Fault, Forbidden

_AUTHORITY = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::([0-9]{1,5}))?$")
# Polled by machines; not worth counting.
_PROBES = frozenset({"/", "/api/hello", "/livez", "/readyz", "/health", "/metrics"})
_APIS = (
    ("/v1/chat/completions", "chat"),
    ("/v1/responses", "responses"),
    ("/v1/messages", "messages"),
    ("/v1/models", "models"),
)


class Reply:
    """A whole answer as an ASGI app: status, body, and headers beyond the content type."""

    def __init__(
        self,
        body: bytes,
        status: int = 200,
        content_type: bytes = b"application/json",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        self._body = body
        self._status = status
        self._headers = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            (b"cache-control", b"no-store"),
            *headers,
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self._status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body, "more_body": False})


def refusal(fault: Fault, scope: Scope) -> Reply:
    """The answer that tells a fault in the shape that the client reads."""
    headers = [(b"retry-after", b"%d" % fault.retry_after_s)] if fault.retry_after_s is not None else []
    known: Any = scope
    known[FAULT] = fault
    return Reply(failure.body_for(fault, scope), fault.status, headers=headers)


class Neighbours:
    """Decides by name who may speak: loopback, and the address the server is bound to."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host.strip("[]").lower()
        self._port = port
        address = _address(self._host)
        # Bound to every interface, the server is reached by addresses that it does not know. Rebinding needs a name.
        self._any_address = address is not None and address.is_unspecified

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises Forbidden for a foreign or missing Host and for a foreign Origin."""
        hosts = 0
        for name, value in headers:
            if name == b"host":
                hosts += 1
                authority = _split(value.decode("latin-1"))
                if authority is None or not self._ours(authority[0]):
                    raise Forbidden("The Host header names another server.")
            elif name == b"origin" and not self._same_origin(value.decode("latin-1")):
                raise Forbidden("Requests from web pages of another origin are refused.")
        if hosts != 1:
            raise Forbidden("A request must have one Host header.")

    def _ours(self, host: str) -> bool:
        address = _address(host)
        if address is not None and self._any_address:
            return True
        return _loopback(host) or host == self._host

    def _same_origin(self, origin: str) -> bool:
        scheme, found, rest = origin.partition("://")
        authority = _split(rest)
        if not found or scheme not in ("http", "https") or authority is None:
            return False
        host, port = authority
        return _loopback(host) or (self._ours(host) and port == self._port)


def _split(authority: str) -> tuple[str, int | None] | None:
    """Host and port of "name", "name:8080" or "[::1]:8080"; None for anything else, such as "user@host"."""
    match = _AUTHORITY.match(authority)
    if match is None:
        return None
    return match[1].strip("[]").rstrip(".").lower(), int(match[2]) if match[2] else None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


class Edge:
    """The outermost ASGI app: guards, numbers and counts what goes through to `app`."""

    def __init__(
        self,
        app: ASGIApp,
        neighbours: Neighbours,
        metrics: Metrics,
        sockets: ASGIApp,
        refused: Refusals | None = None,
    ) -> None:
        """`sockets` takes what asks for an upgrade; its answers before that are to be sent as to any request.

        `refused` hears of all that is refused.
        """
        self._app = app
        self._sockets = sockets
        self._neighbours = neighbours
        self._metrics = metrics
        self._refused = refused or Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get(CONNECTION)
        try:
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            elif scope["type"] == "websocket":
                await self._websocket(scope, receive, send)
            else:
                await self._http(scope, receive, send)
        except asyncio.CancelledError:
            if not getattr(connection, "stopping", False):
                raise
            # The server ends, and has waited for this client long enough. That is no failure of ours.

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, REQUEST_ID: _request_id()}  # type: ignore[assignment, typeddict-item, misc]
        ids = _ids(scope)

        async def send_on(message: Message) -> None:
            """What answers a request refuses the upgrade."""
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *ids]
            if message["type"] in ("http.response.start", "http.response.body"):
                message = cast(Message, {**message, "type": f"websocket.{message['type']}"})
            elif message["type"] == "websocket.accept":
                message["headers"] = [*message.get("headers", ()), *ids, *_allowed(scope)]
            if message["type"] == "websocket.http.response.start":
                self._metrics.request(_api(scope["path"]), message["status"])
                self._refused.tell(refusals.of(scope, message["status"], "GET"))
            await send(message)

        try:
            self._neighbours.check(scope["headers"])
        except Forbidden as fault:
            await receive()
            await refusal(fault, scope)(scope, receive, send_on)
            return
        await self._sockets(scope, receive, send_on)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id()
        path = scope["path"]
        method: Any = scope.get("method")
        head = method == "HEAD"
        changes = {"method": "GET"} if head else {DIRECT: send}
        scope = {**scope, REQUEST_ID: request_id, **changes}  # type: ignore[assignment, typeddict-item, misc]

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_ids(scope), *_allowed(scope)]
                self._refused.tell(refusals.of(scope, message["status"], method))
                if path not in _PROBES:
                    self._metrics.request(_api(path), message["status"])
            elif head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            self._neighbours.check(scope["headers"])
        except Forbidden as fault:
            await refusal(fault, scope)(scope, receive, send_on)
            return
        await self._app(scope, receive, send_on)


def _request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def _ids(scope: Scope) -> tuple[tuple[bytes, bytes], ...]:
    told = failure.request_id(scope).encode()
    return (b"x-request-id", told), (b"request-id", told)


def _allowed(scope: Any) -> list[tuple[bytes, bytes]]:
    """What the limits of the request's key leave, once it is known whose request it is."""
    told = scope[ALLOWED]() if ALLOWED in scope else []
    return limits.headers(told, time.time() if failure.anthropic(scope) else None) if told else []


def _api(path: str) -> str:
    for prefix, api in _APIS:
        if path == prefix or path.startswith(f"{prefix}/"):
            return api
    return "other"
