"""What was refused, as a line of the log each: who asked for what, and why not. A flood of them is counted.

Nothing of a refused request is journaled, so this line is all that is left of it. It tells no body, no query, no
header's value and no key: of the client's own words only the path and the path of the field at fault, escaped and cut,
without the key that the request came with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from litestar.types import Scope

from zjournal.api import credentials, failure
from zjournal.errors import Fault

FAULT = "zj_fault"  # key of the ASGI scope: the fault that the answer tells
KEY_NAME = "zj_key_name"  # likewise: the name of the request's key, once it is known
NOBODY = "-"  # in the place of whatever is not known
WINDOW_S = 1.0  # in which one line is told of each name and code; what else comes is counted
TEXT_CHARS_MAX = 200  # that are told of a path
GONE = 499  # a client that left was not refused
UNAVAILABLE = 503

log = logging.getLogger("zjournal.api")


class Refusal(msgspec.Struct, frozen=True):
    """One refused request."""

    method: str
    path: str
    status: int
    code: str = NOBODY
    param: str | None = None
    request: str = NOBODY  # its id
    key: str = NOBODY  # the name of its key

    @property
    def line(self) -> str:
        """The line of the log, in ASCII."""
        at = "" if self.param is None else f" param={shown(self.param)}"
        asked = f"{shown(self.method)} {shown(self.path)}"
        return f"refused: {asked} {self.status} {self.code}{at} key={self.key} request={self.request}"


def shown(text: str) -> str:
    """A text of a client as one word of printable ASCII, cut to its first TEXT_CHARS_MAX characters."""
    cut = text[:TEXT_CHARS_MAX]
    escaped = cut.encode("unicode_escape").decode().replace(" ", "\\x20")
    return f"{escaped}..." if len(text) > len(cut) else escaped


def refused(status: int, fault: Fault | None) -> bool:
    """Whether an answer is a refusal: the client's fault, or a server that takes nothing just now."""
    return 400 <= status < GONE or (status == UNAVAILABLE and fault is not None)


def of(scope: Scope, status: int, method: str) -> Refusal | None:
    """The refusal that an answer of this status is; None for another answer. `method` is the one of the client."""
    known: Any = scope
    fault: Fault | None = known.get(FAULT)
    if not refused(status, fault):
        return None
    headers = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
    keys = [key for name, value in headers for key in credentials.own_keys({name: value})]
    param = fault.param if fault is not None else None
    return Refusal(
        method,
        without(scope["path"], keys),
        status,
        fault.code if fault is not None else NOBODY,
        None if param is None else without(param, keys),
        failure.request_id(scope) or NOBODY,
        known.get(KEY_NAME) or NOBODY,
    )


def without(text: str, keys: Sequence[str]) -> str:
    """The text without these keys."""
    for key in keys:
        text = text.replace(key, credentials.REMOVED)
    return text


def unread(status: int, code: str) -> Refusal:
    """What was refused before it was a request that could be read."""
    return Refusal(NOBODY, NOBODY, status, code)


class Tally:
    """Which refusals are told, and how many others there were. Pure: times are handed in, in seconds."""

    def __init__(self) -> None:
        # By name and code, the oldest first: when its window ends, and how many were not told.
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def take(self, refusal: Refusal, now: float) -> str | None:
        """The line to tell; None for one that is counted. What is `due` must have been taken before."""
        place = refusal.key, refusal.code
        window = self._windows.get(place)
        if window is None:
            self._windows[place] = (now + WINDOW_S, 0)
            return refusal.line
        end, more = window
        self._windows[place] = (end, more + 1)
        return None

    def due(self, now: float) -> Iterator[str]:
        """Ends the windows that are over; a line for each in which something was not told."""
        while self._windows:
            (key, code), (end, more) = next(iter(self._windows.items()))
            if end > now:
                return
            del self._windows[key, code]
            if more:
                yield f"refused: {more} more within {WINDOW_S:g} s: {code} key={key}"


class Refusals:
    """Writes refusals to the log. Belongs to the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tally = Tally()
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, refusal: Refusal | None) -> None:
        """One line at once, or a count within WINDOW_S."""
        if refusal is None:
            return
        now = self._clock()
        self._end(now)
        line = self._tally.take(refusal, now)
        if line is not None:
            log.info("%s", line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._tick)

    def close(self) -> None:
        """Tells what was counted and not told yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end(float("inf"))

    def _tick(self) -> None:
        self._timer = None
        self._end(self._clock())
        if len(self._tally):
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._tick)

    def _end(self, now: float) -> None:
        for line in self._tally.due(now):
            log.info("%s", line)
