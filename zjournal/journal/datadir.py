"""The data directory: that it is ours, private and writable, and that one server at a time owns it.

The lock is flock(2) on `zjournal.lock`. The kernel drops it with the last descriptor, so no kill can leave it
behind; the descriptor is close-on-exec, so the engine process does not hold it on. The pid inside is for people.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

from zjournal.errors import DataDirFault, DataDirLocked

LOCK_FILE = "zjournal.lock"
JOURNAL_FILE = "journal.db"
DIR_MODE = 0o700
FILE_MODE = 0o600
_PID_BYTES_MAX = 32
_TRIES = 20
_TRY_S = 0.005


def prepare(data_dir: Path) -> None:
    """Makes the directory (0700) or checks that it is ours. Raises DataDirFault: path, reason, next step.

    A directory of ours that others can enter is closed to them. One that others can enter and that holds
    files but no journal is left alone: it is probably not meant to be a data directory.
    """
    try:
        data_dir.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
        status = data_dir.stat()
    except FileExistsError:
        raise _fault(data_dir, "is not a directory", "choose another with --data-dir") from None
    except OSError as error:
        raise _fault(data_dir, f"cannot be made ({error.strerror})", "choose another with --data-dir") from None
    if status.st_uid != os.geteuid():
        step = "run as that user, or change the owner"
        raise _fault(data_dir, f"belongs to user {status.st_uid}, not to {os.geteuid()}", step)
    if stat.S_IMODE(status.st_mode) & 0o300 != 0o300 or not os.access(data_dir, os.W_OK | os.X_OK):
        raise _fault(data_dir, "is not writable", "run chmod u+rwx on it, or choose another with --data-dir")
    if stat.S_IMODE(status.st_mode) & 0o077:
        if not (data_dir / JOURNAL_FILE).exists() and any(data_dir.iterdir()):
            step = "choose an empty directory, or run chmod 700 on this one"
            raise _fault(data_dir, "holds other files and is open to other users", step)
        data_dir.chmod(DIR_MODE)
    if not (data_dir / JOURNAL_FILE).exists():
        _sync_name(data_dir)


def _sync_name(data_dir: Path) -> None:
    """Makes the directory's name durable, and those of its parents: they may be new, or of a start that was cut off.

    Without that a loss of power could take the whole directory, and every fact that was acknowledged in it.
    """
    for folder in data_dir.absolute().parents:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            continue  # not readable to us, so neither was it made by us
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EROFS):  # of file systems that cannot, or need not
                raise _fault(data_dir, f"cannot be made durable ({error.strerror})", "check the disk") from None
        finally:
            os.close(descriptor)


class Lock:
    """Ownership of a data directory, from `lock` until `release` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Gives the directory back. The file stays: unlinking it would let two servers lock two files of one name."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the pid is for people; a bad disk must not keep the lock
                os.ftruncate(self._descriptor, 0)
            # Said, not left to close: a child that is just being spawned still has a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock(data_dir: Path) -> Lock:
    """Prepares and locks the directory. Raises DataDirLocked with the owner's pid at once, having changed nothing."""
    path = data_dir / LOCK_FILE
    # An owner is looked for before `prepare`, which may change modes.
    if os.path.exists(path) and not _free(path):
        raise _locked(data_dir, path)
    prepare(data_dir)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        raise _fault(path, f"cannot be opened ({error.strerror})", "remove it, or choose another --data-dir") from None
    try:
        taken = _take(descriptor, path)
    except OSError as error:
        os.close(descriptor)
        raise _fault(path, f"cannot be locked ({error.strerror})", "choose a --data-dir on a local disk") from None
    if not taken:
        os.close(descriptor)
        raise _locked(data_dir, path)
    try:
        os.fchmod(descriptor, FILE_MODE)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise _fault(path, f"cannot be written ({error.strerror})", "check the disk and its free space") from None
    return Lock(descriptor)


def owner(data_dir: Path) -> int | None:
    """The pid of the server that owns the directory now; None if none does. Changes nothing."""
    path = data_dir / LOCK_FILE
    return None if not os.path.exists(path) or _free(path) else _pid(path)


def _take(descriptor: int, path: Path) -> bool:
    """Locks. Tries again while the obstacle is no owner but someone who looks for one (see `_free`)."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not _free(path):
                return False
            time.sleep(_TRY_S)
    return False


def _free(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True  # what is wrong with it is told by the attempt to lock it
    try:
        # A shared lock: two servers that only look must not take each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _pid(path: Path) -> int | None:
    with path.open("rb") as file:
        text = file.read(_PID_BYTES_MAX).strip()
    return int(text) if text.isdigit() else None


def _locked(data_dir: Path, path: Path) -> DataDirLocked:
    pid = _pid(path)
    who = f"a server with pid {pid}" if pid else "another server"
    return DataDirLocked(f"{data_dir}: {who} is using this data directory; stop it, or choose another with --data-dir")


def _fault(path: Path, reason: str, step: str) -> DataDirFault:
    return DataDirFault(f"{path}: {reason}; {step}")
