"""What the routes share: whose request it is, its body, and the answer as a stream or folded into one object.

Everything a protocol means is in its own files. The status of a stream is decided once the desk has accepted the
request; what fails later is told inside the stream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from litestar import Request
from litestar.exceptions import InternalServerException

from zjournal.api import credentials, nesting
from zjournal.api.limits import ALLOWED
from zjournal.api.refusals import KEY_NAME
from zjournal.api.sse import ClientGone, EventStream, until_gone
from zjournal.ask import Broke, Step, Usage
from zjournal.errors import BadRequest, Fault, Unauthorized, UnsupportedEncoding

if TYPE_CHECKING:
    from zjournal.api.submit import Desk
    from zjournal.api.turns import Turn


class Encoder(Protocol):
    """What a protocol offers to tell a stream."""

    def begin(self) -> list[bytes]: ...

    def feed(self, step: Step) -> list[bytes]: ...


class Answer(Protocol):
    """What a protocol offers to fold a whole answer."""

    def take(self, step: Step) -> object: ...


def enter(request: Request) -> tuple[Desk, str]:
    """The desk, and the tenant whose key came with the request. Raises Unauthorized."""
    desk: Desk = request.app.state.desk
    tenant = tenant_of(desk, request.headers)
    scope: Any = request.scope
    scope[ALLOWED] = lambda: desk.allowed(tenant)
    scope[KEY_NAME] = desk.key_name(tenant)
    return desk, tenant


def tenant_of(desk: Desk, headers: Mapping[str, str]) -> str:
    """Whose key it is. Raises Unauthorized.

    Clients that have two kinds of key may send both, and one of them may be another server's.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    sent = (key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip())
    found = [key for key in sent if key]
    try:
        return desk.tenant_of(found[0] if found else None)
    except Unauthorized:
        if len(found) < 2:
            raise
    return desk.tenant_of(found[1])


async def body(request: Request) -> bytes:
    """The whole body without credentials. Raises ClientGone, and BadRequest for one that no reader should see.

    A body over the limit is refused as it is read.
    """
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise UnsupportedEncoding(f"Bodies must be sent as they are, without Content-Encoding {coding!r}.")
    try:
        received = await request.body()
    except InternalServerException:  # Litestar's word for a client that left before its body was whole
        raise ClientGone from None
    nesting.check(received)
    _check_text(received)
    return credentials.without(received, credentials.own_keys(request.headers))


def _check_text(received: bytes) -> None:
    """Raises BadRequest for a body that is not UTF-8: what of it is kept as it is must be readable ever after."""
    if received.isascii():
        return
    try:
        received.decode()
    except UnicodeDecodeError as fault:
        sentence = f"The request body is not valid JSON: at byte {fault.start} it is not UTF-8."
        raise BadRequest(sentence) from None


def stream(desk: Desk, turn: Turn, encoder: Encoder, kept: bool = False) -> EventStream:
    """The answer as server-sent events; a client that leaves, or does not read, cancels it, unless it is to be kept."""

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

    return EventStream(frames(), lambda: None if kept else desk.cancel(turn), lambda cut: desk.cut(turn, cut))


async def take_all(desk: Desk, turn: Turn, answer: Answer) -> None:
    """Folds all steps of a turn."""
    async for step in desk.follow(turn):
        answer.take(step)


async def fold(request: Request, desk: Desk, turn: Turn, answer: Answer) -> None:
    """Folds all steps; cancels the turn when this does not come to its end, above all when the client leaves."""
    whole = False
    try:
        await until_gone(request.receive, take_all(desk, turn, answer))
        whole = True
    finally:
        if not whole:
            desk.cancel(turn)
