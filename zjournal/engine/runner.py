"""From slices to tokens: builds the step's tensors, runs the model over the KV pages, samples.

The runner owns the pages' memory; which block holds what is the scheduler's knowledge. Results do not depend on
which slices share a step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from zjournal.engine import loading, steps
from zjournal.engine.models import build
from zjournal.engine.models.decoder import Decoder
from zjournal.engine.paged import Paged
from zjournal.engine.sequence import BLOCK_TOKENS, Sampled, Slice
from zjournal.errors import EngineStartFault, Fault
from zjournal.link import wire

KV_BYTES = 2 << 30  # where nothing is asked for
ELEMENT_BYTES = 4  # KV is fp32 here

assert BLOCK_TOKENS == build.BLOCK_TOKENS


class Runner(Paged):
    """The model and its KV pages on the processor."""

    stages = None  # the blocks are memory that every thread can use
    step_tokens = 0  # most tokens of a step, if it is more than what was asked for

    def __init__(
        self,
        model: Decoder,
        context: int,
        block_count: int,
        fingerprint: str,
        parts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(model, _paged(model.new_pages(1), block_count), context, fingerprint, parts)
        self._masks = steps.Masks()

    @classmethod
    def load(cls, start: wire.Start, progress: Callable[[float], None]) -> Runner:
        """Loads the weights. `progress` is told of the part done, 0 to 1.

        Raises ModelFault for a file that cannot be run, EngineStartFault for limits that cannot be met.
        """
        if start.device != "cpu":
            raise EngineStartFault(f"The device {start.device} is not this runner's, only cpu.")
        found = loading.opened(start)
        shape = found.model.decoder
        block_count = loading.blocks(start.kv_bytes or KV_BYTES, loading.block_bytes(shape, ELEMENT_BYTES))
        threads = start.threads or len(os.sched_getaffinity(0))

        def make() -> Decoder:
            return build.build(found.checkpoint, found.model, found.context, threads, start.weights, progress)

        decoder, made = loading.load(start, found, start.device, make)
        try:
            runner = cls(decoder, found.context, block_count, *made)
        except MemoryError as error:
            raise EngineStartFault(f"The model does not fit into memory: {error}") from error
        progress(1.0)
        return runner

    def block_memory(self, block: int) -> memoryview:
        """The bytes of a block's KV in all layers, as they are; writable. It begins at a page of the system."""
        assert 0 <= block < self.block_count, block
        return self._pages[block].reshape(-1).view(torch.uint8).numpy().data

    def step(self, slices: list[Slice]) -> list[Sampled | Fault]:
        """Computes all slices. Returns, for each slice that samples, in order, its tokens or why there are none."""
        self._masks.begin(slices)
        try:
            rows = self.logits(slices).numpy()
        finally:
            choices = self._masks.take()
        results: list[Sampled | Fault] = []
        at = 0
        for part in slices:
            if part.sampling is not None:
                found = rows[at : at + part.drafts + 1]
                chosen = (steps.chooser(part, found), steps.host_rows(found))
                results.append(steps.answer(part, choices.get(part.request), *chosen))
                at += part.drafts + 1
        assert at == len(rows), (at, len(rows))
        return results

    def logits(self, slices: list[Slice]) -> torch.Tensor:
        """Computes all slices; fp32 [wanted, vocab].

        Wanted are, of each slice that samples, the logits before its first draft, behind that one, and so on.
        """
        batch = steps.batch(slices, self.context, self.vocab_size, self.block_count)
        for block in steps.begun(slices):
            self._pages[block].zero_()
        return self._model.forward(batch, self._pages)

    def close(self) -> None:
        """Ends the kernels' threads."""
        self._masks.close()
        self._model.close()


def _paged(one: torch.Tensor, count: int) -> torch.Tensor:
    """Memory for `count` blocks like `one`, untouched: the system gives it when it is first written.

    It begins at a page of the system, so that files are read straight into it. Raises MemoryError.
    """
    values = one.numel() * count
    try:
        memory = mmap.mmap(-1, values * one.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{values * one.element_size()} bytes of KV memory: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=one.dtype, count=values).view(count, *one.shape[1:])
