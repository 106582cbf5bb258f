"""KV that was restored from disk, and what is computed upon it, are the bits of a cold run: on a real, small model."""

from __future__ import annotations

import itertools
import random
import select
from array import array
from pathlib import Path

import numpy as np
import pytest

from tests import native
from tests.engine import toy
from zjournal.engine.cache.snapshots import Settings, Snapshots
from zjournal.engine.runner import Runner
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.engine.sequence import BLOCK_TOKENS, Sampled
from zjournal.kernels import cpu
from zjournal.link import wire

BLOCK_BYTES = BLOCK_TOKENS * toy.LAYERS * 2 * toy.KV_HEADS * toy.HEAD_DIM * 4
BLOCKS = 128
STEP_TOKENS = 64
OUTPUT = 6
WAITS_MAX = 2000
NOTHING = (wire.Known(space=bytes(32), last=True),)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.library()
    monkeypatch.setattr(cpu, "open_library", lambda: (library, ""))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return toy.write(tmp_path / "toy.gguf")


def prompt(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, toy.VOCAB), k=count)


class Engine:
    """Runner, scheduler and snapshots in this process, with a journal that says yes to everything."""

    def __init__(
        self, model: Path, folder: Path | None, codec: str = "raw", known: tuple[wire.Known, ...] = NOTHING
    ) -> None:
        self.runner = self.load(model)
        self.now = itertools.count(1, 1000)
        self.logits: dict[str, list[np.ndarray]] = {}
        self.events: list[wire.FromEngine] = []
        self.rows: dict[str, wire.BackedUp] = {}
        make = None
        if folder is not None:
            settings = Settings(folder, bytes(32), 1 << 30, codec)

            def make(residency, facts):
                clock = self.now.__next__
                stages = self.runner.stages
                return Snapshots(settings, residency, self.runner, facts, clock, clock, learns=False, stages=stages)

        limits = Limits(toy.CONTEXT, max_running=4, prefill_tokens=STEP_TOKENS)
        self.scheduler = Scheduler(limits, self.runner.block_count, lambda token: b"x", snapshots=make)
        self.snapshots = self.scheduler.snapshots
        for page in known if self.snapshots is not None else ():
            self.snapshots.take(page)

    def load(self, model: Path) -> Runner:
        return Runner.load(wire.Start(model=str(model), threads=2, kv_bytes=BLOCKS * BLOCK_BYTES), lambda _: None)

    def serve(self, **prompts: list[int]) -> dict[str, wire.Matched]:
        """Runs these requests side by side to their ends, and waits for the disk."""
        for request, ids in prompts.items():
            self.logits[request] = []
            asked = wire.Generate(
                request=request,
                tokens=wire.pack_ids(ids),
                namespace="n",
                sampling=wire.Sampling(0.0, 1.0, 0, 0),
                max_tokens=OUTPUT,
            )
            self.hear(self.scheduler.submit(asked, next(self.now)))
        for _ in range(WAITS_MAX):
            if self.snapshots is not None:
                self.snapshots.settle()
            if self.scheduler.idle and (
                self.snapshots is None or not (self.snapshots.open or self.snapshots.unwritten)
            ):
                break
            self.step()
        else:
            raise AssertionError("it does not come to an end")
        self.scheduler.check()
        return {one.request: one for one in self.events if isinstance(one, wire.Matched)}

    def step(self) -> None:
        plan = self.scheduler.plan(next(self.now))
        self.hear(plan.events)
        for copy in plan.copies:
            self.runner.copy_block(copy.source, copy.target, copy.count)
        if plan.slices:
            wanted = [part.request for part in plan.slices if part.sampling is not None]
            rows = self.runner.logits(plan.slices).numpy()
            for request, row in zip(wanted, rows, strict=True):
                self.logits[request].append(row.copy())
            results = [Sampled((int(row.argmax()),)) for row in rows]
            self.hear(self.scheduler.apply(plan, results, next(self.now)))
        if self.snapshots is not None:
            if not plan.slices and self.snapshots.disk.pending:
                self.wait()
            self.snapshots.pump(idle=self.scheduler.idle)
            self.hear(self.snapshots.take_events())

    def wait(self) -> None:
        select.select([self.snapshots.disk], [], [], 10)
        self.snapshots.settle()

    def hear(self, events: list[wire.FromEngine]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, wire.BackedUp):
                self.rows[event.request + str(event.fact)] = event
            if isinstance(event, (wire.BackedUp, wire.PurgePlanned)):
                self.snapshots.take(wire.Committed(event.fact))
                self.hear(self.snapshots.take_events())

    def known(self) -> tuple[wire.Known, ...]:
        """What a journal would tell the next engine."""
        chunks = {chunk.hash: chunk for told in self.rows.values() for chunk in told.chunks}
        ends = {told.request: told for told in self.rows.values()}
        gone = {hash_ for one in self.events if isinstance(one, wire.PurgePlanned) for hash_ in one.hashes}
        snapshots = [
            wire.Snapshot(one.request, "s", one.end, one.tokens, 1, False)
            for one in ends.values()
            if one.end not in gone
        ]
        kept = tuple(chunk for chunk in chunks.values() if chunk.hash not in gone)
        space = next(iter(ends.values())).space
        return (wire.Known(space=space, chunks=kept, snapshots=tuple(snapshots), last=True),)

    def kv(self, ids: list[int]) -> np.ndarray:
        """The KV in memory of these tokens, whole blocks only: uint8 [blocks, bytes]."""
        whole = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
        blocks = self.scheduler._residency.resident("n", array("I", ids[:whole]).tobytes())
        assert len(blocks) == whole // BLOCK_TOKENS
        return np.stack([np.frombuffer(self.runner.block_memory(block), np.uint8).copy() for block in blocks])

    def close(self) -> None:
        if self.snapshots is not None:
            self.snapshots.close()
        self.runner.close()


