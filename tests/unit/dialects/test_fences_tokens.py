"""Fences under a real vocabulary, whose tokens begin and end anywhere: the default model's, with tags as tokens too."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests import smollm2
from tests.unit.dialects.outputs import Token, dialect
from tests.unit.dialects.test_fences import CITY, NAMES, ODD, TOOLS, rendered
from zjournal import ask
from zjournal.dialects.fences.build import build
from zjournal.engine.decoding.vocabulary import Vocabulary

TAGS = sorted({tag for name in NAMES for tag, ids in dialect(name).literals.items() if len(ids) == 1})


@functools.cache
def control() -> Mapping[str, int]:
    own = smollm2.tokenizer()
    return {**own.control, **{tag: own.vocab_size + at for at, tag in enumerate(TAGS)}}


@functools.cache
def vocabulary() -> Vocabulary:
    own = smollm2.tokenizer()
    tokens = [*(own.token_bytes(i) for i in range(own.vocab_size)), *(tag.encode() for tag in TAGS)]
    return Vocabulary(tokens, set(control().values()), len(tokens), own.encode)


def ids(tokens: Sequence[Token]) -> list[int]:
    """Text between tags is encoded in one piece, as models are trained on it."""
    out: list[int] = []
    text = b""
    for data, special in tokens:
        if special:
            out += [*smollm2.tokenizer().encode(text.decode()), control()[data.decode()]]
            text = b""
        else:
            text += data
    return out + smollm2.tokenizer().encode(text.decode())


@pytest.mark.parametrize("name", NAMES)
def test_merged_tokens_are_let_through(name: str) -> None:
    tags = {tag: control()[tag] for tag, found in dialect(name).literals.items() if len(found) == 1}
    bounds = build(TOOLS, ask.ToolChoice("required"), None, dialect(name), tags).bounds
    assert bounds is not None
    prototype = vocabulary().compile(bounds.grammar)
    cases: list[tuple[list[tuple[str, Any]], bool]] = [
        ([("get_weather", CITY)], True),
        ([("get_weather", {"unit": "celsius", "city": ODD})], True),
        ([("get_weather", {"city": "", "unit": "celsius", "opts": {"note": 'x "y" <z', "tags": ["</", ""]}})], True),
        ([("noop", {}), ("tree", {"root": {"v": 1, "kids": [{"v": 2}]}}), ("noop", {})], True),
        ([("get_weather", {"unit": "celsius"})], False),
        ([("get_weather", {**CITY, "other": "x"})], False),
        ([("get_weathers", CITY)], False),
    ]
    for calls, right in cases:
        matcher, wanted = prototype.deep_copy(), ids(rendered(name, *calls))
        through = matcher.try_consume_tokens(wanted) == len(wanted) and matcher.is_accepting()
        assert through == right, calls
