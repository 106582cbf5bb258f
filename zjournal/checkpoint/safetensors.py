"""The tensors of a Hugging Face folder: the headers of its safetensors files, and their bytes by mapping.

Layout of a file: u64 length (little-endian), a JSON object of that length, data. Per tensor the object has `dtype`,
`shape` and `data_offsets` [start, end), counted from the start of the data. Everything is checked against the file's
size before it is used, and the tensors must cover the data without holes or overlap, as the format demands.
Source: the safetensors specification.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from pathlib import Path

import msgspec

from zjournal.checkpoint.gguf import TensorInfo
from zjournal.checkpoint.hfconfig import open_file, read_object
from zjournal.errors import ModelFault

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100 << 20
SHARDS_MAX = 1024
DIMENSIONS_MAX = 4

_LENGTH = struct.Struct("<Q")
_TYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order: those that the index names, or the single one. Raises ModelFault."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise ModelFault(f"{folder}: holds neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelFault(f"{index}: weight_map does not map tensors to files")
    files = sorted(set(names.values()))
    if len(files) > SHARDS_MAX:
        raise ModelFault(f"{index}: names {len(files)} files, more than {SHARDS_MAX}")
    for name in files:
        if Path(name).name != name or name in (".", ".."):
            raise ModelFault(f"{index}: the file name {name!r} leads out of the folder")
        if not os.path.exists(folder / name):  # False as well for a name that no file can have
            raise ModelFault(f"{folder / name}: no such file, and {INDEX} names it")
    return [folder / name for name in files]


def read_tensors(files: list[Path]) -> tuple[dict[str, TensorInfo], list[int]]:
    """All tensors of the files by name, with the file's place in the list, and the sizes of the files.

    Raises ModelFault if a file cannot be read, is cut or malformed, or two hold a tensor of one name.
    """
    tensors: dict[str, TensorInfo] = {}
    sizes = []
    for number, path in enumerate(files):
        found, size = _read_shard(path, number)
        for name, info in found.items():
            if name in tensors:
                raise ModelFault(f"{path}: the tensor {name} stands in {files[tensors[name].shard].name} as well")
            tensors[name] = info
        sizes.append(size)
    return tensors, sizes


def _read_shard(path: Path, number: int) -> tuple[dict[str, TensorInfo], int]:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
            if not 2 <= length <= min(HEADER_BYTES_MAX, size - _LENGTH.size):
                raise ModelFault(f"{path}: not a safetensors file, or cut: {size} bytes")
            header = file.read(length)
    except OSError as error:
        raise ModelFault(f"{path}: {error.strerror or error}") from error
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFault(f"{path}: the header is damaged: {error}") from error
    data = _LENGTH.size + length
    found = {name: _info(path, name, entry, data, number) for name, entry in entries.items()}
    at = data
    for info in sorted(found.values(), key=lambda info: info.offset):
        if info.offset != at:
            raise ModelFault(f"{path}: the tensor {info.name} starts at {info.offset}, not {at}")
        at += info.bytes
    if at != size:
        raise ModelFault(f"{path}: the tensors end at {at}, the file has {size} bytes")
    return found, size


def _info(path: Path, name: str, entry: _Entry, data: int, number: int) -> TensorInfo:
    width = _TYPES.get(entry.dtype)
    if width is None:
        raise ModelFault(f"{path}: the tensor {name} has the type {entry.dtype}, which is not supported")
    if len(entry.shape) > DIMENSIONS_MAX or any(extent < 1 for extent in entry.shape):
        raise ModelFault(f"{path}: the tensor {name} has the impossible shape {entry.shape}")
    start, end = entry.data_offsets
    if start < 0 or end - start != width * math.prod(entry.shape):
        raise ModelFault(f"{path}: the tensor {name} of shape {entry.shape} has {end - start} bytes")
    return TensorInfo(name, entry.shape, entry.dtype, data + start, end - start, number)


class ShardedTensors:
    """The tensors' bytes, mapped and not read. A context manager; a view keeps its mapping alive past its end."""

    def __init__(self, files: list[Path], sizes: list[int]) -> None:
        self._views: list[memoryview] = []
        for path, size in zip(files, sizes, strict=True):
            try:
                with open(path, "rb") as file:
                    if os.fstat(file.fileno()).st_size != size:
                        raise ModelFault(f"{path}: the file has changed since its header was read")
                    self._views.append(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
            except OSError as error:
                raise ModelFault(f"{path}: {error.strerror or error}") from error

    def data(self, info: TensorInfo) -> memoryview:
        """The tensor's stored bytes, read-only, `info.bytes` long."""
        return self._views[info.shard][info.offset : info.offset + info.bytes]

    def __enter__(self) -> ShardedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._views.clear()
