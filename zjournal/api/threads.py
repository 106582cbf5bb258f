"""Threads of the Messages protocol: a conversation that the server holds, and each reply of it continued once.

A thread is no object of its own: it is the chain of turns in the journal, so it is there after a restart. What is
checked here is whether a reply may be continued: it was asked for with `thread`, it is whole, and no other request
has continued it. Of two requests that try at once the second one is refused while the first is being accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from zjournal import errors
from zjournal.journal.log import Journal
from zjournal.journal.projections import CANCELLED, COMPLETED, DELETED, FAILED, INCOMPLETE, RUNNING, Turn
from zjournal.sessions import chain
from zjournal.sessions.makers import Makers
from zjournal.sessions.records import Records

PROTOCOL = "messages"


class _Body(msgspec.Struct):
    """What of a recorded body says that its conversation is held."""

    thread: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Body).decode


class Threads:
    """The threads of one journal. Belongs to the event loop."""

    def __init__(self, journal: Journal, makers: Makers) -> None:
        self._journal = journal
        self._makers = makers
        self._continuing: set[str] = set()  # replies that a request is being accepted for

    @contextlib.asynccontextmanager
    async def continued(self, reply: str, tenant: str) -> AsyncIterator[bytes]:
        """Holds the right to continue a reply; gives the body of its request. Keep it until the turn is accepted.

        Raises ThreadNotFound, ThreadContinued or ThreadInFlight.
        """
        body = await self.held(reply, tenant)
        if reply in self._continuing:
            raise _in_flight(reply)
        self._continuing.add(reply)
        try:
            await asyncio.to_thread(self._check_free, reply)
            yield body
        finally:
            self._continuing.discard(reply)

    async def held(self, reply: str, tenant: str) -> bytes:
        """The body of the request that a reply of a thread answers. Raises ThreadNotFound."""
        return await asyncio.to_thread(self._held, reply, tenant)

    def _held(self, reply: str, tenant: str) -> bytes:
        turn = self._journal.turn(reply)
        usable = turn is not None and chain.visible(turn, tenant) and turn.protocol == PROTOCOL
        if turn is None or not usable or turn.status not in (COMPLETED, INCOMPLETE):
            raise not_found(reply)
        try:
            body = self._records().body(turn)
        except errors.JournalFault:
            now = self._journal.turn(reply)
            if now is None or now.erased:  # since it was found
                raise not_found(reply) from None
            raise
        if bytes(_decode(body).thread) in (b"", b"null"):
            raise not_found(reply)
        return body

    def _check_free(self, reply: str) -> None:
        """A turn that came to nothing leaves its place to another try."""
        for turn in self._journal.children(reply):
            if turn.status in (CANCELLED, FAILED, DELETED) or not self._continues(turn, reply):
                continue
            if turn.status == RUNNING:
                raise _in_flight(reply)
            raise errors.ThreadContinued(
                f"The message '{reply}' has already been continued, and each can be continued only once. "
                "Continue from the thread's latest message."
            )

    def _continues(self, turn: Turn, reply: str) -> bool:
        """Whether a turn names the reply; one that resent the conversation only follows it."""
        return turn.protocol == PROTOCOL and self._records().accepted(turn).previous == reply

    def _records(self) -> Records:
        return Records(self._journal, self._makers)


def not_found(reply: str) -> errors.ThreadNotFound:
    """The same for a reply that never was, one of another key's, and one that is gone."""
    return errors.ThreadNotFound(
        f"No thread was found for the message '{reply}'. Send the whole conversation with "
        '`thread: {"type": "create"}` to begin a new one.'
    )


def _in_flight(reply: str) -> errors.ThreadInFlight:
    return errors.ThreadInFlight(f"Another request is continuing from the message '{reply}'. Wait for its answer.")
