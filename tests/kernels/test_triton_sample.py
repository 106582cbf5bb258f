"""Sampling on the device, in triton's interpreter: every setting, every limit, the distribution, and rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from zjournal.kernels import sample

INF = float("inf")
UNTOUCHED = 12345
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes the time of a whole part for five tokens. Tests of long rows keep the sizes of a GPU."""
    if "vocab" not in request.fixturenames:
        monkeypatch.setattr(sample, "_PART", 256)
        monkeypatch.setattr(sample, "_TILE", 512)


def rows_of(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    allowed: list[int] | None = None,
) -> dict[str, Any]:
    """Arguments where all rows have the same settings; row i is output position i."""
    rows, vocab = logits.shape
    mask = None
    if allowed is not None:
        bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
        bits[allowed] = 1
        words = np.packbits(bits, bitorder="little").view(np.uint32)
        mask = torch.from_numpy(np.tile(words, (rows, 1)))
    return {
        "logits": logits,
        "mask": mask,
        "temperature": torch.full((rows,), temperature),
        "top_k": None if top_k is None else torch.full((rows,), top_k, dtype=torch.int32),
        "top_p": None if top_p is None else torch.full((rows,), top_p),
        "min_p": None if min_p is None else torch.full((rows,), min_p),
        "seed": torch.full((rows,), seed, dtype=torch.int64),
        "index": torch.arange(rows, dtype=torch.int32),
    }


def sampled(given: dict[str, Any]) -> torch.Tensor:
    """Into memory full of other things: what is not written shows."""
    rows, vocab = given["logits"].shape
    out = torch.full((rows,), UNTOUCHED, dtype=torch.int32)
    scratch = torch.full((rows, sample.scratch_words(vocab)), 0x7FF8_0BAD_7FF8_0BAD, dtype=torch.int64)
    assert sample.sample(**given, out=out, scratch=scratch) is out
    return out


def logits_of(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.02},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 2.5, "top_k": 500, "top_p": 0.3, "min_p": 0.001},
    {"temperature": 1e-20, "top_p": 0.99},
)


@pytest.mark.parametrize("given", SETTINGS, ids=lambda given: ",".join(f"{k}={v}" for k, v in given.items()) or "none")
@pytest.mark.parametrize("vocab", [1, 5, pytest.param(4096, marks=pytest.mark.soak), 8193])
@pytest.mark.parametrize("masked", [False, True])
def test_is_the_reference(given: dict[str, Any], vocab: int, masked: bool) -> None:
    allowed = list(range(0, vocab, 3)) if masked else None
    arguments = rows_of(logits_of(3, vocab, seed=vocab), seed=vocab * 7 - 3, allowed=allowed, **given)
    assert torch.equal(sampled(arguments), sample.reference(**arguments))


@pytest.mark.parametrize("vocab", [49152, 128256, 262208])
def test_vocabularies_that_are_served(vocab: int) -> None:
    logits = logits_of(1, vocab, seed=1).bfloat16()
    arguments = rows_of(logits, temperature=0.8, top_k=1000, top_p=0.9, min_p=1e-4, allowed=list(range(7, vocab)))
    assert torch.equal(sampled(arguments), sample.reference(**arguments))


def test_no_rows() -> None:
    assert sampled(rows_of(torch.zeros(0, 100), top_k=3, top_p=0.5)).shape == (0,)


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": 1000}, {"top_k": 5000}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_settings_that_are_off_change_nothing(off: dict[str, Any]) -> None:
    logits = logits_of(8, 1000)
    assert torch.equal(sampled(rows_of(logits, **off)), sampled(rows_of(logits)))


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}])
def test_what_is_no_number_is_no_token_masked_or_not(bad: float, given: dict[str, Any]) -> None:
    logits = logits_of(3, 700)
    logits[1, 699] = bad
    for allowed in (None, [3, 17]):
        found = sampled(rows_of(logits, allowed=allowed, **given))
        assert found[1] == -1 and found[0] >= 0 and found[2] >= 0


