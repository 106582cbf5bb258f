"""Sequences whose keys and values lie in pages anywhere, for tests of the attention kernels.

What a kernel may not read is NaN or an impossible block number: the pages' unused parts, and the table beyond a
sequence's last block.
"""

from __future__ import annotations

import torch

from zjournal.kernels import attention
from zjournal.kernels.attention import BLOCK_TOKENS, Tiles
from zjournal.kernels.attention_decode import decode
from zjournal.kernels.attention_prefill import prefill, prefill_reference

LAYERS, LAYER = 2, 1
NOWHERE = 2**31 - 1
Span = tuple[int, int, int]  # sequence, its first row, one past its last


class Case:
    """Sequences of `lengths` positions with a query at each."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        lengths: tuple[int, ...],
        *,
        window: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        pages: torch.dtype | None = None,
    ) -> None:
        random = torch.Generator().manual_seed(heads + head_dim + len(lengths))
        self.heads, self.head_dim, self.window, self.dtype = heads, head_dim, window, dtype
        self.scale = 0.9 * head_dim**-0.5
        self.scales = (1.0, 1.0) if pages is None else (0.5, 2.0)
        needed = [-(-length // BLOCK_TOKENS) for length in lengths]
        blocks = sum(needed) + 3
        self.pages = torch.full((blocks, LAYERS, 2, kv_heads, BLOCK_TOKENS, head_dim), torch.nan).to(pages or dtype)
        self.table = torch.full((len(lengths), max(needed, default=0) + 2), NOWHERE, dtype=torch.int32)
        order = torch.randperm(blocks, generator=random).to(torch.int32)
        self.q = []
        for number, length in enumerate(lengths):
            self.q.append((torch.randn(length, heads, head_dim, generator=random) * 2).to(dtype))
            self.table[number, : needed[number]], order = order[: needed[number]], order[needed[number] :]
            kv = torch.randn(length, 2, kv_heads, head_dim, generator=random).to(self.pages.dtype)
            at = torch.arange(length)
            for kind in (0, 1):
                block = self.table[number, at // BLOCK_TOKENS].long()
                self.pages[block, LAYER, kind, :, at % BLOCK_TOKENS] = kv[:, kind]

    def queries(self, spans: list[Span]) -> torch.Tensor:
        """As the engine has them: a part of wider rows."""
        wide = torch.full((sum(end - start for _, start, end in spans), self.heads + 3, self.head_dim), torch.nan)
        wide = wide.to(self.dtype)
        if spans:
            wide[:, : self.heads] = torch.cat([self.q[number][start:end] for number, start, end in spans])
        return wide[:, : self.heads]

    def decode(self, ends: list[tuple[int, int]], programs: int = 0, tiles: Tiles | None = None) -> torch.Tensor:
        """Rows (sequence, length) of one call."""
        q = self.queries([(number, length - 1, length) for number, length in ends])
        table = self.table[[number for number, _ in ends]]
        lengths = torch.tensor([length for _, length in ends], dtype=torch.int32)
        out = torch.full(q.shape, torch.nan, dtype=self.dtype)
        options = {"programs": programs, "tiles": tiles}
        found = decode(q, self.pages, LAYER, table, lengths, self.scale, self.window, out, *self.scales, **options)
        assert found is out
        return out

    def prefill(self, spans: list[Span], tiles: Tiles | None = None) -> list[torch.Tensor]:
        """Rows start to end of each sequence, in one call; the result of each."""
        q, rest = self.queries(spans), self._rest(spans)
        out = torch.full(q.shape, torch.nan, dtype=self.dtype)
        prefill(q, self.pages, LAYER, *rest, self.scale, self.window, out, *self.scales, tiles=tiles)
        return list(out.split([end - start for _, start, end in spans]))

    def expected(self, spans: list[Span]) -> torch.Tensor:
        """In float64, of the values that the pages hold."""
        rest = self._rest(spans)
        return prefill_reference(self.queries(spans), self.pages, LAYER, *rest, self.scale, self.window, *self.scales)

    def _rest(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """table, starts, position."""
        sizes = torch.tensor([0, *(end - start for _, start, end in spans)])
        position = torch.cat([torch.arange(start, end) for _, start, end in spans] or [torch.arange(0)])
        table = self.table[[number for number, _, _ in spans]]
        return table, sizes.cumsum(0).to(torch.int32), position.to(torch.int32)

    def tiles(self, capability: int) -> tuple[Tiles, Tiles]:
        """Of decode and of prefill."""
        return attention.tiles(self.head_dim, self.heads // self.pages.shape[3], self.dtype, capability)
