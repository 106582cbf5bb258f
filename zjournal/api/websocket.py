"""Responses over WebSocket: `GET /v1/responses` with an upgrade, as an ASGI app below Litestar.

A socket is refused before its upgrade, with the status and body that HTTP would have; Litestar could only say 403. What
it tells of a response are the very events of the stream over HTTP. What it may do next is decided in
websocket_state.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec
from litestar.datastructures import Headers
from litestar.types import Message, Receive, Scope, Send

from zjournal import errors
from zjournal.api import credentials, failure, nesting, responses, websocket_state
from zjournal.api.guard import refusal
from zjournal.api.http import tenant_of
from zjournal.api.limits import ALLOWED
from zjournal.api.refusals import NOBODY, Refusal, refused, without
from zjournal.api.routes_conversations import joined
from zjournal.api.routes_responses import diagnostics, inheriting
from zjournal.api.sse import CONNECTION, ClientGone, until_gone
from zjournal.api.websocket_intake import STOPPING
from zjournal.api.websocket_state import Bounds, Create, Session, Steer
from zjournal.ask import Broke, Ended, Usage
from zjournal.errors import Fault

if TYPE_CHECKING:
    from zjournal.api.submit import Desk
    from zjournal.api.turns import Turn

PATH = "/v1/responses"
API = "responses"  # as the metrics have it
METHOD = "WEBSOCKET"  # as the log of refusals has it
ACCEPTED = 200
GOING_AWAY, RESTARTING = 1001, 1012  # close codes after which clients connect again

log = logging.getLogger("zjournal.api")


class Sockets:
    """The ASGI app of all sockets. The guard stands before it."""

    def __init__(
        self, desk: Desk, on: bool = True, bounds: Bounds | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`on` false refuses every upgrade. `clock` tells how old a socket is, in seconds."""
        self._desk = desk
        self._on = on
        self._bounds = bounds or Bounds()
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        headers = Headers.from_scope(scope)
        try:
            tenant = self._entered(scope, headers)
        except Fault as fault:
            await refusal(fault, scope)(scope, receive, send)
            return
        desk, name, known = self._desk, failure.request_id(scope), cast(dict[str, Any], scope)
        known[ALLOWED] = lambda: desk.allowed(tenant)
        await send({"type": "websocket.accept", "subprotocol": None, "headers": []})
        session = Session(self._clock(), self._bounds)
        socket = Socket(desk, headers, session, self._clock, receive, send, name, desk.key_name(tenant) or NOBODY)
        with desk.metrics.socket():
            try:
                await socket.serve()
            finally:
                socket.left(getattr(known.get(CONNECTION), "cut", None))

    def _entered(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """Whose socket it is. Raises a Fault for one that is not served."""
        if scope["path"] != PATH:
            raise errors.NotFound(f"There is no WebSocket at {scope['path']}.")
        if not self._on:
            raise errors.UpgradeRefused("This server does not speak WebSocket; use HTTP.")
        return tenant_of(self._desk, headers)


class Socket:
    """One open socket. Two tasks: one hears what its client sends, the other answers, one request at a time."""

    def __init__(
        self,
        desk: Desk,
        headers: Mapping[str, str],
        session: Session,
        clock: Callable[[], float],
        receive: Receive,
        send: Send,
        name: str,
        key: str = NOBODY,
    ) -> None:
        """`headers` are those of the upgrade; they count for each request. `name` and `key`'s are for the log."""
        self._desk = desk
        self._headers = headers
        self._session = session
        self._clock = clock
        self._receive = receive
        self._send = send
        self._name = name
        self._key = key
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()  # the client has left
        self.stopping = False  # the server ends
        self._turn: Turn | None = None  # the last one
        self._whole = True  # it was told to its end

    async def serve(self) -> None:
        """Serves the socket until its client leaves, its time is over or the server ends."""
        hearing = asyncio.ensure_future(self._hear())
        try:
            while (asked := await self._next()) is not None:
                await self._one(asked)
        except ClientGone:
            pass
        finally:
            hearing.cancel()
            await asyncio.wait((hearing,))
            self._desk.release(self._session.local.clear())
        if not hearing.cancelled() and (error := hearing.exception()) is not None:
            raise error

    def left(self, cut: Any) -> None:
        """The socket is closed; what is not told to its end is told to nobody. `cut`: it did not read."""
        if self._turn is None:
            return
        if cut is not None:
            self._desk.cut(self._turn, cut)
        self._abandon()

    def _abandon(self) -> None:
        """The last response is not told to its end: the model stops working for it."""
        if not self._whole and self._turn is not None:
            self._whole = True
            self._desk.cancel(self._turn)
            self._desk.release([self._turn.response])

    # --- what the client sends --------------------------------------------------------------------------

    async def _hear(self) -> None:
        try:
            while True:
                message: Any = await self._receive()
                if message["type"] == "websocket.receive":
                    await self._heard(message.get("text"), len(message.get("text") or message.get("bytes") or b""))
                elif message["type"] == STOPPING:
                    self.stopping = True
                else:
                    return
                self._changed.set()
        except ClientGone:
            pass
        finally:
            self._gone.set()
            self._changed.set()

    async def _heard(self, text: str | None, size: int) -> None:
        asked: Create | Steer | Fault
        try:
            asked = websocket_state.read(text)
        except Fault as fault:
            asked = fault
        if isinstance(asked, Steer):
            await self._tell(websocket_state.not_steered(asked))
        elif (full := self._session.take(asked, size)) is not None:
            await self._refuse(full)

    async def _next(self) -> Create | Fault | None:
        """What is to be answered next, once there is something; None when nothing will be any more."""
        while not self._gone.is_set():
            self._changed.clear()
            asked = self._session.next(self._clock())
            if isinstance(asked, errors.ConnectionLimit):
                await self._refuse(asked)
                await self._close(GOING_AWAY, asked.code)
                return None
            if asked is not None:
                return asked
            if self.stopping:
                await self._close(RESTARTING, "the server restarts")
                return None
            changing = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait((changing,), timeout=self._session.left_s(self._clock()))
            changing.cancel()
        return None

    # --- what it is told --------------------------------------------------------------------------------

    async def _one(self, asked: Create | Fault) -> None:
        """Answers one message; raises ClientGone when the client leaves meanwhile."""
        if isinstance(asked, Fault):
            self._session.answered()
            await self._refuse(asked)
            return
        try:
            await until_gone(self._leaving, self._answer(asked))
        except ClientGone:
            raise
        except Exception as error:
            fault = error if isinstance(error, Fault) else self._failed(error)
            self._abandon()
            self._forget(asked.previous)
            self._session.answered()
            await self._refuse(fault)

    async def _answer(self, asked: Create) -> None:
        desk, local = self._desk, self._session.local
        tenant = tenant_of(desk, self._headers)  # the key may have been taken back since the upgrade
        nesting.check(asked.body)
        body = credentials.without(asked.body, credentials.own_keys(self._headers))
        body = await inheriting(desk, body, tenant, local)
        async with joined(desk, body, tenant) as (raw, join):
            request = local.continued(responses.decode(raw, self._headers, merged=True))
            request = msgspec.structs.replace(request, stream=True)
            self._turn = turn = await desk.submit(request, raw, tenant, responses.ENCODER_VERSION)
            self._whole = False
            desk.hold(turn)
            await join(turn)
        desk.metrics.request(API, ACCEPTED)
        answer = responses.Answer(turn, desk.item_id, desk.seal, await diagnostics(desk, turn))
        events = responses.Events(answer)
        for _, data in events.begin():
            await self._tell(data)
        try:
            async for step in desk.follow(turn):
                told = events.feed(step)
                if isinstance(step, Ended | Broke):
                    self._ended(turn, asked.previous, answer, sum(len(data) for _, data in told))
                for _, data in told:
                    await self._tell(data)
        except Fault as fault:
            desk.cancel(turn)
            self._ended(turn, asked.previous, answer, 0)
            for _, data in events.feed(Broke(fault.code, fault.message, Usage(prompt=0, cached=0, output=0))):
                await self._tell(data)

    def _ended(self, turn: Turn, previous: str, answer: responses.Answer, size: int) -> None:
        """The response has ended. What its client sends once it hears so finds the socket free."""
        self._whole = True
        if isinstance(answer.end, Ended) and answer.end.reason != "cancelled":
            if not turn.stored:
                self._desk.release(self._session.local.add(turn.response, len(turn.raw) + size))
        else:
            self._forget(previous)
            self._desk.release([turn.response])
        self._session.answered()

    def _forget(self, previous: str) -> None:
        """A response could not be continued: its client sends everything again, and shall find no half of it here."""
        self._desk.release(self._session.local.drop(previous))

    def _failed(self, error: Exception) -> Fault:
        if isinstance(error, RecursionError):
            return errors.BadRequest("The request is nested too deeply.")
        log.error("%s failed: %s", self._name, type(error).__name__, exc_info=error)
        return Fault(f"The server failed on this request; its id is {self._name}.")

    async def _leaving(self) -> Any:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _refuse(self, fault: Fault) -> None:
        self._desk.metrics.request(API, fault.status)
        if refused(fault.status, fault):
            param = fault.param and without(fault.param, credentials.own_keys(self._headers))
            told = Refusal(METHOD, PATH, fault.status, fault.code, param, self._name, self._key)
            self._desk.refused.tell(told)
        await self._tell(websocket_state.error(fault))

    async def _tell(self, data: bytes) -> None:
        await self._sent({"type": "websocket.send", "bytes": None, "text": data.decode()})

    async def _close(self, code: int, reason: str) -> None:
        await self._sent({"type": "websocket.close", "code": code, "reason": reason})

    async def _sent(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:  # the server's word for a client that left
            raise ClientGone from None
