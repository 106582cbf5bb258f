"""The matrix products under the interpreter: near fp64, the same bits for a row in any company."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.kernels.packed_rows import weights, width
from zjournal.kernels import matmul, matmul_packed
from zjournal.kernels.embed import dequantise
from zjournal.kernels.matmul import linear, linear_fast, reference
from zjournal.kernels.packed import KINDS, unpack

ROOT = Path(__file__).resolve().parent.parent.parent
# Both sides of every tile's number of rows.
ROWS = (1, 16, 17, 32, 33, 64, 65, 128, 129, 260)
PACKED_ROWS = (1, 16, 17, 33, 64, 65)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def room(x: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far a result may lie off: each fp32 sum by its k roundings at most, and half a step of bf16 where rounded."""
    sizes = x.double().abs() @ values.double().abs().T
    sums = sizes * x.shape[1] * 2.0**-24
    return sums + (sizes * 2.0**-8 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize(("rows", "n", "k"), ((1, 1, 1), (3, 70, 100), (17, 64, 64), (40, 130, 576), (130, 33, 72)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("bias", (None, torch.bfloat16))
def test_near_the_sum_in_fp64(rows: int, n: int, k: int, dtype: torch.dtype, bias: torch.dtype | None) -> None:
    x, weight = rand(rows, k), rand(n, k, seed=1)
    added = None if bias is None else rand(n, seed=2).to(bias)
    y = linear(x, weight, added, out_dtype=dtype)
    assert y.dtype == dtype
    expected = reference(x, weight, added)
    slack = 0 if added is None else (expected.abs() + added.abs()) * 2.0**-8
    assert ((y - expected).abs() <= room(x, weight, dtype) + slack).all()


def test_sums_of_small_integers_are_exact() -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randint(-8, 9, (size, 200), generator=generator).bfloat16() for size in (20, 90))
    assert torch.equal(linear(x, weight, out_dtype=torch.float32).double(), reference(x, weight))


def test_bf16_is_rounded_to_the_nearest_even() -> None:
    weight = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8], [1.0, 2.0**-8 + 2.0**-12]]).bfloat16()
    y = linear(torch.ones(1, 2).bfloat16(), weight)
    assert y.tolist() == [[1.0, 1.0 + 2.0**-6, 1.0 + 2.0**-7]]


@pytest.mark.parametrize("k", (192, 100))
def test_a_row_has_the_same_bits_in_any_company(k: int) -> None:
    x, weight, bias = rand(max(ROWS), k), rand(20, k, seed=1), rand(20, seed=2)
    whole = linear(x, weight, bias, out_dtype=torch.float32)
    for rows in ROWS:
        at = len(x) - rows
        assert torch.equal(linear(x[at:], weight, bias, out_dtype=torch.float32), whole[at:])
    order = torch.randperm(130, generator=torch.Generator().manual_seed(5))
    assert torch.equal(linear(x[order], weight, bias, out_dtype=torch.float32), whole[order])


@pytest.mark.soak
def test_every_number_of_rows() -> None:
    x, weight = rand(131, 192), rand(65, 192, seed=1)
    whole = linear(x, weight, out_dtype=torch.float32)
    for rows in range(1, 131):
        assert torch.equal(linear(x[1 : 1 + rows], weight, out_dtype=torch.float32), whole[1 : 1 + rows]), rows
    for kind in KINDS:
        packed, _ = weights(kind, 65, 256)
        x = rand(131, 256)
        whole = linear(x, packed, out_dtype=torch.float32)
        for rows in range(1, 131):
            assert torch.equal(linear(x[1 : 1 + rows], packed, out_dtype=torch.float32), whole[1 : 1 + rows]), rows


def test_every_tile_is_chosen_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = rand(140, 128), rand(70, 128, seed=1)
    whole = linear(x, weight)
    for tile in matmul.TILES:
        monkeypatch.setattr(matmul, "tile_for", lambda rows, n, tile=tile: tile)
        assert torch.equal(linear(x, weight), whole), tile


