"""The tiers behind device memory, as the scheduler and the worker see them: restore, backup, and the journal's word.

Nothing in here waits for a disk. What a disk has done is taken in by `settle`, what is due is begun by `pump`, and
what is to be told lies in `take_events`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from zjournal.engine.cache import probe, sweep
from zjournal.engine.cache.backup import EVERY_TOKENS, Backups
from zjournal.engine.cache.disk import Disk
from zjournal.engine.cache.gate import Gate
from zjournal.engine.cache.prefix import EXTENDED, FORKED, WHOLE
from zjournal.engine.cache.residency import Residency, Ticket
from zjournal.engine.cache.restore import Restore, Restorer
from zjournal.engine.cache.shelf import Settings, Shelf
from zjournal.engine.cache.staging import Direct, Stages
from zjournal.link import wire
from zjournal.snapshots import format
from zjournal.snapshots.format import CHUNK_TOKENS_BYTES

__all__ = ["EVERY_TOKENS", "Memory", "Settings", "Snapshots"]

log = logging.getLogger("zjournal.engine")

Told = wire.Known | wire.Committed | wire.Refused | wire.Pin | wire.Purge | wire.Foreign
TOLD = (wire.Known, wire.Committed, wire.Refused, wire.Pin, wire.Purge, wire.Foreign)


class Memory(Protocol):
    """Where the KV lies."""

    fingerprint: str  # of weights and numerics
    layout: str  # what a block's bits and their order depend on, beside the namespace
    block_bytes: int

    def block_memory(self, block: int) -> memoryview:
        """The bytes of a block, writable; on a device, where there are stages, a copy."""
        ...

    def clear_behind(self, memory: memoryview, tokens: int) -> None:
        """Zeros in a copy of a block's bytes what lies behind its first `tokens` tokens. For any thread."""
        ...


