"""One step between the scheduler and a model: slices become a batch, rows become answers. What all runners share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from zjournal.engine.decoding import sampler
from zjournal.engine.decoding.beside import Beside
from zjournal.engine.models.decoder import Batch
from zjournal.engine.sequence import BLOCK_TOKENS, Choice, Sampled, Slice
from zjournal.errors import EngineFailed, Fault

Choices = dict[str, Sequence[Choice] | Fault | None]


def batch(slices: Sequence[Slice], context: int, vocab: int, block_count: int) -> Batch:
    """The slices as tensors. Asserts that what they name exists: the kernels check nothing."""
    lengths = np.array([len(part.tokens) for part in slices], dtype=np.int64)
    starts = np.array([part.start for part in slices], dtype=np.int64)
    ends = np.cumsum(lengths)
    assert len(slices) > 0 and lengths.min() > 0
    assert starts.min() >= 0 and (starts + lengths).max() <= context
    token = np.concatenate([np.asarray(part.tokens, dtype=np.int32) for part in slices])
    assert token.min() >= 0 and token.max() < vocab
    widths = -(-(starts + lengths) // BLOCK_TOKENS)
    table = np.zeros((len(slices), widths.max()), dtype=np.int32)
    for row, part, width in zip(table, slices, widths, strict=True):
        assert len(part.table) >= width, (len(part.table), width)
        row[:width] = part.table[:width]
    assert table.min() >= 0 and table.max() < block_count
    sequence = np.repeat(np.arange(len(slices)), lengths)
    position = np.arange(ends[-1]) - (ends - lengths)[sequence] + starts[sequence]
    sampling = [(end, part) for end, part in zip(ends, slices, strict=True) if part.sampling is not None]
    assert all(0 <= part.drafts < len(part.tokens) for _, part in sampling)
    want = [row for end, part in sampling for row in range(end - 1 - part.drafts, end)]
    arrays = (token, position, sequence, table, np.array(want, dtype=np.int32))
    return Batch(*(torch.from_numpy(array.astype(np.int32, copy=False)) for array in arrays))


def begun(slices: Sequence[Slice]) -> list[int]:
    """The blocks that a step begins and does not fill: they go to disk whole, and may have been another tenant's."""
    found = []
    for part in slices:
        end = part.start + len(part.tokens)
        begin = end // BLOCK_TOKENS * BLOCK_TOKENS
        if part.start <= begin < end:
            found.append(part.table[begin // BLOCK_TOKENS])
    return found


def choices(slices: Sequence[Slice]) -> Choices:
    """What the rows of each request may become; one for each draft that is legal, and one more."""
    return {
        part.request: part.steer.choices(part.tokens[len(part.tokens) - part.drafts :])
        for part in slices
        if part.steer is not None
    }


class Masks:
    """What the rows of a step may become, computed beside the model where it takes longer than to hand it over."""

    def __init__(self) -> None:
        self._beside = Beside(choices, "zj-masks")
        self._given = False
        self._found: Choices = {}

    def begin(self, slices: Sequence[Slice]) -> None:
        """Before the model is asked; `take` must follow."""
        steered: dict[bool, list[Slice]] = {False: [], True: []}
        for part in slices:
            if part.steer is not None and part.sampling is not None:
                steered[part.steer.computes].append(part)
        self._found = choices(steered[False])
        self._given = bool(steered[True])
        if self._given:
            self._beside.give(steered[True])

    def take(self) -> Choices:
        """By request; those without a fence and a guard are not in it."""
        if self._given:
            self._given = False
            self._found |= self._beside.take()
        return self._found

    def close(self) -> None:
        """Ends the thread."""
        self._beside.close()


def answer(
    part: Slice,
    found: Sequence[Choice] | Fault | None,
    choose: Callable[[int, Choice | None], int | None],
    logits: Callable[[int], np.ndarray],
) -> Sampled | Fault:
    """The tokens that a slice's rows give: one from each row while it is the next draft, so as without drafts.

    `choose` gives the token of a row, None where there is none; `logits` a row's logits, fp32 [vocab]. A fault, or an
    end, behind a right draft is left for the next step.
    """
    assert part.sampling is not None
    if isinstance(found, Fault):
        return found
    drafts = part.tokens[len(part.tokens) - part.drafts :]
    alternatives = part.sampling.logprobs
    tokens: list[int] = []
    logprobs: list[bytes] = []
    end = ""
    for at in range(part.drafts + 1):
        choice = found[at] if found is not None else None
        token = choose(at, choice)
        if token is None:
            end = "fence" if choice is not None and sampler.has_best(logits(at)) else ""
            break
        tokens.append(token)
        if alternatives >= 0:
            logprobs.append(sampler.logprobs(logits(at), token, alternatives))
        if at < len(drafts) and token != drafts[at]:
            break
        if found is not None and at + 1 == len(found):
            break  # behind an end: nothing is told of it
    if not tokens:
        return Sampled((), end=end) if end else EngineFailed("The model's logits are not numbers.")
    return Sampled(tuple(tokens), b"".join(logprobs))


def chooser(part: Slice, rows: np.ndarray) -> Callable[[int, Choice | None], int | None]:
    """Chooses on the host, from a slice's logits, fp32 [drafts + 1, vocab]; see `answer`."""
    sampling = part.sampling
    assert sampling is not None
    ids = np.empty(0, dtype=np.uint32)
    if sampler.looks_back(sampling):
        drafts = part.tokens[len(part.tokens) - part.drafts :]
        ids = np.concatenate([np.array(part.ids, dtype=np.uint32), np.array(drafts, dtype=np.uint32)])

    def choose(at: int, choice: Choice | None) -> int | None:
        row, index = rows[at], part.index + at
        if choice is None:
            return sampler.choose(row, sampling, index, ids[: part.prompt + index], part.prompt, part.end_tokens)
        if choice.forced >= 0:
            return choice.forced if sampler.has_best(row) else None
        ends = () if choice.complete else part.end_tokens  # an answer that is complete cannot be any longer
        before = ids[: part.prompt + index]
        return sampler.choose(row, sampling, index, before, part.prompt, ends, choice.allowed, choice.banned)

    return choose


def host_rows(logits: np.ndarray) -> Callable[[int], np.ndarray]:
    """The rows of logits that are on the host; see `answer`."""
    return lambda at: logits[at]
