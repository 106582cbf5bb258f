"""Where two rendered prompts part, and who is to blame: the core of `zj sessions diff`, without I/O.

Tokens decide whether there is a fork; the clients' own texts decide its cause. At the fork each side has a text that a
client wrote (or an answer of ours that was replayed). If those differ, the client changed them; if they are the same
and only their tokens differ, the rendering did. What cannot be proved is `unknown`. docs/diff.md says it for users.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from zjournal.link import wire
from zjournal.sessions import identity
from zjournal.sessions.vocabulary import Vocabulary

RESYNC_TOKENS = 16  # so many equal tokens in a row are a match, wherever they stand
RESYNC_SEARCH_MAX = 1 << 18  # tokens behind the fork that are searched on each side
MOVED_CHARACTERS_MIN = 40  # a shorter text that stands elsewhere is no moved block
TOKEN_BYTES = 4

_ANSWER = re.compile(r"response:(.+)|response\[(.+)\]")  # replayed as sampled, or written anew
_CLOSED = re.compile(r"</think>\s*\S")  # thoughts that were followed by something
_ONE_ANSWER = "the same answer, as sampled on one side and as text on the other"
_THOUGHTS = re.compile(r"\.reasoning(_content)?$")

Verdict = Literal["identical", "append-only", "client-changed", "render-changed", "unknown"]


class Source(msgspec.Struct, frozen=True):
    """Where tokens `start` to `end` came from. `path` "" is the template; `response:ID` an answer of ours.

    `value` is what the client wrote at that path of the request `turn` (for an answer: its text); None if unknown.
    """

    start: int
    end: int
    path: str
    turn: str = ""
    role: str = ""
    value: Any = None

    @property
    def answer(self) -> bool:
        """Whether the server itself said it."""
        return bool(self.response)

    @property
    def response(self) -> str:
        """The response that said it; "" if a client did, or the template."""
        found = _ANSWER.fullmatch(self.path)
        return (found[1] or found[2]) if found else ""

    @property
    def thoughts(self) -> bool:
        """Whether they are thoughts that a client sent back."""
        return _THOUGHTS.search(self.path) is not None


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt: packed little-endian uint32 ids, sources that cover them in order, and what it was made with."""

    ids: bytes
    sources: tuple[Source, ...]
    vocabulary: Vocabulary | None = None  # None: it cannot be decoded
    vocabulary_name: bytes = b""  # digests; empty if unknown
    template_name: bytes = b""
    changed: Mapping[str, str] = MappingProxyType({})  # answers of ours that its client changed, and what of them

    @property
    def count(self) -> int:
        return len(self.ids) // TOKEN_BYTES


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt at the fork. `before` and `after` are decoded tokens; None without a vocabulary."""

    tokens: int
    token: int | None  # the id at the fork; None at the prompt's end
    path: str  # "" in the template
    turn: str  # the request that the path belongs to
    role: str
    before: bytes | None
    after: bytes | None


class Resync(msgspec.Struct, frozen=True):
    """The prompts match again after `removed` tokens of A and `inserted` tokens of B, for `matching` tokens."""

    removed: int
    inserted: int
    matching: int

    @property
    def kind(self) -> str:
        if self.removed and self.inserted:
            return "replacement"
        return "deletion" if self.removed else "insertion"


class Moved(msgspec.Struct, frozen=True):
    """The same text stands at `old` in A and at `new` in B."""

    old: str
    new: str
    tokens: int
    text: str


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """What `compare` found. `shared` tokens are equal; it is the place of the first different one."""

    verdict: Verdict
    reason: str
    comparable: bool  # False: other vocabularies, so that no token can be compared
    shared: int
    byte: int | None  # of the first different byte; None: unknown, or the bytes are equal as far as both go
    a: Side
    b: Side
    resync: Resync | None = None
    moved: Moved | None = None

    @property
    def forked(self) -> bool:
        return self.verdict not in ("identical", "append-only")

    @property
    def lost(self) -> int:
        """Tokens of A that are of no use to B."""
        return self.a.tokens - self.shared if self.forked else 0


def compare(a: Rendered, b: Rendered, context: int) -> Diff:
    """Compares two prompts, A the earlier one; keeps `context` tokens on each side of the fork.

    Two prompts of 150,000 tokens take well under a second.
    """
    if a.vocabulary_name != b.vocabulary_name:
        reason = "the two prompts were made with different vocabularies, so their tokens cannot be compared"
        return _plain(a, b, "unknown", reason, None, context)
    fork = _common(a.ids, b.ids) // TOKEN_BYTES
    if a.count == b.count == fork:
        return _plain(a, b, "identical", "all tokens are the same", fork, context)
    if fork in (a.count, b.count):
        return _plain(a, b, "append-only", _appended(b.count - a.count), fork, context)
    x, y = _sources_at(a, b, fork)
    verdict, reason, suffix = _judge(a, b, x, y)
    moved, resync = _moved(a, b, fork, x, y, _resync(a, b, fork))
    return Diff(
        verdict=verdict,
        reason=reason,
        comparable=True,
        shared=fork,
        byte=_first_byte(a, b, fork),
        a=_side(a, fork, x, context, suffix),
        b=_side(b, fork, y, context, suffix),
        resync=resync,
        moved=moved,
    )


def _plain(a: Rendered, b: Rendered, verdict: Verdict, reason: str, shared: int | None, context: int) -> Diff:
    """A Diff without a fork to explain. `shared` None: the tokens cannot be compared."""
    at = shared or 0
    return Diff(
        verdict=verdict,
        reason=reason,
        comparable=shared is not None,
        shared=at,
        byte=None,
        a=_side(a, at, _source(a, at), context),
        b=_side(b, at, _source(b, at), context),
    )


def _appended(more: int) -> str:
    return f"B goes on for {more} tokens" if more > 0 else f"B is A without its last {-more} tokens"


def _common(a: bytes, b: bytes) -> int:
    """Length of the common prefix in bytes, by halving: a comparison of bytes runs at memory speed."""
    left, right = memoryview(a), memoryview(b)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _first_byte(a: Rendered, b: Rendered, fork: int) -> int | None:
    """Where the texts part. Other tokens may begin with the same bytes, or be another spelling of the same text."""
    if a.vocabulary is None or b.vocabulary is None:
        return None
    ids = wire.unpack_ids(a.ids)
    start = len(a.vocabulary.decode(ids[:fork]))
    left = a.vocabulary.decode(ids[fork:])
    right = b.vocabulary.decode(wire.unpack_ids(b.ids[fork * TOKEN_BYTES :]))
    common = _common(left, right)
    return None if common in (len(left), len(right)) else start + common


def _side(rendered: Rendered, fork: int, source: Source | None, context: int, suffix: str = "") -> Side:
    """What to tell of one prompt: `source` and, if only a part of its value counts, the path to that part."""
    return Side(
        tokens=rendered.count,
        token=wire.unpack_ids(_cut(rendered, fork, fork + 1))[0] if fork < rendered.count else None,
        path=source.path + suffix if source is not None else "",
        turn=source.turn if source is not None else "",
        role=source.role if source is not None else "",
        before=_decoded(rendered, max(fork - context, 0), fork),
        after=_decoded(rendered, fork, fork + context),
    )


def _cut(rendered: Rendered, start: int, end: int) -> bytes:
    return rendered.ids[start * TOKEN_BYTES : end * TOKEN_BYTES]


def _decoded(rendered: Rendered, start: int, end: int) -> bytes | None:
    if rendered.vocabulary is None:
        return None
    return rendered.vocabulary.decode(wire.unpack_ids(_cut(rendered, start, end)))


# --- whose change it is -------------------------------------------------------------------------------


def _source(rendered: Rendered, token: int) -> Source | None:
    """The source of a token; None behind the end."""
    index = bisect_right(rendered.sources, token, key=lambda source: source.start) - 1
    return rendered.sources[index] if index >= 0 and token < rendered.sources[index].end else None


def _texts(rendered: Rendered, token: int) -> Iterator[Source]:
    """The sources that end behind `token`, without the template's."""
    index = bisect_right(rendered.sources, token, key=lambda source: source.end)
    return (source for source in rendered.sources[index:] if source.path)


