"""A memory of what never changes and is read often, bounded by its size: the latest used stay."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Memory(Generic[V]):
    """Values by name, each with its size in bytes, about. For one thread at a time."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._values: OrderedDict[str, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: str) -> V | None:
        """The value of this name, if it is remembered."""
        found = self._values.get(name)
        if found is None:
            return None
        self._values.move_to_end(name)
        return found[0]

    def put(self, name: str, value: V, size: int) -> None:
        """Remembers a value; the ones that were not used for longest go."""
        self.forget(name)
        self._values[name] = value, size
        self._bytes += size
        while self._bytes > self._bytes_max:
            self.forget(next(iter(self._values)))

    def forget(self, name: str) -> None:
        """Drops a value, if it is there."""
        _, size = self._values.pop(name, (None, 0))
        self._bytes -= size
