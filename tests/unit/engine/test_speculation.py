"""Prompt lookup against a search through all tokens, and how the number of guesses follows from what proved right."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from zjournal.engine.decoding import speculation
from zjournal.engine.decoding.speculation import GRAM, MATCH_MAX, SCALAR_MAX, Index, PromptLookup


def brute_force(ids: list[int], most: int) -> list[int]:
    """Looks at every place: the longest match of the end wins, of equals the latest."""
    best = found = 0
    for place in range(len(ids) - 1, GRAM - 1, -1):
        length = 0
        while length < min(MATCH_MAX, place) and ids[place - 1 - length] == ids[len(ids) - 1 - length]:
            length += 1
        if length >= GRAM and length > best:
            best, found = length, place
    if not found:
        return []
    made = list(ids)
    for at in range(most):
        made.append(made[found + at])
    return made[len(ids) :]


def lookup(ids: list[int], most: int) -> list[int]:
    index = Index(len(ids))
    index.extend(ids)
    return index.continuation(ids, most)


# Few distinct places of a hash, so that the walk, which is bounded, sees all of them.
few = st.lists(st.integers(0, 49_151), min_size=0, max_size=40)
repeating = st.builds(lambda head, run, times, tail: head + run * times + tail, few, few, st.integers(0, 4), few)


@given(ids=repeating, again=st.integers(0, 60), most=st.integers(0, 12))
def test_it_finds_what_a_search_finds(ids: list[int], again: int, most: int) -> None:
    ids = ids + ids[again : again + 5]
    assert lookup(ids, most) == brute_force(ids, most)


@given(ids=repeating, cuts=st.lists(st.integers(0, 300), max_size=8), more=repeating)
def test_the_index_is_the_same_however_it_grew(ids: list[int], cuts: list[int], more: list[int]) -> None:
    ids = ids + more + ids
    grown = Index(len(ids))
    for cut in sorted(cuts):
        grown.extend(ids[: min(cut, len(ids))])
    grown.extend(ids)
    whole = Index(len(ids))
    whole.extend(ids)
    assert grown._before == whole._before
    assert grown._latest.tolist() == whole._latest.tolist()


def test_many_at_once_and_one_by_one_agree() -> None:
    ids = [token * token % 97 for token in range(4 * SCALAR_MAX)]
    bulk, scalar = Index(len(ids)), Index(len(ids))
    bulk.extend(ids)
    for end in range(len(ids) + 1):
        scalar.extend(ids[:end])
    assert bulk._before == scalar._before
    assert bulk._latest.tolist() == scalar._latest.tolist()


def test_the_longest_match_wins_and_of_equals_the_latest() -> None:
    assert lookup([1, 2, 3, 9, 0, 2, 3, 4, 0, 1, 2, 3, 8, 0, 0, 1, 2, 3], 2) == [8, 0]
    assert lookup([5, 1, 2, 3, 9, 7, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3], 2) == [9, 7]


def test_a_run_that_reaches_the_end_is_repeated() -> None:
    assert lookup([7, 7, 7, 7], 5) == [7] * 5
    assert lookup([1, 2, 3, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_guessed_where_nothing_repeats() -> None:
    assert lookup([], 4) == lookup([1, 2], 4) == lookup([1, 2, 3], 4) == lookup(list(range(200)), 4) == []
    assert lookup([1, 2, 3, 1, 2, 3], 0) == []


def test_a_walk_is_bounded_where_one_run_stands_everywhere() -> None:
    ids = [1, 2, 3, 4] + [1, 2, 3, 5] * (speculation.WALK_MAX + 1) + [9, 4, 1, 2, 3]
    seen: list[int] = []

    class Watched(list):
        def __getitem__(self, at):
            seen.append(at)
            return super().__getitem__(at)

    index = Index(len(ids))
    index.extend(ids)
    assert index.continuation(Watched(ids), 1) == [5]
    assert len(seen) < (speculation.WALK_MAX + 2) * (MATCH_MAX + GRAM) * 2


def test_a_long_prompt_is_indexed_in_bounded_steps(monkeypatch) -> None:
    monkeypatch.setattr(speculation, "BULK_MAX", 100)
    ids = [*range(150), *range(90, 140)]
    lookups = PromptLookup(4)
    assert lookups.propose("a", ids, len(ids), 4) == []  # place 140 comes with the next hundred
    assert lookups.propose("a", ids, len(ids), 4) == [140, 141, 142]


class TestLength:
    """Guesses double while all prove right, shrink to what did, and rest after failures."""

    IDS = array("I", list(range(30)) * 2)

    def propose(self, lookups: PromptLookup, most: int = 100) -> int:
        return len(lookups.propose("a", self.IDS, 30, most))

    def test_it_grows_to_its_limit(self) -> None:
        lookups = PromptLookup(12)
        lengths = []
        for _ in range(4):
            lengths.append(self.propose(lookups))
            lookups.verified("a", lengths[-1], lengths[-1])
        assert lengths == [3, 6, 12, 12]
        assert self.propose(lookups, most=2) == 2
        lookups.verified("a", 2, 2)
        assert self.propose(lookups) == 12  # a short guess that was all that was wanted teaches nothing

    def test_it_shrinks_to_what_was_right(self) -> None:
        lookups = PromptLookup(12)
        assert self.propose(lookups) == 3
        lookups.verified("a", 3, 1)
        assert self.propose(lookups) == 2

    def test_it_rests_ever_longer_and_wakes_at_success(self) -> None:
        lookups = PromptLookup(12)
        rests = []
        for _ in range(7):
            rests.append(0)
            while not self.propose(lookups):
                rests[-1] += 1
            lookups.verified("a", 1, 0)
        assert rests == [0, 1, 3, 7, 15, 31, 31]
        while not self.propose(lookups):
            pass
        lookups.verified("a", 1, 1)
        assert self.propose(lookups) > 0

    def test_requests_are_apart_and_forgotten(self) -> None:
        lookups = PromptLookup(4)
        assert lookups.propose("a", self.IDS, 30, 4) == [0, 1, 2]
        assert lookups.propose("b", array("I", range(40)), 30, 4) == []
        lookups.end("a")
        lookups.end("a")
        lookups.end("never")
        lookups.verified("a", 1, 0)
        assert lookups.propose("a", self.IDS[:20], 20, 4) == []
        assert list(lookups._requests) == ["b", "a"]
