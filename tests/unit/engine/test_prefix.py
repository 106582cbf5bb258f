"""The prefix graph: what is matched, what is given up first, and what it costs."""

from array import array

import pytest

from zjournal.engine.cache.blocks import BLOCK_TOKENS, BlockPool
from zjournal.engine.cache.prefix import BLOCK_BYTES, Node, PrefixGraph, shared_tokens


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
    assert len(kept.graph._queue) < 100


@pytest.mark.parametrize(
    ("a", "b", "shared"), [([], [1], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([256], [0], 0)]
)
def test_shared_tokens(a, b, shared):
    assert shared_tokens(packed(a), packed(b)) == shared
