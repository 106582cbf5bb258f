"""The JSON files of a Hugging Face folder: read within a limit, and each value checked for its type."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from zjournal.errors import ModelFault

JSON_BYTES_MAX = 64 << 20  # tokenizer.json of 260,000 tokens has 33 MB
FLOAT_INT_MAX = 1 << 64  # a larger int stands for no number that a model has, and may be none that a float can hold

T = TypeVar("T", int, float, bool, str)


class HfConfig:
    """An object of a JSON file. `prefix` stands before the key in messages."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> HfConfig:
        """Reads the file. Raises ModelFault if it is missing, too large, or no JSON object."""
        return cls(path, read_object(path))

    def get(self, key: str) -> Any:
        """The value, or None."""
        return self._values.get(key)

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value at `key`; null counts as missing, an int serves as a float. Raises ModelFault."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFault(f"{self.path}: {self._prefix}{key} is missing")
        if kind is float and type(value) is int and abs(value) <= FLOAT_INT_MAX:
            return kind(value)
        if type(value) is not kind:
            raise ModelFault(f"{self.path}: {self._prefix}{key} is {value!r}, not of type {kind.__name__}")
        return value


def open_file(path: Path) -> BinaryIO:
    """Opens a file to be read, never a pipe or a device, which might not end or not even open. Raises ModelFault."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise ModelFault(f"{path}: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ModelFault(f"{path}: not a file")
    return file


def read_object(path: Path, limit: int = JSON_BYTES_MAX) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelFault."""
    try:
        with open_file(path) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelFault(f"{path}: {error.strerror or error}") from error
    if len(data) > limit:
        raise ModelFault(f"{path}: larger than {limit >> 20} MiB")
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFault(f"{path}: {error}") from error
