"""Gather and scatter of KV blocks in triton's interpreter: every byte, no other byte, and pools beyond 2^31 words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zjournal.kernels import blocks

# layers, kv_heads, head_dim: SmolLM2's, one block smaller than a part of a program, one that no part divides.
SHAPES = ((30, 3, 64), (1, 1, 64), (3, 2, 80), (2, 1, 256))


def pool(count: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Pages of random bits, NaN patterns among them."""
    layers, kv_heads, head_dim = shape
    values = layers * 2 * kv_heads * 16 * head_dim
    bits = torch.randint(
        0, 256, (count, values * dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return bits.view(dtype).view(count, layers, 2, kv_heads, 16, head_dim)


def staging_for(pages: torch.Tensor, n: int) -> torch.Tensor:
    return torch.full((n, blocks.block_bytes(pages)), 0xA5, dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("ids", [[], [0], [4, 0, 2], [3, 3, 1, 3]])
def test_gather(shape: tuple[int, int, int], dtype: torch.dtype, ids: list[int]) -> None:
    pages, wanted = pool(5, shape, dtype), torch.tensor(ids, dtype=torch.int32)
    staging = staging_for(pages, len(ids))
    before = pages.clone().view(torch.uint8)
    assert blocks.gather(pages, wanted, staging) is staging
    assert torch.equal(staging, blocks.gather_reference(pages, wanted, staging_for(pages, len(ids))))
    assert torch.equal(pages.view(torch.uint8), before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ids", [[], [4], [4, 0, 2]])
def test_scatter_writes_these_blocks_and_no_other(shape: tuple[int, int, int], ids: list[int]) -> None:
    pages, wanted = pool(5, shape), torch.tensor(ids, dtype=torch.int32)
    staging = staging_for(pages, len(ids)).random_(generator=torch.Generator().manual_seed(1))
    judge = blocks.scatter_reference(pages.clone(), wanted, staging)
    assert blocks.scatter(pages, wanted, staging) is pages
    assert torch.equal(pages.view(torch.uint8), judge.view(torch.uint8))


@settings(max_examples=20, deadline=None)
@given(ids=st.lists(st.integers(0, 15), max_size=8, unique=True), seed=st.integers(0, 1 << 30))
def test_there_and_back(ids: list[int], seed: int) -> None:
    """What is gathered, and scattered into another pool, is bit for bit what it was; the rest of that pool too."""
    pages, other = pool(16, (2, 1, 80), seed=seed), pool(16, (2, 1, 80), seed=seed + 1)
    wanted = torch.tensor(ids, dtype=torch.int32)
    judge = other.clone()
    judge[wanted.long()] = pages[wanted.long()]
    staging = blocks.gather(pages, wanted, staging_for(pages, len(ids)))
    blocks.scatter(other, wanted, staging)
    assert torch.equal(other.view(torch.uint8), judge.view(torch.uint8))


def test_pools_beyond_2_31_words(sparse: Callable[[int], torch.Tensor]) -> None:
    """A 32-bit offset would wrap and touch another block. The pool is a sparse file: three of its blocks exist."""
    layers, kv_heads, head_dim = 32, 8, 128
    size = layers * 2 * kv_heads * 16 * head_dim * 2
    count = (2**31 * 4) // size + 3
    pages = sparse(count * size).view(torch.bfloat16).view(count, layers, 2, kv_heads, 16, head_dim)
    assert pages.numel() * 2 // 4 > 2**31
    ids = torch.tensor([count - 1, 0, count - 3], dtype=torch.int32)
    staging = pool(3, (layers, kv_heads, head_dim)).view(3, -1).view(torch.uint8)
    blocks.scatter(pages, ids, staging)
    for at, block in enumerate(ids.tolist()):
        assert torch.equal(pages[block].view(torch.uint8).flatten(), staging[at])
    assert not pages[1].view(torch.uint8).any() and not pages[count - 2].view(torch.uint8).any()
    assert torch.equal(blocks.gather(pages, ids, staging_for(pages, 3)), staging)


def test_refuses_what_it_would_copy_wrongly() -> None:
    pages, ids = pool(4, (1, 1, 64)), torch.zeros(2, dtype=torch.int32)
    good = staging_for(pages, 2)
    for bad_pages, bad_ids, staging in (
        (pages.transpose(0, 1), ids, good),
        (pages, ids.long(), good),
        (pages, ids[:1], good),
        (pages, ids, good[:, :-16]),
        (pages, ids, good.view(torch.int32)),
    ):
        with pytest.raises(AssertionError):
            blocks.gather(bad_pages, bad_ids, staging)
