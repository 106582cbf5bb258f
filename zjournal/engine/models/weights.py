"""Tensors out of a GGUF file, by name and shape: as stored, or expanded to fp32.

Every tensor of the file must be expected and every expected tensor must be there, so a variant of the
architecture that we do not compute (biases, experts) is refused and not half computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from zjournal.checkpoint.gguf import Header, TensorFile, TensorInfo, check_types
from zjournal.errors import ModelFault

Shape = tuple[int, ...]


def check_tensors(header: Header, expected: Mapping[str, Shape], optional: Mapping[str, Shape]) -> None:
    """Raises ModelFault naming the first tensor that is missing, unexpected, of another shape or of a foreign type."""
    check_types(header)
    for name in expected:
        if name not in header.tensors:
            raise ModelFault(f"{header.path}: the tensor {name} is missing")
    for name, info in header.tensors.items():
        shape = expected.get(name) or optional.get(name)
        if shape is None:
            raise ModelFault(f"{header.path}: the tensor {name} is none of this architecture's")
        if info.shape != shape:
            raise ModelFault(f"{header.path}: the tensor {name} has the shape {info.shape}, not {shape}")


def stored(file: TensorFile, info: TensorInfo) -> np.ndarray:
    """The tensor's bytes as they lie in the file, uint8, read-only, not copied."""
    return np.frombuffer(file.data(info), dtype=np.uint8)


def expand(file: TensorFile, info: TensorInfo) -> np.ndarray:
    """The tensor's values, fp32, contiguous, in its shape. Exact: fp32 holds every dequantised value."""
    raw = stored(file, info)
    if info.type == "F32":
        return raw.view(np.float32).reshape(info.shape)
    if info.type == "F16":
        return raw.view(np.float16).astype(np.float32).reshape(info.shape)
    from gguf import GGMLQuantizationType  # slow to import, and the default model needs it only for expanding
    from gguf.quants import dequantize

    rows = raw.reshape(*info.shape[:-1], -1)
    return np.ascontiguousarray(dequantize(rows, GGMLQuantizationType[info.type]), dtype=np.float32).reshape(info.shape)


def expand_tensor(file: TensorFile, info: TensorInfo) -> torch.Tensor:
    """As `expand`, in memory of its own."""
    return torch.from_numpy(np.array(expand(file, info)))
