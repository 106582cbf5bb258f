"""The frequencies of every scaling against transformers' own functions, the override, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from zjournal.checkpoint.decoder import CONTEXT_MAX, Decoder, Model, Rope, Spelling, check, context_limit, override
from zjournal.engine.models import rope
from zjournal.errors import ConfigFault, ModelFault

DECODER = Decoder(
    family="llama",
    layers=2,
    hidden=64,
    ffn=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=100,
    context=8192,
    eps=1e-5,
    rope=Rope(dim=16, base=1e5),
    scale=0.25,
)
MODEL = Model(DECODER, Spelling(embed="e", out_norm="n", head="h", layer={}, rope_factors="f"))


def theirs(told: Rope) -> tuple[np.ndarray, float]:
    names = {
        "factor": told.factor,
        "original_max_position_embeddings": told.original,
        "low_freq_factor": told.low,
        "high_freq_factor": told.high,
        "beta_fast": told.beta_fast,
        "beta_slow": told.beta_slow,
        "truncate": told.truncate,
        "attention_factor": told.amplitude,
    }
    parameters = {"rope_type": told.kind, "rope_theta": told.base, **{k: v for k, v in names.items() if v is not None}}
    config = LlamaConfig(hidden_size=told.dim, num_attention_heads=1, head_dim=told.dim)
    config.rope_parameters = parameters
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[told.kind](config, torch.device("cpu"))
    return frequencies.numpy(), amplitude


@given(
    st.sampled_from(["linear", "llama3", "yarn"]),
    st.integers(4, 64),
    st.floats(100, 1e7),
    st.floats(1, 40),
    st.integers(32, 1 << 17),
    st.booleans(),
)
def test_frequencies_are_those_of_transformers(kind, half, base, factor, original, truncate) -> None:
    told = Rope(dim=2 * half, base=base, kind=kind, factor=factor, original=original, truncate=truncate)
    expected, amplitude = theirs(told)
    np.testing.assert_allclose(rope.frequencies(told), expected, rtol=2e-5)
    assert math.isclose(rope.amplitude(told), amplitude, rel_tol=1e-6)


def test_tables_are_of_the_frequencies_and_the_amplitude() -> None:
    told = Rope(dim=32, base=1e6, kind="yarn", factor=4, original=32768)
    cos, sin = rope.tables(told, 100)
    frequencies, amplitude = theirs(told)
    angles = np.arange(100)[:, None] * frequencies.astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles) * amplitude, atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(angles) * amplitude, atol=1e-5)
    assert rope.amplitude(msgspec.structs.replace(told, amplitude=0.5)) == 0.5


def test_an_override_takes_the_place_of_the_scaling() -> None:
    linear = override(MODEL, "linear:2").decoder
    assert (linear.rope.kind, linear.rope.factor, linear.rope.base) == ("linear", 2, 1e5)
    assert linear.context == context_limit(linear) == 16384
    yarn = override(MODEL, "yarn:4").decoder
    assert (yarn.rope.kind, yarn.rope.original, yarn.context) == ("yarn", 8192, 32768)
    base = override(MODEL, "base:500000").decoder
    assert (base.rope.kind, base.rope.base, base.context, context_limit(base)) == ("default", 500000, 8192, CONTEXT_MAX)
    both = override(MODEL, "yarn:1.5, base:1e6").decoder
    assert (both.rope.kind, both.rope.base, both.context) == ("yarn", 1e6, 12288)
    assert override(MODEL, "") is MODEL
    assert override(MODEL, "base:1e6").spelling.rope_factors == ""
    again = override(Model(yarn, MODEL.spelling), "linear:2").decoder
    assert again.context == 16384  # of the context before YaRN
    check(both, Path("x"))


@pytest.mark.parametrize(
    "text",
    ["linear", "linear:0", "linear:-1", "linear:0.5", "yarn:1e9", "ntk:2", "base:0", "base:1", "linear:2,yarn:2"],
)
def test_what_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        override(MODEL, text)
    assert caught.value.param == "rope"
    assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    "changed",
    [
        {"base": 0.0},
        {"kind": "linear", "factor": 0.5},
        {"kind": "yarn", "factor": 2.0},
        {"kind": "llama3", "factor": 2.0, "original": 100, "low": 4.0, "high": 1.0},
        {"kind": "yarn", "factor": 2.0, "original": 100, "beta_fast": 0.5},
        {"dim": 15},
    ],
)
def test_an_impossible_rope_is_a_fault(changed: dict) -> None:
    with pytest.raises(ModelFault, match="somewhere: "):
        check(
            msgspec.structs.replace(DECODER, rope=msgspec.structs.replace(DECODER.rope, **changed)), Path("somewhere")
        )
