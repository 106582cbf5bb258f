"""What is remembered of sequences that come again and longer, as conversations do: the latest used, each its owner's.

What was made of a sequence from its front is right for each other one that begins alike, as far as they are equal. So
nothing here is believed by a name or a digest: a beginning is one because its elements were compared. What is kept is
bounded by bytes and by number, and of another owner's sequences nobody learns, not even by being served sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

SEQUENCES_MAX = 64  # kept at most, of all owners; each one that is asked for is compared with its owner's
ENDING = 2  # elements at the end of a sequence that may be others once it has grown: they ask for the next answer

V = TypeVar("V")


class _Kept(Generic[V]):
    """A sequence, whose it is, what is remembered of it, and about how many bytes all that takes."""

    def __init__(self, owner: str, elements: Sequence[Any], value: V, size: int) -> None:
        self.owner = owner
        self.elements = elements
        self.value = value
        self.size = size

    def ends_in(self, elements: Sequence[Any]) -> bool:
        """Whether the last element before its ending stands at the same place there: then it may begin them."""
        at = len(self.elements) - ENDING - 1
        return 0 <= at < len(elements) and bool(self.elements[at] == elements[at])


class Beginning(NamedTuple, Generic[V]):
    """How many elements one sequence has in common with another one from the front, and what that one is."""

    length: int = 0
    kept: _Kept[V] | None = None

    @property
    def value(self) -> V | None:
        """What is remembered of the whole of the other one; None: no element is common."""
        return None if self.kept is None else self.kept.value


class Growing(Generic[V]):
    """Sequences of one kind: lists, tuples or arrays, which nobody changes any more. For one thread."""

    def __init__(self, bytes_max: int, sequences_max: int = SEQUENCES_MAX) -> None:
        self._bytes_max = bytes_max
        self._sequences_max = sequences_max
        self._bytes = 0
        self._kept: list[_Kept[V]] = []  # the latest used last

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, owner: str) -> Own[V]:
        """Those of one owner."""
        return Own(self, owner)

    def longest(self, owner: str, elements: Sequence[Any]) -> Beginning[V]:
        """The longest beginning that another sequence of this owner has as well.

        A sequence that as a whole, but for its end, is the better half of this one is taken before all others are
        compared: of many that part late, each comparison takes as long as they are.
        """
        best, found = 0, None
        own = [kept for kept in reversed(self._kept) if kept.owner == owner]
        for kept in sorted(own, key=lambda kept: (not kept.ends_in(elements), -len(kept.elements))):
            if (length := common(kept.elements, elements)) > best:
                best, found = length, kept
            if length >= len(kept.elements) - ENDING and 2 * length >= len(elements):
                break
        if found is not None:
            self._kept.remove(found)
            self._kept.append(found)
        return Beginning(best, found)

    def put(self, owner: str, elements: Sequence[Any], value: V, size: int, beginning: Beginning[V]) -> None:
        """Remembers a sequence, in the place of the one of its `beginning` if it has grown out of that.

        One that is itself hardly more than that beginning is not kept, nor is one that is larger than all may be.
        `size`: in bytes, about.
        """
        before = beginning.kept
        if before is not None and before in self._kept:
            assert before.owner == owner, "a sequence has grown out of another owner's"
            if beginning.length >= max(len(before.elements) - ENDING, 1) and len(elements) >= len(before.elements):
                self._forget(before)
            elif beginning.length >= len(elements) - ENDING:
                return
        if size > self._bytes_max:
            return
        self._kept.append(_Kept(owner, elements, value, size))
        self._bytes += size
        while self._bytes > self._bytes_max or len(self._kept) > self._sequences_max:
            self._forget(self._kept[0])

    def clear(self) -> None:
        """Drops everything, as after an erasure: whose content it was cannot be told."""
        self._kept.clear()
        self._bytes = 0

    def _forget(self, kept: _Kept[V]) -> None:
        self._kept.remove(kept)
        self._bytes -= kept.size


class Own(Generic[V]):
    """One owner's part of the sequences that are remembered."""

    def __init__(self, growing: Growing[V], owner: str) -> None:
        self._growing = growing
        self._owner = owner

    def longest(self, elements: Sequence[Any]) -> Beginning[V]:
        """As Growing.longest."""
        return self._growing.longest(self._owner, elements)

    def put(self, elements: Sequence[Any], value: V, size: int, beginning: Beginning[V]) -> None:
        """As Growing.put."""
        self._growing.put(self._owner, elements, value, size, beginning)


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements from the front are equal. Doubling, then halving: slices are compared faster than elements."""
    assert type(one) is type(other), "a list is never equal to a tuple"
    limit = min(len(one), len(other))
    equal, step = 0, 1
    while step and equal < limit:
        step = min(step, limit - equal)
        if one[equal : equal + step] == other[equal : equal + step]:
            equal += step
            step *= 2
        else:
            step //= 2
    return equal