@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}])
def test_where_nothing_may_come_nothing_does(given: dict[str, Any]) -> None:
    logits = logits_of(2, 100)
    assert sampled(rows_of(logits, allowed=[], **given)).tolist() == [-1, -1]
    assert sampled(rows_of(torch.full((2, 100), -INF), **given)).tolist() == [-1, -1]
    logits[:, 7] = -INF
    assert sampled(rows_of(logits, allowed=[7], **given)).tolist() == [-1, -1]


@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.01}, {"top_k": 9, "top_p": 0.5}])
def test_one_token_that_may_come_comes(given: dict[str, Any]) -> None:
    """The last of a vocabulary that fills no word, and bit 31, which makes a word negative."""
    for vocab, only in ((600, 599), (600, 31), (33, 32)):
        logits = logits_of(2, vocab)
        logits[:, only] = -200.0
        assert sampled(rows_of(logits, allowed=[only], **given)).tolist() == [only] * 2


def test_bits_behind_the_vocabulary_are_no_tokens() -> None:
    arguments = rows_of(torch.full((16, 33), -5.0), allowed=[0])
    arguments["mask"] = torch.full((16, 3), -1, dtype=torch.int32)
    found = sampled(arguments)
    assert int(found.min()) >= 0 and int(found.max()) < 33


def test_equals_are_ordered_by_id() -> None:
    logits = torch.full((10, 1100), 2.0)
    logits[:, :100] = 1.0
    assert set(sampled(rows_of(logits, temperature=0.0)).tolist()) == {100}
    assert set(sampled(rows_of(logits, top_k=3)).tolist()) == {100, 101, 102}
    assert set(sampled(rows_of(logits, top_p=2.5 / 1000)).tolist()) == {100, 101, 102}
    assert set(sampled(rows_of(logits, top_k=4, top_p=0.5)).tolist()) == {100, 101}


def test_minus_zero_is_zero() -> None:
    logits = torch.full((1, 10), -0.0)
    logits[0, 5] = 0.0
    assert sampled(rows_of(logits, temperature=0.0)).tolist() == [0]
    assert set(sampled(rows_of(logits.repeat(12, 1), top_k=2)).tolist()) == {0, 1}


def test_top_p_counts_what_top_k_leaves() -> None:
    """0.4 and 0.3 of four are 0.571 and 0.429 of the two that stay."""
    logits = torch.tensor([0.3, 0.1, 0.4, 0.2]).log().repeat(10, 1)
    assert set(sampled(rows_of(logits, top_k=2, top_p=0.57)).tolist()) == {2}
    assert set(sampled(rows_of(logits, top_k=2, top_p=0.58)).tolist()) == {2, 0}
    assert set(sampled(rows_of(logits, top_p=0.57)).tolist()) == {2, 0}
    assert set(sampled(rows_of(logits, top_p=0.0)).tolist()) == {2}


def test_min_p_is_a_part_of_the_best() -> None:
    logits = torch.tensor([0.3, 0.1, 0.4, 0.2]).log().repeat(10, 1)
    assert set(sampled(rows_of(logits, min_p=0.74)).tolist()) == {2, 0}
    assert set(sampled(rows_of(logits, min_p=0.76)).tolist()) == {2}
    assert set(sampled(rows_of(logits, min_p=1.0)).tolist()) == {2}


def test_far_from_one_another() -> None:
    """Logits of every size: differences that overflow or vanish are no NaN."""
    logits = torch.tensor([[-3e38, 3e38, 0.0, 1e-40], [-3e38, -3e38, -INF, -INF], [0.0, 1e-45, -1e-45, 0.0]])
    for chosen in ({}, {"temperature": 1e-38}, {"temperature": 100.0, "top_k": 2, "top_p": 0.9, "min_p": 0.5}):
        found = sampled(rows_of(logits, **chosen)).tolist()
        assert found[0] == 1 and found[1] in (0, 1) and found[2] >= 0


