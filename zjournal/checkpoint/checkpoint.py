"""A model on disk in either form, a GGUF file or a Hugging Face folder, behind one interface and without torch.

`open_checkpoint` reads headers only: what the model computes, its tensors, its tokenizer and template. Both processes
use it: the server to refuse a model before it binds its port, the engine to load it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from zjournal.checkpoint import gguf, safetensors
from zjournal.checkpoint.decoder import Model, Shape
from zjournal.checkpoint.families import gemma3, llama, qwen
from zjournal.checkpoint.fingerprint import fingerprint
from zjournal.checkpoint.gguf import TensorInfo
from zjournal.checkpoint.hfconfig import JSON_BYTES_MAX, HfConfig, open_file
from zjournal.checkpoint.template import Template
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.errors import ModelFault

CONFIG = "config.json"
_BESIDE = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_FROM_GGUF: dict[str, Callable[[gguf.Header], Model]] = {
    "llama": llama.from_gguf,
    "qwen2": qwen.from_gguf,
    "qwen3": qwen.from_gguf,
    "gemma3": gemma3.from_gguf,
}
_FROM_CONFIG: dict[str, Callable[[HfConfig], Model]] = {
    "llama": llama.from_config,
    "qwen2": qwen.from_config,
    "qwen3": qwen.from_config,
}
_GEMMA3 = "gemma3_text"


class TensorData(Protocol):
    """The bytes of tensors, mapped; a context manager."""

    def data(self, info: TensorInfo) -> memoryview: ...

    def __enter__(self) -> TensorData: ...

    def __exit__(self, *_: object) -> None: ...


class Checkpoint(Protocol):
    """What both forms give. `weight_files` are the files with tensors, and where the tensors' bytes start in each."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    weight_files: tuple[tuple[Path, int], ...]

    def model(self) -> Model:
        """What the model computes. Raises ModelFault."""

    def tokenizer(self) -> Tokenizer:
        """Takes about a second. Raises ModelFault."""

    def template(self, specials: Mapping[str, str]) -> Template:
        """The chat template; `specials` are the texts of bos, eos, … Raises ModelFault."""

    def open(self) -> TensorData:
        """Maps the tensors. Raises ModelFault."""

    def beside(self) -> Iterator[tuple[str, bytes]]:
        """What makes the model besides its tensors: names and bytes. Raises ModelFault."""


class GgufCheckpoint:
    """One GGUF file."""

    def __init__(self, path: Path) -> None:
        self.header = gguf.read_header(path)
        self.path = path
        self.tensors: Mapping[str, TensorInfo] = self.header.tensors
        self.weight_files: tuple[tuple[Path, int], ...] = ((path, self.header.data_offset),)

    def model(self) -> Model:
        parts = self.header.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise ModelFault(f"{self.path}: split.count is {parts}: merge the parts into one file first")
        family = self.header.value("general.architecture", str)
        if family not in _FROM_GGUF:
            known = ", ".join(_FROM_GGUF)
            raise ModelFault(f"{self.path}: the architecture {family} is not supported, only {known}")
        return _FROM_GGUF[family](self.header)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_header(self.header)

    def template(self, specials: Mapping[str, str]) -> Template:
        return Template.from_header(self.header, specials)

    def open(self) -> TensorData:
        return gguf.TensorFile(self.header)

    def beside(self) -> Iterator[tuple[str, bytes]]:
        yield "header", _read(self.path, self.header.data_offset)


class FolderCheckpoint:
    """A Hugging Face folder: config.json, safetensors, tokenizer.json and what stands beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = HfConfig.read(path / CONFIG)
        self._shards = safetensors.shards(path)
        self.tensors: Mapping[str, TensorInfo]
        self.tensors, self._sizes = safetensors.read_tensors(self._shards)
        self.weight_files: tuple[tuple[Path, int], ...] = tuple((shard, 0) for shard in self._shards)

    def model(self) -> Model:
        kind = self.config.value("model_type", str)
        if kind == _GEMMA3:
            embed = self.tensors.get("model.embed_tokens.weight")
            return gemma3.from_config(self.config, embed.type if embed else "F32")
        if kind not in _FROM_CONFIG:
            known = ", ".join((*_FROM_CONFIG, _GEMMA3))
            raise ModelFault(f"{self.config.path}: model_type is {kind!r}: it is not supported, only {known}")
        return _FROM_CONFIG[kind](self.config)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.path, self.config.value("vocab_size", int))

    def template(self, specials: Mapping[str, str]) -> Template:
        return Template.from_folder(self.path, specials)

    def open(self) -> TensorData:
        return safetensors.ShardedTensors(self._shards, self._sizes)

    def beside(self) -> Iterator[tuple[str, bytes]]:
        for name in _BESIDE:
            if (self.path / name).exists():
                yield name, _read(self.path / name, JSON_BYTES_MAX)


def _read(path: Path, limit: int) -> bytes:
    try:
        with open_file(path) as file:
            return file.read(limit)
    except OSError as error:
        raise ModelFault(f"{path}: {error.strerror or error}") from error


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Reads the headers of a GGUF file or of a folder. Raises ModelFault."""
    path = Path(path)
    return FolderCheckpoint(path) if path.is_dir() else GgufCheckpoint(path)


def check_tensors(checkpoint: Checkpoint, model: Model) -> None:
    """Raises ModelFault naming the first tensor that is missing, unexpected, of another shape or of a foreign type."""
    expected, optional = model.expected()
    path, tensors = checkpoint.path, checkpoint.tensors
    for name in expected:
        if name not in tensors:
            raise ModelFault(f"{path}: the tensor {name} is missing")
    for name, info in tensors.items():
        shape: Shape | None = expected.get(name) or optional.get(name)
        if shape is None:
            raise ModelFault(f"{path}: the tensor {name} is none of this architecture's")
        if info.shape != shape:
            raise ModelFault(f"{path}: the tensor {name} has the shape {info.shape}, not {shape}")
        if info.type not in gguf.RUNNABLE_TYPES:
            known = ", ".join(gguf.RUNNABLE_TYPES)
            raise ModelFault(f"{path}: the tensor {name} has the type {info.type}, not one of {known}")


class Identity(msgspec.Struct, frozen=True):
    """What the files hold, as hex digests: the tensors (names, shapes, types, bytes), and everything else."""

    weights: str
    rest: str


def identify(checkpoint: Checkpoint, cache_dir: Path | None) -> Identity:
    """Follows content alone: neither place nor times count. `cache_dir` remembers the sums. Raises ModelFault."""
    tensors = hashlib.sha256()
    for file, start in checkpoint.weight_files:
        tensors.update(fingerprint(file, cache_dir, start).encode())
    for info in sorted(checkpoint.tensors.values(), key=lambda info: info.name):
        tensors.update(f"{info.name} {info.shape} {info.type}\n".encode())
    rest = hashlib.sha256()
    for name, data in checkpoint.beside():
        rest.update(f"{name} {len(data)}\n".encode())
        rest.update(data)
    return Identity(tensors.hexdigest(), rest.hexdigest())
