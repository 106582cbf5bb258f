"""The prefix graph: what is matched, what is given up first, and what it costs."""

from array import array

import pytest

from zjournal.engine.cache.blocks import BLOCK_TOKENS, BlockPool
from zjournal.engine.cache.prefix import BLOCK_BYTES, GIVEN_UP_MAX, Node, PrefixGraph, shared_tokens


def packed(ids):
    return array("I", ids).tobytes()


class Kept:
    """A graph and its pool; `keep` puts a run of tokens in as a finished request does."""

    def __init__(self, blocks=64):
        self.pool = BlockPool(blocks)
        self.graph = PrefixGraph(self.pool)

    def keep(self, ids, namespace="n", request="r") -> Node:
        data = packed(ids)
        node = self.graph.match(namespace, b"").node
        self.graph.pin(node)
        root = node
        for at in range(0, len(data), BLOCK_BYTES):
            block = self.pool.take()
            node = self.graph.insert(node, data[at : at + BLOCK_BYTES], block)
            self.pool.release(block)
        self.graph.touch(node)
        self.graph.mark(node, (len(ids) - 1) % BLOCK_TOKENS + 1, request)
        self.graph.unpin(root)
        self.check()
        return node

    def cached(self, ids, namespace="n") -> int:
        return self.graph.match(namespace, packed(ids)).tokens

    def why(self, ids, namespace="n"):
        match = self.graph.match(namespace, packed(ids))
        return (match.tokens, *self.graph.why(match, packed(ids)))

    def evict(self):
        lost = self.graph.evict()
        self.check()
        return [state.request for state in lost]

    def check(self):
        self.pool.check(self.graph.check())


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 31, 32, 33, 40])
@pytest.mark.parametrize("common", [0, 1, 15, 16, 17, 30, 32, 39])
def test_a_match_is_exact_to_the_token_and_leaves_the_last_one(length, common):
    kept = Kept()
    kept.keep(range(length))
    prompt = [*range(common), *range(1000, 1010)]
    assert kept.cached(prompt) == min(length, common)
    assert kept.cached(range(length)) == length - 1
    assert kept.cached([*range(length), 7777]) == length


def test_the_longest_of_many_branches_is_found_wherever_it_sorts():
    kept = Kept(4096)
    for first in range(20):
        for second in range(15):
            kept.keep([1, first, second, 5, 5, 5])
    for first in range(20):
        assert kept.cached([1, first, 7, 5, 9, 9, 9]) == 4
        assert kept.cached([1, first, 99, 5]) == 2
    assert kept.cached([1, 99, 1, 1]) == 1


def test_namespaces_share_nothing():
    kept = Kept()
    kept.keep(range(40), namespace="a")
    assert kept.cached(range(40), namespace="b") == 0
    assert kept.cached(range(40), namespace="a") == 39


def test_a_namespace_that_keeps_nothing_is_forgotten():
    kept = Kept()
    for number in range(100):
        kept.keep([1, 2, 3], namespace=str(number))
        kept.evict()
    assert kept.graph._roots == {}


def test_growing_a_partial_block_takes_its_place_and_its_state():
    kept = Kept()
    kept.keep([1, 2, 3], request="short")
    kept.keep([1, 2, 3, 4, 5], request="long")
    assert kept.graph.nodes == 1
    assert kept.graph.states == 2
    assert sorted(kept.evict()) == ["long", "short"]
    assert kept.pool.free == kept.pool.count


def test_a_shorter_state_ends_inside_the_longer_one():
    kept = Kept()
    kept.keep(range(20), request="long")
    node = kept.keep(range(18), request="short")
    assert kept.graph.nodes == 2
    assert {state.tokens for state in node.states.values()} == {18, 20}


def test_the_same_state_again_replaces_the_first():
    kept = Kept()
    kept.keep([1, 2], request="first")
    kept.keep([1, 2], request="second")
    assert kept.graph.states == 1
    assert kept.evict() == ["second"]


