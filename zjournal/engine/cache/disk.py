"""The threads of the snapshots: whatever may wait for a disk is done here, never in the engine's own thread.

Work ends in a queue, and an eventfd tells that there is something in it, so that one poll waits for requests and for
the disk. What follows from an end is done in the engine's thread, one after another, when it asks for it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from zjournal.errors import SnapshotFault

READERS = 8  # files that are read at once: the disk's queue depth
NICE = 19  # of the thread that writes: nobody waits for it

T = TypeVar("T")


class Disk:
    """Runs work in threads of its own. All methods are for one thread, the engine's."""

    def __init__(self, readers: int = READERS) -> None:
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="zj-read")
        # One: a file is moved or unlinked before another is written in its place. Writing takes processor time from
        # the model besides, and the disk is fast enough.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="zj-write", initializer=_yield_to_others)
        self._ended: collections.deque[tuple[Future[Any], Callable[[Any], None]]] = collections.deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.pending = 0  # that was begun and whose end was not asked for

    def fileno(self) -> int:
        """Readable when something has ended."""
        return self._event

    def read(self, work: Callable[[], T], then: Callable[[T | SnapshotFault], None]) -> None:
        """Runs `work` in a reading thread; `finish` hands what it returned, or its SnapshotFault, to `then`."""
        self._submit(self._readers, work, then)

    def write(self, work: Callable[[], T], then: Callable[[T | SnapshotFault], None]) -> None:
        """The same in the writing thread, one after another in this order; no read waits for a write."""
        self._submit(self._writer, work, then)

    def finish(self) -> int:
        """Does what follows from all that has ended; returns how many that were. Other errors of `work` are raised."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        count = 0
        while self._ended:
            future, then = self._ended.popleft()
            self.pending -= 1
            count += 1
            try:
                result = future.result()
            except SnapshotFault as fault:
                result = fault
            then(result)
        return count

    def close(self) -> None:
        """Waits for what was begun, and gives up the rest."""
        for pool in (self._readers, self._writer):
            pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._event)

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[[], T], then: Callable[[T | SnapshotFault], None]
    ) -> None:
        self.pending += 1
        pool.submit(work).add_done_callback(lambda future: self._tell(future, then))

    def _tell(self, future: Future[Any], then: Callable[[Any], None]) -> None:
        if not future.cancelled():
            self._ended.append((future, then))
            os.eventfd_write(self._event, 1)


def _yield_to_others() -> None:
    """The model's threads go first on a machine that has no core to spare."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
