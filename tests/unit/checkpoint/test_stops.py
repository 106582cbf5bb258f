"""Stop strings: what is shown, what is held back, which one wins."""

from __future__ import annotations

import pytest

from zjournal.checkpoint.stops import StopMatcher


def run(stops: tuple[bytes, ...], parts: list[bytes]) -> tuple[list[bytes], bytes | None, bytes]:
    matcher = StopMatcher(stops)
    shown = [matcher.feed(part) for part in parts]
    return shown, matcher.hit, matcher.end()


@pytest.mark.parametrize(
    ("stops", "parts", "expected"),
    [
        ((), [b"abc", b""], ([b"abc", b""], None, b"")),
        ((b"STOP",), [b"go S", b"TO", b"P it", b"more"], ([b"go ", b"", b"", b""], b"STOP", b"")),
        ((b"STOP",), [b"go S", b"TO", b"O", b"x"], ([b"go ", b"", b"STOO", b"x"], None, b"")),
        ((b"STOP",), [b"a", b"STO"], ([b"a", b""], None, b"STO")),
        ((b"aab",), [b"aa", b"ab"], ([b"", b"a"], b"aab", b"")),
        ((b"abcd", b"bc"), [b"xabcd"], ([b"xa"], b"bc", b"")),
        ((b"abc", b"bc"), [b"xabc"], ([b"x"], b"abc", b"")),
        ((b"abc", b"b"), [b"a", b"b"], ([b"", b"a"], b"b", b"")),
        (("é".encode(),), [b"\xc3", b"\xa8\xc3", b"\xa9"], ([b"", b"\xc3\xa8", b""], "é".encode(), b"")),
    ],
)
def test_matching(stops, parts, expected):
    assert run(stops, parts) == expected
