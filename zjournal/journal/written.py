"""What an event loop holds of an append until it is durable: the loop is woken once for all that a commit carried.

A `concurrent.futures.Future` for each append costs more than the fact in it: a lock, and a wake-up of the loop each.
Here the writer settles the appends of a group one by one, and then tells each loop of all of its own at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable


class Written:
    """An append on its way. Made, awaited and told on its loop; settled by the writer's thread, once."""

    __slots__ = ("_callbacks", "_outcome", "_told", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._outcome: int | BaseException | None = None
        self._told = False
        self._callbacks: list[Callable[[Written], object]] = []

    def set_result(self, seq: int) -> None:
        """It is durable, and this is the number of its last fact. The loop does not know yet."""
        assert self._outcome is None
        self._outcome = seq

    def set_exception(self, error: BaseException) -> None:
        """Nothing of it was written. The loop does not know yet."""
        assert self._outcome is None
        self._outcome = error

    def done(self) -> bool:
        """Whether it is settled, told or not."""
        return self._outcome is not None

    def exception(self) -> BaseException | None:
        """Why it was not written; None if it was. It must be settled."""
        assert self._outcome is not None
        return self._outcome if isinstance(self._outcome, BaseException) else None

    def add_done_callback(self, callback: Callable[[Written], object]) -> None:
        """Calls `callback` with this on the loop once it is settled, soon if it was told already."""
        if self._told:
            self.loop.call_soon(callback, self)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[object, None, int]:
        """The number of its last fact; raises what `append` raises. Who waits may give up; what is written stays."""
        if not self._told:
            waiter: asyncio.Future[None] = self.loop.create_future()

            def wake(_: Written) -> None:
                if not waiter.done():  # else who waited has given up
                    waiter.set_result(None)

            self._callbacks.append(wake)
            yield from waiter
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def _tell(self) -> None:
        self._told = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception as error:  # its bug must not keep the others from being told
                context = {"message": "a callback of an append failed", "exception": error}
                self.loop.call_exception_handler(context)


def tell(settled: Iterable[Written]) -> None:
    """Tells each loop, in order, of its settled appends. From any thread. A loop that is closed hears nothing."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Written]] = {}
    for written in settled:
        by_loop.setdefault(written.loop, []).append(written)
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_tell_all, own)
        except RuntimeError:  # it is closed: nobody waits any more
            continue


def _tell_all(settled: list[Written]) -> None:
    for written in settled:
        written._tell()
