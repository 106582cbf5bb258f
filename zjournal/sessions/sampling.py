"""How a turn is sampled: from what was asked to what is recorded, and from the record to what the engine is sent.

So a turn that is asked again, from the journal alone, is asked with the same settings. The biases stay in the recorded
body, as stop strings do, and go with it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from zjournal import ask, loops
from zjournal.journal.events import RequestAccepted
from zjournal.link import wire


class _Biased(msgspec.Struct):
    """The biases in a recorded body, whatever else is in it."""

    logit_bias: dict[int, float] | None = None


_PLAIN = ask.Sampling()
_CHANGED = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "logprobs")
_decode_biased = msgspec.json.Decoder(_Biased).decode


def recorded(sampling: ask.Sampling, seed: int) -> dict[str, Any]:
    """The fields of RequestAccepted that hold the settings; `seed` is the one drawn where the client sent none.

    Without those that change nothing: they take no room in the journal.
    """
    changed = {name: getattr(sampling, name) for name in _CHANGED if getattr(sampling, name) != getattr(_PLAIN, name)}
    if sampling.logit_bias:
        changed["logit_bias"] = len(sampling.logit_bias)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed if sampling.seed is None else sampling.seed,
        **changed,
    }


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice of a request with this seed. Choice 0 has it as it is, as if it were alone.

    The others' are 63 bits of SHA-256("choice", seed, choice), in decimal, with a zero byte between them: whoever asks
    for one choice with this seed gets what that choice was.
    """
    if not choice:
        return seed
    digest = hashlib.sha256(f"choice\0{seed}\0{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def sent(accepted: RequestAccepted, logit_bias: tuple[tuple[int, float], ...]) -> wire.Sampling:
    """The settings of a turn for the engine; `logit_bias` as the body of the turn has it."""
    assert len(logit_bias) == accepted.logit_bias, (len(logit_bias), accepted.logit_bias)
    return wire.Sampling(
        temperature=accepted.temperature,
        top_p=accepted.top_p,
        top_k=accepted.top_k,
        seed=accepted.seed,
        min_p=accepted.min_p,
        repetition_penalty=accepted.repetition_penalty,
        presence_penalty=accepted.presence_penalty,
        frequency_penalty=accepted.frequency_penalty,
        logit_bias=logit_bias,
        min_tokens=accepted.min_tokens,
        logprobs=accepted.logprobs,
    )


def guarded(accepted: RequestAccepted) -> wire.Guard | None:
    """The limits of the guard of a turn for the engine; None: it was off."""
    return wire.Guard(*accepted.guard) if accepted.guard else None


def logit_bias(raw: bytes) -> tuple[tuple[int, float], ...]:
    """The biases of a recorded body, by token id. Raises msgspec.MsgspecError for what no protocol accepts."""
    return tuple(sorted((_decode_biased(raw).logit_bias or {}).items()))


def wrong(accepted: RequestAccepted) -> str | None:
    """The name of a setting in a foreign record that is out of its range."""
    for name, (least, most) in ask.RANGES.items():
        if not least <= getattr(accepted, name) <= most:
            return name
    if not loops.fit(accepted.guard):
        return "guard"
    return "logit_bias" if not 0 <= accepted.logit_bias <= ask.LOGIT_BIAS_MAX else None
