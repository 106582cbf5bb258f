"""The routes: each reads its request, asks the desk, and answers in its protocol; errors get their shape here.

Everything a protocol means is in chat.py and responses.py. Here is only HTTP: keys, limits, status codes, and the
client that leaves. The status of a stream is decided once the desk has accepted the request; what fails later is
told inside the stream.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

import msgspec
from litestar import Litestar, Request, delete, get, post
from litestar.exceptions import HTTPException, InternalServerException
from litestar.response import Response
from litestar.types import ASGIApp

from zjournal.api import chat, credentials, failure, models, responses
from zjournal.api.guard import REQUEST_ID, Edge, Neighbours, Reply
from zjournal.api.metrics import CONTENT_TYPE
from zjournal.api.sse import ClientGone, EventStream, until_gone
from zjournal.ask import Ask, Broke, Step, Usage
from zjournal.errors import BadRequest, BodyTooLarge, Fault, NotFound

if TYPE_CHECKING:
    from zjournal.api.submit import Desk, Turn

CLIENT_GONE = 499  # what proxies log for a client that left; nobody receives it
RESPONSE_PREFIX = "resp_"

log = logging.getLogger("zjournal.api")


class Encoder(Protocol):
    """What a protocol offers to tell a stream."""

    def begin(self) -> list[bytes]: ...

    def feed(self, step: Step) -> list[bytes]: ...


class Answer(Protocol):
    """What a protocol offers to fold a whole answer."""

    def take(self, step: Step) -> object: ...


def create_app(desk: Desk, *, host: str, port: int, body_max: int) -> ASGIApp:
    """The ASGI app of a server bound to `host` and `port`; a body over `body_max` bytes is refused with 413."""
    app = Litestar(
        route_handlers=[
            chat_create,
            responses_create,
            responses_retrieve,
            responses_delete,
            models_list,
            models_retrieve,
            root,
            livez,
            readyz,
            metrics,
        ],
        exception_handlers={
            Fault: _on_fault,
            HTTPException: _on_http_exception,
            ClientGone: _on_client_gone,
            Exception: _on_exception,
        },
        request_max_body_size=body_max,
        openapi_config=None,
        logging_config=None,
    )
    app.state.desk = desk
    return Edge(app, Neighbours(host, port), desk.metrics)


# --- the protocols ------------------------------------------------------------------------------------


@post("/v1/chat/completions")
async def chat_create(request: Request) -> ASGIApp:
    desk, tenant = _enter(request)
    raw = await _body(request)
    ask = chat.decode(raw, request.headers)
    turn = await desk.submit(ask, raw, tenant, chat.ENCODER_VERSION)
    if ask.stream:
        return _stream(desk, turn, chat.Encoder(turn, desk.item_id))
    answer = chat.Answer(turn, desk.item_id)
    await _fold(request, desk, turn, answer)
    if answer.fault is not None:
        raise answer.fault
    return Reply(answer.body())


@post("/v1/responses")
async def responses_create(request: Request) -> ASGIApp:
    desk, tenant = _enter(request)
    raw = await _body(request)
    ask: Ask = responses.decode(raw, request.headers)
    turn = await desk.submit(ask, raw, tenant, responses.ENCODER_VERSION)
    if ask.stream:
        return _stream(desk, turn, responses.Encoder(turn, desk.item_id))
    answer = responses.Answer(turn, desk.item_id)
    await _fold(request, desk, turn, answer)
    if isinstance(answer.end, Broke):
        raise failure.fault_of(answer.end)
    return Reply(answer.body())


@get("/v1/responses/{response_id:str}")
async def responses_retrieve(request: Request) -> ASGIApp:
    desk, tenant = _enter(request)
    _refuse_replay(request)
    turn = await _recorded(desk, request.path_params["response_id"], tenant)
    answer = responses.Answer(turn, desk.item_id)
    if not desk.running(turn):  # else the object as it stands: in progress
        await _take_all(desk, turn, answer)
    return Reply(answer.body())


@delete("/v1/responses/{response_id:str}", status_code=200)
async def responses_delete(request: Request) -> ASGIApp:
    desk, tenant = _enter(request)
    turn = await _recorded(desk, request.path_params["response_id"], tenant)
    await desk.delete(turn.response, tenant)
    return Reply(responses.deleted(turn.response))


@get("/v1/models")
async def models_list(request: Request) -> ASGIApp:
    desk, _ = _enter(request)
    return Reply(models.listing(desk.models()))


@get("/v1/models/{name:path}")
async def models_retrieve(request: Request) -> ASGIApp:
    desk, _ = _enter(request)
    return Reply(models.one(desk.models(), str(request.path_params["name"]).removeprefix("/")))


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
    status, progress = request.app.state.desk.status()
    body = msgspec.json.encode({"status": status, "progress": round(progress, 3)})
    return Reply(body, 200 if status == "ready" else 503)


@get("/metrics")
async def metrics(request: Request) -> ASGIApp:
    desk, _ = _enter(request)
    return Reply(desk.metrics.render(), content_type=CONTENT_TYPE)


# --- what the routes share ----------------------------------------------------------------------------


def _enter(request: Request) -> tuple[Desk, str]:
    """The desk, and the tenant whose key came with the request. Raises Unauthorized."""
    desk: Desk = request.app.state.desk
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return desk, desk.tenant_of(bearer or request.headers.get("x-api-key") or None)


async def _body(request: Request) -> bytes:
    """The whole body without credentials. Raises ClientGone; a body over the limit is refused as it is read."""
    try:
        body = await request.body()
    except InternalServerException:  # Litestar's word for a client that left before its body was whole
        raise ClientGone from None
    return credentials.without(body, credentials.own_keys(request.headers))


async def _recorded(desk: Desk, response_id: str, tenant: str) -> Turn:
    """A stored turn of this protocol; answers of the other one have no such resource. Raises NotFound."""
    if not response_id.startswith(RESPONSE_PREFIX):
        raise NotFound(f"Response with id '{response_id}' not found.", param="response_id")
    return await desk.recorded(response_id, tenant)


def _refuse_replay(request: Request) -> None:
    query = request.query_params
    if query.get("stream", "false").lower() not in ("false", "0"):
        raise BadRequest("`stream` is not supported when a response is retrieved.", param="stream")
    if "starting_after" in query:
        raise BadRequest("`starting_after` is not supported by this server.", param="starting_after")


def _stream(desk: Desk, turn: Turn, encoder: Encoder) -> EventStream:
    async def frames() -> AsyncGenerator[bytes, None]:
        for data in encoder.begin():
            yield data
        try:
            async for step in desk.follow(turn):
                for data in encoder.feed(step):
                    yield data
        except Fault as fault:  # the status is sent; all that is left is to end the answer in its protocol
            for data in encoder.feed(Broke(fault.code, fault.message, Usage(prompt=0, cached=0, output=0))):
                yield data

    return EventStream(frames(), lambda: desk.cancel(turn))


async def _take_all(desk: Desk, turn: Turn, answer: Answer) -> None:
    async for step in desk.follow(turn):
        answer.take(step)


async def _fold(request: Request, desk: Desk, turn: Turn, answer: Answer) -> None:
    """Folds all steps; cancels the turn when this does not come to its end, above all when the client leaves."""
    whole = False
    try:
        await until_gone(request.receive, _take_all(desk, turn, answer))
        whole = True
    finally:
        if not whole:
            desk.cancel(turn)


# --- errors -------------------------------------------------------------------------------------------


def _on_fault(request: Request, fault: Fault) -> Response:
    headers = {} if fault.retry_after_s is None else {"retry-after": str(fault.retry_after_s)}
    return Response(failure.body(fault), status_code=fault.status, media_type="application/json", headers=headers)


def _on_http_exception(request: Request, exc: HTTPException) -> Response:
    """What Litestar itself refuses, in the same shape: no such path, no such method, too large a body."""
    if exc.status_code >= 500:
        return _on_exception(request, exc)
    path = request.scope["path"]
    if exc.status_code == 404:
        fault: Fault = NotFound(f"There is nothing at {path}.")
    elif exc.status_code == 413:
        fault = BodyTooLarge("The request body is too large.")
    else:
        fault = BadRequest(f"{request.method} {path}: {exc.detail}.")
    response = _on_fault(request, fault)
    response.status_code = exc.status_code
    if exc.headers:
        response.headers.update({name.lower(): value for name, value in exc.headers.items()})
    return response


def _on_client_gone(request: Request, _: ClientGone) -> Response:
    return Response(b"", status_code=CLIENT_GONE, media_type="text/plain")


def _on_exception(request: Request, exc: Exception) -> Response:
    request_id = request.scope.get(REQUEST_ID, "")
    log.error("%s failed: %s", request_id, type(exc).__name__, exc_info=exc)
    return _on_fault(request, Fault(f"The server failed on this request; its id is {request_id}."))
