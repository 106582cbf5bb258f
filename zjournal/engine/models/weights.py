"""A checkpoint's tensors in the form that the decoders want: by part and layer, as stored or expanded to fp32.

Here the differences between the two kinds of files end: rows of q and k are put in the order of the rotation that the
decoder wants, of neighbours or of halves, and the weights of norms get the 1 that some files leave out. Values are
otherwise unchanged.
"""

from __future__ import annotations

from types import TracebackType

import numpy as np
import torch

from zjournal.checkpoint.checkpoint import Checkpoint, TensorData
from zjournal.checkpoint.decoder import Model
from zjournal.checkpoint.gguf import TensorInfo
from zjournal.errors import ModelFault

_ROTATED = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")


def stored(file: TensorData, info: TensorInfo) -> np.ndarray:
    """The tensor's bytes as they lie in the file, uint8, read-only, not copied."""
    return np.frombuffer(file.data(info), dtype=np.uint8)


def expand(file: TensorData, info: TensorInfo) -> np.ndarray:
    """The tensor's values, fp32, contiguous, in its shape. Exact: fp32 holds every dequantised value."""
    raw = stored(file, info)
    if info.type == "F32":
        return raw.view(np.float32).reshape(info.shape)
    if info.type == "F16":
        return raw.view(np.float16).astype(np.float32).reshape(info.shape)
    if info.type == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
    from gguf import GGMLQuantizationType  # slow to import, and the default model needs it only for expanding
    from gguf.quants import dequantize

    rows = raw.reshape(*info.shape[:-1], -1)
    return np.ascontiguousarray(dequantize(rows, GGMLQuantizationType[info.type]), dtype=np.float32).reshape(info.shape)


def neighbours(rows: int, head_dim: int, rope_dim: int) -> np.ndarray:
    """The order that brings heads stored for half-split rotation to rotation of neighbours: indices of rows.

    Within the rotated part of a head, row i and row i + rope_dim / 2 become rows 2i and 2i + 1; the rest stays.
    """
    head = np.arange(head_dim)
    head[:rope_dim] = head[:rope_dim].reshape(2, -1).T.ravel()
    return (np.arange(0, rows, head_dim)[:, None] + head).ravel()


def halves(rows: int, head_dim: int, rope_dim: int) -> np.ndarray:
    """The inverse of `neighbours`: the order that brings heads stored for rotation of neighbours to that of halves."""
    head = np.arange(head_dim)
    head[:rope_dim] = head[:rope_dim].reshape(-1, 2).T.ravel()
    return (np.arange(0, rows, head_dim)[:, None] + head).ravel()


class Weights:
    """Reads a model's tensors by part. A context manager: the file is mapped while it is open."""

    def __init__(self, checkpoint: Checkpoint, model: Model, *, by_halves: bool = False) -> None:
        """`by_halves`: the decoder rotates i with i + half, not 2i with 2i + 1. Raises ModelFault for no such file."""
        self._checkpoint = checkpoint
        self._model = model
        self._turned = by_halves != model.spelling.half_split  # the file has the other order
        self._order_of = halves if by_halves else neighbours
        self._file = checkpoint.open()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.__exit__(kind, error, at)

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies and what it is, by its name in the file."""
        return self._checkpoint.tensors[name]

    def name(self, part: str, layer: int) -> str:
        """What the file calls a layer's tensor."""
        return self._model.spelling.of(layer, part)

    def rows(self, part: str, layer: int, keep: bool) -> tuple[str, np.ndarray, tuple[int, int]]:
        """A layer's matrix: type, bytes of its rows, and shape; see `matrix`."""
        name = self._model.spelling.of(layer, part)
        kind, raw, shape = self.matrix(name, keep)
        if part in _ROTATED and self._turned:
            raw = raw.reshape(shape[0], -1)[self._order(shape[0])]
        return kind, raw, shape

    def matrix(self, name: str, keep: bool) -> tuple[str, np.ndarray, tuple[int, int]]:
        """A matrix by name: as stored if `keep`, else expanded to F32; contiguous."""
        info = self.info(name)
        out, width = info.shape
        if keep:
            return info.type, stored(self._file, info), (out, width)
        return "F32", expand(self._file, info), (out, width)

    def values(self, part: str, layer: int) -> torch.Tensor:
        """A layer's tensor of any shape, fp32, in memory of its own."""
        values = expand(self._file, self.info(self._model.spelling.of(layer, part)))
        if part in _ROTATED and self._turned:
            values = values[self._order(values.shape[0])]
        return self._own(values, "norm" in part)

    def out_norm(self) -> torch.Tensor:
        """The weights of the last norm, fp32 [hidden]."""
        return self._own(expand(self._file, self.info(self._model.spelling.out_norm)), True)

    def expanded(self, name: str) -> torch.Tensor:
        """A tensor by name, fp32, in memory of its own."""
        return self._own(expand(self._file, self.info(name)), False)

    def head(self) -> str | None:
        """The name of the head's matrix; None if the embedding serves. Raises ModelFault.

        A file may hold a head although the model ties it to the embedding; then both must be equal.
        """
        spelling = self._model.spelling
        if not self._model.decoder.tied:
            return spelling.head
        if spelling.head in self._checkpoint.tensors:
            head, embed = (self._file.data(self.info(name)) for name in (spelling.head, spelling.embed))
            if head != embed:
                path = self._checkpoint.path
                raise ModelFault(f"{path}: the head is tied to the embedding, and {spelling.head} differs from it")
        return None

    def rope_factors(self) -> np.ndarray | None:
        """The divisors of the frequencies, fp32 [rope_dim / 2], if the file has them."""
        name = self._model.spelling.rope_factors
        if not name or name not in self._checkpoint.tensors:
            return None
        return np.array(expand(self._file, self.info(name)))

    def _order(self, rows: int) -> np.ndarray:
        decoder = self._model.decoder
        return self._order_of(rows, decoder.head_dim, decoder.rope.dim)

    def _own(self, values: np.ndarray, is_norm: bool) -> torch.Tensor:
        offset = np.float32(self._model.spelling.norm_offset)
        made = values + offset if is_norm and offset else np.array(values)
        return torch.from_numpy(np.ascontiguousarray(made))
