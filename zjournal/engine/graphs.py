"""Decode steps as graphs: one launch where a step has hundreds, which a card would wait for.

A graph is made for a number of rows and a width of the block table, and runs for any step that is no larger: rows that
it lacks are padded, and read and write nothing. A row's bits do not depend on the rows beside it, so a graph gives
what the usual way gives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from zjournal.engine.device import Device
from zjournal.engine.models import forward as passes
from zjournal.engine.models.forward import Loaded

WIDTH_MIN = 256  # blocks of the narrowest graphs; each further one is four times as wide


def buckets(most: int, first: int, factor: int) -> list[int]:
    """first, first * factor, … below `most`, then `most` itself."""
    assert most > 0 and factor > 1
    found = []
    while first < most:
        found.append(first)
        first *= factor
    return [*found, most]


class _Graph:
    """One graph: the numbers that it reads and the logits that it leaves."""

    def __init__(self, device: Device, model: Loaded, pages: torch.Tensor, rows: int, width: int) -> None:
        self.rows, self.width = rows, width
        empty = torch.empty(0, dtype=torch.int32)
        sizes, numbers = self._pack(empty, empty, empty.view(0, width))
        self._numbers = device.upload(numbers)
        step = passes.unpack(sizes, self._numbers)
        self._run, self._logits = device.graph(lambda: passes.forward(model, step, pages))
        self._device = device

    def run(self, token: torch.Tensor, position: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Launches it for these rows, at most its own; their logits, good until the next one runs."""
        _, numbers = self._pack(token, position, table)
        self._device.upload(numbers, self._numbers)
        self._run()
        return self._logits[: token.shape[0]]

    def _pack(
        self, token: torch.Tensor, position: torch.Tensor, table: torch.Tensor
    ) -> tuple[passes.Sizes, torch.Tensor]:
        lacking = self.rows - token.shape[0]
        rows = torch.arange(self.rows, dtype=torch.int32)
        wide = F.pad(table, (0, self.width - table.shape[1], 0, lacking))
        token, position = (F.pad(one, (0, lacking), value=-1) for one in (token, position))
        return passes.pack(token, position, rows, wide, rows)


class Graphs:
    """All graphs of one model over its pages."""

    def __init__(self, device: Device, model: Loaded, pages: torch.Tensor, rows_max: int, width_max: int) -> None:
        """The largest graph is made first: the others fit in its memory."""
        sizes = [(r, w) for w in buckets(width_max, WIDTH_MIN, 4) for r in buckets(rows_max, 1, 2)]
        made = {(r, w): _Graph(device, model, pages, r, w) for r, w in sorted(sizes, reverse=True)}
        self._graphs = [made[size] for size in sorted(sizes, key=lambda size: (size[1], size[0]))]

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, token: torch.Tensor, position: torch.Tensor, table: torch.Tensor) -> torch.Tensor | None:
        """The logits of rows that stand for a sequence each, fp32 [rows, vocab]; None where no graph is large enough.

        All int32 on the host: token [rows], position [rows], table [rows, width].
        """
        for one in self._graphs:
            if token.shape[0] <= one.rows and table.shape[1] <= one.width:
                return one.run(token, position, table)
        return None
