"""A model and its KV pages: what the runners of every device share beside the step itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zjournal.engine.models.decoder import Decoder
from zjournal.engine.sequence import BLOCK_TOKENS


class Paged:
    """`kernels` is for people, `fingerprint` names the exact numerics, `parts` tells what it is made of."""

    def __init__(
        self,
        model: Decoder,
        pages: torch.Tensor,
        context: int,
        fingerprint: str,
        parts: Mapping[str, str],
    ) -> None:
        """`pages`: the KV, block by block."""
        self._model: Decoder = model
        self._pages = pages
        self.layout = model.layout
        self.block_bytes = pages[0].numel() * pages.element_size()
        self.context = context
        self.block_count = len(pages)
        self.vocab_size = model.shape.vocab
        self.kernels = model.name
        self.fingerprint = fingerprint
        self.parts = parts

    def begin(self, request: str, prompt: Sequence[int]) -> None:
        """A request starts; the model keeps nothing for it besides its pages."""

    def end(self, request: str) -> None:
        """A request ended."""

    def copy_block(self, source: int, target: int, count: int) -> None:
        """Copies the KV of a block's first `count` positions, in all layers.

        The rest comes along: it lies past the target's end and is written before it is read.
        """
        assert 0 < count <= BLOCK_TOKENS, count
        assert source != target
        self._pages[target].copy_(self._pages[source])

    def clear_behind(self, memory: memoryview, tokens: int) -> None:
        """Zeros in a copy of a block's bytes what lies behind its first `tokens` tokens. For any thread."""
        self._model.clear_behind(memory, tokens)