def test_many_rows_take_the_largest_tile_that_fills_the_machine() -> None:
    chosen = [matmul.tile_for(rows, 4096) for rows in (1, 16, 17, 64, 100, 129, 1024, 2048)]
    sizes = [(tile.outputs, tile.rows) for tile in chosen]
    assert sizes == [(64, 16), (64, 16), (64, 32), (64, 64), (64, 128), (64, 128), (128, 128), (128, 256)]
    assert {matmul.tile_for(rows, n) for rows in range(1, 4096, 5) for n in (64, 4096, 28672)} == set(matmul.TILES)


@pytest.mark.parametrize("kind", ("", "Q4_1", "Q6_K"))
@pytest.mark.parametrize("rows", (3, 70))
def test_only_the_columns_of_out_are_written(kind: str, rows: int) -> None:
    weight = weights(kind, 33, 256)[0] if kind else rand(33, 256, seed=1)
    x = rand(rows, 256)
    wide = torch.full((rows + 2, 100), torch.nan).bfloat16()
    out = wide[1 : rows + 1, 40:73]
    assert linear(x, weight, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, linear(x, weight))
    wide[1 : rows + 1, 40:73] = torch.nan
    assert wide.isnan().all()


@pytest.mark.parametrize("k", (64, 70))
def test_what_lies_beside_the_arguments_is_not_read(k: int) -> None:
    x, weight = torch.full((20, 200), torch.nan).bfloat16(), torch.full((90, 200), torch.nan).bfloat16()
    x[2:19, 8 : 8 + k], weight[3:80, 16 : 16 + k] = rand(17, k), rand(77, k, seed=1)
    y = linear(x[2:19, 8 : 8 + k], weight[3:80, 16 : 16 + k])
    assert torch.equal(y, linear(rand(17, k), rand(77, k, seed=1)))


@pytest.mark.parametrize("kind", ("", "Q4_1"))
def test_a_row_that_is_no_number_spoils_itself_alone(kind: str) -> None:
    weight = weights(kind, 33, 96)[0] if kind else rand(33, 96, seed=1)
    x = rand(18, 96)
    expected = linear(x, weight)
    x[5, 7] = torch.nan
    y = linear(x, weight)
    assert y[5].isnan().all()
    others = [row for row in range(18) if row != 5]
    assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("kind", ("", "Q8_0"))
def test_no_rows(kind: str) -> None:
    weight = weights(kind, 33, 96)[0] if kind else rand(33, 96)
    assert linear(rand(0, 96), weight).shape == (0, 33)
    assert linear_fast(rand(0, 96), weight, out_dtype=torch.float32).shape == (0, 33)


def test_rows_may_lie_further_apart_than_an_int32_counts(sparse: Callable[[int], torch.Tensor]) -> None:
    stride = (1 << 30) + 8  # elements: row 2 starts past 2^31
    memory = [sparse((2 * stride + 64) * 2).view(torch.bfloat16) for _ in range(3)]
    x, weight, out = (torch.as_strided(each, (3, 64), (stride, 1)) for each in memory)
    x.copy_(rand(3, 64))
    weight.copy_(rand(3, 64, seed=1))
    linear(x, weight, out=out[:, :3])
    assert torch.equal(out[:, :3], linear(rand(3, 64), rand(3, 64, seed=1)))


@pytest.mark.parametrize("kind", tuple(KINDS))
def test_packed_near_the_sum_in_fp64(kind: str) -> None:
    k = width(kind)
    weight, _ = weights(kind, 70, k)
    x, bias = rand(5, k), rand(70, seed=2)
    expected = reference(x, weight, bias)
    values = unpack(weight)
    for dtype in (torch.bfloat16, torch.float32):
        slack = (expected.abs() + bias.double().abs()) * 2.0**-8
        # One rounding of the finished sum for INT8's scale; the others' weights are those of the reference already.
        off = (linear(x, weight, bias, out_dtype=dtype) - expected).abs()
        assert (off <= room(x, values, dtype) * 1.01 + slack).all()


