"""The routes of the Messages protocol, and what its clients look for before they use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Request, get, post
from litestar.types import ASGIApp

from zjournal import errors
from zjournal.api import failure
from zjournal.api.guard import Reply
from zjournal.api.http import body, enter, fold, stream
from zjournal.api.messages import answer as answers
from zjournal.api.messages import diagnostics
from zjournal.api.messages import request as requests
from zjournal.api.threads import not_found
from zjournal.ask import Ask

if TYPE_CHECKING:
    from zjournal.api.submit import Desk
    from zjournal.api.turns import Turn

MESSAGE_PREFIX = "msg_"


@post("/v1/messages")
async def create(request: Request) -> ASGIApp:
    desk, tenant = enter(request)
    raw = await body(request)
    ask = requests.decode(raw, request.headers, attribution=desk.attribution)
    wanted = requests.diagnostics(raw)
    async with _continued(desk, tenant, raw, ask, request) as (raw, ask):
        try:
            turn = await desk.submit(ask, raw, tenant, requests.ENCODER_VERSION)
        except errors.PreviousResponseNotFound:  # it was deleted meanwhile
            raise not_found(str(ask.previous)) from None
    told = None if wanted is None else await _diagnosed(desk, wanted.previous_message_id, turn)
    if ask.stream:
        return stream(desk, turn, answers.Encoder(turn, desk.item_id, failure.request_id(request.scope), told))
    answer = answers.Answer(turn, desk.item_id, told)
    await fold(request, desk, turn, answer)
    if answer.fault is not None:
        raise answer.fault
    return Reply(answer.body())


@post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> ASGIApp:
    """As many as the prompt of the same request would have; there is no answer, and nothing is written down."""
    desk, tenant = enter(request)
    raw = await body(request)
    ask = requests.decode(raw, request.headers, attribution=desk.attribution, counted=True)
    if ask.previous is not None:
        raw = requests.joined(raw, await desk.threads.held(ask.previous, tenant))
        ask = requests.decode(raw, request.headers, attribution=desk.attribution, counted=True)
    try:
        tokens = await desk.count(ask, tenant)
    except errors.PreviousResponseNotFound:
        raise not_found(str(ask.previous)) from None
    return Reply(msgspec.json.encode({"input_tokens": tokens}))


@get("/api/hello")
async def hello() -> ASGIApp:
    """Coding agents look here whether anyone is at home."""
    return Reply(b'{"message":"hello"}')


ROUTES = (create, count_tokens, hello)


@asynccontextmanager
async def _continued(
    desk: Desk, tenant: str, raw: bytes, ask: Ask, request: Request
) -> AsyncIterator[tuple[bytes, Ask]]:
    """The body and the Ask with what their thread holds. Keeps the reply from being continued twice."""
    if ask.previous is None:
        yield raw, ask
        return
    async with desk.threads.continued(ask.previous, tenant) as before:
        whole = requests.joined(raw, before)
        yield whole, requests.decode(whole, request.headers, attribution=desk.attribution)


async def _diagnosed(desk: Desk, previous: Any, turn: Turn) -> dict[str, Any] | None:
    """The `diagnostics` of a message whose request names an earlier one. An id of any form may be asked for."""
    if previous is None:
        return None
    ours = isinstance(previous, str) and previous.startswith(MESSAGE_PREFIX)
    found = await desk.compared(previous, turn) if ours else None
    if found is None:
        return diagnostics.NOT_FOUND
    same = await desk.same_model(previous, turn.response)
    return await asyncio.to_thread(diagnostics.told, *found, same)
