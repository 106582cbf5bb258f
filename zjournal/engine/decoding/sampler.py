"""From one row of logits to a token: a pure function of logits, settings, seed, position and the tokens so far.

The order is fixed: logit_bias, repetition_penalty, frequency and presence penalty, min_tokens, what fence and guard
allow; then temperature, top_k, top_p, min_p. The first five change logits, and what they leave is what greedy takes;
the last four choose among probabilities, as in the transformers library. Equal values are ordered by token id, lowest
first.

The noise is counter-based: it is a hash of the seed and the position and keeps no state, so a row draws the same
token alone, in any batch, behind any number of drafts, and when it is generated again after a restart.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from zjournal.link import wire

ALTERNATIVES_MAX = 20  # logprobs told beside that of the token itself
_MASK = (1 << 64) - 1
_CANDIDATES = 256  # how many of the best top_p looks at first
_LEAST = float(np.finfo(np.float32).min)
_NO_IDS = np.empty(0, dtype=np.uint32)
_RUN = 256  # weights that are summed at once: a running sum of the whole vocabulary takes ten times as long
_FEW = 8  # where a mask leaves less than an eighth, only those are looked at


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that belongs to `seed` and output position `index`. 53 bits of two splitmix64 rounds."""
    return (_mix(_mix(seed & _MASK) ^ (index & _MASK)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014), with its increment."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def choose(
    logits: np.ndarray,
    sampling: wire.Sampling,
    index: int,
    ids: np.ndarray = _NO_IDS,
    prompt: int = 0,
    end_tokens: Collection[int] = (),
    allowed: np.ndarray | None = None,
    banned: Collection[int] = (),
) -> int | None:
    """The token for output position `index`. `logits`: fp32 [vocab]. None if they are not numbers.

    `ids` are all tokens before it, [prompt + index], the first `prompt` of them the prompt; only penalties look.
    `end_tokens` cannot come before `sampling.min_tokens`. `allowed`: a bit for each token that may come, uint32
    [vocab / 32 or more]; `banned` may not. None as well where nothing is left.
    """
    best = int(np.argmax(logits))  # the first of equals, or of NaN
    if not np.isfinite(logits[best]):  # before what follows may hide it
        return None
    scores = adjusted(logits, sampling, index, ids, prompt, end_tokens)
    if scores is not logits:
        best = int(np.argmax(scores))
    if allowed is None and not banned:
        return _drawn(scores, best, None, sampling, index)
    legal = _legal(allowed, banned, len(scores))
    if int(np.count_nonzero(legal)) * _FEW < len(scores):
        few = np.flatnonzero(legal)
        at = _drawn(scores[few], int(np.argmax(scores[few])), None, sampling, index) if len(few) else None
        return int(few[at]) if at is not None else None
    if not legal[best]:
        scores = np.where(legal, scores, -np.inf)
        best = int(np.argmax(scores))
    return _drawn(scores, best, legal, sampling, index)


def _legal(allowed: np.ndarray | None, banned: Collection[int], width: int) -> np.ndarray:
    """What may come, bool [width]."""
    if allowed is None:
        legal = np.ones(width, dtype=bool)
    else:
        legal = np.unpackbits(allowed.view(np.uint8), count=width, bitorder="little").view(bool)
    if banned:
        legal[list(banned)] = False
    return legal


def _drawn(scores: np.ndarray, best: int, legal: np.ndarray | None, sampling: wire.Sampling, index: int) -> int | None:
    """Which of the scores is chosen; None where none is finite. `best` is the first of the greatest that are legal."""
    if not np.isfinite(scores[best]):
        return None
    if sampling.temperature == 0 or sampling.top_k == 1:
        return best
    weight = scores.astype(np.float64)  # and in place: new memory for each step costs more than the steps
    weight -= float(scores[best])
    with np.errstate(over="ignore"):  # far below the best, at a temperature near 0, is nothing at all
        weight /= sampling.temperature
        np.exp(weight, out=weight)
    if legal is not None:
        weight[np.flatnonzero(~legal)] = 0
    noise = uniform(sampling.seed, index)
    if sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.min_p <= 0:
        return _pick(weight, noise)
    if sampling.top_k <= 0 and sampling.top_p >= 1:
        kept = np.flatnonzero(weight >= sampling.min_p)  # the best one weighs 1
    else:
        kept = _candidates(weight, sampling.top_k, sampling.top_p)
        kept = kept[weight[kept] >= sampling.min_p]
    return int(kept[_pick(weight[kept], noise)])


