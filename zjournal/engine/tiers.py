"""What one request has to do with the tiers behind device memory: its restore, what is told of it, and its backup.

Pure, as the scheduler is. Without snapshots there is nothing to restore and nothing to hand over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zjournal.engine.cache.blocks import BLOCK_TOKENS, blocks_for
from zjournal.engine.cache.residency import Residency, Ticket
from zjournal.engine.sequence import Sequence
from zjournal.link import wire

if TYPE_CHECKING:  # numpy, which an engine without snapshots does not need for this
    from zjournal.engine.cache.restore import Restore
    from zjournal.engine.cache.snapshots import Snapshots

BACKUP_TOKENS = 1024  # new tokens of a running request after which they are handed over to be backed up


class Tiers:
    """Between the scheduler's requests and the snapshots, if there are any."""

    def __init__(self, residency: Residency, snapshots: Snapshots | None) -> None:
        self._residency = residency
        self._snapshots = snapshots

    def begin(self, one: Sequence) -> None:
        """A request was admitted: looks for more of it than its ticket has."""
        assert one.ticket is not None
        if self._snapshots is not None:
            one.restore = self._snapshots.begin(one.ticket, one.session, one.ids.tobytes())

    def go_on(self, one: Sequence) -> list[wire.FromEngine] | None:
        """Takes a restore as far as it can go without waiting. None while it reads, and the request computes nothing.

        Else what is to be told before its first step; nothing if it has begun already and was preempted since.
        """
        restore, ticket = one.restore, one.ticket
        assert ticket is not None
        if restore is not None and restore.ready:
            assert self._snapshots is not None
            self._residency.extend(ticket, restore.target)
            one.computed = restore.base  # a block that was copied in part is read as a whole
            blocks = ticket.table[restore.base // BLOCK_TOKENS : blocks_for(restore.target)]
            self._snapshots.read(restore, blocks)
        if restore is not None and not restore.ended:
            return None
        if restore is not None:
            one.restored(restore.reached)
            self._residency.file(ticket, one.ids, one.computed)
        return [] if one.begun else self._matched(one, ticket, restore)

    def _matched(self, one: Sequence, ticket: Ticket, restore: Restore | None) -> list[wire.FromEngine]:
        """What each tier gave, then the match."""
        told: list[wire.FromEngine] = []
        if restore is None:
            found = wire.Matched(one.request, ticket.cached, one.prompt, reason=ticket.reason, nearest=ticket.nearest)
        else:
            told += restore.told()
            found = restore.matched(one.prompt)
        if self._snapshots is not None:
            self._snapshots.matched(one.session, found)
        return [*told, found]

    def back_up(self, one: Sequence) -> None:
        """Hands over what a long request has computed since the last time."""
        if self._snapshots is not None and one.computed - one.backed >= BACKUP_TOKENS:
            one.backed = one.computed
            self._snapshots.grew(one.request, one.session, one.namespace, one.ids[: one.computed].tobytes())

    def left(self, one: Sequence, *, terminal: bool) -> None:
        """A request is over. `terminal`: a client can build on it, so that its state is to be kept."""
        if self._snapshots is None:
            return
        if terminal:
            self._snapshots.ended(one.request, one.session, one.namespace, one.ids[: one.computed].tobytes())
        else:
            self._snapshots.dropped(one.request)

    def forget(self, requests: Iterable[str]) -> None:
        """Nothing more of these requests is written."""
        if self._snapshots is not None:
            for request in requests:
                self._snapshots.dropped(request)