def _sources_at(a: Rendered, b: Rendered, fork: int) -> tuple[Source | None, Source | None]:
    """The texts that face each other: those that the fork cuts, else the next ones on each side.

    A text that goes on where the other one's has ended faces the one that began where it began.
    """
    here = [source for rendered in (a, b) if (source := _source(rendered, fork)) is not None and source.path]
    start = min([source.start for source in here if source.start < fork], default=fork)
    return next(_texts(a, start), None), next(_texts(b, start), None)


def _judge(a: Rendered, b: Rendered, x: Source | None, y: Source | None) -> tuple[Verdict, str, str]:
    """Verdict, reason, and what to add to both paths because only that part of the values differs."""
    if x is None and y is None:
        return "render-changed", _rendering(a, b), ""
    if x is None or y is None:
        return "client-changed", "one conversation ends where the other one has a text", ""
    if x.answer and y.answer:
        return (*_answers(a, b, x, y), "")
    if x.answer != y.answer and (changed := _changed(a, b, x, y)):
        return "client-changed", changed, ""
    if x.value is None or y.value is None:
        missing = (x if x.value is None else y).path
        return "unknown", f"what the client wrote at {missing} cannot be found in its request", ""
    if _spelled(x.value) != _spelled(y.value):
        suffix = _narrowed(x.value, y.value) if x.path == y.path else ""
        return "client-changed", _nature(_below(x.value, suffix), _below(y.value, suffix)), suffix
    if _plain_role(x.role) != _plain_role(y.role):
        return "client-changed", f"the client says the same text as {y.role or 'nobody'}, not {x.role or 'nobody'}", ""
    if x.answer != y.answer:
        return "render-changed", _ONE_ANSWER, ""
    if x.path == y.path:
        return "render-changed", _rendering(a, b), ""
    return "unknown", "the same text stands at another path; what changed is not proved", ""


