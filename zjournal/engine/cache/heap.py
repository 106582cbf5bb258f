"""A heap of leaves from which any can be taken out: what it holds is always what may be given up, and nothing else.

heapq would keep entries that are not true any more, and now and then thousands of them would come up in one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Placed(Protocol):
    """What knows where it stands in the heap; -1: it does not."""

    place: int


T = TypeVar("T", bound=Placed)
Key = tuple[float, int]


class Heap(Generic[T]):
    """The least key first. A key does not change while its item is in here. All costs are O(log n)."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, T]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[Key, T]]:
        return iter(self._entries)

    def add(self, key: Key, item: T) -> None:
        """Puts in an item that is not there."""
        assert item.place < 0
        self._entries.append((key, item))
        self._rise(len(self._entries) - 1)

    def remove(self, item: T) -> None:
        """Takes out an item; does nothing if it is not there."""
        place = item.place
        if place < 0:
            return
        item.place = -1
        last = self._entries.pop()
        if place < len(self._entries):
            self._entries[place] = last
            last[1].place = place
            self._sink(place)
            self._rise(last[1].place)

    def pop(self) -> tuple[Key, T]:
        """Takes out the first item."""
        key, item = self._entries[0]
        self.remove(item)
        return key, item

    def check(self) -> None:
        """Asserts order and places."""
        for place, (key, item) in enumerate(self._entries):
            assert item.place == place
            assert place == 0 or self._entries[(place - 1) // 2][0] <= key

    def _rise(self, place: int) -> None:
        entries = self._entries
        entry = entries[place]
        while place and entry[0] < entries[above := (place - 1) // 2][0]:
            entries[place] = entries[above]
            entries[place][1].place = place
            place = above
        entries[place] = entry
        entry[1].place = place

    def _sink(self, place: int) -> None:
        entries = self._entries
        entry = entries[place]
        while (below := 2 * place + 1) < len(entries):
            if below + 1 < len(entries) and entries[below + 1][0] < entries[below][0]:
                below += 1
            if entry[0] <= entries[below][0]:
                break
            entries[place] = entries[below]
            entries[place][1].place = place
            place = below
        entries[place] = entry
        entry[1].place = place