class Snapshots:
    """All of it for one engine. For one thread."""

    def __init__(
        self,
        settings: Settings,
        residency: Residency,
        memory: Memory,
        facts: Iterator[int],
        clock: Callable[[], int],
        wall: Callable[[], int],
        *,
        learns: bool = True,
        disk: Disk | None = None,
        stages: Stages | None = None,
    ) -> None:
        """`clock` and `wall` give microseconds, the one from any start, the other since 1970.

        `learns`: whether times say anything (see Gate). `stages`: the way to blocks that no other thread can use.
        Raises SnapshotFault if there can be no such folder.
        """
        self._fingerprint, self._clock = memory.fingerprint, clock
        self.disk = disk if disk is not None else Disk()
        self.gate = Gate(learns=learns, always=settings.always)
        self.shelf = Shelf(settings, self.disk, facts, wall, self.gate)
        _check_sizes(settings, memory.block_bytes)
        layout = format.digest("layout", memory.layout, str(memory.block_bytes))
        stages = stages if stages is not None else Direct(memory.block_memory)
        self._restorer = Restorer(self.shelf, residency, stages, layout, clock)
        parts = (stages, memory.clear_behind, layout, memory.block_bytes, clock)
        self._backups = Backups(self.shelf, residency, *parts)

    # --- the scheduler's ---------------------------------------------------------------------------------

    def begin(self, ticket: Ticket, session: str, prompt: bytes) -> Restore | None:
        """A request was admitted: looks for more of its packed prompt than the ticket has."""
        self.shelf.touch(session)
        return self._restorer.begin(ticket, prompt)

    def read(self, restore: Restore, blocks: Sequence[int]) -> None:
        """Begins to read what was found into these blocks, which stand behind the resident ones."""
        self._restorer.read(restore, blocks)

    def matched(self, session: str, matched: wire.Matched) -> None:
        """What of a prompt is reused is settled: so it is known what the session kept of its turn before."""
        before = self.shelf.index.snapshots.get(matched.nearest)
        if before is not None and before.session == session and matched.reason in (WHOLE, EXTENDED, FORKED):
            self.shelf.index.went_on(matched.nearest, matched.cached)

    def grew(self, request: str, session: str, namespace: str, tokens: bytes) -> None:
        """A running turn has these tokens in memory by now."""
        whole = tokens[: len(tokens) // CHUNK_TOKENS_BYTES * CHUNK_TOKENS_BYTES]
        if whole:
            self._backups.grew(request, session, namespace, whole, final=False)

    def ended(self, request: str, session: str, namespace: str, tokens: bytes) -> None:
        """A turn ended well, and its state is in memory."""
        self.shelf.touch(session)
        self._backups.grew(request, session, namespace, tokens, final=True)

    def dropped(self, request: str) -> None:
        """A turn ended badly, or was erased."""
        self._backups.drop(request)

    # --- the worker's ------------------------------------------------------------------------------------

    def take(self, message: Told) -> None:
        """What the journal says."""
        match message:
            case wire.Known():
                self.shelf.known(message)
                if message.last:
                    self._begin(message)
            case wire.Committed(fact):
                told = self.shelf.committed(fact)
                if told is not None:
                    self._backups.committed(told)
            case wire.Refused(fact):
                told = self.shelf.refused(fact)
                if told is not None:
                    self._backups.drop(told.request)
            case wire.Pin():
                self.shelf.pin(message)
            case wire.Purge():
                for request in message.requests:
                    self._backups.drop(request)
                self.shelf.purge(message)
            case wire.Foreign():
                self.shelf.foreign(message)

    def _begin(self, last: wire.Known) -> None:
        """All that the journal knows is told."""
        for speed in last.speeds:
            if speed.fingerprint == self._fingerprint:
                self.gate.remember(speed.prefill_tokens_s)
        probe.begin(self.shelf, self._clock)
        sweep.begin(self.shelf)

    def settle(self) -> int:
        """Takes in what the disk has done; returns how many things that were."""
        return self.disk.finish()

    def pump(self, *, idle: bool, flush: bool = False) -> None:
        """Begins to write what is due. `idle`: nothing runs. `flush`: the end is near, all is due."""
        if self.shelf.swept:  # what an earlier life left in the folder counts against the limit as well
            self._backups.pump(idle=idle, flush=flush)

    def computed(self, slices: Sequence[tuple[int, int]], took_us: int) -> None:
        """A step computed slices, each of some position and some tokens, in so many microseconds."""
        reading = [(start, tokens) for start, tokens in slices if tokens > 1]
        tokens = sum(count for _, count in reading)
        if tokens:
            start = sum(start * count for start, count in reading) // tokens
            self.gate.computed(start, tokens, took_us)

    def due_us(self) -> int | None:
        """When `pump` is wanted although nothing happens, by the clock; None: never."""
        return self._backups.due_us()

    @property
    def unwritten(self) -> int:
        """States of which something is not on disk yet."""
        return self._backups.waiting

    @property
    def stuck(self) -> bool:
        """Whether a disk that has refused is left alone: what is unwritten will not be written before the end."""
        return self._backups.refused

    @property
    def open(self) -> bool:
        """Whether something is being written, or waits for the journal."""
        return self.disk.pending > 0 or self.shelf.facts_open > 0

    def take_events(self) -> list[wire.FromEngine]:
        """What is to be told, in order."""
        events, self.shelf.events = self.shelf.events, []
        return events

    def gauges(self) -> dict[str, Any]:
        """The fields of wire.Gauges that are about snapshots."""
        return {
            "snapshot_bytes": self.shelf.used,
            "snapshot_chunks": len(self.shelf.index.chunks),
            "snapshots": len(self.shelf.index.snapshots),
            "host_bytes": self.shelf.host.nbytes,
            "backups_off": self._backups.off,
            "backups_lost": self._backups.lost,
        }

    def close(self) -> None:
        """Waits for what the disk is doing, and lets go of the folder."""
        self.disk.close()
        self.shelf.folder.close()

    def audit(self) -> None:
        """Asserts the invariants that cost little."""
        self.shelf.audit()

    def check(self) -> None:
        """Asserts every invariant; looks at every chunk."""
        self.shelf.check()


def _check_sizes(settings: Settings, block_bytes: int) -> None:
    """Says what is set so small that it can hold nothing of this model."""
    chunk = format.HEADER_BYTES + format.CHUNK_BLOCKS * format.paged(block_bytes)
    if settings.limit < chunk:
        log.warning(
            "snapshot_limit is %d bytes and a chunk of this model has %d: nothing is kept on disk",
            settings.limit,
            chunk,
        )
    if 0 < settings.host_bytes < format.CHUNK_BLOCKS * block_bytes:
        log.warning("host_cache is %d bytes and a chunk has %d: nothing fits", settings.host_bytes, chunk)
