"""Random GGUF rows of every kind that kernels read packed, for tests."""

from __future__ import annotations

import torch

from tests.kernels.test_cpu_linear import stored
from zjournal.kernels.packed import KINDS, Packed, pack, quantise_int8, unpack

FILED = tuple(kind for kind in KINDS if kind != "INT8")


def weights(kind: str, n: int, k: int, seed: int = 0) -> tuple[Packed, torch.Tensor]:
    """A packed matrix [n, k], and its fp32 values by the gguf package (INT8: by unpack)."""
    if kind == "INT8":
        weight = quantise_int8(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)))
        return weight, unpack(weight)
    raw, values = stored(kind, n, k, seed)
    return pack(kind, torch.from_numpy(raw), n, k), values


def width(kind: str) -> int:
    """A short row: one that does not fill its last step where a kind allows that."""
    return 256 if KINDS[kind].supers else 96
