"""RMSNorm and the gate in triton's interpreter: odd shapes, near fp64, and a row's bits for itself alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zjournal.kernels import gate, rmsnorm

NAN = float("nan")
DTYPES = (torch.bfloat16, torch.float32)
# Half a unit in the last place of the type, and what fp32 sums add.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
WIDTHS = (1, 64, 80, 128, 576, 640, 1000, 4096)
ROWS = (0, 1, 2, 7, 33)


def near(found: torch.Tensor, judge: torch.Tensor, least: float = 1e-6) -> None:
    """Within one rounding of the judge in fp64; nothing unwritten."""
    error = (found.double() - judge).abs()
    assert bool((error <= judge.abs() * ROUNDING[found.dtype] + least).all()), float(error.max())


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rmsnorm_with_a_residual(width: int, dtype: torch.dtype, offset: float) -> None:
    for rows in ROWS:
        x, residual = random(rows, width, dtype=dtype, seed=rows), random(rows, width, dtype=dtype, seed=rows + 1)
        weight = random(width, dtype=torch.float32, seed=3)
        out = torch.full((rows, width), NAN, dtype=dtype), torch.full((rows, width), NAN, dtype=dtype)
        normed, summed = rmsnorm.rmsnorm(x, weight, 1e-5, residual, offset, out)
        assert normed is out[0] and summed is out[1]
        judge, exact = rmsnorm.reference(x, weight.double(), 1e-5, residual, offset)
        assert torch.equal(summed, exact)
        near(normed, judge)


def test_rmsnorm_without_a_residual_gives_back_x() -> None:
    x, weight = random(5, 576), random(576, seed=1)
    normed, summed = rmsnorm.rmsnorm(x, weight, 1e-6)
    assert summed is x
    near(normed, rmsnorm.reference(x, weight.double(), 1e-6)[0])


def test_rmsnorm_in_place_of_the_residual() -> None:
    x, residual, weight = random(5, 576), random(5, 576, seed=1), random(576, seed=2)
    wanted = rmsnorm.rmsnorm(x, weight, 1e-6, residual)
    found = rmsnorm.rmsnorm(x, weight, 1e-6, residual, out=(x, residual))
    assert found[0] is x and found[1] is residual
    assert torch.equal(wanted[0], x) and torch.equal(wanted[1], residual)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 256), (3, 3, 80), (8, 2, 128)])
def test_rmsnorm_of_heads_inside_a_projection(heads: int, kv_heads: int, head_dim: int) -> None:
    """q and k are views of one tensor; v beside them must stay as it is."""
    rows, weight = 5, random(head_dim, dtype=torch.float32, seed=1)
    qkv = random(rows, (heads + 2 * kv_heads) * head_dim)
    before = qkv.clone()
    q = qkv[:, : heads * head_dim].view(rows, heads, head_dim)
    judge = rmsnorm.reference(q.clone(), weight.double(), 1e-6)[0]
    normed, _ = rmsnorm.rmsnorm(q, weight, 1e-6, out=(q, None))
    assert normed.data_ptr() == qkv.data_ptr()
    near(q, judge)
    assert torch.equal(qkv[:, heads * head_dim :], before[:, heads * head_dim :])


def test_rmsnorm_of_nothing_and_of_much() -> None:
    """A row of zeros is zeros, not NaN; large rows do not overflow a square in their own type."""
    weight = torch.ones(64)
    normed, _ = rmsnorm.rmsnorm(torch.zeros(2, 64), weight, 1e-6)
    assert bool((normed == 0).all())
    large = torch.full((1, 64), 3e15, dtype=torch.bfloat16)
    assert bool((rmsnorm.rmsnorm(large, weight, 1e-6)[0] == 1).all())


def test_rmsnorm_keeps_a_fault_in_its_row() -> None:
    x = random(9, 96)
    x[4, 7] = NAN
    normed, _ = rmsnorm.rmsnorm(x, torch.ones(96), 1e-6)
    assert normed.isnan().any(1).tolist() == [at == 4 for at in range(9)]


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 300), seed=st.integers(0, 1 << 30), data=st.data())
def test_rmsnorm_rows_are_alone(rows: int, width: int, seed: int, data: st.DataObject) -> None:
    x, residual = random(rows, width, seed=seed), random(rows, width, seed=seed + 1)
    weight = random(width, seed=seed + 2)
    normed, summed = rmsnorm.rmsnorm(x, weight, 1e-5, residual)
    near(normed, rmsnorm.reference(x, weight.double(), 1e-5, residual)[0])
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows)))
    again = rmsnorm.rmsnorm(x[chosen], weight, 1e-5, residual[chosen])
    assert torch.equal(again[0], normed[chosen]) and torch.equal(again[1], summed[chosen])


def test_rmsnorm_refuses_what_it_cannot_hold() -> None:
    x = torch.zeros(1, rmsnorm.WIDTH_MAX + 1)
    with pytest.raises(AssertionError):
        rmsnorm.rmsnorm(x, torch.zeros(x.shape[1]), 1e-6)
    with pytest.raises(AssertionError):
        rmsnorm.rmsnorm(torch.zeros(4, 8).t(), torch.zeros(4), 1e-6)


@pytest.mark.parametrize("kind", gate.KINDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(("rows", "ffn"), [(0, 5), (1, 1), (3, 1536), (7, 2049), (2, 5000)])
def test_gate(kind: str, dtype: torch.dtype, rows: int, ffn: int) -> None:
    gate_up = random(rows, 2 * ffn, dtype=dtype, scale=3.0)
    out = torch.full((rows, ffn), NAN, dtype=dtype)
    assert gate.gated(gate_up, kind, out) is out
    near(out, gate.reference(gate_up.double(), kind), least=1e-5)


@pytest.mark.parametrize("kind", gate.KINDS)
def test_gate_far_from_zero(kind: str) -> None:
    """No overflow on the way: act(g) is g far above zero and 0 far below."""
    far = torch.tensor([[200.0, -200.0, 0.0, 88.0, -88.0, 3e38, -3e38, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    found = gate.gated(far, kind)[0]
    assert found.tolist()[:3] == [200.0, 0.0, 0.0]
    assert found[3] == 88.0 and abs(float(found[4])) < 1e-30 and found[5] == torch.tensor(3e38) and found[6] == 0


def test_gate_reads_rows_that_stand_apart_and_alone() -> None:
    wide = random(6, 300)
    gate_up = wide[::2, 10:270]
    found = gate.gated(gate_up, "silu")
    assert torch.equal(found, gate.gated(gate_up.contiguous(), "silu"))
    for row in range(3):
        assert torch.equal(gate.gated(gate_up[row : row + 1], "silu")[0], found[row])


def test_gate_refuses_an_unknown_kind() -> None:
    with pytest.raises(AssertionError):
        gate.gated(torch.zeros(1, 2), "relu")