def _answers(a: Rendered, b: Rendered, x: Source, y: Source) -> tuple[Verdict, str]:
    """Verdict and reason where answers of ours face each other."""
    if x.response != y.response:
        return "client-changed", "the clients continued different answers"
    if x.path == y.path:
        return "render-changed", _rendering(a, b)
    sampled, written = (x, y) if x.path.startswith("response:") else (y, x)
    if sampled.value is None or written.value is None or sampled.value == written.value:
        return "render-changed", _ONE_ANSWER
    return "render-changed", "the same answer, but the dialect does not keep its thoughts any longer (template dropped)"


def _changed(a: Rendered, b: Rendered, x: Source, y: Source) -> str:
    """What a client changed of an answer of ours that it sent back; "" if that is not known."""
    response, other, sent = (x.response, b, y) if x.answer else (y.response, a, x)
    if what := other.changed.get(response):
        return f"the client changed an answer that it sent back: {what}"
    said, text = (x.value, sent.value) if x.answer else (y.value, sent.value)
    if not isinstance(said, str) or sent.thoughts or not _CLOSED.search(said):
        return ""
    spelled = text if isinstance(text, str) else ""
    if spelled and not said.rstrip().endswith(spelled.rstrip()):
        return ""
    return "the client left out the thoughts of an answer"


def _rendering(a: Rendered, b: Rendered) -> str:
    other = a.template_name != b.template_name
    return "the client's text is the same; " + ("the chat template is another" if other else "its rendering differs")


def _plain_role(role: str) -> str:
    return "system" if role == "developer" else role


