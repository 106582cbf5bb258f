"""Fences under test: a grammar against tokens, and random outputs that it lets through."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance import TokenizerWrapper as Wrapper

from tests.unit.dialects.outputs import Token, dialect, said
from zjournal import ask
from zjournal.dialects.fences.build import Built, build

END = 0


class _Bytes:
    """The end token, one token for each byte, and control tokens: what llguidance asks of a tokenizer."""

    eos_token_id, bos_token_id = END, None

    def __init__(self, control: Sequence[str]) -> None:
        self.tokens = [b"<end>", *(bytes([byte]) for byte in range(256)), *(tag.encode() for tag in control)]
        self.special_token_ids = [END, *range(257, len(self.tokens))]

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text]


@functools.cache
def control(name: str) -> dict[str, int]:
    """The dialect's tags that are tokens, with the ids that they have here."""
    tags = [tag for tag, ids in dialect(name).literals.items() if len(ids) == 1]
    return {tag: 257 + at for at, tag in enumerate(tags)}


@functools.cache
def engine(name: str) -> LLTokenizer:
    return LLTokenizer(Wrapper(_Bytes(list(control(name)))))


def fence(
    name: str,
    tools: Sequence[ask.ToolSpec],
    choice: ask.ToolChoice | None = None,
    form: ask.Format | None = None,
    begun: str = "",
) -> Built:
    """The fence under the names' own vocabulary; without a choice a call is required."""
    return _fence(name, tuple(tools), choice, form, begun)


@functools.lru_cache(64)
def _fence(
    name: str, tools: tuple[ask.ToolSpec, ...], choice: ask.ToolChoice | None, form: ask.Format | None, begun: str
) -> Built:
    return build(tools, choice or ask.ToolChoice("required"), form, dialect(name), control(name), begun)


@functools.lru_cache(64)
def matcher(name: str, grammar: str) -> LLMatcher:
    found = LLMatcher(engine(name), grammar, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def ids(name: str, tokens: Sequence[Token]) -> list[int]:
    tags = {tag.encode(): i for tag, i in control(name).items()}
    return [i for data, special in tokens for i in ([tags[data]] if special else [byte + 1 for byte in data])]


def accepts(name: str, built: Built, text: str | Sequence[Token]) -> bool:
    """Whether the whole text, tags as tokens where they are, is what the fence lets through."""
    assert built.bounds is not None
    tokens = said(dialect(name), text) if isinstance(text, str) else text
    wanted = ids(name, tokens)
    one = matcher(name, built.bounds.grammar).deep_copy()
    return one.try_consume_tokens(wanted) == len(wanted) and one.is_accepting()


def walk(name: str, built: Built, seed: int, most: int = 3000) -> list[Token] | None:
    """A random output that the fence lets through; None if it did not end within `most` tokens."""
    assert built.bounds is not None
    one = matcher(name, built.bounds.grammar).deep_copy()
    chosen, out = random.Random(seed), list[int]()
    hasty = [byte + 1 for byte in b'"}]</\n,:']
    while len(out) < most:
        mask = int.from_bytes(one.compute_bitmask(), "little")
        legal = [i for i, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]
        assert legal, one.get_error()
        assert (END in legal) == one.is_accepting()
        if END in legal and (legal == [END] or chosen.random() < 0.3):
            return tokens_of(name, out)
        legal = [i for i in legal if i != END]
        # Tags and what closes come more often than by chance, above all once it has become long.
        ready = [i for i in legal if i > 256] or [i for i in legal if i in hasty]
        picked = chosen.choice(ready if ready and chosen.random() < (0.2 if len(out) < 100 else 0.8) else legal)
        assert one.consume_token(picked), one.get_error()
        out.append(picked)
    return None


def engine_tokens(name: str) -> list[bytes]:
    return [b"", *(bytes([byte]) for byte in range(256)), *(tag.encode() for tag in control(name))]


def tokens_of(name: str, chosen: Sequence[int]) -> list[Token]:
    texts = engine_tokens(name)
    return [(texts[i], i > 256) for i in chosen]


def tool(name: str, parameters: Any, strict: bool = False, path: str = "tools[0]") -> ask.ToolSpec:
    return ask.ToolSpec(name, None, json.dumps(parameters).encode(), path, strict)
