"""Drafts in a step: the tokens, their logprobs and the KV are those of decoding one by one, whatever was guessed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests import native
from tests.engine import toy
from zjournal.engine.runner import Runner
from zjournal.engine.sequence import BLOCK_TOKENS, Sampled, Slice
from zjournal.errors import EngineFailed
from zjournal.kernels import cpu
from zjournal.link import wire

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
OUTPUT = 40
BLOCKS = 24
BLOCK_BYTES = BLOCK_TOKENS * toy.LAYERS * 2 * toy.KV_HEADS * toy.HEAD_DIM * 4
PLAIN = wire.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)

Guess = Callable[[int], list[int]]  # by the number of output tokens

SETTINGS = {
    "greedy": {},
    "seeded": {"temperature": 8.0, "seed": 7},
    "everything": {
        "temperature": 6.0,
        "top_k": 90,
        "top_p": 0.98,
        "min_p": 0.001,
        "seed": 11,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": ((5, 3.0), (7, -100.0)),
        "min_tokens": 20,
    },
}


@pytest.fixture(params=["kernels", "torch"])
def runner(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    found = (native.library(), "") if request.param == "kernels" else (None, "a test")
    monkeypatch.setattr(cpu, "open_library", lambda: found)
    path = toy.write(tmp_path / "toy.gguf")
    loaded = Runner.load(wire.Start(model=str(path), threads=2, kv_bytes=BLOCKS * BLOCK_BYTES), lambda _: None)
    yield loaded
    loaded.close()


def generate(runner: Runner, sampling: wire.Sampling, guess: Guess, table: list[int]) -> tuple[list[int], bytes]:
    """OUTPUT tokens, their logprobs; each step is given the drafts that `guess` returns."""
    ids, computed, told = list(PROMPT), 0, b""
    while len(ids) < len(PROMPT) + OUTPUT:
        output = len(ids) - len(PROMPT)
        drafts = guess(output)[: OUTPUT - output - 1]
        part = Slice(
            "a",
            [*ids[computed:], *drafts],
            computed,
            table,
            sampling,
            output,
            drafts=len(drafts),
            ids=ids,
            prompt=len(PROMPT),
            end_tokens=frozenset({1, 2, 3}),
        )
        (sampled,) = runner.step([part])
        assert isinstance(sampled, Sampled)
        assert 1 <= len(sampled.tokens) <= len(drafts) + 1
        assert list(sampled.tokens[:-1]) == drafts[: len(sampled.tokens) - 1]
        computed = len(ids) + len(sampled.tokens) - 1
        ids += sampled.tokens
        told += sampled.logprobs
    return ids[len(PROMPT) :], told


def alone(output: int) -> list[int]:
    return []


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_comes_out_whatever_was_guessed(runner: Runner, name: str) -> None:
    sampling = msgspec.structs.replace(PLAIN, logprobs=3, **SETTINGS[name])
    table = list(range(8))
    tokens, told = generate(runner, sampling, alone, table)
    assert len(set(tokens)) > 1
    assert len(wire.cut_logprobs(told, OUTPUT)) == OUTPUT
    rng = np.random.default_rng(1)

    def right(output: int) -> list[int]:
        return tokens[output : output + 5]

    def wrong(output: int) -> list[int]:
        return [(token + 1) % toy.VOCAB for token in tokens[output : output + 4]]

    def mixed(output: int) -> list[int]:
        length = int(rng.integers(0, 9))
        flips = rng.random(length) < 0.3
        return [
            int(rng.integers(0, toy.VOCAB)) if flip else token
            for token, flip in zip(tokens[output : output + length], flips, strict=False)
        ]

    for guess in (right, wrong, mixed, mixed):
        assert generate(runner, sampling, guess, table) == (tokens, told)


def test_kv_behind_wrong_drafts_is_written_over(runner: Runner) -> None:
    one, other = list(range(8)), list(range(8, 16))
    tokens, _ = generate(runner, PLAIN, alone, one)
    assert generate(runner, PLAIN, lambda output: [(tokens[output] + 1) % toy.VOCAB] * 6, other)[0] == tokens
    count = len(PROMPT) + OUTPUT - 1
    for at in range(count // BLOCK_TOKENS):
        assert runner._pages[one[at]].equal(runner._pages[other[at]])


def test_right_drafts_are_all_taken_and_one_token_more(runner: Runner) -> None:
    tokens, _ = generate(runner, PLAIN, alone, list(range(8)))
    ids = [*PROMPT, tokens[0]]
    given = [*ids, *tokens[1:6]]
    part = Slice("a", given, 0, list(range(8)), PLAIN, 1, drafts=5, ids=ids, prompt=len(PROMPT))
    (sampled,) = runner.step([part])
    assert sampled == Sampled(tuple(tokens[1:7]))


def test_slices_with_and_without_drafts_share_a_step(runner: Runner) -> None:
    tokens, _ = generate(runner, PLAIN, alone, list(range(8)))
    ids = [*PROMPT, tokens[0]]
    drafted = Slice(
        "a", [*ids, tokens[1], tokens[2], 0], 0, list(range(8)), PLAIN, 1, drafts=3, ids=ids, prompt=len(PROMPT)
    )
    prefill = Slice("b", [8] * 10, 0, [9], None, 0)
    plain = Slice("c", PROMPT, 0, [10, 11], PLAIN, 0, ids=PROMPT, prompt=len(PROMPT))
    first, last = runner.step([drafted, prefill, plain])
    expected = tokens[1:4] if tokens[3] != 0 else tokens[1:5]
    assert first == Sampled(tuple(expected))
    assert last == Sampled((tokens[0],))


def test_a_fault_behind_a_right_draft_waits_for_its_own_step(tmp_path: Path) -> None:
    made = toy.tensors()
    values, _ = made["token_embd.weight"]
    values = values.copy()
    values[5] = math.nan
    head = made["token_embd.weight"][0]
    path = toy.write(
        tmp_path / "toy.gguf", made | {"token_embd.weight": (values, "F16"), "output.weight": (head, "F16")}
    )
    runner = Runner.load(wire.Start(model=str(path), threads=2, kv_bytes=BLOCKS * BLOCK_BYTES), lambda _: None)
    to_five = msgspec.structs.replace(PLAIN, logit_bias=((5, 100.0),))
    part = Slice("a", [1, 2, 5, 5], 0, [0], to_five, 0, drafts=2, ids=[1, 2], prompt=2)
    assert runner.step([part]) == [Sampled((5,))]
    (fault,) = runner.step([Slice("a", [5], 2, [0], to_five, 1, ids=[1, 2, 5], prompt=2)])
    assert isinstance(fault, EngineFailed)
    runner.close()
