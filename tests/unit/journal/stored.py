"""Snapshots for tests of the journal: the facts of states that were written to disk, without the files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tests.unit.snapshots import chunks
from zjournal.journal import snapshots
from zjournal.journal.events import CacheBackedUp, Chunk
from zjournal.journal.log import Journal
from zjournal.journal.reader import Reader
from zjournal.snapshots import format

FILE_BYTES = 4096


def hashes(data: bytes) -> list[bytes]:
    """The chunks of a state."""
    return [one.hash for one in chunks.split(data)]


def known(journal: Reader) -> dict[bytes, bytes]:
    """The chunks that the journal names, and their parents."""
    return {row.hash: row.parent for page in snapshots.chunks(journal) for row in page}


def backed_up(
    response: str,
    data: bytes,
    there: Collection[bytes] = (),
    kept: int = -1,
    namespace: str = "n",
    size: Callable[[format.Chunk], int] = lambda one: FILE_BYTES,
) -> tuple[CacheBackedUp, bytes]:
    """The fact that all of a state is on disk, of which the chunks `there` were before; and its payload."""
    whole = chunks.split(data)
    fresh = [one for one in whole if one.hash not in there]
    told: list[Chunk] = []
    for before, one in zip([None, *fresh], fresh, strict=False):
        parent = b"" if before is not None and one.parent == before.hash else one.parent
        told.append(Chunk(one.hash, parent, one.count, size(one)))
    event = CacheBackedUp(
        response=response,
        namespace=namespace,
        space=chunks.NAMESPACE,
        tokens=len(data) // format.TOKEN_BYTES,
        end=whole[-1].hash,
        chunks=tuple(told),
        write_us=5,
        kept=kept,
    )
    return event, b"".join(format.marks(one.tokens) for one in fresh)


def back_up(journal: Journal, response: str, data: bytes, kept: int = -1) -> bool:
    """Writes down that a state is on disk, all of whose chunks that are not known are new."""
    event, marks = backed_up(response, data, known(journal).keys(), kept)
    return journal.run(lambda tx: snapshots.back_up(tx, event, marks)).result()


def purge(journal: Journal, gone: Sequence[bytes], cause: str = "gc", whole: bool = False) -> snapshots.Purged:
    return journal.run(lambda tx: snapshots.purge(tx, chunks.NAMESPACE, gone, cause, whole=whole)).result()


def ends(journal: Reader) -> dict[str, tuple[bytes, int]]:
    """Where each snapshot ends: the hash of its last chunk, and its tokens."""
    return {row.response: (row.end, row.tokens) for page in snapshots.snapshots(journal) for row, _ in page}
