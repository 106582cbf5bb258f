"""The header of a GGUF file: metadata, tensor table, and the tensors' bytes by mapping.

Reading the header is all the API process ever does with a model, so it must be fast and small: scalars are
decoded at once, an array only when it is asked for (a vocabulary is 95 % of a header). Every count and
length is checked against the file's size before anything is allocated, and a file that is cut or is not a
GGUF is a ModelFault with the path and the reason.

Layout, little-endian: `GGUF`, u32 version, u64 tensors, u64 keys; then per key a string, u32 kind, value; then
per tensor a string, u32 dimensions, u64 each (fastest first), u32 type, u64 offset; padding to the alignment; data.
A string is u64 length and UTF-8. Source: the GGUF specification in the ggml repository, versions 2 and 3.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from zjournal.errors import ModelFault

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES_MAX = 256 << 20  # a vocabulary of 260,000 pieces with merges takes 16 MB
KEYS_MAX = 1 << 16
TENSORS_MAX = 1 << 16
DIMENSIONS_MAX = 4
ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_FIXED = struct.Struct("<4sIQQ")
_STRING, _ARRAY, _BOOL = 8, 9, 7
# kind: struct letter
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


class TensorType(msgspec.Struct, frozen=True):
    """A storage type of ggml: `block` values are stored in `bytes` bytes."""

    name: str
    block: int
    bytes: int


def _types(*rows: tuple[int, str, int, int]) -> dict[int, TensorType]:
    return {number: TensorType(name, block, size) for number, name, block, size in rows}


TENSOR_TYPES = _types(
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
)

# What the engine can hold or expand.
RUNNABLE_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor: where its bytes lie and what they are.

    `shape` is row-major, slowest axis first (the reverse of the file's order): a linear layer is (out, in).
    `offset` counts from the start of the file; `shard` is the file's number where a model has several.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    bytes: int
    shard: int = 0


class _Array(msgspec.Struct, frozen=True):
    """An array that was passed over: its elements lie at `at` of the header."""

    kind: int
    count: int
    at: int


Scalar = int | float | bool | str
Value = Scalar | list
T = TypeVar("T", int, float, bool, str)


class Header:
    """What a GGUF file says about itself. Holds the header's bytes, so that arrays can be read when asked for."""

    def __init__(
        self,
        path: Path,
        version: int,
        fields: dict[str, Scalar | _Array],
        tensors: dict[str, TensorInfo],
        layout: tuple[int, int, int],
        data: bytes,
    ) -> None:
        self.path = path
        self.version = version
        self.tensors = tensors
        self.alignment, self.data_offset, self.file_bytes = layout
        self._fields = fields
        self._data = data

    def keys(self) -> list[str]:
        """The metadata keys, in the file's order."""
        return list(self._fields)

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get(self, key: str, default: Value | None = None) -> Value | None:
        """The value of `key`; an array becomes a list, built anew at each call."""
        value = self._fields.get(key, default)
        return _Cursor(self.path, self._data, len(self._data)).array(value) if isinstance(value, _Array) else value

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The scalar at `key`. An int serves as a float. Raises ModelFault if it is missing or of another type."""
        value = self._fields.get(key, default)
        if value is None:
            raise ModelFault(f"{self.path}: the metadata has no {key}")
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:
            raise ModelFault(f"{self.path}: the metadata's {key} is not of type {kind.__name__}")
        return value

    def array(self, key: str, kind: type[T]) -> list[T]:
        """The array at `key`. Raises ModelFault if it is missing or holds anything else."""
        value = self.get(key)
        if value is None:
            raise ModelFault(f"{self.path}: the metadata has no {key}")
        if not isinstance(value, list) or not all(type(element) is kind for element in value):
            raise ModelFault(f"{self.path}: the metadata's {key} is not an array of {kind.__name__}")
        return value


class _Cursor:
    """Reads forward through a buffer; whatever would pass `limit` is a fault."""

    def __init__(self, path: Path, data: bytes | mmap.mmap, limit: int) -> None:
        self.path = path
        self.data = data
        self.limit = limit
        self.at = 0

    def fail(self, reason: str) -> NoReturn:
        raise ModelFault(f"{self.path}: {reason}")

    def need(self, count: int) -> int:
        """Checks that `count` more bytes are there, passes them, and returns where they start."""
        at = self.at
        if count > self.limit - at:
            self.fail(f"the header is cut or damaged: {count} bytes wanted at {at}, the limit is {self.limit}")
        self.at = at + count
        return at

    def u32(self) -> int:
        return _U32.unpack_from(self.data, self.need(4))[0]

    def u64(self) -> int:
        return _U64.unpack_from(self.data, self.need(8))[0]

    def string(self) -> str:
        count = self.u64()
        at = self.need(count)
        try:
            return self.data[at : at + count].decode()
        except UnicodeDecodeError:
            self.fail(f"the text at {at} is not UTF-8")

    def scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            self.fail(f"unknown kind of value {kind} before {self.at}")
        form = struct.Struct("<" + _SCALARS[kind])
        return form.unpack_from(self.data, self.need(form.size))[0]

    def skip_array(self) -> _Array:
        """Passes over an array and remembers where it lies."""
        kind, count = self.u32(), self.u64()
        found = _Array(kind, count, self.at)
        if kind == _STRING:
            self._skip_strings(count)
        elif kind in _SCALARS:
            self.need(count * struct.calcsize("<" + _SCALARS[kind]))
        else:
            self.fail(f"unknown kind of array element {kind} before {self.at}")
        return found

    def _skip_strings(self, count: int) -> None:
        if count * 8 > self.limit - self.at:
            self.fail(f"the header is cut or damaged: an array of {count} texts at {self.at}")
        data, limit, at, unpack = self.data, self.limit, self.at, _U64.unpack_from
        for _ in range(count):
            if at + 8 > limit:
                break
            at += 8 + unpack(data, at)[0]
        if at > limit:
            self.fail(f"the header is cut or damaged: an array of {count} texts ends past {limit}")
        self.at = at

    def array(self, found: _Array) -> list:
        self.at = found.at
        if found.kind == _STRING:
            return [self.string() for _ in range(found.count)]
        form = struct.Struct(f"<{found.count}{_SCALARS[found.kind]}")
        return list(form.unpack_from(self.data, self.need(form.size)))


def read_header(path: str | Path) -> Header:
    """Reads and checks the header; the tensors' data must lie wholly within the file.

    Raises ModelFault (path and reason in one line) if the file cannot be read, is no GGUF of version 2 or 3,
    is cut anywhere, or names an unknown type.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_FIXED.size)
            if start[:4] != MAGIC[: len(start)] or not start:
                raise ModelFault(f"{path}: not a GGUF file")
            if len(start) < _FIXED.size:
                raise ModelFault(f"{path}: the file is cut: {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data, size)
    except OSError as error:
        raise ModelFault(f"{path}: {error.strerror or error}") from error


def _read(path: Path, data: mmap.mmap, size: int) -> Header:
    cursor = _Cursor(path, data, min(size, HEADER_BYTES_MAX))
    _, version, tensor_count, key_count = _FIXED.unpack_from(data, cursor.need(_FIXED.size))
    if version not in VERSIONS:
        cursor.fail(f"GGUF version {version} is not known, only {' and '.join(map(str, VERSIONS))}")
    if key_count > KEYS_MAX or tensor_count > TENSORS_MAX:
        cursor.fail(f"{key_count} keys and {tensor_count} tensors are over the limits {KEYS_MAX} and {TENSORS_MAX}")
    fields: dict[str, Scalar | _Array] = {}
    for _ in range(key_count):
        key, kind = cursor.string(), cursor.u32()
        if key in fields:
            cursor.fail(f"the key {key} stands twice")
        fields[key] = cursor.skip_array() if kind == _ARRAY else cursor.scalar(kind)
    alignment = fields.get("general.alignment", ALIGNMENT_DEFAULT)
    if type(alignment) is not int or not 0 < alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
        cursor.fail("general.alignment is not a power of two within the limit")
    raw = [_tensor(cursor) for _ in range(tensor_count)]
    data_offset = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for one, other in itertools.pairwise(sorted(raw, key=lambda info: (info.offset, info.bytes))):
        if one.offset + one.bytes > other.offset and one.name != other.name:
            cursor.fail(f"the tensors {one.name} and {other.name} overlap")
    for info in raw:
        if info.name in tensors:
            cursor.fail(f"the tensor {info.name} stands twice")
        if info.offset % alignment:
            cursor.fail(f"the tensor {info.name} is not aligned to {alignment}")
        end = data_offset + info.offset + info.bytes
        if end > size:
            cursor.fail(f"the file is cut: {info.name} ends at {end}, the file has {size} bytes")
        tensors[info.name] = msgspec.structs.replace(info, offset=data_offset + info.offset)
    return Header(path, version, fields, tensors, (alignment, data_offset, size), data[: cursor.at])


def _tensor(cursor: _Cursor) -> TensorInfo:
    """One entry of the tensor table; its offset still counts from the start of the data."""
    name, dimensions = cursor.string(), cursor.u32()
    if not 0 < dimensions <= DIMENSIONS_MAX:
        cursor.fail(f"the tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.u64() for _ in range(dimensions))[::-1]
    number, offset = cursor.u32(), cursor.u64()
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        cursor.fail(f"the tensor {name} has the unknown type {number}")
    count = 1
    for extent in shape:
        count *= extent
    if count == 0 or shape[-1] % kind.block:
        cursor.fail(f"the tensor {name} of type {kind.name} has the impossible shape {shape}")
    return TensorInfo(name, shape, kind.name, offset, count // kind.block * kind.bytes)


class TensorFile:
    """The tensors' bytes, mapped and not read. A context manager; a view keeps the mapping alive past its end."""

    def __init__(self, header: Header) -> None:
        try:
            with open(header.path, "rb") as file:
                if os.fstat(file.fileno()).st_size != header.file_bytes:
                    raise ModelFault(f"{header.path}: the file has changed since its header was read")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFault(f"{header.path}: {error.strerror or error}") from error
        self._view = memoryview(self._map)

    def data(self, info: TensorInfo) -> memoryview:
        """The tensor's stored bytes, read-only, `info.bytes` long; quantised blocks as they lie in the file."""
        return self._view[info.offset : info.offset + info.bytes]

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        del self._view, self._map
