"""The sampler: greedy, the shape of its distribution, what top_k and top_p leave, and its noise."""

from __future__ import annotations

import numpy as np
import pytest

from zjournal.engine.decoding import sampler
from zjournal.link import wire


def settings(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> wire.Sampling:
    return wire.Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


def draws(logits: np.ndarray, count: int = 4000, **changed) -> np.ndarray:
    """How often each id is drawn at positions 0, 1, …"""
    drawn = [sampler.choose(logits, settings(**changed), index) for index in range(count)]
    return np.bincount(drawn, minlength=len(logits))


LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], dtype=np.float32))


def test_temperature_zero_takes_the_largest_and_of_equals_the_first() -> None:
    assert sampler.choose(np.array([1, 5, 5, 2], dtype=np.float32), settings(temperature=0), 3) == 1
    assert sampler.choose(np.array([1, 5, 5, 2], dtype=np.float32), settings(top_k=1), 3) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = np.exp(LOGITS.astype(np.float64) / temperature)
    expected /= expected.sum()
    found = draws(LOGITS, temperature=temperature) / 4000
    assert np.abs(found - expected).max() < 0.03  # four standard deviations of 4,000 draws


def test_top_k_keeps_the_k_best() -> None:
    assert set(np.flatnonzero(draws(LOGITS, 500, top_k=2))) == {1, 3}
    assert set(np.flatnonzero(draws(LOGITS, 500, top_k=50))) == {0, 1, 2, 3, 4}
    equal = np.zeros(300, dtype=np.float32)
    assert set(np.flatnonzero(draws(equal, 500, top_k=3))) == {0, 1, 2}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert set(np.flatnonzero(draws(LOGITS, 500, top_p=0.39))) == {1}
    assert set(np.flatnonzero(draws(LOGITS, 500, top_p=0.6))) == {1, 3}
    assert set(np.flatnonzero(draws(LOGITS, 500, top_p=0.0))) == {1}
    # Of 1, 3 and 4 the share of 1 is 0.47: top_p counts what top_k left.
    assert set(np.flatnonzero(draws(LOGITS, 500, top_k=3, top_p=0.45))) == {1}


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_over_many_equals_the_whole_sort(top_p: float) -> None:
    logits = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    weight = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-weight, kind="stable")
    expected = order[: int(np.argmax(np.cumsum(weight[order]) >= top_p * weight.sum())) + 1]
    assert np.array_equal(sampler._candidates(weight, 0, top_p), expected)


def test_noise_is_even_and_belongs_to_seed_and_position() -> None:
    noise = np.array([sampler.uniform(seed, index) for seed in range(100) for index in range(100)])
    assert len(set(noise)) == 10_000
    assert noise.min() >= 0
    assert noise.max() < 1
    assert np.abs(np.histogram(noise, 10, (0, 1))[0] - 1000).max() < 130
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.04
    assert sampler.uniform(2**64 - 1, 7) == sampler.uniform(-1, 7)
    # Frozen: a journal's responses must be derivable for ever.
    assert [sampler.uniform(42, index) for index in range(3)] == FROZEN


FROZEN = [0.34329192209867343, 0.9504380907279257, 0.4465878737451613]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_gives_no_token(value: float) -> None:
    assert sampler.choose(np.array([1, value, 2], dtype=np.float32), settings(), 0) is None
    assert sampler.choose(np.full(3, -np.inf, dtype=np.float32), settings(temperature=0), 0) is None


def test_minus_infinity_is_never_drawn() -> None:
    logits = np.array([-np.inf, 0, -np.inf, 0, -np.inf], dtype=np.float32)
    assert set(np.flatnonzero(draws(logits, 500))) == {1, 3}


def test_the_ends_of_the_noise_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.array([-np.inf, 0.1, 0.2, 0.3, -np.inf], dtype=np.float32)
    monkeypatch.setattr(sampler, "uniform", lambda seed, index: 0.0)
    assert sampler.choose(logits, settings(), 0) == 1
    monkeypatch.setattr(sampler, "uniform", lambda seed, index: 1 - 2.0**-53)
    assert sampler.choose(logits, settings(), 0) == 3
