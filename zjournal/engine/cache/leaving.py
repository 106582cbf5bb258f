"""Files on their way out: unlinked, put aside, or found to be nobody's. Each counts its bytes until they are free.

What cannot be removed goes on counting, and is an orphan for the next start. Work is done by the disk's writing thread,
one after another, so a bad file is moved before a good one is written in its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from zjournal.engine.cache.disk import Disk
from zjournal.errors import SnapshotFault
from zjournal.snapshots import reconcile
from zjournal.snapshots.folder import QUARANTINE_BYTES_MAX, Folder

QUARANTINE_PART = 16  # of the limit, at most so much is taken by what was put aside


class Leaving:
    """What still takes room and is found by nobody. For the engine's thread."""

    def __init__(self, folder: Folder, disk: Disk, limit: int) -> None:
        """`limit`: bytes of all snapshots, those in quarantine included."""
        self._folder = folder
        self._disk = disk
        self._aside_max = min(limit // QUARANTINE_PART, QUARANTINE_BYTES_MAX)
        self._unlinking: dict[bytes, int] = {}
        self._moving: set[bytes] = set()  # bad files on their way to the quarantine
        self._lying: dict[bytes, int] = {}  # files in their place that nothing names, and could not be removed yet
        self._unnamed = 0  # bytes of files that were found to be nobody's
        self._aside = 0  # bytes in quarantine
        with contextlib.suppress(SnapshotFault):  # a folder that cannot be read is told of when a file is to go there
            self._aside = self._thin_out()

    @property
    def soon(self) -> int:
        """Bytes that are about to be free."""
        return sum(self._unlinking.values())

    @property
    def stays(self) -> int:
        """Bytes that stay for now: in quarantine, or left over."""
        return sum(self._lying.values()) + self._unnamed + self._aside

    @property
    def unremoved(self) -> bool:
        """Whether something lies there that could not be removed: its size is known from what it was before."""
        return bool(self._lying or self._unnamed)

    def busy(self, hash_: bytes) -> bool:
        """Whether the file of this chunk is being removed."""
        return hash_ in self._unlinking or hash_ in self._moving

    def named(self, hash_: bytes) -> int | None:
        """The bytes of a file that is being removed, None for any other; for any thread."""
        if hash_ in self._moving:
            return self._lying.get(hash_, 0)
        return self._unlinking.get(hash_)

    def written(self, hash_: bytes) -> None:
        """There is a new file where an old one may have lain."""
        self._lying.pop(hash_, None)

    def unlink(self, space: bytes, sizes: Mapping[bytes, int]) -> None:
        """Unlinks these files, of so many bytes; those in quarantine as well."""
        for hash_, size in sizes.items():
            self._unlinking[hash_] = max(self._unlinking.get(hash_, 0), size, self._lying.pop(hash_, 0))

        def work() -> tuple[set[bytes], int]:
            left = set()
            for hash_ in sizes:
                try:
                    self._folder.erase(space, hash_)
                except SnapshotFault:
                    left.add(hash_)
            return left, self._thin_out()

        def then(done: tuple[set[bytes], int] | SnapshotFault) -> None:
            left, self._aside = (set(sizes), self._aside) if isinstance(done, SnapshotFault) else done
            for hash_ in sizes:
                size = max(self._unlinking.pop(hash_, 0), self._lying.pop(hash_, 0))
                if hash_ in left:
                    self._lying[hash_] = size

        self._disk.write(work, then)

    def put_aside(self, space: bytes, hash_: bytes, size: int) -> None:
        """Moves a bad file to the quarantine."""
        self._moving.add(hash_)
        self._lying[hash_] = size

        def work() -> int:
            self._folder.quarantine(space, hash_, self._aside_max)
            return self._thin_out()

        def then(aside: int | SnapshotFault) -> None:
            self._moving.discard(hash_)
            if not isinstance(aside, SnapshotFault):
                self._lying.pop(hash_, None)
                self._aside = aside

        self._disk.write(work, then)

    def remove(self, finding: reconcile.Finding) -> None:
        """Unlinks a file that is nobody's, in its place or in quarantine."""
        unnamed = 0 if finding.aside else finding.file_bytes  # what lies aside counts as that
        self._unnamed += unnamed

        def work() -> int:
            try:
                reconcile.remove(self._folder, finding)
            except OSError as error:
                raise SnapshotFault(f"{finding.path}: {error}") from error
            return self._thin_out()

        def then(aside: int | SnapshotFault) -> None:
            if not isinstance(aside, SnapshotFault):
                self._unnamed -= unnamed
                self._aside = aside

        self._disk.write(work, then)

    def assume(self, size: int) -> None:
        """So many bytes may lie there that nobody could look at."""
        self._unnamed += size

    def audit(self) -> None:
        """Asserts the invariants."""
        assert self._moving <= self._lying.keys() | self._unlinking.keys()
        assert self._unnamed >= 0 and self._aside >= 0

    def _thin_out(self) -> int:
        """Bytes that stay in quarantine; for any thread. Raises SnapshotFault."""
        return self._folder.thin_out(self._aside_max)
