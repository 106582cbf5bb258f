"""From slices to tokens: builds the step's tensors, runs the model over the KV pages, samples.

The runner owns the pages' memory; which block holds what is the scheduler's knowledge. Results do not depend on
which slices share a step.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from zjournal.checkpoint.gguf import Header, read_header
from zjournal.engine.decoding import sampler
from zjournal.engine.models import llama
from zjournal.engine.sequence import BLOCK_TOKENS, Sampled, Slice
from zjournal.errors import EngineFailed, EngineStartFault, Fault, ModelFault
from zjournal.link import wire

WEIGHTS = ("file", "fp32")

assert BLOCK_TOKENS == llama.BLOCK_TOKENS


class Runner:
    """The model and its KV pages on one device. `kernels` is for people, `fingerprint` names the exact numerics."""

    def __init__(self, model: llama.Llama, context: int, block_count: int, fingerprint: str) -> None:
        self._model = model
        self._pages = model.new_pages(block_count)
        self.context = context
        self.block_count = block_count
        self.vocab_size = model.shape.vocab
        self.kernels = model.name
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, start: wire.Start, progress: Callable[[float], None]) -> Runner:
        """Loads the weights. `progress` is told of the part done, 0 to 1.

        Raises ModelFault for a file that cannot be run, EngineStartFault for limits that cannot be met.
        """
        if start.device != "cpu":
            raise EngineStartFault(f"The device {start.device} is not supported, only cpu.")
        if start.weights not in WEIGHTS:
            raise EngineStartFault(f"weights={start.weights} is none of {', '.join(WEIGHTS)}.")
        header = read_header(start.model)
        shape = llama.read_shape(header)
        context = start.context or shape.context
        if context > shape.context:
            raise EngineStartFault(f"The context of {context} tokens is over the model's own, {shape.context}.")
        block_bytes = BLOCK_TOKENS * shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
        block_count = start.kv_bytes // block_bytes
        if block_count < 1:
            raise EngineStartFault(f"{start.kv_bytes} bytes of KV memory do not hold one block of {block_bytes} bytes.")
        threads = start.threads or len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(1) as beside:  # reading the file twice costs less when it is done at once
            digest = beside.submit(_digest, header.path)
            try:
                model = llama.load(header, shape, context, threads, start.weights, progress)
                fingerprint = _fingerprint(header, model, digest.result())
                runner = cls(model, context, block_count, fingerprint)
            except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation as RuntimeError
                raise EngineStartFault(f"The model does not fit into memory: {error}") from error
        progress(1.0)
        return runner

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

    def step(self, slices: list[Slice]) -> list[Sampled | Fault]:
        """Computes all slices. Returns, for each slice that samples, in order, its tokens or why there are none."""
        rows = self.logits(slices).numpy()
        wanting = [(part.sampling, part.index) for part in slices if part.sampling is not None]
        assert len(rows) == len(wanting)
        results: list[Sampled | Fault] = []
        for row, (sampling, index) in zip(rows, wanting, strict=True):
            token = sampler.choose(row, sampling, index)
            bad = EngineFailed("The model's logits are not numbers.")
            results.append(bad if token is None else Sampled((token,)))
        return results

    def logits(self, slices: list[Slice]) -> torch.Tensor:
        """Computes all slices; logits after the last token of each slice that wants a token, fp32 [wanting, vocab]."""
        return self._model.forward(self._batch(slices), self._pages)

    def close(self) -> None:
        """Ends the kernels' threads."""
        self._model.close()

    def _batch(self, slices: list[Slice]) -> llama.Batch:
        """The slices as tensors. Asserts that what they name exists: the C kernels check nothing."""
        lengths = np.array([len(part.tokens) for part in slices], dtype=np.int64)
        starts = np.array([part.start for part in slices], dtype=np.int64)
        ends = np.cumsum(lengths)
        assert len(slices) > 0 and lengths.min() > 0
        assert starts.min() >= 0 and (starts + lengths).max() <= self.context
        token = np.concatenate([np.asarray(part.tokens, dtype=np.int32) for part in slices])
        assert token.min() >= 0 and token.max() < self.vocab_size
        widths = -(-(starts + lengths) // BLOCK_TOKENS)
        table = np.zeros((len(slices), widths.max()), dtype=np.int32)
        for row, part, width in zip(table, slices, widths, strict=True):
            assert len(part.table) >= width, (len(part.table), width)
            row[:width] = part.table[:width]
        assert table.min() >= 0 and table.max() < self.block_count
        sequence = np.repeat(np.arange(len(slices)), lengths)
        position = np.arange(ends[-1]) - (ends - lengths)[sequence] + starts[sequence]
        want = [end - 1 for end, part in zip(ends, slices, strict=True) if part.sampling is not None]
        arrays = (token, position, sequence, table, np.array(want, dtype=np.int32))
        return llama.Batch(*(torch.from_numpy(array.astype(np.int32, copy=False)) for array in arrays))


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelFault(f"{path}: {error.strerror or error}") from error


def _fingerprint(header: Header, model: llama.Llama, digest: str) -> str:
    """Names everything that a KV block's bits depend on: weights and RoPE (the file's digest), layout, kernels.

    How the weights are held (`file` or `fp32`) is not in it: the bits are the same.
    """
    parts = ("kv", digest, model.layout, model.numerics, str(BLOCK_TOKENS))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
