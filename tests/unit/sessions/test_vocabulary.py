"""The packed vocabulary: what goes in comes out, and nothing damaged is believed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.errors import JournalFault
from zjournal.sessions import vocabulary as module
from zjournal.sessions.vocabulary import TOKENS_MAX, Spelling, Vocabulary, pack

PAGE = (Path(__file__).parents[3] / "docs" / "journal.md").read_text()


@given(st.lists(st.binary(max_size=9), max_size=50))
def test_what_was_packed_is_read(tokens: list[bytes]) -> None:
    vocabulary = Vocabulary(pack(tokens))
    assert len(vocabulary) == len(tokens)
    assert [vocabulary.decode([token]) for token in range(len(tokens))] == tokens
    assert vocabulary.decode(range(len(tokens))) == b"".join(tokens)


def test_the_format_is_the_documented_one() -> None:
    assert pack([b"a", b"", b"bc"], [2, 0]) == b"zjvocab\0" + struct.pack("<8I", 2, 3, 1, 0, 2, 2, 0, 2) + b"abc"
    assert f"at most {TOKENS_MAX:,} |" in PAGE


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=20, unique=True), st.data())
def test_a_dialect_can_be_built_with_what_was_recorded(words: list[str], data: st.DataObject) -> None:
    special = data.draw(st.sets(st.sampled_from(range(len(words)))))
    vocabulary = Vocabulary(pack([word.encode() for word in words], special))
    assert vocabulary.control == special
    tokens = vocabulary.tokens()
    assert tokens.control == {words[token]: token for token in special}
    assert [tokens.decode(tokens.encode(word)) for word in words] == words


def test_a_vocabulary_of_version_1_is_read_and_knows_no_control_tokens() -> None:
    vocabulary = Vocabulary(b"zjvocab\0" + struct.pack("<5I", 1, 3, 1, 0, 2) + b"abc")
    assert [vocabulary.token(token) for token in range(3)] == [b"a", b"", b"bc"]
    assert vocabulary.control == frozenset()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is none"),
        (b"zjvocab\1" + bytes(8), "is none"),
        (b"zjvocab\0" + struct.pack("<II", 3, 0), "of version 3"),
        (b"zjvocab\0" + struct.pack("<II", 1, TOKENS_MAX + 1), "cannot hold"),
        (b"zjvocab\0" + struct.pack("<II", 1, 2) + bytes(4), "cannot hold 2"),
        (b"zjvocab\0" + struct.pack("<III", 2, 1, 1) + b"a", "cannot hold 1"),
        (b"zjvocab\0" + struct.pack("<5I", 2, 1, 1, 1, 1) + b"a", "does not have"),
        (pack([b"abc"])[:-1], "2 bytes, not 3"),
        (pack([b"abc"]) + b"d", "4 bytes, not 3"),
    ],
)
def test_what_is_damaged_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(JournalFault, match=said):
        Vocabulary(data)


def test_a_token_beyond_it_is_a_fault() -> None:
    with pytest.raises(JournalFault, match="token 2, the vocabulary has 2"):
        Vocabulary(pack([b"a", b"b"])).decode([0, 2])


BYTES = pack([bytes([value]) for value in range(256)])


class Counting(Vocabulary):
    """Counts how often it is asked."""

    asked = 0

    def decode(self, ids: Sequence[int]) -> bytes:
        self.asked += 1
        return super().decode(ids)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([1, 15, 16, 200]), st.integers(0, 3))))
def test_what_is_remembered_spells_what_the_vocabulary_does(runs: list[tuple[str, int, int]]) -> None:
    vocabulary = Vocabulary(BYTES)
    spelling = Spelling(vocabulary)
    for tenant, count, token in runs:
        assert spelling.of(tenant)([token] * count) == vocabulary.decode([token] * count)


def test_long_runs_are_spelled_once_for_each_tenant_until_they_are_forgotten() -> None:
    vocabulary = Counting(BYTES)
    spelling = Spelling(vocabulary)
    long = [7] * module.SPELLED_TOKENS_MIN
    for tenant, asked in (("a", 1), ("a", 1), ("b", 2), ("a", 2)):
        assert spelling.of(tenant)(long) == bytes(long)
        assert vocabulary.asked == asked
    spelling.of("a")(long[1:])
    spelling.of("a")(long[1:])
    assert vocabulary.asked == 4
    spelling.forget()
    spelling.of("a")(long)
    assert vocabulary.asked == 5


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPELLED_BYTES_MAX", 2_000)
    vocabulary = Counting(BYTES)
    text_of = Spelling(vocabulary).of("a")
    for token in range(10):
        text_of([token] * 200)  # 1,000 bytes with their ids
    text_of([9] * 200)
    assert vocabulary.asked == 10
    text_of([0] * 200)
    assert vocabulary.asked == 11