def _spelled(value: Any) -> str:
    """A value as text; keys stay in the client's order, for so they are rendered."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _narrowed(x: Any, y: Any) -> str:
    """The path of the one part in which two values differ, as deep as it goes; "" if they differ in several."""
    if isinstance(x, dict) and isinstance(y, dict) and list(x) == list(y):
        differing = [(f".{key}", x[key], y[key]) for key in x if _spelled(x[key]) != _spelled(y[key])]
    elif isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
        pairs = enumerate(zip(x, y, strict=True))
        differing = [(f"[{index}]", one, other) for index, (one, other) in pairs if _spelled(one) != _spelled(other)]
    else:
        return ""
    if len(differing) != 1:
        return ""
    step, one, other = differing[0]
    return step + _narrowed(one, other)


def _below(value: Any, suffix: str) -> Any:
    """The part that `_narrowed` named."""
    for step in suffix.replace("[", ".[").split(".")[1:]:
        value = value[int(step[1:-1])] if step.startswith("[") else value[step]
    return value


def _nature(x: Any, y: Any) -> str:
    """How two differing values of clients differ."""
    one, other = _spelled(x), _spelled(y)
    if _object(x) is not None and _object(x) == _object(y):
        return "equal JSON, other bytes: the client spelled the same value in another way"
    if "".join(one.split()) == "".join(other.split()):
        return "the client's texts differ in white space only"
    return "the client's texts differ"


def _object(value: Any) -> str | None:
    """One spelling for all that are equal to this JSON object or array, or text of one; None for another value."""
    text = _spelled(value)
    return identity.canonical_json(text) if text.lstrip().startswith(("{", "[")) else None


# --- what comes after the fork ------------------------------------------------------------------------


def _resync(a: Rendered, b: Rendered, fork: int) -> Resync | None:
    """The nearest place behind the fork from which both prompts match again; None if there is none in reach."""
    found = [pair for pair in (_equal_run(a, b, fork), _equal_source(a, b, fork)) if pair is not None]
    if not found:
        return None
    return _at_distance(a, b, fork, *min(found, key=lambda pair: (sum(pair), pair)))


def _at_distance(a: Rendered, b: Rendered, fork: int, removed: int, inserted: int) -> Resync | None:
    """The match that begins at these distances from the fork, if there is one."""
    left, right = a.ids[(fork + removed) * TOKEN_BYTES :], b.ids[(fork + inserted) * TOKEN_BYTES :]
    matching = _common(left, right) // TOKEN_BYTES
    return Resync(removed, inserted, matching) if matching else None


def _equal_run(a: Rendered, b: Rendered, fork: int) -> tuple[int, int] | None:
    """The nearest run of RESYNC_TOKENS equal tokens, as distances from the fork."""
    width = RESYNC_TOKENS * TOKEN_BYTES
    first: dict[bytes, int] = {}
    for distance in range(min(a.count - fork - RESYNC_TOKENS + 1, RESYNC_SEARCH_MAX)):
        at = (fork + distance) * TOKEN_BYTES
        first.setdefault(a.ids[at : at + width], distance)
    best: tuple[int, int] | None = None
    for distance in range(min(b.count - fork - RESYNC_TOKENS + 1, RESYNC_SEARCH_MAX)):
        if best is not None and distance >= sum(best):
            break  # whatever comes now is farther away
        at = (fork + distance) * TOKEN_BYTES
        removed = first.get(b.ids[at : at + width])
        if removed is not None and (best is None or removed + distance < sum(best)):
            best = removed, distance
    return best


def _equal_source(a: Rendered, b: Rendered, fork: int) -> tuple[int, int] | None:
    """The nearest whole text behind the fork that both have in the same tokens, however short it is."""
    first: dict[bytes, int] = {}
    for source in _texts(a, fork):
        if fork <= source.start <= fork + RESYNC_SEARCH_MAX:
            first.setdefault(_cut(a, source.start, source.end), source.start - fork)
    best: tuple[int, int] | None = None
    for source in _texts(b, fork):
        if fork <= source.start <= fork + RESYNC_SEARCH_MAX:
            removed = first.get(_cut(b, source.start, source.end))
            pair = None if removed is None else (removed, source.start - fork)
            if pair is not None and (best is None or sum(pair) < sum(best)):
                best = pair
    return best


def _moved(
    a: Rendered, b: Rendered, fork: int, x: Source | None, y: Source | None, resync: Resync | None
) -> tuple[Moved | None, Resync | None]:
    """A's text at the fork that stands elsewhere in B, or the other way round; and the resync once it is taken out.

    A text that an insertion before it only shifts has not moved: what follows it is the same as well.
    """
    kind = resync.kind if resync is not None else ""
    matching = resync.matching if resync is not None else 0
    if x is not None and not (kind == "insertion" and fork + matching > _next_start(a, x)):
        place = _elsewhere(x, y, b, fork)
        if place is not None:
            moved = Moved(x.path, place.path, x.end - x.start, _spelled(x.value))
            return moved, _at_distance(a, b, fork, x.end - fork, 0) or resync
    if y is not None and not (kind == "deletion" and fork + matching > _next_start(b, y)):
        place = _elsewhere(y, x, a, fork)
        if place is not None:
            moved = Moved(place.path, y.path, y.end - y.start, _spelled(y.value))
            return moved, _at_distance(a, b, fork, 0, y.end - fork) or resync
    return None, resync


def _next_start(rendered: Rendered, source: Source) -> int:
    """Where the text after this one begins; the last token if there is none."""
    return next((text.start for text in _texts(rendered, source.end)), rendered.count - 1)


def _elsewhere(block: Source, facing: Source | None, other: Rendered, fork: int) -> Source | None:
    """Where the block's text stands in the other prompt, behind the text that faces it."""
    if block.value is None or block.answer or len(_spelled(block.value)) < MOVED_CHARACTERS_MIN:
        return None
    text = _spelled(block.value)
    for source in _texts(other, fork):
        if source is not facing and not source.answer and source.value is not None and _spelled(source.value) == text:
            return source
    return None
