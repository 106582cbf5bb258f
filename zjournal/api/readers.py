"""How long a client may read nothing of what is made for it, looked at where its bytes wait: at the transport."""

from __future__ import annotations

import asyncio
from typing import Any

from zjournal.api.sse import Cut

READER_TIMEOUT_S = 60.0
LOOKS = 16  # how often it is looked, in this time, whether a client that lags has read something


class Watched:
    """A part of a connection's protocol: cuts a client that takes not a single byte for `_reader_timeout_s`.

    `cut` then says so. The last bytes of a client may be in the system's buffers.
    """

    loop: Any  # of the protocol, as is the transport
    transport: Any
    _reader_timeout_s = READER_TIMEOUT_S
    _looking: asyncio.TimerHandle | None = None
    _waiting_bytes = 0  # made and not taken, when it was looked last
    _taken_at = 0.0  # when less of them was seen last, on the loop's clock
    cut: Cut | None = None

    def _blocked(self) -> bool:
        """Whether somebody waits for the client to take what is there."""
        raise NotImplementedError

    def _watch(self) -> None:
        """Looks from now on whether the client takes what waits for it, until nothing does."""
        if self._looking is None:
            self._waiting_bytes, self._taken_at = self.transport.get_write_buffer_size(), self.loop.time()
            self._looking = self.loop.call_later(self._reader_timeout_s / LOOKS, self._look)

    def _took(self) -> None:
        """The client has taken something."""
        self._taken_at = self.loop.time()

    def _watch_no_more(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look(self) -> None:
        self._looking = None
        waiting, now = self.transport.get_write_buffer_size(), self.loop.time()
        if not waiting:
            return
        if waiting < self._waiting_bytes or not self._blocked():
            self._taken_at = now
        self._waiting_bytes = waiting
        if now - self._taken_at >= self._reader_timeout_s:
            self.cut = Cut(waiting, now - self._taken_at)
            self.transport.abort()
            return
        self._looking = self.loop.call_later(self._reader_timeout_s / LOOKS, self._look)
