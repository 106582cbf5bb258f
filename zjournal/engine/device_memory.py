"""Blocks of a device between it and the disk's threads: gathered into pinned memory, or scattered from there.

Out: one kernel puts a chunk's blocks side by side and one copy brings them to the host, beside the model's kernels;
who writes the file waits for that copy alone. Into: who has read and proved a file copies it to the device and waits,
so a restore has ended when its bytes are there, and the model's kernels wait for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import torch

from zjournal.engine.cache.staging import Views
from zjournal.engine.device import INTO, OUT, Device, Mark
from zjournal.snapshots.format import CHUNK_BLOCKS

OUT_STAGES = 2  # one is filled while the other is written
RESERVE_BYTES = 1 << 30  # of the device's memory, for graphs and what else comes after the start
KV_DTYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
INTO_STAGES = 4  # files that are read at once; who comes later waits for one of them

Copy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # pages, ids int32, staging uint8 [n, bytes]


def staging_bytes(block_bytes: int) -> int:
    """What the stages take of the device, and as much of pinned memory."""
    return (OUT_STAGES + INTO_STAGES) * CHUNK_BLOCKS * block_bytes


class Stage:
    """Room for a chunk on both sides."""

    def __init__(self, device: Device, block_bytes: int) -> None:
        self.host = device.host(CHUNK_BLOCKS, block_bytes, dtype=torch.uint8)
        self.there = torch.empty((CHUNK_BLOCKS, block_bytes), dtype=torch.uint8, device=device.where)
        self.views = [row.numpy().data for row in self.host]


class DeviceStages:
    """The leases of a device's blocks (see cache/staging.py)."""

    def __init__(self, device: Device, pages: torch.Tensor, gather: Copy, scatter: Copy) -> None:
        """`pages` [blocks, ...], each block contiguous."""
        self.device, self.pages, self.gather, self.scatter = device, pages, gather, scatter
        block_bytes = pages[0].numel() * pages.element_size()
        self._out = [Stage(device, block_bytes) for _ in range(OUT_STAGES)]
        self.free: SimpleQueue[Stage] = SimpleQueue()
        for _ in range(INTO_STAGES):
            self.free.put(Stage(device, block_bytes))

    def out(self, blocks: Sequence[int]) -> _Out | None:
        """Begins the copy of the blocks as what was launched leaves them; None: both stages are being written."""
        assert 0 < len(blocks) <= CHUNK_BLOCKS
        if not self._out:
            return None
        stage, count = self._out.pop(), len(blocks)
        with self.device.beside(OUT, self.device.mark()):
            self.gather(self.pages, self.ids(blocks), stage.there[:count])
            stage.host[:count].copy_(stage.there[:count], non_blocking=True)
            done = self.device.mark(patient=True)
        return _Out(self._out, stage, count, done)

    def into(self, blocks: Sequence[int]) -> _Into:
        """The blocks, to be filled behind what was launched."""
        assert 0 < len(blocks) <= CHUNK_BLOCKS
        return _Into(self, blocks, self.device.mark())

    def ids(self, blocks: Sequence[int]) -> torch.Tensor:
        """Block numbers on the device, int32."""
        return self.device.upload(torch.tensor(blocks, dtype=torch.int32))


class _Out:
    def __init__(self, free: list[Stage], stage: Stage, count: int, done: Mark) -> None:
        self._free, self._stage, self._count, self._done = free, stage, count, done

    def views(self) -> Views:
        self._done.wait()
        return self._stage.views[: self._count]

    def close(self) -> None:
        self._done.wait()  # nobody may have looked
        self._free.append(self._stage)


class _Into:
    def __init__(self, stages: DeviceStages, blocks: Sequence[int], behind: Mark) -> None:
        self._stages, self._blocks, self._behind = stages, blocks, behind
        self._stage: Stage | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[Views]:
        self._stage = self._stages.free.get()
        try:
            yield self._stage.views[: len(self._blocks)]
        finally:
            self._stages.free.put(self._stage)
            self._stage = None

    def store(self) -> None:
        stages, stage, count = self._stages, self._stage, len(self._blocks)
        assert stage is not None, "it is stored while it is open"
        with stages.device.beside(INTO, self._behind):
            stage.there[:count].copy_(stage.host[:count], non_blocking=True)
            stages.scatter(stages.pages, stages.ids(self._blocks), stage.there[:count])
            done = stages.device.mark(patient=True)
        done.wait()
