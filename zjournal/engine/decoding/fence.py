"""The fence of one request: which tokens may come next, after those that came.

A state is where an answer stands: in free text, in thoughts, or where the grammar is in force. It advances by the
tokens that were chosen, one by one, and knows nothing else; so one that is rebuilt from them is the same, after a
preemption or anywhere else. Guesses are tried on a copy. docs/fences.md tells the rules.

In text and thoughts no grammar runs: a few ids are banned, and what may be the beginning of a tag is remembered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from llguidance import LLMatcher

from zjournal.engine.decoding.vocabulary import Vocabulary, broken, has, put
from zjournal.errors import FenceFailed
from zjournal.link import wire

Where = Literal["text", "thoughts", "call"]


class Legal(NamedTuple):
    """What may come next: the tokens of a mask, uint32 [words], or all but `banned`. `complete`: only an end may."""

    allowed: np.ndarray | None = None
    banned: Collection[int] = ()
    complete: bool = False

    def allows(self, token: int) -> bool:
        """Whether this token may come."""
        return has(self.allowed, token) if self.allowed is not None else token not in self.banned


class _Held(NamedTuple):
    """Tokens that were said, without the first `skip` bytes of the first one; not more than can begin a tag."""

    tokens: tuple[int, ...] = ()
    skip: int = 0


class Compiled:
    """A fence for one vocabulary, without a request; it is only read, by any number of states."""

    def __init__(self, vocabulary: Vocabulary, fence: wire.Fence) -> None:
        """Raises FenceFailed. Takes milliseconds to seconds, most of them without the interpreter's lock."""
        self.vocabulary = vocabulary
        self.fence = fence
        self._start = vocabulary.compile(fence.grammar) if fence.grammar else None
        self.opening: wire.Tag | None = None
        self.closing: wire.Tag | None = None
        if fence.thoughts is not None:
            self.opening, self.closing = fence.thoughts
        tags = [tag for tag in (*fence.triggers, self.opening, self.closing) if tag is not None]
        known = range(len(vocabulary.tokens))
        if any(tag.token not in known and (tag.token >= 0 or not tag.text) for tag in tags):
            raise FenceFailed("A tag of the fence is no token of the model, and no text.")
        if any(token not in known for token in fence.banned):
            raise FenceFailed("The fence bans what is no token of the model.")
        if (fence.begun and self.closing is None) or (fence.whole and self._start is None):
            raise FenceFailed("The fence has no grammar, or no tag that ends the thoughts.")
        self.triggers = frozenset(tag.token for tag in fence.triggers if tag.token >= 0)
        self.spelled = tuple(tag.text.lower() for tag in fence.triggers if tag.token < 0)
        banned = {*fence.banned, *vocabulary.padding}
        self.thinking = frozenset((banned | self.triggers) - _ids(self.closing))
        taken = {i for i in self.triggers if self._start is not None and self._start.validate_tokens([i]) == 1}
        self.text = frozenset((banned | self.triggers) - taken - _ids(self.opening))
        # Tokens that hold a whole tag: what stands behind it must be right.
        self.inside = self._inside() if self.spelled else {}
        self.closed = {} if self.closing is None or self.closing.token >= 0 else self._behind(self.closing.text, 0)

    def start(self) -> LLMatcher:
        """A matcher at the grammar's beginning, of the caller's own."""
        assert self._start is not None
        return self._start.deep_copy()

    def data(self, held: _Held) -> bytes:
        """The bytes of tokens that are held."""
        return b"".join(self.vocabulary.tokens[i] for i in held.tokens)[held.skip :]

    def cut(self, held: _Held, count: int) -> _Held:
        """What is left without the first `count` bytes."""
        tokens, skip = held.tokens, held.skip + count
        while tokens and skip >= len(self.vocabulary.tokens[tokens[0]]):
            skip -= len(self.vocabulary.tokens[tokens[0]])
            tokens = tokens[1:]
        assert tokens or not skip
        return _Held(tokens, skip)

    def enters(self, held: _Held) -> LLMatcher | None:
        """A matcher that has taken these; None where it refuses them, or there is none. A cut token is spelled."""
        if self._start is None:
            return None
        ids = list(held.tokens)
        if held.skip:
            rest = self.vocabulary.spelled(self.vocabulary.tokens[ids[0]][held.skip :])
            if rest is None:
                return None
            ids[:1] = rest
        matcher = self.start()
        return matcher if not ids or matcher.try_consume_tokens(ids) == len(ids) else None

    def _inside(self) -> dict[int, bool]:
        """Of each token that has a whole trigger in it, whether the grammar takes it from there on."""
        found: dict[int, bool] = {}
        for tag in self.spelled:
            for i in self.vocabulary.containing(tag):
                at = self.vocabulary.tokens[i].lower().find(tag)
                found.setdefault(i, self.enters(_Held((i,), at)) is not None)
        return found

    def _behind(self, tag: bytes, known: int) -> dict[int, bool]:
        """Of each token that ends the thoughts, `known` bytes of whose tag were said: whether its rest is right."""
        rest = tag[known:].lower()
        ids = self.vocabulary.beginning(rest) if known else self.vocabulary.containing(rest)
        found: dict[int, bool] = {}
        for i in ids:
            token = self.vocabulary.tokens[i]
            end = token.lower().find(rest) + len(rest)
            fits = end == len(token) or not self.fence.whole or self.enters(_Held((i,), end)) is not None
            found[i] = fits
        return found


