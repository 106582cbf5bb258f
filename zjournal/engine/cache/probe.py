"""How fast the disk reads, measured once at the start: the first restore is decided by it, not by a guess.

The chunk that was used last is read as a restore would read it: it is as likely as the next ones to be in the page
cache, so after a restart of the server the answer is that of memory, and after one of the machine that of the disk.
"""

from __future__ import annotations

from collections.abc import Callable

from zjournal.engine.cache.gate import MEASURED_BYTES_MIN
from zjournal.engine.cache.shelf import Shelf
from zjournal.errors import SnapshotFault
from zjournal.snapshots.chunk import ChunkFile, aligned

PROBE_BYTES = 8 << 20  # 0.2 s of a disk of 50 MB/s, which the first request may have to wait


def begin(shelf: Shelf, clock: Callable[[], int]) -> None:
    """Begins to read, if there is a chunk that is large enough to tell anything. `clock` gives microseconds."""
    known = [one for one in shelf.index.chunks.values() if not one.bad and one.file_bytes >= MEASURED_BYTES_MIN]
    chunk = max(known, key=lambda one: (one.used_us, one.made), default=None)
    if chunk is None or not shelf.gate.learns:
        return
    shelf.probing = True
    shelf.reading[chunk.hash] += 1

    def work() -> tuple[int, int]:
        with ChunkFile(shelf.folder, chunk.namespace, chunk.hash) as file:
            sections = file.header.sections
            size = sections[0].raw
            memory = aligned(size * min(len(sections), max(PROBE_BYTES // size, 1)))
            into = [memory[at : at + size] for at in range(0, len(memory), size)]
            begun_us = clock()
            file.read(into)
            return sum(section.end - section.offset for section in sections[: len(into)]), clock() - begun_us

    def then(result: tuple[int, int] | SnapshotFault) -> None:
        shelf.release(chunk.hash)
        if isinstance(result, SnapshotFault):
            shelf.found_bad(chunk.namespace, chunk.hash, result)
        else:
            shelf.gate.restored(*result)
        shelf.probed()

    shelf.disk.read(work, then)
