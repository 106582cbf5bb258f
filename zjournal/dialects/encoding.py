"""Runs of rendered text become token ids and spans; a beginning that was encoded before is not encoded again.

Control literals in the template's own runs are ids of their own, and so are the tokens of an earlier output. What
stands between two of them is one piece for the tokenizer. So behind each of them nothing depends on what comes, and
all that the runs before it have become is right for every prompt that begins with the same runs. They are compared
one by one, texts and paths and outputs: the ids are those that would come out without a memory.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

import msgspec

from zjournal import ask
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.errors import ContextTooLong
from zjournal.growing import Beginning, Growing, Own

ENCODED_BYTES_MAX = 24 << 20  # of prompts that were encoded lately, with their texts
UTF8_BYTES_MAX = 4  # of a character
RUN_BYTES = 300  # of each run of them beside its text, with its spans and its place to go on, about


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start` to `end` came from `path`; "" is the template, `response:ID` an earlier output."""

    start: int
    end: int
    path: str


class Prompt(msgspec.Struct, frozen=True):
    """The token ids, and spans that cover them all in order."""

    tokens: array[int]  # uint32: a hundred thousand ids as objects take milliseconds to make
    spans: tuple[Span, ...]
    dropped: int = 0  # bytes of the text that have no token in the vocabulary, and so no place in `tokens`
    rewritten: tuple[str, ...] = ()  # responses that are not replayed, for the dialect keeps their thoughts no longer

    @property
    def ids(self) -> list[int]:
        """The tokens as a list."""
        return self.tokens.tolist()


class Run(msgspec.Struct, frozen=True):
    """A stretch of the rendered prompt: template text, a client's text with its path, or an output to splice."""

    kind: Literal["template", "client", "output"]
    text: str = ""
    path: str = ""
    output: ask.Output | None = None


class _Place(NamedTuple):
    """Where a prompt can be gone on with: behind a control token of a run, or behind an output."""

    run: int  # the next one, or the one that the rest of
    at: int  # from this character on
    ids: int
    spans: int
    dropped: int
    most: float  # tokens that a beginning up to here can be sure to have


class Encoded(msgspec.Struct, frozen=True):
    """What a prompt's runs have become."""

    ids: array[int]
    spans: tuple[Span, ...]
    places: list[_Place]


Encodings = Growing[Encoded]


def encodings() -> Encodings:
    """A memory for the prompts of one tokenizer."""
    return Growing(ENCODED_BYTES_MAX)


class _Ids:
    """Collects tokens and their spans; the open piece grows until a control token or an output ends it."""

    def __init__(self, tokenizer: Tokenizer, limit: int | None) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self.ids = array("I")
        self.spans: list[Span] = []
        self.dropped = 0
        self.over = False  # more than the limit are sure: nothing is encoded from then on
        self.unread = 0  # tokens that what is not encoded has at least
        self.places: list[_Place] = []
        self._most = 0.0
        self._texts: list[tuple[str, str | None]] = []  # None: the template's

    def go_on(self, encoded: Encoded, place: _Place, index: int) -> None:
        """Begins with what was made of other runs up to this place, the one of this index."""
        assert not self.ids and not self._texts, "there is something before it"
        self._most = place.most
        self.ids = encoded.ids[: place.ids]
        self.spans = list(encoded.spans[: place.spans])
        if self.spans:  # what came behind may have gone on with the last one
            last = self.spans.pop()
            self.spans.append(Span(last.start, place.ids, last.path))
        self.dropped = place.dropped
        self.places = encoded.places[: index + 1]

    def here(self, run: int, at: int) -> None:
        """Remembers this place; there is no open piece."""
        assert not self._texts, "a piece is open"
        self.places.append(_Place(run, at, len(self.ids), len(self.spans), self.dropped, self._most))

    def text(self, text: str, path: str | None) -> None:
        """Adds text to the open piece."""
        if text:
            self._texts.append((text, path))

    def tokens(self, ids: Sequence[int], path: str) -> None:
        """Ends the open piece and adds tokens as they are."""
        self.flush()
        self._add(ids, path)

    def flush(self) -> None:
        """Encodes the open piece. A token that overlaps a client's text counts to it, over two texts to the later."""
        texts, self._texts = self._texts, []
        if not texts:
            return
        piece = "".join([text for text, _ in texts])
        if self._left_out(piece):
            return
        encoded = self._tokenizer.encode_with_offsets(piece)
        self.dropped += encoded.dropped
        if len(texts) == 1 and encoded.ids and encoded.ends[0] > 0 and encoded.starts[-1] < len(piece):
            self._add(encoded.ids, texts[0][1] or "")  # as below, where nothing is to be told apart
            return
        found: list[tuple[int, int, str]] = []
        at = 0
        for text, path in texts:
            start, at = at, at + len(text)
            if path is not None:
                found.append((bisect_right(encoded.ends, start), bisect_left(encoded.starts, at), path))
        done = 0
        for (low, high, path), later in zip_longest(found, [low for low, _, _ in found[1:]]):
            self._add(encoded.ids[done:low], "")
            done = high if later is None else max(low, min(high, later))
            self._add(encoded.ids[low:done], path)
        self._add(encoded.ids[done:], "")

    def _left_out(self, piece: str) -> bool:
        """Whether a piece is not encoded any more; then what it has at least is counted."""
        most = len(self.ids) + UTF8_BYTES_MAX * len(piece) / self._tokenizer.longest
        self._most = max(self._most, most)
        if self._limit is None or (not self.over and most <= self._limit):
            return False
        least = self._tokenizer.at_least(piece)
        self.over = self.over or len(self.ids) + least > self._limit
        self.unread += least if self.over else 0
        return self.over

    def _add(self, ids: Sequence[int], path: str) -> None:
        if not ids:
            return
        start = len(self.ids)
        if self.spans and self.spans[-1].path == path:
            start = self.spans.pop().start
        self.ids.extend(ids)
        self.spans.append(Span(start, len(self.ids), path))


