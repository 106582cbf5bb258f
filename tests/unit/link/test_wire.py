"""The frames between the two processes: whole messages come out however the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.link import wire

messages = st.one_of(
    st.builds(wire.Cancel, st.text(max_size=40)),
    st.builds(wire.Committed, st.integers(0, 2**63 - 1)),
    st.builds(
        wire.Generate,
        request=st.text(max_size=40),
        tokens=st.lists(st.integers(0, 2**32 - 1), max_size=50).map(wire.pack_ids),
        namespace=st.text(max_size=8),
        sampling=st.builds(
            wire.Sampling, st.floats(0, 2), st.floats(0, 1), st.integers(0, 100), st.integers(0, 2**63 - 1)
        ),
        max_tokens=st.integers(1, 10**6),
        stop=st.lists(st.binary(min_size=1, max_size=5), max_size=3).map(tuple),
    ),
)


@given(st.lists(messages, max_size=6), st.lists(st.integers(1, 30), min_size=1))
def test_any_cut_of_the_stream_gives_the_same_messages(sent: list, cuts: list[int]) -> None:
    stream = b"".join(map(wire.frame, sent))
    deframer = wire.Deframer(wire.ToEngine)
    received: list = []
    at = step = 0
    while at < len(stream):
        size = cuts[step % len(cuts)]
        received += deframer.feed(stream[at : at + size])
        at, step = at + size, step + 1
    assert received == sent


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    packed = wire.pack_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert wire.unpack_ids(packed) == ids


def test_ids_are_little_endian() -> None:
    assert wire.pack_ids([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_a_length_over_the_limit_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        wire.Deframer(wire.ToEngine).feed(b"\xff\xff\xff\xff")
