"""Packed weights: laid out anew and read back, value for value."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.packed_rows import FILED, weights
from tests.kernels.test_cpu_linear import stored
from zjournal.kernels import packed
from zjournal.kernels.packed import KINDS, concat, pack, quantise_int8, unpack

BITS = {"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.625}


@pytest.mark.parametrize("kind", FILED)
def test_values_are_those_of_the_file_bit_for_bit(kind: str) -> None:
    shapes = ((1, 256), (33, 512), (7, 768)) if KINDS[kind].supers else ((1, 32), (33, 96), (5, 64), (7, 384), (3, 576))
    for n, k in shapes:
        weight, values = weights(kind, n, k, seed=n)
        assert (weight.n, weight.k, weight.kind) == (n, k, kind)
        assert torch.equal(unpack(weight).view(torch.int32), values.view(torch.int32)), (n, k)


@pytest.mark.parametrize("kind", FILED)
def test_a_weight_takes_the_bits_that_the_table_says(kind: str) -> None:
    weight, _ = weights(kind, 9, 512)
    assert weight.nbytes * 8 == BITS[kind] * 9 * 512


@pytest.mark.parametrize("kind", ("Q5_1", "Q6_K", "Q8_0"))
def test_a_large_matrix_is_packed_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, values = stored(kind, 23, 256)
    whole = pack(kind, torch.from_numpy(raw), 23, 256)
    monkeypatch.setattr(packed, "CODES_AT_ONCE", 5 * 256)
    parts = pack(kind, torch.from_numpy(raw), 23, 256)
    assert all(torch.equal(a, b) for a, b in zip(whole.arrays, parts.arrays, strict=True))
    assert torch.equal(unpack(parts), values)


@pytest.mark.parametrize("kind", tuple(KINDS))
def test_matrices_are_joined_along_their_outputs(kind: str) -> None:
    parts = [weights(kind, n, 256, seed=n) for n in (3, 16, 8)]
    joined = concat([weight for weight, _ in parts])
    assert joined.n == 27
    assert torch.equal(unpack(joined), torch.cat([values for _, values in parts]))


def test_only_matrices_of_one_kind_are_joined() -> None:
    with pytest.raises(AssertionError):
        concat([weights("Q4_0", 3, 256)[0], weights("Q4_1", 3, 256)[0]])


def test_int8_is_off_by_half_a_step_at_most() -> None:
    values = torch.randn(9, 100, generator=torch.Generator().manual_seed(3)) * torch.logspace(-20, 20, 9)[:, None]
    values[4] = 0
    weight = quantise_int8(values)
    step = values.abs().amax(1, keepdim=True) / 127
    assert ((unpack(weight) - values).abs() <= step * 0.5000001).all()
    assert torch.equal(unpack(weight)[4], torch.zeros(100))
    assert weight.nbytes == 9 * 128 + 9 * 4  # padded to whole steps


def test_blocks_of_another_size_are_refused() -> None:
    raw, _ = stored("Q4_0", 4, 64)
    with pytest.raises(AssertionError):
        pack("Q4_1", torch.from_numpy(raw), 4, 64)
    with pytest.raises(AssertionError):
        pack("Q4_K", torch.from_numpy(raw), 4, 64)
