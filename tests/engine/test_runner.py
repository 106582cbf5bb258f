"""The runner: what it loads, what it refuses, what a step gives, and what its fingerprint covers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests import native
from tests.engine import toy
from zjournal.engine.runner import Runner
from zjournal.engine.sequence import BLOCK_TOKENS, Sampled, Slice
from zjournal.errors import EngineFailed, EngineStartFault
from zjournal.kernels import cpu
from zjournal.link import wire

GREEDY = wire.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
BLOCK_BYTES = BLOCK_TOKENS * toy.LAYERS * 2 * toy.KV_HEADS * toy.HEAD_DIM * 4


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = native.library()
    monkeypatch.setattr(cpu, "open_library", lambda: (found, ""))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return toy.write(tmp_path / "toy.gguf")


def load(path: Path, **changed) -> Runner:
    return Runner.load(
        wire.Start(model=str(path), **{"threads": 2, "kv_bytes": 40 * BLOCK_BYTES, **changed}), lambda _: None
    )


def test_it_tells_what_it_loaded(path: Path) -> None:
    told: list[float] = []
    runner = Runner.load(wire.Start(model=str(path), kv_bytes=40 * BLOCK_BYTES + 7), told.append)
    assert (runner.block_count, runner.vocab_size, runner.context) == (40, toy.VOCAB, toy.CONTEXT)
    assert runner.kernels.startswith("c ")
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) > toy.LAYERS
    runner.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": "cuda"}, "cuda"),
        ({"weights": "fp64"}, "fp64"),
        ({"context": toy.CONTEXT + 1}, "context"),
        ({"kv_bytes": BLOCK_BYTES - 1}, "KV memory"),
    ],
)
def test_limits_that_cannot_be_met_are_faults(path: Path, changed: dict, reason: str) -> None:
    with pytest.raises(EngineStartFault, match=reason):
        load(path, **changed)


def test_a_block_begins_at_a_page_and_its_bytes_are_those_of_the_kv(path: Path) -> None:
    runner = load(path)
    memory = [runner.block_memory(block) for block in range(2)]
    assert all(len(one) == BLOCK_BYTES == runner.block_bytes for one in memory)
    assert np.frombuffer(memory[0], np.uint8).__array_interface__["data"][0] % 4096 == 0
    memory[1][:] = b"\xff" * BLOCK_BYTES  # what another request has left
    runner.begin("a", [1, 2, 3])
    runner.step([Slice("a", [1, 2, 3], 0, [1], GREEDY, 0)])
    values = np.frombuffer(memory[1], np.float32)
    assert 0 < np.count_nonzero(values) <= len(values) * 3 // BLOCK_TOKENS, "the rest is zero"
    runner.close()


@pytest.mark.parametrize("kernels", ["c", "torch"])
def test_what_lies_behind_a_token_is_cleared_and_nothing_else(
    path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setattr(cpu, "open_library", lambda: (None, "a test"))
    runner = load(path)
    assert runner.kernels.startswith(kernels)
    blocks = [runner.block_memory(block) for block in range(2)]
    for block, tokens in enumerate(([1, 2, 3], [1, 2, 3, 4, 5])):
        runner.begin(str(block), tokens)
        runner.step([Slice(str(block), tokens, 0, [block], GREEDY, 0)])
    cleared = memoryview(bytearray(blocks[1]))
    runner.clear_behind(cleared, 3)
    assert bytes(cleared) == bytes(blocks[0]) != bytes(blocks[1])
    runner.close()


def test_a_step_answers_those_who_asked_in_order(path: Path) -> None:
    runner = load(path, context=100)
    assert runner.context == 100
    runner.begin("a", [1, 2, 3])
    one = runner.step([Slice("a", [1, 2, 3], 0, [3], GREEDY, 0)])
    other = runner.step([Slice("b", [9, 8], 0, [5], GREEDY, 0)])
    both = runner.step(
        [
            Slice("b", [9, 8], 0, [7], GREEDY, 0),
            Slice("c", [4] * 20, 0, [1, 2], None, 0),
            Slice("a", [1, 2, 3], 0, [4], GREEDY, 0),
        ]
    )
    assert both == other + one
    assert runner.step([Slice("c", [4], 20, [1, 2], None, 0)]) == []
    runner.end("a")
    runner.close()


def test_a_seeded_draw_depends_on_seed_and_index_only(path: Path) -> None:
    runner = load(path)

    def draw(seed: int, index: int, company: int) -> int:
        sampling = wire.Sampling(temperature=30.0, top_p=0.95, top_k=0, seed=seed)
        others = [Slice(str(i), [i + 1], 0, [10 + i], GREEDY, 0) for i in range(company)]
        sampled = runner.step([*others, Slice("a", [1, 2, 3], 0, [3], sampling, index)])[-1]
        assert isinstance(sampled, Sampled)
        return sampled.tokens[0]

    alone = [draw(seed, index, 0) for seed in range(4) for index in range(4)]
    assert alone == [draw(seed, index, 6) for seed in range(4) for index in range(4)]
    assert len(set(alone)) > 4
    runner.close()


def test_logits_that_are_no_numbers_fail_their_request_alone(tmp_path: Path) -> None:
    made = toy.tensors()
    values, _ = made["token_embd.weight"]
    values = values.copy()
    values[5] = math.nan
    head = made["token_embd.weight"][0]
    path = toy.write(
        tmp_path / "toy.gguf", made | {"token_embd.weight": (values, "F16"), "output.weight": (head, "F16")}
    )
    runner = load(path)
    good = runner.step([Slice("b", [1, 2], 0, [1], GREEDY, 0)])
    bad, same = runner.step([Slice("a", [1, 5], 0, [0], GREEDY, 0), Slice("b", [1, 2], 0, [1], GREEDY, 0)])
    assert isinstance(bad, EngineFailed)
    assert [same] == good
    runner.close()


def test_the_fingerprint_covers_weights_and_numerics(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(file: Path, **changed) -> str:
        runner = load(file, **changed)
        runner.close()
        return runner.fingerprint

    first = fingerprint(path)
    assert fingerprint(path, weights="fp32", threads=1, context=64) == first
    assert fingerprint(toy.write(tmp_path / "other.gguf", changed={"llama.rope.freq_base": 20000.0})) != first
    monkeypatch.setattr(cpu, "open_library", lambda: (None, "a test"))
    import torch

    threads = torch.get_num_threads()
    try:
        assert fingerprint(path) != first
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "slices",
    [
        [],
        [Slice("a", [], 0, [0], GREEDY, 0)],
        [Slice("a", [toy.VOCAB], 0, [0], GREEDY, 0)],
        [Slice("a", [1], 0, [40], GREEDY, 0)],
        [Slice("a", [1] * 17, 0, [0], GREEDY, 0)],
        [Slice("a", [1], toy.CONTEXT, list(range(40)), GREEDY, 0)],
    ],
    ids=["nothing", "no token", "token", "block", "short table", "context"],
)
def test_a_step_that_names_what_is_not_there_never_reaches_the_kernels(path: Path, slices: list[Slice]) -> None:
    runner = load(path)
    with pytest.raises(AssertionError):
        runner.step(slices)
    runner.close()
