"""A dialect's tags as the active tokenizer has them: a token of their own, or ordinary text.

A tag with a token of its own is only this token: the same letters in ordinary tokens are data. To let parsers work
on one string, such a token stands in it as a lone surrogate, which no decoded text can hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from zjournal.errors import ModelFault

_FIRST = 0xD800
_MARKS = re.compile("[\ud800-\udfff]")


class Tokens(Protocol):
    """What a dialect asks of a tokenizer."""

    @property
    def control(self) -> Mapping[str, int]:
        """The control tokens by their literal."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text; never a control token."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""


class Literals:
    """The tags of one dialect under one tokenizer."""

    def __init__(self, dialect: str, tokenizer: Tokens | None, tags: Sequence[str], needed: Sequence[str] = ()) -> None:
        """`tags` may be tokens of their own, `needed` must be. Without a tokenizer every tag is text.

        Raises ModelFault that names the first literal that the tokenizer has no token or no text for.
        """
        control = tokenizer.control if tokenizer is not None else {}
        self.ids: dict[str, tuple[int, ...]] = {}
        self.marks: dict[bytes, str] = {}  # the mark that stands for a token, by its bytes
        self._texts: dict[str, str] = {}
        for tag in (*needed, *tags):
            if tag in control:
                mark = chr(_FIRST + len(self.marks))
                self.marks[tag.encode()] = mark
                self._texts[mark] = tag
                self.ids[tag] = (control[tag],)
            elif tag in needed and tokenizer is not None:
                raise ModelFault(f"the dialect {dialect} needs {tag!r} to be a token of its own, and it is none")
            elif tokenizer is not None:
                self.ids[tag] = _spelled(dialect, tokenizer, tag)

    def inner(self, text: str) -> str:
        """`text`, made of tags and other letters, as a parser sees it: marks for tokens."""
        for mark, tag in self._texts.items():
            text = text.replace(tag, mark)
        return text

    def pattern(self, text: str) -> str:
        """A pattern for `text` as a parser sees it; letters that are no token match in either case."""
        return f"(?i:{re.escape(self.inner(text))})"

    def spell(self, text: str) -> str:
        """A parser's string as the model wrote it."""
        if text.isascii():
            return text
        return _MARKS.sub(lambda found: self._texts[found.group()], text)


def _spelled(dialect: str, tokenizer: Tokens, tag: str) -> tuple[int, ...]:
    """The ids of a tag that is ordinary text, which must come back as it is wherever it stands."""
    for context in (f"{tag}", f"x{tag}y", f"\n{tag}\n", f'"{tag}{{'):
        if tokenizer.decode(tokenizer.encode(context)) != context:
            raise ModelFault(f"the dialect {dialect} writes {tag!r}, and the tokenizer has no text for it")
    return tuple(tokenizer.encode(tag))
