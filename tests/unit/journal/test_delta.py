"""Deltas: whatever two contents have in common, the second comes out as it was, and what is damaged is refused."""

from __future__ import annotations

import random

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from zjournal.journal import delta

pieces = st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=6)


@given(pieces, st.lists(st.integers(0, 7), max_size=12), st.binary(max_size=99))
def test_any_bytes_come_back(base: list[bytes], order: list[int], new: bytes) -> None:
    """Pieces of the base in any order, repeated, left out, and others between them."""
    data = b"".join(base[k] if k < len(base) else new for k in order)
    for before in (b"".join(base), b"", data):
        assert delta.decode(delta.encode(data, before), before, len(data)) == data


def test_what_is_common_costs_nothing() -> None:
    chance = random.Random(1)
    base = chance.randbytes(300_000)
    changed = base[:1_000] + b"another date" + base[1_004:200_000] + chance.randbytes(500) + base[200_000:]
    assert len(delta.encode(changed, base)) < 650
    assert len(delta.encode(base, base)) < 40
    assert len(delta.encode(base[150_000:] + base[:150_000], base)) < 160_000


def test_unrelated_bytes_do_not_take_long() -> None:
    chance = random.Random(2)
    base, data = chance.randbytes(4 << 20), chance.randbytes(4 << 20)
    packed = delta.encode(data, base)
    assert len(data) <= len(packed) < len(data) + 1_000
    assert delta.decode(packed, base, len(data)) == data


def test_a_flipped_bit_is_refused_or_of_the_right_size() -> None:
    """Every single bit: nothing but ValueError, and no more memory than is asked for. Digests tell what is wrong."""
    base = b"".join(b"line %d of what was said\n" % k for k in range(20))
    data = base[:200] + b"something new" + base[230:]
    packed = delta.encode(data, base)
    for bit in range(8 * len(packed)):
        changed = bytearray(packed)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            assert len(delta.decode(bytes(changed), base, len(data))) == len(data)
        except ValueError:
            continue
    assert delta.decode(packed, base, len(data)) == data


def _packed(steps: list[int], literals: bytes = b"ab", base: bytes = b"0123456789") -> bytes:
    plan = msgspec.msgpack.encode([steps, literals])
    dictionary = zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return zstandard.ZstdCompressor(dict_data=dictionary).compress(plan)


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (_packed([1, 0]), "half a step"),
        (_packed([0, 8, 3]), "beyond its base"),
        (_packed([0, -1, 3]), "beyond its base"),
        (_packed([0, 0, -3]), "beyond its base"),
        (_packed([-1, 0, 3]), "beyond its base"),
        (_packed([3, 0, 1]), "not 5"),
        (_packed([0, 0, 2]), "not 5"),
        (_packed([0, 0, 9]), "more than 5"),
        (_packed([0, 0, 3], b"a" * 900), "holds"),
        (zstandard.ZstdCompressor().compress(b"\xc1"), "cannot be read"),
        (_packed([0, 0, 3]) + b"x", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_a_damaged_delta_is_refused(packed: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        delta.decode(packed, b"0123456789", 5)
    assert delta.decode(_packed([0, 0, 3]), b"0123456789", 5) == b"012ab"