def adjusted(
    logits: np.ndarray,
    sampling: wire.Sampling,
    index: int,
    ids: np.ndarray = _NO_IDS,
    prompt: int = 0,
    end_tokens: Collection[int] = (),
) -> np.ndarray:
    """The logits that temperature and the rest see: as they came, or changed ones in float64. See choose."""
    repeats = sampling.repetition_penalty != 1
    counts = _counts(sampling)
    masks = index < sampling.min_tokens and bool(end_tokens)
    if not (sampling.logit_bias or repeats or counts or masks):
        return logits
    assert not (repeats or counts) or len(ids) == prompt + index, (len(ids), prompt, index)
    scores = logits.astype(np.float64)
    if sampling.logit_bias:
        biased, bias = zip(*sampling.logit_bias, strict=True)
        np.add.at(scores, list(biased), bias)
    if repeats:
        seen = np.zeros(len(scores), dtype=bool)
        seen[ids] = True  # a scatter, where sorting a long prompt at each token would cost milliseconds
        held = scores[seen]
        scores[seen] = np.where(held < 0, held * sampling.repetition_penalty, held / sampling.repetition_penalty)
    if counts:
        count = np.bincount(ids[prompt:], minlength=len(scores))
        said = count > 0
        scores[said] -= count[said] * sampling.frequency_penalty + sampling.presence_penalty
    if masks:
        scores[list(end_tokens)] = -np.inf
    return scores


def changes(sampling: wire.Sampling) -> bool:
    """Whether the logits may be changed before the draw; see `adjusted`."""
    return bool(sampling.logit_bias) or sampling.min_tokens > 0 or looks_back(sampling)


def looks_back(sampling: wire.Sampling) -> bool:
    """Whether the tokens so far matter."""
    return sampling.repetition_penalty != 1 or _counts(sampling)


def _counts(sampling: wire.Sampling) -> bool:
    return sampling.frequency_penalty != 0 or sampling.presence_penalty != 0


def logprobs(logits: np.ndarray, token: int, alternatives: int) -> bytes:
    """The logprob of `token` and the best `alternatives`, packed as in wire.Tokens. `logits`: fp32 [vocab].

    They are the model's own, the log-softmax of the logits as they came: before bias, penalties and temperature.
    """
    assert 0 <= alternatives <= ALTERNATIVES_MAX, alternatives
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    scores = np.maximum(scores, _LEAST)  # a masked token's is -inf, which no JSON can tell
    best = _best(scores, alternatives) if alternatives else _NO_IDS
    return wire.pack_logprobs(float(scores[token]), [(int(other), float(scores[other])) for other in best])


def has_best(logits: np.ndarray) -> bool:
    """Whether the logits are numbers, as far as the best one tells."""
    return bool(np.isfinite(logits[int(np.argmax(logits))]))  # argmax finds the first NaN if there is one


def _candidates(weight: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The ids that remain, best first: at most top_k, then the fewest whose share of their sum reaches top_p."""
    limit = min(top_k, len(weight)) if top_k > 0 else len(weight)
    if top_p >= 1:
        return _best(weight, limit)
    total = float(weight.sum()) if limit == len(weight) else float(weight[_best(weight, limit)].sum())
    count = min(_CANDIDATES, limit)
    while True:
        ids = _best(weight, count)
        reached = np.cumsum(weight[ids]) >= top_p * total
        if reached.any() or count == limit:
            return ids[: int(np.argmax(reached)) + 1] if reached.any() else ids
        count = min(count * 8, limit)


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest, best first, equals by id."""
    if count < len(values):
        least = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= least)
    else:
        ids = np.arange(len(values))
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def _pick(weight: np.ndarray, noise: float) -> int:
    """Inverts the cumulative distribution: which weight, fp64 [any], the share `noise` of their sum falls on."""
    runs = np.cumsum(np.add.reduceat(weight, np.arange(0, len(weight), _RUN)))
    target = noise * runs[-1]
    run = _first_above(runs, target)
    before = float(runs[run - 1]) if run else 0.0
    start = run * _RUN
    part = weight[start : start + _RUN]
    return start + _first_above(np.cumsum(part), target - before)


def _first_above(cumulative: np.ndarray, target: float) -> int:
    """The first that is greater. Rounding can make the target reach the last one; then the first that has it."""
    at = int(np.searchsorted(cumulative, target, side="right"))
    return at if at < len(cumulative) else int(np.searchsorted(cumulative, cumulative[-1]))
