"""The record of a turn: its body, its prompt's tokens, and where they came from, so packed that nothing stands twice.

The tokens come first, for the journal can always spell them. A string of the body whose text is in the prompt is kept
as a reference to the span that says it; what is left of the body is its skeleton. A span that replays an earlier
output refers to the tokens that were sampled for it. So a text stands once, however often it is told, and the body is
still given back byte for byte: packing proves it, and unpacking checks a digest.

Pure: what it needs to know of the journal (the vocabulary, earlier outputs) is given to it. docs/journal.md has the
format.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from zjournal.dialects.prompt import OUTPUT_PATH, WRITTEN_PATH, Span
from zjournal.growing import Beginning, Growing, Own, common
from zjournal.link import wire

VERSION = 1
TEXT_BYTES_MIN = 24  # a shorter string stays in the skeleton
OUTPUTS_AHEAD_MAX = 4  # that are looked at for one string; a client may have changed those before
CHECK_BYTES = 8
BEGINNING_BYTES = 64  # of a text, by which it is looked for,
BEGINNINGS_MAX = 8  # so many times
_HOLDERS = (str, dict, list)
DEPTH_MAX = 64  # of a value in which strings are looked for
PACKED_BYTES_MAX = 16 << 20  # of bodies and prompts that were packed lately
SPAN_BYTES, REACHED_BYTES = 120, 300  # of each span and each reference of them, about

TextOf = Callable[[Sequence[int]], bytes]  # token ids to the bytes that they spell
Outputs = Callable[[str], Sequence[int]]  # response id to the ids sampled for it


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """The record as it is stored. Tokens are split in two planes, for nearly all ids are below 65,536.

    `lengths`: tokens of each span, negative where they are those of the output that its path names.
    `references`: for each, four numbers: bytes of the skeleton before it, spans after the one before it, bytes of the
    span's text before and behind the string, both times two, plus one in the former where the string is in ASCII.
    """

    version: int
    low: bytes  # little-endian uint16
    high: bytes  # the third byte of each; empty where all are 0
    lengths: tuple[int, ...]
    paths: tuple[str, ...]
    references: tuple[int, ...]
    skeleton: bytes
    check: bytes  # the first bytes of the body's SHA-256


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode


def packings() -> Packings:
    """A memory for the records of one vocabulary."""
    return Growing(PACKED_BYTES_MAX)


def pack(
    body: bytes,
    ids: Sequence[int],
    spans: Sequence[Span],
    text_of: TextOf | None,
    outputs: Outputs,
    known: Own[Packing] | None = None,
) -> bytes:
    """The record of a body, and of a prompt whose spans cover all its `ids`.

    Without `text_of` the body stands in it as it is. `outputs` gives the ids of an earlier output, or nothing.
    `known`: what is remembered of the tenant's records; where body and prompt begin alike, it is referred to alike.
    """
    tokens = array("I", ids)  # slices of an array are copied as they are, without an object for each number
    lengths: list[int] = []
    kept = array("I")
    begin = 0  # of the tokens that are kept and not copied yet
    for span in spans:
        length = span.end - span.start
        given = _given(span, outputs)
        if given is not None and _array(given[:length]) == tokens[span.start : span.end]:
            lengths.append(-length)
            kept.extend(tokens[begin : span.start])
            begin = span.end
        else:
            lengths.append(length)
    kept.extend(tokens[begin:])
    low, high = _planes(kept)
    references, skeleton = ((), body) if text_of is None else _refer(body, tokens, spans, text_of, known)
    paths = tuple(span.path for span in spans)
    check = hashlib.sha256(body).digest()[:CHECK_BYTES]
    return _encode(_Packed(VERSION, low, high, tuple(lengths), paths, references, skeleton, check))


class Record:
    """A record that was read: its parts, each made when it is asked for.

    Every method raises ValueError where the record does not hold together.
    """

    def __init__(self, data: bytes, outputs: Outputs) -> None:
        """Raises ValueError when `data` is no record that this version reads."""
        try:
            self._packed = packed = _decode(data)
        except msgspec.MsgspecError as error:
            raise ValueError(f"it cannot be read ({error})") from None
        if packed.version != VERSION:
            raise ValueError(f"it is of version {packed.version}, this zjournal reads {VERSION}")
        if len(packed.paths) != len(packed.lengths) or len(packed.references) % 4 or 0 in packed.lengths:
            raise ValueError("its parts do not fit together")
        self._outputs = outputs
        self._kept = _joined(packed.low, packed.high)
        self.spans = tuple(_spans(packed.lengths, packed.paths))
        self._starts = _kept_starts(packed.lengths)
        if self._starts[-1] != len(self._kept):
            raise ValueError("its spans do not cover its tokens")

    def ids(self) -> array[int]:
        """The prompt's token ids."""
        found = array("I")
        for index in range(len(self.spans)):
            found.extend(self._span(index))
        return found

    def body(self, text_of: TextOf | None) -> bytes:
        """The body as it was received."""
        packed = self._packed
        if text_of is None and packed.references:
            raise ValueError("there is no vocabulary to read it with")
        parts: list[bytes] = []
        at = index = 0
        for number in range(0, len(packed.references), 4):
            literal, step, before, behind = packed.references[number : number + 4]
            parts.append(packed.skeleton[at : at + literal])
            at, index = at + literal, index + step
            if not 0 <= index < len(self.spans) or min(literal, before, behind) < 0:
                raise ValueError("it refers to a span that is not there")
            assert text_of is not None
            text = text_of(self._span(index))
            parts.append(_escaped(text[before // 2 : len(text) - behind], bool(before % 2)))
        parts.append(packed.skeleton[at:])
        body = b"".join(parts)
        if at > len(packed.skeleton) or hashlib.sha256(body).digest()[:CHECK_BYTES] != packed.check:
            raise ValueError("its body does not come out as it was")
        return body

    def outline(self, mark: str) -> bytes:
        """The body with a number between two `mark`s in the place of each text that the prompt says; see `beginning`.

        Mostly that is a whole string. It is a part of one where a string says what another one begins or ends with.
        `mark` is ASCII that needs no escape in a string of JSON. No text is spelled for it.
        """
        packed, parts, at = self._packed, [], 0
        for number, literal in enumerate(packed.references[::4]):
            if literal < 0:
                raise ValueError("it refers to a place that is not there")
            parts += [packed.skeleton[at : at + literal], f"{mark}{number}{mark}".encode()]
            at += literal
        return b"".join([*parts, packed.skeleton[at:]])

    def beginning(self, number: int, text_of: TextOf | None, tokens: int) -> bytes:
        """The beginning of the string that has this number in the outline: what `tokens` tokens of it say, or more."""
        if text_of is None:
            raise ValueError("there is no vocabulary to read it with")
        references = self._packed.references
        if not 0 <= number < len(references) // 4:
            raise ValueError("it has no such text")
        index = sum(references[1 : 4 * number + 4 : 4])
        before, behind = references[4 * number + 2] // 2, references[4 * number + 3]
        if not 0 <= index < len(self.spans) or min(before, behind) < 0:
            raise ValueError("it refers to a span that is not there")
        span, enough = self._span(index), before + tokens
        if len(span) - enough >= behind:  # what is left out has as many bytes, or more
            return text_of(span[:enough])[before:]
        text = text_of(span)
        return text[before : len(text) - behind]

    def _span(self, index: int) -> Sequence[int]:
        length = self._packed.lengths[index]
        if length > 0:
            return self._kept[self._starts[index] : self._starts[index + 1]]
        given = _given(self.spans[index], self._outputs)
        if given is None or len(given) < -length:
            raise ValueError(f"the output at {self.spans[index].path} is shorter than its prompt says")
        return given[:-length]


def _array(ids: Sequence[int]) -> array[int]:
    return ids if isinstance(ids, array) else array("I", ids)


def _given(span: Span, outputs: Outputs) -> Sequence[int] | None:
    return outputs(span.path.removeprefix(OUTPUT_PATH)) if span.path.startswith(OUTPUT_PATH) else None


def _planes(ids: array[int]) -> tuple[bytes, bytes]:
    packed = wire.pack_ids(ids)
    high = packed[2::4]
    assert not _some(packed[3::4]), "a token id has more than 24 bits"
    low = bytearray(2 * len(ids))
    low[0::2], low[1::2] = packed[0::4], packed[1::4]
    return bytes(low), high if _some(high) else b""


def _some(data: bytes) -> bool:
    """Whether there is a byte that is not zero; `any` makes an object of each."""
    return data.count(0) != len(data)


def _joined(low: bytes, high: bytes) -> array[int]:
    count = len(low) // 2
    if len(low) % 2 or len(high) not in (0, count):
        raise ValueError("its tokens are cut")
    packed = bytearray(4 * count)
    packed[0::4], packed[1::4], packed[2::4] = low[0::2], low[1::2], high or bytes(count)
    return wire.unpack_array(bytes(packed))


def _spans(lengths: Sequence[int], paths: Sequence[str]) -> Iterator[Span]:
    at = 0
    for length, path in zip(lengths, paths, strict=True):
        yield Span(at, at + abs(length), path)
        at += abs(length)


def _kept_starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + max(length, 0))
    return starts


# --- the body's strings -------------------------------------------------------------------------------


class _Reached(NamedTuple):
    """How far packing a body has come behind one of its references."""

    at: int  # in the body
    last: int  # span that was referred to
    strings: int  # of the body that were looked at
    outputs: int  # as _Said.next
    skeleton: int  # bytes of it
    spelling: bool  # whether everything beyond ASCII is escaped


class Packing(msgspec.Struct, frozen=True):
    """A body that was packed: of what prompt, its references, and how far each of them reaches."""

    body: bytes
    ids: array[int]
    references: list[int]
    skeleton: bytes
    reached: list[_Reached]


Packings = Growing[Packing]


def _refer(
    body: bytes, ids: array[int], spans: Sequence[Span], text_of: TextOf, known: Own[Packing] | None
) -> tuple[tuple[int, ...], bytes]:
    """References for the strings of a body that its prompt says, and the skeleton that is left."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return (), body
    said = _Said(ids, spans, text_of)
    beginning = Beginning[Packing]() if known is None else known.longest(spans)
    references, parts, reached = _gone_on(body, ids, spans, beginning)
    at, last, looked, said.next, length, spelling = reached[-1] if reached else _Reached(0, 0, 0, 0, 0, False)
    for number, (path, text) in enumerate(_strings(value, "", DEPTH_MAX)[looked:], looked + 1):
        encoded = text.encode()
        found = said.find(path, encoded)
        if found is None:
            continue
        index, before, behind = found
        for ascii_only in (spelling, not spelling):  # a client spells all alike, and a vain search takes long
            spelled = _escaped(encoded, ascii_only)
            start = _find(body, spelled, at)
            if start >= 0:
                references += (start - at, index - last, 2 * before + ascii_only, behind)
                parts.append(body[at:start])
                length += start - at
                at, last, spelling = start + len(spelled), index, ascii_only
                reached.append(_Reached(at, last, number, said.next, length, spelling))
                break
    parts.append(body[at:])
    skeleton = b"".join(parts)
    if known is not None:
        size = len(body) + 4 * len(ids) + len(skeleton) + SPAN_BYTES * len(spans) + REACHED_BYTES * len(reached)
        known.put(spans, Packing(body, ids, references, skeleton, reached), size, beginning)
    return tuple(references), skeleton


def _gone_on(
    body: bytes, ids: array[int], spans: Sequence[Span], beginning: Beginning[Packing]
) -> tuple[list[int], list[bytes], list[_Reached]]:
    """What of a record that begins alike is right for this one: references, skeleton, and how far each reference goes.

    A reference is, where body and prompt are equal up to the end of its string and of its span: then it gives the same
    bytes at the same place, whatever comes behind.
    """
    before = beginning.value
    if before is None:
        return [], [], []
    alike = common(body, before.body)
    same = common(ids, before.ids)
    equal = bisect_right(spans, same, hi=beginning.length, key=lambda span: span.end)  # spans with equal tokens
    count = bisect_right(before.reached, alike, key=lambda one: one.at)
    count = next((at for at in range(count) if before.reached[at].last >= equal), count)
    reached = before.reached[:count]
    parts = [before.skeleton[: reached[-1].skeleton]] if reached else []
    return before.references[: 4 * count], parts, reached


class _Said:
    """What the spans of a prompt say, found by path, or among the outputs in their order."""

    def __init__(self, ids: Sequence[int], spans: Sequence[Span], text_of: TextOf) -> None:
        self._ids, self._spans, self._text_of = ids, spans, text_of
        self._by_path: dict[str, list[int]] = {}
        self._outputs: list[int] = []
        for index, span in enumerate(spans):
            if span.path.startswith((OUTPUT_PATH, WRITTEN_PATH)):
                self._outputs.append(index)
            elif span.path:
                self._by_path.setdefault(span.path, []).append(index)
        self.next = 0  # of the outputs, the one to look at first
        self._texts: dict[int, bytes] = {}

    def find(self, path: str, text: bytes) -> tuple[int, int, int] | None:
        """The span that says `text`, and how many bytes of it stand before and behind; None if none does."""
        for index in (*self._by_path.get(path, ()), *self._by_path.get(path.rpartition(".")[0], ())):
            if (found := self._within(index, text)) is not None:
                return found
        for place in range(self.next, min(self.next + OUTPUTS_AHEAD_MAX, len(self._outputs))):
            if (found := self._within(self._outputs[place], text)) is not None:
                self.next = place + 1
                return found
        return None

    def _within(self, index: int, text: bytes) -> tuple[int, int, int] | None:
        said = self._texts.get(index)
        if said is None:
            span = self._spans[index]
            said = self._texts[index] = self._text_of(self._ids[span.start : span.end])
        if len(text) > len(said):
            return None
        before = 0 if said.startswith(text) else _find(said, text, 0)
        return None if before < 0 else (index, before, len(said) - before - len(text))


def _find(data: bytes, wanted: bytes, start: int) -> int:
    """As data.find(wanted, start). That looks a long text through before it searches, and here most stand near by."""
    if len(wanted) <= BEGINNING_BYTES:
        return data.find(wanted, start)
    beginning = wanted[:BEGINNING_BYTES]
    at = data.find(beginning, start)
    for _ in range(BEGINNINGS_MAX):
        if at < 0 or data.startswith(wanted, at):
            return at
        at = data.find(beginning, at + 1)
    return data.find(wanted, at) if at >= 0 else at


def _strings(value: Any, path: str, depth: int) -> list[tuple[str, str]]:
    """The longer strings of a value in the order of the document, with their paths."""
    found: list[tuple[str, str]] = []
    _add_strings(found, value, path, depth)
    return found


def _add_strings(found: list[tuple[str, str]], value: Any, path: str, depth: int) -> None:
    if isinstance(value, str):
        if len(value) >= TEXT_BYTES_MIN:
            found.append((path, value))
    elif depth and isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, _HOLDERS) and (type(inner) is not str or len(inner) >= TEXT_BYTES_MIN):
                _add_strings(found, inner, f"{path}.{key}" if path else key, depth - 1)
    elif depth and isinstance(value, list):
        for index, inner in enumerate(value):
            if isinstance(inner, _HOLDERS):
                _add_strings(found, inner, f"{path}[{index}]", depth - 1)


def _escaped(text: bytes, ascii_only: bool) -> bytes:
    """What stands between the quotes of a JSON string: as short as can be, or with everything beyond ASCII escaped.

    Bytes that are no UTF-8 cannot stand in a JSON string; they raise ValueError.
    """
    plain = text.decode()  # UnicodeDecodeError is a ValueError
    return (json.dumps(plain).encode() if ascii_only else msgspec.json.encode(plain))[1:-1]