def assert_equal(cold: Engine, warm: Engine, request: str, ids: list[int]) -> None:
    assert len(cold.logits[request]) == len(warm.logits[request]) == OUTPUT
    for a, b in zip(cold.logits[request], warm.logits[request], strict=True):
        assert np.array_equal(a.view(np.uint32), b.view(np.uint32)), "other logits"
    assert np.array_equal(cold.kv(ids), warm.kv(ids)), "other KV"


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("at", [300, 256, 255, 131, 17, 5])
def test_restored_is_bitwise_what_was_computed(model: Path, tmp_path: Path, codec: str, at: int) -> None:
    base = prompt(300, 1)
    ids = [*base[:at], *prompt(330 - at, 2)]
    cold = Engine(model, None)
    cold.serve(b=ids)
    first = Engine(model, tmp_path / "s", codec)
    first.serve(a=base)
    first.close()
    warm = Engine(model, tmp_path / "s", codec, first.known())
    matched = warm.serve(b=ids)["b"]
    assert (matched.cached, matched.restored, matched.tier) == (at, at, "ssd")
    assert_equal(cold, warm, "b", ids)
    warm.close()
    cold.close()


def test_it_is_the_same_without_the_c_kernels(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "open_library", lambda: (None, "switched off"))
    plain = Engine(model, None)
    assert "switched off" in plain.runner.kernels, "or the C kernels would be compared with themselves"
    plain.close()
    test_restored_is_bitwise_what_was_computed(model, tmp_path, "raw", 40)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_two_branches_from_one_snapshot_in_a_batch_of_four(model: Path, tmp_path: Path, codec: str) -> None:
    base = prompt(300, 1)
    asked = {f"b{number}": [*base[: 290 - 20 * number], *prompt(30, 10 + number)] for number in range(4)}
    cold = Engine(model, None)
    for request, ids in asked.items():
        cold.serve(**{request: ids})
    first = Engine(model, tmp_path / "s", codec)
    first.serve(a=base)
    first.close()
    warm = Engine(model, tmp_path / "s", codec, first.known())
    matched = warm.serve(**asked)
    for number, (request, ids) in enumerate(asked.items()):
        assert matched[request].cached >= 290 - 20 * number
        assert_equal(cold, warm, request, ids)
    assert sum(one.restored for one in matched.values()) > 0
    warm.close()
    cold.close()


def test_memory_and_disk_together(model: Path, tmp_path: Path) -> None:
    """A part is in memory and the rest comes from disk, from the middle of a chunk on."""
    base = prompt(300, 1)
    ids = [*base, *prompt(20, 2)]
    cold = Engine(model, None)
    cold.serve(b=ids)
    first = Engine(model, tmp_path / "s")
    first.serve(a=base)
    first.close()
    warm = Engine(model, tmp_path / "s", known=first.known())
    warm.serve(part=[*base[:100], 7])
    matched = warm.serve(b=ids)["b"]
    assert (matched.cached, matched.restored) == (300, 300 - 96)
    assert_equal(cold, warm, "b", ids)
    warm.close()
    cold.close()


def test_what_lies_behind_the_last_token_on_disk_is_zero(model: Path, tmp_path: Path) -> None:
    """A block may have been another tenant's before: nothing of that goes to disk."""
    engine = Engine(model, tmp_path / "s")
    engine.serve(**{f"fill{number}": prompt(400, number) for number in range(4)})
    engine.serve(a=prompt(46, 9))
    engine.close()
    (told,) = [one for one in engine.rows.values() if one.request == "a"]
    path = next((tmp_path / "s").rglob(told.end.hex() + ".zjc"))
    last = np.frombuffer(path.read_bytes()[-BLOCK_BYTES:], np.float32)
    used = told.tokens % BLOCK_TOKENS or BLOCK_TOKENS
    assert np.count_nonzero(last) <= last.size * used // BLOCK_TOKENS
    assert np.count_nonzero(last) > 0
