"""The garbage collector: out of the way while a process starts, and what it need not look at once that has settled."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """For imports: what they make stays. To look through it again and again is a tenth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """What was imported and loaded lives as long as the process, and what it took to load it goes back.

    The collector would look through all of it every few seconds; that takes 50 ms and more, in which no token is told.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; it keeps some 10 MiB otherwise
    if trim is not None:
        trim(0)
