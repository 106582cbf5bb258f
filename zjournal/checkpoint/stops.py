"""Stop strings in a byte stream, however it is cut.

The engine uses this to end at the right token, the API to cut the text at the right byte; both must agree,
so both use the same matcher on the same bytes. Bytes that may yet become a stop string are held back.
"""

from __future__ import annotations

STOP_BYTES_MAX = 4096  # what may be held back


class StopMatcher:
    """Finds the stop string that is complete first; between those that end together, the one that starts first."""

    def __init__(self, stops: tuple[bytes, ...]) -> None:
        assert all(0 < len(stop) <= STOP_BYTES_MAX for stop in stops), stops
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = b""
        self.hit: bytes | None = None

    def feed(self, data: bytes) -> bytes:
        """Returns the bytes that are now known to stand before any stop string. After a hit: nothing."""
        if self.hit is not None:
            return b""
        if not self._stops:
            return data
        data = self._held + data
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := data.find(stop)) >= 0]
        if ends:
            _, at, self.hit = min(ends)
            self._held = b""
            return data[:at]
        keep = self._partial(data)
        self._held = data[keep:]
        return data[:keep]

    def end(self) -> bytes:
        """The stream is over: returns what was held back."""
        held, self._held = self._held, b""
        return held

    def _partial(self, data: bytes) -> int:
        """Where the longest beginning of a stop string that ends the data starts."""
        for at in range(max(0, len(data) - self._longest + 1), len(data)):
            tail = data[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(data)