def _refused(matcher: LLMatcher | None) -> FenceFailed:
    """Why a matcher did not take a token: it cannot go on at all, or the token is not legal, which is our fault."""
    if matcher is not None and matcher.is_error():
        return broken(matcher)
    return FenceFailed("A token came that the grammar of the answer does not have.")


def _ids(tag: wire.Tag | None) -> set[int]:
    return {tag.token} if tag is not None and tag.token >= 0 else set()


class State:
    """Where an answer stands. `ended`: an end token came, and nothing comes behind it."""

    def __init__(self, compiled: Compiled, ends: Collection[int]) -> None:
        """`ends` are the request's end tokens."""
        self._compiled = compiled
        self._ends = frozenset(i for i in ends if i < compiled.vocabulary.width)
        self._matcher: LLMatcher | None = None
        self._held = _Held()
        self._fresh = True  # nothing but white space was said
        self._thinking = compiled.fence.begun
        self._opens = False  # the grammar binds all, and instead of what it wants thoughts may begin
        self.ended = False
        if compiled.fence.whole and not compiled.fence.begun:
            self._matcher = compiled.start()
            self._opens = compiled.opening is not None

    def copy(self) -> State:
        """Another one that stands where this one does."""
        other = State.__new__(State)
        other.__dict__.update(self.__dict__)
        if self._matcher is not None:
            other._matcher = self._matcher.deep_copy()
        return other

    @property
    def where(self) -> Where:
        """Whether the next token belongs to free text, to thoughts, or to what the grammar binds."""
        if self._thinking:
            return "thoughts"
        return "text" if self._matcher is None or self._opens else "call"

    @property
    def computes(self) -> bool:
        """Whether a grammar has to be asked what may come next."""
        return self._matcher is not None or bool(self._held.tokens)

    # --- what may come -----------------------------------------------------------------------------------

    def legal(self) -> Legal:
        """What may come next. Raises FenceFailed where the grammar is too complex to tell."""
        assert not self.ended
        if self._thinking:
            return Legal(banned=self._banned_thinking())
        if self._matcher is None and not self._opens:
            return Legal(banned=self._banned_text())
        vocabulary = self._compiled.vocabulary
        row = vocabulary.mask(self._matcher) if self._matcher is not None else vocabulary.nothing()
        accepts = has(row, vocabulary.end)
        if self._opens:
            put(row, self._opening())
        if not accepts:
            return Legal(allowed=row)
        put(row, (vocabulary.end,), on=False)
        others = bool(row.any())
        put(row, self._ends)
        return Legal(allowed=row, complete=not others)

    def _banned_text(self) -> Collection[int]:
        """In free text: control tokens, and what would complete a trigger and go on with what the grammar refuses."""
        compiled = self._compiled
        if not self._held.tokens or not compiled.spelled:
            if not compiled.inside:
                return compiled.text - self._ends
            decided = dict(compiled.inside)
        else:
            decided = {}
            for length, rest in self._begun(compiled.spelled):
                self._decide(decided, length, rest)
            decided = {**compiled.inside, **decided}
        banned = compiled.text.difference(i for i, taken in decided.items() if taken)
        return banned.union(i for i, taken in decided.items() if not taken) - self._ends

    def _decide(self, decided: dict[int, bool], length: int, rest: bytes) -> None:
        """Of the tokens that continue a trigger, whose first `length` bytes were said last: may they come?

        Those that were decided already would complete one that began earlier.
        """
        compiled = self._compiled
        vocabulary = compiled.vocabulary
        data = compiled.data(self._held)
        matcher = compiled.enters(compiled.cut(self._held, len(data) - length))

        def takes(token: int) -> bool:
            return matcher is not None and matcher.validate_tokens([token]) == 1

        for i in vocabulary.beginning(rest):
            if i not in decided:
                decided[i] = takes(i)
        for i in compiled.fence.banned:  # a control token inside a trigger
            token = vocabulary.tokens[i].lower()
            if len(token) < len(rest) and rest.startswith(token) and takes(i):
                decided.setdefault(i, True)

    def _banned_thinking(self) -> Collection[int]:
        """In thoughts: also what would begin a call; and an end, if an answer must follow."""
        compiled = self._compiled
        banned = compiled.thinking | self._ends if compiled.fence.whole else compiled.thinking - self._ends
        closing = compiled.closing
        assert closing is not None
        if closing.token >= 0:
            return banned
        decided = dict(compiled.closed)
        for length, rest in self._begun((closing.text.lower(),)):
            decided |= compiled._behind(closing.text, length) if rest else {}
        return banned.union(i for i, fits in decided.items() if not fits)

    def _opening(self) -> list[int]:
        """The tokens that open thoughts, or continue the tag that does."""
        opening = self._compiled.opening
        assert opening is not None
        if opening.token >= 0:
            return [opening.token]
        rest = opening.text.lower()[len(self._compiled.data(self._held)) :]
        vocabulary = self._compiled.vocabulary
        return [*vocabulary.within(rest), *vocabulary.beginning(rest)]

    def _begun(self, tags: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        """Of each tag that the last bytes begin: how many do, and the tag's rest; those that began first come first."""
        data = self._compiled.data(self._held).lower()
        for length in range(len(data), 0, -1):
            for tag in tags:
                if len(tag) > length and data.endswith(tag[:length]):
                    yield length, tag[length:]

    # --- what came ---------------------------------------------------------------------------------------

    def feed(self, token: int) -> None:
        """A token was chosen. Raises FenceFailed if it was not legal where the grammar is in force."""
        assert not self.ended
        compiled = self._compiled
        if token in self._ends:
            self.ended = True
        elif self._opens:
            self._open(token)
        elif self._matcher is not None:
            if self._matcher.try_consume_tokens([token]) != 1:
                raise _refused(self._matcher)
        elif self._thinking:
            if token in _ids(compiled.closing):
                self._closed(_Held())
            else:
                self._said(_Held((*self._held.tokens, token), self._held.skip))
        elif token in compiled.triggers and token not in compiled.text:
            self._matcher, self._held = compiled.enters(_Held((token,))), _Held()
        elif token in _ids(compiled.opening):
            self._think(_Held())
        else:
            self._said(_Held((*self._held.tokens, token), self._held.skip))

    def _open(self, token: int) -> None:
        """The beginning of an answer that the grammar binds: its first token, or a tag that opens thoughts."""
        opening = self._compiled.opening
        assert opening is not None
        if token in _ids(opening):
            self._think(_Held())
            return
        held = _Held((*self._held.tokens, token))
        data, tag = self._compiled.data(held).lower(), opening.text.lower()
        if opening.token < 0 and data.startswith(tag):
            self._think(self._compiled.cut(held, len(tag)))
            return
        self._opens = opening.token < 0 and tag.startswith(data)
        self._held = held if self._opens else _Held()
        matcher = self._matcher
        if matcher is not None and matcher.try_consume_tokens([token]) != 1:
            self._matcher = None
        if self._matcher is None and not self._opens:
            raise _refused(matcher)

    def _think(self, held: _Held) -> None:
        self._thinking, self._opens, self._fresh, self._matcher = True, False, False, None
        self._said(held)

    def _closed(self, held: _Held) -> None:
        """The thoughts are over, and `held` stands behind them already."""
        self._thinking = False
        if not self._compiled.fence.whole:
            self._said(held)
            return
        self._matcher, self._held = self._compiled.enters(held), _Held()
        if self._matcher is None:
            raise FenceFailed("A token came that the grammar of the answer does not have.")

    def _said(self, held: _Held) -> None:
        """Text or thoughts: looks for the first tag in what was not looked at yet, and keeps what may begin one."""
        compiled = self._compiled
        tags = self._tags()
        while tags and held.tokens:
            data = compiled.data(held).lower()
            found = min(((data.find(tag), tag) for tag in tags if tag in data), default=None)
            if found is None:
                break
            at, tag = found
            if tag not in compiled.spelled or self._thinking:
                behind = compiled.cut(held, at + len(tag))
                self._held = _Held()
                (self._closed if self._thinking else self._think)(behind)
                return
            self._matcher = compiled.enters(compiled.cut(held, at))
            if self._matcher is not None:
                self._held = _Held()
                return
            held, self._fresh = compiled.cut(held, at + 1), False  # it only looked like a call
            tags = self._tags()
        data = compiled.data(held).lower()
        keep = next((n for n in range(len(data), 0, -1) if any(t.startswith(data[-n:]) for t in tags)), 0)
        self._fresh = self._fresh and not data[: len(data) - keep].strip()
        self._held = compiled.cut(held, len(data) - keep)

    def _tags(self) -> tuple[bytes, ...]:
        """The tags that mean something here and are spelled."""
        compiled = self._compiled
        if self._thinking:
            assert compiled.closing is not None
            return (compiled.closing.text.lower(),) if compiled.closing.token < 0 else ()
        if self._fresh and compiled.opening is not None and compiled.opening.token < 0:
            return (*compiled.spelled, compiled.opening.text.lower())
        return compiled.spelled
