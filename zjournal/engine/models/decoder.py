"""What runs a model: one step's arguments, the two decoders' common face, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from zjournal.checkpoint import decoder as described
from zjournal.kernels import cpu

BLOCK_TOKENS = cpu.BLOCK_TOKENS

# What checkpoint refuses without torch is what the kernels do not compute.
assert (described.LANES, described.HEAD_DIM_MAX, described.SHARE_MAX) == (cpu.LANES, cpu.HEAD_DIM_MAX, cpu.QUERIES_MAX)

Progress = Callable[[float], None]  # of the part done, 0 to 1


class Batch(msgspec.Struct, frozen=True):
    """One step. Row i is `token[i]` at `position[i]` of sequence `sequence[i]`; rows of a sequence stand together,
    at consecutive positions. `table` [sequences, width] holds block numbers. Logits are for rows `want`. All int32."""

    token: torch.Tensor
    position: torch.Tensor
    sequence: torch.Tensor
    table: torch.Tensor
    want: torch.Tensor


class Decoder(Protocol):
    """A loaded model. `shape` is what it computes, `name` is for people.

    `numerics` and `layout` change whenever the bits of a KV block, or their order in memory, change.
    """

    shape: described.Decoder
    name: str
    numerics: str
    layout: str

    def new_pages(self, blocks: int) -> torch.Tensor:
        """Memory for `blocks` blocks, untouched: the system gives it when it is first written."""

    def clear_behind(self, memory: memoryview, tokens: int) -> None:
        """Zeros in the bytes of a block the KV of all positions behind its first `tokens`. For any thread."""

    def forward(self, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Computes the rows, stores their KV, and returns logits fp32 [wanted, vocab]."""

    def close(self) -> None:
        """Ends what the decoder started."""
