"""Bare values whose end is ordinary text: terminals that know their first end without being lazy.

The grammar engine marks whole classes of tokens at once, but only where no lazy terminal is possible and one that is
goes on with a repetition. So the values are told once in full, by complements, and most of them once more by a
repetition; no text of any terminal begins another one, and two that match the same text change nothing but the time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from zjournal.dialects.fences.lark import pattern
from zjournal.dialects.fences.texts import SPACE, folded

ANY = "(?s:.*)"
TAG_CHARACTERS = 60  # in a bounded value, behind a `<` that may begin its end
PARTS = 4  # of a bounded value; in the first one a `<` may come that begins no end
LEAST_MAX = 2000  # characters that a value may have to have
_BOUNDED_MIN = 8  # shorter values are told once
# Any bytes. Without ANY there would be left what is not UTF-8, and the engine counts to the end to see that it is none.
BYTES = r"(~/[^\s\S]/)"
_LENGTH = re.compile(r"\(\?s:\.\{(\d*),(\d*)\}\)")


class Closing(msgspec.Struct, frozen=True):
    """How a value ends: with `end`, which is a newline, `tag` and a newline. The tag begins with the only `<` in it.

    A value holds neither `end` nor, in either letter case, `tag` before one of `followed`.
    """

    tag: str
    end: str
    followed: tuple[str, ...]

    def terminals(
        self, words: Sequence[str], kept: Sequence[Sequence[str]], unlike: Sequence[str], scalars: Sequence[str]
    ) -> list[str]:
        """Bodies of terminals for a value with its end.

        It is one of `words`, or matches all of one of `kept` and none of `unlike`, or matches one of `scalars`.
        """
        no, right = [f"~/{each}/" for each in unlike], self._right()
        plain = [f"/{pattern(word)}/" if word else '""' for word in words if "<" not in word]
        plain += [f"/{scalar}/" for scalar in scalars]
        plain += [_and(*self._plain(each), *no) for each in kept]
        tagged = [_and(f"/{pattern(word)}/", right) for word in words if "<" in word]
        tagged += [_and(*(f"/{one}/" for one in each or [ANY]), *no, right) for each in kept]
        ways = [" | ".join(dict.fromkeys(each)) for each in (plain, tagged) if each]
        ways += dict.fromkeys(_and(f"/{simple}/", *no) for each in kept for simple in self._simple(each))
        return [f"({way}) /{pattern(self.end)}/" for way in ways]

    def _right(self) -> str:
        """What holds for all of a value: nothing in it ends it, nor does the end come early."""
        held = f"{folded(self.tag)}{SPACE}({'|'.join(map(folded, self.followed))})|{pattern(self.end)}"
        return f"~({BYTES} /{held}/ {BYTES}) & ~({BYTES} /{pattern(self.end[:-1])}/)"

    def _plain(self, kept: Sequence[str]) -> list[str]:
        """Patterns of what matches all of `kept` and holds no `<`, or at least no whole tag."""
        if not kept:
            return [f"/{self._opened}/"]
        found = _length(kept)
        return [f"/[^<]{{{found[0]},{found[1]}}}/"] if found else [*(f"/{one}/" for one in kept), "/[^<]*/"]

    def _simple(self, kept: Sequence[str]) -> list[str]:
        """Some of the values that end with a `<`: of them the engine sees at once that any text may come next.

        What stands between two `<` has no newline or does not begin as the tag does, so that it is no end.
        """
        within = f"[^<{pattern(self.end[0])}]"
        if not kept:
            return [f"{self._opened}<", f"{self._opened}<{within}*<"]
        found = _length(kept)
        least, most = (int(each or 0) for each in found or ("", ""))
        if found is None or not most:
            return [] if found is None else [f"[^<]{{{least},}}<", f"[^<]{{{least},}}<{within}*<"]
        tag = min(TAG_CHARACTERS, most // 2)
        if most < _BOUNDED_MIN or least > most - tag - 2:
            return []
        other = f"<[^<{pattern(self.tag[1])}][^<]"
        first, most = most // PARTS, most - 3
        return [
            f"[^<]{{{least},{most + 2}}}<",
            f"[^<]{{{least},{most - tag + 1}}}<{within}{{0,{tag}}}<",
            f"[^<]{{{least},{max(first, least)}}}{other}{{0,{most - max(first, least)}}}<",
        ]

    @property
    def _opened(self) -> str:
        """Any text that holds no whole tag and does not end within one."""
        half, other = "", ""
        for letter in map(folded, reversed(self.tag[1:])):
            here = f"[^<{letter.strip('[]')}]"
            half = f"({letter}{half})?" if other else ""
            other = f"({here}|{letter}{other})" if other else here
        return f"([^<]|<({half}<)*{other})*"


def long(kept: Sequence[str]) -> bool:
    """Whether a value must be longer than can be counted here: the engine walks through all of it at once."""
    return any(int(found[1] or 0) > LEAST_MAX for found in map(_LENGTH.fullmatch, kept) if found)


def _length(kept: Sequence[str]) -> tuple[str, str] | None:
    """The least and the most characters where nothing else is asked for."""
    found = _LENGTH.fullmatch(kept[0]) if len(kept) == 1 else None
    return (found[1], found[2]) if found else None


def _and(*parts: str) -> str:
    return f"({' & '.join(parts)})"
