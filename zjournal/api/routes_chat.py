"""The route of Chat Completions: one answer or several choices, streamed or whole.

The choices of a request are responses of their own. They are followed side by side, and end together: when the client
leaves, or one of them fails, the others are given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from litestar import Request, post
from litestar.types import ASGIApp

from zjournal.api import chat, chat_answer
from zjournal.api.guard import Reply
from zjournal.api.http import body, enter, fold, stream
from zjournal.api.sse import EventStream, until_gone
from zjournal.ask import Step
from zjournal.errors import Fault

if TYPE_CHECKING:
    from zjournal.api.submit import Desk
    from zjournal.api.turns import Turn


@post("/v1/chat/completions")
async def create(request: Request) -> ASGIApp:
    desk, tenant = enter(request)
    raw = await body(request)
    ask = chat.decode(raw, request.headers)
    turn = await desk.submit(ask, raw, tenant, chat.ENCODER_VERSION)
    if ask.stream:
        encoder = chat_answer.Encoder(turn, desk.item_id)
        return _stream_all(desk, turn, encoder) if turn.others else stream(desk, turn, encoder)
    answer = chat_answer.Answer(turn, desk.item_id)
    await (_fold_all(request, desk, turn, answer) if turn.others else fold(request, desk, turn, answer))
    if answer.fault is not None:
        raise answer.fault
    return Reply(answer.body())


ROUTES = (create,)


# --- several choices ----------------------------------------------------------------------------------


def _stream_all(desk: Desk, turn: Turn, encoder: chat_answer.Encoder) -> EventStream:
    """All choices as one stream, as their steps come. A client that leaves, or does not read, cancels them all."""

    async def frames() -> AsyncGenerator[bytes, None]:
        for data in encoder.begin():
            yield data
        try:
            async with aclosing(_followed(desk, turn)) as steps:
                async for index, step in steps:
                    for data in encoder.feed(step, index):
                        yield data
                    if encoder.over:
                        break
        except Fault as fault:
            for data in encoder.broken(fault):
                yield data
        _cancel(desk, turn)  # one that failed has left others running

    return EventStream(frames(), lambda: _cancel(desk, turn), lambda cut: desk.cut(turn, cut))


async def _fold_all(request: Request, desk: Desk, turn: Turn, answer: chat_answer.Answer) -> None:
    """Folds the steps of all choices until all have ended or one has failed; then none of them runs any more."""

    async def take_all() -> None:
        async with aclosing(_followed(desk, turn)) as steps:
            async for index, step in steps:
                answer.take(step, index)
                if answer.fault is not None:
                    break

    try:
        await until_gone(request.receive, take_all())
    finally:
        _cancel(desk, turn)


def _cancel(desk: Desk, turn: Turn) -> None:
    """Gives up the choices that still run."""
    for one in turn.choices:
        desk.cancel(one)


async def _followed(desk: Desk, turn: Turn) -> AsyncGenerator[tuple[int, Step], None]:
    """The steps of all choices with their index, in the order in which they come; each waits until it is taken."""
    told: asyncio.Queue[tuple[int, Step | Exception | None]] = asyncio.Queue(1)

    async def tell(index: int, steps: AsyncIterator[Step]) -> None:
        try:
            async for step in steps:
                await told.put((index, step))
        except Exception as error:
            await told.put((index, error))
        else:
            await told.put((index, None))

    tasks = [asyncio.create_task(tell(index, desk.follow(one))) for index, one in enumerate(turn.choices)]
    try:
        left = len(tasks)
        while left:
            index, step = await told.get()
            if isinstance(step, Exception):
                raise step
            if step is None:
                left -= 1
            else:
                yield index, step
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
