"""Facts of running responses on their way into the journal; what it refuses is owed, and offered until it takes it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from zjournal import ask, errors
from zjournal.api import said
from zjournal.api.running_one import Running
from zjournal.journal import events, retention
from zjournal.journal.log import Journal
from zjournal.journal.written import Written
from zjournal.sessions.follow import Tail

OWED_RETRY_S = 1.0  # how often facts that the journal refused are offered again

log = logging.getLogger("zjournal.api")


class Recorder:
    """Owns what is owed to the journal. All methods run on the event loop."""

    def __init__(
        self, journal: Journal, unstored_retention_s: float, lost: Callable[[Running, ask.Broke], None]
    ) -> None:
        """`lost` ends a response that the journal failed under; what is missing of it is owed by then."""
        self._journal = journal
        self._unstored_retention_s = unstored_retention_s
        self._lost = lost
        self._held: set[str] = set()  # unstored, and still to be continued over the connections that made them
        self._owed: dict[str, Running] = {}  # ended and told so; the journal does not know their end yet

    def owed(self, response: str) -> Tail | None:
        """The tail of a response whose end is owed; None for any other."""
        running = self._owed.get(response)
        return running.tail if running else None

    def record(self, running: Running, facts: list[events.Fact], durable: Callable[[], None]) -> None:
        """Appends facts of one response; none is written after one that was lost."""
        running.last = self.when_durable(facts, durable, lambda fault: self._refused(running, fault), running.last)

    def when_durable(
        self,
        facts: list[events.Fact],
        then: Callable[[], None],
        otherwise: Callable[[errors.Fault], None],
        after: Written | None = None,
    ) -> Written:
        """Appends, and calls back on the event loop after the commit, or with the fault. `after` as in the journal."""

        def done(written: Written) -> None:
            error = written.exception()
            if error is None:
                then()
            elif isinstance(error, errors.Fault):
                otherwise(error)
            else:
                otherwise(errors.JournalUnavailable(str(error)))

        written = self._journal.append_soon(facts, after=after)
        written.add_done_callback(done)
        return written

    def again(self, offer: Callable[[], None]) -> None:
        """Has `offer` called when it is time to offer what was refused again."""
        asyncio.get_running_loop().call_later(OWED_RETRY_S, offer)

    def erase_unkept(self, running: Running) -> None:
        """An unstored response goes at once where none is retained, unless it is held; its end must be durable."""
        if not running.accepted.stored and running.accepted.response not in self._held:
            self._erase(running.accepted.response)

    def abandon(self, choices: Sequence[events.RequestAccepted], ends: list[events.Fact], after: Written) -> None:
        """Ends a request that has not begun: its client left while it was being written down."""

        def ended() -> None:
            for accepted in choices:
                if not accepted.stored:
                    self._erase(accepted.response)

        self.when_durable(ends, ended, lambda fault: None, after)

    def hold(self, response: str) -> None:
        """An unstored response is to be kept, though none is retained, until it is released."""
        self._held.add(response)

    @property
    def held(self) -> frozenset[str]:
        """The responses that are held now."""
        return frozenset(self._held)

    def release(self, response: str, ended: bool) -> None:
        """It is not needed any more; what is not held is ignored."""
        if response in self._held:
            self._held.discard(response)
            if ended:
                self._erase(response)

    def _erase(self, response: str) -> None:
        if self._unstored_retention_s == 0:
            loop = asyncio.get_running_loop()
            retention.erase_unstored(self._journal, response, self._held).add_done_callback(
                lambda erasing: None if erasing.exception() else self._erase_on(loop, erasing.result())
            )

    def _erase_on(self, loop: asyncio.AbstractEventLoop, response: str) -> None:
        """Goes on with a long chain. Called on the writer's thread; what the end of the server cuts is swept later."""
        if response:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._erase, response)

    def _refused(self, running: Running, fault: errors.Fault) -> None:
        """Facts of this response could not be written: it must not go on as if they had been."""
        if running.lost:
            return
        running.lost = running.ending = True
        response = running.accepted.response
        log.error("%s: the journal failed: %s", response, fault.message)
        end = ask.Broke(fault.code, fault.message, running.usage)
        # What is durable now stays so, and no more will be: the facts that are owed begin there.
        owed = _missing(running, end)
        self._owed[response] = running
        self._lost(running, end)
        self._settle_later(running, owed)

    def _settle_later(self, running: Running, owed: list[events.Fact]) -> None:
        """Offers owed facts to the journal until it takes them. A restart before that ends the response as well."""

        def settled() -> None:
            del self._owed[running.accepted.response]
            self.erase_unkept(running)

        def offer() -> None:
            self.when_durable(owed, settled, lambda fault: self._settle_later(running, owed))

        self.again(offer)


def _missing(running: Running, end: ask.Broke) -> list[events.Fact]:
    """What is missing in the journal for it to tell of this response what its client was told."""
    tenant, response = running.accepted.tenant, running.accepted.response
    facts = [] if running.matched is None else [events.Fact(running.matched)]
    facts += said.sampled(running.accepted, running.tail, running.tail.durable)
    failed = events.ResponseFailed(tenant=tenant, response=response, code=end.code, message=end.message)
    return [*facts, events.Fact(failed)]