@pytest.mark.parametrize("kind", tuple(KINDS))
def test_packed_rows_have_the_bits_of_the_expanded_matrix_in_any_company(kind: str) -> None:
    """Also across ROWS_MAX, where the product goes through the expanded matrix."""
    k = width(kind)
    weight, _ = weights(kind, 40, k)
    x = rand(max(PACKED_ROWS), k)
    alone = linear(x[:1], weight, out_dtype=torch.float32)
    whole = linear(x, weight, out_dtype=torch.float32)
    assert torch.equal(alone, whole[:1])
    if weight.spec.group:  # INT8 is never expanded: its scale is applied to the sum
        assert torch.equal(whole, linear(x, dequantise(weight, 0, 40), out_dtype=torch.float32))
    for rows in PACKED_ROWS if kind in ("Q4_1", "INT8") else (33,):
        at = len(x) - rows
        assert torch.equal(linear(x[at:], weight, out_dtype=torch.float32), whole[at:])
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5))
    assert torch.equal(linear(x[order], weight, out_dtype=torch.float32), whole[order])


def test_a_large_packed_matrix_is_expanded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = weights("Q4_0", 300, 64)
    x, bias = rand(65, 64), rand(300, seed=2)
    whole = linear(x, weight, bias)
    monkeypatch.setattr(matmul, "EXPANDED_MAX", 128 * 64 * 2)
    assert torch.equal(linear(x, weight, bias), whole)


@pytest.mark.parametrize("kind", ("", "Q4_K", "INT8"))
@pytest.mark.parametrize("rows", (5, 70))
def test_the_fast_product_is_near_too(kind: str, rows: int) -> None:
    weight, values = weights(kind, 40, 256) if kind else (rand(40, 256, seed=1), rand(40, 256, seed=1))
    x, bias = rand(rows, 256), rand(40, seed=2)
    expected = reference(x, weight, bias)
    for dtype in (torch.bfloat16, torch.float32):
        y = linear_fast(x, weight, bias, out_dtype=dtype)
        assert y.dtype == dtype
        slack = (expected.abs() + bias.double().abs()) * 2.0**-7
        assert ((y - expected).abs() <= room(x, values, dtype) * 1.01 + slack).all()


INSTRUCTIONS = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from zjournal.kernels import build, matmul, matmul_packed
wanted = [each for each in matmul.builds() if each.name.count("-") == 1]
wanted += [each for each in matmul_packed.builds() if each.name.startswith("matmul_packed-Q4_K")]
found = {}
for each in wanted:
    few = each.name in (wanted[0].name, wanted[len(matmul.TILES) - 1].name)
    for capability in (80, 90, 100) if few else (90,):
        target = GPUTarget("cuda", capability, 32)
        text = triton.compile(build.source(each), target=target, options=build.options(each)).asm["ptx"]
        names = set(re.findall(r"(?:wgmma\\.mma_async|mma\\.sync|tcgen05\\.mma)\\S*", text))
        found.setdefault(str(capability), {})[each.name] = sorted(names)
print(json.dumps(found))
"""
SHAPES = {
    "80": r"mma\.sync\.aligned\.m16n8k16\.",
    "90": r"wgmma\.\S*\.m64n\d+k16\.",
    "100": r"tcgen05\.mma\.",
}


def test_all_tiles_multiply_with_one_kind_of_instruction() -> None:
    """What makes the bits of a row independent of their number on a real GPU: see the docstring of matmul.py."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", INSTRUCTIONS]
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert set(found) == set(SHAPES)
    for capability, builds in found.items():
        assert len(builds) >= 2
        for name, instructions in builds.items():
            assert instructions, (capability, name)
            assert all(re.match(SHAPES[capability], each) for each in instructions), (capability, name, instructions)
            kinds = {each.rpartition("k16")[2] if capability == "90" else each for each in instructions}
            assert len(kinds) == 1, (capability, name, instructions)
    assert len(found["90"]) == len(matmul.TILES) + len(matmul_packed.TILES)
