"""A model's tokens as fences need them: their bytes, which of them continue a text, and the library's own tokenizer.

Made once for each engine. Control tokens can only be named, no text matches them. Ids that the logits have and the
tokenizer does not (padding) are never legal. The end of a grammar is a token of our own behind all others: so a
request may have any end tokens, and none of them means anything to a grammar.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from zjournal.errors import FenceFailed

LEXER_STATES_MAX = 50_000  # of one grammar; some 2 kB each
GRAMMAR_SYMBOLS_MAX = 500_000
STEP_FUEL = 2_000_000  # of one mask, some 10 ms; a bounded text that ends with a tag needs 230,000 and more
# Texts whose tokens the library marks at once where a grammar takes all of such a text; each is tried in this order.
# Its own ones know JSON strings; values here end at a `<` as well, and those of XML hold quotes (docs/log.md).
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    r"""[^"\\<\x00-\x1F\x7F]{1,10}""",
    r"""[^"\\<\x00-\x1F\x7F]{1,30}""",
    r"""[^"\\<\x00-\x1F\x7F]+""",
    r"[^<]{1,30}",
    r"[^<]+",
    r"""[^"\\\x00-\x1F\x7F]+""",
)
_LIMIT = re.compile(r"[a-z]+ error: too (many|big|large|complex)[a-z ]*|[a-z ]*\bfuel\b[a-z ]*", re.IGNORECASE)
_END = b"<|the end of the grammar|>"


class Vocabulary:
    """`width` ids, of which the first are `tokens`. A mask is a row of `words` uint32 with one bit for each id."""

    def __init__(
        self, tokens: Sequence[bytes], control: Collection[int], width: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        """`control`: ids of control tokens. `width`: of the logits. `encode`: the ids of a text, never a control token.

        Takes a tenth of a second and more, and holds the interpreter's lock.
        """
        assert 0 < len(tokens) <= width, (len(tokens), width)
        self.tokens = tokens
        self.control = frozenset(control)
        self.width = width
        self.end = width
        self.words = width // 32 + 1
        self.padding = tuple(i for i, token in enumerate(tokens) if not token) + tuple(range(len(tokens), width))
        wrapper = cast(TokenizerWrapper, _Wrapper(tokens, self.control, width, encode))  # it asks for no more
        self._tokenizer = LLTokenizer(wrapper, slices=list(SLICES))
        assert self._tokenizer.vocab_size == width + 1, self._tokenizer.vocab_size

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher that stands at the grammar's beginning. Raises FenceFailed; the grammar is not quoted."""
        limits = LLParserLimits(
            verbose_errors=False,
            max_lexer_states=LEXER_STATES_MAX,
            max_grammar_size=GRAMMAR_SYMBOLS_MAX,
            step_lexer_fuel=STEP_FUEL,
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise FenceFailed("The grammar of what may be answered cannot be compiled.")
        if not self.mask(matcher).any():
            raise FenceFailed("The grammar of what may be answered allows no answer at all.")
        return matcher

    def nothing(self) -> np.ndarray:
        """A mask that allows no token, uint32 [words]."""
        return np.zeros(self.words, dtype=np.uint32)

    def mask(self, matcher: LLMatcher) -> np.ndarray:
        """What the matcher takes next, uint32 [words]; the bit `end` says that it may end. Raises FenceFailed."""
        row = np.empty(self.words, dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise broken(matcher)
        return row

    def spelled(self, data: bytes) -> list[int] | None:
        """Ordinary tokens whose bytes are `data`; None if there are none. How it is cut means nothing to a matcher."""
        ids = self._tokenizer.tokenize_bytes(data)
        fits = b"".join(self.tokens[i] for i in ids) == data and self.control.isdisjoint(ids)
        return ids if fits else None

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        order = sorted((token.lower(), i) for i, token in enumerate(self.tokens) if token)
        return [token for token, _ in order], [i for _, i in order]

    def beginning(self, data: bytes) -> list[int]:
        """The tokens that begin with `data`, whatever the case of its letters; `data` itself is one."""
        texts, ids = self._sorted
        data = data.lower()
        at = end = bisect_left(texts, data)
        while end < len(texts) and texts[end].startswith(data):
            end += 1
        return ids[at:end]

    def within(self, data: bytes) -> list[int]:
        """The tokens that `data` begins with, itself included, whatever the case."""
        texts, ids = self._sorted
        data = data.lower()
        found: list[int] = []
        for length in range(1, len(data) + 1):
            at = bisect_left(texts, data[:length])
            while at < len(texts) and texts[at] == data[:length]:
                found.append(ids[at])
                at += 1
        return found

    def containing(self, data: bytes) -> list[int]:
        """The tokens that have `data` in them, whatever the case."""
        data = data.lower()
        texts, ids = self._sorted
        return [i for i, token in zip(ids, texts, strict=True) if data in token]


class _Wrapper:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], control: Collection[int], width: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self._encode = encode
        self._known = tokens
        self.tokens = [*tokens, *([b""] * (width - len(tokens))), _END]
        self.eos_token_id = width
        self.special_token_ids = [*control, width]

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text. Where the tokenizer changes it (NFC) or lacks a byte, the longest tokens that spell it."""
        data = text.encode() if isinstance(text, str) else text
        try:
            ids = list(self._encode(data.decode()))
        except UnicodeDecodeError:
            return self._longest(data)
        return ids if b"".join(self._known[i] for i in ids) == data else self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        ids: list[int] = []
        while data:
            length = next((n for n in range(min(len(data), self._length), 0, -1) if data[:n] in self._ids), 0)
            if not length:  # no token has this byte: nothing spells the rest
                break
            ids.append(self._ids[data[:length]])
            data = data[length:]
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {token: i for i, token in enumerate(self._known) if token and i not in special}

    @cached_property
    def _length(self) -> int:
        return max(map(len, self._ids), default=0)


def broken(matcher: LLMatcher) -> FenceFailed:
    """The fault of a grammar that cannot go on: which limit it is, in the library's words, and nothing of the grammar.

    For the fault stays in the journal when its request is deleted.
    """
    found = _LIMIT.search(matcher.get_error())
    why = found.group().strip() if found is not None else str(matcher.stop_reason())
    return FenceFailed(f"The grammar of what may be answered broke off: {why}.")


def has(row: np.ndarray, token: int) -> bool:
    """Whether a mask has the token's bit."""
    return bool(int(row[token >> 5]) >> (token & 31) & 1)


def put(row: np.ndarray, tokens: Collection[int], on: bool = True) -> None:
    """Sets or clears the tokens' bits in a mask."""
    for token in tokens:
        bit = np.uint32(1 << (token & 31))
        row[token >> 5] = row[token >> 5] | bit if on else row[token >> 5] & ~bit


def count(row: np.ndarray) -> int:
    """How many tokens a mask allows."""
    return int(np.unpackbits(row.view(np.uint8)).sum())
