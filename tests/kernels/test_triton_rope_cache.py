"""Rotation and the write into pages, interpreted: near float64, the same bits in any company, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from zjournal.kernels.attention import BLOCK_TOKENS
from zjournal.kernels.rope_cache import rope_and_write, rope_and_write_reference, to_page

LAYERS, LAYER = 3, 1
NOWHERE = 2**31 - 1
NORM_EPS = 1e-6


class Case:
    """Rows of some sequences at given positions: (sequence, position)."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rows: list[tuple[int, int]],
        *,
        rope_dim: int = 0,
        normed: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        pages: torch.dtype | None = None,
    ) -> None:
        random = torch.Generator().manual_seed(heads + head_dim)
        self.sizes = heads, kv_heads
        self.width = (heads + 2 * kv_heads) * head_dim
        self.q_width = heads * head_dim
        self.sequence = torch.tensor([number for number, _ in rows], dtype=torch.int32)
        self.position = torch.tensor([position for _, position in rows], dtype=torch.int32)
        angles = torch.rand(60, (rope_dim or head_dim) // 2, generator=random) * 6
        self.cos, self.sin = 1.2 * angles.cos(), 1.2 * angles.sin()
        self.table = torch.randperm(12, generator=random).view(3, 4).to(torch.int32)
        self.table = torch.cat((self.table, torch.full((3, 2), NOWHERE, dtype=torch.int32)), 1)
        self.qkv = (torch.randn(len(rows), self.width, generator=random) * 3).to(dtype)
        shape = (12, LAYERS, 2, kv_heads, BLOCK_TOKENS, head_dim)
        self.pages = torch.full(shape, torch.nan).to(pages or dtype)
        weights = torch.rand(2, head_dim, generator=random) + 0.5
        self.norms = (weights[0], weights[1], NORM_EPS) if normed else None
        self.scales = (1.0, 1.0) if pages is None else (0.25, 2.0)

    def run(self, function: Callable[..., None], only: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """qkv and pages after it; `only`: of these rows."""
        rows = torch.arange(len(self.qkv)) if only is None else torch.tensor(only, dtype=torch.int64)
        qkv, pages = self.qkv[rows].clone(), self.pages.clone()
        batch: tuple[Any, ...] = self.position[rows], self.sequence[rows], self.table, self.cos, self.sin
        function(qkv, *batch, pages, LAYER, *self.sizes, self.norms, *self.scales)
        return qkv, pages


ROWS = [(0, 0), (0, 1), (2, 15), (2, 16), (1, 47), (1, 59)]
SHAPES = [(9, 3, 64, 0), (16, 4, 64, 0), (8, 1, 128, 0), (2, 2, 80, 32), (4, 2, 96, 96), (2, 1, 256, 128)]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rope_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_near_float64(
    heads: int, kv_heads: int, head_dim: int, rope_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    case = Case(heads, kv_heads, head_dim, ROWS[:3], rope_dim=rope_dim, normed=normed, dtype=dtype)
    near = {"rtol": 8e-3, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    found, expected = case.run(rope_and_write), case.run(rope_and_write_reference)
    for each, right in zip(found, expected, strict=True):
        torch.testing.assert_close(each, right, **near, equal_nan=True)  # what is not written stays NaN
    assert torch.equal(found[0][:, case.q_width :], case.qkv[:, case.q_width :])
    written = ~found[1].isnan()
    assert torch.equal(written, ~expected[1].isnan())
    assert written.any()
    values = found[1][:, LAYER, 1][written[:, LAYER, 1]]
    assert torch.equal(values, expected[1][:, LAYER, 1][written[:, LAYER, 1]])


def test_a_row_has_the_same_bits_in_any_company() -> None:
    case = Case(9, 3, 64, ROWS, normed=True)
    qkv, pages = case.run(rope_and_write)
    for only in ([0], [5, 2], [3, 4, 1]):
        alone, written = case.run(rope_and_write, only)
        assert torch.equal(alone, qkv[only])
        there = ~written.isnan()
        assert torch.equal(written[there], pages[there])
        assert there.sum() == len(only) * 2 * 3 * 64


def test_rows_without_a_position_are_left_out() -> None:
    case = Case(4, 2, 64, [(0, -1), (1, 20), (NOWHERE, -1)])
    qkv, pages = case.run(rope_and_write)
    only, alone = case.run(rope_and_write, [1])
    assert torch.equal(qkv[[0, 2]], case.qkv[[0, 2]])
    assert torch.equal(qkv[1:2], only)
    assert torch.equal(pages.nan_to_num(), alone.nan_to_num())
    empty, untouched = case.run(rope_and_write, [])
    assert empty.shape == (0, case.width)
    assert untouched.isnan().all()


def test_rows_of_a_wider_tensor() -> None:
    case = Case(4, 2, 64, ROWS)
    expected = case.run(rope_and_write)
    wide = torch.full((len(ROWS), case.width + 64), torch.nan, dtype=torch.bfloat16)
    wide[:, : case.width] = case.qkv
    rest = case.position, case.sequence, case.table, case.cos, case.sin, case.pages, LAYER, *case.sizes
    rope_and_write(wide[:, : case.width], *rest)
    assert torch.equal(wide[:, : case.width], expected[0])
    assert wide[:, case.width :].isnan().all()
    assert torch.equal(case.pages.nan_to_num(), expected[1].nan_to_num())


def test_pages_of_float8() -> None:
    case = Case(4, 2, 64, ROWS, pages=torch.float8_e4m3fn)
    case.qkv[:, -128:] *= 400  # some values are too large
    (qkv, pages), (right, expected) = case.run(rope_and_write), case.run(rope_and_write_reference)
    torch.testing.assert_close(qkv, right, rtol=8e-3, atol=1e-3)
    torch.testing.assert_close(pages.float(), expected.float(), rtol=0.13, atol=2e-3, equal_nan=True)
    assert (pages.float().abs() == 448).any()


@triton.jit
def _convert(x_ptr, y_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(y_ptr + at, to_page(tl.load(x_ptr + at), tl.float8e4nv))


def test_float8_is_rounded_as_torch_rounds_it() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].sort().values
    between = (every[1:] + every[:-1]) / 2
    x = torch.cat((every, between, between * 1.0001, between * 0.9999, torch.tensor([1e-9, -1e-9, 500.0, -1e30])))
    x = torch.cat((x, torch.zeros(1024 - len(x))))
    y = torch.empty(1024, dtype=torch.float8_e4m3fn)
    _convert[(1,)](x, y, COUNT=1024)
    assert torch.equal(y.float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_pools_that_pass_two_to_the_31_elements(sparse: Callable[[int], torch.Tensor]) -> None:
    case = Case(4, 2, 64, ROWS)
    per_block = case.pages[0].numel()
    first = 2**31 // per_block + 1
    far = sparse((first + 12) * per_block * 2).view(torch.bfloat16).view(-1, *case.pages.shape[1:])
    far[first:] = torch.nan
    _, expected = case.run(rope_and_write)
    table = torch.where(case.table == NOWHERE, NOWHERE, case.table + first)
    rope_and_write(case.qkv, case.position, case.sequence, table, case.cos, case.sin, far, LAYER, *case.sizes)
    assert torch.equal(far[first:].nan_to_num(), expected.nan_to_num())
