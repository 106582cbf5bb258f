"""From slices to tokens: builds the step's tensors, runs the model over the KV pages, samples.

The runner owns the pages' memory; which block holds what is the scheduler's knowledge. Results do not depend on
which slices share a step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from zjournal.checkpoint import decoder as described
from zjournal.checkpoint.checkpoint import check_tensors, identify, open_checkpoint
from zjournal.engine.decoding import sampler
from zjournal.engine.decoding.beside import Beside
from zjournal.engine.models import build
from zjournal.engine.models.decoder import Batch, Decoder
from zjournal.engine.sequence import BLOCK_TOKENS, Choice, Sampled, Slice
from zjournal.errors import EngineFailed, EngineStartFault, Fault
from zjournal.link import wire

WEIGHTS = ("file", "fp32")

assert BLOCK_TOKENS == build.BLOCK_TOKENS


class Runner:
    """The model and its KV pages on one device.

    `kernels` is for people, `fingerprint` names the exact numerics, `parts` tells what it is made of.
    """

    def __init__(
        self,
        model: Decoder,
        context: int,
        block_count: int,
        fingerprint: str,
        parts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._model = model
        self._beside = Beside(_choices, "zj-masks")
        self._pages = _paged(model.new_pages(1), block_count)
        self.layout = model.layout
        self.block_bytes = self._pages[0].numel() * self._pages.element_size()
        self.context = context
        self.block_count = block_count
        self.vocab_size = model.shape.vocab
        self.kernels = model.name
        self.fingerprint = fingerprint
        self.parts = parts

    @classmethod
    def load(cls, start: wire.Start, progress: Callable[[float], None]) -> Runner:
        """Loads the weights. `progress` is told of the part done, 0 to 1.

        Raises ModelFault for a file that cannot be run, EngineStartFault for limits that cannot be met.
        """
        if start.device != "cpu":
            raise EngineStartFault(f"The device {start.device} is not supported, only cpu.")
        if start.weights not in WEIGHTS:
            raise EngineStartFault(f"weights={start.weights} is none of {', '.join(WEIGHTS)}.")
        checkpoint = open_checkpoint(start.model)
        model = described.override(checkpoint.model(), start.rope)
        check_tensors(checkpoint, model)
        context, block_count = _limits(model.decoder, start)
        threads = start.threads or len(os.sched_getaffinity(0))
        cache_dir = Path(start.cache_dir) if start.cache_dir else None
        with ThreadPoolExecutor(1) as beside:  # reading the file twice costs less when it is done at once
            found = beside.submit(identify, checkpoint, cache_dir)
            try:
                decoder = build.build(checkpoint, model, context, threads, start.weights, progress)
                identity = found.result()
                parts = build.parts(model, decoder, identity, start.device)
                runner = cls(decoder, context, block_count, build.fingerprint(parts, identity), parts)
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

    def block_memory(self, block: int) -> memoryview:
        """The bytes of a block's KV in all layers, as they are; writable. It begins at a page of the system."""
        assert 0 <= block < self.block_count, block
        return self._pages[block].reshape(-1).view(torch.uint8).numpy().data

    def clear_behind(self, memory: memoryview, tokens: int) -> None:
        """Zeros in a copy of a block's bytes what lies behind its first `tokens` tokens. For any thread."""
        self._model.clear_behind(memory, tokens)

    def step(self, slices: list[Slice]) -> list[Sampled | Fault]:
        """Computes all slices. Returns, for each slice that samples, in order, its tokens or why there are none."""
        steered: dict[bool, list[Slice]] = {False: [], True: []}
        for part in slices:
            if part.steer is not None and part.sampling is not None:
                steered[part.steer.computes].append(part)
        choices = _choices(steered[False])
        if steered[True]:
            self._beside.give(steered[True])
        try:
            rows = self.logits(slices).numpy()
        finally:
            if steered[True]:
                choices |= self._beside.take()
        results: list[Sampled | Fault] = []
        at = 0
        for part in slices:
            if part.sampling is not None:
                found = rows[at : at + part.drafts + 1]
                results.append(_sample(found, part, part.sampling, choices.get(part.request)))
                at += part.drafts + 1
        assert at == len(rows), (at, len(rows))
        return results

    def logits(self, slices: list[Slice]) -> torch.Tensor:
        """Computes all slices; fp32 [wanted, vocab].

        Wanted are, of each slice that samples, the logits before its first draft, behind that one, and so on.
        """
        batch = self._batch(slices)
        self._clear(slices)
        return self._model.forward(batch, self._pages)

    def close(self) -> None:
        """Ends the kernels' threads."""
        self._beside.close()
        self._model.close()

    def _clear(self, slices: list[Slice]) -> None:
        """Zeroes blocks that are begun and not filled: they go to disk whole, and may have been another tenant's."""
        for part in slices:
            end = part.start + len(part.tokens)
            begin = end // BLOCK_TOKENS * BLOCK_TOKENS
            if part.start <= begin < end:
                self._pages[part.table[begin // BLOCK_TOKENS]].zero_()

    def _batch(self, slices: list[Slice]) -> Batch:
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
        sampling = [(end, part) for end, part in zip(ends, slices, strict=True) if part.sampling is not None]
        assert all(0 <= part.drafts < len(part.tokens) for _, part in sampling)
        want = [row for end, part in sampling for row in range(end - 1 - part.drafts, end)]
        arrays = (token, position, sequence, table, np.array(want, dtype=np.int32))
        return Batch(*(torch.from_numpy(array.astype(np.int32, copy=False)) for array in arrays))


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


def _limits(shape: described.Decoder, start: wire.Start) -> tuple[int, int]:
    """Context in tokens and number of KV blocks. Raises EngineStartFault."""
    context = start.context or shape.context
    longest = described.context_limit(shape)
    if context > longest:
        raise EngineStartFault(f"The context of {context} tokens is over the model's own, {longest}.")
    block_bytes = BLOCK_TOKENS * shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
    block_count = start.kv_bytes // block_bytes
    if block_count < 1:
        raise EngineStartFault(f"{start.kv_bytes} bytes of KV memory do not hold one block of {block_bytes} bytes.")
    return context, block_count


def _choices(slices: list[Slice]) -> dict[str, Sequence[Choice] | Fault | None]:
    """What the rows of each request may become; one for each draft that is legal, and one more."""
    return {
        part.request: part.steer.choices(part.tokens[len(part.tokens) - part.drafts :])
        for part in slices
        if part.steer is not None
    }


def _sample(
    rows: np.ndarray, part: Slice, sampling: wire.Sampling, choices: Sequence[Choice] | Fault | None = None
) -> Sampled | Fault:
    """The tokens that a slice's logits, fp32 [drafts + 1, vocab], give: one from each row while it is the next draft.

    So the same tokens come as without drafts. A fault, or an end, behind a right draft is left for the next step.
    """
    if isinstance(choices, Fault):
        return choices
    drafts = part.tokens[len(part.tokens) - part.drafts :]
    ids = np.empty(0, dtype=np.uint32)
    if sampler.looks_back(sampling):
        ids = np.concatenate([np.array(part.ids, dtype=np.uint32), np.array(drafts, dtype=np.uint32)])
    tokens: list[int] = []
    logprobs: list[bytes] = []
    end = ""
    for at, row in enumerate(rows):
        before = ids[: part.prompt + part.index + at]
        choice = choices[at] if choices is not None else None
        token = _chosen(row, part, sampling, part.index + at, before, choice)
        if token is None:
            end = "fence" if choice is not None and sampler.has_best(row) else ""
            break
        tokens.append(token)
        if sampling.logprobs >= 0:
            logprobs.append(sampler.logprobs(row, token, sampling.logprobs))
        if at < len(drafts) and token != drafts[at]:
            break
        if choices is not None and at + 1 == len(choices):
            break  # behind an end: nothing is told of it
    if not tokens:
        return Sampled((), end=end) if end else EngineFailed("The model's logits are not numbers.")
    return Sampled(tuple(tokens), b"".join(logprobs))


def _chosen(
    row: np.ndarray, part: Slice, sampling: wire.Sampling, index: int, ids: np.ndarray, choice: Choice | None
) -> int | None:
    """The token of one row, fp32 [vocab]; None where there is none."""
    if choice is None:
        return sampler.choose(row, sampling, index, ids, part.prompt, part.end_tokens)
    if choice.forced >= 0:
        return choice.forced if sampler.has_best(row) else None
    ends = () if choice.complete else part.end_tokens  # an answer that is complete cannot be any longer
    return sampler.choose(row, sampling, index, ids, part.prompt, ends, choice.allowed, choice.banned)
