"""Models from the Hugging Face hub: `ORG/NAME`, with `@REVISION` and `:FILE.gguf` behind it where wanted.

Below the cache directory a model lies at `hub/ORG--NAME/COMMIT/`, written file by file: into `NAME.SUM.part`, which a
later run continues, then checked against the hub's own checksum, synced and renamed. `complete.json` comes last, and
`refs/` tells which commit a revision meant when it was pulled. What is complete is used without the network; only `zj
models pull` looks for something newer. huggingface-hub is imported when something is fetched, and never before.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from zjournal.checkpoint import safetensors
from zjournal.errors import HubDenied, HubDiskFull, HubNotFound, HubUnreachable, ModelFault

FILES_MAX = 2048
SPARE_BYTES = 64 << 20  # what must stay free on the disk
_READ_BYTES = 1 << 20
# What huggingface-hub has used below it; it lets through what they raise about the connection.
_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:@(?P<revision>[\w./-]{1,255}))?(?::(?P<file>[\w.+ -]+(?:/[\w.+ -]+)*\.gguf))?",
    re.ASCII,
)
_BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all


class HubName(msgspec.Struct, frozen=True):
    """A model on the hub; `file` names one GGUF in it, "" what it holds."""

    repo: str
    revision: str = "main"
    file: str = ""

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        return self.repo + at + (f":{self.file}" if self.file else "")


class _File(msgspec.Struct, frozen=True):
    name: str
    size: int
    sha256: str = ""  # of large files
    git: str = ""  # of the others: sha1 of `blob SIZE\0` and the content


class _Complete(msgspec.Struct, frozen=True):
    repo: str
    commit: str
    files: tuple[_File, ...]


def parse(text: str) -> HubName | None:
    """The name on the hub that `text` may be; None for what cannot be one. Does not look for files of that name."""
    found = _NAME.fullmatch(text)
    if found is None or ".." in text or "--" in found["repo"]:
        return None
    if found["repo"].endswith(".gguf") and not found["file"]:
        return None  # a path that is not there
    return HubName(found["repo"], found["revision"] or "main", found["file"] or "")


def find(name: HubName, cache_dir: Path) -> Path | None:
    """Where the model lies if it was pulled whole: the GGUF file or the folder. Reads nothing of the network."""
    root = _root(name, cache_dir)
    try:
        commit = _ref(root, name.revision).read_text()
        folder = root / commit
        told = msgspec.json.decode((folder / _manifest(name)).read_bytes(), type=_Complete)
        if all((folder / file.name).stat().st_size == file.size for file in told.files):
            return _result(folder, told.files)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return None
    return None


def pull(name: HubName, cache_dir: Path, progress: Progress, endpoint: str | None = None) -> Path:
    """Fetches what is not there yet and returns the GGUF file or the folder.

    `endpoint`: the hub's address, None is huggingface-hub's own (HF_ENDPOINT). Raises HubUnreachable, HubDenied,
    HubNotFound, HubDiskFull, or ModelFault for a model that has nothing to run and for a checksum that differs.
    """
    from huggingface_hub import HfApi

    with _faults(name):
        info = HfApi(endpoint=endpoint).model_info(name.repo, revision=name.revision, files_metadata=True)
        commit, files = _listing(name, info)
        root = _root(name, cache_dir)
        folder = root / commit
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        total = sum(file.size for file in files)
        _check_disk(name, folder, files, total)
        before = 0
        for file in files:
            _fetch(name, commit, file, folder, partial(_tell, progress, before, total), endpoint)
            before += file.size
        told = _Complete(name.repo, commit, files)
        _write(folder / _manifest(name), msgspec.json.format(msgspec.json.encode(told)))
        _write(_ref(root, name.revision), commit.encode())
    progress(total, total)
    return _result(folder, files)


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


# --- where it lies ------------------------------------------------------------------------------------


def _root(name: HubName, cache_dir: Path) -> Path:
    return cache_dir / "hub" / name.repo.replace("/", "--")


def _ref(root: Path, revision: str) -> Path:
    return root / "refs" / urllib.parse.quote(revision, safe="")


def _manifest(name: HubName) -> str:
    return f"complete-{hashlib.sha256(name.file.encode()).hexdigest()[:16]}.json" if name.file else "complete.json"


def _result(folder: Path, files: Sequence[_File]) -> Path:
    return folder / files[0].name if files[0].name.endswith(".gguf") else folder


# --- what to fetch ------------------------------------------------------------------------------------


def _listing(name: HubName, info: Any) -> tuple[str, tuple[_File, ...]]:
    """The commit, and the files of it that make the model. Raises HubNotFound or ModelFault."""
    siblings = info.siblings or []
    if len(siblings) > FILES_MAX:
        raise ModelFault(f"{name}: has {len(siblings)} files, more than {FILES_MAX}")
    if not re.fullmatch(r"[0-9a-f]{6,64}", info.sha or ""):
        raise ModelFault(f"{name}: the hub tells no commit")
    there = {file.rfilename: file for file in siblings}
    wanted = _wanted(name, sorted(there))
    files = []
    for wish in wanted:
        found = there[wish]
        if not isinstance(found.size, int) or found.size < 0 or Path(wish).is_absolute() or ".." in Path(wish).parts:
            raise ModelFault(f"{name}: the hub's listing of {wish!r} cannot be used")
        sha256 = found.lfs.sha256 if found.lfs is not None else ""
        files.append(_File(wish, found.size, sha256, "" if sha256 else found.blob_id or ""))
    return info.sha, tuple(files)


def _wanted(name: HubName, there: Sequence[str]) -> list[str]:
    if name.file:
        if name.file not in there:
            raise HubNotFound(f"{name}: there is no such file; it has {_some(_ggufs(there))}")
        return [name.file]
    shards = [file for file in there if _SHARD.fullmatch(file)]
    if shards and "config.json" in there:
        return [file for file in (*_BESIDE, safetensors.INDEX) if file in there] + shards
    found = _ggufs(there)
    if len(found) == 1:
        return list(found)
    if not found:
        raise ModelFault(f"{name}: holds neither config.json with safetensors nor a GGUF file")
    raise ModelFault(f"{name}: holds several GGUF files; name one as {name.repo}:FILE, of {_some(found)}")


def _ggufs(there: Sequence[str]) -> list[str]:
    return [file for file in there if file.endswith(".gguf")]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "no GGUF file"


# --- fetching -----------------------------------------------------------------------------------------


def _check_disk(name: HubName, folder: Path, files: Sequence[_File], total: int) -> None:
    there = sum(_size(folder / file.name) or _size(_part(folder, file)) for file in files)
    free = shutil.disk_usage(folder).free
    if total - there + SPARE_BYTES > free:
        raise HubDiskFull(f"{name}: {total - there} bytes are to be fetched, and {folder} has {free} bytes free")


def _part(folder: Path, file: _File) -> Path:
    return folder / f"{file.name}.{(file.sha256 or file.git)[:16]}.part"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class _TooLong(Exception):
    """The hub sends more than it told."""


class _Counted:
    """A file that tells how long it has become, and becomes no longer than `most` bytes, whatever the hub sends; what
    huggingface-hub's http_get needs of one."""

    def __init__(self, file: BinaryIO, most: int, told: Callable[[int], None]) -> None:
        self._file = file
        self._most = most
        self._told = told
        self.seek, self.tell, self.truncate = file.seek, file.tell, file.truncate

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._most:
            raise _TooLong
        count = self._file.write(data)
        self._told(self._file.tell())
        return count


