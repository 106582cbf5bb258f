"""The engine's tier in a life: index and files on the failing disk, and what it tells in the real journal.

Tokens stand for KV, as in the engine's own tests, so that whatever is restored is compared byte by byte. Its facts go
the way they go in the server: one after another, each looked at in the transaction that writes it, and answered once it
is durable. While the journal's disk refuses they wait in line.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.unit.engine import tiers
from zjournal.api import snapshots as api
from zjournal.api.said import of_disk
from zjournal.engine.cache import sweep
from zjournal.engine.cache.backup import RETRY_US
from zjournal.errors import JournalUnavailable
from zjournal.journal import events, snapshots
from zjournal.journal.events import Fact, Recorded
from zjournal.journal.log import Journal
from zjournal.journal.transaction import Transaction
from zjournal.link import wire

BLOCKS = 96  # of device memory: two states hardly fit
DISK_FREE = 1 << 40
WALK_AFTER_US = 1_000_000  # so much later than they are files are looked at: those of this very moment count
START_US = 1_700_000_000_000_000  # when the tier's clock begins
RUN_STEPS_MAX = 3_000


class Ask(NamedTuple):
    """What the engine is to do: the prompt of a response, and what it says."""

    response: str
    session: str
    prompt: tuple[int, ...]
    says: tuple[int, ...]


class Served(NamedTuple):
    """What the engine did. `waiting`: of its messages, those that the journal did not take."""

    cached: int
    restored: int
    waiting: int
    refused: int


class Ledger:
    """The journal as the engine knows it, and as the engine's tests want it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.sessions: dict[str, str] = {}

    def known(self) -> tuple[()]:
        """Nothing: the tier takes its pages itself."""
        return ()

    def pages(self) -> Iterator[wire.Known]:
        """What the server tells a new engine."""
        for rows in snapshots.chunks(self._journal):
            yield from api._known_chunks(rows)
        for found in snapshots.snapshots(self._journal):
            yield from api._known_snapshots(found)
        yield wire.Known(space=b"", last=True)


class Tier(tiers.Tiered):  # type: ignore[misc]
    """An engine over `folder` that knows what `journal` has."""

    def __init__(self, folder: Path, journal: Journal, limit: int, written: Callable[[], None]) -> None:
        """`written` is called after each commit of the engine's facts, before the engine hears of it."""
        self._records = journal
        self._written = written
        self._line: deque[wire.FromEngine] = deque()
        self._busy = False
        self._walks = False
        self._refused = 0
        ledger = Ledger(journal)
        super().__init__(folder, journal=ledger, blocks=BLOCKS, limit=limit)
        shelf = self.snapshots.shelf
        shelf.measure = lambda: DISK_FREE  # how full the real disk is must change nothing
        shelf.measured(DISK_FREE)
        for page in ledger.pages():
            shelf.known(page)
        shelf.foreign(wire.Foreign(()))
        self._walks = True
        sweep.begin(shelf)
        self._walks = False
        self.hear(self.snapshots.take_events())

    def wall(self) -> int:
        return time.time_ns() // 1000 + WALK_AFTER_US if self._walks else START_US + self.now

    def at(self, now_us: int) -> None:
        """Lets the clock of the life come; the engine's never goes back."""
        self.now = max(self.now, now_us - START_US)

    def serve_one(self, ask: Ask | None) -> Served:
        """Does what is asked and all that follows from it."""
        self._refused = 0
        self._send()
        if ask is None:
            self.now += RETRY_US  # long enough for a disk that refused to be tried again
        else:
            self.submit(ask.response, ask.prompt, says=ask.says, session=ask.session)
        self.run(RUN_STEPS_MAX)
        matched = self.of(wire.Matched, ask.response) if ask is not None else []
        cached, restored = (matched[0].cached, matched[0].restored) if matched else (0, 0)
        self.events = []
        return Served(cached, restored, len(self._line), self._refused)

    def listen(self, told: Sequence[Recorded]) -> None:
        """Hears of facts that others have written, as the server tells them."""
        said = [fact.event for fact in told]
        erased = tuple(event.response for event in said if isinstance(event, events.PayloadErased))
        if erased:
            self.snapshots.take(wire.Purge(b"", (), erased, snapshots.DELETED))
        for event in said:
            if isinstance(event, events.CachePurged) and event.cause not in api.BY_ENGINE:
                self.snapshots.take(wire.Purge(event.space, event.hashes, (), event.cause))
            elif isinstance(event, events.SnapshotPinned | events.SnapshotUnpinned):
                self.snapshots.take(wire.Pin(event.response, isinstance(event, events.SnapshotPinned)))

    def close(self) -> None:
        """Lets go of the folder, and nothing else: as a kill would, but in this process."""
        self.snapshots.close()

    def check(self) -> None:
        """Files may be damaged here at any time: the driver looks at them itself."""
        self.scheduler.check()
        self.snapshots.check()

    # --- to the journal ----------------------------------------------------------------------------------

    def hear(self, told: Iterable[wire.FromEngine]) -> None:
        for message in told:
            if isinstance(message, wire.SnapshotsOff):  # where the run lies must change nothing
                message = msgspec.structs.replace(message, message=message.message.replace(str(self.folder), ""))
            self.events.append(message)
            if isinstance(message, (*api.MESSAGES, wire.Restored)):
                self._line.append(message)
        self._send()

    def _send(self) -> None:
        """Writes what is in line, as far as the journal takes it."""
        if self._busy:
            return
        self._busy = True
        while self._line:
            try:
                outcome = self._records.run(self._work(self._line[0])).result()
            except JournalUnavailable:
                break
            finally:
                for _ in range(2):  # what the writer does behind a commit must not run beside the engine: see life
                    self._records.run(lambda _: None).exception()
            self._written()
            self._answer(self._line.popleft(), outcome)
        self._busy = False

    def _work(self, message: wire.FromEngine) -> Callable[[Transaction], api.Outcome]:
        if not isinstance(message, wire.Restored):
            return lambda tx: api._apply(tx, message)  # type: ignore[arg-type]
        turn = self._records.turn(message.request)

        def restored(tx: Transaction) -> api.Outcome:
            if turn is not None:
                tx.append([Fact(of_disk(turn.tenant, message))])
            return api.Outcome(turn is not None)

        return restored

    def _answer(self, message: wire.FromEngine, outcome: api.Outcome) -> None:
        if isinstance(message, wire.BackedUp | wire.PurgePlanned):
            self._refused += not outcome.written
            answer = wire.Committed if outcome.written else wire.Refused
            self.snapshots.take(answer(message.fact))
        if outcome.pinned and isinstance(message, wire.BackedUp):
            self.snapshots.take(wire.Pin(message.request, True))
        self.hear(self.snapshots.take_events())
