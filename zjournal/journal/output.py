"""Files made for a user: private, whole or absent, and never in the place of another.

What is written lies under a name of its own until it is complete and synced. A kill leaves only that behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from zjournal.errors import OutputFault
from zjournal.journal.database import sync
from zjournal.journal.datadir import FILE_MODE

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Gives the path of an empty file (0600) to write to; at the end of the body it is synced and becomes `path`.

    If the body raises, nothing stays behind. Raises OutputFault: `path` exists, or its folder or disk refuses.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        _refuse_existing(path)
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE))
    except OSError as error:
        raise _fault(path, error) from None
    try:
        yield part
        sync(part)
        _place(part, path)
        sync(path.parent)
    except OSError as error:
        raise _fault(path, error) from None
    finally:
        part.unlink(missing_ok=True)


def _place(part: Path, path: Path) -> None:
    """Gives the file its name, which fails if somebody else has taken it meanwhile."""
    try:
        os.link(part, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _refuse_existing(path)
        part.rename(path)


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def _fault(path: Path, error: OSError) -> OutputFault:
    if error.errno == errno.EEXIST:
        return OutputFault(f"{path}: it exists already; choose another name, or move it away")
    return OutputFault(f"{path}: cannot be written ({error.strerror}); check the folder, the disk and its free space")
