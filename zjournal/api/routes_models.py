"""The routes of the list of models."""

from __future__ import annotations

from litestar import Request, get
from litestar.types import ASGIApp

from zjournal.api import models
from zjournal.api.guard import Reply
from zjournal.api.http import enter


@get("/v1/models")
async def models_list(request: Request) -> ASGIApp:
    desk, _ = enter(request)
    body = models.listing(desk.models(), request.query_params, "anthropic-version" in request.headers)
    return _tagged(request, body)


@get("/v1/models/{name:path}")
async def models_retrieve(request: Request) -> ASGIApp:
    desk, _ = enter(request)
    return _tagged(request, models.one(desk.models(), str(request.path_params["name"]).removeprefix("/")))


def _tagged(request: Request, body: bytes) -> Reply:
    """The body, or 304 for a client that has it."""
    tag = models.etag(body)
    headers = [(b"etag", tag.encode()), (b"vary", b"anthropic-version")]
    known = request.headers.get("if-none-match", "")
    if known.strip() == "*" or tag in [one.strip().removeprefix("W/") for one in known.split(",")]:
        return Reply(b"", 304, headers=headers)
    return Reply(body, headers=headers)


ROUTES = [models_list, models_retrieve]
