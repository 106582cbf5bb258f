"""Blocks of KV between the pool, where they lie anywhere, and a staging buffer, where they stand side by side.

    pages    [blocks, layers, 2, kv_heads, 16, head_dim] of any type, contiguous: a block's KV of all layers is one run
    ids      [n] int32, each below `blocks`
    staging  [n, block_bytes] uint8, contiguous, aligned to 16 bytes

Bytes: 2 * n * block_bytes, half read and half written; for Llama-3-8B in bf16 a block is 2 MiB. Values are moved as
32-bit words, four to a thread and instruction, so that the bits of any type stay what they are. `scatter` asks that
no two of its ids are equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zjournal.kernels.build import NUMERICS, Build

_WORDS, _WARPS = 8192, 8  # of a program: 32 KiB, of which each thread has eight loads of 16 bytes under way
_ALIGNED = 16


def gather(pages: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """Copies block ids[i] to staging[i]. Returns staging."""
    _copy(pages, ids, staging, to_pages=False)
    return staging


def scatter(pages: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """Copies staging[i] to block ids[i]. Returns pages."""
    _copy(pages, ids, staging, to_pages=True)
    return pages


def gather_reference(pages: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """gather in torch."""
    return staging.copy_(_bytes(pages)[ids.long()])


def scatter_reference(pages: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """scatter in torch."""
    _bytes(pages)[ids.long()] = staging
    return pages


def _copy(pages: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor, to_pages: bool) -> None:
    n, size = staging.shape
    assert pages.is_contiguous() and staging.is_contiguous() and ids.is_contiguous()
    assert ids.dtype == torch.int32 and ids.shape == (n,), (ids.dtype, ids.shape)
    assert staging.dtype == torch.uint8 and size == block_bytes(pages), (staging.dtype, size, block_bytes(pages))
    assert size % _ALIGNED == 0 and staging.data_ptr() % _ALIGNED == 0, (size, staging.data_ptr())
    if n == 0:
        return
    words = size // 4
    grid = (n * triton.cdiv(words, _WORDS),)
    views = _bytes(pages).view(torch.int32), staging.view(torch.int32)
    _blocks[grid](*views, ids, words, TO_PAGES=to_pages, WORDS=_WORDS, num_warps=_WARPS, **NUMERICS)


def block_bytes(pages: torch.Tensor) -> int:
    """Bytes of one block."""
    return pages[0].numel() * pages.element_size()


def _bytes(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(pages.shape[0], -1).view(torch.uint8)


@triton.jit
def _blocks(pages_ptr, staging_ptr, ids_ptr, words, TO_PAGES: tl.constexpr, WORDS: tl.constexpr):
    parts = tl.cdiv(words, WORDS)
    which = tl.program_id(0) // parts
    at = tl.program_id(0) % parts * WORDS + tl.arange(0, WORDS)
    inside = at < words
    block = tl.load(ids_ptr + which).to(tl.int64)  # a pool can have more than 2^31 words
    paged = pages_ptr + block * words + at
    staged = staging_ptr + which.to(tl.int64) * words + at
    if TO_PAGES:
        tl.store(paged, tl.load(staged, mask=inside), mask=inside)
    else:
        tl.store(staged, tl.load(paged, mask=inside), mask=inside)


def builds() -> list[Build]:
    """Both directions; the size of a block is no part of the code."""
    signature = {"pages_ptr": "*i32", "staging_ptr": "*i32", "ids_ptr": "*i32", "words": "i32:16"}
    return [
        Build(f"blocks.{name}", _blocks, signature, {"TO_PAGES": to_pages, "WORDS": _WORDS}, _WARPS)
        for name, to_pages in (("gather", False), ("scatter", True))
    ]
