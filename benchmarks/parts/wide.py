"""A vocabulary as wide as those of large models: the demo model's tokens, and the pairs of them that code has most.

Made here, so that no other model has to be at hand. A text is cut as the demo model cuts it, then neighbours that are
one token of the wide vocabulary are joined, from left to right.
"""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from zjournal.checkpoint.tokenizer import Tokenizer

WIDTH = 129_280  # of DeepSeek's models
TEXT_BYTES_MAX = 24_000_000  # of source files that lie here
PIECE_CHARACTERS = 20_000


class Wide:
    """The tokens by id, and how a text is cut into them."""

    def __init__(self, narrow: Tokenizer, width: int = WIDTH) -> None:
        self._narrow = narrow
        control = set(narrow.control.values())
        found: Counter[tuple[int, int]] = Counter()
        for text in _texts():
            ids = narrow.encode_unkept(text)
            found.update(itertools.pairwise(ids))
        self.tokens = [narrow.token_bytes(token) for token in range(narrow.vocab_size)]
        known = set(self.tokens)
        self._joined: dict[tuple[int, int], int] = {}
        for pair, _ in found.most_common():
            if len(self.tokens) == width:
                break
            token = self.tokens[pair[0]] + self.tokens[pair[1]]
            if token not in known and control.isdisjoint(pair):
                known.add(token)
                self._joined[pair] = len(self.tokens)
                self.tokens.append(token)
        assert len(self.tokens) == width, f"only {len(self.tokens)} tokens: there is little text here"

    def encode(self, text: str) -> list[int]:
        """The ids of a text; never a control token."""
        return self.join(self._narrow.encode_unkept(text))

    def join(self, ids: list[int]) -> list[int]:
        """Narrow ids as wide ones."""
        joined: list[int] = []
        at = 0
        while at < len(ids):
            pair = self._joined.get((ids[at], ids[at + 1])) if at + 1 < len(ids) else None
            joined.append(ids[at] if pair is None else pair)
            at += 1 if pair is None else 2
        return joined


def _texts() -> Iterator[str]:
    """Source files: Python's own, then those of installed packages, as far as they are needed."""
    left = TEXT_BYTES_MAX
    for root in (Path(os.__file__).parent, Path(sysconfig.get_path("purelib"))):
        for path in sorted(root.rglob("*.py")):
            if left <= 0:
                return
            if root.name == "site-packages" or "site-packages" not in path.parts:
                text = path.read_text(errors="ignore")
                left -= len(text)
                for at in range(0, len(text), PIECE_CHARACTERS):
                    yield text[at : at + PIECE_CHARACTERS]