def _fetch(
    name: HubName, commit: str, file: _File, folder: Path, told: Callable[[int], None], endpoint: str | None
) -> None:
    """Brings one file, from where an earlier run left off."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    target, part = folder / file.name, _part(folder, file)
    if _size(target) == file.size and target.exists():
        return  # it was checked before it was renamed
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    disable_progress_bars("huggingface_hub.http_get")
    url = hf_hub_url(name.repo, file.name, revision=commit, endpoint=endpoint)
    with open(part, "r+b" if part.exists() else "w+b") as out:
        start = out.seek(0, os.SEEK_END)
        if start > file.size:
            start = out.seek(0)
            out.truncate()
        told(start)
        counted: Any = _Counted(out, file.size, told)
        if start < file.size:
            try:
                http_get(url, counted, resume_size=start, headers=build_hf_headers(), expected_size=file.size)
            except _TooLong:
                part.unlink()
                raise ModelFault(f"{name}: {file.name} is longer than the {file.size} bytes of its listing") from None
        out.flush()
        os.fsync(out.fileno())
    wrong = _mismatch(part, file)
    if wrong:
        part.unlink()
        raise ModelFault(f"{name}: {file.name} arrived damaged: {wrong}; it is removed, try again")
    os.replace(part, target)
    _sync(target.parent)


def _mismatch(path: Path, file: _File) -> str:
    """How the content differs from what the hub says; "" if it does not."""
    if _size(path) != file.size:
        return f"it has {_size(path)} bytes, not {file.size}"
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as content:
        while block := content.read(_READ_BYTES):
            digest.update(block)
    wanted = file.sha256 or file.git
    return "" if digest.hexdigest() == wanted else f"its checksum is {digest.hexdigest()}, not {wanted}"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    with open(fresh, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(fresh, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _faults(name: HubName) -> Iterator[None]:
    """Turns what huggingface-hub and the system raise into our faults, one line each."""
    from huggingface_hub import errors as hub

    try:
        yield
    except hub.GatedRepoError as error:
        raise HubDenied(f"{name}: it is gated; accept its terms on the hub, and log in or set HF_TOKEN") from error
    except hub.RepositoryNotFoundError as error:
        raise HubNotFound(f"{name}: there is no such model, or it is private; then log in or set HF_TOKEN") from error
    except hub.RevisionNotFoundError as error:
        raise HubNotFound(f"{name}: it has no revision {name.revision}") from error
    except hub.EntryNotFoundError as error:
        raise HubNotFound(f"{name}: a file of its listing is not there") from error
    except hub.HFValidationError as error:
        raise HubNotFound(f"{name}: this cannot be a name on the hub") from error
    except hub.OfflineModeIsEnabled as error:
        raise HubUnreachable(f"{name}: it is not in the cache, and HF_HUB_OFFLINE forbids to fetch it") from error
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise HubDenied(f"{name}: the hub answers {status}; log in or set HF_TOKEN") from error
        raise HubUnreachable(f"{name}: the hub answers {status}") from error
    except OSError as error:
        _system_fault(name, error)
    except Exception as error:
        if type(error).__module__.partition(".")[0] in _HTTP_LIBRARIES:
            what = " ".join(str(error).split())
            raise HubUnreachable(f"{name}: the hub cannot be reached: {type(error).__name__}: {what}") from error
        raise


def _system_fault(name: HubName, error: OSError) -> None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise HubDiskFull(f"{name}: the disk is full; what has arrived is kept, and a next run goes on") from error
    if isinstance(error, ConnectionError | TimeoutError):
        raise HubUnreachable(f"{name}: the hub cannot be reached: {' '.join(str(error).split())}") from error
    what = f"{error.filename}: {error.strerror}" if error.filename else " ".join(str(error).split())
    raise ModelFault(f"{name}: {what}") from error
