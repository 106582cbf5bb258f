"""The route of the API's own description."""

from __future__ import annotations

import asyncio

from litestar import Request, get
from litestar.types import ASGIApp

from zjournal.api.guard import Reply
from zjournal.api.http import enter
from zjournal.api.openapi import document, shapes
from zjournal.config import version


@get(document.PATH)
async def openapi(request: Request) -> ASGIApp:
    """Made when it is asked for, which is seldom; it takes some 20 ms, so not on the loop."""
    enter(request)
    return Reply(await asyncio.to_thread(lambda: shapes.encoded(document.document(version()))))


ROUTES = [openapi]
