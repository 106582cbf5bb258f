"""The sampler against the transformers library: each setting by itself, all of them together, and at the extremes."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from zjournal.engine.decoding import sampler
from zjournal.link import wire

PLAIN = wire.Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=0)
VOCAB = 40
DRAWS = 1500

assert transformers.__version__


def settings(**changed) -> wire.Sampling:
    return msgspec.structs.replace(PLAIN, **changed)


def row(seed: int, vocab: int = VOCAB) -> np.ndarray:
    """Logits that are all different, so that no order among equals matters."""
    rng = np.random.default_rng(seed)
    return (rng.permutation(vocab) / 4 + rng.random(vocab) / 8).astype(np.float32)


def history(seed: int, prompt: int = 12, output: int = 9) -> tuple[np.ndarray, int]:
    return np.random.default_rng(seed).integers(0, VOCAB, prompt + output).astype(np.uint32), prompt


def oracle(processors: list, ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """What the processors make of the logits, in float64."""
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    for processor in processors:
        scores = processor(torch.from_numpy(ids.astype(np.int64))[None], scores)
    return scores[0].numpy()


def kept(logits: np.ndarray, sampling: wire.Sampling, ids: np.ndarray, prompt: int) -> set[int]:
    """The ids that can be drawn: every one that some noise reaches, found by following the noise from 0 to 1."""
    found: set[int] = set()
    index = len(ids) - prompt
    with pytest.MonkeyPatch.context() as patch:
        for noise in np.linspace(0, 1, DRAWS, endpoint=False):
            patch.setattr(sampler, "uniform", lambda seed, index, noise=noise: float(noise))
            found.add(sampler.choose(logits, sampling, index, ids, prompt))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(seed: int, penalty: float) -> None:
    logits, (ids, prompt) = row(seed) - 4, history(seed)
    expected = oracle([hf.RepetitionPenaltyLogitsProcessor(penalty)], ids, logits)
    found = sampler.adjusted(logits, settings(repetition_penalty=penalty), len(ids) - prompt, ids, prompt)
    assert np.array_equal(found, expected)
    assert np.array_equal(np.flatnonzero(found != logits), np.unique(ids))


@pytest.mark.parametrize("seed", range(8))
def test_presence_and_frequency_penalties_count_the_output_alone(seed: int) -> None:
    """OpenAI's definition: logit - count * frequency - (count > 0) * presence."""
    logits, (ids, prompt) = row(seed), history(seed)
    said = ids[prompt:].tolist()
    expected = [
        float(value) - said.count(token) * 0.7 - (1.1 if token in said else 0) for token, value in enumerate(logits)
    ]
    changed = settings(frequency_penalty=0.7, presence_penalty=1.1)
    assert sampler.adjusted(logits, changed, len(said), ids, prompt) == pytest.approx(np.array(expected), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_logit_bias_is_that_of_transformers(seed: int) -> None:
    logits, (ids, prompt) = row(seed), history(seed)
    bias = {3: 2.5, 7: -100.0, 39: 100.0}
    expected = oracle([hf.SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()])], ids, logits)
    changed = settings(logit_bias=tuple(bias.items()), temperature=0.0)
    assert sampler.adjusted(logits, changed, 9, ids, prompt) == pytest.approx(expected, rel=1e-6)
    assert sampler.choose(logits, changed, 9, ids, prompt) == 39


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = row(1)
    order = np.argsort(-logits).tolist()
    first, second = order[:2]
    greedy = settings(temperature=0.0, min_tokens=3)
    chosen = [sampler.choose(logits, greedy, index, end_tokens={first}) for index in range(5)]
    assert chosen == [second] * 3 + [first] * 2
    ids = np.zeros(14, dtype=np.uint32)
    processor = hf.MinNewTokensLengthLogitsProcessor(10, 3, [first])
    for index in range(5):
        expected = oracle([processor], ids[: 10 + index], logits)
        assert np.array_equal(sampler.adjusted(logits, greedy, index, end_tokens={first}), expected)
    assert sampler.choose(logits, greedy, 0, end_tokens=set(range(VOCAB))) is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("changed", "processors"),
    [
        ({"top_k": 5}, [hf.TopKLogitsWarper(5)]),
        ({"top_p": 0.7}, [hf.TopPLogitsWarper(0.7)]),
        ({"min_p": 0.02}, [hf.MinPLogitsWarper(0.02)]),
        ({"top_k": 6, "top_p": 0.9}, [hf.TopKLogitsWarper(6), hf.TopPLogitsWarper(0.9)]),
        (
            {"temperature": 1.7, "top_k": 9, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2},
            [
                hf.RepetitionPenaltyLogitsProcessor(1.2),
                hf.TemperatureLogitsWarper(1.7),
                hf.TopKLogitsWarper(9),
                hf.TopPLogitsWarper(0.95),
                hf.MinPLogitsWarper(0.05),
            ],
        ),
        ({"temperature": 0.6, "min_p": 0.3}, [hf.TemperatureLogitsWarper(0.6), hf.MinPLogitsWarper(0.3)]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_can_be_drawn_is_what_transformers_leaves(seed: int, changed: dict, processors: list) -> None:
    logits, (ids, prompt) = row(seed), history(seed)
    scores = oracle(processors, ids, logits)
    share = np.exp(scores - scores.max())
    share /= share.sum()
    likely = {int(token) for token in np.flatnonzero(share > 1.5 / DRAWS)}  # steps of the noise cannot miss these
    found = kept(logits, settings(**changed), ids, prompt)
    assert likely <= found <= {int(token) for token in np.flatnonzero(np.isfinite(scores))}


def test_min_p_is_measured_against_the_best() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.2, 0.05], dtype=np.float64)).astype(np.float32)
    ids, prompt = np.zeros(1, dtype=np.uint32), 1
    assert kept(logits, settings(min_p=0.45), ids, prompt) == {0, 1}
    assert kept(logits, settings(min_p=1.0), ids, prompt) == {0}
    assert kept(np.zeros(3, dtype=np.float32), settings(min_p=1.0), ids, prompt) == {0, 1, 2}


