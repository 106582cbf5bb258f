"""The linear kernels: exact weights, sums near float64, and the same bits for a row whatever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import native
from zjournal.kernels import cpu

# Halves that stand in a block of each kind: (values, bytes, byte offsets of its halves).
BLOCKS = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}
KINDS = cpu.PACKED
SHAPES = ((16, 32), (33, 96), (48, 160), (49, 32), (130, 96))
SUPER_SHAPES = ((16, 256), (33, 512), (49, 256), (130, 768))
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 40)


def shapes(kind: str) -> tuple[tuple[int, int], ...]:
    return SUPER_SHAPES if cpu.BLOCK_VALUES[kind] == 256 else SHAPES


def stored(kind: str, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Random rows as a GGUF stores them, and their values by the gguf package."""
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        values = torch.from_numpy(rng.standard_normal((n, k), dtype=np.float32))
        values = values.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
        return values.view(torch.uint8).numpy(), values.float()
    values, size, halves = BLOCKS[kind]
    blocks = n * k // values
    raw = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
    # Halves of every magnitude, the subnormal ones among them.
    for at in halves:
        scale = (rng.standard_normal((blocks, 1)) * 10.0 ** rng.integers(-7, 0, (blocks, 1))).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
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
    for n, k in shapes(kind):
        matrix, values = packed(kernels, kind, n, k)
        assert torch.equal(kernels.unpack(matrix), values)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_sums_the_exact_weights(kernels: cpu.Kernels, kind: str) -> None:
    for n, k in shapes(kind):
        matrix, values = packed(kernels, kind, n, k)
        for rows in ROWS:
            x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
            expected = x.double() @ values.double().T
            room = 1e-6 * (x.double().abs() @ values.double().abs().T) + 1e-12
            assert ((kernels.linear(matrix, x).double() - expected).abs() <= room).all(), (n, k, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company(kernels: cpu.Kernels, kind: str) -> None:
    for n, k in shapes(kind):
        matrix, _ = packed(kernels, kind, n, k)
        x = torch.randn(max(ROWS), k, generator=torch.Generator().manual_seed(1))
        alone = torch.cat([kernels.linear(matrix, x[i : i + 1]) for i in range(len(x))])
        for rows in ROWS:
            for at in (0, len(x) - rows):
                assert torch.equal(kernels.linear(matrix, x[at : at + rows].contiguous()), alone[at : at + rows])


@pytest.mark.parametrize("kind", KINDS)
def test_instruction_sets_and_thread_counts_give_the_same_bits(kind: str) -> None:
    n, k = shapes(kind)[-1]
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


@pytest.mark.parametrize("kind", KINDS)
def test_one_large_matrix_is_packed_by_many_threads(kind: str) -> None:
    kernels = native.kernels("", threads=4)
    matrix, values = packed(kernels, kind, 999, 256)
    assert torch.equal(kernels.unpack(matrix), values)
    kernels.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_any_rows(data: st.DataObject) -> None:
    """The weights exact, the sums near float64, and a row's bits its own, over shapes that no list thought of."""
    kind = data.draw(st.sampled_from(KINDS))
    n = data.draw(st.integers(1, 120))
    k = cpu.BLOCK_VALUES[kind] * data.draw(st.integers(1, 3 if kind.startswith("Q") else 70))
    rows = data.draw(st.integers(1, 30))
    kernels = native.kernels(data.draw(st.sampled_from(["", "portable"])), threads=data.draw(st.integers(1, 3)))
    matrix, values = packed(kernels, kind, n, k, data.draw(st.integers(0, 1000)))
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
    found = kernels.linear(matrix, x)
    assert torch.equal(kernels.unpack(matrix), values)
    room = 1e-6 * (x.double().abs() @ values.double().abs().T) + 1e-12
    assert ((found.double() - x.double() @ values.double().T).abs() <= room).all()
    at = data.draw(st.integers(0, rows - 1))
    assert torch.equal(kernels.linear(matrix, x[at : at + 1].contiguous())[0], found[at])
    kernels.close()


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
