"""For any stream, stops and cutting: the matcher shows what a search of the whole would show."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zjournal.checkpoint.stops import StopMatcher

BYTES = st.lists(st.sampled_from([b"a", b"b", b"c", b"\xc3", b"\xa9"]), max_size=30).map(b"".join)
STOPS = st.lists(BYTES.filter(bool).map(lambda stop: stop[:5]), max_size=4).map(tuple)


def whole(stops: tuple[bytes, ...], data: bytes) -> tuple[bytes, bytes | None]:
    """By definition: the first prefix that ends in a stop string; of several, the longest."""
    for end in range(1, len(data) + 1):
        found = [stop for stop in stops if data[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return data[: end - len(stop)], stop
    return data, None


@given(BYTES, STOPS, st.lists(st.integers(0, 30)))
def test_any_cutting_gives_the_same(data, stops, cuts):
    matcher = StopMatcher(stops)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    shown = b""
    for start, end in pairwise(edges):
        shown += matcher.feed(data[start:end])
        expected, hit = whole(stops, data[:end])
        assert expected.startswith(shown)  # nothing shown is ever taken back
        assert matcher.hit == hit
        if hit is None:
            held = expected[len(shown) :]
            assert not held or any(stop.startswith(held) for stop in stops)
    assert shown + matcher.end() == whole(stops, data)[0]
