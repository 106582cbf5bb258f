"""The linear kernels: exact weights, sums near float64, and the same bits for a row whatever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tests import native
from zjournal.kernels import cpu

KINDS = ("F32", "Q4_1", "Q8_0")
SHAPES = ((16, 32), (33, 96), (48, 160), (49, 32), (130, 96))
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 40)


def stored(kind: str, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Random rows as a GGUF stores them, and their values by the gguf package."""
    rng = np.random.default_rng(seed)
    if kind == "F32":
        raw = rng.standard_normal((n, k), dtype=np.float32)
        return raw, torch.from_numpy(raw)
    blocks = n * k // 32
    size, halves = (20, 2) if kind == "Q4_1" else (34, 1)
    raw = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
    # Halves of every magnitude, the subnormal ones among them.
    scales = (rng.standard_normal((blocks, halves)) * 10.0 ** rng.integers(-7, 0, (blocks, halves))).astype(np.float16)
    raw[:, : 2 * halves] = scales.view(np.uint8).reshape(blocks, 2 * halves)
    raw = np.ascontiguousarray(raw.reshape(n, -1))
    return raw, torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))


def packed(kernels: cpu.Kernels, kind: str, n: int, k: int, seed: int = 0) -> tuple[cpu.Packed, torch.Tensor]:
    raw, values = stored(kind, n, k, seed)
    return kernels.pack(kind, raw.ctypes.data, n, k), values


@pytest.fixture(params=native.ISAS)
def kernels(request: pytest.FixtureRequest):
    opened = native.kernels(request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_keep_every_value(kernels: cpu.Kernels, kind: str) -> None:
    for n, k in SHAPES:
        matrix, values = packed(kernels, kind, n, k)
        assert torch.equal(kernels.unpack(matrix), values)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_sums_the_exact_weights(kernels: cpu.Kernels, kind: str) -> None:
    for n, k in SHAPES:
        matrix, values = packed(kernels, kind, n, k)
        for rows in ROWS:
            x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
            expected = x.double() @ values.double().T
            room = 1e-6 * (x.double().abs() @ values.double().abs().T) + 1e-12
            assert ((kernels.linear(matrix, x).double() - expected).abs() <= room).all(), (n, k, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company(kernels: cpu.Kernels, kind: str) -> None:
    for n, k in SHAPES:
        matrix, _ = packed(kernels, kind, n, k)
        x = torch.randn(max(ROWS), k, generator=torch.Generator().manual_seed(1))
        alone = torch.cat([kernels.linear(matrix, x[i : i + 1]) for i in range(len(x))])
        for rows in ROWS:
            for at in (0, len(x) - rows):
                assert torch.equal(kernels.linear(matrix, x[at : at + rows].contiguous()), alone[at : at + rows])


@pytest.mark.parametrize("kind", KINDS)
def test_instruction_sets_and_thread_counts_give_the_same_bits(kind: str) -> None:
    n, k = 130, 160
    x = torch.randn(70, k, generator=torch.Generator().manual_seed(2))
    results = []
    for isa in native.ISAS:
        for threads in (1, 2, 5):
            try:
                kernels = cpu.Kernels(native.library(), threads, isa)
            except ValueError:  # this CPU lacks it
                continue
            matrix, _ = packed(kernels, kind, n, k)
            results.append(torch.cat([kernels.linear(matrix, x[:rows].contiguous()) for rows in (1, 4, 8, 70)]))
            kernels.close()
    assert len(results) >= 3
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_add_is_the_sum_of_both(kernels: cpu.Kernels) -> None:
    matrix, _ = packed(kernels, "Q4_1", 49, 96)
    for rows in (1, 20):
        x, y = torch.randn(rows, 96), torch.randn(rows, 49)
        expected = y + kernels.linear(matrix, x)
        assert torch.equal(kernels.linear(matrix, x, add_to=y), expected)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="avx1024"):
        cpu.Kernels(native.library(), 1, "avx1024")


def test_many_small_regions_on_more_threads_than_cores() -> None:
    kernels = native.kernels("", threads=6)
    matrix, _ = packed(kernels, "Q4_1", 130, 32)
    x = torch.randn(9, 32)
    first = kernels.linear(matrix, x)
    for _ in range(500):
        assert torch.equal(kernels.linear(matrix, x), first)
    kernels.close()
