"""RoPE: the frequencies of each scaling, and the tables of cosines and sines that both decoders read.

The formulas are transformers' (modeling_rope_utils.py). Frequencies and angles are rounded to fp32 as the reference
implementations have them; the rest is float64, so that no library's fp32 cosine enters the numerics.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from zjournal.checkpoint.decoder import Rope


def frequencies(rope: Rope, factors: np.ndarray | None = None) -> np.ndarray:
    """The angle per position of each pair, fp32 [dim / 2]. `factors` divide it (rope_freqs.weight of a GGUF)."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    plain = (1.0 / rope.base**exponents).astype(np.float32)
    if rope.kind == "linear":
        plain = plain / np.float32(rope.factor)
    elif rope.kind == "llama3":
        plain = _llama3(rope, plain)
    elif rope.kind == "yarn":
        plain = _yarn(rope, rope.base**exponents)
    return plain if factors is None else plain / factors


def _llama3(rope: Rope, plain: np.ndarray) -> np.ndarray:
    """Long waves are stretched by the factor, short ones stay, and between them the two are mixed."""
    waves = 2 * np.pi / plain.astype(np.float64)
    stretched = plain / rope.factor
    smooth = (rope.original / waves - rope.low) / (rope.high - rope.low)
    mixed = (1 - smooth) * stretched + smooth * plain
    return np.where(
        waves > rope.original / rope.low, stretched, np.where(waves < rope.original / rope.high, plain, mixed)
    ).astype(np.float32)


def _yarn(rope: Rope, powers: np.ndarray) -> np.ndarray:
    """Dimensions that turn often within the original context stay, those that hardly turn are stretched."""

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # as the source has it, against a division by zero
    stretch = np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0, 1)
    return (1 / (rope.factor * powers) * stretch + 1 / powers * (1 - stretch)).astype(np.float32)


def amplitude(rope: Rope) -> float:
    """What cosines and sines are multiplied by."""
    if rope.kind != "yarn":
        return 1.0
    if rope.amplitude is not None:
        return rope.amplitude
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def tables(rope: Rope, context: int, factors: np.ndarray | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each position's angles, fp32 [context, dim / 2]."""
    angles = (np.arange(context, dtype=np.float32)[:, None] * frequencies(rope, factors)).astype(np.float64)
    size = amplitude(rope)
    cos, sin = ((function(angles) * size).astype(np.float32) for function in (np.cos, np.sin))
    return torch.from_numpy(cos), torch.from_numpy(sin)