def encode(
    runs: Sequence[Run],
    tokenizer: Tokenizer,
    limit: int | None = None,
    rewritten: tuple[str, ...] = (),
    known: Own[Encoded] | None = None,
) -> Prompt:
    """The prompt that the runs are. `known`: what is remembered of the tenant's prompts, by this very tokenizer.

    Raises ContextTooLong, with the tokens that it has at least, where it is sure to have more than `limit`.
    """
    out = _Ids(tokenizer, limit)
    beginning = Beginning[Encoded]() if known is None else known.longest(runs)
    first, at = _gone_on(out, beginning, limit)
    for index in range(first, len(runs)):
        run = runs[index]
        if run.output is not None:
            out.tokens(_unpack(run.output.tokens), run.path)
            out.here(index + 1, 0)
        elif run.kind == "client":
            out.text(run.text, run.path)
        else:
            _template(out, tokenizer, run.text, index, at)
        at = 0
    out.flush()
    if out.over:
        least = len(out.ids) + out.unread
        raise ContextTooLong(
            f"The prompt has at least {least} tokens, more than the {limit} tokens that fit into the context window "
            "and the KV memory.",
            least=least,
            limit=limit or 0,
        )
    if known is not None:
        size = sum([len(run.text) for run in runs]) + RUN_BYTES * len(runs) + 4 * len(out.ids)
        known.put(runs, Encoded(out.ids, tuple(out.spans), out.places), size, beginning)
    return Prompt(out.ids, tuple(out.spans), out.dropped, rewritten)


def _gone_on(out: _Ids, beginning: Beginning[Encoded], limit: int | None) -> tuple[int, int]:
    """Takes what is known over; the run, and the character in it, from which on the rest is to be encoded.

    But nothing that may have more tokens than `limit`: whether it has is to be found out as without a memory.
    """
    encoded = beginning.value
    for index in range(len(encoded.places) - 1, -1, -1) if encoded is not None else ():
        assert encoded is not None
        place = encoded.places[index]
        alike = place.run + (place.at > 0) <= beginning.length  # with the run whose rest is to come, if there is one
        if alike and (limit is None or place.most <= limit):
            out.go_on(encoded, place, index)
            return place.run, place.at
    return 0, 0


def _template(out: _Ids, tokenizer: Tokenizer, text: str, index: int, at: int) -> None:
    """Adds the template's own text from character `at` on, which stands in the run of this index."""
    before = at
    for found in tokenizer.control_pattern.finditer(text, at):
        out.text(text[at : found.start()], None)
        out.tokens([tokenizer.control[found.group()]], "")
        at = found.end()
    if at > before:
        out.here(index, at)
    out.text(text[at:], None)


def pack(ids: Sequence[int]) -> bytes:
    """Ids as `ask.Output.tokens`."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(tokens: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
