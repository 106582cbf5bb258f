"""Leases: how threads that read and write files get at the bytes of blocks, wherever those lie.

In the process's own memory a lease is the blocks themselves. On a device it is host memory beside them: the bytes are
copied there before a file is written, and from there when a file was read and proved (see engine/device_memory.py).

A lease is taken and closed by the engine's thread. Between the two it belongs to one thread of the disk, and the
blocks are lent (see residency), so that nobody else writes to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

Views = Sequence[memoryview]  # a block each


class Out(Protocol):
    """Blocks that are to be written to a file."""

    def views(self) -> Views:
        """Their bytes. Waits until they are there; for any one thread."""
        ...

    def close(self) -> None:
        """The bytes are not needed any more. For the engine's thread."""
        ...


class Into(Protocol):
    """Blocks that are to be filled from a file. For any one thread."""

    def open(self) -> contextlib.AbstractContextManager[Views]:
        """Memory for their bytes, writable. May wait for others who read."""
        ...

    def store(self) -> None:
        """Puts what was read into the blocks, and waits until it is there; inside `open`."""
        ...


class Stages(Protocol):
    """Hands out leases. For the engine's thread."""

    def out(self, blocks: Sequence[int]) -> Out | None:
        """The blocks as they are by now; None: too many are on their way, and the caller tries again later."""
        ...

    def into(self, blocks: Sequence[int]) -> Into:
        """The blocks, to be filled."""
        ...


class Direct:
    """Blocks that lie in memory that every thread can use."""

    def __init__(self, memory: Callable[[int], memoryview]) -> None:
        """`memory` is that of a block, writable."""
        self._memory = memory

    def out(self, blocks: Sequence[int]) -> _Here:
        """The blocks themselves."""
        return _Here([self._memory(block) for block in blocks])

    def into(self, blocks: Sequence[int]) -> _Here:
        """The blocks themselves."""
        return _Here([self._memory(block) for block in blocks])


class _Here:
    """The lease of blocks that need no other memory."""

    def __init__(self, views: Views) -> None:
        self._views = views

    def views(self) -> Views:
        return self._views

    @contextlib.contextmanager
    def open(self) -> Iterator[Views]:
        yield self._views

    def store(self) -> None:
        """It is there already."""

    def close(self) -> None:
        """Nothing was taken."""
