"""The folder of the snapshots: names become open files here and nowhere else, and no name leads out of it.

A chunk lies at `<16 hex digits of the namespace>/<2 of the hash>/<64 of the hash>.zjc`, so that no folder grows
without bound. Every step is taken relative to a folder that is open already and without following links; names are
made from hashes and never taken from outside. The folder itself may be a link: where it lies is its owner's choice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from pathlib import Path

from zjournal.errors import ChunkFault, SnapshotFault
from zjournal.snapshots import format
from zjournal.snapshots.format import Reason

FILE_MODE = 0o600
FOLDER_MODE = 0o700
QUARANTINE = "quarantine"
QUARANTINE_FILES_MAX = 16  # the oldest goes; what is kept is for whoever wants to know what happened to the disk
QUARANTINE_BYTES_MAX = 1 << 30
LOCK_S = 20.0  # for an engine whose parent was killed, and which is in its last step or is writing its last file
LOCK_STEP_S = 0.02
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in a file's place must not hang
_DAMAGE = {errno.EIO: "the disk reports an error", errno.EUCLEAN: "the file system is damaged there"}


class Folder:
    """An open folder of snapshots. For any number of threads; `close` when none uses it any more."""

    def __init__(self, path: Path) -> None:
        """Makes the folder if it is not there. Raises SnapshotFault."""
        self.path = path
        try:
            path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            _sync(path.parent)
            self.descriptor = os.open(path, _DIRECTORY & ~os.O_NOFOLLOW)
        except OSError as error:
            raise fault(path, error) from error
        self._lock = threading.Lock()  # who finds a folder made may rely on its being synced
        self._synced: set[tuple[str, ...]] = set()  # folders of which that is known

    def close(self) -> None:
        os.close(self.descriptor)

    def lock(self, wait_s: float = LOCK_S) -> None:
        """Takes the folder for this process, which removes what its journal does not name, until `close`.

        Two data directories may lead to one folder by links; the one would remove the other's files. Waits so long for
        a process that is about to end. Raises SnapshotFault.
        """
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise SnapshotFault(f"{self.path}: another server uses this folder", errno=errno.EBUSY) from None
                time.sleep(LOCK_STEP_S)
            except OSError:
                return  # a file system without locks

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def where(self, namespace: bytes, hash_: bytes) -> Path:
        """The chunk's path, for people; nothing is opened by it."""
        return self.path.joinpath(*format.folders(namespace, hash_), format.file_name(hash_))

    def make_place(self, namespace: bytes, hash_: bytes) -> int:
        """An open descriptor of the folder that this chunk belongs in, which is made if need be. Raises OSError."""
        outer_name, inner_name = format.folders(namespace, hash_)
        with self._lock:
            outer = self._made(self.descriptor, outer_name)
            try:
                return self._made(outer, outer_name, inner_name)
            finally:
                os.close(outer)

    def open_file(self, namespace: bytes, hash_: bytes, flags: int = 0) -> int:
        """An open descriptor of the chunk's file, which is a regular one.

        Raises ChunkFault if it is missing, a link, or another thing; SnapshotFault if the system refuses.
        """
        path = self.where(namespace, hash_)
        try:
            descriptor = self._opened(namespace, hash_, flags)
        except OSError as error:
            raise read_fault(path, error) from error
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except OSError as error:
            os.close(descriptor)
            raise read_fault(path, error) from error
        if not regular:
            os.close(descriptor)
            raise ChunkFault(str(path), Reason.KIND, "is not a regular file")
        return descriptor

    def size(self, namespace: bytes, hash_: bytes) -> int | None:
        """The size of the chunk's file in bytes, None if there is none. Raises as `open_file` does."""
        try:
            descriptor = self.open_file(namespace, hash_)
        except ChunkFault as refused:
            if refused.reason == Reason.MISSING:
                return None
            raise
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def remove(self, namespace: bytes, hash_: bytes) -> bool:
        """Unlinks the chunk's file; False if there was none. Raises SnapshotFault."""
        return self._moved(namespace, hash_, lambda place, name: os.unlink(name, dir_fd=place))

    def erase(self, namespace: bytes, hash_: bytes) -> bool:
        """Unlinks the chunk's file and what was put aside of it; False if there was neither. Raises SnapshotFault."""
        removed = self.remove(namespace, hash_)
        try:
            aside = self.open_folder(QUARANTINE)
        except FileNotFoundError:
            return removed
        except OSError as error:
            raise fault(self.path / QUARANTINE, error) from error
        try:
            os.unlink(format.file_name(hash_), dir_fd=aside)
        except FileNotFoundError:
            return removed
        except OSError as error:
            raise fault(self.path / QUARANTINE / format.file_name(hash_), error) from error
        finally:
            os.close(aside)
        return True

    def quarantine(self, namespace: bytes, hash_: bytes, most: int = QUARANTINE_BYTES_MAX) -> bool:
        """Moves what has the chunk's name aside, whatever it is; False if there was nothing. Raises SnapshotFault.

        Beyond `most` bytes, and QUARANTINE_FILES_MAX files, what lies there longest goes; that may be the moved one.
        """
        try:
            with self._lock:
                aside = self._made(self.descriptor, QUARANTINE)
        except OSError as error:
            raise fault(self.path / QUARANTINE, error) from error
        try:
            moved = self._moved(
                namespace, hash_, lambda place, name: os.rename(name, name, src_dir_fd=place, dst_dir_fd=aside)
            )
            if moved:
                _thin_out(aside, most)
            return moved
        finally:
            os.close(aside)

    def thin_out(self, most: int = QUARANTINE_BYTES_MAX) -> int:
        """Unlinks what is too much in quarantine; returns the bytes of what stays. Raises SnapshotFault."""
        try:
            aside = self.open_folder(QUARANTINE)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise fault(self.path / QUARANTINE, error) from error
        try:
            return _thin_out(aside, most)
        except OSError as error:
            raise fault(self.path / QUARANTINE, error) from error
        finally:
            os.close(aside)

    def aside_bytes(self) -> int:
        """Bytes of the files in quarantine. Raises SnapshotFault."""
        try:
            aside = self.open_folder(QUARANTINE)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise fault(self.path / QUARANTINE, error) from error
        try:
            return sum(size for _, _, size in _files(aside))
        except OSError as error:
            raise fault(self.path / QUARANTINE, error) from error
        finally:
            os.close(aside)

    def open_folder(self, *names: str) -> int:
        """An open descriptor of a folder below this one, not through links. Raises OSError."""
        at = os.dup(self.descriptor)
        for name in names:
            try:
                below = os.open(name, _DIRECTORY, dir_fd=at)
            finally:
                os.close(at)
            at = below
        return at

    def _made(self, parent: int, *names: str) -> int:
        """An open descriptor of the last of the folders, which is made in `parent` if need be. Raises OSError.

        `parent` is synced, so that what comes into it can be found after a loss of power; a folder that was there
        already may have been made by a process that did not come so far.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(names[-1], FOLDER_MODE, dir_fd=parent)
        if names not in self._synced:
            os.fsync(parent)
            self._synced.add(names)
        return os.open(names[-1], _DIRECTORY, dir_fd=parent)

    def _opened(self, namespace: bytes, hash_: bytes, flags: int) -> int:
        place = self.open_folder(*format.folders(namespace, hash_))
        try:
            return os.open(format.file_name(hash_), _FILE | flags, dir_fd=place)
        finally:
            os.close(place)

    def _moved(self, namespace: bytes, hash_: bytes, move) -> bool:  # type: ignore[no-untyped-def]
        """Does `move(place, name)` with a chunk; False if it is not there."""
        try:
            place = self.open_folder(*format.folders(namespace, hash_))
            try:
                move(place, format.file_name(hash_))
            finally:
                os.close(place)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise fault(self.where(namespace, hash_), error) from error
        return True


def fault(path: Path | str, error: OSError) -> SnapshotFault:
    """What the system refused, as a fault that blames no file."""
    return SnapshotFault(f"{path}: {error.strerror or error}", errno=error.errno or 0)


def read_fault(path: Path | str, error: OSError) -> SnapshotFault:
    """Why a chunk's file could not be read: its own fault if it is one, else the system's."""
    match error.errno:
        case errno.ENOENT:
            return ChunkFault(str(path), Reason.MISSING, "is missing")
        case errno.ELOOP:
            return ChunkFault(str(path), Reason.SYMLINK, "is a symbolic link")
        case errno.ENOTDIR:  # O_DIRECTORY and O_NOFOLLOW say so of a link as well
            return ChunkFault(str(path), Reason.SYMLINK, "lies behind a link, or a file where a folder belongs")
        case errno.EISDIR | errno.ENXIO:
            return ChunkFault(str(path), Reason.KIND, "is not a regular file")
        case number if number in _DAMAGE:
            return ChunkFault(str(path), Reason.UNREADABLE, f"cannot be read: {_DAMAGE[number]}")
    return fault(path, error)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(aside: int) -> list[tuple[int, str, int]]:
    """Time of arrival, name and bytes of what lies in the quarantine, without folders. Raises OSError."""
    found = []
    with os.scandir(aside) as entries:
        for entry in entries:
            try:
                state = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # it went meanwhile
            if not stat.S_ISDIR(state.st_mode):
                found.append((state.st_ctime_ns, entry.name, state.st_size))
    return found


def _thin_out(aside: int, most: int) -> int:
    """Unlinks the oldest files of the quarantine beyond both limits; returns the bytes of the rest. Folders stay."""
    held = 0
    for number, (_, name, size) in enumerate(sorted(_files(aside), reverse=True)):
        if number < QUARANTINE_FILES_MAX and held + size <= most:
            held += size
            continue
        try:
            os.unlink(name, dir_fd=aside)
        except FileNotFoundError:
            continue
        except OSError:
            held += size  # it takes its room, allowed or not
    return held
