"""One thread that works while the serving one waits for the model: masks, some microseconds of work in each step.

An executor's futures cost more than the work itself: two queues written in C do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


class Beside(Generic[Given, Made]):
    """Does `work` with what is given, one at a time; `give` and `take` are for one thread, by turns.

    The thread is there from the first `give` on.
    """

    def __init__(self, work: Callable[[Given], Made], name: str) -> None:
        self._work, self._name = work, name
        self._given: SimpleQueue[Given | None] = SimpleQueue()  # None ends it
        self._made: SimpleQueue[Made | BaseException] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy = False

    def give(self, given: Given) -> None:
        """Begins the work with it."""
        assert given is not None and not self._busy, "one at a time"
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._busy = True
        self._given.put(given)

    def take(self) -> Made:
        """Waits for what was made of the last `give`. Raises what the work raised."""
        assert self._busy, "nothing was given"
        made = self._made.get()
        self._busy = False
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self) -> None:
        """Waits for the work that is going on, and ends the thread."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            try:
                made: Made | BaseException = self._work(given)
            except BaseException as error:  # the serving thread's to know
                made = error
            self._made.put(made)
