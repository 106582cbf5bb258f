"""On a device, as on the processor: KV and logits are the same bits cold, in chunks, in any batch, and restored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine import families, interpreted, toy
from tests.engine import test_restore_exact as exact
from tests.kernels.quicker import (  # noqa: F401 (fixtures of all tests here)
    interpreter_leaves_memory_where_it_is,
    interpreter_prepares_the_language_once,
)
from zjournal.checkpoint.checkpoint import open_checkpoint
from zjournal.engine.device_runner import DeviceRunner
from zjournal.engine.models.decoder import Batch
from zjournal.engine.models.plain import PlainDecoder
from zjournal.engine.sequence import BLOCK_TOKENS, Slice
from zjournal.link import wire

GREEDY = wire.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
IDS = exact.prompt(37, 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


def batch(ids: list[int], want: list[int]) -> Batch:
    rows = len(ids)
    numbers = (ids, range(rows), [0] * rows, [range(rows // BLOCK_TOKENS + 1)], want)
    return Batch(*(torch.tensor(one, dtype=torch.int32) for one in numbers))


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3", marks=pytest.mark.soak), "gemma3"])
def test_each_family_is_near_what_fp32_gives(family: str, tmp_path: Path) -> None:
    folder = families.write_folder(families.make(family), tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    plain = PlainDecoder(checkpoint, checkpoint.model(), 128, "a test", lambda _: None)
    ids = batch(exact.prompt(families.WINDOW + 12, 1), [2, families.WINDOW + 1, families.WINDOW + 11])
    expected = plain.forward(ids, plain.new_pages(4))
    one = interpreted.decoder(folder)
    pages = one.new_pages(4).fill_(torch.nan)
    found = one.forward(ids, pages)
    assert found.dtype == torch.float32
    # bf16 keeps 8 bits, and each layer rounds some ten times.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * expected.abs().max().item())


def test_packed_weights_give_what_their_expanded_values_give(path: Path) -> None:
    ids = batch(IDS[:20], [3, 19])
    packed, expanded = interpreted.decoder(path, "file"), interpreted.decoder(path)
    fast = interpreted.decoder(path, fast=True)
    a, b, c = (one.forward(ids, one.new_pages(2)) for one in (packed, expanded, fast))
    assert torch.equal(a, b)
    torch.testing.assert_close(b, c, rtol=0, atol=0.03 * b.abs().max().item())
    assert packed.numerics == expanded.numerics != fast.numerics


def rows(runner: DeviceRunner, parts: list[Slice]) -> np.ndarray:
    return runner.logits(parts).numpy().copy()


def part(name: str, ids: list[int], start: int, end: int, table: list[int], drafts: int = 0) -> Slice:
    return Slice(name, ids[start:end], start, table, GREEDY, 0, drafts=drafts)


def test_chunks_batches_graphs_and_guesses_change_no_bit(path: Path) -> None:
    runner = interpreted.load(path)
    table, other = [3, 7, 1], [2, 9, 4]
    (whole,) = rows(runner, [part("a", IDS, 0, 36, table)])
    kept = [bytes(runner.block_memory(block)) for block in table]
    more = rows(runner, [part("a", IDS, 36, 37, table)])[0]  # a graph
    for block in table:
        runner._pages[block] = torch.nan
    for start, end in ((0, 5), (5, 17), (17, 35)):
        rows(runner, [part("a", IDS, start, end, table), part("b", IDS[::-1], start, end, other)])
    one, _ = rows(runner, [part("a", IDS, 35, 36, table), part("b", IDS[::-1], 35, 36, other)])
    assert np.array_equal(one, whole)
    assert [bytes(runner.block_memory(block)) for block in table] == kept
    last = rows(runner, [part("b", IDS[::-1], 36, 37, other), part("a", IDS, 36, 37, table)])[1]
    assert np.array_equal(last, more)
    guessed = rows(runner, [part("a", IDS, 35, 37, table, drafts=1)])  # as rows of their own
    assert np.array_equal(guessed, np.stack([whole, more]))
    mixed = rows(runner, [part("a", IDS, 35, 37, table, drafts=1), part("b", IDS[::-1], 28, 37, other)])
    assert np.array_equal(mixed[:2], guessed)
    runner.close()


def test_kv_in_fp8_takes_half_the_memory_and_changes_no_bit_between_ways(path: Path) -> None:
    runner, wide = interpreted.load(path, kv=torch.float8_e4m3fn), interpreted.load(path)
    assert (runner.block_bytes, runner.layout != wide.layout) == (wide.block_bytes // 2, True)
    (whole,) = rows(runner, [part("a", IDS, 0, 18, [3, 7])])
    kept = [bytes(runner.block_memory(block)) for block in (3, 7)]
    (near,) = rows(wide, [part("a", IDS, 0, 18, [3, 7])])
    np.testing.assert_allclose(whole, near, rtol=0, atol=0.3 * np.abs(near).max())
    runner._pages.zero_()
    rows(runner, [part("a", IDS, 0, 17, [3, 7])])
    (last,) = rows(runner, [part("a", IDS, 17, 18, [3, 7])])
    assert np.array_equal(last, whole)
    assert [bytes(runner.block_memory(block)) for block in (3, 7)] == kept
    cleared = memoryview(bytearray(kept[1]))
    runner.clear_behind(cleared, 1)
    assert np.count_nonzero(np.frombuffer(cleared, np.uint8)) <= len(cleared) // BLOCK_TOKENS
    runner.close()
    wide.close()


class Engine(exact.Engine):
    """The same over a device's runner."""

    def load(self, model: Path) -> DeviceRunner:
        return interpreted.load(model)


def test_restored_is_bitwise_what_was_computed(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "OUTPUT", 2)
    base = exact.prompt(40, 1)
    ids = [*base[:37], *exact.prompt(6, 2)]
    cold = Engine(path, None)
    cold.serve(b=ids)
    first = Engine(path, tmp_path / "s")
    first.serve(a=base)
    first.close()
    warm = Engine(path, tmp_path / "s", known=first.known())
    matched = warm.serve(b=ids)["b"]
    assert (matched.cached, matched.restored, matched.tier) == (37, 37, "ssd")
    exact.assert_equal(cold, warm, "b", ids)
    warm.close()
    cold.close()