def test_changes_come_in_the_documented_order() -> None:
    """Bias first, so that the penalty sees what it made; then counts; the end tokens' mask last."""
    logits = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
    ids = np.array([0, 1, 1], dtype=np.uint32)
    changed = settings(
        logit_bias=((0, 1.0), (1, -4.0), (3, 5.0)),
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        min_tokens=9,
    )
    found = sampler.adjusted(logits, changed, 2, ids, 1, {3})
    assert found.tolist() == [(1.0 + 1.0) / 2, (2.0 - 4.0) * 2 - 2 * 0.5 - 0.25, 3.0, -math.inf]


@pytest.mark.parametrize("alternatives", [0, 1, 5, 20])
def test_logprobs_are_the_models_own(alternatives: int) -> None:
    logits = row(3)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 0).numpy()
    own, others = wire.unpack_logprobs(sampler.logprobs(logits, 17, alternatives))
    assert own == pytest.approx(expected[17], rel=1e-6)
    order = np.argsort(-logits, kind="stable")[:alternatives]
    assert [token for token, _ in others] == order.tolist()
    assert [value for _, value in others] == pytest.approx(expected[order].tolist(), rel=1e-6)


def test_logprobs_of_what_is_masked_are_finite_and_equals_stand_in_order() -> None:
    logits = np.array([-np.inf, 2, 2, -3e38], dtype=np.float32)
    own, others = wire.unpack_logprobs(sampler.logprobs(logits, 1, 20))
    assert own == pytest.approx(math.log(0.5))
    assert [token for token, _ in others] == [1, 2, 3, 0]
    assert all(math.isfinite(value) for _, value in others)


numbers = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([-math.inf, 0.0, -0.0, 1.0, 3e38, -3e38, 1e-40]),
)


@given(
    logits=st.lists(numbers, min_size=1, max_size=12),
    past=st.lists(st.integers(0, 11), max_size=12),
    prompt=st.integers(0, 12),
    temperature=st.sampled_from([0.0, 1e-300, 0.01, 1.0, 2.0]),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 14),
    min_p=st.floats(0, 1),
    repetition=st.floats(0.01, 10),
    counts=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, 11), st.floats(-100, 100), max_size=4),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_whatever_the_settings_a_token_that_may_be_drawn_comes_out(
    logits, past, prompt, temperature, top_p, top_k, min_p, repetition, counts, bias, seed
) -> None:
    row = np.array(logits, dtype=np.float32)
    vocab = len(row)
    ids = np.array([token % vocab for token in past], dtype=np.uint32)
    prompt = min(prompt, len(ids))
    sampling = wire.Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=counts,
        frequency_penalty=-counts,
        logit_bias=tuple((token, value) for token, value in bias.items() if token < vocab),
    )
    index = len(ids) - prompt
    token = sampler.choose(row, sampling, index, ids, prompt)
    if not np.isfinite(row.max()):
        assert token is None
        return
    assert token is not None
    assert 0 <= token < vocab
    assert row[token] > -math.inf
    assert token == sampler.choose(row.copy(), sampling, index, ids.copy(), prompt)
    if temperature == 0:
        assert token == int(np.argmax(sampler.adjusted(row, sampling, index, ids, prompt)))
