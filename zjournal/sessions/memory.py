"""A memory of what never changes and is read often, bounded by its size: the latest used stay.

It is bounded by the number of values as well: ten thousand small ones cost mostly what holds them, and a server whose
memory goes on growing with each answer until some caches are full cannot be told from one that leaks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

VALUES_MAX = 2_048

V = TypeVar("V")


class Memory(Generic[V]):
    """Values by name, each with its size in bytes, about. For any thread."""

    def __init__(self, bytes_max: int, values_max: int = VALUES_MAX) -> None:
        self._bytes_max = bytes_max
        self._values_max = values_max
        self._bytes = 0
        self._values: OrderedDict[str | bytes, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: str | bytes) -> V | None:
        """The value of this name, if it is remembered."""
        with self._lock:
            found = self._values.get(name)
            if found is None:
                return None
            self._values.move_to_end(name)
            return found[0]

    def put(self, name: str | bytes, value: V, size: int) -> None:
        """Remembers a value; the ones that were not used for longest go. One that is larger than all is not kept."""
        with self._lock:
            self._forget(name)
            if size > self._bytes_max:
                return
            self._values[name] = value, size
            self._bytes += size
            while self._bytes > self._bytes_max or len(self._values) > self._values_max:
                self._forget(next(iter(self._values)))

    def forget(self, name: str | bytes) -> None:
        """Drops a value, if it is there."""
        with self._lock:
            self._forget(name)

    def clear(self) -> None:
        """Drops all values."""
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def _forget(self, name: str | bytes) -> None:
        _, size = self._values.pop(name, (None, 0))
        self._bytes -= size