@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 6), vocab=st.integers(1, 1500), seed=st.integers(-(2**63), 2**63 - 1), data=st.data())
def test_rows_are_alone(rows: int, vocab: int, seed: int, data: st.DataObject) -> None:
    """A row draws the same token alone, in any batch, at any place: settings, seeds and masks are its own."""
    generator = torch.Generator().manual_seed(seed & 0xFFFF)
    logits = logits_of(rows, vocab, seed=seed & 0xFFFF)
    arguments = rows_of(logits, seed=seed, allowed=list(range(0, vocab, 2)))
    arguments["index"] = torch.randint(0, 1 << 20, (rows,), generator=generator, dtype=torch.int32)
    arguments["temperature"] = torch.tensor([0.0, 0.5, 1.0])[torch.randint(0, 3, (rows,), generator=generator)]
    arguments["top_k"] = torch.randint(0, 50, (rows,), generator=generator, dtype=torch.int32)
    arguments["top_p"] = torch.rand(rows, generator=generator)
    arguments["min_p"] = torch.rand(rows, generator=generator) * 0.1
    found = sampled(arguments)
    assert torch.equal(found, sample.reference(**arguments))
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows)))
    arguments["mask"] = arguments["mask"].view(torch.int32)
    assert torch.equal(sampled({name: value[chosen] for name, value in arguments.items()}), found[chosen])


