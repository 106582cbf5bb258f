"""From slices to tokens on a device: model, KV pages, graphs and the draw are there; ids and little else come back.

A step is one copy of its numbers to the device, one graph or pass, one draw, and one wait for the ids. Masks are
made on the host meanwhile. Logits come to the host only where they are asked for (logprobs), or where a request
changes them before the draw (bias, penalties, min_tokens): then the host's sampler chooses, for all of its tokens.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from triton import TritonError

from zjournal.config import about_size
from zjournal.engine import device_memory, loading, steps
from zjournal.engine.decoding import sampler
from zjournal.engine.device import Device
from zjournal.engine.device_memory import KV_DTYPES, RESERVE_BYTES
from zjournal.engine.graphs import Graphs
from zjournal.engine.models import forward as passes
from zjournal.engine.models.decoder import Batch
from zjournal.engine.models.triton import TritonDecoder
from zjournal.engine.paged import Paged
from zjournal.engine.sequence import BLOCK_TOKENS, Choice, Sampled, Slice
from zjournal.engine.watchdog import Watchdog
from zjournal.errors import EngineStartFault, Fault
from zjournal.link import wire

STEP_TOKENS = 2048  # of prompts in one step: fewer leave a card waiting for its launches
TILE_ROWS = 16  # every tile of a product has a multiple of it
SINGLE_TOKENS_MAX = 8  # a slice of at most so many rows is computed as so many sequences of one row, as decode is

STEP_SECONDS_MAX = 120.0  # for STEP_TOKENS; behind a million tokens they take about 15 on a large card
SAID_SLICES = 32  # of a step that fails

# Of triton's compilers, the C compiler that it starts, the folder where it keeps what they make, and the driver.
KERNELS_FAIL = (RuntimeError, TritonError, OSError, subprocess.SubprocessError)

_DTYPES = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64}

log = logging.getLogger("zjournal.engine")


class Draws(NamedTuple):
    """What the sampling kernel is told of each row (see its file), [rows]; `mask` int32 [rows, words].

    None is what no row has. `number`: which output token of the request it is.
    """

    temperature: np.ndarray
    top_k: np.ndarray | None
    top_p: np.ndarray | None
    min_p: np.ndarray | None
    seed: np.ndarray
    number: np.ndarray
    mask: np.ndarray | None


class Kernels(NamedTuple):
    """Those that the runner itself launches."""

    gather: device_memory.Copy
    scatter: device_memory.Copy
    sample: Callable[..., torch.Tensor]


class DeviceRunner(Paged):
    """The model and its KV pages on one device."""

    _model: TritonDecoder

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        model: TritonDecoder,
        context: int,
        block_count: int,
        rows_max: int,
        fingerprint: str,
        parts: Mapping[str, str],
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        """`rows_max`: rows of the largest decode step, guesses included."""
        super().__init__(model, model.new_pages(block_count), context, fingerprint, parts)
        self._device, self._kernels = device, kernels
        self._masks = steps.Masks()
        self._watchdog: Watchdog | None = None
        self._slices: list[Slice] = []  # of the last step
        self.step_tokens = step_tokens
        self._rows_max = rows_max
        self.kernels = f"{model.name} ({device.name})"
        self.stages = device_memory.DeviceStages(device, self._pages, kernels.gather, kernels.scatter)
        width = -(-context // BLOCK_TOKENS)
        self._graphs = Graphs(device, model.loaded, self._pages, rows_max, width)

    @classmethod
    def load(
        cls,
        start: wire.Start,
        device: Device,
        kernels: Kernels,
        progress: Callable[[float], None],
        step_tokens: int = STEP_TOKENS,
    ) -> DeviceRunner:
        """Loads the weights. `progress` is told of the part done, 0 to 1.

        Raises ModelFault for a file that cannot be run, EngineStartFault for limits that cannot be met.
        """
        found = loading.opened(start)
        kv = KV_DTYPES[start.kv_dtype]

        def make() -> TritonDecoder:
            parts = (found.checkpoint, found.model, found.context, device.where, progress)
            try:
                return TritonDecoder(*parts, mode=start.weights, fast=start.fast, kv=kv)
            except torch.AcceleratorError as error:  # a RuntimeError as well, which stands for memory elsewhere
                raise EngineStartFault(f"{device.name} fails: {error}") from error

        decoder, made = loading.load(start, found, device.part, make)
        rows_max = max(start.max_running, start.speculation + 1)
        tokens = max(step_tokens, start.prefill_tokens)
        block = loading.block_bytes(found.model.decoder, kv.itemsize)
        wanted = start.max_running + start.speculation  # rows of logits: all end their prompts, and one guesses
        log.info("compiling the kernels for %s: about a minute where triton's folder has none yet", device.name)
        try:
            workspace = _warm(device, decoder, found.context, tokens, rows_max, wanted)
            kv_bytes = _kv_bytes(start.kv_bytes, device.free(), workspace, device_memory.staging_bytes(block))
            count = loading.blocks(kv_bytes, block)
            runner = cls(device, kernels, decoder, found.context, count, rows_max, *made, step_tokens)
            runner.warm()
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise EngineStartFault(f"The model does not fit into the device's memory: {error}") from error
        except KERNELS_FAIL as error:
            raise EngineStartFault(f"The kernels do not run on {device.name}: {error}") from error
        log.info(
            "KV memory %s of %s; %s stay for %d graphs and the rest",
            about_size(count * block),
            device.name,
            about_size(device.free()),
            len(runner._graphs),
        )
        progress(1.0)
        return runner

    def warm(self) -> None:
        """Launches the draw in all its forms, and a block's way out and back, so that no request waits for a compiler.

        For a runner whose blocks nobody has yet.
        """
        logits = torch.zeros((2, self.vocab_size), device=self._device.where)
        fixed = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int32)
        ones, words = np.ones(2, dtype=np.float32), np.full((2, -(-self.vocab_size // 32)), -1, dtype=np.int32)
        for mask in (None, words):
            self._launch(Draws(ones, None, None, None, *fixed, mask), logits)
            self._launch(Draws(ones, fixed[1], ones, ones * 0, *fixed, mask), logits)
        out = self.stages.out([0])
        assert out is not None
        out.close()
        back = self.stages.into([0])
        with back.open() as views:
            views[0][:] = bytes(self.block_bytes)
            back.store()

    def block_memory(self, block: int) -> memoryview:
        """A copy of the bytes of a block's KV in all layers. What is written there changes nothing: see `stages`."""
        assert 0 <= block < self.block_count, block
        return self._pages[block].reshape(-1).view(torch.uint8).cpu().numpy().copy().data

    def step(self, slices: list[Slice]) -> list[Sampled | Fault]:
        """Computes all slices. Returns, for each slice that samples, in order, its tokens or why there are none.

        Raises RuntimeError where the device fails: nothing works in this process after most of its errors, and a new
        one is started.
        """
        self._slices = slices
        try:
            with self._watchdog.watching() if self._watchdog is not None else contextlib.nullcontext():
                return self._step(slices)
        except RuntimeError:
            log.exception("%s failed in a step of %s", self._device.name, _shape(slices))
            raise

    def watch(self, late: Callable[[], None]) -> None:
        """From now on `late` is called, in another thread, when a step does not end."""
        most = max(self.step_tokens, STEP_TOKENS)
        self._watchdog = Watchdog(STEP_SECONDS_MAX * most / STEP_TOKENS, functools.partial(self._hangs, late))

    def _hangs(self, late: Callable[[], None]) -> None:
        log.critical("%s does not end a step of %s; this process does", self._device.name, _shape(self._slices))
        late()

    def _step(self, slices: list[Slice]) -> list[Sampled | Fault]:
        self._masks.begin(slices)
        try:
            logits = self.logits(slices)
        finally:
            choices = self._masks.take()
        parts = [part for part in slices if part.sampling is not None]
        if not parts:
            self._device.mark().wait()  # how long a step took is measured
            return []
        drawn, rows = self._draw(parts, choices, logits)
        results: list[Sampled | Fault] = []
        at = 0
        for part in parts:
            results.append(self._answer(part, choices, at, drawn, rows, logits))
            at += part.drafts + 1
        assert at == len(drawn), (at, len(drawn))
        return results

    def logits(self, slices: list[Slice]) -> torch.Tensor:
        """Launches all slices; fp32 [wanted, vocab] on the device, good until the next step.

        Wanted are, of each slice that samples, the logits before its first draft, behind that one, and so on.
        """
        batch = steps.batch(slices, self.context, self.vocab_size, self.block_count)
        for block in steps.begun(slices):
            self._pages[block].zero_()
        batch = _singles(batch, self._rows_max)
        if batch.table.shape[0] == batch.token.shape[0]:
            found = self._graphs.run(batch.token, batch.position, batch.table)
            if found is not None:
                whole = batch.want.shape[0] == batch.token.shape[0]
                return found if whole else found.index_select(0, self._device.upload(batch.want))
        sizes, numbers = passes.pack(batch.token, batch.position, batch.sequence, batch.table, batch.want)
        return passes.forward(self._model.loaded, passes.unpack(sizes, self._device.upload(numbers)), self._pages)

    def close(self) -> None:
        """Ends the threads."""
        self._masks.close()
        if self._watchdog is not None:
            self._watchdog.close()
        self._model.close()

    # --- the draw ----------------------------------------------------------------------------------------

    def _draw(
        self, parts: Sequence[Slice], choices: steps.Choices, logits: torch.Tensor
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """The token of each row, int32 [rows], -1 where there is none; and the logits of the rows that are needed."""
        needed = _needed(parts)
        drawn = self._launch(draws(parts, choices, self.vocab_size), logits)
        ids = self._device.host(drawn.shape[0], dtype=torch.int32)
        ids.copy_(drawn, non_blocking=True)
        if not needed:
            self._device.mark().wait()
            return ids.numpy(), {}
        host = self._device.host(len(needed), self.vocab_size, dtype=torch.float32)
        chosen = logits.index_select(0, self._device.upload(torch.tensor(needed, dtype=torch.int32)))
        host.copy_(chosen, non_blocking=True)
        self._device.mark().wait()
        return ids.numpy(), dict(zip(needed, host.numpy(), strict=True))

    def _launch(self, told: Draws, logits: torch.Tensor) -> torch.Tensor:
        """Brings to the device what the rows ask for, in one copy, and launches the draw."""
        there = self._device.upload(torch.from_numpy(np.concatenate([_words(one) for one in told if one is not None])))
        found: list[torch.Tensor | None] = []
        at = 0
        for values in told:
            if values is None:
                found.append(None)
                continue
            part = there[at : at + values.nbytes // 4].view(_DTYPES[values.dtype.name])
            found.append(part.view(values.shape))
            at += len(_words(values))
        temperature, top_k, top_p, min_p, seed, number, mask = found
        return self._kernels.sample(logits, mask, temperature, top_k, top_p, min_p, seed, number)

    def _answer(
        self,
        part: Slice,
        choices: steps.Choices,
        first: int,
        drawn: np.ndarray,
        rows: Mapping[int, np.ndarray],
        logits: torch.Tensor,
    ) -> Sampled | Fault:
        """What the rows from `first` on give."""
        assert part.sampling is not None

        def row(at: int) -> np.ndarray:  # rarely one that was not asked for: why there is no token
            found = rows.get(first + at)
            return logits[first + at].cpu().numpy() if found is None else found

        def choose(at: int, choice: Choice | None) -> int | None:
            token = int(drawn[first + at])
            if token < 0:
                return None
            return choice.forced if choice is not None and choice.forced >= 0 else token

        if not sampler.changes(part.sampling):
            return steps.answer(part, choices.get(part.request), choose, row)
        on_host = steps.chooser(part, np.stack([row(at) for at in range(part.drafts + 1)]))
        return steps.answer(part, choices.get(part.request), on_host, row)


def _shape(slices: Sequence[Slice]) -> str:
    """Of a step that has failed: an error may be that of any kernel in it, and this is what there is to find it by."""
    told = ", ".join(f"{len(part.tokens)} at {part.start}" for part in slices[:SAID_SLICES])
    more = f" and {len(slices) - SAID_SLICES} more" if len(slices) > SAID_SLICES else ""
    return f"{len(slices)} slices: {told}{more}"


def _words(values: np.ndarray) -> np.ndarray:
    """As int32, filled up so that what comes behind begins at 16 bytes."""
    flat = values.reshape(-1).view(np.int32)
    return np.pad(flat, (0, -len(flat) % passes.ALIGN))


def _needed(parts: Sequence[Slice]) -> list[int]:
    """The rows whose logits the host looks at."""
    found: list[int] = []
    at = 0
    for part in parts:
        assert part.sampling is not None
        if part.sampling.logprobs >= 0 or sampler.changes(part.sampling):
            found += range(at, at + part.drafts + 1)
        at += part.drafts + 1
    return found


def draws(parts: Sequence[Slice], choices: steps.Choices, vocab: int) -> Draws:
    """What the kernel is told of the rows of these slices. Where one token is forced, or a row stands behind an end,
    the best is taken: it says whether the logits are numbers."""
    rows: list[tuple[float, int, float, float, int, int]] = []
    masks: dict[int, np.ndarray] = {}
    for part in parts:
        one, found = part.sampling, choices.get(part.request)
        assert one is not None
        seed = one.seed & (1 << 64) - 1
        for at in range(part.drafts + 1):
            choice = found[at] if found is not None and not isinstance(found, Fault) and at < len(found) else None
            free = choice is None or choice.forced < 0
            temperature = one.temperature if free and one.top_k != 1 else 0.0
            if free and choice is not None and (choice.allowed is not None or choice.banned):
                masks[len(rows)] = _mask(choice, vocab)
            narrowed = (max(min(one.top_k, vocab), 0), one.top_p, one.min_p) if temperature else (0, 1.0, 0.0)
            rows.append((temperature, *narrowed, seed, part.index + at))
    temperatures, tops, shares, least, seeds, numbers = zip(*rows, strict=True)
    heat = np.array(temperatures, dtype=np.float32)
    signed = np.array(seeds, dtype=np.uint64).view(np.int64)
    fixed = signed, np.array(numbers, dtype=np.int32), _masks(masks, len(rows), vocab)
    if not any(tops) and min(shares) >= 1 and max(least) <= 0:
        return Draws(heat, None, None, None, *fixed)
    # All or none: each form is a kernel that must be compiled.
    settings = np.array(tops, dtype=np.int32), np.array(shares, dtype=np.float32), np.array(least, dtype=np.float32)
    return Draws(heat, *settings, *fixed)


def _masks(masks: Mapping[int, np.ndarray], rows: int, vocab: int) -> np.ndarray | None:
    """All rows' masks, int32 [rows, words]: those that have none may become anything. None if that is all."""
    if not masks:
        return None
    made = np.full((rows, -(-vocab // 32)), -1, dtype=np.int32)
    for row, words in masks.items():
        made[row] = words
    return made


def _mask(choice: Choice, vocab: int) -> np.ndarray:
    """What a row may become, a bit for each token: int32 [words]."""
    words = -(-vocab // 32)
    bits = np.full(words, (1 << 32) - 1, dtype=np.uint32) if choice.allowed is None else choice.allowed[:words].copy()
    for token in choice.banned:
        bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & (1 << 32) - 1)
    return bits.view(np.int32)


def _singles(batch: Batch, most: int) -> Batch:
    """The same rows, those of short slices each as a sequence of its own: the context is shared out better so.

    A row sees what those before it have written in the same step. Where they were more than `most`, which memory is
    there for, all stay as they are.
    """
    counts = torch.bincount(batch.sequence)
    short = counts <= SINGLE_TOKENS_MAX
    if int(counts[short].sum()) > most:
        return batch
    table = batch.table.repeat_interleave(torch.where(short, counts, 1), 0)
    begins = short[batch.sequence] | (batch.sequence != F.pad(batch.sequence, (1, 0), value=-1)[:-1])
    sequence = begins.int().cumsum(0, dtype=torch.int32) - 1
    return Batch(batch.token, batch.position, sequence, table, batch.want)


def _warm(device: Device, model: TritonDecoder, context: int, tokens: int, rows: int, wanted: int) -> int:
    """Runs a step of the largest kind of each sort, and one for each form of a product that these do not take, so
    that no request waits for a compiler. Returns the bytes that they take.

    `tokens` of a step, `rows` of the largest decode step, `wanted` rows of logits at most. Where a context is shorter
    than a step, several sequences stand in one, over the same blocks: what they write to each other is nobody's.
    """
    length, wanted = min(tokens, context), min(wanted, tokens)
    width = -(-length // BLOCK_TOKENS)
    pages = model.new_pages(width).zero_()
    row = torch.arange(tokens, dtype=torch.int32)
    zeros, position, sequence = torch.zeros_like(row), row % length, row // length
    table = torch.arange(width, dtype=torch.int32).repeat(int(sequence[-1]) + 1, 1)

    def prompts(count: int, want: int) -> Batch:
        last = int(sequence[count - 1]) + 1
        return Batch(zeros[:count], position[:count], sequence[:count], table[:last], row[:want])

    batches, taken = [prompts(tokens, wanted)], model.tiles(tokens, wanted) | model.tiles(rows, rows)
    sizes = [(count, 1) for count in range((tokens - 1) // TILE_ROWS * TILE_ROWS, 0, -TILE_ROWS)]
    for count, want in [*sizes, *((count, count) for count in range(wanted, 0, -1))]:
        if forms := model.tiles(count, want) - taken:
            taken |= forms
            batches.append(prompts(count, want))
    few = torch.arange(rows, dtype=torch.int32)
    wide = torch.zeros((rows, -(-context // BLOCK_TOKENS)), dtype=torch.int32)
    batches.append(Batch(torch.zeros_like(few), torch.full_like(few, context - 1), few, wide, few))
    return max(device.peak(functools.partial(model.forward, one, pages)) for one in batches)


def _kv_bytes(asked: int, free: int, workspace: int, staging: int) -> int:
    """Bytes for KV: what was asked for, 0 for all that is left. `free` is what the loaded model leaves.

    Raises EngineStartFault where that is less than was asked for, or nothing.
    """
    others = RESERVE_BYTES + 2 * workspace  # a step has its own, and the graphs have theirs
    left = free - others - staging
    if max(asked, 1) > left:
        wanted = about_size(asked) if asked else "KV"
        parts = f"{about_size(free)} are free beside the weights, {about_size(others)} are for steps and graphs"
        raise EngineStartFault(
            f"The device has no room for {wanted} (kv_memory): {parts}, and {about_size(staging)} for snapshots."
        )
    return asked or left
