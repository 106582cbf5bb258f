"""Deltas: a content written down as what it has in common with another one, and what is new.

A turn's record repeats nearly all of the record before it. So long runs are copied, found by comparing forwards and
then by looking for short anchors of the new bytes in the old ones; only what lies between them is stored. It is
compressed with the old bytes as its dictionary, so that a text which stands elsewhere in them costs little as well.

Pure: bytes in, bytes out. Decoding checks everything, for what it reads may be damaged.
"""

from __future__ import annotations

import msgspec
import zstandard

LEVEL = 9  # the new bytes are few; up to here the time goes into reading the dictionary in
RUN_BYTES_MIN = 32  # a shorter run is left to the compressor
STRIDE_BYTES = 32
SEARCH_BYTES_MAX = 64 << 20  # looked at in one encoding, so that unrelated bytes do not cost seconds
DICTIONARY_BYTES_MAX = 1 << 20


class _Plan(msgspec.Struct, frozen=True, array_like=True):
    """`steps`: literal bytes to take, then how far to skip in the base and how much to copy from there; and again."""

    steps: tuple[int, ...]
    literals: bytes


_decode_plan = msgspec.msgpack.Decoder(_Plan).decode
_encode_plan = msgspec.msgpack.Encoder().encode


def encode(data: bytes, base: bytes) -> bytes:
    """`data` in terms of `base`, as one zstd frame."""
    plan = _encode_plan(_plan(data, base))
    return zstandard.ZstdCompressor(level=LEVEL, dict_data=_dictionary(base), write_dict_id=False).compress(plan)


def decode(delta: bytes, base: bytes, size: int) -> bytes:
    """The inverse of encode. Raises ValueError when `delta` does not make `size` bytes out of `base`."""
    try:
        told = zstandard.frame_content_size(delta)
        # A plan is longer than its literals by its steps, and each step copies or takes at least a byte.
        if not 0 <= told <= 16 * size + 64:
            raise ValueError(f"its frame holds {told} bytes")
        reader = zstandard.ZstdDecompressor(dict_data=_dictionary(base))
        plan = _decode_plan(reader.decompress(delta, max_output_size=told, allow_extra_data=False))
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise ValueError(f"its delta cannot be read ({error})") from None
    return _apply(plan, base, size)


def _dictionary(base: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(base[-DICTIONARY_BYTES_MAX:], dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _apply(plan: _Plan, base: bytes, size: int) -> bytes:
    if len(plan.steps) % 3:
        raise ValueError("its delta has half a step")
    parts: list[bytes] = []
    taken = source = made = 0
    for at in range(0, len(plan.steps), 3):
        literal, skip, copied = plan.steps[at : at + 3]
        start = source + skip
        source = start + copied
        if literal < 0 or copied < 0 or not 0 <= start <= source <= len(base):
            raise ValueError("its delta reaches beyond its base")
        parts += (plan.literals[taken : taken + literal], base[start:source])
        taken += literal
        made += literal + copied
        if made > size:
            raise ValueError(f"its delta makes more than {size} bytes")
    parts.append(plan.literals[taken:])
    data = b"".join(parts)
    if len(data) != size or taken > len(plan.literals):
        raise ValueError(f"its delta makes {len(data)} bytes, not {size}")
    return data


def _plan(data: bytes, base: bytes) -> _Plan:
    steps: list[int] = []
    literals: list[bytes] = []
    at = source = 0
    budget = SEARCH_BYTES_MAX
    while at < len(data):
        length = _common(data, at, base, source)
        start, found = at, source
        if length < RUN_BYTES_MIN:
            start, found, budget = _anchor(data, at, base, source, budget)
            if found < 0:
                break
            length = _common(data, start, base, found)
        steps += (start - at, found - source, length)
        literals.append(data[at:start])
        at, source = start + length, found + length
    literals.append(data[at:])
    return _Plan(tuple(steps), b"".join(literals))


def _anchor(data: bytes, at: int, base: bytes, source: int, budget: int) -> tuple[int, int, int]:
    """The next place in `data` whose bytes stand in `base` behind `source`: both places, and what may yet be searched.

    The second is -1 when there is none. Both are moved back to where the run begins.
    """
    for probe in range(at, len(data) - RUN_BYTES_MIN + 1, STRIDE_BYTES):
        if budget <= 0:
            break
        found = base.find(data[probe : probe + RUN_BYTES_MIN], source)
        budget -= (found if found >= 0 else len(base)) - source + RUN_BYTES_MIN
        if found >= 0:
            back = 0
            while back < min(probe - at, found - source) and data[probe - back - 1] == base[found - back - 1]:
                back += 1
            return probe - back, found - back, budget
    return at, -1, budget


def _common(data: bytes, at: int, base: bytes, source: int) -> int:
    """How many bytes are equal from here on. Doubling, then halving: slices are compared faster than bytes."""
    limit = min(len(data) - at, len(base) - source)
    equal, step = 0, RUN_BYTES_MIN
    while step and equal < limit:
        step = min(step, limit - equal)
        if data[at + equal : at + equal + step] == base[source + equal : source + equal + step]:
            equal += step
            step *= 2
        else:
            step //= 2
    return equal