@pytest.mark.parametrize("given", [{}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"top_p": 0.2}])
def test_parts_of_another_size_draw_the_same(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and maxima that do not depend on how a row is cut."""
    arguments = rows_of(logits_of(4, 600), **given)
    found = sampled(arguments)
    monkeypatch.setattr(sample, "_PART", 512)
    monkeypatch.setattr(sample, "_TILE", 128)
    assert torch.equal(sampled(arguments), found)


def test_rows_that_stand_apart_beyond_2_31(sparse: Callable[[int], torch.Tensor]) -> None:
    rows, vocab, stride = 3, 700, 1_200_000_000
    wide = sparse(4 * (2 * stride + vocab)).view(torch.float32)
    logits = wide.as_strided((rows, vocab), (stride, 1))
    logits.copy_(logits_of(rows, vocab))
    assert (rows - 1) * stride > 2**31
    given = {"temperature": 0.8, "top_k": 30, "top_p": 0.9}
    assert torch.equal(sampled(rows_of(logits, **given)), sampled(rows_of(logits_of(rows, vocab), **given)))


def test_refuses_what_it_would_read_wrongly() -> None:
    arguments = rows_of(logits_of(2, 100), top_k=3, allowed=[1])
    for name, bad in (
        ("logits", arguments["logits"].double()),
        ("logits", arguments["logits"].t().contiguous().t()),
        ("mask", arguments["mask"][:, :3]),
        ("temperature", arguments["temperature"].double()),
        ("seed", arguments["seed"].int()),
        ("top_k", arguments["top_k"].long()),
        ("index", arguments["index"][:1]),
    ):
        with pytest.raises(AssertionError):
            sample.sample(**(arguments | {name: bad}))


# The noise.


@triton.jit
def _noise(out_ptr, seed_ptr, index_ptr, count, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    noise = sample._gumbel(tl.load(seed_ptr), tl.load(index_ptr), token)
    tl.store(out_ptr + token, noise, mask=token < count)


def draws(seed: int, index: int, count: int) -> np.ndarray:
    """The numbers u in [0, 1) of tokens 0 to count - 1, SplitMix64 written once more, in numpy."""
    golden = np.uint64(0x9E3779B97F4A7C15)

    def mix(state: np.ndarray) -> np.ndarray:
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))

    key = mix(mix(np.array([seed & (2**64 - 1)], dtype=np.uint64) + golden) ^ np.uint64(index))
    return mix(key + np.arange(1, count + 1, dtype=np.uint64) * golden).astype(np.float64) * 2.0**-64


@pytest.mark.parametrize(
    ("seed", "index"), [(0, 0), (1, 0), (0, 1), (-1, 2**31 - 1), (2**63 - 1, 12345), (-(2**63), 7)]
)
def test_noise_is_gumbel_of_the_stream(seed: int, index: int) -> None:
    count = 1 << 17
    found = torch.full((count,), float("nan"))
    where = torch.tensor([seed]), torch.tensor([index], dtype=torch.int32)
    _noise[(count // 4096,)](found, *where, count, BLOCK=4096)
    waited = -np.log1p(-np.minimum(draws(seed, index, count), 1 - 2.0**-25))
    judge = -np.log(waited)
    # Far on the losing side u is so near to 1 that a float has few bits left for 1 - u = e^-waited.
    allowed = 2e-6 + 2.0**-24 * np.exp(waited) / waited
    assert (np.abs(found.numpy() - judge) < allowed).all()
    few = sample.noise_reference(seed, index, torch.arange(50))
    assert np.abs(few.numpy() - judge[:50]).max() < 1e-12


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    """How far counts are from shares of their sum, in standard deviations of what chance would give."""
    wanted = shares * counts.sum()
    freedom = len(counts) - 1
    return float(((counts - wanted) ** 2 / wanted).sum() - freedom) / (2 * freedom) ** 0.5


def test_noise_is_even_along_tokens_positions_and_seeds() -> None:
    n, bins = 1 << 15, 64
    along = {
        "tokens": draws(3, 5, n),
        "positions": np.array([draws(3, index, 1)[0] for index in range(n // 8)]),
        "seeds": np.array([draws(seed, 5, 1)[0] for seed in range(n // 8)]),
    }
    for name, u in along.items():
        assert abs(chi_square(np.bincount((u * bins).astype(int), minlength=bins), np.full(bins, 1 / bins))) < 4, name
        neighbours = (u[:-1] * 8).astype(int) * 8 + (u[1:] * 8).astype(int)
        assert abs(chi_square(np.bincount(neighbours, minlength=64), np.full(64, 1 / 64))) < 4, name


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}]
)
def test_distribution(given: dict[str, Any]) -> None:
    """2,000 draws of one distribution, shares against what the settings leave. The seed is fixed: it cannot flake."""
    logits = torch.tensor([0.5, -1.0, 2.0, 1.0, 0.0, -2.0, 1.9, -3.0])
    arguments = rows_of(logits.repeat(2000, 1), seed=11, **given)
    found = sample.reference(**arguments)
    few = {name: value if value is None else value[:6] for name, value in arguments.items()}
    assert torch.equal(sampled(few), found[:6])
    counts = np.bincount(found.numpy(), minlength=8)
    weight = np.exp((logits.double().numpy() - 2.0) / given.get("temperature", 1.0))
    order = np.argsort(-weight)
    kept = np.arange(8) < given.get("top_k", 8)
    ranked = weight[order] * kept
    kept &= np.cumsum(ranked) - ranked < given.get("top_p", 1.0) * ranked.sum()
    kept &= weight[order] >= given.get("min_p", 0.0)
    shares = np.zeros(8)
    shares[order[kept]] = weight[order[kept]]
    assert counts[shares == 0].sum() == 0
    assert abs(chi_square(counts[shares > 0], (shares / shares.sum())[shares > 0])) < 3


@pytest.mark.parametrize("vocab", [1 << 17])
def test_many_equal_tokens_are_drawn_evenly(vocab: int) -> None:
    """Where 128k tokens are equal, the noise of the one that is drawn is at the far end of its range."""
    bins, tries = 8, 300
    found = [int(np.argmin(draws(17, index, vocab))) for index in range(tries)]
    counts = np.bincount(np.array(found) * bins // vocab, minlength=bins)
    assert abs(chi_square(counts, np.full(bins, 1 / bins))) < 3
    # The kernel draws the token that this shortcut names.
    assert sampled(rows_of(torch.zeros(1, vocab), seed=17)).tolist() == found[:1]
