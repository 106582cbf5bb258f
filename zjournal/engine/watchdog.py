"""Ends a process whose work on a device never ends: a kernel that hangs cannot be stopped in any other way.

A step says when it begins and when it is over. A thread looks now and then; it costs a step two assignments.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Watchdog:
    """`late` is called once, in a thread of its own, between one and two times `seconds` after work began that is not
    over. `clock` gives seconds, from any start."""

    def __init__(self, seconds: float, late: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        assert seconds > 0
        self._seconds, self._late, self._clock = seconds, late, clock
        self._since: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zj-watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The work."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._since = None

    def overdue(self) -> bool:
        """Whether what is being done has taken too long."""
        since = self._since
        return since is not None and self._clock() - since > self._seconds

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            if self.overdue():
                self._late()
                return