def test_tails_go_before_shared_beginnings_and_old_before_new():
    kept = Kept()
    shared = [*range(32)]
    kept.keep([*shared, *range(100, 120)], request="a")
    kept.keep([*shared, *range(200, 220)], request="b")
    assert kept.cached([*shared, *range(100, 120), 1]) == 52
    assert kept.evict() == ["a"]  # its partial tail, 4 tokens
    assert kept.cached([*shared, *range(100, 120), 1]) == 48
    assert kept.evict() == []  # the block before it, which no state ended in
    assert kept.evict() == ["b"]
    kept.evict()
    assert kept.cached([*shared, 1]) == 32
    kept.evict()
    assert kept.cached([*shared, 1]) == 16


def test_use_protects():
    kept = Kept()
    node = kept.keep([1], request="a")
    kept.keep([2], request="b")
    kept.graph.touch(node)
    assert kept.evict() == ["b"]


def test_a_pinned_path_is_never_given_up():
    kept = Kept()
    node = kept.keep(range(32), request="pinned")
    other = kept.keep(range(500, 532), request="other")
    kept.graph.pin(node)
    kept.graph.touch(other)
    assert kept.graph.evictable == 2
    kept.evict()
    kept.evict()
    assert kept.graph.evictable == 0
    with pytest.raises(AssertionError):
        kept.graph.evict()
    kept.graph.unpin(node)
    assert kept.evict() == ["pinned"]


def test_a_hit_compares_tokens_even_if_all_hashes_collide(monkeypatch):
    """The children are found by the dictionary's own equality; a key that hashes alike must not be taken."""

    class Colliding(bytes):
        def __hash__(self):
            return 1

        def __eq__(self, other):
            return bytes(self) == bytes(other)

    kept = Kept()
    node = kept.keep(range(16))
    root = node.parent
    root.children = {Colliding(key): child for key, child in root.children.items()}
    assert root.children.get(Colliding(packed(range(1, 17)))) is None
    assert root.children.get(Colliding(packed(range(16)))) is node


def test_the_eviction_queue_does_not_grow_with_the_turns():
    kept = Kept(8)
    ids = []
    for turn in range(500):
        ids = [turn] if len(ids) > 60 else [*ids, turn]
        while kept.pool.free < 5:
            kept.evict()
        kept.keep(ids)
    assert len(kept.graph._leaves) <= kept.graph.nodes


