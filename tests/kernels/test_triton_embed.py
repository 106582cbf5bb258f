"""Rows of the embedding and expanded matrices, under the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kernels.packed_rows import weights, width
from zjournal.kernels.embed import dequantise, embed, reference
from zjournal.kernels.packed import KINDS, Packed


def table(kind: str, n: int) -> torch.Tensor | Packed:
    if kind:
        return weights(kind, n, width(kind))[0]
    return torch.randn(n, 200, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("kind", ("", *KINDS))
def test_rows_are_those_of_the_table(kind: str) -> None:
    weight = table(kind, 37)
    tokens = torch.tensor([36, 0, 5, -1, 5, *range(13)], dtype=torch.int32)
    for scale in (1.0, 24.0, 0.3):
        assert torch.equal(embed(tokens, weight, scale), reference(tokens, weight, scale))
    assert torch.equal(embed(tokens, weight)[3], torch.zeros_like(embed(tokens, weight)[3]))


@pytest.mark.parametrize("kind", ("", "Q4_1"))
def test_only_out_is_written(kind: str) -> None:
    weight = table(kind, 37)
    hidden = weight.k if isinstance(weight, Packed) else weight.shape[1]
    wide = torch.full((19, 300), torch.nan).bfloat16()
    tokens = torch.arange(17, dtype=torch.int32)
    embed(tokens, weight, out=wide[1:18, 10 : 10 + hidden])
    assert torch.equal(wide[1:18, 10 : 10 + hidden], reference(tokens, weight))
    wide[1:18, 10 : 10 + hidden] = torch.nan
    assert wide.isnan().all()


@pytest.mark.parametrize("kind", ("", "Q4_1"))
def test_no_tokens(kind: str) -> None:
    assert embed(torch.empty(0, dtype=torch.int32), table(kind, 5)).shape[0] == 0


@pytest.mark.parametrize("kind", tuple(KINDS))
def test_a_matrix_is_expanded_in_part_or_whole(kind: str) -> None:
    weight, values = weights(kind, 35, width(kind))
    assert torch.equal(dequantise(weight, 0, 35), values.bfloat16())
    assert torch.equal(dequantise(weight, 3, 17), values[3:20].bfloat16())
    with pytest.raises(AssertionError):
        dequantise(weight, 20, 16)


def test_a_table_may_pass_what_an_int32_counts(sparse: Callable[[int], torch.Tensor]) -> None:
    rows, hidden = 1_100_000, 2048
    weight = sparse(rows * hidden * 2).view(torch.bfloat16).view(rows, hidden)
    weight[1_099_999] = 3.0
    weight[1_048_577] = 2.0  # starts at 2^31 + 2048
    y = embed(torch.tensor([1_099_999, 1_048_577, 0], dtype=torch.int32), weight)
    assert y[:, 0].tolist() == [3.0, 2.0, 0.0] and y[:, -1].tolist() == [3.0, 2.0, 0.0]
