"""What is remembered of sequences that grow: the longest equal beginning, each owner's own, within its bounds."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zjournal.growing import ENDING, Beginning, Growing, common

ELEMENTS = st.lists(st.sampled_from("ab"), max_size=12)


def grown(growing: Growing[str], owner: str, elements: str, size: int = 1) -> int:
    """Looks a sequence up and puts it in; how long its known beginning was."""
    beginning = growing.longest(owner, elements)
    growing.put(owner, elements, elements, size, beginning)
    return beginning.length


@given(ELEMENTS, ELEMENTS, ELEMENTS)
def test_common_is_how_many_elements_are_equal_from_the_front(
    same: list[str], one: list[str], other: list[str]
) -> None:
    one, other = same + one, same + other
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common(one, other) == common(tuple(one), tuple(other)) == expected
    assert common("".join(one).encode(), "".join(other).encode()) == expected
    assert common(array("I", map(ord, one)), array("I", map(ord, other))) == expected


def test_common_finds_the_one_element_that_differs() -> None:
    numbers = list(range(1_000))
    for at in random.Random(3).sample(range(1_000), 100):
        assert common(numbers, [*numbers[:at], -1, *numbers[at + 1 :]]) == at


@given(st.lists(st.tuples(st.sampled_from("xy"), st.text("ab", max_size=9)), max_size=20))
def test_what_is_found_begins_as_long_as_it_says_and_belongs_to_who_asks(asked: list[tuple[str, str]]) -> None:
    growing: Growing[tuple[str, str]] = Growing(1_000)
    before: set[tuple[str, str]] = set()
    for owner, elements in asked:
        beginning = growing.longest(owner, elements)
        if beginning.value is not None:
            assert beginning.value in before and beginning.value[0] == owner
            assert common(beginning.value[1], elements) == beginning.length > 0
        else:
            assert beginning.length == 0
        growing.put(owner, elements, (owner, elements), 1, beginning)
        before.add((owner, elements))


def test_a_sequence_takes_the_place_of_what_it_has_grown_out_of() -> None:
    growing: Growing[str] = Growing(1_000)
    assert [grown(growing, "x", "abcdefgh"[:length]) for length in (3, 5, 8)] == [0, 3, 5]
    assert len(growing) == 1
    assert grown(growing, "x", "abcdefgh"[:-ENDING] + "ijkl") == 8 - ENDING, "its end asked for another answer"
    assert len(growing) == 1
    assert grown(growing, "x", "abc" + "xyz") == 3
    assert len(growing) == 2, "a fork is another sequence"
    assert growing.longest("x", "abcdefz").length == 6
    assert growing.longest("x", "abcxyz").length == 6


def test_of_many_that_part_late_the_one_that_goes_on_is_compared_first(monkeypatch: pytest.MonkeyPatch) -> None:
    growing: Growing[str] = Growing(1_000)
    shared = "s" * 20
    for fork in "abcdefgh":
        grown(growing, "x", shared + fork * 5)
    compared: list[object] = []
    monkeypatch.setattr("zjournal.growing.common", lambda one, other: compared.append(one) or common(one, other))
    assert growing.longest("x", shared + "c" * 9).value == shared + "c" * 5
    assert compared == [shared + "c" * 5]
    assert growing.longest("x", shared + "z").length == len(shared), "none goes on"
    assert len(compared) == 9


def test_a_short_one_that_goes_on_does_not_hide_a_long_one_that_parts_late() -> None:
    growing: Growing[str] = Growing(1_000)
    grown(growing, "x", "s" * 20 + "a" * 5)
    grown(growing, "x", "ssbbb")
    assert growing.longest("x", "s" * 20 + "c" * 5).length == 20


def test_a_beginning_of_what_is_remembered_takes_nobodys_place() -> None:
    growing: Growing[str] = Growing(1_000)
    grown(growing, "x", "abcdefgh")
    for elements in ("abcde", "abcdexy", "abcdefgh"):
        grown(growing, "x", elements)
        assert len(growing) == 1
        assert growing.longest("x", "abcdefgh").length == 8


def test_another_owner_finds_nothing_and_takes_nobodys_place() -> None:
    growing: Growing[str] = Growing(1_000)
    grown(growing, "x", "abcdefgh")
    assert growing.longest("y", "abcdefgh") == Beginning()
    assert grown(growing, "y", "abcdefghi") == 0
    assert len(growing) == 2
    assert growing.longest("x", "abcdefghi").length == 8
    with pytest.raises(AssertionError):
        growing.put("y", "abcdefghij", "", 1, growing.longest("x", "abcdefghij"))


def test_bytes_and_numbers_are_bounded_and_the_latest_used_stay() -> None:
    growing: Growing[str] = Growing(10, 4)
    for first in "abcd":
        grown(growing, "x", first * 5, 3)
    assert [growing.longest("x", first * 5).length for first in "abcd"] == [0, 5, 5, 5], "bytes"
    growing.longest("x", "bbbbb")
    grown(growing, "x", "eeeee", 3)
    assert [growing.longest("x", first * 5).length for first in "bcde"] == [5, 0, 5, 5]
    grown(growing, "x", "fffff", 11)
    assert growing.longest("x", "fffff").length == 0, "larger than all may be"
    for first in "ghijkl":
        grown(growing, "x", first * 5, 0)
    assert len(growing) == 4
    growing.clear()
    assert len(growing) == growing._bytes == 0
