"""From one row of logits to a token: a pure function of logits, settings, seed and output position.

The noise is counter-based: it is a hash of the seed and the position and keeps no state, so a row draws the same
token alone, in any batch, and when it is generated again after a restart. Order: temperature, then top_k, then
top_p, as in the transformers library. Equal values are ordered by token id, lowest first.
"""

from __future__ import annotations

import numpy as np

from zjournal.link import wire

_MASK = (1 << 64) - 1
_CANDIDATES = 256  # how many of the best top_p looks at first


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that belongs to `seed` and output position `index`. 53 bits of two splitmix64 rounds."""
    return (_mix(_mix(seed & _MASK) ^ (index & _MASK)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014), with its increment."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def choose(logits: np.ndarray, sampling: wire.Sampling, index: int) -> int | None:
    """The token for output position `index`. `logits`: fp32 [vocab]. None if they are not numbers."""
    best = int(np.argmax(logits))  # the first of equals, and the first NaN if there is one
    if not np.isfinite(logits[best]):
        return None
    if sampling.temperature == 0 or sampling.top_k == 1:
        return best
    scaled = (logits.astype(np.float64) - float(logits[best])) / sampling.temperature
    weight = np.exp(scaled)
    noise = uniform(sampling.seed, index)
    if sampling.top_k <= 0 and sampling.top_p >= 1:
        return _pick(np.arange(len(weight)), weight, noise)
    ids = _candidates(weight, sampling.top_k, sampling.top_p)
    return _pick(ids, weight[ids], noise)


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


def _best(weight: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest, best first, equals by id."""
    if count < len(weight):
        least = np.partition(weight, len(weight) - count)[len(weight) - count]
        ids = np.flatnonzero(weight >= least)
    else:
        ids = np.arange(len(weight))
    return ids[np.argsort(-weight[ids], kind="stable")][:count]


def _pick(ids: np.ndarray, weight: np.ndarray, noise: float) -> int:
    """Inverts the cumulative distribution."""
    cumulative = np.cumsum(weight)
    at = int(np.searchsorted(cumulative, noise * cumulative[-1], side="right"))
    # Rounding can make the product reach the sum; then the last id that has any weight is meant.
    return int(ids[at if at < len(ids) else int(np.flatnonzero(weight)[-1])])
