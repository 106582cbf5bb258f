"""The comparison of the snapshots' folder with the index: in the background, once, a few entries at a time.

What nobody names is unlinked, after it was asked for once more; what is missing is found by nobody any more.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from zjournal.engine.cache.shelf import Shelf
from zjournal.errors import ChunkFault, SnapshotFault
from zjournal.link import wire
from zjournal.snapshots import reconcile
from zjournal.snapshots.format import Reason

EVER_NS = 1 << 63  # clocks may go back between two lives
MISSING_PAGE = 256  # chunks that are told of at once
UNSEEN_BYTES = 1 << 30  # counted for what a folder that cannot be read may hold: more than one life leaves unnamed

log = logging.getLogger("zjournal.engine")


def begin(shelf: Shelf) -> None:
    """Begins to compare. Nothing is written until it is over, so what nobody names is an orphan, however young."""
    totals = reconcile.Totals()
    known = [(chunk.namespace, hash_, chunk.file_bytes) for hash_, chunk in shelf.index.chunks.items()]
    walk = reconcile.walk(shelf.folder, shelf.named, shelf.index.chunks.__contains__, EVER_NS, totals)
    absent = reconcile.absent(shelf.folder, known, shelf.named)
    Sweep(shelf, totals).run([walk, absent])


class Sweep:
    """One comparison of folder and index, in steps; tells the journal what it found."""

    def __init__(self, shelf: Shelf, totals: reconcile.Totals) -> None:
        self._shelf = shelf
        self._totals = totals
        self._missing: list[tuple[bytes, bytes]] = []
        self._counts: Counter[reconcile.Kind] = Counter()
        self._freed = 0

    def run(self, walks: list[Iterator[list[reconcile.Finding]]]) -> None:
        """Does the next step, and then those that follow."""
        if not walks:
            self._end()
            return

        def step() -> list[reconcile.Finding] | None:
            try:
                return next(walks[0], None)
            except OSError as error:
                raise SnapshotFault(f"{self._shelf.folder.path}: {error}") from error

        def then(found: list[reconcile.Finding] | SnapshotFault | None) -> None:
            if isinstance(found, SnapshotFault):
                log.error("the snapshots' folder cannot be looked through: %s", found.message)
                self._shelf.leaving.assume(UNSEEN_BYTES)
            if found is None or isinstance(found, SnapshotFault):
                self.run(walks[1:])
                return
            for finding in found:
                self._take(finding)
            self.run(walks)

        self._shelf.disk.read(step, then)

    def _take(self, finding: reconcile.Finding) -> None:
        shelf = self._shelf
        self._counts[finding.kind] += 1
        match finding.kind:
            case reconcile.Kind.MISSING | reconcile.Kind.RESIZED:
                chunk = shelf.index.chunks.get(finding.hash)
                if chunk is not None and not chunk.bad and finding.kind is reconcile.Kind.MISSING:
                    shelf.index.refuse(finding.hash)
                    self._missing.append((chunk.namespace, finding.hash))
                elif chunk is not None and not chunk.bad:
                    fault = ChunkFault(finding.path, Reason.CUT, f"has {finding.file_bytes} bytes")
                    shelf.found_bad(chunk.namespace, finding.hash, fault)
            case reconcile.Kind.ORPHAN | reconcile.Kind.LEFTOVER:
                place = finding.path.split("/", 1)[0]
                if finding.aside:
                    named = finding.hash in shelf.index.chunks
                else:
                    named = bool(finding.hash) and shelf.named(place, finding.hash) is not None
                if named:
                    return
                self._freed += finding.file_bytes
                shelf.leaving.remove(finding)

    def _end(self) -> None:
        starts = range(0, max(len(self._missing), 1), MISSING_PAGE)
        pages = [tuple(self._missing[at : at + MISSING_PAGE]) for at in starts]
        self._shelf.swept = True
        counts = self._counts
        for page in pages[:-1]:
            self._shelf.events.append(wire.Reconciled(missing=page, last=False))
        self._shelf.events.append(
            wire.Reconciled(
                missing=pages[-1],
                files=self._totals.files,
                orphans=counts[reconcile.Kind.ORPHAN],
                leftovers=counts[reconcile.Kind.LEFTOVER],
                strange=counts[reconcile.Kind.STRANGE],
                file_bytes=self._freed,
            )
        )
