"""What a regular expression would cost the engine, tried before it becomes part of a fence.

Engines make the states of an expression as texts need them. `a.{40}b` remembers where each `a` stood: its states double
with each character, no limit ends that but the engine's own, and that one ends the answer. So a fixed number of
steps is walked through each expression here, by texts that are bad for it, with half of what the engine may use.
"""

from __future__ import annotations

import itertools
import random
import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

STATES_MAX = 25_000  # half of what the engine has for all of a grammar (engine/decoding/vocabulary.py)
STEP_FUEL = 2_000_000  # as the engine's
STEPS = 120  # of all walks, each of a word or a byte
WALK = 24  # steps of one: behind what is found anywhere in a text, nothing more is to be seen
REPEATS_MAX = 2_000  # written in one expression: with 20,000 each step takes a second, which the engine does not count
WORD_MAX = 8  # letters
PATTERNS_MAX = 512  # different ones of a request
DEAR_MAX = 4  # of a request that cost too much; each takes up to two seconds to find out
ERROR_CHARACTERS_MAX = 200
SHORT_MAX = 24  # characters of a pattern that counts nothing: it has no more than some thousand states

_REPEATS = re.compile(r"[?*+{]")
_NO_LETTERS = re.compile(r"\\.|\(\?[a-zA-Z-]*:?|\{[0-9, ]*\}", re.DOTALL)  # escapes, flags, counts


class Costs:
    """The patterns of one request, each tried once."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._dear = 0

    def fault(self, pattern: str) -> str:
        """Why a pattern of JSON Schema cannot be kept, as half a sentence; "" if it can.

        What the engine cannot read at all is found elsewhere.
        """
        if len(pattern) <= SHORT_MAX and "{" not in pattern:
            return ""
        if pattern not in self._known:
            if self._dear >= DEAR_MAX:
                return f"stands behind {DEAR_MAX} patterns that would cost too much, and was not tried"
            if len(self._known) >= PATTERNS_MAX:
                return f"stands behind {PATTERNS_MAX} other patterns, and was not tried"
            error = tried(LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern}), pattern)
            self._dear += bool(error)
            self._known[pattern] = f"would cost the grammar engine too much ({error})" if error else ""
        return self._known[pattern]


def tried(grammar: str, text: str) -> str:
    """Walks through a grammar; what the engine says where it breaks off, "" if it does not, or cannot read it at all.

    `text` is what the client wrote: its letters are those that its states tell apart.
    """
    if len(_REPEATS.findall(text)) > REPEATS_MAX:
        return f"more than {REPEATS_MAX} repetitions"
    words = _words(text)
    tokenizer = LLTokenizer(TokenizerWrapper(_Words(words)), slices=[])
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=STATES_MAX, step_lexer_fuel=STEP_FUEL)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return ""
    chance = random.Random(0)  # the same walk each time: a fence is derived again by a replay
    for step in range(1, STEPS + 1):
        legal = int.from_bytes(matcher.compute_bitmask(), "little") & ~1
        token = _chosen(legal, len(words), chance) if not matcher.is_error() else 0
        if token:
            matcher.consume_token(token)
        if matcher.is_error():
            said = matcher.get_error().strip().partition("\n")[0][:ERROR_CHARACTERS_MAX]
            return said if "error" in said else ""  # else it is that nothing is of the grammar, or nothing more
        if not token or matcher.is_stopped() or step % WALK == 0:
            matcher.reset()
    return ""


def _chosen(legal: int, words: int, chance: random.Random) -> int:
    """A token that may come, mostly a word; 0: none may."""
    for _ in range(8):
        token = chance.randrange(257, 257 + words)
        if legal >> token & 1:
            return token
    found = [token for token in range(1, 257 + words) if legal >> token & 1]
    printed = [token for token in found if 33 <= token < 128]
    return chance.choice(printed or found) if found else 0


def _words(text: str) -> list[bytes]:
    """Words of two letters of the text; and of one of them with a digit that it has not, or with spaces.

    Letters, for texts are made of them: what only many colons would make dear is kept.
    """
    plain = _NO_LETTERS.sub("", text)
    letters = [c for c in dict.fromkeys(plain) if c.isascii() and c.isalnum()][:2]
    other = next(c for c in "789" if c not in letters)
    letters += [c for c in "az" if c not in letters][: 2 - len(letters)]
    pairs = [letters[0] + second for second in (letters[1], other, " ")]
    lengths = range(2, WORD_MAX + 1)
    found = ("".join(word) for pair in pairs for n in lengths for word in itertools.product(pair, repeat=n))
    return [word.encode() for word in dict.fromkeys(found)]


class _Words:
    """A vocabulary of all bytes and some words: byte b is the token b + 1."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)

    def __init__(self, words: list[bytes]) -> None:
        self.tokens = (b"<end>", *(bytes([byte]) for byte in range(256)), *words)

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text]