@pytest.mark.parametrize(
    ("a", "b", "shared"), [([], [1], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([256], [0], 0)]
)
def test_shared_tokens(a, b, shared):
    assert shared_tokens(packed(a), packed(b)) == shared


# --- why a match is no longer -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 16, 17, 32, 40])
def test_a_longer_prompt_extends_the_state_that_it_met(length):
    kept = Kept()
    kept.keep(range(length), request="parent")
    assert kept.why([*range(length), 7, 8]) == (length, "extended", "parent")


@pytest.mark.parametrize("common", [1, 15, 16, 17, 31, 32])
def test_a_prompt_that_differs_forks_from_the_state_that_goes_on(common):
    kept = Kept()
    kept.keep(range(40), request="other")
    assert kept.why([*range(common), 1000, 1001]) == (common, "forked", "other")


def test_a_state_inside_a_longer_one_is_extended_and_not_forked_from():
    kept = Kept()
    kept.keep(range(40), request="long")
    kept.keep(range(16), request="at a block")
    kept.keep(range(35), request="in a block")
    assert kept.why([*range(16), 1000, 1001]) == (16, "extended", "at a block")
    assert kept.why([*range(35), 1000, 1001]) == (35, "extended", "in a block")
    assert kept.why([*range(36), 1000, 1001])[1] == "forked"


@pytest.mark.parametrize("length", [1, 16, 17, 40])
def test_the_same_prompt_is_met_whole_but_for_its_last_token(length):
    kept = Kept()
    kept.keep(range(length), request="before")
    assert kept.why(range(length))[:2] == (length - 1, "whole")
    assert kept.why([*range(length), 7]) == (length, "whole", "before")


def test_an_empty_namespace_is_cold():
    kept = Kept()
    kept.keep(range(40), namespace="a")
    assert kept.why(range(40), namespace="b") == (0, "cold", "")


def test_what_was_given_up_is_told_and_whose_state_it_was():
    kept = Kept()
    kept.keep(range(40), request="long")
    for left in (32, 16, 0):
        kept.evict()
        assert kept.why([*range(40), 7]) == (left, "evicted", "long"), "the state went with the first of its blocks"
    assert kept.why([1000, 1001]) == (0, "cold", ""), "nothing of this prompt was ever there"
    kept.keep(range(32), request="again")
    assert kept.why([*range(32), 1000, 1001]) == (32, "extended", "again")


def test_a_branch_that_was_given_up_is_told_only_to_the_prompts_that_lost_by_it():
    kept = Kept()
    kept.keep([*range(16), *range(100, 110)], request="a")
    kept.keep([*range(16), *range(200, 210)], request="b")
    assert kept.evict() == ["a"]
    assert kept.why([*range(16), *range(100, 105), 9, 9]) == (16, "evicted", "a")
    assert kept.why([*range(16), *range(200, 205), 9, 9]) == (21, "forked", "b")
    assert kept.why([*range(16), 100]) == (16, "whole", "b"), "its only lost token would have been computed anyway"


def test_the_memory_of_what_was_given_up_is_bounded():
    kept = Kept(4)
    for number in range(GIVEN_UP_MAX + 50):
        kept.keep([number, 1, 2], namespace=str(number), request=str(number))
        kept.evict()
    assert kept.why([0, 1, 2, 3], namespace="0") == (0, "cold", "")
    last = GIVEN_UP_MAX + 49
    assert kept.why([last, 1, 2, 3], namespace=str(last)) == (0, "evicted", str(last))


def _forget(kept, *requests):
    lost = kept.graph.forget(requests)
    kept.check()
    return sorted(state.request for state in lost)


def test_forgetting_takes_the_tail_that_only_this_request_needs():
    kept = Kept()
    kept.keep(range(40), request="one")
    kept.keep([*range(40), *range(100, 130)], request="two")
    kept.keep([*range(20), *range(200, 230)], request="three")
    before = kept.graph.nodes
    assert _forget(kept, "nobody") == []
    assert kept.graph.nodes == before
    assert _forget(kept, "three") == ["three"]
    assert kept.cached([*range(20), *range(200, 230)]) == 20
    assert _forget(kept, "one") == ["one"], "two goes through all of it"
    assert kept.cached([*range(40), *range(100, 130), 7]) == 70
    assert _forget(kept, "two") == ["two"]
    assert (kept.graph.nodes, kept.pool.free) == (0, 64)


def test_forgetting_cuts_a_block_behind_a_state_that_ends_inside_it():
    kept = Kept()
    kept.keep(range(36), request="short")
    kept.keep(range(44), request="long")
    assert _forget(kept, "long") == ["long"]
    assert kept.cached(range(50)) == 36
    kept.keep([*range(36), *range(90, 95)], request="other")
    kept.keep(range(44), request="again")
    assert _forget(kept, "again") == ["again"]
    assert kept.cached([*range(36), *range(90, 95), 7]) == 41
    assert _forget(kept, "other", "short") == ["other", "short"]
    assert kept.graph.nodes == 0


def test_forgetting_spares_what_runs_and_what_was_given_up_is_forgotten_too():
    kept = Kept()
    node = kept.keep(range(32), request="one")
    kept.graph.pin(node)
    assert _forget(kept, "one") == ["one"]
    assert kept.cached([*range(32), 7]) == 32
    kept.graph.unpin(node)
    kept.evict()
    kept.graph.forget(["one"])
    assert kept.why([*range(32), 7])[1] != "evicted"
